"""Configurations of one problem measured against each other, on the device and without torch."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import lru_cache
from statistics import median
from typing import Any

import numpy as np

from pycuda_conv import background, engines, tune
from pycuda_conv.plan import Plan
from pycuda_conv.problem import ConvProblem
from pycuda_conv.rounding import SPACING, depth, relative_limit
from pycuda_conv.runtime import copies, driver
from pycuda_conv.runtime.base import Device, KernelLaunch
from pycuda_conv.runtime.device import CudaDevice
from pycuda_conv.runtime.graph import Graph
from pycuda_conv.runtime.streams import new_event
from pycuda_conv.runtime.workers import cores
from pycuda_conv.timing import Effort, gpu_times, operand_sets, wall_times
from pycuda_conv.tune import Choice

#: All configurations are measured at first, then again the planner's choice and those that were nearly as fast as the fastest.
FIRST, AGAIN = Effort(rounds=3, seconds=0.02, most_rounds=7), Effort(rounds=7, seconds=0.1)
NEARLY = 1.1

RANDOM_ELEMENTS = 4_000_037  # drawn on the host and repeated on the device; prime, so that no two rows are the same
SAMPLES, SAMPLE_ELEMENTS = 16, 2**15  # of a result too large to be compared as a whole: samples, and elements of each


class WrongResultError(RuntimeError):
    """Two configurations compute different results, so one of them is wrong."""


class Compiler:
    """Compiles the configurations worth trying: several kernels at a time, each once, until the end of a ``with`` block.

    Their kernels are loaded by whoever asks for their plans: a kernel that is loaded slows down others that are measured meanwhile.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._begun: dict[ConvProblem, tuple[list[engines.Config], list[Future[Any]]]] = {}
        self._pool = ThreadPoolExecutor(max(1, cores() - 1))
        self._coming: dict[tuple[str, str], Future[Any]] = {}

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def start(self, problem: ConvProblem) -> None:
        """Begin to compile the kernels for `problem`, after all that was begun before."""
        if problem in self._begun:
            return
        configs = engines.candidates(problem, self._device)
        kernels = []
        for step in _steps(problem, configs, self._device):
            name = step.kernel, step.source()
            if name not in self._coming:
                self._coming[name] = self._pool.submit(self._compiled, step)
            kernels.append(self._coming[name])
        self._begun[problem] = configs, kernels

    def _compiled(self, step: KernelLaunch) -> None:
        if not self._device.compiled(step):
            self._device.queue.cubin(step.source(), step.arch).result()

    def configs(self, problem: ConvProblem) -> list[engines.Config]:
        """The configurations worth trying for `problem`, compiled."""
        self.start(problem)
        configs, kernels = self._begun[problem]
        for kernel in kernels:
            kernel.result()
        return configs


def _steps(problem: ConvProblem, configs: Sequence[engines.Config], device: Device) -> Iterator[KernelLaunch]:
    """The launches of plans of `configs` in their final form."""
    for config in configs:
        schedule = engines.schedule(problem, config, device)
        if background.enabled():
            schedule = background.with_constants(schedule)
        for steps in (schedule.prepare, schedule.steps, schedule.whole, schedule.filter_last or ()):
            for step in steps:
                yield from step


def trials(problem: ConvProblem, device: CudaDevice, compiler: Compiler | None = None) -> list[Choice]:
    """All configurations worth trying for `problem`, with their times, the fastest first.

    Raises
    ------
    WrongResultError
    DeviceMemoryError
    """
    if compiler is None:
        with Compiler(device) as own:
            return trials(problem, device, own)
    configs = compiler.configs(problem)
    times = device_times([Plan(problem, device, config=config).final_form() for config in configs])
    return sorted((Choice(config, round(us, 3)) for config, us in zip(configs, times, strict=True)), key=lambda choice: choice.us)


# ---- on a GPU


def device_times(plans: Sequence[Plan]) -> list[float]:
    """Microseconds that each of `plans`, all of one problem, takes on the GPU, the packing of the filter included.

    Where the images are channels last, so are the filters of plans that can read or write them so. Results are compared before. The first
    plan, the planner's choice, is measured as often as those that are nearly as fast as the fastest.
    """
    device: Any = plans[0].device
    with device.current():
        clock = _Clock(device)
        operands = _Operands(device, clock.own, plans)
        operands.compare(plans)
        ways = [_way(plan, operands.buffers, clock.own) for plan in plans]
        times = _medians(clock, ways, operands.count, FIRST)
        chosen = [i for i, us in enumerate(times) if i == 0 or us <= NEARLY * min(times)]
        for i, us in zip(chosen, _medians(clock, [ways[i] for i in chosen], operands.count, AGAIN), strict=True):
            times[i] = us
        del operands
        device.pool.free_held()
    return times


def _way(plan: Plan, buffers: Sequence[Any], stream: Any) -> Callable[[int], None]:
    filter_last = (plan.reads_filter_last or plan.writes_filter_last) and plan.problem.layout == "NHWC"
    return lambda i: plan.launch(buffers[i], stream, filter_last=filter_last)


def _medians(clock: _Clock, ways: Sequence[Callable[[int], None]], sets: int, effort: Effort) -> list[float]:
    times, _ = gpu_times(clock, ways, sets, effort)
    return [median(taken) * 1e6 for taken in times]


class _Event:
    def __init__(self, stream: Any) -> None:
        self._event, self._stream = new_event(0), stream

    def record(self) -> None:
        driver.check(driver.libcuda().cuEventRecord(self._event, self._stream.handle), "cuEventRecord")

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds."""
        found, elapsed = ctypes.c_float(), getattr(driver.libcuda(), "cuEventElapsedTime_v2", driver.libcuda().cuEventElapsedTime)
        driver.check(elapsed(ctypes.byref(found), ctypes.c_void_p(self._event), ctypes.c_void_p(end._event)), "cuEventElapsedTime")
        return found.value

    def __del__(self) -> None:  # the measurement's context is current
        driver.libcuda().cuEventDestroy_v2(ctypes.c_void_p(self._event))


class _Clock:
    """The part of ``torch.cuda`` that :func:`gpu_times` uses, on PyCUDA; everything happens on one stream of our own."""

    def __init__(self, device: CudaDevice) -> None:
        self.cuda = self
        self.own = device.pipeline_streams()[1]

    def Event(self, enable_timing: bool) -> _Event:
        return _Event(self.own)

    def CUDAGraph(self) -> Graph:
        return Graph(self.own)

    def graph(self, graph: Graph) -> Any:
        return graph.capture()

    def synchronize(self) -> None:
        self.own.synchronize()

    # other streams need no warming up: none is used

    def Stream(self) -> _Clock:
        return self

    current_stream = Stream

    def wait_stream(self, other: Any) -> None:
        pass

    def stream(self, stream: Any) -> Any:
        return nullcontext()


class _Operands:
    """Random arrays for plans of one problem: so many sets that no launch finds what the last one left in the cache."""

    def __init__(self, device: CudaDevice, stream: Any, plans: Sequence[Plan]) -> None:
        self._stream = stream
        self.problem = problem = plans[0].problem
        self.count = operand_sets(problem, device.cache_bytes)
        self._blocks: list[Any] = []
        values = operands(problem, RANDOM_ELEMENTS)
        self._workspace_bytes = max(max(plan.workspace_bytes for plan in plans), 1)

        def room(nbytes: int) -> int:
            if not nbytes:  # an operand that is missing has address 0, as in calls
                return 0
            self._blocks.append(device.allocate(nbytes))
            device.order(None, stream)  # the pool's memory may still be in use by the default stream
            return int(self._blocks[-1])

        workspace = room(self._workspace_bytes)
        self.buffers = []
        for _ in range(self.count):
            places = [room(nbytes) for nbytes in (*plans[0].operand_bytes, plans[0].result_bytes)]
            for address, array, nbytes in zip(places, values, plans[0].operand_bytes, strict=False):
                if nbytes:
                    self._fill(address, array, nbytes)
            self.buffers.append((*places, workspace))

    def _fill(self, address: int, values: np.ndarray, nbytes: int) -> None:
        """Fill `nbytes` bytes at `address` with `values`, repeated."""
        copies.to_device(address, values, self._stream)
        done = values.nbytes
        while done < nbytes:
            part = min(done, nbytes - done)
            copies.within(address + done, address, part, self._stream)
            done += part

    def compare(self, plans: Sequence[Plan]) -> None:
        """Run each of `plans` once; a ``WrongResultError`` if their results differ."""
        *_, result, workspace = self.buffers[0]
        expected = None
        for plan in plans:
            copies.fill(result, 0xFF, plan.result_bytes, self._stream)  # NaN in every dtype
            copies.fill(workspace, 0xFF, self._workspace_bytes, self._stream)
            plan.launch(self.buffers[0], self._stream)
            found = self._sample(result, plan.result_bytes)
            if expected is None:
                expected = found
            wrong = difference(self.problem, found, expected)
            if wrong:
                raise WrongResultError(f"{plan.config} and {plans[0].config} differ on {self.problem}: {wrong}")

    def _sample(self, address: int, nbytes: int) -> np.ndarray:
        """The result, or parts of it, in float64."""
        itemsize = self.problem.itemsize
        count = nbytes // itemsize
        part = min(count, SAMPLE_ELEMENTS)
        starts = [0] if count <= SAMPLES * part else [i * (count - part) // (SAMPLES - 1) for i in range(SAMPLES)]
        host = np.empty((len(starts), count if len(starts) == 1 else part), self.problem.storage)
        for row, start in zip(host, starts, strict=True):
            copies.to_host(row, address + start * itemsize, self._stream)
        self._stream.synchronize()
        if self.problem.dtype == "bfloat16":
            return (host.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return host.astype(np.float64)


def operands(problem: ConvProblem, most: int) -> list[np.ndarray]:
    """Normal numbers for each array that the problem reads, at most `most` of them, none where it has none; results are about 1 then."""
    scales = (1.0, 1 / math.sqrt(max(depth(problem), 1)), 1.0, 1.0, 1.0)
    counts = (min(math.prod(shape or (0,)), most) for shape in problem.operand_shapes)
    wanted = zip(problem.operand_dtypes, counts, scales, strict=True)
    return [_normal(i, dtype, count, scale) for i, (dtype, count, scale) in enumerate(wanted)]


def _draw(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count, np.float32)


#: Drawing takes longer than a measurement, so what all problems are filled with is kept.
_drawn = lru_cache(maxsize=5)(_draw)


def _normal(seed: int, dtype: str, count: int, scale: float) -> np.ndarray:
    values = _draw(seed, count) if count > RANDOM_ELEMENTS else _drawn(seed, RANDOM_ELEMENTS)[:count]
    values = values * np.float32(scale)
    return (values.view(np.uint32) >> 16).astype(np.int16) if dtype == "bfloat16" else values.astype(dtype)


def difference(problem: ConvProblem, found: np.ndarray, expected: np.ndarray) -> str | None:
    """A text that says how far two results are apart, or None if rounding explains the difference."""
    scale = float(np.sqrt(np.mean(expected * expected)))
    error = np.abs(found - expected)
    relative = float(np.sqrt(np.mean(error * error))) / scale
    limit = relative_limit(problem)
    within = error <= 16 * limit * scale + 2 * SPACING[problem.dtype][0] * np.abs(expected)
    if relative <= 2 * limit and within.all():  # <=: NaN is a difference
        return None
    return f"{error.size - int(within.sum()):,} of {error.size:,} elements by more than rounding, relative error {relative:.1e}"


# ---- on OpenCL


def wall_time(plan: Plan) -> float:
    """Microseconds by the host's clock that one call of `plan` takes on OpenCL."""
    arrays = operands(plan.problem, 2**62)
    out = np.empty(math.prod(plan.result_shape), plan.problem.storage)

    def call(_: int) -> None:
        plan.device.run_on_host_arrays(plan.launch, arrays, out, plan.workspace_bytes, None)

    return median(wall_times((call,), 1, AGAIN)[0]) * 1e6


def measured(plan: Plan) -> float:
    """Microseconds that `plan` takes on random arrays."""
    return device_times([plan])[0] if plan.device.backend == "cuda" else wall_time(plan)


tune.measure = sys.modules[__name__]
