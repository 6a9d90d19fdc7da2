"""The implicit GEMM engine: its planning in numpy (emulator.py), its kernels compiled, and, on an sm_90 GPU, its numbers."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import emulator
import numpy as np
import pytest
from alike import check_compiled, check_moments, check_refused, check_steps
from awkward import AWKWARD, BASE, POINT
from hypothesis import Phase, assume, given, seed, settings
from hypothesis import strategies as st
from modes import H200, MODES, asked, bound, dtype_of, ids_of, limbs_bound
from on_gpu import MARGIN, Arrays, side_by_side
from ranges import NORMED, SCENARIOS, check_not_finite, check_range, check_scenario, data, halves, with_value
from reference import NVCC, Case, assert_close, assert_exact, dgrad, fprop, tensor

import pycuda_conv as pc
from pycuda_conv import ConvProblem, Plan, engines
from pycuda_conv.engines import addressing
from pycuda_conv.engines import packing as packing_launches
from pycuda_conv.engines.addressing import flagged, packing
from pycuda_conv.engines.direct import gemm as direct_gemm
from pycuda_conv.engines.hopper import gemm as ig
from pycuda_conv.engines.hopper import gemm_tiles
from pycuda_conv.engines.hopper.dense import DenseNhwc
from pycuda_conv.engines.hopper.gemm import ImplicitGemm
from pycuda_conv.engines.mma.few_inputs import FewInputs
from pycuda_conv.runtime.base import Im2col
from pycuda_conv.tools.suite import core

# ---- the problems and the tiles


def widest(mode: str, rows: int, stages: int, split: int = 1, case: Case = BASE) -> ImplicitGemm:
    """The widest tile that is legal."""
    tiles = (ImplicitGemm(rows, pixels, stages, split) for pixels in range(1024, 0, -8))
    return next(tile for tile in tiles if ig.refusal(asked(case, mode), tile) is None)


# ---- A. Planning, emulated

#: A tile for each mode: both numbers of rows, splits, and few pixels, so that small problems have many tiles.
TILES = {
    "fp32": ImplicitGemm(64, 32, 2, 1), "fp32 last": ImplicitGemm(128, 24, 2, 2), "tf32": ImplicitGemm(128, 8, 3, 3), "tf32 last": ImplicitGemm(64, 16, 3, 1),
    "fp16": ImplicitGemm(64, 32, 2, 1), "fp16 last": ImplicitGemm(64, 64, 4, 2), "bf16": ImplicitGemm(128, 16, 2, 3), "bf16 last": ImplicitGemm(128, 48, 3, 1),
}  # fmt: skip


def emulated(case: Case, mode: str, arrays, config: ImplicitGemm | None = None, **options) -> np.ndarray:
    problem = asked(case, mode)
    if config is None:
        config = TILES[mode]
        if problem.N * math.prod(problem.result_size) > 1000:
            config = replace(config, BLOCK_N=128)
    assert engines.refusal(problem, config, H200) is None
    return emulator.emulate(problem, config, *arrays, **options)


#: Of float32 and of 16 bits, in each layout. Cases take turns in them; each kind of case has several.
BY_TURNS = [("fp32", "bf16 last"), ("tf32 last", "fp16"), ("fp32 last", "bf16"), ("tf32", "fp16 last")]
PLANNED = [(case, mode) for i, case in enumerate(AWKWARD) for mode in BY_TURNS[i % 4] if mode in MODES]


@pytest.mark.parametrize(("case", "mode"), PLANNED, ids=[f"{mode}-{case}" for case, mode in PLANNED])
def test_the_plan_computes_the_convolution(case, mode):
    """Every scalar, offset and tensor map, in numpy: exact integers, then numbers that need both limbs."""
    problem = asked(case, mode)
    if packing(problem) is None:
        assert case.transposed, "a forward convolution can always be folded"
        pytest.skip("the loads can't make it")
    arrays = case.integers(dtype_of(mode))
    assert_exact(emulated(case, mode, arrays), case.reference(*arrays), problem)
    if dtype_of(mode) == "float32":
        arrays = case.normals("float32", seed=1)
        ref = case.reference(*arrays)
        assert_close(emulated(case, mode, arrays, keep=False), ref, limbs_bound(case, mode, *arrays[:2], ref), problem)


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("split", [1, 2, 5, 30])
@pytest.mark.parametrize("multiprocessors", [1, 7, 1000])
def test_every_split_and_grid(rows, split, multiprocessors):
    arrays = BASE.integers("float32")
    for mode in ("fp32", "tf32 last"):
        got = emulated(BASE, mode, arrays, ImplicitGemm(rows, 48, 2, split), multiprocessors=multiprocessors)
        assert_exact(got, BASE.reference(*arrays))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", [BASE, fprop((3, 40, 9, 11), (72, 40, 3, 3), padding=1), dgrad((2, 64, 7, 7), (64, 72, 3, 3), stride=2, padding=1, output_padding=1)], ids=str)
def test_what_the_planner_chooses_computes_the_convolution(case, mode):
    found = emulator.fastest(ig, asked(case, mode), H200)
    arrays = case.integers(dtype_of(mode))
    assert_exact(emulated(case, mode, arrays, found[1], multiprocessors=132), case.reference(*arrays))


@pytest.mark.parametrize(("case", "by_warps"), [(fprop((1, 24, 5, 7), (264, 24, 1, 1)), 1), (dgrad((1, 16, 5, 7), (16, 132, 3, 3), padding=1, groups=2), 1), (fprop((1, 24, 5, 7), (260, 24, 1, 1)), 0), (fprop((1, 904, 3, 3), (264, 904, 1, 1)), 0)], ids=str)
def test_many_short_rows_of_a_filter_are_packed_by_warps(case, by_warps):
    mode = "tf32" if case.transposed else "fp32"
    arrays = case.integers("float32")
    ((step,),) = ig.schedule(asked(case, mode), TILES[mode], H200).prepare
    assert step.arguments.row_bits == 3 * by_warps
    assert_exact(emulated(case, mode, arrays, multiprocessors=132), case.reference(*arrays))


WHOLE = fprop((2, 64, 18, 16), (70, 64, 3, 3), padding=(0, 1))
PINGPONG = [  # (case, mode, config): consumers that alternate tiles
    (case, mode, ImplicitGemm(128, pixels, stages, split, schedule="pingpong"))
    for case, pixels, stages, split in (
        (BASE, 48, 3, 1), (BASE, 16, 4, 2), (fprop((3, 64, 12, 11), (136, 64, 3, 3), padding=1), 160, 3, 1), (fprop((2, 16, 7, 6), (9, 16, 3, 2)), 8, 5, 1),
        (fprop((2, 128, 7, 6), (80, 64, 3, 3), padding=1, groups=2), 32, 4, 3), (fprop((4, 40, 30), (70, 40, 5), padding=2, stride=3), 24, 2, 1),
        (dgrad((2, 64, 7, 7), (64, 72, 3, 3), stride=3, padding=1, output_padding=1), 32, 3, 1), (fprop((2, 16, 4, 5, 6), (9, 16, 3, 2, 3), padding=1), 56, 3, 1),
    ) for mode in ("tf32", "tf32 last", "fp16", "bf16 last") if mode in MODES
]  # fmt: skip


@pytest.mark.parametrize(("case", "mode", "config"), PINGPONG, ids=[f"{mode}-{config.BLOCK_N}-{config.SPLIT}-{case}" for case, mode, config in PINGPONG])
def test_consumers_take_tiles_by_turns(case, mode, config):
    arrays = case.integers(dtype_of(mode))
    assert_exact(emulated(case, mode, arrays, config), case.reference(*arrays))


TWINS = [  # blocks of one consumer
    (case, mode, ImplicitGemm(64, pixels, 2, schedule="twin"))
    for case, pixels in (
        (BASE, 48), (WHOLE, 128), (fprop((2, 16, 7, 6), (9, 16, 3, 2)), 16), (fprop((2, 128, 7, 6), (80, 64, 3, 3), padding=1, groups=2), 32),
        (fprop((4, 40, 30), (70, 40, 5), padding=2, stride=3), 24), (dgrad((2, 32, 7, 7), (32, 72, 3, 3), padding=1), 64),
        (fprop((2, 16, 4, 5, 6), (9, 16, 3, 2, 3), padding=1), 56), (fprop((2, 3, 20, 19), (10, 3, 7, 7), stride=2, padding=3), 104),
    ) for mode in ("fp32", "tf32", "fp16", "bf16")
    if mode in MODES and not ig.refusal(asked(case, mode), ImplicitGemm(64, pixels, 2, schedule="twin"))
]  # fmt: skip


@pytest.mark.parametrize(("case", "mode", "config"), TWINS, ids=[f"{mode}-{config.BLOCK_N}-{case}" for case, mode, config in TWINS])
def test_blocks_of_one_consumer(case, mode, config):
    arrays = case.integers(dtype_of(mode))
    assert_exact(emulated(case, mode, arrays, config), case.reference(*arrays))


COMMON = fprop((2, 64, 9, 8), (40, 64, 3, 3), padding=1, bias=False)
NOTED = [
    (case, mode, replace(TILES[mode], SPLIT=1)) for case in (
        BASE, fprop((2, 48, 7, 6), (80, 24, 3, 3), padding=1, groups=2), fprop((4, 20, 30), (17, 20, 5), padding=2, stride=3),
        fprop((2, 16, 4, 5, 6), (9, 16, 3, 2, 3), padding=(1, 0, 2)), fprop((2, 3, 20, 19), (10, 3, 7, 7), stride=2, padding=3, bias=False),
        COMMON, fprop((2, 80, 7, 8), (80, 40, 3, 3), padding=1, groups=2), fprop((4, 40, 31), (17, 40, 5), padding=2, stride=2),
        fprop((2, 72, 4, 5, 6), (9, 72, 3, 2, 3), padding=(1, 0, 2)), fprop((2, 40, 20, 19), (10, 40, 7, 7), stride=2, padding=3, bias=False),
    ) for mode in TILES if mode in MODES
]  # fmt: skip
NOTED += [(case, mode, config) for case, mode, config in PINGPONG if config.SPLIT == 1 and not case.transposed][::2]
NOT_NOTED = [(case, mode, config) for case, mode, config in NOTED if ig._moments(asked(case, mode), config) is None]
NOTED = [run for run in NOTED if run not in NOT_NOTED]


def test_moments_are_noted_but_of_what_is_seldom():
    assert len(NOTED) > 25 and len(NOT_NOTED) > 5
    for case, mode, _ in NOT_NOTED:
        problem = asked(case, mode)
        assert not gemm_tiles.is_common(gemm_tiles.defines_of(problem)) or (problem.layout == "NHWC" and not gemm_tiles.whole_rows(problem, 1)), f"{case} {mode}"


@pytest.mark.parametrize(("case", "mode", "config"), NOTED, ids=[f"{mode}-{config.BLOCK_M}-{case}" for case, mode, config in NOTED])
def test_moments_are_noted(case, mode, config):
    for arrays in (case.integers(dtype_of(mode)), case.normals(dtype_of(mode), seed=1)):
        check_moments(asked(case, mode), config, arrays)


def test_moments_of_results_that_were_computed_again_say_so():
    x, w, _ = COMMON.normals("float32", seed=1)
    x = halves(x, -40, np.random.default_rng(0))
    assert emulator.emulate_moments(asked(COMMON, "fp32"), TILES["fp32"], x, w)[3]


@st.composite
def requests(draw) -> tuple[Case, str, int, int]:
    """A convolution that the engine takes, a mode, rows of a tile, and splits."""
    transposed, ndim, mode = draw(st.booleans()), draw(st.integers(1, 3)), draw(st.sampled_from(list(MODES)))

    def each(values):
        return tuple(draw(values) for _ in range(ndim))

    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    read, written = draw(st.sampled_from([1, 3, 8, 16, 20, 40, 64, 72])), draw(st.sampled_from([1, 4, 9, 16, 40, 70]))
    size = each(st.integers(1, {1: 60, 2: 14, 3: 6}[ndim]))
    taps = each(st.integers(1, {1: 9, 2: 5, 3: 3}[ndim]))
    stride = each(st.sampled_from([1, 1, 2, 3] if transposed else [1, 1, 2, 3, 9]) if ndim < 3 else st.integers(1, 2))
    dilation = each(st.integers(1, 3))
    pairs = each(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    options = {"stride": stride, "dilation": dilation, "padding": pairs, "groups": groups}
    n, bias = draw(st.integers(1, 4)), draw(st.booleans())
    if transposed:
        options["output_padding"] = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
        lengths = zip(size, stride, pairs, dilation, taps, options["output_padding"], strict=True)
        assume(all((m - 1) * s - a - b + d * (f - 1) + e + 1 > 0 for m, s, (a, b), d, f, e in lengths))
        case = Case(True, (n, read * groups, *size), (read * groups, written, *taps), options, bias)
    else:
        size = tuple(max(m, d * (f - 1) + 1 - a - b, 1) for m, d, f, (a, b) in zip(size, dilation, taps, pairs, strict=True))
        case = Case(False, (n, read * groups, *size), (written * groups, read, *taps), options, bias)
    assume(packing(asked(case, mode)) is not None)
    return case, mode, draw(st.sampled_from([64, 128])), draw(st.sampled_from([1, 1, 2, 3]))


@given(requests())
def test_any_plan_computes_the_convolution(request):
    case, mode, rows, split = request
    arrays = case.integers(dtype_of(mode))
    config = replace(TILES[mode], BLOCK_M=rows, SPLIT=split, BLOCK_N=64)
    assert_exact(emulated(case, mode, arrays, config), case.reference(*arrays), f"{asked(case, mode)} {config}")


# ---- the form of the loads, and its limits


@pytest.mark.parametrize(
    ("case", "level"),
    [
        (fprop((1, 16, 9, 9), (8, 16, 2, 2), padding=128), 0), (fprop((1, 16, 9, 9), (8, 16, 2, 2), padding=(0, 129)), 1),
        (fprop((1, 16, 9, 9), (8, 16, 2, 2), padding=(129, 0)), 2), (fprop((1, 16, 9, 9), (8, 16, 1, 2), padding=((0, 0), (0, 128))), 0),
        (fprop((1, 16, 9, 9), (8, 16, 1, 2), padding=((0, 0), (0, 129))), 1),  # the corner is at 128
        (fprop((1, 16, 40, 40), (8, 16, 7, 7), stride=8), 0), (fprop((1, 16, 40, 40), (8, 16, 7, 7), stride=(8, 9)), 1),
        (fprop((1, 16, 40, 40), (8, 16, 7, 7), stride=(9, 8)), 2), (fprop((1, 16, 40, 40), (8, 16, 1, 1), stride=(1, 9)), 1),
        (fprop((1, 16, 300, 9), (8, 16, 2, 2), padding=(127, 0), dilation=(255, 1)), 0), (fprop((1, 16, 300, 9), (8, 16, 2, 2), padding=(126, 0), dilation=(255, 1)), 2),
        (fprop((1, 16, 300, 9), (8, 16, 2, 2), padding=(128, 0), dilation=(256, 1)), 2),
        (fprop((1, 16, 9, 300), (8, 16, 2, 2), dilation=(1, 100)), 0),
        (fprop((1, 16, 9, 9, 9), (8, 16, 2, 2, 2), padding=16), 0), (fprop((1, 16, 9, 9, 9), (8, 16, 2, 2, 2), padding=(0, 0, 17)), 1),
        (fprop((1, 16, 9, 9, 9), (8, 16, 2, 2, 2), padding=(0, 17, 0)), 2), (fprop((1, 16, 9, 9, 9), (8, 16, 2, 2, 2), padding=(17, 0, 0)), 3),
        (fprop((1, 16, 40, 9, 9), (8, 16, 2, 2, 2), padding=(10, 0, 0), dilation=(31, 1, 1)), 3),  # the corner is at 10 - 31
        (fprop((1, 16, 40, 9, 9), (8, 16, 2, 2, 2), padding=(16, 0, 0), dilation=(31, 1, 1)), 0),
        (fprop((1, 16, 99), (8, 16, 2), padding=32768), 0), (fprop((1, 16, 99), (8, 16, 2), padding=32769), 1), (fprop((1, 16, 99), (8, 16, 2), stride=9), 1),
        (fprop((1, 16, 70000), (8, 16, 2), padding=32767, dilation=65535), 0), (fprop((1, 16, 70000), (8, 16, 2), padding=32768, dilation=65536), 1),
        (fprop((1, 3, 40, 40), (8, 3, 7, 7), stride=2, padding=3), 1), (fprop((1, 15, 9, 9), (8, 15, 3, 3)), 1), (fprop((1, 15, 9, 9), (8, 15, 3, 1)), 0), (BASE, 0),
        (dgrad((1, 16, 9, 9), (16, 8, 2, 2), padding=0, dilation=128), 0), (dgrad((1, 16, 9, 9), (16, 8, 2, 2), dilation=129), None),
        (dgrad((1, 16, 30, 9), (16, 8, 3, 2), padding=(128, 0), dilation=(128, 1)), None), (dgrad((1, 16, 9, 9), (16, 8, 3, 3), stride=9, padding=1), 0),
        (dgrad((1, 16, 9, 9, 9), (16, 8, 2, 2, 2), dilation=(16, 1, 1)), 0), (dgrad((1, 16, 9, 9, 9), (16, 8, 2, 2, 2), dilation=(1, 17, 1)), None),
        (dgrad((1, 3, 9, 9), (3, 8, 7, 7)), 0),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("mode", ["fp32", "fp16 last"])
def test_what_the_loads_take_and_what_packing_folds(case, level, mode):
    """Just inside a limit and just outside: folded from the innermost axis on, or refused."""
    problem = asked(case, mode)
    found = packing(problem)
    if level is None:
        assert found is None and ig.choose(problem, H200) is None and not list(ig.configs(problem, H200))
        assert "tensor loads can't" in ig.refusal(problem, ImplicitGemm()) and "tensor loads can't" in engines.refusal(problem, ImplicitGemm(), H200)
        assert not isinstance(engines.choose(problem, H200), ImplicitGemm)
        return
    packed, addressings = found
    assert packed.level == level
    assert packed.folded == tuple(n if i >= 3 - level else 1 for i, n in enumerate(problem.filter_size))
    assert sum(math.prod(addressing.taps) for addressing in addressings) * math.prod(packed.folded) == math.prod(problem.filter_size)
    _, config = emulator.fastest(ig, problem, H200)
    memory = SimpleNamespace(buffers=[range(2**40)] * 8)  # for its sizes
    for step in (step for stage in ig.schedule(problem, config, H200).whole for step in stage):
        for described in step.maps:
            emulator.check_map(described, memory)
            if isinstance(described.box, Im2col):
                assert len(described.box.lower) == step.structs[0].spatial_dims


@pytest.mark.parametrize(
    ("case", "level"),
    [
        (fprop((2, 16, 12, 14), (8, 16, 1, 1), stride=2), 2), (fprop((2, 16, 12, 14), (8, 16, 1, 1), stride=(1, 2)), 1), (fprop((2, 16, 12, 14), (8, 16, 1, 1), stride=(2, 1)), 2),
        (fprop((2, 16, 40), (8, 16, 3), stride=8, padding=1), 1), (fprop((2, 16, 40), (8, 16, 3), stride=4, padding=1), 0), (fprop((2, 16, 12, 14), (8, 16, 3, 3), stride=2, padding=1), 0),
        (fprop((2, 16, 4, 6, 8), (8, 16, 1, 1, 1), stride=2), 3), (fprop((2, 16, 12, 14), (8, 16, 2, 2), stride=2), 0), (dgrad((2, 16, 5, 6), (16, 8, 1, 1), stride=2), 0),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_stride_steps_over_is_not_packed(case, level):
    for mode, config in (("fp32", ImplicitGemm(64, 64, 3)), ("tf32 last", ImplicitGemm(64, 64, 3)), ("fp16", ImplicitGemm(128, 64, 3))):
        assert packing(asked(case, mode))[0].level == level
        arrays = case.integers(dtype_of(mode))
        assert_exact(emulated(case, mode, arrays, config), case.reference(*arrays), mode)
    assert packing(asked(case, "fp16 last"))[0].level == 0 and (case.transposed or packing(asked(case, "fp16 last"))[0].as_is)


@pytest.mark.parametrize(
    ("case", "pixel", "rows", "shift", "taps", "load"),
    [
        (fprop((2, 3, 224, 224), (64, 3, 7, 7), stride=2, padding=3), 8, 2, 1, 4, 64), (fprop((2, 3, 224, 224), (64, 3, 3, 3), padding=1), 8, 1, 0, 3, 32),
        (fprop((2, 3, 224, 224), (64, 3, 16, 16), stride=16), 48, 16, 0, 1, 64), (fprop((2, 3, 32, 32), (64, 3, 3, 3), padding=1, stride=(2, 1), dilation=(2, 1)), 8, 1, 0, 3, 32),
        (fprop((2, 4, 100), (64, 4, 9), stride=4), 8, 1, 0, 1, 32),
    ],
    ids=str,
)  # fmt: skip
def test_windows_of_few_channels(case, pixel, rows, shift, taps, load):
    for mode in ("fp32", "tf32 last"):
        packed, (addressing,) = packing(asked(case, mode), windows=True)
        window = packed.window
        assert (window.pixel, window.rows, window.shift, packed.load, addressing.taps[1]) == (pixel, rows, shift, load, taps)
        assert packed.group == asked(case, mode).filter_size[2] * pixel and addressing.stride[2] == addressing.taps[2] == 1 and not addressing.flat
        assert packing(asked(case, mode))[0].window is None  # not where loads can't overlap
    # of 16 bits rows of the image that meet a filter's zeros must be looked at: they might hold Inf. That pays in large problems only
    for n in (2, 16):
        problem = asked(replace(case, input_shape=(n, *case.input_shape[1:])), "fp16")
        packed, (addressing,) = packing(problem, windows=True)
        beyond = shift != 0 or case.weight_shape[2] % rows != 0
        assert (packed.window.rows, packed.window.shift) == ((1, 0) if beyond and n == 2 else (rows, shift))
        assert flagged(problem, packed) == (beyond and n == 16)


@pytest.fixture
def flags_pay_always(monkeypatch):
    monkeypatch.setattr(addressing, "WORTH_FLAGS", 0)
    packing.cache_clear()
    yield
    packing.cache_clear()


BEYOND = [  # (case, mode, config): windows whose rows lie beyond the filter, of 16 bits
    (case, mode, config) for case in (
        fprop((3, 3, 20, 19), (10, 3, 7, 7), stride=2, padding=3), fprop((2, 3, 15, 20), (9, 3, 4, 3), stride=(3, 2), padding=(2, 1), bias=False),
        fprop((3, 9, 14, 13), (70, 9, 3, 4), stride=2, padding=((0, 1), (1, 0))), fprop((2, 3, 4, 7, 8), (8, 3, 3, 3, 3), stride=2, padding=1))
    for mode, config in (("fp16", ImplicitGemm(64, 64, 3)), ("fp16 last", ImplicitGemm(64, 128, 3)), ("bf16", ImplicitGemm(64, 32, 2, 2)), ("bf16 last", ImplicitGemm(128, 64, 3)))
    if mode in MODES
]  # fmt: skip


@pytest.mark.parametrize(("case", "mode", "config"), BEYOND, ids=[f"{mode}-{case}" for case, mode, _ in BEYOND])
def test_rows_beyond_the_filter(case, mode, config, flags_pay_always):
    """Ordinary numbers are exact and mend nothing; Inf and NaN in such a row, or anywhere, reach their own results only."""
    problem = asked(case, mode)
    assert packing(problem, windows=True)[0].window.covers_unused_rows
    arrays = case.integers(dtype_of(mode))
    assert_exact(emulated(case, mode, arrays, config), case.reference(*arrays))
    program = ig.schedule(problem, config, H200)
    assert program.redoes and program.whole[-1][0].kernel == "direct_gemm" and program.whole[0][0].defines["RANGE_CHECK"]
    if case.ndim == 2 and mode != "bf16 last":
        plain = replace(case, bias=False)
        check_not_finite(plain, mode, lambda *arrays: emulated(plain, mode, arrays, config, finite=False, keep=False))


@pytest.mark.parametrize("case", [fprop((1, 3, 2**15, 2**15), (8, 3, 7, 7), stride=(1, 8), padding=(3, 2**15 - 1)), fprop((1, 3, 9, 9), (8, 3, 3, 3), dilation=(1, 2)), fprop((1, 6, 9, 9), (8, 3, 3, 3), groups=2), fprop((1, 16, 9, 9), (8, 16, 3, 3)), fprop((1, 3, 9, 9), (8, 3, 3, 1))], ids=str)
def test_no_windows(case):
    assert packing(asked(case, "fp32"), windows=True) == packing(asked(case, "fp32"))


def test_channels_last_arrays_of_16_bits_are_read_as_they_are():
    def as_is(case, mode="fp16 last"):
        return packing(asked(case, mode))[0].as_is

    assert as_is(BASE) and as_is(fprop((2, 8, 5, 5), (4, 8, 3, 1))) and as_is(fprop((2, 128, 5, 5), (8, 64, 3, 3), groups=2))
    assert as_is(dgrad((2, 24, 5, 5), (24, 8, 3, 3), stride=2))
    assert not as_is(BASE, "fp16") and not as_is(BASE, "fp32 last") and not as_is(BASE, "tf32 last")
    assert not as_is(fprop((2, 20, 5, 5), (4, 20, 3, 3)))  # pitches of 40 bytes
    assert not as_is(fprop((2, 3, 5, 5), (4, 3, 3, 3))) and not as_is(fprop((2, 16, 5, 40), (4, 16, 3, 3), stride=(1, 9)))  # folded
    assert not as_is(fprop((2, 48, 5, 5), (8, 24, 3, 3), groups=2))  # loads would run on into the next group
    grouped = fprop((2, 96, 5, 5), (8, 48, 3, 3), groups=2)  # with loads of 16, which are whole; packed, of 64
    assert as_is(grouped) and packing(asked(grouped, "fp16 last"))[0].load == 16 and packing(asked(grouped, "fp16"))[0].load == 64
    problem = asked(BASE, "fp16 last")
    program = ig.schedule(problem, TILES["fp16 last"], H200)
    assert program.workspace_bytes == 4 * 2 * math.prod(problem.result_shape)  # the parts of a split sum alone
    assert [step.kernel for stage in program.steps for step in stage] == ["hopper_gemm", "direct_reduce"]


def test_filters_with_their_channels_last_are_read_as_they_are_or_packed_from_there():
    def reads(case, mode="fp16 last", config=ImplicitGemm(64, 128, 3)):  # noqa: B008
        return "pack" not in kernels(case, mode, config)

    def kernels(case, mode, config=ImplicitGemm(64, 128, 3)):  # noqa: B008
        found = ig.schedule(asked(case, mode), config, H200).filter_last
        return ["pack"] if found is None else [step.kernel for stage in found for step in stage]

    assert reads(BASE) and reads(fprop((2, 128, 5, 5), (8, 64, 3, 3), groups=2)) and reads(fprop((2, 32, 50), (9, 32, 5)))
    assert not reads(BASE, "fp16") and not reads(BASE, "fp32 last") and not reads(POINT, "fp16")  # images are packed
    assert not reads(fprop((2, 20, 5, 5), (4, 20, 3, 3))) and not reads(fprop((2, 4, 9, 9), (4, 4, 3, 3)))  # not rows of 16 bytes; folded
    assert reads(dgrad((2, 64, 5, 5), (64, 8, 3, 3))) and reads(dgrad((2, 192, 5, 5), (192, 24, 3, 3), stride=2))  # whose output channels are last
    assert not reads(dgrad((2, 24, 5, 5), (24, 8, 3, 3))) and not reads(dgrad((2, 64, 5, 5), (64, 12, 3, 3)))  # 32 channels a load; rows of 24 bytes
    assert kernels(BASE, "fp16 last", ImplicitGemm(64, 64, 3, 2)) == ["hopper_gemm", "direct_reduce"]
    assert kernels(BASE, "fp32 last") == ["pack", "hopper_gemm"]
    assert kernels(fprop((2, 20, 5, 5), (4, 20, 3, 3)), "bf16 last" if "bf16 last" in MODES else "fp16 last") == ["pack", "hopper_gemm"]
    for mode in ("fp32 last", "tf32 last", "fp16 last"):
        assert kernels(dgrad((2, 24, 5, 5), (24, 8, 3, 3)), mode) == ["pack", "hopper_gemm"]
    for case, mode in ((BASE, "fp32"), (POINT, "fp32 last")):
        assert ig.schedule(asked(case, mode), ImplicitGemm(64, 128, 3), H200).filter_last is None


@pytest.mark.parametrize(
    ("case", "mode", "config", "reason"),
    [
        (BASE, "fp32", ImplicitGemm(96, 128, 3), "64 or 128 rows"),
        *((BASE, mode, ImplicitGemm(rows, pixels, 2), "a consumer takes a multiple of 8 pixels up to") for mode in ("fp32", "tf32 last", "fp16") for rows, pixels in (
            (128, 100), (128, 0), (128, 264), (64, 72), (64, 8), (64, 528))),
        (BASE, "fp32", ImplicitGemm(128, 128, 1), "stages"), (BASE, "fp32", ImplicitGemm(128, 128, 4), "bytes of shared memory"),
        (BASE, "fp16", ImplicitGemm(128, 128, 8), "bytes of shared memory"), (BASE, "fp32", ImplicitGemm(128, 128, 3, 0), "at least one split"),
        *((case, mode, replace(config, schedule="pingpong"), "consumers alternate tiles if these have 128 rows") for case, mode, config in (
            (BASE, "fp32", ImplicitGemm(128, 64, 3)), (BASE, "tf32", ImplicitGemm(64, 64, 3)), (dgrad((2, 24, 5, 6), (24, 40, 4, 4), stride=2, padding=1), "tf32", ImplicitGemm(128, 64, 3)))),
        (BASE, "fp16", ImplicitGemm(128, 200, 3, schedule="pingpong"), "all 200 pixels of a tile then, up to 192"),
        (fprop((0, 8, 5, 5), (4, 8, 3, 3)), "fp32", ImplicitGemm(), "nothing to compute"), (fprop((2, 0, 5, 5), (4, 0, 3, 3)), "fp32", ImplicitGemm(), "nothing to compute"),
        (fprop((2**11, 8, 2**10, 2**10), (8, 8, 1, 1)), "fp16 last", ImplicitGemm(), "counts pixels in 32 bits"),
        (dgrad((2**9, 8, 2**10, 2**10), (8, 8, 2, 2), stride=2), "fp16", ImplicitGemm(), "counts pixels in 32 bits"),
    ],
    ids=lambda v: str(v)[:40],
)  # fmt: skip
def test_a_configuration_says_why_it_cannot(case, mode, config, reason):
    check_refused(ig.refusal, lambda problem, config: engines.schedule(problem, config, H200), asked(case, mode), config, reason)


@pytest.mark.parametrize("wrong", [{"schedule": "im2row"}, {"schedule": True}])
def test_names_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be one of .*, but got"):
        ImplicitGemm(**wrong)


def test_the_engine_wants_its_dtypes_and_its_gpu():
    assert "takes float32, float16, bfloat16 arrays" in ig.refusal(BASE.problem("float64"), ImplicitGemm())
    assert not isinstance(engines.choose(BASE.problem("float64"), H200), ImplicitGemm)
    for capability, backend in (((7, 5), "cuda"), ((0, 0), "opencl")):
        device = SimpleNamespace(capability=capability, multiprocessors=80, backend=backend, name="", model="")
        assert engines.refusal(BASE.problem(), ImplicitGemm(), device) is not None
        for problem in core():
            assert not isinstance(engines.choose(problem, device), ImplicitGemm)


@pytest.mark.parametrize("mode", ["fp32", "fp32 last", "tf32", "tf32 last", "fp16", "fp16 last", "bf16", "bf16 last"])
def test_the_planner_s_choices_for_the_suite_are_legal(mode):
    dtype, precision, layout = MODES.get(mode) or ("bfloat16", "fp32", "NHWC" if "last" in mode else "NCHW")
    taken = 0
    for problem in (replace(p, dtype=dtype, precision=precision, layout=layout) for p in core()):
        chosen = engines.choose(problem, H200)
        assert engines.refusal(problem, chosen, H200) is None
        taken += isinstance(chosen, ImplicitGemm | DenseNhwc)
        if gemm_tiles.why_not(problem):
            assert ig.choose(problem, H200) is None
            continue
        us, config = emulator.fastest(ig, problem, H200)
        assert us == ig.choose(problem, H200)[0]
        assert ig.refusal(problem, config) is None and 0 < us < 1e5
        candidates = list(ig.configs(problem, H200))
        assert config in candidates and len(candidates) == len(set(candidates))
        times = [ig.time(problem, one, H200) for one in candidates]
        assert all(ig.refusal(problem, one) is None for one in candidates) and min(times) == us > 0
    assert taken > len(core()) // 3


def test_the_model_knows_that_more_work_takes_longer():
    def us(problem, config=ImplicitGemm(128, 128, 3), units=132):  # noqa: B008
        return ig.time(problem, config, emulator.gpu(units))

    problem = fprop((32, 256, 56, 56), (256, 256, 3, 3), padding=1).problem()
    assert us(replace(problem, N=64)) > 1.8 * us(problem) > us(problem, units=264) > 0
    assert us(replace(problem, precision="tf32")) < us(problem) and us(replace(problem, dtype="float16", layout="NHWC")) < us(replace(problem, dtype="float16"))
    small = fprop((1, 512, 7, 7), (512, 512, 3, 3), padding=1).problem()
    assert us(small, ImplicitGemm(128, 128, 3, 4)) < us(small)


def test_planning_asks_for_what_it_knows_once(monkeypatch):
    """Tiles are not made again for another size, and what the problem alone decides is not asked once a configuration."""
    problem = fprop((32, 256, 56, 56), (256, 256, 3, 3), padding=1).problem()
    assert engines.choose(problem, H200)

    def made_again(*_, **fields):
        raise AssertionError(f"made again: {fields}")

    for module in (ig, direct_gemm):
        monkeypatch.setattr(module, "replace", made_again)
    before = addressing.why_not.cache_info().misses
    assert engines.choose(replace(problem, N=33), H200)
    assert addressing.why_not.cache_info().misses - before <= 4


def test_columns_that_a_stride_meets_repeat_after_it():
    """A gradient of a filter has as many taps as the image has pixels."""
    for stride, dilation, taps in itertools.product((1, 2, 3, 4, 6), (1, 2, 3, 4), (1, 2, 3, 5, 40)):
        problem = fprop((1, 8, 9, 400), (8, 8, 3, taps), stride=(1, stride), dilation=(1, dilation), padding=(0, 1)).problem()
        met = {tap * dilation % stride for tap in range(taps)}
        found = packing_launches._columns(problem, True)
        assert (found["step_w"], found["met_w"]) == ((1, 1) if len(met) == stride else (stride, sum(1 << column for column in met)))


def test_steps_fit_their_kernels():
    for case in (BASE, fprop((2, 3, 20, 19), (10, 3, 7, 7), stride=2, padding=3), dgrad((2, 24, 5, 6), (24, 40, 3, 2), stride=2)):
        for mode in MODES:
            check_steps(ig.schedule(asked(case, mode), replace(TILES[mode], SPLIT=2), H200), "hopper_gemm")


# ---- how far the limbs reach: the arithmetic of packing, in numpy here and on the GPU below

WIDE = fprop((4, 24, 10, 9), (40, 24, 3, 3), padding=1, bias=False)
DEEP = fprop((4, 256, 5, 8), (12, 256, 3, 3), padding=1, bias=False)
BACK = dgrad((4, 24, 6, 5), (24, 40, 3, 3), stride=2, padding=1, bias=False)


#: All of the widest case; the others by turns, a long sum where its error in the mean is held.
RANGED = [
    (case, scenario, mode) for i, scenario in enumerate(SCENARIOS) for j, mode in enumerate(("fp32", "tf32")) for case in (WIDE, DEEP, BACK)
    if case is WIDE or ((i + j) % 2 == 0 and (case is BACK or scenario in NORMED))
]  # fmt: skip


@pytest.mark.parametrize(("case", "scenario", "mode"), RANGED, ids=[f"{case}-{scenario}-{mode}" for case, scenario, mode in RANGED])
def test_the_limbs_and_the_exact_path_keep_every_range(case, scenario, mode):
    x, w = data(scenario, case)
    got = emulated(case, mode, (x, w), finite=False, keep=False)
    check_scenario(case, mode, x, w, got, scenario)


# ---- the infinities and NaNs of the data reach the results that depend on them, and no others

SPREAD = {  # by mode: where a number that is not one could reach results that don't depend on it
    "fp32": (WIDE, dgrad((2, 24, 6, 5), (24, 9, 3, 2), stride=2, padding=1), fprop((2, 48, 5, 6), (16, 24, 3, 3), groups=2)),
    "fp16": (WIDE, fprop((2, 48, 5, 6), (16, 24, 3, 3), groups=2), fprop((2, 15, 5, 6), (9, 5, 3, 3), groups=3, padding=1), dgrad((2, 48, 5, 6), (48, 12, 3, 3), groups=2, stride=2)),
    "fp16 last": (WIDE, fprop((2, 48, 5, 6), (16, 24, 3, 3), groups=2), fprop((2, 128, 5, 6), (16, 64, 3, 3), groups=2), fprop((2, 96, 5, 6), (18, 32, 3, 3), groups=3)),
}  # fmt: skip
SPREAD["tf32"] = SPREAD["fp32"]
NOT_FINITE = [(replace(case, bias=False), mode, ImplicitGemm(64, 128, 3)) for mode, cases in SPREAD.items() for case in cases]
NOT_FINITE += [  # windows: rows of the image beside those that the filter reaches
    (fprop((3, 3, 11, 12), (9, 3, *size), stride=2, padding=1, bias=False), mode, ImplicitGemm(64, 128, 3)) for mode in ("fp32", "fp16", "fp16 last") for size in ((5, 5), (4, 3))
]  # fmt: skip
NOT_FINITE += [(fprop((2, 100, 5, 8), (70, 100, 1, 1), bias=False), "fp16", ImplicitGemm(128, 64, 3))]


LARGER = fprop((3, 15, 66, 64), (256, 15, 7, 7), stride=2, padding=3, bias=False)  # as that of test_rows_beyond_the_filter, for what is large enough
NOT_FINITE_ON_THE_GPU = NOT_FINITE + [(LARGER, mode, ImplicitGemm(64, 128, 3)) for mode in ("fp16", "fp16 last", "bf16 last") if mode in MODES]


@pytest.mark.parametrize(("case", "mode", "config"), NOT_FINITE, ids=[f"{mode}-{case}" for case, mode, _ in NOT_FINITE])
def test_what_is_not_finite_reaches_its_own_results_only(case, mode, config):
    check_not_finite(case, mode, lambda *arrays: emulated(case, mode, arrays, config, finite=False, keep=False))


# ---- launches

#: Layers of float32 and how many launches they take: packing, which settles scales, and products; of gradients of filters two launches pack.
LAUNCHES = [
    (fprop((1, 256, 56, 56), (64, 256, 1, 1)), 2), (fprop((8, 64, 56, 56), (64, 64, 3, 3), padding=1), 2), (fprop((8, 64, 200), (64, 64, 15), padding=7), 2),
    (dgrad((8, 64, 28, 28), (64, 64, 3, 3), stride=2, padding=1), 2), (dgrad((8, 64, 28, 28), (64, 64, 3, 3), stride=2, padding=1, output_padding=1), 2),
    (dgrad((4, 256, 16, 16), (256, 64, 2, 2), stride=2), 2), (dgrad((4, 256, 16, 16), (256, 64, 4, 4), stride=4), 2), (dgrad((4, 64, 32, 32), (64, 64, 16, 16), stride=8, padding=4), 2),
    (dgrad((4, 256, 500), (256, 128, 16), stride=8, padding=4), 2), (dgrad((2, 64, 8, 16, 16), (64, 32, 2, 2, 2), stride=2), 2),
    (dgrad((2, 64, 8, 16, 16), (64, 32, 3, 3, 3), stride=2), 3), (dgrad((4, 64, 16, 16), (64, 64, 5, 5), stride=3), 4),  # eight and nine phases, of which a launch takes four
]  # fmt: skip


@pytest.mark.parametrize(("case", "count"), LAUNCHES, ids=str)
def test_as_few_launches_as_there_can_be(case, count):
    for mode, residual in (("fp32", False), ("fp32", True), ("fp32 last", False), ("tf32", False)):
        problem = replace(asked(case, mode), has_residual=residual)
        program = ig.schedule(problem, ImplicitGemm(64, 64, 4), H200)
        assert [len(step) for step in program.whole] == [1, count - 1], f"{mode} {residual}"
    if not case.transposed:
        program = ig.schedule(replace(asked(case, "fp32"), direction="wgrad").launched, ImplicitGemm(64, 64, 4), H200)
        assert [len(step) for step in program.whole] == [2, 1]


# ---- the emulator itself: a test that can't fail proves nothing


@pytest.mark.parametrize(
    ("case", "mode", "config", "scalars"),
    [
        (fprop((3, 24, 5, 6, 10), (80, 24, 2, 3, 2), stride=(1, 2, 2), padding=((1, 0), (0, 2), (1, 1)), dilation=(2, 1, 2)), "fp32", TILES["fp32"],
         "tiles tiles_m splits split_stages spatial_dims channel_blocks rows_group rows row_blocks tap_r tap_s tap_step_t tap_step_r dilation_d dilation_h dilation_w pixels limb_images load_plane load_pq "
         "load_q stride_h stride_w low_d low_h low_w"),
        (dgrad((3, 48, 4, 5, 6), (48, 40, 3, 4, 3), stride=(2, 1, 2), padding=(2, 2, 0), groups=2), "tf32", TILES["tf32"],
         "tiles_pixels blocks_group tap_base tap_step_t tap_step_r tap_step_s channels_group low_h plane pq q out_size out_base out_d out_h out_w rows"),
    ],
    ids=["fprop", "dgrad"],
)  # fmt: skip
def test_the_emulator_notices_a_wrong_scalar(case, mode, config, scalars, monkeypatch):
    arrays = case.normals("float32")
    problem, ref = asked(case, mode), case.reference(*arrays)
    allowed = limbs_bound(case, mode, *arrays[:2], ref)
    check_noticed(ig, ig.KERNEL, problem, config, arrays, scalars, 1, lambda got: assert_close(got, ref, allowed), monkeypatch)


def check_noticed(engine, kernel: str, problem: ConvProblem, config, arrays, scalars: str, by: int, check, monkeypatch) -> None:
    """`check` fails if any of the `scalars` that `engine` gives to `kernel` is off `by` so much, and passes otherwise."""
    program, missed = engine.schedule(problem.launched, config, emulator.gpu(5)), scalars.split()
    for name in scalars.split():

        def changed(step, name=name):
            if step.kernel != kernel:
                return step
            first, *others = step.structs
            return replace(step, arguments=(first._replace(**{name: getattr(first, name) + by}), *others))

        wrong = replace(program, **{name: [[changed(step) for step in stage] for stage in getattr(program, name)] for name in ("steps", "whole")})
        monkeypatch.setattr(engine, "schedule", lambda *_, wrong=wrong: wrong)
        try:
            check(emulator.emulate(problem, config, *arrays, keep=False))
        except (AssertionError, ZeroDivisionError, ValueError, pytest.fail.Exception):
            missed.remove(name)
        monkeypatch.undo()
    assert not missed
    check(emulator.emulate(problem, config, *arrays))


@pytest.mark.parametrize("field", ["sizes", "strides", "lower", "upper", "stride", "offset", "box"])
def test_the_emulator_notices_a_wrong_tensor_map(field, monkeypatch):
    case = fprop((3, 24, 6, 7), (80, 24, 3, 2), stride=(1, 2), padding=((1, 0), (2, 1)))
    arrays, problem, config = case.normals("float32"), asked(case, "fp32"), TILES["fp32"]
    program, wrongs, ref = ig.schedule(problem, config, emulator.gpu(5)), 0, case.reference(*arrays)
    allowed = limbs_bound(case, "fp32", *arrays[:2], ref)

    def moved(values, at, by):
        return (*values[:at], values[at] + by, *values[at + 1 :])

    for which in (0, 1):
        for at in range(4):

            def changed(step, which=which, at=at):
                if step.kernel != "hopper_gemm" or which >= len(step.maps) or 0 < which < step.defines["PHASES"]:  # those are not used
                    return step
                described = step.maps[which]
                if field in ("lower", "upper", "stride"):
                    if not isinstance(described.box, Im2col) or at >= 2:
                        return step
                    new = replace(described, box=replace(described.box, **{field: moved(getattr(described.box, field), at, 2 if field == "upper" else 1)}))
                elif field == "offset":
                    new = replace(described, offset=described.offset + 256)
                elif field == "box" and isinstance(described.box, Im2col):
                    new = replace(described, box=replace(described.box, pixels=described.box.pixels - 8))
                else:
                    values = getattr(described, field)
                    if at >= len(values):
                        return step
                    # one element fewer, or of the filter's taps, which no load asks for in excess, two
                    new = replace(described, **{field: moved(values, at, {"strides": 16, "box": -8}.get(field, -2))})
                return replace(step, maps=(*step.maps[:which], new, *step.maps[which + 1 :]))

            stages = [[changed(s) for s in stage] for stage in program.whole]
            if stages == program.whole:
                continue
            wrongs += 1
            monkeypatch.setattr(ig, "schedule", lambda *_, stages=stages: replace(program, whole=stages))
            with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
                assert_close(emulator.emulate(problem, config, *arrays), ref, allowed)
            monkeypatch.undo()
    assert wrongs
    assert_close(emulator.emulate(problem, config, *arrays), ref, allowed)


# ---- the kernels, compiled

def _compiled_variants() -> list:
    """(problem, config): the widest tiles of every kind, and the packing beside them."""
    found = []

    def add(mode, config, case=BASE):
        if mode in MODES:
            found.append((asked(case, mode), config))

    strided, dense, odd = dgrad((2, 64, 5, 6), (64, 72, 3, 2), stride=2), fprop((2, 64, 10, 20), (72, 64, 3, 3)), fprop((2, 16, 4, 5, 9), (70, 16, 3, 3, 3), bias=False)
    stem = fprop((2, 3, 20, 20), (64, 3, 7, 7), stride=2)
    for mode in ("fp32", "fp32 last", "tf32", "fp16", "bf16 last"):
        add(mode, widest(mode, 128, 2), dense)
    for mode in ("fp32", "fp16 last"):
        add(mode, widest(mode, 64, 3), dgrad((2, 64, 5, 6), (64, 72, 3, 2), stride=3))
    for mode, case in (("fp32", strided), ("tf32", strided), ("fp16", dgrad((2, 64, 5, 5), (64, 72, 3, 3), stride=2, padding=1, output_padding=1))):
        add(mode, widest(mode, 64, 2, case=case), case)  # columns written in pairs
    for mode in ("fp32 last", "tf32"):
        add(mode, widest(mode, 128, 2, 2), odd)
    add("fp32", ImplicitGemm(128, 128, 3), fprop((2, 24, 200), (72, 24, 3)))
    add("fp32 last", ImplicitGemm(64, 128, 3), stem)
    add("bf16", ImplicitGemm(64, 128, 5), stem)
    # at 192 pixels of NCHW, and in tf32 beside a residual with channels last, some bytes do spill where a tile is stored: those are not slower
    for mode, pixels in (("tf32", 160), ("fp16", 160), ("bf16 last", 192)):
        add(mode, ImplicitGemm(128, pixels, 3, schedule="pingpong"), dense)
    finished = [replace(problem, has_scale=True, has_residual=True, activation="relu") for problem, _ in found]
    # beside a residual three products leave room for fewer pixels
    return found + [(problem, _narrower(problem, config)) for problem, (_, config) in zip(finished, found, strict=True)]


def _narrower(problem: ConvProblem, config: ImplicitGemm) -> ImplicitGemm:
    """`config`, with as many pixels as are legal."""
    return next(one for pixels in range(config.BLOCK_N, 0, -8) if ig.refusal(problem, one := replace(config, BLOCK_N=pixels)) is None)


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
def test_the_planner_s_kernels_compile_and_do_not_spill():
    """Nor does ptxas say that it waits for a wgmma where none was asked for (C7508, C7510, C7515, C7517) or ignores setmaxnreg."""
    steps = {}
    for problem, config in _compiled_variants():
        assert ig.refusal(problem, config) is None, f"{problem} {config}: {ig.refusal(problem, config)}"
        programs = [ig.schedule(problem, config, H200)]
        if problem.groups == 1 and problem.dtype == "float32" and ig._moments(problem, config):
            programs.append(ig.schedule(problem, config, H200, True))
        for step in (step for program in programs for stage in (*program.whole, *(program.filter_last or ())) for step in stage):
            if step.kernel in ("hopper_gemm", "pack"):
                steps.setdefault(step.source(), (step, f"{problem} {config}"))
    check_compiled(steps, 72)  # some words of a tile's stores, of stages that are put off, or of the arguments of a filter that is packed


# ---- B. On the GPU


WIDER = fprop((5, 72, 13, 14), (200, 72, 3, 3), padding=1)
DENSE = fprop((3, 64, 9, 12), (72, 64, 3, 3), padding=1)  # rows of y that TMA can write
SPLITS = ImplicitGemm(128, 64, 3, 3)
STEM = fprop((8, 3, 224, 224), (64, 3, 7, 7), stride=2, padding=3)  # large enough for windows with rows beyond the filter
RUNS = [  # (case, mode, config): tiles of every kind, a little smaller and larger than the problem
    *((case, "fp32", config) for case in (WIDER, DENSE) for config in (
        ImplicitGemm(128, 128, 3), widest("fp32", 128, 2), widest("fp32", 128, 3), ImplicitGemm(128, 8, 6), ImplicitGemm(64, 128, 3), widest("fp32", 64, 2), ImplicitGemm(64, 16, 6),
        SPLITS, widest("fp32", 128, 2, 2), ImplicitGemm(128, 72, 4, 8), ImplicitGemm(64, 96, 2, 30))),
    *((case, "fp32 last", config) for case in (WIDER, fprop((2, 40, 9, 11), (33, 40, 3, 3), padding=1)) for config in (
        ImplicitGemm(128, 128, 3), ImplicitGemm(64, 128, 3, 2), ImplicitGemm(128, 40, 4), ImplicitGemm(64, 48, 3))),
    *((case, mode, config) for case in (WIDER, DENSE) for mode in ("tf32", "fp16", "bf16 last") for config in (
        widest(mode, 128, 4), widest(mode, 64, 3), ImplicitGemm(128, 96, 4, 2), ImplicitGemm(128, 64, 7))),
    *((WIDER, mode, config) for mode in ("tf32 last", "bf16", "fp16 last") for config in (
        widest(mode, 128, 2), ImplicitGemm(64, 128, 4, 2), ImplicitGemm(128, 8, 8), ImplicitGemm(128, 112, 4, 30), ImplicitGemm(64, 96, 5))),
    *((POINT, mode, ImplicitGemm(128, 128, 3)) for mode in ("fp32", "fp32 last", "tf32", "fp16", "bf16 last")),
    *TWINS, *((DENSE, mode, ImplicitGemm(64, 128, 2, schedule="twin")) for mode in ("fp32", "tf32", "fp16", "bf16")),
    *PINGPONG, *((fprop((7, 72, 28, 24), (200, 72, 3, 3), padding=1), mode, ImplicitGemm(128, pixels, 4, schedule="pingpong")) for mode in ("tf32", "tf32 last", "fp16 last") for pixels in (128, 160, 192)),
    *((STEM, mode, ImplicitGemm(64, 256, 5)) for mode in ("fp16", "fp16 last", "bf16 last")),
    *((fprop((5, 72, 13, 14), (136, 72, 1, 1), stride=2), mode, ImplicitGemm(128, 64, 3)) for mode in ("fp32", "tf32 last", "bf16")),
    *((dgrad((5, 128, 13, 14), (128, 200, 3, 3), padding=1), mode, config) for mode in ("fp16 last", "bf16 last") for config in (ImplicitGemm(128, 128, 4), ImplicitGemm(128, 128, 4, schedule="pingpong"))),
    *((case, mode, config) for mode, config in (("fp32", ImplicitGemm(64, 128, 3)), ("fp16 last", ImplicitGemm(128, 128, 4)), ("tf32 last", SPLITS)) for case in (
        fprop((2, 64, 5, 6, 7), (48, 64, 3, 3, 3), padding=1), fprop((4, 96, 50), (80, 96, 5), padding=2, stride=2), fprop((2, 3, 40, 39), (64, 3, 7, 7), stride=2, padding=3),
        dgrad((2, 64, 7, 9), (64, 72, 3, 3), stride=2, padding=1, output_padding=1), dgrad((2, 48, 9, 8), (48, 40, 3, 3), padding=1, groups=2),
        fprop((2, 160, 9, 8), (96, 80, 3, 3), groups=2))),
]  # fmt: skip
RUNS = [(case, mode, config) for case, mode, config in RUNS if mode in MODES]
GPU_TILES = {mode: ImplicitGemm(64, 128, 3) if "p32" in mode else ImplicitGemm(128, 128, 4) for mode in MODES}
AWKWARD_RUNS = [
    (case, mode, GPU_TILES[mode]) for case in AWKWARD for mode in ("fp32", "fp16", "bf16 last")
    if mode in MODES and packing(asked(case, mode)) is not None
]  # fmt: skip
AWKWARD_RUNS += [  # phases that are written together: rows turned 8, 16, 24 and 32 pixels at a time
    (case, mode, config)
    for case in (
        dgrad((3, 24, 5, 7), (24, 70, 3, 3), stride=2, padding=1, output_padding=1), dgrad((2, 72, 9, 16), (72, 40, 4, 4), stride=2, padding=1, groups=2),
        dgrad((5, 16, 33), (16, 130, 3), stride=2, padding=1, output_padding=1),
    )
    for mode, config in (
        ("fp32", ImplicitGemm(128, 56, 3)), ("tf32", ImplicitGemm(64, 80, 3)), ("fp16", ImplicitGemm(128, 112, 4)), ("tf32", ImplicitGemm(128, 120, 3, 2)),
        ("bf16", ImplicitGemm(64, 16, 4)), ("fp32", ImplicitGemm(64, 176, 2)),
    )
    if mode in MODES
]  # fmt: skip
RANGES = [
    (case, mode, config) for mode in ("fp32", "tf32") for case, config in (
        (WIDE, ImplicitGemm(64, 128, 3)), (BACK, ImplicitGemm(64, 128, 3)),
        (fprop((4, 3, 20, 19), (24, 3, 7, 7), stride=2, padding=3, bias=False), ImplicitGemm(64, 128, 3)), (WIDE, ImplicitGemm(64, 128, 3, 2)))
]  # fmt: skip
SEED, RANDOM = int(os.environ.get("PYCUDA_CONV_TEST_SEED", "20")), 200


@cache
def random_runs() -> list:
    """So many different problems at random, the same for the same seed."""
    found: dict = {}

    @seed(SEED)
    @settings(max_examples=3 * RANDOM, database=None, phases=[Phase.generate], deadline=None)
    @given(requests())
    def collect(request):
        case, mode, rows, split = request
        found[case, mode, replace(GPU_TILES[mode], BLOCK_M=rows, SPLIT=split)] = None

    collect()
    return list(found)[:RANDOM]


GROUPS = {
    "runs": lambda: RUNS, "awkward": lambda: AWKWARD_RUNS, "ranges": lambda: RANGES, "not finite": lambda: NOT_FINITE_ON_THE_GPU, "random": random_runs,
}  # fmt: skip


@cache
def plans(group: str) -> dict:
    """The plans of a group."""
    def made(run):
        case, mode, config = run
        return Plan(asked(case, mode), "cuda", config=config)

    return side_by_side(group, made, GROUPS[group]())


def test_what_runs_on_the_gpu_is_legal():
    for group in GROUPS.values():
        for case, mode, config in group():
            assert ig.refusal(asked(case, mode), config) is None, f"{case} {mode} {config}"
    assert len(random_runs()) == RANDOM
    assert all(packing(asked(case, mode), windows=True)[0].window.covers_unused_rows for case in (STEM, LARGER) for mode in ("fp16", "fp16 last"))
    assert all(ig.refusal(asked(case, mode), widest(mode, 64, 2)) is None for case, mode in LARGE)
    assert all(isinstance(engines.choose(asked(case, mode), H200), TENSOR_CORES) for case, mode in PUBLIC)


@pytest.mark.gpu
@pytest.mark.parametrize("run", RUNS, ids=ids_of(RUNS))
def test_integers_are_exact(torch, run):
    case, mode, _ = run
    plan, arrays = plans("runs")[str(run)], case.integers(dtype_of(mode))
    assert_exact(Arrays(torch, plan, *arrays).launch(), case.reference(*arrays), plan)


@pytest.mark.gpu
@pytest.mark.parametrize("run", RUNS, ids=ids_of(RUNS))
def test_random_data_stays_within_the_bound(torch, run):
    case, mode, _ = run
    plan, arrays = plans("runs")[str(run)], case.normals(dtype_of(mode))
    ref = case.reference(*arrays)
    assert_close(Arrays(torch, plan, *arrays).launch(), ref, bound(case, mode, *arrays, ref), plan)


@pytest.mark.gpu
@pytest.mark.parametrize("run", RUNS, ids=ids_of(RUNS))
def test_twice_and_with_a_kept_filter_the_same_bits(torch, run):
    case, mode, _ = run
    arrays = Arrays(torch, plans("runs")[str(run)], *case.normals(dtype_of(mode), seed=2))
    found = arrays.launch().tobytes()
    assert found == arrays.launch().tobytes() == arrays.launch(kept=True).tobytes()
    if arrays.plan.reads_filter_last:
        assert found == arrays.launch(filter_last=True).tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("run", AWKWARD_RUNS, ids=ids_of(AWKWARD_RUNS))
def test_awkward_shapes_are_exact(torch, run):
    case, mode, _ = run
    plan, arrays = plans("awkward")[str(run)], case.integers(dtype_of(mode), seed=1)
    assert_exact(Arrays(torch, plan, *arrays).launch(), case.reference(*arrays), plan)


@pytest.mark.gpu
def test_random_problems(torch):
    """Integers exactly, then numbers at random within the bound; all that fail are named, and the seed that made them."""
    failures = []
    for run in random_runs():
        case, mode, _ = run
        plan = plans("random")[str(run)]
        try:
            arrays = case.integers(dtype_of(mode))
            assert_exact(Arrays(torch, plan, *arrays).launch(), case.reference(*arrays), "integers")
            arrays = case.normals(dtype_of(mode))
            ref = case.reference(*arrays)
            assert_close(Arrays(torch, plan, *arrays).launch(kept=True), ref, bound(case, mode, *arrays, ref), "normals")
        except (AssertionError, pytest.fail.Exception) as error:
            failures.append(f"{case!r} {mode} {plan.config}: {error}")
    assert not failures, f"PYCUDA_CONV_TEST_SEED={SEED}: {len(failures)} of {RANDOM} fail\n" + "\n".join(failures)


# ---- the exact path


@pytest.mark.gpu
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("run", RANGES, ids=ids_of(RANGES))
def test_every_range_is_kept(torch, run, scenario):
    case, mode, _ = run
    x, w = data(scenario, case)
    got = Arrays(torch, plans("ranges")[str(run)], x, w).launch()
    check_scenario(case, mode, x, w, got, scenario)


@pytest.mark.gpu
@pytest.mark.parametrize("run", RANGES, ids=ids_of(RANGES))
def test_every_range_is_kept_behind_an_activation(torch, run):
    """Which can be taken back: what is negative is halved."""
    case, mode, config = run
    plan = Plan(replace(asked(case, mode), activation=("leaky_relu", 0.5)), "cuda", config=config)
    for scenario in SCENARIOS:
        x, w = data(scenario, case)
        got = Arrays(torch, plan, x, w).launch()
        check_range(case, mode, x, w, np.where(got < 0, 2 * got, got), scenario)


@pytest.mark.gpu
@pytest.mark.parametrize("run", RANGES, ids=ids_of(RANGES))
def test_an_image_that_takes_the_exact_path_leaves_the_others_their_bits(torch, run):
    case, _, _ = run
    plan, (x, w, _) = plans("ranges")[str(run)], case.normals("float32", seed=6)
    clean = Arrays(torch, plan, x, w).launch()
    for value in (np.nan, np.inf, 1e30, 1e-30, 3e38, 2.0**-149):
        got = Arrays(torch, plan, with_value(x, (1, 0, 2, 3), np.float32(value)), w).launch()
        others = [0, 2, 3]
        assert got[others].tobytes() == clean[others].tobytes(), f"{plan}: {value} in image 1 changed another"
    axis = int(case.transposed)
    got = Arrays(torch, plan, x, with_value(w, (slice(None), 5) if axis else 5, np.float32(1e25))).launch()
    others = [k for k in range(plan.result_shape[1]) if k != 5]
    assert got[:, others].tobytes() == clean[:, others].tobytes(), f"{plan}: a filter that takes the exact path changed another"


@pytest.mark.gpu
@pytest.mark.parametrize("run", NOT_FINITE_ON_THE_GPU, ids=ids_of(NOT_FINITE_ON_THE_GPU))
def test_what_is_not_finite_reaches_its_own_results_only_on_the_gpu(torch, run):
    case, mode, _ = run
    plan = plans("not finite")[str(run)]
    check_not_finite(case, mode, lambda *arrays: Arrays(torch, plan, *arrays).launch())


@pytest.mark.parametrize("mode", ["fp32", "tf32"])
@pytest.mark.parametrize("case", [WIDE, BACK], ids=str)
def test_a_few_small_values_do_not_make_an_image_be_computed_again(case, mode):
    """Gradients have them in nearly every image; what they lose can't be seen in the results beside larger ones."""
    x, w, _ = case.normals("float32", seed=8)
    x[:, 0, 2, 3], x[:, 3, 1, 1] = 1e-20, -1e-15
    mended: list = []
    got = emulated(case, mode, (x, w, None), ImplicitGemm(64, 32, 2), keep=False, mended=mended)
    assert mended[0] < 0.01 * got.size
    check_range(case, mode, x, w, got, "a few small values")
    mended.clear()
    finished, rng = replace(asked(case, mode), has_bias=True, has_scale=True, has_residual=True), np.random.default_rng(1)
    others = (rng.normal(size=shape).astype("float32") for shape in ((case.channels,), (case.channels,), finished.result_shape))
    emulator.emulate(finished, ImplicitGemm(64, 32, 2), x, w, *others, keep=False, mended=mended)
    assert mended[0] < 0.01 * got.size, "bias, scale and residual hide the sums"
    mended.clear()
    emulator.emulate(replace(asked(case, mode), activation="relu"), ImplicitGemm(64, 32, 2), x, w, keep=False, mended=mended)
    assert mended[0] < 0.01 * got.size, "behind an activation"
    mended.clear()
    x[1] *= 2.0**-45
    x[1, 0, 0, 0] = 1  # beside it nothing but small values: most results are
    emulated(case, mode, (x, w, None), ImplicitGemm(64, 32, 2), keep=False, mended=mended)
    assert mended[0] > 0.5 * got[1].size


# ---- through the public functions

TENSOR_CORES = DenseNhwc, FewInputs, ImplicitGemm
PUBLIC = [
    (fprop((8, 64, 28, 28), (128, 64, 3, 3), padding=1), "fp32"), (fprop((8, 64, 28, 28), (128, 64, 3, 3), padding=1), "tf32 last"),
    (fprop((8, 128, 300), (256, 128, 5), padding=2), "fp32"), (fprop((2, 32, 12, 14, 16), (64, 32, 3, 3, 3), padding=1, bias=False), "tf32"),
    (dgrad((8, 128, 14, 14), (128, 64, 4, 4), stride=2, padding=1), "fp32"), (dgrad((8, 128, 14, 14), (128, 64, 4, 4), stride=2, padding=1), "fp16 last"),
    (fprop((8, 256, 28, 28), (256, 64, 3, 3), padding=1, groups=4), "fp32 last"), (fprop((16, 64, 28, 28), (128, 64, 3, 3), padding=((0, 2), (1, 1))), "bf16"),
    (fprop((4, 3, 112, 112), (64, 3, 7, 7), stride=2, padding=3), "fp16"),
]  # fmt: skip
PUBLIC = [(case, mode) for case, mode in PUBLIC if mode in MODES]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "mode"), PUBLIC, ids=[f"{mode}-{case}" for case, mode in PUBLIC])
def test_the_public_functions(torch, case, mode):
    """torch tensors, kept filters, an out, a side stream, a graph and numpy arrays: the same bits, within the bound."""
    dtype, precision, layout = MODES[mode]
    plan = Plan(asked(case, mode), "cuda")
    assert isinstance(plan.config, TENSOR_CORES)
    x, w, b = case.normals(dtype, seed=7)
    ref = case.reference(x, w, b)
    given = [None if a is None else tensor(a).cuda() for a in (x, w, b)]
    if layout == "NHWC":
        given[0] = given[0].movedim(1, -1).contiguous().movedim(-1, 1)
    function = getattr(pc, f"conv{'_transpose' if case.transposed else ''}{case.ndim}d")
    options = {**case.options, **({"precision": precision} if dtype == "float32" else {})}

    def host(result) -> np.ndarray:
        result = result.cpu()
        return result.numpy() if dtype != "bfloat16" else result.contiguous().view(torch.int16).numpy().view("bfloat16")

    y = function(*given, **options)
    assert (y.movedim(1, -1) if layout == "NHWC" else y).is_contiguous()
    assert_close(host(y), ref, bound(case, mode, x, w, b, ref), plan)
    out = torch.full_like(y, float("nan"))
    assert function(*given, **options, out=out) is out and torch.equal(out, y)
    assert torch.equal(plan(*given), y) and torch.equal(plan.bind(*given[1:])(given[0]), y)
    turned = given[1].movedim(1, -1).contiguous().movedim(-1, 1)
    assert torch.equal(function(given[0], turned, *given[2:], **options), y) and torch.equal(plan.bind(turned, *given[2:])(given[0]), y)
    side, late = torch.cuda.Stream(), torch.full_like(given[0], float("nan"))
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late.copy_(given[0])
        found = function(late, *given[1:], **options)
        copy = found + 0
        late.fill_(float("nan"))
        found.fill_(float("nan"))
    side.synchronize()
    assert torch.equal(copy, y), "work on a side stream was not ordered"
    graph = torch.cuda.CUDAGraph()
    late.copy_(given[0])
    with torch.cuda.graph(graph):
        captured = function(late, *given[1:], **options)
    captured.fill_(float("nan"))
    graph.replay()
    assert torch.equal(captured, y), "a replayed graph gives other bits"
    if layout == "NCHW":
        got = function(x, w, b, **options, device="cuda")
        assert_close(got, ref, bound(case, mode, x, w, b, ref), f"{plan} of numpy arrays")


# ---- images of many tiles: the last blocks of the launch that packs them settle their scales

MANY_TILES = [
    (fprop((5, 64, 56, 57), (40, 64, 3, 3), padding=1), "fp32"), (fprop((5, 40, 60, 56), (24, 40, 3, 3), padding=1), "tf32 last"),
    (dgrad((5, 24, 64, 60), (24, 48, 3, 3), padding=1), "fp32"), (fprop((2, 16, 400, 300), (24, 16, 1, 1), stride=2), "fp32"),
]  # fmt: skip


def of_many_ranges(case: Case):
    """Normal numbers; images whose scale is guessed right, and too large, and too small, and one that has Inf, by turns."""
    x, w, b = case.normals("float32", seed=9)
    for image, factor in zip(x[1:], (2.0**20, 2.0**-30, 1.0, 2.0**12), strict=False):
        image *= np.float32(factor)
    x[3 % len(x), 5, 7, 7] = np.inf
    return x, w, b


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "mode"), MANY_TILES, ids=str)
def test_images_of_many_tiles_are_settled_in_memory_as_it_comes(torch, case, mode):
    """Whatever the workspace holds, hundreds of times in the memory of the calls before, and from a graph: the same bits."""
    plan = Plan(asked(case, mode), "cuda", config=ImplicitGemm(64, 64, 2))
    (packs, *others), arrays = [step for steps in plan.schedule.whole for step in steps], of_many_ranges(case)
    assert packs.kernel == "pack" and packs.arguments.slices and {step.kernel for step in others} == {"hopper_gemm"}
    on_gpu = Arrays(torch, plan, *arrays)
    want = on_gpu.launch()
    assert on_gpu.launch(kept=True).tobytes() == want.tobytes()
    with np.errstate(all="ignore"):
        ref, size = case.reference(*arrays), case.reference(*(np.abs(a) for a in arrays))
        close = np.abs(want - ref) <= (2.0**-9 if mode.startswith("tf32") else 3e-6) * size
        assert (close | (np.isnan(want) & np.isnan(ref)) | (want == ref)).all()
    order = plan.problem.order or tuple(range(want.ndim))
    expected = torch.from_numpy(np.ascontiguousarray(want.transpose(order))).cuda().view(torch.int32)
    x, w, b = (whole.data_ptr() + MARGIN for whole in on_gpu.given[:3])
    result, workspace = torch.empty_like(expected), torch.randint(0, 256, (plan.workspace_bytes,), dtype=torch.uint8, device="cuda")
    buffers, wrong = (x, w, b, 0, 0, result.data_ptr(), workspace.data_ptr()), torch.zeros((), dtype=torch.int64, device="cuda")

    def launch():
        stream = torch.cuda.current_stream()
        result.fill_(-1)
        with plan.device:
            plan.launch(buffers, stream.cuda_stream)
        wrong.add_((result != expected).sum())

    for fill in (None, 0, 0xFF, 0x7F):
        if fill is not None:
            workspace.fill_(fill)
        for _ in range(100):
            launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for _ in range(100):
        graph.replay()
    assert int(wrong) == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "mode"), MANY_TILES, ids=str)
def test_a_call_that_was_broken_off_behind_packing_leaves_nothing(torch, case, mode):
    """Other images were packed in the same workspace, and no product has cleared what their blocks told one another."""
    plan, arrays = Plan(asked(case, mode), "cuda", config=ImplicitGemm(64, 64, 2)), case.normals("float32", seed=9)
    on_gpu, others = Arrays(torch, plan, *arrays), Arrays(torch, plan, arrays[0] * np.float32(2.0**20), *arrays[1:])
    want = on_gpu.launch()
    expected = torch.from_numpy(np.ascontiguousarray(want.transpose(plan.problem.order or tuple(range(want.ndim))))).cuda().view(torch.int32)
    result, workspace = torch.empty_like(expected), torch.empty(plan.workspace_bytes, dtype=torch.uint8, device="cuda")
    only_packs, wrong = plan.device.schedule_launcher([plan.loaded.whole[0]]), torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(50):
        x, w, b = (whole.data_ptr() + MARGIN for whole in others.given[:3])
        scratch = workspace.data_ptr()
        with plan.device:
            only_packs((x, w, b, result.data_ptr(), scratch, scratch + plan.schedule.workspace_bytes, 0, 0), None)
            if i % 2:
                torch.cuda.synchronize()
            plan.launch((*(whole.data_ptr() + MARGIN for whole in on_gpu.given[:3]), 0, 0, result.data_ptr(), scratch), None)
        torch.cuda.synchronize()
        wrong.add_((result != expected).sum())
    assert int(wrong) == 0


@pytest.mark.gpu
def test_images_of_many_tiles_on_many_streams_at_once(torch):
    """Each call counts in its own workspace, also where several launches that settle scales share the GPU."""
    (case, _), *_ = MANY_TILES
    x, w, b = (torch.from_numpy(a).cuda() for a in of_many_ranges(case))
    small = torch.randn(1, 64, 96, 96, device="cuda")
    want, want_small = pc.conv2d(x, w, b, padding=1), pc.conv2d(small, w, b, padding=1)
    streams, wrong = [torch.cuda.Stream() for _ in range(8)], []
    torch.cuda.synchronize()
    for _ in range(40):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                given, expected = (x, want) if i % 2 else (small, want_small)
                y = pc.conv2d(given, w, b, padding=1)
                wrong.append((y.view(torch.int32) != expected.view(torch.int32)).sum())
    torch.cuda.synchronize()
    assert not any(int(count) for count in wrong)


# ---- large; last, since an access outside an array would end the context for the tests after it

LARGE = [  # (case, mode): arrays of more than 2^31 elements, and nearly as many pixels as the engine counts
    (fprop((3, 16, 8200, 8192), (16, 16, 3, 3), padding=1), "fp16"),
    (fprop((3, 16, 8200, 8192), (16, 16, 3, 3), padding=1), "fp32"),
    (fprop((32, 8, 8189, 8189), (8, 8, 1, 1), bias=False), "fp16 last"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "mode"), LARGE, ids=[f"{mode}-{case}" for case, mode in LARGE])
def test_more_than_two_to_the_31_elements(torch, case, mode):
    from test_gpu import assert_rows, rows_near, trim

    problem = asked(case, mode)
    assert problem.largest_array > 2**31
    trim()
    kind = getattr(torch, problem.dtype)
    n, c, *size = case.input_shape
    last = problem.layout == "NHWC"
    x = torch.empty((n, *size, c) if last else case.input_shape, dtype=kind, device="cuda")
    for image in x:  # small integers, by images: sums of at most 9 * 16 * 4 are exact in float16
        image.random_(0, 5).sub_(2)
    w = torch.randint(-2, 3, case.weight_shape, device="cuda").to(kind)
    b = torch.randint(-2, 3, (case.channels,), device="cuda").to(kind) if case.bias else None
    plan = Plan(problem, "cuda", config=widest(mode, 64, 2))
    out = torch.full((n, *plan.result_shape[2:], case.channels) if last else plan.result_shape, float("nan"), dtype=kind, device="cuda")
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device="cuda")
    with plan.device:
        plan.launch([x.data_ptr(), w.data_ptr(), 0 if b is None else b.data_ptr(), 0, 0, out.data_ptr(), workspace.data_ptr()], None)
    torch.cuda.synchronize()
    assert not any(torch.isnan(image).any() for image in out)
    if last:
        x, out = x.movedim(-1, 1), out.movedim(-1, 1)
    for image, row in rows_near(case, plan):
        assert_rows(case, x, w, b, out, image, row)
    del x, out, workspace, plan
    trim()
