"""Gradients by the input as a product without taps: the kernel that adds columns on the CPU (simt), the whole launches, the choice, and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import simt
from alike import check_epilogue, check_numbers_on_gpu, check_refused_on, like_h200, plans_of
from reference import DTYPES, assert_exact, dgrad, fprop
from test_implicit_gemm import H200, NVCC, asked, check_compiled, dtype_of, ids_of, torch  # noqa: F401 -- torch: a fixture

from pycuda_conv import engines
from pycuda_conv.engines.compose import columns as cs
from pycuda_conv.engines.compose.columns import Columns
from pycuda_conv.engines.direct.gemm import Gemm

simulated = pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))

#: Patches, whose pixels meet one tap; filters longer and shorter than their stride; strides of three with odd sizes, dilation, groups; no stride, or one that is
#: the dilation; one to three axes.
ONE_TAP = [
    dgrad((2, 24, 3, 4), (24, 3, 4, 4), stride=4, bias=False), dgrad((2, 8, 5, 3), (8, 5, 2, 1), stride=3, padding=(1, 0), bias=False), dgrad((1, 16, 7), (16, 2, 10), stride=12, padding=3, bias=False),
]  # fmt: skip
SEVERAL = [
    dgrad((2, 24, 5, 4), (24, 3, 8, 8), stride=4, padding=2), dgrad((2, 16, 9), (16, 1, 25), stride=10, padding=12), dgrad((1, 20, 6, 5), (20, 7, 4, 7), stride=3, padding=1),
    dgrad((2, 12, 5, 4), (12, 6, 3, 2), stride=3, dilation=2, padding=(2, 1)), dgrad((1, 16, 3, 4, 3), (16, 5, 3, 2, 3), stride=2, padding=(1, 0, 1)), dgrad((2, 12, 4, 5), (12, 2, 3, 3), stride=2, groups=3),
    dgrad((1, 24, 6, 8), (24, 3, 3, 3), padding=1), dgrad((2, 20, 5, 4), (20, 3, 3, 2), stride=2, dilation=2, padding=1),
]  # fmt: skip
MODES = [mode for mode in ("fp32", "fp32 last", "tf32", "tf32 last", "fp16", "fp16 last", "bf16 last") if dtype_of(mode) in DTYPES]


def planned(case, mode: str) -> Columns:
    found = cs.choose(asked(case, mode).launched, H200)
    assert found is not None
    return found[1]


RUNS = [(case, mode, planned(case, mode)) for case in ONE_TAP for mode in MODES]
RUNS += [(case, mode, planned(case, mode)) for case in SEVERAL for mode in MODES if dtype_of(mode) == "float32"]


@simulated
@pytest.mark.parametrize(("case", "mode", "config"), RUNS[::2], ids=ids_of(RUNS[::2]))
def test_the_launches_compute_the_gradient(case, mode, config):
    arrays, problem = case.integers(dtype_of(mode)), asked(case, mode)
    last = problem.layout == "NHWC" and problem.groups == 1
    for more in ({}, {"kept": True}, *([{"filter_last": True}] if last else [])):
        assert_exact(simt.computed(problem, config, *arrays, seeds=(1,), **more), case.reference(*arrays), config)


@simulated
def test_what_finishes_a_sum():
    for mode in ("fp32", "tf32 last"):
        check_epilogue(SEVERAL[0], mode, planned(SEVERAL[0], mode), activations=("gelu",))


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (asked(fprop((2, 8, 9, 9), (8, 8, 3, 3), stride=2), "fp32"), Columns(), "gradients by the input"), (asked(dgrad((2, 8, 9, 9), (8, 8, 1, 1)), "fp32"), Columns(), "one tap and no stride"),
        (asked(SEVERAL[0], "fp16"), Columns(), "are rounded"), (replace(asked(ONE_TAP[0], "fp16"), has_bias=True), Columns(), "are rounded"), (asked(dgrad((0, 8, 9, 9), (8, 8, 3, 3), stride=2), "fp32"), Columns(), "nothing to compute"),
        (asked(dgrad((8, 2**10, 128, 128), (2**10, 2**10, 4, 4), stride=2), "fp32"), Columns(), "32 bits"), (asked(SEVERAL[0], "fp32"), Columns("Nobody()"), "as it is printed"), (asked(SEVERAL[0], "fp32 last"), Columns("Tile()"), "in the layouts"),
    ],
    ids=lambda v: str(v)[:50],
)  # fmt: skip
def test_a_configuration_says_why_it_cannot(problem, config, reason):
    check_refused_on(H200, problem, config, reason)


def test_opencl_does_not_have_it():
    device = like_h200((0, 0), "opencl")
    assert engines.refusal(asked(SEVERAL[0], "fp32"), Columns(str(Gemm())), device) is not None


def test_it_is_chosen_for_patches_and_long_strides():
    """Where pixels meet few taps of few channels; not where the product would have many more numbers than the result."""
    patches, audio = dgrad((16, 192, 32, 32), (192, 1, 16, 16), stride=16, bias=False), dgrad((4, 512, 500), (512, 1, 400), stride=160, padding=199)
    for mode in ("fp32", "tf32"):
        assert all(isinstance(engines.choose(asked(case, mode), H200), Columns) for case in (patches, audio))
    many = dgrad((8, 32, 16, 16), (32, 128, 16, 16), stride=8, padding=4)
    assert not isinstance(engines.choose(asked(many, "tf32"), H200), Columns)
    assert not list(cs.configs(asked(dgrad((1, 8, 20, 20), (8, 1, 17, 17), stride=2), "fp32"), H200))


def test_the_model_adds_the_product_and_its_columns():
    problem = asked(SEVERAL[1], "fp32").launched
    us, config = cs.choose(problem, H200)
    assert us == cs.time(problem, config, H200) > engines.predicted(cs._product(problem), engines.choose(cs._product(problem), H200), H200)
    assert cs.time(problem, Columns("Nobody()"), H200) is None
    assert config in list(cs.configs(problem, H200))


def test_the_order_of_sums_and_the_packed_filter_are_the_product_s():
    problem = asked(SEVERAL[1], "fp32").launched
    one, other, cut = (Columns(str(Gemm(rows, 64, 16, 8, 4, 4, split))) for rows, split in ((64, 1), (32, 1), (64, 2)))
    assert cs.sum_order(problem, one) == cs.sum_order(problem, other) != cs.sum_order(problem, cut)
    assert cs.filter_key(problem, one) is None


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
def test_the_kernel_compiles_and_does_not_spill():
    launches = [cs._launch(replace(asked(ONE_TAP[0], "fp32"), dtype=dtype), (4, 0), False) for dtype in ("float16", "bfloat16", "float32", "float64")]
    check_compiled({launch.source(): (launch, "") for launch in launches})


# ---- on the GPU


@cache
def plans() -> dict:
    return plans_of("columns", RUNS)


@pytest.mark.gpu
@pytest.mark.parametrize("run", RUNS, ids=ids_of(RUNS))
def test_on_the_gpu(torch, run):  # noqa: F811
    check_numbers_on_gpu(torch, plans()[str(run)], *run[:2])
