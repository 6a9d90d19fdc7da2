"""Time models of depthwise convolutions of channels-last arrays."""

from __future__ import annotations

import math
from typing import NamedTuple

from pycuda_conv.engines import split_sum
from pycuda_conv.engines.base import Config, Device
from pycuda_conv.engines.costs import costs, spread
from pycuda_conv.engines.depthwise.nhwc_launch import (
    COLUMNS,
    THREADS,
    Depthwise,
    DepthwiseRing,
    DepthwiseStrips,
    DepthwiseWgrad,
    grid_of,
    of_filter,
    partition_of,
    unrolled,
    unrolled_by,
    vector_choices,
    vector_of,
)
from pycuda_conv.engines.geometry import accumulator_bytes, ceil
from pycuda_conv.problem import DTYPE_CODES, ConvProblem


class CostTerms(NamedTuple):
    """What unrolled loops cost."""

    begin: float  # microseconds of a launch
    first: float  # instructions a cycle of a scheduler with one block's warp
    most: float  # the most instructions a cycle
    hidden: float  # 1: memory and instructions take turns; more: the shorter hides behind the longer
    step: float  # microseconds that a thread waits for each row
    memory: float  # bytes a microsecond of 132 multiprocessors


COST = costs("depthwise.nhwc_time")
COST_TERMS: dict[type[Config], CostTerms] = {kind: CostTerms(*COST.COST_TERMS[kind.__name__]) for kind in (DepthwiseStrips, Depthwise)}


def time(problem: ConvProblem, config: Config, device: Device) -> float:
    """Microseconds that `config` should take, roughly.

    They are those of what is read and written once, and of the instructions of the multiprocessor with most blocks. In float64 and in
    wgrad neither hides the other, and both take longer if blocks do not fill the GPU.
    """
    waits = 0.0  # microseconds that a thread waits, for one tap after another
    if isinstance(config, Depthwise) and not (unrolled_by(problem, Depthwise) and problem.K == problem.groups):
        waits = math.prod(problem.filter_size) * (COST.TAP_WAIT + COST.ELEMENT_WAIT * config.TILE_P * config.TILE_Q)
    strips = isinstance(config, DepthwiseStrips) and unrolled_by(problem, DepthwiseStrips)
    if problem.K != problem.groups and not of_filter(problem) and not strips:  # threads load one number at a time
        singly = max(problem.macs / COST.SINGLY, math.prod(problem.result_shape) / COST.SINGLY_WRITTEN)
        return COST.SINGLY_BEGIN + max(waits, spread(singly, device.multiprocessors))
    if not unrolled_by(problem, type(config)):  # its loops take as long as a 9x9 filter's were measured to take
        # a load of one channel takes as long
        narrow = vector_choices(DTYPE_CODES[problem.dtype], 0, type(config))[0] / vector_of(problem, type(config))
        loops = COST.LOOPS_OF_FILTER / (1 + FEW_TAPS / math.prod(problem.output_size)) if of_filter(problem) else COST.LOOPS
        return 3 + max(waits, spread(narrow * problem.macs / loops, device.multiprocessors))
    if isinstance(config, DepthwiseRing):
        return _ring_time(problem, config, device)
    work = _work(problem, config)
    multiprocessors, blocks = device.multiprocessors, max(grid_of(problem, config), 1)
    if type(config) in COST_TERMS and problem.dtype != "float64":
        terms, each = COST_TERMS[type(config)], max(1.0, blocks / multiprocessors)
        together = min(each, work.blocks)  # each block hides the latency of the others
        rate = min(terms.most, terms.first * together)
        busy = each * work.instructions / rate / COST.CLOCK  # each scheduler has a warp of the block
        moving = spread(problem.bytes / terms.memory, multiprocessors)
        return terms.begin + float((busy**terms.hidden + moving**terms.hidden) ** (1 / terms.hidden)) + work.steps * terms.step / together
    at_once = work.blocks * multiprocessors
    rounds = blocks / at_once
    if isinstance(config, DepthwiseWgrad) and rounds > 1:  # blocks are long and equal, so the last round takes as long as others
        blocks = ceil(blocks, at_once) * at_once
    us = problem.bytes / COST.OTHER_MEMORY + spread(blocks * THREADS * work.instructions / COST.OTHER_ISSUED, multiprocessors)
    us = COST.OTHER_BEGIN + us / min(1.0, rounds) + work.steps * COST.OTHER_STEP
    if isinstance(config, DepthwiseStrips):
        us *= COST.FLOAT64_STRIPS
    if isinstance(config, DepthwiseWgrad) and config.PARTS > 1:
        us += split_sum.time(math.prod(problem.result_shape), config.PARTS, accumulator_bytes(problem), multiprocessors)
    return us


def _ring_time(problem: ConvProblem, config: DepthwiseRing, device: Device) -> float:
    """Microseconds that a ring should take: memory, or the multiprocessors' instructions."""
    size, stride, vector, (_, p, _) = unrolled(problem), problem.dilation[1], vector_of(problem, DepthwiseRing), problem.filter_size
    cut, rows, blocks, sums = partition_of(problem, config), min(config.ROWS, p), grid_of(problem, config), size * size * vector
    fit = 2 if sums > 64 else 3 if sums >= 50 else 4  # blocks that fit a multiprocessor
    loaded = 1 + (vector if vector > 1 else 0)  # instructions to load and unpack a word from shared memory
    steps = (rows - 1) * stride + size
    inside = min(steps, problem.input_size[1])  # rows of x that are no padding
    product = COLUMNS * sums / stride + ((COLUMNS - 1) * stride + size) * loaded
    cycles = cut.rounds * (inside * product + steps * (COST.RING_STEP + COLUMNS / stride * loaded)) + COST.RING_SUM * sums + COST.RING_END
    full, rest = divmod(ceil(blocks, device.multiprocessors), fit)
    busy = full * fit + (max(rest, COST.ALONE) if rest else 0)
    us = COST.RING_BEGIN + max(COST.ISSUED * busy * cycles / COST.CLOCK, problem.bytes / COST.RING_MEMORY)
    if config.PARTS > 1 or problem.itemsize == 2:
        us += split_sum.time(math.prod(problem.result_shape), config.PARTS, accumulator_bytes(problem), device.multiprocessors)
    return us


FEW_TAPS = 4  # wgrad's pixels take at least as long as so many taps: 1x1x1 filters took 45 us on an H100, 9 by their multiplications


class _Work(NamedTuple):
    """The work of a thread."""

    blocks: int  # blocks that fit a multiprocessor
    steps: int  # one after the other, each waiting for memory
    instructions: float


def _work(problem: ConvProblem, config: Config) -> _Work:
    """The work of a thread of `config` for a filter whose loops are unrolled."""
    size, vector = unrolled(problem), vector_of(problem, type(config))
    unpacked = vector if problem.itemsize == 2 else 0
    parts = 0 if problem.itemsize == 2 else 1  # partial sums, of rows of the filter, that are added
    if isinstance(config, DepthwiseWgrad):
        stride, (_, p, _) = problem.dilation[1], problem.filter_size
        cut, rows = partition_of(problem, config), min(config.ROWS, p)
        read = (COLUMNS - 1) * stride + size
        loads = (stride * read + COLUMNS) * (COST.LOADED + unpacked)
        row = 1.0 * COLUMNS * vector * size * size + loads + 15 * stride + COLUMNS * vector * size
        steps = cut.rounds * ((rows - 1) * stride + size)
        return _Work(4 if size == 3 else 3, steps, cut.rounds * (COST.START // 2 + rows * row) + 12 * size * size * vector)
    stride, (_, p, _) = problem.stride[1], problem.result_size
    if isinstance(config, DepthwiseStrips):
        rows, columns = config.ROWS, COLUMNS
    else:
        assert isinstance(config, Depthwise)
        rows, columns = config.TILE_P, config.TILE_Q
    rows, taps = min(rows, p), float(size * size)
    if problem.direction == "dgrad" and stride == 2:
        steps, read, taps = rows // stride + size // stride, columns // stride + size // stride, taps / stride**2
    else:
        steps, read = (rows - 1) * stride + size, (columns - 1) * stride + size
    products, beside = columns * vector * (taps + parts * size), columns * (4 * vector + COST.STORED)
    loading = steps * (read * (COST.LOADED + unpacked) + 15)
    wide = size == 7 or size * vector > 12 or problem.dtype == "float64"
    wide = wide or (problem.dtype == "float32" and stride == 1 and (size, vector) == (3, 4))
    blocks = 3 if wide and isinstance(config, DepthwiseStrips) else 4
    if problem.dtype == "float64":
        return _Work(blocks, steps, COST.START + loading + rows * (products + beside))
    if isinstance(config, Depthwise):
        waits = ceil(steps, 3) if config.TILE_Q < 4 else steps  # a small tile's rows are under way together
        return _Work(blocks, waits, COST.OF_TILES * (loading + rows * (products + beside)))
    met = rows if size == 5 and vector == 4 else steps / stride  # rows of sums that are met; some of the others lie outside the strip
    return _Work(blocks, steps, COST.OF_STRIPS + COST.OF_OTHERS * (loading + rows * beside) + met * products)
