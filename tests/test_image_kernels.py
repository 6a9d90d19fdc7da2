"""The kernels for images on a GPU, on the simulated machine: random calls of pycuda_conv.ndimage against scipy in float64."""

import ctypes
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import simt
from modes import gpu
from test_ndimage import check, drawn, ndimage, random_calls

import pycuda_conv.ndimage as ours
from pycuda_conv.arrays import kind_of
from pycuda_conv.engines.images import window as images
from pycuda_conv.ndimage import compute, launches, staged
from pycuda_conv.ndimage.launches import Pass
from pycuda_conv.ndimage.spaces import Space, space_of
from pycuda_conv.ndimage.taps import gaussian
from pycuda_conv.runtime import get_device

pytestmark = pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))


@pytest.fixture
def simulated(monkeypatch):
    """Filters of numpy arrays run on a simulated GPU; the fixture is the list of launches."""
    device, made = gpu(3), []

    def launched(bench, kernel, window, taps, x, filters, shape, output, target, previous, skip=False):
        y = np.full(shape, 77, output) if target is None else target
        if 0 in shape:
            return y
        step = images._launch(kernel, window, taps, bench.device, skip)
        buffers = [None if one is None else np.ascontiguousarray(one).reshape(-1).view(np.uint8) for one in (x, filters, previous, y)]
        memory = SimpleNamespace(buffers=buffers)
        simt.run([[step]], memory, seed=len(made))
        made.append((kernel, window, taps))
        y[...] = memory.buffers[3].view(output).reshape(shape)
        return y

    monkeypatch.setattr(launches, "_launched", launched)
    monkeypatch.setattr(launches, "MANY", {"cuda": 10**6, "opencl": 10**6})
    there = Space(SimpleNamespace(on_gpu=lambda array: True), np)
    monkeypatch.setattr(compute, "Bench", lambda space, _, stream: launches.Bench(there, device, stream))
    return made


@pytest.fixture
def launched(monkeypatch):
    """The launches that are made from now on."""
    made, original = [], images._launch
    monkeypatch.setattr(images, "_launch", lambda *args: (made.append(original(*args)), made[-1])[1])
    return made


@pytest.mark.parametrize("seed", range(4))
def test_random_calls(simulated, seed):
    random_calls(12, 100 + seed)
    assert simulated


def test_what_is_not_finite_spreads_as_in_scipy(simulated):
    x = np.random.default_rng(0).random((40, 150))
    x[10, 20], x[30, 100], x[39, 149] = np.nan, np.inf, -np.inf
    for dtype in ("float32", "float64"):
        for weights in ([[0, 1, 0, 2], [1, 0, 0, 1], [0, 0, 1, 0]], [[1, 2, 1], [2, 4, 2.5]]):
            want = ndimage.correlate(x, weights, mode="mirror")
            got = ours.correlate(x.astype(dtype), weights, mode="mirror", device="opencl")
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
        want = ndimage.gaussian_filter(x, 2.0)
        np.testing.assert_allclose(ours.gaussian_filter(x.astype(dtype), 2.0, device="opencl"), want, rtol=0, atol=1e-5)


def test_white_stays_white(simulated):
    white = np.full((40, 150), 255, np.uint8)
    for sigma in (0.7, 2.5):
        assert (ours.gaussian_filter(white, sigma, device="opencl") == 255).all()
        assert (ours.gaussian_filter(white.astype("float32") / 255, sigma, device="opencl") == 1).all()


@pytest.mark.parametrize("seed", range(6))
def test_bands_give_the_bits_of_the_whole(monkeypatch, seed):
    """On the CPU, whose launches take the same terms."""
    rng, cut = np.random.default_rng(seed), 0
    monkeypatch.setattr(staged, "LEAST_BAND", 200)
    whole = compute._Work._joined

    def in_bands(self, x, terms, value, output, target):
        nonlocal cut
        shape = compute._result_shape(x.shape, terms)
        found = staged.bands(terms, value, x.shape, shape, x.nbytes)
        cut += len(found) > 1
        made = []
        for band in found:
            there = x.copy() if x.dtype.kind != "f" else np.where(
                np.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1)) < band.needed, x, np.nan
            ).astype(x.dtype)
            made.append(whole(self, there if band.whole else there[band.begin : band.end], band.terms, value, output, None))
        result = np.concatenate(made)
        if target is not None:
            target[...] = result
        return result if target is None else target

    for number in range(25):
        name, x, arguments = drawn(rng)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            want = getattr(ours, name)(x, device="opencl", **arguments)
            monkeypatch.setattr(compute._Work, "_joined", in_bands)
            got = getattr(ours, name)(x, device="opencl", **arguments)
            monkeypatch.setattr(compute._Work, "_joined", whole)
        tolerance = 1e-12 if want.dtype.kind in "fc" and want.dtype.itemsize > 4 + 4 * (want.dtype.kind == "c") else 0
        np.testing.assert_allclose(got, want, rtol=tolerance, err_msg=f"call {number}: {name} of {x.dtype} {x.shape}, {arguments}")
    assert cut > 3


def test_sums_of_filters_are_one_launch(simulated):
    x = np.random.default_rng(0).random((40, 50), np.float32)
    ours.gaussian_gradient_magnitude(x, 1.0, device="opencl")
    ours.gaussian_laplace(x, 1.0, device="opencl")
    assert [kernel for kernel, *_ in simulated] == ["sum", "sum"]
    ours.gaussian_laplace(x, 1.0, mode=("reflect", "wrap"), device="opencl")  # whose windows differ
    assert [kernel for kernel, *_ in simulated[2:]] == ["separable", "separable"]


#: Filters of several blocks and steps; then short ones of rows whose length is a multiple of four, and some along one axis of such, and the
#: kernels that are launched:
#: filters wider than images, all borders, NaN and Inf beside.
FILTERS = (
    ("gaussian_filter", (150, 300), "float32", {"sigma": 3.0}, None),
    ("gaussian_filter", (201, 131), "uint8", {"sigma": (5.0, 1.0), "mode": ("wrap", "constant")}, None),
    ("gaussian_filter", (70, 45, 3), "int16", {"sigma": 2.0, "axes": (0, 1), "mode": "mirror"}, None),
    ("gaussian_filter", (300, 20), "float64", {"sigma": (9.0, 0.0)}, None),
    ("uniform_filter1d", (90, 150), "uint16", {"size": 31, "axis": 1, "output": "float32"}, None),
    ("gaussian_filter1d", (260, 150), "float32", {"sigma": 12.0, "axis": 0, "mode": "constant", "cval": 2.0}, None),
    ("gaussian_filter", (30, 40, 70), "float32", {"sigma": 1.0}, None),
    ("gaussian_filter", (2, 21, 20, 19, 3), "uint8", {"sigma": (1.0, 0.5, 1.5), "axes": (1, 2, 3), "mode": ("wrap", "constant", "mirror")}, None),
    ("gaussian_filter", (25, 18, 33), "float64", {"sigma": (2.0, 0.5, 1.0), "order": (0, 1, 0)}, None),
    ("gaussian_gradient_magnitude", (70, 150), "float32", {"sigma": 1.5}, None),
    ("gaussian_laplace", (50, 30, 3), "uint8", {"sigma": (1.0, 2.0), "axes": (0, 1), "mode": "mirror", "output": "float32"}, None),
    ("gaussian_laplace", (90, 41), "float64", {"sigma": 2.0, "mode": "constant"}, None),
    ("correlate", (60, 140), "float32", {"weights": np.arange(165.0).reshape(11, 15) % 7 - 2, "mode": "nearest"}, None),
    ("correlate", (40, 50, 3), "int8", {"weights": np.arange(35.0).reshape(5, 7) % 5 - 1, "axes": (0, 1), "output": "float32"}, None),
    ("correlate", (6, 30, 140), "float64", {"weights": np.arange(60.0).reshape(3, 4, 5) % 7 - 2, "mode": "wrap", "origin": (1, -1, 0)}, None),
    # without shared memory
    ("gaussian_filter", (70, 260), "float32", {"sigma": 1.0}, ["walk"]),
    ("gaussian_filter", (70, 260), "uint8", {"sigma": 1.0, "mode": "wrap"}, ["walk"]),
    ("sobel", (33, 132), "uint8", {"output": "float32"}, ["walk"]),
    ("prewitt", (33, 132), "int16", {"mode": ("constant", "mirror")}, ["walk"]),
    ("gaussian_filter", (3, 20, 64), "float32", {"sigma": 1.0}, ["columns", "walk"]),
    ("gaussian_filter1d", (40, 50, 4), "float32", {"sigma": 3.0, "axis": 0, "mode": "constant", "cval": 2.0}, ["columns"]),
    ("gaussian_filter1d", (40, 200), "float64", {"sigma": 2.0, "axis": 0, "mode": "mirror"}, ["columns"]),
    ("correlate1d", (41, 3, 8), "int8", {"weights": np.arange(6.0) - 2, "axis": 0, "mode": "wrap", "origin": -2, "output": "float32"}, ["columns"]),
    ("correlate", (33, 260), "float32", {"weights": [[0, -1, 0], [-1, 4.5, -1], [0, -1, 0]]}, ["walk"]),
    ("correlate", (2, 40, 36), "uint8", {"weights": [[[1, 2], [3, 5]]], "mode": "constant", "cval": 3.0, "origin": (0, -1, 0)}, ["walk"]),
    ("correlate", (1, 4), "int16", {"weights": [[1, 2, 0.5], [3, 5, 1]], "mode": ("wrap"), "output": "float32"}, ["walk"]),
    ("uniform_filter", (20, 40), "uint16", {"size": (3, 5), "mode": "constant"}, ["walk"]),
    ("uniform_filter", (1, 4), "float32", {"size": (3, 5), "mode": "mirror"}, ["walk"]),
    ("uniform_filter", (2, 8), "int8", {"size": (9, 9), "mode": "wrap", "output": "float32"}, ["walk"]),
    ("uniform_filter", (30, 132), "float32", {"size": (4, 2), "mode": "nearest", "origin": (1, -1)}, ["walk"]),
    ("uniform_filter", (30, 132), "float32", {"size": (3, 8), "origin": (0, 3)}, ["separable"]),  # it reaches too far to one side
)  # fmt: skip


@pytest.mark.parametrize(
    ("number", "strange"), [(i, strange) for i, row in enumerate(FILTERS) for strange in (False, True)[: 1 + (row[2] == "float32" and bool(row[4]))]]
)
def test_filters_of_all_shapes(simulated, launched, number, strange):
    name, shape, dtype, arguments, kernels = FILTERS[number]
    rng = np.random.default_rng(number)
    x = rng.integers(0, 100, shape).astype(dtype) if "int" in dtype else rng.standard_normal(shape).astype(dtype)
    if strange and name != "uniform_filter":  # scipy's running sums keep what is not finite
        x.flat[:: 1 + x.size // 3] = np.nan, np.inf, -np.inf
        want = getattr(ndimage, name)(x.astype("float64"), **arguments)
        with np.errstate(all="ignore"):
            got = getattr(ours, name)(x, device="opencl", **arguments)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    else:
        check(name, x, arguments, getattr(ours, name)(x, device="opencl", **arguments))
    assert kernels is None or [step.kernel for step in launched] == [f"images_{kernel}" for kernel in kernels]


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "uint16", "int16", "int32", "float16", "float32", "float64"])
def test_sums_of_float64_read_and_write_float64_alone(launched, dtype):
    """The GPU's kernels know no other pixels then."""
    images.compiled.cache_clear()
    x = np.ones((9, 10, 11), dtype)
    for output in (None, "bool", "uint8", "int16", "int32", "float32", "float64"):
        ours.correlate1d(x, [1, 2, 3], 0, output, device="opencl")
        ours.correlate(x, [[1, 2], [3, 5]], output, axes=(1, 2), device="opencl")
    types = {tuple(step.defines[name] for name in ("DTYPE", "IN", "OUT")) for step in launched}
    assert types and all((given == made == 64) if sums == 64 else 64 not in (given, made) for sums, given, made in types)


class Block:
    """Memory of such a GPU."""

    def __init__(self, a):
        self.a = a

    def __int__(self):
        return self.a.__array_interface__["data"][0]


class StandIn:
    """A GPU whose memory is the host's, for the way of host arrays; copies happen at once."""

    copier = None

    def __init__(self, pinned):
        self.pinned, self.library, self.uses = pinned, self, []

    def current(self):
        return nullcontext()

    def pipeline_streams(self):
        return (SimpleNamespace(synchronize=lambda: None),) * 3

    def GPUArray(self, shape, dtype, allocator, gpudata):
        return self.array(gpudata.a.view(dtype)[: np.prod(shape)].reshape(shape))

    def array(self, a):
        place = a.__array_interface__["data"][0]
        return SimpleNamespace(a=a, shape=a.shape, gpudata=place, dtype=a.dtype)

    def allocate(self, nbytes):
        return Block(np.full(nbytes, 77, np.uint8))

    def order(self, first, second):
        """Nothing waits."""

    def is_pinned(self, array):
        return self.pinned

    def pinned_or_ordinary(self, shape, dtype):
        return np.full(shape, 55, dtype)

    result_array = pinned_or_ordinary

    def recorded(self, stream):
        return SimpleNamespace(synchronize=lambda: self.uses.append(stream), hold=lambda: None)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("border", ["reflect", "wrap", "constant"])
def test_host_arrays_go_in_bands(monkeypatch, pinned, border):
    def moved(to, from_, nbytes):
        ctypes.memmove(int(to), int(from_), nbytes)

    def place(array):
        return array.__array_interface__["data"][0]

    gpu, x, taps = StandIn(pinned), np.random.default_rng(0).random((200, 60), np.float32), gaussian(2.0, 0, 8)
    monkeypatch.setattr(staged, "LEAST_BAND", 3000)
    monkeypatch.setattr(staged, "space_of", lambda kind: gpu)
    copies = SimpleNamespace(
        to_device=lambda to, array, stream: moved(to, place(array), array.nbytes),
        to_host=lambda array, at, stream: moved(place(array), at, array.nbytes)
    )
    monkeypatch.setattr(staged, "copies", copies)
    on_cpu = launches.Bench(space_of(kind_of("x", x)), get_device("opencl"))
    bench = SimpleNamespace(space=SimpleNamespace(kind=SimpleNamespace(to_numpy=lambda array, name: array)), device=gpu)
    parts, called = [], []

    def run(on, there, terms):
        parts.append(launches.passes(on_cpu, there.a, terms[0], 0.0, "float32"))

        def again(buffers, stream):
            source = np.ctypeslib.as_array((ctypes.c_float * there.a.size).from_address(buffers[0])).reshape(there.shape)
            made = launches.passes(on_cpu, source, terms[0], 0.0, "float32")
            moved(buffers[3], place(made), made.nbytes)

        on.tape.append(launches.Taped(there, again, SimpleNamespace(gpudata=0), False))
        return gpu.array(parts[-1])

    terms = [[Pass(0, taps, 8, border), Pass(1, taps, 8, border)]]
    monkeypatch.setattr(staged, "get_device", lambda asked: gpu)

    @staged.repeatable
    def blurred(x, sigma):
        called.append(x.dtype)
        return staged.joined(bench, x.astype("float32", copy=False), terms, 0.0, "float32", None, x.shape, run)

    @staged.repeatable
    def twice(x):
        return staged.joined(bench, staged.joined(bench, x, terms, 0.0, "float32", None, x.shape, run), terms, 0.0, "float32", None, x.shape, run)

    @staged.repeatable
    def of_another(x):
        return staged.joined(bench, x + np.float32(1), terms, 0.0, "float32", None, x.shape, run)

    half = np.zeros((200, 60), np.float16)
    for same in range(3):  # the same launches are made again
        got = staged.joined(bench, x, terms, 0.0, "float32", None, x.shape, run) if same < 1 else blurred(x, 2.0)
        assert len(parts) == (1 if border == "wrap" else 16)
        assert not blurred(half, 2.0).any()  # another array is converted first
        np.testing.assert_array_equal(got, launches.passes(on_cpu, x, terms[0], 0.0, "float32"))
        x = x + 1
        for function in (twice, of_another):  # the last launches alone make another result
            np.testing.assert_array_equal(function(x), function.__wrapped__(x))
    assert called == ["float16", "float32", "float16", "float16"]
    assert bool(gpu.uses) == (not pinned and border != "wrap")  # the two buffers took turns
    got = staged.joined(bench, x, [terms[0][:1]], 0.0, "float32", None, x.shape, run)
    np.testing.assert_array_equal(got, launches.passes(on_cpu, x, terms[0][:1], 0.0, "float32"))
