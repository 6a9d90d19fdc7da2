"""What is asked of an engine's cases, by a word: type, precision and layout; the problem that it makes of a case, and the bounds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import emulator
import numpy as np
from filters import Filter
from reference import DTYPES, EPS, Case

from pycuda_conv import ConvProblem

H200 = emulator.gpu()

#: What is asked of the engine: (dtype, precision, layout).
MODES = {
    "fp32": ("float32", "fp32", "NCHW"), "fp32 last": ("float32", "fp32", "NHWC"),
    "tf32": ("float32", "tf32", "NCHW"), "tf32 last": ("float32", "tf32", "NHWC"),
    "fp16": ("float16", "fp32", "NCHW"), "fp16 last": ("float16", "fp32", "NHWC"),
    "bf16": ("bfloat16", "fp32", "NCHW"), "bf16 last": ("bfloat16", "fp32", "NHWC"),
}  # fmt: skip
if "bfloat16" not in DTYPES:
    MODES = {name: mode for name, mode in MODES.items() if mode[0] != "bfloat16"}


@cache
def asked(case: Case | Filter, mode: str) -> ConvProblem:
    """The problem that a case is in a mode. The layout of a gradient by the filter is its own."""
    dtype, precision, layout = MODES[mode]
    if isinstance(case, Filter):
        return case.problem(dtype, precision=precision)
    return replace(case.problem(dtype), precision=precision, layout=layout)


def dtype_of(mode: str) -> str:
    return MODES[mode][0]


def bound(case: Case, mode: str, x, w, b, ref) -> np.ndarray:
    """How far from `ref` a result may be: an honest fp32 sum; for tf32 the rounding of each factor to 11 bits as well."""
    allowed = case.bound(x, w, b, ref)
    if "tf32" in mode:
        allowed = allowed + 2.0**-9 * case.reference(np.abs(x), np.abs(w), None)
    return allowed


def allowed(case: Case | Filter, mode: str, arrays, ref: np.ndarray) -> np.ndarray:
    """How far from `ref` the result of a case may be."""
    return case.bound(*arrays, ref, MODES[mode][1]) if isinstance(case, Filter) else bound(case, mode, *arrays, ref)


def limbs_bound(case: Case, mode: str, x, w, ref, bits: float = 20.9) -> np.ndarray:
    """What limbs lose without any rounding of sums: half a unit of each of two factors, and what three products leave out (`bits`)."""
    return (2.0**-9.9 if "tf32" in mode else 2.0**-bits) * case.reference(np.abs(x), np.abs(w)) + EPS["float32"] * np.abs(ref)


def ids_of(runs) -> list[str]:
    return [f"{mode}-{'_'.join(str(v) for v in vars(config).values())}-{case}" for case, mode, config in runs]
