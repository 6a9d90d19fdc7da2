"""Depthwise convolutions of channels-last arrays as they lie, and their gradients: limits, variants, choice and models of time."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from pycuda_conv.engines import split_sum
from pycuda_conv.engines.base import BY_RULE, FLAG, Config, Device, VariantSet, costs, unsupported_by
from pycuda_conv.engines.costs import MULTIPROCESSORS, spread
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
from pycuda_conv.engines.geometry import ceil, goes_near, wraps
from pycuda_conv.engines.limits import TWO_AXES, Takes, Tiles
from pycuda_conv.problem import DTYPE_CODES, ConvProblem

__all__ = ["adds_border", "schedule"]  # with what stands here: the engine

CONFIGS, LAYOUTS, MOST_VARIANTS = (Depthwise, DepthwiseStrips, DepthwiseWgrad, DepthwiseRing), ("NHWC", "CHWN"), {"cuda": 244, "opencl": 90}
CHUNKS = (64, 32, 16, 8, 4)
#: Pixels of a thread, down and across: larger tiles would not fill the GPU. The small ones, of unrolled filters, are for few pixels; the
#: even one is for gradients with a stride.
TILES = ((2, 4), (1, 4), (2, 2), (1, 1))
OPENCL_TILES = TILES[:1]  # OpenCL needs one tile, and no strips
SECTOR = 32  # bytes that memory reads at once
FULL = 2 * THREADS  # threads of a multiprocessor: two blocks


def adapts(problem: ConvProblem) -> bool:
    """Whether ``depthwise/nhwc_strips.cu`` reads the image's border: one alike at both sides of an axis, no further than the other end.

    Of gradients by the input it takes those of a gradient that wraps.
    """
    plain = not (problem.input_dtype or problem.result_dtype)
    return plain and problem.layout == "NHWC" and (goes_near(problem) if problem.direction == "fprop" else wraps(problem))


_MOST_UNITS = 2**31 - 1 - THREADS  # the kernels count units in 32 bits, with the last block's idle ones


def _fits_chunk(problem: ConvProblem, config: Depthwise) -> str | None:
    least = vector_of(problem, Depthwise)
    return None if config.CHUNK in CHUNKS and config.CHUNK >= least else f"CHUNK must be one of {CHUNKS} and no less than {least}"


TAKES = Takes(
    ("it takes one channel of the input a group", lambda p: p.groups > 0 and (p.N if of_filter(p) else p.C // p.groups) == 1),
    ("of gradients by the input it takes those of one channel of the output a group", lambda p: p.direction != "dgrad" or p.K == p.C),
    TWO_AXES,
)
_OF_ALL = (
    ("it takes no such border", lambda p, config: p.border is None or (isinstance(config, DepthwiseStrips) and adapts(p))),
    (
        "gradients of filters and all else have a configuration of their own",
        lambda p, config: isinstance(config, DepthwiseWgrad | DepthwiseRing) == of_filter(p),
    ),
)
_ROWS, _PARTS = ("ROWS must be at least 1", lambda _, config: config.ROWS >= 1), ("PARTS must be at least 1", lambda _, c: c.PARTS >= 1)
_UNITS = f"it takes at most {_MOST_UNITS:,} groups of columns", lambda p, config: partition_of(p, config).units <= _MOST_UNITS
LEGAL = {
    Depthwise: Tiles(
        TAKES, Depthwise, *_OF_ALL, _fits_chunk,
        (
            "small tiles are of unrolled filters, and not of float64",
            lambda p, config: config.TILE_Q >= 4 or (p.itemsize <= 4 and unrolled_by(p, Depthwise) > 0),
        ),
        (
            "TILE_P must be a multiple of the stride",
            lambda p, config: p.direction != "dgrad" or not unrolled_by(p, Depthwise) or config.TILE_P % p.stride[1] == 0,
        ),
        blocks=grid_of, together={("TILE_P", "TILE_Q"): TILES},
    ),
    DepthwiseStrips: Tiles(
        TAKES, DepthwiseStrips, *_OF_ALL, _ROWS,
        (
            f"it takes square filters of {UNROLLED} taps, strides of 1 and 2, and of gradients by the input those of stride 1",
            lambda p, _: unrolled(p) and (p.direction == "fprop" or flipped(p, DepthwiseStrips)),
        ),
        _UNITS, blocks=grid_of,
    ),
    DepthwiseWgrad: Tiles(TAKES, DepthwiseWgrad, *_OF_ALL, _ROWS, _PARTS, _UNITS, blocks=grid_of),
    DepthwiseRing: Tiles(
        TAKES, DepthwiseRing, *_OF_ALL, _ROWS, _PARTS,
        (
            "it takes 16 bits and float32, square filters of 3, 5 and 7 taps, strides of 1 and 2, pixels of a multiple of 16 bytes",
            lambda p, _: _fits_ring(p),
        ),
        _UNITS, blocks=grid_of,
    ),
}  # fmt: skip


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
    if device.backend == "cuda":
        us = time(problem, found, device)
        if problem.border is not None:  # every thread asks for its places
            return us + spread(COST.BORDERED * math.prod(problem.result_shape), device.multiprocessors), found
        if problem.K != problem.groups or not unrolled_by(problem, type(found)):
            return us, found
    return BY_RULE, found


def border_time(source: ConvProblem, config: Config) -> float:
    return float(COST.BORDERED_RING * math.prod(source.input_shape))


def configs(problem: ConvProblem, device: Device) -> Iterator[Config]:
    """The configurations that are worth measuring for `problem`, the best first."""
    def best(kind: Iterator[Config], most: int) -> list[Config]:
        legal = (config for config in dict.fromkeys(kind) if LEGAL[type(config)].refusal(problem, config) is None)
        return sorted(legal, key=expected)[:most]

    def expected(config: Config) -> float:
        us = time(problem, config, device)
        return 0.0 if us is None else us  # without a model they keep their order

    if of_filter(problem):
        rings = best(_in_parts(problem, DepthwiseRing), 3) if _fits_ring(problem) and unsupported_by(DepthwiseRing, device) is None else []
        yield from sorted([*best(_gradients(problem, device), 1 if rings else 3), *rings], key=expected)
    else:
        _, p, q = problem.result_size
        rows = _rows(p, problem.N * ceil(q, COLUMNS) * problem.K) if device.backend == "cuda" else []
        strips = best((DepthwiseStrips(n) for n in rows if n >= min(p, LEAST_ROWS)), 2)
        alone = strips and vector_of(problem, Depthwise) == 1 and problem.itemsize < 8  # tiles of single channels have no text
        yield from sorted([*([] if alone else best(_tiles(problem, device), 3)), *strips], key=expected)


def _fitting(size: int, dgrad: bool) -> tuple[tuple[int, int], ...]:
    """The tiles worth trying for an unrolled filter or, with `size` 0, another; `dgrad`: for dgrad that no rotated filter gives."""
    if not size:
        return TILES[1:2]
    return (TILES[0], TILES[2]) if dgrad else (TILES[1], TILES[3])  # strips are better if there are enough rows


def _tiles(problem: ConvProblem, device: Device) -> Iterator[Config]:
    """Configurations of tiles, the best first."""
    (_, p, q), chunks = problem.result_size, [chunk for chunk in CHUNKS if chunk >= vector_of(problem, Depthwise)]
    # few idle threads, and rather more channels
    chunk = min(chunks, key=lambda chunk: (ceil(problem.K, chunk) * chunk * (1 + 2 / chunk), -chunk))
    fitting = _fitting(unrolled_by(problem, Depthwise), problem.direction == "dgrad" and not flipped(problem, Depthwise))
    if device.backend != "cuda":
        fitting = OPENCL_TILES
    lanes = problem.N * ceil(problem.K, vector_of(problem, Depthwise))
    full = [(down, right) for down, right in fitting if ceil(p, down) * ceil(q, right) * lanes >= FULL * device.multiprocessors]
    best = next((tile for tile in full if tile[0] <= p), fitting[-1])
    narrow = max(min(chunk, SECTOR // problem.itemsize), vector_of(problem, Depthwise))  # blocks of few channels wait for fewer taps
    yield from (Depthwise(chunk if tile[1] == 4 else narrow, *tile) for tile in dict.fromkeys((best, *fitting)))


def _rows(p: int, lanes: int) -> list[int]:
    """Rows of strips that leave none much shorter than the others. `lanes` threads walk down a strip: few threads need more strips."""
    many = (strips for strips in (64, 128, 256) if p >= 8 * strips and 32 * lanes < FULL * MULTIPROCESSORS)
    return sorted({ceil(max(p, 1), strips) for strips in (1, 2, 3, 4, 6, 8, 12, 16, 32, *many)}, reverse=True)


def _gradients(problem: ConvProblem, device: Device) -> Iterator[Config]:
    """Configurations of wgrad."""
    if unrolled(problem):
        yield from _in_parts(problem, DepthwiseWgrad, 1)
    else:
        one = DepthwiseWgrad(4)
        rounds = partition_of(problem, one).rounds
        wanted = min(ceil(8 * device.multiprocessors, max(grid_of(problem, one), 1)), 4 * device.multiprocessors)
        yield DepthwiseWgrad(4, ceil(rounds, ceil(rounds, wanted)) if rounds else 1)


def _in_parts(problem: ConvProblem, kind: type[DepthwiseWgrad | DepthwiseRing], *more: int) -> Iterator[Config]:
    """Strips and numbers of parts, `more` among them. All threads of all parts but the last walk down equally many strips."""
    for rows in _rows(problem.filter_size[1], images_of(problem) * ceil(problem.filter_size[2], COLUMNS) * problem.K):
        rounds = partition_of(problem, kind(rows)).rounds
        parts = (ceil(rounds, each) for each in (1, 2, 3, 4, 6, 8) if rounds)
        yield from (kind(rows, count) for count in dict.fromkeys((*parts, *more)))


COST = costs("depthwise.nhwc")


def time(problem: ConvProblem, config: Config, device: Device) -> float:
    """Microseconds that `config` should take, roughly.

    They are those of what is read and written once, and of the instructions of the multiprocessor with most blocks. In float64 and in
    wgrad neither hides the other, and both take longer if blocks do not fill the GPU.
    """
    waits = 0.0  # microseconds that a thread waits, for one tap after another
    if isinstance(config, Depthwise) and not (unrolled_by(problem, Depthwise) and problem.K == problem.groups):
        waits = math.prod(problem.filter_size) * (COST.TAP_WAIT + COST.ELEMENT_WAIT * config.TILE_P * config.TILE_Q)
    strips = isinstance(config, DepthwiseStrips) and unrolled_by(problem, DepthwiseStrips)
    if problem.K != problem.groups and not of_filter(problem) and not strips:  # threads load one number at a time
        singly = max(problem.macs / COST.SINGLY, math.prod(problem.result_shape) / COST.SINGLY_WRITTEN)
        return COST.SINGLY_BEGIN + max(waits, spread(singly, device.multiprocessors))
    if not unrolled_by(problem, type(config)):  # its loops take as long as a 9x9 filter's were measured to take
        # a load of one channel takes as long
        narrow = vector_choices(DTYPE_CODES[problem.dtype], 0, type(config))[0] / vector_of(problem, type(config))
        loops = COST.LOOPS_OF_FILTER / (1 + FEW_TAPS / math.prod(problem.output_size)) if of_filter(problem) else COST.LOOPS
        return 3 + max(waits, spread(narrow * problem.macs / loops, device.multiprocessors))
    if isinstance(config, DepthwiseRing):
        return _ring_time(problem, config, device)
    work = _work(problem, config)
    multiprocessors, blocks = device.multiprocessors, max(grid_of(problem, config), 1)
    if isinstance(config, DepthwiseStrips | Depthwise) and problem.dtype != "float64":
        kind, each = type(config).__name__, max(1.0, blocks / multiprocessors)
        together = min(each, work.blocks)  # each block hides the latency of the others
        rate = min(COST.MOST[kind], COST.FIRST[kind] * together)
        busy = each * work.instructions / rate / COST.CLOCK  # each scheduler has a warp of the block
        moving = spread(problem.bytes / COST.MEMORY[kind], multiprocessors)
        us = (busy ** COST.HIDDEN[kind] + moving ** COST.HIDDEN[kind]) ** (1 / COST.HIDDEN[kind])
        return float(COST.BEGIN[kind] + us + work.steps * COST.STEP[kind] / together)
    at_once = work.blocks * multiprocessors
    rounds = blocks / at_once
    if isinstance(config, DepthwiseWgrad) and rounds > 1:  # blocks are long and equal, so the last round takes as long as others
        blocks = ceil(blocks, at_once) * at_once
    us = problem.bytes / COST.OTHER_MEMORY + spread(blocks * THREADS * work.instructions / COST.OTHER_ISSUED, multiprocessors)
    us = COST.OTHER_BEGIN + us / min(1.0, rounds) + work.steps * COST.OTHER_STEP
    if isinstance(config, DepthwiseStrips):
        us *= COST.FLOAT64_STRIPS
    return us + split_sum.time(problem, config.PARTS, device) if isinstance(config, DepthwiseWgrad) else us


def _ring_time(problem: ConvProblem, config: DepthwiseRing, device: Device) -> float:
    """Microseconds that a ring should take: memory, or the multiprocessors' instructions."""
    size, stride, vector, (_, p, _) = unrolled(problem), problem.dilation[1], vector_of(problem, DepthwiseRing), problem.filter_size
    cut, rows, blocks, sums = partition_of(problem, config), min(config.ROWS, p), grid_of(problem, config), size * size * vector
    fit = 2 if sums > 64 else 3 if sums >= 50 else 4  # blocks that fit a multiprocessor
    loaded = 1 + (vector if vector > 1 else 0)  # instructions to load and unpack a word from shared memory
    steps = (rows - 1) * stride + size
    inside = min(steps, problem.input_size[1])  # rows of x that are no padding
    product = COLUMNS * sums / stride + ((COLUMNS - 1) * stride + size) * loaded
    cycles = cut.rounds * (inside * product + steps * (COST.RING_STEP + COLUMNS / stride * loaded)) + COST.RING_SUM * sums + COST.RING_END
    full, rest = divmod(ceil(blocks, device.multiprocessors), fit)
    busy = full * fit + (max(rest, COST.ALONE) if rest else 0)
    us = COST.RING_BEGIN + max(COST.ISSUED * busy * cycles / COST.CLOCK, problem.bytes / COST.RING_MEMORY)
    return us + split_sum.time(problem, config.PARTS, device, rounds=False)


FEW_TAPS = 4  # wgrad's pixels take at least as long as so many taps: 1x1x1 filters took 45 us on an H100, 9 by their multiplications


class _Work(NamedTuple):
    """The work of a thread."""

    blocks: int  # blocks that fit a multiprocessor
    steps: int  # one after the other, each waiting for memory
    instructions: float


def _work(problem: ConvProblem, config: Config) -> _Work:
    """The work of a thread of `config` for a filter whose loops are unrolled."""
    size, vector = unrolled(problem), vector_of(problem, type(config))
    unpacked = vector if problem.itemsize == 2 else 0
    parts = 0 if problem.itemsize == 2 else 1  # partial sums, of rows of the filter, that are added
    if isinstance(config, DepthwiseWgrad):
        stride, (_, p, _) = problem.dilation[1], problem.filter_size
        cut, rows = partition_of(problem, config), min(config.ROWS, p)
        read = (COLUMNS - 1) * stride + size
        loads = (stride * read + COLUMNS) * (COST.LOADED + unpacked)
        row = 1.0 * COLUMNS * vector * size * size + loads + 15 * stride + COLUMNS * vector * size
        steps = cut.rounds * ((rows - 1) * stride + size)
        return _Work(4 if size == 3 else 3, steps, cut.rounds * (COST.START // 2 + rows * row) + 12 * size * size * vector)
    stride, (_, p, _) = problem.stride[1], problem.result_size
    if isinstance(config, DepthwiseStrips):
        rows, columns = config.ROWS, COLUMNS
    else:
        assert isinstance(config, Depthwise)
        rows, columns = config.TILE_P, config.TILE_Q
    rows, taps = min(rows, p), float(size * size)
    if problem.direction == "dgrad" and stride == 2:
        steps, read, taps = rows // stride + size // stride, columns // stride + size // stride, taps / stride**2
    else:
        steps, read = (rows - 1) * stride + size, (columns - 1) * stride + size
    products, beside = columns * vector * (taps + parts * size), columns * (4 * vector + COST.STORED)
    loading = steps * (read * (COST.LOADED + unpacked) + 15)
    wide = size == 7 or size * vector > 12 or problem.dtype == "float64"
    wide = wide or (problem.dtype == "float32" and stride == 1 and (size, vector) == (3, 4))
    blocks = 3 if wide and isinstance(config, DepthwiseStrips) else 4
    if problem.dtype == "float64":
        return _Work(blocks, steps, COST.START + loading + rows * (products + beside))
    if isinstance(config, Depthwise):
        waits = ceil(steps, 3) if config.TILE_Q < 4 else steps  # a small tile's rows are under way together
        return _Work(blocks, waits, COST.OF_TILES * (loading + rows * (products + beside)))
    met = rows if size == 5 and vector == 4 else steps / stride  # rows of sums that are met; some of the others lie outside the strip
    return _Work(blocks, steps, COST.OF_STRIPS + COST.OF_OTHERS * (loading + rows * beside) + met * products)
