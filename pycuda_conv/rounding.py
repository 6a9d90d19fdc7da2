"""The error that rounding explains: how far a result may be from a float64 reference, or from another kernel's result.

The bound, element by element, is

    |out - ref| <= 4 eps sqrt(depth) conv(|x|, |w|) + eps_out |ref|

with `ref` the float64 convolution of the inputs as they were rounded, `depth` the length of the sum, eps that of the dtype in which sums
are kept and eps_out that of the result. It holds for sums in any order, and a sum without one of its taps breaks it. In tf32, whose
operands lose bits before they are multiplied, 2^-9 takes the place of 4 eps sqrt(depth).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pycuda_conv.problem import ConvProblem

#: norm(out - ref) / norm(ref) above which a result is wrong, for sums of up to 256 products. Twice to four times what is claimed: 1e-7 to
#: 2e-7 in float32, one rounding in 16 bits, 3e-4 in TF32.
RELATIVE_LIMIT = {"float16": 4e-4, "bfloat16": 3.5e-3, "float32": 4e-7, "float64": 8e-16, "tf32": 6e-4}
#: An element's error may be this many times the largest of another library's, or that of half a rounding of the sum of magnitudes.
TIMES_OTHER = 1.5
#: The same for float32 on tensor cores, by kinds of numbers; for others it is TIMES_OTHER. A product is three there, of numbers of 11 bits,
#: so it keeps 22 bits, and the units cut their sums off. That shows where a few products make an element: plain cores, as cuDNN's, round
#: each of them once. Up to 3.7, 1.9, 1.9 and 1.7 were measured.
TIMES_OTHER_ON_TENSOR_CORES = {"sparse": 4.0, "one large": 2.5, "wide": 2.5, "sky": 2.5}
#: The same for float32 on plain cores, where a sum is one chain and the other library may add parts of it: up to 2.3 was measured, of 72
#: products, where cuDNN took another kernel than the day before.
TIMES_OTHER_ON_PLAIN_CORES = 3.0
#: Of fewer elements the largest error is chance, and is not compared.
LEAST_ELEMENTS = 1000
TF32_ERROR = 2.0**-9  # of a product of two operands of 11 bits each, cut off
#: For each dtype of results: the distance from 1 to the next number, and the smallest number above 0.
SPACING = {dtype: (float(np.finfo(dtype).eps), float(np.finfo(dtype).smallest_subnormal)) for dtype in ("float16", "float32", "float64")}
SPACING["bfloat16"] = 2.0**-7, 2.0**-133
#: The largest number of each dtype.
LARGEST = {dtype: float(np.finfo(dtype).max) for dtype in ("float16", "float32", "float64")} | {"bfloat16": (2 - 2.0**-7) * 2.0**127}


def depth(problem: ConvProblem) -> int:
    """The most products that are summed into one element of the result."""
    problem = problem.launched
    return problem.operand_channels // problem.groups * math.prod(problem.filter_size)


def _arithmetic(problem: ConvProblem) -> str:
    return "tf32" if problem.precision == "tf32" and problem.dtype == "float32" else problem.dtype


def relative_limit(problem: ConvProblem) -> float:
    """The relative error, in norms, above which a result is wrong; it grows with the root of the depth, as rounding does."""
    return RELATIVE_LIMIT[_arithmetic(problem)] * max(1.0, math.sqrt(depth(problem)) / 16)


def beside_limit(problem: ConvProblem, other: float, times: float = TIMES_OTHER) -> float:
    """The largest error, divided by :func:`bound`, that is not clearly larger than `other`, another library's.

    Where TF32 is asked for, another library may compute in float32. Then operands rounded to the nearest explain half of the bound.
    """
    if math.prod(problem.result_shape) < LEAST_ELEMENTS:
        return math.inf
    half = 0.5 if _arithmetic(problem) == "tf32" else 1 / (8 * math.sqrt(max(depth(problem), 1)))
    return max(times * other, half)


def overflows(problem: ConvProblem, out: Any, reference: Any, limit: Any) -> Any:
    """Where `out` is rightly infinite, element by element: the result, or what rounding may make of it, is beyond the dtype's numbers."""
    return (abs(out) == math.inf) & ((out > 0) == (reference > 0)) & (abs(reference) + limit >= LARGEST[problem.dtype])


def bound(problem: ConvProblem, reference: Any, magnitude: Any) -> Any:
    """The largest error that rounding explains, element by element.

    Parameters
    ----------
    reference, magnitude : float64 arrays of numpy or torch
        conv(x, w) + b and conv(|x|, |w|) + |b|.
    """
    out_eps, smallest = SPACING[problem.dtype]
    eps = SPACING["float64" if problem.dtype == "float64" else "float32"][0]
    part = TF32_ERROR if _arithmetic(problem) == "tf32" else 4 * eps * math.sqrt(max(depth(problem), 1))
    return part * magnitude + out_eps * abs(reference) + smallest
