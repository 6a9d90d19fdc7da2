"""Two convolutions that are summed, in graphs of torch.compile and on the simulated machine."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import simt  # before torch
import torch
from alike import like_h200
from reference import reference
from test_compile import FOUND, GRAPHS, afresh, alike, chains, images  # noqa: F401
from torch import nn
from torch.nn import functional as F

from pycuda_conv.call import Call
from pycuda_conv.engines.nn import join
from pycuda_conv.nn import concatenation, pairs
from pycuda_conv.nn.graph import joins

HOWS = pytest.mark.parametrize("how", ["light", "operators"])


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    """On the CPU and in float32 too, where the fallback computes what the kernel would."""
    monkeypatch.setattr(pairs, "pays", lambda x: True)
    monkeypatch.setattr(joins, "HALVES", (*joins.HALVES, torch.float32))


class Block(nn.Module):
    """A residual block whose shortcut is a convolution; `kind` says how it is written."""

    def __init__(self, kind="behind"):
        super().__init__()
        self.kind = kind
        self.norm, self.conv = nn.GroupNorm(2, 8), nn.Conv2d(8, 6, 3, padding=1, bias=kind != "one bias")
        self.shortcut = nn.Conv2d(8, 6, 1, bias=kind != "no bias", groups=2 if kind == "groups" else 1)
        if kind == "no bias":
            self.conv = nn.Conv2d(8, 6, 3, padding=1, bias=False)
        if kind == "strides":
            self.conv, self.shortcut = nn.Conv2d(8, 6, 3, 2, 1), nn.Conv2d(8, 6, 1, 2)

    def forward(self, x):
        if self.kind == "before":
            y = self.shortcut(x)
            return y + self.conv(F.silu(self.norm(x)))
        y = self.conv(F.silu(x if self.kind == "no norm" else self.norm(x)))
        z = self.shortcut(x)
        if self.kind == "twice":
            return torch.cat([y + z, z], 1)
        if self.kind == "written":
            z, _ = self.shortcut(x), x.add_(1)
        return F.relu(y + z) if self.kind == "activation" else y + z


@HOWS
@pytest.mark.parametrize("kind", ["behind", "before", "activation", "one bias", "strides"])
def test_both_are_one_call(where, how, kind, monkeypatch):
    calls = []
    two = pairs.two
    monkeypatch.setattr(pairs, "two", lambda *given: calls.append(given) or two(*given))
    torch.manual_seed(0)
    model = Block(kind).to(memory_format=torch.channels_last)
    alike(lambda: copy.deepcopy(model), how, False, None, images(2, 8, 6, 5, channels_last=True, where=where))
    assert {"conv", "shortcut"} <= set(chains()[0]) and not FOUND[0][0].alone and len(chains()) == 1
    assert calls or how == "operators"


@HOWS
@pytest.mark.parametrize("kind", ["twice", "no bias", "groups", "written"])
def test_what_stays_apart(where, how, kind):
    """A shortcut that others read, two without a bias, groups, and an input that is written in between."""
    torch.manual_seed(0)
    model = Block(kind).to(memory_format=torch.channels_last)
    alike(lambda: copy.deepcopy(model), how, False, None, images(2, 8, 6, 5, channels_last=True, where=where))
    assert not any({"conv", "shortcut"} <= set(one) for one in chains())


class Joined(nn.Module):
    """A convolution of two arrays that are concatenated, and what follows; `kind` says how it is written."""

    def __init__(self, kind="plain"):
        super().__init__()
        self.kind = kind
        self.conv = nn.Conv2d(8, 6, 3, padding=1, bias=kind != "no bias")
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x):
        a, b = F.relu(x[:, :3]), F.silu(x[:, 3:])
        y = torch.cat((a, b), dim=-3) if self.kind == "turned" else torch.cat([a, b], 1)
        if self.kind == "written":
            b.mul_(2)
        z = self.conv(y)
        z = self.norm(z) if self.kind in ("norm", "norm and residual") else z
        z = z + a.mean() if self.kind == "read" else z
        z = z + x[:, 2:].sigmoid() if self.kind in ("residual", "norm and residual") else z
        z = F.relu(z)
        return z + y.mean() if self.kind == "twice" else z


@HOWS
@pytest.mark.parametrize("kind, taken", [
    *((kind, True) for kind in ("plain", "turned", "norm", "residual", "norm and residual")),
    *((kind, False) for kind in ("no bias", "written", "twice")),
])  # fmt: skip
def test_arrays_that_are_concatenated(where, how, kind, taken):
    torch.manual_seed(0)
    model = Joined(kind).to(memory_format=torch.channels_last)
    alike(lambda: copy.deepcopy(model), how, False, None, images(2, 8, 6, 5, channels_last=True, where=where))
    cats = [n for gm in GRAPHS for n in gm.graph.nodes if n.target in (*joins.CATS, concatenation.cat)]
    assert bool(cats) != taken and len(chains()) >= 1


class Kept(nn.Module):
    """A concatenation that more than a convolution reads; `kind` says what is different."""

    def __init__(self, kind=""):
        super().__init__()
        self.kind, self.conv = kind, nn.Conv2d(8, 6, 1)

    def forward(self, x):
        y = torch.cat([x, x * 2], 2) if self.kind == "rows" else torch.cat([x[:, :3] * 2, x[:, 3:] * 3], 1)
        return self.conv(y).relu() + y.mean()


@pytest.mark.parametrize("kind, last, taken", [("", True, True), ("", False, False), ("rows", True, False)])
def test_a_concatenation_that_stays_is_one_launch(where, kind, last, taken):
    torch.manual_seed(0)
    model = Kept(kind).to(memory_format=torch.channels_last if last else torch.contiguous_format)
    alike(lambda: copy.deepcopy(model), "light", False, None, images(2, 8, 6, 5, channels_last=last, where=where))
    targets = [n.target for gm in GRAPHS for n in gm.graph.nodes]
    assert (concatenation.cat in targets) == taken and any(t in joins.CATS for t in targets) != taken


@pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
@pytest.mark.parametrize("pixels, first, second", [(35, 16, 48), (1, 160, 16), (513, 32, 32)])
def test_concatenating_on_the_simulated_machine(pixels, first, second):
    rng = np.random.default_rng(pixels)
    a, b = (rng.integers(0, 256, (pixels, n)).astype(np.uint8) for n in (first, second))
    memory = SimpleNamespace(buffers=[a.reshape(-1), b.reshape(-1), np.full(pixels * (first + second), 7, np.uint8)])
    simt.run([[join.join(pixels, first, second)]], memory, 1)
    np.testing.assert_array_equal(memory.buffers[2].reshape(pixels, -1), np.concatenate([a, b], 1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "shape, more", [((2, 24, 9, 7), 8), ((3, 128, 33, 20), 256), ((1, 16, 5, 6, 4), 32), ((2, 3, 8, 8), 5), ((2, 16, 1, 1), 16)]
)
def test_concatenating_on_a_gpu(dtype, shape, more):
    form = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    a, b = (torch.randn((shape[0], c, *shape[2:]), device="cuda").to(dtype).contiguous(memory_format=form) for c in (shape[1], more))
    for _ in range(3):
        got = concatenation.cat(a, b)
        assert torch.equal(got, torch.cat([a, b], 1)) and got.stride() == torch.cat([a, b], 1).stride()


@HOWS
def test_arrays_in_c_order_and_gradients_stay_apart(where, how):
    torch.manual_seed(0)
    model = Block()
    alike(lambda: copy.deepcopy(model), how, False, None, images(2, 8, 6, 5, where=where))
    assert not any({"conv", "shortcut"} <= set(one) for one in chains())
    FOUND.clear()
    model = Block("no norm").to(memory_format=torch.channels_last)  # torch's norm of such arrays crashes on some CPUs
    alike(lambda: copy.deepcopy(model), how, True, "parameters", images(2, 8, 6, 5, channels_last=True, where=where))
    assert not any({"conv", "shortcut"} <= set(one) for one in chains())


@pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
@pytest.mark.parametrize("form, joined", [("general", False), ("known", False), ("general", True)])
def test_the_launch_on_the_simulated_machine(form, joined, monkeypatch):
    """Two sums, or one of two arrays side by side. Factors and summands of float32, as the call at the graph's start leaves them;
    whole numbers, exactly."""
    device, rng = like_h200((9, 0), "cuda"), np.random.default_rng(3)
    monkeypatch.setattr(pairs.TORCH, "device", lambda signature, context: device)
    monkeypatch.setattr(pairs.engines, "predicted", lambda *given: 1e9)
    shapes = (2, 40, 9, 8), (72, 64 if joined else 40, 3, 3), (2, 24, 9, 8), None if joined else (72, 24, 1, 1)
    signatures = tuple(shape and (shape, torch.float16, 0) for shape in shapes)
    first, second = (Call("conv", 2, 1, n, 1, 1, "fp32", 0, activation).hashable() for n, activation in ((1, "relu"), (0, None)))
    way = pairs._way.__wrapped__(first, None if joined else second, signatures, joined)
    assert way is not None and way.shape == (2, 72, 9, 8)
    a, wa, b, wb = (shape and rng.integers(-2, 3, shape).astype(np.float16) for shape in shapes)
    scale, bias = rng.integers(1, 3, 72).astype(np.float32), rng.integers(-3, 4, 72).astype(np.float32)
    residual = rng.integers(-5, 6, (2, 72, 9, 8)).astype(np.float16) if joined else None
    last = [None if one is None else np.ascontiguousarray(np.moveaxis(one, 1, -1)) for one in (a, wa, b, wb, residual)]
    y = np.full((2, 9, 8, 72), np.nan, np.float16)
    arrays = last[0], last[1], scale, bias, last[4], last[2], last[3], y
    memory = SimpleNamespace(buffers=[None if one is None else one.reshape(-1).view(np.uint8) for one in arrays])
    simt.run([[getattr(way, form)]], memory, 1)
    if joined:
        sums, more = reference(False, 2, np.concatenate([a, b], 1), wa, padding=1), residual
    else:
        sums, more = reference(False, 2, a, wa, padding=1) + reference(False, 2, b, wb), 0
    right = np.maximum(sums * scale[:, None, None] + bias[:, None, None] + more, 0)
    np.testing.assert_array_equal(np.moveaxis(memory.buffers[-1].view(np.float16).reshape(y.shape), -1, 1).astype(float), right)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("c, other, k, size", [(128, 384, 128, (64, 64)), (256, 512, 256, (31, 17)), (40, 24, 72, (9, 8))])
def test_on_a_gpu(dtype, c, other, k, size, monkeypatch):
    """The pair by one launch is as near to float64 as torch's two are, at first and when it is repeated."""
    monkeypatch.setattr(pairs.engines, "predicted", lambda *given: 1e9)
    torch.manual_seed(c)
    last = {"device": "cuda", "dtype": dtype}
    x, w, z, v = (torch.randn(shape, **last).contiguous(memory_format=torch.channels_last) for shape in (
        (2, c, *size), (k, c, 3, 3), (2, other, *size), (k, other, 1, 1)))  # fmt: skip
    bias = torch.randn(k, device="cuda")
    folded = torch.cat([torch.ones_like(bias), bias])
    from pycuda_conv.nn.autograd import Settings
    from pycuda_conv.nn.options import asked_for

    one = lambda n: asked_for(Settings(2, 1, n, 1, 1, "fp32", None, False), None, 0.0)  # noqa: E731
    wanted = F.conv2d(x.double(), w.double(), bias.double(), padding=1) + F.conv2d(z.double(), v.double())
    theirs = F.conv2d(x, w, bias.to(dtype), padding=1) + F.conv2d(z, v)
    limit = (theirs.double() - wanted).norm()
    for _ in range(3):
        got = pairs.two(one(1), one(0), 0, x, w, None, z, v, folded)
        assert (got.double() - wanted).norm() <= 1.05 * limit and got.is_contiguous(memory_format=torch.channels_last)
    whole = torch.randn((k, c + other, 3, 3), **last).contiguous(memory_format=torch.channels_last)
    wanted = F.conv2d(torch.cat([x, z], 1).double(), whole.double(), bias.double(), padding=1) + wanted.to(dtype).double()
    limit = (F.conv2d(torch.cat([x, z], 1), whole, bias.to(dtype), padding=1) + got).double().sub(wanted).norm()
    for _ in range(3):
        both = pairs.two(one(1), (), 0, x, whole, got, z, None, folded)
        assert (both.double() - wanted).norm() <= 1.05 * limit
