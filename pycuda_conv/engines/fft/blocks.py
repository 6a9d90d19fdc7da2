"""Large filters by Fourier transforms in float64 of blocks of images, lines and volumes: ``cu/fft/blocks_rows.cu`` and those beside it.

Each result is checked, and summed where the transform may not have it right: ``cu/fft/blocks.cuh`` says how.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import combinations_with_replacement, product
from typing import Any

from pycuda_conv.engines.base import BY_RULE, FLAG, Config, Device, KernelLaunch, VariantSet, fastest, kernel_struct
from pycuda_conv.engines.costs import costs, spread
from pycuda_conv.engines.geometry import NO_SIDES, arguments, bits, by_axis, ceil, filter_strides, near_sides, needs_64_bits
from pycuda_conv.engines.limits import NOT_EMPTY, UNIT_STEPS, Takes, Tiles
from pycuda_conv.engines.schedule import INPUT, OPERANDS, PACKED, WEIGHT, WORKSPACE, Arena, Schedule, grid_refusal, shared_limit
from pycuda_conv.problem import DTYPE_CODES, ConvProblem


@dataclass(frozen=True)
class BlockFft(Config):
    """Blocks of LENGTH_D x LENGTH_H x LENGTH_W pixels; of a line, of LENGTH_H * LENGTH_W."""

    LENGTH_H: int = 576
    LENGTH_W: int = 576
    LENGTH_D: int = 1

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Of transforms along the depth, columns and rows; 1 for none."""
        return self.LENGTH_D, self.LENGTH_H, self.LENGTH_W


CONFIGS, LAYOUTS, MOST_VARIANTS, BY_IMAGE = (BlockFft,), ("NCHW",), {"cuda": 96}, True
COST = costs("fft.blocks")
BlocksArguments = kernel_struct("blocks.cuh", "BlocksArguments")
#: blocks.cuh's BATCH, the largest first; its MASKS, SEGMENTS, ENTRY. By BATCH, threads of a block, and blocks whose registers fit a
#: multiprocessor at once.
BATCHES = 8, 4, 2
MASKS, SEGMENTS, ENTRY = 8, 64, 4
SHAPES = {8: ((192, 3), (256, 2), (128, 4)), 4: ((192, 3), (256, 2), (512, 1)), 2: ((512, 1),)}
FORWARD, WHOLE, BACKWARD = range(3)  # blocks_columns.cu's MODE
OF_PAIR, OF_FILTER = 1, 2  # its notes
#: Threads of the launches without transforms, and of all on OpenCL; numbers that a block has room for there, or more: few texts serve.
SMALL, ROOM = 256, 1 << 14
#: Numbers of a complex double, and bytes; shared memory of a block besides.
NUMBERS, BYTES, FIXED_BYTES = 2, 16, 5 << 10
#: Factors of a length between its first and last, which are 8; the shortest and the longest length.
FACTORS = 9, 8, 5, 4, 3, 2
SHORTEST, LONGEST = 64, 6912
#: Entries of the list of results that may be off; blocks of the launch that sums them.
MOST_LISTED, SUMS_GRID = 1 << 18, 264
#: Bytes of pairs that a row of launches takes at once; of the filters' spectra.
AT_ONCE, MOST_SPECTRA = 1 << 30, 1 << 30
#: Filters of fewer taps, and of lines, are left to other engines, unless a configuration is given.
LEAST_TAPS, LEAST_OF_LINE = 100, 2048


@cache
def factors(length: int) -> tuple[int, ...] | None:
    """The fewest factors of a length between the first and the last, or None if it is no length."""
    if length % SEGMENTS or not SHORTEST <= length <= LONGEST:
        return None
    for count in range(5):
        for found in combinations_with_replacement(FACTORS, count):
            if math.prod(found) == length // SEGMENTS:
                return found
    return None


def _batch(config: BlockFft, most_shared: int) -> int:
    """Transforms that a block of threads has at once: 8 where two blocks fit a multiprocessor, else at most 4; 0 if not even 2 fit."""
    for batch in BATCHES:
        if _shared_bytes(config, batch) * (2 if batch == 8 else 1) <= most_shared:
            return batch
    return 0


def _shared_bytes(config: BlockFft, batch: int) -> int:
    """Shared memory of a block of threads, with what is not dynamic."""
    return max(config.lengths) * batch * BYTES + FIXED_BYTES


def _passes(length: int, batch: int, threads: int) -> float:
    """Passes of a transform, by the share of threads that have something to do in the first and the last."""
    work = batch * length // 8
    return (2 + len(factors(length) or ())) * ceil(work, threads) * threads / work


def _threads(config: BlockFft, batch: int) -> int:
    """Threads of a block: so that few are idle, and many fit a multiprocessor."""

    def busy(shape: tuple[int, int]) -> float:
        threads, registers = shape
        fit = min(MULTIPROCESSOR_BYTES // _shared_bytes(config, batch), registers)
        lengths = [length for length in config.lengths if length > 1]
        return fit * threads * sum(1 / _passes(length, batch, threads) for length in lengths)

    return max(SHAPES[batch], key=busy)[0]


def _is_line(problem: ConvProblem) -> bool:
    """Whether the problem is 1-d along the last axis, so that a block is a piece of a line."""
    return not problem.has_depth and problem.input_size[1] == problem.output_size[1] == problem.filter_size[1] == 1


def _filters(problem: ConvProblem) -> int:
    """Planes of the filter."""
    return problem.K * (problem.C // problem.groups)


@dataclass(frozen=True)
class _Blocks:
    """How an image is cut into blocks; triples of numbers are of planes, rows and columns."""

    used: tuple[int, int, int]  # results of a block
    count: tuple[int, int, int]  # blocks of an image
    each: int  # their number, even where no pair may be of two images: then the last block may lie outside
    pairs: int  # of blocks of a channel, over all images; the last block may be alone

    @classmethod
    def of(cls, problem: ConvProblem, config: BlockFft) -> _Blocks:
        """The blocks of `problem`."""
        d, h, w = config.lengths
        lengths = (1, 1, h * w) if _is_line(problem) else (d, h, w)
        used_d, used_h, used_w = (n - taps + 1 for n, taps in zip(lengths, problem.filter_size, strict=True))
        o, p, q = problem.result_size
        count = ceil(o, max(used_d, 1)), ceil(p, max(used_h, 1)), ceil(q, max(used_w, 1))
        each = math.prod(count)
        each += each % 2 if problem.batch_invariant else 0
        return cls((used_d, used_h, used_w), count, each, ceil(problem.N * each, 2))


def _fits(problem: ConvProblem, config: BlockFft) -> str | None:
    for length in config.lengths[not problem.has_depth :]:
        if factors(length) is None:
            return f"a length must be 64 times a product of 2 to 5, 8 and 9, from {SHORTEST} to {LONGEST}, not {length}"
    if config.LENGTH_D > 1 and not problem.has_depth:
        return f"LENGTH_D must be 1 where there is no depth, not {config.LENGTH_D}"
    blocks = _Blocks.of(problem, config)
    if min(blocks.used) < 1:
        return f"a filter must fit in a block: it has {' x '.join(map(str, problem.filter_size))} taps"
    spectra = _filters(problem) * math.prod(config.lengths) * BYTES
    if spectra > MOST_SPECTRA:
        return f"its filters' spectra take {spectra:,} bytes; at most {MOST_SPECTRA:,} are taken"
    return grid_refusal(max(_filters(problem), problem.result_channels * blocks.pairs) * config.LENGTH_D * max(config.lengths))


TAKES = Takes(UNIT_STEPS, ("it takes groups of which one channel is read", lambda p: p.operand_channels <= p.groups), NOT_EMPTY)
LEGAL = Tiles(TAKES, BlockFft, _fits)


def adds_border(source: ConvProblem, problem: ConvProblem, config: BlockFft) -> bool:
    return source.direction == "fprop"


def schedule(
    problem: ConvProblem, config: BlockFft, device: Device, with_moments: bool = False, source: ConvProblem | None = None
) -> Schedule:
    """The launches for `problem`; with `source` they read its image instead, and find its border.

    On a GPU the filters' spectra are their packed form. OpenCL launches take whole buffers, so there they lie in the workspace.
    """
    on_gpu = device.backend == "cuda"
    batch = _batch(config, shared_limit(device)) if on_gpu else BATCHES[0]
    if not batch:
        most = shared_limit(device)
        raise ValueError(f"{config} can't run {problem}: two rows need more than the {most:,} bytes of shared memory of a block")
    blocks, filters, written = _Blocks.of(problem, config), _filters(problem), problem.result_channels
    of_block, longest, threads = math.prod(config.lengths), max(config.lengths), _threads(config, batch) if on_gpu else SMALL

    scratch = Arena(WORKSPACE)
    packed = Arena(PACKED) if on_gpu else scratch

    def place(arena: Arena, numbers: int) -> int:
        """Room for so many doubles: where it begins, in doubles."""
        return arena.take(8 * numbers)[1] // 8

    of_filter, of_image = (_arguments(problem, config, blocks, batch, one, source) for one in (True, False))
    turns_at = {length: place(packed, NUMBERS * length) for length in dict.fromkeys(config.lengths[config.LENGTH_D == 1 :])}
    packed_places = {
        "turns_w": turns_at[config.LENGTH_W], "filters_at": place(packed, NUMBERS * filters * of_block),
        "filter_norms_at": place(packed, filters),
    }  # fmt: skip
    of_filter = of_filter._replace(
        to_at=place(packed, NUMBERS * filters * of_filter.rows * config.LENGTH_W), part_norms_at=place(packed, filters * of_filter.parts),
        masks_at=place(packed, filters * of_filter.parts * MASKS // 2), **packed_places,
    )  # fmt: skip
    read, several = problem.groups, written > problem.groups  # several filters read a pair's transforms, which then stay
    at_once = min(blocks.pairs, max(1, AT_ONCE // ((read + several * written) * of_block * BYTES)))
    rows_at = place(scratch, NUMBERS * read * at_once * of_block)
    made_at = place(scratch, NUMBERS * written * at_once * of_block) if several else rows_at
    listed = min(MOST_LISTED, math.prod(problem.result_shape))
    of_image = of_image._replace(
        to_at=rows_at, part_norms_at=place(scratch, read * at_once * of_image.parts),
        masks_at=place(scratch, read * at_once * of_image.parts * MASKS // 2), norms_at=place(scratch, read * at_once),
        list_at=place(scratch, ENTRY * listed), count_at=place(scratch, 1), most=listed, sums_grid=min(SUMS_GRID, ceil(listed, 8)),
        **packed_places,
    )  # fmt: skip

    index, dtype = {"INDEX_64": int(needs_64_bits(problem))}, {"DTYPE": DTYPE_CODES[problem.dtype]}
    of_doubles, fixed = {"DTYPE": DTYPE_CODES["float64"]}, {"BATCH": 8, "THREADS": SMALL}
    shape = {"BATCH": batch, "THREADS": threads} | ({} if on_gpu else {"ROOM": max(ROOM, 1 << (longest * batch - 1).bit_length())})
    shared = longest * batch * BYTES if on_gpu else 0
    linear = {"LINEAR": int(_is_line(problem))}

    def rows(args: Any, planes: int, x: int, into: int) -> list[KernelLaunch]:
        grid, buffers = planes * args.pairs * args.parts, (x, packed.buffer, into)
        return [KernelLaunch("fft_blocks_rows", dtype | index | shape, grid, threads, buffers, (), arguments=args, shared=shared)]

    def columns(mode: int, args: Any, planes: int, buffer: int) -> list[KernelLaunch]:
        grid, buffers = planes * args.pairs * args.lines, (buffer, packed.buffer, packed.buffer, buffer)
        defines = of_doubles | index | shape | linear | {"MODE": mode}
        return [KernelLaunch("fft_blocks_columns", defines, grid, threads, buffers, (), arguments=args, shared=shared)]

    def along(args: Any, axis: int, needless: int = 0, **more: int) -> Any:
        """The arguments of blocks_columns.cu for an axis: 0 of the depth, 1 of columns; the first `needless` lines of a group stay."""
        d, h, _ = config.lengths
        length, found = config.lengths[axis], factors(config.lengths[axis]) or ()
        of_group, step, apart = (d, h, 1) if axis else (h, 1, h)
        numbers = {
            "axis_length": length, "axis_eighth": length // 8, "axis_factors": _packed_factors(found), "axis_count": len(found),
            "apart": apart, "lines": args.groups * (of_group - needless), "lines_of_group": of_group - needless, "line_step": step,
            "rows_read": args.rows, "rows": d * h, "there": args.rows if d == 1 else length,
            "needed": 0 if args.linear else problem.filter_size[axis] - 1, "first_line": needless, "notes": 0,
            "turns_axis": turns_at[length], "from_at": args.to_at,
        }  # fmt: skip
        return arguments(BlocksArguments, args, **numbers | more)

    operands = OPERANDS
    steps = []
    prepare = [
        [KernelLaunch("fft_blocks_turns", of_doubles | {"INDEX_64": 0} | fixed, ceil(n, SMALL), SMALL, (packed.buffer,), (),
                      arguments=of_filter._replace(axis_length=n, turns_axis=at))]
        for n, at in turns_at.items()
    ]  # fmt: skip
    prepare.append(rows(of_filter, problem.groups, WEIGHT, packed.buffer))
    deep = config.LENGTH_D > 1
    if deep:
        prepare.append(columns(FORWARD, along(of_filter, 1, notes=OF_FILTER), problem.groups, packed.buffer))
    last = along(of_filter, 0 if deep else 1, to_at=of_filter.filters_at, notes=0 if deep else OF_FILTER)
    prepare.append(columns(FORWARD, last, problem.groups, packed.buffer))

    for first in range(0, blocks.pairs, at_once):
        args = arguments(
            BlocksArguments, of_image, first_pair=first, pairs=min(at_once, blocks.pairs - first), resets=int(first == 0)
        )
        steps.append(rows(args, read, INPUT, WORKSPACE))
        if deep:
            steps.append(columns(FORWARD, along(args, 1, notes=OF_PAIR), read, WORKSPACE))
        steps.append(columns(WHOLE, along(args, 0 if deep else 1, to_at=made_at, notes=0 if deep else OF_PAIR), written, WORKSPACE))
        if deep:
            steps.append(columns(BACKWARD, along(args, 1, problem.filter_size[0] - 1, from_at=made_at, to_at=made_at), written, WORKSPACE))
        steps.append([KernelLaunch(
            "fft_blocks_results", dtype | index | shape, written * args.pairs * args.result_parts, threads,
            (*operands, WORKSPACE, packed.buffer, WORKSPACE), (), arguments=args._replace(from_at=made_at), shared=shared,
        )])  # fmt: skip
    sums = of_image.sums_grid, SMALL, (*operands, WORKSPACE)
    steps.append([KernelLaunch("fft_blocks_sums", dtype | index | fixed, *sums, (), arguments=of_image)])
    if not on_gpu:
        return Schedule.plain([*prepare, *steps], scratch.used)
    return Schedule(prepare, steps, [*prepare, *steps], scratch.used, packed.used)


#: Shared memory of a multiprocessor.
MULTIPROCESSOR_BYTES = 227 << 10
#: The arguments that are set for each launch.
LATER = (
    "axis_length", "axis_eighth", "axis_factors", "axis_count", "apart", "lines", "lines_of_group", "line_step", "rows_read",
    "first_line", "there", "needed", "notes", "turns_axis", "turns_w", "from_at", "to_at", "filters_at", "part_norms_at", "masks_at",
    "norms_at", "filter_norms_at", "list_at", "count_at", "most", "resets", "sums_grid", "first_pair",
)  # fmt: skip


def _arguments(
    problem: ConvProblem, config: BlockFft, blocks: _Blocks, batch: int, of_filter: bool, source: ConvProblem | None
) -> Any:
    """The arguments of launches that read the filter, or else the images, those of `source` if there is one; :data:`LATER` are 0."""
    read = source or problem
    (t, r, s), (o, p, _), (d, h, w) = problem.filter_size, problem.result_size, read.operand_size
    sides = None if source is None or of_filter else near_sides(source)
    groups, written, linear = problem.groups, problem.result_channels // problem.groups, _is_line(problem)
    f_group, f_written, *_ = filter_strides(problem)
    forward, taps, of_block = problem.direction == "fprop", t * r * s, math.prod(config.lengths)
    length_d, length_h, length_w = config.lengths
    rows = length_d * length_h
    if of_filter:  # its "images" are the result's channels of a group
        rows = ceil(r, batch) * batch if not linear and length_d == 1 else rows
        what = {
            "image_stride": f_written, "group_stride": f_group, "d": t, "h": r, "w": s, "first_d": 0, "first_h": 0, "first_w": 0,
            "start": taps - 1 if forward else 0, "plane_step": -r * s if forward else r * s, "row_step": -s if forward else s,
            "column_step": -1 if forward else 1, "gain": bits(1 / of_block, 8), "blocks": 1, "blocks_of_plane": 1, "blocks_w": 1,
            "all_blocks": written, "at_once": 1, "pairs": written,
        }  # fmt: skip
    else:
        firsts = (-pad if forward else pad - (n - 1) for pad, n in zip(read.padding_before, problem.filter_size, strict=True))
        what = {
            "image_stride": groups * d * h * w, "group_stride": d * h * w, "d": d, "h": h, "w": w, **by_axis("first_", tuple(firsts)),
            "start": 0, "plane_step": h * w, "row_step": w, "column_step": 1, "gain": bits(1.0, 8), "blocks": blocks.each,
            "blocks_of_plane": blocks.count[1] * blocks.count[2], "blocks_w": blocks.count[2], "all_blocks": problem.N * blocks.each,
            "at_once": 2, "pairs": blocks.pairs,
        }  # fmt: skip
    of_w, checked = factors(length_w) or (), problem.dtype != "float64"
    limit = 2.0**24 * 2.0**-53 * math.log2(of_block) if checked else 0.0
    parts_of_plane = rows // batch if of_filter and length_d == 1 else length_h // batch
    result_rows = length_h if linear else min(blocks.used[1], p)
    results_of_plane = ceil(result_rows, batch)
    return arguments(
        BlocksArguments, problem, **what, **dict.fromkeys(LATER, 0), linear=int(linear), **by_axis("used_", blocks.used), length_h=length_h,
        length_w=length_w, eighth_w=length_w // 8, factors_w=_packed_factors(of_w), count_w=len(of_w), rows=rows, groups=length_w // batch,
        parts=rows // batch, parts_of_plane=parts_of_plane, segment=length_w // SEGMENTS,
        result_parts=min(blocks.used[0], o) * results_of_plane, result_parts_of_plane=results_of_plane, per_group=written, f_group=f_group,
        f_written=f_written, flipped=int(not forward), limit=bits(limit, 8), bordered=int(sides is not None), **(sides or NO_SIDES),
    )  # fmt: skip


def _packed_factors(found: tuple[int, ...]) -> int:
    """Four bits each, the first one lowest."""
    return sum(factor << 4 * i for i, factor in enumerate(found))


def filter_key(problem: ConvProblem, config: BlockFft) -> Hashable:
    """Equal for problems with the same block and kind of line, on which the filters' spectra depend."""
    return (
        BlockFft, config, problem.dtype, problem.direction, _is_line(problem), problem.K, problem.C // problem.groups, problem.groups,
        problem.filter_size,
    )  # fmt: skip


def variants(device: Device) -> Iterator[VariantSet]:
    """A text for each type, batch and number of threads; only on GPUs, where the planner chooses them."""
    if device.backend != "cuda":
        return
    dtypes = {"DTYPE": tuple(DTYPE_CODES.values()), "INDEX_64": FLAG}
    doubles, fixed = {"DTYPE": (DTYPE_CODES["float64"],)}, {"BATCH": (8,), "THREADS": (SMALL,)}
    modes = {"LINEAR": FLAG, "MODE": (FORWARD, WHOLE, BACKWARD)}

    def goes(defines: Mapping[str, int]) -> bool:
        """Lines have no depth, along which transforms would go back alone."""
        return not (defines["LINEAR"] and defines["MODE"] == BACKWARD)

    for batch in BATCHES:
        shape = {"BATCH": (batch,), "THREADS": tuple(threads for threads, _ in SHAPES[batch])}
        yield VariantSet("fft_blocks_rows", dtypes | shape)
        yield VariantSet("fft_blocks_columns", doubles | {"INDEX_64": FLAG} | shape | modes, goes)
        yield VariantSet("fft_blocks_results", dtypes | shape)
    yield VariantSet("fft_blocks_turns", doubles | {"INDEX_64": (0,)} | fixed)
    yield VariantSet("fft_blocks_sums", dtypes | fixed)


#: Lengths of an axis of a plane, and of a volume, that are compared.
MOST_LENGTHS, MOST_OF_VOLUME = 12, 5


def time(problem: ConvProblem, config: BlockFft, device: Device) -> float:
    """Microseconds that `config` should take: launches, and spectra that go through memory."""
    return _time(problem, config, _batch(config, shared_limit(device)) or BATCHES[-1], device.multiprocessors)


def _time(problem: ConvProblem, config: BlockFft, batch: int, multiprocessors: int) -> float:
    blocks, threads = _Blocks.of(problem, config), _threads(config, batch)
    through = COST.THROUGH_OF_VOLUME if config.LENGTH_D > 1 else COST.THROUGH
    spectra = math.prod(config.lengths) * BYTES * through * (_filters(problem) / 2 + problem.result_channels * blocks.pairs)
    passes = [_passes(length, batch, threads) for length in config.lengths if length > 1]
    return COST.LAUNCHES + spread(spectra * (COST.BYTE + COST.PASS * sum(passes) / len(passes)) * COST.SLOWER[batch], multiprocessors)


@lru_cache(maxsize=1024)
def _best(problem: ConvProblem, most_shared: int, multiprocessors: int) -> tuple[BlockFft, ...]:
    """The blocks that should take the least time, the best first."""
    lengths = [n for n in range(SHORTEST, LONGEST + 1, SEGMENTS) if factors(n) is not None]
    (t, r, s), (o, p, q) = problem.filter_size, problem.result_size
    if _is_line(problem):
        areas = {}
        for a, b in combinations_with_replacement(lengths, 2):
            if a * b >= s:
                areas[a, b] = a * b * ceil(problem.N * ceil(q, a * b - s + 1), 2), b - a
        found = [BlockFft(*both) for both in sorted(areas, key=areas.__getitem__)[: 2 * MOST_LENGTHS]]
    else:
        most = MOST_OF_VOLUME if problem.has_depth else MOST_LENGTHS

        def some(taps: int, results: int) -> list[int]:
            areas = {n: (n * ceil(results, n - taps + 1), n) for n in lengths if n >= taps}
            return sorted(areas, key=areas.__getitem__)[:most]

        depths = some(t, o) if problem.has_depth else [1]
        found = [BlockFft(h, w, d) for d, h, w in product(depths, some(r, p), some(s, q))]
    timed = []
    for one in found:
        batch = _batch(one, most_shared)
        if batch and LEGAL.refusal(problem, one) is None:
            timed.append((_time(problem, one, batch, multiprocessors), one))
    timed.sort(key=lambda pair: (pair[0], -pair[1].LENGTH_W))  # long rows read whole segments of memory
    return tuple(one for _, one in timed[:4])


def configs(problem: ConvProblem, device: Device) -> Iterator[BlockFft]:
    """The configurations worth comparing for `problem`, for filters of many taps."""
    if device.backend != "cuda" or (problem.dtype == "float64" and problem.algorithm != "fft"):
        return
    taps, least = math.prod(problem.filter_size), LEAST_OF_LINE if _is_line(problem) else LEAST_TAPS
    simple = max(problem.stride) == max(problem.dilation) == 1 and problem.operand_channels == problem.groups
    if simple and not problem.is_empty and (taps >= least or problem.algorithm == "fft"):
        yield from _best(problem, shared_limit(device), device.multiprocessors)


def choose(problem: ConvProblem, device: Device) -> tuple[float, BlockFft] | None:
    """The blocks that should be fastest; by rule if plain cores should take longer."""
    found = fastest((time(problem, config, device), config) for config in configs(problem, device))
    if found is None or problem.algorithm == "fft":
        return found
    us, config = found
    plain = spread(problem.macs / COST.PLAIN_RATE, device.multiprocessors)
    return (BY_RULE if us < plain else us), config
