"""pycuda_conv.ndimage and pycuda_conv.signal against scipy in float64: random calls, every mode, rank and kind, and scipy's own words for
what is wrong."""

import ctypes
import hashlib
import inspect
import json
import subprocess
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import pycuda_conv
import pycuda_conv.ndimage as ours
import pycuda_conv.signal as our_signal
from pycuda_conv.ndimage.compute import converted
from pycuda_conv.ndimage.spaces import INTEGERS, GPUArraySpace, Space
from pycuda_conv.numbers import gpuarrays
from pycuda_conv.runtime import get_device

ndimage = pytest.importorskip("scipy.ndimage")
signal = pytest.importorskip("scipy.signal")
MODES = ("reflect", "constant", "nearest", "mirror", "wrap", "grid-mirror", "grid-constant", "grid-wrap")
TYPES = ("float32", "float32", "float64", "uint8", "int8", "uint16", "int16", "int32", "bool", "complex64", "complex128")
FUNCTIONS = tuple(name for name in ours.__all__ if name != "signal")
SIGNALS = tuple(our_signal.__all__)


def image(rng, dtype, shape):
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if dtype.startswith(("int", "uint")):
        limits = np.iinfo(dtype)
        return rng.integers(max(limits.min, -(2**30)), min(limits.max, 2**30), shape, dtype, True)
    x = rng.standard_normal(shape)
    return (x + 1j * rng.standard_normal(shape) if dtype.startswith("complex") else x).astype(dtype)


def drawn(rng):
    """A function's name, its input and its arguments."""
    name = FUNCTIONS[rng.integers(len(FUNCTIONS))]
    dtype = TYPES[rng.integers(len(TYPES))]
    rank = int(rng.choice([1, 2, 2, 2, 3, 3, 4]))
    shape = tuple(int(n) for n in rng.integers(1, {1: 70, 2: 40, 3: 12, 4: 6}[rank], rank))
    x = image(rng, dtype, shape)
    if rng.random() < 0.2:
        x = np.asfortranarray(x)
    elif rng.random() < 0.2:
        x = x[..., ::-1]

    def mode():
        return str(rng.choice(MODES))

    def by_axis(make, count):
        return make() if rng.random() < 0.6 else [make() for _ in range(count)]

    axis, axes = int(rng.integers(-rank, rank)), None
    if rng.random() < 0.4:
        axes = tuple(int(a) for a in rng.permutation(rank)[: rng.integers(1, rank + 1)])
    count = rank if axes is None else len(axes)
    arguments = {"mode": mode()}
    if rng.random() < 0.5:
        arguments["cval"] = float(rng.integers(-2, 3))
    if name.endswith("late1d") or name == "convolve1d":
        taps = int(rng.integers(1, 12))
        arguments |= {"weights": rng.standard_normal(taps).round(2), "axis": axis}
        arguments["origin"] = int(rng.integers(-(taps // 2), (taps - 1) // 2 + 1))
    elif name in ("correlate", "convolve"):
        taps = tuple(int(n) for n in rng.integers(1, 6, count))
        weights = rng.standard_normal(taps).round(2)
        if rng.random() < 0.3:
            weights = np.asarray(rng.integers(-3, 4, taps))
        elif rng.random() < 0.2:
            weights = weights + 1j * rng.standard_normal(taps)
        arguments |= {"weights": weights, "axes": axes}
        if rng.random() < 0.4:
            sizes = dict(zip(sorted(a % rank for a in axes or range(rank)), taps, strict=True))  # a filter's axes are in rising order
            order = sorted(sizes) if axes is None or len(axes) == rank else [a % rank for a in axes]
            arguments["origin"] = [int(rng.integers(-(sizes[a] // 2), (sizes[a] - 1) // 2 + 1)) for a in order]
    elif name == "gaussian_filter1d":
        arguments |= {"sigma": float(rng.uniform(0.3, 3)), "axis": axis, "order": int(rng.integers(0, 4))}
    elif name == "gaussian_filter":
        arguments |= {"sigma": by_axis(lambda: float(rng.uniform(0, 2.5)), count), "order": by_axis(lambda: int(rng.integers(0, 3)), count)}
        arguments |= {"axes": axes, "mode": by_axis(mode, count), "truncate": float(rng.uniform(1, 5))}
    elif name == "uniform_filter1d":
        size = int(rng.integers(1, 12))
        arguments |= {"size": size, "axis": axis, "origin": int(rng.integers(-(size // 2), (size - 1) // 2 + 1))}
    elif name == "uniform_filter":
        arguments |= {"size": by_axis(lambda: int(rng.integers(1, 8)), count), "axes": axes, "mode": by_axis(mode, count)}
    elif name in ("sobel", "prewitt"):
        arguments |= {"axis": axis, "mode": by_axis(mode, rank)}
    else:
        arguments["axes"] = axes
        if name == "laplace":
            arguments["mode"] = by_axis(mode, count)
        elif axes is not None and name == "gaussian_gradient_magnitude":
            arguments["sigma"] = float(rng.uniform(0.4, 2))
        else:
            arguments["sigma"] = by_axis(lambda: float(rng.uniform(0.4, 2)), count)
        if np.iscomplexobj(x) and name == "gaussian_gradient_magnitude":
            x = np.ascontiguousarray(x.real)
    wide = np.iscomplexobj(x) or np.iscomplexobj(arguments.get("weights", 0))
    if not wide and rng.random() < 0.3:
        arguments["output"] = str(rng.choice(["float32", "float64", "uint8", "int16", "int32"]))
    if np.iscomplexobj(arguments.get("weights", 0)) and "cval" in arguments and not np.iscomplexobj(x):
        del arguments["cval"]
    return name, x, arguments


def of_derivatives(rank, arguments):
    """The sum of the magnitudes of a Gaussian's taps: derivatives of narrow ones have large taps that cancel."""
    if "order" not in arguments:
        return 1.0
    axes = arguments.get("axes")
    count = 1 if "axis" in arguments else rank if axes is None else np.size(axes)
    sigmas, orders = (np.broadcast_to(arguments.get(key, 0), count) for key in ("sigma", "order"))
    size = 1.0
    for sigma, order in zip(sigmas.tolist(), orders.tolist(), strict=True):
        impulse = np.zeros(2 * int(arguments.get("truncate", 4.0) * sigma + 0.5) + 3)
        impulse[len(impulse) // 2] = 1
        size *= np.abs(
            ndimage.gaussian_filter1d(impulse, sigma, order=order, truncate=arguments.get("truncate", 4.0), mode="constant")
        ).sum() if sigma else 1
    return size


def check(name, x, arguments, got):
    """Compare with scipy's passes in float64, rounded once."""
    complex_output = np.iscomplexobj(x) or np.iscomplexobj(arguments.get("weights", 0))
    wide = "complex128" if complex_output else "float64"
    told = {key: value for key, value in arguments.items() if key != "output"}
    exact = getattr(ndimage, name)(x.astype("complex128" if np.iscomplexobj(x) else "float64"), output=wide, **told)
    want = np.dtype(arguments.get("output", np.promote_types(x.dtype, "complex64") if complex_output else x.dtype))
    assert (got.dtype, got.shape) == (want, exact.shape)
    sums32 = (
        x.dtype.name in ("float32", "uint8", "int8", "uint16", "int16", "bool", "complex64") and want.name not in ("float64", "complex128")
    )
    weights = np.abs(arguments["weights"]).sum() if "weights" in arguments else max(8.0, of_derivatives(x.ndim, arguments))
    size = (float(np.abs(x).max(initial=0)) + abs(arguments.get("cval", 0))) * max(weights, 1)
    tolerance = (4e-7 if sums32 else 1e-13) * max(size, 1e-30)
    if name == "gaussian_gradient_magnitude":
        tolerance *= 30
    if complex_output:  # of two numbers
        tolerance *= 1.5
    if want.kind in "iub":
        low, high = (0, 1) if want.kind == "b" else (np.iinfo(want).min, np.iinfo(want).max)
        clipped = np.clip(exact, low, high)
        assert (np.abs(got.astype(float) - clipped) <= 0.5 + tolerance + 1e-12 * abs(high)).all()
    else:
        if want.kind == "f" and want.itemsize == 4:
            tolerance += np.spacing(np.float32(np.abs(exact).max(initial=0)))
        np.testing.assert_allclose(got, exact, rtol=0, atol=tolerance)


def random_calls(count, seed, device="opencl"):
    rng = np.random.default_rng(seed)
    for number in range(count):
        name, x, arguments = drawn(rng)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check(name, x, arguments, getattr(ours, name)(x, device=device, **arguments))
        except Exception as error:
            raise AssertionError(f"call {number} of seed {seed}: {name} of {x.dtype} {x.shape}, {arguments}") from error


@pytest.mark.parametrize("seed", range(4))
def test_random_calls_against_scipy(seed):
    random_calls(100, seed)


# ---- cases as data


def _value(v):
    if isinstance(v, dict):
        if "array" in v:
            return np.array([_value(e) for e in v["array"]], dtype=v["dtype"]).reshape(v["shape"])
        return complex(*map(_value, v["complex"])) if "complex" in v else float(v["float"])
    return tuple(_value(e) for e in v) if isinstance(v, list) else v


TABLE = json.loads((Path(__file__).with_name("data") / "ndimage_cases.json").read_text())
INPUTS = {name: _value(v) for name, v in TABLE["inputs"].items()}
#: scipy takes no float16; here it is taken.
TAKEN = "float16"


@pytest.mark.parametrize("case", TABLE["cases"], ids=[case["name"] for case in TABLE["cases"]])
def test_a_case_has_scipy_s_values(case):
    module, _, name = case["function"].rpartition(".")
    function = getattr(our_signal if module else ours, name)
    arguments = {key: _value(v) for key, v in case["arguments"].items()}
    x = INPUTS[case["input"]].copy(order="K")
    if case["name"] == TAKEN:
        assert function(x, device="opencl", **arguments).dtype == np.float16
        return
    if "raises" in case:
        with pytest.raises(Exception) as error:
            function(x, device="opencl", **arguments)
        assert type(error.value).__name__ in case["raises"]
        return
    got = function(x, device="opencl", **arguments)
    assert (got.dtype.name, list(got.shape)) == (case["dtype"], case["shape"])
    wide = "complex128" if "complex" in case["dtype"] else "float64"
    want = np.array(_value(case.get("exact", case["scipy"])), wide).reshape(got.shape)
    got = got.astype(wide)
    for i in case.get("ties", ()):  # float32 may round to either side
        assert abs(got.flat[i] - want.flat[i]) <= 1
        got.flat[i] = want.flat[i]
    largest = np.abs(want[np.isfinite(want)]).max(initial=0)
    np.testing.assert_allclose(got, want, rtol=0, atol=case["tolerance"] * max(largest, 1e-30))


def test_signatures_are_scipy_s():
    for module, theirs in ((ours, ndimage), (our_signal, signal)):
        for name in module.__all__:
            if name == "signal":
                continue
            own, known = (inspect.signature(getattr(one, name)).parameters for one in (module, theirs))
            assert [p for p in own if p not in ("device", "stream", "rounding", "nan", "mask", "fill", "preserve_nan")] == list(known), name
            assert all(own[p].default == known[p].default for p in known), name


# ---- kinds of arrays

LINEAR = {
    "gaussian_filter": lambda x, mode: ours.gaussian_filter(x, 1.0, mode=mode),
    "correlate": lambda x, mode: ours.correlate(x, np.arange(8.0).reshape(2, 2, 2), mode=mode, cval=1.0, origin=(0, -1, 0)),
    "one axis": lambda x, mode: ours.correlate(x, [1.0, 2, 0, 4], axes=(1,), mode=mode, origin=1),
    "laplace": lambda x, mode: ours.laplace(x, mode=mode),
}


@pytest.mark.parametrize("mode", ["reflect", "constant", "mirror", "wrap", "nearest"])
@pytest.mark.parametrize("name", LINEAR)
def test_torch_differentiates(name, mode):
    x = torch.rand(3, 4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: LINEAR[name](x, mode), (x,), fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda x: LINEAR[name](x, mode), (x,), fast_mode=True)


def test_torch_differentiates_by_the_filter_and_through_a_norm():
    x, w = (torch.rand(*shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 5), (2, 3)))

    def convolved(x, w):
        return ours.convolve(x, w, mode="wrap", cval=2.0, origin=(0, 1))

    np.testing.assert_allclose(convolved(x, w).detach(), ndimage.convolve(x.detach(), w.detach(), mode="wrap", origin=(0, 1)))
    assert torch.autograd.gradcheck(convolved, (x, w), fast_mode=True)
    assert torch.autograd.gradcheck(lambda x: ours.gaussian_gradient_magnitude(x, 1.0), (x,), fast_mode=True)
    assert torch.autograd.gradcheck(lambda x: our_signal.convolve(x, np.ones((2, 2))), (x,), fast_mode=True)
    z = torch.rand(3, 4, dtype=torch.complex128, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: ours.gaussian_filter(z, 1.0), (z,), fast_mode=True)


@pytest.mark.parametrize("mode", ["full", "same", "valid"])
@pytest.mark.parametrize("sizes", [((6, 7), (2, 3)), ((2, 3), (6, 7))])
def test_torch_differentiates_signals_by_both(mode, sizes):
    a, b = (torch.rand(*size, dtype=torch.float64, requires_grad=True) for size in sizes)
    for name in ("convolve", "correlate", "fftconvolve", "oaconvolve", "convolve2d", "correlate2d"):
        function, known = getattr(our_signal, name), getattr(signal, name)
        np.testing.assert_allclose(
            function(a, b, mode).detach(), known(a.detach().numpy(), b.detach().numpy(), mode), atol=1e-12, err_msg=name
        )
        assert torch.autograd.gradcheck(lambda a, b, f=function: f(a, b, mode), (a, b), fast_mode=True), name


def test_tensors_give_tensors():
    x = torch.rand(20, 30)
    want = ndimage.gaussian_filter(x.numpy().astype(float), 1.0)
    got = ours.gaussian_filter(x, 1.0)
    assert type(got) is torch.Tensor and np.abs(got.numpy() - want).max() < 1e-6
    assert ours.gaussian_filter(x.to(torch.bfloat16), 1.0).dtype == torch.bfloat16
    out = torch.empty(20, 30)
    assert ours.gaussian_filter(x, 1.0, output=out) is out and torch.equal(out, got)
    assert ours.gaussian_filter((x * 255).to(torch.uint8), 1.0).dtype == torch.uint8
    assert ours.gaussian_filter(x, 1.0, output=torch.float64).dtype == torch.float64


@pytest.mark.parametrize("mode", ["reflect", "constant", "mirror", "wrap", "nearest"])
def test_dask_arrays_stay_lazy(mode):
    da = pytest.importorskip("dask.array")
    x = np.random.default_rng(0).random((60, 45), np.float32)
    chunked = da.from_array(x, chunks=(17, 20))
    calls = (
        lambda m, x: m.gaussian_filter(x, 2.0, mode=mode), lambda m, x: m.gaussian_filter(x, 6.0, mode=mode),
        lambda m, x: m.correlate(x, np.arange(12.0).reshape(4, 3), mode=mode, cval=1.0, origin=(1, -1)), lambda m, x: m.sobel(x, mode=mode),
    )  # fmt: skip
    for call in calls:
        got, want = call(ours, chunked), call(ndimage, x.astype(float))
        assert isinstance(got, da.Array) and got.dtype == np.float32
        assert np.abs(got.compute(scheduler="sync") - want).max() < 4e-6 * np.abs(want).max()


def test_white_stays_white_and_a_ramp_keeps_its_sum():
    white = np.full((40, 50), 255, np.uint8)
    for sigma in (0.4, 0.7, 1.3, 2.5, 9.0):
        assert (ours.gaussian_filter(white, sigma) == 255).all()
        assert (ours.gaussian_filter(white.astype("float32") / 255, sigma) == 1).all()
        assert (ours.uniform_filter(white.astype("float32") / 255, int(7 * sigma)) == 1).all()
    ramp = np.arange(1e4, dtype=np.float32).reshape(100, 100)
    assert abs(ours.gaussian_filter(ramp, 1.0).sum(dtype=float) - 49_995_000) < 1


@pytest.mark.parametrize("size", [15, 40])
def test_what_is_not_finite_stays_in_a_mean_s_window(size):
    x = np.random.default_rng(0).random((9, 700))
    taps = np.full(size, 1 / size)
    x[3, 100], x[5, 600], x[8, 699] = np.nan, np.inf, -np.inf
    want = ndimage.correlate1d(x, taps)
    for dtype in ("float32", "float64"):
        np.testing.assert_allclose(ours.uniform_filter1d(x.astype(dtype), size), want, rtol=0, atol=1e-6)
        colours = np.repeat(x[..., None], 3, -1).astype(dtype)
        np.testing.assert_allclose(ours.uniform_filter1d(colours, size, axis=1)[..., 1], want, rtol=0, atol=1e-6)


def test_scipy_s_rounding_truncates_once():
    x = np.array([[0, 1, 1, 0, 250, 250]], np.uint8)
    exact = ndimage.correlate1d(x.astype(float), [0.5, 0.4])
    assert (ours.correlate1d(x, [0.5, 0.4], rounding="scipy") == np.trunc(exact)).all()
    assert (ours.correlate1d(x, [0.5, 0.4]) == np.rint(exact)).all()
    assert (ours.correlate1d(x, [1.0, 1.0], rounding="scipy") == ndimage.correlate1d(x, [1.0, 1.0])).all()


def test_other_libraries_arrays_are_refused_by_name():
    with pytest.raises(TypeError, match="masked array"):
        ours.gaussian_filter(np.ma.array(np.ones((3, 3)), mask=False), 1.0)
    with pytest.raises(RuntimeError, match="numeric dtype"):
        ours.gaussian_filter(np.array(["a"]), 1.0)
    with pytest.raises(ValueError, match="rounding must be"):
        ours.gaussian_filter(np.ones((3, 3)), 1.0, rounding="up")
    with pytest.raises(ValueError, match="stream is for arrays on a GPU"):
        ours.gaussian_filter(np.ones((3, 3)), 1.0, stream=3, device="opencl")


# ---- signal


@pytest.mark.parametrize(("name", "dtype", "options", "expected"), [
    ("fftconvolve", "float64", {}, {"fft"}), ("oaconvolve", "complex128", {}, {"fft"}), ("convolve", "float64", {}, {"fft"}),
    ("fftconvolve", "float32", {}, {"fft"}), ("convolve", "int64", {}, set()), ("correlate", "float64", {"method": "direct"}, set()),
    ("convolve2d", "float64", {}, set()),
])  # fmt: skip
def test_transforms_of_doubles_are_as_right_as_scipys(monkeypatch, name, dtype, options, expected):
    """On the CPU sums of products take up to thirty times as long; integers stay exact."""
    asked, conv2d = set(), pycuda_conv.conv2d
    monkeypatch.setattr(pycuda_conv, "conv2d", lambda *args, **others: (asked.add(others.get("algorithm")), conv2d(*args, **others))[1])
    rng = np.random.default_rng(0)
    x, w = (rng.integers(1, 9, shape).astype(dtype) for shape in ((40, 50), (20, 21)))
    if expected == {"fft"}:
        w[0, 0] = 0
    wide = [one.astype("float64") if dtype == "float32" else one for one in (x, w)]  # scipy's transforms of float32 are less right
    made, right = getattr(our_signal, name)(x, w, device="opencl", **options), getattr(signal, name)(*wide, **options)
    np.testing.assert_allclose(made, right, rtol=1e-5 if dtype == "float32" else 1e-11, atol=1e-8)
    assert asked == expected


@pytest.mark.parametrize("seed", range(3))
def test_random_signals_against_scipy(seed):
    rng = np.random.default_rng(seed)
    for _ in range(60):
        name = SIGNALS[rng.integers(len(SIGNALS))]
        rank = 2 if name.endswith("2d") else int(rng.integers(1, 4))
        x = image(rng, str(rng.choice(["float32", "float64", "complex64", "complex128"])), tuple(rng.integers(1, 12, rank)))
        w = image(rng, str(rng.choice(["float32", "float64", "complex128"])), tuple(rng.integers(1, 7, rank)))
        arguments = {"mode": str(rng.choice(["full", "same", "valid"]))}
        if name.endswith("2d"):
            arguments["boundary"] = str(rng.choice(["fill", "wrap", "symm"]))
            if arguments["boundary"] != "fill" and any(a > b for a, b in zip(w.shape, x.shape, strict=True)):
                continue  # scipy reads other pixels there
        elif name.endswith("aconvolve") or name == "fftconvolve":
            axes = tuple(int(a) for a in rng.permutation(rank)[: rng.integers(1, rank + 1)])
            arguments["axes"] = axes
            w = w[tuple(slice(None) if i in axes else slice(0, 1) for i in range(rank))]
            if rng.random() < 0.3:
                w = np.repeat(
                    w, x.shape[next((i for i in range(rank) if i not in axes), 0)], next((i for i in range(rank) if i not in axes), 0)
                )
                if len(axes) == rank:
                    continue
        try:
            want = getattr(signal, name)(x, w, **arguments)
        except ValueError:
            with pytest.raises(ValueError):
                getattr(our_signal, name)(x, w, device="opencl", **arguments)
            continue
        wide = [one.astype("complex128" if np.iscomplexobj(one) else "float64") for one in (x, w)]  # scipy's transforms may be float32's
        dtype, want = want.dtype, getattr(signal, name)(*wide, **arguments)
        want = want.astype(dtype)
        got = getattr(our_signal, name)(x, w, device="opencl", **arguments)
        assert got.dtype == want.dtype and got.shape == want.shape, (name, arguments, x.dtype, w.dtype, x.shape, w.shape)
        tolerance = (1e-5 if want.dtype.itemsize // (1 + (want.dtype.kind == "c")) == 4 else 1e-11) * max(np.abs(want).max(initial=0), 1)
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance, err_msg=f"{name} {arguments} {x.shape} {w.shape}")


@pytest.mark.parametrize("by", ["torch", "numpy"])
@pytest.mark.parametrize(
    ("name", "shapes", "arguments"),
    [
        ("correlate2d", ((30, 5), (13, 12)), {"mode": "full"}), ("correlate2d", ((3, 4), (6, 5)), {"mode": "valid"}),
        ("correlate", ((2, 14, 5), (8, 7, 5)), {"mode": "full"}), ("correlate2d", ((6, 5), (3, 4)), {"mode": "same"}),
        ("fftconvolve", ((11, 11, 1), (6, 7, 2)), {"mode": "valid"}), ("oaconvolve", ((16, 1, 12), (2, 5, 4)), {"mode": "valid"}),
        ("fftconvolve", ((2, 38), (9, 1)), {"mode": "valid"}), ("fftconvolve", ((5, 6), (1, 6)), {"axes": (0,)}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("types", [("complex64", "float32"), ("float32", "complex64"), ("complex128", "complex128"), ("float32", "float32")])
def test_signals_of_swapped_and_repeated_operands(name, shapes, arguments, types, by):
    """The larger operand is the image, whichever it is; tensors can be read by numpy."""
    rng = np.random.default_rng(5)
    x, w = (image(rng, dtype, shape) for dtype, shape in zip(types, shapes, strict=True))
    there = [torch.from_numpy(one) for one in (x, w)] if by == "torch" else (x, w)
    got = np.asarray(getattr(our_signal, name)(*there, device="opencl", **arguments))
    want = getattr(signal, name)(x, w, **arguments)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("given", ["float32", "float64"])
@pytest.mark.parametrize("want", ["bool", *INTEGERS])
def test_sums_of_gpuarrays_become_integers(monkeypatch, tmp_path, given, want):
    """PyCUDA's kernels are C, which the host compiles here: they round as numpy does."""

    def compiled(arguments, operation):
        name = hashlib.sha256((arguments + operation).encode()).hexdigest()[:20]
        source, built = tmp_path / f"{name}.c", tmp_path / f"{name}.so"
        source.write_text(f"#include <math.h>\nvoid run(long n, {arguments}) {{ for (long i = 0; i < n; i++) {{ {operation}; }} }}")
        subprocess.run(["gcc", "-O1", "-shared", "-fPIC", str(source), "-o", str(built), "-lm"], check=True, timeout=900)
        run = ctypes.CDLL(str(built)).run

        def launched(*values):
            run(ctypes.c_long(values[0].size), *(ctypes.c_double(v) if np.isscalar(v) else ctypes.c_void_p(v.ctypes.data) for v in values))

        return launched

    monkeypatch.setattr(gpuarrays, "_compiled_in_a_context", lambda: compiled)
    monkeypatch.setattr(GPUArraySpace, "_device_of", lambda self, array: SimpleNamespace(current=nullcontext))
    monkeypatch.setattr(GPUArraySpace, "empty", lambda self, shape, dtype, like: np.empty(shape, dtype))
    there, here = GPUArraySpace(None, np), Space(None, np)
    x = np.array([0.49999, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 255.5, -32768.5, 1e6, -1e30, 1e30, np.inf, -np.inf, np.nan], given)
    for rounding in ("nearest", "scipy") if want != "bool" else ("nearest",):
        some = x if rounding == "nearest" else x[:11]
        np.testing.assert_array_equal(converted(there, some, want, rounding), converted(here, some, want, rounding))


# ---- on a GPU


def on_gpu(library, x):
    """An array of `library`, and a function back to numpy."""
    if library == "cupy":
        cupy = pytest.importorskip("cupy")
        return cupy.asarray(x), cupy.asnumpy
    if library == "torch":
        return torch.from_numpy(np.ascontiguousarray(x)).cuda(), lambda y: y.cpu().numpy()
    if library == "numpy":
        return x, np.asarray
    gpuarray = pytest.importorskip("pycuda.gpuarray")
    return gpuarray.to_gpu(np.ascontiguousarray(x)), lambda y: y.get()


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["numpy", "torch", "cupy", "gpuarray"])
@pytest.mark.parametrize("seed", range(2))
def test_random_calls_on_a_gpu(library, seed):
    rng = np.random.default_rng(seed)
    done = 0
    while done < 60:
        name, x, arguments = drawn(rng)
        if library == "torch" and x.dtype == "uint16":  # which torch hardly computes with
            continue
        if library == "gpuarray" and ("output" in arguments or np.iscomplexobj(arguments.get("weights", 0))):
            continue
        x = x.copy(order="C")
        with warnings.catch_warnings(), get_device("cuda:0"):
            warnings.simplefilter("ignore")
            try:
                there, back = on_gpu(library, x)
                check(name, x, arguments, back(getattr(ours, name)(there, **arguments)))
            except Exception as error:
                raise AssertionError(f"call {done} of seed {seed}: {name} of {x.dtype} {x.shape}, {arguments}") from error
        done += 1


@pytest.mark.gpu
def test_large_filters_and_images_on_a_gpu():
    rng = np.random.default_rng(0)
    x = rng.random((700, 900), np.float32)
    for library in ("numpy", "torch"):
        there, back = on_gpu(library, x)
        for name, arguments in (
            ("gaussian_filter", {"sigma": 10.0}), ("gaussian_filter", {"sigma": 3.0}), ("uniform_filter", {"size": 101})
        ):
            want = getattr(ndimage, name)(x.astype(float), **arguments)
            assert np.abs(back(getattr(ours, name)(there, **arguments)) - want).max() < 1e-6
        w = rng.random((21, 17))
        want = ndimage.correlate(x.astype(float), w)
        assert np.abs(back(ours.correlate(there, w)) - want).max() < 1e-6 * want.max()


# ---- pixels without data


def interpolated(x, gone, w, mode, cval=0.0):
    """astropy's rule: weights of pixels with data, scaled to the sum of all; what lies outside counts as data."""
    weight = ndimage.correlate((~gone).astype(float), w, mode=mode, cval=1.0)
    value = ndimage.correlate(np.where(gone, 0.0, x), w, mode=mode, cval=cval)
    return np.divide(value * w.sum(), weight, out=x.astype(float), where=weight > 0)


@pytest.mark.parametrize("mode", ["reflect", "constant", "nearest", "mirror", "wrap"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nan_is_interpolated_as_astropy_does(mode, dtype):
    rng = np.random.default_rng(0)
    x, w = rng.random((17, 21)).astype(dtype), rng.random((3, 5))
    x[rng.random(x.shape) < 0.2] = np.nan
    x[3:9, 4:12] = np.nan
    gone = np.isnan(x)
    want = interpolated(x, gone, w, mode, 0.5)
    got = ours.correlate(x, w, mode=mode, cval=0.5, nan="interpolate")
    np.testing.assert_allclose(got, want, rtol=2e-6 if dtype == "float32" else 1e-12)
    again = ours.correlate(x, w, mode=mode, cval=0.5, nan="interpolate", preserve_nan=True)
    np.testing.assert_array_equal(again, np.where(gone, np.nan, got))
    flipped = ours.convolve(x, w[::-1, ::-1], mode=mode, cval=0.5, nan="interpolate")
    np.testing.assert_allclose(flipped, want, rtol=2e-6 if dtype == "float32" else 1e-12)


def test_masks():
    rng = np.random.default_rng(1)
    x, gone = rng.integers(0, 256, (20, 30), np.uint8), rng.random((20, 30)) < 0.3
    w = np.outer(*[np.array([1.0, 2, 1]) / 4] * 2)
    want = interpolated(x.astype(float), gone, w, "reflect")
    for call in (lambda x, **more: ours.correlate(x, w, **more), lambda x, **more: ours.gaussian_filter(x, 1.0, **more)):
        assert call(x, mask=gone).dtype == np.uint8
        np.testing.assert_array_equal(call(x, mask=np.zeros_like(gone)), call(x))
    assert np.abs(ours.correlate(x, w, mask=gone, output="float32") - want).max() < 1e-4
    edge = [[0, -1, 0], [-1, 4, -1], [0, -1, 0]]
    with pytest.raises(ValueError, match="pass fill="):
        ours.correlate(x, edge, mask=gone)
    want = ndimage.correlate(np.where(gone, 7.0, x), edge)
    np.testing.assert_allclose(ours.correlate(x, edge, mask=gone, fill=7, output="float32"), want, atol=1e-4)
    there = torch.from_numpy(x.astype(np.float32))
    assert np.abs(
        ours.correlate(there, w, mask=torch.from_numpy(gone)).numpy() - interpolated(x.astype(float), gone, w, "reflect")
    ).max() < 1e-4
    for wrong, words in (({"nan": "fill"}, "nan must be"), ({"fill": 1.0}, "go with"), ({"mask": gone[1:]}, "mask must have the shape")):
        with pytest.raises(ValueError, match=words):
            ours.gaussian_filter(x, 1.0, **wrong)
