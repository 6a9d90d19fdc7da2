"""A plugin of pytest that puts this package's functions in the place of scipy's while scipy's own tests run: `-p scipys_tests`.

Tests that ask for what is documented to differ are skipped, each with the reason.
"""

import functools

import pytest

import pycuda_conv.ndimage as ours
import pycuda_conv.signal as our_signal

#: Why a test of scipy's is skipped, by a part of its name.
SKIPPED: dict[str, str] = {}


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
        reason = next((why for part, why in SKIPPED.items() if part in item.nodeid), None)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
