"""fprop and dgrad of few pixels and many channels, NCHW, on Hopper: ``cu/mma/few_pixels.cu``.

The blocks of a cluster share a tile, read both arrays as they lie, and add their sums.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from pycuda_conv.engines.base import Config, ConvProblem, Device, VariantSet, kernel_struct
from pycuda_conv.engines.costs import MULTIPROCESSORS, costs
from pycuda_conv.engines.geometry import Phase, arguments, ceil, count_phases, phases, places
from pycuda_conv.engines.hopper.common import MOST_SHARED
from pycuda_conv.engines.limits import HOPPER, IN_32_BITS, NOT_EMPTY, ONE_GROUP, TWO_AXES, Takes, Tiles, types
from pycuda_conv.engines.schedule import Schedule, finishing
from pycuda_conv.engines.tensor_cores import ELEMENTS, is_multiplied, products

WARPS, WARP_M = 8, 32  # warps of a block; channels of the result of a warp
PHASES = 4  # of a launch
STAGES = 4  # of the ring
MOST_STEPS = 128  # of a stage
ROWS, COLUMNS, CLUSTERS = (32, 64, 128), (32, 56), (2, 4, 8)
PHASED_CLUSTERS = (2, 8)  # of these clusters, those for phases
STATIC_SHARED = 2048  # the kernel's tables
STEPS = 4  # steps of each warp in a stage, if there is room
BANKS = 32
UNIT_BYTES = 32  # of a pixel's channels


@dataclass(frozen=True)
class FewPixels(Config):
    """A tile of ``mma/few_pixels.cu``: BLOCK_M output channels, BLOCK_N pixels, and the CLUSTER blocks that share it."""

    BLOCK_M: int = 64
    BLOCK_N: int = 56
    CLUSTER: int = 8


CONFIGS, LAYOUTS, RUNS_ON, TENSOR_CORES, MOST_VARIANTS = (FewPixels,), ("NCHW",), HOPPER, True, {"cuda": 32}
COST = costs("mma.few_pixels")
FewPixelsPhase = kernel_struct("mma_few_pixels", "FewPixelsPhase")


class _Positions(NamedTuple):
    """Positions of a tile: all, those of an image, and of a row. flat: they are the tile's pixels."""

    flat: bool
    positions: int
    slot: int
    width: int

    @classmethod
    def of(cls, problem: ConvProblem, config: FewPixels, phase: Phase) -> _Positions:
        (_, p, q), (_, r, s) = phase.size, phase.taps
        if r * s <= 1:
            return cls(True, config.BLOCK_N, config.BLOCK_N, config.BLOCK_N)
        # the most images, and rows of an image, that neighbouring pixels can lie in
        images = min(problem.N, (config.BLOCK_N + p * q - 2) // (p * q) + 1)
        rows = min(p, (config.BLOCK_N + q - 2) // q + 1)
        width = (q - 1) * phase.stride[2] + (s - 1) * abs(phase.dilation[2]) + 1
        slot = ((rows - 1) * phase.stride[1] + (r - 1) * abs(phase.dilation[1]) + 1) * width
        return cls(False, images * slot, slot, width)


class _Slot(NamedTuple):
    """A slot of the ring: units of channels; strides of the filter's rows and channels, in elements; bytes."""

    units: int
    lines: int  # of the filter
    pieces: int  # 16 bytes of a line
    line_bytes: int
    row_step: int
    channel_step: int
    w_bytes: int
    nbytes: int

    @classmethod
    def of(cls, problem: ConvProblem, config: FewPixels, units: int, pitch: int) -> _Slot:
        size, taps = problem.itemsize, math.prod(problem.filter_size)
        word = 4 // size
        channels = units * 8 * word
        if problem.direction == "fprop":  # a line has a stage's channels of a row
            line, lines = channels * taps, config.BLOCK_M
            row_step, channel_step = apart = _up_to(line, 4 * word, BANKS * word), taps
        else:  # a line has the tile's rows of a channel
            line, lines = config.BLOCK_M * taps, channels
            channel_step, row_step = apart = _up_to(line, 8, BANKS), taps
        w_bytes = lines * apart[0] * size
        return cls(units, lines, line * size // 16, apart[0] * size, row_step, channel_step, w_bytes, w_bytes + units * 32 * pitch)


class _Tile(NamedTuple):
    """A configuration's form for a problem: its phases, those with most taps first, and the shared memory of a block."""

    phases: tuple[Any, ...]
    shared: int


def _up_to(n: int, rest: int, of: int) -> int:
    """The least number from n on that has the remainder `rest` modulo `of`."""
    return n + (rest - n) % of


@lru_cache(maxsize=1024)  # the planner asks for it several times
def _tile(problem: ConvProblem, config: FewPixels) -> Any:
    """The tile with the most channels of a stage that fit shared memory, up to STEPS steps a warp; None if none fit."""
    part = ceil(ceil(problem.operand_channels * problem.itemsize, UNIT_BYTES), config.CLUSTER)
    ordered = sorted(phases(problem), key=lambda phase: -math.prod(phase.taps))
    positions = [_Positions.of(problem, config, phase) for phase in ordered]
    most = max(of.positions for of in positions)
    pitch, ring_at, taps = _up_to(most, 4, BANKS // 2), ceil(most, 32) * 128, max(math.prod(ordered[0].taps), 1)
    groups = WARPS * WARP_M // config.BLOCK_M
    sums = WARPS * WARP_M * _up_to(config.BLOCK_N, 8, BANKS) * 4
    for units in range(min(part, ceil(STEPS * groups, taps), MOST_STEPS // taps), 0, -1):
        slot = _Slot.of(problem, config, units, pitch)
        shared = max(ring_at + min(STAGES, ceil(part, units)) * slot.nbytes, sums)
        if shared + STATIC_SHARED <= MOST_SHARED:
            args = (_phase(problem, config, phase, of, slot, pitch, ring_at) for phase, of in zip(ordered, positions, strict=True))
            return _Tile(tuple(args), shared)
    return None


def _phase(
    problem: ConvProblem, config: FewPixels, phase: Phase, at: _Positions, slot: _Slot, pitch: int, ring_at: int
) -> Any:
    (_, size_h, size_w), (_, r, s), down, right = phase.size, phase.taps, phase.along(1), phase.along(2)
    filter_s, w_taps = problem.filter_size[2], math.prod(problem.filter_size)
    units, tiles_m = ceil(problem.operand_channels * problem.itemsize, UNIT_BYTES), ceil(problem.result_channels, config.BLOCK_M)
    count = problem.N * size_h * size_w
    _, out_base, _, out_h, out_w = places(problem, phase)
    line_threads = max(32 * WARPS // slot.lines, 1)
    return arguments(
        FewPixelsPhase, problem, slot, at, tiles=tiles_m * ceil(count, config.BLOCK_N), tiles_m=tiles_m, warps_m=config.BLOCK_M // WARP_M,
        units=units if r * s else 0, part=ceil(units, config.CLUSTER), stage_units=slot.units, gradient=int(problem.direction == "dgrad"),
        line_step=problem.weight_shape[1] * w_taps, line_threads=line_threads, lines_at_once=32 * WARPS // line_threads, w_taps=w_taps,
        steps=slot.units * r * s, taps=r * s, taps_s=s, tap_base=down.base * filter_s + right.base, tap_step_r=down.step * filter_s,
        tap_step_s=right.step, step_h=down.dilation, step_w=right.dilation, pixels=count, images=problem.N, plane=size_h * size_w,
        q=size_w, stride_h=down.stride, stride_w=right.stride, low_h=down.low, low_w=right.low, chunks=ring_at // 128, pitch=pitch,
        ring_at=ring_at, slot_bytes=slot.nbytes, x_at=slot.w_bytes, out_base=out_base, out_h=out_h, out_w=out_w,
    )  # fmt: skip


TAKES = Takes(
    ONE_GROUP, types(*ELEMENTS), NOT_EMPTY, TWO_AXES,
    (f"it takes filters of up to {MOST_STEPS} taps", lambda p: math.prod(p.filter_size) <= MOST_STEPS),
    (
        "a channel's part of the filter is a multiple of 16 bytes",
        lambda p: p.weight_shape[1] * math.prod(p.filter_size) * p.itemsize % 16 == 0,
    ),
    IN_32_BITS, (f"a gradient has up to {PHASES} stride phases", lambda p: count_phases(p) <= PHASES),
)  # fmt: skip
LEGAL = Tiles(
    TAKES, FewPixels,
    (f"of several phases a tile has {COLUMNS[0]} pixels", lambda p, config: config.BLOCK_N == COLUMNS[0] or len(phases(p)) == 1),
    ("what its pixels meet of all channels of a block does not fit into shared memory", lambda p, config: _tile(p, config) is not None),
    blocks=lambda p, config: _blocks(p, config), BLOCK_M=ROWS, BLOCK_N=COLUMNS, CLUSTER=CLUSTERS,
)  # fmt: skip


def schedule(problem: ConvProblem, config: FewPixels, device: Device, with_moments: bool = False) -> Schedule:
    tile = _tile(problem, config)
    args = tile.phases
    if len(args) > 1:
        args += (args[-1]._replace(tiles=0),) * (PHASES - len(args))  # empty phases fill the kernel's parameter
    defines = {
        "TYPE": ELEMENTS[problem.dtype], "PRODUCTS": products(problem), "BLOCK_N": config.BLOCK_N, "CLUSTER": config.CLUSTER,
        "PHASES": len(args),
    }  # fmt: skip
    launch = finishing("mma_few_pixels", defines, _blocks(problem, config), 32 * WARPS, args, shared=tile.shared)
    return Schedule.plain([[launch]])


def sum_order(problem: ConvProblem, config: FewPixels) -> Hashable:
    """How the sum is cut: among blocks and warps, and into stages."""
    tile = _tile(problem, config)
    return config.CLUSTER, config.BLOCK_M, tile and tile.phases[0].stage_units


def variants(device: Device) -> Iterator[VariantSet]:
    choices = {"TYPE": tuple(ELEMENTS.values()), "PRODUCTS": (1, 3), "BLOCK_N": COLUMNS, "CLUSTER": CLUSTERS, "PHASES": (1, PHASES)}
    yield VariantSet("mma_few_pixels", choices, _is_listed)


def _is_listed(d: Mapping[str, int]) -> bool:
    if d["PHASES"] > 1 and (d["BLOCK_N"] != COLUMNS[0] or d["CLUSTER"] not in PHASED_CLUSTERS):
        return False
    return is_multiplied(d)


CHOSEN_ROWS = ROWS[:2]  # tiles of 128 channels were the fastest for none of 46 problems
MOST_TILES = 132  # of the largest size: more pixels and channels fill the GPU without clusters


def configs(problem: ConvProblem, device: Device) -> Iterator[FewPixels]:
    """The configurations worth comparing for `problem`; none if it has many pixels."""
    tiles = ceil(problem.result_channels, ROWS[-1]) * ceil(problem.N * math.prod(problem.result_size), COLUMNS[-1])
    if tiles <= MOST_TILES:
        clusters = CLUSTERS if count_phases(problem) == 1 else PHASED_CLUSTERS
        legal = LEGAL.legal(problem, BLOCK_M=CHOSEN_ROWS, CLUSTER=clusters)
        yield from (config for config in legal if config.BLOCK_M < problem.result_channels + WARP_M)


def time(problem: ConvProblem, config: FewPixels, device: Device) -> float:
    """Microseconds that `config` should take: rounds of blocks, each with its loads beside its products, and its other work."""
    tile = _tile(problem, config)
    first, blocks, groups = tile.phases[0], _blocks(problem, config), WARPS * WARP_M // config.BLOCK_M
    fitting = 1 if products(problem) == 3 or 2 * (tile.shared + STATIC_SHARED) > MOST_SHARED else 2  # on a multiprocessor
    alone = max(device.multiprocessors * COST.AT_ONCE[config.CLUSTER] // MULTIPROCESSORS, 1)  # clusters
    rounds, beside = ceil(blocks, alone * fitting * config.CLUSTER), min(fitting, ceil(blocks, alone * config.CLUSTER))
    whole, rest = divmod(first.part, first.stage_units)
    steps = whole * ceil(first.stage_units * first.taps, groups) + ceil(rest * first.taps, groups)
    step = COST.STEP_CYCLES[products(problem), problem.itemsize][config.BLOCK_N]
    multiplying = steps * max(COST.WAIT, 2 * beside * step)
    loading = beside * first.part * UNIT_BYTES * first.positions * (4 // problem.itemsize) / COST.X_BYTES
    each = COST.BLOCK_CYCLES + COST.STAGE_CYCLES * ceil(first.part, first.stage_units)
    each += COST.ADDED_CYCLES * config.BLOCK_M * config.BLOCK_N * beside
    return COST.BEGIN + rounds * (each + max(multiplying, loading) + COST.NOT_OVERLAPPED * min(multiplying, loading)) / COST.CLOCK


def _blocks(problem: ConvProblem, config: FewPixels) -> int:
    tile = _tile(problem, config)
    return int(sum(phase.tiles for phase in tile.phases) * config.CLUSTER)
