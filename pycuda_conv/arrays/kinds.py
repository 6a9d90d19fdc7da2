"""The kind of an object's array, and whether the arrays of a call go together."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from pycuda_conv import repeat
from pycuda_conv.arrays.base import ArrayKind, Signature
from pycuda_conv.arrays.device import CupyKind, GPUArrayKind, InterfaceKind
from pycuda_conv.arrays.dlpack import dlpack_kind, speaks_dlpack
from pycuda_conv.arrays.host import NumpyKind
from pycuda_conv.call import Operands
from pycuda_conv.elements import DTYPE_BYTES, INTEGER_BYTES, arithmetic, check_taken
from pycuda_conv.errors import ConvArgumentError
from pycuda_conv.runtime import contexts


class StandInKind(ArrayKind):
    """Objects that stand for tensors while a function is traced, such as ``torch.fx.Proxy``; torch's protocol for them takes the call."""

    name = "stand-in for a torch.Tensor"

    def check_not_recorded(self, operands: Operands) -> None:
        raise TypeError("a plan takes arrays, and torch.fx gives it stand-ins for them: trace a function as pycuda_conv.conv2d instead")


class LazyKind(ArrayKind):
    """dask arrays: a call makes a graph, whose tasks call the function with the chunks."""

    name = "dask.array.Array"

    def dtype_name(self, dtype: np.dtype) -> str:
        return dtype.name

    def check_not_recorded(self, operands: Operands) -> None:
        raise TypeError("a plan takes arrays in memory, and a dask array is computed later: call a function such as pycuda_conv.conv2d")


# ---- which kind an object is


STAND_IN, LAZY = StandInKind(), LazyKind()
NUMPY, CUPY, GPU_ARRAY, INTERFACE = NumpyKind(), CupyKind(), GPUArrayKind(), InterfaceKind()
_kinds: dict[type, ArrayKind] = {}


def kind_of(name: str, array: Any) -> ArrayKind:
    """The kind of `array`, the argument called `name`; a ``TypeError`` for anything that is no array of ours."""
    kind = _kinds.get(type(array))
    if kind is None:
        kind = _found(array)
        if kind is None:
            if isinstance(array, np.ma.MaskedArray):
                raise TypeError(f"{name} is a masked array, and a convolution has no masks: pass {name}.filled(value), or {name}.data")
            if _is_tracer(array):
                raise TypeError(
                    f"{name} is a tracer, which stands for an array while jax transforms a function and has no values yet: call outside "
                    "of jax.jit, jax.grad and jax.vmap, or through jax.pure_callback"
                )
            known = isinstance(array, (list, tuple)) or any(hasattr(array, name) for name in ("__array__", "__array_interface__"))
            raise TypeError(
                f"{name} must be a numpy.ndarray, a torch.Tensor, a cupy.ndarray, a pycuda.gpuarray.GPUArray or an object with __dlpack__ "
                f"or __cuda_array_interface__, but got {type(array).__module__}.{type(array).__qualname__}"
                + (f"; numpy.asarray({name}, 'float32') makes an array of it" if known else "")
            )
        _kinds[type(array)] = kind
    return kind


def _found(array: Any) -> ArrayKind | None:
    if isinstance(array, np.ndarray):
        return None if isinstance(array, np.ma.MaskedArray) else NUMPY
    if _is_tracer(array):
        return None
    if _is_lazy(array):
        return LAZY
    # a library that was never imported made none of the arguments
    cupy, gpuarray = (sys.modules.get(module) for module in ("cupy", "pycuda.gpuarray"))
    if is_torchs(array) and _is_tensor(array):
        from pycuda_conv.arrays.tensors import TORCH

        return TORCH
    if cupy is not None and isinstance(array, cupy.ndarray):
        return CUPY
    if gpuarray is not None and isinstance(array, gpuarray.GPUArray):
        repeat.learn_arrays(gpuarray.GPUArray)
        return GPU_ARRAY
    if speaks_dlpack(array):
        return dlpack_kind(array)
    return INTERFACE if hasattr(array, "__cuda_array_interface__") else None


def is_torchs(array: Any) -> bool:
    """Whether `array` is a tensor of torch's or stands for one; if so, torch is imported."""
    return hasattr(type(array), "__torch_function__")


def _is_tensor(array: Any) -> bool:
    import torch

    return isinstance(array, torch.Tensor)


def _is_tracer(array: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.core.Tracer)


def _is_lazy(array: Any) -> bool:
    dask = sys.modules.get("dask.array")
    return dask is not None and isinstance(array, dask.Array)


def same_kind(operands: Operands, out: Any = None, names: tuple[str, str] = ("input", "weight")) -> ArrayKind:
    """The kind of all the arrays of a call, the first two called `names`; mixing kinds is a ``TypeError``.

    It is :data:`STAND_IN` if any of them only stands for a tensor, and :data:`LAZY` if any is a dask array.
    """
    input, weight, bias, scale, residual = operands
    # torch.compile traces the code below and can't write to our table of types; it runs an import as it is
    if is_torchs(input):
        import torch

        if torch.compiler.is_dynamo_compiling() and isinstance(input, torch.Tensor) and isinstance(weight, torch.Tensor):
            from pycuda_conv.arrays.tensors import TORCH

            return TORCH
    known = _kinds.get
    seen = known(type(input))
    if (
        seen is not None
        and known(type(weight)) is seen
        and (bias is None or known(type(bias)) is seen)
        and (out is None or known(type(out)) is seen)
        and (scale is None or known(type(scale)) is seen)
        and (residual is None or known(type(residual)) is seen)
    ):
        return seen
    if any(is_torchs(a) and not _is_tensor(a) for a in (*operands, out)):
        return STAND_IN
    first, second = names
    if any(map(_is_lazy, (*operands, out))):
        for name, array in ((second, weight), ("bias", bias), ("scale", scale), ("residual", residual)):
            if array is not None or name == second:
                kind_of(name, array)
        return LAZY
    kind = kind_of(first, input)
    for name, array in ((second, weight), ("bias", bias), ("scale", scale), ("residual", residual), ("out", out)):
        if array is not None or name == second:
            other = kind_of(name, array)
            if other is not kind:
                raise TypeError(f"{first} is a {kind.name} but {name} is a {other.name}; pass arrays of one kind")
    return kind


def check_same_type(
    kind: ArrayKind, input: Signature, *others: Signature | None, names: Sequence[str] = Operands._fields
) -> None:
    """Refuse dtypes that no kernel has, and dtypes or devices of other operands that differ from the input's.

    The input may be of integers: then the others are of the type in which it is convolved. `names` are what the operands are called.
    """
    first, own = names[0], kind.dtype_name(input[1])
    for name, given in zip(names, (input, *others), strict=False):
        if given is not None:
            check_taken(name, kind.dtype_name(given[1]), kind.conversion)
    if own in INTEGER_BYTES:
        given_types = [None if one is None else kind.dtype_name(one[1]) for one in others]
        own = next((dtype for dtype in given_types if dtype in DTYPE_BYTES), arithmetic((own,)))
    for name, other in zip(names[1:], others, strict=False):
        if other is None or (kind.dtype_name(other[1]) == own and other[2] == input[2]):
            continue
        where = ""
        if other[2] != input[2] and not any(place in (None, -1) for place in (input[2], other[2])):
            ours, theirs = contexts.ordinal_of(input[2]), contexts.ordinal_of(other[2])
            if ours == theirs:
                raise ConvArgumentError(
                    f"{first} and {name} lie in different CUDA contexts of cuda:{ours}, and a kernel reaches the memory of one: make both "
                    f"in the same (that of {first} is {contexts.context_name(input[2])}, that of {name} {contexts.context_name(other[2])})"
                )
            where = f" on cuda:{ours} and cuda:{theirs}"
        raise ConvArgumentError(
            f"{first.capitalize()} type ({kind.type_name(input)}) and {name} type ({kind.type_name(other)}) should be the same{where}"
        )
