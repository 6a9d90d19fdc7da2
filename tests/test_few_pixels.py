"""Convolutions and gradients by the input of few pixels (``mma/few_pixels.cu``): exact, against float64, on the CPU (simt) and on a GPU."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import reference
import simt
import truncation
from alike import (
    bits_by_order,
    check_epilogue,
    check_integers,
    check_no_bias,
    check_normals,
    check_refused_on,
    first_runs,
    like_h200,
    plans_of,
    random_problems,
    sharing,
)
from reference import Case, assert_close, assert_exact, dgrad, fprop
from test_implicit_gemm import (
    H200,
    MODES,
    NVCC,
    SCENARIOS,
    Arrays,
    asked,
    check_compiled,
    check_not_finite,
    check_on_gpu,
    check_scenario,
    data,
    dtype_of,
    ids_of,
    torch,  # noqa: F401 -- a fixture
)

from pycuda_conv import ConvProblem, Plan, engines
from pycuda_conv.engines.hopper.gathered_planes import GatheredPlanes
from pycuda_conv.engines.mma import few_pixels as fp
from pycuda_conv.engines.mma.few_pixels import FewPixels

on_cpu = pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
MODES = [mode for mode in MODES if "last" not in mode]

#: Tails of channels, of units and of pixels, images that share a tile and rows that do, rings that come round, strides, uneven padding, dilation, one tap,
#: one axis; gradients of one phase, of several and of such without taps, of taps that come the other way round.
CASES = [
    fprop((1, 40, 7, 7), (40, 40, 3, 3), padding=1), fprop((3, 72, 5, 4), (70, 72, 3, 3), padding=1), fprop((2, 200, 7, 7), (136, 200, 1, 1)), fprop((1, 24, 14, 14), (33, 24, 3, 3), padding=1),
    fprop((2, 64, 9, 8), (40, 64, 3, 3), stride=2, padding=1), fprop((2, 48, 9, 9), (40, 48, 1, 1), stride=2), fprop((1, 16, 9, 31), (9, 16, 3, 2), stride=(2, 3), padding=((0, 2), (1, 0))), fprop((2, 32, 12, 11), (8, 32, 3, 3), dilation=(2, 3), padding=2),
    fprop((5, 8, 1, 1), (35, 8, 1, 1)), fprop((2, 32, 30), (16, 32, 5), padding=2), fprop((1, 320, 4, 4), (32, 320, 3, 3), padding=1), fprop((1, 16, 4, 6), (8, 16, 7, 8), padding=(3, 4)), fprop((1, 720, 5, 5), (40, 720, 3, 3), padding=1),
    fprop((2, 32, 5, 5), (16, 32, 1, 1), padding=(1, 2)), fprop((1, 16, 6, 60), (8, 16, 3, 3), padding=1),
    dgrad((2, 40, 6, 7), (40, 72, 3, 3), padding=1), dgrad((1, 72, 14, 9), (72, 40, 3, 3), stride=2, padding=1, output_padding=1), dgrad((2, 48, 4, 5), (48, 64, 1, 1), stride=2, output_padding=1),
    dgrad((1, 200, 7, 7), (200, 136, 1, 1)), dgrad((2, 24, 5, 4), (24, 16, 4, 4), stride=2, padding=1), dgrad((1, 16, 4, 5), (16, 8, 3, 4), stride=(1, 3), dilation=(2, 1), padding=1), dgrad((1, 16, 5, 4), (16, 8, 5, 5), padding=(4, 3)),
    dgrad((1, 320, 4, 4), (320, 32, 3, 3), padding=1), dgrad((2, 16, 20), (16, 40, 5), stride=3, padding=2, output_padding=1), dgrad((1, 16, 3, 4), (16, 8, 2, 2), stride=2, output_padding=1),
]  # fmt: skip


def tiles(case: Case, mode: str) -> list[FewPixels]:
    """All that run it."""
    every = (FewPixels(rows, columns, cluster) for rows in fp.ROWS for columns in fp.COLUMNS for cluster in fp.CLUSTERS)
    return [config for config in every if fp.refusal(asked(case, mode), config) is None]


#: Each case in each mode, with a tile of its own.
RUNS = [(case, mode, (found := tiles(case, mode))[(7 * i + 5 * j) % len(found)]) for i, case in enumerate(CASES) for j, mode in enumerate(MODES)]


def text_of(case: Case, mode: str, config) -> tuple[int, ...]:
    """Which text a run has."""
    return tuple(fp._defines(asked(case, mode), config).values())


#: Each case once, with every value of every define; with `--all-texts` each text.
SOME = first_runs(RUNS, text_of) if reference.all_texts else sharing([[run for run in RUNS if run[0] is case] for case in CASES])


def test_the_runs_have_every_value_of_the_texts():
    listed = {tuple(defines.values()) for family in fp.variants(H200) for defines in family}
    met = {text_of(*run) for run in SOME}
    assert met >= listed or len(MODES) < 4 or not reference.all_texts
    assert all(set(some) >= set(every) for some, every in zip(zip(*met, strict=True), zip(*listed, strict=True), strict=True)) or len(MODES) < 4
    assert {config.BLOCK_M for *_, config in SOME} == set(fp.ROWS)


@on_cpu
@pytest.mark.parametrize(("case", "mode", "config"), SOME, ids=ids_of(SOME))
def test_integers_are_exact(case, mode, config):
    check_integers(case, mode, config, (1,))


@on_cpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", [1, 16])
def test_random_data(number, mode):
    case, config = CASES[number], tiles(CASES[number], mode)[number % 9]
    check_normals(case, mode, config)


@on_cpu
def test_tiles_of_one_order_of_sums_give_the_same_bits():
    case, mode = fprop((1, 72, 5, 4), (40, 72, 3, 3), padding=1), "fp32"
    found = bits_by_order(fp, case, mode, tiles(case, mode))
    assert len(found) > 3 and all(len(bits) == 1 for bits in found.values()) and len(tiles(case, mode)) > len(found)


FINISHED = [
    (fprop((2, 40, 4, 5), (40, 40, 3, 3), padding=1), "fp16", FewPixels(32, 56, 2)), (fprop((2, 48, 4, 5), (17, 48, 1, 1)), "bf16", FewPixels(64, 32, 4)),
    (dgrad((2, 40, 3, 3), (40, 24, 3, 3), stride=2, padding=1), "tf32", FewPixels(32, 32, 8)), (fprop((2, 40, 4, 5), (40, 40, 3, 3), padding=1), "fp32", FewPixels(128, 32, 2)),
]  # fmt: skip
FINISHED = [run for run in FINISHED if run[1] in MODES]


@on_cpu
@pytest.mark.parametrize(("case", "mode", "config"), FINISHED, ids=ids_of(FINISHED))
def test_the_epilogue(case, mode, config):
    """Bias, scale, residual and ReLU; then each activation, with a residual and without."""
    check_epilogue(case, mode, config)


@on_cpu
@pytest.mark.parametrize(("old", "new"), [
    ("copies_wait<STAGES - 2>();\n", ""), ("stage % STAGES * (int)", "stage % 2 * (int)"), ("  cluster_barrier();\n\n  // some rows", "  // some rows"), ("  cluster_barrier_relaxed();", ""),
    ("__syncthreads();\n  constexpr int FOURS", "constexpr int FOURS"), ("write_tables(shape, of, tables, from);\n  __syncthreads();", "write_tables(shape, of, tables, from);"), ("at += groups * 8;", "at += groups * 16;"),
])  # fmt: skip
def test_a_broken_kernel_is_noticed(old, new):
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check_integers(fprop((1, 200, 5, 5), (33, 200, 3, 3), padding=1), "fp32", FewPixels(32, 32, 2), range(1, 6), broken=(old, new))


# ---- numbers of every range


FINITE = [replace(fprop((2, 24, 5, 6), (40, 24, 3, 3), padding=1), bias=False), replace(dgrad((2, 24, 4, 4), (24, 40, 3, 3), padding=1), bias=False)]


@on_cpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", FINITE, ids=str)
def test_what_is_not_finite_reaches_its_own_results_only(case, mode):
    check_not_finite(case, mode, lambda x, w, b: simt.computed(asked(case, mode), FewPixels(32, 32, 2), x, w, b, seeds=(1,)))


def check_nan_of_all_bits(run) -> None:
    """A NaN as a GPU makes it reaches what depends on it, though its rounding to TF32 overflows."""
    case = FINITE[0]
    x, w, b = case.integers("float32", seed=5)
    w[w == 0] = 1
    clean = run(x, w, b)
    x[1, 3, 2, 2] = np.uint32(0x7FFFFFFF).view(np.float32)
    with np.errstate(invalid="ignore"):
        got, ref = run(x, w, b), case.reference(x, w)
    assert np.array_equal(np.isnan(got), np.isnan(ref)) and np.array_equal(got[~np.isnan(ref)], clean[~np.isnan(ref)])


@on_cpu
@pytest.mark.parametrize("mode", ["fp32", "tf32"])
def test_a_nan_of_all_bits(mode):
    check_nan_of_all_bits(lambda x, w, b: simt.computed(asked(FINITE[0], mode), FewPixels(32, 32, 2), x, w, b, seeds=(1,)))


RANGED = [(mode, scenario) for mode in ("fp32", "tf32") for scenario in SCENARIOS if mode == "fp32" or scenario != "subnormals"]
SMALL = fprop((4, 32, 5, 6), (40, 32, 1, 1), bias=False)


@on_cpu
@pytest.mark.parametrize(("mode", "scenario"), RANGED)
def test_every_range_is_kept(mode, scenario):
    x, w = data(scenario, SMALL)
    check_scenario(SMALL, mode, x, w, simt.computed(asked(SMALL, mode), FewPixels(32, 56, 2), x, w, seeds=(1,)), scenario)


def first_bits(v: np.ndarray) -> np.ndarray:
    return (v.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


def three_products(x: np.ndarray, w: np.ndarray, lost: float) -> np.ndarray:
    """A warp's sums in fp32, of x, [k, m], and w, [k, n], as the tensor core cuts them."""
    (x_high, x_low), (w_high, w_low) = ((truncation.tf32_by_cvt(v), first_bits((v - truncation.tf32_by_cvt(v)) * 4096)) for v in (x, w))
    total, cross = np.zeros((x.shape[1], w.shape[1])), None
    for first in range(0, len(x), 16):
        of = slice(first, first + 16)
        total = truncation.rounded(total + truncation.tensor_sum(None, x_high[of], w_high[of], 8, -126))
        for step in range(first, first + 16, 8):
            of = slice(step, step + 8)
            cross = truncation.tensor_sum(cross, x_low[of], w_high[of], 8, -126)
            cross = truncation.tensor_sum(cross, x_high[of], w_low[of], 8, -126)
    total = truncation.rounded(total + cross / 4096)
    return truncation.given_back(total, total, lost)


@pytest.mark.parametrize("depth", [144, 1152])
def test_float32_has_no_bias(depth):
    check_no_bias(three_products, "mma/few_pixels.cu", depth)


# ---- what is legal, and the choice

BASE = CASES[0]


@pytest.mark.parametrize(
    ("case", "mode", "config", "reason"),
    [
        (replace(BASE, options={"groups": 2, "padding": 1}, weight_shape=(40, 20, 3, 3)), "fp16", FewPixels(), "of one group"), (fprop((0, 8, 4, 4), (4, 8, 1, 1)), "fp16", FewPixels(), "nothing to compute"),
        (fprop((2, 8, 4, 4, 4), (4, 8, 1, 1, 1)), "fp16", FewPixels(), "two spatial axes"), (fprop((1, 8, 2**14, 2**14), (8, 8, 1, 1)), "fp16", FewPixels(), "in 32 bits"), (BASE, "fp16 last", FewPixels(), "not in NHWC"),
        (BASE, "fp16", FewPixels(48), "BLOCK_M must be one of"), (BASE, "fp16", FewPixels(32, 64), "BLOCK_N must be one of"), (BASE, "fp16", FewPixels(32, 32, 1), "CLUSTER must be one of"), (fprop((1, 9, 7, 7), (8, 9, 1, 1)), "fp32", FewPixels(), "16 bytes"),
        (dgrad((1, 16, 7, 7), (16, 7, 1, 1)), "fp16", FewPixels(), "16 bytes"), (fprop((1, 8, 20, 20), (8, 8, 12, 11)), "fp16", FewPixels(), "128 taps"), (dgrad((1, 16, 9, 7), (16, 8, 3, 3), stride=3), "fp16", FewPixels(), "stride phases"), (dgrad((1, 16, 9, 7), (16, 8, 3, 3), stride=2), "fp16", FewPixels(), "32 pixels"),
        (fprop((1, 8, 200, 1000), (8, 8, 3, 3), dilation=90), "fp32", FewPixels(), "shared memory"),
    ],
    ids=lambda v: str(v)[:40],
)  # fmt: skip
def test_a_configuration_says_why_it_cannot(case, mode, config, reason):
    check_refused_on(H200, asked(case, mode), config, reason)


def test_float64_and_other_devices_do_not_have_it():
    assert "float16" in engines.refusal(BASE.problem("float64"), FewPixels(), H200)
    for capability, backend in (((8, 0), "cuda"), ((0, 0), "opencl")):
        assert engines.refusal(asked(BASE, "fp16"), FewPixels(), like_h200(capability, backend)) is not None


def test_the_choice_is_legal_and_its_texts_are_listed():
    """Of random layers: what is chosen, and each candidate's launches."""
    listed, r, met = list(fp.variants(H200)), random.Random(4), 0
    kinds = (("fprop", ("float32", "tf32", "NCHW")), ("dgrad", ("float16", "fp32", "NCHW")), ("fprop", ("float32", "fp32", "NCHW")))
    for problem in random_problems(r, ("small batch", "dense 3x3", "dense 1x1", "odd", "audio"), 8, kinds):
        found = list(fp.configs(problem, H200))
        if not found:
            assert fp.choose(problem, H200) is None
            continue
        assert fp.choose(problem, H200)[1] in found
        for config in found:
            ((launch,),) = fp.schedule(problem, config, H200).whole
            assert any(launch in one for one in listed), launch.defines
            assert 0 < launch.grid and launch.grid % config.CLUSTER == 0 and launch.shared + fp.STATIC_SHARED <= fp.MOST_SHARED
            met += 1
    assert met > 50


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("channels", "size", "k", "taps"), [(256, 14, 256, 3), (512, 7, 512, 3), (1024, 14, 256, 1)])
def test_few_pixels_choose_it(channels, size, k, taps, mode):
    dtype, precision = ("float32", mode) if mode in ("fp32", "tf32") else ({"fp16": "float16", "bf16": "bfloat16"}[mode], "fp32")
    problem = ConvProblem.forward(2, (1, channels, size, size), (k, channels, taps, taps), padding=taps // 2, dtype=dtype, precision=precision)
    config = engines.choose(problem, H200)
    assert isinstance(config, FewPixels if taps > 1 or mode == "fp32" else GatheredPlanes)  # 5.0 us on an H100 for such a layer, 8.7 by the best other
    assert len([launch for step in engines.schedule(problem, config, H200).whole for launch in step]) == 1


def test_many_pixels_do_not():
    for dtype in ("float16", "float32"):
        problem = ConvProblem.forward(2, (32, 128, 28, 28), (128, 128, 3, 3), padding=1, dtype=dtype)
        assert not isinstance(engines.choose(problem, H200), FewPixels)


# ---- the kernel, compiled


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
def test_the_kernels_compile_and_do_not_spill():
    steps = {}
    for mode in MODES:
        for case, columns in ((BASE, 32), (BASE, 56), (CASES[16], 32)):
            problem, config = asked(case, mode), FewPixels(32, columns, 8)
            ((launch,),) = fp.schedule(problem, config, H200).whole
            steps[launch.source()] = launch, f"{problem} {config}"
    check_compiled(steps)


# ---- on the GPU


@cache
def plans() -> dict:
    """The plans of all runs."""
    return plans_of("few pixels", RUNS)


@pytest.mark.gpu
@pytest.mark.parametrize("run", RUNS, ids=ids_of(RUNS))
def test_on_the_gpu(torch, run):  # noqa: F811
    case, mode, _ = run
    plan = plans()[str(run)]
    if dtype_of(mode) == "float32":
        check_on_gpu(torch, plan, case, mode)
        return
    arrays = case.integers(dtype_of(mode))
    assert_exact(Arrays(torch, plan, *arrays).launch(), case.reference(*arrays), plan)
    arrays = case.normals(dtype_of(mode))
    ref, on_gpu = case.reference(*arrays), Arrays(torch, plan, *arrays)
    got = on_gpu.launch()
    assert_close(got, ref, case.bound(*arrays, ref), plan)
    assert got.tobytes() == on_gpu.launch().tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "scenario"), RANGED)
def test_every_range_is_kept_on_the_gpu(torch, mode, scenario):  # noqa: F811
    x, w = data(scenario, SMALL)
    got = Arrays(torch, Plan(asked(SMALL, mode), "cuda", config=FewPixels(32, 56, 2)), x, w).launch()
    check_scenario(SMALL, mode, x, w, got, scenario)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fp32", "tf32"])
def test_a_nan_of_all_bits_on_the_gpu(torch, mode):  # noqa: F811
    plan = Plan(asked(FINITE[0], mode), "cuda", config=FewPixels(32, 32, 2))
    check_nan_of_all_bits(lambda *arrays: Arrays(torch, plan, *arrays).launch())


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", FINITE, ids=str)
def test_what_is_not_finite_on_the_gpu(torch, case, mode):  # noqa: F811
    plan = Plan(asked(case, mode), "cuda", config=FewPixels(32, 32, 2))
    check_not_finite(case, mode, lambda *arrays: Arrays(torch, plan, *arrays).launch())
