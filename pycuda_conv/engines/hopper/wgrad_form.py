"""The convolution whose gradient by the filter ``cu/hopper/wgrad.cu`` computes, as its loads see it; and its tiles.

An array whose pixels are no multiple of 16 bytes is copied first, with zeros behind its channels. If x has few channels, the copy also
folds taps into channels: one row of taps, or all. Groups are packed together, so that their channels fill a row of an operand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from pycuda_conv.engines.addressing import PackedLayout, PhaseAddressing, phase_addressing
from pycuda_conv.engines.base import Config, ConvProblem
from pycuda_conv.engines.costs import MULTIPROCESSORS, costs
from pycuda_conv.engines.geometry import ceil, forward_of, phases
from pycuda_conv.engines.hopper.common import CLOCK, ROW, map_type, most_shared, pixel_cycles, stage_channels
from pycuda_conv.engines.hopper.ring import ALIGNMENT, Ring, sum_bytes
from pycuda_conv.engines.tensor_cores import limbs

PAIRED = 192  # columns of the widest tile of 64 rows with two blocks on a multiprocessor
STAGES = 12  # the most stages of a ring


@dataclass(frozen=True)
class WgradNhwc(Config):
    """One tile of ``hopper/wgrad.cu``: BLOCK_M channels of dy, BLOCK_N columns (channels of x for some taps), STAGES of its ring, and
    SPLIT runs of positions. FLIPPED: x and dy are exchanged."""

    BLOCK_M: int = 128
    BLOCK_N: int = 192
    STAGES: int = 4
    SPLIT: int = 1
    FLIPPED: bool = False


def word_elements(problem: ConvProblem) -> int:
    """Elements in 16 bytes."""
    return 16 // problem.itemsize


def factor_bytes(problem: ConvProblem) -> int:
    """Bytes of an element's limbs; 2 of NCHW arrays, which are multiplied as 16-bit numbers are, whatever their type."""
    return 2 if in_planes(problem) else problem.itemsize * limbs(problem)


def tensor_map_type(problem: ConvProblem) -> str:
    """The element type of the tensor maps: they round float32 to TF32, unless the kernel splits it."""
    return "float32" if limbs(problem) == 2 else map_type(problem)


def in_planes(problem: ConvProblem) -> bool:
    """Whether the arrays are NCHW."""
    return problem.layout == "CNHW"


def fold_taps(problem: ConvProblem, level: int) -> ConvProblem:
    """:func:`forward_of` with `level` innermost axes of taps folded into channels of x, and with as many channels as tensor loads need."""
    forward = forward_of(problem)
    if forward.groups > 1 or in_planes(problem):
        return forward

    def outer(values: tuple[int, int, int], *inner: int) -> Any:
        return *values[: 3 - level], *inner[3 - level :]

    taps = math.prod(forward.filter_size[3 - level :])
    word = word_elements(problem)
    return replace(
        forward, C=ceil(forward.C * taps, word) * word, K=ceil(forward.K, word) * word, filter_size=outer(forward.filter_size, 1, 1, 1),
        input_size=outer(forward.input_size, *forward.output_size), stride=outer(forward.stride, 1, 1, 1),
        padding_before=outer(forward.padding_before, 0, 0, 0), padding_after=outer(forward.padding_after, 0, 0, 0),
        dilation=outer(forward.dilation, 1, 1, 1),
    )  # fmt: skip


@lru_cache(maxsize=1024)
def fold_level(problem: ConvProblem) -> int:
    """How many innermost axes are folded: the number for which folding and loading take the least time."""
    forward = forward_of(problem)

    def microseconds(level: int) -> float:
        folded = fold_taps(problem, level)
        blocks = ceil(folded.C, stage_channels(problem)) * math.prod(folded.filter_size)
        loading = blocks * position_count(problem) * pixel_cycles(problem.itemsize * folded.C) / CLOCK / MULTIPROCESSORS
        size = math.prod(folded.input_shape)
        if folded.C == forward.C and not level:
            return loading
        return loading + (FORM_COST.COPY + problem.itemsize * (math.prod(forward.input_shape) + 2 * size) / FORM_COST.COPIED)

    few = not in_planes(problem) and forward.groups == 1 and forward.C < stage_channels(problem) and 0 not in forward.result_shape
    return min((0, 1, 2) if few else (0,), key=microseconds)


@lru_cache(maxsize=1024)
def as_loaded(problem: ConvProblem) -> ConvProblem:
    """The convolution as the loads see it."""
    return fold_taps(problem, fold_level(problem))


@lru_cache(maxsize=1024)
def load_form(problem: ConvProblem) -> tuple[PackedLayout, PhaseAddressing] | None:
    """The layout of x as the loads see it, and the addresses that they read; None if tensor loads can't make that."""
    forward = as_loaded(problem)
    layout = PackedLayout(True, 0, (1, 1, 1), forward.input_size, forward.C, stage_channels(problem), forward.filter_size)
    (whole,) = phases(forward)
    addressing = phase_addressing(forward, whole, layout)
    return None if addressing is None else (layout, addressing)


@lru_cache(maxsize=1024)
def flip(problem: ConvProblem) -> ConvProblem:
    """The problem with x and dy exchanged, which has the same sums with the taps in reverse. It has no strides and one group."""
    forward = forward_of(problem)

    def mirrored(padding: tuple[int, int, int]) -> Any:
        return tuple((tap - 1) * d - p for tap, d, p in zip(forward.filter_size, forward.dilation, padding, strict=True))

    return replace(
        problem, N=forward.K, K=forward.C, input_size=forward.output_size, filter_size=forward.input_size,
        padding_before=mirrored(forward.padding_before), padding_after=mirrored(forward.padding_after),
    )  # fmt: skip


def as_seen(problem: ConvProblem, config: WgradNhwc) -> ConvProblem:
    """`problem` as the tiles of `config` see it."""
    return flip(problem) if config.FLIPPED else problem


def group_pack(problem: ConvProblem) -> int:
    """Groups that are packed together: as many as fit a row of an operand with their channels of x.

    0 if no such number has a multiple of 16 bytes.
    """
    forward = forward_of(problem)
    if forward.groups == 1:
        return 1
    own = forward.C // forward.groups, forward.K // forward.groups
    fitting = range(1, max(stage_channels(problem) // own[0], 1) + 1)
    return max((n for n in fitting if forward.groups % n == 0 and not any(n * count % word_elements(problem) for count in own)), default=0)


def group_packs(problem: ConvProblem) -> int:
    """Packs of groups."""
    return problem.groups // group_pack(problem)


def reads_flat(problem: ConvProblem) -> bool:
    """Whether position n of dy reads pixel n of x, as for 1x1 filters without stride and padding."""
    form = load_form(problem)
    return form is not None and form[1].flat


def position_count(problem: ConvProblem) -> int:
    """Positions of the convolution's result."""
    forward = forward_of(problem)
    return forward.N * math.prod(forward.output_size)


# ---- tiles


def is_tall(config: WgradNhwc, size: int) -> bool:
    """Whether one consumer has all 128 rows of a tile, TALL in the kernel; `size`: bytes of an element's limbs."""
    return size == 4 and config.BLOCK_M == config.BLOCK_N == 128


def blocks_per_sm(config: WgradNhwc, size: int) -> int:
    """Blocks that share a multiprocessor."""
    return 2 if is_tall(config, size) or (config.BLOCK_M == 64 and config.BLOCK_N <= PAIRED) else 1


def consumer_columns(config: WgradNhwc) -> int:
    """Columns of a consumer: the widest tiles have two consumers side by side."""
    return config.BLOCK_N if config.BLOCK_N <= 256 else 192


def threads_of(config: WgradNhwc, size: int) -> int:
    """Threads of a block: consumers and a producer, which is a warpgroup if consumers of 128 rows need its registers, or else a warp."""
    across = config.BLOCK_N // consumer_columns(config)
    down = 2 if config.BLOCK_M == 256 else 1 if across > 1 or is_tall(config, size) else config.BLOCK_M // 64
    return 128 * down * across + (128 if config.BLOCK_M == 128 * down else 32)


def ring_of(config: WgradNhwc, size: int) -> Ring:
    """The ring of a tile, which the sums overwrite in the end. A stage has as many positions as a row has channels."""
    rows, columns = config.BLOCK_M, config.BLOCK_N
    return Ring(ROW * (rows + columns), ALIGNMENT, most_shared(blocks_per_sm(config, size)), sum_bytes(rows, columns))


def max_stages(rows: int, columns: int, size: int) -> int:
    """The most stages of a ring that shared memory has room for."""
    return ring_of(WgradNhwc(rows, columns), size).deepest(range(STAGES, 1, -1))


def image_stages(problem: ConvProblem) -> int:
    """Stages of an image's plane."""
    return ceil(math.prod(forward_of(problem).output_size), stage_channels(problem))


def stages_of(problem: ConvProblem) -> int:
    """Stages of all positions."""
    if in_planes(problem):
        return forward_of(problem).N * image_stages(problem)
    return ceil(position_count(problem), stage_channels(problem))


def stages_of_run(problem: ConvProblem, config: WgradNhwc) -> int:
    """Stages of a run."""
    return ceil(stages_of(problem), config.SPLIT)


def column_blocks(problem: ConvProblem) -> int:
    """Blocks of channels of a pack of x, for all taps."""
    return tap_blocks(problem) * math.prod(as_loaded(problem).filter_size)


def tap_blocks(problem: ConvProblem) -> int:
    """Blocks of channels of a pack of x."""
    return ceil(as_loaded(problem).C // group_packs(problem), stage_channels(problem))


def tile_counts(problem: ConvProblem, config: WgradNhwc) -> tuple[int, int]:
    """Tiles of a pack along the rows, and along the columns."""
    return ceil(problem.K // group_packs(problem), config.BLOCK_M), ceil(column_blocks(problem), config.BLOCK_N // stage_channels(problem))


FORM_COST = costs("hopper.wgrad_form")
