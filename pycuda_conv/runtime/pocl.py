"""PoCL's compiled programs, kept in our own cache on disk.

PoCL keeps compiled programs in a folder and does not check its files: a damaged one ends the process. So each process gives PoCL an empty
folder of its own. The files of each program are copied from there to our cache, and they are checked and put back before PoCL is asked for
the same program again.
"""

from __future__ import annotations

import atexit
import io
import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pycuda_conv.runtime.cache import ABANDONED_AFTER, Entry, trusted_folder

_PREFIX = ".pocl-"
_LOCK = ".lock"


class Workshop:
    """The folder in which PoCL works for this process, removed when the process ends."""

    def __init__(self) -> None:
        from filelock import FileLock

        parent = trusted_folder()
        if parent:
            _remove_abandoned(parent)
        try:
            folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        except OSError:  # the disk may be full
            folder = tempfile.mkdtemp(prefix=_PREFIX)
        self.folder = Path(folder)
        self._lock = FileLock(self.folder / _LOCK)  # held while this process lives
        with suppress(OSError, NotImplementedError):
            self._lock.acquire()
        atexit.register(self._remove, os.getpid())

    def _remove(self, owner: int) -> None:
        if os.getpid() == owner:  # not in a child that was forked
            shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside the block, a PoCL that starts uses this folder; child processes don't inherit that."""
        before = os.environ.get("POCL_CACHE_DIR")
        os.environ["POCL_CACHE_DIR"] = str(self.folder)
        try:
            yield
        finally:
            if before is None:
                del os.environ["POCL_CACHE_DIR"]
            else:
                os.environ["POCL_CACHE_DIR"] = before

    def programs(self) -> set[str]:
        """PoCL's folders of programs, each as ``XX/YYY``."""
        return {f"{one.name}/{two.name}" for one in self._subfolders(self.folder) for two in self._subfolders(one)}

    @staticmethod
    def _subfolders(folder: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
        return [item for item in os.scandir(folder) if item.is_dir()]


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of killed processes, whose locks nobody holds."""
    from filelock import FileLock

    for folder in parent.glob(_PREFIX + "*"):
        with suppress(OSError, NotImplementedError):
            if (folder / _LOCK).exists():
                with FileLock(folder / _LOCK, timeout=0):
                    shutil.rmtree(folder)
            elif time.time() - folder.stat().st_mtime > ABANDONED_AFTER:  # killed before it had its lock
                shutil.rmtree(folder)


class Program:
    """PoCL's files of one program. If our cache has them, they are put into PoCL's folder when this is made.

    Build the program inside ``with``, and call :meth:`keep` after a launch that may have compiled more.
    """

    def __init__(self, workshop: Workshop, entry: Entry) -> None:
        self._workshop, self._entry = workshop, entry
        self._kept: set[str] = set()
        data = entry.read()
        with suppress(OSError):  # a disk that is full: PoCL will say so
            if data:
                with zipfile.ZipFile(io.BytesIO(data)) as archive:
                    self._kept = set(archive.namelist())
                    for name in self._kept:
                        if not (workshop.folder / name).exists():  # PoCL may run what is there
                            archive.extract(name, workshop.folder)
        self._folders = {name.rpartition("/program.bc")[0] for name in self._kept if name.endswith("/program.bc")}

    def __enter__(self) -> None:
        self._before = self._workshop.programs()

    def __exit__(self, *exc: object) -> None:
        self._folders = self._workshop.programs() - self._before or self._folders

    def keep(self) -> None:
        """Keep PoCL's files, if it has compiled anything since. Its launches must be done."""
        with suppress(OSError):
            root = self._workshop.folder
            files = {str(p.relative_to(root)): p for folder in self._folders for p in (root / folder).rglob("*") if p.is_file()}
            if not files.keys() <= self._kept:
                data = io.BytesIO()
                with zipfile.ZipFile(data, "w") as archive:
                    for name, path in files.items():
                        archive.write(path, name)
                self._entry.write(data.getvalue())
                self._kept = set(files)
