"""Convolutions of channels-last arrays as they lie, on Hopper's tensor cores (``cu/hopper/dense.cu``).

They are float16, bfloat16, and float32 with ``precision="tf32"``. Nothing is packed or scaled, and one launch does everything. Only a
filter that the tensor cores can't read as it lies is transposed first: one in C order, and that of the gradient of the input in TF32, if
the launch's blocks would transpose it too often. The blocks of a cluster share a long sum for few results.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from typing import Any

from pycuda_conv.engines.addressing import MOST_PIXELS, PackedLayout, PhaseAddressing, phase_addressing
from pycuda_conv.engines.base import Config, ConvProblem, VariantSet, fixed, kernel_struct
from pycuda_conv.engines.costs import costs, together
from pycuda_conv.engines.geometry import (
    arguments,
    batches,
    by_axis,
    ceil,
    count_phases,
    filter_strides,
    first_phases,
    repeats,
    too_many_phases,
)
from pycuda_conv.engines.hopper.box_tiles import Box, best_box
from pycuda_conv.engines.hopper.common import (
    CLOCK,
    ROW,
    RUN,
    at_once,
    finished_time,
    image_map,
    load_base,
    map_type,
    most_shared,
    pixel_cycles,
    read_bytes,
    stage_channels,
    store_mode,
    tight_map,
    written_bytes,
)
from pycuda_conv.engines.hopper.common import COST as HOPPER_COST
from pycuda_conv.engines.hopper.dense_borders import Region, in_words, regions
from pycuda_conv.engines.hopper.ring import ALIGNMENT, Ring, sum_bytes, with_most_stages
from pycuda_conv.engines.layout import transpose_filter
from pycuda_conv.engines.limits import HOPPER, Takes, Tiles
from pycuda_conv.engines.packed_product import repeat_arguments, tap_numbers, written_places
from pycuda_conv.engines.range_guard import MomentsLayout
from pycuda_conv.engines.schedule import (
    FINISH,
    INPUT,
    PACKED,
    RESULT,
    WEIGHT,
    WORKSPACE,
    Arena,
    Moments,
    Schedule,
    finish_constants,
)
from pycuda_conv.engines.tensor_cores import ELEMENTS, FLOAT, why_not_one_product
from pycuda_conv.problem import Size3
from pycuda_conv.runtime.base import BufferSlice, Device, KernelLaunch, TensorMap

COLUMNS = (32, 64, 96, 128, 160, 192, 256)  # channels of a tile
CLUSTERS = (1, 2, 4, 8)  # blocks that share a tile: a cluster has at most 8
#: The tiles worth choosing from, each a kernel of its own: (BLOCK_M, BLOCK_N) -> CLUSTERs. Only long sums for few results are shared by a
#: cluster, so only small tiles. By the model random problems take 0.2% longer in the mean with these tiles than with all.
TILES: dict[tuple[int, int], tuple[int, ...]] = {
    **{(128, columns): (1,) for columns in (32, 64, 96, 160, 192, 256)}, (128, 128): (1, 2, 4),
    **{(64, columns): CLUSTERS for columns in (32, 64)}, (64, 96): (1, 8), (256, 96): (1,),
}  # fmt: skip
#: The same for phases, whose results are seldom wide.
PHASED_TILES: dict[tuple[int, int], tuple[int, ...]] = {
    (128, 64): (1,), (128, 128): (1,), (64, 32): (1, 2, 8), (64, 64): (1, 8), (64, 128): (1,),
}  # fmt: skip
PHASES = 4  # phases of a launch, where there are more than one
#: Regions of a launch where the image has a border: the interior, a row and a column at each side, and the corners; or two of each.
REGIONS = 9, 25
STEPS = 4  # wgmma steps of a stage
STAGES = 12  # the most stages of a ring
STAGING = 2560 + 512  # bytes of a warp's staging tile, and of the moments of its two chunks
SLICE = 64  # pixels of a slice of moments
#: An MN-major filter is transposed first if it has at most so many channels, and x at least so many stages of 128 pixels.
FEW_CHANNELS, MANY_STAGES = 192, 32 * 132
#: Stages of a multiprocessor up to which its blocks transpose the filter themselves: with tiles of their own, and with shared tiles.
MOST_TRANSPOSED = 32, 128
TRANSPOSERS = 3  # a block's warps that transpose the filter
MOMENTS_COLUMNS = 192  # the widest tile whose sums leave registers for moments


@dataclass(frozen=True)
class DenseNhwc(Config):
    """One tile of ``hopper/dense.cu``: BLOCK_M pixels, BLOCK_N channels, STAGES of its ring, CLUSTER blocks that share it."""

    BLOCK_M: int = 128
    BLOCK_N: int = 128
    STAGES: int = 4
    CLUSTER: int = 1


CONFIGS, LAYOUTS, RUNS_ON, TENSOR_CORES, MOST_VARIANTS = (DenseNhwc,), ("NHWC",), HOPPER, True, {"cuda": 267}
ORDER = ("CLUSTER",)  # what the order of sums depends on
COST = costs("hopper.dense")
DensePhase = kernel_struct("hopper_dense", "DensePhase")


@lru_cache(maxsize=1024)
def _addressed(problem: ConvProblem) -> Any:
    """The arrays as the loads see them, and the phases' addressing without repeats, those with most taps first.

    None if tensor loads can't make it.
    """
    load = stage_channels(problem)
    unpacked = PackedLayout(True, 0, (1, 1, 1), problem.operand_size, problem.operand_channels, load, problem.filter_size)
    every = [phase_addressing(problem, phase, unpacked) for phase in first_phases(problem)]
    found = [addressing for addressing in every if addressing is not None]
    return (unpacked, tuple(sorted(found, key=lambda one: -math.prod(one.taps)))) if len(found) == len(every) else None


def _summed(problem: ConvProblem) -> int:
    """Channels of the input over which a result sums: those of its group."""
    return problem.operand_channels // problem.groups


def _fits(problem: ConvProblem, config: DenseNhwc) -> str | None:
    if config.BLOCK_M == 256 and not config.BLOCK_N == 96 >= problem.result_channels:
        return "a tile of 256 pixels has 96 channels, all of the result"
    if config.BLOCK_M == 64 and config.BLOCK_N > 128:
        return "a tile of 64 pixels has up to 128 channels"
    if problem.groups > 1 and problem.result_channels // problem.groups % config.BLOCK_N:
        return "a tile lies in one group"
    if config.BLOCK_N == 256 and problem.has_residual:
        return "a tile of 256 channels leaves no registers for a residual"
    if config.CLUSTER > 1 and config.BLOCK_N > 128:
        return "blocks share tiles of up to 128 channels"
    if config.CLUSTER > 1 and sum_bytes(config.BLOCK_M, config.BLOCK_N) > config.STAGES * _ring(config, False).stage:
        return "its ring leaves no room for the sums of a tile that is shared"
    return _ring(config, _reads_mn_major(problem)).refusal(config.STAGES, config.CLUSTER)


TAKES = Takes(
    ("it takes arrays with their channels last", lambda p: p.layout == "NHWC"),
    (
        "it takes groups forward, with channels of a multiple of 128 bytes",
        lambda p: p.groups <= 1 or (p.direction == "fprop" and _summed(p) * p.itemsize % ROW == 0),
    ),
    why_not_one_product,
    ("tensor loads take a pixel's channels, of a multiple of 16 bytes", lambda p: p.operand_channels * p.itemsize % 16 == 0),
    ("it counts pixels in 32 bits", lambda p: p.N * max(math.prod(p.result_size), math.prod(p.operand_size)) < MOST_PIXELS),
    lambda p: too_many_phases(p, besides_repeats=True),
    ("tensor loads can't make its padding or dilation", lambda p: _addressed(p) is not None),
)  # fmt: skip
LEGAL = Tiles(TAKES, DenseNhwc, _fits, BLOCK_M=(64, 128, 256), BLOCK_N=COLUMNS, CLUSTER=CLUSTERS)


def _blocks_per_sm(config: DenseNhwc) -> int:
    """Blocks that share a multiprocessor: two of the small tiles."""
    return 2 if config.BLOCK_M == 64 else 1


def _ring(config: DenseNhwc, mn_major: bool) -> Ring:
    """The ring of a tile. The warps' staging tiles lie beside it, unless blocks share the tile.

    A stage has BLOCK_M rows of x, and the rows of w. An MN-major w has whole blocks of 64 rows, or in the narrowest tile 32 rows.
    """
    rows = config.BLOCK_M + (ceil(config.BLOCK_N, 64) * 64 if mn_major and config.BLOCK_N > 32 else config.BLOCK_N)
    staging = config.BLOCK_M // 16 * STAGING if config.CLUSTER == 1 else 0
    return Ring(ROW * rows, staging + ALIGNMENT, most_shared(_blocks_per_sm(config)))


@lru_cache(maxsize=256)  # few tiles, for every problem again
def deepest(config: DenseNhwc, mn_major: bool) -> DenseNhwc:
    """`config` with the most stages that shared memory has room for."""
    tile: DenseNhwc = with_most_stages(config, _ring(config, mn_major), STAGES)
    return tile


def _reads_mn_major(problem: ConvProblem) -> bool:
    """Whether dgrad reads a 16-bit filter with its second axis last as it lies: MN-major.

    TMA then loads 64 rows of k a stage for each 64 channels of the result, and takes longer if it has to fill up channels. So a narrow
    filter with a tail is transposed first if there are many stages.
    """
    if problem.direction != "dgrad" or problem.itemsize != 2 or problem.weight_shape[1] % 8:
        return False
    if problem.result_channels > FEW_CHANNELS or problem.result_channels % stage_channels(problem) == 0:
        return True
    pixels = problem.N * math.prod(problem.operand_size)  # a phase has fewer taps, but all phases together have these stages
    stages = pixels / 128 * math.prod(problem.filter_size) * ceil(problem.operand_channels, stage_channels(problem))
    return stages < MANY_STAGES


def _may_transpose(rows: int, columns: int) -> bool:
    """Whether a tile leaves shared memory and registers for warps that transpose a filter: small tiles do."""
    return rows == 64 and columns < 128


def _transposes(problem: ConvProblem, config: DenseNhwc, device: Device) -> bool:
    """Whether blocks transpose a float32 filter of dgrad themselves, stage by stage, instead of a launch before them.

    They do if a multiprocessor has few stages. With a shared tile a block has so few that transposing hides behind the loads.
    """
    gradient = problem.direction == "dgrad" and problem.itemsize == 4 and problem.weight_shape[1] % 4 == 0
    if not gradient or not _may_transpose(config.BLOCK_M, config.BLOCK_N):
        return False
    _, addressings = _addressed(problem)
    # MOST_TRANSPOSED is for a sum that counts repeats twice
    many, slots = math.prod(repeats(problem)) ** 2 * config.CLUSTER, at_once(device, config.CLUSTER)
    stages = sum(ceil(_blocks(problem, one), config.CLUSTER) * math.prod(_tiles(problem, config, one)) * many for one in addressings)
    return stages <= MOST_TRANSPOSED[config.CLUSTER > 1] * slots


def adds_border(source: ConvProblem, problem: ConvProblem, config: DenseNhwc) -> bool:
    """Whether :func:`schedule` takes the image of `source`, which has a border, for the wider one of `problem`: sums are whole there."""
    return config.CLUSTER == 1 and TAKES.why_not(problem) is None and regions(source) is not None


def border_time(source: ConvProblem, config: DenseNhwc) -> float:
    found = regions(source) or ()
    sides = sum(ceil(source.N * math.prod(one.addressing.phase.size), config.BLOCK_M) for one in found if not one.interior)
    tiles, more = sides * ceil(source.result_channels, config.BLOCK_N), ceil(len(found), REGIONS[-1]) - 1
    return float(COST.SIDES_TIME + COST.SIDE_TILE[len(found) > REGIONS[0]] * tiles + COST.SIDES_LAUNCH * more)


def schedule(
    problem: ConvProblem, config: DenseNhwc, device: Device, with_moments: bool = False, source: ConvProblem | None = None
) -> Schedule:
    multiprocessors, taps = device.multiprocessors, math.prod(problem.filter_size)
    scratch = Arena(WORKSPACE)
    layout = MomentsLayout(_moments(problem, config) if with_moments else None, scratch, multiprocessors)
    parts = layout.parts if layout.moments else None

    def products(place: BufferSlice, mn_major: bool) -> list[list[KernelLaunch]]:
        tile = config
        if tile == deepest(tile, _reads_mn_major(problem)):  # the choice meant "as many stages as fit"
            tile = deepest(tile, mn_major and problem.itemsize == 2)
        if source is not None:
            return [_of_regions(source, tile, place, mn_major, multiprocessors)]
        groups = batches(_addressed(problem)[1], PHASES)
        return [[_product(problem, tile, group, place, mn_major, multiprocessors, parts) for group in groups]]

    # a filter with its second axis last is K-major in fprop, and MN-major in dgrad
    last = problem.direction == "fprop" and problem.weight_shape[1] * problem.itemsize % 16 == 0
    mn_major = _reads_mn_major(problem) or (source is None and _transposes(problem, config, device))
    in_place = products(WEIGHT, mn_major) if last or mn_major else None
    if in_place and taps == 1:
        return Schedule([], in_place, in_place, scratch.used, 0, moments=layout.moments, filter_last=in_place)
    kept = Arena(PACKED)
    place = kept.take(problem.itemsize * math.prod(problem.weight_shape))
    # strides of the filter, in elements: of a channel of the result, of a tap (1), of a channel of the input
    _, row, channel = filter_strides(problem)
    prepare, steps = [[transpose_filter.launch(problem, place, (row, 1, channel))]], products(place, False)
    if not in_place and problem.direction == "dgrad":
        width = problem.weight_shape[1]
        in_place = [[transpose_filter.launch(problem, place, (1, width, taps * width))], *steps]
    return Schedule(prepare, steps, prepare + steps, scratch.used, kept.used, moments=layout.moments, filter_last=in_place)


def _of_regions(source: ConvProblem, tile: DenseNhwc, place: BufferSlice, mn_major: bool, multiprocessors: int) -> list[KernelLaunch]:
    """The launches of a result whose image has a border: its interior and its sides, those with most taps first."""
    found, launches = sorted(regions(source) or (), key=lambda one: -math.prod(one.addressing.taps)), []
    for some in batches(found, REGIONS[-1]):
        launches.append(_product(source, tile, [one.addressing for one in some], place, mn_major, multiprocessors, None, some))
    return launches


def _moments(problem: ConvProblem, config: DenseNhwc) -> Moments | None:
    """The moments that the product can note: forward, whole sums without a residual or an activation."""
    if problem.direction != "fprop" or config.CLUSTER > 1 or problem.has_residual or problem.activation:
        return None
    if config.BLOCK_N > MOMENTS_COLUMNS:
        return None
    return Moments(1, problem.N * math.prod(problem.result_size), SLICE, problem.result_channels)


def _box(problem: ConvProblem, config: DenseNhwc, addressing: PhaseAddressing, with_moments: bool = False) -> Box | None:
    """The box that a tile's pixels are; None where they are neighbours, of which a tile always has as many as it can hold.

    They are neighbours with a stride, where runs of pixels are stored, and where boxes would be more tiles, or for moments not all full.
    """
    if addressing.flat or addressing.stride != (1, 1, 1) or store_mode(problem, config.BLOCK_N, addressing.phase) == RUN:
        return None
    box, pixels = best_box(addressing.phase.size, problem.N, config.BLOCK_M), problem.N * math.prod(addressing.phase.size)
    fits = box.tiles * config.BLOCK_M == pixels if with_moments else box.tiles <= ceil(pixels, config.BLOCK_M)
    return box if fits else None


def _product(
    problem: ConvProblem, config: DenseNhwc, addressings: Sequence[PhaseAddressing], place: BufferSlice, mn_major: bool,
    multiprocessors: int, parts: BufferSlice | None, sides: Sequence[Region] = (),
) -> KernelLaunch:
    """The launch of some phases. It notes moments if it is given a place for their `parts`. `sides`: of a result with a border."""
    unpacked, _ = _addressed(problem)
    inside = [one.interior for one in sides] or [True] * len(addressings)
    boxes = [_box(problem, config, one, parts is not None) if own else None for one, own in zip(addressings, inside, strict=True)]
    args = tuple(_arguments(problem, config, one, box, parts is not None) for one, box in zip(addressings, boxes, strict=True))
    args = tuple(one._replace(**in_words(side)) for one, side in zip(args, sides, strict=True)) if sides else args
    several = next(n for n in REGIONS if n >= len(sides)) if sides else PHASES
    phases = 1 if count_phases(problem) == 1 and not sides else several
    tiles, ends = sum(phase.tiles for phase in args), accumulate(phase.tiles for phase in args)
    args = tuple(phase._replace(tiles=end) for phase, end in zip(args, ends, strict=True))
    args += args[-1:] * (phases - len(addressings))  # empty phases fill the kernel's parameter
    rows = ROW, _last_row(problem)
    maps = []
    seen: Sequence[tuple[Size3, Size3] | None] = [(side.first, side.length) for side in sides] or [None] * len(addressings)
    for row in rows:
        mapped = zip(addressings, seen, boxes, strict=True)
        images = [image_map(problem, INPUT, unpacked, one, config.BLOCK_M, row, part, box) for one, part, box in mapped]
        maps += images + [images[-1]] * (phases - len(addressings))
    maps += [_filter_map(problem, config, place, mn_major, row) for row in rows]
    structs: tuple[tuple[int, ...], ...] = args
    if phases > 1:
        structs += (repeat_arguments(problem, unpacked, 1, repeats(problem)),)
    transposing = mn_major and problem.itemsize == 4
    fitting = multiprocessors * _blocks_per_sm(config)
    grid = tiles * config.CLUSTER if config.CLUSTER > 1 else min(tiles, fitting)
    defines = {
        "BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N, "STAGES": config.STAGES, "TYPE": ELEMENTS[problem.dtype],
        "W_MN_MAJOR": int(mn_major), "CLUSTER": config.CLUSTER, "PHASES": phases, **({"BORDERED": 1} if sides else {}),
    }
    buffers: tuple[BufferSlice, ...] = (*FINISH, RESULT)
    if config.CLUSTER == phases == 1 and not mn_major and config.BLOCK_N <= MOMENTS_COLUMNS:  # the kernel's EMIT_MOMENTS
        buffers += (parts or RESULT,)
    return KernelLaunch(
        "hopper_dense", defines, grid, 2 * config.BLOCK_M + 32 + (32 * TRANSPOSERS if transposing else 0), buffers, (),
        maps=tuple(maps), shared=_ring(config, mn_major and not transposing).nbytes(config.STAGES), arch="sm_90a", arguments=structs,
        layer=finish_constants(args[0]) | {"WITH_MOMENTS": args[0].with_moments, "LAST_STEPS": args[0].last_steps},
    )  # fmt: skip


def _filter_map(problem: ConvProblem, config: DenseNhwc, place: BufferSlice, mn_major: bool, row: int) -> TensorMap:
    """The filter's map. A box is `row` bytes of k of one tap x a tile's channels, or, MN-major, channels x k."""
    rows, channels, taps, size = problem.result_channels, _summed(problem), math.prod(problem.filter_size), problem.itemsize
    inner, outer = (rows, channels) if mn_major else (channels, rows)
    wide = row // size
    box = (min(stage_channels(problem), config.BLOCK_N), 1, wide) if mn_major else (wide, 1, min(config.BLOCK_N, rows))
    return tight_map(place, (inner, taps, outer), box, map_type(problem), size * box[0])


def _blocks(problem: ConvProblem, addressing: PhaseAddressing) -> int:
    """Stages of a phase's sum."""
    return math.prod(addressing.taps) * ceil(_summed(problem), stage_channels(problem))


def _last_steps(problem: ConvProblem) -> int:
    """wgmma steps in a tap's last stage: each multiplies 32 bytes of channels."""
    return (ceil(_summed(problem) * problem.itemsize, ROW // STEPS) - 1) % STEPS + 1


def _last_row(problem: ConvProblem) -> int:
    """Bytes of a row of a tap's last stage: what TMA loads of it."""
    return {1: 32, 2: 64}.get(_last_steps(problem), ROW)


def _tiles(problem: ConvProblem, config: DenseNhwc, addressing: PhaseAddressing) -> tuple[int, int]:
    """Tiles of a phase along the channels, and along the pixels."""
    return ceil(problem.result_channels, config.BLOCK_N), _down(problem, config, addressing, _box(problem, config, addressing))


def _down(problem: ConvProblem, config: DenseNhwc, addressing: PhaseAddressing, box: Box | None) -> int:
    """Tiles along the pixels: boxes, or else runs of neighbours."""
    return box.tiles if box else ceil(problem.N * math.prod(addressing.phase.size), config.BLOCK_M)


def _arguments(
    problem: ConvProblem, config: DenseNhwc, addressing: PhaseAddressing, box: Box | None = None, with_moments: bool = False
) -> Any:
    """The kernel's arguments of a phase. Its tiles are boxes, or else neighbouring pixels."""
    (unpacked, _), phase = _addressed(problem), addressing.phase
    across, down = ceil(problem.result_channels, config.BLOCK_N), _down(problem, config, addressing, box)
    pixels, blocks = down * config.BLOCK_M if box else problem.N * math.prod(phase.size), _blocks(problem, addressing)
    lengths, counts = (box.size, box.counts) if box else ((0,) * 4, (0,) * 4)
    return arguments(
        DensePhase, problem, phase, written_places(problem, phase), tap_numbers(unpacked, addressing), load_base(problem, addressing),
        tiles=across * down * math.prod(repeats(problem)), tiles_n=across, blocks=blocks, part=ceil(blocks, config.CLUSTER),
        channel_blocks=ceil(_summed(problem), stage_channels(problem)), last_steps=_last_steps(problem),
        group_rows=problem.result_channels // problem.groups, group_channels=_summed(problem), **by_axis("numbers_", (0, 0, 0)),
        **by_axis("offsets_", (0, 0, 0)), pixels=pixels, **by_axis("box_", lengths, "whdn"), **by_axis("boxes_", counts[:3], "whd"),
        depth=phase.size[0], height=phase.size[1], images=problem.N, store_mode=store_mode(problem, config.BLOCK_N, phase),
        with_moments=int(with_moments),
    )  # fmt: skip


def filter_key(problem: ConvProblem, config: DenseNhwc) -> Hashable:
    return "transposed", problem.direction, problem.dtype, problem.C, problem.K, problem.filter_size


def _tiles_in(sizes: dict[tuple[int, int], tuple[int, ...]]) -> list[DenseNhwc]:
    return [DenseNhwc(*size, CLUSTER=cluster) for size, clusters in sizes.items() for cluster in clusters]


def variants(device: Device) -> Iterator[VariantSet]:
    for tile, mn_major, kind in product(_tiles_in(PHASED_TILES | TILES), (0, 1), ELEMENTS.values()):
        choices = fixed(deepest(tile, bool(mn_major and kind != FLOAT)))
        choices |= {"TYPE": (kind,), "W_MN_MAJOR": (mn_major,), "PHASES": (1, PHASES)}
        yield VariantSet("hopper_dense", choices, _is_listed, "sm_90a")
        if tile.CLUSTER == 1 and not (mn_major and kind == FLOAT):
            yield VariantSet("hopper_dense", choices | {"PHASES": REGIONS, "BORDERED": (1,)}, _is_listed, "sm_90a")
    yield from transpose_filter.variants()


def _is_listed(d: Mapping[str, int]) -> bool:
    if d["W_MN_MAJOR"] and d["TYPE"] == FLOAT and not _may_transpose(d["BLOCK_M"], d["BLOCK_N"]):
        return False
    return d["CLUSTER"] in (PHASED_TILES if d["PHASES"] == PHASES else TILES).get((d["BLOCK_M"], d["BLOCK_N"]), ())


def configs(problem: ConvProblem, device: Device) -> Iterator[DenseNhwc]:
    addressings = _addressed(problem)[1]
    blocks, mn_major = _blocks(problem, addressings[0]), _reads_mn_major(problem)
    for tile in _tiles_in(TILES if count_phases(problem) == 1 else PHASED_TILES):
        config = deepest(tile, mn_major)
        if (tile.CLUSTER == 1 or blocks >= 2 * tile.CLUSTER) and LEGAL.refusal(problem, config) is None:
            yield config


def _filter_cycles(problem: ConvProblem, config: DenseNhwc, mn_major: bool) -> float:
    """Cycles that loads of the filter take in a stage. Rows of a tile past the result's last channel are not loaded."""
    if not mn_major:
        return min(config.BLOCK_N, problem.result_channels) * HOPPER_COST.ROW_CYCLES
    wide = min(stage_channels(problem), config.BLOCK_N)
    channels = min(problem.result_channels, ceil(config.BLOCK_N, wide) * wide)
    stages = ceil(problem.operand_channels, stage_channels(problem))  # of a tap; the last stage has fewer rows of k
    rows = (ROW * (stages - 1) + _last_row(problem)) / stages / problem.itemsize
    return rows * ceil(channels, wide) * pixel_cycles(channels * problem.itemsize)


def time(problem: ConvProblem, config: DenseNhwc, device: Device) -> float:
    """Microseconds that `config` should take: loads or arithmetic, stores, rounds of tiles; and bytes from and to memory."""
    _, addressings = _addressed(problem)
    many = math.prod(repeats(problem))
    mn_major, shared, size = _reads_mn_major(problem), config.CLUSTER > 1, problem.itemsize
    pixel, slower = _summed(problem) * size, 1.0
    if addressings[0].spatial_dims == 3:
        slower = COST.VOLUME_NARROW if pixel % ROW == 32 else COST.VOLUME
    channel_blocks = ceil(_summed(problem), stage_channels(problem))
    cycles = pixel_cycles(pixel)
    if pixel % ROW == _last_row(problem):
        cycles = HOPPER_COST.ROW_CYCLES
    loads = config.BLOCK_M * cycles * slower + _filter_cycles(problem, config, mn_major)
    loads *= COST.SMALL_TILE if config.BLOCK_M == 64 else 1.0
    filled = 1 - (1 - _last_steps(problem) / STEPS) / channel_blocks  # part of the steps of a tap's stages that are multiplied
    step = max(COST.MULTIPLIED * 2 * config.BLOCK_N * config.BLOCK_M / 64 * filled, loads) / CLOCK
    rate = COST.WIDEST_FINISHED if config.BLOCK_N > MOMENTS_COLUMNS else HOPPER_COST.FINISHED
    sums = config.BLOCK_M * config.BLOCK_N
    end = sums * 4 / COST.ADDED if shared else finished_time(problem, config.BLOCK_M, config.BLOCK_N, rate)
    slots = at_once(device, config.CLUSTER)
    us, all_jobs, loaded = 0.0, 0, 0.0
    for group in batches(addressings, PHASES):
        jobs = [math.prod(_tiles(problem, config, one)) * many * config.CLUSTER for one in group]
        works = [ceil(_blocks(problem, one), config.CLUSTER) * step + end for one in group]
        mean = sum(map(operator.mul, jobs, works)) / sum(jobs)
        rounds = ceil(sum(jobs), slots)
        if rounds == 2 and config.BLOCK_M == 64:
            mean *= COST.TWO_ROUNDS
        elif rounds > 2 and shared:
            mean *= COST.MORE_ROUNDS
        all_jobs += sum(jobs)
        further = COST.PER_ROUND * (rounds - 1) if shared else 0
        us += (COST.PER_LAUNCH if us else HOPPER_COST.BEGIN) + max(*works, 0.0, rounds * mean + further)
        loaded += sum(math.prod(_tiles(problem, config, one)) * _blocks(problem, one) for one in group) / count_phases(problem)
    us += COST.CLUSTERED.get(config.CLUSTER, 0.0) if shared else COST.HALF_FULL if 2 * all_jobs <= device.multiprocessors else COST.FULL
    # blocks of the same pixels and other channels or phases load them together; all else comes from the L2 cache again
    loaded *= config.BLOCK_M * min(pixel, ROW) / ceil(problem.result_channels // problem.groups, config.BLOCK_N)
    moved = read_bytes(problem) + written_bytes(problem) + size * math.prod(problem.weight_shape)
    result_bytes = size * math.prod(problem.result_shape)
    if many > 1 and problem.result_channels * size < ROW:  # each phase writes parts of cache lines
        us = max(us, result_bytes / COST.PARTS_OF_LINES)
    us = together(COST.TOGETHER, us, HOPPER_COST.BEGIN + loaded / COST.CACHE_RATE, HOPPER_COST.BEGIN + moved / COST.MEMORY)
    lies = problem.direction == "fprop" or mn_major or _transposes(problem, config, device)
    transposed = 0 if lies else transpose_filter.TIME + 2 * size * math.prod(problem.weight_shape) / COST.MEMORY
    return COST.CALIBRATION * us + transposed
