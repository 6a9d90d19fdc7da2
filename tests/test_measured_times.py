"""Models of time beside what kernels took on an H200 or an H100, in microseconds."""

from __future__ import annotations

import pytest

from pycuda_conv import ConvProblem, engines
from pycuda_conv.engines.compose.via_nhwc import ViaNhwc
from pycuda_conv.engines.direct.direct import Batched, Dgrad, Single, Tile, Wgrad
from pycuda_conv.engines.direct.gemm import Gemm
from pycuda_conv.engines.fft.library_fft import LibraryFft
from pycuda_conv.engines.hopper.dense import DenseNhwc
from pycuda_conv.engines.hopper.gemm import ImplicitGemm
from pycuda_conv.engines.hopper.pointwise import Pointwise
from pycuda_conv.engines.mma.few_inputs import FewInputs
from pycuda_conv.runtime.target import Target

H200 = Target("sm_90a")


def depthwise(n, c, h, w, taps, stride=1, dtype="float32", **options):
    return ConvProblem.forward(2, (n, c, h, w), (c, 1, taps, taps), padding=taps // 2, stride=stride, groups=c, dtype=dtype, **options)


def depthwise_gradient(n, c, h, w, taps, stride=1, **options):
    options |= {"padding": taps // 2, "stride": stride, "groups": c}
    shapes = (n, c, h, w), (c, 1, taps, taps)
    return ConvProblem.gradient("input", 2, *shapes, ConvProblem.forward(2, *shapes, **options).result_shape, **options)


def upsampling(n, c, k, size, **options):
    """A transposed filter of 16x16 with a stride of 8: 64 phases."""
    return ConvProblem.transposed(2, (n, c, size, size), (c, k, 16, 16), stride=8, padding=4, **options)


def last_3x3(n, c, k, size, stride=1, **options):
    options = {"dtype": "bfloat16", "layout": "NHWC", "padding": options.get("dilation", 1), "stride": stride} | options
    return ConvProblem.forward(2, (n, c, size, size), (k, c, 3, 3), **options)


def gemm(m, n, k=16, threads=(8, 8), blocks=2, split=1):
    return Gemm(m, n, k, *threads, blocks, split)


def joined(n, c, k, size, taps, stride=1, transposed=False, **options):
    """A layer to which a residual is added."""
    options |= {"stride": stride, "padding": (taps - 1) // 2}
    if transposed:
        make, shapes = ConvProblem.transposed, ((n, c, *size), (c, k, taps, taps))
    else:
        make, shapes = ConvProblem.forward, ((n, c, *size), (k, c // options.get("groups", 1), taps, taps))
    return make(2, *shapes, residual_shape=make(2, *shapes, **options).result_shape, **options)


def volume(x, w, **options):
    return ConvProblem.forward(3, x, w, **options)


def filter_gradient(x, w, **options):
    """Of a convolution in two dimensions."""
    return ConvProblem.gradient("weight", 2, x, w, ConvProblem.forward(2, x, w, **options).result_shape, **options)


#: Volumes with a stride, planes that one tile holds, gradients of large depthwise filters.
SLICES = volume((4, 16, 24, 24, 24), (16, 16, 3, 1, 1), stride=2, padding=(1, 0, 0), precision="tf32", activation="relu")
ONE_TILE = depthwise(4, 48, 16, 32, 7, 2, precision="tf32")
LARGE_FILTERS = filter_gradient((2, 128, 80, 80), (128, 1, 9, 9), padding=4, groups=128, precision="tf32")

TAKEN = [
    # filters of many rows, and of gradients by the input, which lie apart (H100, H200)
    (ConvProblem.forward(2, (1, 128, 10, 10), (2048, 128, 3, 3), padding=1, activation="relu"), ImplicitGemm(64, 64, 6), 26.3),
    (ConvProblem.transposed(2, (1, 2048, 16, 16), (2048, 1280, 1, 1), precision="tf32"), ImplicitGemm(64, 64, 6), 37.8),
    (ConvProblem.transposed(2, (1, 160, 7, 7), (160, 2048, 3, 3), padding=1), ImplicitGemm(64, 64, 6), 34.1),
    # volumes
    (SLICES, Batched(128, 8, 16), 22.8), (volume((1, 128, 16, 16, 16), (64, 128, 1, 1, 1), stride=2), Batched(128, 8, 16), 56.5),
    (volume((1, 64, 4, 96, 96), (32, 64, 3, 3, 3), padding=1, dtype="float16", layout="NHWC", activation="relu"), DenseNhwc(128, 64, 8), 27.8),
    (volume((1, 64, 4, 96, 96), (32, 64, 3, 3, 3), padding=1, dtype="float16", layout="NHWC", activation="relu"), ImplicitGemm(64, 256, 5), 37.5),
    # planes and gradients of filters that leave the GPU idle
    (ONE_TILE, Tile(8, 16, 2), 4.5), (ONE_TILE, Tile(14, 32, 7), 5.4),
    (LARGE_FILTERS, Wgrad(128, 9, 1, 1), 131), (filter_gradient((13, 43, 17, 34), (149, 43, 3, 1), stride=2), Wgrad(128, 3, 1, 4), 20.9),
    # residuals, which take as long to read as the result to write (H100)
    (joined(8, 192, 192, (40, 40), 1), Pointwise(32, 2, 5), 29.3), (joined(8, 192, 192, (40, 40), 1), ImplicitGemm(64, 64, 6), 30.9),
    (joined(8, 1, 96, (128, 256), 7, dtype="float16", layout="NHWC"), FewInputs(48, 16), 78.0),
    # phases of a result whose sectors each of them writes (H100)
    (upsampling(8, 32, 128, 16, precision="tf32"), ImplicitGemm(128, 64, 6), 216), (upsampling(8, 32, 256, 8), ImplicitGemm(128, 64, 4), 120),
    # many phases of few blocks, of which four run at once
    (upsampling(8, 128, 32, 16), gemm(32, 128, 16, (4, 8), 4), 881), (upsampling(4, 32, 128, 8), gemm(128, 128), 617),
    (upsampling(1, 512, 3, 8, precision="tf32"), gemm(64, 64, 16, (8, 4), 4, 8), 269),
    (upsampling(1, 512, 3, 8, precision="tf32"), gemm(32, 128, 16, (4, 8), 4, 8), 429), (upsampling(1, 64, 64, 16, dtype="float64"), gemm(64, 64, 8), 664),
    # a pixel a thread
    (depthwise(1, 3, 2160, 640, 31), Single(), 1525), (depthwise(8, 160, 128, 256, 9, 2), Single(), 333), (depthwise(2, 320, 128, 128, 5, 2), Single(), 29.8),
    (depthwise(4, 384, 128, 128, 3, 2), Single(), 47.2), (depthwise(16, 16, 112, 112, 5), Single(), 30.3), (depthwise(2, 320, 80, 160, 3), Single(), 48.9),
    (depthwise(32, 320, 8, 11, 7), Single(), 19.1), (depthwise(1, 512, 16, 16, 5), Single(), 3.2), (depthwise(16, 2048, 8, 8, 13, 2), Single(), 67.1),
    # tiles of two rows a thread, which large filters keep busy
    (depthwise(16, 2048, 8, 8, 13, 2), Tile(8, 16, 2), 154), (depthwise(8, 160, 128, 256, 9, 2), Tile(8, 16, 2), 205), (depthwise(32, 320, 8, 11, 7), Tile(8, 16, 2), 18.8),
    (depthwise(32, 2048, 14, 14, 3), Tile(8, 16, 2), 94.5),
    # depthwise gradients with a stride, whose threads wait for each tap
    (depthwise_gradient(8, 160, 28, 56, 7, 2), Dgrad(128, 1, 1, 1), 54.9), (depthwise_gradient(1, 24, 80, 80, 7, 2, dtype="float16"), Dgrad(128, 1, 1, 1), 11.4),
    # 16-bit arrays and filters that the tensor cores read as they lie
    (last_3x3(16, 192, 192, 40), ImplicitGemm(64, 256, 5), 32.4), (last_3x3(16, 192, 192, 40), ImplicitGemm(64, 144, 6), 42.2),
    (last_3x3(16, 192, 192, 40), ImplicitGemm(128, 128, 6, schedule="pingpong"), 48.5), (last_3x3(32, 320, 320, 20), ImplicitGemm(64, 256, 5), 35.7),
    (last_3x3(1, 768, 2048, 40), ImplicitGemm(128, 128, 6), 101.7), (last_3x3(16, 2048, 2048, 28, 2), ImplicitGemm(128, 128, 6, 2), 480),
    (last_3x3(64, 1024, 512, 8, dtype="float16"), ImplicitGemm(128, 128, 6), 52.4), (last_3x3(8, 256, 256, 28, 2, dilation=2), ImplicitGemm(128, 64, 6), 13.0),
]  # fmt: skip


@pytest.mark.parametrize(("problem", "config", "us"), TAKEN, ids=lambda v: str(v)[:60])
def test_predictions_are_near(problem, config, us):
    predicted = engines.predicted(problem, config, H200)
    assert predicted / 1.4 < us < 1.4 * predicted


#: What was fastest, and what other candidates took.
FASTEST = [
    (SLICES, {gemm(64, 64, 16, (8, 4), 4): 6.6, Batched(128, 8, 16): 22.8}),
    (ONE_TILE, {Single(): 2.8, Tile(8, 16, 2): 4.5}), (LARGE_FILTERS, {ViaNhwc("DepthwiseWgrad(ROWS=4, PARTS=34)"): 69.0, Wgrad(128, 9, 1, 1): 131}),
    (depthwise(16, 2048, 8, 8, 13, 2, precision="tf32"), {Single(): 67.1, ViaNhwc("Depthwise(CHUNK=64, TILE_P=1, TILE_Q=4)"): 98.7, Tile(8, 16, 2): 154}),
    (depthwise_gradient(1, 2048, 80, 80, 13), {Tile(14, 32, 7): 277, Tile(14, 64, 7): 365, Tile(8, 16, 2): 459}),
    (depthwise_gradient(8, 160, 28, 56, 7, 2), {Tile(14, 64, 7): 14.5, Tile(8, 16, 2): 31.6, Dgrad(128, 1, 1, 1): 54.9}),
    (last_3x3(16, 192, 192, 40), {ImplicitGemm(64, 256, 5): 32.4, DenseNhwc(128, 256, 4): 38.5, ImplicitGemm(128, 128, 6, schedule="pingpong"): 48.5}),
    (last_3x3(32, 320, 320, 20), {ImplicitGemm(64, 256, 5): 35.7, DenseNhwc(128, 160, 5): 43.0, ImplicitGemm(128, 128, 6): 59.2}),
    (last_3x3(16, 2048, 2048, 28, 2), {DenseNhwc(128, 256, 4): 408, ImplicitGemm(128, 128, 6, schedule="pingpong"): 453, ImplicitGemm(128, 128, 6, 2): 480}),
    (last_3x3(16, 192, 96, 56), {DenseNhwc(128, 128, 6): 33.5, ImplicitGemm(128, 128, 6): 48.9}),
    # rows of packed channels that straddle cache lines: 24 channels, and windows of 8
    (ConvProblem.forward(1, (16, 24, 123658), (128, 24, 9), padding=4), {ImplicitGemm(128, 64, 4): 1424, ImplicitGemm(64, 256, 2): 1789}),
    (volume((8, 3, 64, 56, 53), (96, 3, 3, 3, 3), padding=1), {ImplicitGemm(128, 64, 4): 775, ImplicitGemm(64, 128, 2, schedule="twin"): 1125}),
    # the gradient of a large filter
    (filter_gradient((1, 3, 1080, 512), (3, 1, 31, 31), padding=15, groups=3, dtype="float16"), {LibraryFft(): 207, Wgrad(128, 16, 34, 1): 1056}),
]  # fmt: skip


@pytest.mark.parametrize(("problem", "took"), FASTEST, ids=lambda v: str(v)[:60])
def test_the_fastest_of_measured_kernels_is_predicted_to_be_it(problem, took):
    assert min(took, key=lambda config: engines.predicted(problem, config, H200)) == min(took, key=took.__getitem__)


def test_a_pixel_a_thread_is_for_planes_that_leave_tiles_nearly_empty():
    assert engines.choose(depthwise(16, 2048, 8, 8, 13, 2), H200) == Single()
    assert engines.choose(depthwise(2, 320, 80, 160, 3), H200) != Single()
