"""Launches of ``cu/layout/bordered.cu``: images with their borders, the way back, and other types than the arithmetic's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from pycuda_conv import borders
from pycuda_conv.engines.geometry import accumulator_bytes, arguments, bits, by_axis, ceil, divider, shown_once_along, side_numbers
from pycuda_conv.engines.layout import border_planes
from pycuda_conv.engines.schedule import INPUT, RESIDUAL, RESULT
from pycuda_conv.engines.struct import kernel_struct
from pycuda_conv.engines.variants import VariantSet, portable, portable_choices
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import BufferSlice, Device, KernelLaunch

THREADS = 256
MOST_VARIANTS = {"cuda": 8, "opencl": 4}  # texts, as an engine says it
EACH = {"float16": 8, "bfloat16": 8, "float32": 4, "float64": 4}  # elements that a thread copies
#: The numbers of types in bordered.cu; 0 is the arithmetic's.
TYPES = {
    "": 0, "bool": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "uint32": 6, "int32": 7, "uint64": 8, "int64": 9, "float16": 10,
    "bfloat16": 11, "float32": 12, "float64": 13,
}  # fmt: skip

BorderArguments = kernel_struct("bordered", "BorderArguments")


def _outer_and_inner(problem: ConvProblem, channels: int) -> tuple[int, int]:
    """Of an array of images, the numbers of its elements outside of a pixel's axes, and inside of them."""
    if problem.layout == "NHWC":
        return problem.N, channels
    if problem.layout == "CHWN":  # [channel of a group][pixels][group][image]: see ConvProblem.launched
        return channels // max(problem.groups, 1), problem.N * problem.groups
    return problem.N * channels, 1


def _args(
    dtype: str, outer: int, size: Sequence[int], inner: int, border: borders.Border, before: Sequence[int], after: Sequence[int], big: bool,
    fold: bool, rims: bool = False, **others: int,
) -> tuple[Any, int]:
    """The arguments of a launch for images of this `size`, and elements of the array that it writes."""
    wide = tuple(b + n + a for b, n, a in zip(before, size, after, strict=True))
    written = outer * math.prod(size if fold else wide) * inner
    numbers = side_numbers(size, border)
    near = wide[2] * inner >= EACH[dtype]
    for axis, n, words, *paddings in zip("dhw", size, border, before, after, strict=True):
        for prefix, word, padding in zip(("", "last_"), words, paddings, strict=True):
            start, step, reach = borders.near(word, n, bool(prefix))
            numbers |= {f"{prefix}near_{axis}": start, f"{prefix}step_{axis}": step}
            near = near and padding <= reach
    boxes = [shown_once_along(*axis) for axis in zip(size, border, before, after, strict=True)] if rims else [(n, 0) for n in size]
    rim = [n - inside for n, (_, inside) in zip(size, boxes, strict=True)]
    of_slice = rim[1] * size[2] + (size[1] - rim[1]) * rim[2]
    outside = rim[0] * size[1] * size[2] + (size[0] - rim[0]) * of_slice
    if rims:
        written = outer * outside * inner
    numbers |= {"rims": outside if rims else 0, "of_slice": of_slice, **by_axis("rim_", rim)}
    numbers |= by_axis("box_", [first for first, _ in boxes]) | by_axis("inside_", [inside for _, inside in boxes])
    numbers |= {"near": int(near), "whole": int(inner % EACH[dtype] == 0 and not others["type"])} | _OF_OTHERS | others
    sizes = {"inner": inner, "line": (size if fold else wide)[2] * inner, **by_axis("", size), **by_axis("wide_", wide)}
    prepared = {f"by_{name}": 0 if big else divider(sizes[name]) for name in ("inner", "line", "d", "h", "wide_d", "wide_h")}
    args = arguments(
        BorderArguments, **{"size": written, **sizes, **prepared, **by_axis("before_", before), **by_axis("after_", after), **numbers}
    )
    return args, written


#: Arguments of other kernels than ``border_copy``.
_OF_OTHERS = dict.fromkeys((
    "rows", "rows_each", "lane_bits", "tiles", "positions", "vector", "planes",
), 0)  # fmt: skip


def _is_big(problem: ConvProblem) -> bool:
    """Whether elements have to be counted in 64 bits."""
    return max(problem.largest_array, problem.padded.largest_array) >= 2**31 - 2**20


def copy(problem: ConvProblem, to: BufferSlice, device: Device) -> KernelLaunch:
    """Copy the image, the array that `problem` reads first, with its border and in the arithmetic's type."""
    big, none = _is_big(problem), (0, 0, 0)
    outer, inner = _outer_and_inner(problem, problem.operand_channels)
    before, after = (none, none) if problem.direction == "dgrad" else problem.border_sizes
    if inner == 1 and (before, after) != (none, none):
        launch = border_planes.copy(problem, outer, big, to, device)
        if launch is not None:
            return launch
    args, written = _args(
        problem.dtype, outer, problem.operand_size, inner, problem.border or borders.NONE, before, after, big, False,
        value=bits(problem.border_value, accumulator_bytes(problem)), type=TYPES[problem.input_dtype], has_residual=0,
    )  # fmt: skip
    return _copy(problem.dtype, big, args, written, INPUT, to)


LEAST_ROWS = 64  # rows from which border_rows copies them: a thread has some of them, one below the other
LANES = (256, 128, 64, 32, 16, 8)  # threads along a line
ROWS_EACH = (16, 8)  # rows of a thread, a multiple of those that it loads at once
MANY_BLOCKS = 4 * 132


def _copy(dtype: str, big: bool, args: Any, written: int, source: BufferSlice, target: BufferSlice) -> KernelLaunch:
    """The launch that copies images with their border."""
    rows, line = written // max(args.line, 1), args.line
    if not args.near or rows < LEAST_ROWS:
        blocks = ceil(written, EACH[dtype] * THREADS)
        return KernelLaunch("border_copy", portable(dtype, big, THREADS), blocks, THREADS, (source, target), (), "bordered", arguments=args)
    vector = EACH[dtype] if args.whole else 1
    positions = line // vector
    lanes = min(LANES, key=lambda lanes: (ceil(positions, lanes) * lanes, -lanes))

    def blocks_of(each: int) -> int:
        return ceil(rows, THREADS // lanes * each) * ceil(positions, lanes)

    each = next((each for each in ROWS_EACH if blocks_of(each) >= MANY_BLOCKS), ROWS_EACH[-1])
    tiles = ceil(positions, lanes)
    args = args._replace(
        rows=rows, rows_each=each, lane_bits=lanes.bit_length() - 1, tiles=tiles, by_tiles=divider(tiles), positions=positions,
        vector=vector,
    )
    defines = portable(dtype, big, THREADS)
    return KernelLaunch("border_rows", defines, blocks_of(each), THREADS, (source, target), (), "bordered", arguments=args)


def fold(problem: ConvProblem, wide: BufferSlice, to: BufferSlice, device: Device) -> list[KernelLaunch]:
    """Launches, one behind the other, that add the border of a gradient by the input to the pixels that it shows, and a residual."""
    big, border = _is_big(problem), problem.border or borders.NONE
    outer, inner = _outer_and_inner(problem, problem.result_channels)
    before, after = problem.border_sizes
    at_once = border_planes.fold(problem, outer, big, wide, to, device) if inner == 1 else None
    if at_once is not None:
        return [at_once]

    def launch(rims: bool) -> KernelLaunch:
        args, written = _args(
            problem.dtype, ceil(outer, PLANES), problem.input_size, inner, border, before, after, big, True, rims, value=0, type=0,
            has_residual=int(problem.has_residual), planes=outer,
        )  # fmt: skip
        blocks, buffers = ceil(written, THREADS), (wide, RESIDUAL, to)
        return KernelLaunch("border_fold", portable(problem.dtype, big, THREADS), blocks, THREADS, buffers, (), "bordered", arguments=args)

    if problem.has_residual or big:
        return [launch(False)]
    # most pixels are copied as they are; then those are added to that the border shows
    minus, less = ([-n for n in sides] for sides in (before, after))
    size = tuple(n + b + a for n, b, a in zip(problem.input_size, before, after, strict=True))
    args, written = _args(
        problem.dtype, outer, size, inner, borders.NONE, minus, less, big, False, value=0, type=0, has_residual=0
    )
    return [_copy(problem.dtype, big, args, written, wide, to), launch(True)]


PLANES = 8  # planes, or images with channels last, of a thread of ``border_fold``


def round_to(problem: ConvProblem, exact: BufferSlice) -> KernelLaunch:
    """Round the result to the type of integers that was asked for."""
    size, defines = math.prod(problem.result_shape), portable(problem.dtype, False, THREADS)
    blocks, numbers = ceil(size, EACH[problem.dtype] * THREADS), (size, TYPES[problem.result_dtype])
    return KernelLaunch("border_round", defines, blocks, THREADS, (exact, RESULT), numbers, "bordered")


def converting(size: int, given: str, dtype: str, source: BufferSlice, target: BufferSlice) -> KernelLaunch:
    """Convert an array without gaps to `dtype`, one of floats."""
    big, none = size >= 2**31 - 2**20, (0, 0, 0)
    args, _ = _args(dtype, 1, (1, 1, size), 1, borders.NONE, none, none, big, False, value=0, type=TYPES[given], has_residual=0)
    blocks = ceil(size, EACH[dtype] * THREADS)
    return KernelLaunch("border_copy", portable(dtype, big, THREADS), blocks, THREADS, (source, target), (), "bordered", arguments=args)


def variants(device: Device) -> Iterator[VariantSet]:
    """A text for each type."""
    yield VariantSet("bordered", portable_choices(THREADS))
    if device.backend == "cuda":
        yield from border_planes.variants()
