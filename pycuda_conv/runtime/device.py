"""A GPU through PyCUDA: its primary context, kernels, launches, memory, and copies.

The device's *primary* context is the one that torch and CuPy use, so pointers are valid in all three. It is retained once and pushed around
each call; nothing stays on a thread's context stack.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache, lru_cache, partial
from itertools import cycle
from typing import Any

import numpy as np

from pycuda_conv.errors import BackendError, ConvArgumentError, DeviceMemoryError
from pycuda_conv.runtime import driver, tensor_map
from pycuda_conv.runtime.base import Device, KernelLaunch, Launcher
from pycuda_conv.runtime.compile_queue import CompileQueue
from pycuda_conv.runtime.launcher import (
    Launch,
    LaunchBuffer,
    LauncherInC,
    Refused,
    StreamWait,
    attribute_of,
    blocks_at_once,
    copier_in_c,
    first_parameter,
    function_of,
    launcher_in_c,
    module_of,
)
from pycuda_conv.runtime.streams import SIDES, Lease, Streams
from pycuda_conv.runtime.workers import cores

log = logging.getLogger("pycuda_conv")

FULL = 4 * 2048  # threads a multiprocessor in a launch that keeps it busy for long


def _after_fork() -> None:
    for device in _made.values():
        device.push = device.is_current = driver.pycuda  # it raises an error that says what is wrong


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def device_of_pointer(pointer: int) -> int:
    """The number of the GPU in whose memory `pointer` lies.

    Raises
    ------
    ConvArgumentError
        The memory is the host's, or that of a context other than a device's primary one: kernels launched there can't reach it.
    """
    library, ordinal, context = driver.libcuda(), ctypes.c_int(), ctypes.c_void_p()
    driver.pycuda()
    if library.cuPointerGetAttribute(ctypes.byref(ordinal), 9, pointer):  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        raise ConvArgumentError(f"the address {pointer:#x} is not one of a GPU's memory")
    owner = library.cuPointerGetAttribute(ctypes.byref(context), 1, pointer)  # ..._CONTEXT; stream-ordered memory has none
    if owner == 0 and context.value and context.value != cuda_device(ordinal.value).context.handle:
        raise ConvArgumentError(
            f"the array at {pointer:#x} belongs to a CUDA context of its own, as pycuda.autoinit and make_context() create them; make "
            "arrays in the device's primary context, which torch and CuPy use as well: import pycuda.autoprimaryctx instead"
        )
    return ordinal.value


#: The driver's functions that the copying threads call.
COPY_FUNCTIONS = (
    "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuEventCreate", "cuEventDestroy_v2", "cuEventRecord", "cuEventSynchronize",
    "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2",
)

#: The most bytes from one row to the next in a 2-d copy.
MOST_PITCH = 2**31 - 1


def _planes(part: np.ndarray) -> list[np.ndarray]:
    """The planes (n, c) of `part`."""
    return [part[n, c] for n in range(part.shape[0]) for c in range(part.shape[1])]


@cache
def block_class() -> type:
    class Block(driver.pycuda().PointerHolderBase):  # type: ignore[misc]
        """Memory from a device's pool. Unlike an allocation of the pool, it can be dropped while no context is current."""

        def __init__(self, device: CudaDevice, allocation: Any) -> None:
            super().__init__()
            self._device, self._allocation = device, allocation
            self._pointer = int(allocation)
            device.blocks.add(self)

        def get_pointer(self) -> int:
            return self._pointer

        def __int__(self) -> int:
            return self._pointer

        __index__ = __int__

        def free(self) -> None:
            if self._allocation is not None:
                with self._device:
                    self._allocation.free()
                self._allocation = None

        def __del__(self) -> None:
            self.free()

    return Block


_lock = threading.Lock()
_made: dict[int, CudaDevice] = {}


def cuda_device(ordinal: int) -> CudaDevice:
    """The CUDA device of that number; made once, shared by every thread."""
    device = _made.get(ordinal)
    if device is None:
        with _lock:
            device = _made.get(ordinal)
            if device is None:
                device = _made[ordinal] = CudaDevice(ordinal)
    return device


class CudaDevice(Device):
    """One NVIDIA GPU. Made by :func:`cuda_device`."""

    backend = "cuda"
    constants_pay = True

    def __init__(self, ordinal: int) -> None:
        drv = driver.pycuda()
        count = drv.Device.count()
        if ordinal >= count:
            raise BackendError(f"device cuda:{ordinal} was asked for, but the CUDA driver sees {count} GPU(s)")
        self._drv = drv
        self.ordinal = ordinal
        self.name = f"cuda:{ordinal}"
        device = drv.Device(ordinal)
        self.model = device.name()
        self.capability = device.compute_capability()
        self.multiprocessors = device.multiprocessor_count
        self._shared_bytes = device.get_attribute(drv.device_attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        self.context = device.retain_primary_context()
        #: make the device's context current, and undo that: called in pairs, or by ``with device:``
        self.push: Callable[[], Any] = self.context.push
        self.pop: Callable[[], None] = drv.Context.pop
        self._in_c = launcher_in_c()
        #: the extension whose threads copy arrays, or None
        self.copier = copier_in_c()
        #: whether the device's context is known to be current, which takes less time than to push it
        self.is_current: Callable[[], Any] = bool
        if self._in_c is not None:
            self.is_current = partial(self._in_c.is_current, driver.address_of("cuCtxGetCurrent"), self.context.handle)
        #: the machine code of kernels
        self.queue = CompileQueue("sm_{}{}".format(*self.capability))
        self._functions: dict[tuple[str, str], int] = {}
        self._modules: dict[str, int] = {}
        self._attributes = 1 if self.capability >= (9, 0) else 0  # FOLLOWING, where the GPU knows it
        self._lock = threading.Lock()
        self._threads = threading.local()
        self._idle_streams: list[Streams] = []
        with self:
            self.pool = importlib.import_module("pycuda.tools").DeviceMemoryPool()
        #: memory from the pool that is in use
        self.blocks: weakref.WeakSet[Any] = weakref.WeakSet()
        atexit.register(self._release)

    def __enter__(self) -> CudaDevice:
        self.push()
        return self

    def __exit__(self, *exc: object) -> None:
        self.pop()

    # ---- kernels

    def compile_all(self, steps: Sequence[KernelLaunch]) -> None:
        missing = {step.source(): step for step in steps if (step.kernel, step.source()) not in self._functions}
        if len(missing) > 1:
            with ThreadPoolExecutor(min(len(missing), cores())) as pool:
                list(pool.map(self._function, missing.values()))
        else:
            for step in missing.values():
                self._function(step)

    def launcher(self, step: KernelLaunch) -> Launcher:
        return self.schedule_launcher([[step]])

    def schedule_launcher(self, steps: Sequence[Sequence[KernelLaunch]]) -> Launcher:
        """Launches of one step run side by side, unless each alone fills the GPU: then they run in turn, which costs the host less."""
        operations = list(self._operations(steps))
        forks = any(isinstance(one, StreamWait) for one in operations)
        return (self._by_python if self._in_c is None else self._by_c)(operations, forks)

    def launches(self, steps: Sequence[Sequence[KernelLaunch]]) -> list[Launch]:
        """The launches of `steps`, one behind the other, each with its compiled kernel."""
        return [one for one in self._operations(steps) if isinstance(one, Launch)]

    def _operations(self, steps: Sequence[Sequence[KernelLaunch]]) -> Iterator[Launch | StreamWait]:
        for step in steps:
            fills = all(one.grid * one.block >= FULL * self.multiprocessors for one in step[:-1])
            sides = range(1, 1 if fills else min(len(step), 1 + SIDES))
            yield from (StreamWait(0, side) for side in sides)
            for launch, stream in zip(step, cycle((0, *sides))):
                function, first = self._function(launch), 0
                if launch.maps:
                    with self:
                        first = first_parameter(function)
                maps = tuple((one.buffer, one.offset, lru_cache(maxsize=64)(partial(tensor_map.encoded, one))) for one in launch.maps)
                yield Launch(launch, stream, function, self._attributes, first, maps)
            yield from (StreamWait(side, 0) for side in sides)

    def _by_python(self, operations: Sequence[Launch | StreamWait], forks: bool) -> Launcher:
        """A launcher that calls the driver for each operation."""
        calls = [one.by_python(self._room) if isinstance(one, Launch) else one.by_python(self._streams) for one in operations]

        def launch(buffers: Sequence[Any], stream: Any) -> None:
            driver.check_not_forked()
            streams = (driver.handle_of(stream), *self._streams().own[1:]) if forks else (driver.handle_of(stream),)
            beside: set[int] = set()  # the side streams that the caller's does not wait for yet
            try:
                for one, call in zip(operations, calls, strict=True):
                    call(buffers, streams)
                    if isinstance(one, StreamWait):
                        (beside.add if one.second else beside.discard)(one.first or one.second)
            except BaseException:  # what was launched may still use memory that the caller's stream gives back
                for side in sorted(beside):
                    with suppress(RuntimeError):
                        self.order(streams[side], streams[0])
                raise

        return launch

    def _by_c(self, operations: Sequence[Launch | StreamWait], forks: bool) -> Launcher:
        """A launcher that makes all operations in one call."""
        words: list[tuple[Any, ...]] = []
        names: list[str] = []
        for one in operations:
            if isinstance(one, Launch):
                words.append(one.for_c())
                names.append(f"launching {one.step.kernel}")
            else:
                words += (1, one.first), (2, one.second)
                names += "cuEventRecord", "cuStreamWaitEvent"
        functions = tuple(map(driver.address_of, ("cuLaunchKernelEx", "cuEventRecord", "cuStreamWaitEvent")))
        schedule = self._in_c.prepare(functions, tuple(words))
        return LauncherInC(self._in_c, schedule, (lambda: self._streams().own) if forks else None, names)

    def ready(self, launcher: LauncherInC, *decided: Any) -> Any:
        """A repeated call, as the launcher in C makes it; `decided` are its fixed values: see ``ready`` in ``_launch.c``."""
        context = (*map(driver.address_of, ("cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2")), self.context.handle)
        stream, place, *rest = decided
        return launcher.native.ready(launcher.schedule, launcher.own, context, (stream, self.ordinal, place), launcher.failed, *rest)

    def _room(self) -> LaunchBuffer:
        room = getattr(self._threads, "room", None)
        if room is None:
            room = self._threads.room = LaunchBuffer()
        return room

    def _streams(self) -> Streams:
        """This thread's streams. When the thread ends, the next one that needs streams gets them."""
        lease = getattr(self._threads, "lease", None)
        if lease is None:
            with self:
                lease = self._threads.lease = Lease(self._idle_streams)
        return lease.streams

    def order(self, first: Any, second: Any) -> None:
        """Let the later work of stream `second` wait for the present work of `first`: streams of PyCUDA, handles or None."""
        self._streams().order(driver.handle_of(first), driver.handle_of(second))

    def _function(self, step: KernelLaunch) -> int:
        """The driver's handle of the compiled kernel."""
        source = step.source()
        key = step.kernel, source
        found = self._functions.get(key)
        if found is None:
            if source not in self._modules:
                self.queue.cubin(source, step.arch).result()  # outside the lock, so that threads compile side by side
            with self._lock, self:
                found = self._functions.get(key)
                if found is None:
                    found = self._loaded(source, step.arch, step.kernel)
                    if step.shared:  # more than every kernel gets; other launches of the kernel may ask for more still
                        most = self._shared_bytes - attribute_of(found, 1)  # SHARED_SIZE_BYTES: the kernel's static shared memory
                        code = driver.libcuda().cuFuncSetAttribute(found, 8, most)  # MAX_DYNAMIC_SHARED_SIZE_BYTES
                        driver.check(code, "cuFuncSetAttribute")
                    self._functions[key] = found
        return found

    def _loaded(self, source: str, arch: str, kernel: str) -> int:
        """The handle of a kernel in the module of its text, which stays loaded. PyCUDA hides the handles of its own modules."""
        if source not in self._modules:
            try:
                self._modules[source] = module_of(self.queue.take(source, arch))
                return function_of(self._modules[source], kernel)
            except Refused as error:
                log.warning("%s: it is compiled again", error)
                self._modules[source] = module_of(self.queue.compile(source, arch, fresh=True))
        return function_of(self._modules[source], kernel)

    def compiled(self, step: KernelLaunch) -> bool:
        return self.queue.compiled(step)

    def coming(self, step: KernelLaunch) -> bool:
        return self.queue.coming(step)

    def queued(self, step: KernelLaunch) -> bool:
        return self.queue.queued(step)

    def begin(self, steps: Sequence[KernelLaunch]) -> None:
        self.queue.begin(steps)

    def compile_behind(self, steps: Sequence[KernelLaunch]) -> list[Future[Any]]:
        return self.queue.compile_behind(steps)

    def all_compiled(self) -> bool:
        """Whether nothing is being compiled for the device, and nothing waits to be."""
        return self.queue.all_compiled()

    def describe(self, step: KernelLaunch) -> dict[str, float]:
        """Registers and local bytes of a thread, shared bytes of a block, and the share of a multiprocessor's threads that run at once."""
        function = self._function(step)
        most = self._drv.Device(self.ordinal).get_attribute(self._drv.device_attribute.MAX_THREADS_PER_MULTIPROCESSOR)
        with self:
            registers, local, shared = (attribute_of(function, which) for which in (4, 3, 1))  # NUM_REGS, LOCAL_ and SHARED_SIZE_BYTES
            occupancy = blocks_at_once(function, step.block, step.shared) * step.block / most
        return {"registers": registers, "local": local, "shared": shared + step.shared, "occupancy": occupancy}

    def capturing(self, stream: Any = None) -> bool:
        """Whether `stream`, the current stream of torch or CuPy, or any stream that the default one orders, is being captured."""
        handles, torch, cupy = [0, driver.handle_of(stream)], sys.modules.get("torch"), sys.modules.get("cupy")
        if torch is not None and torch.cuda.is_initialized():
            handles.append(torch.cuda.current_stream(self.ordinal).cuda_stream)
        if cupy is not None:
            handles.append(cupy.cuda.get_current_stream(self.ordinal).ptr)
        state = ctypes.c_int()
        with self:
            return any(driver.libcuda().cuStreamIsCapturing(handle, ctypes.byref(state)) or state.value for handle in handles)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the GPU's L2 cache."""
        return int(self._drv.Device(self.ordinal).get_attribute(self._drv.device_attribute.L2_CACHE_SIZE))

    # ---- memory

    def allocate(self, nbytes: int) -> Any:
        """`nbytes` from the pool, as an allocator of GPUArrays calls it. The pool follows the default stream only."""
        return block_class()(self, self._allocated(self.pool.allocate, nbytes))

    def _allocated(self, allocate: Callable[[int], Any], nbytes: int) -> Any:
        """The result of `allocate`, which is called again without the memory that the pool holds if it finds too little."""
        with suppress(self._drv.MemoryError):
            return allocate(nbytes)
        self.pool.free_held()
        try:
            return allocate(nbytes)
        except self._drv.MemoryError as error:
            free, total = self._drv.mem_get_info()
            raise DeviceMemoryError(
                f"{self.name} is out of memory: {nbytes:,} bytes were asked for, {free:,} of {total:,} are free"
            ) from error

    # ---- copies between the host and the device

    def pinned_or_ordinary(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An uninitialised page-locked array, or an ordinary one where no more memory may be locked."""
        array = driver.pinned().empty(shape, dtype)
        return np.empty(shape, dtype) if array is None else array

    def is_pinned(self, array: np.ndarray) -> bool:
        """Whether the memory of `array` is page-locked, by this package or another."""
        kind = ctypes.c_uint()
        pointer = array.__array_interface__["data"][0]
        return driver.libcuda().cuPointerGetAttribute(ctypes.byref(kind), 2, pointer) == 0 and kind.value == 1  # MEMORY_TYPE is HOST

    def copy_in(self, target: Any, whole: np.ndarray, part: np.ndarray, stream: Any) -> None:
        """Copy `part`, a band of the C-contiguous `whole` along its third axis, to packed memory on the device."""
        if part.flags.c_contiguous:
            self._drv.memcpy_htod_async(target, part, stream)
        elif whole.strides[1] > MOST_PITCH:
            for i, plane in enumerate(_planes(part)):
                self.copy_in(int(target) + i * plane.nbytes, plane, plane, stream)
        else:
            copy = self._band(whole, part)
            copy.set_src_host(whole)
            copy.set_dst_device(int(target))
            copy.dst_pitch = copy.width_in_bytes
            copy(stream)

    def copy_out(self, whole: np.ndarray, part: np.ndarray, source: Any, stream: Any) -> None:
        """Copy packed memory on the device to `part` of `whole`: the inverse of :meth:`copy_in`."""
        if part.flags.c_contiguous:
            self._drv.memcpy_dtoh_async(part, source, stream)
        elif whole.strides[1] > MOST_PITCH:
            for i, plane in enumerate(_planes(part)):
                self.copy_out(plane, plane, int(source) + i * plane.nbytes, stream)
        else:
            copy = self._band(whole, part)
            copy.set_src_device(int(source))
            copy.src_pitch = copy.width_in_bytes
            copy.set_dst_host(whole)
            copy.dst_x_in_bytes, copy.dst_y, copy.dst_pitch = copy.src_x_in_bytes, copy.src_y, copy.dst_pitch
            copy.src_x_in_bytes = copy.src_y = 0
            copy(stream)

    def _band(self, whole: np.ndarray, part: np.ndarray) -> Any:
        """A 2-d copy of `part` of `whole`. The rows of the copy are the planes (n, c), of each of which it takes a band."""
        plane = whole.strides[1]
        offset = part.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
        copy = self._drv.Memcpy2D()
        copy.src_pitch = copy.dst_pitch = plane
        copy.src_y, copy.src_x_in_bytes = divmod(offset, plane)
        copy.height = part.shape[0] * part.shape[1]
        copy.width_in_bytes = part.nbytes // copy.height
        return copy

    def update_host_arrays(
        self, launch: Launcher, inputs: Sequence[np.ndarray | None], outs: Sequence[np.ndarray | None], workspace: int
    ) -> None:
        with self:
            _, own, _ = self.pipeline_streams()
            arrays = (*inputs, *outs)
            blocks = [self.allocate(a.nbytes) if a is not None and a.nbytes else 0 for a in arrays]
            scratch = self.allocate(workspace) if workspace else 0
            self.order(None, own)  # the pool's memory may still be in use by the default stream
            try:
                for array, block in zip(arrays, blocks, strict=True):
                    if block:
                        self._drv.memcpy_htod_async(block, array, own)
                launch([*map(int, blocks), int(scratch)], own)
                for array, block in zip(outs, blocks[len(inputs) :], strict=True):
                    if block:
                        self._drv.memcpy_dtoh_async(array, block, own)
            finally:
                own.synchronize()

    @property
    def copy_functions(self) -> tuple[int, ...]:
        """The driver's functions as ``_copy.c`` takes them."""
        return tuple(map(driver.address_of, COPY_FUNCTIONS))

    def check_code(self, code: int, what: str) -> None:
        """Raise the driver's error, if there is one."""
        driver.check(code, what)

    def small_buffers(self, nbytes: int) -> tuple[np.ndarray, int, int, Any]:
        """A buffer of this thread in the host's memory, made once, another one on the device, and a stream for them.

        Behind the host's buffer comes the address at which kernels reach it, or 0 where no more memory may be page-locked.
        """
        streams = self._streams()
        if streams.small is None:
            shape, dtype = (nbytes,), np.dtype(np.uint8)
            locked = driver.pinned().empty(shape, dtype)
            host = np.empty(shape, dtype) if locked is None else locked
            address = 0 if locked is None else locked.__array_interface__["data"][0]
            streams.small = host, address, self._allocated(self._drv.mem_alloc, nbytes)
        host, address, device = streams.small
        return host, address, int(device), streams.main

    def pipeline_streams(self) -> tuple[Any, Any, Any]:
        """This thread's streams for copies in, kernels, and copies out."""
        streams = self._streams()
        return streams.up, streams.main, streams.down

    def event(self) -> Any:
        """An event without times."""
        return self._drv.Event(2)

    def recorded(self, stream: Any) -> Any:
        """An event that comes when the present work of `stream` is done."""
        return self.event().record(stream)

    def wait_for(self, stream: Any) -> None:
        """Let the pipeline's streams wait for the present work of `stream`."""
        for own in self.pipeline_streams():
            self.order(stream, own)

    def _release(self) -> None:
        """Give back the pool's memory and that of arrays. It runs at exit, as PyCUDA aborts if it has to do so later. Never raises."""
        with suppress(Exception):  # the driver may already be gone
            for block in list(self.blocks):
                block.free()
            with self:
                self.pool.stop_holding()
