"""The fused layer as a ``torch.autograd.Function``, and its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pycuda_conv import repeat
from pycuda_conv.arrays import torch_internals
from pycuda_conv.arrays.tensors import TORCH
from pycuda_conv.nn.autograd import CONV, _is_batched, _traced, activated, call_operator, lying_as, without_gaps
from pycuda_conv.nn.fused.launches import _is_above, _LayerSpec, _order, _were_written
from pycuda_conv.nn.fused.repeat import _again, _backward, _backward_again


def _save(
    ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, y: Tensor, above: Tensor | None,
    statistics: Tensor, spec: _LayerSpec,
) -> None:
    """Keep what the gradients need. `above` is, behind a residual and ReLU, the mask that the kernels wrote, or the layer's result."""
    own_y = TORCH.on_gpu(y) and torch_internals.packing_hooks(True) is None
    ctx.layer = spec, None if bias is None else bias.dtype, own_y, None if own_y else (_order(y),)
    ctx.save_for_backward(x, weight, gamma, beta, y, above, statistics, None if spec.of_batch else bias)


def _gradients(ctx: Any, dout: Tensor, added: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """The gradients by x, weight, bias, gamma, beta and a residual, whether there is one or not. `added` is added to the first."""
    x, weight, gamma, beta, y, mask, statistics, bias = ctx.saved_tensors
    of_x, of_weight, of_bias, of_gamma, of_beta, *_ = ctx.needs_input_grad
    spec, bias_dtype, own_y, lay = ctx.layer
    twice = torch.is_grad_enabled()
    if twice and not (_traced(x, weight, gamma, beta, dout) or _is_batched(dout)):
        return _differentiable_gradients(ctx, dout, added, bias)
    if mask is not None and mask.dtype is not torch.uint8:  # the layer's result
        dout, mask, spec = _masked(dout, mask, y), None, spec._replace(activation=None)
    elif mask is not None and lay is not None:  # hooks may give y back in another order
        y = lying_as(y, *lay)
    given = dout, x, weight, gamma, beta, y, mask, statistics, of_x, of_weight
    spent = own_y and not twice and not torch_internals.keeps_graph()
    made = None if twice else _backward_again(*given, spec, added, spent)
    if made is None and not (twice or _traced(x, weight, gamma, beta, dout) or _is_batched(dout)):
        dense = without_gaps(dout, _order(y))
        if dense is not dout:
            dout, given = dense, (dense, *given[1:])
            made = _backward_again(*given, spec, added, spent)
    if made is None and (twice or _traced(x, weight, gamma, beta, dout) or _is_batched(dout)):
        if mask is not None:
            dout, spec = _masked(dout, mask, y), spec._replace(activation=None)
        dout = lying_as(dout, _order(y))
        dx, dweight, sums = _FirstDerivatives.apply(
            dout, x, weight, gamma, beta, y, statistics, of_x, of_weight, spec.in_integers()
        )
        made = dx if added is None or not of_x else dx + added, dweight, sums, None
    dx, dweight, sums, masked = _backward(*given, spec, added, spent) if made is None else made
    dbias = None
    if of_bias:
        if spec.of_batch:  # the batch's mean removes a bias
            dbias = torch.zeros_like(sums[0], dtype=bias_dtype)
        else:
            dbias = (sums[0] * (statistics[1] if gamma is None else statistics[1] * gamma)).to(bias_dtype)
    dgamma = dbeta = None
    if of_gamma or of_beta:
        by_beta, by_gamma = sums.unbind()
        dgamma = _cast_to(gamma, by_gamma) if of_gamma else None
        dbeta = _cast_to(beta, by_beta) if of_beta else None
    return dx if of_x else None, dweight if of_weight else None, dbias, dgamma, dbeta, dout if masked is None else masked


def _differentiable_gradients(ctx: Any, dout: Tensor, added: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    """The same as :func:`_gradients`, in operations that torch differentiates in their turn."""
    x, weight, gamma, beta, y, above, (mean, invstd), _ = ctx.saved_tensors
    (spec, bias_dtype, _, lay), needed = ctx.layer, ctx.needs_input_grad
    shape, activation = (-1, *(1,) * spec.settings.ndim), spec.activation
    if above is not None:  # a sum with a residual, and a ReLU
        dout, activation = _masked(dout, above, y if lay is None else lying_as(y, *lay)), None
    y = call_operator(CONV, spec.settings, x, weight, bias, ()).to(mean.dtype)
    if spec.of_batch:  # the numbers are those of the forward pass, and the derivatives those of mean and variance
        axes = [axis for axis in range(y.dim()) if axis != 1]
        y = y - y.mean(axes, keepdim=True)
        variance = y.square().mean(axes)
        invstd = (invstd**-2 + (variance - variance.detach())) ** -0.5
    else:
        y = y - mean.view(shape)
    factor = invstd if gamma is None else invstd * gamma.to(mean.dtype)
    z = y * factor.view(shape)
    z = z if beta is None else z + beta.to(mean.dtype).view(shape)
    z = activated(z.to(dout.dtype), activation)
    of_bias = needed[2] and not spec.of_batch
    asked = needed[0], needed[1], of_bias, needed[3], needed[4]
    wanted = [one for one, is_asked in zip((x, weight, bias, gamma, beta), asked, strict=True) if is_asked]
    found = iter(torch.autograd.grad(z, wanted, dout, create_graph=True) if wanted else ())
    dx, dweight, dbias, dgamma, dbeta = (next(found) if is_asked else None for is_asked in asked)
    if needed[2] and spec.of_batch:  # the batch's mean removes a bias
        dbias = torch.zeros_like(mean, dtype=bias_dtype)
    if dx is not None and added is not None:
        dx = dx + added
    return dx, dweight, dbias, dgamma, dbeta, dout


def _masked(dout: Tensor, above: Tensor, y: Tensor) -> Tensor:
    """The gradient behind a sum and a ReLU, with what :func:`_save` kept. It lies as `dout` does; that of ``masked_fill`` is in C order."""
    blocked = above <= 0 if above.dtype is not torch.uint8 else ~_is_above(above, y)
    return torch.where(blocked, dout.new_zeros(()), dout)


def _cast_to(parameter: Tensor, gradient: Tensor) -> Tensor:
    return gradient if gradient.dtype is parameter.dtype else gradient.to(parameter.dtype)


class _Function(torch.autograd.Function):
    """A layer's forward pass, of which it tells torch where torch need not see operators.

    The pass is `made` already: y, the statistics, the result and, with a residual and ReLU, the mask. Where it `passes_on` the input for
    other readers, the input is a second result. Then the gradients of both uses meet here: the launch that convolves one adds the other.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: Any, gamma: Any, beta: Any, residual: Any, spec: _LayerSpec, made: Sequence[Tensor],
        passes_on: bool,
    ) -> Any:
        y, statistics, out, *mask = made
        _save(ctx, x, weight, bias, gamma, beta, y, mask[0] if mask else None, statistics, spec)
        if not passes_on:
            return out
        ctx.set_materialize_grads(False)  # if nothing else read the input, there is nothing to add
        return out, x

    @staticmethod
    def backward(ctx: Any, dout: Any, added: Any = None) -> Any:
        if dout is None:
            return added, *(None,) * 8
        dx, dweight, dbias, dgamma, dbeta, by_residual = _gradients(ctx, dout, added)
        return dx, dweight, dbias, dgamma, dbeta, by_residual if ctx.needs_input_grad[5] else None, None, None, None


#: ``_Function.apply`` without checks that the launcher in C has already made. They take 3 us.
_apply = super(torch.autograd.Function, _Function).apply


def _forward_again(asked: tuple[Any, ...], input: Tensor, residual: Any, tensors: tuple[Any, ...], passes_on: bool) -> Any:
    """The layer by a repeated forward pass, in a call that torch knows of; else None. `tensors` are those of ``modules._tensors``."""
    weight, bias, gamma, beta, running_mean, running_var, batches = tensors
    counts = asked[1] is not None
    if not counts and batches is not None:  # the kernels take the mean over batches, this one included
        if repeat.key(asked, input, residual, *tensors) not in _again:
            return None
        batches.add_(1)
    made = repeat.replay(_again, asked, input, residual, *tensors)
    if made is None:
        if not counts and batches is not None:
            batches.sub_(1)
        return None
    _were_written((running_mean, running_var), batches, counts)
    (_, spec), *results = made
    return _apply(input, weight, bias, gamma, beta, residual, spec, results, passes_on)


class _FirstDerivatives(torch.autograd.Function):
    """The gradients by operators, which have no derivatives themselves."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        return torch.ops.pycuda_conv.fused_conv_bn_relu_backward.default(*given)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(
            "the fused layer's operators have no second derivatives; outside of torch.compile and torch.func it has them"
        )
