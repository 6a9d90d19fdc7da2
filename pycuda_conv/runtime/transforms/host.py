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

    def keep(image: int, where: tuple[slice, ...], summed: np.ndarray, limit: np.ndarray, known: np.ndarray | None) -> None:
        limits[index(image, ..., *where)] = limit
        for number, to, kept in result_places(args, where):
            sums[index(image, ..., *to)] = summed[index(slice(None), slice(None), *number, *kept)]

    _OnHost(args, x, w).run(keep)


#: The most results of a call that Python looks at one by one, and the most products of these; ``library_fft.cu`` does more of them.
MOST_SUMMED, MOST_PRODUCTS = 1 << 9, 1 << 27

#: As many results of some blocks may be off before their windows are looked at for zeros.
FEW_DOUBTS = 32


def convolve(args: Transforms, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, y: np.ndarray) -> bool:
    """The whole convolution in the host's memory: what :func:`fill` and ``library_fft.cu`` give, in less time. `y` is float32 or float64.

    False if too many results have to be summed; then `y` is not done.
    """
    work = _OnHost(args, x, w)
    result = y.reshape(args.made_memory + args.results).transpose(*args.made_axes, *range(3, 3 + len(args.length)))
    shift = None if bias is None else bias.reshape(args.groups, args.written, *(1,) * len(args.length))
    doubtful: list[tuple[int, ...]] = []
    values: list[tuple[float, float]] = []

    def keep(image: int, where: tuple[slice, ...], summed: np.ndarray, limit: np.ndarray, known: np.ndarray | None) -> None:
        of_pixels = limit[index(..., *(None,) * len(args.length))]
        right = (abs(summed) >= of_pixels) | ((summed == 0) & np.signbit(summed))
        if known is not None:
            right |= known
        summed += 0.0  # no -0
        fine = bool(right.all())
        for number, to, kept in result_places(args, where):
            if not fine:
                for g, k, *pixel in np.argwhere(~right[index(slice(None), slice(None), *number, *kept)])[: MOST_SUMMED + 1].tolist():
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
        self.alone = args.images * math.prod(args.blocks) == 1
        with np.errstate(all="ignore"):
            super().__init__(args, _values(x, args.storage), _values(w, args.storage), _Numpy(self.alone))

    def run(self, keep: Callable[[int, tuple[slice, ...], np.ndarray, np.ndarray, np.ndarray | None], None]) -> None:
        """Call `keep` with an image's number, a box of its blocks, their sums and limits, for all of them, in several threads.

        The last argument says which results are known to be NaN, if some are.
        """
        tasks = [(image, where) for image in range(self.args.images) for where in groups_of_blocks(self.args, AT_ONCE)]

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
                self._mark_zeros(summed, limit, block)
                keep(*task, summed, limit, known)

        if len(tasks) == 1:
            done(tasks[0])
        else:
            for _ in _threads().map(done, tasks):
                pass

    def _near(self, there: np.ndarray) -> np.ndarray:
        """Of each result, whether a pixel of its window is `there`: (group, blocks..., pixels...) in, results out."""
        args, ndim = self.args, len(self.args.length)
        for axis, (reach, used, stride) in enumerate(zip(args.reach, args.used, args.stride, strict=True), there.ndim - ndim):
            counts = np.cumsum(there, axis, np.int32)
            ends = [np.take(counts, np.arange(first, first + used, stride), axis) for first in (0, reach - 1)]
            there = (ends[1] > ends[0]) | np.take(there, np.arange(0, used, stride), axis)
        return there

    def _mark_lost(self, summed: np.ndarray, block: np.ndarray, lost: np.ndarray) -> np.ndarray | None:
        """Put NaN where a window has Inf or NaN: such results are summed. If all are known to be NaN, this gives their mask."""
        args = self.args
        near = np.broadcast_to(self._near(np.any(lost, 1))[:, None], summed.shape)
        summed[near] = np.nan
        all_met = max(args.dilation) == max(args.apart) == 1  # each pixel of the window is multiplied, and NaN times 0 is NaN
        return near if all_met and not np.isinf(block).any() else None

    def _mark_zeros(self, summed: np.ndarray, limit: np.ndarray, block: np.ndarray) -> None:
        """Put -0 where a window has nothing but zeros, if results of these blocks may be off: they need no other look."""
        ndim = len(self.args.length)
        of_pixels = limit[index(..., *(None,) * ndim)]
        if np.count_nonzero(~(abs(summed) >= of_pixels)) < FEW_DOUBTS:
            return
        nothing = ~self._near(np.any(block != 0, 1))[:, None] & np.isfinite(of_pixels)  # a filter's Inf times 0 is NaN
        summed[np.broadcast_to(nothing, summed.shape)] = -0.0

    def summed_again(self, at: tuple[int, ...], value: float, limit: float) -> float:
        """A result that a transform may not have right: it is that, if the sum of its products' magnitudes shows it; else their sum."""
        args, (image, g, k, *pixel) = self.args, at
        unsure = not abs(value) > limit * args.accuracy
        taps, pixels = [], []
        for p, stride, first, size, apart, reach in zip(
            pixel, args.stride, args.first, args.size, args.apart, args.reach, strict=True
        ):
            start = p * stride + first
            low = max(0, -(-start // apart))
            high = max(low, min(size, (start + reach - 1) // apart + 1))
            pixels.append(slice(low, high))
            taps.append(slice(low * apart - start, (high - 1) * apart - start + 1, apart) if high > low else slice(0, 0))
        window, filter = self.x[index(image, g, slice(None), *pixels)], self.filter[index(g, k, slice(None), *taps)]
        if unsure or value != value:
            self.products += window.size
            return float((window.astype(np.float64) * filter).sum())
        total = magnitude = 0.0
        for row in np.ndindex(*window.shape[:2]):  # each row of a channel, or the line
            products = window[row].astype(np.float64) * filter[row]
            self.products += products.size
            total += float(products.sum())
            magnitude += float(abs(products).sum())
            if magnitude >= limit:
                return value
        return total
