"""numpy in, numpy out at the speed of the bus: any plan, run on host arrays in pieces.

A batch is cut into chunks of images, or an image into chunks of rows with their halo. While one chunk is convolved the
next is copied in and the last one copied out, on three streams. Ordinary arrays are first copied by a few threads into
page-locked memory, which is where strided and byte-swapped arrays are put in order too; page-locked arrays go straight.
Results come out in page-locked memory from a pool. What is on the device at a time is bounded by the chunks, so arrays
may be larger than its memory.

    chunk i     copy to staging | copy in | convolve | copy out
    chunk i+1                   copy to staging | copy in | convolve | copy out
"""

from __future__ import annotations

import ctypes
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from pycuda_conv.engines import direct
from pycuda_conv.plan import Plan
from pycuda_conv.problem import ConvProblem, Size3

if TYPE_CHECKING:
    from pycuda_conv.runtime.cuda import CudaDevice

#: Bytes of input or result in a chunk, whichever is larger: enough to hide a launch, little enough to overlap.
CHUNK_BYTES = 12 << 20
#: Chunks on the device at a time: one coming in, one being convolved, one going out.
ON_DEVICE = 3
#: Chunks that the threads fill ahead of the one that is copied in.
AHEAD = 4
#: Smaller arrays are cut into eighths, but no finer than this: each chunk costs some 50 us of the host's time.
LEAST_CHUNK_BYTES = 4 << 20
#: Arrays that are smaller than this together are copied in one go, without streams or threads.
SMALL_BYTES = 1 << 20
#: What one thread copies at a time.
PART_BYTES = 4 << 20


#: Threads that copy between ordinary and page-locked memory.
THREADS = min(16, os.cpu_count() or 1)


@cache
def workers() -> ThreadPoolExecutor:
    """Those threads; they let go of the interpreter's lock while they copy."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="pycuda_conv")


# ---- cutting a problem up


@dataclass(frozen=True)
class Piece:
    """A part of a problem: images `first` to `last` and, along the first spatial axis, rows of the arrays."""

    problem: ConvProblem
    images: slice
    rows_in: slice
    rows_out: slice


def pieces(problem: ConvProblem, chunk_bytes: int) -> list[Piece]:
    """`problem` in pieces of about `chunk_bytes`: by images, and by rows where one image is larger than that.

    The pieces depend on the problem and on `chunk_bytes` only, so every number of GPUs computes the same sums.
    """
    axis = 3 - problem.ndim
    whole_in, whole_out = slice(0, problem.operand_size[axis]), slice(0, problem.result_size[axis])
    image_bytes = max(
        problem.operand_channels * math.prod(problem.operand_size), problem.result_channels * math.prod(problem.result_size), 1
    ) * problem.itemsize
    images = min(problem.N, max(1, chunk_bytes // image_bytes))
    if image_bytes <= 2 * chunk_bytes:
        count = -(-problem.N // images)
        cuts = [problem.N * i // count for i in range(count + 1)]
        return [
            Piece(replace(problem, N=last - first), slice(first, last), whole_in, whole_out)
            for first, last in pairwise(cuts)
        ]
    rows = problem.result_size[axis]
    count = min(rows, -(-image_bytes // chunk_bytes))
    bands = [_rows(problem, axis, rows * i // count, rows * (i + 1) // count) for i in range(count)]
    return [replace(band, images=slice(n, n + 1)) for n in range(problem.N) for band in bands]


def _rows(problem: ConvProblem, axis: int, first: int, last: int) -> Piece:
    """The piece of one image that gives rows `first` to `last` of the result along `axis`."""
    stride, before, dilation = problem.stride[axis], problem.padding_before[axis], problem.dilation[axis]
    reach = dilation * (problem.filter_size[axis] - 1)
    size = problem.operand_size[axis]

    def at(values: Size3, value: int) -> Size3:
        d, h, w = (value if i == axis else v for i, v in enumerate(values))
        return d, h, w

    if problem.direction == "fprop":
        start, end = first * stride - before, (last - 1) * stride - before + reach + 1  # of what is read, padding included
        low = min(max(start, 0), size - 1)
        high = max(min(end, size), low + 1)
        part = replace(
            problem, N=1, input_size=at(problem.input_size, high - low), output_size=at(problem.output_size, last - first),
            padding_before=at(problem.padding_before, low - start), padding_after=at(problem.padding_after, end - high),
        )
    else:
        # result row h is fed by operand rows p with p*stride = h + padding - r*dilation
        low = max(0, min(-(-(first + before - reach) // stride), (first + before) // stride, size - 1))
        high = max(min(size, (last - 1 + before) // stride + 1), low + 1)
        part = replace(
            problem, N=1, output_size=at(problem.output_size, high - low), input_size=at(problem.input_size, last - first),
            padding_before=at(problem.padding_before, first + before - low * stride),
        )
    return Piece(part, slice(0, 1), slice(low, high), slice(first, last))


# ---- running the pieces


class _Chunk:
    """One piece ready to run: its plan, and its parts of the arrays."""

    def __init__(self, piece: Piece, plan: Plan) -> None:
        self.piece, self.plan = piece, plan
        problem = piece.problem
        self.in_shape = (problem.N, problem.operand_channels, *problem.operand_size[-problem.ndim :])
        self.in_bytes = math.prod(self.in_shape) * problem.itemsize
        self.out_shape = (problem.N, problem.result_channels, *problem.result_size[-problem.ndim :])
        self.out_bytes = math.prod(self.out_shape) * problem.itemsize

    def of(self, x: np.ndarray) -> np.ndarray:
        """What this chunk reads of `x`."""
        return x[self.piece.images, :, self.piece.rows_in]

    def into(self, y: np.ndarray) -> np.ndarray:
        """What this chunk writes of `y`."""
        return y[self.piece.images, :, self.piece.rows_out]


@lru_cache(maxsize=256)
def _chunks(plan: Plan, chunk_bytes: int, device: CudaDevice, share: int, shares: int) -> list[_Chunk]:
    """The pieces that fall to `device`, number `share` of so many, with plans for it.

    All pieces use one configuration, so that a chunk's size does not change its sums.
    """
    cut = pieces(plan.problem, chunk_bytes)
    largest = max((piece.problem for piece in cut), key=lambda problem: problem.macs)
    config = plan.config if largest == plan.problem else direct.choose(largest, device.multiprocessors)
    mine = cut[len(cut) * share // shares : len(cut) * (share + 1) // shares]
    plans: dict[ConvProblem, Plan] = {}
    for problem in {piece.problem for piece in mine}:
        fits = direct.legal(problem, config) is None
        plans[problem] = Plan(problem, device, config=config if fits else None)
    return [_Chunk(piece, plans[piece.problem]) for piece in mine]


class _Ring:
    """Page-locked buffers between the caller's ordinary arrays and the device, used in turn."""

    def __init__(self, device: CudaDevice, nbytes: int, count: int) -> None:
        self._buffers = [device.pinned_or_ordinary((nbytes,), np.dtype(np.uint8)) for _ in range(count)]
        #: for each buffer, what must have ended before it is used again
        self._until: list[Callable[[], Any] | None] = [None] * count
        self._next = 0
        self.count = count

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, np.ndarray]:
        """The next buffer, once it is free, as an array; and its number."""
        index = self._next
        self._next = (index + 1) % self.count
        until, self._until[index] = self._until[index], None
        if until is not None:
            until()
        return index, self._buffers[index][: math.prod(shape) * dtype.itemsize].view(dtype.newbyteorder("=")).reshape(shape)

    def busy(self, index: int, until: Callable[[], Any]) -> None:
        """Keep buffer `index` until the function returns."""
        self._until[index] = until

    def wait(self) -> None:
        """Wait for all buffers."""
        for until in self._until:
            if until is not None:
                until()


def _copy(target: np.ndarray, source: np.ndarray) -> list[Future[None]]:
    """Copy by several threads, each a part; a small copy is made at once."""
    parts = min(THREADS, max(1, target.nbytes // PART_BYTES))
    axis = next((i for i, n in enumerate(target.shape) if n >= parts), int(np.argmax(target.shape)))
    n = target.shape[axis]
    parts = min(parts, n)
    if target.nbytes <= PART_BYTES // 8:
        _copy_part(target, source)
        return []
    cuts = [n * i // parts for i in range(parts + 1)]
    places = [(*(slice(None),) * axis, slice(a, b)) for a, b in pairwise(cuts)]
    return [workers().submit(_copy_part, target[place], source[place]) for place in places]


def _copy_part(target: np.ndarray, source: np.ndarray) -> None:
    """Copy without the interpreter's lock; numpy puts strides and byte order right on the way."""
    if source.flags.c_contiguous and target.flags.c_contiguous and source.dtype == target.dtype:
        # memmove writes large blocks past the caches, which numpy's loops don't
        ctypes.memmove(target.ctypes.data, source.ctypes.data, target.nbytes)
    else:
        np.copyto(target, source)


def _results(futures: Sequence[Future[None]]) -> None:
    for future in futures:
        future.result()


class Filter:
    """A filter and a bias on their way to a device, and then there."""

    def __init__(self, device: CudaDevice, weight: np.ndarray, bias: np.ndarray | None) -> None:
        self._device = device
        self._arrays = [self._staged(array) for array in (weight, bias) if array is not None and array.nbytes]
        blocks = iter(int(block) for block, _, _ in self._arrays)
        self.addresses = tuple(next(blocks) if array is not None and array.nbytes else 0 for array in (weight, bias))

    def _staged(self, array: np.ndarray) -> tuple[Any, np.ndarray, list[Future[None]]]:
        staged = self._device.pinned_or_ordinary(array.shape, array.dtype.newbyteorder("="))
        return self._device.allocate(array.nbytes), staged, _copy(staged, array)

    def send(self, stream: Any) -> None:
        """Let `stream` copy them in; they and their page-locked copies must live until it has."""
        for block, staged, copies in self._arrays:
            _results(copies)
            self._device.copy_in(block, staged, staged, stream)


class _Pipeline:
    """One call's work on one device, whose context must be current."""

    def __init__(self, device: CudaDevice, chunks: Sequence[_Chunk], x: np.ndarray, y: np.ndarray) -> None:
        self._device, self._chunks, self._x, self._y = device, chunks, x, y
        self._up, self._compute, self._down = device.pipeline_streams()
        for stream in (self._up, self._compute):
            device.order(None, stream)  # the pool's memory may still be in use by the default stream
        depth = min(ON_DEVICE, len(chunks))
        in_bytes, out_bytes = max(max(chunk.in_bytes for chunk in chunks), 1), max(chunk.out_bytes for chunk in chunks)
        workspace = max(chunk.plan.workspace_bytes for chunk in chunks)
        self._inputs = [device.allocate(in_bytes) for _ in range(depth)]
        self._outputs = [device.allocate(out_bytes) for _ in range(depth)]
        self._workspace = device.allocate(workspace) if workspace else None
        self._uploaded, self._computed, self._downloaded = ([device.event() for _ in range(depth)] for _ in range(3))
        straight = x.flags.c_contiguous and x.dtype.isnative and device.is_pinned(x)
        buffers = min(AHEAD, len(chunks)) + 2
        self._staging = None if straight else _Ring(device, in_bytes, buffers)
        self._filling: deque[tuple[int, np.ndarray, list[Future[None]]]] = deque()
        self._unfilled = deque(chunks)
        self._landing = None if device.is_pinned(y) else _Ring(device, out_bytes, buffers)
        self._landed: deque[tuple[int, np.ndarray, np.ndarray, Any]] = deque()

    def run(self, weight: np.ndarray, bias: np.ndarray | None) -> None:
        """Convolve all chunks; returns when the results are in place."""
        depth = len(self._inputs)
        try:
            filters = Filter(self._device, weight, bias)
            self._fill()
            filters.send(self._up)
            workspace = 0 if self._workspace is None else int(self._workspace)
            for i, chunk in enumerate(self._chunks):
                slot = i % depth
                if i >= depth:
                    self._up.wait_for_event(self._computed[slot])
                self._feed(chunk, self._inputs[slot])
                self._uploaded[slot].record(self._up)
                self._compute.wait_for_event(self._uploaded[slot])
                if i >= depth:
                    self._compute.wait_for_event(self._downloaded[slot])
                buffers = (int(self._inputs[slot]), *filters.addresses, int(self._outputs[slot]), workspace)
                chunk.plan.launch(buffers, self._compute)
                self._computed[slot].record(self._compute)
                self._down.wait_for_event(self._computed[slot])
                self._emit(chunk, self._outputs[slot])
                self._downloaded[slot].record(self._down)
            while self._landed:
                self._put_in_place()
        finally:  # an exception too must not leave a copy running into memory that is given back
            for stream in (self._up, self._compute, self._down):
                stream.synchronize()
            for _, _, copies in self._filling:
                wait(copies)
            if self._landing is not None:
                self._landing.wait()

    def _feed(self, chunk: _Chunk, target: Any) -> None:
        """Let the upward stream copy what `chunk` reads to the device."""
        if self._staging is None:
            self._device.copy_in(target, self._x, chunk.of(self._x), self._up)
            return
        index, staged, copies = self._filling.popleft()
        _results(copies)
        self._device.copy_in(target, staged, staged, self._up)
        self._staging.busy(index, self._device.recorded(self._up).synchronize)
        self._fill()

    def _fill(self) -> None:
        """Keep the threads busy on the chunks that come next."""
        while self._staging is not None and self._unfilled and len(self._filling) < AHEAD:
            chunk = self._unfilled.popleft()
            index, staged = self._staging.take(chunk.in_shape, self._x.dtype)
            self._filling.append((index, staged, _copy(staged, chunk.of(self._x))))

    def _emit(self, chunk: _Chunk, source: Any) -> None:
        """Let the downward stream copy what `chunk` wrote to the host."""
        if self._landing is None:
            self._device.copy_out(self._y, chunk.into(self._y), source, self._down)
            return
        index, landed = self._landing.take(chunk.out_shape, self._y.dtype)
        self._device.copy_out(landed, landed, source, self._down)
        self._landed.append((index, landed, chunk.into(self._y), self._device.recorded(self._down)))
        if len(self._landed) > 2:
            self._put_in_place()

    def _put_in_place(self) -> None:
        """Start the threads on the oldest chunk that landed."""
        index, landed, place, arrived = self._landed.popleft()
        arrived.synchronize()
        copies = _copy(place, landed)
        assert self._landing is not None
        self._landing.busy(index, lambda: _results(copies))


# ---- the call


def convolve(
    plan: Plan, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, out: np.ndarray | None, stream: Any = None,
    devices: Sequence[CudaDevice] = (),
) -> np.ndarray:
    """Run `plan` on host arrays that fit it.

    Parameters
    ----------
    x, weight, bias : numpy arrays
        Of the plan's shapes and dtype; any strides that are not negative, either byte order.
    out : numpy array, optional
        C-contiguous; by default a page-locked array from the pool, or an ordinary one when the pool is at its limit.
    stream : optional
        A stream whose work so far comes first.
    devices : sequence of CudaDevice
        The GPUs to share the work; by default the plan's own.
    """
    problem, device = plan.problem, plan.device
    if device.backend != "cuda":
        y = np.empty(plan.result_shape, problem.dtype) if out is None else out
        if not plan.empty:
            ready = [None if a is None else np.ascontiguousarray(a, dtype=problem.dtype) for a in (x, weight, bias)]
            device.run_on_host_arrays(plan.launch, ready, y, plan.workspace_bytes, stream)
        return y
    gpu: Any = device
    if plan.empty or (not devices and plan.result_bytes + sum(plan.operand_bytes) <= SMALL_BYTES):
        return _convolve_small(gpu, plan, x, weight, bias, out, stream)
    with gpu:
        y = gpu.pinned_or_ordinary(plan.result_shape, np.dtype(problem.dtype)) if out is None else out
    batch_x, batch_y = (x, y) if problem.batched else (x[None], y[None])
    chunk_bytes = max(min(CHUNK_BYTES, max(x.nbytes, y.nbytes) // 8), LEAST_CHUNK_BYTES)
    gpus = devices or (gpu,)

    def work(share: int) -> None:
        with gpus[share] as one:
            if stream is not None:
                one.wait_for(stream)
            chunks = _chunks(plan, chunk_bytes, one, share, len(gpus))
            if chunks:
                _Pipeline(one, chunks, batch_x, batch_y).run(weight, bias)

    if len(gpus) == 1:
        work(0)
    else:
        with ThreadPoolExecutor(len(gpus)) as pool:
            _results([pool.submit(work, share) for share in range(len(gpus))])
    return y


def _convolve_small(
    gpu: Any, plan: Plan, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, out: np.ndarray | None, stream: Any
) -> np.ndarray:
    """One copy in, the kernels, one copy out: for arrays whose time is all in the calls."""
    dtype = np.dtype(plan.problem.dtype)
    with gpu:
        y = gpu.pinned_or_ordinary(plan.result_shape, dtype) if out is None else out
        if plan.empty:
            return y
        host, device, own = gpu.small_buffers(2 * SMALL_BYTES)
        if stream is not None:
            gpu.order(stream, own)
        places, used = [], 0
        for array in (x, weight, bias):
            places.append(device + used if array is not None else 0)
            if array is not None:
                np.copyto(np.ndarray(array.shape, dtype, host, used), array)
                used += -(-array.nbytes // 256) * 256
        workspace = gpu.allocate(plan.workspace_bytes) if plan.workspace_bytes else None
        if workspace is not None:
            gpu.order(None, own)  # the pool's memory may still be in use by the default stream
        try:
            gpu.copy_in(device, host[:used], host[:used], own)
            plan.launch((*places, device + used, 0 if workspace is None else int(workspace)), own)
            gpu.copy_out(y, y, device + used, own)
        finally:
            own.synchronize()
    return y
