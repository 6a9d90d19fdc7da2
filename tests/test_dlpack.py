"""Arrays of libraries that speak DLPack: jax and array_api_strict where they are installed, and always a library of the test's own."""

import contextlib
import gc
import importlib.util
import os
import pickle
import subprocess
import sys
import textwrap
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from reference import python
from test_host_tensors import DTYPES, LAYOUTS, draw

import pycuda_conv as pc
from pycuda_conv.arrays import dlpack as module
from pycuda_conv.arrays import kind_of


class Spoken:
    """An array that shows nothing but DLPack, over a tensor."""

    versioned, read_only, device, error = True, False, None, None

    def __init__(self, tensor):
        self.tensor = tensor

    def __array_namespace__(self):
        return SPEAKS

    def __dlpack_device__(self):
        return self.device or self.tensor.__dlpack_device__()

    def __dlpack__(self, **options):
        if self.error is not None:
            raise self.error
        if not self.versioned and "max_version" in options:
            raise TypeError("an unexpected keyword argument 'max_version'")
        if self.read_only:
            array = self.tensor.numpy()
            array.flags.writeable = False
            return array.__dlpack__(max_version=(1, 0))
        return self.tensor.__dlpack__(**options)

    def __reduce__(self):
        return type(self), (self.tensor,)


class Older(Spoken):
    """The same before version 1 of DLPack."""

    versioned = False


class Mute:
    """An array of a library that takes no DLPack."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)


SPEAKS = SimpleNamespace(__name__="speaks.sublibrary", from_dlpack=lambda exporter: Spoken(torch.from_dlpack(exporter)))
def close(got, expected):
    torch.testing.assert_close(
        got.double(), expected.double(), rtol=2e-2 if expected.dtype in DTYPES[:2] else 1e-4,
        atol=2e-2 if expected.dtype in DTYPES[:2] else 1e-4
    )


@pytest.mark.parametrize("make", [Spoken, Older])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_librarys_array_comes_out(where, make, dtype):
    x, w, b, r = (draw(*shape, dtype=dtype).to(where) for shape in ((2, 4, 7, 6), (6, 4, 3, 3), (6,), (2, 6, 7, 6)))
    got = pc.conv2d(make(x), make(w), make(b), padding=1, residual=make(r), scale=make(b), activation="relu")
    assert type(got) is Spoken
    assert torch.equal(got.tensor, pc.conv2d(x, w, b, padding=1, residual=r, scale=b, activation="relu"))


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_all_functions_take_it(where, ndim):
    size = (5,) * ndim
    x, w, t, dy = (draw(*shape).to(where) for shape in ((2, 4, *size), (6, 4, *(3,) * ndim), (4, 6, *(3,) * ndim), (2, 6, *size)))
    for name, operands, rest in (
        ("conv{}d", (x, w), {"padding": 1}), ("conv_transpose{}d", (x, t), {}), ("conv{}d_bias", (dy,), {}),
        ("conv{}d_input", (x.shape, w, dy), {"padding": 1}), ("conv{}d_weight", (x, w.shape, dy), {"padding": 1}),
    ):  # fmt: skip
        function = getattr(pc, name.format(ndim))
        got = function(*(a if isinstance(a, torch.Size) else Spoken(a) for a in operands), **rest)
        assert type(got) is Spoken and torch.equal(got.tensor, function(*operands, **rest))
    many = getattr(pc, f"conv{ndim}d_many")
    assert all(torch.equal(a.tensor, b) for a, b in zip(many([Spoken(x)] * 3, Spoken(w)), many([x] * 3, w), strict=True))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("plain", "negated")])
def test_strides(where, layout):
    x, w = LAYOUTS[layout](draw(2, 4, 6, 6).to(where)), draw(5, 4, 3, 3).to(where)
    got = pc.conv2d(Spoken(x), Spoken(w.transpose(2, 3)))
    assert torch.equal(got.tensor, pc.conv2d(x.contiguous(), w.transpose(2, 3).contiguous()))
    assert torch.equal(pc.conv2d_bias(Spoken(x)).tensor, pc.conv2d_bias(x.contiguous())) if layout != "empty" else True


def test_out(where):
    x, w = draw(2, 4, 6, 6).to(where), draw(5, 4, 3, 3).to(where)
    out = Spoken(torch.full((2, 5, 4, 4), float("nan"), device=where))
    assert pc.conv2d(Spoken(x), Spoken(w), out=out) is out
    assert torch.equal(out.tensor, pc.conv2d(x, w))
    plan = pc.Plan(pc.ConvProblem.forward(2, x.shape, w.shape), None if where == "cpu" else "cuda:0")
    for call in (lambda out: plan(Spoken(x), Spoken(w), out=out), lambda out: plan.bind(Spoken(w))(Spoken(x), out=out)):
        out.tensor.fill_(float("nan"))
        assert call(out) is out and torch.equal(out.tensor, pc.conv2d(x, w))
    older = Older(torch.empty(2, 5, 4, 4, device=where))
    with pytest.raises(pc.ConvArgumentError, match="out is read-only"):
        pc.conv2d(Spoken(x), Spoken(w), out=older)
    with pytest.raises(pc.ConvArgumentError, match="out"):
        pc.conv2d(Spoken(x), Spoken(w), out=Spoken(torch.empty(2, 5, 4, 5, device=where)))


def test_read_only_memory_is_read_and_not_written():
    x, w, out = Spoken(draw(2, 4, 6, 6)), Spoken(draw(5, 4, 3, 3)), Spoken(torch.zeros(2, 5, 4, 4))
    for array in (x, w, out):
        array.read_only = True
    assert torch.equal(pc.conv2d(x, w).tensor, pc.conv2d(x.tensor, w.tensor))
    with pytest.raises(pc.ConvArgumentError, match="out is read-only"):
        pc.conv2d(x, w, out=out)
    assert not out.tensor.any()


def test_plans_and_filters_that_are_bound(where):
    x, w, b = (draw(*shape).to(where) for shape in ((2, 4, 6, 6), (5, 4, 3, 3), (5,)))
    plan = pc.Plan(pc.ConvProblem.forward(2, x.shape, w.shape, b.shape), None if where == "cpu" else "cuda:0")
    expected = plan(x, w, b)
    bound = plan.bind(Spoken(w), Spoken(b))
    for layer in (bound, pickle.loads(pickle.dumps(bound))):
        got = layer(Spoken(x))
        assert type(got) is Spoken and torch.equal(got.tensor, expected)
    assert torch.equal(plan(Spoken(x), Spoken(w), Spoken(b)).tensor, expected)
    with pytest.raises(pc.ConvArgumentError, match="this plan takes input of shape"):
        bound(Spoken(x[:1]))
    with pytest.raises(TypeError, match=r"input is a torch\.Tensor but the filter is a speaks array"):
        bound(x)


def test_a_library_without_from_dlpack_gets_arrays_of_numpy():
    x, w = draw(2, 4, 6, 6), draw(5, 4, 3, 3)
    got = pc.conv2d(Mute(x), Mute(w))
    assert type(got) is np.ndarray and np.array_equal(got, pc.conv2d(x, w).numpy())
    pytest.importorskip("ml_dtypes")
    got = pc.conv2d(Mute(x.bfloat16()), Mute(w.bfloat16()))
    assert got.dtype.name == "bfloat16" and np.array_equal(got.astype("f"), pc.conv2d(x.bfloat16(), w.bfloat16()).float().numpy())


def test_integers_are_taken():
    x, w = draw(2, 4, 6, 6).mul(9).int(), draw(5, 4, 3, 3).mul(9).int()
    got = pc.conv2d(Spoken(x), Spoken(w))
    assert torch.equal(got.tensor, torch.nn.functional.conv2d(x.double(), w.double()))


def refused(match, error, x, w=None, **options):
    with pytest.raises(error, match=match):
        pc.conv2d(x, Spoken(draw(5, 4, 3, 3)) if w is None else w, **options)


def test_what_is_refused_by_name():
    x, w = Spoken(draw(2, 4, 6, 6)), Spoken(draw(5, 4, 3, 3))
    refused("input is a speaks array but weight is a torch.Tensor", TypeError, x, w.tensor)
    refused(r"input is a speaks array but weight is a \w+ array", TypeError, x, Mute(w.tensor))
    refused("input has the type complex64", TypeError, Spoken(x.tensor.cfloat()), Spoken(w.tensor.cfloat()))
    refused("Input type .* and weight type .* should be the same", ValueError, x, Spoken(w.tensor.double()))
    for number in (8, 10):  # Metal and ROCm
        x.device = number, 0
        refused(f"input lies on a device that DLPack gives the number {number}", TypeError, x, w)
    x.device = None
    w.error = BufferError("not now")
    refused("weight can't be read: its library says: not now", ValueError, x, w)
    w.sharding = SimpleNamespace(device_set={1, 2})
    refused("weight is sharded over 2 devices", ValueError, x, w)
    w.error = None
    y = pc.conv2d(x, w)  # what was refused leaves nothing behind
    assert torch.equal(y.tensor, pc.conv2d(x.tensor, w.tensor))
    x.tensor.untyped_storage().resize_(0)
    refused("input has no memory: its address is 0", ValueError, x, w)


def test_memory_lives_as_long_as_it_is_used():
    x, w = draw(2, 4, 6, 6), draw(5, 4, 3, 3)
    references = sys.getrefcount(x)
    plan = pc.Plan(pc.ConvProblem.forward(2, x.shape, w.shape))
    for _ in range(3):
        result = plan(Spoken(x), Spoken(w))
    expected = plan(x, w)
    del plan
    gc.collect()
    assert sys.getrefcount(x) == references  # capsules that were read are gone
    assert torch.equal(result.tensor, expected)  # and the result's memory is still there
    part = module.read(Spoken(x), "input").memory()
    alive = weakref.ref(x)
    del x
    gc.collect()
    torch.full((2, 4, 6, 6), 7.0)
    assert np.array_equal(pc.conv2d(part, w.numpy()), result.tensor.numpy())
    del part
    gc.collect()
    assert alive() is None


def test_an_exporter_answers_as_dlpack_asks():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    view = module.ArrayView((3, 2), "float32", None, array.ctypes.data, (4, 12), array)
    exporter = module.Exporter(view)
    assert exporter.__dlpack_device__() == (1, 0)
    assert torch.equal(torch.from_dlpack(exporter), torch.from_numpy(array.T))
    got = np.from_dlpack(exporter)
    assert np.shares_memory(got, array) and np.array_equal(got, array.T)
    assert not np.shares_memory(torch.utils.dlpack.from_dlpack(exporter.__dlpack__(copy=True)).numpy(), array)
    with pytest.raises(BufferError, match="not copied to"):
        exporter.__dlpack__(dl_device=(2, 0))
    bits = np.array([0x3F80, 0x4000], np.int16)  # 1 and 2
    half = module.Exporter(module.ArrayView((2,), "bfloat16", None, bits.ctypes.data, (2,), bits))
    assert torch.from_dlpack(half).tolist() == [1, 2] and torch.from_dlpack(half).dtype == torch.bfloat16


def test_room_for_results_is_aligned_as_jax_wants_it():
    kind = kind_of("x", Spoken(draw(1)))
    for shape in ((), (0,), (1,), (3, 5), (2, 3, 4)):
        for dtype in ("i2", "f2", "f4", "f8"):
            memory = kind.allocate(shape, np.dtype(dtype))
            assert memory.shape == shape and memory.dtype == dtype and memory.flags.c_contiguous and memory.flags.writeable
            assert memory.ctypes.data % 64 == 0 or memory.size == 0


def test_arrays_are_kept_until_launches_are_done():
    """Their libraries may use the memory again as soon as a capsule is gone, in streams that do not wait for ours."""

    class Context:
        def __init__(self):
            self.events, self.done = [], [0]

        def current(self):
            return contextlib.nullcontext()

        def recorded(self, stream):
            self.events.append(stream)
            number, done = len(self.events), self.done
            return SimpleNamespace(query=lambda: number <= done[0])

    kind, first, second = module.DLPackKind("a library", None), Context(), Context()
    alive = []

    def call(context, stream=None):
        array = draw(3)
        alive.append(weakref.ref(array))
        kind._keep(context, [array], stream)

    def living():
        gc.collect()
        return [one() is not None for one in alive]

    call(first)
    call(first, 7)
    assert living() == [True, True] and first.events == [None, 7]
    call(second)
    first.done[0] = 1
    call(second)  # asks nothing of another context, which may be gone
    assert living() == [True] * 4
    call(first)
    assert living() == [False, True, True, True, True]
    first.done[0] = 3
    call(first)
    assert living() == [False, False, True, True, False, True]
    del first
    assert living() == [False, False, True, True, False, False]


def test_dlpack_takes_gpuarrays_alone():
    for array in (np.ones(3), draw(3), 1):
        with pytest.raises(TypeError, match=r"array must be a pycuda.gpuarray.GPUArray, but got \w+"):
            pc.dlpack(array)


# ---- libraries


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_array_api_strict(dtype):
    strict = pytest.importorskip("array_api_strict")
    x, w = (strict.asarray(draw(*shape).numpy().astype(dtype)) for shape in ((2, 4, 6, 6), (5, 4, 3, 3)))
    y = pc.conv2d(x, w, padding=1)
    assert type(y) is type(x) and y.dtype == x.dtype
    assert np.array_equal(np.from_dlpack(y), pc.conv2d(np.from_dlpack(x), np.from_dlpack(w), padding=1))
    out = strict.zeros_like(y)
    assert pc.conv2d(x, w, padding=1, out=out) is out and strict.all(out == y)


JAX = """
import sys
import numpy as np
import jax, jax.numpy as jnp
import pycuda_conv as pc

device = jax.devices(PLATFORM)[0]
place = jax.device_put
draw = lambda seed, *shape, dtype=jnp.float32: place(jax.random.normal(jax.random.key(seed), shape).astype(dtype), device)
exact = jax.lax.Precision.HIGHEST


def close(got, expected, dtype=jnp.float32):
    assert type(got) is type(expected) and got.dtype == expected.dtype and got.devices() == {device}, (got, expected)
    limit = 1e-5 if dtype == jnp.float32 else 1e-2
    assert abs(got.astype("f") - expected.astype("f")).max() <= limit * abs(expected.astype("f")).max()


for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
    x, w, b = draw(0, 2, 8, 9, 9, dtype=dtype), draw(1, 16, 8, 3, 3, dtype=dtype), draw(2, 16, dtype=dtype)
    convolve = lambda x, w: jax.lax.conv(x, w, (1, 1), "SAME", precision=exact)
    y = pc.conv2d(x, w, b, padding=1)
    close(y, (convolve(x.astype("f"), w.astype("f")) + b.astype("f")[:, None, None]).astype(dtype), dtype)
    close(jnp.tanh(y) * 2, 2 * jnp.tanh(y), dtype)
    y, pull = jax.vjp(convolve, x, w)
    dx, dw = pull(y)
    close(pc.conv2d_input(x.shape, w, y, padding=1), dx, dtype)
    close(pc.conv2d_weight(x, w.shape, y, padding=1), dw, dtype)
    close(pc.conv2d_bias(y), y.astype("f").sum((0, 2, 3)).astype(dtype), dtype)
    bound = pc.Plan(pc.ConvProblem.forward(2, x.shape, w.shape, padding=1, dtype=dtype.dtype.name), NAME).bind(w)
    close(bound(x), convolve(x, w), dtype)
    for got in pc.conv2d_many([x, x + 1, x], w, padding=1):
        close(got, got, dtype)

x, w = draw(0, 2, 8, 9, 9), draw(1, 16, 8, 3, 3)
y = x
for step in range(40):  # results go on at once, and what they were made from is dropped
    y = pc.conv2d(jnp.tanh(y) * 1.01, 0.1 * w[:8], padding=1)
expected = x
for step in range(40):
    expected = jax.lax.conv(jnp.tanh(expected) * 1.01, 0.1 * w[:8], (1, 1), "SAME", precision=exact)
assert abs(y - expected).max() < 1e-2 * abs(expected).max(), abs(y - expected).max()


def refused(word, call):
    try:
        call()
    except (TypeError, ValueError) as error:
        assert word in str(error), error
    else:
        raise AssertionError(word)


refused("input is a tracer", lambda: jax.jit(lambda x: pc.conv2d(x, w))(x))
refused("input is a tracer", lambda: jax.grad(lambda x: pc.conv2d(x, w).sum())(x))
refused("input is a tracer", lambda: jax.vmap(lambda x: pc.conv2d(x, w))(x[None]))
refused("weight is a tracer", lambda: jax.jit(lambda w: pc.conv2d(x, w))(w))
refused("out is read-only", lambda: pc.conv2d(x, w, out=pc.conv2d(x, w)))
refused("pass arrays of one kind", lambda: pc.conv2d(x, np.asarray(w)))
gone = jnp.copy(x)
gone.delete()
refused("was deleted", lambda: pc.conv2d(gone, w))
if len(jax.devices(PLATFORM)) > 1:
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    mesh = Mesh(np.array(jax.devices(PLATFORM)[:2]), ("batch",))
    refused("input is sharded over 2 devices", lambda: pc.conv2d(place(x, NamedSharding(mesh, PartitionSpec("batch"))), w))
shape = jax.ShapeDtypeStruct((2, 16, 9, 9), jnp.float32)
host = np.asarray(w)
called = jax.jit(lambda x: jax.pure_callback(lambda x: pc.conv2d(np.asarray(x), host, padding=1), shape, x))(x)
assert abs(called - pc.conv2d(x, w, padding=1)).max() < 1e-4
print("as expected")
"""


def run_jax(platform, name, **environment):
    if importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed")
    text = f"PLATFORM, NAME = {platform!r}, {name!r}\n{JAX}"
    done = subprocess.run(
        [sys.executable, "-c", text], env={**os.environ, **environment}, capture_output=True, text=True, timeout=900, check=False
    )
    if platform == "cuda" and "Unknown backend" in done.stderr:
        pytest.skip("this jax knows no GPU")
    assert done.returncode == 0 and done.stdout.strip() == "as expected", done.stdout + done.stderr[-3000:]


def test_jax_on_the_host():
    run_jax("cpu", None, JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=2")


@pytest.mark.gpu
def test_jax_on_a_gpu():
    run_jax("cuda", "cuda:0", XLA_PYTHON_CLIENT_PREALLOCATE="false", NVIDIA_TF32_OVERRIDE="0")


# ---- on a GPU


@pytest.mark.gpu
def test_gpuarrays_go_to_other_libraries():
    """In the primary context, in a process of its own."""
    code = """
        import numpy as np, torch
        import pycuda.autoprimaryctx
        import pycuda.gpuarray as gpuarray
        import pycuda_conv as pc
        for dtype in "efdiB":
            a = gpuarray.to_gpu(np.arange(24).reshape(2, 3, 4).astype(dtype))
            t = torch.from_dlpack(pc.dlpack(a))
            assert t.data_ptr() == int(a.gpudata) and t.cpu().numpy().tolist() == a.get().tolist(), dtype
        part = torch.from_dlpack(pc.dlpack(a[:, 1:, ::2]))
        assert part.cpu().numpy().tolist() == a.get()[:, 1:, ::2].tolist()
        x = gpuarray.to_gpu(np.ones((1, 2, 5, 5), "f"))
        t = torch.from_dlpack(pc.dlpack(x))
        t += 1  # the same memory
        torch.cuda.synchronize()
        assert (x.get() == 2).all()
        del x
        assert (t == 2).all()
        w = gpuarray.to_gpu(np.ones((3, 2, 3, 3), "f"))
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):  # results that only torch holds, read on another stream
                y = torch.from_dlpack(pc.dlpack(pc.conv2d(gpuarray.to_gpu(np.ones((1, 2, 5, 5), "f")), w)))
                assert (y == 18).all()
        try:
            import cupy
        except ImportError:
            pass
        else:
            assert cupy.from_dlpack(pc.dlpack(w)).get().tolist() == w.get().tolist()
        print("as expected")
    """
    assert python(textwrap.dedent(code), os.environ) == "as expected\n"


@pytest.mark.gpu
def test_results_are_not_overwritten_while_another_stream_reads_them():
    x, w = draw(4, 16, 64, 64).cuda(), draw(16, 16, 3, 3).cuda()
    expected = pc.conv2d(x, w, padding=1)
    for stream in (torch.cuda.Stream() for _ in range(3)):
        with torch.cuda.stream(stream):
            for _ in range(30):
                stream.wait_stream(torch.cuda.default_stream())
                y = pc.conv2d(Spoken(x), Spoken(w), padding=1).tensor
                torch.cuda._sleep(200_000)
                copied = y.clone()
                del y
                pc.conv2d(Spoken(x * 0), Spoken(w), padding=1)
                assert torch.equal(copied, expected)
