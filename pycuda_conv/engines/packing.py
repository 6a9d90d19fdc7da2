"""Operands packed as 16-bit limbs (``cu/layout/pack.cu``): the arrays, and the launches that pack them.

float32 arrays become fp16 limbs, two for ``precision="fp32"`` and one for ``"tf32"``. float16 and bfloat16 arrays keep their values.
Packing also finds the values that limbs cannot hold. The results that depend on them are computed once more in plain fp32, on the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pycuda_conv.engines.addressing import PackedLayout, filter_sizes, flagged, packed_layout, row_blocks, size3
from pycuda_conv.engines.base import FLAG, VariantSet, kernel_struct
from pycuda_conv.engines.geometry import (
    Strides,
    arguments,
    by_axis,
    ceil,
    filter_strides,
    near_sides,
    read_strides,
    shown_once,
)
from pycuda_conv.engines.range_guard import slack
from pycuda_conv.engines.schedule import INPUT, PACKED, WEIGHT, Arena
from pycuda_conv.engines.tensor_cores import BFLOAT, ELEMENTS, FLOAT, HALF, limbs
from pycuda_conv.problem import ConvProblem, Size3
from pycuda_conv.runtime.base import BufferSlice, Device, KernelLaunch

PACK_THREADS = 256
MOST_VARIANTS = {"cuda": 160}  # texts, as an engine says it
PACK_PIXELS = 4  # pixels, 8 channels of each, that a thread packs at once if an image has so many
PACK_APART = 2  # the same if taps are folded or channels are last: then each pixel has addresses of its own
SLOTS = 4  # the most blocks a multiprocessor that finalize scales
CLUSTER = 8  # blocks of a cluster: images of up to so many tiles have their scale finalized while they are packed
WARPS = PACK_THREADS // 32
MANY_ROWS = 2  # rows of a filter a multiprocessor: from so many on, warps pack them, if they are short
NEIGHBOUR_ROWS = 4  # rows of a filter that are neighbours in memory and packed by one block
ROWS_ROOM = 7168  # words of shared memory for the rows of a filter that a block's warps pack, beside one word every eight channels
FILTER_ROOM = 11264  # words of shared memory for a row of a filter: four such blocks fit a multiprocessor
NOWHERE: tuple[int, int] = (INPUT, 0)  # the place of what a launch does not have


@dataclass(frozen=True)
class Operands:
    """The packed operands: where they, their scales and flags lie, and the launches that make them.

    `prepare` packs the filter, `images` packs the images, `both` packs the two in as few launches. Packing the images also sets to zero the
    `tickets` of blocks that add the parts of split sums. Packing blocks share tiles with one another, and the
    product clears these: `tiles` is their number for the images, plus 2^32 times that for a filter that was packed as images are.
    """

    x_limbs: tuple[int, int]
    x_scales: tuple[int, int]
    x_flags: tuple[int, int]
    w_limbs: tuple[int, int]
    w_scales: tuple[int, int]
    w_flags: tuple[int, int]
    tickets: tuple[int, int]
    x_tiles: BufferSlice
    w_tiles: BufferSlice
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
        return self.in_clusters(self.arguments.lines * (self.arguments.each or self.tiles)) + self.scale_blocks

    @property
    def scale_blocks(self) -> int:
        """The last of these blocks, which finalize scales."""
        return self.images * self.arguments.slices

    @property
    def clustered(self) -> bool:
        """Whether the blocks of a cluster finalize the scale of their image, without others."""
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

    def finalize_scales(self, clusters: bool, multiprocessors: int) -> PackedArray:
        """The same with blocks that finalize scales: one for an image guessed right, many if a few images may have to be packed
        again, which one block alone would do slowly. (16-bit images are only checked, never packed again.) Clusters do so alone."""
        array = self.in_cluster() if clusters else self
        if not array.defines["RANGE_CHECK"] or array.clustered:
            return array
        slices = max(1, min(array.tiles, SLOTS * multiprocessors // array.images)) if array.defines["IN"] == FLOAT else 1
        return replace(array, arguments=arguments(PackArguments, array.arguments, slices=slices))

    def scale_places(self, scratch: Arena, scales: BufferSlice, flags: BufferSlice) -> tuple[BufferSlice, ...]:
        """Where a launch writes scales and flags; and, without clusters, the extremes of tiles, which get a place in `scratch`."""
        if self.clustered:
            return scales, flags
        return scales, flags, scratch.take(16 * self.images * self.tiles) if self.scale_blocks else NOWHERE


def adds_border(source: ConvProblem, problem: ConvProblem, windows: bool) -> bool:
    """Whether packing the image of `source`, which has a border, can write the wider image of `problem`, its :attr:`ConvProblem.padded`.

    `windows`: see :func:`packing`.
    """
    if source.direction == "dgrad":
        return False
    packed, _ = packed_layout(problem, windows)
    return problem == source.padded and not (packed.level or packed.as_is or packed.window)


def packed_array(
    problem: ConvProblem, packed: PackedLayout, gradient: bool, as_filter: bool, source: ConvProblem | None = None
) -> PackedArray:
    """The images of `problem`, or with `as_filter` its filter packed as images are. With `gradient` float32's scale is sampled.

    With `source` its image is read instead: see :func:`adds_border`.
    """
    groups, count = problem.groups, limbs(problem)
    blocks, taps, channel_blocks = filter_sizes(problem, packed)
    read, written = problem.operand_channels // groups, problem.result_channels // groups
    w_group, w_row, w_channel, _ = filter_strides(problem)
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
        if source is not None:
            size = packed_size = source.operand_size
            strides = read_strides(source)
    vector, tile = _tiles(problem, packed, size, math.prod(packed_size) + (as_filter and packed.load < 64), groups * group // 8)
    checked = flagged(problem, packed)
    eights = read % 8 == 0 and (problem.dtype == "float32" or not checked)  # windows of 16 bits are seldom checked, so they have one text
    defines = {
        "IN": ELEMENTS[problem.dtype], "LIMBS": count, "NHWC": int(problem.layout == "NHWC"), "VECTOR": vector, "EIGHTS": int(eights),
        "RANGE_CHECK": int(checked), "SAMPLE_SCALE": int(gradient and problem.dtype == "float32"), "FILTER": int(as_filter),
        "FOLDED": int(packed.level > 0), "CLUSTER": 0, **({} if source is None else {"BORDERED": 1}),
    }
    fitting, pieces = _fitting(problem, packed), packed.load // 8
    args = arguments(
        PackArguments, filter_rows=0, row_bits=0, images=images, lines=lines, **tile, slices=0, groups=groups, group_chunks=group // 8,
        channels=read, slack=slack(problem), too_small=1 + problem.batch_invariant, each=0, **dict(zip("dhw", size, strict=True)),
        x_image=strides.image, x_group=strides.group, x_channel=strides.channel, x_pixel=strides.pixel, **by_axis("packed_", packed_size),
        **_columns(problem, not as_filter and not packed.level and source is None), **_border(source), folds=math.prod(packed.folded),
        fold_r=packed.folded[1], fold_s=packed.folded[2], **by_axis("stride_", steps), **by_axis("pad_", pads),
        **by_axis("dilation_", dilations), rows_group=written, padded_group=64 * blocks, w_group=w_group, w_m=w_row, w_c=w_channel, w_tap=1,
        taps=taps, all_taps=all_taps, piece_bits=(pieces - 1).bit_length(), channel_blocks=channel_blocks,
        row_blocks=row_blocks(problem, packed), row_pieces=channel_blocks * pieces, fitting=fitting, part_pieces=fitting // 8,
        parts=filter_parts(problem, packed), window=packed.pixel if packed.window else 0, shift=packed.window.shift if packed.window else 0,
        packed_r=packed.taps[1], filter_r=r, filter_s=s, tickets=0,
    )  # fmt: skip
    straight = problem.layout == "NHWC" and (not packed.level or eights)  # nothing is transposed in shared memory
    return PackedArray(defines, args, 0 if straight else 16 * count * _thread_pixels(problem, packed) * PACK_THREADS,
                       ceil(4 * (fitting * all_taps + ceil(fitting, 8)), 16) * 16)  # fmt: skip


def _columns(problem: ConvProblem, strided: bool) -> dict[str, int]:
    """Which columns of an image are packed. If the loads make the stride, columns that it steps over with all taps are not."""
    step = problem.stride[2] if strided and problem.direction == "fprop" else 1
    met = {tap * problem.dilation[2] % step for tap in range(min(problem.filter_size[2], step))}  # later taps read the same columns
    if len(met) == step:
        step, met = 1, {0}
    return {"step_w": step, "first_w": problem.padding_before[2] % step, "met_w": sum(1 << column for column in met)}


def _border(source: ConvProblem | None) -> dict[str, int]:
    """The border that is packed around the image of `source`."""
    if source is None:
        names = "wide_", "before_", "after_", "side_", "last_side_", "box_", "inside_"
        return {name + axis: 0 for name in names for axis in "dhw"}
    boxes = shown_once(source)
    before, after = source.border_sizes
    return {
        **by_axis("wide_", source.padded.operand_size), **by_axis("before_", before), **by_axis("after_", after),
        **(near_sides(source) or {}), **by_axis("box_", [first for first, _ in boxes]), **by_axis("inside_", [count for _, count in boxes]),
    }


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
    per_tap = 0
    if problem.layout == "NCHW" and packed.window is None and problem.groups == 1 and channels % 8 == 0 and 1 < folds <= 4:
        per_tap = 8 if folds == 2 else 4
    # if there are few pixels, too, a tile has room for more channels
    most = 16 if per_tap or (planes and pixels <= PACK_THREADS * PACK_PIXELS // 16) else 8
    at_once = most if per_tap else min(most, 1 << (chunks - 1).bit_length())
    vector = PACK_PIXELS if planes and math.prod(size) % PACK_PIXELS == 0 else 1
    across = ceil(channels // 8, per_tap) if per_tap else ceil(chunks, at_once)
    tiles = ceil(pixels, PACK_THREADS * _thread_pixels(problem, packed) // at_once) * across
    bits = {"chunk_bits": (at_once - 1).bit_length(), "chunks_per_tap": per_tap, "chunks_per_tap_bits": max(per_tap - 1, 0).bit_length()}
    return vector, {"tiles": tiles, "tiles_c": across, **bits}


def _fitting(problem: ConvProblem, packed: PackedLayout) -> int:
    """Channels of a filter's row that fit shared memory at a time, with one more word for every 8."""
    taps, step = math.prod(problem.filter_size), 1 if packed.level else 8
    return min(problem.operand_channels // problem.groups, (FILTER_ROOM - FILTER_ROOM // (8 * taps)) // taps // step * step)


def filter_parts(problem: ConvProblem, packed: PackedLayout) -> int:
    """Blocks that pack a row of the filter: if the row does not fit shared memory, each takes as many channels as fit."""
    fitting, (*_, channel_blocks) = _fitting(problem, packed), filter_sizes(problem, packed)
    whole = packed.level or fitting in (0, problem.operand_channels // problem.groups)
    return 1 if whole else ceil(channel_blocks * packed.load, fitting)


def packs_filter_last(problem: ConvProblem) -> bool:
    """Whether a filter with its second axis last, as in a channels-last model, is packed from that layout."""
    return problem.layout == "NHWC" and math.prod(problem.filter_size) > 1


def pack_operands(
    problem: ConvProblem, packed: PackedLayout, scratch: Arena, multiprocessors: int, filter_last: bool, clusters: bool, tickets: int,
    source: ConvProblem | None = None,
) -> Operands:
    """The launches that pack the operands, the images into `scratch`. `clusters`: the GPU has them. `tickets` words are set to zero.

    With `source` its image is packed with its border: see :func:`adds_border`.
    """
    count, written = limbs(problem), problem.result_channels
    kept = Arena(PACKED)
    filter_rows = problem.groups * filter_sizes(problem, packed)[0] * 64
    w_limbs = kept.take(2 * count * filter_rows * row_blocks(problem, packed) * packed.load)
    w_scales, w_flags = kept.take(4 * written), kept.take(4 * written)
    x_limbs = x_scales = x_flags = NOWHERE
    images = packed_array(problem, packed, problem.direction == "dgrad", False, source)
    if not packed.as_is:
        images = images.finalize_scales(clusters, multiprocessors)
        x_limbs = scratch.take(2 * count * problem.N * math.prod(packed.stored) * problem.groups * packed.pixel)
        if flagged(problem, packed):
            x_scales, x_flags = scratch.take(4 * problem.N), scratch.take(4 * problem.N)
    of_images, tiles = images.scale_places(scratch, x_scales, x_flags), _shared_tiles(images)
    x_tiles: BufferSlice = of_images[-1] if tiles else NOWHERE
    w_tiles: BufferSlice = NOWHERE
    tickets_at = scratch.take(4 * tickets) if tickets else NOWHERE

    images, row_packers = _with_filter(problem, packed, images, filter_rows, filter_last, multiprocessors)
    buffers = (INPUT, WEIGHT, x_limbs, *of_images, w_limbs, w_scales, w_flags, tickets_at)

    def pack(rows: int, blocks: int) -> list[list[KernelLaunch]]:
        return [[_pack_beside(images, buffers, rows, blocks, tickets)]]

    if problem.layout == "CNHW":  # wgrad: the filter is as large as the images
        rows = packed_array(problem, packed, True, True).finalize_scales(clusters, multiprocessors)
        of_rows = rows.scale_places(kept, w_scales, w_flags)
        tiles, w_tiles = tiles + (_shared_tiles(rows) << 32), of_rows[-1] if rows.scale_blocks else NOWHERE
        of_filter = (WEIGHT, WEIGHT, w_limbs, *of_rows, w_limbs, w_scales, w_flags, NOWHERE)
        one = arguments(PackArguments, rows.arguments, slices=min(rows.arguments.slices, 1))  # no product follows to clear the tiles
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
    _, w_m, w_c, w_tap = filter_strides(problem, filter_last)
    args, channels = images.arguments._replace(w_m=w_m, w_c=w_c, w_tap=w_tap), problem.operand_channels // problem.groups
    short = args.fitting == channels and WARPS * channels * math.prod(problem.filter_size) <= ROWS_ROOM  # one for each warp of a block fits
    if args.w_m == 1 and not packed.level and written // problem.groups % NEIGHBOUR_ROWS == 0:  # without shared memory
        args = arguments(PackArguments, args, fitting=0, part_pieces=0, parts=1, row_bits=NEIGHBOUR_ROWS.bit_length() - 1)
        shared = 0
    elif written >= MANY_ROWS * multiprocessors and short:
        args = args._replace(row_bits=WARPS.bit_length() - 1)
        shared *= WARPS
    else:
        rows *= filter_parts(problem, packed)
    return replace(images, arguments=args, filter_shared=shared), rows


def _pack_beside(images: PackedArray, buffers: tuple[BufferSlice, ...], rows: int, blocks: int, tickets: int) -> KernelLaunch:
    """The launch that packs so many `rows` of the filter, and the images in so many `blocks`; either may be 0."""
    args = images.arguments._replace(filter_rows=rows, tickets=tickets if blocks else 0)
    if not blocks:
        args = arguments(PackArguments, args, slices=0)
    shared = max(images.shared if blocks else 0, images.filter_shared if rows else 0)
    grid = images.in_clusters(rows >> args.row_bits) + blocks  # all blocks of a cluster pack images, or all pack the filter
    return KernelLaunch("pack", images.defines, grid, PACK_THREADS, buffers, (), shared=shared, arguments=args)


def _pack_alone(array: PackedArray, buffers: tuple[BufferSlice, ...]) -> KernelLaunch:
    """The launch that packs an array alone."""
    return KernelLaunch("pack", array.defines, array.blocks, PACK_THREADS, buffers, (), shared=array.shared, arguments=array.arguments)


def _shared_tiles(images: PackedArray) -> int:
    """Tiles that several blocks share to finalize an image's scale. If a single block does so, it clears them itself."""
    return images.images * images.tiles if images.arguments.slices > 1 else 0


def variants(device: Device) -> Iterator[VariantSet]:
    """A text of pack.cu for each type and layout, and for each way to read images."""
    windows = device.capability >= (9, 0)
    clusters = (0, CLUSTER) if windows else (0,)
    for code, count in ((FLOAT, 2), (FLOAT, 1), (HALF, 1), (BFLOAT, 1)):
        choices = {
            "IN": (code,), "LIMBS": (count,), "NHWC": FLAG, "VECTOR": (1, 4), "EIGHTS": FLAG,
            "RANGE_CHECK": (1,) if code == FLOAT else FLAG if windows else (0,),
            "SAMPLE_SCALE": FLAG if code == FLOAT else (0,), "FILTER": FLAG, "FOLDED": FLAG, "CLUSTER": clusters,
        }  # fmt: skip
        yield VariantSet("pack", choices, _packs)
        images = {"SAMPLE_SCALE": (0,), "FILTER": (0,), "FOLDED": (0,), "BORDERED": (1,)}
        yield VariantSet("pack", choices | images | ({} if code == FLOAT else {"RANGE_CHECK": (0,), "CLUSTER": (0,)}), _packs)


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
