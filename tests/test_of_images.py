"""Convolutions of volumes that are computed as those of images."""

from __future__ import annotations

import pytest
import torch
from reference import assert_exact, fprop

import pycuda_conv as pc
from pycuda_conv import ConvProblem
from pycuda_conv.engines.depthwise import nhwc as depthwise_nhwc
from pycuda_conv.runtime.target import Target

H200 = Target("sm_90a")


def launched(of: str, size: tuple, taps: tuple, layout: str, **options) -> ConvProblem:
    x, w = (2, 4, *size), (6, 4, *taps)
    forward = ConvProblem.forward(3, x, w, layout=layout, **options)
    return forward.launched if of == "fprop" else ConvProblem.gradient(of, 3, x, w, forward.result_shape, layout=layout, **options).launched


@pytest.mark.parametrize("of", ["fprop", "input"])
def test_slices_are_images_where_channels_are_last(of):
    flat = launched(of, (5, 6, 7), (1, 3, 3), "NHWC", stride=(1, 2, 1), padding=(0, 1, 2), dilation=(2, 1, 1))
    assert (flat.ndim, flat.N, flat.input_size, flat.output_size) == (2, 10, (1, 6, 7), (1, 3, 9))
    assert (flat.filter_size, flat.stride, flat.padding_before, flat.dilation) == ((1, 3, 3), (1, 2, 1), (0, 1, 2), (1, 1, 1))


def test_of_a_filters_gradient_slices_are_summed_up_like_images():
    flat = launched("weight", (5, 6, 7), (1, 3, 3), "NHWC", padding=(0, 1, 1))
    assert (flat.layout, flat.C, flat.filter_size, flat.output_size) == ("CHWN", 10, (1, 6, 7), (1, 3, 3))


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("of", ["fprop", "input"])
def test_slices_are_rows_of_a_filter_that_has_nothing_but_depth(of, layout):
    flat = launched(of, (5, 6, 7), (3, 1, 1), layout, stride=(2, 1, 1), padding=(1, 0, 0))
    assert (flat.ndim, flat.N, flat.input_size, flat.output_size) == (2, 2, (1, 5, 42), (1, 3, 42))
    assert (flat.filter_size, flat.stride, flat.padding_before, flat.padding_after) == ((1, 3, 1), (1, 2, 1), (0, 1, 0), (0, 1, 0))


@pytest.mark.parametrize(
    ("size", "taps", "options"),
    [
        ((5, 6, 7), (1, 3, 3), {}), ((5, 6, 7), (3, 3, 3), {}), ((5, 6, 7), (1, 1, 1), {}), ((5, 6, 7), (1, 3, 3), {"stride": (2, 1, 1)}),
        ((5, 6, 7), (1, 3, 3), {"padding": (1, 0, 0)}), ((5, 6, 7), (3, 1, 1), {"padding": (0, 1, 0)}),
    ],
)  # fmt: skip
def test_others_stay_volumes(size, taps, options):
    layout = "NCHW" if not options and taps == (1, 3, 3) else "NHWC"
    assert launched("fprop", size, taps, layout, **options).ndim == 3
    assert launched("fprop", (1, *size[1:]), (1, 3, 3), "NCHW").ndim == 2  # of one slice there is nothing between them


def test_what_is_written_beside_the_slices_stays_a_volume():
    problem = ConvProblem.transposed(3, (2, 4, 5, 6, 7), (4, 6, 1, 3, 3), dilation=2, output_padding=(1, 0, 0), layout="NHWC")
    assert problem.launched is problem


def test_depthwise_filters_of_slices_have_the_kernels_of_images():
    problem = ConvProblem.forward(3, (2, 64, 8, 28, 28), (64, 1, 1, 3, 3), padding=(0, 1, 1), groups=64, dtype="float16", layout="NHWC")
    assert isinstance(pc.engines.choose(problem, H200), depthwise_nhwc.CONFIGS)


@pytest.mark.pairs
@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("taps", [(1, 3, 2), (3, 1, 1)], ids=["1x3x2", "3x1x1"])
@pytest.mark.parametrize("groups", [1, 4])
def test_they_compute_what_volumes_do(device, groups, taps, last):
    case = fprop((2, 4, 5, 6, 7), (8, 4 // groups, *taps), groups=groups, stride=(1, 2, 1) if taps[0] == 1 else (2, 1, 1))
    x, w, b = (torch.from_numpy(a) for a in case.integers("float32"))
    x = x.contiguous(memory_format=torch.channels_last_3d) if last else x
    options = case.options
    got = pc.conv3d(x, w, b, device=device, **options)
    assert_exact(got.numpy(), case.reference(x.numpy(), w.numpy(), b.numpy()))
    dy = torch.randint(-4, 5, got.shape).float()
    dy = dy.contiguous(memory_format=torch.channels_last_3d) if last else dy
    dx, dw, _ = torch.ops.aten.convolution_backward(
        dy, x, w, None, case.options["stride"], [0] * 3, [1] * 3, False, [0] * 3, groups, [True, True, False]
    )
    assert torch.equal(pc.conv3d_input(x.shape, w, dy, device=device, **options), dx)
    assert torch.equal(pc.conv3d_weight(x, w.shape, dy, device=device, **options), dw)
