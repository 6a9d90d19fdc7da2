"""The least time that a convolution takes on a GPU: arithmetic at its rate or bytes at their bandwidth, whichever is longer.

    least time = packed bytes / memory + max(FLOP x products / tensor, bytes / memory)      on tensor cores
    least time = max(FLOP / plain, bytes / memory)                                          on the plain float32 units

The three rates are measured on the GPU at hand (``benchmarks/peaks.py``). On the tensor cores, a pass of its own first packs the images.
Losses at the edges of tiles, launches, and pixels that no tap meets are not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pycuda_conv.engines.tensor_cores import limbs, products
from pycuda_conv.problem import ConvProblem

SMALL_MACS = 40e6  # problems with fewer MACs, or groups of fewer than FEW_CHANNELS channels, are faster on the direct engine
FEW_CHANNELS = 16


@dataclass(frozen=True)
class Rates:
    """What a GPU does in a second.

    Attributes
    ----------
    tensor, plain : float
        FLOP of 16-bit products with float32 sums on the tensor cores, and of the float32 units.
    memory : float
        Bytes to and from its memory.
    """

    tensor: float = 790e12
    plain: float = 60e12
    memory: float = 4.3e12

    def __str__(self) -> str:
        return (
            f"{self.tensor / 1e12:.0f} TFLOP/s of 16-bit products ({self.tensor / 3e12:.0f} where fp32 takes three of them), "
            f"{self.plain / 1e12:.0f} TFLOP/s on the fp32 units where these do the work, and {self.memory / 1e12:.1f} TB/s"
        )


#: An H200's, as the design was made for them.
H200 = Rates()


@dataclass(frozen=True)
class Floor:
    """Microseconds for packing the images, for the arithmetic, and for the bytes that the product reads and writes meanwhile."""

    pack: float
    compute: float
    traffic: float

    @property
    def us(self) -> float:
        """Microseconds in all."""
        return self.pack + max(self.compute, self.traffic)


def for_plain_units(problem: ConvProblem) -> bool:
    """Whether the tensor cores gain little: for small problems, thin groups, float64."""
    thin = problem.groups > 1 and min(problem.C, problem.K) // problem.groups < FEW_CHANNELS
    return thin or problem.macs < SMALL_MACS or problem.dtype == "float64"


def plain_floor(problem: ConvProblem, rates: Rates = H200) -> Floor:
    """The floor on the fp32 units, with every array read or written once."""
    return Floor(0.0, problem.flops / rates.plain * 1e6, problem.bytes / rates.memory * 1e6)


def _met(problem: ConvProblem) -> float:
    """The share of the images' pixels that some tap meets; a stride may step over the others."""
    if problem.direction != "fprop":
        return 1.0
    met = 1.0
    for i, size in enumerate(problem.operand_size):
        outputs, taps = (problem.output_size[i], problem.stride[i]), (problem.filter_size[i], problem.dilation[i])
        met *= _places(size, -problem.padding_before[i], *sorted((outputs, taps))) / size
    return met


def _places(size: int, first: int, few: tuple[int, int], many: tuple[int, int]) -> int:
    """How many of the places 0 to size - 1 are first + i x step + j x step; `few` and `many` are each a count, of i or j, and its step."""
    (count, apart), (length, step) = few, many
    met = bytearray(size)
    for start in range(first, first + count * apart, apart):
        begin, end = max(0, -(start // step)), min(length, -((start - size) // step))
        if begin < end:
            met[start + begin * step : start + (end - 1) * step + 1 : step] = bytes([1]) * (end - begin)
    return sum(met)


def tensor_floor(problem: ConvProblem, packed: bool = True, rates: Rates = H200) -> Floor:
    """The floor on the tensor cores. If `packed`, float32 and NCHW images are packed first; NHWC images of 16 bits never are."""
    images, weights, written = (math.prod(shape) for shape in (problem.input_shape, problem.weight_shape, problem.result_shape))
    read = images * _met(problem)
    packed = packed and not (problem.itemsize == 2 and problem.layout == "NHWC")
    limb_bytes = 2 * limbs(problem)
    pack = read * (problem.itemsize + limb_bytes) if packed else 0
    traffic = read * (limb_bytes if packed else problem.itemsize) + weights * limb_bytes + written * problem.itemsize
    compute = problem.flops * products(problem) / rates.tensor
    return Floor(pack / rates.memory * 1e6, compute * 1e6, traffic / rates.memory * 1e6)


def floor(problem: ConvProblem, *, tensor_cores: bool, packed: bool = True, rates: Rates = H200) -> Floor:
    """The floor to compare a measured time with.

    Parameters
    ----------
    tensor_cores : bool
        Whether the tensor cores run the problem, or could run it.
    packed : bool
        Whether their kernels take the images packed.
    rates : Rates
        The GPU's.
    """
    tensor, plain = tensor_floor(problem, packed, rates), plain_floor(problem, rates)
    if not for_plain_units(problem):
        return tensor
    return min(tensor, plain, key=lambda one: one.us) if tensor_cores else plain
