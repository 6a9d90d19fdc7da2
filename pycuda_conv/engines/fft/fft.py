"""Large filters by Fourier transforms of tiles in shared memory: ``cu/fft/tiles.cu``, ``cu/fft/range.cu``, ``cu/fft/product.cu``.

By default transforms are float64, whatever the arrays are, and each result is checked, so that every element is right (WIDE). With
``algorithm="fft"`` they are of the type of sums, and their error is relative to norms: ``docs/lab/transforms.md``.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pycuda_conv.engines.base import AMONG_TRANSFORMS, FLAG, Config, Device, KernelLaunch, Schedule, VariantSet, fastest, kernel_struct
from pycuda_conv.engines.costs import MULTIPROCESSORS, costs, spread
from pycuda_conv.engines.geometry import accumulator_bytes, arguments, bits, ceil, filter_strides, needs_64_bits
from pycuda_conv.engines.limits import NOT_EMPTY, TWO_AXES, UNIT_STEPS, Takes, Tiles
from pycuda_conv.engines.schedule import FINISH, INPUT, PACKED, RESULT, WEIGHT, WORKSPACE, Arena, check_shared, grid_refusal, shared_limit
from pycuda_conv.problem import DTYPE_CODES, ConvProblem


@dataclass(frozen=True)
class Fft(Config):
    """TILE_H x TILE_W pixels of a tile, which on a line has TILE_H * TILE_W of it: ``fft/tiles.cu``."""

    TILE_H: int = 64
    TILE_W: int = 64


CONFIGS, LAYOUTS, MOST_VARIANTS = (Fft,), ("NCHW",), {"cuda": 84}
COST = costs("fft.fft")
FftArguments = kernel_struct("fft.cuh", "FftArguments")
#: Threads of a block by its tile; and by a tile that is a line, of which the planner has one.
TILES = {(64, 64): 256, (64, 128): 256, (128, 128): 1024}
LINES = TILES | {(128, 128): 512}
LINE = (64, 128)
TILES_OF_FLOAT64, TILES_OF_FLOATS = ((64, 64), (64, 128)), ((64, 128), (128, 128))
FORWARD, BACKWARD, WHOLE = range(3)  # fft/tiles.cu's MODE
#: PARTS of fft/range.cu: parts of a tile, and of the side of a square tile.
PARTS, SIDE = 1024, 32
#: RANGE of fft/range.cu: if the norm of a pair of tiles is more than so many times that of a result's window, the result is a sum.
RANGE = 256
#: Threads of fft/product.cu, and channels and pairs of tiles of each thread.
THREADS, ROWS, COLUMNS = 128, 4, 4
#: FEW of fft/tiles.cu.
FEW = 1024
MOST_SHARED_BYTES = 227 << 10
MOST_WORKSPACE = 4 << 30
#: Filters of fewer taps are left to other engines, unless a configuration is given.
LEAST_TAPS = 100


def _wide(problem: ConvProblem) -> bool:
    """Whether transforms are float64 for arrays of another type, and results are checked."""
    return problem.dtype != "float64" and problem.algorithm != "fft"


def _number_bytes(problem: ConvProblem) -> int:
    """Bytes of a transform's real or imaginary part."""
    return 8 if _wide(problem) else accumulator_bytes(problem)


def _is_line(problem: ConvProblem) -> bool:
    """Whether the problem is 1-d along the last axis, so that a tile is a piece of a line."""
    return problem.input_size[1] == problem.output_size[1] == problem.filter_size[1] == 1


def _shared_bytes(problem: ConvProblem, config: Fft) -> int:
    """Bytes of shared memory of a block of ``fft/tiles.cu``, with its table of rotations and its list."""
    numbers = config.TILE_H * (config.TILE_W + 1) + max(config.TILE_H, config.TILE_W)
    return numbers * 2 * _number_bytes(problem) + (4 * FEW + 16 if _wide(problem) else 0)


@dataclass(frozen=True)
class _Tiles:
    """How a plane is cut into tiles; each pair of numbers is of rows and columns."""

    used: tuple[int, int]  # results of a tile
    count: tuple[int, int]  # tiles of a plane
    pairs: int  # of tiles of a channel, over all images; the last tile may be alone
    part: tuple[int, int]  # pixels of a part of a tile
    box: tuple[int, int]  # parts that lie in every window
    frequencies: int  # of a tile

    @classmethod
    def of(cls, problem: ConvProblem, config: Fft) -> _Tiles:
        """The tiles of `problem`."""
        (_, r, s), (_, p, q), frequencies = problem.filter_size, problem.result_size, config.TILE_H * config.TILE_W
        if _is_line(problem):
            used, part = (1, frequencies - s + 1), (1, frequencies // PARTS)
        else:
            used, part = (config.TILE_H - r + 1, config.TILE_W - s + 1), (config.TILE_H // SIDE, config.TILE_W // SIDE)
        box = ((r + 1) // part[0] - 1, (s + 1) // part[1] - 1)
        count = ceil(p, max(used[0], 1)), ceil(q, max(used[1], 1))
        return cls(used, count, ceil(problem.N * math.prod(count), 2), part, box, frequencies)


def _dense(problem: ConvProblem) -> bool:
    """Whether a result sums several channels, so that spectra are stored and added."""
    return problem.operand_channels > problem.groups


def _workspace_bytes(problem: ConvProblem, tiles: _Tiles) -> int:
    """Bytes of the filters' spectra, and of the tiles' if they are stored."""
    spectra = (problem.operand_channels + problem.result_channels) * tiles.pairs if _dense(problem) else 0
    return (spectra + _filters(problem)) * tiles.frequencies * 2 * _number_bytes(problem)


def _filters(problem: ConvProblem) -> int:
    """Planes of the filter."""
    return problem.K * (problem.C // problem.groups)


def _product_grid(problem: ConvProblem, tiles: _Tiles) -> int:
    rows, columns = ceil(problem.result_channels // problem.groups, ROWS), ceil(tiles.pairs, COLUMNS)
    return columns * tiles.frequencies // THREADS * rows * problem.groups


def _fits(problem: ConvProblem, config: Fft) -> str | None:
    tiles = _Tiles.of(problem, config)
    if min(tiles.used) < 1:
        return f"a filter must fit in a tile: it has {problem.filter_size[1]} x {problem.filter_size[2]} taps"
    if min(tiles.box) < 1:
        return f"a filter must be larger: it must cover one of the parts of {tiles.part[0]} x {tiles.part[1]} pixels wherever it lies"
    if _workspace_bytes(problem, tiles) > MOST_WORKSPACE:
        return f"its spectra take {_workspace_bytes(problem, tiles):,} bytes; at most {MOST_WORKSPACE:,} are taken"
    transforms = max(max(problem.operand_channels, problem.result_channels) * tiles.pairs, _filters(problem))
    return grid_refusal(max(transforms, _product_grid(problem, tiles)))


TAKES = Takes(UNIT_STEPS, TWO_AXES, NOT_EMPTY)
LEGAL = Tiles(TAKES, Fft, _fits, shared=(_shared_bytes, MOST_SHARED_BYTES), together={("TILE_H", "TILE_W"): TILES})


def schedule(problem: ConvProblem, config: Fft, device: Device, with_moments: bool = False) -> Schedule:
    """The launches of `config` for `problem`.

    On a GPU the filter's spectrum is its packed form. OpenCL launches take whole buffers, so there it lies in the workspace.
    """
    check_shared(problem, config, device, _shared_bytes(problem, config))
    tiles, size = _Tiles.of(problem, config), _number_bytes(problem)
    groups, written = problem.groups, problem.result_channels // problem.groups
    spectrum, filters = 2 * tiles.frequencies * size, _filters(problem)
    scratch = Arena(WORKSPACE)
    packed = Arena(PACKED) if device.backend == "cuda" else scratch
    (_, filter_spectra), (_, filter_flags) = packed.take(filters * spectrum), packed.take(groups * written * size)
    (_, filter_norms) = packed.take(groups * written * size)
    all_tiles = problem.N * groups * math.prod(tiles.count)
    (_, flags), (_, norms), (_, maps) = scratch.take(all_tiles * size), scratch.take(all_tiles * size), scratch.take(all_tiles * PARTS)
    kept = tiles.pairs if _dense(problem) else 0
    (_, spectra), (_, sums) = (scratch.take(channels * kept * spectrum) for channels in (problem.operand_channels, problem.result_channels))

    types = {"DTYPE": DTYPE_CODES[problem.dtype], "INDEX_64": int(needs_64_bits(problem)), "WIDE": int(_wide(problem))}
    least = bits(2.0**24 * 2.0**-53 * math.log2(tiles.frequencies), 8) if _wide(problem) else 0
    tile = {"TILE_H": config.TILE_H, "TILE_W": config.TILE_W}
    line, threads = {"LINEAR": int(_is_line(problem))}, (LINES if _is_line(problem) else TILES)[config.TILE_H, config.TILE_W]
    of_filter = _arguments(problem, tiles, True)._replace(
        written_at=filter_spectra // size, flags_at=filter_flags // size, gain=bits(1 / tiles.frequencies, size),
        norms_at=filter_norms // size,
    )
    of_image = _arguments(problem, tiles, False)._replace(
        read_at=filter_spectra // size, flags_at=flags // size, maps_at=maps // size, filter_flags_at=filter_flags // size,
        gain=bits(1.0, size), norms_at=norms // size, filter_norms_at=filter_norms // size, least=least,
    )

    def ranges(args: Any, x: int, into: int) -> KernelLaunch:
        return KernelLaunch("fft_range", types, groups * args.pairs, PARTS, (x, into), (), arguments=args)

    def tiled(mode: int, args: Any, grid: int, x: int, read_from: int, into: int, flags_in: int) -> KernelLaunch:
        buffers = x, WEIGHT, *FINISH, RESULT, read_from, into, flags_in, packed.buffer
        return KernelLaunch(
            "fft_tiles", types | tile | line | {"MODE": mode, "THREADS": threads}, grid, threads, buffers, (), arguments=args,
            shared=config.TILE_H * (config.TILE_W + 1) * 2 * size,
        )

    prepare = [
        [ranges(of_filter, WEIGHT, packed.buffer)],
        [tiled(FORWARD, of_filter, filters, WEIGHT, packed.buffer, packed.buffer, packed.buffer)],
    ]
    checked = ranges(of_image, INPUT, WORKSPACE)
    results = problem.result_channels * tiles.pairs
    if _dense(problem):
        there = of_image._replace(written_at=spectra // size)
        product = of_image._replace(read_at=spectra // size, written_at=sums // size)
        defines = types | {"FREQUENCIES": tiles.frequencies, "THREADS": THREADS, "ROWS": ROWS, "COLUMNS": COLUMNS}
        buffers = WORKSPACE, packed.buffer, WORKSPACE
        steps = [
            [checked], [tiled(FORWARD, there, problem.operand_channels * tiles.pairs, INPUT, WORKSPACE, WORKSPACE, WORKSPACE)],
            [KernelLaunch("fft_product", defines, _product_grid(problem, tiles), THREADS, buffers, (), arguments=product)],
            [tiled(BACKWARD, of_image._replace(read_at=sums // size), results, INPUT, WORKSPACE, WORKSPACE, WORKSPACE)],
        ]  # fmt: skip
    else:
        steps = [[checked], [tiled(WHOLE, of_image, results, INPUT, packed.buffer, WORKSPACE, WORKSPACE)]]
    if packed is scratch:
        return Schedule.plain([*prepare, *steps], scratch.used)
    return Schedule(prepare, steps, [*prepare, *steps], scratch.used, packed.used)


def _arguments(problem: ConvProblem, tiles: _Tiles, of_filter: bool) -> Any:
    """The arguments of launches that read the filter, or else the images."""
    (_, r, s), (_, h, w) = problem.filter_size, problem.operand_size
    groups, read, written = problem.groups, problem.operand_channels // problem.groups, problem.result_channels // problem.groups
    f_group, f_written, f_read = filter_strides(problem)
    forward, (_, pad_h, pad_w) = problem.direction == "fprop", problem.padding_before
    if of_filter:  # its "images" are the result's channels of a group
        what = {
            "image_stride": f_written, "group_stride": f_group, "channel_stride": f_read, "h": r, "w": s, "first_h": 0, "first_w": 0,
            "start": r * s - 1 if forward else 0, "row_step": -s if forward else s, "column_step": -1 if forward else 1, "tiles": 1,
            "tiles_w": 1, "all_tiles": written, "at_once": 1, "pairs": written, "box_h": 0, "box_w": 0,
        }  # fmt: skip
    else:
        count = math.prod(tiles.count)
        what = {
            "image_stride": groups * read * h * w, "group_stride": read * h * w, "channel_stride": h * w, "h": h, "w": w,
            "first_h": -pad_h if forward else pad_h - (r - 1), "first_w": -pad_w if forward else pad_w - (s - 1), "start": 0, "row_step": w,
            "column_step": 1, "tiles": count, "tiles_w": tiles.count[1], "all_tiles": problem.N * count, "at_once": 2, "pairs": tiles.pairs,
            "box_h": tiles.box[0], "box_w": tiles.box[1],
        }  # fmt: skip
    return arguments(
        FftArguments, problem, **what, channels=read, gain=0, used_h=tiles.used[0], used_w=tiles.used[1],
        parts_w=PARTS if _is_line(problem) else SIDE, part_h=tiles.part[0], part_w=tiles.part[1], per_group=written, f_group=f_group,
        f_written=f_written, f_read=f_read, flipped=int(not forward), read_at=0, written_at=0, flags_at=0, maps_at=0, filter_flags_at=0,
        norms_at=0, filter_norms_at=0, least=0,
    )  # fmt: skip


def filter_key(problem: ConvProblem, config: Fft) -> Hashable:
    """Equal for problems with the same tile and kind of line, on which the filter's spectrum depends."""
    return (
        Fft, config, problem.dtype, _wide(problem), problem.direction, _is_line(problem),
        problem.K, problem.C // problem.groups, problem.groups,
        problem.filter_size,
    )  # fmt: skip


def sum_order(problem: ConvProblem, config: Fft) -> Hashable:
    """The tile, and the type of transforms: they decide all bits."""
    return config, _wide(problem)


def variants(device: Device) -> Iterator[VariantSet]:
    """A text for each tile and type, for planes and lines, and for each mode; only on GPUs, where the planner chooses them."""
    if device.backend != "cuda":
        return
    all_types = {"DTYPE": tuple(DTYPE_CODES.values()), "INDEX_64": FLAG, "WIDE": FLAG}

    def goes(tiles: Sequence[tuple[int, int]], defines: Mapping[str, int]) -> bool:
        """Transforms of float64 arrays are float64 as they are; small tiles are for float64, large ones for floats."""
        double, wide = defines["DTYPE"] == DTYPE_CODES["float64"], defines["WIDE"]
        return not (double and wide) and not set(tiles).isdisjoint(TILES_OF_FLOAT64 if double or wide else TILES_OF_FLOATS)

    yield VariantSet("fft_range", all_types, partial(goes, tuple(TILES)))
    for tile, threads in TILES.items():
        product = {"FREQUENCIES": (math.prod(tile),), "THREADS": (THREADS,), "ROWS": (ROWS,), "COLUMNS": (COLUMNS,)}
        yield VariantSet("fft_product", all_types | product, partial(goes, (tile,)))
        for linear, of_block in ((0, threads), (1, LINES[tile]))[: 1 + (tile == LINE)]:
            shape = {"TILE_H": tile[:1], "TILE_W": tile[1:], "THREADS": (of_block,), "LINEAR": (linear,)}
            yield VariantSet("fft_tiles", all_types | shape | {"MODE": (FORWARD, BACKWARD, WHOLE)}, partial(goes, (tile,)))


def _tiles(problem: ConvProblem) -> tuple[tuple[int, int], ...]:
    """The tiles to choose from. Small ones are for float64 on devices where large ones don't fit; elsewhere they are no faster."""
    return TILES_OF_FLOAT64 if _number_bytes(problem) == 8 else TILES_OF_FLOATS


def time(problem: ConvProblem, config: Fft, device: Device) -> float:
    """Microseconds that `config` should take: launches, transforms, and spectra that go through memory."""
    tiles, size = _Tiles.of(problem, config), _number_bytes(problem)
    alone = 2 * _shared_bytes(problem, config) > shared_limit(device)
    pair = tiles.frequencies * math.log2(tiles.frequencies) * (COST.STAGE if alone else COST.TOGETHER) * (size // 4) ** 2
    read, written = (channels * tiles.pairs for channels in (problem.operand_channels, problem.result_channels))
    scale = MULTIPROCESSORS / device.multiprocessors
    spectrum = 2 * tiles.frequencies * size

    def rounds(count: float) -> float:
        """Pairs that a multiprocessor takes one after the other: a whole number, if it has room for one at a time."""
        each = count / device.multiprocessors
        return math.ceil(each) if alone else max(1.0, each)

    def transforms(count: float, share: float) -> float:
        return rounds(count) * share * pair

    us = COST.LAUNCHES + transforms(_filters(problem), 0.5) + COST.JUDGED * rounds(problem.groups * tiles.pairs)
    if not _dense(problem):
        return us + transforms(written, 1.0)
    channels = problem.operand_channels // problem.groups
    product = written * channels * spectrum * (1 / COLUMNS + 1 / ROWS)
    moved = 2 * (read + written) * spectrum
    through = product / COST.PRODUCT_MEMORY + moved / COST.MEMORY
    return us + COST.DENSE_LAUNCHES + transforms(read, 0.5) + transforms(written, 0.5) + through * scale


def configs(problem: ConvProblem, device: Device) -> Iterator[Fft]:
    """The configurations worth comparing for `problem`: every tile that fits the device, for filters of many taps."""
    if device.backend != "cuda":
        return
    if problem.algorithm != "fft" and (
        math.prod(problem.filter_size) < LEAST_TAPS or problem.dtype == "float64"  # whose transforms are right by norms alone
    ):
        return
    most = shared_limit(device)
    for tile in (LINE,) if _is_line(problem) else _tiles(problem):
        config = Fft(*tile)
        if LEGAL.refusal(problem, config) is None and _shared_bytes(problem, config) <= most:
            yield config


def choose(problem: ConvProblem, device: Device) -> tuple[float, Fft] | None:
    """The tile that should be fastest; by rule if plain cores should take longer for a filter that reads one channel."""
    found = fastest((time(problem, config, device), config) for config in configs(problem, device))
    if found is None or problem.algorithm == "fft":
        return found
    us, config = COST.CLEARLY * found[0], found[1]
    plain = spread(problem.macs / COST.PLAIN_RATE, device.multiprocessors)
    return (us * AMONG_TRANSFORMS if us < plain and not _dense(problem) else us), config
