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

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pycuda_conv import engines
from pycuda_conv.problem import ConvProblem, Size3
from pycuda_conv.tune import lookup

if TYPE_CHECKING:
    from pycuda_conv.plan import Plan
    from pycuda_conv.runtime.cuda import CudaDevice

#: Bytes of input or result in a chunk, whichever is larger: enough to hide a launch, little enough to overlap.
CHUNK_BYTES = 12 << 20
#: Chunks on the device at a time: one coming in, one being convolved, one going out.
ON_DEVICE = 3
#: Smaller arrays are cut into eighths, but no finer than this: each chunk costs some 50 us of the host's time.
LEAST_CHUNK_BYTES = 8 << 20
#: Arrays that are smaller than this together are copied in one go, without threads.
SMALL_BYTES = 1 << 20
#: Where they are smaller than this, kernels read and write them in page-locked memory: to begin a copy takes longer than their way over
#: the bus, also where several blocks read the same.
IN_PLACE_BYTES = 16 << 10
#: What one thread copies at a time; less where there is less to share.
PART_BYTES, LEAST_PART_BYTES = 4 << 20, 1 << 20
#: Below this the launching thread copies parts itself where it would wait, and half as many threads are woken.
HELPED_BYTES = 128 << 20
#: Threads that copy between ordinary and page-locked memory, in each direction of a call. More get in each other's way.
THREADS = min(6, os.cpu_count() or 1)


class _Worker(threading.Thread):
    """A thread that runs one job after the other. Idle ones are kept; there are as many as were ever busy at once.

    It counts as idle before its job counts as done, so that a caller who makes the next call at once finds it.
    """

    _idle: ClassVar[list[_Worker]] = []

    def __init__(self) -> None:
        super().__init__(name="pycuda_conv", daemon=True)
        self._jobs: SimpleQueue[tuple[Callable[[], None], Future[None]]] = SimpleQueue()
        self.start()

    @classmethod
    def submit(cls, job: Callable[[], None]) -> Future[None]:
        """Run `job` in a thread; the future is its end."""
        try:
            worker = cls._idle.pop()
        except IndexError:
            worker = cls()
        done: Future[None] = Future()
        worker._jobs.put((job, done))
        return done

    def run(self) -> None:
        while True:
            job, done = self._jobs.get()
            error = None
            try:
                job()
            except BaseException as caught:
                error = caught
            self._idle.append(self)
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)
            del job, done, error  # nothing of a call is kept until the next one


# ---- cutting a problem up


@dataclass(frozen=True)
class Piece:
    """A part of a problem: some images and, along the first spatial axis, rows of what is read and of what is written."""

    problem: ConvProblem
    images: slice
    rows_in: slice
    rows_out: slice


def _cuts(n: int, count: int) -> list[tuple[int, int]]:
    """0 to `n` in `count` runs of neighbours, as even as it goes: (first, end) of each."""
    return list(pairwise(n * i // count for i in range(count + 1)))


def pieces(problem: ConvProblem, chunk_bytes: int) -> list[Piece]:
    """`problem` in pieces of about `chunk_bytes`: by images, and by rows where one image is larger than that.

    The pieces depend on the problem and on `chunk_bytes` only, so every number of GPUs computes the same sums.
    """
    if problem.direction == "wgrad":  # a sum over all images and rows
        return [Piece(problem, slice(None), slice(None), slice(None))]
    axis = 3 - problem.ndim
    whole_in, whole_out = slice(0, problem.operand_size[axis]), slice(0, problem.result_size[axis])
    image_bytes = max(
        problem.operand_channels * math.prod(problem.operand_size), problem.result_channels * math.prod(problem.result_size), 1
    ) * problem.itemsize
    images = min(problem.N, max(1, chunk_bytes // image_bytes))
    if image_bytes <= 2 * chunk_bytes:
        cuts = _cuts(problem.N, -(-problem.N // images))
        return [Piece(replace(problem, N=end - first), slice(first, end), whole_in, whole_out) for first, end in cuts]
    rows = problem.result_size[axis]
    bands = [_rows(problem, axis, *cut) for cut in _cuts(rows, min(rows, -(-image_bytes // chunk_bytes)))]
    return [replace(band, images=slice(n, n + 1)) for n in range(problem.N) for band in bands]


def _rows(problem: ConvProblem, axis: int, first: int, last: int) -> Piece:
    """The piece of one image that gives rows `first` to `last` of the result along `axis`."""
    part, low, high = band(replace(problem, N=1), axis, first, last)
    return Piece(part, slice(0, 1), slice(low, high), slice(first, last))


def band(problem: ConvProblem, axis: int, first: int, last: int) -> tuple[ConvProblem, int, int]:
    """The problem that gives rows `first` to `last` of the result along `axis`, and the rows, from one to the other, that it reads."""
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
            problem, input_size=at(problem.input_size, high - low), output_size=at(problem.output_size, last - first),
            padding_before=at(problem.padding_before, low - start), padding_after=at(problem.padding_after, end - high),
        )
    else:
        # result row h is fed by operand rows p with p*stride = h + padding - r*dilation
        low = max(0, min(-(-(first + before - reach) // stride), (first + before) // stride, size - 1))
        high = max(min(size, (last - 1 + before) // stride + 1), low + 1)
        part = replace(
            problem, output_size=at(problem.output_size, high - low), input_size=at(problem.input_size, last - first),
            padding_before=at(problem.padding_before, first + before - low * stride),
        )
    return part, low, high


# ---- running the pieces


class _Chunk:
    """One piece ready to run: its plan, and its parts of the arrays, whose axes are in the order of memory."""

    def __init__(self, piece: Piece, plan: Plan) -> None:
        self.piece, self.plan = piece, plan
        problem = piece.problem
        self.in_bytes = math.prod(problem.input_shape) * problem.itemsize
        self.out_bytes = math.prod(problem.result_shape) * problem.itemsize
        before_rows = (piece.images,) if problem.layout == "NHWC" else (piece.images, slice(None))
        self._in, self._out = (*before_rows, piece.rows_in), (*before_rows, piece.rows_out)

    def of(self, x: np.ndarray) -> np.ndarray:
        """What this chunk reads of `x`."""
        return x[self._in]

    def into(self, y: np.ndarray) -> np.ndarray:
        """What this chunk writes of `y`."""
        return y[self._out]


@lru_cache(maxsize=256)
def _chunks(plan: Plan, chunk_bytes: int, device: CudaDevice, share: int, shares: int) -> list[_Chunk]:
    """The pieces that fall to `device`, number `share` of so many, with plans for it.

    All pieces use one configuration, so that a chunk's size does not change its sums.
    """
    cut = pieces(plan.problem, chunk_bytes)
    largest = max((piece.problem for piece in cut), key=lambda problem: problem.macs)
    if plan.fixed or largest == plan.problem:
        config = plan.config
    else:
        measured = lookup(largest, device)
        config = measured.config if measured else engines.choose(largest, device)
    mine = cut[slice(*_cuts(len(cut), shares)[share])]
    plans: dict[ConvProblem, Plan] = {}
    for problem in {piece.problem for piece in mine}:
        fits = engines.refusal(problem, config, device) is None
        plans[problem] = type(plan)(problem, device, config=config if fits else None)
    return [_Chunk(piece, plans[piece.problem]) for piece in mine]


@dataclass(frozen=True)
class _OnDevice:
    """Where a filter, a bias and a scale lie on a device, and the filter packed, by :attr:`Plan.filter_key`. Blocks of memory, or 0."""

    weight: Any
    bias: Any
    scale: Any
    packed: Mapping[Hashable, Any]


class Filter:
    """A filter, a bias and a scale; on their way with every call, or kept on devices from one call to the next."""

    def __init__(self, weight: np.ndarray, bias: np.ndarray | None, scale: np.ndarray | None = None) -> None:
        self.weight, self.arrays = weight, (weight, bias, scale)
        self._kept: dict[Any, _OnDevice] = {}

    def keep(self, plan: Plan) -> None:
        """Copy them to the plan's device, packed too if `plan` wants that; they stay for as long as this object does."""
        device: Any = plan.device
        with device:
            blocks = [0 if a is None or not a.nbytes else device.allocate(a.nbytes) for a in self.arrays]
            packed = {plan.filter_key: device.allocate(plan.filter_bytes)} if plan.filter_bytes else {}
            stream, _, _ = device.pipeline_streams()
            device.order(None, stream)  # the pool's memory may still be in use by the default stream
            for block, array in zip(blocks, self.arrays, strict=True):
                if block and array is not None:
                    native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
                    device.copy_in(block, native, native, stream)
            for block in packed.values():
                plan.pack(int(blocks[0]), int(block), stream)
            stream.synchronize()
        self._kept[device] = _OnDevice(blocks[0], blocks[1], blocks[2], packed)

    def on(self, device: CudaDevice) -> _OnDevice | None:
        """Where they are kept on `device`, if they are."""
        return self._kept.get(device)


@dataclass(frozen=True)
class _Part:
    """A part of a host array that is packed on the device: where it goes, or comes from, there."""

    address: int
    view: np.ndarray


def _parts(array: np.ndarray, address: int, part_bytes: int) -> list[_Part]:
    """`array` cut along its first axis that can be, so that each part is packed on the device as well."""
    axis = next((i for i, n in enumerate(array.shape) if n > 1), 0)
    n = array.shape[axis] if array.ndim else 1
    lead = (slice(None),) * axis
    found = []
    for first, end in _cuts(n, min(n, max(1, array.nbytes // part_bytes))):
        place = (*lead, slice(first, end))
        found.append(_Part(address + array.nbytes // n * first, array[place]))
    return found


class _Threads:
    """Threads that copy parts between ordinary memory and a ring of page-locked buffers; closing it waits for them.

    They meet the thread that launches in queues only, since what Python does between two copies holds all of them up.
    """

    def __init__(self, device: CudaDevice, parts: Sequence[_Part], threads: int) -> None:
        self._device = device
        self._nbytes = nbytes = max(part.view.nbytes for part in parts)
        #: buffers, each with the event after which it may be used again
        self._free: SimpleQueue[tuple[np.ndarray | None, Any]] = SimpleQueue()
        self._error: BaseException | None = None
        for _ in range(min(threads + 5, len(parts))):
            self._free.put((device.pinned_or_ordinary((nbytes,), np.dtype(np.uint8)), None))
        self._running: list[Future[None]] = []
        with suppress(RuntimeError):  # the interpreter is about to end and starts no more threads: then there are none
            for _ in range(threads):
                self._running.append(_Worker.submit(self._run))

    def _run(self) -> None:
        try:
            with self._device:
                self.work()
        except BaseException as error:
            self._error = error
            for _ in range(THREADS + 1):  # wake whoever waits for a buffer
                self._free.put((None, None))
            self.failed()
            raise

    def failed(self) -> None:
        """Wake the launching thread after an error."""

    def work(self) -> None:
        """What each thread does."""
        raise NotImplementedError

    def buffer(self, view: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A free buffer, and its beginning as an array like `view` in the device's byte order."""
        buffer, until = self._free.get()
        if buffer is None:
            raise RuntimeError("copying to or from page-locked memory failed") from self._error
        if until is not None:
            until.synchronize()
        return buffer, buffer[: view.nbytes].view(view.dtype.newbyteorder("=")).reshape(view.shape)

    def free(self, buffer: np.ndarray, until: Any = None) -> None:
        """Let `buffer` be used again, after an event if there is one."""
        self._free.put((buffer, until))

    def close(self) -> None:
        """Wait for the threads, all of them; then an error of theirs is raised."""
        wait(self._running)
        for future in self._running:
            future.result()


class _Feeder(_Threads):
    """Fills buffers with `parts` in their order, ahead of the copies to the device."""

    def __init__(self, device: CudaDevice, parts: Sequence[_Part], threads: int) -> None:
        total = sum(part.view.nbytes for part in parts)
        #: whether the launching thread copies as well
        self._helped = total < HELPED_BYTES
        self._parts = deque(enumerate(parts))
        self._filled: SimpleQueue[tuple[int, np.ndarray, np.ndarray] | None] = SimpleQueue()
        self._early: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._taken = 0
        self._lock = threading.Lock()
        self._closed = False
        super().__init__(device, parts, min(threads // 2 if self._helped else threads, total // PART_BYTES))

    def work(self) -> None:
        while self._fill():
            pass

    def _fill(self, wait: bool = True) -> bool:
        """Stage one part; False if there is none left or, unless it may wait, no buffer."""
        # the first part without a buffer gets the next one, or the others might hold them all
        if not self._lock.acquire(blocking=wait):
            return False
        try:
            if self._closed or not self._parts or (not wait and self._free.empty()):
                return False
            number, part = self._parts.popleft()
            buffer, staged = self.buffer(part.view)
        finally:
            self._lock.release()
        np.copyto(staged, part.view)  # which puts strides and byte order right on the way
        self._filled.put((number, buffer, staged))
        return True

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """The next part in order, once it is filled: its buffer, to be given back, and the part."""
        while self._taken not in self._early:
            if (self._helped or not self._running) and self._filled.empty():
                self._fill(wait=False)  # the launching thread must not wait: only it gives buffers back
            item = self._filled.get()
            if item is None:
                raise RuntimeError("copying to page-locked memory failed") from self._error
            number, buffer, staged = item
            self._early[number] = buffer, staged
        self._taken += 1
        return self._early.pop(self._taken - 1)

    def failed(self) -> None:
        self._filled.put(None)

    def close(self) -> None:
        self._closed = True  # after an exception nobody takes the rest, nor gives buffers back
        for _ in self._running:
            self.free(np.empty(self._nbytes, np.uint8))
        super().close()


class _Lander(_Threads):
    """Empties buffers into ordinary memory, each when the copy from the device has come."""

    def __init__(self, device: CudaDevice, parts: Sequence[_Part], threads: int) -> None:
        self._landed: SimpleQueue[tuple[np.ndarray, np.ndarray, np.ndarray, Any] | None] = SimpleQueue()
        total = sum(part.view.nbytes for part in parts)
        super().__init__(device, parts, max(1, min(threads, len(parts), total // PART_BYTES)))

    def work(self) -> None:
        while (item := self._landed.get()) is not None:
            buffer, landed, place, arrived = item
            arrived.synchronize()
            np.copyto(place, landed)
            self.free(buffer)

    def put(self, buffer: np.ndarray, landed: np.ndarray, place: np.ndarray, arrived: Any) -> None:
        """Let a thread copy `landed`, which is in `buffer`, to `place` after the event."""
        self._landed.put((buffer, landed, place, arrived))
        if not self._running:
            self._landed.put(None)
            self.work()

    def close(self) -> None:
        for _ in self._running:
            self._landed.put(None)
        super().close()


class _Pipeline:
    """One call's work on one device, whose context must be current."""

    def __init__(
        self, device: CudaDevice, chunks: Sequence[_Chunk], x: np.ndarray, filters: Filter, y: np.ndarray, residual: np.ndarray | None
    ) -> None:
        self._device, self._chunks, self._y = device, chunks, y
        self._up, self._compute, self._down = device.pipeline_streams()
        for stream in (self._up, self._compute):
            device.order(None, stream)  # the pool's memory may still be in use by the default stream
        self._depth = min(ON_DEVICE, len(chunks))
        largest = max(max(chunk.in_bytes for chunk in chunks), 1)
        self._inputs = [device.allocate(largest) for _ in range(self._depth)]
        largest = max(chunk.out_bytes for chunk in chunks)
        self._outputs = [device.allocate(largest) for _ in range(self._depth)]
        self._residuals = [0 if residual is None else device.allocate(largest) for _ in range(self._depth)]
        # what goes up: the filter, then the chunks, in parts where it has to be staged
        total = filters.weight.nbytes + sum(chunk.in_bytes + (chunk.out_bytes if residual is not None else 0) for chunk in chunks)
        part_bytes = min(PART_BYTES, max(total // 12, LEAST_PART_BYTES))
        self._going_up: list[list[_Part]] = [[]]
        kept = filters.on(device)
        if kept is None:
            blocks = [0 if a is None else device.allocate(max(a.nbytes, 1)) for a in filters.arrays]
            kept = _OnDevice(blocks[0], blocks[1], blocks[2], {})
            placed = [(a, int(at)) for a, at in zip(filters.arrays, blocks, strict=True) if a is not None and a.nbytes]
            self._going_up[0] = [part for a, at in placed for part in _parts(a, at, part_bytes)]
        self._filter = kept
        #: arrays that are copied from where they lie, their blocks on the device, and what a chunk has of them
        self._straight: list[tuple[np.ndarray, Sequence[Any], Callable[[_Chunk, np.ndarray], np.ndarray]]] = []
        staged: list[tuple[np.ndarray, Sequence[Any], Callable[[_Chunk, np.ndarray], np.ndarray]]] = []
        for array, places, part in ((x, self._inputs, _Chunk.of), (residual, self._residuals, _Chunk.into)):
            if array is not None and array.nbytes:
                straight = array.flags.c_contiguous and array.dtype.isnative and device.is_pinned(array)
                (self._straight if straight else staged).append((array, places, part))
        for i, chunk in enumerate(chunks):
            slot = i % self._depth
            self._going_up.append([p for array, places, part in staged for p in _parts(part(chunk, array), int(places[slot]), part_bytes)])
        self._going_down = [
            [] if device.is_pinned(y) else _parts(chunk.into(y), int(self._outputs[i % self._depth]), part_bytes)
            for i, chunk in enumerate(chunks)
        ]

    def run(self, threads: int) -> None:
        """Convolve all chunks, with so many threads to copy in either direction; returns when the results are in place."""
        up = [part for parts in self._going_up for part in parts]
        down = [part for parts in self._going_down for part in parts]
        # an exception too must not leave a copy running into memory that is given back: streams end first, then threads
        with ExitStack() as stack:
            feeder = stack.enter_context(closing(_Feeder(self._device, up, threads))) if up else None
            lander = stack.enter_context(closing(_Lander(self._device, down, threads))) if down else None
            for stream in (self._up, self._compute, self._down):
                stack.callback(stream.synchronize)
            self._launch(feeder, lander)

    def _launch(self, feeder: _Feeder | None, lander: _Lander | None) -> None:
        """Queue all copies and kernels."""
        workspace = max(chunk.plan.schedule.workspace_bytes for chunk in self._chunks)
        block = self._device.allocate(workspace) if workspace else 0
        uploaded, computed, downloaded = ([self._device.event() for _ in range(self._depth)] for _ in range(3))
        self._send(feeder, self._going_up[0])
        packed = self._pack()
        for i, chunk in enumerate(self._chunks):
            slot = i % self._depth
            if i >= self._depth:
                self._up.wait_for_event(computed[slot])
            self._send(feeder, self._going_up[i + 1])
            for array, places, part in self._straight:
                self._device.copy_in(places[slot], array, part(chunk, array), self._up)
            uploaded[slot].record(self._up)
            self._compute.wait_for_event(uploaded[slot])
            if i >= self._depth:
                self._compute.wait_for_event(downloaded[slot])
            kept = self._filter
            places = self._inputs[slot], kept.weight, kept.bias, kept.scale, self._residuals[slot], self._outputs[slot], block
            filters = int(packed.get(chunk.plan.filter_key, 0))
            chunk.plan.launch([int(one) for one in places], self._compute, filters)
            computed[slot].record(self._compute)
            self._down.wait_for_event(computed[slot])
            if lander is None:
                self._device.copy_out(self._y, chunk.into(self._y), self._outputs[slot], self._down)
            for down in self._going_down[i]:
                assert lander is not None
                buffer, landed = lander.buffer(down.view)
                self._device.copy_out(landed, landed, down.address, self._down)
                lander.put(buffer, landed, down.view, self._device.recorded(self._down))
            downloaded[slot].record(self._down)
        self._scratch = block, packed  # until the streams have ended

    def _pack(self) -> dict[Hashable, Any]:
        """The filter packed for the chunks, once for all that take it alike: blocks of memory by :attr:`Plan.filter_key`."""
        packed = dict(self._filter.packed)
        wanted = {chunk.plan.filter_key: chunk.plan for chunk in self._chunks if chunk.plan.filter_bytes}
        missing = {key: plan for key, plan in wanted.items() if key not in packed}
        if missing:
            self._compute.wait_for_event(self._device.recorded(self._up))
        for key, plan in missing.items():
            packed[key] = self._device.allocate(plan.filter_bytes)
            plan.pack(int(self._filter.weight), int(packed[key]), self._compute)
        return packed

    def _send(self, feeder: _Feeder | None, parts: Sequence[_Part]) -> None:
        """Let the upward stream copy `parts` to the device."""
        for part in parts:
            assert feeder is not None
            buffer, staged = feeder.take()
            self._device.copy_in(part.address, staged, staged, self._up)
            feeder.free(buffer, self._device.recorded(self._up))


# ---- the call


def convolve(
    plan: Plan, x: np.ndarray, filters: Filter, out: np.ndarray | None, stream: Any = None, devices: Sequence[CudaDevice] = (),
    residual: np.ndarray | None = None,
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
        A stream whose work so far comes first.
    devices : sequence of CudaDevice
        The GPUs to share the work; by default the plan's own.
    residual : numpy array, optional
        As `x`; it may be `out`, or overlap nothing of it.
    """
    if plan.order is None:
        return _convolve(plan, x, filters, out, stream, devices, residual)
    # arrays as they lie in memory: from here on their axes are in that order
    if plan.weight_order is not None:
        filters = Filter(filters.arrays[0].transpose(plan.weight_order), None)
    written = plan.result_order
    out, residual = (a if a is None or written is None else a.transpose(written) for a in (out, residual))
    y = _convolve(plan, x.transpose(plan.order), filters, out, stream, devices, residual)
    return y if written is None else y.transpose(np.argsort(written))


def _convolve(
    plan: Plan, x: np.ndarray, filters: Filter, out: np.ndarray | None, stream: Any, devices: Sequence[CudaDevice],
    residual: np.ndarray | None,
) -> np.ndarray:
    problem, device = plan.problem, plan.device
    shape = plan.result_shape if plan.result_order is None else tuple(plan.result_shape[i] for i in plan.result_order)
    if device.backend != "cuda":
        y = np.empty(shape, problem.storage) if out is None else out
        if not plan.empty:
            if residual is not None and np.may_share_memory(residual, y):
                residual = residual.copy()  # OpenCL's buffers must not overlap
            arrays = (x, *filters.arrays, residual)
            ready = [None if a is None else np.ascontiguousarray(a, dtype=problem.storage) for a in arrays]
            device.run_on_host_arrays(plan.launch, ready, y, plan.workspace_bytes, stream)
        return y
    gpu: Any = device
    with gpu:
        nbytes = plan.result_bytes + sum(plan.operand_bytes)
        if not devices and nbytes <= SMALL_BYTES and not plan.empty:
            return _convolve_small(gpu, plan, x, filters, out, shape, stream, residual, nbytes <= IN_PLACE_BYTES and plan.by_address)
        y = gpu.pinned_or_ordinary(shape, np.dtype(problem.storage)) if out is None else out
        if plan.empty:
            return y
    batch_x, batch_y, batch_r = (a if problem.batched or a is None else a[None] for a in (x, y, residual))
    assert batch_x is not None and batch_y is not None
    chunk_bytes = max(min(CHUNK_BYTES, max(x.nbytes, y.nbytes) // 8), LEAST_CHUNK_BYTES)
    gpus = devices or (gpu,)

    def work(share: int) -> None:
        with gpus[share] as one:
            if stream is not None:
                one.wait_for(stream)
            chunks = _chunks(plan, chunk_bytes, one, share, len(gpus))
            if chunks:
                _Pipeline(one, chunks, batch_x, filters, batch_y, batch_r).run(max(THREADS // len(gpus), 2))

    if len(gpus) == 1:
        work(0)
    else:
        with ThreadPoolExecutor(len(gpus)) as pool:
            for future in [pool.submit(work, share) for share in range(len(gpus))]:
                future.result()
    return y


def _convolve_small(
    gpu: Any, plan: Plan, x: np.ndarray, filters: Filter, out: np.ndarray | None, shape: tuple[int, ...], stream: Any,
    residual: np.ndarray | None, in_place: bool,
) -> np.ndarray:
    """One copy in, the kernels, one copy out: for arrays whose time is all in the calls. The context must be current.

    With `in_place`, the kernels alone, which read and write page-locked memory.
    """
    dtype = np.dtype(plan.problem.storage)
    host, locked, device, own = gpu.small_buffers(2 * SMALL_BYTES)
    in_place = in_place and locked != 0
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
            np.copyto(np.ndarray(array.shape, dtype, host, used), array)
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
            y = np.empty(shape, dtype) if out is None else out  # while the kernels run
        else:
            y = gpu.pinned_or_ordinary(shape, dtype) if out is None else out
            gpu.copy_in(device, host[:used], host[:used], own)
            plan.launch(buffers, own, packed)
            gpu.copy_out(y, y, device + used, own)
    finally:
        own.synchronize()
    if in_place:
        np.copyto(y, np.ndarray(shape, dtype, host, used))
    return y
