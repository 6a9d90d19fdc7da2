"""Copies of channels-last arrays with more channels (``cu/layout/fold_channels.cu``): zeros, or the channels of a row of taps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from pycuda_conv.engines.geometry import arguments, ceil
from pycuda_conv.engines.struct import kernel_struct
from pycuda_conv.engines.variants import VariantSet
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import BufferSlice, KernelLaunch

THREADS = 256  # of a block
WORD = 16  # bytes that a thread writes

FoldChannelsArguments = kernel_struct("fold_channels", "FoldChannelsArguments")


def zeros_behind(problem: ConvProblem, rows: int, channels: int, wide: int) -> Any:
    """The arguments of a copy of `rows` rows of `channels` elements, each with zeros behind it, up to `wide` elements."""
    chunks = wide * problem.itemsize // WORD
    steps = {f"{name}_{axis}": int(name != "pad") for name in ("stride", "pad", "dilation") for axis in "hw"}
    return arguments(
        FoldChannelsArguments, words=rows * chunks, chunks=chunks, h=1, w=rows, p=1, q=rows, channels=channels, folded=channels, fold_s=1,
        **steps,
    )  # fmt: skip


def launch(problem: ConvProblem, args: Any, array: int, copy: BufferSlice) -> KernelLaunch:
    """The launch that copies `array` to `copy`."""
    defines = {"BYTES": problem.itemsize, "UNIT": math.gcd(WORD, problem.itemsize * args.channels)}
    return KernelLaunch("fold_channels", defines, ceil(args.words, THREADS), THREADS, (array, copy), (), arguments=args)


def variants() -> Iterator[VariantSet]:
    """A text for each size of elements and of what a thread loads at once."""
    for size in (2, 4):
        yield VariantSet("fold_channels", {"BYTES": (size,), "UNIT": tuple(unit for unit in (2, 4, 8, WORD) if unit >= size)})
