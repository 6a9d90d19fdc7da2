"""PoCL's compiled programs, kept in our own cache on disk.

PoCL keeps compiled programs in a folder and does not check its files: a damaged one ends the process. So each process gives PoCL an empty
folder of its own. The files of each program are copied from there to our cache, and they are checked and put back before PoCL is asked for
the same program again.

PoCL also ends the process where it can't write a file. So the free space of its folder is checked before it compiles. If the
cache's folder has too little at the start, the folder of temporary files is used. Later, an exception says why nothing can be compiled.
"""

from __future__ import annotations

import atexit
import io
import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pycuda_conv.errors import BackendError
from pycuda_conv.runtime.cache import ABANDONED_AFTER, Entry, trusted_folder

_PREFIX = ".pocl-"
_LOCK = ".lock"
#: Bytes and files for which there has to be room before PoCL compiles. A program takes up to half a megabyte and a dozen files.
ROOM, FILES = 8 << 20, 100


def why_no_room(folder: Path) -> str | None:
    """Why :data:`ROOM` bytes and :data:`FILES` files can't be written into `folder`; None if they can.

    It is asked by reserving them: a quota and a file system that is read-only show in no other way.
    """
    try:
        handle, path = tempfile.mkstemp(prefix=".room-", dir=folder)
        try:
            stat = os.fstatvfs(handle)
            if stat.f_files and stat.f_favail < FILES:
                return f"its file system has room for {stat.f_favail} more files"
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, ROOM)
            elif stat.f_bavail * stat.f_frsize < ROOM:
                return f"its file system has {stat.f_bavail * stat.f_frsize:,} bytes left"
        finally:
            os.close(handle)
            os.unlink(path)
    except OSError as error:
        return error.strerror or str(error)
    return None


class Workshop:
    """The folder in which PoCL works for this process, removed when the process ends.

    Raises
    ------
    BackendError
        Neither the cache's folder nor that of temporary files can be written to.
    """

    def __init__(self) -> None:
        parent = trusted_folder()
        if parent:
            _remove_abandoned(parent)
        self.folder = _new_folder([parent, None] if parent else [None])
        self._hold()
        atexit.register(self._remove, os.getpid())

    def _hold(self) -> None:
        """Hold the folder's lock while this process lives."""
        from filelock import FileLock

        self._lock = FileLock(self.folder / _LOCK)
        with suppress(OSError, NotImplementedError):
            self._lock.acquire()

    def check_room(self) -> None:
        """Make the folder again if it vanished; a ``BackendError`` if PoCL could not write its files now, which would end the process."""
        if not self.folder.is_dir():
            with suppress(OSError):
                self.folder.mkdir(mode=0o700, parents=True)
            self._hold()
        why = why_no_room(self.folder)
        if why:
            raise BackendError(f"OpenCL can't compile a kernel: its compiler needs {ROOM >> 20} MiB in {self.folder}, but {why}. {_REMEDY}")

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
        try:
            return [item for item in os.scandir(folder) if item.is_dir()]
        except FileNotFoundError:  # somebody removed it
            return []


_REMEDY = "Make room there, or name a folder that has some by PYCUDA_CONV_CACHE_DIR or TMPDIR"


def _new_folder(parents: Iterable[Path | None]) -> Path:
    """An empty folder that has room, in the first of `parents` that can have one. None is the folder of temporary files."""
    reasons = []
    for parent in parents:
        try:
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent)).absolute()
        except OSError as error:
            reasons.append(f"{parent or 'the folder of temporary files'}: {error.strerror or error}")
            continue
        why = why_no_room(folder)
        if why is None:
            return folder
        reasons.append(f"{folder.parent}: {why}")
        shutil.rmtree(folder, ignore_errors=True)
    raise BackendError(
        f"OpenCL can't be used: its compiler needs {ROOM >> 20} MiB on a disk, and there is no room ({'; '.join(reasons)}). {_REMEDY}"
    )


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
        if data:
            workshop.check_room()
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                names, missing = set(archive.namelist()), []
                try:
                    for name in names:
                        if not (workshop.folder / name).exists():  # PoCL may run what is there
                            missing.append(name)
                            archive.extract(name, workshop.folder)
                except OSError as error:
                    for name in missing:  # PoCL would take half a file for a whole one
                        with suppress(OSError):
                            (workshop.folder / name).unlink()
                    raise BackendError(f"OpenCL can't load a kernel: {error}. {_REMEDY}") from error
                self._kept = names
        self._folders = {name.rpartition("/program.bc")[0] for name in self._kept if name.endswith("/program.bc")}

    def __enter__(self) -> None:
        self._workshop.check_room()
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
