"""Repeated calls: each is found by one key and launched at once, before anything else is looked at.

The options of a call of torch's tensors on a GPU, or of PyCUDA's arrays, and the shapes, strides, types and places of the arrays, decide
what it launches. The launcher in C writes all of that down as a key and looks up what :func:`remember` stored for it. Then it allocates the
result and launches: nothing is planned or checked again. It leaves unusual calls to :mod:`pycuda_conv.dispatch`: other kinds of arrays,
modes, transforms, traces, and a stream of the caller's. Without a launcher in C all calls go there. Arrays that have to be copied first are
copied by launches of the same schedule.

A sequence of kernels, such as a pass of a fused layer, is stored in the same way: :func:`launch_sequence` makes one schedule of its
launches, and :data:`replay` finds and repeats it.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pycuda_conv.arrays.base import c_strides
from pycuda_conv.arrays.device import COPY, copying
from pycuda_conv.elements import bytes_of
from pycuda_conv.engines.schedule import Buffer
from pycuda_conv.engines.split_sum import reduce_two
from pycuda_conv.memo import MOST, launches_are_in
from pycuda_conv.problem import channels_last
from pycuda_conv.runtime.base import KernelLaunch, TensorMap
from pycuda_conv.runtime.launcher import LauncherInC

if TYPE_CHECKING:
    from pycuda_conv.arrays import ArrayKind
    from pycuda_conv.arrays.tensors import TorchKind
    from pycuda_conv.plan import Plan

_native: Any
try:
    _native = importlib.import_module("pycuda_conv.runtime._launch")
except ImportError:
    _native = None

#: ``pycuda.gpuarray.GPUArray``, once C knows it
_gpuarray: type | None = None

#: Most bytes of two sums' parts that one launch adds; where there are more, they take much longer than a launch.
MOST_TOGETHER = 16 << 20


class RepeatTable(dict[Any, Any]):
    """What the launcher in C takes, or a tuple that begins with it, by keys; None for calls that Python has to make each time.

    It is a dict, so that a look-up in C costs what it costs in a dict.

    Parameters
    ----------
    most : int
        A table of so many keys is emptied before another is put in.
    of_plan : bool
        Whether the table belongs to one plan. All others are emptied where launches of plans are forgotten.
    """

    def __init__(self, most: int = MOST, of_plan: bool = False) -> None:
        super().__init__()
        self.most = most
        if not of_plan:
            launches_are_in(self.clear)

    def new_key(self, options: tuple[Any, ...], operands: Sequence[Any], device: Any, *plans: Plan) -> Any:
        """The key for :meth:`put` of a call of `plans` that was just made; None for one that is there, or that is not repeated."""
        name = key(options, *operands) if all(plan.may_be_repeated for plan in plans) else None
        return None if name is None or name in self or device.capturing() else name

    def put(self, key: Any, ready: Any, *plans: Plan) -> None:
        """Store `ready`, which launches kernels of `plans`, unless better kernels are ready for one of them."""
        if len(self) >= self.most:
            self.clear()
        calls = [often for plan in plans if (often := plan.repeat_in(self, key)) >= 0]
        if ready is None or not calls:
            self[key] = ready
        elif min(calls):
            _native.limit(ready[0] if isinstance(ready, tuple) else ready, min(calls))
            self[key] = ready


#: Calls of the public functions. Plans have tables of their own.
public_calls = RepeatTable()


def _nothing(*call: Any) -> Any:
    return None


#: (table, options, recorded, input, weight, bias, scale, residual, out) -> the result, or None where Python has to make the call
call: Callable[..., Any] = _nothing if _native is None else _native.call
#: (options, tensor, ...) -> the key of a call, or None for an unusual call
key: Callable[..., Any] = _nothing if _native is None else _native.key
#: (table, options, operand, ...) -> what the table has for that key, and the results of its sequence of launches; or None
replay: Callable[..., Any] = _nothing if _native is None else _native.again
#: (what :func:`launch_sequence` made, what the vectors must be, vector, ...) -> the sequence's result, or None where Python makes the call
fold: Callable[..., Any] = _nothing if _native is None else _native.fold
#: (ctx, what it saved, gradient of the result) -> what ``_RepeatedFunction.backward`` of :mod:`pycuda_conv.nn.repeated` returns, or None
gradients: Callable[..., Any] = _nothing if _native is None else _native.gradients


def possible() -> bool:
    """Whether a call of tensors may be a repeated one: C can launch, and torch.compile does not trace the call."""
    import torch  # here: torch is there where there are tensors; a name of this module that changes while torch traces would be guarded

    return _native is not None and not torch.compiler.is_dynamo_compiling()


def may_repeat(input: Any) -> bool:
    """Whether a call with this first operand may be a repeated one."""
    kind = type(input)
    return kind is _gpuarray or (hasattr(kind, "__torch_function__") and possible())


def autocasts(input: Any) -> bool:
    """Whether ``torch.autocast`` casts the operands of a call whose first operand is `input`, a plain tensor."""
    import torch

    return type(input) in (torch.Tensor, torch.nn.Parameter) and torch.is_autocast_enabled("cuda" if input.is_cuda else "cpu")


def learn_arrays(gpuarray: type) -> None:
    """Tell the launcher in C the class of PyCUDA's arrays."""
    global _gpuarray
    if _native is not None:
        _native.learn_arrays(gpuarray)
        _gpuarray = gpuarray


def learn(torch: Any, least: int = 0, exchange: bool = True) -> None:
    """Tell the launcher in C which functions of torch to ask.

    `least` is the lowest number of a GPU; tests take -1, the host's. With `exchange`, torch describes a tensor in a tenth of the time that
    its attributes take, where it has a function for that: DLPack's.
    """
    from pycuda_conv.arrays import torch_internals  # it imports torch

    if _native is None or torch_internals.ASKED_BY_LAUNCHER is None:
        return
    tensor = torch.Tensor
    marked = getattr(torch._C, "_get_tensor_metadata", tensor.is_neg)  # it keeps the GIL, which is_neg() releases
    about = tensor.data_ptr, tensor.stride, tensor.get_device, marked, tensor.is_inference
    autocast = partial(torch.is_autocast_enabled, "cuda")
    states = *torch_internals.ASKED_BY_LAUNCHER, autocast
    announce = torch.autograd.graph.increment_version
    levels = vars(torch.autograd.forward_ad)
    describe = getattr(tensor, "__dlpack_c_exchange_api__", None) if exchange else None
    _native.learn((tensor, torch.nn.Parameter), about, torch.is_grad_enabled, announce, states, levels, least, describe)


def remember(
    table: RepeatTable, options: tuple[Any, ...], kind: ArrayKind, plan: Plan, operands: Sequence[Any], out: Any, *, layout: str = "",
    packed: Any = None, recorded: list[Callable[..., Any]] | None = None,
) -> None:
    """Put a call that was just made into `table`, unless better kernels for it are ready.

    Parameters
    ----------
    table : RepeatTable
    options : tuple
        What was asked of the call besides its arrays.
    kind : ArrayKind
        Calls of torch's tensors and of PyCUDA's arrays alone are remembered.
    plan : Plan
    operands : sequence of tensors or None
        Input, weight, bias, scale, residual.
    out : tensor or None
    layout : str
        The result's; by default the plan's.
    packed : (object, int), optional
        What holds the packed filter, and its address.
    recorded : list of a callable, optional
        Tells torch of the call where it has to give gradients: (input, weight, bias, (result,)) -> the result.
    """
    if not kind.remembered:
        return
    device: Any = plan.device
    name = table.new_key(options, (*operands, out), device, plan)
    if name is None:
        return
    if not kind.any_context and device.where != device.ordinal:  # C does not look at the places of tensors
        return
    other = layout not in ("", plan.problem.layout)
    order = channels_last(len(plan.result_shape), plan.problem.ndim) if other else None
    ready = _ready(kind, plan, operands, out, packed, recorded, order)
    if ready is not NotImplemented:
        table.put(name, ready, plan)


def launch_sequence(
    kind: TorchKind, device: Any, steps: Sequence[Sequence[KernelLaunch]], like: Any, operands: int, results: Sequence[Any], nbytes: int
) -> Any:
    """Launches for :data:`replay`, or None where Python makes the launches.

    Their buffers are the operands, `operands` of them, the results, `nbytes` of workspace, and one that is always None. `like` is a tensor
    on the GPU; each of `results` comes from ``kind.maker``.
    """
    launcher = device.schedule_launcher(steps)
    if not isinstance(launcher, LauncherInC):
        return None
    workspace = kind.maker((nbytes,), sys.modules["torch"].uint8, like.device, None) if nbytes else None
    return device.ready(
        launcher, kind._current_stream, like.get_device(), operands, tuple(results), workspace, nbytes, (0, 0), (0,) * 5, 0, None, None,
    )


def rebind_buffers(steps: Sequence[Sequence[KernelLaunch]], places: Sequence[tuple[int, int]]) -> list[list[KernelLaunch]]:
    """The same launches with buffer i at ``places[i]``: the number of another buffer, and bytes from its start."""

    def at(buffer: int, offset: int = 0) -> tuple[int, int]:
        number, start = places[buffer]
        return number, start + offset

    def one(launch: KernelLaunch) -> KernelLaunch:
        buffers = tuple(at(*place) if isinstance(place, tuple) else at(place) for place in launch.buffers)
        return replace(launch, buffers=buffers, maps=tuple(map(moved_map, launch.maps)))

    def moved_map(described: TensorMap) -> TensorMap:
        number, offset = at(described.buffer, described.offset)
        return replace(described, buffer=number, offset=offset)

    return [[one(launch) for launch in step] for step in steps]


def _steps(plan: Plan, filter_last: bool) -> list[list[KernelLaunch]]:
    """A plan's launches, for a filter whose channels are last, or one as it comes."""
    steps = plan.loaded.filter_last if filter_last else plan.loaded.whole
    assert steps is not None
    return steps


def steps_of(
    plan: Plan, filter_last: bool, places: Sequence[tuple[int, int]], residual: tuple[int, int] | None = None,
    scale: tuple[int, int] | None = None,
) -> list[list[KernelLaunch]]:
    """A plan's launches for :func:`launch_sequence`.

    `places` are those of input, weight, bias, result and workspace, and of a buffer that is None.

    The filter is read as it is; with `filter_last` it has the plan's ``filter_order``. The packed filter, if there is one, follows the
    plan's own workspace. `scale` and `residual` are the places of these, if there are any.
    """
    *five, none = places
    workspace, start = places[4]
    packed = workspace, start + plan.schedule.workspace_bytes
    return rebind_buffers(_steps(plan, filter_last), (*five, packed, scale or none, residual or none))


def shared_workspace_offset(first: Plan, first_last: bool, second: Plan, second_last: bool) -> int | None:
    """Where the second plan's workspace begins if one launch adds the parts of both plans' sums; None where each adds its own."""
    ends = [steps[-1] if steps else [] for steps in (_steps(first, first_last), _steps(second, second_last))]
    start = -(-first.workspace_bytes // 512) * 512
    if any(len(end) != 1 for end in ends) or start + second.workspace_bytes > MOST_TOGETHER:
        return None
    return start if reduce_two(ends[0][0], ends[1][0]) is not None else None


def concatenated(
    first: Plan, first_last: bool, first_places: Sequence[tuple[int, int]], second: Plan, second_last: bool,
    second_places: Sequence[tuple[int, int]], residual: tuple[int, int] | None = None,
) -> list[list[KernelLaunch]]:
    """The launches of two plans as :func:`steps_of` gives them. They share a workspace of :func:`bytes_of_row`."""
    steps = steps_of(first, first_last, first_places, residual)
    start = shared_workspace_offset(first, first_last, second, second_last)
    if start is None:
        return steps + steps_of(second, second_last, second_places)
    *others, (workspace, offset), none = second_places
    more = steps_of(second, second_last, (*others, (workspace, offset + start), none))
    together = reduce_two(steps[-1][0], more[-1][0])
    assert together is not None
    return [*steps[:-1], *more[:-1], [together]]


def concatenated_bytes(first: Plan, first_last: bool, second: Plan, second_last: bool) -> int:
    """Bytes of the workspace that :func:`concatenated` needs."""
    start = shared_workspace_offset(first, first_last, second, second_last)
    return max(first.workspace_bytes, second.workspace_bytes) if start is None else start + second.workspace_bytes


def fits(kind: Any, plan: Plan, operands: Sequence[Any], filter_last: bool) -> bool:
    """Whether the plan's kernels can read the operands where and as they are."""
    return not _strided(kind, plan, operands, filter_last)


def _strided(kind: Any, plan: Plan, operands: Sequence[Any], filter_last: bool) -> dict[Buffer, tuple[Any, tuple[int, ...] | None]]:
    """The operands that the plan's kernels can't read as they are, by their buffers, with the order of axes that the kernels read."""
    filter_order = plan.filter_order if filter_last else plan.weight_order
    orders = plan.order, filter_order, None, None, plan.order
    buffers = Buffer.INPUT, Buffer.WEIGHT, Buffer.BIAS, Buffer.SCALE, Buffer.RESIDUAL
    aligned = Buffer.INPUT, Buffer.WEIGHT, Buffer.RESIDUAL
    return {
        buffer: (array, order) for buffer, array, order in zip(buffers, operands, orders, strict=True)
        if array is not None and (not kind.is_laid_out_as(array, order) or (buffer in aligned and kind.pointer(array) % 16))
    }  # fmt: skip


def _after_copies(
    kind: Any, plan: Plan, steps: list[list[KernelLaunch]], strided: dict[Buffer, tuple[Any, tuple[int, ...] | None]],
    result_order: tuple[int, ...] | None, nbytes: int,
) -> tuple[list[list[KernelLaunch]], int]:
    """Launches that copy the `strided` operands to the workspace, then `steps`; and the bytes of the workspace, which had `nbytes` before.

    With `result_order`, an order of axes, the result is computed in the workspace, and the last launch copies it into that order.
    """
    places, problem = {buffer: (int(buffer), 0) for buffer in Buffer}, plan.problem
    before, after = [], []

    def place(elements: int, dtype: str) -> tuple[int, int]:
        nonlocal nbytes
        start = -(-nbytes // 512) * 512
        nbytes = start + elements * bytes_of(dtype)
        return int(Buffer.WORKSPACE), start

    for buffer, (array, order) in strided.items():
        axes, strides = order or range(len(array.shape)), kind.strides(array)
        dtype = (problem.input_dtype if buffer == Buffer.INPUT else "") or problem.dtype
        places[buffer] = to = place(math.prod(array.shape), dtype)
        before.append([copying([array.shape[i] for i in axes], [strides[i] for i in axes], dtype, (int(buffer), 0), to)])
    if result_order is not None:
        shape, dtype = plan.result_shape, problem.result_dtype or problem.dtype
        places[Buffer.RESULT] = made = place(math.prod(shape), dtype)
        strides = c_strides(shape, problem.result_itemsize)
        sizes, steps_of_axes = [shape[i] for i in result_order], [strides[i] for i in result_order]
        after.append([copying(sizes, steps_of_axes, dtype, made, (int(Buffer.RESULT), 0))])
    return [*before, *rebind_buffers(steps, [places[buffer] for buffer in Buffer]), *after], nbytes


def _ready(
    kind: Any, plan: Plan, operands: Sequence[Any], out: Any, packed: Any, recorded: list[Any] | None, result_order: tuple[int, ...] | None
) -> Any:
    """The call in the form of the launcher in C. Its first launches copy operands that kernels can't read as they are.

    With `result_order`, the result has that order of axes, and not the one that the kernels write. None where Python makes the launches;
    NotImplemented where the kernel that copies is still being compiled.
    """
    input, weight, *_ = operands
    filter_last = packed is None and plan.reads_filter_last and kind.is_laid_out_as(weight, plan.filter_order)
    filter_last = filter_last and not kind.pointer(weight) % 16
    writes_last = plan.lays_filter_last(kind, out)
    device: Any = plan.device
    launcher = plan.launcher(packed is not None, filter_last or writes_last)
    if not isinstance(launcher, LauncherInC):
        return None
    place = 0 if packed is None else packed[1]
    nbytes = plan.schedule.workspace_bytes + (0 if place else plan.filter_bytes)
    strided, spans = _strided(kind, plan, operands, filter_last), list(plan.operand_bytes)
    if packed is not None:
        strided.pop(Buffer.WEIGHT, None)  # it is not read
    if strided or result_order is not None:
        steps = plan.loaded.steps if packed is not None else _steps(plan, filter_last or writes_last)
        steps, nbytes = _after_copies(kind, plan, steps, strided, result_order, nbytes)
        copies = [launch for step in steps for launch in step if launch.kernel == COPY]
        missing = [launch for launch in copies if not device.compiled(launch)]
        if missing:
            device.compile_in_background(missing)
            return NotImplemented
        launcher = device.schedule_launcher(steps)
        for i, array in enumerate(operands):
            if array is not None:
                itemsize = plan.problem.itemsize if i else plan.problem.input_itemsize
                spans[i] = sum((n - 1) * step for n, step in zip(array.shape, kind.strides(array), strict=True)) + itemsize
    order = result_order or (plan.filter_order if writes_last else plan.result_order)
    stream, number, result, workspace = kind.for_launcher(plan.result_shape, input, device, order, nbytes, plan.new_dtype)
    types = tuple(None if a is None else a.dtype for a in operands)  # the key has their addresses
    return device.ready(
        launcher, stream, number, 0, (result,), workspace, nbytes, (place, plan.schedule.workspace_bytes), tuple(spans),
        plan.result_bytes, recorded, (packed, types),
    )
