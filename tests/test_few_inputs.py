"""Convolutions of few channels, channels last and in NCHW (``few_inputs.cu``): exact, against float64, on the CPU (simt) and on a GPU."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import simt
from alike import (
    check_epilogue,
    check_integers,
    check_normals,
    check_numbers_on_gpu,
    check_refused_on,
    like_h200,
    plans_of,
    random_problems,
    sharing,
)
from reference import ACTIVATIONS, DTYPES, EPS, Case, assert_close, dgrad, fprop
from test_implicit_gemm import (
    H200,
    NVCC,
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
from pycuda_conv.engines.mma import few_inputs as fi
from pycuda_conv.engines.mma.few_inputs import FewInputs

on_cpu = pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
MODES = tuple(mode for mode, dtype in (("fp32 last", "float32"), ("tf32 last", "float32"), ("fp16 last", "float16"), ("bf16 last", "bfloat16")) if dtype in DTYPES)
PLANES = tuple(mode.split()[0] for mode in MODES)  # of NCHW arrays

#: Tails of channels, rows and columns; pixels that begin at odd elements, and rows of taps that end there; strides, padding, dilation, one to three axes; taps that
#: are beside one another and apart; gradients, which take the taps in reverse.
CASES = [
    fprop((2, 3, 19, 40), (20, 3, 3, 3), stride=2, padding=1), fprop((1, 3, 15, 37), (24, 3, 3, 3), padding=1), fprop((1, 1, 20, 33), (16, 1, 7, 7), stride=2, padding=3),
    fprop((2, 4, 9, 12), (70, 4, 4, 4), stride=4), fprop((1, 3, 9, 50), (33, 3, 5, 5), padding=2), fprop((2, 1, 300), (32, 1, 10), stride=5), fprop((1, 2, 90), (13, 2, 3), padding=1),
    fprop((1, 3, 5, 12, 14), (40, 3, 3, 3, 3), padding=1), fprop((1, 4, 14, 15), (12, 4, 3, 3), dilation=2, padding=2), fprop((1, 5, 14, 15), (9, 5, 2, 3), dilation=(2, 1), stride=(3, 1), padding=1),
    fprop((1, 2, 11, 12), (48, 2, 3, 2), padding=((0, 2), (3, 1))), fprop((40, 1, 3, 3), (128, 1, 1, 1)),
    dgrad((2, 3, 9, 8), (3, 40, 3, 3), padding=1), dgrad((1, 1, 12, 20), (1, 16, 5, 5), padding=2), dgrad((1, 4, 7, 9), (4, 20, 3, 2), dilation=(2, 3), padding=1), dgrad((1, 2, 3, 4, 9), (2, 24, 1, 3, 3), padding=(0, 1, 1)),
]  # fmt: skip
#: Those of planes alone: groups, more channels than the other layout's.
GROUPS = [
    fprop((2, 12, 9, 18), (20, 3, 3, 3), padding=1, groups=4), fprop((1, 32, 7, 20), (36, 16, 3, 3), padding=1, stride=2, groups=2), dgrad((1, 24, 6, 17), (24, 6, 3, 3), padding=1, groups=4),
    fprop((2, 17, 5, 24), (70, 17, 3, 1), padding=1), dgrad((1, 6, 4, 6, 9), (6, 3, 3, 3, 3), padding=1, groups=2),
]  # fmt: skip


def tiles(case: Case, mode: str) -> list[FewInputs]:
    """All that run it."""
    every = (FewInputs(block, columns) for block in fi.CHANNELS for columns in fi.COLUMNS)
    return [config for config in every if fi.refusal(asked(case, mode), config) is None]


#: Each case in each mode, with a tile of its own.
def runs(cases: list[Case], modes: tuple[str, ...]) -> list[tuple[Case, str, FewInputs]]:
    possible = ((i, case, j, mode, tiles(case, mode)) for i, case in enumerate(cases) for j, mode in enumerate(modes))
    return [(case, mode, found[(5 * i + 3 * j) % len(found)]) for i, case, j, mode, found in possible if found]


LAST, OF_PLANES = runs(CASES, MODES), runs([*CASES, *GROUPS], PLANES)
RUNS = [*LAST, *OF_PLANES]
SOME = sharing([[run for run in of if run[0] is case] for of in (LAST, OF_PLANES) for case in (*CASES, *GROUPS)])  # each case once in either layout


@on_cpu
@pytest.mark.parametrize(("case", "mode", "config"), SOME, ids=ids_of(SOME))
def test_integers_are_exact(case, mode, config):
    check_integers(case, mode, config, (1,), filter_last=SOME.index((case, mode, config)) % 3 == 0)


@on_cpu
@pytest.mark.parametrize("mode", (*MODES, *PLANES))
def test_random_data(mode):
    for case in (CASES[0], CASES[4], CASES[12]) if mode in MODES else (CASES[4], GROUPS[2]):
        for config in tiles(case, mode)[:: 12 if "32" in mode else 5]:
            check_normals(case, mode, config)


@on_cpu
@pytest.mark.parametrize("mode", ["fp32 last", "fp32"])
@pytest.mark.parametrize("scenario", ["images of their own ranges", "halves 2^-30", "small channels 2^-40"])
def test_float32_of_every_range(scenario, mode):
    """Halves lose bits of small numbers, and make a NaN of Inf: the plain cores compute those tiles again."""
    case = fprop((4, 3, 3, 16), (40, 3, 2, 2), bias=False)
    x, w = data(scenario, case)
    got = simt.computed(asked(case, mode), FewInputs(48, 16), x, w, seeds=(1,))
    check_scenario(case, mode, x, w, got, scenario)


@on_cpu
@pytest.mark.parametrize("mode", ["fp32 last", "fp32"])
@pytest.mark.parametrize("which", [0, 1], ids=["input", "filter"])
def test_the_largest_number(which, mode):
    """It rounds to Inf, and Inf less Inf is NaN."""
    case = fprop((2, 3, 4, 5), (8, 3, 2, 2), bias=False)
    arrays = [np.full(shape, 2.0**-60, "f") for shape in (case.input_shape, case.weight_shape)]
    arrays[which][1, 1, 1, 1], arrays[1 - which][0] = np.finfo("f").max, 2.0**-10
    got = simt.computed(asked(case, mode), FewInputs(16, 16), *arrays, seeds=(1,))
    expected = case.reference(*arrays)
    assert_close(got, expected, EPS["float32"] * expected)


@on_cpu
@pytest.mark.parametrize("multiprocessors", [1, 1000])
def test_blocks_of_many_tiles_and_of_one(multiprocessors):
    for case in (CASES[0], CASES[7]):
        check_integers(case, MODES[-1], FewInputs(32, 16), (1,), multiprocessors=multiprocessors)


@on_cpu
def test_all_tiles_give_the_same_bits():
    for mode in (MODES[-1], PLANES[-1]):
        arrays = CASES[4].normals(dtype_of(mode), seed=3)
        found = {simt.computed(asked(CASES[4], mode), config, *arrays, seeds=(1,)).tobytes() for config in tiles(CASES[4], mode)[:: 1 if mode in MODES else 3]}
        assert len(found) == 1


@on_cpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("channels", [24, 19])
def test_the_epilogue(mode, channels):
    """Bias, scale, residual and ReLU; then each activation, with a residual and without; of pixels that are written at once, and not."""
    case, config = fprop((2, 3, 7, 9), (channels, 3, 3, 3), padding=1), FewInputs(32, 16)
    check_epilogue(case, mode, config, ACTIVATIONS if channels == 24 else ACTIVATIONS[:2])


@on_cpu
@pytest.mark.parametrize("mode", PLANES)
@pytest.mark.parametrize("width", [9, 10, 16])
def test_the_epilogue_of_planes(mode, width):
    """Results of 16 bytes of neighbouring pixels that are written at once, by twos and one by one."""
    check_epilogue(fprop((2, 3, 5, width), (19, 3, 3, 3), padding=1), mode, FewInputs(32, 16), ACTIVATIONS[width % 3 :: 3])


@on_cpu
@pytest.mark.parametrize(("old", "new"), [
    ("__syncthreads();  // the patch before has been read", ""), ("    __syncthreads();\n#if TYPE == 32", "#if TYPE == 32"), ("mask &= 0xffff0000;", ""), ("mask = 0xffff;", "mask = ~0u;"),
    ("odd ? (uint32_t)arg.copy_at : now", "now"), ("copies_wait<1>();", "copies_wait<2>();"), ("(uint32_t)arg.stage_bytes - now);", "now);"),
    ("if (i >= (int)arg.words) at = mask = 0;", "if (i >= (int)arg.words) at = 0;"), ("/ NEIGHBOURS * 2 + k % 2", "/ 4 * 2 + k % 2"),
])  # fmt: skip
def test_a_broken_kernel_is_noticed(old, new):
    padding = 0 if "0xffff;" in old else 1  # a row of taps ends in the middle of a word, or begins there
    case = fprop((2, 3, 31, 80), (20, 3, 3, 3), padding=padding)
    arrays = list(case.normals("float16", seed=2))
    arrays[0][0, 2 if "0xffff0000" in old else 0, 5, 5] = np.inf  # what is beside a row of taps must not meet it
    problem, config = asked(case, "fp16 last"), FewInputs(32, 16)
    with np.errstate(all="ignore"):
        right = simt.computed(problem, config, *arrays, seeds=(1,), multiprocessors=1)
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            wrong = simt.computed(problem, config, *arrays, seeds=range(1, 6), multiprocessors=1, broken=(old, new))
            same = wrong.tobytes() == right.tobytes()
            assert same


FINITE = [replace(fprop((2, 3, 9, 10), (24, 3, 3, 3), padding=1), bias=False), replace(dgrad((2, 3, 6, 5), (3, 24, 3, 3), padding=1), bias=False)]


@on_cpu
@pytest.mark.parametrize("mode", (*MODES, *PLANES))
@pytest.mark.parametrize("case", FINITE, ids=str)
def test_what_is_not_finite_reaches_its_own_results_only(case, mode):
    check_not_finite(case, mode, lambda x, w, b: simt.computed(asked(case, mode), FewInputs(32, 16), x, w, b, seeds=(1,)))


# ---- what is legal, and the choice

BASE = CASES[0]


@pytest.mark.parametrize(
    ("case", "mode", "config", "reason"),
    [
        (replace(BASE, options={"groups": 3}, weight_shape=(21, 1, 3, 3)), "fp16 last", FewInputs(), "of one group"),
        (replace(BASE.problem("float16"), direction="wgrad"), None, FewInputs(), "takes arrays in the layouts"),
        (fprop((0, 3, 4, 4), (4, 3, 1, 1)), "fp16 last", FewInputs(), "nothing to compute"), (BASE.problem("float64"), None, FewInputs(), "float32, float16 and bfloat16 arrays"),
        (dgrad((2, 3, 4, 4), (3, 8, 3, 3), stride=2), "fp16 last", FewInputs(), "without stride"), (fprop((1, 3, 9, 9), (4, 3, 3, 3), dilation=3), "fp16 last", FewInputs(), "multiples of 4 bytes"),
        (fprop((1, 4, 2**15, 2**14), (4, 4, 3, 3)), "fp16 last", FewInputs(), "in 32 bits"), (BASE, "fp16 last", FewInputs(24), "BLOCK_N must be one of 16, 32, 48, 64"),
        (BASE, "fp16 last", FewInputs(64, 48), "COLUMNS must be one of 16"), (fprop((1, 4, 40, 40), (64, 4, 30, 30)), "fp16 last", FewInputs(), "bytes of shared memory"),
    ],
    ids=lambda v: str(v)[:40],
)  # fmt: skip
def test_a_configuration_says_why_it_cannot(case, mode, config, reason):
    check_refused_on(H200, asked(case, mode) if mode else case, config, reason)


def test_other_devices_do_not_have_it():
    for capability, backend in (((7, 5), "cuda"), ((0, 0), "opencl")):
        assert engines.refusal(asked(BASE, "fp16 last"), FewInputs(), like_h200(capability, backend)) is not None


def test_the_choice_is_legal_and_its_texts_are_listed():
    """Of random layers of the families that it is for, and others: what is chosen, and each candidate's launches."""
    listed, r, met = list(fi.variants(H200)), random.Random(4), 0
    kinds = [(way, (*kind, layout)) for layout in ("NHWC", "NCHW") for way, *kind in (("fprop", "float32", "tf32"), ("fprop", "bfloat16", "fp32"), ("dgrad", "float16", "fp32"))]
    for problem in random_problems(r, ("last", "first", "dense 3x3", "odd", "audio", "volume", "grouped"), 6, kinds):
        found = list(fi.configs(problem, H200))
        if not found:
            assert fi.choose(problem, H200) is None
            continue
        assert fi.choose(problem, H200)[1] in found
        program = fi.schedule(problem, r.choice(found), H200)
        for launch in (launch for step in (*program.whole, *program.filter_last) for launch in step):
            assert any(launch in one for one in listed), launch.defines
            assert 0 < launch.grid and launch.shared <= fi.SHARED_BYTES and launch.arguments.workers <= launch.arguments.tiles
            met += 1
    assert met > 50


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_first_layers_choose_it(dtype, layout):
    problem = ConvProblem.forward(2, (32, 3, 224, 224), (32, 3, 3, 3), stride=2, padding=1, dtype=dtype, layout=layout)
    assert isinstance(engines.choose(problem, H200), FewInputs)


def test_rows_of_an_odd_number_of_results_do_not_in_nchw():
    """Each would be written by itself: 466 us of an H100, and 177 by hopper/gemm.cu."""
    problem = ConvProblem.forward(1, (8, 1, 80000), (512, 1, 10), stride=5, dtype="float16")
    assert not isinstance(engines.choose(problem, H200), FewInputs)


def test_layers_of_many_channels_do_not():
    problem = ConvProblem.forward(2, (8, 128, 56, 56), (128, 128, 3, 3), padding=1, dtype="float16", layout="NHWC")
    assert not isinstance(engines.choose(problem, H200), FewInputs)


# ---- the kernel, compiled


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
def test_the_kernels_compile_and_do_not_spill():
    steps = {}
    for mode in (*MODES, *PLANES):
        for block in fi.CHANNELS:
            problem, config = asked(BASE, mode), FewInputs(block)
            ((launch,),) = fi.schedule(problem, config, H200).whole
            for arch in ("sm_90a", "sm_80"):
                steps[launch.source(), arch] = replace(launch, arch=arch), f"{problem} {config}"
    check_compiled(steps, 160)  # before the first tile, and where an activation is called


# ---- on the GPU


@cache
def plans() -> dict:
    """The plans of all runs."""
    return plans_of("few inputs", RUNS)


@pytest.mark.gpu
@pytest.mark.parametrize("run", RUNS, ids=ids_of(RUNS))
def test_on_the_gpu(torch, run):  # noqa: F811
    case, mode, _ = run
    plan = plans()[str(run)]
    check_numbers_on_gpu(torch, plan, case, mode)
    on_gpu = Arrays(torch, plan, *case.normals(dtype_of(mode), seed=2))
    assert on_gpu.launch().tobytes() == on_gpu.launch(filter_last=True).tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", (*MODES, *PLANES))
@pytest.mark.parametrize("case", FINITE, ids=str)
def test_what_is_not_finite_on_the_gpu(torch, case, mode):  # noqa: F811
    plan = Plan(asked(case, mode), "cuda", config=FewInputs(32, 16))
    check_not_finite(case, mode, lambda *arrays: Arrays(torch, plan, *arrays).launch())
