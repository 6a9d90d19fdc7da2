"""The problems that the benchmark measures: layers people run, from a 5x5 image to VGG, and the modes to measure them in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pycuda_conv.problem import ConvProblem

#: What a mode makes of a problem of the suite.
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
    """A problem of the suite in one of the :data:`MODES`; images of one channel count as NCHW, as in the public functions."""
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


def suite() -> list[ConvProblem]:
    """All problems, float32, in the order of the table."""
    return [*_conv1d(), *_conv2d(), *_transposed()]
