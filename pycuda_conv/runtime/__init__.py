"""Running kernels: contexts, modules, memory and launches, on CUDA or on OpenCL. It knows nothing of convolution."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, Literal

from pycuda_conv.errors import BackendError, ConvArgumentError, brief, did_you_mean
from pycuda_conv.runtime.base import Device, KernelLaunch, pycuda_context

if TYPE_CHECKING:
    from pycuda_conv.runtime.device import CudaDevice

__all__ = [
    "Device",
    "KernelLaunch",
    "bound_to_thread",
    "cuda_device",
    "default_backend",
    "device_count",
    "get_device",
    "named_place",
    "pycuda_device",
]

BACKENDS = ("cuda", "opencl")


def cuda_device(ordinal: int) -> CudaDevice:
    """The primary context of the GPU of that number."""
    from pycuda_conv.runtime import contexts

    return contexts.cuda_device(ordinal)


def pycuda_device() -> CudaDevice | None:
    """The device of PyCUDA's current context, where host arrays are convolved unless the caller says otherwise; None if there is none."""
    if pycuda_context() is None or default_backend() != "cuda":
        return None
    from pycuda_conv.runtime import contexts

    return contexts.chosen()


def bound_to_thread() -> bool:
    """Whether host arrays are convolved in a context that this thread alone has made current."""
    device = pycuda_device()
    return device is not None and device.where != device.ordinal


def device_count() -> int:
    """How many GPUs the CUDA driver sees; a ``BackendError`` where it can't be asked."""
    from pycuda_conv.runtime import driver

    return int(driver.pycuda().Device.count())


@functools.cache
def default_backend() -> str:
    """``"cuda"`` where PyCUDA finds a GPU, else ``"opencl"``; ``PYCUDA_CONV_BACKEND`` overrides this."""
    wanted = os.environ.get("PYCUDA_CONV_BACKEND")
    if wanted:
        if wanted not in BACKENDS:
            raise BackendError(f"PYCUDA_CONV_BACKEND must be one of {BACKENDS}, got {wanted!r}{_meant(wanted, BACKENDS)}")
        return wanted
    from pycuda_conv.runtime.driver import why_not

    return "opencl" if why_not() else "cuda"


def get_device(device: Any = None) -> Device:
    """The device that `device` names.

    Parameters
    ----------
    device : None, int, str, Device, pycuda.driver.Device or pycuda.driver.Context
        None: PyCUDA's current context, or else the default backend's first device; a number or ``"cuda:1"``: that GPU; ``"cuda"``: GPU 0;
        ``"opencl"`` or ``"cpu"``: the portable kernels on OpenCL. A GPU is used in PyCUDA's current context, if that is one of the GPU's,
        or else in the primary context.

    Raises
    ------
    ConvArgumentError, TypeError
        A name or number that means nothing.
    BackendError
        A device that is not there, with what is missing.
    """
    if isinstance(device, Device):
        return device
    if type(device).__module__.partition(".")[0] == "pycuda":
        from pycuda_conv.runtime import contexts

        return contexts.of_pycuda(device)
    place = named_place(default_backend() if device is None else device)
    if place == "opencl":
        from pycuda_conv.runtime.opencl import opencl_device

        return opencl_device()
    assert isinstance(place, int)
    from pycuda_conv.runtime import contexts

    return contexts.chosen(None if device is None else place)


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
    hint = _meant(device, ("cuda", "opencl", "cpu"))
    raise ConvArgumentError(f"device must be None, a GPU's number, 'cuda', 'cuda:N', 'opencl' or 'cpu', got {device!r}{hint}")


def _meant(word: Any, known: tuple[str, ...]) -> str:
    """:func:`did_you_mean` for the name of a device, which may have a number, and for other people's names of devices."""
    if not isinstance(word, str):
        return ""
    name, colon, number = word.lower().partition(":")
    name = {"gpu": "cuda", "nvidia": "cuda", "pocl": "opencl", "host": "opencl"}.get(name.strip(), name)
    hint = did_you_mean(name, known)
    return hint.replace("'cuda'", f"'cuda:{number}'") if colon and number.isdecimal() else hint
