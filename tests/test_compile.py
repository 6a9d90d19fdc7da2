"""The backend "pycuda_conv" of torch.compile: what it fuses, and that it gives torch's numbers whatever a forward does or is changed to.

Every case runs in light mode and under AOTAutograd, which is all of inductor's way but its code; the results, the gradients, the buffers
and the inputs are compared with those of the model that is not compiled.
"""

import copy
import functools
import logging
import math
import operator
import os
import random
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest
import torch
from reference import by_turns
from torch import nn
from torch.nn import functional as F

import pycuda_conv.nn as pn
from pycuda_conv.nn import compiler, linear

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
HOWS = "light", "operators"
#: Whether each case is tried on torch's and on a converted model, in both modes, evaluated and trained: three times as many compilations.
EVERY_WAY = "PYCUDA_CONV_TESTS_EVERY_WAY" in os.environ
#: Converted models too, which reach the rewrite by another operator.
WAYS = pytest.mark.parametrize(
    "kind, how",
    [("torch's", "light"), ("torch's", "operators"), ("converted", "light"), ("converted", "operators")][: 4 if EVERY_WAY else 3]
)


def trainings(kind, how):
    """Evaluation and training for torch's own model in light mode; one of them for the other ways, for compilations take long."""
    return (False, True) if EVERY_WAY or (kind, how) == ("torch's", "light") else (how == "operators",)


COARSE = []  # not empty in a test whose values are rounded to 16 bits
GRAPHS = []
FOUND = []  # what the rewrite did to each graph since the last reset


@pytest.fixture(autouse=True)
def afresh(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch._dynamo.reset()
    FOUND.clear()
    COARSE.clear()
    GRAPHS.clear()
    compiler._graphs.clear()
    yield
    torch._dynamo.reset()


def backend(how, gm, example_inputs):
    """The backend; a fault of the rewrite is raised here, and AOTAutograd stands for inductor."""
    nested = any(isinstance(child, torch.fx.GraphModule) for child in gm.children())
    light = how == "light" and not nested
    FOUND.append(compiler.rewritten(gm, example_inputs, how, light=light, raises=True))
    GRAPHS.append(gm)
    return gm.forward if light else torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs)


BACKENDS = {how: functools.partial(backend, how) for how in HOWS}  # torch shares the graphs of one backend


def compiled(model, how="light", **more):
    return torch.compile(model, backend=BACKENDS[how], **more)


def chains():
    """The chains of all graphs since the last reset."""
    return [steps for graph in FOUND for found in graph for steps in found.fused]


def convolutions():
    """The number of convolutions in all graphs since the last reset."""
    return sum(len(found.fused) + len(found.alone) + len(found.left) for graph in FOUND for found in graph)


def close(a, b, tolerance=2e-3):
    tolerance = 0.1 if COARSE else tolerance
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(close(p, q, tolerance) for p, q in zip(a, b, strict=True))
    return a.shape == b.shape and a.dtype is b.dtype and torch.allclose(a.double(), b.double(), atol=tolerance, rtol=tolerance)


def images(*shape, channels_last=False, where="cpu", dtype=torch.float32):
    x = torch.randn(*(shape or (2, 4, 10, 10)), device=where, dtype=dtype)
    return x.to(memory_format=torch.channels_last) if channels_last else x


def alike(make, how, train, gradients, x=None, steps=2):
    """Compare a model with its compiled copy; the chains of the compiled one."""
    torch._dynamo.reset()
    FOUND.clear()
    x = images() if x is None else x
    a = make().to(x.device).train(train)
    b = copy.deepcopy(a)
    f, xs = compiled(b, how), [x.clone(), x.clone()]
    if gradients == "input":
        xs = [one.requires_grad_() for one in xs]
    with torch.set_grad_enabled(bool(gradients)):
        for _ in range(steps):
            ya, yb = a(xs[0]), f(xs[1])
            assert ya.stride() == yb.stride() and ya.requires_grad == yb.requires_grad
            assert close(ya, yb)
            assert close(xs[0], xs[1])
            if gradients and ya.requires_grad:
                # oneDNN's gradient by a channels-last 1x1 filter with a stride is wrong on CPUs without AVX-512
                with torch.backends.mkldnn.flags(enabled=False, allow_tf32=False):
                    ya.double().square().mean().backward()
                yb.double().square().mean().backward()
                for p, q in zip((xs[0], *a.parameters()), (xs[1], *b.parameters()), strict=True):
                    assert (p.grad is None) == (q.grad is None)
                    if p.grad is not None and p.grad.abs().max() > 1e-5:
                        assert close(p.grad, q.grad)
    for p, q in zip(a.buffers(), b.buffers(), strict=True):
        assert close(p, q)
    return chains()


# ---- networks


def conv_bn(i, o, n=3, **more):
    return nn.Sequential(nn.Conv2d(i, o, n, **more), nn.BatchNorm2d(o))


def moved(model):
    """The model with statistics and parameters of batch norms that are not those of the beginning."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for tensor in (module.running_mean, module.running_var, module.weight, module.bias):
                if tensor is not None:
                    tensor.data.uniform_(0.5, 1.5)
    return model


class Basic(nn.Module):
    def __init__(self, i=4, o=4, stride=1):
        super().__init__()
        self.a, self.b = conv_bn(i, o, stride=stride, padding=1, bias=False), conv_bn(o, o, padding=1, bias=False)
        self.down = conv_bn(i, o, 1, stride=stride, bias=False) if stride > 1 else None
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.b(self.relu(self.a(x)))
        y += x if self.down is None else self.down(x)
        return self.relu(y)


class BatchNormAct(nn.BatchNorm2d):  # as timm has it
    def __init__(self, n):
        super().__init__(n)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
        return self.act(
            F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps)
        )


class SameConv(nn.Conv2d):
    """Pads by the input's size, as TensorFlow does, and timm."""

    def forward(self, x):
        pads = []
        for n, k, s, d in zip(x.shape[:1:-1], self.kernel_size[::-1], self.stride[::-1], self.dilation[::-1], strict=True):
            pad = max((math.ceil(n / s) - 1) * s + (k - 1) * d + 1 - n, 0)
            pads += pad // 2, pad - pad // 2
        return F.conv2d(F.pad(x, pads), self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class UNet(nn.Module):
    def __init__(self, c=4):
        super().__init__()

        def two(i, o):
            return nn.Sequential(conv_bn(i, o, padding=1), nn.ReLU(True), conv_bn(o, o, padding=1), nn.ReLU(True))

        self.a, self.b, self.up = two(4, c), two(c, 2 * c), nn.ConvTranspose2d(2 * c, c, 2, 2)
        self.c, self.last = two(2 * c, c), nn.Conv2d(c, 2, 1)

    def forward(self, x):
        a = self.a(x)
        return self.last(self.c(torch.cat([a, self.up(self.b(F.max_pool2d(a, 2)))], 1)))


class Squeeze(nn.Module):
    def __init__(self, c=4):
        super().__init__()
        self.a, self.b = nn.Conv2d(c, 2, 1), nn.Conv2d(2, c, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.b(F.silu(self.a(x.mean((2, 3), keepdim=True)), inplace=True)))


class Mixer(nn.Module):
    """A block of ConvNeXt."""

    def __init__(self, c=4):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(c, c, 7, padding=3, groups=c), nn.LayerNorm(c)
        self.a, self.b = nn.Linear(c, 4 * c), nn.Linear(4 * c, c)
        self.scale = nn.Parameter(torch.rand(c, 1, 1))

    def forward(self, x):
        y = self.b(F.gelu(self.a(self.norm(self.conv(x).permute(0, 2, 3, 1))))).permute(0, 3, 1, 2)
        return x + self.scale * y


ZOO = {
    "resnet": (lambda: nn.Sequential(Basic(), Basic(4, 8, 2)), 5, 5),
    "timm": (lambda: nn.Sequential(SameConv(4, 4, 3, 2), BatchNormAct(4)), 1, 1),
    "unet": (UNet, 6, 6),
    "mbconv": (lambda: nn.Sequential(conv_bn(4, 4, padding=1, groups=4, bias=False), nn.SiLU(True), Squeeze(), conv_bn(4, 4, 1)), 3, 2),
    "1d": (lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.ConvTranspose1d(4, 4, 3, 2)), 1, 1),
    "3d": (lambda: nn.Sequential(nn.Unflatten(1, (4, 1)), nn.Conv3d(4, 4, (1, 3, 3)), nn.BatchNorm3d(4), nn.LeakyReLU(0.2)), 1, 1),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(4, 4, 3, 2, 1, 1), nn.BatchNorm2d(4), nn.ReLU6()), 1, 0),
    "activations": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.GELU("tanh"), nn.Conv2d(4, 4, 1), nn.Hardswish(), nn.Conv2d(4, 4, 1), nn.ReLU6(True)), 3, 0),
    "convnext": (Mixer, 0, 0),
    "dropout": (lambda: nn.Sequential(conv_bn(4, 4), nn.Dropout(0.0), nn.ReLU()), 1, 1),
    "sync": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.SyncBatchNorm(4), nn.ReLU()), 1, None),
}


@pytest.mark.parametrize(("name", "how"), by_turns(ZOO, HOWS))
def test_networks(name, how, where):
    make, evaluated, trained = ZOO[name]
    for train in (False, True):
        if train and trained is None:
            continue  # torch's refuses to train it in one process
        for channels_last in (False, True) if how == "light" or where == "cuda" else (train,):
            found = alike(lambda: moved(make()), how, train, train, images(channels_last=channels_last, where=where))
            assert len(found) == (trained if train else evaluated), found
            assert not any(found.left for graph in FOUND for found in graph)


def test_names_of_a_chain():
    alike(lambda: nn.Sequential(Basic(4, 8, 2)), "light", False, False)
    assert [" + ".join(steps) for steps in chains()] == ["0.a.0 + 0.a.1 + 0.relu", "0.b.0 + 0.b.1 + 0 + 0.relu", "0.down.0 + 0.down.1"]


# ---- traps: what must end a chain


class Of(nn.Module):
    """Two convolutions and two batch norms, and a forward that is given."""

    def __init__(self, call, change=None):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.Conv2d(4, 4, 3, padding=1)
        self.b1, self.b2, self.call = nn.BatchNorm2d(4), nn.BatchNorm2d(4), call
        moved(self)
        if change:
            change(self)

    def forward(self, x):
        return self.call(self, x)


def between(write):
    """A forward that writes to something between a convolution and its norm."""

    def call(s, x):
        y = s.c1(x)
        write(s, x)
        return F.relu(s.b1(y))

    return call


def view_written(s, x):
    v = x.view(-1)
    y = s.c1(x)
    v.add_(1)
    return F.relu(s.b1(y))


def norm_written(s, x):
    y = s.b1(s.c1(x))
    s.b1.running_mean.add_(1.0)
    return F.relu(y)


def twice(s, x):
    y = s.c1(x)
    return F.relu(s.b1(y)) + y


def statistics_read(s, x):
    a = s.b1(s.c1(x))
    m = s.b1.running_mean.sum()
    return F.relu(a) + m


def count_read(s, x):
    y = s.c1(x)
    before = s.b1.num_batches_tracked * 1.0
    return F.relu(s.b1(y)) + before + s.b1.num_batches_tracked


def summed(read):
    """A forward that adds a block's result to its residual in place, and what `read` has of the residual is read afterwards."""

    def call(s, x):
        i = x * 1
        j = read(i)
        i += s.b1(s.c1(x))
        return F.relu(i) + 1e-3 * j.sum()

    return call


def residual_spent(s, x):
    i = x * 1
    i += s.b1(s.c1(x))
    return F.relu(i)


def residual_of_the_caller(s, x):
    y = s.b1(s.c1(x))
    x += y
    return F.relu(x)


def residual_rewritten(s, x):
    i = x * 2
    y = s.c1(x)
    i.add_(1)
    z = s.b1(y) + i
    i.mul_(3)
    return F.relu(z) + i


def noted(s, x):
    """As torchvision's StochasticDepth notes its use, between a block and the sum with the block's input."""
    y = s.b1(s.c1(x))
    torch._C._log_api_usage_once("pycuda_conv.tests")
    y += x
    return F.relu(y)


def doubled(s, x):
    y = s.b1(s.c1(x))
    return F.relu(y + y)


def no_grad(s, x):
    with torch.no_grad():
        y = s.c1(x)
    return F.relu(s.b1(y)) + s.b2(s.c2(x))


def autocast(s, x):
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        y = s.c1(x)
    return F.relu(s.b1(y.float()))


def autocast_whole(s, x):
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return F.relu(s.b1(s.c1(x))).float()


def interleaved(s, x):
    a, b = s.c1(x), s.c2(x)
    a, b = s.b1(a), s.b2(b)
    a += b
    return F.relu_(a)


def simple(s, x):
    return F.relu(s.b1(s.c1(x)))


def padded(s, x):
    return F.relu(s.b1(F.conv2d(F.pad(x, (2, 1, 0, 3)), s.c1.weight, padding=1)))


def padded_then_written(s, x):
    y = F.pad(x, (1, 1, 1, 1))
    x.mul_(2)
    return F.relu(s.b1(F.conv2d(y, s.c1.weight))) + x


def functional(s, x):
    y = torch.batch_norm(torch.convolution(x, s.c1.weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), s.b1.weight, s.b1.bias,
                         s.b1.running_mean, s.b1.running_var, s.b1.training, 0.1, 1e-5, False)
    return y.add(x).relu()


def clamped(s, x):
    s.b1.weight.detach()[0] = 0.0
    s.b1.bias.detach()[0] = 0.0
    return s.b1(s.c1(x)).clamp(min=0.0)


def statistics_frozen(s, x):
    s.b1.eval()
    return F.relu(s.b1(s.c1(x)) + x)


def frozen(s):
    for p in s.b1.parameters():
        p.requires_grad_(False)


#: For each: its forward, a change of the model, chains in evaluation without gradients, or their steps, chains in training. None: not run.
#: Sums in place belong to a chain if nothing else reads what is written to any more, under any name.
TRAPS = {
    "written": (between(lambda s, x: x.mul_(2)), None, 0, None), "view written": (view_written, None, 0, None),
    "entry written": (between(lambda s, x: operator.setitem(x, 0, 3.0)), None, 0, None),
    "written by out=": (between(lambda s, x: torch.add(x, 1.0, out=x)), None, 0, None),
    "weight written": (between(lambda s, x: s.c1.weight.detach().mul_(1.5)), None, 0, None),
    "norm written": (norm_written, None, 1, None), "norm written before": (between(lambda s, x: s.b1.running_mean.add_(1.0)), None, 0, 0),
    "read twice": (twice, None, 0, 0),
    "one norm for two": (lambda s, x: F.relu(s.b1(s.c1(x)) + s.b1(s.c2(x))), None, 2, 2), "statistics read": (statistics_read, None, 1, 1),
    "count read": (count_read, None, 1, 1),
    "residual spent": (residual_spent, None, (4,), 1), "residual spent after a view": (summed(lambda i: i.view(-1)[:3] + 1), None, (4,), 1),
    "residual of the caller": (residual_of_the_caller, None, (2,), None), "residual read": (summed(lambda i: i), None, (2,), 1),
    "residual gets the sum": (summed(lambda i: i.view(-1)), None, (2,), 1), "residual rewritten": (residual_rewritten, None, 1, 1), "doubled": (doubled, None, 1, 1),
    "noted": (noted, None, (4,), 1),
    "alpha": (lambda s, x: F.relu(torch.add(s.b1(s.c1(x)), x, alpha=2)), None, 1, 1), "no_grad": (no_grad, None, 2, 1),
    "autocast": (autocast, None, 0, 0), "whole in autocast": (autocast_whole, None, 1, 1),
    "interleaved": (interleaved, None, 2, None),
    "broadcast": (lambda s, x: F.relu(s.b1(s.c1(x)) + x.mean((2, 3), keepdim=True)), None, 1, 1), "padded": (padded, None, 1, 1),
    "padded by ones": (lambda s, x: F.relu(s.b1(F.conv2d(F.pad(x, (1, 1, 1, 1), value=1.0), s.c1.weight))), None, 1, 1),
    "padded, then written": (padded_then_written, None, 1, None),
    "mirrored": (lambda s, x: F.conv2d(F.pad(x, (2, 1, 0, 3), mode="reflect"), s.c1.weight), None, 1, 1),
    "filled with ones": (lambda s, x: F.conv2d(F.pad(x, (1, 1, 1, 1), value=1.0), s.c1.weight), None, 1, 1),
    "mirrored and padded": (lambda s, x: F.conv2d(F.pad(x, (2, 1, 0, 3), mode="reflect"), s.c1.weight, padding=1), None, 0, 0),
    "cropped": (lambda s, x: F.relu(s.b1(F.conv2d(F.pad(x, (-1, -1, -1, -1)), s.c1.weight))), None, 1, 1),
    "functional": (functional, None, 1, 1), "clamped": (clamped, None, 1, None),
    "momentum None": (simple, lambda s: setattr(s.b1, "momentum", None), 1, 0), "frozen parameters": (simple, frozen, 1, 1), "frozen statistics": (statistics_frozen, None, 1, 1),
    "no statistics": (simple, lambda s: setattr(s, "b1", nn.BatchNorm2d(4, affine=False, track_running_stats=False)), 1, 1),
    "viewed": (lambda s, x: F.relu(s.b1(s.c1(x))).view(x.shape[0], -1).t(), None, 1, 1),
}  # fmt: skip


@pytest.mark.parametrize("name, how", by_turns(TRAPS, HOWS))
def test_what_ends_a_chain(name, how):
    call, change, evaluated, trained = TRAPS[name]
    if name == "whole in autocast":
        COARSE.append(name)
    found = alike(lambda: Of(call, change), how, False, False)
    assert (len(found) if isinstance(evaluated, int) else tuple(map(len, found))) == evaluated, found
    if trained is not None:
        found = alike(lambda: Of(call, change), how, True, True)
        assert len(found) == trained, found
        if how == "light":
            alike(lambda: Of(call, change), how, True, False)
            alike(lambda: Of(call, change), how, False, "input")


@pytest.mark.parametrize("how", HOWS)
def test_inputs_that_share_memory(how):
    """Dynamo does not guard on which inputs share memory: a graph made for separate ones runs with views of one another."""

    def call(x, y):
        z = F.conv2d(x, w)
        y.add_(1)
        return F.relu(F.batch_norm(z, mean, var))

    w, mean, var = torch.randn(3, 4, 3, 3), torch.zeros(3), torch.ones(3)
    f = compiled(call, how)
    x, y = images(), images(4, 10, 10)
    assert close(f(x.clone(), y.clone()), call(x.clone(), y.clone()))
    a, b = x.clone(), x.clone()
    assert close(f(a, a[0]), call(b, b[0])) and close(a, b)


# ---- what a forward does, what is changed after the first call


def prepared(kind, model):
    return pn.convert(model) if kind == "converted" else model


class Changing(nn.Module):
    """Its forward writes to a buffer, a counter and a list, and reads what is changed between calls."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.calls = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), 0
        self.seen, self.steps, self.known, self.gain = [], [], {"k": 1.0}, 1.0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        y = F.relu(self.norm(self.conv(x)))
        self.calls += 1
        self.count += 1
        self.seen.append(y)
        for step in self.steps:
            y = step(y)
        return y * self.gain * self.known["k"] + self.count


CHANGES = {
    "nothing": lambda m: None, "attribute": lambda m: setattr(m, "gain", 2.0), "list": lambda m: m.steps.append(torch.tanh),
    "dict": lambda m: m.known.update(k=4.0), "buffer": lambda m: m.count.add_(1.0), "child": lambda m: setattr(m, "norm", nn.Identity()),
    "mode": lambda m: m.train(not m.training),
}  # fmt: skip


@pytest.mark.parametrize("way, of", by_turns(CHANGES, WAYS.args[1]), ids=str)
def test_what_a_forward_writes_and_what_it_reads_is_changed(way, of):
    kind, how = of
    x = images(2, 3, 6, 6)
    for train in trainings(kind, how):
        torch._dynamo.reset()
        FOUND.clear()
        a = Changing().train(train)
        b = copy.deepcopy(a)
        f = compiled(prepared(kind, b), how)
        with torch.set_grad_enabled(train):
            assert close(f(x), a(x))
            for m in (a, b):
                CHANGES[way](m)
            assert close(f(x), a(x)) and close(f(x), a(x))
        assert (a.calls, len(a.seen), a.norm.training) == (b.calls, len(b.seen), b.norm.training) and close(a.count, b.count)
        assert len(chains()) == convolutions() - (way == "child" and train) > 0


#: Ways to write to a parameter, or to put another in its place.
TO_WRITE = (
    lambda p, noise: p.data.mul_(0.5).add_(noise), lambda p, noise: np.add(p.detach().numpy(), noise.numpy(), out=p.detach().numpy()),
    lambda p, noise: setattr(p, "data", 0.5 * p.data + noise), lambda p, noise: torch.no_grad()(p.copy_)(noise),
    lambda p, noise: torch._foreach_lerp_([p.data], [noise], 0.3), lambda p, noise: p.data.set_(noise.clone()),
)  # fmt: skip


@WAYS
def test_parameters_and_statistics_are_written(kind, how):
    a = moved(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())).eval()
    b, x = copy.deepcopy(a), images(2, 3, 6, 6)
    f = compiled(prepared(kind, b), how)
    with torch.no_grad():
        assert close(f(x), a(x))
        for way in TO_WRITE:
            for p, q in zip((*a.parameters(), *a.buffers()), (*b.parameters(), *b.buffers()), strict=True):
                if p.is_floating_point():
                    noise = torch.rand_like(p)
                    way(p, noise), way(q, noise)
            assert close(f(x), a(x), 1e-4), way
    assert len(chains()) == len(FOUND) == 1


@WAYS
def test_methods_are_replaced(kind, how):
    def tiles(self, x, weight, bias):
        return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), weight, bias)

    def double(self, x):
        return 2 * nn.Conv2d.forward(self, x)

    x = images(2, 3, 6, 6)
    for name, method in (("_conv_forward", tiles), ("forward", double)):
        for when in ("before", "after"):
            for train in trainings(kind, how):
                torch._dynamo.reset()
                FOUND.clear()
                a = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()).train(train)
                b = copy.deepcopy(a)
                if when == "before":
                    setattr(b[0], name, types.MethodType(method, b[0]))
                f = compiled(prepared(kind, b), how)
                with torch.set_grad_enabled(train):
                    if when == "after":
                        f(x), a(x)
                        setattr(b[0], name, types.MethodType(method, b[0]))
                    setattr(a[0], name, types.MethodType(method, a[0]))
                    assert close(f(x), a(x)) and close(f(x), a(x))
                assert len(chains()) == len(FOUND) - (name == "forward")


class Twice(nn.Module):
    def forward(self, w):
        return 2 * w


# ---- gradients


def test_gradients_of_a_block_s_input_meet_in_its_first_layer(monkeypatch):
    from pycuda_conv.nn import targets

    passed, genuine = [], targets.training_of
    monkeypatch.setattr(targets, "training_of", lambda *given: (passed.append(given[-1] is True), genuine(*given))[1])
    for channels_last in (False, True):
        passed.clear()
        alike(lambda: nn.Sequential(Basic(), Basic(4, 4), Basic(4, 8, 2)), "light", True, "input", images(channels_last=channels_last))
        assert passed.count(True) == 2  # not of the caller's own input, whose memory a statistic may share

    def read_by_others(s, x):
        values = [x * 1]
        for conv, norm in ((s.c1, s.b1), (s.c2, s.b2)):
            values.append(F.relu(norm(conv(values[-1]))))
        return sum(values)

    def written(s, x):
        x = x * 1
        y = F.relu(s.b1(s.c1(x)))
        x.mul_(1)
        return x + y

    for call, gradients, count in ((read_by_others, "input", 2), (written, False, 0)):
        passed.clear()
        alike(lambda call=call: Of(call), "light", True, gradients)
        assert passed.count(True) == count


@pytest.mark.parametrize("train", [True, False])
def test_second_derivatives_in_light_mode(train):
    a = moved(nn.Sequential(Basic(), nn.SiLU())).double().train(train)
    b, given = copy.deepcopy(a), images(dtype=torch.float64)
    found = []
    for m, f in ((a, a), (b, compiled(b))):
        x = given.clone().requires_grad_()
        (d,) = torch.autograd.grad(f(x).square().sum(), x, create_graph=True)
        d.square().sum().backward()
        found.append([x.grad, *(p.grad for p in m.parameters())])
    assert len(chains()) == 2
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


# ---- random graphs


class Random(nn.Module):
    """Random pieces of chains with random writers and readers between. Chains draw on the same parameters more than once."""

    def __init__(self, seed, writes):
        super().__init__()
        draw = random.Random(seed)
        self.numbers, self.writes = [draw.random() for _ in range(400)], writes  # torch traces no generator
        self.convs = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1, bias=i % 2 == 0) for i in range(3)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(4) for _ in range(3)])
        self.scales = nn.ParameterList([torch.rand(4) + 0.5, torch.rand(4, 1, 1) + 0.5])
        moved(self)

    def forward(self, x):
        numbers, values = iter(self.numbers), [x]

        def below(n):
            return int(next(numbers) * n)

        def choice(options):
            return options[below(len(options))]

        for _ in range(14):
            step, y = below(10 if self.writes else 8), choice(values[-3:])
            if step < 3:
                conv = choice(self.convs)
                if next(numbers) < 0.3:
                    y = F.pad(y, (1, 1, 1, 1), mode=choice(["constant", "reflect", "circular", "replicate"]))
                    y = choice(values).relu_() + y[:, :, 1:-1, 1:-1] if self.writes and next(numbers) < 0.2 else F.conv2d(
                        y, conv.weight, conv.bias
                    )
                else:
                    y = conv(y)
                for _ in range(below(3)):  # what stands between a convolution and its norm
                    other = choice(values)
                    kind = below(4 if self.writes else 2)
                    if kind == 0:
                        values.append(other + 1)
                    elif kind == 1:
                        values.append(choice(self.norms).running_mean.view(1, -1, 1, 1) + other)
                    elif kind == 2:
                        other.mul_(0.9)
                        choice(self.scales).detach().mul_(1.01)
                    else:
                        choice(self.norms).running_mean.detach().mul_(1.01)
                if next(numbers) < 0.7:
                    y = choice(self.norms)(y)
                elif next(numbers) < 0.7:
                    y = y * choice(self.scales).reshape(1, -1, 1, 1)
                    y = y + choice(self.scales).view(-1, 1, 1) if next(numbers) < 0.5 else y
                if next(numbers) < 0.4:
                    other = choice(values)
                    y = y + other if next(numbers) < 0.5 else other + y
                if next(numbers) < 0.6:
                    act = choice([F.relu, F.silu, lambda y: F.relu(y, inplace=True), F.relu6, F.gelu])
                    y = act(y) if next(numbers) < 0.7 else act(y.flatten(2).transpose(1, 2)).transpose(1, 2).view(y.shape)
                values.append(y)
            elif step < 4:
                values.append(F.avg_pool2d(y, 3, 1, 1))
            elif step < 5:
                values.append(y.clone())
            elif step < 6:
                values.append(y * choice(values))
            elif step < 7:
                values.append(y.flip(0) if next(numbers) < 0.5 else y.roll(1, 2))
            elif step < 8:
                with torch.no_grad():
                    values.append(choice(self.convs)(y))
            elif step < 9:
                y.add_(0.1)
            else:
                y[:, 0] = 0.5
        return sum(v.mean((2, 3)) for v in values[-4:]) / 10


@pytest.mark.parametrize("seed, how", by_turns(range(10), HOWS))
def test_random_graphs(seed, how):
    writes = seed % 2 == 0
    channels_last = seed % 4 > 1
    alike(lambda: Random(seed, writes), how, False, False, images(channels_last=channels_last))
    assert len(FOUND) == 1 and convolutions() > 0
    if not writes:  # torch refuses most writes to what a gradient needs
        alike(lambda: Random(seed, False), how, True, True, images(channels_last=channels_last))


# ---- where results lie


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_results_lie_as_torch_s(ndim, transposed, where):
    kind = getattr(nn, f"Conv{'Transpose' if transposed else ''}{ndim}d")
    last = {2: torch.channels_last, 3: torch.channels_last_3d}.get(ndim)
    forms = [torch.contiguous_format, *([last] if last else [])]
    norm = getattr(nn, f"BatchNorm{ndim}d")
    for of_x in forms:
        for of_weight in forms:
            x = torch.randn(2, 4, *(5, 6, 7)[:ndim], device=where).to(memory_format=of_x)
            for how in HOWS:
                for tail in ([], [norm(8), nn.ReLU()]):
                    torch._dynamo.reset()
                    m = nn.Sequential(kind(4, 8, 3), *tail).eval().to(where).to(memory_format=of_weight)
                    with torch.no_grad():
                        f = compiled(lambda x, m=m: m(x).transpose(0, 1), how)
                        got, expected = f(x), m(x).transpose(0, 1)
                        assert got.stride() == expected.stride() and close(got, expected)


class Sum(nn.Module):
    """The sum's size is that of a strided result, and convolutions read the sum."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = conv_bn(3, 8, stride=2, padding=1), conv_bn(8, 8, 1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x):
        x = self.first(x)
        return self.last(x + self.second(x))


@pytest.mark.parametrize("how", HOWS)
def test_strides_tell_how_values_of_symbolic_sizes_lie(how, monkeypatch, where):
    """Torch 2.11 says of a sum that it is not contiguous in any order, if its sizes are symbols; its strides are right."""
    m = moved(Sum()).eval().to(where).to(memory_format=torch.channels_last)
    x = images(4, 3, 33, 35, channels_last=True, where=where)
    for axis in (0, 2, 3):
        torch._dynamo.mark_dynamic(x, axis)

    def rewritten(gm, inputs):
        own = torch._subclasses.FakeTensor.is_contiguous
        with monkeypatch.context() as patch:
            def is_contiguous(x, **more):
                return own(x, **more) and not any(isinstance(n, torch.SymInt) for n in x.stride())

            patch.setattr(torch._subclasses.FakeTensor, "is_contiguous", is_contiguous, raising=False)
            return backend(how, gm, inputs)

    with torch.no_grad():
        got, expected = torch.compile(m, backend=rewritten)(x), m(x)
    assert close(got, expected) and got.stride() == expected.stride()
    ((found,),) = FOUND
    assert len(found.fused) == 2 and len(found.alone) == 1 and not found.left
    assert not any(node.target == "contiguous" for gm in GRAPHS for node in gm.graph.nodes)


# ---- sizes


SIZES = (2, 24, 24), (3, 24, 24), (5, 24, 24), (5, 48, 48), (4, 36, 60), (7, 60, 36), (1, 27, 27), (6, 47, 41)


@pytest.mark.turns
@pytest.mark.parametrize("mode", ["light", "default"])
@pytest.mark.parametrize("train", [False, True])
def test_number_of_graphs(train, mode, monkeypatch):
    """Eight sizes make at most four graphs by themselves, and two where the axes are marked: one, and another for single images."""
    if mode == "default":
        monkeypatch.setattr(
            compiler, "_compiled_by_inductor", lambda gm, inputs, mode, options: torch._dynamo.lookup_backend("aot_eager")(gm, inputs)
        )
    parts = (
        conv_bn(3, 8), nn.ReLU(), nn.MaxPool2d(3, 2, 1), Basic(8, 8, 2), nn.Conv2d(8, 8, 3, 2, 1), nn.SiLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 3),
    )
    base = moved(nn.Sequential(*parts)).train(train)
    for most, compile_ in ((4, lambda m: torch.compile(m, backend=pn.backend, mode=mode)), (2, lambda m: pn.compile(m, mode))):
        torch._dynamo.reset()
        compiler._graphs.clear()
        theirs = copy.deepcopy(base)
        ours = copy.deepcopy(base)
        f = compile_(ours)
        with torch.set_grad_enabled(train):
            for size in SIZES:
                x = torch.randn(size[0], 3, *size[1:])
                assert close(f(x), theirs(x))
        graphs = pn.report(ours).graphs
        assert len(graphs) <= most and all(len(graph.fused) == (4 if train else 5) for graph in graphs), [str(g) for g in graphs]


def test_one_graph_serves_all_models_of_a_class():
    made = [moved(nn.Sequential(conv_bn(4, 4), nn.ReLU())).eval() for _ in range(4)]
    with torch.no_grad():
        for model in made:
            x = images()
            assert close(compiled(model)(x), model(x))
    assert len(FOUND) == 1
    compiler._graphs.clear()
    with torch.no_grad():
        for _ in range(4):
            theirs = moved(Basic()).eval()
            ours, x = pn.compile(copy.deepcopy(theirs), "light"), images()
            assert close(ours(x), theirs(x)) and len(pn.report(ours).graphs) == 1
    assert len(compiler._graphs) == 1


def test_sequences_do_not_share_the_recompile_limit():
    with torch._dynamo.config.patch(recompile_limit=2), torch.no_grad():
        for n in range(1, 5):
            theirs = nn.Sequential(*[nn.Conv2d(4, 4, n) for _ in range(2)])
            ours, x = pn.compile(copy.deepcopy(theirs), "light"), images()
            assert close(ours(x), theirs(x)) and len(pn.report(ours).graphs) == 1


# ---- the rest of torch


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant, how):
    from torch.utils.checkpoint import checkpoint

    def call(s, x):
        return checkpoint(lambda z: F.relu(s.b1(s.c1(z))), F.relu(s.b2(s.c2(x))), use_reentrant=reentrant)

    a = Of(call)
    b, x = copy.deepcopy(a), images()
    y, z = a(x), compiled(b, how)(x)
    assert close(y, z)
    y.square().sum().backward(), z.square().sum().backward()
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert close(p.grad, q.grad)
    assert len(chains()) >= 1


@pytest.mark.parametrize("how", HOWS)
def test_branches_of_torch_cond(how):
    def call(s, x):
        return torch.cond(x.sum() > 0, lambda x: F.relu(s.b1(s.c1(x))), lambda x: F.relu(s.b2(s.c2(x))), (x,))

    m = Of(call).eval()
    with torch.no_grad():
        f = compiled(m, how)
        for x in (torch.ones(2, 4, 6, 6), -torch.ones(2, 4, 6, 6)):
            assert close(f(x), m(x))
    assert len(chains()) == 2


def cast_at_start():
    """How many parameters each call casts that stands for casts of all of a graph's, of all graphs since the last reset."""
    found = []
    for gm in GRAPHS:
        for node in gm.graph.nodes:
            if getattr(node.target, "__name__", "").startswith("cast_all"):
                found.append(len(next(a for a in node.args if isinstance(a, (list, tuple)))))
    return found


class Rewritten(nn.Module):
    """The second filter is written to between the layers, the third is made in the forward pass, and one layer is used twice."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.twice = (conv_bn(4, 4, padding=1, bias=False) for _ in range(4))

    def forward(self, x):
        y = self.twice(F.relu(self.twice(F.relu(self.a(x)))))
        with torch.no_grad():
            self.b[0].weight.mul_(0.5)
        return self.c[1](F.conv2d(self.b(y), self.c[0].weight * 0.5))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("how", HOWS)
def test_parameters_are_cast_by_one_call(how, train, where):
    """Those that nothing writes to, each once; gradients, and the lack of them, are torch's."""
    COARSE.append(True)
    a = moved(nn.Sequential(Rewritten(), conv_bn(4, 4), nn.ReLU())).to(where).train(train)
    a[1][0].weight.requires_grad_(False)
    b, x = copy.deepcopy(a), images(where=where)
    for m, f in ((a, a), (b, compiled(b, how))):
        for _ in range(2):
            with torch.autocast(where, torch.bfloat16), torch.set_grad_enabled(train):
                y = f(x)
            if train:
                y.float().square().mean().backward()
        m.result = y
    assert close(b.result, a.result)
    assert cast_at_start() == [3 + train]  # of `a`, `twice` and the last layer, whose bias a norm that is folded reads as it is
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) and (p.grad is None or (q.grad.dtype is torch.float32 and close(p.grad, q.grad)))
    assert all(p.grad is not None for p in b[0].parameters()) == train and b[1][0].weight.grad is None


@pytest.mark.parametrize("how", HOWS)
def test_parameters_are_not_cast_where_their_gradient_would_be_lost(how):
    """The graph begins without gradients, and switches them on."""
    COARSE.append(True)
    a = moved(nn.Sequential(conv_bn(4, 4), nn.ReLU())).train()

    def begun_without(m):
        def forward(x):
            x = x * 2
            with torch.enable_grad():
                return m(x)

        return forward

    b, x = copy.deepcopy(a), images()
    for f in (begun_without(a), compiled(begun_without(b), how)):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            y = f(x)
        y.float().square().mean().backward()
    assert not cast_at_start() and len(chains()) == 1
    assert all(close(p.grad, q.grad) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_second_derivatives_through_casts_in_light_mode():
    from pycuda_conv.nn import casting

    w = [torch.randn(3, 2, 2, 2).to(memory_format=torch.channels_last), torch.randn(5), torch.randn(2, 3, 1)]
    for one in w:
        one.requires_grad_()
    a, b, c = casting.cast_all(torch.bfloat16, w)
    assert [one.dtype for one in (a, b, c)] == [torch.bfloat16] * 3 and [one.stride() for one in (a, b, c)] == [one.stride() for one in w]
    assert torch.equal(a, w[0].bfloat16()) and torch.equal(c, w[2].bfloat16())
    first = torch.autograd.grad(a.float().pow(3).sum() + c.float().pow(2).sum(), w, create_graph=True, allow_unused=True)
    assert first[1] is None and torch.equal(first[2], (2 * w[2].bfloat16().float()).bfloat16().float())
    (second,) = torch.autograd.grad(first[0].sum(), w[0])
    torch.testing.assert_close(second, 6 * w[0].detach(), rtol=0.02, atol=0.02)
    torch.library.opcheck(torch.ops.pycuda_conv.narrowed.default, ([one.detach() for one in w], True))
    torch.library.opcheck(torch.ops.pycuda_conv.widened.default, ([one.detach().half() for one in w],))


@pytest.mark.filterwarnings("ignore")
def test_export():
    m, x = moved(nn.Sequential(conv_bn(4, 4), nn.ReLU(), nn.Conv2d(4, 4, 1))).eval(), images()
    ours = pn.compile(copy.deepcopy(m), "light")
    with torch.no_grad():
        ours(x)
        exported = torch.export.export(m, (x,))
        for how in HOWS:
            FOUND.clear()
            assert close(compiled(exported.module(), how)(x), m(x)) and len(chains()) == 1
            torch._dynamo.reset()


def test_inference_mode():
    m, x = moved(nn.Sequential(conv_bn(4, 4), nn.ReLU())).eval(), images()
    f = compiled(m)
    with torch.inference_mode():
        assert close(f(x), m(x)) and close(f(x), m(x))
    assert chains()


@pytest.fixture
def process_group():
    dist = pytest.importorskip("torch.distributed")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist
    dist.destroy_process_group()


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            conv_bn(4, 64, bias=False), nn.ReLU(), conv_bn(64, 256, bias=False), nn.ReLU(), conv_bn(256, 256, bias=False), nn.ReLU()
        )

    def forward(self, x):
        return self.body(x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", HOWS)
def test_ddp_with_two_buckets(process_group, how):
    a, x = Body(), images()
    b = copy.deepcopy(a)
    f = compiled(nn.parallel.DistributedDataParallel(b, bucket_cap_mb=2), how)
    a(x).square().mean().backward(), f(x).square().mean().backward()
    assert len(FOUND) > 1 and len(chains()) == 3
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert close(p.grad, q.grad)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind, how", [("torch's", "light"), ("torch's", "operators"), ("converted", "light"), ("converted", "eager")])
def test_fsdp2(process_group, kind, how):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    a, x = Body(), images()
    b = prepared(kind, copy.deepcopy(a))
    fully_shard(b, mesh=init_device_mesh("cpu", (1,)))
    f = b if how == "eager" else compiled(b, how)
    y, z = a(x), f(x)
    assert close(y, z)
    y.square().mean().backward(), z.square().mean().backward()
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert close(p.grad, q.grad.to_local())
    assert how == "eager" or len(chains()) == 3


def test_compiled_twice_reset_and_other_backends():
    theirs, x = moved(nn.Sequential(conv_bn(4, 4), nn.ReLU(), nn.Conv2d(4, 4, 1))).eval(), images()
    ours = pn.compile(pn.compile(copy.deepcopy(theirs), "light"), "light", precision="tf32")
    with torch.no_grad():
        assert close(ours(x), theirs(x)) and len(pn.report(ours).graphs) == 1
        twice = torch.compile(ours, backend=pn.backend, mode="light")  # what is compiled is not compiled again
        assert close(twice(x), theirs(x))
        torch.compiler.reset()
        assert close(ours(x), theirs(x)) and len(pn.report(ours).graphs) >= 2
        outer = torch.compile(ours, backend="eager")
        assert close(outer(x), theirs(x))
        copied = copy.deepcopy(ours)  # a copy is not compiled, as torch has it
        assert close(copied(x), theirs(x)) and "_compiled_call_impl" not in vars(copied)


def test_threads():
    m, x = moved(nn.Sequential(conv_bn(4, 4), nn.ReLU(), nn.Conv2d(4, 4, 1))).eval(), images()
    expected, found = m(x).detach(), []
    f = pn.compile(copy.deepcopy(m), "light")

    def work():
        with torch.no_grad():
            found.extend(close(f(x), expected) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert found == [True] * 20


def test_precision_of_layers_and_of_the_backend(monkeypatch):
    from pycuda_conv.nn import evaluation

    asked, genuine = [], evaluation._evaluate
    monkeypatch.setattr(evaluation, "_evaluate", lambda options, *rest: (asked.append(options[5]), genuine(options, *rest))[1])
    m, x = nn.Sequential(nn.Conv2d(4, 4, 1)), images()
    with torch.no_grad():
        pn.compile(copy.deepcopy(m), "light")(x)
        pn.compile(copy.deepcopy(m), "light", precision="tf32")(x)
        pn.compile(pn.convert(copy.deepcopy(m), "tf32"), "light")(x)
        torch.compile(copy.deepcopy(m), backend=pn.backend, options={"mode": "light", "precision": "tf32"})(x)
    assert asked == ["fp32", "tf32", "tf32", "tf32"]


# ---- options, reports, faults of ours


def test_options_are_checked():
    model = nn.Sequential(nn.Conv2d(1, 1, 1))
    for options, error, words in (
        ({"mode": "fast"}, ValueError, r"mode must be one of \('default', 'light', .*but got mode='fast'"), ({"precision": "fp8"}, ValueError, "precision must be one of"),
        ({"options": 3}, TypeError, "options must be a dict, got 3"), ({"mode": "light", "options": {"max_autotune": True}}, ValueError, "options in light mode are"),
        ({"sizes": "some"}, ValueError, "sizes must be 'any' or 'fixed', but got sizes='some'"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            pn.compile(model, **options)
    assert "_compiled_call_impl" not in vars(model)
    with pytest.raises(Exception, match="ask for two modes"):
        torch.compile(model, backend=functools.partial(pn.backend, mode="light"), options={"mode": "default"})(torch.ones(1, 1, 1, 1))
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module or a compiled function, got 3"):
        pn.report(3)


def test_reports(caplog):
    theirs = nn.Sequential(conv_bn(4, 4, bias=False), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(64 * 4, 3)).eval()
    model = pn.compile(copy.deepcopy(theirs), "light")
    with pytest.raises(ValueError, match="no graph was made of it"):
        pn.report(model)
    with caplog.at_level(logging.INFO, "pycuda_conv.compile"), torch.no_grad():
        model(images(2, 4, 10, 10))
    text = str(pn.report(model))
    assert text == (
        "graph, mode 'light', gradients not recorded: 2 convolutions computed by pycuda_conv, 1 of them fused\n  0.0 + 0.1 + 1\n  4\n"
        "  2 alone: nothing that can be fused follows"
    )
    assert text.splitlines()[0] in caplog.text and "rewritten in" in caplog.text

    def function(x):
        return F.relu(F.conv2d(x, weight))

    weight = torch.randn(3, 4, 1, 1)
    f = torch.compile(function, backend=pn.backend, mode="light")
    f(images())
    assert len(pn.report(f).graphs) == 1 and len(pn.report(f).graphs[0].fused) == 1
    other = torch.compile(theirs, backend=pn.backend, mode="light")
    other(images())
    assert pn.report(other).graphs[-1].gradients and "no batch normalisation follows" not in str(pn.report(other).graphs[-1].fused)


def test_a_fault_of_the_rewrite_leaves_torch_s_result_and_a_note(monkeypatch):
    from pycuda_conv.nn import targets

    def broken(self, options, operands, *rest):
        self.graph.call_function(torch.neg, (operands[0],))
        raise RuntimeError("oh")

    monkeypatch.setattr(targets.Light, "evaluate", broken)
    theirs, x = nn.Sequential(conv_bn(4, 4), nn.ReLU()).eval(), images()
    ours = pn.compile(copy.deepcopy(theirs), "light")
    with torch.no_grad():
        assert torch.equal(ours(x), theirs(x))
    (graph,) = pn.report(ours).graphs
    assert graph.left == [("0.0", "RuntimeError: oh")] and not graph.fused


def test_what_stays_torch_s():
    class Kinds(nn.Module):
        def forward(self, x):
            a = F.conv2d(x.to(torch.complex64), torch.ones(1, 4, 1, 1, dtype=torch.complex64))
            return a.real, F.conv2d(x[0], torch.ones(1, 4, 1, 1))

    ours, x = pn.compile(Kinds(), "light"), images()
    assert close(ours(x), Kinds()(x))
    (graph,) = pn.report(ours).graphs
    assert [why for _, why in graph.left] == ["its tensors are of a kind that kernels do not read", "its input has no batch axis"]


# ---- operators, and inductor


def test_operators_are_checked_by_torch():
    x, w, vectors = images(), torch.randn(6, 4, 3, 3), [torch.rand(6) for _ in range(4)]
    from pycuda_conv.nn.autograd import Settings
    from pycuda_conv.nn.fused import launches

    settings = Settings(2, (1, 1), ((1, 1), (1, 1)), (1, 1), 1, "fp32", None, False)
    flat, trained = (launches._LayerSpec("relu", train, settings).in_integers() for train in (False, True))
    for of_x in (torch.contiguous_format, torch.channels_last):
        given = x.to(memory_format=of_x), w.to(memory_format=of_x)
        torch.library.opcheck(torch.ops.pycuda_conv.frozen_statistics.default, (*given, None, *vectors[2:], 1e-5, flat))
        moved_ones = [one.clone() for one in vectors[2:]]
        torch.library.opcheck(
            torch.ops.pycuda_conv.fused_forward.default,
            (*given, None, *vectors[:2], *moved_ones, torch.tensor(3), None, 0.1, 1e-5, trained)
        )
    rows, weight, residual = torch.randn(2, 3, 5, 4), torch.randn(6, 4), torch.randn(2, 3, 5, 6)
    for activation, scale, moved in ((None, None, False), ("gelu", torch.rand(6), False), (("leaky_relu", 0.2), torch.rand(6, 1, 1), True)):
        added = residual.permute(0, 3, 1, 2) if moved else residual
        given = rows, weight, torch.rand(6), scale, added, linear.spec_of(activation, moved)
        torch.library.opcheck(torch.ops.pycuda_conv.product.default, given)
        y = F.linear(*given[:3])
        y = (y.permute(0, 3, 1, 2) if moved else y) * (1 if scale is None else scale) + added
        expected = y if activation is None else F.gelu(y) if activation == "gelu" else F.leaky_relu(y, 0.2)
        assert close(torch.ops.pycuda_conv.product(*given), expected)


@pytest.mark.filterwarnings("ignore")
def test_inductor_puts_nothing_in_front_of_our_operators(where, tmp_path, monkeypatch):
    """One graph by inductor, with a compiler of C++: the code around our operators has no copies, and the numbers are torch's."""
    import shutil

    if where == "cpu" and not shutil.which("g++"):
        pytest.skip("no g++")
    from torch._inductor.utils import run_and_get_code

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.c1, self.b1 = nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
            self.c2, self.g, self.c3 = nn.Conv2d(8, 8, 3, 2), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 1)

        def forward(self, x):
            return self.c3(F.silu(self.g(self.c2(F.relu(self.b1(self.c1(x))))))) + 1

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch._inductor.config.cpp_cache_precompile_headers", False)  # for a single kernel
    monkeypatch.setattr("torch._inductor.config.cpp.simdlen", 1)
    m = moved(Net()).eval().to(where).to(memory_format=torch.channels_last)
    x = images(channels_last=True, where=where)
    with torch.no_grad():
        y, (code, *_) = run_and_get_code(torch.compile(m, backend=pn.backend), x)
        assert close(y, m(x)) and y.stride() == m(x).stride()
    body = code[code.index("def call") :]
    assert body.count("torch.ops.pycuda_conv.fold_norms.default(") == body.count("torch.ops.pycuda_conv.scaled.default(") == 1
    assert body.count("torch.ops.pycuda_conv.evaluate.default(") == 2
    calls = [line for line in body.splitlines() if not line.lstrip().startswith("#")]  # comments name the steps that a kernel is made of
    assert not [line for line in calls if "aten.copy" in line or ".clone(" in line or "aten.clone" in line]


def test_gradients_of_a_trace_lie_as_the_results_do():
    """Every gradient that AOTAutograd hands to our operators has its channels last as the layer's result has: nothing is laid out twice."""
    from torch._dynamo.backends.common import aot_autograd

    found = []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = conv_bn(4, 8, padding=1, bias=False), conv_bn(8, 8, padding=1), nn.Conv2d(8, 6, 1)

        def forward(self, x):
            y = F.relu(self.a(x))
            y = F.relu(self.b(y) + y)  # the mask of a sum
            return self.c(y).mean((2, 3))  # the gradient repeats one number for each channel

    def backward(gm, inputs):
        for node in gm.graph.nodes:
            if str(node.target).startswith("pycuda_conv."):
                found.append((
                    str(node.target),
                    [a.meta["val"].stride() for a in node.args if isinstance(a, torch.fx.Node) and a.meta["val"].dim() == 4]
                ))
        return gm.forward

    def traced(gm, inputs):
        compiler.rewritten(gm, inputs, "default", raises=True)
        return aot_autograd(fw_compiler=lambda gm, inputs: gm.forward, bw_compiler=backward)(gm, inputs)

    x = images(channels_last=True)
    m = Net().train()
    expected = copy.deepcopy(m)
    torch.compile(m, backend=traced)(x).sum().backward()
    assert {name for name, _ in found} == {"pycuda_conv.fused_conv_bn_relu_backward.default", "pycuda_conv.convolve.default"}
    for name, (first, *_) in found:  # the gradient, or the input where the filter's gradient is asked for
        assert first[1] == 1, name
    expected(x).sum().backward()
    assert all(close(a.grad, b.grad) for a, b in zip(m.parameters(), expected.parameters(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["light", "default"])
def test_gradients_have_the_same_bits_on_every_run(mode):
    """Of the same step at first, when it is repeated, and by kernels that came later; in another model of the class too."""
    from pycuda_conv.runtime import get_device

    torch.manual_seed(0)
    parts = (
        conv_bn(8, 16, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1), Basic(16, 16), Basic(16, 32, 2), nn.Conv2d(32, 32, 1, bias=False),
        nn.AdaptiveAvgPool2d(1),
    )
    base = nn.Sequential(*parts, nn.Flatten()).cuda().to(memory_format=torch.channels_last).train()
    x = images(8, 8, 32, 32, channels_last=True, where="cuda")
    first = None
    for _ in range(2):
        m = copy.deepcopy(base)
        before, f = copy.deepcopy(m.state_dict()), torch.compile(m, backend=pn.backend, options={"mode": mode})
        for i in range(30):
            m.load_state_dict(before)
            m.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                f(x).float().square().mean().backward()
            if i == 15:
                torch.cuda.synchronize()
                while not get_device("cuda:0").all_compiled():
                    time.sleep(0.01)
            found = [p.grad.clone() for p in m.parameters()]
            first = found if first is None else first
            assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True)), i


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor_on_a_gpu(mode):
    """Evaluated and trained, with statistics that move, in CUDA graphs too."""
    torch.manual_seed(0)
    a = nn.Sequential(Basic(4, 8, 2), Basic(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten()).cuda()
    b, x = copy.deepcopy(a), images(4, 4, 16, 16, where="cuda")
    f = pn.compile(b, mode, sizes="fixed")
    for step in range(5):
        for one, call in ((a, a), (b, f)):
            one.train()
            torch.compiler.cudagraph_mark_step_begin()
            call(x).square().mean().backward()
            with torch.no_grad():
                for p in one.parameters():
                    p.sub_(p.grad * 0.1)
                    p.grad = None
        for p, q in zip((*a.parameters(), *a.buffers()), (*b.parameters(), *b.buffers()), strict=True):
            assert close(p, q, 5e-3), step
        with torch.no_grad():
            a.eval(), b.eval()
            torch.compiler.cudagraph_mark_step_begin()
            assert close(f(x).clone(), a(x), 5e-3)


@pytest.mark.parametrize("how", HOWS)
def test_linear_layers_with_what_follows(how, monkeypatch):
    """Where they pay, they are one call in both modes, but not where gradients are recorded by inductor's."""
    monkeypatch.setattr(linear, "pays", lambda *_: True)
    for gradients, count in ((False, 2), (True, 0 if how == "operators" else None)):
        alike(lambda: moved(Mixer()), how, False, gradients)
        assert count is None or [len(found.others) for graph in FOUND for found in graph] == [count]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_mixer_s_linear_layers_by_inductor_on_a_gpu(dtype):
    torch.manual_seed(0)
    m = moved(Mixer(64)).eval().cuda()
    x = images(2, 64, 16, 16, channels_last=True, where="cuda")
    with torch.no_grad():
        exact = copy.deepcopy(m).double()(x.double())
        ours = pn.compile(m.to(dtype), sizes="fixed")
        assert close(ours(x.to(dtype)).double(), exact, 2e-2 if dtype is torch.float16 else 1e-4)
    assert [len(graph.others) for graph in pn.report(ours).graphs] == [2]


@pytest.mark.gpu
def test_a_call_in_light_mode_is_captured():
    m = moved(nn.Sequential(Basic(), Basic(4, 8, 2))).eval().cuda()
    f, x = pn.compile(copy.deepcopy(m), "light"), images(where="cuda")
    with torch.no_grad():
        for _ in range(3):
            f(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = f(x)
        for _ in range(2):
            x.copy_(images(where="cuda"))
            for (_, p), (_, q) in zip(m.named_buffers(), f.named_buffers(), strict=True):
                if p.is_floating_point():
                    p.add_(0.1), q.add_(0.1)
            graph.replay()
            assert close(y, m(x))


def test_the_entry_point(tmp_path):
    """torch.compile(model, backend="pycuda_conv"), as an installed package has it."""
    import configparser
    from pathlib import Path

    root = Path(__file__).parents[1]
    config = configparser.ConfigParser()
    config.read(root / "setup.cfg")
    text = config["options.entry_points"]["torch_dynamo_backends"].strip()
    info = tmp_path / "pycuda_conv_entry-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pycuda_conv_entry\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{text}\n")
    code = (
        "import torch; m = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1), torch.nn.ReLU()); x = torch.ones(1, 1, 2, 2)\n"
        "f = torch.compile(m, backend='pycuda_conv', mode='light')\n"
        "assert torch.equal(f(x), m(x)) or (f(x) - m(x)).abs().max() < 1e-5\n"
        "import pycuda_conv.nn as pn; print(pn.report(f).graphs[0].alone)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)]), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=900, check=False)
    assert "its gradient is recorded" in done.stdout, done.stdout + done.stderr


# ---- norms that one call at the start folds


@pytest.mark.parametrize("how", HOWS)
def test_all_norms_of_a_graph_are_folded_by_one_call_where_nothing_writes_to_them(how):
    from torch.nn.utils import parametrize

    from pycuda_conv.nn import folding

    def counted(call, change=None):
        """The norms of each call that folds."""
        alike(lambda: Of(call, change), how, False, False, steps=1)
        calls = folding.fold_norms, torch.ops.pycuda_conv.fold_norms.default
        return [len(node.args[1]) for node in GRAPHS[-1].graph.nodes if node.target in calls]

    def both(s, x):
        return F.relu(s.b2(s.c2(F.relu(s.b1(s.c1(x)) + x))))

    def written_before(s, x):
        s.b2.running_var.mul_(2.0)
        return both(s, x)

    def written_after(s, x):
        y = both(s, x)
        s.b2.running_var.mul_(2.0)
        return y

    def written_between(s, x):
        y = F.relu(s.b1(s.c1(x)) + x)
        s.b2.weight.data.mul_(2.0)
        return F.relu(s.b2(s.c2(y)))

    assert counted(both) == counted(written_after) == [2]
    assert counted(written_before) == counted(written_between) == [1]
    assert counted(both, lambda s: parametrize.register_parametrization(s.b1, "weight", Twice())) == [1]


class Dense(nn.Module):
    """A layer of DenseNet, and one whose norm is read in between."""

    def __init__(self, peeks=False):
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(4), nn.Conv2d(4, 8, 1, bias=False)
        self.norm2, self.conv2, self.peeks = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, padding=1), peeks

    def forward(self, x):
        y = self.norm1(x)
        seen = self.norm1.running_mean.sum() + self.norm1.num_batches_tracked if self.peeks else 0
        y = self.conv1(F.relu(y)) + 0 * seen
        return torch.cat([x, self.conv2(F.relu(self.norm2(y), inplace=True))], 1)


@pytest.mark.parametrize("peeks", [False, True])
def test_norms_in_front_of_convolutions_are_trained_in_one_step(peeks, where, monkeypatch):
    from pycuda_conv.nn import norms

    calls, genuine = [], norms.norm_act
    monkeypatch.setattr(norms, "norm_act", lambda *given: (calls.append(given[5] is not None), genuine(*given))[1])
    for channels_last in (False, True):
        alike(lambda: moved(Dense(peeks)), "light", True, "input", images(channels_last=channels_last, where=where))
    assert calls == [True] * (4 if peeks else 8)  # norm2 stands behind a sum
    assert any("norm1" in steps for graph in FOUND for found in graph for steps in found.others) is not peeks
