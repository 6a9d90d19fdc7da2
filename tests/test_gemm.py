"""What is asked of hopper/gemm.cu and of packing alone; what every engine is asked stands in tests/cases/hopper_gemm.py."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import simt
import test_epilogue as epilogue
from alike import moments
from awkward import BASE, POINT
from cases.hopper_gemm import BACK, CASES, COMMON, GPU_TILES, JOINED, LARGE_STEM, LARGER, TILES, WHOLE, WIDE
from hypothesis import Phase, assume, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from modes import H200, MODES, asked, bound, dtype_of, gpu, ids_of, program_of
from on_gpu import MARGIN, Arrays, plans_of
from ranges import check_not_finite, check_range, halves
from reference import Case, activated, assert_alike, assert_close, assert_exact, dgrad, fprop

import pycuda_conv as pc
from pycuda_conv import Plan, engines
from pycuda_conv.engines import addressing
from pycuda_conv.engines import packing as packing_launches
from pycuda_conv.engines.addressing import flagged, packing
from pycuda_conv.engines.direct import gemm as direct_gemm
from pycuda_conv.engines.hopper import gemm as ig
from pycuda_conv.engines.hopper import gemm_tiles
from pycuda_conv.engines.hopper.gemm import ImplicitGemm
from pycuda_conv.runtime.base import Im2col

simulated = pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))


def check(case: Case, mode: str, config, seeds=(1,), **options) -> None:
    arrays = case.integers(dtype_of(mode))
    assert_exact(simt.computed(asked(case, mode), config, *arrays, seeds=seeds, **options), case.reference(*arrays), config)


# ---- problems at random

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
        assert "tensor loads can't" in ig.refusal(problem, ImplicitGemm()) and "tensor loads can't" in engines.refusal(
            problem, ImplicitGemm(), H200
        )
        return
    packed, addressings = found
    assert packed.level == level
    assert packed.folded == tuple(n if i >= 3 - level else 1 for i, n in enumerate(problem.filter_size))
    assert sum(math.prod(addressing.taps) for addressing in addressings) * math.prod(packed.folded) == math.prod(problem.filter_size)
    _, config = ig.choose(problem, H200)
    memory = SimpleNamespace(buffers=[range(2**40)] * 8)  # for its sizes
    for step in (step for stage in ig.schedule(problem, config, H200).whole for step in stage):
        for described in step.maps:
            simt.check_map(described, memory)
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
        if simt.WHY_NOT is None and level:
            check(case, mode, config)
    assert packing(asked(case, "fp16 last"))[0].level == 0 and (case.transposed or packing(asked(case, "fp16 last"))[0].as_is)


@pytest.mark.parametrize(
    ("case", "pixel", "rows", "shift", "taps", "load"),
    [
        (fprop((2, 3, 224, 224), (64, 3, 7, 7), stride=2, padding=3), 8, 2, 1, 4, 64), (fprop((2, 3, 224, 224), (64, 3, 3, 3), padding=1), 8, 1, 0, 3, 32),
        (fprop((2, 3, 224, 224), (64, 3, 16, 16), stride=16), 48, 16, 0, 1, 64), (fprop((2, 3, 32, 32), (64, 3, 3, 3), padding=1, stride=(2, 1), dilation=(2, 1)), 8, 1, 0, 3, 32),
        (fprop((2, 4, 100), (64, 4, 9), stride=4), 8, 1, 0, 1, 32), (fprop((2, 16, 32, 32), (64, 16, 3, 3), padding=1), 16, 1, 0, 3, 64),
    ],
    ids=str,
)  # fmt: skip
def test_windows_of_few_channels(case, pixel, rows, shift, taps, load):
    for mode in ("fp32", "tf32 last"):
        packed, (addressing,) = packing(asked(case, mode), windows=True)
        window = packed.window
        assert (window.pixel, window.rows, window.shift, packed.load, addressing.taps[1]) == (pixel, rows, shift, load, taps)
        assert (
            packed.group == asked(case, mode).filter_size[2] * pixel
            and addressing.stride[2] == addressing.taps[2] == 1
            and not addressing.flat
        )
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


BEYOND = [  # (case, mode, config): windows whose rows lie beyond the filter, of 16 bits; each case in two of four modes
    (case, mode, config) for i, case in enumerate((
        fprop((3, 3, 20, 19), (10, 3, 7, 7), stride=2, padding=3), fprop((2, 3, 15, 20), (9, 3, 4, 3), stride=(3, 2), padding=(2, 1), bias=False),
        fprop((3, 9, 14, 13), (70, 9, 3, 4), stride=2, padding=((0, 1), (1, 0))), fprop((2, 3, 4, 7, 8), (8, 3, 3, 3, 3), stride=2, padding=1)))
    for j, (mode, config) in enumerate((("fp16", ImplicitGemm(64, 64, 3)), ("fp16 last", ImplicitGemm(64, 128, 3)), ("bf16", ImplicitGemm(64, 32, 2, 2)), ("bf16 last", ImplicitGemm(128, 64, 3))))
    if mode in MODES and (i + j) % 2 == 0
]  # fmt: skip


@simulated
@pytest.mark.parametrize(("case", "mode", "config"), BEYOND, ids=[f"{mode}-{case}" for case, mode, _ in BEYOND])
def test_rows_beyond_the_filter(case, mode, config, flags_pay_always):
    """Ordinary numbers are exact and mend nothing; Inf and NaN in such a row, or anywhere, reach their own results only."""
    problem = asked(case, mode)
    assert packing(problem, windows=True)[0].window.covers_unused_rows
    check(case, mode, config)
    program = ig.schedule(problem, config, H200)
    assert program.redoes and program.whole[-1][0].kernel == "direct_gemm" and program.whole[0][0].defines["RANGE_CHECK"]
    if case.ndim == 2 and mode != "bf16 last":
        plain = replace(case, bias=False)
        check_not_finite(plain, mode, lambda *arrays: simt.computed(asked(plain, mode), config, *arrays))


@pytest.mark.parametrize("case", [
    fprop((1, 3, 2**15, 2**15), (8, 3, 7, 7), stride=(1, 8), padding=(3, 2**15 - 1)), fprop((1, 3, 9, 9), (8, 3, 3, 3), dilation=(1, 2)),
    fprop((1, 6, 9, 9), (8, 3, 3, 3), groups=2), fprop((1, 24, 9, 9), (8, 24, 3, 3)), fprop((1, 3, 9, 9), (8, 3, 3, 1)),
    fprop((1, 16, 9, 9), (8, 16, 3, 3), stride=(1, 2)), fprop((1, 16, 9, 9), (8, 16, 3, 1))
], ids=str)
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
    # whose output channels are last; 32 channels a load; rows of 24 bytes
    assert reads(dgrad((2, 64, 5, 5), (64, 8, 3, 3))) and reads(dgrad((2, 192, 5, 5), (192, 24, 3, 3), stride=2))
    assert not reads(dgrad((2, 24, 5, 5), (24, 8, 3, 3))) and not reads(dgrad((2, 64, 5, 5), (64, 12, 3, 3)))
    assert kernels(BASE, "fp16 last", ImplicitGemm(64, 64, 3, 2)) == ["hopper_gemm", "direct_reduce"]
    assert kernels(BASE, "fp32 last") == ["pack", "hopper_gemm"]
    assert kernels(fprop((2, 20, 5, 5), (4, 20, 3, 3)), "bf16 last" if "bf16 last" in MODES else "fp16 last") == ["pack", "hopper_gemm"]
    for mode in ("fp32 last", "tf32 last", "fp16 last"):
        assert kernels(dgrad((2, 24, 5, 5), (24, 8, 3, 3)), mode) == ["pack", "hopper_gemm"]
    for case, mode in ((BASE, "fp32"), (POINT, "fp32 last")):
        assert ig.schedule(asked(case, mode), ImplicitGemm(64, 128, 3), H200).filter_last is None


@pytest.mark.parametrize("wrong", [{"schedule": "im2row"}, {"schedule": True}])
def test_names_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be one of .*, but got"):
        ImplicitGemm(**wrong)


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


# ---- launches

#: Layers of float32 and how many launches they take: packing, which settles scales, and products; of gradients of filters two launches
#: pack.
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


# ---- on the simulated machine

@simulated
def test_moments_of_results_that_were_computed_again_say_so():
    x, w, _ = COMMON.normals("float32", seed=1)
    assert moments(asked(COMMON, "fp32"), TILES["fp32"], halves(x, -40, np.random.default_rng(0)), w)[3]


def computed_again(case: Case, mode: str, x, w, *others, activation=None) -> float:
    """The share of results that are others than without what computes some once more."""
    problem, config = replace(asked(case, mode), has_bias=False, activation=activation), ImplicitGemm(64, 32, 2)
    if others:
        problem = replace(problem, has_bias=True, has_scale=True, has_residual=True)
    got, plain = (simt.computed(problem, config, x, w, *others, broken=broken) for broken in (None, WITHOUT))
    if activation is None and not others:
        check_range(case, mode, x, w, got, "a few small values")
    return float((got.view(np.uint32) != plain.view(np.uint32)).mean())


WITHOUT = ("if (any_flag) recompute_tiles", "if (false) recompute_tiles")


@simulated
@pytest.mark.parametrize(("case", "mode"), [(WIDE, "fp32"), (BACK, "tf32")], ids=str)
def test_a_few_small_values_do_not_make_an_image_be_computed_again(case, mode):
    """Gradients have them in nearly every image; what they lose can't be seen in the results beside larger ones."""
    (x, w, _), rng = case.normals("float32", seed=8), np.random.default_rng(1)
    x[:, 0, 2, 3], x[:, 3, 1, 1] = 1e-20, -1e-15
    shape = asked(case, mode).result_shape
    assert computed_again(case, mode, x, w) < 0.01
    others = (rng.normal(size=size).astype("float32") for size in ((case.channels,), (case.channels,), shape))
    assert computed_again(case, mode, x, w, *others) < 0.01, "bias, scale and residual hide the sums"
    assert computed_again(case, mode, x, w, activation="relu") < 0.01, "behind an activation"
    x[1] *= 2.0**-45
    x[1, 0, 0, 0] = 1  # beside it nothing but small values: most results of a quarter are
    assert computed_again(case, mode, x, w) > 0.1


@simulated
@pytest.mark.parametrize("options", [{"padding": 1}, {"stride": 3}], ids=["", "phases that repeat"])
def test_a_filter_with_its_channels_last_mends_what_limbs_cannot_hold(options):
    """The same bits as with the filter in C order."""
    case, config = dgrad((3, 24, 2, 2), (24, 8, 3, 3), bias=False, **options), ImplicitGemm(64, 64, 2)
    x, w, _ = case.normals("float32")
    x[1, 3, 1, 1], x[2] = np.inf, x[2] * np.float32(2.0) ** -100
    w[5, 2] *= np.float32(2.0) ** -30
    found = [simt.computed(asked(case, "fp32 last"), config, x, w, filter_last=last) for last in (False, True)]
    assert found[0].tobytes() == found[1].tobytes() and np.isinf(found[0][1]).any() and np.isfinite(found[0][[0, 2]]).all()


_GRADIENTS = [
    dgrad((2, 24, 5, 6), (24, 40, 3, 3), padding=1, bias=False), dgrad((2, 16, 5, 6), (16, 68, 3, 2), stride=2, groups=2, bias=False),
    dgrad((1, 20, 5, 6), (20, 132, 1, 1), bias=False),
]  # fmt: skip
#: Other ways to pack: a number of packing.py that decides, two values of it, and what the launch that packs says of them.
OTHERWISE = [
    # images of few tiles are settled by the blocks of a cluster, or by the launch's last blocks
    *((fprop((4, 32, 16 * tiles, 15), (24, 32, 3, 3), padding=1, bias=False), "fp32", "CLUSTER", (8, 0), lambda step: step.defines["CLUSTER"] > 0) for tiles in (1, 3, 7)),
    # many short rows of a filter by warps, or by blocks
    (fprop((1, 32, 6, 15), (24, 32, 3, 3), padding=1, bias=False), "fp32", "MANY_ROWS", (0, 10**9), lambda step: step.arguments.row_bits == 3),
    # rows that are neighbours in memory four at a time, or one
    *((case, mode, "NEIGHBOUR_ROWS", (4, 1 << 20), lambda step: step.arguments.row_bits == 2) for case in _GRADIENTS for mode in ("fp32 last", "fp16 last")),
]  # fmt: skip


@simulated
@pytest.mark.parametrize(("case", "mode", "name", "values", "is_so"), OTHERWISE, ids=[f"{name}-{mode}-{case}" for case, mode, name, *_ in OTHERWISE])
def test_however_packing_goes_the_bits_are_the_same(case, mode, name, values, is_so, monkeypatch):
    """Of rows like any, with Inf, and with numbers that lose bits; of images that are guessed right, that are packed again, and that have Inf."""
    x, w, _ = case.normals(dtype_of(mode))
    w[5] *= np.array(1e-12, w.dtype)
    if name == "CLUSTER":
        x *= np.array([1, 1000, 1e-9, 1], "f").reshape(4, 1, 1, 1)
        x[3, 5, 7, 7] = np.inf
    else:
        w[1, 3, 0, 0] = np.inf
    problem, config, got = asked(case, mode), ImplicitGemm(64, 64, 2), []
    for value in values:
        monkeypatch.setattr(packing_launches, name, value)
        program = program_of(problem, config, 132)
        (first, *_) = [step for stage in (program.filter_last or program.whole) for step in stage]
        assert is_so(first) == (value == values[0])
        got.append(simt.computed(problem, config, x, w, multiprocessors=132, seeds=(1,), filter_last=program.filter_last is not None))
    assert got[0].tobytes() == got[1].tobytes()
    if name == "CLUSTER":
        assert_close(got[0][:3], case.reference(x[:3], w), 3e-6 * case.reference(np.abs(x[:3]), np.abs(w)), config)


@simulated
def test_blocks_that_settle_images_wait_in_memory_as_it_comes(monkeypatch):
    """Whatever is in the workspace, and however often: the same bits. What they told one another is not there behind the product."""
    case, config = fprop((2, 16, 20, 64), (8, 16, 3, 1), padding=(1, 0), bias=False), ImplicitGemm(64, 64, 2)
    monkeypatch.setattr(packing_launches, "CLUSTER", 0)
    x, w, _ = case.normals("float32")
    x[1] *= np.float32(1e4)
    problem, found = asked(case, "fp32"), []
    program = program_of(problem, config, 3)
    packs, product = (step for stage in program.steps for step in stage)
    assert packs.kernel == "pack" and packs.arguments.tiles == packs.arguments.slices == 3 and not packs.arguments.filter_rows
    memory, size = simt.Memory(problem, program, x, w), program.workspace_bytes
    for seed, held in enumerate((np.full(size, 0xFF), np.random.default_rng(2).integers(0, 256, size), np.zeros(size), None)):
        if held is not None:
            memory.buffers[packs.buffers[2][0]] = held.astype(np.uint8)
        simt.run([[packs]], memory, seed)
        limbs, scales, flags, tiles = (
            memory.view(packs.buffers[i], kind) for i, kind in ((2, "uint16"), (3, "float32"), (4, "int32"), (5, "uint64"))
        )
        found.append((limbs[: 2 * 2 * 16 * 20 * 64].tobytes(), scales[:2].tobytes(), flags[:2].tobytes()))
        marks = tiles[:12] >> np.uint64(26)  # the mark, with the number that a launch has on the machine
        assert (
            marks == (0xFFF5D3A96B2E91C7 ^ (0x123456789ABCDEF << 26 & 2**48 - 1)) >> 26
        ).all() and product.structs[0].x_tiles == 6 and product.buffers[-2] == packs.buffers[5]
    assert len(set(found)) == 1 and scales[0] == 2.0**-9 and scales[1] > 2.0**-9


#: Tiles that are stored from registers, by threads and by TMA, of phases one by one and in pairs, by turns, of folded taps and of groups.
MENDED = [
    (fprop((2, 40, 7, 9), (21, 40, 3, 3), padding=1), "fp32", ImplicitGemm(64, 64, 2)), (fprop((2, 40, 7, 9), (24, 40, 3, 3), padding=1), "fp32 last", ImplicitGemm(64, 64, 2)),
    (fprop((3, 20, 11, 6), (70, 20, 3, 2), stride=2), "tf32 last", ImplicitGemm(128, 64, 3)), (fprop((3, 40, 7, 9), (130, 40, 3, 3), padding=1), "tf32", ImplicitGemm(128, 64, 3, schedule="pingpong")),
    (dgrad((2, 24, 5, 6), (24, 40, 4, 4), stride=2, padding=1), "fp32", ImplicitGemm(64, 64, 2)), (dgrad((2, 24, 5, 6), (24, 20, 3, 3), stride=3), "fp32", ImplicitGemm(64, 64, 2)),
    (dgrad((2, 24, 5, 6), (24, 20, 3, 3), stride=2), "fp32 last", ImplicitGemm(64, 64, 2)), (fprop((2, 3, 15, 14), (20, 3, 5, 5), stride=2, padding=2), "fp32", ImplicitGemm(64, 64, 2)),
    (fprop((2, 48, 6, 7), (40, 24, 3, 3), padding=1, groups=2), "fp32", ImplicitGemm(64, 64, 2)), (fprop((2, 24, 3, 5, 6), (20, 24, 2, 3, 3), padding=1), "fp32", ImplicitGemm(64, 64, 2)),
    (dgrad((2, 24, 3, 4), (24, 40, 4, 4), stride=4), "fp32", ImplicitGemm(64, 64, 2)),
    *JOINED,
]  # fmt: skip
CHANGED = {
    "2^-40 to 2^40": lambda x, w, rng: x.__imul__(np.float32(2) ** rng.integers(-40, 40, x.shape)),
    "Inf": lambda x, w, rng: x.__setitem__((0, 0, 2, 2), np.inf),
    "NaN in the last image": lambda x, w, rng: x.__setitem__((-1,) * x.ndim, np.nan),
    "a filter of its own range": lambda x, w, rng: w[0, 0].__imul__(np.float32(2) ** rng.integers(-50, 50, w[0, 0].shape)),
}


#: Each alone, and with a scale and a residual or an activation by turns; those that blocks add in one of both ways.
MENDED_HOW = [
    (*run, how) for i, run in enumerate(MENDED) for j,
    how in enumerate(("sums", "gelu" if i // 2 % 2 or run[2].is_pingpong else "residual")) if run not in JOINED or i % 2 == j
]


@simulated
@pytest.mark.parametrize(
    ("case", "mode", "config", "how"), MENDED_HOW,
    ids=[f"{how}-{id}" for (*_, how), id in zip(MENDED_HOW, ids_of([run[:3] for run in MENDED_HOW]), strict=True)]
)
def test_blocks_compute_once_more_what_is_flagged(case, mode, config, how):
    problem = asked(case, mode)
    problem = replace(problem, has_scale=how == "residual", has_residual=how == "residual", activation="gelu" if how == "gelu" else None)
    kernels = [step.kernel for stage in program_of(problem, config, 3).whole for step in stage]
    assert set(kernels) == {"pack", gemm_tiles.KERNEL}
    number = MENDED.index((case, mode, config))
    kinds = [list(enumerate(CHANGED.items()))[(number + i) % len(CHANGED)] for i in ((0, 2) if how == "sums" else (3,))]  # by turns
    for seed, (kind, change) in kinds:
        rng = np.random.default_rng(seed)
        x, w, b = case.normals("float32", seed)
        change(x, w, rng)
        residual = rng.normal(size=problem.result_shape).astype("float32") if problem.has_residual else None
        scale = rng.normal(size=case.channels).astype("float32") if problem.has_scale else None
        given = x, w, b, scale, residual
        with np.errstate(all="ignore"):
            want = activated(epilogue.expected(case, "before", *given), problem.activation)
            size = epilogue.expected(case, "before", *(None if one is None else np.abs(one) for one in given))
        y = simt.computed(problem, config, *given, seeds=(seed,))
        rounded = 2.0**-9 if mode.startswith("tf32") else 3e-6
        assert_alike(y, want, rounded * size + 1e-44, kind)


@simulated
@pytest.mark.parametrize("blocks", [1, 4, 132])
@pytest.mark.parametrize(("case", "mode", "config"), JOINED, ids=ids_of(JOINED))
def test_blocks_add_the_parts_of_split_sums(case, mode, config, blocks):
    """Exactly, in two launches, whoever comes last; and, of blocks with several tiles, with what was packed before."""
    problem = asked(case, mode)
    program = program_of(problem, config, blocks)
    packs, *products = [step for stage in program.whole for step in stage]
    assert packs.kernel == "pack" and {step.kernel for step in products} == {"hopper_gemm"}
    assert packs.arguments.tickets == sum(
        step.structs[0].tiles // config.SPLIT * (step.structs[4].turns if step.defines["PHASES"] > 1 else 1) + 3 & ~3 for step in products
    )
    check(case, mode, config, (1, 2) if blocks == 4 else (1,), multiprocessors=blocks)
    if blocks == 4:
        check(case, mode, config, (3,), kept=True, multiprocessors=blocks)


# ---- the launch that mends the results of sums in parts: what is flagged is computed, nothing else is touched

SPLIT = [  # case, activation
    (WHOLE, None), (fprop((2, 120, 4, 8), (130, 60, 3, 3), padding=1, groups=2, bias=False), None), (dgrad((2, 64, 10, 8), (64, 72, 3, 3), padding=1), None),
    (WHOLE, "gelu"),
]  # fmt: skip


@simulated
@pytest.mark.parametrize(("case", "activation"), SPLIT, ids=[f"{c}-{a}" for c, a in SPLIT])
def test_what_is_flagged_is_computed_and_nothing_else(monkeypatch, case, activation):
    monkeypatch.setattr(gemm_tiles, "JOINED_BYTES", 0)  # else blocks of the product mend what they have joined
    problem = replace(asked(case, "fp32"), activation=activation)
    program = ig.schedule(problem, ImplicitGemm(64, 64, 3, 2), gpu(3))
    *before, (step,) = program.whole
    changes = {"ordinary": lambda x, w, rng: None, **CHANGED}
    for seed, kind in enumerate(changes if activation is None else ("Inf",)):
        change = changes[kind]
        x, w, b = case.normals("float32", seed)
        change(x, w, np.random.default_rng(seed))
        memory = simt.Memory(problem, program, x, w, b)
        simt.run(before, memory, seed)
        with np.errstate(all="ignore"):
            want, size = activated(case.reference(x, w, b), activation), case.reference(
                *(None if a is None else np.abs(a) for a in (x, w, b))
            )
        old = memory.view(simt.RESULT, "float32").reshape(want.shape).copy()
        simt.run([[step]], memory, seed)
        y = memory.view(simt.RESULT, "float32").reshape(want.shape)
        assert_alike(y, want, 3e-6 * size + 1e-44, kind)
        touched = (old.view(np.uint32) != y.view(np.uint32)).reshape(len(y), -1).any(1)
        expected = {"ordinary": [], "Inf": [0], "NaN in the last image": [len(y) - 1]}
        assert kind not in expected or np.flatnonzero(touched).tolist() == expected[kind], f"{kind}: images {np.flatnonzero(touched)}"


# ---- on a GPU

SEED, RANDOM = int(os.environ.get("PYCUDA_CONV_TEST_SEED", "20")), 120


@cache
def random_runs() -> list:
    """So many different problems at random, the same for the same seed."""
    found: dict = {}

    @seeded(SEED)
    @settings(max_examples=3 * RANDOM, database=None, phases=[Phase.generate], deadline=None)
    @given(requests())
    def collect(request):
        case, mode, rows, split = request
        found[case, mode, replace(GPU_TILES[mode], BLOCK_M=rows, SPLIT=split)] = None

    collect()
    return list(found)[:RANDOM]


def test_what_runs_on_the_gpu_is_legal():
    for case, mode, config in (*CASES.gpu, *CASES.not_finite_gpu, *random_runs()):
        assert ig.refusal(asked(case, mode).launched, config) is None, f"{case} {mode} {config}"
    assert len(random_runs()) == RANDOM
    assert all(packing(
        asked(case, mode), windows=True
    )[0].window.covers_unused_rows for case in (LARGE_STEM, LARGER) for mode in ("fp16", "fp16 last"))


@pytest.mark.gpu
def test_random_problems(torch):
    """Integers exactly, then numbers at random within the bound; all that fail are named, and the seed that made them."""
    failures, plans = [], plans_of(random_runs())
    for run in random_runs():
        case, mode, _ = run
        plan = plans[str(run)]
        try:
            arrays = case.integers(dtype_of(mode))
            assert_exact(Arrays(torch, plan, *arrays).launch(), case.reference(*arrays), "integers")
            arrays = case.normals(dtype_of(mode))
            ref = case.reference(*arrays)
            assert_close(Arrays(torch, plan, *arrays).launch(kept=True), ref, bound(case, mode, *arrays, ref), "normals")
        except (AssertionError, pytest.fail.Exception) as error:
            failures.append(f"{case!r} {mode} {plan.config}: {error}")
    assert not failures, f"PYCUDA_CONV_TEST_SEED={SEED}: {len(failures)} of {RANDOM} fail\n" + "\n".join(failures)


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
