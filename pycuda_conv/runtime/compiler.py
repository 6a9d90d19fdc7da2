"""Compilers of CUDA C: nvcc of the CUDA toolkit, and NVRTC, a library that needs no toolkit."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from pycuda_conv.errors import BackendError
from pycuda_conv.runtime.base import KERNEL_DIR
from pycuda_conv.runtime.cache import file_identity


class CompileError(BackendError):
    """A compiler that failed, or there is none; the text says what it said."""


class Compiler(ABC):
    """What makes machine code of CUDA C.

    Attributes
    ----------
    name : {"nvcc", "nvrtc"}
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
        """What tells its machine code from that of another version, or of other options."""
        return (self.name, *self.options, file_identity(self.path))

    @abstractmethod
    def compile(self, source: str, arch: str) -> bytes:
        """The cubin of `source` for a target like ``"sm_90a"``.

        Raises
        ------
        CompileError
        """


class Nvcc(Compiler):
    """The compiler of the CUDA toolkit."""

    name = "nvcc"
    options = ("-cubin", "-O3", "-std=c++17", "-w")

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    def identity(self) -> tuple[str, ...]:
        return (*super().identity, _version_behind(self.path))

    def compile(self, source: str, arch: str) -> bytes:
        try:
            with tempfile.TemporaryDirectory(prefix="pycuda_conv-") as folder:
                text, cubin = Path(folder, "kernel.cu"), Path(folder, "kernel.cubin")
                text.write_text(source)
                command = [self.path, *self.options, f"-arch={arch}", f"-I{KERNEL_DIR}", "-o", str(cubin), str(text)]
                done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise CompileError(f"nvcc failed ({done.returncode}): {done.stderr.strip() or done.stdout.strip()}")
                return cubin.read_bytes()
        except OSError as error:
            raise CompileError(f"nvcc could not be run: {error}") from error


class Nvrtc(Compiler):
    """NVIDIA's compiler as a library, of the package ``nvidia-cuda-nvrtc`` or of a toolkit."""

    name = "nvrtc"
    options = ("-std=c++17", "-default-device", "-w")  # lambdas count as functions of the host otherwise

    def __init__(self, path: str) -> None:
        self.path = path
        for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")):  # it does not always find them beside itself
            with suppress(OSError):
                ctypes.CDLL(str(builtins))
        try:
            self._library: Any = ctypes.CDLL(path)
        except OSError as error:
            raise CompileError(f"NVRTC could not be loaded: {error}") from error

    @property
    def version(self) -> str:
        """As ``"13.0"``."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return f"{major.value}.{minor.value}"

    def compile(self, source: str, arch: str) -> bytes:
        library, program = self._library, ctypes.c_void_p()
        self._check(library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None))
        try:
            options = [option.encode() for option in (*self.options, f"-arch={arch}", f"-I{KERNEL_DIR}")]
            code = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
            if code:
                said = self._get(program, "ProgramLog").rstrip(b"\0\n").decode(errors="replace")
                raise CompileError(f"NVRTC failed ({code}): {said}")
            return self._get(program, "CUBIN")
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _get(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        data = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, data))
        return data.raw

    def _check(self, code: int) -> None:
        if code:
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise CompileError(f"NVRTC failed: {self._library.nvrtcGetErrorString(code).decode()}")


def _roots() -> list[str]:
    """Where a CUDA toolkit may lie."""
    return [root for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda") if root]


@cache
def _version_behind(path: str) -> str:
    """The version of a program that a script starts: the script stays the same when a newer one is installed behind it."""
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
def nvrtc() -> str | None:
    """Path of NVRTC's library, or None: that of a Python package before a toolkit's."""
    return next((str(path) for folder in _nvrtc_folders() for path in sorted(folder.glob("libnvrtc.so.*[0-9]"), reverse=True)), None)


def _nvrtc_folders() -> Iterator[Path]:
    for package in ("nvidia.cu13", "nvidia.cuda_nvrtc"):  # as CUDA 13 and CUDA 12 name them
        with suppress(ImportError):
            spec = importlib.util.find_spec(package)
            for place in (spec.submodule_search_locations or ()) if spec else ():
                yield Path(place, "lib")
    for root in _roots():
        yield Path(root, "lib64")


@cache
def compiler() -> Compiler:
    """The compiler to use: ``PYCUDA_CONV_COMPILER``, or the first of nvcc and NVRTC that is there.

    Raises
    ------
    CompileError
        There is none.
    """
    wanted = os.environ.get("PYCUDA_CONV_COMPILER")
    ways = {"nvcc": (nvcc, Nvcc), "nvrtc": (nvrtc, Nvrtc)}
    if wanted and wanted not in ways:
        raise BackendError(f"PYCUDA_CONV_COMPILER must be one of {tuple(ways)}, got {wanted!r}")
    for name in (wanted,) if wanted else ways:
        find, make = ways[name]
        path = find()
        if path:
            return make(path)
    missing = f"{wanted}, which PYCUDA_CONV_COMPILER asks for," if wanted else "a compiler of CUDA C"
    raise CompileError(
        f"{missing} was not found: pip install nvidia-cuda-nvrtc, or install the CUDA toolkit and set CUDA_HOME if nvcc is not on the PATH"
    )
