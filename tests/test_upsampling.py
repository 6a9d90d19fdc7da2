"""Convolutions of upsampled images: folded or exact, forward and gradients, every kind of array, against float64 of the enlarged image."""

import copy
import pickle

import numpy as np
import pytest
import torch
from reference import DTYPES, EPS, reference
from test_borders import Border, enlarged

import pycuda_conv as pc
import pycuda_conv.nn as pn
from pycuda_conv import ConvArgumentError, ConvProblem, Plan
from pycuda_conv.execute.pieces import pieces
from pycuda_conv.runtime import get_device


class Drawn(Border):
    """A convolution of an upsampled image, with any filter, padding and border."""

    def __init__(self, seed: int, word: str | None) -> None:
        rng = self.rng = np.random.default_rng(seed)
        self.ndim, self.word, self.groups = int(rng.integers(1, 4)), word, int(rng.integers(1, 3))
        while True:
            size, taps = rng.integers(1, (40, 9, 5)[self.ndim - 1], self.ndim), rng.integers(1, 6, self.ndim)
            self.times = tuple(map(int, rng.integers(1, 4, self.ndim)))
            self.pads = tuple((int(a), int(b)) for a, b in rng.integers(0, 6, (self.ndim, 2)))
            self.stride = (1,) * self.ndim if word == "folded" else tuple(map(int, rng.integers(1, 3, self.ndim)))
            self.dilation = tuple(1 if word == "folded" and n > 1 else int(rng.integers(1, 3)) for n in self.times)
            axes = zip(size, self.times, self.pads, self.dilation, taps, strict=True)
            if max(self.times) > 1 and all(n * u + sum(p) > d * (t - 1) for n, u, p, d, t in axes):
                break
        modes = ["zeros", "zeros", "constant", "replicate", "circular", "symmetric"] + ["reflect"] * int(word != "folded" and min(size) > 1)
        mode = str(rng.choice(modes))
        self.modes, self.value = ((mode, mode),) * self.ndim, 3.0 if mode == "constant" else 0.0
        self.x_shape = (int(rng.integers(1, 4)), int(rng.integers(1, 4)) * self.groups, *map(int, size))
        self.w_shape = (int(rng.integers(1, 5)) * self.groups, self.x_shape[1] // self.groups, *map(int, taps))
        self.options = {"stride": self.stride, "dilation": self.dilation, "groups": self.groups}
        self.whole = self.options | {
            "padding": self.pads, "padding_mode": mode, "padding_value": self.value, "upsample": self.times, "upsample_filter": word,
        }

    @property
    def function(self):
        return getattr(pc, f"conv{self.ndim}d")

    def arrays(self, dtype: str) -> list[np.ndarray]:
        """Small whole numbers: sums of taps are exact in every type."""
        shapes = self.x_shape, self.w_shape, self.w_shape[:1]
        return [self.rng.integers(-2, 3, shape).astype(dtype) for shape in shapes]

    def __str__(self) -> str:
        return f"{self.x_shape} {self.w_shape} {self.whole}"


# ---- the functions


@pytest.mark.parametrize("word", ["exact", "folded", None])
@pytest.mark.parametrize("seed", range(12))
def test_random_ones_in_whole_numbers(seed, word):
    """Exact in whole numbers, into a poisoned array: each tap and each pixel counts."""
    drawn = Drawn(1000 * ("exact", "folded", None).index(word) + seed, word)
    dtype = DTYPES[seed % len(DTYPES)]
    x, w, b = drawn.arrays(dtype)
    expected = drawn.by_torch(x, w) + b.astype(np.float64).reshape(-1, *(1,) * drawn.ndim)
    out = np.full(expected.shape, np.nan, x.dtype)
    got = drawn.function(x, w, b, out=out, **drawn.whole)
    assert got is out
    np.testing.assert_array_equal(got.astype(np.float64), expected.astype(x.dtype).astype(np.float64), err_msg=str(drawn))


def test_what_is_folded_by_default():
    def folded(dtype: str = "float32", **options) -> bool:
        return ConvProblem.forward(2, (1, 3, 5, 6), (4, 3, 3, 3), dtype=dtype, **{"padding": 1, "upsample": 2} | options).folded

    assert folded() and folded("float64") and folded(precision="tf32") and folded(padding_mode="replicate") and folded(algorithm="direct")
    assert not (folded("float16") or folded("bfloat16") or folded(stride=2) or folded(dilation=2) or folded(padding_mode="reflect"))
    assert folded("float16", upsample_filter="folded") and not folded(upsample_filter="exact")
    assert not folded(padding=9) and folded(padding=9, upsample_filter="folded")  # most sums would be of nothing
    assert folded(upsample=(1, 2), dilation=(2, 1))
    assert not ConvProblem.forward(2, (1, 3, 5, 6), (4, 3, 3, 3), upsample=1).upsampled


def test_products_of_a_folded_filter():
    """Nearest by 2 before 3x3: 16 products a pixel of the array instead of 36."""
    problem = ConvProblem.forward(2, (1, 8, 5, 6), (4, 8, 3, 3), padding=1, upsample=2)
    left = problem.transposed_form
    assert left.macs * 36 == problem.macs * 16
    assert (left.filter_size, left.stride, left.padding_before, left.padding_after) == ((1, 4, 4), (1, 2, 2), (0, 1, 1), (0, 1, 1))
    assert left.result_shape == problem.result_shape == (1, 4, 10, 12) and left.input_shape == problem.input_shape == (1, 8, 5, 6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_error_of_a_filter_folded_in_16_bits(dtype):
    """Its sums are rounded once more: at most 1.6 times the error of what is exact, which has torch's."""
    if dtype not in DTYPES:
        pytest.skip("ml_dtypes is not installed")
    rng = np.random.default_rng()
    x, w = rng.standard_normal((1, 32, 12, 12)).astype(dtype), (rng.standard_normal((16, 32, 3, 3)) / 17).astype(dtype)
    expected = reference(False, 2, enlarged(x, (2, 2)), w, padding=1)
    errors = {}
    for word in ("exact", "folded"):
        y = pc.conv2d(x, w, padding=1, upsample=2, upsample_filter=word).astype(np.float64)
        errors[word] = np.linalg.norm(y - expected) / np.linalg.norm(expected)
    assert errors["exact"] < EPS[dtype] / 3 and 1.1 * errors["exact"] < errors["folded"] < 1.6 * errors["exact"]


def test_scale_residual_and_activation():
    rng = np.random.default_rng(5)
    x, w, r = (rng.standard_normal(shape) for shape in ((2, 3, 4, 5), (4, 3, 3, 3), (2, 4, 8, 10)))
    s, b = rng.standard_normal((2, 4))
    expected = np.maximum(reference(False, 2, enlarged(x, (2, 2)), w, padding=1) * s[:, None, None] + b[:, None, None] + r, 0)
    for word in ("exact", "folded"):
        y = pc.conv2d(x, w, b, padding=1, scale=s, residual=r, activation="relu", upsample=2, upsample_filter=word)
        np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-12)


def test_integers_complex_numbers_and_arrays_without_channels():
    rng = np.random.default_rng(6)
    x, w = rng.integers(0, 200, (2, 3, 4, 5)).astype(np.uint8), rng.integers(-3, 4, (4, 3, 3, 3)).astype(np.int8)
    expected = reference(False, 2, enlarged(x, (2, 3)), w, padding=1)
    for word in ("exact", "folded"):
        options = {"padding": 1, "upsample": (2, 3), "upsample_filter": word}
        np.testing.assert_array_equal(pc.conv2d(x, w, **options), expected)
        np.testing.assert_array_equal(pc.conv2d(x, w, dtype=np.int16, padding_mode="replicate", **options).shape, expected.shape)
        image, taps = x[0, 0].astype("f"), w[0, 0].astype("f")
        one = reference(False, 2, enlarged(image, (2, 3))[None, None], taps[None, None], padding=1)[0, 0]
        np.testing.assert_array_equal(pc.conv2d(image, taps, **options), one)
        z = x.astype(np.complex64) * (1 + 2j)
        np.testing.assert_array_equal(pc.conv2d(z, w.astype("f"), **options), expected * (1 + 2j))


@pytest.mark.parametrize(
    "options, error, text",
    [
        ({"upsample": 0}, ConvArgumentError, "upsample must be from 1"), ({"upsample": -2}, ConvArgumentError, "upsample=-2"),
        ({"upsample": 2.0}, TypeError, "upsample must be an integer or a list"), ({"upsample": (2, 2, 2)}, ConvArgumentError, "expected upsample"),
        ({"upsample": True}, TypeError, "upsample must be"), ({"upsample": "2"}, TypeError, "upsample must be"),
        ({"upsample": 2, "upsample_filter": "fold"}, ConvArgumentError, "did you mean 'folded'"),
        ({"upsample": 2, "upsample_filter": 1}, TypeError, "upsample_filter must be None or one of"),
        ({"upsample_filter": "sums"}, ConvArgumentError, "upsample_filter must be"),
        ({"upsample": 2, "upsample_filter": "folded", "stride": 2}, ConvArgumentError, "it takes a stride of 1"),
        ({"upsample": 2, "upsample_filter": "folded", "dilation": 2}, ConvArgumentError, "it takes a dilation of 1"),
        ({"upsample": 2, "upsample_filter": "folded", "padding_mode": "reflect"}, ConvArgumentError, "a border that is reflected"),
        ({"upsample": 2**14, "stride": 2**13}, ConvArgumentError, "upsampled input"),
    ],
)  # fmt: skip
def test_what_is_refused(options, error, text):
    x, w = np.zeros((1, 3, 5, 6), "f"), np.zeros((4, 3, 3, 3), "f")
    with pytest.raises(error, match=text):
        pc.conv2d(x, w, **{"padding": 1} | options)
    with pytest.raises(error, match=text):
        pc.conv2d(torch.from_numpy(x), torch.from_numpy(w).requires_grad_(), **{"padding": 1} | options)


# ---- plans


@pytest.mark.parametrize("word", ["exact", "folded"])
def test_plans_bound_plans_and_pickles(word):
    rng = np.random.default_rng(7)
    x, w, b = (rng.standard_normal(shape).astype("f") for shape in ((2, 8, 6, 5), (4, 8, 3, 3), (4,)))
    plan = Plan(ConvProblem.forward(2, x.shape, w.shape, b.shape, padding=1, upsample=2, upsample_filter=word))
    y = plan(x, w, b)
    assert abs(y - reference(False, 2, enlarged(x, (2, 2)), w, b, padding=1)).max() < 1e-4
    bound = plan.bind(w, b)
    for again in (pickle.loads(pickle.dumps(plan)), copy.copy(plan)):
        np.testing.assert_array_equal(again(x, w, b), y)
    for again in (bound, pickle.loads(pickle.dumps(bound))):
        np.testing.assert_array_equal(again(x), y)
    text = plan.explain()
    assert f"upsampled 2{', folded' if word == 'folded' else ''}" in text
    assert ("sum_taps" in text) == (word == "folded") != ("enlarge" in text)


def test_pieces_are_whole_images():
    problem = ConvProblem.forward(2, (3, 4, 40, 40), (4, 4, 3, 3), padding=1, upsample=2)
    cut = pieces(problem, 1000)
    assert [piece.images for piece in cut] == [slice(0, 1), slice(1, 2), slice(2, 3)] and {piece.problem.N for piece in cut} == {1}


def test_dask_arrays():
    da = pytest.importorskip("dask.array")
    rng = np.random.default_rng(8)
    x, w = rng.standard_normal((2, 3, 6, 7)), rng.standard_normal((4, 3, 3, 3))
    lazy = da.from_array(x, chunks=(1, 3, 4, 3))
    y = pc.conv2d(lazy, w, padding=1, padding_mode="replicate", upsample=2)
    expected = pc.conv2d(x, w, padding=1, padding_mode="replicate", upsample=2)
    np.testing.assert_allclose(y.compute(), expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(ConvArgumentError, match="upsample_filter must be 'exact' or None, but got 'folded'"):
        pc.conv2d(lazy, w, padding=1, upsample=2, upsample_filter="folded")


# ---- torch


@pytest.mark.parametrize("word", ["exact", "folded", None])
@pytest.mark.parametrize("seed", range(6))
def test_gradients(seed, word):
    """In float64, against torch's own of the enlarged and padded image."""
    drawn = Drawn(5000 + 1000 * ("exact", "folded", None).index(word) + seed, word)
    arrays = drawn.arrays("float64")
    given = [torch.from_numpy(a).requires_grad_() for a in arrays]
    y = drawn.function(*given, **drawn.whole)
    expected = drawn.by_torch(*arrays[:2]) + arrays[2].reshape(-1, *(1,) * drawn.ndim)
    np.testing.assert_array_equal(y.detach().numpy(), expected, err_msg=str(drawn))
    dy = torch.randn_like(y)
    right = *drawn.by_torch(*arrays[:2], dy.numpy()), dy.sum((0, *range(2, dy.dim()))).numpy()
    for got, wanted in zip(torch.autograd.grad(y, given, dy), right, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-10, err_msg=str(drawn))


def test_a_filter_of_float32_is_summed_before_it_is_rounded():
    """Under autocast the filter is folded in float32: no error but the rounding that an exact one has as well."""
    torch.manual_seed(0)
    x, w = torch.randn(2, 32, 9, 8).bfloat16(), torch.randn(16, 32, 3, 3) / 17
    wide = x.double().repeat_interleave(2, 2).repeat_interleave(2, 3)
    right = torch.nn.functional.conv2d(wide, w.double(), padding=1)
    errors = []
    for filter, autocast in ((w, True), (w.bfloat16(), False)):
        for grad in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.set_grad_enabled(grad):
                y = pc.conv2d(x, filter.clone().requires_grad_(grad), padding=1, upsample=2, upsample_filter="folded")
            assert y.dtype is torch.bfloat16
            errors.append(float((y.double() - right).norm() / right.norm()))
    assert errors[0] == errors[1] and errors[0] < 0.95 * errors[2]


def test_channels_last_stays():
    x, w = torch.randn(2, 4, 5, 6).contiguous(memory_format=torch.channels_last), torch.randn(6, 4, 3, 3)
    for filter in (w, w.clone().requires_grad_(), w.contiguous(memory_format=torch.channels_last)):
        for word in ("exact", "folded"):
            y = pc.conv2d(x, filter, padding=1, upsample=2, upsample_filter=word)
            assert y.is_contiguous(memory_format=torch.channels_last)
            right = torch.nn.functional.conv2d(torch.nn.functional.interpolate(x, scale_factor=2.0), filter, padding=1)
            assert torch.allclose(y, right, atol=1e-5)


def test_modules():
    torch.manual_seed(0)
    x = torch.randn(2, 4, 5, 6)
    for word in (None, "exact"):
        layer = pn.Conv2d(4, 6, 3, padding=1, padding_mode="replicate", upsample=2, upsample_filter=word)
        wide = torch.nn.functional.pad(x.repeat_interleave(2, 2).repeat_interleave(2, 3), (1,) * 4, mode="replicate")
        right = torch.nn.functional.conv2d(wide, layer.weight, layer.bias)
        compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager")
        for one in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), compiled):
            assert torch.allclose(one(x), right, atol=1e-5)
        assert "upsample=(2, 2)" in repr(layer) and repr(layer).endswith("by pycuda_conv)")
        with pytest.raises(ConvArgumentError, match=r"0 has upsample=\(2, 2\), and torch's convolutions upsample nothing"):
            pn.revert(torch.nn.Sequential(layer))
    with pytest.raises(ConvArgumentError, match="upsample must be"):
        pn.Conv1d(4, 6, 3, upsample=0)
    plain = torch.nn.Conv2d(4, 6, 3)
    assert "upsample" not in repr(pn.Conv2d(4, 6, 3)) and pn.Conv2d(4, 6, 3).load_state_dict(plain.state_dict())


@pytest.mark.gpu
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_on_a_gpu(dtype, last):
    """Layers of decoders, in both layouts, twice: the second call is repeated as the first was made."""
    own = getattr(torch, dtype)
    limits = {"float16": 5e-4, "bfloat16": 4e-3, "float32": 1e-6}
    torch.manual_seed(1)
    layers = (2, (64, 96), (24, 40), 2), (2, (320, 128), (16, 16), (2, 2)), (3, (32, 48), (3, 12, 14), (1, 2, 2)), (1, (64, 32), (500,), 3)
    for ndim, channels, size, times in layers:
        order = {2: torch.channels_last, 3: torch.channels_last_3d}.get(ndim) if last else None
        x, w = torch.randn(2, channels[0], *size, device="cuda").to(own), torch.randn(channels[1], channels[0], *(3,) * ndim, device="cuda")
        w, b = (w / (channels[0] * 3**ndim) ** 0.5).to(own), torch.randn(channels[1], device="cuda").to(own)
        x = x if order is None else x.contiguous(memory_format=order)
        wide = x.double()
        for axis, n in enumerate(times if isinstance(times, tuple) else (times,) * ndim, 2):
            wide = wide.repeat_interleave(n, axis)
        right = getattr(torch.nn.functional, f"conv{ndim}d")(wide, w.double(), b.double(), padding=1)
        for word in ("exact", "folded"):
            for _ in range(2):
                y = getattr(pc, f"conv{ndim}d")(x, w, b, padding=1, upsample=times, upsample_filter=word)
                assert float((y.double() - right).norm() / right.norm()) < limits[dtype], (ndim, word)
            plan = Plan(
                ConvProblem.forward(ndim, x.shape, w.shape, b.shape, padding=1, upsample=times, upsample_filter=word, dtype=dtype), 0
            )
            y = plan.bind(w, b)(x.contiguous())
            assert float((y.double() - right).norm() / right.norm()) < limits[dtype], (ndim, word, "bound")


@pytest.mark.parametrize("seed", range(12))
def test_a_filters_gradient_from_the_folded_ones(seed):
    """The same launch sums it, by the adjoint of what folds: any factors, taps, borders, groups and orders in memory."""
    from dataclasses import replace

    from pycuda_conv import execute
    from pycuda_conv.arrays import same_kind
    from pycuda_conv.call import Call, Operands
    from pycuda_conv.engines.layout import enlarge
    from pycuda_conv.nn import upsampling

    drawn = Drawn(seed, "folded")
    call = Call("conv", drawn.ndim, 1, drawn.pads, drawn.dilation, drawn.groups, "fp32", 0, upsample=(drawn.times, "folded"))
    how = upsampling.folding_of(call.hashable(), drawn.w_shape, "float32")
    w = torch.zeros(drawn.w_shape, dtype=torch.float64, requires_grad=True)
    v = upsampling.folded(w, how)
    dv = np.random.default_rng(seed).standard_normal(v.shape).astype(np.float32)
    (right,) = torch.autograd.grad(v, w, torch.from_numpy(dv).double())
    order, device = (0, *range(2, drawn.ndim + 2), 1), get_device("opencl")
    for given_last, last in ((False, False), (True, False), (False, True), (True, True)):
        launch = enlarge.sum_taps(replace(how.problem, dtype="float32"), given_last, last, 1, True)
        given = np.ascontiguousarray(dv.transpose(order) if given_last else dv)
        made = np.full([drawn.w_shape[axis] for axis in order] if last else drawn.w_shape, np.nan, np.float32)
        kind = same_kind(Operands(given, given, None, None, None))
        execute.launch(kind, device, device.schedule_launcher([[replace(launch, buffers=(0, 1))]]), (given,), (made,), 0)
        found = made.transpose([order.index(axis) for axis in range(len(order))]) if last else made
        np.testing.assert_allclose(found, right.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("last", [False, True])
def test_gradients_of_a_folded_filter_on_a_gpu(last):
    """By one launch, and in operations of torch where the gradient is differentiated in its turn."""
    from pycuda_conv.call import Call
    from pycuda_conv.nn import upsampling

    torch.manual_seed(0)
    form = torch.channels_last if last else torch.contiguous_format
    w = torch.randn(24, 40, 3, 3, device="cuda").contiguous(memory_format=form).requires_grad_()
    how = upsampling.folding_of(Call("conv", 2, 1, 1, 1, 1, "fp32", 0, upsample=((2, 3), "folded")).hashable(), tuple(w.shape), "float32")
    v, right = upsampling.folded_recorded(w, how, last), upsampling.folded(w, how)
    assert torch.allclose(v, right, atol=1e-5)
    dv = torch.randn_like(v)
    for twice in (False, True):
        (found,) = torch.autograd.grad(v, w, dv, create_graph=twice, retain_graph=True)
        (wanted,) = torch.autograd.grad(right, w, dv, retain_graph=True)
        assert torch.allclose(found, wanted, atol=1e-5)
