"""What the engines on tensor cores share: the 16-bit numbers that stand for elements, and which problems are worth packing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from pycuda_conv.engines.base import Config
from pycuda_conv.problem import ConvProblem

FLOAT, HALF, BFLOAT = 32, 16, 17  # as the kernels name element types
ELEMENTS = {"float32": FLOAT, "float16": HALF, "bfloat16": BFLOAT}

#: Below so many multiplications, packing costs more than the tensor cores gain: 43 million took 22 us, by direct_gemm.cu 10.
LEAST_MACS = 100e6
#: With fewer channels of the result in a group, the direct engine was faster on NCHW arrays.
LEAST_CHANNELS = 16

C = TypeVar("C", bound=Config)


def products(problem: ConvProblem) -> int:
    """Products of 16-bit numbers for one of the problem's."""
    return 3 if problem.dtype == "float32" and problem.precision == "fp32" else 1


def limbs(problem: ConvProblem) -> int:
    """16-bit numbers that stand for one element."""
    return 2 if products(problem) == 3 else 1


def fastest(problem: ConvProblem, timed: Iterable[tuple[float, C]]) -> tuple[float, C] | None:
    """The first of the pairs with the shortest time; None if there are none, or if tensor cores don't pay for `problem`."""
    read_as_is = problem.layout == "NHWC" and problem.itemsize == 2
    if problem.macs < LEAST_MACS and not read_as_is:
        return None
    if problem.layout == "NCHW" and problem.result_channels // problem.groups < LEAST_CHANNELS:
        return None
    return min(timed, key=lambda pair: pair[0], default=None)


def why_not_so_many(stages: int, nbytes: int, most: int, split: int) -> str | None:
    """Why no tile has so many stages, of `nbytes` of shared memory where a block has `most`, and splits; None if one has."""
    if stages < 2 or nbytes > most:
        return f"its {stages} stages take {nbytes:,} bytes of shared memory; a block has {most:,}"
    return "it has at least one split" if split < 1 else None
