"""Which configuration convolves a piece of a stream: one that gives each result the same bits wherever the stream is cut.

Most engines add a result's products in an order that follows from its layer alone, wherever the result stands. The others take parts of
their order from a result's place in a tile, or look at all numbers of an image. Of the former, the order is chosen that is fastest for a
piece of an ordinary length; for any other piece any configuration of that order may be taken.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace

from pycuda_conv.engines import registry
from pycuda_conv.engines.base import Config
from pycuda_conv.engines.compose.delegate import parsed
from pycuda_conv.engines.direct.gemm import Gemm
from pycuda_conv.problem import ConvProblem, Size3
from pycuda_conv.runtime.base import Device

#: Engines' configurations whose results do not depend on their place, nor on other numbers of the image. Of those behind, not in float32
#: with three products: they scale an image by its numbers.
ANYWHERE = ("Gemm", "Batched", "Tile", "Single", "Dgrad", "Depthwise", "DepthwiseStrips", "Dmma", "FewChannels")
NOT_OF_LIMBS = ("DenseNhwc", "GatherNhwc", "Planes", "GatheredPlanes", "ImplicitGemm", "ImplicitGemm80", "GroupedNhwc")
#: Those that give their work to another.
AROUND = "ViaNhwc", "Filled"
#: Lengths of pieces along the stream for which the order has to be possible; it should be fast for the first.
LENGTHS = {1: (4096, 1, 300), 3: (4, 1, 17)}


def serves(problem: ConvProblem, config: Config | None) -> bool:
    """Whether `config` gives a result the same bits wherever it stands in an image."""
    if config is None:
        return False
    name = type(config).__name__
    if name in AROUND:
        return serves(problem, parsed(str(getattr(config, "DELEGATE", ""))))
    limbs = problem.dtype == "float32" and problem.precision == "fp32"
    return name in ANYWHERE or (name in NOT_OF_LIMBS and not limbs)


def _of_length(problem: ConvProblem, length: int) -> ConvProblem:
    """The layer with a piece of a stream that gives `length` results, or a transposed one that reads so many."""
    axis = 3 - problem.ndim

    def at(values: Size3, value: int) -> Size3:
        d, h, w = (value if i == axis else v for i, v in enumerate(values))
        return d, h, w

    stride, reach = problem.stride[axis], problem.dilation[axis] * (problem.filter_size[axis] - 1) + 1
    whole = (length - 1) * stride + reach
    before, after = at(problem.padding_before, 0), at(problem.padding_after, 0)
    plain = replace(problem, N=1, batched=True, bare=False, padding_before=before, padding_after=after)
    return replace(plain, input_size=at(problem.input_size, whole), output_size=at(problem.output_size, length))


def _possible(problem: ConvProblem, device: Device) -> Iterator[tuple[float, Config]]:
    """The configurations that serve, with the microseconds that they should take."""
    launched = problem.launched
    for engine in registry.ENGINES:
        if launched.layout in engine.LAYOUTS and engine.unsupported(device) is None:
            for config in registry.legal(engine, launched, device):
                if serves(launched, config):
                    yield engine.time(launched, config, device) or 0.0, config


#: By layer and by what engines ask of a device: the order.
_orders: dict[tuple[object, ...], Hashable] = {}


def _order(layer: ConvProblem, device: Device) -> Hashable:
    others = [_of_length(layer, n) for n in LENGTHS[layer.ndim][1:]]
    feasible = [{registry.order(one, config) for _, config in _possible(one, device)} for one in others]
    timed = sorted(_possible(layer, device), key=lambda pair: pair[0])
    orders = (registry.order(layer, config) for _, config in timed)
    return next(order for order in orders if all(order in found for found in feasible))


def choose(problem: ConvProblem, device: Device) -> Config:
    """The configuration for a piece of a stream along the first spatial axis."""
    if problem.adapted:  # by a border at a signal's start, say: the sums are those of what is behind it
        return registry.config_from_table("Bordered", {"DELEGATE": str(choose(problem.padded, device))})
    layer = _of_length(problem, LENGTHS[problem.ndim][0])
    key = layer, device.backend, device.capability, device.multiprocessors, type(device)
    wanted = registry.kept(_orders, key, lambda: _order(layer, device))
    found = [(us, config) for us, config in _possible(problem, device) if registry.order(problem, config) == wanted]
    return min(found, key=lambda pair: pair[0])[1] if found else Gemm()
