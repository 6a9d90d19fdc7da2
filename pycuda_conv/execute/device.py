"""Plans on arrays in a GPU's memory: addresses, streams, and copies of arrays that the kernels can't read as they lie."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pycuda_conv.arrays import ALIGNMENT, DeviceKind, stream_of
from pycuda_conv.call import Operands
from pycuda_conv.elements import bytes_of
from pycuda_conv.errors import ConvArgumentError, no_memory
from pycuda_conv.execute.out import OVERLAP, check_out_shape, not_contiguous
from pycuda_conv.runtime import contexts
from pycuda_conv.runtime.base import Launcher

if TYPE_CHECKING:
    from pycuda_conv.plan import Plan


def convolve(
    kind: DeviceKind, plan: Plan, operands: Operands, out: Any, stream: Any, packed: tuple[Any, int] | None = None
) -> Any:
    """Run `plan` on arrays that fit it. `packed` is the filter as :func:`pack` made it."""
    device: Any = plan.device
    pushed = not device.is_current()
    doubtful = not kind.any_context and contexts.in_doubt(device)
    if pushed:
        device.push()
    try:
        addresses = [0 if array is None else kind.pointer(array) for array in operands]
        if doubtful:
            written = 0 if out is None else kind.pointer(out)
            contexts.check_reached(device, dict(zip((*Operands._fields, "out"), (*addresses, written), strict=True)))
        home = kind.current_stream(device)
        on = home if stream is None else _stream_of(stream, device)
        if kind.has_producers:
            for array in (*operands, out):
                _follow(kind, device, array, home)
        w, weight = addresses[1], operands.weight
        filter_last = plan.reads_filter_last and packed is None and not w % ALIGNMENT and kind.is_laid_out_as(weight, plan.filter_order)
        copies = _unreadable(kind, plan, operands, addresses, filter_last)
        result_order = plan.result_order
        if plan.lays_filter_last(kind, out):
            filter_last, result_order = True, plan.filter_order
        if out is not None:
            residual_is_out = _check_out(kind, out, plan, result_order, operands, addresses, copies)
            if residual_is_out and plan.redoes:
                copies["residual"] = operands.residual
        if copies:
            if stream is not None:  # the array to copy may still be written there
                device.order(on, home)
            orders = {"input": plan.order, "residual": plan.order, "weight": plan.weight_order}
            copies = {name: kind.copy(array, orders.get(name)) for name, array in copies.items()}
            named = zip(Operands._fields, addresses, strict=True)
            addresses = [kind.pointer(copies[name]) if name in copies else at for name, at in named]
        result = kind.empty(plan.result_shape, operands.input, device, result_order, plan.new_dtype) if out is None else out
        if not plan.empty:
            _check_memory(operands, addresses)
            nbytes, at = (plan.workspace_bytes, 0) if packed is None else (plan.schedule.workspace_bytes, packed[1])
            workspace, scratch = kind.workspace(nbytes, operands.input, device) if nbytes else (None, 0)
            buffers = (*addresses, kind.pointer(result), scratch)
            if doubtful:
                contexts.check_reached(device, {"the result": buffers[-2], "the workspace": scratch})
            if stream is None:
                plan.launch(buffers, on, at, filter_last)
            else:  # memory of the current stream is used on another: the writes before come first, and it is given back after the use
                device.order(home, on)
                try:
                    plan.launch(buffers, on, at, filter_last)
                except BaseException:
                    _order_after_failure(device, on, home)
                    raise
                if out is None or copies or workspace is not None or at:
                    device.order(on, home)
        return result
    finally:
        if pushed:
            device.pop()


def _stream_of(stream: Any, device: Any) -> Any:
    """The caller's stream as launches take it; one of another context than the device's is refused."""
    on = stream_of(stream)
    contexts.check_stream(device, on)
    return on


def _follow(kind: DeviceKind, device: Any, array: Any, home: Any) -> None:
    """Let the stream `home` wait for the one that writes an array, or None, if that may be another."""
    producer = None if array is None else kind.producer(array)
    if producer is not None:
        contexts.check_stream(device, producer)
        device.order(producer, home)


def addresses_for_kernels(kind: DeviceKind, plan: Plan, operands: Operands, out: Any) -> tuple[list[int], bool]:
    """The addresses of arrays that fit `plan` and of its result, and whether the filter, or its gradient, lies in the plan's other order.

    Raises
    ------
    ConvArgumentError
        The kernels can't read or write an array as it lies.
    """
    addresses = [0 if array is None else kind.pointer(array) for array in operands]
    w, weight = addresses[1], operands.weight
    filter_last = plan.reads_filter_last and not w % ALIGNMENT and kind.is_laid_out_as(weight, plan.filter_order)
    strided = _unreadable(kind, plan, operands, addresses, filter_last)
    for name in strided:
        raise ConvArgumentError(
            f"{name} does not lie as the kernels read it, in order and at a multiple of {ALIGNMENT} bytes: pass a copy that does"
        )
    order = plan.result_order
    if plan.lays_filter_last(kind, out):
        filter_last, order = True, plan.filter_order
    if _check_out(kind, out, plan, order, operands, addresses, ()) and plan.redoes:
        raise ConvArgumentError("residual is out, but the plan computes parts of its result once more: pass a copy of the residual")
    if not plan.empty:
        _check_memory(operands, addresses)
    return [*addresses, kind.pointer(out)], filter_last


def _order_after_failure(device: Any, on: Any, home: Any) -> None:
    """Let `home` wait for the launches that were made on `on` before one failed: they use memory that is given back now."""
    with suppress(RuntimeError):  # the first error is the one to raise
        device.order(on, home)


def _unreadable(kind: DeviceKind, plan: Plan, operands: Operands, addresses: Sequence[int], filter_last: bool) -> dict[str, Any]:
    """By name, the operands that the kernels can't read as they lie. With `filter_last` they read the filter as it lies."""
    input, weight, bias, scale, residual = operands
    x, w, _, _, r = addresses
    found = {}
    if x % ALIGNMENT or not kind.is_laid_out_as(input, plan.order):
        found["input"] = input
    if not filter_last and (w % ALIGNMENT or not kind.is_laid_out_as(weight, plan.weight_order)):
        found["weight"] = weight
    if bias is not None and not kind.contiguous(bias):
        found["bias"] = bias
    if scale is not None and not kind.contiguous(scale):
        found["scale"] = scale
    if residual is not None and (r % ALIGNMENT or not kind.is_laid_out_as(residual, plan.order)):
        found["residual"] = residual
    return found


def _check_memory(operands: Operands, addresses: Sequence[int]) -> None:
    """Refuse an array whose address is 0."""
    for name, array, at in zip(Operands._fields, operands, addresses, strict=True):
        if not at and array is not None and 0 not in array.shape:
            raise ConvArgumentError(no_memory(name))


def convolve_and_turn(
    kind: DeviceKind, plan: Plan, operands: Operands, out: Any, stream: Any, order: tuple[int, ...] | None
) -> Any:
    """The same as :func:`convolve`, but at the end the result is put into `order`."""
    device: Any = plan.device
    if out is not None:
        _check_out(kind, out, plan, order, operands, [0 if a is None else kind.pointer(a) for a in operands], Operands._fields)
    made = convolve(kind, plan, operands, None, stream)
    with device.current():
        if out is None:
            result = kind.copy(made, order)
        else:  # by now the current stream, which owns the memory of `made`, waits for the caller's
            kind.fill(out, made)
            result = out
        if stream is not None:
            device.order(kind.current_stream(device), stream_of(stream))
    return result


def pack(kind: DeviceKind, plan: Plan, weight: Any) -> tuple[Any, tuple[Any, int]]:
    """A copy of a filter as it is, which the kernels may look up, and the packed filter: what holds it, and its address.

    Every stream may use them.
    """
    device: Any = plan.device
    doubtful, given = not kind.any_context and contexts.in_doubt(device), kind.pointer(weight)
    with device.current():
        home, own = kind.current_stream(device), device.pipeline_streams()[1]
        if kind.has_producers:
            _follow(kind, device, weight, home)
        weight = kind.copy(weight)
        packed, at = kind.workspace(plan.filter_bytes, weight, device)
        if doubtful:
            contexts.check_reached(device, {"weight": given, "the copy of weight": kind.pointer(weight), "the packed filter": at})
        device.order(home, own)
        try:
            plan.pack(kind.pointer(weight), at, own)
        finally:
            own.synchronize()
    return weight, (packed, at)


def launch(
    kind: DeviceKind, device: Any, launcher: Launcher, inputs: Sequence[Any], outs: Sequence[Any], workspace: int, stream: Any
) -> None:
    """Call `launcher` with buffers (inputs, outs, workspace). The arrays have no gaps; any but the first may be None."""
    doubtful = not kind.any_context and contexts.in_doubt(device)
    with device.current():
        home = kind.current_stream(device)
        for array in inputs if kind.has_producers else ():
            _follow(kind, device, array, home)
        buffers = [0 if array is None else kind.pointer(array) for array in (*inputs, *outs)]
        _scratch, at = kind.workspace(workspace, inputs[0], device) if workspace else (None, 0)  # dropped after the launches
        buffers.append(at)
        if doubtful:
            contexts.check_reached(device, {f"array {i}": pointer for i, pointer in enumerate(buffers)})
        on = home if stream is None else _stream_of(stream, device)
        if stream is not None:  # memory of the current stream is used on another
            device.order(home, on)
        try:
            launcher(buffers, on)
        except BaseException:
            if stream is not None:
                _order_after_failure(device, on, home)
            raise
        if stream is not None:
            device.order(on, home)


def _check_out(
    kind: DeviceKind, out: Any, plan: Plan, order: tuple[int, ...] | None, operands: Operands, pointers: Sequence[int],
    strided: Collection[str],
) -> bool:
    """Refuse an `out` that the result can't be written to, and announce the write. True if `out` is the residual.

    Operands that `strided` does not name lie without gaps.
    """
    try:
        shape, dtype, where = kind.signature(out)
    except contexts.NotCurrent as error:
        raise contexts.NotCurrent(error.template, "out") from None
    check_out_shape(shape, kind.dtype_name(dtype), plan)
    own: Any = plan.device
    if where != own.where:
        elsewhere = contexts.ordinal_of(where) != own.ordinal
        place = own.name if elsewhere else f"the CUDA context of the input, {contexts.context_name(own.where)}"
        raise ConvArgumentError(f"out must lie on {place}, as the input does, but it does not")
    if not kind.writeable(out):
        raise ConvArgumentError("out is read-only; pass a writeable array")
    if not kind.is_laid_out_as(out, order):
        raise ConvArgumentError(not_contiguous(order, kind.strides(out), shape))
    start = kind.pointer(out)
    if start % ALIGNMENT:
        raise ConvArgumentError(f"out must start at a multiple of {ALIGNMENT} bytes, but its address is {start:#x}")
    end = start + plan.result_bytes
    residual = operands.residual
    same = residual is not None and pointers[4] == start and kind.is_laid_out_as(residual, order)
    for name, array, low, nbytes in zip(Operands._fields, operands, pointers, plan.operand_bytes, strict=True):
        if array is None or (same and name == "residual"):
            continue
        first, last = (low, low + nbytes) if name not in strided or kind.contiguous(array) else _span(kind, array, low)
        if first < end and start < last:
            raise ConvArgumentError(OVERLAP.format(name))
    kind.will_write(out)
    return same


def _span(kind: DeviceKind, array: Any, pointer: int) -> tuple[int, int]:
    """The address of the first byte of a strided `array`, and that behind its last byte; `pointer` is that of its first element."""
    shape, dtype, _ = kind.signature(array)
    steps = [(n - 1) * s for n, s in zip(shape, kind.strides(array), strict=True)]
    before, after = sum(s for s in steps if s < 0), sum(s for s in steps if s > 0)
    return pointer + before, pointer + after + bytes_of(kind.dtype_name(dtype))
