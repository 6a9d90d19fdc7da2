"""Gradients of filters on plain cores (``cu/direct/wgrad.cu``): limits, launch, variants, time and choice."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pycuda_conv.engines import split_sum
from pycuda_conv.engines.base import FLAG, ConvProblem, Device, VariantSet, costs, kernel_struct
from pycuda_conv.engines.direct.configs import Made, Wgrad, layer_constants
from pycuda_conv.engines.geometry import accumulator_bytes, arguments, ceil
from pycuda_conv.engines.limits import Takes, Tiles
from pycuda_conv.engines.schedule import STATIC_SHARED_BYTES

#: TAPS of a block for filters that are not :func:`_square`, by FILTERS of a block.
WGRAD_TAPS: dict[str, dict[int, tuple[int, ...]]] = {"cuda": {1: (1, 9, 16), 4: (1, 3, 9, 16)}, "opencl": {1: (1, 9)}}
SQUARE = (3, 5, 7)  # R and S of the filters that are
MOST_SUMS = 64  # of a thread with several filters
#: Pixels that a thread of direct/wgrad.cu adds up before other threads' sums are added: longer sums would lose more digits.
WGRAD_RUN = 128


def _summed_pixels(problem: ConvProblem) -> int:
    """Pixels of all images over which wgrad sums."""
    return problem.operand_channels // max(problem.groups, 1) * math.prod(problem.filter_size)


def _square(problem: ConvProblem) -> bool:
    """Whether the problem is wgrad of a filter of 3 x 3, 5 x 5 or 7 x 7 without dilation."""
    return problem.output_size in [(1, q, q) for q in SQUARE] and problem.stride[1:] == (1, 1)


def _few_sums(filters: int, taps: int) -> bool:
    return filters == 1 or filters * taps <= MOST_SUMS


def wgrad_grid(problem: ConvProblem, config: Wgrad) -> int:
    """Blocks of the launch."""
    return _blocks(problem, config.TAPS, config.FILTERS) * config.SLICES


def _blocks(problem: ConvProblem, taps: int, filters: int) -> int:
    """Blocks of one slice of the pixels."""
    groups = problem.groups
    return groups * ceil(problem.K // max(groups, 1), filters) * problem.N * ceil(math.prod(problem.output_size), taps)


def _shared_bytes(taps: int, threads: int, acc: int) -> int:
    """Bytes of shared memory of a block with sums of `acc` bytes."""
    return taps * ((threads + 8) * acc + 32)  # 8 sums between two taps' rows; 32 bytes for the offsets of a tap


WGRAD = Tiles(
    Takes(("it computes gradients of filters", lambda problem: problem.layout == "CNHW")), Wgrad,
    shared=(lambda problem, c: _shared_bytes(c.TAPS, c.THREADS, accumulator_bytes(problem)), STATIC_SHARED_BYTES), blocks=wgrad_grid,
)  # fmt: skip
WgradArguments = kernel_struct("direct_wgrad", "WgradArguments")
#: Members that depend on the batch and on sizes of images.
SIZES = "slices total run d h w pixels r s side_d side_h side_w last_side_d last_side_h last_side_w"


def wgrad_launch(problem: ConvProblem, config: Wgrad) -> Made:
    """The arguments and defines of the launch, and the constants of its layer."""
    taps, pixels, total = math.prod(problem.output_size), math.prod(problem.filter_size), _summed_pixels(problem)
    chunks, kg, q = ceil(taps, config.TAPS), problem.K // problem.groups, problem.output_size[2]
    k_blocks, run = ceil(kg, config.FILTERS), ceil(ceil(total, config.SLICES), config.THREADS) * config.THREADS
    args = arguments(
        WgradArguments, problem, slices=config.SLICES, chunks=chunks, images=problem.N, kg=kg, k_blocks=k_blocks, total=total, run=run,
        pixels=pixels, taps=taps,
    )  # fmt: skip
    defines = {"THREADS": config.THREADS, "TAPS": config.TAPS, "FILTERS": config.FILTERS} | ({"BORDERED": 1} if problem.border else {})
    common = {"Q": q} if _square(problem) and config.TAPS == taps else {}
    return defines | common, args, layer_constants(problem, args, SIZES, TAPS=config.TAPS, ALL_TAPS=taps), 0


def wgrad_variants(code: int, acc: int, device: Device) -> Iterator[VariantSet]:
    """The texts for arrays of the type `code`, whose sums have `acc` bytes."""
    for filters, taps_at_once in WGRAD_TAPS[device.backend].items():
        for border in ({}, {"BORDERED": (1,)}) if filters == 1 else ({},):  # of several filters, with a border, only few layers are
            wgrad = {"DTYPE": (code,), "INDEX_64": FLAG, "THREADS": (128,), "FILTERS": (filters,)} | border
            yield VariantSet("direct_wgrad", wgrad | {"TAPS": taps_at_once})
            for q in SQUARE:
                if _few_sums(filters, q**2) and _shared_bytes(q**2, 128, acc) <= STATIC_SHARED_BYTES:
                    yield VariantSet("direct_wgrad", wgrad | {"TAPS": (q**2,), "Q": (q,)})


COST = costs("direct.wgrad")


def wgrad_time(problem: ConvProblem, config: Wgrad, device: Device) -> float:
    """A thread waits for memory at each of its pixels; loads and multiplications keep a full multiprocessor busy."""
    filters, taps = config.FILTERS, config.TAPS
    fit = 16 if filters * taps <= 16 else 5 if filters * taps <= 40 else 3  # blocks that fit a multiprocessor by their registers
    step = COST.WAIT + fit / 16 * (COST.FILTER * filters + taps * (COST.TAP + COST.SUM * filters))
    rounds = max(1.0, _blocks(problem, taps, filters) * config.SLICES / (fit * device.multiprocessors))
    ends, steps = COST.ENDS[min(filters, 2)], ceil(ceil(_summed_pixels(problem), config.SLICES), config.THREADS)
    us = COST.BEGIN + COST.MEASURED * rounds * (ends + steps * step)
    all_taps, across = math.prod(problem.output_size), problem.output_size[2]
    if problem.itemsize == 2 and taps >= COST.SPILLING:
        us *= COST.SPILLED
    if all_taps >= COST.MANY_TAPS:
        us *= COST.LONGER
    elif all_taps > across == 1 < problem.dilation[2]:  # a strided convolution: columns between its taps are loaded for nothing
        us *= COST.SKIPPING
    return us + split_sum.time(problem, config.SLICES, device)


def wgrad_config(problem: ConvProblem, device: Device) -> Wgrad:
    """The best configuration of ``direct/wgrad.cu``."""
    return min(wgrad_configs(problem, device), key=lambda config: wgrad_time(problem, config, device))


def wgrad_configs(problem: ConvProblem, device: Device) -> Iterator[Wgrad]:
    """One for each number of filters a block: few idle sums, and slices that fill the GPU and keep a thread's sums short."""
    taps, total, kg = math.prod(problem.output_size), _summed_pixels(problem), problem.K // max(problem.groups, 1)
    for filters, known in WGRAD_TAPS[device.backend].items():
        # reading y costs a chunk of taps as much as two more taps
        at_once = min(known, key=lambda n: ceil(taps, n) * (n + 2))
        if _square(problem) and _few_sums(filters, taps) and WGRAD.refusal(problem, Wgrad(128, taps)) is None:
            at_once = taps
        if filters == 1 or filters < 2 * kg:
            blocks = max(_blocks(problem, at_once, filters), 1)
            full, short = ceil(8 * device.multiprocessors, blocks), ceil(total, 128 * WGRAD_RUN)
            yield Wgrad(128, at_once, max(1, min(ceil(total, 4 * 128), max(full, short))), filters)
