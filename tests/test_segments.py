"""Two arrays of one sum: the kernel's text on the simulated machine, and on a GPU."""

from types import SimpleNamespace

import numpy as np
import pytest
import simt
import torch
from alike import like_h200
from reference import DTYPES, reference

import pycuda_conv as pc
from pycuda_conv import ConvArgumentError, ConvProblem
from pycuda_conv.engines.hopper import segments
from pycuda_conv.engines.hopper.dense import DenseNhwc

H200 = like_h200((9, 0), "cuda")
#: Channels of both arrays, of the result, sizes, taps of both filters; tails of channels, rows and pixels.
CASES = [
    (64, 64, 40, (9, 8), 3, 3), (24, 40, 136, (7, 5), 3, 3), (8, 136, 24, (5, 6), 1, 1), (72, 24, 33, (6, 7), 3, 1), (64, 16, 64, (4, 9), 3, 1),
]  # fmt: skip


def problems(c1, c2, k, size, r1, r2, dtype, **epilogue):
    def one(c, r, **more):
        return ConvProblem.forward(2, (2, c, *size), (k, c, r, r), padding=r // 2, dtype=dtype, layout="NHWC", precision="tf32", **more)

    return one(c1, r1, bias_shape=(k,), **epilogue), one(c2, r2)


def last(a):
    return np.ascontiguousarray(np.moveaxis(a, 1, -1))


@pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
@pytest.mark.parametrize("dtype", [dtype for dtype in ("float16", "bfloat16", "float32") if dtype in DTYPES])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_the_simulated_machine(case, dtype):
    """Whole numbers, exactly; a joined filter where both have the same taps, else one each."""
    c1, c2, k, size, r1, r2 = case
    rng = np.random.default_rng(CASES.index(case))
    first, second = problems(*case, dtype, activation="relu")
    a, b = (rng.integers(-2, 3, (2, c, *size)).astype(dtype) for c in (c1, c2))
    wa, wb = (rng.integers(-2, 3, (k, c, r, r)).astype(dtype) for c, r in ((c1, r1), (c2, r2)))
    bias = rng.integers(-3, 4, k).astype(dtype)
    right = np.maximum(reference(False, 2, a, wa, bias, padding=r1 // 2) + reference(False, 2, b, wb, padding=r2 // 2), 0)
    joined = r1 == r2
    filters = [last(np.concatenate([wa, wb], 1)), None] if joined else [last(wa), last(wb)]
    for config in (DenseNhwc(64, 64), DenseNhwc(128, 128)):
        launch = segments.launch(first, second, config, H200, joined)
        y = np.full((2, *size, k), np.nan).astype(dtype)
        arrays = [last(a), filters[0], bias, y, None, None, None, None, last(b), filters[1]]
        memory = SimpleNamespace(buffers=[None if one is None else one.reshape(-1).view(np.uint8) for one in arrays])
        simt.run([[launch]], memory, 1)
        got = memory.buffers[3].view(dtype).reshape(y.shape)
        np.testing.assert_array_equal(np.moveaxis(got, -1, 1).astype(float), right)


# ---- several arrays in a call


def test_arrays_of_all_kinds_are_joined():
    rng = np.random.default_rng(1)
    a, b, c = (rng.standard_normal((2, n, 5, 6)) for n in (3, 4, 1))
    w, bias = rng.standard_normal((5, 8, 3, 3)), rng.standard_normal(5)
    right = reference(False, 2, np.concatenate([a, b, c], 1), w, bias, padding=1)
    np.testing.assert_allclose(pc.conv2d((a, b, c), w, bias, padding=1), right, rtol=1e-12, atol=1e-12)
    out = np.full(right.shape, np.nan)
    assert pc.conv2d([a, b, c], w, bias, padding=1, out=out) is out
    np.testing.assert_allclose(out, right, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(pc.conv2d((a[0], b[0], c[0]), w, bias, padding=1), right[0], rtol=1e-12, atol=1e-12)
    both = pc.conv2d((a, b, c), w, bias, padding=1, padding_mode="replicate", upsample=2)
    np.testing.assert_allclose(both, pc.conv2d(np.concatenate([a, b, c], 1), w, bias, padding=1, padding_mode="replicate", upsample=2))
    da = pytest.importorskip("dask.array")
    lazy = pc.conv2d(tuple(map(da.from_array, (a, b, c))), w, bias, padding=1)
    np.testing.assert_allclose(lazy.compute(), right, rtol=1e-12, atol=1e-12)


def test_gradients_reach_all_arrays():
    torch.manual_seed(0)
    arrays = [torch.randn(2, n, 7, dtype=torch.float64, requires_grad=True) for n in (3, 2)]
    w = torch.randn(4, 5, 3, dtype=torch.float64, requires_grad=True)
    found = []
    for y in (pc.conv1d(tuple(arrays), w, padding=1), torch.nn.functional.conv1d(torch.cat(arrays, 1), w, padding=1)):
        found.append((y, *torch.autograd.grad(y.square().sum(), [*arrays, w])))
    for got, right in zip(*found, strict=True):
        assert torch.allclose(got, right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "arrays, error, text",
    [
        (((2, 3, 5, 6), (1, 4, 5, 6)), ConvArgumentError, r"differ in their channels alone, but got sizes \[2, 3, 5, 6\] and \[1, 4, 5, 6\]"),
        (((2, 3, 5, 6), (2, 4, 5, 7)), ConvArgumentError, "differ in their channels alone"), (((5, 6), (5, 6)), ConvArgumentError, "an axis for channels"),
        (((2, 3, 5, 6), (2, 5, 5, 6)), ConvArgumentError, "expected input"),
    ],
)  # fmt: skip
def test_what_is_refused(arrays, error, text):
    with pytest.raises(error, match=text):
        pc.conv2d(tuple(np.zeros(shape, "f") for shape in arrays), np.zeros((5, 7, 3, 3), "f"), padding=1)


def test_other_things_are_refused():
    x, w = np.zeros((2, 3, 5, 6), "f"), np.zeros((5, 6, 3, 3), "f")
    with pytest.raises(TypeError, match="but got 3 of type int in it"):
        pc.conv2d((x, 3), w)
    with pytest.raises(ConvArgumentError, match="have one dtype, but got float32 and float64"):
        pc.conv2d((x, x.astype("d")), w)
    with pytest.raises(TypeError, match=r"numpy\.asarray"):
        pc.conv2d(((1, 2), (3, 4)), w)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_on_a_gpu(dtype, monkeypatch):
    """Where they lie, by the launch of its own, and not by a copy."""
    from pycuda_conv import joined

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("it takes a GPU of compute capability 9.0")
    monkeypatch.setattr(joined.engines, "predicted", lambda *_: None)
    monkeypatch.setattr(joined, "joined", lambda *_: pytest.fail("the arrays were joined"))
    torch.manual_seed(0)
    limit = {"float16": 5e-4, "bfloat16": 4e-3, "float32": 1e-3}[dtype]
    for ca, cb, k, size, r in (
        (64, 64, 96, (24, 20), 3), (320, 640, 320, (16, 16), 1), (40, 24, 136, (30, 31), 3), (256, 128, 256, (64, 64), 3)
    ):
        a, b = (
            torch.randn(2, c, *size, device="cuda").to(getattr(torch, dtype)).contiguous(memory_format=torch.channels_last)
            for c in (ca, cb)
        )
        w = (torch.randn(k, ca + cb, r, r, device="cuda") / ((ca + cb) * r * r) ** 0.5).to(a.dtype)
        bias, more = torch.randn(k, device="cuda").to(a.dtype), torch.randn(2, k, *size, device="cuda").to(a.dtype)
        options = {"padding": r // 2, "precision": "tf32"}
        right = torch.nn.functional.conv2d(torch.cat([a, b], 1).double(), w.double(), bias.double(), padding=r // 2)
        for filter in (w, w.contiguous(memory_format=torch.channels_last)):
            y = pc.conv2d((a, b), filter, bias, **options)
            assert y.is_contiguous(memory_format=torch.channels_last) and float((y - right).norm() / right.norm()) < limit
        y = pc.conv2d((a, b), w, bias, residual=more, activation="relu", **options)
        assert float((y - (right + more).relu()).norm() / right.norm()) < limit
