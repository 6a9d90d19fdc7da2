"""Values that 16-bit limbs can't hold: how they are flagged, and how their results are computed once more in plain fp32.

Packing scales each image and each output channel of the filter, and flags those with values that don't fit. The launches here,
or the product itself, read the flags on the device, without the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from pycuda_conv.engines.direct import gemm as direct_gemm
from pycuda_conv.engines.geometry import Phase, filter_strides, near_sides, phases, read_strides, row_major
from pycuda_conv.engines.schedule import WORKSPACE, Arena, Moments
from pycuda_conv.engines.struct import kernel_struct
from pycuda_conv.engines.tensor_cores import limbs
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import BufferSlice, KernelLaunch


def slack(problem: ConvProblem) -> int:
    """Bits by which values may fall below what their limbs hold before they are flagged."""
    gemm_k = problem.operand_channels // problem.groups * math.prod(problem.filter_size)
    return int(math.log2(gemm_k) / 2) if limbs(problem) == 2 else 2


def guarded(
    problem: ConvProblem, found: Sequence[BufferSlice], multiprocessors: int, filter_last: bool, redone: tuple[int, int] | None
) -> list[KernelLaunch]:
    """Launches that recompute the results that depend on flagged images and channels of `problem`: see ``direct/gemm.cu``.

    `found`: the places of the flags of images and filters, and of their scales. `filter_last`: the filter has its second axis
    last. `redone`: where each block writes whether it computed results again.
    """
    launches = direct_gemm.products(problem, direct_gemm.Gemm(128, 128, 16, 8, 8, 1), filter_last)
    *_, last = launches
    return [
        replace(
            step, defines={**step.defines, "RECOMPUTE": 1, "A_VEC": 1, "B_VEC": 1},  # one kernel for all sizes, since it seldom has work
            arguments=cast(Any, step.arguments)._replace(
                n_blocks=step.grid, images=problem.N, followed=int(step is not last), with_moments=int(redone is not None),
                **(near_sides(problem) or {}),
            ),
            grid=min(step.grid, multiprocessors),  # registers leave no room for a second block
            buffers=(*step.buffers, *found, redone or found[0]),  # without `redone` the last buffer is not written
        )
        for step in launches
    ]


#: How operands lie in memory, and how a convolution reads them.
RecomputeArrays = kernel_struct("recompute.cuh", "RecomputeArrays")
#: How a phase reads them.
RecomputePhase = kernel_struct("recompute.cuh", "RecomputePhase")


def recompute_arguments(problem: ConvProblem, launched: Sequence[Phase], most: int, filter_last: bool) -> tuple[tuple[int, ...], ...]:
    """The structs of ``recompute.cuh`` for a launch of at most `most` phases; `filter_last` as for :func:`guarded`."""
    x, channels = read_strides(problem), problem.operand_channels // problem.groups
    w_group, w_m, w_c, w_tap = filter_strides(problem, filter_last)
    tap_strides = tuple(n * w_tap for n in row_major(problem.filter_size))
    if problem.direction == "fprop":  # the launch's phase may have folded taps
        launched = phases(problem)
    args = [
        RecomputePhase(*phase.taps, *phase.pad, sum(f * n for f, n in zip(phase.first, tap_strides, strict=True))) for phase in launched
    ]
    # phases with taps along an axis say how far these are apart
    by_axis = [max(launched, key=lambda phase: phase.taps[i]) for i in range(3)]
    taps = tuple(by_axis[i].every[i] * tap_strides[i] for i in range(3))
    stride, dilation = tuple(by_axis[i].stride[i] for i in range(3)), tuple(by_axis[i].dilation[i] for i in range(3))
    arrays = RecomputeArrays(
        channels, *problem.operand_size, x.image, x.group, x.channel, x.pixel, w_group, w_m, w_c, *taps, *stride, *dilation,
        **(near_sides(problem) or {}),
    )
    return *args, *args[-1:] * (most - len(args)), arrays


class MomentsLayout:
    """The place of `moments` in the workspace, if there are any, and of the flags that say what launches computed again."""

    def __init__(self, moments: Moments | None, scratch: Arena, multiprocessors: int) -> None:
        self._multiprocessors = multiprocessors
        self.parts: tuple[int, int] = (WORKSPACE, 0)
        self.redone: tuple[int, int] | None = None
        self.moments = moments
        if moments is not None:
            self.parts, self.redone = scratch.take(moments.nbytes), scratch.take(4 * multiprocessors)
            self.moments = replace(moments, parts=self.parts[1], redone=self.redone[1])

    def guarded(self, problem: ConvProblem, found: Sequence[tuple[int, int]], filter_last: bool) -> list[KernelLaunch]:
        """:func:`guarded`."""
        steps = guarded(problem, found, self._multiprocessors, filter_last, self.redone)
        self.redone_by(steps)
        return steps

    def redone_by(self, steps: Sequence[KernelLaunch]) -> None:
        """Take note of the launch whose blocks tell what they computed again."""
        if self.moments is not None:
            self.moments = replace(self.moments, blocks=steps[0].grid)
