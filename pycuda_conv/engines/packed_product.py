"""What products of packed operands have in common: the launches around them, their arguments and their defines.

:func:`assemble` puts the launches that pack, add and recompute around the products of an engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pycuda_conv.engines.addressing import PackedLayout, PhaseAddressing, flagged, packed_layout
from pycuda_conv.engines.base import FLAG, kernel_struct
from pycuda_conv.engines.geometry import Phase, arguments, by_axis, filter_strides, places, row_major, written_strides
from pycuda_conv.engines.packing import Operands, pack_operands
from pycuda_conv.engines.range_guard import MomentsLayout
from pycuda_conv.engines.schedule import RESULT, WORKSPACE, Arena, Moments, Schedule
from pycuda_conv.engines.split_sum import reduce_launch
from pycuda_conv.engines.tensor_cores import BFLOAT, ELEMENTS, FLOAT, HALF, products
from pycuda_conv.problem import ConvProblem, Size3
from pycuda_conv.runtime.base import BufferSlice, KernelLaunch


def assemble(
    problem: ConvProblem, split: int, multiprocessors: int,
    products: Callable[[PackedLayout, Sequence[PhaseAddressing], Operands, BufferSlice, MomentsLayout], list[KernelLaunch]],
    moments: Moments | None = None, filter_last: bool = False, windows: bool = False, clusters: bool = False, recomputes: bool = False,
    tickets: int = 0, source: ConvProblem | None = None,
) -> Schedule:
    """The launches of a problem: those of `products`, and around them those that pack, add the parts of a split sum, and recompute.

    With `filter_last` the filter's second axis is last, see :func:`packs_filter_last`. `windows`: see :func:`packing`. `clusters`: the GPU
    has clusters of blocks. With `recomputes` the product itself recomputes flagged results. With `tickets`, their number, it also adds
    the parts of a split sum; the images have to be packed then. With `source` its image is packed: see :func:`adds_border`. The last
    argument of `products` is the layout of `moments`.
    """
    packed, addressings = packed_layout(problem, windows)
    scratch = Arena(WORKSPACE)
    operands = pack_operands(problem, packed, scratch, multiprocessors, filter_last, clusters, tickets, source)
    target: BufferSlice = RESULT
    if split > 1:
        target = scratch.take(4 * split * math.prod(problem.result_shape))
    layout = MomentsLayout(moments, scratch, multiprocessors)
    after = [products(packed, addressings, operands, target, layout)]
    if split > 1 and not tickets:
        after.append([reduce_launch(problem, split, target)])
    checked = flagged(problem, packed)
    if recomputes:
        layout.redone_by(after[0])
    elif checked:
        found = operands.x_flags, operands.w_flags, operands.x_scales, operands.w_scales
        after += [[step] for step in layout.guarded(source or problem, found, filter_last)]
    filter_bytes, moments = operands.filter_bytes, layout.moments
    return Schedule(operands.prepare, operands.images + after, operands.both + after, scratch.used, filter_bytes, checked, moments)


# ---- phases that are repeats of others


Repeats = kernel_struct("repeats.cuh", "Repeats")


def first_ones(addressings: Sequence[PhaseAddressing], many: Size3) -> list[PhaseAddressing]:
    """The phases that are no repeats of others, if `many` are repeats of one along each axis."""
    return [addressing for addressing in addressings if not any(at % n for at, n in zip(addressing.phase.origin, many, strict=True))]


def repeat_arguments(problem: ConvProblem, packed: PackedLayout, phases: int, many: Size3, filter_last: bool = False) -> Any:
    """The arguments of a launch in which `phases` phases take turns with their repeats. `filter_last`: the filter's second axis is last."""
    *_, w_tap = filter_strides(problem, filter_last)
    pixel = problem.result_channels if problem.layout == "NHWC" else 1
    return arguments(
        Repeats, phases=phases, turns=phases * math.prod(many), along_r=many[1], along_s=many[2],
        **by_axis("tap_", row_major(packed.taps), "trs"), **by_axis("w_", [w_tap * n for n in row_major(problem.filter_size)], "trs"),
        **by_axis("y_", [pixel * n for n in row_major(problem.result_size)], "trs"),
    )  # fmt: skip


def tap_numbers(packed: PackedLayout, addressing: PhaseAddressing) -> dict[str, int]:
    """Arguments: taps along r and s, and pixels between them; a phase's first tap in the packed filter, and its step along t, r and s."""
    _, r, s = packed.taps
    strides = (r * s, s, 1)
    step_t, step_r, step_s = (a * b for a, b in zip(addressing.step, strides, strict=True))
    base = sum(a * b for a, b in zip(addressing.base, strides, strict=True))
    taps = {"tap_r": max(addressing.taps[1], 1), "tap_s": max(addressing.taps[2], 1)}
    steps = {"tap_base": base, "tap_step_t": step_t, "tap_step_r": step_r, "tap_step_s": step_s}
    return taps | steps | by_axis("dilation_", addressing.dilation)


def arithmetic(problem: ConvProblem, phase: Phase, split: bool) -> dict[str, int]:
    """The defines that say what is multiplied and how it is stored, the same for every kernel on packed operands."""
    nhwc, dense = problem.layout == "NHWC", phase.step == (1, 1, 1)
    if nhwc:
        neighbours = problem.result_channels // problem.groups
    else:
        neighbours = math.prod(phase.size) * (problem.N if problem.layout == "CNHW" else 1) if dense else 1
    return {
        "PRODUCTS": products(problem), "BF16": int(problem.dtype == "bfloat16"), "OUT": FLOAT if split else ELEMENTS[problem.dtype],
        "NHWC": int(nhwc), "VEC": 4 if neighbours % 4 == 0 else 1, "DENSE": int(dense),
    }


#: The values of :func:`arithmetic`: float32 in fp32 and in tf32, float16 (whose split sums are stored as tf32's are), bfloat16, and its
#: split sums.
ARITHMETICS: tuple[dict[str, tuple[int, ...]], ...] = tuple(
    {
        "PRODUCTS": (count,), "BF16": (bf16,), "OUT": (out,), "NHWC": FLAG, "VEC": (1, 4), "DENSE": FLAG,
    }
    for count, bf16, out in ((3, 0, FLOAT), (1, 0, FLOAT), (1, 0, HALF), (1, 1, BFLOAT), (1, 1, FLOAT))
)  # fmt: skip


def written_so(d: Mapping[str, int]) -> bool:
    """Whether any result is stored so: in planes, pixels that are not contiguous have no neighbours."""
    return bool(d["NHWC"] or d["DENSE"] or d["VEC"] == 1)


def written_places(problem: ConvProblem, phase: Phase) -> dict[str, int]:
    """The arguments that say where a phase's pixels, and images and channels, lie in the result."""
    strides = written_strides(problem)
    names = ("out_size", "out_base", "out_d", "out_h", "out_w")
    return dict(zip(names, places(problem, phase), strict=True)) | {"out_image": strides.image, "out_row": strides.channel}
