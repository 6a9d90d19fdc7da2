"""Torch's norm modules, computed by this package, with an activation that may stand behind.

Each class is torch's own with another forward: it has the same parameters, initialisation and state_dict.
"""

from __future__ import annotations

from typing import Any

import torch

from pycuda_conv.arguments import checked_activation
from pycuda_conv.nn.autograd import activated
from pycuda_conv.nn.modules import marked
from pycuda_conv.nn.normalise import group_norm, instance_norm, layer_norm, rms_norm

__all__ = ["GroupNorm", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d", "LayerNorm", "RMSNorm"]


class _Activated:
    """The base of all of them."""

    activation: Any = None

    def __init__(self, *args: Any, activation: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.activation = checked_activation(activation)

    def extra_repr(self) -> str:
        text: str = super().extra_repr()  # type: ignore[misc]
        return marked(text if self.activation is None else f"{text}, activation={self.activation}")


class GroupNorm(_Activated, torch.nn.GroupNorm):
    """``torch.nn.GroupNorm`` by :func:`pycuda_conv.nn.group_norm`, which gives the memory format that it gets."""

    def forward(self, input: Any) -> Any:
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps, self.activation)


class LayerNorm(_Activated, torch.nn.LayerNorm):
    """``torch.nn.LayerNorm`` by :func:`pycuda_conv.nn.layer_norm`."""

    def forward(self, input: Any) -> Any:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, self.activation)


class RMSNorm(_Activated, torch.nn.RMSNorm):
    """``torch.nn.RMSNorm`` by :func:`pycuda_conv.nn.rms_norm`."""

    def forward(self, x: Any) -> Any:
        return rms_norm(x, self.normalized_shape, self.weight, self.eps, self.activation)


class _InstanceNorm(_Activated):
    """By :func:`pycuda_conv.nn.instance_norm` where each image has its own statistics; running ones are torch's work."""

    def forward(self, input: Any) -> Any:
        module: Any = self
        batched = input.dim() == module._get_no_batch_dim() + 1
        if not batched or module.track_running_stats or input.shape[1] != module.num_features:
            y = super().forward(input)  # type: ignore[misc]
            return y if self.activation is None else activated(y, self.activation)
        return instance_norm(input, module.weight, module.bias, module.eps, self.activation)


class InstanceNorm1d(_InstanceNorm, torch.nn.InstanceNorm1d):
    """``torch.nn.InstanceNorm1d`` by :func:`pycuda_conv.nn.instance_norm`."""


class InstanceNorm2d(_InstanceNorm, torch.nn.InstanceNorm2d):
    """``torch.nn.InstanceNorm2d`` by :func:`pycuda_conv.nn.instance_norm`."""


class InstanceNorm3d(_InstanceNorm, torch.nn.InstanceNorm3d):
    """``torch.nn.InstanceNorm3d`` by :func:`pycuda_conv.nn.instance_norm`."""
