"""wgrad of few channels a group, from 16-bit channels-last arrays as they lie (``cu/mma/grouped_nhwc_wgrad.cu``)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from pycuda_conv.engines import split_sum
from pycuda_conv.engines.addressing import MOST_PIXELS
from pycuda_conv.engines.base import FLAG, Config, ConvProblem, Device, KernelLaunch, VariantSet, kernel_struct
from pycuda_conv.engines.channel_units import COLUMNS, MOST_STEPS, STEP, chunks_read, chunks_written, cut, pitch, widths, worth_it
from pycuda_conv.engines.costs import costs, spread
from pycuda_conv.engines.geometry import arguments, ceil, even_parts, forward_of
from pycuda_conv.engines.limits import AMPERE, HALVES, NOT_EMPTY, TWO_AXES, Takes, Tiles
from pycuda_conv.engines.schedule import INPUT, RESULT, WEIGHT, Schedule
from pycuda_conv.engines.tensor_cores import BFLOAT, ELEMENTS, HALF, SHARED_BYTES, product_rate

THREADS, WARPS = 256, 8
BLOCKS = 2   # that share a multiprocessor
COUNTS = (1, 2, 4, 8)  # units of a block
TAPS = (1, 9)  # of a block
ZEROS = 32  # bytes that stand for missing pixels


@dataclass(frozen=True)
class GroupedWgrad(Config):
    """One tile of ``grouped_nhwc_wgrad.cu``: UNITS of 16 channels, IMAGES, ROWS and COLUMNS, and the PARTS of the sum."""

    UNITS: int = 2
    IMAGES: int = 1
    TILE_P: int = 4
    TILE_Q: int = 32
    PARTS: int = 1


CONFIGS, LAYOUTS, RUNS_ON, TENSOR_CORES, MOST_VARIANTS = (GroupedWgrad,), ("CHWN",), AMPERE, True, {"cuda": 8}
COST = costs("mma.grouped_nhwc_wgrad")
GroupedWgradArguments = kernel_struct("grouped_nhwc_wgrad", "GroupedWgradArguments")


def _units(problem: ConvProblem) -> Any:
    """The units of channels of dy."""
    forward = forward_of(problem)
    return cut(forward.groups, forward.C // forward.groups, forward.K // forward.groups, forward.itemsize)


def _taps(problem: ConvProblem) -> int:
    return TAPS[math.prod(problem.output_size) > 1]


def _tiles(problem: ConvProblem, config: GroupedWgrad) -> int:
    _, p, q = problem.filter_size
    return ceil(forward_of(problem).N, config.IMAGES) * ceil(p, config.TILE_P) * ceil(q, config.TILE_Q)


def _blocks(problem: ConvProblem, config: GroupedWgrad) -> tuple[int, int]:
    """Slabs, and blocks of taps."""
    units = _units(problem)
    return ceil(units.total, config.UNITS), ceil(math.prod(problem.output_size), _taps(problem))


def _grid(problem: ConvProblem, config: GroupedWgrad) -> int:
    return math.prod(_blocks(problem, config)) * config.PARTS


def _tile_size(problem: ConvProblem, config: GroupedWgrad) -> tuple[int, int]:
    """Rows and columns of x that an image's part of a tile reads."""
    forward = forward_of(problem)
    height, width = (
        (size - 1) * forward.stride[axis] + (forward.filter_size[axis] - 1) * forward.dilation[axis] + 1
        for axis, size in ((1, config.TILE_P), (2, config.TILE_Q))
    )
    return height, width


def _loads(problem: ConvProblem, config: GroupedWgrad) -> tuple[int, int]:
    """Pixels of x and of dy that a tile loads."""
    return config.IMAGES * math.prod(_tile_size(problem, config)), config.IMAGES * config.TILE_P * config.TILE_Q


def _shared_bytes(problem: ConvProblem, config: GroupedWgrad) -> int:
    """Bytes of shared memory of a block: zeros and two tiles, or the sums of a warp for each step."""
    units, (of_x, of_y) = _units(problem), _loads(problem, config)
    tiles = of_x * pitch(chunks_read(units, config.UNITS)) + of_y * pitch(chunks_written(units, config.UNITS))
    return max(ZEROS + 2 * tiles, config.UNITS * units.steps * _taps(problem) * 8 * 32 * 4)


def _lie_well(problem: ConvProblem) -> str | None:
    forward, units = forward_of(problem), _units(problem)
    if forward.C % 8 or forward.K % 8 or units is None or any(units.first_written(unit) % 8 for unit in range(units.total)):
        return "it loads a pixel's channels, and those of 16 or of a group, by 16 bytes"
    if units.steps > MOST_STEPS:
        return f"it takes at most {MOST_STEPS * STEP // problem.itemsize} channels of the input a group"
    pixels = forward.N * max(math.prod(forward.output_size), math.prod(forward.input_size))
    return "it counts pixels in 32 bits" if pixels >= MOST_PIXELS else None


def _fits(problem: ConvProblem, config: GroupedWgrad) -> str | None:
    units = _units(problem)
    if config.UNITS * units.steps > WARPS:
        return f"a block's units have up to {WARPS} steps together"
    if max(chunks_read(units, config.UNITS), chunks_written(units, config.UNITS)) > 32:
        return "a warp loads a pixel's channels of all units at once, up to 512 bytes"
    return None


TAKES = Takes(
    HALVES, NOT_EMPTY, TWO_AXES, _lie_well, ("it counts elements of the filter in 32 bits", lambda p: math.prod(p.result_shape) < 2**31),
)  # fmt: skip
LEGAL = Tiles(
    TAKES, GroupedWgrad, _fits, ("each part has a tile", lambda p, config: config.PARTS <= _tiles(p, config)),
    shared=(_shared_bytes, SHARED_BYTES), blocks=_grid, UNITS=COUNTS,
)  # fmt: skip


def schedule(problem: ConvProblem, config: GroupedWgrad, device: Device, with_moments: bool = False) -> Schedule:
    defines = {"TYPE": ELEMENTS[problem.dtype], "TAPS": _taps(problem), "WHOLE": int(config.PARTS == 1)}
    launch = KernelLaunch(
        "grouped_nhwc_wgrad", defines, _grid(problem, config), THREADS, (INPUT, WEIGHT, RESULT), (), shared=_shared_bytes(problem, config),
        arguments=_arguments(problem, config),
    )  # fmt: skip
    return split_sum.in_parts(problem, launch, config.PARTS)


def _arguments(problem: ConvProblem, config: GroupedWgrad) -> Any:
    forward, units, (unit_blocks, tap_blocks) = forward_of(problem), _units(problem), _blocks(problem, config)
    (_, p, q), (tile_h, tile_w) = forward.output_size, _tile_size(problem, config)
    jobs, chunks_x, chunks_y = config.UNITS * units.steps, chunks_read(units, config.UNITS), chunks_written(units, config.UNITS)
    return arguments(
        GroupedWgradArguments, forward, units, unit_blocks=unit_blocks, tap_blocks=tap_blocks, parts=config.PARTS,
        tiles=_tiles(problem, config), tiles_p=ceil(p, config.TILE_P), tiles_q=ceil(q, config.TILE_Q), units=config.UNITS,
        unit_groups=units.groups, units_group=units.a_group, groups=forward.groups, units_all=units.total, jobs=jobs, beside=WARPS // jobs,
        images=config.IMAGES, rows=config.TILE_P, columns=config.TILE_Q, columns_all=config.IMAGES * config.TILE_Q, chunks_y=chunks_y,
        pitch_y=pitch(chunks_y), rows_y=config.IMAGES * config.TILE_P, chunks_x=chunks_x, pitch_x=pitch(chunks_x),
        rows_x=config.IMAGES * tile_h, tile_h=tile_h, tile_w=tile_w, pixel_x=forward.C // 8, pixel_y=forward.K // 8,
        tap_s=forward.filter_size[2], size=math.prod(problem.result_shape),
    )  # fmt: skip


def variants(device: Device) -> Iterator[VariantSet]:
    yield VariantSet("grouped_nhwc_wgrad", {"TYPE": (HALF, BFLOAT), "TAPS": TAPS, "WHOLE": FLAG})


HEIGHTS = (2, 4, 8)  # rows of tiles


def configs(problem: ConvProblem, device: Device) -> Iterator[GroupedWgrad]:
    """The configurations worth comparing for `problem`: tiles that cut rows and columns evenly, and as many parts as fill the GPU."""
    forward, units, (_, p, q) = forward_of(problem), _units(problem), problem.filter_size
    if not worth_it(units, forward.groups) or (forward.groups == 1 and forward.stride != (1, 1, 1)):
        return
    heights = sorted({ceil(p, ceil(p, rows)) for rows in HEIGHTS})
    for count, rows, (together, columns) in product(COUNTS, heights, widths(q, forward.N)):
        config = GroupedWgrad(count, together, rows, columns)
        if (count == 1 or count < 2 * units.total) and LEGAL.refusal(problem, config) is None:
            tiles, filling = _tiles(problem, config), max(BLOCKS * device.multiprocessors // math.prod(_blocks(problem, config)), 1)
            yield from (replace(config, PARTS=parts) for parts in even_parts(tiles, (1, ceil(filling, 2), filling)))


def time(problem: ConvProblem, config: GroupedWgrad, device: Device) -> float:
    """Microseconds that `config` should take: the work of the multiprocessor with most blocks, or bytes; and adding the parts."""
    units, (unit_blocks, tap_blocks), (of_x, of_y) = _units(problem), _blocks(problem, config), _loads(problem, config)
    multiprocessors, forward = device.multiprocessors, forward_of(problem)
    taps = _taps(problem)
    rows = config.UNITS * units.steps * config.TILE_P * ceil(config.IMAGES * config.TILE_Q, COLUMNS)
    multiplied = rows * taps * 2 * 16 * 8 * 16 / product_rate(device)
    loads = of_x * chunks_read(units, config.UNITS) + of_y * chunks_written(units, config.UNITS)
    lines = of_x * ceil(chunks_read(units, config.UNITS), 8) + of_y * ceil(chunks_written(units, config.UNITS), 8)  # of 128 bytes
    shared = (512 * rows * (1 + taps) + 16 * loads) / COST.SHARED_RATE + lines
    issued = (rows * (COST.ROW + 6 * taps) + COST.LOADED * loads / 32) / COST.ISSUED
    tiles = _tiles(problem, config)
    cycles = ceil(tiles, config.PARTS) * (max(multiplied, shared, issued) + COST.TILE / BLOCKS) + COST.BLOCK
    us = COST.BEGIN + COST.MEASURED * ceil(unit_blocks * tap_blocks * config.PARTS, multiprocessors) * cycles / COST.CLOCK
    read = 2.0 * (math.prod(forward.input_shape) + math.prod(forward.result_shape))
    moved = read + COST.HALO * max(16 * loads * tiles * unit_blocks - read, 0) + read * (tap_blocks - 1)
    us = max(us, COST.BEGIN + spread(moved / COST.MEMORY, multiprocessors))
    return us + split_sum.time(problem, config.PARTS, device)
