"""Configurations of the direct engine, one class a kernel of ``cu/direct``, and the sizes of their tiles.

The fields of a class are the kernel's tuning constants under the same names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pycuda_conv.engines.base import Config, ConvProblem, Device
from pycuda_conv.engines.geometry import ceil, taps_apart


@dataclass(frozen=True)
class Single(Config):
    """One thread a pixel, one input channel an output channel: ``direct/single.cu``."""

    THREADS: int = 128


@dataclass(frozen=True)
class Tile(Config):
    """The same as :class:`Single`, with the input tile in shared memory: ``direct/tile.cu``. ROWS divides TILE_P."""

    TILE_P: int = 8
    TILE_Q: int = 32
    ROWS: int = 1

    def halo(self, problem: ConvProblem) -> tuple[int, int]:
        """Rows and columns of the input that a tile of the result reads."""
        (_, r, s), (sh, sw), (_, dh, dw) = problem.filter_size, tile_stride(problem), problem.dilation
        return (self.TILE_P - 1) * sh + (r - 1) * dh + 1, (self.TILE_Q - 1) * sw + (s - 1) * dw + 1

    def loads(self, problem: ConvProblem) -> int:
        """Elements that the tiles of one plane load, halos and overhang included. They take most of the kernel's time."""
        _, p, q = problem.result_size
        return ceil(p, self.TILE_P) * ceil(q, self.TILE_Q) * math.prod(self.halo(problem))


@dataclass(frozen=True)
class Batched(Config):
    """One thread a pixel times BLOCK_K channels, the sum over channels in SPLIT parts: ``direct/batched.cu``."""

    THREADS: int = 128
    BLOCK_K: int = 8
    BLOCK_C: int = 4
    SPLIT: int = 1


@dataclass(frozen=True)
class Dgrad(Config):
    """dgrad as a gather, one thread a pixel times BLOCK_C channels, the sum over K in SPLIT parts: ``direct/dgrad.cu``."""

    THREADS: int = 128
    BLOCK_K: int = 4
    BLOCK_C: int = 8
    SPLIT: int = 1


@dataclass(frozen=True)
class Wgrad(Config):
    """wgrad: a block sums TAPS taps of FILTERS filters and one channel over one of SLICES of the pixels: ``direct/wgrad.cu``."""

    THREADS: int = 128
    TAPS: int = 9
    SLICES: int = 1
    FILTERS: int = 1


CONFIGS = (Single, Tile, Batched, Dgrad, Wgrad)
#: R and S of the filters whose loops texts without the layer's constants unroll, and the most bytes of shared memory with which they do.
COMMON, MOST_COMMON = 3, 16 << 10


def result_pixels(problem: ConvProblem) -> int:
    """Pixels of all images of the result."""
    return problem.N * math.prod(problem.result_size)


def flips(problem: ConvProblem) -> bool:
    """Whether direct/tile.cu can compute a dgrad: as a depthwise convolution of dy with flipped taps, with zeros between dy's pixels."""
    return problem.direction == "dgrad" and set(problem.stride) <= {1, 2, 4} and problem.K == problem.C == problem.groups


def tile_stride(problem: ConvProblem) -> tuple[int, int]:
    """stride_h and stride_w of the convolution that direct/tile.cu computes."""
    _, stride_h, stride_w = problem.stride if problem.direction == "fprop" else (1, 1, 1)
    return stride_h, stride_w


#: Defines, arguments, constants of the layer, and elements of shared memory that a block asks for.
Made = tuple[dict[str, int], Any, dict[str, int], int]


def layer_constants(problem: ConvProblem, args: Any, sizes: str, **others: int) -> dict[str, int]:
    """The defines of a kernel that is compiled for this layer: :attr:`KernelLaunch.layer`.

    `sizes` names the members of `args` that depend on the batch and on sizes of images: they are no constants.
    """
    variable = {*sizes.split(), "slope"}  # compiling a text for each slope would save nothing
    known = {name.upper(): value for name, value in args._asdict().items() if name not in variable and not name.startswith("by_")}
    return {"LAYER": 1, "AXES": problem.ndim} | known | others


def split_of(config: Config) -> int:
    """The parts of the sum, each of which is a part of the workspace."""
    if isinstance(config, Wgrad):
        return config.SLICES
    return config.SPLIT if isinstance(config, Batched | Dgrad) else 1


def unrolled_dgrad(problem: ConvProblem) -> bool:
    """Whether ``direct/dgrad.cu`` unrolls its loops over r and s where the filter of a block is small."""
    return problem.filter_size[1:] == (COMMON, COMMON) and taps_apart(problem)[1:] in ((1, 1), (2, 2))


def parts_of_sum(problem: ConvProblem, split: int, summed: int, block: int) -> dict[str, int]:
    """The members split, run and part_size of a kernel that sums over `summed` channels, `block` at a time."""
    return {"split": split, "run": ceil(ceil(summed, block), split) * block, "part_size": math.prod(problem.result_shape)}


#: Each was the best for some depthwise layer or image, of 40 tried on an H200, or loads the least for some.
TILES = (Tile(14, 64, 7), Tile(14, 32, 7), Tile(8, 16, 2), Tile(1, 256, 1))


#: Those that read integers: each has a text for every size of them.
INTEGER_TILES = TILES[:2]


def tiles_of(device: Device) -> tuple[Tile, ...]:
    """The tiles to choose from on `device`: OpenCL has one for planes and one for rows."""
    return TILES if device.backend == "cuda" else (TILES[1], TILES[-1])
