"""Times of several ways to do the same thing, taken in turn so that all meet the same clocks.

A *way* is a function of a number: ``way(i)`` launches the work once on the i-th set of operands.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from pycuda_conv.problem import ConvProblem

log = logging.getLogger("pycuda_conv")

Way = Callable[[int], Any]

LONG = 1e-3  # seconds; a launch that takes longer hides its own overhead
ROUND = 4e-3  # seconds that one way's launches should take in a round
MOST_LAUNCHES = 1024  # most launches in one graph
MOST_SETS = 256


@dataclass(frozen=True)
class Effort:
    """How long to measure: at least `rounds` of every way, and about `seconds` in all."""

    rounds: int = 7
    seconds: float = 0.3
    most_rounds: int = 50

    def count(self, round_seconds: float) -> int:
        """The number of rounds to take, if one takes `round_seconds`."""
        return max(self.rounds, min(self.most_rounds, math.ceil(self.seconds / max(round_seconds, 1e-9))))


def operand_sets(problem: ConvProblem, cache_bytes: int) -> int:
    """How many sets of operands take twice the cache."""
    return max(1, min(MOST_SETS, math.ceil(2 * cache_bytes / max(problem.bytes, 1))))


def launches(seconds: float, sets: int) -> int:
    """How many launches make a round: a few milliseconds of work, every set of operands as often as the others."""
    wanted = min(math.ceil(ROUND / max(seconds, 1e-9)), MOST_LAUNCHES)
    return math.ceil(wanted / sets) * sets


def _queue(torch: Any, works: Sequence[Callable[[], Any]], rounds: int) -> list[list[float]]:
    """Seconds on the GPU of each of `works`, for every round.

    All is queued before anything is waited for, so that the GPU finds the next launch ready when an event passes.
    """
    events = []
    for _ in range(rounds):
        for work in works:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            events.append((start, end))
    torch.cuda.synchronize()
    seconds = [start.elapsed_time(end) / 1e3 for start, end in events]
    return [seconds[i :: len(works)] for i in range(len(works))]


def _capture(torch: Any, way: Way, count: int, sets: int) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            way(i % sets)
    return graph


def _loop(way: Way, count: int, sets: int) -> Callable[[], None]:
    def work() -> None:
        for i in range(count):
            way(i % sets)

    return work


def _replay(graph: Any, count: int) -> Callable[[], None]:
    def work() -> None:
        for _ in range(count):
            graph.replay()

    return work


def _warm_up(torch: Any, ways: Sequence[Way], sets: int) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # whatever another stream than the default needs must be there before a capture
        for way in ways:
            for i in range(3):
                way(i % sets)
    torch.cuda.current_stream().wait_stream(side)
    for way in ways:
        for i in range(3):
            way(i % sets)
    torch.cuda.synchronize()


def gpu_times(torch: Any, ways: Sequence[Way], sets: int, effort: Effort, captured: float = LONG) -> tuple[list[list[float]], str]:
    """Seconds that a launch of each way takes, round by round, and how they were taken: "graph" or "events".

    Launches shorter than `captured` seconds are captured in a CUDA graph, so that the host's cost of a launch is left out.
    """
    _warm_up(torch, ways, sets)
    single = [min(times) / 3 for times in _queue(torch, [_loop(way, 3, sets) for way in ways], 2)]
    counts = [launches(seconds, sets) for seconds in single]
    works: list[Callable[[], Any]] = [_loop(way, count, sets) for way, count in zip(ways, counts, strict=True)]
    how = "events"
    if min(single) < captured:
        try:
            graphs = [_capture(torch, way, count, sets) for way, count in zip(ways, counts, strict=True)]
            once = _queue(torch, [graph.replay for graph in graphs], 2)
            # single launches seemed longer than they are: replay the graph until a round is long enough
            again = [math.ceil(ROUND / max(min(times), ROUND / 100)) for times in once]
            works = [_replay(graph, times) for graph, times in zip(graphs, again, strict=True)]
            counts = [count * times for count, times in zip(counts, again, strict=True)]
            how = "graph"
        except Exception as error:  # a capture may meet any error; the log says that the way was not captured
            log.warning("not captured in a graph, timed launch by launch: %s", error)
            torch.cuda.synchronize()
    rough = sum(times[-1] for times in _queue(torch, works, 2))
    times = _queue(torch, works, effort.count(rough))
    return [[t / count for t in taken] for taken, count in zip(times, counts, strict=True)], how


def wall_times(ways: Sequence[Way], sets: int, effort: Effort, wait: Callable[[], Any] = lambda: None) -> list[list[float]]:
    """Seconds by the host's clock that one call of each way takes, all of its work included, round by round."""
    rough = 0.0
    for way in ways:
        for _ in range(2):  # the first call may compile
            start = time.perf_counter()
            way(0)
            wait()
            last = time.perf_counter() - start
        rough += last
    times: list[list[float]] = [[] for _ in ways]
    for i in range(effort.count(rough)):
        for way, taken in zip(ways, times, strict=True):
            start = time.perf_counter()
            way(i % sets)
            wait()
            taken.append(time.perf_counter() - start)
    return times


def host_times(way: Callable[[], Any], wait: Callable[[], Any], calls: int = 200, batch: int = 20) -> float:
    """Median of the seconds for which one call occupies the host. The device is waited for between batches, not inside."""
    for _ in range(batch):
        way()
    taken = []
    for _ in range(calls // batch):
        wait()
        for _ in range(batch):
            start = time.perf_counter()
            way()
            taken.append(time.perf_counter() - start)
    wait()
    return median(taken)
