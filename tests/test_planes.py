"""1x1 filters of 16-bit NCHW arrays as they lie: the kernel's own text on the CPU (simt), compiled, and, on an sm_90 GPU, its numbers."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
import simt
from alike import check_choices_of_planes, check_epilogue, check_integers, check_numbers_on_gpu, check_refused_on, plans_of
from reference import DTYPES, assert_exact, dgrad, fprop
from test_implicit_gemm import H200, NVCC, asked, check_compiled, check_not_finite, check_steps, ids_of, torch  # noqa: F401 -- torch: a fixture

from pycuda_conv import ConvProblem, engines
from pycuda_conv.engines.hopper import planes as pn
from pycuda_conv.engines.hopper.gemm import ImplicitGemm
from pycuda_conv.engines.hopper.planes import Planes
from pycuda_conv.tools import families

MODES = tuple(mode for mode, dtype in (("fp16", "float16"), ("bf16", "bfloat16")) if dtype in DTYPES)
simulated = pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))

#: Tails of channels and pixels, several tiles and stages, gradients, one to three axes.
CASES = [
    fprop((3, 72, 10, 12), (136, 72, 1, 1)), fprop((2, 8, 24), (64, 8, 1)), dgrad((2, 40, 12, 20), (40, 72, 1, 1)), dgrad((2, 200, 4, 6, 8), (200, 16, 1, 1, 1)),
    fprop((5, 264, 8, 9), (20, 264, 1, 1)), dgrad((1, 72, 15, 24), (72, 208, 1, 1)),
]  # fmt: skip
WIDEST = [pn._max_stages_of(*tile) for tile in pn.TILES]
TILES = [replace(config, STAGES=min(stages, config.STAGES)) for config, stages in zip(WIDEST, (2, 3, 5, 3, 2, 2), strict=True)]
SOME = [(case, MODES[i % len(MODES)], TILES[(i + more) % len(TILES)]) for i, case in enumerate(CASES) for more in (0, 3)]


def test_every_tile_is_among_them():
    assert {config for _, _, config in SOME} == set(TILES) and {(c.BLOCK_M, c.BLOCK_N) for c in TILES} == set(pn.TILES)


@simulated
@pytest.mark.parametrize(("case", "mode", "config"), SOME, ids=ids_of(SOME))
def test_the_text_computes_the_convolution(case, mode, config):
    check_integers(case, mode, config)


@simulated
def test_what_finishes_a_sum():
    check_epilogue(CASES[0], "fp16", Planes(64, 64, 3), activations=("gelu", "relu6"))


@simulated
@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("ring.wait_full(at);", ""), ("wgmma_wait<0>();\n#pragma", "#pragma"), ("fence_for_bulk();", ""),
        ("named_barrier(1 + consumer, 128);  // all of them", "//"), ("(of.x_blocks + of.w_blocks) * BLOCK", "(X_BLOCKS + W_BLOCKS) * BLOCK"),
    ],
)  # fmt: skip
def test_the_machine_notices(text, instead):
    case = fprop((3, 72, 10, 12), (72, 72, 1, 1))
    arrays = case.integers("float16")
    with pytest.raises(AssertionError):
        assert_exact(simt.computed(asked(case, "fp16"), Planes(64, 256, 2), *arrays, seeds=(1, 2), broken=(text, instead), multiprocessors=2), case.reference(*arrays))


@simulated
def test_what_is_not_finite():
    case = fprop((3, 24, 8, 9), (16, 24, 1, 1))
    check_not_finite(case, "fp16", lambda *arrays: simt.computed(asked(case, "fp16"), Planes(64, 64, 3), *arrays, seeds=(1,)))


# ---- what is legal, and the choice

BASE = CASES[0]


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (asked(BASE, "tf32"), Planes(), "float16 and bfloat16"), (asked(BASE, "fp16 last"), Planes(), "in the layouts NCHW, not in NHWC"), (asked(fprop((0, 8, 8, 8), (8, 8, 1, 1)), "fp16"), Planes(), "nothing to compute"),
        (asked(fprop((2, 8, 8, 8), (8, 8, 3, 3), padding=1), "fp16"), Planes(), "1x1 filters without"), (asked(fprop((2, 8, 8, 8), (8, 8, 1, 1), stride=2), "fp16"), Planes(), "1x1 filters without"),
        (asked(fprop((2, 8, 7, 7), (8, 8, 1, 1)), "fp16"), Planes(), "multiple of 16 bytes"), (asked(fprop((2, 12, 8, 8), (8, 12, 1, 1)), "fp16"), Planes(), "multiple of 16 bytes"),
        (asked(fprop((2, 16, 8, 8), (8, 8, 1, 1), groups=2), "fp16"), Planes(), "of one group"), (asked(fprop((2, 2**14, 256, 256), (8, 2**14, 1, 1)), "fp16"), Planes(), "32 bits"),
        (asked(BASE, "fp16"), Planes(128, 256), "(BLOCK_M, BLOCK_N) must be one of"), (asked(BASE, "fp16"), Planes(128, 192, 5), "bytes of shared memory"), (asked(BASE, "fp16"), Planes(64, 64, 1), "bytes of shared memory"),
    ],
    ids=lambda v: str(v)[:50],
)  # fmt: skip
def test_a_configuration_says_why_it_cannot(problem, config, reason):
    check_refused_on(H200, problem, config, reason)


def test_the_choice_is_legal_and_its_texts_are_listed():
    r = random.Random(3)
    check_choices_of_planes(pn, [families.problem(families.layer(r, "dense 1x1"), r.choice(("fprop", "dgrad")), r.choice(("float16", "bfloat16")), "fp32", "NCHW") for _ in range(30)])


def test_odd_numbers_of_channels_are_another_kernel_s():
    """Whose rows of a filter TMA can't load, so images and filter are packed: ``hopper/gemm.cu``."""
    problem = ConvProblem.forward(2, (2, 410, 80, 80), (71, 410, 1, 1), dtype="bfloat16")
    assert pn.why_not(problem) is not None and isinstance(engines.choose(problem, H200), ImplicitGemm)


def test_steps_fit_their_kernel():
    check_steps(pn.schedule(asked(BASE, "fp16"), TILES[0], H200), "hopper_planes")


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
def test_the_planner_s_kernels_compile_and_do_not_spill():
    steps, large = {}, {}
    for i, config in enumerate(WIDEST):
        for case in (CASES[0], CASES[2])[i % 2 :][:1] if config.BLOCK_M == 64 else (CASES[0], CASES[2]):
            ((launch,),) = pn.schedule(asked(case, MODES[i % len(MODES)]), config, H200).whole
            (large if config.BLOCK_M == 256 else steps)[launch.source()] = launch, str(config)
    check_compiled(steps)
    check_compiled(large, 160)  # activations beyond ReLU beside 128 sums, in the text of all layers


# ---- on the GPU

LARGE = [fprop((9, 192, 28, 28), (256, 192, 1, 1)), dgrad((9, 320, 40, 40), (320, 136, 1, 1))]
RUNS = [(case, mode, config) for case in (*CASES, *LARGE) for mode in MODES for config in WIDEST]


@cache
def plans() -> dict:
    return plans_of("planes", RUNS)


@pytest.mark.gpu
@pytest.mark.parametrize("run", RUNS, ids=ids_of(RUNS))
def test_on_the_gpu(torch, run):  # noqa: F811
    check_numbers_on_gpu(torch, plans()[str(run)], *run[:2])
