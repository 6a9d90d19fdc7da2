"""Filters of arrays of any rank as launches: which axes a launch has, how the array lies for it, what lies in memory between two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

import pycuda_conv
from pycuda_conv import execute
from pycuda_conv.engines.images import window as images
from pycuda_conv.engines.images.window import MOST_COLOURS, Window
from pycuda_conv.ndimage.spaces import Space
from pycuda_conv.ndimage.taps import rounded, separated

#: Taps of a filter along two axes, from which on a launch for each takes less time than one for both.
LONG = {"cuda": 122, "opencl": 41}
#: The most taps of a dense filter in one launch. Others go by the package's convolutions, which may be transforms: they are faster on the
#: CPU, and more right on a GPU, where sums of 441 products in float32 are off by 4e-7.
MANY = {"cuda": 300, "opencl": 400}
#: The same on the CPU in float64, where transforms are seldom right enough, and convolutions take up to thirty times as long.
MANY_WIDE = 3000
#: Equal taps from which on sums by doubling are quicker, on the CPU.
SHORTEST_BOX = 12
#: The words of the package's convolutions for borders.
PADDING_MODES = {"nearest": "replicate", "reflect": "symmetric", "mirror": "reflect", "wrap": "circular", "constant": "constant"}
#: Taps along an axis that a launch can have.
MOST_TAPS = 1500


class Pass(NamedTuple):
    """A correlation along an axis. `before` is how far it reaches in front of a pixel; `size` is the result's, by default the array's."""

    axis: int
    taps: np.ndarray
    before: int
    border: str
    size: int | None = None


class Dense(NamedTuple):
    """A correlation along several axes at once, in rising order; the filter has an axis for each. `norms`: see :func:`by_convolution`."""

    axes: tuple[int, ...]
    weights: np.ndarray
    before: tuple[int, ...]
    borders: tuple[str, ...]
    sizes: tuple[int, ...] | None = None
    norms: bool = False


#: A filter of one term: passes along axes one after another, or one along several axes at once.
Term = Sequence[Pass] | Dense


class Join(NamedTuple):
    """What is done with the sums of a filter's last launch: see ``cu/images/window.cuh``."""

    square: bool = False
    add: bool = False
    root: bool = False


PLAIN = Join()


class Taped(NamedTuple):
    """A launch that was made: of which array, with which launcher and filter, and whether it read earlier results."""

    x: Any
    launcher: Any
    filters: Any
    joined: bool


class Bench(NamedTuple):
    """Where filters run: the operations on arrays of a kind, the device, the caller's stream, and a list for the launches that are made."""

    space: Space
    device: Any
    stream: Any = None
    tape: list[Taped] | None = None

    @property
    def backend(self) -> str:
        return str(self.device.backend)


def sums_of(input: str, output: str) -> str:
    """The type of the sums."""
    return "float64" if "float64" in (input, output) else "float32"


# ---- a filter


def run_term(
    bench: Bench, x: Any, term: Term, value: float, output: str, target: Any = None, previous: Any = None, join: Join = PLAIN
) -> Any:
    """One term of a filter: see :func:`passes`."""
    function: Callable[..., Any] = dense if isinstance(term, Dense) else passes
    return function(bench, x, term, value, output, target, previous, join)


def sum_of_terms(bench: Bench, x: Any, terms: Sequence[Term], value: float, output: str, target: Any, join: Join) -> Any:
    """The sum of several terms in one launch, their squares' or its root as `join` says; None where that is not possible."""
    along = [() if isinstance(term, Dense) else tuple(sorted(term, key=lambda one: one.axis)) for term in terms]
    if bench.backend != "cuda" or any(len(one) != 2 for one in along):
        return None
    first, input = along[0], bench.space.dtype(x)
    alike = {tuple((one.axis, len(one.taps), one.before, one.border, one.size) for one in pair) for pair in along}
    if len(alike) > 1 or (value and any(one.border == "constant" for one in first)):
        return None
    if not _goes_together(bench, x, first, sums_of(input, output)):
        return None
    window, taps = _window_of_pair(x.shape, first, input, output, value, join), (len(along), len(first[0].taps), len(first[1].taps))
    if images.fits(window, taps, False, bench.device) is None:
        return None
    filters = np.concatenate([rounded(one.taps) if window.sums == "float32" else one.taps for pair in along for one in pair])
    return _launched(bench, "sum", window, taps, x, filters, _result_shape(x.shape, first), output, target, None)


def passes(
    bench: Bench, x: Any, along: Sequence[Pass], value: float, output: str, target: Any = None, previous: Any = None, join: Join = PLAIN
) -> Any:
    """`x`, in C order and of a type that the kernels read, correlated along one axis after another.

    Parameters
    ----------
    bench : Bench
    x : array
    along : sequence of Pass
        In the order in which constant borders count: each pass has its own, of `value`.
    value : float
    output : str
        The result's type.
    target : array, optional
        Where the result goes, of that type and in C order.
    previous : array, optional
        An earlier result of the sums' type.
    join : Join
    """
    sums = sums_of(bench.space.dtype(x), output)
    groups = _groups(bench, x, along, value, sums, output)
    for number, group in enumerate(groups):
        last = number == len(groups) - 1
        if last:
            return _separable(bench, x, group, value, output, target, previous, join)
        x = _separable(bench, x, group, value, sums, None, None, PLAIN)
    raise AssertionError("a filter has a launch at least")


def _groups(bench: Bench, x: Any, along: Sequence[Pass], value: float, sums: str, output: str) -> list[tuple[Pass, ...]]:
    """The passes of each launch: one, or two whose axes are rows and columns of a window."""
    along = [one for one in along if len(one.taps) != 1 or one.taps[0] != 1 or one.size is not None]
    if not along:  # a copy
        return [(Pass(x.ndim - 1, np.ones(1), 0, "nearest"),)]
    if value and any(one.border == "constant" for one in along):
        return [(one,) for one in along]
    waiting = sorted(along, key=lambda one: one.axis)
    groups: list[tuple[Pass, ...]] = []
    while waiting:
        pair = tuple(waiting[-2:])
        if len(pair) == 2 and _goes_together(bench, x, pair, sums):
            groups.append(pair)
            del waiting[-2:]
        else:
            groups.append((waiting.pop(),))
    return groups[::-1]


def _goes_together(bench: Bench, x: Any, pair: tuple[Pass, ...], sums: str) -> bool:
    if prod(x.shape[pair[1].axis + 1 :]) > MOST_COLOURS or max(len(one.taps) for one in pair) >= LONG[bench.backend]:
        return False
    window = _window_of_pair(x.shape, pair, sums, sums, 0.0, PLAIN)
    return images.fits(window, (1, len(pair[0].taps), len(pair[1].taps)), False, bench.device) is not None


def _separable(
    bench: Bench, x: Any, group: tuple[Pass, ...], value: float, output: str, target: Any, previous: Any, join: Join
) -> Any:
    input, shape = bench.space.dtype(x), _result_shape(x.shape, group)
    filters = [one.taps for one in group]
    if len(group) == 2:
        window, taps = _window_of_pair(x.shape, group, input, output, value, join), (1, len(filters[0]), len(filters[1]))
    elif len(filters[0]) > MOST_TAPS:
        (one,) = group
        whole = Dense((one.axis,), one.taps, (one.before,), (one.border,), None if one.size is None else (one.size,))
        return by_convolution(bench, x, whole, value, output, target, previous, join)
    else:
        window, along_rows = _window_of_one(x.shape, group[0], input, output, value, join)
        taps = (1, 0, len(filters[0])) if along_rows else (1, len(filters[0]), 0)
    if bench.backend != "cuda":
        equal = [len(f) >= SHORTEST_BOX and bool((f == f[0]).all()) for f in filters]
        window = replace(window, boxes=(bool(taps[1]) and equal[0], bool(taps[2]) and equal[-1]))
    flat = np.concatenate([rounded(f) if window.sums == "float32" else np.asarray(f, np.float64) for f in filters])
    return _launched(bench, "separable", window, taps, x, flat, shape, output, target, previous)


def _result_shape(shape: Sequence[int], group: Sequence[Pass]) -> tuple[int, ...]:
    sizes = list(shape)
    for one in group:
        if one.size is not None:
            sizes[one.axis] = one.size
    return tuple(sizes)


def _window_of_pair(shape: Sequence[int], pair: Sequence[Pass], input: str, output: str, value: float, join: Join) -> Window:
    (down, across), result = pair, _result_shape(shape, pair)
    outer, between, colours = prod(shape[: down.axis]), prod(shape[down.axis + 1 : across.axis]), prod(shape[across.axis + 1 :])
    h, w, p, q = shape[down.axis], shape[across.axis], result[down.axis], result[across.axis]
    x_row, y_row = w * colours, q * colours
    return Window(
        input, output, ((1, 0, 0), (outer, h * between * x_row, p * between * y_row), (between, x_row, y_row)), (1, h, w),
        (1, p, q), (0, between * x_row), (0, between * y_row), colours, (0, down.before, across.before),
        ("nearest", down.border, across.border),
        value, *join,
    )  # fmt: skip


def _window_of_one(shape: Sequence[int], one: Pass, input: str, output: str, value: float, join: Join) -> tuple[Window, bool]:
    """The window of a single pass, and whether it goes along rows; else columns are all that lies behind the axis."""
    outer, n, behind = prod(shape[: one.axis]), shape[one.axis], prod(shape[one.axis + 1 :])
    size, none = n if one.size is None else one.size, (1, 0, 0)
    if behind <= MOST_COLOURS:
        window = Window(
            input, output, (none,) * 3, (1, outer, n), (1, outer, size), (0, n * behind), (0, size * behind), behind, (0, 0, one.before),
            ("nearest", "nearest", one.border), value, *join,
        )  # fmt: skip
        return window, True
    window = Window(
        input, output, (none, none, (outer, n * behind, size * behind)), (1, n, behind), (1, size, behind), (0, behind), (0, behind), 1,
        (0, one.before, 0), ("nearest", one.border, "nearest"), value, *join,
    )  # fmt: skip
    return window, False


# ---- dense filters


def dense(
    bench: Bench, x: Any, filter: Dense, value: float, output: str, target: Any = None, previous: Any = None, join: Join = PLAIN
) -> Any:
    """`x` correlated along several axes at once; the arguments are those of :func:`passes`."""
    filter = _without_single_taps(filter)
    whole_numbers, complete = bench.space.dtype(x) in images.CODES and "int" in bench.space.dtype(x), bool(filter.weights.all())
    spreads, few = complete or whole_numbers or filter.norms, filter.weights.size <= _most_taps(bench, x, filter, output)
    if spreads:  # else a NaN under a tap of 0 must not
        along = _as_passes(filter, value)
        if along is not None:
            return passes(bench, x, along, value, output, target, previous, join)
    if len(filter.axes) <= 3 and (few or not spreads):
        made = _in_one_launch(bench, x, filter, value, output, target, previous, join)
        if made is not None:
            return made
    return (by_convolution if spreads else _tap_by_tap)(bench, x, filter, value, output, target, previous, join)


def _most_taps(bench: Bench, x: Any, filter: Dense, output: str) -> int:
    wide = sums_of(bench.space.dtype(x), output) == "float64" and not filter.norms
    return MANY_WIDE if wide and bench.backend != "cuda" else MANY[bench.backend]


def _without_single_taps(filter: Dense) -> Dense:
    """The filter without axes along which it is one tap, its own; an axis stays."""
    sizes = filter.sizes or (None,) * len(filter.axes)
    kept = [i for i, n in enumerate(filter.weights.shape) if n != 1 or sizes[i] is not None] or [len(filter.axes) - 1]
    weights = filter.weights.reshape([filter.weights.shape[i] for i in kept])
    axes, before = (tuple(each[i] for i in kept) for each in (filter.axes, filter.before))
    borders = tuple(filter.borders[i] for i in kept)
    return Dense(axes, weights, before, borders, tuple(filter.sizes[i] for i in kept) if filter.sizes else None, filter.norms)


def _as_passes(filter: Dense, value: float) -> list[Pass] | None:
    """The filter as one along each axis, if it is their product and passes have the same border as a window."""
    if value and "constant" in filter.borders:
        return None
    sizes = filter.sizes or (None,) * len(filter.axes)
    factors = _factors(filter.weights.tobytes(), filter.weights.shape)
    if factors is None:
        return None
    return [Pass(*each) for each in zip(filter.axes, factors, filter.before, filter.borders, sizes, strict=True)]


@lru_cache(maxsize=256)
def _factors(given: bytes, shape: tuple[int, ...]) -> tuple[np.ndarray, ...] | None:
    """The filters along each axis whose product is a filter, or None."""
    weights, found = np.frombuffer(given, np.float64).reshape(shape), []
    while weights.ndim > 1:
        pair = separated(weights.reshape(len(weights), -1))
        if pair is None:
            return None
        found.append(pair[0])
        weights = pair[1].reshape(weights.shape[1:])
    return (*found, weights)


def _in_one_launch(
    bench: Bench, x: Any, filter: Dense, value: float, output: str, target: Any, previous: Any, join: Join
) -> Any:
    """The result, or None where a block has too little memory."""
    axes, weights, before, borders, sizes, _ = filter
    input, shape = bench.space.dtype(x), x.shape
    result = list(shape)
    for axis, size in zip(axes, sizes or (), strict=False):
        result[axis] = size
    behind = prod(shape[axes[-1] + 1 :])
    if behind > MOST_COLOURS and len(axes) == 3:  # the axes behind come to the front
        last = axes[-1] + 1
        count = x.ndim - last
        front = list(range(count))
        moved = bench.space.contiguous(bench.space.moved(x, range(last, x.ndim), front))
        earlier = None if previous is None else bench.space.contiguous(bench.space.moved(previous, range(last, x.ndim), front))
        arranged = filter._replace(axes=tuple(axis + count for axis in axes))
        made = _in_one_launch(bench, moved, arranged, value, output, None, earlier, join)
        if made is None:
            return None
        made = bench.space.contiguous(bench.space.moved(made, front, range(last, x.ndim)))
        if target is None:
            return made
        bench.space.assign(target, made)
        return target
    colours = behind if behind <= MOST_COLOURS else 1
    # by (axis, size in x, in y, taps, before, border), outermost first; what lies behind the axes may be columns without a filter
    rows = [
        (axis, shape[axis], result[axis], n, b, border) for axis, n, b, border in zip(axes, weights.shape, before, borders, strict=True)
    ]
    if behind > MOST_COLOURS:
        rows.append((len(shape), behind, behind, 1, 0, "nearest"))
    steps = _steps(shape, result, rows, colours)
    rows = [(-1, 1, 1, 1, 0, "nearest")] * (3 - len(rows)) + rows
    window = Window(
        input, output, steps.images, tuple(row[1] for row in rows), tuple(row[2] for row in rows), steps.x, steps.y, colours,
        tuple(row[4] for row in rows), tuple(row[5] for row in rows), value, *join,  # type: ignore[arg-type]
    )  # fmt: skip
    taps: Any = tuple(row[3] for row in rows)
    if images.fits(window, taps, True, bench.device) is None:
        return None
    flat = images.packed(weights.reshape(taps), window, bench.device)
    skip = not weights.all() and input.startswith("float")
    return _launched(bench, "correlate", window, taps, x, flat, tuple(result), output, target, previous, skip)


class _Steps(NamedTuple):
    images: Any
    x: tuple[int, int]
    y: tuple[int, int]


def _steps(shape: Sequence[int], result: Sequence[int], rows: Sequence[Any], colours: int) -> _Steps:
    """Groups of images between the filtered axes, and the strides of slices and rows."""

    def step(sizes: Sequence[int], axis: int) -> int:
        return prod(sizes[axis + 1 :])

    axes = [row[0] for row in rows]
    groups, start = [], 0
    for axis in axes:
        between = range(start, axis) if axis < len(shape) else range(0)  # all that lies behind the axes is one row
        count = prod(shape[i] for i in between)
        groups.append((count, step(shape, between[-1]) if between else 0, step(result, between[-1]) if between else 0))
        start = axis + 1
    groups = [(1, 0, 0)] * (3 - len(groups)) + groups

    def strides(sizes: Sequence[int]) -> tuple[int, int]:
        found = [step(sizes, axis) if axis < len(shape) else 1 for axis in axes[:-1]]
        d, h = ([0, 0] + found)[-2:]
        return d, h

    return _Steps(tuple(groups), strides(shape), strides(result))


def _tap_by_tap(
    bench: Bench, x: Any, filter: Dense, value: float, output: str, target: Any, previous: Any, join: Join
) -> Any:
    """A sum of filters along all axes but the first, one for each tap along that."""
    axis, weights = filter.axes[0], filter.weights
    size = filter.sizes[0] if filter.sizes else x.shape[axis]
    wide = padded(bench, x, axis, filter.before[0], size + len(weights) - 1 - filter.before[0] - x.shape[axis], filter.borders[0], value)
    sums = sums_of(bench.space.dtype(x), output)
    rest = Dense(filter.axes[1:], weights, filter.before[1:], filter.borders[1:], filter.sizes[1:] if filter.sizes else None)
    made = None
    for i in [i for i in range(len(weights)) if weights[i].any()] or [0]:
        cut = [slice(None)] * x.ndim
        cut[axis] = slice(i, i + size)
        part, one = bench.space.contiguous(wide[tuple(cut)]), rest._replace(weights=weights[i])
        made = _dense_or_passes(bench, part, one, value, sums, made, Join(add=made is not None))
    return passes(bench, made, (), 0.0, output, target, previous, join)


def _dense_or_passes(bench: Bench, x: Any, filter: Dense, value: float, output: str, previous: Any, join: Join) -> Any:
    if not filter.axes:
        one = Pass(x.ndim - 1, filter.weights.reshape(1), 0, "nearest", x.shape[-1])
        return passes(bench, x, [one], 0.0, output, None, previous, join)
    return dense(bench, x, filter, value, output, None, previous, join)


def padded(bench: Bench, x: Any, axis: int, before: int, after: int, border: str, value: float) -> Any:
    """A copy of `x` with `before` and `after` more places along an axis, filled as the border says. Negative numbers cut."""
    one = Pass(axis, np.ones(1), before, border, x.shape[axis] + before + after)
    return passes(bench, x, [one], value, bench.space.dtype(x))


def mapped(border: str, n: int, places: np.ndarray) -> np.ndarray:
    """Where the pixels at any `places` along an axis of `n` come from: the formula of ``cu/images/window.cuh``."""
    numbers = images.border_numbers(border, n, int(max(-places.min(initial=0), 0)))
    t = np.maximum(places + numbers["bias"], 0) % numbers["period"]
    return np.asarray(np.where(t >= n, numbers["high"] + numbers["sign"] * t, t), np.int64)


def by_convolution(
    bench: Bench, x: Any, filter: Dense, value: float, output: str, target: Any, previous: Any, join: Join
) -> Any:
    """The same by the package's convolutions, for filters of many taps: their planner may take transforms.

    Transforms of float64 are seldom as right as sums of products in float64. With `norms` an error of the norms is right enough on the CPU,
    as it is for scipy: such sums take up to thirty times as long. Those of float32 are float64's even so.
    """
    space, sums, rank = bench.space, sums_of(bench.space.dtype(x), output), len(filter.axes)
    if rank > 3:
        return _tap_by_tap(bench, x, filter, value, output, target, previous, join)
    x = space.cast(x, sums)
    if bench.backend != "cuda" and any(border != "constant" for border in filter.borders):  # transforms of the CPU take zeros alone
        sizes, before = filter.sizes or tuple(x.shape[axis] for axis in filter.axes), filter.before
        for axis, size, n, front, border in zip(filter.axes, sizes, filter.weights.shape, before, filter.borders, strict=True):
            x = padded(bench, x, axis, front, size + n - 1 - front - x.shape[axis], border, value)
        filter = filter._replace(before=(0,) * rank, borders=("constant",) * rank, sizes=sizes)
    sizes = filter.sizes or tuple(x.shape[axis] for axis in filter.axes)
    behind = tuple(range(x.ndim - rank, x.ndim))
    as_it_lies = filter.axes == behind
    arranged = x if as_it_lies else space.contiguous(space.moved(x, filter.axes, behind))
    lead, shape = arranged.shape[:-rank], arranged.shape[-rank:]
    planes = arranged.reshape(prod(lead), 1, *shape)
    around = tuple(
        (before, size + n - 1 - before - there)
        for before, size, n, there in zip(filter.before, sizes, filter.weights.shape, shape, strict=True)
    )
    weights = space.upload(np.ascontiguousarray(filter.weights, sums)[None, None], x)
    function: Callable[..., Any] = getattr(pycuda_conv, f"conv{rank}d")
    where: dict[str, Any] = {"device": bench.device.name} if space.device_key(x) is None else {"stream": bench.stream}
    if filter.norms and bench.backend != "cuda":
        where["algorithm"] = "fft"
    if "constant" in filter.borders and value:
        where["padding_value"] = value
    plain = output == sums and previous is None and join == PLAIN and as_it_lies
    if plain and target is not None:
        where["out"] = target.reshape(prod(lead), 1, *sizes)
    made = function(planes, weights, padding=around, padding_mode=[PADDING_MODES[border] for border in filter.borders], **where)
    if plain:
        return made.reshape(*lead, *sizes) if target is None else target
    made = made.reshape(*lead, *sizes)
    made = made if as_it_lies else space.contiguous(space.moved(made, behind, filter.axes))
    return passes(bench, made, (), 0.0, output, target, previous, join)


# ---- launches


def _launched(
    bench: Bench, kernel: str, window: Window, taps: tuple[int, int, int], x: Any, filters: np.ndarray, shape: tuple[int, ...], output: str,
    target: Any, previous: Any, skip: bool = False,
) -> Any:
    made = bench.space.empty(shape, output, x) if target is None else target
    if 0 in shape:
        return made
    launcher = images.compiled(kernel, window, taps, bench.device, skip)
    inputs = x, _kept(bench.space, filters, x), previous
    execute.launch(bench.space.kind, bench.device, launcher, inputs, (made,), 0, bench.stream)
    if bench.tape is not None:
        bench.tape.append(Taped(x, launcher, inputs[1], previous is not None))
    return made


#: Filters that lie on GPUs, by their values and the place.
_filters: dict[Any, Any] = {}
MOST_KEPT = 256


def _kept(space: Space, filters: np.ndarray, like: Any) -> Any:
    """A filter beside `like`; on a GPU it is kept for further calls."""
    where = space.device_key(like)
    if where is None:
        return space.upload(filters, like)
    key = space, where, str(filters.dtype), filters.tobytes()
    found = _filters.get(key)
    if found is None:
        while len(_filters) >= MOST_KEPT:
            _filters.pop(next(iter(_filters)), None)
        found = _filters[key] = space.upload(filters, like)
        space.synchronise(like)
    return found
