"""Every kernel on small arrays of their exact size, for NVIDIA's memory checker; not a test of values.

    compute-sanitizer --tool memcheck  python tests/sanitize.py
    compute-sanitizer --tool racecheck python tests/sanitize.py 'Gemm|Pointwise'
    compute-sanitizer --tool initcheck python tests/sanitize.py --part 2/8 --seconds 100

The cases come from the engines' registry (covering.py): between them they have every kernel, every value of every define in each type, and
each argument as 0, as 1 and larger. What is missing is told first: kernels of arrays of 2^31 elements (INDEX_64=1), for one. A regular
expression chooses the cases in whose line it is found. `--part I/N` takes every N-th case from the I-th on.
With `--seconds` no case is begun later than that, and what was not begun is told last:
the first case of every kernel comes before the second of any. Kernels run in their general form, without constants of the layer.
Each array is an allocation of its own, so that a read or write past its end is seen; no pool, no torch.
On an H100 twelve parts side by side take memcheck a minute and a half once the kernels are compiled, and racecheck some minutes.

racecheck takes copies of hopper/gather.cu for races with the consumers' reads of them in TF32: of 31 lanes of a warp, since lane 0 alone
arrives at the barrier, behind a __syncwarp() that all lanes enter when their copies have arrived. It knows of no other.
initcheck finds the words that pack.cu's blocks wait for in memory as it comes (packed_tiles.cuh).
"""

import argparse
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product

import covering
import ml_dtypes  # noqa: F401 teaches numpy the name bfloat16
import numpy as np

import pycuda_conv as pc
from pycuda_conv import Plan, ndimage
from pycuda_conv.engines.layout import cast as casting
from pycuda_conv.engines.nn import batch_norm as normalising
from pycuda_conv.engines.nn import norm as norms
from pycuda_conv.engines.nn.batch_norm import Pixels
from pycuda_conv.engines.nn.max_pool import Pool
from pycuda_conv.engines.registry import uses_tensor_cores
from pycuda_conv.runtime import get_device

#: What is launched, in words, and a function that launches it and says whether all of the results are written, and with numbers.
Run = tuple[str, Callable[[], bool]]


def launched(plan, arrays, filter_last: bool) -> bool:
    """Launch `plan` once."""
    drv, dtype = plan.device._drv, plan.problem.result_dtype or plan.problem.dtype
    poison = np.nan if dtype == plan.problem.dtype else 1
    with plan.device:
        buffers = [0 if array is None else drv.to_device(array.view(np.uint8)) for array in arrays]
        result = drv.to_device(np.full(plan.result_shape, poison, dtype).view(np.uint8))
        workspace = drv.mem_alloc(plan.workspace_bytes) if plan.workspace_bytes else 0
        plan.launch((*(int(buffer) for buffer in buffers), int(result), int(workspace)), None, 0, filter_last)
        out = np.empty(plan.result_shape, dtype)
        drv.memcpy_dtoh(out.view(np.uint8), result)
    return bool(np.isfinite(out.astype(np.float64)).all())


def convolution(problem, config, with_moments: bool, large: bool) -> bool:
    """One plan, and once more with the filter's channels last if it reads or writes such.
    With `large` numbers the guarded kernels compute an image and a filter."""
    rng = np.random.default_rng(0)
    known = zip(problem.operand_shapes, problem.operand_dtypes, strict=True)
    arrays = [None if shape is None else rng.integers(-2, 3, shape).astype(dtype) for shape, dtype in known]
    if large:
        for array in arrays[:2]:  # an image of integers holds no such number, its filter does
            if array.dtype.kind not in "biu":
                array.flat[0] = 2.0**61
    plan = Plan(problem, get_device("cuda"), config=config, with_moments=with_moments)
    others = plan.reads_filter_last or plan.writes_filter_last
    good = [launched(plan, arrays, last) for last in (False, True)[: 1 + others]]
    return all(good)


def copy_strided() -> bool:
    """The gathering of an array that is not contiguous."""
    from pycuda import gpuarray

    with get_device("cuda"):
        wide, w = gpuarray.to_gpu(np.ones((2, 3, 5, 14), "f")), gpuarray.to_gpu(np.ones((4, 3, 3, 3), "f"))
        out = pc.conv2d(wide[:, :, :, ::2], w).get()
    return bool((out == 27).all())


def batch_norm(pixels: Pixels) -> bool:
    """All that normalises such an array, forwards and backwards, and its sums."""
    device, each = get_device("cuda"), "float64" if pixels.dtype == "float64" else "float32"
    array = np.random.default_rng(0).standard_normal((pixels.N, pixels.K, pixels.plane)).astype(pixels.dtype)
    ones, count, sums = np.ones(pixels.K, each), np.array([3]), np.ones(2 * pixels.K, each)
    some, mask = np.ones(pixels.K, pixels.dtype), np.full(pixels.items, 255, np.uint8)
    channels, finish = (ones,) * 4, ("relu",)
    good = True
    for maker, options, inputs, outs in (
        (normalising.statistics, (1e-5, 0.1), (array, count), (*channels, count.copy())), (normalising.channel_sums, (), (array,), (some,)),
        (normalising.forward, finish, (array, *channels, None), (array, None)), (normalising.forward, (*finish, True), (array, *channels, array), (array, mask.copy())),
        (normalising.backward, (*finish, True), (array, array, *channels, None), (array, sums, None)),
        (normalising.backward, (*finish, True, True), (array, array, *channels, mask), (array, sums, array))
    ):  # fmt: skip
        launch, workspace = normalising.compiled(maker, pixels, device, *options)
        good &= with_buffers(launch, inputs, outs, workspace)
    return good


def max_pool(pool: Pool) -> bool:
    """Maxima and their gradient."""
    x, y, taps = np.ones(pool.shape, pool.dtype), np.ones(pool.result_shape, pool.dtype), np.zeros(pool.result_shape, np.uint8)
    launcher = get_device("cuda").schedule_launcher
    if pool.mean:
        return with_buffers(launcher([[pool.forward()]]), (x,), (y,)) & with_buffers(launcher([[pool.backward()]]), (y,), (x,))
    return with_buffers(launcher([[pool.forward()]]), (x,), (y, taps)) & with_buffers(launcher([[pool.backward()]]), (y, taps), (x,))


def norm(one: norms.Norm) -> bool:
    """A norm in every form that takes it, and its gradients."""
    device, good = get_device("cuda"), True
    x = np.random.default_rng(0).standard_normal((one.N, one.C, one.P)).astype(one.dtype)
    of_channels, added, stats = np.ones(one.C, one.dtype), np.ones((one.N, one.C), one.dtype), np.ones((one.N, one.groups, 2), "f")
    forms = {
        norms.ROWS: norms.rows_of(one), norms.SLICED_ROWS: True
    } if one.in_rows else {norms.SMALL: norms.small_of(one), norms.PLANES: True}
    for form in (form for form, taken in forms.items() if taken):
        launch, workspace = norms.compiled(one, device, form)
        good &= with_buffers(launch, (x, of_channels, of_channels, None if one.in_rows else added), (x.copy(), stats.copy()), workspace)
    if norms.gradient_fits(one):
        launch, workspace = norms.compiled(one, device, "", True)
        inputs = x, x, stats, of_channels, of_channels, x if norms.adds_more(one) else None
        good &= with_buffers(launch, inputs, (x.copy(), of_channels.copy(), of_channels.copy()), workspace)
    return good


def cast(dtype: str) -> bool:
    """float32 to 16 bits and back, and a filter back with its channels last."""
    shape = 5, 7, 3, 3
    full, half, size = np.ones(shape, "f"), np.ones(shape, dtype), math.prod(shape)
    launcher = get_device("cuda").schedule_launcher
    return (
        with_buffers(launcher([[casting.narrow(dtype, (size, 0, 1))]]), (full,), (half,))
        & with_buffers(launcher([[casting.widen(dtype, (size, 0, 1))]]), (half,), (full,))
        & with_buffers(launcher([[casting.widen_filter(dtype, shape, 0, 1)]]), (half,), (full,))
    )


def with_buffers(launch, inputs, outs, workspace: int = 0) -> bool:
    """Launch on such arrays, each in a buffer of its own."""
    device = get_device("cuda")
    drv = device._drv
    with device:
        buffers = [0 if a is None else drv.to_device(a.view(np.uint8)) for a in (*inputs, *outs)]
        buffers.append(drv.mem_alloc(workspace) if workspace else 0)  # kept until the results are read
        launch([int(b) for b in buffers], None)
        good = True
        for out, buffer in zip(outs, buffers[len(inputs) : -1], strict=True):
            if out is not None:
                found = np.empty_like(out)
                drv.memcpy_dtoh(found.view(np.uint8), buffer)
                good &= bool(np.isfinite(found.astype(np.float64)).all())
    return good


def convolutions(cases: Iterable[covering.Case]) -> Iterator[Run]:
    """The cases; those of float32 in the range that the tensor cores compute, and beyond it."""
    for problem, config, with_moments in cases:
        line = " ".join(map(str, (config, problem, problem.direction, problem.layout, problem.dtype, problem.precision)))
        line += " with moments" * with_moments
        guarded = set(problem.operand_dtypes[:2]) == {"float32"} and uses_tensor_cores(config)
        for large in (False, True)[: 1 + guarded]:
            yield line + " large" * large, partial(convolution, problem, config, with_moments, large)


def image_filters(dtype: str, output: str) -> bool:
    """Filters of images and volumes with every border: passes in one launch and in two, dense filters, colours."""
    good, options = True, {"output": output, "device": "cuda"}
    for shape in ((70, 41), (9, 37, 3), (6, 20, 33)):
        x = np.ones(shape, dtype)
        for mode in ("reflect", "mirror", "nearest", "wrap", "constant"):
            made = [ndimage.gaussian_filter(x, 1.5, mode=mode, **options), ndimage.laplace(x, mode=mode, **options)]
            made.append(ndimage.correlate(x, np.arange(3.0 ** len(shape)).reshape((3,) * len(shape)), mode=mode, cval=1.0, **options))
            good &= all(bool(np.isfinite(one.astype(np.float64)).all()) for one in made)
    return good


def others() -> Iterator[Run]:
    """What belongs to no engine."""
    yield "copy_strided", copy_strided
    narrow = [(one, other) for one in ("uint8", "int8", "uint16", "int16") for other in (one, "float32")]
    for dtype, output in (("float64", "float64"), ("float32", "float32"), *narrow):
        yield f"images {dtype} {output}", partial(image_filters, dtype, output)
    for dtype in ("float16", "bfloat16"):
        yield f"cast {dtype}", partial(cast, dtype)
    for layout, dtype in product(("NCHW", "NHWC"), ("float32", "float16", "bfloat16")):
        pool = Pool(dtype, (2, 16, 9, 11), (3, 2), (2, 1), (1, 0), (1, 2), layout)
        yield f"max_pool {pool}", partial(max_pool, pool)
        if layout == "NHWC":
            means = Pool(dtype, (2, 16, 9, 11), (3, 2), (2, 1), (1, 0), (1, 1), layout, mean=True, counted=False)
            yield f"max_pool {means}", partial(max_pool, means)
    sizes = (2, 32, 70, 4), (1, 20, 333, 2), (2, 6, 9, 6), (5, 96, 1, 1), (2, 264, 600, 8), (1, 5, 4000, 1)
    for layout, dtype, (n, c, p, groups) in product(("NCHW", "NHWC"), ("float32", "float16", "bfloat16"), sizes):
        one = norms.Norm(dtype, layout, n, c, p, groups, activation="silu")
        yield f"norm {one}", partial(norm, one)
    for layout, k, plane, dtype in product(("NCHW", "NHWC"), (8, 65), (1, 15, 24), ("float16", "float32", "float64")):
        yield f"batch_norm {layout} {k} {plane} {dtype}", partial(batch_norm, Pixels(dtype, layout, 30, k, plane))


def in_turn(runs: list[Run]) -> list[Run]:
    """The first case of each engine or other kernel, then the second ones, and so on."""
    turns: dict[str, int] = {}
    placed = []
    for run in runs:
        name = re.split(r"[( ]", run[0], maxsplit=1)[0]
        turns[name] = turns.get(name, 0) + 1
        placed.append((turns[name], run))
    return [run for _, run in sorted(placed, key=lambda one: one[0])]


def main() -> int:
    parser = argparse.ArgumentParser(description="Every kernel on small arrays, for compute-sanitizer.")
    parser.add_argument("pattern", nargs="?", default="", help="a regular expression: only the cases in whose line it is found")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every N-th case, from the I-th on")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after so many seconds")
    options = parser.parse_args()
    began = time.monotonic()
    os.environ["PYCUDA_CONV_BACKGROUND"] = "0"
    first, step = map(int, options.part.split("/"))
    wanted, bad = re.compile(options.pattern).search, 0
    cases = covering.cases(get_device("cuda"))
    print("no case has", *covering.missing(get_device("cuda"), cases), sep="\n    ")
    runs = in_turn([run for run in (*convolutions(cases), *others()) if wanted(run[0])])[first - 1 :: step]
    for number, (line, launch) in enumerate(runs):
        if time.monotonic() - began > options.seconds:
            print(f"not begun: {len(runs) - number} of {len(runs)} cases", *(f"    {line}" for line, _ in runs[number:]), sep="\n")
            break
        good = launch()
        print("ok " if good else "BAD", line, flush=True)
        bad += not good
    return bad


if __name__ == "__main__":
    sys.exit(main())
