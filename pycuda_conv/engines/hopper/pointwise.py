"""1x1 convolutions of float32 arrays, and their gradients, on Hopper's tensor cores in TF32 (``cu/hopper/pointwise.cu``).

Only the filter is packed. A product in TF32 takes twice the time of one in 16 bits: if there is more to multiply than to read, the packed
operands of :mod:`pycuda_conv.engines.hopper.gemm` win.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from pycuda_conv.engines.base import FLAG, Config, ConvProblem, VariantSet, costs, kernel_struct
from pycuda_conv.engines.costs import together
from pycuda_conv.engines.geometry import arguments, ceil, filter_strides, pixel_by_pixel
from pycuda_conv.engines.hopper.common import SHARED_BYTES, THREADS, tight_map
from pycuda_conv.engines.hopper.ring import ALIGNMENT, Ring
from pycuda_conv.engines.limits import HOPPER, IN_32_BITS, NOT_EMPTY, ONE_GROUP, Takes, Tiles, types
from pycuda_conv.engines.range_guard import MomentsLayout
from pycuda_conv.engines.schedule import FINISH, INPUT, PACKED, RESULT, WEIGHT, WORKSPACE, Arena, Moments, Schedule, finishing
from pycuda_conv.engines.split_sum import reduce_launch, splits
from pycuda_conv.engines.tensor_cores import limbs, products
from pycuda_conv.runtime.base import BufferSlice, Device, KernelLaunch, TensorMap

WARPS = 8  # of the consumers
DEPTHS = (6, 5, 4, 3)  # stages of a ring that are tried


@dataclass(frozen=True)
class Pointwise(Config):
    """One tile of ``hopper/pointwise.cu``.

    BLOCK_N columns, BLOCKS times 16 rows of each warp, the STAGES of its ring, and SPLIT parts of k.
    """

    BLOCK_N: int = 64
    BLOCKS: int = 2
    STAGES: int = 4
    SPLIT: int = 1

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 16 * WARPS * self.BLOCKS


CONFIGS, LAYOUTS, RUNS_ON, TENSOR_CORES, MOST_VARIANTS = (Pointwise,), ("NCHW", "NHWC", "CNHW"), HOPPER, True, {"cuda": 48}
ORDER = ("SPLIT",)  # what the order of sums depends on
COST = costs("hopper.pointwise")
PointwiseProduct = kernel_struct("hopper_pointwise", "PointwiseProduct")
#: The arguments of ``split_filter``.
SplitFilter = kernel_struct("hopper_pointwise", "SplitFilter")


def _alike(problem: ConvProblem) -> bool:
    """Whether each pixel has to do with one other alone."""
    ones = (1, 1, 1)
    if not _wgrad(problem):
        return pixel_by_pixel(problem)
    alike = problem.operand_size == problem.filter_size and problem.result_size == ones == problem.stride == problem.dilation
    return alike and not any(problem.padding_before)


def _fits(problem: ConvProblem, config: Pointwise) -> str | None:
    most = 128 if products(problem) == 3 else 256  # one set of sums, or three for three products, fills the registers
    if config.BLOCK_N * config.BLOCKS > most:
        return f"a tile has {most} columns in all its blocks"
    if config.BLOCKS == 1 and problem.layout == "NCHW":
        return "a thread takes four neighbouring pixels of an image"
    if config.SPLIT > 1 and not _wgrad(problem):
        return "the gradient of a filter alone is split"
    return _ring(config, limbs(problem)).refusal(config.STAGES, config.SPLIT)


TAKES = Takes(
    types("float32"), ONE_GROUP, NOT_EMPTY, ("it takes 1x1 filters without stride and padding", _alike),
    (
        "tensor loads take planes, or a pixel's channels, of a multiple of 16 bytes",
        lambda p: (p.operand_channels if p.layout == "NHWC" else math.prod(p.operand_size)) % 4 == 0,
    ),
    IN_32_BITS,
)  # fmt: skip
LEGAL = Tiles(TAKES, Pointwise, _fits, BLOCKS=(1, 2), BLOCK_N=(32, 64, 96, 128))


def _wgrad(problem: ConvProblem) -> bool:
    return problem.layout == "CNHW"


def _reads_filter(problem: ConvProblem) -> bool:
    """Whether the filter is read as it lies; the tensor load rounds it to TF32."""
    return products(problem) == 1 and problem.direction == "fprop" and not _wgrad(problem) and problem.operand_channels % 4 == 0


def _stage_bytes(config: Pointwise, limbs_each: int) -> tuple[int, int]:
    """Bytes of a stage of the rows, and of the columns."""
    return 128 * config.rows, 128 * config.BLOCK_N * limbs_each


def _ring(config: Pointwise, limbs_each: int) -> Ring:
    return Ring(sum(_stage_bytes(config, limbs_each)), ALIGNMENT, SHARED_BYTES)


@dataclass(frozen=True)
class _Product:
    """The matrix product of a problem: see the head of the kernel."""

    across: int  # tiles along its columns
    down: int  # and along its rows
    steps: int  # stages of k
    rows: int
    columns: int
    busy: int  # warps of a tile that have rows
    row_step: int  # elements of the result from one row to the next
    column_step: int  # and from one column
    splits: int

    @classmethod
    def of(cls, problem: ConvProblem, config: Pointwise, multiprocessors: int) -> _Product:
        plane, read, written = math.prod(problem.operand_size), problem.operand_channels, problem.result_channels
        boxes, images, busy = ceil(plane, 32), problem.N, WARPS
        if _wgrad(problem):
            rows, columns, steps = written, images, read * boxes
            down, places = ceil(rows, config.rows), (images, 1)
        elif problem.layout == "NHWC":
            rows, columns, steps = images * plane, written, ceil(read, 32)
            down, places = ceil(rows, config.rows), (written, 1)
        else:
            rows, columns, steps = images, written, ceil(read, 32)
            busy = _busy(images * boxes, ceil(columns, config.BLOCK_N), multiprocessors, products(problem) == 1)
            down, places = ceil(images * boxes, busy), (written * plane, plane)
        return cls(ceil(columns, config.BLOCK_N), down, steps, rows, columns, busy, *places, config.SPLIT)

    @property
    def tiles(self) -> int:
        return self.across * self.down * self.splits

    def arguments(self, problem: ConvProblem) -> Any:
        """The kernel's arguments."""
        plane = math.prod(problem.operand_size)
        return arguments(
            PointwiseProduct, problem, self, tiles=self.tiles, each=ceil(self.steps, self.splits), boxes=ceil(plane, 32), plane=plane,
            pairs=int(self.column_step == 1 and self.columns % 2 == 0),
        )


def _busy(boxes: int, across: int, multiprocessors: int, one_product: bool) -> int:
    """Warps of a tile that have a box: as few as take no more rounds of tiles than all warps would.

    The other warps multiply all the same. So with three products, which bound a tile's time, this gains only in a single round.
    """
    rounds = ceil(across * ceil(boxes, WARPS), multiprocessors)
    return ceil(boxes, rounds * multiprocessors // across) if one_product or rounds == 1 else WARPS


def schedule(problem: ConvProblem, config: Pointwise, device: Device, with_moments: bool = False) -> Schedule:
    multiprocessors = device.multiprocessors
    scratch, kept = Arena(WORKSPACE), Arena(PACKED)
    layout = MomentsLayout(_moments(problem, config) if with_moments else None, scratch, multiprocessors)
    product, split = _Product.of(problem, config, multiprocessors), config.SPLIT > 1
    defines = {
        "BLOCK_N": config.BLOCK_N, "BLOCKS": config.BLOCKS, "STAGES": config.STAGES, "LIMBS": limbs(problem), "WGRAD": int(_wgrad(problem)),
        "NHWC": int(problem.layout == "NHWC"), "MOMENTS": int(layout.moments is not None),
    }
    target: BufferSlice = scratch.take(4 * config.SPLIT * math.prod(problem.result_shape)) if split else RESULT
    prepare: list[list[KernelLaunch]] = []
    if _wgrad(problem):
        maps = [_planes(problem, WEIGHT, problem.K, config.rows), _planes(problem, INPUT, problem.N, config.BLOCK_N)]  # dy, x
    elif _reads_filter(problem):
        sizes = problem.operand_channels, problem.result_channels, 1
        maps = [_images(problem, config), tight_map(WEIGHT, sizes, (32, config.BLOCK_N, 1), "tfloat32")]  # the load rounds it
    else:
        step, of_filter = _filter(problem, config, kept, defines)
        prepare, maps = [[step]], [_images(problem, config), of_filter]
    moments_at: tuple[BufferSlice, ...] = (layout.parts,) if layout.moments else ()
    buffers, grid = (*FINISH, target, *moments_at), min(product.tiles, multiprocessors)
    shared, args = _ring(config, limbs(problem)).nbytes(config.STAGES), product.arguments(problem)
    steps = [[finishing("hopper_pointwise", defines, grid, THREADS, args, buffers, maps=tuple(maps), shared=shared, arch="sm_90a")]]
    if split:
        steps.append([reduce_launch(problem, config.SPLIT, target)])
    return Schedule(prepare, steps, prepare + steps, scratch.used, kept.used, moments=layout.moments)


def _moments(problem: ConvProblem, config: Pointwise) -> Moments | None:
    """The moments that the product can note: forward, without a residual or an activation."""
    if problem.direction != "fprop" or _wgrad(problem) or problem.has_residual or problem.activation:
        return None
    plane = math.prod(problem.result_size)
    sets, span = (problem.N, plane) if problem.layout == "NCHW" else (1, problem.N * plane)
    return Moments(sets, span, 16 * config.BLOCKS, problem.result_channels)


def _planes(problem: ConvProblem, array: int, channels: int, rows: int) -> TensorMap:
    """The map of an array of images as wgrad reads it: a box is `rows` rows of 32 pixels."""
    plane, images = math.prod(problem.operand_size), problem.operand_channels
    return tight_map(array, (plane, channels, images), (32, rows, 1), "float32")


def _images(problem: ConvProblem, config: Pointwise) -> TensorMap:
    """The map of the images: a box is 32 channels of 32 pixels, or in NHWC of all pixels of a tile."""
    plane, channels = math.prod(problem.operand_size), problem.operand_channels
    if problem.layout == "NHWC":
        return tight_map(INPUT, (channels, problem.N * plane, 1), (32, config.rows, 1), "float32")
    return tight_map(INPUT, (plane, channels, problem.N), (32, 32, 1), "float32")


def _filter(problem: ConvProblem, config: Pointwise, kept: Arena, defines: dict[str, int]) -> tuple[KernelLaunch, TensorMap]:
    """The launch that splits the filter into limbs, and the limbs' map."""
    rows, channels = problem.result_channels, problem.operand_channels
    padded = ceil(channels, 4) * 4
    place = kept.take(4 * limbs(problem) * rows * padded)
    _, row_step, channel_step, _ = filter_strides(problem)
    args = arguments(SplitFilter, rows=rows, channels=channels, padded=padded, row_step=row_step, channel_step=channel_step)
    grid = ceil(rows * padded, 256)
    step = KernelLaunch("split_filter", defines, grid, 256, (WEIGHT, place), (), "hopper_pointwise", arch="sm_90a", arguments=args)
    return step, tight_map(place, (padded, rows, limbs(problem)), (32, config.BLOCK_N, 1), "float32")


def filter_key(problem: ConvProblem, config: Pointwise) -> Hashable:
    """Equal for problems whose filter is split alike; None if it is read as it lies."""
    if _reads_filter(problem):
        return None
    return "split", problem.direction, problem.precision, problem.C, problem.K


def variants(device: Device) -> Iterator[VariantSet]:
    for blocks, columns, limbs_each in product((1, 2), (32, 64, 96, 128), (1, 2)):
        stages = _ring(Pointwise(columns, blocks), limbs_each).deepest(DEPTHS)
        if stages and columns * blocks <= (128 if limbs_each == 2 else 256):
            choices = {
                "BLOCK_N": (columns,), "BLOCKS": (blocks,), "STAGES": (stages,), "LIMBS": (limbs_each,), "WGRAD": FLAG, "NHWC": FLAG,
                "MOMENTS": FLAG,
            }  # fmt: skip
            yield VariantSet("hopper_pointwise", choices, _is_listed, "sm_90a")


def _is_listed(d: Mapping[str, int]) -> bool:
    if d["WGRAD"]:
        return d["BLOCKS"] == 1 and not (d["NHWC"] or d["MOMENTS"])
    return d["NHWC"] == 1 or d["BLOCKS"] == 2


def configs(problem: ConvProblem, device: Device) -> Iterator[Pointwise]:
    parts = splits(problem, _Product.of(problem, Pointwise(), 1).steps // 8) if _wgrad(problem) else (1,)
    deepest: dict[tuple[int, int], Pointwise] = {}
    for tile in LEGAL.legal(problem, BLOCKS=(1,) if _wgrad(problem) else (1, 2), STAGES=DEPTHS):
        deepest.setdefault((tile.BLOCKS, tile.BLOCK_N), tile)
    for tile in deepest.values():
        yield from (replace(tile, SPLIT=split) for split in parts)


def time(problem: ConvProblem, config: Pointwise, device: Device) -> float:
    """Microseconds that `config` should take: arithmetic, bytes from memory and from the caches, rounds of tiles."""
    multiprocessors = device.multiprocessors
    product, (of_rows, of_columns) = _Product.of(problem, config, multiprocessors), _stage_bytes(config, limbs(problem))
    rows = config.rows * product.busy // WARPS
    of_rows = of_rows * product.busy // WARPS
    wgrad, steps = _wgrad(problem), ceil(product.steps, config.SPLIT)
    if wgrad:
        of_columns //= limbs(problem)
    cycles = 4 * products(problem) * config.BLOCKS * config.BLOCK_N  # of 4 times 8 of k, by two consumers
    step = together(COST.TOGETHER, (cycles + COST.WAIT_CYCLES) / COST.CLOCK, (of_rows + of_columns) / COST.FILL)
    # the first of the tiles that share something reads it from memory
    written = rows * min(config.BLOCK_N, product.columns) * 4
    moved = steps * (of_rows / product.across + (of_columns / product.down if wgrad else 0)) + written
    tile = together(COST.TOGETHER, steps * step + COST.STORE_TIME * rows * config.BLOCK_N / 2**14, moved / COST.MOVED)
    if problem.has_residual:
        tile += written / COST.RESIDUAL_RATE
    us = COST.LAUNCHES_TIME[wgrad] + ceil(product.tiles, multiprocessors) * tile
    if config.SPLIT > 1:
        us += COST.REDUCE + math.prod(problem.result_shape) * (8 * config.SPLIT + 4) / COST.MEMORY
    if wgrad:
        return us
    if _reads_filter(problem):
        return us - COST.SPLIT_TIME
    return us + math.prod(problem.weight_shape) * 12 / COST.MEMORY
