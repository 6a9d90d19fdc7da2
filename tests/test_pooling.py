"""Maxima of windows, and their gradient."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import simt
import torch
from reference import DTYPES

from pycuda_conv import nn
from pycuda_conv.engines.nn.max_pool import Pool
from pycuda_conv.nn import pooling

POOLS = [
    Pool("bfloat16", (2, 16, 9, 11), (3, 3), (2, 2), (1, 1), (1, 1)), Pool("float32", (1, 4, 8, 7), (2, 2), (2, 2), (0, 0), (1, 1)),
    Pool("float16", (3, 8, 7, 10), (3, 2), (1, 3), (1, 0), (2, 1)), Pool("float32", (1, 12, 5, 5), (5, 4), (2, 1), (2, 2), (1, 1)),
    Pool("float32", (2, 3, 9, 11), (3, 3), (2, 2), (1, 1), (1, 1), "NCHW"), Pool("bfloat16", (2, 5, 7, 10), (3, 2), (1, 3), (1, 0), (2, 1), "NCHW"),
    Pool("bfloat16", (1, 8, 13, 14), (3, 3), (2, 1), (0, 1), (3, 2)), Pool("float32", (1, 4, 13, 14), (2, 3), (4, 4), (1, 1), (1, 1)),
    Pool("float16", (2, 8, 8, 9), (3, 3), (2, 2), (0, 1), (1, 1)), Pool("float32", (1, 4, 8, 7), (3, 3), (2, 2), (1, 0), (1, 1), beyond=True),
    Pool("float32", (1, 4, 8, 7), (3, 2), (2, 3), (1, 0), (1, 1), beyond=True), Pool("float32", (2, 3, 6, 4), (2, 2), (2, 3), (1, 1), (2, 1), "NCHW", True),
]  # fmt: skip


MEANS = [
    Pool("float16", (2, 16, 8, 10), (2, 2), (2, 2), (0, 0), (1, 1), mean=True), Pool("bfloat16", (1, 8, 9, 11), (3, 2), (2, 1), (1, 1), (1, 1), mean=True),
    Pool("float32", (2, 4, 9, 7), (3, 4), (2, 3), (1, 2), (1, 1), mean=True, counted=False), Pool("float32", (1, 8, 5, 6), (3, 3), (1, 1), (1, 1), (1, 1), mean=True, divisor=7),
    Pool("float32", (1, 4, 8, 7), (3, 2), (2, 3), (1, 0), (1, 1), beyond=True, mean=True), Pool("float16", (1, 8, 7, 8), (2, 3), (3, 2), (1, 1), (1, 1), beyond=True, mean=True, counted=False),
]  # fmt: skip


def theirs(pool, x):
    if pool.mean:
        return torch.nn.functional.avg_pool2d(x, pool.taps, pool.stride, pool.padding, pool.beyond, pool.counted, pool.divisor or None)
    return torch.nn.functional.max_pool2d(x, pool.taps, pool.stride, pool.padding, pool.dilation, pool.beyond)


def ours(pool, x):
    if pool.mean:
        return pooling.mean_pool(x, pool.taps, pool.stride, pool.padding, pool.beyond, pool.counted, pool.divisor or None)
    return pooling.max_pool(x, pool.taps, pool.stride, pool.padding, pool.dilation, pool.beyond)


def operands(pool, special=False):
    """x with equal numbers, and with NaN and infinities; y's gradient of integers. As torch's tensors in float32."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(-3, 4, pool.shape).astype("f"))
    if special:
        for value in (np.nan, np.inf, -np.inf):
            x[torch.from_numpy(rng.random(pool.shape) < 0.1)] = value
    return x, torch.from_numpy(rng.integers(-4, 5, pool.result_shape).astype("f"))


def lying(array, pool):
    """As `pool` has it in memory."""
    return np.ascontiguousarray((np.moveaxis(array.numpy(), 1, -1) if pool.layout == "NHWC" else array.numpy()).astype(pool.dtype))


@pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_maxima_and_their_gradient(pool, special):
    x, dy = operands(pool, special)
    x.requires_grad_()
    y = theirs(pool, x)
    (dx,) = torch.autograd.grad(y, x, dy)
    size = y.numel()
    given, of_y = lying(x.detach(), pool), lying(dy, pool)
    memory = SimpleNamespace(buffers=[as_bytes(given), np.full(size * given.itemsize, 0xFF, np.uint8), np.full(size, 0xFF, np.uint8)])
    simt.run([[pool.forward()]], memory, 1)
    got = memory.buffers[1].view(given.dtype).reshape(of_y.shape)
    assert np.array_equal(got.astype("f"), lying(y.detach(), pool).astype("f"), equal_nan=True)
    alone = SimpleNamespace(buffers=[memory.buffers[0], np.full(got.nbytes, 0xFF, np.uint8), None])
    simt.run([[pool.forward()]], alone, 1)
    assert np.array_equal(alone.buffers[1], memory.buffers[1])
    memory = SimpleNamespace(buffers=[as_bytes(of_y), memory.buffers[2], np.full(given.nbytes, 0xFF, np.uint8)])
    simt.run([[pool.backward()]], memory, 1)
    assert np.array_equal(memory.buffers[2].view(given.dtype).reshape(given.shape).astype("f"), lying(dx, pool).astype("f"))


@pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
def test_a_window_without_a_pixel_has_no_maximum_and_no_gradient():
    pool = Pool("float32", (1, 2, 6, 6), (2, 1), (1, 1), (1, 0), (7, 1), "NCHW")
    assert pool.fits
    # torch's own gradient on the CPU is written behind the array here
    x, dy = operands(pool)
    given, count = lying(x, pool), dy.numel()
    memory = SimpleNamespace(buffers=[as_bytes(given), np.full(4 * count, 0xFF, np.uint8), np.zeros(count, np.uint8)])
    simt.run([[pool.forward()]], memory, 1)
    assert np.array_equal(memory.buffers[1].view("f"), theirs(pool, x).numpy().ravel()) and np.isneginf(memory.buffers[1].view("f")).all()
    memory = SimpleNamespace(buffers=[as_bytes(lying(dy + 9, pool)), memory.buffers[2], np.full(given.nbytes, 0xFF, np.uint8)])
    simt.run([[pool.backward()]], memory, 1)
    assert not memory.buffers[2].view("f").any()


@pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
@pytest.mark.parametrize("pool", MEANS, ids=str)
def test_means_and_their_gradient(pool):
    assert pool.fits
    x, dy = operands(pool)
    x.requires_grad_()
    y = theirs(pool, x)
    (dx,) = torch.autograd.grad(y, x, dy)
    near = {"float32": 1e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}[pool.dtype]
    for launch, given, wanted in ((pool.forward(), x, y), (pool.backward(), dy, dx)):
        expected = lying(wanted.detach(), pool)
        memory = SimpleNamespace(buffers=[as_bytes(lying(given.detach(), pool)), np.full(expected.nbytes, 0xFF, np.uint8)])
        simt.run([[launch]], memory, 1)
        found = memory.buffers[1].view(expected.dtype).reshape(expected.shape)
        assert np.allclose(found.astype("f"), expected.astype("f"), atol=near, rtol=near)


def as_bytes(array):
    return np.frombuffer(array.tobytes(), np.uint8)


def test_what_it_takes():
    pool = POOLS[0]
    assert pool.fits and pool.result_shape == (2, 16, 5, 6)
    others = {"stride": (0, 1), "dilation": (1,), "dtype": "float64", "shape": (2, 12, 9, 11), "taps": (16, 16), "padding": (2, 2)}
    assert not any(Pool(**{**vars(pool), name: value}).fits for name, value in others.items())
    means = {"dilation": (1, 2), "divisor": -1, "shape": (2, 12, 9, 11)}
    assert Pool(**{**vars(pool), "mean": True}).fits and Pool(**{**vars(pool), "mean": True, "taps": (16, 16)}).fits
    assert not any(Pool(**{**vars(pool), "mean": True, name: value}).fits for name, value in means.items())
    assert not Pool(**{**vars(pool), "shape": (0, 16, 9, 11)}).fits
    assert Pool(**{**vars(pool), "shape": (2, 3, 9, 11), "layout": "NCHW"}).fits


def model():
    torch.manual_seed(0)
    parts = torch.nn.Conv2d(8, 16, 3, padding=1, bias=False), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.MaxPool2d(3, 2, 1)
    return torch.nn.Sequential(*parts)


_MAX, _MEAN = torch.nn.MaxPool2d, torch.nn.AvgPool2d


@pytest.mark.parametrize(("name", "layers", "windows"), [
    ("max_pool", (_MAX((3, 2), 2, 1), _MAX(2)), [((3, 2), 2, 1, 1, False), (2, 2, 0, 1, False)]),
    ("max_pool", (_MAX((3, 2), 2, 1, ceil_mode=True), _MAX(2)), [((3, 2), 2, 1, 1, True), (2, 2, 0, 1, False)]),
    ("mean_pool", (_MEAN(3, 2, 1, ceil_mode=True, count_include_pad=False), _MEAN((2, 1), divisor_override=3)), [(3, 2, 1, True, False, None), ((2, 1), (2, 1), 0, False, True, 3)]),
    ("max_pool", (_MAX(2, return_indices=True),), []),
])  # fmt: skip
def test_a_graph_in_light_mode_calls_ours(monkeypatch, name, layers, windows):
    calls, genuine = [], getattr(pooling, name)
    monkeypatch.setattr(pooling, name, lambda x, *windows: (calls.append(windows), genuine(x, *windows))[1])
    plain, x = torch.nn.Sequential(*layers), torch.randn(1, 2, 9, 8)
    compiled = nn.compile(copy.deepcopy(plain), "light")
    given, made = [x.clone().requires_grad_() for _ in range(2)], []
    for one, images in zip((compiled, plain), given, strict=True):
        made.append(one(images) if windows else one(images)[0])
        made[-1].square().sum().backward()
    assert (
        torch.equal(compiled(x) if windows else compiled(x)[0], made[1])
        and torch.equal(*made)
        and torch.equal(given[0].grad, given[1].grad)
    )
    assert calls == 2 * windows


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("pool", "special"),
    [*((pool, special) for pool in POOLS for special in (False, True)), *((pool, False) for pool in MEANS)],
    ids=str,
)
def test_on_a_gpu(pool, special):
    """Against the CPU: torch's gradient of padded means with the channels last, on a GPU, leaves the padding out of account (2.11)."""
    form = torch.channels_last if pool.layout == "NHWC" else torch.contiguous_format
    x, dy = (a.cuda().to(getattr(torch, pool.dtype)).contiguous(memory_format=form) for a in operands(pool, special))
    found = []
    for function, x_, dy_ in ((ours, x, dy), (theirs, x.cpu().float(), dy.cpu().float())):
        given = x_.clone().requires_grad_()
        y = function(pool, given)
        found.append((y.detach(), *torch.autograd.grad(y, given, dy_)))
    with torch.no_grad():
        assert torch.equal(ours(pool, x).nan_to_num(7), found[0][0].nan_to_num(7))
    assert found[0][0].is_contiguous(memory_format=form)
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine.cpu(), other.to(mine.dtype), equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [torch.channels_last, torch.contiguous_format], ids=str)
def test_a_model_keeps_less_on_a_gpu(monkeypatch, form):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)

    base = model().cuda().to(memory_format=form).train()
    ours, x = nn.compile(copy.deepcopy(base), "light"), torch.randn(8, 8, 64, 64, device="cuda").contiguous(memory_format=form)
    kept, results = [], []
    ours(x)
    for one in (ours, base):
        before = torch.cuda.memory_allocated()
        y = one(x)
        kept.append(torch.cuda.memory_allocated() - before)
        y.square().mean().backward()
        results.append((y.detach(), one[0].weight.grad))
    assert kept[0] < 0.7 * kept[1]
    # rounding decides between numbers that are nearly the same, and the gradient goes another way then
    assert all(float((a - b).norm() / b.norm()) < 1e-3 for a, b in zip(*results, strict=True))


assert "bfloat16" in DTYPES  # numpy's name for it


@pytest.mark.gpu
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("options", [(3, 2, 1), ((3, 2), (1, 3), (1, 0), (2, 1)), (2,)], ids=str)
def test_maxima_of_compiled_training(options, last):
    """By operators under AOTAutograd: values and gradients are torch's; layers that the kernels do not take stay torch's."""
    from pycuda_conv.nn import compiler

    form = torch.channels_last if last else torch.contiguous_format
    for channels, dtype in ((16, torch.bfloat16), (12, torch.float32), (5, torch.float16)):
        x = torch.randint(-3, 4, (2, channels, 18, 21), device="cuda").to(dtype).to(memory_format=form)
        given = [x.clone().requires_grad_() for _ in range(2)]
        dy, found = None, []

        def traced(gm, inputs, found=found):
            compiler.rewritten(gm, inputs, "default", raises=True)
            found += [str(node.target) for node in gm.graph.nodes]
            return torch._dynamo.lookup_backend("aot_eager")(gm, inputs)

        pool = torch.nn.MaxPool2d(*options)
        torch._dynamo.reset()
        made = []
        for f, one in ((pool, given[0]), (torch.compile(lambda x, pool=pool: pool(x * 1), backend=traced, dynamic=False), given[1])):
            made.append(f(one))
            dy = torch.randint_like(made[0], -4, 5) if dy is None else dy
            made[-1].backward(dy)
        assert torch.equal(*made) and made[0].stride() == made[1].stride() and torch.equal(given[0].grad, given[1].grad)
        assert ("pycuda_conv.max_pool.default" in found) == (not last or channels % (8 if dtype.itemsize == 2 else 4) == 0)
    windows = [n for pair in pooling.pairs_of(3, 2, 1, 1) for n in pair]
    x = torch.randn(2, 8, 9, 9, device="cuda").to(memory_format=form)
    torch.library.opcheck(torch.ops.pycuda_conv.max_pool_taps.default, (x, windows, last))
