"""Depthwise convolutions of arrays with their channels last: results and gradients of the engine for them."""

import itertools

import numpy as np
import pytest
from reference import DTYPES, assert_close, assert_exact, dgrad, fprop

from pycuda_conv import ConvProblem, Plan, engines
from pycuda_conv.engines import depthwise_nhwc
from pycuda_conv.runtime import get_device

# of every kind: filters whose loops are unrolled and others, strides, dilation, vectors of 4, 2 and 1 channels, planes smaller than a tile
FORWARD = [
    fprop((2, 8, 9, 11), (8, 1, 3, 3), padding=1, groups=8), fprop((2, 6, 10, 7), (6, 1, 3, 3), padding=1, stride=2, groups=6),
    fprop((1, 68, 7, 7), (68, 1, 5, 5), padding=2, groups=68), fprop((1, 12, 13, 9), (12, 1, 5, 5), padding=(1, 3), stride=2, groups=12),
    fprop((2, 4, 12, 12), (4, 1, 7, 7), padding=3, groups=4), fprop((1, 5, 6, 6), (5, 1, 3, 3), padding=1, groups=5),
    fprop((1, 8, 14, 15), (8, 1, 3, 3), padding=2, dilation=2, groups=8), fprop((1, 8, 14, 15), (8, 1, 3, 3), stride=3, groups=8),
    fprop((1, 4, 20, 21), (4, 1, 9, 11), padding=(4, 5), groups=4), fprop((1, 4, 9, 10), (8, 1, 3, 3), padding=1, groups=4),
    fprop((3, 8, 17), (8, 1, 5), padding=2, groups=8), fprop((2, 16, 5, 5), (16, 1, 2, 4), stride=(2, 1), groups=16),
    fprop((2, 4, 3, 3), (4, 1, 3, 3), padding=(0, 1), groups=4), fprop((1, 8, 6, 6), (8, 1, 1, 1), groups=8),
]
BACKWARD = [
    dgrad((2, 8, 9, 11), (8, 1, 3, 3), padding=1, groups=8), dgrad((2, 6, 5, 4), (6, 1, 3, 3), padding=1, stride=2, output_padding=1, groups=6),
    dgrad((1, 68, 7, 7), (68, 1, 5, 5), padding=2, groups=68), dgrad((1, 12, 7, 5), (12, 1, 5, 5), padding=(1, 2), stride=2, groups=12),
    dgrad((2, 4, 6, 6), (4, 1, 7, 7), padding=3, stride=2, groups=4), dgrad((1, 5, 6, 6), (5, 1, 3, 3), stride=2, groups=5),
    dgrad((1, 8, 7, 8), (8, 1, 3, 3), padding=2, dilation=2, groups=8), dgrad((1, 8, 5, 4), (8, 1, 3, 3), stride=3, groups=8),
    dgrad((1, 4, 12, 11), (4, 1, 9, 11), padding=(4, 5), groups=4), dgrad((3, 8, 17), (8, 1, 5), padding=2, groups=8),
    dgrad((1, 8, 5, 6), (8, 1, 3, 3), stride=2, dilation=3, groups=8),
]  # fmt: skip


def last(case, dtype, **options):
    """The case as a problem whose arrays are channels last."""
    from dataclasses import replace

    return replace(case.problem(dtype), layout="NHWC", **options)


def configs(problem, device):
    found = list(depthwise_nhwc.configs(problem.launched, device))
    assert found and engines.choose(problem, device) == found[0]
    return found


def check(case, dtype, place, most=None):
    device, problem = get_device(place), last(case, dtype)
    for config in configs(problem, device)[:most]:
        plan = Plan(problem, place, config=config)
        x, w, b = case.integers(dtype)
        out = plan(x, w, b)
        assert_exact(np.asarray(out, np.float64), case.reference(x, w, b).astype(out.dtype).astype(np.float64), config)
        x, w, b = case.normals(dtype)
        ref = case.reference(x, w, b)
        out = plan(x, w, b)
        assert_close(np.asarray(out, np.float64), ref, case.bound(x, w, b, ref), config)
        assert np.array_equal(np.asarray(plan(x, w, b), np.float64), np.asarray(out, np.float64))


@pytest.mark.parametrize("case", FORWARD + BACKWARD, ids=str)
def test_results(case):
    check(case, "float32", "opencl", 1)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "float32"])
@pytest.mark.parametrize("case", [FORWARD[0], FORWARD[3], FORWARD[8], BACKWARD[3]], ids=str)
def test_results_of_other_types(case, dtype):
    check(case, dtype, "opencl", 2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", FORWARD + BACKWARD, ids=str)
def test_results_on_a_gpu(case, dtype):
    check(case, dtype, "cuda")


# ---- the gradient of the filter


def wgrad_reference(x, dy, size, stride, padding, dilation, groups):
    """In float64, tap by tap."""
    _, k, p, q = dy.shape
    padded = np.pad(x, ((0, 0), (0, 0), *((a, a) for a in padding)))
    seen = np.repeat(padded, k // groups, 1)
    out = np.zeros((k, 1, *size))
    for r, s in itertools.product(*map(range, size)):
        rows, cols = (slice(t * d, t * d + (m - 1) * u + 1, u) for t, d, m, u in zip((r, s), dilation, (p, q), stride, strict=True))
        out[:, 0, r, s] = (seen[:, :, rows, cols] * dy).sum((0, 2, 3))
    return out


GRADIENTS = [  # input, filter, stride, padding, dilation
    ((2, 8, 9, 11), (8, 1, 3, 3), (1, 1), (1, 1), (1, 1)), ((2, 6, 10, 7), (6, 1, 3, 3), (2, 2), (1, 1), (1, 1)),
    ((1, 68, 7, 7), (68, 1, 5, 5), (1, 1), (2, 2), (1, 1)), ((2, 4, 12, 13), (4, 1, 7, 7), (1, 1), (3, 3), (1, 1)),
    ((2, 4, 12, 13), (4, 1, 7, 7), (2, 2), (3, 3), (1, 1)), ((1, 5, 6, 6), (5, 1, 3, 3), (1, 1), (0, 1), (1, 1)),
    ((1, 8, 14, 15), (8, 1, 3, 3), (1, 1), (2, 2), (2, 2)), ((2, 4, 20, 21), (4, 1, 9, 11), (1, 1), (4, 5), (1, 1)),
    ((2, 4, 9, 10), (8, 1, 3, 3), (1, 1), (1, 1), (1, 1)), ((2, 16, 5, 8), (16, 1, 2, 4), (2, 3), (0, 0), (1, 1)),
    ((40, 4, 9, 9), (4, 1, 3, 3), (1, 1), (1, 1), (1, 1)),
]  # fmt: skip


def gradient_problem(x, w, stride, padding, dilation, dtype):
    size = tuple((n + 2 * p - d * (f - 1) - 1) // s + 1 for n, f, s, p, d in zip(x[2:], w[2:], stride, padding, dilation, strict=True))
    return ConvProblem.gradient(
        "weight", 2, x, w, (x[0], w[0], *size), stride=stride, padding=padding, dilation=dilation, groups=x[1], dtype=dtype, layout="NHWC"
    )


def check_gradient(shape, dtype, place, parts=(None, 3)):
    x_shape, w_shape, stride, padding, dilation = shape
    problem, device = gradient_problem(*shape, dtype), get_device(place)
    config = configs(problem, device)[0]
    rng = np.random.default_rng(1)
    for many in parts:
        one = config if many is None else depthwise_nhwc.DepthwiseWgrad(config.CHUNK, many)
        plan = Plan(problem, place, config=one)
        x, dy = (rng.integers(-4, 5, s).astype(dtype) for s in (problem.input_shape, problem.weight_shape))
        ref = wgrad_reference(x.astype(float), dy.astype(float), w_shape[2:], stride, padding, dilation, x_shape[1])
        out = plan(x, dy)
        assert_exact(np.asarray(out, np.float64), ref.astype(out.dtype).astype(np.float64), one)
        x, dy = (rng.standard_normal(s).astype(dtype) for s in (problem.input_shape, problem.weight_shape))
        ref = wgrad_reference(x.astype(float), dy.astype(float), w_shape[2:], stride, padding, dilation, x_shape[1])
        got = np.asarray(plan(x, dy), np.float64)
        assert np.linalg.norm(got - ref) / np.linalg.norm(ref) < {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "float64": 1e-14}[dtype]
        assert np.array_equal(got, np.asarray(plan(x, dy), np.float64))


@pytest.mark.parametrize("shape", GRADIENTS, ids=str)
def test_gradients_of_filters(shape):
    check_gradient(shape, "float32", "opencl")


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "float32"])
@pytest.mark.parametrize("shape", [GRADIENTS[0], GRADIENTS[4], GRADIENTS[7]], ids=str)
def test_gradients_of_filters_of_other_types(shape, dtype):
    check_gradient(shape, dtype, "opencl", (3,))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", GRADIENTS, ids=str)
def test_gradients_of_filters_on_a_gpu(shape, dtype):
    check_gradient(shape, dtype, "cuda")


def test_an_infinity_stays_with_the_taps_that_meet_it():
    """The last piece of a row is shorter than the others: its missing pixels meet no Inf of x."""
    problem = gradient_problem((1, 4, 5, 7), (4, 1, 3, 3), (1, 1), (1, 1), (1, 1), "float32")
    x, dy = np.ones(problem.input_shape, "f"), np.ones(problem.weight_shape, "f")
    x[0, :, 2, 6] = np.inf  # in the last column: tap 2 of a row meets column 6 from pixel 5, tap 0 never
    got = Plan(problem, "opencl")(x, dy)
    assert np.isfinite(got[..., 0]).all() and np.isinf(got[..., 2]).any() and not np.isnan(got).any()


# ---- what it takes


def test_what_is_refused():
    device = get_device("opencl")
    with pytest.raises(ValueError, match="CHUNK must be one of"):
        Plan(last(FORWARD[0], "float32"), device, config=depthwise_nhwc.Depthwise(7))
    with pytest.raises(ValueError, match="layouts NHWC, CHWN"):
        Plan(FORWARD[0].problem("float32"), device, config=depthwise_nhwc.Depthwise())
    with pytest.raises(ValueError, match="one channel of the input a group"):
        Plan(last(fprop((1, 8, 5, 5), (8, 2, 3, 3), groups=4), "float32"), device, config=depthwise_nhwc.Depthwise())
    with pytest.raises(ValueError, match="configuration of their own"):
        Plan(last(FORWARD[0], "float32"), device, config=depthwise_nhwc.DepthwiseWgrad())


def test_gradients_that_nothing_reads_channels_last_are_found_to_be_so():
    problem = ConvProblem.gradient("weight", 2, (2, 8, 5, 5), (8, 8, 3, 3), (2, 8, 3, 3), layout="NHWC")
    assert engines.find(problem, get_device("opencl")) is None
