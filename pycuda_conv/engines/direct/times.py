"""Time models of the direct engine's kernels."""

from __future__ import annotations

import math

from pycuda_conv.engines.base import Config, ConvProblem, Device
from pycuda_conv.engines.costs import costs, spread
from pycuda_conv.engines.direct.configs import Batched, Dgrad, Single, Tile, Wgrad, parts_of_sum, result_pixels, tile_stride, unrolled_dgrad
from pycuda_conv.engines.direct.wgrad import wgrad_time
from pycuda_conv.engines.geometry import accumulator_bytes, ceil, taps_apart
from pycuda_conv.engines.split_sum import time as reduce_time

FEW = 1024  # results; for fewer the launch takes most of the time, and the smallest kernel wins

COST = costs("direct.times")
WARP = 32  # pixels of a warp of direct/single.cu


def time(problem: ConvProblem, config: Config, device: Device) -> float | None:
    """Microseconds that `config` should take; None for direct/single.cu where a rule chooses it: for few results.

    A thread of direct/batched.cu or direct/dgrad.cu waits for memory at every channel. So its time follows from the channels that it
    reads and from how many threads there are for each that fits, not from multiplications. The same holds for pixels in direct/wgrad.cu.
    direct/tile.cu takes its multiplications, overhang included, its loads, and its blocks; direct/single.cu the taps of its warps.
    """
    if isinstance(config, Tile):
        _, p, q = problem.result_size
        planes, taps = problem.N * problem.K, math.prod(problem.filter_size)
        pixels = ceil(p, config.TILE_P) * config.TILE_P * ceil(q, config.TILE_Q) * config.TILE_Q
        blocks = ceil(p, config.TILE_P) * ceil(q, config.TILE_Q)
        multiplied = taps * (min(tile_stride(problem)[1], 2) if config.TILE_Q >= 32 else 1)  # a warp's lanes read every other bank
        rate = COST.TWO_ROWS_TAPS if config.ROWS == 2 else COST.TILE_TAPS
        of_plane = pixels * multiplied / rate + config.loads(problem) / COST.TILE_LOADS + blocks * COST.TILE_BLOCK
        alone = taps * (COST.TILE_ALONE / problem.filter_size[2] + COST.TAP_ALONE[config.ROWS])
        moved = problem.itemsize * (math.prod(problem.input_shape) + math.prod(problem.result_shape)) / COST.TILE_MEMORY
        if problem.has_residual:
            moved += problem.itemsize * math.prod(problem.result_shape) / COST.TILE_RESIDUAL
        us = max(spread(max(planes * of_plane, moved), device.multiprocessors), alone)
        return COST.TILE_START + us * (1.0 if problem.K == problem.C else 2.0)  # the results of a channel each read it again
    if isinstance(config, Wgrad):
        return wgrad_time(problem, config, device.multiprocessors)
    if isinstance(config, Single):
        if math.prod(problem.result_shape) <= FEW:
            return None  # by rule
        if problem.K == problem.C:
            warps = problem.N * problem.K * ceil(math.prod(problem.result_size), WARP)  # warps without a pixel do nothing
            us = spread(warps * (COST.SINGLE_TAP * math.prod(problem.filter_size) + COST.SINGLE_WARP), device.multiprocessors)
            return COST.SINGLE_START + max(us, problem.bytes / COST.DIRECT_MEMORY)
        rounds = math.prod(problem.result_shape) / (COST.SINGLE_THREADS * device.multiprocessors)
        return COST.SINGLE_BEGIN + max(COST.TAP, COST.TAP_TOGETHER * rounds) * math.prod(problem.filter_size)
    assert isinstance(config, Batched | Dgrad)
    written, read = problem.result_channels // problem.groups, problem.operand_channels // problem.groups
    taps = math.prod(problem.filter_size)
    lone = isinstance(config, Dgrad) and min(config.BLOCK_K, read) == 1 and not unrolled_dgrad(problem)
    if isinstance(config, Batched):
        block, start = config.BLOCK_K, COST.BATCHED_START
        channel = (COST.BATCHED_CHANNEL + (COST.BATCHED_TAP + COST.BATCHED_SUM * block) * taps) * problem.stride[2] ** COST.STRIDED
        if problem.has_depth and max(problem.stride) > 1:
            channel = max(channel, COST.SLICE_WAIT * problem.filter_size[0])
    else:  # with a stride a pixel meets some of the taps, and a warp of neighbouring pixels as many as any of them, at least one;
        # eight channels' loads are under way at once, or those of a plane of taps
        met = math.prod(max(1.0, n / every) for n, every in zip(problem.filter_size, taps_apart(problem), strict=True))
        block, start = config.BLOCK_C, COST.DGRAD_ROUND
        without_sums = COST.DGRAD_LONE if lone else COST.DGRAD_ANY + COST.DGRAD_LOOP / max(1, min(config.BLOCK_K, read))
        of_tap = without_sums + COST.DGRAD_SUM * block
        least, of_tap = (COST.DGRAD_WAIT, COST.DGRAD_TAP) if unrolled_dgrad(problem) else (COST.DGRAD_LEAST, of_tap)
        channel = max(least, of_tap * met)
    at_once = config.BLOCK_C if isinstance(config, Batched) else config.BLOCK_K
    split, run, size = parts_of_sum(problem, config.SPLIT, read, at_once).values()
    threads = result_pixels(problem) * problem.groups * ceil(written, block) * split
    channel += COST.STAGED * taps * block / config.THREADS  # a block brings that much of the filter to shared memory
    channels = min(run, read)
    fit = COST.LONE_THREADS if lone and block == 1 else COST.THREADS_OF_EIGHT if block == 8 else COST.THREADS
    rounds = threads / (fit * device.multiprocessors)
    of_thread = channels * channel + COST.CHUNK * (ceil(channels, at_once) - 1)
    if isinstance(config, Batched):  # few threads share a multiprocessor's loads
        of_thread += COST.BATCHED_STORE * block
        us = start + (rounds if rounds > 1 else COST.ALONE + (1 - COST.ALONE) * rounds) * of_thread
    else:
        us = COST.DGRAD_START + max(1.0, rounds) ** COST.DGRAD_ROUNDS * (start + of_thread)
    written_bytes = problem.itemsize * math.prod(problem.result_shape)
    moved = problem.itemsize * math.prod(problem.input_shape) + written_bytes * (2 if problem.has_residual else 1)
    us = max(us, moved / COST.DIRECT_MEMORY)
    if isinstance(config, Dgrad):
        us = max(us, written_bytes / COST.DGRAD_WRITTEN)
    elif problem.has_residual and split == 1:
        us += written_bytes / COST.RESIDUAL_MEMORY
    return us if split == 1 else us + reduce_time(size, split, accumulator_bytes(problem), device.multiprocessors)
