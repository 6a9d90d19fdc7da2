"""Max and mean pooling, forward and backward: launches of ``cu/nn/max_pool.cu``. These are no convolutions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from pycuda_conv.engines.geometry import arguments, ceil
from pycuda_conv.engines.struct import kernel_struct
from pycuda_conv.engines.variants import VariantSet
from pycuda_conv.problem import DTYPE_CODES
from pycuda_conv.runtime.base import Device, KernelLaunch, Launcher

THREADS = 256
MOST_VARIANTS = {"cuda": 6}  # texts, as an engine says it
VECTOR_BYTES = 16  # of channels of a thread, if channels are last
MOST_TAPS = 255  # a byte holds the number of a tap
TYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Pool:
    """Windows of `taps` with `strides`, `padding` and `dilation` over an array of `shape` (N, C, H, W); each pair is (along H, along W).

    The layout is "NHWC", channels last, or "NCHW". With `beyond` the last window may reach past the padding, if it begins before that.
    The result has each window's maximum; or its `mean`, of all pixels of the window, padded ones among them if these are `counted`, or the
    sum divided by `divisor` if that is not 0.
    """

    dtype: str
    shape: tuple[int, int, int, int]
    taps: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    layout: str = "NHWC"
    beyond: bool = False
    mean: bool = False
    counted: bool = True
    divisor: int = 0

    @property
    def result_shape(self) -> tuple[int, int, int, int]:
        """Shape of the result."""
        return *self.shape[:2], self._windows(0), self._windows(1)

    def _windows(self, axis: int) -> int:
        n, t, u, pad, d = (each[axis] for each in (self.shape[2:], self.taps, self.stride, self.padding, self.dilation))
        rest = n + 2 * pad - d * (t - 1) - 1
        return min(ceil(rest, u), (n + pad - 1) // u) + 1 if self.beyond else rest // u + 1

    @property
    def fits(self) -> bool:
        """Whether the kernels can run it."""
        windows = self.taps, self.stride, self.padding, self.dilation
        if any(len(pair) != 2 for pair in windows) or min(*self.taps, *self.stride, *self.dilation) < 1 or min(self.padding) < 0:
            return False
        if self.dtype not in TYPES or self.shape[1] % self._vector or (self.taps[0] * self.taps[1] > MOST_TAPS and not self.mean):
            return False
        if self.mean and (self.dilation != (1, 1) or not 0 <= self.divisor < 2**31):
            return False
        sizes = [n * c // self._vector * h * w for n, c, h, w in (self.shape, self.result_shape)]
        # as torch demands; a window may still be without a pixel if the dilation steps over the array. Its maximum is -Inf
        halves = all(2 * pad <= taps for pad, taps in zip(self.padding, self.taps, strict=True))
        return halves and 0 < min(sizes) and max(sizes) < 2**31 - THREADS

    @property
    def _vector(self) -> int:
        return _max_stages_of(self.dtype) if self.layout == "NHWC" else 1

    def _launch(self, kernel: str, buffers: tuple[int, ...], made: tuple[int, ...]) -> KernelLaunch:
        """The launch of a `kernel` that has a thread for each of the places `made`, down and across."""
        (n, c, h, w), (*_, p, q) = self.shape, self.result_shape
        (down, across), last = made[-2:], self.layout == "NHWC"
        groups = c // self._vector if last else 1
        threads = n * c // self._vector * down * across
        args = arguments(
            PoolArguments, threads=threads, groups=groups, across=across, down=down, h=h, w=w, p=p, q=q, r=self.taps[0], s=self.taps[1],
            stride_h=self.stride[0], stride_w=self.stride[1], pad_h=self.padding[0], pad_w=self.padding[1], dil_h=self.dilation[0],
            dil_w=self.dilation[1], divisor=self.divisor, padded=int(self.counted),
        )  # fmt: skip
        defines = {"TYPE": DTYPE_CODES[self.dtype], "VEC": self._vector}
        return KernelLaunch(kernel, defines, ceil(threads, THREADS), THREADS, buffers, (), "max_pool", arguments=args)

    def forward(self) -> KernelLaunch:
        """Buffers: x | y, and of maxima the tap of each (a byte) or None."""
        if self.mean:
            return self._launch("mean_pool", (0, 1), self.result_shape)
        return self._launch("max_pool", (0, 1, 2), self.result_shape)

    def backward(self) -> KernelLaunch:
        """Buffers: y's gradient, the taps of maxima | x's gradient."""
        if self.mean:
            return self._launch("mean_pool_backward", (0, 1), self.shape)
        if (self.taps, self.stride, self.dilation) == ((3, 3), (2, 2), (1, 1)):
            twos = tuple(ceil(n + pad, 2) for n, pad in zip(self.shape[2:], self.padding, strict=True))
            return self._launch("max_pool_backward_of_twos", (0, 1, 2), twos)
        return self._launch("max_pool_backward", (0, 1, 2), self.shape)


PoolArguments = kernel_struct("max_pool", "PoolArguments")


@lru_cache(maxsize=256)
def compiled(pool: Pool, device: Device, backward: bool) -> Launcher:
    """The forward or the backward launch, compiled for `device`."""
    return device.schedule_launcher([[pool.backward() if backward else pool.forward()]])


def _max_stages_of(dtype: str) -> int:
    return VECTOR_BYTES // (4 if dtype == "float32" else 2)


def variants() -> Iterator[VariantSet]:
    """One text for each type and layout."""
    for dtype in TYPES:
        yield VariantSet("max_pool", {"TYPE": (DTYPE_CODES[dtype],), "VEC": (1, _max_stages_of(dtype))})
