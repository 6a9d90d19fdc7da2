"""Kernels as the driver has them, and launches of a schedule: by the extension in C, or by Python."""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, Any

from pycuda_conv.errors import BackendError, VariableError, did_you_mean
from pycuda_conv.runtime import driver
from pycuda_conv.runtime.base import KernelLaunch

if TYPE_CHECKING:
    from pycuda_conv.runtime.streams import Streams


class Refused(RuntimeError):
    """The driver refuses a binary: it is damaged, or not for this GPU."""


def module_of(cubin: bytes) -> int:
    """Load a binary; returns the driver's handle of the module."""
    module = ctypes.c_void_p()
    _accepted(driver.libcuda().cuModuleLoadData(ctypes.byref(module), cubin), "loading a kernel")
    return module.value or 0


def function_of(module: int, kernel: str) -> int:
    """The driver's handle of a kernel in a module."""
    function = ctypes.c_void_p()
    _accepted(driver.libcuda().cuModuleGetFunction(ctypes.byref(function), ctypes.c_void_p(module), kernel.encode()), f"finding {kernel}")
    return function.value or 0


def _accepted(code: int, what: str) -> None:
    """The same as :func:`_check`, but errors that a wrong binary may cause are a :class:`Refused`."""
    if code in (200, 209, 218, 222, 300, 500):  # INVALID_IMAGE, NO_BINARY_FOR_GPU, INVALID_PTX, UNSUPPORTED_PTX, INVALID_SOURCE, NOT_FOUND
        raise Refused(f"{what}: the driver refuses the binary ({code})")
    driver.check(code, what)


def attribute_of(function: int, which: int) -> int:
    """An attribute of a kernel, by its number among the driver's CU_FUNC_ATTRIBUTE_..."""
    value = ctypes.c_int()
    driver.check(driver.libcuda().cuFuncGetAttribute(ctypes.byref(value), which, function), "cuFuncGetAttribute")
    return value.value


def first_parameter(function: int) -> int:
    """The offset of a kernel's first parameter. The driver alone knows it for a parameter aligned to more than 16 bytes."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    driver.check(driver.libcuda().cuFuncGetParamInfo(function, 0, ctypes.byref(offset), ctypes.byref(size)), "cuFuncGetParamInfo")
    return offset.value


def blocks_at_once(function: int, block: int, shared: int) -> int:
    """The number of blocks, of `block` threads and `shared` bytes of dynamic shared memory, that a multiprocessor runs at the same time."""
    blocks = ctypes.c_int()
    code = driver.libcuda().cuOccupancyMaxActiveBlocksPerMultiprocessor(ctypes.byref(blocks), function, block, shared)
    driver.check(code, "cuOccupancyMaxActiveBlocksPerMultiprocessor")
    return blocks.value


#: A launch as the driver takes it: CUlaunchConfig, the number of bytes of the parameters, and the parameters.
LAUNCH = "7I4xPPI4xN"
#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, on: a launch may begin while the one before it runs. Each of our kernels
#: waits for that one itself (AFTER_LAST_LAUNCH in cu/core/launch.cuh).
FOLLOWING = ctypes.create_string_buffer(Struct("I4xI60x").pack(6, 1), 72)


@dataclass(frozen=True)
class Launch:
    """A launch of a schedule, on the caller's stream (0) or on a side stream.

    Attributes
    ----------
    step : KernelLaunch
    stream, function, attributes : int
        The number of the stream, the driver's handle of the kernel, and how many of :data:`FOLLOWING` go with the launch.
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

    def by_python(self, room_of: Callable[[], LaunchBuffer]) -> Callable[[Sequence[Any], Sequence[int]], None]:
        """A function of (buffers, handles of streams) that makes the launch."""
        step, function, on, maps, places, numbers = self.step, self.function, self.stream, self.maps, self.places, self.step.numbers
        packed = Struct(LAUNCH + self.parameters)
        head = step.grid, 1, 1, step.block, 1, 1, step.shared
        tail = ctypes.addressof(FOLLOWING), self.attributes, packed.size - Struct(LAUNCH).size
        call, pack_into = driver.libcuda().cuLaunchKernelEx, packed.pack_into

        def launch(buffers: Sequence[Any], streams: Sequence[int]) -> None:
            room = room_of()
            described = [encode(buffers[i] + offset) for i, offset, encode in maps]
            addresses = [buffers[i] + offset for i, offset in places]
            pack_into(room.memory, 0, *head, streams[on], *tail, *described, *addresses, *numbers)
            code = call(room.launch, function, None, room.extra)
            if code:
                driver.check(code, f"launching {step.kernel}")

        return launch

    def for_c(self) -> tuple[Any, ...]:
        """The launch as ``launch/schedule.c`` takes it."""
        step, start = self.step, Struct(f"{self.first}x" + "128s" * len(self.maps) + "0P").size
        parameters = Struct(self.parameters).pack(*[b""] * len(self.maps), *[0] * len(step.buffers), *step.numbers)
        places = tuple((start + 8 * i, *place) for i, place in enumerate(self.places))
        maps = tuple((self.first + 128 * i, *one) for i, one in enumerate(self.maps))
        attributes = ctypes.addressof(FOLLOWING), self.attributes
        return 0, self.stream, self.function, step.grid, step.block, step.shared, *attributes, parameters, places, maps


@dataclass(frozen=True)
class StreamWait:
    """One stream of a schedule waits for another; 0 is the caller's, others are side streams."""

    first: int
    second: int

    def by_python(self, streams_of: Callable[[], Streams]) -> Callable[[Sequence[Any], Sequence[int]], None]:
        """A function of (buffers, handles of streams) that makes one stream wait for the other."""
        return lambda _, streams: streams_of().order(streams[self.first], streams[self.second])


class LaunchBuffer:
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
    VariableError, BackendError
        ``PYCUDA_CONV_LAUNCHER`` is not a known word, or asks for an extension that is missing.
    """
    wanted = os.environ.get("PYCUDA_CONV_LAUNCHER", "")
    if wanted not in ("", "c", "python"):
        raise VariableError(f"PYCUDA_CONV_LAUNCHER must be 'c' or 'python', got {wanted!r}{did_you_mean(wanted, ('c', 'python'))}")
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
        driver.check_not_forked()
        failed = self._launch(self.schedule, buffers, stream, self.own and self.own())
        if failed:
            self.failed(*failed)

    def failed(self, code: int, operation: int) -> None:
        """Raise the driver's error of an operation."""
        driver.check(code, self._names[operation])
