"""What a GPU can do in a second, measured: bytes by a copy, FLOP by torch's largest products of matrices. Lower bounds are made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pycuda_conv.timing import Effort, gpu_times
from pycuda_conv.tools.floors import Rates
from pycuda_conv.tools.oracle import precision_set

COPY_FLOATS = 2**28  # 1 GiB, many times any cache
COPY_WARM_UP, COPY_ROUNDS = 50, 30  # after idling, the GPU's clocks are low at first
SIDE = 8192  # of the matrices
PRODUCTS = Effort(rounds=10, seconds=0)


def copy_bandwidth(torch: Any, place: str) -> float:
    """The most bytes a second that a copy inside the GPU's memory moves, read and written bytes together.

    The faster of the driver's copy and a kernel that moves as much.
    """
    source = torch.randn(COPY_FLOATS, device=place)
    target = torch.randn(COPY_FLOATS, device=place)
    for _ in range(COPY_WARM_UP):
        target.copy_(source)
    ways = (lambda i: target.copy_(source), lambda i: torch.neg(source, out=target))
    times, _ = gpu_times(torch, ways, 1, Effort(rounds=COPY_ROUNDS))
    return float(2 * source.numel() * source.element_size() / min(map(min, times)))  # a ceiling is the best round, not the median


def product_rate(torch: Any, place: str, dtype: Any) -> float:
    """The most FLOP a second of a product of two matrices, float32 in IEEE arithmetic; of random numbers, since zeros take less power."""
    a, b = (torch.randn((SIDE, SIDE), device=place).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    way: Callable[[int], Any] = lambda i: torch.matmul(a, b, out=out)  # noqa: E731
    with precision_set(torch, "cuda", "ieee"):
        times, _ = gpu_times(torch, [way], 1, PRODUCTS, captured=0.0)
    return 2.0 * SIDE**3 / min(times[0])


def rates(torch: Any, place: str, memory: float) -> Rates:
    """The rates of this GPU, whose memory moves so many bytes a second."""
    return Rates(product_rate(torch, place, torch.float16), product_rate(torch, place, torch.float32), memory)
