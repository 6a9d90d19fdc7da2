"""float64 convolutions and their gradients on the tensor cores of Ampere and Hopper (``cu/mma/dmma.cu``).

A sum is one chain of IEEE fused multiply-adds if cuDNN's is no shorter; longer ones are cut into chains of 64 products. A filter is packed
only if neither its rows of gemm k nor its rows of channels are contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from pycuda_conv.engines.base import FLAG, Config, ConvProblem, Device, KernelLaunch, VariantSet, fastest, fixed, kernel_struct
from pycuda_conv.engines.costs import MULTIPROCESSORS, costs
from pycuda_conv.engines.geometry import (
    Phase,
    arguments,
    axis_phases,
    by_axis,
    ceil,
    filter_strides,
    finish,
    phases,
    places,
    too_many_phases,
    written_strides,
)
from pycuda_conv.engines.limits import NOT_EMPTY, Takes, Tiles, of_capability, types
from pycuda_conv.engines.schedule import FINISH, INPUT, PACKED, RESULT, WEIGHT, WORKSPACE, Buffer, Schedule
from pycuda_conv.engines.split_sum import reduce_launch, splits

BLOCK_K = 16  # of gemm k, in a stage, for a warp
FILTER_THREADS = 256
MOST = 2**31 - 2**20  # elements of an array: the kernel counts in 32 bits, and a little past the end


@dataclass(frozen=True)
class Dmma(Config):
    """One tile of ``dmma.cu``: BLOCK_M output channels, BLOCK_N pixels, and SPLIT parts of the sum."""

    BLOCK_M: int = 64
    BLOCK_N: int = 64
    SPLIT: int = 1


CONFIGS, LAYOUTS, TENSOR_CORES, MOST_VARIANTS = (Dmma,), ("NCHW", "NHWC", "CNHW"), True, {"cuda": 67}
RUNS_ON = of_capability((8, 0), (9, 0), (10, 0))  # others have a few double-precision units for compatibility alone
COST = costs("mma.dmma")
DmmaArguments = kernel_struct("dmma", "DmmaArguments")
#: The arguments of ``dmma_filter``: what it packs, and where that lies.
DmmaFilterArguments = kernel_struct("dmma", "DmmaFilterArguments")

@dataclass(frozen=True)
class _Tile:
    """Properties of a tile of one size."""

    WARP_M: int  # a warp's part of the tile
    WARP_N: int
    STAGES: int  # of the ring on Hopper
    stages_80: int  # on Ampere, which has less shared memory
    SLICES: int  # of 8 k in a stage
    rates: tuple[float, ...]  # TFLOP/s of all 132 multiprocessors with one block each, with two, and so on, up to as many as fit
    start: float  # microseconds of a block beside its products


#: WARP_M, WARP_N, STAGES, stages_80, and SLICES.
SIZES = {(64, 64): (32, 32, 4, 3, 2), (128, 64): (32, 64, 4, 3, 2), (32, 32): (16, 16, 5, 3, 4), (32, 64): (16, 32, 4, 3, 2)}


def _tiles_of(costs: Mapping[tuple[int, int], tuple[tuple[float, ...], float]]) -> dict[tuple[int, int], _Tile]:
    return {size: _Tile(*SIZES[size], *of_tile) for size, of_tile in costs.items()}


TILES = _tiles_of(COST.TILES)
CUT = _tiles_of(COST.CUT)  # for sums that are cut into chains: these need twice the registers, which larger tiles do not have
OF_ONE_TAP = _tiles_of(COST.ONE_TAP)  # their times for one tap, which needs no tables


def _tile(problem: ConvProblem, config: Dmma) -> _Tile | None:
    """The tile of `config`; None if sums have to be cut, and the tile has no registers for that."""
    size = config.BLOCK_M, config.BLOCK_N
    return CUT.get(size) if _cuts(problem, config) else TILES[size]


def _cuts(problem: ConvProblem, config: Dmma) -> bool:
    """Whether sums are cut into chains: gradients' sums that are longer than cuDNN's."""
    part = ceil(ceil(_reduction(problem), BLOCK_K), config.SPLIT)  # in stages
    return part > ceil(_longest_chain(problem), BLOCK_K)


def _longest_chain(problem: ConvProblem) -> int:
    """Products of the longest chain that loses no more than a sum of cuDNN's.

    cuDNN's errors show how it sums: fprop in one chain, wgrad by image, and dgrad in one chain, except with strides, on lines and with
    many channels, where it sums by tap. Dilations and volumes were not measured, and count as these.
    """
    if problem.layout == "CNHW":
        return math.prod(problem.filter_size)
    channels = problem.operand_channels // problem.groups
    plain = problem.ndim == 2 and problem.stride == problem.dilation == (1, 1, 1) and channels < 1024
    return MOST if problem.direction == "fprop" or plain else channels


def _reduction(problem: ConvProblem) -> int:
    """gemm k with all taps; if phases are merged, the largest gemm k of a part."""
    taps = max(part.taps for part in _parts(problem)) if _merges(problem) else math.prod(problem.filter_size)
    return problem.operand_channels // problem.groups * taps


@dataclass(frozen=True)
class _Form:
    """How the operands are read: see the head of the kernel.

    packs: the filter is packed as rows of k with the channels innermost; it may already lie so.
    """

    packs: bool
    A_VEC: int
    B_IN_ROWS_OF_K: int
    B_VEC: int
    A_IN_ROWS_OF_K: int = 1
    ONE_TAP: int = 0

    @classmethod
    def of(cls, problem: ConvProblem) -> _Form:
        channels, taps = problem.operand_channels // problem.groups, math.prod(problem.filter_size)
        unshifted = problem.dilation == (1, 1, 1) and not any(problem.padding_before)
        if problem.layout == "CNHW":
            # k runs along rows of dy and of x; pairs of pixels can be copied if no tap shifts them
            even = taps % 2 == 0
            unshifted = unshifted and problem.operand_size == problem.filter_size and problem.result_size == (1, 1, 1)
            return cls(False, 1 + even, 1, 1 + (even and unshifted))
        last = problem.layout == "NHWC"
        one_tap = not last and all(_stays_inside(part.phase, problem.operand_size) for part in _parts(problem) if part.taps)
        along_m = problem.direction == "dgrad" and (last or one_tap) and _lies_along_m(problem)
        packs = not along_m and (problem.direction == "dgrad" or (last and taps > 1))
        along = problem.result_channels // problem.groups * taps if along_m else channels if packs or last else channels * taps
        a_vec = 1 + (along % 2 == 0)
        if last:
            return cls(packs, a_vec, 1, 1 + (a_vec == 2 and channels % 2 == 0), int(not along_m))
        unshifted = unshifted and taps == 1 and problem.stride == (1, 1, 1) and problem.operand_size == problem.result_size
        pairs = a_vec == 2 and unshifted and math.prod(problem.operand_size) % 2 == 0
        return cls(packs, a_vec, 0, 1 + pairs, int(not along_m), int(one_tap))


def _stays_inside(phase: Phase, operand_size: tuple[int, int, int]) -> bool:
    """Whether a phase has one tap, and no pixel reads outside the image by it."""
    places = zip(phase.size, phase.stride, phase.pad, operand_size, strict=True)
    return phase.taps == (1, 1, 1) and all(pad <= 0 and (pixels - 1) * stride - pad < size for pixels, stride, pad, size in places)


def _lies_along_m(problem: ConvProblem) -> bool:
    """Whether dgrad finds its filter as rows of the channels that it writes, or of these and all phases."""
    part, *others = _parts(problem)
    taps = math.prod(problem.filter_size)
    return taps == 1 or (not others and part.taps == 1 and part.phases == taps and part.phase.first == (0, 0, 0))


def schedule(problem: ConvProblem, config: Dmma, device: Device, with_moments: bool = False) -> Schedule:
    form, split = _Form.of(problem), config.SPLIT
    workspace, target = (8 * math.prod(problem.result_shape) * split, WORKSPACE) if split > 1 else (0, RESULT)
    after = [[reduce_launch(problem, split, WORKSPACE)]] if split > 1 else []

    def steps(weight: Buffer, packed: bool) -> list[list[KernelLaunch]]:
        return [[_product(problem, config, form, part, weight, packed, target, device) for part in _parts(problem)], *after]

    if not form.packs:
        return Schedule.plain(steps(WEIGHT, False), workspace)
    packed, filter_last = steps(PACKED, True), None
    if problem.layout == "NHWC" and math.prod(problem.filter_size) > 1:  # a filter with its channels last lies as it would be packed
        filter_last = steps(WEIGHT, True) if problem.direction == "fprop" else [_pack(problem, True), *packed]
    pack = [_pack(problem, False)]
    return Schedule(pack, packed, pack + packed, workspace, 8 * math.prod(problem.weight_shape), filter_last=filter_last)


def filter_key(problem: ConvProblem, config: Dmma) -> Hashable:
    if not _Form.of(problem).packs:
        return None
    parts = [(part.phase.first, part.phase.every, part.many, part.at) for part in _parts(problem)] if _merges(problem) else []
    return "rows of k", problem.direction, problem.C, problem.K, problem.groups, problem.filter_size, *parts


@dataclass(frozen=True)
class _Part:
    """A launch: a phase, and `many` neighbouring phases along each axis whose pixels read the same pixels.

    The phases count as channels. `at` is where the part's filter is packed, in elements of each channel of the result.
    """

    phase: Phase
    many: tuple[int, int, int]
    at: int

    @property
    def phases(self) -> int:
        return math.prod(self.many)

    @property
    def taps(self) -> int:
        return math.prod(self.phase.taps)


@lru_cache(maxsize=64)  # the planner asks for them once a configuration
def _parts(problem: ConvProblem) -> tuple[_Part, ...]:
    """The launches, those with most taps first."""
    if problem.direction == "fprop":
        return (_Part(phases(problem)[0], (1, 1, 1), 0),)
    found, at, channels = [], 0, problem.operand_channels // problem.groups
    for combination in product(*(_runs(axis) for axis in axis_phases(problem))):
        phase = Phase.of_axes([values for values, _ in combination])
        found.append(_Part(phase, (combination[0][1], combination[1][1], combination[2][1]), at))
        at += channels * found[-1].taps * found[-1].phases
    return tuple(sorted(found, key=lambda part: -part.taps))


def _runs(axis: list[tuple[int, ...]]) -> list[tuple[tuple[int, ...], int]]:
    """The first of each run of phases of an axis, and the run's length: each begins a pixel and a tap later, and reads the same pixels."""
    found: list[tuple[tuple[int, ...], int]] = []
    for one in axis:
        if found:
            (pixels, origin, step, taps, first, *others), many = found[-1]
            if taps and one == (pixels, origin + many, step, taps, first + many, *others):
                found[-1] = found[-1][0], many + 1
                continue
        found.append((one, 1))
    return found


def _pack(problem: ConvProblem, filter_last: bool) -> list[KernelLaunch]:
    """The launches that pack the filter, which has its channels last with `filter_last`."""
    groups = problem.groups
    rows, channels = problem.result_channels // groups, problem.operand_channels // groups
    w_group, w_row, w_channel, w_tap = filter_strides(problem, filter_last)
    tap_strides, found = _tap_strides(problem.filter_size, w_tap), []
    for part in _packed_parts(problem):
        (_, r, s), (_, h, w) = part.phase.taps, part.many
        w_base = sum(first * stride for first, stride in zip(part.phase.first, tap_strides, strict=True))
        w_t, w_r, w_s = (every * stride for every, stride in zip(part.phase.every, tap_strides, strict=True))
        args = DmmaFilterArguments(
            groups * rows, rows, channels, part.taps, r * s, s, part.phases, h * w, w, groups * rows * part.at,
            w_base, w_group, w_row, w_channel, w_t, w_r, w_s, *tap_strides,
        )
        blocks = ceil(groups * rows * channels * part.phases * part.taps, FILTER_THREADS)
        if blocks:
            found.append(KernelLaunch("dmma_filter", {}, blocks, FILTER_THREADS, (WEIGHT, PACKED), (), "dmma", arguments=args))
    return found


def _packed_parts(problem: ConvProblem) -> tuple[_Part, ...]:
    """The parts whose taps are packed, one part behind the other."""
    if _merges(problem):
        return _parts(problem)
    all_taps = replace(_parts(problem)[0].phase, taps=problem.filter_size, first=(0, 0, 0), every=(1, 1, 1))
    return (_Part(all_taps, (1, 1, 1), 0),)


def _tap_strides(taps: tuple[int, int, int], tap: int) -> tuple[int, int, int]:
    """Elements from one tap to the next along each axis, if neighbours are `tap` apart."""
    return taps[1] * taps[2] * tap, taps[2] * tap, tap


def _merges(problem: ConvProblem) -> bool:
    """Whether a launch computes several phases. Then each part has its own packed filter; else the taps keep their order."""
    return any(part.phases > 1 for part in _parts(problem))


def _product(
    problem: ConvProblem, config: Dmma, form: _Form, part: _Part, weight: Buffer, packed: bool, target: Buffer, device: Device
) -> KernelLaunch:
    tile = _tile(problem, config)
    assert tile is not None, "refused"
    defines, args = _defines(config, tile, form, device), _arguments(problem, config, form, part, packed)
    shared = defines["STAGES"] * stage_bytes(config, form)
    grid = _tiles(problem, config, part) * config.SPLIT
    buffers = (INPUT, weight, *FINISH, target)
    threads = 32 * (config.BLOCK_M // tile.WARP_M) * (config.BLOCK_N // tile.WARP_N)
    return KernelLaunch("dmma", defines, grid, threads, buffers, (), shared=shared, arguments=args)


def _tiles(problem: ConvProblem, config: Dmma, part: _Part) -> int:
    """Tiles of a part, without splits."""
    rows, pixels = problem.result_channels // problem.groups * part.phases, problem.N * math.prod(part.phase.size)
    return ceil(pixels, config.BLOCK_N) * problem.groups * ceil(rows, config.BLOCK_M)


def stage_bytes(config: Dmma, form: _Form) -> int:
    """Bytes of shared memory of a stage."""
    return 8 * block_k(config) * (config.BLOCK_M + config.BLOCK_N + (0 if form.A_IN_ROWS_OF_K else 4) + (0 if form.B_IN_ROWS_OF_K else 4))


def block_k(config: Dmma) -> int:
    """gemm k of a stage."""
    tile = TILES[config.BLOCK_M, config.BLOCK_N]
    return 8 * tile.SLICES


def _defines(config: Dmma, tile: _Tile, form: _Form, device: Device) -> dict[str, int]:
    return {
        "BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N, "WARP_M": tile.WARP_M, "WARP_N": tile.WARP_N, "SLICES": tile.SLICES,
        "STAGES": tile.STAGES if device.capability >= (9, 0) else tile.stages_80, "MIN_BLOCKS": len(tile.rates),
        "CHAINS": int(tile in CUT.values()), "A_IN_ROWS_OF_K": form.A_IN_ROWS_OF_K, "A_VEC": form.A_VEC,
        "B_IN_ROWS_OF_K": form.B_IN_ROWS_OF_K, "B_VEC": form.B_VEC, "ONE_TAP": form.ONE_TAP,
    }


def _arguments(problem: ConvProblem, config: Dmma, form: _Form, part: _Part, packed: bool) -> Any:
    """The kernel's arguments of a part; `packed`: the filter lies as :func:`_pack` leaves it."""
    groups, phase, (_, r, s) = problem.groups, part.phase, part.phase.taps
    rows, channels, taps = problem.result_channels // groups * part.phases, problem.operand_channels // groups, part.taps
    w_group, w_row, w_channel, _ = filter_strides(problem)
    if not form.A_IN_ROWS_OF_K:
        w_row = 1
    if packed:  # the part's own taps, contiguous, or all taps
        w_row = channels * (taps if _merges(problem) else math.prod(problem.filter_size))
        w_group, w_channel = rows * w_row, 1
    tap_strides = _tap_strides(part.phase.taps if packed and _merges(problem) else problem.filter_size, channels if packed else 1)
    w_base, of_taps = problem.result_channels * part.at, list(tap_strides)
    if not (packed and _merges(problem)):
        w_base = sum(first * stride for first, stride in zip(phase.first, tap_strides, strict=True))
        of_taps = [every * stride for every, stride in zip(phase.every, tap_strides, strict=True)]
    inner = max(channels if packed else taps, 1)
    o, p, q = phase.size
    reduction = channels * taps
    y = written_strides(problem)
    _, y_base, *y_steps = places(problem, phase)
    _, height, width = problem.result_size
    pairs = y.pixel == 1 and phase.step == (1, 1, 1) and not any(n % 2 for n in (y.image, y.group, y.channel, o * p * q))
    return arguments(
        DmmaArguments, problem, phase, finish(problem, config.SPLIT > 1), pixels=problem.N * o * p * q, rows=rows, reduction=reduction,
        splits=config.SPLIT, split_steps=ceil(ceil(reduction, block_k(config)), config.SPLIT), tiles_m=ceil(rows, config.BLOCK_M),
        channels_inside=int(packed), inner=inner, rs=max(r * s, 1), s=max(s, 1), opq=o * p * q, w_base=w_base, w_group=w_group,
        w_row=w_row, w_channel=w_channel, **by_axis("w_", of_taps, "trs"), y_base=y_base, phases=part.phases,
        phases_hw=part.many[1] * part.many[2], phases_w=part.many[2], pairs=int(pairs), **by_axis("y_", y_steps),
        **by_axis("phase_", (height * width * y.pixel, width * y.pixel, y.pixel)),
    )


def sum_order(problem: ConvProblem, config: Dmma) -> Hashable:
    """Where a sum is cut."""
    return config.SPLIT, block_k(config)


def variants(device: Device) -> Iterator[VariantSet]:
    for size, tile in dict.fromkeys([*TILES.items(), *CUT.items()]):
        of_tile = _defines(Dmma(*size), tile, _Form(False, 1, 0, 1), device)
        choices = fixed(of_tile) | {"A_IN_ROWS_OF_K": FLAG, "A_VEC": (1, 2), "B_IN_ROWS_OF_K": FLAG, "B_VEC": (1, 2), "ONE_TAP": FLAG}
        yield VariantSet("dmma", choices, _is_listed)
    yield VariantSet("dmma", {})


def _is_listed(d: Mapping[str, int]) -> bool:
    """Whether a product with these defines is ever launched.

    A is copied in pairs wherever B is. Sums of one tap are never cut.
    """
    a_rows, b_rows, one_tap = d["A_IN_ROWS_OF_K"], d["B_IN_ROWS_OF_K"], d["ONE_TAP"]
    if b_rows and one_tap:
        return False
    if not (b_rows or one_tap) and (d["B_VEC"] == 2 or not a_rows):
        return False
    return d["B_VEC"] <= d["A_VEC"] and not (d["CHAINS"] and (one_tap or not a_rows))


TAKES = Takes(types("float64"), NOT_EMPTY, lambda problem: too_many_phases(problem, besides_repeats=True))
LEGAL = Tiles(
    TAKES, Dmma,
    ("it counts elements in 32 bits", lambda p, c: max(p.largest_array, c.SPLIT * math.prod(p.result_shape), _reduction(p)) < MOST),
    ("it has at least one split", lambda _, config: config.SPLIT >= 1),
    ("its tile has no registers for sums that are cut into chains", lambda problem, config: _tile(problem, config) is not None),
    blocks=lambda problem, config: max(_tiles(problem, config, part) for part in _parts(problem)) * config.SPLIT,
    together={("BLOCK_M", "BLOCK_N"): TILES},
)  # fmt: skip


def configs(problem: ConvProblem, device: Device) -> Iterator[Dmma]:
    return LEGAL.legal(problem, SPLIT=splits(problem, _reduction(problem) // 128))


def time(problem: ConvProblem, config: Dmma, device: Device) -> float:
    """Microseconds that `config` should take: rounds of blocks, of which the last may leave multiprocessors half empty.

    Phases run side by side, and what remains at the end is most of the longest block. A split sum is written and read once more, in
    the L2 cache if it fits.
    """
    form, tile, multiprocessors = _Form.of(problem), _tile(problem, config), device.multiprocessors
    if tile is None:
        return math.inf
    if form.ONE_TAP:
        tile = OF_ONE_TAP[config.BLOCK_M, config.BLOCK_N]
    at_once, rate = len(tile.rates), tile.rates[-1]
    products = 2 * config.BLOCK_M * config.BLOCK_N * BLOCK_K / (rate * 1e6 / MULTIPROCESSORS)
    stage = math.hypot(products, COST.LINE * _lines(problem, config, form))
    channels = problem.operand_channels // problem.groups
    ends = tile.start + (COST.RESIDUAL * config.BLOCK_M * config.BLOCK_N if problem.has_residual and config.SPLIT == 1 else 0)
    blocks = [
        (_tiles(problem, config, part) * config.SPLIT,
         ceil(ceil(channels * part.taps, block_k(config)), config.SPLIT) * block_k(config) // BLOCK_K * stage + ends)
        for part in _parts(problem)
    ]  # fmt: skip
    us, added = COST.BEGIN["one tap" if form.ONE_TAP else "packed" if form.packs else "plain"]
    if len(blocks) == 1:
        ((count, length),) = blocks
        rounds, rest = divmod(ceil(count, multiprocessors), at_once)
        us += length * (rounds * at_once + (rest * rate / tile.rates[rest - 1] if rest else 0))
    else:
        us += sum(count * length for count, length in blocks) / multiprocessors
        us += COST.LAST * at_once * max(length for _, length in blocks)
        us += COST.LAUNCH * max(0, len(blocks) - 4)
    if config.SPLIT > 1:
        size = math.prod(problem.result_shape) * 8
        us += added + size * (2 * config.SPLIT + 1) / (COST.L2_RATE if config.SPLIT * size < COST.L2 else COST.PART_RATE)
    return max(us, COST.MEMORY_BEGIN + problem.bytes / COST.MEMORY)


def _lines(problem: ConvProblem, config: Dmma, form: _Form) -> float:
    """Cache lines of 128 bytes that a stage's copies touch: a warp's copy takes as long as its lines are many."""
    if form.B_IN_ROWS_OF_K:
        return config.BLOCK_M + config.BLOCK_N * (1 if problem.layout == "NHWC" else 2)
    apart = problem.stride[-1] if problem.direction == "fprop" else 1  # neighbouring pixels
    return config.BLOCK_M + BLOCK_K * config.BLOCK_N * min(1, apart / 16)


#: How much faster the model must find another tile than the usual one: it is another text, for which a call may have to wait.
USUAL = (64, 64)


def choose(problem: ConvProblem, device: Device) -> tuple[float, Dmma] | None:
    """The configuration that should be fastest, with the usual tile unless another is clearly faster; None if none can run it."""
    timed = [(time(problem, config, device), config) for config in configs(problem, device)]
    usual = fastest(one for one in timed if (one[1].BLOCK_M, one[1].BLOCK_N) == USUAL)
    best = fastest(timed)
    return usual if best and usual and usual[0] <= COST.CLEARLY * best[0] else best
