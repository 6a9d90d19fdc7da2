"""Rings of stages in shared memory, through which tiles feed the tensor cores: what they take, and how many stages fit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

ALIGNMENT = 1024  # bytes of which swizzled stages begin at multiples; a block has so many more than its ring takes


class Ring(NamedTuple):
    """A ring of stages in a block's shared memory.

    Bytes of a stage; of what lies beside the ring; that a block may have; and that the ring takes at the least, where sums pass through it.
    """

    stage: int
    beside: int
    most: int
    least: int = 0

    def nbytes(self, stages: int) -> int:
        """Shared memory of a block whose ring has so many stages."""
        return max(stages * self.stage, self.least) + self.beside

    def deepest(self, tried: Iterable[int]) -> int:
        """The first of these numbers of stages that fits, 0 if none does."""
        return next((stages for stages in tried if self.nbytes(stages) <= self.most), 0)

    def refusal(self, stages: int, split: int = 1) -> str | None:
        """Why a tile can't have so many stages, and so many splits of its sums; None if it can."""
        return why_not_so_many(stages, self.nbytes(stages), self.most, split)


def why_not_so_many(stages: int, nbytes: int, most: int, split: int) -> str | None:
    """Why a tile can't have `stages` stages, which take `nbytes` of a block's `most` bytes, and `split` splits; None if it can."""
    if stages < 2 or nbytes > most:
        return f"its {stages} stages take {nbytes:,} bytes of shared memory; a block has {most:,}"
    return "it has at least one split" if split < 1 else None


def sum_bytes(rows: int, columns: int) -> int:
    """Bytes of a tile's sums where they lie in shared memory: rows are 8 columns longer than the tile, against bank conflicts."""
    return 4 * rows * (columns + 8)
