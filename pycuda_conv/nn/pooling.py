"""Max and mean pooling in graphs of ``torch.compile``.

In training torch keeps the input and, for every maximum, its place in 8 bytes. The number of its tap in the window takes one byte. In
evaluation torch writes the places as well; we write none. Torch's means of arrays with the channels last take ten times as long as memory
needs; inductor computes them with their neighbours, so they are computed here in light mode alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from pycuda_conv import execute
from pycuda_conv.arrays import Signature
from pycuda_conv.arrays.tensors import TORCH
from pycuda_conv.engines.nn import max_pool as engine
from pycuda_conv.nn import operators
from pycuda_conv.nn.autograd import _empty_like, _traced, lying_as
from pycuda_conv.problem import channels_last

#: How the axes of arrays lie in memory.
ORDERS = {"NCHW": None, "NHWC": channels_last(4, 2)}


def _pair(value: Any) -> tuple[Any, Any]:
    """What torch's modules make of an argument for two axes: a pair, or one value for both."""
    return tuple(value) if isinstance(value, Iterable) else (value, value)


def pairs_of(kernel_size: Any, stride: Any, padding: Any, dilation: Any) -> tuple[tuple[Any, Any], ...]:
    """Taps, strides, padding and dilation of torch's arguments: a pair each."""
    return tuple(map(_pair, (kernel_size, kernel_size if stride is None or stride == [] else stride, padding, dilation)))


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
        windows = pairs_of(kernel_size, stride, padding, dilation)
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


def mean_pool(
    x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False, count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """The result of ``torch.nn.functional.avg_pool2d``, with its gradient, for calls in which torch need not see operators."""
    if x.is_cuda and x.dim() == 4 and x.dtype in _TYPES and not _traced(x, x, None) and _layout(x) == "NHWC":
        windows = *pairs_of(kernel_size, stride, padding, 1)[:3], bool(ceil_mode), bool(count_include_pad), divisor_override or 0
        found = _mean_of(TORCH.signature(x), windows)
        if found is not None:
            return _Means.apply(x, *found) if torch.is_grad_enabled() and x.requires_grad else _means(x, *found)
    theirs: Any = F.avg_pool2d
    return theirs(x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


@lru_cache(maxsize=256)
def _mean_of(like: Signature, windows: tuple[Any, ...]) -> tuple[engine.Pool, Any] | None:
    """A mean pooling of arrays like `like`, and the device; None if the kernels can't compute it."""
    (n, c, h, w), dtype, _ = like
    taps, stride, padding, beyond, counted, divisor = windows
    pool = engine.Pool(
        TORCH.dtype_name(dtype), (n, c, h, w), taps, stride, padding, (1, 1), "NHWC", beyond, mean=True, counted=counted, divisor=divisor
    )
    return (pool, TORCH.device(like, None)) if pool.fits else None


def _means(x: Any, pool: engine.Pool, device: Any) -> Any:
    y = TORCH.empty(pool.result_shape, x, device, ORDERS["NHWC"])
    execute.launch(TORCH, device, engine.compiled(pool, device, False), (x,), (y,), 0)
    return y


class _Means(torch.autograd.Function):
    """Means with a gradient, for calls in which torch need not see operators."""

    @staticmethod
    def forward(ctx: Any, x: Any, pool: engine.Pool, device: Any) -> Any:
        ctx.how = pool, device
        return _means(x, pool, device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Any) -> Any:
        pool, device = ctx.how
        dy = TORCH.as_kernel_input(dy, ORDERS["NHWC"])
        dx = TORCH.empty(pool.shape, dy, device, ORDERS["NHWC"])
        execute.launch(TORCH, device, engine.compiled(pool, device, True), (dy,), (dx,), 0)
        return dx, None, None


# ---- the operators, in training


def is_pooled(x: Any, windows: tuple[tuple[Any, Any], ...]) -> bool:
    """Whether the operators compute this pooling: on a GPU, and for sizes that are known."""
    layout = _layout(x) if x.is_cuda and x.dtype in _TYPES and all(isinstance(n, int) for n in x.shape) else None
    taps, stride, padding, dilation = windows
    return layout is not None and engine.Pool(TORCH.dtype_name(x.dtype), tuple(x.shape), taps, stride, padding, dilation, layout).fits


def _pool(shape: Sequence[int], dtype: torch.dtype, windows: Sequence[int], last: bool) -> engine.Pool:
    taps, stride, padding, dilation = (tuple(windows[i : i + 2]) for i in range(0, 8, 2))
    return engine.Pool(TORCH.dtype_name(dtype), tuple(shape), taps, stride, padding, dilation, "NHWC" if last else "NCHW")  # type: ignore[arg-type]


def _pooled(x: Any, windows: Sequence[int], last: bool) -> tuple[Any, Any]:
    """The maxima, and the number of each maximum's tap."""
    pool = _pool(x.shape, x.dtype, windows, last)
    taps = torch.empty(math.prod(pool.result_shape), dtype=torch.uint8, device=x.device)
    return _maxima(TORCH.as_kernel_input(x, ORDERS[pool.layout]), pool, TORCH.device(TORCH.signature(x), None), taps), taps


def _fake_pooled(x: Any, windows: Sequence[int], last: bool) -> tuple[Any, Any]:
    shape = _pool(x.shape, x.dtype, windows, last).result_shape
    return _empty_like(x, shape, 2), x.new_empty(math.prod(shape), dtype=torch.uint8)


def _pooled_backward(dy: Any, taps: Any, shape: Sequence[int], windows: Sequence[int], last: bool) -> Any:
    pool, device = _pool(shape, dy.dtype, windows, last), TORCH.device(TORCH.signature(dy), None)
    dx = TORCH.empty(pool.shape, dy, device, ORDERS[pool.layout])
    given = TORCH.as_kernel_input(dy, ORDERS[pool.layout]), taps
    execute.launch(TORCH, device, engine.compiled(pool, device, True), given, (dx,), 0)
    return dx


def _fake_pooled_backward(dy: Any, taps: Any, shape: Sequence[int], windows: Sequence[int], last: bool) -> Any:
    return _empty_like(dy, list(shape), 2)


class _OfOperators(torch.autograd.Function):
    """Maxima with a gradient, by operators."""

    @staticmethod
    def forward(ctx: Any, x: Any, windows: Sequence[int], last: bool) -> Any:
        y, taps = torch.ops.pycuda_conv.max_pool_taps.default(x, windows, last)
        ctx.save_for_backward(taps)
        ctx.how = x.shape, windows, last
        return y

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        (taps,), (shape, windows, last) = ctx.saved_tensors, ctx.how
        dy = lying_as(dy, ORDERS["NHWC" if last else "NCHW"])
        return torch.ops.pycuda_conv.max_pool_backward.default(dy, taps, shape, windows, last), None, None


def _max_pool(x: Any, windows: Sequence[int]) -> Any:
    return _OfOperators.apply(x, windows, _layout(x) == "NHWC")


operators.define("max_pool_taps(Tensor x, int[] windows, bool last) -> (Tensor, Tensor)", _pooled, _fake_pooled)
operators.define(
    "max_pool_backward(Tensor dy, Tensor taps, int[] shape, int[] windows, bool last) -> Tensor", _pooled_backward, _fake_pooled_backward
)
operators.define_by_others("max_pool(Tensor x, int[] windows) -> Tensor", _max_pool)
