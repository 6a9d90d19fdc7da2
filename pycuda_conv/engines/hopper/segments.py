"""Two convolutions whose sums are one: ``cu/hopper/dense.cu`` with SEGMENTS = 2, which reads two arrays where they lie.

They have the same result: of two arrays as if their channels were joined, or of a 1x1 filter of one array beside a 3x3 of the other. The
sums are those of both, in the order first, second, and are rounded once.
"""

from __future__ import annotations

import math
from dataclasses import replace

from pycuda_conv.engines.hopper import dense, dense_form, dense_launches
from pycuda_conv.engines.hopper.common import ROW, image_map, map_type, stage_channels
from pycuda_conv.engines.hopper.dense_form import DenseNhwc
from pycuda_conv.engines.schedule import FINISH, INPUT, RESULT, WEIGHT, Buffer, finish_constants
from pycuda_conv.engines.tensor_cores import ELEMENTS
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import Device, KernelLaunch, TensorMap

#: The buffers of the second array and its filter, behind those of a plan.
SECOND, SECOND_WEIGHT = len(Buffer), len(Buffer) + 1
#: Tiles that are compiled for it.
TILES = (DenseNhwc(128, 128), DenseNhwc(128, 64), DenseNhwc(64, 64), DenseNhwc(64, 32))


def why_not(first: ConvProblem, second: ConvProblem, device: Device) -> str | None:
    """Why the kernel can't compute the sum of both, or None if it can."""
    if device.backend != "cuda" or device.capability != (9, 0):
        return "it takes a GPU of compute capability 9.0"
    for problem in (first, second):
        reason = dense.TAKES.why_not(problem)
        if reason or problem.direction != "fprop" or problem.adapted or problem.groups != 1:
            return reason or "it computes forward convolutions of one group with zeros around"
        if problem.C * problem.itemsize % 16:
            return "tensor loads take a pixel's channels, of a multiple of 16 bytes"
    return None


def choose(first: ConvProblem, second: ConvProblem, device: Device) -> tuple[float, DenseNhwc]:
    """The tile that should take the least time, behind the microseconds: those of both convolutions, less one beginning and one store."""

    def time(config: DenseNhwc) -> float:
        plain = replace(second, has_bias=False, has_scale=False, has_residual=False, activation=None)
        stored = second.itemsize * math.prod(second.result_shape) / dense.COST.MEMORY
        return dense.time(first, config, device) + max(0.0, dense.time(plain, config, device) - dense.HOPPER_COST.BEGIN - stored)

    fits = [tile for tile in TILES if dense.LEGAL.refusal(first, tile) is None and dense.LEGAL.refusal(second, tile) is None]
    return min(((time(tile), tile) for tile in fits), key=lambda pair: pair[0])


def launch(
    first: ConvProblem, second: ConvProblem, config: DenseNhwc, device: Device, joined_filter: bool = False
) -> KernelLaunch:
    """The launch for both. The epilogue is that of the first.

    Filters have their second axis last in memory. With `joined_filter` there is one, for the channels of both.
    """
    tile = dense_form.deepest(config, False)
    (_, (one,)), (_, (other,)) = dense_form.addressed(first), dense_form.addressed(second)
    behind = dense_launches.phase_arguments(second, tile, other)
    total = dense_launches.phase_arguments(first, tile, one)
    blocks = total.blocks + behind.blocks
    total, behind = total._replace(blocks=blocks, part=blocks, last_steps=dense_form.STEPS), behind._replace(last_steps=dense_form.STEPS)
    maps = []
    for problem, addressing, x in ((first, one, INPUT), (second, other, SECOND)):
        w, start, pitch = (SECOND_WEIGHT if x is SECOND else WEIGHT), 0, problem.C
        if joined_filter:
            w, start, pitch = WEIGHT, first.C if x is SECOND else 0, first.C + second.C
        images = image_map(problem, x, dense_form.addressed(problem)[0], addressing, tile.BLOCK_M)
        maps += [images, images, *[_filter_map(problem, tile, w, start, pitch)] * 2]
    defines = {
        "BLOCK_M": tile.BLOCK_M, "BLOCK_N": tile.BLOCK_N, "STAGES": tile.STAGES, "TYPE": ELEMENTS[first.dtype], "W_MN_MAJOR": 0,
        "CLUSTER": 1, "PHASES": 1, "SEGMENTS": 2,
    }
    grid = min(total.tiles, device.multiprocessors * dense_form.blocks_per_sm(tile))
    shared, layer = dense_form.ring_of(tile, False).nbytes(tile.STAGES), {"WITH_MOMENTS": 0, "LAST_STEPS": dense_form.STEPS}
    return KernelLaunch(
        "hopper_dense", defines, grid, 2 * tile.BLOCK_M + 32, (*FINISH, RESULT, RESULT), (), maps=tuple(maps), shared=shared, arch="sm_90a",
        arguments=(total, behind), layer=finish_constants(total) | layer,
    )  # fmt: skip


def _filter_map(problem: ConvProblem, config: DenseNhwc, buffer: int, start: int, pitch: int) -> TensorMap:
    """The map of a filter, or of some channels of one with `pitch` channels, from number `start` on."""
    taps, size, wide = math.prod(problem.filter_size), problem.itemsize, stage_channels(problem)
    box = wide, 1, min(config.BLOCK_N, problem.K)
    return TensorMap(buffer, size * start, (problem.C, taps, problem.K), (size * pitch, size * pitch * taps), box, ROW, map_type(problem))
