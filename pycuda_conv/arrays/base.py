"""The interface of all kinds of array, and the order of arrays in memory."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from pycuda_conv.call import Operands
from pycuda_conv.runtime import Device
from pycuda_conv.runtime.contexts import NotCurrent

#: (shape, dtype, where it lies): hashable, fast to make, and the key by which calls are cached. The last is None, or torch's -1, for host
#: memory; else see :data:`pycuda_conv.runtime.device.Where`.
Signature = tuple[Any, Any, Any]

ALIGNMENT = 16  # bytes; the kernels load four floats at once


def numpy_dtype(name: str) -> np.dtype:
    """numpy's dtype of that name. It knows bfloat16 from the package ml_dtypes, which jax needs, too."""
    if name == "bfloat16":
        return np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    return np.dtype(name)


class ArrayKind:
    """How to handle one kind of array. `name` is the word for it in messages."""

    name: str
    #: whether calls can be remembered by :mod:`pycuda_conv.repeat`
    remembered = False
    #: whether arrays are made in the current context; torch and CuPy have allocators that use the primary one, but for special cases
    any_context = False
    #: how a caller converts an array to another dtype, with gaps for the array's name and for the dtype
    conversion = "{}.astype('{}')"
    #: whether the arrays of a call have to be imported from their library, and its result exported
    imports = False

    def imported(self, operands: Operands, names: Sequence[str] = Operands._fields) -> Operands:
        """What stands for the arrays of a call until its end; `names` are what the operands are called."""
        return operands

    def exported(self, result: Any, operands: Operands, stream: Any = None) -> Any:
        """The array for the caller from the result of a call of imported `operands` on the caller's `stream`."""
        return result

    def signature(self, array: Any) -> Signature:
        """Shape, dtype (in the kind's own terms) and place of `array`."""
        raise NotImplementedError

    def signatures(self, operands: Operands, names: Sequence[str] = Operands._fields) -> tuple[Signature | None, ...]:
        """The signature of each operand, or None where there is none; `names` are what the operands are called."""
        sign = self.signature
        input, weight, bias, scale, residual = operands
        try:
            return (
                sign(input), sign(weight), None if bias is None else sign(bias), None if scale is None else sign(scale),
                None if residual is None else sign(residual),
            )
        except NotCurrent as error:
            for name, array in zip(names, operands, strict=False):
                error.check(lambda array=array: None if array is None else sign(array), name)  # type: ignore[misc]
            raise

    def dtype_name(self, dtype: Any) -> str:
        """numpy's name for a dtype of this kind."""
        return str(dtype)

    def dtype_of(self, name: str) -> Any:
        """The dtype of this kind that numpy calls so."""
        return numpy_dtype(name)

    def type_name(self, signature: Signature) -> str:
        """The array's type as messages show it."""
        return f"{self.name} {self.dtype_name(signature[1])}"

    def device(self, signature: Signature, device: Any) -> Device:
        """Where arrays of `signature` are convolved, given the caller's `device`."""
        raise NotImplementedError

    def layout(self, array: Any, ndim: int) -> str:
        """The layout of the result where `array` is the input, which has `ndim` spatial axes."""
        return "NCHW"

    def on_gpu(self, array: Any) -> bool:
        """Whether `array` lies in a GPU's memory."""
        return False

    def must_be_recorded(self, operands: Operands, free: bool) -> bool:
        """Whether the library has to know of the call, as torch does where it differentiates, traces or casts.

        `free` means that the call asks for nothing that an operator of the library can't do; otherwise such a call is refused.
        """
        return False

    def for_launcher(
        self, shape: tuple[int, ...], like: Any, device: Any, order: tuple[int, ...] | None, nbytes: int, dtype: str | None = None
    ) -> tuple[Any, ...]:
        """What the launcher in C needs to repeat a call: see ``ready`` in ``runtime/launch/ready.c``.

        Returns
        -------
        tuple
            The function of the current stream or None, the GPU's number, and functions with their arguments: what makes a result like
            `like` with its axes in `order`, or of another `dtype`, and what makes a workspace of `nbytes`, or None where that is 0.
        """
        raise NotImplementedError

    def check_not_recorded(self, operands: Operands) -> None:
        """Refuse arrays whose library has to know of the call. A plan's call asks this, as the library can't know of it."""

    def check_no_gradient(self, arrays: Sequence[Any]) -> None:
        """Refuse arrays that the library wants gradients for, in functions without gradients."""

    def check_dense(self, *arrays: Any) -> None:
        """Refuse arrays whose elements do not lie in memory one by one, such as sparse ones."""

    def will_write(self, out: Any) -> None:
        """Tell the library of `out` that kernels are about to write to it, or refuse what the library would refuse."""

    def to_pickle(self, array: Any) -> Any:
        """The array as an object that can be pickled."""
        return array

    @staticmethod
    def from_pickle(pickled: Any, device: Any) -> Any:
        """The array that :meth:`to_pickle` gave. The device must be current."""
        return pickled

    def empty(
        self, shape: tuple[int, ...], like: Any, device: Any, order: tuple[int, ...] | None = None, dtype: str | None = None
    ) -> Any:
        """An array from the kind's own allocator, its axes in the `order` of memory, outermost first; by default of the dtype of `like`."""
        raise NotImplementedError

    def converted(self, array: Any, dtype: str) -> Any:
        """A copy of `array` in another type."""
        raise NotImplementedError

    def as_kernel_input(self, array: Any, order: tuple[int, ...] | None) -> Any:
        """`array` if its axes lie in memory in `order`, outermost first, and kernels can read it there; else a copy that does.

        The device must be current.
        """
        raise NotImplementedError


@lru_cache(maxsize=1024)
def strides_of(shape: tuple[int, ...], itemsize: int, order: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in bytes of an array without gaps whose axes lie in memory in `order`, outermost first."""
    strides = [0] * len(shape)
    for i in reversed(order):
        strides[i] = itemsize
        itemsize *= shape[i]
    return tuple(strides)


def c_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    return strides_of(tuple(shape), itemsize, tuple(range(len(shape))))


def is_contiguous(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    return 0 in tuple(shape) or all(
        n == 1 or given == wanted for n, given, wanted in zip(shape, strides, c_strides(shape, itemsize), strict=True)
    )
