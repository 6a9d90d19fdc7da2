"""`pycuda-conv run` and `bench --host`: what they compute, what they refuse, and that nothing half done is left."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import started

import pycuda_conv as pc
from pycuda_conv.interrupt import INTERRUPTED
from pycuda_conv.runtime import get_device
from pycuda_conv.timing import Effort
from pycuda_conv.tools import run
from pycuda_conv.tools.benchmarks import hostbench
from pycuda_conv.tools.terminal import OK, UNUSABLE

Image = pytest.importorskip("PIL.Image", reason="pictures are read by Pillow")
ImageOps = pytest.importorskip("PIL.ImageOps")
correlate = pytest.importorskip("scipy.ndimage", reason="pictures are judged by scipy").correlate
F = torch.nn.functional


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """A folder of the test's own."""
    monkeypatch.chdir(tmp_path)


def save(**arrays):
    """Write each as NAME.npy in the current folder; float32 unless it has another dtype than numpy's default."""
    for name, array in arrays.items():
        np.save(f"{name}.npy", array.astype(np.float32) if array.dtype == np.float64 else array)


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def names():
    return sorted(p.name for p in Path().iterdir())


# ---- arrays


@pytest.mark.parametrize("x, w, flags, function, options", [
    ((5, 3, 17, 13), (4, 3, 3, 3), "", F.conv2d, {}),
    ((5, 3, 17, 13), (4, 3, 3, 5), "--padding same --batch 2", F.conv2d, {"padding": "same"}),
    ((5, 3, 17, 13), (4, 3, 3, 3), "--padding valid --stride 2,3 --dilation 2 --batch 9", F.conv2d, {"stride": (2, 3), "dilation": 2}),
    ((2, 1, 6, 7), (1, 1, 3, 3), "--padding 0,1,2,3", lambda x, w, b: F.conv2d(F.pad(x, (2, 3, 0, 1)), w, b), {}),
    ((5, 4, 17, 13), (6, 2, 3, 3), "--groups 2 --padding 1,2 --batch 1 --bias b.npy", F.conv2d, {"groups": 2, "padding": (1, 2)}),
    ((3, 17, 13), (4, 3, 3, 3), "--padding 1 --precision tf32", F.conv2d, {"padding": 1}),
    ((3, 37, 43), (4, 3, 9, 9), "--padding 4 --algorithm fft", F.conv2d, {"padding": 4}),
    ((3, 37, 43), (4, 3, 9, 9), "--padding 4 --algorithm direct", F.conv2d, {"padding": 4}),
    ((5, 3, 29), (4, 3, 5), "--padding 2 --stride 2 --batch 3", F.conv1d, {"padding": 2, "stride": 2}),
    ((5, 3, 29), (4, 3, 5), "--activation gelu --bias b.npy --batch 3", lambda *given: F.gelu(F.conv1d(*given)), {}),
    ((3, 9, 9), (4, 3, 3, 3), "--activation leaky_relu:0.2", lambda *given: F.leaky_relu(F.conv2d(*given), 0.2), {}),
    ((3, 2, 7, 8, 9), (4, 2, 3, 2, 3), "--padding 1,0,2 --batch 2", F.conv3d, {"padding": (1, 0, 2)}),
    ((5, 4, 7, 6), (4, 3, 3, 3), "--transposed --stride 2 --padding 1 --output-padding 1 --batch 2 --bias b.npy", F.conv_transpose2d, {"stride": 2, "padding": 1, "output_padding": 1}),
    ((4, 4, 9), (4, 3, 3), "--transposed --stride 3 --output-padding 1,", None, {}),
])
def test_arrays_are_convolved_as_torch_does(command, device, x, w, flags, function, options):
    x, w = draw(*x), draw(*w)
    channels = w.shape[1] if "transposed" in flags else w.shape[0]
    b = draw(channels) if "bias" in flags else None
    save(x=x, w=w, **({} if b is None else {"b": b}))
    status, out, err = command("run", "--filter", "w.npy", "x.npy", "y.npy", "--device", device, *flags.split())
    if function is None:
        assert status == UNUSABLE and err.count("\n") == 1 and names() == ["w.npy", "x.npy"]
        return
    assert (status, err) == (OK, "") and out.count("\n") == 1 and out.startswith("y.npy: conv")
    expected = function(*(None if a is None else torch.from_numpy(a).double() for a in (x, w, b)), **options).numpy()
    y = np.load("y.npy")
    assert y.dtype == np.float32 and y.shape == expected.shape and np.allclose(y, expected, rtol=1e-5, atol=1e-5)
    assert set(names()) == {"x.npy", "w.npy", "y.npy", *(["b.npy"] if b is not None else [])}


@pytest.mark.parametrize("x_dtype, w_dtype, expected_dtype", [
    ("uint8", "int64", "float32"), ("int16", "int8", "float32"), ("bool", "bool", "float32"), ("int32", "int64", "float64"), ("uint64", "int64", "float64"),
    ("float32", "int64", "float32"), ("float16", "uint8", "float16"), ("uint8", "float32", "float32"), ("uint8", "float64", "float64"), (">i2", ">i8", "float32"),
    ("float16", "float16", "float16"), ("float64", "float64", "float64"), (">f4", ">f4", "float32"), ("fortran", "float32", "float32"), ("empty", "float32", "float32"),
])  # fmt: skip
def test_every_dtype_and_layout(command, device, x_dtype, w_dtype, expected_dtype):
    """Integers are convolved as floats."""
    rng, kind = np.random.default_rng(0), {"fortran": "float32", "empty": "float32"}.get(x_dtype, x_dtype)
    x, w = rng.integers(0, 2, (5 * (x_dtype != "empty"), 2, 9, 8)).astype(kind), rng.integers(0, 2, (3, 2, 3, 3)).astype(w_dtype)
    save(b=(b := np.array([1, -2, 3])))
    np.save("x.npy", np.asfortranarray(x) if x_dtype == "fortran" else x)
    np.save("w.npy", w)
    assert command("run", "--filter", "w.npy", "x.npy", "y.npy", "--bias", "b.npy", "--batch", 2, "--device", device)[::2] == (OK, "")
    expected = F.conv2d(*(torch.from_numpy(a.astype("f8")) for a in (x, w, b))).numpy()
    y = np.load("y.npy")
    assert y.dtype == expected_dtype and np.array_equal(y, expected)


def test_devices_are_passed_on(command, opencl, monkeypatch):
    seen = []
    convolve = pc.conv2d

    def conv2d(*arrays, devices, **options):
        seen.append(devices)
        return convolve(*arrays, device="opencl", **options)

    monkeypatch.setattr(pc, "conv2d", conv2d)
    save(x=draw(2, 1, 5, 5), w=draw(1, 1, 3, 3))
    assert command("run", "--filter", "w.npy", "x.npy", "y.npy", "--devices", "0,1")[0] == OK and seen == [[0, 1]]
    monkeypatch.setattr(run, "device_count", lambda: 2)
    assert command("run", "--filter", "w.npy", "x.npy", "z.npy", "--devices", "all", "--batch", 1)[0] == OK and seen[1:] == ["all", "all"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is limited through Linux's /proc")
def test_arrays_may_be_larger_than_memory(opencl, python_env, tmp_path):
    """With less memory to allocate than the arrays take; what is mapped from a file does not count."""
    x = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype="f4", shape=(96, 1, 512, 512))
    x[-1, 0, 5] = 1
    np.save(tmp_path / "w.npy", np.ones((1, 1, 1, 1), "f"))
    code = (
        "import resource, sys; from pycuda_conv import cli, conv2d; import numpy as np;"
        "conv2d(np.ones((8, 1, 512, 512), 'f'), np.ones((1, 1, 1, 1), 'f'), device='opencl');"
        "from pathlib import Path; status = Path('/proc/self/status').read_text();"
        "used = int(status.split('VmData:')[1].split()[0]) << 10;"
        "resource.setrlimit(resource.RLIMIT_DATA, (used + (48 << 20),) * 2); sys.exit(cli.main(sys.argv[1:]))"
    )
    arguments = ["run", "--filter", "w.npy", "x.npy", "y.npy", "--batch", "8", "--device", "opencl"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, env=python_env, capture_output=True, text=True, timeout=900, check=False
    )
    assert (done.returncode, done.stderr) == (OK, "")
    y = np.load(tmp_path / "y.npy", mmap_mode="r")
    assert y[-1, 0, 5].all() and not y[-1, 0, 6].any() and not y[0].any()


# ---- what goes wrong


ARRAYS, PICTURES = ("--filter", "w.npy", "x.npy", "y.npy"), ("--filter", "blur", "a.png", "b.png")
REFUSED = {
    "no input": (("--filter", "w.npy", "none.npy", "y.npy"), "none.npy can't be read: No such file"),
    "no filter": (("--filter", "none.npy", "x.npy", "y.npy"), "none.npy can't be read"),
    "truncated": (("--filter", "w.npy", "cut.npy", "y.npy"), "cut.npy is not a whole .npy file"),
    "empty": (("--filter", "w.npy", "nil.npy", "y.npy"), "nil.npy is not a whole .npy file"),
    "objects": (("--filter", "w.npy", "objects.npy", "y.npy"), "objects.npy is not a whole .npy file"),
    "complex": (("--filter", "complex.npy", "x.npy", "y.npy"), "complex.npy holds complex64; integers, float16, float32, float64 can be convolved"),
    "large integers": (("--filter", "large.npy", "x.npy", "y.npy"), "large.npy holds integers that float32 can't hold exactly; save it as float32"),
    "bfloat16": (("--filter", "w.npy", "two_bytes.npy", "y.npy"), "two_bytes.npy holds void16; integers, float16, float32, float64 can be convolved"),
    "another dtype": (("--filter", "double.npy", "x.npy", "y.npy"), "double.npy holds float64, but x.npy float32"),
    "channels": (("--filter", "two.npy", "x.npy", "y.npy"), "expected input[2, 1, 6, 6] to have 2 channels"),
    "axes of the input": (("--filter", "w.npy", "flat.npy", "y.npy"), "input"),
    "axes of the filter": (("--filter", "flat.npy", "x.npy", "y.npy"), "3, 4 or 5 axes"),
    "shape of the bias": ((*ARRAYS, "--bias", "two.npy"), "bias"),
    "onto the input": (("--filter", "w.npy", "x.npy", "x.npy", "--force"), "it is the file x.npy"),
    "onto a link to the input": (("--filter", "w.npy", "x.npy", "link.npy", "--force"), "it is the file x.npy"),
    "onto the bias": (("--filter", "w.npy", "x.npy", "b.npy", "--bias", "b.npy", "--force"), "it is the file b.npy"),
    "no folder": (("--filter", "w.npy", "x.npy", "none/y.npy"), "is not a folder"),
    "not writeable": (("--filter", "w.npy", "x.npy", "/proc/y.npy"), "/proc/y.npy can't be written"),
    "exists": (("--filter", "w.npy", "x.npy", "old.npy"), "old.npy exists already; --force"),
    "array to picture": (("--filter", "w.npy", "x.npy", "y.png"), "y.png must end in .npy"),
    "named filter": (("--filter", "blur", "x.npy", "y.npy"), "is for pictures"),
    "unknown filter": (("--filter", "blurr", "x.npy", "y.npy"), "did you mean blur?"),
    "unknown kind": (("--filter", "w.npy", "x.xyz", "y.xyz"), "x.xyz must end in .npy or be a picture"),
    "output padding": ((*ARRAYS, "--output-padding", "1"), "--transposed"),
    "padding": ((*ARRAYS, "--padding", "most"), "--padding: must be same, valid, or integers with commas between them, got 'most'"),
    "padding of three": ((*ARRAYS, "--padding", "1,2,3"), "padding"),
    "stride": ((*ARRAYS, "--stride", "0"), "stride"),
    "batch": ((*ARRAYS, "--batch", "0"), "--batch"),
    "device": ((*ARRAYS, "--device", "tpu"), "'tpu'"),
    "devices": ((*ARRAYS, "--devices", "some"), "--devices"),
    "both": ((*ARRAYS, "--devices", "0", "--device", "0"), "not allowed with"),
    "no picture": (("--filter", "blur", "none.png", "b.png"), "none.png can't be read"),
    "broken picture": (("--filter", "blur", "cut.png", "b.png"), "cut.png can't be read"),
    "text as picture": (("--filter", "blur", "text.png", "b.png"), "text.png can't be read"),
    "picture onto itself": (("--filter", "blur", "a.png", "a.png", "--force"), "it is the file a.png"),
    "picture exists": (("--filter", "blur", "a.png", "cut.png"), "exists already"),
    "picture to array": (("--filter", "blur", "a.png", "b.npy"), "b.npy must be a picture"),
    "picture without folder": (("--filter", "blur", "a.png", "none/b.png"), "is not a folder"),
    "picture not writeable": (("--filter", "blur", "a.png", "/proc/b.png"), "/proc/b.png can't be written"),
    "alpha as jpeg": (("--filter", "blur", "alpha.png", "b.jpg"), "b.jpg can't be written"),
    "animation": (("--filter", "blur", "two.gif", "b.png"), "two.gif has 2 pictures"),
    "activation": ((*PICTURES, "--activation", "tanh"), "must be one of relu, relu6, leaky_relu, hardswish, silu"),
    "slope": ((*PICTURES, "--activation", "leaky_relu:x"), "or leaky_relu:SLOPE, got 'leaky_relu:x'"),
    "stride of a picture": ((*PICTURES, "--stride", "2"), "--stride is for .npy files"),
    "filter of a picture": (("--filter", "five.npy", "a.png", "b.png"), "5 channels"),
    "flat filter": (("--filter", "b.npy", "a.png", "b.png"), "must have shape (R, S)"),
    "filter with nan": (("--filter", "nan.npy", "a.png", "b.png"), "not finite"),
    "filter of complex": (("--filter", "complex.npy", "a.png", "b.png"), "holds complex64"),
}


@pytest.mark.parametrize("arguments, words", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused_is_told_in_one_line_and_leaves_nothing(command, opencl, arguments, words):
    save(x=draw(2, 1, 6, 6), w=draw(1, 1, 3, 3), b=draw(1), two=draw(1, 2, 3, 3), five=draw(5, 3, 3, 3), flat=draw(4, 4), old=draw(3))
    save(
        large=np.full((1, 1, 3, 3), 2**24 + 1), two_bytes=np.zeros((2, 1, 6, 6), "V2"), complex=np.ones((3, 3), np.complex64),
        nan=np.full((3, 3), np.nan)
    )
    np.save("double.npy", np.ones((1, 1, 3, 3)))
    np.save("objects.npy", np.array([None, 1], object), allow_pickle=True)
    Path("cut.npy").write_bytes(Path("x.npy").read_bytes()[:-5])
    Path("nil.npy").write_bytes(b"")
    Path("link.npy").symlink_to("x.npy")
    Path("folder.npy").mkdir()
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8))
    picture.save("a.png")
    picture.convert("RGBA").save("alpha.png")
    picture.save("two.gif", save_all=True, append_images=[Image.new("RGB", (40, 40))])
    Path("cut.png").write_bytes(Path("a.png").read_bytes()[:-1000])
    Path("text.png").write_text("no picture")
    before = {p.name: p.read_bytes() for p in Path().iterdir() if p.is_file()}
    folder = names()
    status, out, err = command("run", *arguments, *([] if "--device" in arguments or "--devices" in arguments else ["--device", "opencl"]))
    assert (status, out, err.count("\n")) == (UNUSABLE, "", 1) and err.startswith("pycuda-conv run: ") and words in err
    assert names() == folder and {p.name: p.read_bytes() for p in Path().iterdir() if p.is_file()} == before


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    "how, status",
    [(KeyboardInterrupt, INTERRUPTED), (signal.SIGTERM, 128 + signal.SIGTERM), (OSError(errno.EIO, "Input/output error"), UNUSABLE)],
    ids=["ctrl-c", "term", "error"]
)
def test_an_interrupted_run_leaves_nothing(command, opencl, monkeypatch, how, status, force):
    save(x=draw(4, 1, 6, 6), w=draw(1, 1, 3, 3))
    if force:
        Path("y.npy").write_text("old")
    seen, convolve = [], pc.conv2d

    def conv2d(*arrays, **options):
        seen.append([p for p in names() if p.endswith(".part")])
        if len(seen) == 3:
            if isinstance(how, signal.Signals):
                os.kill(os.getpid(), how)
                time.sleep(5)
            raise how
        return convolve(*arrays, **options)

    monkeypatch.setattr(pc, "conv2d", conv2d)
    before = signal.getsignal(signal.SIGTERM)
    found, out, err = command("run", *ARRAYS, "--batch", 1, "--device", "opencl", *["--force"] * force)
    assert (found, out, err.count("\n")) == (status, "", 1)
    assert len(seen) == 3 and all(len(parts) == 1 for parts in seen)  # it was there and is gone
    assert names() == ["w.npy", "x.npy"] + ["y.npy"] * force and signal.getsignal(signal.SIGTERM) is before
    assert not force or Path("y.npy").read_text() == "old"


class Interrupting:
    """Python before 3.12 makes a RuntimeError of what a class's attribute raises when it is told its name."""

    def __set_name__(self, owner, name):
        raise KeyboardInterrupt


def raising(error):
    def call(*_, **__):
        raise error

    return call


def cleaning_up(error):
    """A library that a signal interrupts, and whose cleaning up fails."""

    def call(*_, **__):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            raise error

    return call


def half(path, *_):
    path.write_bytes(b"half")
    raise KeyboardInterrupt


READ_ONLY = raising(OSError(errno.EROFS, "Read-only file system"))


@pytest.mark.parametrize("arguments, owner, name, instead, status, told", [
    (ARRAYS, pc, "conv2d", lambda *_, **__: type("Library", (), {"attribute": Interrupting()}), INTERRUPTED, "interrupted\n"),
    (ARRAYS, pc, "conv2d", cleaning_up(RuntimeError("release unlocked lock")), 128 + signal.SIGTERM, "terminated\n"),
    (ARRAYS, pc, "conv2d", cleaning_up(OSError(errno.EBADF, "Bad file descriptor")), 128 + signal.SIGTERM, "terminated\n"),
    (PICTURES, run.pictures, "write", half, INTERRUPTED, "interrupted\n"),
    (ARRAYS, pc, "conv2d", raising(MemoryError()), UNUSABLE, "pycuda-conv run: too little memory\n"),
    (ARRAYS, os, "posix_fallocate", raising(OSError(errno.ENOSPC, "No space left on device")), UNUSABLE, "y.npy can't be written: No space left on device\n"),
    (ARRAYS, run, "_new_array", READ_ONLY, UNUSABLE, "y.npy can't be written: Read-only file system\n"),
    (PICTURES, run.pictures, "write", READ_ONLY, UNUSABLE, "b.png can't be written: Read-only file system\n"),
], ids=[
    "a library makes its classes", "a lock that was not taken", "a file that was not opened", "half a picture", "too little memory",
    "a full disk, before the work", "a read-only disk", "a picture on a read-only disk",
])
def test_what_fails_on_the_way_is_told_in_one_line_and_leaves_nothing(command, opencl, monkeypatch, arguments, owner, name, instead, status, told):
    save(x=draw(2, 1, 6, 6), w=draw(1, 1, 3, 3))
    Image.new("L", (9, 9)).save("a.png")
    monkeypatch.setattr(owner, name, instead)
    if instead is READ_ONLY:  # such a disk does not even remove what is not there
        monkeypatch.setattr(Path, "unlink", READ_ONLY)
    found, out, err = command("run", *arguments, "--device", "opencl")
    assert (found, out, err.count("\n")) == (status, "", 1) and err.endswith(told) and names() == ["a.png", "w.npy", "x.npy"]


COMPILING = "stopping: a kernel is still being compiled\n"  # where that takes a while


@pytest.mark.parametrize("start, seconds", [
    (("-m", "pycuda_conv"), 0), (("pycuda-conv",), 0.05), (("-m", "pycuda_conv"), 0.5), (("pycuda-conv",), 1),
], ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value))
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux's /proc tells when numpy is being imported")
def test_ctrl_c_at_any_time_is_told_in_one_line_and_leaves_nothing(opencl, fast_env, tmp_path, monkeypatch, start, seconds):
    """While numpy and the rest are imported, while files are read, while kernels run."""
    monkeypatch.chdir(tmp_path)
    save(x=np.zeros((4000, 1, 64, 64), "f"), w=np.zeros((8, 1, 9, 9), "f"))
    if start[0] != "-m":
        Path(start[0]).write_text("import sys\nfrom pycuda_conv.cli import main\nsys.exit(main())\n")  # as pip writes it
    with started(*start, "run", *ARRAYS, "--batch", "1", "--device", "opencl", env=fast_env, text=True) as process:
        while "numpy" not in Path(f"/proc/{process.pid}/maps").read_text() and process.poll() is None:
            time.sleep(0.001)
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=400)
    err = err.replace("1 error generated.\n", "")  # PoCL's own, where Ctrl-C ended its compiler
    assert (process.returncode, out, err.removesuffix(COMPILING)) == (INTERRUPTED, "", "interrupted\n")
    assert names() == sorted(["w.npy", "x.npy", *([start[0]] if start[0] != "-m" else [])])


def test_a_program_that_imports_the_package_keeps_its_ctrl_c(fast_env):
    code = "import signal, pycuda_conv; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    done = subprocess.run([sys.executable, "-c", code], env=fast_env, capture_output=True, text=True, timeout=900, check=False)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_force_replaces_and_keeps_links_and_permissions(command, device):
    save(x=draw(2, 1, 6, 6), w=draw(1, 1, 3, 3))
    Path("real.npy").write_text("old")
    Path("real.npy").chmod(0o640)
    Path("y.npy").symlink_to("real.npy")
    assert command("run", *ARRAYS, "--force", "--device", device)[0] == OK
    assert Path("y.npy").is_symlink() and np.load("real.npy").shape == (2, 1, 4, 4) and Path("real.npy").stat().st_mode & 0o777 == 0o640


def test_progress_goes_to_stderr_only(command, opencl, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    save(**{"x[1]": draw(4, 1, 6, 6), "w": draw(1, 1, 3, 3)})
    quiet = command("run", "--filter", "w.npy", "x[1].npy", "y.npy", "--device", "opencl")
    assert quiet[0] == OK and quiet[2] == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    status, out, err = command("run", "--filter", "w.npy", "x[1].npy", "y.npy", "--force", "--batch", 1, "--device", "opencl")
    assert status == OK and "x[1].npy" in err and "bytes" in err and "\x1b" in err
    assert out.count("\n") == 1 and out.startswith("y.npy: conv2d 4x1x6x6") and "\x1b" not in out


# ---- pictures


def pixels(height=23, width=31, channels=3, dtype=np.uint8, seed=0):
    shape = (height, width, channels)[: 2 + (channels > 1)]
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


def check(result, source, filters):
    """`result` is `source` filtered channel by channel with its border repeated, rounded, clipped."""
    source = source.reshape(*source.shape[:2], -1).astype(np.float64)
    result = result.reshape(source.shape)
    top = np.iinfo(result.dtype).max
    for c in range(source.shape[2]):
        exact = np.clip(correlate(source[..., c], np.asarray(filters, np.float64), mode="nearest"), 0, top)
        error = np.abs(result[..., c] - exact)
        assert error.max() <= 0.5 + top * 2e-6, f"channel {c}: off by {error.max()} at {np.unravel_index(error.argmax(), error.shape)}"


@pytest.mark.parametrize("name", run.FILTERS)
def test_named_filters_against_float64(command, device, name):
    picture = pixels()
    Image.fromarray(picture).save("a.png")
    status, out, err = command("run", "--filter", name, "a.png", "b.png", "--device", device)
    assert (status, err) == (OK, "") and out.startswith("b.png: 31x23, 8-bit RGB in ")
    with Image.open("b.png") as found:
        assert found.mode == "RGB"
        check(np.asarray(found), picture, run.FILTERS[name])
    if name == "identity":
        assert np.array_equal(np.asarray(Image.open("b.png")), picture)


@pytest.mark.parametrize(
    "shape, flags",
    [((3, 5), ""), ((1, 1, 4, 2), ""), ((3, 3), "--dilation 3"), ((3, 3), "--dilation 2,1"), ((60, 1), ""), ((3, 3), "--bias b.npy")]
)
def test_a_filter_file_on_each_colour(command, device, shape, flags):
    picture, w = pixels(), np.random.default_rng(1).random(shape) / math.prod(shape)
    Image.fromarray(picture).save("a.png")
    np.save("w.npy", w)
    np.save("b.npy", np.array([7]))
    assert command("run", "--filter", "w.npy", "a.png", "b.png", "--device", device, *flags.split())[0] == OK
    found = np.asarray(Image.open("b.png"))
    assert found.shape == picture.shape
    step = {"--dilation 3": (3, 3), "--dilation 2,1": (2, 1)}.get(flags, (1, 1))
    spread = [d * (n - 1) for d, n in zip(step, shape[-2:], strict=True)]
    around = [(n // 2, n - n // 2) for n in spread]
    x = torch.from_numpy(np.pad(np.moveaxis(picture, -1, 0).astype("f8"), ((0, 0), *around), mode="edge"))[:, None]
    exact = F.conv2d(x, torch.from_numpy(w.reshape(1, 1, *shape[-2:])), dilation=step).numpy()[:, 0] + 7 * ("bias" in flags)
    assert np.abs(np.moveaxis(found, -1, 0) - exact.clip(0, 255)).max() <= 0.501


@pytest.mark.parametrize("k, flags", [(1, ()), (3, ()), (3, ("--groups", 3))])
def test_a_filter_over_all_colours(command, device, k, flags):
    picture = pixels(channels=4)
    w = np.random.default_rng(2).random((k, 1 if flags else 3, 3, 3)).astype("f") / 20
    Image.fromarray(picture).save("a.png")
    np.save("w.npy", w)
    assert command("run", "--filter", "w.npy", "a.png", "b.png", "--device", device, *flags)[0] == OK
    with Image.open("b.png") as image:
        assert image.mode == ("LA" if k == 1 else "RGBA")
        found = np.asarray(image)
    assert np.array_equal(found[..., -1], picture[..., -1])
    x = torch.from_numpy(np.pad(np.moveaxis(picture[..., :3], -1, 0).astype("f8"), ((0, 0), (1, 1), (1, 1)), mode="edge"))[None]
    exact = F.conv2d(x, torch.from_numpy(w).double(), groups=3 if flags else 1).numpy()[0]
    assert np.abs(np.moveaxis(found[..., :-1], -1, 0) - exact.clip(0, 255)).max() <= 0.501


# ---- bench --host


def small(monkeypatch, wrong=None):
    """Small cases, torch on the CPU, ours on OpenCL; `wrong` spoils our results."""
    kinds = (False, "float32"), (True, "float32"), (False, "float64")
    monkeypatch.setattr(hostbench, "CASES", tuple(hostbench._case(2, 4, 5, 8, 3, *kind) for kind in kinds))
    if wrong is not None:
        way = hostbench.our_way

        def spoiled(*arguments, **more):
            right = way(*arguments, **more)
            return lambda i: right(i) + np.float32(wrong)

        monkeypatch.setattr(hostbench, "our_way", spoiled)
    return hostbench.Bus(1e9, 1e9, 2e9), Effort(rounds=7, seconds=0, most_rounds=7)


@pytest.mark.parametrize("wrong", [None, 1e-3, math.nan])
def test_a_case_is_verified_and_timed(opencl, monkeypatch, wrong):
    bus, effort = small(monkeypatch, wrong)
    for case in hostbench.CASES:
        with torch.no_grad():
            row = hostbench.measure(torch, case, get_device("opencl"), "cpu", np.copy, bus, effort, 0)
        size = case.problem.itemsize
        assert row.out_bytes == 2 * 8 * 25 * size and row.in_bytes == (2 * 4 * 25 + (0 if case.kept else 8 * 4 * 9)) * size
        assert len(row.cells()) == len(hostbench.COLUMNS)
        if wrong is None:
            assert row.verdict == "ok" and row.error < 1e-6 and row.ratio == pytest.approx(row.torch_ms / row.ours_ms)
            assert row.of_bus == pytest.approx(max(row.in_bytes, row.out_bytes) / 1e9 / row.ours_ms * 1e3)
        else:
            assert (row.verdict, row.ours_ms, row.ratio, row.of_bus) == ("WRONG", None, None, None) and row.cells()[1:5] == ("-",) * 4


def test_the_whole_report(command, opencl, monkeypatch):
    """With OpenCL and torch's CPU in the GPU's place."""
    bus, _ = small(monkeypatch)
    device, convolve = get_device("opencl"), pc.conv2d
    monkeypatch.setattr(hostbench, "_device", lambda *_: device)
    monkeypatch.setattr(hostbench, "named_device", lambda name: device)
    monkeypatch.setattr(hostbench, "get_device", lambda name: device)
    monkeypatch.setattr(hostbench, "measure_bus", lambda *_: bus)
    monkeypatch.setattr(hostbench, "device_count", lambda: 2)
    copied = []
    monkeypatch.setattr(hostbench, "copy_only", lambda gpus, x, y: copied.append((len(gpus), np.shares_memory(x, y))))
    monkeypatch.setattr(torch.cuda, "set_device", lambda name: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    way = hostbench.torch_way
    monkeypatch.setattr(hostbench, "torch_way", lambda torch, case, place, x, w: way(torch, case, "cpu", x, w))
    monkeypatch.setattr(hostbench, "by_hand_way", lambda torch, case, place, x, w: way(torch, case, "cpu", x, w))
    monkeypatch.setattr(pc, "conv2d", lambda *arrays, devices=None, device=None, **options: convolve(*arrays, device="opencl", **options))
    status, out, _ = command("bench", "--host", "--devices", "all", "--quick", "--json", "h.json", "--seed", 1)
    assert status == OK and "filter kept" in out and "speed-up" in out and "GB/s up" in out
    facts = json.loads(Path("h.json").read_text())
    assert sorted(facts) == ["bus", "machine", "rows", "scaling"]
    assert facts["machine"]["command"] == "pycuda-conv bench --host --devices all --quick"
    assert [row["verdict"] for row in facts["rows"]] == ["ok"] * 3 and [row["gpus"] for row in facts["scaling"]] == [1, 2]
    assert set(copied) == {(1, False), (2, False)} and all(row["copies_ms"] and row["pinned_copies_ms"] for row in facts["scaling"])
    assert facts["scaling"][0]["speedup"] == 1 and facts["scaling"][1]["bytes_per_second"] > 0


# ---- the README's pictures


def test_the_readme_s_pictures_are_what_its_command_makes(opencl, fast_env, tmp_path):
    root = Path(pc.__file__).resolve().parent.parent
    script, pictures = root / "scripts" / "picture.py", root / "docs" / "pictures"
    if not (script.exists() and pictures.exists()):
        pytest.skip("no scripts/ or docs/ beside the package")
    subprocess.run([sys.executable, script, tmp_path], env=fast_env, check=True, capture_output=True, timeout=900)
    for name in ("house.png", "sharpen.png", "filters.png"):
        with Image.open(pictures / name) as stored, Image.open(tmp_path / name) as made:
            assert stored.size == made.size
            assert np.abs(np.asarray(stored).astype(int) - np.asarray(made)).mean() < 3  # fonts differ a little from Pillow to Pillow
        assert (pictures / name).stat().st_size < 50_000
