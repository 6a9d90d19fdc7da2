"""Filters with their axes in another order, so that a product's channels are neighbours (``cu/layout/transpose_filter.cu``)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pycuda_conv.engines.costs import costs
from pycuda_conv.engines.geometry import arguments, ceil
from pycuda_conv.engines.schedule import WEIGHT
from pycuda_conv.engines.struct import kernel_struct
from pycuda_conv.engines.variants import VariantSet
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import BufferSlice, KernelLaunch

TILE = 64  # rows, and channels, of a block
TIME = costs("layout.transpose_filter").TIME  # microseconds of such a launch


TransposedFilter = kernel_struct("transpose_filter", "TransposedFilter")


def launch(problem: ConvProblem, place: BufferSlice, steps: tuple[int, int, int], pitch: int | None = None) -> KernelLaunch:
    """The launch that transposes the filter to rows of the result's channels, each [tap][channel], by default without gaps.

    `steps` are the strides of the filter as it lies, in elements: of a row, a tap and a channel.
    """
    rows, channels, taps = problem.result_channels, problem.operand_channels // problem.groups, math.prod(problem.filter_size)
    pitch = pitch or taps * channels
    if steps[:2] == (taps, 1) and pitch == taps * channels:  # taps are contiguous before and after: each counts as a row
        rows, taps, pitch, steps = rows * taps, 1, channels, (1, 0, steps[2])
    args = arguments(
        TransposedFilter, rows=rows, taps=taps, channels=channels, tiles_c=ceil(channels, TILE), pitch=pitch,
        **dict(zip(("row_step", "tap_step", "channel_step"), steps, strict=True)),
    )  # fmt: skip
    grid = ceil(rows, TILE) * taps * args.tiles_c
    return KernelLaunch("transpose_filter", {"BYTES": problem.itemsize}, grid, 256, (WEIGHT, place), (), arguments=args)


def variants() -> Iterator[VariantSet]:
    """A text for each size of elements."""
    yield VariantSet("transpose_filter", {"BYTES": (2, 4)})
