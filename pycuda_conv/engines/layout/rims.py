"""What a border adds to a gradient by the input that was computed as if there were zeros: ``cu/layout/rims.cu``, ``cu/mma/rims_product.cu``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby

from pycuda_conv import borders
from pycuda_conv.engines.geometry import arguments, by_axis, ceil, filter_last_strides, filter_strides, near_sides, needs_64_bits
from pycuda_conv.engines.geometry import read_strides, written_strides
from pycuda_conv.engines.schedule import INPUT, RESULT, WEIGHT, grid_refusal
from pycuda_conv.engines.struct import kernel_struct
from pycuda_conv.engines.variants import FLAG, Defines, VariantSet
from pycuda_conv.engines.tensor_cores import ELEMENTS, products
from pycuda_conv.problem import DTYPE_CODES, ConvProblem
from pycuda_conv.runtime.base import Device, KernelLaunch

THREADS = 256
VECTORS = {"float16": 8, "bfloat16": 8, "float32": 4, "float64": 1}  # neighbouring channels of a thread where each is a group

LEAST_CHANNELS = 16  # of a group, from which on tensor cores multiply
PIXELS, CHANNELS = 64, 64  # of a block on tensor cores

RimsArguments = kernel_struct("rims.cuh", "RimsArguments")


def runs(problem: ConvProblem) -> list[list[tuple[int, int]]]:
    """Along each axis, the runs of pixels that the border shows: the first pixel of each and their number."""
    found = []
    for n, words, before, after in zip(problem.input_size, problem.border or borders.NONE, *problem.border_sizes, strict=True):
        shown = sorted({pixel for pixel in borders.rows(words, n, -before, 0) + borders.rows(words, n, n, n + after) if pixel >= 0})
        parts = [[pixel for _, pixel in run] for _, run in groupby(enumerate(shown), lambda pair: pair[1] - pair[0])]
        found.append([(part[0], len(part)) for part in parts])
    return found


def refusal(problem: ConvProblem) -> str | None:
    """Why the launch can't add the border of `problem`, or None if it can."""
    if problem.direction != "dgrad" or problem.border is None or problem.input_dtype or problem.result_dtype:
        return "only gradients by the input of floats have rims that are added to"
    if problem.layout not in ("NCHW", "NHWC"):
        return f"rims are added to in the layouts NCHW and NHWC, not in {problem.layout}"
    if near_sides(problem) is None:
        return "a side is filled, or its border goes on beyond the image's other end"
    return grid_refusal(_threads(problem)[0] // THREADS)


def _vector(problem: ConvProblem) -> int:
    """Channels of a thread."""
    vector = VECTORS[problem.dtype]
    return vector if problem.layout == "NHWC" and problem.C == problem.K == problem.groups and problem.C % vector == 0 else 1


def pixels(problem: ConvProblem) -> int:
    """Pixels in the rims of an image's gradient."""
    plain = math.prod(n - sum(count for _, count in axis) for n, axis in zip(problem.input_size, runs(problem), strict=True))
    return math.prod(problem.input_size) - plain


def work(problem: ConvProblem) -> float:
    """What the launch takes: elements that it adds to, each as many times as it has summands of its own, and some more for its place."""
    of_pixel = problem.K // problem.groups * math.prod(problem.filter_size) ** 0.5
    return pixels(problem) * problem.N * problem.C * (8 + of_pixel)


def _threads(problem: ConvProblem) -> tuple[int, int, int]:
    """Threads of the launch; and of these the ones along channels, and items of each."""
    vector = _vector(problem)
    items = 4 if vector > 1 else 8
    nhwc = problem.layout == "NHWC"
    chunks, outer = (problem.C // vector, problem.N) if nhwc else (1, problem.N * problem.C)
    return pixels(problem) * chunks * ceil(outer, items), chunks, outer


def on_tensor_cores(problem: ConvProblem, device: Device) -> bool:
    """Whether the launch multiplies on tensor cores."""
    able = device.backend == "cuda" and device.capability >= (8, 0) and problem.dtype != "float64"
    return able and min(problem.C, problem.K) // problem.groups >= LEAST_CHANNELS


def launch(problem: ConvProblem, device: Device, filter_last: bool = False) -> KernelLaunch:
    """The launch, which follows those for zeros around the image. `filter_last`: the filter's second axis is last in memory."""
    (size, chunks, outer), tiles = _threads(problem), ceil(pixels(problem) * problem.N, PIXELS)
    dy, dx, (_, w_c, w_k), w_tap = read_strides(problem), written_strides(problem), filter_strides(problem), 1
    if filter_last:
        w_c, w_k, w_tap = filter_last_strides(problem)
    before, after = problem.border_sizes
    parts = [[*axis, (n, 0), (n, 0)][:2] for n, axis in zip(problem.input_size, runs(problem), strict=True)]
    rim = [sum(count for _, count in axis) for axis in parts]
    plain = [n - own for n, own in zip(problem.input_size, rim, strict=True)]
    args = arguments(
        RimsArguments, size=size, rims=pixels(problem), outer=outer, images=problem.N, tiles=tiles, channels=problem.C, chunks=chunks, c=problem.C // problem.groups,
        k=problem.K // problem.groups, dx_image=dx.image, dx_channel=dx.channel, dx_pixel=dx.pixel, dy_image=dy.image,
        dy_channel=dy.channel, dy_pixel=dy.pixel, w_k=w_k, w_c=w_c, w_tap=w_tap,
        **by_axis("", problem.input_size), **by_axis("", problem.output_size, "opq"), **by_axis("", problem.filter_size, "trs"),
        **by_axis("before_", before), **by_axis("after_", after), **(near_sides(problem) or {}),
        **by_axis("shift_", [n - own for n, own in zip(problem.padding_before, before, strict=True)]),
        **by_axis("stride_", problem.stride), **by_axis("dilation_", problem.dilation),
        **by_axis("low_", [low for (low, _), _ in parts]), **by_axis("lows_", [count for (_, count), _ in parts]),
        **by_axis("high_", [high for _, (high, _) in parts]), **by_axis("rim_", rim), **by_axis("plain_", plain),
    )  # fmt: skip
    if on_tensor_cores(problem, device):
        blocks = tiles * ceil(problem.C // problem.groups, CHANNELS) * problem.groups
        wide = problem.layout == "NHWC" and problem.K // problem.groups * problem.itemsize % 16 == 0
        texts = {"TYPE": ELEMENTS[problem.dtype], "PRODUCTS": products(problem), "WIDE_LOADS": int(wide)}
        return KernelLaunch("rims_product", texts, blocks, 256, (INPUT, WEIGHT, RESULT), (), arguments=args)
    defines = {
        "DTYPE": DTYPE_CODES[problem.dtype], "INDEX_64": int(needs_64_bits(problem)), "THREADS": THREADS,
        "NHWC": int(problem.layout == "NHWC"), "VECTOR": _vector(problem),
    }  # fmt: skip
    return KernelLaunch("border_rims", defines, ceil(size, THREADS), THREADS, (INPUT, WEIGHT, RESULT), (), "rims", arguments=args)


def _goes(defines: Defines) -> bool:
    vector = {code: VECTORS[dtype] for dtype, code in DTYPE_CODES.items()}[defines["DTYPE"]]
    return defines["VECTOR"] in ((1, vector) if defines["NHWC"] else (1,))


def variants(device: Device) -> Iterator[VariantSet]:
    """A text for each type and layout."""
    choices = {
        "DTYPE": tuple(DTYPE_CODES.values()), "INDEX_64": FLAG, "THREADS": (THREADS,), "NHWC": FLAG, "VECTOR": (1, 4, 8),
    }
    yield VariantSet("rims", choices, _goes)
    if device.backend == "cuda" and device.capability >= (8, 0):
        choices = {"TYPE": (16, 17, 32), "PRODUCTS": (1, 3), "WIDE_LOADS": FLAG}
        yield VariantSet("rims_product", choices, lambda defines: defines["PRODUCTS"] == 1 or defines["TYPE"] == 32)
