"""The same kernels on OpenCL, for machines without an NVIDIA GPU: through PyOpenCL and PoCL."""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pycuda_conv.errors import BackendError, DeviceMemoryError
from pycuda_conv.runtime import pocl
from pycuda_conv.runtime.base import KERNEL_DIR, Device, KernelLaunch, Launcher, forked, headers
from pycuda_conv.runtime.cache import Entry

#: Options that every kernel is built with.
OPTIONS = ["-cl-std=CL1.2", "-w", "-I", str(KERNEL_DIR)]
_HOW = "install PoCL with: pip install 'pycuda_conv[cpu]'"
_SYSTEM_VENDORS = Path("/etc/OpenCL/vendors")


def _pyopencl() -> Any:
    os.environ.setdefault("PYOPENCL_NO_CACHE", "1")  # we keep compiled kernels on disk ourselves
    if (_SYSTEM_VENDORS / "pocl.icd").exists():
        # prefer the system's PoCL: the one in PyOpenCL's wheel is older and refuses to compile for CPUs it does not know
        os.environ.setdefault("OCL_ICD_VENDORS", str(_SYSTEM_VENDORS))
    try:
        return importlib.import_module("pyopencl")
    except ImportError as error:
        raise BackendError(f"PyOpenCL is not importable ({error}); {_HOW}") from error


def why_not() -> str | None:
    """Why OpenCL can't be used here, or None if it can."""
    try:
        opencl_device()
    except BackendError as error:
        return str(error)
    return None


def _find_device(cl: Any) -> Any:
    try:
        platforms = cl.get_platforms()
    except cl.Error as error:
        raise BackendError(f"OpenCL has no platform ({error}); {_HOW}") from error
    devices = [device for platform in platforms for device in platform.get_devices()]
    devices.sort(key=lambda device: "Portable Computing Language" not in device.platform.name)  # PoCL first
    if not devices:
        raise BackendError(f"OpenCL has no device; {_HOW}")
    return devices[0]


_lock = threading.Lock()
_made: list[OpenCLDevice] = []
_started = False
_forked = False


def _after_fork() -> None:
    """PoCL's threads don't exist in a forked process, where a call would wait for them for ever."""
    global _forked
    _forked = _started
    for device in _made:
        device.launcher = device.update_host_arrays = _refuse  # type: ignore[method-assign]


def _refuse(*args: Any, **options: Any) -> Any:
    raise forked("OpenCL")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def opencl_device() -> OpenCLDevice:
    """The machine's OpenCL device; made once, shared by every thread."""
    if _forked:
        raise forked("OpenCL")
    with _lock:
        if not _made:
            _made.append(OpenCLDevice())
        return _made[0]


class OpenCLDevice(Device):
    """The machine's OpenCL device: that of PoCL if it is installed, else the first one. Made by :func:`opencl_device`."""

    backend = "opencl"
    name = "opencl"

    def __init__(self) -> None:
        global _started
        self._cl = cl = _pyopencl()
        self._workshop = pocl.Workshop()
        with self._workshop.in_use():
            self.device = _find_device(cl)
            _started = True
            self.context = cl.Context([self.device])
        platform = self.device.platform
        self._identity = (platform.name, platform.version, self.device.name, self.device.version, self.device.driver_version)
        self.multiprocessors = self.device.max_compute_units
        self.queue = cl.CommandQueue(self.context)
        try:
            self._build("kernel void probe(global float* x) { x[0] = 0; }", [])[1].keep()
        except cl.Error as error:
            reason = next((line for line in str(error).splitlines() if line.startswith("error:")), str(error).strip())
            raise BackendError(
                f"OpenCL device '{self.device.name}' can't compile ({reason}). A PoCL that knows this CPU may come with the system: "
                "apt-get install pocl-opencl-icd"
            ) from error
        self._programs: dict[str, tuple[Any, pocl.Program]] = {}
        self._kernels: dict[tuple[str, str], Any] = {}
        self._lock = threading.RLock()

    def __enter__(self) -> OpenCLDevice:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def launcher(self, step: KernelLaunch) -> Launcher:
        kernel, program = self._kernel(step)
        global_size, local_size = (step.grid * step.block,), (step.block,)
        # a struct is one argument
        numbers = [*([np.array(step.structs, np.int64)] if step.arguments else []), *(np.int64(v) for v in step.scalars)]
        whole = [place for place in step.buffers if isinstance(place, int)]
        if len(whole) < len(step.buffers):
            raise ValueError(f"{step.kernel} takes parts of buffers, {step.buffers}, which OpenCL can't; pass whole ones")

        launched = False

        def launch(buffers: Sequence[Any], stream: Any) -> None:
            nonlocal launched
            with self._lock:  # a kernel object holds its arguments
                if not launched:
                    self._workshop.check_room()
                kernel(self.queue, global_size, local_size, *[buffers[i] or None for i in whole], *numbers)
                if not launched:  # PoCL compiles for a size of blocks, and for small grids, when it launches
                    launched = True
                    self.queue.finish()
                    program.keep()

        return launch

    def _build(self, source: str, options: list[str]) -> tuple[Any, pocl.Program]:
        kept = pocl.Program(self._workshop, Entry((source, headers(), *options, *self._identity), ".pocl"))
        with warnings.catch_warnings(), kept:
            warnings.simplefilter("ignore", self._cl.CompilerWarning)
            return self._cl.Program(self.context, source).build(options=options), kept

    def _kernel(self, step: KernelLaunch) -> tuple[Any, pocl.Program]:
        """The kernel, and PoCL's files of its program."""
        source = step.source()
        with self._lock:
            if source not in self._programs:
                self._programs[source] = self._build(source, OPTIONS)
            program, kept = self._programs[source]
            kernel = self._kernels.get((step.kernel, source))
            if kernel is None:
                kernel = self._kernels[step.kernel, source] = self._cl.Kernel(program, step.kernel)
        return kernel, kept

    def run_on_host_arrays(
        self, launch: Launcher, inputs: Sequence[np.ndarray | None], out: np.ndarray, workspace: int, stream: Any
    ) -> None:
        if stream is not None:
            raise TypeError(f"stream is for GPUs, but this call runs on OpenCL; got stream={stream!r}")
        self.update_host_arrays(launch, inputs, (out,), workspace)

    def update_host_arrays(
        self, launch: Launcher, inputs: Sequence[np.ndarray | None], outs: Sequence[np.ndarray | None], workspace: int
    ) -> None:
        cl, flags = self._cl, self._cl.mem_flags

        def buffer(array: np.ndarray | None, access: int) -> Any:
            if array is None or not array.nbytes:
                return None
            return cl.Buffer(self.context, access | flags.USE_HOST_PTR, hostbuf=array)

        sizes = [a.nbytes for a in (*inputs, *outs) if a is not None] + [workspace]
        try:
            buffers = [buffer(a, flags.READ_ONLY) for a in inputs] + [buffer(a, flags.READ_WRITE) for a in outs]
            written = buffers[len(inputs) :]
            buffers.append(cl.Buffer(self.context, flags.READ_WRITE, workspace) if workspace else None)
            with self._lock:
                try:
                    launch(buffers, None)
                    for array, held in zip(outs, written, strict=True):
                        if held is not None:
                            cl.enqueue_copy(self.queue, array, held)  # blocks; no copy where memory is shared
                except BaseException:  # Ctrl-C too: the arrays' memory must not be freed while kernels use it
                    self.queue.finish()
                    raise
        except (cl.MemoryError, cl.LogicError) as error:
            limit = self.device.max_mem_alloc_size
            if max(sizes) <= limit and isinstance(error, cl.LogicError):
                raise
            raise DeviceMemoryError(
                f"OpenCL device '{self.device.name}' is out of memory: {sum(sizes):,} bytes were asked for; it has "
                f"{self.device.global_mem_size:,}, at most {limit:,} in one array"
            ) from error
