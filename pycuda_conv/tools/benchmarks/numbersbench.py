"""fp32 by kind of numbers: what images cost that take the exact path, and the errors of each kind: ``bench --suite numbers``.

fp32 is float32's accuracy from three products of 16 bits. What those can't hold is flagged while it is packed, and computed again in plain
float32: the exact path. Which images take it depends on their numbers, so each layer is measured with every kind.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from pycuda_conv.plan import as_called
from pycuda_conv.problem import ConvProblem
from pycuda_conv.timing import gpu_times, operand_sets
from pycuda_conv.tools import bench
from pycuda_conv.tools.benchmarks.layerbench import DEFAULT, EFFORT, IEEE, MOST_SETS, OURS, torch_way
from pycuda_conv.tools.distributions import DISTRIBUTIONS, Draw
from pycuda_conv.tools.oracle import Truth, cudnn_set, torch_precision
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
from pycuda_conv.tools.terminal import FAILED, OK, console, require, table, track

LARGE = 2.0**70  # two limbs hold 2^-60 to 2^60


def _large(every: int, rng: np.random.Generator, first: Sequence[int], second: Sequence[int], ndim: int) -> tuple[np.ndarray, np.ndarray]:
    """Normal numbers, those of each `every`-th image times LARGE."""
    x = rng.standard_normal(first)
    x[::every] *= LARGE
    return x, rng.standard_normal(second)


def _gradient(rng: np.random.Generator, first: Sequence[int], second: Sequence[int], ndim: int) -> tuple[np.ndarray, np.ndarray]:
    """As gradients are behind a ReLU: half of them zero, the others of all magnitudes."""
    x = rng.standard_normal(first) * 10 ** rng.uniform(-8, -2, first)
    return np.where(rng.random(first) < 0.5, 0, x), rng.standard_normal(second)


#: By name: those of ``verify``; what a gradient looks like; images that are computed again as a whole, one in eight and all.
NUMBERS: dict[str, Draw] = DISTRIBUTIONS | {
    "a gradient": _gradient, "one image in 8 above 2^60": partial(_large, 8), "all images above 2^60": partial(_large, 1),
}  # fmt: skip
LAYERS = (
    ConvProblem.forward(2, (32, 64, 56, 56), (64, 64, 3, 3), padding=1),
    ConvProblem.forward(2, (32, 256, 14, 14), (256, 256, 3, 3), padding=1),
    ConvProblem.forward(2, (32, 512, 28, 28), (128, 512, 1, 1)),
    ConvProblem.transposed(2, (32, 256, 14, 14), (256, 128, 4, 4), stride=2, padding=1),
)  # fmt: skip
WAYS = OURS, IEEE, DEFAULT


@dataclass
class Row:
    """A layer with one kind of numbers: microseconds and relative errors by way."""

    problem: str
    numbers: str
    us: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    #: our time over that with normal numbers
    over_normal: float | None = None
    wrong: bool = False

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        ratio = self.us[IEEE] / self.us[OURS] if OURS in self.us else None
        times, errors = (microseconds(self.us.get(name)) for name in WAYS), (number(self.errors.get(name), ".1e") for name in WAYS)
        return self.problem, self.numbers, *times, number(self.over_normal, ".2f"), number(ratio, ".2f"), *errors


COLUMNS = ("layer", "numbers", *(f"{name} us" for name in WAYS), "over normal", "IEEE / ours", *(f"error {name}" for name in WAYS))


def measure(torch: Any, plan: Any, numbers: str, seed: int) -> Row:
    """Verify and time one layer with one kind of numbers."""
    problem = plan.problem
    on_gpu = plan.device.backend == "cuda"
    place = plan.device.name if on_gpu else "cpu"
    count = min(MOST_SETS, operand_sets(problem, torch.cuda.get_device_properties(place).L2_cache_size)) if on_gpu else 1
    sets = bench.Operands(torch, problem, place, count, torch.Generator(place).manual_seed(seed))
    drawn = NUMBERS[numbers](np.random.default_rng(seed), problem.input_shape, problem.weight_shape, problem.ndim)
    for arrays, values in zip((sets.x, sets.w), drawn, strict=True):
        for array in arrays:
            array.copy_(torch.from_numpy(values))
    row, results = Row(bench.label(problem), numbers), list[Any]()
    theirs = {name: torch_way(torch, problem, sets.x, sets.w, precision=p) for name, p in ((IEEE, "ieee"), (DEFAULT, "tf32"))}

    def ours(i: int) -> Any:
        return plan(sets.x[i], sets.w[i], out=sets.out[i])

    def kept(way: Callable[[int], Any], i: int) -> None:
        results[:] = [way(i)]

    truth = Truth(torch, problem, sets.x[0], sets.w[0], seed)
    ways = {OURS: ours} | theirs
    for name, way in ways.items():
        found = truth.errors(way(0))
        row.errors[name] = found.relative
        row.wrong = row.wrong or (name == OURS and not found.correct)
    if on_gpu and not row.wrong:
        times, _ = gpu_times(torch, [partial(kept, way) for way in ways.values()], count, EFFORT)
        row.us = {name: median(taken) * 1e6 for name, taken in zip(ways, times, strict=True)}
    return row


def run(settings: bench.Settings) -> int:
    """Measure, print, and write the files that were asked for."""
    began, device = time.monotonic(), bench.gpu_for(settings, "--suite numbers")
    torch, out = require("torch"), console()
    bench.check_paths(settings, "numbers")
    torch.cuda.set_device(device.name)
    seed = secrets.randbelow(2**31) if settings.seed is None else settings.seed
    machine = bench.describe(torch, device, "fp32", "", seed) | {"command": "pycuda-conv bench --suite numbers"}
    for line in header_lines(machine):
        out.print(line, markup=False)
    rows: list[Row] = []
    with torch.no_grad(), cudnn_set(torch, "benchmark", True), torch_precision("fp32"):
        ready = plans([as_called(problem, device) for problem in LAYERS], device)
        for plan in ready:
            normal = None
            for numbers in track(tuple(NUMBERS), str):
                if settings.over(began):
                    break
                row = measure(torch, plan, numbers, seed)
                normal = normal or row.us.get(OURS)
                row.over_normal = row.us[OURS] / normal if normal and OURS in row.us else None
                rows.append(row)
                torch.cuda.empty_cache()
    machine["method"] += settings.cut(len(rows), len(LAYERS) * len(NUMBERS), "rows")
    out.print(table("fp32 by kind of numbers", COLUMNS, [row.cells() for row in rows], left=("layer", "numbers")))
    for row in rows:
        if row.wrong:
            out.print(f"WRONG: {row.problem}, {row.numbers}", markup=False, style="bold red")
    if settings.json is not None:
        write_json(settings.json, {"machine": machine, "rows": [asdict(row) for row in rows]})
    if settings.pages is not None:
        text = f"{measured_by(machine)}\n\n{markdown_table(COLUMNS, 2, [row.cells() for row in rows])}"
        write_between(settings.pages / RESULTS_PAGE, text, "numbers")
    return FAILED if any(row.wrong for row in rows) else OK
