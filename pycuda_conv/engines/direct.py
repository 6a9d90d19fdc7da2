"""The direct engine: plain-core kernels for every problem, on CUDA and on OpenCL.

Each configuration class is one kernel of the ladder in ``cu/`` (``direct_single.cu`` to ``direct_gemm.cu``); its fields
are the kernel's tuning constants under the same names. :func:`choose` picks one by a short model of time, :func:`steps`
turns it into launches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import Step

GRID_LIMIT = 2**31 - 1
SHARED_BYTES = 48 * 1024  # what a block may declare statically on every GPU

# the plan's buffers, as a step refers to them
INPUT, WEIGHT, BIAS, RESULT, WORKSPACE = range(5)


@dataclass(frozen=True)
class Single:
    """One thread a pixel, one input channel an output channel: ``direct_single.cu``."""

    THREADS: int = 128


@dataclass(frozen=True)
class Tile:
    """As :class:`Single`, with the input tile in shared memory: ``direct_tile.cu``. ROWS divides TILE_P."""

    TILE_P: int = 8
    TILE_Q: int = 32
    ROWS: int = 1


@dataclass(frozen=True)
class Batched:
    """One thread a pixel times BLOCK_K channels, everything in one launch: ``direct_batched.cu``."""

    THREADS: int = 128
    BLOCK_K: int = 8
    BLOCK_C: int = 4


@dataclass(frozen=True)
class Dgrad:
    """The transposed convolution as a gather, one thread a pixel times BLOCK_C channels: ``direct_dgrad.cu``."""

    THREADS: int = 128
    BLOCK_K: int = 4
    BLOCK_C: int = 8


@dataclass(frozen=True)
class Gemm:
    """Implicit matrix product with register blocking: ``direct_gemm.cu``; dgrad as one launch a stride phase."""

    BLOCK_M: int = 128
    BLOCK_N: int = 128
    BLOCK_K: int = 8
    THREAD_M: int = 8
    THREAD_N: int = 8
    MIN_BLOCKS: int = 2
    SPLIT_K: int = 1

    @property
    def threads(self) -> int:
        """Threads a block."""
        return self.BLOCK_M // self.THREAD_M * (self.BLOCK_N // self.THREAD_N)


Config = Single | Tile | Batched | Dgrad | Gemm


def accumulator_bytes(problem: ConvProblem) -> int:
    """Bytes of one sum."""
    return 8 if problem.dtype == "float64" else 4


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _letters(problem: ConvProblem) -> dict[str, int]:
    """The problem in the kernels' letters."""
    defines = {"DTYPE": problem.itemsize * 8, "INDEX_64": int(_index_64(problem)), "GROUPS": problem.groups}
    defines |= {"CG": problem.C // problem.groups, "KG": problem.K // problem.groups, "HAS_BIAS": int(problem.has_bias)}
    for names, values in (
        ("DHW", problem.input_size), ("TRS", problem.filter_size), ("OPQ", problem.output_size),
        (("STRIDE_D", "STRIDE_H", "STRIDE_W"), problem.stride), (("PAD_D", "PAD_H", "PAD_W"), problem.padding_before),
        (("DIL_D", "DIL_H", "DIL_W"), problem.dilation),
    ):
        defines |= dict(zip(names, values, strict=True))
    return defines


def _index_64(problem: ConvProblem) -> bool:
    # offsets are formed a little past the end of an array (a tile's tail, a tap outside the image) before they are checked
    slack = math.prod(problem.input_size) + math.prod(problem.output_size) + 2**20
    return problem.largest_array + slack >= 2**31


def _pixels(problem: ConvProblem) -> int:
    return problem.N * math.prod(problem.result_size)


# ---- what is legal


def legal(problem: ConvProblem, config: Config) -> str | None:
    """Why `config` can't run `problem`, or None if it can."""
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
    else:
        reason = _gemm_shape(config)
        if reason:
            return reason
        if config.SPLIT_K > 1 and problem.direction == "dgrad" and math.prod(problem.stride) > 1:
            return "a split needs the whole result written by one launch"
        shared = 2 * config.BLOCK_K * (config.BLOCK_M + 4 + config.BLOCK_N) * acc
    if shared > SHARED_BYTES:
        return f"it needs {shared:,} bytes of shared memory; a block has {SHARED_BYTES:,}"
    if any(grid > GRID_LIMIT for grid in _grids(problem, config)):
        return f"its grid is larger than {GRID_LIMIT:,} blocks"
    return None


def _gemm_shape(config: Gemm) -> str | None:
    threads_m, threads_n = config.BLOCK_M // config.THREAD_M, config.BLOCK_N // config.THREAD_N
    if config.THREAD_M % 4 or config.THREAD_N % 4 or config.BLOCK_M % config.THREAD_M or config.BLOCK_N % config.THREAD_N:
        return "a thread takes a multiple of four rows and columns, a block a multiple of a thread's"
    if threads_m % 4 or threads_n % 8:
        return "a warp is 4 x 8 threads"
    if not (_divides(config.threads, config.BLOCK_K, config.BLOCK_M) and _divides(config.threads, config.BLOCK_N, config.BLOCK_K)):
        return "the threads must fill whole rows of the tiles and divide the tiles"
    return None


def _divides(threads: int, row: int, rows: int, vector: int = 1) -> bool:
    """Whether `threads`, loading `vector` elements each, cover a tile of `rows` rows in whole steps of whole rows."""
    return row % vector == 0 and threads % (row // vector) == 0 and rows % (threads // (row // vector)) == 0


def _halo(problem: ConvProblem, config: Tile) -> tuple[int, int]:
    (_, r, s), (_, sh, sw), (_, dh, dw) = problem.filter_size, problem.stride, problem.dilation
    return (config.TILE_P - 1) * sh + (r - 1) * dh + 1, (config.TILE_Q - 1) * sw + (s - 1) * dw + 1


def _grids(problem: ConvProblem, config: Config) -> list[int]:
    """Blocks of each launch."""
    planes, (_, p, q) = problem.N * problem.K, problem.output_size
    if isinstance(config, Single):
        return [planes * _ceil(p * q, config.THREADS)]
    if isinstance(config, Tile):
        return [planes * _ceil(p, config.TILE_P) * _ceil(q, config.TILE_Q)]
    if isinstance(config, Batched):
        return [_ceil(_pixels(problem), config.THREADS) * problem.groups * _ceil(problem.K // problem.groups, config.BLOCK_K)]
    if isinstance(config, Dgrad):
        # without channels to write, as for an empty operand, the grid is empty too
        return [_ceil(_pixels(problem), config.THREADS) * problem.groups * _ceil(problem.C // problem.groups, config.BLOCK_C)]
    m_tiles = _ceil(problem.result_channels // problem.groups, config.BLOCK_M)
    return [
        _ceil(problem.N * math.prod(phase.size), config.BLOCK_N) * problem.groups * config.SPLIT_K * m_tiles for phase in phases(problem)
    ]


# ---- dgrad as forward convolutions


@dataclass(frozen=True)
class Phase:
    """A part of the result that a stride-1 convolution with some of the taps gives.

    `size` pixels (O, P, Q) starting at `origin`, `step` apart; taps (T, R, S), `first` + i * `every`; what tap i of pixel
    j reads lies at j * stride - `pad` + i * `dilation`. A forward convolution is one phase.
    """

    size: tuple[int, int, int]
    origin: tuple[int, int, int]
    step: tuple[int, int, int]
    taps: tuple[int, int, int]
    first: tuple[int, int, int]
    every: tuple[int, int, int]
    stride: tuple[int, int, int]
    pad: tuple[int, int, int]
    dilation: tuple[int, int, int]


def _axis_phases(size: int, taps: int, stride: int, pad: int, dilation: int) -> list[tuple[int, ...]]:
    """Phases of one axis of dgrad. Pixel a + stride*i meets tap r at output (a + pad - r*dilation) / stride + i."""
    found = []
    every = stride // math.gcd(stride, dilation)
    for a in range(min(stride, size)):
        pixels = _ceil(size - a, stride)
        first = next((r for r in range(min(taps, every)) if (a + pad - r * dilation) % stride == 0), None)
        if first is None:
            found.append((pixels, a, stride, 0, 0, 1, 1, 0, 0))
        else:
            start = (a + pad - first * dilation) // stride
            found.append((pixels, a, stride, _ceil(taps - first, every), first, every, 1, -start, -(every * dilation // stride)))
    return found


def phases(problem: ConvProblem) -> Iterator[Phase]:
    """The forward convolutions that make up the problem: one for fprop, one a combination of stride phases for dgrad."""
    if problem.direction == "fprop":
        zero, one = (0, 0, 0), (1, 1, 1)
        yield Phase(
            problem.output_size, zero, one, problem.filter_size, zero, one, problem.stride, problem.padding_before, problem.dilation
        )
        return
    axes = [
        _axis_phases(*values)
        for values in zip(problem.input_size, problem.filter_size, problem.stride, problem.padding_before, problem.dilation, strict=True)
    ]
    for combination in product(*axes):
        yield Phase(*(tuple(values) for values in zip(*combination, strict=True)))  # type: ignore[arg-type]


# ---- launches


def steps(problem: ConvProblem, config: Config) -> tuple[list[Step], int]:
    """The launches of `config` for `problem`, and the bytes of workspace between them."""
    reason = legal(problem, config)
    if reason:
        raise ValueError(f"{config} can't run {problem}: {reason}")
    if isinstance(config, Gemm):
        return _gemm_steps(problem, config)
    defines = _letters(problem) | asdict(config)
    (grid,) = _grids(problem, config)
    if isinstance(config, (Single, Tile)):
        for name in ("CG", "KG", "GROUPS", "D", "T", "O", "STRIDE_D", "PAD_D", "DIL_D"):
            del defines[name]
        defines |= {"C": problem.C, "K": problem.K, "MULTIPLIER": problem.K // problem.C}
        block = config.THREADS if isinstance(config, Single) else config.TILE_P // config.ROWS * config.TILE_Q
        kernel = "direct_single" if isinstance(config, Single) else "direct_tile"
        return [Step(kernel, defines, grid, block, (INPUT, WEIGHT, BIAS, RESULT), ())], 0
    kernel = "direct_batched" if isinstance(config, Batched) else "direct_dgrad"
    return [Step(kernel, defines, grid, config.THREADS, (INPUT, WEIGHT, BIAS, RESULT), (_pixels(problem),))], 0


def _gemm_steps(problem: ConvProblem, config: Gemm) -> tuple[list[Step], int]:
    groups, acc = problem.groups, accumulator_bytes(problem)
    m, reduction = problem.result_channels // groups, problem.operand_channels // groups
    taps = math.prod(problem.filter_size)
    _, r, s = problem.filter_size
    tap_strides = (r * s, s, 1)
    forward = problem.direction == "fprop"
    w_m, w_c = (reduction * taps, taps) if forward else (taps, m * taps)
    result = problem.result_size
    out_strides = (result[1] * result[2], result[2], 1)
    size = math.prod(problem.result_shape)
    split = config.SPLIT_K
    launches = []
    for phase, grid in zip(phases(problem), _grids(problem, config), strict=True):
        empty = 0 in phase.taps or reduction == 0
        pixels = problem.N * math.prod(phase.size)
        plane = math.prod(phase.size)
        contiguous_taps = forward and reduction * taps % 4 == 0 and _divides(config.threads, config.BLOCK_K, config.BLOCK_M, 4)
        pointwise = phase.taps == (1, 1, 1) and phase.stride == (1, 1, 1) and phase.pad == (0, 0, 0) and phase.size == problem.operand_size
        pointwise = pointwise and plane % 4 == 0 and _divides(config.threads, config.BLOCK_N, config.BLOCK_K, 4)
        dense_result = phase.step == (1, 1, 1) and plane % 4 == 0
        defines = asdict(config) | {
            "DTYPE": problem.itemsize * 8, "INDEX_64": int(_index_64(problem)), "GROUPS": groups, "M": m, "CRED": max(reduction, 1),
            "EMPTY": int(empty), "HAS_BIAS": int(problem.has_bias), "A_VEC": 4 if contiguous_taps and not empty else 1,
            "B_VEC": 4 if pointwise else 1,
            "OUT_VEC": 4 if dense_result and not (split > 1 and problem.dtype == "float16") else 1,
            "W_BASE": sum(f * t for f, t in zip(phase.first, tap_strides, strict=True)), "W_G": m * reduction * taps, "W_M": w_m, "W_C": w_c,
            "OUT_SIZE": math.prod(result), "OUT_BASE": sum(o * t for o, t in zip(phase.origin, out_strides, strict=True)),
        }
        for i, (axis, tap_axis, pixel_axis) in enumerate(zip("DHW", "TRS", "OPQ", strict=True)):
            count = max(phase.taps[i], 1)
            ends = [j * phase.stride[i] - phase.pad[i] + t * phase.dilation[i] for j in (0, phase.size[i] - 1) for t in (0, count - 1)]
            defines |= {
                axis: problem.operand_size[i], tap_axis: count, pixel_axis: phase.size[i], f"STRIDE_{axis}": phase.stride[i],
                f"PAD_{axis}": phase.pad[i], f"DIL_{axis}": phase.dilation[i],
                f"CHECK_{axis}": int(min(ends) < 0 or max(ends) >= problem.operand_size[i]),
                f"W_{tap_axis}": phase.every[i] * tap_strides[i], f"OUT_{axis}": phase.step[i] * out_strides[i],
            }
        target = RESULT if split == 1 else WORKSPACE
        launches.append(Step("direct_gemm", defines, grid, config.threads, (INPUT, WEIGHT, BIAS, target), (pixels,)))
    if split == 1:
        return launches, 0
    defines = {
        "DTYPE": problem.itemsize * 8, "INDEX_64": int(split * size >= 2**31), "THREADS": 256, "SPLIT_K": split,
        "CHANNELS": problem.result_channels, "OUT_SIZE": math.prod(result), "HAS_BIAS": int(problem.has_bias),
    }
    launches.append(Step("direct_reduce", defines, _ceil(size, 256), 256, (WORKSPACE, BIAS, RESULT), (size,)))
    return launches, split * size * acc


# ---- the choice


def choose(problem: ConvProblem, multiprocessors: int) -> Config:
    """The configuration to use on a device of so many multiprocessors."""
    for config in _preferred(problem, multiprocessors):
        if legal(problem, config) is None:
            return config
    raise AssertionError(f"no kernel runs {problem}")  # Gemm runs everything


def _preferred(problem: ConvProblem, multiprocessors: int) -> Iterator[Config]:
    per_group = (problem.result_channels // problem.groups, problem.operand_channels // problem.groups)
    if problem.direction == "fprop" and problem.C == problem.groups:
        _, _, q = problem.output_size
        yield Tile(TILE_P=8, TILE_Q=64 if q > 32 else 32, ROWS=2)
        yield Single()
    if problem.macs >= 20e6 and per_group[0] >= 16 and problem.operand_channels:
        yield Gemm()
    for block in (8, 4, 2, 1):
        if block == 1 or per_group[0] >= block:
            for reduction in (8, 4, 1):
                if problem.direction == "fprop":
                    yield Batched(BLOCK_K=block, BLOCK_C=reduction)
                else:
                    yield Dgrad(BLOCK_C=block, BLOCK_K=reduction)
    yield Gemm(64, 64, 8, 4, 4, 1)
