"""Cases for every engine of a device, of its own kinds of problems: found through the registry, so that a new engine has some too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pycuda_conv import engines
from pycuda_conv.engines import registry
from pycuda_conv.engines.base import Engine
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import Device
from pycuda_conv.tools.distributions import DISTRIBUTIONS

#: The most cases of an engine, each of another arithmetic or pass, on a GPU and on a host.
MOST_ON_GPU, MOST_ON_HOST = 6, 3
#: Kinds of numbers that need no more than an error of the norm.
ORDINARY = ("normal", "positive")
#: Types with the precision that is asked for.
ARITHMETICS = (("float32", "fp32"), ("float32", "tf32"), ("float16", "fp32"), ("bfloat16", "fp32"), ("float64", "fp32"))


@dataclass(frozen=True)
class EngineCase:
    """A problem with a configuration of an engine, and a kind of numbers. `chosen` says whether the planner would choose the engine."""

    engine: str
    problem: ConvProblem
    config: engines.Config
    distribution: str
    chosen: bool

    @property
    def arithmetic(self) -> str:
        """The type of the arrays, or for float32 the precision: ``"fp32"`` or ``"tf32"``."""
        return self.problem.precision if self.problem.dtype == "float32" else self.problem.dtype

    @property
    def name(self) -> str:
        """The case in a word or two."""
        problem = self.problem
        last = " last" if problem.layout == "NHWC" else ""
        asked = f" {problem.algorithm}" if problem.algorithm else ""
        return f"{self.engine}{asked} {self.arithmetic}{last} {problem.direction}, {self.distribution}"


def _shapes() -> Iterator[ConvProblem]:
    """Small problems of each kind that an engine may be for."""
    forward, transposed, gradient = ConvProblem.forward, ConvProblem.transposed, ConvProblem.gradient
    layers = [
        # images, C, size, K, groups, taps, stride, padding: dense, 1x1, few channels in and out, depthwise, grouped, few pixels, large
        (4, 64, 28, 64, 1, 3, 1, 1), (8, 256, 14, 128, 1, 1, 1, 0), (2, 3, 96, 32, 1, 7, 2, 3), (2, 64, 24, 3, 1, 3, 1, 1),
        (4, 64, 28, 64, 64, 3, 1, 1), (2, 32, 20, 32, 32, 7, 1, 3), (4, 64, 28, 64, 8, 3, 1, 1), (1, 256, 7, 128, 1, 3, 1, 1),
        (2, 64, 28, 128, 1, 3, 2, 1), (1, 8, 256, 8, 1, 3, 1, 1), (1, 2, 96, 2, 2, 15, 1, 7), (4, 128, 12, 256, 1, 1, 2, 0),
        (1, 1, 160, 1, 1, 31, 1, 15), (2, 40, 17, 24, 1, 3, 1, 1), (4, 128, 16, 64, 1, 1, 1, 0),
        (3, 6, 11, 6, 6, 1, 1, 0), (2, 16, 13, 16, 16, 5, 2, 2), (2, 12, 15, 24, 3, 5, 1, 2), (1, 3, 40, 8, 1, 11, 4, 2),
    ]  # fmt: skip
    for n, c, size, k, groups, taps, stride, padding in layers:
        x, w = (n, c, size, size), (k, c // groups, taps, taps)
        options: Any = {"stride": stride, "padding": padding, "groups": groups}
        made = forward(2, x, w, **options)
        yield made
        yield gradient("input", 2, x, w, made.result_shape, **options)
        yield gradient("weight", 2, x, w, made.result_shape, **options)
    for n, c, size, k, groups in ((4, 64, 28, 64, 1), (4, 64, 28, 64, 64)):
        x, w = (n, c, size, size), (k, c // groups, 3, 3)
        options = {"padding": 1, "groups": groups, "padding_mode": "reflect"}
        made = forward(2, x, w, **options)
        yield made
        yield gradient("input", 2, x, w, made.result_shape, **options)
        yield gradient("weight", 2, x, w, made.result_shape, **options)
    yield transposed(2, (2, 64, 14, 14), (64, 32, 4, 4), stride=2, padding=1)
    yield forward(1, (4, 16, 3000), (24, 16, 5), padding=2)
    yield forward(1, (2, 1, 12000), (1, 1, 501), padding=250)
    yield forward(3, (1, 8, 12, 14, 16), (8, 8, 3, 3, 3), padding=1)


def engine_cases(device: Device) -> list[EngineCase]:
    """The cases, engine after engine.

    One of each engine, and on a GPU one of each of its arithmetics, is tried with every kind of numbers, the others with normal ones.
    """
    pool = [
        replace(shape, dtype=dtype, precision=precision, layout=layout)
        for dtype, precision in ARITHMETICS for layout in ("NCHW", "NHWC") for shape in _shapes()
    ]
    found: list[EngineCase] = []
    for number, engine in enumerate(one for one in registry.ENGINES if one.unsupported(device) is None):
        found += _of_engine(engine, pool, device, number)
    return found


def _of_engine(engine: Engine, pool: list[ConvProblem], device: Device, number: int) -> Iterator[EngineCase]:
    possible: list[tuple[bool, ConvProblem, engines.Config]] = []
    for problem in [*pool, *(replace(one, algorithm="fft") for one in pool if engine in registry.TRANSFORMS)]:
        launched = problem.launched
        if launched.layout not in engine.LAYOUTS or (device.backend != "cuda" and problem.precision == "tf32"):
            continue
        choice = engine.choose(launched, device)
        configs = [*([choice[1]] if choice else []), *engine.configs(launched, device)]
        for config in {type(one): one for one in reversed(configs) if registry.refusal(problem, one, device) is None}.values():
            possible.append((engines.find(problem, device) == config, problem, config))
    possible.sort(key=lambda one: not one[0])  # what the planner chooses comes first
    if device.backend != "cuda":  # float32 and one other type, which differs from engine to engine: a host compiles few kernels in a minute
        others = [dtype for dtype in ("float64", "bfloat16", "float16") if any(problem.dtype == dtype for _, problem, _ in possible)]
        kept = "float32", *others[number % max(len(others), 1) :][:1]
        possible = [one for one in possible if one[1].dtype in kept]
    name = getattr(engine, "__name__", type(engine).__name__).rpartition(".")[2]
    most = (MOST_ON_GPU if device.backend == "cuda" else MOST_ON_HOST) + len(engine.CONFIGS) - 1
    met: set[tuple[str, ...]] = set()
    taken: dict[tuple[ConvProblem, engines.Config], bool] = {}
    for size in (2, 4, 6):  # first each class of configurations and algorithm, then each arithmetic, then each pass and layout
        for chosen, problem, config in possible:
            what = type(config).__name__, str(problem.algorithm), problem.dtype, problem.precision, problem.direction, problem.layout
            if what[:size] not in met and len(taken) < most:
                met |= {what[:2], what[:4], what}
                taken[problem, config] = chosen
    tried: set[tuple[str, str]] = set()
    for (problem, config), chosen in taken.items():
        arithmetic = (problem.dtype, problem.precision) if device.backend == "cuda" else ("", "")
        first = problem.algorithm is None and arithmetic not in tried
        if first:
            tried.add(arithmetic)
        # transforms that were asked for are right by norms alone
        for distribution in ORDINARY if problem.algorithm else DISTRIBUTIONS if first else ORDINARY[:1]:
            yield EngineCase(name, problem, config, distribution, chosen)
