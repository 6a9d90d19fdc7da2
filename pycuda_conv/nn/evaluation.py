"""Layers in evaluation: a convolution, batch normalisation by running statistics, the sum with a residual, and an activation in one call.

The kernels read gamma, beta, mean and variance where they finish a sum (``cu/finish.cuh``, ``cu/epilogue.cuh``). Nothing is computed ahead
and nothing is kept between calls, so whoever writes to these vectors, and how, is noticed.

:func:`evaluate` is for tensors with numbers. ``torch.ops.pycuda_conv.evaluate`` is the same for compilers of torch's; it has no gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pycuda_conv import dispatch, execute, quick
from pycuda_conv.arrays import Signature, check_same_type
from pycuda_conv.arrays.tensors import TORCH
from pycuda_conv.call import Call
from pycuda_conv.engines.geometry import bits, from_bits
from pycuda_conv.errors import ConvArgumentError
from pycuda_conv.memo import launches_are_in, remember_launches
from pycuda_conv.nn import operators
from pycuda_conv.nn.autograd import CONV, CONV_TRANSPOSE, Settings, _empty_like, _in_numbers, without_autocast
from pycuda_conv.plan import Plan
from pycuda_conv.problem import ACTIVATIONS, PRECISIONS, Norm, activation_and_slope, channels_last, checked_activation, integers
from pycuda_conv.runtime.base import Launcher

__all__ = ["evaluate", "spec_of"]


class _Options(NamedTuple):
    """The options of a layer, in numbers."""

    transposed: bool
    #: precision, device and tune are those of any call
    settings: Settings
    output_padding: tuple[int, ...]
    activation: str | tuple[str, float] | None

    @classmethod
    @lru_cache(maxsize=4096)
    def of(cls, spec: tuple[int, ...]) -> _Options:
        """The options from the list of :func:`spec_of`."""
        transposed, number, slope, precision, groups, *axes = spec
        word = ACTIVATIONS[number]
        activation = checked_activation((word, from_bits(slope, 8)) if word == "leaky_relu" else word)
        stride, before, after, dilation, more = (tuple(axes[i::5]) for i in range(5))
        padding = tuple(zip(before, after, strict=True))
        settings = Settings(len(stride), stride, padding, dilation, groups, PRECISIONS[precision], None, False)
        return cls(bool(transposed), settings, more, activation)


def spec_of(
    ndim: int, filter_size: Sequence[int], *, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
    precision: str = "fp32", activation: Any = None, transposed: bool = False, output_padding: Any = 0,
) -> list[int]:
    """The options of a layer as a flat list of ints, which ``torch.ops.pycuda_conv.evaluate`` takes: arguments cost a dispatcher time.

    They are: whether the convolution is transposed, number and slope of the activation, number of the precision, groups; then for each axis
    stride, padding before, padding after, dilation, output padding. The slope is the bits of a float64.
    """
    settings = _in_numbers(Settings(ndim, stride, padding, dilation, groups, precision, None, False), filter_size)
    number, slope = activation_and_slope(checked_activation(activation))
    spec = [int(transposed), number, bits(slope, 8), PRECISIONS.index(precision), groups]
    more = integers("output_padding", output_padding, ndim)
    for step, pair, spread, extra in zip(settings.stride, settings.padding, settings.dilation, more, strict=True):
        spec += step, *pair, spread, extra
    return spec


def evaluate(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, gamma: Tensor | None = None, beta: Tensor | None = None,
    mean: Tensor | None = None, var: Tensor | None = None, eps: float = 1e-5, residual: Tensor | None = None, activation: Any = None,
    stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1, precision: str = "fp32", transposed: bool = False,
    output_padding: Any = 0,
) -> Tensor:
    """A convolution, batch normalisation by given statistics, the sum with a residual and an activation, without gradients.

    Parameters
    ----------
    x : (N, C, *size) tensor
    weight, bias, stride, padding, dilation, groups, transposed, output_padding
        As for :func:`pycuda_conv.conv2d` and, if `transposed`, :func:`pycuda_conv.conv_transpose2d`. The filter has the rank.
    gamma, beta, mean, var : (K,) tensors, optional
        Without `mean` and `var` there is no normalisation. Otherwise the result is (y - mean) / sqrt(var + eps) * gamma + beta for the
        convolution y, computed in float32, or in float64 for float64 tensors. They may be of the type of `x`, or float32.
    eps : float
    residual : tensor of the result's shape, optional
        It is added before the activation.
    activation, precision
        As for :func:`pycuda_conv.conv2d`.
    """
    asked = "conv_transpose" if transposed else "conv", stride, padding, dilation, groups, precision, output_padding, activation, eps
    if torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu"):
        with without_autocast(x):
            return _evaluate(asked, x, weight, bias, gamma, beta, mean, var, residual)
    return _evaluate(asked, x, weight, bias, gamma, beta, mean, var, residual)


#: Calls by their keys, as the launcher in C repeats them.
_again: quick.Table = {}
launches_are_in(_again.clear)


def _evaluate(
    asked: tuple[Any, ...], x: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, mean: Tensor | None,
    var: Tensor | None, residual: Tensor | None,
) -> Tensor:
    operands = x, weight, bias, gamma, beta, mean, var, residual
    made = quick.again(_again, asked, *operands)
    return _computed(asked, operands) if made is None else made[1]


class _Ways(NamedTuple):
    """A plan, the launcher of its kernels, and the dtypes and layouts that they read."""

    plan: Plan
    launch: Launcher
    #: whether the kernels read a filter whose channels are last in memory
    filter_last: bool

    @property
    def orders(self) -> tuple[Any, ...]:
        """The orders of the operands of a key."""
        plan = self.plan
        filter_order = plan.filter_order if self.filter_last else plan.weight_order
        return plan.order, filter_order, None, None, None, None, None, plan.order


@remember_launches
def _ways(call: Call, signatures: tuple[Signature | None, ...], layout: str, filter_last: bool, norm: Norm | None) -> _Ways:
    """How a layer of operands of these `signatures` is computed: input, filter, bias, residual."""
    input, *others = signatures
    assert input is not None
    check_same_type(TORCH, input, *others, names=("x", "weight", "bias", "residual"))
    shapes = [None if one is None else one[0] for one in signatures]
    problem = call.problem((*shapes[:3], None, shapes[3]), TORCH.dtype_name(input[1]))
    if norm is not None:
        problem = replace(problem, has_scale=True, norm=norm)
    plan = dispatch.plan_for(problem, TORCH, input, None, layout, False)
    plan = plan.better or plan
    filter_last = not plan.empty and plan.reads_filter_last and (filter_last or plan.filter_order is None)

    def launch(buffers: Sequence[Any], stream: Any) -> None:
        x, w, b, gamma, beta, mean, var, residual, y, scratch = buffers
        plan.launch((x, w, b, gamma, residual, y, scratch), stream, filter_last=filter_last, norm=(beta, mean, var))

    return _Ways(plan, launch, filter_last)


def _computed(asked: tuple[Any, ...], operands: tuple[Tensor | None, ...]) -> Tensor:
    """The layer in a call that is not repeated."""
    function, stride, padding, dilation, groups, precision, size, activation, eps = asked
    x, weight, bias, gamma, beta, mean, var, residual = (None if one is None else one.detach() for one in operands)
    assert x is not None and weight is not None
    ndim, sign = weight.dim() - 2, TORCH.signature
    channels = weight.shape[1] * groups if function == "conv_transpose" else weight.shape[0]
    norm, vectors = _norm(x, channels, eps, gamma, beta, mean, var)
    call = Call(function, ndim, stride, padding, dilation, groups, precision, size if function == "conv_transpose" else 0, activation)
    signatures = tuple(None if one is None else sign(one) for one in (x, weight, bias, residual))
    layout, last = TORCH.layout(x, ndim), TORCH.layout(weight, ndim) == "NHWC"
    with torch.no_grad():
        how = call.hashable(), signatures, layout, last, norm
        ways = _ways(*how)
        if ways.plan.better is not None:
            _ways.forget(*how)
            ways = _ways(*how)
        plan, given = ways.plan, (x, weight, bias, *vectors, residual)
        y: Tensor = TORCH.empty(plan.result_shape, x, None, plan.result_order)
        if not plan.empty:
            inputs = [None if one is None else TORCH.as_kernel_input(one, order) for one, order in zip(given, ways.orders, strict=True)]
            execute.launch(TORCH, plan.device, ways.launch, inputs, (y,), plan.workspace_bytes)
        if layout != plan.problem.layout:  # the kernels that convolve it read the other order
            y = TORCH.empty(y.shape, y, None, channels_last(y.dim(), ndim)).copy_(y)
        elif all(a is b for a, b in zip((gamma, beta, mean, var), vectors, strict=True)):
            _remember(asked, operands, ways, y)
    return y


def _norm(
    x: Tensor, channels: int, eps: float, gamma: Tensor | None, beta: Tensor | None, mean: Tensor | None, var: Tensor | None
) -> tuple[Norm | None, tuple[Tensor | None, ...]]:
    """The norm, and its vectors as kernels read them: all of the type of `x`, or all of the type of its sums."""
    vectors = gamma, beta, mean, var
    if mean is None or var is None:
        if any(one is not None for one in vectors):
            raise ConvArgumentError("mean and var must both be given where gamma, beta, mean or var is")
        return None, vectors
    for name, one in zip(("gamma", "beta", "mean", "var"), vectors, strict=True):
        if one is not None and (tuple(one.shape) != (channels,) or one.device != x.device):
            given = f"{list(one.shape)} on {one.device}"
            raise ConvArgumentError(f"{name} must have one number for each of {channels} channels, on {x.device}, but got {given}")
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    dtype = x.dtype if all(one is None or one.dtype is x.dtype for one in vectors) else wide
    read = tuple(one if one is None or (one.dtype is dtype and one.is_contiguous()) else one.to(dtype).contiguous() for one in vectors)
    return Norm(float(eps), TORCH.dtype_name(dtype)), read


def _remember(asked: tuple[Any, ...], operands: Sequence[Tensor | None], ways: _Ways, y: Tensor) -> None:
    """Put a call that was just made into the table, unless better kernels for it are ready."""
    plan = ways.plan
    name = quick.key(asked, *operands) if plan.may_be_repeated else None
    if name is None or name in _again or plan.device.capturing():
        return
    ready = None
    if all(one is None or TORCH.is_kernel_input(one, order) for one, order in zip(operands, ways.orders, strict=True)):
        # the operands | y | workspace | none
        x, w, bias, *norm, residual, result, scratch, none = ((i, 0) for i in range(len(operands) + 3))
        steps = quick.steps_of(plan, ways.filter_last, (x, w, bias, result, scratch, none), residual, norm)
        results = [TORCH.maker(plan.result_shape, y.dtype, y.device, plan.result_order)]
        ready = quick.row(TORCH, plan.device, steps, y, len(operands), results, plan.workspace_bytes)
    quick.put(_again, name, ready, plan)


# ---- the operator

def _operator(
    x: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, mean: Tensor | None, var: Tensor | None,
    residual: Tensor | None, eps: float, spec: Sequence[int],
) -> Tensor:
    return _evaluate(_asked(tuple(spec), eps), x, weight, bias, gamma, beta, mean, var, residual)


@lru_cache(maxsize=4096)
def _asked(spec: tuple[int, ...], eps: float) -> tuple[Any, ...]:
    """The options as :func:`_evaluate` takes them."""
    options = _Options.of(spec)
    _, stride, padding, dilation, groups, precision, *_ = options.settings
    function = "conv_transpose" if options.transposed else "conv"
    return function, stride, padding, dilation, groups, precision, options.output_padding, options.activation, eps


def _fake(x: Tensor, weight: Tensor, bias: Any, gamma: Any, beta: Any, mean: Any, var: Any, residual: Any, eps: float, spec: Any) -> Any:
    options = _Options.of(tuple(spec))
    operator = CONV_TRANSPOSE if options.transposed else CONV
    return _empty_like(x, operator.shape(options.settings, x.shape, weight.shape, options.output_padding), options.settings.ndim)


operators.define(
    "evaluate(Tensor x, Tensor weight, Tensor? bias, Tensor? gamma, Tensor? beta, Tensor? mean, Tensor? var, Tensor? residual, float eps, "
    "int[] spec) -> Tensor",
    _operator, _fake,
)  # fmt: skip
