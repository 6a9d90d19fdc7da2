"""Layers in evaluation: a convolution, batch normalisation by running statistics, the sum with a residual, and an activation in one call.

The kernels read gamma, beta, mean and variance where they finish a sum (``cu/finish.cuh``, ``cu/epilogue.cuh``). Nothing is computed ahead
and nothing is kept between calls, so whoever writes to these vectors, and how, is noticed.

:func:`evaluate` is for tensors with numbers. ``torch.ops.pycuda_conv.evaluate`` is the same for compilers of torch's; it has no gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pycuda_conv import dispatch
from pycuda_conv.engines.geometry import bits, from_bits
from pycuda_conv.nn.autograd import CONV, CONV_TRANSPOSE, Settings, _empty_like, _in_numbers, without_autocast
from pycuda_conv.problem import ACTIVATIONS, PRECISIONS, activation_and_slope, checked_activation, integers

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


def _evaluate(
    asked: tuple[Any, ...], x: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, mean: Tensor | None,
    var: Tensor | None, residual: Tensor | None,
) -> Tensor:
    function, stride, padding, dilation, groups, precision, size, activation, eps = asked
    call = function, weight.dim() - 2, stride, padding, dilation, groups, precision, size if function == "conv_transpose" else 0, activation
    scale, shift = None, bias
    with torch.no_grad():
        if mean is not None and var is not None:
            wide = torch.float64 if x.dtype is torch.float64 else torch.float32
            scale = torch.rsqrt(var.to(wide) + eps)
            scale = scale if gamma is None else scale * gamma
            shift = (-mean if bias is None else bias - mean) * scale
            shift = (shift if beta is None else shift + beta).to(x.dtype)
            scale = scale.to(x.dtype)
        made: Tensor = dispatch.convolve(call, (x, weight, shift, scale, residual), None, (None, None, None, False), True)
    return made


# ---- the operator

_library = torch.library.Library("pycuda_conv", "FRAGMENT")
_library.define(
    "evaluate(Tensor x, Tensor weight, Tensor? bias, Tensor? gamma, Tensor? beta, Tensor? mean, Tensor? var, Tensor? residual, float eps, "
    "int[] spec) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def _operator(
    x: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, mean: Tensor | None, var: Tensor | None,
    residual: Tensor | None, eps: float, spec: Sequence[int],
) -> Tensor:
    options = _Options.of(tuple(spec))
    settings, function = options.settings, "conv_transpose" if options.transposed else "conv"
    asked = (
        function, settings.stride, settings.padding, settings.dilation, settings.groups, settings.precision, options.output_padding,
        options.activation, eps,
    )  # fmt: skip
    return _evaluate(asked, x, weight, bias, gamma, beta, mean, var, residual)


def _fake(x: Tensor, weight: Tensor, bias: Any, gamma: Any, beta: Any, mean: Any, var: Any, residual: Any, eps: float, spec: Any) -> Any:
    options = _Options.of(tuple(spec))
    operator = CONV_TRANSPOSE if options.transposed else CONV
    return _empty_like(x, operator.shape(options.settings, x.shape, weight.shape, options.output_padding), options.settings.ndim)


for _place in ("CPU", "CUDA"):
    _library.impl("evaluate", _operator, _place)
torch.library.register_fake("pycuda_conv::evaluate", _fake, lib=_library)
