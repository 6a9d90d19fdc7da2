"""Max pooling in graphs of ``torch.compile`` that run as they are.

In training torch keeps the input and, for every maximum, its place in 8 bytes. The number of its tap in the window takes one byte. In
evaluation torch writes the places as well; we write none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from pycuda_conv import execute
from pycuda_conv.arrays import Signature
from pycuda_conv.arrays.tensors import TORCH
from pycuda_conv.engines.nn import max_pool as engine
from pycuda_conv.nn.autograd import _traced
from pycuda_conv.problem import channels_last

#: How the axes of arrays lie in memory.
ORDERS = {"NCHW": None, "NHWC": channels_last(4, 2)}


def _pair(value: Any) -> tuple[Any, Any]:
    """What torch's modules make of an argument for two axes: a pair, or one value for both."""
    return tuple(value) if isinstance(value, Iterable) else (value, value)


@lru_cache(maxsize=256)
def _pool_of(like: Signature, layout: str, windows: tuple[Any, ...], beyond: bool = False) -> tuple[engine.Pool, Any] | None:
    """A pooling of arrays like `like`, and the device; None if the kernels can't compute it."""
    shape, dtype, _ = like
    n, c, h, w = shape
    taps, stride, padding, dilation = windows
    pool = engine.Pool(TORCH.dtype_name(dtype), (n, c, h, w), taps, stride, padding, dilation, layout, beyond)
    return (pool, TORCH.device(like, None)) if pool.fits else None


def _layout(x: Any) -> str | None:
    return next((name for name, order in ORDERS.items() if TORCH.is_laid_out_as(x, order)), None)


def max_pool(
    x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Any:
    """The result of ``torch.nn.functional.max_pool2d``, with its gradient, for calls in which torch need not see operators."""
    if x.is_cuda and x.dim() == 4 and x.dtype in _TYPES and not _traced(x, x, None):
        layout, gradient = _layout(x), torch.is_grad_enabled() and x.requires_grad
        windows = tuple(map(_pair, (kernel_size, kernel_size if stride is None or stride == [] else stride, padding, dilation)))
        found = None if layout is None or (gradient and ceil_mode) else _pool_of(TORCH.signature(x), layout, windows, ceil_mode)
        if found is not None:
            return _Function.apply(x, *found) if gradient else _maxima(x, *found)
    theirs: Any = F.max_pool2d
    return theirs(x, kernel_size, stride, padding, dilation, ceil_mode)


def _maxima(x: Any, pool: engine.Pool, device: Any, taps: Any = None) -> Any:
    """The maxima. `taps`, if given, gets the number of each maximum's tap."""
    y = TORCH.empty(pool.result_shape, x, device, ORDERS[pool.layout])
    execute.launch(TORCH, device, engine.compiled(pool, device, False), (x,), (y, taps), 0)
    return y


_TYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))


class _Function(torch.autograd.Function):
    """Maxima with a gradient, for calls in which torch need not see operators."""

    @staticmethod
    def forward(ctx: Any, x: Any, pool: engine.Pool, device: Any) -> Any:
        taps = torch.empty(math.prod(pool.result_shape), dtype=torch.uint8, device=x.device)
        y = _maxima(x, pool, device, taps)
        ctx.save_for_backward(taps)
        ctx.how = pool, device
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Any) -> Any:
        (taps,), (pool, device) = ctx.saved_tensors, ctx.how
        dy = TORCH.as_kernel_input(dy, ORDERS[pool.layout])
        dx = TORCH.empty(pool.shape, dy, device, ORDERS[pool.layout])
        execute.launch(TORCH, device, engine.compiled(pool, device, True), (dy, taps), (dx,), 0)
        return dx, None, None
