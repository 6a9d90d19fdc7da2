"""What the engines on tensor cores share: element types, products, limbs."""

from __future__ import annotations

from collections.abc import Mapping

from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import Device

FLOAT, HALF, BFLOAT = 32, 16, 17  # the kernels' codes of element types
ELEMENTS = {"float32": FLOAT, "float16": HALF, "bfloat16": BFLOAT}
SHARED_BYTES = 99 * 1024  # that a block can have on every GPU of compute capability 8.0 and more
#: Products of 16-bit numbers with float32 sums, a cycle and multiprocessor, from NVIDIA's tables; Hopper's as measured through
#: mma.sync. GeForce cards have half the rate of workstation cards of the same capability; they are not told apart.
RATES = {(8, 0): 1024, (8, 7): 512, (9, 0): 1270, (10, 0): 1024, (10, 3): 1024}
OTHER_RATE = 256


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


def product_rate(device: Device) -> int:
    """Products of 16-bit numbers with float32 sums, a cycle and multiprocessor."""
    return RATES.get(device.capability, OTHER_RATE)
