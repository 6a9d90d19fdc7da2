"""The tiles of ``cu/hopper/dense.cu``, and what their loads see of a problem."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pycuda_conv.engines.addressing import PackedLayout, PhaseAddressing, phase_addressing
from pycuda_conv.engines.base import Config, ConvProblem
from pycuda_conv.engines.geometry import ceil, first_phases, repeats
from pycuda_conv.engines.hopper.box_tiles import Box, best_box
from pycuda_conv.engines.hopper.common import ROW, RUN, at_once, most_shared, stage_channels, store_mode
from pycuda_conv.engines.hopper.ring import ALIGNMENT, Ring, with_most_stages
from pycuda_conv.runtime.base import Device

PHASES = 4  # phases of a launch, where there are more than one
#: Regions of a launch where the image has a border: the interior, a row and a column at each side, and the corners; or two of each.
REGIONS = 9, 25
STEPS = 4  # wgmma steps of a stage
STAGES = 12  # the most stages of a ring
STAGING = 2560 + 512  # bytes of a warp's staging tile, and of the moments of its two chunks
#: An MN-major filter is transposed first if it has at most so many channels, and x at least so many stages of 128 pixels.
FEW_CHANNELS, MANY_STAGES = 192, 32 * 132
#: Stages of a multiprocessor up to which its blocks transpose the filter themselves: with tiles of their own, and with shared tiles.
MOST_TRANSPOSED = 32, 128
MOMENTS_COLUMNS = 192  # the widest tile whose sums leave registers for moments


@dataclass(frozen=True)
class DenseNhwc(Config):
    """One tile of ``hopper/dense.cu``: BLOCK_M pixels, BLOCK_N channels, STAGES of its ring, CLUSTER blocks that share it."""

    BLOCK_M: int = 128
    BLOCK_N: int = 128
    STAGES: int = 4
    CLUSTER: int = 1


@lru_cache(maxsize=1024)
def addressed(problem: ConvProblem) -> Any:
    """The arrays as the loads see them, and the phases' addressing without repeats, those with most taps first.

    None if tensor loads can't make it.
    """
    load = stage_channels(problem)
    unpacked = PackedLayout(True, 0, (1, 1, 1), problem.operand_size, problem.operand_channels, load, problem.filter_size)
    every = [phase_addressing(problem, phase, unpacked) for phase in first_phases(problem)]
    found = [addressing for addressing in every if addressing is not None]
    return (unpacked, tuple(sorted(found, key=lambda one: -math.prod(one.taps)))) if len(found) == len(every) else None


def summed(problem: ConvProblem) -> int:
    """Channels of the input over which a result sums: those of its group."""
    return problem.operand_channels // problem.groups


def blocks_per_sm(config: DenseNhwc) -> int:
    """Blocks that share a multiprocessor: two of the small tiles."""
    return 2 if config.BLOCK_M == 64 else 1


def ring_of(config: DenseNhwc, mn_major: bool) -> Ring:
    """The ring of a tile. The warps' staging tiles lie beside it, unless blocks share the tile.

    A stage has BLOCK_M rows of x, and the rows of w. An MN-major w has whole blocks of 64 rows, or in the narrowest tile 32 rows.
    """
    rows = config.BLOCK_M + (ceil(config.BLOCK_N, 64) * 64 if mn_major and config.BLOCK_N > 32 else config.BLOCK_N)
    staging = config.BLOCK_M // 16 * STAGING if config.CLUSTER == 1 else 0
    return Ring(ROW * rows, staging + ALIGNMENT, most_shared(blocks_per_sm(config)))


@lru_cache(maxsize=256)  # few tiles, for every problem again
def deepest(config: DenseNhwc, mn_major: bool) -> DenseNhwc:
    """`config` with the most stages that shared memory has room for."""
    tile: DenseNhwc = with_most_stages(config, ring_of(config, mn_major), STAGES)
    return tile


def reads_mn_major(problem: ConvProblem) -> bool:
    """Whether dgrad reads a 16-bit filter with its second axis last as it lies: MN-major.

    TMA then loads 64 rows of k a stage for each 64 channels of the result, and takes longer if it has to fill up channels. So a narrow
    filter with a tail is transposed first if there are many stages.
    """
    if problem.direction != "dgrad" or problem.itemsize != 2 or problem.weight_shape[1] % 8:
        return False
    if problem.result_channels > FEW_CHANNELS or problem.result_channels % stage_channels(problem) == 0:
        return True
    pixels = problem.N * math.prod(problem.operand_size)  # a phase has fewer taps, but all phases together have these stages
    stages = pixels / 128 * math.prod(problem.filter_size) * ceil(problem.operand_channels, stage_channels(problem))
    return stages < MANY_STAGES


def may_transpose(rows: int, columns: int) -> bool:
    """Whether a tile leaves shared memory and registers for warps that transpose a filter: small tiles do."""
    return rows == 64 and columns < 128


def transposes(problem: ConvProblem, config: DenseNhwc, device: Device) -> bool:
    """Whether blocks transpose a float32 filter of dgrad themselves, stage by stage, instead of a launch before them.

    They do if a multiprocessor has few stages. With a shared tile a block has so few that transposing hides behind the loads.
    """
    gradient = problem.direction == "dgrad" and problem.itemsize == 4 and problem.weight_shape[1] % 4 == 0
    if not gradient or not may_transpose(config.BLOCK_M, config.BLOCK_N):
        return False
    _, addressings = addressed(problem)
    # MOST_TRANSPOSED is for a sum that counts repeats twice
    many, slots = math.prod(repeats(problem)) ** 2 * config.CLUSTER, at_once(device, config.CLUSTER)
    stages = sum(ceil(stages_of(problem, one), config.CLUSTER) * math.prod(tile_counts(problem, config, one)) * many for one in addressings)
    return stages <= MOST_TRANSPOSED[config.CLUSTER > 1] * slots


def box_of(problem: ConvProblem, config: DenseNhwc, addressing: PhaseAddressing, with_moments: bool = False) -> Box | None:
    """The box that a tile's pixels are; None where they are neighbours, of which a tile always has as many as it can hold.

    They are neighbours with a stride, where runs of pixels are stored, and where boxes would be more tiles, or for moments not all full.
    """
    if addressing.flat or addressing.stride != (1, 1, 1) or store_mode(problem, config.BLOCK_N, addressing.phase) == RUN:
        return None
    box, pixels = best_box(addressing.phase.size, problem.N, config.BLOCK_M), problem.N * math.prod(addressing.phase.size)
    fits = box.tiles * config.BLOCK_M == pixels if with_moments else box.tiles <= ceil(pixels, config.BLOCK_M)
    return box if fits else None


def stages_of(problem: ConvProblem, addressing: PhaseAddressing) -> int:
    """Stages of a phase's sum."""
    return math.prod(addressing.taps) * ceil(summed(problem), stage_channels(problem))


def last_steps(problem: ConvProblem) -> int:
    """wgmma steps in a tap's last stage: each multiplies 32 bytes of channels."""
    return (ceil(summed(problem) * problem.itemsize, ROW // STEPS) - 1) % STEPS + 1


def last_row(problem: ConvProblem) -> int:
    """Bytes of a row of a tap's last stage: what TMA loads of it."""
    return {1: 32, 2: 64}.get(last_steps(problem), ROW)


def tile_counts(problem: ConvProblem, config: DenseNhwc, addressing: PhaseAddressing) -> tuple[int, int]:
    """Tiles of a phase along the channels, and along the pixels."""
    return ceil(problem.result_channels, config.BLOCK_N), tiles_down(problem, config, addressing, box_of(problem, config, addressing))


def tiles_down(problem: ConvProblem, config: DenseNhwc, addressing: PhaseAddressing, box: Box | None) -> int:
    """Tiles along the pixels: boxes, or else runs of neighbours."""
    return box.tiles if box else ceil(problem.N * math.prod(addressing.phase.size), config.BLOCK_M)
