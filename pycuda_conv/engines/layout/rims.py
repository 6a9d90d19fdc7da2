"""The results that a border changes, behind a convolution among zeros: ``cu/layout/rims.cu``, ``cu/mma/rims_product.cu``.

A gradient by the filter gets what the border adds to it from ``cu/layout/rims_filter.cu``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby

from pycuda_conv import borders
from pycuda_conv.engines.geometry import arguments, by_axis, ceil, filter_strides, near_sides, needs_64_bits
from pycuda_conv.engines.layout import transpose_filter
from pycuda_conv.engines.schedule import INPUT, OPERANDS, RESULT, WEIGHT, grid_refusal
from pycuda_conv.engines.struct import kernel_struct
from pycuda_conv.engines.tensor_cores import BFLOAT, ELEMENTS, FLOAT, HALF, is_multiplied, products
from pycuda_conv.engines.variants import FLAG, VariantSet, portable, portable_choices
from pycuda_conv.problem import DTYPE_CODES, ConvProblem
from pycuda_conv.runtime.base import BufferSlice, Device, KernelLaunch

THREADS = 256
VECTORS = {"float16": 8, "bfloat16": 8, "float32": 4, "float64": 1}  # neighbouring channels of a thread where each is a group
LEAST_CHANNELS = 16  # of a group, from which on tensor cores multiply
ITEMS, ENOUGH = 8, 128 * 1024  # planes of a thread, where so many threads are left
RESULTS, CHANNELS = 64, 64  # of a block on tensor cores
SHARED = 3 * (RESULTS + CHANNELS) * 144  # bytes of its stages
FORWARD, ADDS, ANEW = 0, 1, 2  # rims.cuh

#: Products of channels of a group by whose filter a gradient is asked for.
MOST_PRODUCTS = 16
#: By the layout of a gradient by the filter as it is launched: neighbouring channels of a block, and its threads.
OF_FILTER = {"CNHW": (1, 256), "CHWN": (8, 1024)}

RimsArguments = kernel_struct("rims.cuh", "RimsArguments")
RimsFilterArguments = kernel_struct("rims_filter", "RimsFilterArguments")


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
        return "rims are of convolutions of floats with a border, and of their gradients"
    if near_sides(problem) is None:
        return "a side is filled, or its border goes on beyond the image's other end"
    if problem.layout in OF_FILTER:
        if problem.has_depth or problem.N * problem.K // problem.groups > MOST_PRODUCTS:
            return "rims of gradients by the filter are of images in groups of few channels"
        return None
    if max(map(len, runs(problem))) > 2:
        return "more than two runs of results along an axis meet the border"
    return grid_refusal(_threads(problem)[0] // THREADS)


def _vector(problem: ConvProblem) -> int:
    """Channels of a thread."""
    vector = VECTORS[problem.dtype]
    return vector if problem.layout == "NHWC" and _alone(problem) and problem.C % vector == 0 else 1


def results(problem: ConvProblem) -> int:
    """Results of an image in rims."""
    plain = math.prod(n - sum(count for _, count in axis) for n, axis in zip(problem.result_size, runs(problem), strict=True))
    return math.prod(problem.result_size) - plain


def adds(problem: ConvProblem) -> bool:
    """Whether the launch adds to what there is. Numbers of 16 bits are summed anew: two that were rounded may cancel."""
    return problem.direction == "dgrad" and problem.itemsize > 2


def _gradient(problem: ConvProblem) -> int:
    return FORWARD if problem.direction == "fprop" else ADDS if adds(problem) else ANEW


def columns(problem: ConvProblem) -> int:
    """Results of an image in rims along w alone: in planes each lies in a line of memory of its own."""
    *others, (w, of_w) = zip(problem.result_size, runs(problem), strict=True)
    return sum(count for _, count in of_w) * math.prod(n - sum(count for _, count in axis) for n, axis in others) if w else 0


def summands_of_filter(problem: ConvProblem) -> int:
    """Products that the launch for a gradient by the filter, as it is launched, adds."""
    rows, columns = (sum(pair) for pair in zip(problem.padding_before[1:], problem.padding_after[1:], strict=True))
    outside = rows * problem.filter_size[2] * problem.output_size[2] + columns * problem.filter_size[1] * problem.output_size[1]
    return outside * problem.C * problem.N * (problem.K // problem.groups)


def product_blocks(problem: ConvProblem) -> int:
    """Blocks of the launch on tensor cores."""
    return ceil(results(problem) * problem.N, RESULTS) * ceil(problem.result_channels // problem.groups, CHANNELS) * problem.groups


def _threads(problem: ConvProblem) -> tuple[int, int, int]:
    """Threads of the launch; and of these the ones along channels, and items of all."""
    vector, channels = _vector(problem), problem.result_channels
    chunks, outer = (channels // vector, problem.N) if problem.layout == "NHWC" else (1, problem.N * channels)
    return results(problem) * chunks * ceil(outer, _items(problem)), chunks, outer


def _items(problem: ConvProblem) -> int:
    """Planes of a thread, or with channels last images: several where there are enough threads all the same."""
    outer = problem.N if problem.layout == "NHWC" else problem.N * problem.result_channels
    many = results(problem) * problem.N * problem.result_channels >= ENOUGH * ITEMS
    return ITEMS if _vector(problem) == 1 and outer >= ITEMS and (many or needs_64_bits(problem)) else 1


def _alone(problem: ConvProblem) -> bool:
    """Whether each channel is a group."""
    return problem.C == problem.K == problem.groups


def on_tensor_cores(problem: ConvProblem, device: Device) -> bool:
    """Whether the launch multiplies on tensor cores."""
    able = device.backend == "cuda" and device.capability >= (8, 0) and problem.dtype != "float64"
    return able and min(problem.C, problem.K) // problem.groups >= LEAST_CHANNELS


def transposes(problem: ConvProblem, device: Device) -> bool:
    """Whether the launch multiplies by a filter whose channels of x are neighbours: then 16 bytes of them are loaded at once."""
    read = problem.operand_channels // problem.groups
    in_rows = (problem.groups == 1 or problem.direction == "fprop") and problem.layout not in OF_FILTER
    return in_rows and on_tensor_cores(problem, device) and read * problem.itemsize % 16 == 0


def transposed(problem: ConvProblem, place: BufferSlice, filter_last: bool = False) -> KernelLaunch:
    """The launch that makes such a filter."""
    _, row, channel, _ = filter_strides(problem)
    steps = (1, problem.weight_shape[1], math.prod(problem.weight_shape[1:])) if filter_last else (row, 1, channel)
    return transpose_filter.launch(problem, place, steps)


def launch(problem: ConvProblem, device: Device, filter_last: bool = False, place: BufferSlice | None = None) -> KernelLaunch:
    """The launch, which follows those for zeros around the image.

    `filter_last`: the filter's second axis is last in memory. `place`: where it lies :func:`transposed`.
    """
    if problem.layout in OF_FILTER:
        return _of_filter(problem, filter_last)
    (size, chunks, outer), tiles = _threads(problem), ceil(results(problem) * problem.N, RESULTS)
    _, w_made, w_read, w_tap = filter_strides(problem, filter_last)
    made, read = problem.result_channels // problem.groups, problem.operand_channels // problem.groups
    if place is not None:
        w_made, w_read, w_tap = read * math.prod(problem.filter_size), 1, read
    before, after = problem.border_sizes
    shift = [n - own if problem.direction == "dgrad" else n for n, own in zip(problem.padding_before, before, strict=True)]
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
        wide = 0 if w_read > 1 or not transposes(problem, device) else 2 if problem.layout == "NHWC" else 1
        texts = {"TYPE": ELEMENTS[problem.dtype], "PRODUCTS": products(problem), "WIDE": wide, "GRADIENT": _gradient(problem)}
        buffers = OPERANDS if place is None else (OPERANDS[0], place, *OPERANDS[2:])
        return KernelLaunch("rims_product", texts, product_blocks(problem), THREADS, buffers, (), shared=SHARED, arguments=args)
    defines = portable(problem.dtype, needs_64_bits(problem), THREADS) | {
        "NHWC": int(problem.layout == "NHWC"), "VECTOR": _vector(problem), "GRADIENT": _gradient(problem), "ITEMS": _items(problem),
        "ALONE": int(_alone(problem)),
    }  # fmt: skip
    return KernelLaunch("border_rims", defines, ceil(size, THREADS), THREADS, OPERANDS, (), "rims", arguments=args)


def _of_filter(problem: ConvProblem, filter_last: bool) -> KernelLaunch:
    """The launch for a gradient by the filter, as it is launched: its images and channels have changed places."""
    lanes, threads = OF_FILTER[problem.layout]
    images, c, k, taps = problem.C // problem.groups, problem.N, problem.K, math.prod(problem.output_size)
    (_, h, w), (_, p, q) = problem.input_size, problem.filter_size
    last = problem.layout == "CHWN"
    of_x, of_dy = ((1, channels) if last else (plane, 1) for channels, plane in ((c * problem.groups, h * w), (k, p * q)))
    blocks_k = ceil(k, lanes)
    args = arguments(
        RimsFilterArguments, near_sides(problem) or {}, images=images, k=k, c=c, k_group=k // problem.groups, blocks_k=blocks_k,
        h=h, w=w, p=p, q=q, **by_axis("", problem.output_size[1:], "rs"), taps=taps,
        x_image=c * problem.groups * h * w, x_channel=of_x[0], x_pixel=of_x[1], dy_image=k * p * q, dy_channel=of_dy[0],
        dy_pixel=of_dy[1], dw_k=c * taps, dw_c=1 if filter_last else taps, dw_tap=c if filter_last else 1,
        **by_axis("pad_", problem.padding_before[1:], "hw"), **by_axis("stride_", problem.dilation[1:], "hw"),
        **by_axis("dilation_", problem.stride[1:], "hw"),
    )  # fmt: skip
    defines, buffers = portable(problem.dtype, needs_64_bits(problem), threads) | {"LANES": lanes}, (INPUT, WEIGHT, RESULT)
    return KernelLaunch("border_rims_filter", defines, blocks_k * c * taps, threads, buffers, (), "rims_filter", arguments=args)


def variants(device: Device) -> Iterator[VariantSet]:
    """A text for each type, layout and direction."""
    for dtype, vector in VECTORS.items():
        gradient = FORWARD, ANEW if ELEMENTS.get(dtype) in (HALF, BFLOAT) else ADDS
        choices = portable_choices(THREADS) | {"DTYPE": (DTYPE_CODES[dtype],), "GRADIENT": gradient}
        yield VariantSet("rims", choices | {"NHWC": FLAG, "VECTOR": (1,), "ITEMS": (1, ITEMS), "ALONE": FLAG})
        if vector > 1:
            yield VariantSet("rims", choices | {"NHWC": (1,), "VECTOR": (vector,), "ITEMS": (1,), "ALONE": (1,)})
    for lanes, threads in OF_FILTER.values():
        yield VariantSet("rims_filter", portable_choices(threads) | {"LANES": (lanes,)})
    if device.backend == "cuda" and device.capability >= (8, 0):
        choices = {"PRODUCTS": (1, 3), "WIDE": (0, 1, 2)}
        yield VariantSet("rims_product", choices | {"TYPE": (HALF, BFLOAT), "GRADIENT": (FORWARD, ANEW)}, is_multiplied)
        yield VariantSet("rims_product", choices | {"TYPE": (FLOAT,), "GRADIENT": (FORWARD, ADDS)}, is_multiplied)
