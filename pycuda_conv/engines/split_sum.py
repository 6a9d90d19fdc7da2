"""Sums that are cut into parts, which are added by a launch of their own (``cu/direct/reduce.cu``)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

from pycuda_conv.engines.base import VariantSet, kernel_struct
from pycuda_conv.engines.costs import costs, spread
from pycuda_conv.engines.geometry import accumulator_bytes, arguments, ceil
from pycuda_conv.engines.schedule import FINISH, RESULT, WORKSPACE, Schedule
from pycuda_conv.engines.variants import portable, portable_choices
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import BufferSlice, Device, KernelLaunch

SPLITS, MORE_SPLITS = (1, 2, 3, 4, 6, 8), (12, 16, 24, 32, 48, 64, 96, 128)
THREADS = 256  # of a block of direct/reduce.cu
MOST_VARIANTS = {"cuda": 4, "opencl": 4}  # texts, as an engine says it
LONGEST, MOST_LANES = 16, 32  # the most parts that a thread adds before more threads share an element, and the most threads that do


def splits(problem: ConvProblem, most: int) -> tuple[int, ...]:
    """Numbers of parts into which gemm k may be worth cutting, up to `most`; wgrad has long sums for few results."""
    return tuple(n for n in (SPLITS + MORE_SPLITS if problem.layout == "CNHW" else SPLITS) if n <= max(most, 1))


COST = costs("split_sum")
ReduceArguments = kernel_struct("direct_reduce", "ReduceArguments")


def reduce_launch(problem: ConvProblem, split: int, parts: BufferSlice) -> KernelLaunch:
    """The launch that adds the `parts` of a split sum in a fixed order, and finishes it: ``direct/reduce.cu``."""
    size = math.prod(problem.result_shape)
    plane, channels = 1 if problem.layout == "NHWC" else math.prod(problem.result_size), problem.result_channels
    defines = portable(problem.dtype, split * size >= 2**31, THREADS)
    lanes = _lanes(split)
    width, run = THREADS // lanes, ceil(split, lanes)
    args = arguments(ReduceArguments, problem, split=split, width=width.bit_length() - 1, run=run, plane=plane, channels=channels)
    buffers = (parts, *FINISH, RESULT)
    return KernelLaunch("direct_reduce", defines, ceil(size, width), THREADS, buffers, (), arguments=args)


def _is_whole(problem: ConvProblem, parts: int, rounds: bool) -> bool:
    """Whether a launch leaves results: uncut sums, of a type that it writes. One that never `rounds` leaves sums of 16-bit arrays."""
    return parts == 1 and (rounds or problem.itemsize > 2)


def in_parts(problem: ConvProblem, launch: KernelLaunch, parts: int, rounds: bool = True) -> Schedule:
    """A `launch` whose last buffer is the result, if it leaves results; else its sums go to the workspace, and another launch adds them.

    `rounds`: the launch can round its sums to 16 bits.
    """
    if _is_whole(problem, parts, rounds):
        return Schedule.plain([[launch]])
    size = accumulator_bytes(problem) * parts * math.prod(problem.result_shape)
    product = replace(launch, buffers=(*launch.buffers[:-1], WORKSPACE))
    return Schedule.plain([[product], [reduce_launch(problem, parts, WORKSPACE)]], size)


def reduce_two(first: KernelLaunch, second: KernelLaunch) -> KernelLaunch | None:
    """Two launches of ``direct/reduce.cu`` as one with the same bits; None if they are other launches, or an epilogue follows a sum."""
    if not first.kernel == second.kernel == "direct_reduce" or first.defines != second.defines:
        return None
    sums = cast(Any, first.arguments), cast(Any, second.arguments)
    if any(one.has_scale or one.has_bias or one.has_residual or one.activation for one in sums):
        return None
    (parts, *_, result), (other_parts, *_, other_result) = first.buffers, second.buffers
    buffers = parts, other_parts, result, other_result
    return KernelLaunch(
        "direct_reduce_two", first.defines, first.grid + second.grid, THREADS, buffers, (first.grid,), "direct_reduce", arguments=sums,
    )


def _lanes(split: int) -> int:
    """Threads that share an element's parts: a power of two."""
    return min(MOST_LANES, 1 << (ceil(split, LONGEST) - 1).bit_length())


def variants(device: Device) -> Iterator[VariantSet]:
    """A text of direct/reduce.cu for each type."""
    yield VariantSet("direct_reduce", portable_choices(THREADS))


def time(problem: ConvProblem, split: int, device: Device, rounds: bool = True) -> float:
    """Microseconds of what :func:`in_parts` adds: the launch, a thread's waits, and writing and reading the parts."""
    if _is_whole(problem, split, rounds):
        return 0.0
    run, nbytes = ceil(split, _lanes(split)), math.prod(problem.result_shape) * accumulator_bytes(problem)
    return float(COST.BEGIN + COST.WAIT * ceil(run, 8) + spread(2 * split * nbytes / COST.MEMORY, device.multiprocessors))
