"""What the engines for depthwise layers in units share. A unit is what a block computes: planes or rows that its shared memory holds."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from pycuda_conv.engines.schedule import grid_refusal


class Unit(Protocol):
    """What both engines' units have."""

    @property
    def blocks(self) -> int:
        """Of the launch: one for each unit."""


def unit_refusal(kib: int, known: Collection[int], rows: int, unit: Callable[[], Unit | None]) -> str | None:
    """Why a configuration can't have a `unit` of `kib` KiB, or None if it can. UNIT_KIB is `known`, and a unit has `rows` rows at least."""
    if kib not in known:
        return f"UNIT_KIB must be one of {', '.join(map(str, known))}"
    found = unit()
    if found is None:
        return f"a plane's {rows} rows take more than {kib} KiB of shared memory"
    return grid_refusal(found.blocks)
