"""Geometry that the engines share: how arrays lie in memory, and how transposed convolutions become forward ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from struct import pack, unpack
from typing import Any, NamedTuple, TypeVar

from pycuda_conv import borders
from pycuda_conv.problem import ConvProblem, Size3

T = TypeVar("T")


def ceil(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def even_parts(count: int, wanted: Iterable[int]) -> list[int]:
    """How many parts of the same length `count` things may be cut into: about each of the `wanted` numbers, and none twice."""
    return sorted({ceil(count, ceil(count, min(parts, count))) for parts in wanted})


def batches(things: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    """Up to `most` neighbouring things at a time, one behind the other."""
    return (things[first : first + most] for first in range(0, len(things), most))


def divider(d: int) -> int:
    """The divisor `d`, from 0 to 2^31, as kernels take it (``cu/core/division.cuh``): a multiplier in the lower 32 bits, a shift above.

    0, the size of an empty axis, counts as 1: no launched block divides by it.
    """
    if not 0 <= d <= 2**31:
        raise ValueError(f"d must be from 0 to 2^31, got {d}")
    d = max(d, 1)
    shift = (d - 1).bit_length()
    return shift << 32 | (2**32 * (2**shift - d) // d + 1)


def bits(value: float, nbytes: int) -> int:
    """The bits of `value`, a number of 4 or 8 bytes, as an integer argument."""
    return int(unpack("q", pack("d", value))[0] if nbytes == 8 else unpack("i", pack("f", value))[0])


def from_bits(number: int, nbytes: int) -> float:
    """The inverse of :func:`bits`."""
    return float(unpack("d", pack("q", number))[0] if nbytes == 8 else unpack("f", pack("i", number))[0])


def by_axis(prefix: str, values: Sequence[int], axes: str = "dhw") -> dict[str, int]:
    """`values`, one for each of `axes`, as arguments of a kernel."""
    return {prefix + axis: value for axis, value in zip(axes, values, strict=True)}


def row_major(size: tuple[int, int, int]) -> tuple[int, ...]:
    """Strides, in elements, of an array of `size` in C order."""
    _, h, w = size
    return h * w, w, 1


def arguments(struct: Any, *sources: Any, **numbers: int) -> Any:
    """The `struct`, a NamedTuple, of these numbers.

    A missing member has the value of that name in the last of the `sources` that has one: mappings, named tuples, dataclasses, problems
    (:func:`_said_of`) and phases (:func:`_said_of_phase`). ``by_<name>`` is the :func:`divider` of ``<name>``, which need not be a member;
    of a number that is given, that of a source does not count.
    """
    unknown = [name for name in numbers if name not in struct._fields and f"by_{name}" not in struct._fields]
    if unknown:
        raise TypeError(f"{struct.__name__} has no {', '.join(unknown)}")
    known: dict[str, int] = {}
    for one in sources:
        if isinstance(one, ConvProblem | Phase):
            known |= _said_of(one) if isinstance(one, ConvProblem) else _said_of_phase(one)
        else:
            known |= one if isinstance(one, Mapping) else one._asdict() if isinstance(one, tuple) else vars(one)  # type: ignore[attr-defined]
    known = {name: value for name, value in known.items() if name.removeprefix("by_") not in numbers} | numbers
    return struct(*(
        int(known[name]) if name in known or not name.startswith("by_") else divider(max(known[name[3:]], 1)) for name in struct._fields
    ))  # fmt: skip


@lru_cache(maxsize=64)
def _said_of(problem: ConvProblem) -> dict[str, int]:
    """What a problem has of the members' names: sizes by their letters or words, x_ and y_ for strides of what is read and written."""
    (depth, height, width), (o, p, q), (t, r, s) = problem.operand_size, problem.result_size, problem.filter_size
    channels, rows, plane, size = problem.operand_channels, problem.result_channels, o * p * q, math.prod(problem.result_shape)
    found = {
        "n": problem.N, "c": channels, "k": rows, "groups": problem.groups, "channels": channels, "rows": rows, "o": o, "p": p, "q": q,
        "t": t, "r": r, "s": s, "taps": t * r * s, "rs": r * s, "d": depth, "h": height, "w": width, "hw": height * width, "depth": depth,
        "height": height, "width": width, "multiplier": problem.K // max(problem.C, 1), "plane": plane, "pq": p * q, "load_plane": plane,
        "load_pq": p * q, "load_q": q, "pixels": problem.N * plane, "size": size, "part_size": size,
    }  # fmt: skip
    found |= by_axis("stride_", problem.stride) | by_axis("pad_", problem.padding_before)
    found |= by_axis("dil_", problem.dilation) | by_axis("dilation_", problem.dilation)
    for prefix, strides in (("x_", read_strides(problem)), ("y_", written_strides(problem))):
        found |= {prefix + name: step for name, step in vars(strides).items()}
    return found | (near_sides(problem) or {}) | finish(problem)


def _said_of_phase(phase: Phase) -> dict[str, int]:
    """What a phase has of the members' names: its pixels and its taps by their letters, and what each pixel reads."""
    (o, p, q), (t, r, s) = phase.size, phase.taps
    found = {"plane": o * p * q, "pq": p * q, "p": p, "q": q, "taps": t * r * s, "rs": r * s, "r": r, "s": s}
    found |= by_axis("stride_", phase.stride) | by_axis("pad_", phase.pad)
    return found | by_axis("dil_", phase.dilation) | by_axis("dilation_", phase.dilation)


def finish(problem: ConvProblem, split: bool = False) -> dict[str, int]:
    """The arguments that ``epilogue.cuh`` and ``finish.cuh`` read. In launches for parts of a split sum they are 0: the sum gets them."""
    activation, slope = problem.activation_and_slope
    asked = {
        "has_scale": 2 if problem.float_scale else int(problem.has_scale), "has_bias": int(problem.has_bias), "activation": activation,
        "slope": bits(slope, accumulator_bytes(problem)), "has_residual": int(problem.has_residual),
    }  # fmt: skip
    return dict.fromkeys(asked, 0) if split else asked


def accumulator_bytes(problem: ConvProblem) -> int:
    """Bytes of one sum."""
    return 8 if problem.dtype == "float64" else 4


@lru_cache(maxsize=1024)  # the planner asks for it once a configuration
def forward_of(problem: ConvProblem) -> ConvProblem:
    """The channels-last convolution whose wgrad `problem` is. It undoes what :attr:`ConvProblem.launched` did."""
    return replace(
        problem, layout="NHWC", N=problem.C // problem.groups, C=problem.N * problem.groups, filter_size=problem.output_size,
        output_size=problem.filter_size, stride=problem.dilation, dilation=problem.stride,
    )  # fmt: skip


def pixel_by_pixel(problem: ConvProblem) -> bool:
    """Whether a pixel of the result meets the same pixel of the input alone: a 1x1 filter without stride and padding."""
    ones = (1, 1, 1)
    alike = problem.filter_size == problem.stride == ones and problem.operand_size == problem.result_size
    return alike and not any(problem.padding_before)


def needs_64_bits(problem: ConvProblem, parts: int = 0) -> bool:
    """Whether offsets need 64 bits: into the arrays, or into `parts` elements of a workspace or pixels of slices."""
    # offsets are formed a little past the end of an array (a tile's tail, a tap outside the image) before they are checked
    slack = math.prod(problem.input_size) + math.prod(problem.output_size) + 2**20
    return max(problem.largest_array, parts) + slack >= 2**31


# ---- how arrays lie in memory


@dataclass(frozen=True)
class Strides:
    """Strides of an array of images, in elements: of an image, a group, a channel of a group, and a pixel."""

    image: int
    group: int
    channel: int
    pixel: int


def read_strides(problem: ConvProblem) -> Strides:
    """Strides of the first operand."""
    return _strides(problem, problem.operand_channels // problem.groups, math.prod(problem.operand_size), True)


def written_strides(problem: ConvProblem) -> Strides:
    """Strides of the result."""
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


def filter_strides(problem: ConvProblem, last: bool = False) -> tuple[int, int, int, int]:
    """Strides of the filter, in elements: of a group, of a channel of the result, of a channel of the input, and of a tap.

    `last`: the filter's second axis is last in memory. In C order taps are contiguous.
    """
    taps, groups = math.prod(problem.filter_size), problem.groups
    read, written = problem.operand_channels // groups, problem.result_channels // groups
    if problem.layout == "CNHW":
        return written * taps, taps, groups * written * taps, 1
    width = problem.weight_shape[1]
    first, second, tap = width * taps, 1 if last else taps, width if last else 1
    return (written * read * taps, *((first, second) if problem.direction == "fprop" else (second, first)), tap)


# ---- borders


def border_words(problem: ConvProblem) -> tuple[str, str, str] | None:
    """The mode of each axis' border; None where one has two modes. Sides without padding have any."""
    found = []
    for pair, *padding in zip(problem.border or borders.NONE, problem.padding_before, problem.padding_after, strict=True):
        words = {word for word, n in zip(pair, padding, strict=True) if n > 0}
        if len(words) > 1:
            return None
        found.append(words.pop() if words else "zeros")
    d, h, w = found
    return d, h, w


def border_numbers(problem: ConvProblem, axes: str = "dhw") -> dict[str, int]:
    """The arguments of kernels that read borders of :func:`border_words` (``cu/core/border.cuh``), for some of the axes."""
    words, near = border_words(problem) or ("zeros",) * 3, True
    found = {"value": bits(problem.border_value, accumulator_bytes(problem))}
    paddings = zip(problem.padding_before, problem.padding_after, strict=True)
    for axis, word, n, padding in zip("dhw", words, problem.input_size, paddings, strict=True):
        if axis in axes:
            (first, step, reach), (last, *_) = borders.near(word, n, False), borders.near(word, n, True)
            found |= {f"{name}_{axis}": value for name, value in borders.alike(word, n, padding[0])._asdict().items()}
            found |= {f"fills_{axis}": borders.side(word, n).fills, f"near_{axis}": first, f"last_near_{axis}": last, f"step_{axis}": step}
            near = near and max(padding) <= reach
    return found | {"bordered": 0 if problem.border is None else 1 if near else 2}


def goes_near(problem: ConvProblem) -> bool:
    """Whether the image's border is one of :func:`border_words` that goes on no further than to the image's other end."""
    return border_words(problem) is not None and border_numbers(problem)["bordered"] < 2


def wraps(problem: ConvProblem) -> bool:
    """Whether a gradient by the input is that of a convolution among zeros of a gradient by the result that wraps, too."""
    words = border_words(problem)
    if words is None or problem.direction != "dgrad" or problem.border is None or not goes_near(problem):
        return False
    axes = zip(words, problem.padding_before, problem.padding_after, problem.stride, problem.dilation, problem.filter_size, strict=True)
    for word, before, after, stride, dilation, taps in axes:
        as_large = stride == 1 and before + after == dilation * (taps - 1)
        if word != "zeros" and (before or after) and not (word == "circular" and as_large):
            return False
    return True


MOST_NEAR = 2**27  # pixels of an axis whose places fit a near side's number


def near_sides(problem: ConvProblem) -> dict[str, int] | None:
    """What stands at each side of each axis, as arguments of kernels that include ``cu/core/near_border.cuh``.

    None if a side is filled with a number, or goes on beyond the image's other end.
    """
    found = {}
    paddings = zip(problem.padding_before, problem.padding_after, strict=True)
    for axis, n, words, pads in zip("dhw", problem.input_size, problem.border or borders.NONE, paddings, strict=True):
        for prefix, word, padding in zip(("side_", "last_side_"), words, pads, strict=True):
            start, step, reach = borders.near(word, n, prefix == "last_side_")
            if word == "constant" or (word != "zeros" and (padding > reach or n >= MOST_NEAR)):
                return None
            found[prefix + axis] = 3 if word == "zeros" or padding <= 0 else 4 * start + step + 1
    return found


def side_numbers(size: Sequence[int], border: Sequence[tuple[str, str]], axes: str = "dhw") -> dict[str, int]:
    """What ``cu/core/border.cuh`` knows of both sides of some axes of this `size`, whatever they show."""
    found: dict[str, int] = {}
    for axis, n, words in zip(axes, size, border, strict=True):
        for prefix, word in zip(("", "last_"), words, strict=True):
            found |= {f"{prefix}{name}_{axis}": value for name, value in borders.side(word, n)._asdict().items()}
    return found


#: The same for an image without a border.
NO_SIDES = {f"{name}{axis}": 0 for name in ("side_", "last_side_") for axis in "dhw"}


def shown_once_along(n: int, words: tuple[str, str], before: int, after: int) -> tuple[int, int]:
    """The first and the number of neighbouring pixels of an axis that its border shows nowhere."""
    low, high = 0, n
    for last, (word, padding) in enumerate(zip(words, (before, after), strict=True)):
        if padding <= 0 or word in borders.FILLED:
            continue
        if padding > borders.near(word, n, False)[2]:
            return n, 0
        # the pixels that this side shows, counted from its edge; those of the other edge if it wraps
        reach = {"replicate": 1, "symmetric": padding, "reflect": padding + 1, "circular": padding}[word]
        if bool(last) == (word == "circular"):
            low = max(low, reach)
        else:
            high = min(high, n - reach)
    return (low, high - low) if high > low else (n, 0)


def shown_once(problem: ConvProblem) -> list[tuple[int, int]]:
    """The same for each axis of a problem's image and the part of its border that is copied."""
    axes = zip(problem.input_size, problem.border or borders.NONE, *problem.border_sizes, strict=True)
    return [shown_once_along(*axis) for axis in axes]


# ---- dgrad as forward convolutions

MOST_PHASES = 1024  # phases that engines may launch although few have taps: each launch takes about a microsecond
MOST_WALKED = 2**16  # phases for which plans are made phase by phase; more take seconds


class PhaseAxis(NamedTuple):
    """One axis of a phase: pixel j reads j * stride + low + i * dilation by tap i, which is tap base + i * step of the filter."""

    size: int
    taps: int
    stride: int
    low: int
    dilation: int
    base: int
    step: int


@dataclass(frozen=True)
class Phase:
    """A part of the result that a stride-1 convolution with some of the taps computes.

    `size` pixels (O, P, Q) from `origin` on, `step` apart; taps (T, R, S), tap i of which is tap `first` + i * `every` of the filter.
    Pixel j reads j * stride - `pad` + i * `dilation` by tap i. A forward convolution is one phase.
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

    def along(self, i: int) -> PhaseAxis:
        """One axis, with the taps in the order of the pixels that they read: those of dgrad step back."""
        taps, low, dilation, base, every = self.taps[i], -self.pad[i], self.dilation[i], self.first[i], self.every[i]
        if dilation < 0:
            low, base, dilation, every = low + (taps - 1) * dilation, base + (taps - 1) * every, -dilation, -every
        return PhaseAxis(self.size[i], taps, self.stride[i], low, dilation, base, every)

    @classmethod
    def of_axes(cls, axes: Sequence[Sequence[int]]) -> Phase:
        """The phase that has along each axis these values, as :func:`axis_phases` gives them."""
        return cls(*((d, h, w) for d, h, w in zip(*axes, strict=True)))


def taps_apart(problem: ConvProblem) -> Size3:
    """Along each axis, the taps from one that an input pixel meets to the next."""
    d, h, w = (stride // math.gcd(stride, dilation) for stride, dilation in zip(problem.stride, problem.dilation, strict=True))
    return d, h, w


def outputs_apart(problem: ConvProblem) -> Size3:
    """Along each axis, the output pixels from the one that a tap meets back to the one that the next such tap meets."""
    d, h, w = (dilation // math.gcd(stride, dilation) for stride, dilation in zip(problem.stride, problem.dilation, strict=True))
    return d, h, w


def _axis_phases(size: int, taps: int, stride: int, pad: int, dilation: int, with_taps: bool) -> list[tuple[int, ...]]:
    """Phases of one axis of dgrad, or only those with taps.

    Pixel a + stride*i meets tap r at output (a + pad - r*dilation) / stride + i.
    """
    found: list[tuple[int, ...]] = []
    every = stride // math.gcd(stride, dilation)
    first_taps = {(r * dilation - pad) % stride: r for r in range(min(taps, every))}
    for a in sorted(a for a in first_taps if a < size) if with_taps else range(min(stride, size)):
        pixels, first = ceil(size - a, stride), first_taps.get(a)
        if first is None:
            found.append((pixels, a, stride, 0, 0, 1, 1, 0, 0))
        else:
            start = (a + pad - first * dilation) // stride
            found.append((pixels, a, stride, ceil(taps - first, every), first, every, 1, -start, -(every * dilation // stride)))
    return found


@lru_cache(maxsize=64)  # the planner asks for them once a configuration
def phases(problem: ConvProblem) -> tuple[Phase, ...]:
    """The forward convolutions that make up the problem: one for fprop, one for each combination of stride phases for dgrad.

    If :func:`few_have_taps`, the first one is the whole result without taps, and the others, which have taps, write their pixels once more.
    """
    zero, one = (0, 0, 0), (1, 1, 1)
    if problem.direction == "fprop":
        whole = Phase(
            problem.output_size, zero, one, problem.filter_size, zero, one, problem.stride, problem.padding_before, problem.dilation,
        )
        return (whole,)
    few = few_have_taps(problem)
    combinations = product(*axis_phases(problem, with_taps=few))
    found = tuple(map(Phase.of_axes, combinations))
    return (Phase(problem.result_size, zero, one, zero, zero, one, one, zero, zero), *found) if few else found


def axis_phases(problem: ConvProblem, with_taps: bool = False) -> list[list[tuple[int, ...]]]:
    """For each axis, what :class:`Phase` has of dgrad's phases along it; of those alone that have taps, if so asked."""
    values = problem.input_size, problem.filter_size, problem.stride, problem.padding_before, problem.dilation
    return [_axis_phases(*of_axis, with_taps) for of_axis in zip(*values, strict=True)]


def count_phases(problem: ConvProblem) -> int:
    """The number of phases, most of which may have no tap."""
    return 1 if problem.direction == "fprop" else math.prod(map(min, problem.stride, problem.input_size))


@lru_cache(maxsize=1024)  # every engine asks
def few_have_taps(problem: ConvProblem) -> bool:
    """Whether there are more than :data:`MOST_PHASES` phases, and taps in fewer than half of them.

    Then each launch of the others would only write what follows a sum of nothing, for a microsecond or more.
    """
    count = count_phases(problem)
    return count > MOST_PHASES and 2 * math.prod(map(len, axis_phases(problem, with_taps=True))) < count


def too_many_phases(problem: ConvProblem, besides_repeats: bool = False) -> str | None:
    """Why an engine that walks all phases, or all besides :func:`repeats`, can't run `problem`; None if it can."""
    if few_have_taps(problem):
        return f"the result has more than {MOST_PHASES:,} stride phases, and few of them have taps"
    count = count_phases(problem)
    if count > MOST_WALKED and besides_repeats:
        count //= math.prod(repeats(problem))
    return f"the result has more than {MOST_WALKED:,} stride phases" if count > MOST_WALKED else None


@lru_cache(maxsize=64)  # the planner asks for it once a configuration
def repeats(problem: ConvProblem) -> Size3:
    """How many neighbouring phases are repeats of one, along each axis: each like the last, a pixel of the result and a tap further."""
    if problem.direction == "fprop":
        return 1, 1, 1
    d, h, w = map(_axis_repeats, axis_phases(problem))
    return d, h, w


def _axis_repeats(axis: list[tuple[int, ...]]) -> int:
    def repeated(n: int) -> bool:
        """Whether the phases are groups of `n` repeats."""
        for number, one in enumerate(axis):
            pixels, origin, step, taps, first, *others = axis[number - number % n]
            if one != (pixels, origin + number % n, step, taps, first + number % n, *others):
                return False
        return True

    return next(n for n in range(len(axis), 0, -1) if len(axis) % n == 0 and repeated(n))


def first_phases(problem: ConvProblem) -> tuple[Phase, ...]:
    """The phases that are no repeats of others."""
    if problem.direction == "fprop":
        return phases(problem)
    along = [axis[::n] for axis, n in zip(axis_phases(problem), repeats(problem), strict=True)]
    return tuple(map(Phase.of_axes, product(*along)))


@lru_cache(maxsize=64)  # the planner asks for them once a configuration
def phase_kinds(problem: ConvProblem) -> tuple[tuple[int, int, int], ...]:
    """Pixels and taps of the phases, and how many phases there are of a kind; up to :data:`MOST_PHASES` phases are listed one by one."""
    few = few_have_taps(problem)
    if not few and count_phases(problem) <= MOST_PHASES:
        return tuple((math.prod(phase.size), math.prod(phase.taps), 1) for phase in phases(problem))
    along = [Counter((pixels, taps) for pixels, _, _, taps, *_ in axis) for axis in axis_phases(problem, with_taps=few)]
    kinds = product(*(axis.items() for axis in along))
    found = [tuple(map(math.prod, zip(*((*kind, many) for kind, many in combination), strict=True))) for combination in kinds]
    return (*([(math.prod(problem.result_size), 0, 1)] if few else []), *((pixels, taps, many) for pixels, taps, many in found))


def places(problem: ConvProblem, phase: Phase) -> tuple[int, int, int, int, int]:
    """Elements of a plane of the result; offset in it of a phase's first pixel; and strides of its pixels along d, h and w."""
    d, h, w = problem.result_size
    strides = row_major(problem.result_size)
    step_d, step_h, step_w = (a * b for a, b in zip(phase.step, strides, strict=True))
    return d * h * w, sum(a * b for a, b in zip(phase.origin, strides, strict=True)), step_d, step_h, step_w
