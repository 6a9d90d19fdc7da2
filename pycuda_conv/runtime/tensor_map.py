"""Tensor maps, made by the driver's library: PyCUDA has no function for them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from pycuda_conv.runtime import driver
from pycuda_conv.runtime.base import Im2col, TensorMap


def encoded(described: TensorMap, address: int) -> bytes:
    """The ``CUtensorMap`` of the array at `address`: the 128 bytes that a kernel takes."""

    function, kind, rank, tail = _arguments(described)
    room = ctypes.create_string_buffer(128 + 64)
    at = (ctypes.addressof(room) + 63) & ~63  # the driver wants multiples of 64
    code = getattr(driver.libcuda(), function)(ctypes.c_void_p(at), kind, rank, ctypes.c_void_p(address), *tail)
    if code:
        driver.check(code, f"encoding {described}")
    return ctypes.string_at(at, 128)


@lru_cache(maxsize=4096)
def _arguments(described: TensorMap) -> tuple[str, int, Any, tuple[Any, ...]]:
    """The driver's function, and its arguments but for the map's room and the array's address, which calls only read.

    A repeated call of a layer encodes its maps anew wherever its arrays have moved.
    """

    def array(kind: Any, values: Sequence[int]) -> Any:
        return (kind * len(values))(*values)

    u32, u64, i32 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int
    rank, box = len(described.sizes), described.box
    kind = {"float16": 6, "float32": 7, "bfloat16": 9, "tfloat32": 11}[described.dtype]  # CU_TENSOR_MAP_DATA_TYPE_...
    sizes = array(u64, described.sizes), array(u64, described.strides)
    swizzle = {0: 0, 32: 1, 64: 2, 128: 3}[described.span]
    tail = (0, swizzle, 2, 0)  # not interleaved; L2 fetches 128 bytes; zeros outside
    if isinstance(box, Im2col):
        boxes = array(i32, box.lower), array(i32, box.upper), u32(box.channels), u32(box.pixels), array(u32, (1, *box.stride, 1))
        return "cuTensorMapEncodeIm2col", kind, u32(rank), (*sizes, *boxes, *tail)
    return "cuTensorMapEncodeTiled", kind, u32(rank), (*sizes, array(u32, box), array(u32, (1,) * rank), *tail)
