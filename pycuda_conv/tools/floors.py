"""The least time that a convolution takes on an H200: arithmetic at its rate or bytes at their bandwidth, whichever is longer.

On the tensor cores, packing the images comes first, in a pass of its own. Losses at the edges of tiles and launches are not counted,
nor pixels that no tap meets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pycuda_conv.engines.tensor_cores import limbs, products
from pycuda_conv.problem import ConvProblem

TENSOR_FLOPS = {1: 790e12, 3: 263e12}  # a second, by products of 16-bit numbers for one of the problem's
PLAIN_FLOPS = 60e12  # of the fp32 units
BANDWIDTH = 4.3e12  # bytes a second
SMALL_MACS = 40e6  # below, and with fewer channels in a group than these, the direct engine's kernels are the better ones
FEW_CHANNELS = 16


@dataclass(frozen=True)
class Floor:
    """Microseconds: of packing the images, of the arithmetic, and of what the product reads and writes meanwhile."""

    pack: float
    compute: float
    traffic: float

    @property
    def us(self) -> float:
        """All of it."""
        return self.pack + max(self.compute, self.traffic)


def for_plain_units(problem: ConvProblem) -> bool:
    """Whether the tensor cores have little to give: small problems, thin groups, float64."""
    thin = problem.groups > 1 and min(problem.C, problem.K) // problem.groups < FEW_CHANNELS
    return thin or problem.macs < SMALL_MACS or problem.dtype == "float64"


def plain_floor(problem: ConvProblem) -> Floor:
    """On the fp32 units, every array read or written once."""
    return Floor(0.0, problem.flops / PLAIN_FLOPS * 1e6, problem.bytes / BANDWIDTH * 1e6)


def _met(problem: ConvProblem) -> float:
    """The part of the images' pixels that some tap meets: a stride may step over others."""
    if problem.direction != "fprop":
        return 1.0
    met = 1.0
    for i, size in enumerate(problem.operand_size):
        outputs, taps = (problem.output_size[i], problem.stride[i]), (problem.filter_size[i], problem.dilation[i])
        met *= _places(size, -problem.padding_before[i], *sorted((outputs, taps))) / size
    return met


def _places(size: int, first: int, few: tuple[int, int], many: tuple[int, int]) -> int:
    """How many of the places 0 to size - 1 are first + i x step + j x step; `few` and `many` are the number of i and j, and each's step."""
    (count, apart), (length, step) = few, many
    met = bytearray(size)
    for start in range(first, first + count * apart, apart):
        begin, end = max(0, -(start // step)), min(length, -((start - size) // step))
        if begin < end:
            met[start + begin * step : start + (end - 1) * step + 1 : step] = bytes([1]) * (end - begin)
    return sum(met)


def tensor_floor(problem: ConvProblem, packed: bool = True) -> Floor:
    """On the tensor cores. `packed`: float32 and NCHW images are packed first; channels-last ones of 16 bits never are."""
    images, weights, written = (math.prod(shape) for shape in (problem.input_shape, problem.weight_shape, problem.result_shape))
    read = images * _met(problem)
    packed = packed and not (problem.itemsize == 2 and problem.layout == "NHWC")
    limb_bytes = 2 * limbs(problem)
    pack = read * (problem.itemsize + limb_bytes) if packed else 0
    traffic = read * (limb_bytes if packed else problem.itemsize) + weights * limb_bytes + written * problem.itemsize
    return Floor(pack / BANDWIDTH * 1e6, problem.flops / TENSOR_FLOPS[products(problem)] * 1e6, traffic / BANDWIDTH * 1e6)


def floor(problem: ConvProblem, *, tensor_cores: bool, packed: bool = True) -> Floor:
    """What to hold a measured time against.

    Parameters
    ----------
    tensor_cores : bool
        The tensor cores run it. What they could run and don't is held against their floor all the same.
    packed : bool
        They take its images packed.
    """
    tensor, plain = tensor_floor(problem, packed), plain_floor(problem)
    if not for_plain_units(problem):
        return tensor
    return min(tensor, plain, key=lambda one: one.us) if tensor_cores else plain
