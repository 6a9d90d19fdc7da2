"""NCHW arrays by way of channels last: the kernel that transposes on the CPU (simt), the launches of other engines on other buffers, and, on an sm_90 GPU, their numbers."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import simt
from alike import check_compiled, check_epilogue, check_refused_on, check_steps, like_h200
from filters import Filter
from modes import H200, asked, dtype_of, ids_of
from on_gpu import Arrays, check_on_gpu, side_by_side
from reference import DTYPES, NVCC, assert_close, assert_exact, dgrad, fprop

from pycuda_conv import Plan, engines
from pycuda_conv.engines.compose import via_nhwc as vn
from pycuda_conv.engines.compose.delegate import parsed
from pycuda_conv.engines.compose.via_nhwc import ViaNchw, ViaNhwc
from pycuda_conv.engines.hopper.gemm import ImplicitGemm
from pycuda_conv.engines.schedule import RESULT
from pycuda_conv.plan import as_called
from pycuda_conv.runtime.base import KernelLaunch
from pycuda_conv.tools import families

MODES = tuple(mode for mode, dtype in (("fp16", "float16"), ("bf16", "bfloat16"), ("tf32", "float32")) if dtype in DTYPES)
simulated = pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))

#: Planes of every multiple, channels too, groups, depthwise, one channel in or out, one pixel, gradients, one to three axes.
CASES = [
    fprop((2, 24, 9, 8), (40, 24, 3, 3), padding=1), fprop((2, 70, 7, 7), (9, 70, 3, 2), padding=(1, 0)), fprop((3, 64, 6, 5), (64, 8, 3, 3), padding=1, groups=8),
    fprop((2, 1, 20, 18), (24, 1, 5, 5), stride=2, padding=2), fprop((2, 16, 11, 12), (1, 16, 3, 3), padding=1), fprop((2, 40, 7, 9), (40, 1, 3, 3), padding=1, groups=40),
    fprop((2, 12, 3, 3), (20, 12, 3, 3)), fprop((2, 16, 51), (48, 16, 5), padding=2), dgrad((2, 40, 9, 8), (40, 24, 3, 3), padding=1), dgrad((2, 24, 6, 5), (24, 70, 3, 2), stride=2),
    fprop((1, 8, 4, 6, 5), (40, 8, 3, 3, 2), padding=(1, 0, 1)), fprop((2, 16, 3, 6, 5), (24, 16, 1, 3, 3), padding=(0, 1, 1)),
]  # fmt: skip
FILTERS = [
    Filter((2, 24, 9, 8), (40, 24, 3, 3), padding=(1,)), Filter((3, 65, 7, 7), (136, 65, 1, 1)), Filter((2, 3, 21, 18), (17, 3, 3, 2), stride=(2,)), Filter((2, 64, 6, 5), (64, 8, 3, 3), padding=(1,), groups=8),
    Filter((2, 1, 50), (12, 1, 5), padding=(2,)), Filter((2, 16, 4, 6, 5), (40, 16, 3, 3, 1), padding=(1, 0, 0)),
    Filter((2, 16, 3, 6, 5), (24, 16, 1, 3, 3), padding=(0, 1, 1)),
]  # fmt: skip


def problem_of(case, mode: str):
    return case.problem(dtype_of(mode), layout="NCHW") if isinstance(case, Filter) else asked(case, mode)


def planned(case, mode: str) -> ViaNhwc:
    """What would be chosen if the arrays had their channels last."""
    return ViaNhwc(str(engines.choose(vn._transposed(problem_of(case, mode).launched), H200)))


#: Each case in one of the modes.
SOME = [(case, mode, planned(case, mode)) for i, case in enumerate([*CASES, *FILTERS]) for mode in MODES[i % len(MODES) :][:1]]


def of_float32(case):
    """The gradient of a filter of float32 from arrays with their channels last, in fp32, and what is chosen by way of NCHW."""
    problem = case.problem("float32", "NHWC", "fp32")
    return problem, vn.choose(problem.launched, H200)[1]


#: A product that packs both arrays, its sum in parts and whole.
PACKED = ViaNchw(str(ImplicitGemm(64, 64, 2))), ViaNchw(str(ImplicitGemm(64, 64, 2, 2)))


@simulated
@pytest.mark.parametrize(("case", "config"), [*((case, None) for case in FILTERS), *((FILTERS[1], config) for config in PACKED)], ids=str)
def test_gradients_of_filters_of_float32_go_by_way_of_nchw(case, config):
    (problem, found), arrays = of_float32(case), case.integers("float32")
    assert type(found) is ViaNchw
    assert_exact(simt.computed(problem, config or found, *arrays, seeds=(1,)), case.reference(*arrays), config)


def test_gradients_of_filters_of_float32_are_made_as_their_arrays_lie():
    """No copy in NCHW is asked for; other types and other directions take no way round."""
    problem, config = of_float32(FILTERS[0])
    assert as_called(problem, H200) == problem and engines.refusal(problem, config, H200) is None
    assert vn.choose(FILTERS[0].problem("float32", "NHWC").launched, H200) is None
    assert "is for arrays that lie so" in engines.refusal(problem, ViaNhwc(config.DELEGATE), H200)
    assert engines.refusal(FILTERS[0].problem("float32", "NCHW"), config, H200) is not None
    kernels = [launch.kernel for step in engines.schedule(problem, config, H200).whole for launch in step]
    assert kernels[0] == "via_nhwc_two" and "via_nhwc" not in kernels


@simulated
@pytest.mark.parametrize("case", [Filter((2, 13, 6, 7), (19, 13, 1, 1), layout="NCHW"), Filter((2, 16, 9, 7), (19, 16, 5, 3), padding=(2, 1), layout="NCHW"), Filter((2, 3, 12, 10), (17, 3, 3, 2), stride=(2,), layout="NCHW")], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_channels_are_filled_up_by_the_launch_that_transposes(case, dtype):
    """But taps are folded by another."""
    problem, arrays, config = case.problem(dtype), case.integers(dtype), ViaNhwc("WgradNhwc(BLOCK_M=64, BLOCK_N=64, STAGES=2, SPLIT=2)")
    assert_exact(simt.computed(problem, config, *arrays, seeds=(1,)), case.reference(*arrays))
    met = [launch.kernel for step in engines.schedule(problem, config, H200).whole for launch in step]
    assert met[:-1] == ["via_nhwc_two", *["fold_channels"] * (case.x[1] == 3), "hopper_wgrad"]


def test_all_of_them_run():
    assert all(config is not None and engines.refusal(problem_of(case, mode), config, H200) is None for case, mode, config in SOME)
    assert len({config.DELEGATE.partition("(")[0] for _, _, config in SOME}) > 5


@simulated
@pytest.mark.parametrize(("case", "mode", "config"), SOME, ids=ids_of(SOME))
def test_the_launches_compute_the_convolution(case, mode, config):
    arrays = case.integers(dtype_of(mode))
    options = ({},) if isinstance(case, Filter) else ({}, {"kept": True})
    for more in options:
        assert_exact(simt.computed(problem_of(case, mode), config, *arrays, seeds=(1,), **more), case.reference(*arrays), config)


@simulated
def test_what_finishes_a_sum():
    case = CASES[0]
    check_epilogue(case, "fp16", planned(case, "fp16"), activations=("gelu", "relu6"))


@simulated
@pytest.mark.parametrize(("nbytes", "vectors"), [(2, (8, 4, 2, 1)), (4, (4, 2, 1))])
def test_matrices_are_transposed(nbytes, vectors):
    """Tiles of every shape, their tails, and every width of loads and stores."""
    kind, met = {2: np.uint16, 4: np.uint32}[nbytes], set()
    def transposed(*both):
        arrays = [np.random.default_rng(one.rows).integers(1, 1 << 8 * nbytes, (3, one.rows, one.columns), kind) for one in both]
        launches = [one.launch(2 * i, 2 * i + 1) for i, one in enumerate(both)]
        met.update((launch.arguments.vector, launch.arguments.wide, launch.arguments.row_bits) for launch in launches)
        pairs = ((np.frombuffer(given.tobytes(), np.uint8).copy(), np.full(one.nbytes, 0xFF, np.uint8)) for one, given in zip(both, arrays, strict=True))
        memory = SimpleNamespace(buffers=[buffer for pair in pairs for buffer in pair])
        simt.run([[vn._together(*launches) if len(both) == 2 else launches[0]]], memory, 1)
        for i, (one, given) in enumerate(zip(both, arrays, strict=True)):
            found = memory.buffers[2 * i + 1].view(kind).reshape(3, one.columns, one.pitch)
            assert np.array_equal(found[..., : one.rows], given.transpose(0, 2, 1)) and not found[..., one.rows :].any(), one

    for rows, columns in product((1, 3, 6, 16, 24, 37, 64, 136), (2, 5, 12, 72, 200)):
        one, zeros = vn._Transposition(vn.INPUT, 3, rows, columns, nbytes), -rows % (16 // nbytes)
        if columns in (5, 72) and zeros:
            transposed(replace(one, zeros=zeros), one)
        transposed(one)
    assert {vector for vector, _, _ in met} == set(vectors) and {wide for _, wide, _ in met} == {0, 1}
    assert {bits for _, _, bits in met} == {2, 3, 4, 5}


# ---- what is legal, and the choice

BASE = CASES[0]


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (asked(BASE, "fp32"), ViaNhwc(), "float16 and bfloat16"), (asked(BASE, "fp16 last"), ViaNhwc(), "in the layouts NCHW, CNHW, CHWN, not in NHWC"), (asked(fprop((0, 8, 5, 5), (8, 8, 3, 3)), "fp16"), ViaNhwc(), "nothing to compute"),
        (asked(fprop((2, 2**14, 256, 257), (8, 2**14, 1, 1)), "fp16"), ViaNhwc(), "32 bits"), (asked(BASE, "fp16"), ViaNhwc("Tile()"), "takes arrays in the layouts NCHW, CNHW, not in NHWC"),
        (asked(BASE, "fp16"), ViaNhwc("DenseNhwc(BLOCK_M=96)"), "BLOCK_M must be one of 64, 128"), *((asked(BASE, "fp16"), ViaNhwc(text), "as it is printed") for text in ("", "1", "Gemm", "Gemm(1)", "a.Gemm()", "Nobody()", "Gemm(BLOCK_M='a')", "Gemm(BLOCK_M=print())")),
    ],
    ids=lambda v: str(v)[:50],
)  # fmt: skip
def test_a_configuration_says_why_it_cannot(problem, config, reason):
    check_refused_on(H200, problem, config, reason)


def test_other_gpus_do_not_have_it():
    for capability, backend in (((8, 0), "cuda"), ((0, 0), "opencl")):
        assert engines.refusal(asked(BASE, "fp16"), planned(BASE, "fp16"), like_h200(capability, backend)) is not None


def test_buffers_that_are_transposed_lie_in_the_workspace():
    """The delegate's launches meet none of the arrays themselves, and none of each other's memory."""
    problem, config = replace(asked(BASE, "fp16"), has_residual=True), ViaNhwc(str(engines.choose(asked(BASE, "fp16 last"), H200)))
    made, delegate = engines.schedule(problem, config, H200), engines.schedule(replace(problem, layout="NHWC"), parsed(config.DELEGATE), H200)
    first, *rest, last = made.steps
    assert [launch.kernel for launch in (*first, *last)] == ["via_nhwc"] * 3 and len(rest) == len(delegate.steps)
    assert last[0].buffers[1] == RESULT and made.filter_bytes == delegate.filter_bytes and made.workspace_bytes >= delegate.workspace_bytes + 2 * sum(np.prod(shape) for shape in (problem.input_shape, problem.result_shape, problem.result_shape))
    for step in rest:
        for launch in step:
            places = [place if isinstance(place, tuple) else (place, 0) for place in launch.buffers] + [(described.buffer, described.offset) for described in launch.maps]
            assert not {vn.INPUT, vn.RESIDUAL, vn.RESULT} & {buffer for buffer, _ in places}


def test_it_is_chosen_where_it_pays_and_its_texts_are_listed():
    listed, r, chosen = list(vn.variants(H200)), random.Random(7), 0
    for family, _ in product(("dense 3x3", "grouped", "audio", "volume", "odd"), range(4)):
        try:
            problem = families.problem(families.layer(r, family), r.choice(("dgrad", "wgrad")), "float16", "fp32", "NCHW").launched
        except ValueError:
            continue
        found, config = vn.choose(problem, H200), engines.choose(problem, H200)
        if found is None:
            continue
        us, own = found
        assert us == vn.time(problem, own, H200) > engines.predicted(vn._transposed(problem), parsed(own.DELEGATE), H200)
        chosen += config == own
        for launch in (launch for step in vn.schedule(problem, own, H200).whole for launch in step):
            assert launch.kernel != "via_nhwc" or any(launch in one for one in listed)
    assert chosen > 4


def test_the_order_of_sums_is_the_inner_engine_s():
    problem = FILTERS[0].problem(layout="NCHW").launched
    one, other, cut = (ViaNhwc(f"WgradNhwc(BLOCK_M={rows}, SPLIT={split})") for rows, split in ((64, 1), (128, 1), (128, 2)))
    assert vn.sum_order(problem, one) == vn.sum_order(problem, other) != vn.sum_order(problem, cut)
    assert vn.filter_key(problem, one) is None


def test_steps_fit_their_kernel():
    check_steps(vn.schedule(asked(BASE, "fp16"), planned(BASE, "fp16"), H200), "via_nhwc")


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
def test_the_kernel_compiles_and_does_not_spill():
    launches = [vn._Transposition(vn.INPUT, 3, 8, 8, nbytes).launch(0, 1) for nbytes in (2, 4)]
    assert all(isinstance(launch, KernelLaunch) for launch in launches)
    check_compiled({launch.source(): (launch, "") for launch in launches})


# ---- on the GPU

RUNS = [(case, mode, planned(case, mode)) for case in [*CASES, *FILTERS] for mode in MODES]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "config"), [(case, config) for case in FILTERS for config in (None, *PACKED)], ids=str)
def test_gradients_of_filters_of_float32_on_the_gpu(torch, case, config):
    problem, found = of_float32(case)
    plan = Plan(problem, "cuda", config=config or found)
    arrays = case.integers("float32")
    assert_exact(Arrays(torch, plan, *arrays).launch(), case.reference(*arrays), plan)
    arrays = case.normals("float32")
    ref = case.reference(*arrays)
    assert_close(Arrays(torch, plan, *arrays).launch(), ref, case.bound(*arrays, ref), plan)


@cache
def plans() -> dict:
    return side_by_side("by way of channels last", lambda run: Plan(problem_of(*run[:2]), "cuda", config=run[2]), RUNS)


@pytest.mark.gpu
@pytest.mark.parametrize("run", RUNS, ids=ids_of(RUNS))
def test_on_the_gpu(torch, run):
    check_on_gpu(torch, plans()[str(run)], *run[:2])
