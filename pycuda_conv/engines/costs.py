"""The constants of the models of time, as data: ``tuned/costs/GPU.json`` has them by engine, each with its value and what it is.

They were fitted to timings of the reference GPU, as "about" says of each engine. For other GPUs the predictions are multiplied by the
factors of :mod:`pycuda_conv.engines.calibration`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from pycuda_conv.problem import ConvProblem

FOLDER = Path(__file__).resolve().parents[1] / "tuned" / "costs"
#: The file of the GPU to which the models were fitted.
REFERENCE = "nvidia_h200.json"


class Costs:
    """The constants of one engine, each an attribute."""

    def __init__(self, values: dict[str, Any]) -> None:
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"there is no cost {name} in {FOLDER / REFERENCE}")


#: Its multiprocessors.
MULTIPROCESSORS = 132


def spread(us: float, multiprocessors: int) -> float:
    """Microseconds of what the reference GPU's multiprocessors do together in `us`, on a GPU with so many."""
    return us * MULTIPROCESSORS / multiprocessors


def together(sharpness: float, *us: float) -> float:
    """Microseconds of what a launch does at the same time: the longest, and more the closer the others come to it.

    With two equally long ones it is 2 to the power of 1 / `sharpness` times as long.
    """
    longest = max(us)
    return longest * math.fsum((one / longest) ** sharpness for one in us) ** (1 / sharpness)


def bytes_moved(problem: ConvProblem) -> int:
    """Bytes of the images, of the result, and of a residual."""
    results = math.prod(problem.result_shape) * (2 if problem.has_residual else 1)
    return problem.itemsize * (math.prod(problem.input_shape) + results)


#: Those of the engines that asked, by name.
_made: dict[str, Costs] = {}


def costs(engine: str, **guesses: float) -> Costs:
    """The constants of an engine's model, by its module's name, as "mma.few_inputs".

    A new engine has `guesses` until some are fitted: what the file has counts before them. Without either there is a ``KeyError``.
    """
    if engine not in _made:
        known = _table().get(engine, {}) if guesses else _table()[engine]
        _made[engine] = Costs(guesses | {name: read_as(entry[0]) for name, entry in known.items() if name != "about"})
    return _made[engine]


@contextmanager
def replaced(values: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Inside the block these constants count, by engine and name. It is for fits: choices, and tables that are made of constants, stay."""
    before = {engine: {name: getattr(costs(engine), name) for name in some} for engine, some in values.items()}
    try:
        for engine, some in values.items():
            vars(costs(engine)).update(some)
        yield
    finally:
        for engine, some in before.items():
            vars(costs(engine)).update(some)


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads((FOLDER / REFERENCE).read_text(encoding="utf-8"))["engines"]
    return table


def read_as(value: Any) -> Any:
    """A value of JSON as models use it: lists are tuples, keys such as "64" and "64x128" numbers and tuples of numbers."""
    if isinstance(value, list):
        return tuple(map(read_as, value))
    if isinstance(value, dict):
        return {_key(name): read_as(one) for name, one in value.items()}
    return value


def _key(name: str) -> Any:
    if not re.fullmatch(r"\d+(x\d+)*", name):
        return name
    numbers = tuple(map(int, name.split("x")))
    return numbers if len(numbers) > 1 else numbers[0]
