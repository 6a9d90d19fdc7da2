"""1x1 convolutions in TF32: their planning in numpy (emulator.py), their kernel compiled, and, on an sm_90 GPU, their numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import emulator
import numpy as np
import pytest
from alike import like_h200, plans_of
from hypothesis import given
from hypothesis import strategies as st
from reference import EPS, TINY, Case, assert_close, assert_exact, dgrad, fprop
from test_implicit_gemm import (
    H200,
    NVCC,
    SCENARIOS,
    Arrays,
    asked,
    bound,
    check_compiled,
    check_moments,
    check_not_finite,
    check_noticed,
    check_on_gpu,
    check_scenario,
    check_steps,
    data,
    emulated,
    ids_of,
    limbs_bound,
    torch,  # noqa: F401 -- a fixture
)
from test_kernels import check_refused

from pycuda_conv import ConvProblem, Plan, engines
from pycuda_conv.engines.hopper import pointwise as pw
from pycuda_conv.engines.hopper.gemm import ImplicitGemm
from pycuda_conv.engines.hopper.pointwise import Pointwise

MODES = ("fp32", "fp32 last", "tf32", "tf32 last")

#: Tails of rows, columns and k, whole tiles, one axis and three, few and many images.
CASES = [
    fprop((3, 100, 5, 16), (70, 100, 1, 1)), fprop((2, 36, 12, 12), (200, 36, 1, 1), bias=False), fprop((1, 4, 2, 2), (1, 4, 1, 1)), fprop((40, 8, 4), (9, 8, 1)),
    fprop((2, 20, 3, 4, 5), (33, 20, 1, 1, 1)), dgrad((3, 72, 4, 8), (72, 70, 1, 1)), dgrad((2, 64, 9, 12), (64, 96, 1, 1), bias=False),
    fprop((1, 32, 16, 32), (64, 32, 1, 1)), fprop((20, 4, 8), (12, 20, 1, 1)), fprop((2, 64, 8, 8), (8, 64, 1, 1), dilation=3),
]  # fmt: skip


def tiles(case: Case, mode: str) -> list[Pointwise]:
    """All that are legal, with few stages."""
    shapes = (Pointwise(columns, blocks, 3, RAW_FILTER=raw) for raw in (False, True) for columns in (32, 64, 96, 128) for blocks in (1, 2))
    return [config for config in shapes if pw.refusal(asked(case, mode), config) is None]


PLANNED = [(case, mode) for case in CASES for mode in MODES if tiles(case, mode)]
IDS = [f"{mode}-{case}" for case, mode in PLANNED]


#: What limbs lose of a product: some of each factor, and the product of what is second in both.
BITS = 20.6


@pytest.mark.parametrize(("case", "mode"), PLANNED, ids=IDS)
def test_the_plan_computes_the_convolution(case, mode):
    """Every scalar and tensor map, in numpy: exact integers, then numbers that need both limbs."""
    arrays = case.integers("float32")
    ref = case.reference(*arrays)
    found = tiles(case, mode)
    for config in found if len(found) < 3 else found[PLANNED.index((case, mode)) % 3 :: 2]:
        assert_exact(emulated(case, mode, arrays, config), ref, config)
    arrays = case.normals("float32", seed=1)
    ref = case.reference(*arrays)
    for config in found[::3]:
        assert_close(emulated(case, mode, arrays, config, keep=False), ref, limbs_bound(case, mode, *arrays[:2], ref, BITS), config)


def test_every_kind_of_case_is_among_them():
    assert {mode for _, mode in PLANNED} == set(MODES) and {case.transposed for case, _ in PLANNED} == {True, False}
    assert {config.BLOCKS for case, mode in PLANNED for config in tiles(case, mode)} == {1, 2}


@pytest.mark.parametrize("multiprocessors", [1, 7, 1000])
def test_every_grid(multiprocessors):
    case = fprop((9, 40, 6, 10), (100, 40, 1, 1))
    arrays = case.integers("float32")
    for mode in ("fp32", "tf32 last"):
        got = emulated(case, mode, arrays, Pointwise(32), multiprocessors=multiprocessors)
        assert_exact(got, case.reference(*arrays))


@given(st.integers(1, 5000), st.integers(1, 40), st.integers(1, 200))
def test_a_tile_has_no_more_boxes_than_its_round_of_tiles_needs(boxes, across, multiprocessors):
    busy, rounds = pw._busy(boxes, across, multiprocessors, True), math.ceil(across * math.ceil(boxes / 8) / multiprocessors)
    assert 1 <= busy <= 8 and across * math.ceil(boxes / busy) <= rounds * multiprocessors
    assert busy == 1 or across * math.ceil(boxes / (busy - 1)) > rounds * multiprocessors
    assert pw._busy(boxes, across, multiprocessors, False) == (busy if rounds == 1 else 8)


@pytest.mark.parametrize(("case", "mode"), [(case, mode) for case, mode in PLANNED if not case.transposed and case.problem().batched], ids=str)
def test_moments_are_noted(case, mode):
    for arrays in (case.integers("float32"), case.normals("float32", seed=1)):
        check_moments(asked(case, mode), tiles(case, mode)[0], arrays)


@st.composite
def requests(draw) -> tuple[Case, str, Pointwise]:
    transposed, mode = draw(st.booleans()), draw(st.sampled_from(MODES))
    read, written, columns = draw(st.integers(1, 80)), draw(st.integers(1, 140)), draw(st.integers(1, 20))
    if "last" in mode:  # rows of 16 bytes
        read *= 4
    else:
        columns *= 4
    size = (*(draw(st.integers(1, 9)) for _ in range(draw(st.integers(0, 2)))), columns)
    filters = ((read, written) if transposed else (written, read)) + (1,) * len(size)
    case = Case(transposed, (draw(st.integers(1, 9)), read, *size), filters, {}, draw(st.booleans()))
    return case, mode, draw(st.sampled_from(tiles(case, mode)))


@given(requests())
def test_any_plan_computes_the_convolution(request):
    case, mode, config = request
    arrays = case.integers("float32")
    assert_exact(emulated(case, mode, arrays, config), case.reference(*arrays), f"{asked(case, mode)} {config}")


# ---- the gradient of the filter

FILTERS = [((3, 20, 4, 5), 40), ((2, 130, 6, 6), 70), ((5, 33, 8), 9), ((1, 4, 2, 2), 1), ((40, 64, 4, 8), 64), ((2, 8, 2, 4, 5), 300)]  # (input, output channels)


def filters_problem(x_shape, k: int, precision: str) -> ConvProblem:
    n, c, *size = x_shape
    return ConvProblem.gradient("weight", len(size), x_shape, (k, c, *(1 for _ in size)), (n, k, *size), precision=precision)


def filters_arrays(x_shape, k: int, make) -> tuple[np.ndarray, np.ndarray]:
    n, _, *size = x_shape
    return make(x_shape).astype("f"), make((n, k, *size)).astype("f")


def filters_gradient(x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    n, c, k = len(x), x.shape[1], dy.shape[1]
    found = np.einsum("nkp,ncp->kc", dy.reshape(n, k, -1).astype(float), x.reshape(n, c, -1).astype(float))
    return found.reshape(k, c, *(1 for _ in x.shape[2:]))


FILTER_TILES = [Pointwise(64, 2, 3, 1), Pointwise(32, 1, 3, 3), Pointwise(64, 1, 4, 5, True), Pointwise(96, 1, 3, 40, True), Pointwise(32, 2, 3, 2, True), Pointwise(128, 1, 3, 2)]


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize(("x_shape", "k"), FILTERS, ids=str)
def test_the_plan_computes_the_gradient_by_the_filter(x_shape, k, precision):
    problem, rng = filters_problem(x_shape, k, precision).launched, np.random.default_rng(0)
    for config in FILTER_TILES:
        assert pw.refusal(problem, config) is None
        x, dy = filters_arrays(x_shape, k, lambda shape: rng.integers(-8, 9, shape))
        assert_exact(emulator.emulate(problem, config, x, dy), filters_gradient(x, dy), config)
    x, dy = filters_arrays(x_shape, k, rng.standard_normal)
    ref = filters_gradient(x, dy)
    allowed = (2.0**-9.9 if precision == "tf32" else 2.0**-BITS) * filters_gradient(np.abs(x), np.abs(dy)) + 3 * EPS["float32"] * np.abs(ref)
    assert_close(emulator.emulate(problem, FILTER_TILES[0], x, dy), ref, allowed)


# ---- what is legal, and the choice

POINT = fprop((3, 64, 10, 12), (136, 64, 1, 1))


@pytest.mark.parametrize(
    ("case", "mode", "config", "reason"),
    [
        (fprop((2, 8, 6, 6), (4, 8, 3, 3)), "fp32", Pointwise(), "1x1 filters"), (fprop((2, 8, 6, 6), (4, 8, 1, 1), stride=2), "fp32", Pointwise(), "without stride"),
        (fprop((2, 8, 6, 6), (4, 8, 1, 1), padding=1), "tf32", Pointwise(), "without stride and padding"), (fprop((2, 8, 6, 6), (4, 4, 1, 1), groups=2), "fp32", Pointwise(), "one group"),
        (POINT, "fp16", Pointwise(), "float32 arrays"), (fprop((2, 8, 5, 5), (4, 8, 1, 1)), "fp32", Pointwise(), "multiple of 16 bytes"),
        (fprop((2, 6, 4, 4), (4, 6, 1, 1)), "fp32 last", Pointwise(), "multiple of 16 bytes"), (fprop((0, 8, 4, 4), (4, 8, 1, 1)), "fp32", Pointwise(), "nothing to compute"),
        (fprop((2, 8, 2**14, 2**14), (4, 8, 1, 1)), "fp32", Pointwise(), "32 bits"), (POINT, "fp32", Pointwise(128), "128 columns in all"), (POINT, "tf32", Pointwise(160), "BLOCK_N must be one of 32, 64, 96, 128"),
        (POINT, "fp32 last", Pointwise(64, 3), "BLOCKS must be one of 1, 2"), (POINT, "fp32", Pointwise(64, 1), "four neighbouring pixels"), (POINT, "fp32", Pointwise(64, 2, 4, 2), "swapped or split"),
        (POINT, "tf32 last", Pointwise(64, 2, 4, 1, True), "swapped or split"), (POINT, "fp32", Pointwise(64, 2, 5), "bytes of shared memory"), (POINT, "fp32", Pointwise(64, 2, 1), "bytes of shared"),
        (POINT, "fp32", Pointwise(64, 2, 4, 0), "at least one split"), (dgrad((2, 8, 4, 4), (8, 4, 1, 1), stride=2), "fp32", Pointwise(), "1x1 filters"),
        (POINT, "tf32", Pointwise(RAW_FILTER=True), "split as they are loaded"), (dgrad((2, 8, 4, 4), (8, 4, 1, 1)), "fp32", Pointwise(RAW_FILTER=True), "split as they are loaded"),
        (fprop((2, 6, 4, 4), (4, 6, 1, 1)), "fp32", Pointwise(RAW_FILTER=True), "split as they are loaded"),
    ],
    ids=lambda v: str(v)[:40],
)  # fmt: skip
def test_a_configuration_says_why_it_cannot(case, mode, config, reason):
    check_refused(pw.refusal, lambda problem, config: engines.schedule(problem, config, H200), asked(case, mode), config, reason)


def test_other_gpus_do_not_have_it():
    for capability, backend in (((8, 0), "cuda"), ((10, 0), "cuda"), ((0, 0), "opencl")):
        device = like_h200(capability, backend)
        assert engines.refusal(asked(POINT, "fp32"), Pointwise(), device) is not None
        assert not isinstance(engines.choose(asked(fprop((64, 256, 56, 56), (64, 256, 1, 1)), "fp32"), device), Pointwise)


LAYERS = [((64, 256, 56, 56), 64), ((64, 64, 56, 56), 256), ((64, 512, 28, 28), 128)]


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize(("x_shape", "k"), LAYERS, ids=str)
def test_the_planner_takes_it_where_there_is_much_to_read(x_shape, k, precision):
    n, c, *size = x_shape
    w_shape, y_shape = (k, c, 1, 1), (n, k, *size)
    for problem in (
        ConvProblem.forward(2, x_shape, w_shape, precision=precision), ConvProblem.gradient("input", 2, x_shape, w_shape, y_shape, precision=precision),
        ConvProblem.gradient("weight", 2, x_shape, w_shape, y_shape, precision=precision),
    ):  # fmt: skip
        launched = problem.launched
        if launched.result_channels < 256 or precision == "tf32":  # more of fp32 are as fast by hopper/gemm.cu
            assert isinstance(engines.choose(problem, H200), Pointwise)
        found, times = pw.choose(launched, H200), {config: pw.time(launched, config, H200) for config in pw.configs(launched, H200)}
        assert found[0] == min(times.values()) == times[found[1]] and all(pw.refusal(launched, config) is None for config in times)


def test_it_is_not_taken_where_there_is_much_to_multiply():
    deep = fprop((64, 2048, 32, 32), (2048, 2048, 1, 1))
    assert isinstance(engines.choose(asked(deep, "fp32"), H200), ImplicitGemm)
    assert engines.filter_key(asked(deep, "fp32"), Pointwise()) != engines.filter_key(asked(deep, "fp32"), ImplicitGemm())
    assert engines.filter_key(asked(deep, "fp32"), Pointwise()) == engines.filter_key(asked(replace(deep, input_shape=(1, 2048, 8, 8)), "fp32"), Pointwise(32, 2, 3))
    assert engines.filter_key(asked(deep, "fp32"), Pointwise()) != engines.filter_key(asked(deep, "tf32"), Pointwise())


# ---- how far the limbs reach: nothing is scaled, and nothing takes another path

THIN = fprop((4, 64, 10, 8), (40, 64, 1, 1), bias=False)
#: Subnormals have fewer bits as TF32.
RANGED = [scenario for scenario in SCENARIOS if scenario != "subnormals"]


@pytest.mark.parametrize(("scenario", "mode"), [(scenario, mode) for i, scenario in enumerate(RANGED) for mode in MODES[i % 2 :: 2]])
def test_every_range_is_kept(scenario, mode):
    x, w = data(scenario, THIN)
    got = emulated(THIN, mode, (x, w), Pointwise(32), finite=False, keep=False)
    check_scenario(THIN, mode, x, w, got, scenario)


def subnormal_bound(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """What is lost of a subnormal: half a unit of the second limb, 2^-137 / 512."""
    lost = 2.0**-145 * THIN.reference((np.abs(x) < 2.0**-126).astype("f"), np.abs(w))
    return lost + bound(THIN, "fp32", x, w, None, THIN.reference(x, w)) + THIN.depth * TINY["float32"]


@pytest.mark.parametrize("mode", ["fp32", "fp32 last"])
def test_subnormals_keep_what_there_is_of_them(mode):
    x, w = data("subnormals", THIN)
    for filters in (w, w * np.float32(1e20)):
        got = emulated(THIN, mode, (x, filters), Pointwise(64), keep=False)
        assert_close(got, THIN.reference(x, filters), subnormal_bound(x, filters))


@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_finite_reaches_its_own_results_only(mode):
    case = fprop((2, 40, 5, 8), (34, 40, 1, 1), bias=False)
    check_not_finite(case, mode, lambda *arrays: emulated(case, mode, arrays, Pointwise(64), finite=False, keep=False))


# ---- the emulator itself: a test that can't fail proves nothing


@pytest.mark.parametrize(
    ("case", "mode", "scalars"),
    [
        (fprop((7, 70, 6, 10), (100, 70, 1, 1)), "fp32", "across down steps each rows columns boxes plane row_step column_step"),
        (fprop((7, 70, 6, 10), (100, 70, 1, 1)), "tf32", "busy"),
        (fprop((7, 72, 6, 10), (100, 72, 1, 1)), "tf32 last", "across down steps each rows columns row_step column_step"),
        (None, "fp32", "across down steps each rows columns boxes row_step column_step size"),
    ],
    ids=["NCHW", "NCHW, one product", "NHWC", "gradient"],
)
def test_the_emulator_notices_a_wrong_scalar(case, mode, scalars, monkeypatch):
    if case is None:
        problem, rng, config = filters_problem((3, 130, 6, 10), 300, "fp32").launched, np.random.default_rng(0), Pointwise(64, 1, 3, 2)
        arrays = filters_arrays((3, 130, 6, 10), 300, lambda shape: rng.integers(-8, 9, shape))
        ref = filters_gradient(*arrays)
    else:
        problem, config, arrays = asked(case, mode), Pointwise(32), case.integers("float32")
        ref = case.reference(*arrays)
    check_noticed(pw, "hopper_pointwise", problem, config, arrays, scalars, -1, lambda got: assert_exact(got, ref), monkeypatch)


# ---- the kernel, compiled


def test_steps_fit_their_kernels():
    for case, mode in PLANNED[:8]:
        check_steps(pw.schedule(asked(case, mode), tiles(case, mode)[0], H200), "hopper_pointwise")
    check_steps(pw.schedule(filters_problem((2, 20, 8, 8), 30, "tf32").launched, Pointwise(32, 1, 3, 2), H200), "hopper_pointwise")


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
def test_the_planner_s_kernels_compile_and_do_not_spill():
    steps = {}
    for mode in MODES:
        widest = Pointwise(128 if "tf32" in mode else 64, 2, 3)
        raw = replace(widest, RAW_FILTER="tf32" not in mode)
        for step in (step for stage in pw.schedule(asked(POINT, mode), raw, H200).whole for step in stage):
            steps[step.source()] = step, f"{POINT} {raw}"
        for problem in (asked(POINT, mode), replace(asked(POINT, mode), has_scale=True, has_residual=True, activation="relu")):
            for program in (pw.schedule(problem, widest, H200), pw.schedule(problem, widest, H200, True)):
                for step in (step for stage in program.whole for step in stage):
                    steps[step.source()] = step, f"{problem} {widest}"
    for precision, config in (("fp32", Pointwise(64, 2, 4, 2)), ("fp32", Pointwise(128, 1, 4, 2, True)), ("tf32", Pointwise(128, 2, 4, 2)), ("tf32", Pointwise(64, 1, 4, 2, True))):
        for step in (step for stage in pw.schedule(filters_problem((2, 64, 8, 8), 64, precision).launched, config, H200).whole for step in stage):
            if step.kernel != "direct_reduce":
                steps[step.source()] = step, f"gradient {config}"
    check_compiled(steps, 24)  # six words a stage, beside a residual


# ---- on the GPU

RUNS = [(case, mode, replace(config, STAGES=stages)) for case, mode in PLANNED for config in tiles(case, mode) for stages in (2, 3)][::2]
RUNS += [(fprop((9, 192, 28, 28), (256, 192, 1, 1)), mode, config) for mode in MODES for config in (Pointwise(), Pointwise(32, 2, 5))]
RUNS += [(fprop((9, 192, 28, 28), (256, 192, 1, 1)), mode, Pointwise(128, 2, 4)) for mode in ("tf32", "tf32 last")]
RUNS += [(fprop((20, 40, 56, 56), (64, 40, 1, 1)), mode, Pointwise()) for mode in ("fp32", "tf32")]  # more boxes than multiprocessors


@cache
def plans() -> dict:
    """The plans of all runs."""
    runs = [*RUNS, *((THIN, mode, Pointwise()) for mode in MODES)]
    return plans_of("1x1 layers", runs)


@pytest.mark.gpu
@pytest.mark.parametrize("run", RUNS, ids=ids_of(RUNS))
def test_on_the_gpu(torch, run):  # noqa: F811
    check_on_gpu(torch, plans()[str(run)], *run[:2])


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("config", FILTER_TILES, ids=str)
@pytest.mark.parametrize(("x_shape", "k"), FILTERS, ids=str)
def test_the_gradient_by_the_filter_on_the_gpu(torch, x_shape, k, config, precision):  # noqa: F811
    plan, rng = Plan(filters_problem(x_shape, k, precision), "cuda", config=config), np.random.default_rng(1)
    x, dy = filters_arrays(x_shape, k, lambda shape: rng.integers(-8, 9, shape))
    assert_exact(Arrays(torch, plan, x, dy).launch(), filters_gradient(x, dy), plan)
    x, dy = filters_arrays(x_shape, k, rng.standard_normal)
    ref, magnitude = filters_gradient(x, dy), filters_gradient(np.abs(x), np.abs(dy))
    allowed = (2.0**-20.6 + 2.0**-22 * math.sqrt(x.size / x.shape[1]) + (2.0**-9.9 if precision == "tf32" else 0)) * magnitude + EPS["float32"] * np.abs(ref)
    on_gpu = Arrays(torch, plan, x, dy)
    got = on_gpu.launch()
    assert_close(got, ref, allowed, plan)
    assert got.tobytes() == on_gpu.launch().tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scenario", RANGED)
def test_every_range_is_kept_on_the_gpu(torch, scenario, mode):  # noqa: F811
    x, w = data(scenario, THIN)
    got = Arrays(torch, plans()[str((THIN, mode, Pointwise()))], x, w).launch()
    check_scenario(THIN, mode, x, w, got, scenario)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fp32", "fp32 last"])
def test_subnormals_on_the_gpu(torch, mode):  # noqa: F811
    x, w = data("subnormals", THIN)
    for filters in (w, w * np.float32(1e20)):
        got = Arrays(torch, plans()[str((THIN, mode, Pointwise()))], x, filters).launch()
        assert_close(got, THIN.reference(x, filters), subnormal_bound(x, filters))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_finite_on_the_gpu(torch, mode):  # noqa: F811
    case = replace(CASES[0], bias=False)
    plan = Plan(asked(case, mode), "cuda", config=Pointwise())
    check_not_finite(case, mode, lambda *arrays: Arrays(torch, plan, *arrays).launch())


@pytest.mark.gpu
@pytest.mark.parametrize("value", [np.inf, np.nan, 1e30, 1e-30, 3.4e38])
@pytest.mark.parametrize("where", [0, 1])
def test_any_number_in_a_gradient_on_the_gpu(torch, where, value):  # noqa: F811
    """It reaches the sums of its own channel, and no others."""
    x_shape, k = (3, 20, 4, 5), 40
    plan, rng = Plan(filters_problem(x_shape, k, "fp32"), "cuda", config=Pointwise(32, 1, 3, 3)), np.random.default_rng(1)
    arrays = filters_arrays(x_shape, k, lambda shape: 0.5 * rng.uniform(-1, 1, shape))
    clean = Arrays(torch, plan, *arrays).launch()
    arrays[where][2, 7, 1, 2] = value
    got = Arrays(torch, plan, *arrays).launch()
    with np.errstate(invalid="ignore"):
        ref, magnitude = filters_gradient(*arrays), filters_gradient(*map(np.abs, arrays))
    assert np.array_equal(np.isfinite(got), np.isfinite(ref)) and np.array_equal(np.isnan(got), np.isnan(ref))
    finite = np.isfinite(ref)
    assert_close(np.where(finite, got, 0), np.where(finite, ref, 0), np.where(finite, 2.0**-19 * magnitude, 0), plan)
    others = np.arange(20 if where == 0 else k) != 7
    assert np.take(got, np.flatnonzero(others), 1 - where).tobytes() == np.take(clean, np.flatnonzero(others), 1 - where).tobytes()
