#!/usr/bin/env python3
"""Write cu/README.md: every file of cu/ by its first line, family by family, in the order to read them.

    python scripts/kernel_index.py
"""

from __future__ import annotations

import re
from pathlib import Path

CU = Path(__file__).resolve().parent.parent / "cu"

#: The families in the order to read them, and what they are.
FAMILIES = {
    "lesson": "One idea each in 20 to 50 lines of plain CUDA C, with a question: `pycuda_conv.lesson(name)`. Nothing else uses them.",
    "core": "What every kernel includes: numbers, division, the epilogue, what tensor cores lose. `portable.cuh` is the portable dialect, "
    "in which a text is CUDA C++ and OpenCL C.",
    "direct": "Plain cores. The portable dialect: these kernels run on OpenCL too. Steps 1 to 6 of the course.",
    "depthwise": "One channel a filter. The portable dialect, but for `toeplitz.cu`, which uses tensor cores.",
    "mma": "Tensor cores by `mma.sync` and `cp.async`: Ampere and later. C++17.",
    "hopper": "Tensor cores by `wgmma`, loads by TMA: Hopper. C++17.",
    "fft": "Convolution as products of Fourier transforms. The portable dialect.",
    "layout": "Kernels that change how arrays lie, or their types.",
    "images": "Filters of images and volumes of one channel, at any border, from pixels of any type. The portable dialect.",
    "nn": "What stands behind a convolution: batch norm, max pooling. The portable dialect.",
    "": "",
}
#: Files to begin with; the others follow by name, headers first.
FIRST = (
    "pixel.cu", "halo.cu", "channels.cu", "product.cu", "tensor_core.cu",
    "numbers.cuh", "portable.cuh", "division.cuh", "launch.cuh", "single.cu", "tile.cu", "batched.cu", "gemm.cu", "fragments.cuh",
    "ptx.cuh",
)  # fmt: skip


def order(path: Path) -> tuple[int, bool, str]:
    """Where a file stands in its family."""
    return FIRST.index(path.name) if path.name in FIRST else len(FIRST), path.suffix == ".cu", path.name


def first_line(path: Path) -> str:
    """What the file says of itself."""
    line = path.read_text().split("\n", 1)[0]
    return re.sub(r"^// [\w/]+\.cuh?(: ?|, |  +)?", "", line)


def index() -> str:
    """The text of cu/README.md."""
    lines = [
        "# The kernels", "",
        "Each file opens with its formula, how threads and blocks are mapped to the work, and what lies in shared memory. Read the",
        "families in this order. [The course](../docs/course.md) goes through the first ones step by step.", "",
        "`python scripts/kernel_index.py` makes this page of the files' first lines.",
    ]  # fmt: skip
    for family, words in FAMILIES.items():
        paths = sorted((CU / family).rglob("*.cu*") if family else CU.glob("*.cu*"), key=order)
        if not paths:
            continue
        lines += ["", f"## {family}", "", words] if family else []
        lines += ["", "| file | what it is |", "|---|---|"]
        for path in paths:
            text = first_line(path).replace("|", "\\|")
            where = path.relative_to(CU).as_posix()
            lines.append(f"| [`{path.name}`]({where}) | {text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (CU / "README.md").write_text(index())
