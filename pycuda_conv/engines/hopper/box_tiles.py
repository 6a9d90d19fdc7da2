"""Tiles of a result whose pixels are a box of columns, rows, slices and images, for ``cu/hopper/dense.cu``.

TMA loads a box of neighbouring pixels a little faster than as many pixels of rows one behind the other. What lies past an image's edges
is loaded as zeros and not stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from pycuda_conv.engines.geometry import ceil
from pycuda_conv.problem import Size3


@dataclass(frozen=True)
class Box:
    """A tile's columns, rows, slices and images, and how many tiles a result has along each."""

    size: tuple[int, int, int, int]
    counts: tuple[int, int, int, int]

    @property
    def tiles(self) -> int:
        """Tiles of the result."""
        return math.prod(self.counts)


@lru_cache(maxsize=4096)
def best_box(size: Size3, images: int, most: int) -> Box:
    """The box of up to `most` pixels with which images of this `size` have the fewest tiles; of several, that with the longest rows."""
    depth, rows, columns = size

    def boxes() -> Iterator[Box]:
        for wide in _even(columns, most):
            for high in _even(rows, most // wide):
                for deep in _even(depth, most // (wide * high)):
                    many = ceil(images, ceil(images, most // (wide * high * deep)))
                    lengths = (columns, wide), (rows, high), (depth, deep), (images, many)
                    w, h, d, n = (ceil(length, part) for length, part in lengths)
                    yield Box((wide, high, deep, many), (w, h, d, n))

    best, least = next(boxes()), ceil(math.prod(size) * images, most)
    for box in boxes():
        best = box if box.tiles < best.tiles else best
        if best.tiles == least:
            break
    return best


def _even(length: int, most: int) -> list[int]:
    """The lengths up to `most` of parts that cut `length` evenly, the longest first."""
    return sorted({ceil(length, parts) for parts in range(ceil(length, most), length + 1)}, reverse=True)
