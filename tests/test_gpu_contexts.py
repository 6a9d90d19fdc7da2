"""PyCUDA's programs as they are, on a GPU: contexts of their own, allocators, streams. Each runs in a process of its own and ends with status 0."""

import shutil
import subprocess
import sys

import pytest
from reference import python

pytestmark = pytest.mark.gpu

BEGIN = """
import numpy as np, torch
import pycuda.driver as drv
import pycuda.gpuarray as gpuarray
import pycuda_conv as pc
F = torch.nn.functional
rng = np.random.default_rng()

def random(*shape, dtype="f"):
    return rng.standard_normal(shape).astype(dtype)

def close(found, expected, rtol=1e-4):
    expected = np.asarray(expected)
    found = found.get() if hasattr(found, "get") else found
    assert found.shape == expected.shape and np.isfinite(found).all()
    assert np.abs(found - expected).max() <= rtol * max(1, np.abs(expected).max()), np.abs(found - expected).max()

def conv(x, w, **options):
    return F.conv2d(*(torch.from_numpy(np.asarray(a, "d")) for a in (x, w)), **options).numpy()

def call_on(x, w):
    gx, gw = gpuarray.to_gpu(x), gpuarray.to_gpu(w)
    for _ in range(3):
        close(pc.conv2d(gx, gw, padding=1), conv(x, w, padding=1))
    return gx, gw

"""
OWN = "import pycuda.autoinit\n"

#: What the notebook does, and everything that may follow.
NOTEBOOK = OWN + BEGIN + '''
from pycuda.compiler import SourceModule
from pycuda.elementwise import ElementwiseKernel
from pycuda.reduction import ReductionKernel
from pycuda import cumath

one_channel = SourceModule("""
__global__ void one_channel(float *y, const float *x, const float *w, int H, int W, int add)
{
    int q = threadIdx.x + blockIdx.x * blockDim.x, p = blockIdx.y;
    if (q >= W) return;
    float sum = add ? y[p * W + q] : 0.f;
    for (int r = 0; r < 3; r++)
        for (int s = 0; s < 3; s++) {
            int h = p + r - 1, v = q + s - 1;
            if (h >= 0 && h < H && v >= 0 && v < W) sum += w[3 * r + s] * x[h * W + v];
        }
    y[p * W + q] = sum;
}
""").get_function("one_channel")
for N, C, K, H, W in ((1, 1, 1, 5, 5), (2, 4, 8, 5, 5), (2, 4, 8, 5, 7), (2, 16, 24, 20, 30)):
    x, w = random(N, C, H, W), random(K, C, 3, 3)
    want = conv(x, w, padding=1)
    gx, gw, gy = gpuarray.to_gpu(x), gpuarray.to_gpu(w), gpuarray.empty(want.shape, np.float32)
    for n in range(N):
        for k in range(K):
            for c in range(C):
                one_channel(gy[n, k], gx[n, c], gw[k, c], np.int32(H), np.int32(W), np.int32(c > 0), block=(32, 1, 1), grid=(1, H))
    close(gy, want)
    y = pc.conv2d(gx, gw, padding=1)
    assert isinstance(y, gpuarray.GPUArray)
    close(y, want)
    close(y + gy, 2 * want)
    # what comes after a call takes its result as it is
    twice = ElementwiseKernel("float *y, float *x", "y[i] = 2 * x[i]", "twice")
    doubled = gpuarray.empty_like(y)
    twice(doubled, y)
    close(doubled, 2 * want)
    close(cumath.exp(y), np.exp(want), 1e-3)
    total = ReductionKernel(np.float32, neutral="0", reduce_expr="a+b", map_expr="x[i]", arguments="float *x")(y)
    assert abs(total.get() - want.sum()) < 1e-2 * max(1, np.abs(want).sum())
    close(y[0, 0], want[0, 0])
    close(y[-1], want[-1])
    # gradients, against torch's
    tx, tw, dy = (torch.from_numpy(a.astype("d")) for a in (x, w, random(*want.shape)))
    tx.requires_grad_(), tw.requires_grad_()
    dx, dw = torch.autograd.grad(F.conv2d(tx, tw, padding=1), (tx, tw), dy)
    gdy = gpuarray.to_gpu(dy.numpy().astype("f"))
    for _ in range(3):
        close(pc.conv2d_input(x.shape, gw, gdy, padding=1), dx)
        close(pc.conv2d_weight(gx, w.shape, gdy, padding=1), dw)
        close(pc.conv2d_bias(gdy), dy.sum((0, 2, 3)))
    # strided, sliced and in Fortran order
    wide = random(N, C, H, 2 * W)
    close(pc.conv2d(gpuarray.to_gpu(wide)[:, :, :, :W], gw), conv(wide[..., :W], w))
    big = gpuarray.to_gpu(random(N + 1, C, H, W))
    close(pc.conv2d(big[1:], gw, padding=1), conv(big.get()[1:], w, padding=1))
    close(pc.conv2d(gpuarray.to_gpu(np.asfortranarray(x)), gw, padding=1), want)
    out = gpuarray.empty(want.shape, np.float32)
    for _ in range(3):
        out.fill(np.float32("nan"))
        assert pc.conv2d(gx, gw, padding=1, out=out) is out
        close(out, want)
    close(pc.conv2d(x, w, padding=1), want)  # numpy arrays, in the same context
    plan = pc.Plan(pc.ConvProblem.forward(2, x.shape, w.shape, padding=1))
    close(plan(gx, gw), want)
    close(plan.bind(gw)(gx), want)
    close(plan.bind(w)(x), want)
    for many in list(pc.conv2d_many([x, x], w, padding=1)) + list(pc.conv2d_many([gx, gx], gw, padding=1)):
        close(many, want)
    for dtype, limit in (("float16", 2e-2), ("float64", 1e-10)):
        close(pc.conv2d(gpuarray.to_gpu(x.astype(dtype)), gpuarray.to_gpu(w.astype(dtype)), padding=1), conv(x.astype(dtype), w.astype(dtype), padding=1), limit)
print("right")
'''

IMPORT = "import numpy as np, pycuda_conv as pc\n"
ON_GPU = (
    "from pycuda import gpuarray\ng, h = gpuarray.to_gpu(np.ones((1, 1, 4, 4), 'f')), gpuarray.to_gpu(np.ones((1, 1, 3, 3), 'f'))\n"
    "for _ in range(3): assert (pc.conv2d(g, h).get() == 9).all()\n"
)
ON_HOST = "for _ in range(3): assert (pc.conv2d(np.ones((1, 1, 4, 4), 'f'), np.ones((1, 1, 3, 3), 'f')) == 9).all()\n"
TORCH = (
    "import torch\nbefore = torch.ones(1, 1, 4, 4, device='cuda')\nfor _ in range(3):\n    try:\n"
    "        assert (pc.conv2d(before, before[:, :, :3, :3].contiguous()) == 9).all()\n"
    "        assert float(torch.nn.functional.conv2d(before, before[:, :, :3, :3]).mean()) == 9\n"
    "    except pc.ConvArgumentError as error: assert 'autoprimaryctx' in str(error), error\n"
)
CUPY = (
    "import cupy\nc = cupy.ones((1, 1, 4, 4), 'f')\nfor _ in range(3):\n    try: assert float(pc.conv2d(c, c[:, :, :3, :3].copy()).sum()) == 36\n"
    "    except pc.ConvArgumentError as error: assert 'autoprimaryctx' in str(error), error\n"
)
POOL = (
    "from pycuda.tools import DeviceMemoryPool\npool = DeviceMemoryPool()\nx = gpuarray.to_gpu(np.ones((1, 1, 4, 4), 'f'), allocator=pool.allocate)\n"
    "for _ in range(3):\n    y = pc.conv2d(x, h)\n    assert type(y.gpudata).__name__ == 'PooledDeviceAllocation' and (y.get() == 9).all()\ndel x, y, pool\n"
)
MANAGED = """
import pycuda.driver as drv
class Managed(drv.PointerHolderBase):
    def __init__(self, nbytes):
        super().__init__()
        self.array = drv.managed_zeros(nbytes, np.uint8, mem_flags=drv.mem_attach_flags.GLOBAL)
    def get_pointer(self): return self.array.__array_interface__["data"][0]
    def __int__(self): return self.get_pointer()
    __index__ = __int__
x = gpuarray.GPUArray((1, 1, 4, 4), np.float32, allocator=Managed)
x.fill(1)
for _ in range(3):
    y = pc.conv2d(x, h)
    assert type(y.gpudata) is Managed and (y.get() == 9).all()
class Odd(drv.PointerHolderBase):
    def __init__(self, nbytes):
        super().__init__()
        self.memory = drv.mem_alloc(nbytes + 4)
    def get_pointer(self): return int(self.memory) + 4
    def __int__(self): return self.get_pointer()
    __index__ = __int__
x.allocator = Odd
try: pc.conv2d(x, h)
except pc.ConvArgumentError as error: assert "a multiple of 16" in str(error)
else: raise AssertionError
locked = drv.pagelocked_empty((1, 1, 4, 4), np.float32)
locked[:] = 1
assert (pc.conv2d(locked, np.ones((1, 1, 3, 3), "f")) == 9).all()
large = drv.pagelocked_empty((8, 4, 1000, 1000), np.float32)
large[:] = 1
assert (pc.conv2d(large, np.ones((1, 4, 3, 3), "f")) == 36).all()
"""
#: torch and CuPy work in the context that is current: their arrays are convolved there, or refused by name if they lie in another.
#: autoinit before and after them, used first and second.
PROGRAMS = {
    "autoinit, GPUArray": OWN + IMPORT + ON_GPU + ON_HOST,
    "autoinit after numpy": IMPORT + ON_HOST + OWN + ON_GPU + ON_HOST,
    "torch, then autoinit": "import torch\ntorch.zeros(1, device='cuda')\n" + IMPORT + OWN + ON_GPU + TORCH + ON_GPU,
    "autoinit, then torch": OWN + IMPORT + ON_GPU + TORCH + ON_GPU + ON_HOST,
    "autoinit, torch first": OWN + IMPORT + TORCH + ON_GPU,
    "CuPy, then autoinit": "import cupy\ncupy.zeros(1)\n" + IMPORT + OWN + ON_GPU + CUPY + ON_GPU,
    "autoprimaryctx, torch, CuPy": "import pycuda.autoprimaryctx\n" + IMPORT + ON_GPU + TORCH + CUPY + ON_GPU,
    "pool": OWN + IMPORT + ON_GPU + POOL,
    "pool in the primary context": "import pycuda.autoprimaryctx\n" + IMPORT + ON_GPU + POOL,
    "managed, page-locked and odd memory": OWN + IMPORT + ON_GPU + MANAGED,
    "arrays alive at the end": OWN + IMPORT + ON_GPU + "kept = pc.conv2d(g, h), pc.Plan(pc.ConvProblem.forward(2, (1, 1, 4, 4), (1, 1, 3, 3))).bind(h)\n",
    "an error at the end": OWN + IMPORT + ON_GPU + "try: pc.conv2d(g, h, stride=0)\nexcept ValueError: pass\n",
}

CONTEXTS = BEGIN + '''
drv.init()
device = drv.Device(0)

def free():
    context = device.make_context()
    found = drv.mem_get_info()[0]
    context.detach()
    return found

def one():
    """As PyCUDA's mark_cuda_test does it."""
    context = device.make_context()
    try:
        call_on(random(2, 8, 9, 9), random(6, 8, 3, 3))
        close(pc.conv2d(np.ones((1, 1, 4, 4), "f"), np.ones((1, 1, 3, 3), "f")), np.full((1, 1, 2, 2), 9))
    finally:
        context.pop()
        from pycuda.tools import clear_context_caches
        clear_context_caches()

one()
before = free()
for _ in range(50):
    one()
assert before - free() < 64 << 20, (before, free())

# nested, pushed and popped, detached while plans and results live
x, w = random(4, 16, 20, 20), random(24, 16, 3, 3)
problem = pc.ConvProblem.forward(2, x.shape, w.shape, padding=1)
first = device.make_context()
gx, gw = call_on(x, w)
plan = pc.Plan(problem)
bound = plan.bind(gw)
second = device.make_context()
hx, hw = call_on(x, w)
for call, text in [
    (lambda: pc.conv2d(gx, hw), "input lies in a CUDA context"), (lambda: pc.conv2d(hx, gw), "weight lies in a CUDA context"),
    (lambda: pc.conv2d(hx, hw, padding=1, out=gx), "out lies in a CUDA context"), (lambda: bound(hx), "bind it again"),
]:
    try: call()
    except pc.ConvArgumentError as error: assert text in str(error), error
    else: raise AssertionError(text)
    close(pc.conv2d(hx, hw, padding=1), conv(x, w, padding=1))
close(plan(hx, hw), conv(x, w, padding=1))
foreign_stream = drv.Stream()
first.push()
close(pc.conv2d(gx, gw, padding=1), conv(x, w, padding=1))
try: pc.conv2d(gx, gw, padding=1, stream=foreign_stream)
except pc.ConvArgumentError as error: assert "stream belongs to another CUDA context" in str(error)
else: raise AssertionError
close(bound(gx), conv(x, w, padding=1))
kept = plan(gx, gw)
drv.Context.pop()
foreign_stream.synchronize()
del foreign_stream, hx, hw
second.detach()
del gx, gw
first.detach()
third = device.make_context()
gx, gw = call_on(x, w)
close(plan(gx, gw), conv(x, w, padding=1))
try: bound(gx)
except pc.ConvArgumentError as error: assert "bind it again" in str(error)
else: raise AssertionError
del kept
# streams, a capture, a lack of memory
for flags in (0, 1):
    stream = drv.Stream(flags)
    y = pc.conv2d(gx, gw, padding=1, stream=stream)
    stream.synchronize()
    close(y, conv(x, w, padding=1))
from pycuda_conv.runtime.graph import Graph
graph, out = Graph(stream), gpuarray.zeros((4, 24, 20, 20), np.float32)
pc.conv2d(gx, gw, padding=1, out=out, stream=stream)
stream.synchronize()
plan = pc.Plan(problem)
workspace = gpuarray.empty(max(plan.workspace_bytes, 1), np.uint8)
plan.launch([int(a.gpudata) if a is not None else 0 for a in (gx, gw, None, None, None, out, workspace)], stream)
with graph.capture():
    plan.launch([int(a.gpudata) if a is not None else 0 for a in (gx, gw, None, None, None, out, workspace)], stream)
out.fill(np.float32("nan"))
drv.Context.synchronize()
graph.replay()
stream.synchronize()
close(out, conv(x, w, padding=1))
del workspace
hog = []
try:
    while True:
        hog.append(drv.mem_alloc(1 << 30))
except drv.MemoryError:
    pass
images = gpuarray.GPUArray((64, 16, 512, 512), np.float32, gpudata=hog[0])  # a gigabyte, and its result is more
try: pc.conv2d(images, gw, padding=1)
except pc.DeviceMemoryError as error: assert "out of memory" in str(error)
else: raise AssertionError
del hog, images
close(pc.conv2d(gx, gw, padding=1), conv(x, w, padding=1))
# 10,000 calls leave memory where it was
out = pc.conv2d(gx, gw, padding=1)
for _ in range(10): pc.conv2d(gx, gw, padding=1)
drv.Context.synchronize()
before = drv.mem_get_info()[0]
for i in range(10_000):
    pc.conv2d(gx, gw, padding=1) if i % 2 else pc.conv2d(gx, gw, padding=1, out=out)
drv.Context.synchronize()
assert drv.mem_get_info()[0] == before
del graph, stream
third.pop()
print("right")
'''

BITS = BEGIN + '''
from pycuda_conv.runtime.contexts import cuda_device
drv.init()
primary = cuda_device(0)
own = drv.Device(0).make_context()

def numbers():
    ndim = int(rng.integers(1, 4))
    groups = int(rng.choice([1, 1, 1, 2, 4]))
    channels, filters = (groups * int(rng.choice([1, 3, 8, 16, 32])) for _ in range(2))
    sizes = [int(n) for n in rng.integers(5, (80, 30, 12)[ndim - 1], ndim)]
    window = [int(n) for n in rng.integers(1, 4, ndim)]
    dtype = str(rng.choice(["float32", "float32", "float16", "float64"]))
    options = dict(stride=int(rng.integers(1, 3)), padding=int(rng.integers(0, 2)), groups=groups)
    if dtype == "float32": options["precision"] = str(rng.choice(["fp32", "tf32", "fp32"]))
    return ndim, (int(rng.integers(1, 5)), channels, *sizes), (filters, channels // groups, *window), dtype, options

for number in range(200):
    ndim, x_shape, w_shape, dtype, options = numbers()
    x, w = random(*x_shape, dtype=dtype), random(*w_shape, dtype=dtype)
    name = rng.choice(["conv", "input", "weight", "conv"])
    def call():
        gx, gw = gpuarray.to_gpu(x), gpuarray.to_gpu(w)
        y = getattr(pc, f"conv{ndim}d")(gx, gw, **options)
        if name == "input": y = getattr(pc, f"conv{ndim}d_input")(x.shape, gw, y, **options)
        if name == "weight": y = getattr(pc, f"conv{ndim}d_weight")(gx, w.shape, y, **options)
        return y.get()
    ours = call()
    with primary:
        theirs = call()
    assert ours.tobytes() == theirs.tobytes(), (x_shape, w_shape, dtype, options, name)
    assert drv.Context.get_current() == own
own.pop()
print("right")
'''

THREADS = BEGIN + '''
import threading
drv.init()
failed = []

def work(i):
    context = drv.Device(i % drv.Device.count()).make_context()
    try:
        x, w = random(4, 16, 20, 20), random(24, 16, 3, 3)
        gx, gw = gpuarray.to_gpu(x), gpuarray.to_gpu(w)
        plan = pc.Plan(pc.ConvProblem.forward(2, x.shape, w.shape, padding=1))
        expected = conv(x, w, padding=1)
        for _ in range(20):
            close(pc.conv2d(gx, gw, padding=1), expected)
            close(plan(gx, gw), expected)
            close(pc.conv2d(x, w, padding=1), expected)
        del gx, gw
    except BaseException as error:
        failed.append(error)
        raise
    finally:
        context.pop()
        context.detach()

for count in (2, 8):
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for one in threads: one.start()
    for one in threads: one.join(300)
assert not failed
print("right")
'''


def ends_right(code, env, **more):
    pytest.importorskip("torch")
    assert python(code, env, PYTHONWARNINGS="ignore", **more).endswith("right\n")


def test_the_notebook(python_env):
    ends_right(NOTEBOOK, python_env)


def test_the_notebook_by_the_launcher_in_python(python_env):
    ends_right(NOTEBOOK, python_env, PYCUDA_CONV_LAUNCHER="python")


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs(python_env, program):
    for library in ("torch", "cupy"):
        if f"import {library}" in PROGRAMS[program]:
            pytest.importorskip(library)
    ends_right(PROGRAMS[program] + "print('right')", python_env)


@pytest.mark.gpu_alone
def test_contexts_made_and_gone(python_env):
    ends_right(CONTEXTS, python_env)


def test_the_bits_are_those_of_the_primary_context(python_env):
    ends_right(BITS, python_env)


def test_a_thread_and_a_context_for_each_gpu(python_env):
    ends_right(THREADS, python_env)


def test_compute_sanitizer_finds_nothing(python_env):
    tool = shutil.which("compute-sanitizer", path=python_env.get("PATH", "") + ":/usr/local/cuda/bin")
    if tool is None:
        pytest.skip("compute-sanitizer is not installed")
    code = PROGRAMS["autoinit, GPUArray"] + "print('right')"
    found = subprocess.run([tool, "--error-exitcode", "9", sys.executable, "-c", code], env=python_env, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0 and "right" in found.stdout and "ERROR SUMMARY: 0 errors" in found.stdout, found.stdout + found.stderr
