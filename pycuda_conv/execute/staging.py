"""Copies between ordinary memory and page-locked memory, by threads of C or of Python.

A GPU copies fast only from and to page-locked memory. So an ordinary array goes through a ring of page-locked buffers part by part. Threads
fill buffers ahead of the copies to the GPU (:class:`_Uploader`), or empty them after the copies from it (:class:`_Downloader`). The threads
of C, where they were built, do both (:class:`_InC`). The copies by threads also put strides and byte order right.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pycuda_conv.runtime.launcher import copier_in_c

if TYPE_CHECKING:
    from pycuda_conv.execute.pipeline import _Lane
    from pycuda_conv.runtime.device import CudaDevice

#: Bytes that one thread copies at a time, and the least that it copies where there is less to share.
PART_BYTES, LEAST_PART_BYTES = 4 << 20, 1 << 20
#: For fewer bytes the launching thread copies parts itself where it would wait, and half as many threads are woken.
HELPED_BYTES = 128 << 20
#: Threads of Python that copy between ordinary and page-locked memory, for each direction of a call. More get in each other's way.
THREADS = min(6, os.cpu_count() or 1)
#: Threads of C for the same, for each direction and GPU of a call.
THREADS_IN_C = 8
#: Threads that copy one array to another. Several such copies may go on at a time.
COPYING = max(1, min(8, (os.cpu_count() or 1) // 4))
#: The least bytes, as fewer are copied before these threads wake up, and the most axes of an array that they copy.
LEAST_MOVED_BYTES, MOST_AXES = 128 << 10, 6
#: numpy copies shorter runs of contiguous bytes.
LEAST_RUN_BYTES = 64


class _Worker(threading.Thread):
    """A thread that runs one job after the other. Idle ones are kept: as many as were ever busy at once.

    It counts as idle before its job counts as done, so that a caller who makes the next call at once finds it.
    """

    _idle: ClassVar[list[_Worker]] = []

    def __init__(self) -> None:
        super().__init__(name="pycuda_conv", daemon=True)
        self._jobs: SimpleQueue[tuple[Callable[[], None], Future[None]]] = SimpleQueue()
        self.start()

    @classmethod
    def submit(cls, job: Callable[[], None]) -> Future[None]:
        """Run `job` in a thread; the future comes when it ends."""
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


def cuts(n: int, count: int) -> list[tuple[int, int]]:
    """The numbers from 0 to `n` in `count` runs, as even as possible: (first, end) of each."""
    return list(pairwise(n * i // count for i in range(count + 1)))


# ---- one array to another


def copy(target: np.ndarray, *places: tuple[np.ndarray, Any]) -> None:
    """Copy arrays to `places` in `target`, which has no gaps: pairs of a view of it and its array. Threads of C do it where they can."""
    copier = copier_in_c() if target.nbytes >= LEAST_MOVED_BYTES else None
    if copier is None or not all(_moves(view, source) for view, source in places):
        for view, source in places:
            view[...] = source
        return
    rows, axis = target.shape[0], 0
    while rows < 4 * COPYING and axis < target.ndim - 1:
        axis += 1
        rows *= target.shape[axis]
    boxes = [_box(target, axis, view[i], source[i]) for view, source in places if view.nbytes for i in np.ndindex(view.shape[:axis])]
    copier.threads(COPYING)
    copier.move(tuple(boxes), rows, -(-rows // max(target.nbytes // LEAST_PART_BYTES, 4 * COPYING)), COPYING)


def _moves(view: np.ndarray, source: Any) -> bool:
    """Whether bytes can be copied as they are."""
    same = isinstance(source, np.ndarray) and source.dtype == view.dtype and source.shape == view.shape
    return same and view.flags.writeable and view.ndim <= MOST_AXES


def _box(target: np.ndarray, axis: int, view: np.ndarray, source: np.ndarray) -> tuple[Any, ...]:
    """A copy to a part of `target`, as ``_copy.c`` takes it. Its rows are counted along `axis`; views lack that axis and those before."""
    axes = max(_runs(view)[0], _runs(source)[0], 1)
    run = math.prod(view.shape[axes:]) * view.itemsize
    source_at, at, start = (a.__array_interface__["data"][0] for a in (source, view, target))
    return source_at, at, (at - start) // target.strides[axis], run, view.shape[:axes], source.strides[:axes], view.strides[:axes]


# ---- to GPUs and back


def part_bytes(total: int, in_c: bool) -> int:
    """Bytes of a part where `total` bytes are to be copied, by threads of C or of Python."""
    return min(PART_BYTES // 2 if in_c else PART_BYTES, max(total // 24, LEAST_PART_BYTES))


def copies(devices: Sequence[CudaDevice], arrays: Sequence[np.ndarray], part_bytes: int, up: bool) -> Any:
    """An object that copies `arrays` to GPUs, or from them, through page-locked buffers."""
    if devices[0].copier is not None and all(map(_for_c, arrays)):
        return _InC(devices, arrays, part_bytes, min(len(devices) * THREADS_IN_C, os.cpu_count() or 1), up)
    cut = [_parts(array, part_bytes) for array in arrays]
    parts, sizes = [part for parts in cut for part in parts], [len(parts) for parts in cut]
    return (_Uploader if up else _Downloader)(devices[0], parts, THREADS, sizes)


@dataclass(frozen=True)
class _Part:
    """A part of a host array, packed on the device, and its place in the array's block there."""

    offset: int
    view: np.ndarray


def _parts(array: np.ndarray, part_bytes: int) -> list[_Part]:
    """`array` cut along its first axis of more than one index, so that each part is packed on the device as well."""
    axis = next((i for i, n in enumerate(array.shape) if n > 1), 0)
    n = array.shape[axis] if array.ndim else 1
    lead = (slice(None),) * axis
    found = []
    for first, end in cuts(n, min(n, max(1, array.nbytes // part_bytes))):
        place = (*lead, slice(first, end))
        found.append(_Part(array.nbytes // n * first, array[place]))
    return found


class _Threads:
    """Threads that copy parts between ordinary memory and a ring of page-locked buffers; closing it waits for them.

    The launching thread meets them in queues only, since the Python code between two copies holds all threads up.
    """

    def __init__(self, device: CudaDevice, parts: Sequence[_Part], threads: int) -> None:
        self._device = device
        self._nbytes = nbytes = max(part.view.nbytes for part in parts)
        #: buffers, each with the events after which it may be used again
        self._free: SimpleQueue[tuple[np.ndarray | None, Sequence[Any]]] = SimpleQueue()
        self._error: BaseException | None = None
        for _ in range(min(threads + 5, len(parts))):
            self._free.put((device.pinned_or_ordinary((nbytes,), np.dtype(np.uint8)), ()))
        self._running: list[Future[None]] = []
        with suppress(RuntimeError):  # the interpreter is about to end and starts no more threads: then there are none
            for _ in range(threads):
                self._running.append(_Worker.submit(self._run))

    def _run(self) -> None:
        try:
            with self._device.lent():
                self.work()
        except BaseException as error:
            self._error = error
            for _ in range(THREADS + 1):  # wake all threads that wait for a buffer
                self._free.put((None, ()))
            self.failed()
            raise

    def failed(self) -> None:
        """Wake the launching thread after an error."""

    def work(self) -> None:
        """The work of each thread."""
        raise NotImplementedError

    def buffer(self, view: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A free buffer, and its beginning as an array like `view` in the device's byte order."""
        buffer, until = self._free.get()
        if buffer is None:
            raise RuntimeError("copying to or from page-locked memory failed") from self._error
        for event in until:
            event.synchronize()
        return buffer, buffer[: view.nbytes].view(view.dtype.newbyteorder("=")).reshape(view.shape)

    def free(self, buffer: np.ndarray, *until: Any) -> None:
        """Let `buffer` be used again once these events have come."""
        self._free.put((buffer, until))

    def close(self) -> None:
        """Wait for all threads; if one of them failed, its error is raised."""
        wait(self._running)
        for future in self._running:
            future.result()


class _Uploader(_Threads):
    """Fills buffers with `parts` in their order, ahead of the copies to the device."""

    def __init__(self, device: CudaDevice, parts: Sequence[_Part], threads: int, sizes: Sequence[int] = ()) -> None:
        total = sum(part.view.nbytes for part in parts)
        #: whether the launching thread copies as well
        self._helped = total < HELPED_BYTES
        self._offsets, self._sizes = [part.offset for part in parts], deque(sizes)
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
        """Stage one part. False if no part is left or, without `wait`, if no buffer is free."""
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
        np.copyto(staged, part.view)  # also puts strides and byte order right
        self._filled.put((number, buffer, staged))
        return True

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """The next part in order, once it is filled: its buffer, which has to be given back, and the part."""
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

    def send(self, targets: Sequence[tuple[_Lane, int]]) -> None:
        """Copy the next array to blocks of memory on GPUs, given by their addresses; each part goes to all of them from one buffer."""
        for _ in range(self._sizes.popleft()):
            buffer, staged = self.take()
            offset, events = self._offsets[self._taken - 1], []
            for lane, address in targets:
                device = lane.device
                with device.current():
                    device.copy_in(address + offset, staged, staged, lane.up)
                    events.append(lane.recorded(lane.up))
            self.free(buffer, *events)

    def failed(self) -> None:
        self._filled.put(None)

    def close(self) -> None:
        self._closed = True  # after an exception nobody takes the rest or gives buffers back
        for _ in self._running:
            self.free(np.empty(self._nbytes, np.uint8))
        super().close()
        while not self._free.empty():
            self._free.get()  # events have to go while their GPU's context is current


class _Downloader(_Threads):
    """Empties buffers into ordinary memory, each after its copy from the device."""

    def __init__(self, device: CudaDevice, parts: Sequence[_Part], threads: int, sizes: Sequence[int] = ()) -> None:
        self._landed: SimpleQueue[tuple[np.ndarray, np.ndarray, np.ndarray, Any] | None] = SimpleQueue()
        self._coming, self._sizes = deque(parts), deque(sizes)
        total = sum(part.view.nbytes for part in parts)
        super().__init__(device, parts, max(1, min(threads, len(parts), total // PART_BYTES)))

    def work(self) -> None:
        while (item := self._landed.get()) is not None:
            buffer, landed, place, arrived = item
            arrived.synchronize()
            np.copyto(place, landed)
            self.free(buffer)

    def receive(self, lane: _Lane, address: int) -> None:
        """Copy the next array from a block of memory on a GPU, whose context is current."""
        for _ in range(self._sizes.popleft()):
            part = self._coming.popleft()
            buffer, landed = self.buffer(part.view)
            lane.device.copy_out(landed, landed, address + part.offset, lane.down)
            self.put(buffer, landed, part.view, lane.recorded(lane.down))

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


class _InC:
    """The work of :class:`_Uploader` and :class:`_Downloader` by threads that hold nobody up: those of ``runtime/_copy.c``."""

    def __init__(self, devices: Sequence[CudaDevice], arrays: Sequence[np.ndarray], part_bytes: int, threads: int, up: bool) -> None:
        device = devices[0]
        self._device, self._native, self._numbers = device, device.copier, {one: i for i, one in enumerate(devices)}
        described, sizes, largest = zip(*(_described(array, part_bytes) for array in arrays), strict=True)
        self._sizes = deque(sizes)
        slots, nbytes = min(max(2 * threads, 4), sum(sizes)), max(largest)
        ring = device.pinned_or_ordinary((slots * nbytes,), np.dtype(np.uint8))
        self._next = 0
        contexts = tuple(one.handle for one in devices)
        address = ring.__array_interface__["data"][0]
        job = self._native.job(device.copy_functions, up, described, address, nbytes, slots, contexts, threads, (ring, arrays))
        if isinstance(job, int):
            device.check_code(job, "creating events")
        self._job = job
        self._native.threads(min(len(devices) * 3 * THREADS_IN_C, os.cpu_count() or 1))

    def send(self, targets: Sequence[tuple[_Lane, int]]) -> None:
        """The same as :meth:`_Uploader.send`."""
        count = self._sizes.popleft()
        at_once = count if len(targets) == 1 else 1
        for _ in range(0, count, at_once):
            for lane, address in targets:
                last = lane is targets[-1][0]
                code = self._native.send(self._job, self._next, at_once, self._numbers[lane.device], address, lane.up.handle, last)
                self._device.check_code(code, "copying to the GPU")
            self._next += at_once

    def receive(self, lane: _Lane, address: int) -> None:
        """The same as :meth:`_Downloader.receive`."""
        count = self._sizes.popleft()
        code = self._native.receive(self._job, self._next, count, self._numbers[lane.device], address, lane.down.handle, True)
        self._device.check_code(code, "copying from the GPU")
        self._next += count

    def close(self) -> None:
        """Wait for the threads; if one failed, its error is raised."""
        self._device.check_code(self._native.close(self._job), "copying through page-locked memory")


def _runs(view: np.ndarray) -> tuple[int, int]:
    """How many of the first axes of `view` are made of runs, and the bytes of a run, which is contiguous."""
    axes, run = view.ndim, view.itemsize
    while axes and (view.strides[axes - 1] == run or view.shape[axes - 1] == 1):
        axes -= 1
        run *= view.shape[axes]
    return axes, run


def _described(array: np.ndarray, part_bytes: int) -> tuple[tuple[Any, ...], int, int]:
    """An array as ``_copy.c`` takes it, the number of its parts, and the bytes of its largest part."""
    axes, run = _runs(array)
    if axes:
        axis = next(i for i, n in enumerate(array.shape) if n > 1)
        rows = array.shape[axis]
        row = array.nbytes // rows
        step = min(max(1, part_bytes // row), rows)
    else:
        axis, rows, row, step = -1, array.nbytes, 1, min(-(-part_bytes // 4096) * 4096, array.nbytes)
    address = array.__array_interface__["data"][0]
    return (address, array.nbytes, run, array.shape[:axes], array.strides[:axes], axis, step), -(-rows // step), step * row


def _for_c(array: np.ndarray) -> bool:
    """Whether ``_copy.c`` can copy an array, and no slower than numpy would."""
    axes, run = _runs(array)
    return array.dtype.isnative and axes <= 6 and (run >= LEAST_RUN_BYTES or not axes)
