"""Regions of a convolution of channels-last arrays with a border of the image's own pixels, for ``cu/hopper/dense.cu``.

Tensor loads fill the places outside of an image with zeros. So the result is cut into regions: the interior, whose taps meet the image (or
zeros) alone, and at each side single rows, columns and slices, whose taps meet other pixels instead. A load may have any offset for each
tap, so a region's taps simply have the offsets of the pixels that they show, and each region sums in the order of the interior.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from pycuda_conv import borders
from pycuda_conv.engines.addressing import CORNERS, MOST_STRIDE, OFFSETS, PhaseAddressing, size3
from pycuda_conv.engines.geometry import Phase, near_sides
from pycuda_conv.problem import ConvProblem, Size3

MOST_TAPS = 8  # along an axis: each has a byte of a word
MOST_REGIONS = 24  # beside the interior


@dataclass(frozen=True)
class Region:
    """A box of the result.

    Attributes
    ----------
    addressing : PhaseAddressing
        Its size and origin; the pixel of the part of the image that the loads see at which tap offsets of 0 begin.
    first, length : (int, int, int)
        That part of the image.
    offsets : (tuple of int, tuple of int, tuple of int)
        Along each axis the offset of each tap.
    interior : bool
        Whether its taps lie as they do without a border.
    """

    addressing: PhaseAddressing
    first: Size3
    length: Size3
    offsets: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    interior: bool


@dataclass(frozen=True)
class _Segment:
    """Neighbouring results of an axis whose taps have equal offsets: the first and their number, the part of the image, and the start in it."""

    origin: int
    size: int
    first: int
    length: int
    low: int
    offsets: tuple[int, ...]
    interior: bool = False


def _segments(source: ConvProblem, axis: int) -> Iterator[_Segment]:
    """The segments of an axis, the interior first; those of one result each follow."""
    n, results, stride, dilation = (sizes[axis] for sizes in (source.input_size, source.output_size, source.stride, source.dilation))
    before, taps, words = source.padding_before[axis], source.filter_size[axis], (source.border or borders.NONE)[axis]
    shown = borders.rows(words, n, -before, (results - 1) * stride - before + (taps - 1) * dilation + 1)

    def places(j: int) -> list[int]:
        return [j * stride - before + tap * dilation for tap in range(taps)]

    def moved(j: int) -> bool:
        """Whether a tap meets another pixel than the one in its place."""
        return any(place != shown[place + before] >= 0 for place in places(j))

    begin, end = 0, results
    while begin < end and moved(begin):
        begin += 1
    while end > begin and moved(end - 1):
        end -= 1
    if end > begin:
        yield _Segment(begin, end - begin, 0, n, begin * stride - before, tuple(tap * dilation for tap in range(taps)), True)
    for j in (*range(begin), *range(end, results)):
        met = [place if shown[place + before] < 0 else shown[place + before] for place in places(j)]
        low, last = min(met), max(met)
        offsets = tuple(pixel - low for pixel in met)
        inside = low >= 0 and last < n
        yield _Segment(j, 1, low, last - low + 1, 0, offsets) if inside else _Segment(j, 1, 0, n, low, offsets)


@lru_cache(maxsize=256)
def regions(source: ConvProblem) -> tuple[Region, ...] | None:
    """The regions of a forward convolution, the interior first if there is one; None if there are too many or loads can't make one."""
    if source.direction != "fprop" or source.border is None or near_sides(source) is None:
        return None
    if max(source.filter_size) > MOST_TAPS or max(source.stride) > MOST_STRIDE:
        return None
    # of the results at a side few enough for a launch
    at_sides = [sum(pair) // stride for pair, stride in zip(zip(*source.border_sizes, strict=True), source.stride, strict=True)]
    if max(at_sides) > MOST_REGIONS:
        return None
    axes = [list(_segments(source, axis)) for axis in range(3)]
    boxes = list(product(*axes))
    if len(boxes) > 1 + MOST_REGIONS:
        return None
    flat = source.input_size[:2] == (1, 1) and source.filter_size[:2] == (1, 1)
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
        if not lowest <= low[i] <= highest or not lowest <= upper <= highest or max(box[i].offsets) > min(OFFSETS[dims], 255):
            return None
    pad = size3([-one.low for one in box])
    phase = Phase(size, size3([one.origin for one in box]), ones, source.filter_size, (0, 0, 0), ones, stride, pad, source.dilation)
    addressing = PhaseAddressing(phase, source.filter_size, stride, low, source.dilation, (0, 0, 0), ones, dims, False)
    d, h, w = (one.offsets for one in box)
    return Region(addressing, size3([one.first for one in box]), size3([one.length for one in box]), (d, h, w), all(one.interior for one in box))


def offsets_in_words(region: Region) -> dict[str, int]:
    """The arguments that say the taps' offsets: a byte for each."""
    found = {}
    for axis, offsets in zip("dhw", region.offsets, strict=True):
        word = sum(offset << 8 * tap for tap, offset in enumerate(offsets))
        found[f"offsets_{axis}"] = word - (1 << 64) if word >> 63 else word
    return found
