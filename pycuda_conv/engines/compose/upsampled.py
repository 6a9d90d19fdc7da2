"""Convolutions of upsampled images, around another engine.

Folded, the filter's taps that meet the same pixel are summed (``cu/layout/sum_taps.cu``). The other engine computes the transposed
convolution that is left: :attr:`ConvProblem.transposed_form`. It reads the array as it is, or with its border. The sums are a packed
filter: a bound plan keeps them. Not folded, the image is enlarged (``cu/layout/upsampled.cu``), and the other engine convolves that.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace

from pycuda_conv.engines import registry
from pycuda_conv.engines.base import Config, ConvProblem, Device, KernelLaunch
from pycuda_conv.engines.compose.delegate import Around, Delegating, delegate_of, moved, parsed, wrapped
from pycuda_conv.engines.costs import costs, spread
from pycuda_conv.engines.layout import border_copy, enlarge
from pycuda_conv.engines.layout.enlarge import MOST_VARIANTS, variants
from pycuda_conv.engines.limits import Takes, Tiles
from pycuda_conv.engines.schedule import INPUT, PACKED, WEIGHT, WORKSPACE, Arena, Buffer, Schedule


@dataclass(frozen=True)
class Upsampled(Delegating):
    """The configuration for what is left when the filter is folded, or the image enlarged, as text."""


__all__ = ["MOST_VARIANTS", "variants"]  # with what stands here: the engine
CONFIGS, LAYOUTS, TENSOR_CORES = (Upsampled,), ("NCHW", "NHWC"), True
COST = costs("compose.upsampled")


def upsamples(problem: ConvProblem) -> bool:
    """True: it takes all problems that are :attr:`ConvProblem.upsampled`, and no others."""
    return True


def _left(problem: ConvProblem) -> ConvProblem:
    """The problem of the other engine, as it is launched."""
    once = (1, 1, 1)
    return (problem.transposed_form if problem.folded else replace(problem, upsample=once)).launched


def _fits(problem: ConvProblem, config: Upsampled) -> str | None:
    left, delegate = _left(problem), parsed(config.DELEGATE)
    if delegate is not None and left.adapted and not registry.adapts(registry.engine_of(delegate), left):
        return "it takes no borders but zeros, and no integers"
    return AROUND.fits(problem, config)


TAKES = Takes(
    ("it is for upsampled images", lambda problem: problem.upsampled),
    ("its image has no whole number of pixels", lambda p: not any(n % u for n, u in zip(p.input_size, p.upsample, strict=True))),
)
LEGAL = Tiles(TAKES, Upsampled, _fits)


def _frames(problem: ConvProblem) -> bool:
    """Whether the array has to be copied with its border."""
    return problem.folded and problem.border is not None


def schedule(problem: ConvProblem, config: Upsampled, device: Device, with_moments: bool = False) -> Schedule:
    left, scratch = _left(problem), Arena(WORKSPACE)
    made = registry.schedule(left, delegate_of(config), device)
    places: dict[Buffer, tuple[int, int]] = {}
    copies: list[KernelLaunch] = []
    if not problem.folded:
        places[INPUT] = scratch.take(problem.input_itemsize * math.prod((left.N, left.C, *left.input_size)))
        copies = [enlarge.enlarge(problem, places[INPUT])] if math.prod(problem.input_shape) else []
    elif _frames(problem):
        framed = problem.framed
        places[INPUT] = scratch.take(problem.itemsize * math.prod(framed.padded.input_shape))
        copies = [border_copy.copy(framed, places[INPUT], device)] if math.prod(problem.input_shape) else []
    places[WORKSPACE] = scratch.take(made.workspace_bytes)
    if not problem.folded:
        return wrapped(made, places, scratch.used, copies)
    # the sums lie where the packed filter does, behind what the other engine packs of them; on OpenCL nothing is kept
    kept = device.backend != "opencl"
    keeps = Arena(PACKED) if kept else scratch
    if made.filter_bytes:
        places[PACKED] = keeps.take(made.filter_bytes)
    places[WEIGHT] = keeps.take(problem.itemsize * math.prod(left.weight_shape))
    reads_last = bool(made.prepare) and made.filter_last is not None and _count(made.filter_last) < _count(made.whole)
    packs = [] if reads_last else moved(made.prepare, places)
    steps = [*([copy] for copy in copies), *moved((made.filter_last if reads_last else made.steps) or [], places)]

    def sums(given_last: bool) -> list[list[KernelLaunch]]:
        return [[enlarge.sum_taps(problem, given_last, reads_last, places[WEIGHT])]] if math.prod(left.weight_shape) else []

    whole = sums(False) + packs + steps
    last = sums(True) + packs + steps if problem.layout == "NHWC" else None
    if not kept:
        return Schedule([], whole, whole, scratch.used, 0, made.redoes, filter_last=last)
    return Schedule(sums(False) + packs, steps, whole, scratch.used, keeps.used, made.redoes, filter_last=last)


def _count(steps: list[list[KernelLaunch]]) -> int:
    return sum(map(len, steps))


def filter_key(problem: ConvProblem, config: Upsampled) -> Hashable:
    """That of the delegate's engine, and how the filter is folded."""
    key = AROUND.filter_key(problem, config)
    if not problem.folded:
        return key
    folding = problem.upsample, problem.empty_taps, problem.groups, problem.K, problem.C, problem.filter_size, problem.dtype
    return config.DELEGATE, key, folding


def _overhead_us(problem: ConvProblem, delegate: Config, device: Device) -> float:
    """Microseconds beside those of the delegate's engine; a folded filter counts as kept."""
    if problem.folded and not _frames(problem):
        return 0.0
    size = problem.framed.padded.input_size if problem.folded else problem.input_size
    moved_bytes = problem.input_itemsize * math.prod(problem.input_shape) + problem.itemsize * problem.N * problem.C * math.prod(size)
    return COST.BEGIN + spread(moved_bytes / COST.MEMORY, device.multiprocessors)


AROUND: Around = Around(_left, _overhead_us, lambda _: Upsampled, lambda problem: problem.upsampled)
