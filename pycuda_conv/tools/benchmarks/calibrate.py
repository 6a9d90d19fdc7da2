"""Times random problems on a GPU and writes by what the models' times have to be multiplied there: ``pycuda-conv calibrate``."""

from __future__ import annotations

import datetime
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from pycuda_conv import engines
from pycuda_conv.engines import calibration, corrections, registry
from pycuda_conv.engines.calibration import Calibration
from pycuda_conv.memo import forget_plans
from pycuda_conv.plan import as_called
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime import Device
from pycuda_conv.tools.choices import NEAR, Row, measured, problems
from pycuda_conv.tools.info import nvidia_smi
from pycuda_conv.tools.report import geometric_mean
from pycuda_conv.tools.suite import MODES
from pycuda_conv.tools.terminal import FAILED, OK, ToolError, console, named_device

SECONDS = 600.0
EACH = 1  # problems of each family that are drawn at a time
#: Timings that count: up to so many times the fastest candidate's. Slower ones decide nothing.
COUNTS = 2.5
COMPOSED = "compose."
#: Of the regression: what a weight costs, how much less a timing counts that is so many times the fastest, from which residual on one
#: counts as disturbed, and the fewest timings of an engine with weights.
RIDGE, SLOW, DISTURBED, FEWEST = 80.0, 4.0, 0.15, 12

#: A problem, a configuration, and the microseconds that it took.
Timing = tuple[ConvProblem, engines.Config, float]


@dataclass(frozen=True)
class Settings:
    """The command's arguments."""

    seconds: float = SECONDS
    seed: int | None = None
    output: Path | None = None
    #: files whose timings are added
    merge: tuple[Path, ...] = ()
    #: measure nothing, fit what the files have
    fit: bool = False
    device: Any = None


def fitted(timings: Sequence[Timing], device: Device) -> Calibration:
    """The factors and weights that these timings ask for.

    Engines that put other engines' launches together come last: their predictions hold the others' factors and weights.
    """
    best: dict[ConvProblem, float] = {}
    for problem, _, us in timings:
        best[problem] = min(us, best.get(problem, us))
    near = [(problem, config, us) for problem, config, us in timings if us <= COUNTS * best[problem]]

    def ratios(composed: bool) -> list[Ratio]:
        found = []
        for problem, config, us in near:
            engine = registry.engine_of(config)
            name = registry.name_of(engine)
            if name.startswith(COMPOSED) == composed:
                predicted = engine.time(problem.launched, config, device)
                if predicted and 1 / calibration.MOST < us / predicted < calibration.MOST:
                    found.append(Ratio(name, problem.launched, config, predicted, us / predicted, us / best[problem]))
        return found

    found = _named(device, {})
    for composed in (False, True):
        with calibration.replaced(found if composed else None):
            some = ratios(composed)
        factors = calibration.fit((one.engine, one.problem, one.config, one.ratio) for one in some)
        known = replace(found, factors={**found.factors, **factors})
        scales = found.scales or scales_of(some)
        found = replace(known, scales=scales, weights={**found.weights, **weights_of(some, known, scales)})
    return found


@dataclass(frozen=True)
class Ratio:
    """A timing beside its prediction: measured over predicted, and over the fastest candidate's."""

    engine: str
    problem: ConvProblem
    config: engines.Config
    predicted: float
    ratio: float
    loss: float

    @property
    def numbers(self) -> list[float]:
        return corrections.numbers(self.problem, self.config, self.predicted)


def scales_of(some: Sequence[Ratio]) -> tuple[tuple[float, float], ...]:
    """The mean and the standard deviation of each number."""
    found = np.array([one.numbers for one in some] or [[0.0] * len(corrections.NAMES)])
    both = zip(found.mean(0), found.std(0), strict=True)
    return tuple((round(float(mean), 3), round(float(deviation) + 1e-3, 3)) for mean, deviation in both)


def weights_of(some: Sequence[Ratio], known: Calibration, scales: corrections.Scales) -> dict[str, list[list[float]]]:
    """The weights of every engine, for what the factors leave: a ridge regression in which disturbed and slow timings count less."""
    found, rows = {}, len(corrections.PAIRED) + 1
    for engine in dict.fromkeys(one.engine for one in some):
        own = [one for one in some if one.engine == engine]
        if len(own) < FEWEST:
            continue
        z = np.array([[1.0, *corrections.scaled(one.numbers, scales)] for one in own])
        paired = z[:, [0, *(i + 1 for i in corrections.PAIRED)]]
        a = (paired[:, :, None] * z[:, None, :]).reshape(len(own), -1)
        left = np.array([math.log(one.ratio / known.factor(engine, one.problem, one.config)) for one in own])
        penalty = np.full(a.shape[1], RIDGE)
        penalty[0] = RIDGE / 20  # of 1 alone
        base = 1 / (1 + SLOW * (np.array([one.loss for one in own]) - 1))
        counts, solved = base, np.zeros(a.shape[1])
        for _ in range(4):
            solved = np.linalg.solve(a.T @ (a * counts[:, None]) + np.diag(penalty), a.T @ (counts * left))
            counts = base / np.maximum(1, abs(left - a @ solved) / DISTURBED)
        found[engine] = [[round(float(value), 4) for value in row] for row in solved.reshape(rows, -1)]
    return found


def _named(device: Any, factors: dict[str, float], **more: Any) -> Calibration:
    return Calibration(device.model, tuple(device.capability), device.multiprocessors, factors=factors, **more)


# ---- timings in files


def as_json(timings: Sequence[Timing]) -> tuple[list[Any], ...]:
    """Timings as a file has them: problem by problem, fields that have their defaults left out."""
    found: dict[ConvProblem, list[Any]] = {}
    for problem, config, us in timings:
        found.setdefault(problem, []).append([type(config).__name__, list(asdict(config).values()), round(us, 3)])
    plain = asdict(_PLAIN)

    def own(problem: ConvProblem) -> dict[str, Any]:
        return {name: value for name, value in asdict(problem).items() if value != plain[name]}

    return tuple([own(problem), some] for problem, some in found.items())


_PLAIN = ConvProblem.forward(2, (1, 1, 1, 1), (1, 1, 1, 1))


def from_json(given: Sequence[Any]) -> list[Timing]:
    """The timings of a file. What names configurations that are no more is left out."""
    found: list[Timing] = []
    classes, plain = engines.config_classes(), asdict(_PLAIN)
    for values, some in given:
        values = {name: _tuples(value) for name, value in (plain | values).items()}
        problem = ConvProblem(**values)
        for name, numbers, us in some:
            if name in classes and len(fields(classes[name])) == len(numbers):
                found.append((problem, classes[name](*numbers), us))
    return found


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


# ---- the command


def rows(device: Device, seed: int, seconds: float) -> Iterator[Row]:
    """Random problems of all families in all modes with their candidates' times, until the time is over."""
    began, r = time.monotonic(), random.Random(seed)
    drawn = chain.from_iterable(problems(r.randrange(2**32), tuple(MODES), EACH) for _ in iter(int, 1))

    def in_time() -> Iterator[tuple[str, ConvProblem]]:
        for family, problem in drawn:
            if time.monotonic() - began > seconds:
                return
            yield family, as_called(problem, device)

    yield from measured(in_time(), device)


def run(settings: Settings) -> int:
    """Measure, fit, and write the file."""
    device: Any = named_device("cuda" if settings.device is None else settings.device)
    if device.backend != "cuda":
        raise ToolError(f"the planner's models are of GPUs, not of {device.name}")
    target = settings.output or calibration.own_file(device.model)
    if target is None:
        raise ToolError("there is no folder for the calibration: name a file with --output")
    seed = random.SystemRandom().randrange(2**32) if settings.seed is None else settings.seed
    timings: list[Timing] = []
    for path in settings.merge:
        try:
            timings += from_json(calibration.parsed(path.read_text(encoding="utf-8")).timings)
        except (OSError, ValueError, TypeError) as error:
            raise ToolError(f"{path} can't be merged: {error}") from error
    out, losses = console(), list[float]()
    for row in rows(device, seed, settings.seconds) if not settings.fit else ():
        timings += [(row.problem, one.config, one.us) for one in row.candidates]
        losses.append(row.loss)
    if not timings:
        out.print("nothing was measured", markup=False)
        return FAILED
    kept = as_json(timings)
    timings = from_json(kept)  # what the file has, so that a fit of the file gives the same
    found = fitted(timings, device)
    driver = nvidia_smi("driver_version").get("driver_version", "")
    command = "pycuda-conv calibrate" + (f" --seed {seed}" if losses else " --fit")
    today = datetime.datetime.now().astimezone().date().isoformat()
    made = replace(found, driver=driver, date=today, command=command, timings=kept)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(calibration.text(made), encoding="utf-8")
    calibration.forget()
    forget_plans()
    if losses:
        good = sum(loss <= NEAR for loss in losses)
        out.print(
            f"as it was: {good} of {len(losses)} choices within {NEAR - 1:.0%} of the fastest candidate, geometric mean of the loss "
            f"{geometric_mean(losses):.3f}, worst {max(losses):.2f}"
        )
    out.print(f"as it is now, by the {len(timings)} timings themselves: {told(timings, device, made)}")
    out.print(f"{len(made.factors)} factors and the weights of {len(made.weights)} engines written to {target}", markup=False)
    return OK


def told(timings: Sequence[Timing], device: Device, one: Calibration | None) -> str:
    """How well the models choose among timed candidates with this calibration, in words."""
    losses = list(choices(timings, device, one))
    good = sum(loss <= NEAR for loss in losses)
    mean, worst = geometric_mean(losses), max(losses)
    return f"{good} of {len(losses)} within {NEAR - 1:.0%}, geometric mean {mean:.3f}, worst {worst:.2f}"


def choices(timings: Sequence[Timing], device: Device, one: Calibration | None) -> Iterator[float]:
    """For each problem the time of the candidate that the models choose over that of the fastest."""
    of_problems: dict[ConvProblem, list[tuple[engines.Config, float]]] = {}
    for problem, config, us in timings:
        of_problems.setdefault(problem, []).append((config, us))
    with calibration.replaced(one):
        for problem, some in of_problems.items():
            timed = ((engines.predicted(problem, config, device), us) for config, us in some)
            known = [(predicted, us) for predicted, us in timed if predicted is not None]
            if known:
                yield min(known, key=lambda pair: pair[0])[1] / min(us for _, us in known)


def read_timings(path: Path) -> list[Timing]:
    """The timings of a file."""
    return from_json(json.loads(path.read_text(encoding="utf-8"))["timings"])
