"""Kinds of numbers on which errors are measured: ordinary ones, and those on which arithmetic that is not float32's shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

#: (generator of random numbers, shape of what is read first, shape of what is read second, spatial axes) -> both arrays, float64
Draw = Callable[[np.random.Generator, Sequence[int], Sequence[int], int], tuple[np.ndarray, np.ndarray]]


def _normal(rng: Any, first: Sequence[int], second: Sequence[int], ndim: int) -> tuple[np.ndarray, np.ndarray]:
    return rng.standard_normal(first), rng.standard_normal(second)


def _positive(rng: Any, first: Sequence[int], second: Sequence[int], ndim: int) -> tuple[np.ndarray, np.ndarray]:
    return rng.random(first), rng.random(second)


def _sparse(rng: Any, first: Sequence[int], second: Sequence[int], ndim: int) -> tuple[np.ndarray, np.ndarray]:
    return np.where(rng.random(first) < 0.02, rng.standard_normal(first), 0), rng.standard_normal(second)


def _one_large(rng: Any, first: Sequence[int], second: Sequence[int], ndim: int) -> tuple[np.ndarray, np.ndarray]:
    x = 0.01 * rng.standard_normal(first)
    if x.size:
        x.flat[rng.integers(x.size)] = 1e4
    return x, rng.standard_normal(second)


def _wide(rng: Any, first: Sequence[int], second: Sequence[int], ndim: int) -> tuple[np.ndarray, np.ndarray]:
    return tuple(rng.standard_normal(shape) * 10 ** rng.uniform(-2, 2, shape) for shape in (first, second))


def _sky(rng: Any, first: Sequence[int], second: Sequence[int], ndim: int) -> tuple[np.ndarray, np.ndarray]:
    x = 1e-4 * rng.random(first)
    x[rng.random(first) < 1 / 1600] = 1
    if x.size:
        x.flat[rng.integers(x.size)] = 1
    w = rng.uniform(0.5, 1, second)
    for axis in range(len(second) - ndim, len(second)):  # a Gaussian of sigma 2, or of a sixth of a short axis
        n = second[axis]
        at = np.arange(n) - (n - 1) / 2
        w = w * np.exp(-0.5 * (at / max(min(2.0, n / 6), 0.5)) ** 2).reshape(-1, *(1,) * (len(second) - 1 - axis))
    return x, w / max(w.sum() / max(math.prod(second[:-ndim]), 1), 1e-30)


#: By name: normal numbers; all positive; 2% of the pixels, the others zero; one large value beside small ones; a wide range on both sides;
#: a sky of 1e-4 with stars of 1 and a Gaussian.
DISTRIBUTIONS: dict[str, Draw] = {
    "normal": _normal, "positive": _positive, "sparse": _sparse, "one large": _one_large, "wide": _wide, "sky": _sky,
}  # fmt: skip
