"""Launches of ``cu/nn/fold_norms.cu``: norms in evaluation as factors and summands of their convolutions. These are no convolutions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pycuda_conv.engines.geometry import batches, bits, ceil
from pycuda_conv.engines.struct import kernel_struct
from pycuda_conv.engines.variants import VariantSet, portable_choices
from pycuda_conv.problem import DTYPE_CODES
from pycuda_conv.runtime.base import BufferSlice, KernelLaunch

THREADS = 128
MOST_VARIANTS = {"cuda": 8}  # texts, as an engine says it
#: Norms of a launch: one, or as many as fit the 4 KB that a kernel's parameters have.
MOST = 56
VECTORS = 5  # gamma, beta, mean, variance, the convolution's bias

FoldedNorm = kernel_struct("fold_norms", "FoldedNorm")


class Norm(NamedTuple):
    """A norm: its channels, where its factors lie in the result, its eps, and for each vector whether it has the arrays' type."""

    channels: int
    start: int
    eps: float
    of_arrays: tuple[bool, ...]
    places: tuple[BufferSlice, ...]


def starts_of(channels: Sequence[int]) -> list[int]:
    """Where the factors of norms of so many channels lie, and at the end the number of all elements.

    A norm's K factors lie at its start, its K summands behind them.
    """
    starts = [0]
    for count in channels:
        starts.append(starts[-1] + 2 * count)
    return starts


def fold(dtype: str, norms: Sequence[Norm], folded: BufferSlice, at_once: int = MOST) -> list[list[KernelLaunch]]:
    """Launches for some norms of convolutions of `dtype`, `at_once` in one."""
    sum_bytes = 8 if dtype == "float64" else 4
    steps = []
    for some in batches(norms, at_once):
        count = 1 if len(some) == 1 else at_once
        types = [sum(bit << i for i, bit in enumerate(one.of_arrays)) for one in some]
        args = [FoldedNorm(one.channels, one.start, bits(one.eps, sum_bytes), own) for one, own in zip(some, types, strict=True)]
        missing = count - len(some)
        places = [place for one in some for place in one.places] + [folded] * (VECTORS * missing)
        blocks = ceil(max(one.channels for one in some), THREADS)
        defines = {"DTYPE": DTYPE_CODES[dtype], "INDEX_64": 0, "NORMS": count, "THREADS": THREADS}
        arguments = (*args, *[FoldedNorm(0, 0, 0, 0)] * missing)
        steps.append([KernelLaunch("fold_norms", defines, len(some) * blocks, THREADS, (*places, folded), (blocks,), arguments=arguments)])
    return steps


def variants() -> Iterator[VariantSet]:
    """One text for each type and number of norms."""
    yield VariantSet("fold_norms", portable_choices(THREADS) | {"INDEX_64": (0,), "NORMS": (1, MOST)})
