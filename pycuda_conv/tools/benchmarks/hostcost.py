"""The host's time for a call, of this package and of torch on the same arrays, in turn.

Launches don't wait for the GPU, so a call is timed until it returns. After some twenty calls in a row the GPU is waited for, so that the
queue of launches never fills up. Calls on numpy arrays return when the result is there; their times include that.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import pycuda_conv
from pycuda_conv.plan import Plan
from pycuda_conv.problem import ConvProblem
from pycuda_conv.tools import bench
from pycuda_conv.tools.oracle import cudnn_set, torch_precision
from pycuda_conv.tools.report import header_lines, median, number, write_json
from pycuda_conv.tools.terminal import OK, Table, ToolError, console, require, table, track

Call = Callable[[], Any]

CALLS = 20  # calls in a row before the GPU is waited for
THREADS = (1, 2, 4, 8)
MOST_WAITING = 20  # seconds, for compilers


@dataclass(frozen=True)
class Case:
    """Calls of ours, by name, that do the same as torch's call. All of them are made inside `inside`, ours inside `around` as well."""

    what: str
    torch_call: Call
    ours: dict[str, Call]
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext
    calls: int = CALLS
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class Row:
    """Microseconds of the host's time for a call."""

    what: str
    call: str
    torch_us: float
    ours_us: float

    @property
    def ratio(self) -> float:
        """Our time divided by torch's: below 1, ours is shorter."""
        return self.ours_us / self.torch_us

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        return self.what, self.call, f"{self.torch_us:.1f}", f"{self.ours_us:.1f}", f"{self.ratio:.2f}"


COLUMNS = ("what", "call", "torch us", "ours us", "ours / torch")
_SMALL = (4, 16, 32, 32), (32, 16, 3, 3)
#: Input, filter, dtype, whether the input is channels last: one launch; packed fp32; 16 bits read as they lie.
LAYERS = (
    (*_SMALL, "float32", False), ((1, 256, 14, 14), (256, 256, 3, 3), "float32", False),
    ((8, 64, 56, 56), (64, 64, 3, 3), "float16", True),
)  # fmt: skip


def _label(x: Sequence[int], w: Sequence[int], dtype: str, last: bool) -> str:
    return f"{'x'.join(map(str, x))} -> {w[0]} {w[2]}x{w[3]}, {dtype}{', channels last' if last else ''}"


def layer_case(torch: Any, place: str, x_shape: Sequence[int], w_shape: Sequence[int], dtype: str, last: bool) -> Case:
    """A layer, by each way to call it."""
    form = torch.channels_last if last else torch.contiguous_format
    x, w = (torch.randn(s, device=place).to(getattr(torch, dtype)).contiguous(memory_format=form) for s in (x_shape, w_shape))
    plan = Plan(ConvProblem.forward(2, x_shape, w_shape, padding=1, dtype=dtype, layout="NHWC" if last else "NCHW"), place)
    bound, out = plan.bind(w), torch.empty_like(torch.nn.functional.conv2d(x, w, padding=1))
    ours: dict[str, Call] = {
        "conv2d": lambda: pycuda_conv.conv2d(x, w, padding=1), "conv2d, out=": lambda: pycuda_conv.conv2d(x, w, padding=1, out=out),
        "plan": lambda: plan(x, w), "plan, out=": lambda: plan(x, w, out=out),
        "bound": lambda: bound(x), "bound, out=": lambda: bound(x, out=out),
    }  # fmt: skip
    return Case(_label(x_shape, w_shape, dtype, last), lambda: torch.nn.functional.conv2d(x, w, padding=1), ours)


def module_case(torch: Any, place: str, x_shape: Sequence[int], w_shape: Sequence[int]) -> Case:
    """A layer as a module."""
    from pycuda_conv import nn

    x = torch.randn(x_shape, device=place)
    theirs, ours = (kind(w_shape[1], w_shape[0], 3, padding=1, device=place) for kind in (torch.nn.Conv2d, nn.Conv2d))
    return Case(f"nn.Conv2d, {_label(x_shape, w_shape, 'float32', False)}", lambda: theirs(x), {"nn.Conv2d": lambda: ours(x)})


def copied_cases(torch: Any, place: str) -> Iterator[Case]:
    """Arrays that kernels can't read as they lie, in float16 and in float32."""
    functional, last = torch.nn.functional, torch.channels_last
    for dtype in ("float16", "float32"):
        x, w = (torch.randn(shape, device=place).to(getattr(torch, dtype)) for shape in ((8, 128, 28, 28), (64, 64, 3, 3)))
        own = x[:, :64].contiguous()
        arrays = {
            "x channels last, a slice of its channels": (x.contiguous(memory_format=last)[:, 32:96], w),
            "x in C order, w channels last": (own, w.contiguous(memory_format=last)),
            "x expanded along channels": (own[:, :1].expand(-1, 64, -1, -1), w), "every second column of x": (x[:, :64, :, ::2], w),
        }  # fmt: skip
        for what, (images, filters) in arrays.items():

            def theirs(images: Any = images, filters: Any = filters) -> Any:
                return functional.conv2d(images, filters, padding=1)

            def ours(images: Any = images, filters: Any = filters) -> Any:
                return pycuda_conv.conv2d(images, filters, padding=1)

            yield Case(f"{what}, {dtype}", theirs, {"conv2d": ours})


def mode_cases(torch: Any, place: str) -> Iterator[Case]:
    """The small layer in special states of torch: on another stream, in inference mode, as a module, with gradients."""
    from pycuda_conv import nn

    functional = torch.nn.functional
    x, w = (torch.randn(shape, device=place) for shape in _SMALL)
    side = torch.cuda.Stream(place)
    plain = {"conv2d": lambda: pycuda_conv.conv2d(x, w, padding=1)}

    def theirs() -> Any:
        return functional.conv2d(x, w, padding=1)

    yield Case("on a side stream", theirs, plain, lambda: torch.cuda.stream(side))
    yield Case("in inference mode", theirs, plain, torch.inference_mode)
    yield from (module_case(torch, place, *layer[:2]) for layer in LAYERS[:2])
    images, filters = x.clone().requires_grad_(), w.clone().requires_grad_()
    dy = torch.randn_like(theirs())
    grad = torch.autograd.grad

    yield Case(
        "forward, with gradients", lambda: functional.conv2d(images, filters, padding=1),
        {"conv2d": lambda: pycuda_conv.conv2d(images, filters, padding=1)}, torch.enable_grad,
    )
    yield Case(
        "forward and backward", lambda: grad(functional.conv2d(images, filters, padding=1), (images, filters), dy),
        {"conv2d": lambda: grad(pycuda_conv.conv2d(images, filters, padding=1), (images, filters), dy)}, torch.enable_grad,
    )
    yield Case(
        "forward and backward, the filter's gradient alone", lambda: grad(functional.conv2d(x, filters, padding=1), (filters,), dy),
        {"conv2d": lambda: grad(pycuda_conv.conv2d(x, filters, padding=1), (filters,), dy)}, torch.enable_grad,
    )
    fused = nn.FusedConvBnReLU2d(16, 32, 3, padding=1, device=place)
    apart = torch.nn.Sequential(
        torch.nn.Conv2d(16, 32, 3, padding=1, bias=False, device=place), torch.nn.BatchNorm2d(32, device=place), torch.nn.ReLU()
    )
    yield Case(
        "training step of convolution, batch norm and ReLU", lambda: apart(images).backward(dy),
        {"FusedConvBnReLU2d": lambda: fused(images).backward(dy)}, torch.enable_grad,
    )


def array_cases(torch: Any, device: Any) -> Iterator[Case]:
    """GPUArrays in the primary context and in one of their own, and CuPy's arrays, beside torch's call on tensors."""
    drv, gpuarray = (importlib.import_module(f"pycuda.{name}") for name in ("driver", "gpuarray"))
    own = drv.Device(device.ordinal).make_context()
    drv.Context.pop()

    @contextmanager
    def primary() -> Iterator[None]:
        with device:
            yield

    @contextmanager
    def other() -> Iterator[None]:
        own.push()
        try:
            yield
            drv.Context.synchronize()
        finally:
            drv.Context.pop()

    for x_shape, w_shape, dtype, _ in LAYERS:
        x, w = (torch.randn(shape).to(getattr(torch, dtype)) for shape in (x_shape, w_shape))
        there = [a.to(device.name) for a in (x, w)]

        def theirs(x: Any = there[0], w: Any = there[1]) -> Any:
            return torch.nn.functional.conv2d(x, w, padding=1)

        for words, around in (("the primary context", primary), ("a context of its own", other)):
            with around():
                ours = _array_calls(device.name, *(gpuarray.to_gpu(a.numpy()) for a in (x, w)))
            yield Case(f"GPUArray in {words}, {_label(x_shape, w_shape, dtype, False)}", theirs, ours, around=around)
        if importlib.util.find_spec("cupy"):
            cupy = importlib.import_module("cupy")
            with cupy.cuda.Device(device.ordinal):
                ours = _array_calls(device.name, *(cupy.asarray(a.numpy()) for a in (x, w)))
            yield Case(f"CuPy, {_label(x_shape, w_shape, dtype, False)}", theirs, ours)


def _array_calls(place: str, x: Any, w: Any) -> dict[str, Call]:
    """A layer of arrays that are not torch's, by each way to call it. The context must be current."""
    plan = Plan(ConvProblem.forward(2, x.shape, w.shape, padding=1, dtype=str(x.dtype)), place)
    bound, out = plan.bind(w), plan(x, w)
    return {
        "conv2d": lambda: pycuda_conv.conv2d(x, w, padding=1), "conv2d, out=": lambda: pycuda_conv.conv2d(x, w, padding=1, out=out),
        "plan, out=": lambda: plan(x, w, out=out), "bound": lambda: bound(x), "bound, out=": lambda: bound(x, out=out),
    }  # fmt: skip


def numpy_case(torch: Any, place: str) -> Case:
    """numpy in, numpy out."""
    x, w = (np.random.default_rng(0).standard_normal(shape, np.float32) for shape in ((2, 4, 5, 5), (8, 4, 3, 3)))
    return Case(
        "numpy, 2x4x5x5 -> 8 3x3",
        lambda: torch.nn.functional.conv2d(torch.from_numpy(x).to(place), torch.from_numpy(w).to(place), padding=1).cpu().numpy(),
        {"conv2d": lambda: pycuda_conv.conv2d(x, w, padding=1, device=place)},
    )


def warm_up(
    ways: Sequence[Call], wait: Call, compiled: Callable[[], bool], arounds: Sequence[Callable[[], AbstractContextManager[Any]]]
) -> None:
    """Make calls until everything that is compiled behind them is there; each of `ways` inside one of `arounds`."""
    end = time.monotonic() + MOST_WAITING
    for _ in range(3):  # first a better configuration, then constants of the layer, may be compiled in the background
        for way, around in zip(ways, arounds, strict=True):
            with around():
                for _ in range(CALLS):
                    way()
            wait()
        while not compiled() and time.monotonic() < end:
            time.sleep(0.01)


def measure(case: Case, wait: Call, rounds: int, compiled: Callable[[], bool] = lambda: True) -> list[Row]:
    """Medians over rounds of the time of a call; all calls of a case are measured in turn."""
    ways = [case.torch_call, *case.ours.values()]
    arounds = [nullcontext, *[case.around] * len(case.ours)]
    taken: list[list[float]] = [[] for _ in ways]
    with case.inside():
        warm_up(ways, wait, compiled, arounds)
        for _ in range(rounds):
            for way, around, times in zip(ways, arounds, taken, strict=True):
                with around():
                    start = time.perf_counter()
                    for _ in range(case.calls):
                        way()
                    times.append((time.perf_counter() - start) / case.calls * 1e6)
                wait()
    theirs, *ours = map(median, taken)
    return [Row(case.what, name, theirs, us) for name, us in zip(case.ours, ours, strict=True)]


def calls_per_second(torch: Any, place: str, function: Callable[..., Any], threads: int, seconds: float) -> float:
    """Calls a second by a number of threads at once, each with a stream and arrays of its own."""
    go, counts = threading.Barrier(threads + 1), [0] * threads
    ends = [0.0]

    def work(which: int) -> None:
        x, w = (torch.randn(shape, device=place) for shape in _SMALL)
        stream = torch.cuda.Stream(place)
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(CALLS):
                function(x, w, padding=1)
            stream.synchronize()
            go.wait()
            while time.perf_counter() < ends[0]:
                for _ in range(CALLS):
                    function(x, w, padding=1)
                counts[which] += CALLS
                stream.synchronize()

    running = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for one in running:
        one.start()
    ends[0] = time.perf_counter() + 60
    go.wait()
    start = time.perf_counter()
    ends[0] = start + seconds
    for one in running:
        one.join()
    return sum(counts) / (time.perf_counter() - start)


def measure_threads(torch: Any, place: str, rounds: int, seconds: float) -> list[dict[str, float]]:
    """Calls a second of torch and of ours for each number of threads, as medians of rounds in turn."""
    functions = torch.nn.functional.conv2d, pycuda_conv.conv2d
    found = []
    for threads in THREADS:
        taken = [[calls_per_second(torch, place, one, threads, seconds) for one in functions] for _ in range(rounds)]
        theirs, ours = (median(each) for each in zip(*taken, strict=True))
        found.append({"threads": threads, "torch": theirs, "ours": ours, "ratio": ours / theirs})
    return found


def list_cases() -> int:
    """Print the cases to measure."""
    for layer in LAYERS:
        print(_label(*layer))
    print("arrays that have to be copied first; numpy; threads")
    print("and the first of the layers on another stream, in inference mode, as a module, with gradients; a fused layer;")
    print("and all layers as GPUArrays in the primary context and in one of their own, and as CuPy's arrays")
    return OK


def tables(rows: Sequence[Row], threads: Sequence[dict[str, float]]) -> Iterator[Table]:
    """The tables of calls and, where they were measured, of threads."""
    yield table("Host time of a call, medians of rounds by turns", COLUMNS, [row.cells() for row in rows], left=COLUMNS[:2])
    if threads:
        cells = [(str(t["threads"]), f"{t['torch']:,.0f}", f"{t['ours']:,.0f}", number(t["ratio"], ".2f")) for t in threads]
        yield table("Calls a second, all threads together", ("threads", "torch", "ours", "ours / torch"), cells)


def run(settings: bench.Settings) -> int:
    """Measure, print, and write the JSON that was asked for."""
    bench.refuse_suite_options(settings, "--host-cost", "fp32")
    if settings.pages is not None:
        raise ToolError("--pages is not for --host-cost, which writes --json only")
    device, torch = bench.gpu_for(settings, "--host-cost"), require("torch")
    bench.check_paths(settings)
    rounds, out, place = 9 if settings.quick else 25, console(), device.name
    rows: list[Row] = []
    torch.cuda.set_device(place)
    with torch.no_grad(), cudnn_set(torch, "benchmark", True), torch_precision("fp32") as words:
        machine = bench.describe(torch, device, "fp32", words, 0)
        for line in header_lines(machine):
            out.print(line, markup=False)
        layers = (layer_case(torch, place, *layer) for layer in LAYERS)
        cases = [*layers, *copied_cases(torch, place), *mode_cases(torch, place), numpy_case(torch, place), *array_cases(torch, device)]
        for case in track(bench.matching(settings.only, cases, lambda one: one.what), lambda one: one.what):
            rows += measure(case, torch.cuda.synchronize, rounds, device.all_compiled)  # type: ignore[attr-defined]  # CUDA's
        threads = measure_threads(torch, place, 3, 0.05 if settings.quick else 0.2) if settings.only is None else []
    for one in tables(rows, threads):
        out.print(one)
    if settings.json is not None:
        report = {"machine": machine, "rows": [asdict(row) | {"ratio": row.ratio} for row in rows], "threads": threads}
        try:
            write_json(settings.json, report)
        except OSError as error:
            raise ToolError(f"can't write the report: {error}") from error
    return OK
