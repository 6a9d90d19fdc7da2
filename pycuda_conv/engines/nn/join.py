"""Launches of ``cu/nn/join.cu``: two arrays with the channels last as one. These are no convolutions."""

from __future__ import annotations

from collections.abc import Iterator

from pycuda_conv.engines.geometry import ceil, divider
from pycuda_conv.engines.struct import kernel_struct
from pycuda_conv.engines.variants import VariantSet
from pycuda_conv.runtime.base import KernelLaunch

THREADS, ITEMS, WORD = 256, 4, 16
MOST_VARIANTS = {"cuda": 1}  # texts, as an engine says it

JoinArguments = kernel_struct("join", "JoinArguments")


def fits(pixels: int, first: int, second: int) -> bool:
    """Whether the kernel joins arrays of so many pixels, of so many bytes each."""
    words = pixels * (first + second) // WORD
    return first % WORD == second % WORD == 0 and min(first, second) > 0 and 0 < words < 2**31 - 2**20


def join(pixels: int, first: int, second: int) -> KernelLaunch:
    """The launch. Buffers: an array with pixels of `first` bytes, one with pixels of `second` | the result."""
    across = (first + second) // WORD
    arguments = JoinArguments(pixels * across, across, divider(across), first // WORD)
    return KernelLaunch("join", {"TYPE": 17}, ceil(pixels * across, THREADS * ITEMS), THREADS, (0, 1, 2), (), arguments=arguments)


def variants() -> Iterator[VariantSet]:
    """One text."""
    yield VariantSet("join", {"TYPE": (17,)})
