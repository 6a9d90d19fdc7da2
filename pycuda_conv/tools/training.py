"""How fast is training? Gradients against cuDNN's and a fused layer against torch's, on the same random data; networks: models.py."""

from __future__ import annotations

import copy
import math
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from pycuda_conv.plan import Plan
from pycuda_conv.problem import ConvProblem
from pycuda_conv.timing import Effort, gpu_times, wall_times
from pycuda_conv.tools import bench
from pycuda_conv.tools.oracle import Errors, compare, torch_precision
from pycuda_conv.tools.plans import plans
from pycuda_conv.tools.report import (
    RESULTS_PAGE,
    header_lines,
    markdown_table,
    measured_by,
    median,
    microseconds,
    number,
    write_between,
    write_json,
)
from pycuda_conv.tools.terminal import FAILED, OK, ToolError, console, require, table, track

#: Convolutions whose gradients are measured: input, filter, stride, padding.
CONVOLUTIONS = (
    ((32, 512, 7, 7), (512, 512, 3, 3), 1, 1), ((64, 64, 56, 56), (64, 64, 3, 3), 1, 1), ((64, 128, 56, 56), (128, 128, 3, 3), 2, 1),
    ((64, 256, 14, 14), (256, 256, 3, 3), 1, 1), ((32, 256, 56, 56), (256, 256, 3, 3), 1, 1), ((64, 64, 56, 56), (256, 64, 1, 1), 1, 0),
    ((128, 512, 448), (1024, 512, 3), 1, 1),
)
MODES = ("fp32", "tf32")
MAGNITUDE = 1e-4  # of the gradients that go in: small, as a mean loss makes them
BLOCK = "conv + batch norm + ReLU"
STEPS = 20  # of training a layer in a row, by the host's clock


@dataclass(frozen=True)
class Row:
    """One thing that both sides did; microseconds, errors against float64."""

    what: str
    problem: str
    mode: str
    ours_us: float = math.nan
    torch_us: float = math.nan
    compiled_us: float = math.nan  # torch.compile's
    error: float = math.nan
    torch_error: float = math.nan
    config: str = ""
    verdict: str = "ok"

    @property
    def ratio(self) -> float:
        """torch's time by ours; above 1 ours is faster."""
        return self.torch_us / self.ours_us


def gradients(only: str | None) -> list[ConvProblem]:
    """The gradients to measure, in fp32, those by the input first."""
    found = []
    for of in ("input", "weight"):
        for x, w, stride, padding in CONVOLUTIONS:
            y = ConvProblem.forward(len(w) - 2, x, w, stride=stride, padding=padding).result_shape
            found.append(ConvProblem.gradient(of, len(w) - 2, x, w, y, stride=stride, padding=padding))
    return bench.matching(only, found, _label)


def _label(problem: ConvProblem) -> str:
    return bench.label(problem).replace("conv_transpose", "gradient by input, conv_transpose")


def list_problems(settings: bench.Settings) -> int:
    """Print the gradients' texts."""
    for problem in gradients(settings.only):
        print(f"{_label(problem):90} {problem.flops / 1e9:9.3f} GFLOP")
    return OK


# ---- gradients


def measure_gradient(torch: Any, plan: Plan, effort: Effort, seed: int) -> Row:
    """Verify and time one gradient; a wrong result gets no time."""
    problem, n = plan.problem, plan.problem.ndim
    generator = torch.Generator(plan.device.name).manual_seed(seed)

    def draw(shape: Sequence[int], scale: float = 1.0) -> Any:
        return torch.randn(shape, device=plan.device.name, generator=generator).mul_(scale)

    by_input = problem.direction == "dgrad"
    if by_input:
        dy, w = draw(problem.input_shape, MAGNITUDE), draw(problem.weight_shape)
        x = draw(problem.result_shape)
    else:
        x, dy = draw(problem.input_shape), draw(problem.weight_shape, MAGNITUDE)
        w = draw(problem.result_shape)
    ours_out = torch.full(problem.result_shape, math.nan, device=plan.device.name)
    first, second = (dy, w) if by_input else (x, dy)

    def backward(dy: Any, x: Any, w: Any) -> Any:
        arguments = [list(v[-n:]) for v in (problem.stride, problem.padding_before, problem.dilation)]
        mask = [by_input, not by_input, False]
        return torch.ops.aten.convolution_backward(dy, x, w, None, *arguments, False, [0] * n, problem.groups, mask)[0 if by_input else 1]

    def ours(_: int) -> None:
        plan(first, second, out=ours_out)

    kept: list[Any] = [None]

    def theirs(_: int) -> None:
        kept[0] = backward(dy, x, w)

    ours(0)
    theirs(0)
    with bench.cudnn_set(torch, "benchmark", False):  # to try all of cuDNN's float64 kernels would take longer than the reference
        reference = backward(dy.double(), x.double(), w.double())
        magnitude = backward(dy.double().abs(), x.double().abs(), w.double().abs())

    def judge() -> tuple[Errors, Errors]:
        return compare(problem, ours_out.double(), reference, magnitude), compare(problem, kept[0].double(), reference, magnitude)

    mine, other = judge()
    what, mode = f"gradient by {'input' if by_input else 'weight'}", problem.precision
    if mine.correct:
        ours_out.fill_(math.nan)
        times, _ = gpu_times(torch, (ours, theirs), 1, effort)
        mine, other = judge()  # what was timed is checked too
    known: dict[str, Any] = {"error": mine.relative, "torch_error": other.relative, "config": str(plan.config)}
    if not mine.correct:
        return Row(what, _label(problem), mode, **known, verdict="WRONG")
    ours_us, torch_us = (median(taken) * 1e6 for taken in times)
    return Row(what, _label(problem), mode, ours_us, torch_us, **known)


# ---- a fused layer


def _block(torch: Any, channels: int, kernels: int, place: str) -> tuple[Any, Any]:
    """torch's convolution, batch norm and ReLU, and ours with the same parameters."""
    from pycuda_conv.nn import FusedConvBnReLU2d

    conv = torch.nn.Conv2d(channels, kernels, 3, padding=1, bias=False)
    norm = torch.nn.BatchNorm2d(kernels)
    torch.nn.init.normal_(norm.weight, 1, 0.1)
    torch.nn.init.normal_(norm.bias, 0, 0.1)
    norm.running_mean.normal_(0, 0.1)
    norm.running_var.uniform_(0.5, 2)
    return torch.nn.Sequential(conv, norm, torch.nn.ReLU()).to(place), FusedConvBnReLU2d.from_modules(conv, norm).to(place)


def _evaluate(layer: Any, x: Any, _: int) -> None:
    layer(x)


def _relative(found: Any, reference: Any) -> float:
    return float((found - reference).norm() / reference.norm())


def measure_block(torch: Any, shape: Sequence[int], kernels: int, place: str, effort: Effort, seed: int) -> list[Row]:
    """The layer evaluated, and trained: forward and backward, by both clocks. Peak memory of the training step is in the row's config."""
    torch.manual_seed(seed)
    theirs, ours = _block(torch, shape[1], kernels, place)
    x = torch.randn(shape, device=place)
    text = f"{'x'.join(map(str, shape))} -> {kernels} k3x3 p1"
    theirs.eval()
    ours.eval()
    rows = []
    with torch.no_grad():
        compiled = torch.compile(copy.deepcopy(theirs))
        reference = copy.deepcopy(theirs).double()(x.double())
        error, torch_error = (_relative(layer(x).double(), reference) for layer in (ours, theirs))
        ways = [partial(_evaluate, layer, x) for layer in (ours, theirs, compiled)]
        ours_us, torch_us, compiled_us = (median(taken) * 1e6 for taken in gpu_times(torch, ways, 1, effort)[0])
        verdict = "ok" if error < 1e-6 else "WRONG"
        rows.append(Row(f"{BLOCK}, evaluated", text, "fp32", ours_us, torch_us, compiled_us, error, torch_error, verdict=verdict))
    theirs.train()
    ours.train()
    x.requires_grad_()
    double = copy.deepcopy(theirs).double()
    x64 = x.detach().double().requires_grad_()
    with torch.no_grad():  # where rounding decides on which side of its bend a ReLU is, a gradient says nothing of accuracy
        clear = copy.deepcopy(double)[:-1](x64).abs() > 1e-4
    dy = torch.randn_like(reference, dtype=torch.float32) * clear * MAGNITUDE

    def step(layer: Any) -> list[Any]:
        return list(torch.autograd.grad(layer(x), [x, *layer.parameters()], dy))

    expected = torch.autograd.grad(double(x64), [x64, *double.parameters()], dy.double())
    peaks = []
    errors = []
    for layer in (ours, theirs):
        found = step(layer)
        errors.append(max(_relative(a.double(), b) for a, b in zip(found, expected, strict=True)))
        del found
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(layer)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    found_errors: dict[str, Any] = {"error": errors[0], "torch_error": errors[1], "verdict": "ok" if errors[0] < 1e-5 else "WRONG"}
    ours_us, torch_us = (median(taken) * 1e6 for taken in gpu_times(torch, [lambda _: step(ours), lambda _: step(theirs)], 1, effort)[0])
    memory = f"peak memory {peaks[0] / 1e6:.0f} MB, torch's {peaks[1] / 1e6:.0f}"
    rows.append(Row(f"{BLOCK}, trained", text, "fp32", ours_us, torch_us, config=memory, **found_errors))

    def in_a_row(layer: Any) -> None:
        for _ in range(STEPS):
            step(layer)

    seconds = wall_times([lambda _: in_a_row(ours), lambda _: in_a_row(theirs)], 1, effort, torch.cuda.synchronize)
    ours_us, torch_us = (median(taken) / STEPS * 1e6 for taken in seconds)
    rows.append(Row(f"{BLOCK}, trained, by the host's clock", text, "fp32", ours_us, torch_us, **found_errors))
    return rows


# ---- the command


def run(settings: bench.Settings) -> int:
    """Measure, print, write the JSON that was asked for."""
    began = time.perf_counter()
    bench.refuse_suite_options(settings, "--training", "fp32 and tf32")
    device = bench.gpu_for(settings, "--training")
    bench.check_paths(settings, "training")
    torch = require("torch")
    seed = secrets.randbelow(2**31) if settings.seed is None else settings.seed
    torch.cuda.set_device(device.name)
    out = console()
    rows: list[Row] = []
    problems = [replace(problem, precision=mode) for mode in MODES for problem in gradients(settings.only)]
    with bench.cudnn_set(torch, "benchmark", True):
        machine = bench.describe(torch, device, "training", bench.arithmetic(MODES), seed)
        machine["command"] = "pycuda-conv bench --training" + (f" --only {settings.only}" if settings.only else "")
        machine["method"] = (
            "median; on the GPU's clock, warm, launches below 1 ms captured in a graph; by the host's clock "
            f"{STEPS} steps in a row, with all they set off"
        )
        for line in header_lines(machine):
            out.print(line, markup=False)
        ready = plans(problems, device)
        for i, plan in enumerate(track(ready, lambda plan: _label(plan.problem))):
            with torch_precision(plan.problem.precision):
                rows.append(_said(measure_gradient(torch, plan, settings.effort, seed + i)))
            torch.cuda.empty_cache()
        if settings.only is None:
            with torch_precision("fp32"):
                for shape, kernels in (((64, 64, 56, 56), 64), ((4, 16, 32, 32), 32)):
                    rows += map(_said, measure_block(torch, shape, kernels, device.name, settings.effort, seed))
    _print(out, rows)
    if settings.json is not None:
        report = {
            "machine": machine | {"seconds": time.perf_counter() - began},
            "rows": [asdict(row) | {"ratio": row.ratio} for row in rows], "summary": means(rows),
        }
        try:
            write_json(settings.json, report)
        except OSError as error:
            raise ToolError(f"can't write the report: {error}") from error
    if settings.pages is not None:
        write_between(settings.pages / RESULTS_PAGE, markdown(machine, rows), "training")
    out.print(f"{time.perf_counter() - began:.0f} s in all")
    return FAILED if any(row.verdict == "WRONG" for row in rows) else OK


def _said(row: Row) -> Row:
    """The row, said on stderr where there is no progress bar, in case the run is cut short."""
    if not sys.stderr.isatty():
        times = f"{microseconds(row.ours_us)} us, torch {microseconds(row.torch_us)}"
        print(f"{row.what}, {row.problem}, {row.mode}: {times}, {row.config}, {row.verdict}", file=sys.stderr, flush=True)
    return row


def means(rows: Sequence[Row]) -> dict[str, float]:
    """The geometric means of the gradients' ratios, by mode, in all and by what they are of."""
    found = {}
    for mode in MODES:
        for what in ("", " by input", " by weight"):
            own = [row.ratio for row in rows if row.mode == mode and row.what.startswith("gradient" + what) and row.verdict == "ok"]
            if own:
                found[f"{mode}, gradients{what}"] = math.exp(sum(map(math.log, own)) / len(own))
    return found


def markdown(machine: dict[str, Any], rows: Sequence[Row]) -> str:
    """The results for the page: gradients with both modes in a row, then layers. `machine`: the header of the report."""
    parts = [measured_by(machine)]
    mine = [row for row in rows if row.what.startswith("gradient")]
    others = [row for row in rows if row not in mine]
    if mine:
        tf32 = {(row.what, row.problem): row for row in mine if row.mode == "tf32"}
        lines: list[tuple[str, ...]] = []
        for row in mine:
            if row.mode == "fp32":
                other = tf32.get((row.what, row.problem))
                lines.append((row.problem, *_times(row), _ratio(row), "-" if other is None else _ratio(other)))
        exact = [row for row in mine if row.mode == "fp32" and row.verdict == "ok" and not math.isnan(row.error)]
        words = [f"{name}: {mean:.2f}" for name, mean in means(rows).items()]
        columns = ("problem", "fp32: ours, us", "torch, us", "ratio", "tf32: ratio")
        parts += [markdown_table(columns, 1, lines), f"Geometric means of the ratios: {'; '.join(words)}."]
        if exact:
            ours, torch = ([getattr(row, name) for row in exact] for name in ("error", "torch_error"))
            parts[-1] += f" Errors in fp32: ours {min(ours):.1e} to {max(ours):.1e}, torch's {min(torch):.1e} to {max(torch):.1e}."
    if others:
        lines = [
            (row.what, row.problem, *_times(row), "-" if math.isnan(row.compiled_us) else microseconds(row.compiled_us), row.config)
            for row in others
        ]
        parts.append(markdown_table(("what", "problem", "ours, us", "torch, us", "torch.compile, us", "notes"), 2, lines))
    return "\n\n".join(parts)


def _ratio(row: Row) -> str:
    return "-" if row.verdict != "ok" else number(row.ratio, ".2f")


def _times(row: Row) -> tuple[str, str]:
    """Ours, or what is wrong with it, and torch's."""
    if row.verdict != "ok":
        return f"**{row.verdict}**", "-"
    return microseconds(row.ours_us), microseconds(row.torch_us)


def _print(out: Any, rows: Sequence[Row]) -> None:
    columns = ("what", "problem", "mode", "ours us", "torch us", "compiled us", "ratio", "error", "torch's", "verdict", "notes")

    def figure(value: float, text: Callable[[float], str]) -> str:
        return "" if math.isnan(value) else text(value)

    cells = [
        (
            row.what, row.problem, row.mode, figure(row.ours_us, microseconds), figure(row.torch_us, microseconds),
            figure(row.compiled_us, microseconds), figure(row.ratio, lambda v: number(v, ".2f")), figure(row.error, lambda v: f"{v:.1e}"),
            figure(row.torch_error, lambda v: f"{v:.1e}"), row.verdict, "" if row.what.startswith("gradient") else row.config,
        )
        for row in rows
    ]
    styles = ["bold red" if row.verdict != "ok" else "green" if row.ratio >= 1 else "" for row in rows]
    out.print()
    title = "Training: ratio = torch's time / ours, above 1 ours is faster"
    out.print(table(title, columns, cells, left=("what", "problem", "mode", "verdict", "notes"), styles=styles))
    for name, mean in means(rows).items():
        out.print(f"{name}: geometric mean of the ratios {mean:.2f}", markup=False)
