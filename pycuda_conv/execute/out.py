"""Requirements on an array that a result is written to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pycuda_conv.errors import ConvArgumentError
from pycuda_conv.problem import channels_last

if TYPE_CHECKING:
    from pycuda_conv.plan import Plan

#: A residual may be `out` itself, element by element: each is read before it is written.
OVERLAP = "out overlaps {} in memory; the result can't be written over what is still being read"


def check_out_shape(out_shape: Sequence[int], out_dtype: str, plan: Plan) -> None:
    """Refuse an `out` of another shape or dtype than the plan's result."""
    if tuple(out_shape) != plan.result_shape:
        raise ConvArgumentError(f"out must have shape {list(plan.result_shape)}, but got out of shape {list(out_shape)}")
    problem = plan.problem
    wanted = problem.result_dtype or problem.dtype
    if out_dtype != wanted:
        whose = "" if problem.adapted else ", the input's"
        raise ConvArgumentError(f"out must have dtype {wanted}{whose}, but got {out_dtype}")


def not_contiguous(order: tuple[int, ...] | None, strides: Sequence[int], shape: Sequence[int]) -> str:
    """The message for an `out` that does not lie in memory in `order`."""
    wanted = "C-contiguous" if order is None else "channels last, as the result is"
    return f"out must be {wanted}, but its strides are {tuple(strides)} for shape {list(shape)}"


def result_order(plan: Plan, layout: str) -> tuple[int, ...] | None:
    """The axes of the plan's result as they lie in memory in `layout`, outermost first; None for C order."""
    if layout != "NHWC" or plan.problem.direction == "wgrad":
        return None
    return channels_last(len(plan.result_shape), plan.problem.ndim)
