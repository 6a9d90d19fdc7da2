"""Depthwise layers of 16 bits on tensor cores: ``cu/depthwise/toeplitz.cu``.

A row of a filter is a Toeplitz matrix, which multiplies rows of the input. So memory bounds such layers; on plain cores arithmetic would.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

from pycuda_conv.engines.base import FLAG, Config, ConvProblem, Device, VariantSet, kernel_struct
from pycuda_conv.engines.costs import bytes_moved, costs, spread
from pycuda_conv.engines.geometry import arguments, ceil
from pycuda_conv.engines.limits import AMPERE, HALVES, NOT_EMPTY, TWO_AXES, Takes, Tiles
from pycuda_conv.engines.schedule import Schedule, check_shared, finishing, grid_refusal, shared_limit
from pycuda_conv.engines.tensor_cores import BFLOAT, ELEMENTS, HALF

WARPS = {"NCHW": 4, "NHWC": 8}  # warps of a block
ROWS, EIGHT = 16, 8  # rows of a task; columns of a tile
MOST_COLUMNS, MOST_BANDS = 80, 4  # NHWC: most columns of a block, most sixteens of rows
CHANNELS, PIXEL, ROW_PAD = 16, 24, 4  # NHWC: channels of a block; elements in shared memory of a pixel, and those that pad a row
WORD = 4
SHARED_KIB = 227  # of shared memory that the model counts on, of a multiprocessor of Hopper, which has 228
#: By the stride: eights of columns that a task computes, and how many steps of 16 input columns an eight may meet.
TILES = {1: 5, 2: 3}
STEPS = {1: (1, 2), 2: (2,)}
GRAD_TILES, GRAD_TAPS = 6, 64  # of the gradient of a convolution of stride 2: eights of columns of a task; words of a row of its filter
#: KiB of shared memory of a block at most: the values of UNIT_KIB to compare.
UNITS = {"NCHW": (24, 12, 48), "NHWC": (48, 72, 110)}


@dataclass(frozen=True)
class DepthwiseToeplitz(Config):
    """UNIT_KIB is the most shared memory of a block in KiB; it decides how many planes or rows a block has: ``depthwise/toeplitz.cu``."""

    UNIT_KIB: int = 24


CONFIGS, LAYOUTS, RUNS_ON, TENSOR_CORES, MOST_VARIANTS = (DepthwiseToeplitz,), ("NCHW", "NHWC"), AMPERE, True, {"cuda": 22}
ORDER = ()  # all sum alike
COST = costs("depthwise.toeplitz")
DepthwiseToeplitzArguments = kernel_struct("depthwise_toeplitz", "DepthwiseToeplitzArguments")


def _strided(problem: ConvProblem) -> bool:
    """Whether `problem` is the gradient of a convolution of stride 2 by its input."""
    return problem.direction == "dgrad" and problem.stride[2] > 1


def _padding(problem: ConvProblem) -> tuple[int, int]:
    """Rows and columns read before the first of the image. A gradient is a convolution with the filter turned by half a circle."""
    _, pad_h, pad_w = problem.padding_before
    if problem.direction == "fprop" or _strided(problem):
        return pad_h, pad_w
    (_, r, s), (_, dil_h, dil_w) = problem.filter_size, problem.dilation
    return (r - 1) * dil_h - pad_h, (s - 1) * dil_w - pad_w


def _shift(problem: ConvProblem) -> int:
    """Column of the result that eight 0 begins with: the first that meets no input column before 0."""
    return ceil(_padding(problem)[1], problem.stride[2])


def _steps(problem: ConvProblem) -> Any:
    """Steps of 16 input columns that eight results meet, or None if there are too many."""
    if _strided(problem):
        return 1
    stride = problem.stride[2]
    off = stride * _shift(problem) - _padding(problem)[1]
    columns = off + stride * (EIGHT - 1) + (problem.filter_size[2] - 1) * problem.dilation[2] + 1
    return next((steps for steps in STEPS[stride] if columns <= 16 * steps), None)


@lru_cache(maxsize=1024)  # the planner asks for it several times
def _unit(problem: ConvProblem, config: DepthwiseToeplitz) -> Any:
    """The work of a block that fits into the shared memory of `config` and reads the fewest values twice; None where none fits.

    It has what the kernel's members of these names have, the blocks of a launch, and bytes of shared memory.
    """
    (_, h, _), (_, p, q), (_, r, _), (_, stride_h, stride) = problem.operand_size, problem.result_size, problem.filter_size, problem.stride
    most, steps, last, all_planes = config.UNIT_KIB * 1024, _steps(problem), problem.layout == "NHWC", problem.N * problem.K
    span = (r - 1) * problem.dilation[1] + 1
    grad, taps = _strided(problem), problem.filter_size[2]
    pad_w = _padding(problem)[1]
    if grad:
        taps_pitch, of_task = GRAD_TAPS, GRAD_TILES
        # column n of the result meets column k of the input by tap n - 2 k + y_off + pad_w - 2 x_off; these three are in [taps - 1, 16]
        if last:
            y_off, x_off = 0, (pad_w - taps + 1) // 2
        else:
            x_off = 0 if pad_w >= taps - 1 else -EIGHT
            y_off = min(0, 2 * EIGHT - pad_w + 2 * x_off)
    else:
        taps_pitch, of_task = 16 * steps + EIGHT * stride, TILES[stride]
        first = 0 if last else -ceil(_shift(problem), EIGHT)
        y_off = 0 if last else EIGHT * first + _shift(problem)
        x_off = -pad_w if last else EIGHT * stride * first
    granule = 2 * EIGHT if grad else EIGHT  # columns
    least_rows = 2 * ROWS if grad else ROWS

    def unit(planes: int, band: int, columns: int) -> Any:
        bands, spans, eights = ceil(p, band), ceil(q - y_off, columns), columns // EIGHT
        met = (band + r) // 2 + 1 if grad else (band - 1) * stride_h + span
        x_rows = min(met, h) if last or bands > 1 else h
        units = eights // 2 + 1 if grad else stride * (eights - 1) + 2 * steps
        pitch = units | 1  # odd: no bank conflicts
        plane_pitch = x_rows * pitch | last  # odd where neighbouring channels are stored together
        y_at = ceil(planes * r * taps_pitch * WORD, 16) * 16
        x_at = y_at + (ceil(2 * band * (columns * PIXEL + ROW_PAD), 16) * 16 if last else ceil(2 * (planes * band * q + EIGHT), 16) * 16)
        beside = of_task * stride  # eights that a task reads behind the end of the row, for tiles that don't exist
        blocks = bands * spans * (problem.N * ceil(problem.K, CHANNELS) if last else ceil(all_planes, planes))
        shared = x_at + (planes * plane_pitch + pitch + beside) * 16
        return SimpleNamespace(
            planes=planes, band=band, columns=columns, bands=bands, spans=spans, blocks=blocks, groups=ceil(eights, of_task), x_rows=x_rows,
            units=units, pitch=pitch, plane_pitch=plane_pitch, y_off=y_off, x_off=x_off, taps_pitch=taps_pitch, y_at=y_at, x_at=x_at,
            shared=shared,
        )  # fmt: skip

    row = ceil(q - y_off, granule) * granule
    bands = range(least_rows, p + least_rows, least_rows)
    if last:
        columns = sorted({min(some, row) for some in range(granule, MOST_COLUMNS + granule, granule)})
        each = (unit(CHANNELS, min(band, p), some) for band in bands[:MOST_BANDS] for some in columns)
        read = ((one.bands * one.spans * one.x_rows * (one.units + 1), one.shared, one) for one in each if one.shared <= most)
        return min(read, key=lambda found: found[:2], default=(0, 0, None))[2]
    one = unit(1, p, row)
    if one.shared <= most:
        of_plane = unit(2, p, row).shared - one.shared
        return unit(min(1 + (most - one.shared) // (of_plane + 16), all_planes), p, row)
    fitting = takewhile(lambda one: one.shared <= most, (unit(1, band, row) for band in bands[:-1]))
    return max(fitting, key=lambda one: one.band, default=None)


def _sixteens(problem: ConvProblem, unit: Any) -> int:
    """How many tasks of a unit lie below one another."""
    return 2 * ceil(unit.band, 2 * ROWS) if _strided(problem) else ceil(unit.band, ROWS)


def _last(problem: ConvProblem) -> str | None:
    """Why it can't run `problem`, whose channels are last, or None if it can."""
    if problem.K != problem.C or problem.K % 4:
        return "with channels last it takes as many channels out as in, a multiple of four"
    pixels = max(math.prod(problem.operand_size), math.prod(problem.result_size))
    return "it counts the elements of an image in 32 bits" if problem.K * pixels >= 2**31 else None


TAKES = Takes(
    ("it computes forward convolutions and gradients by the input", lambda p: p.direction in ("fprop", "dgrad")),
    ("it takes one input channel a group", lambda p: p.groups == p.C), TWO_AXES, HALVES,
    ("it takes strides of 1 and 2 along rows", lambda p: p.stride[2] in TILES),
    (
        "of gradients it computes those of a layer with as many channels out as in and one stride",
        lambda p: p.direction == "fprop" or (p.K == p.C and p.stride[1] == p.stride[2]),
    ),
    (
        "of gradients with a stride it takes filters without dilation of up to 16 columns",
        lambda p: not _strided(p) or (p.dilation[1:] == (1, 1) and p.filter_size[2] <= 2 * EIGHT),
    ),
    NOT_EMPTY, ("eight results of a row meet at most 32 columns of the input", lambda p: _steps(p) is not None),
    lambda p: _last(p) if p.layout == "NHWC" else None, ("it counts in 32 bits", lambda p: p.layout == "NHWC" or p.largest_array < 2**31),
)  # fmt: skip


def _fits(problem: ConvProblem, config: DepthwiseToeplitz) -> str | None:
    if config.UNIT_KIB not in UNITS[problem.layout]:
        return f"UNIT_KIB must be one of {', '.join(map(str, UNITS[problem.layout]))}"
    unit = _unit(problem, config)
    return grid_refusal(unit.blocks) if unit else f"a plane's {ROWS} rows take more than {config.UNIT_KIB} KiB of shared memory"


LEGAL = Tiles(TAKES, DepthwiseToeplitz, _fits)


def adds_border(source: ConvProblem, problem: ConvProblem, config: DepthwiseToeplitz) -> bool:
    """Whether the kernel reads the image of `source` with its border: of planes that fit a block."""
    if source.direction != "fprop" or source.layout != "NCHW" or TAKES.why_not(source):
        return False
    unit = _unit(source, config)
    return unit is not None and unit.bands == 1


def schedule(
    problem: ConvProblem, config: DepthwiseToeplitz, device: Device, with_moments: bool = False, source: ConvProblem | None = None
) -> Schedule:
    problem = source or problem
    (_, h, w), (pad_h, pad_w) = problem.operand_size, _padding(problem)
    # the last column that a forward convolution reads, which may lie outside
    last = (problem.output_size[2] - 1) * problem.stride[2] - problem.padding_before[2] + (problem.filter_size[2] - 1) * problem.dilation[2]
    unit, grad = _unit(problem, config), _strided(problem)
    check_shared(problem, config, device, unit.shared)
    args = arguments(
        DepthwiseToeplitzArguments, problem, unit, all_planes=problem.N * problem.K, sixteens=_sixteens(problem, unit), pad_h=pad_h,
        pad_w=pad_w, flipped=int(problem.direction == "dgrad" and not grad),
        chunks=ceil(problem.K, CHANNELS) if problem.layout == "NHWC" else 1, x_size=problem.N * problem.C * h * w, before_w=pad_w,
        after_w=max(last - (w - 1), 0),
    )  # fmt: skip
    steps = _steps(problem)
    defines = {
        "TYPE": ELEMENTS[problem.dtype], "STRIDE": 1 if grad else problem.stride[2], "STEPS": steps, "GRAD": int(grad),
        "LAST": int(problem.layout == "NHWC"), **({} if problem.border is None else {"BORDERED": 1}),
    }  # fmt: skip
    threads = 32 * WARPS[problem.layout]
    return Schedule.plain([[finishing("depthwise_toeplitz", defines, unit.blocks, threads, args, shared=unit.shared)]])


def variants(device: Device) -> Iterator[VariantSet]:
    for stride, steps in STEPS.items():
        choices = {"TYPE": (HALF, BFLOAT), "STRIDE": (stride,), "STEPS": steps, "LAST": FLAG}
        yield VariantSet("depthwise_toeplitz", choices | {"GRAD": (0,)})
        yield VariantSet("depthwise_toeplitz", choices | {"GRAD": (0,), "LAST": (0,), "BORDERED": (1,)})
    yield VariantSet("depthwise_toeplitz", {"TYPE": (HALF, BFLOAT), "STRIDE": (1,), "STEPS": (1,), "GRAD": (1,), "LAST": FLAG})


def configs(problem: ConvProblem, device: Device) -> Iterator[DepthwiseToeplitz]:
    for config in map(DepthwiseToeplitz, UNITS[problem.layout]):
        if LEGAL.refusal(problem, config) is None and (unit := _unit(problem, config)) and unit.shared <= shared_limit(device):
            yield config


def time(problem: ConvProblem, config: DepthwiseToeplitz, device: Device) -> float:
    """Microseconds that `config` should take: memory and multiprocessors overlap in part, and blocks wait."""
    unit, stride, steps, at = _unit(problem, config), problem.stride[2], _steps(problem), problem.layout
    r, whole = problem.filter_size[1], problem.layout == "NCHW" and problem.operand_size[2] % EIGHT == 0
    tasks = unit.planes * _sixteens(problem, unit) * unit.groups
    met, tiles = (r / 2, GRAD_TILES) if _strided(problem) else (r, TILES[stride])
    cycles = tasks * (met * (tiles * steps * COST.PRODUCT[at] + COST.ROW[at]) + COST.TASK[at]) + COST.BLOCK[at]
    eight = COST.WHOLE[at] if whole else COST.EIGHT[at]
    cycles += unit.planes * (unit.x_rows * unit.units * eight + r * unit.taps_pitch * COST.TAP[at])
    resident = max(1, min(COST.RESIDENT[problem.layout], SHARED_KIB * 1024 // (unit.shared + 1024)))
    busy = max(1.0, unit.blocks / device.multiprocessors) * cycles / COST.CLOCK
    moved = bytes_moved(problem)
    moving = spread(moved / COST.MEMORY[at], device.multiprocessors)
    us = COST.BEGIN[at] + math.hypot(busy, moving) + COST.WAVE[at] * ceil(unit.blocks, device.multiprocessors * resident)
    us *= COST.RESIDUAL if problem.has_residual else 1
    return us * COST.LONG if problem.layout == "NCHW" and config.UNIT_KIB > UNITS["NCHW"][0] else us
