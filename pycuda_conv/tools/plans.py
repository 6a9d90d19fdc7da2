"""Kernels that are compiled together before the first of them is asked for, plans of many problems, and calls until all is compiled.

On a GPU a compiler works on each core, on OpenCL a process, as PoCL compiles one kernel at a time.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from functools import partial
from itertools import islice
from typing import Any

from pycuda_conv import background, engines
from pycuda_conv.background import OFTEN
from pycuda_conv.plan import Plan, cached_plan
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime import Device, waiting
from pycuda_conv.runtime.base import KernelLaunch
from pycuda_conv.runtime.cache import trusted_folder
from pycuda_conv.runtime.workers import cores
from pycuda_conv.tools.terminal import named_device, track
from pycuda_conv.tune import lookup

MOST_WAITING = 120  # seconds to wait for compilers
MOST_AHEAD = 48  # problems whose kernels are compiled while earlier ones are measured


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


class Ahead:
    """Plans in the final form, whose kernels are compiled while earlier ones are measured.

    Parameters
    ----------
    problems : iterable of ConvProblem
        In the order in which their plans will be asked for.
    device : CudaDevice
    """

    def __init__(self, problems: Iterable[ConvProblem], device: Any) -> None:
        self._rest, self._device = iter(dict.fromkeys(problems)), device
        self._pool = ThreadPoolExecutor(cores())
        self._coming: dict[ConvProblem, list[Future[None]]] = {}

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, problem: ConvProblem) -> None:
        tuned = lookup(problem, self._device)
        schedule = engines.schedule(problem, tuned.config if tuned else engines.choose(problem, self._device), self._device)
        launches = background.launches(background.with_constants(schedule))
        self._coming[problem] = [self._pool.submit(_cubin, launch, self._device) for launch in launches]

    def plan(self, problem: ConvProblem) -> Plan:
        """The plan of a problem, after all that it launches is compiled."""
        for coming in islice(self._rest, max(0, MOST_AHEAD - len(self._coming))):
            self._start(coming)
        for kernel in self._coming.pop(problem, ()):
            kernel.result()
        return cached_plan(problem, self._device).final_form()


def _cubin(launch: KernelLaunch, device: Any) -> None:
    """Compile a launch's kernel without loading it, which would slow down what is measured meanwhile."""
    if not device.compiled(launch):
        device.queue.cubin(launch.source(), launch.arch).result()


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


# ---- compilers at work together


class Finished(Sequence[Any]):
    """Futures in the order in which they finish, with a length."""

    def __init__(self, futures: Iterable[Future[Any]]) -> None:
        self._futures = list(futures)

    def __len__(self) -> int:
        return len(self._futures)

    def __iter__(self) -> Iterator[Any]:
        return as_completed(self._futures)

    def __getitem__(self, index: Any) -> Any:
        return self._futures[index]


def compile_together(launches: Iterable[KernelLaunch], device: Device) -> list[str]:
    """Compile the kernels of `launches` that are not compiled yet, as many at a time as there are cores, behind a progress bar.

    Where OpenCL has no cache on disk, nothing is compiled: another process could not hand over its kernels.

    Returns
    -------
    list of str
        What the compiler said of each kernel that failed. Whoever launches that kernel gets the error.
    """
    missing = list({one.source(): one for one in launches if not device.compiled(one)}.values())
    if not missing:
        return []
    return _on_gpu(missing, device) if device.backend == "cuda" else _on_opencl(missing)


def compile_for(wanted: Iterable[tuple[ConvProblem, engines.Config]], device: Device) -> list[str]:
    """The same for the kernels that plans of such problems and configurations take at first."""
    schedules = (background.initial_form(engines.schedule(problem, config, device), device) for problem, config in wanted)
    return compile_together([launch for schedule in schedules for launch in background.launches(schedule)], device)


def _on_gpu(missing: Sequence[KernelLaunch], device: Any) -> list[str]:
    return _failures(ThreadPoolExecutor(cores()), partial(_cubin, device=device), missing)


def _on_opencl(missing: Sequence[KernelLaunch]) -> list[str]:
    """Several processes compile for the cache on disk, as PoCL compiles one kernel at a time."""
    if trusted_folder() is None:
        return []
    pool = ProcessPoolExecutor(min(cores(), len(missing)), multiprocessing.get_context("spawn"), initializer=_ignore_ctrl_c)
    return _failures(pool, _compile, missing)


def _failures(pool: Any, work: Any, missing: Sequence[KernelLaunch]) -> list[str]:
    failed = []
    try:
        coming: dict[Future[None], str] = {pool.submit(work, one): one.file or one.kernel for one in missing}
        for done in track(Finished(coming), coming.__getitem__):
            if done.exception() is not None:
                failed.append(f"{coming[done]}: {done.exception()}")
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, kernels that are not begun are left
    return failed


def _ignore_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it reaches the whole group of processes, and the first one ends the others


def _compile(launch: KernelLaunch) -> None:
    device: Any = named_device("opencl")
    device.compile(launch)
