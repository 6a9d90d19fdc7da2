"""How many GPUs a call on host arrays takes: as many as its copies and kernels gain by."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from pycuda_conv import engines

if TYPE_CHECKING:
    from pycuda_conv.plan import Plan
    from pycuda_conv.runtime.device import CudaDevice

#: Copies an array to GPUs, and as many bytes from there to another one, as a call does: (gpus, x, y).
Copy = Callable[[Sequence["CudaDevice"], np.ndarray, np.ndarray], Any]

#: Fewer bytes than this, in and out together, are not shared among GPUs: each would have but one chunk of the least size.
LEAST_SHARED_BYTES = 32 << 20
#: The throughput of copies to GPUs and back is measured with so many bytes of input and rounds. Fewer bytes would be in the host's cache.
THROUGHPUT_BYTES, THROUGHPUT_ROUNDS = 256 << 20, 3
#: Factor up to which times count as the same; calls of a plan by which a number of GPUs is judged; and factor to the best expected time up
#: to which a number of GPUs is tried.
WORTH, TRIES, NEAR = 1.03, 3, 1.25
#: Calls of a plan at which the times of all numbers of GPUs but the best are forgotten, to try them again: the host may have been busy.
AGAIN = frozenset(16 * 4**i for i in range(16))


@dataclass(frozen=True)
class Throughput:
    """The time that a host takes to copy arrays to GPUs and back: seconds to begin, and seconds a byte."""

    start: float
    per_byte: float

    def seconds(self, nbytes: int) -> float:
        """Seconds for `nbytes` bytes, in and out together."""
        return self.start + self.per_byte * nbytes


_measuring = threading.Lock()
_throughputs: dict[Hashable, dict[int, Throughput]] = {}


def throughputs(gpus: Sequence[CudaDevice], from_ordinary: bool, to_ordinary: bool, copy: Copy) -> dict[int, Throughput]:
    """The throughput of 1, 2, 4 ... and of all of `gpus`, measured once in a process, which takes some 0.1 s."""
    key = tuple(gpus), from_ordinary, to_ordinary
    with _measuring:
        if key not in _throughputs:
            shape, dtype, first = (THROUGHPUT_BYTES >> 20, 1, 1 << 18), np.dtype(np.float32), gpus[0]
            with first.current():
                x, y = (np.empty(shape, dtype) if ordinary else first.pinned_or_ordinary(shape, dtype) for ordinary in key[1:])
            x.fill(1)  # otherwise all its pages would be the same page of zeros
            y.fill(0)
            _throughputs[key] = {count: _measured_throughput(gpus[:count], x, y, copy) for count in numbers_of_gpus(len(gpus))}
    return _throughputs[key]


def numbers_of_gpus(most: int) -> list[int]:
    """1, 2, 4 ... below `most`, and `most`."""
    return sorted({1 << i for i in range(most.bit_length())} | {most})


def _measured_throughput(gpus: Sequence[CudaDevice], x: np.ndarray, y: np.ndarray, copy: Copy) -> Throughput:
    """The throughput of copies, measured on `x` and `y` and on a part of them."""
    part = len(x) // 4
    sizes = (x[:part], y[:part]), (x, y)
    seconds = [math.inf] * len(sizes)
    for _ in range(THROUGHPUT_ROUNDS):
        for i, (one, other) in enumerate(sizes):
            began = time.perf_counter()
            copy(gpus, one, other)
            seconds[i] = min(seconds[i], time.perf_counter() - began)
    nbytes = [one.nbytes + other.nbytes for one, other in sizes]
    per_byte = max(seconds[1] - seconds[0], 0.0) / (nbytes[1] - nbytes[0])
    return Throughput(max(seconds[1] - per_byte * nbytes[1], 0.0), per_byte)


@lru_cache(maxsize=256)
def _kernel_seconds(plan: Plan) -> float:
    """Seconds that the kernels of `plan` should take on one GPU; 0 where no model knows."""
    return (engines.predicted(plan.problem, plan.config, plan.device) or 0.0) * 1e-6


@dataclass
class _Taken:
    """Seconds that the last calls of a plan took on each number of GPUs, and how many calls there were."""

    seconds: dict[int, deque[float]]
    calls: int = 0


#: For each plan, the times of its calls by the GPUs and by the kind of memory that the arrays are in.
_taken: WeakKeyDictionary[Plan, dict[Hashable, _Taken]] = WeakKeyDictionary()


def gpus_that_pay(
    plan: Plan, gpus: Sequence[CudaDevice], x: np.ndarray, y: np.ndarray, residual: np.ndarray | None, copy: Copy
) -> tuple[int, Callable[[float], Any]]:
    """How many of `gpus` to use for a call, and a function that takes the call's seconds.

    The number is the one that takes the least time, or the smallest of equals. At first :func:`throughputs` predicts the times; later the
    plan's own calls give them. Numbers predicted to be near the best are tried, and tried again after 16, 64, 256 ... calls.
    """
    nbytes = y.nbytes + sum(a.nbytes for a in (x, residual) if a is not None)
    if nbytes < LEAST_SHARED_BYTES:
        return 1, lambda seconds: None
    with gpus[0] as first:
        of_x, of_y = (not (a.flags.c_contiguous and a.dtype.isnative and first.is_pinned(a)) for a in (x, y))
    kernels = _kernel_seconds(plan)
    expected = {
        count: copies.start + max(copies.seconds(nbytes) - copies.start, kernels / count)
        for count, copies in throughputs(gpus, of_x, of_y, copy).items()
    }
    of_plan = _taken.setdefault(plan, {})
    taken = of_plan.setdefault((tuple(gpus), of_x, of_y), _Taken({count: deque(maxlen=TRIES) for count in expected}))
    count = _best(expected, taken.seconds)
    taken.calls += 1
    if taken.calls in AGAIN:
        for other in taken.seconds.keys() - {count}:
            taken.seconds[other].clear()
    return count, taken.seconds[count].append


def _best(expected: Mapping[int, float], taken: Mapping[int, Sequence[float]]) -> int:
    """The number of GPUs for the next call, from the expected seconds and those that calls have taken."""
    tried = [count for count in expected if taken[count]]
    scale = min((min(taken[count]) / expected[count] for count in tried), default=1.0)
    seconds = {count: min(taken[count]) if taken[count] else scale * expected[count] for count in expected}
    least = min(seconds.values())
    best = min(count for count in seconds if seconds[count] <= WORTH * least)
    near = [count for count in seconds if seconds[count] <= NEAR * least and len(taken[count]) < TRIES]
    return best if best in near or not near else min(near, key=seconds.__getitem__)
