"""numpy in, numpy out: this package beside torch, and beside the bus that every byte must cross.

torch does it by ``F.conv2d(torch.from_numpy(x).cuda(), torch.from_numpy(w).cuda(), ...).cpu().numpy()``, and by hand as fast as it can: in
chunks of images through page-locked memory that is kept, on two streams. All sides take the same arrays, are warm, and are measured in
turn, by the wall clock, until the result is in host memory.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

import pycuda_conv
from pycuda_conv.errors import DeviceMemoryError
from pycuda_conv.execute.pipeline import copy_only
from pycuda_conv.execute.several_gpus import numbers_of_gpus
from pycuda_conv.plan import Plan
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime import Device, device_count, driver, get_device
from pycuda_conv.timing import Effort, wall_times
from pycuda_conv.tools import bench
from pycuda_conv.tools.oracle import cudnn_set, options, torch_precision
from pycuda_conv.tools.report import (
    RESULTS_PAGE,
    header_lines,
    markdown_table,
    measured_by,
    median,
    number,
    write_between,
    write_json,
)
from pycuda_conv.tools.terminal import FAILED, OK, ToolError, console, named_device, print_pairs, require, table, track

BUS_BYTES = 256 << 20  # bytes of a copy that measures the bus
CHUNKS = 8  # of images, in torch's way by hand
BUS_ROUNDS = 10  # the best round counts, as it is a ceiling
LIMITS = {"float32": 1e-5, "float64": 1e-13}  # a result is wrong if norm(ours - torch's) / norm(torch's) is above this


@dataclass(frozen=True)
class HostCase:
    """A problem. If `kept`, the filter stays on the GPU from call to call, on both sides."""

    problem: ConvProblem
    kept: bool = False

    def __str__(self) -> str:
        dtype = "" if self.problem.dtype == "float32" else f" {self.problem.dtype}"
        return bench.label(self.problem) + dtype + (", filter kept" if self.kept else "")


def _case(n: int, c: int, h: int, k: int, r: int, kept: bool = False, dtype: str = "float32") -> HostCase:
    return HostCase(ConvProblem.forward(2, (n, c, h, h), (k, c, r, r), padding=1, dtype=dtype), kept)


#: The first case is also shared among several GPUs.
CASES = (
    _case(32, 64, 224, 64, 3), _case(64, 64, 56, 64, 3), _case(1, 1, 4096, 1, 3), _case(32, 512, 7, 512, 3),
    _case(32, 512, 7, 512, 3, kept=True), _case(2, 4, 5, 8, 3), _case(32, 64, 56, 64, 3, dtype="float64"),
    _case(8, 512, 28, 512, 3, dtype="float64"),
)


@dataclass(frozen=True)
class Bus:
    """Bytes a second between page-locked memory and the GPU: to it, from it, and the sum of both at once."""

    up: float
    down: float
    both: float

    def part(self, in_bytes: int, out_bytes: int, seconds: float) -> float:
        """The share of the bus that a call used: the time of its longer direction divided by the call's."""
        return max(in_bytes / self.up, out_bytes / self.down) / seconds

    def __str__(self) -> str:
        return f"{self.up / 1e9:.1f} GB/s up, {self.down / 1e9:.1f} down, {self.both / 1e9:.1f} both at once, page-locked"


@dataclass(frozen=True)
class HostRow:
    """One measured case. Times are medians, None where the result is wrong; `pinned` is from page-locked input."""

    problem: str
    in_bytes: int
    out_bytes: int
    error: float | None = None
    torch_ms: float | None = None
    ours_ms: float | None = None
    pinned_ms: float | None = None
    of_bus: float | None = None
    pinned_of_bus: float | None = None
    verdict: str = "ok"
    by_hand_ms: float | None = None

    @property
    def by_hand_ratio(self) -> float | None:
        """The time of torch by hand divided by ours."""
        return self.by_hand_ms / self.ours_ms if self.by_hand_ms and self.ours_ms else None

    @property
    def ratio(self) -> float | None:
        """torch's time divided by ours: above 1, ours is faster."""
        return self.torch_ms / self.ours_ms if self.torch_ms and self.ours_ms else None

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        return (
            self.problem, _milliseconds(self.torch_ms), _milliseconds(self.ours_ms), number(self.ratio, ".2f"), number(self.of_bus, ".0%"),
            _milliseconds(self.pinned_ms), number(self.pinned_of_bus, ".0%"), _milliseconds(self.by_hand_ms),
            number(self.by_hand_ratio, ".2f"), number(self.error, ".1e"), self.verdict,
        )


COLUMNS = (
    "problem", "torch ms", "ours ms", "ratio", "% of bus", "page-locked ms", "% of bus", "torch by hand ms", "ratio", "difference",
    "verdict",
)  # fmt: skip


@dataclass(frozen=True)
class ScalingRow:
    """The first problem on a number of GPUs. `copies_ms` copies the input there and as much back, and computes nothing."""

    gpus: int
    error: float
    bytes: int
    ours_ms: float | None = None
    pinned_ms: float | None = None
    speedup: float | None = None
    copies_ms: float | None = None
    pinned_speedup: float | None = None
    pinned_copies_ms: float | None = None
    verdict: str = "ok"

    def rate(self, milliseconds: float | None) -> float | None:
        """Bytes in and out a second."""
        return self.bytes / milliseconds * 1e3 if milliseconds else None

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        return (
            str(self.gpus), _milliseconds(self.ours_ms), _gigabytes(self.rate(self.ours_ms)), number(self.speedup, ".2f"),
            _milliseconds(self.copies_ms), _milliseconds(self.pinned_ms), _gigabytes(self.rate(self.pinned_ms)),
            number(self.pinned_speedup, ".2f"), _milliseconds(self.pinned_copies_ms), self.verdict,
        )


SCALING_COLUMNS = (
    "GPUs", "ours ms", "GB/s", "speed-up", "copies alone ms", "page-locked ms", "GB/s", "speed-up", "copies alone ms", "verdict"
)


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _gigabytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:.1f}"


# ---- the bus


def measure_bus(torch: Any, place: str) -> Bus:
    """The bandwidth of the best of several copies each way, and of both ways at once on two streams."""
    up_from, down_to = (torch.empty(BUS_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    up_to, down_from = (torch.empty(BUS_BYTES, dtype=torch.uint8, device=place) for _ in range(2))
    streams = [torch.cuda.Stream(place) for _ in range(2)]

    def up() -> None:
        with torch.cuda.stream(streams[0]):
            up_to.copy_(up_from, non_blocking=True)

    def down() -> None:
        with torch.cuda.stream(streams[1]):
            down_to.copy_(down_from, non_blocking=True)

    def best(*copies: Callable[[], None]) -> float:
        def way(_: int) -> None:
            for copy in copies:
                copy()

        times = wall_times((way,), 1, Effort(rounds=BUS_ROUNDS, seconds=0), lambda: torch.cuda.synchronize(place))
        return len(copies) * BUS_BYTES / min(times[0])

    torch.cuda.synchronize(place)
    return Bus(best(up), best(down), best(up, down))


# ---- one row


def draw(problem: ConvProblem, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random input and filter."""
    rng = np.random.default_rng(seed)
    dtype: Any = problem.dtype
    x, w = (rng.standard_normal(shape, dtype) for shape in (problem.input_shape, problem.weight_shape))
    return x, w


def torch_way(torch: Any, case: HostCase, place: str, x: np.ndarray, w: np.ndarray) -> Callable[[int], np.ndarray]:
    """numpy in, numpy out, with torch."""
    function, arguments = torch.nn.functional.conv2d, options(case.problem)
    if case.kept:
        there = torch.from_numpy(w).to(place)
        return lambda i: function(torch.from_numpy(x).to(place), there, **arguments).cpu().numpy()
    return lambda i: function(torch.from_numpy(x).to(place), torch.from_numpy(w).to(place), **arguments).cpu().numpy()


def by_hand_way(torch: Any, case: HostCase, place: str, x: np.ndarray, w: np.ndarray) -> Callable[[int], np.ndarray]:
    """numpy in, numpy out, with torch as its users write it who want it fast.

    Chunks of images go by turns through two places of page-locked memory and two streams: while one is convolved, the other is copied.
    """
    function, arguments, problem = torch.nn.functional.conv2d, options(case.problem), case.problem
    dtype, chunk = getattr(torch, problem.dtype), -(-problem.N // min(problem.N, CHUNKS))
    sizes = [shape[1:] for shape in (problem.input_shape, problem.result_shape)]
    places = [[torch.empty((chunk, *size), dtype=dtype, pin_memory=True) for size in sizes] for _ in range(2)]
    streams = [torch.cuda.Stream(place) for _ in range(2)]
    given, kept = torch.from_numpy(x), torch.from_numpy(w).to(place) if case.kept else None

    def way(_: int) -> np.ndarray:
        there = torch.from_numpy(w).to(place) if kept is None else kept
        result = np.empty(problem.result_shape, problem.dtype)
        out = torch.from_numpy(result)
        coming: list[slice | None] = [None, None]

        def fetch(turn: int) -> None:
            part = coming[turn]
            if part is not None:
                streams[turn].synchronize()
                out[part].copy_(places[turn][1][: len(out[part])])

        for i, first in enumerate(range(0, problem.N, chunk)):
            turn, part = i % 2, slice(first, first + chunk)
            fetch(turn)
            count = len(given[part])
            staged, back = (one[:count] for one in places[turn])
            staged.copy_(given[part])
            with torch.cuda.stream(streams[turn]):
                back.copy_(function(staged.to(place, non_blocking=True), there, **arguments), non_blocking=True)
            coming[turn] = part
        for turn in (i + 1) % 2, i % 2:  # the older chunk first
            fetch(turn)
        return result

    return way


def our_way(case: HostCase, device: Device, x: np.ndarray, w: np.ndarray, **more: Any) -> Callable[[int], np.ndarray]:
    """numpy in, numpy out, with this package."""
    if case.kept:
        bound = Plan(case.problem, device).bind(w)
        return lambda i: bound(x)
    where = more or {"device": device}
    arguments = options(case.problem)
    return lambda i: pycuda_conv.conv2d(x, w, **arguments, **where)


def difference(result: np.ndarray, reference: np.ndarray) -> float:
    """norm(result - reference) / norm(reference); NaN if the result has one."""
    return float(np.linalg.norm((result - reference).ravel()) / np.linalg.norm(reference.ravel()))


def measure(
    torch: Any, case: HostCase, device: Device, place: str, pin: Callable[[np.ndarray], np.ndarray], bus: Bus, effort: Effort, seed: int
) -> HostRow:
    """Verify and time one case; a wrong result gets no time. `pin` copies an array to page-locked memory."""
    x, w = draw(case.problem, seed)
    in_bytes, out_bytes = x.nbytes + (0 if case.kept else w.nbytes), case.problem.itemsize * int(np.prod(case.problem.result_shape))
    theirs = torch_way(torch, case, place, x, w)
    by_hand = theirs if place == "cpu" else by_hand_way(torch, case, place, x, w)  # page-locked memory and streams are a GPU's
    ways = [theirs, our_way(case, device, x, w), our_way(case, device, pin(x), pin(w)), by_hand]
    reference = theirs(0)
    errors = [difference(way(0), reference) for way in ways[1:]]
    error = float(np.max(errors))  # max() would drop a NaN
    known = {"problem": str(case), "in_bytes": in_bytes, "out_bytes": out_bytes, "error": error}
    if not error < LIMITS[case.problem.dtype]:
        return HostRow(**known, verdict="WRONG")  # type: ignore[arg-type]
    del reference
    torch_s, ours_s, pinned_s, by_hand_s = (median(taken) for taken in wall_times(ways, 1, effort))
    return HostRow(
        str(case), in_bytes, out_bytes, error, torch_s * 1e3, ours_s * 1e3, pinned_s * 1e3, bus.part(in_bytes, out_bytes, ours_s),
        bus.part(in_bytes, out_bytes, pinned_s), by_hand_ms=by_hand_s * 1e3,
    )


def measure_scaling(
    torch: Any, case: HostCase, gpus: Sequence[int], place: str, pin: Callable[[np.ndarray], np.ndarray], effort: Effort, seed: int
) -> list[ScalingRow]:
    """The rows of one case on 1, 2, 4 ... GPUs, and of copies alone; all numbers of GPUs are measured in turn."""
    x, w = draw(case.problem, seed)
    pinned_x, pinned_w = pin(x), pin(w)
    device = get_device(gpus[0])
    numbers = numbers_of_gpus(len(gpus))
    ways: list[Callable[[int], Any]] = []
    for count in numbers:
        shared = list(gpus[:count])
        ways += [our_way(case, device, x, w, devices=shared), our_way(case, device, pinned_x, pinned_w, devices=shared)]
    reference = torch_way(torch, case, place, x, w)(0)
    errors = [difference(way(0), reference) for way in ways]
    nbytes = x.nbytes + w.nbytes + reference.nbytes
    del reference
    images = x.reshape(len(x), 1, -1)
    back = pin(images)
    for count in numbers:
        for one in (images, pinned_x.reshape(images.shape)):
            ways.append(partial(_copy_there_and_back, [get_device(number) for number in gpus[:count]], one, back))
    seconds = [median(taken) for taken in wall_times(ways, 1, effort)]
    copies = seconds[2 * len(numbers) :]
    rows = []
    for i, count in enumerate(numbers):
        both = slice(2 * i, 2 * i + 2)  # from ordinary and from page-locked memory
        error, (ours, pinned), (alone, pinned_alone) = float(np.max(errors[both])), seconds[both], copies[both]
        if error < LIMITS[case.problem.dtype]:
            rows.append(ScalingRow(
                count, error, nbytes, ours * 1e3, pinned * 1e3, seconds[0] / ours, alone * 1e3, seconds[1] / pinned, pinned_alone * 1e3
            ))
        else:
            rows.append(ScalingRow(count, error, nbytes, verdict="WRONG"))
    return rows


def _copy_there_and_back(gpus: Sequence[Any], x: np.ndarray, y: np.ndarray, _: int) -> None:
    copy_only(gpus, x, y)


# ---- the command


def cases(settings: bench.Settings) -> list[HostCase]:
    """The cases whose text matches --only."""
    return bench.matching(settings.only, CASES, str)


def list_problems(settings: bench.Settings) -> int:
    """Print the problems' texts."""
    print_pairs(((str(case), f"{case.problem.bytes / 1e6:9.2f} MB") for case in cases(settings)), 60)
    return OK


def _device(settings: bench.Settings, gpus: Sequence[int] | None) -> Device:
    bench.refuse_suite_options(settings, "--host", "fp32")
    missing = driver.why_not()
    if missing:
        raise ToolError(f"--host needs a GPU, but {missing}")
    device = named_device(settings.device if settings.device is not None else gpus[0] if gpus else "cuda")
    if device.backend != "cuda":
        raise ToolError(f"--host needs a GPU: it measures the bus to it, and {device.name} has none")
    torch = require("torch")
    if not torch.cuda.is_available():
        raise ToolError(f"torch {torch.__version__} can't use the GPU; the benchmark needs a torch built for CUDA")
    return device


def run(settings: bench.Settings, devices: Any = None) -> int:
    """Measure, print, and write the JSON that was asked for. `devices` are the GPUs to scale over: "all" or their numbers."""
    chosen = cases(settings)
    device = _device(settings, None if devices == "all" else devices)
    gpus = list(range(device_count())) if devices == "all" else devices
    for one in gpus or ():
        named_device(one)
    bench.check_paths(settings, "host")
    torch = require("torch")
    seed = secrets.randbelow(2**31) if settings.seed is None else settings.seed
    effort = Effort(rounds=7, seconds=0.3) if settings.quick else Effort(rounds=9, seconds=2)
    out = console()
    began = time.monotonic()
    torch.cuda.set_device(device.name)

    def pin(array: np.ndarray) -> np.ndarray:
        copied: np.ndarray = torch.from_numpy(array).pin_memory().numpy()
        return copied

    rows: list[HostRow] = []
    scaling: list[ScalingRow] = []
    with torch.no_grad(), cudnn_set(torch, "benchmark", True), torch_precision("fp32") as words:
        machine = bench.describe(torch, device, "fp32", words, seed)
        bus = measure_bus(torch, device.name)
        machine |= {
            "bus": str(bus), "method": "median of wall-clock times, numpy in to numpy out; all ways in turn",
            "command": _command(settings, devices),
        }
        for line in header_lines(machine):
            out.print(line, markup=False)
        for i, case in enumerate(track(chosen, str)):
            if settings.over(began):
                break
            try:
                rows.append(measure(torch, case, device, device.name, pin, bus, effort, seed + i))
            except (DeviceMemoryError, torch.OutOfMemoryError):
                rows.append(HostRow(str(case), 0, 0, verdict="no memory"))
            torch.cuda.empty_cache()
        machine["method"] += settings.cut(len(rows), len(chosen), "problems")
        if gpus and not settings.over(began):
            scaling = measure_scaling(torch, chosen[0], gpus, device.name, pin, effort, seed)
    _print(out, rows, scaling, chosen[0])
    if settings.json is not None:
        report = {
            "machine": machine | {"seconds": time.monotonic() - began}, "bus": asdict(bus),
            "rows": [asdict(row) | {"ratio": row.ratio} for row in rows],
            "scaling": [
                asdict(row) | {"bytes_per_second": row.rate(row.ours_ms), "pinned_bytes_per_second": row.rate(row.pinned_ms)}
                for row in scaling
            ],
        }
        try:
            write_json(settings.json, report)
        except OSError as error:
            raise ToolError(f"can't write the report: {error}") from error
    if settings.pages is not None:
        write_between(settings.pages / RESULTS_PAGE, markdown(machine, rows, scaling, chosen[0]), "host")
    out.print(f"{time.monotonic() - began:.0f} s in all")
    return FAILED if "WRONG" in [row.verdict for row in rows] + [row.verdict for row in scaling] else OK


def _command(settings: bench.Settings, devices: Any) -> str:
    words = settings.command.removeprefix("make bench").removeprefix("pycuda-conv bench")
    shared = "" if devices is None else f" --devices {devices if devices == 'all' else ','.join(map(str, devices))}"
    return f"pycuda-conv bench --host{shared}{words}"


def markdown(machine: dict[str, Any], rows: Sequence[HostRow], scaling: Sequence[ScalingRow], shared: HostCase) -> str:
    """The results for the page. `machine` is the header of the report, `shared` the case that several GPUs shared."""

    def lines(found: Sequence[HostRow] | Sequence[ScalingRow]) -> list[tuple[str, ...]]:
        return [row.cells()[:-1] if row.verdict == "ok" else (row.cells()[0], f"**{row.verdict}**", *row.cells()[2:-1]) for row in found]

    parts = [measured_by(machine), f"The bus carries {machine['bus']}.", markdown_table(COLUMNS[:-1], 1, lines(rows))]
    if scaling:
        parts.append(f"{shared} on several GPUs; GB/s counts what goes in and what comes out:")
        parts.append(markdown_table(SCALING_COLUMNS[:-1], 0, lines(scaling)))
    return "\n\n".join(parts)


def _print(out: Any, rows: Sequence[HostRow], scaling: Sequence[ScalingRow], shared: HostCase) -> None:
    styles = ["bold red" if row.verdict != "ok" else "green" if (row.ratio or 0) >= 1 else "" for row in rows]
    title = "numpy in, numpy out; ratio = torch's time / ours, above 1 ours is faster; page-locked: ours from such input"
    out.print()
    out.print(table(title, COLUMNS, [row.cells() for row in rows], left=("problem", "verdict"), styles=styles))
    if scaling:
        title = f"{shared} on several GPUs; GB/s counts what goes in and what comes out"
        out.print(table(title, SCALING_COLUMNS, [row.cells() for row in scaling], left=("verdict",)))
