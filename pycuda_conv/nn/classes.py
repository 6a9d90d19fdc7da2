"""What modules compute, judged by their classes and attributes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import nn

from pycuda_conv.nn import modules

NORMS: dict[type, int] = {nn.BatchNorm1d: 1, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}
_CONVOLUTIONS = (
    modules.Conv1d, modules.Conv2d, modules.Conv3d, modules.ConvTranspose1d, modules.ConvTranspose2d, modules.ConvTranspose3d,
)
ALL_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

_remembered: Any = lru_cache(maxsize=1024)


def origin(cls: type) -> Any:
    """The class that a module had before it was converted."""
    return cls.__dict__.get("_origin", cls)


@_remembered
def overrides(cls: type, base: type, names: tuple[str, ...] = ("forward", "__call__", "_conv_forward", "_output_padding")) -> bool:
    """True if `cls` computes something else than its base class `base`, judged by the methods of these names."""
    return any(getattr(cls, name, None) is not getattr(base, name, None) for name in names)


@_remembered
def is_convolution(cls: type) -> bool:
    """True if modules of this class are convolutions computed by this package."""
    return any(issubclass(cls, base) and not overrides(cls, base) for base in _CONVOLUTIONS)


@_remembered
def norm_base(cls: type) -> Any:
    """torch's batch normalisation that this class is or derives from; None if there is none."""
    return next((base for base in NORMS if issubclass(cls, base)), None)


@_remembered
def is_plain_norm(cls: type) -> bool:
    """True if modules of this class compute what torch's batch normalisation computes."""
    base = norm_base(cls)
    return base is not None and not overrides(cls, base)


def is_container(module: nn.Module) -> bool:
    """True for a ModuleList and the like, which have no forward."""
    return not isinstance(module, torch.jit.ScriptModule) and origin(type(module)).forward is nn.Module.forward


def is_sequence(module: nn.Module) -> bool:
    """True for an nn.Sequential and the like, which call their modules one after the other."""
    cls = origin(type(module))
    return issubclass(cls, nn.Sequential) and not overrides(cls, nn.Sequential) and "forward" not in module.__dict__


def hooked(module: Any) -> bool:
    """True if a call of the module, or a gradient through it, also runs something else than its forward."""
    own = module.__dict__  # a module's attributes are slow
    return bool(
        own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    ) or nn.modules.module._has_any_global_hook()
