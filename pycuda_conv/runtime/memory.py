"""A pool of device memory for each context.

PyCUDA's own pools and allocations would keep their context alive. Ours hold addresses: a block that is dropped goes to the pool's list
without a call of the driver, and the list is read only while the context is current. The pool frees its memory if
the driver has too little for a request. All of it goes with the context.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache

from pycuda_conv.errors import DeviceMemoryError
from pycuda_conv.runtime import driver

#: Sizes of blocks are multiples of this many bytes.
UNIT = 512
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class MemoryPool:
    """Blocks of one context's memory, which follow its default stream. The context must be current, but for :meth:`take_back`.

    Parameters
    ----------
    name : str
        The GPU's name in messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: dict[int, list[int]] = {}
        self._lock = threading.RLock()  # a block may be dropped in the middle of anything, as the garbage collector pleases
        #: the number of blocks that are in use
        self.in_use = 0

    def take(self, nbytes: int) -> tuple[int, int]:
        """A block of at least `nbytes`: its address and its size.

        Raises
        ------
        DeviceMemoryError
        """
        size = rounded(nbytes)
        with self._lock:
            idle = self._idle.get(size)
            address = idle.pop() if idle else 0
            self.in_use += 1
        if not address:
            try:
                address = self.from_driver(size)
            except BaseException:
                with self._lock:
                    self.in_use -= 1
                raise
        return address, size

    def take_back(self, address: int, size: int) -> None:
        """Keep a block for later. It calls no driver."""
        with self._lock:
            self._idle.setdefault(size, []).append(address)
            self.in_use -= 1

    def from_driver(self, nbytes: int) -> int:
        """The address of new memory. If there is too little, what the pool holds is given back first."""
        address = ctypes.c_uint64()
        allocate = driver.libcuda().cuMemAlloc_v2
        code = allocate(ctypes.byref(address), nbytes)
        if code == OUT_OF_MEMORY:
            self.free_held()
            code = allocate(ctypes.byref(address), nbytes)
        if code == OUT_OF_MEMORY:
            raise DeviceMemoryError(out_of_memory(self._name, nbytes))
        driver.check(code, "cuMemAlloc")
        return address.value

    @property
    def held(self) -> int:
        """Bytes of the blocks that nobody uses."""
        with self._lock:
            return sum(size * len(idle) for size, idle in self._idle.items())

    def free_held(self) -> None:
        """Give the blocks that nobody uses back to the driver."""
        with self._lock:
            blocks = [address for idle in self._idle.values() for address in idle]
            self._idle.clear()
        for address in blocks:
            driver.libcuda().cuMemFree_v2(address)


def out_of_memory(name: str, nbytes: int | None = None) -> str:
    """The message for memory that is not there; the number of bytes is left out where it is not known."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    driver.libcuda().cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    asked = "" if nbytes is None else f"{nbytes:,} bytes were asked for, "
    return f"{name} is out of memory: {asked}{free.value:,} of {total.value:,} are free"


def rounded(nbytes: int) -> int:
    """The size of a block for `nbytes`: one of eight sizes from each power of two to the next, so that blocks fit again."""
    step = max(UNIT, 1 << max(nbytes.bit_length() - 4, 0))
    return max(-(-nbytes // step) * step, UNIT)


@cache
def block_class() -> type:
    """The class of blocks, which is made where PyCUDA is there."""

    class Block(driver.pycuda().PointerHolderBase):  # type: ignore[misc]
        """A block of a pool, as PyCUDA's functions and arrays take memory. It goes back to the pool when it is dropped, in any thread."""

        def __init__(self, pool: MemoryPool, nbytes: int) -> None:
            super().__init__()
            self._pool = pool
            self._pointer, self._size = pool.take(nbytes)

        def get_pointer(self) -> int:
            return self._pointer

        def __int__(self) -> int:
            return self._pointer

        __index__ = __int__

        def free(self) -> None:
            """Give the block back now."""
            size, self._size = self.__dict__.get("_size", 0), 0
            if size:
                self._pool.take_back(self._pointer, size)

        __del__ = free

    return Block
