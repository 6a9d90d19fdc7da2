"""What the engines for Hopper (compute capability 9.0) share: its limits, and how their kernels divide their threads."""

from __future__ import annotations

from pycuda_conv.runtime.base import Device

MOST_SHARED = 227 * 1024  # bytes that a block of an sm_90 GPU may have
SHARED_BYTES = MOST_SHARED - 256  # but for the barriers
THREADS = 384  # a producer's warpgroup and two consumers'


def unsupported(device: Device) -> str | None:
    """Why kernels for Hopper can't run on `device`, or None if they can."""
    if device.capability != (9, 0):
        return "it takes a GPU of compute capability 9.0"
    return None
