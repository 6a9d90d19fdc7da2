"""Convolutions of channels-last arrays as they lie, on Hopper's tensor cores (``cu/hopper/dense.cu``).

They are float16, bfloat16, and float32 with ``precision="tf32"``. Nothing is packed or scaled, and one launch does everything. Only a
filter that the tensor cores can't read as it lies is transposed first: one in C order, and that of the gradient of the input in TF32, if
the launch's blocks would transpose it too often. The blocks of a cluster share a long sum for few results.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Iterator, Mapping
from itertools import product

from pycuda_conv.engines.base import ConvProblem, VariantSet, fixed
from pycuda_conv.engines.costs import costs, together
from pycuda_conv.engines.geometry import batches, ceil, count_phases, repeats, too_many_phases
from pycuda_conv.engines.hopper import dense_form as form
from pycuda_conv.engines.hopper.common import CLOCK, ROW, at_once, finished_time, pixel_cycles, read_bytes, stage_channels, written_bytes
from pycuda_conv.engines.hopper.common import COST as HOPPER_COST
from pycuda_conv.engines.hopper.dense_borders import regions
from pycuda_conv.engines.hopper.dense_form import DenseNhwc
from pycuda_conv.engines.hopper.dense_launches import schedule
from pycuda_conv.engines.hopper.ring import sum_bytes
from pycuda_conv.engines.layout import transpose_filter
from pycuda_conv.engines.limits import HOPPER, PIXELS_IN_32_BITS, Takes, Tiles
from pycuda_conv.engines.tensor_cores import ELEMENTS, FLOAT, why_not_one_product
from pycuda_conv.runtime.base import Device

__all__ = ["schedule"]  # with what stands here: the engine

COLUMNS = (32, 64, 96, 128, 160, 192, 256)  # channels of a tile
CLUSTERS = (1, 2, 4, 8)  # blocks that share a tile: a cluster has at most 8
#: The tiles worth choosing from, each a kernel of its own: (BLOCK_M, BLOCK_N) -> CLUSTERs. Only long sums for few results are shared by a
#: cluster, so only small tiles. By the model random problems take 0.2% longer in the mean with these tiles than with all.
TILES: dict[tuple[int, int], tuple[int, ...]] = {
    **{(128, columns): (1,) for columns in (32, 64, 96, 160, 192, 256)}, (128, 128): (1, 2, 4),
    **{(64, columns): CLUSTERS for columns in (32, 64)}, (64, 96): (1, 8), (256, 96): (1,),
}  # fmt: skip
#: The same for phases, whose results are seldom wide.
PHASED_TILES: dict[tuple[int, int], tuple[int, ...]] = {
    (128, 64): (1,), (128, 128): (1,), (64, 32): (1, 2, 8), (64, 64): (1, 8), (64, 128): (1,),
}  # fmt: skip


CONFIGS, LAYOUTS, RUNS_ON, TENSOR_CORES, MOST_VARIANTS = (DenseNhwc,), ("NHWC",), HOPPER, True, {"cuda": 267}
ORDER = ("CLUSTER",)  # what the order of sums depends on
COST = costs("hopper.dense")


def _fits(problem: ConvProblem, config: DenseNhwc) -> str | None:
    if config.BLOCK_M == 256 and not config.BLOCK_N == 96 >= problem.result_channels:
        return "a tile of 256 pixels has 96 channels, all of the result"
    if config.BLOCK_M == 64 and config.BLOCK_N > 128:
        return "a tile of 64 pixels has up to 128 channels"
    if problem.groups > 1 and problem.result_channels // problem.groups % config.BLOCK_N:
        return "a tile lies in one group"
    if config.BLOCK_N == 256 and problem.has_residual:
        return "a tile of 256 channels leaves no registers for a residual"
    if config.CLUSTER > 1 and config.BLOCK_N > 128:
        return "blocks share tiles of up to 128 channels"
    if config.CLUSTER > 1 and sum_bytes(config.BLOCK_M, config.BLOCK_N) > config.STAGES * form.ring_of(config, False).stage:
        return "its ring leaves no room for the sums of a tile that is shared"
    return form.ring_of(config, form.reads_mn_major(problem)).refusal(config.STAGES, config.CLUSTER)


TAKES = Takes(
    ("it takes arrays with their channels last", lambda p: p.layout == "NHWC"),
    (
        "it takes groups forward, with channels of a multiple of 128 bytes",
        lambda p: p.groups <= 1 or (p.direction == "fprop" and form.summed(p) * p.itemsize % ROW == 0),
    ),
    why_not_one_product,
    ("tensor loads take a pixel's channels, of a multiple of 16 bytes", lambda p: p.operand_channels * p.itemsize % 16 == 0),
    PIXELS_IN_32_BITS, lambda p: too_many_phases(p, besides_repeats=True),
    ("tensor loads can't make its padding or dilation", lambda p: form.addressed(p) is not None),
)  # fmt: skip
LEGAL = Tiles(TAKES, DenseNhwc, _fits, BLOCK_M=(64, 128, 256), BLOCK_N=COLUMNS, CLUSTER=CLUSTERS)


def adds_border(source: ConvProblem, problem: ConvProblem, config: DenseNhwc) -> bool:
    """Whether :func:`schedule` takes the image of `source`, which has a border, for the wider one of `problem`: sums are whole there."""
    return config.CLUSTER == 1 and TAKES.why_not(problem) is None and regions(source) is not None


def border_time(source: ConvProblem, config: DenseNhwc) -> float:
    found = regions(source) or ()
    sides = sum(ceil(source.N * math.prod(one.addressing.phase.size), config.BLOCK_M) for one in found if not one.interior)
    tiles, more = sides * ceil(source.result_channels, config.BLOCK_N), ceil(len(found), form.REGIONS[-1]) - 1
    return float(COST.SIDES_TIME + COST.SIDE_TILE[len(found) > form.REGIONS[0]] * tiles + COST.SIDES_LAUNCH * more)


def filter_key(problem: ConvProblem, config: DenseNhwc) -> Hashable:
    return "transposed", problem.direction, problem.dtype, problem.C, problem.K, problem.filter_size


def _tiles_in(sizes: dict[tuple[int, int], tuple[int, ...]]) -> list[DenseNhwc]:
    return [DenseNhwc(*size, CLUSTER=cluster) for size, clusters in sizes.items() for cluster in clusters]


def variants(device: Device) -> Iterator[VariantSet]:
    for tile, mn_major, kind in product(_tiles_in(PHASED_TILES | TILES), (0, 1), ELEMENTS.values()):
        choices = fixed(form.deepest(tile, bool(mn_major and kind != FLOAT)))
        choices |= {"TYPE": (kind,), "W_MN_MAJOR": (mn_major,), "PHASES": (1, form.PHASES)}
        yield VariantSet("hopper_dense", choices, _is_listed, "sm_90a")
        if tile.CLUSTER == 1 and not (mn_major and kind == FLOAT):
            yield VariantSet("hopper_dense", choices | {"PHASES": form.REGIONS, "BORDERED": (1,)}, _is_listed, "sm_90a")
    yield from transpose_filter.variants()


def _is_listed(d: Mapping[str, int]) -> bool:
    if d["W_MN_MAJOR"] and d["TYPE"] == FLOAT and not form.may_transpose(d["BLOCK_M"], d["BLOCK_N"]):
        return False
    return d["CLUSTER"] in (PHASED_TILES if d["PHASES"] == form.PHASES else TILES).get((d["BLOCK_M"], d["BLOCK_N"]), ())


def configs(problem: ConvProblem, device: Device) -> Iterator[DenseNhwc]:
    addressings = form.addressed(problem)[1]
    blocks, mn_major = form.stages_of(problem, addressings[0]), form.reads_mn_major(problem)
    for tile in _tiles_in(TILES if count_phases(problem) == 1 else PHASED_TILES):
        config = form.deepest(tile, mn_major)
        if (tile.CLUSTER == 1 or blocks >= 2 * tile.CLUSTER) and LEGAL.refusal(problem, config) is None:
            yield config


def _filter_cycles(problem: ConvProblem, config: DenseNhwc, mn_major: bool) -> float:
    """Cycles that loads of the filter take in a stage. Rows of a tile past the result's last channel are not loaded."""
    if not mn_major:
        return min(config.BLOCK_N, problem.result_channels) * HOPPER_COST.ROW_CYCLES
    wide = min(stage_channels(problem), config.BLOCK_N)
    channels = min(problem.result_channels, ceil(config.BLOCK_N, wide) * wide)
    stages = ceil(problem.operand_channels, stage_channels(problem))  # of a tap; the last stage has fewer rows of k
    rows = (ROW * (stages - 1) + form.last_row(problem)) / stages / problem.itemsize
    return rows * ceil(channels, wide) * pixel_cycles(channels * problem.itemsize)


def time(problem: ConvProblem, config: DenseNhwc, device: Device) -> float:
    """Microseconds that `config` should take: loads or arithmetic, stores, rounds of tiles; and bytes from and to memory."""
    _, addressings = form.addressed(problem)
    many = math.prod(repeats(problem))
    mn_major, shared, size = form.reads_mn_major(problem), config.CLUSTER > 1, problem.itemsize
    pixel, slower = form.summed(problem) * size, 1.0
    if addressings[0].spatial_dims == 3:
        slower = COST.VOLUME_NARROW if pixel % ROW == 32 else COST.VOLUME
    channel_blocks = ceil(form.summed(problem), stage_channels(problem))
    cycles = pixel_cycles(pixel)
    if pixel % ROW == form.last_row(problem):
        cycles = HOPPER_COST.ROW_CYCLES
    loads = config.BLOCK_M * cycles * slower + _filter_cycles(problem, config, mn_major)
    loads *= COST.SMALL_TILE if config.BLOCK_M == 64 else 1.0
    filled = 1 - (1 - form.last_steps(problem) / form.STEPS) / channel_blocks  # part of the steps of a tap's stages that are multiplied
    step = max(COST.MULTIPLIED * 2 * config.BLOCK_N * config.BLOCK_M / 64 * filled, loads) / CLOCK
    rate = COST.WIDEST_FINISHED if config.BLOCK_N > form.MOMENTS_COLUMNS else HOPPER_COST.FINISHED
    sums = config.BLOCK_M * config.BLOCK_N
    end = sums * 4 / COST.ADDED if shared else finished_time(problem, config.BLOCK_M, config.BLOCK_N, rate)
    slots = at_once(device, config.CLUSTER)
    us, all_jobs, loaded = 0.0, 0, 0.0
    for group in batches(addressings, form.PHASES):
        jobs = [math.prod(form.tile_counts(problem, config, one)) * many * config.CLUSTER for one in group]
        works = [ceil(form.stages_of(problem, one), config.CLUSTER) * step + end for one in group]
        mean = sum(map(operator.mul, jobs, works)) / sum(jobs)
        rounds = ceil(sum(jobs), slots)
        if rounds == 2 and config.BLOCK_M == 64:
            mean *= COST.TWO_ROUNDS
        elif rounds > 2 and shared:
            mean *= COST.MORE_ROUNDS
        all_jobs += sum(jobs)
        further = COST.PER_ROUND * (rounds - 1) if shared else 0
        us += (COST.PER_LAUNCH if us else HOPPER_COST.BEGIN) + max(*works, 0.0, rounds * mean + further)
        stages = sum(math.prod(form.tile_counts(problem, config, one)) * form.stages_of(problem, one) for one in group)
        loaded += stages / count_phases(problem)
    us += COST.CLUSTERED.get(config.CLUSTER, 0.0) if shared else COST.HALF_FULL if 2 * all_jobs <= device.multiprocessors else COST.FULL
    # blocks of the same pixels and other channels or phases load them together; all else comes from the L2 cache again
    loaded *= config.BLOCK_M * min(pixel, ROW) / ceil(problem.result_channels // problem.groups, config.BLOCK_N)
    moved = read_bytes(problem) + written_bytes(problem) + size * math.prod(problem.weight_shape)
    result_bytes = size * math.prod(problem.result_shape)
    if many > 1 and problem.result_channels * size < ROW:  # each phase writes parts of cache lines
        us = max(us, result_bytes / COST.PARTS_OF_LINES)
    us = together(COST.TOGETHER, us, HOPPER_COST.BEGIN + loaded / COST.CACHE_RATE, HOPPER_COST.BEGIN + moved / COST.MEMORY)
    lies = problem.direction == "fprop" or mn_major or form.transposes(problem, config, device)
    transposed = 0 if lies else transpose_filter.TIME + 2 * size * math.prod(problem.weight_shape) / COST.MEMORY
    return COST.CALIBRATION * us + transposed
