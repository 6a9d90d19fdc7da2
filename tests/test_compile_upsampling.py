"""Upsampling in graphs of torch.compile: folded into the convolution behind it, or by a launch of its own."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pycuda_conv.nn as pn
from pycuda_conv import ConvArgumentError
from pycuda_conv.nn import compiler, upsampling

WAYS = {
    "scale": lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"),
    "size": lambda x: F.interpolate(x, size=(2 * x.shape[2], 3 * x.shape[3])),
    "exact": lambda x: F.interpolate(x, scale_factor=(1, 4), mode="nearest-exact"),
    "operator": lambda x: torch.ops.aten.upsample_nearest2d.vec(x, None, (2.0, 2.0)),
    "repeats": lambda x: x.repeat_interleave(2, dim=3).repeat_interleave(3, 2),
    "module": nn.Upsample(scale_factor=3),
    "padded": lambda x: F.pad(F.interpolate(x, scale_factor=2), (0, 1, 1, 0)),
}
LEFT = {
    "not whole": lambda x: F.interpolate(x, scale_factor=1.5),
    "smaller": lambda x: F.interpolate(x, scale_factor=0.5),
    "linear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "channels": lambda x: x.repeat_interleave(1, dim=1),
}


class Behind(nn.Module):
    """A convolution behind an upsampling, and what may follow."""

    def __init__(self, way, after="", dtype=torch.float32) -> None:
        super().__init__()
        self.way, self.after = way, after
        self.conv, self.norm = nn.Conv2d(4, 6, 3, padding=1, dtype=dtype), nn.BatchNorm2d(6, dtype=dtype)

    def forward(self, x):
        y = self.conv(self.way(x))
        y = self.norm(y) if self.after == "norm" else y
        return F.silu(y) if self.after else y


def compiled(model, mode="light", **options):
    torch._dynamo.reset()
    return torch.compile(copy.deepcopy(model), backend=pn.backend, options={"mode": mode, **options})


def check(model, x, mode="light", grad=False, limit=1e-5, **options):
    """The same numbers, strides and gradients as torch's; the graph."""
    ours = compiled(model, mode, **options)
    with torch.set_grad_enabled(grad):
        y, right = ours(x), model(x)
    assert torch.allclose(y, right, atol=limit) and y.stride() == right.stride()
    if grad:
        for one in (y, right):
            one.square().sum().backward()
        for got, wanted in zip(ours.parameters(), model.parameters(), strict=True):
            assert wanted.grad is None or torch.allclose(got.grad, wanted.grad, rtol=1e-4, atol=1e-4)
    return compiler.graphs_of(ours)[-1]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_folded_in_light_mode(way, last, monkeypatch):
    calls = []
    fold = upsampling.fold_filter
    monkeypatch.setattr(upsampling, "fold_filter", lambda *args: calls.append(args[2]) or fold(*args))
    torch.manual_seed(0)
    x = torch.randn(2, 4, 5, 6).contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    graph = check(Behind(WAYS[way], "silu").eval(), x)
    assert len(graph.fused) == 1 and not graph.left and not graph.others and calls == [last]


@pytest.mark.parametrize("way", LEFT)
def test_what_is_no_upsampling(way):
    torch.manual_seed(0)
    graph = check(Behind(LEFT[way]).eval(), torch.randn(2, 4, 6, 8))
    assert len(graph.alone) == 1 and not graph.fused and not graph.others


@pytest.mark.parametrize("after", ["", "norm", "silu"])
@pytest.mark.parametrize("mode", ["light", "default"])
def test_what_follows_is_fused_as_well(mode, after):
    """A layer that is trained with its batch norm keeps its image; others are folded."""
    torch.manual_seed(0)
    model = Behind(WAYS["scale"], after)
    for train in (False, True)[: 1 + (after != "silu")]:
        graph = check(model.train(train), torch.randn(2, 4, 5, 6), mode, grad=train)
        assert len(graph.fused) == 1 and len(graph.fused[0]) >= 2 and not graph.left


@pytest.mark.parametrize("mode", ["light", "default"])
def test_16_bits_are_folded_if_asked(mode):
    """An option of the backend; without it inductor keeps the step, and in light mode one launch enlarges the image."""
    torch.manual_seed(0)
    model, x = Behind(WAYS["scale"], dtype=torch.bfloat16).eval(), torch.randn(2, 4, 5, 6).bfloat16()
    for word, folded in ((None, False), ("exact", False), ("folded", True)):
        graph = check(model, x, mode, limit=0.1, upsample_filter=word)
        assert bool(graph.fused) == folded and len(graph.others) == (not folded and mode == "light")
    wide = copy.deepcopy(model).float()
    assert not check(wide, x.float(), mode, upsample_filter="exact").fused
    with pytest.raises(ConvArgumentError, match="upsample_filter must be"):
        pn.compile(copy.deepcopy(model), mode, options={"upsample_filter": "sums"})


def test_a_filter_of_float32_is_folded_under_autocast():
    torch.manual_seed(0)
    model, x = Behind(WAYS["scale"], "silu").eval(), torch.randn(2, 4, 5, 6)
    ours = compiled(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y, right = ours(x), model(x)
    assert y.dtype is right.dtype is torch.bfloat16 and torch.allclose(y, right, atol=0.1)
    assert compiler.graphs_of(ours)[-1].fused


@pytest.mark.parametrize("ndim", [1, 3])
def test_signals_and_volumes(ndim):
    torch.manual_seed(0)
    conv = getattr(nn, f"Conv{ndim}d")(4, 6, 3, padding=1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = conv

        def forward(self, x):
            return F.relu(self.conv(F.interpolate(x, scale_factor=2.0 if ndim == 1 else (1.0, 2.0, 2.0))))

    assert check(Model().eval(), torch.randn(2, 4, *(5, 4, 6)[:ndim])).fused


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["light", "default"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_on_a_gpu(dtype, mode):
    torch.manual_seed(0)
    for last in (False, True):
        order = torch.channels_last if last else torch.contiguous_format
        model = Behind(WAYS["scale"], "silu").eval().cuda()
        model.conv = nn.Conv2d(64, 96, 3, padding=1, device="cuda")
        model = model.to(dtype).to(memory_format=order)
        x = torch.randn(2, 64, 24, 20, device="cuda").to(dtype).contiguous(memory_format=order)
        for word in ("exact", "folded"):
            ours = compiled(model, mode, upsample_filter=word)
            with torch.no_grad():
                y, theirs, right = ours(x), model(x), copy.deepcopy(model).double()(x.double())  # torch rounds float32 to TF32
            assert float((y - right).norm() / right.norm()) < (2e-3 if dtype is torch.float16 else 1e-5)
            assert y.stride() == theirs.stride()


class Frames(nn.Module):
    """Twice the frames by twice the channels, then twice the rows and columns, as decoders of videos do; `kind` says what is different."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.time, self.conv = kind, nn.Conv3d(8, 32, (3, 1, 1), padding=(1, 0, 0)), nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x):
        x = self.time(x).contiguous(memory_format=torch.channels_last_3d)
        n, c, t, h, w = x.shape
        split = x.reshape(n, c // 2, 2, t, h, w).transpose(1, 2) if self.kind == "channels apart" else x.reshape(n, 2, c // 2, t, h, w)
        x = split.permute(0, 2, 3, 1, 4, 5).reshape(n, c // 2, 2 * t, h, w)
        y = x.flatten(0, 1).reshape(x.shape) if self.kind == "more views" else x
        y = y.transpose(1, 2).reshape(2 * n * t, c // 2, h, w)
        z = self.conv(F.interpolate(y, scale_factor=2.0, mode="nearest"))
        return z + y.mean() if self.kind == "read" else z


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind, taken", [("", True), ("more views", True), ("channels apart", False), ("read", False)])
def test_frames_are_put_in_order_by_one_copy(kind, count, taken):
    torch.manual_seed(0)
    model, x = Frames(kind), torch.randn(count, 8, 3, 4, 5).contiguous(memory_format=torch.channels_last_3d)
    assert bool(check(model, x).others) == taken
    check(model, x, grad=True)
