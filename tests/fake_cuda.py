"""CUDA devices on a machine without a GPU: they compile nothing and run nothing, and what the driver is asked for is written down."""

import ctypes
import hashlib
import re
import shutil
import subprocess
import sys
import threading
from collections import OrderedDict
from functools import cache
from math import prod
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from reference import kept_file

from pycuda_conv import repeat
from pycuda_conv.arrays import device as arrays_device
from pycuda_conv.runtime import contexts, driver, gpu, memory
from pycuda_conv.runtime import device as device_module
from pycuda_conv.runtime.compile_queue import CompileQueue

SOURCE = Path(__file__).with_suffix(".c")


@cache
def _built() -> Path:
    """The driver, which is built once."""
    command = "gcc", "-O1", "-w", "-pthread", "-shared", "-fPIC", str(SOURCE), "-o"
    name = f"fake_cuda_{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:32]}.so"
    return kept_file(name, lambda made: subprocess.run([*command, str(made)], check=True, timeout=900))


class DriverError(RuntimeError):
    """PyCUDA's Error."""


class DriverMemoryError(DriverError, MemoryError):
    """PyCUDA's MemoryError."""


class _LauncherInC:
    """Which driver the launcher in C calls, and whose arrays it knows: in a process that has a GPU, the true ones again after a test."""

    def __init__(self):
        self._gpuarray = repeat._gpuarray

    def _tell(self, which):
        native = repeat._native
        if which == "true" and self._gpuarray is not None:
            repeat.learn_arrays(self._gpuarray)
        if which == "true" and native is not None and driver._initialised:
            contexts._tell(native)
            for ordinal, device in contexts._primaries.items():
                native.primary(ordinal, device.handle)
            for id in contexts._others:
                native.other(id)

    driver = property(lambda self: "true", _tell)


class FakeCuda:
    """A driver, a copy of its own in `folder`, which takes the true one's place while `monkeypatch` lasts; PyCUDA's part is Python."""

    def __init__(self, folder, monkeypatch):
        if shutil.which("gcc") is None or sys.platform != "linux":
            pytest.skip("the driver's stand-in is built by gcc on Linux")
        self._patch = monkeypatch
        monkeypatch.setattr(_LauncherInC(), "driver", "a stand-in")  # undone last
        file = folder / "fake_cuda.so"
        shutil.copy(_built(), file)
        self.library = library = driver.declared(ctypes.CDLL(str(file)))
        pointer, word, size = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t
        library.cuCtxDetach.argtypes = library.cuCtxSetCurrent.argtypes = (pointer,)
        library.cuMemcpyHtoD_v2.argtypes, library.cuMemcpyDtoH_v2.argtypes = (word, pointer, size), (pointer, word, size)
        self._log = (ctypes.c_char * (1 << 22)).in_dll(library, "fake_log")
        self._length = ctypes.c_size_t.in_dll(library, "fake_length")
        names = "failing", "blocked", "waiting", "strict", "gpus"
        self.failing, self.blocked, self.waiting, self.strict, self.gpus = (ctypes.c_int.in_dll(library, f"fake_{name}") for name in names)
        self.dead, self.foreign = (ctypes.c_long.in_dll(library, f"fake_{name}") for name in ("dead", "foreign"))
        self.total, self.used = (ctypes.c_size_t.in_dll(library, f"fake_{name}") for name in ("total", "used"))
        self.living = library.fake_living
        self.drv = drv = _pycuda(library)
        monkeypatch.setitem(sys.modules, "pycuda.driver", drv)
        self.gpuarray = _gpuarray(drv)
        monkeypatch.setitem(sys.modules, "pycuda.gpuarray", self.gpuarray)
        monkeypatch.setattr(driver, "libcuda", lambda: library)
        monkeypatch.setattr(driver, "_initialised", driver._initialised)
        monkeypatch.setattr(
            CompileQueue, "compile", lambda _, source, arch="", fresh=False: hashlib.sha256(source.encode()).hexdigest().encode()
        )
        monkeypatch.setattr(CompileQueue, "kept", lambda _, source, arch: b"kept")
        for module, name, value in (
            (contexts, "_primaries", {}), (contexts, "_others", OrderedDict()), (contexts, "_in_c", None), (gpu, "_made", {}),
            (contexts, "doubtful", contexts._doubtful),
            (memory, "block_class", cache(memory.block_class.__wrapped__)),
        ):  # fmt: skip
            monkeypatch.setattr(module, name, value)
        for module in (device_module, arrays_device):
            monkeypatch.setattr(module, "block_class", memory.block_class)

    def device(self, launcher):
        """A device whose launches are made in "c" or by "python"."""
        self._patch.setenv("PYCUDA_CONV_LAUNCHER", launcher)
        return contexts.PrimaryContext(0)

    def asked(self, device=None, contexts=False, keep=False):
        """What the driver was asked since this was called last, a line for each call of it; with `contexts`, pushes and pops too.

        With `keep`, this call does not count. The event and the side streams that this thread has of `device` are called own0 to own3.
        """
        text = self._log[: self._length.value].decode()
        if not keep:
            self._length.value = 0
        for i, handle in enumerate(device._streams().own if device else ()):
            text = re.sub(rf"{handle:#x}\b", f"own{i}", text)
        return [line for line in text.splitlines() if contexts or line not in ("push", "pop")]

    def current(self):
        """The handle of the driver's current context in this thread, or None."""
        found = ctypes.c_void_p()
        self.library.cuCtxGetCurrent(ctypes.byref(found))
        return found.value


def _checked(code):
    if code:
        raise (DriverMemoryError if code == 2 else DriverError)(f"the driver's stand-in refuses that: {code}")


def _pycuda(library):
    """``pycuda.driver``: contexts, and memory and streams that belong to PyCUDA's current one."""
    place, local = ctypes.c_void_p, threading.local()

    def stack():
        if not hasattr(local, "stack"):
            local.stack = []
        return local.stack

    def leave():
        if stack():
            _checked(library.cuCtxPopCurrent_v2(ctypes.byref(place())))

    class Context:
        """As PyCUDA's, it takes the driver's current context for the last one on a stack of its own."""

        def __init__(self, handle, gpu):
            self.handle, self._gpu, self.valid = handle, gpu, True

        def push(self):
            leave()
            _checked(library.cuCtxPushCurrent_v2(self.handle))
            stack().append(self)

        @staticmethod
        def pop():
            leave()
            stack().pop()
            if stack():
                _checked(library.cuCtxPushCurrent_v2(stack()[-1].handle))

        @staticmethod
        def get_current():
            while stack() and not stack()[-1].valid:
                stack().pop()
            return stack()[-1] if stack() else None

        @staticmethod
        def get_device():
            found = ctypes.c_int()
            _checked(library.cuCtxGetDevice(ctypes.byref(found)))
            return Device(found.value)

        def detach(self):
            if stack() and stack()[-1] is self:
                stack().pop()
                _checked(library.cuCtxDetach(self.handle))
                if stack():
                    _checked(library.cuCtxPushCurrent_v2(stack()[-1].handle))
            else:
                _checked(library.cuCtxDetach(self.handle))
            self.valid = False

    class Device:
        def __init__(self, ordinal):
            self.ordinal = ordinal

        multiprocessor_count = 132

        @staticmethod
        def count():
            return ctypes.c_int.in_dll(library, "fake_gpus").value

        def name(self):
            return "NVIDIA H200"

        def compute_capability(self):
            return 9, 0

        def get_attribute(self, which):
            return {"shared": 227 << 10, "L2": 50 << 20, "threads": 2048}[which]

        def __eq__(self, other):
            return self.ordinal == other.ordinal

        __hash__ = None

        def retain_primary_context(self):
            found = place()
            _checked(library.cuDevicePrimaryCtxRetain(ctypes.byref(found), self.ordinal))
            return Context(found.value, self)

        def make_context(self):
            leave()
            found = place()
            _checked(library.cuCtxCreate_v2(ctypes.byref(found), 0, self.ordinal))
            stack().append(Context(found.value, self))
            return stack()[-1]

    class PointerHolderBase:
        def __int__(self):
            return self.get_pointer()

        __index__ = __int__

    class DeviceAllocation:
        def __init__(self, address, context):
            self.address, self._context = address, context

        def __int__(self):
            return self.address

        __index__ = __int__

        def __del__(self):
            if self._context.valid and Context.get_current() is not self._context:
                self._context.push()
                library.cuMemFree_v2(self.address)
                Context.pop()
            elif self._context.valid:
                library.cuMemFree_v2(self.address)

    def mem_alloc(nbytes):
        if Context.get_current() is None:
            raise DriverError("no currently active context?")
        found = ctypes.c_uint64()
        _checked(library.cuMemAlloc_v2(ctypes.byref(found), nbytes))
        return DeviceAllocation(found.value, Context.get_current())

    class Stream:
        def __init__(self, flags=0):
            found = place()
            _checked(library.cuStreamCreate(ctypes.byref(found), flags))
            self.handle = found.value

    for cls in (Stream, Context, Device):
        cls.__module__ = "pycuda._driver"

    def copied(function, *arguments):
        _checked(getattr(library, function)(*arguments))

    return SimpleNamespace(
        init=lambda: None, Error=DriverError, MemoryError=DriverMemoryError, get_driver_version=lambda: 13000,
        device_attribute=SimpleNamespace(
            MAX_SHARED_MEMORY_PER_BLOCK_OPTIN="shared", L2_CACHE_SIZE="L2", MAX_THREADS_PER_MULTIPROCESSOR="threads"
        ),
        Device=Device, Context=Context, PointerHolderBase=PointerHolderBase, DeviceAllocation=DeviceAllocation, mem_alloc=mem_alloc,
        Stream=Stream,
        memcpy_htod=lambda target, source: copied("cuMemcpyHtoD_v2", int(target), source.ctypes.data, source.nbytes),
        memcpy_dtoh=lambda target, source: copied("cuMemcpyDtoH_v2", target.ctypes.data, int(source), target.nbytes),
    )  # fmt: skip


def _gpuarray(drv):
    """``pycuda.gpuarray``: arrays with what calls read of them."""

    class GPUArray:
        def __init__(self, shape, dtype, allocator=drv.mem_alloc, base=None, gpudata=None, strides=None, order="C"):
            self.shape, self.dtype, self.allocator, self.base = tuple(shape), np.dtype(dtype), allocator, base
            self.size = self.mem_size = prod(self.shape)
            self.strides = strides if strides is not None else np.empty((0,), dtype).strides and np.ndarray(
                self.shape, dtype, np.empty(max(self.size, 1), dtype), order=order
            ).strides
            self.nbytes = self.size * self.dtype.itemsize
            self.gpudata = allocator(self.nbytes) if gpudata is None and self.size else gpudata
            self._grid, self._block = (1, 1), (1, 1, 1)
            drv.Context.get_device()  # as PyCUDA's constructor does

        @property
        def flags(self):
            dense = self.dtype.itemsize
            for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
                if n != 1 and stride != dense:
                    return SimpleNamespace(c_contiguous=False)
                dense *= n
            return SimpleNamespace(c_contiguous=True)

        @property
        def __cuda_array_interface__(self):
            at = 0 if self.gpudata is None else int(self.gpudata)
            return {
                "shape": self.shape, "strides": self.strides, "data": (at, False), "typestr": self.dtype.str, "stream": None, "version": 3
            }

        @property
        def ndim(self):
            return len(self.shape)

        def get(self):
            host = np.empty(self.shape, self.dtype)
            drv.memcpy_dtoh(host, self.gpudata)
            return host

        def __getitem__(self, index):
            """The part from a first index on."""
            at = int(self.gpudata) + index.start * self.strides[0]
            return GPUArray((self.shape[0] - index.start, *self.shape[1:]), self.dtype, self.allocator, self, at, self.strides)

    def to_gpu(array, allocator=drv.mem_alloc):
        made = GPUArray(array.shape, array.dtype, allocator)
        drv.memcpy_htod(made.gpudata, array)
        return made

    module = ModuleType("pycuda.gpuarray")
    module.GPUArray, module.to_gpu = GPUArray, to_gpu
    module.empty = lambda shape, dtype, allocator=drv.mem_alloc, order="C": GPUArray(shape, dtype, allocator, order=order)
    return module
