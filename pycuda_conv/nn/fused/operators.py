"""The fused layer as operators of torch's. Traces of torch.jit call them with gradients switched on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from pycuda_conv import repeat
from pycuda_conv.arrays.tensors import TORCH
from pycuda_conv.nn import evaluation, operators
from pycuda_conv.nn.autograd import CONV, _empty_like, without_gaps
from pycuda_conv.nn.conv_operators import count_flops, flops
from pycuda_conv.nn.fused.autograd import _gradients, _save
from pycuda_conv.nn.fused.launches import _counted_by_kernels, _LayerSpec, _new_statistics, _normalised, _order, _statistics
from pycuda_conv.nn.fused.repeat import _again, _asked_backward, _backward, _backward_again, _gradients_of, _remember_forward


@torch.no_grad()
def _fused_statistics(
    x: Tensor, weight: Tensor, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None, tracked: Tensor | None,
    momentum: float, eps: float, spec: Sequence[int],
) -> tuple[Tensor, Tensor]:
    return _statistics(x, weight, bias, running_mean, running_var, tracked, momentum, eps, _LayerSpec.of(spec))


def _fake_statistics(
    x: Tensor, weight: Tensor, bias: Any, running_mean: Any, running_var: Any, tracked: Any, momentum: float, eps: float,
    spec: Sequence[int],
) -> tuple[Tensor, Tensor]:
    settings = _LayerSpec.of(spec).settings
    y = _empty_like(x, CONV.shape(settings, x.shape, weight.shape, ()), settings.ndim)
    return y, _new_statistics(y)


@lru_cache(maxsize=4096)
def _known(spec: tuple[int, ...]) -> _LayerSpec:
    return _LayerSpec.of(spec)


def _asked_of(spec: _LayerSpec, momentum: float, eps: float) -> tuple[Any, ...]:
    """The options in a forward pass's key, as :func:`_asked_forward` gives them."""
    _, stride, padding, dilation, groups, precision, *_ = spec.settings
    return spec.activation, momentum, eps, stride, padding, dilation, groups, precision


@lru_cache(maxsize=4096)
def _forward_options(spec: tuple[int, ...], momentum: float, eps: float) -> tuple[_LayerSpec, tuple[Any, ...]]:
    """A layer's options, and those of its forward pass's key."""
    options = _LayerSpec.of(spec)
    return options, (*_asked_of(options, momentum, eps), "operator")


def _fused_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, batches: Tensor | None, residual: Tensor | None, momentum: float, eps: float, spec: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """The layer by the batch's statistics, its convolution y, and the statistics. The running ones move, and `batches` is raised by 1."""
    options, asked = _forward_options(tuple(spec), momentum, eps)
    made = repeat.replay(_again, asked, x, residual, weight, bias, gamma, beta, running_mean, running_var, batches)
    if made is not None:
        _, y, statistics, out = made
        return out, y, statistics
    return _first_forward(x, residual, weight, bias, gamma, beta, running_mean, running_var, batches, momentum, eps, options, asked)


@torch.no_grad()
def _first_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None,
    running_mean: Tensor | None, running_var: Tensor | None, batches: Tensor | None, momentum: float, eps: float, options: _LayerSpec,
    asked: tuple[Any, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in a call that is not repeated."""
    if batches is not None and not _counted_by_kernels(batches, x):
        batches.add_(1)
        batches = None
    operands = x, residual, weight, bias, gamma, beta, running_mean, running_var, batches
    y, statistics = _statistics(x, weight, bias, running_mean, running_var, None, momentum, eps, options, batches)
    out = _normalised(y, statistics, gamma, beta, residual, options.activation)
    if repeat.possible():
        _remember_forward(asked, operands, momentum, eps, options, True, out, masks=False)
    return out, y, statistics


def _fake_forward(
    x: Tensor, weight: Tensor, bias: Any, gamma: Any, beta: Any, running_mean: Any, running_var: Any, batches: Any, residual: Any,
    momentum: float, eps: float, spec: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    y, statistics = _fake_statistics(x, weight, bias, running_mean, running_var, None, momentum, eps, spec)
    return torch.empty_like(y), y, statistics


class _OfOneOperator(torch.autograd.Function):
    """A layer's forward pass that ``fused_forward`` has made: y, the statistics and the result."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: Any, gamma: Any, beta: Any, residual: Any, spec: _LayerSpec, made: Sequence[Tensor]
    ) -> Any:
        out, y, statistics = made
        _save(ctx, x, weight, bias, gamma, beta, y, out if spec.activation and residual is not None else None, statistics, spec)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        *gradients, by_residual = _gradients(ctx, dout)
        return *gradients, by_residual if ctx.needs_input_grad[5] else None, None, None


def _fused_layer(
    x: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, batches: Tensor | None, residual: Tensor | None, momentum: float, eps: float, spec: Sequence[int],
) -> Any:
    with torch.no_grad():
        made = torch.ops.pycuda_conv.fused_forward.default(
            x, weight, bias, gamma, beta, running_mean, running_var, batches, residual, momentum, eps, spec
        )
    return _OfOneOperator.apply(x, weight, bias, gamma, beta, residual, _known(tuple(spec)), made)


@torch.no_grad()
def _frozen_statistics(
    x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float, spec: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """What :func:`_fused_statistics` gives by given statistics. That operator is said to write to them, so a checkpoint would fail."""
    return _statistics(x, weight, bias, mean, var, None, 0.0, eps, _LayerSpec.of(spec))


def _fake_frozen(x: Tensor, weight: Tensor, bias: Any, mean: Tensor, var: Tensor, eps: float, spec: Sequence[int]) -> tuple[Tensor, Tensor]:
    return _fake_statistics(x, weight, bias, None, None, None, 0.0, eps, spec)


@torch.no_grad()
def _fused_normalised(y: Tensor, statistics: Tensor, gamma: Tensor | None, beta: Tensor | None, spec: Sequence[int]) -> Tensor:
    y = TORCH.as_kernel_input(y, _order(y))  # a compiler of torch's may have laid it out in another order
    return _normalised(y, statistics, gamma, beta, None, _known(tuple(spec)).activation)


def _fake_normalised(y: Tensor, statistics: Any, gamma: Any, beta: Any, spec: Any) -> Tensor:
    return cast(Tensor, _empty_like(y, y.shape, y.dim() - 2))


@lru_cache(maxsize=4096)
def _backward_options(spec: tuple[int, ...], of_x: bool, of_weight: bool) -> tuple[_LayerSpec, tuple[Any, ...]]:
    """A layer's options, and those of its backward pass's key."""
    options = _LayerSpec.of(spec)
    return options, _asked_backward(of_x, of_weight, options, False)


def _fused_backward(
    dout: Tensor, x: Tensor, weight: Tensor, gamma: Tensor | None, beta: Tensor | None, y: Tensor, statistics: Tensor, of_x: bool,
    of_weight: bool, spec: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as :func:`_backward`; gradients that are not asked for have no elements."""
    options, asked = _backward_options(tuple(spec), of_x, of_weight)
    operands = dout, x, weight, gamma, beta, y, None, statistics, None
    made = repeat.replay(_again, asked, *operands)
    if made is not None and made[0].plain:
        _, sums, *gradients = made
        dx = gradients.pop(0) if of_x else x.new_empty(0)
        return dx, gradients.pop(0) if of_weight else weight.new_empty(0), sums
    return _other_backward(operands, made, of_x, of_weight, options)


@torch.no_grad()
def _other_backward(
    operands: tuple[Any, ...], made: Any, of_x: bool, of_weight: bool, options: _LayerSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in a call that is not repeated, or whose results, if they are `made`, do not lie as the operator's have to."""
    dout, x, weight, gamma, beta, y, _, statistics, _ = operands
    if made is not None:
        dx, dweight, sums, _ = _gradients_of(made, operands, of_x, of_weight, options)
    else:
        dout = without_gaps(dout, _order(y))
        given = dout, x, weight, gamma, beta, y, None, statistics, of_x, of_weight, options
        dx, dweight, sums, _ = (None if dout is operands[0] else _backward_again(*given)) or _backward(*given)
    dweight = weight.new_empty(0) if dweight is None else TORCH.as_kernel_input(dweight, _order(weight))
    return x.new_empty(0) if dx is None else dx, dweight, sums


def _fake_backward(
    dout: Tensor, x: Tensor, weight: Tensor, gamma: Any, beta: Any, y: Tensor, statistics: Any, of_x: bool, of_weight: bool, spec: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dx = _empty_like(x, x.shape, x.dim() - 2) if of_x else x.new_empty(0)
    dweight = _empty_like(weight, weight.shape, weight.dim() - 2) if of_weight else weight.new_empty(0)
    return dx, dweight, _new_statistics(y)


class _OfOperators(torch.autograd.Function):
    """The layer, given the results of ``fused_statistics`` for the same `x`, `weight` and `bias`; its gradients are those of both."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, gamma: Any, beta: Any, y: Any, statistics: Any, spec: Sequence[int]) -> Any:
        _save(ctx, x, weight, bias, gamma, beta, y, None, statistics, _LayerSpec.of(spec))
        return torch.ops.pycuda_conv.fused_normalised.default(y, statistics, gamma, beta, spec)

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        *gradients, _ = _gradients(ctx, dout)
        return *gradients, None, None, None


def _fused_conv_bn_relu(*given: Any) -> Any:
    return _OfOperators.apply(*given)


def _fused_inference(
    x: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, running_mean: Tensor, running_var: Tensor,
    eps: float, spec: Sequence[int],
) -> Any:
    """The name by which programs that were exported before know a layer in evaluation."""
    activation, _, settings = _LayerSpec.of(spec)
    _, stride, padding, dilation, groups, precision, _, _, algorithm, *_ = settings
    options = evaluation.spec_of(
        len(stride), weight.shape[2:], stride=stride, padding=padding, dilation=dilation, groups=groups, precision=precision,
        activation=activation, algorithm=algorithm,
    )  # fmt: skip
    vectors = gamma, beta, running_mean, running_var
    return torch.ops.pycuda_conv.evaluate.default(x, weight, bias, *vectors, None, eps, options)


_LAYER = "Tensor x, Tensor weight, Tensor? bias, Tensor? gamma, Tensor? beta"
operators.define(
    "fused_statistics(Tensor x, Tensor weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor? tracked, "
    "float momentum, float eps, int[] spec) -> (Tensor, Tensor)",
    _fused_statistics, _fake_statistics,
)  # fmt: skip
_TRAINED = (
    f"{_LAYER}, Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? batches, Tensor? residual, float momentum, "
    "float eps, int[] spec"
)
operators.define(f"fused_forward({_TRAINED}) -> (Tensor, Tensor, Tensor)", _fused_forward, _fake_forward)
operators.define_by_others(f"fused_layer({_TRAINED}) -> Tensor", _fused_layer)
operators.define(
    "frozen_statistics(Tensor x, Tensor weight, Tensor? bias, Tensor mean, Tensor var, float eps, int[] spec) -> (Tensor, Tensor)",
    _frozen_statistics, _fake_frozen,
)  # fmt: skip
operators.define(
    "fused_normalised(Tensor y, Tensor statistics, Tensor? gamma, Tensor? beta, int[] spec) -> Tensor", _fused_normalised, _fake_normalised
)
operators.define(
    "fused_conv_bn_relu_backward(Tensor dout, Tensor x, Tensor weight, Tensor? gamma, Tensor? beta, Tensor y, Tensor statistics, "
    "bool of_x, bool of_weight, int[] spec) -> (Tensor, Tensor, Tensor)",
    _fused_backward, _fake_backward,
)  # fmt: skip
operators.define_by_others(f"fused_conv_bn_relu({_LAYER}, Tensor y, Tensor statistics, int[] spec) -> Tensor", _fused_conv_bn_relu)
operators.define_by_others(
    f"fused_inference({_LAYER}, Tensor running_mean, Tensor running_var, float eps, int[] spec) -> Tensor", _fused_inference
)


def _forward_flops(x: Any, weight: Any, *rest: Any, out_shape: Any) -> int:
    return flops(out_shape, weight)


def _statistics_flops(x: Any, weight: Any, *rest: Any, out_shape: Any) -> int:
    return flops(out_shape[0], weight)


def _backward_flops(
    dout: Any, x: Any, weight: Any, gamma: Any, beta: Any, y: Any, statistics: Any, of_x: bool, of_weight: bool, spec: Any, *,
    out_shape: Any,
) -> int:
    return (of_x + of_weight) * flops(y, weight)


count_flops(torch.ops.pycuda_conv.fused_statistics, _statistics_flops)
count_flops(torch.ops.pycuda_conv.frozen_statistics, _statistics_flops)
count_flops(torch.ops.pycuda_conv.fused_forward, _statistics_flops)
for _name in ("fused_inference", "evaluate", "scaled"):
    count_flops(getattr(torch.ops.pycuda_conv, _name), _forward_flops)
count_flops(torch.ops.pycuda_conv.fused_conv_bn_relu_backward, _backward_flops)
