#!/usr/bin/env python3
"""Compile the most used kernels for some GPUs into the package, for ``make wheel GPU=sm_90a,sm_80``.

Which they are is counted: how many of some thousand random problems of all families, and of the layers of common networks, need each.
"""

from __future__ import annotations

import argparse
import sys

from pycuda_conv.runtime import binaries
from pycuda_conv.runtime.compiler import compiler
from pycuda_conv.runtime.target import Target
from pycuda_conv.tools.warm import WHEEL_RANDOM, Text, compile_all, of_wheel, write_archive


def main() -> int:
    """Write the archive that the package looks into."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gpus", help="architectures with commas between them, as in sm_90a,sm_80")
    parser.add_argument("--count", type=int, help="kernels for each; by default 1000 for sm_90a and 400 for others")
    parser.add_argument("--each", type=int, default=WHEEL_RANDOM, help="random problems of each family that are counted")
    arguments = parser.parse_args()
    made_by = compiler()
    shipped: dict[Text, bytes] = {}
    for name in arguments.gpus.split(","):
        made, failed = compile_all(of_wheel(Target(name), arguments.count, arguments.each), made_by)
        if failed:
            print(f"{len(failed)} kernels failed:\n" + "\n".join(failed[:5]), file=sys.stderr)
            return 1
        shipped |= made
        print(f"{name}: {len(made)} kernels, {sum(map(len, made.values())) / 1e6:.1f} MB")
    binaries.SHIPPED.parent.mkdir(exist_ok=True)
    write_archive(binaries.SHIPPED, shipped)
    print(f"{binaries.SHIPPED}: {binaries.SHIPPED.stat().st_size / 1e6:.1f} MB, compiled by {made_by.name} {made_by.version}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
