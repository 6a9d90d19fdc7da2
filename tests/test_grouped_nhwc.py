"""Grouped convolutions of channels-last arrays on tensor cores: the kernel's own text on the CPU (simt), compiled, and on a GPU."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import simt
from alike import check_needs_ampere, check_numbers_on_gpu, check_refused_on, plans_of
from reference import ACTIVATIONS, DTYPES, Case, activated, assert_close, assert_exact, dgrad, fprop
from test_implicit_gemm import (
    H200,
    NVCC,
    Arrays,
    asked,
    bound,
    check_compiled,
    check_not_finite,
    check_steps,
    dtype_of,
    ids_of,
    torch,  # noqa: F401 -- a fixture
)

from pycuda_conv import ConvProblem, Plan, engines
from pycuda_conv.engines.mma import grouped_nhwc as gn
from pycuda_conv.engines.mma.grouped_nhwc import GroupedNhwc
from pycuda_conv.runtime.target import Target
from pycuda_conv.tools import families

MODES = tuple(mode for mode, dtype in (("fp16 last", "float16"), ("bf16 last", "bfloat16"), ("tf32 last", "float32")) if dtype in DTYPES)
simulated = pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))

#: 2 to 64 channels a group; groups that fill no unit, and units that fill no block; groups that begin between multiples of 16 bytes; other numbers
#: of channels in than out; strides, dilation, uneven and wide padding; small images, one axis, 1x1; one group.
FORWARD = [
    fprop((2, 32, 9, 11), (32, 4, 3, 3), padding=1, groups=8), fprop((1, 40, 7, 6), (40, 2, 3, 3), padding=1, groups=20),
    fprop((2, 40, 13, 10), (40, 8, 3, 3), padding=1, stride=2, groups=5), fprop((1, 48, 9, 8), (48, 16, 3, 3), padding=2, dilation=2, groups=3),
    fprop((1, 72, 8, 9), (72, 24, 3, 3), padding=1, groups=3), fprop((1, 96, 6, 7), (96, 48, 3, 3), padding=(1, 2), groups=2, bias=False),
    fprop((1, 64, 9, 8), (64, 32, 5, 5), padding=2, stride=(2, 1), groups=2), fprop((1, 128, 5, 5), (128, 64, 3, 3), padding=1, groups=2),
    fprop((2, 32, 7, 9), (16, 8, 3, 3), padding=((2, 0), (0, 1)), groups=4), fprop((1, 16, 8, 8), (48, 4, 3, 2), padding=1, groups=4),
    fprop((1, 24, 6, 6), (24, 3, 3, 3), padding=1, groups=8), fprop((2, 24, 5, 9), (24, 12, 3, 3), padding=1, groups=2),
    fprop((3, 32, 50), (32, 4, 5), padding=2, groups=8), fprop((2, 48, 33), (24, 12, 3), stride=2, groups=4),
    fprop((2, 48, 5, 6), (72, 8, 1, 1), groups=6), fprop((3, 32, 9, 7), (32, 16, 1, 1), stride=2, groups=2),
    fprop((9, 32, 3, 3), (32, 8, 3, 3), padding=1, groups=4), fprop((1, 16, 2, 3), (16, 4, 3, 3), padding=(5, 4), groups=4),
    fprop((1, 16, 21, 36), (16, 8, 3, 3), padding=1, stride=2, groups=2), fprop((4, 32, 3), (32, 8, 3), padding=1, groups=4),
    fprop((2, 16, 7, 9), (32, 8, 3, 3), padding=1, stride=(3, 2), groups=2), fprop((1, 144, 4, 5), (240, 48, 1, 1), groups=3),
    fprop((2, 16, 9, 11), (24, 16, 3, 3), padding=1), fprop((1, 24, 6, 13), (4, 24, 5, 5), stride=2, padding=2),
]
BACKWARD = [
    dgrad((2, 32, 9, 11), (32, 4, 3, 3), padding=1, groups=8), dgrad((1, 40, 7, 6), (40, 2, 3, 3), padding=1, groups=20),
    dgrad((2, 40, 7, 5), (40, 8, 3, 3), padding=1, stride=2, output_padding=1, groups=5), dgrad((1, 48, 5, 6), (48, 16, 1, 1), stride=2, groups=3),
    dgrad((1, 48, 9, 8), (48, 16, 3, 3), padding=2, dilation=2, groups=3), dgrad((1, 72, 6, 5), (72, 24, 3, 3), padding=1, groups=3),
    dgrad((1, 32, 4, 5), (32, 8, 4, 3), stride=3, padding=1, groups=2), dgrad((2, 32, 20), (32, 8, 5), stride=2, padding=2, groups=4),
    dgrad((2, 16, 7, 9), (16, 8, 3, 3), padding=((2, 0), (0, 1)), groups=4), dgrad((1, 48, 8, 8), (48, 4, 3, 2), padding=1, groups=4),
    dgrad((1, 16, 5, 6), (16, 4, 3, 3), stride=2, dilation=3, groups=4), dgrad((1, 64, 6, 7), (64, 32, 3, 3), stride=(2, 1), padding=1, groups=2),
    dgrad((2, 16, 9, 8), (16, 4, 3, 3), padding=(4, 3), groups=4, bias=False), dgrad((1, 24, 5, 6), (24, 16, 3, 3), stride=2, padding=1),
    dgrad((3, 16, 1, 7), (16, 8, 3, 3), stride=2, padding=1, groups=2), dgrad((5, 16, 1, 4), (16, 4, 1, 2), stride=2, dilation=3, groups=4),
]  # fmt: skip

#: Tiles of one row group and of several, of one unit and of more than there may be, of several images, narrower and wider than a product.
TILES = (GroupedNhwc(2, 1, 8, 11), GroupedNhwc(1, 1, 4, 5), GroupedNhwc(4, 2, 4, 7), GroupedNhwc(2, 3, 12, 3), GroupedNhwc(1, 1, 8, 32))
PLANNED = [(case, mode) for case in (*FORWARD, *BACKWARD) for mode in MODES if gn.why_not(asked(case, mode)) is None]
#: Each case in a mode, by turns.
SOME = [run for i, case in enumerate((*FORWARD, *BACKWARD)) if (runs := [run for run in PLANNED if run[0] is case]) for run in [runs[i % len(runs)]]]


def tiles(case: Case, mode: str) -> list[GroupedNhwc]:
    return [config for config in TILES if gn.refusal(asked(case, mode), config) is None]


def computed(case: Case, mode: str, config: GroupedNhwc, arrays, **options) -> np.ndarray:
    return simt.computed(asked(case, mode), config, *arrays, **options)


@simulated
@pytest.mark.parametrize(("case", "mode"), SOME, ids=[f"{mode}-{case}" for case, mode in SOME])
def test_the_kernel_computes_the_convolution(case, mode):
    """Exact integers, with the filter in either order; numbers at random within the bound of an honest sum; the same bits from all tiles."""
    number, found, arrays = PLANNED.index((case, mode)), tiles(case, mode), case.integers(dtype_of(mode))
    one, other = (found[i % len(found)] for i in (number, number + 1))
    assert_exact(computed(case, mode, one, arrays, seeds=(1, 2)), case.reference(*arrays), one)
    assert_exact(computed(case, mode, other, arrays, seeds=(3,), filter_last=True), case.reference(*arrays), other)
    arrays = case.normals(dtype_of(mode), seed=1)
    ref, got = case.reference(*arrays), computed(case, mode, one, arrays, seeds=(1,), multiprocessors=1)
    assert_close(got, ref, bound(case, mode, *arrays, ref), one)
    assert got.tobytes() == computed(case, mode, other, arrays, seeds=(1,), multiprocessors=100).tobytes()


def test_every_kind_of_case_is_among_them():
    launches = [
        (launch.defines, phase) for case, mode in PLANNED for step in gn.schedule(asked(case, mode), tiles(case, mode)[0], H200).whole
        for launch in step for phase in launch.structs
    ]  # fmt: skip
    defines = {tuple(d[name] for name in ("TYPE", "TAPS_R", "STRIDE_H", "PHASES")) for d, _ in launches}
    assert {kinds[1:] for kinds in defines} == {(3, 1, 1), (3, 2, 1), (1, 1, 1), (1, 1, 4)} and len({kind for kind, *_ in defines}) == len(MODES)
    phases = [phase for _, phase in launches]
    assert {phase.steps for phase in phases} >= {1, 2, 3, 4} and {phase.mixed for phase in phases} == {0, 1}
    assert any(phase.units_group > 1 for phase in phases) and any(phase.unit_groups > 1 for phase in phases) and any(phase.taps == 0 for phase in phases)


# ---- what is not finite stays in its group

NOT_FINITE = [
    fprop((2, 32, 6, 7), (32, 4, 3, 3), padding=1, groups=8, bias=False), fprop((2, 24, 6, 7), (24, 12, 3, 3), padding=1, groups=2, bias=False),
    fprop((2, 32, 6, 7), (32, 16, 3, 3), padding=1, groups=2, bias=False), dgrad((2, 32, 6, 7), (32, 2, 3, 3), padding=1, groups=16, bias=False),
    dgrad((2, 32, 5, 4), (32, 4, 3, 3), padding=1, stride=2, groups=8, bias=False),
]  # fmt: skip


@simulated
@pytest.mark.parametrize(("case", "mode"), [(case, MODES[i % len(MODES)]) for i, case in enumerate(NOT_FINITE)], ids=str)
def test_what_is_not_finite_reaches_its_own_results_only(case, mode):
    check_not_finite(case, mode, lambda *arrays: computed(case, mode, GroupedNhwc(2, 1, 8, 7), arrays, seeds=(1,)))


@simulated
def test_the_test_of_what_is_not_finite_can_fail():
    never = ("if (shape.mixed &&", "if (false &&")
    with pytest.raises(AssertionError, match="NaNs, expected"):
        check_not_finite(NOT_FINITE[0], MODES[0], lambda *arrays: computed(NOT_FINITE[0], MODES[0], GroupedNhwc(2, 1, 8, 7), arrays, seeds=(1,), broken=never))


# ---- what finishes a sum


def finished(case: Case, mode: str, activation, scale: bool = True, residual: bool = True):
    """A problem, its arrays, small integers, and its result in float64."""
    case = replace(case, bias=True)
    problem = replace(asked(case, mode), has_scale=scale, has_residual=residual, activation=activation)
    rng, dtype, k = np.random.default_rng(1), dtype_of(mode), (case.channels,)
    x, w, b, s, r = (rng.integers(-3, 4, shape).astype(dtype) for shape in (case.input_shape, case.weight_shape, k, k, problem.result_shape))
    each = (-1, *(1,) * case.ndim)
    ref = case.reference(x, w) * (s.astype(float).reshape(each) if scale else 1) + b.astype(float).reshape(each)
    ref = activated(ref + r.astype(float) if residual else ref, activation)
    return problem, (x, w, b, s if scale else None, r if residual else None), ref


FINISHED = [(case, mode, TILES[0]) for case in (FORWARD[0], FORWARD[11], BACKWARD[2]) for mode in MODES if (case, mode) in PLANNED]


@simulated
@pytest.mark.parametrize(("case", "mode", "config"), FINISHED, ids=ids_of(FINISHED))
def test_the_epilogue(case, mode, config):
    for scale, residual in ((True, True), (False, True), (True, False)):
        problem, arrays, ref = finished(case, mode, "relu", scale, residual)
        assert_exact(simt.computed(problem, config, *arrays, seeds=(1, 2)), ref)


@simulated
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations(activation):
    problem, arrays, ref = finished(FORWARD[0], "tf32 last", activation)
    assert_close(simt.computed(problem, TILES[0], *arrays, seeds=(1,)), ref, 2.0**-20 * np.abs(ref) + 2.0**-20)


# ---- the tests of the kernel notice what breaks it


@simulated
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (("copies_wait<1>();", "copies_wait<2>();"), "elements differ"), (("slot ^= 1", "slot ^= 0"), "elements differ"),
        (("    __syncthreads();  // all have read it: its place is filled next\n", ""), "elements differ"),
        (("q >= (int)shape.q) continue;", "q > (int)shape.q) continue;"), "writes .* bytes at .* of buffer 3, which has"),
    ],
    ids=lambda v: str(v)[:40],
)  # fmt: skip
def test_a_broken_kernel_is_noticed(broken, message):
    case = FORWARD[0]
    arrays = case.integers("float16")
    with pytest.raises((AssertionError, pytest.fail.Exception), match=message):
        for seed in range(8):
            got = computed(case, "fp16 last", GroupedNhwc(1, 1, 4, 5), arrays, seeds=(seed,), multiprocessors=1, broken=broken)
            assert_exact(got, case.reference(*arrays))


# ---- what is legal, and the choice

BASE = FORWARD[0]


@pytest.mark.parametrize(
    ("case", "mode", "config", "reason"),
    [
        (BASE, "fp16", GroupedNhwc(), "in the layouts NHWC"), (BASE, "fp32 last", GroupedNhwc(), "precision='tf32'"),
        (fprop((0, 32, 4, 4), (32, 4, 1, 1), groups=8), "fp16 last", GroupedNhwc(), "nothing to compute"),
        (fprop((2, 32, 4, 4, 4), (32, 4, 1, 1, 1), groups=8), "fp16 last", GroupedNhwc(), "two spatial axes"),
        (fprop((2, 20, 4, 4), (20, 4, 1, 1), groups=5), "fp16 last", GroupedNhwc(), "by 16 bytes"),
        (fprop((2, 16, 4, 4), (6, 8, 1, 1), groups=2), "fp16 last", GroupedNhwc(), "four channels at once"),
        (fprop((2, 24, 4, 4), (54, 8, 1, 1), groups=3), "fp16 last", GroupedNhwc(), "four channels at once"),
        (fprop((2, 400, 4, 4), (16, 200, 1, 1), groups=2), "fp16 last", GroupedNhwc(), "at most 128 channels"),
        (fprop((2, 16, 2**15, 2**15), (16, 8, 1, 1), groups=2), "fp16 last", GroupedNhwc(), "32 bits"),
        (BASE, "fp16 last", GroupedNhwc(TILE_P=6), "multiple of 4"), (BASE, "fp16 last", GroupedNhwc(3), "UNITS must be one of"),
        (fprop((2, 480, 4, 4), (16, 120, 1, 1), groups=4), "fp16 last", GroupedNhwc(4), "up to 512 bytes"),
        (BASE, "fp16 last", GroupedNhwc(4, 8, 16, 64), "bytes of shared memory"),
        (fprop((2**21, 1024, 10, 10), (1024, 2, 3, 3), padding=1, groups=512), "fp16 last", GroupedNhwc(1, 1, 4, 1), "larger than"),
    ],
    ids=lambda v: str(v)[:40],
)  # fmt: skip
def test_a_configuration_says_why_it_cannot(case, mode, config, reason):
    check_refused_on(H200, asked(case, mode), config, reason)


def test_older_gpus_do_not_have_it():
    check_needs_ampere(asked(BASE, "fp16 last"), TILES[0])


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_80"])
def test_the_choice_is_legal_and_its_texts_are_listed(architecture):
    """Of random grouped layers: what is chosen, and each candidate's launches; a planner that is asked seldom has fewer than a hundred."""
    device, r, met = Target(architecture), random.Random(3), 0
    listed = list(gn.variants(device))
    for _ in range(12):
        layer = families.layer(r, "grouped")
        for direction, kind in (("fprop", ("float16", "fp32", "NHWC")), ("dgrad", ("bfloat16", "fp32", "NHWC")), ("fprop", ("float32", "tf32", "NHWC"))):
            problem = families.problem(layer, direction, *kind).launched
            found = list(gn.configs(problem, device))
            assert len(found) == len(set(found)) < 100
            for config in found[::5]:
                assert gn.refusal(problem, config) is None and 0 < gn.time(problem, config, device) < 1e6
                launches = [launch for step in gn.schedule(problem, config, device).whole for launch in step]
                assert all(any(launch in family for family in listed) for launch in launches)
            chosen = gn.choose(problem, device)
            assert (chosen is None) == (not found) and (chosen is None or chosen[1] in found)
            met += bool(found)
    assert met > 25
    assert sum(len(list(family)) for family in listed) < 40


def test_the_planner_chooses_it_where_groups_are_small():
    for channels, size, groups in ((128, 56, 32), (256, 28, 32), (512, 14, 32), (240, 28, 30)):
        shape = (32, channels, size, size)
        for make in (ConvProblem.forward, ConvProblem.transposed):
            problem = make(2, shape, (channels, channels // groups, 3, 3), padding=1, groups=groups, dtype="float16", layout="NHWC")
            assert isinstance(engines.choose(problem, H200), GroupedNhwc), problem


def test_the_planner_compares_it_where_a_single_group_is_small():
    for c, k, compared in ((16, 16, True), (32, 32, True), (128, 16, True), (32, 4, False), (64, 48, False)):
        problem = ConvProblem.forward(2, (8, c, 64, 64), (k, c, 3, 3), padding=1, dtype="float16", layout="NHWC")
        assert (next(gn.configs(problem, H200), None) is not None) == compared and gn.refusal(problem, GroupedNhwc(1, 1, 4, 8)) is None


def test_steps_fit_their_kernels():
    for case, mode in PLANNED[::4]:
        check_steps(gn.schedule(asked(case, mode), tiles(case, mode)[0], H200), "grouped_nhwc")


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
def test_the_kernels_compile_and_do_not_spill():
    steps = {}
    for case, mode in PLANNED:
        problem = asked(case, mode)
        for step in gn.schedule(problem, tiles(case, mode)[0], H200).whole:
            for launch in step:
                steps[launch.source()] = launch, str(problem)
    assert len(steps) == len(MODES) * 4
    check_compiled(steps)


# ---- on a GPU

RUNS = [(case, mode, config) for case, mode in PLANNED for config in tiles(case, mode)[:3]]
LARGE = fprop((9, 256, 28, 30), (256, 8, 3, 3), padding=1, groups=32)
RUNS += [(case, mode, config) for case in (LARGE, replace(LARGE, transposed=True)) for mode in MODES for config in (GroupedNhwc(2, 1, 4, 30), GroupedNhwc(4, 1, 4, 15))]


@cache
def plans() -> dict:
    """The plans of all runs."""
    return plans_of("grouped", RUNS)


@pytest.mark.gpu
@pytest.mark.parametrize("run", RUNS, ids=ids_of(RUNS))
def test_on_the_gpu(torch, run):  # noqa: F811
    case, mode, _ = run
    plan = plans()[str(run)]
    check_numbers_on_gpu(torch, plan, case, mode)
    on_gpu = Arrays(torch, plan, *case.normals(dtype_of(mode), seed=2))
    found = on_gpu.launch().tobytes()
    assert found == on_gpu.launch().tobytes() == on_gpu.launch(filter_last=True).tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "mode"), [(case, mode) for case in NOT_FINITE for mode in MODES], ids=str)
def test_what_is_not_finite_on_the_gpu(torch, case, mode):  # noqa: F811
    plan = Plan(asked(case, mode), "cuda", config=GroupedNhwc(2, 1, 8, 7))
    check_not_finite(case, mode, lambda *arrays: Arrays(torch, plan, *arrays).launch())


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "mode", "config"), FINISHED, ids=ids_of(FINISHED))
def test_the_epilogue_on_the_gpu(torch, case, mode, config):  # noqa: F811
    problem, arrays, ref = finished(case, mode, "relu")
    assert_exact(Arrays(torch, Plan(problem, "cuda", config=config), *arrays).launch(), ref)
