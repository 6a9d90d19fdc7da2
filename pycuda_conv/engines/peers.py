"""All engines. A new one is a line here."""

from __future__ import annotations

from pycuda_conv.engines import registry
from pycuda_conv.engines.compose import bordered, columns, fold_channels, upsampled, via_nhwc
from pycuda_conv.engines.depthwise import nhwc as depthwise_nhwc
from pycuda_conv.engines.depthwise import toeplitz as depthwise_toeplitz
from pycuda_conv.engines.direct import direct, patch_wgrad
from pycuda_conv.engines.direct import gemm as direct_gemm
from pycuda_conv.engines.fft import blocks as fft_blocks
from pycuda_conv.engines.fft import fft, library_fft
from pycuda_conv.engines.hopper import dense as hopper_dense
from pycuda_conv.engines.hopper import gather as hopper_gather
from pycuda_conv.engines.hopper import gathered_planes as hopper_gathered_planes
from pycuda_conv.engines.hopper import gemm as hopper_gemm
from pycuda_conv.engines.hopper import planes as hopper_planes
from pycuda_conv.engines.hopper import pointwise as hopper_pointwise
from pycuda_conv.engines.hopper import wgrad as hopper_wgrad
from pycuda_conv.engines.mma import dmma, few_channels, few_channels_wgrad, few_inputs, grouped_nhwc, grouped_nhwc_wgrad
from pycuda_conv.engines.mma import few_pixels as mma_few_pixels
from pycuda_conv.engines.mma import gemm as mma_gemm

#: Among equal predictions that of the first engine wins. One that has a rule stands before those whose rules it beats.
registry.ENGINES = (
    depthwise_nhwc, depthwise_toeplitz, fft_blocks, library_fft, fft, direct, patch_wgrad, direct_gemm, dmma,
    grouped_nhwc, grouped_nhwc_wgrad, few_channels, few_channels_wgrad, few_inputs, hopper_dense, hopper_gather, hopper_wgrad,
    hopper_gemm, hopper_pointwise, mma_few_pixels, mma_gemm, hopper_planes, hopper_gathered_planes, via_nhwc, columns, bordered,
    upsampled, fold_channels,
)  # fmt: skip
registry.TRANSFORMS = fft_blocks, library_fft, fft
