"""The direct engine: one output pixel a thread on plain cores, on CUDA and on OpenCL.

Each configuration class is one kernel of the ladder in ``cu/`` (``direct_single.cu`` to ``direct_wgrad.cu``); its fields
are the kernel's tuning constants under the same names. No model predicts their times: :func:`choose` follows rules.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import asdict, dataclass

from pycuda_conv.engines.base import BY_RULE, LAST_RESORT, Config
from pycuda_conv.engines.geometry import accumulator_bytes, ceil, needs_64_bits
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
from pycuda_conv.problem import DTYPE_CODES, ConvProblem
from pycuda_conv.runtime.base import Device, KernelLaunch

_OPERANDS = (INPUT, WEIGHT, BIAS, SCALE, RESIDUAL, RESULT)  # as a kernel takes them


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
TENSOR_CORES = False


def _letters(problem: ConvProblem) -> dict[str, int]:
    """The problem in the kernels' letters."""
    defines = {"DTYPE": DTYPE_CODES[problem.dtype], "INDEX_64": int(needs_64_bits(problem)), "GROUPS": problem.groups}
    defines |= {"CG": problem.C // problem.groups, "KG": problem.K // problem.groups} | epilogue(problem)
    for names, values in (
        ("DHW", problem.input_size), ("TRS", problem.filter_size), ("OPQ", problem.output_size),
        (("STRIDE_D", "STRIDE_H", "STRIDE_W"), problem.stride), (("PAD_D", "PAD_H", "PAD_W"), problem.padding_before),
        (("DIL_D", "DIL_H", "DIL_W"), problem.dilation),
    ):
        defines |= dict(zip(names, values, strict=True))
    return defines


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
        shared = config.TAPS * config.THREADS * acc
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


def schedule(problem: ConvProblem, config: Config, device: Device, noted: bool = False) -> Schedule:
    """The launches of `config` for `problem`."""
    defines, grid = _letters(problem) | asdict(config), _grid(problem, config)
    if isinstance(config, (Single, Tile)):
        for name in ("CG", "KG", "GROUPS", "D", "T", "O", "STRIDE_D", "PAD_D", "DIL_D"):
            del defines[name]
        defines |= {"C": problem.C, "K": problem.K, "MULTIPLIER": problem.K // problem.C}
        block = config.THREADS if isinstance(config, Single) else config.TILE_P // config.ROWS * config.TILE_Q
        kernel = "direct_single" if isinstance(config, Single) else "direct_tile"
        return Schedule.plain([[KernelLaunch(kernel, defines, grid, block, _OPERANDS, ())]])
    if isinstance(config, Wgrad):
        del defines["HAS_BIAS"]
        size = math.prod(problem.result_shape)
        defines |= {"IMAGES": problem.N, "INDEX_64": int(needs_64_bits(problem) or config.SLICES * size >= 2**31)}
        if config.SLICES == 1:
            return Schedule.plain([[KernelLaunch("direct_wgrad", defines, grid, config.THREADS, (INPUT, WEIGHT, RESULT), ())]])
        launch = KernelLaunch("direct_wgrad", defines, grid, config.THREADS, (INPUT, WEIGHT, WORKSPACE), ())
        add = reduce_launch(problem, config.SLICES, WORKSPACE)
        return Schedule.plain([[launch], [add]], config.SLICES * size * accumulator_bytes(problem))
    assert isinstance(config, (Batched, Dgrad))
    kernel = "direct_batched" if isinstance(config, Batched) else "direct_dgrad"
    return Schedule.plain([[KernelLaunch(kernel, defines, grid, config.THREADS, _OPERANDS, (_pixels(problem),))]])


def filter_key(problem: ConvProblem, config: Config) -> None:
    """None: the kernels read the filter as it is."""


def sum_order(problem: ConvProblem, config: Config) -> Hashable:
    """The kernel; tiles don't matter, but how many threads and slices share the sums of the gradient of a filter."""
    return (Wgrad, config.THREADS, config.SLICES) if isinstance(config, Wgrad) else (type(config),)


# ---- the choice


def time(problem: ConvProblem, config: Config, device: Device) -> None:
    """None: no model knows."""


def choose(problem: ConvProblem, device: Device) -> tuple[float, Config] | None:
    """The first legal configuration by rules that were measured, or else what has to do where no other engine's kernel pays."""
    for us, found in (BY_RULE, _by_rule(problem, device.multiprocessors)), (LAST_RESORT, _for_little_work(problem, device.multiprocessors)):
        for config in found:
            if refusal(problem, config) is None:
                return us, config
    return None


def _by_rule(problem: ConvProblem, multiprocessors: int) -> Iterator[Config]:
    """Configurations that are faster than any other engine's, from the best downwards."""
    if problem.direction == "fprop" and problem.C == problem.groups:
        # below a thousand results the launch is all there is, and the smallest kernel wins
        if problem.N * problem.K * math.prod(problem.output_size) > 1024:
            yield from sorted(TILES, key=lambda config: _tile_loads(problem, config))
        yield Single()
    if problem.layout == "CNHW":
        written, pixels = problem.result_channels // problem.groups, _pixels(problem)
        if written * pixels < LEAST_FILLED * 64 * ceil(written, 64) * 64 * ceil(pixels, 64):
            yield wgrad_config(problem, multiprocessors)


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
    """The best configuration of ``direct_wgrad.cu``: all taps at once if the sums fit, and slices that fill the machine."""
    taps, images = math.prod(problem.output_size), problem.operand_channels // problem.groups
    most = STATIC_SHARED_BYTES // (128 * accumulator_bytes(problem))
    at_once = ceil(taps, ceil(taps, min(most, 64)))
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


#: Where less of a GEMM's tiles is used, direct_wgrad.cu computes the gradient of a filter.
LEAST_FILLED = 1 / 8
