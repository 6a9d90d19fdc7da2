"""Grouped convolutions of channels-last arrays as they lie, on tensor cores (``cu/mma/grouped_nhwc.cu``).

They have few channels a group, or one group of few channels. A block takes neighbouring channels of several groups, and multiplies
channels of other groups with zeros: memory bounds such layers, not arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from pycuda_conv.engines.base import Config, ConvProblem, Device, KernelLaunch, VariantSet, kernel_struct
from pycuda_conv.engines.channel_units import COLUMNS, MOST_STEPS, STEP, chunks_read, cut, pitch, widths, worth_it
from pycuda_conv.engines.costs import costs, spread, together
from pycuda_conv.engines.geometry import Phase, PhaseAxis, arguments, batches, ceil, phases, row_major, too_many_phases
from pycuda_conv.engines.limits import AMPERE, PIXELS_IN_32_BITS, TWO_AXES, Takes, Tiles
from pycuda_conv.engines.schedule import Schedule, finishing
from pycuda_conv.engines.tensor_cores import ELEMENTS, SHARED_BYTES, product_rate, why_not_one_product

THREADS = 256
BLOCKS = 2   # that share a multiprocessor
COUNTS = (1, 2, 4, 8)  # units of a block
ROWS = 4     # of the result, whose sums a warp has
UNROLLED = 3  # rows of a filter that can share loads
PHASES = 4   # phases of a launch, if there are more than one


@dataclass(frozen=True)
class GroupedNhwc(Config):
    """One tile of ``grouped_nhwc.cu``: UNITS of 16 channels, IMAGES, ROWS and COLUMNS of the result."""

    UNITS: int = 2
    IMAGES: int = 1
    TILE_P: int = 8
    TILE_Q: int = 32


CONFIGS, LAYOUTS, RUNS_ON, TENSOR_CORES, MOST_VARIANTS = (GroupedNhwc,), ("NHWC",), AMPERE, True, {"cuda": 12}
ORDER = ()  # all sum alike
COST = costs("mma.grouped_nhwc")
GroupedPhase = kernel_struct("grouped_nhwc", "GroupedPhase")


def _few_steps(problem: ConvProblem) -> str | None:
    """Why a unit's channels are too many, or lie badly; None if they don't."""
    units = _units(problem)
    if units is None:
        return "it stores four channels at once"
    return None if units.steps <= MOST_STEPS else f"it takes at most {MOST_STEPS * STEP // problem.itemsize} channels of the input a group"


def _units(problem: ConvProblem) -> Any:
    """The units of `problem`; None if their channels don't begin at multiples of four."""
    groups = problem.groups
    return cut(groups, problem.operand_channels // groups, problem.result_channels // groups, problem.itemsize)


def _unit_blocks(problem: ConvProblem, config: GroupedNhwc) -> int:
    return ceil(_units(problem).total, config.UNITS)


class _PhaseView(NamedTuple):
    """A phase as the kernel sees it, of `images` images; an image's rows may be those of several."""

    phase: Phase
    images: int
    operand: tuple[int, int]
    down: PhaseAxis
    right: PhaseAxis


@lru_cache(maxsize=64)  # the planner asks for them once a configuration
def _views(problem: ConvProblem) -> tuple[_PhaseView, ...]:
    """The phases; their dilation is positive."""
    return tuple(_view(problem, phase) for phase in phases(problem))


def _view(problem: ConvProblem, phase: Phase) -> _PhaseView:
    down, right = phase.along(1), phase.along(2)
    _, height, width = problem.operand_size
    images = problem.N
    if down.size == height == problem.result_size[1] and (down.taps, down.stride, down.low) == (1, 1, 0):
        # rows are independent: all images count as one. With a stride each image has one row of the phase, so these follow one another too
        step_d, _, step_w = phase.step
        images, height, down, phase = 1, images * height, down._replace(size=images * height), replace(phase, step=(step_d, 1, step_w))
    return _PhaseView(phase, images, (height, width), down, right)


def _phase_count(problem: ConvProblem) -> int:
    return 1 if len(_views(problem)) == 1 else PHASES


def _unrolled(problem: ConvProblem) -> int:
    """Rows of the filter that share loads: all, or one."""
    down = _views(problem)[0].down
    one = len(_views(problem)) == 1
    return UNROLLED if one and down.taps == UNROLLED and down.stride <= 2 and down.dilation == 1 else 1


def _tiles(view: _PhaseView, config: GroupedNhwc) -> int:
    """Tiles of pixels."""
    return ceil(view.images, config.IMAGES) * ceil(view.down.size, config.TILE_P) * ceil(view.right.size, config.TILE_Q)


def _tile_size(view: _PhaseView, config: GroupedNhwc) -> tuple[int, int]:
    """Rows and columns of the input that an image's part of a tile reads."""
    height, width = (
        (size - 1) * axis.stride + max(axis.taps - 1, 0) * axis.dilation + 1
        for size, axis in zip((config.TILE_P, config.TILE_Q), (view.down, view.right), strict=True)
    )
    return height, width


def _filter_bytes(problem: ConvProblem, config: GroupedNhwc, view: _PhaseView) -> int:
    units = _units(problem)
    return config.UNITS * units.steps * view.down.taps * view.right.taps * 512


def _shared_bytes(problem: ConvProblem, config: GroupedNhwc) -> int:
    """Bytes of shared memory of a block: the filter and two tiles."""
    pixel = pitch(chunks_read(_units(problem), config.UNITS))
    return max(
        _filter_bytes(problem, config, view) + 2 * config.IMAGES * math.prod(_tile_size(view, config)) * pixel for view in _views(problem)
    )


TAKES = Takes(
    why_not_one_product, TWO_AXES,
    ("it loads a pixel's channels by 16 bytes", lambda p: p.operand_channels * p.itemsize % 16 == 0), _few_steps,
    PIXELS_IN_32_BITS, too_many_phases,
)  # fmt: skip
LEGAL = Tiles(
    TAKES, GroupedNhwc, (f"TILE_P must be a multiple of {ROWS}", lambda _, config: config.TILE_P % ROWS == 0),
    ("a warp loads a pixel's channels of all units at once, up to 512 bytes", lambda p, config: chunks_read(_units(p), config.UNITS) <= 32),
    shared=(_shared_bytes, SHARED_BYTES), UNITS=COUNTS, blocks=lambda p,
    config: _unit_blocks(p, config) * _phase_count(p) * max(_tiles(view, config) for view in _views(p)),
)  # fmt: skip


def schedule(problem: ConvProblem, config: GroupedNhwc, device: Device, with_moments: bool = False) -> Schedule:
    shared = _shared_bytes(problem, config)
    each = list(_launches(problem))
    return Schedule.reading(problem, lambda strides: [[_product(problem, config, device, strides, views, shared) for views in each]])


def _launches(problem: ConvProblem) -> Iterator[Sequence[_PhaseView]]:
    return batches(_views(problem), _phase_count(problem))


def _product(
    problem: ConvProblem, config: GroupedNhwc, device: Device, w_strides: tuple[int, int, int, int], views: Sequence[_PhaseView],
    shared: int,
) -> KernelLaunch:
    """The launch of some phases, with as much shared memory as the largest of all takes."""
    count, unrolled = _phase_count(problem), _unrolled(problem)
    unit_blocks, blocks = _unit_blocks(problem, config), _blocks(problem, config, device, views)
    args = tuple(_arguments(problem, config, w_strides, view, blocks) for view in views)
    args += (args[-1]._replace(tiles=0),) * (count - len(views))  # empty phases fill the kernel's parameter
    defines = {
        "TYPE": ELEMENTS[problem.dtype], "TAPS_R": unrolled, "STRIDE_H": views[0].down.stride if unrolled > 1 else 1, "PHASES": count,
    }  # fmt: skip
    return finishing("grouped_nhwc", defines, unit_blocks * count * blocks, THREADS, args, shared=shared)


def _blocks(problem: ConvProblem, config: GroupedNhwc, device: Device, views: Sequence[_PhaseView]) -> int:
    """Blocks that share units and a phase: as many as fill the GPU, if possible with equally many tiles each."""
    tiles = max(_tiles(view, config) for view in views)
    jobs = _unit_blocks(problem, config) * len(views)
    rounds = ceil(tiles * jobs, max(BLOCKS * device.multiprocessors, jobs))
    return ceil(tiles, rounds)


def _arguments(problem: ConvProblem, config: GroupedNhwc, w_strides: tuple[int, int, int, int], view: _PhaseView, blocks: int) -> Any:
    units, down, right, phase = _units(problem), view.down, view.right, view.phase
    groups, chunks, (tile_h, tile_w) = problem.groups, chunks_read(_units(problem), config.UNITS), _tile_size(view, config)
    jobs_q = ceil(config.IMAGES * config.TILE_Q, COLUMNS)
    _, row, _ = row_major(problem.result_size)
    group_step, row_step, channel_step, tap_step = w_strides
    width = problem.filter_size[2]
    return arguments(
        GroupedPhase, problem, units, unit_blocks=_unit_blocks(problem, config), blocks=blocks, tiles=_tiles(view, config),
        tiles_p=ceil(down.size, config.TILE_P), tiles_q=ceil(right.size, config.TILE_Q), units=config.UNITS, unit_groups=units.groups,
        units_group=units.a_group, groups=groups, chunks=chunks, pitch=pitch(chunks), images=config.IMAGES, rows=config.TILE_P,
        columns=config.TILE_Q, tile_h=tile_h, tile_w=tile_w, rows_x=config.IMAGES * tile_h, jobs_q=jobs_q,
        jobs=jobs_q * config.TILE_P // ROWS, n=view.images, h=view.operand[0], w=view.operand[1],
        pixel=problem.operand_channels * problem.itemsize // 16, stride_h=down.stride, stride_w=right.stride, low_h=down.low,
        low_w=right.low, dilation_h=down.dilation, dilation_w=right.dilation, taps=down.taps * right.taps, tap_r=down.taps,
        tap_s=right.taps, tap_base=down.base * width + right.base, tap_step_r=down.step * width, tap_step_s=right.step,
        group_step=group_step, row_step=row_step, channel_step=channel_step, tap_step=tap_step, p=down.size, q=right.size,
        out_size=math.prod(problem.result_size), out_base=phase.origin[1] * row + phase.origin[2], out_h=phase.step[1] * row,
        out_w=phase.step[2], next_row=phase.step[1] * row * problem.result_channels,
    )  # fmt: skip


def variants(device: Device) -> Iterator[VariantSet]:
    choices = {"TYPE": tuple(ELEMENTS.values()), "TAPS_R": (1, UNROLLED), "STRIDE_H": (1, 2), "PHASES": (1, PHASES)}
    yield VariantSet("grouped_nhwc", choices, lambda d: d["PHASES"] == 1 if d["TAPS_R"] == UNROLLED else d["STRIDE_H"] == 1)


HEIGHTS = (4, 8, 12, 16)  # rows of tiles


def configs(problem: ConvProblem, device: Device) -> Iterator[GroupedNhwc]:
    """The configurations worth comparing for `problem`: tiles that cut rows and columns evenly."""
    units = _units(problem)
    if units is None or not worth_it(units, problem.groups):
        return
    view = max(_views(problem), key=lambda one: one.down.taps * one.right.taps)
    p, q = view.down.size, view.right.size
    heights = sorted({ceil(ceil(p, ceil(p, rows)), ROWS) * ROWS for rows in HEIGHTS})
    for count, rows, (images, columns) in product(COUNTS, heights, widths(q, view.images)):
        config = GroupedNhwc(count, images, rows, columns)
        if (count == 1 or count < 2 * units.total) and LEGAL.refusal(problem, config) is None:
            yield config


def time(problem: ConvProblem, config: GroupedNhwc, device: Device) -> float:
    """Microseconds that `config` should take: the work of the multiprocessor with most blocks, or bytes from and to memory."""
    views, unit_blocks, multiprocessors = _views(problem), _unit_blocks(problem, config), device.multiprocessors
    us = loaded = 0.0
    for group in _launches(problem):
        blocks = _blocks(problem, config, device, group)
        works = [_work(problem, config, view, device) for view in group]
        cycles = max(ceil(_tiles(view, config), blocks) * work.tile + work.block for view, work in zip(group, works, strict=True))
        us += COST.BEGIN + COST.MEASURED * ceil(unit_blocks * blocks * len(group), multiprocessors) * cycles / COST.CLOCK
        loaded += sum(_tiles(view, config) * unit_blocks * work.loaded for view, work in zip(group, works, strict=True)) / len(views)
    operand = problem.itemsize * problem.N * math.prod(problem.operand_size) * problem.operand_channels
    moved = spread((problem.bytes + COST.HALO * max(loaded - operand, 0)) / COST.MEMORY, multiprocessors)
    return together(COST.TOGETHER, us, COST.BEGIN + moved)


class _Work(NamedTuple):
    """A block's work in cycles of a multiprocessor that has another block to overlap it with."""

    tile: float
    block: float  # beside its tiles
    loaded: int  # bytes of a tile


def _work(problem: ConvProblem, config: GroupedNhwc, view: _PhaseView, device: Device) -> _Work:
    units, unrolled = _units(problem), _unrolled(problem)
    chunks, pixels = chunks_read(units, config.UNITS), config.IMAGES * math.prod(_tile_size(view, config))
    jobs = config.UNITS * ceil(config.IMAGES * config.TILE_Q, COLUMNS) * config.TILE_P // ROWS
    taps, loads = view.down.taps * view.right.taps, chunks * pixels
    rows = (ROWS - 1) * view.down.stride + unrolled if unrolled > 1 else ROWS  # of the input, which a column of the filter's taps loads
    reads, products = jobs * units.steps * taps * (1 + rows / unrolled), jobs * units.steps * taps * ROWS * 2
    multiplied = products * 16 * 8 * 16 * problem.itemsize // 2 / product_rate(device)
    lines = pixels * ceil(chunks, 8)  # of 128 bytes, a cycle each
    shared = (512 * reads + 16 * loads) / COST.SHARED_RATE + lines
    issued = (jobs * COST.JOB + products + 3 * reads + COST.LOADED * loads / 32) / COST.ISSUED
    words = _filter_bytes(problem, config, view) / 4
    return _Work(max(multiplied, shared, issued) + COST.TILE / BLOCKS, COST.LAID * words / 32 / COST.ISSUED + COST.BLOCK, 16 * loads)
