"""1x1 convolutions of few pixels, or of NCHW planes that tensor loads don't take, on Hopper (``cu/hopper/gathered_planes.cu``).

Planes may have any size, and pixels of x may lie a stride apart. Tiles go on from one image to the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from pycuda_conv.engines.base import FLAG, Config, ConvProblem, VariantSet, costs, fixed, kernel_struct
from pycuda_conv.engines.geometry import arguments, by_axis, ceil, pixel_by_pixel
from pycuda_conv.engines.hopper.common import CLOCK, ROW, at_once, map_type, most_shared, stage_channels, tight_map
from pycuda_conv.engines.hopper.ring import ALIGNMENT, Ring, sum_bytes, with_most_stages
from pycuda_conv.engines.limits import ALL_IN_32_BITS, HOPPER, ONE_GROUP, Takes, Tiles
from pycuda_conv.engines.schedule import FINISH, INPUT, RESULT, WEIGHT, Schedule, finishing
from pycuda_conv.engines.tensor_cores import ELEMENTS, why_not_one_product
from pycuda_conv.runtime.base import Device

#: The tiles: (BLOCK_M, BLOCK_N) -> (CLUSTER, GROUPS) choices.
TILES: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {
    (64, 32): ((1, 2), (8, 2), (1, 4), (2, 4)), (64, 64): ((1, 2), (2, 2), (4, 2), (1, 4), (2, 4)), (128, 128): ((1, 2),),
}  # fmt: skip
STAGES = 8  # the most stages of a ring
BLOCK = 64  # channels of the filter that are loaded at once


@dataclass(frozen=True)
class GatheredPlanes(Config):
    """One tile of ``hopper/gathered_planes.cu``.

    BLOCK_M output channels, BLOCK_N pixels, STAGES of its ring, CLUSTER blocks that share it, and GROUPS of warps that load.
    """

    BLOCK_M: int = 64
    BLOCK_N: int = 64
    STAGES: int = 6
    CLUSTER: int = 1
    GROUPS: int = 2


CONFIGS, LAYOUTS, RUNS_ON, TENSOR_CORES, MOST_VARIANTS = (GatheredPlanes,), ("NCHW",), HOPPER, True, {"cuda": 60}
ORDER = ("CLUSTER",)  # what the order of sums depends on
COST = costs("hopper.gathered_planes")
GatheredPlanesProduct = kernel_struct("hopper_gathered_planes", "GatheredPlanesProduct")


def _fits(problem: ConvProblem, config: GatheredPlanes) -> str | None:
    shares, ring = TILES[config.BLOCK_M, config.BLOCK_N], _ring(config)
    if (config.CLUSTER, config.GROUPS) not in shares:
        return f"its blocks and groups are {', '.join(f'{blocks} and {groups}' for blocks, groups in shares)}"
    if sum_bytes(config.BLOCK_M, config.BLOCK_N) > config.STAGES * ring.stage:
        return "its ring leaves no room for the sums of a tile"
    return ring.refusal(config.STAGES, config.CLUSTER)


TAKES = Takes(
    ONE_GROUP, why_not_one_product, ("it takes 1x1 filters", lambda p: p.filter_size == (1, 1, 1)),
    (
        "tensor loads take rows of the filter of a multiple of 16 bytes",
        lambda p: _gathers_filter(p) or p.weight_shape[1] * p.itemsize % 16 == 0,
    ),
    ALL_IN_32_BITS,
)  # fmt: skip
LEGAL = Tiles(TAKES, GatheredPlanes, _fits, together={("BLOCK_M", "BLOCK_N"): TILES})


def _gathers_filter(problem: ConvProblem) -> bool:
    """Whether threads load the filter, because wgmma can't read it as it lies."""
    return problem.direction == "dgrad" and problem.itemsize == 4


def _ring(config: GatheredPlanes) -> Ring:
    """The ring of a tile. Two blocks of the small ones may share a multiprocessor."""
    return Ring(ROW * (config.BLOCK_M + config.BLOCK_N), ALIGNMENT, most_shared(1 if config.BLOCK_M == 128 else 2))


#: The tiles, each with the most stages that its ring has room for.
DEEPEST: list[GatheredPlanes] = [
    with_most_stages(tile, _ring(tile), STAGES)
    for size, shares in TILES.items() for tile in (GatheredPlanes(*size, STAGES, *share) for share in shares)
]  # fmt: skip


def schedule(problem: ConvProblem, config: GatheredPlanes, device: Device, with_moments: bool = False) -> Schedule:
    down, across, steps = _tiles(problem, config)
    backward, gathers = problem.direction == "dgrad", _gathers_filter(problem)
    args = arguments(
        GatheredPlanesProduct, problem, tiles_m=down, steps=steps, part=ceil(steps, config.CLUSTER),
        **by_axis("stride_", (1, 1, 1) if backward else problem.stride),
        **by_axis("low_", [pad if backward else -pad for pad in problem.padding_before]),
        has_dgrad_stride=int(backward and problem.stride != (1, 1, 1)), **by_axis("dgrad_stride_", problem.stride),
        wide=int(_wide(problem)), pairs=int(math.prod(problem.result_size) % 2 == 0),
    )  # fmt: skip
    first, last = problem.weight_shape[:2]
    box = (BLOCK, stage_channels(problem), 1) if backward else (stage_channels(problem), BLOCK, 1)
    maps = () if gathers else (tight_map(WEIGHT, (last, first, 1), box, map_type(problem)),)
    defines = asdict(config) | {"TYPE": ELEMENTS[problem.dtype], "W_TRANSPOSED": int(backward)}
    launch = finishing(
        "hopper_gathered_planes", defines, down * across * config.CLUSTER, 2 * config.BLOCK_M + 128 * config.GROUPS, args,
        (*((WEIGHT,) if gathers else ()), INPUT, *FINISH, RESULT), maps=maps, shared=_ring(config).nbytes(config.STAGES), arch="sm_90a",
    )  # fmt: skip
    return Schedule.plain([[launch]])


def _wide(problem: ConvProblem) -> bool:
    """Whether two neighbouring pixels, and rows of a filter that threads load, can be loaded at once."""
    even = math.prod(problem.result_size) % 2 == 0 and not (_gathers_filter(problem) and problem.result_channels % 2)
    return even and pixel_by_pixel(problem)


def _tiles(problem: ConvProblem, config: GatheredPlanes) -> tuple[int, int, int]:
    """Tiles along the channels, and along the pixels of all images; stages of a sum."""
    pixels, steps = problem.N * math.prod(problem.result_size), ceil(problem.operand_channels, stage_channels(problem))
    return ceil(problem.result_channels, config.BLOCK_M), ceil(pixels, config.BLOCK_N), steps


def variants(device: Device) -> Iterator[VariantSet]:
    for tile in DEEPEST:
        choices = fixed(tile) | {"TYPE": tuple(ELEMENTS.values()), "W_TRANSPOSED": FLAG}
        yield VariantSet("hopper_gathered_planes", choices, arch="sm_90a")


def configs(problem: ConvProblem, device: Device) -> Iterator[GatheredPlanes]:
    for tile in DEEPEST:
        (down, across, steps), cluster = _tiles(problem, tile), tile.CLUSTER
        if cluster == 1 or (steps >= 2 * cluster and down * across * cluster <= 4 * device.multiprocessors):
            yield tile


def time(problem: ConvProblem, config: GatheredPlanes, device: Device) -> float:
    """Microseconds that `config` should take: loads or products of a stage, or the wait for them; stores, rounds; or memory."""
    (down, across, steps), shared = _tiles(problem, config), config.CLUSTER > 1
    rows = config.BLOCK_N + (config.BLOCK_M if _gathers_filter(problem) else 0)
    loads = COST.GATHERED * stage_channels(problem) * rows / (64 if _wide(problem) else 32)
    busy = max(loads, COST.MULTIPLIED * config.BLOCK_M * config.BLOCK_N / 32) / CLOCK
    slots, blocks = at_once(device, config.CLUSTER), down * across * config.CLUSTER
    beside = 2 if config.BLOCK_M == 64 and config.GROUPS == 2 else 1  # blocks that fit a multiprocessor
    rounds, together = ceil(blocks, slots * beside), min(beside, ceil(blocks, slots))
    end = config.BLOCK_M * config.BLOCK_N / config.CLUSTER / COST.STORED + (COST.JOINED if shared else 0)
    work = ceil(steps, config.CLUSTER) * (COST.WAIT / config.GROUPS + busy * together) + end * together
    # rows and slices that a stride steps over are not read; columns are, with their neighbours
    stepped = problem.stride[0] * problem.stride[1] if problem.direction == "fprop" else 1
    read = problem.N * problem.operand_channels * math.prod(problem.operand_size) // stepped
    moved = problem.itemsize * (read + math.prod(problem.result_shape) + math.prod(problem.weight_shape))
    return COST.BEGIN + max(rounds * work + COST.PER_ROUND * (rounds - 1), moved / COST.MEMORY)
