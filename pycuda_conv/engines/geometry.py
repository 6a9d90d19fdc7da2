"""Arithmetic that the engines share."""

from __future__ import annotations


def divider(d: int) -> int:
    """The divisor `d` as the kernels take it: see ``cu/division.cuh``.

    Parameters
    ----------
    d : int
        From 1 to 2^31.

    Returns
    -------
    int
        A multiplier in the lower 32 bits, a shift in the upper ones.
    """
    if not 1 <= d <= 2**31:
        raise ValueError(f"d must be from 1 to 2^31, got {d}")
    shift = (d - 1).bit_length()
    return shift << 32 | (2**32 * (2**shift - d) // d + 1)
