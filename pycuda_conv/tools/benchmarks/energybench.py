"""The energy of the fp32 suite and of a training step, by the GPU's own counter, beside torch's: ``bench --energy``.

NVML counts the millijoules of the whole board. The counter moves some ten times a second, so each way runs for seconds; the board's idling
is in the figures of both sides, and other programs on the GPU too.
"""

from __future__ import annotations

import ctypes
import importlib
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from pycuda_conv.errors import DeviceMemoryError
from pycuda_conv.tools import bench
from pycuda_conv.tools.benchmarks import layerbench
from pycuda_conv.tools.model_rows import Case
from pycuda_conv.tools.networks import network
from pycuda_conv.tools.oracle import cudnn_set, torch_precision
from pycuda_conv.tools.plans import plans, settle
from pycuda_conv.tools.report import RESULTS_PAGE, header_lines, markdown_table, measured_by, number, write_between, write_json
from pycuda_conv.tools.rivals import EAGER, LIGHT, Side, arithmetic
from pycuda_conv.tools.suite import core, in_mode
from pycuda_conv.tools.terminal import OK, Table, ToolError, console, require, table, track
from pycuda_conv.tools.training_steps import data, in_training, stepper

SECONDS = 4.0  # that each way runs
WARM = 0.5  # seconds that it runs before
STEPS = (("resnet50", 64, "bf16-nhwc"), ("resnet50", 64, "fp32"))
MODES = ("fp32", "tf32")


class Counter:
    """A GPU's energy counter.

    Raises
    ------
    ToolError
        The driver's library is not there, or the GPU has no counter.
    """

    def __init__(self, pci_bus_id: str) -> None:
        try:
            self._nvml: Any = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise ToolError(f"the energy counter needs NVML, a library of the driver: {error}") from error
        self._handle = ctypes.c_void_p()
        self._check(self._nvml.nvmlInit_v2())
        self._check(self._nvml.nvmlDeviceGetHandleByPciBusId_v2(pci_bus_id.encode(), ctypes.byref(self._handle)))
        self.joules()

    def _check(self, status: int) -> None:
        if status:
            raise ToolError(f"NVML gives no energy of this GPU: status {status}")

    def joules(self) -> float:
        """What the board has taken since the driver was loaded."""
        found = ctypes.c_ulonglong()
        self._check(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(found)))
        return found.value / 1e3


@dataclass(frozen=True)
class Row:
    """What one way takes: joules and milliseconds of a pass."""

    what: str
    way: str
    joules: float
    ms: float

    @property
    def watts(self) -> float:
        """The mean power."""
        return self.joules / self.ms * 1e3

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        return self.what, self.way, number(self.joules, ".3g"), number(self.ms, ".3g"), number(self.watts, ".0f")


COLUMNS = ("what", "way", "joules", "ms", "watts")


def measured(counter: Counter, wait: Callable[[], Any], run: Callable[[], Any], seconds: float = SECONDS) -> tuple[float, float]:
    """Joules and seconds of one call of `run`, which is called for so many seconds. Calls are queued, and waited for ten at a time."""

    def calls(until: float) -> int:
        made = 0
        while time.perf_counter() < until:
            for _ in range(10):
                run()
            wait()
            made += 10
        return made

    wait()
    calls(time.perf_counter() + WARM)
    began, before = time.perf_counter(), counter.joules()
    made = calls(began + seconds)
    took, used = time.perf_counter() - began, counter.joules() - before
    return used / made, took / made


def suite_passes(torch: Any, device: Any, seed: int) -> dict[str, Callable[[], Any]]:
    """One pass over the suite's first layers for each way, each layer once, as CUDA graphs."""
    problems = [in_mode(problem, mode) for mode in MODES for problem in core()]
    ready = plans(problems, device)
    graphs: dict[str, list[Any]] = {}
    kept = []
    for i, problem in enumerate(track(problems[: len(core())], str)):
        try:
            sets = bench.Operands(torch, problem, device.name, 1, torch.Generator(device.name).manual_seed(seed + i))
        except (DeviceMemoryError, torch.OutOfMemoryError):
            continue
        ways: dict[str, Callable[[int], Any]] = {}
        for mode, plan in zip(MODES, (ready[i], ready[i + len(core())]), strict=True):
            ways[f"ours, {mode}"] = partial(_planned, plan, sets)
        for name, precision in ((layerbench.IEEE, "ieee"), (layerbench.DEFAULT, "tf32")):
            ways[name] = layerbench.torch_way(torch, problem, sets.x, sets.w, precision=precision)
        for name, way in ways.items():
            graphs.setdefault(name, []).append(_captured(torch, way))
        kept.append(sets)
    return {name: partial(_replay, some, kept) for name, some in graphs.items()}


def _planned(plan: Any, sets: bench.Operands, _: int) -> None:
    plan(sets.x[0], sets.w[0], out=sets.out[0])


def _replay(graphs: Sequence[Any], kept: Any) -> None:
    """Replay all of `graphs`, whose arrays are `kept`."""
    for graph in graphs:
        graph.replay()


def _captured(torch: Any, way: Callable[[int], Any]) -> Any:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            way(0)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        way(0)
    return graph


def steps(torch: Any, device: Any, name: str, images: int, mode: str, seed: int) -> dict[str, Callable[[], Any]]:
    """A training step of ours and of torch's."""
    case = Case("trained", name, images, mode)
    base = network(torch, name, device.name, seed)
    given, labels = data(torch, case, device.name, (3, 224, 224))
    found = {}
    for words, side in (("ours", Side(LIGHT, True, "light")), ("torch", Side(EAGER))):
        found[words] = stepper(torch, in_training(torch, base, mode, side), given, labels, mode)
    return found


def run(settings: bench.Settings) -> int:
    """Measure, print, and write the files that were asked for."""
    began = time.monotonic()
    device: Any = bench.gpu_for(settings, "--energy")
    torch, out = require("torch"), console()
    bench.check_paths(settings, "energy")
    torch.cuda.set_device(device.name)
    wait = torch.cuda.synchronize
    counter = Counter(importlib.import_module("pycuda.driver").Device(device.ordinal).pci_bus_id())
    seed = secrets.randbelow(2**31) if settings.seed is None else settings.seed
    machine = bench.describe(torch, device, "energy", "", seed) | {"command": "pycuda-conv bench --energy"}
    machine["method"] = f"NVML's counter of the board, {SECONDS:.0f} s of calls for each way"
    for line in header_lines(machine):
        out.print(line, markup=False)
    rows: list[Row] = []

    def note(what: str, ways: dict[str, Callable[[], Any]]) -> None:
        for way, call in ways.items():
            joules, seconds = measured(counter, wait, call)
            rows.append(Row(what, way, joules, seconds * 1e3))
            if not sys.stderr.isatty():  # in case the run is cut short
                print("  ".join(rows[-1].cells()), file=sys.stderr, flush=True)

    with cudnn_set(torch, "benchmark", True), torch_precision("fp32"):
        with torch.no_grad():
            note(f"the suite's first {len(core())} layers, each once", suite_passes(torch, device, seed))
        torch.cuda.empty_cache()
        for i, (name, images, mode) in enumerate(STEPS):
            if settings.over(began):
                machine["method"] += settings.cut(i, len(STEPS), "training steps")
                break
            with arithmetic(torch, mode):
                ways = steps(torch, device, name, images, mode, seed)
                settle(ways["ours"], wait, device.all_compiled)
                note(f"a training step of {name}, {images} images, {mode}", ways)
            torch.cuda.empty_cache()
    out.print(row_table(rows))
    if settings.json is not None:
        write_json(settings.json, {"machine": machine, "rows": [asdict(row) for row in rows]})
    if settings.pages is not None:
        text = f"{measured_by(machine)}\n\n{markdown_table(COLUMNS, 2, [row.cells() for row in rows])}"
        write_between(settings.pages / RESULTS_PAGE, text, "energy")
    return OK


def row_table(rows: Sequence[Row]) -> Table:
    """The rows as a table."""
    return table("Energy of a pass, idling included", COLUMNS, [row.cells() for row in rows], left=("what", "way"))
