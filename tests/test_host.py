"""numpy in, numpy out: pieces, page-locked memory, the threads that copy, and the pipeline on three streams.

The pipeline's tests run on a GPU where there is one, and everywhere on a simulated one: its streams are threads that dawdle
at random, its memory is NaN before it is written and after it is freed, its kernels are PoCL's. What is not ordered by an
event, or is given back too early, comes out wrong there.
"""

import ctypes
import gc
import importlib
import itertools
import math
import os
import pickle
import random
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from conftest import why_no_cuda, why_no_opencl
from hypothesis import assume, example, given, settings
from reference import DTYPES, Case, dgrad, fprop, python, tensor

import pycuda_conv as pc
from pycuda_conv import BackendError, ConvArgumentError, DeviceMemoryError, Plan, engines, memo, runtime
from pycuda_conv.arrays.device import CopyArguments
from pycuda_conv.engines.direct.gemm import Gemm
from pycuda_conv.engines.geometry import divider
from pycuda_conv.engines.hopper.gemm import ImplicitGemm
from pycuda_conv.engines.mma.gemm import ImplicitGemm80
from pycuda_conv.engines.schedule import PACKED, WEIGHT, Schedule
from pycuda_conv.execute import pipeline as host
from pycuda_conv.execute import several_gpus, staging
from pycuda_conv.execute.pieces import pieces
from pycuda_conv.problem import DTYPE_CODES
from pycuda_conv.runtime import KernelLaunch, contexts, copies, driver, get_device, pinned
from pycuda_conv.runtime import device as device_module
from pycuda_conv.runtime import streams as streams_module
from pycuda_conv.runtime.opencl import opencl_device
from pycuda_conv.runtime.pinned import PinnedPool

try:
    COPIER = importlib.import_module("pycuda_conv.runtime._copy")
except ImportError:
    COPIER = None

needs_copier = pytest.mark.skipif(COPIER is None, reason="the threads in C were not built")
SOAK = int(os.environ.get("PYCUDA_CONV_SOAK", "100"))


PATIENCE = 300  # seconds, on a machine that is slow or busy


def within(work, *args):
    """What `work` gives; a test that hangs fails instead."""
    done = []

    def run():
        try:
            done.append((work(*args), None))
        except BaseException as error:
            done.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if not done:
        pytest.fail(f"still running after {PATIENCE} s; busy: {busy()}")
    result, error = done.pop()
    if error is not None:
        raise error
    return result


_given_up = set()  # threads that an earlier test found waiting for ever


def busy():
    """The pool's threads that are in the midst of a call's work, and where."""
    ours = {t.ident for t in threading.enumerate() if t.name.startswith("pycuda_conv")} - _given_up
    found = {}
    for ident, frame in sys._current_frames().items():
        while ident in ours and frame is not None and frame.f_code is not staging._Worker.run.__code__:
            if frame.f_code.co_filename in (host.__file__, staging.__file__):
                found[ident] = f"in {frame.f_code.co_name}, line {frame.f_lineno}"
                break
            frame = frame.f_back
    return found


def settle():
    """No thread of the pool is left waiting for something."""
    end = time.monotonic() + PATIENCE
    while waiting := busy():
        if time.monotonic() > end:
            _given_up.update(waiting)
            pytest.fail(f"threads still wait: {list(waiting.values())}")
        time.sleep(0.002)


# ---- pieces


@st.composite
def cases(draw, longest=20) -> Case:
    transposed, ndim, groups = draw(st.booleans()), draw(st.integers(1, 3)), draw(st.integers(1, 2))

    def some(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(ndim))

    size = (draw(st.integers(1, longest)), *some(1, 6)[1:])
    options = {"stride": some(1, 4), "dilation": some(1, 3), "groups": groups}
    options["padding"] = tuple(zip(some(0, 9), some(0, 9), strict=True))
    if transposed:
        options["output_padding"] = tuple(
            draw(st.integers(0, max(s, d) - 1)) for s, d in zip(options["stride"], options["dilation"], strict=True)
        )
    channels, other = groups * draw(st.integers(1, 2)), draw(st.integers(1, 2))
    weight = (channels, other) if transposed else (groups * other, channels // groups)
    batch = draw(st.sampled_from([(), (1,), (2,), (5,)]))
    case = Case(transposed, (*batch, channels, *size), (*weight, *some(1, 4)), options, bias=False)
    try:
        case.problem()
    except ConvArgumentError:
        assume(False)
    return case


CHUNK_SIZES = st.one_of(st.integers(1, 100), st.integers(1, 5000), st.just(1 << 40))
BESIDE = [  # bands that lie in the padding alone, before and after a short image; bands between two taps
    fprop((2, 1, 2, 3), (1, 1, 2, 1), bias=False, padding=((9, 9), (0, 0))),
    fprop((1, 1, 1), (1, 1, 1), bias=False, padding=((0, 9),), stride=3),
    dgrad((2, 1, 3, 2), (1, 1, 1, 1), bias=False, stride=4, output_padding=3),
    dgrad((1, 1, 2), (1, 1, 2), bias=False, stride=2, dilation=9, output_padding=8),
]


@settings(max_examples=60)
@given(case=cases(), chunk_bytes=CHUNK_SIZES)
@example(BESIDE[0], 8)
@example(BESIDE[1], 4)
@example(BESIDE[2], 8)
@example(BESIDE[3], 4)
def test_pieces_cover_the_result_once_and_make_up_the_whole(opencl, case, chunk_bytes):
    problem = case.problem()
    x, w, _ = case.integers("float32")
    x = x if problem.batched else x[None]
    whole = np.full(problem.result_shape if problem.batched else (1, *problem.result_shape), np.nan)
    written, cut = np.zeros(whole.shape, int), pieces(problem, chunk_bytes)
    for piece in cut:
        place, part, p = (piece.images, slice(None), piece.rows_out), x[piece.images, :, piece.rows_in], piece.problem
        assert part.shape == (p.N, p.operand_channels, *p.operand_size[-p.ndim :]) and 0 not in part.shape
        assert whole[place].shape == (p.N, p.result_channels, *p.result_size[-p.ndim :])
        whole[place] = Plan(p, "opencl")(part.reshape(p.input_shape), w).reshape(whole[place].shape)
        written[place] += 1
    assert (written == 1).all() and np.array_equal(whole, case.reference(x, w).reshape(whole.shape))
    assert cut == pieces(replace(problem), chunk_bytes)
    image = max(math.prod(shape) for shape in (problem.input_shape, problem.result_shape)) * 4 // problem.N
    if len(cut) > 1 and image <= 2 * chunk_bytes:
        assert all(piece.problem.N * image <= max(chunk_bytes, image) for piece in cut)
    if image > 2 * chunk_bytes:
        longest = max(piece.rows_out.stop - piece.rows_out.start for piece in cut)
        assert longest <= max(1, -(-problem.result_size[3 - problem.ndim] * chunk_bytes // image))


class Planned(SimpleNamespace):
    """What the pieces ask of a plan."""

    def __init__(self, problem, device, config, fixed=False):
        super().__init__(problem=problem, config=config, fixed=fixed)


@pytest.mark.parametrize(("case", "chunk_bytes", "capability"), [
    (fprop((7, 16, 30, 30), (32, 16, 3, 3), padding=1), 20_000, (7, 0)), (dgrad((1, 16, 99, 30), (16, 20, 3, 3), stride=2), 20_000, (7, 0)),
    (fprop((1, 2, 5), (1, 2, 5)), 20_000, (7, 0)),
    *((fprop((7, 64, 60, 60), (64, 64, 3, 3), padding=1), 2_000_000, capability) for capability in ((7, 0), (9, 0))),
])  # fmt: skip
def test_all_pieces_have_one_configuration(case, chunk_bytes, capability):
    device = SimpleNamespace(multiprocessors=132, backend="cuda", capability=capability, model="")
    plan = Planned(case.problem(), device, engines.choose(case.problem(), device))
    seen = host._chunks.__wrapped__(plan, chunk_bytes, device)
    configs = {chunk.plan.config for chunk in seen}
    assert [chunk.piece for chunk in seen] == pieces(plan.problem, chunk_bytes) and len(configs) == 1
    if capability == (9, 0):
        assert len({engines.filter_key(chunk.piece.problem, *configs) for chunk in seen}) == 1 and isinstance(*configs, ImplicitGemm)
    mine = Planned(case.problem(), device, Gemm(64, 64, 8, 4, 4, 1), fixed=True)
    assert {chunk.plan.config for chunk in host._chunks.__wrapped__(mine, chunk_bytes, device)} == {mine.config}, "the caller's configuration"


def test_plans_with_equal_filter_keys_pack_a_filter_alike():
    """Whatever the images: number, size, padding, layout."""
    seen = {}
    for config in (ImplicitGemm(64, 64, 3), ImplicitGemm80()):
        device = SimpleNamespace(multiprocessors=132, capability=(9, 0) if isinstance(config, ImplicitGemm) else (8, 0))
        for channels, groups, dtype, n, size, padding, stride, layout in itertools.product(
            (3, 64), (1, 2), ("float32", "bfloat16"), (1, 5), ((9, 9), (40, 300)), (0, 2), (1, 2, 9), ("NCHW", "NHWC")
        ):
            case = fprop((n, channels * groups, *size), (32, channels, 3, 5), padding=padding, stride=stride, groups=groups)
            problem = replace(case.problem(dtype), layout=layout)
            if engines.refusal(problem, config, device):
                continue
            ((step,),) = engines.schedule(problem, config, device).prepare
            defines = {name: value for name, value in step.defines.items() if name not in ("NHWC", "VECTOR", "CLUSTER")}  # of the images
            names = step.arguments._fields[step.arguments._fields.index("rows_group") :] + (
                "filter_rows", "row_bits", "channels", "slack", "folds", "fold_r", "fold_s"
            )
            args = {name: getattr(step.arguments, name) for name in names}
            taken = step.kernel, step.grid, defines, step.buffers[1], step.buffers[-4:], args
            assert seen.setdefault(engines.filter_key(problem, config), taken) == taken
    assert len(seen) > 8 and None not in seen
    assert engines.filter_key(problem, Gemm()) is None


# ---- page-locked memory


class Library:
    """The driver's calls for page-locked memory, on ordinary memory."""

    def __init__(self, most=1 << 62):
        self.blocks, self.most, self._lock = {}, most, threading.Lock()

    def cuMemHostAlloc(self, reference, nbytes, flags):
        assert flags == 1
        with self._lock:
            if sum(block.nbytes for block in self.blocks.values()) + nbytes > self.most:
                return 2
            block = np.full(nbytes, 0xFF, np.uint8)
            self.blocks[block.ctypes.data] = block
            reference._obj.value = block.ctypes.data
        return 0

    def cuMemFreeHost(self, address):
        with self._lock:
            del self.blocks[address]
        return 0

    def cuGetErrorName(self, code, reference):
        reference._obj.value = b"CUDA_ERROR_ILLEGAL_ADDRESS, an illegal address" if code == 700 else None

    def cuPointerGetAttribute(self, reference, attribute, pointer):
        assert attribute == 2
        with self._lock:
            if not any(start <= pointer < start + block.nbytes for start, block in self.blocks.items()):
                return 1
        reference._obj.value = 1
        return 0


MB = 1 << 20


def address(array):
    return array.__array_interface__["data"][0]


def test_a_block_comes_back_with_the_last_view_and_is_used_again():
    pool = PinnedPool(Library(), 10 * MB)
    array = pool.empty((4, 3, 5), "f8")
    assert array.shape == (4, 3, 5) and array.dtype == np.float64 and array.flags.c_contiguous and array.flags.writeable
    array[...] = np.arange(60).reshape(4, 3, 5)
    first = address(array)
    views = [array[1:], array.reshape(-1)[::2], array.T, array.view("i8"), np.asarray(array)[2, 1], memoryview(array)]
    copy = pickle.loads(pickle.dumps(array))
    del array
    while views:
        gc.collect()
        assert pool.lent == pool.locked == pinned._rounded(480)
        assert address(pool.empty((4, 3, 5), "f8")) != first
        pool.trim()
        views.pop()
    assert pool.lent == 0 and pool.locked > 0
    assert address(pool.empty((60,), "f8")) == first
    assert copy[3, 2, 4] == 59 and copy.flags.owndata


def test_the_limit_is_kept_and_idle_blocks_make_room():
    library = Library()
    pool = PinnedPool(library, 4 * MB)
    held = [pool.empty((MB,), "u1") for _ in range(4)]
    assert pool.empty((1,), "u1") is None and pool.locked == pool.lent == 4 * MB
    held.pop()
    assert pool.empty((2 * MB,), "u1") is None  # the idle block was given back, but that is not enough
    assert pool.locked == pool.lent == 3 * MB == sum(b.nbytes for b in library.blocks.values())
    held.clear()
    assert pool.lent == 0 and pool.locked == 3 * MB
    held.append(pool.empty((4 * MB,), "u1"))
    assert pool.lent == pool.locked == held.pop().nbytes == sum(b.nbytes for b in library.blocks.values())
    pool.trim()
    assert pool.locked == 0 and not library.blocks
    assert PinnedPool(library, 0).empty((1,), "f4") is None
    refusing = PinnedPool(Library(most=MB), 1 << 40)
    assert refusing.empty((2 * MB,), "u1") is None and refusing.locked == refusing.lent == 0


def test_threads_share_the_pool_and_garbage_may_be_collected_at_any_moment():
    """A loan may end inside the pool's own lock: cycles keep arrays until a collection, which any allocation may start."""
    library = Library()
    pool = PinnedPool(library, 40 * MB)
    threshold = gc.get_threshold()

    def work(seed):
        rng, held = random.Random(seed), []
        for i in range(300):
            array = pool.empty((rng.randrange(1, 3) * 100_000,), "u1")
            if array is not None:
                array[[0, -1]] = seed
                cycle = [array]
                cycle.append(cycle)  # only the collector finds it
                held.append(cycle)
            if len(held) > 5:
                taken = held.pop(rng.randrange(len(held)))[0]
                assert taken[0] == taken[-1] == seed
            if i % 50 == 0:
                pool.trim()
        return all(cycle[0][0] == cycle[0][-1] == seed for cycle in held)

    gc.set_threshold(5, 2, 2)
    try:
        with ThreadPoolExecutor(8) as threads:
            assert all(within(lambda: list(threads.map(work, range(8)))))
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert pool.lent == 0 and pool.locked == sum(block.nbytes for block in library.blocks.values()) <= pool.limit
    pool.trim()
    assert not library.blocks and pool.locked == 0


def test_the_limit_s_environment_variable(monkeypatch):
    monkeypatch.delenv("PYCUDA_CONV_PINNED_LIMIT", raising=False)
    assert 0 < pinned.default_limit() < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for text, value in (("0", 0), ("123456789", 123456789)):
        monkeypatch.setenv("PYCUDA_CONV_PINNED_LIMIT", text)
        assert pinned.default_limit() == value
    for text in ("", "-1", "1e9", "4G", "0x10", "²"):
        monkeypatch.setenv("PYCUDA_CONV_PINNED_LIMIT", text)
        with pytest.raises(ConvArgumentError, match=r"PYCUDA_CONV_PINNED_LIMIT must be a number of bytes, got '"):
            pinned.default_limit()


# ---- a simulated GPU


class Event:
    def __init__(self, flags=0):
        self.mark = None

    def record(self, stream):
        self.mark = threading.Event()
        stream.put(self.mark.set, always=True)
        self._stream = stream
        return self

    def synchronize(self):
        if self.mark is not None:
            assert self.mark.wait(PATIENCE)
            self._stream.device.check()

    def query(self):
        if self.mark is not None:
            self._stream.device.check()
        return self.mark is None or self.mark.is_set()


_streams = weakref.WeakValueDictionary()  # by their handles


class Stream:
    """Work is done in order, some time later, by a thread."""

    handles = itertools.count(1)

    def __init__(self, device):
        self.device, self.handle, self._work, self._thread = device, next(self.handles), None, None
        _streams[self.handle] = self

    def put(self, work, always=False):
        if self._thread is None:
            self._work = SimpleQueue()
            self._thread = threading.Thread(target=self._run, args=(self._work, self.device, self.handle), daemon=True)
            self._thread.start()
        self._work.put((work, always))

    @staticmethod
    def _run(queue, device, seed):
        rng = random.Random(seed)
        while (item := queue.get()) is not None:
            if rng.random() < 0.2:
                time.sleep(rng.random() / 2000)
            work, always = item
            if always or device.broken is None:
                try:
                    work()
                except Exception as error:
                    device.broken = error
            del item, work

    def __del__(self):
        if self._work is not None:
            self._work.put(None)

    def wait_for_event(self, event):
        mark = event.mark
        if mark is not None:
            self.put(lambda: mark.wait(PATIENCE) or sys.exit("a stream waited for minutes"))

    def synchronize(self):
        Event().record(self).synchronize()


class Streams:
    def __init__(self):
        device = Simulated.contexts[-1]
        self.main, self.up, self.down = (Stream(device) for _ in range(3))
        self.small = None

    def order(self, first, second):
        if first and second:
            _streams[second].wait_for_event(Event().record(_streams[first]))


def to_device(target, array, stream):
    """As :mod:`pycuda_conv.runtime.copies` copies, to a simulated GPU."""
    stream.device.copy(int(target), address(array), array.nbytes, stream, array, True)


def to_host(array, source, stream):
    stream.device.copy(address(array), int(source), array.nbytes, stream, array, False)


def in_2d(source, target, rows, stream):
    """In the terms of the driver, which takes pitches below 2^31 bytes."""
    assert max(source["pitch"], target["pitch"]) < 2**31, "cuMemcpy2DAsync failed: invalid argument"
    assert rows["width"] <= min(source["pitch"], target["pitch"])
    inward = target["kind"] == copies.DEVICE
    for y in range(rows["height"]):
        at, to = (
            end[("host", "device")[end["kind"] - 1]] + (end.get("y", 0) + y) * end["pitch"] + end.get("x", 0) for end in (source, target)
        )
        host = np.frombuffer((ctypes.c_uint8 * rows["width"]).from_address(at if inward else to), np.uint8)
        stream.device.copy(to, at, rows["width"], stream, host, inward)


class Block:
    """Device memory: NaN until it is written, and again once it is freed."""

    def __init__(self, device, nbytes):
        self._memory, self.nbytes = device.memory, nbytes
        self._whole = np.full(nbytes + 256, 0xFF, np.uint8)
        self._at = -(-address(self._whole) // 256) * 256
        self._memory[self._at] = self._whole[self._at - address(self._whole) :][:nbytes]

    def __int__(self):
        return self._at

    def free(self):
        array = self._memory.pop(self._at, None)
        if array is not None:
            array.fill(0xFF)

    __del__ = free


class Current:
    """Each thread's stack of contexts. What a thread of C keeps in ``threading.local`` is gone at its next call."""

    def __init__(self):
        self._stacks = {}

    @property
    def stack(self):
        return self._stacks.setdefault(threading.get_ident(), [])

    def __getitem__(self, i):
        return self.stack[i]


class Simulated(device_module.CudaDevice):
    """A CudaDevice with everything but the driver: what it calls runs on the host, kernels on PoCL."""

    contexts = Current()

    def __init__(self, ordinal):
        # without the tensor cores' engines
        self.ordinal, self.name, self.multiprocessors, self.capability = ordinal, f"cuda:{ordinal}", 132, (7, 0)
        self.push, self.pop = lambda: self.contexts.stack.append(self), lambda: self.contexts.stack.pop()
        self._threads, self._idle_streams, self.blocks, self.memory = threading.local(), [], weakref.WeakSet(), {}
        self.broken, self.launched, self.fail = None, 0, None
        self.copier, self.handle, self.where, self.is_current = None, ordinal + 1, ordinal, bool
        self._idle_events, self.plans = [], weakref.WeakKeyDictionary()
        self.pool = SimpleNamespace(from_driver=self._lasting, free_held=lambda: None)
        self._lasting_blocks = []

    def lent(self):
        return self.current()

    def _lasting(self, nbytes):
        self._lasting_blocks.append(Block(self, nbytes))
        return int(self._lasting_blocks[-1])

    def event(self):
        return Event(2)

    def check(self):
        if self.broken is not None:
            raise RuntimeError(f"the context is broken: {self.broken!r}")

    def allocate(self, nbytes):
        assert self.contexts[-1] is self and nbytes > 0
        block = Block(self, nbytes)
        self.blocks.add(block)
        return block

    def _find(self, at, nbytes=1, locked=False):
        memory = self.memory.copy()  # in one step: other threads allocate and free
        for start, array in (memory | driver.libcuda().blocks if locked else memory).items():
            if start <= at and at + nbytes <= start + array.nbytes:
                return array[at - start :]
        raise RuntimeError(f"{nbytes} bytes at {at:#x} are not in the memory of {self.name}")

    def copy(self, target, source, nbytes, stream, array, to_device):
        """An asynchronous copy; ordinary memory is read, or written, before this returns."""
        assert self.contexts[-1] is self and array.dtype.isnative
        self.check()
        locked = self.is_pinned(array)
        if to_device:
            data = None if locked else ctypes.string_at(source, nbytes)
            stream.put(lambda: ctypes.memmove(self._find(target, nbytes).ctypes.data, source if locked else data, nbytes))
        else:
            stream.put(lambda: ctypes.memmove(target, self._find(source, nbytes).ctypes.data, nbytes))
            if not locked:
                stream.synchronize()

    @property
    def copy_functions(self):
        return tuple(ctypes.cast(function, ctypes.c_void_p).value for function in DriverInC.functions)

    def compiled(self, step):
        return True

    def compile_all(self, steps):
        pass

    def schedule_launcher(self, steps):
        launchers = [self._step_launcher(step) for step in steps]

        def launch(buffers, stream):
            for launcher in launchers:
                launcher(buffers, stream)

        return launch

    def _step_launcher(self, step):
        cl = opencl_device()
        launchers = [cl.launcher(launch) for launch in step]

        def launch(buffers, stream):
            assert self.contexts[-1] is self
            self.check()

            def work():
                self.launched += 1
                if self.launched == self.fail:
                    raise RuntimeError("an illegal address was encountered")
                flags = cl._cl.mem_flags
                arrays = [self._find(at, locked=True) if at else None for at in buffers]
                memory = [
                    None if a is None else cl._cl.Buffer(cl.context, flags.READ_WRITE | flags.USE_HOST_PTR, hostbuf=a) for a in arrays
                ]
                with cl._lock:
                    for launcher in launchers:
                        launcher(memory, None)
                    for i in range(3, len(memory)):
                        if memory[i] is not None:
                            cl._cl.enqueue_copy(cl.queue, arrays[i], memory[i])

            stream.put(work)

        return launch


class DriverInC:
    """The driver's functions that threads of C call, for simulated devices, in C's order. A call fails if `failing` of its name is true."""

    events, failing, functions = {}, None, []

    def takes(*kinds, functions=functions):
        def declared(function):
            def call(*args):
                try:
                    if DriverInC.failing is None or not DriverInC.failing(function.__name__):
                        function(*args)
                        return 0
                except Exception:
                    pass
                return 700

            functions.append(ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(call))
            return function

        return declared

    word, pointer, size, place = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p)

    @takes(word, pointer, size, pointer)
    def copy_in(at, source, nbytes, stream):
        view = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(source), np.uint8)
        _streams[stream].device.copy(at, source, nbytes, _streams[stream], view, True)

    @takes(pointer, word, size, pointer)
    def copy_out(target, at, nbytes, stream):
        view = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(target), np.uint8)
        _streams[stream].device.copy(target, at, nbytes, _streams[stream], view, False)

    @takes(place, ctypes.c_uint)
    def create(place, flags):
        event = Event(flags)
        DriverInC.events[id(event)] = event, Simulated.contexts[-1]
        place[0] = id(event)

    @takes(pointer)
    def destroy(event):
        del DriverInC.events[event]

    @takes(pointer, pointer)
    def record(event, stream):
        known, device = DriverInC.events[event]
        assert _streams[stream].device is device is Simulated.contexts[-1]
        known.record(_streams[stream])

    @takes(pointer)
    def synchronize(event):
        known, device = DriverInC.events[event]
        assert device is Simulated.contexts[-1]
        known.synchronize()

    @takes(pointer)
    def push(context):
        Simulated.contexts.stack.append(contexts._primaries[context - 1])

    @takes(place)
    def pop(place):
        place[0] = Simulated.contexts.stack.pop().handle


def forget_plans():
    memo.forget_plans()
    host._chunks.cache_clear()
    several_gpus._kernel_seconds.cache_clear()


@pytest.fixture
def simulated(monkeypatch, opencl):
    """Two simulated GPUs in the place of real ones."""
    library = Library()
    pool = PinnedPool(library, 1 << 30)
    drv = SimpleNamespace(Device=SimpleNamespace(count=lambda: 2), Event=Event, MemoryError=MemoryError)
    for target, name, value in (
        (driver, "libcuda", lambda: library), (driver, "pinned", lambda: pool), (driver, "pycuda", lambda: drv), (streams_module, "Streams", Streams),
        (contexts, "_primaries", {i: Simulated(i) for i in range(2)}), (runtime, "default_backend", lambda: "cuda"),
        (copies, "to_device", to_device), (copies, "to_host", to_host), (copies, "in_2d", in_2d), (contexts, "pycuda_handle", lambda: 0),
    ):  # fmt: skip
        monkeypatch.setattr(target, name, value)
    forget_plans()
    devices = list(contexts._primaries.values())
    yield devices
    forget_plans()
    settle()
    assert not Simulated.contexts.stack


@pytest.fixture
def in_c(simulated, monkeypatch):
    """Two simulated GPUs whose arrays are copied by threads of C, however short their runs are."""
    monkeypatch.setattr(staging, "LEAST_RUN_BYTES", 1)
    for device in simulated:
        device.copier = COPIER
    yield simulated
    DriverInC.failing = None
    assert not DriverInC.events


@pytest.fixture(params=["simulated", pytest.param("in_c", marks=needs_copier), pytest.param("cuda", marks=pytest.mark.gpu)])
def gpus(request):
    """The GPUs: simulated ones, or the machine's."""
    gc.collect()
    gc.freeze()  # what `memory` searches for garbage is then the test's own
    if request.param != "cuda":
        return request.getfixturevalue(request.param)
    return [get_device(i) for i in range(driver.pycuda().Device.count())]


@pytest.fixture
def gpu(gpus):
    return gpus[0]


@pytest.fixture
def cut(monkeypatch):
    """cut(chunk_bytes, part_bytes): arrays of any size go through the pipeline in such chunks and parts, on all GPUs that are named."""
    monkeypatch.setattr(host, "gpus_that_pay", lambda plan, gpus, *_: (len(gpus), bool))

    def patch(chunk_bytes=2000, part_bytes=500, threads=3):
        for name, value in (
            ("SMALL_BYTES", 0), ("CHUNK_BYTES", chunk_bytes), ("LEAST_CHUNK_BYTES", min(chunk_bytes, 2000)), ("PART_BYTES", part_bytes),
            ("LEAST_PART_BYTES", min(part_bytes, 100)), ("THREADS", threads),
        ):  # fmt: skip
            monkeypatch.setattr(host if hasattr(host, name) else staging, name, value)

    patch()
    return patch


def call(case, x, w, b=None, **options):
    return getattr(pc, f"conv{'_transpose' if case.transposed else ''}{case.ndim}d")(x, w, b, **case.options, **options)


def locked(gpu, array):
    """A page-locked copy."""
    with gpu:
        copy = gpu.pinned_or_ordinary(array.shape, array.dtype)
        assert gpu.is_pinned(copy)
    copy[...] = array
    return copy


def memory(gpus):
    """(blocks in use on the devices, bytes of page-locked memory lent)."""
    gc.collect()
    return [len(gpu.blocks) if isinstance(gpu, Simulated) else gpu.pool.in_use for gpu in gpus], driver.pinned().lent


IMAGES = fprop((13, 3, 9, 10), (5, 3, 3, 2), padding=1)
ROWS = fprop((2, 3, 61, 11), (4, 3, 5, 3), padding=((3, 9), (1, 0)), stride=(2, 1))
BANDS = dgrad((2, 4, 30, 6), (4, 3, 3, 2), padding=((1, 2), (0, 1)), stride=(2, 1))
WAYS = {
    "images": IMAGES, "rows": ROWS, "transposed rows": BANDS, "transposed images": dgrad((9, 4, 5, 6), (4, 3, 3, 2), stride=2),
    "one axis": fprop((1, 2, 3001), (3, 2, 5), padding=2), "three axes": fprop((2, 4, 20, 5, 6), (4, 2, 3, 2, 1), groups=2, dilation=(2, 1, 1)),
    "unbatched": fprop((3, 61, 11), (4, 3, 5, 3), bias=False), "depthwise": fprop((2, 4, 40, 12), (4, 1, 3, 3), groups=4, padding=1),
}  # fmt: skip


@pytest.fixture
def packing(monkeypatch):
    """Plans on simulated GPUs take their filters packed: copied. The list is of every packing: its bytes."""
    original, packed, pack = engines.schedule, [], Plan.pack

    def program(problem, config, device, with_moments=False):
        plain = original(problem, config, device)
        if device.backend != "cuda":
            return plain
        size = math.prod(problem.weight_shape)
        defines = {"DTYPE": DTYPE_CODES[problem.dtype], "INDEX_64": 0, "THREADS": 256}
        one, whole = divider(1), divider(size)
        arguments = CopyArguments(size, 1, 1, 1, size, one, one, one, whole, 0, 0, 0, 0, 1)
        copy = KernelLaunch("copy_strided", defines, -(-size // 256), 256, (WEIGHT, PACKED), (), arguments=arguments)
        stages = [
            [replace(step, buffers=tuple(PACKED if i == WEIGHT else i for i in step.buffers)) for step in stage] for stage in plain.steps
        ]
        return Schedule([[copy]], stages, [[copy], *stages], -(-plain.workspace_bytes // 256) * 256, size * problem.itemsize)

    def counted(plan, *args):
        packed.append(plan.filter_bytes)
        pack(plan, *args)

    monkeypatch.setattr(engines, "schedule", program)
    monkeypatch.setattr(engines, "filter_key", lambda problem, config: (problem.weight_shape, problem.dtype))
    monkeypatch.setattr(Plan, "pack", counted)
    return packed


# ---- values


@pytest.mark.parametrize("way", ["images", "transposed rows"])
def test_channels_last_plans_on_host_arrays(gpu, cut, monkeypatch, way):
    case = WAYS[way]
    x, w, b = case.integers("float32")
    expected, order = case.reference(x, w, b), replace(case.problem(), layout="NHWC").order
    last = np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))
    layouts = x, last, locked(gpu, x.transpose(order)).transpose(np.argsort(order))
    for i, (small, in_place) in enumerate(((0, 0), (1 << 20, 0), (1 << 20, 1 << 20))):
        monkeypatch.setattr(host, "SMALL_BYTES", small)
        monkeypatch.setattr(host, "IN_PLACE_BYTES", in_place)
        plan = Plan(replace(case.problem(), layout="NHWC"), gpu, config=Gemm(64, 64, 8, 4, 4, 1))
        for laid in (layouts[i], layouts[i - 1]):
            got = plan(laid, w, b)
            assert got.transpose(order).flags.c_contiguous and gpu.is_pinned(got) == (not in_place) and np.array_equal(got, expected)
        out = np.full_like(got, np.nan)
        assert plan(last, w, b, out=out) is out and np.array_equal(out, expected)


@pytest.mark.parametrize("way", ["images", "transposed rows", "one axis", "unbatched"])
def test_kernels_reach_small_arrays_in_page_locked_memory(gpu, monkeypatch, way):
    """So nothing is copied to the device or back. Where no memory may be locked, everything is."""
    monkeypatch.setattr(host, "IN_PLACE_BYTES", 1 << 20)
    case, copies = WAYS[way], []
    arrays = case.integers("float32")
    expected, laid = case.reference(*arrays), [a if a is None else np.asfortranarray(a).astype(">f4") for a in arrays]
    for name in ("copy_in", "copy_out"):
        original = getattr(device_module.CudaDevice, name)
        monkeypatch.setattr(device_module.CudaDevice, name, lambda *args, original=original: (copies.append(1), original(*args)))
    for operands in (arrays, laid):
        assert np.array_equal(call(case, *operands, device=gpu.name), expected) and not copies
    out = np.full(expected.shape, np.nan, np.float32)
    call(case, *arrays, device=gpu.name, out=out)
    assert np.array_equal(out, expected) and not copies
    monkeypatch.setattr(gpu._streams(), "small", None)
    monkeypatch.setattr(driver, "pinned", lambda: PinnedPool(Library(), 0))
    assert np.array_equal(call(case, *arrays, device=gpu.name), expected) and len(copies) == 2
    monkeypatch.setattr(gpu._streams(), "small", None)


@pytest.mark.parametrize("way, chunk_bytes, small", [
    ("images", 700, 1 << 20), ("rows", 1 << 30, 0), ("transposed rows", 700, 0), ("three axes", 1 << 30, 0), ("unbatched", 700, 1 << 20),
])
def test_a_filter_is_packed_once_a_call_and_a_bound_one_for_all_calls(simulated, cut, packing, monkeypatch, way, chunk_bytes, small):
    case = WAYS[way]
    x, w, b = case.integers("float32")
    expected = case.reference(x, w, b)
    cut(chunk_bytes)
    for devices in ([0], [0, 1]):
        packing.clear()
        assert np.array_equal(call(case, x, w, b, devices=devices), expected)
        assert 1 <= len(packing) <= len(devices) and set(packing) == {w.nbytes}
    cut()
    monkeypatch.setattr(host, "SMALL_BYTES", small)
    before, plan = memory(simulated), Plan(case.problem(), 0)
    packing.clear()
    bound = plan.bind(w.copy(), b)
    assert len(packing) == 1 and sum(memory(simulated)[0]) == sum(before[0]) + 2 + case.bias
    with ThreadPoolExecutor(4) as pool:
        assert all(np.array_equal(y, expected) for y in pool.map(bound, [x] * 8))
    assert len(packing) == 1
    assert np.array_equal(plan(x, w, b), expected) and len(packing) == (1 if small else 2)
    del bound
    assert memory(simulated)[0] == before[0]


def test_a_filter_packed_another_way_than_the_chunks_take_it_is_packed_again(simulated, cut, packing, monkeypatch):
    monkeypatch.setattr(engines, "filter_key", lambda problem, config: problem.input_shape)
    x, w, b = ROWS.integers("float32")
    bound = Plan(ROWS.problem(), 0).bind(w, b)
    for _ in range(2):
        packing.clear()
        assert np.array_equal(bound(x), ROWS.reference(x, w, b))
        assert len(packing) == len({piece.problem.input_shape for piece in pieces(ROWS.problem(), host.LEAST_CHUNK_BYTES)}) > 1


@pytest.mark.parametrize(
    "way, chunk_bytes",
    [*((way, 700) for way in WAYS), ("images", 4000), ("transposed rows", 4000), ("rows", 1 << 30), ("depthwise", 1 << 30)]
)
def test_results_are_right_in_chunks_of_any_size(gpu, cut, way, chunk_bytes):
    case = WAYS[way]
    dtype = {"images": "float16", "rows": "float64"}.get(way, "float32")
    arrays = case.integers(dtype)
    cut(chunk_bytes)
    got = call(case, *arrays)
    assert type(got) is np.ndarray and got.dtype == dtype and np.array_equal(got, case.reference(*arrays).astype(dtype))
    assert gpu.is_pinned(got)


@pytest.mark.parametrize("case", [IMAGES, BANDS], ids=["images", "rows"])
def test_bfloat16_goes_in_chunks_as_integers(gpu, cut, case):
    """Tensors, which numpy can't hold, and numpy arrays where ml_dtypes lets it."""
    tensors = [torch.from_numpy(a).bfloat16() for a in case.integers("float32")]
    expected = torch.from_numpy(case.reference(*(t.float().numpy() for t in tensors))).bfloat16()
    out = torch.full_like(expected, float("nan"))
    for got in (call(case, *tensors), call(case, *tensors, out=out), out):
        assert torch.equal(got, expected)
    if "bfloat16" in DTYPES:
        arrays = [t.view(torch.int16).numpy().view("bfloat16") for t in tensors]
        for given in (arrays, [a.astype(a.dtype.newbyteorder(">")) for a in arrays]):
            got = call(case, *given)
            assert got.dtype == "bfloat16" and got.dtype.isnative and gpu.is_pinned(got) and torch.equal(tensor(got), expected)


LAYOUTS = {
    "page-locked": locked,
    "every second": lambda _, a: np.repeat(a, 2, axis=-1)[..., ::2],
    "byte-swapped": lambda _, a: a.astype(a.dtype.newbyteorder()),
    "page-locked, byte-swapped": lambda gpu, a: locked(gpu, a.byteswap()).view(a.dtype.newbyteorder()),
    "Fortran": lambda _, a: np.asfortranarray(a),
    "page-locked, strided": lambda gpu, a: locked(gpu, np.repeat(a, 2, axis=0))[::2],
    "one byte off": lambda _, a: np.frombuffer(b"x" + a.tobytes(), np.uint8)[1:].view(a.dtype).reshape(a.shape),
    "a part of a page-locked array": lambda gpu, a: locked(gpu, np.concatenate([a[:1], a]))[1:],
}


@pytest.mark.parametrize(
    "way, layout", [(way, one) for i, one in enumerate(LAYOUTS) for way in ("images", ("rows", "transposed rows")[i % 2])]
)
def test_every_layout_gives_the_same_bits(gpu, cut, way, layout):
    """Of what is read; and `out` may be part of an array."""
    case = WAYS[way]
    arrays = case.normals("float32")
    expected = call(case, *arrays)
    for which in range(3 if way == "images" else 1):  # filter and bias go whole
        laid = list(arrays)
        laid[which] = LAYOUTS[layout](gpu, arrays[which])
        whole = (np.copy if which % 2 else partial(locked, gpu))(np.full((3, *expected.shape), np.nan, "f"))
        assert np.array_equal(call(case, *laid), expected) and np.array_equal(call(case, *laid, out=whole[1]), expected)
        assert np.array_equal(laid[which], arrays[which]) and np.array_equal(whole[1], expected) and np.isnan(whole[::2]).all()


@pytest.mark.parametrize("way, small", [("images", 0), ("images", 1 << 20), ("transposed rows", 0), ("unbatched", 1 << 20)])
def test_a_residual_goes_in_chunks_too_and_may_be_out(gpus, cut, monkeypatch, way, small):
    """From ordinary and from page-locked memory, with kept filters, on several GPUs, without the pipeline."""
    case, gpu = WAYS[way], gpus[0]
    cut(1500)
    monkeypatch.setattr(host, "SMALL_BYTES", small)
    x, w, b = case.integers("float32")
    rng = np.random.default_rng(8)
    plain, across = case.reference(x, w), (-1, *(1,) * case.ndim)
    scale, residual = rng.integers(-2, 3, case.channels).astype("f"), rng.integers(-99, 100, plain.shape).astype("f")
    expected = np.maximum(plain * scale.reshape(across) + (0 if b is None else b.reshape(across)) + residual, 0)
    options = {"scale": scale, "activation": "relu"}
    problem = replace(case.problem(), has_scale=True, has_residual=True, activation="relu")
    bound, sets = Plan(problem, gpu).bind(w, b, scale), [{}, *([{"devices": "all"}] if not small else [])]
    sources = itertools.cycle((x, locked(gpu, x)))
    for one, source in zip((residual, locked(gpu, residual), np.asfortranarray(residual), residual.astype(">f4")), sources, strict=False):
        for where in sets:
            assert np.array_equal(call(case, source, w, b, residual=one, **options, **where), expected)
        assert np.array_equal(bound(source, residual=one), expected)
    for make in (np.copy, lambda a: locked(gpu, a)):
        for where in sets:
            out = make(residual)
            assert call(case, x, w, b, residual=out, out=out, **options, **where) is out and np.array_equal(out, expected)
        out = make(residual)
        assert bound(x, residual=out, out=out) is out and np.array_equal(out, expected)


def test_an_empty_batch_and_no_channels(gpu, cut):
    x, w, b = IMAGES.integers("float32")
    assert call(IMAGES, x[:0], w, b).shape == (0, *IMAGES.problem().result_shape[1:])
    got = pc.conv1d(np.zeros((2, 0, 500), "f"), np.zeros((3, 0, 2), "f"), np.array([1, 2, 3], "f"))
    assert np.array_equal(got, np.broadcast_to(np.array([1, 2, 3], "f")[:, None], (2, 3, 499)))


# ---- results are ordinary arrays


@pytest.mark.parametrize("limit", [0, 1 << 18])
def test_without_page_locked_memory_results_are_ordinary_arrays_of_the_same_values(gpu, cut, monkeypatch, limit):
    jobs = [(case, case.normals("float32", seed)) for case in (IMAGES, ROWS, BANDS) for seed in range(3)]
    expected = [np.array(call(case, *arrays)) for case, arrays in jobs]
    pool = PinnedPool(driver.libcuda(), limit)
    monkeypatch.setattr(driver, "pinned", lambda: pool)
    results = [call(case, *arrays) for case, arrays in jobs]
    assert all(np.array_equal(*pair) for pair in zip(results, expected, strict=True))
    assert pool.locked <= limit and not all(gpu.is_pinned(y) for y in results)
    del results
    with gpu:
        pool.trim()
    assert pool.lent == 0 or limit


# ---- nothing is left behind


@pytest.mark.gpu_alone
def test_many_calls_leave_memory_as_it_was(gpus, cut):
    """PYCUDA_CONV_SOAK=10000 for a long one."""
    jobs = [
        (case, case.integers("float32", seed), case.reference(*case.integers("float32", seed))) for case in (IMAGES, ROWS, BANDS)
        for seed in range(2)
    ]
    rng = random.Random(0)
    held, before, threads = [], None, 0

    def state():
        gc.collect()
        for gpu in gpus:
            with gpu:
                if not isinstance(gpu, Simulated):
                    gpu.pool.free_held()
        return memory(gpus), driver.pinned().locked, 0 if isinstance(gpus[0], Simulated) else driver.pycuda().mem_get_info()[0]

    for i in range(SOAK):
        if i == SOAK // 10:
            held.clear()
            x = y = None
            with gpus[0]:
                before, threads = state(), threading.active_count()
        case, arrays, expected = rng.choice(jobs)
        x = LAYOUTS[rng.choice(list(LAYOUTS))](gpus[0], arrays[0]) if rng.random() < 0.5 else arrays[0]
        y = call(case, x, *arrays[1:], out=np.empty(expected.shape, "f") if rng.random() < 0.2 else None)
        assert np.array_equal(y, expected), f"call {i}: {case}"
        if len(held) < 4:
            held.append(y)
        elif rng.random() < 0.5:
            held.pop(rng.randrange(4))
    held.clear()
    x = y = None
    with gpus[0]:
        (now, locked_now, free_now), (then, locked_then, free_then) = state(), before
    assert now == then and threading.active_count() <= threads + 2 * staging.THREADS
    assert locked_now - locked_then <= 4 << 20 and abs(free_now - free_then) < 1 << 26
    settle()


def ends_well(gpus, work, error):
    """Whether `work` raised the error. Either way nothing is left of it."""
    before, raised = memory(gpus), False
    try:
        within(work)
    except error:
        raised = True
    settle()
    assert memory(gpus) == before and not DriverInC.events
    return raised


@pytest.mark.parametrize("where", ["launch", "copy_in", "copy_out", "copyto"])
@pytest.mark.parametrize("way", ["images", "transposed rows"])
def test_an_exception_in_the_middle_leaves_nothing_and_the_next_call_is_right(gpus, cut, monkeypatch, way, where):
    cut(7000 if way == "images" else 3500, 1500)
    case = WAYS[way]
    arrays = case.integers("float32")
    expected = case.reference(*arrays)
    owner = {"launch": Plan, "copyto": np}.get(where, type(gpus[0]))  # the last is called by Python's threads
    original = getattr(owner, where)
    assert np.array_equal(call(case, *arrays), expected)
    for at, (x, out) in itertools.product((1, 4), ((arrays[0], None), (locked(gpus[0], arrays[0]), np.empty_like(expected, "f")))):
        seen = itertools.count(1)

        def failing(*args, at=at, seen=seen):
            if next(seen) == at:
                raise ZeroDivisionError("on purpose")
            return original(*args)

        with monkeypatch.context() as patch:
            patch.setattr(owner, where, failing)
            raised = ends_well(gpus, lambda x=x, out=out: call(case, x, *arrays[1:], out=out), ZeroDivisionError)
        assert raised or next(seen) <= at, "the error was lost"  # fewer calls than that: page-locked arrays are copied whole
        assert np.array_equal(call(case, *arrays), expected)


def test_a_broken_context_raises_and_leaves_no_thread(gpus, cut):
    """As after an illegal address: every later call of the driver fails, synchronising among them."""
    if not isinstance(gpus[0], Simulated):
        pytest.skip("it would end this process's context")
    cut(700, 200)
    for fail in (1, 3, 9):
        for case in (IMAGES, BANDS):
            gpus[0].broken, gpus[0].launched, gpus[0].fail = None, 0, fail
            with pytest.raises(RuntimeError, match="illegal address"):
                within(lambda case=case: call(case, *case.integers("float32")))
            settle()
            gpus[0].broken = gpus[0].fail = None


@pytest.mark.parametrize("point", ["send", "receive", "launch", "done", "_next_lane"])
def test_an_interrupted_call_leaves_nothing(gpus, cut, monkeypatch, point):
    """Ctrl-C, raised when a call of C or of the driver returns: threads and streams are waited for, and the next call is right."""
    cut(7000, 1500)
    arrays = IMAGES.integers("float32")
    expected = IMAGES.reference(*arrays)
    for at, devices in itertools.product((1, 2, 5), [[0], range(len(gpus))]):
        seen = itertools.count(1)

        def stopped(original, at=at, seen=seen):
            def call_it(*args, **options):
                made = original(*args, **options)
                if next(seen) == at:
                    raise KeyboardInterrupt
                return made

            return call_it

        out = np.full(expected.shape, np.nan, "f")
        with monkeypatch.context() as patch:
            for owner in (staging._Uploader, staging._Downloader, staging._InC, host._Lane, host._Pipeline):
                if hasattr(owner, point):
                    patch.setattr(owner, point, stopped(getattr(owner, point)))
            assert ends_well(gpus, lambda out=out, devices=devices: call(IMAGES, *arrays, out=out, devices=devices), KeyboardInterrupt)
        assert np.array_equal(call(IMAGES, *arrays, devices=devices), expected)


@needs_copier
@pytest.mark.parametrize("devices", [[0], [0, 1]], ids=str)
@pytest.mark.parametrize("name", ["create", "push", "copy_in", "copy_out", "record", "synchronize"])
def test_an_error_of_the_driver_in_the_threads_of_c_is_raised(in_c, cut, name, devices):
    """Wherever it comes from, nothing is left, and the next call is right. `out` is ordinary, so threads copy both ways."""
    cut(7000, 1500)
    for case in (IMAGES, BANDS)[: len(devices)]:
        arrays = case.integers("float32")
        expected, failed = case.reference(*arrays), 0
        for at in (1, 4, 9):
            seen, out = itertools.count(1), np.full(case.problem().result_shape, np.nan, "f")
            DriverInC.failing = lambda called, at=at, seen=seen: called == name and next(seen) == at
            raised = ends_well(in_c, lambda case=case, arrays=arrays, out=out: call(case, *arrays, out=out, devices=devices), RuntimeError)
            DriverInC.failing = None
            assert raised or (np.array_equal(out, expected) and next(seen) <= at), "the error was lost"
            failed += raised
            assert np.array_equal(call(case, *arrays, devices=devices), expected)
        assert failed


@pytest.mark.parametrize("kind", ["simulated", pytest.param("in_c", marks=needs_copier)])
@pytest.mark.parametrize(("threads", "helped"), [(0, True), (1, False), (5, True), (5, False)])
def test_any_number_of_threads_will_do(request, cut, monkeypatch, kind, threads, helped):
    """Without any, the thread that launches does what it would wait for. Threads of Python may be helped by it."""
    request.getfixturevalue(kind)
    monkeypatch.setattr(staging, "THREADS_IN_C", threads)
    monkeypatch.setattr(staging, "HELPED_BYTES", 1 << 60 if helped else 0)
    for way, chunk_bytes, part_bytes in itertools.product(("images", "rows", "transposed rows"), (900, 1 << 20), (100, 100_000)):
        cut(chunk_bytes, part_bytes, threads)
        case = WAYS[way]
        arrays = case.integers("float32")
        for devices in ([0], [0, 1]):
            out = np.full((expected := case.reference(*arrays)).shape, np.nan, "f")
            within(lambda case=case, arrays=arrays, out=out, devices=devices: call(case, *arrays, out=out, devices=devices))
            assert np.array_equal(out, expected)


@needs_copier
def test_a_job_keeps_the_memory_that_threads_copy(in_c):
    data, ring = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    kept = [weakref.ref(data), weakref.ref(ring)]
    job = COPIER.job(in_c[0].copy_functions, True, ((address(data), 16, 16, (), (), -1, 8),), address(ring), 16, 1, (1,), 1, (data, ring))
    COPIER.threads(1)
    del data, ring
    gc.collect()
    assert all(one() is not None for one in kept)
    del job
    assert all(one() is None for one in kept)


def test_calls_from_eight_threads_at_once(gpus, cut):
    jobs = [(case, case.integers("float32", seed)) for case in (IMAGES, ROWS, BANDS) for seed in range(8)]
    expected = [case.reference(*arrays) for case, arrays in jobs]

    def work(i):
        case, arrays = jobs[i]
        x = locked(gpus[0], arrays[0]) if i % 2 else arrays[0]
        return np.array_equal(call(case, x, *arrays[1:], devices="all" if i % 3 == 0 else None), expected[i])

    with ThreadPoolExecutor(8) as pool:
        assert all(within(lambda: list(pool.map(work, range(len(jobs))))))


# ---- arrays larger than the device


def limited(monkeypatch, gpu, limit):
    """A device has so many bytes. How many of them were used at most is the last of the list."""
    most, original, sizes = [0], type(gpu).allocate, weakref.WeakKeyDictionary()

    def allocate(device, nbytes):
        used = sum(sizes.values()) + nbytes
        if used > limit:
            raise DeviceMemoryError(f"{used:,} bytes are more than {limit:,}")
        most.append(max(used, most[-1]))
        block = original(device, nbytes)
        sizes[block] = nbytes
        return block

    monkeypatch.setattr(type(gpu), "allocate", allocate)
    return most


@pytest.mark.parametrize(
    "case",
    [fprop((1, 8, 400, 50), (8, 8, 5, 3)), fprop((40, 8, 10, 50), (8, 8, 5, 3)), dgrad((1, 8, 200, 50), (8, 8, 3, 3), stride=(2, 1))],
    ids=str
)
def test_arrays_may_be_larger_than_the_device_s_memory(gpu, cut, monkeypatch, case):
    cut(1 << 16, 1 << 14)
    most = limited(monkeypatch, gpu, limit := 950_000)  # parts of split sums are among what is there
    arrays = case.integers("float32")
    assert np.array_equal(call(case, *arrays), case.reference(*arrays))
    assert 0 < most[-1] <= limit <= arrays[0].nbytes + math.prod(case.problem().result_shape) * 4


def test_too_little_memory_even_for_a_chunk_says_so_and_does_no_harm(gpus, cut, monkeypatch):
    with monkeypatch.context() as patch:
        limited(patch, gpus[0], 3000)
        assert ends_well(gpus, lambda: call(ROWS, *ROWS.integers("float32")), DeviceMemoryError)
    assert np.array_equal(call(ROWS, *ROWS.integers("float32")), ROWS.reference(*ROWS.integers("float32")))


@pytest.mark.parametrize("case", [IMAGES, BANDS], ids=str)
@pytest.mark.parametrize("packs", [False, True])
def test_memory_of_the_pool_is_awaited_after_it_was_given(gpu, cut, request, monkeypatch, case, packs):
    """Another thread may give memory to the pool, which the default stream still uses, just before this call takes it."""
    if not isinstance(gpu, Simulated):
        pytest.skip("it looks at calls of a simulated GPU")
    cut()
    packing = request.getfixturevalue("packing") if packs else []
    given, late = set(), []
    allocate, order, put = Simulated.allocate, Simulated.order, Stream.put

    def allocated(device, nbytes):
        block = allocate(device, nbytes)
        given.update((block, stream) for stream in device.pipeline_streams()[packs:2])  # filters are packed on the second
        return block

    def ordered(device, first, second):
        if first is None:
            given.difference_update([one for one in given if one[1] is second])
        order(device, first, second)

    def queued(stream, work, **more):
        late.extend(one for one in given if one[1] is stream)
        put(stream, work, **more)

    for owner, name, function in ((Simulated, "allocate", allocated), (Simulated, "order", ordered), (Stream, "put", queued)):
        monkeypatch.setattr(owner, name, function)
    call(case, *case.integers("float32"))
    assert bool(packing) == packs and not late


def test_bands_of_planes_above_2_gib_are_copied_with_pitches_that_the_driver_takes(gpu, monkeypatch):
    """A page-locked result of two channels, 24000 x 24000 each, in bands of rows. Nothing is copied here."""
    if not isinstance(gpu, Simulated):
        pytest.skip("it looks at calls of a simulated GPU")
    whole, copied = np.empty((1, 2, 24000, 24000), "f"), []
    part = whole[:, :, 100:110]
    monkeypatch.setattr(gpu, "copy", lambda target, source, nbytes, *_: copied.append((target, source, nbytes)), raising=False)
    with gpu:
        stream = SimpleNamespace(device=gpu)
        gpu.copy_out(whole, part, 1 << 20, stream)
        gpu.copy_in(1 << 20, whole, part, stream)
    assert sum(nbytes for _, _, nbytes in copied) == 2 * part.nbytes
    assert {target for target, _, _ in copied[: len(copied) // 2]} >= {address(part[:, 0]), address(part[:, 1])}


# ---- several GPUs


@pytest.mark.parametrize("way", ["images", "rows", "transposed rows", "unbatched"])
def test_any_set_of_gpus_gives_the_same_bits(gpus, cut, way):
    case = WAYS[way]
    arrays = case.normals("float32")
    expected = call(case, *arrays)
    sets = [[0], (0,), range(1), "all", ["cuda:0"], [gpus[0]]]
    if len(gpus) > 1:
        sets += [[0, 1], [1, 0], [1], range(len(gpus))]
    for i, devices in enumerate(sets):
        out = np.full_like(expected, np.nan)
        if i % 2:
            out = call(case, *arrays, devices=devices)
        else:
            assert call(case, locked(gpus[0], arrays[0]), *arrays[1:], devices=devices, out=out) is out
        assert np.array_equal(out, expected)
    tensor = call(case, *(None if a is None else torch.from_numpy(a) for a in arrays), devices="all")
    assert np.array_equal(tensor.numpy(), expected)


def test_all_gpus_take_part(gpus, cut, monkeypatch):
    if len(gpus) < 2:
        pytest.skip("this machine has one GPU")
    used, original = set(), host._Lane.launch
    monkeypatch.setattr(host._Lane, "launch", lambda self, chunk: (used.add(self.device.name), original(self, chunk))[1])
    call(IMAGES, *IMAGES.normals("float32"), devices="all")
    assert used == {gpu.name for gpu in gpus}
    one = fprop((1, 1, 5, 5), (1, 1, 3, 3))  # fewer pieces than GPUs
    x, w, b = one.integers("float32")
    assert np.array_equal(call(one, x, w, b, devices="all"), call(one, x, w, b))
    assert call(IMAGES, IMAGES.integers("float32")[0][:0], *IMAGES.integers("float32")[1:], devices="all").shape[0] == 0


def test_a_gpu_with_less_to_do_gets_the_next_chunk(simulated, cut, monkeypatch):
    """Whatever the other one is slow at. Chunks that it was given ahead it keeps."""
    given, slow, original, all_given = [], simulated[1], host._Lane.launch, threading.Event()

    def launch(lane, chunk):
        given.append(lane.device)
        if len(given) == len(x):
            all_given.set()
        if lane.device is slow:
            lane.down.put(lambda: all_given.wait(PATIENCE / 10))
        return original(lane, chunk)

    monkeypatch.setattr(host._Lane, "launch", launch)
    monkeypatch.setattr(host, "QUEUED", 3)
    cut(2000, 500)
    x, w, b = IMAGES.normals("float32")
    x = np.concatenate([x] * 3)
    y = call(IMAGES, x, w, b, devices=[0, 1])
    assert len(given) == len(x) and 1 <= given.count(slow) < len(given) // 3
    assert np.array_equal(y, call(IMAGES, x, w, b))


def test_as_many_gpus_are_used_as_pay(simulated, monkeypatch):
    """By what copies to them take, and by how long the kernels are expected to run."""
    x, y = np.zeros((64, 1, 1 << 19), "f"), np.zeros((64, 1, 1 << 19), "f")
    kernels = [0.0]
    asked = []
    monkeypatch.setattr(engines, "predicted", lambda *_: kernels[0])

    def pay(*per_gb, start=0.0, microseconds=0.0, of=y, residual=None):
        kernels[0] = microseconds
        plan = Plan.__new__(Plan)
        plan.problem = plan.config = plan.device = None
        counts = dict(zip(several_gpus.numbers_of_gpus(len(per_gb) if len(per_gb) < 3 else 4), per_gb, strict=True))
        monkeypatch.setattr(
            several_gpus, "throughputs",
            lambda *key: asked.append(key) or {n: several_gpus.Throughput(start * n, s / 1e9) for n, s in counts.items()}
        )
        return several_gpus.gpus_that_pay(plan, simulated, x, of, residual, host.copy_only)[0]

    assert [several_gpus.numbers_of_gpus(n) for n in (1, 2, 3, 4, 6, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6], [1, 2, 4, 8]]
    assert pay(1.0, 0.5) == 2 and pay(1.0, 1.2) == 1 and pay(1.0, 0.99) == 1  # within what counts as the same
    assert pay(1.0, 0.6, 0.3) == 4 and pay(1.0, 0.6, 0.61) == 2
    assert pay(1.0, 0.9, start=0.001) == 2 and pay(1.0, 0.9, start=0.1) == 1  # 0.27 GB
    assert pay(1.0, 1.2, microseconds=1e6) == 2  # the kernels take a second
    assert pay(1.0, 0.5, of=y[:4], residual=None) == 2 and pay(1.0, 0.5, of=locked(simulated[0], y)) == 2
    assert [key[1:3] for key in asked[-2:]] == [(True, True), (True, False)]
    assert several_gpus.gpus_that_pay(None, simulated, x[:2], y[:2], None, host.copy_only)[0] == 1


def test_calls_correct_what_was_expected_of_gpus(simulated, monkeypatch):
    """The best number is tried first, others if they may be as good; the fastest of the last calls judges."""
    x = np.zeros((64, 1, 1 << 19), "f")
    plan = Plan.__new__(Plan)
    plan.problem = plan.config = plan.device = None
    monkeypatch.setattr(engines, "predicted", lambda *_: None)

    def numbers(expected, real, calls, of=plan, later=None):
        monkeypatch.setattr(several_gpus, "_taken", weakref.WeakKeyDictionary())
        monkeypatch.setattr(
            several_gpus, "throughputs", lambda *_: {n: several_gpus.Throughput(0.0, s / 2 / x.nbytes) for n, s in expected.items()}
        )
        used = []
        for i in range(calls):
            count, took = several_gpus.gpus_that_pay(of, simulated, x, x, None, host.copy_only)
            used.append(count)
            took((later if later and i >= 10 else real)[count] + (5.0 if i == 0 else 0.0))  # the first call compiles
        return used

    assert numbers({1: 1.0, 2: 0.5}, {1: 1.0, 2: 0.5}, 6) == [2] * 6  # the other one is too far off
    assert numbers({1: 1.0, 2: 0.9}, {1: 1.0, 2: 0.9}, 12) == [2] * 3 + [1] * 3 + [2] * 6
    assert numbers({1: 1.0, 2: 0.9}, {1: 1.0, 2: 1.3}, 12)[3:] == [1] * 9
    assert numbers({1: 1.0, 2: 1.1}, {1: 1.0, 2: 0.8}, 12) == [1] * 3 + [2] * 9
    assert numbers({1: 1.0, 2: 1.1}, {1: 0.3, 2: 0.2}, 12)[3:] == [2] * 9  # a host that is faster than it was
    assert numbers({1: 1.0, 2: 1.0, 4: 1.0}, {1: 1.0, 2: 0.99, 4: 0.9}, 12)[9:] == [4] * 3
    assert numbers({1: 1.0, 2: 1.0}, {1: 1.0, 2: 0.99}, 12)[6:] == [1] * 6  # the same
    again = numbers({1: 1.0, 2: 0.9}, {1: 1.0, 2: 1.2}, 100)
    assert [i for i, count in enumerate(again) if count == 2] == [0, 1, 2, 16, 17, 18, 64, 65, 66]
    busy = numbers({1: 1.0, 2: 0.9}, {1: 1.0, 2: 1.2}, 100, later={1: 1.0, 2: 0.9})  # the host was busy at first
    assert busy[3:16] == [1] * 13 and busy[16:64] == [2] * 48 and busy[67:] == [2] * 33


def test_the_throughput_of_copies_is_measured_once_and_leaves_nothing(simulated, monkeypatch):
    monkeypatch.setattr(several_gpus, "_throughputs", {})
    monkeypatch.setattr(several_gpus, "THROUGHPUT_BYTES", 24 << 20)
    ran, original, before = [], host.copy_only, memory(simulated)
    monkeypatch.setattr(host, "copy_only", lambda gpus, x, y: (ran.append((len(gpus), x.nbytes)), original(gpus, x, y)))
    for _ in range(2):
        for ways in ((True, False), (False, True)):
            found = several_gpus.throughputs(tuple(simulated), *ways, host.copy_only)
            assert set(found) == {1, 2} and all(one.seconds(1 << 30) > 0 for one in found.values())
    assert {count for count, _ in ran} == {1, 2} and len({nbytes for _, nbytes in ran}) == 2
    assert len(ran) == 2 * 2 * 2 * several_gpus.THROUGHPUT_ROUNDS and memory(simulated) == before


def test_devices_that_cannot_be_are_refused(gpus):
    arrays = IMAGES.integers("float32")
    for devices, exception, text in (
        ([], ConvArgumentError, "devices"), ((), ConvArgumentError, "devices"), ([0, 0], ConvArgumentError, "once"), ([0, "cuda:0"], ConvArgumentError, "once"),
        ([99], BackendError, "cuda:99"), ([-1], ConvArgumentError, "device"), (["opencl"], (ConvArgumentError, BackendError), "devices|OpenCL"),
        (0, TypeError, "devices"), ("cuda", (TypeError, ConvArgumentError), "devices"), ([0.0], TypeError, "device"), ([True], TypeError, "device"),
        (True, TypeError, "devices"), ([None, None], (ConvArgumentError, TypeError), "devices"),
    ):  # fmt: skip
        with pytest.raises(exception, match=text):
            call(IMAGES, *arrays, devices=devices)
    with pytest.raises(ConvArgumentError, match="device and devices"):
        call(IMAGES, *arrays, devices=[0], device=0)


@pytest.mark.gpu
def test_devices_are_for_host_arrays():
    tensors = [torch.from_numpy(a).cuda() for a in IMAGES.integers("float32")]
    for devices in ([0], "all"):
        with pytest.raises(ConvArgumentError, match="devices"):
            call(IMAGES, *tensors, devices=devices)


def test_devices_where_there_is_no_gpu():
    if runtime.default_backend() != "opencl":
        pytest.skip("this machine has a GPU")
    arrays = IMAGES.integers("float32")
    for devices in ("all", [0]):
        with pytest.raises(BackendError, match=r"PyCUDA|driver|GPU|nvcc"):
            call(IMAGES, *arrays, devices=devices)
    with pytest.raises((ConvArgumentError, BackendError)):
        call(IMAGES, *arrays, devices=["opencl"])


# ---- a stream of inputs, and a filter that stays; also on OpenCL


@pytest.fixture(params=["opencl", "simulated", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def anywhere(request, cut):
    """The name of a device; on GPUs, small arrays go in chunks."""
    if request.param == "simulated":
        request.getfixturevalue("simulated")
        return "cuda:0"
    why = why_no_opencl() if request.param == "opencl" else why_no_cuda()
    if why:
        pytest.skip(why)
    return request.param


SMALL = fprop((2, 3, 9, 8), (4, 3, 3, 2), padding=1)


def inputs(count, taken=None):
    """So many inputs of two shapes; how many were asked for goes into `taken`."""
    for seed in range(count):
        if taken is not None:
            taken.append(seed)
        x = SMALL.integers("float32", seed)[0]
        yield x if seed % 3 else x[:1]


@pytest.mark.parametrize("ahead", [1, 2, 5, 50])
def test_many_inputs_give_their_results_in_order(anywhere, ahead):
    """An input is taken at most so far ahead."""
    (_, w, b), taken = SMALL.integers("float32"), []
    results = pc.conv2d_many(inputs(11, taken), w, b, padding=1, ahead=ahead, device=anywhere)
    assert taken == []
    for i, (y, x) in enumerate(zip(results, inputs(11), strict=True)):
        assert np.array_equal(y, SMALL.reference(x, w, b)) and i + 1 <= len(taken) <= i + ahead + 1


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_every_rank_takes_many_by_the_arguments_of_one(anywhere, ndim):
    case = fprop((2, 4, *(6,) * ndim), (4, 2, *(2,) * ndim), stride=2, padding=1, dilation=2, groups=2)
    x, w, b = case.integers("float64")
    function, expected = getattr(pc, f"conv{ndim}d_many"), case.reference(x, w, b)
    for y in (*function([x, x], w, b, 2, 1, 2, 2, device=anywhere), *function(iter([x]), w, bias=b, **case.options, device=anywhere)):
        assert np.array_equal(y, expected)
    (tensor,) = function([torch.from_numpy(x)], torch.from_numpy(w), torch.from_numpy(b), **case.options, device=anywhere)
    assert isinstance(tensor, torch.Tensor) and np.array_equal(tensor.numpy(), expected)


def test_exceptions_of_the_inputs_and_of_a_call_end_the_stream(anywhere):
    _, w, b = SMALL.integers("float32")

    def broken():
        yield from inputs(4)
        raise ZeroDivisionError

    def wrong():
        yield from inputs(4)
        yield np.zeros((1, 7, 9, 8), "f")
        yield from inputs(4)

    expected = [SMALL.reference(x, w, b) for x in inputs(4)]
    for as_kind, ahead in itertools.product((np.asarray, torch.from_numpy), (1, 2, 9)):
        for source, error in ((broken, ZeroDivisionError), (wrong, ConvArgumentError)):
            operands = map(as_kind, source())
            results, got = pc.conv2d_many(operands, *map(as_kind, (w, b)), padding=1, ahead=ahead, device=anywhere), []
            with pytest.raises(error):
                for y in results:
                    got.append(y)
            assert next(results, None) is None
            for y, whole in zip(got, expected, strict=True):  # what was computed before comes first
                assert np.array_equal(np.asarray(y), whole)
    with pytest.raises(TypeError):
        list(pc.conv2d_many([None], w, b, device=anywhere))
    assert list(pc.conv2d_many([], w, b, device=anywhere)) == []


def test_closing_the_stream_early_stops_it(anywhere):
    _, w, b = SMALL.integers("float32")
    taken = []
    source = inputs(1000, taken)
    results = pc.conv2d_many(source, w, b, padding=1, ahead=3, device=anywhere)
    next(results)
    within(results.close)
    assert len(taken) <= 4 and next(results, None) is None
    settle()
    del results
    gc.collect()
    dropped = pc.conv2d_many(inputs(1000, taken), w, b, padding=1, device=anywhere)
    next(dropped)
    del dropped  # by the garbage collector
    gc.collect()
    assert len(taken) <= 8


@pytest.mark.parametrize("ahead", [0, 1.0, True], ids=repr)
def test_ahead_is_a_positive_integer_and_no_out_is_taken(anywhere, ahead):
    _, w, b = SMALL.integers("float32")
    with pytest.raises((ConvArgumentError, TypeError), match="ahead"):
        list(pc.conv2d_many(inputs(2), w, b, ahead=ahead, device=anywhere))
    with pytest.raises((ConvArgumentError, TypeError), match="out"):
        list(pc.conv2d_many(inputs(2), w, b, padding=1, out=np.zeros((2, 4, 9, 9), "f"), device=anywhere))


BOUND = {"forward": SMALL, "transposed": dgrad((2, 4, 5, 6), (4, 3, 3, 2), stride=2), "without bias": fprop((3, 9), (4, 3, 2), bias=False)}


@pytest.mark.pairs
@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("name", BOUND)
def test_a_bound_plan_keeps_the_filter_as_it_was(anywhere, monkeypatch, name, kind, small):
    case = BOUND[name]
    if small:
        monkeypatch.setattr(host, "SMALL_BYTES", 1 << 20)
    wrap = torch.from_numpy if kind == "torch" else np.asarray
    arrays = [case.integers("float32", seed) for seed in range(3)]
    w, b = arrays[0][1:]
    expected = [case.reference(x, w, b) for x, *_ in arrays]
    plan = Plan(case.problem(), anywhere)
    w, b = w.copy(), None if b is None else b.copy()
    bound = plan.bind(wrap(w), None if b is None else wrap(b))
    w.fill(np.nan)
    if b is not None:
        b.fill(np.nan)
    del w, b
    for _ in range(2):
        for (x, *_), y in zip(arrays, expected, strict=True):
            assert np.array_equal(bound(wrap(x)), y)
    out = wrap(np.full(y.shape, np.nan, "f"))
    assert bound(wrap(arrays[0][0]), out=out) is out and np.array_equal(out, expected[0])
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda i: bound(wrap(arrays[i % 3][0])), range(12)))
    assert all(np.array_equal(y, expected[i % 3]) for i, y in enumerate(results))


def test_a_bound_plan_s_filter_is_sent_once_and_its_memory_given_back(gpus, cut, monkeypatch):
    monkeypatch.setattr(host, "LEAST_CHUNK_BYTES", 1 << 20)
    case = fprop((2, 3, 9, 8), (40, 3, 3, 2), padding=1)
    x, w, b = case.normals("float32")
    expected = call(case, x, w, b)
    before, sent, original = memory(gpus), [], type(gpus[0]).copy_in
    bound = Plan(case.problem(), gpus[0]).bind(w, b)
    assert sum(memory(gpus)[0]) == sum(before[0]) + 2
    monkeypatch.setattr(
        type(gpus[0]), "copy_in",
        lambda self, target, whole, part, stream: (sent.append(part.nbytes), original(self, target, whole, part, stream))
    )
    in_c = staging._InC.__init__
    monkeypatch.setattr(
        staging._InC, "__init__",
        lambda self, lanes, arrays, *rest: (sent.extend(array.nbytes for array in arrays), in_c(self, lanes, arrays, *rest))[1]
    )
    for small in (0, 1 << 20):
        sent.clear()
        monkeypatch.setattr(host, "SMALL_BYTES", small)
        for _ in range(3):
            y = bound(x)
            assert np.array_equal(y, expected)
        assert 3 * x.nbytes <= sum(sent) <= 3 * (x.nbytes + 256)
    del bound, y
    assert memory(gpus)[0] == before[0]


def test_a_bound_plan_refuses_what_the_plan_does(anywhere):
    x, w, b = SMALL.integers("float32")
    plan = Plan(SMALL.problem(), anywhere)
    for filters, exception, text in (
        ((w[:3], b), ConvArgumentError, "weight"), ((w,), ConvArgumentError, "bias"), ((w, b[:2]), ConvArgumentError, "bias"),
        ((w.astype("f8"), b.astype("f8")), ConvArgumentError, "float32"), ((w, torch.from_numpy(b)), TypeError, "one kind"), ((None, b), TypeError, "weight|input"),
    ):  # fmt: skip
        with pytest.raises(exception, match=text):
            plan.bind(*filters)(x)
    bound = plan.bind(w, b)
    for wrong, exception, text in (
        (x[:1], ConvArgumentError, "input"), (x.astype("f8"), ConvArgumentError, "float"), (torch.from_numpy(x), TypeError, "kind"),
        (None, TypeError, "input")
    ):
        with pytest.raises(exception, match=text):
            bound(wrong)
    with pytest.raises(ConvArgumentError, match="out must have shape"):
        bound(x, out=np.zeros((1, 1, 1, 1), "f"))
    with pytest.raises(NotImplementedError, match="no_grad"):
        plan.bind(torch.from_numpy(w).requires_grad_(), torch.from_numpy(b))(torch.from_numpy(x))


# ---- the end of a process

HEAD = "import atexit, gc\nkept = []\natexit.register(lambda: print(kept[0].sum(dtype='d').item()))\n"  # registered first, so it runs last
BODY = "import numpy as np, pycuda_conv as pc\nx, w = np.ones((8, 1, 600, 602), 'f'), np.ones((1, 1, 3, 3), 'f')\n"
SUM = f"{8 * 598.0 * 600 * 9}\n"
ENDINGS = {
    "results used after everything": HEAD + BODY + "kept.append(pc.conv2d(x, w))\n",
    "read as modules go": BODY + "class Last:\n    def __init__(self): self.y, self.print, self.total = pc.conv2d(x, w), print, (lambda y, add=np.add.reduce: add(y, axis=None, dtype='d').item())\n    def __del__(self): self.print(self.total(self.y))\nlast = Last()\n",
    "in a thread": HEAD + BODY + "import threading\nt = threading.Thread(target=lambda: kept.append(pc.conv2d(x, w)))\nt.start()\n",
    "an unfinished stream": HEAD + BODY + "many = pc.conv2d_many((x for _ in range(9)), w)\nkept.append(next(many))\n",
    "a bound plan": HEAD + BODY + "bound = pc.Plan(pc.ConvProblem.forward(2, x.shape, w.shape)).bind(w)\nkept.append(bound(x))\n",
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("ending", ENDINGS)
def test_processes_end_cleanly_with_results_alive(python_env, ending):
    assert python(ENDINGS[ending], python_env, PYTHONWARNINGS="ignore") == SUM


@pytest.mark.gpu
def test_without_page_locked_memory_a_process_runs_as_well(python_env):
    assert python(ENDINGS["results used after everything"], python_env, PYTHONWARNINGS="ignore", PYCUDA_CONV_PINNED_LIMIT="0") == SUM
    code = BODY + "try: pc.conv2d(x, w)\nexcept pc.ConvArgumentError as error: print('PYCUDA_CONV_PINNED_LIMIT' in str(error))\n"
    assert python(code, python_env, PYTHONWARNINGS="ignore", PYCUDA_CONV_PINNED_LIMIT="lots") == "True\n"
