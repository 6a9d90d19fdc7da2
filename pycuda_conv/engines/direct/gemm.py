"""The register-blocked matrix product on plain cores, for every problem: ``cu/direct/gemm.cu``.

It also computes once more, in plain fp32, the results that 16-bit limbs can't give: see :mod:`pycuda_conv.engines.range_guard`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

from pycuda_conv.engines.base import FLAG, LAST_RESORT, Config, VariantSet, fastest, fixed, kernel_struct
from pycuda_conv.engines.costs import costs, spread
from pycuda_conv.engines.geometry import (
    Phase,
    accumulator_bytes,
    arguments,
    by_axis,
    ceil,
    few_have_taps,
    filter_strides,
    finish,
    needs_64_bits,
    phase_kinds,
    phases,
    places,
    read_strides,
    row_major,
    written_strides,
)
from pycuda_conv.engines.limits import Takes, Tiles
from pycuda_conv.engines.schedule import FINISH, INPUT, RESULT, STATIC_SHARED_BYTES, WEIGHT, WORKSPACE, Schedule
from pycuda_conv.engines.split_sum import reduce_launch, splits
from pycuda_conv.problem import DTYPE_CODES, ConvProblem
from pycuda_conv.runtime.base import SIDE_BY_SIDE, Device, KernelLaunch

TAP_BYTES = 32 + 8  # bytes of a k in the table of taps: its offsets in x and in w


@dataclass(frozen=True)
class Gemm(Config):
    """An implicit matrix product with register blocking: ``direct/gemm.cu``. dgrad is one launch for each stride phase.

    If there are many phases and few have taps, a launch first writes the whole result as if it had no taps.
    """

    BLOCK_M: int = 128
    BLOCK_N: int = 128
    BLOCK_K: int = 8
    THREAD_M: int = 8
    THREAD_N: int = 8
    MIN_BLOCKS: int = 2
    SPLIT_K: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.BLOCK_M // self.THREAD_M * (self.BLOCK_N // self.THREAD_N)


CONFIGS, LAYOUTS, MOST_VARIANTS = (Gemm,), ("NCHW", "NHWC", "CNHW"), {"cuda": 37, "opencl": 4}
COST = costs("direct.gemm")
GemmArguments = kernel_struct("direct_gemm", "GemmArguments")


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
    """Whether `threads`, each loading `vector` elements, cover a tile of `rows` rows in whole steps of whole rows."""
    return row % vector == 0 and threads % (row // vector) == 0 and rows % (threads // (row // vector)) == 0


def _grid(problem: ConvProblem, config: Gemm, pixels: int) -> int:
    """Blocks of the launch of a phase of `pixels` pixels an image."""
    m_tiles = ceil(problem.result_channels // problem.groups, config.BLOCK_M)
    return ceil(problem.N * pixels, config.BLOCK_N) * problem.groups * config.SPLIT_K * m_tiles


TAKES = Takes()  # everything
LEGAL = Tiles(
    TAKES, Gemm, lambda _, config: _no_tile(config),
    shared=(lambda p, c: 2 * c.BLOCK_K * ((c.BLOCK_M + 4 + c.BLOCK_N) * accumulator_bytes(p) + TAP_BYTES), STATIC_SHARED_BYTES),
    blocks=lambda p, config: max((_grid(p, config, pixels) for pixels, _, _ in phase_kinds(p)), default=0),
)  # fmt: skip


def schedule(problem: ConvProblem, config: Gemm, device: Device, with_moments: bool = False) -> Schedule:
    split, redoes = config.SPLIT_K, few_have_taps(problem)

    def steps(filter_last: bool) -> list[list[KernelLaunch]]:
        launches = products(problem, config, filter_last)
        in_order = [launches[-1:], launches[:-1]] if redoes else [launches]  # what has no taps is last
        found = [step for step in in_order if step]
        return [*found, *([[reduce_launch(problem, split, WORKSPACE)]] if split > 1 else [])]

    made = Schedule.plain(steps(False), split * math.prod(problem.result_shape) * accumulator_bytes(problem) if split > 1 else 0)
    return replace(made, redoes=redoes, filter_last=steps(True) if problem.layout == "NHWC" else None)


def products(problem: ConvProblem, config: Gemm, filter_last: bool = False) -> list[KernelLaunch]:
    """The launches of all phases, those with most taps first. `filter_last`: the filter's second axis is last in memory."""
    longest_first = sorted(phases(problem), key=lambda phase: -math.prod(phase.taps))
    return [_product(problem, config, phase, filter_last) for phase in longest_first]


#: The members that only the RECOMPUTE kernel reads.
_OF_RECOMPUTE = ("n_blocks", "images", "followed", "with_moments", *(f"{side}_{axis}" for side in ("side", "last_side") for axis in "dhw"))


def _product(problem: ConvProblem, config: Gemm, phase: Phase, filter_last: bool) -> KernelLaunch:
    groups, split, size = problem.groups, config.SPLIT_K, math.prod(problem.result_shape)
    m, reduction = problem.result_channels // groups, problem.operand_channels // groups
    plane, gemm_k = math.prod(phase.size), reduction * math.prod(phase.taps)
    x, y = read_strides(problem), written_strides(problem)
    w_g, w_m, w_c, w_tap = filter_strides(problem, filter_last)
    tap_strides = tuple(n * w_tap for n in row_major(problem.filter_size))
    contiguous_taps = problem.direction == "fprop" and w_c == math.prod(problem.filter_size) and gemm_k % 4 == 0 and gemm_k > 0
    pointwise = phase.taps == (1, 1, 1) and phase.stride == (1, 1, 1) and phase.pad == (0, 0, 0) and phase.size == problem.operand_size
    fours = problem.layout != "NHWC" and plane % 4 == 0  # four neighbouring pixels lie in one plane
    a_vec = contiguous_taps and _divides(config.threads, config.BLOCK_K, config.BLOCK_M, 4)
    b_vec = pointwise and fours and _divides(config.threads, config.BLOCK_N, config.BLOCK_K, 4)
    defines = {
        "DTYPE": DTYPE_CODES[problem.dtype], "INDEX_64": int(needs_64_bits(problem) or split * size >= 2**31),
        **{name: value for name, value in asdict(config).items() if name != "SPLIT_K"},
        "A_VEC": 4 if a_vec else 1, "B_VEC": 4 if b_vec else 1, "RECOMPUTE": 0,
    }
    _, origin, *steps = places(problem, phase)
    args = arguments(
        GemmArguments, problem, phase, finish(problem, split > 1), n_pixels=problem.N * plane, m=m, m_tiles=ceil(m, config.BLOCK_M),
        gemm_k=gemm_k, split=split, split_steps=ceil(ceil(gemm_k, config.BLOCK_K), split),
        **by_axis("x_", [n * x.pixel for n in row_major(problem.operand_size)]),
        w_base=sum(f * n for f, n in zip(phase.first, tap_strides, strict=True)), w_g=w_g, w_m=w_m, w_c=w_c,
        **by_axis("w_", [every * n for every, n in zip(phase.every, tap_strides, strict=True)], "trs"),
        y_base=origin * y.pixel, **by_axis("y_", [n * y.pixel for n in steps]),
        # the parts of split 16-bit sums are floats
        out_vec=int(fours and phase.step == (1, 1, 1) and not (split > 1 and problem.itemsize == 2)),
        **dict.fromkeys(_OF_RECOMPUTE, 0),
    )  # fmt: skip
    buffers = (INPUT, WEIGHT, *FINISH, RESULT if split == 1 else WORKSPACE)
    return KernelLaunch("direct_gemm", defines, _grid(problem, config, plane), config.threads, buffers, (), arguments=args)


def sum_order(problem: ConvProblem, config: Gemm) -> Hashable:
    """Where a split sum is cut: at multiples of BLOCK_K. And whether the tile adds up 256 products separately: TOTALS of the kernel."""
    return config.SPLIT_K, config.BLOCK_K, problem.dtype == "float32" and config.THREAD_M <= 4


def variants(device: Device) -> Iterator[VariantSet]:
    guarded, on_gpu = Gemm(128, 128, 16, 8, 8, 1), device.backend == "cuda"
    for dtype, code in DTYPE_CODES.items():
        # among 16-bit arrays only what Hopper's loads read along with windows is recomputed
        recomputed = on_gpu and (dtype == "float32" or (dtype != "float64" and device.capability >= (9, 0)))
        for tile, recomputes in [(tile, 0) for tile in (RATES[dtype] if on_gpu else (CPU_TILE,))] + [(guarded, 1)] * recomputed:
            of_tile = fixed(tile, "SPLIT_K")
            by_four = _divides(tile.threads, tile.BLOCK_K, tile.BLOCK_M, 4), _divides(tile.threads, tile.BLOCK_N, tile.BLOCK_K, 4)
            vectors = {name: (1, 4) if fits and not recomputes else (1,) for name, fits in zip(("A_VEC", "B_VEC"), by_four, strict=True)}
            common = {"DTYPE": (code,), "INDEX_64": FLAG, "RECOMPUTE": (recomputes,)}
            yield VariantSet("direct_gemm", common | of_tile | vectors)


GEMM_RATES = {Gemm(*tile): rate for tile, rate in COST.GEMM_RATES.items()}
GEMM_RATES_64 = {Gemm(*tile): rate for tile, rate in COST.GEMM_RATES_64.items()}
CPU_TILE = Gemm(64, 64, 8, 4, 4, 1)


@lru_cache(maxsize=1024)  # few tiles, for every problem again
def _split(tile: Gemm, split: int) -> Gemm:
    return replace(tile, SPLIT_K=split)


#: 16 bits come here if no tensor core can be used. By the model these tiles take 0.01% longer in the mean of random problems than all.
GEMM_RATES_16 = {tile: rate for tile, rate in GEMM_RATES.items() if tile.BLOCK_M < 128}
RATES = {"float16": GEMM_RATES_16, "bfloat16": GEMM_RATES_16, "float32": GEMM_RATES, "float64": GEMM_RATES_64}


def _rates(problem: ConvProblem) -> dict[Gemm, float]:
    return RATES[problem.dtype]


def configs(problem: ConvProblem, device: Device) -> Iterator[Gemm]:
    reduction = problem.operand_channels // problem.groups * math.prod(problem.filter_size)
    for tile in _rates(problem):
        for split in splits(problem, reduction // 128):
            yield _split(tile, split)


def time(problem: ConvProblem, config: Gemm, device: Device) -> float | None:
    """Microseconds that `config` should take, None for a tile of no known rate.

    A block takes its multiplications, and STEPS more of the loop for its start and its stores. A multiprocessor with n of the m blocks that
    fit runs at (n/m)^FILLED of its full rate. Phases run side by side, but only SIDE_BY_SIDE launches at once; what remains at the end is
    most of one long block. A split sum is written and read once more, with twice the bytes if a phase writes every other pixel.
    """
    multiprocessors, all_at_once = device.multiprocessors, _rates(problem).get(_split(config, 1))
    if all_at_once is None:
        return None
    rate = all_at_once / multiprocessors * 1e6  # FLOP/us of one multiprocessor
    if problem.layout == "NHWC" and problem.itemsize == 2:
        rate /= COST.LAST_16_GROUPED if problem.groups > 1 else COST.LAST_16
    elif (problem.layout == "NHWC" and problem.groups == 1) or (problem.layout == "CNHW" and problem.itemsize == 2):
        rate /= COST.SCATTERED_LOADS  # neighbouring pixels are all channels apart, or are two-byte elements that are loaded one by one
    elif problem.direction == "fprop" and problem.layout == "NCHW" and problem.stride[2] * problem.itemsize * 2 >= COST.SECTOR:
        rate /= COST.STRIDED_LOADS  # few of a sector's elements are used at once
    step, fit = 2 * config.BLOCK_M * config.BLOCK_N * config.BLOCK_K, config.MIN_BLOCKS
    reduction = problem.operand_channels // problem.groups
    kinds = phase_kinds(problem)
    blocks, launches = [_grid(problem, config, pixels) for pixels, _, _ in kinds], sum(many for _, _, many in kinds)
    lengths = [step * (ceil(ceil(reduction * taps, config.BLOCK_K), config.SPLIT_K) + COST.STEPS) / rate for _, taps, _ in kinds]

    def alone(count: int, length: float) -> float:
        """Microseconds of `count` blocks of `length` steps, in rounds."""
        rounds, rest = divmod(count, multiprocessors * fit)
        last = ceil(rest, multiprocessors)
        return length * (rounds * fit + (last / (last / fit) ** COST.FILLED if last else 0))

    if launches == 1:
        us = alone(blocks[0], lengths[0])
        if problem.layout == "CNHW":
            us *= COST.GRADIENT
    else:
        work = sum(many * count * length for (_, _, many), count, length in zip(kinds, blocks, lengths, strict=True))
        us = max(COST.PHASED * work / multiprocessors + COST.LAST * fit * max(lengths), COST.PHASE_TIME * launches)
        apart = min(problem.stride[2], COST.SECTOR // problem.itemsize)  # phases that write a part of each sector of a row
        us += spread(problem.itemsize * math.prod(problem.result_shape) * apart / COST.SCATTERED, multiprocessors)
        if launches > SIDE_BY_SIDE:
            queued = sum(many * alone(count, length) for (_, _, many), count, length in zip(kinds, blocks, lengths, strict=True))
            us = max(us, COST.QUEUED * queued / SIDE_BY_SIDE)
    if config.SPLIT_K > 1:
        bytes_moved = math.prod(problem.result_shape) * accumulator_bytes(problem) * (2 * config.SPLIT_K + 1)
        us += COST.JOIN_TIME + bytes_moved * min(launches, 2) / COST.JOINED
    written = problem.itemsize * math.prod(problem.result_shape)
    us += COST.BEGIN + written * (2 if problem.has_residual else 1) / COST.STORED
    if problem.layout == "NCHW" and config.SPLIT_K == 1 and math.prod(problem.result_size) % 4:  # elements are written one by one
        us += written / COST.WRITTEN_APART + (written / COST.RESIDUAL_APART if problem.has_residual else 0.0)
    return us


def choose(problem: ConvProblem, device: Device) -> tuple[float, Gemm] | None:
    """The configuration that should be fastest; on a CPU a last resort if no other kernel can run the problem."""
    # a CPU has too few registers for a thread's sums: there direct/batched.cu was up to twice as fast
    if device.backend == "cuda":
        timed = ((time(problem, config, device), config) for config in configs(problem, device) if LEGAL.refusal(problem, config) is None)
        return fastest((us, config) for us, config in timed if us is not None)
    return (LAST_RESORT, CPU_TILE) if LEGAL.refusal(problem, CPU_TILE) is None else None
