"""Convolutions by a library's Fourier transforms: scipy's or numpy's in the host's memory, CuPy's or torch's on a GPU.

Images are cut into blocks that overlap by the filter's reach (overlap-save). A block, or the whole image if that takes less time, is
transformed, multiplied by the conjugate of the filter's transform, and transformed back, in float64. What is made so is not the result
yet: ``cu/fft/library_fft.cu`` checks each sum by the limit of its block, finishes and stores it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

#: The error of an element is at most this, times the rounding error of float64, log2 of a transform's length, and the norms of both
#: operands. A fifth of it is the most that was seen, with images and filters of eight kinds, and lengths of 64 to 2^20.
ERROR = 1.0
UNIT = 2.0**-53
#: Bytes of the blocks that a thread of the host takes at once, and the most of a GPU's workspace of transforms.
AT_ONCE, AT_ONCE_ON_GPU = 512 << 10, 512 << 20


@dataclass(frozen=True)
class Transforms:
    """How a convolution is made of transforms. Tuples have a number for each spatial axis of :attr:`axes`.

    Attributes
    ----------
    images, groups, read, written : int
        Images; groups; channels of a group that are read and written.
    x_memory, w_memory, made_memory : tuple of int
        The sizes of the first three axes of what is read, of the filter and of the result, as they lie in memory.
    x_axes, w_axes, made_axes : (int, int, int)
        Where the axes (image, group, channel) are among these; the filter's (group, written, read); the result's (image, group, channel).
    size, taps, results : tuple of int
        Pixels of an image, taps, and results.
    apart : tuple of int
        Pixels lie so far apart among zeros: the stride of a transposed convolution.
    dilation, stride : tuple of int
    flipped : bool
        Whether result h meets tap r at pixel first + h + taps - 1 - r, instead of first + h + r.
    first : tuple of int
        The pixel that the first tap of the first result meets, in pixels that lie apart.
    length, used, blocks : tuple of int
        The length of a transform, the results that it gives, a multiple of the stride, and the number of blocks.
    accuracy : float
        A result is right if its error is at most this, times the sum of its products' magnitudes.
    magnitudes : bool
        Whether these sums are computed too, by transforms: else ``library_fft.cu`` compares.
    storage : str
        The operands' type in numpy: ``"int16"`` for bfloat16.
    single : bool
        Whether the transforms are float32, whose results are taken as they are.
    """

    images: int
    groups: int
    read: int
    written: int
    x_memory: tuple[int, ...]
    x_axes: tuple[int, int, int]
    w_memory: tuple[int, ...]
    w_axes: tuple[int, int, int]
    made_memory: tuple[int, ...]
    made_axes: tuple[int, int, int]
    size: tuple[int, ...]
    taps: tuple[int, ...]
    results: tuple[int, ...]
    apart: tuple[int, ...]
    dilation: tuple[int, ...]
    stride: tuple[int, ...]
    flipped: bool
    first: tuple[int, ...]
    length: tuple[int, ...]
    used: tuple[int, ...]
    blocks: tuple[int, ...]
    accuracy: float
    magnitudes: bool
    storage: str = "float32"
    single: bool = False

    @property
    def sums_shape(self) -> tuple[int, ...]:
        """The shape of the sums: (images, groups, written, results...)."""
        return self.images, self.groups, self.written, *self.results

    @property
    def limits_shape(self) -> tuple[int, ...]:
        """The shape of the limits: (images, groups, written, blocks...)."""
        return self.images, self.groups, self.written, *self.blocks

    @property
    def held(self) -> tuple[int, ...]:
        """The results of a block that are kept, where a stride skips others."""
        return tuple(used // stride for used, stride in zip(self.used, self.stride, strict=True))

    def placed(self, where: tuple[slice, ...]) -> tuple[tuple[slice, ...], tuple[slice, ...], tuple[int, ...]]:
        """For a box of blocks: the part of an image that they read, its place in the region that they cover, and that one's size."""
        parts, places, sizes = [], [], []
        for n, a, origin, length, used, cut in zip(self.size, self.apart, self.first, self.length, self.used, where, strict=True):
            first, size = origin + cut.start * used, (cut.stop - cut.start - 1) * used + length
            low = max(0, -(-first // a))  # the first pixel at or behind `first`
            high = max(min(n, (size - 1 + first) // a + 1), low)
            parts.append(slice(low, high))
            start = low * a - first
            places.append(slice(start, start + (high - low - 1) * a + 1, a) if high > low else slice(0, 0))
            sizes.append(size)
        return tuple(parts), tuple(places), tuple(sizes)

    @property
    def reach(self) -> tuple[int, ...]:
        """The pixels from a filter's first tap to its last."""
        return tuple(d * (r - 1) + 1 for r, d in zip(self.taps, self.dilation, strict=True))

    @property
    def error(self) -> float:
        """The factor of the norms in the bound of an element's error."""
        return ERROR * (2.0**-24 if self.single else UNIT) * max(math.log2(math.prod(self.length)), 1.0)


def index(*place: Any) -> Any:
    """An index of several axes, which Python 3.10 does not take with stars inside."""
    return place


def result_places(args: Transforms, where: tuple[slice, ...]) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...], tuple[slice, ...]]]:
    """Of each of some blocks: its number among them, its place in a plane of results, and the part of its results that lies there."""
    held = args.held
    for number in np.ndindex(*(cut.stop - cut.start for cut in where)):
        first = [(cut.start + n) * h for cut, n, h in zip(where, number, held, strict=True)]
        ends = [min(f + h, r) for f, h, r in zip(first, held, args.results, strict=True)]
        yield number, tuple(map(slice, first, ends)), tuple(slice(0, e - f) for f, e in zip(first, ends, strict=True))


class BlockTransforms:
    """The transforms of one call, by the functions of one library."""

    def __init__(self, args: Transforms, x: Any, w: Any, library: Any) -> None:
        self.args, self.library = args, library
        #: products that :meth:`summed_again` has summed
        self.products = 0
        spatial = range(3, 3 + len(args.length))
        self.x = library.permute(x.reshape(args.x_memory + args.size), (*args.x_axes, *spatial))
        w = library.permute(w.reshape(args.w_memory + args.taps), (*args.w_axes, *spatial))
        self.filter = library.zeros((*w.shape[:3], *args.reach))
        self.filter[index(..., *(slice(None, None, d) for d in args.dilation))] = library.flip(w, tuple(spatial)) if args.flipped else w
        self._spectra = [self._forward(one) for one in ((self.filter, abs(self.filter)) if args.magnitudes else (self.filter,))]
        for spectrum in self._spectra:
            library.conj_in_place(spectrum)
        groups, written = self.filter.shape[:2]
        flat = self.filter.reshape(1, groups * written, 1, -1)  # (1, filters, 1, taps): of each filter, over its channels
        self._norms = library.sum_squares(library.permute(flat, (1, 0, 2, 3)), 2).reshape(groups, written) ** 0.5
        self._taken = tuple(slice(0, used, stride) for used, stride in zip(args.used, args.stride, strict=True))

    def _forward(self, numbers: Any) -> Any:
        """The spectrum of real numbers, followed by zeros up to the transforms' length along each of the last axes."""
        return self.library.forward(numbers, self.args.length)

    def _back(self, spectrum: Any) -> Any:
        """The results that are taken of each block, from its spectrum."""
        return self.library.back(spectrum, self.args.length, self._taken)

    def some(self, image: int, where: tuple[slice, ...]) -> tuple[Any, Any, Any]:
        """The sums of some blocks of an image, (group, written, blocks..., results...), their limits, and the blocks."""
        block = self._blocks(image, where)
        return *self._judged(image, block), block

    def _blocks(self, image: int, where: tuple[slice, ...]) -> Any:
        """Some blocks of an image: (group, read, blocks..., pixels...)."""
        args, library, ndim = self.args, self.library, len(self.args.length)
        parts, places, sizes = args.placed(where)
        region = library.zeros((args.groups, args.read, *sizes))
        region[index(..., *places)] = self.x[index(image, ..., *parts)]
        steps = [math.prod((args.groups, args.read, *sizes)[axis + 1 :]) for axis in range(2 + ndim)]
        counts = tuple(cut.stop - cut.start for cut in where)
        return library.windows(
            region, (args.groups, args.read, *counts, *args.length),
            (*steps[:2], *(step * used for step, used in zip(steps[2:], args.used, strict=True)), *steps[2:]),
        )

    def _judged(self, image: int, block: Any) -> tuple[Any, Any]:
        """The sums of blocks and their limits."""
        args, ndim = self.args, len(self.args.length)
        summed = self._product(block, self._spectra[0])
        limit = args.error * self._norms_of(image, block)[:, None] * self._norms[index(..., *(None,) * ndim)]
        if not args.magnitudes:
            return summed, limit / args.accuracy
        error = limit[index(..., *(None,) * ndim)]
        least = self._product(abs(block), self._spectra[1]) - error  # of the sum of magnitudes
        right = (error <= args.accuracy * least) & (abs(summed) > error)
        summed[~right & (error != 0)] = math.nan
        return summed, limit * 0

    def _norms_of(self, image: int, block: Any) -> Any:
        """The norm of each block, over the channels of a group, or a larger one."""
        return self.library.sum_squares(block, len(self.args.length)) ** 0.5

    def _product(self, block: Any, spectrum: Any) -> Any:
        args, ndim = self.args, len(self.args.length)
        of_block = self._forward(block)
        if args.read == 1:
            filters = spectrum.reshape(*spectrum.shape[:2], *(1,) * ndim, *spectrum.shape[3:])
            if args.written == 1:
                of_block *= filters
                return self._back(of_block)
            return self._back(of_block * filters)
        groups, channels, *counts = of_block.shape[: 2 + ndim]
        permute = self.library.permute
        left = permute(of_block.reshape(groups, channels, math.prod(counts), -1), (0, 3, 2, 1))  # group, frequency, block, channel
        right = permute(spectrum.reshape(groups, args.written, channels, -1), (0, 3, 2, 1))  # group, frequency, channel, written
        multiplied = permute(left @ right, (0, 3, 2, 1))
        return self._back(multiplied.reshape(groups, args.written, *counts, *of_block.shape[2 + ndim :]))


def groups_of_blocks(args: Transforms, at_once: int) -> Iterator[tuple[slice, ...]]:
    """The blocks of an image, in boxes of about `at_once` bytes."""
    each = 8 * math.prod(args.length) * args.groups * max(args.read, args.written)
    fit = max(1, at_once // each)
    box = list(args.blocks)
    for axis in range(len(box)):
        while box[axis] > 1 and math.prod(box) > fit:
            box[axis] = -(-box[axis] // 2)
    for start in np.ndindex(*(-(-n // b) for n, b in zip(args.blocks, box, strict=True))):
        yield tuple(slice(i * b, min((i + 1) * b, n)) for i, b, n in zip(start, box, args.blocks, strict=True))


# ---- lengths


@lru_cache(maxsize=4096)
def good_length(least: int) -> int:
    """The smallest number of at least `least` without a factor above 5, of which transforms take little time; even where it is above 16."""
    best = 1 << (max(least, 1) - 1).bit_length()
    fives = 1
    while fives < best:
        threes = fives
        while threes < best:
            number = threes << max(0, (-(-least // threes) - 1).bit_length())
            if least <= number < best and (number % 2 == 0 or number <= 16):
                best = number
            threes *= 3
        fives *= 5
    return best
