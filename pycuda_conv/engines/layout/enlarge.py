"""Launches for upsampled images: ``cu/layout/upsampled.cu`` enlarges them, and ``cu/layout/sum_taps.cu`` sums a filter's taps."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pycuda_conv.engines.geometry import arguments, by_axis, ceil
from pycuda_conv.engines.schedule import INPUT, WEIGHT
from pycuda_conv.engines.struct import kernel_struct
from pycuda_conv.engines.variants import VariantSet, portable, portable_choices
from pycuda_conv.problem import DTYPE_CODES, ConvProblem
from pycuda_conv.runtime.base import BufferSlice, Device, KernelLaunch

THREADS = 256
MOST_VARIANTS = {"cuda": 9, "opencl": 9}  # texts, as an engine says it
WORDS = (1, 2, 4, 8, 16)  # bytes of what a thread copies
ROWS, MOST = 32, 144  # rows of a block of sum_taps.cu, and elements of a row that it keeps: half as many of float64

EnlargeArguments = kernel_struct("upsampled", "EnlargeArguments")
SumTapsArguments = kernel_struct("sum_taps", "SumTapsArguments")


def enlarge(problem: ConvProblem, to: BufferSlice) -> KernelLaunch:
    """Enlarge the image that an upsampling `problem` reads."""
    last = problem.layout == "NHWC"
    pixel = problem.input_itemsize * (problem.operand_channels if last else 1)
    word = next(n for n in reversed(WORDS) if pixel % n == 0)
    inner, (_, h, w) = pixel // word, problem.operand_size
    size = math.prod(problem.input_shape) * problem.input_itemsize // word
    big = size * math.prod(problem.upsample) >= 2**31 - 2**20
    undivided = {"by_inner": 0, "by_line": 0, "by_h": 0} if big else {}  # kernels that count in 64 bits need no prepared divisors
    args = arguments(
        EnlargeArguments, size=size, inner=inner, line=inner * w, h=h, **undivided, **by_axis("times_", problem.upsample)
    )
    defines = {"DTYPE": DTYPE_CODES["float32"], "BYTES": word, "INDEX_64": int(big), "THREADS": THREADS}
    return KernelLaunch("enlarge", defines, ceil(size, THREADS), THREADS, (INPUT, to), (), "upsampled", arguments=args)


def sum_taps(problem: ConvProblem, given_last: bool, last: bool, to: BufferSlice, of_gradient: bool = False) -> KernelLaunch:
    """Make the filter of the :attr:`ConvProblem.transposed_form` of a `problem` that is folded; or of that filter's gradient the problem's.

    With `given_last` the second axis of what is given is last in memory; with `last`, that of what is made.
    """
    sizes, empty = (problem.filter_size, problem.transposed_form.filter_size), [before for before, _ in problem.empty_taps]
    rows, channels = problem.K // problem.groups, problem.C // problem.groups
    if of_gradient:  # a tap of the filter is in as many sums, which are neighbours in the other order too
        empty = [before + n - m for before, n, m in zip(empty, *sizes, strict=True)]
        sizes, rows, channels = sizes[::-1], channels, rows
    (t, r, s), made = sizes
    taps, given = math.prod(made), t * r * s
    steps = (given * channels, 1, channels) if given_last else (given * channels, given, 1)
    most = MOST // 2 if problem.dtype == "float64" else MOST
    across = max(1, min(channels, most // given))
    tiles, tiles_k = ceil(channels, across), ceil(rows, ROWS)
    args = arguments(
        SumTapsArguments, rows=rows, channels=channels, across=across, tiles=tiles, tiles_k=tiles_k, given=given, taps=taps,
        r_taps=made[1], s_taps=made[2], run=across * given, shared=int(given <= most), last=int(last),
        given_last=int(given_last), t=t, r=r, s=s, **by_axis("times_", problem.upsample),
        **by_axis("empty_", empty),
        **dict(zip(("row_step", "channel_step", "tap_step"), steps, strict=True)),
    )  # fmt: skip
    big = problem.groups * rows * channels * max(taps, given) >= 2**31 - 2**20
    grid = tiles * tiles_k * problem.groups
    return KernelLaunch("sum_taps", portable(problem.dtype, big, THREADS), grid, THREADS, (WEIGHT, to), (), arguments=args)


def variants(device: Device) -> Iterator[VariantSet]:
    """A text for each size of words, and for each type of filters."""
    yield VariantSet("upsampled", portable_choices(THREADS) | {"DTYPE": (DTYPE_CODES["float32"],), "BYTES": WORDS})
    yield VariantSet("sum_taps", portable_choices(THREADS))
