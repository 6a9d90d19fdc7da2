"""Layers in evaluation: a convolution, batch normalisation by running statistics, the sum with a residual, and an activation in one call.

A launch in front of the convolution reads gamma, beta, mean and variance, in each call (:mod:`pycuda_conv.nn.folding`, which does that for
all norms of a network at once). Nothing is kept between calls, so whoever writes to these vectors, and how, is noticed.

:func:`evaluate` is for tensors with numbers. ``torch.ops.pycuda_conv.evaluate`` is the same for compilers of torch's; it has no gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pycuda_conv import invariance, repeat
from pycuda_conv.arrays.tensors import TORCH
from pycuda_conv.engines.nn import fold_norms as folding
from pycuda_conv.errors import ConvArgumentError
from pycuda_conv.invariance import with_invariance
from pycuda_conv.nn import folding as norm_folding
from pycuda_conv.nn import operators
from pycuda_conv.nn.autograd import Settings, without_autocast
from pycuda_conv.nn.options import asked_for, asked_of, fake_result, invariant, spec_of
from pycuda_conv.repeat import RepeatTable

__all__ = ["evaluate", "spec_of"]


def evaluate(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, gamma: Tensor | None = None, beta: Tensor | None = None,
    mean: Tensor | None = None, var: Tensor | None = None, eps: float = 1e-5, residual: Tensor | None = None, activation: Any = None,
    stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1, precision: str = "fp32", transposed: bool = False,
    output_padding: Any = 0, padding_mode: Any = "zeros", padding_value: float = 0.0, batch_invariant: bool = False,
) -> Tensor:
    """A convolution, batch normalisation by given statistics, the sum with a residual and an activation, without gradients.

    Parameters
    ----------
    x : (N, C, *size) tensor
    weight, bias, stride, padding, dilation, groups, transposed, output_padding, padding_mode, padding_value
        As for :func:`pycuda_conv.conv2d` and, if `transposed`, :func:`pycuda_conv.conv_transpose2d`. The filter has the rank.
    gamma, beta, mean, var : (K,) tensors, optional
        The result is (y - mean) / sqrt(var + eps) * gamma + beta for the convolution y, computed in float32, or in float64 for float64
        tensors. Without `mean` and `var` it is y * gamma + beta, where those are given. They may be of the type of `x`, or float32.
    eps : float
    residual : tensor of the result's shape, optional
        It is added before the activation.
    activation, precision, batch_invariant
        As for :func:`pycuda_conv.conv2d`.
    """
    settings = Settings(weight.dim() - 2, stride, padding, dilation, groups, precision, None, False, with_invariance(None, batch_invariant))
    settings = settings._replace(padding_mode=padding_mode, padding_value=padding_value)
    asked = asked_for(settings, activation, eps, "conv_transpose" if transposed else "conv", output_padding)
    if torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu"):
        with without_autocast(x):
            return _evaluate(asked, x, weight, bias, gamma, beta, mean, var, residual)
    return _evaluate(asked, x, weight, bias, gamma, beta, mean, var, residual)


#: Calls by their keys, as the launcher in C repeats them.
_again = RepeatTable()


def _evaluate(
    asked: tuple[Any, ...], x: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, mean: Tensor | None,
    var: Tensor | None, residual: Tensor | None,
) -> Tensor:
    operands = x, weight, bias, gamma, beta, mean, var, residual
    if invariance.blocks:
        asked = invariant(asked)
    made = repeat.replay(_again, asked, *operands)
    return _computed(asked, operands) if made is None else made[1]


def _computed(asked: tuple[Any, ...], operands: tuple[Tensor | None, ...]) -> Tensor:
    """The layer in a call that is not repeated."""
    x, weight, bias, gamma, beta, mean, var, residual = (None if one is None else one.detach() for one in operands)
    assert x is not None and weight is not None
    wide, eps = x.dtype is torch.float64, asked[-1]
    if (mean is None) != (var is None):
        raise ConvArgumentError("mean and var must both be given, or none of them")
    if all(one is None for one in (gamma, beta, mean)):
        ways, of_channel = norm_folding.ways_of(asked, x, weight, bias, residual, False), (None, bias)
        if bias is not None:
            of_channel = None, TORCH.as_kernel_input(bias, None)
    else:
        ways = norm_folding.ways_of(asked, x, weight, None, residual, True)
        channels = ways.plan.problem.result_channels
        for name, one in zip(("bias", "gamma", "beta", "mean", "var"), (bias, gamma, beta, mean, var), strict=True):
            if one is not None and (tuple(one.shape) != (channels,) or one.device != x.device):
                given = f"{list(one.shape)} on {one.device}"
                raise ConvArgumentError(f"{name} must have one number for each of {channels} channels, on {x.device}, but got {given}")
        if bias is not None and bias.dtype is not x.dtype:
            raise ConvArgumentError(f"bias type ({bias.dtype}) must be that of x ({x.dtype})")
        folded = norm_folding.fold_norms((gamma, beta, mean, var, bias), (_eps_of(eps, var),), wide)
        of_channel = folded[:channels], folded[channels : 2 * channels]
    y = norm_folding.result(ways, x, weight, *of_channel, residual)
    if TORCH.layout(x, ways.plan.problem.ndim) == ways.plan.problem.layout:
        _remember(asked, operands, ways, y)
    return y


def _eps_of(eps: float, var: Tensor | None) -> float:
    """The eps that a missing variance needs, which counts as zero, so that nothing is divided."""
    return 1.0 if var is None else eps


def _remember(asked: tuple[Any, ...], operands: Sequence[Tensor | None], ways: Any, y: Tensor) -> None:
    """Put a call that was just made into the table, unless better kernels for it are ready."""
    plan, (order, filter_order) = ways.plan, ways.orders
    name = _again.new_key(asked, operands, plan.device, plan)
    if name is None:
        return
    ready, orders = None, (order, filter_order, None, None, None, None, None, order)
    vectors = operands[3:7]  # gamma, beta, mean, variance
    given = [one for one in (*vectors, operands[2]) if one is not None]
    wide = torch.float64 if y.dtype is torch.float64 else torch.float32
    types = {one.dtype for one in given} <= {y.dtype, wide}
    if types and all(one is None or TORCH.is_kernel_input(one, lies) for one, lies in zip(operands, orders, strict=True)):
        # the operands | y | workspace | none
        x, w, bias, gamma, beta, mean, var, residual, made, scratch, none = ((i, 0) for i in range(len(operands) + 3))
        steps, scale, nbytes = [], none, plan.workspace_bytes
        if any(one is not None for one in vectors):
            start, channels = -(-nbytes // 512) * 512, plan.problem.result_channels
            each = wide.itemsize
            places = gamma, beta, mean, var, bias
            of_arrays = tuple(y.dtype is not wide and one is not None and one.dtype is y.dtype for one in (*vectors, operands[2]))
            norm = folding.Norm(channels, 0, _eps_of(float(asked[-1]), operands[6]), of_arrays, tuple(
                place if one is not None else none for place, one in zip(places, (*vectors, operands[2]), strict=True)
            ))  # fmt: skip
            steps = folding.fold(TORCH.dtype_name(y.dtype), [norm], (scratch[0], start))
            scale, bias = (scratch[0], start), (scratch[0], start + channels * each)
            nbytes = start + 2 * channels * each
        steps += repeat.steps_of(plan, ways.filter_last, (x, w, bias, made, scratch, none), residual, scale)
        results = [TORCH.maker(plan.result_shape, y.dtype, y.device, plan.result_order)]
        ready = repeat.launch_sequence(TORCH, plan.device, steps, y, len(operands), results, nbytes)
    _again.put(name, ready, plan)


# ---- the operator

def _operator(
    x: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, mean: Tensor | None, var: Tensor | None,
    residual: Tensor | None, eps: float, spec: Sequence[int],
) -> Tensor:
    return _evaluate(asked_of(tuple(spec), eps), x, weight, bias, gamma, beta, mean, var, residual)


operators.define(
    "evaluate(Tensor x, Tensor weight, Tensor? bias, Tensor? gamma, Tensor? beta, Tensor? mean, Tensor? var, Tensor? residual, float eps, "
    "int[] spec) -> Tensor",
    _operator, fake_result,
)  # fmt: skip
