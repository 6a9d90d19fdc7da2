"""Any plan on host arrays at the speed of the bus, cut into chunks.

A batch is cut into chunks of images, or an image into chunks of rows with their halo. While one chunk is convolved, the next one is copied
in and the last one copied out, on three streams. Page-locked arrays are copied directly. Ordinary arrays are first copied into page-locked
memory by a few threads, which also put strided and byte-swapped arrays in order. Results come out in page-locked memory from a pool.
The chunks bound what is on the device at a time, so arrays may be larger than its memory.

    chunk i     copy to staging | copy in | convolve | copy out
    chunk i+1                   copy to staging | copy in | convolve | copy out
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from pycuda_conv import engines
from pycuda_conv.execute import staging
from pycuda_conv.execute.pieces import Piece, pieces
from pycuda_conv.execute.several_gpus import gpus_that_pay
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime import contexts
from pycuda_conv.runtime.base import LibraryCall
from pycuda_conv.runtime.transforms import host as host_transforms
from pycuda_conv.tune import lookup

if TYPE_CHECKING:
    from pycuda_conv.plan import Plan
    from pycuda_conv.runtime.device import CudaDevice

#: A function that makes an uninitialised array of a shape and a dtype.
Allocator = Callable[[tuple[int, ...], np.dtype], np.ndarray]

#: Bytes of input or result in a chunk, whichever is larger: enough to hide a launch, few enough to overlap.
CHUNK_BYTES = 12 << 20
#: Chunks on the device at a time: one is copied in, one convolved, one copied out.
ON_DEVICE = 3
#: Chunks that each of several GPUs is given ahead: enough to keep it busy, few enough to leave the rest to the others.
QUEUED = 8
#: The least bytes of the chunks of smaller arrays, which are otherwise eighths: each chunk costs some 50 us of the host's time.
LEAST_CHUNK_BYTES = 4 << 20
#: Arrays that are smaller than this together are copied in one go, without threads.
SMALL_BYTES = 1 << 20
#: Arrays smaller than this together stay in page-locked memory, which kernels read and write over the bus: that takes less time than to
#: begin a copy, also where several blocks read the same.
IN_PLACE_BYTES = 16 << 10


# ---- running the pieces


class _Chunk:
    """One piece ready to run: its plan, and its parts of the arrays, whose axes are in the order of memory."""

    def __init__(self, piece: Piece, plan: Plan) -> None:
        self.piece, self.plan = piece, plan
        problem = piece.problem
        self.in_bytes = math.prod(problem.input_shape) * problem.input_itemsize
        self.out_bytes = math.prod(problem.result_shape) * problem.result_itemsize
        self.residual_bytes = math.prod(problem.result_shape) * problem.itemsize
        before_rows = (piece.images,) if problem.layout == "NHWC" else (piece.images, slice(None))
        self._in, self._out = (*before_rows, piece.rows_in), (*before_rows, piece.rows_out)

    def of(self, x: np.ndarray) -> np.ndarray:
        """The part of `x` that this chunk reads: a copy if its rows are no neighbours."""
        return x[self._in]

    def into(self, y: np.ndarray) -> np.ndarray:
        """The part of `y` that this chunk writes."""
        return y[self._out]


@lru_cache(maxsize=256)
def _chunks(plan: Plan, chunk_bytes: int, device: CudaDevice) -> list[_Chunk]:
    """The pieces of a problem with plans for `device`.

    All pieces use one configuration, so that a chunk's size does not change its sums.
    """
    cut = pieces(plan.problem, chunk_bytes)
    largest = max((piece.problem for piece in cut), key=lambda problem: problem.macs)
    if plan.fixed or largest == plan.problem:
        config = plan.config
    else:
        measured = lookup(largest, device)
        config = measured.config if measured else engines.choose(largest, device)
    plans: dict[ConvProblem, Plan] = {}
    for problem in {piece.problem for piece in cut}:
        one = engines.alike(problem, config)
        fits = engines.refusal(problem, one, device) is None
        plans[problem] = type(plan)(problem, device, config=one if fits else None)
    return [_Chunk(piece, plans[piece.problem]) for piece in cut]


@dataclass(frozen=True)
class _OnDevice:
    """Blocks of memory on a device, or 0, for a filter, a bias, a scale, and the packed filter by :attr:`Plan.filter_key`."""

    weight: Any
    bias: Any
    scale: Any
    packed: Mapping[Hashable, Any]

    @property
    def arrays(self) -> tuple[Any, Any, Any]:
        """Filter, bias and scale."""
        return self.weight, self.bias, self.scale


class Filter:
    """A filter, a bias and a scale. They go along with every call, or stay on devices between calls."""

    def __init__(self, weight: np.ndarray, bias: np.ndarray | None, scale: np.ndarray | None = None) -> None:
        self.weight, self.arrays = weight, (weight, bias, scale)
        self._kept: dict[Any, _OnDevice] = {}

    def keep(self, plan: Plan) -> None:
        """Copy them to the plan's device, and pack the filter if `plan` wants that. They stay for as long as this object does."""
        device: Any = plan.device
        with device.current():
            blocks = [0 if a is None or not a.nbytes else device.allocate(a.nbytes) for a in self.arrays]
            packed = {plan.filter_key: device.allocate(plan.filter_bytes)} if plan.filter_bytes else {}
            stream, _, _ = device.pipeline_streams()
            device.order(None, stream)  # the pool's memory may still be in use by the default stream
            try:
                for block, array in zip(blocks, self.arrays, strict=True):
                    if block and array is not None:
                        native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
                        device.copy_in(block, native, native, stream)
                for block in packed.values():
                    plan.pack(int(blocks[0]), int(block), stream)
            finally:
                stream.synchronize()
        self._kept[device] = _OnDevice(blocks[0], blocks[1], blocks[2], packed)

    def on(self, device: CudaDevice) -> _OnDevice | None:
        """The place where they are kept on `device`, or None."""
        return self._kept.get(device)


class _Lane:
    """The part of a call on one GPU: streams, blocks of memory, and the chunks given to it. Its context must be current."""

    def __init__(self, device: CudaDevice, chunks: Sequence[_Chunk], filters: Filter, residual: bool) -> None:
        self.device, self.chunks = device, chunks
        self.up, self.compute, self.down = self.streams = device.pipeline_streams()
        self.depth = min(ON_DEVICE, len(chunks))
        in_bytes = max(max(chunk.in_bytes for chunk in chunks), 1)
        out_bytes = max(chunk.out_bytes for chunk in chunks)
        self._outputs = [device.allocate(out_bytes) for _ in range(self.depth)]
        #: blocks for inputs, and for residuals: one for each of the chunks on the device
        self.places = [device.allocate(in_bytes) for _ in range(self.depth)], [
            device.allocate(max(chunk.residual_bytes for chunk in chunks)) if residual else 0 for _ in range(self.depth)
        ]
        kept = filters.on(device)
        #: whether the filter has to be sent
        self.lacks_filter = kept is None
        if kept is None:
            blocks = [0 if a is None else device.allocate(max(a.nbytes, 1)) for a in filters.arrays]
            kept = _OnDevice(blocks[0], blocks[1], blocks[2], {})
        self.filter = kept
        self._packed = dict(kept.packed)
        workspace = max(chunk.plan.schedule.workspace_bytes for chunk in chunks)
        self._workspace = device.allocate(workspace) if workspace else 0
        for stream in (self.up, self.compute):
            device.order(None, stream)  # the pool's memory may still be in use by the default stream
        self._uploaded, self._computed, self._downloaded = ([device.event() for _ in range(self.depth)] for _ in range(3))
        self._events: list[Any] = []  # to be dropped while the context is current
        #: how many chunks were given to the lane, and the events after which each of the last ones is done
        self.given, self._queued = 0, deque[Any]()

    @property
    def slot(self) -> int:
        """The number of the block that the next chunk takes."""
        return self.given % self.depth

    def recorded(self, stream: Any) -> Any:
        """An event that comes when the present work of `stream` is done."""
        event = self.device.recorded(stream)
        self._events.append(event)
        return event

    def queued(self) -> int:
        """The number of chunks that are not done yet."""
        while self._queued and self._queued[0].query():
            self._queued.popleft()
        return len(self._queued)

    def await_one(self) -> None:
        """Wait until a chunk is done."""
        self._queued[0].synchronize()

    def pack(self) -> None:
        """Pack the filter for the chunks, once for all plans that take it in the same form."""
        wanted = {chunk.plan.filter_key: chunk.plan for chunk in self.chunks if chunk.plan.filter_bytes}
        missing = {key: plan for key, plan in wanted.items() if key not in self._packed}
        if missing:
            self.compute.wait_for_event(self.recorded(self.up))
        for key, plan in missing.items():
            self._packed[key] = self.device.allocate(plan.filter_bytes)
            self.device.order(None, self.compute)  # the pool's memory may still be in use by the default stream
            plan.pack(int(self.filter.weight), int(self._packed[key]), self.compute)

    def make_room(self) -> None:
        """Let copies to the device wait until their blocks are free."""
        if self.given >= self.depth:
            self.up.wait_for_event(self._computed[self.slot])

    def launch(self, chunk: _Chunk) -> int:
        """Convolve the chunk in the blocks; returns the address of the result, which the downward stream may read."""
        slot = self.slot
        self._uploaded[slot].record(self.up)
        self.compute.wait_for_event(self._uploaded[slot])
        if self.given >= self.depth:
            self.compute.wait_for_event(self._downloaded[slot])
        kept, (inputs, residuals) = self.filter, self.places
        places = inputs[slot], kept.weight, kept.bias, kept.scale, residuals[slot], self._outputs[slot], self._workspace
        chunk.plan.launch([int(one) for one in places], self.compute, int(self._packed.get(chunk.plan.filter_key, 0)))
        self._computed[slot].record(self.compute)
        self.down.wait_for_event(self._computed[slot])
        return int(self._outputs[slot])

    def done(self, counted: bool) -> None:
        """Note that all copies of a chunk's result are queued; with `counted`, :meth:`queued` counts the chunk until they are done."""
        self._downloaded[self.slot].record(self.down)
        if counted:
            self._queued.append(self.recorded(self.down))
        self.given += 1

    def close(self) -> None:
        """Drop the events and streams, which has to happen while the context is current."""
        with self.device.current():
            self._queued.clear()
            self._events.clear()
            self._uploaded = self._computed = self._downloaded = []


class _Pipeline:
    """The work of one call. One thread launches all of it, on as many GPUs as there are lanes.

    A chunk goes to the lane with the fewest chunks still to do, so a GPU whose bus is slower, or shared, gets fewer. Ordinary memory is
    copied by the same threads for all of them.
    """

    def __init__(
        self, gpus: Sequence[tuple[CudaDevice, Sequence[_Chunk]]], x: np.ndarray, filters: Filter, y: np.ndarray,
        residual: np.ndarray | None,
    ) -> None:
        self._gpus, self._filters, self._y, self._has_residual = gpus, filters, y, residual is not None
        self._lanes: list[_Lane] = []
        device, chunks = gpus[0]  # all GPUs have the same chunks, but for their plans
        # arrays to copy up: the filter, then the chunks; in parts where they have to be staged
        total = filters.weight.nbytes + sum(chunk.in_bytes + (chunk.residual_bytes if residual is not None else 0) for chunk in chunks)
        self._part_bytes = staging.part_bytes(total, device.copier is not None)
        self._up: list[np.ndarray] = []
        #: the numbers of the filter's arrays that are copied up
        self._filter_up: list[int] = []
        for i, array in enumerate(filters.arrays):
            if array is not None and array.nbytes and any(filters.on(one) is None for one, _ in gpus):
                self._filter_up.append(i)
                self._up.append(array)
        #: arrays that are copied from where they lie: a lane's place for them, the array, and a function for a chunk's part
        self._straight: list[tuple[int, np.ndarray, Callable[[_Chunk, np.ndarray], np.ndarray]]] = []
        staged: list[tuple[int, np.ndarray, Callable[[_Chunk, np.ndarray], np.ndarray]]] = []
        for which, array, part_of in ((0, x, _Chunk.of), (1, residual, _Chunk.into)):
            if array is not None and array.nbytes:
                straight = array.flags.c_contiguous and array.dtype.isnative and device.is_pinned(array)
                straight = straight and not (array is x and any(isinstance(chunk.piece.rows_in, list) for chunk in chunks))
                (self._straight if straight else staged).append((which, array, part_of))
        #: the lane's places for the other arrays of each chunk
        self._staged = [which for which, _, _ in staged]
        self._up += [part_of(chunk, array) for chunk in chunks for _, array, part_of in staged]
        self._down = [] if device.is_pinned(y) else [chunk.into(y) for chunk in chunks]

    def run(self, after: Any = None) -> None:
        """Convolve all chunks behind the present work of the stream `after`; returns when the results are in place."""
        # after an exception too, no copy may run into memory that is given back: streams end first, then threads
        devices = [device for device, _ in self._gpus]
        with ExitStack() as stack:
            stack.callback(self._close_lanes)
            # threads begin to copy while the GPUs' memory is made ready
            uploader, downloader = (
                stack.enter_context(closing(staging.copies(devices, arrays, self._part_bytes, up))) if arrays else None
                for arrays, up in ((self._up, True), (self._down, False))
            )
            for device, chunks in self._gpus:
                with device.current():
                    if after is not None:
                        device.wait_for(after)
                    lane = _Lane(device, chunks, self._filters, self._has_residual)
                self._lanes.append(lane)
                for stream in lane.streams:
                    stack.callback(stream.synchronize)
            self._launch(uploader, downloader)

    def _close_lanes(self) -> None:
        for lane in self._lanes:
            lane.close()

    def _launch(self, uploader: Any, downloader: Any) -> None:
        """Queue all copies and kernels."""
        for which in self._filter_up:
            uploader.send([(lane, int(lane.filter.arrays[which])) for lane in self._lanes if lane.lacks_filter])
        for lane in self._lanes:
            with lane.device.current():
                lane.pack()
        for i in range(len(self._lanes[0].chunks)):
            lane = self._next_lane()
            with lane.device.current():
                self._launch_chunk(i, lane, uploader, downloader)

    def _next_lane(self) -> _Lane:
        """The lane with the fewest chunks to do; waits while all lanes have enough."""
        if len(self._lanes) == 1:
            return self._lanes[0]
        while True:
            queued, index = min((lane.queued(), index) for index, lane in enumerate(self._lanes))
            if queued < QUEUED:
                return self._lanes[index]
            self._lanes[index].await_one()

    def _launch_chunk(self, i: int, lane: _Lane, uploader: Any, downloader: Any) -> None:
        """Queue chunk `i` on a lane, whose context is current."""
        device, chunk = lane.device, lane.chunks[i]
        lane.make_room()
        for which in self._staged:
            uploader.send([(lane, int(lane.places[which][lane.slot]))])
        for which, array, part_of in self._straight:
            device.copy_in(lane.places[which][lane.slot], array, part_of(chunk, array), lane.up)
        result = lane.launch(chunk)
        if downloader is None:
            device.copy_out(self._y, chunk.into(self._y), result, lane.down)
        else:
            downloader.receive(lane, result)
        lane.done(counted=len(self._lanes) > 1)


class _Nothing:
    """A plan that launches nothing."""

    filter_bytes, filter_key, schedule = 0, None, SimpleNamespace(workspace_bytes=0)

    def launch(self, *_: Any) -> None:
        pass


def copy_only(gpus: Sequence[CudaDevice], x: np.ndarray, y: np.ndarray) -> None:
    """Copy `x` to GPUs, and as many bytes from there to `y`, with the chunks, streams and threads of a call but without its kernels.

    Both have the shape (images, 1, pixels) and the dtype float32.
    """
    cut = pieces(ConvProblem.forward(1, x.shape, (1, 1, 1)), _chunk_bytes(x, y))
    chunks = [_Chunk(piece, cast("Plan", _Nothing())) for piece in cut]
    _run([(one, chunks) for one in gpus], x, Filter(np.zeros((1, 1, 1), x.dtype), None), y, None)


# ---- the call


def convolve(
    plan: Plan, x: np.ndarray, filters: Filter, out: np.ndarray | None, stream: Any = None, devices: Sequence[CudaDevice] = (),
    residual: np.ndarray | None = None, allocate: Allocator = np.empty,
) -> np.ndarray:
    """Run `plan` on host arrays that fit it.

    Parameters
    ----------
    x : numpy array
        Of the plan's shape and :attr:`~ConvProblem.storage`, as the filter's arrays; any strides, either byte order.
    filters : Filter
    out : numpy array, optional
        Without gaps in the plan's layout; by default a page-locked array from the pool, or an ordinary one when the pool is at
        its limit.
    stream : optional
        The call follows this stream's present work.
    devices : sequence of CudaDevice
        The GPUs to share the work; by default the plan's own.
    residual : numpy array, optional
        Like `x`; it is `out` itself or does not overlap it.
    allocate : callable
        Makes the result of a shape and a dtype where ordinary memory serves.
    """
    if plan.order is None:
        return _convolve(plan, x, filters, out, stream, devices, residual, allocate)
    # arrays as they lie in memory: from here on their axes are in that order
    if plan.weight_order is not None:
        filters = Filter(filters.arrays[0].transpose(plan.weight_order), None)
    written = plan.result_order
    out, residual = (a if a is None or written is None else a.transpose(written) for a in (out, residual))
    y = _convolve(plan, x.transpose(plan.order), filters, out, stream, devices, residual, allocate)
    return y if written is None else y.transpose(np.argsort(written))


def _convolve(
    plan: Plan, x: np.ndarray, filters: Filter, out: np.ndarray | None, stream: Any, devices: Sequence[CudaDevice],
    residual: np.ndarray | None, allocate: Allocator,
) -> np.ndarray:
    problem, device = plan.problem, plan.device
    shape = plan.result_shape if plan.result_order is None else tuple(plan.result_shape[i] for i in plan.result_order)
    if device.backend != "cuda":
        y = allocate(shape, np.dtype(problem.result_storage)) if out is None else out
        if not plan.empty:
            if residual is not None and np.may_share_memory(residual, y):
                residual = residual.copy()  # OpenCL's buffers must not overlap
            arrays = (x, *filters.arrays, residual)
            storages = problem.input_storage, *(problem.storage,) * 4
            ready = [None if a is None else np.ascontiguousarray(a, dtype=one) for a, one in zip(arrays, storages, strict=True)]
            if stream is not None or not _by_library(plan, ready, y):
                device.run_on_host_arrays(plan.launch, ready, y, plan.workspace_bytes, stream)
        return y
    gpu: Any = device
    with gpu.current():
        if stream is not None:
            contexts.check_stream(gpu, stream)
        nbytes = plan.result_bytes + sum(plan.operand_bytes)
        if not devices and nbytes <= SMALL_BYTES and not plan.empty:
            in_place = nbytes <= IN_PLACE_BYTES and plan.by_address
            return _convolve_small(gpu, plan, x, filters, out, shape, stream, residual, allocate if in_place else None)
        y = gpu.result_array(shape, np.dtype(problem.result_storage)) if out is None else out
        if plan.empty:
            return y
    missing = () if problem.batched else (None, None) if problem.bare else (None,)
    batch_x, batch_y, batch_r = (None if a is None else a[missing] for a in (x, y, residual))
    assert batch_x is not None and batch_y is not None
    chunk_bytes = _chunk_bytes(x, y)
    gpus = devices or (gpu,)
    if len(gpus) > 1:
        count, took = gpus_that_pay(plan, gpus, x, y, residual, copy_only)
        gpus = gpus[:count]
    began = time.perf_counter()
    _run([(one, _chunks(plan, chunk_bytes, one)) for one in gpus], batch_x, filters, batch_y, batch_r, stream)
    if len(devices) > 1:
        took(time.perf_counter() - began)
    return y


def _by_library(plan: Plan, arrays: Sequence[Any], y: np.ndarray) -> bool:
    """Whether a library has computed `y`: where nothing but a bias follows its transforms, and few sums may be off."""
    call, problem = plan.schedule.whole[0][0], plan.problem
    x, weight, bias, *others = arrays
    plain = not (problem.adapted or problem.activation or any(one is not None for one in others))
    if not isinstance(call, LibraryCall) or problem.itemsize < 4 or not plain:
        return False
    return host_transforms.convolve(call.transforms[0], x, weight, bias, y)


def _chunk_bytes(x: np.ndarray, y: np.ndarray) -> int:
    """The size of chunks for an input and a result."""
    return max(min(CHUNK_BYTES, max(x.nbytes, y.nbytes) // 8), LEAST_CHUNK_BYTES)


def _run(
    gpus: Sequence[tuple[CudaDevice, Sequence[_Chunk]]], x: np.ndarray, filters: Filter, y: np.ndarray, residual: np.ndarray | None,
    stream: Any = None,
) -> None:
    """Let GPUs, each with its plans for all chunks, compute `y` together. There is at least one chunk."""
    first, chunks = gpus[0]
    with first.current():
        _Pipeline(gpus[: len(chunks)], x, filters, y, residual).run(stream)


def _convolve_small(
    gpu: Any, plan: Plan, x: np.ndarray, filters: Filter, out: np.ndarray | None, shape: tuple[int, ...], stream: Any,
    residual: np.ndarray | None, allocate: Allocator | None,
) -> np.ndarray:
    """One copy in, the kernels, one copy out, for arrays so small that the calls take all the time. The context must be current.

    With a `allocate`, which makes the result, there are no copies: the kernels read and write page-locked memory.
    """
    problem = plan.problem
    dtype, made_of = np.dtype(problem.storage), np.dtype(problem.result_storage)
    host, locked, device, own = gpu.small_buffers(2 * SMALL_BYTES)
    in_place = allocate is not None and locked != 0
    at = locked if in_place else device
    if stream is not None:
        gpu.order(stream, own)
    kept = filters.on(gpu)
    places, used = [], 0
    for array in (x, residual) if kept else (x, residual, *filters.arrays):
        if array is None:
            places.append(0)
        else:
            places.append(at + used)
            np.copyto(np.ndarray(array.shape, np.dtype(problem.input_storage) if array is x else dtype, host, used), array)
            used += -(-array.nbytes // 256) * 256
    packed = 0
    if kept:
        places += int(kept.weight), int(kept.bias), int(kept.scale)
        packed = int(kept.packed.get(plan.filter_key, 0))
    end = used + -(-plan.result_bytes // 256) * 256
    nbytes = plan.schedule.workspace_bytes if packed else plan.workspace_bytes
    workspace, scratch = None, device + end  # this thread's, on its stream
    if end + nbytes > 2 * SMALL_BYTES:
        workspace = gpu.allocate(nbytes)
        scratch = int(workspace)
        gpu.order(None, own)  # the pool's memory may still be in use by the default stream
    at_x, at_residual, weight, bias, scale = places
    buffers = at_x, weight, bias, scale, at_residual, at + used, scratch if nbytes else 0
    try:
        if in_place:
            plan.launch(buffers, own, packed)
            y = (allocate or np.empty)(shape, made_of) if out is None else out  # while the kernels run
        else:
            y = gpu.result_array(shape, made_of) if out is None else out
            gpu.copy_in(device, host[:used], host[:used], own)
            plan.launch(buffers, own, packed)
            gpu.copy_out(y, y, device + used, own)
    finally:
        own.synchronize()
    if in_place:
        np.copyto(y, np.ndarray(shape, made_of, host, used))
    return y
