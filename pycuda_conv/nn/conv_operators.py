"""The convolutions as operators of ``torch.ops.pycuda_conv``, for compilers, modes and transforms.

One operator computes, ``convolve``: its options are one list of ints. The four that torch differentiates are functions of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from pycuda_conv import borders
from pycuda_conv.arguments import ALGORITHMS, PRECISIONS
from pycuda_conv.arrays import torch_internals
from pycuda_conv.arrays.tensors import TORCH
from pycuda_conv.engines.geometry import bits, from_bits
from pycuda_conv.nn import operators
from pycuda_conv.nn.autograd import (
    CONV,
    CONV_WEIGHT,
    OPERATORS,
    Operator,
    Settings,
    _differentiated,
    _fake,
    _from_flat,
    _layout,
    _Transformed,
    _vmap,
    lying_as,
)
from pycuda_conv.problem import channels_last

#: Of an operator's list of options.
_ALGORITHMS = (None, *ALGORITHMS)
_SCHEMA = (
    "(Tensor {}, Tensor {}, Tensor? bias, SymInt[] {}, SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups, "
    "str precision, str? device, bool tune, str? algorithm=None, str padding_mode='', float padding_value=0.) -> Tensor"
)


def _spec(operator: Operator, settings: Settings) -> list[int]:
    """An operator and its settings in numbers as one list of ints.

    They are: number of the operator, of the precision and of the algorithm, device (-2: the tensors', -1: OpenCL, else the number of a
    GPU), tune, groups, the bits of the value that fills; then for each axis stride, padding before, padding after, dilation, and the
    numbers of the modes before and after.
    """
    device = settings.device
    place = -2 if device is None else -1 if device == "opencl" else int(device.rpartition(":")[2])
    how = PRECISIONS.index(settings.precision), _ALGORITHMS.index(settings.algorithm)
    spec = [OPERATORS.index(operator), *how, place, int(settings.tune), settings.groups, bits(settings.padding_value, 8)]
    modes = borders.mode_pairs(settings.padding_mode, settings.ndim)
    for step, pair, spread, words in zip(settings.stride, settings.padding, settings.dilation, modes, strict=True):
        spec += step, *pair, spread, *map(borders.MODES.index, words)
    return spec


@lru_cache(maxsize=4096)
def _from_spec(spec: tuple[int, ...]) -> tuple[Operator, Settings]:
    """The operator and its settings from the list of :func:`_spec`."""
    number, precision, algorithm, place, tune, groups, value, *axes = spec
    stride, before, after, dilation, *modes = (tuple(axes[i::6]) for i in range(6))
    device = None if place == -2 else "opencl" if place == -1 else f"cuda:{place}"
    padding = tuple(zip(before, after, strict=True))
    words = tuple((borders.MODES[first], borders.MODES[last]) for first, last in zip(*modes, strict=True))
    mode = "zeros" if {word for pair in words for word in pair} == {"zeros"} else words
    how = PRECISIONS[precision], device, bool(tune), _ALGORITHMS[algorithm], mode, from_bits(value, 8)
    return OPERATORS[number], Settings(len(stride), stride, padding, dilation, groups, *how)


def _convolve(first: Any, second: Any, bias: Any, size: Sequence[int], spec: Sequence[int]) -> Any:
    operator, settings = _from_spec(tuple(spec))
    made = operator.compute(settings, first, second, bias, size)
    if operator is CONV_WEIGHT and _layout(first, settings.ndim) == "NHWC":  # some kernels write this gradient in C order nevertheless
        made = TORCH.as_kernel_input(made, channels_last(made.dim(), settings.ndim))
    return made


def _fake_convolve(first: Any, second: Any, bias: Any, size: Any, spec: Sequence[int]) -> Any:
    operator, settings = _from_spec(tuple(spec))
    return _fake(operator, settings, first, second, bias, size)


def _vmap_convolve(info: Any, in_dims: Any, first: Any, second: Any, bias: Any, size: Any, spec: Sequence[int]) -> Any:
    return _vmap(info.batch_size, in_dims, *_from_spec(tuple(spec)), first, second, bias, size)


class _OfOperators(_Transformed):
    """:class:`_Function` whose result an operator computes, for compilers and modes."""

    @staticmethod
    def forward(first: Any, second: Any, bias: Any, operator: Operator, settings: Settings, size: Any) -> Any:  # type: ignore[override]
        return torch.ops.pycuda_conv.convolve.default(first, second, bias, size, _spec(operator, settings))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _Transformed.setup_context(ctx, inputs, output)
        ndim = inputs[4].ndim
        ctx.order = channels_last(ndim + 2, ndim) if output.dim() == ndim + 2 and _layout(output, ndim) == "NHWC" else None

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _Transformed.backward(ctx, None if grad is None else lying_as(grad, ctx.order))


def _named(operator: Operator) -> Callable[..., Any]:
    """The operator that torch differentiates."""

    def of_operators(first: Any, second: Any, bias: Any, size: Any, *flat: Any) -> Any:
        settings = _from_flat(*flat)
        if _differentiated(first, second, bias, None, None) or torch_internals.transforms_are_active():
            return _OfOperators.apply(first, second, bias, operator, settings, size)
        return _OfOperators.forward(first, second, bias, operator, settings, size)

    return of_operators


operators.define("convolve(Tensor first, Tensor second, Tensor? bias, SymInt[] size, int[] spec) -> Tensor", _convolve, _fake_convolve)
operators.define_vmap("convolve", _vmap_convolve)
for _operator in OPERATORS:
    operators.define_by_others(_operator.name + _SCHEMA.format(*_operator.words), _named(_operator))


# ---- FlopCounterMode


def flops(result: Sequence[int], weight: Sequence[int]) -> int:
    """Operations of a convolution with these shapes of result and filter, and of each of its gradients, as torch counts them."""
    return 2 * math.prod(result) * math.prod(weight[1:])


def count_flops(operator: Any, formula: Callable[..., int]) -> None:
    """Let torch's counters count `operator` by a formula of shapes; counters that already exist count it too."""
    register_flop_formula(operator)(formula)
    for mode in torch_internals.modes():
        counter = getattr(mode, "counter", mode)
        if isinstance(counter, FlopCounterMode):
            counter.flop_registry[operator] = flop_registry[operator]


def _flops(operator: Operator, first: Any, second: Any, bias: Any, size: Any, *flat: Any, out_shape: Any) -> int:
    return flops(*{CONV: (out_shape, second), CONV_WEIGHT: (second, out_shape)}.get(operator, (first, second)))


def _flops_of_spec(first: Any, second: Any, bias: Any, size: Any, spec: Sequence[int], out_shape: Any) -> int:
    return _flops(_from_spec(tuple(spec))[0], first, second, bias, size, out_shape=out_shape)


count_flops(torch.ops.pycuda_conv.convolve, _flops_of_spec)
for _operator in OPERATORS:
    count_flops(getattr(torch.ops.pycuda_conv, _operator.name), partial(_flops, _operator))
