"""The direct engine: one output pixel a thread on plain cores, on CUDA and on OpenCL.

Each configuration class is one kernel in ``cu/`` (``direct/single.cu`` to ``direct/wgrad.cu``), and its fields are the kernel's tuning
constants under the same names. A rule says which of these kernels runs; a model says how long it takes, so that other engines compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from pycuda_conv.engines.base import BY_RULE, LAST_RESORT, Config, fastest
from pycuda_conv.engines.geometry import accumulator_bytes, arguments, by_axis, ceil, divider, needs_64_bits, outputs_apart, taps_apart
from pycuda_conv.engines.schedule import (
    BIAS,
    INPUT,
    RESIDUAL,
    RESULT,
    SCALE,
    STATIC_SHARED_BYTES,
    WEIGHT,
    WORKSPACE,
    Schedule,
    finish,
    grid_refusal,
)
from pycuda_conv.engines.split_sum import reduce_launch
from pycuda_conv.engines.split_sum import time as reduce_time
from pycuda_conv.engines.struct import kernel_struct
from pycuda_conv.engines.texts import FLAG, TextFamily
from pycuda_conv.problem import DTYPE_CODES, ConvProblem, Size3
from pycuda_conv.runtime.base import Device, KernelLaunch


@dataclass(frozen=True)
class Single(Config):
    """One thread a pixel, one input channel an output channel: ``direct/single.cu``."""

    THREADS: int = 128


@dataclass(frozen=True)
class Tile(Config):
    """The same as :class:`Single`, with the input tile in shared memory: ``direct/tile.cu``. ROWS divides TILE_P."""

    TILE_P: int = 8
    TILE_Q: int = 32
    ROWS: int = 1


@dataclass(frozen=True)
class Batched(Config):
    """One thread a pixel times BLOCK_K channels, the sum over channels in SPLIT parts: ``direct/batched.cu``."""

    THREADS: int = 128
    BLOCK_K: int = 8
    BLOCK_C: int = 4
    SPLIT: int = 1


@dataclass(frozen=True)
class Dgrad(Config):
    """dgrad as a gather, one thread a pixel times BLOCK_C channels, the sum over K in SPLIT parts: ``direct/dgrad.cu``."""

    THREADS: int = 128
    BLOCK_K: int = 4
    BLOCK_C: int = 8
    SPLIT: int = 1


@dataclass(frozen=True)
class Wgrad(Config):
    """wgrad: a block sums TAPS taps of FILTERS filters and one channel over one of SLICES of the pixels: ``direct/wgrad.cu``."""

    THREADS: int = 128
    TAPS: int = 9
    SLICES: int = 1
    FILTERS: int = 1


CONFIGS = (Single, Tile, Batched, Dgrad, Wgrad)
#: R and S of the filters whose loops texts without the layer's constants unroll, and the most bytes of shared memory with which they do.
COMMON, MOST_COMMON = 3, 16 << 10
#: Channels of a thread of direct/batched.cu and direct/dgrad.cu, the most first. OpenCL devices have fewer kernels to choose from. In
#: direct/batched.cu one channel a thread would not be faster: a thread waits for memory as long with two.
BLOCKS = {("cuda", "fprop"): (8, 4, 2), ("cuda", "dgrad"): (8, 4, 2, 1), ("opencl", "fprop"): (8, 2), ("opencl", "dgrad"): (8, 2)}
#: TAPS of a block for filters that are not :func:`_square`, by FILTERS of a block.
WGRAD_TAPS: dict[str, dict[int, tuple[int, ...]]] = {"cuda": {1: (1, 9, 16), 4: (1, 3, 9, 16)}, "opencl": {1: (1, 9)}}
SQUARE = (3, 5, 7)  # R and S of the filters that are
MOST_SUMS = 64  # of a thread with several filters
DIRECT_SPLITS = (1, 2, 4, 8)  # SPLIT of direct/batched.cu and direct/dgrad.cu
#: Pixels that a thread of direct/wgrad.cu adds up before other threads' sums are added: longer sums would lose more digits.
WGRAD_RUN = 128
FEW = 1024  # results; for fewer the launch takes most of the time, and the smallest kernel wins
MOST_MACS = 2e9  # multiplications up to which sums may be split: beyond, matrix products are faster
LAYOUTS = "NCHW", "CNHW"
TENSOR_CORES = False
MOST_TEXTS = {"cuda": 172, "opencl": 68}


def _pixels(problem: ConvProblem) -> int:
    return problem.N * math.prod(problem.result_size)


# ---- what runs


def unsupported(device: Device) -> str | None:
    """None: the kernels run on every device."""
    return None


def refusal(problem: ConvProblem, config: Config) -> str | None:
    """Why `config` can't run `problem`, or None if it can."""
    if isinstance(config, Wgrad):
        if problem.layout != "CNHW":
            return "it computes gradients of filters"
    elif problem.layout != "NCHW":
        return "it takes NCHW arrays"
    taps, acc = math.prod(problem.filter_size), accumulator_bytes(problem)
    if isinstance(config, (Single, Tile)):
        forward = problem.direction == "fprop" or (isinstance(config, Tile) and _flips(problem))
        if not forward or problem.C != problem.groups or problem.has_depth:
            return "it takes one input channel a group and at most two spatial axes"
    elif isinstance(config, Dgrad):
        if problem.direction != "dgrad":
            return "it computes transposed convolutions"
    elif isinstance(config, Batched) and problem.direction != "fprop":
        return "it computes forward convolutions"
    shared = 0
    if isinstance(config, Single):
        shared = taps * acc
    elif isinstance(config, Tile):
        if config.TILE_P % config.ROWS:
            return "ROWS must divide TILE_P"
        if not 32 <= config.TILE_P // config.ROWS * config.TILE_Q <= 1024:
            return "a block has 32 to 1024 threads"
        shared = (taps + math.prod(_halo(problem, config))) * acc
    elif isinstance(config, (Batched, Dgrad)):
        shared = config.BLOCK_K * config.BLOCK_C * taps * acc
    elif isinstance(config, Wgrad):
        shared = _wgrad_shared(config.TAPS, config.THREADS, acc)
    if shared > STATIC_SHARED_BYTES:
        return f"it needs {shared:,} bytes of shared memory; a block has {STATIC_SHARED_BYTES:,}"
    return grid_refusal(_grid(problem, config))


def _flips(problem: ConvProblem) -> bool:
    """Whether direct/tile.cu can compute a dgrad: as a depthwise convolution of dy with flipped taps, with zeros between dy's pixels."""
    return problem.direction == "dgrad" and set(problem.stride) <= {1, 2, 4} and problem.K == problem.C == problem.groups


def _tile_stride(problem: ConvProblem) -> tuple[int, int]:
    """stride_h and stride_w of the convolution that direct/tile.cu computes."""
    _, stride_h, stride_w = problem.stride if problem.direction == "fprop" else (1, 1, 1)
    return stride_h, stride_w


def _halo(problem: ConvProblem, config: Tile) -> tuple[int, int]:
    (_, r, s), (sh, sw), (_, dh, dw) = problem.filter_size, _tile_stride(problem), problem.dilation
    return (config.TILE_P - 1) * sh + (r - 1) * dh + 1, (config.TILE_Q - 1) * sw + (s - 1) * dw + 1


def _grid(problem: ConvProblem, config: Config) -> int:
    """Blocks of the launch."""
    planes, (_, p, q) = problem.N * problem.K, problem.result_size
    if isinstance(config, Single):
        return planes * ceil(p * q, config.THREADS)
    if isinstance(config, Tile):
        return planes * ceil(p, config.TILE_P) * ceil(q, config.TILE_Q)
    if isinstance(config, Batched):
        return ceil(_pixels(problem), config.THREADS) * problem.groups * ceil(problem.K // problem.groups, config.BLOCK_K) * config.SPLIT
    if isinstance(config, Dgrad):
        # if there are no channels to write, as for an empty operand, the grid is empty
        return ceil(_pixels(problem), config.THREADS) * problem.groups * ceil(problem.C // problem.groups, config.BLOCK_C) * config.SPLIT
    assert isinstance(config, Wgrad)
    return _wgrad_blocks(problem, config.TAPS, config.FILTERS) * config.SLICES


def _wgrad_blocks(problem: ConvProblem, taps: int, filters: int) -> int:
    """Blocks of one slice of the pixels."""
    groups = problem.groups
    return groups * ceil(problem.K // max(groups, 1), filters) * problem.N * ceil(math.prod(problem.output_size), taps)


def _summed_pixels(problem: ConvProblem) -> int:
    """Pixels of all images over which wgrad sums."""
    return problem.operand_channels // max(problem.groups, 1) * math.prod(problem.filter_size)


# ---- launches


# The structs of the kernels, which explain each member.

SingleArguments = kernel_struct("direct_single", "SingleArguments")
TileArguments = kernel_struct("direct_tile", "TileArguments")
BatchedArguments = kernel_struct("direct_batched", "BatchedArguments")
DgradArguments = kernel_struct("direct_dgrad", "DgradArguments")
WgradArguments = kernel_struct("direct_wgrad", "WgradArguments")

#: Members that depend on the batch and on sizes of images; all others are constants of a layer.
_SIZES = {
    SingleArguments: "tiles h w p q", TileArguments: "tiles_p tiles_q h w p q",
    BatchedArguments: "n_pixels plane p q split run part_size d h w", DgradArguments: "n_pixels plane h w split run part_size o p q",
    WgradArguments: "slices total run d h w pixels r s",
}  # fmt: skip

#: Defines, arguments, constants of the layer, and elements of shared memory that a block asks for.
Made = tuple[dict[str, int], tuple[int, ...], dict[str, int], int]


def _constants(problem: ConvProblem, told: Any, **others: int) -> dict[str, int]:
    """The defines of a kernel that is compiled for this layer: :attr:`KernelLaunch.layer`."""
    asked = {*_SIZES[type(told)].split(), "slope"}  # compiling a text for each slope would save nothing
    known = {name.upper(): value for name, value in told._asdict().items() if name not in asked and not name.startswith("by_")}
    return {"LAYER": 1, "AXES": problem.ndim} | known | others


def schedule(problem: ConvProblem, config: Config, device: Device, noted: bool = False) -> Schedule:
    """The launches of `config` for `problem`."""
    kernel, make = _KERNELS[type(config)]
    defines, told, layer, room = make(problem, config)
    threads = config.TILE_P // config.ROWS * config.TILE_Q if isinstance(config, Tile) else defines["THREADS"]
    split = _split(config)
    size = math.prod(problem.result_shape)
    parts = split * max(size, told.run if isinstance(told, WgradArguments) else 0)
    defines = {"DTYPE": DTYPE_CODES[problem.dtype], "INDEX_64": int(needs_64_bits(problem, parts if split > 1 else 0))} | defines
    if device.backend != "cuda" and "UNROLLED" in defines:  # unrolling gains nothing there
        defines = {name: defines[name] for name in ("DTYPE", "INDEX_64", "THREADS", "BLOCK_C")}
    result = RESULT if split == 1 else WORKSPACE
    buffers: tuple[int, ...] = (INPUT, WEIGHT, BIAS, SCALE, RESIDUAL, result)
    if isinstance(config, Wgrad):
        buffers = (INPUT, WEIGHT, result)
    shared = room * accumulator_bytes(problem)
    if room and device.backend != "cuda":
        defines["ROOM"], shared = STATIC_SHARED_BYTES // accumulator_bytes(problem), 0
    launch = KernelLaunch(kernel, defines, _grid(problem, config), threads, buffers, (), shared=shared, arguments=told, layer=layer)
    if split == 1:
        return Schedule.plain([[launch]])
    return Schedule.plain([[launch], [reduce_launch(problem, split, WORKSPACE)]], split * size * accumulator_bytes(problem))


def _split(config: Config) -> int:
    """The parts of the sum, each of which is a part of the workspace."""
    if isinstance(config, Wgrad):
        return config.SLICES
    return config.SPLIT if isinstance(config, Batched | Dgrad) else 1


def _single(problem: ConvProblem, config: Single) -> Made:
    (_, h, w), (_, r, s), (_, p, q) = problem.input_size, problem.filter_size, problem.output_size
    tiles = ceil(p * q, config.THREADS)
    told = arguments(
        SingleArguments, tiles=tiles, c=problem.C, k=problem.K, by_multiplier=divider(problem.K // problem.C), h=h, w=w, r=r, s=s, p=p, q=q,
        **_in_plane("stride_", problem.stride), **_in_plane("pad_", problem.padding_before), **_in_plane("dil_", problem.dilation),
        **finish(problem),
    )  # fmt: skip
    return {"THREADS": config.THREADS}, told, _constants(problem, told), r * s


def _in_plane(prefix: str, values: Size3) -> dict[str, int]:
    """Height and width of `values` as arguments."""
    return by_axis(prefix, values[1:], "hw")


def _tile(problem: ConvProblem, config: Tile) -> Made:
    (_, h, w), (_, r, s), (_, p, q) = problem.operand_size, problem.filter_size, problem.result_size
    (stride_h, stride_w), (_, dil_h, dil_w), (_, pad_h, pad_w) = _tile_stride(problem), problem.dilation, problem.padding_before
    flipped, apart_h, apart_w = problem.direction == "dgrad", 0, 0
    if flipped:
        pad_h, pad_w = dil_h * (r - 1) - pad_h, dil_w * (s - 1) - pad_w
        apart_h, apart_w = problem.stride[1].bit_length() - 1, problem.stride[2].bit_length() - 1
    halo_h, halo_w = _halo(problem, config)
    tiles_p, tiles_q = ceil(p, config.TILE_P), ceil(q, config.TILE_Q)
    told = arguments(
        TileArguments, tiles_p=tiles_p, tiles_q=tiles_q, c=problem.C, k=problem.K, by_multiplier=divider(problem.K // problem.C), h=h, w=w,
        p=p, q=q, pad_h=pad_h, pad_w=pad_w, r=r, s=s, stride_h=stride_h, stride_w=stride_w, dil_h=dil_h, dil_w=dil_w,
        by_halo_w=divider(halo_w), flipped=int(flipped), apart_h=apart_h, apart_w=apart_w, **finish(problem),
    )  # fmt: skip
    elements = r * s + halo_h * halo_w
    layer = _constants(problem, told)
    if config.TILE_P > 1 and r == s and r in (3, 5, 7) and stride_h == stride_w == dil_h == dil_w == 1:
        names = "R", "S", "STRIDE_H", "STRIDE_W", "DIL_H", "DIL_W"
        return asdict(config) | {name: layer[name] for name in names}, told, layer, elements
    return asdict(config), told, layer, elements


def _batched(problem: ConvProblem, config: Batched) -> Made:
    (t, r, s), (_, p, q) = problem.filter_size, problem.output_size
    plane, groups = math.prod(problem.output_size), problem.groups
    cg, kg = problem.C // groups, problem.K // groups
    k_tiles, block_taps = ceil(kg, config.BLOCK_K), config.BLOCK_C * t * r * s
    told = arguments(
        BatchedArguments, n_pixels=_pixels(problem), plane=plane, by_pq=divider(p * q), p=p, q=q, groups=groups, cg=cg, kg=kg,
        k_tiles=k_tiles, block_c=config.BLOCK_C, block_taps=block_taps, **_parts(problem, config.SPLIT, cg, config.BLOCK_C), t=t, r=r, s=s,
        **by_axis("", problem.input_size), **by_axis("stride_", problem.stride), **by_axis("pad_", problem.padding_before),
        **by_axis("dil_", problem.dilation), **finish(problem, config.SPLIT > 1),
    )  # fmt: skip
    elements = block_taps * config.BLOCK_K
    defines = {"THREADS": config.THREADS, "BLOCK_K": config.BLOCK_K}
    fits = _flat(problem) and r == s == COMMON and elements * accumulator_bytes(problem) <= MOST_COMMON
    common = {"R": r, "S": s, "AXES": 2} if fits else {}
    return defines | common, told, _constants(problem, told), elements


def _flat(problem: ConvProblem) -> bool:
    """Whether the filter is 2-d or 1-d and has no dilation."""
    return not problem.has_depth and problem.dilation == (1, 1, 1)


def _dgrad(problem: ConvProblem, config: Dgrad) -> Made:
    (_, h, w), groups = problem.input_size, problem.groups
    plane, taps = math.prod(problem.input_size), math.prod(problem.filter_size)
    cg, kg = problem.C // groups, problem.K // groups
    c_tiles = ceil(cg, config.BLOCK_C)
    told = arguments(
        DgradArguments, n_pixels=_pixels(problem), plane=plane, by_hw=divider(h * w), h=h, w=w, groups=groups, cg=cg, kg=kg,
        c_tiles=c_tiles, block_k=config.BLOCK_K, **_parts(problem, config.SPLIT, kg, config.BLOCK_K),
        **by_axis("", problem.output_size, "opq"), **by_axis("", problem.filter_size, "trs"), by_taps=divider(taps),
        by_filters=divider(taps * config.BLOCK_C), **by_axis("stride_", problem.stride), **by_axis("every_", taps_apart(problem)),
        **by_axis("back_", outputs_apart(problem)), **by_axis("pad_", problem.padding_before), **by_axis("dil_", problem.dilation),
        **finish(problem, config.SPLIT > 1),
    )  # fmt: skip
    defines = {"THREADS": config.THREADS, "BLOCK_C": config.BLOCK_C} | _unrolled(problem, config)
    return defines, told, _constants(problem, told), config.BLOCK_K * taps * config.BLOCK_C


def _unrolled(problem: ConvProblem, config: Dgrad) -> dict[str, int]:
    """The defines of a text of ``direct/dgrad.cu`` whose loops over r and s are unrolled; none if they are not."""
    nbytes = config.BLOCK_K * math.prod(problem.filter_size) * config.BLOCK_C * accumulator_bytes(problem)
    if not _unrolled_dgrad(problem) or nbytes > MOST_COMMON:
        return {}
    (_, r, s), (_, every_h, every_w) = problem.filter_size, taps_apart(problem)
    totals = _totals(DTYPE_CODES[problem.dtype], config.BLOCK_C)
    return {"UNROLLED": 1, "TOTALS": totals, "R": r, "S": s, "EVERY_H": every_h, "EVERY_W": every_w}


def _totals(code: int, sums: int) -> int:
    """Whether an unrolled text of ``direct/dgrad.cu`` keeps a total beside each of so many sums: for more of float32 it lacks registers."""
    return int(code == 64 or (code == 32 and sums <= 4))


def _unrolled_dgrad(problem: ConvProblem) -> bool:
    """Whether ``direct/dgrad.cu`` unrolls its loops over r and s where the filter of a block is small."""
    return problem.filter_size[1:] == (COMMON, COMMON) and taps_apart(problem)[1:] in ((1, 1), (2, 2))


def _wgrad(problem: ConvProblem, config: Wgrad) -> Made:
    (_, r, s), (_, p, q), groups = problem.filter_size, problem.output_size, problem.groups
    taps, pixels, total = math.prod(problem.output_size), math.prod(problem.filter_size), _summed_pixels(problem)
    chunks, kg = ceil(taps, config.TAPS), problem.K // groups
    k_blocks, run = ceil(kg, config.FILTERS), ceil(ceil(total, config.SLICES), config.THREADS) * config.THREADS
    told = arguments(
        WgradArguments, slices=config.SLICES, chunks=chunks, images=problem.N, groups=groups, kg=kg, k_blocks=k_blocks, total=total,
        run=run, **by_axis("", problem.input_size), pixels=pixels, by_rs=divider(r * s), r=r, s=s, taps=taps, by_pq=divider(p * q), p=p,
        q=q, **by_axis("stride_", problem.stride), **by_axis("pad_", problem.padding_before), **by_axis("dil_", problem.dilation),
    )  # fmt: skip
    defines = {"THREADS": config.THREADS, "TAPS": config.TAPS, "FILTERS": config.FILTERS}
    common = {"Q": q} if _square(problem) and config.TAPS == taps else {}
    return defines | common, told, _constants(problem, told, TAPS=config.TAPS, ALL_TAPS=taps), 0


def _square(problem: ConvProblem) -> bool:
    """Whether the problem is wgrad of a filter of 3 x 3, 5 x 5 or 7 x 7 without dilation."""
    return problem.output_size in [(1, q, q) for q in SQUARE] and problem.stride[1:] == (1, 1)


_KERNELS: dict[type, tuple[str, Callable[[ConvProblem, Any], Made]]] = {
    Single: ("direct_single", _single), Tile: ("direct_tile", _tile), Batched: ("direct_batched", _batched),
    Dgrad: ("direct_dgrad", _dgrad), Wgrad: ("direct_wgrad", _wgrad),
}  # fmt: skip


def _parts(problem: ConvProblem, split: int, summed: int, block: int) -> dict[str, int]:
    """The members split, run and part_size of a kernel that sums over `summed` channels, `block` at a time."""
    return {"split": split, "run": ceil(ceil(summed, block), split) * block, "part_size": math.prod(problem.result_shape)}


def filter_key(problem: ConvProblem, config: Config) -> None:
    """None: the kernels read the filter as it is."""


def sum_order(problem: ConvProblem, config: Config) -> Hashable:
    """The kernel, where it cuts a sum, and in wgrad how many threads share one; the rest of a tile does not change a bit."""
    if isinstance(config, Wgrad):
        return Wgrad, config.THREADS, config.SLICES
    if isinstance(config, Dgrad):  # it sums over the channels of a tap before the next tap; unrolled, over the taps of a channel first
        return Dgrad, config.SPLIT, config.BLOCK_K, _unrolled(problem, config).get("TOTALS")
    if isinstance(config, Batched) and config.SPLIT > 1:
        return Batched, config.SPLIT, config.BLOCK_C
    return (type(config),)


def texts(device: Device) -> Iterator[TextFamily]:
    """A text for each tile and type, and one with the constants of each common filter."""
    for code in DTYPE_CODES.values():
        acc = 8 if code == 64 else 4
        room = {} if device.backend == "cuda" else {"ROOM": (STATIC_SHARED_BYTES // acc,)}
        common = {"DTYPE": (code,), "INDEX_64": FLAG}
        yield TextFamily("direct_single", common | room | {"THREADS": (128,)})
        for tile in _tiles(device):
            of_tile = common | room | {name: (value,) for name, value in asdict(tile).items()}
            yield TextFamily("direct_tile", of_tile)
            for taps in (3, 5, 7) if tile.TILE_P > 1 else ():
                layer = {"R": taps, "S": taps, "STRIDE_H": 1, "STRIDE_W": 1, "DIL_H": 1, "DIL_W": 1}
                if (taps * taps + (tile.TILE_P - 1 + taps) * (tile.TILE_Q - 1 + taps)) * acc <= STATIC_SHARED_BYTES:
                    yield TextFamily("direct_tile", of_tile | {name: (value,) for name, value in layer.items()})
        batched = common | room | {"THREADS": (128,), "BLOCK_K": BLOCKS[device.backend, "fprop"]}
        yield TextFamily("direct_batched", batched)
        yield TextFamily("direct_batched", batched | {"R": (COMMON,), "S": (COMMON,), "AXES": (2,)})
        dgrad = common | room | {"THREADS": (128,), "BLOCK_C": BLOCKS[device.backend, "dgrad"]}
        yield TextFamily("direct_dgrad", dgrad)
        if device.backend == "cuda":
            unrolled = {"UNROLLED": (1,), "TOTALS": FLAG, "R": (COMMON,), "S": (COMMON,), "EVERY_H": (1, 2), "EVERY_W": (1, 2)}
            yield TextFamily("direct_dgrad", dgrad | unrolled, _made_unrolled)
        for filters, taps_at_once in WGRAD_TAPS[device.backend].items():
            wgrad = {"DTYPE": (code,), "INDEX_64": FLAG, "THREADS": (128,), "FILTERS": (filters,)}
            yield TextFamily("direct_wgrad", wgrad | {"TAPS": taps_at_once})
            for q in SQUARE:
                if _few_sums(filters, q**2) and _wgrad_shared(q**2, 128, acc) <= STATIC_SHARED_BYTES:
                    yield TextFamily("direct_wgrad", wgrad | {"TAPS": (q**2,), "Q": (q,)})


def _wgrad_shared(taps: int, threads: int, acc: int) -> int:
    """Bytes of shared memory of a block of ``direct/wgrad.cu`` with sums of `acc` bytes."""
    return taps * ((threads + 8) * acc + 32)  # 8 sums between two taps' rows; 32 bytes for the offsets of a tap


def _made_unrolled(d: Mapping[str, int]) -> bool:
    """Whether a text of ``direct/dgrad.cu`` with these defines is ever made."""
    return d["EVERY_H"] == d["EVERY_W"] and d["TOTALS"] == _totals(d["DTYPE"], d["BLOCK_C"])


def _few_sums(filters: int, taps: int) -> bool:
    return filters == 1 or filters * taps <= MOST_SUMS


# ---- the choice


STAGED = 0.096  # microseconds in which a thread brings one element of the filter to shared memory
#: Microseconds that a thread of direct/single.cu waits for a tap of scattered pixels, and that full multiprocessors take for one.
TAP, TAP_TOGETHER = 0.42, 0.125
WARP = 32  # pixels of a warp of direct/single.cu
CLEARLY = 1.1  # factor on direct/single.cu's time for planes of more than WARP pixels: its model knows few times
#: Microseconds of a launch of direct/single.cu; and that 132 multiprocessors take for each tap of a warp, and for each warp.
SINGLE_START, SINGLE_TAP, SINGLE_WARP = 2.0, 1.12e-5, 6.1e-5
ALONE = 0.58  # a single thread's walk takes so much of the time in which a full multiprocessor's threads walk
TILE_START = 2.57  # microseconds of a launch of direct/tile.cu
#: Microseconds that a block takes at least: for each row of taps; and for each tap, by ROWS of a thread, which share loads.
TILE_ALONE, TAP_ALONE = 0.108, {1: 0.075, 2: 0.0168, 7: 0.0389}
#: Work of 132 multiprocessors in a microsecond: products of a tap and a pixel; the same by threads with two rows, which read more for
#: each; elements loaded. Then the microseconds of a block.
TILE_TAPS, TWO_ROWS_TAPS, TILE_LOADS, TILE_BLOCK = 12.9e6, 6.39e6, 1.07e6, 0.000388
TILE_MEMORY, TILE_RESIDUAL = 2.38e6, 2.59e6  # bytes a microsecond; and those of a residual, whose loads nothing hides
BATCHED_START = 2.23  # microseconds of a launch of direct/batched.cu
BATCHED_CHANNEL, BATCHED_TAP, BATCHED_SUM = 0.089, 0.0265, 0.0023  # a thread's microseconds for a channel, each tap, each sum of a tap
BATCHED_STORE = 0.078  # a thread's microseconds to finish and write a sum
STRIDED = 0.281  # a channel takes stride_w to this power times as long
SLICE_WAIT = 0.544  # microseconds that a thread waits for each slice of a volume's filter with a stride: slices are loaded one by one
#: direct/wgrad.cu: from MANY_TAPS taps on it takes LONGER times what its pixels and taps say. A filter one tap wide and several high, of a
#: convolution with a stride along w, takes SKIPPING times as long.
MANY_TAPS, LONGER, SKIPPING = 81, 1.9, 1.5
DIRECT_MEMORY, RESIDUAL_MEMORY = 3e6, 5.6e5  # bytes a microsecond; and those of a residual, for which threads of direct/batched.cu wait
#: direct/dgrad.cu: microseconds of a launch, and of a round of blocks; the power with which rounds count, since they overlap; bytes
#: written a microsecond.
DGRAD_START, DGRAD_ROUND, DGRAD_ROUNDS, DGRAD_WRITTEN = 0.8, 0.92, 0.9, 1.4e6
DGRAD_WAIT, DGRAD_TAP = 0.417, 0.06  # a thread's microseconds for a channel with unrolled taps: at the least, and for each tap
#: A thread's microseconds for a tap that is not unrolled: without sums, for each sum, and for its loop over the channels in shared memory.
DGRAD_ANY, DGRAD_SUM, DGRAD_LOOP = 0.01, 0.0075, 0.34
#: The same for a tap if one channel is loaded at a time, as in depthwise layers; and the threads of one sum that fit a multiprocessor then.
DGRAD_LONE, LONE_THREADS = 0.65, 2048
CHUNK = 0.13  # microseconds in which a block changes to the next channels of the filter in shared memory


def time(problem: ConvProblem, config: Config, device: Device) -> float | None:
    """Microseconds that `config` should take; None for direct/single.cu where a rule chooses it: for few results.

    A thread of direct/batched.cu or direct/dgrad.cu waits for memory at every channel. So its time follows from the channels that it
    walks and from how many threads there are for each that fits, not from multiplications. The same holds for pixels in direct/wgrad.cu.
    direct/tile.cu takes its multiplications, overhang included, its loads, and its blocks. Fitted to 119 times of float32 on an H200:
    half of a tile's are within 7%, most of the others within a quarter. direct/wgrad.cu's times are older. direct/single.cu takes the
    taps of its warps where each channel has one result: 11 times of float32 are within 16%.
    """
    if isinstance(config, Tile):
        _, p, q = problem.result_size
        planes, taps = problem.N * problem.K, math.prod(problem.filter_size)
        pixels = ceil(p, config.TILE_P) * config.TILE_P * ceil(q, config.TILE_Q) * config.TILE_Q
        blocks = ceil(p, config.TILE_P) * ceil(q, config.TILE_Q)
        multiplied = taps * (min(_tile_stride(problem)[1], 2) if config.TILE_Q >= 32 else 1)  # a warp's lanes read every other bank
        rate = TWO_ROWS_TAPS if config.ROWS == 2 else TILE_TAPS
        of_plane = pixels * multiplied / rate + _tile_loads(problem, config) / TILE_LOADS + blocks * TILE_BLOCK
        alone = taps * (TILE_ALONE / problem.filter_size[2] + TAP_ALONE[config.ROWS])
        moved = problem.itemsize * (math.prod(problem.input_shape) + math.prod(problem.result_shape)) / TILE_MEMORY
        if problem.has_residual:
            moved += problem.itemsize * math.prod(problem.result_shape) / TILE_RESIDUAL
        us = max(max(planes * of_plane, moved) * 132 / device.multiprocessors, alone)
        return TILE_START + us * (1.0 if problem.K == problem.C else 2.0)  # the results of a channel each read it again
    if isinstance(config, Wgrad):
        return _wgrad_time(problem, config, device.multiprocessors)
    if isinstance(config, Single):
        if math.prod(problem.result_shape) <= FEW:
            return None  # by rule
        if problem.K == problem.C:
            warps = problem.N * problem.K * ceil(math.prod(problem.result_size), WARP)  # warps without a pixel do nothing
            us = warps * (SINGLE_TAP * math.prod(problem.filter_size) + SINGLE_WARP) * 132 / device.multiprocessors
            return SINGLE_START + max(us, problem.bytes / DIRECT_MEMORY)
        rounds = math.prod(problem.result_shape) / (1536 * device.multiprocessors)
        return 3 + max(TAP, TAP_TOGETHER * rounds) * math.prod(problem.filter_size)
    assert isinstance(config, Batched | Dgrad)
    written, read = problem.result_channels // problem.groups, problem.operand_channels // problem.groups
    taps = math.prod(problem.filter_size)
    lone = isinstance(config, Dgrad) and min(config.BLOCK_K, read) == 1 and not _unrolled_dgrad(problem)
    if isinstance(config, Batched):
        block, start = config.BLOCK_K, BATCHED_START
        channel = (BATCHED_CHANNEL + (BATCHED_TAP + BATCHED_SUM * block) * taps) * problem.stride[2] ** STRIDED
        if problem.has_depth and max(problem.stride) > 1:
            channel = max(channel, SLICE_WAIT * problem.filter_size[0])
    else:  # with a stride a pixel meets some of the taps, and a warp of neighbouring pixels as many as any of them, at least one;
        # eight channels' loads are under way at once, or those of a plane of taps
        met = math.prod(max(1.0, n / every) for n, every in zip(problem.filter_size, taps_apart(problem), strict=True))
        block, start = config.BLOCK_C, DGRAD_ROUND
        of_tap = (DGRAD_LONE if lone else DGRAD_ANY + DGRAD_LOOP / max(1, min(config.BLOCK_K, read))) + DGRAD_SUM * block
        channel = max(DGRAD_WAIT, DGRAD_TAP * met) if _unrolled_dgrad(problem) else max(0.1, of_tap * met)
    at_once = config.BLOCK_C if isinstance(config, Batched) else config.BLOCK_K
    split, run, size = _parts(problem, config.SPLIT, read, at_once).values()
    threads = _pixels(problem) * problem.groups * ceil(written, block) * split
    channel += STAGED * taps * block / config.THREADS  # a block brings that much of the filter to shared memory
    walked = min(run, read)
    fit = LONE_THREADS if lone and block == 1 else 512 if block == 8 else 768  # a thread of 8 sums has more registers
    rounds = threads / (fit * device.multiprocessors)
    walk = walked * channel + CHUNK * (ceil(walked, at_once) - 1)
    if isinstance(config, Batched):  # few threads share a multiprocessor's loads
        walk += BATCHED_STORE * block
        us = start + (rounds if rounds > 1 else ALONE + (1 - ALONE) * rounds) * walk
    else:
        us = DGRAD_START + max(1.0, rounds) ** DGRAD_ROUNDS * (start + walk)
    written_bytes = problem.itemsize * math.prod(problem.result_shape)
    moved = problem.itemsize * math.prod(problem.input_shape) + written_bytes * (2 if problem.has_residual else 1)
    us = max(us, moved / DIRECT_MEMORY)
    if isinstance(config, Dgrad):
        us = max(us, written_bytes / DGRAD_WRITTEN)
    elif problem.has_residual and split == 1:
        us += written_bytes / RESIDUAL_MEMORY
    return us if split == 1 else us + reduce_time(size, split, accumulator_bytes(problem), device.multiprocessors)


def choose(problem: ConvProblem, device: Device) -> tuple[float, Config] | None:
    """On a GPU the configuration that should be fastest, behind its time; elsewhere the first legal one by measured rules."""
    legal = [config for config in _by_rule(problem, device) if refusal(problem, config) is None]
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
        timed = [(us if us is None or config != Single() else us * CLEARLY, config) for us, config in timed]
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
            yield from sorted(_tiles(device), key=lambda config: _tile_loads(problem, config))
        yield Single()
    if _flips(problem):
        yield from sorted(_tiles(device), key=lambda config: _tile_loads(problem, config))
    if problem.layout == "CNHW":
        written, pixels = problem.result_channels // problem.groups, _pixels(problem)
        if device.backend == "cuda" or written * pixels < LEAST_FILLED * 64 * ceil(written, 64) * 64 * ceil(pixels, 64):
            yield wgrad_config(problem, device)


def _for_little_work(problem: ConvProblem, device: Device) -> Iterator[Config]:
    """Configurations for problems too small for tiles of a matrix product: on a GPU all of them, on OpenCL the best first."""
    written, read = problem.result_channels // problem.groups, problem.operand_channels // problem.groups
    blocks = BLOCKS[device.backend, problem.direction]
    for block in blocks:
        # on OpenCL the most channels a thread with 256 threads a multiprocessor: reuse of x against parallelism
        filled = device.backend == "cuda" or _pixels(problem) * problem.groups * ceil(written, block) >= 256 * device.multiprocessors
        if block == blocks[-1] or (block <= written and filled):
            tiles = (
                Batched(BLOCK_K=block, BLOCK_C=reduction) if problem.direction == "fprop" else Dgrad(BLOCK_C=block, BLOCK_K=reduction)
                for reduction in (16, 8, 4, 2, 1) if reduction <= max(read, 1)
            )  # fmt: skip
            yield from islice((tile for tile in tiles if refusal(problem, tile) is None), 1)


def _wgrad_time(problem: ConvProblem, config: Wgrad, multiprocessors: int) -> float:
    """A thread waits for memory at each of its pixels; loads and multiplications keep a full multiprocessor busy."""
    filters, taps = config.FILTERS, config.TAPS
    fit = 16 if filters * taps <= 16 else 5 if filters * taps <= 40 else 3  # blocks that fit a multiprocessor by their registers
    step = 0.3 + fit / 16 * (0.03 * filters + taps * (0.02 + 0.01 * filters))
    rounds = max(1.0, _wgrad_blocks(problem, taps, filters) * config.SLICES / (fit * multiprocessors))
    us = 0.5 + 1.28 * rounds * ((0.6 if filters == 1 else 1.8) + ceil(ceil(_summed_pixels(problem), config.SLICES), config.THREADS) * step)
    all_taps, across = math.prod(problem.output_size), problem.output_size[2]
    if all_taps >= MANY_TAPS:
        us *= LONGER
    elif all_taps > across == 1 < problem.dilation[2]:  # a strided convolution: columns between its taps are loaded for nothing
        us *= SKIPPING
    if config.SLICES > 1:
        us += reduce_time(math.prod(problem.result_shape), config.SLICES, accumulator_bytes(problem), multiprocessors)
    return us


def wgrad_config(problem: ConvProblem, device: Device) -> Wgrad:
    """The best configuration of ``direct/wgrad.cu``."""
    return min(_wgrad_configs(problem, device), key=lambda config: _wgrad_time(problem, config, device.multiprocessors))


def _wgrad_configs(problem: ConvProblem, device: Device) -> Iterator[Wgrad]:
    """One for each number of filters a block: few idle sums, and slices that fill the GPU and keep a thread's sums short."""
    taps, total, kg = math.prod(problem.output_size), _summed_pixels(problem), problem.K // max(problem.groups, 1)
    for filters, known in WGRAD_TAPS[device.backend].items():
        # reading y costs a chunk of taps as much as two more taps
        at_once = min(known, key=lambda n: ceil(taps, n) * (n + 2))
        if _square(problem) and _few_sums(filters, taps) and refusal(problem, Wgrad(128, taps)) is None:
            at_once = taps
        if filters == 1 or filters < 2 * kg:
            blocks = max(_wgrad_blocks(problem, at_once, filters), 1)
            full, short = ceil(8 * device.multiprocessors, blocks), ceil(total, 128 * WGRAD_RUN)
            yield Wgrad(128, at_once, max(1, min(ceil(total, 4 * 128), max(full, short))), filters)


def configs(problem: ConvProblem, device: Device) -> Iterator[Config]:
    """The configurations that are worth measuring for `problem`."""
    if problem.layout == "CNHW":
        yield from _wgrad_configs(problem, device)
        return
    written, read = problem.result_channels // problem.groups, problem.operand_channels // problem.groups
    found: list[Config] = []
    if problem.direction == "fprop" and problem.C == problem.groups:
        found += (*_tiles(device), Single())
    if _flips(problem):
        found += _tiles(device)
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


#: Each was the best for some depthwise layer or image, of 40 tried on an H200, or loads the least for some.
TILES = (Tile(14, 64, 7), Tile(14, 32, 7), Tile(8, 16, 2), Tile(1, 256, 1))


def _tiles(device: Device) -> tuple[Tile, ...]:
    """The tiles to choose from on `device`: OpenCL has one for planes and one for rows."""
    return TILES if device.backend == "cuda" else (TILES[1], TILES[-1])


def _tile_loads(problem: ConvProblem, config: Tile) -> int:
    """Elements that the tiles of one plane load, halos and overhang included. They take most of the kernel's time."""
    _, p, q = problem.result_size
    return ceil(p, config.TILE_P) * ceil(q, config.TILE_Q) * math.prod(_halo(problem, config))


#: If less than this part of a matrix product's tiles would be used, a CPU computes wgrad by direct/wgrad.cu.
LEAST_FILLED = 1 / 8
