"""Compilation in the background: of a better configuration's kernels, and of kernels that know a layer's constants.

A call waits for the compiler only if no compiled kernel can serve it. The results don't show which kernel served a call, nor when another
one took over: only configurations that add up in the same order substitute for one another.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain, islice, product
from typing import Any

from pycuda_conv import engines
from pycuda_conv.engines.geometry import ceil
from pycuda_conv.engines.schedule import Schedule
from pycuda_conv.engines.tensor_cores import products
from pycuda_conv.errors import VariableError
from pycuda_conv.problem import ConvProblem, Size3
from pycuda_conv.runtime.base import Device, KernelLaunch, LibraryCall
from pycuda_conv.runtime.compiler import CompileError
from pycuda_conv.runtime.workers import cores
from pycuda_conv.tune import lookup, measured_configs

log = logging.getLogger("pycuda_conv")

#: After so many calls of a plan by general kernels, the kernels that know the layer's constants are compiled.
OFTEN = 10


def enabled() -> bool:
    """Whether kernels are compiled in the background, and know layers' constants: unless ``PYCUDA_CONV_BACKGROUND`` is ``0``."""
    text = os.environ.get("PYCUDA_CONV_BACKGROUND", "1")
    if text not in ("0", "1"):
        raise VariableError(f"PYCUDA_CONV_BACKGROUND must be 0 or 1, got {text!r}")
    return text == "1"


def launches(schedule: Schedule) -> list[KernelLaunch]:
    """All launches of kernels that a plan of `schedule` may make."""
    made = (launch for step in (*schedule.whole, *(schedule.filter_last or ())) for launch in step)
    return [launch for launch in made if not isinstance(launch, LibraryCall)]


#: The configurations that served calls of this process, in that order: their kernels are probably compiled.
configs_used: dict[engines.Config, None] = {}

#: How many times as long as the better configuration, by prediction, a substitute may take on a GPU: a captured graph keeps it for good.
SLOWEST = 3
#: On OpenCL, where no model predicts times, larger problems have no substitute: a slow one may take longer than the compiler does.
MOST_FLOPS = 1e8
#: How many times as long a configuration may take that is preferred because it compiles faster.
HARDLY = 1.15


def same_bits_substitute(
    problem: ConvProblem, config: engines.Config, device: Device, schedules: dict[engines.Config, Schedule] | None = None
) -> engines.Config | None:
    """A configuration that gives the same bits as `config`, is not much slower, and whose kernels are compiled; or None.

    Preferred is a configuration that this process has used, then any that is compiled, then any whose compilation has begun. Configurations
    measured on such a GPU count as used: their kernels may have served the layer at other sizes. The schedules made on the way are added to
    `schedules`.
    """
    known: dict[engines.Config, Schedule] = {} if schedules is None else schedules
    coming = []
    if device.backend == "opencl" and problem.flops > MOST_FLOPS:
        return None
    for one in chain((config,), _not_slow(problem, config, _alike(problem, config, device), device)):
        if one not in known:
            try:
                known[one] = engines.schedule(problem, one, device)
            except ValueError:  # it served on a GPU of this process whose blocks have more shared memory
                continue
        left = missing(initial_form(known[one], device), device)
        if not left:
            return one
        if all(map(device.coming, left)):
            coming.append(one)
    return coming[0] if coming else None


def _alike(problem: ConvProblem, config: engines.Config, device: Device) -> Iterator[engines.Config]:
    """Other configurations that give the same bits as `config`, the fastest first: of those that this process has used, then of all.

    Mostly a used one serves. The others take longer to find, and are looked for only if none does.
    """
    before = tuple(configs_used)
    yield from engines.fastest_first(problem, (one for one in engines.same_bits(problem, config, before) if one != config), device)
    yield from (one for one in engines.alternatives(problem, config, device, measured_configs(device)) if one not in before)


def _not_slow(problem: ConvProblem, config: engines.Config, others: Iterable[engines.Config], device: Device) -> Iterator[engines.Config]:
    """The configurations of `others` that are not much slower than `config`."""
    best = engines.predicted(problem, config, device) if device.backend == "cuda" else None  # the models are of GPUs
    for one in others:
        if best is None or (engines.predicted(problem, one, device) or 0) <= SLOWEST * best:
            yield one


def fastest_to_compile(problem: ConvProblem, config: engines.Config, device: Device) -> engines.Config:
    """`config`, or one that gives the same bits, takes hardly longer and compiles much faster: its tile is at most half as large."""
    best = engines.predicted(problem, config, device) if foresees(device) else None
    if best is None or products(problem) == 1:  # a text for one product is short
        return config
    same = (one for one in engines.alternatives(problem, config, device) if (engines.predicted(problem, one, device) or 0) <= HARDLY * best)
    smallest = min(same, key=lambda one: one.tile, default=config)
    return smallest if 2 * smallest.tile <= config.tile else config


def last_resort(problem: ConvProblem, device: Device) -> engines.Config | None:
    """Where no compiler works: any configuration whose kernels are compiled."""
    configs = engines.candidates(problem, device)
    return next((one for one in configs if not missing(initial_form(engines.schedule(problem, one, device), device), device)), None)


# ---- compilation ahead of calls

#: Other numbers of images to foresee, as parts of a problem's own; so are one more than its own, and one.
BATCHES = (2.0, 0.5, 4.0, 0.25)
#: Other sizes of images to foresee: parts of a problem's own, and its size rounded up to a multiple, with a rest added: (multiple, rest).
SIZES, FORMS = (0.5, 2.0), ((8, 0), (4, 1))
#: Channels and pixels of a common network's layers; each pair occurs with all filters and strides of LAYERS.
PYRAMID = ((64, 56), (128, 28), (256, 14), (512, 7))
LAYERS = ((3, 1), (1, 1), (3, 2), (1, 2))
MOST_LIKELY = 32  # kernels to compile
SPARE_CORES = 8  # cores that a machine has to have: on fewer, such kernels would slow down those that are waited for

#: An order of sums counts up to this many times the shortest prediction: it is likely to be chosen for the layer's next size of images.
NEARLY_AS_FAST = 1.3

#: By kinds of arrays: the layers of a common network whose kernels are still to be foreseen.
_foreseen: dict[Hashable, deque[ConvProblem]] = {}


def foresees(device: Device) -> bool:
    """Whether kernels are compiled on such a device before they are asked for."""
    return device.backend == "cuda" and cores() >= SPARE_CORES


def foresee(problem: ConvProblem, missing: list[KernelLaunch], device: Device) -> None:
    """Begin with the kernels that a call of `problem` waits for, and meanwhile compile those that may be asked for next."""
    device.begin(missing)
    for launch in islice(likely(problem, missing, device), MOST_LIKELY):
        device.compile_in_background([launch])
        if not any(map(device.coming, missing)):
            return


def likely(problem: ConvProblem, own: Iterable[KernelLaunch], device: Device) -> Iterator[KernelLaunch]:
    """Launches whose kernels a process may soon wait for, the likeliest first; it waits for its `own` of `problem` now.

    First come the layer's :func:`other_orders`. Then come the layers of a common network, once for each kind of array and direction. Last
    comes the same layer with more and with fewer images, and with larger and smaller ones. These kernels take the layer's numbers as
    arguments, so each serves many layers. Those of other orders get constants if the layer's epilogue is at most a bias: that halves their
    compile time. A kernel is left out if others could substitute for it.
    """
    found = {launch.source() for launch in own}
    of_other_orders = _absent(((problem, config) for config in other_orders(problem, device)), found, device)
    yield from of_other_orders if _fused(problem) else map(_known, of_other_orders)
    yield from _absent(((one, _choice(one, device)) for one in chain((problem,), _related(problem))), found, device)


def _fused(problem: ConvProblem) -> bool:
    return problem.has_scale or problem.activation is not None


def other_orders(problem: ConvProblem, device: Device) -> list[engines.Config]:
    """For each other order of sums that should take hardly longer than the planner's choice, its configuration that compiles fastest.

    The planner may choose any of these orders for other numbers and sizes of the layer's images, and then no kernel of another order may
    substitute. Among configurations that should take about as long, the one with the smallest tile compiles fastest.
    """
    orders: dict[Hashable, list[tuple[float, engines.Config]]] = {}
    for us, config in engines.predictions(problem, device):
        orders.setdefault(engines.order(problem, config), []).append((us, config))
    shortest = min((timed[0][0] for timed in orders.values()), default=0.0)
    choice = _choice(problem, device)
    if choice is not None:
        orders.pop(engines.order(problem, choice), None)
    near = (timed for timed in orders.values() if timed[0][0] <= NEARLY_AS_FAST * shortest)
    return [min((config for us, config in timed if us <= NEARLY_AS_FAST * timed[0][0]), key=lambda config: config.tile) for timed in near]


def _absent(
    choices: Iterable[tuple[ConvProblem, engines.Config | None]], found: set[str], device: Device
) -> Iterator[KernelLaunch]:
    """General launches of `choices` that no compiled kernel can replace, whose kernels are not compiled, being compiled or in `found`.

    Their texts are added to `found`.
    """
    configs: dict[engines.Config, None] = {}

    def there(launch: KernelLaunch) -> bool:
        return launch.source() in found or device.compiled(launch) or device.coming(launch) or device.queued(launch)

    def not_there(one: ConvProblem, config: engines.Config) -> list[KernelLaunch]:
        return [launch for launch in launches(engines.schedule(one, config, device)) if not (there(_known(launch)) or there(launch))]

    for one, config in choices:
        if config is None:
            continue
        configs[config] = None
        others = _not_slow(one, config, engines.same_bits(one, config, configs), device)
        if all(not_there(one, other) for other in others):
            left = {launch.source(): launch for launch in not_there(one, config)}
            found.update(left)
            yield from left.values()


def _choice(problem: ConvProblem, device: Device) -> engines.Config | None:
    """The configuration that a plan of `problem` takes; None where no engine runs it."""
    measured = lookup(problem, device)
    return measured.config if measured else engines.find(problem, device)


def _related(problem: ConvProblem) -> Iterator[ConvProblem]:
    more, most = problem.N + 1, 4 * problem.N
    yield from _network(problem, (problem.N,))
    for n in (more, *(max(1, round(part * problem.N)) for part in BATCHES), 1):
        yield replace(problem, N=n)
    sizes = [tuple(round(part * n) for n in problem.input_size) for part in SIZES]
    sizes += [tuple(n if n == 1 else ceil(n, multiple) * multiple + rest for n in problem.input_size) for multiple, rest in FORMS]
    yield from (one for d, h, w in sizes if (one := _resized(problem, (d, h, w))))
    yield from _network(problem, (more, 1, most))


def _network(problem: ConvProblem, batches: tuple[int, ...]) -> Iterator[ConvProblem]:
    """Layers of a common network with arrays like the problem's, for these numbers of images; each is given once in a process."""
    fused, dense_2d = _fused(problem), problem.ndim == 2 and problem.groups == 1
    kind = problem.dtype, problem.precision, problem.layout, problem.direction, fused, dense_2d, len(batches)
    if kind not in _foreseen:
        _foreseen[kind] = deque(_network_layers(problem, batches, fused) if dense_2d else ())
    left = _foreseen[kind]
    while True:
        try:
            one = left.popleft()
        except IndexError:
            return
        yield one


def _network_layers(problem: ConvProblem, batches: tuple[int, ...], fused: bool) -> Iterator[ConvProblem]:
    for n, (k, size), (taps, stride) in product(batches, PYRAMID, LAYERS):
        if stride > 1 and (k, size) == PYRAMID[0]:  # in networks, pooling comes before that layer
            continue
        pad, written = (0, taps // 2, taps // 2), (1, size, size)
        c, read = (k, written) if stride == 1 else (k // 2, (1, stride * size, stride * size))
        one = replace(
            problem, N=n, C=c, K=k, input_size=read, filter_size=(1, taps, taps), output_size=written, stride=(1, stride, stride),
            dilation=(1, 1, 1), padding_before=pad, padding_after=pad, has_residual=False,
        )  # fmt: skip
        yield one
        if fused and stride == 1:
            yield replace(one, has_residual=True)


def _resized(problem: ConvProblem, size: Size3) -> ConvProblem | None:
    """The same layer for images of `size`; None where its filter does not fit them. Axes of one pixel keep that length."""
    axes = zip(size, problem.input_size, problem.upsample, strict=True)
    d, h, w = (1 if before == 1 else ceil(n, times) * times for n, before, times in axes)
    written = problem.output_size_of((d, h, w))
    return replace(problem, input_size=(d, h, w), output_size=written) if min(written) > 0 else None


def missing(schedule: Schedule, device: Device) -> list[KernelLaunch]:
    """The launches whose kernels are not compiled."""
    return [launch for launch in launches(schedule) if not device.compiled(launch)]


def initial_form(schedule: Schedule, device: Device) -> Schedule:
    """The form of a plan's launches at first.

    A kernel knows its layer's constants if the kernel with them is compiled, or if a compiler has to run anyway. A general kernel serves
    where it alone is compiled or being compiled.
    """
    if not (enabled() and device.constants_pay and has_constants(schedule)):
        return schedule

    def sooner(launch: KernelLaunch) -> KernelLaunch:
        both = (_known(launch), launch) if launch.layer else (launch,)
        return next((one for there in (device.compiled, device.coming, device.queued) for one in both if there(one)), both[0])

    return _each(schedule, sooner)


def with_constants(schedule: Schedule) -> Schedule:
    """The same launches with kernels that know their layer's constants."""
    return _each(schedule, _known)


def _known(launch: KernelLaunch) -> KernelLaunch:
    """The same launch with the kernel that knows its layer's constants."""
    return replace(launch, defines={**launch.defines, **launch.layer}, layer={})


def _each(schedule: Schedule, change: Callable[[KernelLaunch], KernelLaunch]) -> Schedule:
    def changed(steps: list[list[KernelLaunch]]) -> list[list[KernelLaunch]]:
        return [[change(launch) for launch in step] for step in steps]

    last = None if schedule.filter_last is None else changed(schedule.filter_last)
    steps, whole = changed(schedule.steps), changed(schedule.whole)
    return replace(schedule, prepare=changed(schedule.prepare), steps=steps, whole=whole, filter_last=last)


def has_constants(schedule: Schedule) -> bool:
    """Whether any kernel gains by its layer's constants."""
    return any(launch.layer for launch in launches(schedule))


class BackgroundCompile:
    """Kernels that are compiled in the background of a plan's calls.

    Parameters
    ----------
    device : Device
    kernels : list of KernelLaunch
    calls : int
        The kernels are compiled after so many calls of the plan; at once if it is 0.
    tell : callable
        Called, in any thread, once the kernels are compiled.
    """

    def __init__(self, device: Device, kernels: list[KernelLaunch], calls: int = 0, tell: Callable[[], None] = lambda: None) -> None:
        self._device, self._kernels, self._left = device, kernels, calls
        self._lock = threading.Lock()
        self._coming: list[Future[Any]] | None = None
        self._taken = False
        self._tell = tell
        if not calls:
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._coming is None:
                self._coming = self._device.compile_in_background(self._kernels)
        for one in self._coming:
            one.add_done_callback(lambda _: self._tell() if self.is_done() else None)

    def is_done(self) -> bool:
        """Whether the kernels are compiled, or their compiler has failed."""
        return self._coming is not None and all(one.done() for one in self._coming)

    def lend(self) -> int:
        """Calls that may be made uncounted, which this counts now: all but the last one that is left. -1: no more are to be counted."""
        if self._coming is not None:
            return -1
        lent, self._left = max(self._left - 1, 0), min(self._left, 1)
        return lent

    def ready(self, stream: Any) -> bool:
        """Count a call. True once, to one thread, when the kernels may be taken; never while a stream is being captured.

        Raises
        ------
        Exception
            The compiler's error.
        """
        if self._coming is None:
            self._left -= 1
            if self._left <= 0:
                self._start()
            return False
        if not all(one.done() for one in self._coming) or self._device.capturing(stream):
            return False
        if any(one.cancelled() for one in self._coming):  # a caller could not wait for its turn
            self._coming = self._device.compile_in_background(self._kernels)
            return False
        for one in self._coming:
            one.result()
        with self._lock:
            taken, self._taken = self._taken, True
        return not taken


_said: set[str] = set()


def log_once(error: Exception) -> None:
    """Log that the compiler failed in the background: once for each message, whatever the kernel."""
    how = str(error) if isinstance(error, CompileError) else repr(error)
    log.log(logging.DEBUG if _said else logging.WARNING, "compiling in the background failed, so slower kernels go on: %s", how)
    _said.add(how)
