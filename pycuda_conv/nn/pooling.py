"""``nn.MaxPool2d`` in training: less is kept for its gradient than torch keeps.

torch keeps the input and, of every maximum, the place in 8 bytes. Which tap of a window a maximum is of takes one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.utils import _pair

from pycuda_conv import execute
from pycuda_conv.arrays import Signature
from pycuda_conv.arrays.tensors import TORCH
from pycuda_conv.engines import max_pool
from pycuda_conv.nn.autograd import _differentiated, _traced
from pycuda_conv.problem import channels_last

#: How the axes of arrays lie in memory.
ORDERS = {"NCHW": None, "NHWC": channels_last(4, 2)}


@lru_cache(maxsize=256)
def _pool_of(like: Signature, layout: str, taps: Any, stride: Any, padding: Any, dilation: Any) -> tuple[max_pool.Pool, Any] | None:
    """Such a pooling of arrays like that, and the device; None if the kernels can't do it."""
    shape, dtype, _ = like
    n, c, h, w = shape
    pool = max_pool.Pool(TORCH.dtype_name(dtype), (n, c, h, w), taps, stride, padding, dilation, layout)
    return (pool, TORCH.device(like, None)) if pool.fits else None


def pooled(module: Any, x: Any) -> Any:
    """What a ``nn.MaxPool2d`` gives for `x`, or None where torch is to compute it."""
    if module.return_indices or module.ceil_mode or not x.is_cuda or x.dim() != 4 or x.dtype not in _TYPES:
        return None
    layout = next((name for name, order in ORDERS.items() if TORCH.is_laid_out_as(x, order)), None)
    if layout is None or not _differentiated(x, x, None, None, None) or _traced(x, x, None):
        return None
    found = _pool_of(TORCH.signature(x), layout, *map(_pair, (module.kernel_size, module.stride, module.padding, module.dilation)))
    return None if found is None else _Function.apply(x, *found)


_TYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))


class _Function(torch.autograd.Function):
    """Maxima, with a gradient where torch need not see operators."""

    @staticmethod
    def forward(ctx: Any, x: Any, pool: max_pool.Pool, device: Any) -> Any:
        y = TORCH.empty(pool.result_shape, x, device, ORDERS[pool.layout])
        taps = torch.empty(y.numel(), dtype=torch.uint8, device=x.device)
        execute.launch(TORCH, device, max_pool.compiled(pool, device, False), (x,), (y, taps), 0)
        ctx.save_for_backward(taps)
        ctx.how = pool, device
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Any) -> Any:
        (taps,), (pool, device) = ctx.saved_tensors, ctx.how
        dy = TORCH.as_kernel_input(dy, ORDERS[pool.layout])
        dx = TORCH.empty(pool.shape, dy, device, ORDERS[pool.layout])
        execute.launch(TORCH, device, max_pool.compiled(pool, device, True), (dy, taps), (dx,), 0)
        return dx, None, None
