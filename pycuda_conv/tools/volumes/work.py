"""The work that the arguments ask for, as a dask array: nothing is written yet."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycuda_conv.ndimage.taps import gaussian
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime import default_backend
from pycuda_conv.tools.files import FILTERS, Settings, common_dtype, exactly, filter_file, named_number, pairs, read_array, refusals
from pycuda_conv.tools.pictures.tiff import notes_of
from pycuda_conv.tools.terminal import ToolError, require
from pycuda_conv.tools.volumes.source import Source, load, opened

#: Bytes of input or result of a task, whichever is larger, unless the stored chunks are larger.
WORK_BYTES = 64 << 20
#: Axes that can be convolved. All others count as images, except the channels, c.
SPACE = "zyx"


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
    if alone and source.dtype.kind in "iub":
        dtype = "float32" if source.dtype.itemsize <= 2 else "float64"
    elif alone and source.dtype.kind == "f":
        dtype = source.dtype.name
    else:
        dtype = common_dtype(settings, source, weight, bias)
    weight = exactly(settings.filter, weight, dtype)
    bias = None if bias is None else exactly(settings.bias, bias, dtype)
    if alone:
        weight = weight[None, None]
    _check_units(source, weight)
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


def _check_units(source: Source, weight: np.ndarray) -> None:
    """Refuse a filter whose results the conventions of a zarr's attributes would misread, and say what is not seen."""
    if source.kind != "zarr" or source.ome is not None:
        return
    attributes = dict(opened(source).attrs)
    offset = attributes.get("add_offset", 0)
    if offset and abs(float(weight.sum()) - weight.shape[0]) > 1e-6 * max(abs(float(weight.sum())), 1):
        raise ToolError(f"{source.place} stores values less {offset} (add_offset), and the filter's taps don't add up to 1: unpack it")


def _no_data(source: Source) -> float | None:
    """The number that stands for no data by a TIFF's tag or the conventions of a zarr's attributes, or None."""
    if source.kind == "tiff":
        with require("tifffile").TiffFile(source.place) as file:
            return notes_of(file).nodata
    if source.kind != "zarr" or source.ome is not None:
        return None
    attributes = dict(opened(source).attrs)
    found = attributes.get("_FillValue", attributes.get("missing_value"))
    try:
        return None if found is None else float(found)
    except (TypeError, ValueError):
        print(f"{source.place}: what it says of values without data, {found!r}, is no number", file=sys.stderr)
        return None


def _filters(settings: Settings, source: Source) -> tuple[np.ndarray, np.ndarray | None]:
    """The filter, by name or from its file, and the bias."""
    bias = None if settings.bias is None else np.array(read_array(settings.bias))
    number = named_number(settings.filter)
    if number is None and settings.filter not in FILTERS:
        return filter_file(settings.filter), bias
    if source.axes is None:
        raise ToolError(f"the filter {settings.filter!r} needs to know the axes of {source.place}: name them, as in --axes zyx")
    if number is not None:
        return _numbered(*number, 3 if "z" in source.axes else 2), bias
    return volume_filter(settings.filter) if "z" in source.axes else FILTERS[settings.filter], bias


def _numbered(name: str, number: float | int, rank: int) -> np.ndarray:
    """A Gaussian of that sigma, or a box of that size, along all axes of space."""
    taps = gaussian(number, 0, int(4 * number + 0.5)) if name == "gaussian" else np.full(int(number), 1 / number)
    made = taps
    for _ in range(rank - 1):
        made = np.multiply.outer(made, taps)
    return made


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
        options |= {"padding": _middle(weight.shape[2:], options["dilation"], rank), "padding_mode": settings.border or "replicate"}
    elif settings.border is not None:
        options["padding_mode"] = settings.border
    if settings.transposed:
        options["output_padding"] = _or(settings.output_padding, 0)
    make = ConvProblem.transposed if settings.transposed else ConvProblem.forward
    lead = len(images)
    shape = (math.prod(x.shape[:lead]), *x.shape[lead:]) if lead else x.shape
    with refusals():
        shapes = shape, weight.shape, None if bias is None else bias.shape
        problem = make(
            rank, *shapes, **options, dtype=dtype, precision=settings.precision, algorithm=settings.algorithm,
            activation=settings.activation, in_chunks=True,
        )
        place = chunked.ChunkPlace(*_where(settings))
        none = _no_data(source)
        if none is not None and not (repeated and bias is None and settings.activation is None):
            print(f"{source.place}: {none:g} stands for no data in it, and is filtered like a value", file=sys.stderr)
            none = None
        if none is None:
            y = chunked.graph(problem, x, weight, {"bias": bias}, place, lead)
        else:
            y = _around_gaps(lambda x: chunked.graph(problem, x, weight, {"bias": None}, place, lead), x, none)
    if not channels and y.shape[lead] == 1:
        y = y[(slice(None),) * lead + (0,)]
        found = images + space
    else:
        found = images + "c" + space
    wanted = "".join(letter for letter in axes if letter in found)
    if "c" in found and "c" not in wanted:  # the filter added an axis of channels
        wanted = wanted.replace(space[0], "c" + space[0], 1)
    y = y.transpose([found.index(letter) for letter in wanted])
    wanted_dtype = np.dtype(settings.dtype) if settings.dtype is not None else source.dtype if alone else y.dtype
    if wanted_dtype.kind == "f":
        y = y.astype(wanted_dtype)
    else:
        y = y.map_blocks(_rounded, wanted_dtype, dtype=wanted_dtype, meta=np.empty((0,) * y.ndim, wanted_dtype))
    near = dict(zip(axes, source.chunks, strict=True)) if source.kind != "npy" else dict.fromkeys(axes, 128)
    chunks = tuple(_stored(y.chunks[i], near.get(letter, y.shape[i])) for i, letter in enumerate(wanted))
    places = dict(zip(space, [_place(problem, axis) for axis in range(3 - rank, 3)], strict=True))
    return Work(y, problem, source, wanted if source.axes is not None else None, chunks, places)


def _around_gaps(filtered: Callable[[Any], Any], x: Any, none: float) -> Any:
    """`x` filtered where it has data: a neighbour without data, which is `none`, counts as the pixel itself. What has none stays."""
    da = importlib.import_module("dask.array")
    gone = da.isnan(x) if math.isnan(none) else x == none
    own, known = da.where(gone, 0, x).astype(x.dtype), (~gone).astype(x.dtype)
    y = filtered(own) + own * (filtered(da.ones_like(x)) - filtered(known))
    return da.where(gone, x, y)


def _place(problem: ConvProblem, axis: int) -> tuple[float, float]:
    """The distance of neighbouring pixels of the result, and the place of the first, the middle of its window, in pixels of the input."""
    stride, middle = problem.stride[axis], problem.dilation[axis] * (problem.filter_size[axis] - 1) / 2 - problem.padding_before[axis]
    return (1 / stride, -middle / stride) if problem.direction == "dgrad" else (float(stride), middle)


def _rounded(y: np.ndarray, dtype: Any) -> np.ndarray:
    """`y` in an integer type, rounded and clipped, or as a bool."""
    if dtype.kind == "b":
        return y >= 0.5
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
