"""Channels that fill no 16 bytes, with channels last: copies with zeros behind them, and kernels that then read them."""

from __future__ import annotations

import pytest
import simt
from alike import check_numbers_on_gpu
from reference import DTYPES, assert_exact, dgrad, fprop
from test_implicit_gemm import (
    H200,
    Arrays,
    asked,
    dtype_of,
    emulated,
    torch,  # noqa: F401 -- a fixture
)
from test_kernels import check_refused

from pycuda_conv import Plan, engines
from pycuda_conv.engines.compose import fold_channels
from pycuda_conv.engines.compose.fold_channels import Filled

MODES = tuple(mode for mode, dtype in (("tf32 last", "float32"), ("fp16 last", "float16"), ("bf16 last", "bfloat16")) if dtype in DTYPES)
#: Odd channels on both sides, filters of one and of many taps, strides, one to three axes, both directions.
CASES = [
    fprop((2, 17, 7, 7), (29, 17, 3, 3), padding=1), fprop((3, 21, 9, 5), (30, 21, 1, 1)), fprop((1, 9, 4, 5, 6), (11, 9, 3, 2, 3), padding=1),
    dgrad((2, 19, 6, 7), (19, 26, 3, 3), stride=2, padding=1), dgrad((1, 13, 9), (13, 7, 3)), dgrad((2, 75, 5, 4), (75, 33, 1, 2)),
]  # fmt: skip
RUNS = [(case, mode) for case in CASES for mode in MODES]


def found(case, mode: str, engine: str) -> list[Filled]:
    """The configurations that let a kernel of that name run the rest."""
    return [config for config in fold_channels.configs(asked(case, mode), H200) if engine in config.DELEGATE]


@pytest.mark.parametrize(("case", "mode"), RUNS, ids=str)
def test_the_plan_computes_the_convolution(case, mode):
    """Filters in both orders, packed once and each time, in numpy."""
    configs, arrays = found(case, mode, "Dense"), case.integers(dtype_of(mode))
    for config in (configs[0], configs[-1]):
        assert_exact(emulated(case, mode, arrays, config), case.reference(*arrays), config)


@pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
@pytest.mark.parametrize(("case", "mode"), RUNS[::4], ids=str)
def test_the_kernels_compute_it(case, mode):
    """The kernels' own text, and the other kernel that copies rows."""
    arrays = case.integers(dtype_of(mode))
    for engine in ("Dense", "Gather"):
        for config, last in zip(found(case, mode, engine)[:2], (False, True), strict=False):
            got = simt.computed(asked(case, mode), config, *arrays, filter_last=last)
            assert_exact(got, case.reference(*arrays), config)


@pytest.mark.parametrize(
    ("case", "mode", "config", "reason"),
    [
        (fprop((2, 16, 5, 5), (8, 16, 3, 3)), "fp16 last", Filled(), "a multiple of 16 bytes"), (CASES[0], "fp32 last", Filled(), "it takes float16"),
        (fprop((2, 18, 5, 5), (8, 9, 3, 3), groups=2), "fp16 last", Filled(), "one group"), (CASES[0], "fp16 last", Filled("Dense"), "as it is printed"),
        (CASES[0], "fp16 last", Filled("Planes()"), "takes arrays in the layouts"),
    ],
    ids=str,
)  # fmt: skip
def test_a_configuration_says_why_it_cannot(case, mode, config, reason):
    check_refused(fold_channels.LEGAL.refusal, lambda problem, config: engines.schedule(problem, config, H200), asked(case, mode), config, reason)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "mode"), [*RUNS, *((fprop((5, 75, 28, 27), (109, 75, 3, 5), padding=1), mode) for mode in MODES)], ids=str)
def test_on_the_gpu(torch, case, mode):  # noqa: F811
    for config in found(case, mode, "")[::3]:
        plan = Plan(asked(case, mode), "cuda", config=config)
        check_numbers_on_gpu(torch, plan, case, mode)
        on_gpu = Arrays(torch, plan, *case.normals(dtype_of(mode), seed=2))
        bits = on_gpu.launch().tobytes()
        assert bits == on_gpu.launch(kept=True).tobytes() == on_gpu.launch(filter_last=True).tobytes()
