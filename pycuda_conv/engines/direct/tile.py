"""Planes of single channels by tiles in shared memory (``cu/direct/tile.cu``): borders, integers, launch, variants and time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, replace

from pycuda_conv.engines.base import Config, Device, VariantSet, costs, kernel_struct
from pycuda_conv.engines.costs import spread
from pycuda_conv.engines.direct.configs import INTEGER_TILES, Made, Tile, flips, layer_constants, tile_stride, tiles_of
from pycuda_conv.engines.geometry import NO_SIDES, arguments, border_numbers, border_words, by_axis, ceil, near_sides, wraps
from pycuda_conv.engines.layout import rims
from pycuda_conv.engines.schedule import STATIC_SHARED_BYTES
from pycuda_conv.engines.variants import fixed
from pycuda_conv.problem import DTYPE_CODES, ConvProblem

#: What the types of integers hold that ``direct/tile.cu`` reads and writes.
RANGES = {"uint8": (0, 255), "int8": (-128, 127), "uint16": (0, 65535), "int16": (-32768, 32767)}


def adapts(problem: ConvProblem) -> bool:
    """Whether ``direct/tile.cu`` reads the image: with a border that is alike at both sides of an axis, and of integers of up to 16 bits.

    Its result may be of the image's type then. Gradients by the input are those of :func:`shown`, and of gradients that wrap.
    """
    if problem.direction == "dgrad":
        return shown(problem) or (_flips_planes(problem) and wraps(problem))
    given, wanted = problem.input_dtype, problem.result_dtype
    typed = not (given or wanted) or (problem.dtype == "float32" and given in RANGES and wanted in ("", given))
    return typed and problem.direction == "fprop" and problem.layout == "NCHW" and border_words(problem) is not None


def shown(problem: ConvProblem) -> bool:
    """Whether ``direct/tile.cu`` adds what the border shows to a gradient by the input: all that a place gets lies in its pixel's tile."""
    if problem.border is None or not _flips_planes(problem) or near_sides(problem) is None or max(map(len, rims.runs(problem))) > 2:
        return False
    axes = zip(problem.border, problem.padding_before, problem.padding_after, problem.dilation, problem.filter_size, strict=True)
    for words, before, after, dilation, taps in axes:
        reach = dilation * (taps - 1)
        if before > reach or 2 * after > reach or ("circular" in words and before + after > 0):
            return False
    return True


def _flips_planes(problem: ConvProblem) -> bool:
    """Whether ``direct/tile.cu`` may compute a gradient by planes with a border."""
    return flips(problem) and problem.layout == "NCHW" and not (problem.has_depth or problem.input_dtype or problem.result_dtype)


def has_place(problem: ConvProblem, config: Config) -> bool:
    """Whether `config` takes a problem that is adapted. A first tile has to have all pixels that the places before the image show."""
    if not isinstance(config, Tile) or not adapts(problem):
        return False
    _, rows, columns = problem.border_sizes[0]
    return not shown(problem) or (rows < config.TILE_P and columns < config.TILE_Q)


def tile_room(problem: ConvProblem, config: Tile) -> int:
    """Numbers in the shared memory of a block: the window, the filter, and what the border shows."""
    return math.prod(problem.filter_size) + math.prod(config.halo(problem)) + shown(problem) * config.TILE_P * config.TILE_Q


COST = costs("direct.direct")
TileArguments = kernel_struct("direct_tile", "TileArguments")
#: Members that depend on sizes of images.
SIZES = (
    "tiles_p tiles_q h w p q value near_h last_near_h near_w last_near_w bias_h period_h high_h sign_h fills_h "
    "bias_w period_w high_w sign_w fills_w in_shift least most side_h side_w last_side_h last_side_w first_h firsts_h last_h lasts_h "
    "first_w firsts_w last_w lasts_w"
)


def tile_launch(problem: ConvProblem, config: Tile) -> Made:
    (_, r, s), (_, p, q) = problem.filter_size, problem.result_size
    (stride_h, stride_w), (_, dil_h, dil_w), (_, pad_h, pad_w) = tile_stride(problem), problem.dilation, problem.padding_before
    flipped, apart_h, apart_w = problem.direction == "dgrad", 0, 0
    if flipped:
        pad_h, pad_w = dil_h * (r - 1) - pad_h, dil_w * (s - 1) - pad_w
        apart_h, apart_w = problem.stride[1].bit_length() - 1, problem.stride[2].bit_length() - 1
    args = arguments(
        TileArguments, problem, *_border(problem), _of_integers(problem), tiles_p=ceil(p, config.TILE_P), tiles_q=ceil(q, config.TILE_Q),
        pad_h=pad_h, pad_w=pad_w, stride_h=stride_h, stride_w=stride_w, halo_w=config.halo(problem)[1], flipped=int(flipped),
        apart_h=apart_h, apart_w=apart_w,
    )  # fmt: skip
    elements = tile_room(problem, config)
    layer = layer_constants(problem, args, SIZES)
    types = {"IN_BYTES": problem.input_itemsize, "OUT_BYTES": problem.result_itemsize if problem.result_dtype else 0}
    defines = asdict(config) | (types if problem.input_dtype else {}) | ({"SHOWN": 1} if shown(problem) else {})
    if config.TILE_P > 1 and r == s and r in (3, 5, 7) and stride_h == stride_w == dil_h == dil_w == 1:
        names = "R", "S", "STRIDE_H", "STRIDE_W", "DIL_H", "DIL_W"
        return defines | {name: layer[name] for name in names}, args, layer, elements
    return defines, args, layer, elements


def _border(problem: ConvProblem) -> Iterator[dict[str, int]]:
    """The arguments for images with a border: where it is read, and in a gradient what it shows."""
    shows = shown(problem)
    yield border_numbers(replace(problem, border=None) if shows else problem, "hw")
    yield (near_sides(problem) if shows else None) or NO_SIDES
    for prefix, sides in zip(("before_", "after_"), problem.border_sizes, strict=True):
        yield by_axis(prefix, sides)
    for axis, of_axis in zip("hw", rims.runs(problem)[1:] if shows else ((), ()), strict=True):
        (first, firsts), (last, lasts) = [*of_axis, (0, 0), (0, 0)][:2]
        yield {f"first_{axis}": first, f"firsts_{axis}": firsts, f"last_{axis}": last, f"lasts_{axis}": lasts}


def _of_integers(problem: ConvProblem) -> dict[str, int]:
    """The arguments for images and results of integers."""
    least, most = RANGES.get(problem.result_dtype, (0, 0))
    signed = problem.input_dtype.startswith("int")
    return {"in_shift": 32 - 8 * problem.input_itemsize if signed else 0, "least": least, "most": most}


def tile_variants(code: int, acc: int, common: dict[str, tuple[int, ...]], device: Device) -> Iterator[VariantSet]:
    """The texts for arrays of the type `code`, whose sums have `acc` bytes."""
    for tile in tiles_of(device):
        forms: list[dict[str, tuple[int, ...]]] = [{}]
        for taps in (3, 5, 7) if tile.TILE_P > 1 else ():
            layer = {"R": taps, "S": taps, "STRIDE_H": 1, "STRIDE_W": 1, "DIL_H": 1, "DIL_W": 1}
            if (taps * taps + (tile.TILE_P - 1 + taps) * (tile.TILE_Q - 1 + taps)) * acc <= STATIC_SHARED_BYTES:
                forms.append(fixed(layer))
        for form in forms:
            of_tile = common | fixed(tile) | form
            yield VariantSet("direct_tile", of_tile)
            yield VariantSet("direct_tile", of_tile | {"SHOWN": (1,)})
            if code == DTYPE_CODES["float32"] and tile in INTEGER_TILES:
                integers = of_tile | _INTEGERS  # a result is of float32, or of those that are read
                yield VariantSet("direct_tile", integers, lambda d: d["OUT_BYTES"] in (0, d["IN_BYTES"]))


def tile_time(problem: ConvProblem, config: Tile, device: Device) -> float:
    """Multiplications, overhang included, loads, and blocks."""
    _, p, q = problem.result_size
    planes, taps = problem.N * problem.K, math.prod(problem.filter_size)
    pixels = ceil(p, config.TILE_P) * config.TILE_P * ceil(q, config.TILE_Q) * config.TILE_Q
    blocks = ceil(p, config.TILE_P) * ceil(q, config.TILE_Q)
    multiplied = taps * (min(tile_stride(problem)[1], 2) if config.TILE_Q >= 32 else 1)  # a warp's lanes read every other bank
    rate = COST.TWO_ROWS_TAPS if config.ROWS == 2 else COST.TILE_TAPS
    of_plane = pixels * multiplied / rate + config.loads(problem) / COST.TILE_LOADS + blocks * COST.TILE_BLOCK
    alone = taps * (COST.TILE_ALONE / problem.filter_size[2] + COST.TAP_ALONE[config.ROWS])
    moved = problem.itemsize * (math.prod(problem.input_shape) + math.prod(problem.result_shape)) / COST.TILE_MEMORY
    if problem.has_residual:
        moved += problem.itemsize * math.prod(problem.result_shape) / COST.TILE_RESIDUAL
    us = max(spread(max(planes * of_plane, moved), device.multiprocessors), alone)
    if problem.border is not None:
        at_edges = blocks - max(ceil(p, config.TILE_P) - 2, 0) * max(ceil(q, config.TILE_Q) - 2, 0)
        outside = math.prod(problem.padded.input_size) - math.prod(problem.input_size)
        shows = COST.SHOWN_TAP * taps * outside if shown(problem) else 0.0
        us += spread(planes * (at_edges * config.TILE_Q * COST.TILE_EDGE + shows), device.multiprocessors)
    return COST.TILE_START + us * (1.0 if problem.K == problem.C else 2.0)  # the results of a channel each read it again


#: Bytes of images and results of integers.
_INTEGERS: dict[str, tuple[int, ...]] = {"IN_BYTES": (1, 2), "OUT_BYTES": (0, 1, 2)}
