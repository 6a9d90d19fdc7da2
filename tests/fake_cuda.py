"""CUDA devices on a machine without a GPU: they compile nothing and run nothing, and what the driver is asked for is written down."""

import ctypes
import hashlib
import itertools
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

from reference import kept_file

from pycuda_conv.runtime import device, driver
from pycuda_conv.runtime.compile_queue import CompileQueue

SOURCE = Path(__file__).with_suffix(".c")
CONTEXT = 0x1000


@cache
def _built() -> Path:
    """The driver, which is built once."""
    command = "gcc", "-O1", "-w", "-pthread", "-shared", "-fPIC", str(SOURCE), "-o"
    name = f"fake_cuda_{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:32]}.so"
    return kept_file(name, lambda made: subprocess.run([*command, str(made)], check=True, timeout=900))


class FakeCuda:
    """A driver, a copy of its own in `folder`, which takes the true one's place while `monkeypatch` lasts."""

    def __init__(self, folder, monkeypatch):
        self._patch = monkeypatch
        file = folder / "fake_cuda.so"
        shutil.copy(_built(), file)
        self.library = library = ctypes.CDLL(str(file))
        pointer = ctypes.c_void_p
        library.cuLaunchKernelEx.argtypes = [pointer] * 4
        library.cuEventRecord.argtypes, library.cuStreamWaitEvent.argtypes = [pointer] * 2, [pointer, pointer, ctypes.c_uint]
        library.cuStreamIsCapturing.argtypes = [pointer, pointer]
        library.cuCtxPushCurrent_v2.argtypes = [pointer]
        library.cuFuncGetParamInfo.argtypes = [pointer, ctypes.c_size_t, pointer, pointer]
        library.cuFuncSetAttribute.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
        self._log = (ctypes.c_char * (1 << 22)).in_dll(library, "fake_log")
        self._length = ctypes.c_size_t.in_dll(library, "fake_length")
        self.failing, self.blocked, self.waiting = (ctypes.c_int.in_dll(library, f"fake_{name}") for name in ("failing", "blocked", "waiting"))
        self.context = SimpleNamespace(handle=CONTEXT, push=lambda: library.cuCtxPushCurrent_v2(CONTEXT))
        handles = itertools.count(0x5000, 16)
        drv = SimpleNamespace(
            init=lambda: None, Error=RuntimeError, MemoryError=MemoryError, get_driver_version=lambda: 13000,
            device_attribute=SimpleNamespace(
                MAX_SHARED_MEMORY_PER_BLOCK_OPTIN="shared", L2_CACHE_SIZE="L2", MAX_THREADS_PER_MULTIPROCESSOR="threads"
            ),
            Device=type("Device", (), {"__new__": lambda cls, ordinal: self, "count": staticmethod(lambda: 1)}),
            Context=SimpleNamespace(pop=lambda: library.cuCtxPopCurrent_v2(ctypes.byref(pointer()))),
            Stream=lambda flags: SimpleNamespace(handle=next(handles), synchronize=lambda: None),
        )
        monkeypatch.setitem(sys.modules, "pycuda.driver", drv)
        monkeypatch.setitem(sys.modules, "pycuda.tools", SimpleNamespace(DeviceMemoryPool=lambda: SimpleNamespace(stop_holding=lambda: None)))
        monkeypatch.setattr(driver, "libcuda", lambda: library)
        monkeypatch.setattr(driver, "_initialised", driver._initialised)
        monkeypatch.setattr(CompileQueue, "compile", lambda _, source, arch="", fresh=False: hashlib.sha256(source.encode()).hexdigest().encode())
        monkeypatch.setattr(CompileQueue, "kept", lambda _, source, arch: b"kept")
        monkeypatch.setattr(device, "atexit", SimpleNamespace(register=lambda function: None))

    multiprocessor_count = 132

    def name(self):
        return "NVIDIA H200"

    def compute_capability(self):
        return 9, 0

    def get_attribute(self, which):
        return {"shared": 227 << 10, "L2": 50 << 20, "threads": 2048}[which]

    def retain_primary_context(self):
        return self.context

    def device(self, launcher):
        """A device whose launches are made in "c" or by "python"."""
        self._patch.setenv("PYCUDA_CONV_LAUNCHER", launcher)
        return device.CudaDevice(0)

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
