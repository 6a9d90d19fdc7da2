"""Channels-last convolutions whose channels fill no 16 bytes: images and filter are copied with zeros behind their channels.

``cu/layout/fold_channels.cu`` does so, and an engine that reads channels-last arrays does the rest.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace

from pycuda_conv.engines import registry
from pycuda_conv.engines.base import Config, ConvProblem, Engine, costs
from pycuda_conv.engines.compose.delegate import AroundOthers, Delegating, delegate_of, moved
from pycuda_conv.engines.geometry import ceil
from pycuda_conv.engines.layout.fold_channels import WORD, launch, zeros_behind
from pycuda_conv.engines.limits import HOPPER, NOT_EMPTY, ONE_GROUP, Takes, Tiles
from pycuda_conv.engines.schedule import INPUT, PACKED, WEIGHT, WORKSPACE, Arena, Schedule
from pycuda_conv.runtime.base import BufferSlice, Device, KernelLaunch


@dataclass(frozen=True)
class Filled(Delegating):
    """The configuration for the filled arrays, as text."""

    DELEGATE: str = "DenseNhwc()"


CONFIGS, LAYOUTS, RUNS_ON, TENSOR_CORES = (Filled,), ("NHWC",), HOPPER, True  # hopper/wgrad.py lists the texts of the copies
COST = costs("compose.fold_channels")


def _filled(problem: ConvProblem) -> ConvProblem:
    """The problem with as many more channels to sum over as fill 16 bytes."""
    each = WORD // problem.itemsize
    channels = ceil(problem.operand_channels, each) * each
    return replace(problem, C=channels) if problem.direction == "fprop" else replace(problem, K=channels)


TAKES = Takes(
    (
        "it takes float16 and bfloat16 arrays, and float32 with precision='tf32'",
        lambda p: p.itemsize == 2 or (p.dtype == "float32" and p.precision == "tf32"),
    ),
    NOT_EMPTY, ONE_GROUP, ("its channels are a multiple of 16 bytes", lambda p: p.operand_channels * p.itemsize % WORD != 0),
    ("it counts in 32 bits", lambda p: _filled(p).largest_array < 2**31),
)  # fmt: skip
LEGAL = Tiles(TAKES, Filled, lambda problem, config: AROUND.fits(problem, config))


def _filter_copy(problem: ConvProblem, place: BufferSlice, last: bool) -> KernelLaunch:
    """The copy of the filter, in C order or with its second axis last, which keeps the order."""
    (first, second), taps, each = problem.weight_shape[:2], math.prod(problem.filter_size), WORD // problem.itemsize
    if problem.direction == "dgrad":  # the channels that are filled up are the first axis: zeros follow the whole
        whole = first * second * taps
        args = zeros_behind(problem, 1, whole, ceil(first, each) * each * second * taps)
    else:
        rows, length = (first * taps, second) if last else (first, second * taps)
        args = zeros_behind(problem, rows, length, ceil(second, each) * each * length // second)
    return launch(problem, args, WEIGHT, place)


def schedule(problem: ConvProblem, config: Filled, device: Device, with_moments: bool = False) -> Schedule:
    delegate, filled = delegate_of(config), _filled(problem)
    made = registry.engine_of(delegate).schedule(filled, delegate, device, with_moments)
    kept, scratch = Arena(PACKED), Arena(WORKSPACE)
    own = scratch.take(made.workspace_bytes)  # moments lie where the delegate put them
    images = scratch.take(math.prod(filled.input_shape) * problem.itemsize)
    nbytes = math.prod(filled.weight_shape) * problem.itemsize
    pixels = math.prod(problem.input_shape) // problem.operand_channels
    args = zeros_behind(problem, pixels, problem.operand_channels, filled.operand_channels)
    fill_images = launch(problem, args, INPUT, images)

    def steps(some: list[list[KernelLaunch]], filter_place: tuple[int, int], packed: tuple[int, int]) -> list[list[KernelLaunch]]:
        return moved(some, {INPUT: images, WEIGHT: filter_place, WORKSPACE: own, PACKED: packed})

    packed, filters = kept.take(made.filter_bytes), kept.take(nbytes)
    fill_filter = _filter_copy(problem, filters, False)
    prepare = [[fill_filter], *steps(made.prepare, filters, packed)]
    images_alone = [[fill_images], *steps(made.steps, filters, packed)]
    whole = [[fill_images, fill_filter], *steps(made.whole, filters, packed)]
    last = None
    if made.filter_last is not None:
        last = [[fill_images, _filter_copy(problem, filters, True)], *steps(made.filter_last, filters, packed)]
    return Schedule(prepare, images_alone, whole, scratch.used, kept.used, made.redoes, made.moments, last)


def _copying(problem: ConvProblem, delegate: Config, device: Device) -> float:
    """Microseconds of the copies."""
    filled = _filled(problem)
    read, written = (math.prod(one.input_shape) + math.prod(one.weight_shape) for one in (problem, filled))
    return COST.COPY + COST.FILTER + problem.itemsize * (read + written) / COST.COPIED


def _alone(engine: Engine, problem: ConvProblem, device: Device) -> bool:
    """Whether an engine has kernels of its own, and can only run the problem of the filled arrays."""
    own = engine.TENSOR_CORES and not registry.name_of(engine).startswith("compose.")
    return own and any(True for _ in engine.configs(_filled(problem), device)) and not any(True for _ in engine.configs(problem, device))


AROUND: AroundOthers = AroundOthers(_filled, _copying, lambda _: Filled, lambda problem: TAKES.why_not(problem) is None, alone=_alone)


def filter_key(problem: ConvProblem, config: Filled) -> Hashable:
    """That of the delegate's engine, for filters of so many channels before they are filled up."""
    return problem.direction, problem.dtype, problem.weight_shape, AROUND.filter_key(problem, config)
