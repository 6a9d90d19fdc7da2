"""Two tensors concatenated along their channels, where these are last in memory. Torch takes three times as long as memory needs."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch

from pycuda_conv import execute, repeat
from pycuda_conv.arrays.tensors import TORCH
from pycuda_conv.engines.nn import join as engine
from pycuda_conv.problem import channels_last
from pycuda_conv.repeat import RepeatTable

#: Calls by their keys, for the launcher in C.
_again = RepeatTable()
_WORDS = ("cat",)


def cat(a: Any, b: Any) -> Any:
    """The result of ``torch.cat([a, b], 1)`` without gradients."""
    made = repeat.replay(_again, _WORDS, a, b) if repeat.possible() else None
    if made is not None:
        return made[-1]
    a, b = a.detach(), b.detach()
    order = channels_last(a.dim(), a.dim() - 2) if a.is_cuda and a.dim() in (4, 5) else None
    if order is None or not _is_joined(a, b, order):
        return torch.cat([a, b], 1)
    pixels, size = a.numel() // a.shape[1], a.element_size()
    device: Any = TORCH.device(TORCH.signature(a), None)
    shape = (a.shape[0], a.shape[1] + b.shape[1], *a.shape[2:])
    out = TORCH.empty(shape, a, device, order)
    execute.launch(TORCH, device, _launcher(pixels, a.shape[1] * size, b.shape[1] * size, device), (a, b), (out,), 0)
    name = _again.new_key(_WORDS, (a, b), device)
    if name is not None:
        steps = [[engine.join(pixels, a.shape[1] * size, b.shape[1] * size)]]
        results = [TORCH.maker(shape, a.dtype, a.device, order)]
        _again.put(name, repeat.launch_sequence(TORCH, device, steps, out, 2, results, 0))
    return out


def _is_joined(a: Any, b: Any, order: tuple[int, ...]) -> bool:
    if a.dtype is not b.dtype or a.device != b.device or a.dim() != b.dim() or a.shape[0] != b.shape[0] or a.shape[2:] != b.shape[2:]:
        return False
    if not (TORCH.is_kernel_input(a, order) and TORCH.is_kernel_input(b, order)) or math.prod(a.shape[2:]) == 1:
        return False
    return engine.fits(a.numel() // max(a.shape[1], 1), a.shape[1] * a.element_size(), b.shape[1] * b.element_size())


@lru_cache(maxsize=1024)
def _launcher(pixels: int, first: int, second: int, device: Any) -> Any:
    return device.schedule_launcher([[engine.join(pixels, first, second)]])
