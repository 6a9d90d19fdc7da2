"""The text of the kernels for Hopper, run on the CPU (simt): its barriers, rings, descriptors, addresses and sums, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import emulator
import numpy as np
import pytest
import simt
import test_implicit_gemm as implicit
from alike import check_moments, sharing
from awkward import BASE, SHAPES
from modes import asked, dtype_of
from reference import ACTIVATIONS, DTYPES, EPS, Case, activated, assert_close, assert_exact, dgrad, fprop
from test_implicit_gemm import TILES

from pycuda_conv.engines import packing, split_sum
from pycuda_conv.engines.direct import direct
from pycuda_conv.engines.direct.gemm import Gemm
from pycuda_conv.engines.hopper import gemm as ig
from pycuda_conv.engines.hopper.dense import DenseNhwc
from pycuda_conv.engines.hopper.gemm import ImplicitGemm
from pycuda_conv.engines.hopper.pointwise import Pointwise
from pycuda_conv.engines.layout import cast as casting
from pycuda_conv.engines.nn import batch_norm
from pycuda_conv.engines.schedule import Moments
from pycuda_conv.runtime.base import TensorMap

pytestmark = pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))


def sample(cases, modes, tiles_of) -> list[tuple[Case, str, object]]:
    """Each case in a mode, with a tile: all modes, tiles and values of defines, in few texts."""
    return sharing([[(case, mode, config) for mode in modes for config in tiles_of(case, mode)] for case in cases])


def ids(runs) -> list[str]:
    return [f"{mode}-{config}-{case}" for case, mode, config in runs]


def check(case: Case, mode: str, config, seeds=(1, 2, 3), **options) -> None:
    arrays = case.integers(dtype_of(mode))
    assert_exact(simt.computed(asked(case, mode), config, *arrays, seeds=seeds, **options), case.reference(*arrays), config)


# ---- hopper/dense.cu, transpose_filter.cu

@pytest.mark.parametrize(
    ("case", "mode", "config"),
    [
        (dgrad((1, 16, 5, 4), (16, 24, 3, 3), padding=1), "fp16 last", DenseNhwc(128, 64, 3)), (fprop((1, 80, 5, 4), (24, 80, 1, 2)), "bf16 last", DenseNhwc(64, 32, 3)),
        (dgrad((1, 16, 5, 4), (16, 24, 1, 1)), "tf32 last", DenseNhwc(64, 32, 2)), (fprop((1, 56, 5, 4), (24, 56, 2, 1)), "tf32 last", DenseNhwc(64, 32, 4, 2)),
    ],
    ids=str,
)  # fmt: skip
def test_rows_are_as_narrow_as_a_tap_s_last_channels(case, mode, config):
    """Of a filter that lies K-major or MN-major, or is turned, whole sums and parts of them."""
    check(case, mode, config, (1, 2), constants=True, filter_last=True)


# ---- hopper/gemm.cu, pack.cu, direct/gemm.cu, direct/reduce.cu


def planned(case: Case, mode: str) -> list[ImplicitGemm]:
    return [config for config in (TILES[mode],) if implicit.packing(asked(case, mode)) is not None and ig.refusal(asked(case, mode), config) is None]


#: Forms of the loads, with windows, folded taps, groups, phases, phases in pairs; consumers by turns.
IMPLICITS = [
    *sample(SHAPES[2::12], list(TILES), planned),
    *implicit.PINGPONG[1 :: max(len(implicit.PINGPONG) // 2, 1)],
    *implicit.TWINS[:: max(len(implicit.TWINS) // 3, 1)],
]  # fmt: skip


@pytest.mark.parametrize(("case", "mode", "config"), IMPLICITS, ids=ids(IMPLICITS))
def test_implicit_gemm(case, mode, config):
    check(case, mode, config, (1, 2))


@pytest.mark.parametrize(
    ("case", "mode"),
    [(dgrad((1, 24, 3, 4), (24, 12, 3, 3), padding=1), "fp32 last"), (dgrad((1, 32, 2, 3), (32, 6, 3, 2), groups=2), "tf32 last")],
    ids=str,
)  # fmt: skip
def test_filters_of_gradients_are_packed_from_their_channels_last(case, mode):
    """A row's channels lie apart there."""
    check(case, mode, ImplicitGemm(64, 64, 2), (1,), filter_last=True)


@pytest.mark.parametrize("options", [{"padding": 1}, {"stride": 3}], ids=["", "phases that repeat"])
def test_a_filter_with_its_channels_last_mends_what_limbs_cannot_hold(options):
    """The same bits as with the filter in C order."""
    case, config = dgrad((3, 24, 2, 2), (24, 8, 3, 3), bias=False, **options), ImplicitGemm(64, 64, 2)
    x, w, _ = case.normals("float32")
    x[1, 3, 1, 1], x[2] = np.inf, x[2] * np.float32(2.0) ** -100
    w[5, 2] *= np.float32(2.0) ** -30
    found = [simt.computed(asked(case, "fp32 last"), config, x, w, filter_last=last) for last in (False, True)]
    assert found[0].tobytes() == found[1].tobytes() and np.isinf(found[0][1]).any() and np.isfinite(found[0][[0, 2]]).all()


@pytest.mark.parametrize("case", [fprop((2, 6, 9), (8, 3, 4), stride=2, groups=2), dgrad((2, 24, 5, 6), (24, 12, 3, 3), stride=2, padding=1)], ids=str)
def test_plain_products_read_a_filter_with_its_channels_last(case):
    check(case, "fp32 last", Gemm(64, 64, 16, 8, 4, 4), (1,), filter_last=True)


@pytest.mark.parametrize("tiles", [1, 3, 7])
def test_images_of_few_tiles_are_settled_by_the_blocks_of_a_cluster(tiles, monkeypatch):
    """The same bits as by the launch's last blocks: of images that are guessed right, that are packed again, and that have Inf."""
    case, config = fprop((4, 32, 16 * tiles, 15), (24, 32, 3, 3), padding=1, bias=False), ImplicitGemm(64, 64, 2)
    x, w, _ = case.normals("float32")
    x[1] *= np.float32(1000)
    x[2] *= np.float32(1e-9)
    x[3, 5, 7, 7] = np.inf
    problem, got = asked(case, "fp32"), []
    for most in (8, 0):
        monkeypatch.setattr(packing, "CLUSTER", most)
        (first, *_) = [step for stage in emulator.program_of(problem, config, 132).whole for step in stage]
        assert (first.defines["CLUSTER"] > 0) == (most > 0)
        got.append(simt.computed(problem, config, x, w, multiprocessors=132, seeds=(tiles,)))
    assert got[0].tobytes() == got[1].tobytes()
    want, size = case.reference(x[:3], w), case.reference(np.abs(x[:3]), np.abs(w))
    assert_close(got[0][:3], want, 3e-6 * size, config)


def test_many_short_rows_of_a_filter_are_packed_by_warps(monkeypatch):
    """The same bits as by blocks: of rows like any, with Inf, and with numbers that lose bits."""
    case, mode = fprop((1, 32, 6, 15), (24, 32, 3, 3), padding=1, bias=False), "fp32"
    x, w, _ = case.normals("float32")
    w[1, 3, 0, 0] = np.inf
    w[5, 2] *= np.float32(1e-12)
    problem, config, got = asked(case, mode), ImplicitGemm(64, 64, 2), []
    for many in (0, 10**9):
        monkeypatch.setattr(packing, "MANY_ROWS", many)
        (first, *_) = [step for stage in emulator.program_of(problem, config, 132).whole for step in stage]
        assert first.arguments.row_bits == 3 * (many == 0)
        got.append(simt.computed(problem, config, x, w, multiprocessors=132, seeds=(1,)))
    assert got[0].tobytes() == got[1].tobytes()


@pytest.mark.parametrize("case", [dgrad((2, 24, 5, 6), (24, 40, 3, 3), padding=1, bias=False), dgrad((2, 16, 5, 6), (16, 68, 3, 2), stride=2, groups=2, bias=False), dgrad((1, 20, 5, 6), (20, 132, 1, 1), bias=False)], ids=str)
@pytest.mark.parametrize("mode", ["fp32 last", "fp16 last"])
def test_rows_of_a_filter_that_are_neighbours_in_memory_are_packed_four_at_a_time(case, mode, monkeypatch):
    """The same bits as one at a time: of rows like any, with Inf, and with numbers that lose bits."""
    x, w, _ = case.normals(dtype_of(mode))
    w[1, 3, 0, 0], w[5] = np.inf, w[5] * np.array(1e-12, w.dtype)
    problem, config, got = asked(case, mode), ImplicitGemm(64, 64, 2), []
    for rows in (4, 1 << 20):
        monkeypatch.setattr(packing, "NEIGHBOUR_ROWS", rows)
        program = emulator.program_of(problem, config, 132)
        (first, *_) = [step for stage in (program.filter_last or program.whole) for step in stage]
        assert first.arguments.row_bits == 2 * (rows == 4)
        got.append(simt.computed(problem, config, x, w, multiprocessors=132, seeds=(1,), filter_last=program.filter_last is not None))
    assert got[0].tobytes() == got[1].tobytes()


def test_blocks_that_settle_images_wait_in_memory_as_it_comes(monkeypatch):
    """Whatever is in the workspace, and however often: the same bits. What they told one another is not there behind the product."""
    case, config = fprop((2, 16, 20, 64), (8, 16, 3, 3), padding=1, bias=False), ImplicitGemm(64, 64, 2)
    monkeypatch.setattr(packing, "CLUSTER", 0)
    x, w, _ = case.normals("float32")
    x[1] *= np.float32(1e4)
    problem, found = asked(case, "fp32"), []
    program = emulator.program_of(problem, config, 3)
    packs, product = (step for stage in program.steps for step in stage)
    assert packs.kernel == "pack" and packs.arguments.tiles == packs.arguments.slices == 3 and not packs.arguments.filter_rows
    memory, size = emulator.Memory(problem, program, x, w, None, None, None), program.workspace_bytes
    for seed, held in enumerate((np.full(size, 0xFF), np.random.default_rng(2).integers(0, 256, size), np.zeros(size), None)):
        if held is not None:
            memory.buffers[packs.buffers[2][0]] = held.astype(np.uint8)
        simt.run([[packs]], memory, seed)
        limbs, scales, flags, tiles = (memory.view(packs.buffers[i], kind) for i, kind in ((2, "uint16"), (3, "float32"), (4, "int32"), (5, "uint64")))
        found.append((limbs[: 2 * 2 * 16 * 20 * 64].tobytes(), scales[:2].tobytes(), flags[:2].tobytes()))
        marks = tiles[:12] >> np.uint64(26)  # the mark, with the number that a launch has on the machine
        assert (marks == (0xFFF5D3A96B2E91C7 ^ (0x123456789ABCDEF << 26 & 2**48 - 1)) >> 26).all() and product.structs[0].x_tiles == 6 and product.buffers[-2] == packs.buffers[5]
    assert len(set(found)) == 1 and scales[0] == 2.0**-9 and scales[1] > 2.0**-9


#: Sums in parts that blocks of the product add: stored by threads and by TMA, of phases one by one and in pairs, of several launches, of folded taps, of groups, of three axes.
JOINED = [
    (fprop((2, 40, 7, 9), (21, 40, 3, 3), padding=1), "fp32", ImplicitGemm(64, 64, 2, 3)), (fprop((2, 40, 7, 9), (24, 40, 3, 3), padding=1), "fp32 last", ImplicitGemm(64, 64, 2, 4)),
    (fprop((3, 20, 11, 6), (70, 20, 3, 2), stride=2), "tf32 last", ImplicitGemm(128, 64, 3, 2)), (fprop((1, 40, 6, 8), (130, 40, 3, 3), padding=1), "tf32", ImplicitGemm(128, 64, 3, 5)),
    (dgrad((2, 24, 5, 6), (24, 40, 4, 4), stride=2, padding=1), "fp32", ImplicitGemm(64, 64, 2, 2)), (dgrad((2, 24, 5, 6), (24, 20, 3, 3), stride=3), "fp32", ImplicitGemm(64, 64, 2, 2)),
    (dgrad((2, 24, 5, 6), (24, 20, 3, 3), stride=2), "fp32 last", ImplicitGemm(64, 64, 2, 2)), (fprop((2, 3, 15, 14), (20, 3, 5, 5), stride=2, padding=2), "fp32", ImplicitGemm(64, 64, 2, 2)),
    (fprop((2, 48, 6, 7), (40, 24, 3, 3), padding=1, groups=2), "fp32", ImplicitGemm(64, 64, 2, 8)), (fprop((2, 24, 3, 5, 6), (20, 24, 2, 3, 3), padding=1), "fp32", ImplicitGemm(64, 64, 2, 16)),
]  # fmt: skip
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
MENDED_HOW = [(*run, how) for i, run in enumerate(MENDED) for j, how in enumerate(("sums", "gelu" if i // 2 % 2 or run[2].is_pingpong else "residual")) if run not in JOINED or i % 2 == j]


@pytest.mark.parametrize(("case", "mode", "config", "how"), MENDED_HOW, ids=[f"{how}-{id}" for (*_, how), id in zip(MENDED_HOW, ids([run[:3] for run in MENDED_HOW]), strict=True)])
def test_blocks_compute_once_more_what_is_flagged(case, mode, config, how):
    problem = asked(case, mode)
    problem = replace(problem, has_scale=how == "residual", has_residual=how == "residual", activation="gelu" if how == "gelu" else None)
    kernels = [step.kernel for stage in emulator.program_of(problem, config, 3).whole for step in stage]
    assert set(kernels) == {"pack", ig.KERNEL}
    number = MENDED.index((case, mode, config))
    kinds = [list(enumerate(CHANGED.items()))[(number + i) % len(CHANGED)] for i in ((0, 2) if how == "sums" else (3,))]  # by turns
    for seed, (kind, change) in kinds:
        rng = np.random.default_rng(seed)
        x, w, b = case.normals("float32", seed)
        change(x, w, rng)
        residual = rng.normal(size=problem.result_shape).astype("float32") if problem.has_residual else None
        scale = rng.normal(size=case.channels).astype("float32") if problem.has_scale else None
        with np.errstate(all="ignore"):
            of_channel = [None if one is None else one.astype(float).reshape(-1, *(1,) * case.ndim) for one in (scale, b)]
            factor, *summands = (0 if one is None else one for one in (1 if scale is None else of_channel[0], of_channel[1], residual))
            want, size = case.reference(x, w) * factor + sum(summands), case.reference(np.abs(x), np.abs(w)) * np.abs(factor) + sum(map(np.abs, summands))
            want = activated(want, problem.activation)
        y = simt.computed(problem, config, x, w, b, scale, residual, seeds=(seed,))
        rounded = 2.0**-9 if mode.startswith("tf32") else 3e-6
        with np.errstate(all="ignore"):
            wrong = ~((np.abs(y - want) <= rounded * size + 1e-44) | (np.isnan(y) & np.isnan(want)) | (y == want))
        assert not wrong.any(), f"{kind}: {np.argwhere(wrong)[:5]}"


@pytest.mark.parametrize("blocks", [1, 4, 132])
@pytest.mark.parametrize(("case", "mode", "config"), JOINED, ids=ids(JOINED))
def test_blocks_add_the_parts_of_split_sums(case, mode, config, blocks):
    """Exactly, in two launches, whoever comes last; and, of blocks with several tiles, with what was packed before."""
    problem = asked(case, mode)
    program = emulator.program_of(problem, config, blocks)
    packing, *products = [step for stage in program.whole for step in stage]
    assert packing.kernel == "pack" and {step.kernel for step in products} == {"hopper_gemm"}
    assert packing.arguments.tickets == sum(step.structs[0].tiles // config.SPLIT * (step.structs[4].turns if step.defines["PHASES"] > 1 else 1) + 3 & ~3 for step in products)
    check(case, mode, config, (1, 2) if blocks == 4 else (1,), multiprocessors=blocks)
    if blocks == 4:
        check(case, mode, config, (3,), kept=True, multiprocessors=blocks)


def test_flagged_results_need_to_be_computed_once_more():
    """What the test before compares is wrong without."""
    case, mode, config = MENDED[0]
    x, w, b = case.normals("float32")
    x[0, 0, 2, 2] = np.inf
    y = simt.computed(asked(case, mode), config, x, w, b, broken=("if (any_flag) recompute_tiles", "if (false) recompute_tiles"))
    with np.errstate(all="ignore"):
        assert not np.array_equal(np.isinf(y), np.isinf(case.reference(x, w, b)))


# ---- what finishes a sum, and what is noted of it

FINISHED = [(fprop((3, 32, 9, 11), (72, 32, 3, 3), padding=1), "tf32 last", DenseNhwc(64, 64, 4)), (fprop((3, 100, 5, 16), (70, 100, 1, 1)), "fp32", Pointwise(32, 2, 3))]
FINISHED += [run for run in IMPLICITS[::4] if not run[0].transposed]


@pytest.mark.parametrize(("case", "mode", "config"), FINISHED, ids=ids(FINISHED))
def test_the_epilogue(case, mode, config):
    """Bias, scale, residual and ReLU; of every other run by kernels that know the layer, too."""
    case, number = replace(case, bias=True), FINISHED.index((case, mode, config))
    problem = replace(asked(case, mode), has_scale=True, has_residual=True, activation="relu")
    rng, dtype, k = np.random.default_rng(1), dtype_of(mode), (case.channels,)
    x, w, b, s, r = (rng.integers(-3, 4, shape).astype(dtype) for shape in (case.input_shape, case.weight_shape, k, k, problem.result_shape))
    each = (-1, *(1,) * case.ndim)
    ref = case.reference(x, w) * s.astype(float).reshape(each) + b.astype(float).reshape(each) + r.astype(float)
    for constants in (False, True)[: 1 + number % 2]:
        assert_exact(simt.computed(problem, config, x, w, b, s, r, seeds=(1, 2), constants=constants), np.maximum(ref, 0))


@pytest.mark.parametrize(("case", "mode", "config"), FINISHED, ids=ids(FINISHED))
def test_activations(case, mode, config):
    """With a residual and without, the other of the other runs by kernels that know the layer."""
    case, number = replace(case, bias=True), FINISHED.index((case, mode, config))
    rng, dtype, k = np.random.default_rng(1), dtype_of(mode), (case.channels,)
    for i in range(2):
        activation = ACTIVATIONS[(2 * number + i) % len(ACTIVATIONS)]
        problem = replace(asked(case, mode), has_residual=i % 2 == 0, activation=activation)
        x, w, b, r = (rng.integers(-2, 3, shape).astype(dtype) for shape in (case.input_shape, case.weight_shape, k, problem.result_shape))
        w, r = w / w.dtype.type(32), r if problem.has_residual else None
        before = case.reference(x, w, b) + (0 if r is None else r.astype(float))
        got, ref = simt.computed(problem, config, x, w, b, None, r, seeds=(1,), constants=i > number % 2), activated(before, activation)
        assert_close(got, ref, 2.0**-20 * np.abs(before) + EPS[dtype] * np.abs(ref) + 2.0**-22, f"{config} {activation}")


NOTED = implicit.NOTED[::29]


@pytest.mark.parametrize(("case", "mode", "config"), NOTED, ids=ids(NOTED))
def test_moments(case, mode, config):
    check_moments(asked(case, mode), config, case.normals(dtype_of(mode)), partial(simt.run, seed=1))


# ---- batch_norm.cu, with the loads that only CUDA has

PIXELS = [
    batch_norm.Pixels("bfloat16", "NHWC", 3, 16, 35), batch_norm.Pixels("float16", "NHWC", 2, 520, 9), batch_norm.Pixels("bfloat16", "NCHW", 3, 5, 24),
    batch_norm.Pixels("bfloat16", "NHWC", 2, 12, 30), batch_norm.Pixels("float32", "NHWC", 2, 8, 30),
]  # fmt: skip


def lying(array, pixels):
    return np.ascontiguousarray(np.swapaxes(array, 1, 2) if pixels.layout == "NHWC" else array).astype(pixels.dtype)


def launched(made, *arrays):
    """What launches leave in these arrays, or None, where a number stands for so many bytes."""
    (steps, workspace), given = made, []
    for array in arrays:
        given.append(None if array is None else np.full(array, 0xFF, np.uint8) if isinstance(array, int) else array.reshape(-1).view(np.uint8))
    memory = SimpleNamespace(buffers=[*given, np.full(workspace, 0xFF, np.uint8)])
    simt.run([steps], memory, 1)
    return memory.buffers


@pytest.mark.parametrize("redone", [False, True], ids=["", "results were computed again"])
@pytest.mark.parametrize("many", [1, 1000], ids=["by clusters", "by blocks"])
def test_statistics_of_moments_that_a_convolution_noted(redone, many, monkeypatch):
    """The launch that adds them, and counts the batch; or that reads the results."""
    monkeypatch.setattr(batch_norm, "MANY_SLICES", many)
    pixels, per = batch_norm.Pixels("bfloat16", "NHWC", 3, 24, 50), 64
    given = (np.random.default_rng(0).standard_normal((pixels.N * pixels.plane, pixels.K)) + 1).astype(pixels.dtype)
    y = given.astype(float)
    parts = np.array([[part.mean(0), ((part - part.mean(0)) ** 2).sum(0)] for part in (y[i : i + per] for i in range(0, len(y), per))], np.float32)
    workspace = np.concatenate([np.zeros(64, np.float32), np.nan * parts.ravel() if redone else parts.ravel()])
    workspace.view(np.int32)[1] = redone  # the second block has
    moments = Moments(1, len(y), per, pixels.K, parts=256, redone=0, blocks=2)
    (launch,), nothing = batch_norm.statistics(pixels, 3, 1e-5, 0.1, moments)
    empty = np.full(4 * pixels.K, 0xFF, np.uint8)
    buffers = [given.view(np.uint8), None, empty, empty.copy(), None, None, np.array([41]).view(np.uint8), workspace.view(np.uint8)]
    simt.run([[launch]], SimpleNamespace(buffers=buffers), 1)
    assert nothing == 0 and buffers[6].view(np.int64)[0] == 42
    assert_close(buffers[2].view("f"), y.mean(0), np.full(pixels.K, 1e-6))
    invstd = 1 / np.sqrt(y.var(0) + 1e-5)
    assert_close(buffers[3].view("f"), invstd, 1e-5 * invstd)


def mask_of(out, pixels):
    """Where a result is above 0: of each item's numbers a bit."""
    return np.packbits((out.astype("f") > 0).reshape(-1, pixels.item), axis=1, bitorder="little").ravel()


@pytest.mark.parametrize("pixels", PIXELS, ids=str)
def test_batch_norm_with_a_residual(pixels, monkeypatch):
    monkeypatch.setattr(batch_norm, "MOST_WHOLE", 0)
    rng, shape = np.random.default_rng(0), (pixels.N, pixels.K, pixels.plane)
    y, residual, dout = (lying(rng.standard_normal(shape) + mean, pixels) for mean in (1, 0, 0))
    gamma, beta = rng.uniform(0.5, 2, (2, pixels.K)).astype("f")
    axes, wide = ((0, 1), lambda v: v) if pixels.layout == "NHWC" else ((0, 2), lambda v: v[:, None])
    exact = y.astype("d")
    mean, invstd = exact.mean(axes), 1 / np.sqrt(exact.var(axes) + 1e-5)
    *_, found_mean, found_invstd, _, _, counted, _ = launched(batch_norm.statistics(pixels, 3, 1e-5, 0.1), y, None, 4 * pixels.K, 4 * pixels.K, None, None, np.array([41]))
    assert counted.view(np.int64)[0] == 42
    assert_close(found_mean.view("f"), mean, np.full_like(mean, 1e-6))
    assert_close(found_invstd.view("f"), invstd, 1e-5 * invstd)
    of_channel = mean.astype("f"), invstd.astype("f"), gamma, beta
    xhat = (exact - wide(mean)) * wide(invstd)
    out = np.maximum(xhat * wide(gamma) + wide(beta) + residual.astype("d"), 0)
    number = PIXELS.index(pixels)
    for added in (None, residual)[number % 2 :: 2]:  # by turns
        expected = out if added is not None else np.maximum(xhat * wide(gamma) + wide(beta), 0)
        *_, got, mask, _ = launched(batch_norm.forward(pixels, 3, "relu", added is not None), y, *of_channel, added, y.nbytes, None if added is None else pixels.items)
        got = got.view(y.dtype).reshape(y.shape)
        assert_close(got, expected, EPS[pixels.dtype] * np.abs(expected) + 1e-5)
        assert added is None or np.array_equal(mask, mask_of(got, pixels))
    rounded = out.astype(pixels.dtype)
    for summed, mask in ((True, rounded > 0), (False, xhat * wide(gamma) + wide(beta) > 0))[number // 2 % 2 :: 2]:
        dout[np.abs(xhat * wide(gamma) + wide(beta)) < 1e-4] = 0
        g = dout.astype("d") * mask
        given = (mask_of(rounded, pixels), y.nbytes, 8 * pixels.K, y.nbytes) if summed else (None, y.nbytes, 8 * pixels.K, None)
        *_, dy, sums, masked, _ = launched(batch_norm.backward(pixels, 3, "relu", True, summed), y, dout, *of_channel, *given)
        dbeta, dgamma = g.sum(axes), (g * xhat).sum(axes)
        assert_close(sums.view("f").reshape(2, -1), np.stack((dbeta, dgamma)), np.full((2, pixels.K), 1e-3))
        m = pixels.N * pixels.plane
        expected = wide(invstd * gamma) * (g - wide(dbeta) / m - xhat * wide(dgamma) / m)
        assert_close(dy.view(y.dtype).reshape(y.shape), expected, EPS[pixels.dtype] * np.abs(expected) + 1e-4)
        if summed:
            assert np.array_equal(masked.view(y.dtype).reshape(y.shape).astype("d"), g)


WHOLE = [batch_norm.Pixels("bfloat16", "NCHW", 3, 5, 24), batch_norm.Pixels("bfloat16", "NCHW", 30, 2, 24)]


@pytest.mark.parametrize("pixels", WHOLE, ids=str)
def test_a_batch_norm_by_one_launch(pixels, monkeypatch):
    """The same bits as by two: those of the statistics, and of the result. The gradients are the same but for the order of sums."""
    rng, number = np.random.default_rng(0), WHOLE.index(pixels)
    y, residual = (lying(rng.standard_normal((pixels.N, pixels.K, pixels.plane)) + 1, pixels) for _ in range(2))
    gamma, beta = rng.uniform(0.5, 2, (2, pixels.K)).astype("f")
    each, running = 4 * pixels.K, rng.uniform(0.5, 2, (2, pixels.K)).astype("f")
    tracked, added = (np.array([3]), residual) if number % 2 else (None, None)
    apart = launched(batch_norm.statistics(pixels, 3, 1e-5, 0.1), y, tracked, each, each, *running.copy(), np.array([41]))
    out = launched(batch_norm.forward(pixels, 3, "relu", added is not None), y, *apart[2:4], gamma, beta, added, y.nbytes, None if added is None else pixels.items)[6:8]
    whole = batch_norm.whole_forward(pixels, 3, 1e-5, 0.1, "relu", added is not None)
    together = launched(whole, y, tracked, gamma, beta, added, each, each, *running.copy(), np.array([41]), y.nbytes, None if added is None else pixels.items)
    assert all(map(np.array_equal, together[5:10], apart[2:7])) and all(map(np.array_equal, together[10:12], out))
    summed = number == 1
    given = y, residual, *running, gamma, beta, *((out[1], y.nbytes, 2 * each, y.nbytes) if summed else (None, y.nbytes, 2 * each, None))
    together = launched(batch_norm.backward(pixels, 3, "relu", True, summed), *given)
    monkeypatch.setattr(batch_norm, "MOST_WHOLE", 0)
    apart = launched(batch_norm.backward(pixels, 3, "relu", True, summed), *given)
    (dy, sums), (ref, ref_sums) = ((found[7].view(y.dtype).astype("d"), found[8].view("f").astype("d")) for found in (together, apart))
    assert_close(sums, ref_sums, np.full_like(sums, 1e-3))
    assert_close(dy, ref, EPS[pixels.dtype] * np.abs(ref) + 1e-4)
    assert not summed or np.array_equal(together[9], apart[9])


# ---- direct/reduce.cu


def test_the_parts_of_two_sums_are_added_by_one_launch():
    rng, problems = np.random.default_rng(0), (fprop((2, 3, 7, 9), (5, 3, 3, 3)), fprop((1, 3, 6, 6), (70, 3, 1, 1)))
    parts, results, launches = [], [], []
    for i, (case, split) in enumerate(zip(problems, (4, 40), strict=True)):
        problem = replace(case.problem(), has_bias=False)
        size = int(np.prod(problem.result_shape))
        parts.append(rng.standard_normal((split, size)).astype("f"))
        launches.append(replace(split_sum.reduce_launch(problem, split, 2 * i), buffers=(2 * i, 4, 4, 4, 2 * i + 1)))
        results.append(4 * size)
    given = parts[0], results[0], parts[1], results[1], None
    apart = launched((launches, 0), *given)
    together = split_sum.reduce_two(*launches)
    assert together.grid == sum(one.grid for one in launches)
    assert all(map(np.array_equal, launched(([together], 0), *given)[1:4:2], apart[1:4:2]))
    of_other_type = replace(launches[1], defines={**launches[1].defines, "DTYPE": 64})
    finished = replace(launches[0], arguments=launches[0].arguments._replace(has_bias=1))
    assert split_sum.reduce_two(launches[0], of_other_type) is split_sum.reduce_two(finished, launches[1]) is None


# ---- cast.cu


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(5, 7, 3, 3), (40, 1, 3), (9, 4, 1, 1), (1, 1, 1)], ids=str)
def test_casts(shape, dtype):
    wide = np.random.default_rng(0).standard_normal(shape).astype("f")
    size = wide.size
    rounded = wide.astype(dtype)
    made = launched(([casting.narrow(dtype, (size, 0, 1))], 0), wide, 2 * size)[1].view(dtype)
    assert np.array_equal(made, rounded.ravel())
    back = launched(([casting.widen(dtype, (size, 0, 1))], 0), rounded, 4 * size)[1].view("f")
    assert np.array_equal(back, rounded.astype("f").ravel())
    last = launched(([casting.widen_filter(dtype, shape, 0, 1)], 0), rounded, 4 * size)[1].view("f")
    assert np.array_equal(last, np.moveaxis(rounded.astype("f"), 1, -1).ravel())
    other, third = np.arange(1030, dtype="f"), np.arange(3, dtype="f")
    for arrays in ((wide, other, third), (third, wide)):
        parts = [(array.size, 2 * i, 2 * i + 1) for i, array in enumerate(arrays)]
        buffers = [one for array in arrays for one in (array, 2 * array.size)]
        found = launched(([casting.narrow(dtype, *parts)], 0), *buffers)
        assert all(np.array_equal(found[2 * i + 1].view(dtype), array.astype(dtype).ravel()) for i, array in enumerate(arrays))
        given = [one for array in arrays for one in (array.astype(dtype), 4 * array.size)]
        found = launched(([casting.widen(dtype, *parts)], 0), *given)
        assert all(np.array_equal(found[2 * i + 1].view("f"), array.astype(dtype).astype("f").ravel()) for i, array in enumerate(arrays))


# ---- products of operands that both have rows along m and n, as a gradient of the filter multiplies them

ALONG_ROWS = """
#define WGMMA_N COLUMNS
#include "hopper/wgmma.cuh"
// one block of 128: sums[m][n] of a[k][m] and b[k][n], 64 of k, in blocks of SPAN bytes along m and n
constexpr int WIDE = SPAN / 2, BLOCK = 64 * SPAN;
DEVICE uint64_t described(uint32_t address) {
  return (uint64_t)(SPAN == 128 ? 1 : SPAN == 64 ? 2 : 3) << 62 | (uint64_t)(8 * SPAN / 16) << 32 | (uint64_t)(BLOCK / 16) << 16 | address >> 4;
}
extern "C" __global__ void along_rows(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b, float* sums) {
  extern __shared__ uint8_t dynamic[];
  __shared__ alignas(8) uint64_t barrier;
  const uint32_t a = (shared_address(dynamic) + 1023) & ~1023u, b = a + 64 / WIDE * BLOCK;
  constexpr int BLOCKS = (WGMMA_N + WIDE - 1) / WIDE;
  if (threadIdx.x == 0) {
    barrier_init(shared_address(&barrier), 1);
    barrier_init_done();
  }
  __syncthreads();
  AFTER_LAST_LAUNCH
  if (threadIdx.x == 0) {
    barrier_expect(shared_address(&barrier), (64 / WIDE + BLOCKS) * BLOCK);
    for (int i = 0; i < 64 / WIDE; ++i) load_box(a + i * BLOCK, &map_a, shared_address(&barrier), i * WIDE, 0, 0);
    for (int i = 0; i < BLOCKS; ++i) load_box(b + i * BLOCK, &map_b, shared_address(&barrier), i * WIDE, 0, 0);
  }
  barrier_wait(shared_address(&barrier), 0);
  float sum[WGMMA_N / 2];
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma<TYPE, 1, 1>(sum, described(a) + k * (16 * SPAN / 16), described(b) + k * (16 * SPAN / 16), k > 0);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_arrived(sum);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = 0; i < WGMMA_N / 2; ++i)
    sums[(16 * warp + lane / 4 + 8 * (i / 2 % 2)) * WGMMA_N + i / 4 * 8 + 2 * (lane % 4) + i % 2] = sum[i];
}
"""


@pytest.mark.parametrize(("dtype", "columns", "span"), [("float16", 128, 128), ("bfloat16", 96, 128), ("float16", 96, 64), ("float16", 48, 32)])
def test_both_operands_along_their_rows(dtype, columns, span):
    if dtype not in DTYPES:
        pytest.skip("numpy does not know bfloat16 here")
    rng = np.random.default_rng(columns)
    a, b = (rng.integers(-8, 9, (64, n)).astype(dtype) for n in (64, columns))
    memory = SimpleNamespace(buffers=[np.frombuffer(v.tobytes(), np.uint8) for v in (a, b, np.full((64, columns), np.nan, np.float32))])
    maps = tuple(TensorMap(i, 0, (v.shape[1], 64, 1), (2 * v.shape[1], 128 * v.shape[1]), (span // 2, 64, 1), span, dtype) for i, v in enumerate((a, b)))
    source = f'#define COLUMNS {columns}\n#define SPAN {span}\n#define TYPE {16 if dtype == "float16" else 17}\n{ALONG_ROWS}'
    step = SimpleNamespace(kernel="along_rows", source=lambda: source, maps=maps, buffers=(2,), numbers=(), grid=1, block=128, shared=1024 + 128 * (64 + columns + 64))
    simt.run([[step]], memory)
    assert_exact(memory.buffers[2].view(np.float32).reshape(64, columns), a.T.astype(float) @ b.astype(float))


# ---- direct/dgrad.cu


def test_gradients_of_one_order_of_sums_give_the_same_bits():
    """Loops over a plane of the filter are unrolled where a block's share of it is small, which is another order."""
    case, bits = dgrad((1, 24, 3, 4, 5), (24, 8, 3, 3, 3), padding=1, bias=False), {}
    for channels in (8, 4, 2):
        config = direct.Dgrad(BLOCK_K=16, BLOCK_C=channels)
        got = simt.computed(case.problem("float64"), config, *case.normals("float64")[:2], seeds=(1,))
        bits.setdefault(direct.sum_order(case.problem("float64"), config), set()).add(got.tobytes())
    assert len(bits) == 2 and all(len(found) == 1 for found in bits.values())


# ---- what is broken is found


@pytest.mark.parametrize(
    ("read", "said"),
    [("x[-1]", "reads 4 bytes at -4 of buffer 0, which has 36"), ("x[9]", "reads 4 bytes at 36 of buffer 0, which has 36"), ("float4(*(const float4*)(x + 1)).x", "reads 16 bytes at .*, which is no multiple of 16")],
)  # fmt: skip
def test_reads_beside_an_array_and_askew_are_found(read, said):
    source = f'#include "core/launch.cuh"\nextern "C" __global__ void reads(const float* x, float* y) {{ AFTER_LAST_LAUNCH y[0] = {read}; }}'
    step = SimpleNamespace(kernel="reads", source=lambda: source, maps=(), buffers=(0, 1), numbers=(), grid=1, block=32, shared=0)
    with pytest.raises(simt.Wrong, match=said):
        simt.run([[step]], SimpleNamespace(buffers=[np.zeros(36, np.uint8), np.zeros(4, np.uint8)]))


DENSE_RUN = (fprop((2, 136, 7, 5), (9, 136, 3, 2), padding=(1, 0)), "fp16 last", DenseNhwc(64, 32, 3))
STORE_RUN = (BASE, "fp16 last", ImplicitGemm(64, 64, 4))  # it writes boxes
JOIN_RUN = (JOINED[0][0], "fp32", JOINED[0][2])  # its blocks add the parts of sums
READS, WRITES = "which a pending product or store still reads", "which a thread wrote without a fence"
BROKEN = [  # (what is run, what the kernel's text has, what stands there instead, what is said of it)
    (DENSE_RUN, "ring.wait_empty(at);", "", "more than its 1 arrivals"),
    (DENSE_RUN, "ring.wait_full(at);", "", f"a load has not brought yet|{READS}"),
    (DENSE_RUN, "if (behind == 0 || follows) give_back(at, behind);", "", "deadlock:\n  block 0, threads 0 to 127: wait for mbarrier 0 at 1024, parity 1; it has had 1 phases, and lacks 1 arrivals"),
    (DENSE_RUN, "wgmma_wait<behind>();", "wgmma_wait<behind + 1>();", READS),
    (DENSE_RUN, "  wgmma_wait<0>();\n", "\n", "ends with products that it did not wait for|elements differ"),
    (DENSE_RUN, "min(16, (int)shape.pixels - pixel)", "16", "writes .* bytes at .* of buffer 3, which has"),
    (STORE_RUN, "  fence_for_bulk();\n  named_barrier", "  named_barrier", WRITES),
    (STORE_RUN, "  if (TENSOR_STORE && threadIdx.x % 128 == 0) bulk_wait_read<0>();", "", "ends with bulk stores that it did not wait for"),
    (JOIN_RUN, "== (unsigned)shape.splits - 1;", "== 0;", "elements differ"),
    (JOIN_RUN, "tickets[i] = 0;", "tickets[i] = 1;", "elements differ"),
]  # fmt: skip


@pytest.mark.parametrize(("ran", "text", "other", "said"), BROKEN, ids=[text.strip() for _, text, _, _ in BROKEN])
def test_a_broken_kernel_is_found(ran, text, other, said):
    with pytest.raises((AssertionError, pytest.fail.Exception), match=said):
        check(*ran, broken=(text, other))
