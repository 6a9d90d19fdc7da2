"""Convolutions in TF32 of images as they lie: planning in numpy (emulator.py), the kernel compiled, and, on an sm_90 GPU, its numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import emulator
import numpy as np
import pytest
from alike import like_h200, plans_of
from hypothesis import given
from hypothesis import strategies as st
from reference import Case, assert_close, assert_exact, dgrad, fprop
from test_implicit_gemm import (
    H200,
    NVCC,
    SCENARIOS,
    Arrays,
    asked,
    bound,
    check_compiled,
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

from pycuda_conv import engines
from pycuda_conv.engines.hopper import lines
from pycuda_conv.engines.hopper.lines import Lines
from pycuda_conv.engines.hopper.pointwise import Pointwise

MODE = "tf32"

#: Tails of channels, columns, rows and units; strides, padding, dilation; few channels; one axis; transposed.
CASES = [
    fprop((3, 20, 9, 12), (70, 20, 3, 3), padding=1), fprop((2, 64, 10, 16), (64, 64, 3, 3), padding=1, bias=False), fprop((1, 8, 2, 4), (1, 8, 1, 1)),
    fprop((2, 3, 21, 24), (40, 3, 7, 7), stride=2, padding=(3, 3)), fprop((2, 5, 9, 16), (9, 5, 3, 3), padding=1), fprop((3, 1, 6, 8), (33, 1, 2, 5), padding=(1, 2)),
    fprop((5, 24, 64), (100, 24, 3), padding=1), fprop((3, 40, 40), (130, 40, 5)), fprop((2, 9, 16, 16), (20, 9, 3, 3), stride=(2, 1), padding=((1, 0), (1, 1))),
    fprop((2, 16, 12, 24), (30, 16, 3, 4), stride=(3, 2), padding=(2, 1)), fprop((2, 10, 11, 20), (17, 10, 3, 3), padding=((2, 1), (3, 1)), dilation=(1, 2)),
    fprop((2, 12, 12, 12), (8, 12, 2, 2), padding=((2, 2), (1, 1)), dilation=(3, 2)), dgrad((3, 20, 8, 12), (20, 33, 3, 3), padding=1),
    dgrad((2, 70, 32), (70, 8, 5), bias=False), dgrad((2, 12, 6, 8), (12, 9, 3, 5), padding=(0, 2)), dgrad((2, 12, 6, 8), (12, 9, 3, 3), padding=2, dilation=2),
    fprop((1, 130, 8, 8), (32, 130, 3, 3), padding=1),
]  # fmt: skip


def tiles(case: Case) -> list[Lines]:
    """Some of all kinds that are legal."""
    found: dict = {}
    for config in lines.configs(asked(case, MODE).launched, H200):
        found.setdefault((config.PIXEL_QUADS, config.CONSUMERS, config.WARP_TILE), replace(config, STAGES=2))
        found.setdefault((config.BLOCK_N, config.CHUNKS), config)
        found.setdefault((config.FP16_OPERANDS, config.WARP_TILE, config.PIXEL_QUADS), config)
        if config.W_STAGES > 2:
            found.setdefault(("ring", config.PIXEL_QUADS), replace(config, STAGES=2, W_STAGES=2))
    return list(dict.fromkeys(found.values()))


def a_tile(case: Case, half: bool = False) -> Lines:
    return next(config for config in tiles(case) if config.FP16_OPERANDS == half)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_plan_computes_the_convolution(case):
    """Every scalar and the tensor map, in numpy: exact integers, then numbers that are rounded."""
    arrays = case.integers("float32")
    ref, some = case.reference(*arrays), tiles(case)
    for config in some if len(some) < 9 else some[CASES.index(case) % 2 :: 2]:
        assert_exact(emulated(case, MODE, arrays, config), ref, config)
    arrays = case.normals("float32", seed=1)
    ref = case.reference(*arrays)
    assert_close(emulated(case, MODE, arrays, a_tile(case), keep=False), ref, limbs_bound(case, MODE, *arrays[:2], ref))


def test_every_kind_of_tile_is_among_them():
    found = {config for case in CASES for config in tiles(case)}
    assert {config.WARP_TILE for config in found} == {8, 16, 32} and {config.PIXEL_QUADS for config in found} == {1, 2}
    assert {config.CONSUMERS for config in found} == {2, 3} and {config.BLOCK_N for config in found} == {32, 64, 96, 128}
    assert {config.CHUNKS for config in found} >= {1, 2, 4} and {config.FP16_OPERANDS for config in found} == {False, True}


@pytest.mark.parametrize("multiprocessors", [1, 2, 7, 1000])
def test_every_grid(multiprocessors):
    case = CASES[0]
    arrays = case.integers("float32")
    for config in tiles(case)[::3]:
        assert_exact(emulated(case, MODE, arrays, config, multiprocessors=multiprocessors), case.reference(*arrays))


@st.composite
def requests(draw) -> tuple[Case, Lines]:
    transposed, one_axis = draw(st.booleans()), draw(st.booleans())
    read, written = draw(st.integers(1, 40)), draw(st.integers(1, 140))
    taps = draw(st.tuples(st.integers(1, 4), st.integers(1, 5)))
    stride = (1, 1) if transposed else draw(st.tuples(st.integers(1, 3), st.integers(1, 2)))
    dilation = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    reach = [(n - 1) * d for n, d in zip(taps, dilation, strict=True)]
    padding = [draw(st.integers(0, n)) for n in reach]
    size = [draw(st.integers(1, 9)), 4 * draw(st.integers(1, 10))]
    size[0] += 0 if transposed else max(0, reach[0] - 2 * padding[0])
    axes = slice(1, 2) if one_axis else slice(0, 2)
    filters = (*((read, written) if transposed else (written, read)), *taps[axes])
    options = {"stride": stride[axes], "padding": tuple(padding[axes]), "dilation": dilation[axes]}
    case = Case(transposed, (draw(st.integers(1, 3)), read, *size[axes]), filters, options, draw(st.booleans()))
    try:
        found = tiles(case)
    except ValueError:  # nothing is left of the image
        found = []
    if not found:
        return draw(requests())
    return case, draw(st.sampled_from(found))


@given(requests())
def test_any_plan_computes_the_convolution(request):
    case, config = request
    arrays = case.integers("float32")
    assert_exact(emulated(case, MODE, arrays, config), case.reference(*arrays), f"{case} {config}")


LARGER = [
    fprop((9, 64, 56, 56), (64, 64, 3, 3), padding=1), fprop((40, 64, 448), (128, 64, 3), padding=1), fprop((5, 3, 112, 112), (64, 3, 7, 7), stride=2, padding=3),
    fprop((16, 128, 28, 56), (128, 128, 3, 3), stride=2, padding=1), dgrad((7, 64, 28, 28), (64, 96, 3, 3), padding=1),
]  # fmt: skip


# ---- what is legal

THIN = fprop((4, 24, 8, 12), (40, 24, 3, 3), padding=1, bias=False)
PLAIN = fprop((3, 64, 10, 12), (136, 64, 3, 3), padding=1)
KEPT = Lines(64, 1, 8, 2, 2, 2, 1)


@pytest.mark.parametrize(
    ("case", "mode", "config", "reason"),
    [
        (PLAIN, "fp32", KEPT, "in tf32"), (PLAIN, "tf32 last", KEPT, "NCHW"), (PLAIN, "fp16", KEPT, "float32 arrays"),
        (fprop((2, 8, 6, 8), (4, 4, 3, 3), groups=2), MODE, KEPT, "one group"), (fprop((0, 8, 4, 4), (4, 8, 1, 1)), MODE, KEPT, "nothing to compute"),
        (fprop((2, 8, 3, 4, 4), (4, 8, 1, 1, 1)), MODE, KEPT, "two spatial axes"), (dgrad((2, 8, 4, 4), (8, 4, 2, 2), stride=2), MODE, KEPT, "no stride"),
        (fprop((2, 8, 6, 7), (4, 8, 3, 3), padding=1), MODE, KEPT, "16 bytes"), (fprop((2, 8, 6, 8), (4, 8, 3, 3)), MODE, KEPT, "16 bytes"),
        (fprop((2, 8, 2**14, 2**14), (4, 8, 1, 1)), MODE, KEPT, "32 bits"), (PLAIN, MODE, replace(KEPT, BLOCK_N=48), "32, 64, 96 or 128"),
        (PLAIN, MODE, replace(KEPT, BLOCK_N=128, PIXEL_QUADS=2), "128 columns in all"), (PLAIN, MODE, replace(KEPT, BLOCK_N=128, CONSUMERS=3), "64 columns and one four, three"),
        (THIN, MODE, replace(KEPT, BLOCK_N=96), "40 columns"), (PLAIN, MODE, replace(KEPT, WARP_TILE=12), "8, 16 or 32"), (fprop((2, 8, 9, 8), (64, 8, 3, 3), stride=(2, 1), padding=1), MODE, replace(KEPT, PIXEL_QUADS=2), "share rows"),
        (fprop((2, 8, 9, 32), (64, 8, 3, 13), padding=(1, 6)), MODE, KEPT, "no room"), (PLAIN, MODE, replace(KEPT, CHUNKS=0), "some eights"),
        (fprop((2, 3, 9, 8), (64, 3, 3, 3), padding=1), MODE, KEPT, "some eights"), (PLAIN, MODE, replace(KEPT, W_STAGES=1), "rings have two"),
        (PLAIN, MODE, replace(KEPT, W_STAGES=9), "rings have two"), (PLAIN, MODE, replace(KEPT, STAGES=1), "rings have two"),
        (PLAIN, MODE, replace(KEPT, STAGES=9), "bytes of shared memory"), (PLAIN, MODE, replace(KEPT, CHUNKS=4, W_STAGES=1, FP16_OPERANDS=True), "done again"),
        (fprop((2, 3, 9, 8), (64, 3, 3, 3), padding=1), MODE, replace(KEPT, CHUNKS=2, W_STAGES=1, FP16_OPERANDS=True), "in TF32"),
        (fprop((1, 2048, 4, 4), (64, 2048, 3, 3), padding=1), MODE, KEPT, "while it is laid"),
    ],
    ids=lambda v: str(v)[:60],
)  # fmt: skip
def test_a_configuration_says_why_it_cannot(case, mode, config, reason):
    check_refused(lines.refusal, lambda problem, config: engines.schedule(problem, config, H200), asked(case, mode), config, reason)


def test_other_gpus_do_not_have_it():
    for capability, backend in (((8, 0), "cuda"), ((10, 0), "cuda"), ((0, 0), "opencl")):
        assert engines.refusal(asked(PLAIN, MODE), KEPT, like_h200(capability, backend)) is not None


LAYERS = [
    fprop((128, 64, 448), (128, 64, 3), padding=1), fprop((64, 3, 224, 224), (64, 3, 7, 7), stride=2, padding=3),
    fprop((32, 64, 224, 224), (64, 64, 3, 3), padding=1), fprop((128, 128, 448), (256, 128, 3), padding=1),
]  # fmt: skip


@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_the_planner_takes_it_where_packing_is_much_of_the_time(case):
    problem = asked(case, MODE)
    found, times = lines.choose(problem, H200), {config: lines.time(problem, config, H200) for config in lines.configs(problem, H200)}
    assert found[0] == min(times.values()) == times[found[1]]
    assert isinstance(engines.choose(problem, H200), Lines) and not isinstance(engines.choose(asked(case, "fp32"), H200), Lines)


def test_it_is_not_taken_where_there_is_much_to_multiply():
    deep = fprop((64, 512, 28, 28), (512, 512, 3, 3), padding=1)
    assert not isinstance(engines.choose(asked(deep, MODE), H200), Lines)


def test_what_a_kept_filter_belongs_to():
    key = engines.filter_key
    problem, other = asked(PLAIN, MODE), asked(replace(PLAIN, input_shape=(1, 64, 20, 32)), MODE)
    assert key(problem, KEPT) == key(other, KEPT) == key(problem, replace(KEPT, BLOCK_N=128))
    swizzled, half = replace(KEPT, WARP_TILE=32), replace(KEPT, FP16_OPERANDS=True)
    assert len({key(problem, config) for config in (KEPT, swizzled, half)}) == 3 and key(problem, KEPT) != key(asked(PLAIN, "fp32"), Pointwise())


# ---- nothing is scaled, and nothing takes another path

FEW = fprop((4, 3, 8, 12), (40, 3, 3, 3), padding=1, bias=False)
#: Subnormals have fewer bits as TF32.
RANGED = [scenario for scenario in SCENARIOS if scenario != "subnormals"]


@pytest.mark.parametrize(("scenario", "half"), [(scenario, half) for i, scenario in enumerate(RANGED) for half in (False, True) if half or i % 3 == 0])
def test_every_range_is_kept(scenario, half):
    x, w = data(scenario, THIN)
    got = emulated(THIN, MODE, (x, w), a_tile(THIN, half), finite=False, keep=False)
    check_scenario(THIN, MODE, x, w, got, scenario)


#: What is not finite, and the tile.
UNUSUAL = [(THIN, False), (THIN, True), (FEW, False)]


@pytest.mark.parametrize(("case", "half"), UNUSUAL, ids=str)
def test_what_is_not_finite_reaches_its_own_results_only(case, half):
    check_not_finite(case, MODE, lambda *arrays: emulated(case, MODE, arrays, a_tile(case, half), finite=False, keep=False))


def left_out(x: np.ndarray, w: np.ndarray, config: Lines) -> int:
    """Results that the launch of fp16 numbers left out; all are right."""
    left: list[int] = []
    got = emulated(THIN, MODE, (x, w), config, keep=False, mended=left)
    ref = THIN.reference(x, w)
    assert_close(got, ref, bound(THIN, MODE, x, w, None, ref), config)
    return left[0]


def test_only_units_that_fp16_cannot_hold_are_left_to_tf32():
    config, rng = replace(a_tile(THIN, True), WARP_TILE=8, PIXEL_QUADS=1, BLOCK_N=32), np.random.default_rng(0)
    x, w = rng.standard_normal(THIN.input_shape).astype("f"), rng.standard_normal(THIN.weight_shape).astype("f")
    whole, channels = THIN.reference(x, w).size, THIN.weight_shape[0]
    assert left_out(x, w, config) == 0
    for value, few in ((1000.0, True), (1e-9, False), (1e-20, False)):  # too large; lost, which cannot be seen in results of usual size
        some = x.copy()
        some[1, 3, 2, 2] = value
        assert left_out(some, w, config) == (channels * 4 * 8 if few else 0)
    assert left_out(np.where(x > 0, x, 0), w, config) == 0
    assert left_out(x * 1e-9, w, config) == left_out(x * 1e3, w, config) == whole
    few = w.copy()
    few[7, 1] = 1e-12
    assert left_out(x, few, config) == 0  # no result of that channel is near 0
    few[7] = 0
    few[7, 0, 1, 1], few[7, 1, 0, 0] = 1, 1e-12
    assert left_out(np.where(np.arange(24)[:, None, None] > 0, x, 0), few, config) > 0


# ---- the emulator itself: a test that can't fail proves nothing


@pytest.mark.parametrize(("case", "half"), [(CASES[0], False), (CASES[0], True), (CASES[3], False)], ids=str)
def test_the_emulator_notices_a_wrong_scalar(case, half, monkeypatch):
    arrays = case.integers("float32")
    scalars = "across tiles steps images unit_rows unit_columns columns padded rows wide image_step plane low_w low_h"
    check_noticed(lines, "hopper_lines", asked(case, MODE), a_tile(case, half), arrays, scalars, -1, lambda got: assert_exact(got, case.reference(*arrays)), monkeypatch)


# ---- the kernel, compiled


def test_steps_fit_their_kernels():
    for case in CASES:
        for config in tiles(case):
            check_steps(lines.schedule(asked(case, MODE).launched, config, H200), "hopper_lines")


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
def test_the_planner_s_kernels_compile_and_spill_next_to_nothing():
    steps = {}
    for case in (*LAYERS, *LARGER, *CASES[::4]):
        plain = asked(case, MODE).launched
        for problem in (plain, replace(plain, has_scale=True, has_residual=True, activation="relu")):
            for config in (emulator.fastest(lines, plain, H200)[1], *tiles(case)[:2]):
                for step in (step for stage in lines.schedule(problem, config, H200).whole for step in stage):
                    steps[step.source()] = step, f"{problem} {config}"
    check_compiled(steps, 48)


# ---- on the GPU

RUNS = [(case, MODE, config) for case in (*CASES, *LARGER) for config in tiles(case)[::2]]


@cache
def plans() -> dict:
    """The plans of all runs."""
    runs = [*RUNS, *((case, MODE, a_tile(case, half)) for case, half in UNUSUAL)]
    return plans_of("lines", runs)


@pytest.mark.gpu
@pytest.mark.parametrize("run", RUNS, ids=ids_of(RUNS))
def test_on_the_gpu(torch, run):  # noqa: F811
    check_on_gpu(torch, plans()[str(run)], *run[:2])


@pytest.mark.gpu
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("scenario", RANGED)
def test_every_range_is_kept_on_the_gpu(torch, scenario, half):  # noqa: F811
    x, w = data(scenario, THIN)
    got = Arrays(torch, plans()[str((THIN, MODE, a_tile(THIN, half)))], x, w).launch()
    check_scenario(THIN, MODE, x, w, got, scenario)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "half"), UNUSUAL, ids=str)
def test_what_is_not_finite_on_the_gpu(torch, case, half):  # noqa: F811
    plan = plans()[str((case, MODE, a_tile(case, half)))]
    check_not_finite(case, MODE, lambda *arrays: Arrays(torch, plan, *arrays).launch())
