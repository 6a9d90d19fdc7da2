"""Launches of ``cu/cast.cu``: float32 arrays rounded to 16 bits, and 16-bit arrays in float32, beside a convolution that takes others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pycuda_conv.engines.geometry import ceil
from pycuda_conv.engines.texts import TextFamily
from pycuda_conv.problem import DTYPE_CODES
from pycuda_conv.runtime.base import KernelLaunch, Place

THREADS = 256
EACH = 4  # elements of a thread


def narrow(dtype: str, size: int, wide: Place, made: Place) -> KernelLaunch:
    """Round `size` elements of float32 to `dtype`."""
    return _launch("narrow", dtype, ceil(size, EACH), (wide, made), size)


def widen(dtype: str, size: int, given: Place, made: Place) -> KernelLaunch:
    """The way back."""
    return _launch("widen", dtype, ceil(size, EACH), (given, made), size)


def widen_filter(dtype: str, shape: Sequence[int], given: Place, made: Place) -> KernelLaunch:
    """The same of a filter in C order of that shape, which is laid with its second axis last."""
    size, taps = math.prod(shape), math.prod(shape[2:])
    if taps == 1 or shape[1] == 1:
        return widen(dtype, size, given, made)
    return _launch("widen_filter", dtype, size, (given, made), size, taps, shape[1])


def _launch(kernel: str, dtype: str, threads: int, buffers: tuple[Place, Place], *scalars: int) -> KernelLaunch:
    defines = {"DTYPE": DTYPE_CODES[dtype], "INDEX_64": 0, "THREADS": THREADS}
    return KernelLaunch(kernel, defines, ceil(threads, THREADS), THREADS, buffers, scalars, "cast")


def texts() -> Iterator[TextFamily]:
    """One text for each type of 16 bits."""
    yield TextFamily("cast", {"DTYPE": (DTYPE_CODES["float16"], DTYPE_CODES["bfloat16"]), "INDEX_64": (0,), "THREADS": (THREADS,)})
