"""The machine code of a kernel's text: shipped with the package, kept on disk, or compiled now."""

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

#: The binaries that ``make wheel GPU=...`` puts into the package: a file for each text, ``ARCH/DIGEST``.
SHIPPED = Path(__file__).resolve().parent.parent / "shipped" / "kernels.zip"


def shipped_name(source: str, arch: str) -> str:
    """What the binary of a text is called there. A binary of another text, or of other headers, is not found: its name differs."""
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
    """The targets whose binaries run on `arch`: itself, and older ones of the same major version. ``sm_90a`` runs where it is."""
    number = arch.removeprefix("sm_")
    if not number.isdecimal():
        return [arch]
    return [f"sm_{n}" for n in range(int(number), int(number) // 10 * 10 - 1, -1)]


def serves(arch: str) -> bool:
    """Whether any binary is shipped for a GPU whose plain target is `arch`."""
    _, names = _archive()
    return any(name.startswith(f"{one}/") for name in names for one in compatible(arch))


def shipped(source: str, arch: str) -> bytes | None:
    """The binary of a text that came with the package, or None."""
    archive, names = _archive()
    for one in compatible(arch) if archive else ():
        name = shipped_name(source, one)
        if archive and name in names:
            try:
                return archive.read(name)  # checked: files in archives have checksums
            except (OSError, zipfile.BadZipFile, zlib.error) as error:
                log.warning("the shipped kernel %s is damaged and is compiled: %s", name, error)
    return None


def _entry(source: str, arch: str, made_by: Compiler) -> Entry:
    return Entry((source, headers(), arch, *made_by.identity), ".cubin")


def find(source: str, arch: str, made_by: Compiler | None) -> bytes | None:
    """The binary of a text if there is one, of this compiler where it is not shipped."""
    found = shipped(source, arch)
    return _entry(source, arch, made_by).read() if found is None and made_by else found


def make(source: str, arch: str, made_by: Compiler, fresh: bool = False) -> bytes:
    """The binary of a text, compiled and kept on disk unless it was; with `fresh`, what was kept is replaced.

    Raises
    ------
    CompileError
    """

    def build() -> bytes:
        log.debug("compiling for %s: %s", arch, source[: source.index("#line")].replace("\n", " "))
        return made_by.compile(source, arch)

    return _entry(source, arch, made_by).get(build, fresh)
