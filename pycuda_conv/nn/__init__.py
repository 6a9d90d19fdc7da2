"""Training with torch: its convolution modules on this package's kernels, and :func:`convert`, which puts them into a model.

Gradients and ``torch.compile`` need nothing from here: :func:`pycuda_conv.conv2d` and the other functions have them for torch tensors.
Files of ``torch.export.save`` name operators of this package, so import this module before ``torch.export.load``. It imports torch;
``import pycuda_conv`` does not.
"""

from pycuda_conv.nn import autograd as autograd
from pycuda_conv.nn import conv_norms as conv_norms
from pycuda_conv.nn import conv_operators as conv_operators  # importing these two defines the operators
from pycuda_conv.nn import evaluation as evaluation
from pycuda_conv.nn import folding as folding
from pycuda_conv.nn import repeated as repeated
from pycuda_conv.nn.compiler import CompiledGraph, backend, compile
from pycuda_conv.nn.convert import Conversion, Converted, convert, report, revert
from pycuda_conv.nn.fused import FusedConvBnReLU1d, FusedConvBnReLU2d, FusedConvBnReLU3d
from pycuda_conv.nn.modules import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from pycuda_conv.nn.norm_modules import GroupNorm, InstanceNorm1d, InstanceNorm2d, InstanceNorm3d, LayerNorm, RMSNorm
from pycuda_conv.nn.normalise import group_norm, instance_norm, layer_norm, rms_norm
from pycuda_conv.nn.routing import routed

__all__ = [
    "CompiledGraph", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "Conversion", "Converted",
    "FusedConvBnReLU1d", "FusedConvBnReLU2d", "FusedConvBnReLU3d", "GroupNorm", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d",
    "LayerNorm", "RMSNorm", "backend", "compile", "convert", "group_norm", "instance_norm", "layer_norm", "report", "revert", "rms_norm",
    "routed",
]
