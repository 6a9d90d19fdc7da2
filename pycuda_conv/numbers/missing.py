"""Convolutions of arrays in which some numbers are missing: NaN, or those that a mask names."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pycuda_conv.errors import ConvArgumentError, brief
from pycuda_conv.numbers.complex_numbers import involved, library_of, written


class Missing(NamedTuple):
    """Which numbers are missing, and what is done about them.

    Attributes
    ----------
    nan : {"interpolate"} or None
        Whether NaN is a missing number.
    mask : array of bool, optional
        True where there is no number.
    fill : float, optional
        What missing numbers count as. By default the others' weights make up for theirs.
    preserve_nan : bool
        Whether missing numbers of the input are NaN in the result.
    """

    nan: Any = None
    mask: Any = None
    fill: Any = None
    preserve_nan: bool = False

    @property
    def asked(self) -> bool:
        """Whether anything is to be done; wrong values are refused."""
        if self.nan not in (None, "interpolate"):
            raise ConvArgumentError(f"nan must be 'interpolate' or None, got {self.nan!r}")
        asked = self.nan is not None or self.mask is not None
        if not asked and (self.fill is not None or self.preserve_nan):
            raise ConvArgumentError("fill and preserve_nan go with nan='interpolate' or mask=")
        return asked

    def check_taps(self, least: float) -> None:
        """Refuse a filter with negative taps, unless there is a `fill`."""
        if least < 0 and self.fill is None:
            raise ConvArgumentError(f"the weights of others make up for missing numbers, but a tap of the filter is {least}: pass fill=")


#: The least part of a filter's weights that have to meet numbers.
LEAST_WEIGHT = 1e-6


def convolve(function: Callable[..., Any], ndim: int, asked: dict[str, Any]) -> Any:
    """The convolution of the numbers that are there: sum(w) * conv(m x, w) / conv(m, w), m being 1 where there is one, else 0.

    What lies outside of an image counts as numbers.

    Parameters
    ----------
    function : callable
        The convolution, with `ndim` spatial axes.
    ndim : int
    asked : dict
        All its arguments by their names.

    Raises
    ------
    ConvArgumentError
        An argument does not fit, or one is given that goes with `fill` alone.
    TypeError
        The arrays are complex, or of a library that lacks the operations.
    """
    options = dict(asked)
    missing = Missing(*(options.pop(name) for name in ("nan", "mask", "fill")))
    input, weight, out, dtype = (options.pop(name) for name in ("input", "weight", "out", "dtype"))
    assert missing.asked  # wrong values are refused
    if type(input).__module__.partition(".")[0] == "pycuda":
        return _of_gpuarrays(function, ndim, (input, weight), missing, options, out, dtype)
    library = library_of(input)
    if library is None or involved((input, weight)):
        raise TypeError("nan= and mask= are for real arrays of numpy, torch, CuPy, PyCUDA and dask")
    gone = _missing_in(library, input, missing)
    if gone is None:  # an image of integers without a mask
        return function(input, weight, out=out, dtype=dtype, **options)
    filled = library.where(gone, _like(input, 0 if missing.fill is None else missing.fill), input)
    if missing.fill is not None:
        return function(filled, weight, out=out, dtype=dtype, **options)
    _check_plain(options, dtype)
    missing.check_taps(float((weight.detach() if hasattr(weight, "detach") else weight).min()))
    there = ~gone if _is_whole(input) else _cast(~gone, input.dtype)
    modes, constant = _with_constant(options["padding_mode"])
    top = function(filled, weight, **options)
    bottom = function(there, weight, **options | {"padding_mode": modes, "padding_value": 1.0 if constant else 0.0})
    whole = _cast(weight.reshape(1 if len(weight.shape) == ndim else weight.shape[0], -1).sum(1).reshape(-1, *(1,) * ndim), top.dtype)
    if len(weight.shape) == ndim:
        whole = whole.reshape(())
    some = bottom > LEAST_WEIGHT * whole
    made = library.where(some, top * whole / library.where(some, bottom, _like(top, 1)), _like(top, float("nan")))
    return made if out is None else written(library, out, made)


def _check_plain(options: dict[str, Any], dtype: Any) -> None:
    """Refuse what goes with `fill` alone, and take it out of the options."""
    given = [name for name in ("bias", "scale", "residual", "activation") if options.pop(name) is not None]
    if given or dtype is not None:
        raise ConvArgumentError(f"{(given or ['dtype'])[0]} goes with fill= alone where numbers are missing")


def _of_gpuarrays(
    function: Callable[..., Any], ndim: int, arrays: tuple[Any, Any], missing: Missing, options: dict[str, Any], out: Any, dtype: Any
) -> Any:
    """The same for GPUArrays, which have no such operations."""
    from pycuda_conv.arrays.kinds import GPU_ARRAY
    from pycuda_conv.ndimage.spaces import space_of

    space, (given, weight) = space_of(GPU_ARRAY), arrays
    input, nan, mask = space.contiguous(given), missing.nan is not None and not _is_whole(given), missing.mask
    if mask is not None and tuple(mask.shape) != tuple(input.shape)[len(input.shape) - len(mask.shape) :]:
        raise _other_shape(mask, input)
    if mask is None and not nan:
        return function(input, weight, out=out, dtype=dtype, **options)
    gone = space.missing(input, nan, None if mask is None else space.contiguous(mask))
    filled = space.filled(gone, 0.0 if missing.fill is None else missing.fill, input)
    if missing.fill is not None:
        return function(filled, weight, out=out, dtype=dtype, **options)
    _check_plain(options, dtype)
    taps = weight.get() if hasattr(weight, "get") else np.asarray(weight)
    missing.check_taps(float(taps.min()))
    modes, constant = _with_constant(options["padding_mode"])
    top = function(filled, weight, out=out, **options)
    there = space.present(gone, space.dtype(input))
    bottom = function(there, weight, **options | {"padding_mode": modes, "padding_value": 1.0 if constant else 0.0})
    whole = taps.reshape(1 if taps.ndim == ndim else len(taps), -1).sum(1, dtype=np.float64)
    return space.made_up(top, bottom, whole, LEAST_WEIGHT, None, math.prod(top.shape[top.ndim - ndim :]))


def _missing_in(library: Any, input: Any, missing: Missing) -> Any:
    """Where numbers of `input` are missing; None if none can be."""
    gone = None if missing.nan is None or _is_whole(input) else library.isnan(input)
    if missing.mask is None:
        return gone
    mask = missing.mask
    if library_of(mask) is not library:
        raise TypeError(f"mask must be an array of bool of the input's kind, but got {brief(mask)}")
    shape = tuple(input.shape)
    if len(mask.shape) > len(shape) or tuple(mask.shape) != shape[len(shape) - len(mask.shape) :]:
        raise _other_shape(mask, input)
    mask = library.broadcast_to(mask != 0, shape)
    return mask if gone is None else gone | mask


def _other_shape(mask: Any, input: Any) -> ConvArgumentError:
    shape = tuple(input.shape)
    return ConvArgumentError(f"mask must have the shape of the input, {shape}, or that of its last axes, got {tuple(mask.shape)}")


def _is_whole(array: Any) -> bool:
    """Whether an array is of integers or bool."""
    return "int" in str(array.dtype) or "bool" in str(array.dtype)


def _like(array: Any, value: float) -> Any:
    """A number of an array's type."""
    return array.new_tensor(value) if hasattr(array, "new_tensor") else array.dtype.type(value)


def _cast(array: Any, dtype: Any) -> Any:
    return array.to(dtype) if hasattr(array, "new_tensor") else array.astype(dtype)


def _with_constant(mode: Any) -> tuple[Any, bool]:
    """A `padding_mode` with "constant" in place of "zeros", and whether there is any."""
    if isinstance(mode, str):
        return ("constant", True) if mode in ("zeros", "constant") else (mode, False)
    if not isinstance(mode, (list, tuple)):
        return mode, False  # which the convolution refuses
    parts = [_with_constant(one) for one in mode]
    return type(mode)(part for part, _ in parts), any(constant for _, constant in parts)
