"""What GPUArrays need beside convolutions, element by element: missing numbers, sums as integers. PyCUDA compiles their kernels."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import numpy as np

C_NAMES = {
    "float32": "float", "float64": "double", "uint8": "unsigned char", "int8": "signed char", "uint16": "unsigned short", "int16": "short",
    "int32": "int", "uint32": "unsigned int", "int64": "long long", "uint64": "unsigned long long", "bool": "unsigned char",
}  # fmt: skip


@cache
def _compiled_in_a_context() -> Any:
    """A function that makes a kernel once in each context."""

    def made(arguments: str, operation: str) -> Any:
        return importlib.import_module("pycuda.elementwise").ElementwiseKernel(arguments, operation)

    return importlib.import_module("pycuda.tools").context_dependent_memoize(made)


def _run(arguments: str, operation: str, *given: Any) -> None:
    _compiled_in_a_context()(arguments, operation)(*given)


def _type_of(array: Any) -> str:
    name = np.dtype(array.dtype).name
    if name not in C_NAMES:
        raise TypeError(f"a GPUArray must be of {', '.join(C_NAMES)} here, but got one of {name}")
    return C_NAMES[name]


def find_missing(x: Any, mask: Any, nan: bool, gone: Any) -> None:
    """Write to `gone`, of bytes, where `x` is NaN, if `nan` is true, and where the mask is not 0: of the shape of `x` or its last axes."""
    asked = f"{_type_of(x)} *x, unsigned char *gone"
    if mask is None:
        _run(asked, "gone[i] = x[i] != x[i]", x, gone)
    else:
        operation = f"gone[i] = mask[i % size] != 0 || ({int(nan)} && x[i] != x[i])"
        _run(f"{asked}, {_type_of(mask)} *mask, long size", operation, x, gone, mask, mask.size)


def fill_missing(gone: Any, value: float, x: Any, made: Any) -> None:
    """Write `x` to `made`, which may be of another type, with `value` where numbers are missing."""
    kind = _type_of(made)
    arguments = f"unsigned char *gone, {_type_of(x)} *x, double value, {kind} *made"
    _run(arguments, f"made[i] = gone[i] ? ({kind})value : ({kind})x[i]", gone, x, value, made)


def mark_present(gone: Any, made: Any) -> None:
    """Write 1 to `made` where there are numbers, else 0."""
    _run(f"unsigned char *gone, {_type_of(made)} *made", "made[i] = !gone[i]", gone, made)


def make_up(top: Any, bottom: Any, whole: Any, plane: int, least: float, instead: Any) -> None:
    """Turn `top` into ``top * whole / bottom`` where `bottom` is more than `least` of `whole`, else into `instead`; None stands for NaN.

    `whole` has an element for each channel of results, whose planes have `plane` elements.
    """
    kind = _type_of(top)
    arguments = f"{kind} *top, {kind} *bottom, {kind} *whole, long plane, long channels, double least"
    rest, given = ("NAN", ()) if instead is None else ("instead[i]", (instead,))
    enough = f"bottom[i] > ({kind})least * all"
    operation = f"const {kind} all = whole[i / plane % channels]; top[i] = {enough} ? top[i] * all / bottom[i] : ({kind}){rest}"
    more = "" if instead is None else f", {kind} *instead"
    _run(arguments + more, operation, top, bottom, whole, plane, whole.size, least, *given)


def to_bool(x: Any, made: Any) -> None:
    """Write to `made` whether numbers are at least 0.5."""
    _run(f"{_type_of(x)} *x, unsigned char *made", "made[i] = x[i] >= 0.5", x, made)


def to_integers(x: Any, made: Any, least: float, most: float) -> None:
    """Write the nearest integers to `made`, halves to even, clipped to `least` and `most`; NaN becomes 0."""
    operation = "const double near = rint((double)x[i]); made[i] = near != near ? 0 : near < least ? least : near > most ? most : near"
    _run(f"{_type_of(x)} *x, {_type_of(made)} *made, double least, double most", operation, x, made, least, most)


def truncate(x: Any, made: Any) -> None:
    """Write numbers truncated towards zero to `made`; what is out of range wraps."""
    _run(f"{_type_of(x)} *x, {_type_of(made)} *made", f"made[i] = ({_type_of(made)})(long long)x[i]", x, made)
