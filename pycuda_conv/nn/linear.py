"""``nn.Linear`` of float32 as a 1x1 convolution: torch multiplies float32 on plain cores, this package on tensor cores, as exactly.

All but the last axis of the input count as the pixels of one image whose channels are last. The gradient of the weight is dy^T x. That is
the product of a transposed 1x1 convolution whose channels are the rows: its input is x, with `features` pixels, and its filter is dy. As
packing a filter takes long, torch computes that product where there are many rows.

In a graph of ``torch.compile`` a layer in evaluation and the steps after it are one call: see :func:`in_one`. In a graph for inductor that
call is an operator, ``torch.ops.pycuda_conv.product``, where :func:`pays` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn import functional as F

import pycuda_conv as pc
from pycuda_conv.arguments import ACTIVATIONS, activation_and_slope
from pycuda_conv.arrays.torch_internals import multiplies_in_float32
from pycuda_conv.engines.geometry import bits, from_bits
from pycuda_conv.nn import operators
from pycuda_conv.nn.autograd import _differentiated, _traced, activated
from pycuda_conv.typing import Precision

#: The least products, rows, and features in or out for which our kernels are faster.
LEAST_PRODUCTS, LEAST_ROWS, LEAST_FEATURES = 2**27, 256, 32
#: The least rows where more than the product is computed, and the most elements of the weight for that. With a larger weight, which every
#: call packs, LEAST_ROWS are needed here too.
LEAST_FUSED_ROWS, MOST_FUSED_WEIGHT = 48, 2**22
#: The longest sums of 16 bits that pay in a graph that inductor takes on.
MOST_SUMMED = 1024
#: The most rows for which our product computes the gradient of the weight.
MOST_ROWS = 2**13


def linear(x: Any, weight: Any, bias: Any) -> Any:
    """The result of ``torch.nn.functional.linear``."""
    if _is_worth_it(x, weight) and not _traced(x, weight, bias) and forward_ad._current_level < 0:
        rows = x.reshape(-1, x.shape[-1])
        made = _Function.apply(rows, weight, bias) if _differentiated(x, weight, bias, None, None) else _product(rows, weight, bias)
        return made.view(*x.shape[:-1], -1)
    return F.linear(x, weight, bias)


def in_one(x: Any, weight: Any, bias: Any, scale: Any, residual: Any, activation: Any, moved: bool) -> Any:
    """A linear layer, with its last axis moved to the second place if `moved`, times `scale`, plus `residual`, then the activation.

    Each of the last three may be None; `scale` has one number a channel. No gradients are recorded.
    """
    made = _in_one(x, weight, bias, scale, residual, activation, moved)
    if made is not None:
        return made
    made = linear(x, weight, bias)
    made = made.movedim(-1, 1) if moved else made
    made = made if scale is None else made * scale
    made = activated(made if residual is None else made + residual, activation)
    return made.contiguous(memory_format=torch.channels_last if moved else torch.contiguous_format)  # a residual may lie otherwise


def _in_one(x: Any, weight: Any, bias: Any, scale: Any, residual: Any, activation: Any, moved: bool) -> Any:
    """The same as :func:`in_one`, by one convolution; None where that does not pay."""
    if scale is residual is activation is None and not moved:
        return None
    if not _is_worth_fusing(x, weight, (bias, scale, residual)) or _traced(x, weight, bias):
        return None
    shape = x.shape
    precision: Precision = "fp32" if multiplies_in_float32() else "tf32"
    if scale is not None:
        scale = scale.reshape(-1)
        bias = None if bias is None else bias * scale
    if len(shape) == 4:
        added = residual if residual is None or moved else residual.movedim(-1, 1)
        made = pc.conv2d(
            x.movedim(-1, 1), weight[:, :, None, None], bias, scale=scale, residual=added, activation=activation, precision=precision
        )
        return made if moved else made.movedim(1, -1)
    added = None if residual is None else residual.reshape(-1, len(weight)).t()[None]
    rows = x.reshape(-1, shape[-1]).t()[None]
    made = pc.conv1d(rows, weight[:, :, None], bias, scale=scale, residual=added, activation=activation, precision=precision)
    return made[0].t().view(*shape[:-1], -1)


def _is_worth_fusing(x: Any, weight: Any, others: tuple[Any, ...]) -> bool:
    if x.dtype not in _TYPES or not x.is_cuda or x.dim() < 2 or x.shape[-1] != weight.shape[1] or torch.is_autocast_enabled("cuda"):
        return False
    if any(one is not None and one.dtype is not x.dtype for one in (weight, *others)):
        return False
    rows = x.numel() // max(x.shape[-1], 1)
    return min(weight.shape) >= LEAST_FEATURES and rows >= (LEAST_FUSED_ROWS if weight.numel() <= MOST_FUSED_WEIGHT else LEAST_ROWS)


_TYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))


def pays(x: Any, weight: Any, activation: Any, is_added_to: bool) -> bool:
    """Whether a layer in evaluation takes less time by :func:`in_one` than by torch's product and a kernel of inductor's after it.

    Float32 does where torch multiplies it on plain cores. In 16 bits torch's product itself is as fast or faster. What is saved is that its
    result is written and read once more, so the sum has to be short. Tensors may be a tracer's.
    """
    if x.device.type != "cuda" or weight.device != x.device or min(weight.shape) < LEAST_FEATURES or weight.numel() > MOST_FUSED_WEIGHT:
        return False
    if x.dtype is torch.float32:
        return x.dim() > 2 and multiplies_in_float32()  # those of two axes are mostly classifiers of few rows
    return x.dtype in _TYPES and (activation is not None or is_added_to) and bool(weight.shape[1] <= MOST_SUMMED)


def _is_worth_it(x: Any, weight: Any) -> bool:
    if x.dtype is not torch.float32 or weight.dtype is not torch.float32 or not x.is_cuda or x.dim() < 2 or x.shape[-1] != weight.shape[1]:
        return False
    if torch.is_autocast_enabled("cuda") or not multiplies_in_float32():
        return False
    features, rows = min(weight.shape), x.numel() // max(x.shape[-1], 1)
    return features >= LEAST_FEATURES and rows >= LEAST_ROWS and x.numel() * weight.shape[0] >= LEAST_PRODUCTS


def spec_of(activation: Any, moved: bool) -> list[int]:
    """The options of :func:`in_one` as the operator takes them: the activation's number and its slope's bits, and `moved`."""
    number, slope = activation_and_slope(activation)
    return [number, bits(slope, 8), int(moved)]


def _operator(x: Any, weight: Any, bias: Any, scale: Any, residual: Any, spec: Sequence[int]) -> Any:
    number, slope, moved = spec
    word = ACTIVATIONS[number]
    return in_one(x, weight, bias, scale, residual, (word, from_bits(slope, 8)) if word == "leaky_relu" else word, bool(moved))


def _fake(x: Any, weight: Any, bias: Any, scale: Any, residual: Any, spec: Sequence[int]) -> Any:
    made = x.new_empty((*x.shape[:-1], weight.shape[0]))
    return made.movedim(-1, 1) if spec[2] else made


operators.define(
    "product(Tensor x, Tensor weight, Tensor? bias, Tensor? scale, Tensor? residual, int[] spec) -> Tensor", _operator, _fake,
)  # fmt: skip


def _product(x: Any, weight: Any, bias: Any) -> Any:
    """x weight^T + bias, for the rows of `x`."""
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
