"""Types of the public functions' arguments, for annotations: arrays in, the same kind out.

>>> import numpy as np
>>> from pycuda_conv import conv2d
>>> from pycuda_conv.typing import Array, Precision
>>> def blurred(image: Array, filter: Array, precision: Precision = "fp32") -> Array:
...     return conv2d(image, filter, padding=1, precision=precision)
>>> blurred(np.ones((1, 1, 4, 4)), np.ones((1, 1, 3, 3))).shape
(1, 1, 4, 4)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, SupportsIndex, TypeVar

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "Activation", "Algorithm", "Array", "Crop", "DType", "Mode", "Padding", "PaddingMode", "Precision", "Sizes",
    "State", "UpsampleFilter",
]  # fmt: skip


class _HasShape(Protocol):
    """What arrays of numpy, torch, CuPy and PyCUDA have in common."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...


class _HasInterface(Protocol):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class _SpeaksDLPack(Protocol):
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, Any]: ...


#: The arrays of a call and its result, all of one kind. (Of an object that only has a ``__cuda_array_interface__`` the result is
#: a ``GPUArray``, which types can't say.)
Array = TypeVar("Array", bound=_HasShape | _HasInterface | _SpeaksDLPack)

#: A dtype of numpy's.
DType = TypeVar("DType", bound="np.dtype[Any]")

#: An integer for every axis, or one each.
Sizes = SupportsIndex | Sequence[SupportsIndex]

#: As :data:`Sizes`, or a pair (before, after) for each axis.
Crop = Sizes | Sequence[Sequence[SupportsIndex]]

#: As :data:`Crop`, or ``"same"`` or ``"valid"``.
Padding = Crop | str

#: How an image goes on outside: see :mod:`pycuda_conv.borders`.
Mode = Literal["zeros", "constant", "replicate", "reflect", "circular", "symmetric"]
#: A word, one for each axis, or a pair (before, after) for each axis.
PaddingMode = Mode | Sequence[Mode | tuple[Mode, Mode]]

Precision = Literal["fp32", "tf32"]
Algorithm = Literal["direct", "fft", "batch_invariant"]
#: What is in front of a piece of a signal: a word for its start, or the array that the call before gave.
State = Literal["zeros", "replicate"] | _HasShape
#: Whether the taps that meet one pixel of an upsampled image are summed before.
UpsampleFilter = Literal["exact", "folded"]
#: A word, or ``("leaky_relu", slope)``; ``"leaky_relu"`` alone has a slope of 0.01.
Activation = Literal["relu", "relu6", "leaky_relu", "hardswish", "silu", "gelu", "gelu_tanh"] | tuple[Literal["leaky_relu"], float]
