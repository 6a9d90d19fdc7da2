"""Streams and events as handles of the driver. PyCUDA's objects would keep the context alive in which they were made.

Handles are never destroyed one by one. A dropped stream or event is used again, and all of them go with their context. So no code has to
know whether the context still exists.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from pycuda_conv.runtime import driver
from pycuda_conv.runtime.base import SIDE_BY_SIDE

SIDES = SIDE_BY_SIDE - 1  # streams beside the caller's, for launches that don't depend on each other
NOT_READY = 600  # CUDA_ERROR_NOT_READY


class Stream:
    """A stream that the default stream does not order. Its context must be current."""

    def __init__(self) -> None:
        handle = ctypes.c_void_p()
        driver.check(driver.libcuda().cuStreamCreate(ctypes.byref(handle), 1), "cuStreamCreate")
        self.handle = handle.value or 0
        self._synchronize = driver.libcuda().cuStreamSynchronize

    def synchronize(self) -> None:
        """Wait for the stream's present work."""
        code = self._synchronize(self.handle)
        if code:
            driver.check(code, "cuStreamSynchronize")

    def wait_for_event(self, event: Event) -> None:
        """Let the stream's later work wait for an event."""
        driver.check(driver.libcuda().cuStreamWaitEvent(self.handle, event.handle, 0), "cuStreamWaitEvent")


class Event:
    """An event without times.

    Parameters
    ----------
    idle : list of int
        Handles of events of the current context that are in nobody's use.
    """

    def __init__(self, idle: list[int]) -> None:
        self._idle = idle
        try:
            self.handle = idle.pop()
        except IndexError:
            self.handle = new_event(2)

    def record(self, stream: Any = None) -> Event:
        """Let the event come when the present work of `stream` is done."""
        driver.check(driver.libcuda().cuEventRecord(self.handle, driver.handle_of(stream)), "cuEventRecord")
        return self

    def hold(self, stream: Any = None) -> None:
        """Let the later work of `stream` wait for the event."""
        driver.check(driver.libcuda().cuStreamWaitEvent(driver.handle_of(stream), self.handle, 0), "cuStreamWaitEvent")

    def synchronize(self) -> None:
        """Wait until the event comes."""
        driver.check(driver.libcuda().cuEventSynchronize(self.handle), "cuEventSynchronize")

    def query(self) -> bool:
        """Whether the event has come."""
        code = driver.libcuda().cuEventQuery(self.handle)
        driver.check(0 if code == NOT_READY else code, "cuEventQuery")
        return bool(code == 0)

    def __del__(self) -> None:
        if hasattr(self, "handle"):  # the driver may have refused the event
            self._idle.append(self.handle)


def new_event(flags: int) -> int:
    """The handle of a new event; flag 2: without times."""
    handle = ctypes.c_void_p()
    driver.check(driver.libcuda().cuEventCreate(ctypes.byref(handle), flags), "cuEventCreate")
    return handle.value or 0


class Streams:
    """Streams of our own for one thread and context, and the means to order them with any stream."""

    def __init__(self) -> None:
        self.main = Stream()
        self.sides = [Stream() for _ in range(SIDES)]
        self.up, self.down = Stream(), Stream()
        #: a buffer of the host's, the address at which kernels reach it, and the address of one on the device
        self.small: tuple[np.ndarray, int, int] | None = None
        self._event = new_event(2)
        #: the event and the side streams, as the launcher in C takes them
        self.own = (self._event, *(side.handle for side in self.sides))

    def order(self, first: int, second: int) -> None:
        """Let the later work of stream `second` wait for the present work of `first`: handles, 0 for the default stream."""
        library = driver.libcuda()
        driver.check(library.cuEventRecord(self._event, first), "cuEventRecord")
        driver.check(library.cuStreamWaitEvent(second, self._event, 0), "cuStreamWaitEvent")


class Lease:
    """The streams of one thread, for as long as the thread lives."""

    def __init__(self, idle: list[Streams]) -> None:
        try:
            self.streams = idle.pop()
        except IndexError:
            self.streams = Streams()
        self._idle = idle

    def __del__(self) -> None:
        if hasattr(self, "_idle"):  # the driver may have refused the streams
            self._idle.append(self.streams)
