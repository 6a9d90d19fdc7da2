"""The types of elements: which a convolution takes, and in which it computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from struct import error, pack, unpack
from typing import Any

from pycuda_conv.errors import ConvArgumentError, brief, did_you_mean

#: The types in which convolutions are computed.
DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
#: The other types of images, filters and results.
INTEGER_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
}  # fmt: skip
#: In float32 these are exact.
SHORT = ("bool", "uint8", "int8", "uint16", "int16")


def bytes_of(dtype: str) -> int:
    """Bytes of an element."""
    return DTYPE_BYTES.get(dtype) or INTEGER_BYTES[dtype]


def check_element_type(name: str, dtype: str, conversion: str = "{}.astype('{}')") -> None:
    """Refuse the array `name` if no kernel has its `dtype`, and say what to do.

    `conversion` is the expression that converts such an array: its two gaps are for the array's name and for a dtype.
    """
    if dtype not in DTYPE_BYTES:
        _refuse(name, dtype, conversion, "float16, bfloat16, float32 or float64 arrays")


def check_taken(name: str, dtype: str, conversion: str = "{}.astype('{}')") -> None:
    """The same for an array that may hold integers."""
    if dtype not in DTYPE_BYTES and dtype not in INTEGER_BYTES:
        _refuse(name, dtype, conversion, "arrays of float16, bfloat16, float32, float64, bool and integers of 8 to 64 bits")


def _refuse(name: str, dtype: str, conversion: str, taken: str) -> None:
    wide = "float32" if dtype in SHORT or dtype.startswith("float8") else "float64"
    converted = f"pass {conversion.format(name, wide)}"
    if dtype.startswith("complex"):
        advice = f"convolve {name}.real and {name}.imag, one after the other"
    elif dtype.startswith(("str", "bytes", "datetime", "timedelta")):
        advice = "pass numbers"
    elif dtype == "void16":
        advice = f"if these are bfloat16 numbers, pass {name}.view(ml_dtypes.bfloat16)"
    elif dtype.startswith("void"):
        advice = "pass one of its fields"
    elif dtype.startswith((">", "<")):
        advice = "pass a copy in the machine's byte order"
    else:
        advice = converted
    raise TypeError(f"{name} has the type {dtype}, but a convolution takes {taken}: {advice}")


def arithmetic(dtypes: Sequence[str | None], wanted: str | None = None) -> str:
    """The type in which arrays of these types, input and weight first, are convolved, where any of them holds integers.

    The input decides: float32 for integers of up to 16 bits, float64 for wider ones, and its own type for floats. With an input of
    integers, a float64 array beside it makes it float64, and so does `wanted`, the type of the result that was asked for.
    """
    first = dtypes[0]
    assert first is not None
    if first in DTYPE_BYTES:
        return first
    wide = first not in SHORT or wanted == "float64" or "float64" in dtypes
    return "float64" if wide else "float32"


def dtype_name(value: Any) -> str | None:
    """The `dtype` argument as numpy's name, or None: a word, or a dtype of numpy's, torch's or CuPy's.

    Raises
    ------
    TypeError
        It is no type of elements that a convolution has.
    """
    if value is None:
        return None
    known = (*DTYPE_BYTES, *INTEGER_BYTES)
    if isinstance(value, str):
        name = value
    elif isinstance(value, type):
        name = {int: "int64", float: "float64", bool: "bool"}.get(value) or value.__name__
    else:
        given = getattr(value, "name", None)  # numpy's dtypes have one; torch's print as torch.float32
        name = given if isinstance(given, str) else str(value).removeprefix("torch.")
    if name not in known:
        raise TypeError(f"dtype must be one of {known}, but got dtype={brief(value)}{did_you_mean(name, known)}")
    return name


def result_type(arithmetic: str, wanted: str | None) -> str:
    """The result's type: the arithmetic's, or integers that were asked for.

    Raises
    ------
    ConvArgumentError
        Another type of floats was asked for.
    """
    if wanted is None or wanted == arithmetic:
        return arithmetic
    if wanted in INTEGER_BYTES:
        return wanted
    raise ConvArgumentError(
        f"dtype must be {arithmetic}, in which these arrays are convolved, or a type of integers, but got dtype={wanted!r}: convert the "
        "result, or the arrays"
    )


def as_dtype(value: float, dtype: str) -> float:
    """The number of `dtype` that is nearest to `value`."""
    if dtype == "float64" or not math.isfinite(value):
        return value
    try:
        if dtype != "bfloat16":
            return float(unpack("e", pack("e", value))[0]) if dtype == "float16" else float(unpack("f", pack("f", value))[0])
        (bits,) = unpack("I", pack("f", value))
        return float(unpack("f", pack("I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))[0])
    except (OverflowError, error):
        return math.copysign(math.inf, value)
