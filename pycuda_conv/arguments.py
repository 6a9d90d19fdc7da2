"""The arguments of a convolution: the forms that each may have, and what is refused of it."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

from pycuda_conv.errors import ConvArgumentError, brief, did_you_mean

PRECISIONS = ("fp32", "tf32")
ALGORITHMS = ("direct", "fft", "batch_invariant")
#: In the order of ``cu/core/activation.cuh``.
ACTIVATIONS = (None, "relu", "relu6", "leaky_relu", "hardswish", "silu", "gelu", "gelu_tanh")
PADDINGS = ("same", "valid")
UPSAMPLE_FILTERS = ("exact", "folded")
SLOPE = 0.01  # the slope of "leaky_relu" if the caller gives none


def shape_text(shape: Iterable[int]) -> str:
    return "[" + ", ".join(str(v) for v in shape) + "]"


def product_text(sizes: Iterable[int]) -> str:
    return "(" + " x ".join(str(v) for v in sizes) + ")"


#: The forms of some arguments besides an integer.
_OR_ELSE = dict.fromkeys(("stride", "dilation", "output_padding", "upsample"), " or a list of one for each axis")
_OR_ELSE["padding"] = " or a list of one, or of a pair (before, after), for each axis"


def integer(name: str, value: Any) -> int:
    """`value` as an int; a ``TypeError`` naming the argument for anything that is not an integer (bool, 2.0, nan)."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} must be an integer{_OR_ELSE.get(name, '')}, got {brief(value)} of type {type(value).__name__}")


def integers(name: str, value: Any, ndim: int) -> tuple[int, ...]:
    """`value`, an integer or a sequence of one or `ndim` integers, as a tuple of `ndim` integers."""
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, tuple, list)):
        return (integer(name, value),) * ndim
    values = tuple(integer(name, v) for v in value)
    if len(values) == 1:
        values *= ndim
    if len(values) != ndim:
        raise ConvArgumentError(
            f"expected {name} to be a single integer value or a list of {ndim} values to match the convolution "
            f"dimensions, but got {name}={shape_text(values)}"
        )
    return values


def checked_activation(value: Any) -> str | tuple[str, float] | None:
    """The `activation` argument in one form: a word, ``("leaky_relu", slope)`` for another slope than 0.01, or None."""
    if value is None or (isinstance(value, str) and value in ACTIVATIONS):
        return value
    if isinstance(value, (tuple, list)) and len(value) == 2 and isinstance(value[0], str) and value[0] == "leaky_relu":
        slope = value[1]
        if isinstance(slope, bool) or not isinstance(slope, Real):
            raise TypeError(f"the slope in activation=('leaky_relu', slope) must be a number, got {brief(slope)}")
        try:
            finite = math.isfinite(slope)
        except OverflowError:  # an integer beyond all floats
            finite = False
        if not finite:
            raise ConvArgumentError(f"the slope in activation=('leaky_relu', slope) must be finite, but got {brief(slope)}")
        return "leaky_relu" if float(slope) == SLOPE else ("leaky_relu", float(slope))
    expected = f"activation must be one of {ACTIVATIONS} or ('leaky_relu', slope)"
    if isinstance(value, (str, tuple, list)):
        word = value if isinstance(value, str) or not value else value[0]
        raise ConvArgumentError(f"{expected}, but got activation={brief(value)}{did_you_mean(word, ACTIVATIONS)}")
    raise TypeError(f"{expected}, got {brief(value)}")


def checked_algorithm(value: Any) -> str | None:
    """The `algorithm` argument."""
    return _word_or_none("algorithm", value, ALGORITHMS)


def _word_or_none(name: str, value: Any, words: Sequence[str]) -> str | None:
    """The argument `name`, which is None or one of `words`."""
    if value is None or (isinstance(value, str) and value in words):
        return value
    expected = f"{name} must be None or one of {words}"
    if isinstance(value, str):
        raise ConvArgumentError(f"{expected}, but got {name}={brief(value)}{did_you_mean(value, words)}")
    raise TypeError(f"{expected}, got {brief(value)}")


def checked_upsample(value: Any, ndim: int) -> tuple[int, ...]:
    """The `upsample` argument as a factor for each axis."""
    factors = integers("upsample", value, ndim)
    if any(not 0 < factor < 2**15 for factor in factors):
        raise ConvArgumentError(f"upsample must be from 1 to 2^15 - 1 along each axis, but got upsample={brief(value)}")
    return factors


def checked_upsample_filter(value: Any) -> str | None:
    """The `upsample_filter` argument."""
    return _word_or_none("upsample_filter", value, UPSAMPLE_FILTERS)


def activation_and_slope(activation: str | tuple[str, float] | None) -> tuple[int, float]:
    """The number in :data:`ACTIVATIONS` of the result of :func:`checked_activation`, and the slope, which is 0 for all but a leaky ReLU."""
    if isinstance(activation, tuple):
        return ACTIVATIONS.index("leaky_relu"), activation[1]
    return ACTIVATIONS.index(activation), SLOPE if activation == "leaky_relu" else 0.0


def check_precision(precision: Any) -> None:
    """Refuse what is no word for a precision."""
    if not isinstance(precision, str) or precision not in PRECISIONS:
        hint = did_you_mean(precision, PRECISIONS)
        raise ConvArgumentError(f"precision must be one of {PRECISIONS}, but got precision={brief(precision)}{hint}")


def checked_rank(ndim: Any) -> int:
    if integer("ndim", ndim) not in (1, 2, 3):
        raise ConvArgumentError(f"ndim, the number of spatial axes, must be 1, 2 or 3, but got ndim={ndim}")
    return int(ndim)


def checked_shape(name: str, shape: Any) -> tuple[int, ...]:
    """A shape as a tuple of ints."""
    if isinstance(shape, (str, bytes)) or not isinstance(shape, Iterable):
        raise TypeError(f"{name} must be a shape, a tuple of integers, got {brief(shape)}")
    sizes = tuple(integer(f"each size in {name}", size) for size in shape)
    if any(size < 0 for size in sizes):
        raise ConvArgumentError(f"{name} must not hold negative sizes, but got {shape_text(sizes)}")
    return sizes


def padding_pairs(padding: Any, ndim: int) -> str | tuple[tuple[int, int], ...]:
    """The `padding` argument in one form: ``"same"``, ``"valid"`` or `ndim` pairs (before, after)."""
    if isinstance(padding, str):
        if padding not in PADDINGS:
            raise ConvArgumentError(
                f"Invalid padding string: '{padding}' (expected 'same', 'valid', an integer, {ndim} integers or {ndim} pairs)"
                f"{did_you_mean(padding, PADDINGS)}"
            )
        return padding
    if isinstance(padding, Sequence) and any(isinstance(v, Sequence) for v in padding):
        if len(padding) != ndim or not all(isinstance(v, Sequence) and len(v) == 2 for v in padding):
            raise ConvArgumentError(f"expected padding to be {ndim} pairs (before, after), one an axis, but got padding={brief(padding)}")
        return tuple((integer("padding", before), integer("padding", after)) for before, after in padding)
    return tuple((v, v) for v in integers("padding", padding, ndim))


def padding_in_numbers(
    pairs: str | tuple[tuple[int, int], ...], stride: Sequence[int], dilation: Sequence[int], filter_size: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Pairs of numbers for ``"same"`` and ``"valid"``; other pairs unchanged."""
    if not isinstance(pairs, str):
        return pairs
    if pairs == "valid":
        return ((0, 0),) * len(filter_size)
    if any(v != 1 for v in stride):
        raise ConvArgumentError("padding='same' is not supported for strided convolutions")
    totals = [d * (f - 1) for d, f in zip(dilation, filter_size, strict=True)]
    return tuple((total // 2, total - total // 2) for total in totals)


#: The spatial axes of an image, and of a filter, by their letters.
LETTERS = {1: ("W", "S"), 2: ("H, W", "R, S"), 3: ("D, H, W", "T, R, S")}


def check_ranks(name: str, ndim: int, input_shape: tuple[int, ...], weight_shape: tuple[int, ...]) -> None:
    """Refuse an input, or a filter, with another number of axes than the function takes."""
    image, taps = LETTERS[ndim]
    forward = name == f"conv{ndim}d"
    if len(weight_shape) == ndim:
        if forward:
            raise ConvArgumentError(
                f"weight of size {shape_text(weight_shape)} is a filter without channels, which {name} takes for an input of shape "
                f"({image}), but got input of size: {shape_text(input_shape)}; for an input with channels weight has the shape "
                f"(K, C/groups, {taps})"
            )
        raise ConvArgumentError(without_channels(name, ndim, weight_shape))
    if len(input_shape) not in (ndim + 1, ndim + 2):
        text = f"Expected {ndim + 1}D (unbatched) or {ndim + 2}D (batched) input to {name}, but got input of size: "
        text += shape_text(input_shape)
        if forward and len(input_shape) == ndim:
            text += f"; an image of shape ({image}) goes with a filter of shape ({taps}), but got weight of size {shape_text(weight_shape)}"
        raise ConvArgumentError(text)
    if len(weight_shape) != ndim + 2:
        raise ConvArgumentError(
            f"Expected {ndim + 2}-dimensional weight for {name}, of shape (K, C/groups, {taps}), but got {len(weight_shape)}-dimensional "
            f"weight of size {shape_text(weight_shape)} instead"
        )


def without_channels(name: str, ndim: int, weight_shape: tuple[int, ...]) -> str:
    """The message for a filter of spatial axes alone where only a forward convolution takes one."""
    return (
        f"Expected {ndim + 2}-dimensional weight for {name}, but got {ndim}-dimensional weight of size {shape_text(weight_shape)} instead; "
        f"conv{ndim}d alone takes filters without channels: give every array its axis of channels"
    )


def check_groups(groups: int, weight_shape: tuple[int, ...]) -> None:
    if weight_shape[0] < groups:
        raise ConvArgumentError(
            f"Given groups={groups}, expected weight to be at least {groups} at dimension 0, but got weight of size "
            f"{shape_text(weight_shape)} instead"
        )
    if weight_shape[0] % groups:
        raise ConvArgumentError(
            f"Given groups={groups}, expected weight to be divisible by {groups} at dimension 0, but got weight of size "
            f"[{shape_text(weight_shape)}] instead"
        )


def check_pairs(pairs: str | tuple[tuple[int, int], ...]) -> None:
    if not isinstance(pairs, str) and any(v < 0 for pair in pairs for v in pair):
        raise ConvArgumentError(f"negative padding is not supported, but got padding={pairs}")


def check_channels(name: str, shape: Sequence[int] | None, channels: int, weight_shape: tuple[int, ...]) -> None:
    """That the bias, or the scale, has a number for each channel of the result."""
    if shape is not None and checked_shape(f"{name}_shape", shape) != (channels,):
        raise ConvArgumentError(
            f"Given weight of size {shape_text(weight_shape)}, expected {name} to be 1-dimensional with {channels} elements, but got "
            f"{name} of size {shape_text(shape)} instead"
        )
