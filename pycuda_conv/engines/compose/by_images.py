"""Convolutions of some images at a time, by another engine: of arrays that its kernels can't count in 32 bits as a whole.

A launch gets the arrays' addresses from its first image on. The filter is packed once for all, and the launches follow one another in one
workspace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from pycuda_conv.engines import registry
from pycuda_conv.engines.base import ConvProblem, Device
from pycuda_conv.engines.compose.delegate import Around, Delegating, delegate_of, moved
from pycuda_conv.engines.geometry import ceil
from pycuda_conv.engines.limits import CUDA, NOT_EMPTY, Takes, Tiles
from pycuda_conv.engines.schedule import INPUT, RESIDUAL, RESULT, Schedule
from pycuda_conv.runtime.base import KernelLaunch

MOST_ELEMENTS = 2**31 - 2**20  # of an array that kernels count in 32 bits, up to the end of a tile
MOST_PARTS = 64  # into which a batch is cut: no GPU has memory for more arrays of 2^31 elements
ALIGNED = 16  # bytes at which kernels expect an array to begin


@dataclass(frozen=True)
class ByImages(Delegating):
    """The configuration for some of the images, as text, and how many they are."""

    IMAGES: int = 1


CONFIGS, LAYOUTS, RUNS_ON, TENSOR_CORES, IN_PARTS = (ByImages,), ("NCHW", "NHWC"), CUDA, True, True


def _elements(problem: ConvProblem) -> tuple[int, int]:
    """Elements of an image, and of its result."""
    return math.prod(problem.input_shape) // problem.N, math.prod(problem.result_shape) // problem.N


def _step(problem: ConvProblem) -> int:
    """The images after which both arrays are aligned again."""
    return math.lcm(*(ALIGNED // math.gcd(ALIGNED, problem.itemsize * size) for size in _elements(problem)))


def images_at_a_time(problem: ConvProblem) -> int:
    """The images that are counted in 32 bits, for launches of equal work; 0 where no image is, all are, or it takes too many."""
    image, step = max(_elements(problem)), _step(problem)
    most = MOST_ELEMENTS // image // step * step
    if not most or not most < problem.N <= MOST_PARTS * most:
        return 0
    return min(most, ceil(ceil(problem.N, ceil(problem.N, most)), step) * step)


def _parts(problem: ConvProblem, images: int) -> tuple[ConvProblem, ConvProblem | None]:
    """The problem of so many images, and that of the last ones, if they are fewer."""
    left = problem.N % images
    return replace(problem, N=images), replace(problem, N=left) if left else None


def _others_us(images: int, problem: ConvProblem, delegate: Any, device: Device) -> float:
    """Microseconds of all launches but the first."""
    first, last = _parts(problem, images)
    again = (problem.N // images - 1) * (registry.predicted(first, delegate, device) or 0.0)
    return again + ((registry.predicted(last, delegate, device) or 0.0) if last else 0.0)


@cache
def _around(images: int) -> Around:
    """What is said of configurations for so many images."""

    def kind(problem: ConvProblem) -> Any:
        return partial(ByImages, IMAGES=images)

    return Around(lambda problem: _parts(problem, images)[0], partial(_others_us, images), kind, lambda problem: True)


def _serves_last(problem: ConvProblem, config: ByImages) -> str | None:
    """Why the last images can't be computed as the others are, or None if they can."""
    first, last = _parts(problem, config.IMAGES)
    delegate = delegate_of(config)
    if last is None:
        return None
    engine = registry.engine_of(delegate)
    if engine.filter_key(first, delegate) != engine.filter_key(last, delegate):
        return "the last images need another filter"
    if problem.batch_invariant and engine.sum_order(first, delegate) != engine.sum_order(last, delegate):
        return "the last images would be summed in another order"
    return engine.refusal(last, delegate)


TAKES = Takes(NOT_EMPTY)
LEGAL = Tiles(
    TAKES, ByImages,
    lambda p, config: None if config.IMAGES < p.N else "there are not so many images",
    lambda p, config: f"it would cut the batch into more than {MOST_PARTS} parts" if config.IMAGES * MOST_PARTS < p.N else None,
    lambda p, config: "the next images don't begin aligned" if config.IMAGES % _step(p) else None,
    lambda p, config: _around(config.IMAGES).fits(p, config), _serves_last,
)  # fmt: skip


def schedule(problem: ConvProblem, config: ByImages, device: Device, with_moments: bool = False) -> Schedule:
    parts = [one for one in _parts(problem, config.IMAGES) if one]
    first, *last = (registry.schedule(one, delegate_of(config), device) for one in parts)
    made = [(start, first) for start in range(0, problem.N - problem.N % config.IMAGES, config.IMAGES)]
    made += [(problem.N - problem.N % config.IMAGES, one) for one in last]
    image, result = (problem.itemsize * size for size in _elements(problem))

    def joined(steps: Callable[[Schedule], list[list[KernelLaunch]]]) -> list[list[KernelLaunch]]:
        found = []
        for start, one in made:
            there = start * result
            found += moved(steps(one), {INPUT: (INPUT, start * image), RESULT: (RESULT, there), RESIDUAL: (RESIDUAL, there)})
        return found

    return Schedule(
        first.prepare, joined(lambda one: one.steps), joined(lambda one: one.whole), max(one.workspace_bytes for _, one in made),
        first.filter_bytes, first.redoes,
        filter_last=joined(lambda one: one.filter_last or []) if all(one.filter_last for _, one in made) else None,
    )  # fmt: skip


def time(problem: ConvProblem, config: ByImages, device: Device) -> float | None:
    return _around(config.IMAGES).time(problem, config, device)


def sum_order(problem: ConvProblem, config: ByImages) -> Hashable:
    """That of the delegate's engine: no sum runs over images."""
    return _around(config.IMAGES).sum_order(problem, config)


def filter_key(problem: ConvProblem, config: ByImages) -> Hashable:
    return _around(config.IMAGES).filter_key(problem, config)


def configs(problem: ConvProblem, device: Device) -> Iterator[Delegating]:
    """Those around the best for as many images as are counted in 32 bits."""
    images = images_at_a_time(problem)
    if images:
        yield from _around(images).configs(problem, device)


def choose(problem: ConvProblem, device: Device) -> tuple[float, Delegating] | None:
    """The one around the choice for so many images."""
    images = images_at_a_time(problem) if TAKES.why_not(problem) is None else 0
    return _around(images).choose(problem, device) if images else None
