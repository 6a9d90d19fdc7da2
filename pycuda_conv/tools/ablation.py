"""What an engine is worth: the problems that it wins, and how much longer they take by the best of the other engines.

Everything here is by the engines' models. ``scripts/ablate.py`` takes the same problems and measures both on a GPU.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pycuda_conv.engines import registry
from pycuda_conv.engines.base import Config, Engine, fastest
from pycuda_conv.errors import BackendError
from pycuda_conv.plan import as_called
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import Device
from pycuda_conv.runtime.target import Target
from pycuda_conv.tools.families import FAMILIES, draw
from pycuda_conv.tools.terminal import OK, ToolError, console, json_text, table

#: An engine stays if without it the mean over all families is more than 0.5% slower, or a family and pass more than 10%.
MEAN_LIMIT, PART_LIMIT = 1.005, 1.10
LONG = 1.5  # a problem that takes so many times as long is counted
#: A family and a pass: ("depthwise", "wgrad").
Part = tuple[str, str]
#: A family, a problem of it, and the configuration that is chosen.
Choice = tuple[str, ConvProblem, Config]


class _Fewer:
    """An engine without some of its configurations."""

    def __init__(self, engine: Engine, part: re.Pattern[str]) -> None:
        self._engine, self._part = engine, part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def configs(self, problem: ConvProblem, device: Device) -> list[Config]:
        return [config for config in self._engine.configs(problem, device) if not self._part.search(str(config))]

    def choose(self, problem: ConvProblem, device: Device) -> tuple[float, Config] | None:
        timed = ((self._engine.time(problem, config, device), config) for config in self.configs(problem, device))
        return fastest((us, config) for us, config in timed if us is not None)


def pattern(name: str) -> re.Pattern[str]:
    """What the text of a configuration has, or of one that hands work to such a one: of an engine, or of a part of one.

    A part is a class of configurations, or those of which a field is so: ``DepthwiseRing``, ``ImplicitGemm.schedule=pingpong``.

    Raises
    ------
    ToolError
        There is no such engine or class.
    """
    known = engine_names()
    if name in known:
        return re.compile(rf"\b({'|'.join(cls.__name__ for cls in known[name].CONFIGS)})\(")
    cls, _, field = name.partition(".")
    if cls not in registry.config_classes():
        raise ToolError(f"there is no engine {name!r}; there are {', '.join(known)}, and parts of them such as DepthwiseRing")
    name, _, value = field.partition("=")
    return re.compile(rf"\b{cls}\(" + (rf"(.*, )?{name}='?{value}\b" if field else ""))


def engine_names() -> dict[str, Engine]:
    """The engines by the names of their modules, those in a family's folder behind its name: ``hopper_planes``."""
    places = {engine: str(getattr(engine, "__name__", "")).split(".")[-2:] for engine in registry.ENGINES}
    alone = ("engines", "compose")
    return {stem if folder in (*alone, stem) else f"{folder}_{stem}": engine for engine, (folder, stem) in places.items()}


@contextmanager
def without(names: Sequence[str]) -> Iterator[None]:
    """Leave engines, or parts of them (:func:`pattern`), out of all choices in a ``with`` block."""
    known, all_engines = engine_names(), registry.ENGINES
    kept: list[Any] = [engine for name, engine in known.items() if name not in names]
    for name in set(names) - set(known):
        part, cls = pattern(name), name.partition(".")[0]
        kept = [_Fewer(one, part) if cls in [own.__name__ for own in one.CONFIGS] else one for one in kept]
    registry.ENGINES = tuple(kept)
    try:
        yield
    finally:
        registry.ENGINES = all_engines


def belongs(config: Config, name: str) -> bool:
    """Whether `config` is of such an engine or part, or hands work to a configuration of it."""
    return pattern(name).search(str(config)) is not None


@dataclass(frozen=True)
class Win:
    """A problem, the configuration that is chosen for it, and the one that would be chosen without that one's engine, if there is any."""

    family: str
    problem: ConvProblem
    first: Config
    second: Config | None
    first_us: float | None
    second_us: float | None

    @property
    def part(self) -> Part:
        return self.family, self.problem.direction

    @property
    def loss(self) -> float | None:
        """How many times as long the second is predicted to take; None where no model knows."""
        known = self.first_us and self.second_us and math.isfinite(self.second_us)
        return self.second_us / self.first_us if known and self.first_us and self.second_us else None


def problems(device: Device, seed: int, each: int) -> list[tuple[str, ConvProblem]]:
    """`each` problems of every family, as they are called."""
    families = (family for family in FAMILIES for _ in range(each))
    return [(family, as_called(problem, device)) for family, problem in zip(families, draw(seed, each), strict=True)]


def chosen(drawn: Sequence[tuple[str, ConvProblem]], device: Device) -> list[Choice]:
    """What is chosen for each problem that a kernel can run."""
    found = ((family, problem, registry.find(problem, device)) for family, problem in drawn)
    return [(family, problem, config) for family, problem, config in found if config is not None]


def wins(choices: Sequence[Choice], device: Device, names: Sequence[str]) -> list[Win]:
    """The choices of these engines, beside what would be chosen without them."""
    own = [choice for choice in choices if any(belongs(choice[2], name) for name in names)]
    times = [registry.predicted(problem, config, device) for _, problem, config in own]
    found = []
    with without(names):
        for (family, problem, config), us in zip(own, times, strict=True):
            second = registry.find(problem, device)
            second_us = None if second is None else registry.predicted(problem, second, device)
            found.append(Win(family, problem, config, second, us, second_us))
    return found


@dataclass(frozen=True)
class Cost:
    """What it costs to remove engines, as factors of time.

    Attributes
    ----------
    mean, worst : float
        Over all problems, and over those of the worst family and pass.
    part : (str, str)
        That family and pass.
    only : int
        Problems that no other engine runs.
    """

    mean: float
    worst: float
    part: Part
    only: int

    @property
    def stays(self) -> bool:
        """Whether the rule keeps the engines."""
        return self.mean > MEAN_LIMIT or self.worst > PART_LIMIT or self.only > 0

    @property
    def why(self) -> str:
        """The rule's verdict in words."""
        if self.only:
            return f"stays: the only one for {self.only} of the problems"
        if self.mean > MEAN_LIMIT:
            return f"stays: {self.mean - 1:.2%} of all families"
        family, direction = self.part
        return f"{'stays' if self.stays else 'goes'}: {self.worst - 1:.1%} of {family} {direction}"


def cost(counts: Mapping[Part, int], losses: Mapping[Part, Sequence[float]], only: int) -> Cost:
    """What it costs to remove engines: from the number of problems of each part, and how much longer those take that the engines win."""
    logs = {part: math.fsum(math.log(loss) for loss in losses.get(part, ())) for part in counts}
    means = {part: math.exp(logs[part] / counts[part]) for part in counts}
    worst = max(means, key=lambda part: means[part])
    return Cost(math.exp(math.fsum(logs.values()) / sum(counts.values())), means[worst], worst, only)


COLUMNS = ("without", "wins", "loss", "all families", "worst", "family and pass", "> 1.5x", "no model", "only one", "verdict")


def _cells(name: str, drawn: Sequence[tuple[str, ConvProblem]], found: Sequence[Win], of: Cost) -> tuple[str, ...]:
    known = [win.loss for win in found if win.loss is not None]
    mean = math.exp(math.fsum(map(math.log, known)) / len(known)) if known else 1.0
    unknown = sum(win.loss is None and win.second is not None for win in found)
    return (
        name, f"{len(found) / len(drawn):.1%}", f"{mean:.2f}", f"{of.mean - 1:+.2%}", f"{of.worst - 1:+.1%}", " ".join(of.part),
        str(sum(loss > LONG for loss in known)), str(unknown or ""), str(of.only or ""), of.why,
    )  # fmt: skip


def run(names: Sequence[str], architecture: str, seed: int, each: int, json_file: Path | None) -> int:
    """Print what each of the engines is worth, and what all of `names` together are; by default each of all engines."""
    try:
        device = Target(architecture)
    except BackendError as error:
        raise ToolError(str(error)) from error
    able = [name for name, engine in engine_names().items() if engine.unsupported(device) is None]
    for name in names:
        pattern(name)  # wrong names are refused before the work begins
    groups = [(name,) for name in names or able] + ([tuple(names)] if len(names) > 1 else [])
    drawn = problems(device, seed, each)
    counts: dict[Part, int] = defaultdict(int)
    for family, problem in drawn:
        counts[family, problem.direction] += 1
    choices = chosen(drawn, device)
    rows: list[tuple[str, ...]] = []
    plain: list[dict[str, Any]] = []
    for group in groups:
        found = wins(choices, device, group)
        losses: dict[Part, list[float]] = defaultdict(list)
        for win in found:
            if win.loss is not None:
                losses[win.part].append(win.loss)
        of = cost(counts, losses, sum(win.second is None for win in found))
        rows.append(_cells(" ".join(group), drawn, found, of))
        plain.append({"without": group, **asdict(of), "stays": of.stays, "wins": [_plain(win) for win in found]})
    out = console()
    out.print(table(f"Engines of {architecture} by their models, {len(drawn):,} problems, seed {seed}", COLUMNS, rows, left=COLUMNS[:1]))
    if json_file:
        json_file.write_text(json_text({"architecture": architecture, "seed": seed, "problems": len(drawn), "rows": plain}) + "\n")
    return OK


def _plain(win: Win) -> dict[str, Any]:
    return {
        "family": win.family, "problem": str(win.problem), "pass": win.problem.direction, "first": str(win.first),
        "second": str(win.second), "first_us": win.first_us, "second_us": win.second_us,
    }  # fmt: skip
