"""The planner's choices for problems that nobody tuned: random problems of all families, with the candidates measured beside the choice."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pycuda_conv import engines
from pycuda_conv.errors import DeviceMemoryError
from pycuda_conv.measure import Compiler, WrongResultError, device_times
from pycuda_conv.plan import Plan, as_called
from pycuda_conv.problem import ConvProblem
from pycuda_conv.tools.families import FAMILIES, draw
from pycuda_conv.tools.report import geometric_mean, microseconds, number
from pycuda_conv.tools.suite import MODES
from pycuda_conv.tools.terminal import FAILED, OK, Table, ToolError, console, json_text, named_device, table, track

NEAR = 1.1  # a choice is good up to so many times the fastest candidate's time
AHEAD = 8  # problems whose kernels are compiled while earlier ones are measured


@dataclass(frozen=True)
class Candidate:
    """A configuration, the time that its model predicts, and the time that it took, in microseconds."""

    config: engines.Config
    predicted: float | None
    us: float


@dataclass(frozen=True)
class Row:
    """A problem and its candidates, the planner's choice first."""

    family: str
    problem: ConvProblem
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        return min(self.candidates, key=lambda one: one.us)

    @property
    def loss(self) -> float:
        """The choice's time divided by that of the fastest candidate."""
        return self.candidates[0].us / self.best.us

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        chosen, best = self.candidates[0], self.best
        found = "" if best is chosen else str(best.config)
        return (
            self.family, str(self.problem), str(chosen.config), microseconds(chosen.predicted), microseconds(chosen.us), found,
            microseconds(best.us), number(self.loss, ".2f"),
        )  # fmt: skip


COLUMNS = ("family", "problem", "chosen", "predicted us", "us", "fastest", "its us", "loss")


def problems(seed: int, modes: Sequence[str], each: int) -> list[tuple[str, ConvProblem]]:
    """`each` problems of every family in one of the modes."""
    found = ({"dtype": "float32", "precision": "fp32", "layout": "NCHW"} | MODES[mode] for mode in modes)
    kinds = tuple((kind["dtype"], kind["precision"], kind["layout"]) for kind in found)
    return list(zip((family for family in FAMILIES for _ in range(each)), draw(seed, each, kinds), strict=True))


def measured(todo: Iterable[tuple[str, ConvProblem]], device: Any) -> Iterator[Row]:
    """Rows in the order of their problems; a problem that can't be measured is reported and left out."""
    coming, waiting = iter(todo), deque[tuple[str, ConvProblem]]()
    with Compiler(device) as compiler:
        while True:
            for family, problem in islice(coming, AHEAD - len(waiting)):
                compiler.start(problem)
                waiting.append((family, problem))
            if not waiting:
                return
            family, problem = waiting.popleft()
            configs = compiler.configs(problem)
            try:
                times = device_times([Plan(problem, device, config=config).final_form() for config in configs])
            except (DeviceMemoryError, WrongResultError) as error:
                console(stderr=True).print(f"{problem}: {error}")
                continue
            predicted = {config: us for us, config in engines.predictions(problem, device)}
            found = (Candidate(config, predicted.get(config), us) for config, us in zip(configs, times, strict=True))
            yield Row(family, problem, tuple(found))


def row_table(title: str, rows: Sequence[Row]) -> Table:
    """The rows as a table."""
    return table(title, COLUMNS, [row.cells() for row in rows], left=("family", "problem", "chosen", "fastest"))


def run(device: Any, modes: Sequence[str], seed: int | None, each: int, json_file: Path | None) -> int:
    """Measure, and print a row for each problem and a summary of the choices."""
    gpu: Any = named_device("cuda" if device is None else device)
    if gpu.backend != "cuda":
        raise ToolError(f"the planner's models are of GPUs, not of {gpu.name}")
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    todo = [(family, as_called(problem, gpu)) for family, problem in problems(seed, modes, each)]
    rows = []
    for row in measured(track(todo, lambda pair: str(pair[1])), gpu):
        rows.append(row)
        if json_file:  # after every row, so that an interrupted run keeps what it has measured
            json_file.write_text(json_text({"gpu": gpu.model, "seed": seed, "rows": [_plain(one) for one in rows]}) + "\n")
    out = console()
    out.print(row_table(f"Choices on {gpu.model}, {', '.join(modes)}, seed {seed}", rows))
    if rows:
        good = sum(row.loss <= NEAR for row in rows)
        ratios = [row.candidates[0].us / row.candidates[0].predicted for row in rows if row.candidates[0].predicted]
        out.print(
            f"{good} of {len(rows)} choices are within {NEAR - 1:.0%} of the fastest candidate; the worst takes "
            f"{max(row.loss for row in rows):.2f} times its time, the geometric mean is {geometric_mean([row.loss for row in rows]):.3f}"
        )
        if ratios:
            mean, least, most = geometric_mean(ratios), min(ratios), max(ratios)
            out.print(f"times are {mean:.2f} of the predictions in the geometric mean, {least:.2f} to {most:.2f}")
    return OK if len(rows) == len(todo) else FAILED


def _plain(row: Row) -> dict[str, Any]:
    """The row in JSON's types."""
    found = [
        {"kind": type(one.config).__name__, "config": asdict(one.config), "predicted_us": one.predicted, "us": one.us}
        for one in row.candidates
    ]
    return {"family": row.family, "problem": str(row.problem), "loss": row.loss, "candidates": found}
