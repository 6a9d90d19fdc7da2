"""The launches of ``cu/hopper/dense.cu``: its tensor maps and arguments, for some phases, or regions of a result with a border."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from pycuda_conv.engines.addressing import PhaseAddressing
from pycuda_conv.engines.base import ConvProblem, kernel_struct
from pycuda_conv.engines.geometry import arguments, batches, by_axis, ceil, count_phases, filter_strides, repeats
from pycuda_conv.engines.hopper import dense_form as form
from pycuda_conv.engines.hopper.box_tiles import Box
from pycuda_conv.engines.hopper.common import ROW, image_map, load_base, map_type, stage_channels, store_mode, tight_map
from pycuda_conv.engines.hopper.dense_borders import Region, in_words, regions
from pycuda_conv.engines.hopper.dense_form import DenseNhwc
from pycuda_conv.engines.layout import transpose_filter
from pycuda_conv.engines.packed_product import repeat_arguments, tap_numbers, written_places
from pycuda_conv.engines.range_guard import MomentsLayout
from pycuda_conv.engines.schedule import FINISH, INPUT, PACKED, RESULT, WEIGHT, WORKSPACE, Arena, Moments, Schedule, finish_constants
from pycuda_conv.engines.tensor_cores import ELEMENTS
from pycuda_conv.problem import Size3
from pycuda_conv.runtime.base import BufferSlice, Device, KernelLaunch, TensorMap

SLICE = 64  # pixels of a slice of moments
TRANSPOSERS = 3  # a block's warps that transpose the filter
DensePhase = kernel_struct("hopper_dense", "DensePhase")


def schedule(
    problem: ConvProblem, config: DenseNhwc, device: Device, with_moments: bool = False, source: ConvProblem | None = None
) -> Schedule:
    multiprocessors, taps = device.multiprocessors, math.prod(problem.filter_size)
    scratch = Arena(WORKSPACE)
    layout = MomentsLayout(_moments(problem, config) if with_moments else None, scratch, multiprocessors)
    parts = layout.parts if layout.moments else None

    def products(place: BufferSlice, mn_major: bool) -> list[list[KernelLaunch]]:
        tile = config
        if tile == form.deepest(tile, form.reads_mn_major(problem)):  # the choice meant "as many stages as fit"
            tile = form.deepest(tile, mn_major and problem.itemsize == 2)
        if source is not None:
            return [_of_regions(source, tile, place, mn_major, multiprocessors)]
        groups = batches(form.addressed(problem)[1], form.PHASES)
        return [[_product(problem, tile, group, place, mn_major, multiprocessors, parts) for group in groups]]

    # a filter with its second axis last is K-major in fprop, and MN-major in dgrad
    last = problem.direction == "fprop" and problem.weight_shape[1] * problem.itemsize % 16 == 0
    mn_major = form.reads_mn_major(problem) or (source is None and form.transposes(problem, config, device))
    in_place = products(WEIGHT, mn_major) if last or mn_major else None
    if in_place and taps == 1:
        return Schedule([], in_place, in_place, scratch.used, 0, moments=layout.moments, filter_last=in_place)
    kept = Arena(PACKED)
    place = kept.take(problem.itemsize * math.prod(problem.weight_shape))
    # strides of the filter, in elements: of a channel of the result, of a tap (1), of a channel of the input
    _, row, channel, _ = filter_strides(problem)
    prepare, steps = [[transpose_filter.launch(problem, place, (row, 1, channel))]], products(place, False)
    if not in_place and problem.direction == "dgrad":
        width = problem.weight_shape[1]
        in_place = [[transpose_filter.launch(problem, place, (1, width, taps * width))], *steps]
    return Schedule(prepare, steps, prepare + steps, scratch.used, kept.used, moments=layout.moments, filter_last=in_place)


def _of_regions(source: ConvProblem, tile: DenseNhwc, place: BufferSlice, mn_major: bool, multiprocessors: int) -> list[KernelLaunch]:
    """The launches of a result whose image has a border: its interior and its sides, those with most taps first."""
    found, launches = sorted(regions(source) or (), key=lambda one: -math.prod(one.addressing.taps)), []
    for some in batches(found, form.REGIONS[-1]):
        launches.append(_product(source, tile, [one.addressing for one in some], place, mn_major, multiprocessors, None, some))
    return launches


def _moments(problem: ConvProblem, config: DenseNhwc) -> Moments | None:
    """The moments that the product can note: forward, whole sums without a residual or an activation."""
    if problem.direction != "fprop" or config.CLUSTER > 1 or problem.has_residual or problem.activation:
        return None
    if config.BLOCK_N > form.MOMENTS_COLUMNS:
        return None
    return Moments(1, problem.N * math.prod(problem.result_size), SLICE, problem.result_channels)


def _product(
    problem: ConvProblem, config: DenseNhwc, addressings: Sequence[PhaseAddressing], place: BufferSlice, mn_major: bool,
    multiprocessors: int, parts: BufferSlice | None, sides: Sequence[Region] = (),
) -> KernelLaunch:
    """The launch of some phases. It notes moments if it is given a place for their `parts`. `sides`: of a result with a border."""
    unpacked, _ = form.addressed(problem)
    inside = [one.interior for one in sides] or [True] * len(addressings)
    boxes = [form.box_of(problem, config, one, parts is not None) if own else None for one, own in zip(addressings, inside, strict=True)]
    args = tuple(phase_arguments(problem, config, one, box, parts is not None) for one, box in zip(addressings, boxes, strict=True))
    args = tuple(one._replace(**in_words(side)) for one, side in zip(args, sides, strict=True)) if sides else args
    several = next(n for n in form.REGIONS if n >= len(sides)) if sides else form.PHASES
    phases = 1 if count_phases(problem) == 1 and not sides else several
    tiles, ends = sum(phase.tiles for phase in args), accumulate(phase.tiles for phase in args)
    args = tuple(phase._replace(tiles=end) for phase, end in zip(args, ends, strict=True))
    args += args[-1:] * (phases - len(addressings))  # empty phases fill the kernel's parameter
    rows = ROW, form.last_row(problem)
    maps = []
    seen: Sequence[tuple[Size3, Size3] | None] = [(side.first, side.length) for side in sides] or [None] * len(addressings)
    for row in rows:
        mapped = zip(addressings, seen, boxes, strict=True)
        images = [image_map(problem, INPUT, unpacked, one, config.BLOCK_M, row, part, box) for one, part, box in mapped]
        maps += images + [images[-1]] * (phases - len(addressings))
    maps += [_filter_map(problem, config, place, mn_major, row) for row in rows]
    structs: tuple[tuple[int, ...], ...] = args
    if phases > 1:
        structs += (repeat_arguments(problem, unpacked, 1, repeats(problem)),)
    transposing = mn_major and problem.itemsize == 4
    fitting = multiprocessors * form.blocks_per_sm(config)
    grid = tiles * config.CLUSTER if config.CLUSTER > 1 else min(tiles, fitting)
    defines = {
        "BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N, "STAGES": config.STAGES, "TYPE": ELEMENTS[problem.dtype],
        "W_MN_MAJOR": int(mn_major), "CLUSTER": config.CLUSTER, "PHASES": phases, **({"BORDERED": 1} if sides else {}),
    }
    buffers: tuple[BufferSlice, ...] = (*FINISH, RESULT)
    if config.CLUSTER == phases == 1 and not mn_major and config.BLOCK_N <= form.MOMENTS_COLUMNS:  # the kernel's EMIT_MOMENTS
        buffers += (parts or RESULT,)
    return KernelLaunch(
        "hopper_dense", defines, grid, 2 * config.BLOCK_M + 32 + (32 * TRANSPOSERS if transposing else 0), buffers, (),
        maps=tuple(maps), shared=form.ring_of(config, mn_major and not transposing).nbytes(config.STAGES), arch="sm_90a", arguments=structs,
        layer=finish_constants(args[0]) | {"WITH_MOMENTS": args[0].with_moments, "LAST_STEPS": args[0].last_steps},
    )  # fmt: skip


def _filter_map(problem: ConvProblem, config: DenseNhwc, place: BufferSlice, mn_major: bool, row: int) -> TensorMap:
    """The filter's map. A box is `row` bytes of k of one tap x a tile's channels, or, MN-major, channels x k."""
    rows, channels, taps, size = problem.result_channels, form.summed(problem), math.prod(problem.filter_size), problem.itemsize
    inner, outer = (rows, channels) if mn_major else (channels, rows)
    wide = row // size
    box = (min(stage_channels(problem), config.BLOCK_N), 1, wide) if mn_major else (wide, 1, min(config.BLOCK_N, rows))
    return tight_map(place, (inner, taps, outer), box, map_type(problem), size * box[0])


def phase_arguments(
    problem: ConvProblem, config: DenseNhwc, addressing: PhaseAddressing, box: Box | None = None, with_moments: bool = False
) -> Any:
    """The kernel's arguments of a phase. Its tiles are boxes, or else neighbouring pixels."""
    (unpacked, _), phase = form.addressed(problem), addressing.phase
    across, down = ceil(problem.result_channels, config.BLOCK_N), form.tiles_down(problem, config, addressing, box)
    pixels, blocks = down * config.BLOCK_M if box else problem.N * math.prod(phase.size), form.stages_of(problem, addressing)
    lengths, counts = (box.size, box.counts) if box else ((0,) * 4, (0,) * 4)
    return arguments(
        DensePhase, problem, phase, written_places(problem, phase), tap_numbers(unpacked, addressing), load_base(problem, addressing),
        tiles=across * down * math.prod(repeats(problem)), tiles_n=across, blocks=blocks, part=ceil(blocks, config.CLUSTER),
        channel_blocks=ceil(form.summed(problem), stage_channels(problem)), last_steps=form.last_steps(problem),
        group_rows=problem.result_channels // problem.groups, group_channels=form.summed(problem), **by_axis("numbers_", (0, 0, 0)),
        **by_axis("offsets_", (0, 0, 0)), pixels=pixels, **by_axis("box_", lengths, "whdn"), **by_axis("boxes_", counts[:3], "whd"),
        depth=phase.size[0], height=phase.size[1], images=problem.N, store_mode=store_mode(problem, config.BLOCK_N, phase),
        with_moments=int(with_moments),
    )  # fmt: skip
