"""The few operations on whole arrays that filters need besides kernels, for each kind of array: making, converting, picking."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from pycuda_conv.arrays import ArrayKind, CupyKind, GPUArrayKind, NumpyKind, is_torchs
from pycuda_conv.arrays.device import _gpuarray as new_gpuarray
from pycuda_conv.arrays.device import _made as made_by
from pycuda_conv.errors import brief
from pycuda_conv.numbers import gpuarrays
from pycuda_conv.runtime import contexts

INTEGERS = {name: np.iinfo(name) for name in ("uint8", "int8", "uint16", "int16", "int32", "uint32", "int64", "uint64")}
#: The real types of the parts of complex numbers.
PARTS = {"complex64": "float32", "complex128": "float64"}


def limits_of(dtype: str) -> tuple[float, float]:
    """The least and the largest number of float64 that an integer type holds."""
    limits = INTEGERS[dtype]
    most = float(limits.max)
    return float(limits.min), most if limits.max < 2**53 else float(np.nextafter(most, 0))


@cache
def _name_of(dtype: np.dtype) -> str:
    """numpy makes a type's name anew each time."""
    return str(dtype.name)


class Space:
    """Arrays of numpy, or of CuPy, which has the same functions.

    Types are named as numpy does.
    """

    def __init__(self, kind: ArrayKind, library: Any) -> None:
        self.kind, self.library = kind, library

    def dtype(self, array: Any) -> str:
        return _name_of(array.dtype)

    def contiguous(self, array: Any) -> Any:
        """`array` in C order and the machine's byte order."""
        return self.library.ascontiguousarray(array, array.dtype.newbyteorder("="))

    def is_contiguous(self, array: Any) -> bool:
        return bool(array.flags.c_contiguous and array.dtype.isnative and getattr(array.flags, "aligned", True))

    def empty(self, shape: Sequence[int], dtype: str, like: Any) -> Any:
        return self.library.empty(tuple(shape), dtype)

    def upload(self, array: np.ndarray, like: Any) -> Any:
        """A numpy array of the host as one beside `like`."""
        return self.library.asarray(array)

    def cast(self, array: Any, dtype: str) -> Any:
        return array.astype(dtype, copy=False)

    def bytes_of(self, array: Any) -> Any:
        """An array of bool as one of uint8 in the same memory."""
        return array.view("uint8")

    def to_bool(self, array: Any) -> Any:
        """Numbers rounded to 0 and 1."""
        return array >= 0.5

    def to_integers(self, array: Any, dtype: str) -> Any:
        """Numbers rounded to the nearest integers, halves to even, and clipped; NaN becomes 0."""
        wide = self.clip(self.rint(self.cast(array, "float64")), *limits_of(dtype))
        return self.cast(self.where(self.is_nan(wide), 0.0 * self.is_nan(wide), wide), dtype)

    def truncated(self, array: Any, dtype: str) -> Any:
        """Numbers truncated towards zero; what is out of range wraps."""
        return self.cast(self.cast(self.library.trunc(array), "int64"), dtype)

    def rint(self, array: Any) -> Any:
        return self.library.rint(array)

    def clip(self, array: Any, least: float, most: float) -> Any:
        return self.library.clip(array, least, most)

    def where(self, condition: Any, one: Any, other: Any) -> Any:
        return self.library.where(condition, one, other)

    def take(self, array: Any, index: np.ndarray, axis: int) -> Any:
        """The elements at `index` along an axis."""
        return self.library.take(array, self.upload(index, array), axis)

    def moved(self, array: Any, axes: Sequence[int], to: Sequence[int]) -> Any:
        return self.library.moveaxis(array, tuple(axes), tuple(to))

    def parts(self, array: Any) -> Any:
        """A complex array in C order as one of real numbers, with an axis more: real and imaginary parts."""
        return array.view(PARTS[self.dtype(array)]).reshape(*array.shape, 2)

    def joined(self, parts: Any) -> Any:
        """The inverse of :meth:`parts`."""
        return parts.view("complex128" if self.dtype(parts) == "float64" else "complex64").reshape(parts.shape[:-1])

    def complex(self, real: Any, imaginary: Any) -> Any:
        return real + 1j * imaginary if self.dtype(real) == "float64" else (real + self.cast(imaginary, "complex64") * np.complex64(1j))

    def sqrt(self, array: Any) -> Any:
        return self.library.sqrt(array)

    def is_nan(self, array: Any) -> Any:
        return self.library.isnan(array)

    def missing(self, array: Any, nan: bool, mask: Any) -> Any:
        """Where an array is NaN, if `nan` is true, or a mask is; one of both is asked for."""
        gone = self.is_nan(array) if nan else None
        if mask is None:
            return gone
        mask = self.cast(mask, "bool")
        return mask if gone is None else gone | mask

    def filled(self, gone: Any, value: float, array: Any) -> Any:
        """`array` with a value where numbers are missing."""
        instead = self.empty(array.shape, self.dtype(array), array)
        instead[...] = value
        return self.where(gone, instead, array)

    def present(self, gone: Any, dtype: str) -> Any:
        """1 where numbers are there, else 0."""
        return self.cast(~gone, dtype)

    def made_up(self, top: Any, bottom: Any, whole: Any, least: float, kept: Any, plane: int = 0) -> Any:
        """``top * whole / bottom`` where `bottom` is more than `least` of `whole`, else `kept`."""
        some = bottom > least * whole
        return self.where(some, top * whole / self.where(some, bottom, bottom * 0 + 1), kept)

    def assign(self, target: Any, value: Any) -> None:
        target[...] = value

    def overlap(self, one: Any, other: Any) -> bool:
        """Whether two arrays may share memory."""
        return bool(self.library.may_share_memory(one, other))

    def writeable(self, array: Any) -> bool:
        return bool(getattr(array.flags, "writeable", True))

    def device_key(self, array: Any) -> Any:
        """What tells the memory in which arrays like this one lie; None for the host's."""
        return None

    def synchronise(self, array: Any) -> None:
        """Wait until a copy from the host is done, before other streams read it."""


class CupySpace(Space):
    def is_contiguous(self, array: Any) -> bool:
        return bool(array.flags.c_contiguous)

    def contiguous(self, array: Any) -> Any:
        return self.library.ascontiguousarray(array)

    def device_key(self, array: Any) -> Any:
        return array.device.id

    def synchronise(self, array: Any) -> None:
        self.library.cuda.get_current_stream().synchronize()


class TorchSpace(Space):
    """Tensors."""

    def _type(self, dtype: str) -> Any:
        return getattr(self.library, dtype)

    def dtype(self, array: Any) -> str:
        return str(array.dtype).removeprefix("torch.")

    def contiguous(self, array: Any) -> Any:
        return array.resolve_conj().resolve_neg().contiguous()

    def is_contiguous(self, array: Any) -> bool:
        return bool(array.is_contiguous() and not array.is_conj() and not array.is_neg())

    def empty(self, shape: Sequence[int], dtype: str, like: Any) -> Any:
        return like.new_empty(tuple(shape), dtype=self._type(dtype))

    def upload(self, array: np.ndarray, like: Any) -> Any:
        made = np.ascontiguousarray(array)
        if not made.flags.writeable or any(step < 0 for step in made.strides):  # which axes of one element may have
            made = made.copy()
        return self.library.from_numpy(made).to(like.device)

    def cast(self, array: Any, dtype: str) -> Any:
        return array.to(self._type(dtype))

    def bytes_of(self, array: Any) -> Any:
        return array.view(self.library.uint8)

    def rint(self, array: Any) -> Any:
        return array.round()  # halves to even

    def clip(self, array: Any, least: float, most: float) -> Any:
        return array.clamp(least, most)

    def take(self, array: Any, index: np.ndarray, axis: int) -> Any:
        return array.index_select(axis, self.upload(index, array))

    def moved(self, array: Any, axes: Sequence[int], to: Sequence[int]) -> Any:
        return array.movedim(tuple(axes), tuple(to))

    def parts(self, array: Any) -> Any:
        return self.library.view_as_real(array)

    def joined(self, parts: Any) -> Any:
        return self.library.view_as_complex(parts)

    def complex(self, real: Any, imaginary: Any) -> Any:
        return self.library.complex(real, imaginary)

    def assign(self, target: Any, value: Any) -> None:
        target.copy_(value)

    def overlap(self, one: Any, other: Any) -> bool:
        return bool(one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr())

    def writeable(self, array: Any) -> bool:
        return True

    def device_key(self, array: Any) -> Any:
        return array.device.index if array.is_cuda else None

    def synchronise(self, array: Any) -> None:
        self.library.cuda.current_stream(array.device).synchronize()


class GPUArraySpace(Space):
    """GPUArrays of PyCUDA, of the types that the kernels read."""

    def contiguous(self, array: Any) -> Any:
        if self.is_contiguous(array):
            return array
        if self.dtype(array) not in ("float32", "float64"):
            raise TypeError(f"a GPUArray of {self.dtype(array)} must lie in C order, but its strides are {array.strides}")
        return self.kind.copy(array)  # type: ignore[attr-defined]

    def is_contiguous(self, array: Any) -> bool:
        return bool(array.flags.c_contiguous)

    def empty(self, shape: Sequence[int], dtype: str, like: Any) -> Any:
        device = self._device_of(like)
        with device.current():
            return made_by(device, like.allocator, lambda allocate: new_gpuarray(tuple(shape), np.dtype(dtype), allocate, None))

    def upload(self, array: np.ndarray, like: Any) -> Any:
        made = self.empty(array.shape, array.dtype.name, like)
        with self._device_of(like).current():
            made.set(np.ascontiguousarray(array))
        return made

    def cast(self, array: Any, dtype: str) -> Any:
        return array if self.dtype(array) == dtype else array.astype(dtype)

    def take(self, array: Any, index: np.ndarray, axis: int) -> Any:
        return self.upload(np.take(array.get(), index, axis), array)

    def moved(self, array: Any, axes: Sequence[int], to: Sequence[int]) -> Any:
        order = [i for i in range(array.ndim) if i not in axes]
        for i, at in sorted(zip(axes, to, strict=True), key=lambda pair: pair[1]):
            order.insert(at, i)
        return array.transpose(order)

    def parts(self, array: Any) -> Any:
        shape = array.shape
        return array.ravel().view(np.dtype(PARTS[self.dtype(array)])).reshape(*shape, 2)

    def joined(self, parts: Any) -> Any:
        shape = parts.shape[:-1]
        return parts.ravel().view(np.dtype("complex128" if self.dtype(parts) == "float64" else "complex64")).reshape(shape)

    def complex(self, real: Any, imaginary: Any) -> Any:
        return real + imaginary * np.dtype("complex128" if self.dtype(real) == "float64" else "complex64").type(1j)

    def sqrt(self, array: Any) -> Any:
        return importlib.import_module("pycuda.cumath").sqrt(array)

    def to_bool(self, array: Any) -> Any:
        return self._made_of(array, "bool", gpuarrays.to_bool)

    def to_integers(self, array: Any, dtype: str) -> Any:
        return self._made_of(array, dtype, gpuarrays.to_integers, *limits_of(dtype))

    def truncated(self, array: Any, dtype: str) -> Any:
        return self._made_of(array, dtype, gpuarrays.truncate)

    def _made_of(self, array: Any, dtype: str, function: Callable[..., None], *numbers: float) -> Any:
        made = self.empty(array.shape, dtype, array)
        with self._device_of(array).current():
            function(array, made, *numbers)
        return made

    def missing(self, array: Any, nan: bool, mask: Any) -> Any:
        gone = self.empty(array.shape, "uint8", array)
        with self._device_of(array).current():
            gpuarrays.find_missing(array, mask, nan, gone)
        return gone

    def filled(self, gone: Any, value: float, array: Any) -> Any:
        made = self.empty(array.shape, self.dtype(array), array)
        with self._device_of(array).current():
            gpuarrays.fill_missing(gone, value, array, made)
        return made

    def present(self, gone: Any, dtype: str) -> Any:
        made = self.empty(gone.shape, dtype, gone)
        with self._device_of(gone).current():
            gpuarrays.mark_present(gone, made)
        return made

    def made_up(self, top: Any, bottom: Any, whole: Any, least: float, kept: Any, plane: int = 0) -> Any:
        """Also for a `whole` of several channels, of `plane` elements each; without `kept` NaN stands where too few numbers were met."""
        every = self.upload(np.atleast_1d(np.asarray(whole, self.dtype(top))), top)
        with self._device_of(top).current():
            gpuarrays.make_up(top, bottom, every, plane or max(top.size, 1), least, kept)
        return top

    def _device_of(self, array: Any) -> Any:
        return contexts.device_at(self.kind.where(self.kind.pointer(array)))  # type: ignore[attr-defined]

    def assign(self, target: Any, value: Any) -> None:
        target[...] = value

    def overlap(self, one: Any, other: Any) -> bool:
        first, second = int(one.gpudata), int(other.gpudata)
        return first < second + other.nbytes and second < first + one.nbytes

    def writeable(self, array: Any) -> bool:
        return True

    def device_key(self, array: Any) -> Any:
        return self.kind.where(int(array.gpudata))  # type: ignore[attr-defined]

    def synchronise(self, array: Any) -> None:
        """``to_gpu`` has waited."""


@cache
def space_of(kind: ArrayKind) -> Space:
    """The operations on arrays of a kind.

    Raises
    ------
    TypeError
        Filters don't take arrays of that kind.
    """
    if isinstance(kind, NumpyKind):
        return Space(kind, np)
    if isinstance(kind, CupyKind):
        return CupySpace(kind, sys.modules["cupy"])
    if isinstance(kind, GPUArrayKind):
        return GPUArraySpace(kind, importlib.import_module("pycuda.gpuarray"))
    if kind.name == "torch.Tensor":
        return TorchSpace(kind, sys.modules["torch"])
    raise TypeError(f"input must be an array of numpy, CuPy, torch, PyCUDA or dask, but got a {kind.name}")


def as_array(name: str, array: Any) -> Any:
    """`array` if a library of arrays made it, else what numpy makes of it."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array: pass {name}.filled(value), or {name}.data and mask=")
    if isinstance(array, np.ndarray) or is_torchs(array) or hasattr(array, "__cuda_array_interface__") or hasattr(array, "__dlpack__"):
        return array
    if type(array).__module__.partition(".")[0] in ("dask", "pycuda", "cupy", "jax"):
        return array
    made = np.asarray(array)
    if made.dtype.kind not in "biufcV":
        raise TypeError(f"{name} must be an array of numbers, but got {brief(array)}")
    return made
