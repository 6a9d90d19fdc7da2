"""What the engines on tensor cores share: element types, products, limbs."""

from __future__ import annotations

from collections.abc import Mapping

from pycuda_conv.problem import ConvProblem

FLOAT, HALF, BFLOAT = 32, 16, 17  # the kernels' codes of element types
ELEMENTS = {"float32": FLOAT, "float16": HALF, "bfloat16": BFLOAT}


def products(problem: ConvProblem) -> int:
    """16-bit or TF32 products for one product of the problem."""
    return 3 if problem.dtype == "float32" and problem.precision == "fp32" else 1


def gemm_products(problem: ConvProblem) -> int:
    """The same for a kernel that leaves out those of an image's second limbs where these are 0."""
    return 2 if problem.of_bytes and products(problem) == 3 else products(problem)


def limbs(problem: ConvProblem) -> int:
    """16-bit or TF32 numbers that an element is split into."""
    return 2 if products(problem) == 3 else 1


def is_multiplied(d: Mapping[str, int]) -> bool:
    """Whether a kernel with these defines is ever launched: of 16-bit arrays there are single PRODUCTS alone."""
    return d["PRODUCTS"] == 1 or d["TYPE"] == FLOAT


def why_not_one_product(problem: ConvProblem) -> str | None:
    """Why a 16-bit or TF32 product can't stand for each product of the problem, or that there is none; None if it can."""
    if problem.dtype not in ELEMENTS or products(problem) > 1:
        return "it takes float16 and bfloat16 arrays, and float32 with precision='tf32'"
    return "there is nothing to compute" if problem.is_empty else None
