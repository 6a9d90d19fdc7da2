"""Filters of arrays in the host's memory on a GPU: there and back once, whatever number of launches is between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pycuda_conv.arrays.kinds import GPU_ARRAY
from pycuda_conv.ndimage.launches import Bench
from pycuda_conv.ndimage.spaces import space_of
from pycuda_conv.runtime import copies


def joined(bench: Bench, x: Any, output: str, target: Any, run: Callable[[Bench, Any], Any]) -> Any:
    """What `run` makes, of type `output`, from `x` on the bench's GPU, as an array of the kind of `x`, or in `target`.

    Parameters
    ----------
    bench : Bench
        Of arrays in the host's memory, and of a GPU.
    x : array
        In C order, of a type that the kernels read.
    output : str
    target : array, optional
    run : callable
        Takes a bench of GPUArrays, and one of these.
    """
    kind, device = bench.space.kind, bench.device
    given = kind.to_numpy(x, "input")  # type: ignore[attr-defined]
    with device.current():
        _, own, _ = device.pipeline_streams()
        on = Bench(space_of(GPU_ARRAY), device, None)
        there = on.space.library.GPUArray(given.shape, given.dtype, allocator=device.allocate)
        device.order(None, own)  # the pool's memory may still be in use by the default stream
        copies.to_device(there.gpudata, given, own)
        device.order(own, None)
        made = run(on, there)
        result = _room(bench, made.shape, output, x, target)
        held = kind.to_numpy(result, "output")  # type: ignore[attr-defined]
        device.order(None, own)
        copies.to_host(held, made.gpudata, own)
        own.synchronize()
    return result


def _room(bench: Bench, shape: Sequence[int], output: str, like: Any, target: Any) -> Any:
    """Where the result lies on the host: page-locked where arrays of numpy are made for it."""
    if target is not None:
        return target
    if isinstance(like, np.ndarray):
        return bench.device.result_array(tuple(shape), np.dtype(output))
    return bench.space.empty(shape, output, like)
