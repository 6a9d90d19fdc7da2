"""Every kernel once, on arrays of their exact size, for NVIDIA's memory checker; not a test of values.

    compute-sanitizer --tool memcheck  python tests/sanitize.py
    compute-sanitizer --tool racecheck python tests/sanitize.py 'Gemm|Pointwise'
    compute-sanitizer --tool initcheck python tests/sanitize.py

racecheck takes copies of gather_nhwc_sm90.cu for races with the consumers' reads of them in TF32: of 31 lanes of a warp, since lane 0 alone
arrives at the barrier, behind a __syncwarp() that all lanes enter when their copies have arrived. It knows of no other.
initcheck finds the words that pack.cu's blocks wait for in memory as it comes (packed_tiles.cuh).

Runs the cases in whose line the argument, a regular expression, is found, all of them without one. Each array is an allocation of its own, so that
a read or write past its end is seen; no pool, no torch.
"""

import re
import sys
from itertools import product

import numpy as np
import test_dense_nhwc as dense
import test_depthwise_planes as planes
import test_depthwise_wgrad as depthwise_wgrad
import test_direct_quads as quads
import test_dmma as doubles
import test_epilogue as epilogue
import test_few_channels as few
import test_few_channels_wgrad as few_wgrad
import test_few_inputs as first_layers
import test_few_pixels as pixels
import test_fft as fft
import test_gather_nhwc as gather
import test_grouped_nhwc as grouped
import test_grouped_nhwc_wgrad as grouped_wgrad
import test_lines as lines
import test_patch_wgrad as patches
import test_planes as lying
import test_pointwise as pointwise
import test_wgrad_nhwc as wgrad
from test_implicit_gemm import SANITIZED, asked, dtype_of
from test_kernels import AWKWARD, RUNS

import pycuda_conv as pc
from pycuda_conv import Plan
from pycuda_conv.engines import batch_norm as engine
from pycuda_conv.engines.batch_norm import Pixels
from pycuda_conv.runtime import get_device


def run(plan, arrays) -> bool:
    """Launch `plan` once, and with its filter's channels last if it reads or writes such; whether all of the result was written, and with numbers."""
    good = launched(plan, arrays, False)
    if plan.reads_filter_last:
        x, w, *more = arrays
        good &= launched(plan, (x, np.moveaxis(w, 1, -1), *more), True)
    if plan.writes_filter_last:
        good &= launched(plan, arrays, True)
    return good


def launched(plan, arrays, filter_last: bool) -> bool:
    drv = plan.device._drv
    with plan.device:
        buffers = [0 if array is None else drv.to_device(np.ascontiguousarray(array).view(np.uint8)) for array in arrays]
        result = drv.to_device(np.full(plan.result_shape, np.nan, arrays[0].dtype).view(np.uint8))
        workspace = drv.mem_alloc(plan.workspace_bytes) if plan.workspace_bytes else 0
        x, w, b, *more = (int(buffer) for buffer in buffers)
        plan.launch((x, w, b, *(more or (0, 0)), int(result), int(workspace)), None, 0, filter_last)
        out = np.empty(plan.result_shape, arrays[0].dtype)
        drv.memcpy_dtoh(out.view(np.uint8), result)
    return bool(np.isfinite(out.astype(np.float64)).all())


def copy_strided() -> bool:
    """The gathering of an array that is not contiguous."""
    from pycuda import gpuarray

    with get_device("cuda"):
        wide, w = gpuarray.to_gpu(np.ones((2, 3, 5, 14), "f")), gpuarray.to_gpu(np.ones((4, 3, 3, 3), "f"))
        out = pc.conv2d(wide[:, :, :, ::2], w).get()
    return bool((out == 27).all())


def batch_norm(pixels: Pixels, activation: str | None = "relu") -> bool:
    """All that normalises such an array, forwards and backwards, and its sums: whether what comes out are numbers."""
    device, each = get_device("cuda"), "float64" if pixels.dtype == "float64" else "float32"
    array = np.random.default_rng(0).standard_normal((pixels.N, pixels.K, pixels.plane)).astype(pixels.dtype)
    ones, count, sums = np.ones(pixels.K, each), np.array([3]), np.ones(2 * pixels.K, each)
    some = np.ones(pixels.K, pixels.dtype)
    channels, finish = (ones,) * 4, (activation,)
    good = True
    for maker, options, inputs, outs in (
        (engine.statistics, (1e-5, 0.1), (array, count), (*channels, count.copy())), (engine.channel_sums, (), (array,), (some,)),
        (engine.fold, (1e-5,), (*channels, some), (some, some)),
        (engine.forward, finish, (array, *channels, None), (array,)), (engine.forward, (*finish, True), (array, *channels, array), (array,)),
        (engine.backward, (*finish, True), (array, array, *channels, None), (array, sums, None)),
        (engine.backward, (*finish, True, True), (array, array, *channels, array), (array, sums, array)),
    ):  # fmt: skip
        launch, workspace = engine.compiled(maker, pixels, device, *options)
        drv = device._drv
        with device:
            buffers = [0 if a is None else drv.to_device(a.view(np.uint8)) for a in (*inputs, *outs)]
            launch([int(b) for b in (*buffers, drv.mem_alloc(workspace) if workspace else 0)], None)
            for out, buffer in zip(outs, buffers[len(inputs) :], strict=True):
                if out is None:
                    continue
                found = np.empty_like(out)
                drv.memcpy_dtoh(found.view(np.uint8), buffer)
                good &= bool(np.isfinite(found.astype(np.float64)).all())
    return good


def main(pattern: str = "") -> int:
    wanted = re.compile(pattern).search
    device = get_device("cuda")
    bad = 0
    runs = [(case, config, dtype[0] if dtype else "float32", "") for case, config, *dtype in (*RUNS, *AWKWARD)]
    runs += [(case, config, dtype, "") for case, dtype, config in planes.RUNS[::8]]
    for case, config, dtype, parts in [*runs, *epilogue.RUNS]:
        line = f"{config} {case} {dtype} {parts}"
        if wanted(line):
            problem = case.problem(dtype)
            plan = Plan(epilogue.finishing(problem, parts) if parts else problem, device, config=config)
            good = run(plan, epilogue.arrays(case, dtype, parts, integers=True) if parts else case.integers(dtype))
            print("ok " if good else "BAD", line, flush=True)
            bad += not good
    for problem, config in doubles.RUNS[::11]:
        line = f"{config} {problem} float64"
        if wanted(line):
            good = run(Plan(problem, device, config=config), (*doubles.operands(problem, np.ones), np.ones(problem.K) if problem.has_bias else None))
            print("ok " if good else "BAD", line, flush=True)
            bad += not good
    for case in fft.CASES:
        line = f"{fft.config_of(case)} {case}"
        for kind in (" transformed", " flagged"):
            if wanted(line + kind):
                arrays = case.integers("float32")
                if kind == " flagged":
                    arrays[0][0] *= 2.0**70
                good = run(Plan(case.problem(), device, config=fft.config_of(case)), arrays)
                print("ok " if good else "BAD", line + kind, flush=True)
                bad += not good
    runs = [(*run, "") for run in (*SANITIZED, *dense.RUNS[::9], *gather.RUNS[::17], *grouped.RUNS[::17], *pointwise.RUNS[::7], *lines.RUNS[::9], *few.RUNS[::11], *first_layers.RUNS[::5], *pixels.RUNS[::7], *quads.RUNS[::5], *lying.RUNS[::5])] + [(*run, "all") for run in epilogue.GPU_RUNS[::3]]
    for case, mode, config, parts in runs if device.capability == (9, 0) else ():
        arrays = epilogue.arrays(case, dtype_of(mode), parts, integers=True) if parts else case.integers(dtype_of(mode))
        problem = epilogue.finishing(asked(case, mode), parts) if parts else asked(case, mode)
        for kind in ["", " flagged"][: 1 + (dtype_of(mode) == "float32")]:
            line = f"{config} {case} {mode} {parts}{kind}"
            if wanted(line):
                if kind:  # an image and a filter that the guarded kernels compute
                    arrays[0].flat[0] = arrays[1].flat[0] = 2.0**61
                good = run(Plan(problem, device, config=config), arrays)
                print("ok " if good else "BAD", line, flush=True)
                bad += not good
    filters = [(*case, config, precision) for case in pointwise.FILTERS for config in pointwise.FILTER_TILES for precision in ("fp32", "tf32")]
    for x_shape, k, config, precision in filters[::5] if device.capability == (9, 0) else ():
        line = f"{config} gradient by the filter {x_shape} {k} {precision}"
        if wanted(line):
            given = pointwise.filters_arrays(x_shape, k, np.ones)
            good = run(Plan(pointwise.filters_problem(x_shape, k, precision), device, config=config), (*given, None))
            print("ok " if good else "BAD", line, flush=True)
            bad += not good
    for case, config, layout in product(patches.CASES, (*patches.CONFIGS, *patches.SLICED), ("NCHW", "NHWC")):
        line = f"{config} gradient by the filter {case} {layout}"
        if wanted(line) and not (layout == "NHWC" and config in patches.SLICED):
            problem = patches.problem(case, layout)
            good = run(Plan(problem, device, config=config), (*patches.operands(problem, np.ones, "float32"), None))
            print("ok " if good else "BAD", line, flush=True)
            bad += not good
    for case, dtype, config in (*wgrad.RUNS[::7], *grouped_wgrad.RUNS[::19], *few_wgrad.RUNS[::9]) if device.capability == (9, 0) else ():
        line = f"{config} gradient by the filter {case} {dtype}"
        if wanted(line):
            given = (np.moveaxis(a, 1, -1) for a in case.integers(dtype))
            good = run(Plan(case.problem(dtype), device, config=config), (*given, None))
            print("ok " if good else "BAD", line, flush=True)
            bad += not good
    for layout, shape, dtype, config in depthwise_wgrad.RUNS if device.capability >= (8, 0) else ():
        line = f"{config} gradient by the filter {layout} {shape} {dtype}"
        if wanted(line):
            problem = depthwise_wgrad.asked(layout, shape, dtype)
            given = depthwise_wgrad.integers(problem)
            if layout == "NHWC":
                given = [np.moveaxis(a, 1, -1) for a in given]
            good = run(Plan(problem, device, config=config), (*given, None))
            print("ok " if good else "BAD", line, flush=True)
            bad += not good
    if wanted("copy_strided"):
        good = copy_strided()
        print("ok " if good else "BAD", "copy_strided", flush=True)
        bad += not good
    for layout, k, plane, dtype in product(("NCHW", "NHWC"), (8, 65), (1, 15, 24), ("float16", "float32", "float64")):
        line = f"batch_norm {layout} {k} {plane} {dtype}"
        if wanted(line):
            good = batch_norm(Pixels(dtype, layout, 30, k, plane))
            print("ok " if good else "BAD", line, flush=True)
            bad += not good
    return bad


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
