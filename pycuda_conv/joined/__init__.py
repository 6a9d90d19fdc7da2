"""Convolutions of several arrays as if their channels were joined: ``conv2d((a, b), weight)``.

Two channels-last tensors of 16 bits, or of float32 with ``precision="tf32"``, on a GPU of compute capability 9.0 are read where they lie
(:mod:`pycuda_conv.engines.hopper.segments`), if that takes less time than to join them. Other arrays are joined by their library.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from pycuda_conv import engines, execute
from pycuda_conv.arrays import STAND_IN, same_kind
from pycuda_conv.call import Call, Operands
from pycuda_conv.engines.hopper import segments
from pycuda_conv.engines.schedule import BIAS, INPUT, RESIDUAL, RESULT, SCALE, WEIGHT
from pycuda_conv.errors import ConvArgumentError, brief
from pycuda_conv.problem import ConvProblem, channels_last
from pycuda_conv.runtime.base import KernelLaunch

#: The buffers of the launch, in the order in which it gets them.
_ORDER = INPUT, WEIGHT, BIAS, SCALE, RESIDUAL, segments.SECOND, RESULT
#: Microseconds of a launch, and bytes that 132 multiprocessors move in one.
_BEGIN, _MEMORY = 2.0, 2.6e6


class _Made(NamedTuple):
    launcher: Any
    shape: tuple[int, ...]


def joined(call: Call, arrays: Sequence[Any]) -> Any:
    """The arrays as one, by their own library; what does not fit together is refused."""
    check(call, arrays)
    if len(arrays) == 1:
        return arrays[0]
    axis = len(arrays[0].shape) - call.ndim - 1
    root = type(arrays[0]).__module__.partition(".")[0]
    for cls in type(arrays[0]).__mro__:
        base = cls.__module__.partition(".")[0]
        if base in ("numpy", "torch", "cupy", "pycuda", "dask"):
            library = sys.modules[{"pycuda": "pycuda.gpuarray", "dask": "dask.array"}.get(base, base)]
            made = library.cat(tuple(arrays), axis) if hasattr(library, "cat") else library.concatenate(tuple(arrays), axis)
            return made.rechunk({axis: -1}) if base == "dask" else made
    raise TypeError(f"several inputs are for arrays of numpy, torch, CuPy, PyCUDA and dask, but got those of {root}")


def check(call: Call, arrays: Sequence[Any]) -> None:
    """Refuse arrays that can't be joined along their channels."""
    if not arrays:
        raise ConvArgumentError("expected input to be an array or a tuple of arrays, but got an empty one")
    for one in arrays:
        if not hasattr(one, "shape") or not hasattr(one, "dtype"):
            raise TypeError(f"expected input to be an array or a tuple of arrays, but got {brief(one)} of type {type(one).__name__} in it")
    first, axis = arrays[0], len(arrays[0].shape) - call.ndim - 1
    if axis not in (0, 1):
        raise ConvArgumentError(f"arrays that are joined have an axis for channels, but got one of size {list(first.shape)}")
    for one in arrays[1:]:
        sizes = list(one.shape)
        others = [[n for i, n in enumerate(shape) if i != axis] for shape in (sizes, first.shape)]
        if len(sizes) != len(first.shape) or others[0] != others[1]:
            raise ConvArgumentError(f"arrays that are joined differ in their channels alone, but got sizes {list(first.shape)} and {sizes}")
        if one.dtype != first.dtype:
            raise ConvArgumentError(f"arrays that are joined have one dtype, but got {first.dtype} and {one.dtype}")


def in_place(call: Call, operands: Operands) -> Any:
    """The convolution of two arrays where they lie; None where they have to be joined. The options are hashable."""
    (a, b), weight, bias, scale, residual = operands
    kind = same_kind(Operands(a, weight, bias, scale, residual))
    if kind is STAND_IN or kind.name != "torch.Tensor" or call.function != "conv" or len(a.shape) != call.ndim + 2:
        return None
    given = Operands(a, weight, bias, scale, residual)
    if not (kind.on_gpu(a) and kind.on_gpu(b)) or kind.must_be_recorded(given, True) or kind.must_be_recorded(Operands(b, weight), True):
        return None
    if not kind.layout(a, call.ndim) == kind.layout(b, call.ndim) == "NHWC":
        return None
    device = kind.device(kind.signature(a), None)
    dtypes = {kind.dtype_name(one.dtype) for one in (a, b, *given[1:]) if one is not None}
    if len(dtypes) != 1 or {one.device for one in (b, *given[1:]) if one is not None} != {a.device}:
        return None
    shapes = tuple(None if one is None else tuple(one.shape) for one in given)
    made = _made(call, shapes, int(b.shape[1]), dtypes.pop(), device)
    if made is None:
        return None
    order = channels_last(call.ndim + 2, call.ndim)
    with device:
        arrays = [kind.as_kernel_input(one, order) for one in (a, weight)]
        arrays += [None if one is None else kind.as_kernel_input(one, None) for one in (bias, scale)]
        arrays += [None if residual is None else kind.as_kernel_input(residual, order), kind.as_kernel_input(b, order)]
        result = kind.empty(made.shape, a, device, order)
    execute.launch(kind, device, made.launcher, [one if one is None else one.detach() for one in arrays], (result,), 0)
    return result


@lru_cache(maxsize=1024)
def _made(call: Call, shapes: tuple[Any, ...], more: int, dtype: str, device: Any) -> _Made | None:
    """The launch for two arrays, of which the first has the first of the `shapes` and the second `more` channels; None if joining pays."""
    x, w, *others = shapes
    whole = replace(call.problem(((x[0], x[1] + more, *x[2:]), w, *others), dtype), layout="NHWC")
    if whole.groups != 1 or whole.algorithm is not None or 0 in whole.result_shape:
        return None
    first, second = replace(whole, C=x[1]), replace(whole, C=more, has_bias=False, has_scale=False, has_residual=False, activation=None)
    if segments.why_not(first, second, device) is not None:
        return None
    us, tile = segments.choose(first, second, device)
    convolved = engines.predicted(whole, engines.choose(whole, device), device)
    if convolved is not None and us >= convolved + joining_time(whole, device):
        return None
    launch = in_order(segments.launch(first, second, tile, device, True), _ORDER)
    return _Made(device.schedule_launcher([[launch]]), whole.result_shape)


def joining_time(whole: ConvProblem, device: Any) -> float:
    """Microseconds that it takes to join arrays to the input of a problem."""
    return _BEGIN + 2 * whole.itemsize * math.prod(whole.input_shape) / _MEMORY * 132 / device.multiprocessors


def in_order(launch: KernelLaunch, order: Sequence[int]) -> KernelLaunch:
    """The launch, which takes any layer, with its buffers in this order."""
    at = {int(buffer): i for i, buffer in enumerate(order)}
    buffers = tuple(at[int(one)] for one in launch.buffers if isinstance(one, int))
    return replace(launch, buffers=buffers, maps=tuple(replace(one, buffer=at[int(one.buffer)]) for one in launch.maps), layer={})
