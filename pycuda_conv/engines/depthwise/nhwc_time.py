"""Time models of depthwise convolutions of channels-last arrays."""

from __future__ import annotations

import math
from typing import NamedTuple

from pycuda_conv.engines import split_sum
from pycuda_conv.engines.base import Config
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
from pycuda_conv.runtime.base import Device


class CostTerms(NamedTuple):
    """What unrolled loops cost."""

    begin: float  # microseconds of a launch
    first: float  # instructions a cycle of a scheduler with one block's warp
    most: float  # the most instructions a cycle
    hidden: float  # 1: memory and instructions take turns; more: the shorter hides behind the longer
    step: float  # microseconds that a thread waits for each row
    memory: float  # bytes a microsecond of 132 multiprocessors


#: Fitted to 227 times of strips, 36 of them on an H200, the others on H100s (root mean square of the error 11%), and to 20 of tiles, all
#: on an H200 (15%). In the model each block of a multiprocessor hides the others' latency: of 11 layers on an H100 the chosen strips took
#: 1.008 times as long as the best of three heights, instead of 1.07 without that.
COST_TERMS: dict[type[Config], CostTerms] = {
    DepthwiseStrips: CostTerms(1.8, 0.508, 0.707, 1.1, 0.153, 4.76e6), Depthwise: CostTerms(2.4, 0.73, 0.73, 1.7, 0.26, 3.6e6),
}  # fmt: skip
OF_TILES = 1.55  # instructions of a tile for each one counted
OF_STRIPS, OF_OTHERS = 283.0, 0.59  # instructions of a strip before its first row; and for each one counted beside products
FLOAT64_STRIPS = 0.85  # times the counted instructions: of 16 layers on an H200


def time(problem: ConvProblem, config: Config, device: Device) -> float:
    """Microseconds that `config` should take, roughly.

    They are those of what is read and written once, and of the instructions of the multiprocessor with most blocks. In float64 and in
    wgrad neither hides the other, and both take longer if blocks do not fill the GPU.
    """
    waits = 0.0  # microseconds that a thread waits, for one tap after another
    if isinstance(config, Depthwise) and not (unrolled_by(problem, Depthwise) and problem.K == problem.groups):
        waits = math.prod(problem.filter_size) * (TAP_WAIT + ELEMENT_WAIT * config.TILE_P * config.TILE_Q)
    strips = isinstance(config, DepthwiseStrips) and unrolled_by(problem, DepthwiseStrips)
    if problem.K != problem.groups and not of_filter(problem) and not strips:  # threads load one number at a time
        singly = max(problem.macs / 2e6, math.prod(problem.result_shape) / 0.47e6)
        return 1.2 + max(waits, singly * 132 / device.multiprocessors)
    if not unrolled_by(problem, type(config)):  # its loops take as long as a 9x9 filter's were measured to take
        # a load of one channel takes as long
        narrow = vector_choices(DTYPE_CODES[problem.dtype], 0, type(config))[0] / vector_of(problem, type(config))
        loops = LOOPS_OF_FILTER / (1 + FEW_TAPS / math.prod(problem.output_size)) if of_filter(problem) else LOOPS
        return 3 + max(waits, narrow * problem.macs / loops * 132 / device.multiprocessors)
    if isinstance(config, DepthwiseRing):
        return _ring_time(problem, config, device)
    work = _work(problem, config)
    multiprocessors, blocks = device.multiprocessors, max(grid_of(problem, config), 1)
    if type(config) in COST_TERMS and problem.dtype != "float64":
        terms, each = COST_TERMS[type(config)], max(1.0, blocks / multiprocessors)
        together = min(each, work.blocks)  # each block hides the latency of the others
        rate = min(terms.most, terms.first * together)
        busy = each * work.instructions / rate / CLOCK  # each scheduler has a warp of the block
        moving = problem.bytes / terms.memory * 132 / multiprocessors
        return terms.begin + float((busy**terms.hidden + moving**terms.hidden) ** (1 / terms.hidden)) + work.steps * terms.step / together
    at_once = work.blocks * multiprocessors
    rounds = blocks / at_once
    if isinstance(config, DepthwiseWgrad) and rounds > 1:  # blocks are long and equal, so the last round takes as long as others
        blocks = ceil(blocks, at_once) * at_once
    us = problem.bytes / 4.2e6 + (blocks * THREADS * work.instructions / 29e6) * 132 / multiprocessors
    us = 3 + us / min(1.0, rounds) + work.steps / 4
    if isinstance(config, DepthwiseStrips):
        us *= FLOAT64_STRIPS
    if isinstance(config, DepthwiseWgrad) and config.PARTS > 1:
        us += split_sum.time(math.prod(problem.result_shape), config.PARTS, accumulator_bytes(problem), multiprocessors)
    return us


CLOCK = 1700.0  # cycles a microsecond
# For rings. Fitted to 120 times of 24 layers on an H100 (root mean square of the error 12%), except the memory's rate, which is an H200's.
RING_MEMORY = 3.0e6  # bytes a microsecond
RING_BEGIN = 1.5  # microseconds of a launch, with its first rows
ALONE = 1.47  # warps of a scheduler that take as long as one alone
ISSUED = 1.2  # cycles of an instruction


def _ring_time(problem: ConvProblem, config: DepthwiseRing, device: Device) -> float:
    """Microseconds that a ring should take: memory, or the multiprocessors' instructions."""
    size, stride, vector, (_, p, _) = unrolled(problem), problem.dilation[1], vector_of(problem, DepthwiseRing), problem.filter_size
    cut, rows, blocks, sums = partition_of(problem, config), min(config.ROWS, p), grid_of(problem, config), size * size * vector
    fit = 2 if sums > 64 else 3 if sums >= 50 else 4  # blocks that fit a multiprocessor
    loaded = 1 + (vector if vector > 1 else 0)  # instructions to load and unpack a word from shared memory
    steps = (rows - 1) * stride + size
    inside = min(steps, problem.input_size[1])  # rows of x that are no padding
    product = COLUMNS * sums / stride + ((COLUMNS - 1) * stride + size) * loaded
    cycles = cut.rounds * (inside * product + steps * (20 + COLUMNS / stride * loaded)) + 8.4 * sums + 1500
    full, rest = divmod(ceil(blocks, device.multiprocessors), fit)
    busy = full * fit + (max(rest, ALONE) if rest else 0)
    us = RING_BEGIN + max(ISSUED * busy * cycles / CLOCK, problem.bytes / RING_MEMORY)
    if config.PARTS > 1 or problem.itemsize == 2:
        us += split_sum.time(math.prod(problem.result_shape), config.PARTS, accumulator_bytes(problem), device.multiprocessors)
    return us


#: Multiplications a microsecond of 132 multiprocessors if loops are not unrolled; and those of wgrad.
LOOPS, LOOPS_OF_FILTER = 3.1e6, 2.2e6
FEW_TAPS = 4  # wgrad's pixels take at least as long as so many taps: 1x1x1 filters took 45 us on an H100, 9 by their multiplications
#: Microseconds that a thread then waits for a tap, and for each element of its tile: they bound images of few pixels.
TAP_WAIT, ELEMENT_WAIT = 0.27, 0.083


class _Work(NamedTuple):
    """The work of a thread."""

    blocks: int  # blocks that fit a multiprocessor
    steps: int  # one after the other, each waiting for memory
    instructions: float


START, LOADED, STORED = 600, 5, 4  # instructions of a thread that walks: before its first row, of a load, of a store


def _work(problem: ConvProblem, config: Config) -> _Work:
    """The work of a thread of `config` for a filter whose loops are unrolled."""
    size, vector = unrolled(problem), vector_of(problem, type(config))
    unpacked = vector if problem.itemsize == 2 else 0
    parts = 0 if problem.itemsize == 2 else 1  # partial sums, of rows of the filter, that are added
    if isinstance(config, DepthwiseWgrad):
        stride, (_, p, _) = problem.dilation[1], problem.filter_size
        cut, rows = partition_of(problem, config), min(config.ROWS, p)
        read = (COLUMNS - 1) * stride + size
        row = 1.0 * COLUMNS * vector * size * size + (stride * read + COLUMNS) * (LOADED + unpacked) + 15 * stride + COLUMNS * vector * size
        steps = cut.rounds * ((rows - 1) * stride + size)
        return _Work(4 if size == 3 else 3, steps, cut.rounds * (START // 2 + rows * row) + 12 * size * size * vector)
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
    products, beside = columns * vector * (taps + parts * size), columns * (4 * vector + STORED)
    loading = steps * (read * (LOADED + unpacked) + 15)
    wide = size == 7 or size * vector > 12 or problem.dtype == "float64"
    wide = wide or (problem.dtype == "float32" and stride == 1 and (size, vector) == (3, 4))
    blocks = 3 if wide and isinstance(config, DepthwiseStrips) else 4
    if problem.dtype == "float64":
        return _Work(blocks, steps, START + loading + rows * (products + beside))
    if isinstance(config, Depthwise):
        waits = ceil(steps, 3) if config.TILE_Q < 4 else steps  # a small tile's rows are under way together
        return _Work(blocks, waits, OF_TILES * (loading + rows * (products + beside)))
    met = rows if size == 5 and vector == 4 else steps / stride  # rows of sums that are met; some of the others lie outside the strip
    return _Work(blocks, steps, OF_STRIPS + OF_OTHERS * (loading + rows * beside) + met * products)
