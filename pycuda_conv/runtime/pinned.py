"""Page-locked host memory: a pool of it, handed out as ordinary numpy arrays.

The GPU copies to and from page-locked memory at the speed of the bus and without the host's help. Copies to ordinary memory pass through a
small buffer of the driver's, and a fresh array costs page faults besides. Locking pages is slow too, so blocks are kept and used again.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from typing import Any

import numpy as np

from pycuda_conv.errors import VariableError

#: Blocks are multiples of this many bytes: the pages of the GPU's address translation.
_PAGE = 1 << 16


def default_limit() -> int:
    """The most bytes that the pool may lock: ``PYCUDA_CONV_PINNED_LIMIT``, or a quarter of the machine's memory."""
    text = os.environ.get("PYCUDA_CONV_PINNED_LIMIT")
    if text is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    if not text.isdecimal():
        raise VariableError(f"PYCUDA_CONV_PINNED_LIMIT must be a number of bytes, got {text!r}")
    return int(text)


class _Loan:
    """A block in use. numpy arrays over it, slices included, keep it alive; when the last one goes, the block is idle again."""

    def __init__(self, pool: PinnedPool, address: int, nbytes: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._pool, self._address, self._nbytes = pool, address, nbytes
        self.__array_interface__ = {"shape": shape, "typestr": dtype.str, "data": (address, False), "version": 3}

    def __del__(self) -> None:
        self._pool._take_back(self._address, self._nbytes)


class PinnedPool:
    """Page-locked blocks, at most `limit` bytes of them, for the use of every GPU.

    Blocks are never given back to the system while arrays over them live, not even at exit: a caller's arrays stay readable and writeable
    for as long as the process runs.
    """

    def __init__(self, library: Any, limit: int) -> None:
        self.limit = limit
        #: bytes locked, whether handed out or waiting
        self.locked = 0
        #: bytes handed out
        self.lent = 0
        self._library = library
        self._idle: dict[int, list[int]] = {}
        self._lock = threading.RLock()  # a loan may end in the middle of anything, as the garbage collector pleases

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray | None:
        """An uninitialised array, or None if the limit or the system allows no more. A CUDA context must be current."""
        dtype = np.dtype(dtype)
        nbytes = _rounded(math.prod(shape) * dtype.itemsize)
        address = self._block(nbytes)
        return None if address is None else np.asarray(_Loan(self, address, nbytes, shape, dtype))

    def _block(self, nbytes: int) -> int | None:
        with self._lock:
            idle = self._idle.get(nbytes)
            if idle:
                self.lent += nbytes
                return idle.pop()
            if self.locked + nbytes > self.limit:
                self.trim()
            if self.locked + nbytes > self.limit:
                return None
            address = ctypes.c_void_p()
            if self._library.cuMemHostAlloc(ctypes.byref(address), nbytes, 1):  # 1: for every context
                return None
            self.locked += nbytes
            self.lent += nbytes
            return address.value

    def _take_back(self, address: int, nbytes: int) -> None:
        with self._lock:
            self._idle.setdefault(nbytes, []).append(address)
            self.lent -= nbytes

    def trim(self) -> None:
        """Give the idle blocks back to the system. A CUDA context must be current."""
        with self._lock:
            for nbytes in list(self._idle):  # a loan that ends meanwhile, in this very thread, may add a block
                addresses = self._idle[nbytes]
                while addresses:
                    self._library.cuMemFreeHost(addresses.pop())
                    self.locked -= nbytes


def _rounded(nbytes: int) -> int:
    """The size of a block for `nbytes`: one of eight sizes from each power of two to the next, so that blocks fit again."""
    nbytes = max(nbytes, _PAGE)
    step = max(_PAGE, 1 << (nbytes.bit_length() - 4))
    return -(-nbytes // step) * step
