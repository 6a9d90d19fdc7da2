"""Depthwise convolutions of arrays with their channels last: results and gradients of the engine for them."""

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from reference import DTYPES, assert_close, assert_exact, channels_last, dgrad, fprop, tensor
from test_epilogue import allowed, arrays, expected, finishing

from pycuda_conv import ConvProblem, Plan, engines
from pycuda_conv.engines.depthwise import nhwc as depthwise_nhwc
from pycuda_conv.engines.depthwise import nhwc_launch
from pycuda_conv.engines.depthwise.nhwc import Depthwise, DepthwiseStrips, DepthwiseWgrad
from pycuda_conv.runtime import get_device

GPU = SimpleNamespace(capability=(9, 0), multiprocessors=132, backend="cuda", name="cuda:0", model="")

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
    return replace(case.problem(dtype), layout="NHWC", **options)


def configs(problem, device):
    found = list(depthwise_nhwc.configs(problem.launched, device))
    assert found and (device.backend == "cuda" or engines.choose(problem, device) == found[0])  # GPUs have other engines for so few pixels
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


def typed(first, *others):
    """The first case in each type but float32, and each other one in one of them."""
    types = [dtype for dtype in DTYPES if dtype != "float32"]
    return [*((first, dtype) for dtype in types), *((case, types[i % len(types)]) for i, case in enumerate(others))]


@pytest.mark.parametrize(("case", "dtype"), typed(FORWARD[0], FORWARD[3], FORWARD[8], BACKWARD[3]), ids=str)
def test_results_of_other_types(case, dtype):
    check(case, dtype, "opencl", 2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", FORWARD + BACKWARD, ids=str)
def test_results_on_a_gpu(case, dtype):
    check(case, dtype, "cuda")


@pytest.mark.parametrize("case", FORWARD + BACKWARD, ids=str)
def test_small_tiles(case):
    """They give the bits of others. GPUs alone choose them, where there are few pixels."""
    types = [dtype for dtype in DTYPES if dtype != "float64"]
    dtype = types[(FORWARD + BACKWARD).index(case) % len(types)]
    problem = last(case, dtype)
    small = [tile for tile in (Depthwise(chunk, *pixels) for chunk in (8, 16) for pixels in ((1, 1), (2, 2))) if not depthwise_nhwc.refusal(problem.launched, tile)]
    if not small:
        pytest.skip("its loops are not unrolled")
    x, w, b = case.normals(dtype)
    others = Plan(problem, "opencl", config=Depthwise(64, 2, 4))(x, w, b)
    assert_close(np.asarray(others, np.float64), ref := case.reference(x, w, b), case.bound(x, w, b, ref))
    for tile in small:
        assert np.array_equal(np.asarray(Plan(problem, "opencl", config=tile)(x, w, b), np.float64), np.asarray(others, np.float64)), tile


# ---- strips

# rows that fill no strip, columns that fill no tile, channels that fill no vector and no block, several images, uneven padding, multipliers,
# padding that is wider than the filter
STRIPS = [
    fprop((2, 8, 9, 11), (8, 1, 3, 3), padding=1, groups=8), fprop((1, 144, 6, 5), (144, 1, 3, 3), padding=1, groups=144),
    fprop((5, 5, 7, 3), (5, 1, 3, 3), padding=((2, 0), (0, 1)), groups=5), fprop((3, 6, 10, 7), (6, 1, 3, 3), padding=1, stride=2, groups=6),
    fprop((1, 68, 7, 7), (68, 1, 5, 5), padding=2, groups=68), fprop((1, 12, 13, 9), (12, 1, 5, 5), padding=(1, 3), stride=2, groups=12),
    fprop((2, 4, 12, 12), (4, 1, 7, 7), padding=3, groups=4), fprop((1, 10, 15, 9), (10, 1, 7, 7), padding=((3, 2), (0, 5)), stride=2, groups=10),
    fprop((1, 4, 9, 10), (8, 1, 3, 3), padding=1, groups=4), fprop((4, 3, 8, 6), (9, 1, 5, 5), padding=2, stride=2, groups=3),
    fprop((2, 4, 3, 3), (4, 1, 3, 3), padding=(5, 4), groups=4),
]  # fmt: skip
BACK = [
    dgrad((2, 8, 9, 11), (8, 1, 3, 3), padding=1, groups=8), dgrad((1, 68, 7, 7), (68, 1, 5, 5), padding=2, groups=68),
    dgrad((2, 4, 9, 12), (4, 1, 7, 7), padding=((3, 1), (6, 0)), groups=4), dgrad((1, 5, 9, 10), (5, 1, 3, 3), padding=(4, 3), groups=5),
    dgrad((3, 6, 5, 5), (6, 1, 3, 3), groups=6),
]  # fmt: skip
HEIGHTS = (1, 3, 4, 100)


def launched(plan, x, w, b=None, scale=None, residual=None):
    """The result of a plan for arrays that lie channels last; what it does not write is NaN."""
    given = [channels_last(tensor(x)), tensor(w), None if b is None else tensor(b)]
    more = {name: channels_last(tensor(a)) if a.ndim > 1 else tensor(a) for name, a in (("scale", scale), ("residual", residual)) if a is not None}
    out = channels_last(tensor(np.zeros(plan.problem.result_shape, x.dtype))).fill_(float("nan"))
    if plan.device.backend == "cuda":
        given, more, out = [a if a is None else a.cuda() for a in given], {name: a.cuda() for name, a in more.items()}, out.cuda()
    return plan(*given, **more, out=out).cpu().double().numpy()


def check_strips(case, dtype, place, heights=HEIGHTS):
    problem = replace(finishing(case.problem(dtype), "all"), layout="NHWC")
    whole, some = arrays(case, dtype, "all", integers=True), arrays(case, dtype, "all", integers=False)
    ref, ref_some = expected(case, "all", *whole), expected(case, "all", *some)
    order, tile = depthwise_nhwc.sum_order(problem, depthwise_tile(problem)), launched(Plan(problem, place, config=depthwise_tile(problem)), *some)
    for rows in heights:
        plan = Plan(problem, place, config=DepthwiseStrips(rows))
        assert_exact(launched(plan, *whole), ref.astype(dtype).astype(np.float64), plan)
        got = launched(plan, *some)
        assert_close(got, ref_some, allowed(case, *some, ref_some, ""), plan)
        if depthwise_nhwc.sum_order(problem, plan.config) == order:
            assert np.array_equal(got, tile), "strips must give the bits of tiles: their sum_order is the same"


def depthwise_tile(problem):
    return next(tile for tile in depthwise_nhwc._tiles(problem, GPU) if depthwise_nhwc.refusal(problem, tile) is None)


@pytest.mark.parametrize("case", STRIPS + BACK, ids=str)
def test_strips(case):
    check_strips(case, "float32", "opencl", HEIGHTS[(STRIPS + BACK).index(case) % 2 :: 2])


@pytest.mark.parametrize(("case", "dtype"), typed(STRIPS[0], STRIPS[5], BACK[2]), ids=str)
def test_strips_of_other_types(case, dtype):
    check_strips(case, dtype, "opencl", (3,))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", STRIPS + BACK, ids=str)
def test_strips_on_a_gpu(case, dtype):
    check_strips(case, dtype, "cuda")


@pytest.mark.parametrize("special", [np.inf, np.nan])
@pytest.mark.parametrize("case", [STRIPS[0], STRIPS[3], BACK[0]], ids=str)
def test_a_special_number_stays_in_the_windows_that_hold_it(case, special):
    """Neither padding nor the rows that two strips both load spread it."""
    place = get_device("opencl")
    x, w, b = case.normals("float32")
    marked = np.zeros_like(x)
    marked[0, :, 2, 1] = marked[-1, :, -1, -1] = 1
    x[marked > 0] = special
    met = case.reference(marked, np.ones_like(w)) > 0
    for rows in (1, 2, 4):
        got = launched(Plan(last(case, "float32"), place, config=DepthwiseStrips(rows)), x, w, b)
        assert np.array_equal(~np.isfinite(got), met)


def test_64_bit_offsets(monkeypatch):
    monkeypatch.setattr(nhwc_launch, "needs_64_bits", lambda problem: True)
    for case in (STRIPS[0], STRIPS[3], BACK[0]):
        check_strips(case, "float32", "opencl", (3,))
    check_gradient(GRADIENTS[0], "float32", "opencl", ((2, 3),))


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
    ((40, 4, 9, 9), (4, 1, 3, 3), (1, 1), (1, 1), (1, 1)), ((1, 144, 5, 3), (144, 1, 3, 3), (1, 1), (1, 1), (1, 1)),
    ((2, 6, 13, 9), (6, 1, 5, 5), (2, 2), (2, 3), (1, 1)), ((1, 4, 4, 4), (4, 1, 3, 3), (1, 1), (4, 5), (1, 1)),
]  # fmt: skip


def gradient_problem(x, w, stride, padding, dilation, dtype):
    size = tuple((n + 2 * p - d * (f - 1) - 1) // s + 1 for n, f, s, p, d in zip(x[2:], w[2:], stride, padding, dilation, strict=True))
    return ConvProblem.gradient(
        "weight", 2, x, w, (x[0], w[0], *size), stride=stride, padding=padding, dilation=dilation, groups=x[1], dtype=dtype, layout="NHWC"
    )


def check_gradient(shape, dtype, place, forced=((1, 1), (3, 2), (100, 3))):
    """By the planner's choice, and with other strips and parts, some of which have nothing to add."""
    x_shape, w_shape, stride, padding, dilation = shape
    problem, device = gradient_problem(*shape, dtype), get_device(place)
    rng = np.random.default_rng(1)
    for config in (configs(problem, device)[0], *(DepthwiseWgrad(rows, parts) for rows, parts in forced)):
        plan = Plan(problem, place, config=config)
        x, dy = (rng.integers(-4, 5, s).astype(dtype) for s in (problem.input_shape, problem.weight_shape))
        ref = wgrad_reference(x.astype(float), dy.astype(float), w_shape[2:], stride, padding, dilation, x_shape[1])
        out = plan(x, dy)
        assert_exact(np.asarray(out, np.float64), ref.astype(out.dtype).astype(np.float64), config)
        x, dy = (rng.standard_normal(s).astype(dtype) for s in (problem.input_shape, problem.weight_shape))
        ref = wgrad_reference(x.astype(float), dy.astype(float), w_shape[2:], stride, padding, dilation, x_shape[1])
        got = np.asarray(plan(x, dy), np.float64)
        assert np.linalg.norm(got - ref) / np.linalg.norm(ref) < {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "float64": 1e-14}[dtype]
        assert np.array_equal(got, np.asarray(plan(x, dy), np.float64))


@pytest.mark.parametrize("shape", GRADIENTS, ids=str)
def test_gradients_of_filters(shape):
    check_gradient(shape, "float32", "opencl")


@pytest.mark.parametrize(("shape", "dtype"), typed(GRADIENTS[0], GRADIENTS[4], GRADIENTS[7]), ids=str)
def test_gradients_of_filters_of_other_types(shape, dtype):
    check_gradient(shape, dtype, "opencl", ((3, 2),))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", GRADIENTS, ids=str)
def test_gradients_of_filters_on_a_gpu(shape, dtype):
    check_gradient(shape, dtype, "cuda")


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [3, 5])
def test_an_infinity_stays_with_the_taps_that_meet_it(size, stride):
    """Rows above and below a strip, and the columns that its last tile lacks, are no zeros that an Inf of x is multiplied with."""
    shape = (1, 4, 11, 10), (4, 1, size, size), (stride, stride), (1, 1), (1, 1)
    problem = gradient_problem(*shape, "float32")
    for row, column in itertools.product((0, 3, 10), (0, 5, 9)):
        x, dy, marked = np.ones(problem.input_shape, "f"), np.ones(problem.weight_shape, "f"), np.zeros(problem.input_shape)
        x[0, :, row, column], marked[0, :, row, column] = np.inf, 1
        met = wgrad_reference(marked, dy, (size, size), *shape[2:], 4) > 0
        for rows in (1, 2, 4, 100):
            got = Plan(problem, "opencl", config=DepthwiseWgrad(rows, 2))(x, dy)
            assert np.array_equal(np.isinf(got), met) and not np.isnan(got).any()


def test_parts_of_the_gradient_of_a_filter_are_alike():
    """All threads with work walk down the same number of strips, but for those of the last block."""
    r = random.Random(0)
    for _ in range(40):
        size, stride = r.choice((3, 5, 7)), r.choice((1, 2))
        n, c, h, w = r.randint(1, 64), r.choice((8, 30, 96, 144)), r.randint(7, 60), r.randint(7, 60)
        problem = gradient_problem((n, c, h, w), (c, 1, size, size), (stride, stride), (size // 2,) * 2, (1, 1), "float16").launched
        config = next(iter(depthwise_nhwc.configs(problem, GPU)))
        args = nhwc_launch._wgrad_arguments(problem, config)
        assert (config.PARTS - 1) * args.rounds * args.lanes_u < args.units <= config.PARTS * args.rounds * args.lanes_u


# ---- what it takes


def test_what_is_refused():
    device = get_device("opencl")
    with pytest.raises(ValueError, match="CHUNK must be one of"):
        Plan(last(FORWARD[0], "float32"), device, config=Depthwise(7))
    with pytest.raises(ValueError, match="layouts NHWC, CHWN"):
        Plan(FORWARD[0].problem("float32"), device, config=Depthwise())
    with pytest.raises(ValueError, match="one channel of the input a group"):
        Plan(last(fprop((1, 8, 5, 5), (8, 2, 3, 3), groups=4), "float32"), device, config=Depthwise())
    with pytest.raises(ValueError, match="configuration of their own"):
        Plan(last(FORWARD[0], "float32"), device, config=DepthwiseWgrad())
    for case in (FORWARD[6], FORWARD[7], BACKWARD[1]):
        with pytest.raises(ValueError, match="square filters of"):
            Plan(last(case, "float32"), device, config=DepthwiseStrips())
    for config, problem in ((DepthwiseStrips(0), last(FORWARD[0], "float32")), (DepthwiseWgrad(0), gradient_problem(*GRADIENTS[0], "float32"))):
        with pytest.raises(ValueError, match="ROWS must be at least 1"):
            Plan(problem, device, config=config)
    with pytest.raises(ValueError, match="PARTS must be at least 1"):
        Plan(gradient_problem(*GRADIENTS[0], "float32"), device, config=DepthwiseWgrad(1, 0))
    # columns that 32 bits do not count, in few blocks
    many = ConvProblem.forward(2, (2**30, 256, 3, 10), (256, 1, 3, 3), padding=1, groups=256, layout="NHWC")
    assert "groups of columns" in depthwise_nhwc.refusal(many, DepthwiseStrips(3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_strips_are_chosen_where_images_are_tall(dtype):
    for size, kind in (((64, 144, 56, 56), DepthwiseStrips), ((1, 8, 5, 5), Depthwise)):
        problem = ConvProblem.forward(2, size, (size[1], 1, 3, 3), padding=1, groups=size[1], dtype=dtype, layout="NHWC")
        assert isinstance(engines.choose(problem, GPU), kind)
        assert {type(config) for config in depthwise_nhwc.configs(problem, GPU)} == {Depthwise, DepthwiseStrips}


def test_gradients_that_nothing_reads_channels_last_are_found_to_be_so():
    problem = ConvProblem.gradient("weight", 2, (2, 8, 5, 5), (8, 8, 3, 3), (2, 8, 3, 3), layout="NHWC")
    assert engines.find(problem, get_device("opencl")) is None


def test_the_gradient_of_many_filters_of_one_channel_is_chosen_by_its_model():
    """Tensor cores share their loads of x among the filters, which threads of single channels can't."""
    many, alike = (gradient_problem((16, c, 224, 224), (48, 1, 7, 7), (1, 1), (3, 3), (1, 1), "float16").launched for c in (1, 48))
    assert depthwise_nhwc.choose(many, GPU)[0] > 0 == depthwise_nhwc.choose(alike, GPU)[0]


def test_strips_of_tall_images_of_few_channels_fill_the_machine():
    problem = ConvProblem.forward(2, (1, 3, 2160, 512), (3, 1, 3, 3), padding=1, groups=3, layout="NHWC")
    config = engines.choose(problem, GPU)
    assert isinstance(config, DepthwiseStrips) and nhwc_launch.grid_of(problem, config) > GPU.multiprocessors > nhwc_launch.grid_of(problem, DepthwiseStrips(68))
