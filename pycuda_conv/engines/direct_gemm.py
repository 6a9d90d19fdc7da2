"""The register-blocked matrix product on plain cores, for every problem: ``cu/direct_gemm.cu``.

It also computes once more, in plain fp32, what 16-bit limbs can't hold: see :mod:`pycuda_conv.engines.range_guard`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from pycuda_conv.engines.base import LAST_RESORT, Config
from pycuda_conv.engines.geometry import (
    accumulator_bytes,
    ceil,
    filter_strides,
    needs_64_bits,
    phases,
    places,
    read_strides,
    written_strides,
)
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
from pycuda_conv.engines.split_sum import reduce_launch, splits
from pycuda_conv.problem import DTYPE_CODES, ConvProblem
from pycuda_conv.runtime.base import Device, KernelLaunch

_OPERANDS = (INPUT, WEIGHT, BIAS, SCALE, RESIDUAL)  # as the kernel takes them, before the result


@dataclass(frozen=True)
class Gemm(Config):
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


CONFIGS = (Gemm,)
TENSOR_CORES = False


# ---- what runs


def unsupported(device: Device) -> str | None:
    """None: the kernel runs on every device."""
    return None


def refusal(problem: ConvProblem, config: Gemm) -> str | None:
    """Why `config` can't run `problem`, or None if it can."""
    reason = _no_tile(config)
    if reason:
        return reason
    shared = 2 * config.BLOCK_K * (config.BLOCK_M + 4 + config.BLOCK_N) * accumulator_bytes(problem)
    if shared > STATIC_SHARED_BYTES:
        return f"it needs {shared:,} bytes of shared memory; a block has {STATIC_SHARED_BYTES:,}"
    if any(grid > GRID_LIMIT for grid in _grids(problem, config)):
        return f"its grid is larger than {GRID_LIMIT:,} blocks"
    return None


def _no_tile(config: Gemm) -> str | None:
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


def _grids(problem: ConvProblem, config: Gemm) -> list[int]:
    """Blocks of the launch of each phase."""
    m_tiles = ceil(problem.result_channels // problem.groups, config.BLOCK_M)
    return [
        ceil(problem.N * math.prod(phase.size), config.BLOCK_N) * problem.groups * config.SPLIT_K * m_tiles for phase in phases(problem)
    ]


# ---- launches


def schedule(problem: ConvProblem, config: Gemm, device: Device, noted: bool = False) -> Schedule:
    """The launches of `config` for `problem`."""
    launches, split = products(problem, config), config.SPLIT_K
    if split == 1:
        return Schedule.plain([launches])
    nbytes = split * math.prod(problem.result_shape) * accumulator_bytes(problem)
    return Schedule.plain([launches, [reduce_launch(problem, split, WORKSPACE)]], nbytes)


def filter_key(problem: ConvProblem, config: Gemm) -> None:
    """None: the kernel reads the filter as it is."""


def products(problem: ConvProblem, config: Gemm, filter_last: bool = False) -> list[KernelLaunch]:
    """The launches of all phases, the longest first."""
    groups = problem.groups
    m, reduction = problem.result_channels // groups, problem.operand_channels // groups
    taps = math.prod(problem.filter_size)
    _, r, s = problem.filter_size
    tap_strides = (r * s, s, 1)
    w_g, w_m, w_c = filter_strides(problem)
    if filter_last:
        w_c, tap_strides = 1, (r * s * reduction, s * reduction, reduction)
    size = math.prod(problem.result_shape)
    split = config.SPLIT_K
    nhwc = problem.layout == "NHWC"
    launches = []
    for phase, grid in sorted(zip(phases(problem), _grids(problem, config), strict=True), key=lambda pair: -math.prod(pair[0].taps)):
        empty = 0 in phase.taps or reduction == 0
        pixels = problem.N * math.prod(phase.size)
        plane = math.prod(phase.size)
        contiguous_taps = problem.direction == "fprop" and w_c == taps and reduction * taps % 4 == 0
        contiguous_taps = contiguous_taps and _divides(config.threads, config.BLOCK_K, config.BLOCK_M, 4)
        pointwise = phase.taps == (1, 1, 1) and phase.stride == (1, 1, 1) and phase.pad == (0, 0, 0) and phase.size == problem.operand_size
        pointwise = pointwise and not nhwc and plane % 4 == 0 and _divides(config.threads, config.BLOCK_N, config.BLOCK_K, 4)
        dense_result = not nhwc and phase.step == (1, 1, 1) and plane % 4 == 0
        defines = asdict(config) | {
            "DTYPE": DTYPE_CODES[problem.dtype], "INDEX_64": int(needs_64_bits(problem) or split * size >= 2**31),
            "GROUPS": groups, "M": m, "CRED": max(reduction, 1),
            "EMPTY": int(empty), **epilogue(problem, split > 1), "GUARDED": 0, "NOTED": 0,
            "A_VEC": 4 if contiguous_taps and not empty else 1, "B_VEC": 4 if pointwise else 1,
            "OUT_VEC": 4 if dense_result and not (split > 1 and problem.itemsize == 2) else 1,
            "W_BASE": sum(f * t for f, t in zip(phase.first, tap_strides, strict=True)),
            "W_G": w_g, "W_M": w_m, "W_C": w_c,
            **{f"X_{axis.upper()}": n for axis, n in asdict(read_strides(problem)).items()},
            **{f"Y_{axis.upper()}": n for axis, n in asdict(written_strides(problem)).items()},
            **dict(zip(("OUT_SIZE", "OUT_BASE", "OUT_D", "OUT_H", "OUT_W"), places(problem, phase), strict=True)),
        }
        for i, (axis, tap_axis, pixel_axis) in enumerate(zip("DHW", "TRS", "OPQ", strict=True)):
            count = max(phase.taps[i], 1)
            ends = [j * phase.stride[i] - phase.pad[i] + t * phase.dilation[i] for j in (0, phase.size[i] - 1) for t in (0, count - 1)]
            defines |= {
                axis: problem.operand_size[i], tap_axis: count, pixel_axis: phase.size[i], f"STRIDE_{axis}": phase.stride[i],
                f"PAD_{axis}": phase.pad[i], f"DIL_{axis}": phase.dilation[i],
                f"CHECK_{axis}": int(min(ends) < 0 or max(ends) >= problem.operand_size[i]),
                f"W_{tap_axis}": phase.every[i] * tap_strides[i],
            }
        target = RESULT if split == 1 else WORKSPACE
        launches.append(KernelLaunch("direct_gemm", defines, grid, config.threads, (*_OPERANDS, target), (pixels,)))
    return launches


# ---- the choice


#: TFLOP/s of the tiles with the machine full: fitted to 700 timings of 32 layers on an H200
#: so that the model's choice is 2% slower than the best one in the geometric mean. Only their ratios matter.
GEMM_RATES = {
    Gemm(128, 128, 16, 8, 8, 2): 39.4, Gemm(128, 64, 16, 8, 8, 2): 38.5, Gemm(64, 128, 16, 8, 8, 3): 34.1, Gemm(64, 64, 16, 8, 8, 6): 29.9,
    Gemm(64, 64, 16, 8, 4, 4): 29.9, Gemm(32, 128, 16, 4, 8, 4): 29.9,
}
#: float64 keeps twice the bytes in registers and shared memory.
GEMM_RATES_64 = {Gemm(64, 64, 8, 8, 8, 2): 16.8, Gemm(64, 64, 8, 8, 4, 2): 14.9, Gemm(32, 64, 8, 4, 4, 2): 10.6}
def _rates(problem: ConvProblem) -> dict[Gemm, float]:
    return GEMM_RATES_64 if problem.dtype == "float64" else GEMM_RATES


def configs(problem: ConvProblem, device: Device) -> Iterator[Gemm]:
    """The configurations worth comparing for `problem`."""
    reduction = problem.operand_channels // problem.groups * math.prod(problem.filter_size)
    for tile in _rates(problem):
        for split in splits(problem, reduction // 128):
            yield replace(tile, SPLIT_K=split)


def time(problem: ConvProblem, config: Gemm, device: Device) -> float:
    """Microseconds that `config` should take: rounds of blocks, of which the last may leave multiprocessors half empty.

    A block costs its multiplications and 7 more steps of the loop for its start and its stores. A multiprocessor with
    n of the m blocks that fit runs at (n/m)^0.15 of its full rate. Phases of dgrad run side by side, the longest
    first, and what is left over at the end is most of one long block. A split sum is written and read once more, twice
    the bytes where a phase writes every other pixel.
    """
    multiprocessors = device.multiprocessors
    rate = _rates(problem)[replace(config, SPLIT_K=1)] / multiprocessors * 1e6  # FLOP/us of one multiprocessor
    if problem.layout == "CNHW":  # whose neighbouring columns lie a plane apart
        rate /= 3
    step, fit = 2 * config.BLOCK_M * config.BLOCK_N * config.BLOCK_K, config.MIN_BLOCKS
    reduction = problem.operand_channels // problem.groups
    blocks = _grids(problem, config)
    lengths = [
        step * (ceil(ceil(reduction * math.prod(phase.taps), config.BLOCK_K), config.SPLIT_K) + 7) / rate for phase in phases(problem)
    ]
    if len(blocks) == 1:
        rounds, rest = divmod(blocks[0], multiprocessors * fit)
        last = ceil(rest, multiprocessors)
        us = lengths[0] * (rounds * fit + (last / (last / fit) ** 0.15 if last else 0))
    else:
        work = sum(count * length for count, length in zip(blocks, lengths, strict=True))
        us = work / multiprocessors + 0.8 * fit * max(lengths)
    if config.SPLIT_K > 1:
        bytes_moved = math.prod(problem.result_shape) * accumulator_bytes(problem) * (2 * config.SPLIT_K + 1)
        us += 2 + bytes_moved * min(len(blocks), 2) / 3e6  # at 3 TB/s
    return us + 3


def choose(problem: ConvProblem, device: Device) -> tuple[float, Gemm] | None:
    """The configuration that should be the fastest; where there is little work, one that has to do if no other kernel can."""
    # a tile needs work: under 40 million MACs direct_batched.cu was faster on the H200, under 16 channels always
    # a CPU has too few registers for a thread's sums: there direct_batched.cu was up to twice as fast
    enough = problem.layout != "NCHW" or (problem.macs >= 40e6 and problem.result_channels // problem.groups >= 16)
    if device.backend == "cuda" and enough:
        found = ((time(problem, config, device), config) for config in configs(problem, device) if refusal(problem, config) is None)
        best = min(found, key=lambda pair: pair[0], default=None)
        if best is not None:
            return best
    last = Gemm(64, 64, 8, 4, 4, 1)
    return (LAST_RESORT, last) if refusal(problem, last) is None else None
