"""Convolutions of float32 arrays as they lie, NCHW, for ``precision="tf32"`` on Hopper's tensor cores (``cu/hopper/lines.cu``).

Only the filter is packed. In TF32 nothing is scaled either, and no number needs a path of its own. With FP16_OPERANDS the numbers
become fp16 on their way to the product, which takes half the time, and the same launch computes again in TF32 what fp16 can't hold.
Either way the kernel loads more from shared memory and the L2 cache than one on packed operands does. So it wins if packing the
images would take about as long as their products: with few channels.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

from pycuda_conv.engines.base import Config, fastest
from pycuda_conv.engines.geometry import arguments, ceil, filter_strides, phases
from pycuda_conv.engines.hopper.common import MOST_SHARED, unsupported
from pycuda_conv.engines.schedule import (
    BIAS,
    INPUT,
    PACKED,
    RESIDUAL,
    RESULT,
    SCALE,
    WEIGHT,
    WORKSPACE,
    Arena,
    Schedule,
    finish,
    finish_constants,
)
from pycuda_conv.engines.struct import kernel_struct
from pycuda_conv.engines.tensor_cores import products
from pycuda_conv.engines.texts import TextFamily
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import Device, KernelLaunch, Place, TensorMap

__all__ = [
    "CONFIGS", "LAYOUTS", "MOST_TEXTS", "TENSOR_CORES", "Lines", "choose", "configs", "filter_key", "refusal", "schedule", "sum_order",
    "texts", "time", "unsupported",
]  # fmt: skip

MOST_STAGES = 6  # the most stages of a ring of x that are tried
MOST_PIECES = 4  # pieces of 16 bytes of a line that a thread can keep
FILTER_BYTES = 40 * 1024  # the most bytes of the filter of one output channel
FEW = 8  # channels; with fewer, lines are rows of all of them
SWIZZLED = 4  # rows of so many pieces are swizzled


@dataclass(frozen=True)
class Lines(Config):
    """One tile of ``hopper/lines.cu``.

    BLOCK_N output channels. A thread takes PIXEL_QUADS times four neighbouring pixels, one below the other; a warp's pixels are
    WARP_TILE wide. Each of CONSUMERS warpgroups has a ring of STAGES stages of x, and all share a ring of W_STAGES stages of w. A
    stage has CHUNKS times 8 lines; with FP16_OPERANDS 16, which become fp16 numbers.
    """

    BLOCK_N: int = 64
    PIXEL_QUADS: int = 1
    WARP_TILE: int = 8
    CONSUMERS: int = 2
    STAGES: int = 2
    W_STAGES: int = 1
    CHUNKS: int = 1
    FP16_OPERANDS: bool = False

    FORMER: ClassVar[Mapping[str, str]] = {
        "COLUMNS": "BLOCK_N", "FOURS": "PIXEL_QUADS", "UNIT": "WARP_TILE", "FILTERS": "W_STAGES", "HALF": "FP16_OPERANDS",
    }


CONFIGS = (Lines,)
LAYOUTS = "NCHW", "NHWC", "CNHW"
TENSOR_CORES = True
MOST_TEXTS = {"cuda": 0}  # a text for each layer


# ---- what runs


def why_not(problem: ConvProblem) -> str | None:
    """Why the kernel can't run `problem`, or None if it can."""
    if problem.dtype != "float32" or products(problem) != 1 or problem.groups != 1 or problem.layout != "NCHW":
        return "it takes float32 arrays in tf32, of one group, NCHW"
    if problem.is_empty:
        return "there is nothing to compute"
    if problem.has_depth:
        return "it takes at most two spatial axes"
    if problem.direction != "fprop" and problem.stride != (1, 1, 1):
        return "transposed, it takes no stride"
    if problem.operand_size[2] % 4 or problem.result_size[2] % 4:
        return "rows of x and of y are read and written 16 bytes at once"
    if problem.largest_array >= 2**31:
        return "it counts in 32 bits"
    return None


def refusal(problem: ConvProblem, config: Lines) -> str | None:
    """Why `config` can't run `problem`, or None if it can."""
    reason = why_not(problem)
    if reason:
        return reason
    if config.BLOCK_N not in (32, 64, 96, 128) or config.PIXEL_QUADS not in (1, 2) or config.BLOCK_N * config.PIXEL_QUADS > 128:
        return "a tile has 32, 64, 96 or 128 columns, and one or two fours, 128 columns in all"
    if config.BLOCK_N >= problem.result_channels + 32:
        return f"there are {problem.result_channels} columns"
    if config.CONSUMERS not in (2, 3) or (config.CONSUMERS == 3 and (config.BLOCK_N > 64 or config.PIXEL_QUADS > 1)):
        return "there are two consumers, or, of 64 columns and one four, three"
    if config.WARP_TILE not in (8, 16, 32):
        return "a unit is 8, 16 or 32 pixels wide"
    if config.CHUNKS < 1:
        return "a stage takes some eights of lines"
    walk = _Walk.of(problem, config)
    if config.PIXEL_QUADS == 2 and (walk.flat or walk.stride[0] != 1 or walk.dilation[0] != 1):
        return "two fours share rows of many channels, where neighbours are one row apart"
    if walk.pieces > MOST_PIECES or max(walk.box) > 256 or (config.PIXEL_QUADS == 2 and walk.taps[1] > 4):
        return "a thread has no room for what its taps meet of a row"
    if walk.flat and config.CHUNKS != ceil(problem.operand_channels * walk.taps[0], 8):
        return "a stage takes some eights of lines; of less than 8 channels all"
    if config.STAGES < 2 or not (config.W_STAGES == walk.steps or 2 <= config.W_STAGES < walk.steps):
        return f"rings have two stages at least; that of w, {walk.steps} at the most"
    if config.FP16_OPERANDS and walk.flat:
        return "few channels are multiplied in TF32"
    if config.FP16_OPERANDS and config.W_STAGES < 2:
        return "a ring of w has two stages at least where some is done again"
    if 4 * problem.operand_channels * math.prod(walk.taps) > FILTER_BYTES:
        return "an output channel's elements of the filter lie in shared memory while it is laid"
    needed = _all_shared_bytes(problem, config)
    if needed > MOST_SHARED:
        return f"it needs {needed:,} bytes of shared memory; a block has {MOST_SHARED:,}"
    return None


# ---- launches


@dataclass(frozen=True)
class _Walk:
    """How a problem's pixels read x; each pair is of rows and columns.

    Attributes
    ----------
    size, taps, stride, dilation : (int, int)
    low : (int, int)
        The row and column of x that the first pixel reads by its first tap.
    flipped : bool
        Whether taps are taken from the filter's last to its first.
    flat : bool
        Whether a line is any row of any channel, as for fewer than 8 channels.
    unit : (int, int)
        Pixels of a warp.
    channels, chunks, steps : int
        Channels of a stage; eights, or sixteens, of lines of a stage; stages.
    """

    size: tuple[int, int]
    taps: tuple[int, int]
    stride: tuple[int, int]
    low: tuple[int, int]
    dilation: tuple[int, int]
    flipped: bool
    flat: bool
    unit: tuple[int, int]
    channels: int
    chunks: int
    steps: int

    @classmethod
    def of(cls, problem: ConvProblem, config: Lines) -> _Walk:
        (phase,) = phases(problem)
        channels, flat, flipped = problem.operand_channels, problem.operand_channels < FEW, problem.direction != "fprop"
        low = [-pad + min(0, (taps - 1) * step) for pad, taps, step in zip(phase.pad, phase.taps, phase.dilation, strict=True)]
        dilation = [abs(step) or 1 for step in phase.dilation]  # in dgrad taps are reversed
        each = channels if flat else (16 if config.FP16_OPERANDS else 8) * config.CHUNKS
        unit = (32 * config.PIXEL_QUADS // config.WARP_TILE, config.WARP_TILE)
        size, taps, stride = _hw(phase.size), _hw(phase.taps), _hw(phase.stride)
        return cls(size, taps, stride, _hw(low), _hw(dilation), flipped, flat, unit, each, config.CHUNKS, ceil(channels, each))

    @property
    def shift(self) -> int:
        """Columns of x that are loaded before the first one that taps read: loads begin at multiples of 16 bytes."""
        return self.low[1] % 4

    @property
    def pieces(self) -> int:
        return (self.shift + 3 * self.stride[1] + (self.taps[1] - 1) * self.dilation[1]) // 4 + 1

    @property
    def box(self) -> tuple[int, int]:
        """Rows and columns of a channel that the taps of a unit read."""
        wide = (self.unit[1] - 4) * self.stride[1] // 4 + self.pieces
        # spaces lines so that 8 lanes' loads use all banks: see four_of and line_of
        while wide % 2 == 0 if self.stride[1] % 2 == 0 else wide % 4 != 2 and wide != SWIZZLED:
            wide += 1
        return (self.unit[0] - 1) * self.stride[0] + (self.taps[0] - 1) * self.dilation[0] + 1, 4 * wide

    @property
    def span(self) -> int:
        """Bytes over which a row is swizzled, or 0."""
        return 16 * SWIZZLED if self.box[1] == 4 * SWIZZLED else 0

    @property
    def unit_bytes(self) -> int:
        return ceil(4 * self.channels * math.prod(self.box), 1024) * 1024

    @property
    def eights(self) -> int:
        """Eights, or sixteens, of lines: all of them."""
        return self.steps * self.chunks

    @property
    def taps_of_eight(self) -> int:
        return self.taps[1] if self.flat else math.prod(self.taps)

    @property
    def units(self) -> tuple[int, int]:
        """Units of an image, in rows and columns."""
        return ceil(self.size[0], self.unit[0]), ceil(self.size[1], self.unit[1])


def _hw(axes: tuple[int, ...] | list[int]) -> tuple[int, int]:
    return axes[1], axes[2]


def shared_bytes(problem: ConvProblem, config: Lines) -> int:
    """Bytes of shared memory of a block's rings and their alignment."""
    walk = _Walk.of(problem, config)
    w_stage = walk.chunks * walk.taps_of_eight * config.BLOCK_N * 32
    return config.CONSUMERS * config.STAGES * 4 * walk.unit_bytes + config.W_STAGES * w_stage + 1024


def _all_shared_bytes(problem: ConvProblem, config: Lines) -> int:
    """The same with barriers for the most stages ever chosen, and with what a block's threads share."""
    barriers = 16 * (config.W_STAGES + config.CONSUMERS * max(config.STAGES, MOST_STAGES))
    return shared_bytes(problem, config) + (2 * barriers + 8 * config.BLOCK_N if config.FP16_OPERANDS else barriers) + 64


def filter_key(problem: ConvProblem, config: Lines) -> Hashable:
    """Equal for problems whose filter is packed alike: as many lines at once, of swizzled rows or not, in fp16 too or not."""
    walk = _Walk.of(problem, config)
    return "laid", problem.direction, problem.C, problem.K, problem.filter_size, walk.eights, walk.span, config.FP16_OPERANDS


LinesProduct = kernel_struct("hopper_lines", "LinesProduct")
#: The arguments of ``lay_filter``.
LayFilter = kernel_struct("hopper_lines", "LayFilter")


def schedule(problem: ConvProblem, config: Lines, device: Device, with_moments: bool = False) -> Schedule:
    """The launches of `config`, which can run `problem`; they note no moments."""
    walk, kept, scratch = _Walk.of(problem, config), Arena(PACKED), Arena(WORKSPACE)
    columns, padded = problem.result_channels, ceil(problem.result_channels, 32) * 32
    (rows, wide), (box_h, box_w) = walk.size, walk.box
    defines = {
        "BLOCK_N": config.BLOCK_N, "PIXEL_QUADS": config.PIXEL_QUADS, "CONSUMERS": config.CONSUMERS, "STAGES": config.STAGES,
        "W_STAGES": config.W_STAGES, "W_RESIDENT": int(config.W_STAGES == walk.steps), "CHUNKS": walk.chunks,
        "FP16_OPERANDS": int(config.FP16_OPERANDS), "FLAT": int(walk.flat), "CHANNELS": walk.channels, "R": walk.taps[0],
        "S": walk.taps[1], "STRIDE_H": walk.stride[0],
        "STRIDE_W": walk.stride[1], "DILATION_H": walk.dilation[0], "DILATION_W": walk.dilation[1], "WARP_TILE_W": walk.unit[1],
        "WARP_TILE_H": walk.unit[0], "BOX_W": box_w, "BOX_H": box_h, "SPAN": walk.span, "SHIFT": walk.shift,
        "HAS_RESIDUAL": int(problem.has_residual),
    }  # fmt: skip
    bytes_each = walk.taps_of_eight * padded * 32  # of eight lines, or of sixteen in fp16
    eights = walk.eights * (2 if config.FP16_OPERANDS else 1)
    laid = kept.take(eights * bytes_each)
    halves: tuple[Place, ...] = (kept.take(walk.eights * bytes_each), kept.take(8 * columns)) if config.FP16_OPERANDS else ()
    _, row_step, channel_step = filter_strides(problem)
    of_filter = LayFilter(columns, padded, problem.operand_channels, eights, row_step, channel_step, int(walk.flipped))
    # always the same shared memory: launches of one text can then share a kernel
    filters = KernelLaunch(
        "lay_filter", defines, padded, 256, (WEIGHT, laid, *halves), (), "hopper_lines", shared=FILTER_BYTES, arch="sm_90a",
        arguments=of_filter,
    )  # fmt: skip

    across, tiles, grid = _tiles(problem, config, device.multiprocessors)
    unit_rows, unit_columns = walk.units
    told = arguments(
        LinesProduct, across=across, tiles=tiles, steps=walk.steps, images=problem.N, unit_rows=unit_rows, unit_columns=unit_columns,
        units=unit_rows * unit_columns, columns=columns, padded=padded, rows=rows, wide=wide, image_step=columns * rows * wide,
        plane=rows * wide, low_w=walk.low[1] - walk.shift, low_h=walk.low[0], **finish(problem, asks_residual=False),
    )
    _, h, w = problem.operand_size
    channels, row = problem.operand_channels, 4 * w
    sizes, strides = (w, channels, h, problem.N), (row * h, row, row * h * channels)
    images = TensorMap(INPUT, 0, sizes, strides, (box_w, walk.channels, box_h, 1), walk.span, "float32")
    if config.FP16_OPERANDS:
        flags = scratch.take(4 * tiles * across * 4 * config.CONSUMERS)
        buffers: tuple[Place, ...] = (halves[0], laid, halves[1], flags, BIAS, SCALE, RESIDUAL, RESULT)
    else:
        buffers = (laid, BIAS, SCALE, RESIDUAL, RESULT)
    threads, shared = 128 * (1 + config.CONSUMERS), shared_bytes(problem, config)
    lines = KernelLaunch(
        "hopper_lines", defines, grid, threads, buffers, (), maps=(images,), shared=shared, arch="sm_90a", arguments=told,
        layer=finish_constants(told),
    )  # fmt: skip
    return Schedule([[filters]], [[lines]], [[filters], [lines]], scratch.used, kept.used)


def _tiles(problem: ConvProblem, config: Lines, multiprocessors: int) -> tuple[int, int, int]:
    """Tiles along the channels; tiles of units; blocks of the launch."""
    across = ceil(problem.result_channels, config.BLOCK_N)
    tiles = ceil(problem.N * math.prod(_Walk.of(problem, config).units), 4 * config.CONSUMERS)
    return across, tiles, across * min(tiles, max(1, multiprocessors // across))


def sum_order(problem: ConvProblem, config: Lines) -> Hashable:
    """The order of lines, and the type that numbers become."""
    return config.CHUNKS, config.FP16_OPERANDS, config.PIXEL_QUADS, config.WARP_TILE


def texts(device: Device) -> tuple[TextFamily, ...]:
    """None that could be listed: each layer has a text of its own, with the layer's loops."""
    return ()


# ---- the choice

# Fitted to 32 times on an H200: root mean square of the error 10%.
CLOCK = {False: 1900.0, True: 1300.0}  # cycles a microsecond of products beside the loads that feed them, by FP16_OPERANDS
FILL = 42.3e3  # bytes a microsecond from the L2 cache to a multiprocessor
STORED = {8: 30.2e3, 16: 37.8e3, 32: 40.8e3}  # and from the multiprocessor, by the pixels of a unit's rows
LAUNCHES_TIME = {False: 2.47, True: 3.42}  # microseconds of launches, with that of the filter
RESIDUAL_RATE = 5.85e3  # bytes of a residual that a multiprocessor reads and adds in a microsecond
TILE_TIME = 1.18  # microseconds of a tile beside all that


def configs(problem: ConvProblem, device: Device) -> Iterator[Lines]:
    """The configurations worth comparing for `problem`."""
    if why_not(problem):
        return
    channels, rows, most = problem.operand_channels, problem.filter_size[1], problem.result_channels + 31
    widths = [columns for columns in (64, 96, 128) if columns <= most] or [32]
    amounts = (ceil(channels * rows, 8),) if channels < FEW else (2, 1, 4)  # of equal predictions the first one was the fastest
    shapes = [(columns, fours) for columns in widths for fours in (1, 2) if columns * fours <= 128]
    for (columns, fours), unit, chunks, half in product(shapes, (8, 16, 32), amounts, (False, True)[: 1 + (channels >= FEW)]):
        for consumers in (2, 3) if columns <= 64 and fours == 1 else (2,):
            yield from _deepest(problem, Lines(columns, fours, unit, consumers, CHUNKS=chunks, FP16_OPERANDS=half))


def _deepest(problem: ConvProblem, config: Lines) -> Iterator[Lines]:
    """`config` with the filter resident in shared memory, if it fits, or else in a ring, and with the most stages that fit, if any."""
    steps = _Walk.of(problem, config).steps
    for filters in (steps, 4, 3, 2):
        least, next_one = (_all_shared_bytes(problem, replace(config, W_STAGES=filters, STAGES=stages)) for stages in (2, 3))
        if filters <= steps and least <= MOST_SHARED:
            one = replace(config, W_STAGES=filters, STAGES=min(MOST_STAGES, 2 + (MOST_SHARED - least) // (next_one - least)))
            if refusal(problem, one) is None:
                yield one
            return


def time(problem: ConvProblem, config: Lines, device: Device) -> float:
    """Microseconds that `config` should take: arithmetic or bytes from the L2 cache, whichever is longer; stores; rounds of tiles."""
    walk, (across, tiles, grid) = _Walk.of(problem, config), _tiles(problem, config, device.multiprocessors)
    units = 4 * config.CONSUMERS
    cycles = walk.eights * walk.taps_of_eight * config.PIXEL_QUADS * config.CONSUMERS * config.BLOCK_N  # 8 columns in 4 cycles
    rows, wide = walk.box
    x = units * walk.steps * walk.channels * rows * (4 * wide + 32)  # with the sectors in which a row begins and ends
    w = walk.eights * walk.taps_of_eight * config.BLOCK_N * 32
    kept = config.W_STAGES == walk.steps
    written = 128 * units * config.PIXEL_QUADS * min(config.BLOCK_N, problem.result_channels)
    tile = max(cycles / CLOCK[config.FP16_OPERANDS], (x + (0 if kept else w)) / FILL) + written / STORED[config.WARP_TILE] + TILE_TIME
    if problem.has_residual:
        tile += written / RESIDUAL_RATE
    filters = (w / FILL if kept else 0) + math.prod(problem.weight_shape) * 12 / 3.5e6
    return LAUNCHES_TIME[config.FP16_OPERANDS] + ceil(tiles, grid // across) * tile + filters


def choose(problem: ConvProblem, device: Device) -> tuple[float, Lines] | None:
    """The configuration that should be fastest, behind the microseconds it should take; None where none is worth it."""
    return fastest((time(problem, config, device), config) for config in configs(problem, device))
