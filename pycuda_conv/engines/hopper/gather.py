"""Channels-last arrays whose pixels are no multiple of 128 bytes, on Hopper's tensor cores (``cu/hopper/gather.cu``).

Threads copy what the taps read, so that the channels of all taps are contiguous in gemm k; tensor loads would leave gaps of zeros. A
filter without such rows is transposed first.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from pycuda_conv.engines.base import Config, ConvProblem, VariantSet, costs, fixed, kernel_struct
from pycuda_conv.engines.geometry import arguments, by_axis, ceil, filter_strides, phases
from pycuda_conv.engines.hopper.common import (
    CLOCK,
    MEMORY,
    ROW,
    at_once,
    finished_time,
    map_type,
    most_shared,
    read_bytes,
    stage_channels,
    store_mode,
    written_bytes,
)
from pycuda_conv.engines.hopper.common import COST as HOPPER_COST
from pycuda_conv.engines.hopper.ring import ALIGNMENT, Ring, sum_bytes, with_most_stages
from pycuda_conv.engines.layout import transpose_filter
from pycuda_conv.engines.limits import ALL_IN_32_BITS, HOPPER, ONE_GROUP, Takes, Tiles
from pycuda_conv.engines.packed_product import written_places
from pycuda_conv.engines.schedule import FINISH, INPUT, PACKED, RESULT, WEIGHT, Arena, Schedule, finishing, placed
from pycuda_conv.engines.tensor_cores import ELEMENTS, why_not_one_product
from pycuda_conv.runtime.base import BufferSlice, Device, KernelLaunch, TensorMap

COLUMNS = (32, 64, 96, 128)  # channels of a tile
CLUSTERS = (1, 2, 4, 8)  # blocks that share a tile
#: The tiles worth choosing from, each a kernel of its own: (BLOCK_M, BLOCK_N) -> CLUSTERs.
TILES: dict[tuple[int, int], tuple[int, ...]] = {(128, 64): (1,), (128, 128): (1,), (64, 32): (1, 8), (64, 64): (1, 4)}
STAGES = 8  # the most stages of a ring
STAGING = 2560  # bytes of a warp's staging tile
MOST_TAPS = 31  # of all axes together: bits of a mask
COPIES = (16, 4)  # bytes of a copy


@dataclass(frozen=True)
class GatherNhwc(Config):
    """One tile of ``hopper/gather.cu``: BLOCK_M pixels, BLOCK_N channels, STAGES of its ring, CLUSTER blocks that share it."""

    BLOCK_M: int = 128
    BLOCK_N: int = 64
    STAGES: int = 6
    CLUSTER: int = 1


CONFIGS, LAYOUTS, RUNS_ON, TENSOR_CORES, MOST_VARIANTS = (GatherNhwc,), ("NHWC",), HOPPER, True, {"cuda": 36}
ORDER = ("CLUSTER",)  # what the order of sums depends on
COST = costs("hopper.gather")
GatherPhase = kernel_struct("hopper_gather", "GatherPhase")


class _Runs(NamedTuple):
    """The parts of x that are contiguous in gemm k and in memory: the channels of a tap, or of a row of taps, which then counts as one."""

    taps: tuple[int, int, int]
    length: int  # elements
    copy: int  # bytes, or 0 if no copy fits


@lru_cache(maxsize=1024)  # the planner asks for it several times
def _runs(problem: ConvProblem) -> _Runs:
    channels, size, (t, r, s) = problem.operand_channels, problem.itemsize, problem.filter_size
    width, (_, _, results) = problem.operand_size[2], problem.result_size

    def copy(*elements: int) -> int:
        return next((nbytes for nbytes in COPIES if math.gcd(*elements) * size % nbytes == 0), 0)

    inside = problem.padding_before[2] == 0 and (results - 1) * problem.stride[2] + s <= width
    if problem.direction == "fprop" and problem.dilation[2] == 1 and inside and s > 1:
        steps = s * channels, problem.stride[2] * channels, width * channels  # elements of a row of taps, a step of q, a row of x
        if copy(*steps) and copy(*steps) >= copy(channels):
            return _Runs((t, r, 1), s * channels, copy(*steps))
    return _Runs((t, r, s), channels, copy(channels))


def _fits(problem: ConvProblem, config: GatherNhwc) -> str | None:
    ring = _ring(config)
    if config.CLUSTER > 1 and sum_bytes(config.BLOCK_M, config.BLOCK_N) > config.STAGES * ring.stage:
        return "its ring leaves no room for the sums of a tile that is shared"
    return ring.refusal(config.STAGES, config.CLUSTER)


TAKES = Takes(
    ONE_GROUP, why_not_one_product,
    ("it computes gradients of convolutions without stride", lambda p: p.direction != "dgrad" or p.stride == (1, 1, 1)),
    ("its copies are of 4 bytes", lambda p: _runs(p).copy > 0),
    ALL_IN_32_BITS, (f"its masks have {MOST_TAPS} taps: of rows, columns and slices", lambda p: sum(_runs(p).taps) <= MOST_TAPS),
)  # fmt: skip
LEGAL = Tiles(TAKES, GatherNhwc, _fits, BLOCK_M=(64, 128), BLOCK_N=COLUMNS, CLUSTER=CLUSTERS)


def _blocks_per_sm(config: GatherNhwc) -> int:
    """Blocks that share a multiprocessor: of the small tiles two."""
    return 1 if config.BLOCK_M == 128 else 2


def _ring(config: GatherNhwc) -> Ring:
    """The ring of a tile. The warps' staging tiles lie beside it, unless blocks share the tile."""
    staging = config.BLOCK_M // 16 * STAGING if config.CLUSTER == 1 else 0
    return Ring(ROW * (config.BLOCK_M + config.BLOCK_N), staging + ALIGNMENT, most_shared(_blocks_per_sm(config)))


#: The tiles, each with the most stages that its ring has room for.
DEEPEST: list[GatherNhwc] = [
    with_most_stages(tile, _ring(tile), STAGES)
    for size, clusters in TILES.items() for tile in (GatherNhwc(*size, STAGES, cluster) for cluster in clusters)
]  # fmt: skip


def schedule(problem: ConvProblem, config: GatherNhwc, device: Device, with_moments: bool = False) -> Schedule:
    taps, size = math.prod(problem.filter_size), problem.itemsize
    elements = taps * problem.operand_channels

    def lies(steps: tuple[int, int, int]) -> bool:
        along_taps = taps == 1 or steps[1] == problem.operand_channels
        return along_taps and steps[::2] == (elements, 1) and elements * size % 16 == 0

    pitch = ceil(elements * size, 16) * 16 // size
    kept = Arena(PACKED)
    place = kept.take(problem.result_channels * pitch * size)

    def from_filter(last: bool) -> list[list[KernelLaunch]]:
        _, row, channel, tap = filter_strides(problem, last)
        steps = row, tap, channel
        if lies(steps):
            return [[_product(problem, config, WEIGHT, pitch, device)]]
        return [[transpose_filter.launch(problem, place, steps, pitch)], *products]

    products = [[_product(problem, config, place, pitch, device)]]
    whole, last = from_filter(False), from_filter(True)
    if len(whole) == 1:
        return Schedule([], whole, whole, 0, 0, filter_last=last)
    return Schedule(whole[:1], products, whole, 0, kept.used, filter_last=last)


def _product(problem: ConvProblem, config: GatherNhwc, place: BufferSlice, pitch: int, device: Device) -> KernelLaunch:
    args, runs = _arguments(problem, config), _runs(problem)
    fitting = device.multiprocessors * _blocks_per_sm(config)
    grid = args.tiles * config.CLUSTER if config.CLUSTER > 1 else min(args.tiles, fitting)
    defines = asdict(config) | {"TYPE": ELEMENTS[problem.dtype], "COPY": runs.copy}
    maps, shared = (_filter_map(problem, config, place, pitch),), _ring(config).nbytes(config.STAGES)
    buffers = INPUT, *FINISH, RESULT
    return finishing("hopper_gather", defines, grid, 4 * config.BLOCK_M, args, buffers, maps=maps, shared=shared, arch="sm_90a")


def _filter_map(problem: ConvProblem, config: GatherNhwc, place: BufferSlice, pitch: int) -> TensorMap:
    """The map of the filter: a box is a stage of gemm k of a tile's rows."""
    rows, elements = problem.result_channels, math.prod(problem.filter_size) * problem.operand_channels
    sizes, strides = (elements, 1, rows), (problem.itemsize * pitch,) * 2
    box = (stage_channels(problem), 1, min(config.BLOCK_N, rows))
    return TensorMap(*placed(place), sizes, strides, box, ROW, map_type(problem))


def _stages(problem: ConvProblem) -> int:
    """Stages of a sum."""
    return ceil(math.prod(problem.filter_size) * problem.operand_channels, stage_channels(problem))


def _tiles(problem: ConvProblem, config: GatherNhwc) -> tuple[int, int]:
    """Tiles along the channels, and along the pixels."""
    return ceil(problem.result_channels, config.BLOCK_N), ceil(problem.N * math.prod(problem.result_size), config.BLOCK_M)


def _arguments(problem: ConvProblem, config: GatherNhwc) -> Any:
    (phase,), runs = phases(problem), _runs(problem)
    across, down = _tiles(problem, config)
    each, blocks = runs.copy // problem.itemsize, _stages(problem)
    return arguments(
        GatherPhase, problem, phase, written_places(problem, phase), tiles=across * down, tiles_n=across, blocks=blocks,
        part=ceil(blocks, config.CLUSTER),
        copies=math.prod(runs.taps) * runs.length // each, tap_copies=runs.length // each, tap_t=runs.taps[0], tap_r=runs.taps[1],
        tap_s=runs.taps[2], **by_axis("low_", [-pad for pad in phase.pad]),
        store_mode=store_mode(problem, config.BLOCK_N, phase),
    )  # fmt: skip


def filter_key(problem: ConvProblem, config: GatherNhwc) -> Hashable:
    return "gathered", problem.direction, problem.dtype, problem.C, problem.K, problem.filter_size


def variants(device: Device) -> Iterator[VariantSet]:
    """A text for each tile and type, and each size of copies. The texts that transpose filters are listed by another engine."""
    for tile in DEEPEST:
        yield VariantSet("hopper_gather", fixed(tile) | {"TYPE": tuple(ELEMENTS.values()), "COPY": COPIES}, arch="sm_90a")


def configs(problem: ConvProblem, device: Device) -> Iterator[GatherNhwc]:
    """The configurations worth comparing for `problem`; none if tensor loads leave no gaps."""
    if problem.operand_channels * problem.itemsize % ROW == 0:
        return
    for tile in DEEPEST:
        if (tile.CLUSTER == 1 or _stages(problem) >= 2 * tile.CLUSTER) and LEGAL.refusal(problem, tile) is None:
            yield tile


def time(problem: ConvProblem, config: GatherNhwc, device: Device) -> float:
    """Microseconds that `config` should take: copies or arithmetic, stores, rounds of tiles; and bytes from and to memory."""
    shared, size = config.CLUSTER > 1, problem.itemsize
    copies = config.BLOCK_M * (COST.COPY_CYCLES[_runs(problem).copy] + (COST.ROUND_CYCLES if size == 4 else 0))
    step = max(COST.MULTIPLIED * 2 * config.BLOCK_N * config.BLOCK_M / 64, copies) / CLOCK
    sums = config.BLOCK_M * config.BLOCK_N
    end = sums * 4 / HOPPER_COST.ADDED if shared else finished_time(problem, config.BLOCK_M, config.BLOCK_N)
    slots, jobs = at_once(device, config.CLUSTER), math.prod(_tiles(problem, config)) * config.CLUSTER
    work = ceil(_stages(problem), config.CLUSTER) * step + end
    rounds = ceil(jobs, slots)
    us = HOPPER_COST.BEGIN + max(work, rounds * work + (HOPPER_COST.PER_ROUND * (rounds - 1) if shared else 0))
    elements = math.prod(problem.filter_size) * problem.operand_channels
    moved = read_bytes(problem) + written_bytes(problem) + size * math.prod(problem.weight_shape)
    lies = problem.direction == "fprop" and elements * size % 16 == 0
    transposed = 0 if lies else transpose_filter.TIME + 2 * size * math.prod(problem.weight_shape) / MEMORY
    return max(us, HOPPER_COST.BEGIN + moved / MEMORY) + transposed
