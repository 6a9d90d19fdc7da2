"""Channels-last arrays whose pixels threads copy: the kernel's own text on the CPU (simt), compiled, and, on an sm_90 GPU, its numbers."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
import simt
from alike import check_numbers_on_gpu, check_refused_on, plans_of, sharing
from reference import DTYPES, Case, assert_close, assert_exact, dgrad, fprop
from test_implicit_gemm import (
    H200,
    NVCC,
    Arrays,
    asked,
    check_compiled,
    check_not_finite,
    check_steps,
    dtype_of,
    ids_of,
    limbs_bound,
    torch,  # noqa: F401 -- a fixture
)

from pycuda_conv import Plan
from pycuda_conv.engines.hopper import gather as gn
from pycuda_conv.engines.hopper.gather import GatherNhwc
from pycuda_conv.engines.layout import transpose_filter
from pycuda_conv.tools import families

MODES = tuple(mode for mode, dtype in (("tf32 last", "float32"), ("fp16 last", "float16"), ("bf16 last", "bfloat16")) if dtype in DTYPES)

#: Copies of 16 bytes and of 4, tails of channels, rows and pixels, strides, padding, dilation, one to three axes, rows of taps that are one, gradients.
CASES = [
    fprop((2, 24, 9, 8), (40, 24, 3, 3), padding=1), fprop((2, 40, 7, 5), (9, 40, 3, 2), padding=(1, 0)), fprop((3, 16, 13, 9), (70, 16, 1, 1), stride=2),
    fprop((2, 6, 11, 17), (33, 6, 3, 5), stride=(2, 1), padding=(2, 1), dilation=(1, 2)), fprop((40, 8, 3, 3), (21, 8, 3, 3), padding=1),
    fprop((2, 16, 50), (48, 16, 5), padding=2), fprop((2, 4, 4, 6, 5), (40, 4, 3, 3, 2), padding=(1, 0, 1)), fprop((2, 3, 32, 48), (20, 3, 16, 16), stride=16),
    fprop((1, 3, 21, 28), (12, 3, 7, 7), stride=7), fprop((2, 80, 9, 7), (136, 80, 3, 3), padding=((2, 0), (0, 1)), stride=(1, 2)),
    dgrad((2, 40, 9, 8), (40, 24, 3, 3), padding=1), dgrad((2, 24, 6, 5), (24, 70, 3, 2), padding=(0, 1), dilation=(2, 1)), dgrad((2, 6, 20), (6, 16, 5), padding=2),
    dgrad((1, 16, 3, 4, 3), (16, 24, 3, 2, 3), padding=(1, 0, 1)),
]  # fmt: skip


def tiles(case: Case, mode: str) -> list[GatherNhwc]:
    """One of each kind: the small and the large, of a cluster and alone."""
    found = (GatherNhwc(64, 64, 3), GatherNhwc(128, 96, 2), GatherNhwc(64, 32, 4, 8), GatherNhwc(64, 32, 4), GatherNhwc(128, 128, 5), GatherNhwc(64, 64, 6, 4))
    return [config for config in found if gn.refusal(asked(case, mode), config) is None]


PLANNED = [(case, mode) for case in CASES for mode in MODES if gn.why_not(asked(case, mode)) is None]
#: Each with a tile: all tiles, in few texts.
SOME = sharing([[(case, mode, config) for config in tiles(case, mode)] for case, mode in PLANNED])


def copies_of(runs) -> set:
    return {(mode[:4], gn._runs(asked(case, mode)).copy) for case, mode, *_ in runs}


def test_every_kind_of_case_is_among_them():
    assert copies_of(PLANNED) == {(mode[:4], copy) for mode in MODES for copy in (16, 4)}
    assert {gn._runs(asked(case, mode)).taps != case.problem().filter_size for case, mode in PLANNED} == {True, False}


@pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
@pytest.mark.parametrize(("case", "mode", "config"), SOME, ids=ids_of(SOME))
def test_the_text_computes_the_convolution(case, mode, config):
    """Its barriers, copies, addresses and sums: exact integers, the filter in C order, kept, and channels last."""
    arrays = case.integers(dtype_of(mode))
    ref = case.reference(*arrays)
    for seed, options in ((1, {}), (2, {}), (3, {"kept": True}), (4, {"filter_last": True})):
        assert_exact(simt.computed(asked(case, mode), config, *arrays, seeds=(seed,), **options), ref, config)


@pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("  fence_for_bulk();\n", "  ;\n"), ("copies_wait<UNDER_WAY>();", ""), ("row % 8 * 16", "row % 4 * 16"), ("named_barrier(2 + threadIdx.x / 128, 128);", ""), ("ring.wait_empty(at);", ""),
        ("of_tap.rest * EACH", "of_tap.rest"), ("UNDER_WAY = STAGES < 4 ? STAGES - 2 : STAGES / 2", "UNDER_WAY = STAGES"),
    ],
)  # fmt: skip
def test_a_broken_kernel_is_noticed(text, instead):
    case, mode = fprop((3, 24, 12, 11), (40, 24, 3, 3), padding=1), "tf32 last"
    arrays = case.integers("float32")
    with pytest.raises((AssertionError, pytest.fail.Exception, simt.Wrong)):
        assert_exact(simt.computed(asked(case, mode), GatherNhwc(64, 64, 3), *arrays, seeds=range(4), broken=(text, instead)), case.reference(*arrays))


@pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
def test_numbers_at_random_and_what_is_not_finite():
    case, mode = replace(CASES[0], bias=False), "tf32 last"
    arrays = case.normals("float32", seed=1)
    ref = case.reference(*arrays)
    assert_close(simt.computed(asked(case, mode), GatherNhwc(64, 64, 3), *arrays), ref, limbs_bound(case, mode, *arrays[:2], ref))
    check_not_finite(case, mode, lambda *arrays: simt.computed(asked(case, mode), GatherNhwc(64, 64, 3), *arrays))


# ---- what is legal, and the choice

BASE = CASES[0]


@pytest.mark.parametrize(
    ("case", "mode", "config", "reason"),
    [
        (BASE, "fp16", GatherNhwc(), "in the layouts NHWC"), (BASE, "fp32 last", GatherNhwc(), "precision='tf32'"), (fprop((0, 8, 4, 4), (4, 8, 1, 1)), "fp16 last", GatherNhwc(), "nothing to compute"),
        (replace(BASE, options={"groups": 2, "padding": 1}, weight_shape=(40, 12, 3, 3)), "fp16 last", GatherNhwc(), "one group"), (fprop((2, 11, 4, 4), (4, 11, 3, 3)), "fp16 last", GatherNhwc(), "of 4 bytes"),
        (dgrad((2, 24, 5, 6), (24, 72, 3, 3), stride=2), "fp16 last", GatherNhwc(), "without stride"), (fprop((2, 8, 2**14, 2**14), (4, 8, 1, 1)), "fp16 last", GatherNhwc(), "elements and pixels"),
        (fprop((1, 8, 30, 30), (4, 8, 16, 15), padding=1), "fp16 last", GatherNhwc(), "31 taps"), (BASE, "fp16 last", GatherNhwc(96), "BLOCK_M must be one of 64, 128"), (BASE, "fp16 last", GatherNhwc(64, 160), "32, 64, 96"),
        (BASE, "fp16 last", GatherNhwc(64, 64, 4, 3), "CLUSTER must be one of 1, 2, 4, 8"), (BASE, "fp16 last", GatherNhwc(128, 128, 2, 2), "no room for the sums"), (BASE, "fp16 last", GatherNhwc(128, 128, 8), "bytes of shared memory"),
        (BASE, "fp16 last", GatherNhwc(64, 64, 1), "bytes of shared memory"),
    ],
    ids=lambda v: str(v)[:40],
)  # fmt: skip
def test_a_configuration_says_why_it_cannot(case, mode, config, reason):
    check_refused_on(H200, asked(case, mode), config, reason)


def test_the_choice_is_legal_and_its_texts_are_listed():
    """Of random layers of every family: what is chosen, and each candidate's launches."""
    listed, r, met = [*gn.variants(H200), *transpose_filter.variants()], random.Random(3), 0
    for family in ("dense 3x3", "dense 1x1", "first", "volume", "odd"):
        for _ in range(12):
            for direction, kind in (("fprop", ("float32", "tf32", "NHWC")), ("dgrad", ("bfloat16", "fp32", "NHWC"))):
                try:
                    problem = families.problem(families.layer(r, family), direction, *kind).launched
                except ValueError:
                    continue
                found = list(gn.configs(problem, H200))
                assert found or gn.choose(problem, H200) is None
                for config in found:
                    assert gn.refusal(problem, config) is None
                    for launch in (launch for step in gn.schedule(problem, config, H200).whole for launch in step):
                        assert any(launch in one for one in listed), launch.defines
                        met += 1
    assert met > 50


def test_one_launch_unless_the_filter_is_laid():
    def launches(case, mode):
        program = gn.schedule(asked(case, mode), tiles(case, mode)[0], H200)
        return [[launch.kernel for step in steps for launch in step] for steps in (program.whole, program.filter_last)]

    one, two = ["hopper_gather"], ["transpose_filter", "hopper_gather"]
    assert launches(CASES[0], "fp16 last") == [two, one]
    assert launches(CASES[2], "tf32 last") == [one, one]  # 1x1
    assert launches(CASES[8], "tf32 last") == [two, two]  # rows of 588 bytes
    assert launches(CASES[10], "bf16 last") == [two, two]


# ---- the kernel, compiled


def test_steps_fit_their_kernels():
    for case, mode in PLANNED:
        check_steps(gn.schedule(asked(case, mode), tiles(case, mode)[0], H200), "hopper_gather")


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
def test_the_planner_s_kernels_compile_and_do_not_spill():
    steps = {}
    for case, mode in ((CASES[0], "tf32 last"), (CASES[0], "fp16 last"), (CASES[3], "bf16 last"), (CASES[6], "tf32 last")):
        problem = replace(asked(case, mode), has_scale=True, has_residual=True, activation="relu")
        for config in gn.configs(problem, H200):
            for launch in (launch for step in gn.schedule(problem, config, H200).whole for launch in step):
                steps[launch.source()] = launch, f"{problem} {config}"
    check_compiled(steps, 40)  # an activation's call takes registers


# ---- on the GPU

LARGE = fprop((9, 40, 28, 28), (136, 40, 3, 3), padding=1)
RUNS = [(case, mode, config) for case, mode in PLANNED for config in tiles(case, mode)]
RUNS += [(LARGE, mode, config) for mode in MODES for config in (GatherNhwc(128, 128, 6), GatherNhwc(128, 64, 8), GatherNhwc(64, 64, 6), GatherNhwc(64, 32, 8, 8))]


@cache
def plans() -> dict:
    """The plans of all runs."""
    return plans_of("gathered", RUNS)


@pytest.mark.gpu
@pytest.mark.parametrize("run", RUNS, ids=ids_of(RUNS))
def test_on_the_gpu(torch, run):  # noqa: F811
    case, mode, _ = run
    plan = plans()[str(run)]
    check_numbers_on_gpu(torch, plan, case, mode)
    on_gpu = Arrays(torch, plan, *case.normals(dtype_of(mode), seed=2))
    found = on_gpu.launch().tobytes()
    assert found == on_gpu.launch().tobytes() == on_gpu.launch(kept=True).tobytes() == on_gpu.launch(filter_last=True).tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", [GatherNhwc(64, 64, 4), GatherNhwc(64, 32, 4, 4)], ids=str)
def test_what_is_not_finite_on_the_gpu(torch, config, mode):  # noqa: F811
    case = replace(CASES[0], bias=False)
    plan = Plan(asked(case, mode), "cuda", config=config)
    check_not_finite(case, mode, lambda *arrays: Arrays(torch, plan, *arrays).launch())
