"""Depthwise convolutions of channels-last arrays as they lie, and their gradients: ``cu/depthwise_nhwc*.cu``."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

from pycuda_conv.engines import split_sum
from pycuda_conv.engines.base import BY_RULE, Config
from pycuda_conv.engines.geometry import accumulator_bytes, arguments, ceil, needs_64_bits
from pycuda_conv.engines.schedule import (
    BIAS,
    INPUT,
    RESIDUAL,
    RESULT,
    SCALE,
    WEIGHT,
    WORKSPACE,
    Schedule,
    finish,
    finish_constants,
    grid_refusal,
)
from pycuda_conv.engines.struct import kernel_struct
from pycuda_conv.engines.texts import FLAG, TextFamily
from pycuda_conv.problem import DTYPE_CODES, ConvProblem
from pycuda_conv.runtime.base import Device, KernelLaunch


@dataclass(frozen=True)
class Depthwise(Config):
    """CHUNK channels of a block, and TILE_P x TILE_Q pixels of a thread: ``depthwise/nhwc.cu``."""

    CHUNK: int = 64
    TILE_P: int = 2
    TILE_Q: int = 4


@dataclass(frozen=True)
class DepthwiseStrips(Config):
    """Rows of the result that a thread walks down: ``depthwise/nhwc_strips.cu``."""

    ROWS: int = 14


@dataclass(frozen=True)
class DepthwiseWgrad(Config):
    """Rows of dy that a thread walks down at a time, and parts of the sum: ``depthwise/nhwc_wgrad.cu``."""

    ROWS: int = 14
    PARTS: int = 1


@dataclass(frozen=True)
class DepthwiseRing(Config):
    """The same with rows that arrive in shared memory some steps before they are used: ``depthwise/nhwc_wgrad_ring.cu``."""

    ROWS: int = 14
    PARTS: int = 1


DepthwiseArguments = kernel_struct("depthwise_nhwc", "DepthwiseArguments")
DepthwiseStripsArguments = kernel_struct("depthwise_nhwc_strips", "DepthwiseStripsArguments")
DepthwiseWgradArguments = kernel_struct("depthwise_nhwc_wgrad", "DepthwiseWgradArguments")
DepthwiseRingArguments = kernel_struct("depthwise_nhwc_wgrad_ring", "DepthwiseRingArguments")


CONFIGS = (Depthwise, DepthwiseStrips, DepthwiseWgrad, DepthwiseRing)
LAYOUTS = "NHWC", "CHWN"
TENSOR_CORES = False
MOST_TEXTS = {"cuda": 152, "opencl": 90}
THREADS = 128
CHUNKS = (64, 32, 16, 8, 4)
#: The most channels of a block whose threads walk down the image.
PITCH = 64
#: Pixels of a thread, down and across: larger tiles would not fill the GPU.
TILES = ((2, 4), (1, 4))
OPENCL_TILES = TILES[:1]  # OpenCL needs one tile, and no strips
COLUMNS, LEAST_ROWS = 4, 4  # columns of a thread that walks down the image, and the fewest rows
FULL = 2 * THREADS * 132  # threads: two blocks a multiprocessor of Hopper
RING_LANES = (32, 16, 8, 4)  # threads along channels, a part of a warp, if rows arrive in shared memory
#: Square filters whose loops are unrolled, with strides of 1 and 2.
UNROLLED = (3, 5, 7)
#: Taps of a block for wgrad of other filters, down and across.
SOME_TAPS = (2, 4)


# ---- what runs


def unsupported(device: Device) -> str | None:
    """None: the kernels run on every device."""
    return None


def refusal(problem: ConvProblem, config: Config) -> str | None:
    """Why `config` can't run `problem`, or None if it can."""
    reason = _refused(problem)
    if reason:
        return reason
    if isinstance(config, DepthwiseWgrad | DepthwiseRing) != _of_filter(problem):
        return "gradients of filters and all else have a configuration of their own"
    if isinstance(config, Depthwise):
        if config.CHUNK not in CHUNKS or config.CHUNK < _vector(problem, Depthwise):
            return f"CHUNK must be one of {CHUNKS} and no less than {_vector(problem, Depthwise)}"
        if (config.TILE_P, config.TILE_Q) not in TILES:
            return f"(TILE_P, TILE_Q) must be one of {TILES}"
        if problem.direction == "dgrad" and _unrolled_by(problem, Depthwise) and config.TILE_P % problem.stride[1]:
            return "TILE_P must be a multiple of the stride"
    else:
        assert isinstance(config, DepthwiseStrips | DepthwiseWgrad | DepthwiseRing)
        if config.ROWS < 1:
            return "ROWS must be at least 1"
        if isinstance(config, DepthwiseWgrad | DepthwiseRing) and config.PARTS < 1:
            return "PARTS must be at least 1"
        if isinstance(config, DepthwiseRing) and not _fits_ring(problem):
            return "it takes 16 bits and float32, square filters of 3, 5 and 7 taps, strides of 1 and 2, pixels of a multiple of 16 bytes"
        forward = problem.direction == "fprop" or _flipped(problem, type(config))
        if isinstance(config, DepthwiseStrips) and not (_unrolled(problem) and forward):
            return f"it takes square filters of {UNROLLED} taps, strides of 1 and 2, and of gradients by the input those of stride 1"
        if _walks(problem, config).units > _MOST_UNITS:
            return f"it takes at most {_MOST_UNITS:,} groups of columns"
    return grid_refusal(_grid(problem, config))


_MOST_UNITS = 2**31 - 1 - THREADS  # the kernels count units in 32 bits, with the last block's idle ones


def _refused(problem: ConvProblem) -> str | None:
    """Why no configuration runs `problem`, or None."""
    channels = problem.N if _of_filter(problem) else problem.C // max(problem.groups, 1)
    if channels != 1 or problem.groups == 0:
        return "it takes one channel of the input a group"
    if problem.direction == "dgrad" and problem.K != problem.C:
        return "of gradients by the input it takes those of one channel of the output a group"
    if problem.has_depth:
        return "it takes at most two spatial axes"
    return None


def _of_filter(problem: ConvProblem) -> bool:
    """Whether `problem` is wgrad: see :attr:`ConvProblem.launched`."""
    return problem.layout == "CHWN"


def _fits_ring(problem: ConvProblem) -> bool:
    """Whether rows can arrive in shared memory: by 16 bytes, of which four threads take a word each."""
    if problem.K != problem.groups or problem.itemsize > 4 or problem.K * problem.itemsize % 16 or not _unrolled(problem):
        return False
    return max(math.prod(problem.weight_shape), math.prod(problem.input_shape)) < 2**31


def _vector(problem: ConvProblem, kind: type[Config]) -> int:
    """Channels of a thread: as many as registers hold, or one word if they come from shared memory."""
    if kind is DepthwiseRing:
        return 4 // problem.itemsize
    if problem.K != problem.groups:  # several output channels read one input channel
        return 1
    return next(v for v in _vectors(DTYPE_CODES[problem.dtype], _unrolled(problem), kind) if problem.K % v == 0)


def _vectors(dtype: int, size: int, kind: type[Config]) -> tuple[int, ...]:
    """The choices for channels of a thread: as many as registers hold, or one; for an unrolled filter, or with `size` 0 another."""
    if size and kind is DepthwiseWgrad:  # mostly channels that fit no ring
        return (1,)
    if not size or kind is Depthwise:
        most = 2 if dtype == 64 else 4
    elif kind is DepthwiseStrips and size == 5 and dtype != 64:
        most = 4
    else:
        most = (4 if size == 3 else 2) // (2 if dtype == 64 else 1)
    return (most, 1) if most > 1 else (1,)


def _unrolled(problem: ConvProblem) -> int:
    """The size of a square filter whose loops are unrolled, or 0."""
    size, stride, dilation = problem.filter_size, problem.stride, problem.dilation
    if _of_filter(problem):  # the filter is the result
        size, stride, dilation = problem.output_size, dilation, stride
    _, stride_h, stride_w = stride
    if size[1] != size[2] or size[1] not in UNROLLED or stride_h != stride_w or stride_h > 2 or dilation != (1, 1, 1):
        return 0
    return size[1]


def _unrolled_by(problem: ConvProblem, kind: type[Config]) -> int:
    """:func:`_unrolled` for a kind of kernel: tiles of single channels are unrolled in float64 alone, and not for strided dgrad."""
    strided = problem.direction == "dgrad" and problem.stride[1] > 1
    alone = kind is Depthwise and _vector(problem, kind) == 1
    return 0 if alone and (strided or problem.itemsize < 8) else _unrolled(problem)


def _flipped(problem: ConvProblem, kind: type[Config]) -> bool:
    """Whether dgrad is computed as fprop with the filter rotated by 180 degrees."""
    return problem.direction == "dgrad" and problem.stride[1] == 1 and _unrolled_by(problem, kind) > 0


def _padding(problem: ConvProblem, kind: type[Config]) -> tuple[int, int]:
    """Rows and columns of padding before the image that is read."""
    _, pad_h, pad_w = problem.padding_before
    size = _unrolled(problem)
    return (size - 1 - pad_h, size - 1 - pad_w) if _flipped(problem, kind) else (pad_h, pad_w)


class _Walks(NamedTuple):
    """How the channels and the columns of images, in strips of rows, are distributed over blocks."""

    lanes_c: int  # threads of a block along channels
    lanes_u: int  # threads along units: groups of columns of all images; for wgrad, of all strips
    blocks_c: int
    strips: int
    tiles_q: int
    units: int
    rounds: int  # units of a thread


def _walks(problem: ConvProblem, config: DepthwiseStrips | DepthwiseWgrad | DepthwiseRing) -> _Walks:
    vector = _vector(problem, type(config))
    lanes_c = _lanes(problem.K, vector, problem.itemsize, isinstance(config, DepthwiseRing))
    lanes_u, blocks_c = THREADS // lanes_c, ceil(problem.K, lanes_c * vector)
    if isinstance(config, DepthwiseStrips):
        _, p, q = problem.result_size
        strips, tiles_q = ceil(p, config.ROWS), ceil(q, COLUMNS)
        return _Walks(lanes_c, lanes_u, blocks_c, strips, tiles_q, problem.N * tiles_q, 1)
    _, p, q = problem.filter_size
    strips, tiles_q = ceil(p, config.ROWS), ceil(q, COLUMNS)
    units = _images(problem) * strips * tiles_q
    return _Walks(lanes_c, lanes_u, blocks_c, strips, tiles_q, units, ceil(ceil(units, lanes_u), config.PARTS))


@lru_cache(maxsize=256)  # the planner asks for them once a configuration
def _lanes(channels: int, vector: int, itemsize: int, of_warp: bool) -> int:
    """Threads of a block along channels: few idle threads, few sectors of 32 bytes that two blocks share, and rather more channels."""
    groups, nbytes = ceil(channels, vector), vector * itemsize

    def cost(lanes: int) -> float:
        width = lanes * nbytes
        sectors = width // 32 if width % 32 == 0 else width // 32 + 2
        return ceil(groups, lanes) * sectors * THREADS / (THREADS // lanes * lanes) * (1 + 16 / width)

    return min(RING_LANES if of_warp else range(1, min(PITCH // vector, max(groups, 1)) + 1), key=cost)


def _grid(problem: ConvProblem, config: Config) -> int:
    """Blocks of the launch."""
    if isinstance(config, DepthwiseRing):
        return _walks(problem, config).blocks_c * config.PARTS
    if isinstance(config, DepthwiseWgrad):
        (taps_r, taps_s), (_, r, s) = _taps(problem), problem.output_size
        return _walks(problem, config).blocks_c * ceil(s, taps_s) * ceil(r, taps_r) * config.PARTS
    if isinstance(config, DepthwiseStrips):
        walks = _walks(problem, config)
        return walks.blocks_c * walks.strips * ceil(walks.units, walks.lanes_u)
    assert isinstance(config, Depthwise)
    told_lanes = _tile_arguments(problem, config)
    images = THREADS >> (told_lanes.lanes_c + told_lanes.lanes_q + told_lanes.lanes_p)
    return told_lanes.blocks_c * told_lanes.blocks_q * told_lanes.blocks_p * ceil(problem.N, images)


# ---- launches


def schedule(problem: ConvProblem, config: Config, device: Device, noted: bool = False) -> Schedule:
    """The launches of `config` for `problem`."""
    filter_size, size = _unrolled_by(problem, type(config)), math.prod(problem.result_shape)
    if isinstance(config, DepthwiseRing):
        defines = {"TYPE": DTYPE_CODES[problem.dtype], "TAPS": filter_size, "STRIDE": problem.dilation[1]}
        whole = config.PARTS == 1 and problem.itemsize == 4  # other sums are rounded by the launch that adds parts
        buffers: tuple[int, ...] = INPUT, WEIGHT, RESULT if whole else WORKSPACE
        told: Any = _ring_arguments(problem, config)
        launch = KernelLaunch("depthwise_nhwc_wgrad_ring", defines, _grid(problem, config), THREADS, buffers, (), arguments=told)
        return Schedule.plain([[launch]]) if whole else _with_sum(problem, config.PARTS, launch)
    defines = {"DTYPE": DTYPE_CODES[problem.dtype], "V": _vector(problem, type(config)), "INDEX_64": int(needs_64_bits(problem))}
    if isinstance(config, DepthwiseWgrad):
        parts = config.PARTS
        taps_r, taps_s = _taps(problem)
        defines |= {"INDEX_64": int(needs_64_bits(problem) or parts * size >= 2**31), "TAPS_R": taps_r, "TAPS_S": taps_s}
        if filter_size:
            defines["STRIDE"] = problem.dilation[1]
        buffers = INPUT, WEIGHT, RESULT if parts == 1 else WORKSPACE
        told = _wgrad_arguments(problem, config)
        launch = KernelLaunch("depthwise_nhwc_wgrad", defines, _grid(problem, config), THREADS, buffers, (), arguments=told)
        return Schedule.plain([[launch]]) if parts == 1 else _with_sum(problem, parts, launch)
    buffers = INPUT, WEIGHT, BIAS, SCALE, RESIDUAL, RESULT
    if filter_size:
        defines |= {"R": filter_size, "S": filter_size, "STRIDE": problem.stride[1]}
    if isinstance(config, DepthwiseStrips):
        kernel, told = "depthwise_nhwc_strips", _strips_arguments(problem, config)
    else:
        assert isinstance(config, Depthwise)
        kernel, told = "depthwise_nhwc", _tile_arguments(problem, config)
        dgrad = problem.direction == "dgrad" and not _flipped(problem, Depthwise)
        defines |= {"TILE_P": config.TILE_P, "TILE_Q": config.TILE_Q, "DGRAD": int(dgrad)}
    layer = finish_constants(told)
    return Schedule.plain([[KernelLaunch(kernel, defines, _grid(problem, config), THREADS, buffers, (), arguments=told, layer=layer)]])


def _with_sum(problem: ConvProblem, parts: int, launch: KernelLaunch) -> Schedule:
    """`launch` and the launch that adds the parts of the sum that it leaves in the workspace."""
    nbytes = parts * math.prod(problem.result_shape) * accumulator_bytes(problem)
    return Schedule.plain([[launch], [split_sum.reduce_launch(problem, parts, WORKSPACE)]], nbytes)


def _tile_arguments(problem: ConvProblem, config: Depthwise) -> Any:
    (_, h, w), (_, p, q) = problem.operand_size, problem.result_size
    (_, r, s), (_, stride_h, stride_w), (_, dil_h, dil_w) = problem.filter_size, problem.stride, problem.dilation
    pad_h, pad_w = _padding(problem, Depthwise)
    # with DGRAD tiles begin where the padding says
    early_h, early_w = (pad_h % stride_h, pad_w % stride_w) if problem.direction == "dgrad" and _unrolled_by(problem, Depthwise) else (0, 0)
    tiles_p, tiles_q = ceil(p + early_h, config.TILE_P), ceil(q + early_w, config.TILE_Q)
    lanes_c = (config.CHUNK // _vector(problem, Depthwise)).bit_length() - 1
    lanes_q = min((tiles_q - 1).bit_length(), 7 - lanes_c, 2)
    lanes_p = min((tiles_p - 1).bit_length(), 7 - lanes_c - lanes_q)
    return arguments(
        DepthwiseArguments, lanes_c=lanes_c, lanes_q=lanes_q, lanes_p=lanes_p, blocks_c=ceil(problem.K, config.CHUNK),
        blocks_q=ceil(tiles_q, 1 << lanes_q), blocks_p=ceil(tiles_p, 1 << lanes_p), n=problem.N, c=problem.operand_channels,
        k=problem.result_channels, multiplier=problem.K // max(problem.C, 1), h=h, w=w, p=p, q=q, r=r, s=s, stride_h=stride_h,
        stride_w=stride_w, pad_h=pad_h, pad_w=pad_w, dil_h=dil_h, dil_w=dil_w, flip=int(_flipped(problem, Depthwise)),
        **finish(problem),
    )  # fmt: skip


def _strips_arguments(problem: ConvProblem, config: DepthwiseStrips) -> Any:
    (_, h, w), (_, p, q), (pad_h, pad_w) = problem.operand_size, problem.result_size, _padding(problem, DepthwiseStrips)
    walks = _walks(problem, config)
    return arguments(
        DepthwiseStripsArguments, lanes_c=walks.lanes_c, lanes_u=walks.lanes_u, blocks_c=walks.blocks_c, strips=walks.strips,
        tiles_q=walks.tiles_q, rows=config.ROWS, n=problem.N, c=problem.operand_channels, k=problem.result_channels,
        multiplier=problem.K // max(problem.C, 1), h=h, w=w, p=p, q=q, pad_h=pad_h, pad_w=pad_w,
        flip=int(_flipped(problem, DepthwiseStrips)), **finish(problem),
    )  # fmt: skip


def _taps(problem: ConvProblem) -> tuple[int, int]:
    """Taps of a block for wgrad, down and across."""
    size = _unrolled(problem)
    return (size, size) if size else SOME_TAPS


def _wgrad_arguments(problem: ConvProblem, config: DepthwiseWgrad) -> Any:
    (_, h, w), (_, p, q), (_, r, s) = problem.input_size, problem.filter_size, problem.output_size
    (_, stride_h, stride_w), (_, dil_h, dil_w), (_, pad_h, pad_w) = problem.dilation, problem.stride, problem.padding_before
    (taps_r, taps_s), walks = _taps(problem), _walks(problem, config)
    return arguments(
        DepthwiseWgradArguments, lanes_c=walks.lanes_c, lanes_u=walks.lanes_u, channels=walks.lanes_c * _vector(problem, DepthwiseWgrad),
        blocks_c=walks.blocks_c, blocks_s=ceil(s, taps_s), blocks_r=ceil(r, taps_r), parts=config.PARTS, units=walks.units,
        rounds=walks.rounds, tiles_q=walks.tiles_q, strips=walks.strips, rows=config.ROWS, c=problem.groups, k=problem.K,
        multiplier=problem.K // problem.groups, h=h, w=w, p=p, q=q, r=r, s=s, stride_h=stride_h, stride_w=stride_w,
        pad_h=pad_h, pad_w=pad_w, dil_h=dil_h, dil_w=dil_w,
    )  # fmt: skip


def _ring_arguments(problem: ConvProblem, config: DepthwiseRing) -> Any:
    (_, h, w), (_, p, q), (_, pad_h, pad_w) = problem.input_size, problem.filter_size, problem.padding_before
    walks = _walks(problem, config)
    return arguments(
        DepthwiseRingArguments, lanes_c=walks.lanes_c, lanes_u=walks.lanes_u, blocks_c=walks.blocks_c, parts=config.PARTS,
        rounds=walks.rounds, units=walks.units, tiles_q=walks.tiles_q, strips=walks.strips, rows=min(config.ROWS, p), k=problem.K,
        h=h, w=w, p=p, q=q, pad_h=pad_h, pad_w=pad_w,
    )  # fmt: skip


def _images(problem: ConvProblem) -> int:
    """Images from which wgrad is computed."""
    return problem.C // problem.groups


def filter_key(problem: ConvProblem, config: Config) -> None:
    """None: the kernels read the filter as it is."""


def sum_order(problem: ConvProblem, config: Config) -> Hashable:
    """Tiles and strips add alike, one row of the filter after the other, unless only strips rotate it. wgrad's sums are cut into strips and
    parts."""
    if isinstance(config, DepthwiseWgrad | DepthwiseRing):
        return type(config), config.ROWS, config.PARTS
    return Depthwise, _flipped(problem, type(config))


def texts(device: Device) -> Iterator[TextFamily]:
    """A text for each type, vector and tile, and for each common filter."""
    on_gpu = device.backend == "cuda"
    for code in DTYPE_CODES.values():
        common = {"DTYPE": (code,), "INDEX_64": FLAG, "V": _vectors(code, 0, Depthwise)}
        tile = {"TILE_P": tuple(p for p, _ in (TILES if on_gpu else OPENCL_TILES)), "TILE_Q": (4,), "DGRAD": FLAG}
        made = partial(_is_listed, on_gpu=on_gpu)
        yield TextFamily("depthwise_nhwc", common | tile, made)
        square = {"STRIDE": (1, 2)}
        yield from (TextFamily("depthwise_nhwc", common | tile | square | {"R": (n,), "S": (n,)}, made) for n in UNROLLED)
        for size in UNROLLED:
            strips, of_filter = ({"V": _vectors(code, size, kind), "STRIDE": (1, 2)} for kind in (DepthwiseStrips, DepthwiseWgrad))
            if on_gpu:
                yield TextFamily("depthwise_nhwc_strips", common | strips | {"R": (size,), "S": (size,)})
            yield TextFamily("depthwise_nhwc_wgrad", common | of_filter | {"TAPS_R": (size,), "TAPS_S": (size,)})
        yield TextFamily("depthwise_nhwc_wgrad", common | {"TAPS_R": SOME_TAPS[:1], "TAPS_S": SOME_TAPS[1:]})
    if on_gpu and device.capability >= (8, 0):
        yield TextFamily("depthwise_nhwc_wgrad_ring", {"TYPE": (16, 17, 32), "TAPS": UNROLLED, "STRIDE": (1, 2)})


def _is_listed(d: Mapping[str, int], on_gpu: bool) -> bool:
    """Whether a tile's kernel with these defines is ever launched."""
    size, stride, dgrad = d.get("R", 0), d.get("STRIDE", 1), bool(d["DGRAD"])
    if size and dgrad and (stride == 1 or d["TILE_P"] % stride):
        return False
    if size and d["V"] == 1 and (dgrad or d["DTYPE"] != 64):
        return False
    return (d["TILE_P"], d["TILE_Q"]) in (_fitting(size, dgrad) if on_gpu else OPENCL_TILES)


# ---- the choice


class _Pace(NamedTuple):
    """The pace of unrolled loops."""

    begin: float  # microseconds of a launch
    first: float  # instructions a cycle of a scheduler with one block's warp
    most: float  # the most instructions a cycle
    hidden: float  # 1: memory and instructions take turns; more: the shorter hides behind the longer
    step: float  # microseconds that a thread waits for each row
    memory: float  # bytes a microsecond of 132 multiprocessors


#: Fitted to 227 times of strips, 36 of them on an H200, the others on H100s (root mean square of the error 11%), and to 20 of tiles, all
#: on an H200 (15%). In the model each block of a multiprocessor hides the others' latency: of 11 layers on an H100 the chosen strips took
#: 1.008 times as long as the best of three heights, instead of 1.07 without that.
PACES: dict[type[Config], _Pace] = {
    DepthwiseStrips: _Pace(1.8, 0.508, 0.707, 1.1, 0.153, 4.76e6), Depthwise: _Pace(2.4, 0.73, 0.73, 1.7, 0.26, 3.6e6),
}  # fmt: skip
OF_TILES = 1.55  # instructions of a tile for each one counted
OF_STRIPS, BESIDE_PRODUCTS = 283.0, 0.59  # instructions of a strip before its first row; and for each one counted beside products
FLOAT64_STRIPS = 0.85  # times the counted instructions: of 16 layers on an H200


def time(problem: ConvProblem, config: Config, device: Device) -> float:
    """Microseconds that `config` should take, roughly.

    They are those of what is read and written once, and of the instructions of the multiprocessor with most blocks. In float64 and in
    wgrad neither hides the other, and both take longer if blocks do not fill the GPU.
    """
    waits = 0.0  # microseconds that a thread waits, for one tap after another
    if isinstance(config, Depthwise) and not (_unrolled_by(problem, Depthwise) and problem.K == problem.groups):
        waits = math.prod(problem.filter_size) * (TAP_WAIT + ELEMENT_WAIT * config.TILE_P * config.TILE_Q)
    strips = isinstance(config, DepthwiseStrips) and _unrolled_by(problem, DepthwiseStrips)
    if problem.K != problem.groups and not _of_filter(problem) and not strips:  # threads load one number at a time
        singly = max(problem.macs / 2e6, math.prod(problem.result_shape) / 0.47e6)
        return 1.2 + max(waits, singly * 132 / device.multiprocessors)
    if not _unrolled_by(problem, type(config)):  # its loops take as long as a 9x9 filter's were measured to take
        # a load of one channel takes as long
        narrow = _vectors(DTYPE_CODES[problem.dtype], 0, type(config))[0] / _vector(problem, type(config))
        loops = LOOPS_OF_FILTER / (1 + FEW_TAPS / math.prod(problem.output_size)) if _of_filter(problem) else LOOPS
        return 3 + max(waits, narrow * problem.macs / loops * 132 / device.multiprocessors)
    if isinstance(config, DepthwiseRing):
        return _ring_time(problem, config, device)
    work = _work(problem, config)
    multiprocessors, blocks = device.multiprocessors, max(_grid(problem, config), 1)
    if type(config) in PACES and problem.dtype != "float64":
        pace, each = PACES[type(config)], max(1.0, blocks / multiprocessors)
        together = min(each, work.blocks)  # each block hides the latency of the others
        rate = min(pace.most, pace.first * together)
        busy = each * work.instructions / rate / CLOCK  # each scheduler has a warp of the block
        moving = problem.bytes / pace.memory * 132 / multiprocessors
        return pace.begin + float((busy**pace.hidden + moving**pace.hidden) ** (1 / pace.hidden)) + work.steps * pace.step / together
    at_once = work.blocks * multiprocessors
    rounds = blocks / at_once
    if isinstance(config, DepthwiseWgrad) and rounds > 1:  # blocks are long and equal, so the last round takes as long as others
        blocks = ceil(blocks, at_once) * at_once
    us = problem.bytes / 4.2e6 + (blocks * THREADS * work.instructions / 29e6) * 132 / multiprocessors
    us = 3 + us / min(1.0, rounds) + work.steps / 4
    if isinstance(config, DepthwiseStrips):
        us *= FLOAT64_STRIPS
    if isinstance(config, DepthwiseWgrad) and config.PARTS > 1:
        us += split_sum.time(math.prod(problem.result_shape), config.PARTS, accumulator_bytes(problem), multiprocessors)
    return us


CLOCK = 1700.0  # cycles a microsecond
# For rings. Fitted to 120 times of 24 layers on an H100 (root mean square of the error 12%), except the memory's rate, which is an H200's.
RING_MEMORY = 3.0e6  # bytes a microsecond
RING_BEGIN = 1.5  # microseconds of a launch, with its first rows
ALONE = 1.47  # warps of a scheduler that take as long as one alone
ISSUED = 1.2  # cycles of an instruction


def _ring_time(problem: ConvProblem, config: DepthwiseRing, device: Device) -> float:
    """Microseconds that a ring should take: memory, or the multiprocessors' instructions."""
    size, stride, vector, (_, p, _) = _unrolled(problem), problem.dilation[1], _vector(problem, DepthwiseRing), problem.filter_size
    walks, rows, blocks, sums = _walks(problem, config), min(config.ROWS, p), _grid(problem, config), size * size * vector
    fit = 2 if sums > 64 else 3 if sums >= 50 else 4  # blocks that fit a multiprocessor
    loaded = 1 + (vector if vector > 1 else 0)  # instructions to load and unpack a word from shared memory
    steps = (rows - 1) * stride + size
    inside = min(steps, problem.input_size[1])  # rows of x that are no padding
    product = COLUMNS * sums / stride + ((COLUMNS - 1) * stride + size) * loaded
    cycles = walks.rounds * (inside * product + steps * (20 + COLUMNS / stride * loaded)) + 8.4 * sums + 1500
    full, rest = divmod(ceil(blocks, device.multiprocessors), fit)
    busy = full * fit + (max(rest, ALONE) if rest else 0)
    us = RING_BEGIN + max(ISSUED * busy * cycles / CLOCK, problem.bytes / RING_MEMORY)
    if config.PARTS > 1 or problem.itemsize == 2:
        us += split_sum.time(math.prod(problem.result_shape), config.PARTS, accumulator_bytes(problem), device.multiprocessors)
    return us


#: Multiplications a microsecond of 132 multiprocessors if loops are not unrolled; and those of wgrad.
LOOPS, LOOPS_OF_FILTER = 3.1e6, 2.2e6
FEW_TAPS = 4  # wgrad's pixels take at least as long as so many taps: 1x1x1 filters took 45 us on an H100, 9 by their multiplications
#: Microseconds that a thread then waits for a tap, and for each element of its tile: they bound images of few pixels.
TAP_WAIT, ELEMENT_WAIT = 0.27, 0.083


class _Work(NamedTuple):
    """The work of a thread."""

    blocks: int  # blocks that fit a multiprocessor
    steps: int  # one after the other, each waiting for memory
    instructions: float


START, LOADED, STORED = 600, 5, 4  # instructions of a thread that walks: before its first row, of a load, of a store


def _work(problem: ConvProblem, config: Config) -> _Work:
    """The work of a thread of `config` for a filter whose loops are unrolled."""
    size, vector = _unrolled(problem), _vector(problem, type(config))
    unpacked = vector if problem.itemsize == 2 else 0
    parts = 0 if problem.itemsize == 2 else 1  # partial sums, of rows of the filter, that are added
    if isinstance(config, DepthwiseWgrad):
        stride, (_, p, _) = problem.dilation[1], problem.filter_size
        walks, rows = _walks(problem, config), min(config.ROWS, p)
        read = (COLUMNS - 1) * stride + size
        row = 1.0 * COLUMNS * vector * size * size + (stride * read + COLUMNS) * (LOADED + unpacked) + 15 * stride + COLUMNS * vector * size
        steps = walks.rounds * ((rows - 1) * stride + size)
        return _Work(4 if size == 3 else 3, steps, walks.rounds * (START // 2 + rows * row) + 12 * size * size * vector)
    stride, (_, p, _) = problem.stride[1], problem.result_size
    if isinstance(config, DepthwiseStrips):
        rows, columns = config.ROWS, COLUMNS
    else:
        assert isinstance(config, Depthwise)
        rows, columns = config.TILE_P, config.TILE_Q
    rows, taps = min(rows, p), float(size * size)
    if problem.direction == "dgrad" and stride == 2:
        steps, read, taps = rows // stride + size // stride, columns // stride + size // stride, taps / stride**2
    else:
        steps, read = (rows - 1) * stride + size, (columns - 1) * stride + size
    products, beside = columns * vector * (taps + parts * size), columns * (4 * vector + STORED)
    loading = steps * (read * (LOADED + unpacked) + 15)
    wide = size == 7 or size * vector > 12 or problem.dtype == "float64"
    wide = wide or (problem.dtype == "float32" and stride == 1 and (size, vector) == (3, 4))
    blocks = 3 if wide and isinstance(config, DepthwiseStrips) else 4
    if problem.dtype == "float64":
        return _Work(blocks, steps, START + loading + rows * (products + beside))
    if isinstance(config, Depthwise):
        return _Work(blocks, steps, OF_TILES * (loading + rows * (products + beside)))
    met = rows if size == 5 and vector == 4 else steps / stride  # rows of sums that are met; some of the others lie outside the strip
    return _Work(blocks, steps, OF_STRIPS + BESIDE_PRODUCTS * (loading + rows * beside) + met * products)


def choose(problem: ConvProblem, device: Device) -> tuple[float, Config] | None:
    """The configuration by rule; if results or taps are many, matrix products may be faster."""
    found = next(configs(problem, device), None)
    if found is None:
        return None
    if device.backend == "cuda" and (problem.K != problem.groups or not _unrolled_by(problem, type(found))):
        return time(problem, found, device), found
    return BY_RULE, found


def configs(problem: ConvProblem, device: Device) -> Iterator[Config]:
    """The configurations that are worth measuring for `problem`, the best first."""
    if _refused(problem):
        return

    def best(kind: Iterator[Config], most: int) -> list[Config]:
        legal = (config for config in dict.fromkeys(kind) if refusal(problem, config) is None)
        return sorted(legal, key=expected)[:most]

    def expected(config: Config) -> float:
        us = time(problem, config, device)
        return 0.0 if us is None else us  # without a model they keep their order

    if _of_filter(problem):
        rings = best(_rings(problem), 3) if device.backend == "cuda" and device.capability >= (8, 0) else []
        yield from sorted([*best(_gradients(problem, device), 1 if rings else 3), *rings], key=expected)
    else:
        strips = best(_strips(problem), 2) if device.backend == "cuda" else []
        alone = strips and _vector(problem, Depthwise) == 1 and problem.itemsize < 8  # tiles of single channels have no text
        yield from sorted([*([] if alone else best(_tiles(problem, device), 3)), *strips], key=expected)


def _fitting(size: int, dgrad: bool) -> tuple[tuple[int, int], ...]:
    """The tiles worth trying for an unrolled filter or, with `size` 0, another; `dgrad`: for dgrad that no rotated filter gives."""
    return TILES if size and dgrad else TILES[1:]  # strips are better if there are enough rows


def _tiles(problem: ConvProblem, device: Device) -> Iterator[Config]:
    """Configurations of tiles, the best first."""
    chunk, (_, p, q) = _chunk(problem), problem.result_size
    fitting = _fitting(_unrolled_by(problem, Depthwise), problem.direction == "dgrad" and not _flipped(problem, Depthwise))
    if device.backend != "cuda":
        fitting = OPENCL_TILES
    lanes = problem.N * ceil(problem.K, _vector(problem, Depthwise))
    full = [(down, right) for down, right in fitting if ceil(p, down) * ceil(q, right) * lanes >= _threads(device)]
    best = next((tile for tile in full if tile[0] <= p), fitting[-1])
    yield from (Depthwise(chunk, *tile) for tile in dict.fromkeys((best, *fitting)))


def _rows(p: int, lanes: int) -> list[int]:
    """Rows of strips that leave none much shorter than the others. `lanes` threads walk down a strip: few threads need more strips."""
    many = (strips for strips in (64, 128, 256) if p >= 8 * strips and 32 * lanes < FULL)
    return sorted({ceil(max(p, 1), strips) for strips in (1, 2, 3, 4, 6, 8, 12, 16, 32, *many)}, reverse=True)


def _strips(problem: ConvProblem) -> Iterator[Config]:
    """Configurations of strips, none lower than a tile."""
    _, p, q = problem.result_size
    lanes = problem.N * ceil(q, COLUMNS) * problem.K
    yield from (DepthwiseStrips(rows) for rows in _rows(p, lanes) if rows >= min(p, LEAST_ROWS))


def _gradients(problem: ConvProblem, device: Device) -> Iterator[Config]:
    """Configurations of wgrad. All threads of all parts but the last walk down equally many strips."""
    if not _unrolled(problem):
        one = DepthwiseWgrad(4)
        rounds = _walks(problem, one).rounds
        wanted = min(ceil(8 * device.multiprocessors, max(_grid(problem, one), 1)), 4 * device.multiprocessors)
        yield DepthwiseWgrad(4, ceil(rounds, ceil(rounds, wanted)) if rounds else 1)
        return
    for rows in _rows(problem.filter_size[1], _images(problem) * ceil(problem.filter_size[2], COLUMNS) * problem.K):
        rounds = _walks(problem, DepthwiseWgrad(rows)).rounds
        for parts in dict.fromkeys(ceil(rounds, each) for each in (1, 2, 3, 4, 6, 8) if rounds):
            yield DepthwiseWgrad(rows, parts)
        yield DepthwiseWgrad(rows)


def _rings(problem: ConvProblem) -> Iterator[Config]:
    """Configurations whose rows arrive in shared memory before they are used."""
    if not _fits_ring(problem):
        return
    for rows in _rows(problem.filter_size[1], _images(problem) * ceil(problem.filter_size[2], COLUMNS) * problem.K):
        rounds = _walks(problem, DepthwiseRing(rows)).rounds
        yield from (DepthwiseRing(rows, parts) for parts in dict.fromkeys(ceil(rounds, each) for each in (1, 2, 3, 4, 6, 8) if rounds))


def _threads(device: Device) -> int:
    """Threads that fill the GPU: two blocks a multiprocessor."""
    return 2 * THREADS * device.multiprocessors


def _chunk(problem: ConvProblem) -> int:
    """Channels of a block: few idle threads, and rather more channels."""
    fitting = [chunk for chunk in CHUNKS if chunk >= _vector(problem, Depthwise)]
    return min(fitting, key=lambda chunk: (ceil(problem.K, chunk) * chunk * (1 + 2 / chunk), -chunk))
