"""The calls that :mod:`pycuda_conv.nn.graph` puts in the place of chains, for the two modes of the backend.

In light mode the graph runs as it is. Its calls are functions made here, each of which knows its options: the fewer arguments a call has
and the fewer questions it asks, the less time it takes the host. For inductor the calls are operators, ``torch.ops.pycuda_conv.*``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from pycuda_conv import dispatch
from pycuda_conv.arrays import torch_internals
from pycuda_conv.nn import evaluation, fused, linear, pooling
from pycuda_conv.nn.autograd import _flat, without_autocast
from pycuda_conv.nn.graph import Norm, Options, Targets, value

_ANYWHERE = None, None, None, False


# ---- light mode


class Light(Targets):
    """Functions for graphs that run as they are."""

    sums_in_training = counts = True

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        #: the layers that can pass their input on, and their options
        self._passing: dict[Node, Any] = {}

    def evaluate(self, options: Options, operands: Sequence[Any], dtype: torch.dtype, norm: Norm | None, residual: Any) -> Node:
        x, weight, bias = (self.cast(n, dtype) for n in operands)
        vectors = (None,) * 4 if norm is None else norm.vectors
        call = evaluation_of(options, 0.0 if norm is None else norm.eps)
        return self.graph.call_function(call, (x, weight, bias, *vectors, residual))

    def train(
        self, options: Options, operands: Sequence[Any], dtype: torch.dtype, norm: Norm, residual: Any, grad: bool
    ) -> Node:
        given = options, norm.of_batch, norm.momentum, norm.eps, dtype
        counted = None if norm.counts is None else norm.counts[1]
        made = self.graph.call_function(training_of(*given), (*operands, *norm.vectors, counted, residual))
        if grad and value(operands[0]).dtype is dtype and value(operands[0]).requires_grad:
            self._passing[made] = given
        return made

    def pass_on(self, node: Node) -> bool:
        given = self._passing.get(node)
        if given is None:
            return False
        node.target = training_of(*given, True)
        return True

    def convolve(self, options: Options, operands: Sequence[Any], dtype: torch.dtype) -> Node:
        return self.graph.call_function(convolution_of(options), tuple(operands))

    def max_pool(self, given: dict[str, Any], gradient: bool) -> Node | None:
        windows = tuple(given[name] for name in ("kernel_size", "stride", "padding", "dilation"))
        if not all(_is_constant(one) for one in windows):
            return None
        return self.graph.call_function(pooling_of(windows, bool(given["ceil_mode"])), (given["input"],))

    def product(
        self, given: dict[str, Any], scale: Any, residual: Any, activation: Any, moved: bool, gradient: bool
    ) -> Node | None:
        call = product_of(activation, moved) if not gradient else linear.linear
        more = () if gradient else (scale, residual)
        return self.graph.call_function(call, (given["input"], given["weight"], given["bias"], *more))


def _is_constant(option: Any) -> bool:
    if isinstance(option, (list, tuple)):
        return all(_is_constant(one) for one in option)
    return option is None or isinstance(option, int)


def _asked(options: Options) -> tuple[Any, ...]:
    """The members of a :class:`pycuda_conv.call.Call` without an activation."""
    function, size = ("conv_transpose", options.output_padding) if options.transposed else ("conv", 0)
    ndim, stride, padding, dilation, groups, precision, *_ = options.settings
    return function, ndim, stride, padding, dilation, groups, precision, size


def evaluation_of(options: Options, eps: float) -> Callable[..., Any]:
    """(x, weight, bias, gamma, beta, mean, var, residual) -> a chain without gradients."""
    function, _, *others, size = _asked(options)
    asked = function, *others, size, options.activation, eps
    compute, is_cast = evaluation._evaluate, torch.is_autocast_enabled

    def evaluate(x: Any, weight: Any, bias: Any, gamma: Any, beta: Any, mean: Any, var: Any, residual: Any) -> Any:
        if is_cast("cuda" if x.is_cuda else "cpu"):
            with without_autocast(x):
                return compute(asked, x, weight, bias, gamma, beta, mean, var, residual)
        return compute(asked, x, weight, bias, gamma, beta, mean, var, residual)

    return evaluate


def training_of(
    options: Options, of_batch: bool, momentum: float, eps: float, dtype: torch.dtype, passes_on: bool = False
) -> Callable[..., Any]:
    """(x, weight, bias, gamma, beta, mean, var, count, residual) -> a chain with batch normalisation, with its own backward pass.

    If it `passes_on` the input, that is a second result, for other readers of it.
    """
    layer, is_cast = fused.Layer(options.activation, of_batch, options.settings, momentum, eps), torch.is_autocast_enabled

    def train(x: Any, weight: Any, bias: Any, gamma: Any, beta: Any, mean: Any, var: Any, count: Any, residual: Any) -> Any:
        x = x if x.dtype is dtype else x.to(dtype)
        weight = weight if weight.dtype is dtype else weight.to(dtype)
        bias = bias if bias is None or bias.dtype is dtype else bias.to(dtype)
        if is_cast("cuda" if x.is_cuda else "cpu"):
            with without_autocast(x):
                return layer(x, weight, bias, gamma, beta, mean, var, count, residual, passes_on)
        return layer(x, weight, bias, gamma, beta, mean, var, count, residual, passes_on)

    return train


def convolution_of(options: Options) -> Callable[..., Any]:
    """(x, weight, bias) -> a convolution with gradients. It casts as ``torch.autocast`` says."""
    asked, convolve_ = (*_asked(options), None), dispatch.convolve

    def convolve(x: Any, weight: Any, bias: Any) -> Any:
        return convolve_(asked, (x, weight, bias, None, None), None, _ANYWHERE)

    return convolve


def pooling_of(windows: tuple[Any, ...], ceil_mode: bool) -> Callable[..., Any]:
    """(x) -> its maxima."""

    def max_pool(x: Any) -> Any:
        return pooling.max_pool(x, *windows, ceil_mode)

    return max_pool


def product_of(activation: Any, moved: bool) -> Callable[..., Any]:
    """(x, weight, bias, scale, residual) -> a linear layer and what follows it, without gradients."""

    def product(x: Any, weight: Any, bias: Any, scale: Any, residual: Any) -> Any:
        return linear.in_one(x, weight, bias, scale, residual, activation, moved)

    return product


# ---- inductor


def _spec(options: Options) -> list[int]:
    """The options as ``torch.ops.pycuda_conv.evaluate`` takes them."""
    ndim, stride, padding, dilation, groups, precision, *_ = options.settings
    return evaluation.spec_of(
        ndim, (1,) * ndim, stride=stride, padding=padding, dilation=dilation, groups=groups, precision=precision,
        activation=options.activation, transposed=options.transposed, output_padding=options.output_padding,
    )


class Operators(Targets):
    """Operators for graphs that torch's compilers take apart."""

    def evaluate(self, options: Options, operands: Sequence[Any], dtype: torch.dtype, norm: Norm | None, residual: Any) -> Node:
        x, weight, bias = (self.cast(n, dtype) for n in operands)
        vectors, eps = ((None,) * 4, 0.0) if norm is None else (norm.vectors, norm.eps)
        call = torch.ops.pycuda_conv.evaluate.default
        return self.graph.call_function(call, (x, weight, bias, *vectors, residual, eps, _spec(options)))

    def train(
        self, options: Options, operands: Sequence[Any], dtype: torch.dtype, norm: Norm, residual: Any, grad: bool
    ) -> Node:
        x, weight, bias = (self.cast(n, dtype) for n in operands)
        flat = fused._LayerSpec(options.activation, norm.of_batch, options.settings).in_integers()
        gamma, beta, mean, var = norm.vectors
        operators, call = torch.ops.pycuda_conv, self.graph.call_function
        if grad:
            call(torch_internals.set_grad_enabled, (False,))
        if norm.of_batch:
            both = call(operators.fused_statistics.default, (x, weight, bias, mean, var, None, norm.momentum, norm.eps, flat))
        else:
            both = call(operators.frozen_statistics.default, (x, weight, bias, mean, var, norm.eps, flat))
        if grad:
            call(torch_internals.set_grad_enabled, (True,))
        y, statistics = (call(operator.getitem, (both, i)) for i in (0, 1))
        return call(operators.fused_conv_bn_relu.default, (x, weight, bias, gamma, beta, y, statistics, flat))

    def convolve(self, options: Options, operands: Sequence[Any], dtype: torch.dtype) -> Node:
        x, weight, bias = (self.cast(n, dtype) for n in operands)
        name = "conv_transpose" if options.transposed else "conv"
        size = list(options.output_padding) if options.transposed else []
        call = getattr(torch.ops.pycuda_conv, name).default
        return self.graph.call_function(call, (x, weight, bias, size, *_flat(options.settings)))


