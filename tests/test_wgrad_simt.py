"""Gradients of filters from channels-last arrays: the kernels' own text, run on the CPU (simt)."""

from __future__ import annotations

import random

import pytest
import simt
from alike import sharing
from reference import assert_close, assert_exact
from test_implicit_gemm import H200
from test_wgrad_nhwc import (
    CONFIGS,
    CONFIGS_PLANES,
    CONFIGS_TF32,
    DEEP,
    FEW,
    NOT_FINITE,
    PAIRS,
    PLANES,
    PLANNED,
    PRECISE,
    PRECISE_FLIPPED,
    TYPES,
    Filter,
    check_met_only,
    check_not_finite,
    check_precise,
    configs_of,
    flipped,
    ids_of,
    precise,
)

from pycuda_conv.engines.hopper import wgrad as wn
from pycuda_conv.engines.hopper.wgrad import WgradNhwc

pytestmark = pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))

RUNS = sharing([[(case, dtype, case.legal(config, dtype)) for config in configs_of(dtype)] for case, dtype in PLANNED], lambda case, dtype: case.problem(dtype))
HALVES = [dtype for dtype in TYPES if dtype != "float32"]
RUNS += [(DEEP, HALVES[i % len(HALVES)], config) for i, config in enumerate((*CONFIGS, WgradNhwc(128, 192, 5), WgradNhwc(64, 64, 6, 5)))]
RUNS += [(case, HALVES[i % len(HALVES)], CONFIGS_PLANES[(i + more) % len(CONFIGS_PLANES)]) for i, case in enumerate(PLANES) for more in (0, 2)]
RUNS += [(case, dtype, flipped(4 if dtype == "float32" else 2, i)) for i, case in enumerate(FEW) for dtype in TYPES[i % len(TYPES) :][:1]]
RUNS += [(case, HALVES[i % len(HALVES)], config) for i, (case, config) in enumerate(PAIRS)]
RUNS += [(DEEP, "float32", config) for config in CONFIGS_TF32[::2] if "float32" in TYPES]


@pytest.mark.parametrize(("case", "dtype", "config"), RUNS, ids=ids_of(RUNS))
def test(case, dtype, config):
    arrays = case.integers(dtype)
    turn = RUNS.index((case, dtype, config))
    seeds = (1 + turn % 3,) if turn % 4 or (case, dtype) == (DEEP, "float32") else (1, 2)
    lasting = turn % 2 == 1 and case.has_taps
    assert_exact(simt.computed(case.problem(dtype), config, *arrays, seeds=seeds, filter_last=lasting), case.reference(*arrays), config)


@pytest.mark.parametrize("seed", range(6))
def test_what_the_planner_chooses(seed):
    r = random.Random(seed)
    groups, taps, stride, dilation = r.choice((1, 1, 1, 2)), r.choice((1, 2, 3, 5)), r.choice((1, 1, 2, 3)), r.choice((1, 1, 2))
    c, k, size = r.choice((16, 24, 64, 200)), r.choice((16, 64, 136)), tuple(r.randint(9, 17) for _ in range(2))
    case = Filter((r.randint(1, 4), c * groups, *size), (k * groups, c, taps, taps), (stride,), (taps // 2,), (dilation,), groups)
    dtype = TYPES[seed % len(TYPES)]
    arrays, (_, config) = case.integers(dtype), wn.choose(case.problem(dtype).launched, H200)
    assert_exact(simt.computed(case.problem(dtype), config, *arrays, seeds=(seed,), filter_last=case.has_taps), case.reference(*arrays), config)


def test_numbers_at_random():
    """Within the bound of an honest sum."""
    for dtype in TYPES:
        arrays = DEEP.normals(dtype)
        ref = DEEP.reference(*arrays)
        assert_close(simt.computed(DEEP.problem(dtype), WgradNhwc(128, *((128, 3) if dtype == "float32" else (192, 5)), 2), *arrays), ref, DEEP.bound(*arrays, ref))


@pytest.mark.parametrize(("case", "config"), [*PRECISE, *PRECISE_FLIPPED], ids=str)
def test_float32(case, config):
    arrays = case.integers("float32")
    assert_exact(simt.computed(precise(case), config, *arrays, filter_last=case.has_taps), case.reference(*arrays), config)


def test_float32_at_random():
    check_precise(lambda case, x, dy: simt.computed(precise(case), WgradNhwc(64, 64, 4, 2), x, dy), Filter((2, 24, 9, 11), (40, 24, 1, 2)))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_float32_that_is_not_finite(value):
    check_not_finite(lambda case, x, dy: simt.computed(precise(case), WgradNhwc(64, 64, 4), x, dy), "float32", (value,))


def test_what_is_not_finite():
    check_not_finite(lambda case, x, dy: simt.computed(case.problem(), WgradNhwc(64, 128, 4, 2), x, dy))


@pytest.mark.parametrize("case", NOT_FINITE, ids=str)
def test_flipped_tiles_keep_what_is_not_finite_to_its_results(case):
    check_met_only(case, lambda case, x, dy: simt.computed(case.problem(), WgradNhwc(128, 64, 4, 2, True), x, dy))


@pytest.mark.parametrize(
    ("text", "instead", "config"),
    [
        ("named_barrier(1, CONSUMER_THREADS);  // all sums are there", "", WgradNhwc(256, 64, 4)), ("wgmma_wait<behind>();", "wgmma_wait<behind + 1>();", WgradNhwc(64, 64, 2)),
        ("(of.dy_blocks + of.x_blocks) * BLOCK_BYTES", "STAGE_BYTES", WgradNhwc(64, 128, 2)), ("ring.wait_full(at);", "", WgradNhwc(64, 64, 2)),
        ("of_b + B::STEP * k, !(", "of_b + 2 * k, !(", WgradNhwc(64, 64, 2)),
    ],
    ids=lambda v: str(v)[:40],
)  # fmt: skip
def test_a_broken_kernel_is_noticed(text, instead, config):
    case = Filter((3, 24, 9, 11), (72, 24, 3, 3), padding=(1,))
    arrays = case.integers("float16")
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        assert_exact(simt.computed(case.problem(), config, *arrays, seeds=range(4), broken=(text, instead)), case.reference(*arrays))
