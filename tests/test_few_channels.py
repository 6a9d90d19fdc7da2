"""Convolutions and gradients by the input with few channels in their result (``few_channels.cu``): exact, against float64, on the CPU (simt) and on a GPU."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import simt
import truncation
from alike import (
    bits_by_order,
    check_epilogue,
    check_integers,
    check_no_bias,
    check_normals,
    check_numbers_on_gpu,
    check_refused_on,
    like_h200,
    plans_of,
    random_problems,
    sharing,
)
from reference import Case, dgrad, fprop
from test_implicit_gemm import (
    H200,
    MODES,
    NVCC,
    SCENARIOS,
    Arrays,
    asked,
    check_compiled,
    check_not_finite,
    check_scenario,
    data,
    dtype_of,
    ids_of,
    torch,  # noqa: F401 -- a fixture
)

from pycuda_conv import ConvProblem, Plan, engines
from pycuda_conv.engines.mma import few_channels as fc
from pycuda_conv.engines.mma.few_channels import FewChannels

on_cpu = pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))

#: Tails of channels, rows and columns, taps in one column and in many, chunks of channels, strides, padding, dilation, phases of one and several taps, and of none.
CASES = [
    fprop((2, 16, 19, 40), (1, 16, 7, 7), padding=3), fprop((2, 32, 9, 70), (2, 32, 3, 3), padding=1), fprop((1, 20, 13, 37), (3, 20, 3, 3), padding=1), fprop((3, 7, 10, 12), (5, 7, 3, 2)),
    fprop((2, 40, 5, 6), (4, 40, 1, 1)), fprop((1, 24, 21, 34), (19, 24, 3, 3), padding=1), fprop((1, 16, 5, 5), (2, 16, 5, 5), padding=(4, 7)), fprop((1, 16, 6, 9), (3, 16, 3, 20), padding=(1, 12)),
    fprop((2, 8, 17, 33), (2, 8, 3, 3), stride=2, padding=1), fprop((1, 16, 23, 29), (3, 16, 3, 3), dilation=(2, 3), padding=2), fprop((1, 16, 23, 29), (2, 16, 3, 3), stride=(4, 2), dilation=(6, 3), padding=3),
    fprop((1, 9, 20, 17), (2, 9, 2, 2), stride=5), fprop((2, 33, 50), (3, 33, 9), padding=4), fprop((1, 16, 1, 1), (1, 16, 1, 1)), fprop((1, 16, 12, 11), (2, 16, 3, 3), padding=((0, 2), (3, 1))),
    dgrad((2, 32, 9, 8), (32, 3, 4, 4), stride=2, padding=1), dgrad((1, 24, 6, 9), (24, 1, 2, 2), stride=2), dgrad((1, 16, 5, 7), (16, 3, 16, 16), stride=8, padding=4), dgrad((2, 20, 7, 18), (20, 3, 3, 3), padding=1),
    dgrad((1, 64, 12, 20), (64, 3, 7, 7), stride=2, padding=3, output_padding=1), dgrad((1, 48, 3, 4), (48, 3, 8, 8), stride=8), dgrad((2, 9, 5, 6), (9, 4, 2, 3), stride=(3, 4)), dgrad((1, 16, 9, 7), (16, 2, 3, 3), stride=2, dilation=3, padding=2),
    dgrad((1, 16, 9, 7), (16, 2, 3, 4), stride=(4, 6), dilation=(6, 4), padding=1), dgrad((2, 17, 30), (17, 2, 10), stride=5), dgrad((1, 16, 5, 5), (16, 1, 3, 3), padding=3), dgrad((1, 16, 2, 3), (16, 3, 3, 3), stride=2, padding=1, output_padding=1),
]  # fmt: skip


def tiles(case: Case, mode: str) -> list[FewChannels]:
    """All that run it."""
    every = (FewChannels(columns, *shape) for columns in (8, 16, 24, 48) for shape in fc.SHAPES)
    return [config for config in every if fc.refusal(asked(case, mode), config) is None]


#: Each case in each mode, with a tile of its own.
RUNS = [(case, mode, (found := tiles(case, mode))[(5 * i + j) % len(found)]) for i, case in enumerate(CASES) for j, mode in enumerate(MODES)]
SOME = sharing([[run for run in RUNS if run[0] is case] for case in CASES])  # each case once


@on_cpu
@pytest.mark.parametrize(("case", "mode", "config"), SOME, ids=ids_of(SOME))
def test_integers_are_exact(case, mode, config):
    check_integers(case, mode, config)
    if "last" in mode:
        check_integers(case, mode, config, (3,), filter_last=True)


@on_cpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", [1, 19])
def test_random_data(number, mode):
    case, config = CASES[number], tiles(CASES[number], mode)[number % 5]
    check_normals(case, mode, config)


@on_cpu
@pytest.mark.parametrize("multiprocessors", [1, 1000])
@pytest.mark.parametrize("case", [CASES[1], CASES[15]], ids=str)
def test_blocks_of_many_tiles_and_of_one(case, multiprocessors):
    for config in tiles(case, "fp16 last")[:2]:
        check_integers(case, "fp16 last", config, (1,), multiprocessors=multiprocessors)


@on_cpu
def test_tiles_of_one_order_of_sums_give_the_same_bits():
    case, mode = CASES[4], "fp32 last"
    found = bits_by_order(fc, case, mode, tiles(case, mode))
    assert len(found) == 3 and all(len(bits) == 1 for bits in found.values())


FINISHED = [
    (fprop((2, 16, 7, 9), (3, 16, 3, 3), padding=1), "fp16 last", FewChannels(8, 2)), (fprop((2, 17, 7, 9), (19, 17, 3, 3), padding=1), "bf16", FewChannels(24, 1, 2)),
    (dgrad((2, 24, 5, 6), (24, 3, 4, 4), stride=2, padding=1), "tf32 last", FewChannels(16, 4)), (dgrad((2, 24, 5, 6), (24, 3, 2, 2), stride=3), "fp32", FewChannels(8, 1)),
]  # fmt: skip
FINISHED = [run for run in FINISHED if run[1] in MODES]


@on_cpu
@pytest.mark.parametrize(("case", "mode", "config"), FINISHED, ids=ids_of(FINISHED))
def test_the_epilogue(case, mode, config):
    """Bias, scale, residual and ReLU; then each activation, with a residual and without."""
    check_epilogue(case, mode, config)


@on_cpu
@pytest.mark.parametrize(("old", "new"), [
    ("__syncthreads();\n\n    // from sums", "// from sums"), ("__syncthreads();\n\n  const Divided", "const Divided"), ("step_now = begin;\n            ++row_now;", "step_now = begin;"), ("if (m < used) u[", "u["), ("there |=", "there = ~0u; //"),
])  # fmt: skip
def test_a_broken_kernel_is_noticed(old, new):
    case = fprop((2, 32, 31, 80), (2, 32, 3, 3), padding=1)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check_integers(case, "fp16 last", FewChannels(8, 2), range(1, 6), multiprocessors=1, broken=(old, new))


# ---- numbers of every range


FINITE = [replace(fprop((2, 24, 9, 10), (3, 24, 3, 3), padding=1), bias=False), replace(dgrad((2, 24, 6, 5), (24, 3, 4, 4), stride=2, padding=1), bias=False)]


@on_cpu
@pytest.mark.parametrize(("case", "mode"), [(FINITE[i // 2 % 2], mode) for i, mode in enumerate(MODES)], ids=str)
def test_what_is_not_finite_reaches_its_own_results_only(case, mode):
    check_not_finite(case, mode, lambda x, w, b: simt.computed(asked(case, mode), FewChannels(16), x, w, b, seeds=(1,)))


RANGED = [(mode, scenario) for mode in ("fp32 last", "tf32 last") for scenario in SCENARIOS if mode == "fp32 last" or scenario != "subnormals"]
THIN = fprop((4, 64, 10, 8), (40, 64, 1, 1), bias=False)


@on_cpu
@pytest.mark.parametrize(("mode", "scenario"), RANGED[::3])
def test_every_range_is_kept(mode, scenario):
    x, w = data(scenario, THIN)
    check_scenario(THIN, mode, x, w, simt.computed(asked(THIN, mode), FewChannels(24), x, w, seeds=(1,)), scenario)


def three_products(x: np.ndarray, w: np.ndarray, lost: float) -> np.ndarray:
    """The kernel's sums over channels in fp32, of x, [k, m], and w, [k, n], as the tensor core cuts them."""
    (x_high, x_low), (w_high, w_low) = ((truncation.tf32_by_cvt(v), truncation.tf32_by_cvt((v - truncation.tf32_by_cvt(v)) * 4096)) for v in (x, w))
    total = np.zeros((x.shape[1], w.shape[1]))
    for first in range(0, len(x), 16):
        of = slice(first, first + 16)
        cross = truncation.tensor_sum(truncation.tensor_sum(None, x_low[of], w_high[of], 8, -126), x_high[of], w_low[of], 8, -126)
        total = truncation.rounded(total + truncation.rounded(cross / 4096 + truncation.tensor_sum(None, x_high[of], w_high[of], 8, -126)))
    return truncation.given_back(total, total, lost)


@pytest.mark.parametrize("depth", [144, 1152])
def test_float32_has_no_bias(depth):
    check_no_bias(three_products, "mma/few_channels.cu", depth)


# ---- what is legal, and the choice

BASE = CASES[1]


@pytest.mark.parametrize(
    ("case", "mode", "config", "reason"),
    [
        (replace(BASE, options={"groups": 2, "padding": 1}, weight_shape=(2, 16, 3, 3)), "fp16", FewChannels(), "of one group"), (fprop((0, 8, 4, 4), (4, 8, 1, 1)), "fp16", FewChannels(), "nothing to compute"),
        (fprop((2, 8, 4, 4, 4), (4, 8, 1, 1, 1)), "fp16", FewChannels(), "two spatial axes"), (fprop((1, 8, 2**14, 2**13), (1, 8, 3, 3)), "fp16", FewChannels(), "in 32 bits"),
        (BASE, "fp16", FewChannels(32), "BLOCK_N must be one of 8, 16, 24, 48"), (BASE, "fp16", FewChannels(8, 4, 2), "(WARPS_W, PARTS) must be one of"), (fprop((1, 8, 9, 40), (1, 8, 3, 25)), "fp16", FewChannels(24), "25 taps"),
        (fprop((1, 8, 9, 2**20), (1, 8, 3, 3), dilation=(2**10, 1), padding=(2**10, 1)), "fp16", FewChannels(), "between two taps"), (fprop((1, 8, 9, 90), (1, 8, 3, 3), dilation=(1, 20)), "fp16", FewChannels(8, 1), "beyond the tile's 32 columns"), (fprop((1, 2048, 9, 9), (1, 2048, 7, 7)), "fp16", FewChannels(), "bytes of shared memory"),
    ],
    ids=lambda v: str(v)[:40],
)  # fmt: skip
def test_a_configuration_says_why_it_cannot(case, mode, config, reason):
    check_refused_on(H200, asked(case, mode), config, reason)


def test_float64_and_other_devices_do_not_have_it():
    assert "float16" in engines.refusal(BASE.problem("float64"), FewChannels(), H200)
    for capability, backend in (((7, 5), "cuda"), ((0, 0), "opencl")):
        assert engines.refusal(asked(BASE, "fp16"), FewChannels(), like_h200(capability, backend)) is not None


def test_the_choice_is_legal_and_its_texts_are_listed():
    """Of random layers of the families that it is for, and others: what is chosen, and each candidate's launches."""
    listed, r, met = list(fc.variants(H200)), random.Random(4), 0
    kinds = (("fprop", ("float32", "tf32", "NHWC")), ("dgrad", ("float16", "fp32", "NHWC")), ("dgrad", ("float32", "fp32", "NCHW")))
    for problem in random_problems(r, ("last", "upsampling", "first", "dense 3x3", "odd", "audio"), 8, kinds):
        found = list(fc.configs(problem, H200))
        if not found:
            assert fc.choose(problem, H200) is None
            continue
        assert fc.choose(problem, H200)[1] in found
        program = fc.schedule(problem, r.choice(found), H200)
        for launch in (launch for step in (*program.whole, *(program.filter_last or ())) for launch in step):
            assert any(launch in one for one in listed), launch.defines
            assert 0 < launch.grid and launch.shared <= fc.SHARED_BYTES and launch.arguments.workers <= launch.arguments.tiles
            met += 1
    assert met > 50


LAST = ConvProblem.forward(2, (8, 16, 256, 256), (1, 16, 7, 7), padding=3, dtype="float16", layout="NHWC")
UPSAMPLING = ConvProblem.transposed(2, (16, 128, 64, 64), (128, 3, 4, 4), stride=2, padding=1, dtype="float16")
FIRST = ConvProblem.gradient("input", 2, (16, 3, 224, 224), (64, 3, 7, 7), (16, 64, 112, 112), stride=2, padding=3, dtype="float16", layout="NHWC")


@pytest.mark.parametrize("problem", [LAST, UPSAMPLING, FIRST], ids=str)
def test_layers_to_few_channels_choose_it(problem):
    assert isinstance(engines.choose(problem, H200), FewChannels)


def test_layers_to_many_channels_do_not():
    problem = ConvProblem.forward(2, (8, 128, 56, 56), (128, 128, 3, 3), padding=1, dtype="float16", layout="NHWC")
    assert not isinstance(engines.choose(problem, H200), FewChannels)


# ---- the kernel, compiled


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
def test_the_kernels_compile_and_do_not_spill():
    steps = {}
    for mode in ("fp32", "fp32 last", "tf32 last", "fp16", "fp16 last"):
        for columns in (8, 16, 24, 48):
            problem, config = asked(BASE, mode), FewChannels(columns)
            ((launch,),) = fc.schedule(problem, config, H200).whole
            for arch in ("sm_90a", "sm_80"):
                steps[launch.source(), arch] = replace(launch, arch=arch), f"{problem} {config}"
    check_compiled(steps, most_sm80=8)  # two words, once a tile


# ---- on the GPU


@cache
def plans() -> dict:
    """The plans of all runs."""
    return plans_of("few channels", RUNS)


@pytest.mark.gpu
@pytest.mark.parametrize("run", RUNS, ids=ids_of(RUNS))
def test_on_the_gpu(torch, run):  # noqa: F811
    case, mode, _ = run
    plan = plans()[str(run)]
    check_numbers_on_gpu(torch, plan, case, mode)
    if "last" in mode:
        on_gpu = Arrays(torch, plan, *case.normals(dtype_of(mode), seed=2))
        assert on_gpu.launch().tobytes() == on_gpu.launch(filter_last=True).tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "scenario"), RANGED)
def test_every_range_is_kept_on_the_gpu(torch, mode, scenario):  # noqa: F811
    x, w = data(scenario, THIN)
    got = Arrays(torch, Plan(asked(THIN, mode), "cuda", config=FewChannels(24)), x, w).launch()
    check_scenario(THIN, mode, x, w, got, scenario)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", FINITE, ids=str)
def test_what_is_not_finite_on_the_gpu(torch, case, mode):  # noqa: F811
    plan = Plan(asked(case, mode), "cuda", config=FewChannels(16))
    check_not_finite(case, mode, lambda *arrays: Arrays(torch, plan, *arrays).launch())
