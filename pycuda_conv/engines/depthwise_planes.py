"""Depthwise layers of small filters on contiguous NCHW planes: ``cu/depthwise_planes.cu``.

A block's part of the input is a run of memory, and so is its part of the result, so both move at memory's speed.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from pycuda_conv.engines.base import BY_RULE, Config, fastest
from pycuda_conv.engines.depthwise_units import unit_refusal
from pycuda_conv.engines.geometry import accumulator_bytes, arguments, ceil, needs_64_bits
from pycuda_conv.engines.schedule import BIAS, INPUT, RESIDUAL, RESULT, SCALE, WEIGHT, Schedule, finish, finish_constants
from pycuda_conv.engines.struct import kernel_struct
from pycuda_conv.engines.texts import FLAG, TextFamily
from pycuda_conv.problem import DTYPE_CODES, ConvProblem
from pycuda_conv.runtime.base import Device, KernelLaunch

THREADS, ROWS = 128, 8  # threads of a block; pixels of a thread, one below the other
VECTOR = 8  # the most elements that are moved at once
FILTERS, STRIDES = (3, 5, 7), (1, 2)
#: The most KiB of shared memory of a block; the first is fastest for most layers.
UNITS = (24, 12, 48)


@dataclass(frozen=True)
class DepthwisePlanes(Config):
    """The most shared memory of a block in KiB, which decides how many planes or rows it has: ``depthwise_planes.cu``."""

    UNIT_KIB: int = UNITS[0]


CONFIGS = (DepthwisePlanes,)
LAYOUTS = ("NCHW",)
TENSOR_CORES = False
MOST_TEXTS = {"cuda": 24}


DepthwisePlanesArguments = kernel_struct("depthwise_planes", "DepthwisePlanesArguments")


# ---- what runs


def unsupported(device: Device) -> str | None:
    """Why the engine can't run on `device`, or None if it can."""
    return None if device.backend == "cuda" else "it needs a GPU"


def refusal(problem: ConvProblem, config: DepthwisePlanes) -> str | None:
    """Why `config` can't run `problem`, or None if it can."""
    return why_not(problem) or unit_refusal(config.UNIT_KIB, UNITS, ROWS, lambda: _unit(problem, config))


def why_not(problem: ConvProblem) -> str | None:
    """Why the engine can't run `problem` whatever the unit, or None if it can."""
    (_, r, s), (_, stride_h, stride_w) = problem.filter_size, problem.stride
    if problem.groups != problem.C or problem.has_depth:
        return "it takes one input channel a group and at most two spatial axes"
    if r != s or r not in FILTERS or stride_h != stride_w or stride_h not in STRIDES or problem.dilation[1:] != (1, 1):
        return "it takes filters of 3x3, 5x5 and 7x7, strides of 1 and 2, and no dilation"
    if problem.direction != "fprop" and (problem.K != problem.C or stride_h != 1):
        return "of gradients it computes those of the input, of a layer with as many channels out as in and without a stride"
    if problem.is_empty:
        return "there is nothing to compute"
    if problem.N * problem.K >= 2**31:
        return "it counts planes in 32 bits"
    return None


class _Unit(NamedTuple):
    """The part of the result that a block computes."""

    planes: int
    band: int  # rows of the result
    bands: int
    strips: int  # tasks below one another
    blocks: int
    tasks: int
    y_room: int  # numbers of shared memory: of the run of y, and of all
    room: int


@lru_cache(maxsize=1024)  # the planner asks for it several times
def _unit(problem: ConvProblem, config: DepthwisePlanes) -> _Unit | None:
    """The unit that fits the shared memory of `config` and leaves the fewest threads without a task; None if none fits."""
    found = list(_units(problem, config.UNIT_KIB * 1024 // accumulator_bytes(problem)))
    return max(found, key=lambda unit: (unit.tasks / ceil(unit.tasks, THREADS), unit.tasks)) if found else None


def _units(problem: ConvProblem, numbers: int) -> Iterator[_Unit]:
    """Units of whole planes that fill at least half of `numbers`; if not even one plane fits, bands of one."""
    (_, h, w), (_, p, q), (_, r, s), stride = problem.operand_size, problem.result_size, problem.filter_size, problem.stride[1]
    all_planes = problem.N * problem.K

    def unit(planes: int, band: int, x_rows: int) -> _Unit:
        bands, strips = ceil(p, band), ceil(band, ROWS)
        y_room = _rounded(planes * band * q + VECTOR)
        room = _rounded(planes * r * s) + y_room + _rounded(planes * x_rows * w + VECTOR)
        return _Unit(planes, band, bands, strips, ceil(all_planes, planes) * bands, planes * strips * q, y_room, room)

    most = min((numbers - 3 * VECTOR) // (h * w + p * q + r * s), all_planes)
    for planes in range(max(1, most // 2), most + 1):
        yield unit(planes, p, h)
    if most < 1:
        for band in range(ROWS, p, ROWS):
            found = unit(1, band, (band - 1) * stride + r)
            if found.room > numbers:
                return
            yield found


def _rounded(numbers: int) -> int:
    return ceil(numbers, VECTOR) * VECTOR


# ---- launches


def schedule(problem: ConvProblem, config: DepthwisePlanes, device: Device, noted: bool = False) -> Schedule:
    """The launch of `config`, which can run `problem`; it notes no moments."""
    (_, h, w), (_, p, q), (_, r, s), stride = problem.operand_size, problem.result_size, problem.filter_size, problem.stride[1]
    unit = _unit(problem, config)
    assert unit is not None
    _, pad_h, pad_w = problem.padding_before
    flipped = problem.direction == "dgrad"
    if flipped:
        pad_h, pad_w = r - 1 - pad_h, s - 1 - pad_w
    told = arguments(
        DepthwisePlanesArguments, planes=unit.planes, all_planes=problem.N * problem.K, band=unit.band, bands=unit.bands,
        strips=unit.strips, k=problem.K, multiplier=problem.K // problem.C, h=h, w=w, p=p, q=q, pad_h=pad_h, pad_w=pad_w,
        flipped=int(flipped), filters=_rounded(unit.planes * r * s), y_room=unit.y_room, x_size=problem.N * problem.C * h * w,
        **finish(problem),
    )  # fmt: skip
    defines = {
        "DTYPE": DTYPE_CODES[problem.dtype], "INDEX_64": int(needs_64_bits(problem)), "R": r, "S": s, "STRIDE": stride,
    }  # fmt: skip
    layer = finish_constants(told) | {"K": told.k, "MULTIPLIER": told.multiplier, "PAD_H": pad_h, "PAD_W": pad_w, "FLIPPED": told.flipped}
    buffers = INPUT, WEIGHT, BIAS, SCALE, RESIDUAL, RESULT
    shared = unit.room * accumulator_bytes(problem)
    return Schedule.plain(
        [[KernelLaunch("depthwise_planes", defines, unit.blocks, THREADS, buffers, (), shared=shared, arguments=told, layer=layer)]]
    )


def filter_key(problem: ConvProblem, config: DepthwisePlanes) -> None:
    """None: the kernel reads the filter as it is."""


def sum_order(problem: ConvProblem, config: DepthwisePlanes) -> Hashable:
    """The same for all configurations."""
    return DepthwisePlanes


def texts(device: Device) -> Iterator[TextFamily]:
    """A text for each filter, stride and type."""
    for taps in FILTERS:
        yield TextFamily(
            "depthwise_planes",
            {"DTYPE": tuple(DTYPE_CODES.values()), "INDEX_64": FLAG, "R": (taps,), "S": (taps,), "STRIDE": STRIDES},
        )


# ---- the choice

# Fitted to 27 times of 9 float32 layers on an H200 and an H100: root mean square of the error 15%. It is 14% for 15 layers in
# 16 bits on an H100.
CLOCK = 1120.0  # instructions of a scheduler in a microsecond
MEMORY = 2.3e6  # bytes a microsecond
BEGIN = 3.1  # microseconds of a launch
ALONE, LONE = 1.3, 1.3  # microseconds that a block waits for memory; relative time of instructions with one warp for each scheduler
RESIDENT = {3: 7, 5: 6, 7: 4}  # blocks of a multiprocessor, as registers allow


def configs(problem: ConvProblem, device: Device) -> Iterator[DepthwisePlanes]:
    """The configurations worth comparing for `problem`."""
    return (config for config in map(DepthwisePlanes, UNITS) if refusal(problem, config) is None)


def time(problem: ConvProblem, config: DepthwisePlanes, device: Device) -> float:
    """Microseconds that `config` should take: memory, or the multiprocessors' instructions, or one block after the other."""
    unit = _unit(problem, config)
    assert unit is not None
    taps, stride = problem.filter_size[1], problem.stride[1]
    task = ((ROWS - 1) * stride + taps) * (2 * taps + 4) + ROWS * taps * (taps + 1) + 100  # instructions
    moved = 12 * (math.prod(problem.operand_size) + math.prod(problem.result_size)) / (32 * 4 * THREADS)
    cycles = ceil(unit.tasks, THREADS) * task + moved * unit.planes / unit.bands  # of a scheduler, each of which has a warp of the block
    if problem.dtype == "float64":
        cycles *= 2
    fit = min(RESIDENT[taps], 227 * 1024 // (unit.room * accumulator_bytes(problem) + 1024))
    of_each = ceil(unit.blocks, device.multiprocessors)
    busy = 1.3 * of_each * cycles / CLOCK
    waits = ceil(of_each, fit) * (ALONE + LONE * cycles / CLOCK)
    read, written = math.prod(problem.input_shape), math.prod(problem.result_shape)
    elements = read + written * (2 if problem.has_residual else 1)
    return BEGIN + max(busy, waits, problem.itemsize * elements / MEMORY)


#: Pixels of a plane of the result up to which this engine wins in float64. Beyond, direct_tile.cu's tiles are filled, and its loop is
#: shorter.
SMALL_PLANE = 512


def choose(problem: ConvProblem, device: Device) -> tuple[float, DepthwisePlanes] | None:
    """The configuration that should be fastest, behind the microseconds it should take; None if another engine is faster.

    The model was not fitted to float64: there a rule decides, for small planes that fill the GPU.
    """
    if problem.dtype != "float64":
        return fastest((time(problem, config, device), config) for config in configs(problem, device))
    config = next(configs(problem, device), None)
    if config is None or problem.K != problem.C or math.prod(problem.result_size) > SMALL_PLANE:
        return None
    unit = _unit(problem, config)
    assert unit is not None
    return (BY_RULE, config) if unit.blocks >= device.multiprocessors else None
