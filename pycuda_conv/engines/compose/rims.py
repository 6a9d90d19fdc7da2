"""Convolutions with a border of the image's own pixels, by another engine as if there were zeros, and a launch for the results at the rims.

``cu/layout/rims.cu`` and ``cu/mma/rims_product.cu`` compute the few rows and columns of a result that the border changes again. To those
of a gradient by the input they add what the border shows, or in 16 bits they sum them anew. So no array of the wider image is written.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace

from pycuda_conv.engines import registry
from pycuda_conv.engines.base import ConvProblem, Device, KernelLaunch
from pycuda_conv.engines.compose.delegate import Around, Delegating, delegate_of
from pycuda_conv.engines.costs import costs, spread
from pycuda_conv.engines.geometry import ceil
from pycuda_conv.engines.layout import rims
from pycuda_conv.engines.layout.rims import variants
from pycuda_conv.engines.limits import Takes, Tiles
from pycuda_conv.engines.schedule import PACKED, Arena, Schedule
from pycuda_conv.runtime.base import LibraryCall


@dataclass(frozen=True)
class Rims(Delegating):
    """The configuration for the image among zeros, as text."""


__all__ = ["variants"]  # with what stands here: the engine
CONFIGS, LAYOUTS, TENSOR_CORES, MOST_VARIANTS = (Rims,), ("NCHW", "NHWC", "CNHW", "CHWN"), True, {"cuda": 102, "opencl": 78}
COST = costs("compose.rims")


def adapts(problem: ConvProblem) -> bool:
    """Whether there is such a border."""
    return rims.refusal(problem) is None


def _among_zeros(problem: ConvProblem) -> ConvProblem:
    """The problem of the other engine, as it is launched."""
    return replace(problem, border=None, border_value=0.0).launched


TAKES = Takes(rims.refusal)
LEGAL = Tiles(TAKES, Rims, lambda problem, config: AROUND.fits(problem, config))


def schedule(problem: ConvProblem, config: Rims, device: Device, with_moments: bool = False) -> Schedule:
    made, kept = registry.schedule(_among_zeros(problem), delegate_of(config), device), Arena(PACKED)
    kept.take(made.filter_bytes)
    place = kept.take(problem.itemsize * math.prod(problem.weight_shape)) if rims.transposes(problem, device) else None
    in_place = place is None or problem.direction == "fprop"  # with its second axis last, the filter lies so

    def followed(steps: list[list[KernelLaunch]], place: tuple[int, int] | None, filter_last: bool = False) -> list[list[KernelLaunch]]:
        alone = rims.on_tensor_cores(problem, device)  # their blocks would take room from products
        return [*(steps if alone else _waited_for_late(steps)), [rims.launch(problem, device, filter_last, place)]]

    def first(filter_last: bool = False) -> list[list[KernelLaunch]]:
        return [] if place is None else [[rims.transposed(problem, place, filter_last)]]

    last = None
    if made.filter_last:
        last = followed(made.filter_last, None, True) if in_place else first(True) + followed(made.filter_last, place, True)
    return replace(
        made, prepare=first() + made.prepare, steps=followed(made.steps, place), whole=first() + followed(made.whole, place),
        filter_bytes=kept.used, filter_last=last, moments=None, redoes=made.redoes or problem.direction == "fprop",
    )  # fmt: skip


def _waited_for_late(steps: list[list[KernelLaunch]]) -> list[list[KernelLaunch]]:
    """The steps, the last of which lets the next blocks begin early if it is one launch: those for the rims wait before they store."""
    if not steps or len(steps[-1]) != 1 or isinstance(steps[-1][0], LibraryCall):
        return steps
    (last,) = steps[-1]
    return [*steps[:-1], [replace(last, layer={**last.layer, "NEXT_COMES": 1})]]


def filter_key(problem: ConvProblem, config: Rims) -> Hashable:
    """That of the delegate, and what the filter of the rims depends on."""
    return problem.direction, problem.dtype, problem.weight_shape, AROUND.filter_key(problem, config)


def _rims_us(problem: ConvProblem, delegate: object, device: Device) -> float:
    """Microseconds of the launch for the rims."""
    if problem.layout in rims.OF_FILTER:
        return COST.OF_FILTER_BEGIN + spread(COST.OF_FILTER[problem.layout] * rims.summands_of_filter(problem), device.multiprocessors)
    taps, read = math.prod(problem.filter_size), problem.operand_channels // problem.groups
    again = COST.PLACES[problem.layout] if problem.direction == "dgrad" and not rims.adds(problem) else 1.0
    if rims.on_tensor_cores(problem, device):
        met = math.sqrt(taps) if rims.adds(problem) else taps * again
        waves = max(rims.product_blocks(problem) / (2 * device.multiprocessors), 1.0)
        return COST.BEGIN + COST.STEP[problem.layout] * waves * met * ceil(read * problem.itemsize, 128)
    elements = rims.results(problem) * problem.N * problem.result_channels
    planes = problem.layout == "NCHW"
    each, lines = COST.ELEMENT[problem.layout] * (problem.itemsize / 4 if planes else 1.0), COST.LINE * rims.columns(problem) * planes
    return COST.BEGIN + lines + spread(elements * (each + COST.PRODUCT[problem.layout] * again * taps * read), device.multiprocessors)


AROUND: Around = Around(_among_zeros, _rims_us, lambda _: Rims, adapts)
