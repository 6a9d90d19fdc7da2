"""Repeated convolutions inside ``torch.autocast``: their launches also round float32 operands, and give gradients in float32.

Torch's autocast casts input, filter and bias one by one, and each cast has a backward pass of its own. These six launches of torch's take
the host longer than the convolution. Here they and the convolution are one sequence of launches: see
:func:`pycuda_conv.repeat.launch_sequence`. The numbers are the same: gradients too are rounded to 16 bits first, so a gradient that
overflows there is infinite.

The rounded operands are results beside the convolution's, so that torch can differentiate gradients in their turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pycuda_conv import dispatch, repeat
from pycuda_conv.arrays.tensors import TORCH
from pycuda_conv.call import Call
from pycuda_conv.engines.geometry import ceil
from pycuda_conv.engines.layout import cast as casting
from pycuda_conv.engines.nn import batch_norm
from pycuda_conv.nn import autograd
from pycuda_conv.plan import Plan
from pycuda_conv.problem import channels_last
from pycuda_conv.repeat import RepeatTable
from pycuda_conv.runtime.base import KernelLaunch

_WORDS = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
ALIGNED = 512  # bytes to which the places in a workspace are aligned

#: Forward passes and backward passes by their keys; None where there is no row of launches.
_table = RepeatTable()


class _Ready(NamedTuple):
    """A forward pass: its row of launches, and the options of its gradients."""

    row: Any
    call: Call
    settings: Any
    dtype: str
    #: whether the input is float32 and has to be rounded
    narrows: bool
    #: the order of axes in which the result lies
    order: Any


class PackBuffer:
    """Places in a workspace."""

    def __init__(self, buffer: int) -> None:
        self._buffer, self.used = buffer, 0

    def take(self, nbytes: int) -> tuple[int, int]:
        place = self._buffer, self.used
        self.used += ceil(nbytes, ALIGNED) * ALIGNED
        return place


def convolve_cast(asked: tuple[Any, ...], operands: tuple[Any, ...], place: tuple[Any, ...], recorded: bool) -> Any:
    """:func:`pycuda_conv.dispatch.convolve` inside ``torch.autocast``: called with tensors of autocast's dtype, and outside of it."""
    first, second, bias, scale, residual = operands
    plain = asked[0] == "conv" and not recorded and asked[-1] is scale is residual is None and second.dim() > asked[1]
    if plain:
        wanted = torch.get_autocast_dtype("cuda" if first.is_cuda else "cpu")
        with autograd.without_autocast(first):
            made = convolve(asked, first, second, bias, wanted)
        if made is not None:
            return made
    given = operands if recorded else autograd._cast(*operands)  # gradients have the dtype in which the result was computed
    with autograd.without_autocast(first):
        made = repeat.call(repeat.public_calls, asked, recorded, *given, None)
        if made is None:
            made = dispatch.convolve(asked, given, None, place, recorded)
        elif plain and given[1] is not second and autograd._differentiated(first, second, bias, None, None):
            remember(asked, operands[:3], given[:3])
        return made


def convolve(asked: tuple[Any, ...], input: Any, weight: Any, bias: Any, wanted: Any) -> Any:
    """A convolution in a call that torch knows of; None if it has to be computed another way. ``torch.autocast`` is switched off."""
    if not autograd._differentiated(input, weight, bias, None, None):
        return None
    made = repeat.replay(_table, (_WORDS.get(wanted), *asked), input, weight, bias)
    if made is None:
        return None
    ready, *results = made
    return _apply(input, weight, bias, ready, results)[0]


def remember(asked: tuple[Any, ...], wide: Sequence[Any], given: Sequence[Any]) -> None:
    """Put a convolution that was just computed into the table: of `given`, which torch cast from the `wide` operands."""
    x, weight, bias = given
    word = _WORDS.get(x.dtype)
    name = None if word is None else repeat.key((word, *asked), *wide)
    if name is None or name in _table:
        return
    assert word is not None
    known = all(a is None or a.dtype is torch.float32 for a in wide[1:]) and wide[0].dtype in (torch.float32, x.dtype)
    call = Call(*asked).hashable()
    plan = _plan(call, x, weight, bias)
    if not plan.may_be_repeated or plan.device.capturing():
        return
    ready = None
    filter_last = plan.reads_filter_last and TORCH.is_laid_out_as(weight, plan.filter_order)
    order = plan.filter_order if filter_last else None
    fit = known and _fits(plan, x) and TORCH.is_kernel_input(wide[0], plan.order) and TORCH.is_kernel_input(wide[1], order)
    if fit and (bias is None or TORCH.is_kernel_input(wide[2], None)):
        narrows = wide[0].dtype is torch.float32
        # x, w, bias | y, w in 16 bits, x in 16 bits | workspace | none
        results = [TORCH.maker(plan.result_shape, x.dtype, x.device, plan.order)]
        results.append(TORCH.maker(tuple(weight.shape), x.dtype, x.device, order))
        if narrows:
            results.append(TORCH.maker(tuple(x.shape), x.dtype, x.device, plan.order))
        (ax, aw, ab, ay, w16, *more, scratch, none) = ((i, 0) for i in range(3 + len(results) + 2))
        x16, buffer = more[0] if narrows else ax, PackBuffer(scratch[0])
        buffer.take(plan.workspace_bytes)
        wide_ones: list[casting.Part] = [(weight.numel(), aw, w16)]
        if narrows:
            wide_ones.append((x.numel(), ax, x16))
        b16 = none
        if bias is not None:
            b16 = buffer.take(bias.numel() * 2)
            wide_ones.append((bias.numel(), ab, b16))
        steps = [[casting.narrow(word, *wide_ones)]]
        steps += repeat.steps_of(plan, filter_last, (x16, w16, b16, ay, scratch, none))
        row = repeat.launch_sequence(TORCH, plan.device, steps, x, 3, results, buffer.used)
        if row is not None:
            settings = autograd.Settings(
                call.ndim, call.stride, call.padding, call.dilation, call.groups, call.precision, None, False
            )  # fmt: skip
            ready = _Ready(row, call, settings, word, narrows, plan.order)
    _table.put(name, ready, plan)


def _plan(call: Call, first: Any, second: Any, bias: Any = None) -> Plan:
    """The plan of a convolution or a gradient of these tensors."""
    signatures = TORCH.signature(first), TORCH.signature(second), None if bias is None else TORCH.signature(bias), None, None
    plan = dispatch.plan_for_call(call, TORCH, signatures, None, TORCH.layout(first, call.ndim), False)
    return plan.better or plan


def _fits(plan: Plan, first: Any) -> bool:
    """Whether a plan takes the layout of its first operand."""
    return plan.problem.layout == TORCH.layout(first, plan.problem.ndim)


class _Function(torch.autograd.Function):
    """The results are those of the convolution, the filter in 16 bits, and the input in 16 bits if it was float32."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, ready: _Ready, made: list[Any]) -> Any:
        x16 = made[2] if ready.narrows else x
        by_x, by_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x16 if by_weight else None, made[1] if by_x else None)
        ctx.ready, ctx.last = ready, not weight.is_contiguous()
        ctx.shapes = x.shape, weight.shape
        ctx.set_materialize_grads(False)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, grad: Any, of_w16: Any, of_x16: Any = None) -> Any:
        by_x, by_weight, by_bias, *_ = ctx.needs_input_grad
        x16, w16 = ctx.saved_tensors
        ready, again = ctx.ready, of_w16 is None and of_x16 is None and not torch.is_grad_enabled()
        found: list[Any] = [None, None, None]
        if grad is not None:
            made = None
            if again and repeat.possible() and not autograd._traced(grad, grad, None) and not autograd._is_batched(grad):
                made = _gradients(ctx, grad, x16, w16)
                if made is None:
                    dense = autograd.without_gaps(grad, ready.order)
                    if dense is not grad:
                        grad, made = dense, _gradients(ctx, dense, x16, w16)
            if made is not None:
                found = made
            else:
                found = [
                    autograd.CONV.by_first(ready.settings, ctx.shapes[0], w16, grad) if by_x else None,
                    autograd.CONV.by_second(ready.settings, x16, ctx.shapes[1], grad) if by_weight else None,
                    autograd._summed(ready.settings.ndim, grad) if by_bias else None,
                ]
        if of_x16 is not None:
            found[0] = of_x16 if found[0] is None else found[0] + of_x16
        if of_w16 is not None:
            found[1] = of_w16 if found[1] is None else found[1] + of_w16
        wide = ready.narrows, True, True
        return *(a.float() if a is not None and to_float else a for a, to_float in zip(found, wide, strict=True)), None, None


#: ``_Function.apply`` without checks that the launcher in C has already made.
_apply = super(torch.autograd.Function, _Function).apply


def _gradients(ctx: Any, grad: Any, x16: Any, w16: Any) -> list[Any] | None:
    """The gradients by input, filter and bias, by a repeated backward pass; None if they have to be computed another way."""
    ready, asked = ctx.ready, [int(needed) for needed in ctx.needs_input_grad[:3]]
    options = "backward", ready.dtype, int(ready.narrows), int(ctx.last), *asked, *ready.call[:-2], *ctx.shapes
    made = repeat.replay(_table, options, grad, x16, w16)
    if made is None:
        _remember_gradients(options, ctx, grad, x16, w16)
        return None
    _, *gradients = made
    return [gradients.pop(0) if needed else None for needed in asked]


def _remember_gradients(options: tuple[Any, ...], ctx: Any, grad: Any, x16: Any, w16: Any) -> None:
    """Put a backward pass into the table."""
    name = repeat.key(options, grad, x16, w16)
    if name is None or name in _table:
        return
    ready, (by_x, by_weight, by_bias, *_) = ctx.ready, ctx.needs_input_grad
    (x_shape, w_shape), word, ndim = ctx.shapes, ready.dtype, ready.settings.ndim
    by_first = _plan(Call(*autograd.CONV_INPUT.asked(ready.settings, x_shape)), grad, w16) if by_x else None
    by_second = _plan(Call(*autograd.CONV_WEIGHT.asked(ready.settings, w_shape)), x16, grad) if by_weight else None
    plans = [plan for plan in (by_first, by_second) if plan is not None]
    if not plans or not all(plan.may_be_repeated for plan in plans) or plans[0].device.capturing():
        return
    device, order = plans[0].device, plans[0].order
    fit = all(_fits(plan, grad) and plan.order == order for plan in plans) and TORCH.is_kernel_input(grad, order)
    last = by_first is not None and by_first.reads_filter_last and TORCH.is_laid_out_as(w16, by_first.filter_order)
    if by_first is not None:
        fit = fit and TORCH.is_kernel_input(w16, by_first.filter_order if last else None)
    if by_second is not None:
        fit = fit and _fits(by_second, x16) and TORCH.is_kernel_input(x16, order)
    row = None
    if fit:
        # dy, x, w | dx, dw, db where they are asked for | workspace | none
        asked, places = (by_x, by_weight, by_bias), iter(range(3, 8))
        dx, dw, db = ((next(places), 0) if needed else None for needed in asked)
        (ag, ax, aw), scratch, none = ((0, 0), (1, 0), (2, 0)), (3 + sum(asked), 0), (4 + sum(asked), 0)
        steps: list[list[KernelLaunch]] = []
        results: list[Any] = []
        narrow_ones: list[casting.Part] = []  # one launch widens these at the end
        buffer = PackBuffer(scratch[0])
        pixels = batch_norm.Pixels(word, TORCH.layout(grad, ndim), grad.shape[0], grad.shape[1], math.prod(grad.shape[2:]))
        summed, nbytes = batch_norm.channel_sums(pixels, device.multiprocessors) if by_bias else ((), 0)
        buffer.take(max(nbytes, *(plan.workspace_bytes for plan in plans)))  # the plans use it one after the other
        if by_first is not None and dx is not None:
            size = math.prod(x_shape)
            to = buffer.take(2 * size) if ready.narrows else dx
            steps += repeat.steps_of(by_first, last, (ag, aw, none, to, scratch, none))
            if ready.narrows:
                narrow_ones.append((size, to, dx))
            results.append(TORCH.maker(tuple(x_shape), torch.float32 if ready.narrows else grad.dtype, grad.device, order))
        if by_second is not None and dw is not None:
            to = buffer.take(2 * math.prod(w_shape))
            writes_last = ctx.last and by_second.writes_filter_last
            steps += repeat.steps_of(by_second, writes_last, (ax, ag, none, to, scratch, none))
            if ctx.last and not writes_last and casting.moves_axis(w_shape):
                steps.append([casting.widen_filter(word, w_shape, to, dw)])
            else:
                narrow_ones.append((math.prod(w_shape), to, dw))
            order = channels_last(len(w_shape), ndim) if ctx.last else None
            results.append(TORCH.maker(tuple(w_shape), torch.float32, grad.device, order))
        if db is not None:
            to = buffer.take(2 * pixels.K)
            steps += repeat.rebind_buffers([[one] for one in summed], (ag, to, scratch))
            narrow_ones.append((pixels.K, to, db))
            results.append(TORCH.maker((grad.shape[1],), torch.float32, grad.device, None))
        if narrow_ones:
            steps.append([casting.widen(word, *narrow_ones)])
        row = repeat.launch_sequence(TORCH, device, steps, grad, 3, results, buffer.used)
    _table.put(name, row, *plans)
