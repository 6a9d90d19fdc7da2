"""Waits during which Ctrl-C and SIGTERM come through: Python runs their handlers between its own instructions, never while C works."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")

#: Seconds of the first and of the longest pause between two looks.
FIRST_PAUSE, LONGEST_PAUSE = 1e-4, 0.01

#: Signals whose handlers LLVM, which is PoCL's compiler, replaces when it first writes a file.
_TAKEN = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR2") if hasattr(signal, name))

_stopping = threading.Event()


class Stopped(RuntimeError):
    """The work of a thread was given up, because the process is about to end."""


def stop(now: bool = True) -> None:
    """Make every thread that waits here give up its work, from now on or, if `now` is False, no longer."""
    if now:
        _stopping.set()
    else:
        _stopping.clear()


def check() -> None:
    """Raise :class:`Stopped` after :func:`stop`."""
    if _stopping.is_set():
        raise Stopped("the process is about to end")


def until(done: Callable[[], Any], compiling: bool = False) -> None:
    """Wait until `done()` is true; `compiling` says that LLVM works meanwhile.

    Raises
    ------
    Stopped
        :func:`stop` was called meanwhile.
    """
    pause, guard = FIRST_PAUSE, compiling and threading.current_thread() is threading.main_thread()
    while not done():
        check()
        if guard:
            _put_handlers_back()
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    if guard:
        _put_handlers_back()


@contextmanager
def held_back() -> Iterator[None]:
    """Inside the block signals wait for its end. It is for C++ that ends the process where a handler raises: imports by nanobind do."""
    came: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    before = {number: handler for number in _TAKEN if main and callable(handler := signal.getsignal(number))}
    try:
        for number in before:
            signal.signal(number, lambda number, _: came.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came[:1]:
            signal.raise_signal(number)


def _put_handlers_back() -> None:
    """Make Python's handlers of signals those of the process, too. LLVM's would remove its files, and could end the process."""
    for number in _TAKEN:
        handler = signal.getsignal(number)
        if handler is not None:  # it is one of Python's
            with suppress(ValueError):  # in a subinterpreter
                signal.signal(number, handler)


def beside(work: Callable[[], T]) -> T:
    """The result of `work`, a call into C of some seconds. In the main thread, which handles signals, another thread makes the call.

    After Ctrl-C that thread goes on by itself.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name="pycuda_conv-beside", daemon=True).start()
    until(future.done, compiling=True)
    return future.result()
