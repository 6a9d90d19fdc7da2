"""What an engine takes, as a declaration: devices, problems and tiles. From it come the refusals, each with its sentence.

A limit is a pair, a sentence and a function that says whether it holds, or one function that gives a sentence or None. Limits are asked in
their order, so a later one may rely on what an earlier one says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import chain, product
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

from pycuda_conv.engines.addressing import MOST_PIXELS
from pycuda_conv.engines.base import Config
from pycuda_conv.engines.geometry import pixel_by_pixel
from pycuda_conv.engines.schedule import grid_refusal
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import Device

Limit = Any  # (sentence, function of a problem) or a function of a problem; of tiles, of a problem and a configuration


class Devices(NamedTuple):
    """The devices that kernels run on."""

    sentence: str  # what is said of others
    holds: Callable[[Device], bool]

    def why_not(self, device: Device) -> str | None:
        """Why the kernels can't run on `device`, or None if they can."""
        return None if self.holds(device) else self.sentence


def of_capability(*capabilities: tuple[int, int]) -> Devices:
    """GPUs of these compute capabilities."""
    *most, last = (f"{major}.{minor}" for major, minor in capabilities)
    shown = f"{', '.join(most)} or {last}" if most else last
    return Devices(f"it takes a GPU of compute capability {shown}", lambda device: device.capability in capabilities)


CUDA = Devices("it takes a GPU of CUDA", lambda device: device.backend == "cuda")
AMPERE = Devices("it takes a GPU of compute capability 8.0 or more", lambda device: device.capability >= (8, 0))
HOPPER = of_capability((9, 0))


# ---- problems


def types(*names: str) -> Limit:
    """Arrays of these types."""
    *most, last = names
    return f"it takes {', '.join(most) + ' and ' if most else ''}{last} arrays", lambda problem: problem.dtype in names


HALVES = types("float16", "bfloat16")
ONE_GROUP: Limit = "it takes arrays of one group", lambda problem: problem.groups == 1
NOT_EMPTY: Limit = "there is nothing to compute", lambda problem: not problem.is_empty
TWO_AXES: Limit = "it takes at most two spatial axes", lambda problem: not problem.has_depth
POINTWISE: Limit = "it takes 1x1 filters without stride and padding", pixel_by_pixel
UNIT_STEPS: Limit = "it takes filters without stride and dilation", lambda problem: max(problem.stride) == max(problem.dilation) == 1
IN_32_BITS: Limit = "it counts in 32 bits", lambda problem: problem.largest_array < 2**31
PIXELS_IN_32_BITS: Limit = "it counts pixels in 32 bits", lambda p: p.N * max(prod(p.result_size), prod(p.operand_size)) < MOST_PIXELS
ALL_IN_32_BITS: Limit = (
    "it counts elements and pixels in 32 bits", lambda p: p.largest_array < 2**31 and p.N * prod(p.result_size) < MOST_PIXELS
)  # fmt: skip


def _first(limits: tuple[Limit, ...], *asked: Any) -> str | None:
    """The sentence of the first limit that does not hold."""
    for limit in limits:
        if callable(limit):
            reason = limit(*asked)
            if reason:
                return str(reason)
        elif not limit[1](*asked):
            return str(limit[0])
    return None


class Takes:
    """The problems that an engine takes: all that keep to these limits."""

    def __init__(self, *limits: Limit) -> None:
        self._limits = limits
        self._last: tuple[ConvProblem | None, str | None] = None, None  # the planner asks once a configuration

    def why_not(self, problem: ConvProblem) -> str | None:
        """Why the engine can't run `problem` whatever the configuration, or None if it may."""
        last, reason = self._last
        if last is not problem:
            reason = _first(self._limits, problem)
            self._last = problem, reason
        return reason


# ---- tiles


class Tiles:
    """The configurations of a class that an engine takes, for the problems that it takes.

    Parameters
    ----------
    takes : Takes
    of : type
        The class of the configurations.
    *limits
        What a configuration has to keep to, besides: functions of a problem and a configuration.
    together : dict of tuple of str to collection of tuple
        The values of fields that go together, by the fields' names.
    shared : (callable, int)
        The bytes of a block's shared memory, and the most of them.
    blocks : callable
        The blocks of the largest launch.
    **values
        The values of other fields.
    """

    def __init__(
        self, takes: Takes, of: type[Config], *limits: Limit, together: dict[tuple[str, ...], Collection[tuple[int, ...]]] | None = None,
        shared: tuple[Callable[[ConvProblem, Any], int], int] | None = None, blocks: Callable[[ConvProblem, Any], int] | None = None,
        **values: Collection[Any],
    ) -> None:  # fmt: skip
        self.takes, self.of, self.shared, self.blocks = takes, of, shared, blocks
        #: The values of fields, one by one or together, in the order in which configurations are tried.
        self.values = (together or {}) | {(name,): [(value,) for value in some] for name, some in values.items()}
        self._known = [
            (names, attrgetter(*names), set(values) if len(names) > 1 else {value for (value,) in values})
            for names, values in self.values.items()
        ]
        self._limits = limits

    def refusal(self, problem: ConvProblem, config: Any) -> str | None:
        """Why the engine can't run `problem` with `config`, or None if it can."""
        reason = self.takes.why_not(problem)
        if reason:
            return reason
        for names, of, known in self._known:
            if of(config) not in known:
                values = self.values[names]
                shown = ", ".join(str(value if len(value) > 1 else value[0]) for value in values)
                return f"{names[0] if len(names) == 1 else '(' + ', '.join(names) + ')'} must be one of {shown}"
        reason = _first(self._limits, problem, config)
        if reason is None and self.shared:
            nbytes, most = self.shared[0](problem, config), self.shared[1]
            if nbytes > most:
                return f"it takes {nbytes:,} bytes of shared memory; a block has {most:,}"
        return reason or (grid_refusal(self.blocks(problem, config)) if self.blocks else None)

    def legal(self, problem: ConvProblem, **given: Collection[Any]) -> Iterator[Any]:
        """The configurations that can run `problem`, with those values of some fields; other fields have their defaults."""
        if self.takes.why_not(problem):
            return
        values = self.values | {(name,): [(value,) for value in some] for name, some in given.items()}
        names = [name for some in values for name in some]
        for chosen in product(*values.values()):
            config = self.of(**dict(zip(names, chain.from_iterable(chosen), strict=True)))
            if self.refusal(problem, config) is None:
                yield config
