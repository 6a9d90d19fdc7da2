"""Times of training: gradients beside cuDNN's, and a fused layer beside torch's, on the same random data. models.py has networks."""

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
from pycuda_conv.tools.oracle import Errors, compare, cudnn_set, torch_precision
from pycuda_conv.tools.plans import plans, settle
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
from pycuda_conv.tools.suite import in_mode
from pycuda_conv.tools.terminal import FAILED, OK, ToolError, console, print_pairs, require, table, track

#: Input, filter, stride and padding of the convolutions whose gradients are measured.
CONVOLUTIONS = (
    ((32, 512, 7, 7), (512, 512, 3, 3), 1, 1), ((64, 64, 56, 56), (64, 64, 3, 3), 1, 1), ((64, 128, 56, 56), (128, 128, 3, 3), 2, 1),
    ((64, 256, 14, 14), (256, 256, 3, 3), 1, 1), ((32, 256, 56, 56), (256, 256, 3, 3), 1, 1), ((64, 64, 56, 56), (256, 64, 1, 1), 1, 0),
    ((128, 512, 448), (1024, 512, 3), 1, 1),
)
MODES = ("fp32", "tf32")
MAGNITUDE = 1e-4  # of the incoming gradients: small, as those of a mean loss
BLOCK = "conv + batch norm + ReLU"
LAYERS = ((64, 64, 56, 56), 64), ((4, 16, 32, 32), 32)  # fused layers: input, output channels
LAYER_MODES = ("fp32", "bf16-nhwc")
STEPS = 20  # steps of training a layer in a row, by the host's clock
BEND = 0.03  # in 16 bits, a result before the ReLU closer to zero than this may be rounded to the other side
ROUNDED = 1.5  # in 16 bits, an error above so many times torch's is not rounding


@dataclass(frozen=True)
class Row:
    """One measurement of both sides: microseconds, errors against float64."""

    what: str
    problem: str
    mode: str
    ours_us: float = math.nan
    torch_us: float = math.nan
    compiled_us: float = math.nan  # of torch.compile
    error: float = math.nan
    torch_error: float = math.nan
    config: str = ""
    verdict: str = "ok"

    @property
    def ratio(self) -> float:
        """torch's time divided by ours: above 1, ours is faster."""
        return self.torch_us / self.ours_us


@dataclass(frozen=True)
class Layer:
    """A fused layer with a 3x3 filter to measure."""

    shape: tuple[int, ...]
    kernels: int
    mode: str

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} -> {self.kernels} k3x3 p1"


def gradients() -> list[ConvProblem]:
    """The gradients to measure, in fp32; those by the input come first."""
    found = []
    for of in ("input", "weight"):
        for x, w, stride, padding in CONVOLUTIONS:
            y = ConvProblem.forward(len(w) - 2, x, w, stride=stride, padding=padding).result_shape
            found.append(ConvProblem.gradient(of, len(w) - 2, x, w, y, stride=stride, padding=padding))
    return found


def cases(only: str | None) -> tuple[list[ConvProblem], list[Layer]]:
    """The gradients, in fp32, and the fused layers to measure."""
    layers = [Layer(*layer, mode) for mode in LAYER_MODES for layer in LAYERS]
    every: list[ConvProblem | Layer] = [*gradients(), *layers]
    chosen = bench.matching(only, every, _label)
    return [one for one in chosen if isinstance(one, ConvProblem)], [one for one in chosen if isinstance(one, Layer)]


def _label(problem: ConvProblem | Layer) -> str:
    if isinstance(problem, Layer):
        return f"{BLOCK} {problem} {problem.mode}"
    return bench.label(problem).replace("conv_transpose", "gradient by input, conv_transpose")


def list_problems(settings: bench.Settings) -> int:
    """Print the problems to measure: the gradients, then the layers."""
    problems, layers = cases(settings.only)
    print_pairs(((_label(problem), f"{problem.flops / 1e9:9.3f} GFLOP") for problem in problems), 90)
    for layer in layers:
        print(_label(layer))
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
    with cudnn_set(torch, "benchmark", False):  # to try all of cuDNN's float64 kernels would take longer than the reference
        reference = backward(dy.double(), x.double(), w.double())
        magnitude = backward(dy.double().abs(), x.double().abs(), w.double().abs())

    def judge() -> tuple[Errors, Errors]:
        return compare(problem, ours_out.double(), reference, magnitude), compare(problem, kept[0].double(), reference, magnitude)

    mine, other = judge()
    what, mode = f"gradient by {'input' if by_input else 'weight'}", problem.precision
    if mine.correct:
        ours_out.fill_(math.nan)
        times, _ = gpu_times(torch, (ours, theirs), 1, effort)
        mine, other = judge()  # the timed results are checked too
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


def _relative(found: Any, reference: Any) -> float:
    return float((found.double() - reference).norm() / reference.norm())


def measure_block(torch: Any, case: Layer, device: Any, effort: Effort, seed: int) -> list[Row]:
    """The layer evaluated, and trained forward and backward, by both clocks. The row's config has the peak memory of a training step.

    In a 16-bit mode, which is torch's autocast, the layer's input has 16 bits and its parameters are float32.
    """
    torch.manual_seed(seed)
    shape, text, mode = case.shape, str(case), case.mode
    theirs, ours = _block(torch, shape[1], case.kernels, device.name)
    given = in_mode(ConvProblem.forward(2, shape, (case.kernels, shape[1], 3, 3), padding=1), mode)
    dtype = getattr(torch, given.dtype)
    coarse = dtype.itemsize == 2
    if given.layout == "NHWC":
        theirs, ours = (layer.to(memory_format=torch.channels_last) for layer in (theirs, ours))
    x = torch.randn(shape, device=device.name).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last) if given.layout == "NHWC" else x
    theirs.eval()
    ours.eval()
    rows = []

    def result(layer: Any, _: int = 0) -> Any:
        with torch.autocast("cuda", dtype, enabled=coarse):
            return layer(x)

    def timed(times: Sequence[Sequence[float]], steps: int = 1) -> dict[str, Any]:
        found = [median(taken) / steps * 1e6 for taken in times]
        return dict(zip(("ours_us", "torch_us", "compiled_us"), found, strict=True))

    def judged(errors: Sequence[float], most: float) -> dict[str, Any]:
        """Errors of ours and of torch's. In 16 bits both sides round between the layer's steps."""
        most = ROUNDED * errors[1] if coarse else most
        return {"error": errors[0], "torch_error": errors[1], "verdict": "ok" if errors[0] < most else "WRONG"}

    with torch.no_grad():
        compiled = torch.compile(copy.deepcopy(theirs))
        reference = copy.deepcopy(theirs).double()(x.double())
        known = judged([_relative(result(layer), reference) for layer in (ours, theirs)], 1e-6)
        settle(partial(result, ours), torch.cuda.synchronize, device.all_compiled)
        ways = [partial(result, layer) for layer in (ours, theirs, compiled)]
        rows.append(Row(f"{BLOCK}, evaluated", text, mode, **timed(gpu_times(torch, ways, 1, effort)[0]), **known))
    theirs.train()
    ours.train()
    x.requires_grad_()
    double = copy.deepcopy(theirs).double()
    compiled = torch.compile(copy.deepcopy(theirs))
    x64 = x.detach().double().requires_grad_()
    with torch.no_grad():  # where rounding decides the side of a ReLU, a gradient says nothing about accuracy
        clear = copy.deepcopy(double)[:-1](x64).abs() > (BEND if coarse else 1e-4)
    dy = (torch.randn_like(reference, dtype=torch.float32) * clear * MAGNITUDE).to(dtype)
    dy = dy.contiguous(memory_format=torch.channels_last) if given.layout == "NHWC" else dy  # the float64 result may have another layout

    def step(layer: Any, _: int = 0) -> list[Any]:
        return list(torch.autograd.grad(result(layer), [x, *layer.parameters()], dy))

    expected = torch.autograd.grad(double(x64), [x64, *double.parameters()], dy.double())
    peaks = []
    errors = []
    for layer in (ours, theirs):
        found = step(layer)
        errors.append(max(_relative(a, b) for a, b in zip(found, expected, strict=True)))
        del found
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(layer)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    known = judged(errors, 1e-5)
    settle(partial(step, ours), torch.cuda.synchronize, device.all_compiled)
    ways = [partial(step, layer) for layer in (ours, theirs, compiled)]
    times = timed(gpu_times(torch, ways, 1, effort)[0])
    memory = f"peak memory {peaks[0] / 1e6:.0f} MB, torch's {peaks[1] / 1e6:.0f}"
    rows.append(Row(f"{BLOCK}, trained", text, mode, **times, **known, config=memory))

    def in_a_row(layer: Any, _: int) -> None:
        for _ in range(STEPS):
            step(layer)

    ways = [partial(in_a_row, layer) for layer in (ours, theirs, compiled)]
    times = timed(wall_times(ways, 1, effort, torch.cuda.synchronize), STEPS)
    rows.append(Row(f"{BLOCK}, trained, by the host's clock", text, mode, **times, **known))
    return rows


# ---- the command


def run(settings: bench.Settings) -> int:
    """Measure, print, and write the JSON that was asked for."""
    began = time.monotonic()
    bench.refuse_suite_options(settings, "--training", "fp32 and tf32")
    device = bench.gpu_for(settings, "--training")
    bench.check_paths(settings, "training")
    torch = require("torch")
    seed = secrets.randbelow(2**31) if settings.seed is None else settings.seed
    torch.cuda.set_device(device.name)
    out = console()
    rows, done = list[Row](), 0
    asked, layers = cases(settings.only)
    problems = [replace(problem, precision=mode) for mode in MODES for problem in asked]
    with cudnn_set(torch, "benchmark", True):
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
            if settings.over(began):
                break
            done += 1
            with torch_precision(plan.problem.precision):
                rows.append(_said(measure_gradient(torch, plan, settings.effort, seed + i)))
            torch.cuda.empty_cache()
        with torch_precision("fp32"):
            for layer in layers:
                if settings.over(began):
                    break
                done += 1
                rows += map(_said, measure_block(torch, layer, device, settings.effort, seed))
    machine["method"] += settings.cut(done, len(ready) + len(layers), "layers")
    _print(out, rows)
    if settings.json is not None:
        report = {
            "machine": machine | {"seconds": time.monotonic() - began},
            "rows": [asdict(row) | {"ratio": row.ratio} for row in rows], "summary": means(rows),
        }
        try:
            write_json(settings.json, report)
        except OSError as error:
            raise ToolError(f"can't write the report: {error}") from error
    if settings.pages is not None:
        write_between(settings.pages / RESULTS_PAGE, markdown(machine, rows), "training")
    out.print(f"{time.monotonic() - began:.0f} s in all")
    return FAILED if any(row.verdict == "WRONG" for row in rows) else OK


def _said(row: Row) -> Row:
    """The row, printed to stderr if there is no progress bar, in case the run is cut short."""
    if not sys.stderr.isatty():
        times = f"{microseconds(row.ours_us)} us, torch {microseconds(row.torch_us)}"
        print(f"{row.what}, {row.problem}, {row.mode}: {times}, {row.config}, {row.verdict}", file=sys.stderr, flush=True)
    return row


def means(rows: Sequence[Row]) -> dict[str, float]:
    """The geometric means of the gradients' ratios for each mode: over all, and over those by the input and by the filter."""
    found = {}
    for mode in MODES:
        for what in ("", " by input", " by weight"):
            own = [row.ratio for row in rows if row.mode == mode and row.what.startswith("gradient" + what) and row.verdict == "ok"]
            if own:
                found[f"{mode}, gradients{what}"] = math.exp(sum(map(math.log, own)) / len(own))
    return found


def markdown(machine: dict[str, Any], rows: Sequence[Row]) -> str:
    """The results for the page: gradients with both modes in a row, then layers. `machine` is the header of the report."""
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
        compiled = ["-" if math.isnan(row.compiled_us) else microseconds(row.compiled_us) for row in others]
        lines = [(row.what, row.problem, row.mode, *_times(row), us, row.config) for row, us in zip(others, compiled, strict=True)]
        parts.append(markdown_table(("what", "problem", "mode", "ours, us", "torch, us", "torch.compile, us", "notes"), 3, lines))
    return "\n\n".join(parts)


def _ratio(row: Row) -> str:
    return "-" if row.verdict != "ok" else number(row.ratio, ".2f")


def _times(row: Row) -> tuple[str, str]:
    """Our time, or the reason why there is none, and torch's."""
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
