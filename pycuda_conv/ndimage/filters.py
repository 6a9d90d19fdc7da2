"""The public functions: scipy's names and signatures. Each only makes taps; :mod:`.compute` does the work."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from numbers import Integral
from types import NoneType
from typing import Any

import numpy as np

from pycuda_conv.ndimage import compute, staged
from pycuda_conv.ndimage import missing as missing_data
from pycuda_conv.ndimage.launches import Dense, Pass, Term
from pycuda_conv.ndimage.spaces import as_array
from pycuda_conv.ndimage.taps import before, border, gaussian
from pycuda_conv.numbers.missing import Missing

NOTHING_MISSING = Missing()
_NOTES = """
    input : array
        Of numpy, CuPy, torch or dask, or a ``GPUArray``; what is none of these, numpy makes an array of. Sums are float32 for bool,
        integers of 8 and 16 bits, float16, bfloat16 and float32, unless `output` is float64; else float64.
    output : array or dtype, optional
        Where the result goes, or its type; by default the input's. Integers are rounded to the nearest, halves to even, and clipped.
    mode : str
        ``"reflect"`` or ``"grid-mirror"`` (d c b a | a b c d), ``"mirror"`` (d c b | a b c d), ``"nearest"`` (a a a | a b c d), ``"wrap"``
        or ``"grid-wrap"`` (b c d | a b c d), ``"constant"`` or ``"grid-constant"``.
    cval : number
        What lies outside with ``"constant"``.
    device, stream
        As for :func:`pycuda_conv.conv2d`.
    rounding : {"nearest", "scipy"}
        ``"scipy"`` truncates integers towards zero, once, and lets what is out of range wrap."""
_MISSING = """
    nan : {"interpolate"}, optional
        NaN counts as a pixel without data: the weights of the others make up for its own, and where there are none it stays.
    mask : array of bool, optional
        True where the input has no data.
    fill : float, optional
        What such pixels count as instead. A filter with negative taps needs it.
    preserve_nan : bool
        Pixels without data become NaN again."""


def _documented(function: Callable[..., Any]) -> Callable[..., Any]:
    function.__doc__ = (function.__doc__ or "").replace("\n    NOTES", _NOTES).replace("\n    MISSING", _MISSING)
    return staged.repeatable(function)


def _sequence(name: str, value: Any, rank: int) -> list[Any]:
    """A value for each axis."""
    if isinstance(value, str) or not np.iterable(value):
        return [value] * rank
    found = list(value)
    if len(found) != rank:
        raise RuntimeError(f"{name}: a sequence argument must have length equal to input rank, or that of axes: {rank}, got {len(found)}")
    return found


def _axes(axes: Any, rank: int) -> tuple[int, ...]:
    if axes is None:
        return tuple(range(rank))
    if np.isscalar(axes):
        axes = (axes,)
    elif not isinstance(axes, Iterable):
        raise ValueError(f"axes must be an integer, iterable of integers, or None, got {axes!r}")
    found = [operator.index(axis) for axis in axes]
    for axis in found:
        if not -rank <= axis < rank:
            raise ValueError(f"specified axis: {axis} is out of range")
    found = [axis % rank for axis in found]
    if len(set(found)) != len(found):
        raise ValueError(f"axes must be unique, got {axes!r}")
    return tuple(found)


def _in_order(values: Sequence[Any], axes: Sequence[int], rank: int, other: Any) -> list[Any]:
    """A value for each axis of the array. As in scipy, values for all axes are in the array's order, whatever that of `axes`."""
    if len(axes) == rank:
        return list(values)
    found = [other] * rank
    for axis, value in zip(axes, values, strict=True):
        found[axis] = value
    return found


def _axis(axis: Any, rank: int) -> int:
    axis = operator.index(axis)
    if not -rank <= axis < rank:
        raise np.exceptions.AxisError(axis, rank)
    return axis % rank


def _rank(input: Any) -> int:
    return len(input.shape)


def _host(name: str, weights: Any) -> np.ndarray:
    """A filter as a numpy array; one on a GPU is waited for."""
    for attribute in ("detach", "cpu", "resolve_conj", "numpy", "get", "compute"):
        if not isinstance(weights, np.ndarray) and hasattr(weights, attribute):
            weights = getattr(weights, attribute)()
    made = np.asarray(weights)
    if made.dtype.kind not in "biufc":
        raise TypeError(f"{name} must be numbers, got {made.dtype}")
    return made


def _parts(weights: np.ndarray) -> list[np.ndarray]:
    """The real filter, or both parts of a complex one, in float64."""
    each = (weights.real, weights.imag) if weights.dtype.kind == "c" else (weights,)
    return [np.ascontiguousarray(one, np.float64) for one in each]


def _run(
    input: Any, output: Any, cval: Any, device: Any, stream: Any, rounding: str, terms: Callable[[Any], Sequence[Term]],
    weights: Sequence[Any] = (None,), norm: bool = False, missing: Missing = NOTHING_MISSING,
) -> Any:
    call = compute.called(input, output, cval, device, stream, rounding)
    if call is None:
        from pycuda_conv.ndimage import lazy

        return lazy.run(input, output, cval, device, stream, rounding, terms, weights, norm, missing)
    if missing.asked:
        return missing_data.run(call, terms, weights, missing)
    return compute.run(call, terms, weights, norm)


# ---- filters along an axis


@_documented
def correlate1d(
    input: Any, weights: Any, axis: int = -1, output: Any = None, mode: str = "reflect", cval: Any = 0.0, origin: int = 0, *,
    device: Any = None, stream: Any = None, rounding: str = "nearest",
    nan: Any = None, mask: Any = None, fill: float | None = None, preserve_nan: bool = False,
) -> Any:
    """Correlate along an axis: :func:`scipy.ndimage.correlate1d`.

    Parameters
    ----------
    NOTES
    MISSING
    weights : sequence of numbers
        The taps. Complex ones are conjugated.
    axis : int
    origin : int
        Moves the filter: its middle is tap ``len(weights) // 2 + origin``.

    Returns
    -------
    array
        Of the input's kind and shape, or `output`.
    """
    weights = _host("weights", weights)
    if weights.dtype.kind == "c":
        weights = weights.conj()
    return _along(input, weights, axis, output, mode, cval, origin, device, stream, rounding, Missing(nan, mask, fill, preserve_nan))


@_documented
def convolve1d(
    input: Any, weights: Any, axis: int = -1, output: Any = None, mode: str = "reflect", cval: Any = 0.0, origin: int = 0, *,
    device: Any = None, stream: Any = None, rounding: str = "nearest",
    nan: Any = None, mask: Any = None, fill: float | None = None, preserve_nan: bool = False,
) -> Any:
    """Convolve along an axis: :func:`scipy.ndimage.convolve1d`.

    Parameters
    ----------
    NOTES
    MISSING
    weights : sequence of numbers
    axis, origin : int

    Returns
    -------
    array
        Of the input's kind and shape, or `output`.
    """
    weights = _host("weights", weights)[::-1]
    origin = -origin - (len(weights) % 2 == 0)
    return _along(input, weights, axis, output, mode, cval, origin, device, stream, rounding, Missing(nan, mask, fill, preserve_nan))


def _along(
    input: Any, weights: np.ndarray, axis: Any, output: Any, mode: Any, cval: Any, origin: int, device: Any, stream: Any, rounding: str,
    missing: Missing,
) -> Any:
    input = as_array("input", input)
    if weights.dtype.kind == "c" and "complex" not in str(input.dtype) and isinstance(cval, complex):
        raise ValueError(f"Cannot provide a complex-valued cval when the input is real, got {cval!r}")
    if weights.ndim != 1 or not len(weights):
        raise RuntimeError(f"no filter weights given: weights must have one axis, got shape {weights.shape}")
    axis = _axis(axis, _rank(input))
    front, edge = before(len(weights), origin), border(mode)
    return _run(
        input, output, cval, device, stream, rounding, lambda taps: [[Pass(axis, taps, front, edge)]], _parts(weights),
        missing=missing,
    )  # fmt: skip


@_documented
def gaussian_filter1d(
    input: Any, sigma: float, axis: int = -1, order: int = 0, output: Any = None, mode: str = "reflect", cval: Any = 0.0,
    truncate: float = 4.0, *, radius: int | None = None, device: Any = None, stream: Any = None, rounding: str = "nearest",
    nan: Any = None, mask: Any = None, fill: float | None = None, preserve_nan: bool = False,
) -> Any:
    """Blur along an axis, or take a Gaussian's derivative: :func:`scipy.ndimage.gaussian_filter1d`.

    Parameters
    ----------
    NOTES
    MISSING
    sigma : float
        Standard deviation, in pixels.
    axis : int
    order : int
        0 blurs; others take that derivative.
    truncate : float
        Taps reach that many standard deviations.
    radius : int, optional
        Taps on each side, instead of `truncate`.

    Returns
    -------
    array
        Of the input's kind and shape, or `output`.
    """
    taps = _gaussian(float(sigma), order, truncate, radius)
    return _along(input, taps, axis, output, mode, cval, 0, device, stream, rounding, Missing(nan, mask, fill, preserve_nan))


def _gaussian(sigma: float, order: Any, truncate: float, radius: Any) -> np.ndarray:
    reach = int(truncate * sigma + 0.5) if radius is None else radius
    if not isinstance(reach, (Integral, np.integer)) or reach < 0:
        raise ValueError(f"Radius must be a nonnegative integer, got {reach!r}")
    return gaussian(sigma, order, int(reach))


@_documented
def gaussian_filter(
    input: Any, sigma: Any, order: Any = 0, output: Any = None, mode: Any = "reflect", cval: Any = 0.0, truncate: float = 4.0, *,
    radius: Any = None, axes: Any = None, device: Any = None, stream: Any = None, rounding: str = "nearest",
    nan: Any = None, mask: Any = None, fill: float | None = None, preserve_nan: bool = False,
) -> Any:
    """Blur, or take a Gaussian's derivatives: :func:`scipy.ndimage.gaussian_filter`.

    Parameters
    ----------
    NOTES
    MISSING
    sigma : float, or one for each axis
        Standard deviations, in pixels; 0 leaves an axis as it is.
    order : int, or one for each axis
        0 blurs; others take that derivative.
    truncate : float
        Taps reach that many standard deviations.
    radius : int, optional, or one for each axis
        Taps on each side, instead of `truncate`.
    axes : tuple of int, optional
        The axes to filter; by default all. `sigma`, `order`, `mode` and `radius` may have a value for each of these.

    Returns
    -------
    array
        Of the input's kind and shape, or `output`.
    """
    input = as_array("input", input)
    along = _gaussians(_axes(axes, _rank(input)), sigma, order, mode, truncate, radius)
    return _run(
        input, output, cval, device, stream, rounding, lambda _: [along], missing=Missing(nan, mask, fill, preserve_nan)
    )  # fmt: skip


def _gaussians(axes: tuple[int, ...], sigma: Any, order: Any, mode: Any, truncate: float, radius: Any) -> Sequence[Pass]:
    scalars = all(isinstance(one, (int, float, str, NoneType)) for one in (sigma, order, mode, truncate, radius))
    return (_kept_gaussians if scalars else _new_gaussians)(axes, sigma, order, mode, truncate, radius)


def _new_gaussians(axes: tuple[int, ...], sigma: Any, order: Any, mode: Any, truncate: float, radius: Any) -> Sequence[Pass]:
    count = len(axes)
    each = zip(
        axes, _sequence("sigma", sigma, count), _sequence("order", order, count), _sequence("mode", mode, count),
        _sequence("radius", radius, count), strict=True,
    )  # fmt: skip
    found = []
    for axis, width, derivative, word, reach in each:
        if width > 1e-15:
            taps = _gaussian(float(width), derivative, truncate, reach)
            found.append(Pass(axis, taps, before(len(taps)), border(word)))
    return tuple(found)


_kept_gaussians = lru_cache(maxsize=256, typed=True)(_new_gaussians)


@_documented
def uniform_filter1d(
    input: Any, size: int, axis: int = -1, output: Any = None, mode: str = "reflect", cval: Any = 0.0, origin: int = 0, *,
    device: Any = None, stream: Any = None, rounding: str = "nearest",
    nan: Any = None, mask: Any = None, fill: float | None = None, preserve_nan: bool = False,
) -> Any:
    """The mean of `size` neighbours along an axis: :func:`scipy.ndimage.uniform_filter1d`.

    Parameters
    ----------
    NOTES
    MISSING
    size, axis, origin : int

    Returns
    -------
    array
        Of the input's kind and shape, or `output`.
    """
    input = as_array("input", input)
    axis = _axis(axis, _rank(input))
    if size < 1:
        raise RuntimeError(f"incorrect filter size: size must be at least 1, got {size}")
    along = [_mean(axis, int(size), origin, mode)]
    return _run(
        input, output, cval, device, stream, rounding, lambda _: [along], missing=Missing(nan, mask, fill, preserve_nan)
    )  # fmt: skip


def _mean(axis: int, size: int, origin: int, mode: Any) -> Pass:
    return Pass(axis, np.full(size, 1 / size), before(size, origin), border(mode))


@_documented
def uniform_filter(
    input: Any, size: Any = 3, output: Any = None, mode: Any = "reflect", cval: Any = 0.0, origin: Any = 0, *, axes: Any = None,
    device: Any = None, stream: Any = None, rounding: str = "nearest",
    nan: Any = None, mask: Any = None, fill: float | None = None, preserve_nan: bool = False,
) -> Any:
    """The mean of a box: :func:`scipy.ndimage.uniform_filter`.

    Parameters
    ----------
    NOTES
    MISSING
    size, origin : int, or one for each axis
    axes : tuple of int, optional
        The axes to filter; by default all.

    Returns
    -------
    array
        Of the input's kind and shape, or `output`.
    """
    input = as_array("input", input)
    found = _axes(axes, _rank(input))
    count = len(found)
    each = zip(found, _sequence("size", size, count), _sequence("origin", origin, count), _sequence("mode", mode, count), strict=True)
    along = [_mean(axis, int(n), shift, word) for axis, n, shift, word in each if n > 1]
    return _run(
        input, output, cval, device, stream, rounding, lambda _: [along], missing=Missing(nan, mask, fill, preserve_nan)
    )  # fmt: skip


# ---- derivatives


def _derivative(name: str, known: str, smooth: Sequence[float]) -> Callable[..., Any]:
    """A function that takes differences along an axis and smooths along the others."""

    def function(
        input: Any, axis: int = -1, output: Any = None, mode: Any = "reflect", cval: Any = 0.0, *, device: Any = None, stream: Any = None,
        rounding: str = "nearest",
    ) -> Any:
        input = as_array("input", input)
        rank = _rank(input)
        axis, modes = _axis(axis, rank), [border(word) for word in _sequence("mode", mode, rank)]
        along = [Pass(axis, np.array([-1.0, 0, 1]), 1, modes[axis])]
        along += [Pass(i, np.array(smooth, np.float64), 1, modes[i]) for i in range(rank) if i != axis]
        return _run(input, output, cval, device, stream, rounding, lambda _: [along])

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"""{known}'s derivative along an axis: :func:`scipy.ndimage.{name}`.

    Parameters
    ----------
    NOTES
    axis : int

    Returns
    -------
    array
        Of the input's kind and shape, or `output`. Unsigned integers hold no negative slopes: ask for ``output="float32"``.
    """
    return _documented(function)


sobel = _derivative("sobel", "Sobel", (1, 2, 1))
prewitt = _derivative("prewitt", "Prewitt", (1, 1, 1))


@_documented
def laplace(
    input: Any, output: Any = None, mode: Any = "reflect", cval: Any = 0.0, *, axes: Any = None, device: Any = None, stream: Any = None,
    rounding: str = "nearest",
) -> Any:
    """The sum of second differences: :func:`scipy.ndimage.laplace`.

    Parameters
    ----------
    NOTES
    axes : tuple of int, optional
        The axes to differentiate along; by default all.

    Returns
    -------
    array
        Of the input's kind and shape, or `output`.
    """
    input = as_array("input", input)
    found = _axes(axes, _rank(input))
    each = sorted(zip(found, map(border, _sequence("mode", mode, len(found))), strict=True))
    terms: list[Term] = [[Pass(axis, np.array([1.0, -2, 1]), 1, edge)] for axis, edge in each] or [[]]
    if len(each) in (2, 3):  # one filter in the form of a cross, which reads the array once
        cross = np.zeros((3,) * len(each))
        for i in range(len(each)):
            cross[tuple(slice(None) if j == i else 1 for j in range(len(each)))] += (1, -2, 1)
        places, edges = zip(*each, strict=True)
        terms = [Dense(places, cross, (1,) * len(each), edges)]
    return _run(input, output, cval, device, stream, rounding, lambda _: terms)


@_documented
def gaussian_laplace(
    input: Any, sigma: Any, output: Any = None, mode: Any = "reflect", cval: Any = 0.0, *, axes: Any = None, device: Any = None,
    stream: Any = None, rounding: str = "nearest", **kwargs: Any,
) -> Any:
    """The sum of a Gaussian's second derivatives: :func:`scipy.ndimage.gaussian_laplace`.

    Parameters
    ----------
    NOTES
    sigma : float, or one for each axis
    axes : tuple of int, optional
        The axes to differentiate along; by default all.
    **kwargs
        `truncate` and `radius` of :func:`gaussian_filter`.

    Returns
    -------
    array
        Of the input's kind and shape, or `output`.
    """
    input = as_array("input", input)
    rank = _rank(input)
    found = _axes(axes, rank)
    widths = _in_order(_sequence("sigma", sigma, len(found)), found, rank, 0.0)
    terms = _derivatives(found, widths, 2, mode, kwargs, rank)
    return _run(input, output, cval, device, stream, rounding, lambda _: terms)


@_documented
def gaussian_gradient_magnitude(
    input: Any, sigma: Any, output: Any = None, mode: Any = "reflect", cval: Any = 0.0, *, axes: Any = None, device: Any = None,
    stream: Any = None, rounding: str = "nearest", **kwargs: Any,
) -> Any:
    """The length of a Gaussian's gradient: :func:`scipy.ndimage.gaussian_gradient_magnitude`.

    Parameters
    ----------
    NOTES
    sigma : float, or one for each axis
    axes : tuple of int, optional
        The axes to differentiate along; by default all. As in scipy, `sigma` blurs along all axes.
    **kwargs
        `truncate` and `radius` of :func:`gaussian_filter`.

    Returns
    -------
    array
        Of the input's kind and shape, or `output`.
    """
    input = as_array("input", input)
    rank = _rank(input)
    found = _axes(axes, rank)
    terms = _derivatives(found, sigma, 1, mode, kwargs, rank)
    return _run(input, output, cval, device, stream, rounding, lambda _: terms, norm=bool(found))


def _derivatives(axes: Sequence[int], sigma: Any, order: int, mode: Any, more: dict[str, Any], rank: int) -> list[Term]:
    """A term for each of `axes`: a Gaussian along all axes, differentiated along that one. As in scipy, the term has one mode."""
    unknown = more.keys() - {"truncate", "radius"}
    if unknown:
        raise TypeError(f"unexpected keyword argument: {', '.join(sorted(unknown))}")
    truncate, radius = more.get("truncate", 4.0), more.get("radius")
    modes = _sequence("mode", mode, len(axes))
    terms: list[Term] = [
        _gaussians(tuple(range(rank)), sigma, [order * (i == axis) for i in range(rank)], word, truncate, radius)
        for axis, word in zip(axes, modes, strict=True)
    ]
    return terms or [[]]


# ---- filters along several axes at once


@_documented
def correlate(
    input: Any, weights: Any, output: Any = None, mode: str = "reflect", cval: Any = 0.0, origin: Any = 0, *, axes: Any = None,
    device: Any = None, stream: Any = None, rounding: str = "nearest",
    nan: Any = None, mask: Any = None, fill: float | None = None, preserve_nan: bool = False,
) -> Any:
    """Correlate along several axes: :func:`scipy.ndimage.correlate`.

    A filter that is a product of filters along its axes is computed as those, in less time, if it has no tap of 0 or the input holds
    integers. A NaN under a tap of 0 does not spread, as in scipy. Filters of many taps are the package's convolutions.

    Parameters
    ----------
    NOTES
    MISSING
    weights : array
        The filter, with an axis for each filtered one. Complex ones are conjugated. torch differentiates by a tensor.
    origin : int, or one for each axis
        Moves the filter: its middle is tap ``n // 2 + origin``.
    axes : tuple of int, optional
        The axes to filter; by default all.

    Returns
    -------
    array
        Of the input's kind and shape, or `output`.
    """
    return _dense(input, weights, output, mode, cval, origin, axes, False, device, stream, rounding, Missing(nan, mask, fill, preserve_nan))


@_documented
def convolve(
    input: Any, weights: Any, output: Any = None, mode: str = "reflect", cval: Any = 0.0, origin: Any = 0, *, axes: Any = None,
    device: Any = None, stream: Any = None, rounding: str = "nearest",
    nan: Any = None, mask: Any = None, fill: float | None = None, preserve_nan: bool = False,
) -> Any:
    """Convolve along several axes: :func:`scipy.ndimage.convolve`. See :func:`correlate`, whose filter is not flipped.

    Parameters
    ----------
    NOTES
    MISSING
    weights : array
        The filter, with an axis for each filtered one.
    origin : int, or one for each axis
    axes : tuple of int, optional
        The axes to filter; by default all.

    Returns
    -------
    array
        Of the input's kind and shape, or `output`.
    """
    return _dense(input, weights, output, mode, cval, origin, axes, True, device, stream, rounding, Missing(nan, mask, fill, preserve_nan))


def _dense(
    input: Any, weights: Any, output: Any, mode: Any, cval: Any, origin: Any, axes: Any, flip: bool, device: Any, stream: Any,
    rounding: str, missing: Missing,
) -> Any:
    input, given = as_array("input", input), weights
    weights = _host("weights", weights)
    if weights.dtype.kind == "c" and not flip:
        weights = weights.conj()
    found = _axes(axes, _rank(input))
    if weights.ndim != len(found):
        raise RuntimeError(f"weights.ndim ({weights.ndim}) must match len(axes) ({len(found)})")
    if 0 in weights.shape:
        raise RuntimeError(f"no filter weights given: weights has shape {weights.shape}")
    places = tuple(sorted(found))  # as in scipy, the filter's axes are those of the array, in rising order
    origins = _in_order(_sequence("origin", origin, len(found)), found, _rank(input), 0)
    front = tuple(before(n, origins[axis], flip) for n, axis in zip(weights.shape, places, strict=True))
    if not isinstance(mode, str):
        raise RuntimeError(f"A sequence of modes is not supported: mode must be a str, got {mode!r}")
    edge = border(mode)
    if flip:
        weights = weights[(slice(None, None, -1),) * weights.ndim]
    if getattr(given, "requires_grad", False) and sys.modules["torch"].is_grad_enabled():
        from pycuda_conv.ndimage import gradients

        return gradients.by_filter(input, given, flip, places, front, edge, output, cval, device, stream)
    if not places:
        terms: Callable[[Any], list[Term]] = lambda taps: [_scaled(input, taps)]  # noqa: E731
    else:
        terms = lambda taps: [Dense(places, taps, front, (edge,) * len(places))]  # noqa: E731
    return _run(input, output, cval, device, stream, rounding, terms, _parts(weights), missing=missing)


def _scaled(input: Any, tap: np.ndarray) -> list[Pass]:
    return [Pass(max(_rank(input) - 1, 0), tap.reshape(1), 0, "nearest")]
