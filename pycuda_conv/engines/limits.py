"""What an engine takes, as a declaration: devices, problems and tiles. From it come the refusals, each with its sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pycuda_conv.runtime.base import Device


class Devices(NamedTuple):
    """The devices that kernels run on.

    Attributes
    ----------
    sentence : str
        What is said of other devices.
    holds : callable
        Whether the kernels run on a device.
    """

    sentence: str
    holds: Callable[[Device], bool]

    def why_not(self, device: Device) -> str | None:
        """Why the kernels can't run on `device`, or None if they can."""
        return None if self.holds(device) else self.sentence


def of_capability(*capabilities: tuple[int, int]) -> Devices:
    """GPUs of these compute capabilities."""
    *most, last = (f"{major}.{minor}" for major, minor in capabilities)
    shown = f"{', '.join(most)} or {last}" if most else last
    return Devices(f"it takes a GPU of compute capability {shown}", lambda device: device.capability in capabilities)


CUDA = Devices("it takes a GPU of CUDA", lambda device: device.backend == "cuda")
AMPERE = Devices("it takes a GPU of compute capability 8.0 or more", lambda device: device.capability >= (8, 0))
HOPPER = of_capability((9, 0))
