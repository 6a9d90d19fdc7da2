"""Parameters of a graph in 16 bits, which one call casts for all layers.

Under ``torch.autocast`` torch casts each filter by itself, and has a backward pass for each cast. These take the host as long as a fused
layer's own launches. A graph of ``torch.compile`` casts at its start, all at once; the gradients are cast back at once too, when the last
of them is there.

:func:`cast_all` is for tensors with numbers, ``torch.ops.pycuda_conv.cast_all`` the same for compilers of torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pycuda_conv.arrays import torch_internals
from pycuda_conv.nn import operators

HALVES = torch.float16, torch.bfloat16


def cast_all(dtype: torch.dtype, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The float32 `tensors` in a type of 16 bits, with their gradients."""
    return _Function.apply(dtype, *tensors) if torch.is_grad_enabled() else _cast(dtype, tensors)


def _cast(dtype: torch.dtype, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in another type, by as few launches as hold them all. Each lies as it did."""
    made = [torch.empty_like(one, dtype=dtype, requires_grad=False) for one in tensors]
    with torch.no_grad():
        torch_internals.copy_all(made, list(tensors))
    return made


class _Function(torch.autograd.Function):
    """The tensors are arguments and results one by one, so torch sees which of them need gradients."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(_cast(dtype, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [one for one in gradients if one is not None]
        if torch.is_grad_enabled():
            wide: Any = iter([one.float() for one in given])
        else:
            wide = iter(_cast(torch.float32, given) if given else [])
        return None, *(None if one is None else next(wide) for one in gradients)


# ---- the operators


def _narrowed(tensors: Sequence[Tensor], brain: bool) -> list[Tensor]:
    return _cast(HALVES[brain], tensors)


def _widened(tensors: Sequence[Tensor]) -> list[Tensor]:
    return _cast(torch.float32, tensors)


def _fake_narrowed(tensors: Sequence[Tensor], brain: bool) -> list[Tensor]:
    return [torch.empty_like(one, dtype=HALVES[brain]) for one in tensors]


def _fake_widened(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(one, dtype=torch.float32) for one in tensors]


class _OfOperators(torch.autograd.Function):
    """The same by operators."""

    @staticmethod
    def forward(ctx: Any, brain: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(torch.ops.pycuda_conv.narrowed.default(tensors, brain))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [one for one in gradients if one is not None]
        wide = iter(torch.ops.pycuda_conv.widened.default(given) if given else [])
        return None, *(None if one is None else next(wide) for one in gradients)


def _cast_all(tensors: Sequence[Tensor], brain: bool) -> list[Tensor]:
    return list(_OfOperators.apply(brain, *tensors))


operators.define("narrowed(Tensor[] tensors, bool brain) -> Tensor[]", _narrowed, _fake_narrowed)
operators.define("widened(Tensor[] tensors) -> Tensor[]", _widened, _fake_widened)
operators.define_by_others("cast_all(Tensor[] tensors, bool brain) -> Tensor[]", _cast_all)
