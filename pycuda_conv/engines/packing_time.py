"""The time model of the launches beside a product of packed operands: packing, and adding the parts of a split sum."""

from __future__ import annotations

import math
from functools import lru_cache

from pycuda_conv.engines.addressing import PackedLayout, filter_sizes, flagged
from pycuda_conv.engines.packing import filter_parts, packed_array
from pycuda_conv.engines.tensor_cores import limbs
from pycuda_conv.problem import ConvProblem

WINDOWED = 1.8  # relative time of packing images whose windows overlap
FITTING = 3e7  # bytes that the L2 cache keeps from one launch to the next
#: By the bytes of an element: bytes a microsecond that launches beside the product move, microseconds of each launch, and microseconds
#: that each block adds if it packs fewer than FEW pixels.
BY_ELEMENT = {8: (3.9e6, 0.75, 0.018), 4: (3.4e6, 0.7, 0.018), 2: (3.5e6, 0.75, 0.008)}
FEW = 32
SECTOR = 32  # bytes of memory that are read at once
#: Microseconds to pack a row of a filter, for each limb, besides its bytes; relative time of rows with folded taps; and of the bytes of
#: rows in parts.
FILTER_ROW, FOLDED_ROW, PARTED = 2.2e-3, 1.9, 2.4
#: For dgrad, whose filters are packed from taps that lie side by side: microseconds of a row; and elements of 64 rows that are packed in a
#: microsecond, all of which write to the same cache lines.
GRADIENT_ROW, GRADIENT_RATE = 6.5e-3, 52e3
#: For wgrad with folded taps, microseconds: of the launch that packs both operands, of each element that is read, of each limb that is
#: written for the images, of each block of the other operand, and of each image. Fitted to 19 times on an H100: error 14%.
FOLDED, FOLDED_READ, FOLDED_WRITTEN, FOLDED_BLOCK, FOLDED_IMAGE = 5.2, 4.6e-6, 0.5e-6, 13e-3, 8e-3
JOIN_TIME, JOIN_RATE = 1.9, 10.8e3  # microseconds of a block that adds the parts of its tile, and their bytes a microsecond


@lru_cache(maxsize=64)  # the planner asks for them once a configuration
def _filter_blocks(problem: ConvProblem, packed: PackedLayout) -> int:
    """Blocks of the launch that packs the filter as images are packed."""
    return packed_array(problem, packed, True, True).blocks


@lru_cache(maxsize=256)  # the same for many tiles
def overhead(
    problem: ConvProblem, packed: PackedLayout, split: int, packs_filter: bool = True, joined: int = 0
) -> float:
    """Microseconds that all launches but the products should take, for the time models: packing, adding a split sum.

    `joined`: bytes of the parts that a block of the product adds, if no launch does.
    """
    moved = of_filter = 0.0
    if packs_filter:  # a tap's channels are filled up, and large filters are read from memory again
        packed_filter = 2.0 * limbs(problem) * 64 * packed.load * math.prod(filter_sizes(problem, packed)) * problem.groups
        moved = _read_filter(problem, packed) + packed_filter * (1 if packed_filter < FITTING else 2)
        of_filter = _filter_time(problem, packed)
    if not packed.as_is:
        images = math.prod(problem.input_shape) * problem.itemsize
        images += 2 * limbs(problem) * problem.N * math.prod(packed.stored) * packed.pixel * problem.groups
        moved += images * (WINDOWED if packed.window else 1)
    adding = 0.0
    if joined:
        moved += math.prod(problem.result_shape) * 4 * split
        adding = JOIN_TIME + joined / JOIN_RATE
    elif split > 1:
        moved += math.prod(problem.result_shape) * (8 * split + problem.itemsize)
        adding = 2.0
    few, (rate, launch_time, few_time) = 0.0, BY_ELEMENT[problem.itemsize]
    if problem.layout == "CNHW" and packed.level and not packed.as_is and problem.itemsize == 4:
        numbers = math.prod(problem.input_shape) + math.prod(problem.weight_shape)
        written = limbs(problem) * problem.N * math.prod(packed.stored) * packed.pixel * problem.groups
        blocks = FOLDED_BLOCK * _filter_blocks(problem, packed) + FOLDED_IMAGE * problem.N * problem.groups
        parts = math.prod(problem.result_shape) * (4 if joined else 8) * split if split > 1 else 0
        return adding + FOLDED + FOLDED_READ * numbers + FOLDED_WRITTEN * written + blocks + parts / rate
    if problem.layout == "CNHW" and math.prod(packed.taps) < FEW:  # blocks of the other operand have little to do
        few = few_time * _filter_blocks(problem, packed)
    launches = (2 if packs_filter else 0) + (2 if flagged(problem, packed) else 0) + (not packed.as_is)
    bytes_time = moved / rate
    both = math.hypot(bytes_time, of_filter) if problem.direction == "dgrad" else bytes_time + of_filter
    return adding + max(both, few) + launch_time * launches


def _filter_time(problem: ConvProblem, packed: PackedLayout) -> float:
    """Microseconds of packing a filter besides those of its bytes."""
    if problem.direction != "dgrad":
        return FILTER_ROW * limbs(problem) * problem.result_channels * (FOLDED_ROW if packed.level else 1)
    rows = problem.result_channels // problem.groups
    chains = math.prod(problem.weight_shape) * min(64, rows) / problem.result_channels / GRADIENT_RATE
    return max(GRADIENT_ROW * problem.result_channels, chains)


def _read_filter(problem: ConvProblem, packed: PackedLayout) -> float:
    """Bytes of a filter that packing it reads. A row of dgrad reads sectors, in which only the taps of one channel are its own."""
    taps = math.prod(problem.filter_size)
    if problem.direction != "dgrad":
        return math.prod(problem.weight_shape) * problem.itemsize * (PARTED if filter_parts(problem, packed) > 1 else 1)
    return math.prod(problem.weight_shape) // taps * (taps * problem.itemsize + SECTOR - problem.itemsize)
