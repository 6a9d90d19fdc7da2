"""The declarations of OpenCL's functions, as far as our kernels call them.

PoCL reads its 18,000 lines of declarations for each text that it builds: 0.13 of 0.15 seconds. Texts that tests build bring these instead.
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

from pycuda_conv.runtime.base import KERNEL_DIR

#: The vectors that kernels use.
VECTORS = {"float8", "double4", "long4", "int8", "uchar8", "char8", "ushort8", "short8"}


def _header() -> Path | None:
    """PoCL's file of declarations; None where PoCL is not that of the wheel."""
    found = importlib.util.find_spec("pocl_binary_distribution")
    header = Path(found.origin).parent / ".libs/share/pocl/include/opencl-c.h" if found and found.origin else None
    return header if header and header.exists() else None


@cache
def declared() -> tuple[str, list[str]]:
    """What comes before a kernel's text, and the options to build it with, which turn PoCL's own declarations off.

    Those of functions that no kernel names are left out, and those of vectors that none has.
    """
    header = _header()
    if header is None:
        return "", []
    named = {word for file in KERNEL_DIR.rglob("*.cu*") for word in re.findall(r"\w+", file.read_text())}
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", header.read_text().replace("\\\n", " "), flags=re.S)
    kept = ["#undef _OPENCL_H_"]
    for one in re.findall(r"^[ \t]*#[^\n]*|[^;#]+;", text, re.M):
        name = re.search(r"(\w+)\s*\(", one)
        vectors = set(re.findall(r"\b(?:u?(?:char|short|int|long)|float|double|half)(?:2|3|4|8|16)\b", one))
        if one.lstrip().startswith("#") or (name and name[1] in named and vectors <= VECTORS):
            kept.append(one.strip())
    return "\n".join([*kept, "#line 1", ""]), ["-D_OPENCL_H_", "-I", str(header.parent)]
