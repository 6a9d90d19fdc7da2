"""CUDA graphs: launches that are captured once and replayed."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pycuda_conv.runtime import driver


class Graph:
    """Launches captured from a stream, to be replayed there without the host's cost of each launch.

    Parameters
    ----------
    stream : pycuda.driver.Stream
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._ready = ctypes.c_void_p()

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture the launches on the stream inside the block, instead of running them."""
        library, graph, handle = driver.libcuda(), ctypes.c_void_p(), self._stream.handle
        driver.check(library.cuStreamBeginCapture_v2(handle, 1), "cuStreamBeginCapture")  # 1: other threads may call anything
        try:
            yield
        finally:
            code = library.cuStreamEndCapture(handle, ctypes.byref(graph))
        driver.check(code, "cuStreamEndCapture")
        code = library.cuGraphInstantiateWithFlags(ctypes.byref(self._ready), graph, 0)
        library.cuGraphDestroy(graph)
        driver.check(code, "cuGraphInstantiate")

    def replay(self) -> None:
        """Launch all that was captured."""
        driver.check(driver.libcuda().cuGraphLaunch(self._ready, self._stream.handle), "cuGraphLaunch")

    def __del__(self) -> None:
        if self._ready:
            driver.libcuda().cuGraphExecDestroy(self._ready)
