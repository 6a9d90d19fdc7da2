"""Convolutions of few channels, on tensor cores: ``cu/mma/few_inputs.cu``.

gemm k runs through the channels of a row of taps, which are contiguous in memory; in NCHW through the taps of a channel's row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from pycuda_conv.engines.base import FLAG, Config, ConvProblem, Device, KernelLaunch, VariantSet, kernel_struct
from pycuda_conv.engines.costs import bytes_moved, costs
from pycuda_conv.engines.geometry import NO_SIDES, arguments, by_axis, ceil, near_sides
from pycuda_conv.engines.limits import AMPERE, IN_32_BITS, NOT_EMPTY, Takes, Tiles, types
from pycuda_conv.engines.schedule import Schedule, finishing
from pycuda_conv.engines.tensor_cores import ELEMENTS, SHARED_BYTES, is_multiplied, products

WARPS = 8  # of a block
TILE_PIXELS = 256  # pixels of a tile
COLUMNS = (16, 32, 64, 128)  # columns of a tile that are tried
CHANNELS = (16, 32, 48, 64)  # BLOCK_N: channels of the result of a block
WORD = 4  # bytes
STEP_WORDS = 8  # words of gemm k of a step
MOST_CHANNELS = {"NHWC": 8, "NCHW": 16}  # more input channels fill the rows of other engines
MOST_OF_HALVES = 32  # the same for three products in NCHW: other engines pack arrays first, or multiply on plain cores
TRANSPOSE_BYTES = 8 * 36 * 4  # bytes of shared memory in which a warp transposes sums of eight channels
BANKS = 128  # bytes that shared memory reads at once
COPIES = (16, 8, 4)  # bytes that are copied at once


@dataclass(frozen=True)
class FewInputs(Config):
    """BLOCK_N channels of the result of a block of ``few_inputs.cu``, and COLUMNS of its tiles."""

    BLOCK_N: int = 64
    COLUMNS: int = 32


CONFIGS, LAYOUTS, RUNS_ON, TENSOR_CORES, MOST_VARIANTS = (FewInputs,), ("NHWC", "NCHW"), AMPERE, True, {"cuda": 32}
ORDER = ()  # all sum alike
COST = costs("mma.few_inputs")
FewInputsArguments = kernel_struct("few_inputs", "FewInputsArguments")


@lru_cache(maxsize=1024)  # the planner asks for it several times
def _tile(problem: ConvProblem, config: FewInputs) -> Any:
    """The tile of a configuration: what the kernel's members of these names have, its chunks of channels, and its shared memory."""
    (t, r, s), (o, p, q), channels, size = problem.filter_size, problem.result_size, _pixel(problem), problem.itemsize
    slices = t if problem.layout == "NHWC" else t * _channels(problem)  # those that a tile reads
    _, stride_h, stride_w = problem.stride if problem.direction == "fprop" else (1, 1, 1)
    _, dilation_h, dilation_w = problem.dilation
    each, rows = WORD // size, TILE_PIXELS // config.COLUMNS
    unit = next((nbytes // size for nbytes in COPIES if problem.operand_size[2] * channels * size % nbytes == 0), 1)
    shift = _low(problem)[2] * channels % unit  # tiles begin at multiples of 16 columns
    lead = shift % each
    run = channels * (s if dilation_w == 1 else 1)
    row_words = ceil(lead + run, each)
    words = slices * r * (1 if dilation_w == 1 else s) * row_words
    steps = ceil(words, STEP_WORDS)
    patch_rows = (rows - 1) * stride_h + (r - 1) * dilation_h + 1
    columns = ((config.COLUMNS - 1) * stride_w + (s - 1) * dilation_w + 1) * channels
    pitch = ceil(shift + columns + each - 1, max(unit, each)) * max(unit, each)  # the last word may have an element past the row's end
    halves = 2 if problem.layout == "NCHW" and products(problem) == 3 else 1  # the filter is kept as two halves
    table_at = steps * config.BLOCK_N * STEP_WORDS * WORD * halves
    places_at = table_at + steps * STEP_WORDS * 2 * WORD
    patch_at = ceil(places_at + slices * r * s * channels * WORD, BANKS) * BANKS
    nbytes = ceil(slices * patch_rows * pitch * size, BANKS) * BANKS + BANKS // 2  # two lanes read different banks of patch and copy
    copies = int(size == 2 and stride_w * channels % 2 == 1)
    transposing = WARPS * TRANSPOSE_BYTES if problem.layout == "NCHW" and _run(problem) < 16 // size else 0
    stages = 2 if unit * size >= WORD and patch_at + (2 + copies) * nbytes + transposing <= SHARED_BYTES else 1
    tiles_w, tiles_h = ceil(q, config.COLUMNS), ceil(p, rows)
    chunks = problem.groups * ceil(problem.result_channels // problem.groups, config.BLOCK_N)
    transpose_at = patch_at + (stages + copies) * nbytes
    return SimpleNamespace(
        rows=rows, tiles_w=tiles_w, tiles_h=tiles_h, tiles=problem.N * o * tiles_h * tiles_w, chunks=chunks, run=run, lead=lead,
        row_words=row_words, words=words, steps=steps, patch_rows=patch_rows, patch=slices * patch_rows, pitch=pitch, unit=unit,
        shift=shift, stages=stages, stage_bytes=nbytes, table_at=table_at, places_at=places_at, patch_at=patch_at,
        copy_at=copies * stages * nbytes, transposed_at=transpose_at, shared=transpose_at + transposing,
    )  # fmt: skip


def _channels(problem: ConvProblem) -> int:
    return problem.operand_channels // problem.groups


def _pixel(problem: ConvProblem) -> int:
    """Contiguous elements of an input pixel."""
    return problem.operand_channels if problem.layout == "NHWC" else 1


def _low(problem: ConvProblem) -> tuple[int, ...]:
    """Slice, row and column of the input that the first pixel reads by its first tap."""
    if problem.direction == "fprop":
        return tuple(-pad for pad in problem.padding_before)
    # dgrad is a convolution with the taps in reverse
    axes = zip(problem.padding_before, problem.filter_size, problem.dilation, strict=True)
    return tuple(pad - (taps - 1) * dilation for pad, taps, dilation in axes)


def _run(problem: ConvProblem) -> int:
    """Neighbouring elements of an NCHW result that a lane writes at once: 16 bytes, two elements or one."""
    return next(run for run in (16 // problem.itemsize, 2, 1) if problem.result_size[2] % run == 0)


def _resident(tile: Any) -> int:
    """Blocks that fit a multiprocessor."""
    return max(1, min(2, 2 * SHARED_BYTES // (tile.shared + 1024)))


def _workers(tile: Any, device: Device) -> int:
    """Blocks that share the tiles of a chunk of channels."""
    return min(tile.tiles, max(1, ceil(device.multiprocessors * _resident(tile), tile.chunks)))


TAKES = Takes(
    ("it takes arrays with their channels last, or in NCHW", lambda p: p.layout in LAYOUTS and p.direction in ("fprop", "dgrad")),
    ("with channels last it takes arrays of one group", lambda p: p.layout != "NHWC" or p.groups == 1), types(*ELEMENTS), NOT_EMPTY,
    ("it computes gradients of convolutions without stride", lambda p: p.direction == "fprop" or p.stride == (1, 1, 1)),
    (
        "taps that are apart begin at multiples of 4 bytes",
        lambda p: p.dilation[2] == 1 or p.dilation[2] * _pixel(p) * p.itemsize % WORD == 0,
    ),
    IN_32_BITS,
)  # fmt: skip
LEGAL = Tiles(
    TAKES, FewInputs, shared=(lambda problem, config: _tile(problem, config).shared, SHARED_BYTES), blocks=lambda problem,
    config: _blocks(problem, config), BLOCK_N=CHANNELS, COLUMNS=COLUMNS,
)  # fmt: skip


def border_time(source: ConvProblem, config: FewInputs) -> float:
    return float(COST.BORDERED * source.N * math.prod(source.input_size))


def adds_border(source: ConvProblem, problem: ConvProblem, config: FewInputs) -> bool:
    """Whether :func:`schedule` takes the image of `source`, which has a border, for the wider one of `problem`.

    What columns beside an image show has to lie in the same patch: so for mirrors, and filters as wide as twice the border.
    """
    if source.direction != "fprop" or source.border is None:
        return False
    beside = max(source.padding_before[2], source.padding_after[2])
    reach = (source.filter_size[2] - 1) * source.dilation[2] + 1
    return "circular" not in source.border[2] and reach > 2 * beside and LEGAL.refusal(_of_zeros(source), config) is None


def _of_zeros(source: ConvProblem) -> ConvProblem:
    """The same with zeros around its image, which lies so, and whose patches are as large."""
    return replace(source, border=None, border_value=0.0, result_dtype="")


def schedule(
    problem: ConvProblem, config: FewInputs, device: Device, with_moments: bool = False, source: ConvProblem | None = None
) -> Schedule:
    sides, seen = (near_sides(source), _of_zeros(source)) if source else (None, problem)
    return Schedule.reading(problem, lambda strides: [[_launch(seen, config, device, strides, sides)]])


def _launch(
    problem: ConvProblem, config: FewInputs, device: Device, filter_steps: tuple[int, int, int, int], sides: dict[str, int] | None
) -> KernelLaunch:
    """The launch for a filter with these strides in elements: of a group, a channel of the result, a channel of the input, a tap.

    `sides` say what stands outside of the image, if that is not zeros.
    """
    tile, forward = _tile(problem, config), problem.direction == "fprop"
    taps, channels = math.prod(problem.filter_size), _channels(problem)
    w_group, w_k, w_c, w_tap = filter_steps
    if forward:
        order, outer, inner = int(w_tap > w_c), channels * taps, 1  # FilterOrder in the kernel
    else:
        order, outer, inner = 2 + int(w_tap > w_k), config.BLOCK_N * taps, taps if w_tap <= w_k else config.BLOCK_N
    planes, pixel = problem.layout == "NCHW", _pixel(problem)
    if planes:
        wide = _run(problem)
    else:
        wide = int(problem.result_channels % (8 if problem.itemsize == 2 and config.BLOCK_N % 32 == 0 else 4) == 0)
    workers = _workers(tile, device)
    args = arguments(
        FewInputsArguments, problem, tile, workers=workers, out_d=problem.result_size[0], column_bits=config.COLUMNS.bit_length() - 1,
        k=problem.result_channels // problem.groups, tap_s=1 if problem.dilation[2] == 1 else problem.filter_size[2],
        tap_r=problem.filter_size[1], c=channels, pixel=pixel, slices=problem.filter_size[0], group_chunks=tile.chunks // problem.groups,
        w_group=w_group, w_k=w_k, w_c=w_c, w_tap=w_tap, w_order=order, outer=outer, inner=inner, filters=config.BLOCK_N * channels * taps,
        last_tap=-1 if forward else taps - 1, row_taps=tile.run // pixel, channel_words=tile.words // channels if planes else 0,
        units=tile.pitch // tile.unit, **by_axis("stride_", problem.stride if forward else (1, 1, 1)), **by_axis("low_", _low(problem)),
        wide=wide, bordered=int(sides is not None), **(sides or NO_SIDES),
    )  # fmt: skip
    defines = {"TYPE": ELEMENTS[problem.dtype], "BLOCK_N": config.BLOCK_N, "PLANES": int(planes), "PRODUCTS": products(problem)}
    return finishing("few_inputs", defines, workers * tile.chunks, 32 * WARPS, args, shared=tile.shared)


def variants(device: Device) -> Iterator[VariantSet]:
    choices = {"TYPE": tuple(ELEMENTS.values()), "BLOCK_N": CHANNELS, "PLANES": FLAG, "PRODUCTS": (1, 3)}
    yield VariantSet("few_inputs", choices, is_multiplied)


def configs(problem: ConvProblem, device: Device) -> Iterator[FewInputs]:
    """The configurations worth comparing for `problem`: the widest blocks that its channels fill; none if it has many channels."""
    most = MOST_OF_HALVES if problem.layout == "NCHW" and products(problem) == 3 else MOST_CHANNELS.get(problem.layout, 0)
    if _channels(problem) > most:
        return
    channels = problem.result_channels // problem.groups
    for block in sorted(CHANNELS, key=lambda block: (ceil(channels, block) * block, -block)):
        found = list(LEGAL.legal(problem, BLOCK_N=(block,)))
        if found:
            yield from found
            if block == 64 and problem.layout == "NCHW" and products(problem) == 3:
                # if a multiprocessor has at most one block: more, shorter blocks
                yield from (replace(one, BLOCK_N=32) for one in found if _blocks(problem, one) <= device.multiprocessors)
            return


def _blocks(problem: ConvProblem, config: FewInputs) -> int:
    """Blocks if each had a single tile."""
    tile = _tile(problem, config)
    return tile.tiles * tile.chunks


def time(problem: ConvProblem, config: FewInputs, device: Device) -> float:
    """Microseconds that `config` should take: a block's filter, and its tiles' loads, products and stores; or memory."""
    tile, eights = _tile(problem, config), config.BLOCK_N // 8
    halves = products(problem) == 3
    float_planes = problem.layout == "NCHW" and problem.itemsize == WORD
    later = 0 if float_planes else max(0, tile.steps - COST.FIRST_STEPS)
    multiplying = WARPS * (tile.steps - later + later * COST.LATER_STEPS) * (COST.STEP_CYCLES + COST.EIGHT_CYCLES * eights)
    multiplying *= COST.HALVES if halves else 1
    words = tile.patch * tile.pitch * problem.itemsize // WORD
    again = words if tile.copy_at else words // 4 if problem.itemsize == WORD and not halves else 0  # to make the copy, or to round
    loading = (tile.patch * tile.pitch // tile.unit + again) / 32 * COST.LOAD_CYCLES
    of_store = COST.STORE_CYCLES if problem.layout == "NHWC" else COST.APART_CYCLES[_run(problem)]
    storing = TILE_PIXELS // 16 * eights * (of_store + (COST.RESIDUAL_CYCLES if problem.has_residual else 0))
    workers = _workers(tile, device)
    together = ceil(workers * tile.chunks, device.multiprocessors)  # blocks of a multiprocessor
    each = COST.TILE_CYCLES + together * (multiplying + loading + storing)
    filled = together * config.BLOCK_N * _channels(problem) * math.prod(problem.filter_size) * COST.FILTER_CYCLES
    us = (ceil(tile.tiles, workers) * each + filled) / COST.CLOCK
    moved = bytes_moved(problem)
    if float_planes:
        apart = max(0, moved - COST.FLOAT_CACHED) if _run(problem) < 16 // WORD else 0
        memory = (moved - apart) / COST.FLOAT_MEMORY + apart / COST.FLOAT_APART[config.COLUMNS]
        return COST.BEGIN + max(us * COST.FLOAT_PLANES[products(problem)][together > 1], memory)
    narrow = problem.layout == "NCHW" and config.COLUMNS == 16
    return COST.BEGIN + max(us, moved / (COST.NARROW_MEMORY[_run(problem)] if narrow else COST.MEMORY))
