"""The options of a layer in evaluation, as operators take them: a flat list of ints."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from pycuda_conv import borders
from pycuda_conv.arguments import ACTIVATIONS, ALGORITHMS, PRECISIONS, activation_and_slope, checked_activation, integers
from pycuda_conv.engines.geometry import bits, from_bits
from pycuda_conv.invariance import with_invariance
from pycuda_conv.nn.autograd import CONV, CONV_TRANSPOSE, Settings, _empty_like, _in_numbers

#: Kinds of layers besides a convolution with zeros around it, which is 0.
_TRANSPOSED, _BORDERED = 1, 2
_ALGORITHMS = (None, *ALGORITHMS)


def how_number(algorithm: str | None, precision: str) -> int:
    """One number for both."""
    return len(PRECISIONS) * _ALGORITHMS.index(algorithm) + PRECISIONS.index(precision)


def how_of(number: int) -> tuple[str | None, str]:
    """The algorithm and the precision that a number of :func:`how_number` stands for."""
    algorithm, precision = divmod(number, len(PRECISIONS))
    return _ALGORITHMS[algorithm], PRECISIONS[precision]


class _Options(NamedTuple):
    """The options of a layer, in numbers."""

    transposed: bool
    #: precision, device and tune are those of any call
    settings: Settings
    output_padding: tuple[int, ...]
    activation: str | tuple[str, float] | None

    @classmethod
    @lru_cache(maxsize=4096)
    def of(cls, spec: tuple[int, ...]) -> _Options:
        """The options from the list of :func:`spec_of`."""
        kind, number, slope, how, groups, *axes = spec
        algorithm, precision = how_of(how)
        word = ACTIVATIONS[number]
        activation = checked_activation((word, from_bits(slope, 8)) if word == "leaky_relu" else word)
        value, width = (from_bits(axes.pop(0), 8), 7) if kind == _BORDERED else (0.0, 5)
        stride, before, after, dilation, more, *modes = (tuple(axes[i::width]) for i in range(width))
        padding = tuple(zip(before, after, strict=True))
        words: Any = tuple((borders.MODES[m], borders.MODES[n]) for m, n in zip(*modes, strict=True)) if modes else "zeros"
        settings = Settings(len(stride), stride, padding, dilation, groups, precision, None, False, algorithm, words, value)
        return cls(kind == _TRANSPOSED, settings, more, activation)


def spec_of(
    ndim: int, filter_size: Sequence[int], *, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
    precision: str = "fp32", activation: Any = None, transposed: bool = False, output_padding: Any = 0, padding_mode: Any = "zeros",
    padding_value: float = 0.0, algorithm: str | None = None,
) -> list[int]:
    """The options of a layer as a flat list of ints, which ``torch.ops.pycuda_conv.evaluate`` takes: arguments cost a dispatcher time.

    They are: the kind, number and slope of the activation, number of the algorithm and the precision, groups; then for each axis stride,
    padding before, padding after, dilation, output padding. A convolution whose padding is not of zeros is a kind of its own: the
    padding's value stands in front of the axes, and each axis ends with the numbers of its modes before and after. Slope and value are
    the bits of float64s.
    """
    settings = _in_numbers(Settings(ndim, stride, padding, dilation, groups, precision, None, False), filter_size)
    number, slope = activation_and_slope(checked_activation(activation))
    bordered = padding_mode != "zeros" or padding_value != 0
    spec = [_BORDERED if bordered else int(transposed), number, bits(slope, 8), how_number(algorithm, precision), groups]
    spec += [bits(borders.fill_value(padding_value), 8)] if bordered else []
    axes = settings.stride, settings.padding, settings.dilation, integers("output_padding", output_padding, ndim)
    for step, pair, spread, extra, modes in zip(*axes, borders.mode_pairs(padding_mode, ndim), strict=True):
        spec += step, *pair, spread, extra, *(map(borders.MODES.index, modes) if bordered else ())
    return spec


@lru_cache(maxsize=4096)
def asked_of(spec: tuple[int, ...], eps: float) -> tuple[Any, ...]:
    """The options as ``nn.evaluation._evaluate`` takes them."""
    options = _Options.of(spec)
    function = "conv_transpose" if options.transposed else "conv"
    return asked_for(options.settings, options.activation, eps, function, options.output_padding)


def asked_for(settings: Settings, activation: Any, eps: float, function: str = "conv", size: Any = 0) -> tuple[Any, ...]:
    """Settings, an activation and a norm's eps as ``nn.evaluation._evaluate`` takes them."""
    _, stride, padding, dilation, groups, precision, _, _, algorithm, mode, value = settings
    border = None if mode == "zeros" and not value else (borders.hashable(mode), float(value))
    return function, stride, padding, dilation, groups, precision, size, activation, border, algorithm, eps


def invariant(asked: tuple[Any, ...]) -> tuple[Any, ...]:
    """The options of a call inside a block of :func:`pycuda_conv.batch_invariant`, or beside one of another thread."""
    return *asked[:-2], with_invariance(asked[-2], False), asked[-1]


def fake_result(
    x: Tensor, weight: Tensor, bias: Any, gamma: Any, beta: Any, mean: Any, var: Any, residual: Any, eps: float, spec: Any
) -> Any:
    """A result of the shape and order that the layer of these operands has, for tracers."""
    options = _Options.of(tuple(spec))
    operator = CONV_TRANSPOSE if options.transposed else CONV
    return _empty_like(x, operator.shape(options.settings, x.shape, weight.shape, options.output_padding), options.settings.ndim)
