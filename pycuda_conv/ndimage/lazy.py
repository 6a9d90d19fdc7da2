"""Filters of dask arrays: each chunk is filtered with as much of its neighbours as the filter reaches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pycuda_conv.ndimage import compute
from pycuda_conv.ndimage import missing as missing_data
from pycuda_conv.ndimage.launches import Dense
from pycuda_conv.ndimage.spaces import PARTS
from pycuda_conv.numbers.missing import Missing


def _reach(terms: Sequence[Any]) -> tuple[dict[int, int], dict[int, str]]:
    """By axis, how far a filter's terms reach to either side, and what lies outside."""
    depth: dict[int, int] = {}
    borders: dict[int, str] = {}
    for term in terms:
        each = zip(term.axes, term.weights.shape, term.before, term.borders, strict=True) if isinstance(term, Dense) else None
        for axis, n, before, border in each or [(one.axis, len(one.taps), one.before, one.border) for one in term]:
            depth[axis] = max(depth.get(axis, 0), before, n - 1 - before)
            borders[axis] = border
    return depth, borders


def run(
    input: Any, output: Any, cval: Any, device: Any, stream: Any, rounding: str, terms: Callable[[Any], Sequence[Any]],
    weights: Sequence[Any], norm: bool, missing: Missing,
) -> Any:
    """The dask array of a filter's result; `output` is a dtype or None."""
    import dask.array as da

    if stream is not None:
        raise ValueError(f"stream is for arrays on a GPU, and a dask array is computed later; got stream={stream!r}")
    if output is not None and hasattr(output, "shape"):
        raise TypeError("output must be a dtype for a dask array, which is computed later")
    if output is None:
        complex_output = input.dtype.name in PARTS or len(weights) == 2
        dtype = np.promote_types(input.dtype, np.complex64) if complex_output else input.dtype
    else:
        dtype = np.dtype(output)
    if missing.asked and missing.mask is not None:
        raise TypeError("mask is for arrays in memory: a dask array marks pixels without data by NaN, with nan='interpolate'")
    depth, borders = _reach([term for one in weights for term in terms(one)])
    if 0 in input.shape:
        return da.zeros(input.shape, dtype)
    chunks: dict[int, Any] = {}
    for axis, far in list(depth.items()):
        sizes = input.chunks[axis]
        # an axis in one chunk needs no neighbours, nor does one that wraps or has short chunks if it is put into one
        if len(sizes) > 1 and (far > min(sizes) or borders[axis] == "wrap"):
            chunks[axis] = -1
        if len(sizes) == 1 or axis in chunks:
            depth[axis] = 0
    place = getattr(device, "name", device)

    def filtered(block: Any) -> Any:
        call = compute.called(block, dtype, cval, place, None, rounding)
        assert call is not None
        return missing_data.run(call, terms, weights, missing) if missing.asked else compute.run(call, terms, weights, norm)

    array = input.rechunk(chunks) if chunks else input
    meta = input._meta.astype(dtype)
    deep = {axis: far for axis, far in depth.items() if far}
    if not deep:
        return array.map_blocks(filtered, dtype=dtype, meta=meta)
    return da.map_overlap(filtered, array, depth=deep, boundary="none", dtype=dtype, meta=meta, allow_rechunk=False)
