"""Filters of arrays in the host's memory on a GPU: there and back once, whatever number of launches is between.

An array is cut into bands of its first axis. While one band is filtered, the next is copied in and the last one out. A band's launches
read the neighbours' rows where they lie on the GPU, so its results have the bits that they have without bands.

Where a band is one launch, a further call of the same filter makes that launch again without asking what it is. Of a numpy array the
function's arguments tell that (:func:`repeatable`), so the bus begins some 20 us after the call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import wraps
from math import prod
from types import NoneType
from typing import Any, NamedTuple

import numpy as np

from pycuda_conv.arrays.kinds import GPU_ARRAY
from pycuda_conv.execute import staging
from pycuda_conv.ndimage import launches
from pycuda_conv.ndimage.launches import Bench, Dense, Pass, Taped, Term
from pycuda_conv.ndimage.spaces import space_of
from pycuda_conv.runtime import copies, get_device, pycuda_device

#: The least bytes of a band, of the input or the result: they take the bus 38 us, and each band the host some 20, the first time 100.
LEAST_BAND = 2 << 20
MOST_BANDS = 16


class Band(NamedTuple):
    """Rows `begin` to `end` of the result, by `terms`, once `needed` rows of the input are there. Without `whole` they are all it reads."""

    begin: int
    end: int
    needed: int
    terms: Sequence[Term]
    whole: bool = True


class _Known(NamedTuple):
    """A call whose bands are a launch each: of another such array they make a result of that shape and type again."""

    device: Any
    cut: Sequence[Band]
    tapes: Sequence[Taped]
    shape: tuple[int, ...]
    output: str

    def room(self) -> tuple[np.ndarray, np.ndarray]:
        """Where a result of numpy goes."""
        made = self.device.result_array(self.shape, np.dtype(self.output))
        return made, made

    def again(self, given: np.ndarray, room: Callable[[], tuple[Any, np.ndarray]]) -> Any:
        """The result for another array; `room` makes what is returned, and gives it as a numpy array too."""
        row_bytes = prod(self.shape[1:]) * np.dtype(self.output).itemsize

        def launch(number: int, source: _Source, made: list[Any]) -> int:
            if not number:
                made.append(self.device.allocate(self.shape[0] * row_bytes))
            band, (_, launcher, filters, _) = self.cut[number], self.tapes[number]
            at, begin = int(made[0]) + band.begin * row_bytes, 0 if band.whole else band.begin * source.row_bytes
            launcher((int(source.memory) + begin, int(filters.gpudata), 0, at, 0), None)
            return at

        return _in_bands(self.device, given, self.cut, room, launch)


#: Calls of earlier, by what they launch; and by the functions' arguments, those of numpy arrays.
_calls: dict[Hashable, _Known] = {}
_repeated: dict[Hashable, _Known] = {}
MOST_CALLS = 64
#: The last result of each thread, which nothing here keeps alive, where the array lies that it was made of, and how it is made again.
_last = threading.local()


def _keep(calls: dict[Hashable, _Known], key: Hashable, known: _Known) -> None:
    while len(calls) >= MOST_CALLS:
        calls.pop(next(iter(calls)), None)
    calls[key] = known


def joined(
    bench: Bench, x: Any, terms: Sequence[Term], value: float, output: str, target: Any, shape: Sequence[int],
    run: Callable[[Bench, Any, Sequence[Term]], Any], way: Hashable = None,
) -> Any:
    """What `run` makes by `terms`, of type `output`, from `x` on the bench's GPU, as an array of the kind of `x`, or in `target`.

    Parameters
    ----------
    bench : Bench
        Of arrays in the host's memory, and of a GPU.
    x : array
        In C order, of a type that the kernels read.
    terms : sequence of Term
    value : float
        Of a constant border.
    output : str
    target : array, optional
    shape : sequence of int
        The result's.
    run : callable
        Takes a bench of GPUArrays, one of these, and terms.
    way : hashable, optional
        What `run` does beside.
    """
    kind, device = bench.space.kind, bench.device
    given = kind.to_numpy(x, "input")  # type: ignore[attr-defined]

    def room() -> tuple[Any, np.ndarray]:
        result = _room(bench, shape, output, x, target)
        return result, kind.to_numpy(result, "output")  # type: ignore[attr-defined]

    key = device, way, value, output, given.dtype.str, given.shape, tuple(shape), tuple(map(_key, terms))
    known = _calls.get(key)
    if known is None:
        nbytes = max(given.nbytes, prod(shape) * np.dtype(output).itemsize)
        cut = bands(terms, value, given.shape, shape, nbytes)
        on, tapes = Bench(space_of(GPU_ARRAY), device, None), []  # type: tuple[Bench, list[Taped]]

        def launch(number: int, source: _Source, made: list[Any]) -> int:
            band = cut[number]
            there = on.space.library.GPUArray(given.shape, given.dtype, allocator=device.allocate, gpudata=source.memory)
            part, tape = there if band.whole else there[band.begin : band.end], []  # type: tuple[Any, list[Taped]]
            made.append(run(on._replace(tape=tape), part, band.terms))
            tapes.extend(tape if len(tape) == 1 and tape[0].x is part and not tape[0].joined else [])
            return int(made[-1].gpudata)

        result = _in_bands(device, given, cut, room, launch)
        if len(tapes) != len(cut):
            return result
        known = _Known(device, cut, [one._replace(x=None) for one in tapes], tuple(shape), output)
        _keep(_calls, key, known)
    else:
        result = known.again(given, room)
    if isinstance(x, np.ndarray) and target is None:
        _last.made = weakref.ref(result), _place(x), known
    return result


def _key(term: Term) -> Hashable:
    """A term by its values."""
    if isinstance(term, Dense):
        return term._replace(weights=(term.weights.shape, term.weights.tobytes()))  # type: ignore[arg-type]
    return tuple((one.axis, np.asarray(one.taps, np.float64).tobytes(), *one[2:]) for one in term)


def _in_bands(
    device: Any, given: np.ndarray, cut: Sequence[Band], room: Callable[[], tuple[Any, np.ndarray]],
    launch: Callable[[int, _Source, list[Any]], int],
) -> Any:
    """The result of which `launch` makes a band, by its number; it returns the address, and lists what has to live until all is done."""
    made: list[Any] = []
    with device.current():
        up, _, down = device.pipeline_streams()
        source = _Source(device, given, cut, up)
        try:
            source.send(1)  # before the rest is prepared
            result, held = room()
            for number, band in enumerate(cut):
                source.bring(number)
                at = launch(number, source, made)
                device.order(None, down)
                copies.to_host(held[band.begin : band.end], at, down)
        finally:
            down.synchronize()
            up.synchronize()
    return result


# ---- calls that come again


def repeatable(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that makes the same launches again where it is called with such a numpy array and the same arguments."""

    @wraps(function)
    def called(input: Any, *args: Any, **options: Any) -> Any:
        if type(input) is not np.ndarray:
            return function(input, *args, **options)
        name = _name(function, input, args, options)
        known = _repeated.get(name)
        if known is not None and known.device is get_device(options.get("device") or pycuda_device()):
            return known.again(input, known.room)
        result = function(input, *args, **options)
        last, _last.made = getattr(_last, "made", None), None
        if last is not None and name is not None and last[0]() is result and last[1] == _place(input):
            _keep(_repeated, name, last[2])
        return result

    return called


def _place(array: np.ndarray) -> tuple[int, str, tuple[int, ...]]:
    """What tells an array that is alive from others."""
    return array.__array_interface__["data"][0], array.dtype.str, array.shape


def _name(function: Any, input: np.ndarray, args: Sequence[Any], options: Mapping[str, Any]) -> Hashable:
    """What a call asks of a numpy array, or None where it can't be named."""
    if input.nbytes < LEAST_BAND or not input.flags.c_contiguous or not input.dtype.isnative:
        return None
    try:
        return function, input.dtype.str, input.shape, _named(args), tuple((key, _named(value)) for key, value in options.items())
    except TypeError:
        return None


def _named(value: Any) -> Hashable:
    """An argument by its value and type, as 1, 1.0 and True differ, and 0.0 and -0.0."""
    if type(value) is float:
        return float, value.hex()
    if type(value) in (int, str, bool, NoneType):
        return type(value), value
    if type(value) in (tuple, list):
        return tuple(map(_named, value))
    if type(value) is np.ndarray and value.size <= launches.MANY["cuda"]:
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, (type, np.dtype)):
        return value
    raise TypeError


class _Source:
    """An array that is copied to `memory` on a GPU, as its bands need it: ordinary memory goes through two page-locked buffers by turns."""

    def __init__(self, device: Any, array: np.ndarray, cut: Sequence[Band], stream: Any) -> None:
        self._device, self._array, self._cut, self._stream = device, array, cut, stream
        self.memory, self.row_bytes = device.allocate(array.nbytes), array.nbytes // len(array)
        device.order(None, stream)  # the pool's memory may still be in use by the default stream
        #: an event of each band whose rows are on their way, and how many these are
        self._events: list[Any] = []
        self._sent = 0
        self._buffers: list[np.ndarray] = []
        if len(cut) > 1 and not device.is_pinned(array):
            rows = max(band.needed - before for before, band in zip([0, *(band.needed for band in cut)], cut, strict=False))
            self._buffers = [device.pinned_or_ordinary((rows, *array.shape[1:]), array.dtype) for _ in range(2)]

    def send(self, count: int) -> None:
        """Begin to copy what the first `count` bands need; page-locked memory is copied a band ahead, so that the bus never waits."""
        for band in self._cut[len(self._events) : count + (not self._buffers)]:
            part, at = self._array[self._sent : band.needed], int(self.memory) + self._sent * self.row_bytes
            if self._buffers and len(part):
                if len(self._events) > 1:
                    self._events[-2].synchronize()
                held = self._buffers[0][: len(part)]
                staging.copy(held, (held, part))
                part = held
                self._buffers.reverse()
            if len(part):
                copies.to_device(at, part, self._stream)
            self._events.append(self._device.recorded(self._stream))
            self._sent = max(self._sent, band.needed)

    def bring(self, number: int) -> None:
        """Let the default stream's later work find the rows that a band needs."""
        self.send(number + 1)
        self._events[number].hold()


def _room(bench: Bench, shape: Sequence[int], output: str, like: Any, target: Any) -> Any:
    """Where the result lies on the host: page-locked where arrays of numpy are made for it."""
    if target is not None:
        return target
    if isinstance(like, np.ndarray):
        with bench.device.current():
            return bench.device.result_array(tuple(shape), np.dtype(output))
    return bench.space.empty(shape, output, like)


def bands(terms: Sequence[Term], value: float, shape: Sequence[int], result: Sequence[int], nbytes: int) -> list[Band]:
    """The bands of a filter of an array of `shape` whose result has the shape `result`; `nbytes` are those of the larger one."""
    rows, count = result[0], min(MOST_BANDS, result[0], nbytes // LEAST_BAND)
    whole = [Band(0, rows, shape[0], terms)]
    if count < 2:
        return whole
    ends = [round(rows * (i + 1) / count) for i in range(count)]
    if not any(_along_rows(term) for term in terms):
        if shape[0] != rows:
            return whole
        return [Band(begin, end, end, terms, False) for begin, end in zip([0, *ends], ends, strict=False)]
    if not all(_can_be_cut(term, value) for term in terms):
        return whole
    found = []
    for begin, end in zip([0, *ends], ends, strict=False):
        parts = [_rows_of(term, shape, begin, end) for term in terms]
        needed = max(max(end + taps - 1 - before, before + 1) for taps, before, _ in filter(None, map(_along_rows, terms)))
        needed = shape[0] if end == rows else min(max(needed, end), shape[0])
        found.append(Band(begin, end, needed, parts))
    return found


def _along_rows(term: Term) -> tuple[int, int, str] | None:
    """Along the first axis: taps, how many of them lie before a row, and the border; None if nothing is done along it."""
    if isinstance(term, Dense):
        return (term.weights.shape[0], term.before[0], term.borders[0]) if term.axes and term.axes[0] == 0 else None
    return next(((len(one.taps), one.before, one.border) for one in term if one.axis == 0), None)


def _can_be_cut(term: Term, value: float) -> bool:
    """Whether rows of the result need rows around them alone, and all launches but the first have those rows alone."""
    along = _along_rows(term)
    if along is not None and along[2] == "wrap":
        return False
    if isinstance(term, Dense):
        return along is not None and term.weights.size <= launches.MANY["cuda"] and len(term.axes) <= 3
    if any(len(one.taps) > launches.MOST_TAPS for one in term):
        return False
    in_order = value and any(one.border == "constant" for one in term)  # launches._groups: else the first axis is the first launch's
    return not in_order or along is None or term[0].axis == 0


def _rows_of(term: Term, shape: Sequence[int], begin: int, end: int) -> Term:
    """A term that gives rows `begin` to `end` of a term's result."""
    if isinstance(term, Dense):
        sizes = term.sizes or tuple(shape[axis] for axis in term.axes)
        return term._replace(before=(term.before[0] - begin, *term.before[1:]), sizes=(end - begin, *sizes[1:]))
    if _along_rows(term) is None:
        return [Pass(0, np.ones(1), -begin, "nearest", end - begin), *term]
    return [one._replace(before=one.before - begin, size=end - begin) if one.axis == 0 else one for one in term]
