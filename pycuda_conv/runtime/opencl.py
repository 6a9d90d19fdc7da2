"""The same kernels on OpenCL, for machines without an NVIDIA GPU: through PyOpenCL and PoCL."""

from __future__ import annotations

import atexit
import importlib
import math
import os
import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pycuda_conv.errors import BackendError, DeviceMemoryError
from pycuda_conv.runtime import pocl, waiting
from pycuda_conv.runtime.base import KERNEL_DIR, BufferSlice, Device, KernelLaunch, Launcher, LibraryCall, forked, headers
from pycuda_conv.runtime.cache import Entry, trusted_folder
from pycuda_conv.runtime.pocl_process import compile_elsewhere
from pycuda_conv.runtime.transforms import host
from pycuda_conv.runtime.workers import workers

#: Options that every kernel is built with.
OPTIONS = ["-cl-std=CL1.2", "-w", "-I", str(KERNEL_DIR)]
_HOW = "install PoCL with: pip install 'pyopencl[pocl]'"
#: Seconds of work that OpenCL has at a time. A signal waits so long: what is begun uses the arrays' memory and can't be stopped.
PART_SECONDS = 0.2
#: Work that takes less time is waited for in C, which takes the fewest microseconds.
BRIEF_SECONDS = 0.05
#: Work-items of a part. PoCL compiles a kernel once more for launches of 65,535 and more.
PART_ITEMS = 65534
_SYSTEM_VENDORS = Path("/etc/OpenCL/vendors")


def _pyopencl() -> Any:
    os.environ.setdefault("PYOPENCL_NO_CACHE", "1")  # we keep compiled kernels on disk ourselves
    if (_SYSTEM_VENDORS / "pocl.icd").exists():
        # prefer the system's PoCL: the one in PyOpenCL's wheel is older and refuses to compile for CPUs it does not know
        os.environ.setdefault("OCL_ICD_VENDORS", str(_SYSTEM_VENDORS))
    try:
        with waiting.held_back():
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


def compiling() -> bool:
    """Whether PoCL compiles something at the moment. It can't be stopped, and a process that ends waits for it."""
    return any(device.compiling() for device in _made)


class _BlockTime:
    """How long a block of a launch takes, in seconds; None before it was measured."""

    seconds: float | None = None


def _done(event: Any) -> bool:
    return event.command_execution_status <= 0  # below 0 is an error


def _numbers(step: KernelLaunch) -> list[Any]:
    """A kernel's arguments after its buffers. A struct is one argument, and so is an array of structs."""
    return [*([np.array(step.structs, np.int64)] if step.arguments else []), *(np.int64(v) for v in step.scalars)]


def _place(place: BufferSlice) -> tuple[int, int]:
    """The number of a launch's buffer, and the bytes before the part that it takes."""
    return place if isinstance(place, tuple) else (place, 0)


def _part(buffer: Any, start: int) -> Any:
    """The buffer from its byte `start` on; None for one that a call lacks."""
    return buffer.get_sub_region(start, buffer.size - start) if buffer and start else buffer or None


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
        self.queue, self._side_queue = cl.CommandQueue(self.context), cl.CommandQueue(self.context)
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
        self._building, self._asking = threading.Lock(), threading.Lock()
        self._lock = threading.RLock()
        #: kernels with machine code, and launches that make PoCL compile, with their memory
        self._compiled: set[Any] = set()
        #: texts that the cache on disk is known to have, and those that other processes compile
        self._kept: set[str] = set()
        self._coming: dict[str, Future[Any]] = {}
        self._compiling: list[tuple[Any, Any, Any]] = []
        #: by the block times of launches, the blocks given to OpenCL since :attr:`queue` was empty; since when, and seconds they may take
        self._given: dict[_BlockTime, int] = {}
        self._since, self._queued = 0.0, 0.0
        atexit.register(self._wait_for_compiler, os.getpid())  # before the folder is removed in which it works

    def compiling(self) -> bool:
        """Whether PoCL compiles something at the moment."""
        return self._building.locked() or not all(_done(event) for event, *_ in self._compiling)

    def _wait_for_compiler(self, owner: int) -> None:
        if os.getpid() == owner:
            with self._building:
                self._side_queue.finish()

    @property
    def transforms(self) -> str:
        return host.host_library()

    def __enter__(self) -> OpenCLDevice:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def launcher(self, step: KernelLaunch) -> Launcher:
        if isinstance(step, LibraryCall):
            return self._by_library(step)
        found = self._kernels.get((step.kernel, source := step.source()))
        kernel, program = (found, self._programs[source][1]) if found else waiting.beside(lambda: self._kernel(step))
        numbers = _numbers(step)
        places = [_place(one) for one in step.buffers]
        block_time = _BlockTime()

        def launch(buffers: Sequence[Any], stream: Any) -> None:
            given = [_part(buffers[i], start) for i, start in places]
            if kernel not in self._compiled:
                self._compile(step, kernel, [one and one.size for one in given], numbers)
                program.keep()
                self._compiled.add(kernel)
            with self._lock:  # a kernel object holds its arguments
                self._launch_in_parts(step, kernel, [*given, *numbers], block_time)

        return launch

    def _by_library(self, step: LibraryCall) -> Launcher:
        """A launcher that lets a library work on the buffers' memory, which is the host's."""
        args, sums_at, limits_at = step.transforms
        places = [_place(one) for one in step.buffers]

        def launch(buffers: Sequence[Any], stream: Any) -> None:
            flags, parts = self._cl.map_flags, [_part(buffers[i], start) for i, start in places]
            mapped = [
                self._cl.enqueue_map_buffer(self.queue, part, access, 0, (part.size,), np.uint8)[0]
                for part, access in zip(parts, (flags.READ, flags.READ, flags.WRITE), strict=True)
            ]
            x, w, workspace = mapped
            sums, limits = (
                workspace[at : at + 8 * math.prod(shape)].view(np.float64).reshape(shape)
                for at, shape in ((sums_at, args.sums_shape), (limits_at, args.limits_shape))
            )
            dtype = np.dtype(args.storage)
            try:
                counts = math.prod(args.x_memory + args.size), math.prod(args.w_memory + args.taps)
                # a part of a buffer goes to its end
                x, w = (one[: n * dtype.itemsize].view(dtype) for one, n in zip((x, w), counts, strict=True))
                host.fill(args, x, w, sums, limits)
            finally:
                for one in mapped:
                    one.base.release(self.queue)

        return launch

    def compile(self, step: KernelLaunch) -> None:
        """Compile the kernel of `step` for the cache on disk, without the arrays of a call."""
        kernel, program = self._kernel(step)
        self._compile(step, kernel, [self.device.max_mem_alloc_size] * len(step.buffers), _numbers(step))
        program.keep()
        self._compiled.add(kernel)

    def kept(self, step: KernelLaunch) -> bool:
        """Whether the cache on disk has the kernel of `step`."""
        source = step.source()
        if source not in self._kept and self._entry(source, OPTIONS).exists():
            self._kept.add(source)
        return source in self._kept

    def compiled(self, step: KernelLaunch) -> bool:
        # without a cache no other process can compile for this one: then a call compiles what it needs
        return self._kernels.get((step.kernel, step.source())) in self._compiled or self.kept(step) or trusted_folder() is None

    def coming(self, step: KernelLaunch) -> bool:
        future = self._coming.get(step.source())
        return future is not None and future.running()

    def queued(self, step: KernelLaunch) -> bool:
        future = self._coming.get(step.source())
        return future is not None and not (future.running() or future.done())

    def compile_in_background(self, steps: Sequence[KernelLaunch]) -> list[Future[Any]]:
        """Begin to compile the kernels of `steps` in other processes."""
        found = []
        with self._asking:
            for step in steps:
                source = step.source()
                if source not in self._coming or (self._coming[source].done() and not self.compiled(step)):
                    self._coming[source] = workers.submit(partial(compile_elsewhere, step))
                found.append(self._coming[source])
        return found

    def _compile(self, step: KernelLaunch, kernel: Any, sizes: Sequence[int | None], numbers: Sequence[Any]) -> None:
        """Make PoCL compile a kernel to machine code, which it does at the first launch.

        That launch is of one block, on other memory that is as large as the arrays, or larger: after Ctrl-C it goes on, and may not touch
        the caller's arrays.
        """
        self._workshop.check_room()
        flags = self._cl.mem_flags.READ_WRITE | self._cl.mem_flags.USE_HOST_PTR
        try:
            room = [np.zeros(size, np.uint8) if size else None for size in sizes]  # zeros that nobody reads take no memory
            spare = [None if one is None else self._cl.Buffer(self.context, flags, hostbuf=one) for one in room]
        except (MemoryError, self._cl.MemoryError):  # then the first part of the real launch does it
            return
        size = (step.block,)
        with self._lock:
            event = kernel(self._side_queue, size, size, *spare, *numbers, global_offset=size)
            self._side_queue.flush()
            self._compiling.append((event, room, spare))
        waiting.until(lambda: _done(event), compiling=True)
        event.wait()  # or raise its error
        self._compiling = [one for one in self._compiling if not _done(one[0])]

    def _launch_in_parts(self, step: KernelLaunch, kernel: Any, arguments: Sequence[Any], block_time: _BlockTime) -> None:
        """Launch all blocks, at most PART_SECONDS of work at a time. In portable.cuh, blocks are numbered from the offset on."""
        first, block = 0, step.block
        while first < step.grid:
            if block_time.seconds is None or self._queued >= PART_SECONDS:
                self._finish()
            count = self.multiprocessors if block_time.seconds is None else int((PART_SECONDS - self._queued) / block_time.seconds)
            count = max(1, min(count, step.grid - first, PART_ITEMS // block))
            if not self._given:
                self._since = time.perf_counter()
            kernel(self.queue, (count * block,), (block,), *arguments, global_offset=((first + 1) * block,))
            first += count
            self._given[block_time] = self._given.get(block_time, 0) + count
            if block_time.seconds is None:
                self._finish(new=True)
            else:
                self._queued += count * block_time.seconds

    def _finish(self, new: bool = False) -> None:
        """Wait for what OpenCL has to do; `new` says that nobody knows how long that takes. Note how long it took."""
        if not self._given:
            return
        if new or self._queued > BRIEF_SECONDS:
            event = self._cl.enqueue_marker(self.queue)
            self.queue.flush()
            waiting.until(lambda: _done(event))
        self.queue.finish()
        if len(self._given) == 1:
            ((block_time, count),) = self._given.items()
            block_time.seconds = (time.perf_counter() - self._since) / count
        self._given, self._queued = {}, 0.0

    def _entry(self, source: str, options: list[str]) -> Entry:
        return Entry((source, headers(), *options, *self._identity), ".pocl")

    def _build(self, source: str, options: list[str]) -> tuple[Any, pocl.Program]:
        kept = pocl.Program(self._workshop, self._entry(source, options))
        with warnings.catch_warnings(), kept:
            warnings.simplefilter("ignore", self._cl.CompilerWarning)
            return self._cl.Program(self.context, source).build(options=options), kept

    def _kernel(self, step: KernelLaunch) -> tuple[Any, pocl.Program]:
        """The kernel, and PoCL's files of its program."""
        source = step.source()
        with self._building:
            waiting.check()
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
                    if self._queued > BRIEF_SECONDS:
                        self._finish()
                    for array, held in zip(outs, written, strict=True):
                        if held is not None:
                            cl.enqueue_copy(self.queue, array, held)  # blocks; no copy where memory is shared
                    if not any(written):  # nothing was waited for
                        self.queue.finish()
                    self._given, self._queued = {}, 0.0
                except BaseException:  # Ctrl-C too: the arrays' memory must not be freed while kernels use it
                    self.queue.finish()
                    self._given, self._queued = {}, 0.0
                    raise
        except (cl.MemoryError, cl.LogicError) as error:
            limit = self.device.max_mem_alloc_size
            if max(sizes) <= limit and isinstance(error, cl.LogicError):
                raise
            raise DeviceMemoryError(
                f"OpenCL device '{self.device.name}' is out of memory: {sum(sizes):,} bytes were asked for; it has "
                f"{self.device.global_mem_size:,}, at most {limit:,} in one array"
            ) from error
