"""Launches of ``cu/layout/border_planes.cu``: small planes with their borders, and the way back, on a GPU. Where none serves it is None."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pycuda_conv import borders
from pycuda_conv.engines.geometry import accumulator_bytes, arguments, bits, by_axis, ceil, side_numbers
from pycuda_conv.engines.schedule import INPUT, RESIDUAL
from pycuda_conv.engines.struct import kernel_struct
from pycuda_conv.engines.variants import VariantSet, portable, portable_choices
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import BufferSlice, Device, KernelLaunch

THREADS = 256
MOST_SHARED = 40 << 10  # bytes of a block
ENOUGH = 20 << 10  # bytes of a block's planes from which on more gain nothing
BLOCKS_EACH = 4  # blocks of a multiprocessor

PlanesArguments = kernel_struct("border_planes", "PlanesArguments")


def copy(problem: ConvProblem, outer: int, big: bool, to: BufferSlice, device: Device) -> KernelLaunch | None:
    """Copy `outer` images or planes of the image with their borders, or None."""
    return None if problem.input_dtype else _launch("border_planes_copy", problem, problem.operand_size, outer, big, (INPUT, to), device)


def fold(problem: ConvProblem, outer: int, big: bool, wide: BufferSlice, to: BufferSlice, device: Device) -> KernelLaunch | None:
    """Add the border of `outer` images' gradients to the pixels that it shows, and a residual; or None."""
    return _launch("border_planes_fold", problem, problem.input_size, outer, big, (wide, RESIDUAL, to), device)


def _launch(
    kernel: str, problem: ConvProblem, size: tuple[int, int, int], outer: int, big: bool, buffers: tuple[BufferSlice, ...], device: Device
) -> KernelLaunch | None:
    (before_d, *before), (after_d, *after) = problem.border_sizes
    (d, *narrow), folds = size, kernel == "border_planes_fold"
    if device.backend != "cuda" or before_d or after_d or min(*before, *after) < 0:
        return None
    wide, planes = [b + n + a for b, n, a in zip(before, narrow, after, strict=True)], outer * d
    read, written = (math.prod(wide), math.prod(narrow)) if folds else (math.prod(narrow), math.prod(wide))
    itemsize, tables = problem.itemsize, 16 * ceil(sum(wide), 4)
    held = accumulator_bytes(problem) if folds else itemsize
    unit = next((n for n in (1, 2, 4, 8) if n * read * itemsize % 16 == 0 and n * written * itemsize % 4 == 0), 0)
    if not unit or not read or tables + unit * read * held > MOST_SHARED:
        return None
    some = min(ENOUGH // (unit * read * held), ceil(ceil(planes, unit), BLOCKS_EACH * device.multiprocessors))
    each = unit * max(some, 1)
    args = arguments(
        PlanesArguments, side_numbers(narrow, (problem.border or borders.NONE)[1:], "hw"), planes=planes, each=each,
        **by_axis("", narrow, "hw"), **by_axis("wide_", wide, "hw"), **by_axis("before_", before, "hw"),
        value=0 if folds else bits(problem.border_value, accumulator_bytes(problem)), has_residual=int(folds and problem.has_residual),
    )  # fmt: skip
    defines, shared = portable(problem.dtype, big, THREADS), tables + each * read * held
    return KernelLaunch(kernel, defines, ceil(planes, each), THREADS, buffers, (), "border_planes", shared=shared, arguments=args)


def variants() -> Iterator[VariantSet]:
    """A text for each type."""
    yield VariantSet("border_planes", portable_choices(THREADS))
