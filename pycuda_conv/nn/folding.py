"""The norms of a network in evaluation, each as a factor and a summand of its convolution, which one launch computes for all of them.

A graph calls :func:`fold_norms` at its start, in each call. Nothing is kept between calls, so whoever writes to the norms' vectors, and how,
is noticed. The convolutions read their part of the result: :func:`scaled`. Kernels could read the four vectors themselves where they finish
a sum, but their threads would do that once for each tile: it took a third of the time of ResNet-50's layers in float16 on an H200.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pycuda_conv import dispatch
from pycuda_conv.nn import evaluation, operators

__all__ = ["fold_norms", "scaled", "starts_of"]

#: Vectors of a norm, in the order of :func:`fold_norms`.
VECTORS = 5
ALIGNED = 4  # elements to which a norm's factors are aligned


def starts_of(channels: Sequence[int]) -> list[int]:
    """Where the norms of so many channels lie in the result of :func:`fold_norms`, and at the end the number of its elements.

    A norm's K factors lie at its start, its K summands behind them.
    """
    starts = [0]
    for count in channels:
        starts.append(starts[-1] + -(-2 * count // ALIGNED) * ALIGNED)
    return starts


def fold_norms(vectors: Sequence[Tensor | None], eps: Sequence[float], wide: bool = False) -> Tensor:
    """Factors and summands of norms by given statistics, as their convolutions take them.

    Parameters
    ----------
    vectors : gamma, beta, mean and variance of each norm, and the bias of its convolution, one after the other
        (K,) tensors on one device; mean and variance of any norm must be there, the others may be None.
    eps : a float for each norm
    wide : bool
        For convolutions of float64; the result is float64 then, else float32.

    Returns
    -------
    tensor
        gamma / sqrt(var + eps) and (bias - mean) * factor + beta of the norms, where :func:`starts_of` says.
    """
    dtype, found = torch.float64 if wide else torch.float32, []
    with torch.no_grad():
        for i, small in enumerate(eps):
            gamma, beta, mean, var, bias = (None if one is None else one.to(dtype) for one in vectors[VECTORS * i : VECTORS * (i + 1)])
            assert mean is not None and var is not None
            factor = torch.rsqrt(var + small) if gamma is None else torch.rsqrt(var + small) * gamma
            summand = -mean * factor if bias is None else (bias - mean) * factor
            found += factor, summand if beta is None else summand + beta
            found.append(factor.new_zeros(-2 * len(factor) % ALIGNED))
        return torch.cat(found)


def scaled(asked: tuple[Any, ...], start: int, x: Tensor, weight: Tensor, folded: Tensor, residual: Tensor | None) -> Tensor:
    """A convolution with the norm that lies at `start` in `folded`, the sum with a residual and an activation, without gradients.

    `asked` is as :func:`pycuda_conv.nn.evaluation._evaluate` takes it; its last member is not read.
    """
    function, stride, padding, dilation, groups, precision, size, activation, _ = asked
    call = function, weight.dim() - 2, stride, padding, dilation, groups, precision, size if function == "conv_transpose" else 0, activation
    channels = weight.shape[1] * groups if function == "conv_transpose" else weight.shape[0]
    with torch.no_grad():
        scale, shift = (folded[start + i * channels :][:channels].to(x.dtype) for i in (0, 1))
        made: Tensor = dispatch.convolve(call, (x, weight, shift, scale, residual), None, (None, None, None, False), True)
    return made


# ---- the operators


def _fake_folded(vectors: Sequence[Tensor | None], eps: Sequence[float], wide: bool) -> Tensor:
    means = [one for one in vectors[2::VECTORS] if one is not None]
    return means[0].new_empty(starts_of([one.shape[0] for one in means])[-1], dtype=torch.float64 if wide else torch.float32)


def _scaled(x: Tensor, weight: Tensor, folded: Tensor, residual: Tensor | None, start: int, spec: Sequence[int]) -> Tensor:
    return scaled(evaluation._asked(tuple(spec), 0.0), start, x, weight, folded, residual)


def _fake_scaled(x: Tensor, weight: Tensor, folded: Tensor, residual: Any, start: int, spec: Sequence[int]) -> Any:
    return evaluation._fake(x, weight, None, None, None, None, None, residual, 0.0, spec)


operators.define("fold_norms(Tensor?[] vectors, float[] eps, bool wide) -> Tensor", fold_norms, _fake_folded)
operators.define("scaled(Tensor x, Tensor weight, Tensor folded, Tensor? residual, int start, int[] spec) -> Tensor", _scaled, _fake_scaled)
