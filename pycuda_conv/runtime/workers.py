"""Threads in the background, which run compilers."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

#: Niceness of such a thread and of the compiler that it starts, above that of other threads: somebody waits for those.
NICENESS = 10


def cores() -> int:
    """The number of cores that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def most() -> int:
    """The most threads: half of the cores are left for work that somebody waits for."""
    return max(1, cores() // 2)


class Workers:
    """Threads that are started when there is work, up to :func:`most`. A process that ends does not wait for them."""

    def __init__(self) -> None:
        self._reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)  # no thread survives a fork

    def _reset(self) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = threading.Semaphore(0)
        self._started = 0

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do `work` in such a thread. An exception becomes the future's."""
        future: Future[T] = Future()
        self._queue.put((future, work))
        if not self._idle.acquire(blocking=False):
            with self._lock:
                if self._started < most():
                    self._started += 1
                    threading.Thread(target=self._run, name=f"pycuda_conv-{self._started}", daemon=True).start()
        return future

    def _run(self) -> None:
        if sys.platform == "linux":  # where niceness belongs to a thread
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while True:
            future, work = self._queue.get()
            if not future.set_running_or_notify_cancel():
                self._idle.release()
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # whoever asks for the result gets it
                future.set_exception(error)
            del future, work
            self._idle.release()


workers = Workers()
