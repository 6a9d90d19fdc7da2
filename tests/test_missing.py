"""Convolutions of arrays with missing numbers, against a loop over pixels by astropy's rule."""

import numpy as np
import pytest
import torch

import pycuda_conv as pc


def by_pixels(x, gone, w, pad, mode="zeros"):
    """NCHW; the weights of numbers that are there, scaled to the sum of all; what lies outside counts as numbers."""
    around = [(0, 0), (0, 0), (pad, pad), (pad, pad)]
    kinds = {"zeros": {}, "replicate": {"mode": "edge"}, "circular": {"mode": "wrap"}}[mode]
    wide = np.pad(np.where(gone, 0, x).astype(float), around, **kinds)
    there = np.pad((~gone).astype(float), around, **(kinds or {"constant_values": 1}))
    n, (k, _, r, s) = len(x), w.shape
    y = np.empty((n, k, wide.shape[2] - r + 1, wide.shape[3] - s + 1))
    for at in np.ndindex(*y.shape):
        part = (at[0], slice(None), slice(at[2], at[2] + r), slice(at[3], at[3] + s))
        weight = (w[at[1]] * there[part]).sum()
        y[at] = (w[at[1]] * wide[part]).sum() / weight * w[at[1]].sum() if weight > 1e-6 * w[at[1]].sum() else np.nan
    return y


@pytest.mark.parametrize("mode", ["zeros", "replicate", "circular"])
@pytest.mark.parametrize("kind", ["numpy", "torch", "dask"])
def test_nan_is_interpolated(kind, mode):
    rng = np.random.default_rng(0)
    x, w = rng.random((2, 3, 9, 11)), rng.random((4, 3, 3, 3))
    x[rng.random(x.shape) < 0.3] = np.nan
    x[1, :, 2:7, 3:9] = np.nan
    want = by_pixels(x, np.isnan(x), w, 1, mode)
    assert np.isnan(want).any()
    for dtype, tolerance in (("float64", 1e-12), ("float32", 3e-6)):
        a, b = x.astype(dtype), w.astype(dtype)
        if kind == "torch":
            a, b = torch.from_numpy(a), torch.from_numpy(b)
        elif kind == "dask":
            a = pytest.importorskip("dask.array").from_array(a, chunks=(1, 3, 5, 11))
        got = np.asarray(pc.conv2d(a, b, padding=1, padding_mode=mode, nan="interpolate"))
        np.testing.assert_allclose(got, want, rtol=tolerance)
        assert got.dtype == dtype


def test_masks_and_fills():
    rng = np.random.default_rng(1)
    x, w, gone = rng.integers(0, 256, (12, 14), np.uint8), rng.random((3, 5)).astype("float32"), rng.random((12, 14)) < 0.2
    got = pc.conv2d(x, w, mask=gone)
    np.testing.assert_allclose(got, by_pixels(x[None, None], gone[None, None], w[None, None], 0)[0, 0], rtol=3e-6)
    batch = np.stack([x, x[::-1]])[:, None].astype("float32")
    edge = np.float32([[[[0, -1, 0], [-1, 4, -1], [0, -1, 0]]]])
    want = pc.conv2d(np.where(gone, np.float32(7), batch), edge, np.float32([1]), activation="relu")
    np.testing.assert_array_equal(pc.conv2d(batch, edge, np.float32([1]), activation="relu", mask=gone, fill=7), want)
    out = np.empty_like(got)
    assert pc.conv2d(x, w, mask=gone, out=out) is out
    np.testing.assert_array_equal(out, got)
    line = np.float32([1, 2, np.nan, 4, 5])
    np.testing.assert_allclose(pc.conv1d(line, np.float32([1, 1, 1]), nan="interpolate"), [4.5, 9, 13.5])
    volume = x[None].astype("float32")
    np.testing.assert_allclose(pc.conv3d(volume, w[None], nan="interpolate"), pc.conv3d(volume, w[None]), rtol=1e-6)
    np.testing.assert_array_equal(pc.conv2d(x, w, nan="interpolate"), pc.conv2d(x, w))


def test_torch_differentiates():
    x, w = torch.rand(1, 2, 5, 6, dtype=torch.float64), torch.rand(3, 2, 3, 3, dtype=torch.float64) + 0.1
    mask = torch.rand(5, 6) < 0.2
    x.requires_grad_(), w.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: pc.conv2d(x, w, padding=1, mask=mask), (x, w), fast_mode=True)


def test_what_does_not_fit_is_refused():
    x, w = np.ones((1, 1, 5, 5), np.float32), np.ones((1, 1, 3, 3), np.float32)
    for more, words in (
        ({"nan": "fill"}, "nan must be"), ({"fill": 1.0}, "go with"), ({"mask": np.ones((4, 5), bool)}, "mask must have the shape"),
        ({"nan": "interpolate", "activation": "relu"}, "activation goes with fill="), ({"nan": "interpolate", "dtype": "uint8"}, "dtype goes with fill="),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            pc.conv2d(x, w, **more)
    with pytest.raises(ValueError, match="pass fill="):
        pc.conv2d(x, -w, nan="interpolate")
    with pytest.raises(TypeError, match="real arrays"):
        pc.conv2d(x.astype("complex64"), w, nan="interpolate")
    with pytest.raises(TypeError, match="mask must be an array of bool"):
        pc.conv2d(x, w, mask=[True])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8"])
def test_gpuarrays(dtype):
    gpuarray = pytest.importorskip("pycuda.gpuarray")
    ndimage = pytest.importorskip("pycuda_conv.ndimage")
    rng = np.random.default_rng(2)
    x, w, gone = rng.random((2, 3, 9, 11)) * 100, rng.random((4, 3, 3, 3)), rng.random((9, 11)) < 0.2
    x = x.astype(dtype)
    if dtype != "uint8":
        x[rng.random(x.shape) < 0.2] = np.nan
    taps = w.astype("float64" if dtype == "float64" else "float32")
    with pc.runtime.get_device("cuda:0"):
        there, filter, mask = gpuarray.to_gpu(x), gpuarray.to_gpu(taps), gpuarray.to_gpu(gone)
        got = pc.conv2d(there, filter, padding=1, nan="interpolate", mask=mask).get()
        np.testing.assert_allclose(got, pc.conv2d(x, taps, padding=1, nan="interpolate", mask=gone, device="cuda:0"), rtol=3e-6)
        got = pc.conv2d(there, filter, padding=1, mask=mask, fill=3).get()
        np.testing.assert_array_equal(got, pc.conv2d(x, taps, padding=1, mask=gone, fill=3, device="cuda:0"))
        image, hidden = there[1, 2], gpuarray.to_gpu(np.ascontiguousarray(gone))
        for options in (
            {"nan": "interpolate"}, {"mask": hidden}, {"nan": "interpolate", "mask": hidden, "preserve_nan": True},
            {"mask": hidden, "fill": 2.0}
        ):
            if dtype == "uint8" and options.get("preserve_nan"):
                continue
            on_host = {name: gone if value is hidden else value for name, value in options.items()}
            got = ndimage.gaussian_filter(image, 1.0, output="float32", **options).get()
            np.testing.assert_allclose(got, ndimage.gaussian_filter(x[1, 2], 1.0, output="float32", device="cuda:0", **on_host), rtol=3e-6)
