"""The results that a border changes, behind a convolution among zeros: ``cu/layout/rims.cu``, ``cu/mma/rims_product.cu``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby

from pycuda_conv import borders
from pycuda_conv.engines.geometry import arguments, by_axis, ceil, filter_last_strides, filter_strides, near_sides, needs_64_bits
from pycuda_conv.engines.schedule import OPERANDS, grid_refusal
from pycuda_conv.engines.struct import kernel_struct
from pycuda_conv.engines.tensor_cores import ELEMENTS, is_multiplied, products
from pycuda_conv.engines.variants import FLAG, VariantSet
from pycuda_conv.problem import DTYPE_CODES, ConvProblem
from pycuda_conv.runtime.base import Device, KernelLaunch

THREADS = 256
VECTORS = {"float16": 8, "bfloat16": 8, "float32": 4, "float64": 1}  # neighbouring channels of a thread where each is a group
LEAST_CHANNELS = 16  # of a group, from which on tensor cores multiply
RESULTS, CHANNELS = 64, 64  # of a block on tensor cores

RimsArguments = kernel_struct("rims.cuh", "RimsArguments")


@lru_cache(maxsize=256)
def runs(problem: ConvProblem) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Along each axis, the runs of results that the border changes: the first of each and their number."""
    found = []
    for axis, n in enumerate(problem.result_size):
        words, size = (problem.border or borders.NONE)[axis], problem.input_size[axis]
        before, after = (sides[axis] for sides in problem.border_sizes)
        if problem.direction == "dgrad":
            outside = borders.rows(words, size, -before, 0) + borders.rows(words, size, size, size + after)
            places = sorted({pixel for pixel in outside if pixel >= 0})
        else:
            bordered = {*range(-before, 0), *range(size, size + after)}
            stride, inside = problem.stride[axis], size - len(_met(problem, axis, 0)) * problem.dilation[axis]
            low, high = ceil(problem.padding_before[axis], stride), (inside + problem.padding_before[axis]) // stride
            near = [*range(min(max(low, 0), n)), *range(max(low, high, 0), n)]  # all others meet pixels alone
            places = [j for j in near if not bordered.isdisjoint(_met(problem, axis, j))]
        parts = [[place for _, place in run] for _, run in groupby(enumerate(places), lambda pair: pair[1] - pair[0])]
        found.append(tuple((part[0], len(part)) for part in parts))
    return tuple(found)


def _met(problem: ConvProblem, axis: int, j: int) -> range:
    """The places of an axis that a result meets by its taps."""
    first, step = j * problem.stride[axis] - problem.padding_before[axis], problem.dilation[axis]
    return range(first, first + step * (problem.filter_size[axis] - 1) + 1, step)


def refusal(problem: ConvProblem) -> str | None:
    """Why the launch can't put the border of `problem` in, or None if it can."""
    if problem.direction == "wgrad" or problem.border is None or problem.input_dtype or problem.result_dtype or problem.upsampled:
        return "rims are of convolutions of floats with a border, and of gradients by their input"
    if problem.layout not in ("NCHW", "NHWC"):
        return f"rims are of arrays in NCHW and NHWC, not in {problem.layout}"
    if near_sides(problem) is None:
        return "a side is filled, or its border goes on beyond the image's other end"
    if max(map(len, runs(problem))) > 2:
        return "more than two runs of results along an axis meet the border"
    return grid_refusal(_threads(problem)[0] // THREADS)


def _vector(problem: ConvProblem) -> int:
    """Channels of a thread."""
    vector = VECTORS[problem.dtype]
    return vector if problem.layout == "NHWC" and problem.C == problem.K == problem.groups and problem.C % vector == 0 else 1


def results(problem: ConvProblem) -> int:
    """Results of an image in rims."""
    plain = math.prod(n - sum(count for _, count in axis) for n, axis in zip(problem.result_size, runs(problem), strict=True))
    return math.prod(problem.result_size) - plain


def work(problem: ConvProblem) -> float:
    """What the launch takes: elements that it changes, each as many times as it has summands, and some more for its place."""
    taps = math.prod(problem.filter_size) ** (0.5 if problem.direction == "dgrad" else 1)
    return results(problem) * problem.N * problem.result_channels * (8 + problem.operand_channels // problem.groups * taps)


def _threads(problem: ConvProblem) -> tuple[int, int, int]:
    """Threads of the launch; and of these the ones along channels, and items of all."""
    vector, channels = _vector(problem), problem.result_channels
    items = 4 if vector > 1 else 8
    chunks, outer = (channels // vector, problem.N) if problem.layout == "NHWC" else (1, problem.N * channels)
    return results(problem) * chunks * ceil(outer, items), chunks, outer


def on_tensor_cores(problem: ConvProblem, device: Device) -> bool:
    """Whether the launch multiplies on tensor cores."""
    able = device.backend == "cuda" and device.capability >= (8, 0) and problem.dtype != "float64"
    return able and min(problem.C, problem.K) // problem.groups >= LEAST_CHANNELS


def launch(problem: ConvProblem, device: Device, filter_last: bool = False) -> KernelLaunch:
    """The launch, which follows those for zeros around the image. `filter_last`: the filter's second axis is last in memory."""
    (size, chunks, outer), tiles = _threads(problem), ceil(results(problem) * problem.N, RESULTS)
    (_, w_made, w_read), w_tap = filter_strides(problem), 1
    if filter_last:
        w_made, w_read, w_tap = filter_last_strides(problem)
    made, read = problem.result_channels // problem.groups, problem.operand_channels // problem.groups
    before, after = problem.border_sizes
    gradient = int(problem.direction == "dgrad")
    shift = [n - gradient * own for n, own in zip(problem.padding_before, before, strict=True)]
    parts = [[*axis, (n, 0), (n, 0)][:2] for n, axis in zip(problem.result_size, runs(problem), strict=True)]
    rim = [sum(count for _, count in axis) for axis in parts]
    args = arguments(
        RimsArguments, problem, size=size, rims=results(problem), outer=outer, images=problem.N, tiles=tiles,
        channels=problem.result_channels, chunks=chunks, made=made, read=read, w_read=w_read, w_made=w_made, w_tap=w_tap,
        **by_axis("y_", problem.result_size), **by_axis("x_", problem.operand_size), **by_axis("before_", before),
        **by_axis("after_", after), **by_axis("shift_", shift), **by_axis("low_", [low for (low, _), _ in parts]),
        **by_axis("lows_", [count for (_, count), _ in parts]), **by_axis("high_", [high for _, (high, _) in parts]),
        **by_axis("rim_", rim), **by_axis("plain_", [n - own for n, own in zip(problem.result_size, rim, strict=True)]),
    )  # fmt: skip
    if on_tensor_cores(problem, device):
        blocks = tiles * ceil(made, CHANNELS) * problem.groups
        wide = problem.layout == "NHWC" and read * problem.itemsize % 16 == 0
        texts = {"TYPE": ELEMENTS[problem.dtype], "PRODUCTS": products(problem), "WIDE_LOADS": int(wide), "GRADIENT": gradient}
        return KernelLaunch("rims_product", texts, blocks, THREADS, OPERANDS, (), arguments=args)
    defines = {
        "DTYPE": DTYPE_CODES[problem.dtype], "INDEX_64": int(needs_64_bits(problem)), "THREADS": THREADS,
        "NHWC": int(problem.layout == "NHWC"), "VECTOR": _vector(problem), "GRADIENT": gradient,
    }  # fmt: skip
    return KernelLaunch("border_rims", defines, ceil(size, THREADS), THREADS, OPERANDS, (), "rims", arguments=args)


def variants(device: Device) -> Iterator[VariantSet]:
    """A text for each type, layout and direction."""
    for dtype, vector in VECTORS.items():
        choices = {"DTYPE": (DTYPE_CODES[dtype],), "INDEX_64": FLAG, "THREADS": (THREADS,), "GRADIENT": FLAG}
        yield VariantSet("rims", choices | {"NHWC": (1,), "VECTOR": (1, vector)[: 1 + (vector > 1)]})
        yield VariantSet("rims", choices | {"NHWC": (0,), "VECTOR": (1,)})
    if device.backend == "cuda" and device.capability >= (8, 0):
        choices = {"TYPE": (16, 17, 32), "PRODUCTS": (1, 3), "WIDE_LOADS": FLAG, "GRADIENT": FLAG}
        yield VariantSet("rims_product", choices, is_multiplied)
