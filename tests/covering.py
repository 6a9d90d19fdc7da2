"""Small launches that use every kernel: problems and configurations that the engines' registry yields, chosen so that little is launched
twice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import chain, product
from pathlib import Path
from typing import Any

from pycuda_conv import ConvProblem, borders, engines, tune
from pycuda_conv.elements import INTEGER_BYTES
from pycuda_conv.engines import registry
from pycuda_conv.engines.base import Config
from pycuda_conv.engines.schedule import Schedule
from pycuda_conv.runtime.base import KernelLaunch

TABLES = Path(tune.__file__).with_name("tuned")  # of measured choices: those that are shipped
#: A problem, a configuration, and whether the moments of the result are noted.
Case = tuple[ConvProblem, Config, bool]
#: (C, K, groups): of few channels, dense, depthwise, and groups of several channels.
CHANNELS = (
    ((1, 16, 1), (3, 20, 1), (3, 64, 1), (4, 70, 1), (16, 1, 1), (20, 3, 1), (64, 2, 1)),
    ((8, 40, 1), (24, 40, 1), (33, 24, 1), (64, 136, 1), (72, 33, 1), (136, 64, 1), (200, 320, 1), (192, 192, 1), (96, 256, 1), (256, 384, 1)),
    ((6, 6, 6), (40, 40, 40), (40, 80, 40), (8, 16, 8)), ((32, 32, 8), (64, 64, 8), (48, 48, 3), (96, 96, 2), (128, 128, 2), (12, 20, 4)),
)  # fmt: skip
KINDS = (("float32", "fp32"), ("float32", "tf32"), ("float16", "fp32"), ("bfloat16", "fp32"), ("float64", "fp32"))
#: (images, size, taps, stride, padding, dilation)
SHAPES = (
    (2, (9, 8), 3, 1, 1, 1), (1, (13, 17), 3, 2, 1, 1), (3, (8, 16), 1, 1, 0, 1), (40, (3, 3), 3, 1, 1, 1), (1, (12, 40), (5, 3), (1, 2), (2, 0), 1), (2, (24, 32), 3, 1, 1, 1),
    (2, (7, 7), 1, 2, 0, 1), (1, (20, 24), 7, 2, 3, 1), (1, (16, 64), 7, 1, 3, 1), (2, (10, 12), 3, 1, 2, 2), (1, (16, 16), 4, 4, 0, 1), (1, (10, 14), 2, 2, 0, 1), (2, (14, 14), 3, (1, 2), 1, (2, 1)),
    (1, (12, 13), 5, 1, 2, 1), (2, (9, 16), 5, 2, 2, 1), (1, (28, 56), 3, 1, 1, 1), (4, (16, 16), 1, 1, 0, 1), (1, (16, 32), 16, 16, 0, 1), (1, (14, 28), 14, 14, 0, 1), (1, (16, 24), 8, 8, 0, 1),
    (1, (9, 32), (2, 4), (1, 2), 1, 1), (1, (9, 32), (2, 8), (1, 2), 1, 1), (1, (9, 40), (1, 14), (1, 2), 1, 1), (1, (9, 64), (2, 16), (1, 8), 1, 1),
    (1, (22, 33), 11, (4, 1), 2, 1), (1, (400,), 10, 5, 0, 1), (1, (300,), 9, 1, 4, 1), (2, (50,), 3, 2, 1, 1), (4, (64,), 1, 1, 0, 1), (1, (5, 6, 8), 3, 1, 1, 1), (2, (4, 8, 8), (1, 3, 3), 1, (0, 1, 1), 1), (1, (90, 70), 31, 1, 15, 1), (1, (5000,), 150, 1, 75, 1),
)  # fmt: skip
EPILOGUES: tuple[dict[str, Any], ...] = (
    {}, {}, {"has_bias": True}, {"has_bias": True, "activation": "relu"},
    {"has_bias": True, "has_scale": True, "has_residual": True, "activation": "silu"}
)


def problems(count: int) -> Iterator[ConvProblem]:
    """Small problems, at most so many: every kind with every shape and every family of channels in turn, everything else by chance."""
    r = random.Random(1)
    kinds = [(direction, *kind, layout) for direction in (
        "fprop", "input", "weight", "transposed"
    ) for kind in KINDS for layout in ("NCHW", "NHWC")]
    for number in range(count):
        turn, kind = divmod(number, len(kinds))
        direction, dtype, precision, layout = kinds[kind]
        (c, k, groups), (n, size, taps, stride, padding, dilation) = r.choice(CHANNELS[turn % len(CHANNELS)]), SHAPES[turn % len(SHAPES)]
        ndim = len(size)
        if direction in ("input", "transposed") and stride in (8, 14, 16):
            continue  # a launch for each of hundreds of phases
        options: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        options |= {"dtype": dtype, "precision": precision, "layout": layout}
        x, w = (n, c, *size), (k, c // groups, *(taps if isinstance(taps, tuple) else (taps,) * ndim))
        try:
            forward = ConvProblem.forward(ndim, x, w, **options)
            if direction == "fprop":
                problem = replace(forward, **r.choice(EPILOGUES))
            elif direction == "transposed":
                problem = replace(ConvProblem.transposed(ndim, (n, k, *size), w, **options), **r.choice(EPILOGUES))
            else:
                problem = ConvProblem.gradient(direction, ndim, x, w, forward.result_shape, **options)
        except ValueError:
            continue
        yield problem


def adapted_problems() -> Iterator[ConvProblem]:
    """Small problems with borders of the image's own pixels, and of integers: every type and layout, forward and both gradients."""
    r = random.Random(2)
    for (dtype, precision), layout, direction, ndim in product(KINDS, ("NCHW", "NHWC"), ("fprop", "input", "weight"), (1, 2, 3)):
        c, k, groups = r.choice(((3, 8, 1), (8, 8, 8), (8, 16, 1)))
        n, taps = r.choice((5, 9, 14)), r.choice((3, 5))
        pads = tuple((r.randrange(12), r.randrange(4)) for _ in range(ndim))
        options: dict[str, Any] = {"padding": pads, "groups": groups, "dtype": dtype, "precision": precision, "layout": layout}
        options |= {"padding_mode": tuple((r.choice(borders.MODES), r.choice(borders.MODES)) for _ in range(ndim))}
        if r.random() < 0.5:  # alike at both sides: kernels read such borders themselves
            options |= {"padding": taps // 2, "padding_mode": r.choice(borders.MODES)}
        if dtype in ("float32", "float64"):
            options |= {"input_dtype": r.choice(("", *INTEGER_BYTES)), "result_dtype": r.choice(("", *INTEGER_BYTES))}
        x, w = (2, c, *(n,) * ndim), (k, c // groups, *(taps,) * ndim)
        forward = ConvProblem.forward(ndim, x, w, **options)
        yield forward if direction == "fprop" else ConvProblem.gradient(direction, ndim, x, w, forward.result_shape, **options)


def bordered_layers() -> Iterator[ConvProblem]:
    """Small layers whose border goes on no further than to the image's other end: dense and depthwise, results as large as images."""
    r = random.Random(3)
    families = product(KINDS, ("NCHW", "NHWC"), ("fprop", "input", "weight"), ((64, 72, 1), (40, 40, 40), (16, 16, 16)), (3, 5, 7))
    for (dtype, precision), layout, direction, (c, k, groups), taps in families:
        options: dict[str, Any] = {"groups": groups, "dtype": dtype, "precision": precision, "layout": layout}
        options |= {"padding": taps // 2, "padding_mode": r.choice(("reflect", "replicate", "circular", "symmetric"))}
        x, w = (2, c, 12, 16), (k, c // groups, taps, taps)
        forward = ConvProblem.forward(2, x, w, **options)
        yield forward if direction == "fprop" else ConvProblem.gradient(direction, 2, x, w, forward.result_shape, **options)


def by_hand() -> Iterator[tuple[ConvProblem, Config]]:
    """What hardly any small problem comes to by itself: borders in planes on tensor cores, regions of five taps, rims of many planes."""
    border = {"padding": 2, "padding_mode": "reflect"}
    for dtype in ("float16", "bfloat16"):
        planes = ConvProblem.forward(2, (2, 40, 12, 16), (40, 1, 5, 5), groups=40, dtype=dtype, **border)
        yield planes, engines.Bordered(str(engines.DepthwiseToeplitz(24)))
        dense = ConvProblem.forward(2, (2, 64, 12, 13), (72, 64, 5, 5), dtype=dtype, layout="NHWC", **border)
        yield dense, engines.Bordered(str(engines.DenseNhwc(64, 64, 2)))
    many = ConvProblem.forward(2, (64, 2100, 3, 3), (2100, 1, 3, 3), groups=2100, padding=1, padding_mode="reflect")
    yield many, engines.Rims(str(engines.Tile(8, 16, 2)))
    odd = ConvProblem.forward(2, (2, 18, 9, 8), (20, 18, 3, 3), padding=1, padding_mode="reflect", dtype="float16")
    yield odd, engines.Rims(str(engines.ImplicitGemm80(64, 128, 4)))


def launches(schedule: Schedule) -> list[KernelLaunch]:
    """All that a schedule may launch."""
    return [launch for part in (
        schedule.prepare, schedule.steps, schedule.whole, schedule.filter_last or ()
    ) for step in part for launch in step]


def features(config: Config, schedule: Schedule) -> set[tuple]:
    """What a case shows of kernels: each value of each define with the type of the arrays, and arguments that are negative, 0, 1 and
    larger."""
    found: set[tuple] = {(config.__class__.__name__,)}
    for launch in launches(schedule):
        file = launch.file or launch.kernel
        dtype = next((launch.defines[name] for name in ("TYPE", "DTYPE", "OUT", "IN") if name in launch.defines), 0)
        found |= {(file, launch.kernel), *((file, dtype, *define) for define in launch.defines.items())}
        for struct in launch.structs:
            found |= {
                (file, type(struct).__name__, name, min(max(value, -1), 2)) for name, value in zip(struct._fields, struct, strict=True)
            }
    return found


def _words(config: Config) -> str:
    """A configuration without its numbers."""
    return " ".join([type(config).__name__, *(str(value) for value in vars(config).values() if type(value) is not int)])


def pool(device: Any, count: int, each: int) -> Iterator[tuple[Case, set[tuple]]]:
    """So many problems by some configurations of each engine, with their features. Configurations that came seldom before come first.

    They are those worth comparing, and those that were measured to be the fastest for some problem.
    """
    measured = [choice.config for path in sorted(TABLES.glob("*.json")) for choice in tune.Table(path).read().values()]
    r, came = random.Random(1), Counter[tuple[str, str]]()
    for problem in chain(problems(count), adapted_problems(), bordered_layers()):
        launched = problem.launched
        for engine in registry.ENGINES:
            if launched.layout not in engine.LAYOUTS or engine.unsupported(device):
                continue
            if launched.adapted and not registry.adapts(engine, launched):
                continue
            known = dict.fromkeys([*engine.configs(launched, device), *(config for config in measured if type(config) in engine.CONFIGS)])
            configs = [config for config in known if engine.refusal(launched, config) is None]
            r.shuffle(configs)
            keys = {config: ((_words(config), problem.dtype), (str(config), problem.dtype)) for config in configs}
            for config in sorted(configs, key=lambda one: [came[key] for key in keys[one]])[:each]:
                came.update(keys[config])
                with_moments = r.random() < 0.4
                yield (problem, config, with_moments), features(config, engines.schedule(problem, config, device, with_moments))


    for problem, config in by_hand():
        if engines.refusal(problem, config, device) is None:
            yield (problem, config, False), features(config, engines.schedule(problem, config, device))


def cases(device: Any, count: int = 5280, each: int = 1) -> list[Case]:
    """Cases of the pool that have all of its features between them, those with the most new ones first."""
    known = list(pool(device, count, each))
    waiting = [(-len(shown), i) for i, (_, shown) in enumerate(known)]
    heapify(waiting)
    found: list[Case] = []
    met: set[tuple] = set()
    while waiting:
        expected, i = heappop(waiting)
        case, shown = known[i]
        new = len(shown - met)
        if -expected > new > 0:  # others have taken some of them: one with more may wait
            heappush(waiting, (-new, i))
        elif new:
            found.append(case)
            met |= shown
    return found


def missing(device: Any, chosen: Iterable[Case]) -> list[str]:
    """Values of defines that the registry's texts have and no case has."""
    shown = (
        launch for problem, config, with_moments in chosen for launch in launches(engines.schedule(problem, config, device, with_moments))
    )
    met = {(launch.file or launch.kernel, *define) for launch in shown for define in launch.defines.items()}
    wanted = {
        (family.file, name, value) for family in registry.variants(device) for name, values in family.choices.items() for value in values
    }
    return [f"{file} {name}={value}" for file, name, value in sorted(wanted - met)]
