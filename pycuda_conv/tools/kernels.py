"""The closed list of kernels' texts: all that problems of any kind, size and number may ask for on a GPU or on OpenCL."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from pycuda_conv.engines import batch_norm, registry
from pycuda_conv.engines.texts import TextFamily
from pycuda_conv.runtime.target import Target
from pycuda_conv.tools.terminal import OK, console, table

ARCHITECTURES = ("sm_90a", "sm_80", "opencl")


def device_of(architecture: str) -> Any:
    """A device that is asked for its texts alone."""
    if architecture == "opencl":
        return SimpleNamespace(backend="opencl", capability=(0, 0), multiprocessors=2, model="", name="opencl")
    return Target(architecture)


def families(architecture: str) -> list[TextFamily]:
    """All texts of an architecture."""
    device = device_of(architecture)
    copy = TextFamily("copy_strided", {"DTYPE": (16, 17, 32, 64), "INDEX_64": (0, 1), "THREADS": (256,)})
    return [*registry.texts(device), *batch_norm.texts(device), copy]


def run(architectures: tuple[str, ...], one_by_one: bool) -> int:
    """Print how many texts each kernel file has, or each of them."""
    for architecture in architectures or ARCHITECTURES:
        found = families(architecture)
        if one_by_one:
            for family in found:
                for defines in family:
                    print(architecture, family.file, *(f"{name}={value}" for name, value in sorted(defines.items())))
            continue
        counts: Counter[str] = Counter()
        large: Counter[str] = Counter()
        for family in found:
            for defines in family:
                (large if defines.get("INDEX_64") else counts)[family.file] += 1
        rows = [(f"{file}.cu", f"{counts[file]:,}", f"{large[file]:,}" if large[file] else "") for file in sorted(counts)]
        rows.append(("all", f"{sum(counts.values()):,}", f"{sum(large.values()):,}"))
        columns = ("kernels", "texts", "for arrays of 2^31 elements")
        console().print(table(f"Kernels for {architecture}", columns, rows, left=("kernels",)))
    return OK
