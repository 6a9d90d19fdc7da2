"""How fast is it? Every problem of the suite against torch on the same arrays, each verified before it is timed."""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import math
import re
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pycuda_conv
from pycuda_conv.errors import DeviceMemoryError
from pycuda_conv.plan import Plan
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime import Device, cuda
from pycuda_conv.tools.info import attributes, nvcc_version, nvidia_smi, versions
from pycuda_conv.tools.oracle import Errors, ErrorSums, options, torch_for, torch_precision
from pycuda_conv.tools.plans import plans
from pycuda_conv.tools.report import (
    Row,
    around_results,
    header_lines,
    markdown,
    median,
    microseconds,
    number,
    row_table,
    spread,
    summary,
    summary_lines,
    write_between,
    write_csv,
    write_json,
)
from pycuda_conv.tools.suite import suite
from pycuda_conv.tools.terminal import FAILED, OK, ToolError, console, named_device, require, table, track
from pycuda_conv.tools.timing import Effort, gpu_times, host_times, operand_sets, wall_times

REFERENCE_FLOPS = 50e9  # in float64, for a row; the errors are taken over as many images as that pays for
REFERENCE_IMAGES = 4  # but over no fewer
SLICE_BYTES = 2**31  # of float64 arrays at a time
PORTABLE_FLOPS = 0.5e9  # the largest problem that is measured on PoCL unless --only asks for more
HOST_PROBLEM = ConvProblem.forward(2, (4, 16, 32, 32), (32, 16, 3, 3), padding=1)
COPY_FLOATS = 2**28  # 1 GiB, many times any cache
COPY_WARM_UP, COPY_ROUNDS = 50, 30  # after idling, the GPU's clocks are low at first
LOOP_PROBLEMS = (
    ConvProblem.forward(2, (2, 4, 5, 5), (8, 4, 3, 3), padding=1), ConvProblem.forward(2, (32, 16, 7, 7), (1, 16, 3, 3), padding=1),
    HOST_PROBLEM,
)


@dataclass(frozen=True)
class Settings:
    """The command's arguments."""

    only: str | None = None
    precision: str = "fp32"
    quick: bool = False
    host_calls: bool = False
    device: Any = None
    seed: int | None = None
    json: Path | None = None
    csv: Path | None = None
    plots: Path | None = None
    readme: Path | None = None

    @property
    def effort(self) -> Effort:
        """How long to measure a row."""
        return Effort(rounds=3, seconds=0.06) if self.quick else Effort()

    @property
    def command(self) -> str:
        """What to type to measure the same again, on other random data."""
        words = [] if self.only is None else ["--only", self.only]
        words += [] if self.device is None else ["--device", str(self.device)]
        words += [] if self.precision == "fp32" else ["--precision", self.precision]
        words += ["--quick"] * self.quick + ["--host-calls"] * self.host_calls
        return shlex.join(["pycuda-conv", "bench", *words]) if words else "make bench"


def label(problem: ConvProblem) -> str:
    """A problem's text in the tables; what is the same in all of them is left out."""
    return str(dataclasses.replace(problem, precision="fp32")).removesuffix(" float32")


def problems(settings: Settings, backend: str) -> list[ConvProblem]:
    """The problems to measure."""
    try:
        pattern = re.compile(settings.only or "")
    except re.error as error:
        raise ToolError(f"--only {settings.only!r} is no regular expression: {error}") from error
    chosen = [dataclasses.replace(p, precision=settings.precision) for p in suite() if pattern.search(label(p))]
    if backend == "opencl" and settings.only is None:
        chosen = [p for p in chosen if p.flops <= PORTABLE_FLOPS]
    if not chosen:
        raise ToolError(f"--only {settings.only!r} matches no problem (--list shows them all)")
    return chosen


def list_problems(settings: Settings) -> int:
    """Print the problems' texts."""
    for problem in problems(settings, "cuda"):
        print(f"{label(problem):60} {problem.flops / 1e9:9.3f} GFLOP {problem.bytes / 1e6:9.2f} MB")
    return OK


# ---- one row


class Operands:
    """Several sets of arrays of one problem, so that a launch does not find in the cache what the last one left."""

    def __init__(self, torch: Any, problem: ConvProblem, place: str, count: int, generator: Any) -> None:
        def draw(shape: Sequence[int]) -> Any:
            return torch.randn(shape, device=place, generator=generator)

        self.count = count
        self.x = [draw(problem.input_shape) for _ in range(count)]
        self.w = [draw(problem.weight_shape) for _ in range(count)]
        self.out = [torch.full(problem.result_shape, math.nan, device=place) for _ in range(count)]

    def poison(self) -> None:
        """Fill every output with NaN."""
        for out in self.out:
            out.fill_(math.nan)


def checked_images(problem: ConvProblem) -> list[int]:
    """The images that the errors are taken over: the first, the last and what lies evenly between."""
    count = min(problem.N, max(REFERENCE_IMAGES, int(REFERENCE_FLOPS * problem.N / max(2 * problem.flops, 1))))
    return sorted({round(i * (problem.N - 1) / max(count - 1, 1)) for i in range(count)})


def errors_against_float64(torch: Any, problem: ConvProblem, x: Any, w: Any, results: Sequence[Any]) -> list[Errors]:
    """Errors of each of `results` against the float64 convolution, over :func:`checked_images`, a few images at a time."""
    function = torch_for(problem)
    images = checked_images(problem)
    sums = [ErrorSums(problem) for _ in results]
    at_once = max(1, int(SLICE_BYTES * problem.N / (4 * 2 * problem.bytes)))
    w64 = w.double()
    for first in range(0, len(images), at_once):
        index = torch.tensor(images[first : first + at_once], device=x.device)
        x64 = x[index].double()
        reference, magnitude = function(x64, w64), function(x64.abs_(), w64.abs())
        for result, into in zip(results, sums, strict=True):
            into.add(result[index].double(), reference, magnitude)
    return [s.errors() for s in sums]


def _blank(plan: Plan, **known: Any) -> Row:
    problem, config = plan.problem, plan.config
    return Row(label(problem), type(config).__name__, str(config), problem.flops, problem.bytes, problem.groups, **known)


def measure(torch: Any, plan: Plan, effort: Effort, seed: int, cache_bytes: int) -> Row:
    """Verify and time one problem; a wrong result gets no time."""
    problem, on_gpu = plan.problem, plan.device.backend == "cuda"
    place = plan.device.name if on_gpu else "cpu"
    generator = torch.Generator(place).manual_seed(seed)
    sets = Operands(torch, problem, place, operand_sets(problem, cache_bytes) if on_gpu else 1, generator)
    function = torch_for(problem)
    theirs_out: list[Any] = [None] * sets.count  # kept, so that torch writes to as much memory as we do

    def ours(i: int) -> None:
        plan(sets.x[i], sets.w[i], out=sets.out[i])

    def theirs(i: int) -> None:
        theirs_out[i] = function(sets.x[i], sets.w[i])

    def judge() -> tuple[Errors, Errors, bool]:
        """Our errors, torch's, and whether ours are right, with every element of every output written."""
        with cudnn_benchmark(torch, False):  # to try all of cuDNN's float64 kernels would take longer than the reference
            mine, rival = errors_against_float64(torch, problem, sets.x[0], sets.w[0], [sets.out[0], theirs_out[0]])
        return mine, rival, mine.correct and not any(bool(out.isnan().any()) for out in sets.out)

    for i in range(sets.count):
        ours(i)
    theirs(0)
    mine, rival, right = judge()
    times: list[list[float]] = []
    how = ""
    if right:
        sets.poison()
        if on_gpu:
            times, how = gpu_times(torch, (ours, theirs), sets.count, effort)
        else:
            times, how = wall_times((ours, theirs), sets.count, effort), "wall"
        mine, rival, right = judge()  # what was timed is checked too
    known = {"error": mine.relative, "torch_error": rival.relative, "of_bound": mine.of_bound, "images": len(checked_images(problem))}
    if not right:
        return _blank(plan, **known, verdict="WRONG")
    (ours_us, torch_us), (ours_spread, torch_spread) = [median(t) * 1e6 for t in times], [spread(t) for t in times]
    return _blank(plan, **known, ours_us=ours_us, torch_us=torch_us, ours_spread=ours_spread, torch_spread=torch_spread, timing=how)


@contextmanager
def cudnn_benchmark(torch: Any, value: bool) -> Iterator[None]:
    cudnn = torch.backends.cudnn
    before, cudnn.benchmark = cudnn.benchmark, value
    try:
        yield
    finally:
        cudnn.benchmark = before


def measure_suite(torch: Any, ready: Sequence[Plan], settings: Settings, seed: int) -> list[Row]:
    """A row for every plan."""
    cuda_device = ready[0].device.backend == "cuda"
    cache_bytes = torch.cuda.get_device_properties(ready[0].device.name).L2_cache_size if cuda_device else 0
    rows = []
    for i, plan in enumerate(track(ready, lambda plan: label(plan.problem))):
        try:
            row = measure(torch, plan, settings.effort, seed + i, cache_bytes)
        except (DeviceMemoryError, torch.OutOfMemoryError):
            row = _blank(plan, verdict="no memory")
        if cuda_device:
            torch.cuda.empty_cache()
        rows.append(row)
        if not sys.stderr.isatty():  # no progress bar: a line for each row, in case the run is cut short
            times = f"{microseconds(row.ours_us)} us, torch {microseconds(row.torch_us)} us"
            print(f"[{i + 1}/{len(ready)}] {row.problem}: {times}, {row.verdict}", file=sys.stderr, flush=True)
    return rows


# ---- the smaller tables


def channel_loop(torch: Any, problem: ConvProblem, x: Any, w: Any) -> Any:
    """The convolution as a Python loop over images and channels: a single-channel conv2d each, added up by torch."""
    y = torch.zeros(problem.result_shape, device=x.device)
    arguments = options(problem)
    for n in range(problem.N):
        for k in range(problem.K):
            for c in range(problem.C):
                y[n, k] += pycuda_conv.conv2d(x[n : n + 1, c : c + 1], w[k : k + 1, c : c + 1], **arguments)[0, 0]
    return y


def measure_loops(torch: Any, device: Device, settings: Settings, seed: int) -> list[dict[str, Any]]:
    """The Python loop against the single launch."""
    on_gpu = device.backend == "cuda"
    place = device.name if on_gpu else "cpu"
    found = []
    for problem in track(LOOP_PROBLEMS, lambda p: f"Python loop: {label(p)}"):
        plan = Plan(problem, device)
        sets = Operands(torch, problem, place, 1, torch.Generator(place).manual_seed(seed))
        x, w, out = sets.x[0], sets.w[0], sets.out[0]
        results: list[Any] = [None]

        def loop(_: int, problem: ConvProblem = problem, x: Any = x, w: Any = w, results: list[Any] = results) -> None:
            results[0] = channel_loop(torch, problem, x, w)

        def single(_: int, plan: Plan = plan, x: Any = x, w: Any = w, out: Any = out) -> None:
            plan(x, w, out=out)

        wait = torch.cuda.synchronize if on_gpu else lambda: None
        loop_seconds, single_seconds = (median(wall_times((way,), 1, settings.effort, wait)[0]) for way in (loop, single))
        correct = all(e.correct for e in errors_against_float64(torch, problem, x, w, [results[0], out]))
        found.append({
            "problem": label(problem), "calls": problem.N * problem.K * problem.C, "loop_us": loop_seconds * 1e6,
            "single_us": single_seconds * 1e6, "ratio": loop_seconds / single_seconds, "verdict": "ok" if correct else "WRONG",
        })
    return found


def measure_host_calls(torch: Any, device: Device) -> list[dict[str, Any]]:
    """What one call costs on the host: the launch is asynchronous, so this is Python's and the driver's part."""
    functional = torch.nn.functional
    plan = Plan(HOST_PROBLEM, device)
    sets = Operands(torch, HOST_PROBLEM, device.name, 1, None)
    x, w, out = sets.x[0], sets.w[0], sets.out[0]
    ways: list[tuple[str, Callable[[], Any]]] = [
        ("F.conv2d(x, w)", lambda: functional.conv2d(x, w, padding=1)),
        ("pc.conv2d(x, w)", lambda: pycuda_conv.conv2d(x, w, padding=1)),
        ("pc.conv2d(x, w, out=out)", lambda: pycuda_conv.conv2d(x, w, padding=1, out=out)),
        ("plan(x, w)", lambda: plan(x, w)),
        ("plan(x, w, out=out)", lambda: plan(x, w, out=out)),
    ]
    return [{"problem": label(HOST_PROBLEM), "call": name, "us": host_times(way, torch.cuda.synchronize) * 1e6} for name, way in ways]


# ---- the machine


def copy_bandwidth(torch: Any, place: str) -> float:
    """Bytes a second that a copy inside the GPU's memory moves at its best, counting those read and those written.

    The driver's copy or a kernel that moves as much, whichever is faster.
    """
    source = torch.randn(COPY_FLOATS, device=place)
    target = torch.randn(COPY_FLOATS, device=place)
    for _ in range(COPY_WARM_UP):
        target.copy_(source)
    ways = (lambda i: target.copy_(source), lambda i: torch.neg(source, out=target))
    times, _ = gpu_times(torch, ways, 1, Effort(rounds=COPY_ROUNDS))
    return float(2 * source.numel() * source.element_size() / min(map(min, times)))  # a ceiling: the best round, not the middle one


def fp32_peak(capability: tuple[int, int], multiprocessors: int, clock_hz: float) -> float:
    """FLOP/s of the plain fp32 units, computed: units x 2 x clock."""
    units = 64 if capability[0] == 7 or capability == (8, 0) else 128
    return multiprocessors * units * 2 * clock_hz


def describe(torch: Any, device: Device, precision: str, words: str, seed: int) -> dict[str, Any]:
    """What was measured where: the header of every report."""
    found: dict[str, Any] = {"date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"), "device": device.name}
    known = versions()
    if device.backend == "cuda":
        gpu: Any = device
        driver = importlib.import_module("pycuda.driver")
        handle = driver.Device(gpu.ordinal)
        clock = float(attributes(handle, driver.device_attribute).get("CLOCK_RATE", 0)) * 1e3
        smi = nvidia_smi("driver_version", "clocks.current.sm", "power.limit", pci_bus_id=handle.pci_bus_id())
        properties = torch.cuda.get_device_properties(device.name)
        found |= {
            "GPU": f"{handle.name()}, compute capability {gpu.capability[0]}.{gpu.capability[1]}, {gpu.multiprocessors} multiprocessors",
            "memory": f"{properties.total_memory / 2**30:.0f} GiB, L2 {properties.L2_cache_size / 2**20:.0f} MiB",
            "clocks": f"as found, not locked: SM {clock / 1e6:.0f} MHz at most, {smi.get('clocks.current.sm', '?')} at the start, "
            f"power limit {smi.get('power.limit', '?')}",
            "driver": f"{smi.get('driver_version', '?')}, CUDA {known['CUDA driver supports']}, nvcc {nvcc_version()}",
            "peak_flops": fp32_peak(gpu.capability, gpu.multiprocessors, clock),
            "copy_bytes_per_second": copy_bandwidth(torch, device.name),
        }
        found["ceilings"] = (
            f"copy {found['copy_bytes_per_second'] / 1e12:.2f} TB/s measured, fp32 units {found['peak_flops'] / 1e12:.1f} TFLOP/s computed"
        )
        method = "median; CUDA graphs below 1 ms, launches above; ours and torch's in turn; operands rotate over twice the L2"
    else:
        cl: Any = device
        found |= {"CPU": cl.device.name.strip(), "torch threads": torch.get_num_threads()}
        method = "median of wall-clock times; ours and torch's in turn"
    cudnn = f", CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, cudnn.benchmark = True, {words}"
    found |= {
        "torch": str(torch.__version__) + (cudnn if device.backend == "cuda" else ", on the CPU"), "pycuda_conv": pycuda_conv.__version__,
        "Python": known["Python"], "PyCUDA": known["PyCUDA"], "precision": precision, "method": method, "seed": seed,
    }
    return found


# ---- the command


def _device(settings: Settings) -> Device:
    if settings.device is None:
        missing = cuda.why_not()
        if missing:
            raise ToolError(f"no GPU to measure: {missing}. --device opencl measures a few small problems on PoCL against torch on the CPU")
    device = named_device("cuda" if settings.device is None else settings.device)
    torch = require("torch")
    if device.backend == "cuda" and not torch.cuda.is_available():
        raise ToolError(f"torch {torch.__version__} can't use the GPU; the benchmark needs a torch built for CUDA")
    if device.backend == "opencl" and settings.host_calls:
        raise ToolError("--host-calls measures launches that don't wait; on OpenCL every call waits for its result")
    return device


def run(settings: Settings) -> int:
    """Measure, print, write the files that were asked for."""
    began = time.perf_counter()
    device = _device(settings)
    torch = require("torch")
    if settings.plots is not None:
        require("matplotlib")
    check_paths(settings)
    chosen = [] if settings.host_calls else problems(settings, device.backend)
    seed = secrets.randbelow(2**31) if settings.seed is None else settings.seed
    out = console()
    rows: list[Row] = []
    loops: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    if device.backend == "cuda":
        torch.cuda.set_device(device.name)
    with torch.no_grad(), cudnn_benchmark(torch, True), torch_precision(settings.precision) as words:
        machine = describe(torch, device, settings.precision, words, seed) | {"command": settings.command}
        for line in header_lines(machine):
            out.print(line, markup=False)
        if chosen:
            rows = measure_suite(torch, plans(chosen, device), settings, seed)
        if chosen and settings.only is None:
            loops = measure_loops(torch, device, settings, seed)
        if settings.host_calls or (settings.only is None and device.backend == "cuda"):
            calls = measure_host_calls(torch, device)
    means = summary(rows)
    out.print()
    if rows:
        out.print(row_table(rows, "F.conv in torch on the same arrays", out.width))
        for line in summary_lines(means):
            out.print(line, markup=False, style="bold")
        out.print()
    if loops:
        out.print(_loop_table(loops))
    if calls:
        title = f"Host time of one call, torch tensors, {label(HOST_PROBLEM)}"
        out.print(table(title, ("call", "us"), [(c["call"], f"{c['us']:.1f}") for c in calls], left=("call",)))
    report = {
        "machine": machine | {"seconds": time.perf_counter() - began}, "rows": [row.record() for row in rows], "summary": means,
        "loop": loops, "host_calls": calls,
    }
    _write(settings, report, rows)
    wrong = [r.problem for r in rows if r.verdict == "WRONG"] + [r["problem"] for r in loops if r["verdict"] == "WRONG"]
    for problem in wrong:
        out.print(f"WRONG: {problem}", markup=False, style="bold red")
    out.print(f"{time.perf_counter() - began:.0f} s in all")
    return FAILED if wrong else OK


def _loop_table(loops: Sequence[dict[str, Any]]) -> Any:
    cells = [
        (r["problem"], str(r["calls"]), microseconds(r["loop_us"]), microseconds(r["single_us"]), number(r["ratio"], ".0f"), r["verdict"])
        for r in loops
    ]
    columns = ("problem", "calls", "loop us", "single us", "ratio", "verdict")
    return table("A Python loop of single-channel convolutions against one call", columns, cells, left=("problem", "verdict"))


def check_paths(settings: Settings) -> None:
    """Refuse what can't be written before anything is measured for it."""
    for path in (settings.json, settings.csv):
        if path is not None and not path.resolve().parent.is_dir():
            raise ToolError(f"{path} can't be written: {path.resolve().parent} is no folder")
        if path is not None and path.is_dir():
            raise ToolError(f"{path} can't be written: it is a folder")
    if settings.plots is not None and settings.plots.exists() and not settings.plots.is_dir():
        raise ToolError(f"{settings.plots} must be a folder: ratios.png and roofline.png are written there")
    if settings.readme is not None:
        around_results(settings.readme)


def _write(settings: Settings, report: dict[str, Any], rows: Sequence[Row]) -> None:
    machine = report["machine"]
    try:
        if settings.json is not None:
            write_json(settings.json, report)
        if settings.csv is not None:
            write_csv(settings.csv, rows)
        if settings.plots is not None and rows:
            from pycuda_conv.tools.plots import ratio_bars, roofline

            settings.plots.mkdir(parents=True, exist_ok=True)
            ratio_bars(rows, machine, settings.plots / "ratios.png")
            roofline(rows, machine, settings.plots / "roofline.png")
        if settings.readme is not None:
            write_between(settings.readme, markdown(machine, rows, report["summary"], report["loop"], report["host_calls"]))
    except OSError as error:
        raise ToolError(f"can't write the report: {error}") from error
