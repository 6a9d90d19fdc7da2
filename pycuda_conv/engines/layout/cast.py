"""Launches of ``cu/layout/cast.cu``: float32 arrays rounded to 16 bits, and 16-bit arrays in float32, beside another type's convolution."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pycuda_conv.engines.geometry import ceil
from pycuda_conv.engines.variants import VariantSet, portable
from pycuda_conv.problem import DTYPE_CODES
from pycuda_conv.runtime.base import BufferSlice, KernelLaunch

THREADS = 256
MOST_VARIANTS = {"cuda": 2}  # texts, as an engine says it
EACH = 4  # elements of a thread


#: An array to cast: its elements, its place, and the place of the cast one.
Part = tuple[int, BufferSlice, BufferSlice]
MOST_PARTS = 3  # arrays that a launch can cast


def narrow(dtype: str, *parts: Part) -> KernelLaunch:
    """Round up to :data:`MOST_PARTS` arrays of float32 to `dtype`."""
    return _cast("narrow", dtype, parts)


def widen(dtype: str, *parts: Part) -> KernelLaunch:
    """Convert up to :data:`MOST_PARTS` arrays of `dtype` to float32."""
    return _cast("widen", dtype, parts)


def widen_filter(dtype: str, shape: Sequence[int], given: BufferSlice, made: BufferSlice) -> KernelLaunch:
    """Convert a filter of `shape` in C order to float32, with its second axis last."""
    size = math.prod(shape)
    return _launch("widen_filter", dtype, ceil(size, THREADS), (given, made), size, math.prod(shape[2:]), shape[1])


def moves_axis(shape: Sequence[int]) -> bool:
    """Whether moving a filter's second axis last changes its layout."""
    return shape[1] > 1 and math.prod(shape[2:]) > 1


def _cast(kernel: str, dtype: str, parts: Sequence[Part]) -> KernelLaunch:
    assert 0 < len(parts) <= MOST_PARTS
    (_, *first), missing = parts[0], MOST_PARTS - len(parts)
    buffers = *(place for _, *places in parts for place in places), *first * missing
    sizes = *(size for size, *_ in parts), *(0,) * missing
    return _launch(kernel, dtype, sum(ceil(size, EACH * THREADS) for size in sizes), buffers, *sizes)


def _launch(kernel: str, dtype: str, blocks: int, buffers: tuple[BufferSlice, ...], *scalars: int) -> KernelLaunch:
    return KernelLaunch(kernel, portable(dtype, False, THREADS), blocks, THREADS, buffers, scalars, "cast")


def variants() -> Iterator[VariantSet]:
    """One text for each type of 16 bits."""
    yield VariantSet("cast", {"DTYPE": (DTYPE_CODES["float16"], DTYPE_CODES["bfloat16"]), "INDEX_64": (0,), "THREADS": (THREADS,)})
