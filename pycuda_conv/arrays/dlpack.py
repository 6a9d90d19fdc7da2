"""Arrays of any library that speaks DLPack, such as jax: their memory is read through it, and results go back through it.

A call imports its arrays, so it knows where the memory of each is. It exports its result as an array of the same library. In between, an
:class:`ArrayView` represents each array. Host memory is treated as numpy arrays are, and memory of a GPU as a ``GPUArray`` is.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from pycuda_conv.arrays.base import Signature, c_strides, is_contiguous, numpy_dtype, strides_of
from pycuda_conv.arrays.device import DeviceKind, InterfaceKind, copy_strided, stream_of
from pycuda_conv.arrays.host import HostKind, Memory
from pycuda_conv.call import Operands
from pycuda_conv.elements import bytes_of
from pycuda_conv.errors import ConvArgumentError, no_memory
from pycuda_conv.runtime import Device, contexts, get_device
from pycuda_conv.runtime.device import Where

#: DLPack's numbers of memory that the host reads, and of memory that a CUDA GPU reads.
HOST, PAGE_LOCKED, CUDA, MANAGED = 1, 3, 2, 13
_READ_ONLY, _COPIED = 1, 2  # flags of a capsule
_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}  # DLPack's numbers of types
_BFLOAT, _BOOL = 4, 6
#: Results in host memory begin at multiples of this many bytes: jax copies others.
_ALIGNED = 64


class _Tensor(ctypes.Structure):
    """DLPack's DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class _Managed(ctypes.Structure):
    """DLPack's DLManagedTensorVersioned. Before version 1 there was the tensor alone in front."""

    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64), ("tensor", _Tensor),
    )  # fmt: skip


_name_of = ctypes.pythonapi.PyCapsule_GetName
_name_of.restype, _name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _tensor_of(capsule: Any) -> tuple[_Tensor, int]:
    """The tensor that a capsule describes, and its flags; a capsule without flags counts as one of memory that must not be written."""
    name = _name_of(capsule)
    at = _pointer_of(capsule, name)
    assert at is not None
    if name == b"dltensor":
        return _Tensor.from_address(at), _READ_ONLY
    managed = _Managed.from_address(at)
    if name != b"dltensor_versioned" or managed.major != 1:
        raise BufferError(f"it gives a capsule called {(name or b'').decode()} of version {managed.major}, and 1 is the one known here")
    return managed.tensor, managed.flags


class ArrayView:
    """An array's shape, dtype and place in memory, as the kinds of this module handle it.

    Attributes
    ----------
    shape : tuple of int
    dtype : str
        numpy's name, or "bfloat16".
    where : int, tuple of (int, int) or None
        The context, as :data:`pycuda_conv.runtime.device.Where` has it; None in host memory.
    pointer : int
    strides : tuple of int
        In bytes.
    writeable : bool
    owner : object
        What keeps the memory alive. A capsule that is dropped gives the memory back to its library.
    source : object or None
        The caller's array; None for one that was made here.
    """

    __slots__ = ("dtype", "owner", "pointer", "shape", "source", "strides", "where", "writeable")

    def __init__(
        self, shape: tuple[int, ...], dtype: str, where: Where | None, pointer: int, strides: tuple[int, ...], owner: Any,
        writeable: bool = True, source: Any = None,
    ) -> None:
        self.shape, self.dtype, self.where, self.pointer, self.strides = shape, dtype, where, pointer, strides
        self.owner, self.writeable, self.source = owner, writeable, source

    def memory(self, owner: Any = None) -> np.ndarray:
        """A numpy array over the memory, which numpy does not touch by itself: one of bfloat16 is seen as integers."""
        typestr = "=i2" if self.dtype == "bfloat16" else np.dtype(self.dtype).str
        return np.asarray(Memory(owner or self.owner, self.pointer, self.shape, self.strides, typestr, not self.writeable))


def read(array: Any, name: str) -> ArrayView:
    """Where `array`, the argument called `name`, lies.

    Raises
    ------
    TypeError
        Memory, or a type of numbers, of which neither numpy nor CUDA knows.
    ConvArgumentError
        The library does not hand the array out: it is sharded over several devices, or was deleted.
    """
    try:
        device, _ = array.__dlpack_device__()
        if device in (CUDA, MANAGED):
            capsule = _capsule(array, stream=1)  # 1: the default stream, which the library makes follow its own
        elif device in (HOST, PAGE_LOCKED):
            capsule = _capsule(array)
        else:
            capsule = None
    except Exception as error:  # whatever the library raises
        raise _not_handed_out(array, name, error) from error
    if capsule is None:
        raise TypeError(f"{name} lies on a device that DLPack gives the number {int(device)}; pass an array of the host or of a CUDA GPU")
    tensor, flags = _tensor_of(capsule)
    if tensor.lanes != 1 or tensor.code not in _CODES:
        kind = f"{tensor.code}, with {tensor.bits} bits and {tensor.lanes} lanes"
        raise TypeError(f"{name} has elements of the type that DLPack numbers {kind}; pass floats or integers")
    shape, itemsize = tuple(tensor.shape[: tensor.ndim]), tensor.bits // 8
    steps = tensor.strides[: tensor.ndim] if tensor.strides else None
    strides = c_strides(shape, itemsize) if steps is None else tuple([itemsize * step for step in steps])
    pointer = (tensor.data or 0) + tensor.byte_offset
    if not tensor.data:
        if 0 not in shape:
            raise ConvArgumentError(no_memory(name))
        pointer = 0
    where = _context_of(pointer, name) if device in (CUDA, MANAGED) else None
    writeable = not flags & (_READ_ONLY | _COPIED)
    dtype = "bool" if tensor.code == _BOOL else f"{_CODES[tensor.code]}{tensor.bits}"
    return ArrayView(shape, dtype, where, pointer, strides, capsule, writeable, array)


def _not_handed_out(array: Any, name: str, error: Exception) -> ConvArgumentError:
    """The error about an array that its library does not hand out."""
    devices = getattr(getattr(array, "sharding", None), "device_set", ())  # of jax
    if len(devices) > 1:
        return ConvArgumentError(
            f"{name} is sharded over {len(devices)} devices, and a call takes arrays that lie on one: gather it first, as "
            "jax.device_put(array, jax.devices()[0]) does"
        )
    deleted = getattr(array, "is_deleted", None)  # of jax, too
    if callable(deleted) and deleted():
        return ConvArgumentError(f"{name} was deleted, or donated to a function that jax compiled: its memory is gone")
    return ConvArgumentError(f"{name} can't be read: its library says: {error}")


def _context_of(pointer: int, name: str) -> Where:
    try:
        return InterfaceKind.where(pointer)
    except contexts.NotCurrent as error:
        raise contexts.NotCurrent(error.template, name) from None


def _capsule(array: Any, **options: Any) -> Any:
    with suppress(TypeError):  # libraries before version 1 know neither
        return array.__dlpack__(max_version=(1, 0), copy=False, **options)
    return array.__dlpack__(**options)


# ---- memory for other libraries


class _ExportedMemory:
    """Memory of a GPU that other libraries read on streams of theirs. It is given back when they have read it."""

    def __init__(self, owner: Any, device: Any) -> None:
        self._owner, self._device = owner, device
        self.streams: set[int] = set()

    def __del__(self) -> None:
        with suppress(Exception), self._device.current():
            for stream in self.streams:  # the owner's memory follows the default stream
                self._device.order(stream, None)


class Exporter:
    """Memory as a library takes it by its ``from_dlpack()``: an object with ``__dlpack__`` and ``__dlpack_device__``.

    Parameters
    ----------
    array : ArrayView
    """

    def __init__(self, array: ArrayView) -> None:
        self._bfloat16, self._where = array.dtype == "bfloat16", array.where
        self._device: Any = None if array.where is None else contexts.device_at(array.where)
        self._exported = None if array.where is None else _ExportedMemory(array.owner, self._device)
        # numpy makes the capsule: what it keeps is dropped in the right thread, and never after the interpreter ended
        self._memory = array.memory(self._exported)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (HOST, 0) if self._where is None else (CUDA, contexts.ordinal_of(self._where))

    def __dlpack__(
        self, *, stream: int | None = None, max_version: tuple[int, int] | None = None, dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """The capsule. On a GPU, `stream`, a handle or CUDA's number of a default stream, is made to follow the work on ours."""
        if dl_device is not None and tuple(map(int, dl_device)) != self.__dlpack_device__():
            raise BufferError(f"the array lies on {self.__dlpack_device__()}, in DLPack's numbers, and is not copied to {dl_device}")
        if copy and self._exported is not None:
            raise BufferError("the array is not copied: pass copy=None or copy=False")
        memory = self._memory.copy() if copy else self._memory
        if self._exported is not None and stream not in (None, 0, 1, -1):  # -1: the caller sees to the order
            self._exported.streams.add(stream)
            with self._device.current():
                self._device.order(None, stream)
        try:
            capsule = memory.__dlpack__(max_version=max_version) if max_version else memory.__dlpack__()
        except TypeError:  # numpy before 2.1
            capsule = memory.__dlpack__()
        tensor, _ = _tensor_of(capsule)
        if self._bfloat16:
            tensor.code = _BFLOAT
        tensor.device_type, tensor.device_id = self.__dlpack_device__()
        return capsule


def dlpack(array: Any) -> Exporter:
    """A ``GPUArray`` for libraries that take DLPack, which PyCUDA does not speak: ``torch.from_dlpack(pycuda_conv.dlpack(array))``.

    Nothing is copied. The other library's array has the same memory and keeps it alive, and its later work follows what is on the default
    stream now.

    Parameters
    ----------
    array : pycuda.gpuarray.GPUArray
        Of any strides. Its memory must be that of the GPU's primary context, in which torch, CuPy and jax work:
        ``import pycuda.autoprimaryctx`` makes that one current.

    Returns
    -------
    object with ``__dlpack__`` and ``__dlpack_device__``

    Raises
    ------
    TypeError
        No ``GPUArray``, or one of a dtype that DLPack has no number for.
    ConvArgumentError
        The array lies in another context.

    Examples
    --------
    >>> import numpy as np, pycuda_conv as pc
    >>> try:
    ...     pc.dlpack(np.ones(3))
    ... except TypeError as error:
    ...     print(error)
    array must be a pycuda.gpuarray.GPUArray, but got numpy.ndarray
    """
    gpuarray = sys.modules.get("pycuda.gpuarray")
    if gpuarray is None or not isinstance(array, gpuarray.GPUArray):
        raise TypeError(f"array must be a pycuda.gpuarray.GPUArray, but got {type(array).__module__}.{type(array).__qualname__}")
    if array.dtype.name != "bfloat16" and (array.dtype.kind not in "iufc" or not array.dtype.isnative):
        raise TypeError(f"array has the dtype {array.dtype}, which DLPack has no number for")
    pointer = int(array.gpudata) if array.gpudata is not None else 0
    where = _context_of(pointer, "array") if pointer else 0
    if not isinstance(where, int):
        raise ConvArgumentError(
            f"array lies in a CUDA context of its own on cuda:{where[0]}, and other libraries use the primary one: make arrays for them "
            "after import pycuda.autoprimaryctx"
        )
    return Exporter(ArrayView(array.shape, array.dtype.name, where, pointer, array.strides, array))


# ---- the kinds


class DLPackKind(InterfaceKind, HostKind):
    """The arrays of one library, on a GPU or in host memory.

    Parameters
    ----------
    library : str
        The name of its package.
    from_dlpack : callable or None
        Makes an array of the library; without one, results are numpy arrays or ``GPUArray``.
    """

    has_producers = False  # when an array is imported, the default stream is made to follow its library's
    imports = True

    def __init__(self, library: str, from_dlpack: Callable[[Any], Any] | None) -> None:
        self.name = f"{library} array"
        self._from_dlpack = from_dlpack
        #: for each context what launches may still read or write there, with events that come when they are done
        self._in_use: WeakKeyDictionary[Any, deque[tuple[Any, Sequence[Any]]]] = WeakKeyDictionary()
        self._lock = threading.Lock()
        atexit.register(self._in_use.clear)  # while the libraries are still there

    def imported(self, operands: Operands, names: Sequence[str] = Operands._fields) -> Operands:
        named = zip((*names, *Operands._fields[len(names) :]), operands, strict=True)
        return Operands(*[None if a is None else self._view(a, name) for name, a in named])

    def exported(self, result: Any, operands: Operands, stream: Any = None) -> Any:
        made = self._of_library(result) if isinstance(result, ArrayView) else result  # what was given as out= comes back as it is
        if operands.input.where is not None:
            self._keep(contexts.device_at(operands.input.where), (*operands, result), stream)
        return made

    def _keep(self, device: Any, arrays: Sequence[Any], stream: Any) -> None:
        """Keep `arrays` until the launches that were made on `stream` are done: other libraries' allocators don't follow our streams."""
        with device.current(), self._lock:
            queue, done = self._in_use.setdefault(device, deque()), []
            while queue and queue[0][0].query():
                done.append(queue.popleft())
            queue.append((device.recorded(None if stream is None else stream_of(stream)), arrays))
        del done  # outside of the lock: libraries may do anything then

    def _of_library(self, array: ArrayView) -> Any:
        """`array` as one of the library's; where the library takes none, a numpy array or a ``GPUArray``."""
        if self._from_dlpack is not None:
            return self._from_dlpack(Exporter(array))
        if array.where is not None:
            gpuarray = importlib.import_module("pycuda.gpuarray")
            with contexts.device_at(array.where).current():  # PyCUDA asks for the current context's device
                return gpuarray.GPUArray(array.shape, numpy_dtype(array.dtype), gpudata=array.owner, strides=array.strides)
        memory = array.memory()
        return memory.view(numpy_dtype(array.dtype)) if array.dtype == "bfloat16" else memory

    @staticmethod
    def _view(array: Any, name: str = "out") -> ArrayView:
        return array if isinstance(array, ArrayView) else read(array, name)

    def signature(self, array: Any) -> Signature:
        view = self._view(array)
        return view.shape, view.dtype, view.where

    def dtype_name(self, dtype: Any) -> str:
        return str(dtype)

    def dtype_of(self, name: str) -> str:
        return name

    def type_name(self, signature: Signature) -> str:
        where = "in host memory" if signature[2] is None else f"on cuda:{contexts.ordinal_of(signature[2])}"
        return f"{self.name} {signature[1]} {where}"

    def device(self, signature: Signature, device: Any) -> Device:
        return get_device(device) if signature[2] is None else DeviceKind.device(self, signature, device)

    def on_gpu(self, array: Any) -> bool:
        return self._view(array).where is not None

    def pointer(self, array: Any) -> int:
        return self._view(array).pointer

    def strides(self, array: Any) -> tuple[int, ...]:
        return self._view(array).strides

    def contiguous(self, array: Any) -> bool:
        view = self._view(array)
        return is_contiguous(view.shape, view.strides, bytes_of(view.dtype))

    def writeable(self, array: Any) -> bool:
        return self._view(array).writeable

    # on a GPU

    def copy(self, array: Any, order: tuple[int, ...] | None = None) -> ArrayView:
        view = self._view(array)
        assert view.where is not None
        device, axes = contexts.device_at(view.where), order or range(len(view.shape))
        fresh = self.empty(view.shape, view, device, order)
        shape, strides = [view.shape[i] for i in axes], [view.strides[i] for i in axes]
        copy_strided(device, view.pointer, shape, strides, view.dtype, fresh.pointer)
        return fresh

    def empty(
        self, shape: tuple[int, ...], like: Any, device: Any, order: tuple[int, ...] | None = None, dtype: str | None = None
    ) -> ArrayView:
        dtype = dtype or like.dtype
        itemsize = bytes_of(dtype)
        strides = c_strides(shape, itemsize) if order is None else strides_of(tuple(shape), itemsize, order)
        if like.where is None:
            memory = self.allocate(tuple(shape), np.dtype("i2" if dtype == "bfloat16" else dtype))
            return ArrayView(tuple(shape), dtype, None, memory.__array_interface__["data"][0], strides, memory)
        block = device.allocate(max(math.prod(shape) * itemsize, 1))
        return ArrayView(tuple(shape), dtype, like.where, int(block), strides, block)

    # in host memory

    def to_numpy(self, array: Any, name: str) -> np.ndarray:
        return self._view(array, name).memory()

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype, name: str = "") -> np.ndarray:
        nbytes = math.prod(shape) * dtype.itemsize
        memory = np.empty(nbytes + _ALIGNED, np.uint8)
        start = -memory.__array_interface__["data"][0] % _ALIGNED
        return memory[start : start + nbytes].view(dtype).reshape(shape)

    def from_numpy(self, array: np.ndarray, dtype: str) -> ArrayView:
        return ArrayView(array.shape, dtype, None, array.__array_interface__["data"][0], array.strides, array)

    def converted(self, array: Any, dtype: str) -> ArrayView:
        if array.where is not None:
            return DeviceKind.converted(self, array, dtype)
        values = array.memory()
        if array.dtype == "bfloat16":
            values = values.view(numpy_dtype("bfloat16"))
        made = values.astype(numpy_dtype(dtype))
        return self.from_numpy(made.view(np.int16) if dtype == "bfloat16" else made, dtype)

    def as_kernel_input(self, array: Any, order: tuple[int, ...] | None) -> Any:
        if array.where is not None:
            return DeviceKind.as_kernel_input(self, array, order)
        return array if self.contiguous(array) else self.from_numpy(np.ascontiguousarray(array.memory()), array.dtype)

    # pickles

    def to_pickle(self, array: Any) -> Any:
        return self._of_library(array) if array.source is None else array.source


#: The kinds that were asked for, by their libraries.
_kinds: dict[str, DLPackKind] = {}


def speaks_dlpack(array: Any) -> bool:
    """Whether `array` is of a library that gives arrays by DLPack."""
    return hasattr(type(array), "__dlpack__") and hasattr(type(array), "__dlpack_device__")


def dlpack_kind(array: Any) -> DLPackKind:
    """The kind of an array that speaks DLPack."""
    module = sys.modules.get(type(array).__module__.partition(".")[0])
    namespace = array.__array_namespace__() if hasattr(array, "__array_namespace__") else module
    library = getattr(namespace, "__name__", type(array).__module__).partition(".")[0]
    return _kinds.setdefault(library, DLPackKind(library, getattr(namespace, "from_dlpack", None)))
