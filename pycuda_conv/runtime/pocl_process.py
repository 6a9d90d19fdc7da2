"""A process that compiles one kernel for the cache on disk: ``python -m pycuda_conv.runtime.pocl_process`` with a pickled launch on stdin.

While PoCL compiles a kernel, no other kernel of the process begins. So a kernel that nobody waits for is compiled by another process.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pycuda_conv
from pycuda_conv.runtime.base import KernelLaunch
from pycuda_conv.runtime.compiler import CompileError
from pycuda_conv.runtime.workers import NICENESS


def compile_elsewhere(step: KernelLaunch) -> None:
    """Compile the kernel of `step` in another process, which has less of the processor than this one.

    Raises
    ------
    CompileError
        The process could not be started, or failed.
    """
    path = [str(Path(pycuda_conv.__file__).resolve().parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__], input=pickle.dumps(step), capture_output=True, check=False,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)}, start_new_session=True,  # Ctrl-C is not for it
        )
    except OSError as error:
        raise CompileError(f"{sys.executable} can't be started: {error}") from error
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise CompileError(f"PoCL's process ended with {done.returncode}: {last}")


def main() -> None:
    from pycuda_conv.runtime.opencl import opencl_device

    if hasattr(os, "nice"):
        os.nice(NICENESS)
    opencl_device().compile(pickle.load(sys.stdin.buffer))


if __name__ == "__main__":
    main()
