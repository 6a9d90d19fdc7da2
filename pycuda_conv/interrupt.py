"""Ctrl-C, SIGTERM and SIGHUP in the command ``pycuda-conv``: it ends with one line and the status 128 + number, without a traceback.

The package's ``__init__`` imports this module before all others, because numpy and the rest take most of a second. Meanwhile a signal ends
the process at once; later it raises an exception, so that what is half done is removed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERRUPTED = 128 + signal.SIGINT  # the exit status of a process that Ctrl-C ended
_WORDS = {signal.SIGINT: "interrupted"}
#: Besides Ctrl-C. Windows lacks SIGHUP.
_OTHERS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class Terminated(SystemExit):
    """A signal other than Ctrl-C asked the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


def is_command() -> bool:
    """Whether this process was started as ``pycuda-conv`` or as ``python -m pycuda_conv``."""
    program = (getattr(sys, "argv", None) or [""])[0]
    if program == "-m":  # as long as the module is not yet found
        return not {"pycuda_conv", "-mpycuda_conv"}.isdisjoint(sys.orig_argv)
    return os.path.basename(program).partition(".")[0] == "pycuda-conv"


def _end(number: int, frame: object) -> None:
    try:
        os.write(2, f"{word(128 + number)}\n".encode())
    finally:  # stderr may be closed
        os._exit(128 + number)


def word(status: int) -> str:
    """The word for what ended a process with that exit status."""
    return _WORDS.get(signal.Signals(status - 128), "terminated")


def end_in_one_line() -> None:
    """From here on such a signal ends the process, which is the command, at once."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    for number in _OTHERS:
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, _end)


@contextmanager
def raised() -> Iterator[None]:
    """Inside the block Ctrl-C raises ``KeyboardInterrupt``, and the other signals raise :class:`Terminated`."""

    def stop(number: int, frame: object) -> None:
        raise Terminated(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    before = {number: signal.getsignal(number) for number in _OTHERS}
    taken = [number for number, handler in before.items() if handler in (signal.SIG_DFL, _end)]
    try:
        for number in taken:
            signal.signal(number, stop)
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])


def behind(error: BaseException) -> KeyboardInterrupt | Terminated | None:
    """The signal's exception if it led to `error`.

    Code that is interrupted may raise another: a lock that was not yet taken can't be given back, and Python before 3.12 wraps what is
    raised while a class tells its attributes their names.
    """
    found: BaseException | None = error
    seen: set[int] = set()  # an error that is raised again while its own effect is handled stands behind itself
    while not (found is None or isinstance(found, (KeyboardInterrupt, Terminated))):
        seen.add(id(found))
        found = found.__cause__ or found.__context__
        if id(found) in seen:
            return None
    return found


@contextmanager
def telling(how: Callable[[], str]) -> Iterator[None]:
    """Where a signal ends the block, the command's last line tells `how` to go on."""
    try:
        yield
    except (KeyboardInterrupt, Terminated) as error:
        error.how = getattr(error, "how", "") or how()  # type: ignore[union-attr]
        raise
