"""Transforms on a GPU, by CuPy or torch."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from functools import cache
from typing import Any

import numpy as np

from pycuda_conv.runtime.transforms import AT_ONCE_ON_GPU, BlockTransforms, Transforms, groups_of_blocks, index


@cache
def gpu_library() -> str:
    """The library that transforms on a GPU: torch's or CuPy's, the one that is in use or else one that is installed; "" for none."""
    names = ("torch", "cupy")
    for name in (*(one for one in names if one in sys.modules), *names):
        if name in sys.modules or importlib.util.find_spec(name):
            try:
                module = importlib.import_module(name)
                there = module.cuda.is_available()
            except Exception:  # installed, but broken
                continue
            if there:
                return name
    return ""


class _Memory:
    """Memory of a GPU as other libraries take it."""

    def __init__(self, address: int, shape: tuple[int, ...], kind: str) -> None:
        self.__cuda_array_interface__ = {"shape": shape, "typestr": kind, "data": (address, False), "version": 3}


class _Torch:
    """Tensors of torch on one device."""

    def __init__(self, device: Any, single: bool) -> None:
        self.torch, self.device = importlib.import_module("torch"), device
        self.real_type = self.torch.float32 if single else self.torch.float64

    def permute(self, array: Any, axes: Any) -> Any:
        return array.permute(tuple(axes))

    def flip(self, array: Any, axes: Any) -> Any:
        return array.flip(tuple(axes))

    def conj_in_place(self, array: Any) -> None:
        array.imag.neg_()

    def zeros(self, shape: tuple[int, ...]) -> Any:
        return self.torch.zeros(shape, dtype=self.real_type, device=self.device)

    def windows(self, array: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        return array.as_strided(shape, strides)

    def sum_squares(self, array: Any, axes: int) -> Any:
        return self.torch.linalg.vector_norm(array, dim=(1, *range(-axes, 0)), dtype=self.torch.float64).square()

    def forward(self, numbers: Any, length: tuple[int, ...]) -> Any:
        return self.torch.fft.rfftn(numbers, length, tuple(range(-len(length), 0)))

    def back(self, spectrum: Any, length: tuple[int, ...], taken: tuple[slice, ...]) -> Any:
        return self.torch.fft.irfftn(spectrum, length, tuple(range(-len(length), 0)))[index(..., *taken)]

    def at(self, address: int, shape: tuple[int, ...], storage: str) -> Any:
        """The array at an address."""
        kind = {"int16": "<i2", "float16": "<f2", "float32": "<f4", "float64": "<f8"}[storage]
        found = self.torch.as_tensor(_Memory(address, shape, kind), device=self.device)
        return found.view(self.torch.bfloat16) if storage == "int16" else found

    def on(self, stream: int) -> Any:
        """A block in which work goes to a stream."""
        cuda = self.torch.cuda
        return cuda.stream(cuda.ExternalStream(stream, device=self.device) if stream else cuda.default_stream(self.device))


class _CuPy:
    """Arrays of CuPy on the current device."""

    def __init__(self, device: Any, single: bool) -> None:
        self.cupy = importlib.import_module("cupy")
        self.real_type = np.float32 if single else np.float64

    def permute(self, array: Any, axes: Any) -> Any:
        return array.transpose(tuple(axes))

    def flip(self, array: Any, axes: Any) -> Any:
        return self.cupy.flip(array, tuple(axes))

    def conj_in_place(self, array: Any) -> None:
        self.cupy.conj(array, out=array)

    def zeros(self, shape: tuple[int, ...]) -> Any:
        return self.cupy.zeros(shape, self.real_type)

    def windows(self, array: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        return self.cupy.lib.stride_tricks.as_strided(array, shape, tuple(n * array.itemsize for n in strides))

    def sum_squares(self, array: Any, axes: int) -> Any:
        flat = array.astype(np.float64).reshape(*array.shape[:-axes], -1)
        return (flat * flat).sum(-1).sum(1)

    def forward(self, numbers: Any, length: tuple[int, ...]) -> Any:
        return self.cupy.fft.rfftn(numbers, length, tuple(range(-len(length), 0)))

    def back(self, spectrum: Any, length: tuple[int, ...], taken: tuple[slice, ...]) -> Any:
        return self.cupy.fft.irfftn(spectrum, length, tuple(range(-len(length), 0)))[index(..., *taken)]

    def at(self, address: int, shape: tuple[int, ...], storage: str) -> Any:
        memory = self.cupy.cuda.MemoryPointer(self.cupy.cuda.UnownedMemory(address, 0, None), 0)
        found = self.cupy.ndarray(shape, np.uint16 if storage == "int16" else np.dtype(storage), memory)
        return (found.astype(np.uint32) << 16).view(np.float32) if storage == "int16" else found

    def on(self, stream: int) -> Any:
        return self.cupy.cuda.ExternalStream(stream)


def fill_on_gpu(args: Transforms, name: str, ordinal: int, addresses: tuple[int, int, int, int], stream: int) -> None:
    """Make the sums and their limits on the GPU `ordinal`, on a stream, by the library `name`; x, w, sums and limits lie at `addresses`."""
    library = _Torch(f"cuda:{ordinal}", args.single) if name == "torch" else _CuPy(ordinal, args.single)
    with library.on(stream):
        x_at, w_at, sums_at, limits_at = addresses
        x = library.at(x_at, (math.prod(args.x_memory + args.size),), args.storage)
        w = library.at(w_at, (math.prod(args.w_memory + args.taps),), args.storage)
        fill_by(args, library, x, w, library.at(sums_at, args.sums_shape, "float64"), library.at(limits_at, args.limits_shape, "float64"))


class _OnGpu(BlockTransforms):
    """The transforms of one call on a GPU, where each pass over an array counts: a block's norm is taken to be that of the image."""

    def _norms_of(self, image: int, block: Any) -> Any:
        ndim = len(self.args.length)
        norms = self.library.sum_squares(self.x[image], ndim) ** 0.5
        return norms[index(slice(None), *(None,) * ndim)]


def fill_by(args: Transforms, library: Any, x: Any, w: Any, sums: Any, limits: Any) -> None:
    """:func:`fill` by arrays of a library, in the launches' order."""
    work, ndim = _OnGpu(args, x, w, library), len(args.length)
    for image in range(args.images):
        for where in groups_of_blocks(args, AT_ONCE_ON_GPU):
            summed, limit, _ = work.some(image, where)
            limits[index(image, ..., *where)] = limit
            # blocks side by side: (group, written, block, result, block, result)
            order = [0, 1, *(axis for i in range(ndim) for axis in (2 + i, 2 + ndim + i))]
            counts = [cut.stop - cut.start for cut in where]
            sizes = [n * h for n, h in zip(counts, args.held, strict=True)]
            joined = library.permute(summed, order).reshape(args.groups, args.written, *sizes)
            first = [cut.start * h for cut, h in zip(where, args.held, strict=True)]
            ends = [min(f + n, r) for f, n, r in zip(first, joined.shape[2:], args.results, strict=True)]
            place = (image, ..., *map(slice, first, ends))
            sums[place] = joined[index(..., *(slice(0, e - f) for f, e in zip(first, ends, strict=True)))]
