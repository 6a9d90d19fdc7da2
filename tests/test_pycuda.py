"""PyCUDA itself over a stand-in for the driver: its contexts, and what it does at the end of a process.

It needs a Python that has PyCUDA: this one, the one that ``PYCUDA_CONV_PYCUDA_PYTHON`` names, or ``.venv-pycuda``, which
scripts/pycuda_env.sh makes.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import stub_libcuda

ROOT = Path(__file__).resolve().parent.parent

BEGIN = """
import ctypes, gc, threading
import numpy as np
import pycuda.driver as drv
from pycuda import gpuarray
from pycuda.tools import DeviceMemoryPool, clear_context_caches
from pycuda_conv.runtime.compile_queue import CompileQueue
CompileQueue.compile = lambda self, source, arch="", fresh=False: b"a binary"
import pycuda_conv as pc
from pycuda_conv.runtime import contexts, driver

drv.init()
library = ctypes.CDLL("libcuda.so.1")
X, W, Y = (2, 16, 9, 9), (24, 16, 3, 3), (2, 24, 7, 7)

def refused():
    return [ctypes.c_long.in_dll(library, f"fake_{name}").value for name in ("dead", "foreign")]

def arrays(*shapes, **options):
    return [gpuarray.to_gpu(np.ones(shape, "f"), **options) for shape in shapes]

def calls(x, w):
    for _ in range(3):
        y = pc.conv2d(x, w)
        assert type(y) is gpuarray.GPUArray and y.shape == Y and contexts.where_is(int(y.gpudata)) == contexts.where_is(int(x.gpudata))
        assert pc.conv2d(x, w, out=y) is y
        pc.conv2d_weight(x, W, y), pc.conv2d_input(X, w, y), pc.conv2d_bias(y)
        assert pc.conv2d(np.ones(X, "f"), np.ones(W, "f")).shape == Y
    plan = pc.Plan(pc.ConvProblem.forward(2, X, W))
    plan(x, w), plan.bind(w)(x), plan.bind(np.ones(W, "f"))(np.ones(X, "f"))
    return y
"""
END = """
gc.collect()
assert refused() == [0, 0], refused()
print("right", library.fake_living())
"""
PROGRAMS = {
    "autoinit": ("import pycuda.autoinit\n" + BEGIN + "y = calls(*arrays(X, W))\nassert not contexts._primaries\nz = y + y\nz.get()\n", 1),
    "an array in a circle at the end": ("import pycuda.autoinit\n" + BEGIN + "class A: pass\na = A()\na.y, a.a = calls(*arrays(X, W)), a\n", 1),
    "autoprimaryctx": ("import pycuda.autoprimaryctx\n" + BEGIN + "calls(*arrays(X, W))\nassert list(contexts._primaries) == [0] and not contexts._others\n", 0),
    "none": (BEGIN + "for _ in range(3): pc.conv2d(np.ones(X, 'f'), np.ones(W, 'f'))\n", 0),
    "a context a test": (BEGIN + """
for _ in range(6):
    context = drv.Device(0).make_context()
    calls(*arrays(X, W))
    context.pop()
    clear_context_caches()
    del context
gc.collect()
assert library.fake_living() == 0 and ctypes.c_size_t.in_dll(library, "fake_used").value < 1 << 20
""", 0),
}  # fmt: skip


def _has_pycuda(python):
    return subprocess.run(
        [python, "-c", "import importlib.util as u; assert u.find_spec('pycuda') and u.find_spec('numpy')"], capture_output=True
    ).returncode == 0


@pytest.fixture(scope="module")
def over_stand_in(tmp_path_factory):
    """The interpreter that has PyCUDA, and the folder of the driver's stand-in."""
    if sys.platform != "linux" or shutil.which("gcc") is None or shutil.which("nm") is None:
        pytest.skip("the driver's stand-in is built by gcc and nm on Linux")
    places = os.environ.get("PYCUDA_CONV_PYCUDA_PYTHON"), ROOT / ".venv-pycuda" / "bin" / "python", sys.executable
    python = next((str(one) for one in places if one and Path(one).exists() and _has_pycuda(one)), None)
    if python is None:
        pytest.skip("no Python with PyCUDA: scripts/pycuda_env.sh makes one where it can")
    folder = tmp_path_factory.mktemp("libcuda")
    subprocess.run([python, stub_libcuda.__file__, folder], check=True, timeout=900)
    return python, folder


@pytest.mark.parametrize(
    ("name", "launcher"), [*((name, "c") for name in PROGRAMS), *((name, "python") for name in ("autoinit", "a context a test"))]
)
def test_programs(over_stand_in, name, launcher):
    python, folder = over_stand_in
    code, living = PROGRAMS[name]
    more = {
        "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(ROOT), "PYCUDA_CONV_LAUNCHER": launcher, "PYCUDA_CONV_BACKGROUND": "0",
        "FAKE_GPUS": "2"
    }
    env = {name: value for name, value in os.environ.items() if name != "PYCUDA_CONV_BACKEND"} | more
    done = subprocess.run([python, "-c", code + END], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"right {living}\n", "")
