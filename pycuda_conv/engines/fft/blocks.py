"""Large filters by Fourier transforms in float64 of blocks of an image: ``cu/fft/rows.cu``, ``columns.cu``, ``results.cu`` and ``sums.cu``.

A block is up to a whole image. Its spectrum goes through memory four times, whatever the size of the filter. Each result is checked, and summed where
the transform may not have it right, so that every element is as right as a sum of products. ``cu/fft/blocks.cuh`` says how.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import combinations_with_replacement, product
from typing import Any

from pycuda_conv.engines.base import BY_RULE, Config, fastest
from pycuda_conv.engines.geometry import arguments, bits, ceil, filter_strides, needs_64_bits
from pycuda_conv.engines.schedule import (
    BIAS,
    INPUT,
    PACKED,
    RESIDUAL,
    RESULT,
    SCALE,
    WEIGHT,
    WORKSPACE,
    Arena,
    Schedule,
    finish,
    grid_refusal,
    shared_limit,
)
from pycuda_conv.engines.struct import kernel_struct
from pycuda_conv.engines.texts import FLAG, TextFamily
from pycuda_conv.problem import DTYPE_CODES, ConvProblem
from pycuda_conv.runtime.base import Device, KernelLaunch


@dataclass(frozen=True)
class BlockFft(Config):
    """Blocks of LENGTH_H x LENGTH_W pixels."""

    LENGTH_H: int = 576
    LENGTH_W: int = 576


BlocksArguments = kernel_struct("blocks.cuh", "BlocksArguments")

CONFIGS = (BlockFft,)
LAYOUTS = ("NCHW",)
TENSOR_CORES = False
MOST_TEXTS = {"cuda": 57}
#: blocks.cuh's BATCH, the largest first; its MASKS, SEGMENTS, ENTRY; threads of a block, where two of them fit a multiprocessor, and where one does.
BATCHES = 8, 4, 2
MASKS, SEGMENTS, ENTRY = 8, 64, 4
TOGETHER, ALONE = 256, 512
FORWARD, WHOLE = range(2)  # columns.cu's MODE
#: Numbers of a complex double, and bytes; shared memory of a block besides.
NUMBERS, BYTES, BESIDES = 2, 16, 5 << 10
#: Factors of a length between its first and last, which are 8; the shortest and the longest length.
FACTORS = 9, 8, 5, 4, 3, 2
SHORTEST, LONGEST = 128, 6912
#: Entries of the list of results that may be off; blocks of the launch that sums them.
MOST_LISTED, SUMS_GRID = 1 << 18, 264
#: Bytes of pairs that a row of launches takes at once; of the filters' spectra.
AT_ONCE, MOST_SPECTRA = 1 << 30, 4 << 30
#: Filters of fewer taps are left to other engines, unless a configuration is given.
LEAST_TAPS = 100


# ---- what runs


def unsupported(device: Device) -> str | None:
    """None: the kernels run on every device."""
    return None


@cache
def factors(length: int) -> tuple[int, ...] | None:
    """The fewest factors of a length between the first and the last, or None if it is no length."""
    middle = length // (SEGMENTS)
    if length % SEGMENTS or not SHORTEST <= length <= LONGEST:
        return None
    for count in range(1, 5):
        for found in combinations_with_replacement(FACTORS, count):
            if math.prod(found) == middle:
                return found
    return None


def _batch(config: BlockFft, most_shared: int) -> int:
    """Transforms that a block of threads has at once; 0 if not even two fit."""
    longest = max(config.LENGTH_H, config.LENGTH_W)
    return next((batch for batch in BATCHES if longest * batch * BYTES + BESIDES <= most_shared), 0)


def refusal(problem: ConvProblem, config: BlockFft) -> str | None:
    """Why `config` can't run `problem`, or None if it can."""
    (_, r, s), lengths = problem.filter_size, (config.LENGTH_H, config.LENGTH_W)
    for length in lengths:
        if factors(length) is None:
            return f"a length must be 64 times a product of 2 to 5, 8 and 9, from {SHORTEST} to {LONGEST}, not {length}"
    if max(problem.stride) > 1 or max(problem.dilation) > 1:
        return "it takes filters without stride and dilation"
    if problem.has_depth or problem.input_size[1] == problem.output_size[1] == r == 1:
        return "it takes two spatial axes"
    if problem.operand_channels > problem.groups:
        return "it takes groups of which one channel is read"
    if problem.is_empty:
        return "there is nothing to transform"
    if r > config.LENGTH_H or s > config.LENGTH_W:
        return f"a filter must fit in a block: it has {r} x {s} taps"
    spectra = _filters(problem) * math.prod(lengths) * BYTES
    if spectra > MOST_SPECTRA:
        return f"its filters' spectra take {spectra:,} bytes; at most {MOST_SPECTRA:,} are taken"
    return grid_refusal(max(_filters(problem), problem.result_channels * _Blocks.of(problem, config).pairs) * max(lengths))


def _filters(problem: ConvProblem) -> int:
    """Planes of the filter."""
    return problem.K * (problem.C // problem.groups)


@dataclass(frozen=True)
class _Blocks:
    """How a plane is cut into blocks; pairs of numbers are of rows and columns.

    Attributes
    ----------
    used : (int, int)
        Results of a block.
    count : (int, int)
        Blocks of a plane.
    pairs : int
        Pairs of blocks of a channel, over all images; the last block may be alone.
    """

    used: tuple[int, int]
    count: tuple[int, int]
    pairs: int

    @classmethod
    def of(cls, problem: ConvProblem, config: BlockFft) -> _Blocks:
        """The blocks of `problem`."""
        (_, r, s), (_, p, q) = problem.filter_size, problem.result_size
        used = config.LENGTH_H - r + 1, config.LENGTH_W - s + 1
        count = ceil(p, used[0]), ceil(q, used[1])
        return cls(used, count, ceil(problem.N * math.prod(count), 2))


# ---- launches


def schedule(problem: ConvProblem, config: BlockFft, device: Device, noted: bool = False) -> Schedule:
    """The launches of `config` for `problem`.

    On a GPU the filters' spectra are their packed form. OpenCL launches take whole buffers, so there they lie in the workspace.
    """
    on_gpu = device.backend == "cuda"
    batch = _batch(config, shared_limit(device)) if on_gpu else BATCHES[0]
    if not batch:
        raise ValueError(f"{config} can't run {problem}: two rows need more than the {shared_limit(device):,} bytes of shared memory of a block")
    blocks, filters, written = _Blocks.of(problem, config), _filters(problem), problem.result_channels
    of_plane, groups = config.LENGTH_H * config.LENGTH_W, config.LENGTH_W // batch
    longest = max(config.LENGTH_H, config.LENGTH_W)
    threads = TOGETHER if 2 * (longest * batch * BYTES + BESIDES) <= MULTIPROCESSOR_BYTES else ALONE

    scratch = Arena(WORKSPACE)
    packed = Arena(PACKED) if on_gpu else scratch

    def place(arena: Arena, numbers: int) -> int:
        """Room for so many doubles: where it begins, in doubles."""
        return arena.take(8 * numbers)[1] // 8

    parts_of_filter = ceil(problem.filter_size[1], batch)
    turns_w, turns_h = place(packed, NUMBERS * config.LENGTH_W), place(packed, NUMBERS * config.LENGTH_H)
    filters_at, filter_norms_at = place(packed, NUMBERS * filters * of_plane), place(packed, filters)
    of_filter = _arguments(problem, config, blocks, batch, True)._replace(
        rows_at=place(packed, NUMBERS * filters * parts_of_filter * batch * config.LENGTH_W),
        part_norms_at=place(packed, filters * parts_of_filter), masks_at=place(packed, filters * parts_of_filter * MASKS // 2),
        filters_at=filters_at, filter_norms_at=filter_norms_at, turns_w=turns_w, turns_h=turns_h,
    )  # fmt: skip
    read, several = problem.groups, written > problem.groups  # several filters read a pair's transforms, which then stay
    of_pair = (read + several * written) * of_plane * BYTES
    at_once = min(blocks.pairs, max(1, AT_ONCE // of_pair))
    parts = config.LENGTH_H // batch
    rows_at = place(scratch, NUMBERS * read * at_once * of_plane)
    made_at = place(scratch, NUMBERS * written * at_once * of_plane) if several else rows_at
    listed = min(MOST_LISTED, math.prod(problem.result_shape))
    of_image = _arguments(problem, config, blocks, batch, False)._replace(
        rows_at=rows_at, made_at=made_at, part_norms_at=place(scratch, read * at_once * parts),
        masks_at=place(scratch, read * at_once * parts * MASKS // 2), norms_at=place(scratch, read * at_once),
        list_at=place(scratch, ENTRY * listed), count_at=place(scratch, 1), most=listed, sums_grid=min(SUMS_GRID, ceil(listed, 8)),
        filters_at=filters_at, filter_norms_at=filter_norms_at, turns_w=turns_w, turns_h=turns_h,
    )  # fmt: skip

    index, dtype = {"INDEX_64": int(needs_64_bits(problem))}, {"DTYPE": DTYPE_CODES[problem.dtype]}
    of_doubles = {"DTYPE": DTYPE_CODES["float64"]}
    shape = {"BATCH": batch, "THREADS": threads} | ({} if on_gpu else {"ROOM": longest * batch})
    shared = longest * batch * BYTES if on_gpu else 0

    def rows(told: Any, planes: int, x: int, into: int) -> KernelLaunch:
        return KernelLaunch(
            "fft_rows", dtype | index | shape, planes * told.pairs * told.parts, threads, (x, packed.buffer, into), (),
            arguments=told, shared=shared,
        )  # fmt: skip

    def columns(mode: int, told: Any, planes: int, buffer: int) -> KernelLaunch:
        return KernelLaunch(
            "fft_columns", of_doubles | index | shape | {"MODE": mode}, planes * told.pairs * groups, threads,
            (buffer, packed.buffer, packed.buffer, buffer), (), arguments=told, shared=shared,
        )  # fmt: skip

    def results(told: Any) -> KernelLaunch:
        buffers = INPUT, WEIGHT, BIAS, SCALE, RESIDUAL, RESULT, WORKSPACE, packed.buffer, WORKSPACE
        return KernelLaunch(
            "fft_results", dtype | index | shape, written * told.pairs * told.result_parts, threads, buffers, (),
            arguments=told, shared=shared,
        )  # fmt: skip

    turns = of_doubles | {"INDEX_64": 0} | {"BATCH": BATCHES[0], "THREADS": TOGETHER}
    prepare = [
        [KernelLaunch("fft_turns", turns, ceil(config.LENGTH_H + config.LENGTH_W, TOGETHER), TOGETHER, (packed.buffer,), (), arguments=of_filter)],
        [rows(of_filter, problem.groups, WEIGHT, packed.buffer)],
        [columns(FORWARD, of_filter, problem.groups, packed.buffer)],
    ]
    steps = []
    for first in range(0, blocks.pairs, at_once):
        some = min(at_once, blocks.pairs - first)
        told = arguments(BlocksArguments, **{
            name: value for name, value in of_image._asdict().items() if not name.startswith("by_")
        } | {"first_pair": first, "pairs": some, "resets": int(first == 0)})  # fmt: skip
        steps += [[rows(told, read, INPUT, WORKSPACE)], [columns(WHOLE, told, written, WORKSPACE)], [results(told)]]
    buffers = INPUT, WEIGHT, BIAS, SCALE, RESIDUAL, RESULT, WORKSPACE
    defines = dtype | index | {"BATCH": BATCHES[0], "THREADS": TOGETHER}
    steps.append([KernelLaunch("fft_sums", defines, of_image.sums_grid, TOGETHER, buffers, (), arguments=of_image)])
    if not on_gpu:
        return Schedule.plain([*prepare, *steps], scratch.used)
    return Schedule(prepare, steps, [*prepare, *steps], scratch.used, packed.used)


#: Shared memory of a multiprocessor.
MULTIPROCESSOR_BYTES = 227 << 10


def _arguments(problem: ConvProblem, config: BlockFft, blocks: _Blocks, batch: int, of_filter: bool) -> Any:
    """The arguments of launches that read the filter, or else the images; without places in buffers."""
    (_, r, s), (_, p, q), (_, h, w) = problem.filter_size, problem.result_size, problem.operand_size
    groups, written = problem.groups, problem.result_channels // problem.groups
    f_group, f_written, _ = filter_strides(problem)
    forward, (_, pad_h, pad_w), of_plane = problem.direction == "fprop", problem.padding_before, config.LENGTH_H * config.LENGTH_W
    if of_filter:  # its "images" are the result's channels of a group
        parts = ceil(r, batch)
        what = {
            "image_stride": f_written, "group_stride": f_group, "h": r, "w": s, "first_h": 0, "first_w": 0,
            "start": r * s - 1 if forward else 0, "row_step": -s if forward else s, "column_step": -1 if forward else 1,
            "gain": bits(1 / of_plane, 8), "blocks": 1, "blocks_w": 1, "all_blocks": written, "at_once": 1, "pairs": written,
            "rows": parts * batch, "parts": parts,
        }  # fmt: skip
    else:
        count = math.prod(blocks.count)
        what = {
            "image_stride": groups * h * w, "group_stride": h * w, "h": h, "w": w,
            "first_h": -pad_h if forward else pad_h - (r - 1), "first_w": -pad_w if forward else pad_w - (s - 1),
            "start": 0, "row_step": w, "column_step": 1, "gain": bits(1.0, 8),
            "blocks": count, "blocks_w": blocks.count[1], "all_blocks": problem.N * count, "at_once": 2, "pairs": blocks.pairs,
            "rows": config.LENGTH_H, "parts": config.LENGTH_H // batch,
        }  # fmt: skip
    (of_h, of_w), checked = ((factors(n) or () for n in (config.LENGTH_H, config.LENGTH_W)), problem.dtype != "float64")
    limit = 2.0**24 * 2.0**-53 * math.log2(of_plane) if checked else 0.0
    places = ("turns_h", "turns_w", "rows_at", "filters_at", "made_at", "part_norms_at", "masks_at", "norms_at", "filter_norms_at",
              "list_at", "count_at", "most", "resets", "sums_grid", "first_pair")  # fmt: skip
    return arguments(
        BlocksArguments, **what, **dict.fromkeys(places, 0), used_h=blocks.used[0], used_w=blocks.used[1],
        length_h=config.LENGTH_H, length_w=config.LENGTH_W, eighth_h=config.LENGTH_H // 8, eighth_w=config.LENGTH_W // 8,
        factors_h=_packed_factors(of_h), factors_w=_packed_factors(of_w), count_h=len(of_h), count_w=len(of_w),
        groups=config.LENGTH_W // batch, result_parts=ceil(min(blocks.used[0], p), batch), segment=config.LENGTH_W // SEGMENTS,
        k=groups * written, per_group=written, p=p, q=q, f_group=f_group, f_written=f_written, r=r, s=s, flipped=int(not forward),
        limit=bits(limit, 8), **finish(problem),
    )  # fmt: skip


def _packed_factors(found: tuple[int, ...]) -> int:
    """Four bits each, the first one lowest."""
    return sum(factor << 4 * i for i, factor in enumerate(found))


def filter_key(problem: ConvProblem, config: BlockFft) -> Hashable:
    """Equal for problems with the same block, on which the filters' spectra depend."""
    return (
        BlockFft, config, problem.dtype, problem.direction, problem.K, problem.C // problem.groups, problem.groups, problem.filter_size,
    )  # fmt: skip


def sum_order(problem: ConvProblem, config: BlockFft) -> Hashable:
    """The lengths decide all bits."""
    return config


def texts(device: Device) -> Iterator[TextFamily]:
    """A text for each type, batch and number of threads; only on GPUs, where the planner chooses them."""
    if device.backend != "cuda":
        return
    dtypes = {"DTYPE": tuple(DTYPE_CODES.values()), "INDEX_64": FLAG}
    doubles, fixed = {"DTYPE": (DTYPE_CODES["float64"],)}, {"BATCH": BATCHES[:1], "THREADS": (TOGETHER,)}
    for batch in BATCHES:
        shape = {"BATCH": (batch,), "THREADS": (TOGETHER, ALONE)}
        yield TextFamily("fft_rows", dtypes | shape)
        yield TextFamily("fft_columns", doubles | {"INDEX_64": FLAG} | shape | {"MODE": (FORWARD, WHOLE)})
        yield TextFamily("fft_results", dtypes | shape)
    yield TextFamily("fft_turns", doubles | {"INDEX_64": (0,)} | fixed)
    yield TextFamily("fft_sums", dtypes | fixed)


# ---- the choice

#: Microseconds of launches; bytes a microsecond of 132 multiprocessors, by :func:`_batch`; and times that a pair's spectrum goes through memory.
LAUNCHES = 22.0
RATE = {8: 2.6e6, 4: 2.0e6, 2: 1.2e6}
PASSES = 4.5
#: MACs of a channel's filters that the plain cores of 132 multiprocessors do in a microsecond: transforms have to beat that.
PLAIN_RATE = 10e6
#: Lengths of an axis that are compared.
MOST_LENGTHS = 12


def time(problem: ConvProblem, config: BlockFft, device: Device) -> float:
    """Microseconds that `config` should take: launches, and spectra that go through memory."""
    batch = _batch(config, shared_limit(device)) or BATCHES[-1]
    return _time(problem, config, batch, device.multiprocessors)


def _time(problem: ConvProblem, config: BlockFft, batch: int, multiprocessors: int) -> float:
    blocks, of_plane = _Blocks.of(problem, config), config.LENGTH_H * config.LENGTH_W * BYTES
    spectra = _filters(problem) * of_plane * 2 + problem.result_channels * blocks.pairs * of_plane * PASSES
    return LAUNCHES + spectra / RATE[batch] * 132 / multiprocessors


@lru_cache(maxsize=1024)
def _best(problem: ConvProblem, most_shared: int, multiprocessors: int) -> tuple[BlockFft, ...]:
    """The blocks that should take the least time, the best first."""
    axes = []
    for taps, results in zip(problem.filter_size[1:], problem.result_size[1:], strict=True):
        lengths = [n for n in range(SHORTEST, LONGEST + 1, SEGMENTS) if n >= taps and factors(n)]
        areas = {n: (n * ceil(results, n - taps + 1), n) for n in lengths}
        axes.append(sorted(areas, key=areas.__getitem__)[:MOST_LENGTHS])
    found = [BlockFft(*lengths) for lengths in product(*axes)]
    timed = [(_time(problem, one, batch, multiprocessors), one) for one in found if (batch := _batch(one, most_shared)) and refusal(problem, one) is None]
    return tuple(one for _, one in sorted(timed, key=lambda pair: pair[0])[:4])


def configs(problem: ConvProblem, device: Device) -> Iterator[BlockFft]:
    """The configurations worth comparing for `problem`, for filters of many taps."""
    if device.backend != "cuda" or (problem.dtype == "float64" and problem.algorithm != "fft"):
        return
    if problem.algorithm != "fft" and math.prod(problem.filter_size) < LEAST_TAPS:
        return
    if refusal(problem, BlockFft(LONGEST, LONGEST)) is None:
        yield from _best(problem, shared_limit(device), device.multiprocessors)


def choose(problem: ConvProblem, device: Device) -> tuple[float, BlockFft] | None:
    """The blocks that should be fastest; by rule if plain cores should take longer."""
    found = fastest((time(problem, config, device), config) for config in configs(problem, device))
    if found is None or problem.algorithm == "fft":
        return found
    us, config = found
    plain = problem.macs / PLAIN_RATE * 132 / device.multiprocessors
    return (BY_RULE if us < plain else us), config
