"""Images with borders of their own pixels, images and results of integers: ``cu/layout/bordered.cu`` around another engine.

The image is copied with its border, in the arithmetic's type, and another engine convolves the copy. An engine that packs images writes the
border while it does so: then nothing is copied. The gradient by the input is that of the wider image, whose border is then added to the
pixels that it shows; or that of an image among zeros, to whose rims a launch adds what the border shows of them. A result of integers is
rounded behind the other engine.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from pycuda_conv.engines import registry
from pycuda_conv.engines.base import LAST_RESORT, Config
from pycuda_conv.engines.compose.delegate import delegate_order, delegate_refusal, moved, parsed, worth_comparing
from pycuda_conv.engines.costs import costs, spread
from pycuda_conv.engines.layout import border_copy, rims
from pycuda_conv.engines.schedule import INPUT, RESULT, WORKSPACE, Arena, Buffer, Schedule
from pycuda_conv.engines.variants import VariantSet
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import Device, KernelLaunch


@dataclass(frozen=True)
class Bordered(Config):
    """The configuration for the image with its border, or with `RIMS` for the one among zeros, as text."""

    DELEGATE: str = "Gemm()"
    RIMS: bool = False

    FORMER: ClassVar[Mapping[str, str]] = {"INNER": "DELEGATE"}


CONFIGS = (Bordered,)
LAYOUTS = "NCHW", "NHWC", "CNHW", "CHWN"
TENSOR_CORES = True
MOST_VARIANTS = {"cuda": 46, "opencl": 26}


# ---- what runs


def adapts(problem: ConvProblem) -> bool:
    """True: it takes all problems that are :attr:`ConvProblem.adapted`, and no others."""
    return True


def _padded(problem: ConvProblem, config: Bordered | None = None) -> ConvProblem:
    """The problem of the other engine as it is launched: on the wider image, or on the one among zeros."""
    if config is not None and config.RIMS:
        return replace(problem, border=None, border_value=0.0).launched
    return problem.padded.launched


def refusal(problem: ConvProblem, config: Bordered) -> str | None:
    """Why `config` can't run `problem`, or None if it can."""
    if not problem.adapted or problem.upsampled:
        return "it is for images with borders, and for integers"
    return (config.RIMS and rims.refusal(problem)) or delegate_refusal(_padded(problem, config), config.DELEGATE)


def alike(problem: ConvProblem, config: Config) -> Config:
    """The configuration with the sums of `config`, which is for another problem, one with a border or without."""
    if isinstance(config, Bordered):
        return config if problem.adapted else parsed(config.DELEGATE) or config
    takes = registry.adapts(registry.engine_of(config), problem.launched)
    if takes or not problem.adapted:
        return config
    found = Bordered(str(config))
    return replace(found, RIMS=rims.refusal(problem.launched) is None and copies(problem.launched, found))


# ---- launches


def _folds(problem: ConvProblem, delegate: Config | None) -> bool:
    """Whether the result of the other engine has to be folded."""
    if problem.direction != "dgrad" or problem.border is None:
        return False
    return delegate is None or not registry.adds_border(problem, delegate)


def copies(problem: ConvProblem, config: Bordered) -> bool:
    """Whether the image, or a gradient by it, is copied by a launch of its own."""
    delegate = parsed(config.DELEGATE)
    return not config.RIMS and (_copies(problem, delegate) or _folds(problem, delegate))


def _copies(problem: ConvProblem, delegate: Config | None) -> bool:
    """Whether the image has to be copied before the inner engine reads it."""
    if delegate is not None and registry.adds_border(problem, delegate):
        return False
    return bool(problem.input_dtype) or (problem.border is not None and problem.direction != "dgrad")


def schedule(problem: ConvProblem, config: Bordered, device: Device, with_moments: bool = False) -> Schedule:
    """The launches of `config`, which can run `problem`; they note no moments."""
    delegate, padded = parsed(config.DELEGATE), _padded(problem, config)
    assert delegate is not None
    if config.RIMS:
        return _with_rims(problem, device, registry.schedule(padded, delegate, device))
    scratch = Arena(WORKSPACE)
    reads = registry.adds_border(problem, delegate)
    made = registry.schedule_with_border(problem, delegate, device) if reads else registry.schedule(padded, delegate, device)
    places: dict[Buffer, tuple[int, int]] = {}
    first, last = [], []
    if _copies(problem, delegate):
        places[INPUT] = scratch.take(problem.itemsize * math.prod(padded.input_shape))
        first.append(border_copy.copy(problem, places[INPUT], device))
    exact: tuple[int, int] = RESULT, 0
    if problem.result_dtype:
        exact = scratch.take(problem.itemsize * math.prod(problem.result_shape))
    if _folds(problem, delegate):
        places[RESULT] = scratch.take(problem.itemsize * math.prod(padded.result_shape))
        last += border_copy.fold(problem, places[RESULT], exact, device)
    elif problem.result_dtype:
        places[RESULT] = exact
    if problem.result_dtype:
        last.append(border_copy.round_to(problem, exact))
    places[WORKSPACE] = scratch.take(made.workspace_bytes)

    def around(steps: list[list[KernelLaunch]]) -> list[list[KernelLaunch]]:
        return [*([launch] for launch in first), *moved(steps, places), *([launch] for launch in last)]

    redoes, last_form = made.redoes and RESULT not in places, made.filter_last and around(made.filter_last)
    steps, whole = around(made.steps), around(made.whole)
    return Schedule(moved(made.prepare, places), steps, whole, scratch.used, made.filter_bytes, redoes, filter_last=last_form)


def _with_rims(problem: ConvProblem, device: Device, made: Schedule) -> Schedule:
    """The launches of an image among zeros, and behind them the one that adds to its rims."""

    def followed(steps: list[list[KernelLaunch]], filter_last: bool = False) -> list[list[KernelLaunch]]:
        return [*steps, [rims.launch(problem, device, filter_last)]]

    last = made.filter_last and followed(made.filter_last, True)
    redoes = made.redoes or problem.direction == "fprop"
    return replace(made, steps=followed(made.steps), whole=followed(made.whole), redoes=redoes, filter_last=last, moments=None)


def sum_order(problem: ConvProblem, config: Bordered) -> Hashable:
    """That of the delegate's engine, for its configurations."""
    delegate = parsed(config.DELEGATE)
    if delegate is None:
        return config
    # a kernel that reads the border may cut a row elsewhere
    reads = not config.RIMS and registry.adds_border(problem, delegate)
    return delegate_order(_padded(problem, config), config), reads, config.RIMS


def variants(device: Device) -> Iterator[VariantSet]:
    """A text for each type."""
    yield from border_copy.variants(device)
    yield from rims.variants(device)


# ---- the choice

COST = costs("compose.bordered")
BEST = 3  # predictions of the other engines that are worth comparing
SEVERAL = 24  # predictions among which there may be one that needs no copy


def filter_key(problem: ConvProblem, config: Bordered) -> Hashable:
    """That of the delegate."""
    delegate = parsed(config.DELEGATE)
    return None if delegate is None else registry.filter_key(_padded(problem, config), delegate)


def time(problem: ConvProblem, config: Bordered, device: Device) -> float | None:
    """Microseconds: the delegate's, and those of the launches around it."""
    delegate = parsed(config.DELEGATE)
    us = None if delegate is None else registry.predicted(_padded(problem, config), delegate, device)
    if us is None or delegate is None:
        return None
    return us + (_rims_us(problem, device) if config.RIMS else _overhead_us(problem, delegate, device))


def _rims_us(problem: ConvProblem, device: Device) -> float:
    """Microseconds of the launch that adds to the rims."""
    return COST.BEGIN + spread(rims.work(problem) / COST.RIMS, device.multiprocessors)


def _overhead_us(problem: ConvProblem, delegate: Config | None, device: Device) -> float:
    """Microseconds beside those of the inner engine."""
    padded, us = _padded(problem), 0.0
    folds = _folds(problem, delegate)
    if delegate is not None and registry.adds_border(problem, delegate):
        us += registry.border_time(problem, delegate)
    wide = padded.result_shape if folds else padded.input_shape
    moved_bytes = 0
    if _copies(problem, delegate):
        moved_bytes += problem.input_itemsize * math.prod(problem.input_shape) + problem.itemsize * math.prod(wide)
        us += COST.BEGIN
    if folds:
        moved_bytes += problem.itemsize * (math.prod(problem.result_shape) + math.prod(wide))
        us += COST.BEGIN
    if problem.result_dtype:
        moved_bytes += (problem.itemsize + problem.result_itemsize) * math.prod(problem.result_shape)
        us += COST.BEGIN
    return us + spread(moved_bytes / COST.MEMORY, device.multiprocessors)


def configs(problem: ConvProblem, device: Device) -> Iterator[Bordered]:
    """The configurations worth comparing for `problem`, around those of the other engines."""
    if problem.adapted:
        yield from map(Bordered, worth_comparing(_padded(problem), device, BEST))
    if rims.refusal(problem) is None:
        zeros = worth_comparing(_padded(problem, Bordered(RIMS=True)), device, BEST)
        yield from (Bordered(delegate, True) for delegate in zeros)


def choose(problem: ConvProblem, device: Device) -> tuple[float, Bordered] | None:
    """The other engines' choice for the image with its border, behind the microseconds that it should take.

    Where that needs a copy of the image, the best that needs none is compared with it.
    """
    delegate = registry.find(_padded(problem), device) if problem.adapted else None
    if delegate is None:
        return None
    found = Bordered(str(delegate))
    us = time(problem, found, device)
    if us is None:
        return LAST_RESORT, found
    if copies(problem, found):
        for _, other in registry.predictions(_padded(problem), device)[:SEVERAL]:
            if not copies(problem, Bordered(str(other))):
                its = time(problem, Bordered(str(other)), device)
                if its is not None and its < us:
                    us, found = its, Bordered(str(other))
    if rims.refusal(problem) is None:
        among_zeros = registry.find(_padded(problem, Bordered(RIMS=True)), device)
        its = None if among_zeros is None else time(problem, Bordered(str(among_zeros), True), device)
        if its is not None and its < us:
            us, found = its, Bordered(str(among_zeros), True)
    return us, found
