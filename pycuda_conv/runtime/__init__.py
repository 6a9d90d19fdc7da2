"""Running kernels: contexts, modules, memory and launches, on CUDA or on OpenCL. It knows nothing of convolution."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, Literal

from pycuda_conv.errors import BackendError, ConvArgumentError, brief
from pycuda_conv.runtime.base import Device, KernelLaunch

if TYPE_CHECKING:
    from pycuda_conv.runtime.device import CudaDevice

__all__ = ["Device", "KernelLaunch", "cuda_device", "default_backend", "device_count", "device_of_pointer", "get_device", "named_place"]

BACKENDS = ("cuda", "opencl")


def cuda_device(ordinal: int) -> CudaDevice:
    """The CUDA device of that number."""
    from pycuda_conv.runtime.device import cuda_device

    return cuda_device(ordinal)


def device_count() -> int:
    """How many GPUs the CUDA driver sees; a ``BackendError`` where it can't be asked."""
    from pycuda_conv.runtime import driver

    return int(driver.pycuda().Device.count())


def device_of_pointer(pointer: int) -> int:
    """The number of the GPU in whose memory `pointer` lies."""
    from pycuda_conv.runtime.device import device_of_pointer

    return device_of_pointer(pointer)


@functools.cache
def default_backend() -> str:
    """``"cuda"`` where PyCUDA finds a GPU, else ``"opencl"``; ``PYCUDA_CONV_BACKEND`` overrides this."""
    wanted = os.environ.get("PYCUDA_CONV_BACKEND")
    if wanted:
        if wanted not in BACKENDS:
            raise BackendError(f"PYCUDA_CONV_BACKEND must be one of {BACKENDS}, got {wanted!r}")
        return wanted
    from pycuda_conv.runtime.driver import why_not

    return "opencl" if why_not() else "cuda"


def get_device(device: Any = None) -> Device:
    """The device that `device` names.

    Parameters
    ----------
    device : None, int, str or Device
        None: the default backend's first device; a number or ``"cuda:1"``: that GPU; ``"cuda"``: GPU 0; ``"opencl"``
        or ``"cpu"``: the portable kernels on OpenCL.

    Raises
    ------
    ConvArgumentError, TypeError
        A name or number that means nothing.
    BackendError
        A device that is not there, with what is missing.
    """
    if isinstance(device, Device):
        return device
    place = named_place(default_backend() if device is None else device)
    if place == "opencl":
        from pycuda_conv.runtime.opencl import opencl_device

        return opencl_device()
    assert isinstance(place, int)
    return cuda_device(place)


def named_place(device: Any) -> int | Literal["opencl"]:
    """What `device` names, whether it is there or not: a GPU's number, or ``"opencl"``; errors as those of :func:`get_device`."""
    if isinstance(device, str):
        if device in ("opencl", "cpu"):
            return "opencl"
        name, colon, number = device.partition(":")
        if name == "cuda" and (not colon or (number.isascii() and number.isdecimal())):
            return int(number or 0)
    elif isinstance(device, int) and not isinstance(device, bool):
        if device >= 0:
            return device
    elif type(device).__module__.partition(".")[0] == "torch":  # a torch.device
        return named_place(str(device))
    else:
        raise TypeError(f"device must be None, an int or a str, got {brief(device)} of type {type(device).__name__}")
    raise ConvArgumentError(f"device must be None, a GPU's number, 'cuda', 'cuda:N', 'opencl' or 'cpu', got {device!r}")
