"""Depthwise convolutions and their gradients of arrays with their channels last, as they lie: ``cu/depthwise_nhwc*.cu``."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pycuda_conv.engines.base import BY_RULE, Config
from pycuda_conv.engines.geometry import accumulator_bytes, arguments, ceil, needs_64_bits
from pycuda_conv.engines.schedule import BIAS, GRID_LIMIT, INPUT, RESIDUAL, RESULT, SCALE, WEIGHT, WORKSPACE, Schedule, epilogue
from pycuda_conv.engines.split_sum import reduce_launch
from pycuda_conv.engines.texts import FLAG, TextFamily
from pycuda_conv.problem import DTYPE_CODES, ConvProblem
from pycuda_conv.runtime.base import Device, KernelLaunch


@dataclass(frozen=True)
class Depthwise(Config):
    """Channels of a block, and pixels of a thread: ``depthwise_nhwc.cu``."""

    CHUNK: int = 64
    TILE_P: int = 4
    TILE_Q: int = 4


@dataclass(frozen=True)
class DepthwiseWgrad(Config):
    """Channels of a block, and parts of the sum: ``depthwise_nhwc_wgrad.cu``."""

    CHUNK: int = 64
    PARTS: int = 1


class DepthwiseArguments(NamedTuple):
    """The struct of ``depthwise_nhwc.cu``, which says what its members are."""

    lanes_c: int
    lanes_q: int
    lanes_p: int
    blocks_c: int
    by_blocks_c: int
    blocks_q: int
    by_blocks_q: int
    blocks_p: int
    by_blocks_p: int
    n: int
    c: int
    k: int
    multiplier: int
    by_multiplier: int
    h: int
    w: int
    p: int
    q: int
    r: int
    s: int
    stride_h: int
    by_stride_h: int
    stride_w: int
    by_stride_w: int
    pad_h: int
    pad_w: int
    dil_h: int
    dil_w: int
    has_scale: int
    has_bias: int
    relu: int


class DepthwiseWgradArguments(NamedTuple):
    """The struct of ``depthwise_nhwc_wgrad.cu``, which says what its members are."""

    blocks_c: int
    by_blocks_c: int
    blocks_s: int
    by_blocks_s: int
    blocks_r: int
    by_blocks_r: int
    parts: int
    pieces: int
    pieces_q: int
    by_pieces_q: int
    c: int
    k: int
    multiplier: int
    by_multiplier: int
    h: int
    w: int
    p: int
    by_p: int
    q: int
    r: int
    s: int
    stride_h: int
    stride_w: int
    pad_h: int
    pad_w: int
    dil_h: int
    dil_w: int


CONFIGS = (Depthwise, DepthwiseWgrad)
LAYOUTS = "NHWC", "CHWN"
TENSOR_CORES = False
THREADS = 128
CHUNKS = (64, 32, 16, 8, 4)
#: Pixels of a thread, down and across: as many as leave the machine full.
TILES = ((4, 4), (2, 4), (1, 4))
PIECE = 4  # pixels of y that a thread of the gradient takes at once
#: Square filters whose loops are unrolled, with strides of 1 and 2.
UNROLLED = (3, 5, 7)
#: Taps of a block of the gradient of other filters.
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
    if isinstance(config, DepthwiseWgrad) != _of_filter(problem):
        return "gradients of filters and all else have a configuration of their own"
    assert isinstance(config, Depthwise | DepthwiseWgrad)
    if config.CHUNK not in CHUNKS or config.CHUNK < _vector(problem):
        return f"CHUNK must be one of {CHUNKS} and no less than {_vector(problem)}"
    if isinstance(config, Depthwise) and (config.TILE_P, config.TILE_Q) not in TILES:
        return f"(TILE_P, TILE_Q) must be one of {TILES}"
    if isinstance(config, Depthwise) and problem.direction == "dgrad" and _unrolled(problem) and config.TILE_P % problem.stride[1]:
        return "TILE_P must be a multiple of the stride"
    if _grid(problem, config) > GRID_LIMIT:
        return f"its grid is larger than {GRID_LIMIT:,} blocks"
    return None


def _refused(problem: ConvProblem) -> str | None:
    """Why no configuration runs `problem`, or None."""
    channels = problem.N if _of_filter(problem) else problem.C // max(problem.groups, 1)
    if channels != 1 or problem.groups == 0:
        return "it takes one channel of the input a group"
    if problem.direction == "dgrad" and problem.K != problem.C:
        return "of gradients by the input it takes those of one channel of the output a group"
    depths = problem.input_size[0], problem.filter_size[0], problem.output_size[0]
    if depths != (1, 1, 1) or problem.padding_before[0]:
        return "it takes at most two spatial axes"
    return None


def _of_filter(problem: ConvProblem) -> bool:
    """Whether the gradient of a filter is asked for: see :attr:`ConvProblem.launched`."""
    return problem.layout == "CHWN"


def _vector(problem: ConvProblem) -> int:
    """Channels of a thread."""
    most = 2 if problem.dtype == "float64" or (_of_filter(problem) and _unrolled(problem) > 3) else 4
    if problem.K != problem.groups:  # several channels of the output see one of the input
        return 1
    return next(v for v in (4, 2, 1) if v <= most and problem.K % v == 0)


def _unrolled(problem: ConvProblem) -> int:
    """The size of a square filter whose loops are unrolled, or 0."""
    size, stride, dilation = problem.filter_size, problem.stride, problem.dilation
    if _of_filter(problem):  # which is the result
        size, stride, dilation = problem.output_size, dilation, stride
    _, stride_h, stride_w = stride
    if size[1] != size[2] or size[1] not in UNROLLED or stride_h != stride_w or stride_h > 2 or dilation != (1, 1, 1):
        return 0
    return size[1]


def _grid(problem: ConvProblem, config: Config) -> int:
    """Blocks of the launch."""
    if isinstance(config, DepthwiseWgrad):
        told = _wgrad_arguments(problem, config)
        return told.blocks_c * told.blocks_s * told.blocks_r * told.parts
    assert isinstance(config, Depthwise)
    told_lanes = _arguments(problem, config)
    images = THREADS >> (told_lanes.lanes_c + told_lanes.lanes_q + told_lanes.lanes_p)
    return told_lanes.blocks_c * told_lanes.blocks_q * told_lanes.blocks_p * ceil(problem.N, images)


# ---- launches


def schedule(problem: ConvProblem, config: Config, device: Device, noted: bool = False) -> Schedule:
    """The launches of `config` for `problem`."""
    vector, size = _vector(problem), math.prod(problem.result_shape)
    defines = {"DTYPE": DTYPE_CODES[problem.dtype], "V": vector}
    filter_size = _unrolled(problem)
    if isinstance(config, Depthwise):
        defines |= {"INDEX_64": int(needs_64_bits(problem)), "CHUNK": config.CHUNK, "TILE_P": config.TILE_P, "TILE_Q": config.TILE_Q}
        defines |= {"DGRAD": int(problem.direction == "dgrad"), "HAS_RESIDUAL": int(problem.has_residual)}
        if filter_size:
            defines |= {"R": filter_size, "S": filter_size, "STRIDE": problem.stride[1]}
        else:
            defines["CHUNK"] = CHUNKS[0]  # which only the unrolled loops know
        buffers: tuple[int, ...] = (INPUT, WEIGHT, BIAS, SCALE, RESIDUAL, RESULT)
        told = _arguments(problem, config)
        return Schedule.plain([[KernelLaunch("depthwise_nhwc", defines, _grid(problem, config), THREADS, buffers, (), arguments=told)]])
    assert isinstance(config, DepthwiseWgrad)
    parts = config.PARTS
    taps_r, taps_s = _taps(problem)
    defines |= {"INDEX_64": int(needs_64_bits(problem) or parts * size >= 2**31), "CHUNK": config.CHUNK, "TAPS_R": taps_r, "TAPS_S": taps_s}
    if filter_size:
        defines["STRIDE"] = problem.dilation[1]
    buffers = INPUT, WEIGHT, RESULT if parts == 1 else WORKSPACE
    launch = KernelLaunch(
        "depthwise_nhwc_wgrad", defines, _grid(problem, config), THREADS, buffers, (), arguments=_wgrad_arguments(problem, config)
    )
    if parts == 1:
        return Schedule.plain([[launch]])
    return Schedule.plain([[launch], [reduce_launch(problem, parts, WORKSPACE)]], parts * size * accumulator_bytes(problem))


def _arguments(problem: ConvProblem, config: Depthwise) -> DepthwiseArguments:
    (_, h, w), (_, p, q) = problem.operand_size, problem.result_size
    (_, r, s), (_, stride_h, stride_w), (_, dil_h, dil_w) = problem.filter_size, problem.stride, problem.dilation
    (_, pad_h, pad_w), asked = problem.padding_before, epilogue(problem)
    # with DGRAD tiles begin where the padding says
    early_h, early_w = (pad_h % stride_h, pad_w % stride_w) if problem.direction == "dgrad" and _unrolled(problem) else (0, 0)
    tiles_p, tiles_q = ceil(p + early_h, config.TILE_P), ceil(q + early_w, config.TILE_Q)
    lanes_c = (config.CHUNK // _vector(problem)).bit_length() - 1
    lanes_q = min((tiles_q - 1).bit_length(), 7 - lanes_c, 2)
    lanes_p = min((tiles_p - 1).bit_length(), 7 - lanes_c - lanes_q)
    return arguments(
        DepthwiseArguments, lanes_c=lanes_c, lanes_q=lanes_q, lanes_p=lanes_p, blocks_c=ceil(problem.K, config.CHUNK),
        blocks_q=ceil(tiles_q, 1 << lanes_q), blocks_p=ceil(tiles_p, 1 << lanes_p), n=problem.N, c=problem.operand_channels,
        k=problem.result_channels, multiplier=problem.K // max(problem.C, 1), h=h, w=w, p=p, q=q, r=r, s=s, stride_h=stride_h,
        stride_w=stride_w, pad_h=pad_h, pad_w=pad_w, dil_h=dil_h, dil_w=dil_w,
        has_scale=asked["HAS_SCALE"], has_bias=asked["HAS_BIAS"], relu=asked["RELU"],
    )  # fmt: skip


def _taps(problem: ConvProblem) -> tuple[int, int]:
    """Taps of a block of the gradient of a filter, down and across."""
    size = _unrolled(problem)
    return (size, size) if size else SOME_TAPS


def _wgrad_arguments(problem: ConvProblem, config: DepthwiseWgrad) -> DepthwiseWgradArguments:
    (_, h, w), (_, p, q), (_, r, s) = problem.input_size, problem.filter_size, problem.output_size
    (_, stride_h, stride_w), (_, dil_h, dil_w), (_, pad_h, pad_w) = problem.dilation, problem.stride, problem.padding_before
    taps_r, taps_s = _taps(problem)
    pieces_q = ceil(q, PIECE)
    return arguments(
        DepthwiseWgradArguments, blocks_c=ceil(problem.K, config.CHUNK), blocks_s=ceil(s, taps_s), blocks_r=ceil(r, taps_r),
        parts=config.PARTS, pieces=_images(problem) * p * pieces_q, pieces_q=pieces_q, c=problem.groups, k=problem.K,
        multiplier=problem.K // problem.groups, h=h, w=w, p=p, q=q, r=r, s=s, stride_h=stride_h, stride_w=stride_w,
        pad_h=pad_h, pad_w=pad_w, dil_h=dil_h, dil_w=dil_w,
    )  # fmt: skip


def _images(problem: ConvProblem) -> int:
    """Images of the arrays from which the gradient of a filter is computed."""
    return problem.C // problem.groups


def filter_key(problem: ConvProblem, config: Config) -> None:
    """None: the kernels read the filter as it is."""


def sum_order(problem: ConvProblem, config: Config) -> Hashable:
    """The kernel; of gradients of filters also the parts and the threads that share a sum."""
    if isinstance(config, DepthwiseWgrad):
        return DepthwiseWgrad, config.PARTS, config.CHUNK
    return Depthwise


def texts(device: Device) -> Iterator[TextFamily]:
    """A text for a type, a vector and a tile; and one for each of a few common filters."""
    for code in DTYPE_CODES.values():
        common = {"DTYPE": (code,), "INDEX_64": FLAG, "V": (1, 2) if code == 64 else (1, 2, 4)}
        tile = {"TILE_P": tuple(p for p, _ in TILES), "TILE_Q": (4,), "DGRAD": FLAG, "HAS_RESIDUAL": FLAG}
        yield TextFamily("depthwise_nhwc", common | {"CHUNK": CHUNKS[:1]} | tile)
        square = {"R": UNROLLED, "S": UNROLLED, "STRIDE": (1, 2)}
        yield TextFamily("depthwise_nhwc", common | {"CHUNK": CHUNKS} | tile | square, lambda d: d["R"] == d["S"] and d["CHUNK"] >= d["V"])
        chunks, some = common | {"CHUNK": CHUNKS}, {"TAPS_R": SOME_TAPS[:1], "TAPS_S": SOME_TAPS[1:]}
        yield TextFamily("depthwise_nhwc_wgrad", chunks | some, lambda d: d["CHUNK"] >= d["V"])
        yield TextFamily("depthwise_nhwc_wgrad", chunks | {"TAPS_R": UNROLLED, "TAPS_S": UNROLLED, "STRIDE": (1, 2)},
                         lambda d: d["TAPS_R"] == d["TAPS_S"] and d["CHUNK"] >= d["V"])  # fmt: skip


# ---- the choice


def time(problem: ConvProblem, config: Config, device: Device) -> float | None:
    """Roughly the microseconds where channels have several results each, whose threads load one number at a time; None elsewhere."""
    if problem.K == problem.C or _of_filter(problem):
        return None
    return 3 + problem.macs / 2e6 * 132 / device.multiprocessors


def choose(problem: ConvProblem, device: Device) -> tuple[float, Config] | None:
    """The configuration by rule, since nothing else reads such arrays as they lie; matrix products do where results are many."""
    found = next(configs(problem, device), None)
    if found is None:
        return None
    us = time(problem, found, device) if device.backend == "cuda" else None
    return BY_RULE if us is None else us, found


def configs(problem: ConvProblem, device: Device) -> Iterator[Config]:
    """The configurations that are worth measuring for `problem`, the best first."""
    if _refused(problem):
        return
    chunk = _chunk(problem)
    if _of_filter(problem):
        yield from (one for one in [DepthwiseWgrad(chunk, _parts(problem, chunk, device))] if refusal(problem, one) is None)
        return
    _, p, q = problem.result_size
    # a big tile loads less; but in unrolled loops over many taps it wants more registers than there are
    fits = _unrolled(problem) == 3 and (problem.stride[1] == 1 or problem.direction == "dgrad")
    fitting = TILES if fits else TILES[1:]
    lanes = problem.N * ceil(problem.K, _vector(problem))
    full = [(down, right) for down, right in fitting if ceil(p, down) * ceil(q, right) * lanes >= _threads(device)]
    best = next((tile for tile in full if tile[0] <= p), fitting[-1])
    for tile in dict.fromkeys((best, *fitting)):
        if refusal(problem, one := Depthwise(chunk, *tile)) is None:
            yield one


def _threads(device: Device) -> int:
    """Threads that fill a machine: two blocks a multiprocessor."""
    return 2 * THREADS * device.multiprocessors


def _chunk(problem: ConvProblem) -> int:
    """Channels of a block: as many as leave few threads without one, rather more."""
    fitting = [chunk for chunk in CHUNKS if chunk >= _vector(problem)]
    return min(fitting, key=lambda chunk: (ceil(problem.K, chunk) * chunk * (1 + 2 / chunk), -chunk))


def _parts(problem: ConvProblem, chunk: int, device: Device) -> int:
    """Parts of the sum over pixels: enough blocks for the machine, each with a few pieces a thread, and not too many to add up."""
    told = _wgrad_arguments(problem, DepthwiseWgrad(chunk, 1))
    blocks, lanes = max(told.blocks_c * told.blocks_s * told.blocks_r, 1), THREADS // (chunk // _vector(problem))
    return max(1, min(ceil(8 * device.multiprocessors, blocks), 4 * device.multiprocessors, told.pieces // (4 * lanes)))
