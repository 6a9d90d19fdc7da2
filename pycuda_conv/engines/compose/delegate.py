"""What engines share that give a part of their work to another engine: its configuration as text, its launches on other buffers."""

from __future__ import annotations

import ast
from collections.abc import Hashable, Mapping
from dataclasses import replace

from pycuda_conv.engines import registry
from pycuda_conv.engines.base import Config
from pycuda_conv.engines.schedule import Buffer
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import BufferSlice, KernelLaunch, TensorMap


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


def delegate_filter_key(problem: ConvProblem, delegate: str) -> Hashable:
    """The :func:`filter_key` of the engine of `delegate` for its `problem`; None if `delegate` is no configuration."""
    config = parsed(delegate)
    return None if config is None else registry.filter_key(problem, config)


def delegate_sum_order(problem: ConvProblem, delegate: str) -> Hashable:
    """The :func:`sum_order` of that engine, which tells its own configurations apart."""
    config = parsed(delegate)
    if config is None:
        return None
    engine = registry.engine_of(config)
    return engine.CONFIGS, engine.sum_order(problem, config)


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
