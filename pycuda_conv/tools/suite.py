"""The problems that the benchmark measures: layers of published networks, by kind, and the modes to measure them in.

Sizes of images and numbers of channels are those of the papers' or torchvision's networks. Numbers of images are common in training and
serving, or smaller where the float64 reference would take long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from pycuda_conv.problem import ConvProblem

#: The fields that a mode changes in a problem of the suite.
MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "tf32": {"precision": "tf32"},
    "tf32-nhwc": {"precision": "tf32", "layout": "NHWC"},
    "fp16": {"dtype": "float16"},
    "fp16-nhwc": {"dtype": "float16", "layout": "NHWC"},
    "bf16": {"dtype": "bfloat16"},
    "bf16-nhwc": {"dtype": "bfloat16", "layout": "NHWC"},
    "fp64": {"dtype": "float64"},
}


def in_mode(problem: ConvProblem, mode: str) -> ConvProblem:
    """A problem of the suite in one of the :data:`MODES`. Images of one channel count as NCHW, as in the public functions."""
    changes = MODES[mode]
    return replace(problem, **(changes | {"layout": "NCHW"} if problem.operand_channels == 1 else changes))


def mode_words(mode: str) -> str:
    """A mode's arrays and arithmetic in words."""
    found = {"dtype": "float32", "precision": "fp32", "layout": "NCHW"} | MODES[mode]
    arithmetic = f" with {found['precision']} arithmetic" if found["dtype"] == "float32" else ""
    return f"{found['dtype']}{arithmetic}, {'channels last' if found['layout'] == 'NHWC' else 'NCHW'}"


def _conv1d() -> Iterator[ConvProblem]:
    def layer(n: int, c: int, w: int, k: int, s: int, **options: Any) -> ConvProblem:
        return ConvProblem.forward(1, (n, c, w), (k, c // options.get("groups", 1), s), padding=1, **options)

    for s in (3, 5, 7, 9):
        yield layer(128, 512, 448, 1024, s)
    for stride in (2, 4, 8, 16):
        yield layer(128, 512, 448, 1024, 3, stride=stride)
    for groups in (2, 4, 8, 16):
        yield layer(128, 512, 448, 1024, 3, groups=groups)
    for c in (32, 64, 128, 256):
        yield layer(128, c, 448, 2 * c, 3)


def _conv2d() -> Iterator[ConvProblem]:
    def layer(n: int, c: int, h: int, k: int, r: int, **options: Any) -> ConvProblem:
        return ConvProblem.forward(2, (n, c, h, h), (k, c // options.get("groups", 1), r, r), **{"padding": r // 2, **options})

    yield ConvProblem.forward(2, (1, 1, 5, 5), (1, 1, 3, 3))
    yield layer(2, 4, 5, 8, 3)
    yield layer(32, 16, 7, 1, 3)
    yield layer(4, 16, 32, 32, 3)
    yield layer(1, 1, 512, 1, 3)
    yield layer(1, 3, 224, 64, 3)
    yield layer(32, 512, 7, 512, 3)
    # ResNet-50 at batch 64: the stem, then a 3x3, a 1x1 and a strided layer of each stage
    yield layer(64, 3, 224, 64, 7, stride=2)
    for c, h in ((64, 56), (128, 28), (256, 14), (512, 7)):
        yield layer(64, c, h, c, 3)
        yield layer(64, 4 * c, h, c, 1)
        if c > 64:
            yield layer(64, c, 2 * h, c, 3, stride=2)
    # VGG, DeepLab, MobileNet, ConvNeXt, ResNeXt
    yield layer(32, 64, 224, 64, 3)
    yield layer(32, 256, 56, 256, 3)
    yield layer(4, 2048, 33, 256, 3, dilation=12, padding=12)
    yield layer(64, 144, 56, 144, 3, groups=144)
    yield layer(64, 192, 28, 192, 7, groups=192)
    yield layer(64, 256, 28, 256, 3, groups=32)


def _transposed() -> Iterator[ConvProblem]:
    for stride in (1, 2):
        yield ConvProblem.transposed(2, (32, 512, 7, 7), (512, 512, 3, 3), stride=stride, padding=1, output_padding=stride - 1)


def core() -> list[ConvProblem]:
    """The first layers that the package was measured on, in float32. The dense means are over these, so they can be compared over time."""
    return [*_conv1d(), *_conv2d(), *_transposed()]


# ---- further kinds of layers, as in the named networks


def _square(n: int, c: int, size: int, k: int, taps: int, stride: int = 1, **options: Any) -> ConvProblem:
    """A layer of square images; by default its padding is torchvision's, half the filter."""
    return _image(n, c, (size, size), k, (taps, taps), stride=stride, **{"padding": taps // 2, **options})


def _image(n: int, c: int, size: tuple[int, int], k: int, taps: tuple[int, int], **options: Any) -> ConvProblem:
    return ConvProblem.forward(2, (n, c, *size), (k, c // options.get("groups", 1), *taps), **options)


def _depthwise() -> Iterator[ConvProblem]:
    """MobileNetV2 (Sandler et al., 2018), EfficientNet-B0 (Tan and Le, 2019), ConvNeXt-T (Liu et al., 2022), RepLKNet (Ding et al., 2022),
    the Conformer's lines (Gulati et al., 2020)."""
    mobile = ((32, 112, 1), (96, 112, 2), (144, 56, 2), (192, 28, 1), (384, 14, 1), (576, 14, 2), (960, 7, 1))
    efficient = ((144, 56, 2), (240, 28, 1), (672, 14, 1), (1152, 7, 1))
    for c, size, stride in mobile:
        yield _square(32, c, size, c, 3, stride, groups=c)
    for c, size, stride in efficient:
        yield _square(32, c, size, c, 5, stride, groups=c)
    for c, size in ((96, 56), (384, 14), (768, 7)):
        yield _square(32, c, size, c, 7, groups=c)
    for c, size, taps in ((128, 56, 31), (512, 14, 27)):
        yield _square(16, c, size, c, taps, groups=c)
    yield ConvProblem.forward(1, (16, 256, 1000), (256, 1, 31), padding=15, groups=256)


def _grouped() -> Iterator[ConvProblem]:
    """ResNeXt-50 32x4d (Xie et al., 2017), RegNetX-400MF and RegNetY-8GF (Radosavovic et al., 2020), ShuffleNet (Zhang et al., 2018),
    AlexNet (Krizhevsky et al., 2012), wav2vec 2.0's positions (Baevski et al., 2020)."""
    resnext, small = ((128, 56, 1, 32), (512, 14, 1, 32), (1024, 14, 2, 32)), ((64, 28, 1, 4), (160, 14, 1, 10), (400, 7, 1, 25))
    for c, size, stride, groups in (*resnext, *small, (448, 28, 1, 8), (896, 14, 1, 16)):
        yield _square(32, c, size, c, 3, stride, groups=groups)
    yield _square(32, 240, 28, 240, 1, groups=3)
    yield _square(32, 96, 27, 256, 5, groups=2)
    yield ConvProblem.forward(1, (8, 768, 499), (768, 48, 128), padding=64, groups=16)


def _first() -> Iterator[ConvProblem]:
    """Stems of AlexNet, MobileNetV2, Inception v3 (Szegedy et al., 2016), YOLOv5, and of U-Net (Ronneberger et al., 2015), one channel;
    patches of ViT-B/16 (Dosovitskiy et al., 2021), CLIP ViT-L/14 (Radford et al., 2021), ConvNeXt, SegFormer (Xie et al., 2021);
    spectrograms of VGGish (Hershey et al., 2017)."""
    yield _square(64, 3, 224, 64, 11, 4, padding=2)
    yield _square(64, 3, 224, 32, 3, 2)
    yield _square(32, 3, 299, 32, 3, 2, padding=0)
    yield _square(16, 3, 640, 32, 6, 2, padding=2)
    yield _square(4, 1, 572, 64, 3, padding=0)
    yield _square(64, 3, 224, 768, 16, 16, padding=0)
    yield _square(32, 3, 224, 1024, 14, 14, padding=0)
    yield _square(64, 3, 224, 96, 4, 4, padding=0)
    yield _square(8, 3, 512, 32, 7, 4, padding=3)
    yield _image(64, 1, (96, 64), 64, (3, 3), padding=1)
    yield _square(32, 3, 32, 64, 3)


def _last() -> Iterator[ConvProblem]:
    """Outputs of FCN (Long et al., 2015), DeepLabv3, U-Net, ESPCN (Shi et al., 2016), SRGAN (Ledig et al., 2017), DCGAN (Radford et al.,
    2016) and its layers before, the VAE of Stable Diffusion (Rombach et al., 2022), RetinaNet (Lin et al., 2017)."""
    yield _square(8, 512, 65, 21, 1)
    yield _square(8, 256, 65, 19, 1)
    yield _square(4, 64, 388, 2, 1)
    yield _square(8, 32, 256, 9, 3)
    yield _square(8, 64, 128, 3, 9)
    yield _square(1, 128, 512, 3, 3)
    yield _square(4, 256, 64, 36, 3)
    for c, k, size in ((512, 256, 4), (256, 128, 8), (128, 64, 16), (64, 3, 32)):
        yield ConvProblem.transposed(2, (128, c, size, size), (c, k, 4, 4), stride=2, padding=1)
    yield ConvProblem.transposed(2, (4, 128, 56, 56), (128, 64, 2, 2), stride=2)


def _audio() -> Iterator[ConvProblem]:
    """Raw audio and speech: wav2vec 2.0's encoder, M5 (Dai et al., 2017), SincNet (Ravanelli and Bengio, 2018), EnCodec (Defossez et al.,
    2022), a short-time Fourier transform as a layer, Whisper (Radford et al., 2022), WaveNet (van den Oord et al., 2016), HiFi-GAN (Kong
    et al., 2020)."""

    def line(n: int, c: int, w: int, k: int, taps: int, **options: Any) -> ConvProblem:
        return ConvProblem.forward(1, (n, c, w), (k, c, taps), **options)

    yield line(8, 1, 160000, 512, 10, stride=5)
    yield line(8, 512, 31999, 512, 3, stride=2)
    yield line(8, 512, 3999, 512, 2, stride=2)
    yield line(32, 1, 32000, 128, 80, stride=4, padding=38)
    yield line(16, 1, 16000, 80, 251)
    yield line(4, 1, 240000, 32, 7, padding=3)
    yield line(16, 1, 160000, 402, 400, stride=160)
    yield line(8, 80, 3000, 512, 3, padding=1)
    yield line(8, 512, 3000, 512, 3, stride=2, padding=1)
    yield line(4, 64, 16000, 128, 2, dilation=512)
    yield line(4, 128, 16000, 128, 11, padding=25, dilation=5)
    yield ConvProblem.transposed(1, (4, 512, 400), (512, 256, 16), stride=8, padding=4)


def _few_pixels() -> Iterator[ConvProblem]:
    """One or a few images: ResNet-50's and VGG's layers, SSD's (Liu et al., 2016) last ones, a feature pyramid's (Lin et al., 2017),
    MobileNetV2's 1x1 layers."""
    for n, c, size, k, taps, stride in (
        (1, 64, 56, 64, 3, 1), (1, 256, 14, 256, 3, 1), (1, 512, 7, 512, 3, 1), (1, 1024, 14, 256, 1, 1), (1, 512, 7, 2048, 1, 1),
        (1, 2048, 7, 512, 1, 1), (1, 256, 28, 256, 3, 2), (4, 512, 7, 512, 3, 1), (1, 512, 14, 512, 3, 1), (8, 256, 5, 128, 1, 1),
        (8, 128, 10, 256, 3, 2), (1, 2048, 25, 256, 1, 1), (1, 256, 13, 256, 3, 1), (1, 160, 7, 960, 1, 1), (1, 96, 14, 576, 1, 1),
    ):  # fmt: skip
        yield _square(n, c, size, k, taps, stride)


def _volumes() -> Iterator[ConvProblem]:
    """C3D (Tran et al., 2015), R(2+1)D (Tran et al., 2018), I3D (Carreira and Zisserman, 2017), SlowFast's lines (Feichtenhofer et al.,
    2019), 3D U-Net (Cicek et al., 2016) and V-Net (Milletari et al., 2016)."""

    def volume(n: int, c: int, size: tuple[int, int, int], k: int, taps: tuple[int, int, int], **options: Any) -> ConvProblem:
        padding = tuple(tap // 2 for tap in taps)
        return ConvProblem.forward(3, (n, c, *size), (k, c, *taps), **{"padding": padding, **options})

    yield volume(4, 3, (16, 112, 112), 64, (3, 3, 3))
    yield volume(4, 64, (16, 56, 56), 128, (3, 3, 3))
    yield volume(4, 256, (4, 14, 14), 512, (3, 3, 3))
    yield volume(4, 64, (16, 56, 56), 144, (1, 3, 3))
    yield volume(4, 144, (16, 56, 56), 64, (3, 1, 1))
    yield volume(2, 3, (32, 224, 224), 64, (7, 7, 7), stride=2)
    yield volume(4, 256, (8, 28, 28), 128, (3, 1, 1))
    yield volume(4, 64, (16, 56, 56), 128, (1, 1, 1), stride=2)
    yield volume(1, 32, (64, 64, 64), 64, (3, 3, 3))
    yield volume(1, 1, (96, 96, 96), 16, (5, 5, 5))
    yield ConvProblem.transposed(3, (1, 128, 16, 16, 16), (128, 64, 2, 2, 2), stride=2)


def _wide() -> Iterator[ConvProblem]:
    """Dense layers of other channels and sizes: DenseNet-121 (Huang et al., 2017), Inception v3, EfficientNet-B0's 1x1 layers, Stable
    Diffusion's U-Net and VAE, YOLOv5s, a feature pyramid and DeepLab over large images."""
    for n, c, size, k, taps, stride in (
        (32, 128, 28, 32, 3, 1), (32, 512, 14, 128, 1, 1), (32, 16, 112, 96, 1, 1), (32, 40, 28, 240, 1, 1), (32, 672, 14, 112, 1, 1),
        (2, 320, 64, 320, 3, 1), (2, 640, 32, 640, 3, 1), (2, 1280, 16, 1280, 3, 1), (1, 128, 512, 128, 3, 1), (8, 64, 160, 64, 3, 2),
        (8, 128, 80, 128, 1, 1), (2, 256, 200, 256, 3, 1), (32, 1024, 14, 2048, 1, 2), (16, 91, 35, 75, 3, 1),
    ):  # fmt: skip
        yield _square(n, c, size, k, taps, stride)
    yield _image(32, 192, (17, 17), 192, (1, 7), padding=(0, 3))
    yield _image(32, 192, (17, 17), 192, (7, 1), padding=(3, 0))
    yield _square(4, 512, 65, 256, 3, dilation=6, padding=6)


def _large() -> Iterator[ConvProblem]:
    """Filters of images and signals: a blur, a point spread function, a matched filter, a room's response."""
    yield _square(1, 1, 2048, 1, 15)
    yield _square(8, 1, 512, 1, 63)
    yield _square(8, 16, 256, 16, 31)
    yield ConvProblem.forward(1, (8, 1, 160000), (1, 1, 4001), padding=2000)


#: The kinds of layers, in the order of the table, and a function that makes each.
KINDS: dict[str, Callable[[], Iterable[ConvProblem]]] = {
    "core": core, "depthwise": _depthwise, "grouped": _grouped, "first layers": _first, "last layers": _last, "audio": _audio,
    "few pixels": _few_pixels, "volumes": _volumes, "wide": _wide, "large filters": _large,
}  # fmt: skip


def suite() -> list[ConvProblem]:
    """All problems in float32, in the order of the table."""
    return [problem for make in KINDS.values() for problem in make()]


@cache
def _kinds() -> dict[ConvProblem, str]:
    return {problem: kind for kind, make in KINDS.items() for problem in make()}


def kind_of(problem: ConvProblem) -> str:
    """The kind of a problem of the suite in any mode; empty for another problem."""
    return _kinds().get(replace(problem, dtype="float32", precision="fp32", layout="NCHW"), "")
