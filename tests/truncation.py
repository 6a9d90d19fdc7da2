"""A model of the tensor core's sum, the same bits: what cu/core/truncation.cuh gives back is derived from it.

Published by Xie et al. (MMA-Sim, arXiv 2511.10909) and Khattak and Mikaitis (arXiv 2512.07004).
A step adds some products and the sum so far at once. Products are exact.
Every summand is cut towards zero at `bits` binary places of the largest exponent among them;
the sum of what is left is exact, and is cut towards zero to float32. Hopper: 25 places, and a step has 16 of k in fp16, 8 in TF32.
float64 holds all of it exactly.
"""

from __future__ import annotations

import math

import numpy as np

BITS, FP16_STEP, TF32_STEP = 25, 16, 8


def power_of(v: np.ndarray, least: int) -> np.ndarray:
    """2^exponent of each number as the multiplier sees it; zero has the least of all."""
    power = np.maximum((np.abs(v).view(np.int64) & (2047 << 52)).view(np.float64), 2.0**least)
    return np.where(v == 0, 2.0**-126, power)


def cut(sum: np.ndarray) -> np.ndarray:
    """To float32, towards zero."""
    return (sum.view(np.int64) & ~((1 << 29) - 1)).view(np.float64)


def rounded(v: np.ndarray) -> np.ndarray:
    """To float32, to nearest."""
    return v.astype(np.float32).astype(np.float64)


def tensor_sum(so_far: np.ndarray | None, a: np.ndarray, b: np.ndarray, step: int, least: int = -14) -> np.ndarray:
    """The sum so far, [m, n], and the products of a, [k, m], and b, [k, n], a step of k at a time."""
    for first in range(0, len(a), step):
        some_a, some_b = a[first : first + step], b[first : first + step]
        top = (power_of(some_a, least)[:, :, None] * power_of(some_b, least)[:, None, :]).max(axis=0)
        if so_far is not None:
            top = np.maximum(top, power_of(so_far, -126))
        up = 2.0**BITS / top
        total = np.zeros_like(top) if so_far is None else np.trunc(so_far * up)
        for row_a, row_b in zip(some_a, some_b, strict=True):
            total += np.trunc(np.multiply.outer(row_a, row_b) * up)
        so_far = cut(total / up)
    return so_far


def limbs(v: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """cu/core/limbs.cuh: high and 2^11 low, and the scale."""
    scale = 2.0 ** (14 - np.floor(np.log2(np.abs(v).max())))
    high = (v * scale).astype(np.float16).astype(np.float64)
    return high, ((v * scale - high) * 2048).astype(np.float16).astype(np.float64), scale


def given_back(to: np.ndarray, sum: np.ndarray, part: float | np.ndarray) -> np.ndarray:
    """with_lost."""
    return np.where(sum.astype(np.float32).view(np.int32) & 15, rounded(to + sum * part), to)


CUT, STEADY = 0.345e-7 * 16 / 15, 0.5e-7 * 16 / 15


def lost_in(n: int) -> float:
    return CUT * 0.5 * (n + 1)


def promoted(total: np.ndarray, last: np.ndarray, stages: int) -> np.ndarray:
    """Promoted: the part of itself that a sum of stages is given back."""
    steady = lost_in(4) + STEADY * (1 - (2.467 * stages - 1.467) ** -0.5)
    return np.where(abs(last * stages - total) < abs(total), steady, steady - STEADY)


def three_products(x: np.ndarray, w: np.ndarray, give_back: bool = True) -> np.ndarray:
    """hopper/gemm.cu in fp32, of x, [k, m], and w, [k, n]: each stage of 64 of k is promoted."""
    (x_high, x_low, x_scale), (w_high, w_low, w_scale) = limbs(x), limbs(w)
    total = cross = None
    stages = -(-len(x) // 64)
    for stage in range(stages):
        of = slice(64 * stage, 64 * stage + 64)
        main = tensor_sum(None, x_high[of], w_high[of], FP16_STEP)
        cross = tensor_sum(tensor_sum(cross, x_high[of], w_low[of], FP16_STEP), x_low[of], w_high[of], FP16_STEP)
        total = main if total is None else rounded(total + main)
    if give_back:
        cross = given_back(cross, total, 2048 * promoted(total, main, stages))
    return rounded(total + cross / 2048) / (x_scale * w_scale)


def tf32(v: np.ndarray) -> np.ndarray:
    """To TF32, halves to even."""
    bits = v.astype(np.float32).view(np.uint32)
    return ((bits + 0xFFF + (bits >> 13 & 1)) & ~np.uint32(0x1FFF)).view(np.float32).astype(np.float64)


def tf32_by_cvt(v: np.ndarray) -> np.ndarray:
    """To TF32, halves away from zero, as `cvt.rna` does."""
    return ((v.astype(np.float32).view(np.uint32) + 0x1000) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


def tf32_limbs(v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What hopper/pointwise.cu makes of a number: its first limb, and 512 times its rest."""
    first = tf32(v)
    return first, tf32((v - first) * 512)


PROMOTED = 0.67e-7 * 16 / 15


def three_tf32_products(x: np.ndarray, w: np.ndarray, give_back: bool = True) -> np.ndarray:
    """hopper/pointwise.cu in fp32, of x, [k, m], and w, [k, n]: 32 of k are promoted."""
    (x_first, x_rest), (w_first, w_rest) = tf32_limbs(x), tf32_limbs(w)
    total = cross = None
    for begin in range(0, len(x), 32):
        main = None
        for k in range(begin, min(begin + 32, len(x)), TF32_STEP):
            of = slice(k, k + TF32_STEP)
            main = tensor_sum(main, x_first[of], w_first[of], TF32_STEP, -126)
            for a, b in (x_rest, w_first), (x_first, w_rest):
                cross = tensor_sum(cross, a[of], b[of], TF32_STEP, -126)
        total = main if total is None else rounded(total + main)
    if give_back:
        cross = given_back(cross, total, 512 * PROMOTED)
    return rounded(total + cross / 512)


def one_product(x: np.ndarray, w: np.ndarray, give_back: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """One fp16 product, all of k in the tensor core; and the exact product of the operands as they were rounded."""
    (x, _, x_scale), (w, _, w_scale) = limbs(x), limbs(w)
    total = tensor_sum(None, x, w, FP16_STEP)
    if give_back:
        total = given_back(total, total, lost_in(-(-len(x) // FP16_STEP)))
    return total / (x_scale * w_scale), x.T @ w / (x_scale * w_scale)


def shrinkage(y, exact) -> tuple[float, float]:
    """The mean of (y - exact) sign(exact) / rms(exact), and its standard error; of arrays of numpy, or of torch."""
    off = (y - exact) * (2 * (exact > 0) - 1)
    rms = float((exact * exact).mean()) ** 0.5
    return float(off.mean()) / rms, float(off.std()) / rms / math.prod(off.shape) ** 0.5
