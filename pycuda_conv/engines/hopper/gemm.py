"""The implicit GEMM engine for Hopper: convolutions on tensor cores fed by TMA (``cu/hopper/gemm.cu``).

What is compared, and the model of time. Its tiles and variants are in ``gemm_tiles.py``, its launches in ``gemm_launches.py``.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from pycuda_conv.engines import packing
from pycuda_conv.engines.addressing import PackedLayout, PhaseAddressing, packed_key
from pycuda_conv.engines.base import ConvProblem, costs
from pycuda_conv.engines.costs import together
from pycuda_conv.engines.geometry import ceil
from pycuda_conv.engines.hopper.common import MEMORY, read_bytes
from pycuda_conv.engines.hopper.gemm_launches import schedule
from pycuda_conv.engines.hopper.gemm_tiles import (
    LEGAL,
    MOST_VARIANTS,
    TAKES,
    ImplicitGemm,
    defines_of,
    form,
    grid_of,
    launches_of,
    may_split,
    ordinary_tiles,
    paired,
    phases_at_once,
    phases_with_repeats,
    rarity,
    reads_filter,
    result_arithmetic,
    variants,
    whole_rows,
)
from pycuda_conv.engines.limits import HOPPER
from pycuda_conv.engines.packing_time import overhead
from pycuda_conv.engines.split_sum import splits
from pycuda_conv.engines.tensor_cores import gemm_products, limbs, products
from pycuda_conv.runtime.base import Device

__all__ = ["LEGAL", "MOST_VARIANTS", "TAKES", "schedule", "variants"]  # with what stands here: the engine

CONFIGS, LAYOUTS, RUNS_ON, TENSOR_CORES = (ImplicitGemm,), ("NCHW", "NHWC", "CNHW"), HOPPER, True


def adds_border(source: ConvProblem, problem: ConvProblem, config: ImplicitGemm) -> bool:
    return packing.adds_border(source, problem, windows=True)


def filter_key(problem: ConvProblem, config: ImplicitGemm) -> Hashable:
    return packed_key(problem, windows=True)


def sum_order(problem: ConvProblem, config: ImplicitGemm) -> Hashable:
    """Everything that fixes the order of a sum: the splits, who adds the parts, and which taps are channels."""
    return config.SPLIT, config.joins(problem), form(problem)[0].folded


COST = costs("hopper.gemm")
SECTOR, LINE = 32, 128  # bytes that memory writes at once; of a line of the L2 cache


def configs(problem: ConvProblem, device: Device) -> tuple[ImplicitGemm, ...]:
    return _configs(problem)


@lru_cache(maxsize=64)  # asked for by the choice, and by whatever stands in for it
def _configs(problem: ConvProblem) -> tuple[ImplicitGemm, ...]:
    return tuple(_worth_comparing(problem))


def _worth_comparing(problem: ConvProblem) -> Iterator[ImplicitGemm]:
    defines = defines_of(problem)
    seldom, dense = rarity(defines), bool(defines["DENSE"])
    for tile in ordinary_tiles(seldom, products(problem) == 3, dense):
        if tile.BLOCK_M == 128 and problem.result_channels // problem.groups <= 64:
            continue
        if tile.is_twin and math.prod(problem.filter_size) == 1:  # none of these was timed
            continue
        in_parts = problem.itemsize == 4 or may_split(defines | {"BLOCK_M": tile.BLOCK_M, "BLOCK_N": tile.BLOCK_N})
        for split in splits(problem, _steps(problem) // 4 if in_parts and not tile.is_pingpong else 1):
            least = _changed(tile, split, tile.depths[-1])
            if LEGAL.refusal(problem, least) is None:  # what has room for more stages has room for fewer
                yield _changed(tile, split, least.ring_for(problem).deepest(tile.depths))


@lru_cache(maxsize=4096)  # few tiles, for every problem again
def _changed(tile: ImplicitGemm, split: int, stages: int) -> ImplicitGemm:
    return replace(tile, SPLIT=split, STAGES=stages)


def _steps(problem: ConvProblem) -> int:
    """The most stages that a tile without splits multiplies."""
    packed, addressings = form(problem)
    return ceil(ceil(packed.group, packed.load) * math.prod(addressings[0].taps), 64 // packed.load)


def _pixel_cycles(problem: ConvProblem, packed: PackedLayout) -> float:
    """Cycles to load one pixel's channels from an array as it lies: rows that the load has to fill up take longer, odd ones longest."""
    row, pixel = packed.load * problem.itemsize, problem.operand_channels * problem.itemsize
    cycles = float(COST.PIXEL_CYCLES[row] * (1.0 if pixel % row == 0 else COST.FILLED if pixel % 32 == 0 else COST.ODD))
    return max(COST.VOLUME * cycles, COST.VOLUME_ROW) if form(problem)[1][0].spatial_dims == 3 else cycles


@lru_cache(maxsize=64)
def _stages_of_launches(problem: ConvProblem) -> tuple[tuple[Sequence[PhaseAddressing], tuple[int, ...]], ...]:
    """The phases of each launch, with the stages that a tile of each multiplies without splits."""
    packed, _ = form(problem)
    blocks, at_once = ceil(packed.group, packed.load), 64 // packed.load
    return tuple(
        (group, tuple(ceil(blocks * math.prod(addressing.taps), at_once) for addressing in group)) for group in launches_of(problem)
    )


def time(problem: ConvProblem, config: ImplicitGemm, device: Device) -> float:
    """Microseconds that `config` should take, packing included: arithmetic, bytes into shared memory, rounds of tiles.

    The model assumes that a filter that can be read as it lies does lie so.
    """
    return _time(problem, config, device.multiprocessors)


@lru_cache(maxsize=1024)
def _time(problem: ConvProblem, config: ImplicitGemm, multiprocessors: int) -> float:
    packed, addressings = form(problem)
    in_place = reads_filter(problem)
    launch_time = COST.IN_PLACE_LAUNCH if in_place else COST.LAUNCH_TIME[problem.itemsize]
    us = launch_time
    for _ in _stages_of_launches(problem)[1:]:
        us += COST.PER_LAUNCH
    of_product, joined = _product_time(problem, config, multiprocessors, in_place)
    kept = 0 if in_place else 2 * limbs(problem) * problem.N * math.prod(packed.stored) * packed.pixel * problem.groups
    if kept > COST.FORGOTTEN:
        written = problem.itemsize * math.prod(problem.result_shape) * (2 if problem.has_residual else 1)
        of_product = max(of_product, (kept + written) / COST.REMEMBERED_RATE)
    us += of_product
    if joined and result_arithmetic(problem, addressings[0].phase, config.SPLIT)["VEC"] == 1:
        joined *= COST.APART
    us += overhead(problem, packed, config.SPLIT, not in_place, joined)
    if in_place and problem.layout == "NHWC":
        moved = read_bytes(problem) + problem.itemsize * (math.prod(problem.result_shape) + math.prod(problem.weight_shape))
        us = together(COST.TOGETHER, us, launch_time + moved / MEMORY)
    if problem.layout == "NCHW" and len(addressings) > 1:  # memory writes a sector again for each phase that has a pixel in it
        parts = min(addressings[0].phase.step[2], SECTOR // problem.itemsize)
        us = max(us, problem.itemsize * math.prod(problem.result_shape) * parts / COST.PARTS_OF_SECTORS)
    return _corrected(us, problem, config, in_place)


def _product_time(problem: ConvProblem, config: ImplicitGemm, multiprocessors: int, in_place: bool) -> tuple[float, float]:
    """Microseconds of the launches that multiply; and bytes of the parts of sums that a block adds."""
    _, addressings = form(problem)
    loaded = _loaded(problem, config, in_place)
    step, stores = _stage_time(problem, config, in_place, loaded), _store_time(problem, config)
    between = (COST.IN_PLACE_TILE if _stores_last(problem, config) else COST.TILE_TIME) + stores

    def tile_time(steps: int) -> float:
        product = ceil(steps, config.SPLIT) * step
        if config.is_pingpong:  # stores slow the other consumer's products down, but only the last ones are waited for
            return max(COST.PINGPONG_PRODUCT * product + COST.PINGPONG_STORE * stores, COST.PINGPONG_ALONE * between)
        if config.is_twin:  # a round of both blocks
            return max(2 * (COST.TWIN_PRODUCT * product + COST.TWIN_STORE * stores + COST.TWIN_TILE), product + between)
        return product + between

    # bytes of a stage that are loaded for the same pixels only; wgrad's pixels are taps, which share most of theirs
    of_pixels = 0.0 if problem.layout == "CNHW" else loaded - limbs(problem) * config.BLOCK_M * 128
    at_once, joined = phases_at_once(problem), 0.0
    # blocks of the same pixels and other channels load them together, and so do phases; all else comes from the L2 cache again
    from_cache = 0.0
    longest = shared = 0.0  # launches of phases overlap: the longest one counts, or the sum of what each takes of the multiprocessors
    for group, stages in _stages_of_launches(problem):
        works = [sum(map(tile_time, stages[i : i + at_once])) for i in range(0, len(group), at_once)]
        tiles = math.prod(config.tiles_of(problem, group)) * problem.groups * config.SPLIT
        grid = grid_of(problem, group, tiles, config.blocks * multiprocessors)
        all_phases = phases_with_repeats(problem, group)
        rounds = ceil(tiles * all_phases // at_once, grid)
        if config.joins(problem):
            joined += config.parts_bytes * ceil(tiles * all_phases, config.SPLIT * grid)
        # a block takes tiles of all phases in turn, equally many of each
        own = max(max(works), rounds * sum(works) / len(works)) + (between if config.is_pingpong else 0)
        longest, shared = max(longest, own), shared + own * grid / multiprocessors / config.blocks
        _, across = config.tiles_of(problem, group)
        from_cache += across * problem.groups * sum(stages) / len(addressings) * of_pixels
    return together(COST.TOGETHER, max(longest, shared), between + from_cache / COST.CACHE_RATE), joined


def _loaded(problem: ConvProblem, config: ImplicitGemm, in_place: bool) -> float:
    """Bytes of a stage, of which those of pixels count more whose loads take longer."""
    _, addressings = form(problem)
    loaded = float(config.ring_for(problem).stage)
    if in_place:
        return loaded
    slower = COST.PACKED_VOLUME if addressings[0].spatial_dims == 3 else 1.0
    return loaded + (slower - 1) * limbs(problem) * config.BLOCK_N * 128


def _row_cycles(problem: ConvProblem, packed: PackedLayout) -> float:
    """Cycles to load a pixel's row of packed channels: for each cache line that it meets, in the mean over the places where rows begin."""
    places = range(0, LINE, math.gcd(2 * packed.pixel * problem.groups, LINE))
    lines = sum(ceil(place + 2 * packed.load, LINE) for place in places) / len(places)
    return float(COST.ROW_CYCLES[problem.itemsize] * COST.SHORT_ROW[packed.load] * lines)


def _stage_time(problem: ConvProblem, config: ImplicitGemm, in_place: bool, loaded: float) -> float:
    """Microseconds of a stage, of which so many bytes are `loaded`: its products, its loads, its bytes."""
    packed, _ = form(problem)
    size = problem.itemsize
    cycles = 4 * gemm_products(problem) * config.BLOCK_N * config.BLOCK_M / 128 * (COST.IN_PLACE_PRODUCT if in_place else 1)
    clock, of_filter = (COST.IN_PLACE_CLOCK, COST.FILTER_CYCLES) if in_place else (COST.CLOCK[size], 0.0)
    of_pixel = _pixel_cycles(problem, packed) if in_place else _row_cycles(problem, packed)
    loads = (of_pixel * (gemm_products(problem) + 1) // 2 * config.BLOCK_N + of_filter * config.BLOCK_M) * (64 // packed.load)
    return together(COST.OF_STAGE, cycles / clock, loads / clock, loaded / COST.LOADED[size])


def _stores_last(problem: ConvProblem, config: ImplicitGemm) -> bool:
    """Whether a tile stores 16-bit results with their channels last, not parts of them."""
    return problem.layout == "NHWC" and config.SPLIT == 1 and problem.itemsize == 2


def _store_time(problem: ConvProblem, config: ImplicitGemm) -> float:
    """Microseconds in which a tile adds a residual and stores its results."""
    _, addressings = form(problem)
    last, stored = _stores_last(problem, config), COST.STORED[problem.itemsize]
    channels = problem.result_channels // problem.groups
    if last and len(addressings) > 1:
        stored = COST.PHASED_STORED
    elif last:
        stored = COST.IN_PLACE_APART if whole_rows(problem, 1) and not config.tensor_store(problem) else COST.IN_PLACE_STORED
    rows = float(config.BLOCK_M)
    if problem.layout == "NCHW":  # the others of a tile's rows are no channels
        rows = channels / max(ceil(channels, config.BLOCK_M), 1)
    us = rows * config.BLOCK_N * config.stored_bytes(problem) / stored
    if problem.layout == "NHWC" and problem.result_channels * problem.itemsize % 16:
        us *= COST.SCATTERED if len(addressings) == 1 or defines_of(problem)["VEC"] == 1 else 1.0
    elif problem.layout == "NCHW" and problem.itemsize == 2 and not paired(problem) and defines_of(problem)["VEC"] == 1:
        us *= COST.SCATTERED if len(addressings) == 1 else COST.SCATTERED_PHASES  # elements are stored one by one
    elif problem.layout == "NCHW" and problem.itemsize == 4 and len(addressings) > 1:
        us *= COST.PHASED
    added = config.BLOCK_M * config.BLOCK_N if problem.has_residual and config.SPLIT == 1 else 0
    one_by_one = not last and defines_of(problem)["VEC"] == 1
    return us + added / (COST.JOINED if last else COST.JOINED_PLANES / COST.JOINED_APART if one_by_one else COST.JOINED_PLANES)


def _corrected(us: float, problem: ConvProblem, config: ImplicitGemm, in_place: bool) -> float:
    """`us` times the relative times of the problem's kind and of the tile."""
    _, addressings = form(problem)
    if problem.layout == "NHWC" and problem.itemsize == 2 and not in_place:
        us *= COST.LAST_PACKED
    if problem.layout == "NCHW" and problem.itemsize == 4 and len(addressings) > 1:
        small = config.BLOCK_M == 64 == config.BLOCK_N
        us *= COST.PAIRED if paired(problem) else 1.0 if small else COST.PHASED_TILE
    three = products(problem) == 3
    us *= COST.NARROW if config.BLOCK_N <= 64 else COST.WIDE if config.BLOCK_N >= 128 and (not three or problem.layout == "CNHW") else 1.0
    if three:
        us *= (COST.TALL if config.BLOCK_M == 128 else 1.0) * (COST.SHALLOW if config.STAGES == 2 else 1.0)
    if problem.layout == "NCHW" and len(addressings) == 1 and addressings[0].flat:
        us *= COST.FLAT
    if problem.layout == "CNHW":
        us *= COST.LONGER[products(problem), problem.itemsize] * (COST.STRIDED if max(problem.dilation) > 1 else 1.0)
        us *= COST.NARROW_GRADIENT if config.BLOCK_N <= 64 else 1.0
    return us
