"""The gradient of a bias in a backward pass: sums over all but the channels, by two launches; torch's own sum takes several times as long.

A repeated pass is one call of the launcher in C: see :mod:`pycuda_conv.repeat`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from pycuda_conv import dispatch, repeat
from pycuda_conv.arrays.tensors import TORCH
from pycuda_conv.engines.nn import batch_norm
from pycuda_conv.problem import channels_last
from pycuda_conv.repeat import RepeatTable

#: Sums by their keys, for the launcher in C.
_again = RepeatTable()
_TYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))


def takes(gradient: Any) -> bool:
    """Whether the kernels sum it; torch sums what it has to differentiate or trace."""
    if not gradient.is_cuda or torch.is_grad_enabled() or gradient.dtype not in _TYPES or not gradient.numel():
        return False
    return not TORCH.traced(gradient, gradient, None)


def summed(ndim: int, gradient: Any) -> Any:
    """The sums of a gradient of `ndim` spatial axes, with or without one for images, for each channel."""
    made = repeat.replay(_again, ("bias", ndim), gradient) if repeat.possible() else None
    if made is not None:
        return made[1]
    sums = dispatch.sum_channels(ndim, gradient, None, None, True)
    device: Any = TORCH.device(TORCH.signature(gradient), None)
    name, layout = _again.new_key(("bias", ndim), (gradient,), device), TORCH.layout(gradient, ndim)
    order = channels_last(gradient.dim(), ndim) if layout == "NHWC" else None
    if name is not None and TORCH.is_kernel_input(gradient, order):
        shape, images = gradient.shape, gradient.shape[0] if gradient.dim() == ndim + 2 else 1
        pixels = batch_norm.Pixels(TORCH.dtype_name(gradient.dtype), layout, images, shape[-ndim - 1], math.prod(shape[-ndim:]))
        steps, nbytes = batch_norm.channel_sums(pixels, device.multiprocessors)
        results = [TORCH.maker((pixels.K,), gradient.dtype, gradient.device, None)]
        _again.put(name, repeat.launch_sequence(TORCH, device, [[one] for one in steps], gradient, 1, results, nbytes))
    return sums
