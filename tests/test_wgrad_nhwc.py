"""Gradients of filters from channels-last arrays as they lie: their planning in numpy (emulator.py), their kernels compiled, and, on an sm_90 GPU, their numbers."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from functools import cache

import emulator
import numpy as np
import pytest
import simt
from alike import check_refused_on, like_h200
from reference import DTYPES, EPS, SUM_EPS, TINY, assert_close, assert_exact
from test_implicit_gemm import H200, MARGIN, NVCC, check_compiled, check_noticed, check_steps, side_by_side, torch  # noqa: F401 -- torch: a fixture

from pycuda_conv import ConvProblem, Plan, engines
from pycuda_conv.engines.hopper import wgrad as wn
from pycuda_conv.engines.hopper import wgrad_form
from pycuda_conv.engines.hopper.wgrad import WgradNhwc, WgradPairs
from pycuda_conv.engines.schedule import RESULT
from pycuda_conv.tools import families

TYPES = [dtype for dtype in ("float16", "bfloat16", "float32") if dtype in DTYPES]  # float32: in TF32, where nothing else is said


@dataclass(frozen=True)
class Filter:
    """The gradient of a filter by its arguments."""

    x: tuple
    w: tuple
    stride: tuple = (1,)
    padding: tuple = (0,)  # or pairs
    dilation: tuple = (1,)
    groups: int = 1
    layout: str = "NHWC"

    @property
    def ndim(self) -> int:
        return len(self.w) - 2

    @property
    def has_taps(self) -> bool:
        """Whether it matters if the gradient's channels are fastest, or its taps."""
        return math.prod(self.w[2:]) > 1

    def each(self, values: tuple) -> tuple:
        return values * self.ndim if len(values) == 1 else values

    @property
    def pairs(self) -> tuple:
        return tuple(p if isinstance(p, tuple) else (p, p) for p in self.each(self.padding))

    @property
    def dy(self) -> tuple:
        rows = zip(self.x[2:], self.w[2:], self.each(self.stride), self.pairs, self.each(self.dilation), strict=True)
        return (self.x[0], self.w[0], *((n + sum(p) - d * (f - 1) - 1) // s + 1 for n, f, s, p, d in rows))

    def problem(self, dtype: str = "float16", layout: str | None = None, precision: str | None = None) -> ConvProblem:
        options = {"stride": self.each(self.stride), "padding": self.pairs, "dilation": self.each(self.dilation), "groups": self.groups}
        options["precision"] = precision or ("tf32" if dtype == "float32" else "fp32")
        return ConvProblem.gradient("weight", self.ndim, self.x, self.w, self.dy, dtype=dtype, layout=layout or self.layout, **options)

    def legal(self, config: WgradNhwc, dtype: str = "float16") -> WgradNhwc:
        """`config`, with a sum in two parts if x is folded: the launch that adds them writes the result."""
        problem = self.problem(dtype).launched
        return replace(config, SPLIT=max(config.SPLIT, 1 if wgrad_form.as_loaded(problem).C == self.x[1] else 2))

    def arrays(self, dtype: str, make) -> tuple[np.ndarray, np.ndarray]:
        return make(self.x).astype(dtype), make(self.dy).astype(dtype)

    def integers(self, dtype: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Small integers: sums are exact in float32 in any order, and rounded once."""
        rng = np.random.default_rng(seed)
        return self.arrays(dtype, lambda shape: rng.integers(-8, 9, shape))

    def normals(self, dtype: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        return self.arrays(dtype, np.random.default_rng(seed).standard_normal)

    def reference(self, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
        """In float64, tap by tap."""
        stride, dilation = self.each(self.stride), self.each(self.dilation)
        padded = np.pad(x.astype(float), ((0, 0), (0, 0), *self.pairs)).reshape(x.shape[0], self.groups, -1, *(n + sum(p) for n, p in zip(x.shape[2:], self.pairs, strict=True)))
        grad = dy.astype(float).reshape(dy.shape[0], self.groups, -1, *dy.shape[2:])
        out = np.zeros(self.w)
        for tap in np.ndindex(*self.w[2:]):
            seen = padded[(..., *(slice(t * d, t * d + (m - 1) * s + 1, s) for t, d, m, s in zip(tap, dilation, dy.shape[2:], stride, strict=True)))]
            with np.errstate(invalid="ignore"):
                found = np.einsum("ngkp,ngcp->gkc", grad.reshape(*grad.shape[:3], -1), seen.reshape(*seen.shape[:3], -1))
            out[(slice(None), slice(None), *tap)] = found.reshape(self.w[:2])
        return out

    def bound(self, x: np.ndarray, dy: np.ndarray, ref: np.ndarray, precision: str = "tf32") -> np.ndarray:
        """How far from `ref` the rounding of an honest sum may lead."""
        dtype = x.dtype.name
        length = self.dy[0] * math.prod(self.dy[2:])
        rounded = 6 * 2**-12 * np.sqrt(self.reference(x**2, dy**2)) if dtype == "float32" and precision == "tf32" else 0  # to TF32, six times the deviation
        return 4 * SUM_EPS[dtype] * math.sqrt(length) * self.reference(np.abs(x), np.abs(dy)) + EPS[dtype] * np.abs(ref) + TINY[dtype] + rounded

    def __str__(self) -> str:
        def show(values):
            return "x".join("+".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in values)

        return f"{show(self.x)}-by-{show(self.w)}-s{show(self.stride)}-p{show(self.padding)}-d{show(self.dilation)}" + f"-g{self.groups}" * (self.groups > 1) + f"-{self.layout}" * (self.layout != "NHWC")


#: Tails of channels and positions, several tiles, strides, padding, dilation, groups, one to three axes, filters of one and of many taps.
CASES = [
    Filter((2, 24, 9, 8), (40, 24, 3, 3), padding=(1,)), Filter((3, 64, 10, 12), (136, 64, 1, 1)), Filter((2, 136, 7, 5), (8, 136, 3, 2), padding=(1, 0)),
    Filter((3, 16, 13, 9), (72, 16, 1, 1), stride=(2,)), Filter((2, 72, 11, 17), (32, 72, 3, 5), stride=(2, 1), padding=(2, 1), dilation=(1, 2)),
    Filter((40, 8, 3, 3), (24, 8, 3, 3), padding=(1,)), Filter((2, 16, 50), (48, 16, 5), padding=(2,)), Filter((2, 16, 4, 6, 5), (40, 16, 3, 3, 1), padding=(1, 0, 0)),
    Filter((1, 200, 6, 7), (264, 200, 1, 1)), Filter((2, 16, 12, 10), (16, 16, 2, 3), stride=(3, 2), padding=((1, 2), (0, 1))),
    Filter((2, 48, 7, 6), (80, 24, 3, 3), padding=(1,), groups=2), Filter((1, 64, 5, 6), (64, 16, 1, 1), groups=4), Filter((2, 8, 9, 30), (16, 8, 3, 7), padding=(1, 3)),
    Filter((1, 8, 6, 7, 9), (8, 8, 2, 3, 2), stride=(1, 2, 3), padding=((0, 2), (2, 1), (1, 0)), dilation=(2, 1, 2)), Filter((2, 16, 64), (8, 16, 2), padding=((16, 0),), dilation=(70,)),
    Filter((2, 128, 7, 6), (128, 32, 3, 2), padding=(1,), groups=4), Filter((1, 96, 5, 9), (288, 16, 1, 3), groups=6), Filter((2, 64, 9, 6), (192, 4, 3, 3), stride=(2,), padding=(1,), groups=16),
    Filter((1, 120, 6, 7), (40, 12, 2, 2), groups=10), Filter((2, 16, 2, 3), (8, 16, 2, 3)), Filter((1, 128, 8, 8), (192, 128, 3, 3), padding=(1,)),
]  # fmt: skip

#: Channels that are copied first, of one array or of both; taps that are folded into channels: rows of them, all, with steps and padding.
PADDED = [
    Filter((2, 91, 9, 8), (40, 91, 3, 3), padding=(1,)), Filter((2, 16, 9, 7), (19, 16, 5, 3), padding=(2, 1)), Filter((3, 13, 6, 7), (2, 13, 1, 1)), Filter((2, 3, 12, 10), (17, 3, 3, 2), stride=(2,)),
    Filter((3, 3, 21, 17), (64, 3, 7, 7), stride=(2,), padding=(3,)), Filter((2, 4, 12, 12), (24, 4, 4, 4), stride=(4,)), Filter((2, 2, 30, 41), (8, 2, 3, 4), padding=((2, 0), (0, 3)), dilation=(1, 2)),
    Filter((2, 64, 5, 6), (1, 64, 1, 1)), Filter((2, 2, 50), (12, 2, 5), padding=(2,)), Filter((1, 70, 4, 5, 6), (9, 70, 2, 1, 3)),
]  # fmt: skip

#: 1x1 filters of NCHW arrays: tails of channels and planes, several tiles, groups, one to three axes.
PLANES = [
    Filter((3, 72, 10, 12), (136, 72, 1, 1), layout="NCHW"), Filter((2, 40, 12, 20), (70, 40, 1, 1), layout="NCHW"), Filter((3, 24, 96), (20, 24, 1), layout="NCHW"), Filter((2, 64, 3, 8), (64, 32, 1, 1), groups=2, layout="NCHW"),
    Filter((2, 10, 3, 4, 2), (201, 10, 1, 1, 1), layout="NCHW"), Filter((5, 200, 14, 12), (264, 200, 1, 1), layout="NCHW"),
]  # fmt: skip

#: Flipped tiles, where dy has few channels: these folded with the taps of a row, of a plane, and not; odd numbers of channels; one to three axes.
FEW = [
    Filter((2, 136, 7, 5), (12, 136, 3, 2), padding=(1, 0)), Filter((1, 136, 5, 6), (72, 136, 3, 3), padding=(1,)), Filter((2, 91, 9, 8), (21, 91, 3, 3), padding=(1,)),
    Filter((2, 24, 4, 6, 5), (19, 24, 3, 3, 2), padding=(1, 0, 1)), Filter((1, 40, 7, 10), (4, 40, 3, 5), padding=((2, 0), (0, 1)), dilation=(1, 2)), Filter((2, 40, 50), (16, 40, 5), padding=(2,)),
]  # fmt: skip
FLIPPED = {
    2: (WgradNhwc(128, 64, 4, 2, True), WgradNhwc(128, 192, 3, 1, True), WgradNhwc(256, 192, 3, 2, True), WgradNhwc(128, 128, 3, 9, True)),
    4: (WgradNhwc(128, 64, 4, 2, True), WgradNhwc(128, 64, 3, 1, True)), 8: (WgradNhwc(128, 64, 4, 2, True), WgradNhwc(128, 64, 3, 1, True)),
}  # fmt: skip


def flipped(size: int, i: int) -> WgradNhwc:
    """One of the flipped tiles for factors of so many bytes."""
    return FLIPPED[size][i % len(FLIPPED[size])]


#: Rings go round, and round again.
DEEP = Filter((4, 24, 20, 21), (72, 24, 3, 3), padding=(1,))

#: One of each kind: every number of consumers, the widest and the narrowest, one run of positions and several.
CONFIGS = (
    WgradNhwc(64, 64, 4), WgradNhwc(128, 192, 3), WgradNhwc(256, 192, 4, 3), WgradNhwc(64, 192, 2, 9), WgradNhwc(192, 128, 4), WgradNhwc(192, 192, 3),
    WgradNhwc(64, 384, 3, 2), WgradNhwc(64, 384, 3), WgradNhwc(128, 64, 2, 17), WgradNhwc(128, 256, 4, 2),
)  # fmt: skip
CONFIGS_TF32 = (
    WgradNhwc(64, 64, 4), WgradNhwc(128, 128, 3, 4), WgradNhwc(128, 128, 2, 3), WgradNhwc(64, 128, 2, 17), WgradNhwc(128, 64, 4), WgradNhwc(64, 64, 6, 2),
    WgradNhwc(128, 128, 2),
)  # fmt: skip


CONFIGS_PLANES = WgradNhwc(64, 64, 4), WgradNhwc(128, 128, 3), WgradNhwc(64, 64, 2, 3), WgradNhwc(128, 64, 3, 2), WgradNhwc(128, 192, 5, 2)


#: float32 by three products.
CONFIGS_FP32 = WgradNhwc(64, 64, 4), WgradNhwc(128, 64, 3, 4), WgradNhwc(64, 64, 2, 9), WgradNhwc(128, 64, 8)
PRECISE = [(case, case.legal(CONFIGS_FP32[i % len(CONFIGS_FP32)], "float32")) for i, case in enumerate([*CASES[:4], CASES[10], *CASES[14:18], *PADDED[1:4], PADDED[7]])]
PRECISE_FLIPPED = [(case, flipped(8, i)) for i, case in enumerate(FEW[::2])]


def precise(case: Filter) -> ConvProblem:
    """`case` in float32 by three products."""
    return case.problem("float32", precision="fp32")


def configs_of(dtype: str) -> tuple[WgradNhwc, ...]:
    return CONFIGS_TF32 if dtype == "float32" else CONFIGS


PLANNED = [(case, dtype) for i, case in enumerate([*CASES, *PADDED]) for dtype in TYPES[i % len(TYPES) :][:1]]
IDS = [f"{dtype}-{case}" for case, dtype in PLANNED]


@pytest.mark.parametrize(("case", "dtype"), PLANNED, ids=IDS)
def test_the_plan_computes_the_gradient(case, dtype):
    """Every argument and tensor map, in numpy; every second configuration."""
    problem, arrays = case.problem(dtype), case.integers(dtype)
    ref = case.reference(*arrays)
    for config in configs_of(dtype)[PLANNED.index((case, dtype)) // len(TYPES) % 2 :: 2]:
        config = case.legal(config, dtype)
        assert engines.refusal(problem, config, H200) is None
        assert_exact(emulator.emulate(problem, config, *arrays), ref, config)


@pytest.mark.parametrize(("case", "config"), PRECISE, ids=str)
def test_the_plan_of_float32_computes_the_gradient(case, config):
    arrays = case.integers("float32")
    assert engines.refusal(precise(case), config, H200) is None
    assert_exact(emulator.emulate(precise(case), config, *arrays), case.reference(*arrays), config)


@pytest.mark.parametrize("case", PLANES, ids=str)
def test_the_plan_of_planes_computes_the_gradient(case):
    problem, arrays = case.problem(), case.integers("float16")
    for config in CONFIGS_PLANES:
        assert engines.refusal(problem, config, H200) is None
        assert_exact(emulator.emulate(problem, config, *arrays), case.reference(*arrays), config)


def test_every_kind_of_case_is_among_them():
    met = [wn.schedule(case.problem(dtype).launched, config, H200) for case, dtype in PLANNED for config in configs_of(dtype) for config in [case.legal(config, dtype)]]
    launches = [launch for program in met for step in (*program.whole, *(program.filter_last or ())) for launch in step]
    structs = [launch.arguments for launch in launches if launch.kernel == "hopper_wgrad"]
    added = [launch.arguments for launch in launches if launch.kernel == "hopper_wgrad_add"]
    assert {s.taps_fastest for s in structs} == {0, 1} and {s.channels % 4 for s in added} == {0, 1, 2, 3}
    copied = [launch.arguments for launch in launches if launch.kernel == "fold_channels"]
    assert {s.chunks == 1 for s in copied} == {s.stride_h > 1 for s in copied} == {s.dilation_w > 1 for s in copied} == {True, False} and any(s.channels == 1 for s in copied)
    assert {wgrad_form.fold_level(case.problem(dtype).launched) for case, dtype in PLANNED} == {0, 1, 2}
    assert {wgrad_form.fold_level(wgrad_form.flip(case.problem().launched)) for case in FEW} == {0, 1, 2}
    assert {s.taps_inner for s in structs} == {0, 1}
    assert {s.spatial_dims for s in structs} == {0, 1, 2, 3} and {s.taps > 1 for s in structs} == {s.group_packs > 1 for s in structs} == {s.own_columns < s.columns for s in structs} == {True, False}
    assert {s.tiles_m > 1 for s in structs} == {s.tiles_n > 1 for s in structs} == {s.stages < s.splits for s in structs} == {True, False}
    assert {launch.kernel for launch in launches} == {"hopper_wgrad", "hopper_wgrad_reduce", "hopper_wgrad_add", "fold_channels"}
    assert max(launch.arguments.tiles_t for launch in launches if launch.kernel == "hopper_wgrad_reduce") == 2


@pytest.mark.parametrize("split", [1, 2, 7, 9, 16, 40, 280])
def test_every_cut_of_a_sum(split):
    case = CASES[0]
    arrays = case.integers("float16")
    assert_exact(emulator.emulate(case.problem(), WgradNhwc(64, 128, 3, split), *arrays), case.reference(*arrays))


PAIRS = [  # neighbouring columns, whose dy two blocks load for each other
    (Filter((3, 72, 10, 12), (136, 72, 1, 1)), WgradPairs(64, 64, 3, 2)), (Filter((1, 200, 6, 7), (264, 200, 1, 1)), WgradPairs(128, 128, 3)),
    (Filter((2, 128, 9, 7), (72, 128, 3, 1), padding=(1, 0)), WgradPairs(128, 64, 4, 3)), (Filter((2, 136, 7, 5), (72, 136, 1, 2)), WgradPairs(128, 192, 2)),
    (Filter((3, 200, 13, 9), (72, 200, 1, 1), stride=(2,)), WgradPairs(64, 64, 2)),
]


@pytest.mark.parametrize(("case", "config"), PAIRS, ids=str)
def test_pairs_of_tiles(case, config):
    arrays = case.integers("float16")
    assert_exact(emulator.emulate(case.problem(), config, *arrays), case.reference(*arrays))


# ---- what is legal, and the choice

BASE = CASES[0]


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (BASE.problem("float64"), WgradNhwc(), "float32, float16 and bfloat16"), (precise(BASE), WgradNhwc(64, 128), "64 rows and 64 columns"), (BASE.problem(layout="NCHW"), WgradNhwc(), "without stride and padding"),
        (PLANES[0].problem("float32"), WgradNhwc(64, 64), "NCHW arrays of float16 and bfloat16"), (Filter((2, 8, 14, 14), (8, 8, 1, 1)).problem(layout="NCHW"), WgradNhwc(), "multiple of 16 bytes"),
        (Filter((2, 9, 8, 8), (8, 9, 1, 1)).problem(layout="NCHW"), WgradNhwc(), "two neighbouring channels"),
        (Filter((2, 18, 8, 8), (12, 6, 1, 1), groups=3).problem(layout="NCHW"), WgradNhwc(), "together a multiple of 16 bytes"), (Filter((2, 8, 8, 8), (8, 8, 1, 1), stride=(2,)).problem(layout="NCHW"), WgradNhwc(), "without stride"),
        (PLANES[0].problem(), WgradNhwc(192), "a tile has 64 rows and 64 columns"),
        (BASE.problem("float32", precision="tf32"), WgradNhwc(256), "a tile has"),
        (Filter((2, 12, 9, 8), (40, 12, 3, 3)).problem(), WgradNhwc(), "by the launch that adds"), (Filter((1, 9, 2**15, 2**15), (1, 9, 1, 1)).problem(), WgradNhwc(SPLIT=2), "counted in"),
        (Filter((2, 90, 9, 8), (48, 30, 3, 3), groups=3).problem(), WgradNhwc(), "multiples of 16 bytes"), (Filter((2, 32, 9, 8), (32, 2, 3, 3), groups=16).problem(), WgradNhwc(), "groups of 4 channels or more"), (Filter((2, 56, 9, 8), (56, 7, 3, 3), groups=8).problem(), WgradNhwc(), "an even number"), (Filter((0, 16, 9, 8), (16, 16, 3, 3)).problem(), WgradNhwc(), "nothing to compute"),
        (Filter((2, 8, 2**15, 2**15), (8, 8, 1, 1)).problem(), WgradNhwc(), "32 bits"), (Filter((1, 16, 6, 300), (8, 16, 2, 2), dilation=(3, 256)).problem(), WgradNhwc(), "stride, padding or dilation"),
        (Filter((1, 16, 40, 40), (8, 16, 2, 2), stride=(9,)).problem(), WgradNhwc(), "stride, padding or dilation"),
        (BASE.problem(), WgradNhwc(96), "a tile has 64 rows"), (BASE.problem(), WgradNhwc(256, 256), "256 rows and 192 columns"),
        (BASE.problem(), WgradNhwc(64, 192, 4), "bytes of shared memory"), (BASE.problem(), WgradNhwc(192, 192, 5), "bytes of shared memory"),
        (BASE.problem(), WgradNhwc(64, 64, 3, 2, True), "a tile has 128 rows and 64"), (CASES[1].problem(), WgradNhwc(128, 64, 3, 2, True), "and several taps"), (CASES[9].problem(), WgradNhwc(128, 64, 3, 2, True), "no strides"),
        (Filter((1, 16, 9, 8), (8, 16, 3, 3), padding=(3,)).problem(), WgradNhwc(128, 64, 3, 2, True), "no padding wider"),
        (BASE.problem(), WgradNhwc(64, 64, 1), "bytes of shared memory"), (BASE.problem(), WgradNhwc(128, 128, 4, 0), "at least one split"), (BASE.problem(), WgradNhwc(128, 128, 4, 2**31), "its grid"),
    ],
    ids=lambda v: str(v)[:50],
)  # fmt: skip
def test_a_configuration_says_why_it_cannot(problem, config, reason):
    check_refused_on(H200, problem, config, reason)


def test_other_gpus_do_not_have_it():
    for capability, backend in (((8, 0), "cuda"), ((10, 0), "cuda"), ((0, 0), "opencl")):
        assert engines.refusal(BASE.problem(), WgradNhwc(), like_h200(capability, backend)) is not None


def test_the_choice_is_legal_and_its_texts_are_listed():
    """Of random layers of every family: what is chosen, and a candidate's launches."""
    listed, r, met = [*wn.variants(H200)], random.Random(3), 0
    for family in ("dense 3x3", "dense 1x1", "small batch", "grouped", "volume", "odd"):
        for _ in range(8):
            try:
                problem = families.problem(families.layer(r, family), "wgrad", *r.choice((("bfloat16", "fp32"), ("float32", "tf32"), ("float32", "fp32"))), "NHWC").launched
            except ValueError:
                continue
            if wn.why_not(problem):
                assert wn.choose(problem, H200) is None
                continue
            found = list(wn.configs(problem, H200))
            assert len(set(found)) == len(found) and wn.choose(problem, H200)[1] in found and all(wn.refusal(problem, config) is None for config in found)
            program = wn.schedule(problem, r.choice(found), H200)
            launches = [launch for step in program.whole for launch in step]
            parts = [4 * one.structs[0].splits * one.structs[0].size for one in launches if one.kernel == "hopper_wgrad" and one.buffers[0] != RESULT]
            copies = [16 * one.arguments.words for one in launches if one.kernel == "fold_channels"]
            assert program.workspace_bytes == sum(-(-nbytes // 256) * 256 for nbytes in parts + copies)
            for launch in launches:
                assert any(launch in one for one in listed), launch.defines
                met += 1
    assert met > 20


def test_the_machine_is_filled():
    """Long sums for few results are cut until the blocks fill it; many results are not."""
    few = Filter((64, 64, 56, 56), (64, 64, 3, 3), padding=(1,)).problem("bfloat16").launched
    us, config = wn.choose(few, H200)
    (product, *_), *_ = wn.schedule(few, config, H200).whole
    assert product.grid > H200.multiprocessors / 2 and config.SPLIT > 8 and 20 < us < 60
    many = Filter((64, 2048, 7, 7), (2048, 2048, 3, 3), padding=(1,)).problem("bfloat16").launched
    assert wn.choose(many, H200)[1].SPLIT == 1


def test_the_order_of_sums():
    problem = BASE.problem().launched
    assert wn.sum_order(problem, WgradNhwc(64, 64, 4)) == wn.sum_order(problem, WgradNhwc(256, 192, 4))
    assert len({wn.sum_order(problem, WgradNhwc(64, 64, 4, split)) for split in (1, 2, 8)}) == 3
    assert wn.filter_key(problem, WgradNhwc()) is None


# ---- numbers that are not finite


def check_not_finite(run, dtype: str = "float16", values: tuple = (np.inf, -np.inf, np.nan)) -> None:
    """They reach the results that they are part of, and no others."""
    case = Filter((2, 24, 5, 7), (16, 24, 3, 3), padding=(1,))
    x, dy = case.integers(dtype, seed=1)
    clean = run(case, x, dy)
    assert_exact(clean, case.reference(x, dy))
    for value in values:
        bad = x.copy()
        bad[1, 5, 0, 6] = value  # in the last column of the first row: taps (2, 2), (1, 2) and their like never meet it
        ones = np.ones_like(dy)
        got = run(case, bad, ones)
        meets = np.zeros(case.w, bool)
        meets[:, 5] = [[False, False, False], [True, True, False], [True, True, False]][::-1]
        met = ~np.isfinite(case.reference(bad, ones))
        assert (~np.isfinite(got) == met).all() and met.any() and not met[:, :5].any() and not met.all()
        bad = dy.copy()
        bad[0, 3, 4, 6] = value
        got = run(case, x, bad)
        assert not np.isfinite(got[3]).any() and np.array_equal(np.delete(got, 3, 0), np.delete(clean, 3, 0))


def check_met_only(case: Filter, run) -> None:
    """Numbers of either array that are not finite reach the results that they are part of, and no others."""
    x, dy = case.integers("float16", seed=1)
    clean = run(case, x, dy)
    assert_exact(clean, case.reference(x, dy))
    for value in (np.inf, -np.inf, np.nan):
        for of_x in (True, False):
            bad, marked = (np.ones_like(x), np.ones_like(dy)), (np.ones_like(x), np.ones_like(dy))
            marked[not of_x][:] = 0
            for arrays, one in ((bad, value), (marked, 1)):
                arrays[not of_x][1, 2, 0, 6] = one  # in the last column of the first row: some taps never meet it
            met = case.reference(*marked) != 0
            assert np.array_equal(~np.isfinite(run(case, *bad)), met) and met.any() and not met.all()


#: Of flipped tiles: with the taps of a row folded, of all, and none.
NOT_FINITE = [Filter((2, 24, 5, 7), (channels, 24, 3, 3), padding=(1,)) for channels in (12, 6, 64)]


def check_precise(run, case: Filter) -> None:
    """Of float32: a sum as an honest one in float32, of random numbers, of the smallest normal ones, and of the largest."""
    x, dy = case.normals("float32")
    for scale_x, scale_dy in ((1, 1), (2.0**-120, 2.0**110), (2.0**-30, 2.0**125)):
        scaled = (x * np.float32(scale_x)).astype("float32"), (dy * np.float32(scale_dy)).astype("float32")
        ref = case.reference(*scaled)
        assert_close(run(case, *scaled), ref, case.bound(*scaled, ref, "fp32"))
    length = case.dy[0] * math.prod(case.dy[2:])
    off = (run(case, x, dy) - (ref := case.reference(x, dy))) / np.sqrt(case.reference(x**2, dy**2) + 1e-30)
    assert np.sqrt((off**2).mean()) < 2e-7 * (1 + length**0.5 / 100), np.abs(ref).max()
    x[(0,) * x.ndim] = np.finfo("float32").max
    assert np.isfinite(run(case, x, (dy / 1024).astype("float32"))).all()


def test_what_is_not_finite_reaches_its_own_results_only():
    check_not_finite(lambda case, x, dy: emulator.emulate(case.problem(), WgradNhwc(64, 128, 3, 2), x, dy, finite=False))


@pytest.mark.parametrize(
    ("case", "scalars"),
    [
        (CASES[1], "tiles_m tiles_n stages part columns column_blocks load_plane size"), (CASES[4], "inner taps tap_s dilation_w dilation_h load_q load_pq stride_h stride_w low_h low_w spatial_dims"),
        (CASES[10], "group_packs"), (CASES[15], "rows own_rows own_columns"), (CASES[13], "tap_r dilation_d stride_d low_d"),
    ],
    ids=str,
)  # fmt: skip
def test_the_emulator_notices_a_wrong_scalar(case, scalars, monkeypatch):
    arrays = case.integers("float16")
    ref = case.reference(*arrays)
    check_noticed(wn, "hopper_wgrad", case.problem(), WgradNhwc(64, 64, 3, 2), arrays, scalars, 1, lambda got: assert_exact(got, ref), monkeypatch)


# ---- the kernels, compiled


def test_steps_fit_their_kernels():
    for config in CONFIGS:
        check_steps(wn.schedule(BASE.problem().launched, config, H200), "hopper_wgrad")
        check_steps(wn.schedule(CASES[12].problem().launched, config, H200), "hopper_wgrad_reduce")
        check_steps(wn.schedule(PADDED[1].problem().launched, config, H200), "fold_channels")


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
def test_the_planner_s_kernels_compile_and_do_not_spill():
    steps = {}
    for size, types in ((2, [dtype for dtype in TYPES if dtype != "float32"]), (4, [dtype for dtype in TYPES if dtype == "float32"])):
        tiles = [(rows, columns, columns == widths[-1]) for rows, widths in wn.TILES[size].items() for columns in widths]
        for rows, columns, widest in tiles:
            for dtype in types:
                if widest or dtype == types[0]:
                    turned = widest and columns in wn.FLIPPED_TILES[size].get(rows, ())
                    config = WgradNhwc(rows, columns, wn._max_stages(rows, columns, size), 2, turned)
                    for launch in (launch for step in wn.schedule(BASE.problem(dtype).launched, config, H200).whole for launch in step):
                        steps[launch.source()] = launch, str(config)
    for rows in wn.TILES[8]:
        config = WgradNhwc(rows, 64, wn._max_stages(rows, 64, 8), 2)
        for launch in (launch for step in wn.schedule(precise(BASE).launched, config, H200).whole for launch in step):
            steps[launch.source()] = launch, str(config)
    check_compiled(steps)


# ---- on the GPU


def ids_of(runs) -> list[str]:
    return [f"{dtype}-{'_'.join(map(str, vars(config).values()))}-{case}" for case, dtype, config in runs]


RUNS = [(case, dtype, case.legal(config, dtype)) for case in (*CASES, DEEP) for dtype in TYPES for config in configs_of(dtype)]
LARGE = Filter((9, 192, 28, 28), (256, 192, 3, 3), padding=(1,))
RUNS += [(case, dtype, case.legal(config, dtype)) for case in PADDED for dtype in TYPES for config in configs_of(dtype)[2:6]]
RUNS += [(case, dtype, config) for case, config in (*PAIRS, *((LARGE, WgradPairs(*tile)) for tile in ((128, 128, 6, 2), (128, 64, 8), (64, 64, 6, 9))))
         for dtype in TYPES if dtype != "float32"]
RUNS += [(case, dtype, config) for case in PLANES for dtype in TYPES if dtype != "float32" for config in CONFIGS_PLANES]
RUNS += [(case, dtype, flipped(4 if dtype == "float32" else 2, i + more)) for i, case in enumerate(FEW) for dtype in TYPES for more in (0, 1)]
RUNS += [
    (LARGE, dtype, WgradNhwc(rows, widths[-1], wn._max_stages(rows, widths[-1], 4 if dtype == "float32" else 2), split))
    for dtype in TYPES for rows, widths in wn.TILES[4 if dtype == "float32" else 2].items() for split in (1, 2, 9)
]  # fmt: skip


@cache
def plans() -> dict:
    """The plans of all runs."""
    return plans_of_gradients("filters channels last", RUNS)


def launched(torch, plan: Plan, x: np.ndarray, dy: np.ndarray, filter_last: bool = False) -> np.ndarray:  # noqa: F811
    """What `plan` computes: all arrays between margins of NaN, workspace and result NaN before."""

    def surrounded(content):
        size = content if isinstance(content, int) else content.size
        whole = torch.full((2 * MARGIN + size,), 0xFF, dtype=torch.uint8, device="cuda")
        if not isinstance(content, int):
            whole[MARGIN : MARGIN + size] = torch.from_numpy(content.copy()).cuda()
        return whole

    order = plan.problem.order or range(x.ndim)
    wholes = [surrounded(np.frombuffer(np.ascontiguousarray(a.transpose(order)).tobytes(), np.uint8)) for a in (x, dy)]
    wholes += [surrounded(math.prod(plan.result_shape) * x.dtype.itemsize), surrounded(plan.workspace_bytes)]
    of_x, of_dy, result, scratch = (whole.data_ptr() + MARGIN for whole in wholes)
    with plan.device:
        plan.launch((of_x, of_dy, 0, 0, 0, result, scratch), filter_last=filter_last)
    torch.cuda.synchronize()
    for whole in wholes:
        assert (whole[:MARGIN] == 0xFF).all() and (whole[-MARGIN:] == 0xFF).all(), f"{plan} wrote outside its arrays"
    found, (k, c, *taps) = wholes[2][MARGIN:-MARGIN].cpu().numpy().view(x.dtype), plan.result_shape
    return np.moveaxis(found.reshape(k, *taps, c), -1, 1) if filter_last else found.reshape(plan.result_shape)


def check_bound(runs) -> None:
    """Random data stay within the bound of an honest sum, on the simulated machine."""
    for case, dtype, config in runs:
        arrays = case.normals(dtype)
        ref = case.reference(*arrays)
        assert_close(simt.computed(case.problem(dtype), config, *arrays), ref, case.bound(*arrays, ref), config)


def check_notices(case: Filter, config, broken: tuple[str, str], message: str) -> None:
    """A kernel whose text is broken is told by one of twelve orders in which its threads run."""
    arrays = case.integers("float16")
    with pytest.raises((AssertionError, pytest.fail.Exception), match=message):
        for seed in range(12):
            assert_exact(simt.computed(case.problem(), config, *arrays, seeds=(seed,), broken=broken), case.reference(*arrays))


def check_choices(engine, device, problems, every: int, most: int) -> int:
    """What is chosen is a candidate; every so many-th candidate is legal, has a time, and its product's text is listed.

    How many of the problems have candidates, of which there are fewer than `most`.
    """
    met, listed = 0, list(engine.variants(device))
    for problem in problems:
        found = list(engine.configs(problem, device))
        assert len(set(found)) < most
        for config in found[::every]:
            assert engine.refusal(problem, config) is None and 0 < engine.time(problem, config, device) < 1e6
            assert any(engine.schedule(problem, config, device).whole[0][0] in family for family in listed)
        chosen = engine.choose(problem, device)
        assert (chosen is None) == (not found) and (chosen is None or chosen[1] in found)
        met += bool(found)
    return met


def plans_of_gradients(name: str, runs) -> dict:
    """The plans of all runs (case, dtype, configuration) on a GPU, by the runs' words."""
    return side_by_side(name, lambda run: Plan(run[0].problem(run[1]), "cuda", config=run[2]), runs)


def check_on_the_gpu(torch, plan: Plan, case: Filter, dtype: str) -> tuple[tuple[np.ndarray, ...], np.ndarray]:  # noqa: F811
    """Exact for integers, within the bound for random numbers, with the same bits again: the random arrays and their gradient."""
    arrays = case.integers(dtype)
    assert_exact(launched(torch, plan, *arrays), case.reference(*arrays), plan)
    arrays = case.normals(dtype)
    ref, got = case.reference(*arrays), launched(torch, plan, *arrays)
    assert_close(got, ref, case.bound(*arrays, ref), plan)
    assert got.tobytes() == launched(torch, plan, *arrays).tobytes()
    return arrays, got


@pytest.mark.gpu
@pytest.mark.parametrize("run", RUNS, ids=ids_of(RUNS))
def test_on_the_gpu(torch, run):  # noqa: F811
    plan = plans()[str(run)]
    arrays, got = check_on_the_gpu(torch, plan, *run[:2])
    case, *_ = run
    assert plan.writes_filter_last == (case.has_taps and case.layout == "NHWC")
    if plan.writes_filter_last:
        assert got.tobytes() == launched(torch, plan, *arrays, filter_last=True).tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "config"), [*PRECISE, *PRECISE_FLIPPED, *((case, WgradNhwc(rows, 64, 6, split)) for case in (DEEP, LARGE) for rows in (64, 128) for split in (1, 9))], ids=str)
def test_float32_on_the_gpu(torch, case, config):  # noqa: F811
    plan = Plan(precise(case), "cuda", config=config)
    arrays = case.integers("float32")
    assert_exact(launched(torch, plan, *arrays), case.reference(*arrays), plan)
    check_precise(lambda case, x, dy: launched(torch, plan, x, dy), case)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [WgradNhwc(64, 64, 4), WgradNhwc(64, 64, 4, 2)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_is_not_finite_on_the_gpu(torch, config, dtype):  # noqa: F811
    check_not_finite(lambda case, x, dy: launched(torch, Plan(case.problem(dtype, precision="fp32"), "cuda", config=config), x, dy), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("case", NOT_FINITE, ids=str)
def test_flipped_tiles_keep_what_is_not_finite_to_its_results_on_the_gpu(torch, case):  # noqa: F811
    check_met_only(case, lambda case, x, dy: launched(torch, Plan(case.problem(), "cuda", config=WgradNhwc(128, 64, 4, 2, True)), x, dy))


@pytest.mark.gpu
def test_the_gradient_lies_as_its_filter_does(torch):  # noqa: F811
    """The first time, when it is made again, and in a compiled step; the bits are those of C order."""
    import pycuda_conv as pc

    last = torch.channels_last
    x, w, dy = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16).to(memory_format=last) for shape in ((4, 64, 14, 14), (72, 64, 3, 3), (4, 72, 14, 14)))
    out = torch.empty(w.shape, device="cuda", dtype=w.dtype)
    assert pc.conv2d_weight(x, w.shape, dy, padding=1, out=out) is out
    w.requires_grad_()

    def step(x, w, dy):
        w.grad = None
        pc.conv2d(x, w, padding=1).backward(dy)
        return w.grad

    for again in range(3):
        made = [pc.conv2d_weight(x, w.shape, dy, padding=1), step(x, w, dy), step(x.detach().requires_grad_(), w, dy)]
        made += [torch.compile(pc.conv2d_weight, backend="aot_eager", fullgraph=True)(x, w.shape, dy, padding=1)] if again == 2 else []
        assert all(one.stride() == w.stride() and torch.equal(one, out) for one in made)
