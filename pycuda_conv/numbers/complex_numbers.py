"""Convolutions of complex numbers, from convolutions of real ones.

``(a + bi) * (c + di)`` is two convolutions whose filters have twice the channels: ``a`` with ``c`` and ``d``, and ``b`` with both. So
there are as many products as in four real convolutions, and each sum is as right as one of these. (Three convolutions would be enough,
but an imaginary part that is much smaller than the real one would be lost in their differences.) A real filter, or a real image, takes
half of that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from pycuda_conv.call import GRADIENT_OPERANDS, Call, Operands
from pycuda_conv.errors import ConvArgumentError, brief


def _is_complex(array: Any) -> bool:
    dtype = getattr(array, "dtype", None)
    return getattr(dtype, "kind", "") == "c" or bool(getattr(dtype, "is_complex", False))


def involved(arrays: Sequence[Any]) -> bool:
    """Whether any of the arrays is of complex numbers."""
    return any(map(_is_complex, arrays))


def library_of(array: Any) -> Any:
    """numpy, torch, CuPy or dask.array: the library of an array, or None for one whose library has no complex numbers of ours."""
    name = type(array).__module__.partition(".")[0]
    if name == "dask":
        return sys.modules["dask.array"]
    if hasattr(type(array), "__torch_function__"):
        return sys.modules["torch"]
    return sys.modules[name] if name in ("numpy", "cupy") else None


def _parts(array: Any) -> tuple[Any, Any]:
    """The real and the imaginary part, which is None for a real array."""
    return (array.real, array.imag) if _is_complex(array) else (array, None)


def convolve(call: Call, arrays: Operands, out: Any, stream: Any, of_reals: Callable[[Any, Any, float], Any]) -> Any:
    """A convolution, transposed or not, of arrays some of which are of complex numbers.

    Parameters
    ----------
    call : Call
    arrays : Operands
    out : array, optional
    stream : optional
        The caller's, which is refused: other launches than ours are made as well.
    of_reals : callable
        (input, weight, value of the padding) -> their convolution. It takes arrays with all their axes.

    Raises
    ------
    TypeError
        The arrays are of a library that is not supported here, or a gradient by a function is asked for.
    ConvArgumentError
        An activation, a type of the result or a stream is asked for, or `out` can't hold the result.
    """
    input, weight, bias, scale, residual = arrays
    library = library_of(input)
    if library is None or call.function in GRADIENT_OPERANDS:
        first, second = call.operand_names
        name, array = (first, input) if _is_complex(input) else (second, weight)
        raise TypeError(
            f"{name} has the type {str(array.dtype).removeprefix('torch.')}, but {call.name} takes complex numbers of numpy, torch, CuPy "
            f"and dask, and no gradient of theirs: convolve {name}.real and {name}.imag, one after the other"
        )
    for word, value in (("activation", call.activation), ("dtype", call.dtype), ("stream", stream)):
        if value is not None:
            raise ConvArgumentError(f"{word} is for real numbers, but the arrays are of complex ones; got {word}={brief(value)}")
    ndim = call.ndim
    if call.function == "conv" and len(input.shape) == len(weight.shape) == ndim:  # arrays of spatial axes alone
        more = None if residual is None else residual[None]
        made = convolve(call, Operands(input[None], weight[None, None], bias, scale, more), None, None, of_reals)[0]
        return made if out is None else written(library, out, made)
    real, imaginary = _convolved(call, library, input, weight, of_reals)
    if imaginary is None:  # the others are complex
        imaginary = real * 0
    channels = (-1, *(1,) * ndim)
    made = _joined(library, real, imaginary)
    made = made if scale is None else made * scale.reshape(channels)
    made = made if bias is None else made + bias.reshape(channels)
    made = made if residual is None else made + residual
    return made if out is None else written(library, out, made)


def product(
    of_reals: Callable[[Any, Sequence[Any], float], Sequence[Any]], image: tuple[Any, Any], filter: tuple[Any, Any],
    outside: tuple[float, float] = (0.0, 0.0),
) -> tuple[Any, Any]:
    """The real and the imaginary part of a convolution.

    Parameters
    ----------
    of_reals : callable
        (real image, real filters, what lies outside) -> the image's convolution with each of the filters.
    image, filter : (array, array or None)
        Real and imaginary parts; None for what is real.
    outside : (float, float)
        The parts of what lies outside.

    Returns
    -------
    (array, array or None)
        None if image and filter are real.
    """
    (a, b), (c, d) = image, filter
    if d is None:
        return of_reals(a, (c,), outside[0])[0], None if b is None else of_reals(b, (c,), outside[1])[0]
    real, imaginary = of_reals(a, (c, d), outside[0])
    if b is not None:
        of_c, of_d = of_reals(b, (c, d), outside[1])
        real, imaginary = real - of_d, imaginary + of_c
    return real, imaginary


def _convolved(call: Call, library: Any, input: Any, weight: Any, of_reals: Callable[[Any, Any, float], Any]) -> tuple[Any, Any]:
    """The real and the imaginary part of the convolution; the latter is None if both arrays are real."""
    axis = 1 if call.function == "conv_transpose" else 0  # of the filter, along which the channels of the result lie

    def of_each(image: Any, filters: Sequence[Any], value: float) -> Sequence[Any]:
        if len(filters) == 1:
            return [of_reals(image, filters[0], value)]
        one, other = filters
        both = of_reals(image, _beside(library_of(weight), one, other, axis, 1 if axis else call.groups), value)
        channels = len(both.shape) - call.ndim - 1  # the second axis of a transposed one's filter has the channels of one group
        shape, count = tuple(both.shape), both.shape[channels] // (2 * call.groups)
        parted = both.reshape((*shape[:channels], call.groups, 2 * count, *shape[channels + 1 :]))
        before = (slice(None),) * (channels + 1)
        whole = (*shape[:channels], call.groups * count, *shape[channels + 1 :])
        places = [(*before, part) for part in (slice(0, count), slice(count, None))]
        return [parted[place].reshape(whole) for place in places]

    return product(of_each, _parts(input), _parts(weight), (call.padding_value, 0.0))


def _beside(library: Any, first: Any, second: Any, axis: int, groups: int) -> Any:
    """The filters of both, side by side along `axis` in each group."""
    join = library.cat if library.__name__ == "torch" else library.concatenate
    if axis or groups == 1:
        return join([first, second], axis)
    shape = tuple(first.shape)
    by_group = [one.reshape((groups, shape[0] // groups, *shape[1:])) for one in (first, second)]
    return join(by_group, 1).reshape((2 * shape[0], *shape[1:]))


def _joined(library: Any, real: Any, imaginary: Any) -> Any:
    """An array of complex numbers of its parts."""
    if library.__name__ == "torch":
        return library.complex(real, imaginary)
    if library.__name__ == "dask.array":
        return real + 1j * imaginary
    made = library.empty(real.shape, library.result_type(real.dtype, library.complex64))
    made.real, made.imag = real, imaginary
    return made


def written(library: Any, out: Any, made: Any) -> Any:
    """`out` with the result in it."""
    if tuple(out.shape) != tuple(made.shape):
        raise ConvArgumentError(f"out must have shape {list(made.shape)}, but got out of shape {list(out.shape)}")
    if out.dtype != made.dtype:
        raise ConvArgumentError(f"out must have dtype {made.dtype}, but got {out.dtype}")
    if library.__name__ == "torch":
        with library.no_grad():
            out.copy_(made)
    else:
        out[...] = made
    return out
