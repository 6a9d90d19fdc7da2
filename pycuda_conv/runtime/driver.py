"""The CUDA driver: PyCUDA's module of it, and the library itself for what PyCUDA lacks."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from functools import cache
from typing import Any

from pycuda_conv.errors import BackendError
from pycuda_conv.runtime import binaries
from pycuda_conv.runtime.base import forked
from pycuda_conv.runtime.compiler import CompileError, compiler
from pycuda_conv.runtime.pinned import PinnedPool, default_limit

#: The oldest PyCUDA that serves, the one in setup.cfg.
OLDEST = 2026, 1

_initialised = False
_forked = False


def _after_fork() -> None:
    global _forked
    _forked = _initialised
    native = sys.modules.get("pycuda_conv.runtime._launch")
    if _forked and native is not None:
        native.stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def check_not_forked() -> None:
    """Raise an error in a child process whose parent was using CUDA when it was forked."""
    if _forked:
        raise forked("CUDA")


def check_version(version: tuple[int, ...]) -> None:
    """Refuse a PyCUDA that is too old."""
    if tuple(version[: len(OLDEST)]) < OLDEST:
        found, wanted = (".".join(map(str, one)) for one in (version, OLDEST))
        raise BackendError(f"PyCUDA {found} is too old, and {wanted} or a newer one is needed: pip install --upgrade pycuda")


def pycuda() -> Any:
    """``pycuda.driver``, initialised. It is imported here, since the package must import without PyCUDA."""
    global _initialised
    check_not_forked()
    try:
        drv = importlib.import_module("pycuda.driver")
    except ImportError as error:
        if not has_gpu():
            raise BackendError("no NVIDIA GPU was found") from error
        raise BackendError(f"PyCUDA is not importable ({error}); install it with: pip install pycuda nvidia-cuda-nvrtc") from error
    if not _initialised:
        check_version(getattr(sys.modules.get("pycuda"), "VERSION", OLDEST))
        try:
            drv.init()
        except drv.Error as error:
            raise BackendError(f"the CUDA driver did not start: {error}") from error
        if not hasattr(drv.Device, "retain_primary_context"):
            version = getattr(importlib.import_module("pycuda"), "VERSION_TEXT", "here")
            raise BackendError(f"PyCUDA {version} is too old, it has no primary contexts; install another: pip install -U pycuda")
        _initialised = True
    return drv


@cache
def has_gpu() -> bool:
    """Whether NVIDIA's management library knows a GPU. Unlike the driver, it leaves later forks of this process alone."""
    try:
        library = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    except OSError:
        return False
    count = ctypes.c_uint(0)
    return library.nvmlInit_v2() == 0 and library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 and count.value > 0


def newest() -> int:
    """The version of CUDA that the driver supports."""
    return int(pycuda().get_driver_version()) // 1000


def why_not() -> str | None:
    """Why CUDA can't be used here, or None if it can."""
    try:
        drv = pycuda()
    except BackendError as error:
        return str(error)
    if drv.Device.count() == 0:
        return "the CUDA driver sees no GPU (is CUDA_VISIBLE_DEVICES set?)"
    try:
        compiler(newest())
    except CompileError as error:
        if not binaries.serves("sm_{}{}".format(*drv.Device(0).compute_capability())):
            return str(error)
    return None


@cache
def libcuda() -> Any:
    """The driver library itself, for what PyCUDA lacks, and for what has to work in contexts that PyCUDA did not make current."""
    return declared(ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"))


def declared(library: Any) -> Any:
    """The driver `library` with the types of the arguments of all functions that are called."""
    pointer, word, size, number, flags = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint
    functions: dict[str, tuple[Any, ...]] = {
        "cuCtxGetCurrent": (pointer,), "cuCtxPushCurrent_v2": (pointer,), "cuCtxPopCurrent_v2": (pointer,), "cuCtxGetDevice": (pointer,),
        "cuDevicePrimaryCtxGetState": (number, pointer, pointer), "cuStreamGetCtx": (pointer, pointer),
        "cuStreamCreate": (pointer, flags), "cuStreamSynchronize": (pointer,), "cuStreamWaitEvent": (pointer, pointer, flags),
        "cuStreamIsCapturing": (pointer, pointer),
        "cuStreamBeginCapture_v2": (pointer, number), "cuStreamEndCapture": (pointer, pointer),
        "cuEventCreate": (pointer, flags), "cuEventRecord": (pointer, pointer), "cuEventSynchronize": (pointer,),
        "cuEventQuery": (pointer,),
        "cuGraphLaunch": (pointer, pointer), "cuGraphInstantiateWithFlags": (pointer, pointer, word), "cuGraphDestroy": (pointer,),
        "cuGraphExecDestroy": (pointer,),
        "cuMemAlloc_v2": (pointer, size), "cuMemFree_v2": (word,), "cuMemGetInfo_v2": (pointer, pointer),
        "cuMemHostAlloc": (pointer, size, flags), "cuMemFreeHost": (pointer,), "cuPointerGetAttribute": (pointer, number, word),
        "cuMemcpyHtoDAsync_v2": (word, pointer, size, pointer), "cuMemcpyDtoHAsync_v2": (pointer, word, size, pointer),
        "cuMemcpyDtoDAsync_v2": (word, word, size, pointer), "cuMemcpy2DAsync_v2": (pointer, pointer),
        "cuMemsetD8Async": (word, ctypes.c_ubyte, size, pointer),
        "cuFuncSetAttribute": (pointer, number, number), "cuFuncGetAttribute": (pointer, number, pointer),
        "cuFuncGetParamInfo": (pointer, size, pointer, pointer),
        "cuOccupancyMaxActiveBlocksPerMultiprocessor": (pointer, pointer, number, size), "cuLaunchKernelEx": (pointer,) * 4,
    }  # fmt: skip
    for name, types in functions.items():
        getattr(library, name).argtypes = types
    if hasattr(library, "cuCtxGetId"):  # since CUDA 12.0
        library.cuCtxGetId.argtypes = pointer, pointer
    return library


@cache
def pinned() -> PinnedPool:
    """The process's pool of page-locked memory."""
    return PinnedPool(libcuda(), default_limit())


def check(code: int, what: str) -> None:
    if code:
        name = ctypes.c_char_p()
        libcuda().cuGetErrorName(code, ctypes.byref(name))
        raise RuntimeError(f"{what} failed: {(name.value or b'an unknown error').decode()} ({code})")


def address_of(function: str) -> int:
    """The address of a function of the driver."""
    return ctypes.cast(getattr(libcuda(), function), ctypes.c_void_p).value or 0


def handle_of(stream: Any) -> int:
    """The driver's handle of a stream: 0 for None, the default stream; that of a PyCUDA stream; an int unchanged."""
    return int(getattr(stream, "handle", stream) or 0)


def current_context() -> int:
    """The handle of this thread's current context, or 0."""
    found = ctypes.c_void_p()
    check(libcuda().cuCtxGetCurrent(ctypes.byref(found)), "cuCtxGetCurrent")
    return found.value or 0


def current_id() -> int:
    """The number of this thread's current context, which no other context has or will have; 0 where none is current, or it is gone.

    A handle does not tell: a new context gets that of one that is gone. Drivers before CUDA 12.0 have no such numbers: 0.
    """
    ask, found = getattr(libcuda(), "cuCtxGetId", None), ctypes.c_uint64()
    return found.value if ask is not None and ask(None, ctypes.byref(found)) == 0 else 0


def push(context: int) -> None:
    """Make a context current by the driver alone. PyCUDA's own push would forget what was current before, if PyCUDA did not make it so."""
    check(libcuda().cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")


def pop() -> None:
    """Make the context current again that was so before :func:`push`."""
    check(libcuda().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())), "cuCtxPopCurrent")
