"""The benchmark: every problem of the suite against torch on the same arrays, each verified before it is timed."""

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pycuda_conv
from pycuda_conv import tune
from pycuda_conv.engines import uses_tensor_cores
from pycuda_conv.errors import DeviceMemoryError
from pycuda_conv.plan import Plan, cached_plan, reads_channels_last
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime import Device, driver
from pycuda_conv.runtime.compiler import compiler
from pycuda_conv.timing import Effort, gpu_times, host_times, operand_sets, wall_times
from pycuda_conv.tools.benchmarks import peaks
from pycuda_conv.tools.benchmarks.pages import digest
from pycuda_conv.tools.floors import H200, Rates, floor
from pycuda_conv.tools.info import attributes, nvidia_smi, versions
from pycuda_conv.tools.oracle import Errors, Truth, cudnn_set, options, torch_for, torch_precision
from pycuda_conv.tools.plans import plans
from pycuda_conv.tools.report import (
    FRONT_PAGE,
    FRONT_PARTS,
    NOTES,
    RESULTS_PAGE,
    Row,
    around_results,
    header_lines,
    markdown,
    median,
    microseconds,
    notes,
    number,
    row_table,
    spread,
    summary,
    summary_lines,
    write_between,
    write_csv,
    write_json,
)
from pycuda_conv.tools.suite import MODES, in_mode, kind_of, mode_words, suite
from pycuda_conv.tools.terminal import FAILED, OK, ToolError, console, named_device, print_pairs, require, table, track

T = TypeVar("T")

PORTABLE_FLOPS = 0.5e9  # PoCL measures larger problems only if --only asks for them
HOST_PROBLEM = ConvProblem.forward(2, (4, 16, 32, 32), (32, 16, 3, 3), padding=1)
LOOP_PROBLEMS = (
    ConvProblem.forward(2, (2, 4, 5, 5), (8, 4, 3, 3), padding=1), ConvProblem.forward(2, (32, 16, 7, 7), (1, 16, 3, 3), padding=1),
    HOST_PROBLEM,
)


@dataclass(frozen=True)
class Settings:
    """The command's arguments."""

    only: str | None = None
    kind: str | None = None
    modes: tuple[str, ...] = ("fp32",)
    quick: bool = False
    host_calls: bool = False
    device: Any = None
    seed: int | None = None
    #: begin no further case after so many
    seconds: float | None = None
    json: Path | None = None
    csv: Path | None = None
    plots: Path | None = None
    pages: Path | None = None
    #: leave measured choices out of account
    untuned: bool = False

    def over(self, began: float) -> bool:
        """Whether what began at this reading of ``time.monotonic`` has to begin nothing more."""
        return self.seconds is not None and time.monotonic() - began > self.seconds

    def cut(self, done: int, wanted: int, what: str) -> str:
        """What the method says of a run that ended before all was done; empty if it didn't."""
        return "" if done == wanted or self.seconds is None else f". Stopped after {self.seconds:.0f} s: {done} of {wanted} {what}"

    @property
    def effort(self) -> Effort:
        """How long to measure a row; less for many rows."""
        if self.quick:
            return Effort(rounds=3, seconds=0.06)
        return Effort(rounds=5, seconds=0.08) if len(self.modes) > 1 else Effort()

    @property
    def command(self) -> str:
        """The command that measures the same again, on other random data."""
        words = [] if self.only is None else ["--only", self.only]
        words += [] if self.kind is None else ["--kind", self.kind]
        words += [] if self.device is None else ["--device", str(self.device)]
        modes = ["all"] if self.modes == tuple(MODES) else self.modes
        words += [] if self.modes == ("fp32",) else ["--mode", *modes]
        words += ["--quick"] * self.quick + ["--host-calls"] * self.host_calls + ["--untuned"] * self.untuned
        return shlex.join(["pycuda-conv", "bench", *words]) if words else "make bench"


def label(problem: ConvProblem) -> str:
    """A problem's text in the tables, without what the mode says."""
    return str(dataclasses.replace(problem, dtype="float32", precision="fp32", layout="NCHW")).removesuffix(" float32")


def matching(only: str | None, items: Sequence[T], text: Callable[[T], str]) -> list[T]:
    """The `items` whose text matches --only."""
    try:
        pattern = re.compile(only or "")
    except re.error as error:
        raise ToolError(f"--only {only!r} is no regular expression: {error}") from error
    found = [item for item in items if pattern.search(text(item))]
    if not found:
        raise ToolError(f"--only {only!r} matches no problem (--list shows them all)")
    return found


def problems(settings: Settings, backend: str) -> list[ConvProblem]:
    """The problems to measure, in fp32."""
    few = backend == "opencl" and settings.only is None
    kind = "core" if few and settings.kind is None else settings.kind
    chosen = matching(settings.only, [p for p in suite() if kind in (None, kind_of(p))], label)
    return [p for p in chosen if p.flops <= PORTABLE_FLOPS] if few else chosen


def list_problems(settings: Settings) -> int:
    """Print the problems' texts."""
    chosen = problems(settings, "opencl" if settings.device in ("opencl", "cpu") else "cuda")
    print_pairs(((label(problem), f"{problem.flops / 1e9:9.3f} GFLOP {problem.bytes / 1e6:9.2f} MB") for problem in chosen), 60)
    return OK


# ---- one row


class Operands:
    """Several sets of arrays of one problem, so that no launch finds in the cache what the last one left.

    `out` and `kept` hold the results of calls that pack the filter and of calls that get it packed. `filter_order` is the order of the
    filters' axes in memory, outermost first; by default it is C order.
    """

    def __init__(
        self, torch: Any, problem: ConvProblem, place: str, count: int, generator: Any, filter_order: Sequence[int] | None = None
    ) -> None:
        dtype = getattr(torch, problem.dtype)

        def laid_out(shape: Sequence[int], make: Callable[[Sequence[int]], Any], order: Sequence[int] | None = problem.order) -> Any:
            """The array of `make`, with its axes in that order in memory."""
            order = order or tuple(range(len(shape)))
            return make([shape[i] for i in order]).permute([order.index(i) for i in range(len(shape))])

        def draw(shape: Sequence[int]) -> Any:
            drawn = torch.float64 if dtype == torch.float64 else torch.float32
            return torch.randn(shape, device=place, generator=generator, dtype=drawn).to(dtype)

        def unwritten(shape: Sequence[int]) -> Any:
            return torch.full(shape, math.nan, device=place, dtype=dtype)

        self.count, self._torch = count, torch
        self.x = [laid_out(problem.input_shape, draw) for _ in range(count)]
        self.w = [laid_out(problem.weight_shape, draw, filter_order) for _ in range(count)]
        result_order = None if problem.direction == "wgrad" else problem.order  # every plan writes a filter's gradient in C order
        self.out, self.kept = ([laid_out(problem.result_shape, unwritten, result_order) for _ in range(count)] for _ in range(2))

    def poison(self) -> None:
        """Fill every output with NaN."""
        for out in (*self.out, *self.kept):
            out.fill_(math.nan)

    def written(self) -> bool:
        """Whether every element of every output was written."""
        return not bool(self._torch.stack([out.isnan().any() for out in (*self.out, *self.kept)]).any())


def rival(torch: Any, problem: ConvProblem, x: Sequence[Any], w: Sequence[Any]) -> Callable[[int], Any]:
    """torch's convolution of the i-th input and filter; if the input is channels last, so is the filter."""
    if problem.layout == "NCHW":
        function = torch_for(problem)
        return lambda i: function(x[i], w[i])
    flat = problem.ndim == 1  # torch has channels last for images only
    wide = torch_for(dataclasses.replace(problem, ndim=2) if flat else problem)
    images = [array.unsqueeze(2) for array in x] if flat else x
    memory_format = torch.channels_last_3d if problem.ndim == 3 else torch.channels_last
    filters = [(array.unsqueeze(2) if flat else array).contiguous(memory_format=memory_format) for array in w]
    return lambda i: wide(images[i], filters[i]).squeeze(2) if flat else wide(images[i], filters[i])


def public(problem: ConvProblem) -> Callable[..., Any]:
    """The package's function for `problem`, with its options."""
    name = f"conv{problem.ndim}d" if problem.direction == "fprop" else f"conv_transpose{problem.ndim}d"
    return partial(getattr(pycuda_conv, name), **options(problem), precision=problem.precision)


def _blank(plan: Plan, mode: str, rates: Rates = H200, **known: Any) -> Row:
    problem, config = plan.problem, plan.config
    tensor_cores = uses_tensor_cores(config)
    if plan.device.backend == "cuda":  # the bounds are of GPUs
        least = floor(problem, tensor_cores=tensor_cores, packed=config.packs_images or not tensor_cores, rates=rates)
        known |= {
            "floor_pack_us": least.pack, "floor_compute_us": least.compute, "floor_traffic_us": least.traffic, "floor_us": least.us
        }
    return Row(
        label(problem), type(config).__name__, str(config), problem.flops, problem.bytes, problem.groups, mode, kind=kind_of(problem),
        **known,
    )


def measure(torch: Any, plan: Plan, mode: str, effort: Effort, seed: int, cache_bytes: int, rates: Rates = H200) -> Row:
    """Verify and time one problem; a wrong result gets no time."""
    problem, on_gpu = plan.problem, plan.device.backend == "cuda"
    place = plan.device.name if on_gpu else "cpu"
    generator = torch.Generator(place).manual_seed(seed)
    filter_order = plan.filter_order if plan.reads_filter_last else None  # both sides read it fastest in this order
    sets = Operands(torch, problem, place, operand_sets(problem, cache_bytes) if on_gpu else 1, generator, filter_order)
    truth = Truth(torch, problem, sets.x[0], sets.w[0], seed)
    converted = on_gpu and problem.layout == "NHWC" and not reads_channels_last(problem, plan.device)
    if converted:  # as in the public functions: to NCHW and back, with a filter that is packed in the call, if at all
        plan = cached_plan(dataclasses.replace(problem, layout="NCHW"), plan.device).final_form()
    call = public(problem) if converted else plan
    bound = [partial(call, weight=w) if converted else plan.bind(w) for w in sets.w]
    function = rival(torch, problem, sets.x, sets.w)
    theirs_out: list[Any] = [None] * sets.count  # results are kept, so that torch writes to as much memory as we do

    def ours(i: int) -> None:
        call(sets.x[i], sets.w[i], out=sets.out[i])

    def kept(i: int) -> None:
        bound[i](sets.x[i], out=sets.kept[i])

    def theirs(i: int) -> None:
        theirs_out[i] = function(i)

    def judge() -> tuple[Errors, Errors, bool]:
        """Our errors, torch's, and whether ours are right and every element of every output was written."""
        mine, again, other = (truth.errors(out) for out in (sets.out[0], sets.kept[0], theirs_out[0]))
        return mine, other, mine.correct and again.correct and sets.written()

    for i in range(sets.count):
        ours(i)
        kept(i)
    theirs(0)
    mine, other, right = judge()
    times: list[list[float]] = []
    how = ""
    if right:
        sets.poison()
        ways = (ours, kept, theirs)
        if on_gpu:
            times, how = gpu_times(torch, ways, sets.count, effort)
        else:
            times, how = wall_times(ways, sets.count, effort), "wall"
        mine, other, right = judge()  # the timed results are checked too
    known = {"error": mine.relative, "torch_error": other.relative, "of_bound": mine.of_bound, "channels": truth.channels}
    if not right:
        return _blank(plan, mode, rates, **known, verdict="WRONG")
    names = ("ours", "kept", "torch")
    known |= {f"{name}_us": median(taken) * 1e6 for name, taken in zip(names, times, strict=True)}
    known |= {f"{name}_spread": spread(taken) for name, taken in zip(names, times, strict=True)}
    return _blank(plan, mode, rates, **known, timing=how)


def measure_suite(torch: Any, ready: Sequence[Plan], mode: str, settings: Settings, seed: int, rates: Rates = H200) -> list[Row]:
    """A row for every plan whose turn comes before the end that the settings name."""
    began, own = time.monotonic(), dataclasses.replace(settings, seconds=settings.seconds and settings.seconds / len(settings.modes))
    cuda_device = ready[0].device.backend == "cuda"
    cache_bytes = torch.cuda.get_device_properties(ready[0].device.name).L2_cache_size if cuda_device else 0
    rows = []
    for i, plan in enumerate(track(ready, lambda plan: f"{mode}: {label(plan.problem)}")):
        if own.over(began):
            break
        try:
            row = measure(torch, plan, mode, settings.effort, seed + i, cache_bytes, rates)
        except (DeviceMemoryError, torch.OutOfMemoryError):
            row = _blank(plan, mode, rates, verdict="no memory")
        if cuda_device:
            torch.cuda.empty_cache()
        rows.append(row)
        if not sys.stderr.isatty():  # without a progress bar, print a line for each row, in case the run is cut short
            times = f"{microseconds(row.ours_us)} us, filter kept {microseconds(row.kept_us)}, torch {microseconds(row.torch_us)}"
            print(f"[{mode} {i + 1}/{len(ready)}] {row.problem}: {times}, {row.verdict}", file=sys.stderr, flush=True)
    return rows


# ---- the smaller tables


def channel_loop(torch: Any, problem: ConvProblem, x: Any, w: Any) -> Any:
    """The convolution as a Python loop over images and channels: a conv2d of one channel for each, added up by torch."""
    y = torch.zeros(problem.result_shape, device=x.device)
    arguments = options(problem)
    for n in range(problem.N):
        for k in range(problem.K):
            for c in range(problem.C):
                y[n, k] += pycuda_conv.conv2d(x[n : n + 1, c : c + 1], w[k : k + 1, c : c + 1], **arguments)[0, 0]
    return y


def measure_loops(torch: Any, device: Device, settings: Settings, seed: int) -> list[dict[str, Any]]:
    """The times of the Python loop and of the single launch."""
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
        truth = Truth(torch, problem, x, w)
        correct = all(truth.errors(result).correct for result in (results[0], out))
        found.append({
            "problem": label(problem), "calls": problem.N * problem.K * problem.C, "loop_us": loop_seconds * 1e6,
            "single_us": single_seconds * 1e6, "ratio": loop_seconds / single_seconds, "verdict": "ok" if correct else "WRONG",
        })
    return found


def measure_host_calls(torch: Any, device: Device) -> list[dict[str, Any]]:
    """The host's time for one call: as the launch is asynchronous, this is the part of Python and the driver."""
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


def describe(torch: Any, device: Device, mode: str, words: str, seed: int) -> dict[str, Any]:
    """The conditions of a measurement: the header of every report."""
    found: dict[str, Any] = {"date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"), "device": device.name}
    known = versions()
    if device.backend == "cuda":
        gpu: Any = device
        drv = importlib.import_module("pycuda.driver")
        handle = drv.Device(gpu.ordinal)
        made_by = compiler(drv.get_driver_version() // 1000)
        clock = float(attributes(handle, drv.device_attribute).get("CLOCK_RATE", 0)) * 1e3
        smi = nvidia_smi("driver_version", "clocks.current.sm", "power.limit", pci_bus_id=handle.pci_bus_id())
        properties = torch.cuda.get_device_properties(device.name)
        found |= {
            "GPU": f"{handle.name()}, compute capability {gpu.capability[0]}.{gpu.capability[1]}, {gpu.multiprocessors} multiprocessors",
            "memory": f"{properties.total_memory / 2**30:.0f} GiB, L2 {properties.L2_cache_size / 2**20:.0f} MiB",
            "clocks": f"as found, not locked: SM {clock / 1e6:.0f} MHz at most, {smi.get('clocks.current.sm', '?')} at the start, "
            f"power limit {smi.get('power.limit', '?')}",
            "driver": f"{smi.get('driver_version', '?')}, CUDA {known['CUDA driver supports']}, {made_by.name} {made_by.version}",
            "copy_bytes_per_second": peaks.copy_bandwidth(torch, device.name),
        }
        found["copy"] = f"{found['copy_bytes_per_second'] / 1e12:.2f} TB/s"
        method = "median; CUDA graphs below 1 ms, launches above; all ways in turn; operands rotate over twice the L2"
    else:
        cl: Any = device
        found |= {"CPU": cl.device.name.strip(), "torch threads": torch.get_num_threads()}
        method = "median of wall-clock times; all ways in turn"
    cudnn = f", CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, cudnn.benchmark = True" + (f", {words}" if words else "")
    found |= {
        "torch": str(torch.__version__) + (cudnn if device.backend == "cuda" else ", on the CPU"), "pycuda_conv": pycuda_conv.__version__,
        "Python": known["Python"], "PyCUDA": known["PyCUDA"], "mode": mode, "method": method, "seed": seed, "kernels": digest(),
    }
    return found


# ---- the command


def _device(settings: Settings) -> Device:
    if settings.device is None:
        missing = driver.why_not()
        if missing:
            raise ToolError(f"this needs a GPU, but {missing}. --device opencl measures a few small problems on the CPU")
    device = named_device("cuda" if settings.device is None else settings.device)
    torch = require("torch")
    if device.backend == "cuda" and not torch.cuda.is_available():
        raise ToolError(f"torch {torch.__version__} can't use the GPU; the benchmark needs a torch built for CUDA")
    if device.backend == "opencl" and settings.host_calls:
        raise ToolError("--host-calls measures launches that don't wait; on OpenCL every call waits for its result")
    return device


def gpu_for(settings: Settings, flag: str) -> Device:
    """The GPU to measure on, or a ToolError; `flag` asks for a benchmark that needs one."""
    missing = driver.why_not()
    if missing:
        raise ToolError(f"{flag} needs a GPU, but {missing}")
    device = named_device("cuda" if settings.device is None else settings.device)
    torch = require("torch")
    if device.backend != "cuda" or not torch.cuda.is_available():
        raise ToolError(f"{flag} needs a GPU that torch {torch.__version__} can use")
    return device


def run(settings: Settings) -> int:
    """Measure, print, and write the files that were asked for."""
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
    with torch.no_grad(), cudnn_set(torch, "benchmark", True), tune.untuned(settings.untuned):
        machine = describe(torch, device, ", ".join(settings.modes), arithmetic(settings.modes), seed) | {"command": settings.command}
        for line in header_lines(machine):
            out.print(line, markup=False)
        rates = H200
        if device.backend == "cuda" and chosen:
            rates = peaks.rates(torch, device.name, machine["copy_bytes_per_second"])
            machine |= {"peak_flops": rates.plain, "rates": str(rates)}
            out.print(f"{'rates':14} {rates}", markup=False)
        took = {"before": time.perf_counter() - began}
        if chosen:
            ready = plans([in_mode(problem, mode) for mode in settings.modes for problem in chosen], device)
            took["compiling"] = time.perf_counter() - began - sum(took.values())
            for i, mode in enumerate(settings.modes):
                with torch_precision(_precision(mode)):
                    rows += measure_suite(torch, ready[i * len(chosen) : (i + 1) * len(chosen)], mode, settings, seed, rates)
                took[mode] = time.perf_counter() - began - sum(took.values())
            machine["method"] += settings.cut(len(rows), len(ready), "layers")
        smaller = "fp32" in settings.modes and settings.only is settings.kind is None
        with torch_precision("fp32"):
            if chosen and smaller:
                loops = measure_loops(torch, device, settings, seed)
            if settings.host_calls or (smaller and device.backend == "cuda"):
                calls = measure_host_calls(torch, device)
    means = summary(rows)
    out.print()
    for mode in means:
        own = [row for row in rows if row.mode == mode]
        out.print(row_table(own, f"{mode}: ours against F.conv in torch on the same arrays, {mode_words(mode)}"))
    for line in (*notes(rows), "", *summary_lines(means), "") if rows else ():
        out.print(line, markup=False, style="" if line in NOTES or line.startswith("  ") else "bold")
    if loops:
        out.print(_loop_table(loops))
    if calls:
        title = f"Host time of one call, torch tensors, {label(HOST_PROBLEM)}"
        out.print(table(title, ("call", "us"), [(c["call"], f"{c['us']:.1f}") for c in calls], left=("call",)))
    report = {
        "machine": machine | {"seconds": time.perf_counter() - began, "seconds_of": took}, "rows": [row.record() for row in rows],
        "summary": means, "loop": loops, "host_calls": calls,
    }
    _write(settings, report, rows)
    wrong = [f"{r.problem}, {r.mode}" for r in rows if r.verdict == "WRONG"] + [r["problem"] for r in loops if r["verdict"] == "WRONG"]
    for problem in wrong:
        out.print(f"WRONG: {problem}", markup=False, style="bold red")
    out.print(f"{time.perf_counter() - began:.0f} s in all")
    return FAILED if wrong else OK


def _precision(mode: str) -> str:
    return str(MODES[mode].get("precision", "fp32"))


def arithmetic(modes: Sequence[str]) -> str:
    """Words for the arithmetic of cuDNN in these modes."""
    shared: dict[str, list[str]] = {}
    for mode in modes:
        with torch_precision(_precision(mode)) as words:
            shared.setdefault(words, []).append(mode)
    return " and ".join(words + (f" in {', '.join(some)}" if len(shared) > 1 else "") for words, some in shared.items())


def _loop_table(loops: Sequence[dict[str, Any]]) -> Any:
    cells = [
        (r["problem"], str(r["calls"]), microseconds(r["loop_us"]), microseconds(r["single_us"]), number(r["ratio"], ".0f"), r["verdict"])
        for r in loops
    ]
    columns = ("problem", "calls", "loop us", "single us", "ratio", "verdict")
    return table("A Python loop of single-channel convolutions against one call", columns, cells, left=("problem", "verdict"))


def refuse_suite_options(settings: Settings, flag: str, modes: str) -> None:
    """Raise an error for options of the suite alone; `flag` asks for another benchmark, which measures in these modes."""
    given = {"--mode": settings.modes != ("fp32",), "--kind": settings.kind, "--csv": settings.csv, "--plots": settings.plots}
    for name, value in given.items():
        if value:
            raise ToolError(f"{name} is not for {flag}, which measures {modes} and writes --json and --pages only")


def check_paths(settings: Settings, part: str = "results") -> None:
    """Refuse paths that can't be written, before anything is measured; `part` of the page of results is this benchmark's."""
    for path in (settings.json, settings.csv):
        if path is not None and not path.resolve().parent.is_dir():
            raise ToolError(f"{path} can't be written: {path.resolve().parent} is not a folder")
        if path is not None and path.is_dir():
            raise ToolError(f"{path} can't be written: it is a folder")
    if settings.plots is not None and settings.plots.exists() and not settings.plots.is_dir():
        raise ToolError(f"{settings.plots} must be a folder: the plots are written there")
    if settings.pages is not None:
        around_results(settings.pages / RESULTS_PAGE, part)
        if part in FRONT_PARTS:
            around_results(settings.pages / FRONT_PAGE, part)


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
            for mode in settings.modes:
                own, ending = [row for row in rows if row.mode == mode], f"-{mode}.svg" if len(settings.modes) > 1 else ".svg"
                ratio_bars(own, machine, settings.plots / f"ratios{ending}")
                roofline(own, machine, settings.plots / f"roofline{ending}")
        if settings.pages is not None:
            write_between(settings.pages / RESULTS_PAGE, markdown(machine, rows, report["summary"], report["loop"], report["host_calls"]))
    except OSError as error:
        raise ToolError(f"can't write the report: {error}") from error
