"""Streams of our own, which a thread has for as long as it lives."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from pycuda_conv.runtime import driver
from pycuda_conv.runtime.base import SIDE_BY_SIDE

SIDES = SIDE_BY_SIDE - 1  # streams beside the caller's, for launches that don't depend on each other


class Streams:
    """Streams of our own for one thread and device, and the means to order them with any stream."""

    def __init__(self) -> None:
        stream, non_blocking = driver.pycuda().Stream, 1  # no implicit order with the default stream
        self.main = stream(non_blocking)
        self.sides = [stream(non_blocking) for _ in range(SIDES)]
        self.up, self.down = stream(non_blocking), stream(non_blocking)
        self.small: tuple[np.ndarray, int, Any] | None = None
        self._cu = driver.libcuda()
        self._event = ctypes.c_void_p()
        driver.check(self._cu.cuEventCreate(ctypes.byref(self._event), 2), "cuEventCreate")  # 2: no timing
        #: the event and the side streams, as the launcher in C takes them
        self.own = (self._event.value or 0, *(side.handle for side in self.sides))

    def order(self, first: int, second: int) -> None:
        """Let the later work of stream `second` wait for the present work of `first`: handles, 0 for the default stream."""
        driver.check(self._cu.cuEventRecord(self._event, first), "cuEventRecord")
        driver.check(self._cu.cuStreamWaitEvent(second, self._event, 0), "cuStreamWaitEvent")


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
