"""The taps of named filters, in float64; whether a filter is separable; taps that add up in float32."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

#: scipy's words for what lies outside, and the kernels'.
MODES = {
    "reflect": "reflect", "grid-mirror": "reflect", "nearest": "nearest", "mirror": "mirror", "wrap": "wrap", "grid-wrap": "wrap",
    "constant": "constant", "grid-constant": "constant",
}  # fmt: skip


def border(mode: Any) -> str:
    """The kernels' word for a mode."""
    if not isinstance(mode, str) or mode not in MODES:
        raise RuntimeError(f"boundary mode not supported: mode must be one of {tuple(MODES)}, got {mode!r}")
    return MODES[mode]


@lru_cache(maxsize=1024)
def gaussian(sigma: float, order: int, radius: int) -> np.ndarray:
    """Taps of a correlation: a Gaussian's derivative of `order`, sampled at the integers, as scipy normalises it. They are kept."""
    if order < 0:
        raise ValueError(f"order must be non-negative, got {order}")
    x = np.arange(-radius, radius + 1, dtype=np.float64)
    bell = np.exp(-0.5 / (sigma * sigma) * x**2)
    bell /= bell.sum()
    # the derivative of q exp(p) is (q' + q p') exp(p), with p' = -x / sigma^2; q is kept as coefficients, lowest first
    q = np.array([1.0])
    for _ in range(order):
        slope = q[1:] * np.arange(1, len(q)) if len(q) > 1 else np.zeros(1)
        more = np.concatenate([[0.0], -q / sigma**2])
        more[: len(slope)] += slope
        q = more
    taps = np.ascontiguousarray((np.polynomial.polynomial.polyval(x, q) * bell)[::-1])
    taps.flags.writeable = False
    return taps


def before(size: int, origin: int = 0, convolve: bool = False) -> int:
    """How far a filter of `size` taps reaches in front of its pixel, with scipy's `origin`; with `convolve`, the flipped filter.

    Raises
    ------
    ValueError
        The origin lies outside the filter.
    """
    given = origin
    if convolve:
        origin = -origin - (size % 2 == 0)
    if not 0 <= size // 2 + origin < size:
        raise ValueError(f"invalid origin: with {size} taps origin must satisfy -(size // 2) <= origin <= (size - 1) // 2, got {given}")
    return size // 2 + origin


def separated(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The filters along columns and rows whose outer product `weights` is, within the rounding of a float32 sum, or None.

    Whole numbers are separated exactly. Of others the first singular value is taken. What is left out costs at most
    sum(abs(rest)) * max(abs(x)), which must be below what the sum's rounding costs anyway: 2^-24 sqrt(taps) sum(abs(weights)).
    """
    w = np.asarray(weights, np.float64)
    if not np.isfinite(w).all():
        return None
    if (w == np.rint(w)).all() and np.abs(w).max(initial=0) < 2**31:
        row = w[np.abs(w).sum(1).argmax()].astype(np.int64)
        if not row.any():
            return np.zeros(len(w)), np.zeros(w.shape[1])
        row //= np.gcd.reduce(row)
        j = np.abs(row).argmax()
        column, rest = np.divmod(w[:, j].astype(np.int64), row[j])
        exact = not rest.any() and (np.outer(column, row) == w).all()
        return (column.astype(np.float64), row.astype(np.float64)) if exact else None
    u, s, v = np.linalg.svd(w)
    column, row = u[:, 0] * np.sqrt(s[0]), v[0] * np.sqrt(s[0])
    rest = np.abs(w - np.outer(column, row)).sum()
    return (column, row) if rest <= 2.0**-24 * np.sqrt(w.size) * np.abs(w).sum() else None


def rounded(taps: np.ndarray) -> np.ndarray:
    """Taps in float32 whose sum is that of the float64 taps as nearly as the smallest of them allows.

    Rounded one by one, the taps of a Gaussian of sigma 1 add up to 1 + 2e-8, and every result is that much too large. Here the largest
    taps are moved by up to two steps; symmetric taps stay symmetric.
    """
    return _rounded(np.ascontiguousarray(taps, np.float64).tobytes())


@lru_cache(maxsize=1024)
def _rounded(given: bytes) -> np.ndarray:
    taps = np.frombuffer(given, np.float64)
    with np.errstate(over="ignore"):
        made, n = taps.astype(np.float32), len(taps)
    if not np.isfinite(made).all():
        return made
    even, odd = (np.allclose(taps, sign * taps[::-1], rtol=1e-12, atol=0) for sign in (1, -1))
    if odd:  # they add up to 0
        made[: n // 2] = -made[: n - n // 2 - 1 : -1]
        return made
    for i in sorted(range((n + 1) // 2 if even else n), key=lambda i: -abs(taps[i])):
        if not taps[i]:
            continue
        pair = (i, n - 1 - i) if even and i != n - 1 - i else (i,)
        missing, step = taps.sum() - made.sum(dtype=np.float64), float(np.spacing(np.abs(made[i])))
        if abs(missing) < len(pair) * step / 2:
            continue
        moved = np.float32(made[i] + missing / len(pair))
        if abs(float(moved) - taps[i]) <= 2 * step:
            for j in pair:
                made[j] = moved
    return _kept_constant(made, taps)


def _summed(taps: np.ndarray) -> np.float32:
    """The sum of a window of ones, in the kernels' order: eight taps at a time by themselves."""
    total = np.float32(0)
    for first in range(0, len(taps), 8):
        part = np.float32(0)
        for tap in taps[first : first + 8]:
            part += tap
        total += part
    return total


def _kept_constant(made: np.ndarray, taps: np.ndarray) -> np.ndarray:
    """Taps of nearly the same sum of which the kernels' sum of a window of ones is the nearest to the filter's sum, if some are found.

    A pair of taps is moved by a few steps, and the middle one the other way.
    """
    want, middle, n = np.float32(taps.sum()), len(made) // 2, len(made)
    allowed = max(abs(taps.sum() - made.sum(dtype=np.float64)), 2.0**-28 * abs(taps.sum()))
    if _summed(made) == want:
        return made
    for i in sorted(range(middle), key=lambda i: -abs(taps[i])):
        for steps in (1, -1, 2, -2, 3, -3):
            moved = np.float32(steps) * np.spacing(np.abs(made[i]))
            tried = made.copy()
            tried[[i, n - 1 - i]] += moved
            tried[middle] -= 2 * moved
            if _summed(tried) == want and abs(taps.sum() - tried.sum(dtype=np.float64)) <= allowed:
                return tried
    return made
