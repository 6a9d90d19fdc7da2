"""A call of a convolution as values: its operands, its options, and the place where it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pycuda_conv import borders
from pycuda_conv.arguments import (
    PRECISIONS,
    checked_activation,
    checked_algorithm,
    checked_shape,
    checked_upsample,
    checked_upsample_filter,
    integer,
)
from pycuda_conv.elements import INTEGER_BYTES, arithmetic, check_taken, dtype_name
from pycuda_conv.errors import brief
from pycuda_conv.problem import ConvProblem


class Operands(NamedTuple):
    """The arrays that a convolution reads. A gradient reads two, which stand in the places of `input` and `weight`."""

    input: Any
    weight: Any
    bias: Any = None
    scale: Any = None
    residual: Any = None


#: The two arrays that a gradient is computed from.
GRADIENT_OPERANDS = {"input": ("grad_output", "weight"), "weight": ("input", "grad_output")}


class Call(NamedTuple):
    """The options of a call that say what is to be computed."""

    #: "conv", "conv_transpose", or what a gradient is by: "input" or "weight"
    function: str
    ndim: int
    stride: Any
    padding: Any
    dilation: Any
    groups: Any
    precision: Any
    #: of a transposed convolution the output padding, of a gradient the shape of what it is by
    size: Any = 0
    activation: Any = None
    algorithm: Any = None
    padding_mode: Any = "zeros"
    padding_value: Any = 0.0
    #: the type of the result; by default that of the arithmetic
    dtype: Any = None
    #: how many times each pixel stands along each axis, and what is done with the filter for it; None where once
    upsample: Any = None

    @property
    def name(self) -> str:
        """The name of the public function."""
        if self.function in GRADIENT_OPERANDS:
            return f"conv{self.ndim}d_{self.function}"
        return f"{self.function}{self.ndim}d"

    @property
    def operand_names(self) -> tuple[str, str]:
        """The names of the first two operands in messages."""
        return GRADIENT_OPERANDS.get(self.function, ("input", "weight"))

    def of_one_type(
        self, operands: Operands, dtypes: Sequence[str | None], convert: Callable[[Any, str], Any], conversion: str
    ) -> Operands:
        """The operands, whose types these are; if any holds integers, all but the first in the type of the arithmetic.

        Parameters
        ----------
        convert : callable
            Gives an array in another type.
        conversion : str
            As for :func:`pycuda_conv.elements.check_taken`.

        Raises
        ------
        TypeError
            An operand is of a type that no kernel has.
        """
        if not any(dtype in INTEGER_BYTES for dtype in dtypes):
            return operands
        for name, dtype in zip((*self.operand_names, *Operands._fields[2:]), dtypes, strict=True):
            if dtype is not None:
                check_taken(name, dtype, conversion)
        own, converts = arithmetic(dtypes, self.dtype), dtypes[0] in INTEGER_BYTES
        found = [operands[0]]
        for one, dtype in zip(operands[1:], dtypes[1:], strict=True):  # beside integers any other type is converted, else integers alone
            stays = one is None or dtype == own or not (converts or dtype in INTEGER_BYTES)
            found.append(one if stays else convert(one, own))
        return Operands(*found)

    def hashable(self) -> Call:
        """The call with each option in the one hashable form of its value.

        Raises
        ------
        TypeError
            An option is of a wrong type.
        """
        function, ndim, stride, padding, dilation, groups, precision, size, activation, algorithm, mode, value, dtype, upsample = self
        if function in GRADIENT_OPERANDS and not isinstance(size, (list, tuple)):
            raise TypeError(f"{function}_size must be the shape of the convolution's {function}, got {brief(size)}")
        if not isinstance(precision, str):  # torch.compile follows this, and not always a comparison of classes
            raise TypeError(f"precision must be one of {PRECISIONS}, got {brief(precision)}")
        activation, algorithm = checked_activation(activation), checked_algorithm(algorithm)
        if stride.__class__ is not int:
            stride = _key("stride", stride)
        if padding.__class__ is not int:
            padding = _key("padding", padding)
        if dilation.__class__ is not int:
            dilation = _key("dilation", dilation)
        if groups.__class__ is not int:
            groups = integer("groups", groups)
        if size.__class__ is not int:
            size = _key("output_padding" if function == "conv_transpose" else f"each size in {function}_size", size)
        mode, value = borders.hashable(mode), value if value.__class__ is float else borders.fill_value(value)
        if upsample is not None:
            times, word = upsample
            upsample = checked_upsample(times, ndim), checked_upsample_filter(word)
        return Call(
            function, ndim, stride, padding, dilation, groups, precision, size, activation, algorithm, mode, value, dtype_name(dtype),
            upsample,
        )

    def problem(self, shapes: Sequence[Any], dtype: str, **more: Any) -> ConvProblem:
        """The problem for operands of these shapes, which it checks; a shape is None where the operand is missing."""
        function, ndim, stride, padding, dilation, groups, precision, size, activation, algorithm, mode, value, _, upsample = self
        first, second, bias, scale, residual = shapes
        options = {
            "stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "precision": precision, "dtype": dtype,
            "algorithm": algorithm, "padding_mode": mode, "padding_value": value, **more,
        }
        if function in GRADIENT_OPERANDS:
            size = checked_shape(f"{function}_size", size)
        if function == "input":
            return ConvProblem.gradient("input", ndim, size, second, first, residual_shape=residual, **options)
        if function == "weight":
            return ConvProblem.gradient("weight", ndim, first, size, second, **options)
        options |= {"scale_shape": scale, "residual_shape": residual, "activation": activation}
        if function == "conv_transpose":
            return ConvProblem.transposed(ndim, first, second, bias, **options, output_padding=size)
        if upsample is not None:
            options |= {"upsample": upsample[0], "upsample_filter": upsample[1]}
        return ConvProblem.forward(ndim, first, second, bias, **options)


def _key(name: str, value: Any) -> Any:
    """An argument made of integers in the one hashable form of its value: an int, a word, or a tuple of those."""
    if isinstance(value, (list, tuple)):
        for v in value:  # mostly ints, which take no time in such a loop
            if v.__class__ is not int:
                return tuple([_key(name, v) for v in value])
        return tuple(value)
    return value if isinstance(value, str) else integer(name, value)


class Place(NamedTuple):
    """The options of a call that say where it is to run."""

    device: Any = None
    devices: Any = None
    stream: Any = None
    tune: Any = False
