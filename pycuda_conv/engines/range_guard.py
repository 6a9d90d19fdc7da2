"""What 16-bit limbs can't hold: which values are flagged, and the launches that compute with them once more in plain fp32.

Packing scales each image and each output channel of the filter, and flags those whose values don't all fit; the launches here
find the flags on the device. The host is not asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from pycuda_conv.engines import direct_gemm
from pycuda_conv.engines.geometry import divider
from pycuda_conv.engines.schedule import WORKSPACE, Arena, Moments
from pycuda_conv.engines.tensor_cores import limbs
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import KernelLaunch, Place


def slack(problem: ConvProblem) -> int:
    """How many bits less than their limbs hold values may have before they are flagged."""
    gemm_k = problem.operand_channels // problem.groups * math.prod(problem.filter_size)
    return int(math.log2(gemm_k) / 2) if limbs(problem) == 2 else 2


def guarded(
    problem: ConvProblem, found: Sequence[Place], multiprocessors: int, filter_last: bool, redone: tuple[int, int] | None, patch_rows: int
) -> list[KernelLaunch]:
    """Launches that mend what depends on flagged images and channels of `problem`: see ``direct_gemm.cu``.

    `found`: where the flags of images and filters lie, and their scales. `filter_last`: the filter, of a forward convolution, has
    its channels last. `redone`: where each block says whether it did anything. `patch_rows`: scales and flags are not of images but
    of patches of 8 columns and so many rows of the result.
    """
    launches = direct_gemm.products(problem, direct_gemm.Gemm(128, 128, 16, 8, 8, 1), filter_last)
    *_, last = launches
    units = {"units": problem.N, "unit_image": 1}
    if patch_rows:
        _, p, q = problem.result_size
        across, images = q // 8, problem.N
        each = p // patch_rows * across
        units = {"units": problem.groups * images * each, "unit_group": images * each, "unit_image": each, "row_units": across}
    return [
        replace(
            step, defines={**step.defines, "GUARDED": 1, "A_VEC": 1, "B_VEC": 1},  # one kernel for all sizes: it seldom has anything to do
            arguments=cast(direct_gemm.GemmArguments, step.arguments)._replace(
                n_blocks=step.grid, **units, patch_rows=patch_rows, by_patch_rows=divider(patch_rows), followed=int(step is not last),
                noted=int(redone is not None),
            ),
            grid=min(step.grid, multiprocessors),  # its registers leave room for no second block
            buffers=(*step.buffers, *found, redone or found[0]),  # if nothing is noted, the last is not written
        )
        for step in launches
    ]


class MomentsLayout:
    """Makes room for `moments`, if there are to be any: the place of their parts, and the guarded launches that say what they redid."""

    def __init__(self, moments: Moments | None, scratch: Arena, multiprocessors: int) -> None:
        self._multiprocessors = multiprocessors
        self.parts: tuple[int, int] = (WORKSPACE, 0)
        self._redone: tuple[int, int] | None = None
        self.moments = moments
        if moments is not None:
            self.parts, self._redone = scratch.take(moments.nbytes), scratch.take(4 * multiprocessors)
            self.moments = replace(moments, parts=self.parts[1], redone=self._redone[1])

    def guarded(self, problem: ConvProblem, found: Sequence[tuple[int, int]], filter_last: bool, patch_rows: int) -> list[KernelLaunch]:
        """:func:`guarded`."""
        steps = guarded(problem, found, self._multiprocessors, filter_last, self._redone, patch_rows)
        if self.moments is not None:
            self.moments = replace(self.moments, blocks=steps[0].grid)
        return steps
