"""The launches of ``cu/hopper/gemm.cu``: its tensor maps and arguments, for some phases each.

:mod:`pycuda_conv.engines.packing` says how operands are packed and what phases read of them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from pycuda_conv.engines.addressing import PackedLayout, PhaseAddressing, filter_sizes, row_blocks
from pycuda_conv.engines.base import ConvProblem, kernel_struct
from pycuda_conv.engines.geometry import arguments, ceil, finish
from pycuda_conv.engines.hopper.common import THREADS, im2col, load_base, tight_map
from pycuda_conv.engines.hopper.gemm_tiles import (
    KERNEL,
    PHASES,
    ImplicitGemm,
    alike,
    defines_of,
    form,
    grid_of,
    is_common,
    launches_of,
    may_note,
    paired,
    phases_with_repeats,
    reads_filter,
    result_arithmetic,
    whole_rows,
)
from pycuda_conv.engines.packed_product import assemble, repeat_arguments, tap_numbers, written_places
from pycuda_conv.engines.packing import Operands, packs_filter_last
from pycuda_conv.engines.range_guard import MomentsLayout, recompute_arguments
from pycuda_conv.engines.schedule import FINISH, INPUT, RESULT, WEIGHT, Moments, Schedule, finish_constants, placed
from pycuda_conv.engines.tensor_cores import FLOAT, limbs, products
from pycuda_conv.runtime.base import BufferSlice, Device, Im2col, KernelLaunch, TensorMap

GemmPhase = kernel_struct("gemm_tiles.cuh", "GemmPhase")


def schedule(
    problem: ConvProblem, config: ImplicitGemm, device: Device, with_moments: bool = False, source: ConvProblem | None = None
) -> Schedule:
    multiprocessors = device.multiprocessors
    made = _schedule(problem, config, multiprocessors, with_moments, source=source)
    if reads_filter(problem):
        return replace(made, filter_last=_schedule(problem, config, multiprocessors, with_moments, map_w=_filter_map(problem)).steps)
    if packs_filter_last(problem):
        last = _schedule(problem, config, multiprocessors, with_moments, filter_last=True, source=source)
        return replace(made, filter_last=last.whole)
    return made


def _schedule(
    problem: ConvProblem, config: ImplicitGemm, multiprocessors: int, with_moments: bool, map_w: TensorMap | None = None,
    filter_last: bool = False, source: ConvProblem | None = None,
) -> Schedule:
    """:func:`schedule` for a filter that is packed (from channels last if `filter_last`), or read as it lies through `map_w`."""
    moments = _moments(problem, config) if with_moments else None

    def products(
        packed: PackedLayout, addressings: Sequence[PhaseAddressing], operands: Operands, target: BufferSlice, layout: MomentsLayout
    ) -> list[KernelLaunch]:
        flagged: tuple[BufferSlice, ...] = (INPUT, WEIGHT, operands.x_flags, operands.w_flags) if _may_recompute(problem, config) else ()
        buffers = (operands.w_limbs, operands.x_scales, operands.w_scales, *FINISH, target)
        launches, (arena, first) = [], operands.tickets
        for group in launches_of(problem):
            place = (arena, first) if config.joins(problem) else None
            among = operands, buffers, flagged, multiprocessors, layout, map_w, filter_last, place, source
            launches.append(_product(problem, config, packed, group, *among))
            first += 4 * _results(problem, config, group)
        return launches

    tickets = sum(_results(problem, config, group) for group in launches_of(problem)) if config.joins(problem) else 0
    return assemble(
        problem, config.SPLIT, multiprocessors, products, moments, filter_last, windows=True, clusters=True,
        recomputes=_may_recompute(problem, config) and (config.SPLIT == 1 or tickets > 0), tickets=tickets, source=source,
    )


def _results(problem: ConvProblem, config: ImplicitGemm, addressings: Sequence[PhaseAddressing]) -> int:
    """Tickets of a launch: one for each tile of each phase, whatever its splits; rounded up to a multiple of 16 bytes."""
    return ceil(math.prod(config.tiles_of(problem, addressings)) * problem.groups * phases_with_repeats(problem, addressings), 4) * 4


def _may_recompute(problem: ConvProblem, config: ImplicitGemm) -> bool:
    """Whether the kernel's text can recompute flagged results: that of float32 can, which also writes the fp32 parts of float16 sums."""
    return problem.dtype == "float32" or (problem.dtype == "float16" and config.SPLIT > 1)


def _moments(problem: ConvProblem, config: ImplicitGemm) -> Moments | None:
    """The moments that a product can note: forward, whole sums of common layers, if registers suffice."""
    if problem.direction != "fprop" or problem.layout == "CNHW" or config.SPLIT > 1 or problem.has_residual or problem.activation:
        return None
    if config.is_twin:  # a flag for each block says what it computed again, and there is room for one of each multiprocessor
        return None
    if not is_common(defines_of(problem)) or (problem.layout == "NHWC" and not whole_rows(problem, 1)):
        return None
    pixels, plane = config.consumer_pixels, math.prod(problem.result_size)
    if products(problem) == 3 and pixels > 128:
        return None
    return Moments(1, problem.N * plane, pixels, problem.result_channels)


def _image_map(
    problem: ConvProblem, config: ImplicitGemm, packed: PackedLayout, addressing: PhaseAddressing, place: tuple[int, int]
) -> TensorMap:
    channels, copies, pixel = problem.groups * packed.group, limbs(problem), 2 * problem.groups * packed.pixel  # bytes
    if addressing.flat:
        axes, images = [problem.N * math.prod(packed.size)], copies
        strides, box = [pixel, pixel * axes[0]], Im2col((0,), (0,), (1,), packed.load, config.BLOCK_N)
    else:
        inner = range(2, 2 - addressing.spatial_dims, -1)  # W first
        axes, images = [packed.size[i] for i in inner], copies * problem.N
        strides = list(accumulate((packed.stored[i] for i in inner), operator.mul, initial=pixel))
        strides[0] *= 1 if packed.window is None else problem.stride[2]  # windows overlap
        box = im2col(addressing, axes, packed.load, config.BLOCK_N)
    operand = "bfloat16" if problem.dtype == "bfloat16" else "float16"
    return TensorMap(*place, (channels, *axes, images), tuple(strides), box, 2 * packed.load, operand)


def _filter_map(problem: ConvProblem) -> TensorMap:
    """The map of a 16-bit filter whose second axis is last: a box is `packed.load` channels of one tap of 64 rows of the first axis."""
    packed, _ = form(problem)
    first, last = problem.weight_shape[:2]
    taps = math.prod(problem.filter_size)
    return tight_map(WEIGHT, (last, taps, first), (packed.load, 1, 64), problem.dtype, 2 * packed.load)


def _result_map(problem: ConvProblem, config: ImplicitGemm, place: BufferSlice) -> TensorMap:
    """The map of the result, or of a split sum's parts. Groups and parts have axes of their own, so a tail never reaches the next one."""
    size, groups, rows = config.stored_bytes(problem), problem.groups, problem.result_channels
    pixels = problem.N * math.prod(problem.result_size)
    sizes, strides = (rows // groups, groups, pixels, config.SPLIT), (size * (rows // groups), size * rows, size * rows * pixels)
    return TensorMap(*placed(place), sizes, strides, (128 // size, 1, 32, 1), 128, "float32" if size == 4 else problem.dtype)


def _product(
    problem: ConvProblem, config: ImplicitGemm, packed: PackedLayout, addressings: Sequence[PhaseAddressing], operands: Operands,
    buffers: tuple[BufferSlice, ...], flagged: tuple[BufferSlice, ...], multiprocessors: int, layout: MomentsLayout,
    map_w: TensorMap | None, filter_last: bool, tickets: BufferSlice | None, source: ConvProblem | None,
) -> KernelLaunch:
    """The launch of some phases. With `tickets` it adds the parts of split sums; with `flagged` it computes flagged results once more."""
    defines = result_arithmetic(problem, addressings[0].phase, config.SPLIT) | {
        "BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N, "STAGES": config.STAGES, "LOAD_CHANNELS": packed.load,
        "WGMMA_N": config.consumer_pixels, "TENSOR_STORE": int(config.tensor_store(problem)),
        "W_MN_MAJOR": int(map_w is not None and problem.direction == "dgrad"), "PINGPONG": int(config.is_pingpong),
        "PHASES": 1, "INTERLEAVE_COLUMNS": int(paired(problem)), **({"TWIN": 1} if config.is_twin else {}),
    }
    if not defines["DENSE"]:
        defines["PHASES"] = PHASES
    maps = [_image_map(problem, config, packed, addressing, operands.x_limbs) for addressing in addressings]
    unused = defines["PHASES"] - len(addressings)  # the kernel's parameters always hold PHASES phases: the last one fills the rest
    maps += maps[-1:] * unused
    if products(problem) == 1 and problem.layout == "NHWC":
        maps.append(map_w or maps[0])  # the text has this parameter even where the filter is packed
    if config.tensor_store(problem):
        maps.append(_result_map(problem, config, buffers[-1]))
    with_moments, tiles = layout.moments is not None, config.tiles_of(problem, addressings)
    bits = {"w_lies": int(map_w is not None), "scaled": (problem.dtype == "float32") + 2 * with_moments, "x_tiles": operands.tiles}
    phases = tuple(_arguments(problem, config, packed, addressing, tiles, bits) for addressing in addressings)
    structs: tuple[tuple[int, ...], ...] = (*phases, *phases[-1:] * unused)
    if defines["PHASES"] > 1:
        structs += (repeat_arguments(problem, packed, len(addressings), alike(problem)[1], filter_last),)
    if _may_recompute(problem, config):
        launched = [addressing.phase for addressing in addressings]
        structs += recompute_arguments(source or problem, launched, defines["PHASES"], filter_last)
    if may_note(defines):
        buffers += (layout.parts if with_moments else RESULT, *flagged, *((layout.redone or RESULT,) if flagged else ()))
    else:
        buffers += flagged
    if defines["OUT"] == FLOAT and not (defines["BF16"] or config.is_pingpong):  # the kernel's JOINS
        buffers += RESULT, tickets or RESULT
        kept = finish(problem) if tickets else dict.fromkeys(finish(problem), 0)
        structs += (JoinArguments(joins=int(tickets is not None), **kept),)
    buffers += (operands.x_tiles,) if defines["PHASES"] > 1 else (operands.x_tiles, operands.w_tiles)
    threads = 256 if config.is_twin else THREADS
    return KernelLaunch(
        KERNEL, defines, grid_of(problem, addressings, phases[0].tiles, config.blocks * multiprocessors), threads, buffers, (),
        maps=tuple(maps),
        shared=config.ring_for(problem).nbytes(config.STAGES), arch="sm_90a", arguments=structs,
        # the epilogue runs on whole sums, not on a part
        layer={} if tickets else finish_constants(phases[0]) | {"WITH_MOMENTS": int(with_moments)},
    )


#: The arguments of a split sum that the product adds.
JoinArguments = kernel_struct(KERNEL, "JoinArguments")


def _arguments(
    problem: ConvProblem, config: ImplicitGemm, packed: PackedLayout, addressing: PhaseAddressing, tiles: tuple[int, int],
    of_launch: Mapping[str, int],
) -> Any:
    """The kernel's arguments of a phase. All phases of a launch count the same `tiles`; `of_launch` are its other common values."""
    phase, groups, rows = addressing.phase, problem.groups, problem.result_channels
    tiles_m, tiles_pixels = tiles
    blocks_group, _, channel_blocks = filter_sizes(problem, packed)
    blocks = channel_blocks * math.prod(addressing.taps)
    return arguments(
        GemmPhase, problem, phase, tap_numbers(packed, addressing), load_base(problem, addressing), written_places(problem, phase),
        finish(problem, config.SPLIT > 1), of_launch, tiles=tiles_m * tiles_pixels * config.SPLIT * groups, tiles_m=tiles_m,
        splits=config.SPLIT, split_stages=ceil(ceil(blocks, 64 // packed.load), config.SPLIT), tiles_pixels=tiles_pixels, blocks=blocks,
        channel_blocks=channel_blocks, rows_group=rows // groups, rows=rows, blocks_group=blocks_group,
        row_blocks=row_blocks(problem, packed), channels_group=packed.group, channels=groups * packed.group,
        pixels=problem.N * math.prod(phase.size), limb_images=1 if addressing.flat else problem.N, spatial_dims=addressing.spatial_dims,
        out_part=math.prod(problem.result_shape),
    )  # fmt: skip
