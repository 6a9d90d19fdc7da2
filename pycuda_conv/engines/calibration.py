"""What timings of a GPU say of the models of time: a factor for each kind of problem that an engine runs, as data in files.

The models' numbers were found on an H200. ``pycuda-conv calibrate`` times random problems on another GPU, or again on such a one, and
writes by what the models' times have to be multiplied there. A file has the timings that its factors were fitted to.

A kind is a word for each of a problem's traits, from the engine on. A factor of a kind is that of the kind before it, with one trait less,
moved towards the kind's own timings: the more of them there are, the farther. So few timings change little.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import Device
from pycuda_conv.runtime.cache import cache_dir

log = logging.getLogger("pycuda_conv")

FORMAT, VERSION = "pycuda_conv calibration", 1
SHIPPED = Path(__file__).resolve().parents[1] / "tuned" / "models"
#: A factor farther from 1 than this is no calibration but a fault.
MOST = 16.0


def kinds(engine: str, problem: ConvProblem, config: Any = None) -> tuple[str, ...]:
    """The kinds of a problem as it is launched, the most general first.

    Their words are of the engine, the arithmetic, the layout and the pass, the groups, the filter, and, with a `config`, of its tile.
    """
    bits = {"float16": "16 bits", "bfloat16": "16 bits", "float64": "fp64"}.get(problem.dtype, problem.precision)
    taps = math.prod(problem.filter_size)
    size = "1x1" if taps == 1 else "small filter" if taps <= 27 else "large filter"
    groups = "dense" if problem.groups == 1 else "depthwise" if problem.groups == problem.C else "grouped"
    strided = "strided" if max(problem.stride) > 1 else "unit stride"
    words = engine, bits, f"{problem.layout} {problem.direction}", groups, f"{size}, {strided}"
    found = tuple(", ".join(words[:n]) for n in range(1, len(words) + 1))
    return found if config is None else (*found, f"{found[-1]}, {tile(config)}")


def tile(config: Any) -> str:
    """The words of a configuration's tile: its numbers, but for those that follow from the others or from the problem's size."""
    return " ".join(str(value) for name, value in vars(config).items() if name not in ("STAGES", "SPLIT"))


@dataclass(frozen=True)
class Calibration:
    """The factors of one GPU, and where they come from."""

    gpu: str
    capability: tuple[int, int]
    multiprocessors: int
    driver: str = ""
    date: str = ""
    command: str = ""
    factors: Mapping[str, float] = field(default_factory=dict)  # by kind; a kind without one has that of the kind before it
    #: What the factors were fitted to: [problem's fields, [[engine, configuration, predicted us, measured us], ...]].
    timings: tuple[Any, ...] = ()

    def factor(self, engine: str, problem: ConvProblem, config: Any = None) -> float:
        """By what an engine's prediction is multiplied."""
        return self.of_kinds(kinds(engine, problem), config)

    def of_kinds(self, known: tuple[str, ...], config: Any = None) -> float:
        """The factor of a problem of these kinds, and of a tile for it."""
        found = None if config is None else self.factors.get(f"{known[-1]}, {tile(config)}")
        if found is not None:
            return found
        return next((self.factors[kind] for kind in reversed(known) if kind in self.factors), 1.0)


# ---- files


#: What stands before a file's timings.
TIMINGS = ',\n "timings": ['


def parsed(given: str) -> Calibration:
    """The calibration in a file's text; a ``ValueError`` says why there is none."""
    table = json.loads(given)
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise ValueError(f"it has no 'format': '{FORMAT}'")
    if table.get("version") != VERSION:
        raise ValueError(f"it is of version {table.get('version')!r}, not {VERSION}")
    factors, capability = table.get("factors"), table.get("capability")
    if not isinstance(factors, dict) or not all(type(one) in (int, float) and 1 / MOST <= one <= MOST for one in factors.values()):
        raise ValueError(f"its 'factors' must be numbers from {1 / MOST:.4f} to {MOST:.0f}")
    if not (isinstance(capability, list) and len(capability) == 2 and all(type(n) is int for n in capability)):
        raise ValueError(f"its 'capability' must be two integers, got {capability!r}")
    if not isinstance(table.get("gpu"), str) or type(table.get("multiprocessors")) is not int:
        raise ValueError("its 'gpu' must be a name, and its 'multiprocessors' a number")
    words = {name: str(table.get(name, "")) for name in ("driver", "date", "command")}
    timings = table.get("timings", [])
    return Calibration(
        table["gpu"], (capability[0], capability[1]), table["multiprocessors"], **words, factors=factors,
        timings=tuple(timings) if isinstance(timings, list) else (),
    )  # fmt: skip


def file_name(gpu: str) -> str:
    """The name of a GPU's file."""
    return re.sub(r"\W+", "_", gpu.lower()) + ".json"


def read(path: Path) -> Calibration | None:
    """The calibration in a file without its timings; None, with a warning in the log, if it can't be used, or if there is none."""
    try:
        head, mark, _ = path.read_text(encoding="utf-8").partition(TIMINGS)  # which take longer to read than all else
        return parsed(head + "\n}" if mark else head)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        log.warning("the calibration in %s is ignored: %s", path, error)
        return None


def own_file(gpu: str) -> Path | None:
    """The file that ``pycuda-conv calibrate`` writes for a GPU; None without a home."""
    folder = cache_dir()
    return folder / "models" / file_name(gpu) if folder.is_absolute() else None


@lru_cache
def _of(gpu: str, capability: tuple[int, int], multiprocessors: int) -> Calibration | None:
    own = own_file(gpu)
    found = (own and read(own)) or read(SHIPPED / file_name(gpu))
    if found is not None or not SHIPPED.is_dir():
        return found
    near = [one for one in map(read, sorted(SHIPPED.glob("*.json"))) if one is not None and one.capability[0] == capability[0]]

    def distance(one: Calibration) -> tuple[int, float]:
        return abs(one.capability[1] - capability[1]), abs(math.log(one.multiprocessors / max(multiprocessors, 1)))

    return min(near, key=distance, default=None)


#: What counts for all devices while the block of :func:`replaced` lasts.
_instead: list[Calibration | None] = []


@contextmanager
def replaced(one: Calibration | None) -> Iterator[None]:
    """Inside the block this counts for all devices, or nothing does. It is for fits and tests: choices that were made before stay."""
    _instead.append(one)
    try:
        yield
    finally:
        _instead.pop()


def of(device: Device) -> Calibration | None:
    """The calibration that counts for a device: its own, the shipped one of such a GPU, or that of the nearest. None without any.

    Nearest is one of the same generation, with as many multiprocessors or nearly.
    """
    if device.backend != "cuda":
        return None
    if _instead:
        return _instead[-1]
    return _of(device.model, (device.capability[0], device.capability[1]), device.multiprocessors)


def forget() -> None:
    """Read files anew."""
    _of.cache_clear()
