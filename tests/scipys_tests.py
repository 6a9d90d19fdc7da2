"""A plugin of pytest that puts this package's functions in the place of scipy's while scipy's own tests run: `-p scipys_tests`.

Tests that ask for what is documented to differ are skipped, each with the reason.
"""

import functools
import os
import re

import pytest

import pycuda_conv.ndimage as ours
import pycuda_conv.signal as our_signal

_CLIPPED = "integers out of range are clipped; scipy's wrap"
_PASSES = "the expected numbers are rounded between passes; here they are rounded once"
#: Why a test of scipy's is skipped, by a pattern of its name.
SKIPPED = {
    r"test_(sobel|prewitt)0[123]\[numpy-uint": _CLIPPED,
    r"TestCorrelateReal::test_(method|rank3_valid|rank3_same|rank3_all)\[numpy-u?int8": _CLIPPED,
    r"test_gaussian_laplace0[12]\[numpy-int32": _PASSES,
    r"test_gaussian_gradient_magnitude0[12]\[numpy-int32": _PASSES,
    r"test_generic_laplace01\[numpy-u?int": _PASSES,
    r"test_uniform_filter1d_roundoff_errors": "integers are truncated there, and rounded here",
    r"test_gaussian_filter_float16": "float16 is taken here",
    r"test_fft_nan": "no NaN spreads here, of which scipy's transforms warn",
    r"TestOAConvolve::test_single_element": "the result is of a floating type here, as it is for two elements",
}


def _replacements():
    import scipy.ndimage
    import scipy.signal

    found = {}
    for theirs, mine, names in ((scipy.ndimage, ours, ours.__all__), (scipy.signal, our_signal, our_signal.__all__)):
        for name in names:
            if name != "signal":
                found[getattr(theirs, name)] = getattr(mine, name)
                setattr(theirs, name, getattr(mine, name))
    return found


def _replaced(value, found):
    if isinstance(value, functools.partial):
        return functools.partial(_replaced(value.func, found), *value.args, **value.keywords)
    try:
        return found.get(value, value)
    except TypeError:
        return value


def pytest_collection_modifyitems(items):
    """SCIPYS_EVERY: each so manyth test alone, and none of arrays of gigabytes, where clearing their pages is all that takes long."""
    part = int(os.environ.get("SCIPYS_EVERY", "1"))
    items[:] = [item for item in items[::part] if part == 1 or "test_large_array" not in item.nodeid]


def pytest_collection_finish(session):
    found = _replacements()
    for module in {item.module for item in session.items}:
        for name, value in list(vars(module).items()):
            if callable(value) and _replaced(value, found) is not value:
                setattr(module, name, found[value])
    for item in session.items:
        if hasattr(item, "callspec"):
            for name, value in item.callspec.params.items():
                item.callspec.params[name] = _replaced(value, found)
        reason = next((why for pattern, why in SKIPPED.items() if re.search(pattern, item.nodeid)), None)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
