"""The kind of torch's tensors; the module is imported where there are tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pycuda_conv import repeat
from pycuda_conv.arrays import torch_internals
from pycuda_conv.arrays.base import Signature, strides_of
from pycuda_conv.arrays.device import DeviceKind
from pycuda_conv.arrays.host import HostKind, Memory
from pycuda_conv.call import Operands
from pycuda_conv.elements import INTEGER_BYTES
from pycuda_conv.errors import ConvArgumentError, no_memory
from pycuda_conv.problem import channels_last
from pycuda_conv.runtime import Device, contexts, get_device


def _memory(tensor: Any, pointer: int, typestr: str, size: int) -> Memory:
    """The memory of a tensor, for numpy: ``tensor.numpy()`` and ``torch.from_numpy()`` would forbid torch to resize it from then on."""
    return Memory(tensor, pointer, tensor.shape, tuple([size * step for step in tensor.stride()]), typestr)


class TorchKind(DeviceKind, HostKind):
    """torch tensors, on a GPU or in host memory."""

    name = "torch.Tensor"
    remembered = True
    conversion = "{}.to(torch.{})"

    def __init__(self) -> None:
        repeat.learn(torch)
        self.pointer = torch.Tensor.data_ptr  # type: ignore[method-assign]  # a method around it would take 0.1 us
        self._dtypes = {
            torch.float16: "float16", torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16",
        }
        #: numpy's words for the elements, and their bytes; a bfloat16 is seen as an integer
        self._typestrs = {torch.float16: ("=f2", 2), torch.float32: ("=f4", 4), torch.float64: ("=f8", 8), torch.bfloat16: ("=i2", 2)}
        for name, size in INTEGER_BYTES.items():
            dtype = getattr(torch, name, None)  # older versions have no wide unsigned integers
            if dtype is not None:
                self._dtypes[dtype], self._typestrs[dtype] = name, (np.dtype(name).str, size)
        self._of_names = {name: dtype for dtype, name in self._dtypes.items()}
        self._plain = {torch.Tensor, torch.nn.Parameter}
        self._levels = torch_internals.levels
        self._increment_version = torch.autograd.graph.increment_version
        self._formats = {(0, 2, 3, 1): torch.channels_last, (0, 2, 3, 4, 1): torch.channels_last_3d}
        self._current_stream: Any = torch_internals.current_stream

    def signature(self, array: Any) -> Signature:
        try:
            place = array.get_device()
            return array.shape, array.dtype, contexts.where_lies(place, array.data_ptr) if array.is_cuda else place
        except RuntimeError:  # a nested tensor has no shape
            self.check_dense(array)
            raise

    def check_dense(self, *arrays: Any) -> None:
        # a fast call asks this after it failed: asking each time would take 0.1 us
        for array in arrays:
            if array is None:
                continue
            if array.is_nested:
                raise TypeError("nested tensors are not supported; pass a dense one, as torch.nested.to_padded_tensor makes it")
            shape = list(array.shape)
            if array.layout is not torch.strided:
                raise TypeError(f"a tensor of shape {shape} has the layout {array.layout}, which is not supported; pass its to_dense()")
            if array.is_meta:
                raise TypeError(f"a tensor of shape {shape} lies on the device 'meta', so it has no values to convolve")

    def dtype_name(self, dtype: Any) -> str:
        return self._dtypes.get(dtype) or str(dtype).removeprefix("torch.")

    def dtype_of(self, name: str) -> Any:
        return self._of_names[name]

    def type_name(self, signature: Signature) -> str:
        words = {"float16": "Half", "float32": "Float", "float64": "Double", "bfloat16": "BFloat16"}
        dtype = words.get(self.dtype_name(signature[1]), self.dtype_name(signature[1]))
        return f"torch.{'' if signature[2] == -1 else 'cuda.'}{dtype}Tensor"

    def device(self, signature: Signature, device: Any) -> Device:
        return get_device(device) if signature[2] == -1 else DeviceKind.device(self, signature, device)

    def layout(self, array: Any, ndim: int) -> str:
        if array.layout is not torch.strided or array.is_nested:
            return "NCHW"
        if array.is_contiguous():  # a single channel lies in either order: as for torch, its stride says which is meant
            axis = array.dim() - ndim - 1
            last = axis in (0, 1) and array.shape[axis] == array.stride(axis) == 1 and math.prod(array.shape[axis + 1 :]) > 1
            return "NHWC" if last else "NCHW"
        order = channels_last(array.dim(), ndim)
        return "NHWC" if order is not None and self._without_gaps(array, order) else "NCHW"

    def _without_gaps(self, array: Any, order: tuple[int, ...]) -> bool:
        memory_format = self._formats.get(order)  # permute() takes 1 us
        return array.permute(order).is_contiguous() if memory_format is None else array.is_contiguous(memory_format=memory_format)

    # calls that torch has to know of

    # (a loop over the tensors would take a microsecond)

    def differentiated(self, first: Any, second: Any, bias: Any, scale: Any, residual: Any) -> bool:
        """Whether torch has to give gradients of a result of these arrays, or may be asked to carry them forward, which it refuses."""
        return self._levels._current_level >= 0 or (
            torch.is_grad_enabled() and (
                first.requires_grad or second.requires_grad or (bias is not None and bias.requires_grad)
                or (scale is not None and scale.requires_grad) or (residual is not None and residual.requires_grad)
            )
        )

    def traced(self, first: Any, second: Any, bias: Any, scale: Any = None, residual: Any = None) -> bool:
        """Whether the call is compiled, traced, transformed or seen by a mode, or one of the tensors is not a plain one with numbers."""
        plain = self._plain
        return (
            torch.compiler.is_compiling() or torch_internals.count_of_modes() > 0 or torch_internals.transforms_are_active()
            or torch_internals.tracing_state() is not None  # torch.jit.trace
            or type(first) not in plain or type(second) not in plain or (bias is not None and type(bias) not in plain)
            or (scale is not None and type(scale) not in plain) or (residual is not None and type(residual) not in plain) or first.is_meta
        )

    def must_be_recorded(self, operands: Operands, free: bool) -> bool:
        if self.differentiated(*operands) or self.traced(*operands):
            if not free:
                raise ConvArgumentError(
                    "out, stream and devices don't go with gradients, torch.compile and the like: leave them out, call inside "
                    "torch.no_grad(), or pass input.detach() and weight.detach()"
                )
            if not operands.input.is_meta:
                self.check_dense(*operands)
            return True
        # torch casts nothing for its own functions with out=
        return free and bool(torch.is_autocast_enabled("cuda" if operands.input.is_cuda else "cpu"))

    def check_not_recorded(self, operands: Operands) -> None:
        if self.differentiated(*operands):
            raise NotImplementedError(
                "a plan computes no gradients: call it inside torch.no_grad(), pass detached tensors, or call a function such as "
                "pycuda_conv.conv2d"
            )

    def check_no_gradient(self, arrays: Sequence[Any]) -> None:
        if torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in arrays):
            raise NotImplementedError("this has no gradients of its own: call it inside torch.no_grad(), or pass detached tensors")

    def will_write(self, out: Any) -> None:
        """Raise the version of `out`, by which torch notices that a tensor kept for a backward pass was overwritten."""
        if out.requires_grad and torch.is_grad_enabled():
            raise ConvArgumentError(
                "out requires a gradient, and a result written to out has none: leave out away, pass out.detach(), or call inside "
                "torch.no_grad()"
            )
        if not out.is_inference():
            self._increment_version(out)
        elif not torch.is_inference_mode_enabled():
            raise ConvArgumentError(
                "out was made in torch.inference_mode() and can be written only there; pass a tensor made outside, or out.clone()"
            )

    def to_pickle(self, array: Any) -> Any:
        return array.detach()

    # host tensors

    def to_numpy(self, array: Any, name: str) -> np.ndarray:
        elements = self._typestrs.get(array.dtype)
        if elements is None or array.layout is not torch.strided or not array.is_cpu:
            seen: np.ndarray = array.detach().numpy()  # torch says what is wrong
            return seen
        if array.is_neg():
            array = array.detach().resolve_neg()
        pointer = array.data_ptr()
        if not pointer and array.numel():  # numpy would take memory of its own for it
            raise ConvArgumentError(no_memory(name))
        return np.asarray(_memory(array, pointer, *elements))

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype, name: str = "") -> np.ndarray:
        tensor = torch.empty(shape, dtype=self._of_names[name or str(dtype)])
        return np.asarray(_memory(tensor, tensor.data_ptr(), dtype.str, dtype.itemsize))

    def converted(self, array: Any, dtype: str) -> Any:
        return array.detach().to(self._of_names[dtype])

    def from_numpy(self, array: np.ndarray, dtype: str) -> Any:
        memory: Any = array.base
        while isinstance(memory, np.ndarray):
            memory = memory.base
        if not isinstance(memory, Memory):  # it is page-locked, or was copied
            tensor = torch.from_numpy(array)
            return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
        tensor = memory.owner
        if array.shape != tensor.shape or array.strides != memory.__array_interface__["strides"]:
            tensor = tensor.as_strided(array.shape, [step // array.itemsize for step in array.strides])
        return tensor

    def in_order(self, array: Any, order: tuple[int, ...]) -> Any:
        return self.empty(array.shape, array, None, order).copy_(array)

    # device tensors

    def strides(self, array: Any) -> tuple[int, ...]:
        return tuple(s * array.element_size() for s in array.stride())

    def contiguous(self, array: Any) -> bool:
        return array.is_contiguous() and not array.is_neg()  # a view of a conjugate's imaginary part is negated when it is read

    def writeable(self, array: Any) -> bool:
        return not array.is_neg()

    def is_laid_out_as(self, array: Any, order: tuple[int, ...] | None) -> bool:
        return self.contiguous(array) if order is None else self._without_gaps(array, order) and not array.is_neg()

    def copy(self, array: Any, order: tuple[int, ...] | None = None) -> Any:
        return self.empty(array.shape, array, None, order).copy_(array.detach())

    def fill(self, array: Any, values: Any) -> None:
        with torch.inference_mode():  # every tensor may be written in this mode, as it may by kernels
            array.copy_(values)

    def empty(
        self, shape: tuple[int, ...], like: Any, device: Any, order: tuple[int, ...] | None = None, dtype: str | None = None
    ) -> Any:
        of = {} if dtype is None else {"dtype": self._of_names[dtype]}
        return like.new_empty(shape, **of) if order is None else like.new_empty_strided(shape, strides_of(shape, 1, order), **of)

    def maker(self, shape: tuple[int, ...], dtype: Any, device: Any, order: tuple[int, ...] | None) -> tuple[Any, tuple[Any, ...], Any]:
        """A function, its arguments and keywords, which make what :meth:`empty` makes, in less time.

        The function may allocate on torch's current GPU whatever `device` is: the one that torch calls in code that it compiles does so.
        It bypasses torch's dispatcher and keeps the GIL.
        """
        strides = strides_of(shape, 1, order or tuple(range(len(shape))))
        make = torch_internals.empty_strided(device.type)
        if make is None:
            return torch.empty_strided, (shape, strides), {"dtype": dtype, "device": device}
        return make, (shape, strides, dtype), None

    def for_launcher(
        self, shape: tuple[int, ...], like: Any, device: Any, order: tuple[int, ...] | None, nbytes: int, dtype: str | None = None
    ) -> tuple[Any, ...]:
        workspace = self.maker((nbytes,), torch.uint8, like.device, None) if nbytes else None
        of = like.dtype if dtype is None else self._of_names[dtype]
        return self._current_stream, like.get_device(), self.maker(shape, of, like.device, order), workspace

    def current_stream(self, device: Any) -> Any:
        return self._current_stream(device.ordinal)

    def on_gpu(self, array: Any) -> bool:
        return bool(array.is_cuda)


#: The kind of all tensors.
TORCH = TorchKind()
