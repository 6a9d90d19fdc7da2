"""The structs of numbers that kernels take: read from the kernels' texts, so that no member is named twice."""

from __future__ import annotations

import sys
from collections import namedtuple
from typing import Any

from pycuda_conv.runtime.base import shown_file, struct_members


def kernel_struct(file: str, name: str) -> Any:
    """The class of a struct's values: a named tuple with the members that the kernel's text declares, and explains, in their order.

    `file` is the kernel's in ``cu/``, without ``.cu``, or a header. There is a ``TypeError`` if it has no such struct, or one with
    members other than 64-bit integers.
    """
    made: Any = namedtuple(name, struct_members(file, name))  # type: ignore[misc]
    made.__doc__ = f"struct {name} of {shown_file(file)}"
    made.__module__ = sys._getframe(1).f_globals.get("__name__", __name__)  # so that it can be pickled
    return made
