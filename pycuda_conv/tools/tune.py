"""Measures the configurations of the benchmarks' problems, and puts the fastest of each problem into a table."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pycuda_conv import engines, tune
from pycuda_conv.arguments import PRECISIONS
from pycuda_conv.elements import DTYPE_BYTES
from pycuda_conv.errors import DeviceMemoryError
from pycuda_conv.measure import Compiler, WrongResultError, trials
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime import driver
from pycuda_conv.runtime.device import CudaDevice
from pycuda_conv.tools.report import geometric_mean, microseconds, number
from pycuda_conv.tools.suite import core
from pycuda_conv.tools.terminal import FAILED, OK, ToolError, console, named_device, table, track
from pycuda_conv.tools.training import gradients

LAYOUTS: tuple[Literal["NCHW", "NHWC"], ...] = ("NCHW", "NHWC")
AHEAD = 3  # problems whose kernels are compiled while an earlier one is measured


@dataclass(frozen=True)
class Settings:
    """The command's arguments."""

    precision: str = "fp32"
    dtype: str = "float32"
    layout: str = "NCHW"
    match: str = ""
    limit: float | None = None
    output: Path | None = None
    all: bool = False
    device: Any = None


@dataclass(frozen=True)
class Row:
    """One problem with the planner's configuration and the fastest one, as measured; or the reason why there is none."""

    problem: ConvProblem
    before: tune.Choice | None = None
    after: tune.Choice | None = None
    verdict: str = "ok"

    @property
    def gain(self) -> float | None:
        """The planner's time divided by the fastest."""
        return self.before.us / self.after.us if self.before and self.after else None

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        us = [microseconds(None if choice is None else choice.us) for choice in (self.before, self.after)]
        return str(self.problem), us[0], self.verdict if self.after is None else str(self.after.config), us[1], number(self.gain, ".2f")


COLUMNS = ("problem", "before us", "chosen", "after us", "gain")


def problems(settings: Settings) -> list[ConvProblem]:
    """The core of the suite in the dtypes, precisions and layouts that were asked for. Gradients of training come with NCHW float32."""
    dtypes = DTYPE_BYTES if settings.dtype == "all" else (settings.dtype,)
    precisions = PRECISIONS if settings.precision == "both" else (settings.precision,)
    layouts = [layout for layout in LAYOUTS if settings.layout in (layout, "both")]
    found = [
        replace(problem, dtype=dtype, precision=precision, layout=layout)
        for dtype in dtypes for layout in layouts for precision in (precisions if dtype == "float32" else ("fp32",))
        for problem in core() + (gradients() if (dtype, layout) == ("float32", "NCHW") else [])
    ]
    found = [problem for problem in dict.fromkeys(found) if settings.match in str(problem)]
    if not found:
        raise ToolError(f"--match {settings.match!r} is in no problem's text (--list shows them all)")
    return found


def list_problems(settings: Settings) -> int:
    """Print the problems' texts."""
    for problem in problems(settings):
        print(problem)
    return OK


def run(settings: Settings) -> int:
    """Measure, store each choice when it is found, and print the table."""
    began = time.perf_counter()
    chosen = problems(settings)
    device = _device(settings)
    target = _target(settings.output)
    todo = [problem for problem in chosen if settings.all or not _known(problem, device, target, settings.output is None)]
    rows = []
    for row in _measure(todo, device, None if settings.limit is None else began + settings.limit):
        rows.append(row)
        if row.after is not None:
            _store(target, device, row, settings.output is not None)
        if not sys.stderr.isatty():  # without a progress bar, print a line for each row, in case the run is cut short
            print(f"[{len(rows)}/{len(todo)}] {'  '.join(row.cells())}", file=sys.stderr, flush=True)
    _print(rows, device, target, len(chosen), len(todo), time.perf_counter() - began)
    return FAILED if any(row.verdict == "WRONG" for row in rows) else OK


def _device(settings: Settings) -> CudaDevice:
    if settings.device is None and driver.why_not():
        raise ToolError(f"this needs a GPU, but {driver.why_not()}")
    device: Any = named_device("cuda" if settings.device is None else settings.device)
    if device.backend != "cuda":
        raise ToolError(f"{device.name} can't be tuned, only GPUs can")
    return device


def _target(output: Path | None) -> tune.Table:
    """The table to write. A path that can't be written is refused before anything is measured."""
    if output is None:
        return tune.user_table()
    if output.is_dir() or not output.resolve().parent.is_dir():
        raise ToolError(f"{output} can't be written: it is a folder, or its folder does not exist")
    target = tune.Table(output, shared=False)
    try:
        target.read()
    except (OSError, ValueError) as error:
        raise ToolError(f"{output} is not a table of tuned choices: {error}") from error
    return target


def _known(problem: ConvProblem, device: CudaDevice, target: tune.Table, shipped: bool) -> bool:
    if shipped and tune.lookup(problem, device) is not None:
        return True
    choice = target.get(device.model, tune.key(problem))
    return choice is not None and engines.refusal(problem, choice.config, device) is None


def _measure(todo: Sequence[ConvProblem], device: CudaDevice, until: float | None) -> Iterator[Row]:
    """A row for each problem, until the time `until`."""
    with Compiler(device) as compiler:
        for i, problem in enumerate(track(todo, str)):
            if until is not None and time.perf_counter() > until:
                return
            for coming in todo[i : i + 1 + AHEAD]:
                compiler.start(coming)
            yield _row(problem, device, compiler)


def _row(problem: ConvProblem, device: CudaDevice, compiler: Compiler) -> Row:
    try:
        found = trials(problem, device, compiler)
    except DeviceMemoryError:
        return Row(problem, verdict="no memory")
    except WrongResultError as error:
        print(f"WRONG: {error}", file=sys.stderr)
        return Row(problem, verdict="WRONG")
    own = engines.choose(problem, device)
    return Row(problem, next(choice for choice in found if choice.config == own), tune.best(found, own))


def _store(target: tune.Table, device: CudaDevice, row: Row, strict: bool) -> None:
    assert row.after is not None
    if not strict:
        tune.store(row.problem, device, row.after)
        return
    try:
        target.add(device.model, tune.key(row.problem), row.after)
    except OSError as error:
        raise ToolError(f"can't write {target.path}: {error}") from error


def _print(rows: Sequence[Row], device: CudaDevice, target: tune.Table, asked: int, todo: int, seconds: float) -> None:
    out = console()
    if rows:
        styles = ["bold red" if row.verdict != "ok" else "green" if (row.gain or 1) > 1.02 else "" for row in rows]
        out.print(table(f"Tuned on {device.model}", COLUMNS, [row.cells() for row in rows], left=("problem", "chosen"), styles=styles))
        mean = geometric_mean(row.gain for row in rows if row.gain)
        out.print(f"geometric mean of the gain: {number(mean, '.3f')}", markup=False, style="bold")
    if asked > todo:
        out.print(f"{asked - todo} problems were measured before; --all measures them again", markup=False)
    if len(rows) < todo:
        out.print(f"{todo - len(rows)} problems were left when the time limit was reached", markup=False)
    out.print(f"{target.path}: {seconds:.0f} s in all", markup=False)
