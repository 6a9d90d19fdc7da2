"""dgrad as a product without taps, whose columns are added (``cu/layout/columns_add.cu``).

The product gives what each tap contributes for each pixel that it reads. It has a 1x1 filter with a channel for each channel and tap, and
is dense, whatever the stride. If the result's pixels meet few taps, it has hardly more elements than the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pycuda_conv.engines import registry
from pycuda_conv.engines.base import Config, VariantSet, kernel_struct
from pycuda_conv.engines.compose.delegate import Around, Delegating, delegate_of, wrapped
from pycuda_conv.engines.costs import costs, spread
from pycuda_conv.engines.geometry import arguments, by_axis, ceil, outputs_apart, taps_apart
from pycuda_conv.engines.limits import CUDA, NOT_EMPTY, Takes, Tiles
from pycuda_conv.engines.schedule import FINISH, RESULT, WORKSPACE, Arena, Schedule
from pycuda_conv.engines.variants import portable, portable_choices
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import BufferSlice, Device, KernelLaunch

THREADS = 256  # of a block of columns_add.cu
CHANNELS = (8, 4, 1)  # of a thread, which finds once for all of them which taps its pixel meets


@dataclass(frozen=True)
class Columns(Delegating):
    """A configuration of the product without taps, as text."""


CONFIGS, LAYOUTS, RUNS_ON, TENSOR_CORES, MOST_VARIANTS = (Columns,), ("NCHW", "NHWC"), CUDA, True, {"cuda": 12}
COST = costs("compose.columns")
ColumnsArguments = kernel_struct("columns_add", "ColumnsArguments")


def _taps(problem: ConvProblem) -> int:
    return math.prod(problem.filter_size)


def _met(problem: ConvProblem) -> int:
    """The most taps that a pixel of the result meets."""
    return math.prod(ceil(taps, every) for taps, every in zip(problem.filter_size, taps_apart(problem), strict=True))


def _product(problem: ConvProblem) -> ConvProblem:
    """The product without taps: its channels are all taps of all channels."""
    one, none = (1, 1, 1), (0, 0, 0)
    return replace(
        problem, C=problem.C * _taps(problem), input_size=problem.output_size, filter_size=one, stride=one, dilation=one,
        padding_before=none, padding_after=none, has_bias=False, has_scale=False, has_residual=False, activation=None, float_scale=False,
    ).launched  # fmt: skip


def _columns(problem: ConvProblem) -> int:
    """Elements of the product."""
    return problem.N * math.prod(problem.output_size) * problem.C * _taps(problem)


TAKES = Takes(
    ("it computes gradients by the input", lambda p: p.direction == "dgrad"), NOT_EMPTY,
    ("there is one tap and no stride: the columns are the result", lambda p: _taps(p) > 1 or math.prod(taps_apart(p)) > 1),
    (
        "columns of 16 bits are rounded: each has to be an element of the result",
        lambda p: p.itemsize != 2 or (_met(p) == 1 and not (p.has_bias or p.has_scale or p.has_residual or p.activation)),
    ),
    ("it counts in 32 bits", lambda p: max(_columns(p), p.largest_array) < 2**31),
)  # fmt: skip
LEGAL = Tiles(TAKES, Columns, lambda problem, config: AROUND.fits(problem, config))


def schedule(problem: ConvProblem, config: Columns, device: Device, with_moments: bool = False) -> Schedule:
    product, scratch = _product(problem), Arena(WORKSPACE)
    made = registry.schedule(product, delegate_of(config), device)
    columns = scratch.take(problem.itemsize * math.prod(product.result_shape))
    places = {RESULT: columns, WORKSPACE: scratch.take(made.workspace_bytes)}
    whole = made.prepare + made.steps
    found = wrapped(replace(made, whole=whole, filter_last=None), places, scratch.used, last=[_launch(problem, columns, False)])
    if problem.layout == "NHWC" and problem.groups == 1:  # the same columns with the product's channels in another order
        return replace(found, filter_last=[*found.whole[:-1], [_launch(problem, columns, True)]])
    return found


def _launch(problem: ConvProblem, columns: BufferSlice, filter_last: bool) -> KernelLaunch:
    """The launch that adds the columns. With `filter_last` the channels of a tap are neighbours in them, else the taps of a channel."""
    (_, h, w), taps = problem.result_size, _taps(problem)
    read, channels = math.prod(problem.output_size), problem.C
    last = problem.layout == "NHWC"
    channel, tap = (1, channels) if filter_last else (taps, 1)
    if not last:
        channel, tap = channel * read, tap * read
    each = next(n for n in CHANNELS if 4 * channels >= 3 * n or n == 1)  # few are idle
    apart = ceil(channels, each)
    size = math.prod(problem.result_shape) // channels * apart
    args = arguments(
        ColumnsArguments, problem, size=size, channels=channels, apart=apart, hw=h * w, h=h, w=w, last=int(last),
        image=channels * taps * read, channel=channel, tap=tap, pixel=channels * taps if last else 1,
        **by_axis("", problem.output_size, "opq"), **by_axis("every_", taps_apart(problem)), **by_axis("back_", outputs_apart(problem)),
    )  # fmt: skip
    defines, buffers = portable(problem.dtype, False, THREADS) | {"CHANNELS": each}, (columns, *FINISH, RESULT)
    return KernelLaunch("columns_add", defines, ceil(size, THREADS), THREADS, buffers, (), arguments=args)


def variants(device: Device) -> Iterator[VariantSet]:
    yield VariantSet("columns_add", portable_choices(THREADS) | {"INDEX_64": (0,), "CHANNELS": CHANNELS})


MOST_MET = 64  # the most taps that a pixel meets: with more there are many more columns than elements of the result
MOST_BYTES = 2**30  # the most columns, in bytes of workspace


def _adding(problem: ConvProblem, delegate: Config, device: Device) -> float:
    """Microseconds of adding the columns."""
    nbytes, results = problem.itemsize * _columns(problem), math.prod(problem.result_shape)
    us = 2 * nbytes / (COST.CACHED_RATE if nbytes < COST.CACHED else COST.COLUMN_RATE) + COST.ELEMENT[problem.layout] * results
    if problem.has_residual:
        us += problem.itemsize * results / COST.RESIDUAL_RATE
    return COST.BEGIN + spread(us, device.multiprocessors)


def _worth_it(problem: ConvProblem) -> bool:
    small = problem.itemsize * _columns(problem) <= MOST_BYTES
    return TAKES.why_not(problem) is None and _met(problem) <= MOST_MET and small


AROUND: Around = Around(_product, _adding, lambda _: Columns, _worth_it)


def configs(problem: ConvProblem, device: Device) -> Iterator[Columns]:
    """The configurations worth comparing for `problem`: the best ones of the product."""
    if _worth_it(problem):
        yield from (Columns(str(one)) for _, one in registry.predictions(_product(problem), device)[: AROUND.BEST])
