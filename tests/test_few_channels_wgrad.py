"""Gradients of filters with few channels in or out, from channels-last arrays: the kernel's own text on the CPU (simt), compiled, and on a GPU."""

from __future__ import annotations

import random
from functools import cache

import pytest
import simt
from alike import check_needs_ampere, check_refused_on
from reference import assert_exact
from test_implicit_gemm import H200, NVCC, check_compiled, check_steps, torch  # noqa: F401 -- torch: a fixture
from test_wgrad_nhwc import (
    TYPES,
    Filter,
    check_bound,
    check_choices,
    check_met_only,
    check_notices,
    check_on_the_gpu,
    check_precise,
    ids_of,
    launched,
    plans_of_gradients,
    precise,
)

from pycuda_conv import Plan
from pycuda_conv.engines.mma import few_channels_wgrad as fw
from pycuda_conv.engines.mma.few_channels_wgrad import FewChannelsWgrad
from pycuda_conv.tools import families

simulated = pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))

#: First layers of one to four channels, with strides, dilation, uneven and wide padding; last layers, whose x is the dense array; channels that fill no
#: sixteen; one tap, one axis; rows narrower than a group of pixels, and wider.
CASES = [
    Filter((2, 3, 13, 21), (24, 3, 3, 3), stride=(2,), padding=(1,)), Filter((1, 1, 9, 35), (16, 1, 3, 3), padding=(1,)),
    Filter((2, 4, 20, 9), (40, 4, 5, 4), stride=(2, 3), padding=(2, 1)), Filter((1, 3, 12, 40), (8, 3, 7, 7), stride=(2,), padding=(3,)),
    Filter((2, 3, 8, 8), (72, 3, 4, 4), stride=(4,)), Filter((1, 2, 10, 18), (16, 2, 3, 3), padding=((2, 0), (0, 1)), dilation=(2,)),
    Filter((2, 16, 7, 19), (2, 16, 3, 3), padding=(1,)), Filter((1, 40, 9, 10), (3, 40, 5, 3), padding=(2, 3)), Filter((3, 24, 5, 6), (1, 24, 1, 1)),
    Filter((1, 8, 6, 9), (4, 8, 3, 2), padding=((2, 0), (0, 1)), dilation=(1, 2)), Filter((2, 1, 90), (16, 1, 10), stride=(5,), padding=(4,)),
    Filter((1, 5, 6, 17), (16, 5, 3, 3), padding=(5, 4)),
]  # fmt: skip

#: Of each number of channels and of columns; warps side by side and one after the other; one row and several; one part and several.
TILES = (
    FewChannelsWgrad(1, 2, 1, 4, 16), FewChannelsWgrad(2, 2, 2, 2, 16, 2), FewChannelsWgrad(4, 3, 8, 1, 32), FewChannelsWgrad(1, 4, 4, 8, 16, 2),
    FewChannelsWgrad(2, 4, 1, 2, 48), FewChannelsWgrad(2, 3, 1, 2, 48), FewChannelsWgrad(4, 2, 2, 3, 16),
)  # fmt: skip
RUNS = [(case, dtype, config) for case in CASES for dtype in TYPES for config in TILES if fw.refusal(case.problem(dtype).launched, config) is None]
SOME = [(case, dtype, config) for case, dtype, config in RUNS if (CASES.index(case) + TYPES.index(dtype) + TILES.index(config)) % 4 == 0]

#: float32 by three products.
TILES_FP32 = FewChannelsWgrad(1, 4, 2, 4, 16), FewChannelsWgrad(2, 3, 1, 2, 16, 2), FewChannelsWgrad(1, 2, 8, 2, 32), FewChannelsWgrad(2, 2, 4, 4, 16)
RUNS_FP32 = [(case, config) for case in CASES for config in TILES_FP32 if fw.refusal(precise(case).launched, config) is None]


@simulated
@pytest.mark.parametrize(("case", "dtype", "config"), SOME, ids=ids_of(SOME))
def test_the_kernel_computes_the_gradient(case, dtype, config):
    arrays = case.integers(dtype)
    assert_exact(simt.computed(case.problem(dtype), config, *arrays, seeds=(1 + SOME.index((case, dtype, config)) % 3,)), case.reference(*arrays), config)


@simulated
@pytest.mark.parametrize(("case", "config"), RUNS_FP32[::4], ids=str)
def test_float32(case, config):
    arrays = case.integers("float32")
    assert_exact(simt.computed(precise(case), config, *arrays), case.reference(*arrays), config)


@simulated
def test_float32_at_random():
    check_precise(lambda case, x, dy: simt.computed(precise(case), TILES_FP32[1], x, dy), Filter((2, 3, 9, 11), (24, 3, 1, 2)))


def test_every_kind_is_among_them():
    launches = [fw.schedule(case.problem(dtype).launched, config, H200).whole[0][0] for case, dtype, config in SOME]
    assert {(step.defines["M_TILES"], step.defines["N_TILES"]) for step in launches} == {(c.M_TILES, c.N_TILES) for c in TILES}
    args = [step.structs[0] for step in launches]
    assert {one.flipped for one in args} == {0, 1} and {one.warps_n for one in args} == set(fw.WARPS_N) and any(one.blocks_n > 1 for one in args)
    assert any(one.blocks_m > 1 for one in args) and any(one.tiles_q > 1 for one in args) and any(one.tiles_p > 1 for one in args)


@simulated
def test_numbers_at_random():
    check_bound(RUNS[5::40])


NOT_FINITE = (Filter((2, 3, 5, 7), (16, 3, 3, 3), padding=(1,)), Filter((2, 16, 5, 7), (3, 16, 3, 3), padding=(1,)))


@simulated
@pytest.mark.parametrize("case", NOT_FINITE, ids=str)
def test_what_is_not_finite(case):
    check_met_only(case, lambda case, x, dy: simt.computed(case.problem(), FewChannelsWgrad(1, 2, 2, 2, 16, 2), x, dy))


@simulated
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (("to[number] = word_of(", "to[number ^ 1] = word_of("), "elements differ"), (("slot ^= 1", "slot ^= 0"), "elements differ"),
        (("    __syncthreads();  // all have read it: its place is filled next\n", ""), "elements differ"),
        (("    __syncthreads();\n    if (of_warp.quotient == 0)", "    if (of_warp.quotient == 0)"), "elements differ"),
    ],
    ids=lambda v: str(v)[:40],
)  # fmt: skip
def test_a_broken_kernel_is_noticed(broken, message):
    check_notices(CASES[0], FewChannelsWgrad(1, 1, 1, 1, 16), broken, message)


# ---- what is legal, and the choice

BASE = CASES[0]


@pytest.mark.parametrize(
    ("case", "dtype", "layout", "config", "reason"),
    [
        (BASE, "float16", "NCHW", FewChannelsWgrad(), "in the layouts CHWN"), (BASE, "float64", "NHWC", FewChannelsWgrad(), "float32, float16 and bfloat16"),
        (Filter((2, 16, 9, 11), (32, 4, 3, 3), groups=4), "float16", "NHWC", FewChannelsWgrad(), "of one group"),
        (Filter((0, 3, 9, 11), (32, 3, 3, 3)), "float16", "NHWC", FewChannelsWgrad(), "nothing to compute"),
        (Filter((2, 3, 4, 4, 4), (32, 3, 3, 3, 3)), "float16", "NHWC", FewChannelsWgrad(), "two spatial axes"),
        (Filter((2, 3, 4, 4), (20, 3, 1, 1)), "float16", "NHWC", FewChannelsWgrad(), "by 16 bytes"),
        (Filter((2, 24, 4, 4), (32, 24, 1, 1)), "float16", "NHWC", FewChannelsWgrad(), "at most 16 channels"),
        (Filter((2, 32, 4, 4), (3, 32, 1, 1), stride=(2,)), "float16", "NHWC", FewChannelsWgrad(), "by 16 bytes"),
        (BASE, "float16", "NHWC", FewChannelsWgrad(3), "by M_TILES"), (BASE, "float32", "NHWC", FewChannelsWgrad(4, 4), "N_TILES must be one of"),
        (BASE, "float16", "NHWC", FewChannelsWgrad(TILE_Q=8), "multiple of 16"), (BASE, "float16", "NHWC", FewChannelsWgrad(1, 2, 1, 64, 64), "there is room for"),
        (Filter((2, 1, 99, 99), (64, 1, 1, 1)), "float16", "NHWC", FewChannelsWgrad(4, 2, 1, 16, 48), "bytes of shared memory"),
        (BASE, "float16", "NHWC", FewChannelsWgrad(1, 2, 1, 8, 16, 3), "each part"),
    ],
    ids=lambda v: str(v)[:40],
)  # fmt: skip
def test_a_configuration_says_why_it_cannot(case, dtype, layout, config, reason):
    check_refused_on(H200, case.problem(dtype, layout), config, reason)


def test_older_gpus_do_not_have_it():
    check_needs_ampere(BASE.problem(), TILES[0])


def test_the_choice_is_legal_and_its_texts_are_listed():
    """Of random first and last layers: what is chosen, and each candidate's launch."""
    r, problems = random.Random(3), []
    for _ in range(24):
        kind = r.choice((("float16", "fp32"), ("float32", "tf32"), ("float32", "fp32")))
        problems.append(families.problem(families.layer(r, r.choice(("first", "last"))), "wgrad", *kind, "NHWC").launched)
    assert check_choices(fw, H200, problems, 5, 60) > 15


def test_steps_fit_their_kernel():
    for case, dtype, config in RUNS[::19]:
        check_steps(fw.schedule(case.problem(dtype).launched, config, H200), "few_channels_wgrad")


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
def test_the_kernels_compile_and_do_not_spill():
    steps = {}
    for dtype, config in (("float16", FewChannelsWgrad(4, 3, 4, 2, 16)), ("float32", FewChannelsWgrad(4, 3, 8, 2, 16)), ("bfloat16", FewChannelsWgrad(1, 1, 1, 2, 16))):
        launch = fw.schedule(BASE.problem(dtype).launched, config, H200).whole[0][0]
        steps[launch.source()] = launch, str(config)
    for rows, columns in fw.TILES[2].items():
        config = FewChannelsWgrad(rows, columns[-1], 1, 2, 16)
        launch = fw.schedule(precise(BASE).launched, config, H200).whole[0][0]
        steps[launch.source()] = launch, str(config)
    check_compiled(steps)


# ---- on a GPU

LARGE = Filter((3, 3, 150, 130), (48, 3, 7, 7), stride=(2,), padding=(3,))
GPU_RUNS = [*RUNS, *((LARGE, dtype, config) for dtype in TYPES for config in (FewChannelsWgrad(1, 4, 8, 4, 32, 20), FewChannelsWgrad(2, 3, 8, 8, 16, 33)))]


@cache
def plans() -> dict:
    """The plans of all runs."""
    return plans_of_gradients("few channels' gradients", GPU_RUNS)


@pytest.mark.gpu
@pytest.mark.parametrize("run", GPU_RUNS, ids=ids_of(GPU_RUNS))
def test_on_the_gpu(torch, run):  # noqa: F811
    check_on_the_gpu(torch, plans()[str(run)], *run[:2])


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "config"), [*RUNS_FP32, (LARGE, FewChannelsWgrad(1, 4, 8, 4, 32, 20))], ids=str)
def test_float32_on_the_gpu(torch, case, config):  # noqa: F811
    plan = Plan(precise(case), "cuda", config=config)
    arrays = case.integers("float32")
    assert_exact(launched(torch, plan, *arrays), case.reference(*arrays), plan)
    check_precise(lambda case, x, dy: launched(torch, plan, x, dy), case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", NOT_FINITE, ids=str)
def test_what_is_not_finite_on_the_gpu(torch, case):  # noqa: F811
    check_met_only(case, lambda case, x, dy: launched(torch, Plan(case.problem(), "cuda", config=FewChannelsWgrad(1, 2, 2, 2, 16, 2)), x, dy))
