"""A fused layer's passes that were made before: each is one call of the launcher in C, which makes all launches of the pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pycuda_conv import execute, repeat
from pycuda_conv.arrays.tensors import TORCH
from pycuda_conv.engines.nn import batch_norm
from pycuda_conv.nn.autograd import _layout
from pycuda_conv.nn.fused.launches import (
    AxisOrder,
    _all_gradients,
    _Backward,
    _backward_of,
    _forward_of,
    _LayerSpec,
    _like_sums,
    _new_statistics,
    _order,
    _pixels,
    _sums_dtype,
)
from pycuda_conv.repeat import RepeatTable

#: Forward and backward passes by their keys, for the launcher in C: all launches of a pass as one row, and the layer's options.
_again = RepeatTable()


def _readable(array: Tensor | None, order: AxisOrder) -> bool:
    """Whether kernels can read the array as it is; True for None."""
    return array is None or TORCH.is_kernel_input(array, order)


def _count_as_sums(y: Tensor, *of_channels: Tensor | None) -> bool:
    """Whether kernels can read these arrays as they are; each has one value a channel of y."""
    return all(_like_sums(one, y) is one for one in of_channels)


def _remember_forward(
    asked: tuple[Any, ...], operands: Sequence[Tensor | None], momentum: float, eps: float, spec: _LayerSpec, counts: bool, made: Tensor,
    masks: bool = True,
) -> None:
    """Put a forward pass that was just `made` into the table. `operands` are those of its key. It `counts` batches if it should, and
    `masks`: gives the mask that a sum with a residual and ReLU has."""
    x, residual, weight, bias, gamma, beta, running_mean, running_var, _ = operands
    assert x is not None and weight is not None
    found = _forward_of(x, weight, bias, momentum, eps, spec)
    plan = found.plan
    name = _again.new_key(asked, operands, plan.device, plan)
    if name is None:
        return
    ready = None
    layouts = {_layout(x, spec.settings.ndim), _layout(made, spec.settings.ndim), plan.problem.layout}
    fit = _readable(x, plan.order) and _readable(weight, found.filter_order) and _readable(bias, None) and _readable(residual, plan.order)
    if fit and _count_as_sums(made, gamma, beta, running_mean, running_var) and len(layouts) == 1:
        count = len(operands)
        # x, residual, w, bias, gamma, beta, running mean and variance, batches | y, mean and invstd, out, the mask if any | workspace |
        # none
        ax, ar, aw, ab, ag, at, am, av, an, ay, mean, ao, *more = ((i, 0) for i in range(count + 6))
        mask = more.pop(0) if masks and residual is not None and spec.activation is not None else None
        scratch, none, *_ = more
        pixels, processors = _pixels(plan.result_shape, plan.problem.dtype, plan.problem.layout), plan.device.multiprocessors
        invstd = mean[0], pixels.K * pixels.sum_bytes
        statistics, nbytes = batch_norm.statistics(pixels, processors, eps, momentum, plan.schedule.moments)
        nbytes = max(nbytes, plan.workspace_bytes)
        if nbytes <= made.nbytes:  # out is written last and has room for the workspace
            scratch, nbytes = ao, 0
        tracked, counted = (none, an) if counts else (an, none)
        steps = repeat.steps_of(plan, found.filter_last, (ax, aw, ab, ay, scratch, none))
        asked_for = spec.activation, residual is not None
        if plan.schedule.moments is None and pixels.whole:
            both, _ = batch_norm.whole_forward(pixels, processors, eps, momentum, *asked_for)
            places = ay, tracked, ag, at, ar, mean, invstd, am, av, counted, ao, mask or none
            steps += repeat.rebind_buffers([[one] for one in both], places)
        else:
            normalised, _ = batch_norm.forward(pixels, processors, *asked_for)
            steps += repeat.rebind_buffers([[one] for one in statistics], (ay, tracked, mean, invstd, am, av, counted, scratch))
            steps += repeat.rebind_buffers([[one] for one in normalised], (ay, mean, invstd, ag, at, ar, ao, mask or none))
        y = TORCH.maker(plan.result_shape, x.dtype, x.device, plan.order)
        results = [y, TORCH.maker((2, pixels.K), _sums_dtype(x), x.device, None), y]
        if mask is not None:
            results.append(TORCH.maker((pixels.items,), torch.uint8, x.device, None))
        ready = repeat.launch_sequence(TORCH, plan.device, steps, x, count, results, nbytes)
    _again.put(name, None if ready is None else (ready, spec), plan)


def _asked_forward(conv: Any, bn: Any, activation: batch_norm.Activation, precision: str) -> tuple[Any, ...] | None:
    """The options in a forward pass's key; None for one that is not remembered."""
    if not repeat.possible():
        return None
    own, of_norm = conv.__dict__, bn.__dict__  # a module's attributes are slow
    try:
        if not of_norm["training"] or not of_norm["track_running_stats"] or own["padding_mode"] != "zeros":
            return None
        options = own["stride"], own["padding"], own["dilation"], own["groups"], precision
        return activation, of_norm["momentum"], of_norm["eps"], *options
    except KeyError:  # a class of the caller's computes some of them
        return None


class _BackwardAgain(NamedTuple):
    """A repeated backward pass. Gradients that its row of launches does not compute are computed from dy."""

    row: Any
    makes_dy: bool
    makes_dx: bool
    makes_dweight: bool
    #: whether it computes all gradients, in the order in which they have to lie
    complete: bool
    #: whether its results are the sums and the gradients that were asked for, of input and filter, each lying as its array does
    plain: bool


def _asked_backward(of_x: bool, of_weight: bool, spec: _LayerSpec, spent: bool) -> tuple[Any, ...]:
    activation, of_batch, (_, stride, padding, dilation, groups, precision, *_) = spec
    return activation, int(of_batch), stride, padding, dilation, groups, precision, int(of_x), int(of_weight), int(spent)


def _backward_again(
    dout: Tensor, x: Tensor, weight: Tensor, gamma: Tensor | None, beta: Tensor | None, y: Tensor, mask: Tensor | None, statistics: Tensor,
    of_x: bool, of_weight: bool, spec: _LayerSpec, added: Tensor | None = None, spent: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None] | None:
    """The same as :func:`_backward`, by a repeated pass; else None."""
    if not repeat.possible():
        return None
    operands = dout, x, weight, gamma, beta, y, mask, statistics, added if of_x else None
    made = repeat.replay(_again, _asked_backward(of_x, of_weight, spec, spent), *operands)
    return None if made is None else _gradients_of(made, operands, of_x, of_weight, spec)


def _gradients_of(
    made: Any, operands: Sequence[Any], of_x: bool, of_weight: bool, spec: _LayerSpec
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """What :func:`_backward` gives, from the results of a repeated pass of these operands."""
    (_, x, weight, _, _, y, mask, _, added), (again, sums, *results) = operands, made
    masked = None if mask is None else results.pop(0)
    dy = results.pop(0) if again.makes_dy else y
    dx = results.pop(0) if again.makes_dx else None
    dweight = results.pop(0) if again.makes_dweight else None
    if not again.complete:
        dx, dweight = _all_gradients(dx, dweight, dy, x, weight, _order(y), of_x, of_weight, spec, added)
    return dx, dweight, sums, masked


def _remember_backward(
    operands: Sequence[Any], of_x: bool, of_weight: bool, spec: _LayerSpec, spent: bool, found: _Backward
) -> None:
    """Put a backward pass into the table. `operands` are those of :func:`_backward`."""
    plans = [plan for plan in (found.by_x, found.by_weight) if plan is not None]
    name = _again.new_key(_asked_backward(of_x, of_weight, spec, spent), operands, found.device, *plans)
    if name is None:
        return
    dout, x, weight, gamma, beta, y, mask, statistics, added = operands
    order, pixels, ready = _order(y), found.pixels, None
    makes_dx, makes_dweight = found.by_x is not None, found.by_weight is not None
    needs_dy = of_x > makes_dx or of_weight > makes_dweight
    makes_dy = needs_dy and not spent
    fit = _readable(y, order) and _readable(dout, order) and _readable(mask, None) and _count_as_sums(y, gamma, beta)
    fit = fit and TORCH.contiguous(statistics)
    fit = fit and (not makes_dx or (_readable(weight, found.filter_order) and _readable(added, order)))
    if fit and (not makes_dweight or _readable(x, order)):
        count = len(operands)
        # dout, x, w, gamma, beta, y, mask, mean and invstd, what is added to dx | sums, and masked dout, dy, dx, dw if they are computed |
        # workspace | none
        ad, ax, aw, ag, at, ay, ao, mean, ap, sums, *more = ((i, 0) for i in range(count + 7))
        masked = None if mask is None else more.pop(0)
        dy = more.pop(0) if makes_dy else None
        dx, dw = (more.pop(0) if made else None for made in (makes_dx, makes_dweight))
        scratch, none, *_ = more
        nbytes, by_x, by_weight = found.workspace, found.by_x, found.by_weight
        if by_x is not None and by_weight is not None:
            nbytes = max(nbytes, repeat.concatenated_bytes(by_x, found.filter_last, by_weight, found.writes_last))
        if spent:
            dy = ay
        elif dy is None:  # then dy is workspace
            start = -(-nbytes // 512) * 512
            dy, nbytes = (scratch[0], start), start + y.nbytes
        invstd = mean[0], pixels.K * pixels.sum_bytes
        normalised, _ = batch_norm.backward(pixels, found.device.multiprocessors, spec.activation, spec.of_batch, mask is not None)
        steps = repeat.rebind_buffers([[one] for one in normalised], (ay, ad, mean, invstd, ag, at, ao, dy, sums, masked or none, scratch))
        results = [TORCH.maker((2, pixels.K), _sums_dtype(y), y.device, None)]
        if masked is not None:
            results.append(TORCH.maker(tuple(y.shape), y.dtype, y.device, order))
        if makes_dy:
            results.append(TORCH.maker(tuple(y.shape), y.dtype, y.device, order))
        for_dx, for_dw = (dy, aw, none, dx or none, scratch, none), (ax, dy, none, dw or none, scratch, none)
        residual = None if added is None else ap
        if by_x is not None and by_weight is not None:
            steps += repeat.concatenated(by_x, found.filter_last, for_dx, by_weight, found.writes_last, for_dw, residual)
        elif by_x is not None:
            steps += repeat.steps_of(by_x, found.filter_last, for_dx, residual)
        elif by_weight is not None:
            steps += repeat.steps_of(by_weight, found.writes_last, for_dw)
        if by_x is not None:
            results.append(TORCH.maker(tuple(x.shape), x.dtype, x.device, order))
        if by_weight is not None:
            results.append(TORCH.maker(tuple(weight.shape), weight.dtype, weight.device, found.gradient_order))
        ready = repeat.launch_sequence(TORCH, found.device, steps, y, count, results, nbytes)
    complete = not needs_dy and (not of_x or _order(x) == order)
    plain = complete and (makes_dx, makes_dweight) == (of_x, of_weight) and mask is None
    plain = plain and (not of_weight or found.gradient_order == _order(weight))
    again = None if ready is None else _BackwardAgain(ready, makes_dy, makes_dx, makes_dweight, complete, plain)
    _again.put(name, again, *plans)


def _backward(
    dout: Tensor, x: Tensor, weight: Tensor, gamma: Tensor | None, beta: Tensor | None, y: Tensor, mask: Tensor | None, statistics: Tensor,
    of_x: bool, of_weight: bool, spec: _LayerSpec, added: Tensor | None = None, spent: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """The gradients of input and filter, where asked for, of beta and gamma as one array (2, K), and of a residual.

    The residual's is computed if `mask` is given, which says where a sum and ReLU is above 0; in a sum without ReLU it is dout. `added` is
    added to the gradient of the input. If y is `spent`, nobody reads it again, and its gradient takes its place.
    """
    operands = dout, x, weight, gamma, beta, y, mask, statistics, added if of_x else None
    order = _order(y)
    dx = dweight = None
    y = TORCH.as_kernel_input(y, order)  # saved tensors may come back in another order than they were saved in
    dy, sums = y if spent else TORCH.empty(y.shape, y, None, order), _new_statistics(y)
    masked = None if mask is None else TORCH.empty(y.shape, y, None, order)
    if y.numel():
        found = _backward_of(x, weight, y, of_x, of_weight, mask is not None, added is not None, spec)
        by_x, by_weight = found.by_x is not None, found.by_weight is not None
        dx = TORCH.empty(x.shape, x, None, order) if by_x else None
        dweight = TORCH.empty(weight.shape, weight, None, found.gradient_order) if by_weight else None
        given = (
            y, TORCH.as_kernel_input(dout, order), *statistics.unbind(), _like_sums(gamma, y), _like_sums(beta, y),
            None if mask is None else TORCH.as_kernel_input(mask, None), TORCH.as_kernel_input(x, order) if by_weight else None,
            TORCH.as_kernel_input(weight, found.filter_order) if by_x else None,
            None if added is None or not by_x else TORCH.as_kernel_input(added, order),
        )
        execute.launch(TORCH, found.device, found.launch, given, (dy, sums, masked, dx, dweight), found.workspace)
        del given  # a copy of dout must be gone before the convolutions take its memory
        if repeat.possible():
            _remember_backward(operands, of_x, of_weight, spec, spent, found)
    return *_all_gradients(dx, dweight, dy, x, weight, order, of_x, of_weight, spec, added), sums, masked
