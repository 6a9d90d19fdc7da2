"""Rings of stages in shared memory, through which tiles feed the tensor cores: their bytes, and how many stages fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

ALIGNMENT = 1024  # swizzled stages begin at multiples of this many bytes; a block has as many bytes beside its ring for the alignment


class Ring(NamedTuple):
    """A ring of stages in a block's shared memory; sizes in bytes.

    `stage` is the size of one stage, `beside` that of everything else in the block's shared memory, and `most` what the block may have.
    The ring takes `least` at the least, where sums pass through it.
    """

    stage: int
    beside: int
    most: int
    least: int = 0

    def nbytes(self, stages: int) -> int:
        """Shared memory in bytes of a block whose ring has `stages` stages."""
        return max(stages * self.stage, self.least) + self.beside

    def deepest(self, tried: Iterable[int]) -> int:
        """The first of the numbers of stages in `tried` that fits, 0 if none does."""
        return next((stages for stages in tried if self.nbytes(stages) <= self.most), 0)

    def refusal(self, stages: int, split: int = 1) -> str | None:
        """Why a tile can't have `stages` stages and `split` splits of its sums; None if it can."""
        if stages < 2 or self.nbytes(stages) > self.most:
            return f"its {stages} stages take {self.nbytes(stages):,} bytes of shared memory; a block has {self.most:,}"
        return "it has at least one split" if split < 1 else None


def with_most_stages(config: Any, ring: Ring, most: int) -> Any:
    """`config` with the most STAGES, up to `most`, that its `ring` has room for."""
    return replace(config, STAGES=ring.deepest(range(most, 1, -1)))


def sum_bytes(rows: int, columns: int) -> int:
    """Bytes of a tile's sums where they lie in shared memory: rows are 8 columns longer than the tile, against bank conflicts."""
    return 4 * rows * (columns + 8)
