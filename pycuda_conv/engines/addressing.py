"""The packed layout that tensor loads can read, and the addresses at which each phase reads it.

:func:`packing` brings a problem into a form that tensor loads can make, and cuts it into phases (a forward convolution is one).
Other engines find here why no kernel on packed operands can run a problem, and the sizes of the packed filter.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache

from pycuda_conv.engines.geometry import Phase, ceil, phases, too_many_phases
from pycuda_conv.engines.tensor_cores import ELEMENTS, limbs
from pycuda_conv.problem import ConvProblem, Size3

#: Limits of TMA's im2col mode, by the number of spatial axes: corners (lowest, highest), and the largest offset of a tap.
CORNERS = {1: (-32768, 32767), 2: (-128, 127), 3: (-16, 15)}
OFFSETS = {1: 65535, 2: 255, 3: 31}
MOST_STRIDE = 8
MOST_PIXELS = 2**31 - 2**20  # kernels count pixels in 32 bits, up to the end of a tile
WORTH_FOLDING = 0.6  # folding pays below this part of the elements packed without it: if a stride steps over pixels, folding packs fewer
WORTH_FLAGS = 0.5e9  # multiplications of 16-bit numbers from which two short launches cost less than packing a window's rows one at a time


def size3(values: list[int]) -> Size3:
    d, h, w = values
    return d, h, w


@dataclass(frozen=True)
class Window:
    """Windows, for few channels: the pixels that a filter row reads are contiguous, and a load takes them for the channels of one pixel.

    The window of the next output pixel begins `stride` pixels further, so windows overlap, and no value is packed twice.
    """

    pixel: int  # packed channels of one: those of `rows` rows of the image, filled up to a multiple of 8
    rows: int  # the stride along H, if windows can have that many rows: then the filter has fewer rows, and no stride there
    shift: int  # rows of the first packed row that lie above the filter's first row
    wide: int  # pixels of a packed row, padding included
    covers_unused_rows: bool  # rows outside the filter: their weights are 0, and 0 x Inf is NaN, so such inputs need the range check


@dataclass(frozen=True)
class PackedLayout:
    """How a problem's operands are laid out for the tensor loads. `size` and `group` are as these see them."""

    as_is: bool  # the input needs no packing: it has 16 bits and its channels are last
    level: int  # how many of the innermost axes are folded while packing
    folded: Size3  # taps along each axis that packing turns into channels; 1 where the loads step through the taps
    size: Size3  # pixels (D, H, W) of a packed image
    group: int  # packed channels of a group
    load: int  # channels of a load: 64, 32 or 16
    taps: Size3  # (T, R, S) of the packed filter
    window: Window | None = None  # set if a load takes the channels of neighbouring pixels for those of one

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
    """What one phase reads of the packed image.

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
    spatial_dims: int
    flat: bool


def _channels_a_load(channels: int, whole: bool = False) -> int:
    """Channels of a load. With `whole` they divide `channels` if any choice does, so that no load reaches into the next group."""
    loads = [load for load in (64, 32, 16) if not whole or channels % load == 0] or [64, 32, 16]
    # a shorter row wastes less at the end of the channels, but loads more slowly
    return min(loads, key=lambda load: ceil(channels, load) * load * {64: 1.0, 32: 1.1, 16: 1.4}[load])


def phase_addressing(problem: ConvProblem, phase: Phase, packed: PackedLayout) -> PhaseAddressing | None:
    """What `phase` reads of images with the layout `packed`, or None if tensor loads can't do so."""
    _, taps, stride, low, dilation, base, step = (size3(list(values)) for values in zip(*map(phase.along, range(3)), strict=True))
    dilation = size3([max(n, 1) for n in dilation])
    trivial = [packed.size[i] == phase.size[i] and taps[i] <= 1 and stride[i] == 1 and low[i] == 0 for i in range(3)]
    flat = all(trivial) and packed.window is None
    of_line, of_plane = flat or (trivial[0] and trivial[1] and packed.size[:2] == (1, 1)), trivial[0] and packed.size[0] == 1
    spatial_dims = 1 if of_line else 2 if of_plane else 3
    if not flat:
        for i in range(3 - spatial_dims, 3):
            (lowest, highest), furthest = CORNERS[spatial_dims], OFFSETS[spatial_dims]
            upper = low[i] + (phase.size[i] - 1) * stride[i] - (packed.size[i] - 1)
            reach = (max(taps[i], 1) - 1) * dilation[i]
            if not lowest <= low[i] <= highest or not lowest <= upper <= highest or reach > furthest or stride[i] > MOST_STRIDE:
                return None
    return PhaseAddressing(phase, taps, stride, low, dilation, base, step, spatial_dims, flat)


@lru_cache(maxsize=1024)
def packing(problem: ConvProblem, windows: bool = False) -> tuple[PackedLayout, tuple[PhaseAddressing, ...]] | None:
    """How to pack the problem, and what its phases read; None if tensor loads can't do so in any form.

    With `windows` pixels may overlap in memory: Hopper's tensor loads allow it.
    """
    channels, wide = problem.operand_channels // problem.groups, problem.dtype == "float32"
    forward = problem.direction == "fprop"
    in_place = not wide and problem.layout == "NHWC"  # the loads can read it
    several = forward and problem.filter_size[2] > 1
    # with few channels most of a product would be zeros: so the innermost taps are folded
    first = 1 if several and channels < 16 else 0
    # with 16 channels none is zero, but one load of a window replaces a load of each of its pixels
    by_windows = several and channels == 16 and not in_place and max(problem.stride) == 1
    if windows and (first or by_windows) and _may_overlap(problem):
        packed, phase = _windows(problem)
        found = phase_addressing(problem, phase, packed)
        if found is not None and math.prod(packed.stored) < MOST_PIXELS:
            return packed, (found,)
    # wgrad: with two axes folded, a filter as large as images would leave a single pixel to pack, too little for a block
    levels = 2 if problem.layout == "CNHW" else 4 if forward else 1
    readable = in_place and channels % (8 if problem.groups == 1 else 16) == 0
    if levels == 4 and not first and not readable:
        # the level that packs much fewer elements than level 0: filters that step over pixels have one, as 1x1 filters with a stride
        elements = [math.prod(taps) * math.prod(size) for taps, size in (_folded(problem, level) for level in range(4))]
        first = elements.index(min(elements)) if min(elements) < WORTH_FOLDING * elements[0] else 0
    for level in range(first, levels):
        folded, size = _folded(problem, level)
        count = channels * math.prod(folded)
        load = _channels_a_load(count, in_place and problem.groups > 1 and level == 0)
        # a group's last load must not reach into the next group: Inf or NaN there would be multiplied by zero
        align = 8 if problem.groups == 1 else load
        as_is = level == 0 and readable
        taps = size3([n // f for n, f in zip(problem.filter_size, folded, strict=True)])
        packed = PackedLayout(as_is, level, folded, size, ceil(count, align) * align, load, taps)
        addressings = []
        for phase in phases(problem):
            if level:
                phase = _folded_phase(phase, level)
            addressing = phase_addressing(problem, phase, packed)
            if addressing is None:
                break
            addressings.append(addressing)
        else:
            return packed, tuple(sorted(addressings, key=lambda addressing: -math.prod(addressing.taps)))
    return None


def _folded(problem: ConvProblem, level: int) -> tuple[Size3, Size3]:
    """Taps along each axis and pixels (D, H, W) of an image if the innermost `level` axes are folded."""
    taps = size3([problem.filter_size[i] if i >= 3 - level else 1 for i in range(3)])
    return taps, size3([problem.output_size[i] if i >= 3 - level else problem.operand_size[i] for i in range(3)])


def _may_overlap(problem: ConvProblem) -> bool:
    """Whether windows can hold what the filter of `problem` reads: the channels of neighbouring pixels."""
    return problem.groups == 1 and problem.dilation[2] == 1 and problem.layout != "CNHW"


def _windows(problem: ConvProblem) -> tuple[PackedLayout, Phase]:
    """The packed layout and the only phase of a forward convolution with windows."""
    (phase,) = phases(problem)
    t, r, s = problem.filter_size
    rows = problem.stride[1] if problem.dilation[1] == 1 else 1
    unused = bool(problem.padding_before[1] % rows or r % rows)
    macs = problem.macs / max(problem.N, 1) if problem.batch_invariant else problem.macs  # rows of a window fix the order of sums
    if problem.itemsize == 2 and unused and macs < WORTH_FLAGS:
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


def filter_sizes(problem: ConvProblem, packed: PackedLayout) -> tuple[int, int, int]:
    """Blocks of 64 output channels of a group, taps, and blocks of channels of the packed filter."""
    written = problem.result_channels // problem.groups
    return ceil(written, 64), math.prod(packed.taps), ceil(packed.group, packed.load)


def row_blocks(problem: ConvProblem, packed: PackedLayout) -> int:
    """Blocks of channels of 64 rows of the packed filter. If a stage takes several, one block of zeros fills up the last stage."""
    _, taps, channel_blocks = filter_sizes(problem, packed)
    return taps * channel_blocks + (packed.load < 64)


def packed_key(problem: ConvProblem, windows: bool = False) -> Hashable:
    """Equal for problems whose filter is packed alike, whatever their images."""
    packed, _ = packed_layout(problem, windows)
    asked = problem.direction, problem.dtype, problem.precision, problem.C, problem.K, problem.groups, problem.filter_size
    return (*asked, packed.folded, packed.group, packed.load, packed.taps, packed.window and packed.window.shift)
