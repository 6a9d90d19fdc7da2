"""The array that a run writes, under another name until it is complete, and the records with which a run goes on."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from pycuda_conv.tools.files import Settings, file_exists, filesystem, reserve
from pycuda_conv.tools.pictures.tiff import stack_options
from pycuda_conv.tools.terminal import ToolError, require
from pycuda_conv.tools.volumes.source import Source, is_url, kind_of, opened

#: The end of the name of the folder of records.
RECORDS = ".done"
#: The file beside the records with the arguments of the run.
RUN = "run.json"


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
    #: the array on disk that was read, whose attributes, compression and names the result keeps
    like: Source | None = None
    #: whether the result's pixels lie where those of the input do
    same_grid: bool = True

    def create(self) -> None:
        """Make the file, with its blocks reserved, or the store."""
        if self.kind == "zarr":
            self._create_zarr()
            return
        if self.kind == "npy":
            np.lib.format.open_memmap(self.place, mode="w+", dtype=self.dtype, shape=self.shape)
        else:
            options: dict[str, Any] = {"metadata": {"axes": self.axes.upper()} if self.axes else {}}  # with {} the shape is recorded
            said: list[str] = []
            if self.like is not None and self.like.kind == "tiff":
                options, said = stack_options(self.like.place, self.axes, np.dtype(self.dtype), self.same_grid)
            require("tifffile").memmap(self.place, shape=self.shape, dtype=self.dtype, photometric="minisblack", **options)
            for words in said:
                print(f"{self.like.place if self.like else self.shown}: {words}", file=sys.stderr)
        reserve(Path(self.place))

    def _create_zarr(self) -> None:
        zarr = require("zarr")
        more: dict[str, Any] = {"dimension_names": tuple(self.axes)} if self.axes and self.zarr_format == 3 else {}
        if self.like is not None and self.like.kind == "zarr":
            more |= self._as_before()
        options = {"shape": self.shape, "chunks": self.chunks, "dtype": self.dtype, **more}
        if self.ome is None:
            zarr.create_array(self.place, zarr_format=self.zarr_format, **options)
        else:
            group = zarr.create_group(self.place, zarr_format=self.zarr_format, attributes=json.loads(self.ome))
            if self.zarr_format == 2:
                options["chunk_key_encoding"] = {"name": "v2", "separator": "/"}
            group.create_array(self.name, **options)


    def _as_before(self) -> dict[str, Any]:
        """How the result is stored, as the array that was read: compression, fill value, attributes, names of axes, shards."""
        assert self.like is not None
        given, found = opened(self.like), {}
        found["compressors"], second = given.compressors or None, given.metadata.zarr_format == 2
        found["chunk_key_encoding"] = (
            {"name": "v2", "separator": given.metadata.dimension_separator} if second else given.metadata.chunk_key_encoding
        )
        if given.ndim == len(self.shape) and given.dtype == self.dtype:
            found["filters"] = given.filters or None
            found |= {"order": given.order} if second else {}
        fill = given.fill_value
        kept = fill if fill is None else np.array(fill).astype(self.dtype).item()
        if fill is None or kept == fill or (kept != kept and fill != fill):
            found["fill_value"] = kept
        else:
            print(f"{self.like.place}: its fill value, {fill}, is no {np.dtype(self.dtype)}, and is left out", file=sys.stderr)
        if dict(given.attrs) and self.ome is None:
            found["attributes"] = dict(given.attrs)
        names = json.loads(self.like.names)
        if names and self.zarr_format == 3 and len(names) == len(self.shape):
            if self.axes and self.like.axes:
                known = dict(zip(self.like.axes, names, strict=True))
                found["dimension_names"] = tuple(known.get(letter, letter) for letter in self.axes)
            elif not self.axes:
                found["dimension_names"] = tuple(names)
        inner = self.like.inner
        if inner is not None and len(inner) == len(self.chunks) and not any(n % m for n, m in zip(self.chunks, inner, strict=True)):
            found |= {"shards": self.chunks, "chunks": inner}
        return found


@lru_cache(maxsize=32)
def opened_to_write(target: Target) -> Any:
    """The array, opened once in each process."""
    if target.kind == "npy":
        return np.lib.format.open_memmap(target.place, mode="r+")
    if target.kind == "tiff":
        return require("tifffile").memmap(target.place, mode="r+").reshape(target.shape)
    return require("zarr").open_array(target.place, path=target.name or None, mode="r+")


@dataclass(frozen=True)
class Store:
    """The function of a task, which writes a chunk of the result and then its record."""

    target: Target
    records: str | None

    def __call__(self, block: np.ndarray, where: tuple[slice, ...], index: tuple[int, ...]) -> int:
        try:
            opened_to_write(self.target)[where] = block
            if self.records is not None:
                files, folder = filesystem(self.records)
                files.pipe_file(f"{folder}/{record(index)}", b"")
        except Exception as error:  # an OSError, or anything that a store raises
            raise ToolError(f"{self.target.shown} can't be written: {getattr(error, 'strerror', None) or error}") from error
        return int(block.nbytes)


def record(index: Sequence[int]) -> str:
    return ".".join(map(str, index))


def _remove(place: str) -> None:
    """Remove a file or everything below a folder, if it is there. On a disk that imports nothing: a signal may have ended an import."""
    with suppress(FileNotFoundError):
        if is_url(place):
            files, path = filesystem(place)
            files.rm(path, recursive=True)
        elif os.path.isdir(place):
            shutil.rmtree(place)
        else:
            os.remove(place)


def _remove_unfinished(place: str) -> None:
    """Remove what a failed run wrote. zarr writes the chunks of a block side by side, and may not have written all of them yet."""
    with suppress(ToolError):  # the store may be gone
        for seconds in (0.05, 0.1, 0.2, 0.4, 0.8):
            with suppress(OSError):
                _remove(place)
            time.sleep(seconds)
            if not file_exists(place):
                return


def check_output(settings: Settings, sources: Sequence[Any]) -> str:
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
def writing(settings: Settings, target: Target, work: dict[str, Any]) -> Iterator[tuple[Target, str | None, set[str]]]:
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
        opened.cache_clear()
        opened_to_write.cache_clear()
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
