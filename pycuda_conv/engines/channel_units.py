"""How the engines for few channels a group cut channels: into units of 16 of the array written, of whole groups or of a part of one."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from pycuda_conv.engines.geometry import ceil

UNIT = 16
COLUMNS, WIDEST, IMAGES = 16, 64, (2, 4, 7, 8)  # of a warp's product; most columns of an image of a tile, and images of tiles
STEP = 32  # bytes of channels of the array read that a product takes
MOST_STEPS = 8  # of a unit: with more channels a group the engines gain nothing
ONE_GROUP = 8  # steps of all units of a single group, beyond which whole tiles of a matrix product are faster


class Units(NamedTuple):
    """How channels are cut into units. A unit is ``ChannelUnit`` of ``cu/mma/grouped.cuh``."""

    total: int
    groups: int  # of a unit
    a_group: int  # units of a group, if it has several
    steps: int
    mixed: bool  # whether steps have channels of other groups
    read: int  # channels of a group
    written: int
    aligned: int  # channels in 16 bytes

    def first_read(self, unit: int) -> int:
        """The first channel that a unit reads, at a multiple of 16 bytes."""
        return unit // self.a_group * self.groups * self.read // self.aligned * self.aligned

    def first_written(self, unit: int) -> int:
        """The first channel that a unit writes."""
        return unit // self.a_group * self.groups * self.written + unit % self.a_group * UNIT


def worth_it(units: Units, groups: int) -> bool:
    """Whether the engines are worth comparing: a single group must have few channels, and fill its units."""
    return groups > 1 or (units.written >= UNIT and units.total * units.steps <= ONE_GROUP)


@lru_cache(maxsize=256)
def cut(groups: int, read: int, written: int, itemsize: int) -> Units | None:
    """The units of `groups` groups, each of which has `read` channels that are read and `written` that are written.

    None if there are none, or if they don't begin at multiples of four.
    """
    if groups * written % 4 or not written:
        return None
    shared = read, written, 16 // itemsize
    if written > UNIT:
        if written % 4:
            return None
        a_group = ceil(written, UNIT)
        return Units(groups * a_group, 1, a_group, *_steps(groups, read, itemsize), *shared)
    found = []
    for together in range(1, UNIT // written + 1):
        if together * written % 4 == 0:
            steps, mixed = _steps(ceil(groups, together), together * read, itemsize)
            found.append(Units(ceil(groups, together), together, 1, steps, mixed or together > 1, *shared))
    return min(found, key=lambda units: (units.steps > MOST_STEPS, units.total * units.steps, units.total), default=None)


def _steps(units: int, read: int, itemsize: int) -> tuple[int, bool]:
    """Steps of units that each read `read` channels, from multiples of that on; and whether some channels of a step are not of its unit."""
    each, aligned = STEP // itemsize, 16 // itemsize
    steps = max(ceil(unit * read % aligned + read, each) for unit in range(min(units, aligned)))
    return steps, steps * each != read


@lru_cache(maxsize=256)  # the planner asks for them once a configuration
def chunks_read(units: Units, count: int) -> int:
    """16-byte chunks of the channels that `count` units read."""
    firsts = range(0, units.total, count)
    return max(units.first_read(first + count - 1) - units.first_read(first) for first in firsts) // units.aligned + 2 * units.steps


@lru_cache(maxsize=256)
def chunks_written(units: Units, count: int) -> int:
    """16-byte chunks of the channels that `count` units write."""
    firsts = range(0, units.total, count)
    return ceil(max(units.first_written(first + count - 1) - units.first_written(first) for first in firsts) + UNIT, units.aligned)


def widths(columns: int, images: int) -> list[tuple[int, int]]:
    """Images, and columns of each, of tiles that are compared: they cut rows of so many `columns` evenly, or have several short rows."""
    even = sorted({ceil(columns, parts) for parts in range(1, 1 + ceil(columns, COLUMNS))})
    several = [(count, columns) for count in IMAGES if count <= images and count * columns <= 2 * WIDEST]
    return [(1, part) for part in even if part <= WIDEST] + several


def pitch(chunks: int) -> int:
    """Bytes from one pixel to the next in shared memory: an odd number of chunks."""
    return 16 * (chunks | 1)
