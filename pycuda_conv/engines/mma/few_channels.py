"""fprop and dgrad with few channels in their result, on tensor cores: ``cu/mma/few_channels.cu``.

Other engines' tiles have 64 of these channels or more, and load the input once for each tap. Here taps and channels share a tile's columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from pycuda_conv.engines.base import FLAG, Config, Device, KernelLaunch, VariantSet, kernel_struct
from pycuda_conv.engines.costs import bytes_moved, costs
from pycuda_conv.engines.geometry import arguments, by_axis, ceil, read_strides
from pycuda_conv.engines.limits import AMPERE, NOT_EMPTY, ONE_GROUP, Takes, Tiles, types
from pycuda_conv.engines.schedule import GRID_LIMIT, Schedule, finishing
from pycuda_conv.engines.tensor_cores import ELEMENTS, SHARED_BYTES, is_multiplied, products
from pycuda_conv.problem import ConvProblem, Size3

WARPS = 4  # of a block
STEP_BYTES, LANE_BYTES = 64, 16  # bytes of a pixel's channels: of a step, of a lane
#: A warp's rows of the result and sixteens of input columns, by the eights of gemm n: as many as registers hold.
TILES = {1: (6, 2), 2: (3, 2), 3: (4, 1), 6: (2, 1)}
#: Warps side by side in a row, and parts of the channels; the other warps have rows of their own.
SHAPES = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4))
#: Shared memory of a multiprocessor, in KiB.
MULTIPROCESSOR_KIB = {(8, 0): 164, (8, 7): 164, (9, 0): 228, (10, 0): 228, (10, 3): 228}
OTHER_MULTIPROCESSOR_KIB = 100
#: The most channels of the result: more would fill half a tile of other engines.
MOST_CHANNELS = 32


@dataclass(frozen=True)
class FewChannels(Config):
    """COLUMNS of the product, which taps and channels share; of a block's warps, how many lie side by side in a row, and how many
    share a sum over channels: ``few_channels.cu``."""

    BLOCK_N: int = 8
    WARPS_W: int = 2
    PARTS: int = 1


CONFIGS, LAYOUTS, RUNS_ON, TENSOR_CORES, MOST_VARIANTS = (FewChannels,), ("NCHW", "NHWC"), AMPERE, True, {"cuda": 32}
ORDER = ("PARTS",)  # what the order of sums depends on
COST = costs("mma.few_channels")
FewChannelsArguments = kernel_struct("few_channels", "FewChannelsArguments")


def _slice(problem: ConvProblem, channels: int, size: Size3) -> int:
    """Elements from the first to the last of a slice."""
    return channels * math.prod(size if problem.layout == "NCHW" else size[1:])


def _fits(problem: ConvProblem, config: FewChannels) -> str | None:
    if problem.filter_size[2] > config.BLOCK_N:
        return f"a row of the filter has {problem.filter_size[2]} taps; its tile has {config.BLOCK_N} columns"
    tile = _tile(problem, config)
    if tile.tile_q < 1:
        return f"a row of the filter reaches beyond the tile's {tile.columns} columns of the input"
    if tile.tiles * tile.combinations > GRID_LIMIT or tile.chunks * tile.chunk * tile.tile_q * tile.rows > GRID_LIMIT:
        return f"it has more than {GRID_LIMIT:,} tiles"
    return None


class _Axis(NamedTuple):
    """How indices of the result and the input correspond along an axis: see the kernel."""

    every: int  # taps from one that an index meets to the next
    phases: int  # indices so far apart meet the input by the same taps
    apart: int  # input steps from one such index to the next
    step: int  # input steps from one tap that is met to the next


def _axis(problem: ConvProblem, axis: int) -> _Axis:
    stride, dilation = problem.stride[axis], problem.dilation[axis]
    common = math.gcd(stride, dilation)
    if problem.direction == "fprop":
        return _Axis(1, dilation // common, stride // common, dilation)
    step = dilation // common
    return _Axis(stride // common, stride * step, 1, step)


@lru_cache(maxsize=1024)  # the planner asks for it several times
def _tile(problem: ConvProblem, config: FewChannels) -> Any:
    """The tile of a configuration: what the kernel's members of these names have, and its columns, taps, steps and combinations."""
    (t, r, s), (o, p, q) = problem.filter_size, problem.result_size
    stride, pad, dilation = problem.stride[2], problem.padding_before[2], problem.dilation[2]
    channels, eights = problem.result_channels, config.BLOCK_N // 8
    rows, sixteens = TILES[eights]
    chunks = ceil(channels, max(config.BLOCK_N // s, 1))
    chunk = ceil(channels, chunks)
    columns = 16 * sixteens * config.WARPS_W
    if problem.direction == "fprop":
        first_w = -pad
        tile_q = min((columns - (s - 1) * dilation - 1) // stride + 1, q)
        tile_w = tile_q * stride
    else:
        first_w = (pad - (s - 1) * dilation) // stride
        tile_w = min(columns + first_w - 1 - (pad - 1) // stride, ceil(q, stride))
        tile_q = tile_w * stride
    down = _axis(problem, 1)
    row_phases, tile_rows = min(down.phases, p), WARPS // (config.WARPS_W * config.PARTS) * rows
    tiles_h, tiles_w = ceil(ceil(p, row_phases), tile_rows), ceil(q, max(tile_q, 1))
    taps, steps = ceil(r, down.every), ceil(problem.operand_channels * problem.itemsize, STEP_BYTES)
    u_at = t * taps * steps * eights * 32 * LANE_BYTES
    table_at = u_at + s * chunk * (config.PARTS * tile_rows * columns + 4) * 4
    table_at += -table_at % 8
    return SimpleNamespace(
        chunk=chunk, chunks=ceil(channels, chunk), columns=columns, first_w=first_w, tile_q=tile_q, tile_w=tile_w, rows=tile_rows,
        row_phases=row_phases, tiles_h=tiles_h, tiles_w=tiles_w, tiles=problem.N * o * tiles_h * tiles_w, taps=taps, steps=steps,
        u_at=u_at, table_at=table_at, shared=table_at + 8 * max(tile_q, 0), combinations=row_phases * ceil(channels, chunk),
    )  # fmt: skip


def _resident(problem: ConvProblem, tile: Any, device: Device) -> int:
    """Blocks that fit a multiprocessor."""
    shared = MULTIPROCESSOR_KIB.get(device.capability, OTHER_MULTIPROCESSOR_KIB) * 1024
    return max(1, min(4 if _wide_loads(problem) and products(problem) == 1 else 3, shared // (tile.shared + 1024)))


def _workers(problem: ConvProblem, tile: Any, device: Device) -> int:
    """Blocks that share the tiles of a phase and a chunk."""
    return min(tile.tiles, max(1, ceil(device.multiprocessors * _resident(problem, tile, device), tile.combinations)))


def _wide_loads(problem: ConvProblem) -> bool:
    """Whether a lane's channels may be loaded at once."""
    return problem.layout == "NHWC" and problem.operand_channels * problem.itemsize % LANE_BYTES == 0


TAKES = Takes(
    ONE_GROUP, types(*ELEMENTS), NOT_EMPTY,
    ("it takes gradients without a stride from slice to slice", lambda p: p.direction == "fprop" or p.stride[0] == 1),
    (
        "it counts the elements of a slice and of the filter in 32 bits",
        lambda p: max(_slice(p, p.operand_channels, p.operand_size), _slice(p, p.result_channels, p.result_size), math.prod(p.weight_shape))
        < 2**30,
    ),
    ("it counts the elements between two taps in 32 bits", lambda p: _axis(p, 1).step * p.operand_channels * p.operand_size[2] < 2**30),
)  # fmt: skip
LEGAL = Tiles(
    TAKES, FewChannels, _fits, shared=(lambda problem, config: _tile(problem, config).shared, SHARED_BYTES),
    BLOCK_N=[8 * eights for eights in TILES], together={("WARPS_W", "PARTS"): SHAPES},
)  # fmt: skip


def schedule(problem: ConvProblem, config: FewChannels, device: Device, with_moments: bool = False) -> Schedule:
    return Schedule.reading(problem, lambda strides: [[_launch(problem, config, device, strides)]], problem.layout == "NHWC")


def _launch(problem: ConvProblem, config: FewChannels, device: Device, strides: tuple[int, int, int, int]) -> KernelLaunch:
    """The launch for a filter with these strides."""
    tile, down, across, last = _tile(problem, config), _axis(problem, 1), _axis(problem, 2), problem.layout == "NHWC"
    eights, gradient = config.BLOCK_N // 8, problem.direction == "dgrad"
    rows, sixteens = TILES[eights]
    (_, w_k, w_c, w_tap), (_, h, w), pixel = strides, problem.operand_size, read_strides(problem).pixel
    workers = _workers(problem, tile, device)
    args = arguments(
        FewChannelsArguments, problem, tile, workers=workers, warps_w=config.WARPS_W, warps_h=tile.rows // rows, parts=config.PARTS,
        part_steps=ceil(tile.steps, config.PARTS), tile_rows=tile.rows, gradient=int(gradient), channel_steps=tile.steps,
        **by_axis("taps_", problem.filter_size, "trs"), every_h=down.every, every_w=across.every, rows_apart=down.apart, row_step=down.step,
        column_step=-across.step if gradient else across.step, w_k=w_k, w_c=w_c, w_tap=w_tap, x_slice=h * w * pixel, x_row=w * pixel,
        channels_last=int(last),
    )  # fmt: skip
    defines = {
        "TYPE": ELEMENTS[problem.dtype], "PRODUCTS": products(problem), "COLUMN_TILES": eights, "ROWS": rows, "PIXEL_TILES": sixteens,
        "WIDE_LOADS": int(_wide_loads(problem)),
    }  # fmt: skip
    return finishing("few_channels", defines, workers * tile.combinations, 32 * WARPS, args, shared=tile.shared)


def variants(device: Device) -> Iterator[VariantSet]:
    common = {"TYPE": tuple(ELEMENTS.values()), "PRODUCTS": (1, 3), "WIDE_LOADS": FLAG}
    for eights, (rows, sixteens) in TILES.items():
        yield VariantSet("few_channels", common | {"COLUMN_TILES": (eights,), "ROWS": (rows,), "PIXEL_TILES": (sixteens,)}, is_multiplied)


def configs(problem: ConvProblem, device: Device) -> Iterator[FewChannels]:
    """The configurations worth comparing for `problem`: every shape of each tile that is not too wide; none if it has many channels."""
    columns = problem.filter_size[2] * problem.result_channels
    if problem.result_channels <= MOST_CHANNELS:
        narrow = [8 * eights for eights in TILES if eights == 1 or columns > 8 * (eights // 2)]
        yield from LEGAL.legal(problem, BLOCK_N=narrow)


def time(problem: ConvProblem, config: FewChannels, device: Device) -> float:
    """Microseconds that `config` should take: the products or loads of a block's tiles, and their sums through shared memory; or memory."""
    tile, down, across = _tile(problem, config), _axis(problem, 1), _axis(problem, 2)
    eights, size = config.BLOCK_N // 8, problem.itemsize
    rows, sixteens = TILES[eights]
    slices, of_phase = problem.filter_size[0], ceil(problem.result_size[1], tile.row_phases)  # of the input; rows of the result
    warps = WARPS * of_phase / (tile.tiles_h * tile.rows) * rows  # that would have rows if all their rows were real
    rows = min(rows, of_phase)
    warps /= rows
    steps = ceil(tile.steps, config.PARTS)
    met = slices * tile.taps * rows * steps * eights  # products of a warp, of 16 columns and a step's channels
    loaded = slices * (down.apart * (rows - 1) + tile.taps) * steps
    multiplying = warps * met * sixteens * 2 * products(problem) * COST.PRODUCT_CYCLES
    filter_cycles = warps * met * 32 * LANE_BYTES / COST.SHARED_RATE
    pixels = warps * loaded * 16 * sixteens  # loaded by all warps, a step's channels of each
    loading = pixels * STEP_BYTES / COST.LOAD_BYTES if _wide_loads(problem) else pixels * STEP_BYTES / size / 32 * COST.SINGLE_CYCLES
    used, area = problem.filter_size[2] * tile.chunk, tile.rows * tile.columns
    results = tile.rows * tile.tile_q * tile.chunk
    added = config.PARTS * (used * area + results * ceil(problem.filter_size[2], across.every))
    adding = 4 * added / COST.SHARED_RATE + results / 32 * COST.STORE_CYCLES * (2 if problem.has_residual else 1)
    workers, combinations = _workers(problem, tile, device), tile.combinations
    together = ceil(workers * combinations, device.multiprocessors)  # blocks of a multiprocessor
    alone = loaded * COST.WAIT + COST.TILE_CYCLES + adding
    each = max(alone, together * (max(multiplying, loading + filter_cycles) + adding))
    filled = slices * tile.taps * problem.filter_size[2] * tile.chunk * problem.operand_channels * COST.FILTER_CYCLES + 500
    factor = COST.MEASURED_FP32 if products(problem) > 1 else COST.MEASURED
    if tile.taps >= COST.MANY_ROWS:
        factor *= COST.LARGE
    us = factor * (ceil(tile.tiles, workers) * each + filled) / COST.CLOCK
    moved = bytes_moved(problem)
    return COST.BEGIN + max(us, moved / COST.MEMORY)
