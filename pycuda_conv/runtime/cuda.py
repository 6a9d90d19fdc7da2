"""CUDA through PyCUDA: primary contexts, kernels compiled for the card at hand, memory, streams and launches.

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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import cycle
from struct import Struct
from typing import Any

import numpy as np

from pycuda_conv.errors import BackendError, ConvArgumentError, DeviceMemoryError, did_you_mean
from pycuda_conv.runtime import binaries
from pycuda_conv.runtime.base import SIDE_BY_SIDE, Device, Im2col, KernelLaunch, Launcher, TensorMap, forked
from pycuda_conv.runtime.compiler import CompileError, compiler
from pycuda_conv.runtime.pinned import PinnedPool, default_limit
from pycuda_conv.runtime.workers import cores, workers

log = logging.getLogger("pycuda_conv")

FULL = 4 * 2048  # threads a multiprocessor in a launch that keeps it busy for long
SIDES = SIDE_BY_SIDE - 1  # streams beside the caller's, for launches that don't depend on each other

_initialised = False
_forked = False


def _after_fork() -> None:
    global _forked
    _forked = _initialised
    for device in _made.values():
        device.push = device.is_current = driver  # driver() raises an error that says what is wrong
    native = sys.modules.get("pycuda_conv.runtime._launch")
    if _forked and native is not None:
        native.stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def driver() -> Any:
    """``pycuda.driver``, initialised. It is imported here, since the package must import without PyCUDA."""
    global _initialised
    if _forked:
        raise forked("CUDA")
    try:
        drv = importlib.import_module("pycuda.driver")
    except ImportError as error:
        if not has_gpu():
            raise BackendError("no NVIDIA GPU was found") from error
        raise BackendError(f"PyCUDA is not importable ({error}); install it with: pip install 'pycuda_conv[cuda]'") from error
    if not _initialised:
        try:
            drv.init()
        except drv.Error as error:
            raise BackendError(f"the CUDA driver did not start: {error}") from error
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
    return int(driver().get_driver_version()) // 1000


def why_not() -> str | None:
    """Why CUDA can't be used here, or None if it can."""
    try:
        drv = driver()
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
def _libcuda() -> Any:
    """The driver library itself, for what PyCUDA lacks: launches on any stream, captures, pointers, page-locked memory of all contexts."""
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    pointer = ctypes.c_void_p
    library.cuEventCreate.argtypes = [ctypes.POINTER(pointer), ctypes.c_uint]
    library.cuEventRecord.argtypes = [pointer, pointer]
    library.cuStreamWaitEvent.argtypes = [pointer, pointer, ctypes.c_uint]
    library.cuMemHostAlloc.argtypes = [ctypes.POINTER(pointer), ctypes.c_size_t, ctypes.c_uint]
    library.cuMemFreeHost.argtypes = [pointer]
    library.cuPointerGetAttribute.argtypes = [pointer, ctypes.c_int, ctypes.c_uint64]
    library.cuStreamIsCapturing.argtypes = [pointer, ctypes.POINTER(ctypes.c_int)]
    library.cuStreamBeginCapture_v2.argtypes = [pointer, ctypes.c_int]
    library.cuStreamEndCapture.argtypes = library.cuGraphLaunch.argtypes = [pointer, pointer]
    library.cuGraphInstantiateWithFlags.argtypes = [pointer, pointer, ctypes.c_uint64]
    library.cuGraphDestroy.argtypes = library.cuGraphExecDestroy.argtypes = [pointer]
    library.cuFuncSetAttribute.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
    library.cuOccupancyMaxActiveBlocksPerMultiprocessor.argtypes = [pointer, pointer, ctypes.c_int, ctypes.c_size_t]
    library.cuFuncGetAttribute.argtypes = [pointer, ctypes.c_int, pointer]
    library.cuFuncGetParamInfo.argtypes = [pointer, ctypes.c_size_t, pointer, pointer]
    library.cuLaunchKernelEx.argtypes = [pointer] * 4
    return library


@cache
def _pinned() -> PinnedPool:
    """The process's pool of page-locked memory."""
    return PinnedPool(_libcuda(), default_limit())


def _check(code: int, what: str) -> None:
    if code:
        name = ctypes.c_char_p()
        _libcuda().cuGetErrorName(code, ctypes.byref(name))
        raise RuntimeError(f"{what} failed: {(name.value or b'an unknown error').decode()} ({code})")


# ---- tensor maps, which PyCUDA does not have


def encoded(described: TensorMap, address: int) -> bytes:
    """The ``CUtensorMap`` of the array at `address`: the 128 bytes that a kernel takes."""

    def array(kind: Any, values: Sequence[int]) -> Any:
        return (kind * len(values))(*values)

    room = ctypes.create_string_buffer(128 + 64)
    at = (ctypes.addressof(room) + 63) & ~63  # the driver wants multiples of 64
    u32, u64, i32 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int
    rank, box = len(described.sizes), described.box
    kind = {"float16": 6, "float32": 7, "bfloat16": 9, "tfloat32": 11}[described.dtype]  # CU_TENSOR_MAP_DATA_TYPE_...
    head = (ctypes.c_void_p(at), kind, u32(rank), ctypes.c_void_p(address), array(u64, described.sizes), array(u64, described.strides))
    swizzle = {0: 0, 32: 1, 64: 2, 128: 3}[described.span]
    tail = (0, swizzle, 2, 0)  # not interleaved; L2 fetches 128 bytes; zeros outside
    if isinstance(box, Im2col):
        corners = array(i32, box.lower), array(i32, box.upper)
        steps = array(u32, (1, *box.stride, 1))
        code = _libcuda().cuTensorMapEncodeIm2col(*head, *corners, u32(box.channels), u32(box.pixels), steps, *tail)
    else:
        code = _libcuda().cuTensorMapEncodeTiled(*head, array(u32, box), array(u32, (1,) * rank), *tail)
    _check(code, f"encoding {described}")
    return ctypes.string_at(at, 128)


# ---- kernels and their launches


class _Refused(RuntimeError):
    """The driver refuses a binary: it is damaged, or not for this GPU."""


def _module_of(cubin: bytes) -> int:
    """Load a binary; returns the driver's handle of the module."""
    module = ctypes.c_void_p()
    _accepted(_libcuda().cuModuleLoadData(ctypes.byref(module), cubin), "loading a kernel")
    return module.value or 0


def _function_of(module: int, kernel: str) -> int:
    """The driver's handle of a kernel in a module."""
    function = ctypes.c_void_p()
    _accepted(_libcuda().cuModuleGetFunction(ctypes.byref(function), ctypes.c_void_p(module), kernel.encode()), f"finding {kernel}")
    return function.value or 0


def _accepted(code: int, what: str) -> None:
    """The same as :func:`_check`, but errors that a wrong binary may cause are a :class:`_Refused`."""
    if code in (200, 209, 218, 222, 300, 500):  # INVALID_IMAGE, NO_BINARY_FOR_GPU, INVALID_PTX, UNSUPPORTED_PTX, INVALID_SOURCE, NOT_FOUND
        raise _Refused(f"{what}: the driver refuses the binary ({code})")
    _check(code, what)


def _attribute(function: int, which: int) -> int:
    """An attribute of a kernel, by its number among the driver's CU_FUNC_ATTRIBUTE_..."""
    value = ctypes.c_int()
    _check(_libcuda().cuFuncGetAttribute(ctypes.byref(value), which, function), "cuFuncGetAttribute")
    return value.value


def first_parameter(function: int) -> int:
    """The offset of a kernel's first parameter. The driver alone knows it for a parameter aligned to more than 16 bytes."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    _check(_libcuda().cuFuncGetParamInfo(function, 0, ctypes.byref(offset), ctypes.byref(size)), "cuFuncGetParamInfo")
    return offset.value


def blocks_at_once(function: int, block: int, shared: int) -> int:
    """The number of blocks, of `block` threads and `shared` bytes of dynamic shared memory, that a multiprocessor runs at the same time."""
    blocks = ctypes.c_int()
    code = _libcuda().cuOccupancyMaxActiveBlocksPerMultiprocessor(ctypes.byref(blocks), function, block, shared)
    _check(code, "cuOccupancyMaxActiveBlocksPerMultiprocessor")
    return blocks.value


#: A launch as the driver takes it: CUlaunchConfig, the number of bytes of the parameters, and the parameters.
LAUNCH = "7I4xPPI4xN"
#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, on: a launch may begin while the one before it runs. Each of our kernels
#: waits for that one itself (AFTER_LAST_LAUNCH in cu/launch.cuh).
_FOLLOWING = ctypes.create_string_buffer(Struct("I4xI60x").pack(6, 1), 72)


@dataclass(frozen=True)
class _Launch:
    """A launch of a schedule, on the caller's stream (0) or on a side stream.

    Attributes
    ----------
    step : KernelLaunch
    stream, function, attributes : int
        The number of the stream, the driver's handle of the kernel, and how many of :data:`_FOLLOWING` go with the launch.
    first : int
        The offset of the kernel's first parameter.
    maps : tuple of (int, int, callable)
        Buffer, offset, and a function that makes the 128 bytes of a tensor map from an address.
    """

    step: KernelLaunch
    stream: int
    function: int
    attributes: int
    first: int
    maps: tuple[tuple[int, int, Callable[[int], bytes]], ...]

    @property
    def places(self) -> list[tuple[int, int]]:
        """Buffers and offsets of the addresses that the kernel takes."""
        return [place if isinstance(place, tuple) else (place, 0) for place in self.step.buffers]

    @property
    def parameters(self) -> str:
        """The format of the kernel's parameters: tensor maps, addresses, numbers."""
        return f"{self.first}x" + "128s" * len(self.maps) + "P" * len(self.step.buffers) + "q" * len(self.step.numbers)

    def by_python(self, room_of: Callable[[], _Room]) -> Callable[[Sequence[Any], Sequence[int]], None]:
        """A function of (buffers, handles of streams) that makes the launch."""
        step, function, on, maps, places, numbers = self.step, self.function, self.stream, self.maps, self.places, self.step.numbers
        packed = Struct(LAUNCH + self.parameters)
        head = step.grid, 1, 1, step.block, 1, 1, step.shared
        tail = ctypes.addressof(_FOLLOWING), self.attributes, packed.size - Struct(LAUNCH).size
        call, pack_into = _libcuda().cuLaunchKernelEx, packed.pack_into

        def launch(buffers: Sequence[Any], streams: Sequence[int]) -> None:
            room = room_of()
            described = [encode(buffers[i] + offset) for i, offset, encode in maps]
            addresses = [buffers[i] + offset for i, offset in places]
            pack_into(room.memory, 0, *head, streams[on], *tail, *described, *addresses, *numbers)
            code = call(room.launch, function, None, room.extra)
            if code:
                _check(code, f"launching {step.kernel}")

        return launch

    def for_c(self) -> tuple[Any, ...]:
        """The launch as ``_launch.c`` takes it."""
        step, start = self.step, Struct(f"{self.first}x" + "128s" * len(self.maps) + "0P").size
        parameters = Struct(self.parameters).pack(*[b""] * len(self.maps), *[0] * len(step.buffers), *step.numbers)
        places = tuple((start + 8 * i, *place) for i, place in enumerate(self.places))
        maps = tuple((self.first + 128 * i, *one) for i, one in enumerate(self.maps))
        attributes = ctypes.addressof(_FOLLOWING), self.attributes
        return 0, self.stream, self.function, step.grid, step.block, step.shared, *attributes, parameters, places, maps


@dataclass(frozen=True)
class _Order:
    """One stream of a schedule waits for another; 0 is the caller's, others are side streams."""

    first: int
    second: int

    def by_python(self, streams_of: Callable[[], _Streams]) -> Callable[[Sequence[Any], Sequence[int]], None]:
        """A function of (buffers, handles of streams) that makes one stream wait for the other."""
        return lambda _, streams: streams_of().order(streams[self.first], streams[self.second])


class _Room:
    """Memory where a thread writes the launch that it is about to make; the driver copies it."""

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(8192)
        self.launch = ctypes.addressof(self.memory)
        head = Struct(LAUNCH).size
        # CU_LAUNCH_PARAM_BUFFER_POINTER and where, CU_LAUNCH_PARAM_BUFFER_SIZE and where, CU_LAUNCH_PARAM_END
        self._extra = (ctypes.c_void_p * 5)(1, self.launch + head, 2, self.launch + head - 8, 0)
        self.extra = ctypes.addressof(self._extra)


def launcher_in_c() -> Any:
    """The extension that makes all launches of a schedule in one call, or None where Python makes them one by one.

    Raises
    ------
    ConvArgumentError, BackendError
        ``PYCUDA_CONV_LAUNCHER`` is not a known word, or asks for an extension that is missing.
    """
    wanted = os.environ.get("PYCUDA_CONV_LAUNCHER", "")
    if wanted not in ("", "c", "python"):
        raise ConvArgumentError(f"PYCUDA_CONV_LAUNCHER must be 'c' or 'python', got {wanted!r}{did_you_mean(wanted, ('c', 'python'))}")
    if wanted == "python":
        return None
    try:
        return importlib.import_module("pycuda_conv.runtime._launch")
    except ImportError as error:
        if wanted:
            raise BackendError(
                f"PYCUDA_CONV_LAUNCHER is 'c', but the launcher in C can't be imported ({error}); in a checkout it is built by: "
                "python setup.py build_ext --inplace"
            ) from error
        return None


def copier_in_c() -> Any:
    """The extension whose threads copy between ordinary and page-locked memory, or None where threads of Python do."""
    if os.environ.get("PYCUDA_CONV_LAUNCHER") != "python":
        with suppress(ImportError):
            return importlib.import_module("pycuda_conv.runtime._copy")
    return None


class LauncherInC:
    """A launcher that makes all launches of a schedule in one call.

    Parameters
    ----------
    native : module
    schedule : object
        The result of ``native.prepare``.
    own : callable or None
        Returns the calling thread's event and side streams, for schedules that need them.
    names : list of str
        The names of the schedule's operations in messages.
    """

    def __init__(self, native: Any, schedule: Any, own: Callable[[], tuple[int, ...]] | None, names: Sequence[str]) -> None:
        self.native, self.schedule, self.own, self._names = native, schedule, own, names
        self._launch = native.launch

    def __call__(self, buffers: Sequence[Any], stream: Any) -> None:
        if _forked:
            raise forked("CUDA")
        failed = self._launch(self.schedule, buffers, stream, self.own and self.own())
        if failed:
            self.failed(*failed)

    def failed(self, code: int, operation: int) -> None:
        """Raise the driver's error of an operation."""
        _check(code, self._names[operation])


#: The driver's functions that the copying threads call.
COPY_FUNCTIONS = (
    "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuEventCreate", "cuEventDestroy_v2", "cuEventRecord", "cuEventSynchronize",
    "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2",
)


def _address_of(function: str) -> int:
    """The address of a function of the driver."""
    return ctypes.cast(getattr(_libcuda(), function), ctypes.c_void_p).value or 0


# ---- captured launches


class Graph:
    """Launches captured from a stream, to be replayed there without the host's cost of each launch.

    Parameters
    ----------
    stream : pycuda.driver.Stream
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._ready = ctypes.c_void_p()

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture the launches on the stream inside the block, instead of running them."""
        library, graph, handle = _libcuda(), ctypes.c_void_p(), self._stream.handle
        _check(library.cuStreamBeginCapture_v2(handle, 1), "cuStreamBeginCapture")  # 1: other threads may call anything
        try:
            yield
        finally:
            code = library.cuStreamEndCapture(handle, ctypes.byref(graph))
        _check(code, "cuStreamEndCapture")
        code = library.cuGraphInstantiateWithFlags(ctypes.byref(self._ready), graph, 0)
        library.cuGraphDestroy(graph)
        _check(code, "cuGraphInstantiate")

    def replay(self) -> None:
        """Launch all that was captured."""
        _check(_libcuda().cuGraphLaunch(self._ready, self._stream.handle), "cuGraphLaunch")

    def __del__(self) -> None:
        if self._ready:
            _libcuda().cuGraphExecDestroy(self._ready)


def device_of_pointer(pointer: int) -> int:
    """The number of the GPU in whose memory `pointer` lies.

    Raises
    ------
    ConvArgumentError
        The memory is the host's, or that of a context other than a device's primary one: kernels launched there can't reach it.
    """
    library, ordinal, context = _libcuda(), ctypes.c_int(), ctypes.c_void_p()
    driver()
    if library.cuPointerGetAttribute(ctypes.byref(ordinal), 9, pointer):  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        raise ConvArgumentError(f"the address {pointer:#x} is not one of a GPU's memory")
    owner = library.cuPointerGetAttribute(ctypes.byref(context), 1, pointer)  # ..._CONTEXT; stream-ordered memory has none
    if owner == 0 and context.value and context.value != cuda_device(ordinal.value).context.handle:
        raise ConvArgumentError(
            f"the array at {pointer:#x} belongs to a CUDA context of its own, as pycuda.autoinit and make_context() create them; make "
            "arrays in the device's primary context, which torch and CuPy use as well: import pycuda.autoprimaryctx instead"
        )
    return ordinal.value


#: The most bytes from one row to the next in a 2-d copy.
MOST_PITCH = 2**31 - 1


def _planes(part: np.ndarray) -> list[np.ndarray]:
    """The planes (n, c) of `part`."""
    return [part[n, c] for n in range(part.shape[0]) for c in range(part.shape[1])]


def _handle(stream: Any) -> int:
    """The driver's handle of a stream: 0 for None, the default stream; that of a PyCUDA stream; an int unchanged."""
    return int(getattr(stream, "handle", stream) or 0)


class _Streams:
    """Streams of our own for one thread and device, and the means to order them with any stream."""

    def __init__(self) -> None:
        stream, non_blocking = driver().Stream, 1  # no implicit order with the default stream
        self.main = stream(non_blocking)
        self.sides = [stream(non_blocking) for _ in range(SIDES)]
        self.up, self.down = stream(non_blocking), stream(non_blocking)
        self.small: tuple[np.ndarray, int, Any] | None = None
        self._cu = _libcuda()
        self._event = ctypes.c_void_p()
        _check(self._cu.cuEventCreate(ctypes.byref(self._event), 2), "cuEventCreate")  # 2: no timing
        #: the event and the side streams, as the launcher in C takes them
        self.own = (self._event.value or 0, *(side.handle for side in self.sides))

    def order(self, first: int, second: int) -> None:
        """Let the later work of stream `second` wait for the present work of `first`: handles, 0 for the default stream."""
        _check(self._cu.cuEventRecord(self._event, first), "cuEventRecord")
        _check(self._cu.cuStreamWaitEvent(second, self._event, 0), "cuStreamWaitEvent")


@cache
def _block_class() -> type:
    class Block(driver().PointerHolderBase):  # type: ignore[misc]
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


class _Lease:
    """The streams of one thread, for as long as the thread lives."""

    def __init__(self, idle: list[_Streams]) -> None:
        try:
            self.streams = idle.pop()
        except IndexError:
            self.streams = _Streams()
        self._idle = idle

    def __del__(self) -> None:
        if hasattr(self, "_idle"):  # the driver may have refused the streams
            self._idle.append(self.streams)


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
        drv = driver()
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
            self.is_current = partial(self._in_c.is_current, _address_of("cuCtxGetCurrent"), self.context.handle)
        self._functions: dict[tuple[str, str], int] = {}
        self._modules: dict[str, int] = {}
        #: texts that are being compiled, or were compiled and are not loaded yet
        self._cubins: dict[tuple[str, str], Future[bytes]] = {}
        #: texts that were not found on disk: to look again takes longer than another process's kernel would save in the launch
        self._absent: set[tuple[str, str]] = set()
        self._attributes = 1 if self.capability >= (9, 0) else 0  # _FOLLOWING, where the GPU knows it
        self._lock = threading.Lock()
        self._threads = threading.local()
        self._idle_streams: list[_Streams] = []
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
        forks = any(isinstance(one, _Order) for one in operations)
        return (self._by_python if self._in_c is None else self._by_c)(operations, forks)

    def _operations(self, steps: Sequence[Sequence[KernelLaunch]]) -> Iterator[_Launch | _Order]:
        for step in steps:
            fills = all(one.grid * one.block >= FULL * self.multiprocessors for one in step[:-1])
            sides = range(1, 1 if fills else min(len(step), 1 + SIDES))
            yield from (_Order(0, side) for side in sides)
            for launch, stream in zip(step, cycle((0, *sides))):
                function, first = self._function(launch), 0
                if launch.maps:
                    with self:
                        first = first_parameter(function)
                maps = tuple((one.buffer, one.offset, lru_cache(maxsize=64)(partial(encoded, one))) for one in launch.maps)
                yield _Launch(launch, stream, function, self._attributes, first, maps)
            yield from (_Order(side, 0) for side in sides)

    def _by_python(self, operations: Sequence[_Launch | _Order], forks: bool) -> Launcher:
        """A launcher that calls the driver for each operation."""
        calls = [one.by_python(self._room) if isinstance(one, _Launch) else one.by_python(self._streams) for one in operations]

        def launch(buffers: Sequence[Any], stream: Any) -> None:
            if _forked:
                raise forked("CUDA")
            streams = (_handle(stream), *self._streams().own[1:]) if forks else (_handle(stream),)
            beside: set[int] = set()  # the side streams that the caller's does not wait for yet
            try:
                for one, call in zip(operations, calls, strict=True):
                    call(buffers, streams)
                    if isinstance(one, _Order):
                        (beside.add if one.second else beside.discard)(one.first or one.second)
            except BaseException:  # what was launched may still use memory that the caller's stream gives back
                for side in sorted(beside):
                    with suppress(RuntimeError):
                        self.order(streams[side], streams[0])
                raise

        return launch

    def _by_c(self, operations: Sequence[_Launch | _Order], forks: bool) -> Launcher:
        """A launcher that makes all operations in one call."""
        words: list[tuple[Any, ...]] = []
        names: list[str] = []
        for one in operations:
            if isinstance(one, _Launch):
                words.append(one.for_c())
                names.append(f"launching {one.step.kernel}")
            else:
                words += (1, one.first), (2, one.second)
                names += "cuEventRecord", "cuStreamWaitEvent"
        functions = tuple(map(_address_of, ("cuLaunchKernelEx", "cuEventRecord", "cuStreamWaitEvent")))
        schedule = self._in_c.prepare(functions, tuple(words))
        return LauncherInC(self._in_c, schedule, (lambda: self._streams().own) if forks else None, names)

    def ready(self, launcher: LauncherInC, *decided: Any) -> Any:
        """A repeated call, as the launcher in C makes it; `decided` are its fixed values: see ``ready`` in ``_launch.c``."""
        context = (*map(_address_of, ("cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2")), self.context.handle)
        stream, place, *rest = decided
        return launcher.native.ready(launcher.schedule, launcher.own, context, (stream, self.ordinal, place), launcher.failed, *rest)

    def _room(self) -> _Room:
        room = getattr(self._threads, "room", None)
        if room is None:
            room = self._threads.room = _Room()
        return room

    def _streams(self) -> _Streams:
        """This thread's streams. When the thread ends, the next one that needs streams gets them."""
        lease = getattr(self._threads, "lease", None)
        if lease is None:
            with self:
                lease = self._threads.lease = _Lease(self._idle_streams)
        return lease.streams

    def order(self, first: Any, second: Any) -> None:
        """Let the later work of stream `second` wait for the present work of `first`: streams of PyCUDA, handles or None."""
        self._streams().order(_handle(first), _handle(second))

    def _function(self, step: KernelLaunch) -> int:
        """The driver's handle of the compiled kernel."""
        source = step.source()
        key = step.kernel, source
        found = self._functions.get(key)
        if found is None:
            if source not in self._modules:
                self._cubin(source, step.arch).result()  # outside the lock, so that threads compile side by side
            with self._lock, self:
                found = self._functions.get(key)
                if found is None:
                    found = self._loaded(source, step.arch, step.kernel)
                    if step.shared:  # more than every kernel gets; other launches of the kernel may ask for more still
                        most = self._shared_bytes - _attribute(found, 1)  # SHARED_SIZE_BYTES: the kernel's static shared memory
                        _check(_libcuda().cuFuncSetAttribute(found, 8, most), "cuFuncSetAttribute")  # MAX_DYNAMIC_SHARED_SIZE_BYTES
                    self._functions[key] = found
        return found

    def _loaded(self, source: str, arch: str, kernel: str) -> int:
        """The handle of a kernel in the module of its text, which stays loaded. PyCUDA hides the handles of its own modules."""
        if source not in self._modules:
            coming = self._cubins.pop((source, arch), None)  # none if another thread could not load it
            cubin = coming.result() if coming else self.compile(source, arch)
            try:
                self._modules[source] = _module_of(cubin)
                return _function_of(self._modules[source], kernel)
            except _Refused as error:
                log.warning("%s: it is compiled again", error)
                self._modules[source] = _module_of(self.compile(source, arch, fresh=True))
        return _function_of(self._modules[source], kernel)

    def _cubin(self, source: str, arch: str, behind: bool = False) -> Future[bytes]:
        """The cubin of a text, which is compiled once, whoever asks. With `behind`, another thread compiles it."""
        coming, make = self._claimed(source, arch, behind)
        if make:
            make()
        return coming

    def _claimed(self, source: str, arch: str, behind: bool) -> tuple[Future[bytes], Callable[[], None] | None]:
        """The cubin of a text, and the function that compiles it if the caller has to do so, or else None."""
        with self._lock:
            coming = self._cubins.get((source, arch))
            failed = coming is not None and coming.done() and coming.exception() is not None
            if coming is not None and not failed and (behind or not coming.cancel()):  # the caller takes a text out of the queue
                return coming, None
            if behind:
                coming = self._cubins[source, arch] = workers.submit(partial(self.compile, source, arch))
                return coming, None
            coming = self._cubins[source, arch] = Future()
            coming.set_running_or_notify_cancel()  # begun: from now on whoever asks waits for it
        return coming, partial(self._make, coming, source, arch)

    def _make(self, coming: Future[bytes], source: str, arch: str) -> None:
        try:
            coming.set_result(self.compile(source, arch))
        except BaseException as error:
            coming.set_exception(error)

    def compiled(self, step: KernelLaunch) -> bool:
        source = step.source()
        if source in self._modules:
            return True
        coming = self._cubins.get((source, step.arch))
        if coming is not None:
            return coming.done() and not coming.cancelled() and coming.exception() is None
        if (source, step.arch) in self._absent:
            return False
        found = self._kept(source, step.arch)
        if found is None:
            self._absent.add((source, step.arch))
            return False
        coming = Future()
        coming.set_result(found)
        self._cubins.setdefault((source, step.arch), coming)
        return True

    def coming(self, step: KernelLaunch) -> bool:
        coming = self._cubins.get((step.source(), step.arch))
        return coming is not None and coming.running()

    def queued(self, step: KernelLaunch) -> bool:
        coming = self._cubins.get((step.source(), step.arch))
        return coming is not None and not (coming.running() or coming.done())

    def begin(self, steps: Sequence[KernelLaunch]) -> None:
        texts = {step.source(): step.arch for step in steps}
        for source, arch in texts.items():
            make = None if source in self._modules else self._claimed(source, arch, behind=False)[1]
            if make:
                threading.Thread(target=make, daemon=True).start()

    def compile_behind(self, steps: Sequence[KernelLaunch]) -> list[Future[Any]]:
        texts = {step.source(): step.arch for step in steps}
        return [self._cubin(source, arch, behind=True) for source, arch in texts.items() if source not in self._modules]

    def all_compiled(self) -> bool:
        """Whether nothing is being compiled for the device, and nothing waits to be."""
        return all(coming.done() for coming in list(self._cubins.values()))

    def describe(self, step: KernelLaunch) -> dict[str, float]:
        """Registers and local bytes of a thread, shared bytes of a block, and the share of a multiprocessor's threads that run at once."""
        function = self._function(step)
        most = self._drv.Device(self.ordinal).get_attribute(self._drv.device_attribute.MAX_THREADS_PER_MULTIPROCESSOR)
        with self:
            registers, local, shared = (_attribute(function, which) for which in (4, 3, 1))  # NUM_REGS, LOCAL_ and SHARED_SIZE_BYTES
            occupancy = blocks_at_once(function, step.block, step.shared) * step.block / most
        return {"registers": registers, "local": local, "shared": shared + step.shared, "occupancy": occupancy}

    def capturing(self, stream: Any = None) -> bool:
        """Whether `stream`, the current stream of torch or CuPy, or any stream that the default one orders, is being captured."""
        handles, torch, cupy = [0, _handle(stream)], sys.modules.get("torch"), sys.modules.get("cupy")
        if torch is not None and torch.cuda.is_initialized():
            handles.append(torch.cuda.current_stream(self.ordinal).cuda_stream)
        if cupy is not None:
            handles.append(cupy.cuda.get_current_stream(self.ordinal).ptr)
        state = ctypes.c_int()
        with self:
            return any(_libcuda().cuStreamIsCapturing(handle, ctypes.byref(state)) or state.value for handle in handles)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the GPU's L2 cache."""
        return int(self._drv.Device(self.ordinal).get_attribute(self._drv.device_attribute.L2_CACHE_SIZE))

    def compile(self, source: str, arch: str = "", fresh: bool = False) -> bytes:
        """The cubin of `source` for this GPU: shipped with the package, kept on disk, or compiled now.

        With `fresh`, it is compiled now and replaces what was kept.

        Raises
        ------
        CompileError
        """
        arch = arch or self._arch
        found = None if fresh else binaries.shipped(source, arch)
        return binaries.make(source, arch, compiler(newest()), fresh) if found is None else found

    def _kept(self, source: str, arch: str) -> bytes | None:
        """The cubin of `source`, if it was compiled before."""
        made_by = None
        with suppress(CompileError):
            made_by = compiler(newest())
        return binaries.find(source, arch or self._arch, made_by)

    @property
    def _arch(self) -> str:
        """The GPU's plain target."""
        return "sm_{}{}".format(*self.capability)

    # ---- memory

    def allocate(self, nbytes: int) -> Any:
        """`nbytes` from the pool, as an allocator of GPUArrays calls it. The pool follows the default stream only."""
        return _block_class()(self, self._allocated(self.pool.allocate, nbytes))

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
        array = _pinned().empty(shape, dtype)
        return np.empty(shape, dtype) if array is None else array

    def is_pinned(self, array: np.ndarray) -> bool:
        """Whether the memory of `array` is page-locked, by this package or another."""
        kind = ctypes.c_uint()
        pointer = array.__array_interface__["data"][0]
        return _libcuda().cuPointerGetAttribute(ctypes.byref(kind), 2, pointer) == 0 and kind.value == 1  # MEMORY_TYPE is HOST

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
        return tuple(map(_address_of, COPY_FUNCTIONS))

    def check_code(self, code: int, what: str) -> None:
        """Raise the driver's error, if there is one."""
        _check(code, what)

    def small_buffers(self, nbytes: int) -> tuple[np.ndarray, int, int, Any]:
        """A buffer of this thread in the host's memory, made once, another one on the device, and a stream for them.

        Behind the host's buffer comes the address at which kernels reach it, or 0 where no more memory may be page-locked.
        """
        streams = self._streams()
        if streams.small is None:
            shape, dtype = (nbytes,), np.dtype(np.uint8)
            locked = _pinned().empty(shape, dtype)
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
