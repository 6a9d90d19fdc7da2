"""Batch normalisation and an activation that stand before a convolution, in training: the blocks of DenseNet and of ResNet v2.

:func:`norm_act` is one pass for the statistics and one for the result. Torch takes a pass more, forward and backward, for the activation,
and its host makes twice as many calls. The input is kept for the backward pass, which computes the activation's mask again. A convolution
behind it is a call of its own: see :mod:`pycuda_conv.nn.autograd` and :mod:`pycuda_conv.nn.mixed`.

A repeated pass is one call of the launcher in C: see :mod:`pycuda_conv.repeat`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pycuda_conv import repeat
from pycuda_conv.arguments import checked_activation
from pycuda_conv.arrays.tensors import TORCH
from pycuda_conv.engines.nn import batch_norm
from pycuda_conv.nn.autograd import _is_batched, _traced, activated, without_autocast, without_gaps
from pycuda_conv.nn.fused import launches as fused
from pycuda_conv.repeat import RepeatTable

#: Forward and backward passes by their keys, for the launcher in C.
_again = RepeatTable()


def norm_act(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    batches: Tensor | None = None, momentum: float = 0.1, eps: float = 1e-5, activation: Any = "relu",
) -> Tensor:
    """Batch normalisation by the batch's statistics, and an activation, with gradients.

    Parameters
    ----------
    x : (N, C, *size) tensor
    gamma, beta, running_mean, running_var : (C,) tensors, optional
        The running statistics are moved by `momentum`.
    batches : int64 tensor, optional
        It is raised by 1, as ``num_batches_tracked`` is.
    activation
        As for :func:`pycuda_conv.conv2d`.

    Notes
    -----
    ``torch.autocast`` casts nothing here, as it casts nothing for torch's batch norm. Second derivatives are torch's. What the kernels do
    not take, torch computes.
    """
    if torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu") and repeat.possible():
        with without_autocast(x):  # the call is then like those outside of autocast
            return _norm_act(x, gamma, beta, running_mean, running_var, batches, momentum, eps, activation)
    return _norm_act(x, gamma, beta, running_mean, running_var, batches, momentum, eps, activation)


def _norm_act(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None, batches: Tensor | None,
    momentum: float, eps: float, activation: Any,
) -> Tensor:
    asked, running = (activation, momentum, eps), (running_mean, running_var)
    if repeat.possible():
        made = repeat.replay(_again, asked, x, gamma, beta, *running, batches)
        if made is not None:
            _, statistics, out = made
            fused._were_written(running, batches, batches is not None)
            return _apply(x, gamma, beta, activation, eps, statistics, out)
    if not _is_taken(x, gamma, beta, *running):
        if batches is not None:
            batches.add_(1)
        return activated(F.batch_norm(x, running_mean, running_var, gamma, beta, True, momentum, eps), checked_activation(activation))
    activation = checked_activation(activation)
    order = fused._order(x)
    counted = batches if batches is not None and fused._counted_by_kernels(batches, x) else None
    if batches is not None and counted is None:
        batches.add_(1)
    with torch.no_grad():
        images, statistics = TORCH.as_kernel_input(x.detach(), order), fused._new_statistics(x)
        fused._launch(
            batch_norm.statistics, TORCH.signature(images), order, (images, None), (*statistics.unbind(), *running, counted), eps, momentum
        )
        out = fused._normalised(images, statistics, gamma, beta, None, activation)
    fused._were_written(running, batches, counted is not None)
    _remember(asked, (x, gamma, beta, *running, batches), momentum, eps, activation, counted is batches, out)
    return _apply(x, gamma, beta, activation, eps, statistics, out)


def _is_taken(x: Tensor, gamma: Tensor | None, beta: Tensor | None, mean: Tensor | None, var: Tensor | None) -> bool:
    """Whether the kernels can compute it; torch's own function says what is wrong with other arrays."""
    vectors = [one for one in (gamma, beta, mean, var) if one is not None]
    if _traced(x, x, None) or x.dim() < 3 or x.dtype not in fused._TYPES or not x.numel() or x.numel() == x.shape[1]:
        return False
    wide = fused._sums_dtype(x)
    return all(one.shape == (x.shape[1],) and one.dtype is wide and one.device == x.device and one.is_contiguous() for one in vectors)


def _remember(
    asked: tuple[Any, ...], operands: Sequence[Tensor | None], momentum: float, eps: float, activation: Any, counts: bool, out: Tensor
) -> None:
    """Put a forward pass into the table. `operands` are those of its key."""
    x, batches = operands[0], operands[-1]
    assert x is not None
    device, order = TORCH.device(TORCH.signature(x), None), fused._order(x)
    name = _again.new_key(asked, operands, device) if counts else None
    if name is None or not TORCH.is_kernel_input(x, order):
        return
    pixels = fused._pixels(x.shape, TORCH.dtype_name(x.dtype), "NHWC" if order else "NCHW")
    # x, gamma, beta, running mean and variance, batches | mean and invstd, out | workspace | none
    ax, ag, at, am, av, an, mean, ao, scratch, none = ((i, 0) for i in range(10))
    invstd, counted = (mean[0], pixels.K * pixels.sum_bytes), none if batches is None else an
    if pixels.whole:
        both, nbytes = batch_norm.whole_forward(pixels, device.multiprocessors, eps, momentum, activation)
        steps = repeat.rebind_buffers([[one] for one in both], (ax, none, ag, at, none, mean, invstd, am, av, counted, ao, none))
    else:
        of_batch, nbytes = batch_norm.statistics(pixels, device.multiprocessors, eps, momentum)
        normalised, _ = batch_norm.forward(pixels, device.multiprocessors, activation)
        steps = repeat.rebind_buffers([[one] for one in of_batch], (ax, none, mean, invstd, am, av, counted, scratch))
        steps += repeat.rebind_buffers([[one] for one in normalised], (ax, mean, invstd, ag, at, none, ao, none))
    results = [TORCH.maker((2, pixels.K), fused._sums_dtype(x), x.device, None), TORCH.maker(tuple(x.shape), x.dtype, x.device, order)]
    _again.put(name, repeat.launch_sequence(TORCH, device, steps, out, len(operands), results, nbytes))


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, gamma: Any, beta: Any, activation: Any, eps: float, statistics: Tensor, out: Tensor) -> Any:
        ctx.options = activation, eps
        ctx.save_for_backward(x, gamma, beta, statistics)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        x, gamma, beta, statistics = ctx.saved_tensors
        activation, _ = ctx.options
        of_x, of_gamma, of_beta, *_ = ctx.needs_input_grad
        if torch.is_grad_enabled() or _traced(x, gamma if gamma is not None else x, beta, dout) or _is_batched(dout):
            return *_differentiable(ctx, dout), None, None, None, None
        dx, sums = _backward(activation, dout, x, gamma, beta, statistics)
        by_beta, by_gamma = sums.unbind()
        return dx if of_x else None, by_gamma if of_gamma else None, by_beta if of_beta else None, None, None, None, None


#: ``_Function.apply`` without checks that were made.
_apply = super(torch.autograd.Function, _Function).apply


def _differentiable(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    """The gradients as functions that torch differentiates in their turn."""
    x, gamma, beta, _ = ctx.saved_tensors
    activation, eps = ctx.options
    with torch.enable_grad():
        z = activated(F.batch_norm(x, None, None, gamma, beta, True, 0.0, eps), checked_activation(activation))
    wanted = [one for one, needed in zip((x, gamma, beta), ctx.needs_input_grad, strict=False) if needed]
    found = iter(torch.autograd.grad(z, wanted, dout, create_graph=torch.is_grad_enabled()))
    return tuple(next(found) if needed else None for needed in ctx.needs_input_grad[:3])


def _backward(
    activation: Any, dout: Tensor, x: Tensor, gamma: Tensor | None, beta: Tensor | None, statistics: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of x, and (2, C): those of beta and gamma."""
    asked = "backward", activation
    operands = dout, x, gamma, beta, statistics
    made = repeat.replay(_again, asked, *operands) if repeat.possible() else None
    if made is None:
        order = fused._order(x)
        dense, images = without_gaps(dout, order), TORCH.as_kernel_input(x, order)
        made = repeat.replay(_again, asked, dense, *operands[1:]) if dense is not dout and repeat.possible() else None
        if made is None:
            options, sign = (checked_activation(activation), True, False), TORCH.signature(images)
            dx, sums = TORCH.empty(x.shape, x, None, order), fused._new_statistics(x)
            given = (images, dense, *statistics.unbind(), gamma, beta, None)
            fused._launch(batch_norm.backward, sign, order, given, (dx, sums, None), *options)
            _remember_backward(asked, (dense, *operands[1:]), options)
            return dx, sums
    _, sums, dx = made
    return dx, sums


def _remember_backward(asked: tuple[Any, ...], operands: Sequence[Tensor | None], options: tuple[Any, ...]) -> None:
    """Put a backward pass into the table."""
    x = operands[1]
    assert x is not None
    device, order = TORCH.device(TORCH.signature(x), None), fused._order(x)
    name = _again.new_key(asked, operands, device)
    if name is None or not TORCH.is_kernel_input(x, order):
        return
    pixels = fused._pixels(x.shape, TORCH.dtype_name(x.dtype), "NHWC" if order else "NCHW")
    # dout, x, gamma, beta, mean and invstd | sums, dx | workspace | none
    ad, ax, ag, at, mean, sums, dx, scratch, none = ((i, 0) for i in range(9))
    steps, nbytes = batch_norm.backward(pixels, device.multiprocessors, *options)
    invstd = mean[0], pixels.K * pixels.sum_bytes
    made = repeat.rebind_buffers([[one] for one in steps], (ax, ad, mean, invstd, ag, at, none, dx, sums, none, scratch))
    results = [TORCH.maker((2, pixels.K), fused._sums_dtype(x), x.device, None), TORCH.maker(tuple(x.shape), x.dtype, x.device, order)]
    _again.put(name, repeat.launch_sequence(TORCH, device, made, x, len(operands), results, nbytes))

