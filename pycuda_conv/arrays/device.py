"""Arrays in a GPU's memory that are not torch's, and streams."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pycuda_conv.arrays.base import ALIGNMENT, ArrayKind, Signature, c_strides, is_contiguous, numpy_dtype, strides_of
from pycuda_conv.elements import bytes_of
from pycuda_conv.engines.geometry import divider
from pycuda_conv.engines.layout import border_copy
from pycuda_conv.engines.struct import kernel_struct
from pycuda_conv.errors import ConvArgumentError, DeviceMemoryError, brief
from pycuda_conv.problem import DTYPE_CODES
from pycuda_conv.runtime import Device, KernelLaunch, contexts, get_device
from pycuda_conv.runtime.base import BufferSlice
from pycuda_conv.runtime.device import CudaDevice, Where
from pycuda_conv.runtime.memory import block_class, out_of_memory


class DeviceKind(ArrayKind):
    """Arrays in a GPU's memory."""

    def on_gpu(self, array: Any) -> bool:
        return True

    #: whether :meth:`producer` may give a stream
    has_producers = False

    def pointer(self, array: Any) -> int:
        raise NotImplementedError

    def strides(self, array: Any) -> tuple[int, ...]:
        """Strides in bytes."""
        raise NotImplementedError

    def contiguous(self, array: Any) -> bool:
        """Whether the memory at :meth:`pointer` holds the elements in C order."""
        raise NotImplementedError

    def is_laid_out_as(self, array: Any, order: tuple[int, ...] | None) -> bool:
        """Whether the memory holds the elements with the axes in `order`, outermost first; None is C order."""
        if order is None:
            return self.contiguous(array)
        (shape, dtype, _), strides = self.signature(array), self.strides(array)
        return is_contiguous([shape[i] for i in order], [strides[i] for i in order], bytes_of(self.dtype_name(dtype)))

    def writeable(self, array: Any) -> bool:
        return True

    def copy(self, array: Any, order: tuple[int, ...] | None = None) -> Any:
        """An aligned copy of the same kind with the axes in `order`."""
        raise NotImplementedError

    def is_kernel_input(self, array: Any, order: tuple[int, ...] | None) -> bool:
        """Whether kernels can read the array as it is: aligned, and laid out in `order`."""
        return self.pointer(array) % ALIGNMENT == 0 and self.is_laid_out_as(array, order)

    def as_kernel_input(self, array: Any, order: tuple[int, ...] | None) -> Any:
        return array if self.is_kernel_input(array, order) else self.copy(array, order)

    def workspace(self, nbytes: int, like: Any, device: Any) -> tuple[Any, int]:
        """At least `nbytes` bytes from the kind's own allocator: what holds them, and their address. The device must be current."""
        made = self.empty((-(-nbytes // bytes_of(self.dtype_name(like.dtype))),), like, device)
        return made, self.pointer(made)

    def current_stream(self, device: Any) -> Any:
        """The stream of `device` that the caller's work and the kind's allocator follow."""
        raise NotImplementedError

    def producer(self, array: Any) -> Any:
        """The stream that is writing `array`, where that may be another than the current one; else None."""
        return None

    def device(self, signature: Signature, device: Any) -> Device:
        own = contexts.device_at(signature[2])
        if device is not None and getattr(device, "name", device) != own.name and get_device(device).name != own.name:
            asked = get_device(device).name
            raise ConvArgumentError(f"device {asked} was asked for, but the input lies on {own.name}; move the arrays there first")
        return own

    def converted(self, array: Any, dtype: str) -> Any:
        signature = self.signature(array)
        given, shape = self.dtype_name(signature[1]), tuple(signature[0])
        device: Any = self.device(signature, None)
        with device.current():
            dense = self.as_kernel_input(array, None)
            made = self.empty(shape, array, device, None, dtype)
            launch = border_copy.converting(math.prod(shape), given, dtype, 0, 1)
            if math.prod(shape):
                device.launcher(launch)((self.pointer(dense), self.pointer(made)), self.current_stream(device))
        return made

    def fill(self, array: Any, values: Any) -> None:
        """Write `values` into `array`, whose elements may lie in another order."""
        raise NotImplementedError


CopyArguments = kernel_struct("copy_strided", "CopyArguments")


#: The kernel of :func:`copying`.
COPY = "copy_strided"


def copying(shape: Sequence[int], strides: Sequence[int], dtype: str, source: BufferSlice, target: BufferSlice) -> KernelLaunch:
    """A launch that gathers a strided array (strides in bytes), of at most five axes, into C order at `target`."""
    itemsize, rank = bytes_of(dtype), 5
    fill = (1,) * (rank - len(shape))
    size = math.prod(shape)
    elements = [s // itemsize for s in strides]
    if any(s % itemsize for s in strides):
        raise ConvArgumentError(f"strides {tuple(strides)} are not multiples of the item size, {itemsize} bytes")
    wide = size >= 2**31 - 2**20
    sizes, steps = (*fill, *shape)[1:], (*(0,) * len(fill), *elements)
    arguments = CopyArguments(size, *sizes, *(0 if wide else divider(n) for n in sizes), *steps)
    # integers of 4 and 8 bytes are copied as floats are, which changes no bit; shorter ones have texts of their own
    defines = {"DTYPE": DTYPE_CODES.get(dtype, 64 if itemsize == 8 else 32), "INDEX_64": int(wide), "THREADS": 256}
    if dtype not in DTYPE_CODES and itemsize < 4:
        defines["BYTES"] = itemsize
    return KernelLaunch(COPY, defines, -(-size // 256), 256, (source, target), (), arguments=arguments)


def copy_strided(device: Any, pointer: int, shape: Sequence[int], strides: Sequence[int], dtype: str, target: int) -> None:
    """Gather a strided device array (strides in bytes) into C order at `target`, on the default stream."""
    device.launcher(copying(shape, strides, dtype, 0, 1))((pointer, target), None)


def _gpuarray(shape: tuple[int, ...], dtype: np.dtype, allocate: Any, strides: tuple[int, ...] | None) -> Any:
    """A new GPUArray; `strides` None is C order."""
    return importlib.import_module("pycuda.gpuarray").GPUArray(shape, dtype, allocator=allocate, strides=strides)


def _made(device: CudaDevice, allocator: Any, make: Callable[[Any], Any]) -> Any:
    """What `make` makes with the `allocator` of an array that lies in the device's context, which must be current.

    PyCUDA's plain ``mem_alloc`` stands for our pool, as does None: an allocation, and the end of one, would wait for the GPU.

    Raises
    ------
    DeviceMemoryError
        There is too little memory.
    ConvArgumentError
        The allocator gave memory at an address that kernels can't take.
    """
    drv = device._drv
    if not callable(allocator) or allocator is drv.mem_alloc or getattr(allocator, "__self__", None) is device:
        return make(device.allocate)

    def aligned(nbytes: int) -> Any:
        memory = allocator(nbytes)
        if int(memory) % ALIGNMENT:
            raise ConvArgumentError(
                f"the input's allocator gave memory at {int(memory):#x}, but the kernels need an address that is a multiple of {ALIGNMENT}"
            )
        return memory

    with device.for_pycuda():
        try:
            made = make(aligned)
        except drv.MemoryError as error:
            raise DeviceMemoryError(f"{out_of_memory(device.name)}; the input's allocator says: {error}") from error
    made.allocator = allocator
    return made


class InterfaceKind(DeviceKind):
    """Any object with ``__cuda_array_interface__``; results are PyCUDA GPUArrays, which have it too."""

    name = "__cuda_array_interface__"
    conversion = "{} as {}"

    def signature(self, array: Any) -> Signature:
        interface = array.__cuda_array_interface__
        if interface.get("mask") is not None:
            raise TypeError("arrays with a mask in their __cuda_array_interface__ are not supported")
        dtype = np.dtype(interface["typestr"])
        if dtype.kind == "V" and dtype.itemsize == 2:
            raise TypeError(
                f"the typestr {interface['typestr']!r} in a __cuda_array_interface__ may mean bfloat16 or any other two bytes; pass "
                "bfloat16 as a torch.Tensor, or as a cupy.ndarray or a pycuda.gpuarray.GPUArray of ml_dtypes.bfloat16"
            )
        return tuple(interface["shape"]), dtype, self.where(interface["data"][0])

    def dtype_name(self, dtype: np.dtype) -> str:
        return dtype.name if dtype.isnative else dtype.str

    @staticmethod
    def where(pointer: int) -> Where:
        """The context that `pointer` belongs to; an empty array has none and counts as one of the context that serves host arrays."""
        return contexts.where_is(pointer) if pointer else contexts.chosen().where

    def pointer(self, array: Any) -> int:
        return int(array.__cuda_array_interface__["data"][0])

    def strides(self, array: Any) -> tuple[int, ...]:
        interface = array.__cuda_array_interface__
        strides = interface.get("strides")
        if strides is not None:
            return tuple(strides)
        return c_strides(interface["shape"], np.dtype(interface["typestr"]).itemsize)

    def contiguous(self, array: Any) -> bool:
        interface = array.__cuda_array_interface__
        strides = interface.get("strides")
        return strides is None or is_contiguous(interface["shape"], strides, np.dtype(interface["typestr"]).itemsize)

    def writeable(self, array: Any) -> bool:
        return not array.__cuda_array_interface__["data"][1]

    def copy(self, array: Any, order: tuple[int, ...] | None = None) -> Any:
        (shape, dtype, where), strides = self.signature(array), self.strides(array)
        device = contexts.device_at(where)
        fresh = _gpuarray(shape, dtype, device.allocate, None if order is None else strides_of(shape, dtype.itemsize, order))
        axes = order or range(len(shape))
        copy_strided(device, self.pointer(array), [shape[i] for i in axes], [strides[i] for i in axes], dtype.name, self.pointer(fresh))
        return fresh

    def empty(
        self, shape: tuple[int, ...], like: Any, device: Any, order: tuple[int, ...] | None = None, dtype: Any = None
    ) -> Any:
        dtype = self.signature(like)[1] if dtype is None else numpy_dtype(dtype)
        strides = None if order is None else strides_of(shape, dtype.itemsize, order)
        return _made(device, getattr(like, "allocator", None), lambda allocate: _gpuarray(shape, dtype, allocate, strides))

    def workspace(self, nbytes: int, like: Any, device: Any) -> tuple[Any, int]:
        block = block_class()(device.pool, nbytes)
        return block, int(block)

    def current_stream(self, device: Any) -> Any:
        return None  # the default stream, which our pool follows

    has_producers = any_context = True

    def producer(self, array: Any) -> Any:
        return array.__cuda_array_interface__.get("stream")

    def to_pickle(self, array: Any) -> Any:
        raise TypeError(
            f"a filter that is a {type(array).__module__}.{type(array).__qualname__} can't be pickled, for its address means nothing "
            "elsewhere; bind one of numpy, torch, CuPy or PyCUDA, or pickle the plan alone"
        )


class GPUArrayKind(InterfaceKind):
    name = "pycuda.gpuarray.GPUArray"
    conversion = ArrayKind.conversion

    def signature(self, array: Any) -> Signature:
        return array.shape, array.dtype, self.where(self.pointer(array))

    def pointer(self, array: Any) -> int:
        return int(array.gpudata) if array.gpudata is not None else 0

    def strides(self, array: Any) -> tuple[int, ...]:
        return array.strides

    def contiguous(self, array: Any) -> bool:
        return array.flags.c_contiguous

    def writeable(self, array: Any) -> bool:
        return True

    has_producers = False  # PyCUDA's calls go to the default stream
    remembered = True

    def for_launcher(
        self, shape: tuple[int, ...], like: Any, device: Any, order: tuple[int, ...] | None, nbytes: int, dtype: str | None = None
    ) -> tuple[Any, ...]:
        of = like.dtype if dtype is None else numpy_dtype(dtype)
        # GPUArray's constructor takes 8 us, mostly for what depends on the shape alone: it is called once, and its attributes are copied
        strides = None if order is None else strides_of(shape, of.itemsize, order)
        gpuarray = importlib.import_module("pycuda.gpuarray").GPUArray
        with device.current():  # the constructor asks for the current one's GPU
            pattern = vars(gpuarray(shape, of, allocator=device.allocate, gpudata=0, strides=strides))
        number = contexts.number_of(device.where)
        plain, block, new, pool, result_bytes = device._drv.mem_alloc, block_class(), gpuarray.__new__, device.pool, pattern["nbytes"]

        def make(like: Any) -> Any:
            allocator = like.allocator
            if allocator is plain or not callable(allocator) or getattr(allocator, "__self__", None) is device:
                made = new(gpuarray)
                made.__dict__.update(pattern)
                made.gpudata = memory = block(pool, result_bytes)
                made._pycuda_conv_context = memory, number  # the launcher in C need not ask the driver for it
                memory.context = device.keep_alive()
                return made
            return _made(device, allocator, lambda allocate: _gpuarray(shape, of, allocate, strides))

        return None, 0, (make, (), None), (block, (pool, nbytes), None) if nbytes else None

    def to_pickle(self, array: Any) -> np.ndarray:
        with contexts.device_at(self.where(self.pointer(array))):
            return array.get() if array.flags.c_contiguous else self.copy(array).get()

    @staticmethod
    def from_pickle(pickled: Any, device: Any) -> Any:
        return importlib.import_module("pycuda.gpuarray").to_gpu(pickled, device.allocate)


class CupyKind(InterfaceKind):
    name = "cupy.ndarray"
    conversion = ArrayKind.conversion

    def signature(self, array: Any) -> Signature:
        return array.shape, array.dtype, contexts.where_lies(array.device.id, lambda: self.pointer(array))

    def pointer(self, array: Any) -> int:
        return int(array.data.ptr)

    def strides(self, array: Any) -> tuple[int, ...]:
        return tuple(array.strides)

    def contiguous(self, array: Any) -> bool:
        return bool(array.flags.c_contiguous)

    def writeable(self, array: Any) -> bool:
        return True

    has_producers = any_context = False  # CuPy's calls go to its current stream

    def to_pickle(self, array: Any) -> Any:
        return array

    def copy(self, array: Any, order: tuple[int, ...] | None = None) -> Any:
        fresh = self.empty(array.shape, array, None, order)
        fresh[...] = array
        return fresh

    def converted(self, array: Any, dtype: str) -> Any:
        with array.device:
            return array.astype(numpy_dtype(dtype))

    def empty(
        self, shape: tuple[int, ...], like: Any, device: Any, order: tuple[int, ...] | None = None, dtype: str | None = None
    ) -> Any:
        cupy = sys.modules["cupy"]
        of = like.dtype if dtype is None else numpy_dtype(dtype)
        with like.device:
            if order is None:
                return cupy.empty(shape, of)
            memory = cupy.cuda.alloc(math.prod(shape) * of.itemsize)
            return cupy.ndarray(shape, of, memory, strides_of(shape, of.itemsize, order))

    def current_stream(self, device: Any) -> Any:
        return sys.modules["cupy"].cuda.get_current_stream(device.ordinal).ptr


def stream_of(stream: Any) -> Any:
    """The caller's `stream` in the form that launches take: a PyCUDA stream, or a handle."""
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream
    module = type(stream).__module__.partition(".")[0]
    if module == "pycuda":
        return stream
    for attribute in ("cuda_stream", "ptr"):  # torch's and CuPy's streams
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            return handle
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    raise TypeError(f"stream must be a stream of PyCUDA, torch or CuPy, or a handle as an int, got {brief(stream)}")
