"""Time models of the direct engine's kernels."""

from __future__ import annotations

import math

from pycuda_conv.engines.base import Config
from pycuda_conv.engines.direct.configs import (
    Batched,
    Dgrad,
    Single,
    Tile,
    Wgrad,
    parts_of_sum,
    result_pixels,
    tile_loads,
    tile_stride,
    unrolled_dgrad,
)
from pycuda_conv.engines.direct.wgrad import wgrad_time
from pycuda_conv.engines.geometry import accumulator_bytes, ceil, taps_apart
from pycuda_conv.engines.split_sum import time as reduce_time
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import Device

FEW = 1024  # results; for fewer the launch takes most of the time, and the smallest kernel wins

STAGED = 0.096  # microseconds in which a thread brings one element of the filter to shared memory
#: Microseconds that a thread of direct/single.cu waits for a tap of scattered pixels, and that full multiprocessors take for one.
TAP, TAP_TOGETHER = 0.42, 0.125
WARP = 32  # pixels of a warp of direct/single.cu
#: Microseconds of a launch of direct/single.cu; and that 132 multiprocessors take for each tap of a warp, and for each warp.
SINGLE_START, SINGLE_TAP, SINGLE_WARP = 2.0, 1.12e-5, 6.1e-5
ALONE = 0.58  # the time of a single thread, as a part of the time of a full multiprocessor's threads
TILE_START = 2.57  # microseconds of a launch of direct/tile.cu
#: Microseconds that a block takes at least: for each row of taps; and for each tap, by ROWS of a thread, which share loads.
TILE_ALONE, TAP_ALONE = 0.108, {1: 0.075, 2: 0.0168, 7: 0.0389}
#: Work of 132 multiprocessors in a microsecond: products of a tap and a pixel; the same by threads with two rows, which read more for
#: each; elements loaded. Then the microseconds of a block.
TILE_TAPS, TWO_ROWS_TAPS, TILE_LOADS, TILE_BLOCK = 12.9e6, 6.39e6, 1.07e6, 0.000388
TILE_MEMORY, TILE_RESIDUAL = 2.38e6, 2.59e6  # bytes a microsecond; and those of a residual, whose loads nothing hides
BATCHED_START = 2.23  # microseconds of a launch of direct/batched.cu
BATCHED_CHANNEL, BATCHED_TAP, BATCHED_SUM = 0.089, 0.0265, 0.0023  # a thread's microseconds for a channel, each tap, each sum of a tap
BATCHED_STORE = 0.078  # a thread's microseconds to finish and write a sum
STRIDED = 0.281  # a channel takes stride_w to this power times as long
SLICE_WAIT = 0.544  # microseconds that a thread waits for each slice of a volume's filter with a stride: slices are loaded one by one
DIRECT_MEMORY, RESIDUAL_MEMORY = 3e6, 5.6e5  # bytes a microsecond; and those of a residual, for which threads of direct/batched.cu wait
#: direct/dgrad.cu: microseconds of a launch, and of a round of blocks; the power with which rounds count, since they overlap; bytes
#: written a microsecond.
DGRAD_START, DGRAD_ROUND, DGRAD_ROUNDS, DGRAD_WRITTEN = 0.8, 0.92, 0.9, 1.4e6
DGRAD_WAIT, DGRAD_TAP = 0.417, 0.06  # a thread's microseconds for a channel with unrolled taps: at the least, and for each tap
#: A thread's microseconds for a tap that is not unrolled: without sums, for each sum, and for its loop over the channels in shared memory.
DGRAD_ANY, DGRAD_SUM, DGRAD_LOOP = 0.01, 0.0075, 0.34
#: The same for a tap if one channel is loaded at a time, as in depthwise layers; and the threads of one sum that fit a multiprocessor then.
DGRAD_LONE, LONE_THREADS = 0.65, 2048
CHUNK = 0.13  # microseconds in which a block changes to the next channels of the filter in shared memory


def time(problem: ConvProblem, config: Config, device: Device) -> float | None:
    """Microseconds that `config` should take; None for direct/single.cu where a rule chooses it: for few results.

    A thread of direct/batched.cu or direct/dgrad.cu waits for memory at every channel. So its time follows from the channels that it
    reads and from how many threads there are for each that fits, not from multiplications. The same holds for pixels in direct/wgrad.cu.
    direct/tile.cu takes its multiplications, overhang included, its loads, and its blocks. Fitted to 119 times of float32 on an H200:
    half of a tile's are within 7%, most of the others within a quarter. direct/wgrad.cu's times are older. direct/single.cu takes the
    taps of its warps where each channel has one result: 11 times of float32 are within 16%.
    """
    if isinstance(config, Tile):
        _, p, q = problem.result_size
        planes, taps = problem.N * problem.K, math.prod(problem.filter_size)
        pixels = ceil(p, config.TILE_P) * config.TILE_P * ceil(q, config.TILE_Q) * config.TILE_Q
        blocks = ceil(p, config.TILE_P) * ceil(q, config.TILE_Q)
        multiplied = taps * (min(tile_stride(problem)[1], 2) if config.TILE_Q >= 32 else 1)  # a warp's lanes read every other bank
        rate = TWO_ROWS_TAPS if config.ROWS == 2 else TILE_TAPS
        of_plane = pixels * multiplied / rate + tile_loads(problem, config) / TILE_LOADS + blocks * TILE_BLOCK
        alone = taps * (TILE_ALONE / problem.filter_size[2] + TAP_ALONE[config.ROWS])
        moved = problem.itemsize * (math.prod(problem.input_shape) + math.prod(problem.result_shape)) / TILE_MEMORY
        if problem.has_residual:
            moved += problem.itemsize * math.prod(problem.result_shape) / TILE_RESIDUAL
        us = max(max(planes * of_plane, moved) * 132 / device.multiprocessors, alone)
        return TILE_START + us * (1.0 if problem.K == problem.C else 2.0)  # the results of a channel each read it again
    if isinstance(config, Wgrad):
        return wgrad_time(problem, config, device.multiprocessors)
    if isinstance(config, Single):
        if math.prod(problem.result_shape) <= FEW:
            return None  # by rule
        if problem.K == problem.C:
            warps = problem.N * problem.K * ceil(math.prod(problem.result_size), WARP)  # warps without a pixel do nothing
            us = warps * (SINGLE_TAP * math.prod(problem.filter_size) + SINGLE_WARP) * 132 / device.multiprocessors
            return SINGLE_START + max(us, problem.bytes / DIRECT_MEMORY)
        rounds = math.prod(problem.result_shape) / (1536 * device.multiprocessors)
        return 3 + max(TAP, TAP_TOGETHER * rounds) * math.prod(problem.filter_size)
    assert isinstance(config, Batched | Dgrad)
    written, read = problem.result_channels // problem.groups, problem.operand_channels // problem.groups
    taps = math.prod(problem.filter_size)
    lone = isinstance(config, Dgrad) and min(config.BLOCK_K, read) == 1 and not unrolled_dgrad(problem)
    if isinstance(config, Batched):
        block, start = config.BLOCK_K, BATCHED_START
        channel = (BATCHED_CHANNEL + (BATCHED_TAP + BATCHED_SUM * block) * taps) * problem.stride[2] ** STRIDED
        if problem.has_depth and max(problem.stride) > 1:
            channel = max(channel, SLICE_WAIT * problem.filter_size[0])
    else:  # with a stride a pixel meets some of the taps, and a warp of neighbouring pixels as many as any of them, at least one;
        # eight channels' loads are under way at once, or those of a plane of taps
        met = math.prod(max(1.0, n / every) for n, every in zip(problem.filter_size, taps_apart(problem), strict=True))
        block, start = config.BLOCK_C, DGRAD_ROUND
        of_tap = (DGRAD_LONE if lone else DGRAD_ANY + DGRAD_LOOP / max(1, min(config.BLOCK_K, read))) + DGRAD_SUM * block
        channel = max(DGRAD_WAIT, DGRAD_TAP * met) if unrolled_dgrad(problem) else max(0.1, of_tap * met)
    at_once = config.BLOCK_C if isinstance(config, Batched) else config.BLOCK_K
    split, run, size = parts_of_sum(problem, config.SPLIT, read, at_once).values()
    threads = result_pixels(problem) * problem.groups * ceil(written, block) * split
    channel += STAGED * taps * block / config.THREADS  # a block brings that much of the filter to shared memory
    channels = min(run, read)
    fit = LONE_THREADS if lone and block == 1 else 512 if block == 8 else 768  # a thread of 8 sums has more registers
    rounds = threads / (fit * device.multiprocessors)
    of_thread = channels * channel + CHUNK * (ceil(channels, at_once) - 1)
    if isinstance(config, Batched):  # few threads share a multiprocessor's loads
        of_thread += BATCHED_STORE * block
        us = start + (rounds if rounds > 1 else ALONE + (1 - ALONE) * rounds) * of_thread
    else:
        us = DGRAD_START + max(1.0, rounds) ** DGRAD_ROUNDS * (start + of_thread)
    written_bytes = problem.itemsize * math.prod(problem.result_shape)
    moved = problem.itemsize * math.prod(problem.input_shape) + written_bytes * (2 if problem.has_residual else 1)
    us = max(us, moved / DIRECT_MEMORY)
    if isinstance(config, Dgrad):
        us = max(us, written_bytes / DGRAD_WRITTEN)
    elif problem.has_residual and split == 1:
        us += written_bytes / RESIDUAL_MEMORY
    return us if split == 1 else us + reduce_time(size, split, accumulator_bytes(problem), device.multiprocessors)
