"""The implicit GEMM engine: convolutions on tensor cores, fp32 results from 16-bit products.

float32 arrays are packed into fp16 limbs (``cu/pack.cu``) and multiplied by ``cu/implicit_gemm_sm90.cu``: three products for
``precision="fp32"``, one for ``"tf32"``. float16 and bfloat16 arrays take one product of what they are. What does not fit
the limbs is found while packing and computed by the direct engine's kernel in plain fp32, without a word to the host.

A problem is first brought into the form that tensor loads can make (:func:`packing`), then cut into phases (one for a forward
convolution), each of which is one launch. :func:`choose` picks tiles by a short model of time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice

from pycuda_conv.engines import direct
from pycuda_conv.engines.direct import BIAS, INPUT, RESULT, WEIGHT, WORKSPACE, Phase
from pycuda_conv.problem import ConvProblem, Size3
from pycuda_conv.runtime.base import Device, Im2col, Step, TensorMap

#: the plan's buffer of the packed filter
PACKED = 5

SHARED_BYTES = 227 * 1024 - 256  # what a block of an sm_90 GPU may have, but for the barriers
THREADS = 384
PACK_THREADS = 256
PACK_ITEMS, FOLD_ITEMS = 2, 4  # pixels of 8 channels that a thread of it takes at once; where it folds taps
FLOAT, HALF, BFLOAT = 32, 16, 17  # as the kernels name element types
ELEMENTS = {"float32": FLOAT, "float16": HALF, "bfloat16": BFLOAT}

#: What TMA's im2col mode takes, by the number of spatial axes: corners (lowest, highest), and the largest offset of a tap.
CORNERS = {1: (-32768, 32767), 2: (-128, 127), 3: (-16, 15)}
OFFSETS = {1: 65535, 2: 255, 3: 31}
MOST_STRIDE = 8


@dataclass(frozen=True)
class ImplicitGemm:
    """One tile of ``implicit_gemm_sm90.cu``.

    Its output channels, its pixels, the stages of its ring, and splits of gemm k; POINTWISE multiplies the images of a 1x1
    convolution as they lie instead of packing them.
    """

    ROWS: int = 128
    PIXELS: int = 128
    STAGES: int = 3
    SPLIT: int = 1
    POINTWISE: bool = False


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _size3(values: list[int]) -> Size3:
    d, h, w = values
    return d, h, w


def products(problem: ConvProblem) -> int:
    """Products of 16-bit numbers for one of the problem's."""
    return 3 if problem.dtype == "float32" and problem.precision == "fp32" else 1


def limbs(problem: ConvProblem) -> int:
    """16-bit numbers that stand for one element."""
    return 2 if products(problem) == 3 else 1


# ---- the form that tensor loads can make


@dataclass(frozen=True)
class Packing:
    """How a problem's operands are laid out for the tensor loads.

    Attributes
    ----------
    as_is : bool
        The input needs no packing: it has 16 bits and its channels are last.
    level : int
        How many of the innermost axes packing takes care of.
    folded : (int, int, int)
        Taps that packing turns into channels, an axis; 1 where the loads make them.
    size : (int, int, int)
        Pixels of a packed image.
    group : int
        Packed channels of a group.
    load : int
        Channels a load: 64, 32 or 16.
    """

    as_is: bool
    level: int
    folded: Size3
    size: Size3
    group: int
    load: int


@dataclass(frozen=True)
class Walk:
    """How one phase walks the packed image.

    Pixel j and tap i of an axis meet at ``j * stride + low + i * dilation``; tap i of the phase is number
    ``base + i * step`` of the packed filter along the axis.
    """

    phase: Phase
    taps: Size3
    stride: Size3
    low: Size3
    dilation: Size3
    base: Size3
    step: Size3
    #: spatial axes that the loads need, and whether all images are one row of pixels to them
    rank: int
    flat: bool


def _channels_a_load(channels: int) -> int:
    # a shorter row wastes less where channels end, but is loaded less well
    return min((64, 32, 16), key=lambda load: _ceil(channels, load) * load * {64: 1.0, 32: 1.05, 16: 1.15}[load])


def _walk(problem: ConvProblem, phase: Phase, packed: Packing) -> Walk | None:
    """The walk of `phase`, or None if tensor loads can't make it."""
    axes = []
    for i in range(3):
        if phase.dilation[i] >= 0:
            axes.append((phase.taps[i], phase.stride[i], -phase.pad[i], max(phase.dilation[i], 1), phase.first[i], phase.every[i]))
        else:  # dgrad meets its taps backwards
            last = phase.taps[i] - 1
            start = -phase.pad[i] + last * phase.dilation[i]
            axes.append((phase.taps[i], 1, start, -phase.dilation[i], phase.first[i] + last * phase.every[i], -phase.every[i]))
    taps, stride, low, dilation, base, step = (_size3(list(values)) for values in zip(*axes, strict=True))
    trivial = [packed.size[i] == phase.size[i] and taps[i] <= 1 and stride[i] == 1 and low[i] == 0 for i in range(3)]
    flat = all(trivial)
    rank = 1 if flat or (trivial[0] and trivial[1] and packed.size[:2] == (1, 1)) else 2 if trivial[0] and packed.size[0] == 1 else 3
    if not flat:
        for i in range(3 - rank, 3):
            lowest, highest = CORNERS[rank]
            upper = low[i] + (phase.size[i] - 1) * stride[i] - (packed.size[i] - 1)
            reach = (max(taps[i], 1) - 1) * dilation[i]
            if not lowest <= low[i] <= highest or not lowest <= upper <= highest or reach > OFFSETS[rank] or stride[i] > MOST_STRIDE:
                return None
    return Walk(phase, taps, stride, low, dilation, base, step, rank, flat)


@lru_cache(maxsize=1024)
def packing(problem: ConvProblem) -> tuple[Packing, tuple[Walk, ...]] | None:
    """How to pack the problem and walk its phases; None if the loads can't be made to serve it."""
    channels, wide = problem.operand_channels // problem.groups, problem.dtype == "float32"
    forward = problem.direction == "fprop"
    # with few channels the innermost taps are folded, or most of each product would be zeros
    first = 1 if forward and channels < 16 and problem.filter_size[2] > 1 else 0
    for level in range(first, 4 if forward else 1):
        folded = _size3([problem.filter_size[i] if i >= 3 - level else 1 for i in range(3)])
        size = _size3([problem.output_size[i] if i >= 3 - level else problem.operand_size[i] for i in range(3)])
        count = channels * math.prod(folded)
        load = _channels_a_load(count)
        # a group's last load must not reach the next one's channels: what is not finite there would be multiplied by zero
        align = 8 if problem.groups == 1 else load
        as_is = level == 0 and not wide and problem.layout == "NHWC" and channels % 8 == 0 and (problem.groups == 1 or channels % load == 0)
        packed = Packing(as_is, level, folded, size, _ceil(count, align) * align, load)
        walks = []
        for phase in direct.phases(problem):
            if level:
                phase = _folded_phase(phase, level)
            walk = _walk(problem, phase, packed)
            if walk is None:
                break
            walks.append(walk)
        else:
            return packed, tuple(sorted(walks, key=lambda walk: -math.prod(walk.taps)))
    return None


def _folded_phase(phase: Phase, level: int) -> Phase:
    """A forward convolution after its innermost `level` axes were folded: there it has one tap and no stride."""

    def kept(values: Size3, instead: int) -> Size3:
        return _size3([v if i < 3 - level else instead for i, v in enumerate(values)])

    return Phase(
        phase.size, phase.origin, phase.step, kept(phase.taps, 1), kept(phase.first, 0), kept(phase.every, 1), kept(phase.stride, 1),
        kept(phase.pad, 0), kept(phase.dilation, 1),
    )


# ---- what is legal


def unsupported(device: Device) -> str | None:
    """Why the engine can't run on `device`, or None if it can."""
    if device.capability != (9, 0):
        return "it takes a GPU of compute capability 9.0"
    return None


def why_not(problem: ConvProblem) -> str | None:
    """Why the engine can't run `problem` whatever the tile, or None if it can."""
    if problem.dtype not in ELEMENTS:
        return f"it takes {', '.join(ELEMENTS)} arrays"
    if 0 in problem.result_shape or 0 in problem.input_shape:
        return "there is nothing to compute"
    images = problem.N * limbs(problem)
    if problem.N * max(math.prod(problem.result_size), math.prod(problem.operand_size)) >= 2**31 - 2**20 or images >= 2**31:
        return "it counts pixels in 32 bits"
    if packing(problem) is None:
        return "tensor loads can't make its padding or dilation"
    return None


def legal(problem: ConvProblem, config: ImplicitGemm) -> str | None:
    """Why `config` can't run `problem`, or None if it can."""
    reason = why_not(problem)
    if reason:
        return reason
    if config.ROWS not in (64, 128):
        return "a tile has 64 or 128 rows"
    most = 136 if products(problem) == 3 else 256  # their sums, three times or once, fill the registers
    if config.PIXELS % (8 if config.ROWS == 128 else 16) or not 8 <= _consumer_pixels(config) <= most:
        return f"a consumer takes a multiple of 8 pixels up to {most}"
    if config.POINTWISE:
        reason = _not_pointwise(problem, config)
        if reason:
            return reason
    if config.STAGES < 2 or shared_bytes(problem, config) > SHARED_BYTES:
        return f"its {config.STAGES} stages take {shared_bytes(problem, config):,} bytes of shared memory; a block has {SHARED_BYTES:,}"
    if config.SPLIT < 1:
        return "it has at least one split"
    return None


def _not_pointwise(problem: ConvProblem, config: ImplicitGemm) -> str | None:
    """Why the images can't be multiplied as they lie, or None if they can."""
    found = packing(problem)
    assert found is not None
    packed, walks = found
    if problem.layout != "NCHW" or problem.groups != 1 or packed.load != 64 or packed.level or len(walks) != 1 or not walks[0].flat:
        return "images are multiplied as they lie for 1x1 filters on NCHW arrays, without groups, stride or padding"
    if math.prod(problem.operand_size) * problem.itemsize % 16:
        return "tensor loads take planes of a multiple of 16 bytes"
    most = 256 if problem.itemsize == 2 else 64 if products(problem) == 3 else 128
    if config.SPLIT != 1 or _consumer_pixels(config) % 64 or _consumer_pixels(config) > most or config.PIXELS > 256:
        return f"a consumer takes 64 to {most} pixels of such images, in blocks of 64, without splits"
    if problem.itemsize == 4 and _raw_stages(problem, config) < 2:
        return "its shared memory leaves no room for the images as they are"
    return None


def _raw_stages(problem: ConvProblem, config: ImplicitGemm) -> int:
    """Stages of the ring of float32 pixels that fit beside the other."""
    return min(4, (SHARED_BYTES - _ring_bytes(problem, config)) // (64 * 4 * config.PIXELS))


def stage_bytes(problem: ConvProblem, config: ImplicitGemm) -> int:
    """Bytes of one stage of the ring: 64 of gemm k."""
    return limbs(problem) * (config.ROWS + config.PIXELS) * 128


def shared_bytes(problem: ConvProblem, config: ImplicitGemm) -> int:
    """Shared memory of a block: the ring, the consumers' staging tiles and scales, and room to align them."""
    raw = _raw_stages(problem, config) * 64 * 4 * config.PIXELS if config.POINTWISE and problem.itemsize == 4 else 0
    return _ring_bytes(problem, config) + raw


def _ring_bytes(problem: ConvProblem, config: ImplicitGemm) -> int:
    staging = 2 * 32 * 64 * _stored_bytes(problem, config) if tensor_store(problem, config) else 4 * 4 * 32 * 20
    return config.STAGES * stage_bytes(problem, config) + 2 * (staging + 4 * _consumer_pixels(config)) + 1024


def tensor_store(problem: ConvProblem, config: ImplicitGemm) -> bool:
    """Whether TMA writes the result: rows of channels whose pitch is a multiple of 16 bytes."""
    rows = problem.result_channels // problem.groups * _stored_bytes(problem, config)
    dense = problem.direction == "fprop" or problem.stride == (1, 1, 1)
    return problem.layout == "NHWC" and dense and rows % 16 == 0 and _consumer_pixels(config) % 32 == 0


def _stored_bytes(problem: ConvProblem, config: ImplicitGemm) -> int:
    """Bytes of an element that the product writes: of the result, or of a part of a split sum."""
    return 4 if config.SPLIT > 1 else problem.itemsize


def _consumer_pixels(config: ImplicitGemm) -> int:
    return config.PIXELS if config.ROWS == 128 else config.PIXELS // 2


# ---- launches


@dataclass(frozen=True)
class Program:
    """The launches of a plan.

    `prepare` packs the filter into a buffer of `filter_bytes`, and `stages` do the rest with `workspace_bytes` of scratch;
    `whole` does both. Stages follow one another; the launches of one stage don't depend on each other.
    """

    prepare: list[list[Step]]
    stages: list[list[Step]]
    whole: list[list[Step]]
    workspace_bytes: int
    filter_bytes: int


class _Room:
    """Hands out pieces of a buffer."""

    def __init__(self, buffer: int) -> None:
        self.buffer, self.used = buffer, 0

    def take(self, nbytes: int) -> tuple[int, int]:
        """A place of so many bytes, as a step names it."""
        place = self.buffer, self.used
        self.used += _ceil(nbytes, 256) * 256
        return place


def program(problem: ConvProblem, config: ImplicitGemm, multiprocessors: int) -> Program:
    """The launches of `config`, which is legal for `problem`."""
    found = packing(problem)
    assert found is not None
    packed, walks = found
    scratch = _Room(WORKSPACE)
    if config.POINTWISE:
        return _pointwise_program(problem, config, packed, walks[0], multiprocessors)
    operands = _pack(problem, packed, scratch, multiprocessors)
    target: int | tuple[int, int] = RESULT
    if config.SPLIT > 1:
        target = scratch.take(4 * config.SPLIT * math.prod(problem.result_shape))
    buffers = (operands.w_limbs, operands.x_scales, operands.w_scales, BIAS, target)
    after = [[_product(problem, config, packed, walk, operands.x_limbs, buffers, multiprocessors) for walk in walks]]
    if config.SPLIT > 1:
        after.append([direct.reduce_step(problem, config.SPLIT, target)])
    if problem.dtype == "float32":
        after += [[step] for step in direct.guarded(problem, operands.x_flags, operands.w_flags, multiprocessors)]
    return Program(operands.prepare, operands.images + after, operands.both + after, scratch.used, operands.filter_bytes)


def _pointwise_program(problem: ConvProblem, config: ImplicitGemm, packed: Packing, walk: Walk, multiprocessors: int) -> Program:
    """The launches where images are not packed: what did not fit the guessed scale is multiplied again."""
    scratch = _Room(WORKSPACE)
    filters = _pack(problem, packed, _Room(WORKSPACE), multiprocessors)
    if problem.itemsize == 2:
        buffers: tuple[int | tuple[int, int], ...] = (filters.w_limbs, (RESULT, 0), filters.w_scales, BIAS, RESULT)
        stages = [[_product(problem, config, packed, walk, (INPUT, 0), buffers, multiprocessors)]]
        return Program(filters.prepare, stages, filters.prepare + stages, 0, filters.filter_bytes)
    count = 4 * _ceil(math.prod(problem.result_size), config.PIXELS)  # parts of an image: one a tile and converting warp
    parts, scales = scratch.take(8 * problem.N * count), scratch.take(4 * problem.N)
    flags, again = scratch.take(4 * problem.N), scratch.take(4 * problem.N)
    buffers = (filters.w_limbs, scales, filters.w_scales, BIAS, RESULT, parts, again)
    first, second = (_product(problem, config, packed, walk, (INPUT, 0), buffers, multiprocessors, second) for second in (0, 1))
    defines = _pack_defines(problem, packed)
    settle = Step("settle_scales", defines, problem.N, PACK_THREADS, (parts, scales, flags, again), (count,), "pack")
    stages = [[first], [settle], [second], *([step] for step in direct.guarded(problem, flags, filters.w_flags, multiprocessors))]
    return Program(filters.prepare, stages, filters.prepare + stages, scratch.used, filters.filter_bytes)


@dataclass(frozen=True)
class Operands:
    """The packed operands: where they, their scales and flags lie, and the launches that make them.

    `prepare` packs the filter, `images` the images, `both` does the two in as few launches.
    """

    x_limbs: tuple[int, int]
    x_scales: tuple[int, int]
    x_flags: tuple[int, int]
    w_limbs: tuple[int, int]
    w_scales: tuple[int, int]
    w_flags: tuple[int, int]
    prepare: list[list[Step]]
    images: list[list[Step]]
    both: list[list[Step]]
    filter_bytes: int


def _pack(problem: ConvProblem, packed: Packing, scratch: _Room, multiprocessors: int) -> Operands:
    """Pack the operands, the images into `scratch`."""
    wide, count, rows = problem.dtype == "float32", limbs(problem), problem.result_channels
    kept = _Room(PACKED)
    blocks, _, _ = _filter_sizes(problem, packed)
    filter_rows = problem.groups * blocks * 64
    w_limbs = kept.take(2 * count * filter_rows * row_blocks(problem, packed) * packed.load)
    w_scales, w_flags = kept.take(4 * rows), kept.take(4 * rows)
    chunks = problem.groups * packed.group // 8
    defines = _pack_defines(problem, packed)
    tiles = _ceil(math.prod(packed.size), PACK_THREADS * defines["ITEMS"] // defines["CHUNKS"]) * _ceil(chunks, defines["CHUNKS"])
    # a block for each image that was guessed right, more where few images may have to be packed again
    slices = max(1, min(tiles, 2 * multiprocessors // problem.N))
    x_limbs = x_scales = x_flags = parts = (INPUT, 0)
    if not packed.as_is:
        x_limbs = scratch.take(2 * count * problem.N * math.prod(packed.size) * 8 * chunks)
        if wide:
            parts, x_scales, x_flags = scratch.take(8 * problem.N * tiles), scratch.take(4 * problem.N), scratch.take(4 * problem.N)

    def pack(filter_rows: int, blocks: int) -> list[Step]:
        shape = _pack_shape(problem, packed, filter_rows, slices)
        places = (INPUT, WEIGHT, x_limbs, parts, w_limbs, w_scales, w_flags)
        return [Step("pack", defines, filter_rows + blocks, PACK_THREADS, places, shape)]

    settle = []
    if wide:
        shape, places = _pack_shape(problem, packed, 0, slices), (INPUT, x_limbs, parts, x_scales, x_flags)
        settle = [[Step("settle_images", defines, problem.N * slices, PACK_THREADS, places, (tiles, *shape), "pack")]]
    prepare = [pack(filter_rows, 0)]
    if packed.as_is:
        images, both = [], prepare
    else:
        images, both = ([pack(n, problem.N * tiles), *settle] for n in (0, filter_rows))
    return Operands(x_limbs, x_scales, x_flags, w_limbs, w_scales, w_flags, prepare, images, both, kept.used)


def _filter_sizes(problem: ConvProblem, packed: Packing) -> tuple[int, int, int]:
    """Blocks of 64 output channels of a group, an even number of them; taps; blocks of channels."""
    written = problem.result_channels // problem.groups
    return 2 * _ceil(written, 128), math.prod(problem.filter_size) // math.prod(packed.folded), _ceil(packed.group, packed.load)


def row_blocks(problem: ConvProblem, packed: Packing) -> int:
    """Blocks of channels of 64 rows of the packed filter: where a stage takes several, one of zeros to fill it up."""
    _, taps, channel_blocks = _filter_sizes(problem, packed)
    return taps * channel_blocks + (packed.load < 64)


def _pack_defines(problem: ConvProblem, packed: Packing) -> dict[str, int]:
    reduction = problem.operand_channels // problem.groups * math.prod(problem.filter_size)
    defines = {
        "IN": ELEMENTS[problem.dtype], "LIMBS": limbs(problem), "NHWC": int(problem.layout == "NHWC"),
        "CHUNKS": min(8, 1 << (problem.groups * packed.group // 8 - 1).bit_length()), "ITEMS": FOLD_ITEMS if packed.level else PACK_ITEMS,
        "SLACK": int(math.log2(reduction) / 2) if limbs(problem) == 2 else 0,
        "CHANNELS": problem.operand_channels // problem.groups, "KC": packed.load, "FOLDED": int(packed.level > 0),
    }
    return defines | dict(zip(("FOLD_T", "FOLD_R", "FOLD_S"), packed.folded, strict=True))


def _pack_shape(problem: ConvProblem, packed: Packing, filter_rows: int, slices: int) -> tuple[int, ...]:
    """The scalars of ``pack.cu``."""
    groups, all_taps = problem.groups, math.prod(problem.filter_size)
    blocks, taps, channel_blocks = _filter_sizes(problem, packed)
    read, written = problem.operand_channels // groups, problem.result_channels // groups

    def where_folded(values: Size3, instead: int) -> tuple[int, ...]:
        return tuple(v if i >= 3 - packed.level else instead for i, v in enumerate(values))

    return (
        filter_rows, problem.N, slices, groups, packed.group, *problem.operand_size, *packed.size, *where_folded(problem.stride, 1),
        *where_folded(problem.padding_before, 0), *where_folded(problem.dilation, 1), written, blocks,
        read * written * all_taps, *((read * all_taps, all_taps) if problem.direction == "fprop" else (all_taps, written * all_taps)),
        taps, channel_blocks, row_blocks(problem, packed),
    )


def _image_map(problem: ConvProblem, config: ImplicitGemm, packed: Packing, walk: Walk, place: tuple[int, int]) -> TensorMap:
    channels, copies = problem.groups * packed.group, limbs(problem)
    if walk.flat:
        axes, images = [problem.N * math.prod(packed.size)], copies
        stride, low, upper = [1], [0], [0]
    else:
        inner = range(2, 2 - walk.rank, -1)  # W first
        axes, images = [packed.size[i] for i in inner], copies * problem.N
        stride, low = [walk.stride[i] for i in inner], [walk.low[i] for i in inner]
        upper = [walk.low[i] + (walk.phase.size[i] - 1) * walk.stride[i] - (packed.size[i] - 1) for i in inner]
    strides = [2 * channels]
    for n in axes:
        strides.append(strides[-1] * n)
    walked = Im2col(tuple(low), tuple(upper), tuple(stride), packed.load, config.PIXELS)
    return TensorMap(*place, (channels, *axes, images), tuple(strides), walked, 2 * packed.load, _operand(problem))


def _operand(problem: ConvProblem) -> str:
    """The dtype of the limbs."""
    return "bfloat16" if problem.dtype == "bfloat16" else "float16"


def _plane_map(problem: ConvProblem, config: ImplicitGemm) -> TensorMap:
    """Images that are multiplied as they lie: 16 bits in blocks of 64 pixels, swizzled; float32 in rows of a tile's pixels."""
    plane, channels, size = math.prod(problem.operand_size), problem.operand_channels, problem.itemsize
    box = (64 if size == 2 else config.PIXELS, 64, 1)
    strides = (plane * size, channels * plane * size)
    return TensorMap(INPUT, 0, (plane, channels, problem.N), strides, box, 128 if size == 2 else 0, problem.dtype)


def _result_map(problem: ConvProblem, config: ImplicitGemm, place: int | tuple[int, int]) -> TensorMap:
    """The result, or the parts of a split one, as the product writes them; the axes keep tails out of the next group or part."""
    buffer, offset = place if isinstance(place, tuple) else (place, 0)
    size, groups, rows = _stored_bytes(problem, config), problem.groups, problem.result_channels
    pixels = problem.N * math.prod(problem.result_size)
    sizes, strides = (rows // groups, groups, pixels, config.SPLIT), (size * (rows // groups), size * rows, size * rows * pixels)
    return TensorMap(buffer, offset, sizes, strides, (128 // size, 1, 32, 1), 128, "float32" if size == 4 else problem.dtype)


def _product(
    problem: ConvProblem, config: ImplicitGemm, packed: Packing, walk: Walk, x_limbs: tuple[int, int],
    buffers: tuple[int | tuple[int, int], ...], multiprocessors: int, second: int = 0,
) -> Step:
    """The launch of one phase."""
    phase, split, nhwc = walk.phase, config.SPLIT > 1, problem.layout == "NHWC"
    groups, rows = problem.groups, problem.result_channels
    tiles = _tiles(problem, config, phase)
    tap_strides = [1, 1, 1]  # taps of the packed filter from one to the next along t, r, s
    kept = [n // f if f > 1 else n for n, f in zip(problem.filter_size, packed.folded, strict=True)]
    tap_strides[1], tap_strides[0] = kept[2], kept[2] * kept[1]
    result = problem.result_size
    out_strides = (result[1] * result[2], result[2], 1)
    plane = math.prod(phase.size)
    dense = phase.step == (1, 1, 1)
    neighbours = rows // groups if nhwc else plane if dense else 1
    empty = 0 in phase.taps
    blocks, _, channel_blocks = _filter_sizes(problem, packed)
    flat = problem.N * plane
    size, low, stride = phase.size, walk.low, walk.stride
    load = (flat, flat, flat) if walk.flat else (plane, size[1] * size[2], size[2])
    shape = (
        math.prod(tiles) * config.SPLIT * groups, tiles[0], config.SPLIT, tiles[1], 0 if empty else channel_blocks * math.prod(walk.taps),
        channel_blocks, rows // groups, rows, blocks, row_blocks(problem, packed), packed.group, groups * packed.group,
        max(walk.taps[1], 1), max(walk.taps[2], 1),
        sum(b * t for b, t in zip(walk.base, tap_strides, strict=True)), *(s * t for s, t in zip(walk.step, tap_strides, strict=True)),
        *walk.dilation, problem.N * plane, 1 if walk.flat else problem.N, *load, *((1, 1, 1) if walk.flat else stride),
        *((0, 0, 0) if walk.flat else low), plane, size[1] * size[2], size[2], math.prod(result),
        sum(o * t for o, t in zip(phase.origin, out_strides, strict=True)), *(s * t for s, t in zip(phase.step, out_strides, strict=True)),
        second,
    )
    pointwise = 0 if not config.POINTWISE else 1 if problem.itemsize == 2 else 2
    defines = {
        "ROWS": config.ROWS, "PIXELS": config.PIXELS, "STAGES": config.STAGES, "PRODUCTS": products(problem), "KC": packed.load,
        "RANK": walk.rank, "BF16": int(problem.dtype == "bfloat16"), "OUT": FLOAT if split else ELEMENTS[problem.dtype],
        "SCALED": int(problem.dtype == "float32"), "HAS_BIAS": int(problem.has_bias and not split), "NHWC": int(nhwc),
        "VEC": math.gcd(neighbours, 4), "DENSE": int(dense), "WGMMA_N": _consumer_pixels(config),
        "TENSOR_STORE": int(tensor_store(problem, config)), "POINTWISE": pointwise,
        "RAW_STAGES": _raw_stages(problem, config) if pointwise == 2 else 2,
    }
    maps = [_plane_map(problem, config) if pointwise else _image_map(problem, config, packed, walk, x_limbs)]
    if tensor_store(problem, config):
        maps.append(_result_map(problem, config, buffers[-1]))
    return Step(
        "implicit_gemm_sm90", defines, min(shape[0], multiprocessors), THREADS + 128 * (pointwise == 2), buffers, shape,
        maps=tuple(maps), shared=shared_bytes(problem, config), arch="sm_90a",
    )


def _tiles(problem: ConvProblem, config: ImplicitGemm, phase: Phase) -> tuple[int, int]:
    """Tiles of a group: along its channels and along the pixels."""
    plane = math.prod(phase.size)
    across = problem.N * _ceil(plane, config.PIXELS) if config.POINTWISE else _ceil(problem.N * plane, config.PIXELS)
    return _ceil(problem.result_channels // problem.groups, config.ROWS), across


# ---- the choice

# Measured on an H200, whose power limit keeps the clock near this under such a load.
CLOCK = 1450.0  # cycles a microsecond
ROW_CYCLES = 2.8  # of a tensor load, for each pixel's row of channels
CONVERT_CYCLES = 14.0  # for a limb of 64 channels of a float32 pixel, by one warpgroup
READ = 28e3  # bytes a microsecond from memory to one multiprocessor, all of them reading at once
STORED = 17.4e3  # bytes of the result a microsecond and multiprocessor, all of them writing at once
TILE_TIME, LAUNCH_TIME = 0.8, 3.0  # microseconds to start and drain a tile, and a launch


def configs(problem: ConvProblem) -> Iterator[ImplicitGemm]:
    """The configurations worth comparing for `problem`."""
    three = products(problem) == 3
    steps = _steps(problem)
    wide = [*range(64, 137, 8)] if three else [64, 80, 96, 112, 128, 144, 160, 192, 224, 256]
    for rows in (128, 64):
        if rows == 128 and problem.result_channels // problem.groups <= 64:
            continue
        for pixels in wide if rows == 128 else [2 * n for n in wide if 2 * n <= 256]:
            for split in (1, 2, 3, 4, 6, 8):
                if split == 1 or steps >= 4 * split:
                    yield from _deepest(problem, ImplicitGemm(rows, pixels, SPLIT=split), (6, 5, 4, 3, *((2,) if rows == 64 else ())))
        for pixels in (64, 128, 256):
            yield from _deepest(problem, ImplicitGemm(rows, pixels, POINTWISE=True), (4, 3, 2))


def _deepest(problem: ConvProblem, config: ImplicitGemm, depths: tuple[int, ...]) -> Iterator[ImplicitGemm]:
    """`config` with as many stages as are legal, if any."""
    tried = (replace(config, STAGES=stages) for stages in depths)
    yield from islice((one for one in tried if legal(problem, one) is None), 1)


def _steps(problem: ConvProblem) -> int:
    """Stages of the ring that a tile without splits goes through, at the most."""
    found = packing(problem)
    assert found is not None
    packed, walks = found
    return _ceil(_ceil(packed.group, packed.load) * math.prod(walks[0].taps), 64 // packed.load)


def time(problem: ConvProblem, config: ImplicitGemm, multiprocessors: int) -> float:
    """Microseconds that `config` should take, packing included: arithmetic, bytes into shared memory, rounds of tiles."""
    found = packing(problem)
    assert found is not None
    packed, walks = found
    count = products(problem)
    pixel_rows = limbs(problem) * config.PIXELS * (64 // packed.load)
    arithmetic = 4 * count * config.PIXELS * config.ROWS / 128
    step = max(arithmetic, ROW_CYCLES * pixel_rows) / CLOCK
    if config.POINTWISE:  # limited by the conversion, or by memory for each tile of pixels' first use
        conversion = CONVERT_CYCLES * limbs(problem) * config.PIXELS if problem.itemsize == 4 else 0
        step = max(arithmetic / CLOCK, conversion / CLOCK, 64 * config.PIXELS * problem.itemsize / READ)
    stores = config.ROWS * config.PIXELS * _stored_bytes(problem, config) / STORED
    time = LAUNCH_TIME
    for walk in walks:
        steps = _ceil(_ceil(packed.group, packed.load) * math.prod(walk.taps), 64 // packed.load)
        tiles = math.prod(_tiles(problem, config, walk.phase)) * problem.groups * config.SPLIT
        time += _ceil(tiles, multiprocessors) * (_ceil(steps, config.SPLIT) * step + TILE_TIME + stores)
    result = math.prod(problem.result_shape)
    moved = 0.0
    if not packed.as_is and not config.POINTWISE:
        moved += math.prod(problem.input_shape) * problem.itemsize
        moved += 2 * limbs(problem) * problem.N * math.prod(packed.size) * packed.group * problem.groups
    moved += math.prod(problem.weight_shape) * (problem.itemsize + 2 * limbs(problem))
    if config.SPLIT > 1:
        time += 2
        moved += result * (8 * config.SPLIT + problem.itemsize)
    launches = 2 + (2 if problem.dtype == "float32" else 0) + (not packed.as_is)
    return time + moved / 3.5e6 + 1.5 * launches


def choose(problem: ConvProblem, multiprocessors: int) -> tuple[float, ImplicitGemm] | None:
    """The configuration that should be the best for `problem`, behind the microseconds it should take; None if none runs it."""
    if why_not(problem):
        return None
    return min(((time(problem, config, multiprocessors), config) for config in configs(problem)), key=lambda pair: pair[0])
