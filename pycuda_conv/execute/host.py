"""Plans on arrays in the host's memory: put into the plan's order, moved to the device and back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pycuda_conv.arrays import HostKind, stream_of
from pycuda_conv.call import Operands
from pycuda_conv.errors import ConvArgumentError, brief
from pycuda_conv.execute import pipeline
from pycuda_conv.execute.out import OVERLAP, check_out_shape, not_contiguous, result_order
from pycuda_conv.runtime.base import Launcher

if TYPE_CHECKING:
    from pycuda_conv.plan import Plan


def convolve(
    kind: HostKind, plan: Plan, operands: Operands, out: Any, stream: Any, *, layout: str = "", devices: Sequence[Any] = (),
    kept: pipeline.Filter | None = None,
) -> Any:
    """Run `plan` on arrays that fit it. The result has the `layout`, by default the plan's; `kept` is a filter on devices."""
    layout = layout or plan.problem.layout
    order = result_order(plan, layout)
    reordered = layout != plan.problem.layout  # whether the plan's result has to be put into another order
    named = zip(Operands._fields, operands, strict=True)
    given = Operands(*[None if a is None else kind.to_numpy(a, name) for name, a in named])
    target = None
    if out is not None:
        shape, dtype, _ = kind.signature(out)
        check_out_shape(shape, kind.dtype_name(dtype), plan)
        target = kind.to_numpy(out, "out")
        if not target.dtype.isnative:
            raise ConvArgumentError(f"out must have the machine's byte order, but its dtype is {target.dtype.str}")
        if not target.flags.writeable or not kind.writeable(out):
            raise ConvArgumentError("out is read-only; pass a writeable array")
        if not (target if order is None else target.transpose(order)).flags.c_contiguous:
            raise ConvArgumentError(not_contiguous(order, target.strides, target.shape))
        for name, array in zip(Operands._fields, given, strict=True):
            if array is not None and np.may_share_memory(target, array) and not (name == "residual" and _same(target, array)):
                raise ConvArgumentError(OVERLAP.format(name))
        kind.will_write(out)
    filters = kept or pipeline.Filter(given.weight, given.bias, given.scale)
    on = None if stream is None else stream_of(stream)
    dtype = plan.problem.result_dtype or plan.problem.dtype
    allocate = partial(kind.allocate, name=dtype)
    result = pipeline.convolve(plan, given.input, filters, None if reordered else target, on, devices, given.residual, allocate)
    if target is not None:
        if reordered:
            np.copyto(target, result)
        return out
    made = kind.from_numpy(result, dtype)
    return kind.in_order(made, order) if reordered and order else made


def keep(kind: HostKind, plan: Plan, weight: Any, bias: Any, scale: Any) -> tuple[tuple[Any, Any, Any], pipeline.Filter]:
    """Copies of a filter's arrays, of the same kind, and the filter on the plan's GPU if the plan has one."""

    def copied(array: Any, name: str) -> Any:
        return None if array is None else kind.to_numpy(array, name).copy()

    def of_kind(copy: Any) -> Any:
        return None if copy is None else kind.from_numpy(copy, plan.problem.dtype)

    w, b, s = copied(weight, "weight"), copied(bias, "bias"), copied(scale, "scale")
    kept = pipeline.Filter(w, b, s)
    if plan.device.backend == "cuda":
        kept.keep(plan)
    return (of_kind(w), of_kind(b), of_kind(s)), kept


def launch(
    kind: HostKind, device: Any, launcher: Launcher, inputs: Sequence[Any], outs: Sequence[Any], workspace: int, stream: Any
) -> None:
    """Call `launcher` with buffers (inputs, outs, workspace). The arrays have no gaps; any but the first may be None."""
    if stream is not None:
        raise ConvArgumentError(f"stream is for arrays on a GPU, but these lie in host memory; got stream={brief(stream)}")

    def as_they_lie(arrays: Sequence[Any], name: str) -> list[np.ndarray | None]:
        return [None if a is None else kind.to_numpy(a, name).ravel(order="K") for a in arrays]

    device.update_host_arrays(launcher, as_they_lie(inputs, "input"), as_they_lie(outs, "out"), workspace)


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays of one shape have the same memory for each element."""
    interfaces = one.__array_interface__, other.__array_interface__
    return interfaces[0]["data"][0] == interfaces[1]["data"][0] and one.strides == other.strides and one.dtype == other.dtype
