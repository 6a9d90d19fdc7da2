"""Borders of dask arrays whose rows lie in other chunks, and results of integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import dask.array as da
import numpy as np

from pycuda_conv import borders
from pycuda_conv.call import Call
from pycuda_conv.errors import ConvArgumentError
from pycuda_conv.problem import ConvProblem


def integers(y: Any, dtype: str) -> Any:
    """A chunk rounded to the nearest integers, ties to even, and clipped."""
    limits = (0, 1) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    whole = np.rint(y)
    beyond = whole >= float(limits[1])
    inside = np.where(beyond | ~(whole >= limits[0]), limits[0], whole).astype(dtype)  # NaN too
    inside[beyond] = limits[1]
    return inside


def widened(problem: ConvProblem, x: Any, lead: int) -> tuple[ConvProblem, Any, tuple[int, ...]]:
    """The problem on `x` joined with borders whose rows may lie in other chunks, `x` with these, and the rows joined before each axis."""
    ndim = problem.ndim
    joined = [0] * ndim
    if problem.border is None or problem.direction == "dgrad":
        return problem, x, tuple(joined)
    for i in range(ndim):
        number, axis = 3 - ndim + i, lead + 1 + i
        words, n = problem.border[number], problem.input_size[number]
        sides = [
            padding if mode in ("reflect", "symmetric", "circular") else 0
            for mode, padding in zip(words, (problem.padding_before[number], problem.padding_after[number]), strict=True)
        ]
        if not any(sides):
            continue
        rows = borders.rows(words, n, -sides[0], n + sides[1])
        first, last = (rows_of(x, axis, some) for some in (rows[: sides[0]], rows[sides[0] + n :]))
        chunks = x.chunks[axis]
        merged = (chunks[0] + sides[0], *chunks[1:]) if len(chunks) > 1 else (sum(chunks) + sides[0],)
        merged = (*merged[:-1], merged[-1] + sides[1])
        x = da.concatenate([part for part in (first, x, last) if part is not None], axis).rechunk({axis: merged})
        joined[i] = sides[0]

        def at(values: tuple[int, int, int], less: int, number: int = number) -> tuple[int, int, int]:
            d, h, w = (value - less if j == number else value for j, value in enumerate(values))
            return d, h, w

        problem = replace(
            problem, input_size=at(problem.input_size, -sum(sides)), padding_before=at(problem.padding_before, sides[0]),
            padding_after=at(problem.padding_after, sides[1]),
        )
    return problem.with_settled_border(), x, tuple(joined)


def runs(rows: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of `rows` that go one up, go one down or stay: the first, how many, and the step."""
    start = 0
    while start < len(rows):
        end = start + 1
        step = rows[end] - rows[start] if end < len(rows) and abs(rows[end] - rows[start]) < 2 else 1
        while end < len(rows) and rows[end] - rows[end - 1] == step:
            end += 1
        yield start, end - start, step
        start = end


def rows_of(x: Any, axis: int, rows: Sequence[int]) -> Any:
    """These rows of `x`, or None if there are none."""
    parts = []
    for start, count, step in runs(rows):
        low, high = sorted((rows[start], rows[start] + (count - 1) * step))
        part = x[(slice(None),) * axis + (slice(low, high + 1),)]
        if step < 0:
            part = da.flip(part, axis)
        parts.append(da.repeat(part, count, axis) if step == 0 else part)
    return da.concatenate(parts, axis) if parts else None


def folded(problem: ConvProblem, wide: Any, first_axis: int) -> Any:
    """The gradient of a wider array with its border added to the rows that it shows, a run of rows after the other."""
    before, after = problem.border_sizes
    border = problem.border or borders.NONE
    for i in range(problem.ndim):
        number, axis = 3 - problem.ndim + i, first_axis + i
        n, b, a = problem.input_size[number], before[number], after[number]

        def part(array: Any, start: int, end: int, axis: int = axis) -> Any:
            return array[(slice(None),) * axis + (slice(start, end),)]

        made = part(wide, b, b + n)
        for start, rows in ((0, borders.rows(border[number], n, -b, 0)), (b + n, borders.rows(border[number], n, n, n + a))):
            for at, count, step in runs(rows):
                low, high = sorted((rows[at], rows[at] + (count - 1) * step))
                more = part(wide, start + at, start + at + count)
                more = da.flip(more, axis) if step < 0 else more.sum(axis, keepdims=True, dtype=wide.dtype) if step == 0 else more
                middle = part(made, low, high + 1) + more
                pieces = part(made, 0, low), middle, part(made, high + 1, n)
                made = da.concatenate([piece for piece in pieces if piece.shape[axis]], axis)
        wide = made
    return wide


def enlarged(x: Any, call: Call) -> tuple[Any, Call]:
    """An upsampled image, enlarged chunk by chunk, and the call for it; any other as it is."""
    if call.upsample is None:
        return x, call
    times, word = call.upsample
    if word == "folded":
        raise ConvArgumentError("dask arrays are enlarged chunk by chunk: upsample_filter must be 'exact' or None, but got 'folded'")
    for axis, n in enumerate(times, x.ndim - len(times)):
        x = da.repeat(x, n, axis) if n > 1 else x
    return x, call._replace(upsample=None)
