"""pycuda_conv.ndimage and pycuda_conv.signal against scipy in float64: random calls, every mode, rank and kind, and scipy's own words for what is wrong."""

import inspect
import json
import warnings
from pathlib import Path

import numpy as np
import pytest

import pycuda_conv.ndimage as ours
import pycuda_conv.signal as our_signal

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


def check(name, x, arguments, got):
    """Compare with scipy's passes in float64, rounded once."""
    complex_output = np.iscomplexobj(x) or np.iscomplexobj(arguments.get("weights", 0))
    wide = "complex128" if complex_output else "float64"
    told = {key: value for key, value in arguments.items() if key != "output"}
    exact = getattr(ndimage, name)(x.astype("complex128" if np.iscomplexobj(x) else "float64"), output=wide, **told)
    want = np.dtype(arguments.get("output", np.promote_types(x.dtype, "complex64") if complex_output else x.dtype))
    assert (got.dtype, got.shape) == (want, exact.shape)
    sums32 = x.dtype.name in ("float32", "uint8", "int8", "uint16", "int16", "bool", "complex64") and want.name not in ("float64", "complex128")
    weights = np.abs(arguments["weights"]).sum() if "weights" in arguments else 8.0
    size = float(np.abs(x).max(initial=0) if not np.iscomplexobj(x) else np.abs(x).max(initial=0)) * max(weights, 1) + abs(arguments.get("cval", 0)) * max(weights, 1)
    tolerance = (4e-7 if sums32 else 1e-13) * max(size, 1e-30)
    if name == "gaussian_gradient_magnitude":
        tolerance *= 30
    if want.kind in "iub":
        low, high = (0, 1) if want.kind == "b" else (np.iinfo(want).min, np.iinfo(want).max)
        clipped = np.clip(exact, low, high)
        assert (np.abs(got.astype(float) - clipped) <= 0.5 + tolerance + 1e-12 * abs(high)).all()
    else:
        if want.kind == "f" and want.itemsize == 4:
            tolerance += np.spacing(np.float32(np.abs(exact).max(initial=0)))
        np.testing.assert_allclose(got, exact, rtol=0, atol=tolerance)


def random_calls(count, seed):
    rng = np.random.default_rng(seed)
    for number in range(count):
        name, x, arguments = drawn(rng)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check(name, x, arguments, getattr(ours, name)(x, device="opencl", **arguments))
        except Exception as error:
            raise AssertionError(f"call {number} of seed {seed}: {name} of {x.dtype} {x.shape}, {arguments}") from error


@pytest.mark.parametrize("seed", range(4))
def test_random_calls_against_scipy(seed):
    random_calls(100, seed)
