"""Convolve files stored in chunks: zarr, OME-Zarr, TIFF with several pages, and .npy files together with those.

The files become a dask array, which is convolved (:mod:`pycuda_conv.dask`). One task for each chunk of the result writes it. The tasks run
on threads of this process or on a cluster. The output has a temporary name until it is complete, except in stores that are no folder of
this machine. With ``--resume`` an empty file beside the output records each complete chunk; the others are computed.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime import default_backend, device_count
from pycuda_conv.tools.run import (
    FILTERS,
    Settings,
    common_dtype,
    exactly,
    file_exists,
    filesystem,
    filter_file,
    pairs,
    progress,
    read_array,
    refusals,
    reserve,
)
from pycuda_conv.tools.terminal import ToolError, named_device, require

#: Bytes of input or result of a task, whichever is larger, unless the stored chunks are larger.
WORK_BYTES = 64 << 20
#: Axes that can be convolved. All others count as images, except the channels, c.
SPACE = "zyx"
TIFF = (".tif", ".tiff")
#: Seconds that a scheduler may take to answer.
CONNECT_SECONDS = 10
#: The end of the name of the folder of records.
RECORDS = ".done"
#: The file beside the records with the arguments of the run.
RUN = "run.json"


def is_url(place: Any) -> bool:
    """Whether `place` is in a store that fsspec opens."""
    return "://" in str(place)


def kind_of(place: Any) -> str:
    """The kind of file at `place`, by its name: ``"npy"``, ``"tiff"`` or ``"zarr"``."""
    name = str(place).lower().rstrip("/")
    return "npy" if name.endswith(".npy") else "tiff" if name.endswith(TIFF) else "zarr"


# ---- reading


@dataclass(frozen=True)
class Source:
    """An array on disk."""

    place: str
    kind: str
    shape: tuple[int, ...]
    dtype: Any
    #: sizes of the stored chunks
    chunks: tuple[int, ...]
    #: a letter for each axis, or None
    axes: str | None
    #: the array's name in a group of arrays
    name: str = ""
    zarr_format: int = 3
    #: OME's description of the group, as it is stored
    ome: Any = None
    #: how many series of pages the file has; this is the first
    series: int = 1

    def chunk_name(self, index: tuple[int, ...]) -> str:
        """The name of a stored chunk in messages."""
        if self.kind == "zarr":
            return str(_opened(self).metadata.encode_chunk_key(index))
        return f"at {', '.join(str(i * n) for i, n in zip(index, self.chunks, strict=True))}"


@lru_cache(maxsize=32)
def _opened(array: Source | Target, write: bool = False) -> Any:
    """The array, opened once in each process."""
    mode = "r+" if write else "r"
    if array.kind == "npy":
        return np.lib.format.open_memmap(array.place, mode=mode)
    if array.kind == "tiff":
        tifffile = require("tifffile")
        if write:
            return tifffile.memmap(array.place, mode=mode).reshape(array.shape)
        return require("zarr").open_array(tifffile.imread(array.place, aszarr=True, series=0, level=0), mode="r")
    return require("zarr").open_array(array.place, path=array.name or None, mode=mode)


def read(place: str, axes: str | None) -> Source:
    """The array at `place`; `axes` are its letters if the user gave them."""
    kind = kind_of(place)
    if is_url(place):
        filesystem(place)  # or an error that says which package is missing
        if kind != "zarr":
            raise ToolError(f"{place} can't be read: at addresses only zarr can")
    if kind == "zarr" and Path(place).is_file():
        raise ToolError(
            f"{place} can't be read: it is no zarr, no TIFF and no .npy file; pictures become pictures, without "
            "--axes, --resume and --scheduler"
        )
    try:
        source = {"npy": _read_npy, "tiff": _read_tiff, "zarr": _read_zarr}[kind](place)
    except ToolError:
        raise
    except Exception as error:  # zarr, tifffile or a store may raise anything
        raise ToolError(f"{place} can't be read: {getattr(error, 'strerror', None) or error}") from error
    found = source.axes if axes is None else axes
    if found is not None and (len(found) != len(source.shape) or len(set(found)) < len(found)):
        raise ToolError(f"--axes must have a letter of its own for each axis of {place}, whose shape is {source.shape}, got {found!r}")
    return replace(source, axes=found)


def _read_npy(place: str) -> Source:
    x = np.lib.format.open_memmap(place, mode="r")
    chunks = (*(1 for _ in x.shape[:-1]), *x.shape[-1:])
    return Source(place, "npy", x.shape, x.dtype, chunks, None)


def _read_tiff(place: str) -> Source:
    with require("tifffile").TiffFile(place) as file:
        if not file.series:
            raise ValueError("it has no pages")
        series = file.series[0]
        axes = series.axes.lower()
        if "c" not in axes:
            axes = axes.replace("s", "c")  # the colours of a pixel
        found = Source(place, "tiff", tuple(series.shape), np.dtype(series.dtype), (), axes, series=len(file.series))
    return replace(found, chunks=_opened(found).chunks)


def _read_zarr(place: str) -> Source:
    zarr = require("zarr")
    node = zarr.open(place, mode="r")
    if isinstance(node, zarr.Array):
        names = getattr(node.metadata, "dimension_names", None)
        axes = "".join(names) if names and all(isinstance(n, str) and len(n) == 1 for n in names) else None
        return Source(place, "zarr", node.shape, node.dtype, node.chunks, axes, zarr_format=node.metadata.zarr_format)
    attributes = dict(node.attrs)
    scales = attributes.get("ome", attributes).get("multiscales")
    if not scales:
        names = ", ".join(sorted(node.keys()))
        raise ValueError(f"it is a group ({names}) without OME's multiscales; name an array in it, as {place}/NAME")
    name = scales[0]["datasets"][0]["path"]
    array = node[name]
    described = scales[0].get("axes") or list("tczyx")[-array.ndim :]
    axes = "".join((axis["name"] if isinstance(axis, dict) else axis)[0].lower() for axis in described)
    ome = json.dumps(attributes)
    return Source(place, "zarr", array.shape, array.dtype, array.chunks, axes, name, node.metadata.zarr_format, ome)


@dataclass(frozen=True)
class _Load:
    """The function of a task, which reads a part of a source."""

    source: Source

    def __call__(self, where: tuple[slice, ...]) -> np.ndarray:
        try:
            return np.asarray(_opened(self.source)[where])
        except Exception as error:
            raise ToolError(f"{self.source.place}: {self._broken(where)} can't be read: {error}") from error

    def _broken(self, where: tuple[slice, ...]) -> str:
        """The name of the first stored chunk in that part that can't be read."""
        chunks = self.source.chunks
        grid = [range(part.start // n, -(-part.stop // n)) for part, n in zip(where, chunks, strict=True)]
        for index in product(*grid):
            try:
                _opened(self.source)[tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, chunks, strict=True))]
            except Exception:
                return f"chunk {self.source.chunk_name(index)}"
        return "one of its chunks"  # now it can be read


# ---- writing


@dataclass(frozen=True)
class Target:
    """The array to write."""

    #: the place to write to, and its name in messages
    place: str
    shown: str
    kind: str
    shape: tuple[int, ...]
    dtype: Any
    chunks: tuple[int, ...]
    axes: str | None
    name: str = ""
    zarr_format: int = 3
    ome: Any = None

    def create(self) -> None:
        """Make the file, with its blocks reserved, or the store."""
        if self.kind == "zarr":
            self._create_zarr()
            return
        if self.kind == "npy":
            np.lib.format.open_memmap(self.place, mode="w+", dtype=self.dtype, shape=self.shape)
        else:
            metadata = {"axes": self.axes.upper()} if self.axes else {}  # with {} the shape is recorded
            require("tifffile").memmap(self.place, shape=self.shape, dtype=self.dtype, photometric="minisblack", metadata=metadata)
        reserve(Path(self.place))

    def _create_zarr(self) -> None:
        zarr = require("zarr")
        more = {"dimension_names": tuple(self.axes)} if self.axes and self.zarr_format == 3 else {}
        options = {"shape": self.shape, "chunks": self.chunks, "dtype": self.dtype, **more}
        if self.ome is None:
            zarr.create_array(self.place, zarr_format=self.zarr_format, **options)
        else:
            group = zarr.create_group(self.place, zarr_format=self.zarr_format, attributes=json.loads(self.ome))
            if self.zarr_format == 2:
                options["chunk_key_encoding"] = {"name": "v2", "separator": "/"}
            group.create_array(self.name, **options)


@dataclass(frozen=True)
class _Store:
    """The function of a task, which writes a chunk of the result and then its record."""

    target: Target
    records: str | None

    def __call__(self, block: np.ndarray, where: tuple[slice, ...], index: tuple[int, ...]) -> int:
        try:
            _opened(self.target, write=True)[where] = block
            if self.records is not None:
                files, folder = filesystem(self.records)
                files.pipe_file(f"{folder}/{_record(index)}", b"")
        except Exception as error:  # an OSError, or anything that a store raises
            raise ToolError(f"{self.target.shown} can't be written: {getattr(error, 'strerror', None) or error}") from error
        return int(block.nbytes)


def _record(index: Sequence[int]) -> str:
    return ".".join(map(str, index))


def _remove(place: str) -> None:
    """Remove a file or everything below a folder, if it is there."""
    files, path = filesystem(place)
    with suppress(FileNotFoundError):
        files.rm(path, recursive=True)


def _remove_unfinished(place: str) -> None:
    """Remove what a failed run wrote. zarr writes the chunks of a block side by side, and may not have written all of them yet."""
    with suppress(ToolError):  # the store may be gone
        for seconds in (0.05, 0.1, 0.2, 0.4, 0.8):
            with suppress(OSError):
                _remove(place)
            time.sleep(seconds)
            if not file_exists(place):
                return


def _check_output(settings: Settings, sources: Sequence[Any]) -> str:
    """The place to write to, behind any links; refused where something would be lost."""
    output = str(settings.output)
    for source in sources:
        if source is not None and _overlap(output, str(source)):
            raise ToolError(f"{output} can't be written: it is the file {source}, which is read")
    if is_url(output):
        if kind_of(output) != "zarr":
            raise ToolError(f"{output} can't be written: at addresses only zarr can")
        if file_exists(output) and not (settings.resume and is_interrupted(output)):
            if not settings.force:
                raise ToolError(f"{output} exists already; --force replaces it")
            if not _is_zarr(*filesystem(output)):
                raise ToolError(f"{output} can't be written: what is there is no zarr")
        return output
    real = Path(output).resolve()
    if not real.parent.is_dir():
        raise ToolError(f"{output} can't be written: {real.parent} is not a folder")
    if real.exists():
        if not settings.force:
            raise ToolError(f"{output} exists already; --force replaces it")
        if real.is_dir() != (kind_of(output) == "zarr") or (real.is_dir() and not _is_zarr(*filesystem(str(real)))):
            raise ToolError(f"{output} can't be written: what is there is no {kind_of(output)}")
    return str(real)


def _overlap(output: str, source: str) -> bool:
    """Whether one of two places is the other, or lies in it."""
    if is_url(output) != is_url(source) or not (is_url(source) or Path(source).exists()):
        return False
    if not is_url(source):
        one, other = str(Path(output).resolve()), str(Path(source).resolve())
    else:
        (files, one), (others, other) = filesystem(output), filesystem(source)
        if files is not others and (files.protocol != others.protocol or files.storage_options != others.storage_options):
            return False
    one, other = one.rstrip("/") + "/", other.rstrip("/") + "/"
    return one.startswith(other) or other.startswith(one)


def _is_zarr(files: Any, folder: str) -> bool:
    """Whether `folder` holds a zarr, or nothing."""
    names = {name.rstrip("/").rpartition("/")[2] for name in files.ls(folder, detail=False)}
    return not names or not names.isdisjoint(("zarr.json", ".zarray", ".zgroup"))


def _records(place: str) -> str:
    """The folder of records of a run that writes to `place`."""
    folder, _, name = place.rstrip("/").rpartition("/")
    return f"{folder}/.{name}{RECORDS}"


def is_interrupted(output: Any) -> bool:
    """Whether a run with --resume began to write to `output` and is incomplete."""
    place = str(output) if is_url(output) else str(Path(output).resolve())
    return file_exists(f"{_records(place)}/{RUN}")


@contextmanager
def _writing(settings: Settings, target: Target, work: dict[str, Any]) -> Iterator[tuple[Target, str | None, set[str]]]:
    """The target under the name that it has until it is complete, the folder of records, and the records in it.

    When the block fails, its output is removed, unless it can be resumed.
    """
    final = target.place
    folder, name = os.path.split(final)
    remote, resumed = is_url(final), settings.resume
    hidden = f".{name}.part" if resumed else f".pycuda_conv-{secrets.token_hex(6)}.part"
    place = final if remote else os.path.join(folder, hidden)
    records = _records(final) if resumed else None
    made, whole = replace(target, place=place), False
    try:
        done = _done(settings, place, records, work)
        if done is None:
            if remote:
                _remove(final)
            made.create()
            done = set()
            if records is not None:
                files, path = filesystem(records)
                files.makedirs(path, exist_ok=True)
                files.pipe_file(f"{path}/{RUN}", json.dumps(work).encode())
        yield made, records, done
        if not remote:
            if Path(final).is_dir():
                shutil.rmtree(final)
            elif Path(final).exists():
                shutil.copymode(final, place)
            os.replace(place, final)
        if records is not None:
            _remove(records)
        whole = True
    except OSError as error:
        raise ToolError(f"{settings.output} can't be written: {error.strerror or error}") from error
    finally:
        _opened.cache_clear()
        if not whole and not resumed:
            _remove_unfinished(place)


def _done(settings: Settings, place: str, records: str | None, work: dict[str, Any]) -> set[str] | None:
    """The records of an earlier run with the same arguments; None if this run begins anew."""
    if records is None:
        return None
    files, path = filesystem(records)
    try:
        before = json.loads(files.cat_file(f"{path}/{RUN}"))
    except (FileNotFoundError, ValueError):
        before = None
    if before is None or settings.force:
        _remove(records)
        _remove(place)
        return None
    if before != json.loads(json.dumps(work)):
        different = ", ".join(key for key in work if before.get(key) != json.loads(json.dumps(work[key])))
        raise ToolError(f"the run of {settings.output} that was interrupted had other arguments ({different}); --force begins anew")
    return {name.rpartition("/")[2] for name in files.ls(path, detail=False)} - {RUN}


# ---- the work


@dataclass(frozen=True)
class Work:
    """The work that the arguments ask for: the result as a dask array with the axes of the input, and its description."""

    result: Any
    problem: ConvProblem
    source: Source
    #: axes of the result, or None
    axes: str | None
    #: sizes of the chunks to store
    chunks: tuple[int, ...]
    #: for each axis of space, the distance of neighbouring pixels and the place of the first one, in pixels of the input
    places: dict[str, tuple[float, float]]


def volume_filter(name: str) -> np.ndarray:
    """The filter of that name in three dimensions."""
    one, bell = np.ones((3, 3, 3)), np.array([1, 4, 6, 4, 1]) / 16
    faces, middle = np.zeros((3, 3, 3)), np.zeros((3, 3, 3))
    middle[1, 1, 1] = 1
    faces[1, 1, ::2] = faces[1, ::2, 1] = faces[::2, 1, 1] = 1
    made = {
        "sharpen": 7 * middle - faces, "blur": np.einsum("i,j,k->ijk", bell, bell, bell), "edge": 27 * middle - one, "identity": middle,
    }
    if name not in made:
        raise ToolError(f"the filter {name!r} has two dimensions only; an axis called z makes three: give it another letter by --axes")
    return made[name]


def plan_work(settings: Settings, source: Source) -> Work:
    """The graph of the result, before anything is written."""
    weight, bias = _filters(settings, source)
    axes = source.axes
    alone = axes is not None and weight.ndim < 4  # a filter for each channel alone, as for pictures
    if alone and source.dtype.kind in "iu":
        dtype = "float32" if source.dtype.itemsize <= 2 else "float64"
    elif alone and source.dtype.kind == "f":
        dtype = source.dtype.name
    else:
        dtype = common_dtype(settings, source, weight, bias)
    weight = exactly(settings.filter, weight, dtype)
    bias = None if bias is None else exactly(settings.bias, bias, dtype)
    if alone:
        weight = weight[None, None]
    rank = weight.ndim - 2
    if axes is None:
        if len(source.shape) not in (rank + 1, rank + 2):
            raise ToolError(
                f"{source.place} has {len(source.shape)} axes and nothing says what they are; a filter of shape {weight.shape} takes "
                f"{rank + 1} or {rank + 2}: name them, as in --axes tcyx"
            )
        axes = ("n" if len(source.shape) == rank + 2 else "") + "c" + SPACE[-rank:]
    space = SPACE[-rank:]
    if not set(space) <= set(axes):
        raise ToolError(f"a filter of {rank} dimensions goes along the axes {', '.join(space)}, but {source.place} has {', '.join(axes)}")
    return _graph(settings, source, axes, space, weight, bias, dtype, alone)


def _filters(settings: Settings, source: Source) -> tuple[np.ndarray, np.ndarray | None]:
    """The filter, by name or from its file, and the bias."""
    bias = None if settings.bias is None else np.array(read_array(settings.bias))
    if settings.filter not in FILTERS:
        return filter_file(settings.filter), bias
    if source.axes is None:
        raise ToolError(f"the filter {settings.filter!r} needs to know the axes of {source.place}: name them, as in --axes zyx")
    return volume_filter(settings.filter) if "z" in source.axes else FILTERS[settings.filter], bias


def _graph(
    settings: Settings, source: Source, axes: str, space: str, weight: np.ndarray, bias: np.ndarray | None, dtype: str, alone: bool
) -> Work:
    chunked = importlib.import_module("pycuda_conv.dask")
    rank = len(space)
    images = "".join(letter for letter in axes if letter not in space and (alone or letter != "c"))
    channels = "c" if "c" in axes and not alone else ""
    order = images + channels + space
    x = load(source, _chunks(source, axes, order, channels, weight, dtype))
    x = x.transpose([axes.index(letter) for letter in order]).astype(dtype)
    if not channels:
        x = x[(slice(None),) * len(images) + (None,)]
    repeated = alone and settings.padding is None and not settings.transposed
    options = {
        "stride": _or(settings.stride, 1), "padding": "same" if repeated else pairs(settings.padding, rank),
        "dilation": _or(settings.dilation, 1), "groups": _or(settings.groups, 1),
    }
    if repeated:
        options["padding"] = _middle(weight.shape[2:], options["dilation"], rank)
    if settings.transposed:
        options["output_padding"] = _or(settings.output_padding, 0)
    make = ConvProblem.transposed if settings.transposed else ConvProblem.forward
    lead = len(images)
    shape = (math.prod(x.shape[:lead]), *x.shape[lead:]) if lead else x.shape
    with refusals():
        shapes = shape, weight.shape, None if bias is None else bias.shape
        problem = make(
            rank, *shapes, **options, dtype=dtype, precision=settings.precision, activation=settings.activation, in_chunks=True
        )
        y = chunked.graph(problem, x, weight, {"bias": bias}, chunked.ChunkPlace(*_where(settings)), lead, repeated)
    if not channels and y.shape[lead] == 1:
        y = y[(slice(None),) * lead + (0,)]
        found = images + space
    else:
        found = images + "c" + space
    wanted = "".join(letter for letter in axes if letter in found)
    if "c" in found and "c" not in wanted:  # the filter added an axis of channels
        wanted = wanted.replace(space[0], "c" + space[0], 1)
    y = y.transpose([found.index(letter) for letter in wanted])
    if alone and source.dtype.kind in "iu":
        y = y.map_blocks(_rounded, source.dtype, dtype=source.dtype, meta=np.empty((0,) * y.ndim, source.dtype))
    near = dict(zip(axes, source.chunks, strict=True)) if source.kind != "npy" else dict.fromkeys(axes, 128)
    chunks = tuple(_stored(y.chunks[i], near.get(letter, y.shape[i])) for i, letter in enumerate(wanted))
    places = dict(zip(space, [_place(problem, axis) for axis in range(3 - rank, 3)], strict=True))
    return Work(y, problem, source, wanted if source.axes is not None else None, chunks, places)


def _place(problem: ConvProblem, axis: int) -> tuple[float, float]:
    """The distance of neighbouring pixels of the result, and the place of the first, the middle of its window, in pixels of the input."""
    stride, middle = problem.stride[axis], problem.dilation[axis] * (problem.filter_size[axis] - 1) / 2 - problem.padding_before[axis]
    return (1 / stride, -middle / stride) if problem.direction == "dgrad" else (float(stride), middle)


def _rounded(y: np.ndarray, dtype: Any) -> np.ndarray:
    """`y` in an integer type, rounded and clipped."""
    limits = np.iinfo(dtype)
    least, most = y.dtype.type(limits.min), y.dtype.type(limits.max)  # floats lack 2^63 - 1, so `most` is the number above it
    with np.errstate(invalid="ignore"):
        return np.where(y >= most, dtype.type(limits.max), np.clip(np.rint(y), least, most).astype(dtype))


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _middle(size: Sequence[int], dilation: Any, rank: int) -> tuple[tuple[int, int], ...]:
    """The padding that would keep the size at stride 1, as (before, after) for each axis."""
    steps = (dilation,) * rank if isinstance(dilation, int) else tuple(dilation)
    totals = [max(d, 0) * (n - 1) for d, n in zip(steps, size, strict=True)]
    return tuple((total // 2, total - total // 2) for total in totals)


def _where(settings: Settings) -> tuple[Any, Any]:
    """`device` and `devices` of the tasks: all GPUs of this machine unless some were named."""
    if settings.scheduler is None and settings.device is None and settings.devices is None and default_backend() == "cuda":
        return None, "all"
    return settings.device, tuple(settings.devices) if isinstance(settings.devices, list) else settings.devices


def load(source: Source, chunks: tuple[int, ...]) -> Any:
    """The source as a dask array in chunks of that size."""
    da = require("dask.array")
    layers = require("dask.layers")
    sizes = da.core.normalize_chunks(chunks, source.shape)
    axes = tuple(range(len(source.shape)))
    return da.blockwise(
        _Load(source), axes, layers.ArraySliceDep(sizes), axes, align_arrays=False, token="load", dtype=source.dtype,
        meta=np.empty((0,) * len(axes), source.dtype),
    )


def _chunks(source: Source, axes: str, order: str, channels: str, weight: np.ndarray, dtype: str) -> tuple[int, ...]:
    """Sizes of the chunks of a task: multiples of the stored chunks, of about WORK_BYTES, with all channels in each."""
    size = dict(zip(axes, source.shape, strict=True))
    chunk = {letter: max(min(n, size[letter]), 1) for letter, n in zip(axes, source.chunks, strict=True)}
    width = 1
    if channels:
        chunk["c"] = size["c"]
        width = max(1, -(-max(weight.shape[:2]) // max(size["c"], 1)))
    itemsize = np.dtype(dtype).itemsize * width
    space = [letter for letter in order if letter in SPACE[-(weight.ndim - 2) :]]
    while math.prod(chunk.values()) * itemsize * 2 <= WORK_BYTES:
        growing = [letter for letter in reversed(order) if chunk[letter] < size[letter]]
        if not growing:
            break
        shortest = min((letter for letter in growing if letter in space), key=chunk.__getitem__, default=growing[0])
        chunk[shortest] = min(2 * chunk[shortest], size[shortest])
    return tuple(chunk[letter] for letter in axes)


def _stored(chunks: Sequence[int], near: int) -> int:
    """The size of stored chunks along an axis. It divides the tasks' size, so that two tasks never write to the same chunk."""
    if len(chunks) == 1:
        return max(1, min(near, chunks[0]))
    divisors = [n for n in range(1, min(near, chunks[0]) + 1) if chunks[0] % n == 0]
    return divisors[-1] if 2 * divisors[-1] >= near else chunks[0]


# ---- the run


def convolve(settings: Settings) -> str:
    """Convolve one array into another; returns a description of what was done."""
    require("dask.array")
    source_place = str(settings.input) if is_url(settings.input) else str(Path(settings.input).resolve())
    source = read(source_place, settings.axes)
    kind = kind_of(settings.output)
    if kind == "zarr" and not is_url(settings.output) and not str(settings.output).lower().rstrip("/").endswith(".zarr"):
        raise ToolError(f"{settings.output} must end in .zarr, .npy, .tif or .tiff")
    if settings.batch is not None:
        raise ToolError("--batch is for a .npy file that becomes another; here the stored chunks decide what is computed at a time")
    if settings.scheduler is not None and kind != "zarr":
        raise ToolError(f"{settings.output} must be a .zarr: several workers can't write one file")
    if settings.output_padding is not None and not settings.transposed:
        raise ToolError("--output-padding goes with --transposed only")
    output = _check_output(settings, (source_place, settings.bias, settings.filter))
    work = plan_work(settings, source)
    if kind == "tiff" and work.result.ndim < 2:
        raise ToolError(f"{settings.output} can't be written: a TIFF has two axes or more, the result has {work.result.ndim}")
    if settings.devices is None and settings.scheduler is None:
        named_device(settings.device)
    y = work.result
    if kind == "zarr":
        y = y.rechunk(tuple(chunks[0] for chunks in y.chunks))
    target = Target(output, str(settings.output), kind, y.shape, y.dtype, work.chunks, work.axes, zarr_format=source.zarr_format)
    if kind == "zarr" and source.ome is not None:
        target = replace(target, name="0", ome=_described(source, work))
    with _writing(settings, target, _fingerprint(settings, source, y)) as (made, records, done):
        _execute(settings, made, records, done, y, source)
    which = f"the first of {source.series} series of pages, " if source.series > 1 else ""
    return f"{which}{work.problem}, {math.prod(source.shape) * source.dtype.itemsize + y.nbytes:,} bytes read and written"


def _fingerprint(settings: Settings, source: Source, y: Any) -> dict[str, Any]:
    """The values that must be equal in an interrupted run and the run that resumes it."""

    def content(name: Any) -> str:
        return hashlib.sha256(Path(name).read_bytes()).hexdigest() if Path(name).is_file() else str(name)

    return {
        "input": source.place, "shape": source.shape, "dtype": source.dtype.str, "axes": source.axes, "filter": content(settings.filter),
        "bias": None if settings.bias is None else content(settings.bias), "stride": settings.stride, "padding": settings.padding,
        "dilation": settings.dilation, "groups": settings.groups, "transposed": settings.transposed,
        "output_padding": settings.output_padding, "precision": settings.precision, "chunks": y.chunks,
        "activation": settings.activation,
    }


def _described(source: Source, work: Work) -> str:
    """OME's description of the group with the result in it, at one scale."""
    attributes = json.loads(source.ome)
    inner = attributes.get("ome", attributes)
    scales = inner["multiscales"][0]
    axes = work.axes or ""
    before = source.axes or ""
    dataset = {**scales["datasets"][0], "path": "0"}
    scale = {**scales, "datasets": [dataset]}
    for one, places in ((dataset, work.places), (scale, {})):
        if one.get("coordinateTransformations"):
            one["coordinateTransformations"] = _transforms(one["coordinateTransformations"], before, axes, places)
    if scales.get("axes"):
        kept = dict(zip(before, scales["axes"], strict=True))
        scale["axes"] = [kept.get(letter, {"name": letter, "type": "channel"}) for letter in axes]
    inner["multiscales"] = [scale]
    if "c" in axes and work.result.shape[axes.index("c")] != dict(zip(source.axes or "", source.shape, strict=False)).get("c"):
        inner.pop("omero", None)  # they have the names and colours of other channels
    return json.dumps(attributes)


def _transforms(given: list[Any], before: str, axes: str, places: dict[str, tuple[float, float]]) -> list[Any]:
    """OME's scale and translation of the axes `before`, converted to `axes`, whose pixels lie at `places`."""
    made, size, first = [], dict.fromkeys(axes, 1.0), {letter: place for letter, (_, place) in places.items() if place}
    for transform in given:
        kind = transform.get("type")
        values = transform.get(kind) if kind in ("scale", "translation") else None
        if not isinstance(values, list):
            made.append(transform)
            continue
        own = dict(zip(before, values, strict=False))
        if kind == "scale":
            size.update(own)
            numbers = [own.get(letter, 1.0) * places.get(letter, (1, 0))[0] for letter in axes]
        else:
            numbers = [own.get(letter, 0.0) + first.get(letter, 0) * size[letter] for letter in axes]
        made.append({**transform, kind: numbers})
    if first and not any(transform.get("type") == "translation" for transform in given):
        made.append({"type": "translation", "translation": [first.get(letter, 0.0) * size[letter] for letter in axes]})
    return made


def _execute(settings: Settings, target: Target, records: str | None, done: set[str], y: Any, source: Source) -> None:
    """Compute and write the chunks of `y` that have no record."""
    da, layers = require("dask.array"), require("dask.layers")
    axes = tuple(range(y.ndim))
    written = da.blockwise(
        _Store(target, records), axes, y, axes, layers.ArraySliceDep(y.chunks), axes, layers.ArrayBlockIdDep(y.chunks), axes,
        align_arrays=False, token="store", dtype=int, meta=np.empty((0,) * y.ndim, int),
    )
    tasks = {index: task for index, task in np.ndenumerate(written.to_delayed()) if _record(index) not in done}
    share = (math.prod(source.shape) * source.dtype.itemsize + y.nbytes) / max(y.nbytes, 1)
    with progress(os.path.basename(str(settings.input).rstrip("/")), int(y.nbytes * share)) as advance:

        def finished(nbytes: int) -> None:
            advance(int(nbytes * share))

        if done:
            everything = y.nbytes
            left = sum(math.prod(y.chunks[i][n] for i, n in enumerate(index)) for index in tasks) * y.dtype.itemsize
            finished(everything - left)
        if settings.scheduler is None:
            _on_threads(settings, list(tasks.values()), finished)
        else:
            _on_cluster(settings.scheduler, list(tasks.values()), finished)


def _on_threads(settings: Settings, tasks: list[Any], finished: Callable[[int], Any]) -> None:
    dask, callbacks = require("dask"), require("dask.callbacks")
    wanted = {task.key for task in tasks}
    gpus = 1
    if settings.devices is not None or (settings.device is None and default_backend() == "cuda"):
        gpus = len(settings.devices) if isinstance(settings.devices, list) else device_count()

    def after(key: Any, result: Any, *_: Any) -> None:
        if key in wanted:
            finished(result)

    # some threads read and write while others convolve; when the pool ends, it waits for those that still write
    pool = ThreadPoolExecutor(min(4 * gpus, max(os.cpu_count() or 1, 2)))
    try:
        with callbacks.Callback(posttask=after):
            dask.compute(*tasks, scheduler="threads", pool=pool, optimize_graph=True)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _on_cluster(address: str, tasks: list[Any], finished: Callable[[int], Any]) -> None:
    distributed = require("distributed")
    for name in [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "distributed"]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # their messages come back as exceptions
    try:
        client = distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ToolError(f"--scheduler {address} can't be reached: {error}") from error
    with client:
        futures = client.compute(tasks)
        try:
            for future in distributed.as_completed(futures, loop=client.loop):
                finished(future.result())
                future.release()  # otherwise the result is computed again if its worker dies later
        except BaseException as error:
            of_a_worker = any(future.status == "error" for future in futures)
            if isinstance(error, (CancelledError, OSError)) and not of_a_worker:
                raise ToolError(f"the scheduler at {address} is gone; a run with --resume goes on from what is complete") from error
            client.cancel(futures)
            _wait_until_idle(client, futures)
            raise


def _wait_until_idle(client: Any, futures: list[Any]) -> None:
    """Wait for tasks that can't be stopped, so that none writes to a file that is removed."""
    keys = {future.key for future in futures}

    def writing(dask_worker: Any) -> bool:
        return any(task.key in keys for task in dask_worker.state.executing)

    until, idle = time.monotonic() + 30, 0
    with suppress(Exception):  # workers that are gone write nothing
        while idle < 3 and time.monotonic() < until:  # a task may begin before its worker hears that it was cancelled
            idle = 0 if any(client.run(writing).values()) else idle + 1
            time.sleep(0.1)
