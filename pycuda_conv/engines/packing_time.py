"""The time model of the launches beside a product of packed operands: packing, and adding the parts of a split sum."""

from __future__ import annotations

import math
from functools import lru_cache

from pycuda_conv.engines.addressing import PackedLayout, filter_sizes, flagged
from pycuda_conv.engines.costs import costs
from pycuda_conv.engines.packing import filter_parts, packed_array
from pycuda_conv.engines.tensor_cores import limbs
from pycuda_conv.problem import ConvProblem

COST = costs("packing_time")
FEW = 32
SECTOR = 32  # bytes of memory that are read at once


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
        moved = _read_filter(problem, packed) + packed_filter * (1 if packed_filter < COST.FITTING else 2)
        of_filter = _filter_time(problem, packed)
    if not packed.as_is:
        images = float(math.prod(problem.input_shape) * problem.itemsize)
        if packed.level == 1 and packed.window is None and problem.layout != "NHWC":  # a tap's neighbouring pixels lie `stride` apart
            apart = min(problem.stride[2], SECTOR // problem.itemsize)
            read = problem.N * math.prod(packed.stored) * packed.pixel * problem.groups * problem.itemsize * apart
            images += COST.GATHERED * max(0.0, read - images)
        images += 2 * limbs(problem) * problem.N * math.prod(packed.stored) * packed.pixel * problem.groups
        moved += images * (COST.WINDOWED if packed.window else 1)
    adding = 0.0
    if joined:
        moved += math.prod(problem.result_shape) * 4 * split
        adding = COST.JOIN_TIME + joined / COST.JOIN_RATE
    elif split > 1:
        moved += math.prod(problem.result_shape) * (8 * split + problem.itemsize)
        adding = 2.0
    few, (rate, launch_time, few_time) = 0.0, COST.BY_ELEMENT[problem.itemsize]
    if problem.layout == "CNHW" and packed.level and not packed.as_is and problem.itemsize == 4:
        numbers = math.prod(problem.input_shape) + math.prod(problem.weight_shape)
        written = limbs(problem) * problem.N * math.prod(packed.stored) * packed.pixel * problem.groups
        blocks = COST.FOLDED_BLOCK * _filter_blocks(problem, packed) + COST.FOLDED_IMAGE * problem.N * problem.groups
        parts = math.prod(problem.result_shape) * (4 if joined else 8) * split if split > 1 else 0
        return adding + COST.FOLDED + COST.FOLDED_READ * numbers + COST.FOLDED_WRITTEN * written + blocks + parts / rate
    if problem.layout == "CNHW" and math.prod(packed.taps) < FEW:  # blocks of the other operand have little to do
        few = few_time * _filter_blocks(problem, packed)
    launches = (2 if packs_filter else 0) + (2 if flagged(problem, packed) else 0) + (not packed.as_is)
    bytes_time = moved / rate
    both = math.hypot(bytes_time, of_filter) if problem.direction == "dgrad" else bytes_time + of_filter
    return adding + max(both, few) + launch_time * launches


def _filter_time(problem: ConvProblem, packed: PackedLayout) -> float:
    """Microseconds of packing a filter besides those of its bytes."""
    if problem.direction != "dgrad":
        return COST.FILTER_ROW * limbs(problem) * problem.result_channels * (COST.FOLDED_ROW if packed.level else 1)
    rows = problem.result_channels // problem.groups
    chains = math.prod(problem.weight_shape) * min(64, rows) / problem.result_channels / COST.GRADIENT_RATE
    return max(COST.GRADIENT_ROW * problem.result_channels, chains)


def _read_filter(problem: ConvProblem, packed: PackedLayout) -> float:
    """Bytes of a filter that packing it reads. A row of dgrad reads sectors, in which only the taps of one channel are its own."""
    taps = math.prod(problem.filter_size)
    if problem.direction != "dgrad":
        return math.prod(problem.weight_shape) * problem.itemsize * (COST.PARTED if filter_parts(problem, packed) > 1 else 1)
    return math.prod(problem.weight_shape) // taps * (taps * problem.itemsize + SECTOR - problem.itemsize)
