"""What the models of time leave out, as weights that were fitted to timings.

An engine's correction is a sum in logarithms: each of a problem's and a tile's :func:`numbers` times a weight, and each product of one of
the :data:`PAIRED` with any of them times a weight of its own. So a weight says what it is about: by how much small tiles take longer, say,
where sums are short. ``pycuda-conv calibrate`` fits the weights beside the factors of :mod:`calibration`, to what these leave.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from pycuda_conv.problem import ConvProblem

#: A number's place: what the tile is, how many there are, and how long a sum each has.
NAMES = (
    "us", "FLOP / us", "bytes / us", "taps", "results", "C / groups", "K / groups", "groups", "N", "BLOCK_M", "BLOCK_N", "SPLIT",
    "CLUSTER", "STAGES", "rounds", "last round", "sum", "strided", "dilated", "3-d", "1-d", "16 bits", "tf32", "NHWC", "dgrad", "wgrad",
    "spare columns", "spare rows", "pingpong", "activation", "pixels",
)  # fmt: skip
PAIRED = tuple(map(NAMES.index, ("BLOCK_M", "BLOCK_N", "SPLIT", "CLUSTER", "rounds", "sum")))
#: A number counts up to so many of its standard deviations, and a correction up to this logarithm.
FAR, MOST = 3.0, 0.5
MULTIPROCESSORS = 132  # of the GPU whose rounds the weights are about; other numbers of rounds are as good


def _log(value: float) -> float:
    return math.log2(max(value, 1e-9))


def numbers(launched: ConvProblem, config: Any, us: float) -> list[float]:
    """The numbers of a problem as it is launched, of a configuration, and of the microseconds that the model predicts."""
    own = vars(config)

    def tile(name: str, missing: int) -> int:
        found = own.get(name)
        return found if isinstance(found, int) else missing

    taps, results = math.prod(launched.filter_size), launched.N * math.prod(launched.output_size)
    c, k = launched.C // launched.groups, launched.K // launched.groups
    m, n, cluster, stages = (tile(name, missing) for name, missing in (("BLOCK_M", 64), ("BLOCK_N", 64), ("CLUSTER", 1), ("STAGES", 4)))
    split = tile("SPLIT", tile("SPLIT_K", 1))
    rounds = math.ceil(results / m) * math.ceil(k / n) * launched.groups * split * cluster / MULTIPROCESSORS
    return [
        _log(us), _log(2 * launched.macs / max(us, 0.1)), _log(launched.bytes / max(us, 0.1)), _log(taps), _log(results), _log(c), _log(k),
        _log(launched.groups), _log(launched.N), _log(m), _log(n), _log(split), _log(cluster), _log(stages), _log(min(rounds, 64)),
        math.ceil(rounds) / rounds if rounds < 8 else 1.0, _log(max(1, c * taps / split / cluster)), float(max(launched.stride) > 1),
        float(max(launched.dilation) > 1), float(launched.ndim == 3), float(launched.ndim == 1), float(launched.itemsize == 2),
        float(launched.precision == "tf32"), float(launched.layout == "NHWC"), float(launched.direction == "dgrad"),
        float(launched.layout == "CNHW" or launched.direction == "wgrad"), k % n / n, results % m / m if results < m * 40 else 0.5,
        float(own.get("schedule") == "pingpong"), float(bool(launched.activation)), _log(math.prod(launched.output_size)),
    ]  # fmt: skip


#: The mean and the standard deviation of each number.
Scales = Sequence[tuple[float, float]]
#: A row of weights for 1, and one for each of PAIRED; each row has a weight for 1 and one for each number.
Weights = Sequence[Sequence[float]]


def scaled(found: Sequence[float], scales: Scales) -> list[float]:
    """Numbers in standard deviations from their means."""
    return [max(-FAR, min(FAR, (value - mean) / deviation)) for value, (mean, deviation) in zip(found, scales, strict=True)]


def factor(weights: Weights, scales: Scales, found: Sequence[float]) -> float:
    """By what a prediction with these numbers is multiplied."""
    own = scaled(found, scales)
    one = [1.0, *own]
    total = sum(value * sum(map(operator.mul, row, one)) for value, row in zip((1.0, *(own[i] for i in PAIRED)), weights, strict=True))
    return math.exp(max(-MOST, min(MOST, total)))
