"""Images with borders of their own pixels, images and results of integers: ``cu/layout/bordered.cu`` around another engine.

The image is copied with its border, in the arithmetic's type, and another engine convolves the copy. An engine that packs images writes the
border while it does so: then nothing is copied. The gradient by the input is that of the wider image, whose border is then added to the
pixels that it shows. A result of integers is rounded behind the other engine.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace

from pycuda_conv.engines import registry
from pycuda_conv.engines.base import LAST_RESORT, Config, ConvProblem, Device
from pycuda_conv.engines.compose.delegate import Around, Delegating, delegate_of, parsed, wrapped
from pycuda_conv.engines.costs import costs, spread
from pycuda_conv.engines.layout import border_copy
from pycuda_conv.engines.layout.border_copy import MOST_VARIANTS, variants
from pycuda_conv.engines.limits import Takes, Tiles
from pycuda_conv.engines.schedule import INPUT, RESULT, WORKSPACE, Arena, Buffer, Schedule


@dataclass(frozen=True)
class Bordered(Delegating):
    """The configuration for the image with its border, as text."""


__all__ = ["MOST_VARIANTS", "variants"]  # with what stands here: the engine
CONFIGS, LAYOUTS, TENSOR_CORES = (Bordered,), ("NCHW", "NHWC", "CNHW", "CHWN"), True
COST = costs("compose.bordered")


def adapts(problem: ConvProblem) -> bool:
    """True: it takes all problems that are :attr:`ConvProblem.adapted`, and no others."""
    return True


def _padded(problem: ConvProblem) -> ConvProblem:
    """The problem of the other engine, on the wider image, as it is launched."""
    return problem.padded.launched


TAKES = Takes(("it is for images with borders, and for integers", lambda problem: problem.adapted and not problem.upsampled))
LEGAL = Tiles(TAKES, Bordered, lambda problem, config: AROUND.fits(problem, config))


def alike(problem: ConvProblem, config: Config) -> Config:
    """The configuration with the sums of `config`, which is for another problem, one with a border or without."""
    if isinstance(config, Bordered):
        return config if problem.adapted else parsed(config.DELEGATE) or config
    takes = registry.adapts(registry.engine_of(config), problem.launched)
    return Bordered(str(config)) if problem.adapted and not takes else config


def _folds(problem: ConvProblem, delegate: Config | None) -> bool:
    """Whether the result of the other engine has to be folded."""
    if problem.direction != "dgrad" or problem.border is None:
        return False
    return delegate is None or not registry.adds_border(problem, delegate)


def copies(problem: ConvProblem, config: Delegating) -> bool:
    """Whether the image, or a gradient by it, is copied by a launch of its own."""
    delegate = parsed(config.DELEGATE)
    return _copies(problem, delegate) or _folds(problem, delegate)


def _copies(problem: ConvProblem, delegate: Config | None) -> bool:
    """Whether the image has to be copied before the inner engine reads it."""
    if delegate is not None and registry.adds_border(problem, delegate):
        return False
    return bool(problem.input_dtype) or (problem.border is not None and problem.direction != "dgrad")


def schedule(problem: ConvProblem, config: Bordered, device: Device, with_moments: bool = False) -> Schedule:
    delegate, padded, scratch = delegate_of(config), _padded(problem), Arena(WORKSPACE)
    made = registry.schedule(padded, delegate, device, source=problem if registry.adds_border(problem, delegate) else None)
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
    return replace(wrapped(made, places, scratch.used, first, last), redoes=made.redoes and RESULT not in places)


def sum_order(problem: ConvProblem, config: Bordered) -> Hashable:
    """That of the delegate's engine, for its configurations."""
    delegate = parsed(config.DELEGATE)
    # a kernel that reads the border may cut a row elsewhere
    return AROUND.sum_order(problem, config), delegate is not None and registry.adds_border(problem, delegate)


SEVERAL = 24  # predictions among which there may be one that needs no copy


def _overhead_us(problem: ConvProblem, delegate: Config | None, device: Device) -> float:
    """Microseconds beside those of the inner engine."""
    padded, us = _padded(problem), 0.0
    folds = _folds(problem, delegate)
    if delegate is not None and registry.adds_border(problem, delegate):
        us += registry.engine_of(delegate).border_time(problem, delegate)
    wide = padded.result_shape if folds else padded.input_shape
    moved_bytes = 0.0
    if _copies(problem, delegate):
        moved_bytes += problem.input_itemsize * math.prod(problem.input_shape) + problem.itemsize * math.prod(wide)
        us += COST.BEGIN
    if folds:
        moved_bytes += COST.FOLDED[problem.layout] * problem.itemsize * (math.prod(problem.result_shape) + math.prod(wide))
        us += COST.BEGIN
    if problem.result_dtype:
        moved_bytes += (problem.itemsize + problem.result_itemsize) * math.prod(problem.result_shape)
        us += COST.BEGIN
    return us + spread(moved_bytes / COST.MEMORY, device.multiprocessors)


AROUND: Around = Around(_padded, _overhead_us, lambda _: Bordered, lambda problem: problem.adapted)


def choose(problem: ConvProblem, device: Device) -> tuple[float, Config] | None:
    """The other engines' choice for the image with its border, behind the microseconds that it should take.

    Where that needs a copy of the image, the best that needs none is compared with it.
    """
    chosen = AROUND.choose(problem, device)
    if chosen is None or chosen[0] == LAST_RESORT:
        return chosen
    us, found = chosen
    if copies(problem, found):
        for _, other in registry.predictions(_padded(problem), device)[:SEVERAL]:
            if not copies(problem, Bordered(str(other))):
                its = AROUND.time(problem, Bordered(str(other)), device)
                if its is not None and its < us:
                    us, found = its, Bordered(str(other))
    return us, found
