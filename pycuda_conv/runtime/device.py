"""A CUDA context as a device: kernels that are loaded there, launches, streams, memory, and copies.

Contexts themselves, and which of them serves a call, are in :mod:`pycuda_conv.runtime.contexts`.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import lru_cache, partial
from itertools import cycle
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from pycuda_conv.runtime import copies, driver, tensor_map
from pycuda_conv.runtime.base import Device, KernelLaunch, Launcher, LibraryCall
from pycuda_conv.runtime.gpu import Gpu
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
)  # fmt: skip
from pycuda_conv.runtime.memory import MemoryPool, block_class
from pycuda_conv.runtime.pinned import PinnedPool
from pycuda_conv.runtime.streams import SIDES, Event, Lease, Streams
from pycuda_conv.runtime.transforms.gpu import fill_on_gpu
from pycuda_conv.runtime.workers import cores

log = logging.getLogger("pycuda_conv")

FULL = 4 * 2048  # threads a multiprocessor in a launch that keeps it busy for long

#: Where arrays in a GPU's memory lie: the GPU's number if that is its primary context, otherwise the number and the context's id.
Where = int | tuple[int, int]


class Current(AbstractContextManager[None]):
    """A device's context is current. A generator would take a microsecond longer."""

    __slots__ = ("_device",)

    def __init__(self, device: CudaDevice) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._device.push()

    def __exit__(self, *exc: object) -> None:
        self._device.pop()


class CudaDevice(Device):
    """A CUDA context of a GPU.

    Everything is kept as handles of the driver. Objects of PyCUDA's would keep the context alive for as long as the device is known.

    Parameters
    ----------
    gpu : Gpu
    handle : int
        The context's.
    where : int, or tuple of (int, int)
        See :data:`Where`.
    """

    backend = "cuda"
    constants_pay = True

    def __init__(self, gpu: Gpu, handle: int, where: Where) -> None:
        self._drv = driver.pycuda()
        self.gpu, self.handle, self.where = gpu, handle, where
        self.ordinal, self.name, self.model, self.queue = gpu.ordinal, gpu.name, gpu.model, gpu.queue
        self.capability, self.multiprocessors = gpu.capability, gpu.multiprocessors
        self._in_c = launcher_in_c()
        #: the extension whose threads copy arrays, or None
        self.copier = copier_in_c()
        #: whether the context is known to be current, which takes less time than to push it
        self.is_current: Callable[[], Any] = bool
        self._functions: dict[tuple[str, str], int] = {}
        self._modules: dict[str, int] = {}
        self._attributes = 1 if self.capability >= (9, 0) else 0  # FOLLOWING, where the GPU knows it
        self._lock = threading.Lock()
        self._threads = threading.local()
        self._idle_streams: list[Streams] = []
        self._idle_events: list[int] = []
        self.pool = MemoryPool(self.name)
        #: plans for another context of the GPU, and the same plans for this one
        self.plans: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    # ---- the current context

    def push(self) -> None:
        """Make the context current, until :meth:`pop`. PyCUDA does not learn of it."""
        driver.push(self.handle)

    def pop(self) -> None:
        """Make the context current again that was so before :meth:`push`."""
        driver.pop()

    def is_usable(self) -> bool:
        """Whether :meth:`push` can make the context current."""
        return True

    def current(self) -> AbstractContextManager[None]:
        """The context is current inside the block, as far as the driver knows: PyCUDA's functions that allocate need ``with device:``."""
        return Current(self)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """The same in a thread that works for a call, whose own thread keeps the context alive."""
        driver.push(self.handle)
        try:
            yield
        finally:
            driver.pop()

    @contextmanager
    def for_pycuda(self) -> Iterator[None]:
        """The context is current for the driver and for PyCUDA, whose functions allocate there."""
        with nullcontext() if self.is_current() else self.current():
            yield

    def __enter__(self) -> CudaDevice:
        self.push()
        return self

    def __exit__(self, *exc: object) -> None:
        self.pop()

    # ---- kernels

    def compile_all(self, steps: Sequence[KernelLaunch]) -> None:
        kernels = (step for step in steps if not isinstance(step, LibraryCall))
        missing = {step.source(): step for step in kernels if (step.kernel, step.source()) not in self._functions}
        if len(missing) > 1:
            with ThreadPoolExecutor(min(len(missing), cores())) as pool:
                list(pool.map(lambda step: self.queue.cubin(step.source(), step.arch).result(), missing.values()))
        for step in missing.values():
            self._function(step)

    def launcher(self, step: KernelLaunch) -> Launcher:
        return self.schedule_launcher([[step]])

    def schedule_launcher(self, steps: Sequence[Sequence[KernelLaunch]]) -> Launcher:
        """Launches of one step run side by side, unless each alone fills the GPU: then they run in turn, which costs the host less."""
        if any(isinstance(launch, LibraryCall) for step in steps for launch in step):
            return self._with_library(steps)
        operations = list(self._operations(steps))
        forks = any(isinstance(one, StreamWait) for one in operations)
        return (self._by_python if self._in_c is None else self._by_c)(operations, forks)

    def _with_library(self, steps: Sequence[Sequence[KernelLaunch]]) -> Launcher:
        """A launcher that makes launches and a library's calls one after the other."""
        parts = [
            partial(self._call_library, launch) if isinstance(launch, LibraryCall) else self.schedule_launcher([[launch]])
            for step in steps for launch in step
        ]

        def launch(buffers: Sequence[Any], stream: Any) -> None:
            for part in parts:
                part(buffers, stream)

        return launch

    def _call_library(self, call: LibraryCall, buffers: Sequence[Any], stream: Any) -> None:
        driver.check_not_forked()
        args, sums, limits = call.transforms
        places = (one if isinstance(one, tuple) else (one, 0) for one in call.buffers)
        x, w, workspace = (int(buffers[i]) + start for i, start in places)
        fill_on_gpu(args, call.kernel, self.ordinal, (x, w, workspace + sums, workspace + limits), driver.handle_of(stream))

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
                    with self.current():
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
        """A repeated call, as the launcher in C makes it; `decided` are its fixed values: see ``ready`` in ``launch/ready.c``."""
        stream, place, *rest = decided
        return launcher.native.ready(launcher.schedule, launcher.own, self.handle, (stream, self.ordinal, place), launcher.failed, *rest)

    def _room(self) -> LaunchBuffer:
        room = getattr(self._threads, "room", None)
        if room is None:
            room = self._threads.room = LaunchBuffer()
        return room

    def _streams(self) -> Streams:
        """This thread's streams. When the thread ends, the next one that needs streams gets them."""
        lease = getattr(self._threads, "lease", None)
        if lease is None:
            with self.current():
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
            with self._lock, self.current():
                found = self._functions.get(key)
                if found is None:
                    found = self._loaded(source, step.arch, step.kernel)
                    if step.shared:  # more than every kernel gets; other launches of the kernel may ask for more still
                        most = self.gpu.shared_bytes - attribute_of(found, 1)  # SHARED_SIZE_BYTES: the kernel's static shared memory
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

    def compile_in_background(self, steps: Sequence[KernelLaunch]) -> list[Future[Any]]:
        return self.queue.compile_in_background(steps)

    def all_compiled(self) -> bool:
        """Whether nothing is being compiled for the device, and nothing waits to be."""
        return self.queue.all_compiled()

    def describe(self, step: KernelLaunch) -> dict[str, float]:
        """Registers and local bytes of a thread, shared bytes of a block, and the share of a multiprocessor's threads that run at once."""
        function = self._function(step)
        with self.current():
            registers, local, shared = (attribute_of(function, which) for which in (4, 3, 1))  # NUM_REGS, LOCAL_ and SHARED_SIZE_BYTES
            occupancy = blocks_at_once(function, step.block, step.shared) * step.block / self.gpu.threads
        return {"registers": registers, "local": local, "shared": shared + step.shared, "occupancy": occupancy}

    def capturing(self, stream: Any = None) -> bool:
        """Whether `stream`, the current stream of torch or CuPy, or any stream that the default one orders, is being captured."""
        handles, torch, cupy = {0, driver.handle_of(stream)}, sys.modules.get("torch"), sys.modules.get("cupy")
        if self.where != self.ordinal:  # their streams are in the primary context
            torch = cupy = None
        if torch is not None and torch.cuda.is_initialized():
            handles.add(torch.cuda.current_stream(self.ordinal).cuda_stream)
        if cupy is not None:
            handles.add(cupy.cuda.get_current_stream(self.ordinal).ptr)
        state = ctypes.c_int()
        with self.current():
            return any(driver.libcuda().cuStreamIsCapturing(handle, ctypes.byref(state)) or state.value for handle in handles)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the GPU's L2 cache."""
        return self.gpu.cache_bytes

    # ---- memory

    def allocate(self, nbytes: int) -> Any:
        """`nbytes` from the pool, as an allocator of GPUArrays calls it. The pool follows the default stream only.

        Raises
        ------
        DeviceMemoryError
        """
        with self.current():
            block = block_class()(self.pool, nbytes)
        block.context = self.keep_alive()
        return block

    def keep_alive(self) -> Any:
        """What an array of the context's memory has to hold so that the context lives as long, as PyCUDA's arrays do."""
        return None

    def pinned(self) -> PinnedPool:
        """The pool of page-locked memory."""
        return driver.pinned()

    def pinned_or_ordinary(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An uninitialised page-locked array, or an ordinary one where no more memory may be locked. The context must be current."""
        array = self.pinned().empty(shape, dtype)
        return np.empty(shape, dtype) if array is None else array

    def result_array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """The same for arrays that callers get, which must outlive the context."""
        return self.pinned_or_ordinary(shape, dtype)

    def is_pinned(self, array: np.ndarray) -> bool:
        """Whether the memory of `array` is page-locked, by this package or another."""
        kind = ctypes.c_uint()
        pointer = array.__array_interface__["data"][0]
        code = driver.libcuda().cuPointerGetAttribute(ctypes.byref(kind), 2, pointer)  # MEMORY_TYPE
        return code == 0 and kind.value == copies.HOST

    # ---- copies between the host and the device

    def copy_in(self, target: Any, whole: np.ndarray, part: np.ndarray, stream: Any) -> None:
        """Copy `part`, a band of the C-contiguous `whole` along its third axis, to packed memory on the device."""
        copies.band_to_device(target, whole, part, stream)

    def copy_out(self, whole: np.ndarray, part: np.ndarray, source: Any, stream: Any) -> None:
        """Copy packed memory on the device to `part` of `whole`: the inverse of :meth:`copy_in`."""
        copies.band_to_host(whole, part, source, stream)

    def update_host_arrays(
        self, launch: Launcher, inputs: Sequence[np.ndarray | None], outs: Sequence[np.ndarray | None], workspace: int
    ) -> None:
        with self.current():
            _, own, _ = self.pipeline_streams()
            arrays = (*inputs, *outs)
            blocks = [self.allocate(a.nbytes) if a is not None and a.nbytes else 0 for a in arrays]
            scratch = self.allocate(workspace) if workspace else 0
            self.order(None, own)  # the pool's memory may still be in use by the default stream
            try:
                for array, block in zip(arrays, blocks, strict=True):
                    if array is not None and block:
                        copies.to_device(block, array, own)
                launch([*map(int, blocks), int(scratch)], own)
                for array, block in zip(outs, blocks[len(inputs) :], strict=True):
                    if array is not None and block:
                        copies.to_host(array, block, own)
            finally:
                own.synchronize()

    @property
    def copy_functions(self) -> tuple[int, ...]:
        """The driver's functions as ``_copy.c`` takes them."""
        return tuple(map(driver.address_of, copies.COPY_FUNCTIONS))

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
            locked = self.pinned().empty(shape, dtype)
            host = np.empty(shape, dtype) if locked is None else locked
            address = 0 if locked is None else locked.__array_interface__["data"][0]
            streams.small = host, address, self.pool.from_driver(nbytes)
        return *streams.small, streams.main

    def pipeline_streams(self) -> tuple[Any, Any, Any]:
        """This thread's streams for copies in, kernels, and copies out."""
        streams = self._streams()
        return streams.up, streams.main, streams.down

    def event(self) -> Any:
        """An event without times."""
        return Event(self._idle_events)

    def recorded(self, stream: Any) -> Any:
        """An event that comes when the present work of `stream` is done."""
        return self.event().record(stream)

    def wait_for(self, stream: Any) -> None:
        """Let the pipeline's streams wait for the present work of `stream`."""
        for own in self.pipeline_streams():
            self.order(stream, own)
