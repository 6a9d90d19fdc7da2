"""What the engines on tensor cores share: element types, limbs, the choice of the fastest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from pycuda_conv.engines.base import Config
from pycuda_conv.problem import ConvProblem

FLOAT, HALF, BFLOAT = 32, 16, 17  # the kernels' codes of element types
ELEMENTS = {"float32": FLOAT, "float16": HALF, "bfloat16": BFLOAT}

C = TypeVar("C", bound=Config)


def products(problem: ConvProblem) -> int:
    """16-bit or TF32 products for one product of the problem."""
    return 3 if problem.dtype == "float32" and problem.precision == "fp32" else 1


def limbs(problem: ConvProblem) -> int:
    """16-bit or TF32 numbers that an element is split into."""
    return 2 if products(problem) == 3 else 1


def why_not_one_product(problem: ConvProblem) -> str | None:
    """Why no single product of such numbers makes one of the problem's, or there is none to make; None if one does."""
    if problem.dtype not in ELEMENTS or products(problem) > 1:
        return "it takes float16 and bfloat16 arrays, and float32 with precision='tf32'"
    return "there is nothing to compute" if problem.is_empty else None


def fastest(timed: Iterable[tuple[float, C]]) -> tuple[float, C] | None:
    """The first of the pairs with the shortest time; None if there are none."""
    return min(timed, key=lambda pair: pair[0], default=None)
