"""What the engines on ``mma.sync`` (compute capability 8.0 and more) share: devices, limits and rates."""

from __future__ import annotations

from pycuda_conv.runtime.base import Device

SHARED_BYTES = 99 * 1024  # bytes that a block can have on every GPU of compute capability 8.0 and more

#: Products of 16-bit numbers with float32 sums, a cycle and multiprocessor, from NVIDIA's tables; Hopper's as measured through
#: mma.sync. GeForce cards have half the rate of workstation cards of the same capability; they are not told apart.
RATES = {(8, 0): 1024, (8, 7): 512, (9, 0): 1270, (10, 0): 1024, (10, 3): 1024}
OTHER_RATE = 256


def product_rate(device: Device) -> int:
    """Products of 16-bit numbers with float32 sums, a cycle and multiprocessor."""
    return RATES.get(device.capability, OTHER_RATE)
