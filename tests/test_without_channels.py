"""One image and one filter without an axis for channels, as scipy takes them."""

import re

import numpy as np
import pytest
import torch
from reference import assert_close

import pycuda_conv as pc
from pycuda_conv import ConvArgumentError, ConvProblem, Plan

SIZES = {1: ((40,), (5,)), 2: ((19, 23), (3, 4)), 3: ((9, 8, 11), (3, 2, 3))}
OPTIONS = [
    {}, {"padding": 1, "stride": 2}, {"padding": "same", "activation": "relu"}, {"dilation": 2, "padding": "valid"}, {"bias": True},
    {"bias": True, "scale": True, "residual": True, "activation": ("leaky_relu", 0.2)},
]  # fmt: skip


def drawn(ndim, dtype=np.float32):
    rng = np.random.default_rng()
    return [rng.standard_normal(shape).astype(dtype) for shape in SIZES[ndim]]


def given(ndim, options):
    """The options with arrays for what is only named."""
    x, w = SIZES[ndim]
    shape = ConvProblem.forward(ndim, x, w).result_shape
    shapes = {"bias": (1,), "scale": (1,), "residual": shape}
    rng = np.random.default_rng()
    return {k: rng.standard_normal(shapes[k]).astype(np.float32) if v is True else v for k, v in options.items()}


def function(ndim):
    return getattr(pc, f"conv{ndim}d")


def with_channels(ndim, x, w, options, **more):
    """The same call on arrays that have all their axes."""
    residual = {"residual": options["residual"][None, None]} if "residual" in options else {}
    return function(ndim)(x[None, None], w[None, None], **{**options, **residual}, **more)[0, 0]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_the_result_is_that_of_one_channel(device, ndim, options):
    (x, w), options = drawn(ndim), given(ndim, options)
    y = function(ndim)(x, w, **options, device=device)
    expected = with_channels(ndim, x, w, options, device=device)
    assert y.shape == expected.shape and y.ndim == ndim and y.dtype == np.float32
    assert np.array_equal(y, expected)


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_the_numbers_are_scipy_s(device, ndim):
    signal = pytest.importorskip("scipy.signal")
    x, w = drawn(ndim, np.float64)
    expected, magnitude = (signal.correlate(a, b, "valid", "direct") for a, b in ((x, w), (abs(x), abs(w))))
    assert_close(function(ndim)(x, w, device=device), expected, 1e-14 * magnitude)


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_out_and_views(device, ndim):
    x, w = drawn(ndim)
    expected = with_channels(ndim, x, w, {}, device=device)
    out = np.full(expected.shape, np.nan, np.float32)
    assert function(ndim)(np.asfortranarray(x), w[::-1][::-1], device=device, out=out) is out
    assert np.array_equal(out, expected)
    with pytest.raises(ConvArgumentError, match="out must have shape"):
        function(ndim)(x, w, device=device, out=out[None])


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_plans(device, ndim):
    x, w = drawn(ndim)
    expected = with_channels(ndim, x, w, {}, device=device)
    plan = Plan(ConvProblem.forward(ndim, x.shape, w.shape), device)
    assert plan.result_shape == expected.shape
    for y in (plan(x, w), plan.bind(w)(x), plan(x, w, out=np.empty_like(expected))):
        assert np.array_equal(y, expected)
    assert str(ConvProblem.forward(ndim, x.shape, w.shape)) in plan.explain()
    with pytest.raises(ConvArgumentError, match="this plan takes weight of shape"):
        plan(x, w[None, None])


def test_an_image_in_chunks(device):
    """Larger than what a GPU takes at once."""
    rng = np.random.default_rng()
    x, w = rng.standard_normal((3000, 2100), dtype=np.float32), rng.standard_normal((3, 3), dtype=np.float32)
    residual = rng.standard_normal(x.shape, dtype=np.float32)
    y = pc.conv2d(x, w, padding=1, residual=residual, device=device)
    assert np.array_equal(y, pc.conv2d(x[None, None], w[None, None], padding=1, residual=residual[None, None], device=device)[0, 0])


def test_a_stream_of_images(device):
    x, w = drawn(2)
    assert [y.shape for y in pc.conv2d_many([x, x[1:]], w, device=device)] == [(17, 20), (16, 20)]


def test_dask_arrays(device):
    da = pytest.importorskip("dask.array")
    x, w = np.random.default_rng().standard_normal((60, 50), dtype=np.float32), drawn(2)[1]
    residual = np.ones((60, 50), np.float32)
    for weight in (w, da.from_array(w)):
        y = pc.conv2d(da.from_array(x, chunks=(20, 25)), weight, padding="same", residual=residual, device=device)
        assert isinstance(y, da.Array) and y.shape == (60, 50) and y.numblocks == (3, 2)
        expected = pc.conv2d(x, w, padding="same", residual=residual, device=device)
        np.testing.assert_allclose(y.compute(scheduler="sync"), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ConvArgumentError, match="is a filter without channels"):
        pc.conv2d(da.from_array(x[None]), w)


# ---- torch


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_tensors_have_gradients(where, ndim):
    x, w = (torch.tensor(a, device=where, requires_grad=True) for a in drawn(ndim, np.float64))
    theirs = getattr(torch.nn.functional, f"conv{ndim}d")(x[None, None], w[None, None], padding=1)[0, 0]
    expected = torch.autograd.grad(theirs.square().sum(), (x, w))
    for _ in range(3):  # a call without gradients before must not change what a later one does
        with torch.no_grad():
            torch.testing.assert_close(function(ndim)(x, w, padding=1), theirs)
        y = function(ndim)(x, w, padding=1)
        torch.testing.assert_close(y, theirs)
        for got, wanted in zip(torch.autograd.grad(y.square().sum(), (x, w)), expected, strict=True):
            torch.testing.assert_close(got, wanted)


# ---- what is refused

X, W = np.zeros((8, 9), np.float32), np.zeros((3, 3), np.float32)


@pytest.mark.parametrize(("name", "arrays", "options", "text"), [
    ("conv2d", (X[None], W), {}, "weight of size [3, 3] is a filter without channels, which conv2d takes for an input of shape (H, W), but got input of size: [1, 8, 9]; for an input with channels weight has the shape (K, C/groups, R, S)"),
    ("conv2d", (X, W[None, None]), {}, "but got input of size: [8, 9]; an image of shape (H, W) goes with a filter of shape (R, S), but got weight of size [1, 1, 3, 3]"),
    ("conv1d", (X[0], W[None]), {}, "an image of shape (W) goes with a filter of shape (S), but got weight of size [1, 3, 3]"),
    ("conv3d", (X, np.zeros((3, 3, 3), "f")), {}, "which conv3d takes for an input of shape (D, H, W), but got input of size: [8, 9]"),
    ("conv2d", (X, W[None]), {}, "an image of shape (H, W) goes with a filter of shape (R, S), but got weight of size [1, 3, 3]"),
    ("conv2d", (X, W), {"groups": 2}, "an image and a filter without channels are one group, but got groups=2"),
    ("conv2d", (X, W, np.zeros(2, "f")), {}, "Given weight of size [3, 3], expected bias to be 1-dimensional with 1 elements"),
    ("conv2d", (X, np.zeros((9, 3), "f")), {}, "Kernel size can't be greater than actual input size"),
    ("conv2d", (X, W[:0]), {}, "kernel size should be greater than zero"),
    ("conv2d", (X[:0], W), {}, "Only zero batch or zero channel inputs are supported, but got input shape: [0, 9]"),
    ("conv_transpose2d", (X, W), {}, "conv2d alone takes filters without channels"),
    ("conv2d_input", ((8, 9), W, X[:6, :7]), {}, "conv2d alone takes filters without channels"),
    ("conv2d_weight", (X, (3, 3), X[:6, :7]), {}, "conv2d alone takes filters without channels"),
])
def test_what_does_not_go_together(name, arrays, options, text):
    with pytest.raises(ConvArgumentError, match=re.escape(text)):
        getattr(pc, name)(*arrays, **options, device="opencl")
