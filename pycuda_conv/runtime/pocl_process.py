"""One kernel is compiled for the cache on disk by a process of its own, :mod:`pycuda_conv.runtime.pocl_compile`.

While PoCL compiles a kernel, no other kernel of the process begins. So a kernel that nobody waits for is compiled by another process.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

from pycuda_conv.runtime.base import KernelLaunch
from pycuda_conv.runtime.compiler import CompileError

PROCESS = "pycuda_conv.runtime.pocl_compile"


def compile_elsewhere(step: KernelLaunch) -> None:
    """Compile the kernel of `step` in another process, which has less of the processor than this one.

    Raises
    ------
    CompileError
        The process could not be started, or failed.
    """
    path = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        done = subprocess.run(
            [sys.executable, "-m", PROCESS], input=pickle.dumps(step), capture_output=True, check=False,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)}, start_new_session=True,  # Ctrl-C is not for it
        )
    except OSError as error:
        raise CompileError(f"{sys.executable} can't be started: {error}") from error
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise CompileError(f"PoCL's process ended with {done.returncode}: {last}")
