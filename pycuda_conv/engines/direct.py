"""The direct engine: one output pixel a thread on plain cores, on CUDA and on OpenCL.

Each configuration class is one kernel of the ladder in ``cu/`` (``direct_single.cu`` to ``direct_wgrad.cu``); its fields
are the kernel's tuning constants under the same names. Which of an engine's own kernels runs is a rule; what it takes, beside
other engines' kernels, a model says.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Hashable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from pycuda_conv.engines.base import BY_RULE, LAST_RESORT, Config
from pycuda_conv.engines.geometry import accumulator_bytes, ceil, divider, needs_64_bits
from pycuda_conv.engines.schedule import (
    BIAS,
    GRID_LIMIT,
    INPUT,
    RESIDUAL,
    RESULT,
    SCALE,
    STATIC_SHARED_BYTES,
    WEIGHT,
    WORKSPACE,
    Schedule,
    epilogue,
)
from pycuda_conv.engines.split_sum import reduce_launch
from pycuda_conv.engines.texts import FLAG, TextFamily
from pycuda_conv.problem import DTYPE_CODES, ConvProblem
from pycuda_conv.runtime.base import Device, KernelLaunch


@dataclass(frozen=True)
class Single(Config):
    """One thread a pixel, one input channel an output channel: ``direct_single.cu``."""

    THREADS: int = 128


@dataclass(frozen=True)
class Tile(Config):
    """As :class:`Single`, with the input tile in shared memory: ``direct_tile.cu``. ROWS divides TILE_P."""

    TILE_P: int = 8
    TILE_Q: int = 32
    ROWS: int = 1


@dataclass(frozen=True)
class Batched(Config):
    """One thread a pixel times BLOCK_K channels, everything in one launch: ``direct_batched.cu``."""

    THREADS: int = 128
    BLOCK_K: int = 8
    BLOCK_C: int = 4


@dataclass(frozen=True)
class Dgrad(Config):
    """The transposed convolution as a gather, one thread a pixel times BLOCK_C channels: ``direct_dgrad.cu``."""

    THREADS: int = 128
    BLOCK_K: int = 4
    BLOCK_C: int = 8


@dataclass(frozen=True)
class Wgrad(Config):
    """The gradient of the filter, one block a pair of channels, TAPS of its taps and one of SLICES of the batch: ``direct_wgrad.cu``."""

    THREADS: int = 128
    TAPS: int = 9
    SLICES: int = 1


CONFIGS = (Single, Tile, Batched, Dgrad, Wgrad)
#: Bytes of shared memory that kernels are compiled with.
ROOMS = (3 << 10, 6 << 10, 12 << 10, 24 << 10, STATIC_SHARED_BYTES)
#: Taps at once of filters that :func:`_square` does not know.
WGRAD_TAPS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16)
LAYOUTS = "NCHW", "CNHW"
TENSOR_CORES = False


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
        if problem.direction != "fprop" or problem.C != problem.groups or problem.filter_size[0] != 1 or problem.input_size[0] != 1:
            return "it takes one input channel a group and at most two spatial axes"
        if problem.padding_before[0] or problem.padding_after[0]:
            return "it takes at most two spatial axes"
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
        shared = config.TAPS * (config.THREADS * acc + 32)  # 32 for the place of a tap
    if shared > STATIC_SHARED_BYTES:
        return f"it needs {shared:,} bytes of shared memory; a block has {STATIC_SHARED_BYTES:,}"
    if _grid(problem, config) > GRID_LIMIT:
        return f"its grid is larger than {GRID_LIMIT:,} blocks"
    return None


def _halo(problem: ConvProblem, config: Tile) -> tuple[int, int]:
    (_, r, s), (_, sh, sw), (_, dh, dw) = problem.filter_size, problem.stride, problem.dilation
    return (config.TILE_P - 1) * sh + (r - 1) * dh + 1, (config.TILE_Q - 1) * sw + (s - 1) * dw + 1


def _grid(problem: ConvProblem, config: Config) -> int:
    """Blocks of the launch."""
    planes, (_, p, q) = problem.N * problem.K, problem.output_size
    if isinstance(config, Single):
        return planes * ceil(p * q, config.THREADS)
    if isinstance(config, Tile):
        return planes * ceil(p, config.TILE_P) * ceil(q, config.TILE_Q)
    if isinstance(config, Batched):
        return ceil(_pixels(problem), config.THREADS) * problem.groups * ceil(problem.K // problem.groups, config.BLOCK_K)
    if isinstance(config, Dgrad):
        # without channels to write, as for an empty operand, the grid is empty too
        return ceil(_pixels(problem), config.THREADS) * problem.groups * ceil(problem.C // problem.groups, config.BLOCK_C)
    assert isinstance(config, Wgrad)
    return problem.K * problem.N * ceil(math.prod(problem.output_size), config.TAPS) * config.SLICES


# ---- launches


# The structs of the kernels, which say what their members are.

SingleArguments = namedtuple(
    "SingleArguments",
    "tiles by_tiles c k by_k by_multiplier h w r s p q by_q stride_h stride_w pad_h pad_w dil_h dil_w has_scale has_bias relu",
)
TileArguments = namedtuple(
    "TileArguments",
    "tiles_p by_tiles_p tiles_q by_tiles_q c k by_k by_multiplier h w p q pad_h pad_w "
    "r s stride_h stride_w dil_h dil_w by_halo_w has_scale has_bias relu",
)
BatchedArguments = namedtuple(
    "BatchedArguments",
    "n_pixels plane by_plane by_pq p q by_q groups by_groups cg kg k_tiles by_k_tiles block_c block_taps by_block_taps "
    "d h w t r s stride_d stride_h stride_w pad_d pad_h pad_w dil_d dil_h dil_w has_scale has_bias relu",
)
DgradArguments = namedtuple(
    "DgradArguments",
    "n_pixels plane by_plane by_hw h w by_w groups by_groups cg kg c_tiles by_c_tiles block_k o p q t r s by_taps by_filters "
    "stride_d by_stride_d stride_h by_stride_h stride_w by_stride_w pad_d pad_h pad_w dil_d dil_h dil_w has_scale has_bias relu",
)
WgradArguments = namedtuple(
    "WgradArguments",
    "slices by_slices chunks by_chunks images by_images groups cg kg by_kg d h w pixels by_rs r s by_s taps by_pq p q by_q "
    "stride_d stride_h stride_w pad_d pad_h pad_w dil_d dil_h dil_w",
)

#: Members that follow from the batch and from sizes of images; all others are constants of a layer.
_SIZES = {
    SingleArguments: "tiles h w p q", TileArguments: "tiles_p tiles_q h w p q", BatchedArguments: "n_pixels plane p q d h w",
    DgradArguments: "n_pixels plane h w o p q", WgradArguments: "slices cg d h w pixels r s",
}  # fmt: skip

Made = tuple[dict[str, int], tuple[int, ...], dict[str, int]]  # defines, arguments, and constants that the layer may add


def _constants(problem: ConvProblem, arguments: Any, **others: int) -> dict[str, int]:
    """What a kernel that knows the layer is compiled with: :attr:`KernelLaunch.layer`."""
    sizes = _SIZES[type(arguments)].split()
    known = {name.upper(): value for name, value in arguments._asdict().items() if name not in sizes and not name.startswith("by_")}
    return {"LAYER": 1, "AXES": problem.ndim} | known | others


def schedule(problem: ConvProblem, config: Config, device: Device, noted: bool = False) -> Schedule:
    """The launches of `config` for `problem`."""
    kernel, make = _KERNELS[type(config)]
    defines, arguments, layer = make(problem, config)
    threads = config.TILE_P // config.ROWS * config.TILE_Q if isinstance(config, Tile) else defines["THREADS"]
    slices = config.SLICES if isinstance(config, Wgrad) else 1
    size = math.prod(problem.result_shape)
    defines = {"DTYPE": DTYPE_CODES[problem.dtype], "INDEX_64": int(needs_64_bits(problem) or slices * size >= 2**31)} | defines
    buffers: tuple[int, ...] = (INPUT, WEIGHT, BIAS, SCALE, RESIDUAL, RESULT)
    if isinstance(config, Wgrad):
        buffers = (INPUT, WEIGHT, RESULT if slices == 1 else WORKSPACE)
    else:
        defines["HAS_RESIDUAL"] = int(problem.has_residual)
    launch = KernelLaunch(kernel, defines, _grid(problem, config), threads, buffers, (), arguments=arguments, layer=layer)
    if slices == 1:
        return Schedule.plain([[launch]])
    return Schedule.plain([[launch], [reduce_launch(problem, slices, WORKSPACE)]], slices * size * accumulator_bytes(problem))


def _single(problem: ConvProblem, config: Single) -> Made:
    (_, h, w), (_, r, s), (_, p, q) = problem.input_size, problem.filter_size, problem.output_size
    tiles = ceil(p * q, config.THREADS)
    arguments = SingleArguments(
        tiles, divider(tiles), problem.C, problem.K, divider(problem.K), divider(problem.K // problem.C), h, w, r, s, p, q, divider(q),
        *problem.stride[1:], *problem.padding_before[1:], *problem.dilation[1:], *_finish(problem),
    )
    return {"THREADS": config.THREADS, "ROOM": _room(problem, r * s)}, arguments, _constants(problem, arguments, ROOM=r * s)


def _tile(problem: ConvProblem, config: Tile) -> Made:
    (_, h, w), (_, r, s), (_, p, q) = problem.input_size, problem.filter_size, problem.output_size
    (_, stride_h, stride_w), (_, dil_h, dil_w) = problem.stride, problem.dilation
    halo_h, halo_w = _halo(problem, config)
    tiles_p, tiles_q = ceil(p, config.TILE_P), ceil(q, config.TILE_Q)
    arguments = TileArguments(
        tiles_p, divider(tiles_p), tiles_q, divider(tiles_q), problem.C, problem.K, divider(problem.K), divider(problem.K // problem.C),
        h, w, p, q, *problem.padding_before[1:], r, s, stride_h, stride_w, dil_h, dil_w, divider(halo_w), *_finish(problem),
    )
    elements = r * s + halo_h * halo_w
    layer = _constants(problem, arguments, ROOM=elements)
    if r == s and r in (3, 5, 7) and stride_h == stride_w <= 2 and dil_h == dil_w == 1:
        names = "R", "S", "STRIDE_H", "STRIDE_W", "DIL_H", "DIL_W", "ROOM"
        return asdict(config) | {name: layer[name] for name in names}, arguments, layer
    return asdict(config) | {"ROOM": _room(problem, elements)}, arguments, layer


def _batched(problem: ConvProblem, config: Batched) -> Made:
    (t, r, s), (_, p, q) = problem.filter_size, problem.output_size
    plane, groups = math.prod(problem.output_size), problem.groups
    cg, kg = problem.C // groups, problem.K // groups
    k_tiles, block_taps = ceil(kg, config.BLOCK_K), config.BLOCK_C * t * r * s
    arguments = BatchedArguments(
        _pixels(problem), plane, divider(plane), divider(p * q), p, q, divider(q), groups, divider(groups), cg, kg,
        k_tiles, divider(k_tiles), config.BLOCK_C, block_taps, divider(block_taps), *problem.input_size, t, r, s,
        *problem.stride, *problem.padding_before, *problem.dilation, *_finish(problem),
    )
    defines = {"THREADS": config.THREADS, "BLOCK_K": config.BLOCK_K, "ROOM": _room(problem, block_taps * config.BLOCK_K)}
    common = {"R": r, "S": s} if r == s and r in (1, 3) else {}
    return defines | common, arguments, _constants(problem, arguments, ROOM=block_taps * config.BLOCK_K)


def _dgrad(problem: ConvProblem, config: Dgrad) -> Made:
    (t, r, s), (_, h, w) = problem.filter_size, problem.input_size
    plane, groups = math.prod(problem.input_size), problem.groups
    cg, kg = problem.C // groups, problem.K // groups
    c_tiles, taps = ceil(cg, config.BLOCK_C), t * r * s
    stride_d, stride_h, stride_w = problem.stride
    arguments = DgradArguments(
        _pixels(problem), plane, divider(plane), divider(h * w), h, w, divider(w), groups, divider(groups), cg, kg,
        c_tiles, divider(c_tiles), config.BLOCK_K, *problem.output_size, t, r, s, divider(taps), divider(taps * config.BLOCK_C),
        stride_d, divider(stride_d), stride_h, divider(stride_h), stride_w, divider(stride_w),
        *problem.padding_before, *problem.dilation, *_finish(problem),
    )
    elements = config.BLOCK_K * taps * config.BLOCK_C
    defines = {"THREADS": config.THREADS, "BLOCK_C": config.BLOCK_C, "ROOM": _room(problem, elements)}
    common = {"R": r, "S": s, "STRIDE_H": stride_h, "STRIDE_W": stride_w} if r == s == 3 and stride_h == stride_w <= 2 else {}
    return defines | common, arguments, _constants(problem, arguments, ROOM=elements)


def _wgrad(problem: ConvProblem, config: Wgrad) -> Made:
    (_, r, s), (_, p, q), groups = problem.filter_size, problem.output_size, problem.groups
    taps = math.prod(problem.output_size)
    chunks, kg = ceil(taps, config.TAPS), problem.K // groups
    arguments = WgradArguments(
        config.SLICES, divider(config.SLICES), chunks, divider(chunks), problem.N, divider(problem.N), groups, problem.C // groups,
        kg, divider(kg), *problem.input_size, math.prod(problem.filter_size), divider(r * s), r, s, divider(s),
        taps, divider(p * q), p, q, divider(q), *problem.stride, *problem.padding_before, *problem.dilation,
    )
    defines = {"THREADS": config.THREADS, "TAPS": config.TAPS}
    common = {"Q": q} if _square(problem) and config.TAPS == taps else {}
    return defines | common, arguments, _constants(problem, arguments, TAPS=config.TAPS, ALL_TAPS=taps)


def _square(problem: ConvProblem) -> bool:
    """Whether a filter whose gradient is asked for has one of the common sizes, without dilation."""
    return problem.output_size in ((1, 3, 3), (1, 5, 5), (1, 7, 7)) and problem.stride[1:] == (1, 1)


_KERNELS: dict[type, tuple[str, Callable[[ConvProblem, Any], Made]]] = {
    Single: ("direct_single", _single), Tile: ("direct_tile", _tile), Batched: ("direct_batched", _batched),
    Dgrad: ("direct_dgrad", _dgrad), Wgrad: ("direct_wgrad", _wgrad),
}  # fmt: skip


def _finish(problem: ConvProblem) -> tuple[int, int, int]:
    asked = epilogue(problem)
    return asked["HAS_SCALE"], asked["HAS_BIAS"], asked["RELU"]


def _room(problem: ConvProblem, elements: int) -> int:
    """So many sums of shared memory, rounded up to one of few sizes: each is a text of its own."""
    acc = accumulator_bytes(problem)
    return next(nbytes for nbytes in ROOMS if nbytes >= elements * acc) // acc


def filter_key(problem: ConvProblem, config: Config) -> None:
    """None: the kernels read the filter as it is."""


def sum_order(problem: ConvProblem, config: Config) -> Hashable:
    """The kernel; tiles don't matter, but how many threads and slices share the sums of the gradient of a filter."""
    return (Wgrad, config.THREADS, config.SLICES) if isinstance(config, Wgrad) else (type(config),)


def texts(device: Device) -> Iterator[TextFamily]:
    """A text for a tile, a type and a room of shared memory; and one for each of a few common filters."""
    finish = {"INDEX_64": FLAG, "HAS_RESIDUAL": FLAG}
    for code, acc in ((64, 8), (32, 4), (16, 4), (17, 4)):
        common = {"DTYPE": (code,), **finish}
        rooms = {"ROOM": tuple(nbytes // acc for nbytes in ROOMS)}
        yield TextFamily("direct_single", common | {"THREADS": (128,)} | rooms)
        for tile in TILES:
            of_tile = common | {name: (value,) for name, value in asdict(tile).items()}
            yield TextFamily("direct_tile", of_tile | rooms)
            for taps, stride in product((3, 5, 7), (1, 2)):
                room = taps * taps + ((tile.TILE_P - 1) * stride + taps) * ((tile.TILE_Q - 1) * stride + taps)
                layer = {"R": taps, "S": taps, "STRIDE_H": stride, "STRIDE_W": stride, "DIL_H": 1, "DIL_W": 1, "ROOM": room}
                if room * acc <= STATIC_SHARED_BYTES:
                    yield TextFamily("direct_tile", of_tile | {name: (value,) for name, value in layer.items()})
        batched = common | {"THREADS": (128,), "BLOCK_K": (1, 2, 4, 8)} | rooms
        yield TextFamily("direct_batched", batched)
        yield TextFamily("direct_batched", batched | {"R": (1, 3), "S": (1, 3)}, lambda d: d["R"] == d["S"])
        dgrad = common | {"THREADS": (128,), "BLOCK_C": (1, 2, 4, 8)} | rooms
        yield TextFamily("direct_dgrad", dgrad)
        yield TextFamily("direct_dgrad", dgrad | {"R": (3,), "S": (3,), "STRIDE_H": (1, 2), "STRIDE_W": (1, 2)},
                         lambda d: d["STRIDE_H"] == d["STRIDE_W"])  # fmt: skip
        wgrad = {"DTYPE": (code,), "INDEX_64": FLAG, "THREADS": (128,)}
        yield TextFamily("direct_wgrad", wgrad | {"TAPS": WGRAD_TAPS})
        yield TextFamily("direct_wgrad", wgrad | {"TAPS": (9, 25, 49), "Q": (3, 5, 7)}, lambda d: d["TAPS"] == d["Q"] ** 2)


# ---- the choice


def time(problem: ConvProblem, config: Config, device: Device) -> float | None:
    """Microseconds that `config` should take; None for direct_single.cu, which no model knows.

    A thread of direct_batched.cu and direct_dgrad.cu waits for memory at every channel, so what counts are the channels that one walks
    and how many threads are there for each that fits, not the multiplications. So it is with pixels in direct_wgrad.cu. A tile costs its
    multiplications, those of its overhang included, and its loads. Fitted to 200 timings of 50 random problems on an H200: most are
    right within a factor of 1.5, small ones of many channels within 2 or 3.
    """
    if isinstance(config, Tile):
        _, p, q = problem.output_size
        planes, taps = problem.N * problem.K, math.prod(problem.filter_size)
        pixels = ceil(p, config.TILE_P) * config.TILE_P * ceil(q, config.TILE_Q) * config.TILE_Q
        return 3 + planes * (pixels * taps / 12e6 + _tile_loads(problem, config) / 0.5e6) * 132 / device.multiprocessors
    if isinstance(config, Wgrad):
        taps, images = math.prod(problem.output_size), problem.operand_channels // problem.groups
        blocks = problem.K * problem.N * ceil(taps, config.TAPS) * config.SLICES
        steps = ceil(images, config.SLICES) * ceil(math.prod(problem.filter_size), config.THREADS)
        return 2 + max(1.0, blocks / (16 * device.multiprocessors)) * (3 + steps * (0.3 + 0.03 * config.TAPS))
    if not isinstance(config, Batched | Dgrad):
        return None
    written, read = problem.result_channels // problem.groups, problem.operand_channels // problem.groups
    taps = math.prod(problem.filter_size)
    if isinstance(config, Batched):
        block, start, channel = config.BLOCK_K, 2.0, max(0.45, 0.075 * taps)
    else:  # of a strided convolution's taps a pixel meets only some
        block, start, channel = config.BLOCK_C, 0.4, max(0.6, 0.09 * taps / math.prod(problem.stride))
    threads = _pixels(problem) * problem.groups * ceil(written, block)
    return 1 + max(1.0, threads / (1024 * device.multiprocessors)) * (start + read * channel)


def choose(problem: ConvProblem, device: Device) -> tuple[float, Config] | None:
    """The first legal configuration by rules that were measured.

    On a GPU it comes with what it should take where other engines' kernels may win.
    """
    for config in _by_rule(problem, device):
        if refusal(problem, config) is None:
            alone = problem.direction == "fprop" and problem.layout == "NCHW" and problem.K == problem.C
            us = time(problem, config, device) if device.backend == "cuda" and not alone else None
            return BY_RULE if us is None else us, config
    for config in _for_little_work(problem, device.multiprocessors):
        if refusal(problem, config) is None:
            us = time(problem, config, device) if device.backend == "cuda" else None
            return LAST_RESORT if us is None else us, config
    return None


def _by_rule(problem: ConvProblem, device: Device) -> Iterator[Config]:
    """Configurations that are faster than this engine's others, from the best downwards."""
    if problem.direction == "fprop" and problem.C == problem.groups:
        # below a thousand results the launch is all there is, and the smallest kernel wins
        if problem.N * problem.K * math.prod(problem.output_size) > 1024:
            yield from sorted(TILES, key=lambda config: _tile_loads(problem, config))
        yield Single()
    if problem.layout == "CNHW":
        written, pixels = problem.result_channels // problem.groups, _pixels(problem)
        if device.backend == "cuda" or written * pixels < LEAST_FILLED * 64 * ceil(written, 64) * 64 * ceil(pixels, 64):
            yield wgrad_config(problem, device.multiprocessors)


def _for_little_work(problem: ConvProblem, multiprocessors: int) -> Iterator[Config]:
    """Configurations for problems too small for tiles of a matrix product, from the best downwards."""
    written, read = problem.result_channels // problem.groups, problem.operand_channels // problem.groups
    for block in (8, 4, 2, 1):
        # as many channels a thread as leave every multiprocessor 256 threads: reuse of x against parallelism
        threads = _pixels(problem) * problem.groups * ceil(written, block)
        if block == 1 or (block <= written and threads >= 256 * multiprocessors):
            for reduction in (16, 8, 4, 2, 1):
                if reduction <= max(read, 1):
                    if problem.direction == "fprop":
                        yield Batched(BLOCK_K=block, BLOCK_C=reduction)
                    else:
                        yield Dgrad(BLOCK_C=block, BLOCK_K=reduction)


def wgrad_config(problem: ConvProblem, multiprocessors: int) -> Wgrad:
    """The best configuration of ``direct_wgrad.cu``: few idle sums, and slices that fill the machine."""
    taps, images = math.prod(problem.output_size), problem.operand_channels // problem.groups
    # a chunk of taps costs about two taps more, for reading y
    at_once = min(WGRAD_TAPS, key=lambda n: ceil(taps, n) * (n + 2))
    if _square(problem) and refusal(problem, Wgrad(128, taps)) is None:
        at_once = taps
    blocks = max(problem.K * problem.N * ceil(taps, at_once), 1)
    return Wgrad(128, at_once, max(1, min(images, ceil(8 * multiprocessors, blocks))))


def configs(problem: ConvProblem, device: Device) -> Iterator[Config]:
    """The configurations that are worth measuring for `problem`."""
    if problem.layout == "CNHW":
        yield wgrad_config(problem, device.multiprocessors)
        return
    written, read = problem.result_channels // problem.groups, problem.operand_channels // problem.groups
    if problem.direction == "fprop" and problem.C == problem.groups:
        yield from (*TILES, Single())
    if problem.macs < 400e6 or written < 16:  # beyond that the matrix products win
        for block in (8, 4, 2, 1):
            for reduction in (16, 4):
                if block <= written and reduction // 4 < max(read, 1):
                    forward = problem.direction == "fprop"
                    yield Batched(BLOCK_K=block, BLOCK_C=reduction) if forward else Dgrad(BLOCK_C=block, BLOCK_K=reduction)


#: The tiles that were best for some depthwise layer or image among the 40 tried on an H200.
TILES = (Tile(14, 64, 7), Tile(14, 32, 7), Tile(16, 16, 4), Tile(8, 16, 2), Tile(8, 64, 8), Tile(1, 256, 1))


def _tile_loads(problem: ConvProblem, config: Tile) -> int:
    """Elements that the tiles of one plane load, halos and overhang included: what such a kernel spends its time on."""
    _, p, q = problem.output_size
    return ceil(p, config.TILE_P) * ceil(q, config.TILE_Q) * math.prod(_halo(problem, config))


#: Where less of a matrix product's tiles is used, a CPU computes the gradient of a filter by direct_wgrad.cu.
LEAST_FILLED = 1 / 8
