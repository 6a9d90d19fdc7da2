"""Layers against every way in which torch computes them: ``bench --suite``.

Rivals of float32 layers are torch's default, which rounds to TF32, torch's IEEE arithmetic, TF32 on channels-last images, and cuBLAS where
a layer is a product of matrices. Each way has its time and its error against float64.
"""

from __future__ import annotations

import json
import math
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import pycuda_conv
from pycuda_conv import tune
from pycuda_conv.errors import DeviceMemoryError
from pycuda_conv.plan import Plan, as_called
from pycuda_conv.problem import ConvProblem, channels_last
from pycuda_conv.timing import Effort, gpu_times, operand_sets
from pycuda_conv.tools import bench, families
from pycuda_conv.tools.oracle import LARGE_FLOPS, Errors, Truth, compare, cudnn_set, options, precision_set, torch_for, torch_precision
from pycuda_conv.tools.plans import Ahead
from pycuda_conv.tools.report import (
    FRONT_PAGE,
    RESULTS_PAGE,
    geometric_mean,
    header_lines,
    markdown_table,
    measured_by,
    microseconds,
    number,
    write_between,
    write_json,
)
from pycuda_conv.tools.suite import MODES
from pycuda_conv.tools.terminal import FAILED, OK, Table, console, require, table, track

SUITES = "published", "kernelbench", "drawn"
PASSES = "fprop", "dgrad", "wgrad"
TORCH = "torch"  # where both sides compute in one arithmetic
MOST_SETS = 32
DRAWN_MODES = "fp32", "tf32", "fp16", "tf32-nhwc", "fp16-nhwc"
EACH = 2  # layers of each family, mode and pass that are drawn by default
EFFORT = Effort(rounds=5, seconds=0.02, most_rounds=9)
CHECKED_IMAGES = 2  # of a layer above LARGE_FLOPS
#: Below this ratio a row counts as slower than torch.
SLOWER = 0.95

OURS, OURS_TF32 = "ours, fp32", "ours, tf32"
HALVES = {"fp16": "float16", "bf16": "bfloat16"}
MOST_ROUNDED = 1e-2  # relative error of 16-bit arithmetic against float64 of the arrays before they were rounded
DEFAULT, IEEE, LAST = "torch, default (TF32)", "torch, IEEE", "torch, TF32, channels last"
CUBLAS, CUBLAS_TF32 = "cuBLAS, IEEE", "cuBLAS, TF32"
DEFAULT_WORDS = "our fp32 over torch's default, which is TF32"
#: What is compared with what: the words of a mean, our way, and torch's.
COMPARED = (
    (DEFAULT_WORDS, OURS, DEFAULT), ("our fp32 over torch's IEEE", OURS, IEEE),
    ("our tf32 over torch's default", OURS_TF32, DEFAULT), ("our fp32 over TF32 on channels last", OURS, LAST),
    ("our fp32 over cuBLAS in IEEE", OURS, CUBLAS), ("our tf32 over cuBLAS in TF32", OURS_TF32, CUBLAS_TF32),
)  # fmt: skip


@dataclass
class Row:
    """A layer: microseconds and relative errors by way; a way that failed has the reason.

    Attributes
    ----------
    group : str
        Rows of one group are one problem: their times count together.
    """

    group: str
    problem: str
    mode: str
    direction: str
    us: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    config: str = ""
    wrong: bool = False


# ---- the layers


def kernelbench() -> list[tuple[str, ConvProblem]]:
    """The layers of KernelBench's convolution problems, with the problems' names, in float32."""
    found = []
    for name, shape, layers in json.loads((Path(__file__).parents[1] / "data" / "kernelbench.json").read_text())["problems"]:
        x = tuple(shape)
        for direction, c, k, taps, stride, padding, dilation, groups, more in layers:
            ndim, given = len(taps), {"stride": tuple(stride), "padding": tuple(padding), "dilation": tuple(dilation), "groups": groups}
            if direction == "transposed":
                weight = (c, k // groups, *taps)
                made = ConvProblem.transposed(ndim, x, weight, output_padding=tuple(more), **given)
            else:
                made = ConvProblem.forward(ndim, x, (k, c // groups, *taps), **given)
            found.append((name, made))
            x = made.result_shape
    return found


def drawn(seed: int, each: int, modes: Sequence[str]) -> Iterator[tuple[str, str, ConvProblem]]:
    """`each` layers of every family in every mode and pass, others for each: (family, mode, problem), all kinds by turns."""
    r = random.Random(seed)
    for _ in range(each):
        turns = list(product(families.FAMILIES, PASSES, modes))
        r.shuffle(turns)  # what is measured in a part of the time has every kind
        for family, direction, mode in turns:
            kind = {"dtype": "float32", "precision": "fp32", "layout": "NCHW"} | MODES[mode]
            while True:
                one = families.layer(r, family)
                if one["transposed"] and direction != "fprop":
                    break
                try:
                    made = families.problem(one, direction, kind["dtype"], kind["precision"], kind["layout"])
                except ValueError:  # an impossible layer
                    continue
                if 5e5 < 4 * made.bytes / made.itemsize < families.MOST_BYTES and 2 * made.macs < families.MOST_FLOP:
                    yield family, mode, made
                    break


# ---- ways


def gradient_by_torch(torch: Any, problem: ConvProblem) -> Callable[[Any, Any], Any]:
    """torch's gradient by the filter, of (x, dy)."""
    n, shape = problem.ndim, problem.result_shape
    arguments = [list(v[-n:]) for v in (problem.stride, problem.padding_before, problem.dilation)]

    def backward(x: Any, dy: Any) -> Any:
        like = torch.empty(shape, device=x.device, dtype=x.dtype)  # torch reads its shape alone, and its order where x lies in either
        if problem.layout == "NHWC" and n > 1:  # torch has no such format of one axis
            like = like.contiguous(memory_format=last_format(torch, n))
        mask = [False, True, False]
        return torch.ops.aten.convolution_backward(dy, x, like, None, *arguments, False, [0] * n, problem.groups, mask)[1]

    return backward


def last_format(torch: Any, ndim: int) -> Any:
    """The memory format that torch calls channels last."""
    return torch.channels_last if ndim == 2 else torch.channels_last_3d


def torch_way(torch: Any, problem: ConvProblem, x: Sequence[Any], w: Sequence[Any], *, precision: str) -> Callable[[int], Any]:
    """torch's result for the i-th set, in this arithmetic."""
    made = gradient_by_torch(torch, problem) if problem.direction == "wgrad" else torch_for(problem)

    def way(i: int) -> Any:
        with precision_set(torch, "cudnn", precision):
            return made(x[i], w[i])

    return way


def product_way(torch: Any, x: Sequence[Any], w: Sequence[Any], precision: str) -> Callable[[int], Any]:
    """A 1x1 layer of NCHW images as cuBLAS's product of matrices."""
    images, filters = [array.flatten(2) for array in x], [array.flatten(1) for array in w]
    size = x[0].shape[2:]

    def way(i: int) -> Any:
        with precision_set(torch, "cuda", precision):
            return torch.matmul(filters[i], images[i]).unflatten(2, size)

    return way


def is_product(problem: ConvProblem) -> bool:
    """Whether a forward layer is a product of matrices as it lies."""
    plain = {*problem.filter_size, *problem.stride} == {1} and not any((*problem.padding_before, *problem.padding_after))
    return plain and problem.groups == 1 and problem.direction == "fprop" and problem.layout == "NCHW"


def rivals(torch: Any, problem: ConvProblem, x: Sequence[Any], w: Sequence[Any]) -> dict[str, Callable[[int], Any]]:
    """Every way in which torch computes a float32 layer of NCHW images."""
    found = {name: torch_way(torch, problem, x, w, precision=p) for name, p in ((DEFAULT, "tf32"), (IEEE, "ieee"))}
    if problem.ndim > 1:
        form = last_format(torch, problem.ndim)
        images, filters = ([array.contiguous(memory_format=form) for array in arrays] for arrays in (x, w))
        found[LAST] = torch_way(torch, problem, images, filters, precision="tf32")
    for word, dtype in HALVES.items():
        halves = [[array.to(getattr(torch, dtype)) for array in arrays] for arrays in (x, w)]
        found[f"torch, {word}"] = torch_way(torch, problem, *halves, precision="ieee")
    if is_product(problem):
        found |= {CUBLAS: product_way(torch, x, w, "ieee"), CUBLAS_TF32: product_way(torch, x, w, "tf32")}
    return found


def reference(torch: Any, problem: ConvProblem, x: Any, w: Any, seed: int) -> Callable[..., Errors]:
    """A function that gives a result's errors against float64, judged by the rounding of a second problem, else of this one.

    Of a large layer the first images are compared alone: all of them in float64 would take longer than all that is timed.
    """
    if problem.direction != "wgrad":
        some = replace(problem, N=min(problem.N, CHECKED_IMAGES)) if problem.flops > LARGE_FLOPS else problem
        return Truth(torch, some, x, w, seed).errors
    gradient = gradient_by_torch(torch, problem)
    with cudnn_set(torch, "benchmark", False):  # to try all of cuDNN's float64 kernels would take longer than the reference
        exact, magnitude = gradient(x.double(), w.double()), gradient(x.double().abs(), w.double().abs())
    return lambda out, computed=problem: compare(computed, out.double(), exact, magnitude)


def called(problem: ConvProblem) -> Callable[..., Any]:
    """The package's function for `problem`, which converts arrays as it needs."""
    if problem.direction != "wgrad":
        return bench.public(problem)
    function, given = getattr(pycuda_conv, f"conv{problem.ndim}d_weight"), options(replace(problem, direction="fprop"))
    return lambda x, dy, out: function(x, problem.result_shape, dy, out=out, precision=problem.precision, **given)


def measure(torch: Any, group: str, mode: str, problem: ConvProblem, ours: dict[str, Plan], seed: int, every_way: bool) -> Row:
    """Verify and time one layer in all ways: with `every_way` torch's for float32, else torch's in the layer's own arithmetic."""
    plan = next(iter(ours.values()))
    place = plan.device.name
    row = Row(group, bench.label(problem), mode, problem.direction, config=str(plan.config))
    last = channels_last(problem.ndim + 2, problem.ndim) if problem.layout == "NHWC" else None
    count = min(MOST_SETS, operand_sets(problem, torch.cuda.get_device_properties(place).L2_cache_size))
    sets = bench.Operands(torch, problem, place, count, torch.Generator(place).manual_seed(seed), last)
    precision = "tf32" if problem.precision == "tf32" else "ieee"
    arrays = torch, problem, sets.x, sets.w
    others = rivals(*arrays) if every_way else {TORCH: torch_way(*arrays, precision=precision)}
    if mode == "fp32" and not every_way:
        others[DEFAULT] = torch_way(*arrays, precision="tf32")

    def rotating(way: Callable[[int], Any]) -> Callable[[int], Any]:
        """The way with its results in other memory for each set; of large arrays, which have one set, nothing is held."""
        results: list[Any] = [None] * count

        def call(i: int) -> Any:
            results[i] = None
            results[i] = way(i)
            return results[i]

        return call if count > 1 else way

    def our_way(plan: Plan) -> Callable[[int], Any]:
        call = plan if plan.problem.layout == problem.layout else called(problem)
        if plan.problem.dtype == problem.dtype:
            return lambda i: call(sets.x[i], sets.w[i], out=sets.out[i])
        x, w, out = ([array.to(getattr(torch, plan.problem.dtype)) for array in arrays] for arrays in (sets.x, sets.w, sets.out))
        return lambda i: call(x[i], w[i], out=out[i])

    own = {name: our_way(plan) for name, plan in ours.items()}
    ways = own | {name: rotating(way) for name, way in others.items()}
    errors = reference(torch, problem, sets.x[0], sets.w[0], seed)
    for name, way in list(ways.items()):
        sets.poison()
        try:
            result = way(0)
        except (RuntimeError, DeviceMemoryError) as failure:  # a library may refuse a layer, or its workspace has no room
            if name in ours:
                raise
            row.failed[name] = " ".join(str(failure).split())[:200]
            del ways[name]
            continue
        same = name not in ours or ours[name].problem.dtype == problem.dtype
        found = errors(result, ours[name].problem if same and name in ours else problem)
        del result
        row.errors[name] = found.relative
        if name in ours:  # in 16 bits the arrays are rounded first
            row.wrong = row.wrong or not (found.correct if same else found.relative < MOST_ROUNDED)
    if not row.wrong:
        times, _ = gpu_times(torch, list(ways.values()), count, EFFORT)
        row.us = {name: bench.median(taken) * 1e6 for name, taken in zip(ways, times, strict=True)}
    return row


# ---- means


@dataclass(frozen=True)
class Mean:
    """How rows compare: words, the ratios of one way's time to ours by problem, lowest first."""

    words: str
    ratios: tuple[tuple[float, str], ...]
    #: our error and torch's, geometric means
    errors: tuple[float | None, float | None] = (None, None)

    def cells(self) -> tuple[str, ...]:
        """The row of a table."""
        values = [ratio for ratio, _ in self.ratios]
        below, slower = sum(ratio < 1 for ratio in values), sum(ratio < SLOWER for ratio in values) / len(values)
        worst = f"{self.ratios[0][0]:.2f}"
        errors = (number(error, ".1e") for error in self.errors)
        return self.words, str(len(values)), number(geometric_mean(values), ".2f"), worst, str(below), f"{slower:.1%}", *errors


FRONT_WORDS = DEFAULT_WORDS, "our tf32 over torch's default"  # of what stands on the front page
COLUMNS = ("", "layers", "geometric mean", "worst", "below 1", f"below {SLOWER}", "our error", "torch's")


def mean(words: str, rows: Sequence[Row], ours: str, theirs: str) -> Mean | None:
    """The ratios of torch's time to ours where both are known; rows of one group count as one."""
    times: dict[str, list[tuple[float, float, str]]] = {}
    for row in rows:
        pair = (row.us.get(ours, math.nan), row.us.get(theirs, math.nan), row.problem)
        times.setdefault(row.group or f"{row.mode} {row.direction} {row.problem}", []).append(pair)
    found = [(sum(b for _, b, _ in some) / sum(a for a, _, _ in some), some[0][2]) for some in times.values()]
    ratios = tuple(sorted(pair for pair in found if pair[0] == pair[0]))
    errors = (geometric_mean(error for error in (row.errors.get(name) for row in rows) if error) for name in (ours, theirs))
    return Mean(words, ratios, tuple(errors)) if ratios else None  # type: ignore[arg-type]  # two of them


def means(rows: Sequence[Row], suite: str) -> list[Mean]:
    """The comparisons of a suite: of all ways, or by mode and pass."""
    if suite == "kernelbench":
        compared = (mean(words, rows, ours, theirs) for words, ours, theirs in COMPARED)
        return [one for one in compared if one]
    found = [mean(DEFAULT_WORDS, [row for row in rows if row.mode == "fp32"], OURS, DEFAULT)]
    for mode in dict.fromkeys(row.mode for row in rows):
        own = [row for row in rows if row.mode == mode]
        passes = [(f"{mode} {direction}", [row for row in own if row.direction == direction]) for direction in PASSES]
        found += [mean(words, some, OURS, TORCH) for words, some in ((mode, own), *passes)]
    return [one for one in found if one]


def points(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Each way's time over that of torch's IEEE arithmetic, and its error: geometric means over the layers that all the ways computed."""
    every = set.intersection(*(set(row.us) for row in rows)) if rows else set()
    found = {}
    for name in [name for name in rows[0].us if name in every] if rows else ():
        times = [row.us[name] / row.us[IEEE] for row in rows]
        found[name] = (geometric_mean(times) or 0.0, geometric_mean(row.errors[name] for row in rows) or 0.0)
    return found


def mean_table(found: Sequence[Mean], count: int) -> Table:
    """The means of so many layers as a table."""
    return table(f"torch's time over ours, {count} layers", COLUMNS, [one.cells() for one in found], left=("",))


# ---- the command


def layers(settings: bench.Settings, suite: str, each: int, seed: int) -> list[tuple[str, str, ConvProblem]]:
    """The layers to measure: (group, mode, problem)."""
    if suite == "kernelbench":
        every = [(name, "fp32", one) for name, one in kernelbench()]
        random.Random(seed).shuffle(every)  # what is measured in a part of the time is not of one kind
        return bench.matching(settings.only, every, lambda one: f"{one[0]} {one[2]}")
    modes = settings.modes if settings.modes != ("fp32",) else DRAWN_MODES
    return [("", mode, problem) for _, mode, problem in drawn(seed, each, modes)]


def run(settings: bench.Settings, suite: str, each: int) -> int:
    """Measure, print the means and the rows that lose, and write the files that were asked for."""
    began, device = time.monotonic(), bench.gpu_for(settings, f"--suite {suite}")
    torch, out = require("torch"), console()
    bench.check_paths(settings, suite)
    torch.cuda.set_device(device.name)
    seed = secrets.randbelow(2**31) if settings.seed is None else settings.seed
    todo = layers(settings, suite, each, seed)
    rows: list[Row] = []
    words = "every way of torch's in turn" if suite == "kernelbench" else "torch in the same arithmetic"
    command = f"pycuda-conv bench --suite {suite}" + (f" --draw {each} --seed {seed}" if suite == "drawn" else "")
    command += " --untuned" * settings.untuned
    machine = bench.describe(torch, device, ", ".join(dict.fromkeys(mode for _, mode, _ in todo)), words, seed) | {"command": command}
    for line in header_lines(machine):
        out.print(line, markup=False)
    wanted = [as_called(one, device) for _, _, problem in todo for one in our_problems(problem, suite).values()]
    with (
        torch.no_grad(), cudnn_set(torch, "benchmark", True), torch_precision("fp32"), tune.untuned(settings.untuned),
        Ahead(wanted, device) as ahead,
    ):
        done = known = 0
        for i, (group, mode, problem) in enumerate(track(todo, lambda one: f"{one[1]} {one[2]}")):
            if settings.over(began):
                break
            ours = {name: ahead.plan(as_called(one, device)) for name, one in our_problems(problem, suite).items()}
            done, known = i + 1, known + any(tune.lookup(plan.problem, device) for plan in ours.values())
            try:
                rows.append(measure(torch, group, mode, problem, ours, seed + i, suite == "kernelbench"))
            except (DeviceMemoryError, torch.OutOfMemoryError):
                out.print(f"no memory: {problem}", markup=False)
            torch.cuda.empty_cache()
            if rows and not sys.stderr.isatty():
                told = ", ".join(f"{name} {microseconds(us)}" for name, us in rows[-1].us.items())
                print(f"[{i + 1}/{len(todo)}] {mode} {rows[-1].direction} {rows[-1].problem}: {told}", file=sys.stderr, flush=True)
    machine["method"] += f"; measured choices for {known} layers, the models' own for {done - known}"
    machine["method"] += settings.cut(done, len(todo), "layers, in random order")
    out.print(machine["method"], markup=False)
    found = means(rows, suite)
    if settings.plots is not None and suite == "kernelbench":
        from pycuda_conv.tools.plots import time_and_error

        settings.plots.mkdir(parents=True, exist_ok=True)
        time_and_error(points(rows), machine, settings.plots / "time-and-error.svg")
    out.print(mean_table(found, len(rows)))
    for one in found:
        lost = [f"{ratio:.2f} {problem}" for ratio, problem in one.ratios if ratio < SLOWER]
        out.print(f"{one.words}: " + "; ".join(lost), markup=False) if lost else None
    wrong = [row for row in rows if row.wrong]
    for row in wrong:
        out.print(f"WRONG: {row.mode} {row.direction} {row.problem}, {row.config}", markup=False, style="bold red")
    if settings.json is not None:
        write_json(settings.json, {"machine": machine, "rows": [asdict(row) for row in rows]})
    if settings.pages is not None:
        text = page(machine, rows, found, suite)
        write_between(settings.pages / RESULTS_PAGE, text, suite)
        write_between(settings.pages / FRONT_PAGE, excerpt(machine, rows, found, suite), suite)
    return FAILED if wrong else OK


def our_problems(problem: ConvProblem, suite: str) -> dict[str, ConvProblem]:
    """The problems of our ways by their names: with KernelBench's layers every arithmetic."""
    if suite != "kernelbench":
        return {OURS: problem}
    return {OURS: problem, OURS_TF32: replace(problem, precision="tf32")} | {
        f"ours, {word}": replace(problem, dtype=dtype) for word, dtype in HALVES.items()
    }


def excerpt(machine: dict[str, Any], rows: Sequence[Row], found: Sequence[Mean], suite: str) -> str:
    """The section of the front page: without passes and layers, and beside what people run."""
    shown = [one for one in found if one.words in FRONT_WORDS or (suite != "kernelbench" and " " not in one.words)]
    return f"{markdown_table(COLUMNS, 1, [one.cells() for one in shown])}\n\n{measured_by(machine)}"


def page(machine: dict[str, Any], rows: Sequence[Row], found: Sequence[Mean], suite: str) -> str:
    """The section of the page of results."""
    parts = [measured_by(machine), markdown_table(COLUMNS, 1, [one.cells() for one in found])]
    if suite == "kernelbench":
        ways = list(dict.fromkeys(name for row in rows for name in row.us))

        def cell(row: Row, name: str) -> str:
            return f"{microseconds(row.us[name])} ({row.errors[name]:.0e})" if name in row.us else "-"

        lines = [(row.problem, *(cell(row, name) for name in ways)) for row in rows]
        parts += ["Microseconds, and in brackets the error against float64:", markdown_table(("layer", *ways), 1, lines)]
    else:
        passes = [one for one in found if " " in one.words and one.words != DEFAULT_WORDS]
        lost = [(one.words, problem, f"{ratio:.2f}") for one in passes for ratio, problem in one.ratios if ratio < SLOWER]
        parts += [f"Layers below {SLOWER}:", markdown_table(("mode and pass", "layer", "ratio"), 2, lost)] if lost else []
    return "\n\n".join(parts)
