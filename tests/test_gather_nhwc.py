"""Channels-last arrays whose pixels threads copy: the kernel's own text on the CPU (simt), compiled, and, on an sm_90 GPU, its numbers."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
import simt
from reference import DTYPES, Case, assert_close, assert_exact, dgrad, fprop
from test_implicit_gemm import (
    H200,
    NVCC,
    Arrays,
    asked,
    check_compiled,
    check_not_finite,
    check_on_gpu,
    check_steps,
    dtype_of,
    ids_of,
    limbs_bound,
    side_by_side,
    torch,  # noqa: F401 -- a fixture
)
from test_kernels import check_refused

from pycuda_conv import Plan, engines
from pycuda_conv.engines import gather_nhwc_sm90 as gn
from pycuda_conv.engines.gather_nhwc_sm90 import GatherNhwc
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
    found = (GatherNhwc(64, 64, 3), GatherNhwc(128, 96, 2), GatherNhwc(64, 32, 4, 8), GatherNhwc(128, 128, 5), GatherNhwc(64, 64, 6, 4))
    return [config for config in found if gn.refusal(asked(case, mode), config) is None]


PLANNED = [(case, mode) for case in CASES for mode in MODES if gn.why_not(asked(case, mode)) is None]
#: Each with a tile, taking turns.
SOME = [(case, mode, tiles(case, mode)[i % len(tiles(case, mode))]) for i, (case, mode) in enumerate(PLANNED)]


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
