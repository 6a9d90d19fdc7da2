"""CUDA through PyCUDA: primary contexts, kernels compiled for the card at hand, memory, streams and launches.

The device's *primary* context is the one that torch and CuPy use, so pointers are valid in all three. It is retained
once and pushed around each call; nothing stays on a thread's context stack.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from pycuda_conv.runtime.base import KERNEL_DIR, BackendError, Device, DeviceMemoryError, Launcher, Step
from pycuda_conv.runtime.cache import cached, file_identity

log = logging.getLogger("pycuda_conv")

_forked = False


def _after_fork() -> None:
    global _forked
    _forked = _initialised


_initialised = False
os.register_at_fork(after_in_child=_after_fork) if hasattr(os, "register_at_fork") else None


def driver() -> Any:
    """``pycuda.driver``, initialised. Imported here and not at the top: the package must import without PyCUDA."""
    global _initialised
    if _forked:
        raise BackendError(
            "CUDA was in use when this process was forked, and a driver does not survive a fork: start workers with "
            "multiprocessing.get_context('spawn')"
        )
    try:
        drv = importlib.import_module("pycuda.driver")
    except ImportError as error:
        raise BackendError(f"PyCUDA is not importable ({error}); install it with: pip install 'pycuda_conv[cuda]'") from error
    if not _initialised:
        try:
            drv.init()
        except drv.Error as error:
            raise BackendError(f"the CUDA driver did not start: {error}") from error
        _initialised = True
    return drv


def why_not() -> str | None:
    """Why CUDA can't be used here, or None if it can."""
    try:
        drv = driver()
    except BackendError as error:
        return str(error)
    if drv.Device.count() == 0:
        return "the CUDA driver sees no GPU (is CUDA_VISIBLE_DEVICES set?)"
    if nvcc() is None:
        return "nvcc is not on the PATH nor in CUDA_HOME; install the CUDA toolkit"
    return None


@lru_cache(maxsize=None)
def nvcc() -> str | None:
    """Path of the CUDA compiler, or None."""
    found = shutil.which("nvcc")
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if found is None and root:
            found = shutil.which("nvcc", path=os.path.join(root, "bin"))
    return found


@lru_cache(maxsize=None)
def _libcuda() -> Any:
    """The driver library itself, for the event calls on streams that PyCUDA did not make."""
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    pointer = ctypes.c_void_p
    library.cuEventCreate.argtypes = [ctypes.POINTER(pointer), ctypes.c_uint]
    library.cuEventRecord.argtypes = [pointer, pointer]
    library.cuStreamWaitEvent.argtypes = [pointer, pointer, ctypes.c_uint]
    library.cuEventDestroy_v2.argtypes = [pointer]
    return library


def _check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what} failed with CUDA error {code}")


class _Join:
    """A stream of ours that runs between two points of a foreign stream. One for each thread and device."""

    def __init__(self, device: CudaDevice) -> None:
        drv = driver()
        self.stream = drv.Stream(1)  # CU_STREAM_NON_BLOCKING: no implicit order with the default stream
        self._ours = ctypes.c_void_p(self.stream.handle)
        self._cu = _libcuda()
        self._event = ctypes.c_void_p()
        _check(self._cu.cuEventCreate(ctypes.byref(self._event), 2), "cuEventCreate")  # 2: no timing

    def order(self, first: Any, second: Any) -> None:
        """What `second` does from now on waits for what `first` holds now."""
        _check(self._cu.cuEventRecord(self._event, first), "cuEventRecord")
        _check(self._cu.cuStreamWaitEvent(second, self._event, 0), "cuStreamWaitEvent")

    def launch(self, work: Callable[[Any], None], handle: int) -> None:
        """Call `work` with our stream so that it runs after all that stream `handle` holds and before what follows there."""
        theirs = ctypes.c_void_p(handle)
        self.order(theirs, self._ours)
        try:
            work(self.stream)
        finally:
            self.order(self._ours, theirs)


class CudaDevice(Device):
    """One NVIDIA GPU."""

    backend = "cuda"

    def __init__(self, ordinal: int) -> None:
        drv = driver()
        count = drv.Device.count()
        if ordinal >= count:
            raise BackendError(f"device cuda:{ordinal} was asked for, but the CUDA driver sees {count} GPU(s)")
        if nvcc() is None:
            raise BackendError(str(why_not()))
        self._drv = drv
        self.ordinal = ordinal
        self.name = f"cuda:{ordinal}"
        device = drv.Device(ordinal)
        self.capability: tuple[int, int] = device.compute_capability()
        self.multiprocessors = device.multiprocessor_count
        self.context = device.retain_primary_context()
        self._pop = drv.Context.pop
        self._push = self.context.push
        self._functions: dict[tuple[str, str], Any] = {}
        self._lock = threading.Lock()
        self._threads = threading.local()
        with self:
            self.pool = importlib.import_module("pycuda.tools").DeviceMemoryPool()
        atexit.register(self.release)

    def __enter__(self) -> CudaDevice:
        if _forked:
            driver()  # raises
        self._push()
        return self

    def __exit__(self, *exc: object) -> None:
        self._pop()

    # ---- kernels

    def launcher(self, step: Step) -> Launcher:
        function = self._function(step)
        grid, block, call = (step.grid, 1, 1), (step.block, 1, 1), function.prepared_async_call
        which, scalars = step.buffers, step.scalars

        def launch(buffers: Sequence[Any], stream: Any) -> None:
            call(grid, block, stream, *[buffers[i] for i in which], *scalars)

        return launch

    def _function(self, step: Step) -> Any:
        source = step.source()
        with self._lock:
            function = self._functions.get((step.kernel, source))
            if function is None:
                with self:
                    module = self._drv.module_from_buffer(self.compile(source))
                    function = module.get_function(step.kernel)
                function.prepare("P" * len(step.buffers) + "q" * len(step.scalars))
                self._functions[step.kernel, source] = function
        return function

    def compile(self, source: str) -> bytes:
        """The cubin of `source` for this GPU, compiled as ``SourceModule`` would but kept in a cache of our own."""
        compiler = nvcc()
        assert compiler is not None
        arch = "sm_{}{}".format(*self.capability)
        options = ["-O3", "-std=c++17"]
        header = (KERNEL_DIR / "portable.cuh").read_text()

        def build() -> bytes:
            log.debug("compiling for %s: %s", arch, source[: source.index("#line")].replace("\n", " "))
            return importlib.import_module("pycuda.compiler").compile(
                source, nvcc=compiler, options=options, no_extern_c=True, arch=arch, cache_dir=False, include_dirs=[str(KERNEL_DIR)]
            )

        return cached((source, header, arch, *options, file_identity(compiler)), ".cubin", build)

    # ---- streams

    def launch_on(self, work: Callable[[Any], None], stream: Any) -> None:
        """Call `work` with a PyCUDA stream that stands for `stream`.

        `stream` is None or 0 for the default stream, a PyCUDA ``Stream``, or the handle (an int) of a stream that
        somebody else made; work for the latter runs on a stream of ours, joined to theirs by events before and after,
        which is also right while theirs is being captured into a graph.
        """
        if not stream or stream == 1:  # 1: CU_STREAM_LEGACY, the default stream by another name
            work(None)
        elif isinstance(stream, int):
            join = getattr(self._threads, "join", None)
            if join is None:
                join = self._threads.join = _Join(self)
            join.launch(work, stream)
        else:
            work(stream)

    # ---- memory

    def allocate(self, nbytes: int) -> Any:
        """`nbytes` from the pool, which is ordered with the default stream only."""
        try:
            return self.pool.allocate(nbytes)
        except self._drv.MemoryError as error:
            self.pool.free_held()
            free, total = self._drv.mem_get_info()
            raise DeviceMemoryError(
                f"{self.name} is out of memory: {nbytes:,} bytes were asked for, {free:,} of {total:,} are free"
            ) from error

    def run_on_host_arrays(
        self, launch: Callable[[Sequence[Any], Any], None], inputs: Sequence[np.ndarray | None], out: np.ndarray, workspace: int, stream: Any
    ) -> None:
        drv = self._drv
        with self:
            buffers: list[Any] = [0 if a is None or not a.nbytes else self.allocate(a.nbytes) for a in inputs]
            buffers += [self.allocate(out.nbytes), self.allocate(workspace) if workspace else 0]

            def work(on: Any) -> None:
                for array, buffer in zip(inputs, buffers, strict=False):
                    if array is not None and array.nbytes:
                        drv.memcpy_htod_async(buffer, array, on)
                launch(buffers, on)
                drv.memcpy_dtoh_async(out, buffers[len(inputs)], on)
                if on is None:
                    drv.Context.synchronize()
                else:
                    on.synchronize()

            self.launch_on(work, stream)

    def release(self) -> None:
        """Give the pool's memory back to the driver. Runs at exit; never raises."""
        try:
            with self:
                self.pool.free_held()
        except Exception:  # the driver may be gone by now
            pass
