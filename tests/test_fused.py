"""The fused layer against torch's three modules, in float64; the kernels under it alone; the gradient of a bias."""

import contextlib
import copy
import io
import itertools
import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
import simt
import torch
from reference import ACTIVATIONS, DTYPES, EPS, SUM_EPS, activated, activation_of, covering, needs_nvcc, nvcc_of

import pycuda_conv as pc
import pycuda_conv.nn as fused_modules
from pycuda_conv import execute
from pycuda_conv.arrays import kind_of
from pycuda_conv.engines.nn import batch_norm
from pycuda_conv.engines.nn.batch_norm import Pixels, compiled
from pycuda_conv.plan import cached_plan
from pycuda_conv.runtime import driver, get_device

nn = torch.nn
Settings = fused_modules.autograd.Settings

CLASSES = {n: getattr(fused_modules, f"FusedConvBnReLU{n}d") for n in (1, 2, 3)}
CONVS, NORMS = ({n: getattr(nn, f"{name}{n}d") for n in (1, 2, 3)} for name in ("Conv", "BatchNorm"))
TORCH_DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}
#: Of the largest element: what the rounding of an honest computation may lead to.
TOLERANCE = {"float64": 1e-12, "float32": 64 * EPS["float32"], "float16": 8 * EPS["float16"], "bfloat16": 8 * EPS["bfloat16"]}


# ---- the kernels

# every combination of layout and width of loads; PoCL compiles four kernels for each, the layers below use the same ones
SHAPES = {
    "planes of 15": ("NCHW", 17, 15), "planes of 24": ("NCHW", 1, 24), "pixels of 8": ("NHWC", 8, 30), "pixels of 65": ("NHWC", 65, 11),
}  # fmt: skip
#: Of 16-bit numbers, of which the widest loads take eight.
FOURS = {"pixels of 12": ("NHWC", 12, 30)}
RUNS = [(shape, dtype) for shape in SHAPES for dtype in DTYPES if dtype in ("float32", "float64") or shape != "pixels of 65"]
RUNS += [(shape, "bfloat16") for shape in FOURS]


@dataclass
class Kernels:
    """The kernels on arrays as they lie in memory, (N, K, plane) or (N, plane, K); results in float64 and that order."""

    device: str  # or "simt": the machine that runs CUDA's text, with the loads that only CUDA has
    pixels: Pixels

    @property
    def axes(self) -> tuple:
        return (0, 2) if self.pixels.layout == "NCHW" else (0, 1)

    def normals(self, seed: int = 0, mean: float = 0.0, std: float = 1.0) -> np.ndarray:
        p = self.pixels
        shape = (p.N, p.K, p.plane) if p.layout == "NCHW" else (p.N, p.plane, p.K)
        return (mean + std * np.random.default_rng(seed).standard_normal(shape)).astype(p.dtype)

    def wide(self, values) -> np.ndarray:
        """What there is one of a channel, beside pixels in float64."""
        return np.asarray(values, np.float64)[:, None] if self.pixels.layout == "NCHW" else np.asarray(values, np.float64)

    @property
    def sums_dtype(self) -> str:
        return "float64" if self.pixels.dtype == "float64" else "float32"

    def of_channel(self, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).uniform(0.5, 2, self.pixels.K).astype(self.sums_dtype)

    def poisoned(self, *shape: int) -> np.ndarray:
        return np.full(shape, np.nan, self.sums_dtype)

    def run(self, maker, inputs, outs, *options) -> None:
        if self.device == "simt":
            return self._simulated(maker(self.pixels, 3, *options), inputs, outs)
        device, kind = get_device(self.device), kind_of("an array", inputs[0])
        launch, workspace = compiled(maker, self.pixels, device, *options)
        execute.launch(kind, device, launch, inputs, outs, workspace)

    @staticmethod
    def _simulated(made, inputs, outs) -> None:
        steps, workspace = made
        given = [None if one is None else np.frombuffer(one.tobytes(), np.uint8) for one in (*inputs, *outs)]
        memory = SimpleNamespace(buffers=[*given, np.full(workspace, 0xFF, np.uint8)])
        simt.run([steps], memory, 1)
        for out, found in zip(outs, memory.buffers[len(inputs) :], strict=False):
            if out is not None:
                out[...] = found.view(out.dtype).reshape(out.shape)


#: Blocks a channel, and the most elements of one that a block takes as a whole. With few slices threads go around their loops.
SLICES = {"many slices": (16, 0), "few slices": (1, 0), "whole": (16, 1 << 30)}


@pytest.fixture(params=SLICES)
def slices(request, monkeypatch):
    blocks, most_whole = SLICES[request.param]
    monkeypatch.setattr(batch_norm, "BLOCKS", dict.fromkeys(batch_norm.BLOCKS, blocks))
    monkeypatch.setattr(batch_norm, "MOST_WHOLE", most_whole)
    compiled.cache_clear()
    yield
    compiled.cache_clear()


def pixels_of(shape: str, dtype: str) -> Pixels:
    layout, k, plane = (SHAPES | FOURS)[shape]
    return Pixels(dtype, layout, 4100 // k // plane + 3, k, plane)


@pytest.fixture(params=RUNS, ids="-".join)
def kernels(request, device, slices):
    return Kernels(device, pixels_of(*request.param))


def near(got, ref, tolerance: float, scale=None) -> None:
    """Within `tolerance` of `scale`, or of the largest element of `ref`."""
    got, ref = (np.asarray(a.detach().double().cpu() if isinstance(a, torch.Tensor) else a, np.float64) for a in (got, ref))
    assert got.shape == ref.shape
    scale = np.abs(ref).max(initial=0) if scale is None else scale
    error = np.abs(got - ref)
    assert (error <= tolerance * scale).all(), f"off by {np.nanmax(error):.3g} of {np.max(scale):.3g}, {np.max(error / scale):.3g} of it"


@pytest.mark.pairs
@pytest.mark.parametrize("tracked", [None, 4], ids=["momentum", "cumulative"])
def test_statistics(kernels, tracked):
    y, eps, momentum = kernels.normals(mean=0.5), 1e-3, 0.3
    mean, invstd, running_mean, running_var = (
        kernels.poisoned(kernels.pixels.K), kernels.poisoned(kernels.pixels.K), *map(kernels.of_channel, (1, 2)),
    )
    share = 1 / tracked if tracked else momentum
    wide = y.astype(np.float64)
    expected_mean, var, unbiased = wide.mean(kernels.axes), wide.var(kernels.axes), wide.var(kernels.axes, ddof=1)
    moved = [(1 - share) * old.astype(np.float64) + share * new for old, new in ((running_mean, expected_mean), (running_var, unbiased))]
    count = None if tracked is None else np.array(tracked, np.int64)
    counted = None if tracked else np.array([2**40 + 6])
    kernels.run(batch_norm.statistics, (y, count), (mean, invstd, running_mean, running_var, counted), eps, momentum)
    assert counted is None or counted[0] == 2**40 + 7
    tolerance = 16 * SUM_EPS[kernels.pixels.dtype]
    near(mean, expected_mean, tolerance, scale=1)
    near(invstd, 1 / np.sqrt(var + eps), tolerance)
    near(running_mean, moved[0], tolerance)
    near(running_var, moved[1], tolerance)


@pytest.mark.parametrize("slices", ["whole"], indirect=True)
@pytest.mark.parametrize("kernels", [run for run in RUNS if SHAPES.get(run[0], "N")[0] == "NCHW"], ids="-".join, indirect=True)
@pytest.mark.parametrize("number", range(3))
def test_a_forward_pass_by_one_launch(kernels, number):
    """The same bits as by a launch for the statistics and another."""
    y, residual, channels = kernels.normals(1, mean=1), kernels.normals(2) if number == 1 else None, kernels.pixels.K
    affine = (None, None) if number == 2 else (kernels.of_channel(3), kernels.of_channel(4))
    activation, made = ("relu", None, "gelu")[number], []
    for whole in (False, True):
        found = [kernels.poisoned(channels) for _ in range(2)] + [kernels.of_channel(seed) for seed in (5, 6)] + [np.array([3])]
        out, options = np.full(y.shape, np.nan, y.dtype), (1e-3, 0.25)
        if whole:
            kernels.run(
                batch_norm.whole_forward, (y, None, *affine, residual), (*found, out, None), *options, activation, residual is not None
            )
        else:
            kernels.run(batch_norm.statistics, (y, None), found, *options)
            kernels.run(batch_norm.forward, (y, *found[:2], *affine, residual), (out, None), activation, residual is not None)
        made.append((*found, out))
    assert made[0][4] == 4
    assert all(map(np.array_equal, *made))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_large_mean_costs_no_digits_of_the_variance(device, slices, shape, dtype):
    kernels = Kernels(device, pixels_of(shape, dtype))
    y, k = kernels.normals(mean=1e4), kernels.pixels.K
    mean, invstd, running_mean, running_var = (kernels.poisoned(k) for _ in range(4))
    running_mean[:] = running_var[:] = 0
    kernels.run(batch_norm.statistics, (y, None), (mean, invstd, running_mean, running_var, None), 1e-30, 1.0)
    wide = y.astype(np.float64)
    tolerance = 32 * SUM_EPS[dtype]
    near(invstd, 1 / wide.std(kernels.axes), tolerance)
    near(running_var, wide.var(kernels.axes, ddof=1), tolerance)
    near(mean, wide.mean(kernels.axes), 8 * SUM_EPS[dtype])


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations_of_huge_values_have_finite_gradients(device, activation):
    """As torch's have, whose products of 0 and infinity are none: where the derivative is 0, an infinite gradient becomes 0 too."""
    kernels = Kernels(device, Pixels("float32", "NCHW", 3, 1, 16))
    ones, none, dout = np.ones(1, "f"), np.zeros(1, "f"), kernels.normals(2)
    y = np.tile(np.array([-1e12, -1e4, -100, -20, 0, 20, 100, 1e4, 1e12] + [1] * 7, "f"), 3).reshape(3, 1, 16)
    if activation in ("relu", "relu6", "hardswish"):
        dout[0, 0, 1] = np.inf
    dy, sums = np.full(y.shape, np.nan, "f"), kernels.poisoned(2, 1)
    kernels.run(batch_norm.backward, (y, dout, none, ones, None, None, None), (dy, sums, None), activation, False)
    v = torch.from_numpy(y).requires_grad_()
    fused_modules.autograd.activated(v, activation).backward(torch.from_numpy(dout))
    assert np.isfinite(dy).all()
    near(dy, v.grad, 1e-5)


def mask_of(out, pixels):
    """Where a layer's result is above 0: of each item's numbers a bit."""
    return np.packbits((out > 0).reshape(-1, pixels.item), axis=1, bitorder="little").ravel()


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("activation", "affine", "summed"), [("relu", True, False), ("relu", False, True), (None, True, True), (None, False, False)]
)
def test_forward(kernels, activation, affine, summed, gain=1):
    y, mean, invstd = kernels.normals(mean=3), kernels.of_channel(1), kernels.of_channel(2)
    gamma, beta = (-gain * kernels.of_channel(3), kernels.of_channel(4)) if affine else (None, None)
    residual = kernels.normals(5) if summed else None
    out, mask = np.full(y.shape, np.nan, y.dtype), np.full(kernels.pixels.items, 255, np.uint8) if activation and summed else None
    kernels.run(batch_norm.forward, (y, mean, invstd, gamma, beta, residual), (out, mask), activation, summed)
    expected = (y.astype(np.float64) - kernels.wide(mean)) * kernels.wide(invstd)
    expected = expected * kernels.wide(gamma) + kernels.wide(beta) if affine else expected
    expected = expected + residual.astype(np.float64) if summed else expected
    near(out, activated(expected, activation), 2 * EPS[kernels.pixels.dtype])
    assert mask is None or np.array_equal(mask, mask_of(out, kernels.pixels))


#: Every pair of values.
BACKWARDS = [
    ("relu" if relu else None, summed, of_batch, of_batch == (relu == summed)) for relu in (True, False) for summed in (False, True)
    for of_batch in (True, False)
]
#: Values on whose side of a bend rounding may decide, by their distance from it.
BENDS = {"relu6": (0, 6), "hardswish": (-3, 3)}


@pytest.mark.pairs
@pytest.mark.parametrize(("activation", "summed", "of_batch", "affine"), BACKWARDS)
def test_backward(kernels, activation, summed, of_batch, affine, gain=1):
    y, dout, mean, invstd = kernels.normals(1, mean=1), kernels.normals(2), kernels.of_channel(1), kernels.of_channel(2)
    gamma, beta = (-gain * kernels.of_channel(3), kernels.of_channel(4)) if affine else (None, None)
    xhat = (y.astype(np.float64) - kernels.wide(mean)) * kernels.wide(invstd)
    before = xhat * kernels.wide(gamma) + kernels.wide(beta) if affine else xhat
    assert gain == 1 or (before.min() < -3 and before.max() > 6)
    mask = masked = None
    if activation and summed:
        before = kernels.normals(6).astype(np.float64)
        mask, masked = mask_of(before, kernels.pixels), np.full(y.shape, np.nan, y.dtype)
    for bend in BENDS.get(activation, (0,)):
        dout[np.abs(before - bend) < 1e-4] = 0
    given, wide = torch.from_numpy(before).requires_grad_(), torch.from_numpy(dout.astype(np.float64))
    g = torch.autograd.grad(activation_of(activation)(given), given, wide)[0].numpy()
    dbeta, dgamma = g.sum(kernels.axes), (g * xhat).sum(kernels.axes)
    m = kernels.pixels.N * kernels.pixels.plane
    less = (kernels.wide(dbeta) + xhat * kernels.wide(dgamma)) / m if of_batch else 0
    expected = kernels.wide(invstd) * (kernels.wide(gamma) if affine else 1) * (g - less)
    dy, sums = np.full(y.shape, np.nan, y.dtype), kernels.poisoned(2, kernels.pixels.K)
    kernels.run(batch_norm.backward, (y, dout, mean, invstd, gamma, beta, mask), (dy, sums, masked), activation, of_batch, summed)
    near(sums[0], dbeta, 16 * SUM_EPS[kernels.pixels.dtype], scale=np.abs(g).sum(kernels.axes))
    near(sums[1], dgamma, 16 * SUM_EPS[kernels.pixels.dtype], scale=np.abs(g * xhat).sum(kernels.axes))
    near(dy, expected, (4 if gain == 1 else 8) * EPS[kernels.pixels.dtype])
    if masked is not None:
        assert np.array_equal(masked.astype(np.float64), g)


@pytest.mark.turns
@pytest.mark.parametrize("turn", range(2 if driver.why_not() is None else 1))
def test_activations_beyond_relu(kernels, turn):
    """Forwards and backwards: the derivative is computed again from y. Values go beyond all bends.
    Each run has two on a GPU, one on PoCL."""
    beyond, own = ACTIVATIONS[1:], kernels.pixels
    run = [(own.layout, own.K, own.plane, own.dtype) == (*(SHAPES | FOURS)[shape], dtype) for shape, dtype in RUNS].index(True)
    activation = beyond[(run + 3 * turn + 4 * (batch_norm.BLOCKS["NCHW"] == 1)) % len(beyond)]
    test_forward(kernels, activation, True, False, gain=6)
    test_backward(kernels, activation, False, True, True, gain=6)


#: Slices, and an array.
SIMULATED = [
    ("many slices", Pixels("bfloat16", "NHWC", 3, 16, 35)), ("few slices", Pixels("float16", "NHWC", 2, 520, 9)), ("many slices", Pixels("bfloat16", "NCHW", 3, 5, 24)),
    ("many slices", Pixels("bfloat16", "NHWC", 2, 12, 30)), ("few slices", Pixels("float32", "NHWC", 2, 8, 30)), ("whole", Pixels("bfloat16", "NCHW", 3, 5, 24)),
    ("whole", Pixels("bfloat16", "NCHW", 30, 2, 24)),
]  # fmt: skip


@pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
@pytest.mark.parametrize(("slices", "pixels"), SIMULATED, indirect=["slices"], ids=str)
def test_the_text_of_cuda_on_the_simulated_machine(slices, pixels):
    """With the loads that only CUDA has."""
    kernels, number = Kernels("simt", pixels), [one for _, one in SIMULATED].index(pixels)
    test_statistics(kernels, (None, 4)[number % 2])
    test_forward(kernels, "relu", True, number % 2 == 0)
    test_backward(kernels, "relu", number // 2 % 2 == 0, True, True)
    if pixels.whole:
        test_a_forward_pass_by_one_launch(kernels, number % 3)


def test_nan_and_infinity_stay_what_they_are(device):
    kernels = Kernels(device, Pixels("float32", *("NCHW", 3, 17, 15)))
    y = kernels.normals()
    y[0, 2, 3], y[1, 4, 5] = np.nan, np.inf
    one, none = np.ones(17, "f"), np.zeros(17, "f")
    out = np.empty_like(y)
    kernels.run(batch_norm.forward, (y, none, one, None, None, None), (out, None), "relu")
    assert np.isnan(out[0, 2, 3]) and np.isposinf(out[1, 4, 5]) and np.isnan(out).sum() == 1 == np.isinf(out).sum()
    mean, invstd = kernels.poisoned(17), kernels.poisoned(17)
    kernels.run(batch_norm.statistics, (y, None), (mean, invstd, None, None, None), 1e-5, 0.1)
    assert np.array_equal(np.flatnonzero(~np.isfinite(mean)), [2, 4])


@pytest.mark.turns
def test_gradients_of_nan_are_as_torch_s(kernels):
    """A ReLU lets them pass, and where statistics were given they stay with their pixels."""
    y, dout = kernels.normals(1), kernels.normals(2)
    y.flat[5], y.flat[6], dout.flat[5], dout.flat[6] = np.nan, 2, 1, np.nan
    one, none = np.ones(kernels.pixels.K, kernels.sums_dtype), np.zeros(kernels.pixels.K, kernels.sums_dtype)
    dy, sums = np.full(y.shape, 7, y.dtype), kernels.poisoned(2, kernels.pixels.K)
    kernels.run(batch_norm.backward, (y, dout, none, one, None, None, None), (dy, sums, None), "relu", False)
    with np.errstate(invalid="ignore"):
        masked = y <= 0
    expected = np.where(masked, 0, dout)
    assert np.array_equal(dy.flat[6:], expected.flat[6:], equal_nan=True) and np.array_equal(dy.flat[:5], expected.flat[:5])
    dout.flat[6] = 1
    kernels.run(batch_norm.backward, (y, dout, none, one, None, None, None), (dy, sums, None), "relu", False)
    near(sums[0], np.where(masked, 0, dout).astype(np.float64).sum(kernels.axes), 1e-4)


@pytest.mark.parametrize("shape", ["planes of 15", "pixels of 8"])
def test_64_bit_offsets(device, shape, monkeypatch):
    """What arrays of 2^31 elements get, on an array that fits a laptop."""
    monkeypatch.setattr(batch_norm, "_index_64", lambda pixels: True)
    compiled.cache_clear()
    kernels = Kernels(device, pixels_of(shape, "float32"))
    assert batch_norm.forward(kernels.pixels, 2, "relu")[0][0].defines["INDEX_64"] == 1
    test_statistics(kernels, None)
    test_forward(kernels, "relu", True, True)
    test_backward(kernels, "relu", True, True, True)
    compiled.cache_clear()


def test_offsets_are_64_bits_from_two_to_the_31_elements_on():
    for images, expected in ((2**8 - 1, 0), (2**8, 1)):
        steps, _ = batch_norm.backward(Pixels("float16", "NCHW", images, 2**7, 2**16), 132, "relu", True)
        assert [step.defines["INDEX_64"] for step in steps] == [expected] * 3


FINISHES = [("relu", False), ("relu", True), ("silu", False)]


@needs_nvcc
def test_nothing_spills():
    finished = itertools.product(SHAPES.values(), ["bfloat16", "float32"], FINISHES)
    launches = covering(
        [batch_norm.forward(Pixels(dtype, layout, 64, k, plane), 132, *one)[0][0] for (layout, k, plane), dtype, one in finished]
    )
    for launch, done in zip(launches, nvcc_of([(launch.source(), "sm_90") for launch in launches]), strict=True):
        found, kernels = done.stderr, 7 if launch.defines["NHWC"] else 10
        assert done.returncode == 0 and found.count(
            "0 bytes spill stores, 0 bytes spill loads"
        ) == kernels and "warning" not in found, f"{launch.defines}: {found}"


# ---- the gradient of a bias


@pytest.mark.parametrize("dtype", DTYPES)
def test_conv_bias_of_numpy_arrays(device, dtype):
    rng = np.random.default_rng(0)
    for ndim, shape in ((1, (30, 17, 15)), (2, (30, 17, 3, 5)), (3, (30, 17, 1, 5, 3)), (2, (17, 5, 3))):
        a = rng.standard_normal(shape).astype(dtype)
        got = getattr(pc, f"conv{ndim}d_bias")(a, device=device)
        assert type(got) is np.ndarray and got.dtype == a.dtype and got.shape == (17,)
        wide, axes = a.astype(np.float64), tuple(i for i in range(a.ndim) if i != a.ndim - ndim - 1)
        near(got, wide.sum(axes), 1, 16 * SUM_EPS[dtype] * np.abs(wide).sum(axes) + EPS[dtype] * np.abs(wide.sum(axes)))
        for same in (a.astype(a.dtype.newbyteorder()), np.asfortranarray(a), np.repeat(a, 2, axis=-1)[..., ::2]):
            assert np.array_equal(getattr(pc, f"conv{ndim}d_bias")(same, device=device), got)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_conv_bias_of_torch_tensors(where, dtype):
    a = torch.randn(7, 8, 6, 5, generator=torch.Generator().manual_seed(0)).to(where, TORCH_DTYPES[dtype])
    for one in (a, a.to(memory_format=torch.channels_last), a.expand(2, 7, 8, 6, 5)[1], a.repeat_interleave(2, 3)[..., ::2]):
        got = pc.conv2d_bias(one)
        assert (got.dtype, got.device, got.shape) == (a.dtype, a.device, (8,))
        near(got, a.double().sum((0, 2, 3)), 4 * EPS[dtype], scale=8)
    pc.conv2d_bias(a.requires_grad_()).sum().backward()
    assert (a.grad == 1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cupy", "pycuda.gpuarray"])
def test_conv_bias_of_gpu_arrays(library):
    pytest.importorskip("pycuda.autoprimaryctx")
    module = pytest.importorskip(library)
    a = np.random.default_rng(0).standard_normal((4, 17, 3, 5)).astype("f")
    there = module.asarray(a) if library == "cupy" else module.to_gpu(a)
    got = pc.conv2d_bias(there)
    assert type(got) is type(there)
    near(got.get(), a.astype("d").sum((0, 2, 3)), 1e-5)


@pytest.mark.parametrize(
    ("array", "exception", "text"),
    [
        (np.zeros((2, 3), "f"), pc.ConvArgumentError, "Expected 3D"), (np.zeros((2, 3, 4, 5), "i"), TypeError, "int32"),
        (np.zeros((2, 0, 4, 5), "f"), pc.ConvArgumentError, "must have elements"), ([1.0], TypeError, "grad_output must be a numpy"),
    ],
    ids=["axes", "dtype", "empty", "list"],
)  # fmt: skip
def test_conv_bias_refuses(array, exception, text):
    with pytest.raises(exception, match=text):
        pc.conv2d_bias(array)


# ---- the layer


class Block(nn.Module):
    """torch's modules and the sum, as a ResNet has them."""

    def __init__(self, conv, bn, relu=True):
        super().__init__()
        self.conv, self.bn, self.relu = conv, bn, relu

    def before(self, x, residual=None):
        """What goes into the ReLU."""
        out = self.bn(self.conv(x))
        return out if residual is None else out + residual

    def forward(self, x, residual=None):
        out = self.before(x, residual)
        return torch.relu(out) if self.relu else out


@dataclass
class Layer:
    """A fused layer by its arguments, and the shape of an input without the batch."""

    ndim: int
    args: tuple
    size: tuple
    options: dict = field(default_factory=dict)
    last: bool = False
    relu: bool = True

    def pair(self, dtype: str, where: str = "cpu") -> tuple:
        """The layer, and one of torch's modules in float64, of the same parameters and buffers."""
        torch.manual_seed(0)
        fused = CLASSES[self.ndim](*self.args, **self.options, relu=self.relu)
        with torch.no_grad():
            for parameter in fused.bn.parameters():
                parameter.uniform_(-1.5, 1.5)
        fused = fused.to(where, TORCH_DTYPES[dtype])
        conv, bn = copy.deepcopy(fused.to_modules())
        return fused, Block(conv.double(), bn.double(), self.relu)

    def input(self, dtype: str, where: str = "cpu", seed: int = 0, n: int = 6) -> "torch.Tensor":
        x = torch.randn(n, *self.size, generator=torch.Generator().manual_seed(seed)).to(where, TORCH_DTYPES[dtype])
        if self.last:
            x = x.movedim(1, -1).contiguous().movedim(-1, 1)
        return x.requires_grad_()


GENERAL = (5, 17, 3, 2, 1), (5, 9, 6)
LAYERS = {
    "general": Layer(2, *GENERAL, {"bias": True}),
    "without affine": Layer(2, *GENERAL, {"bias": True, "affine": False}),
    "without tracking": Layer(2, *GENERAL, {"bias": True, "track_running_stats": False}),
    "cumulative": Layer(2, *GENERAL, {"bias": True, "momentum": None, "eps": 1e-2}),
    "without ReLU": Layer(2, *GENERAL, {"bias": True}, relu=False),
    "channels last": Layer(2, (4, 8, 3, 1, 1), (4, 6, 5), last=True),
    "one channel": Layer(2, (3, 1, 1), (3, 4, 6)),
    "1-d, groups, channels last": Layer(1, (10, 65, 3, 1, 2, 2, 5), (10, 11), {"bias": True, "momentum": 0.3}, last=True),
    "3-d": Layer(3, (2, 3, (1, 3, 2), (1, 2, 1), (0, 1, 1)), (2, 3, 4, 5)),
    "same, uneven": Layer(2, (5, 17, (2, 4), 1, "same"), (5, 5, 3), {"bias": True}),
    "circular": Layer(2, (5, 17, 3, 1, 1), (5, 5, 3), {"bias": True, "padding_mode": "circular"}),
}
TRAINED = [(name, "float64", False) for name in LAYERS] + [("general", "float32", False), ("without ReLU", "float32", False)]
TRAINED += [(name, "float64", True) for name in LAYERS if name not in ("without tracking", "same, uneven")]
TRAINED += [("channels last", dtype, summed) for dtype in TORCH_DTYPES if dtype != "float64" for summed in (False, True)]


def residual_for(out, seed: int = 4):
    """A residual for a result like `out`: as wide as what a batch norm makes, and lying as it does."""
    return torch.empty_like(out).copy_(torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))).requires_grad_()


def residuals_of(fused, x, summed: bool, seed: int = 4) -> list:
    """A residual for the layer's result, if there is to be one. The layer's statistics stay."""
    return [residual_for(copy.deepcopy(fused)(x).detach(), seed)] * summed


def check_step(fused, block, x, dtype: str, *residual) -> None:
    """One step forwards and backwards of both, from `x` and what is added."""
    given, tolerance = (x, *residual), TOLERANCE[dtype]
    wide = [one.detach().double().requires_grad_() for one in given]
    before = copy.deepcopy(block).requires_grad_(False).before(*(one.detach() for one in wide))
    out, expected = fused(*given), block(*wide)
    near(out, expected, tolerance)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out)
    dout[before.abs() < 16 * EPS[dtype]] = 0  # on which side of 0 these are may be a matter of rounding
    fused.zero_grad(), block.zero_grad()
    out.backward(dout)
    expected.backward(dout.double())
    for got, ref in zip(given, wide, strict=True):
        near(got.grad, ref.grad, tolerance)
        assert got.grad.dtype is got.dtype and got.grad.stride() == got.stride()
    for (name, got), ref in zip(fused.named_parameters(), block.parameters(), strict=True):
        assert got.grad.dtype == got.dtype
        if name == "conv.bias" and (fused.bn.training or fused.bn.running_mean is None):  # the batch's mean takes it away
            assert not got.grad.any() and ref.grad.abs().max() < 1e-10
        else:
            near(got.grad, ref.grad, tolerance)
    for got, ref in zip(fused.buffers(), block.buffers(), strict=True):
        near(got, ref, tolerance)


def test_a_weight_that_is_computed(where):
    """As torch.nn.utils.parametrize makes it of the parameter: the module has no parameter of that name then."""
    fused, reference = LAYERS["general"].pair("float64", where)
    for conv in (fused.conv, reference.conv):
        nn.utils.parametrizations.weight_norm(conv)
    x = LAYERS["general"].input("float64", where)
    for _ in range(3):
        near(fused(x), reference(x), TOLERANCE["float64"])
    fused.conv.parametrizations.weight.original0.data.mul_(2)
    reference.conv.parametrizations.weight.original0.data.mul_(2)
    near(fused(x), reference(x), TOLERANCE["float64"])


@pytest.mark.parametrize(
    ("name", "dtype", "summed"), TRAINED, ids=[f"{name}-{dtype}{'-with a residual' * summed}" for name, dtype, summed in TRAINED]
)
def test_training_and_evaluation_are_those_of_torch(where, name, dtype, summed):
    layer = LAYERS[name]
    fused, reference = layer.pair(dtype, where)
    for seed, training in enumerate((True, True, False)):
        fused.train(training), reference.train(training)
        x = layer.input(dtype, where, seed)
        residual = residuals_of(fused, x, summed, seed)
        check_step(fused, reference, x, dtype, *residual)
    with torch.no_grad():
        out = fused(x, *residual)
    near(out, reference(*(one.double() for one in (x, *residual))), TOLERANCE[dtype])
    assert out.dtype == x.dtype and (out.is_contiguous() or (layer.last and out.movedim(1, -1).is_contiguous()))


CHANGES = {
    "frozen statistics": lambda bn: bn.eval(), "no beta": lambda bn: setattr(bn, "bias", None),
    "a counter alone": lambda bn: [setattr(bn, name, None) for name in ("running_mean", "running_var")],
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_batch_norm_that_is_changed(where, change):
    """One without running statistics takes the batch's in evaluation too, and may have a counter nevertheless, which counts in training
    alone."""
    fused, reference = LAYERS["general"].pair("float64", where)
    for training in (False, True, False):
        for one in (fused, reference):
            CHANGES[change](one.train(training).bn)
        check_step(fused, reference, LAYERS["general"].input("float64", where), "float64")
    assert int(fused.bn.num_batches_tracked) == (change != "frozen statistics")


@pytest.mark.parametrize("name", ["general", "same, uneven"])
def test_options_that_are_set_later(where, name):
    """As networks do whose strides are replaced by dilations; torch's modules keep another form of the padding they were made with."""
    layer = LAYERS[name]
    fused, reference = layer.pair("float64", where)
    for step in range(2):
        for conv in (fused.conv, reference.conv):
            conv.stride, conv.dilation = (1, 1), (2, 1)
            if name == "general":
                conv.padding = (2, 1) if step == 0 else 1
        for training in (True, False):
            fused.train(training), reference.train(training)
            check_step(fused, reference, layer.input("float64", where), "float64")


def test_only_the_gradients_that_are_asked_for(where):
    layer = LAYERS["general"]
    expected, _ = layer.pair("float32", where)
    x = layer.input("float32", where)
    expected(x).sum().backward()
    for name, parameter in expected.named_parameters():
        fused, _ = layer.pair("float32", where)
        fused.requires_grad_(False)
        asked = fused.get_parameter(name).requires_grad_()
        fused(x.detach()).sum().backward()
        assert torch.equal(asked.grad, parameter.grad) and sum(p.grad is not None for p in fused.parameters()) == 1


@pytest.mark.parametrize(
    "name", ["general", "without affine", "without tracking", "cumulative", "channels last", "1-d, groups, channels last"]
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_operators_give_the_same_bits(where, monkeypatch, name, dtype):
    """As the calls without them, which are the rule."""
    layer, found = LAYERS[name], []
    for traced in (False, True):
        with monkeypatch.context() as patch:
            if traced:
                for part in ("autograd", "launches", "modules"):  # as torch's tracers call them
                    patch.setattr(getattr(fused_modules.fused, part), "_traced", lambda *tensors: True)
            else:
                patch.setattr(fused_modules.fused.launches._LayerSpec, "in_integers", lambda self: pytest.fail("an operator is called"))
            fused, _ = layer.pair(dtype, where)
            results = []
            for seed, training in enumerate((True, True, False)):
                x = layer.input(dtype, where, seed)
                versions = [b._version for b in fused.buffers()]
                out = fused.train(training)(x)
                assert not training or all(b._version > old for b, old in zip([*fused.buffers()][-1:], versions[-1:], strict=True))
                out.square().sum().backward()
                results += out, x.grad
            with torch.no_grad():
                results += fused(x), fused.train()(x)
            found.append([*results, *(p.grad for p in fused.parameters()), *fused.buffers()])
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(*found, strict=True))


def test_a_batch_of_one_value_a_channel_is_refused_as_by_torch(where):
    fused = CLASSES[2](5, 17, 3).to(where)
    with pytest.raises(
        ValueError, match=r"Expected more than 1 value per channel when training, got input size torch.Size\(\[1, 17, 1, 1\]\)"
    ):
        fused(torch.zeros(1, 5, 3, 3, device=where))
    with pytest.raises(ValueError, match=r"expected 4D input \(got 3D input\)"):
        fused(torch.zeros(5, 9, 6, device=where))
    assert int(fused.bn.num_batches_tracked) == 0
    with torch.no_grad():
        assert fused.eval()(torch.zeros(1, 5, 3, 3, device=where)).shape == (1, 17, 1, 1)


def test_an_empty_batch(where):
    fused, reference = LAYERS["general"].pair("float64", where)
    for training in (True, False):
        fused.train(training), reference.train(training)
        x = LAYERS["general"].input("float64", where, n=0)
        out, expected = fused(x), reference(x.detach().double())
        assert out.shape == expected.shape
        out.sum().backward()
        assert x.grad.shape == x.shape and not any(p.grad.any() for p in fused.parameters())
        for got, ref in zip(fused.buffers(), reference.buffers(), strict=True):
            assert torch.equal(got, ref)


def second_derivatives(model, x, *more):
    """Those of a penalty for the gradients of the layer's result."""
    given = [x, *more, *model.parameters()]
    first = torch.autograd.grad(model(x, *more).sin().sum(), given, create_graph=True, allow_unused=True)
    return torch.autograd.grad(sum(one.square().sum() for one in first if one is not None), given, allow_unused=True)


@pytest.mark.pairs
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_second_derivatives(where, training, summed, bias):
    torch.manual_seed(0)
    fused = CLASSES[2](3, 4, 3, bias=bias, dtype=torch.float64, device=where)
    torch.nn.init.uniform_(fused.bn.weight, 0.5, 1.5), torch.nn.init.normal_(fused.bn.bias), fused.bn.running_mean.normal_()
    fused.train(training)
    theirs = copy.deepcopy(fused)
    theirs.forward = lambda x, *more: torch.relu(sum(more, theirs.bn(theirs.conv(x))))
    x = torch.randn(2, 3, 6, 5, dtype=torch.float64, device=where, requires_grad=True)
    more = [torch.randn(2, 4, 4, 3, dtype=torch.float64, device=where, requires_grad=True)] * summed
    for got, expected in zip(second_derivatives(fused, x, *more), second_derivatives(theirs, x, *more), strict=True):
        got, expected = (torch.zeros(()) if one is None else one for one in (got, expected))
        torch.testing.assert_close(
            got.expand_as(expected) if got.dim() == 0 else got, expected, rtol=1e-7, atol=1e-9, check_dtype=False, check_device=False
        )


@pytest.mark.parametrize("relu, summed", [(True, False), (True, True), (False, True)])
def test_what_is_kept_for_the_backward_pass(where, relu, summed):
    """Input, filter, the convolution's result and what there is one of a channel;
    of a sum with ReLU also its mask, at most a byte a number."""
    layer = replace(LAYERS["general"], relu=relu)
    fused, _ = layer.pair("float32", where)
    x, kept = layer.input("float32", where, n=40), {}
    residual = residuals_of(fused, x, summed)

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = fused(x, *residual)
    assert not any(one.untyped_storage().data_ptr() in kept for one in (out, *residual))
    mask = sum(kept.values()) - 4 * (x.numel() + out.numel() + fused.conv.weight.numel() + 4 * 17)
    assert 0 < mask <= out.numel() if relu and summed else mask == 0


# ---- a residual

def test_a_residual_that_is_the_input_too(where):
    """Both gradients come together in it; and the input's in-where sum with something later is noticed."""
    layer = Layer(2, (8, 8, 3, 1, 1), (8, 5, 6), last=True)
    fused, reference = layer.pair("float64", where)
    x = layer.input("float64", where)
    wide = x.detach().requires_grad_()
    dout = residual_for(x.detach())
    fused(x, x).backward(dout)
    reference(wide, wide).backward(dout)
    near(x.grad, wide.grad, TOLERANCE["float64"])


@pytest.mark.parametrize("with_residual", [False, True])
def test_a_result_may_be_written_over(where, with_residual):
    """The activation's derivative is computed again; with a residual its mask has been kept."""
    fused, _ = LAYERS["general"].pair("float32", where)
    x, found = LAYERS["general"].input("float32", where), []
    residual = residual_for(fused(x).detach()).detach().requires_grad_() if with_residual else None
    for written in (False, True):
        out = fused(x, residual)
        dout = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
        out = out.mul_(3) if written else out * 3
        found.append(torch.autograd.grad(out, [x, *([residual] if with_residual else ())], dout))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("relu", [True, False])
def test_only_the_gradient_of_the_residual(where, relu):
    fused, _ = replace(LAYERS["general"], relu=relu).pair("float32", where)
    fused.requires_grad_(False)
    x = LAYERS["general"].input("float32", where).detach()
    residual = residual_for(fused(x))
    for training in (True, False):
        out = fused.train(training)(x, residual)
        dout = residual_for(out.detach(), 7).detach()
        (got,) = torch.autograd.grad(out, residual, dout)
        assert torch.equal(got, dout * (out > 0) if relu else dout)
    out = fused(x, residual.detach())
    assert not out.requires_grad


@pytest.mark.parametrize("kind", ["another type", "one a channel", "larger", "a number", "other strides"])
def test_a_residual_of_another_form_is_added_by_torch_s_rules(where, kind):
    layer = LAYERS["channels last"]
    fused, reference = layer.pair("float32", where)
    x = layer.input("float32", where)
    shape = fused(x).shape
    residual = {
        "another type": lambda: torch.randn(shape, dtype=torch.float64, device=where), "one a channel": lambda: torch.randn(8, 1, 1, device=where),
        "larger": lambda: torch.randn(3, *shape, device=where), "a number": lambda: 0.5, "other strides": lambda: torch.randn(*shape[::-1], device=where).permute(3, 2, 1, 0),
    }[kind]()  # fmt: skip
    block = reference.float()
    block.load_state_dict(fused.state_dict())
    out, expected = fused(x, residual), block(x, residual)
    assert out.shape == expected.shape and out.dtype is expected.dtype
    near(out, expected, TOLERANCE["float32"])
    assert int(fused.bn.num_batches_tracked) == int(block.bn.num_batches_tracked)
    near(*(torch.autograd.grad(y.sum(), x)[0] for y in (out, expected)), 64 * TOLERANCE["float32"])


def test_infinities_and_nans_of_a_sum(where):
    """As torch's: an infinity in dout is one in the residual's gradient where the mask lets it pass, and NaN in the result is no 0."""
    fused, _ = LAYERS["without affine"].pair("float32", where)
    fused.eval()
    x = LAYERS["without affine"].input("float32", where)
    residual = residual_for(fused(x).detach())
    with torch.no_grad():
        residual[0, 0, 0, 0], residual[0, 1, 0, 0], residual[0, 2, 0, 0] = math.inf, -math.inf, math.nan
    out = fused(x, residual)
    assert out[0, 0, 0, 0] == math.inf and out[0, 1, 0, 0] == 0 and out[0, 2, 0, 0].isnan() and not out[1:].isnan().any()
    dout = torch.ones_like(out)
    dout[0, :, 0, 0] = math.inf
    (got,) = torch.autograd.grad(out, residual, dout)
    assert torch.equal(got, torch.where(out <= 0, 0, dout))


# ---- the two forms of the layer


@pytest.mark.parametrize("name", ["general", "without affine", "1-d, groups, channels last"])
def test_from_modules_and_back(name):
    layer = LAYERS[name]
    made, _ = layer.pair("float32")
    conv, bn = made.to_modules()
    assert type(conv) is CONVS[layer.ndim] and type(bn) is NORMS[layer.ndim]
    fused = CLASSES[layer.ndim].from_modules(conv, bn.eval())
    assert fused.to_modules() == (conv, bn) and not fused.training and fused.relu and fused.precision == "fp32"
    parts = nn.Sequential(conv, bn, nn.ReLU())
    x = layer.input("float32").detach()
    near(fused(x), parts(x), TOLERANCE["float32"])
    # state dicts: of the parts by their names, and of another layer
    assert set(fused.state_dict()) == {f"{part}.{key}" for part, module in (("conv", conv), ("bn", bn)) for key in module.state_dict()}
    other = CLASSES[layer.ndim](*layer.args, **layer.options)
    stream = io.BytesIO()
    torch.save(fused.state_dict(), stream)
    stream.seek(0)
    other.load_state_dict(torch.load(stream))
    assert torch.equal(other.eval()(x), fused(x))
    fresh = CONVS[layer.ndim](*layer.args, bias=conv.bias is not None), copy.deepcopy(bn)
    for module, prefix in zip(fresh, ("conv.", "bn."), strict=True):
        module.load_state_dict({key.removeprefix(prefix): v for key, v in other.state_dict().items() if key.startswith(prefix)})


@pytest.mark.parametrize(
    ("conv", "bn", "exception", "text"),
    [
        (nn.Conv2d(3, 4, 1), nn.SyncBatchNorm(4), TypeError, "SyncBatchNorm takes its statistics over all processes"),
        (nn.Conv1d(3, 4, 1), nn.BatchNorm2d(4), TypeError, "conv must be a torch.nn.Conv2d, but got Conv1d"),
        (nn.ConvTranspose2d(3, 4, 1), nn.BatchNorm2d(4), TypeError, "conv must be a torch.nn.Conv2d, but got ConvTranspose2d"),
        (nn.Conv2d(3, 4, 1), nn.InstanceNorm2d(4), TypeError, "bn must be a torch.nn.BatchNorm2d, but got InstanceNorm2d"),
        (nn.Conv2d(3, 4, 1), nn.BatchNorm2d(5), ValueError, "bn has 5 features, but conv has 4 output channels"),
    ],
    ids=["sync", "rank", "transposed", "norm", "channels"],
)
def test_from_modules_refuses(conv, bn, exception, text):
    with pytest.raises(exception, match=text):
        CLASSES[2].from_modules(conv, bn)


def test_sync_batch_norm_is_refused_wherever_it_comes_from():
    with pytest.raises(TypeError, match="SyncBatchNorm"):
        nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(CLASSES[2](3, 4, 1)))
    fused = CLASSES[2](3, 4, 1)
    fused.bn = nn.SyncBatchNorm(4)
    with pytest.raises(TypeError, match="SyncBatchNorm"):
        fused(torch.zeros(2, 3, 4, 4))


# ---- torch's machinery


@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "NHWC"])
def test_opcheck(where, last):
    layer = LAYERS["channels last"]
    fused, _ = layer.pair("float32", where)
    x = layer.input("float32", where).detach()
    x = x if last else x.contiguous()
    fixed = x, fused.conv.weight.detach(), None
    gamma, beta = fused.bn.weight.detach(), fused.bn.bias.detach()
    running, tracked, operators = (fused.bn.running_mean, fused.bn.running_var), torch.tensor(3, device=where), torch.ops.pycuda_conv
    check = torch.library.opcheck
    batch, given = ([1, 0, of_batch, 0, 1, *(1, 1, 1, 1) * 2] for of_batch in (1, 0))  # ReLU, of_batch, fp32, groups; stride 1, padding 1
    for moved in ((*running, tracked), (*running, None), (None, None, None))[: 3 if last else 1]:
        check(operators.fused_statistics.default, (*fixed, *moved, 0.1, 1e-5, batch))
    check(operators.fused_statistics.default, (*fixed, *running, None, 0.1, 1e-5, given))
    found = operators.fused_statistics(*fixed, None, None, None, 0.1, 1e-5, batch)
    for how in (batch, given) if last else (given,):
        wanted = [a.clone().requires_grad_() for a in (x, fixed[1], torch.zeros_like(gamma), gamma, beta)]
        check(operators.fused_conv_bn_relu.default, (*wanted, *found, how))
    if last:
        check(operators.fused_conv_bn_relu.default, (*wanted[:2], None, None, None, *found, batch))
    for asked in ((True, True), (False, True))[: 1 + last]:
        check(operators.fused_conv_bn_relu_backward.default, (found[0], *fixed[:2], gamma, beta, *found, *asked, batch))
    check(operators.fused_inference.default, (*fixed, gamma, beta, *running, 1e-5, given))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("grad", [True, False])
def test_traced_by_jit(where, grad):
    """What is recorded are operators, which compute something of another input too."""
    layer = LAYERS["channels last"]
    fused, _ = layer.pair("float32", where)
    x, other = (layer.input("float32", where, seed).detach() for seed in (0, 1))
    with torch.set_grad_enabled(grad):
        for module in (fused.eval(), fused_modules.Conv2d(4, 8, 3).to(where)):
            assert torch.equal(torch.jit.trace(module, x, check_trace=False)(other), module(other))


@pytest.mark.pairs
@pytest.mark.parametrize("summed", [False, True], ids=["alone", "with a residual"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_autocast(where, dtype, summed):
    layer = LAYERS["channels last"]
    fused, reference = layer.pair("float32", where)
    x = layer.input("float32", where)
    with torch.autocast(where, TORCH_DTYPES[dtype]):
        residual = residuals_of(fused, x, summed)
        out = fused(x, *residual)
    assert out.dtype is TORCH_DTYPES[dtype]
    expected = reference(*(one.detach().double() for one in (x, *residual)))
    near(out, expected, TOLERANCE[dtype])
    out.float().sum().backward()
    assert x.grad.dtype is torch.float32 and all(p.grad.dtype is torch.float32 for p in fused.parameters())
    assert all(one.grad.dtype is out.dtype and torch.equal(one.grad, (out > 0).to(one.grad)) for one in residual)
    for got, ref in zip(fused.buffers(), reference.buffers(), strict=True):
        near(got, ref, TOLERANCE[dtype])
    fused.eval()
    with torch.no_grad(), torch.autocast(where, TORCH_DTYPES[dtype]):
        assert fused(x).dtype is out.dtype


@pytest.mark.gpu
def test_captured_in_a_graph():
    layer = LAYERS["cumulative"]
    fused, _ = layer.pair("float32", "cuda")
    other = copy.deepcopy(fused)
    held = layer.input("float32", "cuda").detach().requires_grad_()

    def step(module, x):
        out = module(x)
        return out, *torch.autograd.grad(out.sum(), (x, *module.parameters()))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiled before, and on a stream of its own
        step(fused, held), step(other, held)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(fused, held)
    for seed in range(3):
        x = layer.input("float32", "cuda", seed)
        with torch.no_grad():
            held.copy_(x)
        graph.replay()
        for got, expected in zip(captured, step(other, x), strict=True):
            assert torch.equal(got, expected)
        for got, expected in zip(fused.buffers(), other.buffers(), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.gpu
def test_no_more_memory_than_the_modules_take():
    """But for what the convolution notes of its results, where it packs its input besides: that is as much as ReLU's result."""
    conv, bn = nn.Conv2d(32, 32, 3, padding=1, bias=False).cuda(), nn.BatchNorm2d(32).cuda()
    found = []
    for module in (CLASSES[2].from_modules(conv, bn), nn.Sequential(conv, bn, nn.ReLU())):
        x = torch.randn(64, 32, 64, 64, device="cuda", requires_grad=True)
        module(x).sum().backward()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        out = module(x)
        found.append((torch.cuda.max_memory_allocated() - start, torch.cuda.memory_allocated() - start))
        del out, x
    (peak, kept), (peak_of_modules, kept_by_modules) = found
    assert peak < 1.01 * peak_of_modules and kept <= kept_by_modules + 2**20


@pytest.mark.gpu
@pytest.mark.parametrize("summed", [False, True], ids=["alone", "with a residual"])
def test_the_gradient_of_the_result_takes_its_place_unless_the_graph_is_kept(summed):
    fused = CLASSES[2](32, 32, 3, padding=1).cuda()
    torch.manual_seed(0)
    x, residual, dout = torch.randn(3, 64, 32, 64, 64, device="cuda")
    given = [x.requires_grad_(), *fused.parameters()] + [residual.requires_grad_()] * summed

    def found(hooks=None, **options):
        with contextlib.nullcontext() if hooks is None else torch.autograd.graph.saved_tensors_hooks(*hooks):
            out = fused(x, residual) if summed else fused(x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        made = torch.autograd.grad(out, given, dout, **options)
        again = torch.autograd.grad(out, given, dout) if options else made
        return made, again, torch.cuda.max_memory_allocated() - start

    saved = []
    for turn in range(3):  # the first makes the launches, others repeat them
        plain, _, peak = found()
        kept, again, peak_of_kept = found(retain_graph=True)
        hooked, _, _ = found((lambda one: saved.append((one, one.clone())) or one, lambda one: one))
        for gradients in (kept, again, hooked):
            assert all(map(torch.equal, plain, gradients))
        assert saved and all(torch.equal(one, before) for one, before in saved)
        if turn:
            assert peak <= peak_of_kept - 0.99 * x.nbytes


# ---- statistics that the convolution notes

NOTING = {  # input, filter, dtype, channels last: on tensor cores; the last kind is multiplied as it lies
    "fp32": ((8, 64, 56, 56), (64, 64, 3, 3), "float32", False), "fp32 last": ((5, 72, 40, 41), (136, 72, 3, 3), "float32", True),
    "fp16": ((8, 64, 56, 55), (200, 64, 3, 3), "float16", False), "bf16 last": ((8, 64, 56, 56), (64, 64, 3, 3), "bfloat16", True),
    "small images": ((67, 256, 7, 7), (256, 256, 3, 3), "float32", False),
    "1x1": ((8, 256, 56, 56), (128, 256, 1, 1), "float32", False), "1x1 fp16": ((9, 128, 28, 28), (160, 128, 1, 1), "float16", False),
    "1x1 last": ((9, 72, 40, 41), (130, 72, 1, 1), "float32", True),
}  # fmt: skip
PASSES = ("fp32 last", "small images", "1x1 fp16")  # layers whose kernels note nothing: a pass over y takes their statistics


@pytest.mark.gpu
@pytest.mark.parametrize("small", [False, True], ids=["plain", "computed again"])
@pytest.mark.parametrize("name", NOTING)
def test_statistics_noted_by_the_convolution(name, small):
    """Against float64's of y itself, with a large mean, and where half of the values are so small that results are computed again."""
    shape, filters, dtype, last = NOTING[name]
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels of Hopper GPUs note them")
    if small and dtype != "float32":
        pytest.skip("16-bit numbers are never computed again")
    generator = torch.Generator("cuda").manual_seed(len(name))
    x, w, b = (torch.randn(size, device="cuda", generator=generator).to(TORCH_DTYPES[dtype]) for size in (shape, filters, filters[:1]))
    b += 0 if small else 100
    if small:
        b.zero_()
        x[..., shape[-1] // 2 :] *= 2.0**-40
    if name == "small images":  # several in a tile, of different scales
        x[1::3] *= 2.0**20
    if last:
        x = x.to(memory_format=torch.channels_last)
    padding = filters[-1] // 2
    problem = pc.ConvProblem.forward(2, shape, filters, filters[:1], padding=padding, dtype=dtype)
    plan = cached_plan(replace(problem, layout="NHWC" if last else "NCHW"), get_device("cuda"), False, True)
    assert (plan.schedule.moments is not None) == (name not in PASSES)
    how = fused_modules.fused.launches._LayerSpec(
        None, True, Settings(2, (1, 1), ((padding, padding),) * 2, (1, 1), 1, "fp32", None, False)
    )
    y, (mean, invstd) = fused_modules.fused.launches._statistics(x, w, b, None, None, None, 0.1, 1e-3, how)
    # the fastest tile for y alone may be another one, with other bits
    assert torch.equal(y, pc.Plan(plan.problem, plan.device, config=plan.config)(x, w, b))
    exact = y.double()
    near(mean, exact.mean((0, 2, 3)), 1e-6, float(exact.square().mean().sqrt()))
    near(invstd, (exact.var((0, 2, 3), correction=0) + 1e-3).rsqrt(), 2e-6)
