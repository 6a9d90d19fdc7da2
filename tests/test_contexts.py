"""CUDA contexts: each call is served by the context of its arrays, and no handle of a context that is gone is given to the driver.

Without a GPU a stand-in for the driver keeps contexts as the driver does: fake_cuda.c.
It refuses, and counts, handles that are dead or belong to another context than the current one.
"""

import ctypes
import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda
from test_launch import KINDS

import pycuda_conv as pc
from pycuda_conv import BackendError, ConvArgumentError, ConvProblem, DeviceMemoryError, Plan, memo, repeat
from pycuda_conv.execute import device
from pycuda_conv.runtime import contexts, get_device

X, W, B = (2, 16, 9, 9), (24, 16, 3, 3), (24,)
Y = (2, 24, 7, 7)


@pytest.fixture(params=KINDS)
def fake(request, tmp_path, monkeypatch):
    fake = FakeCuda(tmp_path, monkeypatch)
    fake.by_python = request.param == "python"
    fake.strict.value = 1
    fake.gpus.value = 2
    monkeypatch.setenv("PYCUDA_CONV_LAUNCHER", request.param)
    monkeypatch.setattr("pycuda_conv.runtime.default_backend", lambda: "cuda")
    memo.forget_plans()
    yield fake
    memo.forget_plans()
    assert fake.dead.value == fake.foreign.value == 0


@contextmanager
def context(fake, gpu=0):
    """A context as ``make_context()`` makes it, which goes at the end."""
    made = fake.drv.Device(gpu).make_context()
    try:
        yield made
    finally:
        if made.valid:
            made.detach()


def arrays(fake, *shapes, dtype="float32", **options):
    return [fake.gpuarray.to_gpu(np.ones(shape, dtype), **options) for shape in shapes]


def launched(fake):
    """The ids of the contexts whose kernels were launched since the last time."""
    return {int(line.split()[1], 16) >> 48 for line in fake.asked() if line.startswith("launch")}


def current_id(fake):
    return contexts.driver.current_id()


EVERY = {
    "conv2d": lambda x, w, b, y: pc.conv2d(x, w, b),
    "again": lambda x, w, b, y: [pc.conv2d(x, w, b) for _ in range(3)][-1],
    "out": lambda x, w, b, y: pc.conv2d(x, w, b, out=y),
    "epilogue": lambda x, w, b, y: pc.conv2d(x, w, b, scale=b, residual=y, activation="relu"),
    "transposed": lambda x, w, b, y: pc.conv_transpose2d(y, w, None, stride=2),
    "input": lambda x, w, b, y: pc.conv2d_input(X, w, y),
    "weight": lambda x, w, b, y: pc.conv2d_weight(x, W, y),
    "bias": lambda x, w, b, y: pc.conv2d_bias(y),
    "many": lambda x, w, b, y: next(iter(pc.conv2d_many([x], w, b))),
    "plan": lambda x, w, b, y: Plan(ConvProblem.forward(2, X, W, B))(x, w, b),
    "bound": lambda x, w, b, y: Plan(ConvProblem.forward(2, X, W, B)).bind(w, b)(x),
    "strided": lambda x, w, b, y: pc.conv2d(strided(x), w, b),
    "Fortran order": lambda x, w, b, y: pc.conv2d(type(x)(x.shape, x.dtype, order="F"), w, b),
    "a part": lambda x, w, b, y: pc.conv2d(x[1:], w, b),
    "interface": lambda x, w, b, y: pc.conv2d(*(Interface(a) for a in (x, w, b))),
}


def test_python_has_no_part_in_calls_that_are_made_again(fake, monkeypatch):
    if repeat._native is None or fake.by_python:
        pytest.skip("the launcher in C makes them")
    counted, convolve = [0], device.convolve
    monkeypatch.setattr(device, "convolve", lambda *args: (counted.__setitem__(0, counted[0] + 1), convolve(*args))[1])
    problem = ConvProblem.forward(2, (8, 64, 56, 56), (64, 64, 3, 3), padding=1)
    with context(fake):
        x, w, b, y, image, filters = arrays(fake, X, W, B, Y, (8, 64, 56, 56), (64, 64, 3, 3))
        pool = Pool(fake)
        pooled = arrays(fake, X, allocator=pool.allocate)[0]
        plan = Plan(problem)
        bound = plan.bind(filters)
        packing = next(Plan(problem, config=c) for c in pc.engines.candidates(problem, plan.device) if Plan(problem, config=c).filter_bytes)
        packed = packing.bind(filters)
        for call in [
            lambda: pc.conv2d(x, w), lambda: pc.conv2d(x, w, b, scale=b, residual=y, activation="relu"), lambda: pc.conv2d(x, w, out=y),
            lambda: pc.conv2d_weight(x, W, y), lambda: pc.conv2d_input(X, w, y), lambda: pc.conv2d(image, filters, padding=1), lambda: bound(image),
            lambda: plan(image, filters), lambda: packing(image, filters), lambda: packed(image), lambda: pc.conv2d(pooled, w),
        ]:  # fmt: skip
            call()
            fake.asked()
            before, first = counted[0], call()
            lines = fake.asked(contexts=True)
            assert counted[0] == before and not {"push", "pop"} & set(lines) and lines
            again = call()
            assert fake.asked(contexts=True)[0].split()[:2] == lines[0].split()[:2]
            assert vars(again).keys() == vars(first).keys() >= {"shape", "dtype", "strides", "gpudata", "allocator"}
            whole = type(x)(first.shape, "f", strides=first.strides)
            for name in set(vars(whole)) - {"gpudata", "allocator"}:
                assert getattr(first, name) == getattr(whole, name)
        assert pc.conv2d(pooled, w).allocator.__self__ is pool
        before = counted[0]
        for _ in range(2):
            with pytest.raises(ConvArgumentError, match="out"):
                pc.conv2d(x, w, out=x[1:])
        assert counted[0] == before + 2
        pc.conv2d(strided(x), w)
        fake.asked()
        pc.conv2d(strided(x), w)  # a launch copies it
        assert counted[0] == before + 3 and len(fake.asked()) > len(lines)
        # an array of another shape, type, strides or alignment is another call
        for other in (arrays(fake, (3, 16, 9, 9))[0], arrays(fake, X, dtype="float64")[0]):
            before = counted[0]
            pc.conv2d(other, arrays(fake, W, dtype=other.dtype)[0])
            assert counted[0] == before + 1


def test_calls_keep_no_references(fake):
    with context(fake):
        x, w, b, y = arrays(fake, X, W, B, Y)
        pool = Pool(fake)
        pooled = arrays(fake, X, allocator=pool.allocate)[0]
        calls = [
            lambda: pc.conv2d(x, w, b), lambda: pc.conv2d(x, w, out=y), lambda: pc.conv2d(pooled, w), lambda: pc.conv2d(strided(x), w),
            lambda: pc.conv2d_weight(x, W, y),
        ]  # fmt: skip
        seen = [x, w, b, y, pooled, *(a.gpudata for a in (x, w, b, y, pooled)), x.shape, x.strides, pool, fake.gpuarray.GPUArray]
        for call in calls:
            for _ in range(3):
                call()
        gc.collect()
        before = [sys.getrefcount(one) for one in seen]
        for call in calls:
            for _ in range(50):
                call()
        gc.collect()
        assert [sys.getrefcount(one) for one in seen] == before
        del seen


def test_an_array_that_gets_other_memory(fake):
    """The launcher in C remembers in which context an array lies, for as long as the array has the same memory."""
    with context(fake) as first:
        x, w = arrays(fake, X, W)
        for _ in range(3):
            pc.conv2d(x, w)
        old = x.gpudata
        with context(fake):
            a, b = arrays(fake, X, W)
            for _ in range(3):
                pc.conv2d(a, b)
            x.gpudata, a.gpudata = a.gpudata, x.gpudata
            fake.asked()
            pc.conv2d(x, b)
            assert launched(fake) == {current_id(fake)}
            for call in (lambda: pc.conv2d(a, b), lambda: pc.conv2d(x, w)):
                with pytest.raises(ConvArgumentError, match="not this thread's current one"):
                    call()
            first.push()
            assert a.gpudata is old
            pc.conv2d(a, w)
            assert launched(fake) == {current_id(fake)}
            fake.drv.Context.pop()


def strided(x):
    """An array that takes every second number of a row."""
    n, c, h, w = x.shape
    wide = type(x)((n, c, h, 2 * w), x.dtype, gpudata=None)
    return type(x)(x.shape, x.dtype, base=wide, gpudata=wide.gpudata, strides=(*wide.strides[:3], 2 * x.dtype.itemsize))


class Interface:
    """An array of another library in any context."""

    def __init__(self, array):
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape, "typestr": array.dtype.str, "data": (int(array.gpudata), False), "strides": None, "version": 3,
        }  # fmt: skip


def check_calls(fake, name):
    """One of the calls in the current context: its launches, and its result."""
    x, w, b, y = arrays(fake, X, W, B, Y)
    made = EVERY[name](x, w, b, y)
    assert launched(fake) == {current_id(fake)} and type(made) is fake.gpuarray.GPUArray
    if name != "out":
        assert made.allocator.__self__ is contexts.device_at(contexts.where_is(int(made.gpudata)))
    return made


@pytest.mark.parametrize("name", EVERY)
def test_every_kind_of_call_in_every_kind_of_context(fake, name):
    """The primary one, two in turn with one handle, nested ones, and those of two GPUs."""
    with get_device(0):
        check_calls(fake, name)
    handles = set()
    for _ in range(3):
        with context(fake) as one:
            handles.add(one.handle)
            kept = check_calls(fake, name)
    assert len(handles) == 1  # the driver gave it again
    with context(fake) as outer:
        check_calls(fake, name)
        with context(fake, 1):
            check_calls(fake, name)
            outer.push()
            check_calls(fake, name)
            fake.drv.Context.pop()
            check_calls(fake, name)
        check_calls(fake, name)
    del kept
    gc.collect()
    assert fake.library.fake_living() == 0


def test_the_current_contexts_are_left_as_they_were(fake):
    """torch makes the primary context current for the driver, and PyCUDA does not learn of it."""
    with context(fake) as own:
        x, w = arrays(fake, X, W)
        primary = contexts.cuda_device(0)
        with primary:
            theirs = arrays(fake, X, W)
        assert fake.current() == own.handle and fake.drv.Context.get_current() is own
        for ours in (own.handle, primary.handle):  # the driver's current one
            fake.library.cuCtxSetCurrent(ours)
            for call in (lambda: pc.conv2d(x, w), lambda: pc.conv2d(*theirs), lambda: pc.conv2d(np.ones(X, "f"), np.ones(W, "f"))):
                for _ in range(3):
                    call()
                    assert fake.current() == ours and fake.drv.Context.get_current() is own
            with get_device(0), primary:
                assert fake.current() == primary.handle == fake.drv.Context.get_current().handle
                arrays(fake, X)
            assert fake.current() == ours and fake.drv.Context.get_current() is own
        fake.library.cuCtxSetCurrent(own.handle)
        assert launched(fake) == {current_id(fake), theirs_id(fake, primary)}
    for _ in range(3):  # none is current
        pc.conv2d(*theirs)
        assert launched(fake) == {theirs_id(fake, primary)} and fake.current() is None


def theirs_id(fake, device):
    with device.current():
        return current_id(fake)


def test_a_context_that_is_gone(fake):
    """Between calls, between a plan and its call, while a result lives: a plan goes on elsewhere, a bound one says what to do."""
    problem = ConvProblem.forward(2, X, W)
    with context(fake):
        x, w = arrays(fake, X, W)
        plan, bound = Plan(problem), Plan(problem).bind(w)
        on_host = Plan(problem).bind(np.ones(W, "f"))
        kept = plan(x, w), bound(x), on_host(np.ones(X, "f"))
    for _ in range(2):
        with context(fake):
            x, w = arrays(fake, X, W)
            assert plan(x, w).shape == plan(x, w).shape == Y and launched(fake) <= {current_id(fake), current_id(fake) - 1}
            plan(np.ones(X, "f"), np.ones(W, "f"))
            for call in (lambda: bound(x), lambda: on_host(np.ones(X, "f"))):  # noqa: B023 -- it is called here
                with pytest.raises(ConvArgumentError, match=r"context.* gone: (bind it again|call context.push\(\))"):
                    call()
            assert pc.conv2d(x, w).shape == Y
    for call in (lambda: plan.launch([1 << 20] * 7), lambda: plan.pack(1 << 20, 1 << 20)):
        with pytest.raises(ConvArgumentError, match=r"needs a CUDA context of cuda:0 .*is gone"):
            call()
    with pytest.raises(ConvArgumentError, match=r"is not one of a GPU's memory, or its CUDA context is gone"):
        pc.conv2d(*kept[:1], *kept[:1])
    del kept
    gc.collect()


def test_an_array_keeps_its_context_alive(fake):
    """As PyCUDA's arrays do; nothing else of ours does."""
    import weakref

    made = fake.drv.Device(0).make_context()
    x, w = arrays(fake, X, W)
    plan = Plan(ConvProblem.forward(2, X, W))
    y, seen = plan(x, w), weakref.ref(made)
    contexts_block = y.gpudata.context
    assert contexts_block is made
    made.detach()
    del x, w, made, contexts_block
    gc.collect()
    assert seen() is not None
    del y
    gc.collect()
    assert seen() is None and plan.device.pool.in_use == 0


def test_fifty_contexts_leave_nothing(fake, monkeypatch):
    """A context for each test, as PyCUDA's mark_cuda_test makes them: those that are gone are forgotten some time."""
    from pycuda_conv import plan as plans

    monkeypatch.setattr(contexts, "MOST", 8)
    for _ in range(50):
        with context(fake):
            y = pc.conv2d(*arrays(fake, X, W))
            assert not contexts._primaries and fake.library.fake_living() == 1  # no primary context is made beside it
            y.get()
            del y
        assert len(contexts._others) <= 9 and plans.cached_plan.cache_info().currsize <= 9
    assert fake.library.fake_living() == 0 and fake.used.value == 0


def test_mixed_contexts_are_refused_by_name(fake):
    with get_device(0):
        theirs = arrays(fake, X, W)
    with context(fake) as first:
        x, w, y = arrays(fake, X, W, Y)
        with context(fake):
            z = arrays(fake, W)[0]
            for call, text in [
                (lambda: pc.conv2d(x, z), "input lies in a CUDA context of cuda:0 that is not this thread's current one, and its result"),
                (lambda: pc.conv2d(theirs[0], z), "input and weight lie in different CUDA contexts of cuda:0, .* the one of torch and CuPy"),
                (lambda: pc.conv2d_weight(theirs[0], W, x), "grad_output lies in a CUDA context"),
                (lambda: pc.conv2d_bias(x), "grad_output lies in a CUDA context"),
                (lambda: pc.conv2d(*theirs, out=y), "out lies in a CUDA context"),
            ]:
                with pytest.raises(ConvArgumentError, match=text):
                    call()
            first.push()
            assert pc.conv2d(x, w, out=y) is y
            fake.drv.Context.pop()
        with pytest.raises(ConvArgumentError, match="out must lie on the CUDA context of the input, the one of torch and CuPy"):
            pc.conv2d(*theirs, out=y)
        assert pc.conv2d(x, w, out=y) is y


def test_a_stream_of_another_context_is_refused(fake):
    with context(fake):
        x, w = arrays(fake, X, W)
        good = fake.drv.Stream()
        with context(fake):
            bad = fake.drv.Stream()
            z = arrays(fake, X, W)
            assert pc.conv2d(*z, stream=bad).shape == Y
        assert pc.conv2d(x, w, stream=good).shape == Y
    with context(fake):
        with get_device(0), contexts.cuda_device(0):
            primary = fake.drv.Stream()
        x, w = arrays(fake, X, W)
        for call in (lambda: pc.conv2d(x, w, stream=primary), lambda: pc.conv2d(np.ones(X, "f"), np.ones(W, "f"), stream=primary)):
            with pytest.raises(ConvArgumentError, match="stream belongs to another CUDA context than the arrays"):
                call()
        assert pc.conv2d(x, w).shape == Y


class Pool:
    """PyCUDA's DeviceMemoryPool, as far as allocators go."""

    def __init__(self, fake, offset=0):
        self.given, self._fake, self._offset = [], fake, offset

    def allocate(self, nbytes):
        assert self._fake.drv.Context.get_current() is not None
        self.given.append(nbytes)
        memory = self._fake.drv.mem_alloc(nbytes + self._offset)
        if not self._offset:
            return memory

        class Off(self._fake.drv.PointerHolderBase):
            def get_pointer(holder):
                return int(memory) + self._offset

        return Off()


@pytest.mark.parametrize("own", [True, False])
def test_results_come_from_the_allocator_of_the_input(fake, own):
    with context(fake) if own else get_device(0):
        pool = Pool(fake)
        x = arrays(fake, X, allocator=pool.allocate)[0]
        w = arrays(fake, W)[0]
        for _ in range(4):
            pool.given.clear()
            y = pc.conv2d(x, w)
            assert pool.given == [y.nbytes] and type(y.gpudata) is fake.drv.DeviceAllocation and y.allocator.__self__ is pool
        pc.conv2d(x, w, out=y)
        assert pool.given == [y.nbytes]
        y = pc.conv2d(y, arrays(fake, (3, 24, 3, 3))[0])
        assert y.allocator.__self__ is pool
        for allocator in (None, 7):  # arrays that were made around an address
            given = type(x)(X, "f", allocator=allocator, gpudata=int(x.gpudata))
            assert type(pc.conv2d(given, w).gpudata).__name__ == "Block"
        del y


def test_memory_that_kernels_cannot_take_and_memory_that_is_not_there(fake):
    with context(fake):
        w = arrays(fake, W)[0]
        x = fake.gpuarray.GPUArray(X, "f", allocator=Pool(fake, 8).allocate, gpudata=arrays(fake, X)[0].gpudata)
        for _ in range(2):
            with pytest.raises(ConvArgumentError, match=r"the input's allocator gave memory at 0x[0-9a-f]+8, but .* a multiple of 16"):
                pc.conv2d(x, w)
        x = arrays(fake, X, allocator=Pool(fake).allocate)[0]
        plain = arrays(fake, X)[0]
        pc.conv2d(x, w)
        fake.total.value = 0
        with pytest.raises(DeviceMemoryError, match=r"cuda:0 is out of memory: 0 of .* free; the input's allocator says"):
            pc.conv2d(x, w)
        with pytest.raises(DeviceMemoryError, match=r"cuda:0 is out of memory: [0-9,]+ bytes were asked for, [0-9,]+ of [0-9,]+ are free"):
            pc.conv2d(plain, w)
        fake.total.value = 1 << 40
        assert pc.conv2d(x, w).shape == pc.conv2d(plain, w).shape == Y


def test_host_arrays_are_convolved_in_pycudas_current_context(fake):
    x, w = np.ones(X, "f"), np.ones(W, "f")
    big = np.ones((64, 16, 60, 60), "f")
    for _ in range(2):
        with context(fake):
            for call in (lambda: pc.conv2d(x, w), lambda: pc.conv2d(x, w, device=0), lambda: pc.conv2d(big, w), lambda: pc.conv2d_bias(x)):
                for _ in range(2):
                    fake.asked()
                    kept = call()
                    assert launched(fake) == {current_id(fake)}
            assert not contexts._primaries
    kept.fill(1)  # memory of ours
    with context(fake, 1) as other:
        pc.conv2d(x, w)
        assert launched(fake) == {current_id(fake)}
        pc.conv2d(x, w, device=0)
        assert launched(fake) == {theirs_id(fake, contexts.cuda_device(0))} and fake.current() == other.handle
        pc.conv2d(x, w, device=other)
        assert launched(fake) == {current_id(fake)}
        pc.conv2d(x, w, device=fake.drv.Device(1))
        assert launched(fake) == {current_id(fake)}
        pc.conv2d(x, w, devices=[0, 1])
        assert not launched(fake) - {theirs_id(fake, contexts.cuda_device(i)) for i in range(2)}
    pc.conv2d(x, w)
    assert launched(fake) == {theirs_id(fake, contexts.cuda_device(0))}
    with context(fake):
        many = list(pc.conv2d_many([x] * 4, w))
        assert [type(y) for y in many] == [np.ndarray] * 4 and launched(fake) == {current_id(fake)}
    with pytest.raises(ConvArgumentError, match="device is a CUDA context that is not PyCUDA's current one"):
        pc.conv2d(x, w, device=other)


def test_a_thread_and_a_context_for_each_gpu(fake):
    wrong, start = [], threading.Barrier(4, timeout=300)

    def work(i):
        start.wait()
        with context(fake, i % 2):
            x, w = arrays(fake, X, W)
            plan = Plan(ConvProblem.forward(2, X, W))
            for _ in range(20):
                ys = pc.conv2d(x, w), plan(x, w), pc.conv2d(np.ones(X, "f"), np.ones(W, "f"))
                if contexts.where_is(int(ys[0].gpudata)) != (i % 2, current_id(fake)):
                    wrong.append(i)
            del ys, x, w

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    gc.collect()
    assert not wrong and fake.library.fake_living() == 0


def test_a_driver_without_ids(fake, monkeypatch):
    monkeypatch.setattr(contexts.driver, "current_id", lambda: 0)
    with context(fake), pytest.raises(ConvArgumentError, match=r"older than CUDA 12.0.*: make arrays in the primary context"):
        pc.conv2d(*arrays(fake, X, W))
    with get_device(0), contexts.cuda_device(0):
        assert pc.conv2d(*arrays(fake, X, W)).shape == Y


def test_bfloat16(fake):
    """That of ml_dtypes is taken; other two bytes are refused by name."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with context(fake):
        x, w = arrays(fake, X, W, dtype=ml_dtypes.bfloat16)
        for _ in range(3):
            y = pc.conv2d(x, w)
            assert y.dtype == ml_dtypes.bfloat16 and y.shape == Y and launched(fake) == {current_id(fake)}
        x, w = (fake.gpuarray.GPUArray(shape, "V2") for shape in (X, W))
        with pytest.raises(TypeError, match="input has the type void16, but a convolution takes arrays of float16, bfloat16"):
            pc.conv2d(x, w)


def test_memory_without_a_context(fake):
    """As stream-ordered memory is: it is used in the current context if that is on the GPU, else in the primary one."""
    def without(shape, gpu=0):
        address = ctypes.c_uint64()
        assert fake.library.fake_alloc(ctypes.byref(address), ctypes.c_size_t(4 * int(np.prod(shape))), ctypes.c_uint64(0), gpu, 0) == 0
        return fake.gpuarray.GPUArray(shape, "f", gpudata=address.value)

    with contexts.cuda_device(0).current():
        x, w, z = without(X), without(W), without(X, 1)
    pc.conv2d(x, w)
    assert launched(fake) == {theirs_id(fake, contexts.cuda_device(0))}
    with context(fake):
        pc.conv2d(x, w)
        assert launched(fake) == {current_id(fake)}
        pc.conv2d(z, without(W, 1))
        assert launched(fake) == {theirs_id(fake, contexts.cuda_device(1))}


def test_torch_in_a_context_that_is_no_primary_one(fake, monkeypatch):
    """Its memory lies there if pycuda.autoinit was current at torch's first use. The call is made there;
    the primary one's memory is refused."""
    from pycuda_conv.arrays.tensors import TORCH, TorchKind

    kept = []

    def tensors(*shapes):
        made = arrays(fake, *shapes)
        kept.extend(made)
        return [torch.from_numpy(np.ctypeslib.as_array((ctypes.c_float * a.size).from_address(int(a.gpudata)))).view(a.shape) for a in made]

    monkeypatch.setattr(TORCH, "_current_stream", lambda ordinal: 0)
    monkeypatch.setattr(TORCH, "on_gpu", lambda array: True)
    monkeypatch.setattr(TorchKind, "signature", lambda self, array: (array.shape, array.dtype, contexts.where_lies(0, array.data_ptr)))
    repeat.public_calls.clear()
    repeat.learn(torch, -1, exchange=False)
    try:
        with torch.no_grad():
            primary = contexts.cuda_device(0)
            with primary:
                x, w, tensors_there = tensors(X, W, Y)
            plan = Plan(ConvProblem.forward(2, X, W))
            bound = plan.bind(w)
            for call in (lambda: pc.conv2d(x, w), lambda: pc.conv2d_bias(x), lambda: plan(x, w), lambda: plan.bind(w)(x)):
                assert [call() is not None for _ in range(3)] and launched(fake) == {theirs_id(fake, primary)}
            with context(fake) as own:
                a, b, y = tensors(X, W, Y)
                for _ in range(2):
                    for call in (
                        lambda: pc.conv2d(a, b), lambda: pc.conv2d_bias(a), lambda: plan(a, b), lambda: plan.bind(b)(a),
                        lambda: pc.conv2d(a, b, out=y)
                    ):
                        for _ in range(3):
                            call()
                            assert launched(fake) == {current_id(fake)} and fake.current() == own.handle
                for call, text in [
                    (lambda: pc.conv2d(x, w), "input lies in the primary context of cuda:0, but .* import pycuda.autoprimaryctx instead"),
                    (lambda: pc.conv2d(a, w), "weight lies in the primary context of cuda:0"), (lambda: plan(x, w), "input lies in the primary"),
                    (lambda: pc.conv2d_bias(x), "grad_output lies in the primary context"), (lambda: bound(a), "bind it again"),
                    (lambda: pc.conv2d(a, b, out=tensors_there), "out lies in .*(primary|another CUDA) context"),
                ]:
                    for _ in range(2):
                        with pytest.raises(ConvArgumentError, match=text):
                            call()
                assert not launched(fake) and fake.current() == own.handle
                with pytest.MonkeyPatch.context() as patch:  # torch's allocator may give memory of either context
                    patch.setattr(TorchKind, "empty", lambda *_: tensors_there)
                    with pytest.raises(
                        ConvArgumentError, match=r"the result lies in another CUDA context .*: import pycuda.autoprimaryctx"
                    ):
                        pc.conv2d(a, b)
            assert pc.conv2d(x, w).shape == Y and launched(fake) == {theirs_id(fake, primary)}
            kept.clear()
    finally:
        repeat.public_calls.clear()
        repeat.learn(torch)


def test_a_forked_child_is_refused_in_every_context(fake):
    import os

    with context(fake):
        x, w = arrays(fake, X, W)
        pc.conv2d(x, w)
        device = contexts.device_at(contexts.where_is(int(x.gpudata)))
        read, write = os.pipe()
        if child := os.fork():
            os.close(write)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and os.read(read, 100) == b"3"
            return
        refused = 0
        for call in (device.push, device.is_current, lambda: pc.conv2d(x, w)):
            try:
                call()
            except BackendError as error:
                refused += "was in use when this process was forked" in str(error)
        os.write(write, str(refused).encode())
        os._exit(0)
