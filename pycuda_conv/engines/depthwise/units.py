"""Units of depthwise layers: the planes or rows that a block computes, and that its shared memory holds. Two engines share this."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from pycuda_conv.engines.schedule import grid_refusal


class Unit(Protocol):
    """A unit of either engine."""

    @property
    def blocks(self) -> int:
        """Blocks of the launch: one for each unit."""


def unit_refusal(kib: int, known: Collection[int], rows: int, unit: Callable[[], Unit | None]) -> str | None:
    """Why a configuration can't have units of `kib` KiB, which must be one of `known`; None if it can. A unit has at least `rows` rows."""
    if kib not in known:
        return f"UNIT_KIB must be one of {', '.join(map(str, known))}"
    found = unit()
    if found is None:
        return f"a plane's {rows} rows take more than {kib} KiB of shared memory"
    return grid_refusal(found.blocks)
