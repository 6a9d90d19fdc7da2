"""Depthwise wgrad from arrays in C order, 16 bits and float32: ``cu/depthwise_wgrad.cu``.

Threads walk down the columns of planes, whose rows arrive in shared memory before they are used.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pycuda_conv.engines import split_sum
from pycuda_conv.engines.base import BY_RULE, Config
from pycuda_conv.engines.geometry import arguments, ceil
from pycuda_conv.engines.schedule import GRID_LIMIT, INPUT, RESULT, WEIGHT, WORKSPACE, Schedule
from pycuda_conv.engines.struct import kernel_struct
from pycuda_conv.engines.tensor_cores import ELEMENTS
from pycuda_conv.engines.texts import TextFamily
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import Device, KernelLaunch

THREADS, WARP = 128, 32  # threads of a block, and of a part of it that shares a ring
FILTERS, STRIDES = (3, 5, 7), (1, 2)
COLUMNS = 4  # of a thread
WORD = 4  # bytes
LEAST_LANES = 2  # threads along columns: with fewer, a slot of the ring has no room for all images


@dataclass(frozen=True)
class DepthwisePlanesWgrad(Config):
    """Rows of dy that a thread walks down at a time, and parts of the sum: ``depthwise_wgrad.cu``."""

    ROWS: int = 14
    PARTS: int = 1


CONFIGS = (DepthwisePlanesWgrad,)
LAYOUTS = ("CNHW",)
TENSOR_CORES = False
MOST_TEXTS = {"cuda": 18}


DepthwiseWgradPlanesArguments = kernel_struct("depthwise_wgrad", "DepthwiseWgradPlanesArguments")


# ---- what runs


def unsupported(device: Device) -> str | None:
    """Why the engine can't run on `device`, or None if it can."""
    return None if device.backend == "cuda" and device.capability >= (8, 0) else "it needs a GPU of compute capability 8.0 or more"


def why_not(problem: ConvProblem) -> str | None:
    """Why no configuration runs `problem`, or None."""
    (_, r, s), (_, stride_h, stride_w) = problem.output_size, problem.dilation
    if problem.dtype not in ELEMENTS or problem.N != 1 or problem.groups == 0:
        return "it takes arrays of 16 bits and float32, and one channel of the input a group"
    if problem.has_depth:
        return "it takes at most two spatial axes"
    if r != s or r not in FILTERS or stride_h != stride_w or stride_h not in STRIDES or problem.stride != (1, 1, 1):
        return "it takes filters of 3x3, 5x5 and 7x7, strides of 1 and 2, and no dilation"
    if problem.is_empty:
        return "there is nothing to compute"
    return None


def refusal(problem: ConvProblem, config: DepthwisePlanesWgrad) -> str | None:
    """Why `config` can't run `problem`, or None if it can."""
    reason = why_not(problem)
    if reason:
        return reason
    if config.ROWS < 1 or config.PARTS < 1:
        return "ROWS and PARTS must be at least 1"
    if problem.K * config.PARTS > GRID_LIMIT or _walks(problem, config).units >= 2**31 - THREADS:
        return f"its grid is larger than {GRID_LIMIT:,} blocks"
    return None


class _Walks(NamedTuple):
    """How images, rows and columns are distributed over a channel's threads."""

    lanes_q: int  # threads along columns
    planes: int  # images of a warp
    tiles_q: int
    strips: int
    units: int
    rounds: int  # units of a warp


def _walks(problem: ConvProblem, config: DepthwisePlanesWgrad) -> _Walks:
    (_, p, q), images = problem.filter_size, problem.C // problem.groups
    groups = max(ceil(q, COLUMNS), LEAST_LANES)
    tiles_q = ceil(groups, WARP)
    lanes_q = ceil(groups, tiles_q)
    planes, strips = WARP // lanes_q, ceil(p, config.ROWS)
    units = ceil(images, planes) * strips * tiles_q
    return _Walks(lanes_q, planes, tiles_q, strips, units, ceil(ceil(units, THREADS // WARP), config.PARTS))


# ---- launches


def schedule(problem: ConvProblem, config: DepthwisePlanesWgrad, device: Device, noted: bool = False) -> Schedule:
    """The launches of `config`, which can run `problem`; they note no moments."""
    (_, h, w), (_, p, q), (_, taps, _) = problem.input_size, problem.filter_size, problem.output_size
    (_, stride, _), (_, pad_h, pad_w), parts, walks = problem.dilation, problem.padding_before, config.PARTS, _walks(problem, config)
    pitch = _pitch(problem, walks.lanes_q)
    told = arguments(
        DepthwiseWgradPlanesArguments, channels=problem.K, multiplier=problem.K // problem.groups, parts=parts, rounds=walks.rounds,
        lanes_q=walks.lanes_q, planes=walks.planes, pitch=pitch, copies=ceil(pitch, walks.lanes_q), units=walks.units,
        tiles_q=walks.tiles_q, strips=walks.strips, rows=min(config.ROWS, p), n=problem.C // problem.groups, h=h, w=w,
        p=p, q=q, pad_h=pad_h, pad_w=pad_w,
    )  # fmt: skip
    buffers = INPUT, WEIGHT, RESULT if parts == 1 else WORKSPACE
    defines = {"TYPE": ELEMENTS[problem.dtype], "TAPS": taps, "STRIDE": stride}
    launch = KernelLaunch("depthwise_wgrad", defines, problem.K * parts, THREADS, buffers, (), arguments=told)
    if parts == 1:
        return Schedule.plain([[launch]])
    return Schedule.plain([[launch], [split_sum.reduce_launch(problem, parts, WORKSPACE)]], 4 * parts * math.prod(problem.result_shape))


def _pitch(problem: ConvProblem, lanes_q: int) -> int:
    """Words of a row of x in shared memory: what the columns of `lanes_q` threads read, in fours of numbers."""
    each, taps, stride = WORD // problem.itemsize, problem.output_size[1], problem.dilation[1]
    return (COLUMNS * stride * (lanes_q - 1) + ceil((COLUMNS - 1) * stride + taps + each - 1, 4) * 4) // each


def filter_key(problem: ConvProblem, config: DepthwisePlanesWgrad) -> None:
    """None: there is no filter."""


def sum_order(problem: ConvProblem, config: DepthwisePlanesWgrad) -> Hashable:
    """Strips and parts, into which sums are cut."""
    return DepthwisePlanesWgrad, config.ROWS, config.PARTS


def texts(device: Device) -> Iterator[TextFamily]:
    """A text for each filter size and stride."""
    yield TextFamily("depthwise_wgrad", {"TYPE": tuple(ELEMENTS.values()), "TAPS": FILTERS, "STRIDE": STRIDES})


# ---- the choice

# Fitted to 36 times of 12 layers on an H100: root mean square of the error 13%.
CLOCK = 1700.0  # cycles a microsecond
MEMORY = 3e6  # bytes a microsecond
BEGIN = 2.0  # microseconds of a launch, with its first rows
RESIDENT, ALONE = 4, 1.62  # blocks that fit a multiprocessor; and how many of them take as long as one
#: Cycles of an instruction; in 16 bits with those that unpack words, from 46 times of 18 layers on an H100: error 15%.
ISSUED, ISSUED_16 = 1.43, 2.17
COPY = 14.0  # instructions of a copy, with those that depend on it
NARROW = 10  # columns of planes: for fewer, direct_wgrad.cu was faster
#: Bytes of 16-bit arrays from which it is chosen. Smaller ones stay in the L2 cache, which direct_wgrad.cu's model assumes.
MANY = 32e6
LONGEST = 512  # rows that a thread adds: longer sums would lose more digits


def time(problem: ConvProblem, config: DepthwisePlanesWgrad, device: Device) -> float:
    """Microseconds that `config` should take: memory, or the multiprocessors' instructions."""
    walks, taps, stride, (_, p, _) = _walks(problem, config), problem.output_size[1], problem.dilation[1], problem.filter_size
    rows, blocks = min(config.ROWS, p), problem.K * config.PARTS
    steps = (rows - 1) * stride + taps
    inside = min(steps, problem.input_size[1])  # rows of x that are no padding
    copies = ceil(_pitch(problem, walks.lanes_q), walks.lanes_q) + COLUMNS / stride
    unit = inside * COLUMNS * taps * taps / stride + steps * (10 + COPY * copies) + 160
    cycles = walks.rounds * unit + 32 * taps * taps + 1000
    full, rest = divmod(ceil(blocks, device.multiprocessors), RESIDENT)
    busy = full * RESIDENT + (max(rest, ALONE) if rest else 0)
    issued = ISSUED if problem.itemsize == WORD else ISSUED_16
    us = BEGIN + max(issued * busy * cycles / CLOCK, problem.bytes / MEMORY)
    return us + (split_sum.time(math.prod(problem.result_shape), config.PARTS, 4, device.multiprocessors) if config.PARTS > 1 else 0)


def configs(problem: ConvProblem, device: Device) -> Iterator[DepthwisePlanesWgrad]:
    """The configurations worth comparing for `problem`, the best first."""
    if why_not(problem):
        return
    found: dict[DepthwisePlanesWgrad, float] = {}
    p = problem.filter_size[1]
    for rows in dict.fromkeys(ceil(p, strips) for strips in (1, 2, 3, 4, 6, 8, 12, 16)):
        warps = ceil(_walks(problem, DepthwisePlanesWgrad(rows)).units, THREADS // WARP)
        for rounds in (1, 2, 3, 4, 6, 8):
            config = DepthwisePlanesWgrad(rows, ceil(warps, rounds))
            if refusal(problem, config) is None and (rounds - 1) * rows < LONGEST:
                found[config] = time(problem, config, device)
    yield from sorted(found, key=found.__getitem__)[:3]


def choose(problem: ConvProblem, device: Device) -> tuple[float, DepthwisePlanesWgrad] | None:
    """The configuration that should be the fastest, behind the microseconds it should take; None where none runs or others win."""
    config = next(configs(problem, device), None)
    if config is None or problem.filter_size[2] < NARROW:
        return None
    if problem.itemsize == WORD:
        return time(problem, config, device), config
    return (BY_RULE, config) if problem.bytes >= MANY else None
