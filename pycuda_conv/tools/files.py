"""What every kind of file has in common: the arguments of ``pycuda-conv run``, arrays and filters in .npy files, places, progress."""

from __future__ import annotations

import difflib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from pycuda_conv.errors import ConvArgumentError
from pycuda_conv.tools.terminal import ToolError, console, require
from pycuda_conv.typing import Algorithm, Precision

#: The named filters of pictures.
FILTERS = {
    "sharpen": np.array([[0, -1, 0], [-1, 5, -1], [0, -1, 0]]),
    "blur": np.outer([1, 4, 6, 4, 1], [1, 4, 6, 4, 1]) / 256,  # a Gaussian, by binomial coefficients
    "edge": np.array([[-1, -1, -1], [-1, 8, -1], [-1, -1, -1]]),  # the Laplace operator; negative values are clipped
    "emboss": np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]),
    "identity": np.array([[0, 0, 0], [0, 1, 0], [0, 0, 0]]),
}
#: The dtypes, besides integers, that can be convolved and stored in a .npy file. bfloat16 comes back as two bytes without a meaning.
FILE_DTYPES = ("float16", "float32", "float64")


@dataclass(frozen=True)
class Settings:
    """The command's arguments; None for one that was not given."""

    filter: str
    #: a path, or an address that fsspec opens
    input: Any
    output: Any
    bias: Path | None = None
    stride: Any = None
    padding: Any = None
    dilation: Any = None
    groups: int | None = None
    transposed: bool = False
    output_padding: Any = None
    activation: Any = None
    precision: Precision = "fp32"
    algorithm: Algorithm | None = None
    device: Any = None
    devices: Any = None
    batch: int | None = None
    force: bool = False
    axes: str | None = None
    scheduler: str | None = None
    resume: bool = False
    #: what lies outside, in the words of `padding_mode`
    border: str | None = None
    #: the result's type
    dtype: str | None = None

    @property
    def where(self) -> dict[str, Any]:
        """The keyword arguments for the other options, and for where and how to compute."""
        place = {"device": self.device} if self.devices is None else {"devices": self.devices}
        return {"activation": self.activation, "precision": self.precision, "algorithm": self.algorithm, **place}


def named_number(name: str) -> tuple[str, float | int] | None:
    """The name and the number of a filter such as ``gaussian:1.5`` or ``box:5``; None for another filter."""
    word, colon, text = name.partition(":")
    if not colon or word not in ("gaussian", "box"):
        return None
    try:
        number: float | int = float(text) if word == "gaussian" else int(text)
    except ValueError:
        number = -1
    if not 0 < number < 1e4:
        raise ToolError(f"--filter must be gaussian:SIGMA or box:SIZE, with a number above 0 and below 10,000, got {name!r}")
    return word, number


def file_exists(place: Path | str) -> bool:
    """Whether there is anything at a path, or at an address that fsspec opens."""
    if "://" not in str(place):
        return os.path.lexists(place)
    files, path = filesystem(str(place))
    try:
        return bool(files.exists(path))
    except Exception as error:  # a store may raise anything
        raise ToolError(f"{place} can't be reached: {error}") from error


@lru_cache(maxsize=32)
def filesystem(place: str) -> tuple[Any, str]:
    """fsspec's file system of `place`, and its path there."""
    try:
        files, path = require("fsspec.core").url_to_fs(place)
    except (ImportError, ValueError) as error:  # fsspec does not know the protocol, or lacks a package for it
        raise ToolError(f"{place} can't be opened: {error}") from error
    return files, path


def read_array(path: Path) -> np.ndarray:
    """The array in a .npy file, memory-mapped."""
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except OSError as error:
        raise ToolError(f"{path} can't be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ToolError(f"{path} is not a whole .npy file of numbers: {error}") from error


@contextmanager
def refusals() -> Iterator[None]:
    """Turn what the library refuses into the one line that the user sees."""
    try:
        yield
    except (ConvArgumentError, TypeError) as error:
        raise ToolError(str(error)) from error


def filter_file(name: str) -> np.ndarray:
    """The filter in a .npy file, in memory."""
    if not name.lower().endswith(".npy"):
        near = difflib.get_close_matches(name, FILTERS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        names = ", ".join(FILTERS)
        raise ToolError(f"--filter must be a .npy file or, for pictures, one of {names}, gaussian:SIGMA, box:SIZE, got {name!r}{hint}")
    return np.array(read_array(Path(name)))


def common_dtype(settings: Settings, x: Any, weight: np.ndarray, bias: np.ndarray | None) -> str:
    """The dtype to compute in: that of the files with floats, or else one that holds the input's integers."""
    named = zip((settings.input, settings.filter, settings.bias), (x, weight, bias), strict=True)
    given = [(path, array.dtype) for path, array in named if array is not None]
    for path, dtype in given:
        if dtype.name not in FILE_DTYPES and dtype.kind not in "biu":
            raise ToolError(f"{path} holds {dtype.name}; integers, {', '.join(FILE_DTYPES)} can be convolved")
    floats = [(path, dtype.name) for path, dtype in given if dtype.kind == "f"]
    for path, name in floats:
        if name != floats[0][1]:
            raise ToolError(f"{path} holds {name}, but {floats[0][0]} {floats[0][1]}; all files of floats must have the same type")
    wide = x.dtype.kind in "iu" and x.dtype.itemsize > 2  # float32 would lose digits of them
    return "float64" if wide else floats[0][1] if floats else "float32"


def exactly(name: Any, array: np.ndarray, dtype: str) -> np.ndarray:
    """A filter or a bias in `dtype`; integers that it can't hold are refused."""
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    if array.dtype.kind in "biu" and not np.array_equal(converted.astype(object), array.astype(object)):
        raise ToolError(f"{name} holds integers that {dtype} can't hold exactly; save it as {dtype}")
    return converted


def pairs(padding: Any, rank: int) -> Any:
    """`padding` as the functions take it; if it has twice as many values as axes, these are pairs (before, after)."""
    if padding is None:
        return 0
    if isinstance(padding, tuple) and len(padding) == 2 * rank:
        return tuple((padding[2 * i], padding[2 * i + 1]) for i in range(rank))
    return padding


def reserve(path: Path) -> None:
    """Reserve the blocks of a file that will be mapped."""
    handle = os.open(path, os.O_RDWR)
    try:
        os.posix_fallocate(handle, 0, os.fstat(handle).st_size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # some file systems can't reserve
            raise
    finally:
        os.close(handle)


#: The bar by files: a function that advances it by a part of a file; None where there is no such bar.
_by_files: Callable[[float], Any] | None = None


@contextmanager
def progress_by_files(count: int) -> Iterator[Callable[[str], Any]]:
    """A progress bar by files on stderr, if that is a terminal. Gives a function to call with the name of each file as it begins."""
    global _by_files
    if not sys.stderr.isatty():
        yield lambda name: None
        return
    progress = require("rich.progress")
    columns = (
        progress.TextColumn("{task.fields[file]} of {task.total:.0f} files"), progress.BarColumn(), progress.TimeRemainingColumn(),
        progress.TextColumn("{task.description}"),
    )
    begun = 0
    with progress.Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=count, file=0)

        def begin(name: str) -> None:
            nonlocal begun
            bar.update(task, description=require("rich.markup").escape(name), completed=begun, file=begun + 1)
            begun += 1

        _by_files = lambda part: bar.advance(task, part)  # noqa: E731
        try:
            yield begin
        finally:
            _by_files = None


@contextmanager
def progress(name: str, nbytes: int) -> Iterator[Callable[[int], Any]]:
    """A progress bar on stderr, if that is a terminal. Gives a function that advances it by a number of bytes, or the bar by files."""
    by_files = _by_files
    if by_files is not None:
        yield lambda part: by_files(part / max(nbytes, 1))
        return
    if not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    progress = require("rich.progress")
    columns = (
        progress.TextColumn("{task.description}"), progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(require("rich.markup").escape(name), total=nbytes)
        yield lambda nbytes: bar.advance(task, nbytes)
