"""Filters of arrays in the host's memory on a GPU: there and back once, whatever number of launches is between.

An array is cut into bands of its first axis. While one band is filtered, the next is copied in and the last one out. A band's launches
read the neighbours' rows where they lie on the GPU, so its results have the bits that they have without bands.

Where a band is one launch, a further call of the same filter makes that launch again without asking what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pycuda_conv.arrays.kinds import GPU_ARRAY
from pycuda_conv.execute import staging
from pycuda_conv.ndimage import launches
from pycuda_conv.ndimage.launches import Bench, Dense, Pass, Taped, Term
from pycuda_conv.ndimage.spaces import space_of
from pycuda_conv.runtime import copies

#: The least bytes of a band, of the input or the result: they take the bus 57 us, and each band the host some 20, the first time 100.
LEAST_BAND = 3 << 20
MOST_BANDS = 16


class Band(NamedTuple):
    """Rows `begin` to `end` of the result, by `terms`, once `needed` rows of the input are there. Without `whole` they are all it reads."""

    begin: int
    end: int
    needed: int
    terms: Sequence[Term]
    whole: bool = True


#: The bands of earlier calls and the launch of each, by what was asked.
_calls: dict[Hashable, tuple[list[Band], list[Taped]]] = {}
MOST_CALLS = 64


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
    result = _room(bench, shape, output, x, target)
    held = kind.to_numpy(result, "output")  # type: ignore[attr-defined]
    with device.current():
        up, _, down = device.pipeline_streams()
        on = Bench(space_of(GPU_ARRAY), device, None)
        there = on.space.library.GPUArray(given.shape, given.dtype, allocator=device.allocate)
        device.order(None, up)  # the pool's memory may still be in use by the default stream
        copied, row_bytes, made = 0, given.nbytes // len(given), []
        key = device, way, value, output, given.dtype.str, given.shape, tuple(shape), tuple(map(_key, terms))
        cut, known = _calls.get(key) or (bands(terms, value, given.shape, shape, max(given.nbytes, held.nbytes)), [])
        whole = on.space.library.GPUArray(held.shape, held.dtype, allocator=device.allocate) if known else None
        source, tapes = _Source(device, given, cut), []
        try:
            for number, band in enumerate(cut):
                if band.needed > copied:
                    copies.to_device(int(there.gpudata) + copied * row_bytes, source.rows(copied, band.needed), up)
                    source.leaves(up)
                    device.order(up, None)
                    copied = band.needed
                if whole is not None:
                    at = int(whole.gpudata) + band.begin * (held.nbytes // len(held))
                    begin = 0 if band.whole else band.begin * row_bytes
                    known[number].launcher((int(there.gpudata) + begin, int(known[number].filters.gpudata), 0, at, 0), None)
                else:
                    part, tape = there if band.whole else there[band.begin : band.end], []  # type: tuple[Any, list[Taped]]
                    made.append(run(on._replace(tape=tape), part, band.terms))
                    at = int(made[-1].gpudata)
                    tapes += tape if len(tape) == 1 and tape[0].x is part and not tape[0].joined else []
                device.order(None, down)
                copies.to_host(held[band.begin : band.end], at, down)
        finally:
            down.synchronize()
            up.synchronize()
        if len(tapes) == len(cut):
            while len(_calls) >= MOST_CALLS:
                _calls.pop(next(iter(_calls)), None)
            _calls[key] = cut, [one._replace(x=None) for one in tapes]
    return result


def _key(term: Term) -> Hashable:
    """A term by its values."""
    if isinstance(term, Dense):
        return term._replace(weights=(term.weights.shape, term.weights.tobytes()))  # type: ignore[arg-type]
    return tuple(one._replace(taps=np.asarray(one.taps, np.float64).tobytes()) for one in term)  # type: ignore[arg-type]


class _Source:
    """The rows of an array as copies to a GPU take them: ordinary memory goes through two page-locked buffers, which take turns."""

    def __init__(self, device: Any, array: np.ndarray, cut: Sequence[Band]) -> None:
        self._device, self._array = device, array
        self._buffers: list[np.ndarray] = []
        self._left: list[Any] = [None, None]
        if len(cut) > 1 and not device.is_pinned(array):
            rows = max(band.needed - before for before, band in zip([0, *(band.needed for band in cut)], cut, strict=False))
            self._buffers = [device.pinned_or_ordinary((rows, *array.shape[1:]), array.dtype) for _ in range(2)]

    def rows(self, begin: int, end: int) -> np.ndarray:
        """Rows `begin` to `end`."""
        part = self._array[begin:end]
        if not self._buffers:
            return part
        if self._left[0] is not None:
            self._left[0].synchronize()
        held = self._buffers[0][: end - begin]
        staging.copy(held, (held, part))
        return held

    def leaves(self, stream: Any) -> None:
        """What :meth:`rows` gave is copied by `stream`."""
        if self._buffers:
            self._left[0] = self._device.recorded(stream)
            self._buffers.reverse()
            self._left.reverse()


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
