"""1x1 convolutions of 16-bit NCHW arrays as they lie, and their dgrad, on Hopper's tensor cores (``cu/hopper/planes.cu``).

They are matrix products of the filter and each image. wgmma takes 16-bit operands whichever of their axes is fastest, so nothing is
packed or transposed: neither planes nor the filter, in fprop or dgrad.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import NamedTuple

from pycuda_conv.engines.base import FLAG, Config, ConvProblem, VariantSet, costs, fixed, kernel_struct
from pycuda_conv.engines.geometry import arguments, ceil
from pycuda_conv.engines.hopper.common import CLOCK, ROW, most_shared, tight_map
from pycuda_conv.engines.hopper.ring import ALIGNMENT, Ring, with_most_stages
from pycuda_conv.engines.limits import HALVES, HOPPER, IN_32_BITS, NOT_EMPTY, ONE_GROUP, POINTWISE, Takes, Tiles
from pycuda_conv.engines.schedule import FINISH, INPUT, RESULT, WEIGHT, Schedule, finishing
from pycuda_conv.engines.tensor_cores import BFLOAT, ELEMENTS, HALF
from pycuda_conv.runtime.base import Device, TensorMap


class _Consumers(NamedTuple):
    """A tile's consumers: the channels and pixels of each, and how many times it has room for the results of 64 channels."""

    rows: int
    pixels: int
    results: int


#: The tiles: (BLOCK_M, BLOCK_N) -> consumers. The ring has what room the results leave.
TILES = {
    (64, 64): _Consumers(64, 64, 2), (64, 256): _Consumers(64, 128, 2), (128, 128): _Consumers(64, 128, 2),
    (128, 192): _Consumers(64, 192, 1), (192, 192): _Consumers(64, 192, 1), (256, 128): _Consumers(128, 128, 1),
}  # fmt: skip
STAGES = 8  # the most stages of a ring
BLOCK = 64  # channels, and pixels, that are loaded and stored at once


@dataclass(frozen=True)
class Planes(Config):
    """One tile of ``hopper/planes.cu``: BLOCK_M output channels, BLOCK_N pixels, and the STAGES of its ring."""

    BLOCK_M: int = 128
    BLOCK_N: int = 128
    STAGES: int = 4


CONFIGS, LAYOUTS, RUNS_ON, TENSOR_CORES, MOST_VARIANTS = (Planes,), ("NCHW",), HOPPER, True, {"cuda": 24}
ORDER = ()  # all sum alike
COST = costs("hopper.planes")
PlanesProduct = kernel_struct("hopper_planes", "PlanesProduct")


TAKES = Takes(
    HALVES, ONE_GROUP, NOT_EMPTY, POINTWISE,
    (
        "tensor loads take planes, and rows of the filter, of a multiple of 16 bytes",
        lambda problem: math.prod(problem.operand_size) % 8 == 0 == problem.weight_shape[1] % 8,
    ),
    IN_32_BITS,
)  # fmt: skip
LEGAL = Tiles(TAKES, Planes, lambda _, config: _ring(config).refusal(config.STAGES), together={("BLOCK_M", "BLOCK_N"): TILES})


def _blocks_per_sm(config: Planes) -> int:
    """Blocks that share a multiprocessor."""
    return 2 if config.BLOCK_M * config.BLOCK_N <= 64 * 128 else 1


def _ring(config: Planes) -> Ring:
    """The ring of a tile. The consumers' results lie beside it."""
    own = TILES[config.BLOCK_M, config.BLOCK_N]
    results = _consumers(config) * own.results * 2 * 64 * own.pixels
    return Ring(ROW * (config.BLOCK_M + config.BLOCK_N), results + ALIGNMENT, most_shared(_blocks_per_sm(config)))


def _consumers(config: Planes) -> int:
    own = TILES[config.BLOCK_M, config.BLOCK_N]
    return config.BLOCK_M // own.rows * (config.BLOCK_N // own.pixels)


#: The tiles, each with the most stages that shared memory has room for.
DEEPEST: list[Planes] = [with_most_stages(tile, _ring(tile), STAGES) for tile in (Planes(*size) for size in TILES)]


def schedule(problem: ConvProblem, config: Planes, device: Device, with_moments: bool = False) -> Schedule:
    down, across, steps = _tiles(problem, config)
    args = arguments(PlanesProduct, problem, tiles=problem.N * down * across, tiles_m=down, tiles_n=across, steps=steps)
    backward = problem.direction == "dgrad"
    first, last = problem.weight_shape[:2]
    of_filter = tight_map(WEIGHT, (last, first, 1), (BLOCK, BLOCK, 1), problem.dtype)
    maps = _planes(problem, INPUT, problem.operand_channels), of_filter, _planes(problem, RESULT, problem.result_channels, 1)
    defines = _defines(config) | {"TYPE": ELEMENTS[problem.dtype], "W_MN_MAJOR": int(backward)}
    grid = min(args.tiles, device.multiprocessors * _blocks_per_sm(config))
    shared = _ring(config).nbytes(config.STAGES)
    launch = finishing("hopper_planes", defines, grid, _threads(config), args, FINISH, maps=maps, shared=shared, arch="sm_90a")
    return Schedule.plain([[launch]])


def _defines(config: Planes) -> dict[str, int]:
    own = TILES[config.BLOCK_M, config.BLOCK_N]
    return asdict(config) | {"WGMMA_N": own.pixels, "OWN_M": own.rows, "RESULTS": own.results}


def _threads(config: Planes) -> int:
    """Threads of a block: the producer's warp is a whole warpgroup if it hands over registers."""
    consumers = _consumers(config)
    return 128 * consumers + (128 if consumers == 3 else 32)


def _planes(problem: ConvProblem, buffer: int, channels: int, *more: int) -> TensorMap:
    """The map of the planes of images: a box is 64 pixels of 64 channels; `more` axes have one index each."""
    row = 2 * math.prod(problem.operand_size)
    sizes, strides = (row // 2, channels, problem.N, *more), (row, row * channels, *(row * channels * problem.N for _ in more))
    return TensorMap(buffer, 0, sizes, strides, (BLOCK, BLOCK, 1, *more), ROW, problem.dtype)


def _tiles(problem: ConvProblem, config: Planes) -> tuple[int, int, int]:
    """Tiles of an image along its channels, and along its pixels; stages of a sum."""
    plane = math.prod(problem.operand_size)
    return ceil(problem.result_channels, config.BLOCK_M), ceil(plane, config.BLOCK_N), ceil(problem.operand_channels, BLOCK)


def variants(device: Device) -> Iterator[VariantSet]:
    for tile in DEEPEST:
        choices = fixed(_defines(tile)) | {"TYPE": (HALF, BFLOAT), "W_MN_MAJOR": FLAG}
        yield VariantSet("hopper_planes", choices, arch="sm_90a")


def configs(problem: ConvProblem, device: Device) -> Iterator[Planes]:
    return (tile for tile in DEEPEST if tile.BLOCK_M == 64 or problem.result_channels > tile.BLOCK_M - 64)


def time(problem: ConvProblem, config: Planes, device: Device) -> float:
    """Microseconds that `config` should take: a stage's arithmetic, loads and latency, which add as squares; stores, rounds; or memory."""
    down, across, steps = _tiles(problem, config)
    plane = math.prod(problem.operand_size)
    pixels = min(config.BLOCK_N, ceil(plane, BLOCK) * BLOCK)
    loads = (min(config.BLOCK_M, ceil(problem.result_channels, BLOCK) * BLOCK) + pixels) * COST.ROW_CYCLES
    step = math.hypot(COST.MULTIPLIED * config.BLOCK_M * config.BLOCK_N / 32, loads, COST.WAIT_CYCLES / (config.STAGES - 1)) / CLOCK
    end = COST.TILE + 2 * config.BLOCK_M * config.BLOCK_N / COST.STORED
    beside = _blocks_per_sm(config)
    rounds = ceil(problem.N * down * across, device.multiprocessors * beside)
    works = rounds * (steps * step + end) * beside**COST.SHARED, problem.bytes / COST.MEMORY
    return COST.BEGIN + max(works) + COST.NOT_OVERLAPPED * min(works)
