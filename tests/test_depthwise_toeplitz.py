"""Depthwise layers of 16 bits on tensor cores (``depthwise/toeplitz.cu``): exact, against float64, on the CPU (simt) and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import reference
import simt
from alike import check_epilogue, check_numbers_on_gpu, check_refused_on, first_runs, like_h200, plans_of, sharing
from reference import ACTIVATIONS, DTYPES, assert_close, assert_exact, dgrad, fprop
from test_few_pixels import H200, NVCC, check_compiled
from test_implicit_gemm import Arrays, asked, ids_of, torch  # noqa: F401 -- torch: a fixture

from pycuda_conv import ConvProblem, Plan, engines
from pycuda_conv.engines.depthwise import toeplitz as dt
from pycuda_conv.engines.depthwise.toeplitz import DepthwiseToeplitz
from pycuda_conv.runtime.target import Target

on_cpu = pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
MODES = tuple(mode for mode, dtype in (("fp16", "float16"), ("bf16", "bfloat16"), ("fp16 last", "float16"), ("bf16 last", "bfloat16")) if dtype in DTYPES)

#: Rows of every size against eights and words, several planes of a unit and bands of one, the last unit smaller; strides, also different ones; uneven padding, such
#: as is wider than the filter, and rows that nothing meets; dilation; filters that meet one sixteen of columns and two; multipliers; lines; gradients. Channels last
#: also more channels than a block's, and spans of columns.
CASES = [
    fprop((2, 9, 7, 7), (9, 1, 3, 3), padding=1, groups=9), fprop((1, 4, 14, 13), (4, 1, 5, 5), padding=2, groups=4), fprop((2, 4, 9, 11), (4, 1, 3, 3), padding=1, stride=2, groups=4),
    fprop((1, 4, 15, 9), (4, 1, 7, 7), padding=((3, 2), (0, 5)), stride=2, groups=4), fprop((2, 3, 9, 10), (6, 1, 3, 3), padding=1, groups=3), fprop((1, 2, 70, 150), (2, 1, 5, 5), padding=(0, 2), groups=2),
    fprop((1, 4, 3, 3), (4, 1, 3, 3), padding=(5, 4), groups=4), fprop((2, 3, 20, 21), (3, 1, 9, 9), padding=4, groups=3), fprop((1, 4, 33, 40), (4, 1, 13, 13), padding=6, groups=4),
    fprop((1, 4, 30, 41), (4, 1, 3, 5), padding=(1, 4), dilation=(2, 3), stride=(3, 2), groups=4), fprop((1, 3, 20, 17), (6, 1, 2, 9), padding=(0, 8), groups=3), fprop((1, 1, 70, 64), (1, 1, 7, 7), padding=3, groups=1),
    fprop((1, 2, 9, 100), (2, 1, 1, 17), stride=2, padding=(0, 8), groups=2), fprop((2, 3, 40), (3, 1, 9), padding=4, groups=3), fprop((1, 1, 5, 5), (1, 1, 3, 3), padding=(0, 20), groups=1),
    fprop((1, 3, 1, 5), (3, 1, 3, 3), padding=1, groups=3), dgrad((2, 8, 9, 11), (8, 1, 3, 3), padding=1, groups=8), dgrad((2, 4, 9, 12), (4, 1, 7, 7), padding=((3, 1), (6, 0)), groups=4),
    fprop((2, 20, 20, 21), (20, 1, 9, 9), padding=4, groups=20), fprop((1, 4, 70, 64), (4, 1, 7, 7), padding=3, groups=4), fprop((1, 24, 29, 30), (24, 1, 7, 7), padding=3, stride=2, groups=24),
    dgrad((1, 4, 9, 11), (4, 1, 3, 3), stride=2, padding=1, groups=4), dgrad((2, 20, 14, 14), (20, 1, 7, 7), stride=2, padding=3, groups=20), dgrad((1, 8, 37, 33), (8, 1, 5, 5), stride=2, padding=((2, 1), (2, 3)), groups=8),
    dgrad((1, 4, 20, 9), (4, 1, 2, 3), stride=2, padding=(0, 2), groups=4), dgrad((1, 4, 9, 20), (4, 1, 13, 13), stride=2, padding=6, groups=4), dgrad((1, 1, 90, 40), (1, 1, 4, 16), stride=2, padding=(1, 0), groups=1),
    fprop((1, 4, 40, 60), (4, 1, 3, 3), padding=(70, 1), groups=4),
    dgrad((1, 5, 9, 10), (5, 1, 3, 3), padding=(4, 3), groups=5), dgrad((1, 4, 20, 33), (4, 1, 3, 4), dilation=(1, 3), padding=(1, 2), groups=4), dgrad((1, 1, 90, 60), (1, 1, 3, 3), padding=1, groups=1),
]  # fmt: skip


def configs(case, mode):
    return [config for config in map(DepthwiseToeplitz, dt.UNITS[asked(case, mode).layout]) if dt.refusal(asked(case, mode), config) is None]


#: Each case in each type, with a unit of its own.
RUNS = [(case, mode, configs(case, mode)[(i + j) % len(configs(case, mode))]) for i, case in enumerate(CASES) for j, mode in enumerate(MODES) if configs(case, mode)]


def text_of(case, mode, config):
    ((launch,),) = dt.schedule(asked(case, mode), config, H200).whole
    return tuple(launch.defines.values())


SOME = first_runs(RUNS, text_of) if reference.all_texts else sharing([[run for run in RUNS if run[0] is case] for case in CASES])


def test_the_runs_have_every_text():
    listed = {tuple(defines.values()) for family in dt.variants(H200) for defines in family if not defines.get("BORDERED")}
    assert {text_of(*run) for run in RUNS} == listed


@on_cpu
@pytest.mark.parametrize(("case", "mode", "config"), SOME, ids=ids_of(SOME))
def test_integers_are_exact(case, mode, config):
    arrays = case.integers(asked(case, mode).dtype)
    assert_exact(simt.computed(asked(case, mode), config, *arrays, seeds=(1,)), case.reference(*arrays), config)


@on_cpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", [1, 2, 16])
def test_random_data(number, mode):
    case = CASES[number]
    arrays, found = case.normals(asked(case, mode).dtype, seed=1), set()
    ref = case.reference(*arrays)
    for config in configs(case, mode):
        got = simt.computed(asked(case, mode), config, *arrays, seeds=(1, 2))
        assert_close(got, ref, case.bound(*arrays, ref), config)
        found.add(got.tobytes())
    assert len(found) == 1  # whatever the unit


@on_cpu
@pytest.mark.parametrize("mode", MODES)
def test_the_epilogue(mode):
    """Bias, scale, each activation, with a residual and without."""
    case = fprop((2, 8, 7, 10), (8, 1, 3, 3), padding=1, groups=8)
    check_epilogue(case, mode, configs(case, mode)[0], ACTIVATIONS[MODES.index(mode) :: 4])


def check_not_finite(case, mode, run) -> None:
    """A value that is not finite, in the input or in the filter, reaches the results that its products are summands of."""
    x, w, b = case.integers(asked(case, mode).dtype, seed=5)
    w[w == 0] = 1
    middle, corner, of_filter = (0, (1, 2, 3, 2)), (0, (0, 0, 0, x.shape[3] - 1)), (1, (1, 0, 1, 1))
    for value, places in ((np.nan, (middle, of_filter)), (np.inf, (corner,)), (-np.inf, (of_filter,))):
        for which, at in places:
            given = [x.copy(), w.copy()]
            given[which][at] = value
            with np.errstate(invalid="ignore"):
                got, ref = run(*given, b), case.reference(*given, b)
            if case.transposed and which == 1:  # taps meet zeros beyond the operand's edges, as those of a forward convolution do
                ref = np.where(np.isnan(got) & ~np.isfinite(ref).all(axis=(2, 3), keepdims=True), np.nan, ref)
            assert np.array_equal(got, ref.astype(got.dtype), equal_nan=True), f"{value} at {at} of the {('input', 'filter')[which]}"


FINITE = [fprop((2, 4, 9, 12), (4, 1, 3, 3), padding=1, groups=4), dgrad((2, 4, 9, 10), (4, 1, 3, 3), padding=1, groups=4)]


@on_cpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", FINITE, ids=str)
def test_what_is_not_finite_reaches_its_own_results_only(case, mode):
    check_not_finite(case, mode, lambda x, w, b: simt.computed(asked(case, mode), configs(case, mode)[0], x, w, b, seeds=(1,)))


@on_cpu
@pytest.mark.parametrize(("old", "new"), [
    ("copies_wait<0>();\n  __syncthreads();", "copies_wait<0>();"), ("  __syncthreads();\n\n#if LAST\n  for", "#if LAST\n  for"), ("i >= y_shift && i + EIGHT <= y_shift + y_run", "true"),
    ("(unsigned)h < (unsigned)h_count ? row_at : none", "row_at"), ("from % 2 ? words[i] >> 16", "false ? words[i] >> 16"), ("if (x_size % 2 &&", "if (false &&"), ("2 * i < count ? 0xffff : 0", "~0u"), ("arg.flipped ? last - number : number", "number"),
])  # fmt: skip
def test_a_broken_kernel_is_noticed(old, new):
    """Barriers, and the ends of runs, rows and columns."""
    case = dgrad((3, 9, 7, 9), (9, 1, 3, 3), padding=(0, 1), groups=9)
    arrays = case.integers("float16")
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        assert_exact(simt.computed(case.problem("float16"), DepthwiseToeplitz(12), *arrays, seeds=range(1, 4), broken=(old, new)), case.reference(*arrays))


# ---- what is legal, and the choice


@pytest.mark.parametrize(
    ("case", "dtype", "config", "reason"),
    [
        (fprop((1, 4, 9, 9), (4, 2, 3, 3), padding=1, groups=2), "float16", DepthwiseToeplitz(), "one input channel a group"), (fprop((1, 4, 9, 9, 9), (4, 1, 3, 3, 3), groups=4), "float16", DepthwiseToeplitz(), "two spatial axes"),
        (fprop((1, 4, 9, 9), (4, 1, 3, 3), groups=4), "float32", DepthwiseToeplitz(), "float16 and bfloat16"), (fprop((1, 4, 9, 9), (4, 1, 3, 3), stride=3, groups=4), "float16", DepthwiseToeplitz(), "strides of 1 and 2"),
        (dgrad((1, 4, 9, 9), (4, 1, 3, 3), stride=(1, 2), groups=4), "float16", DepthwiseToeplitz(), "one stride"), (dgrad((1, 8, 9, 9), (8, 1, 3, 3), groups=4), "float16", DepthwiseToeplitz(), "as many channels out as in"),
        (fprop((0, 4, 9, 9), (4, 1, 3, 3), groups=4), "float16", DepthwiseToeplitz(), "nothing to compute"), (fprop((1, 4, 9, 39), (4, 1, 3, 31), groups=4), "float16", DepthwiseToeplitz(), "at most 32 columns"),
        (fprop((1, 4, 9, 9), (4, 1, 3, 3), groups=4), "float16", DepthwiseToeplitz(7), "UNIT_KIB must be"), (fprop((1, 1, 99, 2000), (1, 1, 3, 3), groups=1), "float16", DepthwiseToeplitz(12), "12 KiB of shared memory"),
    ],
    ids=lambda v: str(v)[:40],
)  # fmt: skip
def test_a_configuration_says_why_it_cannot(case, dtype, config, reason):
    check_refused_on(H200, case.problem(dtype), config, reason)


def test_other_devices_do_not_have_it():
    for capability, backend in (((7, 5), "cuda"), ((0, 0), "opencl")):
        assert engines.refusal(CASES[0].problem("float16"), DepthwiseToeplitz(), like_h200(capability, backend)) is not None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("size", "taps", "stride"), [(128, 7, 1), (112, 9, 1), (64, 5, 1)])
def test_large_planes_choose_it(size, taps, stride, dtype):
    problem = ConvProblem.forward(2, (16, 192, size, size), (192, 1, taps, taps), padding=taps // 2, stride=stride, groups=192, dtype=dtype)
    assert isinstance(engines.choose(problem, H200), DepthwiseToeplitz)


def test_blocks_fit_in_the_shared_memory_of_smaller_gpus():
    """99 KiB of consumers' Ampere, Ada and Blackwell."""
    problem, large = asked(fprop((32, 96, 32, 32), (96, 1, 9, 9), padding=4, groups=96, bias=False), "fp16 last"), DepthwiseToeplitz(110)
    assert large in dt.configs(problem, Target("sm_80")) and large in dt.configs(problem, H200)
    for architecture in ("sm_86", "sm_89", "sm_120"):
        device = Target(architecture)
        assert large not in dt.configs(problem, device)
        with pytest.raises(ValueError, match="it needs 104,608 bytes of shared memory; a block has 101,376"):
            engines.schedule(problem, large, device)
        ((launch,),) = engines.schedule(problem, engines.choose(problem, device), device).whole
        assert launch.shared <= 99 * 1024


# ---- the kernel, compiled


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
def test_the_kernels_compile_and_do_not_spill():
    steps = {}
    for case, mode, config in first_runs(RUNS, text_of):
        ((launch,),) = dt.schedule(asked(case, mode), config, H200).whole
        for arch in ("sm_90a", "sm_80"):
            steps[launch.source(), arch] = replace(launch, arch=arch), str(launch.defines)
    check_compiled(steps, most_sm80=8)


# ---- on the GPU


@cache
def plans() -> dict:
    """The plans of all runs."""
    return plans_of("depthwise toeplitz", RUNS)


@pytest.mark.gpu
@pytest.mark.parametrize("run", RUNS, ids=ids_of(RUNS))
def test_on_the_gpu(torch, run):  # noqa: F811
    case, mode, _ = run
    check_numbers_on_gpu(torch, plans()[str(run)], case, mode)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", FINITE, ids=str)
def test_what_is_not_finite_on_the_gpu(torch, case, mode):  # noqa: F811
    plan = Plan(asked(case, mode), "cuda", config=configs(case, mode)[0])
    check_not_finite(case, mode, lambda *arrays: Arrays(torch, plan, *arrays).launch())
