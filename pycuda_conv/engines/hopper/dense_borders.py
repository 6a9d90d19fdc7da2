"""Regions of a convolution of channels-last arrays with a border of the image's own pixels, for ``cu/hopper/dense.cu``.

Tensor loads fill the places outside of an image with zeros. So the result is cut into regions: the interior, whose taps meet the image (or
zeros) alone, and at each side single rows, columns and slices, whose taps meet other pixels instead. A load may have any offset for each
tap, so a region's taps simply have the offsets of the pixels that they show, and each region sums in the order of the interior.

Of the gradient by the input, rows that the border shows have more taps than others: those of each place that shows the row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product

from pycuda_conv import borders
from pycuda_conv.engines.addressing import CORNERS, MOST_STRIDE, OFFSETS, PhaseAddressing, size3
from pycuda_conv.engines.geometry import Phase, ceil, near_sides
from pycuda_conv.problem import ConvProblem, Size3

MOST_TAPS = 8  # along an axis: each has a byte of a word
MOST_OFFSET = 255  # of a tap: a byte
MOST_REGIONS = 48  # beside the interior: six rows and columns at sides that are reflected, of a gradient of five taps


@dataclass(frozen=True)
class Region:
    """A box of the result."""

    addressing: PhaseAddressing  # its size and origin; the pixel of the image's part at which tap offsets of 0 begin
    first: Size3  # of the part of the image that the loads see
    length: Size3
    taps: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # along each axis the taps' numbers in the filter
    offsets: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    interior: bool  # whether its taps lie as they do without a border


@dataclass(frozen=True)
class _Segment:
    """Neighbouring results of an axis whose taps have equal offsets: the first and their number, the image's part, and the start in it."""

    origin: int
    size: int
    first: int
    length: int
    low: int
    taps: tuple[int, ...]
    offsets: tuple[int, ...]
    interior: bool = False


def _segments(source: ConvProblem, axis: int) -> Iterator[_Segment]:
    """The segments of an axis, the interior first; those of one result each follow."""
    n, results, stride, dilation = (sizes[axis] for sizes in (source.input_size, source.output_size, source.stride, source.dilation))
    before, taps, words = source.padding_before[axis], source.filter_size[axis], (source.border or borders.NONE)[axis]
    numbers = tuple(range(taps))
    shown = borders.rows(words, n, -before, (results - 1) * stride - before + (taps - 1) * dilation + 1)

    def places(j: int) -> list[int]:
        return [j * stride - before + tap * dilation for tap in numbers]

    def moved(j: int) -> bool:
        """Whether a tap meets another pixel than the one in its place."""
        return any(place != shown[place + before] >= 0 for place in places(j))

    begin, end = 0, results
    while begin < end and moved(begin):
        begin += 1
    while end > begin and moved(end - 1):
        end -= 1
    if end > begin:
        yield _Segment(begin, end - begin, 0, n, begin * stride - before, numbers, tuple(tap * dilation for tap in numbers), True)
    for j in (*range(begin), *range(end, results)):
        met = [place if shown[place + before] < 0 else shown[place + before] for place in places(j)]
        yield _single(j, n, numbers, met)


def _single(number: int, size: int, taps: tuple[int, ...], met: list[int]) -> _Segment:
    """The segment of one result, whose taps meet these places of an axis of `size`. What lies outside of that is zero."""
    low, last = min(met), max(met)
    offsets = tuple(place - low for place in met)
    if low >= 0 and last < size:  # loads see no more than this part, so that corners are near
        return _Segment(number, 1, low, last - low + 1, 0, taps, offsets)
    return _Segment(number, 1, 0, size, low, taps, offsets)


def _gradient_segments(source: ConvProblem, axis: int) -> Iterator[_Segment]:
    """The same for the gradient by the input of a convolution without stride. The longest run of rows shown nowhere else is first."""
    n, size, dilation, taps = (sizes[axis] for sizes in (source.input_size, source.output_size, source.dilation, source.filter_size))
    before, words = source.padding_before[axis], (source.border or borders.NONE)[axis]
    places: list[list[int]] = [[pixel + before] for pixel in range(n)]
    for place, pixel in enumerate(borders.rows(words, n, -before, n + source.padding_after[axis])):
        if pixel >= 0 and place != pixel + before:
            places[pixel].append(place)
    numbers = tuple(reversed(range(taps)))  # from the first pixel that a row meets on
    offsets, reach = tuple((taps - 1 - tap) * dilation for tap in numbers), (taps - 1) * dilation
    runs: list[tuple[int, int]] = []
    for pixel in range(n):
        if len(places[pixel]) == 1:
            begun = bool(runs) and sum(runs[-1]) == pixel
            runs[-1:] = [(runs[-1][0], runs[-1][1] + 1)] if begun else [*runs[-1:], (pixel, 1)]
    main = max(runs, key=lambda run: run[1], default=None)
    for first, count in sorted(runs, key=lambda run: run != main):
        yield _Segment(first, count, 0, size, first + before - reach, numbers, offsets, (first, count) == main)
    for pixel in range(n):
        if len(places[pixel]) > 1:
            met = [(tap, place - tap * dilation) for place in places[pixel] for tap in numbers]
            met = [(tap, at) for tap, at in met if 0 <= at < size] or [(0, -1)]
            yield _single(pixel, size, tuple(tap for tap, _ in met), [at for _, at in met])


@lru_cache(maxsize=256)
def regions(source: ConvProblem) -> tuple[Region, ...] | None:
    """The regions of a forward convolution, or of the gradient by the input; None if there are too many or loads can't make one."""
    if source.direction == "wgrad" or source.border is None or near_sides(source) is None:
        return None
    gradient = source.direction == "dgrad"
    if max(source.filter_size) > MOST_TAPS or max(source.stride) > (1 if gradient else MOST_STRIDE):
        return None
    at_sides = [sum(pair) // stride for pair, stride in zip(zip(*source.border_sizes, strict=True), source.stride, strict=True)]
    if max(at_sides) > MOST_REGIONS:
        return None
    return _of_axes(source, [list((_gradient_segments if gradient else _segments)(source, axis)) for axis in range(3)])


def _added_segments(source: ConvProblem, axis: int) -> Iterator[_Segment]:
    """All results of an axis, among zeros; then each result that meets places outside, by its taps there: by others it meets zeros."""
    n, results, stride, dilation = (sizes[axis] for sizes in (source.input_size, source.output_size, source.stride, source.dilation))
    before, taps, words = source.padding_before[axis], source.filter_size[axis], (source.border or borders.NONE)[axis]
    numbers = tuple(range(taps))
    shown = borders.rows(words, n, -before, (results - 1) * stride - before + (taps - 1) * dilation + 1)
    yield _Segment(0, results, 0, n, -before, numbers, tuple(tap * dilation for tap in numbers), True)
    low = min(ceil(max(before, 0), stride), results)
    high = max(low, (n - (taps - 1) * dilation + before + stride - 1) // stride)  # from here on places lie behind the image
    for j in (*range(low), *range(high, results)):
        places = [j * stride - before + tap * dilation for tap in numbers]
        met = [-1 if 0 <= place < n else shown[place + before] for place in places]
        for end in (False, True):  # a place that wraps lies at the other end of the axis
            own = [pixel for pixel in met if pixel >= 0 and (pixel > n // 2) == end]
            if own:
                first, length = min(own), max(own) - min(own) + 1
                offsets = tuple(pixel - first if pixel in own else length for pixel in met)
                yield _Segment(j, 1, first, length, 0, numbers, offsets)


@lru_cache(maxsize=256)
def added_regions(source: ConvProblem) -> tuple[Region, ...] | None:
    """Regions whose sums of single taps add up to those of a convolution with a border: the first is that of zeros around the image."""
    if near_sides(source) is None or max(source.filter_size) > MOST_TAPS or max(source.stride) > MOST_STRIDE:
        return None
    return _of_axes(source, [list(_added_segments(source, axis)) for axis in range(3)])


def _of_axes(source: ConvProblem, axes: list[list[_Segment]]) -> tuple[Region, ...] | None:
    """The regions of all combinations of the axes' segments."""
    if math.prod(map(len, axes)) > 1 + MOST_REGIONS or any(len(one.taps) > MOST_TAPS for one in chain(*axes)):
        return None
    boxes = list(product(*axes))
    flat = source.input_size[:2] == source.output_size[:2] == source.filter_size[:2] == (1, 1)
    dims = 1 if flat else 2 if not source.has_depth else 3
    found = [_region(source, box, dims) for box in boxes]
    return None if None in found else tuple(region for region in found if region is not None)


def _region(source: ConvProblem, box: tuple[_Segment, ...], dims: int) -> Region | None:
    """The region of a box; None if tensor loads can't make it."""
    stride = size3([steps if one.size > 1 else 1 for steps, one in zip(source.stride, box, strict=True)])
    size, low, ones = size3([one.size for one in box]), size3([one.low for one in box]), (1, 1, 1)
    lowest, highest = CORNERS[dims]
    for i in range(3 - dims, 3):
        upper = low[i] + (size[i] - 1) * stride[i] - (box[i].length - 1)
        if not lowest <= low[i] <= highest or not lowest <= upper <= highest or max(box[i].offsets) > min(OFFSETS[dims], MOST_OFFSET):
            return None
    pad, taps = size3([-one.low for one in box]), size3([len(one.taps) for one in box])
    phase = Phase(size, size3([one.origin for one in box]), ones, taps, (0, 0, 0), ones, stride, pad, source.dilation)
    addressing = PhaseAddressing(phase, taps, stride, low, source.dilation, (0, 0, 0), ones, dims, False)
    numbers, offsets = ((d, h, w) for d, h, w in ([one.taps for one in box], [one.offsets for one in box]))
    interior = all(one.interior for one in box)
    return Region(addressing, size3([one.first for one in box]), size3([one.length for one in box]), numbers, offsets, interior)


def in_words(region: Region) -> dict[str, int]:
    """The arguments that say the taps' numbers and offsets: a byte for each."""
    found = {}
    for name, axes in (("numbers_", region.taps), ("offsets_", region.offsets)):
        for axis, values in zip("dhw", axes, strict=True):
            word = sum(value << 8 * tap for tap, value in enumerate(values))
            found[name + axis] = word - (1 << 64) if word >> 63 else word
    return found
