"""The caller's arrays: what they are, who owns their memory, which stream they live on.

Each class here adapts one kind of array to the plans, which see addresses only. The result is of the input's kind and
comes from that kind's own allocator. Results are C-contiguous (NCHW) whatever the strides of the inputs; inputs that
are not, or whose address is not a multiple of 16 bytes, are copied first.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pycuda_conv.problem import DTYPE_BYTES, ConvArgumentError, ConvProblem
from pycuda_conv.runtime import BackendError, Device, DeviceMemoryError, Step, cuda_device, get_device

if TYPE_CHECKING:
    from pycuda_conv.plan import Plan

#: (shape, dtype, GPU number or None for host memory), hashable, cheap to make: what a call is cached by.
Signature = tuple[Any, Any, int | None]

ALIGNMENT = 16  # bytes; the kernels load four floats at once


class ArrayKind:
    """How to handle one kind of array. `name` is the word for it in messages."""

    name: str

    def signature(self, array: Any) -> Signature:
        """Shape, dtype (in the kind's own terms) and GPU of `array`."""
        raise NotImplementedError

    def dtype_name(self, dtype: Any) -> str:
        """numpy's name for a dtype of this kind."""
        return str(dtype)

    def type_name(self, signature: Signature) -> str:
        """The array's type as messages show it."""
        return f"{self.name} {self.dtype_name(signature[1])}"

    def device(self, signature: Signature, device: Any) -> Device:
        """Where arrays of `signature` are convolved, given the caller's `device`."""
        raise NotImplementedError

    def convolve(self, plan: Plan, input: Any, weight: Any, bias: Any, out: Any, stream: Any) -> Any:
        """Run `plan` on arrays that fit it."""
        raise NotImplementedError


def _check_out_shape(out_shape: Sequence[int], out_dtype: str, plan: Plan) -> None:
    if tuple(out_shape) != plan.result_shape:
        raise ConvArgumentError(f"out must have shape {list(plan.result_shape)}, but got out of shape {list(out_shape)}")
    if out_dtype != plan.problem.dtype:
        raise ConvArgumentError(f"out must have dtype {plan.problem.dtype}, the input's, but got {out_dtype}")


_NOT_CONTIGUOUS = "out must be C-contiguous, but its strides are {} for shape {}"
_OVERLAP = "out overlaps {} in memory; the result can't be written over what is still being read"


# ---- host arrays


class HostKind(ArrayKind):
    """Arrays in the host's memory, seen as numpy arrays."""

    def to_numpy(self, array: Any) -> np.ndarray:
        raise NotImplementedError

    def from_numpy(self, array: np.ndarray) -> Any:
        raise NotImplementedError

    def device(self, signature: Signature, device: Any) -> Device:
        return get_device(device)

    def convolve(self, plan: Plan, input: Any, weight: Any, bias: Any, out: Any, stream: Any) -> Any:
        named = (("input", input), ("weight", weight), ("bias", bias))
        given = [None if a is None else self._checked(name, self.to_numpy(a)) for name, a in named]
        if out is None:
            target = np.empty(plan.result_shape, plan.problem.dtype)
        else:
            target = self.to_numpy(out)
            _check_out_shape(target.shape, target.dtype.name, plan)
            if not target.flags.writeable:
                raise ConvArgumentError("out is read-only; pass a writeable array")
            if not target.flags.c_contiguous or not target.dtype.isnative:
                raise ConvArgumentError(_NOT_CONTIGUOUS.format(target.strides, list(target.shape)))
            for (name, _), array in zip(named, given, strict=True):
                if array is not None and np.may_share_memory(target, array):
                    raise ConvArgumentError(_OVERLAP.format(name))
        ready = [None if a is None else np.ascontiguousarray(a, dtype=plan.problem.dtype) for a in given]
        if not plan.empty:
            plan.device.run_on_host_arrays(plan.launch, ready, target, plan.workspace_bytes, self.stream_handle(stream))
        return self.from_numpy(target) if out is None else out

    @staticmethod
    def stream_handle(stream: Any) -> Any:
        return None if stream is None else stream_of(stream)

    @staticmethod
    def _checked(name: str, array: np.ndarray) -> np.ndarray:
        if any(stride < 0 for stride in array.strides):
            raise ConvArgumentError(
                f"{name} has negative strides {array.strides}, which are not supported; pass a copy, as {name}.copy() makes"
            )
        return array


class NumpyKind(HostKind):
    name = "numpy.ndarray"

    def signature(self, array: np.ndarray) -> Signature:
        return array.shape, array.dtype, None

    def dtype_name(self, dtype: np.dtype) -> str:
        return dtype.name  # the same for both byte orders

    def to_numpy(self, array: np.ndarray) -> np.ndarray:
        return array

    def from_numpy(self, array: np.ndarray) -> np.ndarray:
        return array


# ---- device arrays


class DeviceKind(ArrayKind):
    """Arrays in a GPU's memory."""

    def pointer(self, array: Any) -> int:
        raise NotImplementedError

    def strides(self, array: Any) -> tuple[int, ...]:
        """Strides in bytes."""
        raise NotImplementedError

    def contiguous(self, array: Any) -> bool:
        raise NotImplementedError

    def copy(self, array: Any) -> Any:
        """A C-contiguous, aligned copy of the same kind."""
        raise NotImplementedError

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any, device: Any) -> Any:
        """An array from the kind's own allocator."""
        raise NotImplementedError

    def current_stream(self, array: Any) -> Any:
        """The stream on which the caller's work on `array` is ordered, as CudaDevice.launch_on takes it."""
        raise NotImplementedError

    def read_only(self, array: Any) -> bool:
        return False

    def device(self, signature: Signature, device: Any) -> Device:
        ordinal = signature[2]
        assert ordinal is not None
        own = cuda_device(ordinal)
        if device is not None and get_device(device) is not own:
            raise ConvArgumentError(f"device={device!r} was asked for, but the input lies on {own.name}; move the arrays there first")
        return own

    def convolve(self, plan: Plan, input: Any, weight: Any, bias: Any, out: Any, stream: Any) -> Any:
        device: Any = plan.device
        with device:
            if out is not None:
                self._check_out(out, plan, (("input", input), ("weight", weight), ("bias", bias)))
            on = self.current_stream(input) if stream is None else stream_of(stream)
            x, w = self._ready("input", input), self._ready("weight", weight)
            b = None if bias is None else self._ready("bias", bias)
            result = self.empty(plan.result_shape, plan.problem.dtype, input, device) if out is None else out
            if not plan.empty:
                workspace = self.empty((plan.workspace_bytes,), "uint8", input, device) if plan.workspace_bytes else None
                pointer = self.pointer
                buffers = (
                    pointer(x), pointer(w), 0 if b is None else pointer(b), pointer(result), 0 if workspace is None else pointer(workspace),
                )
                if not on:
                    plan.launch(buffers, None)
                else:
                    device.launch_on(lambda own: plan.launch(buffers, own), on)
        return result

    def _ready(self, name: str, array: Any) -> Any:
        if self.contiguous(array) and not self.pointer(array) % ALIGNMENT:
            return array
        if any(stride < 0 for stride in self.strides(array)):
            raise ConvArgumentError(f"{name} has negative strides {self.strides(array)}, which are not supported; pass a copy")
        return self.copy(array)

    def _check_out(self, out: Any, plan: Plan, others: Sequence[tuple[str, Any]]) -> None:
        shape, dtype, ordinal = self.signature(out)
        _check_out_shape(shape, self.dtype_name(dtype), plan)
        if cuda_device(-1 if ordinal is None else ordinal) is not plan.device:
            raise ConvArgumentError(f"out must lie on {plan.device.name}, as the input does, but it lies on cuda:{ordinal}")
        if self.read_only(out):
            raise ConvArgumentError("out is read-only; pass a writeable array")
        if not self.contiguous(out):
            raise ConvArgumentError(_NOT_CONTIGUOUS.format(self.strides(out), list(shape)))
        if self.pointer(out) % ALIGNMENT:
            raise ConvArgumentError(f"out must start at a multiple of {ALIGNMENT} bytes, but its address is {self.pointer(out):#x}")
        first, end = _extent(self.pointer(out), shape, self.strides(out), plan.problem.itemsize)
        for name, array in others:
            if array is not None:
                low, high = _extent(self.pointer(array), self.signature(array)[0], self.strides(array), plan.problem.itemsize)
                if low < end and first < high:
                    raise ConvArgumentError(_OVERLAP.format(name))


def _extent(pointer: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """First byte of an array and the one after its last."""
    if 0 in tuple(shape):
        return pointer, pointer
    reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    return pointer + sum(r for r in reach if r < 0), pointer + sum(r for r in reach if r > 0) + itemsize


def copy_strided(device: Any, pointer: int, shape: Sequence[int], strides: Sequence[int], dtype: str, target: int, stream: Any) -> None:
    """Gather a strided device array (strides in bytes) into C order at `target`, with ``cu/copy_strided.cu``."""
    itemsize, rank = DTYPE_BYTES[dtype], 5
    fill = (1,) * (rank - len(shape))
    size = math.prod(shape)
    elements = [s // itemsize for s in strides]
    if any(s % itemsize for s in strides):
        raise ConvArgumentError(f"strides {tuple(strides)} are not multiples of the item size, {itemsize} bytes")
    step = Step(
        "copy_strided", {"DTYPE": itemsize * 8, "INDEX_64": 1, "THREADS": 256}, -(-size // 256), 256, (0, 1),
        (size, *fill, *shape, *(0,) * len(fill), *elements),
    )
    launcher = device.launcher(step)
    device.launch_on(lambda own: launcher((pointer, target), own), stream)


class InterfaceKind(DeviceKind):
    """Any object with ``__cuda_array_interface__``; results are PyCUDA GPUArrays, which have it too."""

    name = "__cuda_array_interface__"

    def signature(self, array: Any) -> Signature:
        interface = array.__cuda_array_interface__
        return tuple(interface["shape"]), np.dtype(interface["typestr"]), self._ordinal(interface["data"][0])

    @staticmethod
    def _ordinal(pointer: int) -> int:
        """The GPU on which `pointer` lies; an empty array has none and counts as GPU 0's."""
        if not pointer:
            return 0
        drv = cuda_device(0)._drv
        with cuda_device(0):
            return int(drv.pointer_get_attribute(drv.pointer_attribute.DEVICE_ORDINAL, pointer)) if drv.Device.count() > 1 else 0

    def pointer(self, array: Any) -> int:
        return int(array.__cuda_array_interface__["data"][0])

    def strides(self, array: Any) -> tuple[int, ...]:
        interface = array.__cuda_array_interface__
        strides = interface.get("strides")
        if strides is not None:
            return tuple(strides)
        return _c_strides(interface["shape"], np.dtype(interface["typestr"]).itemsize)

    def contiguous(self, array: Any) -> bool:
        interface = array.__cuda_array_interface__
        strides = interface.get("strides")
        return strides is None or _is_contiguous(interface["shape"], strides, np.dtype(interface["typestr"]).itemsize)

    def read_only(self, array: Any) -> bool:
        return bool(array.__cuda_array_interface__["data"][1])

    def copy(self, array: Any) -> Any:
        shape, dtype, ordinal = self.signature(array)
        device = cuda_device(ordinal or 0)
        fresh = self.empty(shape, dtype.name, array, device)
        copy_strided(device, self.pointer(array), shape, self.strides(array), dtype.name, self.pointer(fresh), self.current_stream(array))
        return fresh

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any, device: Any) -> Any:
        return importlib.import_module("pycuda.gpuarray").GPUArray(shape, np.dtype(dtype), allocator=device.allocate)

    def current_stream(self, array: Any) -> Any:
        return array.__cuda_array_interface__.get("stream")


class GPUArrayKind(InterfaceKind):
    name = "pycuda.gpuarray.GPUArray"

    def current_stream(self, array: Any) -> Any:
        return None


class CupyKind(InterfaceKind):
    name = "cupy.ndarray"

    def signature(self, array: Any) -> Signature:
        return array.shape, array.dtype, array.device.id

    def pointer(self, array: Any) -> int:
        return int(array.data.ptr)

    def strides(self, array: Any) -> tuple[int, ...]:
        return tuple(array.strides)

    def contiguous(self, array: Any) -> bool:
        return bool(array.flags.c_contiguous)

    def read_only(self, array: Any) -> bool:
        return False

    def copy(self, array: Any) -> Any:
        return array.copy(order="C")

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any, device: Any) -> Any:
        cupy = sys.modules["cupy"]
        with like.device:
            return cupy.empty(shape, dtype)

    def current_stream(self, array: Any) -> Any:
        return sys.modules["cupy"].cuda.get_current_stream(array.device.id).ptr


class TorchKind(DeviceKind, HostKind):
    """torch tensors, on a GPU or in host memory."""

    name = "torch.Tensor"

    def __init__(self) -> None:
        torch = self.torch = sys.modules["torch"]
        self._dtypes = {
            torch.float16: "float16", torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.uint8: "uint8"
        }
        self._named = {name: dtype for dtype, name in self._dtypes.items()}
        self._current_stream = torch._C._cuda_getCurrentRawStream if torch.cuda.is_available() else None
        self._new = torch.empty

    def signature(self, array: Any) -> Signature:
        return array.shape, array.dtype, array.get_device()

    def dtype_name(self, dtype: Any) -> str:
        return self._dtypes.get(dtype) or str(dtype).removeprefix("torch.")

    def type_name(self, signature: Signature) -> str:
        words = {"float16": "Half", "float32": "Float", "float64": "Double", "bfloat16": "BFloat16"}
        dtype = words.get(self.dtype_name(signature[1]), self.dtype_name(signature[1]))
        return f"torch.{'' if signature[2] == -1 else 'cuda.'}{dtype}Tensor"

    def device(self, signature: Signature, device: Any) -> Device:
        return get_device(device) if signature[2] == -1 else DeviceKind.device(self, signature, device)

    def convolve(self, plan: Plan, input: Any, weight: Any, bias: Any, out: Any, stream: Any) -> Any:
        torch = self.torch
        if torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)):
            raise NotImplementedError(
                "these functions have no gradients yet: call them inside torch.no_grad(), or pass input.detach() and weight.detach()"
            )
        if input.is_cuda:
            return DeviceKind.convolve(self, plan, input, weight, bias, out, stream)
        return HostKind.convolve(self, plan, input, weight, bias, out, stream)

    # host tensors

    def to_numpy(self, array: Any) -> np.ndarray:
        return array.detach().resolve_neg().numpy()

    def from_numpy(self, array: np.ndarray) -> Any:
        return self.torch.from_numpy(array)

    # device tensors

    def pointer(self, array: Any) -> int:
        return array.data_ptr()

    def strides(self, array: Any) -> tuple[int, ...]:
        return tuple(s * array.element_size() for s in array.stride())

    def contiguous(self, array: Any) -> bool:
        return array.is_contiguous()

    def copy(self, array: Any) -> Any:
        return array.detach().clone(memory_format=self.torch.contiguous_format)

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any, device: Any) -> Any:
        return self._new(shape, dtype=self._named[dtype], device=like.device)

    def current_stream(self, array: Any) -> Any:
        assert self._current_stream is not None
        return self._current_stream(array.get_device())


def _c_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    strides = []
    for n in reversed(tuple(shape)):
        strides.append(itemsize)
        itemsize *= n
    return tuple(reversed(strides))


def _is_contiguous(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    return 0 in tuple(shape) or all(
        n == 1 or given == wanted for n, given, wanted in zip(shape, strides, _c_strides(shape, itemsize), strict=True)
    )


# ---- which kind an object is


_kinds: dict[type, ArrayKind] = {}
_by_name: dict[type[ArrayKind], ArrayKind] = {}


def kind_of(name: str, array: Any) -> ArrayKind:
    """The kind of `array`, the argument called `name`; a ``TypeError`` for anything that is no array of ours."""
    kind = _kinds.get(type(array))
    if kind is None:
        cls = _kind_class(array)
        if cls is None:
            raise TypeError(
                f"{name} must be a numpy.ndarray, a torch.Tensor, a cupy.ndarray, a pycuda.gpuarray.GPUArray or an object with "
                f"__cuda_array_interface__, but got {type(array).__module__}.{type(array).__qualname__}"
            )
        kind = _kinds[type(array)] = _by_name.get(cls) or _by_name.setdefault(cls, cls())
    return kind


def _kind_class(array: Any) -> type[ArrayKind] | None:
    if isinstance(array, np.ndarray):
        return None if isinstance(array, np.ma.MaskedArray) else NumpyKind
    # a library that was never imported made none of the arguments
    torch, cupy, gpuarray = (sys.modules.get(module) for module in ("torch", "cupy", "pycuda.gpuarray"))
    if torch is not None and isinstance(array, torch.Tensor):
        return TorchKind
    if cupy is not None and isinstance(array, cupy.ndarray):
        return CupyKind
    if gpuarray is not None and isinstance(array, gpuarray.GPUArray):
        return GPUArrayKind
    return InterfaceKind if hasattr(array, "__cuda_array_interface__") else None


def same_kind(input: Any, weight: Any, bias: Any, out: Any) -> ArrayKind:
    """The kind of all the arrays of a call; mixing kinds is a ``TypeError``."""
    kind = kind_of("input", input)
    for name, array in (("weight", weight), ("bias", bias), ("out", out)):
        if array is not None or name == "weight":
            other = kind_of(name, array)
            if other is not kind:
                raise TypeError(f"input is a {kind.name} but {name} is a {other.name}; pass arrays of one kind")
    return kind


def check_same_type(kind: ArrayKind, input: Signature, weight: Signature, bias: Signature | None) -> None:
    """Refuse dtypes or devices that differ."""
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and (kind.dtype_name(other[1]) != kind.dtype_name(input[1]) or other[2] != input[2]):
            where = f" on cuda:{input[2]} and cuda:{other[2]}" if input[2] not in (None, -1) and other[2] not in (-1, input[2]) else ""
            raise ConvArgumentError(
                f"Input type ({kind.type_name(input)}) and {name} type ({kind.type_name(other)}) should be the same{where}"
            )


def stream_of(stream: Any) -> Any:
    """The caller's `stream` as :meth:`CudaDevice.launch_on` takes it: a PyCUDA stream, or a handle."""
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
    raise TypeError(f"stream must be a stream of PyCUDA, torch or CuPy, or a handle as an int, got {stream!r}")


def call_plan(plan: Plan, input: Any, weight: Any, bias: Any, out: Any, stream: Any) -> Any:
    """Check that the arrays fit `plan` and run it."""
    kind = same_kind(input, weight, bias, out)
    problem: ConvProblem = plan.problem
    signatures = [None if a is None else kind.signature(a) for a in (input, weight, bias)]
    check_same_type(kind, signatures[0], signatures[1], signatures[2])  # type: ignore[arg-type]
    expected = (("input", problem.input_shape), ("weight", problem.weight_shape), ("bias", problem.bias_shape))
    for (name, shape), signature in zip(expected, signatures, strict=True):
        given = None if signature is None else tuple(signature[0])
        if given != shape:
            raise ConvArgumentError(f"this plan takes {name} of shape {shape}, but got {given}")
        if signature is not None and kind.dtype_name(signature[1]) != problem.dtype:
            raise ConvArgumentError(f"this plan takes {problem.dtype} arrays, but {name} is {kind.dtype_name(signature[1])}")
    if kind.device(signatures[0], None if signatures[0][2] not in (None, -1) else plan.device.name) is not plan.device:  # type: ignore[arg-type, index]
        raise ConvArgumentError(f"this plan is for {plan.device.name}, but the arrays lie elsewhere")
    return kind.convolve(plan, input, weight, bias, out, stream)


__all__ = ["BackendError", "DeviceMemoryError", "call_plan", "check_same_type", "kind_of", "same_kind"]
