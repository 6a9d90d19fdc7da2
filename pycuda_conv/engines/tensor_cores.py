"""What the engines on tensor cores share: the 16-bit numbers that stand for elements."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from pycuda_conv.engines.base import Config
from pycuda_conv.problem import ConvProblem

FLOAT, HALF, BFLOAT = 32, 16, 17  # as the kernels name element types
ELEMENTS = {"float32": FLOAT, "float16": HALF, "bfloat16": BFLOAT}

C = TypeVar("C", bound=Config)


def products(problem: ConvProblem) -> int:
    """Products of 16-bit numbers for one of the problem's."""
    return 3 if problem.dtype == "float32" and problem.precision == "fp32" else 1


def limbs(problem: ConvProblem) -> int:
    """16-bit numbers that stand for one element."""
    return 2 if products(problem) == 3 else 1


def fastest(timed: Iterable[tuple[float, C]]) -> tuple[float, C] | None:
    """The first of the pairs with the shortest time; None if there are none."""
    return min(timed, key=lambda pair: pair[0], default=None)


def why_not_so_many(stages: int, nbytes: int, most: int, split: int) -> str | None:
    """Why no tile has so many stages, of `nbytes` of shared memory where a block has `most`, and splits; None if one has."""
    if stages < 2 or nbytes > most:
        return f"its {stages} stages take {nbytes:,} bytes of shared memory; a block has {most:,}"
    return "it has at least one split" if split < 1 else None
