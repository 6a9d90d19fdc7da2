"""The buffers of a plan that runs on the simulated machine, and what the driver asks of tensor maps on them."""

from __future__ import annotations

import math

import numpy as np

from pycuda_conv.engines.geometry import divider
from pycuda_conv.runtime.base import Im2col, KernelLaunch, TensorMap

INPUT, WEIGHT, BIAS, RESULT, WORKSPACE, PACKED, SCALE, RESIDUAL = range(8)


def result_type(problem, x) -> np.dtype:
    """The type of a result: that of `x`, unless the image is of integers."""
    return np.dtype(problem.result_dtype or problem.dtype) if problem.input_dtype else x.dtype


class Memory:
    """A plan's buffers: exactly as many bytes as they have to have, all NaN. Arrays are NCHW, whatever the problem's layout."""

    def __init__(self, problem, program, x, w, b=None, scale=None, residual=None, filter_last: bool = False):
        self.filter_last = filter_last  # whether the filter's second axis is last in memory
        if filter_last and problem.direction != "wgrad":
            w = np.moveaxis(w, 1, -1)
        if problem.layout == "NHWC":
            x, residual = (None if a is None else np.moveaxis(a, -problem.ndim - 1, -1) for a in (x, residual))
            w = np.moveaxis(w, -problem.ndim - 1, -1) if problem.direction == "wgrad" else w
        given = [self._bytes(np.zeros(0, x.dtype) if a is None else a) for a in (x, w, b, scale, residual)]
        sizes = (result_type(problem, x).itemsize * math.prod(problem.result_shape), program.workspace_bytes, program.filter_bytes)
        self.buffers = [*given[:3], *(np.full(n, 0xFF, np.uint8) for n in sizes), *given[3:]]

    @staticmethod
    def _bytes(array: np.ndarray) -> np.ndarray:
        return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)

    def view(self, place, dtype: str) -> np.ndarray:
        """From `place` to the end of its buffer, as elements of `dtype`."""
        buffer, offset = place if isinstance(place, tuple) else (place, 0)
        size = np.dtype(dtype).itemsize
        left = self.buffers[buffer][offset:]
        return left[: len(left) // size * size].view(dtype)

    def result(self, problem, dtype: str) -> np.ndarray:
        found = self.view(RESULT, dtype)
        shape = list(problem.result_shape)
        if problem.layout == "CNHW":
            return found.reshape(shape[1], shape[0], *shape[2:])
        if problem.direction == "wgrad" and self.filter_last:
            return np.moveaxis(found.reshape(shape[0], *shape[2:], shape[1]), -1, 1)
        if problem.layout == "NCHW" or problem.direction == "wgrad":
            return found.reshape(shape)
        channels = shape.pop(-problem.ndim - 1)
        return np.moveaxis(found.reshape(*shape, channels), -1, -problem.ndim - 1)


def type_of(described: TensorMap) -> np.dtype:
    """The elements of a tensor map's array as they lie in memory."""
    return np.dtype("float32" if described.dtype == "tfloat32" else described.dtype)


def check_map(described: TensorMap, memory) -> None:
    """What the driver's encoder and the loads require."""
    sizes, strides, box, size = described.sizes, described.strides, described.box, type_of(described).itemsize
    assert described.offset % 16 == 0 and described.span in (0, 32, 64, 128)
    assert len(strides) == len(sizes) - 1 and all(s % 16 == 0 and 0 < s < 2**40 for s in strides) and all(0 < n <= 2**32 for n in sizes)
    reach = size * sizes[0] + sum((n - 1) * s for n, s in zip(sizes[1:], strides, strict=True))
    assert described.offset + reach <= len(memory.buffers[described.buffer]), f"{described} is larger than its buffer"
    if isinstance(box, Im2col):
        spatial_dims = len(sizes) - 2
        assert len(box.lower) == len(box.upper) == len(box.stride) == spatial_dims
        low, high = {1: (-(2**15), 2**15 - 1), 2: (-128, 127), 3: (-16, 15)}[spatial_dims]
        assert all(low <= corner <= high for corner in (*box.lower, *box.upper)), f"{box} has a corner that is refused"
        assert all(1 <= s <= 8 for s in box.stride), f"{box} has a stride that is refused"
        assert size * box.channels == described.span and 1 <= box.pixels <= 1024
        assert size * sizes[0] % 16 == 0, "an H200 stops with an illegal instruction at channels that are no multiple of 16 bytes"
        assert all(n - 1 + up >= lo for n, up, lo in zip(sizes[1:-1], box.upper, box.lower, strict=True)), f"{box} is empty"
    else:
        assert len(box) == len(sizes) and size * box[0] == (described.span or 4 * box[0]) and all(1 <= n <= 256 for n in box)


def check_divisors(step: KernelLaunch) -> None:
    """Divisors that a kernel gets prepared are those of its arguments."""
    for struct in getattr(step, "structs", ()):
        for name in struct._fields:
            if name.startswith("by_") and hasattr(struct, name[3:]):
                assert getattr(struct, name) == divider(max(getattr(struct, name[3:]), 1)), f"{name} is not prepared"
