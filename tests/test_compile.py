"""The backend "pycuda_conv" of torch.compile: what it fuses, and that it gives torch's numbers whatever a forward does or is changed to.

Every case runs in light mode and under AOTAutograd, which is all of inductor's way but its code; the results, the gradients, the buffers
and the inputs are compared with those of the model that is not compiled.
"""

import contextlib
import copy
import functools
import logging
import os
import random
import subprocess
import sys
import threading
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import pycuda_conv as pc  # noqa: E402
import pycuda_conv.nn as pn  # noqa: E402
from pycuda_conv.nn import compiler  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
logging.getLogger("torch.__trace").disabled = True  # pytest would collect megabytes
HOWS = "light", "operators"
#: Converted models too, which reach the rewrite by another operator.
WAYS = pytest.mark.parametrize("kind, how", [("torch's", "light"), ("torch's", "operators"), ("converted", "light")])
COARSE = []  # not empty in a test whose values are rounded to 16 bits
FOUND = []  # what the rewrite did to each graph since the last reset


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return request.param


@pytest.fixture(autouse=True)
def afresh():
    torch._dynamo.reset()
    FOUND.clear()
    COARSE.clear()
    yield
    torch._dynamo.reset()


def backend(how, gm, example_inputs):
    """The backend; a fault of the rewrite is raised here, and AOTAutograd stands for inductor."""
    nested = any(isinstance(child, torch.fx.GraphModule) for child in gm.children())
    light = how == "light" and not nested
    FOUND.append(compiler.rewritten(gm, example_inputs, how, light=light, raises=True))
    return gm.forward if light else torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs)


def compiled(model, how="light", **more):
    return torch.compile(model, backend=functools.partial(backend, how), **more)


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
                ya.double().square().mean().backward(), yb.double().square().mean().backward()
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
        return self.act(F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps))


class ConvSame(nn.Conv2d):  # as timm has it: padded by the input's size
    def forward(self, x):
        more = [max((-(-n // s) - 1) * s + k - n, 0) for n, k, s in zip(x.shape[-2:], self.kernel_size, self.stride, strict=True)][::-1]
        return F.conv2d(F.pad(x, [n for m in more for n in (m // 2, m - m // 2)]), self.weight, self.bias, self.stride)


class UNet(nn.Module):
    def __init__(self, c=4):
        super().__init__()

        def two(i, o):
            return nn.Sequential(conv_bn(i, o, padding=1), nn.ReLU(True), conv_bn(o, o, padding=1), nn.ReLU(True))

        self.a, self.b, self.up, self.c, self.last = two(4, c), two(c, 2 * c), nn.ConvTranspose2d(2 * c, c, 2, 2), two(2 * c, c), nn.Conv2d(c, 2, 1)

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
        self.conv, self.norm, self.a, self.b = nn.Conv2d(c, c, 7, padding=3, groups=c), nn.LayerNorm(c), nn.Linear(c, 4 * c), nn.Linear(4 * c, c)
        self.scale = nn.Parameter(torch.rand(c, 1, 1))

    def forward(self, x):
        y = self.b(F.gelu(self.a(self.norm(self.conv(x).permute(0, 2, 3, 1))))).permute(0, 3, 1, 2)
        return x + self.scale * y


ZOO = {
    "resnet": (lambda: nn.Sequential(Basic(), Basic(4, 8, 2)), 5, 5),
    "timm": (lambda: nn.Sequential(ConvSame(4, 4, 3, 2), BatchNormAct(4)), 1, 1),
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


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", ZOO)
def test_networks(name, how, where):
    make, evaluated, trained = ZOO[name]
    for train in (False, True):
        if train and trained is None:
            continue  # torch's refuses to train it in one process
        for channels_last in (False, True):
            found = alike(lambda: moved(make()), how, train, train, images(channels_last=channels_last, where=where))
            assert len(found) == (trained if train else evaluated), found
            assert not any(found.left for graph in FOUND for found in graph)


@pytest.mark.parametrize("how", HOWS)
def test_evaluation_with_gradients(how):
    found = alike(lambda: moved(nn.Sequential(Basic(), Basic(4, 8, 2))), how, False, "input")
    assert len(found) == 5


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


def written(s, x):
    y = s.c1(x)
    x.mul_(2)
    return F.relu(s.b1(y)) + x


def view_written(s, x):
    v = x.view(-1)
    y = s.c1(x)
    v.add_(1)
    return F.relu(s.b1(y))


def entry_written(s, x):
    y = s.c1(x)
    x[0] = 3.0
    return F.relu(s.b1(y))


def written_by_out(s, x):
    y = s.c1(x)
    torch.add(x, 1.0, out=x)
    return F.relu(s.b1(y))


def weight_written(s, x):
    y = s.c1(x)
    s.c1.weight.detach().mul_(1.5)
    return F.relu(s.b1(y))


def norm_written(s, x):
    y = s.b1(s.c1(x))
    s.b1.running_mean.add_(1.0)
    return F.relu(y)


def norm_written_before(s, x):
    y = s.c1(x)
    s.b1.running_mean.add_(1.0)
    return F.relu(s.b1(y))


def twice(s, x):
    y = s.c1(x)
    return F.relu(s.b1(y)) + y


def one_norm(s, x):
    return F.relu(s.b1(s.c1(x)) + s.b1(s.c2(x)))


def statistics_read(s, x):
    a = s.b1(s.c1(x))
    m = s.b1.running_mean.sum()
    return F.relu(a) + m


def count_read(s, x):
    y = s.c1(x)
    before = s.b1.num_batches_tracked * 1.0
    return F.relu(s.b1(y)) + before + s.b1.num_batches_tracked


def residual_gets_sum(s, x):
    i = x * 1
    j = i.view(-1)
    i += s.b1(s.c1(x))
    return F.relu(i) + 1e-3 * j.sum()


def residual_rewritten(s, x):
    i = x * 2
    y = s.c1(x)
    i.add_(1)
    z = s.b1(y) + i
    i.mul_(3)
    return F.relu(z) + i


def doubled(s, x):
    y = s.b1(s.c1(x))
    return F.relu(y + y)


def scaled_sum(s, x):
    return F.relu(torch.add(s.b1(s.c1(x)), x, alpha=2))


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


def broadcast(s, x):
    return F.relu(s.b1(s.c1(x)) + x.mean((2, 3), keepdim=True))


def simple(s, x):
    return F.relu(s.b1(s.c1(x)))


def padded(s, x):
    return F.relu(s.b1(F.conv2d(F.pad(x, (2, 1, 0, 3)), s.c1.weight, padding=1)))


def padded_by_ones(s, x):
    return F.relu(s.b1(F.conv2d(F.pad(x, (1, 1, 1, 1), value=1.0), s.c1.weight)))


def padded_then_written(s, x):
    y = F.pad(x, (1, 1, 1, 1))
    x.mul_(2)
    return F.relu(s.b1(F.conv2d(y, s.c1.weight))) + x


def cropped(s, x):
    return F.relu(s.b1(F.conv2d(F.pad(x, (-1, -1, -1, -1)), s.c1.weight)))


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


def viewed(s, x):
    return F.relu(s.b1(s.c1(x))).view(x.shape[0], -1).t()


#: For each: its forward, a change of the model, chains in evaluation without gradients, chains in training. None: not run.
TRAPS = {
    "written": (written, None, 0, None), "view written": (view_written, None, 0, None), "entry written": (entry_written, None, 0, None),
    "written by out=": (written_by_out, None, 0, None), "weight written": (weight_written, None, 0, None),
    "norm written": (norm_written, None, 1, None), "norm written before": (norm_written_before, None, 0, 0), "read twice": (twice, None, 0, 0),
    "one norm for two": (one_norm, None, 2, 2), "statistics read": (statistics_read, None, 1, 1), "count read": (count_read, None, 1, 1),
    "residual gets the sum": (residual_gets_sum, None, 1, 1), "residual rewritten": (residual_rewritten, None, 1, 1), "doubled": (doubled, None, 1, 1),
    "alpha": (scaled_sum, None, 1, 1), "no_grad": (no_grad, None, 2, 1), "autocast": (autocast, None, 0, 0), "whole in autocast": (autocast_whole, None, 1, 1),
    "interleaved": (interleaved, None, 2, None), "broadcast": (broadcast, None, 1, 1), "padded": (padded, None, 1, 1), "padded by ones": (padded_by_ones, None, 1, 1),
    "padded, then written": (padded_then_written, None, 1, None), "cropped": (cropped, None, 1, 1), "functional": (functional, None, 1, 1), "clamped": (clamped, None, 1, None),
    "momentum None": (simple, lambda s: setattr(s.b1, "momentum", None), 1, 0), "frozen parameters": (simple, frozen, 1, 1), "frozen statistics": (statistics_frozen, None, 1, 1),
    "no statistics": (simple, lambda s: setattr(s, "b1", nn.BatchNorm2d(4, affine=False, track_running_stats=False)), 1, 1), "viewed": (viewed, None, 1, 1),
}  # fmt: skip


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", TRAPS)
def test_what_ends_a_chain(name, how):
    call, change, evaluated, trained = TRAPS[name]
    if name == "whole in autocast":
        COARSE.append(name)
    found = alike(lambda: Of(call, change), how, False, False)
    assert len(found) == evaluated, found
    if trained is not None:
        found = alike(lambda: Of(call, change), how, True, True)
        assert len(found) == trained, found
        alike(lambda: Of(call, change), how, True, False)
        alike(lambda: Of(call, change), how, False, "input" if name != "count read" else True)


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


# ---- faults: what a forward does, what is changed after the first call


def faulty():
    """A model of the user's whose forward reads and writes much; for each way the chain itself stays what it is."""

    class Model(nn.Module):
        gain = 1.0

        def __init__(self, how=""):
            super().__init__()
            self.conv, self.norm, self.how = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), how
            self.config, self.steps, self.known, self.features = types.SimpleNamespace(negate=False, inner=types.SimpleNamespace(power=1)), [], {"k": 1.0}, []
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("shift", torch.zeros(1))
            self.array, self.flag, self.calls = np.ones(1, np.float32), False, 0
            self.ema = None

        def forward(self, x):
            how = self.how
            if how == "buffer replaced":
                self.count = self.count + 1
            if how == "buffer in place":
                self.count += 1
            if how == "buffer method":
                self.count.add_(1)
            if how == "counter":
                self.calls += 1
            y = F.relu(self.norm(self.conv(x)))
            if how == "list":
                self.features.append(y)
            if how == "list cleared":
                self.features.clear()
                self.features.append(y)
            if how == "dict":
                if "mask" not in self.known:
                    self.known["mask"] = torch.ones_like(y)
                y = y * self.known["mask"]
            if how == "dict of a counter":
                self.known["n"] = self.known.get("n", 0) + 1
            if how == "attribute of an object":
                self.config.last = y.shape[0]
            if how == "running average":
                self.ema = y.detach().mean() if self.ema is None else 0.9 * self.ema + 0.1 * y.detach().mean()
            if how == "set":
                self.__dict__.setdefault("seen", set()).add(x.shape[0])
            if how == "buffer by copy_":
                with torch.no_grad():
                    self.shift.copy_(y.mean().reshape(1))
            for step in self.steps:
                y = step(y)
            y = -y if self.config.negate else y
            y = y + 1 if self.flag else y
            return y**self.config.inner.power * self.gain * self.known["k"] * SCALE * SETTINGS["scale"] * float(self.array[0]) + self.shift

    return Model


SCALE = 1.0
SETTINGS = {"scale": 1.0}
WRITES = (
    "buffer replaced", "buffer in place", "buffer method", "counter", "list", "list cleared", "dict", "dict of a counter", "attribute of an object",
    "running average", "set", "buffer by copy_",
)


def prepared(kind, model):
    return pn.convert(model) if kind == "converted" else model


def told(m):
    """What a model knows besides its parameters."""
    return (
        float(m.count), m.calls, [tuple(t.shape) for t in m.features], sorted(m.known), m.known.get("n"), vars(m.config).get("last"),
        None if m.ema is None else round(float(m.ema), 3), m.__dict__.get("seen"), round(float(m.shift), 3), int(m.norm.num_batches_tracked),
    )


@WAYS
@pytest.mark.parametrize("way", WRITES)
def test_forwards_that_write(way, kind, how):
    x = images(2, 3, 6, 6)
    for train in (False, True):
        torch._dynamo.reset()
        FOUND.clear()
        a = faulty()(way).train(train)
        b = copy.deepcopy(a)
        f = compiled(prepared(kind, b), how)
        with torch.set_grad_enabled(train):
            for _ in range(3):
                assert close(f(x), a(x))
                assert told(a) == told(b)
        assert len(chains()) == convolutions() > 0


def changes():
    def global_(m):
        globals()["SCALE"] = 5.0

    def class_(m):
        type(m).gain = 3.0

    def through(name):
        return lambda m: setattr(m, name, True)

    return {
        "attribute": lambda m: setattr(m, "gain", 2.0), "config": lambda m: setattr(m.config, "negate", True), "nested config": lambda m: setattr(m.config.inner, "power", 2),
        "list": lambda m: m.steps.append(torch.tanh), "dict": lambda m: m.known.update(k=4.0), "class": class_, "global": global_, "global dict": lambda m: SETTINGS.update(scale=7.0),
        "array": lambda m: m.array.__setitem__(0, 3.0), "flag": through("flag"), "buffer": lambda m: m.shift.add_(1.0), "child": lambda m: setattr(m, "norm", nn.Identity()),
        "eval": lambda m: m.train(not m.training),
    }  # fmt: skip


@pytest.fixture
def restored():
    globals()["SCALE"], SETTINGS["scale"] = 1.0, 1.0
    yield
    globals()["SCALE"], SETTINGS["scale"] = 1.0, 1.0


@WAYS
@pytest.mark.parametrize("way", changes())
def test_what_a_forward_reads_is_changed(way, kind, how, restored):
    x = images(2, 3, 6, 6)
    for train in (False, True):
        torch._dynamo.reset()
        FOUND.clear()
        globals()["SCALE"], SETTINGS["scale"] = 1.0, 1.0
        a = faulty()().train(train)
        b = copy.deepcopy(a)
        f = compiled(prepared(kind, b), how)
        with torch.set_grad_enabled(train):
            assert close(f(x), a(x))
            for m in (a, b):
                with torch.no_grad():
                    changes()[way](m)
            assert close(f(x), a(x)) and close(f(x), a(x))
        assert len(chains()) == convolutions() - (way == "child" and train)


@pytest.mark.parametrize("how", HOWS)
def test_a_closure_is_changed(how):
    scale, conv = 2.0, nn.Conv2d(4, 4, 3)

    def call(x):
        return F.relu(conv(x)) * scale

    with torch.no_grad():
        f, x = compiled(call, how), images()
        assert close(f(x), call(x))
        scale = 3.0
        assert close(f(x), call(x)) and len(chains()) == 2


def by_data(p, noise):
    p.data.mul_(0.5).add_(noise)


def by_numpy(p, noise):
    p.detach().numpy()[...] += noise.numpy()


def by_average(p, noise):
    p.data = 0.5 * p.data + noise


def by_copy(p, noise):
    with torch.no_grad():
        p.copy_(noise)


def by_lerp(p, noise):
    torch._foreach_lerp_([p.data], [noise], 0.3)


def by_set(p, noise):
    p.data.set_(noise.clone())


@WAYS
def test_parameters_and_statistics_are_written(kind, how):
    a = moved(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())).eval()
    b, x = copy.deepcopy(a), images(2, 3, 6, 6)
    f = compiled(prepared(kind, b), how)
    with torch.no_grad():
        assert close(f(x), a(x))
        for way in (by_data, by_numpy, by_average, by_copy, by_lerp, by_set):
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
            for train in (False, True):
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


@pytest.mark.parametrize("name", ["forward", "_conv_forward"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_methods_of_classes_are_replaced(name, when, monkeypatch):
    """Torch.compile does not notice it after the first call, so that is left out."""
    a = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    b, genuine, x = copy.deepcopy(a), getattr(nn.Conv2d, name), images(2, 3, 6, 6)
    if when == "after":
        pn.convert(b)
    monkeypatch.setattr(nn.Conv2d, name, lambda self, *args: 2 * genuine(self, *args))
    pn.convert(b)
    with torch.no_grad():
        expected = a(x)
        assert close(b(x), expected)  # eager
        for how in HOWS:
            assert close(compiled(b, how)(x), expected)
            torch._dynamo.reset()
    monkeypatch.undo()
    assert close(b(x), a(x))
    assert type(pn.revert(b)[0]) is nn.Conv2d


@WAYS
def test_hooks_set_before(kind, how):
    x = images(2, 3, 6, 6)
    for hook in (
        lambda m: m[0].register_forward_hook(lambda m, i, o: 2 * o), lambda m: m[1].register_forward_pre_hook(lambda m, i: (3 * i[0],)),
        lambda m: m[2].register_forward_hook(lambda m, i, o: o + 1), lambda m: m[1].register_full_backward_hook(lambda m, i, o: (2 * i[0],)),
    ):
        for train in (False, True):
            torch._dynamo.reset()
            a = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).train(train)
            b = copy.deepcopy(a)
            hook(a), hook(b)
            f = compiled(prepared(kind, b), how)
            ya, yb = a(x), f(x)
            assert close(ya, yb)
            ya.square().sum().backward(), yb.square().sum().backward()
            assert close(a[0].weight.grad, b[0].weight.grad)


@pytest.mark.parametrize("how", HOWS)
def test_hooks_set_later_are_noticed_if_torch_is_told_to(how):
    x = images(2, 3, 6, 6)
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False), torch.no_grad():
        a = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
        b = copy.deepcopy(a)
        f = compiled(b, how)
        f(x)
        for m in (a, b):
            m[0].register_forward_hook(lambda m, i, o: 2 * o)
        assert close(f(x), a(x))


class Twice(nn.Module):
    def forward(self, w):
        return 2 * w


@WAYS
@pytest.mark.parametrize("part", [0, 1], ids=["convolution", "norm"])
def test_parametrizations(part, kind, how):
    from torch.nn.utils import parametrize

    x = images(2, 3, 6, 6)
    for when in ("before", "after"):
        torch._dynamo.reset()
        FOUND.clear()
        a = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
        b = copy.deepcopy(a)
        if when == "before":
            parametrize.register_parametrization(b[part], "weight", Twice())
        f = compiled(prepared(kind, b), how)
        with torch.no_grad():
            if when == "after":
                f(x)
                parametrize.register_parametrization(b[part], "weight", Twice())
            parametrize.register_parametrization(a[part], "weight", Twice())
            assert close(f(x), a(x)) and len(chains()) == len(FOUND)
            for one in (a, b):
                parametrize.remove_parametrizations(one[part], "weight")
            assert close(f(x), a(x)) and len(chains()) == len(FOUND)
