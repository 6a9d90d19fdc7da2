"""The closed list of kernels' texts: all that problems of any kind, size and number may need on a GPU or on OpenCL.

They are the texts of the planner's choices. The shipped table of measurements has no others.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from pycuda_conv.engines import registry
from pycuda_conv.engines.images import window as images
from pycuda_conv.engines.layout import cast as casting
from pycuda_conv.engines.nn import batch_norm, join, max_pool, norm
from pycuda_conv.engines.nn import fold_norms as folding
from pycuda_conv.engines.variants import VariantSet
from pycuda_conv.runtime.base import shown_file
from pycuda_conv.runtime.target import Target
from pycuda_conv.tools.terminal import OK, console, table

ARCHITECTURES = ("sm_90a", "sm_80", "opencl")


def device_of(architecture: str) -> Any:
    """A device that only gives its texts."""
    if architecture == "opencl":
        return SimpleNamespace(backend="opencl", capability=(0, 0), multiprocessors=2, model="", name="opencl")
    return Target(architecture)


def families(architecture: str) -> list[VariantSet]:
    """All families of texts of an architecture."""
    device = device_of(architecture)
    planned = [*registry.variants(device), *batch_norm.variants(device), *images.variants(device)]
    if device.backend == "cuda":  # other devices' arrays lie in host memory
        planned += besides(device)
    return planned


def besides(device: Any) -> list[VariantSet]:
    """The texts that a GPU needs beside convolutions and batch norms: copies, casts, poolings, other norms."""
    copy = VariantSet("copy_strided", {"DTYPE": (16, 17, 32, 64), "INDEX_64": (0, 1), "THREADS": (256,)})
    return [copy, *casting.variants(), *max_pool.variants(), *folding.variants(), *norm.variants(device), *join.variants()]


def run(architectures: tuple[str, ...], one_by_one: bool) -> int:
    """Print the number of texts of each kernel file, or each text."""
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
        names = {file: shown_file(file).partition("/")[2] for file in sorted(counts)}
        rows = [(name, f"{counts[file]:,}", f"{large[file]:,}" if large[file] else "") for file, name in names.items()]
        rows.append(("all", f"{sum(counts.values()):,}", f"{sum(large.values()):,}"))
        columns = ("kernels", "texts", "for arrays of 2^31 elements")
        console().print(table(f"Kernels for {architecture}", columns, rows, left=("kernels",)))
    return OK
