"""Gradients of grouped filters from channels-last arrays on tensor cores: the kernel's own text on the CPU (simt), compiled, and on a GPU."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
import simt
from alike import check_needs_ampere, check_refused_on
from reference import assert_exact
from test_implicit_gemm import H200, NVCC, check_compiled, check_steps, torch  # noqa: F401 -- torch: a fixture
from test_wgrad_nhwc import TYPES, Filter, check_bound, check_choices, check_notices, check_on_the_gpu, ids_of, launched, plans_of_gradients

from pycuda_conv import Plan, engines
from pycuda_conv.engines.mma import grouped_nhwc_wgrad as gw
from pycuda_conv.engines.mma.grouped_nhwc_wgrad import GroupedWgrad
from pycuda_conv.runtime.target import Target
from pycuda_conv.tools import families

simulated = pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))

#: 2 to 64 channels a group; groups that fill no unit, and units that fill no block; other numbers of channels in than out; strides, dilation, uneven and
#: wide padding; filters of one tap, fewer than nine and more; small images, one axis, one group.
CASES = [
    Filter((2, 32, 9, 11), (32, 4, 3, 3), padding=(1,), groups=8), Filter((1, 40, 7, 6), (40, 2, 3, 3), padding=(1,), groups=20),
    Filter((2, 40, 13, 10), (40, 8, 3, 3), stride=(2,), padding=(1,), groups=5), Filter((1, 48, 9, 8), (48, 16, 3, 3), padding=(2,), dilation=(2,), groups=3),
    Filter((1, 72, 8, 9), (72, 24, 3, 3), padding=(1,), groups=3), Filter((1, 96, 6, 7), (96, 48, 3, 3), padding=(1, 2), groups=2),
    Filter((1, 64, 9, 8), (64, 32, 5, 5), stride=(2, 1), padding=(2,), groups=2), Filter((1, 128, 5, 5), (128, 64, 3, 3), padding=(1,), groups=2),
    Filter((2, 32, 7, 9), (16, 8, 3, 3), padding=((2, 0), (0, 1)), groups=4), Filter((1, 32, 8, 8), (64, 8, 3, 2), padding=(1,), groups=4),
    Filter((1, 24, 6, 6), (64, 3, 3, 3), padding=(1,), groups=8), Filter((3, 32, 50), (32, 4, 5), padding=(2,), groups=8),
    Filter((2, 48, 5, 6), (48, 8, 1, 1), groups=6), Filter((3, 32, 9, 7), (32, 16, 1, 1), stride=(2,), groups=2),
    Filter((9, 32, 3, 3), (32, 8, 3, 3), padding=(1,), groups=4), Filter((1, 16, 2, 3), (16, 4, 3, 3), padding=(5, 4), groups=4),
    Filter((1, 16, 9, 36), (16, 8, 4, 5), padding=(1,), stride=(3, 2), groups=2), Filter((2, 56, 6, 5), (112, 4, 3, 3), padding=(1,), groups=14),
    Filter((2, 16, 9, 11), (24, 16, 3, 3), padding=(1,)),
]  # fmt: skip

#: Tiles of one row and of several, of several images, narrower and wider than a product; one part and several.
TILES = (
    GroupedWgrad(2, 1, 4, 11), GroupedWgrad(1, 1, 3, 5, 2), GroupedWgrad(4, 2, 2, 7), GroupedWgrad(2, 3, 9, 3, 3), GroupedWgrad(1, 1, 1, 32, 2),
    GroupedWgrad(8, 1, 2, 6),
)  # fmt: skip
RUNS = [(case, dtype, config) for case in CASES for dtype in TYPES for config in TILES if gw.refusal(case.problem(dtype).launched, config) is None]


#: Each case with every tile, in one of both types.
SOME = [(case, dtype, config) for case, dtype, config in RUNS if (CASES.index(case) + TYPES.index(dtype) + TILES.index(config)) % len(TYPES) == 0]


@simulated
@pytest.mark.parametrize(("case", "dtype", "config"), SOME, ids=ids_of(SOME))
def test_the_kernel_computes_the_gradient(case, dtype, config):
    arrays, turn = case.integers(dtype), SOME.index((case, dtype, config))
    seeds = (1 + turn % 3,) if turn % 4 else (1, 2)
    assert_exact(simt.computed(case.problem(dtype), config, *arrays, seeds=seeds), case.reference(*arrays), config)


def test_every_kind_is_among_them():
    launches = [step for case, dtype, config in RUNS for steps in gw.schedule(case.problem(dtype).launched, config, H200).whole for step in steps]
    listed = {tuple(sorted(d.items())) for family in gw.variants(H200) for d in family}
    assert {tuple(sorted(step.defines.items())) for step in launches if step.kernel == "grouped_nhwc_wgrad"} == listed
    args = [struct for step in launches for struct in step.structs if step.kernel == "grouped_nhwc_wgrad"]
    for name, least in (("steps", {1, 2, 3, 4}), ("beside", {1, 2, 4}), ("tap_blocks", {1, 3}), ("unit_groups", {1, 2, 4})):
        assert {getattr(one, name) for one in args} >= least, name


@simulated
def test_numbers_at_random():
    check_bound(RUNS[1::7])


def check_not_finite(run) -> None:
    """Such numbers reach the results that they are part of, and no others, of their own group."""
    case = Filter((2, 32, 5, 7), (32, 4, 3, 3), padding=(1,), groups=8)
    x, dy = case.integers("float16", seed=1)
    clean, ones = run(case, x, dy), np.ones_like(dy)
    assert_exact(clean, case.reference(x, dy))
    for value in (np.inf, -np.inf, np.nan):
        bad = x.copy()
        bad[1, 5, 0, 6] = value  # in the last column of the first row: the last row of taps and the first column never meet it
        got, met = run(case, bad, ones), ~np.isfinite(case.reference(bad, ones))
        assert np.array_equal(~np.isfinite(got), met) and met[4:8, 1].any() and not np.delete(met, range(4, 8), 0).any() and not met[:, :, 2].any()
        bad = dy.copy()
        bad[0, 3, 4, 6] = value
        got = run(case, x, bad)
        assert not np.isfinite(got[3]).any() and np.array_equal(np.delete(got, 3, 0), np.delete(clean, 3, 0))


@simulated
@pytest.mark.parametrize("config", [GroupedWgrad(2, 1, 4, 7), GroupedWgrad(1, 1, 2, 4, 3)], ids=str)
def test_what_is_not_finite(config):
    check_not_finite(lambda case, x, dy: simt.computed(case.problem(), config, x, dy))


@simulated
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (("copies_wait<1>();", "copies_wait<2>();"), "elements differ"), (("slot ^= 1", "slot ^= 0"), "elements differ"),
        (("    __syncthreads();  // all have read it: its place is filled next\n", ""), "elements differ"), (("there ? from_y : zeros", "from_y"), "elements differ"),
        (("  for (int other = 1; other < (int)arg.beside; ++other) {\n    __syncthreads();\n", "  for (int other = 1; other < (int)arg.beside; ++other) {\n"), "elements differ"),
    ],
    ids=lambda v: str(v)[:40],
)  # fmt: skip
def test_a_broken_kernel_is_noticed(broken, message):
    check_notices(CASES[0], GroupedWgrad(1, 1, 3, 5), broken, message)


# ---- what is legal, and the choice

BASE = CASES[0]


@pytest.mark.parametrize(
    ("case", "dtype", "layout", "config", "reason"),
    [
        (BASE, "float16", "NCHW", GroupedWgrad(), "in the layouts CHWN"), (BASE, "float32", "NHWC", GroupedWgrad(), "float16 and bfloat16"),
        (Filter((0, 32, 9, 11), (32, 4, 3, 3), groups=8), "float16", "NHWC", GroupedWgrad(), "nothing to compute"),
        (Filter((2, 32, 4, 4, 4), (32, 4, 1, 1, 1), groups=8), "float16", "NHWC", GroupedWgrad(), "two spatial axes"),
        (Filter((2, 24, 4, 4), (24, 12, 1, 1), groups=2), "float16", "NHWC", GroupedWgrad(), "by 16 bytes"),
        (Filter((2, 20, 4, 4), (40, 4, 1, 1), groups=5), "float16", "NHWC", GroupedWgrad(), "by 16 bytes"),
        (Filter((2, 400, 4, 4), (16, 200, 1, 1), groups=2), "float16", "NHWC", GroupedWgrad(), "at most 128 channels"),
        (BASE, "float16", "NHWC", GroupedWgrad(3), "UNITS must be one of"), (CASES[7], "float16", "NHWC", GroupedWgrad(4), "8 steps together"),
        (BASE, "float16", "NHWC", GroupedWgrad(4, 8, 16, 64), "bytes of shared memory"), (BASE, "float16", "NHWC", GroupedWgrad(1, 2, 9, 11, 2), "each part"),
    ],
    ids=lambda v: str(v)[:40],
)  # fmt: skip
def test_a_configuration_says_why_it_cannot(case, dtype, layout, config, reason):
    check_refused_on(H200, case.problem(dtype, layout), config, reason)


def test_older_gpus_do_not_have_it():
    check_needs_ampere(BASE.problem(), TILES[0])


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_80"])
def test_the_choice_is_legal_and_its_texts_are_listed(architecture):
    """Of random grouped layers: what is chosen, and each candidate's launches."""
    r = random.Random(3)
    problems = [families.problem(families.layer(r, "grouped"), "wgrad", r.choice(("float16", "bfloat16")), "fp32", "NHWC").launched for _ in range(16)]
    assert check_choices(gw, Target(architecture), problems, 7, 250) > 12


def test_the_planner_chooses_it_where_groups_are_small():
    for channels, size, groups in ((64, 56, 32), (32, 112, 16), (8, 112, 4)):
        case = Filter((32, channels, size, size), (channels, channels // groups, 3, 3), padding=(1,), groups=groups)
        assert isinstance(engines.choose(case.problem(), H200), GroupedWgrad), case


def test_steps_fit_their_kernels():
    for case, dtype, config in RUNS[::9]:
        check_steps(gw.schedule(case.problem(dtype).launched, config, H200), "grouped_nhwc_wgrad")


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
def test_the_kernels_compile_and_do_not_spill():
    steps = {}
    for case, dtype, config in RUNS:
        for launch in (launch for step in gw.schedule(case.problem(dtype).launched, config, H200).whole for launch in step):
            if launch.kernel == "grouped_nhwc_wgrad":
                steps[launch.source()] = launch, str(case)
    assert len(steps) == 8
    check_compiled(steps)


# ---- on a GPU

LARGE = Filter((9, 256, 28, 30), (256, 8, 3, 3), padding=(1,), groups=32)
GPU_RUNS = [*RUNS, *((LARGE, dtype, config) for dtype in TYPES if dtype != "float32" for config in (GroupedWgrad(2, 1, 4, 30, 20), GroupedWgrad(4, 1, 4, 15, 33)))]


@cache
def plans() -> dict:
    """The plans of all runs."""
    return plans_of_gradients("grouped gradients", GPU_RUNS)


@pytest.mark.gpu
@pytest.mark.parametrize("run", GPU_RUNS, ids=ids_of(GPU_RUNS))
def test_on_the_gpu(torch, run):  # noqa: F811
    check_on_the_gpu(torch, plans()[str(run)], *run[:2])


@pytest.mark.gpu
@pytest.mark.parametrize("config", [GroupedWgrad(2, 1, 4, 7), GroupedWgrad(1, 1, 2, 4, 3)], ids=str)
def test_what_is_not_finite_on_the_gpu(torch, config):  # noqa: F811
    check_not_finite(lambda case, x, dy: launched(torch, Plan(case.problem(), "cuda", config=config), x, dy))
