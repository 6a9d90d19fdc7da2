"""The loop that this package began as, against one launch: a kernel for one channel, launched for every image, output and input channel.

All arrays are GPUArrays and stay on the GPU. The loop is made as people write it, with ``array[n, k]`` for every launch; as a captured
graph, which costs the host one launch but the GPU all of them; and as one call of :func:`pycuda_conv.conv2d`. The call's kernels are also
launched by hand, as :meth:`Plan.kernels` gives them.

A second table has the times of compilers for the text of one kernel: PyCUDA's ``SourceModule`` and ours, at first and from their caches.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

import pycuda_conv
from pycuda_conv.plan import Plan
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime import binaries, driver
from pycuda_conv.runtime.base import KERNEL_DIR
from pycuda_conv.runtime.compiler import Nvcc, Nvrtc, compiler, nvcc, nvrtc
from pycuda_conv.runtime.graph import Graph
from pycuda_conv.runtime.plain import plain
from pycuda_conv.tools import bench
from pycuda_conv.tools.oracle import compare, reference, torch_precision
from pycuda_conv.tools.report import (
    RESULTS_PAGE,
    header_lines,
    markdown_table,
    measured_by,
    median,
    microseconds,
    number,
    write_between,
    write_json,
)
from pycuda_conv.tools.terminal import FAILED, OK, Table, ToolError, console, require, table, track

#: One thread for each pixel of a row, one block for each row: what a first convolution on a GPU looks like. It pads with one zero.
ONE_CHANNEL = """
extern "C" __global__ void one_channel(float *y, const float *x, const float *w, int H, int W, int add)
{
    __shared__ float taps[9];
    int q = threadIdx.x + blockIdx.x * blockDim.x, p = blockIdx.y;
    if (threadIdx.x < 9) taps[threadIdx.x] = w[threadIdx.x];
    __syncthreads();
    if (q >= W) return;
    float sum = add ? y[p * W + q] : 0.f;
    for (int r = 0; r < 3; r++)
        for (int s = 0; s < 3; s++) {
            int h = p + r - 1, v = q + s - 1;
            if (h >= 0 && h < H && v >= 0 && v < W) sum += taps[3 * r + s] * x[h * W + v];
        }
    y[p * W + q] = sum;
}
"""
THREADS = 32

#: Inputs and numbers of filters, all 3 x 3 with one zero around the image: 1, 64, 64 and 4,096 launches.
LAYERS = ((1, 1, 5, 5), 1), ((2, 4, 5, 5), 8), ((2, 4, 256, 256), 8), ((8, 16, 56, 56), 32)


@dataclass(frozen=True)
class Row:
    """Microseconds of one convolution each way, from the first launch until the result is there; several in a row are timed at once."""

    problem: str
    launches: int
    loop_us: float
    graph_us: float
    one_us: float
    hand_us: float
    torch_us: float
    correct: bool

    @property
    def ratio(self) -> float:
        """The loop's time divided by that of one launch."""
        return self.loop_us / self.one_us

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        times = (microseconds(us) for us in (self.loop_us, self.graph_us, self.one_us, self.hand_us, self.torch_us))
        ratios = number(self.ratio, ".0f"), number(self.graph_us / self.one_us, ".1f")
        return self.problem, f"{self.launches:,}", *times, *ratios, "ok" if self.correct else "WRONG"


COLUMNS = (
    "problem", "launches", "loop us", "graph us", "one call us", "by hand us", "torch us", "loop / one", "graph / one", "verdict",
)  # fmt: skip


def problems() -> list[ConvProblem]:
    """The convolutions to time."""
    return [ConvProblem.forward(2, shape, (filters, shape[1], 3, 3), padding=1) for shape, filters in LAYERS]


class Loop:
    """The founding loop on GPUArrays. The device's context must be current.

    Parameters
    ----------
    module : pycuda.driver.Module
        Of :data:`ONE_CHANNEL`.
    x, w, y : GPUArray
    """

    def __init__(self, module: Any, x: Any, w: Any, y: Any) -> None:
        self._kernel, self._arrays = module.get_function("one_channel"), (x, w, y)

    def __call__(self, stream: Any = None) -> None:
        """Launch the kernel for every image, output channel and input channel."""
        x, w, y = self._arrays
        (N, C, H, W), K = x.shape, w.shape[0]
        grid, block = (-(-W // THREADS), H), (THREADS, 1, 1)
        for n in range(N):
            for k in range(K):
                for c in range(C):
                    self._kernel(
                        y[n, k], x[n, c], w[k, c], np.int32(H), np.int32(W), np.int32(c > 0), grid=grid, block=block, stream=stream
                    )


def seconds(call: Callable[[], Any], wait: Callable[[], Any], in_a_row: int, rounds: int) -> float:
    """The median time of a call until the GPU has done it, of `rounds` rounds of `in_a_row` calls."""
    taken = []
    for _ in range(rounds + 1):
        wait()
        begin = time.perf_counter()
        for _ in range(in_a_row):
            call()
        wait()
        taken.append((time.perf_counter() - begin) / in_a_row)
    return median(taken[1:])


def measure(problem: ConvProblem, device: Any, module: Any, torch: Any, rounds: int, seed: int) -> Row:
    """Time one problem each way. The device's context must be current."""
    import pycuda.driver as drv
    import pycuda.gpuarray as gpuarray

    rng = np.random.default_rng(seed)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in (problem.input_shape, problem.weight_shape))
    x_gpu, w_gpu = gpuarray.to_gpu(x), gpuarray.to_gpu(w)
    results = [gpuarray.to_gpu(np.full(problem.result_shape, np.nan, np.float32)) for _ in range(4)]
    by_loop, by_graph, by_one, by_hand = results
    kernels = Plan(problem, device).kernels(x_gpu, w_gpu, out=by_hand)
    stream, wait = drv.Stream(), drv.Context.synchronize
    loop, graph, captured = Loop(module, x_gpu, w_gpu, by_loop), Graph(stream), Loop(module, x_gpu, w_gpu, by_graph)
    with graph.capture():
        captured(stream)
    wait()

    def one() -> None:
        pycuda_conv.conv2d(x_gpu, w_gpu, padding=1, out=by_one)

    def hand() -> None:
        for kernel in kernels:
            kernel()

    x_torch, w_torch = (torch.from_numpy(a).to(device.name) for a in (x, w))

    def theirs() -> None:
        torch.nn.functional.conv2d(x_torch, w_torch, padding=1)

    launches = problem.N * problem.K * problem.C
    many = 20
    times = [seconds(loop, wait, max(1, many // launches), rounds)]
    times += [seconds(call, wait, many, rounds) for call in (graph.replay, one, hand, theirs)]
    truth = reference(problem, x, w, None), reference(problem, abs(x), abs(w), None)
    correct = all(compare(problem, y.get().astype(np.float64), *truth).correct for y in results)
    loop_us, graph_us, one_us, hand_us, torch_us = (1e6 * taken for taken in times)
    return Row(bench.label(problem), launches, loop_us, graph_us, one_us, hand_us, torch_us, correct)


def compile_times(problem: ConvProblem, device: Any) -> dict[str, tuple[float, float]]:
    """Seconds that compilers take for the text of a problem's first kernel, loading included: at first, and from their caches.

    The device's context must be current. Compilers that are not installed are left out.
    """
    import pycuda.driver as drv
    from pycuda.compiler import SourceModule

    launch = Plan(problem, device).loaded.whole[0][0]
    text, arch = launch.source(), launch.arch or device.queue.arch
    found = {}

    def measure_both(name: str, first: Callable[[], Any], again: Callable[[], Any]) -> None:
        taken = []
        for call in (first, again, again, again):
            begin = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begin)
        found[name] = taken[0], median(taken[1:])

    program, library = nvcc(), nvrtc(driver.newest())
    for flat in (False, True) if program else ():
        with tempfile.TemporaryDirectory(prefix="pycuda_conv-") as folder:
            options = {"options": ["-std=c++17", "-w"], "arch": arch, "cache_dir": folder, "include_dirs": [str(KERNEL_DIR)]}
            module = partial(SourceModule, plain(text, flat), **options)
            measure_both("SourceModule, flat text" if flat else "SourceModule", module, module)
    for made_by in (*([Nvcc(program)] if program else ()), *([Nvrtc(library)] if library else ())):
        made = partial(binaries.make, text, arch, made_by)
        measure_both(
            f"ours, by {made_by.name}", lambda made=made: drv.module_from_buffer(made(fresh=True)),  # type: ignore[misc]
            lambda made=made: drv.module_from_buffer(made()),  # type: ignore[misc]
        )
    return found


def row_table(rows: Sequence[Row]) -> Table:
    """The rows as a table."""
    title = "A loop over images and channels against one launch, all arrays on the GPU: microseconds until the result is there"
    styles = ["" if row.correct else "bold red" for row in rows]
    return table(title, COLUMNS, [row.cells() for row in rows], left=("problem", "verdict"), styles=styles)


def compiler_table(compiled: dict[str, tuple[float, float]]) -> Table:
    """The times of :func:`compile_times` as a table."""
    cells = [(name, f"{first:.3f}", f"{again:.5f}") for name, (first, again) in compiled.items()]
    columns = "compiler", "seconds at first", "again, from its cache"
    return table("The text of one kernel, compiled and loaded", columns, cells, left=columns[:1])


def run(settings: bench.Settings) -> int:
    """Measure, print, and write the JSON that was asked for."""
    bench.refuse_suite_options(settings, "--loop", "fp32")
    device: Any = bench.gpu_for(settings, "--loop")
    torch = require("torch")
    bench.check_paths(settings, "loop")
    out, seed = console(), settings.seed or 0
    chosen = bench.matching(settings.only, problems(), bench.label)
    torch.cuda.set_device(device.name)
    with torch.no_grad(), bench.cudnn_set(torch, "benchmark", True), torch_precision("fp32") as words, device:
        machine = bench.describe(torch, device, "fp32", words, seed) | {"command": "pycuda-conv bench --loop"}
        machine["method"] = "medians by the host's clock, from the first launch until the result is there"
        for line in header_lines(machine):
            out.print(line, markup=False)
        cubin = compiler(driver.newest()).compile(ONE_CHANNEL, device.queue.arch)
        module = driver.pycuda().module_from_buffer(cubin)
        rows = [measure(problem, device, module, torch, 9 if settings.quick else 25, seed) for problem in track(chosen, bench.label)]
        compiled = compile_times(chosen[0], device)
    out.print(row_table(rows))
    out.print(compiler_table(compiled))
    if settings.json is not None:
        report = {"machine": machine, "rows": [asdict(row) | {"ratio": row.ratio} for row in rows], "compilers": compiled}
        try:
            write_json(settings.json, report)
        except OSError as error:
            raise ToolError(f"can't write the report: {error}") from error
    if settings.pages is not None:
        cells = [row.cells()[:-1] for row in rows]
        write_between(settings.pages / RESULTS_PAGE, f"{measured_by(machine)}\n\n{markdown_table(COLUMNS[:-1], 1, cells)}", "loop")
    return OK if all(row.correct for row in rows) else FAILED
