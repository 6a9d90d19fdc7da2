"""Running kernels: contexts, modules, memory and launches, on CUDA or on OpenCL. Knows nothing of convolution."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pycuda_conv.runtime.base import BackendError, Device, DeviceMemoryError, Step

if TYPE_CHECKING:
    from pycuda_conv.runtime.cuda import CudaDevice

__all__ = ["BackendError", "Device", "DeviceMemoryError", "Step", "cuda_device", "default_backend", "get_device"]

BACKENDS = ("cuda", "opencl")


@lru_cache(maxsize=None)
def cuda_device(ordinal: int) -> CudaDevice:
    """The CUDA device of that number; made once, shared by every thread."""
    from pycuda_conv.runtime.cuda import CudaDevice

    return CudaDevice(ordinal)


@lru_cache(maxsize=None)
def _opencl_device() -> Device:
    from pycuda_conv.runtime.opencl import OpenCLDevice

    return OpenCLDevice()


@lru_cache(maxsize=None)
def default_backend() -> str:
    """``"cuda"`` where PyCUDA finds a GPU, else ``"opencl"``; ``PYCUDA_CONV_BACKEND`` decides when it is set."""
    wanted = os.environ.get("PYCUDA_CONV_BACKEND")
    if wanted:
        if wanted not in BACKENDS:
            raise BackendError(f"PYCUDA_CONV_BACKEND must be one of {BACKENDS}, got {wanted!r}")
        return wanted
    from pycuda_conv.runtime.cuda import why_not

    return "opencl" if why_not() else "cuda"


def get_device(device: Any = None) -> Device:
    """The device that `device` names.

    Parameters
    ----------
    device : None, int or str
        None: the default backend's first device; a number or ``"cuda:1"``: that GPU; ``"cuda"``: GPU 0; ``"opencl"``
        or ``"cpu"``: the portable kernels on OpenCL.

    Raises
    ------
    ValueError, TypeError
        A name or number that means nothing.
    BackendError
        A device that is not there, with what is missing.
    """
    if device is None:
        device = default_backend()
    if isinstance(device, str):
        name, _, number = device.partition(":")
        if name in ("opencl", "cpu") and not number:
            return _opencl_device()
        if name == "cuda" and (not number or number.isdecimal()):
            return cuda_device(int(number or 0))
        raise ValueError(f"device must be None, a GPU's number, 'cuda', 'cuda:N', 'opencl' or 'cpu', got {device!r}")
    if isinstance(device, int) and not isinstance(device, bool):
        if device < 0:
            raise ValueError(f"device must be None, a GPU's number, 'cuda', 'cuda:N', 'opencl' or 'cpu', got {device!r}")
        return cuda_device(device)
    if type(device).__module__.partition(".")[0] == "torch":  # a torch.device
        return get_device(str(device))
    raise TypeError(f"device must be None, an int or a str, got {device!r} of type {type(device).__name__}")
