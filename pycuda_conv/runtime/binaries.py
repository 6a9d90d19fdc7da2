"""The machine code of a kernel's text: shipped with the package, read from disk, or compiled now."""

from __future__ import annotations

import hashlib
import logging
import zipfile
import zlib
from functools import cache
from pathlib import Path

from pycuda_conv.runtime.base import headers
from pycuda_conv.runtime.cache import Entry
from pycuda_conv.runtime.compiler import Compiler

log = logging.getLogger("pycuda_conv")

#: The archive of binaries that ``make wheel GPU=...`` puts into the package: one file for each text, ``ARCH/DIGEST``.
SHIPPED = Path(__file__).resolve().parent.parent / "shipped" / "kernels.zip"


def shipped_name(source: str, arch: str) -> str:
    """The name of a text's binary in the archive. The digest covers the text and all headers, so no binary of another version is found."""
    return f"{arch}/{hashlib.sha256((source + chr(0) + headers()).encode()).hexdigest()}"


@cache
def _archive() -> tuple[zipfile.ZipFile | None, frozenset[str]]:
    try:
        archive = zipfile.ZipFile(SHIPPED)
    except (OSError, zipfile.BadZipFile) as error:
        if not isinstance(error, FileNotFoundError):
            log.warning("the shipped kernels can't be read and are compiled: %s", error)
        return None, frozenset()
    return archive, frozenset(archive.namelist())


def compatible(arch: str) -> list[str]:
    """The targets whose binaries run on `arch`: itself, and older ones of the same major version; for ``sm_90a`` itself alone."""
    number = arch.removeprefix("sm_")
    if not number.isdecimal():
        return [arch]
    return [f"sm_{n}" for n in range(int(number), int(number) // 10 * 10 - 1, -1)]


def serves(arch: str) -> bool:
    """Whether any binary is shipped for a GPU whose plain target is `arch`."""
    _, names = _archive()
    return any(name.startswith(f"{one}/") for name in names for one in compatible(arch))


def shipped(source: str, arch: str) -> bytes | None:
    """The binary of a text that was shipped with the package, or None."""
    archive, names = _archive()
    for one in compatible(arch) if archive else ():
        name = shipped_name(source, one)
        if archive and name in names:
            try:
                return archive.read(name)  # the archive's checksum is checked
            except (OSError, zipfile.BadZipFile, zlib.error) as error:
                log.warning("the shipped kernel %s is damaged and is compiled: %s", name, error)
    return None


def _entry(source: str, arch: str, made_by: Compiler) -> Entry:
    return Entry((source, headers(), arch, *made_by.identity), ".cubin")


def find(source: str, arch: str, made_by: Compiler | None) -> bytes | None:
    """The binary of a text, or None if there is none: shipped, or kept on disk and made by this compiler."""
    found = shipped(source, arch)
    return _entry(source, arch, made_by).read() if found is None and made_by else found


def make(source: str, arch: str, made_by: Compiler, fresh: bool = False) -> bytes:
    """The binary of a text, from disk or else compiled and kept there. With `fresh`, it is compiled and replaces what was kept.

    Raises
    ------
    CompileError
    """

    def build() -> bytes:
        log.debug("compiling for %s: %s", arch, source.partition("#line")[0].replace("\n", " "))
        return made_by.compile(source, arch)

    return _entry(source, arch, made_by).get(build, fresh)
