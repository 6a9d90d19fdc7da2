"""Launches: the launcher in C and the one in Python ask the driver for the same, byte for byte."""

import gc
import re
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import FakeCuda
from test_background import give_constants

from pycuda_conv import BackendError, ConvArgumentError, ConvProblem, DeviceMemoryError, Plan, background, engines
from pycuda_conv.call import Operands
from pycuda_conv.engines.nn import batch_norm
from pycuda_conv.execute.device import convolve
from pycuda_conv.runtime import device as device_module
from pycuda_conv.runtime import driver, get_device, launcher, streams, tensor_map
from pycuda_conv.runtime.base import KernelLaunch

IN_C = pytest.mark.skipif(
    shutil.which("gcc") is None or launcher.launcher_in_c() is None, reason="the launcher in C is not built: python setup.py build_ext --inplace"
)
KINDS = [pytest.param("c", marks=IN_C), "python"]


@pytest.fixture
def fake(tmp_path, monkeypatch):
    return FakeCuda(tmp_path, monkeypatch)


def plans(fake, problem, **options):
    """The same plan for a device that launches in C, and for one that does by Python."""
    return [Plan(problem, fake.device(kind), **options) for kind in ("c", "python")]


def buffers(at):
    """Addresses of input, weight, bias, no scale, no residual, result and workspace."""
    return tuple(at + (i << 32) if i not in (3, 4) else 0 for i in range(7))


def check_same(fake, ours, theirs):
    """That two plans ask the driver for the same, in all ways in which they can be called. What they asked for."""
    stream = SimpleNamespace(handle=0x77)
    calls = [
        lambda plan: plan.launch(buffers(1 << 40)),
        lambda plan: plan.launch((*buffers(1 << 40)[:3], 3 << 50, 5 << 50, *buffers(1 << 40)[5:]), 0x55),
        lambda plan: plan.launch(buffers(1 << 44), stream),  # tensor maps of other addresses
        lambda plan: plan.launch(list(buffers(1 << 40)), stream),
    ]
    if ours.filter_bytes:
        calls += [lambda plan: plan.launch(buffers(1 << 40), 0, 7 << 50), lambda plan: plan.pack(1 << 45, 7 << 50, 0x99)]
    if ours.reads_filter_last:
        calls.append(lambda plan: plan.launch(buffers(1 << 40), None, filter_last=True))
    everything = []
    for call in calls:
        asked = []
        for plan in (ours, theirs):
            fake.asked()
            call(plan)
            asked.append(fake.asked(plan.device))
        assert asked[0] and asked[0] == asked[1]
        everything += asked[0]
    return everything


PROBLEMS = [
    ConvProblem.forward(2, (4, 16, 32, 32), (32, 16, 3, 3), padding=1),
    ConvProblem.forward(2, (1, 256, 14, 14), (256, 256, 3, 3), padding=1),
    ConvProblem.forward(2, (8, 64, 56, 56), (64, 64, 3, 3), padding=1),
    ConvProblem.forward(2, (8, 256, 14, 14), (256, 256, 1, 1)),
    ConvProblem.forward(2, (4, 128, 28, 28), (192, 128, 3, 3), padding=1, stride=2),
    ConvProblem.forward(2, (2, 32, 30, 30), (32, 1, 3, 3), padding=1, groups=32),
    ConvProblem.forward(3, (2, 8, 10, 12, 14), (16, 8, 3, 3, 3), padding=1),
    ConvProblem.forward(1, (2, 24, 100), (48, 24, 5), padding=2, dilation=2),
    # four phases, some of them side by side
    ConvProblem.gradient("input", 2, (4, 96, 28, 28), (64, 96, 3, 3), (4, 64, 14, 14), padding=1, stride=2),
    ConvProblem.transposed(2, (2, 20, 5, 6), (20, 18, 3, 2), padding=(1, 0), stride=(1, 2)),
    ConvProblem.gradient("weight", 2, (4, 64, 28, 28), (96, 64, 3, 3), (4, 96, 28, 28), padding=1),
    ConvProblem.gradient("weight", 2, (32, 256, 14, 14), (256, 256, 3, 3), (32, 256, 14, 14), padding=1),
]
NUMBERS = [("float32", "fp32"), ("float32", "tf32"), ("float16", "fp32"), ("bfloat16", "fp32"), ("float64", "fp32")]


@IN_C
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_both_launchers_ask_the_driver_for_the_same(fake, problem):
    """The planner's choice and other configurations, in both layouts, with and without tensor maps."""
    for dtype, precision in NUMBERS:
        first = replace(problem, dtype=dtype, precision=precision)
        for asked in (first, replace(first, layout="NHWC")) if problem.direction != "wgrad" else (first,):
            some = engines.candidates(asked, fake.device("c"))
            for config in (None, *Random(f"{asked}").sample(some, min(4, len(some)))):
                check_same(fake, *plans(fake, asked, config=config))


@IN_C
@pytest.mark.parametrize("problem", [PROBLEMS[2], PROBLEMS[5]], ids=["two kernels", "one kernel"])
def test_a_plan_loads_all_kernels_and_makes_the_launchers_that_are_asked_for(fake, problem):
    """So its first call may be captured, in which nothing may be loaded."""
    plan = Plan(problem, fake.device("python"))
    loaded = set(plan.device._modules)
    assert loaded == {launch.source() for launch in background.launches(plan.loaded)}
    assert [made is not None for made in plan._launchers] == [False, False, True, False]
    plan.launch(buffers(1 << 40), 0, 7 << 50)
    plan.pack(1 << 45, 7 << 50)
    plan.launch(buffers(1 << 40))
    assert [made is not None for made in plan._launchers] == [True, True, True, False] and set(plan.device._modules) == loaded


def test_what_is_compared_has_tensor_maps_packed_filters_structs_and_side_streams(fake):
    device = fake.device("c")
    layouts = [
        replace(p, dtype=dtype, layout=layout) for p in PROBLEMS[:8] for dtype in ("float32", "float16") for layout in ("NCHW", "NHWC")
    ]
    made = [Plan(problem, device) for problem in (*PROBLEMS, *layouts)]
    launches = [launch for plan in made for launch in background.launches(plan.schedule)]
    assert any(one.maps for one in launches) and any(one.arguments for one in launches)
    assert any(plan.filter_bytes for plan in made) and any(plan.reads_filter_last for plan in made)
    assert any(isinstance(one, launcher.StreamWait) for plan in made for one in device._operations(plan.schedule.whole))


@IN_C
def test_the_epilogue_and_what_is_noted_for_a_batch_norm(fake):
    problem = PROBLEMS[2]
    check_same(fake, *plans(fake, replace(problem, has_bias=True, has_scale=True, has_residual=True, activation="relu")))
    check_same(fake, *plans(fake, problem, with_moments=True))


@IN_C
def test_launches_side_by_side(fake):
    """On the caller's stream and on side streams, ordered by events before and after; and one after the other where each fills the GPU."""
    one = KernelLaunch("copy_strided", {}, 3, 64, (0, (1, 64)), (5, -7))
    asked = {}
    for kind in ("c", "python"):
        device = fake.device(kind)
        few, many = [replace(one, scalars=(i,)) for i in range(6)], [replace(one, grid=1 << 20)] * 2
        launch = device.schedule_launcher([few, [one], few[:2], many])
        fake.asked()
        launch((1 << 40, 1 << 41), 0x55)
        asked[kind] = fake.asked(device)
    assert asked["c"] == asked["python"]
    order = [re.sub(r"launch .* on (\w+),.*", r"\1", line) for line in asked["c"]]
    fork = lambda *sides: [line for side in sides for line in ("record own0 on 0x55", f"own{side} waits for own0, 0")]  # noqa: E731
    join = lambda *sides: [line for side in sides for line in (f"record own0 on own{side}", "0x55 waits for own0, 0")]  # noqa: E731
    wide = ["0x55", "own1", "own2", "own3", "0x55", "own1"]
    assert order == [*fork(1, 2, 3), *wide, *join(1, 2, 3), "0x55", *fork(1), "0x55", "own1", *join(1), "0x55", "0x55"]


@IN_C
def test_the_launches_of_a_batch_norm(fake):
    pixels = batch_norm.Pixels("float32", "NCHW", 4, 64, 196)
    asked = []
    for kind in ("c", "python"):
        batch_norm.compiled.cache_clear()
        launch, _ = batch_norm.compiled(batch_norm.channel_sums, pixels, fake.device(kind))
        fake.asked()
        launch((1 << 40, 1 << 41, 1 << 42), None)
        asked.append(fake.asked())
    batch_norm.compiled.cache_clear()
    assert len(asked[0]) == 2 and asked[0] == asked[1]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_the_driver_says_what_failed(fake, kind):
    device = fake.device(kind)
    one = KernelLaunch("copy_strided", {}, 3, 64, (0,), ())
    launch = device.schedule_launcher([[one], [one, replace(one, kernel="another", file="copy_strided")]])
    messages = []
    for number in range(7):
        fake.failing.value = number
        with pytest.raises(RuntimeError, match=r"CUDA_ERROR_LAUNCH_FAILED \(719\)") as caught:
            launch((1 << 40,), None)
        messages.append(str(caught.value).partition(" failed")[0])
        asked = fake.asked(device)
        joined = ["record own0 on own1", "0x0 waits for own0, 0"] if number > 2 else []  # what runs beside the caller's stream is awaited
        assert [line.replace("(nil)", "0x0") for line in asked[number + 1 :]] == joined
    launched = ["launching copy_strided", "launching another"]
    assert messages == [launched[0], "cuEventRecord", "cuStreamWaitEvent", *launched, "cuEventRecord", "cuStreamWaitEvent"]
    launch((1 << 40,), None)


def test_too_little_memory(fake, monkeypatch):
    """A small buffer may take what the pool holds; the error says how much was asked for. Refused streams are made later."""
    device = fake.device("python")
    monkeypatch.setattr(driver, "pinned", lambda: SimpleNamespace(empty=lambda shape, dtype: None))
    with device:
        block = device.allocate(2 << 20)
        fake.total.value = fake.used.value + 5
        with pytest.raises(DeviceMemoryError, match=r"cuda:0 is out of memory: 64 bytes were asked for, 5 of 2,097,157 are free"):
            device.small_buffers(64)
        with pytest.raises(DeviceMemoryError, match="1,048,576 bytes were asked for"):
            device.allocate(1 << 20)
        del block  # the pool holds it, and gives it back
        assert device.pool.in_use == 0 and device.small_buffers(64)[2] and fake.used.value == 64


def test_a_pool_keeps_blocks_and_asks_for_no_context_to_get_them_back(fake):
    device = fake.device("python")
    fake.strict.value = 1
    blocks = [device.allocate(n) for n in (1, 512, 513, 5 << 20, (5 << 20) + 1)]
    addresses = [int(block) for block in blocks]
    assert device.pool.in_use == 5 and len(set(addresses)) == 5
    del blocks  # no context is current
    assert device.pool.in_use == 0
    again = [device.allocate(n) for n in (512, 300, 700, 5 << 20)]
    assert {int(block) for block in again} <= set(addresses) and fake.dead.value == fake.foreign.value == 0
    used = fake.used.value
    again.pop().free()
    with device.current():
        device.pool.free_held()
    assert fake.used.value < used and device.pool.in_use == 3


def test_streams_that_the_driver_refuses_are_made_by_the_next_call(fake, monkeypatch):
    device, unraisable = fake.device("python"), []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    with monkeypatch.context() as patch:
        patch.setattr(streams, "Stream", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            device.order(None, 0x55)
    gc.collect()
    assert not unraisable and not device._idle_streams
    device.order(None, 0x55)


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_that_are_none(fake, kind):
    launch = fake.device(kind).launcher(KernelLaunch("copy_strided", {}, 3, 64, (0, 1), ()))
    for given in [(("x", 1), None), ((1,), None), ((1, None), None)]:
        fake.asked()
        with pytest.raises((TypeError, IndexError)):
            launch(*given)
        assert not fake.asked()


@pytest.mark.parametrize("kind", KINDS)
def test_other_threads_run_while_the_driver_waits(fake, kind):
    """A full queue of launches blocks, maybe until a callback has run that needs Python."""
    launch = fake.device(kind).launcher(KernelLaunch("copy_strided", {}, 3, 64, (0,), ()))
    fake.blocked.value = 1
    with ThreadPoolExecutor(4) as pool:
        coming = [pool.submit(launch, (1 << 40,), None) for _ in range(4)]
        end = time.monotonic() + 300
        while fake.waiting.value < 4 and time.monotonic() < end:
            time.sleep(0.001)
        seen = fake.waiting.value
        fake.blocked.value = 0
        for one in coming:
            one.result(300)
    assert seen == 4


@pytest.mark.parametrize("kind", KINDS)
def test_threads_share_a_plan(fake, kind, monkeypatch):
    """Each has tensor maps and addresses of its own, and side streams."""
    problem = replace(PROBLEMS[2], dtype="float16")
    plan = Plan(replace(problem, layout="NHWC"), fake.device(kind))
    assert any(launch.maps for launch in background.launches(plan.schedule))
    expected = set()
    for i in range(4):
        fake.asked()
        plan.launch(buffers((i + 1) << 40), i + 1)
        expected |= set(fake.asked())
    fake.asked()
    encode, start = tensor_map.encoded, threading.Barrier(4, timeout=300)

    def slowly(described, address):
        """Let other threads run between a map's making and its use."""
        time.sleep(0.0005)
        return encode(described, address)

    monkeypatch.setattr(tensor_map, "encoded", slowly)
    plan = Plan(replace(PROBLEMS[2], dtype="float16", layout="NHWC"), fake.device(kind))

    def work(i):
        start.wait()
        for _ in range(50):
            plan.launch(buffers((i + 1) << 40), i + 1)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert set(fake.asked()) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_whose_kernels_change_launches_the_new_ones(fake, kind, monkeypatch):
    """Not in a capture; and each of its schedules is prepared again."""
    give_constants(monkeypatch, 2)
    monkeypatch.delenv("PYCUDA_CONV_BACKGROUND", raising=False)
    problem = PROBLEMS[0]
    monkeypatch.setattr(device_module.CudaDevice, "compiled", lambda self, launch: "OF_THE_LAYER" not in launch.defines)
    plan = Plan(problem, fake.device(kind))
    coming = []
    monkeypatch.setattr(device_module.CudaDevice, "compile_in_background", lambda self, steps: coming)

    def functions(stream=None):
        fake.asked()
        plan.launch(buffers(1 << 40), stream)
        return [line.split()[1] for line in fake.asked() if line.startswith("launch")]

    first = functions()
    assert functions() == first and plan._background is not None
    assert functions(0xCA9) == first  # which is being captured
    assert functions(0xCA9) == first
    assert functions() == first  # now it takes them
    assert plan._background is None
    second = functions()
    assert len(second) == len(first) and not set(second) & set(first)


@pytest.mark.gpu
@IN_C
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_both_launchers_give_the_same_bits_on_a_gpu(problem, monkeypatch):
    """On the default stream, on another one, and in a graph; with arrays that move, so that tensor maps are encoded again."""
    device = get_device("cuda:0")
    for dtype, layout in [("float32", "NCHW"), ("float16", "NHWC" if problem.ndim > 1 and problem.direction != "wgrad" else "NCHW")]:
        asked = replace(problem, dtype=dtype, layout=layout)
        generator = torch.Generator().manual_seed(5)
        x, w = (torch.randn(shape, generator=generator).to("cuda", getattr(torch, dtype)) for shape in asked.operand_shapes[:2])
        if layout == "NHWC":
            x = x.contiguous(memory_format=torch.channels_last if problem.ndim == 2 else torch.channels_last_3d)
        results = []
        for native in (launcher.launcher_in_c(), None):
            monkeypatch.setattr(device, "_in_c", native)
            plan = Plan(asked, device)
            results += [plan(x, w), plan(x.clone(), w.clone()), plan(x, w)]
            side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                results.append(plan(x, w))
                held = plan(x, w)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                held = plan(x, w)
            held.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            results.append(held)
        assert all(torch.equal(results[0], one) for one in results[1:]) and results[0].isfinite().all()


def convolved(device, stream=None):
    """A function that convolves torch's tensors there, which the driver's stand-in has no need to see, and a plan for it."""
    from pycuda_conv.arrays.tensors import TorchKind

    kind = TorchKind()
    kind._current_stream = lambda ordinal: 0
    kind.signature = lambda array: (array.shape, array.dtype, array.get_device() + 1)
    plan = Plan(ConvProblem.forward(2, (2, 16, 8, 8), (16, 16, 3, 3), padding=1), device)
    w = torch.zeros(16, 16, 3, 3)
    return torch, lambda x, out=None, residual=None: convolve(kind, plan, Operands(x, w, residual=residual), out, stream)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_given_back_after_its_use_when_a_launch_fails(fake, kind):
    """The current stream, which owns the memory, waits for the caller's, where some kernels may run."""
    torch, convolve = convolved(fake.device(kind), stream=0x55)
    fake.asked()
    convolve(torch.zeros(2, 16, 8, 8))
    whole = fake.asked()
    for number, line in enumerate(whole):
        if line.startswith("launch"):
            fake.failing.value = number
            with pytest.raises(RuntimeError, match=r"launching .* failed: CUDA_ERROR_LAUNCH_FAILED"):
                convolve(torch.zeros(2, 16, 8, 8))
            last = fake.asked()[-2:]
            assert last == whole[-2:] and " waits for " in last[1]


@IN_C
def test_a_context_that_is_current_is_not_pushed(fake):
    device = fake.device("c")
    torch, convolve = convolved(device)
    fake.asked()
    convolve(torch.zeros(2, 16, 8, 8))
    first, *launches, last = fake.asked(contexts=True)
    assert (first, last) == ("push", "pop") and launches and not {"push", "pop"} & set(launches)
    with device:
        fake.asked()
        convolve(torch.zeros(2, 16, 8, 8))
        assert not {"push", "pop"} & set(fake.asked(contexts=True))


def test_out_may_not_share_memory_with_what_is_read(fake):
    torch, convolve = convolved(fake.device("python"))
    memory = torch.zeros(4, 16, 8, 8)
    convolve(memory[:2], out=memory[2:])
    convolve(memory[:2], out=memory[2:], residual=memory[2:])
    apart = torch.zeros(2, 16, 8, 8)
    for x, residual, out, what in [
        (memory[1:3], None, memory[2:], "input"), (memory[::2], None, memory[1:3], "input"), (apart, memory[::2], memory[1:3], "residual"),
    ]:
        fake.asked()
        with pytest.raises(ConvArgumentError, match=f"out .*{what}"):
            convolve(x, out=out, residual=residual)
        assert not fake.asked()


# ---- which launcher


def test_without_the_extension_python_launches(fake, monkeypatch):
    monkeypatch.setitem(sys.modules, "pycuda_conv.runtime._launch", None)
    device = fake.device("")
    launch = device.launcher(KernelLaunch("copy_strided", {}, 3, 64, (0,), ()))
    fake.asked()
    launch((1 << 40,), None)
    assert device._in_c is None and len(fake.asked()) == 1
    with pytest.raises(BackendError, match=r"PYCUDA_CONV_LAUNCHER is 'c', but .* build_ext --inplace"):
        fake.device("c")


@IN_C
def test_the_extension_refuses_what_is_no_schedule():
    native = launcher.launcher_in_c()
    launch = (0, 0, 1, 1, 1, 0, 0, 0, b"12345678", (), ())
    for operations, error in [
        (((3, 0),), ValueError), (((1, -1),), ValueError), (((1, 8),), ValueError), ((1,), TypeError), (((1, 2, 3),), TypeError),
        (((*launch[:9], ((1, 0, 0),), ()),), ValueError), (((*launch[:9], ((0, -1, 0),), ()),), ValueError),
        (((*launch[:10], ((0, 0, 0, repr),)),), ValueError), (((0, 0),), ValueError),
    ]:
        with pytest.raises(error):
            native.prepare((1, 1, 1), operations)
    forks = native.prepare((1, 1, 1), ((1, 2),))
    with pytest.raises(ValueError, match="takes 3 streams, got 1"):
        native.launch(forks, (), None, None)
    with pytest.raises(ValueError):
        native.launch(object(), (), None, None)
    with pytest.raises(TypeError, match="launch takes 4 arguments, got 1"):
        native.launch(forks)
