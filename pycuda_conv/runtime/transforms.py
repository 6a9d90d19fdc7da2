"""Convolutions by a library's Fourier transforms: scipy's or numpy's in the host's memory, CuPy's or torch's on a GPU.

Images are cut into blocks that overlap by the filter's reach (overlap-save). A block, or the whole image if that takes less time, is
transformed, multiplied by the conjugate of the filter's transform, and transformed back, in float64. What is made so is not the result
yet: ``cu/fft/library_fft.cu`` checks each sum by the limit of its block, finishes and stores it.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from pycuda_conv.runtime.workers import cores

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


def _at(*place: Any) -> Any:
    """An index of several axes, which Python 3.10 does not take with stars inside."""
    return place


def host_library() -> str:
    """The library that transforms in the host's memory: scipy's, which takes less time, where it is installed."""
    return "scipy.fft" if importlib.util.find_spec("scipy") else "numpy.fft"


@cache
def _library() -> Any:
    return importlib.import_module(host_library())


@cache
def _keep_heap() -> None:
    """Let the C library keep memory that is freed: it gives back what lies above twice the largest block that was ever freed, of at most 32 MiB.

    A call's arrays would come from the system anew each time, page by page, which takes as long as their transforms.
    """
    np.empty((32 << 20) - (64 << 10), np.uint8)


_pool: ThreadPoolExecutor | None = None
_pool_lock = threading.Lock()


def _after_fork() -> None:
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _threads() -> ThreadPoolExecutor:
    """Threads that transform blocks side by side."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(cores(), "pycuda_conv transforms")
        return _pool


def _values(array: np.ndarray, storage: str) -> np.ndarray:
    """Numbers that numpy can compute with: those of bfloat16 come as integers."""
    if storage != "int16":
        return array
    return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def fill(told: Transforms, x: np.ndarray, w: np.ndarray, sums: np.ndarray, limits: np.ndarray) -> None:
    """Make the sums and their limits: arrays of float64 of :attr:`Transforms.sums_shape` and :attr:`Transforms.limits_shape`.

    `x` and `w` are C-contiguous, of :attr:`Transforms.storage`.
    """

    def keep(image: int, where: tuple[slice, ...], summed: np.ndarray, limit: np.ndarray, doubts: np.ndarray | None) -> None:
        limits[_at(image, ..., *where)] = limit
        for number, to, kept in _places(told, where):
            sums[_at(image, ..., *to)] = summed[_at(slice(None), slice(None), *number, *kept)]

    _OnHost(told, x, w).run(keep)


#: The most results of a call that Python looks at one by one, and the most products of these; ``library_fft.cu`` does more of them.
MOST_MENDED, MOST_PRODUCTS = 1 << 9, 1 << 27


#: As many results of some blocks may be zero before their windows are looked at for zeros. So many numbers of blocks take less time in one
#: thread than in several.
FEW_DOUBTS, FEW_NUMBERS = 32, 1 << 18
#: Products of a row that are added before another look.
PIECE = 4096


def convolve(told: Transforms, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, y: np.ndarray) -> bool:
    """The whole convolution in the host's memory: what :func:`fill` and ``library_fft.cu`` give, in less time. `y` is float32 or float64.

    False if too many results have to be summed; then `y` is not done.
    """
    work = _OnHost(told, x, w)
    result = y.reshape(told.made_memory + told.results).transpose(*told.made_axes, *range(3, 3 + len(told.length)))
    shift = None if bias is None else bias.reshape(told.groups, told.written, *(1,) * len(told.length))
    doubtful: list[tuple[int, ...]] = []
    values: list[tuple[float, float]] = []

    def keep(image: int, where: tuple[slice, ...], summed: np.ndarray, limit: np.ndarray, doubts: np.ndarray | None) -> None:
        if doubts is not None or not limit.all():
            summed += 0.0  # no -0
        for number, to, kept in _places(told, where):
            if doubts is not None:
                for g, k, *pixel in np.argwhere(doubts[_at(slice(None), slice(None), *number, *kept)])[: MOST_MENDED + 1].tolist():
                    if len(doubtful) > MOST_MENDED:
                        return
                    doubtful.append((image, g, k, *(t.start + p for t, p in zip(to, pixel, strict=True))))
                    values.append((float(summed[_at(g, k, *number, *pixel)]), float(limit[_at(g, k, *number)])))
            place = result[_at(image, ..., *to)]
            place[...] = summed[_at(slice(None), slice(None), *number, *kept)]
            if shift is not None:
                place += shift

    work.run(keep)
    if len(doubtful) > MOST_MENDED:
        return False
    with np.errstate(all="ignore"):
        for at, (value, limit) in zip(doubtful, values, strict=True):
            if work.products > MOST_PRODUCTS:
                return False
            result[at] = work.mended(at, value, limit)
            if shift is not None:
                result[at] += shift[at[1], at[2]].item()
    return True


def _places(told: Transforms, where: tuple[slice, ...]) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...], tuple[slice, ...]]]:
    """Of each of some blocks: its number among them, its place in a plane of results, and the part of its results that lies there."""
    held = told.held
    for number in np.ndindex(*(cut.stop - cut.start for cut in where)):
        first = [(cut.start + n) * h for cut, n, h in zip(where, number, held, strict=True)]
        ends = [min(f + h, r) for f, h, r in zip(first, held, told.results, strict=True)]
        yield number, tuple(map(slice, first, ends)), tuple(slice(0, e - f) for f, e in zip(first, ends, strict=True))


class _Numpy:
    """Arrays of numpy, and transforms by scipy or numpy."""

    def __init__(self, alone: bool) -> None:
        self._fft = _library()
        self._scipy = self._fft.__name__.startswith("scipy")
        # a single transform at a time is shared by the library's own threads
        self._more = {"workers": cores()} if alone and self._scipy else {}

    permute, flip, conj_in_place = staticmethod(np.transpose), staticmethod(np.flip), staticmethod(lambda a: np.conj(a, out=a))
    real_type = np.float64

    def zeros(self, shape: tuple[int, ...]) -> Any:
        return np.zeros(shape, self.real_type)

    def windows(self, array: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """A view of `array`, which has no gaps, by strides in elements."""
        return np.lib.stride_tricks.as_strided(array, shape, tuple(n * array.itemsize for n in strides), writeable=False)

    def sum_squares(self, array: Any, axes: int) -> Any:
        """The sums of squares along the last axes of (group, channel, ...), and along the channels, in float64."""
        pixels = "ijk"[:axes]
        return np.einsum(f"gc...{pixels},gc...{pixels}->g...", array, array)

    def forward(self, numbers: Any, length: tuple[int, ...]) -> Any:
        """Axis after axis: zeros that follow along one are not transformed along another."""
        made = self._fft.rfft(numbers, length[-1], axis=-1, **self._more)
        for axis in range(-2, -len(length) - 1, -1):
            made = self._fft.fft(made, length[axis], axis=axis, **self._more, **self._in_place(made.shape[axis] == length[axis]))
        return made

    def back(self, spectrum: Any, length: tuple[int, ...], taken: tuple[slice, ...]) -> Any:
        """Axis after axis, without what is not taken along those before."""
        for axis in range(-len(length), -1):
            spectrum = self._fft.ifft(spectrum, axis=axis, **self._more, **self._in_place(True))
            spectrum = spectrum[_at(..., taken[axis], *(slice(None),) * (-axis - 1))]
        return self._fft.irfft(spectrum, length[-1], axis=-1, **self._more)[..., taken[-1]]

    def _in_place(self, possible: bool) -> dict[str, bool]:
        return {"overwrite_x": True} if possible and self._scipy else {}


class _Work:
    """The transforms of one call, by the functions of one library."""

    def __init__(self, told: Transforms, x: Any, w: Any, library: Any) -> None:
        self.told, self.library = told, library
        #: products that :meth:`mended` has summed
        self.products = 0
        spatial = range(3, 3 + len(told.length))
        self.x = library.permute(x.reshape(told.x_memory + told.size), (*told.x_axes, *spatial))
        w = library.permute(w.reshape(told.w_memory + told.taps), (*told.w_axes, *spatial))
        self.filter = library.zeros((*w.shape[:3], *told.reach))
        self.filter[_at(..., *(slice(None, None, d) for d in told.dilation))] = library.flip(w, tuple(spatial)) if told.flipped else w
        self._spectra = [self._forward(one) for one in ((self.filter, abs(self.filter)) if told.magnitudes else (self.filter,))]
        for spectrum in self._spectra:
            library.conj_in_place(spectrum)
        groups, written = self.filter.shape[:2]
        flat = self.filter.reshape(1, groups * written, 1, -1)  # (1, filters, 1, taps): of each filter, over its channels
        self._norms = library.sum_squares(library.permute(flat, (1, 0, 2, 3)), 2).reshape(groups, written) ** 0.5
        self._taken = tuple(slice(0, used, stride) for used, stride in zip(told.used, told.stride, strict=True))

    def _forward(self, numbers: Any) -> Any:
        """The spectrum of real numbers, followed by zeros up to the transforms' length along each of the last axes."""
        return self.library.forward(numbers, self.told.length)

    def _back(self, spectrum: Any) -> Any:
        """The results that are taken of each block, from its spectrum."""
        return self.library.back(spectrum, self.told.length, self._taken)

    def some(self, image: int, where: tuple[slice, ...]) -> tuple[Any, Any, Any]:
        """The sums of some blocks of an image, (group, written, blocks..., results...), their limits, and the blocks."""
        block = self._blocks(image, where)
        return *self._judged(image, block), block

    def _blocks(self, image: int, where: tuple[slice, ...]) -> Any:
        """Some blocks of an image: (group, read, blocks..., pixels...)."""
        told, library, ndim = self.told, self.library, len(self.told.length)
        parts, places, sizes = told.placed(where)
        region = library.zeros((told.groups, told.read, *sizes))
        region[_at(..., *places)] = self.x[_at(image, ..., *parts)]
        steps = [math.prod((told.groups, told.read, *sizes)[axis + 1 :]) for axis in range(2 + ndim)]
        counts = tuple(cut.stop - cut.start for cut in where)
        return library.windows(
            region, (told.groups, told.read, *counts, *told.length),
            (*steps[:2], *(step * used for step, used in zip(steps[2:], told.used, strict=True)), *steps[2:]),
        )

    def _judged(self, image: int, block: Any) -> tuple[Any, Any]:
        """The sums of blocks and their limits."""
        told, ndim = self.told, len(self.told.length)
        summed = self._product(block, self._spectra[0])
        limit = told.error * self._norms_of(image, block)[:, None] * self._norms[_at(..., *(None,) * ndim)]
        if not told.magnitudes:
            return summed, limit / told.accuracy
        error = limit[_at(..., *(None,) * ndim)]
        least = self._product(abs(block), self._spectra[1]) - error  # of the sum of magnitudes
        right = (error <= told.accuracy * least) & (abs(summed) > error)
        summed[~right & (error != 0)] = math.nan
        return summed, limit * 0

    def _norms_of(self, image: int, block: Any) -> Any:
        """The norm of each block, over the channels of a group, or a larger one."""
        return self.library.sum_squares(block, len(self.told.length)) ** 0.5

    def _product(self, block: Any, spectrum: Any) -> Any:
        told, ndim = self.told, len(self.told.length)
        of_block = self._forward(block)
        if told.read == 1:
            filters = spectrum.reshape(*spectrum.shape[:2], *(1,) * ndim, *spectrum.shape[3:])
            if told.written == 1:
                of_block *= filters
                return self._back(of_block)
            return self._back(of_block * filters)
        groups, channels, *counts = of_block.shape[: 2 + ndim]
        permute = self.library.permute
        left = permute(of_block.reshape(groups, channels, math.prod(counts), -1), (0, 3, 2, 1))  # group, frequency, block, channel
        right = permute(spectrum.reshape(groups, told.written, channels, -1), (0, 3, 2, 1))  # group, frequency, channel, written
        multiplied = permute(left @ right, (0, 3, 2, 1))
        return self._back(multiplied.reshape(groups, told.written, *counts, *of_block.shape[2 + ndim :]))


class _OnHost(_Work):
    """The transforms of one call in the host's memory."""

    def __init__(self, told: Transforms, x: np.ndarray, w: np.ndarray) -> None:
        _keep_heap()
        self.alone = told.images * math.prod(told.blocks) == 1
        with np.errstate(all="ignore"):
            super().__init__(told, _values(x, told.storage), _values(w, told.storage), _Numpy(self.alone))

    def run(self, keep: Callable[[int, tuple[slice, ...], np.ndarray, np.ndarray, np.ndarray | None], None]) -> None:
        """Call `keep` with an image's number, a box of its blocks, their sums and limits, for all of them, in several threads.

        The last argument says which results may be off; None for none.
        """
        numbers = self.told.images * math.prod((*self.told.blocks, *self.told.length)) * self.told.groups * self.told.read
        few = numbers <= FEW_NUMBERS  # which take less time than threads
        tasks = [(image, where) for image in range(self.told.images) for where in _cuts(self.told, 8 * numbers if few else AT_ONCE)]

        def done(task: tuple[int, tuple[slice, ...]]) -> None:
            with np.errstate(all="ignore"):
                summed, limit, block = self.some(*task)
                known = None
                if not np.isfinite(limit).all():
                    lost = ~np.isfinite(block)
                    if lost.any():
                        clean = np.where(lost, 0, block)
                        summed, limit = self._judged(task[0], clean)
                        known = self._mark_lost(summed, block, lost)
                keep(*task, summed, limit, self._doubts(task[1], summed, limit, block, known))

        if few or len(tasks) == 1:
            for task in tasks:
                done(task)
        else:
            for _ in _threads().map(done, tasks):
                pass

    def _near(self, there: np.ndarray) -> np.ndarray:
        """Of each result, whether a pixel of its window is `there`: (group, blocks..., pixels...) in, results out."""
        told, ndim = self.told, len(self.told.length)
        for axis, (reach, used, stride) in enumerate(zip(told.reach, told.used, told.stride, strict=True), there.ndim - ndim):
            counts = np.cumsum(there, axis, np.int32)
            ends = [np.take(counts, np.arange(first, first + used, stride), axis) for first in (0, reach - 1)]
            there = (ends[1] > ends[0]) | np.take(there, np.arange(0, used, stride), axis)
        return there

    def _mark_lost(self, summed: np.ndarray, block: np.ndarray, lost: np.ndarray) -> np.ndarray | None:
        """Put NaN where a window has Inf or NaN: such results are summed. If all are known to be NaN, this gives their mask."""
        told = self.told
        near = np.broadcast_to(self._near(np.any(lost, 1))[:, None], summed.shape)
        summed[near] = np.nan
        all_met = max(told.dilation) == max(told.apart) == 1  # each pixel of the window is multiplied, and NaN times 0 is NaN
        return near if all_met and not np.isinf(block).any() else None

    def _doubts(
        self, where: tuple[slice, ...], summed: np.ndarray, limit: np.ndarray, block: np.ndarray, known: np.ndarray | None
    ) -> np.ndarray | None:
        """Which results may be off; None for none. Where many may be zero, they become -0 if their windows have nothing but zeros."""
        told, ndim = self.told, len(self.told.length)
        of_pixels = limit[_at(..., *(None,) * ndim)]
        doubts = abs(summed) >= of_pixels
        if doubts.all():
            return None
        np.logical_not(doubts, out=doubts)
        for axis, (cut, count, held, results) in enumerate(zip(where, told.blocks, told.held, told.results, strict=True), 2):
            if cut.stop == count and count * held > results:  # what lies behind the last result is not kept
                behind: list[Any] = [slice(None)] * doubts.ndim
                behind[axis], behind[axis + ndim] = -1, slice(results - count * held, None)
                doubts[tuple(behind)] = False
        if known is not None:
            doubts &= ~known
        unsure = ~(abs(summed[doubts]) > self.told.accuracy * np.broadcast_to(of_pixels, summed.shape)[doubts])
        if np.count_nonzero(unsure) >= FEW_DOUBTS:
            nothing = ~self._near(np.any(block != 0, 1))[:, None] & np.isfinite(of_pixels)  # a filter's Inf times 0 is NaN
            nothing = np.broadcast_to(nothing, summed.shape)
            summed[nothing] = -0.0
            doubts &= ~nothing
        return doubts

    def mended(self, at: tuple[int, ...], value: float, limit: float) -> float:
        """A result that a transform may not have right: it is that, if the sum of its products' magnitudes shows it; else their sum."""
        told, (image, g, k, *pixel) = self.told, at
        unsure = not abs(value) > limit * told.accuracy
        taps, pixels = [], []
        for p, stride, first, size, apart, reach in zip(
            pixel, told.stride, told.first, told.size, told.apart, told.reach, strict=True
        ):
            start = p * stride + first
            low = max(0, -(-start // apart))
            high = max(low, min(size, (start + reach - 1) // apart + 1))
            pixels.append(slice(low, high))
            taps.append(slice(low * apart - start, (high - 1) * apart - start + 1, apart) if high > low else slice(0, 0))
        window, filter = self.x[_at(image, g, slice(None), *pixels)], self.filter[_at(g, k, slice(None), *taps)]
        if unsure or value != value:
            self.products += window.size
            return float((window.astype(np.float64) * filter).sum())
        total = magnitude = 0.0
        for row in np.ndindex(*window.shape[:-1]):
            for first in range(0, window.shape[-1], PIECE):
                some = slice(first, first + PIECE)
                products = window[row][some].astype(np.float64) * filter[row][some]
                self.products += products.size
                total += float(products.sum())
                magnitude += float(abs(products).sum())
                if magnitude >= limit:
                    return value
        return total


def _cuts(told: Transforms, at_once: int) -> Iterator[tuple[slice, ...]]:
    """The blocks of an image, in boxes of about `at_once` bytes."""
    each = 8 * math.prod(told.length) * told.groups * max(told.read, told.written)
    fit = max(1, at_once // each)
    box = list(told.blocks)
    for axis in range(len(box)):
        while box[axis] > 1 and math.prod(box) > fit:
            box[axis] = -(-box[axis] // 2)
    for start in np.ndindex(*(-(-n // b) for n, b in zip(told.blocks, box, strict=True))):
        yield tuple(slice(i * b, min((i + 1) * b, n)) for i, b, n in zip(start, box, told.blocks, strict=True))


# ---- on a GPU


@cache
def gpu_library() -> str:
    """The library that transforms on a GPU: torch's or CuPy's, the one that is in use or else one that is installed; "" for none."""
    names = ("torch", "cupy")
    for name in (*(one for one in names if one in sys.modules), *names):
        if name in sys.modules or importlib.util.find_spec(name):
            try:
                module = importlib.import_module(name)
                there = module.cuda.is_available()
            except Exception:  # installed, but broken
                continue
            if there:
                return name
    return ""


class _Memory:
    """Memory of a GPU as other libraries take it."""

    def __init__(self, address: int, shape: tuple[int, ...], kind: str) -> None:
        self.__cuda_array_interface__ = {"shape": shape, "typestr": kind, "data": (address, False), "version": 3}


class _Torch:
    """Tensors of torch on one device."""

    def __init__(self, device: Any, single: bool) -> None:
        self.torch, self.device = importlib.import_module("torch"), device
        self.real_type = self.torch.float32 if single else self.torch.float64

    def permute(self, array: Any, axes: Any) -> Any:
        return array.permute(tuple(axes))

    def flip(self, array: Any, axes: Any) -> Any:
        return array.flip(tuple(axes))

    def conj_in_place(self, array: Any) -> None:
        array.imag.neg_()

    def zeros(self, shape: tuple[int, ...]) -> Any:
        return self.torch.zeros(shape, dtype=self.real_type, device=self.device)

    def windows(self, array: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        return array.as_strided(shape, strides)

    def sum_squares(self, array: Any, axes: int) -> Any:
        return self.torch.linalg.vector_norm(array, dim=(1, *range(-axes, 0)), dtype=self.torch.float64).square()

    def forward(self, numbers: Any, length: tuple[int, ...]) -> Any:
        return self.torch.fft.rfftn(numbers, length, tuple(range(-len(length), 0)))

    def back(self, spectrum: Any, length: tuple[int, ...], taken: tuple[slice, ...]) -> Any:
        return self.torch.fft.irfftn(spectrum, length, tuple(range(-len(length), 0)))[_at(..., *taken)]

    def at(self, address: int, shape: tuple[int, ...], storage: str) -> Any:
        """The array at an address."""
        kind = {"int16": "<i2", "float16": "<f2", "float32": "<f4", "float64": "<f8"}[storage]
        found = self.torch.as_tensor(_Memory(address, shape, kind), device=self.device)
        return found.view(self.torch.bfloat16) if storage == "int16" else found

    def on(self, stream: int) -> Any:
        """A block in which work goes to a stream."""
        cuda = self.torch.cuda
        return cuda.stream(cuda.ExternalStream(stream, device=self.device) if stream else cuda.default_stream(self.device))


class _CuPy:
    """Arrays of CuPy on the current device."""

    def __init__(self, device: Any, single: bool) -> None:
        self.cupy = importlib.import_module("cupy")
        self.real_type = np.float32 if single else np.float64

    def permute(self, array: Any, axes: Any) -> Any:
        return array.transpose(tuple(axes))

    def flip(self, array: Any, axes: Any) -> Any:
        return self.cupy.flip(array, tuple(axes))

    def conj_in_place(self, array: Any) -> None:
        self.cupy.conj(array, out=array)

    def zeros(self, shape: tuple[int, ...]) -> Any:
        return self.cupy.zeros(shape, self.real_type)

    def windows(self, array: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        return self.cupy.lib.stride_tricks.as_strided(array, shape, tuple(n * array.itemsize for n in strides))

    def sum_squares(self, array: Any, axes: int) -> Any:
        flat = array.astype(np.float64).reshape(*array.shape[:-axes], -1)
        return (flat * flat).sum(-1).sum(1)

    def forward(self, numbers: Any, length: tuple[int, ...]) -> Any:
        return self.cupy.fft.rfftn(numbers, length, tuple(range(-len(length), 0)))

    def back(self, spectrum: Any, length: tuple[int, ...], taken: tuple[slice, ...]) -> Any:
        return self.cupy.fft.irfftn(spectrum, length, tuple(range(-len(length), 0)))[_at(..., *taken)]

    def at(self, address: int, shape: tuple[int, ...], storage: str) -> Any:
        memory = self.cupy.cuda.MemoryPointer(self.cupy.cuda.UnownedMemory(address, 0, None), 0)
        found = self.cupy.ndarray(shape, np.uint16 if storage == "int16" else np.dtype(storage), memory)
        return (found.astype(np.uint32) << 16).view(np.float32) if storage == "int16" else found

    def on(self, stream: int) -> Any:
        return self.cupy.cuda.ExternalStream(stream)


def fill_on_gpu(told: Transforms, name: str, ordinal: int, addresses: tuple[int, int, int, int], stream: int) -> None:
    """Make the sums and their limits on the GPU `ordinal`, on a stream, by the library `name`; x, w, sums and limits lie at `addresses`."""
    library = _Torch(f"cuda:{ordinal}", told.single) if name == "torch" else _CuPy(ordinal, told.single)
    with library.on(stream):
        x_at, w_at, sums_at, limits_at = addresses
        x = library.at(x_at, (math.prod(told.x_memory + told.size),), told.storage)
        w = library.at(w_at, (math.prod(told.w_memory + told.taps),), told.storage)
        fill_by(told, library, x, w, library.at(sums_at, told.sums_shape, "float64"), library.at(limits_at, told.limits_shape, "float64"))


class _OnGpu(_Work):
    """The transforms of one call on a GPU, where each pass over an array counts: a block's norm is taken to be that of the image."""

    def _norms_of(self, image: int, block: Any) -> Any:
        ndim = len(self.told.length)
        norms = self.library.sum_squares(self.x[image], ndim) ** 0.5
        return norms[_at(slice(None), *(None,) * ndim)]


def fill_by(told: Transforms, library: Any, x: Any, w: Any, sums: Any, limits: Any) -> None:
    """:func:`fill` by arrays of a library, in the launches' order."""
    work, ndim = _OnGpu(told, x, w, library), len(told.length)
    for image in range(told.images):
        for where in _cuts(told, AT_ONCE_ON_GPU):
            summed, limit, _ = work.some(image, where)
            limits[_at(image, ..., *where)] = limit
            # blocks side by side: (group, written, block, result, block, result)
            order = [0, 1, *(axis for i in range(ndim) for axis in (2 + i, 2 + ndim + i))]
            counts = [cut.stop - cut.start for cut in where]
            sizes = [n * h for n, h in zip(counts, told.held, strict=True)]
            joined = library.permute(summed, order).reshape(told.groups, told.written, *sizes)
            first = [cut.start * h for cut, h in zip(where, told.held, strict=True)]
            ends = [min(f + n, r) for f, n, r in zip(first, joined.shape[2:], told.results, strict=True)]
            place = (image, ..., *map(slice, first, ends))
            sums[place] = joined[_at(..., *(slice(0, e - f) for f, e in zip(first, ends, strict=True)))]


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
