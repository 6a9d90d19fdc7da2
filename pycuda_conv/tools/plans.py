"""Plans of many problems at once, and calls until all their kernels are compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pycuda_conv.background import OFTEN
from pycuda_conv.plan import Plan, cached_plan
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime import Device, waiting
from pycuda_conv.tools.terminal import track

MOST_WAITING = 120  # seconds to wait for compilers


def plans(problems: Sequence[ConvProblem], device: Device, with_moments: bool = False) -> list[Plan]:
    """The plans in the final form that calls take; `with_moments` as for :class:`Plan`.

    They are compiled several at a time where the device can do so.
    """
    pool = ThreadPoolExecutor()
    try:
        options = (False, True) if with_moments else ()  # in the form of calls: the cache distinguishes a default from a given argument
        coming = [pool.submit(lambda problem: cached_plan(problem, device, *options).final_form(), problem) for problem in problems]
        return [plan.result() for plan in track(coming, lambda _: "compiling")]
    except BaseException:
        waiting.stop()  # after Ctrl-C, plans that are not begun are left
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        waiting.stop(False)


def settle(call: Callable[[], Any], wait: Callable[[], Any], compiled: Callable[[], bool]) -> None:
    """Make calls until everything that is compiled behind them is there and in use."""
    end = time.monotonic() + MOST_WAITING
    for _ in range(3):  # first a better configuration, then kernels that know the layer's constants
        for _ in range(OFTEN + 1):
            call()
        wait()
        while not compiled() and time.monotonic() < end:
            time.sleep(0.01)
    call()
    wait()
