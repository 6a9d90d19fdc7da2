"""The process that compiles one kernel for the cache on disk: run as a module, with a pickled launch on stdin."""

from __future__ import annotations

import os
import pickle
import sys

from pycuda_conv.runtime.opencl import opencl_device
from pycuda_conv.runtime.workers import NICENESS

if __name__ == "__main__":
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    opencl_device().compile(pickle.load(sys.stdin.buffer))
