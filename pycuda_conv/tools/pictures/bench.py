"""Filters of images: this package beside CuPy on a GPU, or beside scipy on the CPU; and beside cuCIM and OpenCV where these are installed.

On a GPU, launches are captured in a graph, which is replayed; both sides read and write the same arrays, in turn. What a call costs the
host is measured apart, and so are calls on numpy arrays, copies included. On the CPU the processor's time counts, that of all threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from pycuda_conv import ndimage
from pycuda_conv.runtime import get_device
from pycuda_conv.tools import bench
from pycuda_conv.tools.benchmarks.pages import digest
from pycuda_conv.tools.info import nvidia_smi
from pycuda_conv.tools.report import (
    FRONT_PAGE,
    RESULTS_PAGE,
    header_lines,
    kernels_words,
    markdown_table,
    microseconds,
    number,
    write_between,
    write_json,
)
from pycuda_conv.tools.terminal import FAILED, OK, ToolError, console, require, table, track

LIMIT = 3e-7  # of the largest, for float32
#: The rows of the front page.
FRONT = tuple(f"gaussian_filter({size} float32, sigma={sigma}), device" for size, sigma in (("4096x4096", 3), ("512x512x512", 1)))


class Case(NamedTuple):
    """A filter of an image; `place` is "device" or "host"."""

    place: str
    function: str
    shape: tuple[int, ...]
    dtype: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        options = ", ".join(f"{name}={_shown(value)}" for name, value in self.arguments.items())
        return f"{self.function}({'x'.join(map(str, self.shape))} {self.dtype}, {options}), {self.place}".replace("(, ", "(")


def _shown(value: Any) -> str:
    return f"{'x'.join(map(str, value.shape))}" if isinstance(value, np.ndarray) else str(value)


def _dense(*shape: int) -> dict[str, Any]:
    return {"weights": np.random.default_rng(1).random(shape)}


_LARGE, _FRAMES = (4096, 4096), (100, 1080, 1920, 3)
#: The jobs of people who filter images.
CASES = (
    *(Case("device", "gaussian_filter", _LARGE, "uint8", {"sigma": sigma}) for sigma in (1, 3, 10, 30)),
    *(Case("device", "gaussian_filter", _LARGE, "float32", {"sigma": sigma}) for sigma in (1, 3)),
    *(Case("device", "correlate", _LARGE, "float32", _dense(n, n)) for n in (3, 15)),
    Case("device", "gaussian_filter", _LARGE, "float64", {"sigma": 3}),
    Case("device", "sobel", _LARGE, "uint8", {"output": "float32"}),
    Case("device", "gaussian_filter", _LARGE, "float32", {"sigma": 3, "mode": "wrap"}),
    Case("device", "gaussian_filter", _LARGE, "float32", {"sigma": 3, "mode": "constant"}),
    *(Case("device", "correlate", (n,) * 3, "float32", _dense(5, 5, 5)) for n in (256, 512)),
    *(Case("device", "gaussian_filter", (n,) * 3, "float32", {"sigma": 1}) for n in (256, 512)),
    *(Case("host", "gaussian_filter", _LARGE, "uint8", {"sigma": sigma}) for sigma in (1, 3)),
    Case("host", "gaussian_filter", _LARGE, "float32", {"sigma": 3}), Case("host", "correlate", _LARGE, "uint8", _dense(3, 3)),
    Case("host", "gaussian_filter", _FRAMES, "uint8", {"sigma": 3, "axes": (1, 2)}),
)  # fmt: skip
_SMALL = (1024, 1024)
#: The same on the CPU.
CPU_CASES = (
    *(Case("host", "correlate", _SMALL, "float32", _dense(n, n)) for n in (3, 5, 9, 15)),
    *(Case("host", "correlate1d", _SMALL, "float32", {"weights": np.arange(1.0, 10), "axis": axis}) for axis in (0, 1)),
    *(Case("host", "gaussian_filter", _SMALL, "float32", {"sigma": sigma}) for sigma in (1, 3, 10)),
    *(Case("host", "gaussian_filter1d", _SMALL, "float32", {"sigma": 1, "axis": axis}) for axis in (0, 1)),
    *(Case("host", "uniform_filter", _SMALL, "float32", {"size": size}) for size in (3, 9, 31)),
    *(Case("host", "uniform_filter1d", _SMALL, "float32", {"size": size}) for size in (3, 9, 31)),
    *(Case("host", name, _SMALL, "float32", {}) for name in ("sobel", "prewitt", "laplace")),
    *(Case("host", name, _SMALL, "float32", {"sigma": 1}) for name in ("gaussian_laplace", "gaussian_gradient_magnitude")),
)  # fmt: skip


@dataclass
class Row:
    """Microseconds of both sides, and how far off ours are; `call` is what a call costs the host, `first` the first call of a new size."""

    case: str
    ours: float | None = None
    theirs: float | None = None
    call: float | None = None
    first: float | None = None
    error: float | None = None
    cucim: float | None = None
    opencv: float | None = None

    @property
    def ratio(self) -> float | None:
        return None if not self.ours or self.theirs is None else self.theirs / self.ours

    @property
    def wrong(self) -> bool:
        """Whether ours are off by more than rounding, whole numbers by more than one."""
        whole = "uint8" in self.case and "output=" not in self.case
        return self.error is not None and self.error > (1.0 if whole else LIMIT)

    def cells(self) -> tuple[str, ...]:
        times = microseconds(self.ours), microseconds(self.theirs), number(self.ratio, ".2f")
        others = microseconds(self.cucim), microseconds(self.opencv)
        return self.case, *times, microseconds(self.call), microseconds(self.first), number(self.error, ".1e"), *others


COLUMNS = "job", "ours us", "theirs us", "ratio", "call us", "first us", "error", "cuCIM us", "OpenCV us"


def opencv(case: Case, x: np.ndarray) -> Callable[[], Any] | None:
    """The same filter by OpenCV, on the CPU, or None where it has none or is not installed."""
    try:
        cv2: Any = require("cv2")
    except ToolError:
        return None
    options: dict[str, Any] = dict(case.arguments)
    borders = {"reflect": "REFLECT", "constant": "CONSTANT", "nearest": "REPLICATE", "mirror": "REFLECT_101"}
    word, axes, depth = borders.get(options.get("mode", "reflect")), options.get("axes", (0, 1)), cv2.CV_32F if "output" in options else -1
    colours = len(case.shape) - axes[-1] - 1
    if word is None or colours > 1 or ("axes" not in options and len(case.shape) > 2):
        return None
    border = getattr(cv2, f"BORDER_{word}")
    pages = x if axes == (1, 2) else [x]
    if case.function == "gaussian_filter" and np.isscalar(options["sigma"]) and not options.get("order"):
        sigma: Any = options["sigma"]
        size = 2 * int(4 * sigma + 0.5) + 1
        return lambda: [cv2.GaussianBlur(page, (size, size), sigma, borderType=border) for page in pages]
    if case.function == "correlate" and options["weights"].ndim == 2:
        return lambda: [cv2.filter2D(page, depth, options["weights"], borderType=border) for page in pages]
    if case.function == "uniform_filter":
        return lambda: [cv2.blur(page, (options["size"],) * 2, borderType=border) for page in pages]
    if case.function == "sobel":
        return lambda: [cv2.Sobel(page, depth, 1, 0, borderType=border) for page in pages]
    return None


def cucim(case: Case, there: Any) -> Callable[[], Any] | None:
    """A Gaussian by cuCIM, or None."""
    try:
        filters: Any = require("cucim.skimage.filters")
    except ToolError:
        return None
    if case.function != "gaussian_filter" or "axes" in case.arguments:
        return None
    mode = case.arguments.get("mode", "reflect")
    return lambda: filters.gaussian(there, case.arguments["sigma"], mode=mode, preserve_range=True)


def least_of(function: Callable[[], Any] | None, clock: Callable[[], float]) -> float | None:
    """Microseconds that a function of the host takes at the least; None without one."""
    if function is None:
        return None
    function()
    times = []
    for _ in range(3):
        begin = clock()
        function()
        times.append((clock() - begin) * 1e6)
    return min(times)


def run(settings: bench.Settings) -> int:
    """Measure, print and write the report."""
    device = get_device(settings.device)
    host = device.backend != "cuda"
    if settings.csv is not None or settings.plots is not None or (host and settings.pages is not None):
        raise ToolError("--images writes --json, and on a GPU --pages")
    bench.check_paths(settings, "images")
    chosen = bench.matching(settings.only, CPU_CASES if host else CASES, str)
    peer = require("scipy.ndimage") if host else _cupys()
    machine: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M"), "CPU" if host else "GPU": getattr(device, "model", "") or device.name,
        "beside": f"scipy {require('scipy').__version__}" if host else f"CuPy {require('cupy').__version__}" if peer else "nothing",
        "method": "time of all threads, the least of five" if host else "device: graph replay; host: wall clock; medians, in turn",
        "command": "pycuda-conv bench --images", "kernels": digest(), "driver": nvidia_smi("driver_version").get("driver_version", "?"),
    }  # fmt: skip
    out = console()
    for line in header_lines(machine):
        out.print(line, markup=False)
    rows = []
    for case in track(chosen, str):
        rows.append(_on_cpu(case, peer) if host else _on_gpu(case, peer))
        out.print("  ".join(rows[-1].cells()), markup=False, highlight=False)
    out.print(table("ratio = theirs / ours, above 1 ours is faster", COLUMNS, [row.cells() for row in rows], left=("job",)))
    if settings.json is not None:
        write_json(settings.json, {"machine": machine, "rows": [asdict(row) | {"ratio": row.ratio} for row in rows]})
    if settings.pages is not None:
        write_between(settings.pages / RESULTS_PAGE, page(machine, rows), "images")
        write_between(settings.pages / FRONT_PAGE, excerpt(machine, rows), "images")
    return FAILED if any(row.wrong for row in rows) else OK


def _measured_by(machine: dict[str, Any]) -> str:
    where = f"{machine['GPU']}, driver {machine['driver']}; {machine['beside']}"
    kernels = kernels_words(machine["kernels"])
    return f"Measured by `{machine['command']}` on {machine['date'][:10]}, {kernels}: {where}. The method: {machine['method']}."


def page(machine: dict[str, Any], rows: Sequence[Row]) -> str:
    """The section of the page of results."""
    cells = [(*row.cells()[:4], number(row.error, ".1e")) for row in rows]
    return f"{_measured_by(machine)}\n\n{markdown_table(('job', 'ours, us', 'CuPy, us', 'ratio', 'error'), 1, cells)}"


def excerpt(machine: dict[str, Any], rows: Sequence[Row]) -> str:
    """The sentences of the front page: Gaussians of an image and of a volume."""
    shown = [row for row in rows if row.case in FRONT]
    told = (f"`{row.case.removesuffix(', device')}` {microseconds(row.ours)} us (CuPy {microseconds(row.theirs)})" for row in shown)
    return f"Filters of images, on the GPU: {', '.join(told)}. {_measured_by(machine)}"


def _cupys() -> Any:
    try:
        return require("cupyx.scipy.ndimage")
    except ToolError:
        return None


def _image(case: Case) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, case.shape, np.uint8) if case.dtype == "uint8" else rng.random(case.shape, np.float32).astype(case.dtype)


def _error(case: Case, x: np.ndarray, made: np.ndarray) -> float | None:
    """The largest difference from scipy in float64 over a corner of the image, relative to the largest; in units for integers."""
    try:
        scipys = require("scipy.ndimage")
    except ToolError:
        return None
    if case.arguments.get("mode") == "wrap":
        return None  # a corner has other neighbours
    axes = case.arguments.get("axes") or range(len(case.shape))
    size = 48 if len(case.shape) == 3 else 300
    near = tuple(slice(0, min(size, n)) if i in axes else slice(0, 1) for i, n in enumerate(case.shape))
    wide = tuple(slice(0, min(2 * size, n)) if i in axes else slice(0, 1) for i, n in enumerate(case.shape))
    options = {name: value for name, value in case.arguments.items() if name != "output"}
    cut = tuple(slice(0, size) if i in axes else slice(None) for i in range(len(case.shape)))
    exact = getattr(scipys, case.function)(x[wide].astype(np.float64), **options)[cut]
    if made.dtype.kind in "iu":
        return float(np.abs(np.clip(np.rint(exact), 0, 255) - made[near]).max())
    return float(np.abs(exact - made[near]).max() / np.abs(exact).max())


def _on_cpu(case: Case, peer: Any) -> Row:
    x = _image(case)

    def ours() -> Any:
        return getattr(ndimage, case.function)(x, **case.arguments, device="opencl")

    def theirs() -> Any:
        return getattr(peer, case.function)(x, **case.arguments)

    row = Row(str(case), error=_error(case, x, ours()))

    def spent(function: Callable[[], Any]) -> float:
        start = time.process_time()
        function()
        return (time.process_time() - start) * 1e6

    times = [(spent(ours), spent(theirs)) for _ in range(5)]
    row.ours, row.theirs = (min(each) for each in zip(*times, strict=True))
    row.opencv = least_of(opencv(case, x), time.process_time)
    return row


def _on_gpu(case: Case, peer: Any) -> Row:
    x, row = _image(case), Row(str(case))
    if case.place == "host":
        return _host_to_host(case, x, peer, row)
    cupy = require("cupy")
    there = cupy.asarray(x)
    dtype = case.arguments.get("output", case.dtype)
    options = {name: value for name, value in case.arguments.items() if name != "output"}
    out = [cupy.empty(case.shape, dtype) for _ in range(2)]
    of_theirs = {name: cupy.asarray(value) if isinstance(value, np.ndarray) else value for name, value in options.items()}
    start = time.perf_counter()
    getattr(ndimage, case.function)(there, output=out[0], **options)
    cupy.cuda.get_current_stream().synchronize()
    row.first = (time.perf_counter() - start) * 1e6
    row.error = _error(case, x, out[0].get())
    ways = [lambda: getattr(ndimage, case.function)(there, output=out[0], **options)]
    if peer is not None:
        ways.append(lambda: getattr(peer, case.function)(there, output=out[1], **of_theirs))
    third = cucim(case, there)
    times = _replayed(cupy, ways + ([third] if third else []))
    row.ours, row.theirs = times[0], times[1] if peer is not None else None
    row.cucim = times[-1] if third else None
    start = time.perf_counter()
    for _ in range(50):
        ways[0]()
    row.call = (time.perf_counter() - start) / 50 * 1e6
    cupy.cuda.get_current_stream().synchronize()
    cupy.get_default_memory_pool().free_all_blocks()
    return row


def _replayed(cupy: Any, ways: list[Callable[[], Any]]) -> list[float]:
    """Microseconds of each of `ways` on the GPU, by graphs where they can be captured, else between events."""
    stream = cupy.cuda.Stream(non_blocking=True)
    found: list[list[float]] = [[] for _ in ways]
    with stream:
        works: list[tuple[int, Callable[[], Any]]] = []
        for way in ways:
            for _ in range(3):
                way()
            stream.synchronize()
            try:
                stream.begin_capture()
                for _ in range(5):
                    way()
                graph = stream.end_capture()
                graph.launch(stream)
                stream.synchronize()
                works.append((5, partial(graph.launch, stream)))
            except Exception:  # CuPy refuses some calls while it captures
                if stream.is_capturing():
                    stream.end_capture()
                works.append((1, way))
        for _ in range(9):
            for i, (count, work) in enumerate(works):
                begin, end = cupy.cuda.Event(), cupy.cuda.Event()
                begin.record(stream)
                for _ in range(4):
                    work()
                end.record(stream)
                end.synchronize()
                found[i].append(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / (4 * count))
    return [median(each) for each in found]


def _host_to_host(case: Case, x: np.ndarray, peer: Any, row: Row) -> Row:
    try:
        cupy = require("cupy")
        locked = require("cupyx").empty_pinned(x.shape, x.dtype)
        np.copyto(locked, x)
    except ToolError:
        cupy, locked = None, x
    start = time.perf_counter()
    made = getattr(ndimage, case.function)(locked, **case.arguments)
    row.first = (time.perf_counter() - start) * 1e6
    row.error = _error(case, x, made)
    del made
    ways = [lambda: getattr(ndimage, case.function)(locked, **case.arguments)]
    if peer is not None and cupy is not None:
        options = {name: cupy.asarray(value) if isinstance(value, np.ndarray) else value for name, value in case.arguments.items()}
        ways.append(lambda: cupy.asnumpy(getattr(peer, case.function)(cupy.asarray(locked), **options)))
    ways.append(lambda: getattr(ndimage, case.function)(x, **case.arguments))
    times: list[list[float]] = [[] for _ in ways]
    for way in ways:
        way()
    for _ in range(5 if x.nbytes > 1 << 28 else 15):
        for each, way in zip(times, ways, strict=True):
            start = time.perf_counter()
            way()
            each.append((time.perf_counter() - start) * 1e6)
    row.ours, row.theirs = median(times[0]), median(times[1]) if len(ways) > 2 else None
    row.call = median(times[-1])  # from ordinary memory
    row.opencv = least_of(opencv(case, x), time.perf_counter)
    return row
