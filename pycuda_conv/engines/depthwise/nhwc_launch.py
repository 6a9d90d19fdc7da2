"""Configurations and launches of depthwise convolutions of channels-last arrays: ``cu/depthwise/nhwc*.cu``.

A thread has some channels of a tile of pixels, or it walks down the rows of a strip. How many channels, columns and rows that is follows
here from the problem, and so do the arguments of the four kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

from pycuda_conv.engines import split_sum
from pycuda_conv.engines.base import Config, Device, KernelLaunch, kernel_struct
from pycuda_conv.engines.geometry import arguments, border_numbers, ceil, needs_64_bits
from pycuda_conv.engines.limits import AMPERE, Devices
from pycuda_conv.engines.schedule import INPUT, RESULT, WEIGHT, Schedule, finishing
from pycuda_conv.problem import DTYPE_CODES, ConvProblem


@dataclass(frozen=True)
class Depthwise(Config):
    """CHUNK channels of a block, and TILE_P x TILE_Q pixels of a thread: ``depthwise/nhwc.cu``."""

    CHUNK: int = 64
    TILE_P: int = 2
    TILE_Q: int = 4


@dataclass(frozen=True)
class DepthwiseStrips(Config):
    """Rows of the result that a thread walks down: ``depthwise/nhwc_strips.cu``."""

    ROWS: int = 14


@dataclass(frozen=True)
class DepthwiseWgrad(Config):
    """Rows of dy that a thread walks down at a time, and parts of the sum: ``depthwise/nhwc_wgrad.cu``."""

    ROWS: int = 14
    PARTS: int = 1


@dataclass(frozen=True)
class DepthwiseRing(Config):
    """The same with rows that arrive in shared memory some steps before they are used: ``depthwise/nhwc_wgrad_ring.cu``."""

    ROWS: int = 14
    PARTS: int = 1

    RUNS_ON: ClassVar[Devices] = AMPERE


DepthwiseArguments = kernel_struct("depthwise_nhwc", "DepthwiseArguments")
DepthwiseStripsArguments = kernel_struct("depthwise_nhwc_strips", "DepthwiseStripsArguments")
DepthwiseWgradArguments = kernel_struct("depthwise_nhwc_wgrad", "DepthwiseWgradArguments")
DepthwiseRingArguments = kernel_struct("depthwise_nhwc_wgrad_ring", "DepthwiseRingArguments")
THREADS = 128
#: The most channels of a block whose threads walk down the image.
PITCH = 64
COLUMNS, LEAST_ROWS = 4, 4  # columns of a thread that walks down the image, and the fewest rows
RING_LANES = (32, 16, 8, 4)  # threads along channels, a part of a warp, if rows arrive in shared memory
#: Square filters whose loops are unrolled, with strides of 1 and 2.
UNROLLED = (3, 5, 7)
#: Taps of a block for wgrad of other filters, down and across.
SOME_TAPS = (2, 4)


def of_filter(problem: ConvProblem) -> bool:
    """Whether `problem` is wgrad: see :attr:`ConvProblem.launched`."""
    return problem.layout == "CHWN"


def vector_of(problem: ConvProblem, kind: type[Config]) -> int:
    """Channels of a thread: as many as registers hold, or one word if they come from shared memory."""
    if kind is DepthwiseRing:
        return 4 // problem.itemsize
    if problem.K != problem.groups:  # several output channels read one input channel
        return 1
    return next(v for v in vector_choices(DTYPE_CODES[problem.dtype], unrolled(problem), kind) if problem.K % v == 0)


def vector_choices(dtype: int, size: int, kind: type[Config]) -> tuple[int, ...]:
    """The choices for channels of a thread: as many as registers hold, or one; for an unrolled filter, or with `size` 0 another."""
    if size and kind is DepthwiseWgrad:  # mostly channels that fit no ring
        return (1,)
    if not size or kind is Depthwise:
        most = 2 if dtype == 64 else 4
    elif kind is DepthwiseStrips and size == 5 and dtype != 64:
        most = 4
    else:
        most = (4 if size == 3 else 2) // (2 if dtype == 64 else 1)
    return (most, 1) if most > 1 else (1,)


def unrolled(problem: ConvProblem) -> int:
    """The size of a square filter whose loops are unrolled, or 0."""
    size, stride, dilation = problem.filter_size, problem.stride, problem.dilation
    if of_filter(problem):  # the filter is the result
        size, stride, dilation = problem.output_size, dilation, stride
    _, stride_h, stride_w = stride
    if size[1] != size[2] or size[1] not in UNROLLED or stride_h != stride_w or stride_h > 2 or dilation != (1, 1, 1):
        return 0
    return size[1]


def unrolled_by(problem: ConvProblem, kind: type[Config]) -> int:
    """:func:`unrolled` for a kind of kernel: tiles of single channels are unrolled in float64 alone, and not for strided dgrad."""
    strided = problem.direction == "dgrad" and problem.stride[1] > 1
    alone = kind is Depthwise and vector_of(problem, kind) == 1
    return 0 if alone and (strided or problem.itemsize < 8) else unrolled(problem)


def flipped(problem: ConvProblem, kind: type[Config]) -> bool:
    """Whether dgrad is computed as fprop with the filter rotated by 180 degrees."""
    return problem.direction == "dgrad" and problem.stride[1] == 1 and unrolled_by(problem, kind) > 0


def _padding(problem: ConvProblem, kind: type[Config]) -> tuple[int, int]:
    """Rows and columns of padding before the image that is read."""
    _, pad_h, pad_w = problem.padding_before
    size = unrolled(problem)
    return (size - 1 - pad_h, size - 1 - pad_w) if flipped(problem, kind) else (pad_h, pad_w)


class Partition(NamedTuple):
    """How the channels and the columns of images, in strips of rows, are distributed over blocks."""

    lanes_c: int  # threads of a block along channels
    lanes_u: int  # threads along units: groups of columns of all images; for wgrad, of all strips
    blocks_c: int
    strips: int
    tiles_q: int
    units: int
    rounds: int  # units of a thread


def partition_of(problem: ConvProblem, config: DepthwiseStrips | DepthwiseWgrad | DepthwiseRing) -> Partition:
    vector = vector_of(problem, type(config))
    lanes_c = _lanes(problem.K, vector, problem.itemsize, isinstance(config, DepthwiseRing))
    lanes_u, blocks_c = THREADS // lanes_c, ceil(problem.K, lanes_c * vector)
    if isinstance(config, DepthwiseStrips):
        _, p, q = problem.result_size
        strips, tiles_q = ceil(p, config.ROWS), ceil(q, COLUMNS)
        return Partition(lanes_c, lanes_u, blocks_c, strips, tiles_q, problem.N * tiles_q, 1)
    _, p, q = problem.filter_size
    strips, tiles_q = ceil(p, config.ROWS), ceil(q, COLUMNS)
    units = images_of(problem) * strips * tiles_q
    return Partition(lanes_c, lanes_u, blocks_c, strips, tiles_q, units, ceil(ceil(units, lanes_u), config.PARTS))


@lru_cache(maxsize=256)  # the planner asks for them once a configuration
def _lanes(channels: int, vector: int, itemsize: int, of_warp: bool) -> int:
    """Threads of a block along channels: few idle threads, few sectors of 32 bytes that two blocks share, and rather more channels."""
    groups, nbytes = ceil(channels, vector), vector * itemsize

    def cost(lanes: int) -> float:
        width = lanes * nbytes
        sectors = width // 32 if width % 32 == 0 else width // 32 + 2
        return ceil(groups, lanes) * sectors * THREADS / (THREADS // lanes * lanes) * (1 + 16 / width)

    return min(RING_LANES if of_warp else range(1, min(PITCH // vector, max(groups, 1)) + 1), key=cost)


def grid_of(problem: ConvProblem, config: Config) -> int:
    """Blocks of the launch."""
    if isinstance(config, DepthwiseRing):
        return partition_of(problem, config).blocks_c * config.PARTS
    if isinstance(config, DepthwiseWgrad):
        (taps_r, taps_s), (_, r, s) = _taps(problem), problem.output_size
        return partition_of(problem, config).blocks_c * ceil(s, taps_s) * ceil(r, taps_r) * config.PARTS
    if isinstance(config, DepthwiseStrips):
        cut = partition_of(problem, config)
        return cut.blocks_c * cut.strips * ceil(cut.units, cut.lanes_u)
    assert isinstance(config, Depthwise)
    args = _tile_arguments(problem, config)
    images = THREADS >> (args.lanes_c + args.lanes_q + args.lanes_p)
    return args.blocks_c * args.blocks_q * args.blocks_p * ceil(problem.N, images)


def adds_border(source: ConvProblem, problem: ConvProblem, config: Config) -> bool:
    """Whether :func:`schedule` takes the image of `source`, which has a border, for the wider one of `problem`: the ring's kernel may."""
    return isinstance(config, DepthwiseRing)


def schedule(
    problem: ConvProblem, config: Config, device: Device, with_moments: bool = False, source: ConvProblem | None = None
) -> Schedule:
    filter_size, size, of_gradient = unrolled_by(problem, type(config)), math.prod(problem.result_shape), (INPUT, WEIGHT, RESULT)
    if isinstance(config, DepthwiseRing):
        defines = {"TYPE": DTYPE_CODES[problem.dtype], "TAPS": filter_size, "STRIDE": problem.dilation[1]}
        args: Any = _ring_arguments(source or problem, config)
        defines |= {} if source is None else {"BORDERED": 1}
        launch = KernelLaunch("depthwise_nhwc_wgrad_ring", defines, grid_of(problem, config), THREADS, of_gradient, (), arguments=args)
        return split_sum.in_parts(problem, launch, config.PARTS, rounds=False)
    defines = {"DTYPE": DTYPE_CODES[problem.dtype], "V": vector_of(problem, type(config)), "INDEX_64": int(needs_64_bits(problem))}
    if isinstance(config, DepthwiseWgrad):
        parts = config.PARTS
        taps_r, taps_s = _taps(problem)
        defines |= {"INDEX_64": int(needs_64_bits(problem) or parts * size >= 2**31), "TAPS_R": taps_r, "TAPS_S": taps_s}
        if filter_size:
            defines["STRIDE"] = problem.dilation[1]
        args = _wgrad_arguments(problem, config)
        launch = KernelLaunch("depthwise_nhwc_wgrad", defines, grid_of(problem, config), THREADS, of_gradient, (), arguments=args)
        return split_sum.in_parts(problem, launch, parts)
    if filter_size:
        defines |= {"R": filter_size, "S": filter_size, "STRIDE": problem.stride[1]}
    if isinstance(config, DepthwiseStrips):
        kernel, args = "depthwise_nhwc_strips", _strips_arguments(problem, config)
        defines |= {"BORDERED": 1} if problem.border is not None else {}
    else:
        assert isinstance(config, Depthwise)
        kernel, args = "depthwise_nhwc", _tile_arguments(problem, config)
        dgrad = problem.direction == "dgrad" and not flipped(problem, Depthwise)
        defines |= {"TILE_P": config.TILE_P, "TILE_Q": config.TILE_Q, "DGRAD": int(dgrad)}
    return Schedule.plain([[finishing(kernel, defines, grid_of(problem, config), THREADS, args)]])


def _tile_arguments(problem: ConvProblem, config: Depthwise) -> Any:
    (_, p, q), (_, stride_h, stride_w), (pad_h, pad_w) = problem.result_size, problem.stride, _padding(problem, Depthwise)
    # with DGRAD tiles begin where the padding says
    early_h, early_w = (pad_h % stride_h, pad_w % stride_w) if problem.direction == "dgrad" and unrolled_by(problem, Depthwise) else (0, 0)
    tiles_p, tiles_q = ceil(p + early_h, config.TILE_P), ceil(q + early_w, config.TILE_Q)
    lanes_c = (config.CHUNK // vector_of(problem, Depthwise)).bit_length() - 1
    lanes_q = min((tiles_q - 1).bit_length(), 7 - lanes_c, 2)
    lanes_p = min((tiles_p - 1).bit_length(), 7 - lanes_c - lanes_q)
    return arguments(
        DepthwiseArguments, problem, lanes_c=lanes_c, lanes_q=lanes_q, lanes_p=lanes_p, blocks_c=ceil(problem.K, config.CHUNK),
        blocks_q=ceil(tiles_q, 1 << lanes_q), blocks_p=ceil(tiles_p, 1 << lanes_p), pad_h=pad_h, pad_w=pad_w,
        flip=int(flipped(problem, Depthwise)),
    )  # fmt: skip


def _strips_arguments(problem: ConvProblem, config: DepthwiseStrips) -> Any:
    pad_h, pad_w = _padding(problem, DepthwiseStrips)
    return arguments(
        DepthwiseStripsArguments, problem, partition_of(problem, config), border_numbers(problem, "hw"), rows=config.ROWS, pad_h=pad_h,
        pad_w=pad_w, flip=int(flipped(problem, DepthwiseStrips)),
    )  # fmt: skip


def _taps(problem: ConvProblem) -> tuple[int, int]:
    """Taps of a block for wgrad, down and across."""
    size = unrolled(problem)
    return (size, size) if size else SOME_TAPS


def _wgrad_arguments(problem: ConvProblem, config: DepthwiseWgrad) -> Any:
    (_, p, q), (_, r, s) = problem.filter_size, problem.output_size
    (_, stride_h, stride_w), (_, dil_h, dil_w) = problem.dilation, problem.stride
    (taps_r, taps_s), cut = _taps(problem), partition_of(problem, config)
    return arguments(
        DepthwiseWgradArguments, problem, cut, channels=cut.lanes_c * vector_of(problem, DepthwiseWgrad), blocks_s=ceil(s, taps_s),
        blocks_r=ceil(r, taps_r), parts=config.PARTS, rows=config.ROWS, c=problem.groups, multiplier=problem.K // problem.groups, p=p, q=q,
        r=r, s=s, stride_h=stride_h, stride_w=stride_w, dil_h=dil_h, dil_w=dil_w,
    )  # fmt: skip


def _ring_arguments(problem: ConvProblem, config: DepthwiseRing) -> Any:
    _, p, q = problem.filter_size
    cut = partition_of(problem, config)
    return arguments(DepthwiseRingArguments, problem, cut, parts=config.PARTS, rows=min(config.ROWS, p), p=p, q=q)


def images_of(problem: ConvProblem) -> int:
    """Images from which wgrad is computed."""
    return problem.C // problem.groups
