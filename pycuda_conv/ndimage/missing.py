"""Filters of images with pixels that have no data: NaN, or those that a mask names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pycuda_conv.ndimage import compute
from pycuda_conv.ndimage.compute import Call
from pycuda_conv.ndimage.launches import Dense, Term
from pycuda_conv.ndimage.spaces import INTEGERS, PARTS, as_array
from pycuda_conv.numbers.missing import LEAST_WEIGHT, Missing


def run(call: Call, terms: Callable[[Any], Sequence[Term]], weights: Sequence[Any], missing: Missing) -> Any:
    """The filter's result over the pixels that have data: sum(w) * filter(m x) / filter(m), m being 1 where there is data, else 0.

    A pixel without any data in its window stays what it is. What lies outside counts as data. For a filter whose taps add up to 1 that is
    astropy's ``nan_treatment="interpolate"``.
    """
    space, x = call.space, as_array("input", call.x)
    input = space.dtype(x)
    if input in PARTS or len(weights) != 1:
        raise TypeError("nan= and mask= are for real images and filters")
    found = terms(weights[0])
    least = min((float(np.min(one)) for term in found for one in _taps(term)), default=0.0)
    missing.check_taps(least)
    want = compute.wanted(call, input, False)
    narrow = input in compute.NARROW and want != "float64"
    sums = "float32" if narrow else "float64"
    nan, mask = missing.nan is not None and input not in INTEGERS and input != "bool", missing.mask
    if mask is not None:
        mask = as_array("mask", mask)
        if tuple(mask.shape) != tuple(x.shape):
            raise ValueError(f"mask must have the shape of the input, {tuple(x.shape)}, got {tuple(mask.shape)}")
    elif not nan:
        return compute.run(call, terms, weights)
    gone = space.missing(x, nan, mask)
    kept = space.cast(x, sums)
    filled = space.filled(gone, 0.0 if missing.fill is None else float(missing.fill), kept)
    made = compute.run(call._replace(x=filled, output=sums), terms, weights)
    if missing.fill is None:
        bottom = compute.run(call._replace(x=space.present(gone, sums), output=sums, value=1.0), terms, weights)
        whole = float(np.prod([np.sum(one) for term in found for one in _taps(term)]))
        made = space.made_up(made, bottom, whole, LEAST_WEIGHT, kept)
    if missing.preserve_nan:
        made = space.filled(gone, float("nan"), made)
    made = made if sums == want else compute.converted(space, made, want, call.rounding)
    if not compute.is_array(call.output):
        return made
    space.assign(call.output, made)
    return call.output


def _taps(term: Term) -> list[np.ndarray]:
    return [term.weights] if isinstance(term, Dense) else [one.taps for one in term]
