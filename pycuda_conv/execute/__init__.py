"""Runs plans on arrays. The way depends on the memory that the arrays are in.

Arrays on a GPU are convolved there (:mod:`pycuda_conv.execute.device`). Arrays in the host's memory go to the device and back,
large ones in chunks (:mod:`pycuda_conv.execute.host`, :mod:`pycuda_conv.execute.pipeline`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from pycuda_conv import repeat
from pycuda_conv.arrays import ArrayKind, DeviceKind, HostKind, Signature, check_same_type, same_kind
from pycuda_conv.call import Operands
from pycuda_conv.errors import ConvArgumentError
from pycuda_conv.execute import device, host
from pycuda_conv.execute.out import result_order
from pycuda_conv.runtime import Device, contexts, get_device
from pycuda_conv.runtime.base import Launcher

if TYPE_CHECKING:
    from pycuda_conv.plan import Plan


def run(
    kind: ArrayKind, plan: Plan, operands: Operands, out: Any = None, stream: Any = None, *, layout: str = "", devices: Sequence[Any] = (),
    kept: Any = None,
) -> Any:
    """Run `plan` on arrays that fit it.

    Parameters
    ----------
    kind : ArrayKind
        The kind of all arrays.
    plan : Plan
    operands : Operands
    out : array, optional
        Where the result goes; by default a new array.
    stream : optional
        A stream as callers give it.
    layout : {"", "NCHW", "NHWC"}
        The result's; by default the plan's.
    devices : sequence of Device
        GPUs that share the work on host arrays.
    kept : optional
        The filter where the kernels read it, as :func:`keep` gave it.
    """
    try:
        if not kind.on_gpu(operands.input):
            return host.convolve(cast(HostKind, kind), plan, operands, out, stream, layout=layout, devices=devices, kept=kept)
        on_gpu = cast(DeviceKind, kind)
        if layout and layout != plan.problem.layout:
            return device.convolve_and_turn(on_gpu, plan, operands, out, stream, result_order(plan, layout))
        return device.convolve(on_gpu, plan, operands, out, stream, kept)
    except (RuntimeError, TypeError):
        kind.check_dense(*operands, out)
        raise


def keep(kind: ArrayKind, plan: Plan, weight: Any, bias: Any, scale: Any) -> tuple[tuple[Any, Any, Any], Any]:
    """The arrays of a filter, put where the kernels read them to stay there, and the `kept` argument of :func:`run`."""
    if not kind.on_gpu(weight):
        return host.keep(cast(HostKind, kind), plan, weight, bias, scale)
    if not plan.filter_bytes:
        return (weight, bias, scale), None
    weight, packed = device.pack(cast(DeviceKind, kind), plan, weight)
    return (weight, bias, scale), packed


def launch(
    kind: ArrayKind, on: Device, launcher: Launcher, inputs: Sequence[Any], outs: Sequence[Any], workspace: int, stream: Any = None
) -> None:
    """Call `launcher` with buffers (inputs, outs, workspace). The arrays have no gaps; any but the first may be None."""
    kind.check_no_gradient(inputs)
    if kind.on_gpu(inputs[0]):
        device.launch(cast(DeviceKind, kind), on, launcher, inputs, outs, workspace, stream)
    else:
        host.launch(cast(HostKind, kind), on, launcher, inputs, outs, workspace, stream)


#: Signatures of operands that fit a plan, as :func:`check_fit` has found.
_fitting: WeakKeyDictionary[Plan, set[Any]] = WeakKeyDictionary()


def check_fit(plan: Plan, kind: ArrayKind, signatures: tuple[Signature | None, ...]) -> None:
    """Refuse operands that don't fit the plan. `signatures` has one, or None, for each of :class:`Operands`."""
    known = _fitting.get(plan)
    if known is None:
        known = _fitting.setdefault(plan, set())
    if (kind, signatures) in known:
        return
    input, *others = signatures
    assert input is not None
    elsewhere = input[2] not in (None, -1) and kind.device(input, None) is not plan.device
    if elsewhere and kind.device(input, None).name == plan.device.name:
        raise ConvArgumentError(
            f"this filter was bound in another CUDA context of {plan.device.name} than the arrays lie in, or in one that is gone: bind it "
            "again"
        )
    check_same_type(kind, input, *others)
    problem = plan.problem
    for name, signature, shape in zip(Operands._fields, signatures, problem.operand_shapes, strict=True):
        given = None if signature is None else tuple(signature[0])
        if given != shape:
            raise ConvArgumentError(f"this plan takes {name} of shape {shape}, but got {given}")
    for name, signature, dtype in zip(Operands._fields, signatures, problem.operand_dtypes, strict=True):
        if signature is not None and kind.dtype_name(signature[1]) != dtype:
            raise ConvArgumentError(f"this plan takes {dtype} arrays, but {name} is {kind.dtype_name(signature[1])}")
    if elsewhere:
        raise ConvArgumentError(f"this plan is for {plan.device.name}, but the arrays lie elsewhere")
    known.add((kind, signatures))


def in_context_of(plan: Plan, input: Signature) -> Plan:
    """The plan, made for the context in which its arrays lie; for host arrays that of its device, unless that is gone."""
    device: Any = plan.device
    if device.backend != "cuda":
        return plan
    if input[2] in (None, -1):
        return plan if device.is_usable() else plan.on(get_device(device.name))
    if input[2] == device.where or contexts.ordinal_of(input[2]) != device.ordinal:
        return plan
    return plan.on(contexts.device_at(input[2]))


def call_plan(plan: Plan, operands: Operands, out: Any, stream: Any) -> Any:
    """Check that the arrays fit `plan` and run it."""
    if plan.problem.float_scale:
        raise ConvArgumentError("a plan whose scale and bias are float32 takes no calls: use pycuda_conv.nn.folding.scaled")
    kind = same_kind(operands, out)
    kind.check_not_recorded(operands)
    operands = kind.imported(operands)
    signatures = kind.signatures(operands)
    table, plan = plan.made_before, in_context_of(plan, cast(Signature, signatures[0]))
    check_fit(plan, kind, signatures)
    result = run(kind, plan, operands, out, stream)
    if stream is None:
        repeat.remember(table, (), kind, plan, operands, out)
    return kind.exported(result, operands, stream)
