"""What engines share that give a part of their work to another engine: its configuration as text, its launches on other buffers."""

from __future__ import annotations

import ast
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any

from pycuda_conv.engines import registry
from pycuda_conv.engines.base import Config
from pycuda_conv.engines.schedule import Buffer
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import BufferSlice, Device, KernelLaunch, TensorMap


def parsed(text: str) -> Config | None:
    """The configuration whose text this is, or None."""
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            return None
        values = {word.arg or "": ast.literal_eval(word.value) for word in call.keywords}
        return registry.config_from_table(call.func.id, values)
    except (SyntaxError, ValueError, KeyError):
        return None


def delegate_refusal(problem: ConvProblem, delegate: str) -> str | None:
    """Why the engine of `delegate` can't run its `problem`, or None if it can."""
    config = parsed(delegate)
    if config is None:
        return "it takes a configuration as it is printed"
    engine = registry.engine_of(config)
    if problem.layout not in engine.LAYOUTS:
        return f"{config} takes arrays in the layouts {', '.join(engine.LAYOUTS)}, not in {problem.layout}"
    return engine.refusal(problem, config)


def delegate_order(problem: ConvProblem, config: Any) -> Hashable:
    """The :func:`sum_order` of that engine, which tells its own configurations apart; `config` itself if it names no delegate."""
    delegate = parsed(config.DELEGATE)
    if delegate is None:
        return config
    engine = registry.engine_of(delegate)
    return engine.CONFIGS, engine.sum_order(problem, delegate)


def delegated(inner: Callable[[ConvProblem], ConvProblem], beside: Callable[[ConvProblem, Config, Device], float]) -> tuple[Any, Any, Any]:
    """What an engine says that gives the problem `inner` to another one: filter_key, sum_order and time.

    `beside` gives the microseconds that it takes beside the delegate's.
    """

    def filter_key(problem: ConvProblem, config: Any) -> Hashable:
        delegate = parsed(config.DELEGATE)
        return None if delegate is None else registry.filter_key(inner(problem), delegate)

    def sum_order(problem: ConvProblem, config: Any) -> Hashable:
        return delegate_order(inner(problem), config)

    def time(problem: ConvProblem, config: Any, device: Device) -> float | None:
        delegate = parsed(config.DELEGATE)
        us = None if delegate is None else registry.predicted(inner(problem), delegate, device)
        return None if us is None or delegate is None else us + beside(problem, delegate, device)

    return filter_key, sum_order, time


def worth_comparing(inner: ConvProblem, device: Device, best: int) -> list[str]:
    """As text: the choice for a problem that is left to another engine, the `best` predictions, and what gives the choice's bits."""
    chosen = registry.find(inner, device)
    if chosen is None:
        return []
    others = [config for _, config in registry.predictions(inner, device)[:best]]
    return [str(config) for config in dict.fromkeys([chosen, *others, *registry.alternatives(inner, chosen, device)])]


def moved(steps: list[list[KernelLaunch]], places: Mapping[Buffer, tuple[int, int]]) -> list[list[KernelLaunch]]:
    """The launches with some buffers moved to other places."""

    def place(buffer: int, offset: int) -> tuple[int, int]:
        to, start = places.get(Buffer(buffer), (buffer, 0))
        return to, start + offset

    def of_buffer(one: BufferSlice) -> BufferSlice:
        at, offset = place(*one) if isinstance(one, tuple) else place(one, 0)
        return (at, offset) if offset else at

    def of_map(one: TensorMap) -> TensorMap:
        buffer, offset = place(one.buffer, one.offset)
        return replace(one, buffer=buffer, offset=offset)

    def of_launch(launch: KernelLaunch) -> KernelLaunch:
        return replace(launch, buffers=tuple(map(of_buffer, launch.buffers)), maps=tuple(map(of_map, launch.maps)))

    return [[of_launch(launch) for launch in step] for step in steps]
