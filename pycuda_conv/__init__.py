"""Convolution for people who work in Python close to the CUDA driver.

numpy, torch, CuPy, PyCUDA and dask arrays go in, and the same kind comes out. The kernels are CUDA C, compiled when they are first
needed. Without an NVIDIA GPU the portable ones run on the CPU, through PoCL.

A call goes one way. :mod:`ops` has the signatures, and :mod:`dispatch` leads each call: :mod:`arrays` says what the caller's arrays are,
:mod:`problem` says what is asked and refuses what is wrong, :mod:`plan` decides how, an engine in :mod:`engines` turns that into launches
of the kernels in ``cu/``, :mod:`execute` puts the arrays' addresses to them, and :mod:`runtime` launches.

Neither CUDA nor OpenCL survives a fork. A worker that is forked after the first call gets a ``BackendError``: start workers with
``multiprocessing.get_context("spawn")``, a torch ``DataLoader``'s with ``multiprocessing_context="spawn"``, or make the first call in
the workers.
"""

import os

from pycuda_conv import interrupt

if interrupt.is_command():
    interrupt.end_in_one_line()
    # numpy's threads spin while they wait for each other. Its products are small in the command, which has other work for the cores
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from importlib.metadata import PackageNotFoundError, version

from pycuda_conv import handlers, measure  # noqa: F401 dispatch and tune ask them
from pycuda_conv.arrays.dlpack import dlpack
from pycuda_conv.bias_gradients import conv1d_bias, conv2d_bias, conv3d_bias
from pycuda_conv.errors import BackendError, ConvArgumentError, DeviceMemoryError
from pycuda_conv.invariance import batch_invariant
from pycuda_conv.kernels import Kernel, Lesson, include_dirs, lesson, source
from pycuda_conv.many import conv1d_many, conv2d_many, conv3d_many
from pycuda_conv.ops import (
    conv1d,
    conv1d_input,
    conv1d_weight,
    conv2d,
    conv2d_input,
    conv2d_weight,
    conv3d,
    conv3d_input,
    conv3d_weight,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
)
from pycuda_conv.plan import BoundPlan, Plan
from pycuda_conv.problem import ConvProblem

try:
    __version__ = version("pycuda_conv")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+unknown"

__all__ = [
    "BackendError", "BoundPlan", "ConvArgumentError", "ConvProblem", "DeviceMemoryError", "Kernel", "Lesson", "Plan", "batch_invariant",
    "conv1d", "conv1d_bias", "conv1d_input", "conv1d_many", "conv1d_weight", "conv2d", "conv2d_bias", "conv2d_input", "conv2d_many",
    "conv2d_weight", "conv3d", "conv3d_bias", "conv3d_input", "conv3d_many", "conv3d_weight", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "dlpack", "include_dirs", "lesson", "source",
]
