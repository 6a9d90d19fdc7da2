"""Transforms in the host's memory, by scipy or numpy."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np

from pycuda_conv.runtime.transforms import AT_ONCE, BlockTransforms, Transforms, groups_of_blocks, index, result_places
from pycuda_conv.runtime.workers import cores


def host_library() -> str:
    """The library that transforms in the host's memory: scipy's, which takes less time, where it is installed."""
    return "scipy.fft" if importlib.util.find_spec("scipy") else "numpy.fft"


@cache
def _library() -> Any:
    return importlib.import_module(host_library())


@cache
def _keep_heap() -> None:
    """Let the C library keep memory that is freed.

    It gives back what lies above twice the largest block that was ever freed, of at most 32 MiB. A call's arrays would come from the
    system anew each time, page by page, which takes as long as their transforms.
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


def fill(args: Transforms, x: np.ndarray, w: np.ndarray, sums: np.ndarray, limits: np.ndarray) -> None:
    """Make the sums and their limits: arrays of float64 of :attr:`Transforms.sums_shape` and :attr:`Transforms.limits_shape`.

    `x` and `w` are C-contiguous, of :attr:`Transforms.storage`.
    """

    def keep(image: int, where: tuple[slice, ...], summed: np.ndarray, limit: np.ndarray, doubts: np.ndarray | None) -> None:
        limits[index(image, ..., *where)] = limit
        for number, to, kept in result_places(args, where):
            sums[index(image, ..., *to)] = summed[index(slice(None), slice(None), *number, *kept)]

    _OnHost(args, x, w).run(keep)


#: The most results of a call that Python looks at one by one, and the most products of these; ``library_fft.cu`` does more of them.
MOST_SUMMED, MOST_PRODUCTS = 1 << 9, 1 << 27

#: As many results of some blocks may be zero before their windows are looked at for zeros. So many numbers of blocks take less time in one
#: thread than in several.
FEW_DOUBTS, FEW_NUMBERS = 32, 1 << 18
#: Products of a row that are added before another look.
PIECE = 4096


def convolve(args: Transforms, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, y: np.ndarray) -> bool:
    """The whole convolution in the host's memory: what :func:`fill` and ``library_fft.cu`` give, in less time. `y` is float32 or float64.

    False if too many results have to be summed; then `y` is not done.
    """
    work = _OnHost(args, x, w)
    result = y.reshape(args.made_memory + args.results).transpose(*args.made_axes, *range(3, 3 + len(args.length)))
    shift = None if bias is None else bias.reshape(args.groups, args.written, *(1,) * len(args.length))
    doubtful: list[tuple[int, ...]] = []
    values: list[tuple[float, float]] = []

    def keep(image: int, where: tuple[slice, ...], summed: np.ndarray, limit: np.ndarray, doubts: np.ndarray | None) -> None:
        if doubts is not None or not limit.all():
            summed += 0.0  # no -0
        for number, to, kept in result_places(args, where):
            if doubts is not None:
                for g, k, *pixel in np.argwhere(doubts[index(slice(None), slice(None), *number, *kept)])[: MOST_SUMMED + 1].tolist():
                    if len(doubtful) > MOST_SUMMED:
                        return
                    doubtful.append((image, g, k, *(t.start + p for t, p in zip(to, pixel, strict=True))))
                    values.append((float(summed[index(g, k, *number, *pixel)]), float(limit[index(g, k, *number)])))
            place = result[index(image, ..., *to)]
            place[...] = summed[index(slice(None), slice(None), *number, *kept)]
            if shift is not None:
                place += shift

    work.run(keep)
    if len(doubtful) > MOST_SUMMED:
        return False
    with np.errstate(all="ignore"):
        for at, (value, limit) in zip(doubtful, values, strict=True):
            if work.products > MOST_PRODUCTS:
                return False
            result[at] = work.summed_again(at, value, limit)
            if shift is not None:
                result[at] += shift[at[1], at[2]].item()
    return True


def _met(start: int, size: int, apart: int, taps: int, dilation: int) -> range:
    """The taps along an axis that meet pixels, if the first is at `start` among pixels that lie `apart`."""
    step = apart // math.gcd(apart, dilation)
    first = next((tap for tap in range(step) if (start + tap * dilation) % apart == 0), taps)
    first += max(0, -(-(-start - first * dilation) // (dilation * step))) * step  # the first one at or behind pixel 0
    count = min(taps - 1, ((size - 1) * apart - start) // dilation) - first
    return range(first, first + (count // step + 1) * step, step) if count >= 0 else range(0, 0, step)


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
            spectrum = spectrum[index(..., taken[axis], *(slice(None),) * (-axis - 1))]
        return self._fft.irfft(spectrum, length[-1], axis=-1, **self._more)[..., taken[-1]]

    def _in_place(self, possible: bool) -> dict[str, bool]:
        return {"overwrite_x": True} if possible and self._scipy else {}


class _OnHost(BlockTransforms):
    """The transforms of one call in the host's memory."""

    def __init__(self, args: Transforms, x: np.ndarray, w: np.ndarray) -> None:
        _keep_heap()
        self.alone = args.images * math.prod(args.blocks) == 1
        with np.errstate(all="ignore"):
            super().__init__(args, _values(x, args.storage), _values(w, args.storage), _Numpy(self.alone))

    def run(self, keep: Callable[[int, tuple[slice, ...], np.ndarray, np.ndarray, np.ndarray | None], None]) -> None:
        """Call `keep` with an image's number, a box of its blocks, their sums and limits, for all of them, in several threads.

        The last argument says which results may be off; None for none.
        """
        numbers = self.args.images * math.prod((*self.args.blocks, *self.args.length)) * self.args.groups * self.args.read
        few = numbers <= FEW_NUMBERS  # which take less time than threads
        at_once = 8 * numbers if few else AT_ONCE
        tasks = [(image, where) for image in range(self.args.images) for where in groups_of_blocks(self.args, at_once)]

        def done(task: tuple[int, tuple[slice, ...]]) -> None:
            with np.errstate(all="ignore"):
                summed, limit, block = self.some(*task)
                known, lost = None, None
                if not np.isfinite(limit).all():
                    lost = ~np.isfinite(block)
                    if lost.any():
                        clean = np.where(lost, 0, block)
                        summed, limit = self._judged(task[0], clean)
                        known = self._mark_lost(summed, block, lost)
                as_it_is = lost is None and math.isinf(self.args.accuracy)
                keep(*task, summed, limit, None if as_it_is else self._doubts(task[1], summed, limit, block, known))

        if few or len(tasks) == 1:
            for task in tasks:
                done(task)
        else:
            for _ in _threads().map(done, tasks):
                pass

    def _near(self, there: np.ndarray) -> np.ndarray:
        """Of each result, whether a pixel of its window is `there`: (group, blocks..., pixels...) in, results out."""
        args, ndim = self.args, len(self.args.length)
        for axis, (reach, used, stride) in enumerate(zip(args.reach, args.used, args.stride, strict=True), there.ndim - ndim):
            counts = np.cumsum(there, axis, np.int32)
            # a window that goes on at the block's start meets zeros there
            ends = [np.take(counts, np.arange(first, first + used, stride), axis, mode="clip") for first in (0, reach - 1)]
            there = (ends[1] > ends[0]) | np.take(there, np.arange(0, used, stride), axis)
        return there

    def _mark_lost(self, summed: np.ndarray, block: np.ndarray, lost: np.ndarray) -> np.ndarray | None:
        """Put NaN where a window has Inf or NaN: such results are summed. If all are known to be NaN, this gives their mask."""
        args = self.args
        near = np.broadcast_to(self._near(np.any(lost, 1))[:, None], summed.shape)
        summed[near] = np.nan
        all_met = max(args.dilation) == max(args.apart) == 1  # each pixel of the window is multiplied, and NaN times 0 is NaN
        return near if all_met and not np.isinf(block).any() else None

    def _doubts(
        self, where: tuple[slice, ...], summed: np.ndarray, limit: np.ndarray, block: np.ndarray, known: np.ndarray | None
    ) -> np.ndarray | None:
        """Which results may be off; None for none. Where many may be zero, they become -0 if their windows have nothing but zeros."""
        args, ndim = self.args, len(self.args.length)
        of_pixels = limit[index(..., *(None,) * ndim)]
        doubts = abs(summed) >= of_pixels
        if doubts.all():
            return None
        np.logical_not(doubts, out=doubts)
        for axis, (cut, count, held, results) in enumerate(zip(where, args.blocks, args.held, args.results, strict=True), 2):
            if cut.stop == count and count * held > results:  # what lies behind the last result is not kept
                behind: list[Any] = [slice(None)] * doubts.ndim
                behind[axis], behind[axis + ndim] = -1, slice(results - count * held, None)
                doubts[tuple(behind)] = False
        if known is not None:
            doubts &= ~known
        unsure = ~(abs(summed[doubts]) > self.args.accuracy * np.broadcast_to(of_pixels, summed.shape)[doubts])
        if np.count_nonzero(unsure) >= FEW_DOUBTS:
            nothing = ~self._near(np.any(block != 0, 1))[:, None] & np.isfinite(of_pixels)  # a filter's Inf times 0 is NaN
            nothing = np.broadcast_to(nothing, summed.shape)
            summed[nothing] = -0.0
            doubts &= ~nothing
        return doubts

    def summed_again(self, at: tuple[int, ...], value: float, limit: float) -> float:
        """A result that a transform may not have right: it is that, if the sum of its products' magnitudes shows it; else their sum."""
        args, (image, g, k, *pixel) = self.args, at
        unsure = not abs(value) > limit * args.accuracy
        taps, pixels = [], []
        for p, stride, first, size, apart, count, dilation in zip(
            pixel, args.stride, args.first, args.size, args.apart, args.taps, args.dilation, strict=True
        ):
            start = p * stride + first
            met = _met(start, size, apart, count, dilation)
            taps.append(slice(met.start * dilation, met.stop * dilation, met.step * dilation))
            begin, end = ((start + tap * dilation) // apart for tap in (met.start, met.stop))
            pixels.append(slice(begin, end, met.step * dilation // apart))
        window, filter = self.x[index(image, g, slice(None), *pixels)], self.filter[index(g, k, slice(None), *taps)]
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
