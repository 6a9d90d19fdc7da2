"""Configurations of one problem measured against each other, on the device and without torch."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from pycuda_conv import engines
from pycuda_conv.plan import Plan
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import Device, Step
from pycuda_conv.runtime.cuda import CudaDevice, Graph
from pycuda_conv.tools.oracle import SPACING, depth, relative_limit
from pycuda_conv.tools.report import median
from pycuda_conv.tools.timing import Effort, gpu_times, operand_sets, wall_times
from pycuda_conv.tune import Choice

#: All configurations are measured at first, then again those that were nearly as fast as the fastest.
FIRST, AGAIN = Effort(rounds=3, seconds=0.02, most_rounds=7), Effort(rounds=7, seconds=0.1)
NEARLY = 1.1

RANDOM_ELEMENTS = 4_000_037  # drawn on the host and repeated on the device; prime, so that no two rows are the same
SAMPLES, SAMPLE_ELEMENTS = 16, 2**18  # of a result that is too large to be compared as a whole


class WrongResultError(RuntimeError):
    """Two configurations compute different results, so one of them is wrong."""


def trials(problem: ConvProblem, device: CudaDevice, compiler: Compiler | None = None) -> list[Choice]:
    """What is worth trying for `problem`, the fastest first.

    Raises
    ------
    WrongResultError
    DeviceMemoryError
    """
    configs = engines.candidates(problem, device)
    with compiler or Compiler(device) as own:
        own.wait(problem, configs)
    times = device_times([Plan(problem, device, config=config) for config in configs])
    return sorted((Choice(config, us) for config, us in zip(configs, times, strict=True)), key=lambda choice: choice.us)
