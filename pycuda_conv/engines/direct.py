"""The direct engine: plain-core kernels for every problem, on CUDA and on OpenCL.

Each configuration class is one kernel of the ladder in ``cu/`` (``direct_single.cu`` to ``direct_gemm.cu``); its fields
are the kernel's tuning constants under the same names. :func:`choose` picks one by a short model of time, :func:`stages`
turns it into launches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product

from pycuda_conv.errors import ConvArgumentError
from pycuda_conv.problem import DTYPE_CODES, ConvProblem
from pycuda_conv.runtime.base import Place, Step

GRID_LIMIT = 2**31 - 1
SHARED_BYTES = 48 * 1024  # what a block may declare statically on every GPU

# the plan's buffers, as a step refers to them
INPUT, WEIGHT, BIAS, RESULT, WORKSPACE, PACKED, SCALE, RESIDUAL = range(8)
_OPERANDS = (INPUT, WEIGHT, BIAS, SCALE, RESIDUAL, RESULT)  # as a kernel takes them


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


@dataclass(frozen=True)
class Wgrad:
    """The gradient of the filter, one block a pair of channels, TAPS of its taps and one of SLICES of the batch: ``direct_wgrad.cu``."""

    THREADS: int = 128
    TAPS: int = 9
    SLICES: int = 1


Config = Single | Tile | Batched | Dgrad | Gemm | Wgrad


def accumulator_bytes(problem: ConvProblem) -> int:
    """Bytes of one sum."""
    return 8 if problem.dtype == "float64" else 4


def ceil(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def _letters(problem: ConvProblem) -> dict[str, int]:
    """The problem in the kernels' letters."""
    defines = {"DTYPE": DTYPE_CODES[problem.dtype], "INDEX_64": int(_index_64(problem)), "GROUPS": problem.groups}
    defines |= {"CG": problem.C // problem.groups, "KG": problem.K // problem.groups} | epilogue(problem)
    for names, values in (
        ("DHW", problem.input_size), ("TRS", problem.filter_size), ("OPQ", problem.output_size),
        (("STRIDE_D", "STRIDE_H", "STRIDE_W"), problem.stride), (("PAD_D", "PAD_H", "PAD_W"), problem.padding_before),
        (("DIL_D", "DIL_H", "DIL_W"), problem.dilation),
    ):
        defines |= dict(zip(names, values, strict=True))
    return defines


def epilogue(problem: ConvProblem, split: bool = False) -> dict[str, int]:
    """The defines of ``epilogue.cuh``: parts of a split sum have none of it, what adds them has it all."""
    asked = {
        "HAS_SCALE": problem.has_scale, "HAS_BIAS": problem.has_bias, "HAS_RESIDUAL": problem.has_residual,
        "RELU": problem.activation == "relu",
    }
    return {name: int(on and not split) for name, on in asked.items()}


def _index_64(problem: ConvProblem) -> bool:
    # offsets are formed a little past the end of an array (a tile's tail, a tap outside the image) before they are checked
    slack = math.prod(problem.input_size) + math.prod(problem.output_size) + 2**20
    return problem.largest_array + slack >= 2**31


def _pixels(problem: ConvProblem) -> int:
    return problem.N * math.prod(problem.result_size)


# ---- how arrays lie in memory


@dataclass(frozen=True)
class Strides:
    """Elements of an array of images from one image to the next, from one group, channel of a group, and pixel."""

    image: int
    group: int
    channel: int
    pixel: int


def read_strides(problem: ConvProblem) -> Strides:
    """Of the array that is read first."""
    return _strides(problem, problem.operand_channels // problem.groups, math.prod(problem.operand_size), True)


def written_strides(problem: ConvProblem) -> Strides:
    """Of the array that is written."""
    return _strides(problem, problem.result_channels // problem.groups, math.prod(problem.result_size), False)


def _strides(problem: ConvProblem, channels: int, plane: int, read: bool) -> Strides:
    groups = problem.groups
    if problem.layout == "NHWC":
        return Strides(groups * channels * plane, channels, 1, groups * channels)
    if problem.layout == "NCHW":
        return Strides(groups * channels * plane, channels * plane, plane, 1)
    # see ConvProblem.launched: [channel][group][image] is read, [group][channel][image] is written
    images = problem.N * plane
    return Strides(plane, images, groups * images, 1) if read else Strides(plane, channels * images, images, 1)


def filter_strides(problem: ConvProblem) -> tuple[int, int, int]:
    """Elements of the filter from one group, one channel of the result, and one of the input, to the next; taps are neighbours."""
    taps, groups = math.prod(problem.filter_size), problem.groups
    read, written = problem.operand_channels // groups, problem.result_channels // groups
    if problem.layout == "CNHW":
        return written * taps, taps, groups * written * taps
    return (written * read * taps, *((read * taps, taps) if problem.direction == "fprop" else (taps, written * taps)))


# ---- what is legal


def legal(problem: ConvProblem, config: Config) -> str | None:
    """Why `config` can't run `problem`, or None if it can."""
    if isinstance(config, Wgrad):
        if problem.layout != "CNHW":
            return "it computes gradients of filters"
    elif problem.layout != "NCHW" and not isinstance(config, Gemm):
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
    else:
        reason = _gemm_shape(config)
        if reason:
            return reason
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
        return [planes * ceil(p * q, config.THREADS)]
    if isinstance(config, Tile):
        return [planes * ceil(p, config.TILE_P) * ceil(q, config.TILE_Q)]
    if isinstance(config, Batched):
        return [ceil(_pixels(problem), config.THREADS) * problem.groups * ceil(problem.K // problem.groups, config.BLOCK_K)]
    if isinstance(config, Dgrad):
        # without channels to write, as for an empty operand, the grid is empty too
        return [ceil(_pixels(problem), config.THREADS) * problem.groups * ceil(problem.C // problem.groups, config.BLOCK_C)]
    if isinstance(config, Wgrad):
        return [problem.K * problem.N * ceil(math.prod(problem.output_size), config.TAPS) * config.SLICES]
    m_tiles = ceil(problem.result_channels // problem.groups, config.BLOCK_M)
    return [
        ceil(problem.N * math.prod(phase.size), config.BLOCK_N) * problem.groups * config.SPLIT_K * m_tiles for phase in phases(problem)
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
    found: list[tuple[int, ...]] = []
    every = stride // math.gcd(stride, dilation)
    for a in range(min(stride, size)):
        pixels = ceil(size - a, stride)
        first = next((r for r in range(min(taps, every)) if (a + pad - r * dilation) % stride == 0), None)
        if first is None:
            found.append((pixels, a, stride, 0, 0, 1, 1, 0, 0))
        else:
            start = (a + pad - first * dilation) // stride
            found.append((pixels, a, stride, ceil(taps - first, every), first, every, 1, -start, -(every * dilation // stride)))
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
        yield Phase(*((d, h, w) for d, h, w in zip(*combination, strict=True)))


def places(problem: ConvProblem, phase: Phase) -> tuple[int, int, int, int, int]:
    """Elements of a plane of the result, of a phase's first pixel in it, and from one pixel to the next along d, h and w."""
    d, h, w = problem.result_size
    strides = (h * w, w, 1)
    step_d, step_h, step_w = (a * b for a, b in zip(phase.step, strides, strict=True))
    return d * h * w, sum(a * b for a, b in zip(phase.origin, strides, strict=True)), step_d, step_h, step_w


# ---- launches


def stages(problem: ConvProblem, config: Config) -> tuple[list[list[Step]], int]:
    """The launches of `config` for `problem`, and the bytes of workspace they need.

    Stages follow one another; the launches of one stage don't depend on each other.
    """
    reason = legal(problem, config)
    if reason:
        raise ValueError(f"{config} can't run {problem}: {reason}")
    if isinstance(config, Gemm):
        return _gemm_stages(problem, config)
    defines = _letters(problem) | asdict(config)
    (grid,) = _grids(problem, config)
    if isinstance(config, (Single, Tile)):
        for name in ("CG", "KG", "GROUPS", "D", "T", "O", "STRIDE_D", "PAD_D", "DIL_D"):
            del defines[name]
        defines |= {"C": problem.C, "K": problem.K, "MULTIPLIER": problem.K // problem.C}
        block = config.THREADS if isinstance(config, Single) else config.TILE_P // config.ROWS * config.TILE_Q
        kernel = "direct_single" if isinstance(config, Single) else "direct_tile"
        return [[Step(kernel, defines, grid, block, _OPERANDS, ())]], 0
    if isinstance(config, Wgrad):
        del defines["HAS_BIAS"]
        size = math.prod(problem.result_shape)
        defines |= {"IMAGES": problem.N, "INDEX_64": int(_index_64(problem) or config.SLICES * size >= 2**31)}
        if config.SLICES == 1:
            return [[Step("direct_wgrad", defines, grid, config.THREADS, (INPUT, WEIGHT, RESULT), ())]], 0
        launch = Step("direct_wgrad", defines, grid, config.THREADS, (INPUT, WEIGHT, WORKSPACE), ())
        return [[launch], [reduce_step(problem, config.SLICES, WORKSPACE)]], config.SLICES * size * accumulator_bytes(problem)
    kernel = "direct_batched" if isinstance(config, Batched) else "direct_dgrad"
    return [[Step(kernel, defines, grid, config.THREADS, _OPERANDS, (_pixels(problem),))]], 0


def _gemm_stages(problem: ConvProblem, config: Gemm, filter_last: bool = False) -> tuple[list[list[Step]], int]:
    groups, acc = problem.groups, accumulator_bytes(problem)
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
            "DTYPE": DTYPE_CODES[problem.dtype], "INDEX_64": int(_index_64(problem) or split * size >= 2**31),
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
        launches.append(Step("direct_gemm", defines, grid, config.threads, (*_OPERANDS[:-1], target), (pixels,)))
    if split == 1:
        return [launches], 0
    return [launches, [reduce_step(problem, split, WORKSPACE)]], split * size * acc


def reduce_step(problem: ConvProblem, split: int, parts: Place) -> Step:
    """The launch that adds the `parts` of a split sum in order, and finishes it: ``direct_reduce.cu``."""
    size = math.prod(problem.result_shape)
    defines = {
        "DTYPE": DTYPE_CODES[problem.dtype], "INDEX_64": int(split * size >= 2**31), "THREADS": 256, "SPLIT_K": split,
        "CHANNELS": problem.result_channels, "OUT_SIZE": 1 if problem.layout == "NHWC" else math.prod(problem.result_size),
    } | epilogue(problem)
    return Step("direct_reduce", defines, ceil(size, 256), 256, (parts, BIAS, SCALE, RESIDUAL, RESULT), (size,))


def guarded(
    problem: ConvProblem, found: Sequence[Place], multiprocessors: int, filter_last: bool, redone: tuple[int, int] | None, patch_rows: int
) -> list[Step]:
    """Launches that mend what depends on flagged images and channels of `problem`: see ``direct_gemm.cu``.

    `found`: where the flags of images and filters lie, and their scales. `filter_last`: the filter, of a forward convolution, has
    its channels last. `redone`: where each block says whether it did anything. `patch_rows`: scales and flags are not of images but
    of patches of 8 columns and so many rows of the result.
    """
    noted = () if redone is None else (redone,)
    (launches,), _ = _gemm_stages(problem, Gemm(128, 128, 16, 8, 8, 1), filter_last)
    *_, last = launches
    return [
        replace(
            step, defines={**step.defines, "GUARDED": 1, "NOTED": len(noted), "PATCH_ROWS": patch_rows, "FOLLOWED": int(step is not last)},
            grid=min(step.grid, multiprocessors),  # its registers leave room for no second block
            buffers=(*step.buffers, *found, *noted), scalars=(*step.scalars, step.grid),
        )
        for step in launches
    ]


# ---- the choice


def choose(problem: ConvProblem, multiprocessors: int, backend: str = "cuda") -> Config:
    """The configuration to use on a device of so many multiprocessors."""
    for config in _preferred(problem, multiprocessors, backend):
        if legal(problem, config) is None:
            return config
    # Gemm runs everything else
    raise ConvArgumentError(f"{problem} is too large for one launch of at most {GRID_LIMIT:,} blocks; convolve fewer images at a time")


def _preferred(problem: ConvProblem, multiprocessors: int, backend: str) -> Iterator[Config]:
    """Configurations from the best downwards; the last is legal for every problem."""
    written, read = problem.result_channels // problem.groups, problem.operand_channels // problem.groups
    if problem.direction == "fprop" and problem.C == problem.groups:
        # below a thousand results the launch is all there is, and the smallest kernel wins
        if problem.N * problem.K * math.prod(problem.output_size) > 1024:
            yield from sorted(TILES, key=lambda config: _tile_loads(problem, config))
        yield Single()
    if problem.layout == "CNHW":
        pixels = _pixels(problem)
        if written * pixels < LEAST_FILLED * 64 * ceil(written, 64) * 64 * ceil(pixels, 64):
            yield wgrad_config(problem, multiprocessors)
    # a GEMM tile needs work: under 40 million MACs direct_batched.cu was faster on the H200, under 16 channels always
    # a CPU has too few registers for a GEMM thread's sums: there direct_batched.cu was up to twice as fast
    if backend == "cuda" and (problem.layout != "NCHW" or (problem.macs >= 40e6 and written >= 16)):
        yield from sorted(gemm_configs(problem), key=lambda config: gemm_time(problem, config, multiprocessors))
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
    yield Gemm(64, 64, 8, 4, 4, 1)


def wgrad_config(problem: ConvProblem, multiprocessors: int) -> Wgrad:
    """The best configuration of ``direct_wgrad.cu``: all taps at once if the sums fit, and slices that fill the machine."""
    taps, images = math.prod(problem.output_size), problem.operand_channels // problem.groups
    most = SHARED_BYTES // (128 * accumulator_bytes(problem))
    at_once = ceil(taps, ceil(taps, min(most, 64)))
    blocks = max(problem.K * problem.N * ceil(taps, at_once), 1)
    return Wgrad(128, at_once, max(1, min(images, ceil(8 * multiprocessors, blocks))))


def unmodelled(problem: ConvProblem, multiprocessors: int) -> Iterator[Config]:
    """The configurations without a model of their time that are worth measuring for `problem`."""
    if problem.layout == "CNHW":
        yield wgrad_config(problem, multiprocessors)
        return
    written, read = problem.result_channels // problem.groups, problem.operand_channels // problem.groups
    found: list[Config] = []
    if problem.direction == "fprop" and problem.C == problem.groups:
        found += [*TILES, Single()]
    if problem.macs < 400e6 or written < 16:  # beyond that the matrix products win
        for block in (8, 4, 2, 1):
            for reduction in (16, 4):
                if block <= written and reduction // 4 < max(read, 1):
                    forward = problem.direction == "fprop"
                    found.append(Batched(BLOCK_K=block, BLOCK_C=reduction) if forward else Dgrad(BLOCK_C=block, BLOCK_K=reduction))
    yield from (config for config in found if legal(problem, config) is None)


#: The tiles that were best for some depthwise layer or image among the 40 tried on an H200.
TILES = (Tile(14, 64, 7), Tile(14, 32, 7), Tile(16, 16, 4), Tile(8, 16, 2), Tile(8, 64, 8), Tile(1, 256, 1))


def _tile_loads(problem: ConvProblem, config: Tile) -> int:
    """Elements that the tiles of one plane load, halos and overhang included: what such a kernel spends its time on."""
    _, p, q = problem.output_size
    return ceil(p, config.TILE_P) * ceil(q, config.TILE_Q) * math.prod(_halo(problem, config))


#: TFLOP/s of the tiles with the machine full: fitted to 700 timings of 32 layers on an H200
#: so that the model's choice is 2% slower than the best one in the geometric mean. Only their ratios matter.
GEMM_RATES = {
    Gemm(128, 128, 16, 8, 8, 2): 39.4, Gemm(128, 64, 16, 8, 8, 2): 38.5, Gemm(64, 128, 16, 8, 8, 3): 34.1, Gemm(64, 64, 16, 8, 8, 6): 29.9,
    Gemm(64, 64, 16, 8, 4, 4): 29.9, Gemm(32, 128, 16, 4, 8, 4): 29.9,
}
#: float64 keeps twice the bytes in registers and shared memory.
GEMM_RATES_64 = {Gemm(64, 64, 8, 8, 8, 2): 16.8, Gemm(64, 64, 8, 8, 4, 2): 14.9, Gemm(32, 64, 8, 4, 4, 2): 10.6}
#: Where less of a GEMM's tiles is used, direct_wgrad.cu computes the gradient of a filter.
LEAST_FILLED = 1 / 8
SPLITS, MORE_SPLITS = (1, 2, 3, 4, 6, 8), (12, 16, 24, 32, 48, 64, 96, 128)


def splits(problem: ConvProblem, most: int) -> tuple[int, ...]:
    """Into how many parts of gemm k it may pay to cut `problem`, up to `most`; gradients of filters are long sums for few results."""
    return tuple(n for n in (SPLITS + MORE_SPLITS if problem.layout == "CNHW" else SPLITS) if n <= max(most, 1))


def _gemm_rates(problem: ConvProblem) -> dict[Gemm, float]:
    return GEMM_RATES_64 if problem.dtype == "float64" else GEMM_RATES


def gemm_configs(problem: ConvProblem) -> Iterator[Gemm]:
    """The register-blocked configurations worth comparing for `problem`."""
    reduction = problem.operand_channels // problem.groups * math.prod(problem.filter_size)
    for tile in _gemm_rates(problem):
        for split in splits(problem, reduction // 128):
            yield replace(tile, SPLIT_K=split)


def gemm_time(problem: ConvProblem, config: Gemm, multiprocessors: int) -> float:
    """Microseconds that `config` should take: rounds of blocks, of which the last may leave multiprocessors half empty.

    A block costs its multiplications and 7 more steps of the loop for its start and its stores. A multiprocessor with
    n of the m blocks that fit runs at (n/m)^0.15 of its full rate. Phases of dgrad run side by side, the longest
    first, and what is left over at the end is most of one long block. A split sum is written and read once more, twice
    the bytes where a phase writes every other pixel.
    """
    rate = _gemm_rates(problem)[replace(config, SPLIT_K=1)] / multiprocessors * 1e6  # FLOP/us of one multiprocessor
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
        time = lengths[0] * (rounds * fit + (last / (last / fit) ** 0.15 if last else 0))
    else:
        work = sum(count * length for count, length in zip(blocks, lengths, strict=True))
        time = work / multiprocessors + 0.8 * fit * max(lengths)
    if config.SPLIT_K > 1:
        bytes_moved = math.prod(problem.result_shape) * accumulator_bytes(problem) * (2 * config.SPLIT_K + 1)
        time += 2 + bytes_moved * min(len(blocks), 2) / 3e6  # at 3 TB/s
    return time + 3
