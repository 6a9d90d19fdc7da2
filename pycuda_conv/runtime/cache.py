"""Compiled kernels kept on disk: checked when they are read, bounded in size, safe when several processes build the same one.

A kernel is one file, written under a temporary name and renamed, so another process sees all of it or none. As the files never change, no
database is needed. A library (filelock) provides the locks, which a killed process can't leave behind.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import platformdirs

from pycuda_conv.errors import VariableError

log = logging.getLogger("pycuda_conv")

#: Most bytes of compiled kernels that are kept, unless ``PYCUDA_CONV_CACHE_LIMIT`` is set.
LIMIT = 512 << 20
#: Seconds that a process waits while another one builds the same entry; then it builds the entry itself.
PATIENCE = 60
#: Digits of an entry's name that choose its lock while it is built: enough that two entries built at once hardly ever share a lock.
LOCKED_BY = 4
#: An entry that is read is marked as used, at most once in this many seconds.
MARKED_EVERY = 3600
#: Temporary files older than this were left by a process that was killed.
ABANDONED_AFTER = 3600
_TEMPORARY = ".building-"
#: The end of an entry: its checksum, its length and these bytes. What lies before them can be read by other tools.
_MARK = b"pycudaconv\x01\n"
_TAIL = 32 + 8 + len(_MARK)

_said: set[str] = set()


def _say_once(subject: str, message: str, *arguments: object) -> None:
    """Warn of each subject once in a process; later cases are logged for debugging."""
    log.log(logging.DEBUG if subject in _said else logging.WARNING, message, *arguments)
    _said.add(subject)


def cache_dir() -> Path:
    """The folder of this package's caches: ``PYCUDA_CONV_CACHE_DIR``, or one in the user's cache folder.

    It is relative only where nothing says which folder is the user's home: then there is none to use.
    """
    chosen = os.environ.get("PYCUDA_CONV_CACHE_DIR")
    return Path(chosen).expanduser().absolute() if chosen else Path(platformdirs.user_cache_dir("pycuda_conv"))


def limit() -> int:
    """Bytes of compiled kernels that are kept: ``PYCUDA_CONV_CACHE_LIMIT``, or :data:`LIMIT`."""
    text = os.environ.get("PYCUDA_CONV_CACHE_LIMIT")
    if not text:
        return LIMIT
    if not text.isdecimal():
        raise VariableError(f"PYCUDA_CONV_CACHE_LIMIT must be a number of bytes, got {text!r}")
    return int(text)


@cache
def file_identity(path: str) -> str:
    """A string that distinguishes versions of a file without reading it."""
    real = os.path.realpath(path)
    stat = os.stat(real)
    return f"{real}:{stat.st_size}:{stat.st_mtime_ns}"


def why_not_trusted(folder: Path) -> str | None:
    """Why another user could put files into `folder`; None if only its owner can, who is this user or root."""
    if not hasattr(os, "geteuid"):  # on Windows a user's folders are the user's own
        return None
    stat = folder.stat()
    if stat.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {stat.st_uid}"
    if stat.st_mode & 0o022:
        return f"other users can write to it (mode {stat.st_mode & 0o7777:o})"
    return None


def trusted_folder() -> Path | None:
    """The folder of the entries, made if necessary; None if it can't be made, or another user could write to it."""
    try:
        top = cache_dir()
        if not top.is_absolute():
            _say_once("home", "compiled kernels are not kept: nothing names the user's home folder; set PYCUDA_CONV_CACHE_DIR to a folder")
            return None
        folder = top / "kernels"
        for one in (top, folder):
            one.mkdir(mode=0o700, parents=True, exist_ok=True)
            why = why_not_trusted(one)
            if why:
                _say_once(
                    f"trust {one}", "compiled kernels are not kept: the cache folder %s is not trusted, since %s; correct that, or "
                    "set PYCUDA_CONV_CACHE_DIR to a folder of your own", one, why,
                )  # fmt: skip
                return None
    except OSError as error:
        _say_once("folder", "compiled kernels are not kept: %s", error)
        return None
    return folder


class Entry:
    """A place on disk for bytes that are built from `parts`.

    Parameters
    ----------
    parts : tuple of str
        Everything that the result depends on.
    suffix : str
        The end of the file's name.
    """

    def __init__(self, parts: tuple[str, ...], suffix: str) -> None:
        self._name = hashlib.sha256("\0".join(parts).encode()).hexdigest() + suffix

    def get(self, build: Callable[[], bytes], fresh: bool = False) -> bytes:
        """The bytes of `build`, from disk if they were built before. With `fresh`, they are built and replace what lies on disk.

        While one process builds, others that want the same entry wait. If the folder can't be used, results are built but not kept.
        """
        found = None if fresh else self.read()
        if found is not None:
            return found
        with self._building():
            found = None if fresh else self.read()  # perhaps another process has built it meanwhile
            if found is None:
                found = build()
                self.write(found)
        return found

    def exists(self) -> bool:
        """Whether there are bytes on disk; they may be damaged."""
        folder = trusted_folder()
        return folder is not None and (folder / self._name).exists()

    def read(self) -> bytes | None:
        """The bytes on disk; None if there are none, or their checksum is wrong."""
        folder = trusted_folder()
        if folder is None:
            return None
        path = folder / self._name
        try:
            whole = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _say_once("unreadable", "a kept kernel can't be read and is built again: %s", error)
            return None
        data = whole[:-_TAIL]
        if whole[-_TAIL:] != self._tail(data):
            _say_once("damaged", "the kept kernel %s is damaged and is built again", path)
            return None
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > MARKED_EVERY:
                os.utime(path)
        return data

    def write(self, data: bytes) -> None:
        """Keep `data`. Where all entries are larger than the limit, those go that were not used for the longest time."""
        folder = trusted_folder()
        if folder is None:
            return
        try:
            handle, temporary = tempfile.mkstemp(dir=folder, prefix=_TEMPORARY)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                    file.write(self._tail(data))
                os.replace(temporary, folder / self._name)
            except BaseException:
                os.unlink(temporary)
                raise
            _trim(folder)
        except OSError as error:
            _say_once("unwritable", "a compiled kernel can't be kept: %s", error)

    def _tail(self, data: bytes) -> bytes:
        """The end of the entry with `data`. The checksum covers the name too, so an entry under another's name is refused."""
        return hashlib.sha256(self._name.encode() + data).digest() + len(data).to_bytes(8, "little") + _MARK

    @contextmanager
    def _building(self) -> Iterator[None]:
        """Let one process build at a time. No process waits for ever, and none where the folder has no locks."""
        from filelock import FileLock  # takes longer to import than this package

        folder = trusted_folder()
        lock = None if folder is None else FileLock(folder / f".{self._name[:LOCKED_BY]}.lock", timeout=PATIENCE)
        with suppress(OSError, NotImplementedError):  # Timeout is an OSError
            if lock:
                lock.acquire()
        try:
            yield
        finally:
            if lock:
                lock.release()


def _trim(folder: Path) -> None:
    """Keep the entries below the limit, unless another process is doing so at the moment, or the folder has no locks."""
    from filelock import FileLock, Timeout

    most = limit()
    with suppress(Timeout, NotImplementedError), FileLock(folder / ".trim.lock", timeout=0):
        entries = []
        now = time.time()
        for item in os.scandir(folder):
            with suppress(FileNotFoundError):
                stat = item.stat(follow_symlinks=False)
                if item.name.startswith(_TEMPORARY):
                    if now - stat.st_mtime > ABANDONED_AFTER:
                        os.unlink(item)
                elif not item.name.startswith(".") and item.is_file():
                    entries.append((stat.st_mtime, stat.st_size, item.path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= most:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            total -= size
