"""Gradients of filters from channels-last arrays as they lie, on Hopper's tensor cores (``cu/hopper/wgrad.cu``).

The arrays are float16, bfloat16 and float32. float32 takes three products of TF32, or one with ``precision="tf32"``. For 1x1 filters,
16-bit arrays may be NCHW too. The gradients are few, and each is a long sum over the positions of the convolution's result. So the
positions are cut into runs, and a second launch adds the sums of several runs (``wgrad_launches.py``).

If dy has few channels, a tile would have few rows. Without strides the same sums may then run over the pixels of x, with x and dy
exchanged: flipped tiles. ``wgrad_form.py`` says what the tiles see of a problem.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pycuda_conv.engines.addressing import MOST_PIXELS, PackedLayout
from pycuda_conv.engines.base import ConvProblem, VariantSet, kernel_struct
from pycuda_conv.engines.costs import costs, together
from pycuda_conv.engines.geometry import arguments, by_axis, ceil, forward_of, pixel_by_pixel
from pycuda_conv.engines.hopper.common import CLOCK, ROW, image_map, load_base, map_type, most_shared, pixel_cycles, stage_channels
from pycuda_conv.engines.hopper.dense_borders import Region, added_regions, in_words
from pycuda_conv.engines.hopper.ring import ALIGNMENT, Ring, sum_bytes
from pycuda_conv.engines.hopper.wgrad_form import (
    FORM_COST,
    WgradNhwc,
    as_loaded,
    as_seen,
    factor_bytes,
    flip,
    fold_level,
    fold_taps,
    group_pack,
    group_packs,
    in_planes,
    load_form,
    position_count,
    reads_flat,
    tensor_map_type,
    word_elements,
)
from pycuda_conv.engines.hopper.wgrad_launches import REDUCED_CHANNELS, add_parts, channel_copies, lane_count, part_sums, reduce_parts
from pycuda_conv.engines.layout import fold_channels
from pycuda_conv.engines.limits import HOPPER, NOT_EMPTY, Takes, Tiles, types
from pycuda_conv.engines.schedule import INPUT, RESULT, WEIGHT, WORKSPACE, Arena, Schedule
from pycuda_conv.engines.tensor_cores import BFLOAT, ELEMENTS, FLOAT, HALF, limbs
from pycuda_conv.runtime.base import BufferSlice, Device, KernelLaunch, TensorMap

LEAST_OF_GROUP = 4  # channels of a group, if there are several: with fewer, most products would be thrown away
#: BLOCK_M -> the BLOCK_Ns of the tiles, by the bytes of an element's limbs. Their sums fit the consumers' registers.
TILES: dict[int, dict[int, tuple[int, ...]]] = {
    2: {64: (64, 128, 192, 384), 128: (64, 128, 192, 256), 192: (128, 192), 256: (192,)}, 4: {64: (64, 128), 128: (64, 128)},
    8: {64: (64,), 128: (64,)},
}  # fmt: skip
PAIRED = 192  # columns of the widest tile of 64 rows with two blocks on a multiprocessor
STAGES = 12  # the most stages of a ring
#: The tiles for NCHW arrays: others gained nothing.
PLANES_TILES = {64: (64,), 128: (64, 128, 192)}
#: Flipped tiles are tried if dy has at most so many channels, and fewer than x: other tiles would then have a single row.
MOST_FLIPPED = 64
FLIPPED_TILES: dict[int, dict[int, tuple[int, ...]]] = {2: {128: (64, 128, 192), 256: (192,)}, 4: {128: (64,)}, 8: {128: (64,)}}

CONFIGS, LAYOUTS, RUNS_ON, TENSOR_CORES, MOST_VARIANTS = (WgradNhwc,), ("CHWN", "CNHW"), HOPPER, True, {"cuda": 122}
ORDER = "FLIPPED", "SPLIT"  # what the order of sums depends on
COST = costs("hopper.wgrad")
WgradNhwcArguments = kernel_struct("hopper_wgrad", "WgradNhwcArguments")
WgradRegion = kernel_struct("hopper_wgrad", "WgradRegion")
#: The second struct of ``hopper/wgrad.cu``, for flipped tiles.
FlippedArguments = kernel_struct("hopper_wgrad", "FlippedArguments")


def _why_no_planes(problem: ConvProblem) -> str | None:
    """Why the kernel can't run `problem`, whose arrays are NCHW, or None if it can."""
    forward = forward_of(problem)
    if limbs(problem) > 1:
        return "it takes NCHW arrays of float16, bfloat16, and of float32 with precision='tf32'"
    if not pixel_by_pixel(forward):
        return "of NCHW arrays it takes 1x1 filters without stride and padding"
    if math.prod(forward.output_size) % word_elements(problem):
        return "tensor loads take planes of a multiple of 16 bytes"
    if forward.C // forward.groups % 2:
        return "it writes two neighbouring channels at once"
    if not group_pack(problem):
        return "its tiles take groups whose channels are together a multiple of 16 bytes"
    return "it counts stages in 31 bits" if problem.largest_array >= 2**31 else None


def _why_not_last(problem: ConvProblem) -> str | None:
    """Why the kernel can't run `problem`, whose channels are last, or None if it can."""
    forward = forward_of(problem)
    channels = forward.C // forward.groups, forward.K // forward.groups
    if forward.groups > 1 and (min(channels) < LEAST_OF_GROUP or channels[0] % 2 or not group_pack(problem)):
        return f"it takes groups of {LEAST_OF_GROUP} channels or more, an even number of x, some of which are multiples of 16 bytes"
    if any(args.words >= 2**31 for _, args in channel_copies(problem)):
        return "what it copies is counted in 31 bits"
    if forward.N * max(math.prod(forward.output_size), math.prod(forward.input_size)) >= MOST_PIXELS:
        return "it counts positions in 32 bits"
    return None if load_form(problem) else "tensor loads can't make its stride, padding or dilation"


TAKES = Takes(
    ("it takes gradients of filters", lambda p: p.layout in LAYOUTS), types(*ELEMENTS), NOT_EMPTY,
    lambda p: _why_no_planes(p) if in_planes(p) else _why_not_last(p),
)  # fmt: skip


def _why_not_flipped(problem: ConvProblem) -> str | None:
    """Why flipped tiles can't run `problem`, which other tiles can run, or None if they can."""
    forward = forward_of(problem)
    if in_planes(problem) or forward.groups > 1 or forward.stride != (1, 1, 1) or math.prod(forward.filter_size) == 1:
        return "flipped tiles take channels-last arrays, one group, no strides and several taps"
    if min(*flip(problem).padding_before, *flip(problem).padding_after) < 0:
        return "flipped tiles take no padding wider than the filter"
    return TAKES.why_not(flip(problem))


def _tiles_of(problem: ConvProblem, flipped: bool) -> dict[int, tuple[int, ...]]:
    """BLOCK_M -> the BLOCK_Ns of the tiles for `problem`."""
    return PLANES_TILES if in_planes(problem) else (FLIPPED_TILES if flipped else TILES)[factor_bytes(problem)]


def _fits(problem: ConvProblem, config: WgradNhwc) -> str | None:
    reason = _why_not_flipped(problem) if config.FLIPPED else None
    if reason:
        return reason
    tiles_of = _tiles_of(problem, config.FLIPPED)
    if config.BLOCK_N not in tiles_of.get(config.BLOCK_M, ()):
        shown = "; ".join(f"{rows} rows and {', '.join(map(str, columns))} columns" for rows, columns in tiles_of.items())
        return f"a tile has {shown}"
    if config.SPLIT == 1 and not config.FLIPPED and as_loaded(problem).C != forward_of(problem).C:
        return "channels that are filled up or folded are written by the launch that adds the parts of several"
    return _ring(config, factor_bytes(problem)).refusal(config.STAGES, config.SPLIT)


def _most_blocks(problem: ConvProblem, config: WgradNhwc) -> int:
    tiles = math.prod(_tiles(as_seen(problem, config), config)) * group_packs(problem) * config.SPLIT
    return max(tiles, problem.K * ceil(math.prod(problem.result_size) * problem.N, REDUCED_CHANNELS))


LEGAL = Tiles(TAKES, WgradNhwc, _fits, blocks=_most_blocks)


def _tall(config: WgradNhwc, size: int) -> bool:
    """Whether one consumer has all 128 rows of a tile, TALL in the kernel; `size`: bytes of an element's limbs."""
    return size == 4 and config.BLOCK_M == config.BLOCK_N == 128


def _blocks_per_sm(config: WgradNhwc, size: int) -> int:
    """Blocks that share a multiprocessor."""
    return 2 if _tall(config, size) or (config.BLOCK_M == 64 and config.BLOCK_N <= PAIRED) else 1


def _consumer_columns(config: WgradNhwc) -> int:
    """Columns of a consumer: the widest tiles have two consumers side by side."""
    return config.BLOCK_N if config.BLOCK_N <= 256 else 192


def _threads(config: WgradNhwc, size: int) -> int:
    """Threads of a block: consumers and a producer, which is a warpgroup if consumers of 128 rows need its registers, or else a warp."""
    across = config.BLOCK_N // _consumer_columns(config)
    down = 2 if config.BLOCK_M == 256 else 1 if across > 1 or _tall(config, size) else config.BLOCK_M // 64
    return 128 * down * across + (128 if config.BLOCK_M == 128 * down else 32)


def _ring(config: WgradNhwc, size: int) -> Ring:
    """The ring of a tile, which the sums overwrite in the end. A stage has as many positions as a row has channels."""
    rows, columns = config.BLOCK_M, config.BLOCK_N
    return Ring(ROW * (rows + columns), ALIGNMENT, most_shared(_blocks_per_sm(config, size)), sum_bytes(rows, columns))


def _max_stages(rows: int, columns: int, size: int) -> int:
    """The most stages of a ring that shared memory has room for."""
    return _ring(WgradNhwc(rows, columns), size).deepest(range(STAGES, 1, -1))


REGIONS = 9, 25  # of a launch


def _regions(source: ConvProblem) -> tuple[Region, ...] | None:
    """The regions of dy where the image of `source` has a border; None if loads can't make them."""
    found = added_regions(replace(forward_of(source), direction="fprop"))
    return found if found is not None and len(found) <= REGIONS[-1] else None


def adds_border(source: ConvProblem, problem: ConvProblem, config: WgradNhwc) -> bool:
    """Whether :func:`schedule` takes the image of `source`, which has a border, for the wider one of `problem`."""
    if config.FLIPPED or in_planes(problem) or fold_level(problem) or TAKES.why_not(problem):
        return False
    return not any(array == INPUT for array, _ in channel_copies(problem)) and _regions(source) is not None


def border_time(source: ConvProblem, config: WgradNhwc) -> float:
    """Microseconds that regions take beside the time of the wider image."""
    return float(COST.REGIONS_TIME)


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
    stages, (down, across) = _stages(seen), _tiles(seen, config)
    loads, maps = _plane_maps(seen) if in_planes(seen) else _maps(seen, of_columns, of_rows)
    _, tap_r, tap_s = loaded.filter_size
    taps, taps_inner = math.prod(loaded.filter_size), int(taps_fastest and parts is None and not config.FLIPPED)
    args = arguments(
        WgradNhwcArguments, tiles_m=down, tiles_n=across, group_packs=packs, splits=config.SPLIT, stages=stages, part=_part(seen, config),
        rows=(loaded if config.FLIPPED and parts else forward).K // packs, columns=loaded.C // packs, own_rows=forward.K // forward.groups,
        own_columns=loaded.C // forward.groups, column_blocks=_column_blocks(seen), inner=taps if taps_inner else _tap_blocks(seen),
        taps_inner=taps_inner, taps=taps, tap_r=tap_r, tap_s=tap_s, **loads, size=part_sums(problem, config),
        taps_fastest=int(taps_fastest), image_stages=_image_stages(seen),
    )  # fmt: skip
    defines = {
        "BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N, "WGMMA_N": _consumer_columns(config), "STAGES": config.STAGES,
        "TYPE": ELEMENTS[problem.dtype], "LIMBS": limbs(problem), "PLANES": int(in_planes(problem)), "FLIPPED": int(config.FLIPPED),
    }
    buffers, structs = ((x, dy), (args, _of_flipped(problem, parts is None, taps_fastest))) if config.FLIPPED else ((), args)
    if source is not None:
        of_regions, maps = _of_regions(problem, source, x, dy)
        stages = of_regions[-1].end
        structs = args._replace(stages=stages, part=ceil(stages, config.SPLIT)), *of_regions
        defines["BORDERED"] = len(of_regions)
    grid, size = down * across * packs * config.SPLIT, factor_bytes(problem)
    return KernelLaunch(
        "hopper_wgrad", defines, grid, _threads(config, size), (parts or RESULT, *buffers), (), maps=maps,
        shared=_ring(config, size).nbytes(config.STAGES), arch="sm_90a", arguments=structs,
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
    loaded, form, positions = as_loaded(problem), load_form(problem), position_count(problem)
    assert form is not None
    layout, addressing = form
    sizes = (loaded.K, positions, 1), (problem.itemsize * loaded.K, problem.itemsize * loaded.K * positions)
    of_x, of_dy = (place if isinstance(place, tuple) else (place, 0) for place in (x, dy))
    map_x = replace(image_map(loaded, of_x[0], layout, addressing, stage_channels(problem)), offset=of_x[1], dtype=tensor_map_type(problem))
    map_dy = TensorMap(*of_dy, *sizes, (stage_channels(problem), stage_channels(problem), 1), ROW, tensor_map_type(problem))
    return by_axis("dilation_", addressing.dilation) | load_base(loaded, addressing), (map_dy, map_x)


def _of_regions(
    problem: ConvProblem, source: ConvProblem, x: BufferSlice, dy: BufferSlice
) -> tuple[tuple[Any, ...], tuple[TensorMap, ...]]:
    """The arguments and the maps of the regions, with empty ones behind them; `problem`: that of the wider image.

    The first is that of zeros around the image; its dy is loaded by boxes.
    """
    loaded, found, block = as_loaded(problem), _regions(source) or (), stage_channels(problem)
    size, kind = forward_of(source).input_size, tensor_map_type(problem)
    layouts = [PackedLayout(True, 0, (1, 1, 1), n, c, block, (1, 1, 1)) for n, c in ((loaded.output_size, loaded.K), (size, loaded.C))]
    args: list[Any] = []
    maps: list[list[TensorMap]] = [[], []]
    end = 0
    for region in found:
        phase, ones = region.addressing.phase, (1, 1, 1)
        own = replace(region.addressing, taps=ones, stride=ones, low=(0, 0, 0))
        parts = (own, (phase.origin, phase.size)), (region.addressing, (region.first, region.length))
        end += ceil(loaded.N * math.prod(phase.size), block)
        words = {name: value for name, value in in_words(region).items() if name.startswith("offsets")}
        args.append(arguments(WgradRegion, end=end, **words, **_without_dims(load_base(loaded, region.addressing))))
        for of_array, place, layout, channels, (addressing, part) in zip(maps, (dy, x), layouts, (loaded.K, loaded.C), parts, strict=True):
            buffer, offset = place if isinstance(place, tuple) else (place, 0)
            array = replace(loaded, C=channels)
            made = image_map(array, buffer, layout, addressing, block, part=part)
            of_array.append(replace(made, offset=made.offset + offset, dtype=kind))
    buffer, offset = dy if isinstance(dy, tuple) else (dy, 0)
    positions, row = position_count(problem), problem.itemsize * loaded.K
    maps[0][0] = TensorMap(buffer, offset, (loaded.K, positions, 1), (row, row * positions), (block, block, 1), ROW, kind)
    more = next(n for n in REGIONS if n >= len(found)) - len(found)
    return tuple(args + args[-1:] * more), tuple(one for of_array in maps for one in of_array + of_array[-1:] * more)


def _without_dims(base: dict[str, int]) -> dict[str, int]:
    return {name: value for name, value in base.items() if name != "spatial_dims"}


def _plane_maps(problem: ConvProblem) -> tuple[dict[str, int], tuple[TensorMap, ...]]:
    """The same for NCHW arrays, whose loads step through nothing."""
    forward, block = forward_of(problem), stage_channels(problem)
    plane = math.prod(forward.output_size)
    row = problem.itemsize * plane
    maps = tuple(
        TensorMap(buffer, 0, (plane, channels, forward.N), (row, row * channels), (block, block, 1), ROW, map_type(problem))
        for buffer, channels in ((WEIGHT, forward.K), (INPUT, forward.C))
    )
    unused = ("spatial_dims", "dilation_d", "dilation_h", "dilation_w", "load_plane", "load_pq", "load_q")
    return dict.fromkeys((*unused, "stride_d", "stride_h", "stride_w", "low_d", "low_h", "low_w"), 0), maps


def _image_stages(problem: ConvProblem) -> int:
    """Stages of an image's plane."""
    return ceil(math.prod(forward_of(problem).output_size), stage_channels(problem))


def _stages(problem: ConvProblem) -> int:
    """Stages of all positions."""
    if in_planes(problem):
        return forward_of(problem).N * _image_stages(problem)
    return ceil(position_count(problem), stage_channels(problem))


def _part(problem: ConvProblem, config: WgradNhwc) -> int:
    """Stages of a run."""
    return ceil(_stages(problem), config.SPLIT)


def _column_blocks(problem: ConvProblem) -> int:
    """Blocks of channels of a pack of x, for all taps."""
    return _tap_blocks(problem) * math.prod(as_loaded(problem).filter_size)


def _tap_blocks(problem: ConvProblem) -> int:
    """Blocks of channels of a pack of x."""
    return ceil(as_loaded(problem).C // group_packs(problem), stage_channels(problem))


def _tiles(problem: ConvProblem, config: WgradNhwc) -> tuple[int, int]:
    """Tiles of a pack along the rows, and along the columns."""
    return ceil(problem.K // group_packs(problem), config.BLOCK_M), ceil(_column_blocks(problem), config.BLOCK_N // stage_channels(problem))


def variants(device: Device) -> Iterator[VariantSet]:
    for flipped, (size, codes) in itertools.product((False, True), ((2, (HALF, BFLOAT)), (4, (FLOAT,)), (8, (FLOAT,)))):
        for rows, widths in (FLIPPED_TILES if flipped else TILES)[size].items():
            for columns in widths:
                config = WgradNhwc(rows, columns, _max_stages(rows, columns, size))
                planes = size == 2 and not flipped and columns in PLANES_TILES.get(rows, ())
                choices = {
                    "BLOCK_M": (rows,), "BLOCK_N": (columns,), "WGMMA_N": (_consumer_columns(config),), "STAGES": (config.STAGES,),
                    "TYPE": codes, "LIMBS": (2 if size == 8 else 1,), "PLANES": (0,), "FLIPPED": (int(flipped),),
                }  # fmt: skip
                yield VariantSet("hopper_wgrad", choices, arch="sm_90a")
                if not flipped:
                    yield VariantSet("hopper_wgrad", choices | {"BORDERED": REGIONS}, arch="sm_90a")
                if planes:
                    yield VariantSet("hopper_wgrad", choices | {"PLANES": (1,), "TYPE": tuple(ELEMENTS.values())}, arch="sm_90a")
    yield VariantSet("hopper_wgrad_reduce", {"TYPE": (HALF, BFLOAT, FLOAT)})
    yield VariantSet("hopper_wgrad_add", {"TYPE": (HALF, BFLOAT, FLOAT), "EACH": (2, 4)})
    yield from fold_channels.variants()


LEAST_STAGES = 4  # of a run, if there are several


def configs(problem: ConvProblem, device: Device) -> Iterator[WgradNhwc]:
    """The configurations worth comparing for `problem`: numbers of runs that fill the GPU once, or a few times."""
    forward = forward_of(problem)
    fewer = forward.K < forward.C and forward.K <= MOST_FLIPPED
    for flipped in (False, True) if fewer and _why_not_flipped(problem) is None else (False,):
        for tile in _useful_tiles(problem, flipped):
            yield from (one for one in _cut(problem, tile, device) if LEGAL.refusal(problem, one) is None)


def _useful_tiles(problem: ConvProblem, flipped: bool) -> Iterator[WgradNhwc]:
    """The tiles whose rows and columns `problem` can fill, and those one size larger."""
    tiles_of, size, seen = _tiles_of(problem, flipped), factor_bytes(problem), as_seen(problem, WgradNhwc(FLIPPED=flipped))
    for rows in _useful(tuple(tiles_of), seen.K // group_packs(seen)):
        for columns in _useful(tiles_of[rows], _column_blocks(seen) * stage_channels(seen)):
            yield WgradNhwc(rows, columns, _max_stages(rows, columns, size), FLIPPED=flipped)


def _cut(problem: ConvProblem, tile: WgradNhwc, device: Device) -> Iterator[WgradNhwc]:
    """`tile` with each number of runs that is tried."""
    seen = as_seen(problem, tile)
    stages, least = _stages(seen), 1 if tile.FLIPPED or as_loaded(seen).C == forward_of(seen).C else 2
    tiles = math.prod(_tiles(seen, tile)) * group_packs(seen)
    filling = device.multiprocessors * _blocks_per_sm(tile, factor_bytes(problem)) // tiles
    # the blocks of several rounds are balanced better, which pays if products take long
    more = (2 * filling, 4 * filling) if filling < 4 and problem.itemsize == 4 else ()
    tried = (1, ceil(filling, 4), ceil(filling, 2), filling, *more) if filling else (1, 2, 3, 4)
    most = max(stages // LEAST_STAGES, least)
    for split in sorted({max(min(split, most), least) for split in tried}):
        yield replace(tile, SPLIT=split)


def _useful(sizes: tuple[int, ...], needed: int) -> list[int]:
    """The ascending `sizes` up to the first that is at least `needed`."""
    return [size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] < needed]


def time(problem: ConvProblem, config: WgradNhwc, device: Device) -> float:
    """Microseconds that `config` should take: loads, arithmetic or bytes from memory; the stores of sums, and rounds of blocks."""
    seen = as_seen(problem, config)
    forward, loaded, size, block = forward_of(seen), as_loaded(seen), problem.itemsize, stage_channels(problem)
    factor = factor_bytes(problem)
    down, across = _tiles(seen, config)
    packs = group_packs(seen)
    channels = min(config.BLOCK_M, ceil(forward.K // packs, block) * block)
    columns = min(config.BLOCK_N, _column_blocks(seen) * block)
    flat = in_planes(problem) or reads_flat(seen)
    if in_planes(problem):
        cycles = (channels + columns) * pixel_cycles(size * math.prod(forward.output_size))
    else:
        of_dy, of_x = pixel_cycles(size * loaded.K // packs), pixel_cycles(size * loaded.C // packs)
        cycles = channels * of_dy + columns * of_x
    crowded = packs > 1 and columns >= COST.MANY_TAPS * block * _tap_blocks(seen)
    loads = COST.LOADS[factor] * (COST.BOXED if flat else COST.IM2COL) * cycles * (COST.CROWDED if crowded else 1)
    sums = config.BLOCK_M * config.BLOCK_N
    products = (COST.TALL if _tall(config, factor) else COST.PRODUCT[factor]) * sums
    end = 4 * sums / COST.PARTED if config.SPLIT > 1 else size * sums / COST.STORED

    def taken(blocks: int) -> float:
        """Microseconds of `blocks` blocks that run at the same time."""
        beside = ceil(blocks, device.multiprocessors)
        wait = (COST.WAIT + loads) / (config.STAGES - 1)
        step = together(COST.TOGETHER, beside * products, beside * loads, products + COST.STEP, wait) / CLOCK
        return _part(seen, config) * step + beside * end

    blocks, slots = down * across * packs * config.SPLIT, device.multiprocessors * _blocks_per_sm(config, factor)
    again = ceil(blocks, slots) - 1
    us = again * (taken(slots) + COST.PER_ROUND) + taken(blocks - again * slots)
    us *= COST.FLIPPED_TIME if config.FLIPPED and size == 2 else COST.TF32_PLANES if in_planes(problem) and size == 4 else 1
    added = COST.REDUCE + 4 * config.SPLIT * part_sums(problem, config) / COST.ADDED if config.SPLIT > 1 else 0
    copied = sum(FORM_COST.COPY + 32 * args.words / FORM_COST.COPIED for _, args in channel_copies(seen))
    return COST.FIRST + together(COST.TOGETHER, us, _moved(problem) / COST.MEMORY) + added + copied


def _moved(problem: ConvProblem) -> float:
    """Bytes that are read and written, without the pixels of x that no tap reads."""
    forward = forward_of(problem)
    met = math.prod(min(1.0, taps / stride) for taps, stride in zip(forward.filter_size, forward.stride, strict=True))
    return problem.itemsize * (met * math.prod(forward.input_shape) + math.prod(forward.result_shape) + math.prod(problem.result_shape))
