"""torch modules made of the package's kernels."""

from pycuda_conv.nn.fused import FusedConvBnReLU1d, FusedConvBnReLU2d, FusedConvBnReLU3d

__all__ = ["FusedConvBnReLU1d", "FusedConvBnReLU2d", "FusedConvBnReLU3d"]
