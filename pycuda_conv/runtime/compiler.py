"""Compilers of CUDA C: NVRTC, a library that needs no toolkit, and nvcc of the CUDA toolkit, by itself or by PyCUDA."""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from pycuda_conv.errors import BackendError, did_you_mean
from pycuda_conv.runtime.base import KERNEL_DIR
from pycuda_conv.runtime.cache import file_identity
from pycuda_conv.runtime.plain import plain


class CompileError(BackendError):
    """A compiler failed, or there is none; the message has the compiler's text."""


class Compiler(ABC):
    """A compiler of CUDA C to machine code.

    Attributes
    ----------
    name : {"nvcc", "nvrtc", "pycuda"}
    path : str
        The program or the library.
    options : tuple of str
        Passed with every text.
    """

    name: str
    path: str
    options: tuple[str, ...]

    @property
    def identity(self) -> tuple[str, ...]:
        """Strings that distinguish this compiler's machine code from that of another version, or of other options."""
        return (self.name, *self.options, file_identity(self.path))

    def __init__(self, path: str) -> None:
        self.path = path

    @abstractmethod
    def compile(self, source: str, arch: str) -> bytes:
        """The cubin of `source` for a target like ``"sm_90a"``.

        Raises
        ------
        CompileError
        """

    @property
    @abstractmethod
    def version(self) -> str:
        """The version in the compiler's own words."""

    def _run(self, *command: str, text: str = "") -> bytes:
        """The output of a command. It is killed if this process ends earlier."""
        try:
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
                _running.add(process)
                try:
                    out, said = process.communicate(text.encode())
                finally:
                    _running.discard(process)
        except OSError as error:
            raise CompileError(f"{self.name} could not be run: {error}") from error
        if process.returncode:
            raise CompileError(f"{self.name} failed ({process.returncode}): {(said or out).decode(errors='replace').strip()}")
        return out


#: Compilers that run now.
_running: set[subprocess.Popen[bytes]] = set()


@atexit.register
def _kill_running() -> None:
    for process in list(_running):
        with suppress(OSError):
            process.kill()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)  # those compilers are the parent's


class Nvcc(Compiler):
    """The compiler of the CUDA toolkit."""

    name = "nvcc"
    options: tuple[str, ...] = ("-cubin", "-O3", "-std=c++17", "-w")

    @property
    def identity(self) -> tuple[str, ...]:
        return (*super().identity, _version_behind(self.path))

    def compile(self, source: str, arch: str) -> bytes:
        try:
            with tempfile.TemporaryDirectory(prefix="pycuda_conv-", ignore_cleanup_errors=True) as folder:
                text, cubin = Path(folder, "kernel.cu"), Path(folder, "kernel.cubin")
                text.write_text(source)
                self._run(self.path, *self.options, f"-arch={arch}", f"-I{KERNEL_DIR}", "-o", str(cubin), str(text))
                return cubin.read_bytes()
        except OSError as error:
            raise CompileError(f"nvcc could not be run: {error}") from error

    @property
    def version(self) -> str:
        found = re.search(r"\bV(\d+\.\d+\.\d+)", self._run(self.path, "--version").decode(errors="replace"))
        return found.group(1) if found else "?"


class PyCuda(Nvcc):
    """nvcc as PyCUDA calls it: by the function that makes its ``SourceModule``, with the options in ``PYCUDA_DEFAULT_NVCC_FLAGS``."""

    name = "pycuda"
    options = ("-O3", "-std=c++17", "-w")

    def __init__(self, path: str) -> None:
        super().__init__(path)
        try:
            self._pycuda, self._driver = (importlib.import_module(f"pycuda.{name}") for name in ("compiler", "driver"))
        except ImportError as error:
            raise CompileError(f"PyCUDA, which PYCUDA_CONV_COMPILER asks for, is not importable: {error}") from error
        self._options = [*self.options, *self._pycuda.DEFAULT_NVCC_FLAGS]

    @property
    def identity(self) -> tuple[str, ...]:
        return (*super().identity, *self._options, importlib.import_module("pycuda").VERSION_TEXT)

    def compile(self, source: str, arch: str) -> bytes:
        try:  # our own cache keeps what was compiled; PyCUDA's is not safe where processes share it
            made: bytes = self._pycuda.compile(
                plain(source), self.path, [*self._options], arch=arch, cache_dir=False, include_dirs=[str(KERNEL_DIR)]
            )
        except (self._driver.CompileError, OSError) as error:
            raise CompileError(f"PyCUDA could not compile: {error}") from error
        return made


class Nvrtc(Compiler):
    """NVIDIA's compiler as a library, from the package ``nvidia-cuda-nvrtc`` or a toolkit. It runs in a process of its own."""

    name = "nvrtc"
    options = ("-std=c++17", "-default-device", "-w")  # lambdas count as functions of the host otherwise

    def compile(self, source: str, arch: str) -> bytes:
        return self._started(*self.options, f"-arch={arch}", f"-I{KERNEL_DIR}", text=source)

    @property
    def version(self) -> str:
        return self._started("--version").decode().strip()

    def _started(self, *options: str, text: str = "") -> bytes:
        return self._run(sys.executable, "-I", "-S", str(Path(__file__).with_name("nvrtc.py")), self.path, *options, text=text)


def _roots() -> list[str]:
    """The folders where a CUDA toolkit may lie."""
    return [root for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda") if root]


@cache
def _version_behind(path: str) -> str:
    """The version of a program that a script starts; the script stays the same when a newer program is installed."""
    try:
        with open(path, "rb") as file:
            if file.read(4) == b"\x7fELF":
                return ""
        return subprocess.run([path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False).stdout
    except OSError:  # compiling will say so
        return ""


@cache
def nvcc() -> str | None:
    """Path of nvcc, or None."""
    found = shutil.which("nvcc")
    for root in _roots():
        found = found or shutil.which("nvcc", path=os.path.join(root, "bin"))
    return found


@cache
def nvrtc(newest: int | None = None) -> str | None:
    """Path of NVRTC's library, or None. A Python package's comes before a toolkit's, and none is newer than CUDA `newest`."""
    for folder in _nvrtc_folders():
        for path in sorted(folder.glob("libnvrtc.so.*"), reverse=True):
            major = path.name.split(".")[2]
            if major.isdecimal() and (newest is None or int(major) <= newest):
                return str(path)
    return None


def _nvrtc_folders() -> Iterator[Path]:
    for package in ("nvidia.cu13", "nvidia.cuda_nvrtc"):  # as CUDA 13 and CUDA 12 name them
        with suppress(ImportError):
            spec = importlib.util.find_spec(package)
            for place in (spec.submodule_search_locations or ()) if spec else ():
                yield Path(place, "lib")
    for root in _roots():
        yield Path(root, "lib64")


@cache
def compiler(newest: int | None = None) -> Compiler:
    """The compiler to use: that of ``PYCUDA_CONV_COMPILER``, or the first of NVRTC and nvcc that exists.

    NVRTC takes a third of nvcc's time for one kernel. Its kernels are as fast: on an H200, 99 problems of the benchmark took
    1.001 times nvcc's time in the mean, 1.035 at the most, and had the same bits.

    Parameters
    ----------
    newest : int, optional
        The version of CUDA that the driver supports: machine code of a newer library could not be loaded.

    Raises
    ------
    CompileError
        There is none.
    """
    wanted = os.environ.get("PYCUDA_CONV_COMPILER")
    known = "nvrtc", "nvcc", "pycuda"
    if wanted and wanted not in known:
        hint = did_you_mean(wanted, known)
        raise BackendError(f"PYCUDA_CONV_COMPILER must be 'nvrtc', 'nvcc' or 'pycuda', got {wanted!r}{hint}")
    library = nvrtc(newest) if wanted in (None, "", "nvrtc") else None
    if library:
        return Nvrtc(library)
    program = nvcc() if wanted != "nvrtc" else None
    if program:
        return PyCuda(program) if wanted == "pycuda" else Nvcc(program)
    missing = f"{'nvcc' if wanted == 'pycuda' else wanted}, which PYCUDA_CONV_COMPILER asks for," if wanted else "a compiler of CUDA C"
    raise CompileError(
        f"{missing} was not found: pip install nvidia-cuda-nvrtc, or install the CUDA toolkit and set CUDA_HOME if nvcc is not on the PATH"
    )
