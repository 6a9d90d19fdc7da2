"""``nn.Linear`` of float32 as a 1x1 convolution: torch multiplies float32 on plain cores, and this package on tensor cores, as exactly.

All but the last axis of the input count as the pixels of one image whose channels are last. The gradient of the weight is dy^T x. That is
the product of a transposed 1x1 convolution whose channels are the rows: x is its input of `features` pixels, and dy its filter. Filters
take long to pack, so where rows are many that product is torch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn import functional as F

import pycuda_conv as pc
from pycuda_conv.nn.autograd import _differentiated, _traced

#: The fewest multiplications, rows, and features in or out that are worth it.
LEAST_PRODUCTS, LEAST_ROWS, LEAST_FEATURES = 2**27, 256, 32
#: The most rows with which our product is the gradient of the weight.
MOST_ROWS = 2**13


def linear(x: Any, weight: Any, bias: Any) -> Any:
    """What ``torch.nn.functional.linear`` gives."""
    if _is_worth_it(x, weight) and not _traced(x, weight, bias) and forward_ad._current_level < 0:
        rows = x.reshape(-1, x.shape[-1])
        made = _Function.apply(rows, weight, bias) if _differentiated(x, weight, bias, None, None) else _product(rows, weight, bias)
        return made.view(*x.shape[:-1], -1)
    return F.linear(x, weight, bias)


def _is_worth_it(x: Any, weight: Any) -> bool:
    if x.dtype is not torch.float32 or weight.dtype is not torch.float32 or not x.is_cuda or x.dim() < 2 or x.shape[-1] != weight.shape[1]:
        return False
    if torch.is_autocast_enabled("cuda") or torch.get_float32_matmul_precision() != "highest":
        return False
    features, rows = min(weight.shape), x.numel() // max(x.shape[-1], 1)
    return features >= LEAST_FEATURES and rows >= LEAST_ROWS and x.numel() * weight.shape[0] >= LEAST_PRODUCTS


def _product(x: Any, weight: Any, bias: Any) -> Any:
    """x weight^T + bias, of `x` as rows."""
    return pc.conv1d(x.t()[None], weight[:, :, None], bias)[0].t()


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        (x, weight), (of_x, of_weight, of_bias) = ctx.saved_tensors, ctx.needs_input_grad
        dx = dweight = None
        if of_x:
            dx = pc.conv_transpose1d(dy.t()[None], weight[:, :, None])[0].t()
        if of_weight:
            dweight = dy.t() @ x if x.shape[0] > MOST_ROWS else pc.conv_transpose1d(x[None], dy[:, :, None])[0]
        return dx, dweight, pc.conv1d_bias(dy.t()[None]) if of_bias else None
