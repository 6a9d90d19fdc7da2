"""What the engines for Hopper (compute capability 9.0) share: limits, constants of models of time, images as TMA loads them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pycuda_conv.engines.addressing import PackedLayout, PhaseAddressing
from pycuda_conv.engines.costs import costs
from pycuda_conv.engines.geometry import Phase, by_axis, row_major
from pycuda_conv.engines.hopper.box_tiles import Box
from pycuda_conv.engines.schedule import placed
from pycuda_conv.problem import ConvProblem, Size3
from pycuda_conv.runtime.base import BufferSlice, Device, Im2col, TensorMap

MOST_SHARED = 227 * 1024  # shared memory of a block on sm_90, in bytes
SHARED_BYTES = MOST_SHARED - 256  # the same without the barriers
THREADS = 384  # threads of a producer's warpgroup and two consumers'
ROW = 128  # bytes of an operand's row in shared memory, as TMA loads it
RUN = 2  # of store_mode()
CHUNK = 32  # channels that the kernels of cu/hopper/pixel_tiles.cuh write together

COST = costs("hopper.common")
CLOCK, MEMORY = COST.CLOCK, COST.MEMORY


def most_shared(blocks: int) -> int:
    """Bytes of shared memory that a block may take if `blocks` of them share a multiprocessor."""
    return SHARED_BYTES if blocks == 1 else SHARED_BYTES // blocks - 1024


def at_once(device: Device, cluster: int) -> int:
    """Multiprocessors that clusters of `cluster` blocks can fill. A cluster needs neighbouring ones, so large clusters leave some idle."""
    return max(device.multiprocessors * 10 // 11, 1) if cluster >= 4 else device.multiprocessors


# ---- channels-last images, whose pixels TMA's im2col mode loads


def image_map(
    problem: ConvProblem, place: BufferSlice, unpacked: PackedLayout, addressing: PhaseAddressing, pixels: int, row: int = ROW,
    part: tuple[Size3, Size3] | None = None, box: Box | None = None, kind: str = "",
) -> TensorMap:
    """The tensor map of the first operand's images: a load fetches `row` bytes of a `box` of pixels, or of `pixels` neighbours.

    Neighbours of a flat phase are a box of one row. With `part` the map sees a part of each image alone: its first pixel, and its size.
    `kind`: the elements' type, if it is not :func:`map_type`.
    """
    buffer, start = placed(place)
    channels, wide, kind = problem.operand_channels, unpacked.load * row // ROW, kind or map_type(problem)
    pixel = problem.itemsize * channels  # bytes
    if addressing.flat:
        return tight_map(place, (channels, problem.N * math.prod(unpacked.size), 1), (wide, pixels, 1), kind, row)
    inner = range(2, 2 - addressing.spatial_dims, -1)  # W first
    axes = [unpacked.size[i] for i in inner]
    if box:  # it has rows in any case
        axes = [*axes, 1][: max(len(axes), 2)]
        lengths = *box.size[: len(axes)], box.size[-1]
        strides = tuple(pixel * math.prod(axes[:i]) for i in range(len(axes) + 1))
        return TensorMap(buffer, start, (channels, *axes, problem.N), strides, (wide, *lengths), row, kind)
    strides = tuple(pixel * math.prod(axes[:i]) for i in range(len(axes) + 1))
    first, axes = (part[0], [part[1][i] for i in inner]) if part else ((0, 0, 0), axes)
    offset = start + pixel * sum(n * step for n, step in zip(first, row_major(unpacked.size), strict=True))
    return TensorMap(buffer, offset, (channels, *axes, problem.N), strides, im2col(addressing, axes, wide, pixels), row, kind)


def tight_map(
    place: BufferSlice, sizes: tuple[int, int, int], box: tuple[int, int, int], kind: str, row: int = ROW
) -> TensorMap:
    """The map of an array without gaps, of `sizes` from the innermost axis on: a load fetches a `box`, whose rows have `row` bytes."""
    pitch = sizes[0] * (2 if kind.endswith("16") else 4)
    return TensorMap(*placed(place), sizes, (pitch, pitch * sizes[1]), box, row, kind)


def im2col(addressing: PhaseAddressing, axes: Sequence[int], wide: int, pixels: int) -> Im2col:
    """How loads of `wide` channels of `pixels` pixels go through images whose spatial `axes`, innermost first, have these sizes."""
    inner = range(2, 2 - len(axes), -1)
    stride, low, sizes = (tuple(of[i] for i in inner) for of in (addressing.stride, addressing.low, addressing.phase.size))
    upper = tuple(a + (count - 1) * step - (n - 1) for a, count, step, n in zip(low, sizes, stride, axes, strict=True))
    return Im2col(low, upper, stride, wide, pixels)


def pixel_cycles(nbytes: int) -> float:
    """Cycles that a load takes for each row of a stage, if a pixel has `nbytes`. Rows that TMA has to fill take longer, odd ones most."""
    whole, rest = divmod(nbytes, ROW)
    of_rest = 0 if rest == 0 else COST.FILLED_CYCLES if rest % 32 == 0 else COST.ODD_CYCLES
    return float((whole * COST.ROW_CYCLES + of_rest) / (whole + (rest > 0)))


def finished_time(problem: ConvProblem, rows: int, columns: int, rate: float = COST.FINISHED) -> float:
    """Microseconds that it takes to finish and store a tile of `rows` pixels and `columns` channels.

    Columns past the last channel take no time if sums are stored as they are. If a pixel is no multiple of 16 bytes, all columns go through
    shared memory.
    """
    channels, sums = problem.result_channels, rows * columns
    if channels * problem.itemsize % 16:
        us, joined = sums / COST.STAGED, COST.JOINED
    else:
        finishing = sums / (COST.EXPONENTIAL if problem.activation in ("silu", "gelu", "gelu_tanh") else COST.SCALED)
        sums = rows * channels // math.ceil(channels / columns)
        us, joined = sums * problem.itemsize / rate, COST.JOINED_IN_RUNS
        if problem.has_scale or problem.has_bias or problem.has_residual or problem.activation:
            us = max(us, finishing)
    return us + (sums / joined if problem.has_residual else 0.0)


def written_bytes(problem: ConvProblem) -> int:
    """Bytes of the result that are written, and of the residual that are read."""
    return problem.itemsize * math.prod(problem.result_shape) * (2 if problem.has_residual else 1)


def read_bytes(problem: ConvProblem) -> float:
    """Bytes of the input that are read. Rows, columns and slices that the taps step over are not."""
    part = 1.0
    if problem.direction == "fprop":
        for taps, stride in zip(problem.filter_size[:2], problem.stride[:2], strict=True):
            part *= min(1.0, taps / stride)
        # neighbouring columns share lines of memory unless a pixel's channels fill some
        if problem.operand_channels * problem.itemsize >= ROW:
            part *= min(1.0, problem.filter_size[2] / problem.stride[2])
    return part * problem.itemsize * problem.N * problem.operand_channels * math.prod(problem.operand_size)


def store_mode(problem: ConvProblem, columns: int, phase: Phase) -> int:
    """How a tile of `columns` columns writes pixels: ``StoreMode`` in ``cu/hopper/pixel_tiles.cuh``."""
    channels = problem.result_channels
    if channels * problem.itemsize % 16 == 0:
        return 3
    if channels % 4 == 0:
        return 1
    return RUN if channels <= columns == CHUNK and phase.step == (1, 1, 1) and phase.size == problem.result_size else 0


def map_type(problem: ConvProblem) -> str:
    """The name that tensor maps give to the type of the elements of `problem`."""
    return "tfloat32" if problem.dtype == "float32" else problem.dtype


def load_base(problem: ConvProblem, addressing: PhaseAddressing) -> dict[str, int]:
    """The arguments of ``LoadBase`` in ``cu/hopper/ptx.cuh``. With `addressing.flat` all images count as one row of pixels."""
    _, height, width = addressing.phase.size
    plane = math.prod(addressing.phase.size)
    stride, low = ((1, 1, 1), (0, 0, 0)) if addressing.flat else (addressing.stride, addressing.low)
    whole = (problem.N * plane,) * 3 if addressing.flat else (plane, height * width, width)
    counts = dict(zip(("load_plane", "load_pq", "load_q"), whole, strict=True))
    axes = 0 if addressing.flat else addressing.spatial_dims
    return {"spatial_dims": axes, **counts, **by_axis("stride_", stride), **by_axis("low_", low)}


def stage_channels(problem: ConvProblem) -> int:
    """Channels of a row of an operand in shared memory."""
    return ROW // problem.itemsize
