"""Depthwise convolutions of channels-last arrays as they lie, and their gradients: limits, variants and choice."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from functools import partial

from pycuda_conv.engines.base import BY_RULE, FLAG, Config, Device, VariantSet
from pycuda_conv.engines.depthwise.nhwc_launch import (
    COLUMNS,
    LEAST_ROWS,
    SOME_TAPS,
    THREADS,
    UNROLLED,
    Depthwise,
    DepthwiseRing,
    DepthwiseStrips,
    DepthwiseWgrad,
    adds_border,
    flipped,
    grid_of,
    images_of,
    of_filter,
    partition_of,
    schedule,
    unrolled,
    unrolled_by,
    vector_choices,
    vector_of,
)
from pycuda_conv.engines.depthwise.nhwc_time import time
from pycuda_conv.engines.geometry import ceil, goes_near
from pycuda_conv.engines.schedule import grid_refusal
from pycuda_conv.problem import DTYPE_CODES, ConvProblem

__all__ = ["adds_border", "schedule", "time"]  # with what stands here: the engine

CONFIGS, LAYOUTS, MOST_VARIANTS = (Depthwise, DepthwiseStrips, DepthwiseWgrad, DepthwiseRing), ("NHWC", "CHWN"), {"cuda": 244, "opencl": 90}
CHUNKS = (64, 32, 16, 8, 4)
#: Pixels of a thread, down and across: larger tiles would not fill the GPU. The small ones, of unrolled filters, are for few pixels; the
#: even one is for gradients with a stride.
TILES = ((2, 4), (1, 4), (2, 2), (1, 1))
OPENCL_TILES = TILES[:1]  # OpenCL needs one tile, and no strips
SECTOR = 32  # bytes that memory reads at once
FULL = 2 * THREADS * 132  # threads: two blocks a multiprocessor of Hopper


def adapts(problem: ConvProblem) -> bool:
    """Whether ``depthwise/nhwc_strips.cu`` reads the image's border: one alike at both sides of an axis, no further than the other end."""
    plain = not (problem.input_dtype or problem.result_dtype)
    return plain and problem.direction == "fprop" and problem.layout == "NHWC" and goes_near(problem)


def refusal(problem: ConvProblem, config: Config) -> str | None:
    """Why `config` can't run `problem`, or None if it can."""
    if problem.border is not None and not (isinstance(config, DepthwiseStrips) and adapts(problem)):
        return "it takes no such border"
    reason = _refused(problem)
    if reason:
        return reason
    if isinstance(config, DepthwiseWgrad | DepthwiseRing) != of_filter(problem):
        return "gradients of filters and all else have a configuration of their own"
    if isinstance(config, Depthwise):
        if config.CHUNK not in CHUNKS or config.CHUNK < vector_of(problem, Depthwise):
            return f"CHUNK must be one of {CHUNKS} and no less than {vector_of(problem, Depthwise)}"
        if (config.TILE_P, config.TILE_Q) not in TILES:
            return f"(TILE_P, TILE_Q) must be one of {TILES}"
        if config.TILE_Q < 4 and (problem.itemsize > 4 or not unrolled_by(problem, Depthwise)):
            return "small tiles are of unrolled filters, and not of float64"
        if problem.direction == "dgrad" and unrolled_by(problem, Depthwise) and config.TILE_P % problem.stride[1]:
            return "TILE_P must be a multiple of the stride"
    else:
        assert isinstance(config, DepthwiseStrips | DepthwiseWgrad | DepthwiseRing)
        if config.ROWS < 1:
            return "ROWS must be at least 1"
        if isinstance(config, DepthwiseWgrad | DepthwiseRing) and config.PARTS < 1:
            return "PARTS must be at least 1"
        if isinstance(config, DepthwiseRing) and not _fits_ring(problem):
            return "it takes 16 bits and float32, square filters of 3, 5 and 7 taps, strides of 1 and 2, pixels of a multiple of 16 bytes"
        forward = problem.direction == "fprop" or flipped(problem, type(config))
        if isinstance(config, DepthwiseStrips) and not (unrolled(problem) and forward):
            return f"it takes square filters of {UNROLLED} taps, strides of 1 and 2, and of gradients by the input those of stride 1"
        if partition_of(problem, config).units > _MOST_UNITS:
            return f"it takes at most {_MOST_UNITS:,} groups of columns"
    return grid_refusal(grid_of(problem, config))


_MOST_UNITS = 2**31 - 1 - THREADS  # the kernels count units in 32 bits, with the last block's idle ones


def _refused(problem: ConvProblem) -> str | None:
    """Why no configuration runs `problem`, or None."""
    channels = problem.N if of_filter(problem) else problem.C // max(problem.groups, 1)
    if channels != 1 or problem.groups == 0:
        return "it takes one channel of the input a group"
    if problem.direction == "dgrad" and problem.K != problem.C:
        return "of gradients by the input it takes those of one channel of the output a group"
    if problem.has_depth:
        return "it takes at most two spatial axes"
    return None


def _fits_ring(problem: ConvProblem) -> bool:
    """Whether rows can arrive in shared memory: by 16 bytes, of which four threads take a word each."""
    if problem.K != problem.groups or problem.itemsize > 4 or problem.K * problem.itemsize % 16 or not unrolled(problem):
        return False
    return max(math.prod(problem.weight_shape), math.prod(problem.input_shape)) < 2**31


def sum_order(problem: ConvProblem, config: Config) -> Hashable:
    """Tiles and strips add alike, one row of the filter after the other, unless only strips rotate it. wgrad's sums are cut into strips and
    parts."""
    if isinstance(config, DepthwiseWgrad | DepthwiseRing):
        return type(config), config.ROWS, config.PARTS
    return Depthwise, flipped(problem, type(config))


def variants(device: Device) -> Iterator[VariantSet]:
    """A text for each type, vector and tile, and for each common filter."""
    on_gpu = device.backend == "cuda"
    for code in DTYPE_CODES.values():
        common = {"DTYPE": (code,), "INDEX_64": FLAG, "V": vector_choices(code, 0, Depthwise)}
        rows, columns = (tuple(dict.fromkeys(sizes)) for sizes in zip(*(TILES if on_gpu else OPENCL_TILES), strict=True))
        tile = {"TILE_P": rows, "TILE_Q": columns, "DGRAD": FLAG}
        made = partial(_is_listed, on_gpu=on_gpu)
        yield VariantSet("depthwise_nhwc", common | tile, made)
        square = {"STRIDE": (1, 2)}
        yield from (VariantSet("depthwise_nhwc", common | tile | square | {"R": (n,), "S": (n,)}, made) for n in UNROLLED)
        for size in UNROLLED:
            strips, gradients = ({"V": vector_choices(code, size, kind), "STRIDE": (1, 2)} for kind in (DepthwiseStrips, DepthwiseWgrad))
            if on_gpu:
                of_size = common | strips | {"R": (size,), "S": (size,)}
                yield VariantSet("depthwise_nhwc_strips", of_size)
                yield VariantSet("depthwise_nhwc_strips", of_size | {"BORDERED": (1,)})
            yield VariantSet("depthwise_nhwc_wgrad", common | gradients | {"TAPS_R": (size,), "TAPS_S": (size,)})
        yield VariantSet("depthwise_nhwc_wgrad", common | {"TAPS_R": SOME_TAPS[:1], "TAPS_S": SOME_TAPS[1:]})
    if on_gpu and device.capability >= (8, 0):
        ring = {"TYPE": (16, 17, 32), "TAPS": UNROLLED, "STRIDE": (1, 2)}
        yield VariantSet("depthwise_nhwc_wgrad_ring", ring)
        yield VariantSet("depthwise_nhwc_wgrad_ring", ring | {"BORDERED": (1,)})


def _is_listed(d: Mapping[str, int], on_gpu: bool) -> bool:
    """Whether a tile's kernel with these defines is ever launched."""
    size, stride, dgrad = d.get("R", 0), d.get("STRIDE", 1), bool(d["DGRAD"])
    if size and dgrad and (stride == 1 or d["TILE_P"] % stride):
        return False
    if size and d["V"] == 1 and (dgrad or d["DTYPE"] != 64):
        return False
    if d["TILE_Q"] < 4 and d["DTYPE"] == 64:
        return False
    return (d["TILE_P"], d["TILE_Q"]) in (_fitting(size, dgrad) if on_gpu else OPENCL_TILES)


def choose(problem: ConvProblem, device: Device) -> tuple[float, Config] | None:
    """The configuration by rule; if results or taps are many, matrix products may be faster."""
    found = next(configs(problem, device), None)
    if found is None:
        return None
    if device.backend == "cuda" and (problem.K != problem.groups or not unrolled_by(problem, type(found))):
        return time(problem, found, device), found
    return BY_RULE, found


def configs(problem: ConvProblem, device: Device) -> Iterator[Config]:
    """The configurations that are worth measuring for `problem`, the best first."""
    if _refused(problem):
        return

    def best(kind: Iterator[Config], most: int) -> list[Config]:
        legal = (config for config in dict.fromkeys(kind) if refusal(problem, config) is None)
        return sorted(legal, key=expected)[:most]

    def expected(config: Config) -> float:
        us = time(problem, config, device)
        return 0.0 if us is None else us  # without a model they keep their order

    if of_filter(problem):
        rings = best(_rings(problem), 3) if device.backend == "cuda" and device.capability >= (8, 0) else []
        yield from sorted([*best(_gradients(problem, device), 1 if rings else 3), *rings], key=expected)
    else:
        strips = best(_strips(problem), 2) if device.backend == "cuda" else []
        alone = strips and vector_of(problem, Depthwise) == 1 and problem.itemsize < 8  # tiles of single channels have no text
        yield from sorted([*([] if alone else best(_tiles(problem, device), 3)), *strips], key=expected)


def _fitting(size: int, dgrad: bool) -> tuple[tuple[int, int], ...]:
    """The tiles worth trying for an unrolled filter or, with `size` 0, another; `dgrad`: for dgrad that no rotated filter gives."""
    if not size:
        return TILES[1:2]
    return (TILES[0], TILES[2]) if dgrad else (TILES[1], TILES[3])  # strips are better if there are enough rows


def _tiles(problem: ConvProblem, device: Device) -> Iterator[Config]:
    """Configurations of tiles, the best first."""
    chunk, (_, p, q) = _chunk(problem), problem.result_size
    fitting = _fitting(unrolled_by(problem, Depthwise), problem.direction == "dgrad" and not flipped(problem, Depthwise))
    if device.backend != "cuda":
        fitting = OPENCL_TILES
    lanes = problem.N * ceil(problem.K, vector_of(problem, Depthwise))
    full = [(down, right) for down, right in fitting if ceil(p, down) * ceil(q, right) * lanes >= _threads(device)]
    best = next((tile for tile in full if tile[0] <= p), fitting[-1])
    narrow = max(min(chunk, SECTOR // problem.itemsize), vector_of(problem, Depthwise))  # blocks of few channels wait for fewer taps
    yield from (Depthwise(chunk if tile[1] == 4 else narrow, *tile) for tile in dict.fromkeys((best, *fitting)))


def _rows(p: int, lanes: int) -> list[int]:
    """Rows of strips that leave none much shorter than the others. `lanes` threads walk down a strip: few threads need more strips."""
    many = (strips for strips in (64, 128, 256) if p >= 8 * strips and 32 * lanes < FULL)
    return sorted({ceil(max(p, 1), strips) for strips in (1, 2, 3, 4, 6, 8, 12, 16, 32, *many)}, reverse=True)


def _strips(problem: ConvProblem) -> Iterator[Config]:
    """Configurations of strips, none lower than a tile."""
    _, p, q = problem.result_size
    lanes = problem.N * ceil(q, COLUMNS) * problem.K
    yield from (DepthwiseStrips(rows) for rows in _rows(p, lanes) if rows >= min(p, LEAST_ROWS))


def _gradients(problem: ConvProblem, device: Device) -> Iterator[Config]:
    """Configurations of wgrad. All threads of all parts but the last walk down equally many strips."""
    if not unrolled(problem):
        one = DepthwiseWgrad(4)
        rounds = partition_of(problem, one).rounds
        wanted = min(ceil(8 * device.multiprocessors, max(grid_of(problem, one), 1)), 4 * device.multiprocessors)
        yield DepthwiseWgrad(4, ceil(rounds, ceil(rounds, wanted)) if rounds else 1)
        return
    for rows in _rows(problem.filter_size[1], images_of(problem) * ceil(problem.filter_size[2], COLUMNS) * problem.K):
        rounds = partition_of(problem, DepthwiseWgrad(rows)).rounds
        for parts in dict.fromkeys(ceil(rounds, each) for each in (1, 2, 3, 4, 6, 8) if rounds):
            yield DepthwiseWgrad(rows, parts)
        yield DepthwiseWgrad(rows)


def _rings(problem: ConvProblem) -> Iterator[Config]:
    """Configurations whose rows arrive in shared memory before they are used."""
    if not _fits_ring(problem):
        return
    for rows in _rows(problem.filter_size[1], images_of(problem) * ceil(problem.filter_size[2], COLUMNS) * problem.K):
        rounds = partition_of(problem, DepthwiseRing(rows)).rounds
        yield from (DepthwiseRing(rows, parts) for parts in dict.fromkeys(ceil(rounds, each) for each in (1, 2, 3, 4, 6, 8) if rounds))


def _threads(device: Device) -> int:
    """Threads that fill the GPU: two blocks a multiprocessor."""
    return 2 * THREADS * device.multiprocessors


def _chunk(problem: ConvProblem) -> int:
    """Channels of a block: few idle threads, and rather more channels."""
    fitting = [chunk for chunk in CHUNKS if chunk >= vector_of(problem, Depthwise)]
    return min(fitting, key=lambda chunk: (ceil(problem.K, chunk) * chunk * (1 + 2 / chunk), -chunk))
