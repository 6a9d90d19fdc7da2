"""Random problems by family, such as occur in real networks and in work on images."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from pycuda_conv.problem import ConvProblem

CHANNELS = (16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 2048)
ARITHMETIC = (("float32", "fp32"), ("float32", "tf32"), ("float16", "fp32"), ("bfloat16", "fp32"), ("float64", "fp32"))
#: Types, arithmetic and layouts of arrays, in all combinations.
KINDS = tuple((*arithmetic, layout) for arithmetic in ARITHMETIC for layout in ("NCHW", "NHWC"))
EPILOGUES: tuple[tuple[str, ...], ...] = ((), ("bias",), ("bias", "relu"), ("bias", "scale", "residual", "relu"))
FAMILIES = (
    "dense 3x3", "dense 1x1", "small batch", "depthwise", "grouped", "first", "last", "upsampling", "audio", "volume", "image", "odd",
)  # fmt: skip
MOST_BYTES, MOST_FLOP = 4e8, 3e11  # of a problem as float32, so that none takes long to measure

Layer = dict[str, Any]


def _layer(
    n: int, c: int, k: int, size: tuple[int, ...], taps: Any, stride: Any = 1, padding: Any = None, dilation: Any = 1, groups: int = 1,
    transposed: bool = False,
) -> Layer:
    def each(v: Any) -> tuple[int, ...]:
        return tuple(v) if isinstance(v, tuple) else (v,) * len(size)

    taps, dilation = each(taps), each(dilation)
    if padding is None:
        padding = tuple(d * (f - 1) // 2 for d, f in zip(dilation, taps, strict=True))
    return {
        "n": n, "c": c, "k": k, "size": size, "taps": taps, "stride": each(stride), "padding": each(padding), "dilation": dilation,
        "groups": groups, "transposed": transposed,
    }  # fmt: skip


def layer(r: random.Random, family: str) -> Layer:
    """A random layer of a family, which may be an impossible one."""
    pick: Any = r.choice
    n, h = pick((1, 1, 2, 4, 8, 16, 32, 64)), pick((7, 8, 14, 16, 20, 28, 32, 40, 56, 64, 80, 112, 128))
    w = pick((h, h, h, h * 2, h + 3))
    c, k = pick(CHANNELS[2:]), pick(CHANNELS[2:])
    if family == "dense 3x3":
        return _layer(n, c, k, (h, w), 3, pick((1, 1, 2)), dilation=pick((1, 1, 1, 1, 2, 6)))
    if family == "dense 1x1":
        return _layer(n, c, k, (h, w), 1, pick((1, 1, 1, 2)))
    if family == "small batch":
        c, k, h = pick(CHANNELS[7:]), pick(CHANNELS[7:]), pick((7, 10, 14, 20, 28))
        return _layer(pick((1, 1, 2, 4)), c, k, (h, h), pick((1, 1, 3)), pick((1, 1, 2)))
    if family == "depthwise":
        c = pick(CHANNELS)
        return _layer(n, c, c, (h, w), pick((3, 3, 3, 5, 5, 7, 7, 9, 13)), pick((1, 1, 2)), groups=c)
    if family == "grouped":
        each, groups = pick((2, 4, 4, 8, 8, 16, 24, 32, 64)), pick((2, 4, 8, 16, 32, 32))
        return _layer(n, each * groups, each * groups, (h, w), 3, pick((1, 1, 2)), groups=groups)
    if family == "first":
        h, f = pick((96, 128, 160, 192, 224, 256, 299, 384, 512)), pick((3, 3, 3, 4, 5, 7, 7, 8, 11, 14, 16))
        stride = pick((1, 2, 2, f if f in (4, 8, 14, 16) else 2))
        n, c, k = pick((1, 8, 16, 32)), pick((1, 1, 3, 3, 3, 4)), pick((16, 24, 32, 48, 64, 96, 192, 768))
        return _layer(n, c, k, (h, pick((h, h * 2))), f, stride)
    if family == "last":
        h, f = pick((64, 128, 256, 512)), pick((1, 3, 3, 5, 7))
        return _layer(pick((1, 2, 4, 8)), pick((16, 32, 64, 128)), pick((1, 2, 3, 4, 19)), (h, h), f)
    if family == "upsampling":
        f, stride, padding = pick(((2, 2, 0), (4, 2, 1), (3, 1, 1), (4, 4, 0), (16, 8, 4)))
        n, c, k, h = pick((1, 4, 8, 16)), pick((32, 64, 128, 256, 512)), pick((1, 3, 32, 64, 128, 256)), pick((8, 16, 32, 64))
        return _layer(n, c, k, (h, h), f, stride, padding, transposed=True)
    if family == "audio":
        if r.random() < 0.4:
            f, stride = pick(((10, 5), (7, 1), (16, 8), (3, 1), (80, 4), (25, 1), (400, 160)))
            length = pick((16000, 48000, 80000)) if f > 3 else 3000
            return _layer(pick((1, 4, 8, 16)), pick((1, 1, 2, 80)), pick((32, 64, 256, 512)), (length,), f, stride)
        n, c, k, length = pick((1, 4, 16, 64)), pick((64, 128, 256, 512)), pick((64, 128, 256, 512)), pick((250, 999, 1500, 4000, 16000))
        return _layer(n, c, k, (length,), pick((1, 3, 3, 5, 7, 15)), pick((1, 1, 2)), dilation=pick((1, 1, 2, 8)))
    if family == "volume":
        h, taps, stride = pick((16, 24, 32, 48, 64, 96)), pick((1, 3, 3, (1, 3, 3), (3, 1, 1), (3, 7, 7))), pick((1, 1, 2, (1, 2, 2)))
        n, c, k = pick((1, 2, 4)), pick((1, 3, 16, 32, 64, 128)), pick((16, 32, 64, 128))
        return _layer(n, c, k, (pick((4, 8, 16, h)), h, h), taps, stride)
    if family == "image":
        c, size = pick((1, 1, 3)), (pick((480, 512, 1080, 2160, 4096)), pick((512, 640, 1920, 3840)))
        return _layer(pick((1, 1, 8)), c, c, size, pick((3, 3, 5, 7, 9, 15, 31)), groups=c)
    if family == "odd":
        size, taps = (r.randrange(9, 90), r.randrange(9, 90)), (pick((1, 2, 3, 4, 5)), pick((1, 3, 5, 7)))
        n, c, k = pick((1, 3, 7, 13)), r.randrange(5, 200), r.randrange(5, 200)
        return _layer(n, c, k, size, taps, pick((1, 1, 2, 3)), pick((0, 1, 2)), pick((1, 1, 2)))
    raise ValueError(f"there is no family {family!r}")


def problem(layer: Layer, direction: str, dtype: str, precision: str, layout: str, fused: tuple[str, ...] = ()) -> ConvProblem:
    """A layer as a problem; a ``ValueError`` if it is impossible. A transposed layer has no other direction."""
    ndim, groups = len(layer["size"]), layer["groups"]
    x = (layer["n"], layer["c"], *layer["size"])
    options = {name: layer[name] for name in ("stride", "padding", "dilation", "groups")}
    options |= {"dtype": dtype, "precision": precision, "layout": layout}
    of_result: dict[str, Any] = {"activation": "relu" if "relu" in fused else None}
    of_result |= {f"{name}_shape": (layer["k"],) for name in ("bias", "scale") if name in fused}
    if layer["transposed"]:
        w = (layer["c"], layer["k"] // groups, *layer["taps"])
        plain = ConvProblem.transposed(ndim, x, w, **options)
        if "residual" in fused:
            of_result["residual_shape"] = plain.result_shape
        return ConvProblem.transposed(ndim, x, w, **options, **of_result)
    w = (layer["k"], layer["c"] // groups, *layer["taps"])
    plain = ConvProblem.forward(ndim, x, w, **options)
    if direction != "fprop":
        return ConvProblem.gradient({"dgrad": "input", "wgrad": "weight"}[direction], ndim, x, w, plain.result_shape, **options)
    if "residual" in fused:
        of_result["residual_shape"] = plain.result_shape
    return ConvProblem.forward(ndim, x, w, **options, **of_result)


def draw(seed: int, each: int, kinds: Sequence[tuple[str, str, str]] = KINDS) -> Iterator[ConvProblem]:
    """`each` problems of every family, each in one of the `kinds` of (dtype, precision, layout), a random direction and epilogue."""
    r = random.Random(seed)
    for family in FAMILIES:
        drawn = 0
        while drawn < each:
            one, kind = layer(r, family), r.choice(kinds)
            direction, fused = r.choice(("fprop", "fprop", "dgrad", "wgrad")), r.choice(EPILOGUES)
            try:
                made = problem(one, direction, *kind, fused)
            except ValueError:
                continue
            elements = prod(made.input_shape) + prod(made.result_shape) + prod(made.weight_shape)
            if 5e5 < 4 * elements < MOST_BYTES and made.macs and 2 * made.macs < MOST_FLOP:
                drawn += 1
                yield made
