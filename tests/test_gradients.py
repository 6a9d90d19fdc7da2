"""The gradients by input and by filter against torch's in float64: every argument, dtype and kind of array, and wrong ones."""


import hypothesis.strategies as st
import numpy as np
import pytest
import simt
import torch
from hypothesis import given
from reference import DTYPES, assert_exact, channels_last, convolved, is_channels_last, run, tensor

import pycuda_conv as pc
from pycuda_conv import ConvProblem, Plan
from pycuda_conv.engines.direct.direct import Dgrad, Wgrad
from pycuda_conv.engines.direct.gemm import Gemm
from pycuda_conv.engines.hopper.gemm import ImplicitGemm

OF = ["input", "weight"]
FILTER, SIZE = (2, 3, 2), (5, 7, 6)


def shapes(ndim: int, n: int = 2, c: int = 4, k: int = 6, groups: int = 1, size=SIZE, filter_size=FILTER) -> tuple:
    return (n, c, *size[-ndim:]), (k, c // groups, *filter_size[-ndim:])


def gradient(of: str, x, w, dy, **options) -> np.ndarray:
    """The gradient in float64, by torch."""
    x, w, dy = (torch.from_numpy(np.ascontiguousarray(a, np.float64)) for a in (x, w, dy))
    y = convolved(False, x.requires_grad_(), w.requires_grad_(), **options)
    return torch.autograd.grad(y, x if of == "input" else w, dy)[0].numpy()


def arrays(make, x_shape, w_shape, dtype="float64", **options) -> tuple:
    """Input, filter and the gradient by the result."""
    y_shape = ConvProblem.forward(len(w_shape) - 2, x_shape, w_shape, **options).result_shape
    return tuple(make(shape).astype(dtype) for shape in (x_shape, w_shape, y_shape))


def integers(shape, rng=np.random.default_rng(1)):  # noqa: B008
    return rng.integers(-8, 9, shape)


def normals(shape, rng=np.random.default_rng(2)):  # noqa: B008
    return rng.standard_normal(shape)


def call(of: str, x, w, dy, device=None, **options):
    ndim = len(w.shape) - 2
    if of == "input":
        return getattr(pc, f"conv{ndim}d_input")(tuple(x.shape), w, dy, **options, device=device)
    return getattr(pc, f"conv{ndim}d_weight")(x, tuple(w.shape), dy, **options, device=device)


PARAMETERS = [
    {}, {"stride": 2}, {"stride": 3, "padding": 2}, {"dilation": 2}, {"groups": 2}, {"stride": 2, "padding": 1, "dilation": 2, "groups": 2},
    {"padding": "same"}, {"padding": "valid"},
]  # fmt: skip


@pytest.mark.pairs
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("options", PARAMETERS, ids=str)
@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("of", OF)
def test_parameters_mean_what_they_mean_in_torch(device, of, ndim, options, kind):
    x, w, dy = arrays(integers, *shapes(ndim, groups=options.get("groups", 1)), **options)
    got = call(of, *((x, w, dy) if kind == "numpy" else map(tensor, (x, w, dy))), device, **options)
    assert type(got) is (np.ndarray if kind == "numpy" else torch.Tensor)
    assert_exact(np.asarray(got), gradient(of, x, w, dy, **options))


@pytest.mark.parametrize("of", OF)
@pytest.mark.parametrize(("x_shape", "w_shape"), [((0, 3, 5, 5), (4, 3, 3, 3)), ((2, 0, 5, 5), (4, 0, 3, 3)), ((2, 3, 5, 5), (0, 3, 3, 3))])
def test_empty_arrays(device, of, x_shape, w_shape):
    try:
        x, w, dy = arrays(integers, x_shape, w_shape)
    except pc.ConvArgumentError:
        pytest.skip("no such convolution")
    got = call(of, x, w, dy, device)
    assert got.shape == (x if of == "input" else w).shape and not got.any()


@pytest.mark.parametrize("of", OF)
def test_channels_last(device, of):
    x, w, dy = arrays(integers, *shapes(2))
    got = call(of, *map(channels_last, map(tensor, (x, w, dy))), device)
    assert_exact(got.numpy(), gradient(of, x, w, dy))
    assert is_channels_last(got) == (of == "input")


@given(data=st.data(), of=st.sampled_from(OF), ndim=st.integers(1, 3))
def test_random_problems(device, data, of, ndim):
    draw = data.draw
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    c, k = (groups * draw(st.integers(1, 5)) for _ in range(2))

    def each(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(ndim))

    options = {"stride": each(1, 3), "padding": each(0, 3), "dilation": each(1, 3), "groups": groups}
    filter_size = each(1, 3)
    size = tuple(
        max(n, d * (f - 1) + 1 - 2 * p) for n, d, f, p in zip(each(1, 9), options["dilation"], filter_size, options["padding"], strict=True)
    )
    batch, dtype = draw(st.sampled_from([(), (1,), (2,), (4,)])), draw(st.sampled_from(DTYPES))
    x, w, dy = arrays(integers, (*batch, c, *size), (k, c // groups, *filter_size), dtype, **options)
    got = call(of, x, w, dy, device, **options)
    assert got.dtype == dtype
    assert_exact(got, gradient(of, x, w, dy, **options))


@pytest.mark.parametrize("stride", [1, 2])
def test_long_sums_of_few_channels_are_cut(device, stride):
    """One chain of so many products would be off by more than twice as much."""
    dy, w = (
        rng.standard_normal(shape).astype("f") for rng,
        shape in ((np.random.default_rng(1), (1, 2048, 6, 6)), (np.random.default_rng(2), (2048, 1, 3, 3)))
    )
    problem = ConvProblem.transposed(2, dy.shape, w.shape, stride=stride)
    got = run(Plan(problem, device, config=Dgrad(128, 16, 1)), dy, w)
    ref = torch.nn.functional.conv_transpose2d(*(torch.from_numpy(a).double() for a in (dy, w)), stride=stride).numpy()
    assert np.linalg.norm(got - ref) < 5e-7 * np.linalg.norm(ref)


def off(config, device, problem, *operands) -> float:
    """How far a result is from float64, of its norm."""
    got = run(Plan(problem, device, config=config), *operands)
    ref = {
        "fprop": torch.nn.functional.conv2d, "dgrad": torch.nn.functional.conv_transpose2d
    }[problem.direction](*(torch.from_numpy(a).double() for a in operands)).numpy()
    return np.linalg.norm(got - ref) / np.linalg.norm(ref)


def test_a_matrix_product_adds_up_256_products_by_themselves(device):
    """One chain of 4096 products would be off by 1.2e-6, and one of 256 is by 3e-7."""
    x, w = (np.random.default_rng(seed).standard_normal(shape).astype("f") for seed, shape in ((1, (1, 4096, 5, 5)), (2, (64, 4096, 1, 1))))
    assert off(Gemm(64, 64, 8, 4, 4, 1), device, ConvProblem.forward(2, x.shape, w.shape), x, w) < 4e-7


@pytest.mark.parametrize(("size", "limit"), [((3, 4), 1.6e-7), ((5, 7), 2.5e-7)])
def test_a_transposed_convolution_adds_up_few_filters_or_a_row_by_themselves(device, size, limit):
    """A block's 16 filters in one chain would be off by 2.2e-7 and 3.3e-7. A GPU's own text for 3x3 is such a chain."""
    dy, w = (np.random.default_rng(seed).standard_normal(shape).astype("f") for seed, shape in ((1, (1, 16, 9, 9)), (2, (16, 8, *size))))
    assert off(Dgrad(128, 16, 8), device, ConvProblem.transposed(2, dy.shape, w.shape), dy, w) < limit


def test_sums_of_a_block_s_threads_are_added_in_pairs(device):
    """One after the other they would be off by 9.4e-8."""
    x, dy = np.random.default_rng(1).standard_normal((2, 1, 128, 8, 16), np.float32)
    problem = ConvProblem.gradient("weight", 2, x.shape, (128, 1, 3, 3), dy.shape, padding=1, groups=128)
    ref = gradient("weight", x, np.zeros((128, 1, 3, 3)), dy, padding=1, groups=128)
    got = run(Plan(problem, device, config=Wgrad(128, 9, 1)), x, dy)
    assert np.linalg.norm(got - ref) < 8.3e-8 * np.linalg.norm(ref)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w, dy: pc.conv2d_weight(x, w.shape, dy[:, :, :-1]), r"grad_output must have the shape .* \[2, 6, 6, 4\].* got \[2, 6, 5, 4\]"),
        (lambda x, w, dy: pc.conv2d_input((2, 4, 7, 9), w, dy), r"grad_output must have the shape"),
        (lambda x, w, dy: pc.conv2d_input(x.shape, w, dy.astype("f")), r"Grad_output type .*float32.* and weight type .*float64"),
        (lambda x, w, dy: pc.conv2d_weight(x, w.shape, dy.astype("f")), r"Input type .* and grad_output type"),
        (lambda x, w, dy: pc.conv2d_weight(x, (6, 3, 2, 3), dy), r"expected input\[2, 4, 7, 6\] to have 3 channels"),
        (lambda x, w, dy: pc.conv2d_weight(x, w.shape, dy, out=np.empty((6, 4, 2, 2))), r"out must have shape \[6, 4, 2, 3\]"),
        (lambda x, w, dy: pc.conv2d_input(x.shape, w, dy, stride=0), r"non-positive stride"),
        (lambda x, w, dy: pc.conv2d_input((2, 4, -7, 6), w, dy), r"input_size must not hold negative sizes, but got \[2, 4, -7, 6\]"),
        (lambda x, w, dy: pc.conv2d_weight(x, (6, 4, -2, 3), dy), r"weight_size must not hold negative sizes"),
        (lambda x, w, dy: pc.conv2d_input(7, w, dy), "input_size must be the shape"),
        (lambda x, w, dy: pc.conv2d_input((2, 4, 7.0, 6), w, dy), "each size in input_size must be an integer, got 7.0"),
        (lambda x, w, dy: pc.conv2d_weight(x, w.shape, [1, 2]), "grad_output must be a numpy.ndarray"),
        (lambda x, w, dy: pc.conv2d_weight(x, w.shape, tensor(dy)), "input is a numpy.ndarray but grad_output is a torch.Tensor"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    x, w, dy = arrays(integers, (2, 4, 7, 6), (6, 4, 2, 3))
    with pytest.raises((pc.ConvArgumentError, TypeError), match=message):
        call(x, w, dy)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["torch", "cupy", "pycuda"])
@pytest.mark.parametrize("of", OF)
def test_device_arrays(of, kind):
    x, w, dy = arrays(integers, *shapes(2, n=3, c=8, k=16), "float32", padding=1)
    if kind == "torch":
        got = call(of, *(tensor(a).cuda() for a in (x, w, dy)), padding=1).cpu().numpy()
    elif kind == "cupy":
        cupy = pytest.importorskip("cupy")
        got = call(of, *map(cupy.asarray, (x, w, dy)), padding=1).get()
    else:
        from pycuda import gpuarray

        from pycuda_conv.runtime import get_device

        with get_device("cuda"):
            got = call(of, *map(gpuarray.to_gpu, (x, w, dy)), padding=1).get()
    assert_exact(got, gradient(of, x, w, dy, padding=1))


# ---- the tensor cores' engine; tests/cases/hopper_gemm.py has its gradients of filters


WHOLE_IMAGES = (16, 20, 5, 6), (40, 20, 3, 3), {"padding": 1}  # a batch that fills loads


@pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
@pytest.mark.parametrize("scale", [2.0**-40, 3e5])
@pytest.mark.parametrize("of", OF)
def test_gradients_of_any_magnitude_keep_their_bits(of, scale):
    """The scale of dy is guessed from a sample: a power of two changes nothing but the exponents."""
    x_shape, w_shape, options = WHOLE_IMAGES
    x, w, dy = arrays(normals, x_shape, w_shape, "float32", **options)
    problem, scale = ConvProblem.gradient(of, 2, x_shape, w_shape, dy.shape, **options).launched, np.float32(2.0 ** round(np.log2(scale)))
    one, other = (
        simt.computed(problem, ImplicitGemm(64, 32, 2, 1), *((grad, w) if of == "input" else (x, grad))) for grad in (dy, dy * scale)
    )
    assert np.array_equal(one * scale, other)
