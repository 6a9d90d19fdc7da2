"""dask arrays in and out: a convolution as a graph of chunks, each of which is a call of its own.

Chunks of images and of space stay what they are. A spatial chunk is computed from itself and from what the filter reaches of its
neighbours (:func:`_with_neighbours`), so nothing is computed twice. Each result pixel belongs to the chunk in which the middle of
its window lies, shifted by the padding: with ``padding="same"`` and stride 1 the result's chunks are the input's.
A border that mirrors or wraps the image is joined to it first, as its rows may lie in other chunks (:mod:`pycuda_conv.chunk_borders`).

Workers get the filter once: it is a key of the graph on which all chunks depend. A chunk also needs three numbers for each spatial axis
(:class:`_Where`), from which :func:`pycuda_conv.execute.pieces.band` makes the chunk's own problem.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from typing import Any

import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.blockwise import Blockwise
from dask.highlevelgraph import HighLevelGraph
from dask.layers import ArrayBlockwiseDep

from pycuda_conv import chunk_borders, dispatch
from pycuda_conv.arrays import LAZY, ArrayKind, CupyKind, NumpyKind, check_same_type, kind_of
from pycuda_conv.arrays.base import numpy_dtype
from pycuda_conv.call import Call, Operands
from pycuda_conv.errors import BackendError, ConvArgumentError, brief
from pycuda_conv.execute import pieces, staging
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime import default_backend, get_device, named_place

# ---- where chunks lie


@dataclass(frozen=True)
class _Axis:
    """A spatial axis of the input in chunks, with the rows of the result that each chunk gives."""

    #: sizes of the input's chunks
    chunks: tuple[int, ...]
    #: rows that a chunk needs of the chunk before, and of the chunk after
    depth: tuple[int, int]
    #: chunk i gives the rows ``cuts[i]`` to ``cuts[i + 1]`` of the result
    cuts: tuple[int, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        """The first row that each chunk has after its neighbours' rows were added."""
        firsts = accumulate(self.chunks[:-1], initial=0)
        return tuple(max(first - self.depth[0], 0) for first in firsts)

    @property
    def result_chunks(self) -> tuple[int, ...]:
        """Sizes of the result's chunks."""
        return tuple(last - first for first, last in pairwise(self.cuts))


def _axis(problem: ConvProblem, axis: int, chunks: Sequence[int], joined: int = 0) -> _Axis:
    """`chunks` of the input along `axis`; neighbours are merged where one has fewer rows than the other needs, or gives none.

    `joined` rows of a border lie before the image, as a part of it.
    """
    size, total = problem.operand_size[axis], problem.result_size[axis]
    stride, before = problem.stride[axis], problem.padding_before[axis]
    reach = problem.dilation[axis] * (problem.filter_size[axis] - 1)
    centre = min(before + joined, reach)  # rows before the middle of a window
    if problem.direction == "dgrad":
        depth = (reach - centre) // stride, -(-centre // stride)
    else:
        depth = centre, reach - centre

    def first(row: int) -> int:
        """The first row of the result that belongs to a chunk which begins at `row`."""
        at = row * stride - before + centre if problem.direction == "dgrad" else -(-(row + before - centre) // stride)
        return min(max(at, 0), total)

    edges, cuts = [0], [0]
    for edge in accumulate(chunks[:-1]):
        if edge - edges[-1] >= max(depth) and first(edge) > cuts[-1]:
            edges.append(edge)
            cuts.append(first(edge))
    while len(edges) > 1 and (size - edges[-1] < max(depth) or cuts[-1] >= total):
        edges.pop()
        cuts.pop()
    edges.append(size)
    merged = tuple(end - start for start, end in pairwise(edges))
    return _Axis(merged, depth if len(merged) > 1 else (0, 0), (*cuts, total))


class _Where(ArrayBlockwiseDep):
    """The place of a task's chunk: for each spatial axis the first row that it has, and the rows of the result that it gives."""

    def __init__(self, axes: Sequence[_Axis]) -> None:
        super().__init__(tuple(axis.result_chunks for axis in axes))
        self._axes = [(axis.starts, axis.cuts) for axis in axes]

    def __getitem__(self, idx: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
        return tuple((starts[i], cuts[i], cuts[i + 1]) for i, (starts, cuts) in zip(idx, self._axes, strict=True))

    def __dask_tokenize__(self) -> Any:
        return type(self).__name__, self._axes


# ---- what runs on a worker


@dataclass(frozen=True)
class ChunkPlace:
    """Where the chunks that lie in host memory are convolved."""

    device: Any = None
    devices: Any = None
    tune: bool = False

    @contextmanager
    def taken(self) -> Iterator[Any]:
        """A device for one chunk; of several GPUs, the one that convolves the fewest chunks."""
        if self.devices is None:
            if self.device is None:
                _check_default_device()
            yield self.device
            return
        gpus = dispatch.gpus_of(self.devices)
        with _lock:
            gpu = min(gpus, key=lambda one: _busy[one.name])
            _busy[gpu.name] += 1
        try:
            yield gpu
        finally:
            with _lock:
                _busy[gpu.name] -= 1

    def empty(self, like: Any, shape: tuple[int, ...]) -> Any:
        """An uninitialised array like `like`. For a GPU it is page-locked, as the GPU reads that without another copy."""
        gpu = self._gpu() if isinstance(like, np.ndarray) else None
        if gpu is None:
            return np.empty_like(like, shape=shape, order="C")
        with gpu.current():
            memory = gpu.result_array((math.prod(shape) * like.dtype.itemsize,), np.dtype(np.uint8))
        return memory.view(like.dtype).reshape(shape)

    def _gpu(self) -> Any:
        """One of the GPUs, or None where chunks are not convolved on any. A chunk's call reports what is wrong with `device`."""
        try:
            if self.devices is not None:
                return dispatch.gpus_of(self.devices)[0]
            device = get_device(self.device) if self.device is not None or default_backend() == "cuda" else None
        except BackendError:
            return None
        return device if device is not None and device.backend == "cuda" else None


_lock = threading.Lock()
_busy: Counter[str] = Counter()


def _check_default_device() -> None:
    """Refuse to compute on the CPU of a worker unless its user asked for that: nobody would see that a GPU is missing there."""
    if default_backend() == "opencl" and not os.environ.get("PYCUDA_CONV_BACKEND"):
        distributed = sys.modules.get("distributed")
        try:
            worker = None if distributed is None else distributed.get_worker()
        except ValueError:  # not in a worker
            return
        if worker is not None:
            raise BackendError(
                f"the worker {worker.address} has no GPU that PyCUDA finds; pass device='opencl', or set PYCUDA_CONV_BACKEND=opencl for "
                "the worker, if its CPU is to convolve"
            )


def _only(block: Any) -> Any:
    """The one block along each axis that the result does not have: dask gives nested lists."""
    while isinstance(block, list):
        (block,) = block
    return block


def _alike(arrays: Sequence[Any]) -> tuple[ArrayKind, list[Any]]:
    """The blocks as arrays of one kind: filters in host memory are copied to the GPU of a chunk that lies on one."""
    kind = kind_of("a chunk", arrays[0])
    if isinstance(kind, CupyKind):
        cupy = sys.modules["cupy"]
        with arrays[0].device:
            return kind, [None if a is None else cupy.asarray(a) for a in arrays]
    return kind, list(arrays)


def _joined(block: Any, axes: Sequence[int], *rims: Any, place: ChunkPlace | None = None) -> Any:
    """A copy of `block` with the rows before and after it along `axes`: for each axis two of `rims`, which may be None.

    The rims of an axis cover the rows joined along the axes before. With a `place`, the copy will be convolved there.
    """
    around = list(zip(axes, rims[::2], rims[1::2], strict=True))
    shape, inner = list(block.shape), [slice(0, n) for n in block.shape]
    for axis, before, after in around:
        start = 0 if before is None else before.shape[axis]
        inner[axis] = slice(start, start + shape[axis])
        shape[axis] += start + (0 if after is None else after.shape[axis])
    y = np.empty_like(block, shape=tuple(shape), order="C") if place is None else place.empty(block, tuple(shape))
    parts = [(y[tuple(inner)], block)]
    for axis, before, after in around:
        for rim, rows in ((before, slice(0, inner[axis].start)), (after, slice(inner[axis].stop, None))):
            if rim is not None:
                there = (*inner[:axis], rows, *inner[axis + 1 :])
                parts.append((y[there], rim))
        inner[axis] = slice(None)
    if isinstance(y, np.ndarray):
        staging.copy(y, *parts)
    else:
        for view, part in parts:
            view[...] = part
    return y


def _rim(block: Any, axis: int, rows: slice, earlier: Sequence[int], *rims: Any) -> Any:
    """The `rows` of a chunk along `axis`, which a neighbour needs, with those parts of `rims` that lie along the `earlier` axes."""
    here = (slice(None),) * axis + (rows,)
    return _joined(block[here], earlier, *(None if rim is None else rim[here] for rim in rims))


def _joined_at(place: ChunkPlace, *arguments: Any) -> Any:
    """The same as :func:`_joined`, for a chunk that is convolved at `place`."""
    return _joined(*arguments, place=place)


def _run(problem: ConvProblem, arrays: Sequence[Any], place: ChunkPlace) -> Any:
    """Convolve input, weight, bias, scale and residual."""
    kind, (x, weight, bias, scale, residual) = _alike(arrays)
    if not isinstance(kind, NumpyKind):
        plan = dispatch.plan_for(problem, kind, kind.signature(x), None, "NCHW", place.tune)
        return (plan.better or plan)(x, weight, bias, scale=scale, residual=residual)
    with place.taken() as device:
        plan = dispatch.plan_for(problem, kind, kind.signature(x), device, "NCHW", place.tune)
        return (plan.better or plan)(x, weight, bias, scale=scale, residual=residual)


@dataclass(frozen=True)
class _Chunks:
    """The function of a task, which computes one chunk of the problem."""

    problem: ConvProblem
    #: axes before the channels; they are all images
    lead: int
    place: ChunkPlace
    #: the names of those of bias, scale and residual that are given
    names: tuple[str, ...] = ()

    def _part(self, x: Any, where: Sequence[tuple[int, int, int]]) -> tuple[ConvProblem, Any]:
        """The problem of one chunk, without its channels, and the part of `x` that it reads."""
        problem, ndim, cut = self.problem, self.problem.ndim, []
        for axis, (start, first, last) in zip(range(3 - ndim, 3), where, strict=True):
            problem, low, high = pieces.band(problem, axis, first, last)
            cut.append(slice(low - start, high - start))
        here = (Ellipsis, *cut)
        x = x[here]
        if self.lead > 1:
            x = x.reshape(-1, *x.shape[self.lead :])
        return replace(problem, N=x.shape[0] if self.lead else 1, batched=self.lead > 0), x

    def __call__(self, x: Any, weight: Any, where: Any, *rest: Any) -> Any:
        x, weight = _only(x), _only(weight)
        images = x.shape[: self.lead]
        problem, x = self._part(x, where)
        channels = x.shape[-problem.ndim - 1]
        if problem.direction == "dgrad":
            groups = channels * problem.groups // problem.K
            problem = replace(problem, K=channels, C=weight.shape[1] * groups, groups=groups)
        else:
            groups = channels * problem.groups // problem.C
            problem = replace(problem, C=channels, K=weight.shape[0], groups=groups)
        given = {name: _only(array) for name, array in zip(self.names, rest, strict=True)}
        residual = given.get("residual")
        if residual is not None:
            residual = residual.reshape(problem.result_shape)
        y = _run(problem, (x, weight, given.get("bias"), given.get("scale"), residual), self.place)
        return y.reshape(*images, *y.shape[1:]) if self.lead > 1 else y


@dataclass(frozen=True)
class _WeightChunks(_Chunks):
    """The function of a task, which computes the summand of one chunk in a filter's gradient."""

    def __call__(self, x: Any, grad_output: Any, where: Any, *rest: Any) -> Any:
        x, grad_output = _only(x), _only(grad_output)
        problem, x = self._part(x, where)
        ndim = problem.ndim
        channels, per_group = x.shape[-ndim - 1], problem.C // problem.groups
        groups = max(channels // per_group, 1)
        problem = replace(problem, direction="wgrad", C=channels, K=grad_output.shape[-ndim - 1], groups=groups)
        return _summand(_run(problem, (x, grad_output, None, None, None), self.place), self.lead + ndim)


@dataclass(frozen=True)
class _BiasChunks:
    """The function of a task, which sums one chunk's channels."""

    ndim: int
    place: ChunkPlace

    def __call__(self, grad_output: Any) -> Any:
        if isinstance(kind_of("a chunk", grad_output), NumpyKind):
            with self.place.taken() as device:
                made = dispatch.sum_channels(self.ndim, grad_output, device, None)
        else:
            made = dispatch.sum_channels(self.ndim, grad_output, None, None)
        return _summand(made, grad_output.ndim - 1)


def _summand(part: Any, axes: int) -> Any:
    """A part of a sum over `axes` axes of chunks; 16-bit numbers are summed in float32."""
    return part.astype(np.float32 if part.dtype.itemsize == 2 else part.dtype, copy=False).reshape((1,) * axes + part.shape)


# ---- the graph


def convolve(call: Call, operands: Operands, out: Any, stream: Any, place: ChunkPlace) -> Any:
    """The result of a public function for dask arrays."""
    _check_whole(out, stream)
    _check_place(place)
    x, weight, *_, residual = operands
    if call.function == "conv" and _rank(x) == _rank(weight) == call.ndim:  # arrays of spatial axes alone
        more = None if residual is None else residual[None]
        with_channels = operands._replace(input=x[None], weight=weight[None, None], residual=more)
        return convolve(call, with_channels, out, stream, place)[0]
    names = *call.operand_names, *Operands._fields[2:]
    x = _checked(names[0], operands.input, call.ndim)
    x, call = chunk_borders.enlarged(x, call)
    operands = operands._replace(input=x)
    _check_kinds(names, *operands)
    dtypes = [None if one is None else LAZY.dtype_name(np.dtype(one.dtype)) for one in operands]
    operands = call.of_one_type(operands, dtypes, lambda array, dtype: array.astype(numpy_dtype(dtype)), LAZY.conversion)
    check_same_type(LAZY, *map(_signature, operands), names=names)
    problem = dispatch.problem_of(call, LAZY, [_signature(a) for a in operands], in_chunks=True)
    lead = x.ndim - call.ndim - 1
    if call.function == "weight":
        return _weight_graph(problem, x, _checked(names[1], _as_dask(operands.weight), call.ndim), place, lead)
    others = {"bias": operands.bias, "scale": operands.scale, "residual": operands.residual}
    return graph(problem, x, operands.weight, others, place, lead)


def sum_channels(ndim: int, grad_output: Any, stream: Any, place: ChunkPlace) -> Any:
    """The result of :func:`pycuda_conv.conv2d_bias` and its like for dask arrays."""
    _check_whole(None, stream)
    _check_place(place)
    x = _checked("grad_output", grad_output, ndim)
    dispatch.check_summed(ndim, x.shape, LAZY.dtype_name(x.dtype))
    axes = tuple(range(x.ndim))
    summed = tuple(axis for axis in axes if axis != x.ndim - ndim - 1)
    parts = da.blockwise(
        _BiasChunks(ndim, place), (*summed, x.ndim - ndim - 1), x, axes, adjust_chunks=dict.fromkeys(summed, 1), token=f"conv{ndim}d_bias",
        dtype=x.dtype, meta=_meta(x, x.ndim),
    )
    return _sum(parts, x.ndim - 1, x.dtype)


def graph(problem: ConvProblem, x: Any, weight: Any, others: dict[str, Any], place: ChunkPlace, lead: int) -> Any:
    """The dask array of `problem`, whose images lie along the first `lead` axes of `x`. `others` are bias, scale and residual, or None."""
    if problem.direction == "dgrad" and problem.border is not None:
        folded = replace(problem.padded, input_dtype=problem.input_dtype)
        wide = graph(folded, x, weight, others | {"residual": None}, place, lead)
        made, residual = chunk_borders.folded(problem, wide, lead + 1), others.get("residual")
        made, written = made if residual is None else made + residual, problem.result_dtype
        return made.map_blocks(chunk_borders.integers, written, dtype=written) if written else made.astype(wide.dtype)
    problem, x, joined = chunk_borders.widened(problem, x, lead)
    ndim, transposed = problem.ndim, problem.direction == "dgrad"
    grouped = problem.groups > 1
    first = problem.operand_channels // problem.groups
    _check_channel_chunks(x, lead, first, grouped)
    axes = [_axis(problem, 3 - ndim + i, chunks, joined[i]) for i, chunks in enumerate(x.chunks[lead + 1 :])]
    images, space = tuple(f"n{i}" for i in range(lead)), tuple(f"s{i}" for i in range(ndim))
    channels_in, channels_out = ("g", "g") if grouped else ("c", "k")
    # the filter in chunks: whole groups to match the chunks of the input's channels, or the given chunks of the result's channels
    weight = _as_dask(weight)
    along = 0 if transposed or grouped else 1  # its axis with the input's channels
    taps = tuple(f"t{i}" for i in range(ndim))
    if grouped:
        per_block = x.chunks[lead] if transposed else tuple(n // first * (problem.K // problem.groups) for n in x.chunks[lead])
        weight = weight.rechunk((per_block, *(-1 for _ in range(ndim + 1))))
        weight_index = ("g", "u", *taps)
        per_group = problem.result_channels // problem.groups
        result_channels = tuple(n // first * per_group for n in x.chunks[lead])
    else:
        weight = weight.rechunk({axis: -1 for axis in range(ndim + 2) if axis != 1 - along})
        weight_index = (("c", "k") if transposed else ("k", "c")) + taps
        result_channels = weight.chunks[1 - along]
    result_chunks = (*x.chunks[:lead], result_channels, *(axis.result_chunks for axis in axes))
    _check_chunk_size(problem, axes)
    filters: tuple[Any, Any] = weight, weight_index
    if weight.npartitions == 1 and not isinstance(weight.dask.layers[weight.name], Blockwise):
        # The filter then has no axis to sum along, so dask fuses a chunk's convolution and the work before and after it into one task.
        # What is still to be computed would become part of that task, wrongly.
        filters, channels_in = (weight.to_delayed(optimize_graph=False).item(), None), channels_out
    arguments: list[Any] = []
    result_index = (*images, channels_out, *space)
    others = {name: array for name, array in others.items() if array is not None}
    for name, array in others.items():
        chunks, index = (result_chunks, result_index) if name == "residual" else ((result_channels,), (channels_out,))
        arguments += [_as_dask(array).rechunk(chunks), index]
    return da.blockwise(
        _Chunks(problem, lead, place, tuple(others)), result_index,
        _with_neighbours(x, axes, lead, place), (*images, channels_in, *space), *filters, _Where(axes), space, *arguments,
        adjust_chunks={channels_out: result_channels, **{s: axis.result_chunks for s, axis in zip(space, axes, strict=True)}},
        align_arrays=False, token=f"conv{'_transpose' * transposed}{ndim}d", **_of_type(problem, x, x.ndim),
    )


def _weight_graph(problem: ConvProblem, x: Any, grad_output: Any, place: ChunkPlace, lead: int) -> Any:
    """The gradient of a filter: a sum over all chunks of images and of space."""
    ndim, grouped = problem.ndim, problem.groups > 1
    written = problem.result_dtype
    forward, x, joined = chunk_borders.widened(replace(problem, direction="fprop", result_dtype=""), x, lead)
    per_group = problem.C // problem.groups
    if grouped:
        _check_channel_chunks(x, lead, per_group, grouped)
    axes = [_axis(forward, 3 - ndim + i, chunks, joined[i]) for i, chunks in enumerate(x.chunks[lead + 1 :])]
    _check_chunk_size(forward, axes)
    images, space = tuple(f"n{i}" for i in range(lead)), tuple(f"s{i}" for i in range(ndim))
    taps = tuple(f"t{i}" for i in range(ndim))
    k_chunks = grad_output.chunks[lead]
    if grouped:
        k_chunks = tuple(n // per_group * (problem.K // problem.groups) for n in x.chunks[lead])
    grad_output = grad_output.rechunk((*x.chunks[:lead], k_chunks, *(axis.result_chunks for axis in axes)))
    k, c = ("g", "u") if grouped else ("k", "c")
    new_axes = dict(zip(taps, problem.filter_size[3 - ndim :], strict=True))
    parts = da.blockwise(
        _WeightChunks(forward, lead, place), (*images, *space, k, c, *taps),
        _with_neighbours(x, axes, lead, place), (*images, "g" if grouped else c, *space), grad_output, (*images, k, *space),
        _Where(axes), space,
        new_axes={**new_axes, "u": per_group} if grouped else new_axes, adjust_chunks={**dict.fromkeys((*images, *space), 1), k: k_chunks},
        align_arrays=False, token=f"conv{ndim}d_weight", **_of_type(forward, x, lead + 2 * ndim + 2),
    )
    made = _sum(parts, lead + ndim, parts.dtype)
    return made.map_blocks(chunk_borders.integers, written, dtype=written) if written else made


def _sum(parts: Any, axes: int, dtype: Any) -> Any:
    """The sum over the first `axes` axes; the chunks decide its order."""
    wide = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
    return parts.astype(wide).sum(axis=tuple(range(axes)), dtype=wide).astype(dtype)


def _with_neighbours(x: Any, axes: Sequence[_Axis], lead: int, where: ChunkPlace) -> Any:
    """`x` in the chunks of `axes`, each with the rows that it needs of its neighbours; the chunks will be convolved at `where`.

    ``dask.array.overlap`` does this with one task for each of a chunk's 26 neighbours in space. Six tasks are enough: the rows that a
    neighbour gives along an axis include those that it was given along the axes before, so the corners come with the faces.
    """
    x = x.rechunk({lead + 1 + i: axis.chunks for i, axis in enumerate(axes)})
    depths = {lead + 1 + i: axis.depth for i, axis in enumerate(axes) if axis.depth != (0, 0)}
    if not depths:
        return x
    token = tokenize(x.name, depths)
    name, rim_name = f"neighbours-{tokenize(token, where)}", f"rim-{token}"
    graph: dict[Any, Any] = {}

    def rims(place: tuple[int, ...], axes: Sequence[int]) -> list[Any]:
        """The keys of the rows that the chunk at `place` gets from before and after it along each of `axes`; None at a border."""
        found = []
        for axis in axes:
            before, after = depths[axis]
            at_start, at_end = place[axis] == 0, place[axis] == x.numblocks[axis] - 1
            found.append(None if at_start or not before else rim(place, axis, -1, slice(-before, None)))
            found.append(None if at_end or not after else rim(place, axis, 1, slice(after)))
        return found

    def rim(place: tuple[int, ...], axis: int, step: int, rows: slice) -> Any:
        """The key of the rows that the chunk at `place` gets from its neighbour along `axis`."""
        neighbour = (*place[:axis], place[axis] + step, *place[axis + 1 :])
        key = (rim_name, axis, step, *neighbour)
        if key not in graph:
            earlier = tuple(one for one in depths if one < axis)
            graph[key] = (_rim, (x.name, *neighbour), axis, rows, earlier, *rims(neighbour, earlier))
        return key

    for place in product(*map(range, x.numblocks)):
        key = name, *place
        graph[key] = (_joined_at, where, (x.name, *place), tuple(depths), *rims(place, tuple(depths)))
    chunks = list(x.chunks)
    for axis, (before, after) in depths.items():
        last = len(chunks[axis]) - 1
        chunks[axis] = tuple(n + before * (i > 0) + after * (i < last) for i, n in enumerate(chunks[axis]))
    return da.Array(HighLevelGraph.from_collections(name, graph, dependencies=[x]), name, tuple(chunks), dtype=x.dtype, meta=x._meta)


def _meta(x: Any, axes: int, dtype: Any = None) -> Any:
    """An empty array of the kind of the chunks of `x`."""
    return np.empty_like(x._meta, shape=(0,) * axes, dtype=dtype)


def _of_type(problem: ConvProblem, x: Any, axes: int) -> dict[str, Any]:
    """The dtype of the problem's result, and an empty array of that type and of the kind of the chunks of `x`."""
    dtype = x.dtype if not problem.adapted else numpy_dtype(problem.result_dtype or problem.dtype)
    return {"dtype": dtype, "meta": _meta(x, axes, dtype)}


# ---- what is refused when the graph is built


def _rank(array: Any) -> int:
    return len(getattr(array, "shape", ()))


def _signature(array: Any) -> Any:
    return None if array is None else (tuple(array.shape), array.dtype, None)


def _as_dask(array: Any) -> Any:
    """A dask array without its empty chunks, which `rechunk` may lose; a copy of any other array, which may change later, as one chunk."""
    if not isinstance(array, da.Array):
        return da.from_array(array.copy(), chunks=array.shape, asarray=False)
    for axis, chunks in enumerate(array.chunks):
        if 0 in chunks and len(chunks) > 1:
            full = [i for i, n in enumerate(chunks) if n]
            array = array.blocks[(slice(None),) * axis + (full or [0],)]
    return array


def _check_whole(out: Any, stream: Any) -> None:
    for name, value in (("out", out), ("stream", stream)):
        if value is not None:
            raise ConvArgumentError(f"{name} is for arrays in memory; a dask array is computed later: use dask.array.store, or compute()")


def _check_place(place: ChunkPlace) -> None:
    """Refuse what can't name a device anywhere; the workers find out whether it is there."""
    if not isinstance(place.device, int | str | None):
        raise TypeError(f"device must be None, an int or a str for dask arrays, got {brief(place.device)}")
    if place.devices is not None and place.device is not None:
        raise ConvArgumentError(
            f"device and devices exclude each other, but got device={brief(place.device)} and devices={brief(place.devices)}"
        )
    if not (place.devices is None or place.devices == "all" or isinstance(place.devices, tuple)):
        raise TypeError(f"devices must be 'all' or a list of GPU numbers, got {brief(place.devices)}")
    if place.device is not None:
        named_place(place.device)
    for one in place.devices if isinstance(place.devices, tuple) else ():
        try:
            named_place(getattr(one, "name", one))
        except (TypeError, ConvArgumentError) as error:  # it speaks of `device`
            raise type(error)(f"devices must be 'all' or a list of GPU numbers, got {brief(one)} in it") from None


def _checked(name: str, array: Any, ndim: int) -> Any:
    """The dask array `array`, whose chunks have known sizes, without its empty chunks."""
    if not isinstance(array, da.Array):
        given = f"{type(array).__module__}.{type(array).__qualname__}"
        raise TypeError(f"{name} must be a dask array where another argument is one, got {given}")
    if any(math.isnan(n) for chunks in array.chunks for n in chunks):
        raise ConvArgumentError(f"{name} has chunks of unknown sizes, {array.chunks}: call its compute_chunk_sizes() first")
    return _as_dask(array)


def _check_kinds(names: Sequence[str], x: Any, *others: Any) -> None:
    """Refuse arrays whose kinds don't go together."""
    own = kind_of(names[0], x._meta)
    for name, array in zip(names[1:], others, strict=False):
        if array is not None:
            kind = kind_of(name, array._meta if isinstance(array, da.Array) else array)
            if kind is not own and not (isinstance(own, CupyKind) and isinstance(kind, NumpyKind)):
                raise TypeError(f"{names[0]} has chunks of {own.name} but {name} is of {kind.name}; pass arrays of one kind")
    if not isinstance(own, NumpyKind | CupyKind):
        raise TypeError(f"{names[0]} must have chunks of numpy.ndarray or cupy.ndarray, but they are of {own.name}")


def _check_channel_chunks(x: Any, lead: int, per_group: int, grouped: bool) -> None:
    """A chunk must hold all channels that are summed up."""
    chunks = x.chunks[lead]
    if not grouped and len(chunks) > 1:
        raise ConvArgumentError(
            f"every chunk must hold all {x.shape[lead]} channels, but along the channels the chunks are {brief(chunks)}: call "
            f"rechunk({{{lead}: -1}})"
        )
    if grouped and any(n % per_group for n in chunks):
        raise ConvArgumentError(
            f"every chunk must hold whole groups of {per_group} channels, but along the channels the chunks are {brief(chunks)}: call "
            f"rechunk({{{lead}: {per_group}}}), or with a multiple of that"
        )


def _check_chunk_size(problem: ConvProblem, axes: Sequence[_Axis]) -> None:
    """Refuse chunks with more elements in a channel than kernels can count."""
    for axis_number, axis in zip(range(3 - problem.ndim, 3), axes, strict=True):
        largest = max(range(len(axis.chunks)), key=lambda i: axis.result_chunks[i])
        problem, _, _ = pieces.band(problem, axis_number, axis.cuts[largest], axis.cuts[largest + 1])
    try:
        problem._checked_sizes()
    except ConvArgumentError as error:
        sizes = [max(axis.chunks) for axis in axes]
        raise ConvArgumentError(f"chunks of {' x '.join(map(str, sizes))} are too large: {error}") from error
