"""Plans of many problems at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from pycuda_conv.plan import Plan, cached_plan
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime import Device
from pycuda_conv.tools.terminal import track


def plans(problems: Sequence[ConvProblem], device: Device, noted: bool = False) -> list[Plan]:
    """The plans that calls will take in the end, compiled several at a time where the device can; `noted` as for :class:`Plan`."""
    pool = ThreadPoolExecutor()
    try:
        options = (False, True) if noted else ()  # as calls ask for them: the cache tells an argument from none
        coming = [pool.submit(lambda problem: cached_plan(problem, device, *options).settled(), problem) for problem in problems]
        return [plan.result() for plan in track(coming, lambda _: "compiling")]
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, what has not begun is left
