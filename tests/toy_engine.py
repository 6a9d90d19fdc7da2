"""An engine in two files, this one and toy_engine.cu: convolutions with a 1x1 filter that sees one channel. The tests register it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pycuda_conv.engines.base import BY_RULE, Config
from pycuda_conv.engines.geometry import ceil, needs_64_bits
from pycuda_conv.engines.schedule import INPUT, RESULT, WEIGHT, Schedule
from pycuda_conv.engines.variants import VariantSet
from pycuda_conv.problem import DTYPE_CODES, ConvProblem
from pycuda_conv.runtime.base import Device, KernelLaunch


@dataclass(frozen=True)
class Toy(Config):
    """Threads a block."""

    THREADS: int = 128


class ToyArguments(NamedTuple):
    """The struct of this name in toy_engine.cu."""

    elements: int
    plane: int
    channels: int


CONFIGS = (Toy,)
LAYOUTS = ("NCHW",)
MOST_VARIANTS = {"cuda": 8, "opencl": 8}


def refusal(problem: ConvProblem, config: Toy) -> str | None:
    """Why `config` can't run `problem`, or None if it can."""
    one = (1, 1, 1)
    if problem.direction != "fprop" or problem.layout != "NCHW" or not problem.C == problem.K == problem.groups:
        return "it computes forward convolutions of NCHW arrays, one channel of the result from one of the input"
    if problem.filter_size != one or problem.stride != one or problem.input_size != problem.output_size:
        return "it takes 1x1 filters without stride and padding"
    if problem.has_bias or problem.has_scale or problem.has_residual or problem.activation:
        return "it writes plain sums"
    return None if config.THREADS % 32 == 0 else "THREADS must be a multiple of 32"


def configs(problem: ConvProblem, device: Device) -> Iterator[Toy]:
    """The configurations worth comparing for `problem`."""
    return (one for one in (Toy(128), Toy(256)) if refusal(problem, one) is None)


def time(problem: ConvProblem, config: Toy, device: Device) -> float:
    """Microseconds that `config` should take: a launch, and the bytes of both arrays."""
    return 2 + 128 / config.THREADS + problem.bytes / 3e6


def choose(problem: ConvProblem, device: Device) -> tuple[float, Toy] | None:
    """The configuration that should be the fastest. The direct engine has a rule for such problems too: this one comes before it."""
    best = min(configs(problem, device), key=lambda config: time(problem, config, device), default=None)
    return None if best is None else (BY_RULE, best)


def schedule(problem: ConvProblem, config: Toy, device: Device, with_moments: bool = False) -> Schedule:
    """The launches of `config`, which can run `problem`."""
    args = ToyArguments(math.prod(problem.result_shape), math.prod(problem.output_size), problem.C)
    defines = {"DTYPE": DTYPE_CODES[problem.dtype], "INDEX_64": int(needs_64_bits(problem)), "THREADS": config.THREADS}
    grid = ceil(args.elements, config.THREADS)
    return Schedule.plain([[KernelLaunch("toy_engine", defines, grid, config.THREADS, (INPUT, WEIGHT, RESULT), (), arguments=args)]])


def sum_order(problem: ConvProblem, config: Toy) -> None:
    """None: nothing is added up."""


def variants(device: Device) -> tuple[VariantSet, ...]:
    """A text for a type and a number of threads."""
    choices = {"DTYPE": tuple(DTYPE_CODES.values()), "INDEX_64": (0, 1), "THREADS": (128, 256)}
    return (VariantSet("toy_engine", choices),)
