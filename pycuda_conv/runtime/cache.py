"""Compiled kernels kept on disk, safe when several processes build the same one."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """The folder of this package's caches: ``PYCUDA_CONV_CACHE_DIR``, or the user's cache folder."""
    return Path(os.environ.get("PYCUDA_CONV_CACHE_DIR") or platformdirs.user_cache_dir("pycuda_conv"))


@cache
def file_identity(path: str) -> str:
    """What tells one version of a file from the next without reading it."""
    real = os.path.realpath(path)
    stat = os.stat(real)
    return f"{real}:{stat.st_size}:{stat.st_mtime_ns}"


def cached(parts: tuple[str, ...], suffix: str, build: Callable[[], bytes]) -> bytes:
    """The bytes that `build` makes, from disk where they were built before.

    `parts` are everything the result depends on. A new entry is written under a temporary name and renamed, so another
    process sees all of it or none. A folder that can't be written costs the cache, not the result.
    """
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    path = cache_dir() / "kernels" / key[:2] / (key + suffix)
    try:
        data = path.read_bytes()
        if data:
            return data
    except OSError:
        pass
    data = build()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".building-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError:
        pass
    return data
