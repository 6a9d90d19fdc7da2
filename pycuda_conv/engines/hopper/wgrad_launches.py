"""The launches of ``cu/hopper/wgrad.cu``: products, copies before them, and the sums of their parts behind them.

A second launch adds the sums of several runs: ``cu/hopper/wgrad_reduce.cu`` if the gradient's taps are fastest in memory and the runs are
few, ``cu/hopper/wgrad_add.cu`` otherwise.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

from pycuda_conv.engines.addressing import PackedLayout
from pycuda_conv.engines.base import ConvProblem, Device, Schedule, kernel_struct
from pycuda_conv.engines.geometry import arguments, by_axis, ceil, forward_of
from pycuda_conv.engines.hopper import wgrad_form as form
from pycuda_conv.engines.hopper.common import image_map, load_base, map_type, stage_channels, tight_map
from pycuda_conv.engines.hopper.dense_borders import Region, added_regions, in_words
from pycuda_conv.engines.hopper.wgrad_form import WgradNhwc, as_loaded, as_seen, flip, fold_level, fold_taps, group_packs, in_planes
from pycuda_conv.engines.layout import fold_channels
from pycuda_conv.engines.layout.fold_channels import FoldChannelsArguments, zeros_behind
from pycuda_conv.engines.schedule import INPUT, RESULT, WEIGHT, WORKSPACE, Arena
from pycuda_conv.engines.tensor_cores import ELEMENTS, limbs
from pycuda_conv.runtime.base import BufferSlice, KernelLaunch, TensorMap

REDUCE_TAPS, REDUCED_CHANNELS = 16, 64  # the most taps, and the channels, of a block of hopper/wgrad_reduce.cu
ADD_THREADS = 256  # of a block of hopper/wgrad_add.cu
LONGEST, MOST_LANES = 8, 32  # the most runs that a thread adds before more threads share a result, and the most threads that do
WgradNhwcArguments = kernel_struct("hopper_wgrad", "WgradNhwcArguments")
WgradRegion = kernel_struct("hopper_wgrad", "WgradRegion")
#: The second struct of ``hopper/wgrad.cu``, for flipped tiles.
FlippedArguments = kernel_struct("hopper_wgrad", "FlippedArguments")
WgradNhwcAddArguments = kernel_struct("hopper_wgrad_add", "WgradNhwcAddArguments")
WgradNhwcReduceArguments = kernel_struct("hopper_wgrad_reduce", "WgradNhwcReduceArguments")


@lru_cache(maxsize=1024)
def channel_copies(problem: ConvProblem) -> tuple[tuple[int, Any], ...]:
    """The arrays that are copied into the channels of :func:`as_loaded`: each one's buffer, and the arguments of its copy."""
    forward, loaded, level = forward_of(problem), as_loaded(problem), fold_level(problem)
    found: list[tuple[int, Any]] = []
    if loaded.C != forward.C:
        _, r, s = (tap if i >= 3 - level else 1 for i, tap in enumerate(forward.filter_size))
        (_, h, w), (depth, p, q) = forward.input_size, loaded.input_size
        steps = ("stride", forward.stride, 1), ("pad", forward.padding_before, 0), ("dilation", forward.dilation, 1)
        within = {
            f"{name}_{axis}": values[i] if i >= 3 - level else instead
            for name, values, instead in steps for i, axis in ((1, "h"), (2, "w"))
        }
        chunks = loaded.C // form.word_elements(problem)
        found.append((INPUT, arguments(
            FoldChannelsArguments, words=forward.N * depth * p * q * chunks, chunks=chunks, h=h, w=w, p=p, q=q, channels=forward.C,
            folded=forward.C * r * s, fold_s=s, **within,
        )))  # fmt: skip
    if loaded.K != forward.K:
        found.append((WEIGHT, zeros_behind(problem, form.position_count(problem), forward.K, loaded.K)))
    return tuple(found)


def part_form(problem: ConvProblem, config: WgradNhwc) -> ConvProblem:
    """The convolution whose filter has the layout of a part."""
    return fold_taps(problem, 0) if config.FLIPPED else as_loaded(problem)


def part_sums(problem: ConvProblem, config: WgradNhwc) -> int:
    """Sums of a part: those of dw, and zeros for the channels that fill x up."""
    part = part_form(problem, config)
    return forward_of(problem).K * (part.C // part.groups) * math.prod(part.filter_size)


def reduce_parts(problem: ConvProblem, config: WgradNhwc, parts: BufferSlice) -> KernelLaunch:
    """The launch that adds few parts if the result's taps are fastest."""
    loaded, own = part_form(problem, config), problem.N
    taps, pitch = math.prod(loaded.filter_size), loaded.C // problem.groups
    folds = math.prod(problem.result_size) // taps
    channels = own * folds
    tiles_t = ceil(taps, REDUCE_TAPS)
    args = arguments(
        WgradNhwcReduceArguments, size=part_sums(problem, config), splits=config.SPLIT, taps=taps, channels=channels, pitch=pitch, own=own,
        folds=folds, tile_taps=ceil(taps, tiles_t),
        tiles_c=ceil(channels, REDUCED_CHANNELS), tiles_t=tiles_t,
    )  # fmt: skip
    grid = problem.K * args.tiles_c * args.tiles_t
    defines = {"TYPE": ELEMENTS[problem.dtype]}
    return KernelLaunch("hopper_wgrad_reduce", defines, grid, 32 * args.tile_taps, (parts, RESULT), (), arguments=args)


def add_parts(problem: ConvProblem, config: WgradNhwc, parts: BufferSlice, taps_fastest: bool) -> KernelLaunch:
    """The launch that adds the parts if the result's channels are fastest, or the parts are many."""
    loaded = part_form(problem, config)
    taps, pitch, size = math.prod(loaded.filter_size), loaded.C // problem.groups, part_sums(problem, config)
    folds = math.prod(problem.result_size) // taps
    each = 4 if pitch % 4 == 0 else 2
    lanes = lane_count(config)
    width = ADD_THREADS // lanes
    args = arguments(
        WgradNhwcAddArguments, size=size, splits=config.SPLIT, width=width.bit_length() - 1, range=ceil(config.SPLIT, lanes),
        pitch=pitch // each, channels=problem.N * folds, taps_fastest=int(taps_fastest), taps=taps, own=problem.N, folds=folds,
    )  # fmt: skip
    defines = {"TYPE": ELEMENTS[problem.dtype], "EACH": each}
    return KernelLaunch("hopper_wgrad_add", defines, ceil(size, each * width), ADD_THREADS, (parts, RESULT), (), arguments=args)


def lane_count(config: WgradNhwc) -> int:
    """Ranges that the runs are cut into for adding, one a thread: a power of two."""
    return min(MOST_LANES, 1 << (ceil(config.SPLIT, LONGEST) - 1).bit_length())


# ---- products


def schedule(
    problem: ConvProblem, config: WgradNhwc, device: Device, with_moments: bool = False, source: ConvProblem | None = None
) -> Schedule:
    scratch, seen = Arena(WORKSPACE), as_seen(problem, config)
    parts = scratch.take(4 * config.SPLIT * part_sums(problem, config)) if config.SPLIT > 1 else None
    places: dict[int, BufferSlice] = {INPUT: INPUT, WEIGHT: WEIGHT}
    copies = []
    for array, args in channel_copies(seen):
        buffer = array if not config.FLIPPED else WEIGHT if array == INPUT else INPUT
        places[buffer] = scratch.take(16 * args.words)
        copies.append(fold_channels.launch(problem, args, buffer, places[buffer]))

    def steps(taps_fastest: bool) -> list[list[KernelLaunch]]:
        product = _product(problem, config, places[INPUT], places[WEIGHT], parts, taps_fastest, source)
        last = []
        if parts:
            apart = taps_fastest and lane_count(config) == 1
            last = [[reduce_parts(problem, config, parts) if apart else add_parts(problem, config, parts, taps_fastest)]]
        return [*([copy] for copy in copies), [product], *last]

    if math.prod(problem.result_size) == 1:
        return Schedule.plain(steps(False), scratch.used)
    whole = steps(True)
    return Schedule([], whole, whole, scratch.used, 0, filter_last=steps(False))


def _product(
    problem: ConvProblem, config: WgradNhwc, x: BufferSlice, dy: BufferSlice, parts: BufferSlice | None, taps_fastest: bool,
    source: ConvProblem | None = None,
) -> KernelLaunch:
    """The launch that multiplies: it writes the result, or parts of it."""
    seen = as_seen(problem, config)
    of_columns, of_rows = (dy, x) if config.FLIPPED else (x, dy)
    forward, loaded, packs = forward_of(seen), as_loaded(seen), group_packs(seen)
    (down, across), part = form.tile_counts(seen, config), form.stages_of_run(seen, config)
    loads, maps = _plane_maps(seen) if in_planes(seen) else _maps(seen, of_columns, of_rows)
    _, tap_r, tap_s = loaded.filter_size
    taps, taps_inner = math.prod(loaded.filter_size), int(taps_fastest and parts is None and not config.FLIPPED)
    args = arguments(
        WgradNhwcArguments, tiles_m=down, tiles_n=across, group_packs=packs, splits=config.SPLIT, stages=form.stages_of(seen), part=part,
        rows=(loaded if config.FLIPPED and parts else forward).K // packs, columns=loaded.C // packs, own_rows=forward.K // forward.groups,
        own_columns=loaded.C // forward.groups, column_blocks=form.column_blocks(seen), inner=taps if taps_inner else form.tap_blocks(seen),
        taps_inner=taps_inner, taps=taps, tap_r=tap_r, tap_s=tap_s, **loads, size=part_sums(problem, config),
        taps_fastest=int(taps_fastest), image_stages=form.image_stages(seen),
    )  # fmt: skip
    defines = {
        "BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N, "WGMMA_N": form.consumer_columns(config), "STAGES": config.STAGES,
        "TYPE": ELEMENTS[problem.dtype], "LIMBS": limbs(problem), "PLANES": int(in_planes(problem)), "FLIPPED": int(config.FLIPPED),
    }
    buffers, structs = ((x, dy), (args, _of_flipped(problem, parts is None, taps_fastest))) if config.FLIPPED else ((), args)
    if source is not None:
        of_regions, maps = _of_regions(problem, source, x, dy)
        stages = of_regions[-1].end
        structs = args._replace(stages=stages, part=ceil(stages, config.SPLIT)), *of_regions
        defines["BORDERED"] = len(of_regions)
    grid, size = down * across * packs * config.SPLIT, form.factor_bytes(problem)
    return KernelLaunch(
        "hopper_wgrad", defines, grid, form.threads_of(config, size), (parts or RESULT, *buffers), (), maps=maps,
        shared=form.ring_of(config, size).nbytes(config.STAGES), arch="sm_90a", arguments=structs,
    )  # fmt: skip


def _of_flipped(problem: ConvProblem, whole: bool, taps_fastest: bool) -> Any:
    """The arguments by which flipped tiles store their sums, which are the result if `whole`."""
    seen = flip(problem)
    forward, loaded = forward_of(seen), as_loaded(seen)
    taps, (_, tap_r, tap_s) = math.prod(forward.filter_size), forward.filter_size
    channels = forward.K if whole else fold_taps(problem, 0).C
    out_tap, out_c = (1, taps) if whole and taps_fastest else (channels, 1)
    return arguments(
        FlippedArguments, forward, own=forward.C, folds=taps // math.prod(loaded.filter_size), out_k=channels * taps, out_tap=out_tap,
        out_c=out_c, **by_axis("low_", tuple(-pad for pad in forward.padding_before)), tap_r=tap_r, tap_s=tap_s,
        **by_axis("apart_", forward.dilation), folded_axes=fold_level(seen), dense=loaded.K, thin=loaded.C,
        **by_axis("size_", loaded.input_size),
    )  # fmt: skip


def _maps(problem: ConvProblem, x: BufferSlice, dy: BufferSlice) -> tuple[dict[str, int], tuple[TensorMap, ...]]:
    """The arguments that say how loads step through x, and the maps of dy and x, for channels-last arrays."""
    loaded, found = as_loaded(problem), form.load_form(problem)
    assert found is not None
    layout, addressing = found
    map_x = image_map(loaded, x, layout, addressing, stage_channels(problem), kind=form.tensor_map_type(problem))
    return by_axis("dilation_", addressing.dilation) | load_base(loaded, addressing), (_map_of_positions(problem, dy), map_x)


def _map_of_positions(problem: ConvProblem, dy: BufferSlice) -> TensorMap:
    """The map of dy, whose positions follow one another from image to image."""
    sizes, block = (as_loaded(problem).K, form.position_count(problem), 1), stage_channels(problem)
    return tight_map(dy, sizes, (block, block, 1), form.tensor_map_type(problem))


def _plane_maps(problem: ConvProblem) -> tuple[dict[str, int], tuple[TensorMap, ...]]:
    """The same for NCHW arrays, whose loads step through nothing."""
    forward, block = forward_of(problem), stage_channels(problem)
    plane = math.prod(forward.output_size)
    maps = tuple(
        tight_map(buffer, (plane, channels, forward.N), (block, block, 1), map_type(problem))
        for buffer, channels in ((WEIGHT, forward.K), (INPUT, forward.C))
    )
    unused = ("spatial_dims", "dilation_d", "dilation_h", "dilation_w", "load_plane", "load_pq", "load_q")
    return dict.fromkeys((*unused, "stride_d", "stride_h", "stride_w", "low_d", "low_h", "low_w"), 0), maps


REGIONS = 9, 25  # of a launch


def regions(source: ConvProblem) -> tuple[Region, ...] | None:
    """The regions of dy where the image of `source` has a border; None if loads can't make them."""
    found = added_regions(replace(forward_of(source), direction="fprop"))
    return found if found is not None and len(found) <= REGIONS[-1] else None


def _of_regions(
    problem: ConvProblem, source: ConvProblem, x: BufferSlice, dy: BufferSlice
) -> tuple[tuple[Any, ...], tuple[TensorMap, ...]]:
    """The arguments and the maps of the regions, with empty ones behind them; `problem`: that of the wider image.

    The first is that of zeros around the image; its dy is loaded by boxes.
    """
    loaded, found, block, one = as_loaded(problem), regions(source) or (), stage_channels(problem), (1, 1, 1)
    of_dy, own_size, kind = replace(loaded, C=loaded.K), forward_of(source).input_size, form.tensor_map_type(problem)
    layout_x, layout_dy = (PackedLayout(True, 0, one, n, c, block, one) for n, c in ((own_size, loaded.C), (loaded.output_size, loaded.K)))
    args: list[Any] = []
    maps_x, maps_dy, end = [], [], 0
    for region in found:
        phase, own = region.addressing.phase, replace(region.addressing, taps=one, stride=one, low=(0, 0, 0))
        end += ceil(loaded.N * math.prod(phase.size), block)
        args.append(arguments(WgradRegion, in_words(region), load_base(loaded, region.addressing), end=end))
        maps_x.append(image_map(loaded, x, layout_x, region.addressing, block, part=(region.first, region.length), kind=kind))
        maps_dy.append(image_map(of_dy, dy, layout_dy, own, block, part=(phase.origin, phase.size), kind=kind))
    maps_dy[0] = _map_of_positions(problem, dy)
    more = next(n for n in REGIONS if n >= len(found)) - len(found)
    return tuple(args + args[-1:] * more), (*maps_dy, *maps_dy[-1:] * more, *maps_x, *maps_x[-1:] * more)
