"""dask arrays: results, chunks, what is refused when the graph is built, and clusters of real processes."""

import contextlib
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ends_soon
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference import DTYPES, EPS

import pycuda_conv as pc
from pycuda_conv import dispatch
from pycuda_conv.execute import staging
from pycuda_conv.runtime import device_count, get_device

dask = pytest.importorskip("dask", reason="dask arrays are dask's")
da = pytest.importorskip("dask.array")


def draw(*shape, seed=0, dtype="float32"):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def function(name, ndim, suffix=""):
    return getattr(pc, f"conv{name}{ndim}d{suffix}")


@pytest.fixture(autouse=True)
def threads():
    """dask's own default for arrays, whatever a test before left as the current cluster."""
    with dask.config.set(scheduler="threads", num_workers=3):
        yield


def check(found, whole):
    """On OpenCL the same kernels run for chunks and for the whole, and their sums have the same order."""
    assert found.shape == whole.shape and found.dtype == whole.dtype
    if get_device(None).backend == "opencl":
        assert np.array_equal(found, whole)
    else:
        scale = max(float(np.abs(whole.astype("f8")).max(initial=0)), 1.0)
        assert np.abs(found.astype("f8") - whole.astype("f8")).max(initial=0) <= 64 * EPS[whole.dtype.name] * scale


@pytest.fixture
def here(device, monkeypatch):
    """The device of a test is every chunk's default."""
    from pycuda_conv import runtime

    monkeypatch.setattr(runtime, "default_backend", lambda: device.partition(":")[0])
    return device


# ---- results


@st.composite
def cuts(draw, size):
    """An axis in chunks, small ones among them."""
    chunks = []
    while sum(chunks) < size:
        chunks.append(draw(st.integers(1, size - sum(chunks))))
    return tuple(chunks)


@st.composite
def calls(draw):
    """A call of one of the six functions, arrays and options, and chunks for each array."""
    ndim, groups = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 3]))
    transposed, batched = draw(st.booleans()), draw(st.booleans())
    in_group, out_group = draw(st.integers(1, 2)), draw(st.integers(1, 2))

    def axes(low, high):
        return [draw(st.integers(low, high)) for _ in range(ndim)]

    kernel, stride, dilation, size = axes(1, 4), axes(1, 3), axes(1, 2), axes(4, [40, 16, 9][ndim - 1])
    padding = list(zip(axes(0, 5), axes(0, 5), strict=True))
    images = (draw(st.integers(1, 3)),) if batched else ()
    x_shape = (*images, groups * in_group, *size)
    w_shape = (groups * in_group, out_group, *kernel) if transposed else (groups * out_group, in_group, *kernel)
    x_chunks = (
        *(draw(cuts(n)) for n in images), tuple(in_group * n for n in draw(cuts(groups))) if groups > 1 else (in_group,),
        *(draw(cuts(n)) for n in size),
    )
    w_chunks = draw(st.none() | st.tuples(*(cuts(n) for n in w_shape)))
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if transposed:
        options["output_padding"] = [draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)]
    return transposed, ndim, x_shape, w_shape, groups * out_group, x_chunks, w_chunks, draw(st.booleans()), options


@contextlib.contextmanager
def kernels_of_calls():
    """The kinds of kernels for which plans are made."""
    found = set()

    def plan_for(*args):
        plan = original(*args)
        found.add(type(plan.config))
        return plan

    with pytest.MonkeyPatch.context() as patch:
        original = dispatch.plan_for
        patch.setattr(dispatch, "plan_for", plan_for)
        yield found


@given(calls())
@example((False, 2, (2, 2, 11, 16), (4, 1, 1, 2), 4, ((1, 1), (1, 1), (1, 1, 1, 8), (8, 8)), None, False, {"groups": 2}))  # other kernels
@settings(max_examples=60)
def test_chunks_give_what_the_whole_gives(device, call):
    """The very same numbers where the same kernels run, on OpenCL."""
    transposed, ndim, x_shape, w_shape, channels, x_chunks, w_chunks, epilogue, options = call
    convolve = function("_transpose" * transposed, ndim)
    x, w = draw(*x_shape), draw(*w_shape)
    more = {"bias": draw(channels), "scale": draw(channels, seed=1), "activation": "relu"} if epilogue else {}
    try:
        whole = convolve(x, w, device=device, **options, **more)
    except ValueError:  # nothing is left of it
        with pytest.raises(ValueError):
            convolve(da.from_array(x, chunks=x_chunks), w, **options, **more)
        return
    if epilogue:
        more["residual"] = residual = draw(*whole.shape, seed=2)
    with kernels_of_calls() as kernels:
        whole = convolve(x, w, device=device, **options, **more)
    if epilogue:
        more["residual"] = da.from_array(residual, chunks=3)
    filters = w if w_chunks is None else da.from_array(w, chunks=w_chunks)
    result = convolve(da.from_array(x, chunks=x_chunks), filters, device=device, **options, **more)
    assert isinstance(result, da.Array) and result.shape == whole.shape and all(0 not in chunks for chunks in result.chunks)
    with kernels_of_calls() as kernels_of_chunks:
        found = result.compute(scheduler="sync")
    if device == "opencl" and kernels == kernels_of_chunks:
        assert np.array_equal(found, whole)
    else:
        np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("ndim", "dtype"), [(ndim, dtype) for ndim in (1, 2, 3) for i, dtype in enumerate(DTYPES) if dtype == "float32" or i % 3 == ndim - 1]
)
def test_gradients(here, ndim, dtype):
    size, chunks = [(33,), (13, 17), (7, 9, 8)][ndim - 1], [((9, 11, 13),), ((6, 7), (9, 8)), ((3, 4), (5, 4), (8,))][ndim - 1]
    x, w = draw(3, 4, *size, dtype=dtype), draw(6, 2, *(3,) * ndim, dtype=dtype)
    options = {"stride": 2, "padding": 1, "groups": 2}
    dy = draw(*function("", ndim)(x, w, **options).shape, dtype=dtype)
    lazy_x, lazy_dy = da.from_array(x, chunks=((2, 1), 2, *chunks)), da.from_array(dy, chunks=((1, 2), 3, *(3,) * ndim))
    check(function("", ndim, "_input")(x.shape, w, lazy_dy, **options).compute(), function("", ndim, "_input")(x.shape, w, dy, **options))
    bound = EPS[dtype] * 50
    whole = function("", ndim, "_weight")(x, w.shape, dy, **options).astype("f8")
    lazy = function("", ndim, "_weight")(lazy_x, w.shape, lazy_dy, **options)
    found = lazy.compute()
    assert lazy.shape == found.shape == w.shape and lazy.dtype == found.dtype == x.dtype
    assert np.linalg.norm(found.astype("f8") - whole) <= bound * np.linalg.norm(whole) and np.array_equal(found, lazy.compute())
    whole, lazy = dy.astype("f8").sum(axis=(0, *range(2, 2 + ndim))), function("", ndim, "_bias")(lazy_dy)
    assert lazy.shape == whole.shape and lazy.dtype == dy.dtype
    assert np.linalg.norm(lazy.compute().astype("f8") - whole) <= bound * np.abs(dy.astype("f8")).sum() ** 0.5


def test_a_weight_s_gradient_keeps_chunks_of_channels(here):
    x, dy = draw(2, 4, 9, 9), draw(2, 6, 7, 7)
    lazy = pc.conv2d_weight(da.from_array(x, chunks=(1, 2, 4, 9)), (6, 4, 3, 3), da.from_array(dy, chunks=(2, 3, 7, 7)))
    assert lazy.chunks == ((3, 3), (2, 2), (3,), (3,))
    np.testing.assert_allclose(lazy.compute(), pc.conv2d_weight(x, (6, 4, 3, 3), dy), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options, chunks", [
    ({"padding": "same"}, (64, 64, 32)), ({"padding": 2, "dilation": 2}, (64, 64, 32)), ({}, (64, 64, 30)),
    ({"padding": 1, "stride": 2}, (32, 32, 16)), ({"padding": 1, "stride": 3}, (22, 21, 11)), ({"padding": ((1, 0), (1, 0))}, (64, 64, 31)),
])
def test_chunks_of_the_result(here, options, chunks):
    x = da.zeros((5, 3, 160, 160), chunks=(2, 3, 64, 64), dtype="f4")
    y = pc.conv2d(x, np.ones((4, 3, 3, 3), "f"), **options)
    assert y.chunks == ((2, 2, 1), (4,), chunks, chunks)
    assert y.partitions[1, 0, 2, 2].compute().shape == (2, 4, chunks[2], chunks[2])


def test_small_chunks_are_merged(here):
    x = da.zeros((1, 1, 20), chunks=(1, 1, (1, 1, 10, 1, 1, 6)), dtype="f4")
    assert pc.conv1d(x, np.ones((1, 1, 5), "f"), padding="same").chunks[2] == (2, 10, 2, 6)
    assert pc.conv1d(x, np.ones((1, 1, 19), "f"), padding="same").chunks[2] == (20,)
    assert pc.conv_transpose1d(x, np.ones((1, 1, 2), "f"), stride=2).chunks[2] == (2, 2, 20, 2, 2, 12)


def test_empty_chunks_are_left_out(here):
    x, w = draw(3, 2, 20), draw(4, 2, 1)
    filters = da.from_array(w, chunks=((0, 4), (2, 0), 1))
    lazy = pc.conv1d(da.from_array(x, chunks=((0, 2, 0, 1), 2, (0, 9, 0, 11))), filters, stride=2, padding=3)
    assert lazy.chunks == ((2, 1), (4,), (6, 7))
    check(lazy.compute(), pc.conv1d(x, w, stride=2, padding=3))
    assert pc.conv1d(da.from_array(x[:0], chunks=(0, 2, (0, 20))), w).compute().shape == (0, 4, 20)


def test_many_take_dask_arrays(here):
    x, w = draw(2, 1, 9, 9), draw(1, 1, 3, 3)
    for lazy in pc.conv2d_many([da.from_array(x, chunks=4)] * 2, w):
        check(lazy.compute(), pc.conv2d(x, w))


@pytest.mark.gpu
def test_chunks_of_cupy():
    cupy = pytest.importorskip("cupy")
    x, w = draw(4, 3, 40, 41), draw(5, 3, 3, 3)
    lazy = da.from_array(cupy.asarray(x), chunks=(2, 3, 20, 20), asarray=False)
    whole = pc.conv2d(x, w, padding=1)
    for filters in (w, cupy.asarray(w)):
        found = pc.conv2d(lazy, filters, padding=1).compute()
        assert isinstance(found, cupy.ndarray)
        np.testing.assert_allclose(found.get(), whole, rtol=1e-4, atol=1e-4)
    with pytest.raises(TypeError, match="one kind"):
        pc.conv2d(da.from_array(x, chunks=4), cupy.asarray(w))


# ---- what a graph does


def test_nothing_is_computed_before_it_is_asked_for_and_nothing_twice(here):
    asked, lock = Counter(), threading.Lock()

    def load(block_info=None):
        with lock:
            asked[block_info[None]["chunk-location"]] += 1
        return np.ones(block_info[None]["chunk-shape"], "f")

    x = da.map_blocks(load, chunks=((1, 1), (1,), (8,) * 4, (8,) * 3, (8,) * 3), dtype="f4", meta=np.empty((0,) * 5, "f"))
    y = pc.conv3d(x, np.ones((1, 1, 3, 3, 3), "f"), padding=1)
    assert not asked
    part = y[0, 0, :8, :8, :8].compute()
    assert part.max() == 27 and set(asked) == {(0, 0, d, h, w) for d in (0, 1) for h in (0, 1) for w in (0, 1)}
    asked.clear()
    assert y.sum().compute() == 2 * (3 * 32 - 2) * (3 * 24 - 2) ** 2
    assert len(asked) == 72 and set(asked.values()) == {1}


def test_what_is_written_to_a_filter_later_makes_no_difference(here):
    x, w = draw(1, 1, 12, 12), draw(1, 1, 3, 3)
    lazy, whole = pc.conv2d(da.from_array(x, chunks=6), w), pc.conv2d(x, w)
    w[:] = 0
    check(lazy.compute(), whole)


def test_names_follow_the_arguments():
    """dask takes arrays of one name for the same."""
    x, w = da.zeros((1, 1, 12, 12), chunks=6, dtype="f4"), draw(1, 1, 3, 3)
    one = {pc.conv2d(x, w, padding=1).name, pc.conv2d(x, w.copy(), padding=1).name}
    assert len(one) == 1
    others = [
        pc.conv2d(x, w), pc.conv2d(x, 2 * w, padding=1), pc.conv2d(x, w, w[0, 0, 0, :1], padding=1),
        pc.conv2d(x, w, padding=1, activation="relu")
    ]
    others += [
        pc.conv2d(x, w, padding=1, scale=w[0, 0, 0, :1]), pc.conv2d(x, w, padding=((1, 1), (1, 0))),
        pc.conv2d(x, w, padding=1, device="opencl")
    ]
    assert len(one | {other.name for other in others}) == 1 + len(others)


def test_a_volume_of_a_hundred_gigabytes_is_a_graph_at_once(here):
    x = da.zeros((1, 1, 3000, 3000, 3000), chunks=(1, 1, 300, 300, 300), dtype="f4")  # 2.7e10 elements in one channel
    start = time.process_time()
    y = pc.conv3d(x, np.ones((1, 1, 3, 3, 3), "f"), padding=1)
    assert y.shape == x.shape and y.npartitions == 1000 and time.process_time() - start < 60  # the work itself takes hours


def test_a_chunk_goes_to_the_gpu_with_the_least_to_do(monkeypatch):
    from pycuda_conv import dask as chunked

    gpus = tuple(type("Gpu", (), {"name": f"cuda:{i}"})() for i in range(2))
    monkeypatch.setattr(dispatch, "gpus_of", lambda devices: gpus)
    place = chunked.ChunkPlace(devices="all")
    with place.taken() as first, place.taken() as second:
        assert {first, second} == set(gpus)
        with place.taken() as third, place.taken() as fourth:
            assert {third, fourth} == set(gpus)
    assert not any(chunked._busy.values())


def test_chunks_are_joined_in_memory_that_a_gpu_reads(monkeypatch):
    """Page-locked where the chunk goes to a GPU, ordinary elsewhere; the same values."""
    from pycuda_conv import dask as chunked

    class Gpu(contextlib.nullcontext):
        backend, lent = "cuda", []

        def current(self):
            return self

        def result_array(self, shape, dtype):
            self.lent.append(np.empty(shape, dtype))
            return self.lent[-1]

    gpu, x = Gpu(), draw(1, 2, 20, 30).astype(">f4")
    monkeypatch.setattr(chunked, "get_device", lambda device: SimpleNamespace(backend=device) if device == "opencl" else gpu)
    monkeypatch.setattr(dispatch, "gpus_of", lambda devices: (gpu,))
    for place in (chunked.ChunkPlace("opencl"), chunked.ChunkPlace(0), chunked.ChunkPlace(devices=(0, 1))):
        gpu.lent.clear()
        y = chunked._joined_at(place, x[:, :, 3:18], (2,), x[:, :, 1:3], x[:, :, 18:])
        assert y.dtype == x.dtype and np.array_equal(y, x[:, :, 1:])
        assert len(gpu.lent) == (place.device != "opencl") and all(np.shares_memory(y, one) for one in gpu.lent)


@pytest.mark.parametrize("copier", ["c", "numpy"])
@pytest.mark.parametrize("threads", [1, 4])
def test_arrays_are_copied_by_threads(monkeypatch, threads, copier):
    """Several ones into one, whatever their strides; each byte to its place, and no other one is touched."""
    if copier == "numpy":
        monkeypatch.setattr(staging, "copier_in_c", lambda: None)
    elif staging.copier_in_c() is None:
        pytest.skip("the threads in C were not built")
    monkeypatch.setattr(staging, "COPYING", threads)
    monkeypatch.setattr(staging, "LEAST_PART_BYTES", 100)
    monkeypatch.setattr(staging, "LEAST_MOVED_BYTES", 200)
    sources = (
        draw(5, 7, 90), draw(90, 7, 5).T, draw(1, 1, 4000)[..., ::2], draw(3), draw(2, 0, 3), draw(4, 9, 5, 6)[:, ::-1],
        draw(6, 300).astype(">f4"), draw(5000), draw(3, 701, dtype="float16"),
    )
    for source in (*sources, np.broadcast_to(draw(9), (8, 7, 9)), draw(3, 2, 1, 2, 1, 2, 40)):
        whole = np.zeros((*source.shape[:-1], source.shape[-1] + 5), source.dtype)
        rim = draw(*source.shape[:-1], 2).astype(source.dtype)
        staging.copy(whole, (whole[..., 1:-4], source), (whole[..., -3:-1], rim))
        assert np.array_equal(whole[..., 1:-4], source) and np.array_equal(whole[..., -3:-1], rim)
        assert not whole[..., [0, -4, -1]].any()
    inner = np.zeros((40, 50, 60), "f")
    staging.copy(inner, (inner[3:-2, 5:, 1:-1], draw(35, 45, 58)))
    assert np.array_equal(inner[3:-2, 5:, 1:-1], draw(35, 45, 58))
    assert not inner[:3].any() and not inner[-2:].any() and not inner[:, :5].any()
    fixed = np.broadcast_to(np.zeros(1, "f"), (5000,))
    with pytest.raises(ValueError, match="read-only"):
        staging.copy(fixed, (fixed, draw(5000)))


FORKS = """
import os, signal, threading
import numpy as np
from pycuda_conv.execute import staging

source = np.arange(1 << 18, dtype="d").reshape(64, 64, 64)

def copied():
    target = np.empty_like(source)
    staging.copy(target, (target[:32], source[:32]), (target[32:], source[32:]))
    return target

def copy_on():
    while True:
        copied()

for _ in range(3):
    threading.Thread(target=copy_on, daemon=True).start()
for _ in range(150):
    child = os.fork()
    if not child:
        signal.alarm(30)  # ends a child that waits for ever
        os._exit(0 if np.array_equal(copied(), source) else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks on this system")
def test_a_process_that_was_forked_while_others_copied_copies_too(fast_env):
    done = subprocess.run([sys.executable, "-c", FORKS], env=fast_env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr


def test_the_example_learns_a_filter(device, fast_env, tmp_path):
    """examples/volume.py, with a volume of eight chunks."""
    zarr = pytest.importorskip("zarr")
    program = Path(pc.__file__).resolve().parent.parent / "examples" / "volume.py"
    if not program.exists():
        pytest.skip("no examples/ beside the package")
    command = [sys.executable, program, "--size", "32", "--chunk", "16", "--steps", "8", tmp_path / "y.zarr"]
    env = {**fast_env, "PYCUDA_CONV_BACKEND": device.partition(":")[0]}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    before, after = map(float, re.findall(r"cube (\S+),.* one (\S+)", done.stdout)[0])
    assert after < before / 2
    assert zarr.open_group(tmp_path / "y.zarr", mode="r")["restored"].shape == (1, 1, 32, 32, 32)


# ---- what is refused when the graph is built

X = da.zeros((2, 4, 20, 20), chunks=(1, 4, 10, 10), dtype="f4")
W = np.ones((6, 4, 3, 3), "f")
REFUSED = {
    "dtypes": (lambda: pc.conv2d(X, W.astype("f8")), ValueError, "float32.*float64.*should be the same"),
    "dtype of the residual": (lambda: pc.conv2d(X, W, residual=da.zeros((2, 6, 18, 18), dtype="f8")), ValueError, "residual.*float64"),
    "words": (lambda: pc.conv2d(X.astype("S4"), W.astype("i4")), TypeError, "input has the type bytes32.*pass numbers"),
    "words beside floats": (lambda: pc.conv2d(X, W.astype("S4")), TypeError, "weight has the type bytes32.*pass numbers"),
    "channels": (lambda: pc.conv2d(X.rechunk({1: 2}), W), ValueError, r"all 4 channels.*\(2, 2\).*rechunk\(\{1: -1\}\)"),
    "groups": (lambda: pc.conv2d(X.rechunk({1: 1}), W[:, :2], groups=2), ValueError, r"whole groups of 2 channels.*\(1, 1, 1, 1\).*rechunk\(\{1: 2\}\)"),
    "unknown": (lambda: pc.conv2d(X[X[:, 0, 0, 0] > 0], W), ValueError, "unknown sizes.*compute_chunk_sizes"),
    "shape": (lambda: pc.conv2d(X, W[:, :3]), ValueError, "to have 3 channels, but got 4"),
    "bias": (lambda: pc.conv2d(X, W, W[0, 0, 0]), ValueError, "bias"),
    "residual": (lambda: pc.conv2d(X, W, residual=X), ValueError, "residual must have the result's shape"),
    "out": (lambda: pc.conv2d(X, W, out=np.empty((2, 6, 18, 18), "f")), ValueError, "out is for arrays in memory"),
    "stream": (lambda: pc.conv2d(X, W, stream=0), ValueError, "stream is for arrays in memory"),
    "numpy input": (lambda: pc.conv2d(np.zeros((1, 4, 9, 9), "f"), da.from_array(W)), TypeError, "input must be a dask array"),
    "list": (lambda: pc.conv2d(X, [[1]]), TypeError, "weight must be a numpy.ndarray"),
    "a tensor": (lambda: pc.conv2d(X, torch.ones(6, 4, 3, 3)), TypeError, "pass arrays of one kind"),
    "list as a bias": (lambda: pc.conv2d(X, W, [1.0] * 6), TypeError, "bias must be a numpy.ndarray"),
    "list beside complex numbers": (lambda: pc.conv2d(X.astype("c8"), [[1]]), TypeError, "weight must be a numpy.ndarray"),
    "device": (lambda: pc.conv2d(X, W, device=1.5), TypeError, "device must be"),
    "another device": (lambda: pc.conv2d(X, W, device="gpu"), ValueError, "device must be None, a GPU's number.*got 'gpu'"),
    "one of the devices": (lambda: pc.conv2d(X, W, devices=[0, "gpu"]), ValueError, "devices must be 'all' or a list of GPU numbers, got 'gpu' in it"),
    "device of a gradient": (lambda: pc.conv2d_bias(X, device="gpu"), ValueError, "device must be"),
    "both": (lambda: pc.conv2d(X, W, device=0, devices=[0]), ValueError, "exclude each other"),
    "devices": (lambda: pc.conv2d(X, W, devices="some"), TypeError, "devices must be"),
    "stride": (lambda: pc.conv2d(X, W, stride=0), ValueError, "stride"),
    "size of a chunk": (
        lambda: pc.conv2d(da.zeros((1, 1, 1 << 17, 1 << 17), chunks=(1, 1, 1 << 16, 1 << 16), dtype="f4"), W[:1, :1]), ValueError,
        "chunks of 65536 x 65536 are too large: one channel",
    ),
    "gradient": (lambda: pc.conv2d_weight(X, W.shape, X), ValueError, "grad_output must have the shape"),
    "gradient of the input": (lambda: pc.conv2d_input((2, 4, 22, 22), W[:4], X.rechunk({1: 1})), ValueError, "all 4 channels"),
    "gradient of a bias": (lambda: pc.conv2d_bias(X[0, 0]), ValueError, "grad_output"),
    "a plan": (lambda: pc.Plan(pc.ConvProblem.forward(2, X.shape, W.shape), "opencl")(X, W), TypeError, "a plan takes arrays in memory"),
}


@pytest.mark.parametrize("call, error, words", REFUSED.values(), ids=REFUSED.keys())
def test_refused_when_the_graph_is_built(opencl, call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("filters", ["in memory", "computed later"])
@pytest.mark.parametrize("groups", [1, 8])
def test_a_chunk_that_needs_no_neighbour_is_one_task(opencl, groups, filters):
    """With what comes before and after it; the filter in one chunk is another task. A filter that is computed later is none yet."""
    w = draw(8, 16 // groups, 3, 3)
    given = w if filters == "in memory" else da.from_array(w, chunks=(2, -1, -1, -1)).rechunk(w.shape) * 1
    lazy = pc.conv2d(da.full((4, 16, 9, 8), 3, chunks=(1, 16, 9, 8), dtype="f4") - 1, given, groups=groups, device="opencl") * 2
    (done,) = dask.optimize(lazy)
    assert filters != "in memory" or len(dict(done.__dask_graph__())) == 4 + 1
    assert np.array_equal(lazy.compute(), 2 * pc.conv2d(np.full((4, 16, 9, 8), 2, "f"), w, groups=groups, device="opencl"))


# ---- clusters


@pytest.fixture(scope="module")
def cluster(fast_env, opencl, tmp_path_factory):
    """Two workers, processes with one PoCL thread each."""
    distributed = pytest.importorskip("distributed", reason="clusters are dask.distributed's")
    env = {
        "PYTHONPATH": fast_env["PYTHONPATH"], "POCL_MAX_PTHREAD_COUNT": "1", "OMP_NUM_THREADS": "1",
        "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "300s"
    }
    folder = tmp_path_factory.mktemp("workers")
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "300s"}),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, env=env, local_directory=str(folder), memory_limit=0
        ) as made,
    ):
        yield made


@pytest.fixture
def client(cluster):
    from distributed import Client

    with Client(cluster) as made:
        made.wait_for_workers(2, timeout=100)
        yield made


@ends_soon
def test_a_cluster_gives_what_the_whole_gives_and_gets_the_filter_once(client):
    x, w = draw(6, 8, 60, 60), draw(17, 8, 5, 5)
    lazy = pc.conv2d(da.from_array(x, chunks=(1, 8, 20, 20)), w, padding=2, device="opencl")

    def received(dask_worker):
        return [key for log in dask_worker.transfer_incoming_log for key, nbytes in log["keys"].items() if nbytes == w.nbytes]

    assert np.array_equal(client.compute(lazy).result(300), pc.conv2d(x, w, padding=2, device="opencl"))
    assert sum(len(keys) for keys in client.run(received).values()) <= 1  # from one worker to the other
    assert pickle.dumps(lazy).count(w.tobytes()) == 1  # and to the scheduler too


@ends_soon
def test_a_worker_without_a_gpu_computes_only_if_asked_to(client):
    from pycuda_conv.runtime import default_backend

    if default_backend() != "opencl" or os.environ.get("PYCUDA_CONV_BACKEND"):
        pytest.skip("for workers that have no GPU and were not told so")
    x, w = da.ones((2, 1, 9, 9), chunks=(1, 1, 9, 9), dtype="f4"), np.ones((1, 1, 3, 3), "f")
    with pytest.raises(pc.BackendError, match=r"has no GPU.*device='opencl'.*PYCUDA_CONV_BACKEND=opencl"):
        pc.conv2d(x, w).compute()
    assert (pc.conv2d(x, w, device="opencl").compute() == 9).all()


@pytest.mark.gpu
@pytest.mark.parametrize("chunks_of", ["numpy", "cupy"])
def test_workers_that_see_one_gpu_each(chunks_of, python_env, tmp_path):
    """As `CUDA_VISIBLE_DEVICES=0 dask worker` starts them. Where there is one GPU, they share it."""
    distributed = pytest.importorskip("distributed", reason="clusters are dask.distributed's")
    library = pytest.importorskip(chunks_of)

    def worker(number):
        env = {"PYTHONPATH": python_env["PYTHONPATH"], "CUDA_VISIBLE_DEVICES": str(number % device_count())}
        options = {"nthreads": 1, "env": env, "memory_limit": 0, "local_directory": str(tmp_path), "dashboard": False}
        return {"cls": distributed.Nanny, "options": options}

    def gpu():
        with get_device(None) as device:
            return device.context.get_device().pci_bus_id()

    scheduler = {"cls": distributed.Scheduler, "options": {"dashboard": False}}
    x, w = draw(1, 2, 24, 40, 50), draw(3, 2, 3, 3, 3)
    with distributed.SpecCluster(
        workers={0: worker(0), 1: worker(1)}, scheduler=scheduler
    ) as cluster, distributed.Client(cluster) as client:
        client.wait_for_workers(2, timeout=300)
        assert len(set(client.run(gpu).values())) == min(2, device_count())
        lazy = da.from_array(x, chunks=(1, 2, 12, 20, 25)).map_blocks(library.asarray, meta=library.empty((0,) * 5, "f"))
        found = client.compute(pc.conv3d(lazy, w, padding=1)).result(timeout=300)
        assert isinstance(found, library.ndarray)
        check(np.asarray(found if chunks_of == "numpy" else found.get()), pc.conv3d(x, w, padding=1))
