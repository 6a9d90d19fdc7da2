"""Repeated convolutions that torch asks for gradients of.

The launcher in C repeats a convolution without checks and plans. :class:`_RepeatedFunction` makes it known to torch, and
:class:`RepeatedGradients` repeats its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from pycuda_conv import dispatch, repeat
from pycuda_conv.arguments import integers
from pycuda_conv.arrays.tensors import TORCH
from pycuda_conv.call import Call, Operands
from pycuda_conv.nn.autograd import (
    _BY_FUNCTION,
    CONV,
    CONV_INPUT,
    CONV_TRANSPOSE,
    CONV_WEIGHT,
    _is_batched,
    _is_followed,
    _layout,
    _settings,
    _summed,
    _traced,
    without_gaps,
)
from pycuda_conv.problem import channels_last
from pycuda_conv.repeat import RepeatTable

#: Both gradients of convolutions by their keys, as the launcher in C repeats them.
_both_gradients = RepeatTable()


class RepeatedGradients:
    """A repeated convolution that torch asks for gradients of: see :mod:`pycuda_conv.repeat`.

    Its gradients are those of :class:`_Function`, but found by keys that are made once. A gradient that is not ready, or that torch has to
    know of in its turn, is computed by an operator.
    """

    def __init__(self, call: Call, first_shape: Sequence[int], second_shape: Sequence[int], order: tuple[int, ...] | None) -> None:
        self.operator = _BY_FUNCTION[call.function]
        self.settings = settings = _settings(call, None, False)
        self.size = call.size
        self.shapes = first_shape, second_shape
        #: in which the result lies
        self.order = order
        self.transposed = self.operator is CONV_TRANSPOSE
        #: the key's options of both gradients together
        self.both = call.function, *settings[:6], *settings[8:], call.size
        #: the keys' options of the gradients; None where they take more than one convolution
        self.by_first: tuple[Any, ...] | None = CONV_INPUT.asked(settings, first_shape)
        self.by_second: tuple[Any, ...] | None = CONV_WEIGHT.asked(settings, second_shape)
        if self.transposed:
            self.by_first = CONV.asked(settings, ())
            more, steps = integers("", call.size, call.ndim), integers("", call.stride, call.ndim)
            if any(m >= step for m, step in zip(more, steps, strict=True)):
                self.by_first = self.by_second = None
        #: what the launcher in C needs
        self.known = _both_gradients, self.both, repeat.public_calls, self.by_first, self.by_second, self.transposed

    def gradients(self, first: Any, second: Any, grad: Any) -> tuple[Any, Any]:
        """The gradients by both operands, in one row of launches if the launcher has it."""
        possible = self.by_first is not None and not torch.is_grad_enabled() and repeat.possible()
        if possible:
            made = repeat.replay(_both_gradients, self.both, first, second, grad)
            if made is not None:
                _, by_first, by_second = made
                return by_first, by_second
        found = self.gradient_by_first(second, grad), self.gradient_by_second(first, grad)
        if possible:
            self._remember(first, second, grad)
        return found

    def _remember(self, first: Any, second: Any, grad: Any) -> None:
        """Make a row of the launches of both gradients, which were just computed, unless a plan waits for better kernels."""
        name = repeat.key(self.both, first, second, grad)
        if name is None or name in _both_gradients or TORCH.traced(first, second, grad):
            return
        ndim, layout = self.settings.ndim, _layout(grad, self.settings.ndim)
        by_first = (grad, second, None, None, None)
        by_second = ((grad, first) if self.transposed else (first, grad)) + by_first[2:]
        plans, alike = [], layout == _layout(first, ndim)
        for asked, operands in ((self.by_first, by_first), (self.by_second, by_second)):
            call = Call(*asked).hashable()  # type: ignore[misc]  # it is not None
            plan = dispatch.plan_for_call(call, TORCH, TORCH.signatures(Operands(*operands)), None, layout, False)
            plans.append(plan.better or plan)
        of_first, of_second = plans
        if not (of_first.may_be_repeated and of_second.may_be_repeated) or of_first.device.capturing():
            return
        ready = None
        filter_last, last = (
            able and TORCH.is_laid_out_as(second, plan.filter_order)
            for able, plan in ((of_first.reads_filter_last, of_first), (of_second.writes_filter_last, of_second))
        )
        fit = alike and layout == of_first.problem.layout == of_second.problem.layout
        if fit and repeat.fits(TORCH, of_first, by_first, filter_last) and repeat.fits(TORCH, of_second, by_second, False):
            # first, second, gradient of the result | gradients of first and second | workspace | none
            x, w, dy, dx, dw, scratch, none = ((i, 0) for i in range(7))
            places = (dy, w, none, dx, scratch, none), (*((dy, x) if self.transposed else (x, dy)), none, dw, scratch, none)
            steps = repeat.concatenated(of_first, filter_last, places[0], of_second, last, places[1])
            nbytes = repeat.concatenated_bytes(of_first, filter_last, of_second, last)
            orders = of_first.result_order, of_second.filter_order if last else None
            results = [
                TORCH.maker(plan.result_shape, grad.dtype, grad.device, order) for plan, order in zip(plans, orders, strict=True)
            ]
            ready = repeat.launch_sequence(TORCH, of_first.device, steps, grad, 3, results, nbytes)
        _both_gradients.put(name, ready, of_first, of_second)

    def gradient_by_first(self, second: Any, grad: Any) -> Any:
        made = None
        if not torch.compiler.is_dynamo_compiling():
            made = repeat.call(repeat.public_calls, self.by_first, False, grad, second, None, None, None, None)
        return self.operator.by_first(self.settings, self.shapes[0], second, grad) if made is None else made

    def gradient_by_second(self, first: Any, grad: Any) -> Any:
        made = None
        if not torch.compiler.is_dynamo_compiling():
            operands = (grad, first) if self.transposed else (first, grad)
            made = repeat.call(repeat.public_calls, self.by_second, False, *operands, None, None, None, None)
        return self.operator.by_second(self.settings, first, self.shapes[1], grad) if made is None else made


class _RepeatedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, again: RepeatedGradients, first: Any, second: Any, bias: Any, made: tuple[Any]) -> Any:
        _, by_first, by_second, *_ = ctx.needs_input_grad
        ctx.save_for_backward(first if by_second else None, second if by_first else None)
        ctx.again = again
        return made[0]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        first, second = saved = ctx.saved_tensors  # torch.utils.checkpoint gives them once
        again, compiled = ctx.again, _is_followed()
        made = None if compiled else repeat.gradients(ctx, saved, grad)
        if made is None and not (compiled or torch.is_grad_enabled() or _traced(grad, grad, None) or _is_batched(grad)):
            dense = without_gaps(grad, again.order)
            if dense is not grad:
                grad, made = dense, repeat.gradients(ctx, saved, dense)
        if made is not None:
            return made
        _, by_first, by_second, by_bias, _ = ctx.needs_input_grad
        if by_first and by_second:
            dx, dw = again.gradients(first, second, grad)
        else:
            dx = again.gradient_by_first(second, grad) if by_first else None
            dw = again.gradient_by_second(first, grad) if by_second else None
        return None, dx, dw, _summed(again.settings.ndim, grad) if by_bias else None, None


def recorder(call: Call, first_shape: Sequence[int], second_shape: Sequence[int], result: Any) -> Callable[..., Any]:
    """(first, second, bias, (result,)) -> the result of a convolution that the launcher in C has just repeated, known to torch.

    It is ``_RepeatedFunction.apply`` without checks that the launcher has already made. They take 3 us. `result` has the layout of all
    results of the call.
    """
    batched = result.dim() == call.ndim + 2
    order = channels_last(call.ndim + 2, call.ndim) if batched and _layout(result, call.ndim) == "NHWC" else None
    return partial(super(torch.autograd.Function, _RepeatedFunction).apply, RepeatedGradients(call, first_shape, second_shape, order))
