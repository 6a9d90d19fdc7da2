"""All engines. A new one is a line here."""

from __future__ import annotations

from pycuda_conv.engines import (
    columns,
    dense_nhwc_sm90,
    depthwise_nhwc,
    depthwise_toeplitz,
    direct,
    direct_gemm,
    direct_quads,
    dmma,
    few_channels,
    few_channels_wgrad,
    few_inputs,
    few_pixels_sm90,
    fft,
    gather_nhwc_sm90,
    gathered_planes_sm90,
    grouped_nhwc,
    grouped_nhwc_wgrad,
    implicit_gemm_sm80,
    implicit_gemm_sm90,
    library_fft,
    lines_sm90,
    patch_wgrad,
    planes_sm90,
    pointwise_sm90,
    registry,
    via_nhwc,
    wgrad_nhwc_sm90,
)

#: Among equal predictions that of the first engine wins. One that has a rule stands before those whose rules it beats.
registry.ENGINES = (
    depthwise_nhwc, depthwise_toeplitz, library_fft, fft, direct, patch_wgrad, direct_gemm,
    direct_quads, dmma, grouped_nhwc, grouped_nhwc_wgrad, few_channels, few_channels_wgrad, few_inputs, dense_nhwc_sm90,
    gather_nhwc_sm90, wgrad_nhwc_sm90, implicit_gemm_sm90, pointwise_sm90, lines_sm90, few_pixels_sm90, implicit_gemm_sm80, planes_sm90,
    gathered_planes_sm90, via_nhwc, columns,
)  # fmt: skip
registry.TRANSFORMS = library_fft, fft
