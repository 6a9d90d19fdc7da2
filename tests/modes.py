"""What is asked of an engine's cases, by a word: type, precision and layout; the problem that it makes of a case, and the bounds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from filters import Filter
from reference import DTYPES, Case

from pycuda_conv import ConvProblem
from pycuda_conv.engines import registry


def gpu(multiprocessors: int = 132) -> SimpleNamespace:
    """A device that plans are made for: an H200 with as many multiprocessors."""
    return SimpleNamespace(capability=(9, 0), multiprocessors=multiprocessors, backend="cuda", name="cuda:0", model="NVIDIA H200")


H200 = gpu()
#: A device without tensor cores that plans are made for.
CPU = SimpleNamespace(backend="opencl", multiprocessors=2, capability=(0, 0), name="", model="")


def program_of(problem: ConvProblem, config: Any, multiprocessors: int = 3, with_moments: bool = False) -> Any:
    """The schedule of a problem there."""
    return registry.engine_of(config).schedule(problem.launched, config, gpu(multiprocessors), with_moments)


#: What is asked of the engine: (dtype, precision, layout).
MODES = {
    "fp32": ("float32", "fp32", "NCHW"), "fp32 last": ("float32", "fp32", "NHWC"),
    "tf32": ("float32", "tf32", "NCHW"), "tf32 last": ("float32", "tf32", "NHWC"),
    "fp16": ("float16", "fp32", "NCHW"), "fp16 last": ("float16", "fp32", "NHWC"),
    "bf16": ("bfloat16", "fp32", "NCHW"), "bf16 last": ("bfloat16", "fp32", "NHWC"),
}  # fmt: skip
if "bfloat16" not in DTYPES:
    MODES = {name: mode for name, mode in MODES.items() if mode[0] != "bfloat16"}
#: And what few engines take.
KNOWN = MODES | {"fp64": ("float64", "fp32", "NCHW"), "fp64 last": ("float64", "fp32", "NHWC")}

#: A word for each type of numbers that numpy knows here.
TYPES = [name for name in ("fp32", "fp16", "bf16", "fp64") if name in KNOWN]


@cache
def asked(case: Case | Filter, mode: str) -> ConvProblem:
    """The problem that a case is in a mode. The layout of a gradient by the filter is its own."""
    dtype, precision, layout = KNOWN[mode]
    if isinstance(case, Filter):
        return case.problem(dtype, precision=precision)
    return replace(case.problem(dtype), precision=precision, layout=layout)


def dtype_of(mode: str) -> str:
    return KNOWN[mode][0]


def bound(case: Case, mode: str, x, w, b, ref) -> np.ndarray:
    """How far from `ref` a result may be: an honest fp32 sum; for tf32 the rounding of each factor to 11 bits as well."""
    allowed = case.bound(x, w, b, ref)
    if "tf32" in mode:
        allowed = allowed + 2.0**-9 * case.reference(np.abs(x), np.abs(w), None)
    return allowed


def allowed(case: Case | Filter, mode: str, arrays, ref: np.ndarray) -> np.ndarray:
    """How far from `ref` the result of a case may be."""
    return case.bound(*arrays, ref, KNOWN[mode][1]) if isinstance(case, Filter) else bound(case, mode, *arrays, ref)


def ids_of(runs) -> list[str]:
    return [f"{mode}-{'_'.join(str(v) for v in vars(config).values())}-{case}" for case, mode, config in runs]
