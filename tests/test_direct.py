"""What is asked of the portable engines alone: plain cores, depthwise layers; what every engine is asked stands in tests/cases."""

import itertools
import math
import random

import numpy as np
import pytest
from awkward import GENERAL, TRANSPOSED
from cases import nhwc as of_nhwc
from cases.direct_gemm import GEMM
from filters import Filter
from modes import CPU, H200, asked
from reference import assert_close, assert_exact, fprop, run

from pycuda_conv import ConvProblem, Plan, engines
from pycuda_conv.engines import split_sum
from pycuda_conv.engines.depthwise import nhwc, nhwc_launch
from pycuda_conv.engines.depthwise.nhwc import DepthwiseStrips, DepthwiseWgrad
from pycuda_conv.engines.direct import direct, patch_wgrad
from pycuda_conv.engines.direct.configs import Batched, Wgrad
from pycuda_conv.engines.direct.gemm import Gemm
from pycuda_conv.engines.direct.patch_wgrad import RUN, PatchWgrad
from pycuda_conv.engines.direct.wgrad import WGRAD_RUN
from pycuda_conv.runtime import get_device

# ---- plain cores


def test_offsets_are_64_bits_from_two_to_the_31_elements_on():
    def defines(case, config=Batched(128, 8, 1)):  # noqa: B008
        return [step.defines["INDEX_64"] for stage in engines.schedule(case.problem("float16"), config, CPU).steps for step in stage]

    assert defines(fprop((1, 1, 2**14, 2**14), (4, 1, 1, 1))) == [0]
    assert defines(fprop((2**5, 4, 2**12, 2**12), (4, 4, 1, 1))) == [1]  # input
    assert defines(fprop((1, 1, 2**14, 2**14), (8, 1, 1, 1))) == [1]  # output
    assert defines(fprop((1, 2**10, 2**5, 2**5), (2**11, 2**10, 2**5, 2**5)), GEMM) == [1]  # filter
    half = fprop((8, 4, 2**12, 2**12), (8, 4, 1, 1))  # 2^30 elements: too many once there are two parts
    assert defines(half, GEMM) == [0]
    assert defines(half, Gemm(64, 64, 8, 4, 4, 1, SPLIT_K=2)) == [1, 1]


def test_the_planner_has_a_kernel_for_filters_beyond_shared_memory(device):
    case = fprop((1, 2, 90, 80), (3, 2, 85, 80), padding=1)  # 6800 taps: only the matrix product takes it
    arrays = case.integers("float64")
    plan = Plan(case.problem("float64"), device)
    assert_exact(run(plan, *arrays), case.reference(*arrays), plan)


# ---- gradients of filters of few channels and many pixels


def thin(x, w, layout="NCHW", dtype="float32", **options) -> ConvProblem:
    return Filter(x, w, layout=layout, **options).problem(dtype, precision="fp32")


@pytest.mark.parametrize("engine", [direct, patch_wgrad])
def test_long_sums_lose_few_digits(device, engine):
    """A sum of 60,000 products, one after the other, would be off by fifty times as much; in 32 rows by 1e-6."""
    case = Filter((1, 1, 200, 300), (8, 1, 3, 3), padding=(1,), layout="NCHW")
    arrays, problem = case.normals("float32", seed=7), asked(case, "fp32")
    ref, got = case.reference(*arrays), run(Plan(problem, device, config=engine.choose(problem.launched, H200)[1]), *arrays)
    assert np.linalg.norm(got - ref) / np.linalg.norm(ref) < 3e-7


#: Few channels, many pixels.
THIN = [
    Filter((1, 1, 2160, 3840), (1, 1, 3, 3), layout="NCHW"), Filter((1, 3, 1080, 1920), (3, 1, 15, 15), groups=3, layout="NCHW"), Filter((1, 1, 160000), (64, 1, 10), stride=(5,), layout="NCHW"),
    Filter((4, 1, 80000), (512, 1, 400), stride=(160,), layout="NCHW"), Filter((8, 3, 224, 224), (64, 3, 7, 7), stride=(2,), padding=(3,), layout="NCHW"), Filter((2, 16, 256, 256), (2, 16, 5, 5), layout="NCHW"),
    Filter((1, 3, 512, 512), (32, 3, 3, 3), padding=(1,), layout="NCHW"), Filter((16, 3, 224, 224), (768, 3, 16, 16), stride=(16,), layout="NCHW"), Filter((2, 1, 64, 64, 64), (16, 1, 3, 3, 3), layout="NCHW"),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("case", THIN, ids=str)
def test_no_launch_walks_a_long_sum_in_few_blocks(case, dtype):
    problem = case.problem(dtype, precision="fp32")
    launched, pixels = problem.launched, problem.input_shape[0] * math.prod(problem.output_size)
    for engine in (direct, patch_wgrad):
        us, config = engine.choose(launched, H200)
        product, *others = [launch for step in engines.schedule(problem, config, H200).steps for launch in step]
        assert us > 0 and (product.grid >= H200.multiprocessors or pixels <= 128 * 8)
        assert product.arguments.run <= (RUN + 16 if engine is patch_wgrad else WGRAD_RUN * config.THREADS)
        for launch in others:  # adds the slices
            assert launch.arguments.run <= max(split_sum.LONGEST, math.ceil(config.SLICES / split_sum.MOST_LANES))
    # more slices than there are pixels help nobody
    assert patch_wgrad.choose(launched, H200)[1].SLICES <= pixels / 16 + 1


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("x", "w"), [((0, 3, 5, 5), (4, 3, 3, 3)), ((2, 0, 5, 5), (4, 0, 3, 3))])
def test_empty_arrays_are_planned_for_a_gpu(x, w, layout):
    problem = thin(x, w, layout)
    engines.schedule(problem, engines.choose(problem, H200), H200)


def test_numbers_of_pixels_that_do_not_fit_have_64_bits():
    """Slices of a whole number of steps reach beyond the last pixel."""
    problem = thin((700, 1, 3_000_000), (1, 1, 1), dtype="float16")
    for near, far in ((PatchWgrad(64, 64, 2), PatchWgrad(64, 64, 8_000_000)), (Wgrad(128, 1, 2), Wgrad(128, 1, 2_000_000))):
        found = [engines.schedule(problem, config, H200).steps[0][0].defines["INDEX_64"] for config in (near, far)]
        assert found == [0, 1]


# ---- depthwise layers with their channels last


@pytest.mark.parametrize("special", [np.inf, np.nan])
@pytest.mark.parametrize("case", [of_nhwc.STRIPS[0], of_nhwc.STRIPS[3], of_nhwc.BACKWARD[0]], ids=str)
def test_a_special_number_stays_in_the_windows_that_hold_it(device, case, special):
    """Neither padding nor the rows that two strips both load spread it."""
    x, w, b = case.normals("float32")
    marked = np.zeros_like(x)
    marked[0, :, 2, 1] = marked[-1, :, -1, -1] = 1
    x[marked > 0] = special
    met = case.reference(marked, np.ones_like(w)) > 0
    for rows in (1, 2, 4):
        got = run(Plan(asked(case, "fp32 last"), device, config=DepthwiseStrips(rows)), x, w, b)
        assert np.array_equal(~np.isfinite(got), met)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [3, 5])
def test_an_infinity_stays_with_the_taps_that_meet_it(device, size, stride):
    """Rows above and below a strip, and the columns that its last tile lacks, are no zeros that an Inf of x is multiplied with."""
    case = Filter((1, 4, 11, 10), (4, 1, size, size), stride=(stride,), padding=(1,), groups=4)
    for row, column in itertools.product((0, 3, 10), (0, 5, 9)):
        (x, dy), marked = case.arrays("float32", np.ones), np.zeros(case.x)
        x[0, :, row, column], marked[0, :, row, column] = np.inf, 1
        met = case.reference(marked, dy) > 0
        for rows in (1, 2, 4, 100):
            got = run(Plan(asked(case, "fp32"), device, config=DepthwiseWgrad(rows, 2)), x, dy)
            assert np.array_equal(np.isinf(got), met) and not np.isnan(got).any()


def test_parts_of_the_gradient_of_a_filter_are_alike():
    """All threads with work walk down the same number of strips, but for those of the last block."""
    r = random.Random(0)
    for _ in range(40):
        size, stride = r.choice((3, 5, 7)), r.choice((1, 2))
        n, c, h, w = r.randint(1, 64), r.choice((8, 30, 96, 144)), r.randint(7, 60), r.randint(7, 60)
        problem = thin((n, c, h, w), (c, 1, size, size), "NHWC", "float16", stride=(stride,), padding=(size // 2,), groups=c).launched
        config = next(iter(nhwc.configs(problem, H200)))
        args = nhwc_launch._wgrad_arguments(problem, config)
        assert (config.PARTS - 1) * args.rounds * args.lanes_u < args.units <= config.PARTS * args.rounds * args.lanes_u


def test_gradients_that_nothing_reads_channels_last_are_found_to_be_so():
    problem = ConvProblem.gradient("weight", 2, (2, 8, 5, 5), (8, 8, 3, 3), (2, 8, 3, 3), layout="NHWC")
    assert engines.find(problem, get_device("opencl")) is None


# ---- the tests themselves: a comparison that can't fail proves nothing


@pytest.mark.parametrize("case", [GENERAL, TRANSPOSED], ids=["fprop", "dgrad"])
def test_the_comparisons_reject_a_result_without_one_tap(case):
    for arrays, exact in ((case.integers("float32"), True), (case.normals("float32"), False)):
        x, w, b = arrays
        ref = case.reference(x, w, b)
        assert w[0, 0, 1, 0] != 0
        w_short = w.copy()
        w_short[0, 0, 1, 0] = 0
        short = case.reference(x, w_short, b).astype("float32")
        with pytest.raises(pytest.fail.Exception, match="elements"):
            assert_exact(short, ref) if exact else assert_close(short, ref, case.bound(x, w, b, ref))


def test_the_comparisons_reject_nan_a_single_unit_and_a_wrong_shape():
    x, w, b = GENERAL.normals("float32")
    ref = GENERAL.reference(x, w, b)
    bound = GENERAL.bound(x, w, b, ref)
    assert_close(ref, ref, bound)
    for at in ((0, 0, 0, 0), (2, 69, 12, 4)):
        for value in (np.nan, np.inf, ref[at] + 1.01 * bound[at] + 2.0**-50 * abs(ref[at])):
            bad = ref.copy()
            bad[at] = value
            with pytest.raises(pytest.fail.Exception, match=str(at).replace("(", r"\(").replace(")", r"\)")):
                assert_close(bad, ref, bound)
            with pytest.raises(pytest.fail.Exception, match="1 of"):
                assert_exact(bad, ref)
    with pytest.raises(AssertionError, match="shape"):
        assert_exact(ref[:1], ref)
