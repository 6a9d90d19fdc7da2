"""Every kernel and tile of the direct engine, forced, in three layers: exact integers, random data, awkward shapes."""

from types import SimpleNamespace

import numpy as np
import pytest
import reference
from alike import check_refused
from awkward import FORWARD, MANY_PHASES, SINGLE_CHANNEL, TRANSPOSED_CASES
from reference import DTYPES, assert_close, assert_exact, dgrad, fprop, run

from pycuda_conv import ConvProblem, Plan, engines
from pycuda_conv.engines.direct import direct
from pycuda_conv.engines.direct import gemm as direct_gemm
from pycuda_conv.engines.direct.configs import TILES, Batched, Dgrad, Single, Tile
from pycuda_conv.engines.direct.gemm import Gemm

GEMM = Gemm(64, 64, 8, 4, 4, 1)


def fake(backend: str, multiprocessors: int):
    """A device without tensor cores that plans are made for."""
    return SimpleNamespace(backend=backend, multiprocessors=multiprocessors, capability=(0, 0), name="", model="")


CPU = fake("opencl", 2)

# one ordinary problem for each kind of kernel, a little larger than the largest tile so that whole and partial tiles occur
GENERAL = fprop((3, 11, 13, 10), (70, 11, 3, 2), padding=(1, 0), stride=(1, 2))
POINTWISE = fprop((2, 36, 8, 10), (68, 36, 1, 1))  # takes the 16-byte loads of B and stores of the result
DEPTHWISE = fprop((2, 3, 19, 67), (6, 1, 3, 5), padding=((1, 2), (2, 0)), groups=3)
TRANSPOSED = dgrad((2, 10, 5, 6), (10, 9, 3, 2), padding=(1, 0), stride=(1, 2))
FLIPPED = dgrad((2, 3, 19, 67), (3, 1, 3, 5), padding=((1, 2), (2, 0)), dilation=(2, 1), groups=3)  # a forward convolution of another filter

MIXED = [  # small ones, in every dtype
    (DEPTHWISE, Single()), (DEPTHWISE, Single(THREADS=32)),
    (DEPTHWISE, Tile()), (DEPTHWISE, Tile(8, 32, 8)), (DEPTHWISE, Tile(4, 8, 1)), (DEPTHWISE, Tile(32, 32, 1)),
    (FLIPPED, Tile()), (FLIPPED, Tile(8, 32, 8)), (GENERAL, Batched(BLOCK_K=8, BLOCK_C=8)), (GENERAL, Batched(64, 2, 1)), (GENERAL, Batched(32, 3, 5)),
    (TRANSPOSED, Dgrad(BLOCK_C=8, BLOCK_K=8)), (TRANSPOSED, Dgrad(64, 1, 2)), (TRANSPOSED, Dgrad(32, 3, 5)),
    (GENERAL, Batched(64, 4, 4, SPLIT=3)), (GENERAL, Batched(32, 8, 5, SPLIT=8)), (TRANSPOSED, Dgrad(64, 3, 2, SPLIT=3)), (TRANSPOSED, Dgrad(32, 1, 4, SPLIT=20)),
    (GENERAL, GEMM), (GENERAL, Gemm(64, 64, 8, 4, 4, 1, SPLIT_K=3)), (POINTWISE, GEMM), (POINTWISE, Gemm(64, 64, 8, 4, 4, 1, SPLIT_K=4)),
    (dgrad((1, 10, 5, 6), (10, 9, 1, 2), stride=(1, 2)), Gemm(64, 64, 8, 4, 4, 1, SPLIT_K=2)), (TRANSPOSED, GEMM),
]  # fmt: skip
OPTIMISED = [  # every kernel
    (DEPTHWISE, Single(THREADS=32)), (DEPTHWISE, Tile(4, 8, 1)), (TRANSPOSED, Dgrad(64, 1, 2)), (GENERAL, Batched(64, 4, 4, SPLIT=3)), (TRANSPOSED, GEMM),
]  # fmt: skip
assert set(OPTIMISED) <= set(MIXED)
ONCE = [  # what the planner chooses from, and shapes that differ from those; large ones take seconds to compile on PoCL
    *((DEPTHWISE, tile, "float32") for tile in TILES),
    (GENERAL, Batched(256, 1, 8), "float32"), (GENERAL, Batched(BLOCK_K=4, BLOCK_C=16), "float32"), (TRANSPOSED, Dgrad(256, 8, 1), "float32"),
    *((GENERAL, gemm, "float32") for gemm in direct_gemm.GEMM_RATES), *((GENERAL, gemm, "float64") for gemm in direct_gemm.GEMM_RATES_64),
    (GENERAL, Gemm(128, 64, 8, 8, 4, 1), "float32"), (GENERAL, Gemm(32, 64, 16, 4, 8, 1), "float32"),
    (POINTWISE, max(direct_gemm.GEMM_RATES, key=direct_gemm.GEMM_RATES.get), "float16"),
    (POINTWISE, Gemm(64, 64, 8, 4, 4, 1, SPLIT_K=9), "float32"),  # more parts than there are steps: some are empty
    (dgrad((1, 10, 3, 4), (10, 9, 1, 2), stride=2), Gemm(64, 64, 8, 4, 4, 1, SPLIT_K=2), "float32"),  # phases without taps, split
]  # fmt: skip
#: All of `MIXED` in float32, and in one of the other types by turns: each type of a tile is a text of its own, and PoCL compiles for most of the test's time.
OTHERS = [dtype for dtype in DTYPES if dtype != "float32"]
TYPED = [
    (case, config, dtype) for i, (case, config) in enumerate(MIXED) for j, dtype in enumerate(("float32", *OTHERS))
    if j in (0, 1 + i % len(OTHERS)) or config == Single() or reference.all_texts
]  # fmt: skip
assert {(type(config), dtype) for _, config, dtype in TYPED} == {(type(config), dtype) for _, config in MIXED for dtype in DTYPES}
RUNS = list(dict.fromkeys(TYPED + ONCE))


ALONE = [  # transposed convolutions of a channel alone, with strides of powers of two
    dgrad((2, 3, 9, 21), (3, 1, 3, 5), groups=3, stride=2, padding=((1, 2), (2, 0)), output_padding=1, bias=False),
    dgrad((1, 2, 5, 7), (2, 1, 7, 3), groups=2, stride=(4, 2), padding=(3, 1), dilation=(1, 3)),
    dgrad((2, 2, 6, 4), (2, 1, 1, 1), groups=2, stride=(1, 4)),
    dgrad((3, 2, 31), (2, 1, 5), groups=2, stride=2, padding=2),
    dgrad((1, 1, 1, 1), (1, 1, 1, 1)),
    dgrad((2, 5, 9, 35), (5, 1, 7, 2), groups=5, padding=((3, 1), (0, 1)), bias=False),
    dgrad((1, 2, 17, 13), (2, 1, 3, 2), groups=2, dilation=(2, 5), padding=(1, 4)),
    dgrad((1, 2, 12, 12), (2, 1, 2, 3), groups=2, padding=(3, 4)),  # pad > R: the border is cropped
    dgrad((3, 2, 71), (2, 1, 5), groups=2, padding=((3, 0),)),
    dgrad((3, 12, 11), (3, 1, 11, 11), groups=3, padding=5),
]

AWKWARD = (
    [(case, config) for case in FORWARD for config in (Batched(64, 4, 2), GEMM)]
    + [(case, config) for case in TRANSPOSED_CASES for config in (Dgrad(64, 2, 4), Dgrad(32, 1, 2, SPLIT=2), GEMM)]
    + [(case, config) for case in MANY_PHASES for config in (Dgrad(64, 2, 4), GEMM, Gemm(64, 64, 8, 4, 4, 1, SPLIT_K=2))]
    + [(case, config) for case in SINGLE_CHANNEL for config in (Single(), Tile(8, 32, 2), Tile(4, 16, 2))]
    + [(case, config) for case in ALONE for config in (Tile(8, 32, 2), Tile(1, 256, 1))]
)


def _short(config) -> str:
    return type(config).__name__ + "_".join(str(v) for v in vars(config).values())


def _ids(runs):
    return [f"{_short(config)}-{case}-{'-'.join(dtype)}" for case, config, *dtype in runs]


def _plan(case, config, dtype, device) -> Plan:
    problem = case.problem(dtype)
    assert engines.refusal(problem, config, CPU) is None
    return Plan(problem, device, config=config)


@pytest.mark.parametrize(("case", "config", "dtype"), RUNS, ids=_ids(RUNS))
def test_integers_are_exact(device, case, config, dtype, request):
    if dtype == "float32" and (case, config) in OPTIMISED:  # every kernel, as users run it
        request.getfixturevalue("optimised")
    arrays = case.integers(dtype)
    plan = _plan(case, config, dtype, device)
    assert_exact(run(plan, *arrays), case.reference(*arrays), plan)


@pytest.mark.parametrize(("case", "config", "dtype"), RUNS, ids=_ids(RUNS))
def test_random_data_stays_within_the_bound_and_twice_gives_the_same_bits(device, case, config, dtype):
    arrays = case.normals(dtype)
    plan = _plan(case, config, dtype, device)
    got, ref = run(plan, *arrays), case.reference(*arrays)
    assert_close(got, ref, case.bound(*arrays, ref), plan)
    assert got.tobytes() == run(plan, *arrays).tobytes()


@pytest.mark.parametrize(("case", "config"), AWKWARD, ids=_ids(AWKWARD))
def test_awkward_shapes_are_exact(device, case, config):
    arrays = case.integers("float32", seed=1)
    plan = _plan(case, config, "float32", device)
    assert_exact(run(plan, *arrays), case.reference(*arrays), plan)


INDEX_64 = [
    (DEPTHWISE, Single()), (DEPTHWISE, Tile(8, 32, 2)), (GENERAL, Batched()), (TRANSPOSED, Dgrad()), (GENERAL, GEMM), (TRANSPOSED, GEMM),
    (POINTWISE, Gemm(64, 64, 8, 4, 4, 1, SPLIT_K=4)),
]  # fmt: skip


@pytest.mark.parametrize(("case", "config"), INDEX_64, ids=_ids(INDEX_64))
def test_64_bit_offsets_are_exact(device, case, config, monkeypatch):
    """What arrays of 2^31 elements get, on arrays that fit a laptop."""
    for engine in (direct, direct_gemm):
        monkeypatch.setattr(engine, "needs_64_bits", lambda *_: True)
    arrays = case.integers("float32")
    plan = _plan(case, config, "float32", device)
    assert plan.schedule.steps[0][0].defines["INDEX_64"] == 1
    assert_exact(run(plan, *arrays), case.reference(*arrays), plan)


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


# ---- the infinities and NaNs of the data reach the results that depend on them, and no others


@pytest.mark.parametrize(
    ("case", "config"), [(GENERAL, Batched()), (GENERAL, GEMM), (TRANSPOSED, Dgrad()), (TRANSPOSED, GEMM), (DEPTHWISE, Single())],
    ids=lambda v: _short(v) if hasattr(v, "__dataclass_fields__") and not hasattr(v, "options") else "",
)
def test_one_nan_in_the_input_reaches_its_own_results_only(device, case, config):
    x, w, b = case.integers("float32")
    w[w == 0] = 1  # a tap of 0 would make "depends on" a matter of taste
    x[0, 0, 2, 3] = np.nan
    got, ref = run(_plan(case, config, "float32", device), x, w, b), case.reference(x, w, b)
    assert np.array_equal(np.isnan(got), np.isnan(ref))
    assert np.array_equal(got[~np.isnan(ref)], ref[~np.isnan(ref)])


# ---- what a configuration refuses


REFUSED = [
    (GENERAL, Single(), "one input channel a group"),
    (GENERAL, Tile(), "one input channel a group"),
    (fprop((1, 2, 4, 4, 4), (2, 1, 3, 3, 3), groups=2), Single(), "one input channel a group and at most two spatial axes"),
    (fprop((1, 1, 1, 4, 4), (1, 1, 1, 3, 3), padding=(1, 0, 0)), Tile(), "at most two spatial axes"),
    (dgrad((1, 1, 4, 4), (1, 1, 3, 3)), Single(), "one input channel a group"),
    (GENERAL, Dgrad(), "it computes transposed convolutions"),
    (TRANSPOSED, Batched(), "it computes forward convolutions"),
    (DEPTHWISE, Tile(8, 32, 3), "ROWS must divide TILE_P"),
    (DEPTHWISE, Tile(64, 32, 1), "32 to 1024 threads"),
    (DEPTHWISE, Tile(4, 4, 1), "32 to 1024 threads"),
    (fprop((1, 1, 200, 200), (1, 1, 150, 150)), Single(), "bytes of shared memory"),
    (fprop((1, 1, 200, 200), (1, 1, 3, 3), stride=20), Tile(), "bytes of shared memory"),
    (fprop((1, 8, 64, 64), (8, 8, 50, 50)), Batched(), "bytes of shared memory"),
    (dgrad((1, 8, 4, 4), (8, 8, 50, 50)), Dgrad(), "bytes of shared memory"),
    (GENERAL, Gemm(128, 128, 64, 8, 8, 1), "bytes of shared memory"),
    (GENERAL, Gemm(64, 64, 8, 3, 4, 1), "multiple of four rows and columns"),
    (GENERAL, Gemm(66, 64, 8, 4, 4, 1), "multiple of four rows and columns"),
    (GENERAL, Gemm(32, 32, 8, 8, 8, 1), "a warp is 4 x 8 threads"),
    (GENERAL, Gemm(64, 64, 12, 4, 4, 1), "threads must fill whole rows"),
    (fprop((2**31, 1, 1, 1), (1, 1, 1, 1)), Single(), "its grid is larger"),
    (fprop((2**31, 1, 1, 1), (1, 1, 1, 1)), Tile(), "its grid is larger"),
]


@pytest.mark.parametrize(("case", "config", "reason"), REFUSED, ids=[f"{_short(c)}-{r[:24]}" for _, c, r in REFUSED])
def test_a_configuration_says_why_it_cannot(case, config, reason):
    check_refused(lambda *asked: engines.refusal(*asked, CPU), lambda *asked: engines.schedule(*asked, CPU), case.problem(), config, reason)


@pytest.mark.parametrize("case", [GENERAL, POINTWISE, DEPTHWISE, TRANSPOSED, *FORWARD, *TRANSPOSED_CASES, *MANY_PHASES, *SINGLE_CHANNEL], ids=str)
def test_the_planner_chooses_what_is_legal(case):
    for dtype in DTYPES:
        problem = case.problem(dtype)
        for backend in ("cuda", "opencl"):
            device = fake(backend, 132)
            assert engines.refusal(problem, engines.choose(problem, device), device) is None


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_depthwise_gradients_without_stride_are_tiles_and_long_single_filters_products(dtype):
    h200 = SimpleNamespace(backend="cuda", multiprocessors=132, capability=(9, 0), name="", model="")
    depthwise = ConvProblem.gradient("input", 2, (8, 96, 56, 56), (96, 1, 5, 5), (8, 96, 56, 56), padding=2, groups=96, dtype=dtype)
    assert isinstance(engines.choose(depthwise, h200), Tile)
    audio = ConvProblem.forward(1, (4, 1, 16000), (256, 1, 400), stride=160, padding=199, dtype=dtype)  # no tile holds its pixels
    assert not isinstance(engines.choose(audio, h200), Single)


def test_the_planner_has_a_kernel_for_filters_beyond_shared_memory(device):
    case = fprop((1, 2, 90, 80), (3, 2, 85, 80), padding=1)  # 6800 taps: only the matrix product takes it
    arrays = case.integers("float64")
    plan = Plan(case.problem("float64"), device)
    assert_exact(run(plan, *arrays), case.reference(*arrays), plan)


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
        for value in (np.nan, np.inf, ref[at] + 1.01 * bound[at] + EPSILON * abs(ref[at])):
            bad = ref.copy()
            bad[at] = value
            with pytest.raises(pytest.fail.Exception, match=str(at).replace("(", r"\(").replace(")", r"\)")):
                assert_close(bad, ref, bound)
            with pytest.raises(pytest.fail.Exception, match="1 of"):
                assert_exact(bad, ref)
    with pytest.raises(AssertionError, match="shape"):
        assert_exact(ref[:1], ref)


EPSILON = 2.0**-50
