"""Gradients of filters from channels-last arrays as they lie, on Hopper's tensor cores (``cu/hopper/wgrad.cu``).

The arrays are float16, bfloat16 and float32. float32 takes three products of TF32, or one with ``precision="tf32"``. For 1x1 filters,
16-bit arrays may be NCHW too. The gradients are few, and each is a long sum over the positions of the convolution's result. So the
positions are cut into runs, and a second launch adds the sums of several runs: ``cu/hopper/wgrad_reduce.cu`` if the gradient's taps are
fastest in memory and the runs are few, ``cu/hopper/wgrad_add.cu`` otherwise.

An array whose pixels are no multiple of 16 bytes is copied first, with zeros behind its channels (``cu/layout/fold_channels.cu``). If x has
few channels, the copy also folds taps into channels: one row of taps, or all. Loading taps of few channels one by one would take longer.

If dy has few channels, a tile would have few rows. Without strides the same sums may then run over the pixels of x, with x and dy
exchanged: flipped tiles.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from pycuda_conv.engines.addressing import MOST_PIXELS, PackedLayout, PhaseAddressing, phase_addressing
from pycuda_conv.engines.base import Config, fastest
from pycuda_conv.engines.geometry import arguments, by_axis, ceil, forward_of, phases, pixel_by_pixel
from pycuda_conv.engines.hopper.common import (
    CLOCK,
    ROW,
    image_map,
    load_base,
    map_type,
    most_shared,
    pixel_cycles,
    stage_channels,
    unsupported,
)
from pycuda_conv.engines.hopper.ring import ALIGNMENT, Ring, sum_bytes
from pycuda_conv.engines.schedule import INPUT, RESULT, WEIGHT, WORKSPACE, Arena, Schedule, grid_refusal
from pycuda_conv.engines.struct import kernel_struct
from pycuda_conv.engines.tensor_cores import BFLOAT, ELEMENTS, FLOAT, HALF
from pycuda_conv.engines.texts import FLAG, TextFamily
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import Device, KernelLaunch, Place, TensorMap

__all__ = [
    "CONFIGS", "LAYOUTS", "MOST_TEXTS", "TENSOR_CORES", "WgradNhwc", "choose", "configs", "filter_key", "refusal", "schedule",
    "sum_order", "texts", "time", "unsupported",
]  # fmt: skip

LEAST_OF_GROUP = 4  # channels of a group, if there are several: with fewer, most products would be thrown away
#: BLOCK_M -> the BLOCK_Ns of the tiles, by the bytes of an element's limbs. Their sums fit the consumers' registers.
TILES: dict[int, dict[int, tuple[int, ...]]] = {
    2: {64: (64, 128, 192, 384), 128: (64, 128, 192, 256), 192: (128, 192), 256: (192,)}, 4: {64: (64, 128), 128: (64, 128)},
    8: {64: (64,), 128: (64,)},
}  # fmt: skip
PAIRED = 192  # columns of the widest tile of 64 rows with two blocks on a multiprocessor
STAGES = 12  # the most stages of a ring
REDUCE_TAPS, REDUCED_CHANNELS = 16, 64  # the most taps, and the channels, of a block of hopper/wgrad_reduce.cu
ADD_THREADS = 256  # of a block of hopper/wgrad_add.cu
LONGEST, MOST_LANES = 8, 32  # the most runs that a thread adds before more threads share a result, and the most threads that do
#: The tiles for NCHW arrays: others gained nothing.
PLANES_TILES = {64: (64,), 128: (64, 128, 192)}
#: Flipped tiles are tried if dy has at most so many channels, and fewer than x: other tiles would then have a single row.
MOST_FLIPPED = 64
FLIPPED_TILES: dict[int, dict[int, tuple[int, ...]]] = {2: {128: (64, 128, 192), 256: (192,)}, 4: {128: (64,)}, 8: {128: (64,)}}
FOLD_THREADS = 256  # threads of a block of fold_channels.cu


@dataclass(frozen=True)
class WgradNhwc(Config):
    """One tile of ``hopper/wgrad.cu``: BLOCK_M channels of dy, BLOCK_N columns (channels of x for some taps), STAGES of its ring, and
    SPLIT runs of positions. FLIPPED: x and dy are exchanged."""

    BLOCK_M: int = 128
    BLOCK_N: int = 192
    STAGES: int = 4
    SPLIT: int = 1
    FLIPPED: bool = False


CONFIGS = (WgradNhwc,)
LAYOUTS = "CHWN", "CNHW"
TENSOR_CORES = True
MOST_TEXTS = {"cuda": 62}


# ---- what runs


def _word(problem: ConvProblem) -> int:
    """Elements in 16 bytes."""
    return 16 // problem.itemsize


def _limbs(problem: ConvProblem) -> int:
    """The TF32 or 16-bit numbers that an element is split into."""
    return 2 if problem.dtype == "float32" and problem.precision == "fp32" else 1


def _factor_bytes(problem: ConvProblem) -> int:
    """Bytes of an element's limbs."""
    return problem.itemsize * _limbs(problem)


def _map_type(problem: ConvProblem) -> str:
    """The element type of the tensor maps: they round float32 to TF32, unless the kernel splits it."""
    return "float32" if _limbs(problem) == 2 else map_type(problem)


def _channels(problem: ConvProblem) -> int:
    """Channels of a block: a row of an operand in shared memory. A stage has equally many positions."""
    return stage_channels(problem)


def _planes(problem: ConvProblem) -> bool:
    """Whether the arrays are NCHW."""
    return problem.layout == "CNHW"


def _folded(problem: ConvProblem, level: int) -> ConvProblem:
    """:func:`forward_of` with `level` innermost axes of taps folded into channels of x, and with as many channels as tensor loads need."""
    forward = forward_of(problem)
    if forward.groups > 1 or _planes(problem):
        return forward

    def outer(values: tuple[int, int, int], *inner: int) -> Any:
        return *values[: 3 - level], *inner[3 - level :]

    taps = math.prod(forward.filter_size[3 - level :])
    word = _word(problem)
    return replace(
        forward, C=ceil(forward.C * taps, word) * word, K=ceil(forward.K, word) * word, filter_size=outer(forward.filter_size, 1, 1, 1),
        input_size=outer(forward.input_size, *forward.output_size), stride=outer(forward.stride, 1, 1, 1),
        padding_before=outer(forward.padding_before, 0, 0, 0), padding_after=outer(forward.padding_after, 0, 0, 0),
        dilation=outer(forward.dilation, 1, 1, 1),
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _level(problem: ConvProblem) -> int:
    """How many innermost axes are folded: the number for which folding and loading take the least time."""
    forward = forward_of(problem)

    def microseconds(level: int) -> float:
        folded = _folded(problem, level)
        blocks = ceil(folded.C, _channels(problem)) * math.prod(folded.filter_size)
        loading = blocks * _positions(problem) * pixel_cycles(problem.itemsize * folded.C) / CLOCK / 132
        size = math.prod(folded.input_shape)
        return loading + (
            0 if folded.C == forward.C and not level else COPY + problem.itemsize * (math.prod(forward.input_shape) + 2 * size) / COPIED
        )

    few = not _planes(problem) and forward.groups == 1 and forward.C < _channels(problem) and 0 not in forward.result_shape
    return min((0, 1, 2) if few else (0,), key=microseconds)


@lru_cache(maxsize=1024)
def _loaded(problem: ConvProblem) -> ConvProblem:
    """The convolution as the loads see it."""
    return _folded(problem, _level(problem))


@lru_cache(maxsize=1024)
def _form(problem: ConvProblem) -> tuple[PackedLayout, PhaseAddressing] | None:
    """How x lies as the loads see it, and how they walk it; None if tensor loads can't make that."""
    forward = _loaded(problem)
    lying = PackedLayout(True, 0, (1, 1, 1), forward.input_size, forward.C, _channels(problem), forward.filter_size)
    (whole,) = phases(forward)
    walk = phase_addressing(forward, whole, lying)
    return None if walk is None else (lying, walk)


@lru_cache(maxsize=1024)
def _flipped(problem: ConvProblem) -> ConvProblem:
    """The problem with x and dy exchanged, which has the same sums with the taps in reverse. It has no strides and one group."""
    forward = forward_of(problem)

    def mirrored(padding: tuple[int, int, int]) -> Any:
        return tuple((tap - 1) * d - p for tap, d, p in zip(forward.filter_size, forward.dilation, padding, strict=True))

    return replace(
        problem, N=forward.K, K=forward.C, input_size=forward.output_size, filter_size=forward.input_size,
        padding_before=mirrored(forward.padding_before), padding_after=mirrored(forward.padding_after),
    )  # fmt: skip


def _seen(problem: ConvProblem, config: WgradNhwc) -> ConvProblem:
    """`problem` as the tiles of `config` see it."""
    return _flipped(problem) if config.FLIPPED else problem


def _bundle(problem: ConvProblem) -> int:
    """Groups of a bundle: as many as fit a row of an operand with their channels of x; 0 if no such number has a multiple of 16 bytes."""
    forward = forward_of(problem)
    if forward.groups == 1:
        return 1
    own = forward.C // forward.groups, forward.K // forward.groups
    fitting = range(1, max(_channels(problem) // own[0], 1) + 1)
    return max((n for n in fitting if forward.groups % n == 0 and not any(n * count % _word(problem) for count in own)), default=0)


def _bundles(problem: ConvProblem) -> int:
    return problem.groups // _bundle(problem)


def _flat(problem: ConvProblem) -> bool:
    """Whether position n of dy reads pixel n of x, as for 1x1 filters without stride and padding."""
    form = _form(problem)
    return form is not None and form[1].flat


def why_not(problem: ConvProblem) -> str | None:
    """Why the kernel can't run `problem`, or None if it can."""
    if problem.layout not in LAYOUTS:
        return "it takes gradients of filters"
    if problem.dtype == "float64":
        return "it takes float16, bfloat16 and float32 arrays"
    forward = forward_of(problem)
    if problem.is_empty:
        return "there is nothing to compute"
    if _planes(problem):
        return _why_no_planes(problem, forward)
    channels = forward.C // forward.groups, forward.K // forward.groups
    if forward.groups > 1 and (min(channels) < LEAST_OF_GROUP or channels[0] % 2 or not _bundle(problem)):
        return f"it takes groups of {LEAST_OF_GROUP} channels or more, an even number of x, some of which are multiples of 16 bytes"
    if any(told.words >= 2**31 for _, told in _copies(problem)):
        return "what it copies is counted in 31 bits"
    if forward.N * max(math.prod(forward.output_size), math.prod(forward.input_size)) >= MOST_PIXELS:
        return "it counts positions in 32 bits"
    return None if _form(problem) else "tensor loads can't make its stride, padding or dilation"


def _why_no_planes(problem: ConvProblem, forward: ConvProblem) -> str | None:
    """Why the kernel can't run `problem`, whose arrays are NCHW, or None if it can."""
    if problem.itemsize != 2:
        return "it takes NCHW arrays of float16 and bfloat16"
    if not pixel_by_pixel(forward):
        return "of NCHW arrays it takes 1x1 filters without stride and padding"
    if math.prod(forward.output_size) % _word(problem):
        return "tensor loads take planes of a multiple of 16 bytes"
    if forward.C // forward.groups % 2:
        return "it writes two neighbouring channels at once"
    if not _bundle(problem):
        return "its tiles take groups whose channels are together a multiple of 16 bytes"
    return "it counts stages in 31 bits" if problem.largest_array >= 2**31 else None


def _why_not_flipped(problem: ConvProblem) -> str | None:
    """Why flipped tiles can't run `problem`, which other tiles can run, or None if they can."""
    forward = forward_of(problem)
    if _planes(problem) or forward.groups > 1 or forward.stride != (1, 1, 1) or math.prod(forward.filter_size) == 1:
        return "flipped tiles take channels-last arrays, one group, no strides and several taps"
    if min(*_flipped(problem).padding_before, *_flipped(problem).padding_after) < 0:
        return "flipped tiles take no padding wider than the filter"
    return why_not(_flipped(problem))


def _tiles_of(problem: ConvProblem, flipped: bool) -> dict[int, tuple[int, ...]]:
    """BLOCK_M -> the BLOCK_Ns of the tiles for `problem`."""
    return PLANES_TILES if _planes(problem) else (FLIPPED_TILES if flipped else TILES)[_factor_bytes(problem)]


def refusal(problem: ConvProblem, config: WgradNhwc) -> str | None:
    """Why `config` can't run `problem`, or None if it can."""
    reason = why_not(problem) or (_why_not_flipped(problem) if config.FLIPPED else None)
    if reason:
        return reason
    tiles_of, seen = _tiles_of(problem, config.FLIPPED), _seen(problem, config)
    if config.BLOCK_N not in tiles_of.get(config.BLOCK_M, ()):
        shown = "; ".join(f"{rows} rows and {', '.join(map(str, columns))} columns" for rows, columns in tiles_of.items())
        return f"a tile has {shown}"
    if config.SPLIT == 1 and not config.FLIPPED and _loaded(problem).C != forward_of(problem).C:
        return "channels that are filled up or folded are written by the launch that adds the parts of several"
    tiles = math.prod(_tiles(seen, config)) * _bundles(problem) * config.SPLIT
    blocks = max(tiles, problem.K * ceil(math.prod(problem.result_size) * problem.N, REDUCED_CHANNELS))
    return grid_refusal(blocks) or _ring(config, _factor_bytes(problem)).refusal(config.STAGES, config.SPLIT)


def _tall(config: WgradNhwc, size: int) -> bool:
    """Whether one consumer has all 128 rows of a tile, TALL in the kernel; `size`: bytes of an element's limbs."""
    return size == 4 and config.BLOCK_M == config.BLOCK_N == 128


def _beside(config: WgradNhwc, size: int) -> int:
    """Blocks that share a multiprocessor."""
    return 2 if _tall(config, size) or (config.BLOCK_M == 64 and config.BLOCK_N <= PAIRED) else 1


def _consumer_columns(config: WgradNhwc) -> int:
    """Columns of a consumer: the widest tiles have two consumers side by side."""
    return config.BLOCK_N if config.BLOCK_N <= 256 else 192


def _threads(config: WgradNhwc, size: int) -> int:
    """Threads of a block: consumers and a producer, which is a warpgroup if consumers of 128 rows need its registers, or else a warp."""
    across = config.BLOCK_N // _consumer_columns(config)
    down = 2 if config.BLOCK_M == 256 else 1 if across > 1 or _tall(config, size) else config.BLOCK_M // 64
    return 128 * down * across + (128 if config.BLOCK_M == 128 * down else 32)


def _ring(config: WgradNhwc, size: int) -> Ring:
    """The ring of a tile, which the sums overwrite in the end. A stage has as many positions as a row has channels."""
    rows, columns = config.BLOCK_M, config.BLOCK_N
    return Ring(ROW * (rows + columns), ALIGNMENT, most_shared(_beside(config, size)), sum_bytes(rows, columns))


def _most_stages(rows: int, columns: int, size: int) -> int:
    """The most stages of a ring that shared memory has room for."""
    return _ring(WgradNhwc(rows, columns), size).deepest(range(STAGES, 1, -1))


# ---- launches


WgradNhwcArguments = kernel_struct("hopper_wgrad", "WgradNhwcArguments")
#: The second struct of ``hopper/wgrad.cu``, for flipped tiles.
FlippedArguments = kernel_struct("hopper_wgrad", "FlippedArguments")
WgradNhwcAddArguments = kernel_struct("hopper_wgrad_add", "WgradNhwcAddArguments")
WgradNhwcReduceArguments = kernel_struct("hopper_wgrad_reduce", "WgradNhwcReduceArguments")
FoldChannelsArguments = kernel_struct("fold_channels", "FoldChannelsArguments")


def schedule(problem: ConvProblem, config: WgradNhwc, device: Device, noted: bool = False) -> Schedule:
    """The launches of `config`, which can run `problem`."""
    scratch, seen = Arena(WORKSPACE), _seen(problem, config)
    parts = scratch.take(4 * config.SPLIT * _sums(problem, config)) if config.SPLIT > 1 else None
    places: dict[int, Place] = {INPUT: INPUT, WEIGHT: WEIGHT}
    copies = []
    for array, told in _copies(seen):
        buffer = array if not config.FLIPPED else WEIGHT if array == INPUT else INPUT
        places[buffer] = place = scratch.take(16 * told.words)
        grid = ceil(told.words, FOLD_THREADS)
        unit = math.gcd(16, problem.itemsize * told.channels)
        defines = {"BYTES": problem.itemsize, "UNIT": unit}
        copies.append(KernelLaunch("fold_channels", defines, grid, FOLD_THREADS, (buffer, place), (), arguments=told))

    def steps(taps_fastest: bool) -> list[list[KernelLaunch]]:
        product = _product(problem, config, places[INPUT], places[WEIGHT], parts, taps_fastest)
        last = []
        if parts:
            apart = taps_fastest and _lanes(config) == 1
            last = [[_reduce(problem, config, parts) if apart else _add(problem, config, parts, taps_fastest)]]
        return [*([copy] for copy in copies), [product], *last]

    if math.prod(problem.result_size) == 1:
        return Schedule.plain(steps(False), scratch.used)
    whole = steps(True)
    return Schedule([], whole, whole, scratch.used, 0, filter_last=steps(False))


@lru_cache(maxsize=1024)
def _copies(problem: ConvProblem) -> tuple[tuple[int, Any], ...]:
    """The arrays that are copied into the channels of :func:`_loaded`: each one's buffer, and the arguments of its copy."""
    forward, loaded, level = forward_of(problem), _loaded(problem), _level(problem)
    found: list[tuple[int, Any]] = []
    if loaded.C != forward.C:
        _, r, s = (tap if i >= 3 - level else 1 for i, tap in enumerate(forward.filter_size))
        (_, h, w), (depth, p, q) = forward.input_size, loaded.input_size
        steps = ("stride", forward.stride, 1), ("pad", forward.padding_before, 0), ("dilation", forward.dilation, 1)
        within = {
            f"{name}_{axis}": values[i] if i >= 3 - level else instead
            for name, values, instead in steps for i, axis in ((1, "h"), (2, "w"))
        }
        chunks = loaded.C // _word(problem)
        found.append((INPUT, arguments(
            FoldChannelsArguments, words=forward.N * depth * p * q * chunks, chunks=chunks, h=h, w=w, p=p, q=q, channels=forward.C,
            folded=forward.C * r * s, fold_s=s, **within,
        )))  # fmt: skip
    if loaded.K != forward.K:
        positions, chunks, within = _positions(problem), loaded.K // _word(problem), dict.fromkeys(("pad_h", "pad_w"), 0)
        within |= dict.fromkeys(("stride_h", "stride_w", "dilation_h", "dilation_w"), 1)
        found.append((WEIGHT, arguments(
            FoldChannelsArguments, words=positions * chunks, chunks=chunks, h=1, w=positions, p=1, q=positions, channels=forward.K,
            folded=forward.K, fold_s=1, **within,
        )))  # fmt: skip
    return tuple(found)


def _lying(problem: ConvProblem, config: WgradNhwc) -> ConvProblem:
    """The convolution whose filter has the layout of a part."""
    return _folded(problem, 0) if config.FLIPPED else _loaded(problem)


def _sums(problem: ConvProblem, config: WgradNhwc) -> int:
    """Sums of a part: those of dw, and zeros for the channels that fill x up."""
    lying = _lying(problem, config)
    return forward_of(problem).K * (lying.C // lying.groups) * math.prod(lying.filter_size)


def _product(problem: ConvProblem, config: WgradNhwc, x: Place, dy: Place, parts: Place | None, taps_fastest: bool) -> KernelLaunch:
    """The launch that multiplies: it writes the result, or parts of it."""
    seen = _seen(problem, config)
    of_columns, of_rows = (dy, x) if config.FLIPPED else (x, dy)
    forward, loaded, bundles = forward_of(seen), _loaded(seen), _bundles(seen)
    stages, (down, across) = _stages(seen), _tiles(seen, config)
    walked, maps = _plane_maps(seen) if _planes(seen) else _maps(seen, of_columns, of_rows)
    _, tap_r, tap_s = loaded.filter_size
    taps, taps_inner = math.prod(loaded.filter_size), int(taps_fastest and parts is None and not config.FLIPPED)
    told = arguments(
        WgradNhwcArguments, tiles_m=down, tiles_n=across, bundles=bundles, splits=config.SPLIT, stages=stages,
        part=_part(seen, config), rows=(loaded if config.FLIPPED and parts else forward).K // bundles, columns=loaded.C // bundles,
        own_rows=forward.K // forward.groups, own_columns=loaded.C // forward.groups,
        column_blocks=_column_blocks(seen), inner=taps if taps_inner else _tap_blocks(seen), taps_inner=taps_inner,
        taps=taps, tap_r=tap_r,
        tap_s=tap_s, **walked, size=_sums(problem, config), taps_fastest=int(taps_fastest), image_stages=_image_stages(seen),
    )  # fmt: skip
    defines = {
        "BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N, "WGMMA_N": _consumer_columns(config), "STAGES": config.STAGES,
        "TYPE": ELEMENTS[problem.dtype], "LIMBS": _limbs(problem), "PLANES": int(_planes(problem)), "FLIPPED": int(config.FLIPPED),
    }
    buffers, structs = ((x, dy), (told, _of_flipped(problem, parts is None, taps_fastest))) if config.FLIPPED else ((), told)
    grid, size = down * across * bundles * config.SPLIT, _factor_bytes(problem)
    return KernelLaunch(
        "hopper_wgrad", defines, grid, _threads(config, size), (parts or RESULT, *buffers), (), maps=maps,
        shared=_ring(config, size).nbytes(config.STAGES), arch="sm_90a", arguments=structs,
    )  # fmt: skip


def _of_flipped(problem: ConvProblem, whole: bool, taps_fastest: bool) -> Any:
    """The arguments by which flipped tiles store their sums, which are the result if `whole`."""
    seen = _flipped(problem)
    forward, loaded, (_, p, q) = forward_of(seen), _loaded(seen), forward_of(seen).output_size
    taps, (_, tap_r, tap_s) = math.prod(forward.filter_size), forward.filter_size
    channels = forward.K if whole else _folded(problem, 0).C
    out_tap, out_c = (1, taps) if whole and taps_fastest else (channels, 1)
    return arguments(
        FlippedArguments, own=forward.C, folds=taps // math.prod(loaded.filter_size), out_k=channels * taps, out_tap=out_tap, out_c=out_c,
        pixels=_positions(seen), plane=math.prod(forward.output_size), pq=p * q, q=q, **by_axis("", forward.input_size),
        **by_axis("low_", tuple(-pad for pad in forward.padding_before)), tap_r=tap_r, tap_s=tap_s, **by_axis("apart_", forward.dilation),
        folded_axes=_level(seen), dense=loaded.K, thin=loaded.C, **by_axis("size_", loaded.input_size),
    )  # fmt: skip


def _maps(problem: ConvProblem, x: Place, dy: Place) -> tuple[dict[str, int], tuple[TensorMap, ...]]:
    """The arguments that say how loads walk x, and the maps of dy and x, for channels-last arrays."""
    loaded, form, positions = _loaded(problem), _form(problem), _positions(problem)
    assert form is not None
    lying, walk = form
    sizes = (loaded.K, positions, 1), (problem.itemsize * loaded.K, problem.itemsize * loaded.K * positions)
    of_x, of_dy = (place if isinstance(place, tuple) else (place, 0) for place in (x, dy))
    map_x = replace(image_map(loaded, of_x[0], lying, walk, _channels(problem)), offset=of_x[1], dtype=_map_type(problem))
    map_dy = TensorMap(*of_dy, *sizes, (_channels(problem), _channels(problem), 1), ROW, _map_type(problem))
    if _flat(problem):
        sizes = (loaded.C, positions, 1), (problem.itemsize * loaded.C, problem.itemsize * loaded.C * positions)
        map_x = replace(map_dy, buffer=of_x[0], offset=of_x[1], sizes=sizes[0], strides=sizes[1])
        return by_axis("dilation_", walk.dilation) | load_base(loaded, walk) | {"rank": 0}, (map_dy, map_x)
    return by_axis("dilation_", walk.dilation) | load_base(loaded, walk), (map_dy, map_x)


def _plane_maps(problem: ConvProblem) -> tuple[dict[str, int], tuple[TensorMap, ...]]:
    """The same for NCHW arrays, which loads do not walk."""
    forward, block = forward_of(problem), _channels(problem)
    plane = math.prod(forward.output_size)
    row = problem.itemsize * plane
    maps = tuple(
        TensorMap(buffer, 0, (plane, channels, forward.N), (row, row * channels), (block, block, 1), ROW, map_type(problem))
        for buffer, channels in ((WEIGHT, forward.K), (INPUT, forward.C))
    )
    unused = ("dilation_d", "dilation_h", "dilation_w", "rank", "load_plane", "load_pq", "load_q", "stride_d", "stride_h", "stride_w")
    return dict.fromkeys((*unused, "low_d", "low_h", "low_w"), 0), maps


def _reduce(problem: ConvProblem, config: WgradNhwc, parts: Place) -> KernelLaunch:
    """The launch that adds few parts if the result's taps are fastest."""
    loaded, own = _lying(problem, config), problem.N
    taps, pitch = math.prod(loaded.filter_size), loaded.C // problem.groups
    folds = math.prod(problem.result_size) // taps
    channels = own * folds
    tiles_t = ceil(taps, REDUCE_TAPS)
    told = arguments(
        WgradNhwcReduceArguments, size=_sums(problem, config), splits=config.SPLIT, taps=taps, channels=channels, pitch=pitch, own=own,
        folds=folds, tile_taps=ceil(taps, tiles_t),
        tiles_c=ceil(channels, REDUCED_CHANNELS), tiles_t=tiles_t,
    )  # fmt: skip
    grid = problem.K * told.tiles_c * told.tiles_t
    defines = {"TYPE": ELEMENTS[problem.dtype]}
    return KernelLaunch("hopper_wgrad_reduce", defines, grid, 32 * told.tile_taps, (parts, RESULT), (), arguments=told)


def _add(problem: ConvProblem, config: WgradNhwc, parts: Place, taps_fastest: bool) -> KernelLaunch:
    """The launch that adds the parts if the result's channels are fastest, or the parts are many."""
    loaded = _lying(problem, config)
    taps, pitch, size = math.prod(loaded.filter_size), loaded.C // problem.groups, _sums(problem, config)
    folds = math.prod(problem.result_size) // taps
    each = 4 if pitch % 4 == 0 else 2
    lanes = _lanes(config)
    width = ADD_THREADS // lanes
    told = arguments(
        WgradNhwcAddArguments, size=size, splits=config.SPLIT, width=width.bit_length() - 1, range=ceil(config.SPLIT, lanes),
        pitch=pitch // each, channels=problem.N * folds, taps_fastest=int(taps_fastest), taps=taps, own=problem.N, folds=folds,
    )  # fmt: skip
    defines = {"TYPE": ELEMENTS[problem.dtype], "EACH": each}
    return KernelLaunch("hopper_wgrad_add", defines, ceil(size, each * width), ADD_THREADS, (parts, RESULT), (), arguments=told)


def _lanes(config: WgradNhwc) -> int:
    """Ranges that the runs are cut into for adding, one a thread: a power of two."""
    return min(MOST_LANES, 1 << (ceil(config.SPLIT, LONGEST) - 1).bit_length())


def _positions(problem: ConvProblem) -> int:
    """Positions of the convolution's result."""
    forward = forward_of(problem)
    return forward.N * math.prod(forward.output_size)


def _image_stages(problem: ConvProblem) -> int:
    """Stages of an image's plane."""
    return ceil(math.prod(forward_of(problem).output_size), _channels(problem))


def _stages(problem: ConvProblem) -> int:
    """Stages of all positions."""
    if _planes(problem):
        return forward_of(problem).N * _image_stages(problem)
    return ceil(_positions(problem), _channels(problem))


def _part(problem: ConvProblem, config: WgradNhwc) -> int:
    """Stages of a run."""
    return ceil(_stages(problem), config.SPLIT)


def _column_blocks(problem: ConvProblem) -> int:
    """Blocks of channels of a bundle of x, for all taps."""
    return _tap_blocks(problem) * math.prod(_loaded(problem).filter_size)


def _tap_blocks(problem: ConvProblem) -> int:
    """Blocks of channels of a bundle of x."""
    return ceil(_loaded(problem).C // _bundles(problem), _channels(problem))


def _tiles(problem: ConvProblem, config: WgradNhwc) -> tuple[int, int]:
    """Tiles of a bundle along the rows, and along the columns."""
    return ceil(problem.K // _bundles(problem), config.BLOCK_M), ceil(_column_blocks(problem), config.BLOCK_N // _channels(problem))


def filter_key(problem: ConvProblem, config: WgradNhwc) -> None:
    """None: nothing is packed."""


def sum_order(problem: ConvProblem, config: WgradNhwc) -> Hashable:
    """How the positions are cut into runs; all tiles sum a run in the same order."""
    return config.FLIPPED, config.SPLIT


def texts(device: Device) -> Iterator[TextFamily]:
    """A text for each tile and type."""
    for flipped, (size, types) in itertools.product((False, True), ((2, (HALF, BFLOAT)), (4, (FLOAT,)), (8, (FLOAT,)))):
        for rows, widths in (FLIPPED_TILES if flipped else TILES)[size].items():
            for columns in widths:
                config = WgradNhwc(rows, columns, _most_stages(rows, columns, size))
                choices = {
                    "BLOCK_M": (rows,), "BLOCK_N": (columns,), "WGMMA_N": (_consumer_columns(config),), "STAGES": (config.STAGES,),
                    "TYPE": types, "LIMBS": (2 if size == 8 else 1,), "PLANES": FLAG if size == 2 and not flipped else (0,),
                    "FLIPPED": (int(flipped),),
                }  # fmt: skip
                yield TextFamily("hopper_wgrad", choices, _is_listed, "sm_90a")
    yield TextFamily("hopper_wgrad_reduce", {"TYPE": (HALF, BFLOAT, FLOAT)})
    yield TextFamily("hopper_wgrad_add", {"TYPE": (HALF, BFLOAT, FLOAT), "EACH": (2, 4)})
    for size in (2, 4):
        yield TextFamily("fold_channels", {"BYTES": (size,), "UNIT": tuple(unit for unit in (2, 4, 8, 16) if unit >= size)})


def _is_listed(d: Mapping[str, int]) -> bool:
    """Whether a product with these defines is ever launched."""
    return not d["PLANES"] or d["BLOCK_N"] in PLANES_TILES.get(d["BLOCK_M"], ())


# ---- the choice

# Fitted to 3300 times of 115 layers, 16 bits and TF32, on H100s: root mean square of the error 9%. STORED and TALL were fitted to 142 later
# times, with fp32: 10%.
FIRST, AGAIN = 2.43, 1.47  # microseconds of a launch, and of each further round of blocks, which do not persist
MEMORY = 2.8e6  # bytes a microsecond
PARTED, STORED = 79e3, 25e3  # bytes a microsecond and multiprocessor: of parts, and of results
#: Relative times of loads, beside pixel_cycles: those that walk nothing, and im2col.
BOXED, WALKED = 1.5 / 3.1, 2.1 / 3.1
WAIT, STEP = 922, 280  # cycles until a load arrives; cycles of a stage beside its products
REDUCE, ADDED = 1.2, 3.04e6  # microseconds of the launch that adds the parts, and bytes of parts a microsecond
COPY, COPIED = 1.3, 2.23e6  # the same of a launch of fold_channels.cu
LEAST_STAGES = 4  # of a run, if there are several
#: By the bytes of an element's limbs: cycles of a stage for each of a tile's sums, and the relative time of loads beside those of 16 bits.
PRODUCT, LOADS = {2: 1 / 43, 4: 1 / 13.8, 8: 1 / 5}, {2: 1.0, 4: 1.4, 8: 1.4}
TALL = 1 / 22  # the same cycles of tall tiles
TURNED = 1.15  # relative time of flipped tiles in 16 bits
#: Relative time of loads in grouped layers if a tile has at least BESIDE taps of the same channels.
CROWDED, BESIDE = 1.35, 3


def configs(problem: ConvProblem, device: Device) -> Iterator[WgradNhwc]:
    """The configurations worth comparing for `problem`: numbers of runs that fill the GPU once, or a few times."""
    if why_not(problem):
        return
    forward = forward_of(problem)
    fewer = forward.K < forward.C and forward.K <= MOST_FLIPPED
    for flipped in (False, True) if fewer and _why_not_flipped(problem) is None else (False,):
        for tile in _useful_tiles(problem, flipped):
            yield from (one for one in _cut(problem, tile, device) if refusal(problem, one) is None)


def _useful_tiles(problem: ConvProblem, flipped: bool) -> Iterator[WgradNhwc]:
    """The tiles whose rows and columns `problem` can fill, and those one size larger."""
    tiles_of, size, seen = _tiles_of(problem, flipped), _factor_bytes(problem), _seen(problem, WgradNhwc(FLIPPED=flipped))
    for rows in _useful(tuple(tiles_of), seen.K // _bundles(seen)):
        for columns in _useful(tiles_of[rows], _column_blocks(seen) * _channels(seen)):
            yield WgradNhwc(rows, columns, _most_stages(rows, columns, size), FLIPPED=flipped)


def _cut(problem: ConvProblem, tile: WgradNhwc, device: Device) -> Iterator[WgradNhwc]:
    """`tile` with each number of runs that is tried."""
    seen = _seen(problem, tile)
    stages, least = _stages(seen), 1 if tile.FLIPPED or _loaded(seen).C == forward_of(seen).C else 2
    tiles = math.prod(_tiles(seen, tile)) * _bundles(seen)
    filling = device.multiprocessors * _beside(tile, _factor_bytes(problem)) // tiles
    # the blocks of several rounds are balanced better, which pays if products take long
    more = (2 * filling, 4 * filling) if filling < 4 and problem.itemsize == 4 else ()
    tried = (1, ceil(filling, 4), ceil(filling, 2), filling, *more) if filling else (1, 2, 3, 4)
    most = max(stages // LEAST_STAGES, least)
    for split in sorted({max(min(split, most), least) for split in tried}):
        yield replace(tile, SPLIT=split)


def _useful(sizes: tuple[int, ...], needed: int) -> list[int]:
    """The ascending `sizes` up to the first that is at least `needed`."""
    return [size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] < needed]


def time(problem: ConvProblem, config: WgradNhwc, device: Device) -> float:
    """Microseconds that `config` should take: loads, arithmetic or bytes from memory; the stores of sums, and rounds of blocks."""
    seen = _seen(problem, config)
    forward, loaded, size, block = forward_of(seen), _loaded(seen), problem.itemsize, _channels(problem)
    factor = _factor_bytes(problem)
    down, across = _tiles(seen, config)
    bundles = _bundles(seen)
    channels = min(config.BLOCK_M, ceil(forward.K // bundles, block) * block)
    columns = min(config.BLOCK_N, _column_blocks(seen) * block)
    flat = _planes(problem) or _flat(seen)
    if _planes(problem):
        cycles = (channels + columns) * pixel_cycles(size * math.prod(forward.output_size))
    else:
        of_dy, of_x = pixel_cycles(size * loaded.K // bundles), pixel_cycles(size * loaded.C // bundles)
        cycles = channels * of_dy + columns * of_x
    crowded = bundles > 1 and columns >= BESIDE * block * _tap_blocks(seen)
    loads = LOADS[factor] * (BOXED if flat else WALKED) * cycles * (CROWDED if crowded else 1)
    sums = config.BLOCK_M * config.BLOCK_N
    products = (TALL if _tall(config, factor) else PRODUCT[factor]) * sums
    end = 4 * sums / PARTED if config.SPLIT > 1 else size * sums / STORED

    def taken(blocks: int) -> float:
        """Microseconds of `blocks` blocks that run at the same time."""
        beside = ceil(blocks, device.multiprocessors)
        step = _together(beside * products, beside * loads, products + STEP, (WAIT + loads) / (config.STAGES - 1)) / CLOCK
        return _part(seen, config) * step + beside * end

    blocks, slots = down * across * bundles * config.SPLIT, device.multiprocessors * _beside(config, factor)
    again = ceil(blocks, slots) - 1
    us = again * (taken(slots) + AGAIN) + taken(blocks - again * slots)
    us *= TURNED if config.FLIPPED and size == 2 else 1
    added = REDUCE + 4 * config.SPLIT * _sums(problem, config) / ADDED if config.SPLIT > 1 else 0
    copied = sum(COPY + 32 * told.words / COPIED for _, told in _copies(seen))
    return FIRST + _together(us, _moved(problem) / MEMORY) + added + copied


def _together(*parts: float) -> float:
    """The time of several limits that apply at once: somewhat longer than the longest of them."""
    return float(sum(part**3 for part in parts) ** (1 / 3))


def _moved(problem: ConvProblem) -> float:
    """Bytes that are read and written, without the pixels of x that no tap reads."""
    forward = forward_of(problem)
    met = math.prod(min(1.0, taps / stride) for taps, stride in zip(forward.filter_size, forward.stride, strict=True))
    return problem.itemsize * (met * math.prod(forward.input_shape) + math.prod(forward.result_shape) + math.prod(problem.result_shape))


def choose(problem: ConvProblem, device: Device) -> tuple[float, WgradNhwc] | None:
    """The configuration that should be fastest, behind the microseconds it should take; None where none runs."""
    return fastest((time(problem, config, device), config) for config in configs(problem, device))
