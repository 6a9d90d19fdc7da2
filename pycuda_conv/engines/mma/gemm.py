"""The implicit GEMM engine where warps feed the tensor cores themselves: Ampere, Ada, Blackwell (``cu/mma/gemm.cu``).

The same packed operands, products and exact path as in :mod:`pycuda_conv.engines.hopper.gemm`, which is for Hopper.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

from pycuda_conv.engines import packing
from pycuda_conv.engines.addressing import PackedLayout, PhaseAddressing, filter_sizes, packed_key, packed_layout, row_blocks
from pycuda_conv.engines.addressing import why_not as why_not_packed
from pycuda_conv.engines.base import Config, ConvProblem, VariantSet, costs, fixed, kernel_struct
from pycuda_conv.engines.geometry import arguments, by_axis, ceil, finish
from pycuda_conv.engines.hopper.ring import Ring
from pycuda_conv.engines.limits import AMPERE, Takes, Tiles
from pycuda_conv.engines.packed_product import ARITHMETICS, arithmetic, assemble, tap_numbers, written_places, written_so
from pycuda_conv.engines.packing import Operands, packs_filter_last
from pycuda_conv.engines.packing_time import overhead
from pycuda_conv.engines.range_guard import MomentsLayout
from pycuda_conv.engines.schedule import FINISH, Schedule, finishing
from pycuda_conv.engines.split_sum import splits
from pycuda_conv.engines.tensor_cores import FLOAT, SHARED_BYTES, limbs, product_rate, products
from pycuda_conv.runtime.base import BufferSlice, Device, KernelLaunch

THREADS = 256
STEP = 32  # of gemm k, in a stage
DEPTHS = (4, 3)  # stages of a ring that are tried


@dataclass(frozen=True)
class ImplicitGemm80(Config):
    """One tile of ``mma/gemm.cu``: BLOCK_M output channels, BLOCK_N pixels, STAGES of its ring, SPLIT parts of gemm k."""

    BLOCK_M: int = 128
    BLOCK_N: int = 128
    STAGES: int = 3
    SPLIT: int = 1

    packs_images: ClassVar[bool] = True


CONFIGS, LAYOUTS, RUNS_ON, TENSOR_CORES, MOST_VARIANTS = (ImplicitGemm80,), ("NCHW", "NHWC", "CNHW"), AMPERE, True, {"cuda": 137}
ORDER = ("SPLIT",)  # what the order of sums depends on
COST = costs("mma.gemm")
GemmPhase = kernel_struct("mma_gemm", "GemmPhase")


def _ring(config: ImplicitGemm80, limbs_each: int) -> Ring:
    """The ring of a tile, whose stages are 32 of gemm k. Static shared memory beside it says where the pixels lie in x."""
    return Ring(limbs_each * (config.BLOCK_M + config.BLOCK_N) * 2 * STEP, 16 * config.BLOCK_N, SHARED_BYTES)


def _warp(config: ImplicitGemm80) -> tuple[int, int]:
    """Channels and pixels of a warp's part of the tile."""
    warps = 4 if (config.BLOCK_M, config.BLOCK_N) == (128, 64) else 2
    return config.BLOCK_M // warps, config.BLOCK_N // (8 // warps)


def _x_chunks(problem: ConvProblem, packed: PackedLayout) -> int:
    """Chunks of 8 channels in a limb of the packed images."""
    return problem.N * math.prod(packed.size) * problem.groups * packed.group // 8


def _w_chunks(problem: ConvProblem, packed: PackedLayout) -> int:
    """Chunks of 8 channels in a block of 64 rows of the packed filter."""
    return 64 * limbs(problem) * row_blocks(problem, packed) * packed.load // 8


def _counts(problem: ConvProblem) -> bool:
    packed, _ = packed_layout(problem)
    blocks = problem.groups * filter_sizes(problem, packed)[0]
    return _x_chunks(problem, packed) < 2**32 and blocks * _w_chunks(problem, packed) < 2**32


def _fits(problem: ConvProblem, config: ImplicitGemm80) -> str | None:
    if config.BLOCK_N == 256 and (config.BLOCK_M != 128 or products(problem) != 1):
        return "a tile of 256 pixels has 128 rows and takes one product"
    ring, (rows, pixels) = _ring(config, limbs(problem)), _warp(config)
    staging = 8 * 16 * 4 * (rows + 4 if problem.layout == "NHWC" else pixels + 8)  # 16 rows of pixels or channels for each warp
    reason, stages = ring.refusal(config.STAGES, config.SPLIT), config.STAGES * ring.stage
    if reason is None and stages < staging:
        return f"its result passes through {staging:,} bytes of its stages; they have {stages:,}"
    return reason


TAKES = Takes(why_not_packed, ("it counts eights of channels in 32 bits", _counts))
LEGAL = Tiles(
    TAKES, ImplicitGemm80, _fits, BLOCK_M=(128, 64), BLOCK_N=(256, 128, 64), blocks=lambda problem,
    config: max(_blocks(problem, config, addressing) for addressing in packed_layout(problem)[1]),
)  # fmt: skip


def adds_border(source: ConvProblem, problem: ConvProblem, config: ImplicitGemm80) -> bool:
    return packing.adds_border(source, problem, windows=False)


def schedule(
    problem: ConvProblem, config: ImplicitGemm80, device: Device, with_moments: bool = False, source: ConvProblem | None = None
) -> Schedule:
    multiprocessors = device.multiprocessors

    def products(
        packed: PackedLayout, addressings: Sequence[PhaseAddressing], operands: Operands, target: BufferSlice, layout: MomentsLayout
    ) -> list[KernelLaunch]:
        read = operands.w_limbs, operands.x_limbs, operands.x_scales, operands.w_scales
        buffers = (*read, *FINISH, target, operands.x_tiles, operands.w_tiles)
        return [_product(problem, config, packed, addressing, buffers, operands.tiles) for addressing in addressings]

    made = assemble(problem, config.SPLIT, multiprocessors, products, source=source)
    if not packs_filter_last(problem):
        return made
    return replace(made, filter_last=assemble(problem, config.SPLIT, multiprocessors, products, filter_last=True, source=source).whole)


def _product(
    problem: ConvProblem, config: ImplicitGemm80, packed: PackedLayout, addressing: PhaseAddressing, buffers: tuple[BufferSlice, ...],
    x_tiles: int,
) -> KernelLaunch:
    phase, rows, chunks = addressing.phase, problem.result_channels, packed.group // 8
    blocks, _, channel_blocks = filter_sizes(problem, packed)
    tiles_m, tiles_pixels = _tiles(problem, config, addressing)
    args = arguments(
        GemmPhase, problem, phase, tap_numbers(packed, addressing), written_places(problem, phase), finish(problem, config.SPLIT > 1),
        tiles_m=tiles_m, splits=config.SPLIT, split_stages=ceil(ceil(math.prod(addressing.taps) * chunks, 4), config.SPLIT),
        tiles_pixels=tiles_pixels, chunks=math.prod(addressing.taps) * chunks, chunks_group=chunks, chunks_pixel=problem.groups * chunks,
        rows_group=rows // problem.groups, rows=rows, blocks_group=blocks, channel_blocks=channel_blocks,
        w_block=_w_chunks(problem, packed), piece_bits=(packed.load // 8).bit_length() - 1, x_limb=_x_chunks(problem, packed),
        **by_axis("size_", packed.size), **by_axis("stride_", addressing.stride), **by_axis("low_", addressing.low),
        pixels=problem.N * math.prod(phase.size), out_part=math.prod(problem.result_shape), scaled=int(problem.dtype == "float32"),
        x_tiles=x_tiles,
    )  # fmt: skip
    defines = arithmetic(problem, phase, config.SPLIT > 1) | {"BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N, "STAGES": config.STAGES}
    grid, shared = _blocks(problem, config, addressing), config.STAGES * _ring(config, limbs(problem)).stage
    return finishing("mma_gemm", defines, grid, THREADS, args, buffers, shared=shared)


def _tiles(problem: ConvProblem, config: ImplicitGemm80, addressing: PhaseAddressing) -> tuple[int, int]:
    """Tiles of a group along its channels, and along the pixels."""
    pixels = problem.N * math.prod(addressing.phase.size)
    return ceil(problem.result_channels // problem.groups, config.BLOCK_M), ceil(pixels, config.BLOCK_N)


def _blocks(problem: ConvProblem, config: ImplicitGemm80, addressing: PhaseAddressing) -> int:
    return math.prod(_tiles(problem, config, addressing)) * config.SPLIT * problem.groups


def filter_key(problem: ConvProblem, config: ImplicitGemm80) -> Hashable:
    return packed_key(problem)


def variants(device: Device) -> Iterator[VariantSet]:
    """A text for each tile, arithmetic and layout of results; none for Hopper, where this engine is not chosen."""
    if device.capability == (9, 0):
        return
    for rows, pixels, count in product((128, 64), (256, 128, 64), (1, 3)):
        if pixels == 256 and (rows == 64 or count == 3):
            continue
        stages = _ring(ImplicitGemm80(rows, pixels), 2 if count == 3 else 1).deepest(DEPTHS)
        tile = fixed(ImplicitGemm80(rows, pixels, stages), "SPLIT")
        yield from (VariantSet("mma_gemm", one | tile, _is_listed) for one in ARITHMETICS if one["PRODUCTS"] == (count,))


def _is_listed(d: Mapping[str, int]) -> bool:
    """Whether a product with these defines is ever launched: rare ones have few tiles."""
    parts = d["BF16"] and d["OUT"] == FLOAT
    if not d["DENSE"] and ((d["NHWC"] and d["VEC"] == 1) or parts):
        return d["BLOCK_M"] == 64 and written_so(d)
    return written_so(d) and (d["BLOCK_N"] < 256 or d["VEC"] == 4)


def configs(problem: ConvProblem, device: Device) -> Iterator[ImplicitGemm80]:
    """The configurations worth comparing for `problem`; none on Hopper, whose own engine is faster."""
    if device.capability == (9, 0):
        return
    packed, addressings = packed_layout(problem)
    steps = ceil(packed.group * math.prod(addressings[0].taps), STEP)
    for rows in (128, 64):
        if rows == 128 and problem.result_channels // problem.groups <= 64:
            continue
        for pixels in (256, 128, 64):
            stages = next((n for n in DEPTHS if LEGAL.refusal(problem, ImplicitGemm80(rows, pixels, n)) is None), 0)
            for split in splits(problem, steps // 8):
                defines = arithmetic(problem, addressings[0].phase, split > 1) | {"BLOCK_M": rows, "BLOCK_N": pixels}
                if stages and _is_listed(defines):
                    yield ImplicitGemm80(rows, pixels, stages, split)


def time(problem: ConvProblem, config: ImplicitGemm80, device: Device) -> float:
    """Microseconds that `config` should take, packing included: arithmetic, bytes through shared memory, rounds of tiles."""
    packed, addressings = packed_layout(problem)
    tile, filled = config.BLOCK_M * config.BLOCK_N, _ring(config, limbs(problem)).stage
    read = 8 * limbs(problem) * sum(_warp(config)) * 2 * STEP
    multiplying = products(problem) * tile * STEP / (COST.SUSTAINED * product_rate(device))
    step = max(multiplying, (filled + read) / COST.SHARED_RATE, filled / COST.FILL)
    cycles = 0.0
    for addressing in addressings:
        steps = ceil(packed.group * math.prod(addressing.taps), STEP)
        rounds = ceil(_blocks(problem, config, addressing), device.multiprocessors)
        cycles += rounds * (ceil(steps, config.SPLIT) * step + COST.TILE_CYCLES + tile / 8)
    return cycles / COST.CLOCK + overhead(problem, packed, config.SPLIT)
