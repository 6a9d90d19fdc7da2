"""wgrad with few channels in or out, from channels-last arrays as they lie (``cu/mma/few_channels_wgrad.cu``).

The arrays are float16, bfloat16 and float32. float32 takes three products of TF32, or one with ``precision="tf32"``. Taps and few
channels together are columns of a matrix product, whose sums run over the pixels of the array with more channels. Nothing is copied first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pycuda_conv.engines import split_sum
from pycuda_conv.engines.base import Config, ConvProblem, Device, KernelLaunch, VariantSet, kernel_struct
from pycuda_conv.engines.costs import costs, spread
from pycuda_conv.engines.geometry import arguments, ceil, even_parts, forward_of
from pycuda_conv.engines.limits import AMPERE, IN_32_BITS, NOT_EMPTY, ONE_GROUP, TWO_AXES, Takes, Tiles, types
from pycuda_conv.engines.schedule import INPUT, RESULT, WEIGHT, Schedule
from pycuda_conv.engines.tensor_cores import ELEMENTS, FLOAT, SHARED_BYTES, limbs, product_rate, products

THREADS, WARPS = 256, 8
BLOCKS = 2         # that share a multiprocessor
#: By the numbers that an element is split into: sixteens of a block's channels -> eights of a warp's columns. Registers hold so many
#: sums.
TILES: dict[int, dict[int, tuple[int, ...]]] = {1: {1: (2, 4), 2: (2, 3, 4), 4: (2, 3)}, 2: {1: (2, 4), 2: (2, 3)}}
WARPS_N = (1, 2, 4, 8)
GROUP = 16         # pixels of a row that a warp takes at once
WORDS = 12 * THREADS  # words of the thin array that a tile reads at the most
MOST_THIN = {1: 16, 2: 32}  # the most channels of the thin array, by the numbers of an element: with more, other engines are faster


@dataclass(frozen=True)
class FewChannelsWgrad(Config):
    """One tile of ``few_channels_wgrad.cu``.

    Sixteens of its channels, eights of a warp's columns, warps of different columns, rows and columns of pixels, and parts of the sum.
    """

    M_TILES: int = 2
    N_TILES: int = 2
    WARPS_N: int = 2
    TILE_P: int = 8
    TILE_Q: int = 16
    PARTS: int = 1


CONFIGS, LAYOUTS, RUNS_ON, TENSOR_CORES, MOST_VARIANTS = (FewChannelsWgrad,), ("CHWN",), AMPERE, True, {"cuda": 25}
COST = costs("mma.few_channels_wgrad")
FewChannelsWgradArguments = kernel_struct("few_channels_wgrad", "FewChannelsWgradArguments")


class _Axis(NamedTuple):
    """One axis: pixel i of the dense array reads i * step + low + tap * dilation of the thin one."""

    dense: int
    thin: int
    taps: int
    step: int
    low: int
    dilation: int


class _Roles(NamedTuple):
    """The arrays by their numbers of channels. If they are flipped, x is the dense one, and taps are reversed."""

    flipped: bool
    dense: int
    thin: int
    down: _Axis
    right: _Axis


def _roles(problem: ConvProblem) -> _Roles:
    forward = forward_of(problem)
    flipped = forward.K < forward.C and forward.stride == (1, 1, 1)

    def axis(i: int) -> _Axis:
        taps, dilation, pad = forward.filter_size[i], forward.dilation[i], forward.padding_before[i]
        if flipped:
            return _Axis(forward.input_size[i], forward.output_size[i], taps, 1, pad - (taps - 1) * dilation, dilation)
        return _Axis(forward.output_size[i], forward.input_size[i], taps, forward.stride[i], -pad, dilation)

    dense, thin = (forward.C, forward.K) if flipped else (forward.K, forward.C)
    return _Roles(flipped, dense, thin, axis(1), axis(2))


def _met(roles: _Roles, config: FewChannelsWgrad) -> tuple[int, int]:
    """Rows of the thin array that a tile reads, and elements of a row."""
    rows, columns = (
        (size - 1) * axis.step + (axis.taps - 1) * axis.dilation + 1
        for size, axis in ((config.TILE_P, roles.down), (config.TILE_Q, roles.right))
    )
    return rows, columns * roles.thin


def _tiles(problem: ConvProblem, config: FewChannelsWgrad) -> int:
    roles = _roles(problem)
    return forward_of(problem).N * ceil(roles.down.dense, config.TILE_P) * ceil(roles.right.dense, config.TILE_Q)


def _columns(roles: _Roles) -> int:
    return roles.down.taps * roles.right.taps * roles.thin


def _blocks(problem: ConvProblem, config: FewChannelsWgrad) -> tuple[int, int]:
    """Blocks along channels and along columns."""
    roles = _roles(problem)
    return ceil(roles.dense, 16 * config.M_TILES), ceil(_columns(roles), 8 * config.N_TILES * config.WARPS_N)


def _grid(problem: ConvProblem, config: FewChannelsWgrad) -> int:
    return math.prod(_blocks(problem, config)) * config.PARTS


def _pixel(config: FewChannelsWgrad, itemsize: int) -> int:
    """Bytes from one pixel of the dense array to the next in shared memory."""
    return 16 * config.M_TILES * itemsize + (16 if itemsize == 2 else 32)


def _shared_bytes(problem: ConvProblem, config: FewChannelsWgrad) -> int:
    """Bytes of shared memory of a block: two tiles of the dense array and what one reads, or the sums of one warp of each columns."""
    met = 4 * limbs(problem) * math.prod(_met(_roles(problem), config))
    tiles = 2 * config.TILE_P * config.TILE_Q * _pixel(config, problem.itemsize) + met
    return max(tiles, config.WARPS_N * config.M_TILES * config.N_TILES * 4 * 32 * 4 if config.WARPS_N < WARPS else 0)


def _thin(problem: ConvProblem) -> str | None:
    roles, most = _roles(problem), MOST_THIN[limbs(problem)]
    if roles.dense * problem.itemsize % 16:
        return "it loads a pixel's channels of the array that has more of them by 16 bytes"
    return None if roles.thin <= most else f"it takes at most {most} channels of the input or, without strides, of the output"


def _fits(problem: ConvProblem, config: FewChannelsWgrad) -> str | None:
    tiles, words = TILES[limbs(problem)], math.prod(_met(_roles(problem), config))
    if config.N_TILES not in tiles.get(config.M_TILES, ()):
        return f"N_TILES must be one of {tiles}, by M_TILES"
    return None if words <= WORDS else f"a tile meets {words:,} elements of the array with few channels; there is room for {WORDS:,}"


TAKES = Takes(
    ONE_GROUP, types(*ELEMENTS), NOT_EMPTY, TWO_AXES, _thin, IN_32_BITS,
)
LEGAL = Tiles(
    TAKES, FewChannelsWgrad, (f"TILE_Q must be a multiple of {GROUP}", lambda _, config: config.TILE_Q % GROUP == 0), _fits,
    ("each part has a tile", lambda p, config: config.PARTS <= _tiles(p, config)), shared=(_shared_bytes, SHARED_BYTES), blocks=_grid,
    WARPS_N=WARPS_N,
)  # fmt: skip


def schedule(problem: ConvProblem, config: FewChannelsWgrad, device: Device, with_moments: bool = False) -> Schedule:
    defines = {"TYPE": ELEMENTS[problem.dtype], "LIMBS": limbs(problem), "M_TILES": config.M_TILES, "N_TILES": config.N_TILES}
    arrays = (INPUT, WEIGHT) if _roles(problem).flipped else (WEIGHT, INPUT)  # x and dy
    launch = KernelLaunch(
        "few_channels_wgrad", defines, _grid(problem, config), THREADS, (*arrays, RESULT), (),
        shared=_shared_bytes(problem, config), arguments=_arguments(problem, config),
    )  # fmt: skip
    return split_sum.in_parts(problem, launch, config.PARTS, rounds=False)


def _arguments(problem: ConvProblem, config: FewChannelsWgrad) -> Any:
    roles, (blocks_m, blocks_n) = _roles(problem), _blocks(problem, config)
    down, right, (tile_h, tile_w) = roles.down, roles.right, _met(roles, config)
    taps, groups_q = down.taps * right.taps, config.TILE_Q // GROUP
    out = (taps, roles.dense * taps) if roles.flipped else (roles.thin * taps, taps)
    return arguments(
        FewChannelsWgradArguments, blocks_m=blocks_m, blocks_n=blocks_n, parts=config.PARTS, tiles=_tiles(problem, config),
        tiles_p=ceil(down.dense, config.TILE_P), tiles_q=ceil(right.dense, config.TILE_Q), rows=config.TILE_P, columns=config.TILE_Q,
        groups=config.TILE_P * groups_q, groups_q=groups_q, warps_n=config.WARPS_N, n=forward_of(problem).N, p=down.dense, q=right.dense,
        dense=roles.dense, pixel=roles.dense * problem.itemsize // 16, chunks=config.M_TILES * problem.itemsize, h=down.thin, w=right.thin,
        thin=roles.thin, step_h=down.step, step_w=right.step, low_h=down.low, low_w=right.low, dilation_h=down.dilation,
        dilation_w=right.dilation, tile_words=tile_h * tile_w, tile_w=tile_w, taps=taps, tap_r=down.taps, tap_s=right.taps,
        flipped=int(roles.flipped), out_m=out[0], out_c=out[1], size=math.prod(problem.result_shape),
    )  # fmt: skip


def variants(device: Device) -> Iterator[VariantSet]:
    for split, tiles in TILES.items():
        types = tuple(ELEMENTS.values()) if split == 1 else (FLOAT,)
        for m_tiles, n_tiles in tiles.items():
            yield VariantSet("few_channels_wgrad", {"TYPE": types, "LIMBS": (split,), "M_TILES": (m_tiles,), "N_TILES": n_tiles})


WIDTHS, HEIGHTS = (16, 32, 64), (1, 2, 4, 8, 16)  # columns and rows of tiles


def configs(problem: ConvProblem, device: Device) -> Iterator[FewChannelsWgrad]:
    """The configurations worth comparing for `problem`: the largest tiles that fit, and as many parts as fill the GPU."""
    roles = _roles(problem)
    for m_tiles, n_tiles, warps in _cut(roles, problem.itemsize, limbs(problem)):
        for columns in WIDTHS:
            if columns > max(ceil(roles.right.dense, GROUP) * GROUP, WIDTHS[0]):
                break
            fitting = [
                config for rows in HEIGHTS if rows < 2 * roles.down.dense
                if LEGAL.refusal(problem, config := FewChannelsWgrad(m_tiles, n_tiles, warps, rows, columns)) is None
            ]  # fmt: skip
            for config in fitting[-2:]:
                tiles, filling = _tiles(problem, config), max(BLOCKS * device.multiprocessors // math.prod(_blocks(problem, config)), 1)
                yield from (replace(config, PARTS=parts) for parts in even_parts(tiles, (ceil(filling, 2), filling)))


def _cut(roles: _Roles, itemsize: int, split: int) -> list[tuple[int, int, int]]:
    """The sixteens of channels, eights of columns and warps side by side that take the fewest instructions for 16 pixels."""
    channels, columns = ceil(roles.dense, 16), ceil(_columns(roles), 8)
    fetched = 1.5 * GROUP * roles.right.step * roles.down.step * roles.thin  # words, with those that tiles have in common

    def instructions(cut: tuple[int, int, int]) -> float:
        m, n, warps = cut
        of_group = warps * _products(m, n, itemsize, split) + _loading(fetched, GROUP * m * itemsize)
        return ceil(channels, m) * ceil(columns, n * warps) * of_group

    found = [(m, n, warps) for m, columns_of in TILES[split].items() for n in columns_of for warps in WARPS_N]
    return sorted(found, key=instructions)[:4]


def _products(m_tiles: int, n_tiles: int, itemsize: int, split: int) -> int:
    """Instructions of a warp for 16 pixels whose elements are split into `split` numbers."""
    fragments = m_tiles * (1 if itemsize == 2 else 8 * split) + 2 * n_tiles
    added = 4 * m_tiles * n_tiles if split == 2 else 0
    return COST.GROUP_WORK + itemsize // 2 * (fragments + (2 * split - 1) * m_tiles * n_tiles) + added


def _loading(words: float, loads: int) -> float:
    """Instructions of a block for `words` words of the thin array and `loads` 16-byte loads of the dense one."""
    return (COST.FETCHED * words + COST.LOADED * loads) / 32


def time(problem: ConvProblem, config: FewChannelsWgrad, device: Device) -> float:
    """Microseconds that `config` should take: the work of the multiprocessor with most blocks, or bytes; and adding the parts."""
    roles, multiprocessors, itemsize = _roles(problem), device.multiprocessors, problem.itemsize
    groups = config.TILE_P * config.TILE_Q // GROUP * config.WARPS_N  # of all warps
    steps, sums = itemsize // 2, config.M_TILES * config.N_TILES
    multiplied = products(problem) * groups * sums * steps * 16 * 8 * 16 / product_rate(device)
    words, loads = math.prod(_met(roles, config)), config.TILE_P * config.TILE_Q * config.M_TILES * itemsize
    shared = groups * steps * (4 * config.M_TILES + 3 * limbs(problem) * config.N_TILES) + (words + 4 * loads) / 32
    issued = (groups * _products(config.M_TILES, config.N_TILES, itemsize, limbs(problem)) + _loading(words, loads)) / COST.ISSUED
    busy, blocks = max(multiplied, shared, issued), ceil(_grid(problem, config), multiprocessors)  # of a multiprocessor
    at_once = min(blocks, BLOCKS)
    cycles = ceil(_tiles(problem, config), config.PARTS) * max(at_once * busy, busy + COST.TILE) + COST.BLOCK
    us = COST.BEGIN + COST.MEASURED * ceil(blocks, BLOCKS) * cycles / COST.CLOCK
    moved = problem.itemsize * (math.prod(problem.input_shape) + math.prod(problem.weight_shape))
    us = max(us, COST.BEGIN + spread(moved / COST.MEMORY, multiprocessors))
    return us + split_sum.time(problem, config.PARTS, device, rounds=False)
