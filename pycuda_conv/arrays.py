"""The caller's arrays: what they are, who owns their memory, which stream they live on.

Each class here adapts one kind of array to the plans, which see addresses only. The result is of the input's kind and
comes from that kind's own allocator.

Layouts. The problem has one for input and result: C order (NCHW) or channels last (NHWC). In a call of :mod:`ops` the input
decides: a torch tensor that is channels last, as ``torch.channels_last`` and ``channels_last_3d`` make it, or
``x.transpose(1, 2)`` of a contiguous (N, W, C) tensor, gives a result that is, and so has its `out` to be. All else counts
as NCHW: other kinds of array, and tensors that are both, with one channel or one pixel. The filter has no say, unlike in
torch. The result's layout says nothing of the kernels: where those that read NCHW are faster by more than the copies take,
the input is copied to that order and the result is put into its own, and so it always is with
tensors in host memory. A plan keeps the layout of its problem. Arrays that lie in another way than these, filters that are
neither in C order nor in one that the plan's kernels read, and arrays whose address is not a multiple of 16 bytes, are copied first.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pycuda_conv import host, quick
from pycuda_conv.engines.geometry import divider
from pycuda_conv.errors import ConvArgumentError, brief
from pycuda_conv.problem import DTYPE_BYTES, DTYPE_CODES, channels_last
from pycuda_conv.runtime import Device, KernelLaunch, cuda_device, device_of_pointer, get_device
from pycuda_conv.runtime.base import Launcher

if TYPE_CHECKING:
    from pycuda_conv.plan import Plan

#: (shape, dtype, GPU number or None for host memory), hashable, cheap to make: what a call is cached by.
Signature = tuple[Any, Any, int | None]

ALIGNMENT = 16  # bytes; the kernels load four floats at once

#: A filter (weight, bias, scale), a function of (input, out, stream, residual) that convolves with it, and the array that holds it packed.
Bound = tuple[tuple[Any, Any, Any], Callable[..., Any], Any]

#: What a convolution reads, in the order of its arguments.
OPERANDS = ("input", "weight", "bias", "scale", "residual")


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

    def layout(self, array: Any, ndim: int) -> str:
        """The layout of the result where `array` is the input, which has `ndim` spatial axes."""
        return "NCHW"

    def recorder(self, first: Any, second: Any, bias: Any, scale: Any, residual: Any, free: bool) -> Any:
        """The module whose functions make of a call an operator of the library's own, where that has to know of it; or None.

        `free` says that nothing was asked of the call which an operator can't do.
        """
        return None

    def check_not_recorded(self, first: Any, second: Any, bias: Any = None, scale: Any = None, residual: Any = None) -> None:
        """Refuse arrays whose library has to know of the call, where a plan is called, of which it can't know."""

    def check_dense(self, *arrays: Any) -> None:
        """Refuse arrays whose elements do not lie in memory one by one, as a sparse one's."""

    def will_write(self, out: Any) -> None:
        """Tell the library of `out` that kernels are about to write to it, or refuse what the library would refuse."""

    def convolve(
        self, plan: Plan, input: Any, weight: Any, bias: Any, out: Any, stream: Any, *, scale: Any = None, residual: Any = None
    ) -> Any:
        """Run `plan` on arrays that fit it."""
        raise NotImplementedError

    def bind(self, plan: Plan, weight: Any, bias: Any, scale: Any = None) -> Bound:
        """The filter, which stays where the kernels read it, and a function of (input, out, stream, residual) that runs `plan` with it."""
        return (weight, bias, scale), lambda input, out, stream, residual=None: self.convolve(
            plan, input, weight, bias, out, stream, scale=scale, residual=residual
        ), None

    def to_pickle(self, array: Any) -> Any:
        """`array` as something that can be pickled."""
        return array

    @staticmethod
    def from_pickle(pickled: Any, device: Any) -> Any:
        """The way back. The device must be current."""
        return pickled

    def empty(self, shape: tuple[int, ...], like: Any, device: Any, order: tuple[int, ...] | None = None) -> Any:
        """An array of the dtype of `like` from the kind's own allocator, with the axes in that order."""
        raise NotImplementedError

    def ready(self, array: Any, order: tuple[int, ...] | None) -> Any:
        """`array` if its axes lie in memory in that order, outermost first, and kernels can read it so; else a copy that does.

        The device must be current.
        """
        raise NotImplementedError

    def run(
        self, device: Any, launch: Launcher, inputs: Sequence[Any], outs: Sequence[Any], workspace: int, stream: Any = None
    ) -> None:
        """Call `launch` with buffers (inputs, outs, workspace). The arrays have no gaps; any but the first may be None."""
        raise NotImplementedError


def _check_out_shape(out_shape: Sequence[int], out_dtype: str, plan: Plan) -> None:
    if tuple(out_shape) != plan.result_shape:
        raise ConvArgumentError(f"out must have shape {list(plan.result_shape)}, but got out of shape {list(out_shape)}")
    if out_dtype != plan.problem.dtype:
        raise ConvArgumentError(f"out must have dtype {plan.problem.dtype}, the input's, but got {out_dtype}")


#: A residual may be `out` itself, element by element: each is read before it is written.
_OVERLAP = "out overlaps {} in memory; the result can't be written over what is still being read"


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays of one shape are the same memory, element by element."""
    interfaces = one.__array_interface__, other.__array_interface__
    return interfaces[0]["data"][0] == interfaces[1]["data"][0] and one.strides == other.strides and one.dtype == other.dtype


def _not_contiguous(order: tuple[int, ...] | None, strides: Sequence[int], shape: Sequence[int]) -> str:
    wanted = "C-contiguous" if order is None else "channels last, as the result is"
    return f"out must be {wanted}, but its strides are {tuple(strides)} for shape {list(shape)}"


def _order(plan: Plan, layout: str) -> tuple[int, ...] | None:
    """The axes of the plan's result as they lie in memory in that layout, outermost first; None for C order."""
    if layout != "NHWC" or plan.problem.direction == "wgrad":
        return None
    return channels_last(len(plan.result_shape), plan.problem.ndim)


# ---- host arrays


class HostKind(ArrayKind):
    """Arrays in the host's memory, seen as numpy arrays; those of bfloat16, which numpy does not know, as integers."""

    def to_numpy(self, array: Any) -> np.ndarray:
        raise NotImplementedError

    def from_numpy(self, array: np.ndarray, like: Any) -> Any:
        """The way back: an array of the dtype of `like`."""
        raise NotImplementedError

    def writeable(self, array: Any) -> bool:
        """Whether what is written to :meth:`to_numpy` of `array` shows in `array`."""
        return True

    def in_order(self, array: Any, order: tuple[int, ...]) -> Any:
        """A copy of `array` whose axes lie in memory in that order, outermost first."""
        raise NotImplementedError

    def run(
        self, device: Any, launch: Launcher, inputs: Sequence[Any], outs: Sequence[Any], workspace: int, stream: Any = None
    ) -> None:
        if stream is not None:
            raise ConvArgumentError(f"stream is for arrays on a GPU, but these lie in host memory; got stream={brief(stream)}")

        def as_they_lie(arrays: Sequence[Any]) -> list[np.ndarray | None]:
            return [None if a is None else self.to_numpy(a).ravel(order="K") for a in arrays]

        device.update_host_arrays(launch, as_they_lie(inputs), as_they_lie(outs), workspace)

    def device(self, signature: Signature, device: Any) -> Device:
        return get_device(device)

    def convolve(
        self, plan: Plan, input: Any, weight: Any, bias: Any, out: Any, stream: Any, *, devices: Sequence[Any] = (),
        kept: host.Filter | None = None, layout: str = "", scale: Any = None, residual: Any = None,
    ) -> Any:
        """As :meth:`ArrayKind.convolve`. The result has the `layout`, by default the plan's."""
        layout = layout or plan.problem.layout
        order = _order(plan, layout)
        turned = layout != plan.problem.layout  # the plan's result is to be put in order
        given = [None if a is None else self.to_numpy(a) for a in (input, weight, bias, scale, residual)]
        target = None
        if out is not None:
            shape, dtype, _ = self.signature(out)
            _check_out_shape(shape, self.dtype_name(dtype), plan)
            target = self.to_numpy(out)
            if not target.dtype.isnative:
                raise ConvArgumentError(f"out must have the machine's byte order, but its dtype is {target.dtype.str}")
            if not target.flags.writeable or not self.writeable(out):
                raise ConvArgumentError("out is read-only; pass a writeable array")
            if not (target if order is None else target.transpose(order)).flags.c_contiguous:
                raise ConvArgumentError(_not_contiguous(order, target.strides, target.shape))
            for name, array in zip(OPERANDS, given, strict=True):
                if array is not None and np.may_share_memory(target, array) and not (name == "residual" and _same(target, array)):
                    raise ConvArgumentError(_OVERLAP.format(name))
            self.will_write(out)
        x, w, b, s, r = given
        assert x is not None and w is not None
        place, filters = None if turned else target, kept or host.Filter(w, b, s)
        result = host.convolve(plan, x, filters, place, None if stream is None else stream_of(stream), devices, r)
        if target is not None:
            if turned:
                np.copyto(target, result)
            return out
        made = self.from_numpy(result, input)
        return self.in_order(made, order) if turned and order else made

    def bind(self, plan: Plan, weight: Any, bias: Any, scale: Any = None) -> Bound:
        given = (weight, bias, scale)
        copies = [None if a is None else self.to_numpy(a).copy() for a in given]
        assert copies[0] is not None
        filters = host.Filter(copies[0], copies[1], copies[2])
        if plan.device.backend == "cuda":
            filters.keep(plan)
        w, b, s = (None if copy is None else self.from_numpy(copy, a) for copy, a in zip(copies, given, strict=True))
        return (w, b, s), lambda input, out, stream, residual=None: self.convolve(
            plan, input, w, b, out, stream, kept=filters, scale=s, residual=residual
        ), None


class NumpyKind(HostKind):
    name = "numpy.ndarray"

    def signature(self, array: np.ndarray) -> Signature:
        return array.shape, array.dtype, None

    def dtype_name(self, dtype: np.dtype) -> str:
        return dtype.name  # the same for both byte orders

    def to_numpy(self, array: np.ndarray) -> np.ndarray:
        if array.dtype.kind != "V":  # which the bfloat16 of ml_dtypes is; asking for a dtype's name takes 2 us
            return array
        return array.view(np.dtype(np.int16).newbyteorder(array.dtype.byteorder))

    def from_numpy(self, array: np.ndarray, like: np.ndarray) -> np.ndarray:
        return array.view(like.dtype.newbyteorder("=")) if like.dtype.kind == "V" else array

    def empty(self, shape: tuple[int, ...], like: Any, device: Any, order: tuple[int, ...] | None = None) -> Any:
        return np.empty(shape, like.dtype.newbyteorder("="))

    def ready(self, array: np.ndarray, order: tuple[int, ...] | None) -> np.ndarray:
        return np.ascontiguousarray(array, array.dtype.newbyteorder("="))


# ---- device arrays


class DeviceKind(ArrayKind):
    """Arrays in a GPU's memory."""

    #: whether :meth:`producer` has anything to say
    has_producers = False
    #: whether its memory comes from PyCUDA, which asks for a context that PyCUDA made current
    uses_pycuda = False

    def pointer(self, array: Any) -> int:
        raise NotImplementedError

    def strides(self, array: Any) -> tuple[int, ...]:
        """Strides in bytes."""
        raise NotImplementedError

    def contiguous(self, array: Any) -> bool:
        """Whether the memory at :meth:`pointer` holds the elements in C order."""
        raise NotImplementedError

    def lies(self, array: Any, order: tuple[int, ...] | None) -> bool:
        """Whether it holds them with the axes in that order, outermost first; None is C order."""
        if order is None:
            return self.contiguous(array)
        (shape, dtype, _), strides = self.signature(array), self.strides(array)
        return _is_contiguous([shape[i] for i in order], [strides[i] for i in order], DTYPE_BYTES[self.dtype_name(dtype)])

    def writeable(self, array: Any) -> bool:
        return True

    def copy(self, array: Any, order: tuple[int, ...] | None = None) -> Any:
        """An aligned copy of the same kind with the axes in that order."""
        raise NotImplementedError

    def ready(self, array: Any, order: tuple[int, ...] | None) -> Any:
        if self.pointer(array) % ALIGNMENT == 0 and self.lies(array, order):
            return array
        return self.copy(array, order)

    def run(
        self, device: Any, launch: Launcher, inputs: Sequence[Any], outs: Sequence[Any], workspace: int, stream: Any = None
    ) -> None:
        with device:
            home = self.current_stream(device)
            for array in inputs if self.has_producers else ():
                producer = None if array is None else self.producer(array)
                if producer is not None:
                    device.order(producer, home)
            buffers = [0 if array is None else self.pointer(array) for array in (*inputs, *outs)]
            scratch = self.workspace(workspace, inputs[0], device) if workspace else None
            buffers.append(0 if scratch is None else self.pointer(scratch))
            on = home if stream is None else stream_of(stream)
            if stream is not None:  # memory of the current stream's is used on another
                device.order(home, on)
            launch(buffers, on)
            if stream is not None:
                device.order(on, home)

    def workspace(self, nbytes: int, like: Any, device: Any) -> Any:
        """An array of at least `nbytes`, likewise."""
        return self.empty((-(-nbytes // DTYPE_BYTES[self.dtype_name(like.dtype)]),), like, device)

    def current_stream(self, device: Any) -> Any:
        """The stream of `device` with which the caller's work and the kind's allocator are ordered."""
        raise NotImplementedError

    def producer(self, array: Any) -> Any:
        """The stream on which `array` is being written, where that may be another than the current one; else None."""
        return None

    def device(self, signature: Signature, device: Any) -> Device:
        ordinal = signature[2]
        assert ordinal is not None
        own = cuda_device(ordinal)
        if device is not None and get_device(device) is not own:
            asked = get_device(device).name
            raise ConvArgumentError(f"device {asked} was asked for, but the input lies on {own.name}; move the arrays there first")
        return own

    def fill(self, array: Any, values: Any) -> None:
        """Write `values` into `array`, whose elements may lie in another order."""
        raise NotImplementedError

    def convolve(
        self, plan: Plan, input: Any, weight: Any, bias: Any, out: Any, stream: Any, *, packed: Any = None, layout: str = "",
        scale: Any = None, residual: Any = None,
    ) -> Any:
        """As :meth:`ArrayKind.convolve`. The result has the `layout`, by default the plan's; `packed` is what :meth:`_pack` made."""
        if layout and layout != plan.problem.layout:
            return self._turned(plan, (input, weight, bias, scale, residual), out, stream, _order(plan, layout))
        device: Any = plan.device
        pointer, contiguous, order = self.pointer, self.contiguous, plan.order
        pushed = self.uses_pycuda or not device.is_current()
        if pushed:
            device.push()
        try:
            x, w, b = pointer(input), pointer(weight), 0 if bias is None else pointer(bias)
            s, r = 0 if scale is None else pointer(scale), 0 if residual is None else pointer(residual)
            home = self.current_stream(device)
            on = home if stream is None else stream_of(stream)
            if self.has_producers:
                for array in (input, weight, bias, scale, residual, out):
                    producer = None if array is None else self.producer(array)
                    if producer is not None:
                        device.order(producer, home)
            copies = {}
            if x % ALIGNMENT or not (contiguous(input) if order is None else self.lies(input, order)):
                copies["input"] = input
            filter_last = plan.reads_filter_last and packed is None and not w % ALIGNMENT and self.lies(weight, plan.filter_order)
            if not filter_last and (w % ALIGNMENT or not self.lies(weight, plan.weight_order)):
                copies["weight"] = weight
            if bias is not None and not contiguous(bias):
                copies["bias"] = bias
            if scale is not None and not contiguous(scale):
                copies["scale"] = scale
            if residual is not None and (r % ALIGNMENT or not self.lies(residual, order)):
                copies["residual"] = residual
            if out is not None:
                operands = input, weight, bias, scale, residual
                residual_is_out = self._check_out(out, plan, plan.result_order, operands, (x, w, b, s, r), copies)
                if residual_is_out and plan.redoes:
                    copies["residual"] = residual
            if copies:
                if stream is not None:  # what is copied may still be written there
                    device.order(on, home)
                orders = {"input": order, "residual": order, "weight": plan.weight_order}
                copies = {name: self.copy(a, orders.get(name)) for name, a in copies.items()}
                named = zip(OPERANDS, (x, w, b, s, r), strict=True)
                x, w, b, s, r = (pointer(copies[name]) if name in copies else at for name, at in named)
            result = self.empty(plan.result_shape, input, device, plan.result_order) if out is None else out
            if not plan.empty:
                nbytes, at = (plan.workspace_bytes, 0) if packed is None else (plan.schedule.workspace_bytes, pointer(packed))
                workspace = self.workspace(nbytes, input, device) if nbytes else None
                buffers = (x, w, b, pointer(result), 0 if workspace is None else pointer(workspace))
                if stream is None:
                    plan.launch(buffers, on, at, s, r, filter_last)
                else:  # memory of the current stream's is used on another: it was written before and is given back after
                    device.order(home, on)
                    plan.launch(buffers, on, at, s, r, filter_last)
                    if out is None or copies or workspace is not None or at:
                        device.order(on, home)
            return result
        finally:
            if pushed:
                device.pop()

    def _turned(self, plan: Plan, operands: Sequence[Any], out: Any, stream: Any, order: tuple[int, ...] | None) -> Any:
        """As :meth:`convolve`, the plan's result being put into that order at the end."""
        device: Any = plan.device
        if out is not None:
            self._check_out(out, plan, order, operands, [0 if a is None else self.pointer(a) for a in operands], OPERANDS)
        input, weight, bias, scale, residual = operands
        made = DeviceKind.convolve(self, plan, input, weight, bias, None, stream, scale=scale, residual=residual)
        with device:
            if out is None:
                result = self.copy(made, order)
            else:  # the current stream, whose memory `made` is, waits for the caller's by now
                self.fill(out, made)
                result = out
            if stream is not None:
                device.order(self.current_stream(device), stream_of(stream))
        return result

    def bind(self, plan: Plan, weight: Any, bias: Any, scale: Any = None) -> Bound:
        if not plan.filter_bytes:
            return ArrayKind.bind(self, plan, weight, bias, scale)
        weight, packed = self._pack(plan, weight)
        return (weight, bias, scale), lambda input, out, stream, residual=None: self.convolve(
            plan, input, weight, bias, out, stream, packed=packed, scale=scale, residual=residual
        ), packed

    def _pack(self, plan: Plan, weight: Any) -> tuple[Any, Any]:
        """Copies of a filter, as it is, which the kernels may look up, and packed. Every stream may use them."""
        device: Any = plan.device
        with device:
            home, own = self.current_stream(device), device.pipeline_streams()[1]
            producer = self.producer(weight) if self.has_producers else None
            if producer is not None:
                device.order(producer, home)
            weight = self.copy(weight)
            packed = self.workspace(plan.filter_bytes, weight, device)
            device.order(home, own)
            plan.pack(self.pointer(weight), self.pointer(packed), own)
            own.synchronize()
        return weight, packed

    def _check_out(
        self, out: Any, plan: Plan, order: tuple[int, ...] | None, operands: Sequence[Any], pointers: Sequence[int],
        strided: Collection[str],
    ) -> bool:
        """Refuse an `out` that the result can't be written to, and announce the write; whether `out` is the residual.

        Operands that are not named in `strided` lie without gaps.
        """
        signature = shape, dtype, ordinal = self.signature(out)
        if signature != plan.accepted_out.get(self):
            _check_out_shape(shape, self.dtype_name(dtype), plan)
            if ordinal != plan.device.ordinal:  # type: ignore[attr-defined]
                raise ConvArgumentError(f"out must lie on {plan.device.name}, as the input does, but it does not")
            plan.accepted_out[self] = signature
        if not self.writeable(out):
            raise ConvArgumentError("out is read-only; pass a writeable array")
        if not self.lies(out, order):
            raise ConvArgumentError(_not_contiguous(order, self.strides(out), shape))
        start = self.pointer(out)
        if start % ALIGNMENT:
            raise ConvArgumentError(f"out must start at a multiple of {ALIGNMENT} bytes, but its address is {start:#x}")
        end = start + plan.result_bytes
        residual = operands[4]
        same = residual is not None and pointers[4] == start and self.lies(residual, order)
        for name, array, low, nbytes in zip(OPERANDS, operands, pointers, plan.operand_bytes, strict=True):
            if array is None or (same and name == "residual"):
                continue
            first, last = (low, low + nbytes) if name not in strided or self.contiguous(array) else self._span(array, low)
            if first < end and start < last:
                raise ConvArgumentError(_OVERLAP.format(name))
        self.will_write(out)
        return same

    def _span(self, array: Any, pointer: int) -> tuple[int, int]:
        """The addresses of the first byte of a strided `array` and of the one after its last; `pointer` is its first element's."""
        shape, dtype, _ = self.signature(array)
        steps = [(n - 1) * s for n, s in zip(shape, self.strides(array), strict=True)]
        before, after = sum(s for s in steps if s < 0), sum(s for s in steps if s > 0)
        return pointer + before, pointer + after + DTYPE_BYTES[self.dtype_name(dtype)]


class CopyArguments(NamedTuple):
    """The struct of ``copy_strided.cu``, which says what its members are."""

    size: int
    n1: int
    n2: int
    n3: int
    n4: int
    by_n1: int
    by_n2: int
    by_n3: int
    by_n4: int
    s0: int
    s1: int
    s2: int
    s3: int
    s4: int


def copy_strided(device: Any, pointer: int, shape: Sequence[int], strides: Sequence[int], dtype: str, target: int) -> None:
    """Gather a strided device array (strides in bytes) into C order at `target`, on the default stream."""
    itemsize, rank = DTYPE_BYTES[dtype], 5
    fill = (1,) * (rank - len(shape))
    size = math.prod(shape)
    elements = [s // itemsize for s in strides]
    if any(s % itemsize for s in strides):
        raise ConvArgumentError(f"strides {tuple(strides)} are not multiples of the item size, {itemsize} bytes")
    wide = size >= 2**31 - 2**20
    sizes, steps = (*fill, *shape)[1:], (*(0,) * len(fill), *elements)
    arguments = CopyArguments(size, *sizes, *(0 if wide else divider(n) for n in sizes), *steps)
    step = KernelLaunch(
        "copy_strided", {"DTYPE": DTYPE_CODES[dtype], "INDEX_64": int(wide), "THREADS": 256}, -(-size // 256), 256, (0, 1), (),
        arguments=arguments,
    )
    device.launcher(step)((pointer, target), None)


class InterfaceKind(DeviceKind):
    """Any object with ``__cuda_array_interface__``; results are PyCUDA GPUArrays, which have it too."""

    name = "__cuda_array_interface__"

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
        return tuple(interface["shape"]), dtype, self._ordinal(interface["data"][0])

    def dtype_name(self, dtype: np.dtype) -> str:
        return dtype.name if dtype.isnative else dtype.str

    @staticmethod
    def _ordinal(pointer: int) -> int:
        """The GPU on which `pointer` lies; an empty array has none and counts as GPU 0's."""
        return device_of_pointer(pointer) if pointer else 0

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

    def writeable(self, array: Any) -> bool:
        return not array.__cuda_array_interface__["data"][1]

    def copy(self, array: Any, order: tuple[int, ...] | None = None) -> Any:
        (shape, dtype, ordinal), strides = self.signature(array), self.strides(array)
        device = cuda_device(ordinal or 0)
        fresh = self.empty(shape, array, device, order)
        axes = order or range(len(shape))
        copy_strided(device, self.pointer(array), [shape[i] for i in axes], [strides[i] for i in axes], dtype.name, self.pointer(fresh))
        return fresh

    def empty(self, shape: tuple[int, ...], like: Any, device: Any, order: tuple[int, ...] | None = None) -> Any:
        dtype = self.signature(like)[1]
        strides = None if order is None else _strides(shape, dtype.itemsize, order)
        return importlib.import_module("pycuda.gpuarray").GPUArray(shape, dtype, allocator=device.allocate, strides=strides)

    def workspace(self, nbytes: int, like: Any, device: Any) -> Any:
        return self.empty((-(-nbytes // self.signature(like)[1].itemsize),), like, device)

    def current_stream(self, device: Any) -> Any:
        return None  # the default one, with which our pool is ordered

    has_producers = uses_pycuda = True

    def producer(self, array: Any) -> Any:
        return array.__cuda_array_interface__.get("stream")

    def to_pickle(self, array: Any) -> Any:
        raise TypeError(
            f"a filter that is a {type(array).__module__}.{type(array).__qualname__} can't be pickled, for its address means nothing "
            "elsewhere; bind one of numpy, torch, CuPy or PyCUDA, or pickle the plan alone"
        )


class GPUArrayKind(InterfaceKind):
    name = "pycuda.gpuarray.GPUArray"

    def signature(self, array: Any) -> Signature:
        return array.shape, array.dtype, self._ordinal(self.pointer(array))

    def pointer(self, array: Any) -> int:
        return int(array.gpudata) if array.gpudata is not None else 0

    def strides(self, array: Any) -> tuple[int, ...]:
        return array.strides

    def contiguous(self, array: Any) -> bool:
        return array.flags.c_contiguous

    def writeable(self, array: Any) -> bool:
        return True

    has_producers = False  # PyCUDA's calls go to the default stream

    def to_pickle(self, array: Any) -> np.ndarray:
        with cuda_device(self._ordinal(self.pointer(array))):
            return array.get() if array.flags.c_contiguous else self.copy(array).get()

    @staticmethod
    def from_pickle(pickled: Any, device: Any) -> Any:
        return importlib.import_module("pycuda.gpuarray").to_gpu(pickled, device.allocate)


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

    def writeable(self, array: Any) -> bool:
        return True

    has_producers = uses_pycuda = False  # CuPy's calls go to its current stream

    def to_pickle(self, array: Any) -> Any:
        return array

    def copy(self, array: Any, order: tuple[int, ...] | None = None) -> Any:
        fresh = self.empty(array.shape, array, None, order)
        fresh[...] = array
        return fresh

    def empty(self, shape: tuple[int, ...], like: Any, device: Any, order: tuple[int, ...] | None = None) -> Any:
        cupy = sys.modules["cupy"]
        with like.device:
            if order is None:
                return cupy.empty(shape, like.dtype)
            memory = cupy.cuda.alloc(math.prod(shape) * like.dtype.itemsize)
            return cupy.ndarray(shape, like.dtype, memory, _strides(shape, like.dtype.itemsize, order))

    def current_stream(self, device: Any) -> Any:
        return sys.modules["cupy"].cuda.get_current_stream(device.ordinal).ptr


class TorchKind(DeviceKind, HostKind):
    """torch tensors, on a GPU or in host memory."""

    name = "torch.Tensor"

    def __init__(self) -> None:
        torch = self.torch = sys.modules["torch"]
        quick.learn(torch)
        self.pointer = torch.Tensor.data_ptr  # type: ignore[method-assign]  # a method of ours around it would take 0.1 us
        self._dtypes = {
            torch.float16: "float16", torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16",
        }
        self._plain = {torch.Tensor, torch.nn.Parameter}
        self._forward_ad = torch.autograd.forward_ad
        self._increment_version = torch.autograd.graph.increment_version
        self._formats = {(0, 2, 3, 1): torch.channels_last, (0, 2, 3, 4, 1): torch.channels_last_3d}
        # torch.cuda.current_stream() takes 7 us, this 0.2; a build without CUDA has neither
        self._current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def signature(self, array: Any) -> Signature:
        try:
            return array.shape, array.dtype, array.get_device()
        except RuntimeError:  # a nested tensor has no shape
            self.check_dense(array)
            raise

    def check_dense(self, *arrays: Any) -> None:
        # where a call goes fast this is asked when it failed: asking each time would take 0.1 us
        for array in arrays:
            if array is None:
                continue
            if array.is_nested:
                raise TypeError("nested tensors are not supported; pass a dense one, as torch.nested.to_padded_tensor makes it")
            shape = list(array.shape)
            if array.layout is not self.torch.strided:
                raise TypeError(f"a tensor of shape {shape} has the layout {array.layout}, which is not supported; pass its to_dense()")
            if array.is_meta:
                raise TypeError(f"a tensor of shape {shape} lies on the device 'meta', so it has no values to convolve")

    def dtype_name(self, dtype: Any) -> str:
        return self._dtypes.get(dtype) or str(dtype).removeprefix("torch.")

    def type_name(self, signature: Signature) -> str:
        words = {"float16": "Half", "float32": "Float", "float64": "Double", "bfloat16": "BFloat16"}
        dtype = words.get(self.dtype_name(signature[1]), self.dtype_name(signature[1]))
        return f"torch.{'' if signature[2] == -1 else 'cuda.'}{dtype}Tensor"

    def device(self, signature: Signature, device: Any) -> Device:
        return get_device(device) if signature[2] == -1 else DeviceKind.device(self, signature, device)

    def layout(self, array: Any, ndim: int) -> str:
        if array.layout is not self.torch.strided or array.is_contiguous():
            return "NCHW"
        order = channels_last(array.dim(), ndim)
        return "NHWC" if order is not None and self._without_gaps(array, order) else "NCHW"

    def _without_gaps(self, array: Any, order: tuple[int, ...]) -> bool:
        memory_format = self._formats.get(order)  # permute() takes 1 us
        return array.permute(order).is_contiguous() if memory_format is None else array.is_contiguous(memory_format=memory_format)

    # what torch has to know of

    # (a loop over the tensors would take a microsecond)

    def differentiated(self, first: Any, second: Any, bias: Any, scale: Any, residual: Any) -> bool:
        """Whether torch is to give gradients of what is made of these, or may be asked to carry them forward, which it refuses."""
        return self._forward_ad._current_level >= 0 or (
            self.torch.is_grad_enabled() and (
                first.requires_grad or second.requires_grad or (bias is not None and bias.requires_grad)
                or (scale is not None and scale.requires_grad) or (residual is not None and residual.requires_grad)
            )
        )

    def traced(self, first: Any, second: Any, bias: Any, scale: Any = None, residual: Any = None) -> bool:
        """Whether the call is compiled, traced, transformed or seen by a mode, or the tensors are not plain ones with numbers."""
        c, plain = self.torch._C, self._plain
        return (
            self.torch.compiler.is_compiling() or c._len_torch_dispatch_stack() or c._are_functorch_transforms_active()
            or c._get_tracing_state() is not None  # torch.jit.trace
            or type(first) not in plain or type(second) not in plain or (bias is not None and type(bias) not in plain)
            or (scale is not None and type(scale) not in plain) or (residual is not None and type(residual) not in plain) or first.is_meta
        )

    def recorder(self, first: Any, second: Any, bias: Any, scale: Any, residual: Any, free: bool) -> Any:
        if self.differentiated(first, second, bias, scale, residual) or self.traced(first, second, bias, scale, residual):
            if not free:
                raise ConvArgumentError(
                    "out, stream and devices don't go with gradients, torch.compile and the like: leave them out, call inside "
                    "torch.no_grad(), or pass input.detach() and weight.detach()"
                )
            if not first.is_meta:
                self.check_dense(first, second, bias, scale, residual)
        elif not free or not self.torch.is_autocast_enabled("cuda" if first.is_cuda else "cpu"):
            return None  # as torch casts nothing for its own functions with out=
        from pycuda_conv.nn import autograd

        return autograd

    def check_not_recorded(self, first: Any, second: Any, bias: Any = None, scale: Any = None, residual: Any = None) -> None:
        if self.differentiated(first, second, bias, scale, residual):
            raise NotImplementedError(
                "a plan computes no gradients: call it inside torch.no_grad(), pass detached tensors, or call a function such as "
                "pycuda_conv.conv2d"
            )

    def will_write(self, out: Any) -> None:
        """Raise the version of `out`, by which torch notices that a tensor kept for a backward pass was overwritten."""
        if out.requires_grad and self.torch.is_grad_enabled():
            raise ConvArgumentError(
                "out requires a gradient, and a result written to out has none: leave out away, pass out.detach(), or call inside "
                "torch.no_grad()"
            )
        if not out.is_inference():
            self._increment_version(out)
        elif not self.torch.is_inference_mode_enabled():
            raise ConvArgumentError(
                "out was made in torch.inference_mode() and can be written only there; pass a tensor made outside, or out.clone()"
            )

    def convolve(
        self, plan: Plan, input: Any, weight: Any, bias: Any, out: Any, stream: Any, *, scale: Any = None, residual: Any = None,
        **options: Any,
    ) -> Any:
        convolve = DeviceKind.convolve if input.is_cuda else HostKind.convolve
        try:
            return convolve(self, plan, input, weight, bias, out, stream, scale=scale, residual=residual, **options)
        except (RuntimeError, TypeError):
            self.check_dense(input, weight, bias, scale, residual, out)
            raise

    def run(
        self, device: Any, launch: Launcher, inputs: Sequence[Any], outs: Sequence[Any], workspace: int, stream: Any = None
    ) -> None:
        if self.torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in inputs):
            raise NotImplementedError("this has no gradients of its own: call it inside torch.no_grad(), or pass detached tensors")
        run = DeviceKind.run if inputs[0].is_cuda else HostKind.run
        run(self, device, launch, inputs, outs, workspace, stream)

    def to_pickle(self, array: Any) -> Any:
        return array.detach()

    def bind(self, plan: Plan, weight: Any, bias: Any, scale: Any = None) -> Bound:
        return (DeviceKind if weight.is_cuda else HostKind).bind(self, plan, weight, bias, scale)

    # host tensors

    def to_numpy(self, array: Any) -> np.ndarray:
        array = array.detach().resolve_neg()
        if array.dtype is self.torch.bfloat16 and array.layout is self.torch.strided:  # others have no view, and numpy() says so
            array = array.view(self.torch.int16)
        return array.numpy()

    def from_numpy(self, array: np.ndarray, like: Any) -> Any:
        tensor = self.torch.from_numpy(array)
        return tensor.view(like.dtype) if like.dtype is self.torch.bfloat16 else tensor

    def in_order(self, array: Any, order: tuple[int, ...]) -> Any:
        return self.empty(array.shape, array, None, order).copy_(array)

    # device tensors

    def strides(self, array: Any) -> tuple[int, ...]:
        return tuple(s * array.element_size() for s in array.stride())

    def contiguous(self, array: Any) -> bool:
        return array.is_contiguous() and not array.is_neg()  # negated on reading: as a view of a conjugate's imaginary part

    def writeable(self, array: Any) -> bool:
        return not array.is_neg()

    def lies(self, array: Any, order: tuple[int, ...] | None) -> bool:
        return self.contiguous(array) if order is None else self._without_gaps(array, order) and not array.is_neg()

    def copy(self, array: Any, order: tuple[int, ...] | None = None) -> Any:
        return self.empty(array.shape, array, None, order).copy_(array.detach())

    def fill(self, array: Any, values: Any) -> None:
        with self.torch.inference_mode():  # to which every tensor lends itself, as it does to kernels
            array.copy_(values)

    def empty(self, shape: tuple[int, ...], like: Any, device: Any, order: tuple[int, ...] | None = None) -> Any:
        return like.new_empty(shape) if order is None else like.new_empty_strided(shape, _strides(shape, 1, order))

    def maker(self, shape: tuple[int, ...], dtype: Any, device: Any, order: tuple[int, ...] | None) -> tuple[Any, tuple[Any, ...], Any]:
        """A function, its arguments and keywords, which make what :meth:`empty` makes, in less time."""
        torch = self.torch
        memory_format = torch.contiguous_format if order is None else self._formats.get(order)
        if memory_format is None:
            return torch.empty_strided, (shape, _strides(shape, 1, order or ())), {"dtype": dtype, "device": device}
        return torch.empty_like, (quick.element(torch, dtype, device).expand(shape),), {"memory_format": memory_format}

    def current_stream(self, device: Any) -> Any:
        return self._current_stream(device.ordinal)


@lru_cache(maxsize=1024)
def _strides(shape: tuple[int, ...], itemsize: int, order: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of an array without gaps whose axes lie in memory in that order, outermost first."""
    strides = [0] * len(shape)
    for i in reversed(order):
        strides[i] = itemsize
        itemsize *= shape[i]
    return tuple(strides)


def _c_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    return _strides(tuple(shape), itemsize, tuple(range(len(shape))))


def _is_contiguous(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    return 0 in tuple(shape) or all(
        n == 1 or given == wanted for n, given, wanted in zip(shape, strides, _c_strides(shape, itemsize), strict=True)
    )


class StandInKind(ArrayKind):
    """Objects that stand for tensors while a function is traced, as ``torch.fx.Proxy`` does: torch's protocol for them takes the call."""

    name = "stand-in for a torch.Tensor"

    def check_not_recorded(self, first: Any, second: Any, bias: Any = None, scale: Any = None, residual: Any = None) -> None:
        raise TypeError("a plan takes arrays, and torch.fx gives it stand-ins for them: trace a function as pycuda_conv.conv2d instead")


class LazyKind(ArrayKind):
    """dask arrays: a graph is made of the call, whose tasks call with the chunks."""

    name = "dask.array.Array"

    def dtype_name(self, dtype: np.dtype) -> str:
        return dtype.name

    def check_not_recorded(self, first: Any, second: Any, bias: Any = None, scale: Any = None, residual: Any = None) -> None:
        raise TypeError("a plan takes arrays in memory, and a dask array is computed later: call a function such as pycuda_conv.conv2d")


# ---- which kind an object is


STAND_IN = StandInKind()
LAZY = LazyKind()
_kinds: dict[type, ArrayKind] = {}
_by_name: dict[type[ArrayKind], ArrayKind] = {LazyKind: LAZY}


def kind_of(name: str, array: Any) -> ArrayKind:
    """The kind of `array`, the argument called `name`; a ``TypeError`` for anything that is no array of ours."""
    kind = _kinds.get(type(array))
    if kind is None:
        cls = _kind_class(array)
        if cls is None:
            if isinstance(array, np.ma.MaskedArray):
                raise TypeError(f"{name} is a masked array, and a convolution has no masks: pass {name}.filled(value), or {name}.data")
            raise TypeError(
                f"{name} must be a numpy.ndarray, a torch.Tensor, a cupy.ndarray, a pycuda.gpuarray.GPUArray or an object with "
                f"__cuda_array_interface__, but got {type(array).__module__}.{type(array).__qualname__}"
            )
        kind = _kinds[type(array)] = _by_name.get(cls) or _by_name.setdefault(cls, cls())
    return kind


def _kind_class(array: Any) -> type[ArrayKind] | None:
    if isinstance(array, np.ndarray):
        return None if isinstance(array, np.ma.MaskedArray) else NumpyKind
    if _is_lazy(array):
        return LazyKind
    # a library that was never imported made none of the arguments
    torch, cupy, gpuarray = (sys.modules.get(module) for module in ("torch", "cupy", "pycuda.gpuarray"))
    if torch is not None and isinstance(array, torch.Tensor):
        return TorchKind
    if cupy is not None and isinstance(array, cupy.ndarray):
        return CupyKind
    if gpuarray is not None and isinstance(array, gpuarray.GPUArray):
        return GPUArrayKind
    return InterfaceKind if hasattr(array, "__cuda_array_interface__") else None


def _is_lazy(array: Any) -> bool:
    dask = sys.modules.get("dask.array")
    return dask is not None and isinstance(array, dask.Array)


def same_kind(
    input: Any, weight: Any, bias: Any, out: Any, scale: Any = None, residual: Any = None, names: tuple[str, str] = ("input", "weight")
) -> ArrayKind:
    """The kind of all the arrays of a call, the first two called `names`; mixing kinds is a ``TypeError``.

    It is :data:`STAND_IN` if any of them only stands for a tensor, and :data:`LAZY` if any is a dask array.
    """
    # torch.compile follows what is below and can't write to our table of types; it runs an import as it is
    if (
        type(input) is not np.ndarray and (torch := sys.modules.get("torch")) is not None and torch.compiler.is_dynamo_compiling()
        and isinstance(input, torch.Tensor) and isinstance(weight, torch.Tensor)
    ):
        from pycuda_conv.nn.autograd import _kind

        return _kind
    known = _kinds.get
    seen = known(type(input))
    if (
        seen is not None
        and known(type(weight)) is seen
        and (bias is None or known(type(bias)) is seen)
        and (out is None or known(type(out)) is seen)
        and (scale is None or known(type(scale)) is seen)
        and (residual is None or known(type(residual)) is seen)
    ):
        return seen
    torch = sys.modules.get("torch")
    if torch is not None and any(
        hasattr(type(a), "__torch_function__") and not isinstance(a, torch.Tensor) for a in (input, weight, bias, out, scale, residual)
    ):
        return STAND_IN
    if any(map(_is_lazy, (input, weight, bias, out, scale, residual))):
        return LAZY
    first, second = names
    kind = kind_of(first, input)
    for name, array in ((second, weight), ("bias", bias), ("scale", scale), ("residual", residual), ("out", out)):
        if array is not None or name == second:
            other = kind_of(name, array)
            if other is not kind:
                raise TypeError(f"{first} is a {kind.name} but {name} is a {other.name}; pass arrays of one kind")
    return kind


def check_same_type(
    kind: ArrayKind, input: Signature, *others: Signature | None, names: Sequence[str] = OPERANDS
) -> None:
    """Refuse dtypes or devices of the other operands that differ from the input's; `names` are what the operands are called."""
    first = names[0]
    for name, other in zip(names[1:], others, strict=False):
        if other is not None and (kind.dtype_name(other[1]) != kind.dtype_name(input[1]) or other[2] != input[2]):
            where = f" on cuda:{input[2]} and cuda:{other[2]}" if input[2] not in (None, -1) and other[2] not in (-1, input[2]) else ""
            raise ConvArgumentError(
                f"{first.capitalize()} type ({kind.type_name(input)}) and {name} type ({kind.type_name(other)}) should be the same{where}"
            )


def stream_of(stream: Any) -> Any:
    """The caller's `stream` as launches take it: a PyCUDA stream, or a handle."""
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


def check_fit(plan: Plan, kind: ArrayKind, input: Signature, *others: Signature | None) -> None:
    """Refuse operands that are not those of the plan: a signature, or None, for each of :data:`OPERANDS`."""
    check_same_type(kind, input, *others)
    problem = plan.problem
    for name, signature, shape in zip(OPERANDS, (input, *others), problem.operand_shapes, strict=True):
        given = None if signature is None else tuple(signature[0])
        if given != shape:
            raise ConvArgumentError(f"this plan takes {name} of shape {shape}, but got {given}")
        if signature is not None and kind.dtype_name(signature[1]) != problem.dtype:
            raise ConvArgumentError(f"this plan takes {problem.dtype} arrays, but {name} is {kind.dtype_name(signature[1])}")
    if kind.device(input, plan.device.name if input[2] in (None, -1) else None) is not plan.device:
        raise ConvArgumentError(f"this plan is for {plan.device.name}, but the arrays lie elsewhere")


def call_plan(plan: Plan, input: Any, weight: Any, bias: Any, scale: Any, residual: Any, out: Any, stream: Any) -> Any:
    """Check that the arrays fit `plan` and run it."""
    kind = same_kind(input, weight, bias, out, scale, residual)
    kind.check_not_recorded(input, weight, bias, scale, residual)
    sign = kind.signature
    signatures = (
        sign(input), sign(weight), None if bias is None else sign(bias), None if scale is None else sign(scale),
        None if residual is None else sign(residual),
    )
    if signatures != plan.accepted.get(kind):
        check_fit(plan, kind, *signatures)
        plan.accepted[kind] = signatures
    result = kind.convolve(plan, input, weight, bias, out, stream, scale=scale, residual=residual)
    if isinstance(kind, TorchKind) and stream is None:
        quick.remember(plan.ready, (), kind, plan, (input, weight, bias, scale, residual), out)
    return result
