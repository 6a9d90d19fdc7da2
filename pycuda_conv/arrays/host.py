"""Arrays in the host's memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from pycuda_conv.arrays.base import ArrayKind, Signature, numpy_dtype
from pycuda_conv.runtime import Device, get_device


class Memory:
    """Memory at an address, which numpy sees by ``numpy.asarray``; `owner` keeps it alive, and the arrays over it keep `owner`."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(
        self, owner: Any, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], typestr: str, read_only: bool = False
    ) -> None:
        self.__array_interface__ = {"shape": shape, "typestr": typestr, "data": (pointer, read_only), "strides": strides, "version": 3}
        self.owner = owner


class HostKind(ArrayKind):
    """Arrays in the host's memory, seen as numpy arrays. Those of bfloat16, which numpy does not know, are seen as integers."""

    def to_numpy(self, array: Any, name: str) -> np.ndarray:
        """`array`, the argument called `name`, as a numpy array in the same memory."""
        raise NotImplementedError

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype, name: str = "") -> np.ndarray:
        """An uninitialised array in memory that :meth:`from_numpy` makes a good array of the kind from.

        `name` is that of the elements' type, for the numpy dtype that holds them.
        """
        return np.empty(shape, dtype)

    def from_numpy(self, array: np.ndarray, dtype: str) -> Any:
        """An array of the kind that holds `array`, whose elements are of this type: the inverse of :meth:`to_numpy`."""
        raise NotImplementedError

    def writeable(self, array: Any) -> bool:
        """Whether what is written to :meth:`to_numpy` of `array` shows in `array`."""
        return True

    def in_order(self, array: Any, order: tuple[int, ...]) -> Any:
        """A copy of `array` whose axes lie in memory in `order`, outermost first."""
        raise NotImplementedError

    def device(self, signature: Signature, device: Any) -> Device:
        return get_device(device)


class NumpyKind(HostKind):
    name = "numpy.ndarray"

    def signature(self, array: np.ndarray) -> Signature:
        return array.shape, array.dtype, None

    def dtype_name(self, dtype: np.dtype) -> str:
        return dtype.name  # the same for both byte orders

    def to_numpy(self, array: np.ndarray, name: str) -> np.ndarray:
        if array.dtype.kind != "V":  # this is the bfloat16 of ml_dtypes; a dtype's name would take 2 us
            return array
        return array.view(np.dtype(np.int16).newbyteorder(array.dtype.byteorder))

    def from_numpy(self, array: np.ndarray, dtype: str) -> np.ndarray:
        return array.view(numpy_dtype(dtype)) if dtype == "bfloat16" else array

    def empty(
        self, shape: tuple[int, ...], like: Any, device: Any, order: tuple[int, ...] | None = None, dtype: str | None = None
    ) -> Any:
        return np.empty(shape, like.dtype.newbyteorder("=") if dtype is None else numpy_dtype(dtype))

    def converted(self, array: np.ndarray, dtype: str) -> np.ndarray:
        return array.astype(numpy_dtype(dtype))

    def as_kernel_input(self, array: np.ndarray, order: tuple[int, ...] | None) -> np.ndarray:
        return np.ascontiguousarray(array, array.dtype.newbyteorder("="))
