"""One GPU, whatever context is used on it: its properties, and the machine code that is compiled for it."""

from __future__ import annotations

import threading

from pycuda_conv.errors import BackendError
from pycuda_conv.runtime import driver
from pycuda_conv.runtime.compile_queue import CompileQueue


class Gpu:
    """One NVIDIA GPU. Made by :func:`gpu`.

    Attributes
    ----------
    ordinal : int
    name : str
        As ``device=`` takes it.
    model : str
    capability : (int, int)
    multiprocessors, cache_bytes, shared_bytes, threads : int
        Multiprocessors; bytes of the L2 cache; the most bytes of shared memory of a block; the most threads of a multiprocessor.
    queue : CompileQueue
    """

    def __init__(self, ordinal: int) -> None:
        drv = driver.pycuda()
        count = drv.Device.count()
        if ordinal >= count:
            raise BackendError(f"device cuda:{ordinal} was asked for, but the CUDA driver sees {count} GPU(s)")
        self.ordinal = ordinal
        self.name = f"cuda:{ordinal}"
        device, attribute = drv.Device(ordinal), drv.device_attribute
        self.model = device.name()
        self.capability = device.compute_capability()
        self.multiprocessors = device.multiprocessor_count
        self.shared_bytes = device.get_attribute(attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        self.cache_bytes = int(device.get_attribute(attribute.L2_CACHE_SIZE))
        self.threads = device.get_attribute(attribute.MAX_THREADS_PER_MULTIPROCESSOR)
        self.queue = CompileQueue("sm_{}{}".format(*self.capability))


_lock = threading.Lock()
_made: dict[int, Gpu] = {}


def gpu(ordinal: int) -> Gpu:
    """The GPU of that number; made once, shared by every thread and context."""
    with _lock:
        if ordinal not in _made:
            _made[ordinal] = Gpu(ordinal)
        return _made[ordinal]
