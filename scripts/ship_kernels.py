#!/usr/bin/env python3
"""Compile the most used kernels for some GPUs into the package, for ``make wheel GPU=sm_90a,sm_80``.

Which they are is counted: how many of some thousand random problems of all families, and of the layers of common networks, need each.
"""

from __future__ import annotations

import argparse
import sys
import zipfile

from pycuda_conv.runtime import binaries
from pycuda_conv.runtime.compiler import compiler
from pycuda_conv.runtime.target import Target
from pycuda_conv.tools.warm import compile_all, most_used

#: Texts that are shipped for a GPU, if --count says nothing: on Hopper they serve three quarters of random problems.
COUNT = {"sm_90a": 1000}
OTHERS = 400


def main() -> int:
    """Write the archive that the package looks into."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gpus", help="architectures with commas between them, as in sm_90a,sm_80")
    parser.add_argument("--count", type=int, help="kernels for each; by default 1000 for sm_90a and 400 for others")
    parser.add_argument("--each", type=int, default=400, help="random problems of each family that are counted")
    arguments = parser.parse_args()
    made_by, shipped = compiler(), {}
    for name in arguments.gpus.split(","):
        target = Target(name)
        made, failed = compile_all(most_used(target, arguments.count or COUNT.get(name, OTHERS), arguments.each), made_by)
        if failed:
            print(f"{len(failed)} kernels failed:\n" + "\n".join(failed[:5]), file=sys.stderr)
            return 1
        shipped |= {binaries.shipped_name(text.source, text.arch): binary for text, binary in made.items()}
        print(f"{name}: {len(made)} kernels, {sum(map(len, made.values())) / 1e6:.1f} MB")
    binaries.SHIPPED.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(binaries.SHIPPED, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, binary in sorted(shipped.items()):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), binary, zipfile.ZIP_DEFLATED)  # the same bytes every time
    print(f"{binaries.SHIPPED}: {binaries.SHIPPED.stat().st_size / 1e6:.1f} MB, compiled by {made_by.name} {made_by.version}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
