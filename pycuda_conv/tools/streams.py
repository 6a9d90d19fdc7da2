"""stdout and stderr that are closed, full, or unable to encode a name: the command's work goes on, and its status is the work's."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class _Forgiving:
    """A stream that drops what can't be written, and everything after it. The errors are put into `lost`."""

    def __init__(self, stream: Any, lost: list[OSError]) -> None:
        self._stream, self._lost = stream, lost

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._drop(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        if error.errno != errno.EPIPE:  # otherwise the reader, such as head, has had enough
            self._lost.append(error)
        with suppress(OSError, ValueError):  # what the stream still holds goes nowhere, now and when Python ends
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def _opened() -> None:
    """Open what was closed when the process began: otherwise the next file to be opened would be written to as stdout or stderr."""
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115 (it stays open)


@contextmanager
def forgiving() -> Iterator[list[OSError]]:
    """Inside the block nothing that is printed raises an error. Gives the errors because of which output to stdout was lost."""
    _opened()
    lost: list[OSError] = []
    before = sys.stdout, sys.stderr
    for stream in before:
        with suppress(AttributeError, OSError):  # a stream that a test or a notebook put there
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.stdout, sys.stderr = _Forgiving(before[0], lost), _Forgiving(before[1], [])
    try:
        yield lost
    finally:
        for one in (sys.stdout, sys.stderr):
            one.flush()
        sys.stdout, sys.stderr = before
