"""A problem in pieces: some images, or rows of one image with their halo."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pycuda_conv import borders
from pycuda_conv.execute import staging
from pycuda_conv.problem import ConvProblem, Size3

# ---- cutting a problem up


@dataclass(frozen=True)
class Piece:
    """A part of a problem: some images and, along the first spatial axis, rows to read and rows to write.

    The rows to read are a list where they are not neighbours: at a border that shows rows from elsewhere.
    """

    problem: ConvProblem
    images: slice
    rows_in: slice | list[int]
    rows_out: slice


def pieces(problem: ConvProblem, chunk_bytes: int) -> list[Piece]:
    """`problem` in pieces of about `chunk_bytes`: by images, and by rows where one image is larger than that.

    The pieces depend on the problem and on `chunk_bytes` only, so every number of GPUs computes the same sums.
    """
    if problem.direction == "wgrad":  # a sum over all images and rows
        return [Piece(problem, slice(None), slice(None), slice(None))]
    axis = 3 - problem.ndim
    whole_in, whole_out = slice(0, problem.operand_size[axis]), slice(0, problem.result_size[axis])
    image_bytes = max(
        problem.operand_channels * math.prod(problem.operand_size) * problem.input_itemsize,
        problem.result_channels * math.prod(problem.result_size) * problem.result_itemsize, 1,
    )
    images = min(problem.N, max(1, chunk_bytes // image_bytes))
    if image_bytes <= 2 * chunk_bytes:
        cuts = staging.cuts(problem.N, -(-problem.N // images))
        return [Piece(replace(problem, N=end - first), slice(first, end), whole_in, whole_out) for first, end in cuts]
    rows = problem.result_size[axis]
    if problem.direction == "dgrad" and problem.border is not None and set(problem.border[axis]) != {"zeros"}:
        cuts = staging.cuts(problem.N, problem.N)  # what is folded comes from rows elsewhere
        return [Piece(replace(problem, N=1), slice(first, end), whole_in, whole_out) for first, end in cuts]
    if problem.upsampled:
        cuts = staging.cuts(problem.N, problem.N)  # rows of the result begin inside of rows of the array
        return [Piece(replace(problem, N=1), slice(first, end), whole_in, whole_out) for first, end in cuts]
    bands = [_rows(problem, axis, *cut) for cut in staging.cuts(rows, min(rows, -(-image_bytes // chunk_bytes)))]
    return [replace(band, images=slice(n, n + 1)) for n in range(problem.N) for band in bands]


def _rows(problem: ConvProblem, axis: int, first: int, last: int) -> Piece:
    """The piece of one image that gives rows `first` to `last` of the result along `axis`."""
    part, low, high = band(replace(problem, N=1), axis, first, last)
    found = with_rows_from_elsewhere(part, problem, axis, low, high)
    if found is not None:
        return Piece(found[0], slice(0, 1), found[1], slice(first, last))
    return Piece(part, slice(0, 1), slice(low, high), slice(first, last))


def with_rows_from_elsewhere(
    part: ConvProblem, problem: ConvProblem, axis: int, low: int, high: int
) -> tuple[ConvProblem, list[int]] | None:
    """The part of a problem that reads rows `low` to `high`, without a border along `axis`, and the rows that it reads then.

    None where the part can make its border from its own rows: mirrors of so few rows, repeated ones, and those that are filled.
    """
    if problem.border is None:
        return None
    n, before, after = problem.input_size[axis], part.padding_before[axis], part.padding_after[axis]
    words, own = problem.border[axis], high - low
    if all(
        padding <= 0 or mode in (*borders.FILLED, "replicate") or (mode == "symmetric" and padding <= own)
        or (mode == "reflect" and padding < own) or own == n
        for mode, padding in zip(words, (before, after), strict=True)
    ):  # fmt: skip
        return None
    rows = borders.rows(words, n, low - before, high + after)
    shown = [i for i, row in enumerate(rows) if row >= 0]
    if not shown:
        return None
    first, last = shown[0], len(rows) - 1 - shown[-1]  # rows that are filled stay padding
    rows = rows[first : len(rows) - last]

    def at(values: Size3, value: int) -> Size3:
        d, h, w = (value if i == axis else v for i, v in enumerate(values))
        return d, h, w

    found = replace(
        part, input_size=at(part.input_size, len(rows)), padding_before=at(part.padding_before, first),
        padding_after=at(part.padding_after, last),
    )
    return found.with_settled_border(), rows


def band(problem: ConvProblem, axis: int, first: int, last: int) -> tuple[ConvProblem, int, int]:
    """The problem that gives rows `first` to `last` of the result along `axis`; the first row that it reads, and the end of its rows."""
    stride, before, dilation = problem.stride[axis], problem.padding_before[axis], problem.dilation[axis]
    reach = dilation * (problem.filter_size[axis] - 1)
    size = problem.operand_size[axis]

    def at(values: Size3, value: int) -> Size3:
        d, h, w = (value if i == axis else v for i, v in enumerate(values))
        return d, h, w

    if problem.direction == "fprop":
        start, end = first * stride - before, (last - 1) * stride - before + reach + 1  # of what is read, padding included
        low = min(max(start, 0), size - 1)
        high = max(min(end, size), low + 1)
        part = replace(
            problem, input_size=at(problem.input_size, high - low), output_size=at(problem.output_size, last - first),
            padding_before=at(problem.padding_before, low - start), padding_after=at(problem.padding_after, end - high),
        )
    else:
        # result row h is fed by operand rows p with p*stride = h + padding - r*dilation
        low = max(0, min(-(-(first + before - reach) // stride), (first + before) // stride, size - 1))
        high = max(min(size, (last - 1 + before) // stride + 1), low + 1)
        part = replace(
            problem, output_size=at(problem.output_size, high - low), input_size=at(problem.input_size, last - first),
            padding_before=at(problem.padding_before, first + before - low * stride),
        )
    return part.with_settled_border(), low, high
