"""Convolution with the signatures of :mod:`scipy.signal`, for arrays of numpy, CuPy, torch and PyCUDA: full, same and valid.

As in :mod:`pycuda_conv.ndimage`, sums are float32 for float32 and integers of 8 and 16 bits, and integer results are rounded to the
nearest and clipped. The smaller operand is the filter; it is read on the host.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

import pycuda_conv
from pycuda_conv.arrays import LAZY, kind_of
from pycuda_conv.ndimage import compute
from pycuda_conv.ndimage.filters import _host, _parts
from pycuda_conv.ndimage.launches import Bench, Dense
from pycuda_conv.ndimage.spaces import as_array, space_of
from pycuda_conv.runtime import get_device, pycuda_device

__all__ = ["convolve", "convolve2d", "correlate", "correlate2d", "fftconvolve", "oaconvolve"]

MODES = ("full", "same", "valid")
BOUNDARIES = {"fill": "constant", "pad": "constant", "wrap": "wrap", "circular": "wrap", "symm": "reflect", "symmetric": "reflect"}


def convolve(in1: Any, in2: Any, mode: str = "full", method: str = "auto", *, device: Any = None, stream: Any = None) -> Any:
    """Convolve two arrays of the same number of axes: :func:`scipy.signal.convolve`.

    Parameters
    ----------
    in1, in2 : array
        The first one's kind is the result's. torch differentiates by both.
    mode : {"full", "same", "valid"}
        All sums, those in the middle, as many as `in1` has elements, or those without a border.
    method : {"auto", "direct", "fft"}
        Filters of many taps are transforms where that is faster and as right. In float64 on the CPU, and without ``"direct"``, as right
        means as right as scipy's.
    device, stream
        As for :func:`pycuda_conv.conv2d`.

    Returns
    -------
    array
        Of the type that numpy gives for both.

    Raises
    ------
    ValueError
        An unknown mode or method, arrays of different ranks, or, with ``"valid"``, none at least as large as the other along each axis.
    """
    _check_method(method)
    return _both(in1, in2, mode, False, "constant", 0.0, device, stream, norms=method != "direct")


def correlate(in1: Any, in2: Any, mode: str = "full", method: str = "auto", *, device: Any = None, stream: Any = None) -> Any:
    """Correlate two arrays of the same number of axes: :func:`scipy.signal.correlate`. A complex `in2` is conjugated.

    Parameters
    ----------
    in1, in2, mode, method, device, stream
        As for :func:`convolve`.

    Returns
    -------
    array

    Raises
    ------
    ValueError
        As for :func:`convolve`.
    """
    _check_method(method)
    return _both(in1, in2, mode, True, "constant", 0.0, device, stream, norms=method != "direct")


def convolve2d(
    in1: Any, in2: Any, mode: str = "full", boundary: str = "fill", fillvalue: Any = 0, *, device: Any = None, stream: Any = None
) -> Any:
    """Convolve two images: :func:`scipy.signal.convolve2d`.

    Parameters
    ----------
    in1, in2 : array of two axes
    mode, device, stream
        As for :func:`convolve`.
    boundary : {"fill", "wrap", "symm"}
        What lies outside `in1`: `fillvalue`, the image again, or its mirror image, whose first pixel is that at the edge.
    fillvalue : number

    Returns
    -------
    array

    Raises
    ------
    ValueError
        As for :func:`convolve`, or an unknown boundary.
    """
    return _both(in1, in2, mode, False, _boundary("convolve2d", in1, in2, boundary), _fill(fillvalue, in1, in2), device, stream)


def correlate2d(
    in1: Any, in2: Any, mode: str = "full", boundary: str = "fill", fillvalue: Any = 0, *, device: Any = None, stream: Any = None
) -> Any:
    """Correlate two images: :func:`scipy.signal.correlate2d`. See :func:`convolve2d`.

    Parameters
    ----------
    in1, in2, mode, boundary, fillvalue, device, stream
        As for :func:`convolve2d`.

    Returns
    -------
    array

    Raises
    ------
    ValueError
        As for :func:`convolve2d`.
    """
    edge = _boundary("correlate2d", in1, in2, boundary)
    return _both(in1, in2, mode, True, edge, _fill(fillvalue, in1, in2), device, stream, early=True)


def fftconvolve(in1: Any, in2: Any, mode: str = "full", axes: Any = None, *, device: Any = None, stream: Any = None) -> Any:
    """Convolve along some axes: :func:`scipy.signal.fftconvolve`. Whether by transforms is for the planner to decide.

    Parameters
    ----------
    in1, in2 : array
        Along other axes than `axes` they have the same sizes, or one has 1.
    mode, device, stream
        As for :func:`convolve`.
    axes : int or sequence of int, optional
        By default all.

    Returns
    -------
    array
        Of a floating type.

    Raises
    ------
    ValueError
        As for :func:`convolve`, or shapes that don't go together.
    """
    return _along(in1, in2, mode, axes, device, stream)


def oaconvolve(in1: Any, in2: Any, mode: str = "full", axes: Any = None, *, device: Any = None, stream: Any = None) -> Any:
    """Convolve along some axes, a long array with a short one: :func:`scipy.signal.oaconvolve`. See :func:`fftconvolve`.

    Parameters
    ----------
    in1, in2, mode, axes, device, stream
        As for :func:`fftconvolve`.

    Returns
    -------
    array

    Raises
    ------
    ValueError
        As for :func:`fftconvolve`.
    """
    return _along(in1, in2, mode, axes, device, stream)


# ---- what they share


def _check_method(method: Any) -> None:
    if method not in ("auto", "direct", "fft"):
        raise ValueError(f"Acceptable method flags are 'auto', 'direct', or 'fft', got {method!r}")


def _mode(mode: Any) -> None:
    if mode not in MODES:
        raise ValueError(f"acceptable mode flags are 'valid', 'same', or 'full', got {mode!r}")


def _boundary(name: str, in1: Any, in2: Any, boundary: Any) -> str:
    if not len(np.shape(in1)) == len(np.shape(in2)) == 2:
        raise ValueError(f"{name} inputs must both be 2-D arrays, got shapes {tuple(np.shape(in1))} and {tuple(np.shape(in2))}")
    if boundary not in BOUNDARIES:
        raise ValueError(f"acceptable boundary flags are 'fill', 'circular' (or 'wrap'), and 'symmetric' (or 'symm'), got {boundary!r}")
    return BOUNDARIES[boundary]


def _fill(value: Any, in1: Any, in2: Any) -> Any:
    if np.size(value) != 1:
        raise ValueError(f"`fillvalue` must be scalar or an array with one element, got {value!r}")
    made = np.asarray(value).reshape(()).item()
    if isinstance(made, complex) and not any("complex" in str(one.dtype) for one in (in1, in2) if hasattr(one, "dtype")):
        raise ValueError(f"could not cast `fillvalue` directly to the output type, which is real: got {value!r}")
    if not isinstance(made, (int, float, complex)):
        raise ValueError(f"could not cast `fillvalue` to a number, got {value!r}")
    return made


def _is_larger(mode: str, one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether a "valid" call has to swap its inputs: the second is at least as large along each axis."""
    if mode != "valid" or all(a >= b for a, b in zip(one, other, strict=True)):
        return False
    if not all(b >= a for a, b in zip(one, other, strict=True)):
        raise ValueError(f"For 'valid' mode, one must be at least as large as the other in every dimension, got shapes {one} and {other}")
    return True


def _place(mode: str, n: int, taps: int) -> tuple[int, int]:
    """How far the flipped filter reaches in front of `n` elements, and the result's size."""
    if mode == "valid":
        return 0, n - taps + 1
    return (taps - 1, n + taps - 1) if mode == "full" else (taps - 1 - (taps - 1) // 2, n)


def _both(
    in1: Any, in2: Any, mode: str, correlates: bool, border: str, value: Any, device: Any, stream: Any, early: bool = False,
    norms: bool = False,
) -> Any:
    in1, in2 = as_array("in1", in1), as_array("in2", in2)
    _mode(mode)
    if len(in1.shape) != len(in2.shape):
        raise ValueError(f"in1 and in2 should have the same dimensionality, got shapes {tuple(in1.shape)} and {tuple(in2.shape)}")
    swap = _is_larger(mode, tuple(in1.shape), tuple(in2.shape))
    if not len(in1.shape):
        return in1 * (in2.conj() if correlates else in2)
    larger = prod(in2.shape) > prod(in1.shape) and mode == "full" and border == "constant" and not value
    axes = tuple(range(len(in1.shape)))
    return _linear(in1, in2, mode, axes, correlates, border, value, swap or larger, device, stream, early=early, norms=norms)


def _linear(
    in1: Any, in2: Any, mode: str, axes: tuple[int, ...], correlates: bool, border: str, value: Any, swap: bool, device: Any, stream: Any,
    dtype: Any = None, early: bool = False, norms: bool = False,
) -> Any:
    """The sums along `axes` of one operand with the other as the filter; with `swap` the first is the filter. `norms`: see ``Dense``."""
    kind = kind_of("in1", in1)
    if kind is LAZY:
        raise TypeError("in1 is a dask array: pycuda_conv.ndimage.convolve takes these, or compute it first")
    first = space_of(kind)
    x, given = (in2, in1) if swap else (in1, in2)
    if swap and kind_of("in2", in2) is not kind:
        x = first.upload(_host("in2", in2), in1)
    weights = _host("in2", given)
    if dtype is None:
        dtype = np.result_type(first.dtype(in1), _host("in2", in2).dtype if not swap else space_of(kind_of("in2", in2)).dtype(in2))
    # a convolution is the correlation with the flipped filter; a correlation with swapped inputs is flipped at the end
    if correlates:
        weights = weights.conj()
    else:
        weights = weights[(slice(None, None, -1),) * weights.ndim]
    places = [_place(mode, x.shape[axis], n) for axis, n in zip(axes, weights.shape, strict=True)]
    if early and mode == "same":  # scipy's correlate2d has the middle of an even filter one tap earlier than its correlate
        places = [((n - 1) // 2, size) for n, (_, size) in zip(weights.shape, places, strict=True)]
    shape = [next((p[1] for a, p in zip(axes, places, strict=True) if a == i), n) for i, n in enumerate(x.shape)]
    if 0 in (*weights.shape, *shape):
        return first.empty(tuple(max(n, 0) for n in shape) if 0 not in weights.shape else (0,), np.dtype(dtype).name, in1)
    before, sizes = tuple(p[0] for p in places), tuple(p[1] for p in places)
    if getattr(given, "requires_grad", False) and sys.modules["torch"].is_grad_enabled():
        made = _by_tensor(x, given, correlates, axes, before, sizes, border, value, device, stream)
        return made.flip(tuple(range(made.ndim))) if correlates and swap else made
    call = compute.called(x, np.dtype(dtype), value, device, stream)
    assert call is not None
    norms = norms and np.dtype(dtype).kind in "fc"

    def terms(taps: Any) -> list[Dense]:
        return [Dense(axes, taps, before, (border,) * len(axes), sizes, norms)]

    if correlates and swap:
        made = compute.run(call, terms, _parts(weights))
        return _flipped(first, made, not early or mode != "valid")  # where scipy's correlate2d swaps, it conjugates the other one
    return compute.run(call, terms, _parts(weights))


def _by_tensor(
    x: Any, weights: Any, correlates: bool, axes: tuple[int, ...], before: Sequence[int], sizes: Sequence[int], border: str, value: Any,
    device: Any, stream: Any,
) -> Any:
    """The same by a tensor that requires a gradient."""
    from pycuda_conv.ndimage import gradients

    kind = kind_of("in1", x)
    if x.is_complex() or weights.is_complex() or space_of(kind) is not space_of(kind_of("in2", weights)):
        raise TypeError("a filter that requires a gradient goes with a real torch.Tensor, and is real")
    taps = weights.reshape([weights.shape[axis] for axis in axes]) if weights.ndim > len(axes) else weights
    taps = taps if correlates else taps.flip(tuple(range(taps.ndim)))
    asked = None if device is None else get_device(device)
    bench = Bench(space_of(kind), kind.device(kind.signature(x), asked), stream)
    return gradients.by_weights(bench, x, taps, axes, before, border, float(value), sizes)


def _flipped(space: Any, made: Any, conjugates: bool) -> Any:
    for axis, n in enumerate(made.shape):
        made = space.take(made, np.arange(n)[::-1].copy(), axis)
    return space.contiguous(made.conj()) if conjugates and space.dtype(made).startswith("complex") else made


def _along(in1: Any, in2: Any, mode: str, axes: Any, device: Any, stream: Any) -> Any:
    in1, in2 = as_array("in1", in1), as_array("in2", in2)
    _mode(mode)
    rank = len(in1.shape)
    if not rank and not len(in2.shape):
        return in1 * in2
    if rank != len(in2.shape):
        raise ValueError(f"in1 and in2 should have the same dimensionality, got shapes {tuple(in1.shape)} and {tuple(in2.shape)}")
    found: list[Any] = list(range(rank)) if axes is None else [axes] if np.isscalar(axes) else list(axes)
    if not all(isinstance(a, (int, np.integer)) and -rank <= a < rank for a in found):
        raise ValueError(f"axes exceeds dimensionality of input: axes must be from {-rank} to {rank - 1}, got {axes!r}")
    along = tuple(sorted({int(a) % rank for a in found}))
    if len(along) != len(found):
        raise ValueError(f"all axes must be unique, got {axes!r}")
    if mode == "valid":  # as in scipy, what is one element along an axis is repeated there
        along = tuple(i for i in along if 1 not in (in1.shape[i], in2.shape[i])) or along
    others = [i for i in range(rank) if i not in along]
    if any(1 not in (in1.shape[i], in2.shape[i]) and in1.shape[i] != in2.shape[i] for i in others):
        raise ValueError(f"incompatible shapes for in1 and in2: {tuple(in1.shape)} and {tuple(in2.shape)}")
    dtype = np.result_type(*(space_of(kind_of("in1", one)).dtype(one) for one in (in1, in2)), np.float16)
    dtype = np.dtype("float64") if dtype.kind == "f" and dtype.itemsize > 8 else dtype
    one, other = ([shape[i] for i in along] for shape in (in1.shape, in2.shape))
    swap = _is_larger(mode, one, other)
    if all(in2.shape[i] == 1 for i in others) and not (swap and others):
        filter = in2.reshape(other) if getattr(in2, "requires_grad", False) else _host("in2", in2).reshape(other)
        return _linear(in1, in2 if swap else filter, mode, along, False, "constant", 0.0, swap, device, stream, dtype, norms=True)
    return _by_groups(in1, in2, mode, along, others, swap, dtype, device, stream)


def _real_and_imaginary(space: Any, array: Any) -> tuple[Any, Any]:
    if not space.dtype(array).startswith("complex"):
        return array, None
    return space.contiguous(array.real), space.contiguous(array.imag)


def _by_groups(
    in1: Any, in2: Any, mode: str, axes: tuple[int, ...], others: Sequence[int], swap: bool, dtype: np.dtype, device: Any, stream: Any
) -> Any:
    """Each place along other axes has a filter of its own."""
    space, rank = space_of(kind_of("in1", in1)), len(axes)
    if rank > 3:
        raise ValueError(f"filters of their own may have up to three axes, got axes={axes}")
    if dtype.kind == "c":
        part = np.dtype("float64" if dtype.itemsize == 16 else "float32")

        def of(a: Any, b: Any) -> Any:
            return 0 if a is None or b is None else _by_groups(a, b, mode, axes, others, swap, part, device, stream)

        (a, b), (c, d) = (_real_and_imaginary(space, one) for one in (in1, in2))
        real, imaginary = of(a, c) - of(b, d), of(a, d) + of(b, c)
        return space.complex(real, imaginary)
    x, w = (in2, in1) if swap else (in1, in2)
    sums = "float64" if dtype.itemsize > 4 else "float32"
    batch = tuple(max(in1.shape[i], in2.shape[i]) for i in others)
    behind = tuple(range(len(others), len(others) + rank))

    def planes(array: np.ndarray) -> np.ndarray:
        moved = np.moveaxis(array, axes, behind)
        size = moved.shape[len(batch) :]
        return np.ascontiguousarray(np.broadcast_to(moved, (*batch, *size)), sums).reshape(-1, *size)

    images, filters = planes(_host("in1", x)), planes(_host("in2", w))
    filters = np.ascontiguousarray(filters[(slice(None),) + (slice(None, None, -1),) * rank])
    places = [_place(mode, n, taps) for n, taps in zip(images.shape[1:], filters.shape[1:], strict=True)]
    each = zip(places, images.shape[1:], filters.shape[1:], strict=True)
    around = tuple((before, size + taps - 1 - before - n) for (before, size), n, taps in each)
    put: Any = space.upload
    on_gpu = space.kind.on_gpu(in1)
    where: dict[str, Any] = {"stream": stream} if on_gpu else {"device": get_device(device) if device is not None else pycuda_device()}
    function = getattr(pycuda_conv, f"conv{rank}d")
    made = function(
        put(images[None], in1), put(filters[:, None], in1), padding=around, groups=len(filters),
        **{name: getattr(value, "name", value) for name, value in where.items() if value is not None},
    )  # fmt: skip
    made = made.reshape(*batch, *(size for _, size in places))
    return space.cast(space.contiguous(space.moved(made, behind, axes)), dtype.name)
