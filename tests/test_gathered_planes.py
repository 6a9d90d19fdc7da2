"""1x1 filters of NCHW arrays with planes of any size and with strides: the kernel's own text on the CPU (simt), compiled, and, on an sm_90 GPU, its numbers."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
import simt
from alike import check_choices_of_planes, check_epilogue, check_integers, check_numbers_on_gpu, check_refused_on, plans_of
from reference import DTYPES, assert_exact, dgrad, fprop
from test_implicit_gemm import H200, NVCC, asked, check_compiled, check_not_finite, check_steps, dtype_of, ids_of, torch  # noqa: F401 -- torch: a fixture

from pycuda_conv.engines.hopper import gathered_planes as gp
from pycuda_conv.engines.hopper.gathered_planes import GatheredPlanes
from pycuda_conv.tools import families

MODES = ("tf32", *(mode for mode, dtype in (("fp16", "float16"), ("bf16", "bfloat16")) if dtype in DTYPES))
simulated = pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))

#: Tails of channels and pixels, several tiles and stages, tiles of several images, strides, padding, gradients, one to three axes.
CASES = [
    fprop((3, 72, 7, 7), (136, 72, 1, 1)), dgrad((2, 40, 5, 7), (40, 72, 1, 1)), fprop((2, 136, 9, 7), (64, 136, 1, 1), stride=2),
    fprop((2, 8, 25), (72, 8, 1), padding=2), dgrad((2, 136, 3, 5, 2), (136, 200, 1, 1, 1)), fprop((1, 264, 3, 5, 6), (24, 264, 1, 1, 1), stride=(2, 1, 2)),
    dgrad((2, 16, 4, 5), (16, 24, 1, 1), stride=2, padding=1), dgrad((1, 8, 3, 4), (8, 72, 1, 1), stride=(2, 3)), dgrad((1, 24, 2, 3, 2), (24, 8, 1, 1, 1), stride=(1, 2, 3)),
]  # fmt: skip
EVERY = [gp._max_stages_of(*tile, *share) for tile, shares in gp.TILES.items() for share in shares]
TILES = [replace(config, STAGES=stages) for config, stages in zip(EVERY, (8, 3, 4, 4, 2, 3, 6, 4, 4, 3), strict=True)]
SOME = [(case, MODES[(i + more) % len(MODES)], TILES[(i + 6 * more) % len(TILES)]) for more in (0, 1) for i, case in enumerate(CASES[: 4 if more else None])]


def test_every_tile_is_among_them():
    assert {config for _, _, config in SOME} == set(TILES)


@simulated
@pytest.mark.parametrize(("case", "mode", "config"), SOME, ids=ids_of(SOME))
def test_the_text_computes_the_convolution(case, mode, config):
    check_integers(case, mode, config, (1,))


@simulated
@pytest.mark.parametrize(("case", "mode"), [(fprop((3, 72, 2, 7), (8, 72, 1, 1)), "tf32"), (dgrad((3, 72, 2, 7), (72, 16, 1, 1)), "tf32"), (fprop((3, 72, 2, 7), (8, 72, 1, 1)), "fp16")], ids=str)
def test_pairs_of_pixels(case, mode):
    arrays, config = case.integers(dtype_of(mode)), GatheredPlanes(64, 32, 3)
    ((launch,),) = gp.schedule(asked(case, mode), config, H200).whole
    assert launch.arguments.wide == 1
    assert_exact(simt.computed(asked(case, mode), config, *arrays, seeds=(1,)), case.reference(*arrays), config)


@simulated
def test_what_finishes_a_sum():
    check_epilogue(fprop((2, 16, 3, 4), (24, 16, 1, 1)), "fp16", GatheredPlanes(64, 32, 4), activations=("gelu",))


@simulated
@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("ring.wait_full(at);", ""), ("ring.wait_empty(at);", ""), ("blocks * 64 * 128", "128"),
        ("named_barrier(1, CONSUMER_THREADS);", ""), ("  cluster_barrier();\n", ""),
    ],
)  # fmt: skip
def test_the_machine_notices(text, instead):
    case, config = fprop((2, 264, 5, 5), (136, 264, 1, 1)), GatheredPlanes(128, 128, 3) if "CONSUMER" in text else GatheredPlanes(64, 32, 2, 1 + ("cluster" in text))
    arrays = case.integers("float16")
    with pytest.raises(AssertionError):
        assert_exact(simt.computed(asked(case, "fp16"), config, *arrays, seeds=(1, 2), broken=(text, instead), multiprocessors=2), case.reference(*arrays))


@simulated
def test_what_is_not_finite():
    case = fprop((3, 24, 8, 9), (16, 24, 1, 1))
    check_not_finite(case, "fp16", lambda *arrays: simt.computed(asked(case, "fp16"), GatheredPlanes(64, 32, 3), *arrays, seeds=(1,)))


# ---- what is legal, and the choice

BASE = CASES[0]


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (asked(BASE, "fp32"), GatheredPlanes(), "precision='tf32'"), (asked(BASE, "fp16 last"), GatheredPlanes(), "in the layouts NCHW, not in NHWC"), (asked(fprop((0, 8, 8, 8), (8, 8, 1, 1)), "fp16"), GatheredPlanes(), "nothing to compute"),
        (asked(fprop((2, 8, 8, 8), (8, 8, 3, 3), padding=1), "fp16"), GatheredPlanes(), "1x1 filters"), (asked(fprop((2, 12, 8, 8), (8, 12, 1, 1)), "fp16"), GatheredPlanes(), "multiple of 16 bytes"), (asked(fprop((2, 16, 8, 8), (8, 8, 1, 1), groups=2), "fp16"), GatheredPlanes(), "of one group"),
        (asked(fprop((2, 2**14, 256, 256), (8, 2**14, 1, 1)), "fp16"), GatheredPlanes(), "32 bits"), (asked(BASE, "fp16"), GatheredPlanes(128, 256), "(BLOCK_M, BLOCK_N) must be one of"),
        (asked(BASE, "fp16"), GatheredPlanes(64, 64, 8), "bytes of shared memory"), (asked(BASE, "fp16"), GatheredPlanes(64, 64, 1), "room for the sums"), (asked(BASE, "fp16"), GatheredPlanes(64, 64, 6, 3), "blocks and groups"),
    ],
    ids=lambda v: str(v)[:50],
)  # fmt: skip
def test_a_configuration_says_why_it_cannot(problem, config, reason):
    check_refused_on(H200, problem, config, reason)


def test_the_choice_is_legal_and_its_texts_are_listed():
    r = random.Random(3)
    check_choices_of_planes(gp, [families.problem(families.layer(r, "dense 1x1"), r.choice(("fprop", "dgrad")), r.choice(("float16", "float32")), "tf32", "NCHW") for _ in range(20)])


def test_steps_fit_their_kernel():
    check_steps(gp.schedule(asked(BASE, "fp16"), TILES[0], H200), "hopper_gathered_planes")


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
def test_the_planner_s_kernels_compile_and_hardly_spill():
    steps = {}
    for i, config in enumerate((EVERY[3], EVERY[5], EVERY[8], EVERY[9])):
        for case in CASES[:2]:
            ((launch,),) = gp.schedule(asked(case, MODES[i % len(MODES)]), config, H200).whole
            steps[launch.source()] = launch, str(config)
    check_compiled(steps, 4)  # one address of a thread that loads


# ---- on the GPU

LARGE = [fprop((9, 192, 27, 27), (256, 192, 1, 1)), dgrad((9, 320, 14, 14), (320, 136, 1, 1)), fprop((3, 136, 31, 31), (96, 136, 1, 1), stride=2)]
RUNS = [(case, mode, EVERY[(i + more) % len(EVERY)]) for i, case in enumerate((*CASES, *LARGE)) for more in (0, 2, 5, 8) for mode in MODES]


@cache
def plans() -> dict:
    return plans_of("gathered planes", RUNS)


@pytest.mark.gpu
@pytest.mark.parametrize("run", RUNS, ids=ids_of(RUNS))
def test_on_the_gpu(torch, run):  # noqa: F811
    check_numbers_on_gpu(torch, plans()[str(run)], *run[:2])
