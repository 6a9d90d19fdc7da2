#!/usr/bin/env python3
"""Fit the constants of the models of time to timings, and write them into tuned/costs: `pycuda-conv calibrate` makes such files.

    python3 scripts/fit_costs.py TIMINGS ... --engines hopper.dense hopper.gemm=hopper.gemm,packing_time
    python3 scripts/fit_costs.py TIMINGS ... --judge OTHERS ...       how often the models choose well among others' timings; fits nothing

Constants are changed one at a time, up or down by a tenth and then by a twentieth, as long as the timings are met better: those near a
problem's best count most, what tiles of one problem take beside each other counts more than what all of them take, and one that is far off
counts no more than FAR. A constant that moves far has to be worth it. Those that were measured otherwise or count things stay (`--fixed`).
Fits are to be judged by timings that they were not made of.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pycuda_conv import engines
from pycuda_conv.engines import calibration, costs, registry
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.target import Target
from pycuda_conv.tools.benchmarks import calibrate

DEVICE: Any = Target("sm_90a")
FAR = 0.35  # a logarithm
SLOW, NEAR = 2.2, 1.3  # of a problem's best time: slower ones don't count, nearer ones count most
LESS = 0.4  # what others count
TOGETHER = 0.3  # what a problem's tiles count together, beside each other
STIFF = 3e-4  # of a constant that moves, times the square of its logarithm
STEPS = 1.12, 1.05
LEAST = 2e-6  # a gain
#: Constants that stay: what was measured otherwise, and numbers of things.
FIXED = (
    "MEMORY", "RESIDENT", "SECTOR", "FIRST_STEPS", "AT_ONCE", "LAUNCHES", "DENSE_LAUNCHES", "GPU_PASSES", "LONE_THREADS", "MANY_TAPS",
    "MANY_ROWS", "SPILLING",
)  # fmt: skip

#: A problem as it is launched, candidates of one engine, their microseconds, and whether they are near the best.
Timed = tuple[ConvProblem, list[tuple[engines.Config, float, bool]]]
#: Where a number lies: the section, the constant, and its place in it.
Leaf = tuple[costs.Costs, str, tuple[Any, ...]]


def timed(files: Sequence[Path]) -> dict[ConvProblem, list[tuple[engines.Config, float]]]:
    """The timings of files by problem."""
    found: dict[ConvProblem, list[tuple[engines.Config, float]]] = {}
    for path in files:
        for problem, config, us in calibrate.read_timings(path):
            found.setdefault(problem, []).append((config, us))
    return found


def of_engine(name: str, timings: dict[ConvProblem, list[tuple[engines.Config, float]]]) -> list[Timed]:
    """An engine's candidates, and apart from them those of each engine that delegates to it."""
    own = {cls.__name__ for engine in registry.ENGINES if registry.name_of(engine) == name for cls in engine.CONFIGS}
    found = []
    for problem, some in timings.items():
        best, by_engine = min(us for _, us in some), dict[str, list[tuple[engines.Config, float, bool]]]()
        for config, us in some:
            delegate = re.match(r"\w+\(DELEGATE=.(\w+)\(", str(config))
            if us <= SLOW * best and (type(config).__name__ in own or (delegate and delegate[1] in own)):
                by_engine.setdefault(type(config).__name__ if delegate else name, []).append((config, us, us < NEAR * best))
        found += [(problem.launched, one) for one in by_engine.values()]
    return found


def misfit(rows: Sequence[Timed]) -> float:
    """The mean square of what the models miss."""
    total = weights = 0.0
    for problem, some in rows:
        known = [(us, registry.engine_of(config).time(problem, config, DEVICE), 1.0 if near else LESS) for config, us, near in some]
        logs = [(math.log(us / predicted), weight) for us, predicted, weight in known if predicted]
        weight_of_all = math.fsum(weight for _, weight in logs)
        mean = math.fsum(log * weight for log, weight in logs) / weight_of_all if logs else 0.0
        common = TOGETHER * max(-0.4, min(0.4, mean)) ** 2
        total += math.fsum(weight * (max(-FAR, min(FAR, log - mean)) ** 2 + common) for log, weight in logs)
        weights += weight_of_all
    return total / weights if weights else 0.0  # no timing is near its problem's best


def leaves(section: costs.Costs, fixed: Sequence[str]) -> Iterator[Leaf]:
    """The numbers of a section that may change."""

    def below(value: Any, at: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if value:
                yield at
        elif isinstance(value, (dict, tuple)):
            for key, one in value.items() if isinstance(value, dict) else enumerate(value):
                yield from below(one, (*at, key))

    for name, value in vars(section).items():
        if name not in fixed:
            yield from ((section, name, at) for at in below(value, ()))


def at(value: Any, where: tuple[Any, ...]) -> float:
    """The number there."""
    for key in where:
        value = value[key]
    return float(value)


def changed(value: Any, where: tuple[Any, ...], number: float) -> Any:
    """The value with another number there."""
    if not where:
        return number
    inner = changed(value[where[0]], where[1:], number)
    if isinstance(value, dict):
        return value | {where[0]: inner}
    return tuple(inner if i == where[0] else one for i, one in enumerate(value))


def forgetting() -> Callable[[], None]:
    """A function that forgets predictions that were made with other constants."""
    modules = [module for name, module in sys.modules.items() if name.startswith("pycuda_conv.engines")]
    kept = {one for module in modules for name, one in vars(module).items() if "time" in name and hasattr(one, "cache_clear")}
    kept |= {sys.modules["pycuda_conv.engines.packing_time"].overhead}

    def forget() -> None:
        for one in kept:
            one.cache_clear()

    return forget


def fit(rows: Sequence[Timed], sections: Sequence[str], fixed: Sequence[str], seconds: float) -> tuple[float, float]:
    """Change the sections' constants where that meets the timings better: the root mean square before and after."""
    todo = [leaf for section in sections for leaf in leaves(costs.costs(section), fixed)]
    first = [at(getattr(section, name), where) for section, name, where in todo]
    moved, forget, end = [0.0] * len(todo), forgetting(), time.monotonic() + seconds

    def total() -> float:
        forget()
        return misfit(rows) + STIFF * math.fsum(moved)

    best = before = total()
    for step in STEPS:
        for i, (section, name, where) in enumerate(todo):
            for factor in (step, 1 / step):
                gained = False
                while time.monotonic() < end:
                    old, was = getattr(section, name), moved[i]
                    number = at(old, where) * factor
                    vars(section)[name] = changed(old, where, number)
                    moved[i] = math.log(number / first[i]) ** 2
                    now = total()
                    if now > best - LEAST:
                        vars(section)[name], moved[i] = old, was
                        break
                    best, gained = now, True
                if gained:
                    break
    forget()
    return math.sqrt(before), math.sqrt(misfit(rows))


def write(sections: Sequence[str], path: Path) -> None:
    """Put the constants of these sections into the file, three digits of each, and change nothing else of its text."""
    text = path.read_text(encoding="utf-8")
    table = json.loads(text)["engines"]

    def plain(value: Any, like: Any) -> Any:
        """The value as JSON has it, with the file's own keys; numbers that did not change stay as they are written."""
        if isinstance(like, dict):
            return {key: plain(value[costs.read_as({key: 0}).popitem()[0]], one) for key, one in like.items()}
        if isinstance(like, list):
            return [plain(one, known) for one, known in zip(value, like, strict=True)]
        return like if value == like or isinstance(like, (str, bool)) else float(f"{value:.3g}")

    for section in sections:
        begin = text.index(f'"{section}": {{')
        for name, entry in table[section].items():
            if name != "about":
                old = f'"{name}": [{json.dumps(entry[0])},'
                where = text.index(old, begin)
                new = f'"{name}": [{json.dumps(plain(getattr(costs.costs(section), name), entry[0]))},'
                text = text[:where] + new + text[where + len(old) :]
    path.write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the arguments and fit, or judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("timings", nargs="+", type=Path, help="files of `pycuda-conv calibrate`")
    parser.add_argument("--engines", nargs="+", default=[], metavar="ENGINE[=SECTION,...]", help="its sections, by default of its name")
    parser.add_argument("--fixed", nargs="+", default=FIXED, metavar="NAME", help=f"constants that stay, by default {', '.join(FIXED)}")
    parser.add_argument("--seconds", type=float, default=75.0, help="for each engine, by default 75")
    parser.add_argument("--judge", nargs="+", type=Path, metavar="OTHERS", help="files of other problems")
    given = parser.parse_args(arguments)
    found = timed(given.timings)
    with calibration.replaced(None):
        for word in given.engines:
            name, _, sections = word.partition("=")
            rows, parts = of_engine(name, found), sections.split(",") if sections else [name]
            before, after = fit(rows, parts, given.fixed, given.seconds)
            print(f"{name}: {len(rows)} problems, root mean square {before:.4f}, now {after:.4f}", flush=True)
            write(parts, costs.FOLDER / costs.REFERENCE)
    if given.judge:
        flat = [(problem, config, us) for problem, some in found.items() for config, us in some]
        others = [(problem, config, us) for problem, some in timed(given.judge).items() for config, us in some]
        factors = calibrate.fitted(flat, DEVICE)
        for words, known in (("models alone", None), ("with factors", calibrate._named(DEVICE, factors))):
            print(f"{words}: {calibrate.told(others, DEVICE, known)}")


if __name__ == "__main__":
    main()
