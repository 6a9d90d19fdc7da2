"""torch's convolution functions, computed by this package wherever they are called.

A ``TorchFunctionMode`` sees every call of a torch function while it is active. This one replaces the convolutions and passes on the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import pycuda_conv as pc
from pycuda_conv.nn.modules import checked_precision
from pycuda_conv.typing import Precision

_BY_RANK = {1: (pc.conv1d, pc.conv_transpose1d), 2: (pc.conv2d, pc.conv_transpose2d), 3: (pc.conv3d, pc.conv_transpose3d)}


def _convolution(
    input: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: int, *,
    precision: Precision,
) -> Any:
    """``torch.convolution``, which may be any of the six convolutions."""
    convolve, transpose = _BY_RANK[weight.dim() - 2]
    if transposed:
        return transpose(input, weight, bias, stride, padding, output_padding, groups, dilation, precision=precision)
    return convolve(input, weight, bias, stride, padding, dilation, groups, precision=precision)


def _conv_tbc(input: Any, weight: Any, bias: Any, pad: int = 0, *, precision: Precision) -> Any:
    """``F.conv_tbc``: a 1-d convolution of arrays (time, batch, channels) with a filter (time, input channels, output channels)."""
    return pc.conv1d(input.permute(1, 2, 0), weight.permute(2, 1, 0), bias, padding=pad, precision=precision).permute(2, 0, 1)


#: torch's functions and ours; those of ``torch.nn.functional`` are the same objects.
_ROUTES: dict[Any, Callable[..., Any]] = {
    torch.conv1d: pc.conv1d, torch.conv2d: pc.conv2d, torch.conv3d: pc.conv3d, torch.conv_transpose1d: pc.conv_transpose1d,
    torch.conv_transpose2d: pc.conv_transpose2d, torch.conv_transpose3d: pc.conv_transpose3d, torch.convolution: _convolution,
    torch.conv_tbc: _conv_tbc,
}
_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def _is_ours(input: Any) -> bool:
    """True if this package takes such an input. Complex, integer, quantized and sparse tensors stay torch's."""
    return isinstance(input, torch.Tensor) and input.dtype in _DTYPES and input.layout is torch.strided


class routed(ContextDecorator, TorchFunctionMode):
    """Compute torch's convolutions with this package, in a ``with`` block or in a decorated function.

    Inside, ``F.conv1d``, ``F.conv2d``, ``F.conv3d``, ``F.conv_transpose1d``, ``2d`` and ``3d``, ``F.conv_tbc``, the functions of these
    names in ``torch`` and ``torch.convolution`` are computed by this package, with their gradients. Modules that call them, such as
    ``torch.nn.Conv2d``, are therefore computed by it too. Everything else is torch's, and so are convolutions of tensors that this
    package does not take: complex, integer, quantized and sparse ones. Only the thread that entered the block is affected.

    Parameters
    ----------
    precision : {"fp32", "tf32"}
        Arithmetic for float32, forward and backward: see :func:`pycuda_conv.conv2d`.

    Raises
    ------
    ValueError
        A precision that is not one of these.

    Examples
    --------
    >>> import torch, pycuda_conv.nn
    >>> with pycuda_conv.nn.routed():
    ...     torch.nn.functional.conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3))
    tensor([[[[9.]]]])
    >>> @pycuda_conv.nn.routed(precision="tf32")
    ... def step(layer, x):
    ...     return layer(x)
    >>> step(torch.nn.Conv2d(1, 2, 3), torch.ones(1, 1, 3, 3)).shape
    torch.Size([1, 2, 1, 1])
    """

    def __init__(self, precision: Precision = "fp32") -> None:
        super().__init__()
        checked_precision(precision)
        self.precision = precision

    def _recreate_cm(self) -> routed:
        return self  # the mode has no state and can be entered several times at once

    def __torch_function__(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        ours = _ROUTES.get(func)
        if ours is None or not _is_ours(args[0] if args else kwargs.get("input")):
            return func(*args, **kwargs)
        return ours(*args, **kwargs, precision=self.precision)
