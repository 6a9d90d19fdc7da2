"""Arrays on disk that are read: zarr, OME-Zarr, TIFF, .npy."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from pycuda_conv.tools.files import filesystem
from pycuda_conv.tools.terminal import ToolError, require

TIFF = (".tif", ".tiff")


#: Axes that names stand for.
_LETTERS = {"time": "t", "channel": "c", "depth": "z", "height": "y", "width": "x"}


def is_url(place: Any) -> bool:
    """Whether `place` is in a store that fsspec opens."""
    return "://" in str(place)


def kind_of(place: Any) -> str:
    """The kind of file at `place`, by its name: ``"npy"``, ``"tiff"`` or ``"zarr"``."""
    name = str(place).lower().rstrip("/")
    return "npy" if name.endswith(".npy") else "tiff" if name.endswith(TIFF) else "zarr"


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
    #: sizes of the chunks in a shard; then `chunks` are the shards
    inner: tuple[int, ...] | None = None
    #: the axes' names, where a zarr has some, as JSON
    names: str = "null"

    def chunk_name(self, index: tuple[int, ...]) -> str:
        """The name of a stored chunk in messages."""
        if self.kind == "zarr":
            return str(opened(self).metadata.encode_chunk_key(index))
        return f"at {', '.join(str(i * n) for i, n in zip(index, self.chunks, strict=True))}"


@lru_cache(maxsize=32)
def opened(source: Source) -> Any:
    """The array, opened once in each process."""
    if source.kind == "npy":
        return np.lib.format.open_memmap(source.place, mode="r")
    if source.kind == "tiff":
        return require("zarr").open_array(require("tifffile").imread(source.place, aszarr=True, series=0, level=0), mode="r")
    return require("zarr").open_array(source.place, path=source.name or None, mode="r")


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
        photometric = series.keyframe.photometric.name
        if photometric in ("MINISWHITE", "PALETTE"):
            what = "0 is white in it" if photometric == "MINISWHITE" else "it has a palette, and numbers of colours can't be filtered"
            raise ToolError(f"{place} can't be filtered as a stack: {what}")
        axes = series.axes.lower()
        if "c" not in axes:
            axes = axes.replace("s", "c")  # the colours of a pixel
        found = Source(place, "tiff", tuple(series.shape), np.dtype(series.dtype), (), axes, series=len(file.series))
    return replace(found, chunks=opened(found).chunks)


def _read_zarr(place: str) -> Source:
    zarr = require("zarr")
    node = zarr.open(place, mode="r")
    if isinstance(node, zarr.Array):
        names = getattr(node.metadata, "dimension_names", None)
        letters = [_LETTERS.get(str(n).lower(), str(n)) for n in names or ()]
        axes = "".join(letters) if letters and all(len(n) == 1 for n in letters) and len(set(letters)) == len(letters) else None
        return Source(
            place, "zarr", node.shape, node.dtype, node.shards or node.chunks, axes, zarr_format=node.metadata.zarr_format,
            inner=node.chunks if node.shards else None, names=json.dumps(list(names) if names else None),
        )  # fmt: skip
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
    return Source(
        place, "zarr", array.shape, array.dtype, array.shards or array.chunks, axes, name, node.metadata.zarr_format, ome,
        inner=array.chunks if array.shards else None,
    )  # fmt: skip


@dataclass(frozen=True)
class _Load:
    """The function of a task, which reads a part of a source."""

    source: Source

    def __call__(self, where: tuple[slice, ...]) -> np.ndarray:
        try:
            return np.asarray(opened(self.source)[where])
        except Exception as error:
            raise ToolError(f"{self.source.place}: {self._broken(where)} can't be read: {error}") from error

    def _broken(self, where: tuple[slice, ...]) -> str:
        """The name of the first stored chunk in that part that can't be read."""
        chunks = self.source.chunks
        grid = [range(part.start // n, -(-part.stop // n)) for part, n in zip(where, chunks, strict=True)]
        for index in product(*grid):
            try:
                opened(self.source)[tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, chunks, strict=True))]
            except Exception:
                return f"chunk {self.source.chunk_name(index)}"
        return "one of its chunks"  # now it can be read


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
