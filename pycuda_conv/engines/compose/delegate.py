"""What engines share that give a part of their work to another engine: its configuration as text, its launches on other buffers."""

from __future__ import annotations

import ast
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pycuda_conv.engines import registry
from pycuda_conv.engines.base import LAST_RESORT, Config, ConvProblem, Engine, fastest
from pycuda_conv.engines.schedule import Buffer, Schedule, placed
from pycuda_conv.runtime.base import BufferSlice, Device, KernelLaunch, TensorMap


def parsed(text: str) -> Config | None:
    """The configuration whose text this is, or None."""
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            return None
        values = {word.arg or "": ast.literal_eval(word.value) for word in call.keywords}
        return registry.config_from_table(call.func.id, values)
    except (SyntaxError, ValueError):
        return None


@dataclass(frozen=True)
class Delegating(Config):
    """Another engine's configuration, as text."""

    DELEGATE: str = "Gemm()"


def delegate_of(config: Any) -> Config:
    """The configuration that `config` names, which is one."""
    found = parsed(config.DELEGATE)
    assert found is not None
    return found


class Around:
    """What an engine says that gives a problem to another one: the protocol's functions, where its module doesn't say them itself.

    Parameters
    ----------
    inner : callable
        The other engine's problem, as it is launched.
    beside : callable
        Microseconds that a problem takes beside the delegate's.
    kind : callable
        The class of a problem's configurations.
    worth : callable
        Whether a problem is worth it.
    """

    BEST = 3  # predictions of the other engines that are worth comparing

    def __init__(
        self, inner: Callable[[ConvProblem], ConvProblem], beside: Callable[[ConvProblem, Config, Device], float],
        kind: Callable[[ConvProblem], type[Delegating]], worth: Callable[[ConvProblem], bool],
    ) -> None:  # fmt: skip
        self.inner, self.beside, self.kind, self.worth = inner, beside, kind, worth

    def fits(self, problem: ConvProblem, config: Any) -> str | None:
        """Why the delegate's engine can't run its problem, or None if it can."""
        delegate, inner = parsed(config.DELEGATE), self.inner(problem)
        if delegate is None:
            return "it takes a configuration as it is printed"
        engine = registry.engine_of(delegate)
        return registry.unfit(engine, inner) or engine.refusal(inner, delegate)

    def filter_key(self, problem: ConvProblem, config: Any) -> Hashable:
        """That of the delegate."""
        delegate = parsed(config.DELEGATE)
        return None if delegate is None else registry.filter_key(self.inner(problem), delegate)

    def sum_order(self, problem: ConvProblem, config: Any) -> Hashable:
        """That of the delegate's engine, which tells its own configurations apart; `config` itself if it names no delegate."""
        delegate = parsed(config.DELEGATE)
        if delegate is None:
            return config
        engine = registry.engine_of(delegate)
        return engine.CONFIGS, engine.sum_order(self.inner(problem), delegate)

    def time(self, problem: ConvProblem, config: Any, device: Device) -> float | None:
        """The delegate's microseconds, and those beside them."""
        delegate = parsed(config.DELEGATE)
        us = None if delegate is None else registry.predicted(self.inner(problem), delegate, device)
        return None if us is None or delegate is None else us + self.beside(problem, delegate, device)

    def configs(self, problem: ConvProblem, device: Device) -> Iterator[Delegating]:
        """Those around the choice for the inner problem, its best predictions, and what gives the choice's bits."""
        inner = self.inner(problem) if self.worth(problem) else None
        chosen = None if inner is None else registry.find(inner, device)
        if inner is not None and chosen is not None:
            others = [config for _, config in registry.predictions(inner, device)[: self.BEST]]
            known = dict.fromkeys([chosen, *others, *registry.alternatives(inner, chosen, device)])
            yield from (self.kind(problem)(str(one)) for one in known)

    def choose(self, problem: ConvProblem, device: Device) -> tuple[float, Delegating] | None:
        """The one around the choice for the inner problem."""
        delegate = registry.find(self.inner(problem), device) if self.worth(problem) else None
        if delegate is None:
            return None
        us = self.time(problem, self.kind(problem)(str(delegate)), device)
        return LAST_RESORT if us is None else us, self.kind(problem)(str(delegate))


class AroundOthers(Around):
    """The same around engines that can't run the problem themselves: those of the inner one's that `alone` picks."""

    def __init__(self, *given: Any, alone: Callable[[Engine, ConvProblem, Device], bool]) -> None:
        super().__init__(*given)
        self.alone = alone

    def _engines(self, problem: ConvProblem, device: Device) -> Iterator[Engine]:
        layout = self.inner(problem).layout
        for engine in registry.ENGINES if self.worth(problem) else ():
            if layout in engine.LAYOUTS and engine.unsupported(device) is None and self.alone(engine, problem, device):
                yield engine

    def configs(self, problem: ConvProblem, device: Device) -> Iterator[Delegating]:
        """All of theirs."""
        for engine in self._engines(problem, device):
            inner = self.inner(problem)
            yield from (self.kind(problem)(str(one)) for one in engine.configs(inner, device) if engine.refusal(inner, one) is None)

    def choose(self, problem: ConvProblem, device: Device) -> tuple[float, Delegating] | None:
        """The one of their choices that takes the least time."""
        found = []
        for engine in self._engines(problem, device):
            one = engine.choose(self.inner(problem), device)
            us = None if one is None else engine.time(self.inner(problem), one[1], device)
            if one is not None and us is not None:
                found.append((us + self.beside(problem, one[1], device), self.kind(problem)(str(one[1]))))
        return fastest(found)


def wrapped(
    made: Schedule, places: Mapping[Buffer, tuple[int, int]], used: int, first: Sequence[KernelLaunch] = (),
    last: Sequence[KernelLaunch] = (),
) -> Schedule:
    """The launches of `made` with some buffers at other `places`, behind the `first` and before the `last` ones, one after the other.

    All together have `used` bytes of workspace.
    """

    def around(steps: list[list[KernelLaunch]]) -> list[list[KernelLaunch]]:
        return [*([one] for one in first), *moved(steps, places), *([one] for one in last)]

    return replace(
        made, prepare=moved(made.prepare, places), steps=around(made.steps), whole=around(made.whole), workspace_bytes=used, moments=None,
        filter_last=made.filter_last and around(made.filter_last),
    )  # fmt: skip


def moved(steps: list[list[KernelLaunch]], places: Mapping[Buffer, tuple[int, int]]) -> list[list[KernelLaunch]]:
    """The launches with some buffers moved to other places."""

    def place(buffer: int, offset: int) -> tuple[int, int]:
        to, start = places.get(Buffer(buffer), (buffer, 0))
        return to, start + offset

    def of_buffer(one: BufferSlice) -> BufferSlice:
        at, offset = place(*placed(one))
        return (at, offset) if offset else at

    def of_map(one: TensorMap) -> TensorMap:
        buffer, offset = place(one.buffer, one.offset)
        return replace(one, buffer=buffer, offset=offset)

    def of_launch(launch: KernelLaunch) -> KernelLaunch:
        return replace(launch, buffers=tuple(map(of_buffer, launch.buffers)), maps=tuple(map(of_map, launch.maps)))

    return [[of_launch(launch) for launch in step] for step in steps]
