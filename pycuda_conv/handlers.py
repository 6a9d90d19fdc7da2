"""Modules to which :mod:`pycuda_conv.dispatch` hands calls over. They import large libraries, so the first such call imports them."""

from __future__ import annotations

from typing import Any

from pycuda_conv import dispatch


def _torch() -> Any:
    from pycuda_conv.nn import autograd

    return autograd


def _repeated() -> Any:
    from pycuda_conv.nn import repeated

    return repeated


def _autocast() -> Any:
    from pycuda_conv.nn import mixed

    return mixed


def _dask() -> Any:
    from pycuda_conv import dask

    return dask


def _joined() -> Any:
    from pycuda_conv import joined

    return joined


dispatch.handlers.update(torch=_torch, repeated=_repeated, autocast=_autocast, dask=_dask, joined=_joined)
