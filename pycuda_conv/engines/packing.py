"""Operands packed as 16-bit limbs, and how the tensor-core kernels walk them (``cu/layout/pack.cu``).

float32 arrays become fp16 limbs, two for ``precision="fp32"`` and one for ``"tf32"``. float16 and bfloat16 arrays keep their values.
Packing also finds the values that limbs cannot hold. The results that depend on them are computed once more in plain fp32, on the device.

:func:`packing` first brings a problem into a form that tensor loads can make, and cuts it into phases (a forward convolution is one).
:func:`assemble` puts the launches that pack, add and mend around the products of an engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from pycuda_conv.engines.geometry import (
    Phase,
    Strides,
    arguments,
    by_axis,
    ceil,
    divider,
    filter_last_strides,
    filter_strides,
    phases,
    places,
    read_strides,
    row_major,
    too_many_phases,
    written_strides,
)
from pycuda_conv.engines.range_guard import MomentsLayout, slack
from pycuda_conv.engines.schedule import INPUT, PACKED, RESULT, WEIGHT, WORKSPACE, Arena, Moments, Schedule
from pycuda_conv.engines.split_sum import reduce_launch
from pycuda_conv.engines.struct import kernel_struct
from pycuda_conv.engines.tensor_cores import BFLOAT, ELEMENTS, FLOAT, HALF, limbs, products
from pycuda_conv.engines.texts import FLAG, TextFamily
from pycuda_conv.problem import ConvProblem, Size3
from pycuda_conv.runtime.base import Device, KernelLaunch, Place

PACK_THREADS = 256
PACK_PIXELS = 4  # pixels, 8 channels of each, that a thread packs at once if an image has so many
PACK_APART = 2  # the same if taps are folded or channels are last: then each pixel has addresses of its own
SLOTS = 4  # the most blocks a multiprocessor that settle scales
CLUSTER = 8  # blocks of a cluster: images of up to so many tiles have their scale settled while they are packed
WARPS = PACK_THREADS // 32
MANY_ROWS = 2  # rows of a filter a multiprocessor: from so many on, warps pack them, if they are short
BESIDE_ROWS = 4  # rows of a filter that are neighbours in memory and packed by one block
ROWS_ROOM = 7168  # words of shared memory for the rows of a filter that a block's warps pack, beside one word every eight channels
FILTER_ROOM = 11264  # words of shared memory for a row of a filter: four such blocks fit a multiprocessor

#: Limits of TMA's im2col mode, by the number of spatial axes: corners (lowest, highest), and the largest offset of a tap.
CORNERS = {1: (-32768, 32767), 2: (-128, 127), 3: (-16, 15)}
OFFSETS = {1: 65535, 2: 255, 3: 31}
MOST_STRIDE = 8
MOST_PIXELS = 2**31 - 2**20  # kernels count pixels in 32 bits, up to the end of a tile
NOWHERE: tuple[int, int] = (INPUT, 0)  # the place of what a launch does not have
WORTH_FOLDING = 0.6  # folding pays below this part of the elements packed without it: if a stride steps over pixels, folding packs fewer
WORTH_FLAGS = 0.5e9  # multiplications of 16-bit numbers from which two short launches cost less than packing a window's rows one at a time


def size3(values: list[int]) -> Size3:
    d, h, w = values
    return d, h, w


# ---- the form that tensor loads can make


@dataclass(frozen=True)
class Window:
    """Windows, for few channels: the pixels that a filter row reads are contiguous, and a load takes them for the channels of one pixel.

    The window of the next output pixel begins `stride` pixels further, so windows overlap, and no value is packed twice.

    Attributes
    ----------
    pixel : int
        Packed channels of one pixel: those of `rows` rows of the image, filled up to a multiple of 8.
    rows : int
        The stride along H, if windows can have that many rows: then the filter has fewer rows, and no stride there.
    shift : int
        Rows of the first packed row that lie above the filter's first row.
    wide : int
        Pixels of a packed row, padding included.
    covers_unused_rows : bool
        True if a window covers rows outside the filter. Their weights are 0, and 0 x Inf is NaN, so such inputs need the range check.
    """

    pixel: int
    rows: int
    shift: int
    wide: int
    covers_unused_rows: bool


@dataclass(frozen=True)
class PackedLayout:
    """How a problem's operands are laid out for the tensor loads.

    Attributes
    ----------
    as_is : bool
        The input needs no packing: it has 16 bits and its channels are last.
    level : int
        How many of the innermost axes are folded while packing.
    folded : (int, int, int)
        Taps along each axis that packing turns into channels; 1 where the loads step through the taps.
    size : (int, int, int)
        Pixels (D, H, W) of a packed image, as the loads see it.
    group : int
        Packed channels of a group, as the loads see it.
    load : int
        Channels of a load: 64, 32 or 16.
    taps : (int, int, int)
        Taps (T, R, S) of the packed filter.
    window : Window, optional
        Set if a load takes the channels of neighbouring pixels for those of one; `size` and `group` are then the loads' view.
    """

    as_is: bool
    level: int
    folded: Size3
    size: Size3
    group: int
    load: int
    taps: Size3
    window: Window | None = None

    @property
    def stored(self) -> Size3:
        """Pixels of a packed image, as it lies in memory."""
        return self.size if self.window is None else (*self.size[:2], self.window.wide)

    @property
    def pixel(self) -> int:
        """Packed channels of one of these pixels and one group."""
        return self.group if self.window is None else self.window.pixel


@dataclass(frozen=True)
class PhaseAddressing:
    """How one phase walks the packed image.

    Pixel j reads tap i of an axis at ``j * stride + low + i * dilation`` of the packed image. Tap i of the phase is tap
    ``base + i * step`` of the packed filter along the axis.
    """

    phase: Phase
    taps: Size3
    stride: Size3
    low: Size3
    dilation: Size3
    base: Size3
    step: Size3
    #: the spatial axes that the loads need, and whether they see all images as one row of pixels
    rank: int
    flat: bool


def _channels_a_load(channels: int, whole: bool = False) -> int:
    """Channels of a load. With `whole` they divide `channels` if any choice does, so that no load reaches into the next group."""
    loads = [load for load in (64, 32, 16) if not whole or channels % load == 0] or [64, 32, 16]
    # a shorter row wastes less at the end of the channels, but loads more slowly
    return min(loads, key=lambda load: ceil(channels, load) * load * {64: 1.0, 32: 1.1, 16: 1.4}[load])


def phase_addressing(problem: ConvProblem, phase: Phase, packed: PackedLayout) -> PhaseAddressing | None:
    """How `phase` walks images that lie as `packed` says, or None if tensor loads can't do so."""
    axes = []
    for i in range(3):
        if phase.dilation[i] >= 0:
            axes.append((phase.taps[i], phase.stride[i], -phase.pad[i], max(phase.dilation[i], 1), phase.first[i], phase.every[i]))
        else:  # dgrad reads its taps backwards
            last = phase.taps[i] - 1
            start = -phase.pad[i] + last * phase.dilation[i]
            axes.append((phase.taps[i], 1, start, -phase.dilation[i], phase.first[i] + last * phase.every[i], -phase.every[i]))
    taps, stride, low, dilation, base, step = (size3(list(values)) for values in zip(*axes, strict=True))
    trivial = [packed.size[i] == phase.size[i] and taps[i] <= 1 and stride[i] == 1 and low[i] == 0 for i in range(3)]
    flat = all(trivial) and packed.window is None
    rank = 1 if flat or (trivial[0] and trivial[1] and packed.size[:2] == (1, 1)) else 2 if trivial[0] and packed.size[0] == 1 else 3
    if not flat:
        for i in range(3 - rank, 3):
            lowest, highest = CORNERS[rank]
            upper = low[i] + (phase.size[i] - 1) * stride[i] - (packed.size[i] - 1)
            reach = (max(taps[i], 1) - 1) * dilation[i]
            if not lowest <= low[i] <= highest or not lowest <= upper <= highest or reach > OFFSETS[rank] or stride[i] > MOST_STRIDE:
                return None
    return PhaseAddressing(phase, taps, stride, low, dilation, base, step, rank, flat)


@lru_cache(maxsize=1024)
def packing(problem: ConvProblem, windows: bool = False) -> tuple[PackedLayout, tuple[PhaseAddressing, ...]] | None:
    """How to pack the problem and walk its phases; None if tensor loads can't do so in any form.

    With `windows` pixels may overlap in memory: Hopper's tensor loads allow it.
    """
    channels, wide = problem.operand_channels // problem.groups, problem.dtype == "float32"
    forward = problem.direction == "fprop"
    # with few channels most of a product would be zeros: so the innermost taps are folded
    first = 1 if forward and channels < 16 and problem.filter_size[2] > 1 else 0
    if windows and first and problem.groups == 1 and problem.dilation[2] == 1 and problem.layout != "CNHW":
        packed, phase = _windows(problem)
        found = phase_addressing(problem, phase, packed)
        if found is not None and math.prod(packed.stored) < MOST_PIXELS:
            return packed, (found,)
    # wgrad: with two axes folded, a filter as large as images would leave a single pixel to pack, too little for a block
    levels = 2 if problem.layout == "CNHW" else 4 if forward else 1
    lying = not wide and problem.layout == "NHWC"  # the loads can read it
    readable = lying and channels % (8 if problem.groups == 1 else 16) == 0
    if levels == 4 and not first and not readable:
        first = _fewest(problem)
    for level in range(first, levels):
        folded, size = _folded(problem, level)
        count = channels * math.prod(folded)
        load = _channels_a_load(count, lying and problem.groups > 1 and level == 0)
        # a group's last load must not reach into the next group: Inf or NaN there would be multiplied by zero
        align = 8 if problem.groups == 1 else load
        as_is = level == 0 and readable
        taps = size3([n // f for n, f in zip(problem.filter_size, folded, strict=True)])
        packed = PackedLayout(as_is, level, folded, size, ceil(count, align) * align, load, taps)
        walks = []
        for phase in phases(problem):
            if level:
                phase = _folded_phase(phase, level)
            walk = phase_addressing(problem, phase, packed)
            if walk is None:
                break
            walks.append(walk)
        else:
            return packed, tuple(sorted(walks, key=lambda walk: -math.prod(walk.taps)))
    return None


def _folded(problem: ConvProblem, level: int) -> tuple[Size3, Size3]:
    """Taps along each axis and pixels (D, H, W) of an image if the innermost `level` axes are folded."""
    taps = size3([problem.filter_size[i] if i >= 3 - level else 1 for i in range(3)])
    return taps, size3([problem.output_size[i] if i >= 3 - level else problem.operand_size[i] for i in range(3)])


def _fewest(problem: ConvProblem) -> int:
    """The level that packs much fewer elements than level 0, or 0. Filters that step over pixels have one, as 1x1 filters with a stride."""
    packed = [math.prod(taps) * math.prod(size) for taps, size in (_folded(problem, level) for level in range(4))]
    return packed.index(min(packed)) if min(packed) < WORTH_FOLDING * packed[0] else 0


def _windows(problem: ConvProblem) -> tuple[PackedLayout, Phase]:
    """The packed layout and the only phase of a forward convolution with windows."""
    (phase,) = phases(problem)
    t, r, s = problem.filter_size
    rows = problem.stride[1] if problem.dilation[1] == 1 else 1
    unused = bool(problem.padding_before[1] % rows or r % rows)
    if problem.itemsize == 2 and unused and problem.macs < WORTH_FLAGS:
        rows, unused = 1, False
    first, shift = divmod(-problem.padding_before[1], rows)
    pixel = ceil(rows * problem.C, 8) * 8
    window = Window(pixel, rows, shift, (problem.output_size[2] - 1) * problem.stride[2] + s, unused)
    taps = (t, (shift + r - 1) // rows + 1, 1)
    size = (problem.operand_size[0], ceil(problem.operand_size[1], rows), problem.output_size[2])
    packed = PackedLayout(False, 1, (1, rows, 1), size, s * pixel, _channels_a_load(s * pixel), taps, window)
    return packed, replace(
        phase, taps=taps, stride=(phase.stride[0], phase.stride[1] // rows, 1), pad=(phase.pad[0], -first, 0),
        dilation=(phase.dilation[0], phase.dilation[1], 1), first=(0, 0, 0), every=(1, 1, 1),
    )


def _folded_phase(phase: Phase, level: int) -> Phase:
    """`phase`, of a forward convolution, after its innermost `level` axes were folded: one tap and no stride along these."""

    def kept(values: Size3, instead: int) -> Size3:
        return size3([v if i < 3 - level else instead for i, v in enumerate(values)])

    return Phase(
        phase.size, phase.origin, phase.step, kept(phase.taps, 1), kept(phase.first, 0), kept(phase.every, 1), kept(phase.stride, 1),
        kept(phase.pad, 0), kept(phase.dilation, 1),
    )


def packed_layout(problem: ConvProblem, windows: bool = False) -> tuple[PackedLayout, tuple[PhaseAddressing, ...]]:
    """:func:`packing` of a problem for which :func:`why_not` is None."""
    found = packing(problem, windows)
    assert found is not None
    return found


def flagged(problem: ConvProblem, packed: PackedLayout) -> bool:
    """Whether packing flags what the products can't compute, so that it is computed once more."""
    return problem.dtype == "float32" or (packed.window is not None and packed.window.covers_unused_rows)


@lru_cache(maxsize=1024)  # the planner asks for it once a configuration
def why_not(problem: ConvProblem) -> str | None:
    """Why no kernel on packed operands can run `problem`, or None if one can."""
    if problem.dtype not in ELEMENTS:
        return f"it takes {', '.join(ELEMENTS)} arrays"
    if problem.is_empty:
        return "there is nothing to compute"
    images = problem.N * limbs(problem)
    if problem.N * max(math.prod(problem.result_size), math.prod(problem.operand_size)) >= MOST_PIXELS or images >= 2**31:
        return "it counts pixels in 32 bits"
    reason = too_many_phases(problem)
    if reason:
        return reason
    if packing(problem) is None:
        return "tensor loads can't make its padding or dilation"
    return None


# ---- launches


@dataclass(frozen=True)
class Operands:
    """The packed operands: where they, their scales and flags lie, and the launches that make them.

    `prepare` packs the filter, `images` packs the images, `both` packs the two in as few launches. Packing the images also sets to zero the
    `tickets` of blocks that add the parts of split sums. The product clears the tiles that packing blocks have told one another of:
    `tiles` is their number for the images, plus 2^32 times that for a filter that was packed as images are.
    """

    x_limbs: tuple[int, int]
    x_scales: tuple[int, int]
    x_flags: tuple[int, int]
    w_limbs: tuple[int, int]
    w_scales: tuple[int, int]
    w_flags: tuple[int, int]
    tickets: tuple[int, int]
    x_tiles: Place
    w_tiles: Place
    tiles: int
    prepare: list[list[KernelLaunch]]
    images: list[list[KernelLaunch]]
    both: list[list[KernelLaunch]]
    filter_bytes: int


#: The arguments of ``pack.cu`` for an array.
PackArguments = kernel_struct("pack", "PackArguments")


@dataclass(frozen=True)
class PackedArray:
    """One array that is packed as images: the defines and arguments of its launch, and what follows from them.

    A filter can be such an array: then its rows are the images, and its taps the pixels.
    """

    defines: dict[str, int]
    arguments: Any  # a PackArguments without those of a filter packed beside it
    shared: int  # bytes of shared memory for a tile that is transposed
    filter_shared: int  # bytes of shared memory for a row of the filter packed beside the images

    @property
    def images(self) -> int:
        return self.arguments.images

    @property
    def tiles(self) -> int:
        """Tiles of an image."""
        return self.arguments.tiles

    @property
    def blocks(self) -> int:
        """Blocks of a launch that packs all images."""
        return self.in_clusters(self.arguments.lines * (self.arguments.each or self.tiles)) + self.settling

    @property
    def settling(self) -> int:
        """The last of these blocks, which settle scales."""
        return self.images * self.arguments.slices

    @property
    def clustered(self) -> bool:
        """Whether the blocks of a cluster settle the scale of their image, without others."""
        return self.defines["CLUSTER"] > 0

    def in_clusters(self, blocks: int) -> int:
        """`blocks`, rounded up to whole clusters if there are clusters."""
        return ceil(blocks, CLUSTER) * CLUSTER if self.clustered else blocks

    def in_cluster(self) -> PackedArray:
        """The same packed by clusters of blocks, if a cluster can have all tiles of an image."""
        if not self.defines["RANGE_CHECK"] or self.defines["IN"] != FLOAT or self.tiles > CLUSTER:
            return self
        each = 1 << (self.tiles - 1).bit_length()
        return replace(self, defines=self.defines | {"CLUSTER": CLUSTER}, arguments=self.arguments._replace(each=each))

    def settled(self, clusters: bool, multiprocessors: int) -> PackedArray:
        """The same with blocks that settle scales: one for an image guessed right, many if a few images may have to be packed
        again, which one block alone would do slowly. (16-bit images are only checked, never packed again.) Clusters settle them alone."""
        array = self.in_cluster() if clusters else self
        if not array.defines["RANGE_CHECK"] or array.clustered:
            return array
        slices = max(1, min(array.tiles, SLOTS * multiprocessors // array.images)) if array.defines["IN"] == FLOAT else 1
        return replace(array, arguments=array.arguments._replace(slices=slices, by_slices=divider(slices)))

    def noted(self, room: Arena, scales: Place, flags: Place) -> tuple[Place, ...]:
        """Where a launch writes scales and flags; and, without clusters, the extremes of tiles, which get a place in `room`."""
        if self.clustered:
            return scales, flags
        return scales, flags, room.take(16 * self.images * self.tiles) if self.settling else NOWHERE


def _packed(problem: ConvProblem, packed: PackedLayout, gradient: bool, as_filter: bool) -> PackedArray:
    """The images of `problem`, or with `as_filter` its filter packed as images are. With `gradient` float32's scale is sampled."""
    groups, count = problem.groups, limbs(problem)
    blocks, taps, channel_blocks = filter_sizes(problem, packed)
    read, written = problem.operand_channels // groups, problem.result_channels // groups
    w_group, w_row, w_channel = filter_strides(problem)
    (_, r, s), all_taps = problem.filter_size, math.prod(problem.filter_size)

    def folding(values: Size3, instead: int) -> Size3:
        return size3([v if i >= 3 - packed.level and not as_filter else instead for i, v in enumerate(values)])

    steps, pads, dilations = folding(problem.stride, 1), folding(problem.padding_before, 0), folding(problem.dilation, 1)
    if packed.window is not None:
        steps, pads, dilations = (1, packed.window.rows, 1), (0, 0, problem.padding_before[2]), (1, 1, 1)
    if as_filter:
        # a row has the channels of its own group
        images, lines, group, groups = problem.result_channels, 64 * blocks * groups, channel_blocks * packed.load, 1
        size, packed_size = problem.filter_size, packed.taps
        strides = Strides(w_row, w_group, w_channel, 1)
    else:
        images = lines = problem.N
        group, size, packed_size, strides = packed.pixel, problem.operand_size, packed.stored, read_strides(problem)
    vector, tile = _tiles(problem, packed, size, math.prod(packed_size) + (as_filter and packed.load < 64), groups * group // 8)
    checked = flagged(problem, packed)
    eights = read % 8 == 0 and (problem.dtype == "float32" or not checked)  # windows of 16 bits are seldom checked, so they have one text
    defines = {
        "IN": ELEMENTS[problem.dtype], "LIMBS": count, "NHWC": int(problem.layout == "NHWC"), "VECTOR": vector,
        "EIGHTS": int(eights), "RANGE_CHECK": int(checked),
        "SAMPLE_SCALE": int(gradient and problem.dtype == "float32"), "FILTER": int(as_filter), "FOLDED": int(packed.level > 0),
        "CLUSTER": 0,
    }
    fitting, pieces = _fitting(problem, packed), packed.load // 8
    told = arguments(
        PackArguments, filter_rows=0, row_bits=0, images=images, lines=lines, **tile, slices=0, groups=groups,
        group_chunks=group // 8, channels=read,
        slack=slack(problem), each=0, **dict(zip("dhw", size, strict=True)), x_image=strides.image, x_group=strides.group,
        x_channel=strides.channel, x_pixel=strides.pixel, **by_axis("packed_", packed_size),
        **_columns(problem, not as_filter and not packed.level), folds=math.prod(packed.folded), fold_r=packed.folded[1],
        fold_s=packed.folded[2], **by_axis("stride_", steps), **by_axis("pad_", pads), **by_axis("dilation_", dilations),
        rows_group=written,
        padded_group=64 * blocks, w_group=w_group, w_m=w_row, w_c=w_channel, w_tap=1, taps=taps, all_taps=all_taps,
        piece_bits=(pieces - 1).bit_length(), channel_blocks=channel_blocks, row_blocks=row_blocks(problem, packed),
        row_pieces=channel_blocks * pieces, fitting=fitting, part_pieces=fitting // 8, parts=_filter_parts(problem, packed),
        window=packed.pixel if packed.window else 0, shift=packed.window.shift if packed.window else 0, packed_r=packed.taps[1],
        filter_r=r, filter_s=s, tickets=0,
    )  # fmt: skip
    straight = problem.layout == "NHWC" and (not packed.level or eights)  # nothing is transposed in shared memory
    return PackedArray(defines, told, 0 if straight else 16 * count * _thread_pixels(problem, packed) * PACK_THREADS,
                       ceil(4 * (fitting * all_taps + ceil(fitting, 8)), 16) * 16)  # fmt: skip


def _columns(problem: ConvProblem, strided: bool) -> dict[str, int]:
    """Which columns of an image are packed. If the loads make the stride, columns that it steps over with all taps are not."""
    step = problem.stride[2] if strided and problem.direction == "fprop" else 1
    met = {tap * problem.dilation[2] % step for tap in range(min(problem.filter_size[2], step))}  # later taps read the same columns
    if len(met) == step:
        step, met = 1, {0}
    return {"step_w": step, "first_w": problem.padding_before[2] % step, "met_w": sum(1 << column for column in met)}


def _in_planes(problem: ConvProblem, packed: PackedLayout) -> bool:
    """Whether neighbouring pixels are neighbours in memory, and packed side by side."""
    return not packed.level and problem.layout != "NHWC"


def _thread_pixels(problem: ConvProblem, packed: PackedLayout) -> int:
    """Pixels, 8 channels of each, that a thread packs: as many as registers hold."""
    return PACK_PIXELS if _in_planes(problem, packed) else PACK_APART


def _tiles(problem: ConvProblem, packed: PackedLayout, size: Size3, pixels: int, chunks: int) -> tuple[int, dict[str, int]]:
    """The tiles of a packed image of `pixels` pixels and `chunks` chunks of 8 channels: pixels that a thread reads at once, and arguments.

    `size` is that of the image before it is packed.
    """
    planes, folds = _in_planes(problem, packed), math.prod(packed.folded)
    channels = problem.operand_channels // problem.groups
    # a pixel's taps share sectors of memory: a block takes the same channels of all (with more than 4 taps, too few of each to write well)
    together = 0
    if problem.layout == "NCHW" and packed.window is None and problem.groups == 1 and channels % 8 == 0 and 1 < folds <= 4:
        together = 8 if folds == 2 else 4
    # if there are few pixels, too, a tile has room for more channels
    most = 16 if together or (planes and pixels <= PACK_THREADS * PACK_PIXELS // 16) else 8
    at_once = most if together else min(most, 1 << (chunks - 1).bit_length())
    vector = PACK_PIXELS if planes and math.prod(size) % PACK_PIXELS == 0 else 1
    across = ceil(channels // 8, together) if together else ceil(chunks, at_once)
    tiles = ceil(pixels, PACK_THREADS * _thread_pixels(problem, packed) // at_once) * across
    bits = {"chunk_bits": (at_once - 1).bit_length(), "together": together, "together_bits": max(together - 1, 0).bit_length()}
    return vector, {"tiles": tiles, "tiles_c": across, **bits}


def _fitting(problem: ConvProblem, packed: PackedLayout) -> int:
    """Channels of a filter's row that fit shared memory at a time, with one more word for every 8."""
    taps, step = math.prod(problem.filter_size), 1 if packed.level else 8
    return min(problem.operand_channels // problem.groups, (FILTER_ROOM - FILTER_ROOM // (8 * taps)) // taps // step * step)


def _filter_parts(problem: ConvProblem, packed: PackedLayout) -> int:
    """Blocks that pack a row of the filter: if the row does not fit shared memory, each takes as many channels as fit."""
    fitting, (*_, channel_blocks) = _fitting(problem, packed), filter_sizes(problem, packed)
    whole = packed.level or fitting in (0, problem.operand_channels // problem.groups)
    return 1 if whole else ceil(channel_blocks * packed.load, fitting)


def _short_rows(problem: ConvProblem, packed: PackedLayout) -> bool:
    """Whether shared memory holds one row of the filter for each warp of a block."""
    channels = problem.operand_channels // problem.groups
    whole = _fitting(problem, packed) == channels
    return whole and WARPS * channels * math.prod(problem.filter_size) <= ROWS_ROOM


def packs_filter_last(problem: ConvProblem) -> bool:
    """Whether a filter with its second axis last, as in a channels-last model, is packed from that layout."""
    return problem.layout == "NHWC" and math.prod(problem.filter_size) > 1


def pack_operands(
    problem: ConvProblem, packed: PackedLayout, scratch: Arena, multiprocessors: int, filter_last: bool, clusters: bool, tickets: int
) -> Operands:
    """The launches that pack the operands, the images into `scratch`. `clusters`: the GPU has them. `tickets` words are set to zero."""
    count, written = limbs(problem), problem.result_channels
    kept = Arena(PACKED)
    filter_rows = problem.groups * filter_sizes(problem, packed)[0] * 64
    w_limbs = kept.take(2 * count * filter_rows * row_blocks(problem, packed) * packed.load)
    w_scales, w_flags = kept.take(4 * written), kept.take(4 * written)
    x_limbs = x_scales = x_flags = NOWHERE
    images = _packed(problem, packed, problem.direction == "dgrad", False)
    if not packed.as_is:
        images = images.settled(clusters, multiprocessors)
        x_limbs = scratch.take(2 * count * problem.N * math.prod(packed.stored) * problem.groups * packed.pixel)
        if flagged(problem, packed):
            x_scales, x_flags = scratch.take(4 * problem.N), scratch.take(4 * problem.N)
    of_images, tiles = images.noted(scratch, x_scales, x_flags), _told_tiles(images)
    x_tiles: Place = of_images[-1] if tiles else NOWHERE
    w_tiles: Place = NOWHERE
    tickets_at = scratch.take(4 * tickets) if tickets else NOWHERE

    images, row_packers = _with_filter(problem, packed, images, filter_rows, filter_last, multiprocessors)
    buffers = (INPUT, WEIGHT, x_limbs, *of_images, w_limbs, w_scales, w_flags, tickets_at)

    def pack(rows: int, blocks: int) -> list[list[KernelLaunch]]:
        return [[_pack_beside(images, buffers, rows, blocks, tickets)]]

    if problem.layout == "CNHW":  # wgrad: the filter is as large as the images
        rows = _packed(problem, packed, True, True).settled(clusters, multiprocessors)
        of_rows = rows.noted(kept, w_scales, w_flags)
        tiles, w_tiles = tiles + (_told_tiles(rows) << 32), of_rows[-1] if rows.settling else NOWHERE
        of_filter = (WEIGHT, WEIGHT, w_limbs, *of_rows, w_limbs, w_scales, w_flags, NOWHERE)
        one = rows.arguments._replace(slices=min(rows.arguments.slices, 1), by_slices=divider(1))  # no product follows to clear the tiles
        prepare, images_alone = [[_pack_alone(replace(rows, arguments=one), of_filter)]], pack(0, images.blocks)
        both = [[_pack_alone(rows, of_filter), *images_alone[0]]]
    else:
        prepare = pack(row_packers, 0)
        images_alone, both = ([], prepare) if packed.as_is else (pack(0, images.blocks), pack(row_packers, images.blocks))
    places = (x_limbs, x_scales, x_flags, w_limbs, w_scales, w_flags, tickets_at)
    return Operands(*places, x_tiles, w_tiles, tiles, prepare, images_alone, both, kept.used)


def _with_filter(
    problem: ConvProblem, packed: PackedLayout, images: PackedArray, rows: int, filter_last: bool, multiprocessors: int
) -> tuple[PackedArray, int]:
    """`images` with the arguments by which their launch packs so many `rows` of the filter too; and the number of parts of these rows."""
    written, shared = problem.result_channels, images.filter_shared
    strides = dict(zip(("w_m", "w_c", "w_tap"), filter_last_strides(problem), strict=True)) if filter_last else {}
    told = images.arguments._replace(**strides)
    if told.w_m == 1 and not packed.level and written // problem.groups % BESIDE_ROWS == 0:  # without shared memory
        by_one = divider(1)
        told = told._replace(fitting=0, by_fitting=by_one, part_pieces=0, by_part_pieces=by_one, parts=1, by_parts=by_one)
        told = told._replace(row_bits=BESIDE_ROWS.bit_length() - 1)
        shared = 0
    elif written >= MANY_ROWS * multiprocessors and _short_rows(problem, packed):
        told = told._replace(row_bits=WARPS.bit_length() - 1)
        shared *= WARPS
    else:
        rows *= _filter_parts(problem, packed)
    return replace(images, arguments=told, filter_shared=shared), rows


def _pack_beside(images: PackedArray, buffers: tuple[Place, ...], rows: int, blocks: int, tickets: int) -> KernelLaunch:
    """The launch that packs so many `rows` of the filter, and the images in so many `blocks`; either may be 0."""
    told = images.arguments._replace(filter_rows=rows, tickets=tickets if blocks else 0)
    if not blocks:
        told = told._replace(slices=0, by_slices=divider(1))
    shared = max(images.shared if blocks else 0, images.filter_shared if rows else 0)
    grid = images.in_clusters(rows >> told.row_bits) + blocks  # all blocks of a cluster pack images, or all pack the filter
    return KernelLaunch("pack", images.defines, grid, PACK_THREADS, buffers, (), shared=shared, arguments=told)


def _pack_alone(array: PackedArray, buffers: tuple[Place, ...]) -> KernelLaunch:
    """The launch that packs an array alone."""
    return KernelLaunch("pack", array.defines, array.blocks, PACK_THREADS, buffers, (), shared=array.shared, arguments=array.arguments)


def _told_tiles(images: PackedArray) -> int:
    """Tiles that several blocks settling an image's scale are told of. If a single block settles it, that block clears them itself."""
    return images.images * images.tiles if images.arguments.slices > 1 else 0


def filter_sizes(problem: ConvProblem, packed: PackedLayout) -> tuple[int, int, int]:
    """Blocks of 64 output channels of a group, taps, and blocks of channels of the packed filter."""
    written = problem.result_channels // problem.groups
    return ceil(written, 64), math.prod(packed.taps), ceil(packed.group, packed.load)


def row_blocks(problem: ConvProblem, packed: PackedLayout) -> int:
    """Blocks of channels of 64 rows of the packed filter. If a stage takes several, one block of zeros fills up the last stage."""
    _, taps, channel_blocks = filter_sizes(problem, packed)
    return taps * channel_blocks + (packed.load < 64)


def assemble(
    problem: ConvProblem, split: int, multiprocessors: int,
    products: Callable[[PackedLayout, Sequence[PhaseAddressing], Operands, Place, MomentsLayout], list[KernelLaunch]],
    moments: Moments | None = None, filter_last: bool = False, windows: bool = False, clusters: bool = False, mends: bool = False,
    tickets: int = 0,
) -> Schedule:
    """The launches of a problem: those of `products`, and around them those that pack, add the parts of a split sum, and mend.

    With `filter_last` the filter's second axis is last, see :func:`packs_filter_last`. `windows`: see :func:`packing`. `clusters`: the GPU
    has clusters of blocks. With `mends` the product itself computes flagged results once more. With `tickets`, their number, it also adds
    the parts of a split sum; the images have to be packed then. The last argument of `products` is the layout of `moments`.
    """
    packed, walks = packed_layout(problem, windows)
    scratch = Arena(WORKSPACE)
    operands = pack_operands(problem, packed, scratch, multiprocessors, filter_last, clusters, tickets)
    target: Place = RESULT
    if split > 1:
        target = scratch.take(4 * split * math.prod(problem.result_shape))
    layout = MomentsLayout(moments, scratch, multiprocessors)
    after = [products(packed, walks, operands, target, layout)]
    if split > 1 and not tickets:
        after.append([reduce_launch(problem, split, target)])
    checked = flagged(problem, packed)
    if mends:
        layout.redone_by(after[0])
    elif checked:
        found = operands.x_flags, operands.w_flags, operands.x_scales, operands.w_scales
        after += [[step] for step in layout.guarded(problem, found, filter_last)]
    filter_bytes, moments = operands.filter_bytes, layout.moments
    return Schedule(operands.prepare, operands.images + after, operands.both + after, scratch.used, filter_bytes, checked, moments)


# ---- phases that are repeats of others


Repeats = kernel_struct("repeats.cuh", "Repeats")


def first_ones(walks: Sequence[PhaseAddressing], many: Size3) -> list[PhaseAddressing]:
    """The phases that are no repeats of others, if `many` are repeats of one along each axis."""
    return [walk for walk in walks if not any(at % n for at, n in zip(walk.phase.origin, many, strict=True))]


def repeat_arguments(problem: ConvProblem, packed: PackedLayout, phases: int, many: Size3, filter_last: bool = False) -> Any:
    """The arguments of a launch in which `phases` phases take turns with their repeats. `filter_last`: the filter's second axis is last."""
    w_tap = filter_last_strides(problem)[2] if filter_last else 1
    pixel = problem.result_channels if problem.layout == "NHWC" else 1
    return arguments(
        Repeats, phases=phases, turns=phases * math.prod(many), along_r=many[1], along_s=many[2],
        **by_axis("tap_", row_major(packed.taps), "trs"), **by_axis("w_", [w_tap * n for n in row_major(problem.filter_size)], "trs"),
        **by_axis("y_", [pixel * n for n in row_major(problem.result_size)], "trs"),
    )  # fmt: skip


def tap_numbers(packed: PackedLayout, walk: PhaseAddressing) -> dict[str, int]:
    """Arguments: taps along r and s; the number of a phase's first tap in the packed filter, and its step along t, r and s."""
    _, r, s = packed.taps
    strides = (r * s, s, 1)
    step_t, step_r, step_s = (a * b for a, b in zip(walk.step, strides, strict=True))
    base = sum(a * b for a, b in zip(walk.base, strides, strict=True))
    taps = {"tap_r": max(walk.taps[1], 1), "tap_s": max(walk.taps[2], 1)}
    return taps | {"tap_base": base, "tap_step_t": step_t, "tap_step_r": step_r, "tap_step_s": step_s}


def arithmetic(problem: ConvProblem, phase: Phase, split: bool) -> dict[str, int]:
    """The defines that say what is multiplied and how it is stored, the same for every kernel on packed operands."""
    nhwc, dense = problem.layout == "NHWC", phase.step == (1, 1, 1)
    if nhwc:
        neighbours = problem.result_channels // problem.groups
    else:
        neighbours = math.prod(phase.size) * (problem.N if problem.layout == "CNHW" else 1) if dense else 1
    return {
        "PRODUCTS": products(problem), "BF16": int(problem.dtype == "bfloat16"), "OUT": FLOAT if split else ELEMENTS[problem.dtype],
        "NHWC": int(nhwc),
        "VEC": 4 if neighbours % 4 == 0 else 1, "DENSE": int(dense),
    }


#: The values of :func:`arithmetic`: float32 in fp32 and in tf32, float16 (whose split sums are stored as tf32's are), bfloat16, and its
#: split sums.
ARITHMETICS: tuple[dict[str, tuple[int, ...]], ...] = tuple(
    {
        "PRODUCTS": (count,), "BF16": (bf16,), "OUT": (out,), "NHWC": FLAG, "VEC": (1, 4), "DENSE": FLAG,
    }
    for count, bf16, out in ((3, 0, FLOAT), (1, 0, FLOAT), (1, 0, HALF), (1, 1, BFLOAT), (1, 1, FLOAT))
)  # fmt: skip


def written_so(d: Mapping[str, int]) -> bool:
    """Whether any result is stored so: in planes, pixels that are not contiguous have no neighbours."""
    return bool(d["NHWC"] or d["DENSE"] or d["VEC"] == 1)


#: The most texts, as an engine says it.
MOST_TEXTS = {"cuda": 124}


def texts(device: Device) -> Iterator[TextFamily]:
    """A text of pack.cu for each type and layout, and for each way to read images."""
    windows = device.capability >= (9, 0)
    clusters = (0, CLUSTER) if windows else (0,)
    for code, count in ((FLOAT, 2), (FLOAT, 1), (HALF, 1), (BFLOAT, 1)):
        choices = {
            "IN": (code,), "LIMBS": (count,), "NHWC": FLAG, "VECTOR": (1, 4), "EIGHTS": FLAG,
            "RANGE_CHECK": (1,) if code == FLOAT else FLAG if windows else (0,),
            "SAMPLE_SCALE": FLAG if code == FLOAT else (0,), "FILTER": FLAG, "FOLDED": FLAG, "CLUSTER": clusters,
        }  # fmt: skip
        yield TextFamily("pack", choices, _packs)


def _packs(d: Mapping[str, int]) -> bool:
    """Whether arrays are ever packed with these defines. As a filter only wgrad's in planes is, other gradients are not folded, and of
    16-bit arrays only windows are checked."""
    if d["FILTER"] and (d["NHWC"] or (d["IN"] == FLOAT and not d["SAMPLE_SCALE"])):
        return False
    if d["SAMPLE_SCALE"] and d["FOLDED"] and not d["FILTER"]:
        return False
    if d["IN"] != FLOAT and d["RANGE_CHECK"] and (d["FILTER"] or not d["FOLDED"] or d["EIGHTS"]):
        return False
    if d["CLUSTER"] and (not d["RANGE_CHECK"] or d["IN"] != FLOAT):
        return False
    return d["VECTOR"] == 1 or not (d["NHWC"] or d["FOLDED"])


def written_places(problem: ConvProblem, phase: Phase) -> dict[str, int]:
    """The arguments that say where a phase's pixels, and images and channels, lie in the result."""
    strides = written_strides(problem)
    names = ("out_size", "out_base", "out_d", "out_h", "out_w")
    return dict(zip(names, places(problem, phase), strict=True)) | {"out_image": strides.image, "out_row": strides.channel}


def packed_key(problem: ConvProblem, windows: bool = False) -> Hashable:
    """Equal for problems whose filter is packed alike, whatever their images."""
    packed, _ = packed_layout(problem, windows)
    asked = problem.direction, problem.dtype, problem.precision, problem.C, problem.K, problem.groups, problem.filter_size
    return (*asked, packed.folded, packed.group, packed.load, packed.taps, packed.window and packed.window.shift)


WINDOWED = 1.8  # relative time of packing images whose windows overlap
FITTING = 3e7  # bytes that the L2 cache keeps from one launch to the next
#: By the bytes of an element: bytes a microsecond that launches beside the product move, microseconds of each launch, and microseconds
#: that each block adds if it packs fewer than FEW pixels.
BESIDE = {8: (3.9e6, 0.75, 0.018), 4: (3.4e6, 0.7, 0.018), 2: (3.5e6, 0.75, 0.008)}
FEW = 32
SECTOR = 32  # bytes of memory that are read at once
#: Microseconds to pack a row of a filter, for each limb, besides its bytes; relative time of rows with folded taps; and of the bytes of
#: rows in parts.
FILTER_ROW, FOLDED_ROW, PARTED = 2.2e-3, 1.9, 2.4
#: For dgrad, whose filters are packed from taps that lie side by side: microseconds of a row; and elements of 64 rows that are packed in a
#: microsecond, all of which write to the same cache lines.
GRADIENT_ROW, GRADIENT_RATE = 6.5e-3, 52e3
#: For wgrad with folded taps, microseconds: of the launch that packs both operands, of each element that is read, of each limb that is
#: written for the images, of each block of the other operand, and of each image. Fitted to 19 times on an H100: error 14%.
FOLDED, FOLDED_READ, FOLDED_WRITTEN, FOLDED_BLOCK, FOLDED_IMAGE = 5.2, 4.6e-6, 0.5e-6, 13e-3, 8e-3
JOIN_TIME, JOIN_RATE = 1.9, 10.8e3  # microseconds of a block that adds the parts of its tile, and their bytes a microsecond


@lru_cache(maxsize=64)  # the planner asks for them once a configuration
def _filter_blocks(problem: ConvProblem, packed: PackedLayout) -> int:
    """Blocks of the launch that packs the filter as images are packed."""
    return _packed(problem, packed, True, True).blocks


@lru_cache(maxsize=256)  # the same for many tiles
def overhead(
    problem: ConvProblem, packed: PackedLayout, split: int, packs_filter: bool = True, joined: int = 0
) -> float:
    """Microseconds that all launches but the products should take, for the time models: packing, adding a split sum.

    `joined`: bytes of the parts that a block of the product adds, if no launch does.
    """
    moved = of_filter = 0.0
    if packs_filter:  # a tap's channels are filled up, and large filters are read from memory again
        packed_filter = 2.0 * limbs(problem) * 64 * packed.load * math.prod(filter_sizes(problem, packed)) * problem.groups
        moved = _read_filter(problem, packed) + packed_filter * (1 if packed_filter < FITTING else 2)
        of_filter = _filter_time(problem, packed)
    if not packed.as_is:
        images = math.prod(problem.input_shape) * problem.itemsize
        images += 2 * limbs(problem) * problem.N * math.prod(packed.stored) * packed.pixel * problem.groups
        moved += images * (WINDOWED if packed.window else 1)
    adding = 0.0
    if joined:
        moved += math.prod(problem.result_shape) * 4 * split
        adding = JOIN_TIME + joined / JOIN_RATE
    elif split > 1:
        moved += math.prod(problem.result_shape) * (8 * split + problem.itemsize)
        adding = 2.0
    few, (rate, launch_time, few_time) = 0.0, BESIDE[problem.itemsize]
    if problem.layout == "CNHW" and packed.level and not packed.as_is and problem.itemsize == 4:
        numbers = math.prod(problem.input_shape) + math.prod(problem.weight_shape)
        written = limbs(problem) * problem.N * math.prod(packed.stored) * packed.pixel * problem.groups
        blocks = FOLDED_BLOCK * _filter_blocks(problem, packed) + FOLDED_IMAGE * problem.N * problem.groups
        parts = math.prod(problem.result_shape) * (4 if joined else 8) * split if split > 1 else 0
        return adding + FOLDED + FOLDED_READ * numbers + FOLDED_WRITTEN * written + blocks + parts / rate
    if problem.layout == "CNHW" and math.prod(packed.taps) < FEW:  # blocks of the other operand have little to do
        few = few_time * _filter_blocks(problem, packed)
    launches = (2 if packs_filter else 0) + (2 if flagged(problem, packed) else 0) + (not packed.as_is)
    bytes_time = moved / rate
    both = math.hypot(bytes_time, of_filter) if problem.direction == "dgrad" else bytes_time + of_filter
    return adding + max(both, few) + launch_time * launches


def _filter_time(problem: ConvProblem, packed: PackedLayout) -> float:
    """Microseconds of packing a filter besides those of its bytes."""
    if problem.direction != "dgrad":
        return FILTER_ROW * limbs(problem) * problem.result_channels * (FOLDED_ROW if packed.level else 1)
    rows = problem.result_channels // problem.groups
    chains = math.prod(problem.weight_shape) * min(64, rows) / problem.result_channels / GRADIENT_RATE
    return max(GRADIENT_ROW * problem.result_channels, chains)


def _read_filter(problem: ConvProblem, packed: PackedLayout) -> float:
    """Bytes of a filter that packing it reads. A row of dgrad reads sectors, in which only the taps of one channel are its own."""
    taps = math.prod(problem.filter_size)
    if problem.direction != "dgrad":
        return math.prod(problem.weight_shape) * problem.itemsize * (PARTED if _filter_parts(problem, packed) > 1 else 1)
    return math.prod(problem.weight_shape) // taps * (taps * problem.itemsize + SECTOR - problem.itemsize)
