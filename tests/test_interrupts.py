"""Ctrl-C and SIGTERM while OpenCL compiles and computes, in calls of the library and in the command; and launches in parts."""

import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import why_no_opencl
from reference import kept_folder, started

import pycuda_conv as pc
from pycuda_conv.interrupt import INTERRUPTED
from pycuda_conv.runtime import get_device, opencl, waiting

pytestmark = pytest.mark.skipif(bool(why_no_opencl()), reason=str(why_no_opencl()))

PROBLEMS = {
    "batched": ("conv2d", (3, 24, 29, 31), (40, 24, 3, 3), {"padding": 1}), "tile": ("conv2d", (2, 1, 90, 70), (1, 1, 5, 5), {}),
    "depthwise": ("conv2d", (2, 96, 30, 30), (96, 1, 3, 3), {"groups": 96}), "one dimension": ("conv1d", (3, 5, 4000), (7, 5, 9), {"stride": 2}),
    "transposed": ("conv_transpose2d", (2, 20, 17, 15), (20, 24, 3, 3), {"stride": 2}), "volumes": ("conv3d", (2, 3, 12, 13, 14), (5, 3, 3, 3, 3), {}),
    "gradient": ("conv2d_weight", (8, 48, 20, 20), (64, 48, 3, 3), {}), "input": ("conv2d_input", (4, 12, 20, 20), (16, 12, 3, 3), {}),
}  # fmt: skip


def a_call(function, x, w, options, dtype):
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(dtype) for shape in (x, w))
    if "_weight" in function or "_input" in function:
        grad = rng.standard_normal(pc.ConvProblem.forward(2, x.shape, w.shape, **options).result_shape).astype(dtype)
        arguments = (x, w.shape, grad) if "_weight" in function else (x.shape, w, grad)
    else:
        arguments = (x, w)
    return lambda: getattr(pc, function)(*arguments, device="opencl", **options)


@pytest.mark.parametrize(
    "name, dtype", [*((name, "float32") for name in PROBLEMS), ("batched", "float64"), ("tile", "float16"), ("gradient", "float64")]
)
def test_parts_give_the_same_bits(monkeypatch, name, dtype):
    """Parts of a few blocks, whose sizes differ from one another, against as few parts as can be."""
    call, counts = a_call(*PROBLEMS[name], dtype), []
    monkeypatch.setattr(opencl, "PART_SECONDS", 1e9)
    whole = call()

    class BlockTime:
        seconds = 1.0

        def __setattr__(self, name, value):
            pass

    enqueue = type(get_device("opencl"))._launch_in_parts

    def counted(self, step, kernel, arguments, block_time):
        def launch(queue, size, local, *rest, global_offset):
            counts.append((step.grid, size[0] // local[0], global_offset[0] // local[0] - 1))
            return kernel(queue, size, local, *rest, global_offset=global_offset)

        enqueue(self, step, launch, arguments, BlockTime())

    monkeypatch.setattr(opencl, "PART_SECONDS", 3.0)
    monkeypatch.setattr(opencl.OpenCLDevice, "_launch_in_parts", counted)
    assert np.array_equal(call().view(np.uint8), whole.view(np.uint8))
    largest = max(grid for grid, _, _ in counts)
    assert largest > 3 and all(0 < count <= 3 for _, count, _ in counts)
    assert sum(count for _, count, _ in counts) >= largest and {0} < {first for _, _, first in counts}


def test_no_part_makes_pocl_compile_once_more():
    """One machine code of a kernel serves small and large grids, and all offsets."""
    device = get_device("opencl")
    kernels = set(device._workshop.folder.rglob("*.so"))
    for n in (1, 40):
        pc.conv2d(np.ones((n, 3, 211, 97), "f"), np.ones((5, 3, 3, 3), "f"), device="opencl", dilation=2)
    made = [path.parent.parent for path in device._workshop.folder.rglob("*.so") if path not in kernels]
    assert len(made) == len(set(made))


def test_work_is_cut_by_measured_time(monkeypatch):
    """The first blocks of a launch are timed; after that, OpenCL never has more blocks than take PART_SECONDS."""
    x, w = np.ones((1, 8, 40, 40), "f"), np.ones((8, 8, 3, 3), "f")
    device, block_times, waits = get_device("opencl"), [], []
    in_parts, finish = opencl.OpenCLDevice._launch_in_parts, opencl.OpenCLDevice._finish
    monkeypatch.setattr(
        opencl.OpenCLDevice, "_launch_in_parts", lambda *given: (block_times.append((given[-1], given[1].grid)), in_parts(*given))[1]
    )
    monkeypatch.setattr(
        opencl.OpenCLDevice, "_finish", lambda self, new=False: (waits.append(sum(self._given.values())), finish(self, new))[1]
    )
    pc.Plan(pc.ConvProblem.forward(2, x.shape, w.shape), device)(x, w)
    ((block_time, grid),) = block_times
    first = next(blocks for blocks in waits if blocks)
    assert first == min(device.multiprocessors, grid) and 0 < block_time.seconds < 10
    block_time.seconds = 0.01  # as if a block took so long: two parts of 20 blocks are as much as OpenCL may have
    waits.clear()
    # which measures nothing
    finish = lambda self, new: (self._given.clear(), self.queue.finish(), setattr(self, "_queued", 0.0))  # noqa: E731
    with device._lock:
        device._launch_in_parts(SimpleNamespace(grid=64, block=64), lambda *_, **__: None, (), block_time)
    assert [blocks for blocks in waits if blocks] == [20, 20, 20] and sum(device._given.values()) == 4
    device._given, device._queued = {}, 0.0


LIBRARY = """
import os, resource, signal, sys, threading, time
start = time.perf_counter()
import numpy as np
import pycuda_conv as pc
from pycuda_conv.runtime import get_device

def interrupted(call, seconds):
    "Seconds from the signal to the exception."
    sent = []
    def send():
        time.sleep(seconds)
        sent.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=send).start()
    try:
        call()
    except KeyboardInterrupt:
        return time.perf_counter() - sent[0]
    sys.exit("the call ended before the signal came")

x, w = np.ones((1, 2, 200, 200), "f"), np.ones((4, 2, 3, 3), "f")
large, y = np.ones((64, 64, 128, 128), "f"), np.full((64, 64, 124, 124), 7, "f")
wide = np.ones((64, 64, 5, 5), "f")
device = get_device("opencl")
print("starting", time.perf_counter() - start)
print("compiling", interrupted(lambda: pc.conv2d(x, w, device="opencl", dilation=2), 0.1))
for _ in range(2):
    print("computing", interrupted(lambda: pc.conv2d(large, wide, out=y, device="opencl"), 2))
    before = y.copy()
    time.sleep(0.5)
    assert np.array_equal(y, before), "something still writes"
    y[...] = 7
expected = 18.0 * np.ones((1, 4, 196, 196), "f")
assert np.array_equal(pc.conv2d(x, w, device="opencl", dilation=2), expected)
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(5):
    interrupted(lambda: pc.conv2d(large, wide, device="opencl"), 0.3)
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 2.5 * y.nbytes / 1024, "memory leaks"
assert np.array_equal(pc.conv2d(x, w, device="opencl", dilation=2), expected) and device._queued == 0
"""


def test_ctrl_c_in_a_call_comes_soon_and_leaves_everything_usable(fast_env, tmp_path):
    env = {**fast_env, "PYCUDA_CONV_CACHE_DIR": str(tmp_path)}  # an empty cache: the kernel has to be compiled
    done = subprocess.run([sys.executable, "-c", LIBRARY], env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    start, *took = (float(line.split()[1]) for line in done.stdout.splitlines())
    assert len(took) == 3 and max(took) < 2 * start  # a few tenths of a second, and the start takes one or more


def ended(arguments, env, folder, number, begun, seconds=0):
    """Send a signal to a command some seconds after `begun()`; its status is that of the signal.

    Its output, the lines that it says without those of PoCL's compiler, and how long it took from the signal to its end, in the time from
    its start until it had begun.
    """
    start = time.monotonic()
    with started(*arguments, env=env, text=True, cwd=folder) as process:
        while not begun():
            assert process.poll() is None and time.monotonic() < start + 400, process.communicate()
            time.sleep(0.01)
        begun_after = time.monotonic() - start
        time.sleep(seconds)
        process.send_signal(number)
        sent = time.monotonic()
        out, err = process.communicate(timeout=400)
        took = time.monotonic() - sent
    assert process.returncode == 128 + number, err
    return out, [line for line in err.splitlines() if line != "1 error generated."], took / begun_after


@pytest.mark.parametrize("kind, number, word", [
    ("npy", signal.SIGTERM, "terminated"), ("zarr", signal.SIGINT, "interrupted"), ("tif", signal.SIGTERM, "terminated"),
])  # fmt: skip
def test_the_command_ends_soon(fast_env, tmp_path, kind, number, word):
    """With a kernel that would take many minutes. A block of it, which can't be stopped, takes a tenth of a second."""
    np.save(tmp_path / "x.npy", np.ones((1, 1, 2000, 2000), "f"))
    np.save(tmp_path / "w.npy", np.ones((1, 1, 101, 101), "f"))
    if kind != "npy":
        pytest.importorskip("zarr")
        pytest.importorskip("tifffile")
        pytest.importorskip("dask")
    arguments = [
        "-m", "pycuda_conv", "run", "--filter", "w.npy", "x.npy", f"y.{kind}", "--device", "opencl", "--algorithm", "direct",
        *["--axes", "ncyx"] * (kind != "npy")
    ]
    env = {**fast_env, "POCL_EXTRA_BUILD_FLAGS": "-cl-opt-disable", "PYCUDA_CONV_CACHE_DIR": str(kept_folder() / "cache")}
    out, lines, took = ended(arguments, env, tmp_path, number, lambda: any(path.suffix == ".part" for path in tmp_path.iterdir()), 0.4)
    assert out == "" and word in [line.partition(";")[0] for line in lines] and took < 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["w.npy", "x.npy"]
    assert any("--resume" in line for line in lines) if kind != "npy" else lines[0] == word


@pytest.mark.parametrize("number, word", [(signal.SIGTERM, "terminated"), (signal.SIGINT, "interrupted")])
def test_verify_ends_soon(fast_env, tmp_path, number, word):
    """It waits for the kernel that is compiled."""
    env = {**fast_env, "PYCUDA_CONV_CACHE_DIR": str(tmp_path)}
    out, lines, took = ended(["-m", "pycuda_conv", "verify", "--device", "opencl"], env, tmp_path, number, lambda: any(tmp_path.iterdir()))
    assert out == "" and lines in ([word], [word, "stopping: a kernel is still being compiled"]) and took < 3


def test_ctrl_c_while_python_makes_a_class_ends_with_the_status(python_env, tmp_path):
    """dataclass() and namedtuple() give texts to exec(), where imports spend much time: a caught Ctrl-C ended the process by itself."""
    (tmp_path / "started.py").write_text("""
from pycuda_conv import cli
def work(argv):
    exec("raise KeyboardInterrupt")
cli._main = work
raise SystemExit(cli.main([]))
""")
    done = subprocess.run(
        [sys.executable, "-m", "started"], env=python_env, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", "interrupted\n")


def test_threads_give_up_when_the_process_is_about_to_end():
    done = []
    waiting.stop()
    try:
        with pytest.raises(waiting.Stopped):
            waiting.until(lambda: done)
    finally:
        waiting.stop(False)
    done.append(1)
    waiting.until(lambda: done)


def test_handlers_of_signals_stay_python_s(fast_env, tmp_path):
    """LLVM puts its own in their place when it compiles: a signal could end the process without a word."""
    code = """
import os, signal
import numpy as np, pycuda_conv as pc
got = []
signal.signal(signal.SIGUSR2, lambda *_: got.append("usr2"))
signal.signal(signal.SIGTERM, lambda *_: got.append("term"))
signal.signal(signal.SIGHUP, signal.SIG_IGN)
pc.conv2d(np.ones((1, 3, 20, 20), "f"), np.ones((3, 3, 3, 3), "f"), device="opencl")
for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP):
    os.kill(os.getpid(), number)
print(*got)
"""
    env = {**fast_env, "PYCUDA_CONV_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=900, check=False)
    assert (done.returncode, done.stdout) == (0, "usr2 term\n"), done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_import_of_pyopencl(monkeypatch, number):
    """Its nanobind ends the process where a handler raises."""
    imported = []

    def importing(name):
        signal.raise_signal(number)
        time.sleep(0.01)
        imported.append(name)
        raise ImportError("no such module")

    def stop(*_):
        raise InterruptedError

    monkeypatch.setattr(opencl.importlib, "import_module", importing)
    before = signal.signal(number, stop)
    try:
        with pytest.raises(InterruptedError):
            opencl._pyopencl()
        assert imported == ["pyopencl"] and signal.getsignal(number) is stop
    finally:
        signal.signal(number, before)


def test_what_another_thread_raises_comes_back():
    def work():
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        waiting.beside(work)
    assert waiting.beside(lambda: 3) == 3
