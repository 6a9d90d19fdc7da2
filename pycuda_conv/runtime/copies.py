"""Asynchronous copies between the host's memory and a GPU's, in the current context."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from pycuda_conv.runtime import driver

#: The driver's functions that the copying threads call.
COPY_FUNCTIONS = (
    "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuEventCreate", "cuEventDestroy_v2", "cuEventRecord", "cuEventSynchronize",
    "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2",
)  # fmt: skip

#: The most bytes from one row to the next in a 2-d copy.
MOST_PITCH = 2**31 - 1

HOST, DEVICE = 1, 2  # CU_MEMORYTYPE_...


class Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D: so many rows of so many bytes, from one place to another."""

    _fields_ = [
        *((f"{end}_{name}", kind) for end in ("source", "target") for name, kind in (
            ("x", ctypes.c_size_t), ("y", ctypes.c_size_t), ("kind", ctypes.c_int), ("host", ctypes.c_void_p), ("device", ctypes.c_uint64),
            ("array", ctypes.c_void_p), ("pitch", ctypes.c_size_t),
        )),
        ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
    ]  # fmt: skip


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def to_device(target: Any, array: np.ndarray, stream: Any) -> None:
    """Copy a C-contiguous array to memory on the device."""
    code = driver.libcuda().cuMemcpyHtoDAsync_v2(int(target), _address(array), array.nbytes, driver.handle_of(stream))
    driver.check(code, "cuMemcpyHtoDAsync")


def to_host(array: np.ndarray, source: Any, stream: Any) -> None:
    """Copy memory on the device to a C-contiguous array."""
    code = driver.libcuda().cuMemcpyDtoHAsync_v2(_address(array), int(source), array.nbytes, driver.handle_of(stream))
    driver.check(code, "cuMemcpyDtoHAsync")


def within(target: int, source: int, nbytes: int, stream: Any) -> None:
    """Copy memory on the device to another place there."""
    driver.check(driver.libcuda().cuMemcpyDtoDAsync_v2(target, source, nbytes, driver.handle_of(stream)), "cuMemcpyDtoDAsync")


def fill(target: int, value: int, nbytes: int, stream: Any) -> None:
    """Set bytes on the device to `value`."""
    driver.check(driver.libcuda().cuMemsetD8Async(target, value, nbytes, driver.handle_of(stream)), "cuMemsetD8Async")


def band_to_device(target: Any, whole: np.ndarray, part: np.ndarray, stream: Any) -> None:
    """Copy `part`, a band of the C-contiguous `whole` along its third axis, to packed memory on the device."""
    if part.flags.c_contiguous:
        to_device(target, part, stream)
    elif whole.strides[1] > MOST_PITCH:
        for i, plane in enumerate(_planes(part)):
            to_device(int(target) + i * plane.nbytes, plane, stream)
    else:
        start, rows = _band(whole, part)
        source = {"kind": HOST, "host": _address(whole), "pitch": whole.strides[1], **start}
        in_2d(source, {"kind": DEVICE, "device": int(target), "pitch": rows["width"]}, rows, stream)


def band_to_host(whole: np.ndarray, part: np.ndarray, source: Any, stream: Any) -> None:
    """Copy packed memory on the device to `part` of `whole`: the inverse of :func:`band_to_device`."""
    if part.flags.c_contiguous:
        to_host(part, source, stream)
    elif whole.strides[1] > MOST_PITCH:
        for i, plane in enumerate(_planes(part)):
            to_host(plane, int(source) + i * plane.nbytes, stream)
    else:
        start, rows = _band(whole, part)
        target = {"kind": HOST, "host": _address(whole), "pitch": whole.strides[1], **start}
        in_2d({"kind": DEVICE, "device": int(source), "pitch": rows["width"]}, target, rows, stream)


def in_2d(source: dict[str, int], target: dict[str, int], rows: dict[str, int], stream: Any) -> None:
    """Copy rows; the members of each end, and of the whole, are those of :class:`Copy2D`."""
    ends = {f"{end}_{name}": value for end, members in (("source", source), ("target", target)) for name, value in members.items()}
    copy = Copy2D(**ends, **rows)
    driver.check(driver.libcuda().cuMemcpy2DAsync_v2(ctypes.byref(copy), driver.handle_of(stream)), "cuMemcpy2DAsync")


def _planes(part: np.ndarray) -> list[np.ndarray]:
    """The planes (n, c) of `part`."""
    return [part[n, c] for n in range(part.shape[0]) for c in range(part.shape[1])]


def _band(whole: np.ndarray, part: np.ndarray) -> tuple[dict[str, int], dict[str, int]]:
    """Where `part` begins in `whole`, and the rows of its copy: the planes (n, c), of each of which it takes a band."""
    y, x = divmod(_address(part) - _address(whole), whole.strides[1])
    height = part.shape[0] * part.shape[1]
    return {"x": x, "y": y}, {"width": part.nbytes // height, "height": height}
