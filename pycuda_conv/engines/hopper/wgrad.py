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

from pycuda_conv.engines.addressing import MOST_PIXELS
from pycuda_conv.engines.base import ConvProblem, VariantSet
from pycuda_conv.engines.costs import costs, together
from pycuda_conv.engines.geometry import ceil, forward_of, pixel_by_pixel
from pycuda_conv.engines.hopper import wgrad_form as form
from pycuda_conv.engines.hopper.common import CLOCK, pixel_cycles, stage_channels
from pycuda_conv.engines.hopper.wgrad_form import WgradNhwc, as_loaded, as_seen, factor_bytes, flip, group_pack, group_packs, in_planes
from pycuda_conv.engines.hopper.wgrad_launches import REDUCED_CHANNELS, REGIONS, channel_copies, part_sums, regions, schedule
from pycuda_conv.engines.layout import fold_channels
from pycuda_conv.engines.limits import HOPPER, NOT_EMPTY, Takes, Tiles, types
from pycuda_conv.engines.schedule import INPUT
from pycuda_conv.engines.tensor_cores import BFLOAT, ELEMENTS, FLOAT, HALF, limbs
from pycuda_conv.runtime.base import Device

__all__ = ["schedule"]  # with what stands here: the engine

LEAST_OF_GROUP = 4  # channels of a group, if there are several: with fewer, most products would be thrown away
#: BLOCK_M -> the BLOCK_Ns of the tiles, by the bytes of an element's limbs. Their sums fit the consumers' registers.
TILES: dict[int, dict[int, tuple[int, ...]]] = {
    2: {64: (64, 128, 192, 384), 128: (64, 128, 192, 256), 192: (128, 192), 256: (192,)}, 4: {64: (64, 128), 128: (64, 128)},
    8: {64: (64,), 128: (64,)},
}  # fmt: skip
#: The tiles for NCHW arrays: others gained nothing.
PLANES_TILES = {64: (64,), 128: (64, 128, 192)}
#: Flipped tiles are tried if dy has at most so many channels, and fewer than x: other tiles would then have a single row.
MOST_FLIPPED = 64
FLIPPED_TILES: dict[int, dict[int, tuple[int, ...]]] = {2: {128: (64, 128, 192), 256: (192,)}, 4: {128: (64,)}, 8: {128: (64,)}}

CONFIGS, LAYOUTS, RUNS_ON, TENSOR_CORES, MOST_VARIANTS = (WgradNhwc,), ("CHWN", "CNHW"), HOPPER, True, {"cuda": 122}
ORDER = "FLIPPED", "SPLIT"  # what the order of sums depends on
COST = costs("hopper.wgrad")


def _why_no_planes(problem: ConvProblem) -> str | None:
    """Why the kernel can't run `problem`, whose arrays are NCHW, or None if it can."""
    forward = forward_of(problem)
    if limbs(problem) > 1:
        return "it takes NCHW arrays of float16, bfloat16, and of float32 with precision='tf32'"
    if not pixel_by_pixel(forward):
        return "of NCHW arrays it takes 1x1 filters without stride and padding"
    if math.prod(forward.output_size) % form.word_elements(problem):
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
    return None if form.load_form(problem) else "tensor loads can't make its stride, padding or dilation"


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
    return form.ring_of(config, factor_bytes(problem)).refusal(config.STAGES, config.SPLIT)


def _most_blocks(problem: ConvProblem, config: WgradNhwc) -> int:
    tiles = math.prod(form.tile_counts(as_seen(problem, config), config)) * group_packs(problem) * config.SPLIT
    return max(tiles, problem.K * ceil(math.prod(problem.result_size) * problem.N, REDUCED_CHANNELS))


LEGAL = Tiles(TAKES, WgradNhwc, _fits, blocks=_most_blocks)


def adds_border(source: ConvProblem, problem: ConvProblem, config: WgradNhwc) -> bool:
    if config.FLIPPED or in_planes(problem) or form.fold_level(problem) or TAKES.why_not(problem):
        return False
    return not any(array == INPUT for array, _ in channel_copies(problem)) and regions(source) is not None


def border_time(source: ConvProblem, config: WgradNhwc) -> float:
    return float(COST.REGIONS_TIME)


def variants(device: Device) -> Iterator[VariantSet]:
    for flipped, (size, codes) in itertools.product((False, True), ((2, (HALF, BFLOAT)), (4, (FLOAT,)), (8, (FLOAT,)))):
        for rows, widths in (FLIPPED_TILES if flipped else TILES)[size].items():
            for columns in widths:
                config = WgradNhwc(rows, columns, form.max_stages(rows, columns, size))
                planes = size == 2 and not flipped and columns in PLANES_TILES.get(rows, ())
                choices = {
                    "BLOCK_M": (rows,), "BLOCK_N": (columns,), "WGMMA_N": (form.consumer_columns(config),), "STAGES": (config.STAGES,),
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
        for columns in _useful(tiles_of[rows], form.column_blocks(seen) * stage_channels(seen)):
            yield WgradNhwc(rows, columns, form.max_stages(rows, columns, size), FLIPPED=flipped)


def _cut(problem: ConvProblem, tile: WgradNhwc, device: Device) -> Iterator[WgradNhwc]:
    """`tile` with each number of runs that is tried."""
    seen = as_seen(problem, tile)
    stages, least = form.stages_of(seen), 1 if tile.FLIPPED or as_loaded(seen).C == forward_of(seen).C else 2
    tiles = math.prod(form.tile_counts(seen, tile)) * group_packs(seen)
    filling = device.multiprocessors * form.blocks_per_sm(tile, factor_bytes(problem)) // tiles
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
    down, across = form.tile_counts(seen, config)
    packs = group_packs(seen)
    channels = min(config.BLOCK_M, ceil(forward.K // packs, block) * block)
    columns = min(config.BLOCK_N, form.column_blocks(seen) * block)
    flat = in_planes(problem) or form.reads_flat(seen)
    if in_planes(problem):
        cycles = (channels + columns) * pixel_cycles(size * math.prod(forward.output_size))
    else:
        of_dy, of_x = pixel_cycles(size * loaded.K // packs), pixel_cycles(size * loaded.C // packs)
        cycles = channels * of_dy + columns * of_x
    crowded = packs > 1 and columns >= COST.MANY_TAPS * block * form.tap_blocks(seen)
    loads = COST.LOADS[factor] * (COST.BOXED if flat else COST.IM2COL) * cycles * (COST.CROWDED if crowded else 1)
    sums = config.BLOCK_M * config.BLOCK_N
    products = (COST.TALL if form.is_tall(config, factor) else COST.PRODUCT[factor]) * sums
    end = 4 * sums / COST.PARTED if config.SPLIT > 1 else size * sums / COST.STORED

    def taken(blocks: int) -> float:
        """Microseconds of `blocks` blocks that run at the same time."""
        beside = ceil(blocks, device.multiprocessors)
        wait = (COST.WAIT + loads) / (config.STAGES - 1)
        step = together(COST.TOGETHER, beside * products, beside * loads, products + COST.STEP, wait) / CLOCK
        return form.stages_of_run(seen, config) * step + beside * end

    blocks, slots = down * across * packs * config.SPLIT, device.multiprocessors * form.blocks_per_sm(config, factor)
    again = ceil(blocks, slots) - 1
    us = again * (taken(slots) + COST.PER_ROUND) + taken(blocks - again * slots)
    us *= COST.FLIPPED_TIME if config.FLIPPED and size == 2 else COST.TF32_PLANES if in_planes(problem) and size == 4 else 1
    added = COST.REDUCE + 4 * config.SPLIT * part_sums(problem, config) / COST.ADDED if config.SPLIT > 1 else 0
    copied = sum(form.FORM_COST.COPY + 32 * args.words / form.FORM_COST.COPIED for _, args in channel_copies(seen))
    return COST.FIRST + together(COST.TOGETHER, us, _moved(problem) / COST.MEMORY) + added + copied


def _moved(problem: ConvProblem) -> float:
    """Bytes that are read and written, without the pixels of x that no tap reads."""
    forward = forward_of(problem)
    met = math.prod(min(1.0, taps / stride) for taps, stride in zip(forward.filter_size, forward.stride, strict=True))
    return problem.itemsize * (met * math.prod(forward.input_shape) + math.prod(forward.result_shape) + math.prod(problem.result_shape))
