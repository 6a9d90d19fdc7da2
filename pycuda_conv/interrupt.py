"""Ctrl-C while the command ``pycuda-conv`` still imports modules: the process ends with one line, as later on, without a traceback.

The package's ``__init__`` imports this module before all others, because numpy and the rest take most of a second.
"""

from __future__ import annotations

import os
import signal
import sys

INTERRUPTED = 130  # the exit status of a process that Ctrl-C ended


def _is_command() -> bool:
    """Whether this process was started as ``pycuda-conv`` or as ``python -m pycuda_conv``."""
    program = (getattr(sys, "argv", None) or [""])[0]
    if program == "-m":  # as long as the module is not yet found
        return not {"pycuda_conv", "-mpycuda_conv"}.isdisjoint(sys.orig_argv)
    return os.path.basename(program).partition(".")[0] == "pycuda-conv"


def _end(number: int, frame: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def end_in_one_line() -> None:
    """From here on Ctrl-C ends the process at once, if this is the command."""
    if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """From here on Ctrl-C raises ``KeyboardInterrupt``, so that what was half done can be removed."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
