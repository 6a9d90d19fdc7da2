"""The direct engine: one output pixel a thread on plain cores, on CUDA and on OpenCL.

Each configuration class is one kernel in ``cu/`` (``direct/single.cu`` to ``direct/wgrad.cu``). A rule says which of these kernels runs;
a model says how long it takes, so that other engines compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from pycuda_conv.engines import split_sum
from pycuda_conv.engines.base import BY_RULE, FLAG, LAST_RESORT, Config, Device, KernelLaunch, VariantSet, costs, fastest, kernel_struct
from pycuda_conv.engines.costs import spread
from pycuda_conv.engines.direct.configs import (
    COMMON,
    CONFIGS,
    INTEGER_TILES,
    MOST_COMMON,
    Batched,
    Dgrad,
    Made,
    Single,
    Tile,
    Wgrad,
    flips,
    layer_constants,
    parts_of_sum,
    result_pixels,
    split_of,
    tiles_of,
    unrolled_dgrad,
)
from pycuda_conv.engines.direct.tile import adapts, has_place, tile_launch, tile_room, tile_time, tile_variants
from pycuda_conv.engines.direct.wgrad import WGRAD, wgrad_config, wgrad_configs, wgrad_grid, wgrad_launch, wgrad_time, wgrad_variants
from pycuda_conv.engines.geometry import accumulator_bytes, arguments, by_axis, ceil, finish, needs_64_bits, outputs_apart, taps_apart
from pycuda_conv.engines.limits import Takes, Tiles
from pycuda_conv.engines.schedule import INPUT, OPERANDS, RESULT, STATIC_SHARED_BYTES, WEIGHT, Schedule
from pycuda_conv.problem import DTYPE_CODES, ConvProblem

__all__ = ["CONFIGS", "adapts"]  # with what stands here: the engine

#: Channels of a thread of direct/batched.cu and direct/dgrad.cu, the most first. OpenCL devices have fewer kernels to choose from. In
#: direct/batched.cu one channel a thread would not be faster: a thread waits for memory as long with two.
BLOCKS = {("cuda", "fprop"): (8, 4, 2), ("cuda", "dgrad"): (8, 4, 2, 1), ("opencl", "fprop"): (8, 2), ("opencl", "dgrad"): (8, 2)}
DIRECT_SPLITS = (1, 2, 4, 8)  # SPLIT of direct/batched.cu and direct/dgrad.cu
FEW = 1024  # results; for fewer the launch takes most of the time, and the smallest kernel wins
WARP = 32  # pixels of a warp of direct/single.cu
MOST_MACS = 2e9  # multiplications up to which sums may be split: beyond, matrix products are faster
LAYOUTS = "NCHW", "CNHW"
MOST_VARIANTS = {"cuda": 278, "opencl": 122}


def _grid(problem: ConvProblem, config: Config) -> int:
    planes, pixels, (_, p, q) = problem.N * problem.K, result_pixels(problem), problem.result_size
    if isinstance(config, Single):
        return planes * ceil(p * q, config.THREADS)
    if isinstance(config, Tile):
        return planes * ceil(p, config.TILE_P) * ceil(q, config.TILE_Q)
    if isinstance(config, Batched):
        return ceil(pixels, config.THREADS) * problem.groups * ceil(problem.K // problem.groups, config.BLOCK_K) * config.SPLIT
    if isinstance(config, Dgrad):
        # if there are no channels to write, as for an empty operand, the grid is empty
        return ceil(pixels, config.THREADS) * problem.groups * ceil(problem.C // problem.groups, config.BLOCK_C) * config.SPLIT
    assert isinstance(config, Wgrad)
    return wgrad_grid(problem, config)


_PLAIN = "it takes no such border, and no such integers", lambda p, config: not p.adapted or has_place(p, config)
_PLANES = "it takes NCHW arrays", lambda p, _: p.layout == "NCHW"
_FORWARD = "it computes forward convolutions", lambda p, _: p.direction == "fprop"
_TRANSPOSED = "it computes transposed convolutions", lambda p, _: p.direction == "dgrad"
_ALONE = (
    "it takes one input channel a group and at most two spatial axes",
    lambda p, c: (p.direction == "fprop" or (isinstance(c, Tile) and flips(p))) and p.C == p.groups and not p.has_depth,
)


def _shared(problem: ConvProblem, config: Any) -> int:
    taps = math.prod(problem.filter_size)
    of_block = config.BLOCK_K * config.BLOCK_C * taps if isinstance(config, Batched | Dgrad) else taps
    return accumulator_bytes(problem) * (tile_room(problem, config) if isinstance(config, Tile) else of_block)


TAKES, _ROOM = Takes(), (_shared, STATIC_SHARED_BYTES)
LEGAL = {
    Single: Tiles(TAKES, Single, _PLAIN, _PLANES, _ALONE, shared=_ROOM, blocks=_grid),
    Tile: Tiles(
        TAKES, Tile, _PLAIN,
        (f"of integers it takes {' and '.join(map(str, INTEGER_TILES))}", lambda p, c: not p.input_dtype or c in INTEGER_TILES), _PLANES,
        _ALONE, ("ROWS must divide TILE_P", lambda _, c: c.TILE_P % c.ROWS == 0),
        ("a block has 32 to 1024 threads", lambda _, c: 32 <= c.TILE_P // c.ROWS * c.TILE_Q <= 1024), shared=_ROOM, blocks=_grid,
    ),
    Dgrad: Tiles(TAKES, Dgrad, _PLAIN, _PLANES, _TRANSPOSED, shared=_ROOM, blocks=_grid),
    Batched: Tiles(TAKES, Batched, _PLAIN, _PLANES, _FORWARD, shared=_ROOM, blocks=_grid), Wgrad: WGRAD,
}  # fmt: skip


SingleArguments = kernel_struct("direct_single", "SingleArguments")

BatchedArguments = kernel_struct("direct_batched", "BatchedArguments")
DgradArguments = kernel_struct("direct_dgrad", "DgradArguments")


def adds_border(source: ConvProblem, problem: ConvProblem, config: Config) -> bool:
    """Whether :func:`schedule` takes the image of `source`, which has a border, for the wider one of `problem`: ``direct/wgrad.cu`` may."""
    return isinstance(config, Wgrad) and config.FILTERS == 1


def border_time(source: ConvProblem, config: Config) -> float:
    return float(COST.BORDERED_TAP * source.macs)


def schedule(
    problem: ConvProblem, config: Config, device: Device, with_moments: bool = False, source: ConvProblem | None = None
) -> Schedule:
    kernel, make = _KERNELS[type(config)]
    defines, args, layer, room = make(source or problem, config)
    threads = config.TILE_P // config.ROWS * config.TILE_Q if isinstance(config, Tile) else defines["THREADS"]
    split = split_of(config)
    size = math.prod(problem.result_shape)
    parts = split * max(size, args.run if isinstance(config, Wgrad) else 0)
    defines = {"DTYPE": DTYPE_CODES[problem.dtype], "INDEX_64": int(needs_64_bits(problem, parts if split > 1 else 0))} | defines
    if device.backend != "cuda" and "UNROLLED" in defines:  # unrolling gains nothing there
        defines = {name: defines[name] for name in ("DTYPE", "INDEX_64", "THREADS", "BLOCK_C")}
    buffers = (INPUT, WEIGHT, RESULT) if isinstance(config, Wgrad) else OPERANDS
    shared = room * accumulator_bytes(problem)
    if room and device.backend != "cuda":
        defines["ROOM"], shared = STATIC_SHARED_BYTES // accumulator_bytes(problem), 0
    launch = KernelLaunch(kernel, defines, _grid(problem, config), threads, buffers, (), shared=shared, arguments=args, layer=layer)
    return split_sum.in_parts(problem, launch, split)


def _single(problem: ConvProblem, config: Single) -> Made:
    args = arguments(SingleArguments, problem, tiles=ceil(math.prod(problem.output_size), config.THREADS))
    return {"THREADS": config.THREADS}, args, layer_constants(problem, args, "tiles h w p q"), math.prod(problem.filter_size)


def _batched(problem: ConvProblem, config: Batched) -> Made:
    (t, r, s), groups = problem.filter_size, problem.groups
    cg, kg = problem.C // groups, problem.K // groups
    k_tiles, block_taps = ceil(kg, config.BLOCK_K), config.BLOCK_C * t * r * s
    args = arguments(
        BatchedArguments, problem, n_pixels=result_pixels(problem), cg=cg, kg=kg, k_tiles=k_tiles, block_c=config.BLOCK_C,
        block_taps=block_taps, **parts_of_sum(problem, config.SPLIT, cg, config.BLOCK_C), **finish(problem, config.SPLIT > 1),
    )  # fmt: skip
    elements = block_taps * config.BLOCK_K
    defines = {"THREADS": config.THREADS, "BLOCK_K": config.BLOCK_K}
    fits = _flat(problem) and r == s == COMMON and elements * accumulator_bytes(problem) <= MOST_COMMON
    common = {"R": r, "S": s, "AXES": 2} if fits else {}
    layer = layer_constants(problem, args, "n_pixels plane p q split run part_size d h w")
    return defines | common, args, layer, elements


def _flat(problem: ConvProblem) -> bool:
    """Whether the filter is 2-d or 1-d and has no dilation."""
    return not problem.has_depth and problem.dilation == (1, 1, 1)


def _dgrad(problem: ConvProblem, config: Dgrad) -> Made:
    (_, h, w), groups, taps = problem.input_size, problem.groups, math.prod(problem.filter_size)
    cg, kg = problem.C // groups, problem.K // groups
    c_tiles = ceil(cg, config.BLOCK_C)
    args = arguments(
        DgradArguments, problem, n_pixels=result_pixels(problem), hw=h * w, h=h, w=w, cg=cg, kg=kg, c_tiles=c_tiles, block_k=config.BLOCK_K,
        **parts_of_sum(problem, config.SPLIT, kg, config.BLOCK_K), **by_axis("", problem.output_size, "opq"), filters=taps * config.BLOCK_C,
        **by_axis("every_", taps_apart(problem)), **by_axis("back_", outputs_apart(problem)), **finish(problem, config.SPLIT > 1),
    )  # fmt: skip
    defines = {"THREADS": config.THREADS, "BLOCK_C": config.BLOCK_C} | _unrolled(problem, config)
    layer = layer_constants(problem, args, "n_pixels plane h w split run part_size o p q")
    return defines, args, layer, config.BLOCK_K * taps * config.BLOCK_C


def _unrolled(problem: ConvProblem, config: Dgrad) -> dict[str, int]:
    """The defines of a text of ``direct/dgrad.cu`` whose loops over r and s are unrolled; none if they are not."""
    nbytes = config.BLOCK_K * math.prod(problem.filter_size) * config.BLOCK_C * accumulator_bytes(problem)
    if not unrolled_dgrad(problem) or nbytes > MOST_COMMON:
        return {}
    (_, r, s), (_, every_h, every_w) = problem.filter_size, taps_apart(problem)
    totals = _totals(DTYPE_CODES[problem.dtype], config.BLOCK_C)
    return {"UNROLLED": 1, "TOTALS": totals, "R": r, "S": s, "EVERY_H": every_h, "EVERY_W": every_w}


def _totals(code: int, sums: int) -> int:
    """Whether an unrolled text of ``direct/dgrad.cu`` keeps a total beside each of so many sums: for more of float32 it lacks registers."""
    return int(code == 64 or (code == 32 and sums <= 4))


_KERNELS: dict[type, tuple[str, Callable[[ConvProblem, Any], Made]]] = {
    Single: ("direct_single", _single), Tile: ("direct_tile", tile_launch), Batched: ("direct_batched", _batched),
    Dgrad: ("direct_dgrad", _dgrad), Wgrad: ("direct_wgrad", wgrad_launch),
}  # fmt: skip


def sum_order(problem: ConvProblem, config: Config) -> Hashable:
    """The kernel, where it cuts a sum, and in wgrad how many threads share one; the rest of a tile does not change a bit."""
    if isinstance(config, Wgrad):
        return Wgrad, config.THREADS, config.SLICES
    if isinstance(config, Dgrad):  # it sums over the channels of a tap before the next tap; unrolled, over the taps of a channel first
        return Dgrad, config.SPLIT, config.BLOCK_K, _unrolled(problem, config).get("TOTALS")
    if isinstance(config, Batched) and config.SPLIT > 1:
        return Batched, config.SPLIT, config.BLOCK_C
    return (type(config),)


def variants(device: Device) -> Iterator[VariantSet]:
    for code in DTYPE_CODES.values():
        acc = 8 if code == 64 else 4
        room = {} if device.backend == "cuda" else {"ROOM": (STATIC_SHARED_BYTES // acc,)}
        common = {"DTYPE": (code,), "INDEX_64": FLAG}
        yield VariantSet("direct_single", common | room | {"THREADS": (128,)})
        yield from tile_variants(code, acc, common | room, device)
        batched = common | room | {"THREADS": (128,), "BLOCK_K": BLOCKS[device.backend, "fprop"]}
        yield VariantSet("direct_batched", batched)
        yield VariantSet("direct_batched", batched | {"R": (COMMON,), "S": (COMMON,), "AXES": (2,)})
        dgrad = common | room | {"THREADS": (128,), "BLOCK_C": BLOCKS[device.backend, "dgrad"]}
        yield VariantSet("direct_dgrad", dgrad)
        for every in (1, 2) if device.backend == "cuda" else ():
            unrolled = {"UNROLLED": (1,), "TOTALS": FLAG, "R": (COMMON,), "S": (COMMON,), "EVERY_H": (every,), "EVERY_W": (every,)}
            yield VariantSet("direct_dgrad", dgrad | unrolled, lambda d: d["TOTALS"] == _totals(d["DTYPE"], d["BLOCK_C"]))
        yield from wgrad_variants(code, acc, device)


COST = costs("direct.direct")


def time(problem: ConvProblem, config: Config, device: Device) -> float | None:
    """Microseconds that `config` should take; None for direct/single.cu where a rule chooses it: for few results.

    A thread of direct/batched.cu or direct/dgrad.cu waits for memory at every channel. So its time follows from the channels that it
    reads and from how many threads there are for each that fits, not from multiplications. The same holds for pixels in direct/wgrad.cu.
    direct/tile.cu takes its multiplications, overhang included, its loads, and its blocks; direct/single.cu the taps of its warps.
    """
    if isinstance(config, Tile):
        return tile_time(problem, config, device)
    if isinstance(config, Wgrad):
        return wgrad_time(problem, config, device)
    if isinstance(config, Single):
        if math.prod(problem.result_shape) <= FEW:
            return None  # by rule
        if problem.K == problem.C:
            warps = problem.N * problem.K * ceil(math.prod(problem.result_size), WARP)  # warps without a pixel do nothing
            us = spread(warps * (COST.SINGLE_TAP * math.prod(problem.filter_size) + COST.SINGLE_WARP), device.multiprocessors)
            return COST.SINGLE_START + max(us, problem.bytes / COST.DIRECT_MEMORY)
        rounds = math.prod(problem.result_shape) / (COST.SINGLE_THREADS * device.multiprocessors)
        return COST.SINGLE_BEGIN + max(COST.TAP, COST.TAP_TOGETHER * rounds) * math.prod(problem.filter_size)
    assert isinstance(config, Batched | Dgrad)
    written, read = problem.result_channels // problem.groups, problem.operand_channels // problem.groups
    taps = math.prod(problem.filter_size)
    lone = isinstance(config, Dgrad) and min(config.BLOCK_K, read) == 1 and not unrolled_dgrad(problem)
    if isinstance(config, Batched):
        block, start = config.BLOCK_K, COST.BATCHED_START
        channel = (COST.BATCHED_CHANNEL + (COST.BATCHED_TAP + COST.BATCHED_SUM * block) * taps) * problem.stride[2] ** COST.STRIDED
        if problem.has_depth and max(problem.stride) > 1:
            channel = max(channel, COST.SLICE_WAIT * problem.filter_size[0])
    else:  # with a stride a pixel meets some of the taps, and a warp of neighbouring pixels as many as any of them, at least one;
        # eight channels' loads are under way at once, or those of a plane of taps
        met = math.prod(max(1.0, n / every) for n, every in zip(problem.filter_size, taps_apart(problem), strict=True))
        block, start = config.BLOCK_C, COST.DGRAD_ROUND
        without_sums = COST.DGRAD_LONE if lone else COST.DGRAD_ANY + COST.DGRAD_LOOP / max(1, min(config.BLOCK_K, read))
        of_tap = without_sums + COST.DGRAD_SUM * block
        least, of_tap = (COST.DGRAD_WAIT, COST.DGRAD_TAP) if unrolled_dgrad(problem) else (COST.DGRAD_LEAST, of_tap)
        channel = max(least, of_tap * met)
    at_once = config.BLOCK_C if isinstance(config, Batched) else config.BLOCK_K
    split, run, _ = parts_of_sum(problem, config.SPLIT, read, at_once).values()
    threads = result_pixels(problem) * problem.groups * ceil(written, block) * split
    channel += COST.STAGED * taps * block / config.THREADS  # a block brings that much of the filter to shared memory
    channels = min(run, read)
    fit = COST.LONE_THREADS if lone and block == 1 else COST.THREADS_OF_EIGHT if block == 8 else COST.THREADS
    rounds = threads / (fit * device.multiprocessors)
    of_thread = channels * channel + COST.CHUNK * (ceil(channels, at_once) - 1)
    if isinstance(config, Batched):  # few threads share a multiprocessor's loads
        of_thread += COST.BATCHED_STORE * block
        us = start + (rounds if rounds > 1 else COST.ALONE + (1 - COST.ALONE) * rounds) * of_thread
    else:
        us = COST.DGRAD_START + max(1.0, rounds) ** COST.DGRAD_ROUNDS * (start + of_thread)
    written_bytes = problem.itemsize * math.prod(problem.result_shape)
    moved = problem.itemsize * math.prod(problem.input_shape) + written_bytes * (2 if problem.has_residual else 1)
    us = max(us, moved / COST.DIRECT_MEMORY)
    if isinstance(config, Dgrad):
        us = max(us, written_bytes / COST.DGRAD_WRITTEN)
    elif problem.has_residual and split == 1:
        us += written_bytes / COST.RESIDUAL_MEMORY
    return us + split_sum.time(problem, split, device)


def choose(problem: ConvProblem, device: Device) -> tuple[float, Config] | None:
    """On a GPU the configuration that should be fastest, behind its time; elsewhere the first legal one by measured rules."""
    legal = [config for config in _by_rule(problem, device) if LEGAL[type(config)].refusal(problem, config) is None]
    if device.backend != "cuda":
        little = next(_for_little_work(problem, device), None)
        return (BY_RULE, legal[0]) if legal else (LAST_RESORT, little) if little else None
    alone = problem.direction == "fprop" and problem.layout == "NCHW" and problem.K == problem.C == problem.groups
    if alone and legal and problem.dtype == "float64":  # no model knows depthwise float64
        return BY_RULE, legal[0]
    if not (alone and legal):
        legal += [part for config in _for_little_work(problem, device) for part in _in_parts(problem, config)]
    timed = [(time(problem, config, device), config) for config in legal]
    if alone and len(legal) > 1 and math.prod(problem.result_size) > WARP:  # see CLEARLY
        timed = [(us if us is None or config != Single() else us * COST.CLEARLY, config) for us, config in timed]
    return fastest((BY_RULE if us is None else us, config) for us, config in timed)


def _in_parts(problem: ConvProblem, config: Config) -> Iterator[Config]:
    """`config` with SPLIT of 1, 2, 4 and 8: each part sums over whole blocks of channels."""
    assert isinstance(config, Batched | Dgrad)
    read = problem.operand_channels // problem.groups
    for split in DIRECT_SPLITS if problem.macs < MOST_MACS else (1,):
        if isinstance(config, Batched):
            yield replace(config, SPLIT=split, BLOCK_C=max(1, min(config.BLOCK_C, read // split)))
        else:
            yield replace(config, SPLIT=split, BLOCK_K=max(1, min(config.BLOCK_K, read // split)))
        if 2 * split > read:
            break


def _by_rule(problem: ConvProblem, device: Device) -> Iterator[Config]:
    """Configurations that beat this engine's others, the best first."""
    if problem.direction == "fprop" and problem.C == problem.groups:
        if math.prod(problem.result_shape) > FEW:
            yield from sorted(tiles_of(device), key=lambda config: config.loads(problem))
        yield Single()
    if flips(problem):
        yield from sorted(tiles_of(device), key=lambda config: config.loads(problem))
    if problem.layout == "CNHW":
        written, pixels = problem.result_channels // problem.groups, result_pixels(problem)
        if device.backend == "cuda" or written * pixels < LEAST_FILLED * 64 * ceil(written, 64) * 64 * ceil(pixels, 64):
            yield wgrad_config(problem, device)


def _for_little_work(problem: ConvProblem, device: Device) -> Iterator[Config]:
    """Configurations for problems too small for tiles of a matrix product: on a GPU all of them, on OpenCL the best first."""
    written, read = problem.result_channels // problem.groups, problem.operand_channels // problem.groups
    blocks = BLOCKS[device.backend, problem.direction]
    for block in blocks:
        # on OpenCL the most channels a thread with 256 threads a multiprocessor: reuse of x against parallelism
        filled = device.backend == "cuda" or result_pixels(problem) * problem.groups * ceil(written, block) >= 256 * device.multiprocessors
        if block == blocks[-1] or (block <= written and filled):
            tiles = (
                Batched(BLOCK_K=block, BLOCK_C=reduction) if problem.direction == "fprop" else Dgrad(BLOCK_C=block, BLOCK_K=reduction)
                for reduction in (16, 8, 4, 2, 1) if reduction <= max(read, 1)
            )  # fmt: skip
            yield from islice((tile for tile in tiles if LEGAL[type(tile)].refusal(problem, tile) is None), 1)


def configs(problem: ConvProblem, device: Device) -> Iterator[Config]:
    if problem.layout == "CNHW":
        yield from wgrad_configs(problem, device)
        return
    written, read = problem.result_channels // problem.groups, problem.operand_channels // problem.groups
    found: list[Config] = []
    if problem.direction == "fprop" and problem.C == problem.groups:
        found += (*tiles_of(device), Single())
    if flips(problem):
        found += tiles_of(device)
    if problem.macs < 400e6 or written < 16:  # beyond that, matrix products win
        blocks = BLOCKS[device.backend, problem.direction]
        for block in blocks:
            for reduction in (16, 4):
                if block <= max(written, blocks[-1]) and reduction // 4 < max(read, 1):
                    forward = problem.direction == "fprop"
                    found.append(Batched(BLOCK_K=block, BLOCK_C=reduction) if forward else Dgrad(BLOCK_C=block, BLOCK_K=reduction))
    chosen = choose(problem, device)
    yield from found
    if chosen is not None and chosen[1] not in found:
        yield chosen[1]


#: If less than this part of a matrix product's tiles would be used, a CPU computes wgrad by direct/wgrad.cu.
LEAST_FILLED = 1 / 8
