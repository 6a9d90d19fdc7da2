"""wgrad as a matrix product over pixels, on plain cores: ``cu/direct/patch_wgrad.cu``.

It is for layers that suit tensor-core kernels badly: few channels in and many out, so that many pixels make a small filter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pycuda_conv.engines import split_sum
from pycuda_conv.engines.base import FLAG, Config, Device, KernelLaunch, VariantSet, fastest, kernel_struct
from pycuda_conv.engines.costs import costs, spread
from pycuda_conv.engines.geometry import accumulator_bytes, arguments, by_axis, ceil, needs_64_bits
from pycuda_conv.engines.limits import Takes, Tiles
from pycuda_conv.engines.schedule import INPUT, RESULT, WEIGHT, Schedule
from pycuda_conv.problem import DTYPE_CODES, ConvProblem


@dataclass(frozen=True)
class PatchWgrad(Config):
    """BLOCK_M filters and BLOCK_N columns (channels times taps) of a block, and parts of the sum over pixels: ``patch_wgrad.cu``."""

    BLOCK_M: int = 64
    BLOCK_N: int = 64
    SLICES: int = 1


CONFIGS, LAYOUTS, MOST_VARIANTS = (PatchWgrad,), ("CNHW", "CHWN"), {"cuda": 24}
ORDER = ("SLICES",)  # what the order of sums depends on
COST = costs("direct.patch_wgrad")
PatchWgradArguments = kernel_struct("patch_wgrad", "PatchWgradArguments")
#: Filters and columns of a thread, by the tile of its block.
TILES = {(64, 64): (8, 4), (64, 32): (8, 4), (32, 64): (4, 8), (16, 64): (4, 8)}
HALVES, HALF_TILES = ("float16", "bfloat16"), ((64, 32), (16, 64))  # 16-bit arrays come here if no tensor core can be used
STEP = 16  # pixels of a step
#: The most pixels of a slice: longer sums would lose more digits.
RUN = 4096
MOST_PART_BYTES = 1 << 28  # of the parts of all slices


def _columns(problem: ConvProblem) -> int:
    """Channels of a group times taps of the filter, which is the result: see :attr:`ConvProblem.launched`."""
    return problem.N * math.prod(problem.output_size)


def _pixels(problem: ConvProblem) -> int:
    """Pixels of all images over which the result sums."""
    return problem.operand_channels // max(problem.groups, 1) * math.prod(problem.filter_size)


def _grid(problem: ConvProblem, config: PatchWgrad) -> int:
    m_tiles = ceil(problem.K // max(problem.groups, 1), config.BLOCK_M)
    return m_tiles * ceil(_columns(problem), config.BLOCK_N) * problem.groups * config.SLICES


TAKES = Takes()  # all
LEGAL = Tiles(TAKES, PatchWgrad, blocks=_grid, together={("BLOCK_M", "BLOCK_N"): TILES})


def schedule(problem: ConvProblem, config: PatchWgrad, device: Device, with_moments: bool = False) -> Schedule:
    args, size, slices = _arguments(problem, config), math.prod(problem.result_shape), config.SLICES
    thread_m, thread_n = TILES[config.BLOCK_M, config.BLOCK_N]
    defines = {
        "DTYPE": DTYPE_CODES[problem.dtype], "INDEX_64": int(needs_64_bits(problem, slices * max(size, args.run))),
        "BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N, "BLOCK_K": STEP, "THREAD_M": thread_m, "THREAD_N": thread_n,
        "CHANNELS_LAST": int(problem.layout == "CHWN"),
    }  # fmt: skip
    threads = config.BLOCK_M // thread_m * (config.BLOCK_N // thread_n)
    launch = KernelLaunch("patch_wgrad", defines, _grid(problem, config), threads, (INPUT, WEIGHT, RESULT), (), arguments=args)
    return split_sum.in_parts(problem, launch, slices)


def _arguments(problem: ConvProblem, config: PatchWgrad) -> Any:
    groups, (_, r, s), (_, p, q) = problem.groups, problem.output_size, problem.filter_size
    cg, kg, total = problem.N, problem.K // max(groups, 1), _pixels(problem)
    taps, plane, volume = math.prod(problem.output_size), math.prod(problem.filter_size), math.prod(problem.input_size)
    last = problem.layout == "CHWN"
    return arguments(
        PatchWgradArguments, problem, slices=config.SLICES, m_tiles=ceil(kg, config.BLOCK_M),
        n_tiles=ceil(_columns(problem), config.BLOCK_N), total=total, run=ceil(ceil(total, config.SLICES), STEP) * STEP, kg=kg,
        columns=_columns(problem), cg=cg, taps=taps, rs=r * s, r=r, s=s, plane=plane, pq=p * q, p=p, q=q,
        **by_axis("stride_", problem.dilation), **by_axis("dil_", problem.stride), x_image=groups * cg * volume,
        x_channel=1 if last else volume, x_pixel=groups * cg if last else 1, y_image=groups * kg * plane, y_channel=1 if last else plane,
        y_pixel=groups * kg if last else 1, y_vec=int(last and kg % 4 == 0),
    )  # fmt: skip


def variants(device: Device) -> Iterator[VariantSet]:
    if device.backend != "cuda":  # nothing is chosen here on other devices
        return
    for (block_m, block_n), (thread_m, thread_n) in TILES.items():
        codes = (code for dtype, code in DTYPE_CODES.items() if dtype not in HALVES or (block_m, block_n) in HALF_TILES)
        common = {"DTYPE": tuple(codes), "INDEX_64": FLAG}
        tile = {"BLOCK_M": (block_m,), "BLOCK_N": (block_n,), "BLOCK_K": (STEP,), "THREAD_M": (thread_m,), "THREAD_N": (thread_n,)}
        yield VariantSet("patch_wgrad", common | tile | {"CHANNELS_LAST": FLAG})


def time(problem: ConvProblem, config: PatchWgrad, device: Device) -> float:
    """Microseconds that `config` should take: instructions of the multiprocessor with most blocks, or the waits of few blocks.

    A multiprocessor with w warps issues 3.1 w / (w + 4) instructions a cycle. A block waits for memory once each step.
    """
    multiprocessors, wide = device.multiprocessors, problem.dtype == "float64"
    thread_m, thread_n = TILES[config.BLOCK_M, config.BLOCK_N]
    threads = config.BLOCK_M // thread_m * (config.BLOCK_N // thread_n)
    sums, a_loads, b_loads = thread_m * thread_n, config.BLOCK_M * STEP // threads, config.BLOCK_N * STEP // threads
    # of a thread: multiplications and loads from shared memory; adding a step up; loads, with their addresses; the pixel's place
    step = STEP * (sums + (thread_m + thread_n) // 4) * (2 if wide else 1) + sums + 4 * a_loads + 12 * b_loads + 50
    blocks, fit = _grid(problem, config), max(1, (256 if wide else 512) // threads)
    steps, deep = ceil(ceil(_pixels(problem), config.SLICES), STEP), max(ceil(blocks, multiprocessors), 1)
    warps = min(fit, deep) * threads / 32
    busy = deep * steps * step * threads / 32 / (COST.ISSUED * warps / (warps + 4)) / COST.CLOCK
    waiting = ceil(deep, fit) * steps * COST.WAIT
    longer = COST.LONGER[config.BLOCK_M] * (COST.VOLUME if problem.has_depth else 1) * (COST.HALVES if problem.itemsize == 2 else 1)
    us = COST.BEGIN + max(busy, waiting) * longer
    us += accumulator_bytes(problem) * math.prod(problem.result_shape) / COST.STORED
    if problem.layout == "CHWN" and math.prod(problem.output_size) > 1:  # neighbouring sums belong to channels, whose filters lie apart
        us += spread(math.prod(problem.result_shape) * COST.SECTOR / COST.SCATTERED, multiprocessors)
    return us + split_sum.time(problem, config.SLICES, device)


def configs(problem: ConvProblem, device: Device) -> Iterator[PatchWgrad]:
    """The configurations worth comparing for `problem`: every tile, with slices that fill the machine, and short enough ones."""
    total, part = _pixels(problem), math.prod(problem.result_shape) * accumulator_bytes(problem)
    most = max(1, min(ceil(total, 4 * STEP), MOST_PART_BYTES // max(part, 1)))
    for block_m, block_n in TILES if problem.dtype not in HALVES else HALF_TILES:
        tiles = max(_grid(problem, PatchWgrad(block_m, block_n)), 1)
        wanted = {ceil(times * device.multiprocessors, tiles) for times in (1, 2, 4, 8, 16)} | {ceil(total, RUN)}
        for slices in sorted({min(max(n, ceil(total, RUN), 1), most) for n in wanted}):
            yield PatchWgrad(block_m, block_n, slices)


def choose(problem: ConvProblem, device: Device) -> tuple[float, PatchWgrad] | None:
    """The configuration that should be the fastest on a GPU; a CPU has too few registers for a thread's sums."""
    if device.backend != "cuda":
        return None
    found = ((time(problem, config, device), config) for config in configs(problem, device) if LEGAL.refusal(problem, config) is None)
    return fastest(found)
