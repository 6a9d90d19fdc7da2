"""Times random problems on a GPU and writes by what the models' times have to be multiplied there: ``pycuda-conv calibrate``."""

from __future__ import annotations

import datetime
import json
import math
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from pycuda_conv import engines
from pycuda_conv.engines import calibration, registry
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
#: So many problems of an engine count as much as its model, and so many of a kind as what is known of the kind before it.
#: Kinds that learned faster chose worse, among problems that nobody had measured, than the models alone.
PRIOR, PRIOR_OF_KINDS = 6, 30
#: A problem's timings count up to this logarithm away from the median of their kind: some were disturbed.
FAR = 0.25

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


def fit(ratios: Iterable[tuple[str, ConvProblem, Any, float]]) -> dict[str, float]:
    """The factors that timings ask for, each (engine, problem, configuration, measured over predicted)."""
    logs: dict[str, dict[ConvProblem, list[float]]] = {}
    parents: dict[str, str] = {}
    for engine, problem, config, ratio in ratios:
        before = ""
        for kind in calibration.kinds(engine, problem, config):
            logs.setdefault(kind, {}).setdefault(problem, []).append(math.log(ratio))
            parents[kind], before = before, kind
    found: dict[str, float] = {"": 0.0}
    for kind, of_problems in logs.items():  # a kind comes after the one before it
        means = [math.fsum(some) / len(some) for some in of_problems.values()]
        parent = found[parents[kind]]
        middle = median(means)
        kept = (max(middle - FAR, min(middle + FAR, mean)) - parent for mean in means)
        found[kind] = parent + math.fsum(kept) / (len(means) + (PRIOR_OF_KINDS if parents[kind] else PRIOR))
    return {kind: round(math.exp(value), 4) for kind, value in sorted(found.items()) if kind}


def text(one: Calibration) -> str:
    """A file's text: a line for each factor and each problem, in order, so that files compare well."""
    about = {name: getattr(one, name) for name in ("gpu", "capability", "multiprocessors", "driver", "date", "command")}
    about = {"format": calibration.FORMAT, "version": calibration.VERSION} | about
    head = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in about.items())
    factors = ",\n".join(f"  {json.dumps(kind)}: {factor}" for kind, factor in sorted(one.factors.items()))
    timings = ",\n".join(f"  {json.dumps(timing)}" for timing in one.timings)
    return f'{{\n{head},\n "factors": {{\n{factors}\n }}{calibration.TIMINGS}\n{timings}\n ]\n}}\n'


def fitted(timings: Sequence[Timing], device: Device) -> dict[str, float]:
    """The factors that these timings ask for.

    Engines that put other engines' launches together come last: their predictions hold the others' factors.
    """
    best: dict[ConvProblem, float] = {}
    for problem, _, us in timings:
        best[problem] = min(us, best.get(problem, us))
    near = [(problem, config, us) for problem, config, us in timings if us <= COUNTS * best[problem]]

    def ratios(composed: bool) -> Iterator[tuple[str, ConvProblem, engines.Config, float]]:
        for problem, config, us in near:
            engine = registry.engine_of(config)
            name = registry.name_of(engine)
            if name.startswith(COMPOSED) == composed:
                predicted = engine.time(problem.launched, config, device)
                if predicted and 1 / calibration.MOST < us / predicted < calibration.MOST:
                    yield name, problem.launched, config, us / predicted

    with calibration.replaced(None):
        plain = fit(ratios(False))
    with calibration.replaced(_named(device, plain)):
        return plain | fit(ratios(True))


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
                with suppress(ValueError):  # a kernel that took such numbers once
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
            timings += read_timings(path)
        except (OSError, ValueError, TypeError, KeyError) as error:
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
    factors = fitted(timings, device)
    driver = nvidia_smi("driver_version").get("driver_version", "")
    command = "pycuda-conv calibrate" + (f" --seed {seed}" if losses else " --fit")
    today = datetime.datetime.now().astimezone().date().isoformat()
    made = _named(device, factors, driver=driver, date=today, command=command, timings=kept)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text(made), encoding="utf-8")
    calibration.forget()
    forget_plans()
    if losses:
        good = sum(loss <= NEAR for loss in losses)
        out.print(
            f"as it was: {good} of {len(losses)} choices within {NEAR - 1:.0%} of the fastest candidate, geometric mean of the loss "
            f"{geometric_mean(losses):.3f}, worst {max(losses):.2f}"
        )
    out.print(f"as it is now, by the {len(timings)} timings themselves: {told(timings, device, made)}")
    out.print(f"{len(factors)} factors written to {target}", markup=False)
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
    """The timings of a file, of an earlier version too."""
    return from_json(json.loads(path.read_text(encoding="utf-8"))["timings"])
