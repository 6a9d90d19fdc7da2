"""The convolutions as operators of torch: differentiated as often as asked, compiled, traced, cast by autocast, vmapped.

A convolution is linear in its input and in its filter, so its derivatives are convolutions too, and the operators here are
each other's derivatives:

==================  ============================================================
``conv``            y from x and w
``conv_transpose``  its adjoint, with an output padding to choose the result's size
``conv_input``      the gradient by x, from dy and w
``conv_weight``     the gradient by w, from x and dy
==================  ============================================================

They are called in one of two ways. Torch has to see an operator, ``torch.ops.pycuda_conv.*``, in ``torch.compile``, inside a mode or a
transform, and on tensors without numbers: :mod:`pycuda_conv.nn.conv_operators` defines them. Otherwise a ``torch.autograd.Function`` is
called, in less time. :mod:`pycuda_conv.ops` computes the results and checks everything. A repeated convolution has a Function of its own,
in :mod:`pycuda_conv.nn.repeated`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch.nn import functional as _F

from pycuda_conv import borders, dispatch
from pycuda_conv.arguments import SLOPE, integers, padding_in_numbers, padding_pairs
from pycuda_conv.arrays import torch_internals
from pycuda_conv.arrays.tensors import TORCH
from pycuda_conv.call import Call, Operands
from pycuda_conv.elements import INTEGER_BYTES, arithmetic, check_element_type, check_taken, result_type
from pycuda_conv.errors import ConvArgumentError
from pycuda_conv.nn import bias_sums, upsampling
from pycuda_conv.problem import ConvProblem, channels_last

_differentiated, _traced, _layout = TORCH.differentiated, TORCH.traced, TORCH.layout
_is_batched = torch_internals.is_batched


class Settings(NamedTuple):
    """The options of a convolution, in the forms that :func:`pycuda_conv.conv2d` takes."""

    ndim: int
    stride: Any
    padding: Any
    dilation: Any
    groups: int
    precision: str
    device: str | None
    tune: bool
    algorithm: str | None = None
    padding_mode: Any = "zeros"
    padding_value: float = 0.0

    @property
    def linear(self) -> Settings:
        """Those of the part that is linear in the input: what a constant border adds is the same for all inputs."""
        if self.padding_value == 0:
            return self
        pairs = borders.mode_pairs(self.padding_mode, self.ndim)
        modes = tuple(tuple("zeros" if mode == "constant" else mode for mode in pair) for pair in pairs)
        return self._replace(padding_mode=modes, padding_value=0.0)


def _in_numbers(settings: Settings, filter_size: Sequence[int]) -> Settings:
    """The same settings with a tuple for each axis' stride and dilation, and with pairs for its padding."""
    ndim = settings.ndim
    stride, dilation = integers("stride", settings.stride, ndim), integers("dilation", settings.dilation, ndim)
    pairs = padding_in_numbers(padding_pairs(settings.padding, ndim), stride, dilation, filter_size)
    return settings._replace(stride=stride, padding=pairs, dilation=dilation)


def _flat(settings: Settings) -> tuple[Any, ...]:
    """Settings in numbers, flattened for the schema: the padding is a list, before and after in turn, and so are the words of its modes."""
    *others, mode, value = settings[3:]
    flat = settings.stride, [n for pair in settings.padding for n in pair], *others
    if mode == "zeros" and value == 0:
        return flat
    return *flat, " ".join(word for pair in borders.mode_pairs(mode, settings.ndim) for word in pair), value


def _from_flat(
    stride: Sequence[int], padding: Sequence[int], dilation: Any, groups: int, precision: str, device: Any, tune: bool,
    algorithm: Any = None, padding_mode: str = "", padding_value: float = 0.0,
) -> Settings:
    pairs, modes = (tuple(zip(of_sides[::2], of_sides[1::2], strict=True)) for of_sides in (padding, padding_mode.split()))
    options = dilation, groups, precision, device, tune, algorithm, modes or "zeros", padding_value
    return Settings(len(stride), tuple(stride), pairs, *options)


class Operator:
    """One operator: ``f(settings, first, second, bias, size)``, linear in `first` and in `second`.

    `bias` is None and `size` empty where the operator has no such argument.
    """

    #: the ``function`` of :class:`pycuda_conv.call.Call`
    function: str
    #: in ``torch.ops.pycuda_conv``, and the words of its schema for first, second and size
    name: str
    words: tuple[str, str, str]

    def compute(self, settings: Settings, first: Any, second: Any, bias: Any, size: Any) -> Any:
        """The result, in a call that torch knows of."""
        place = settings.device, None, None, settings.tune
        return dispatch.convolve(self.asked(settings, size), (first, second, bias, None, None), None, place, True)

    def asked(self, settings: Settings, size: Any) -> tuple[Any, ...]:
        """The options, as :func:`pycuda_conv.dispatch.convolve` takes them."""
        ndim, stride, padding, dilation, groups, precision, _, _, algorithm, mode, value = settings
        asked = self.function, ndim, stride, padding, dilation, groups, precision, size, None
        if mode == "zeros" and not value:
            return asked if algorithm is None else (*asked, algorithm, "zeros", 0.0, None)
        return *asked, algorithm, mode, value, None

    def shape(self, settings: Settings, first: Sequence[int], second: Sequence[int], size: Any) -> list[int]:
        """The shape of the result. Sizes may be symbols; the settings are in numbers."""
        raise NotImplementedError

    def problem(self, ndim: int, first: Any, second: Any, bias: Any, size: Any, **settings: Any) -> ConvProblem:
        """The problem for operands of these shapes, which it checks."""
        raise NotImplementedError

    def by_first(self, settings: Settings, shape: Sequence[int], second: Any, grad: Any) -> Any:
        """The gradient by the first operand, which has this `shape`; `grad` is the gradient by the result."""
        raise NotImplementedError

    def by_second(self, settings: Settings, first: Any, shape: Sequence[int], grad: Any) -> Any:
        raise NotImplementedError


class _Conv(Operator):
    function, name, words = "conv", "conv", ("input", "weight", "size")

    def asked(self, settings: Settings, size: Any) -> tuple[Any, ...]:
        return super().asked(settings, 0)  # the empty size of the schema is none

    def shape(self, settings: Settings, first: Sequence[int], second: Sequence[int], size: Any) -> list[int]:
        ndim, strides, paddings, dilations, *_ = settings
        axes = zip(first[-ndim:], second[-ndim:], strides, paddings, dilations, strict=True)
        return [*first[: -ndim - 1], second[0], *((n + sum(p) - d * (f - 1) - 1) // s + 1 for n, f, s, p, d in axes)]

    def problem(self, ndim: int, first: Any, second: Any, bias: Any, size: Any, **settings: Any) -> ConvProblem:
        return ConvProblem.forward(ndim, first, second, bias, **settings)

    def by_first(self, settings: Settings, shape: Sequence[int], second: Any, grad: Any) -> Any:
        return call_operator(CONV_INPUT, settings, grad, second, None, shape)

    def by_second(self, settings: Settings, first: Any, shape: Sequence[int], grad: Any) -> Any:
        return call_operator(CONV_WEIGHT, settings, first, grad, None, shape)


class _ConvTranspose(Operator):
    function, name, words = "conv_transpose", "conv_transpose", ("input", "weight", "output_padding")

    def shape(self, settings: Settings, first: Sequence[int], second: Sequence[int], size: Any) -> list[int]:
        ndim, strides, paddings, dilations, groups, *_ = settings
        axes = zip(first[-ndim:], second[-ndim:], strides, paddings, dilations, size, strict=True)
        sizes = ((n - 1) * s - sum(p) + d * (f - 1) + e + 1 for n, f, s, p, d, e in axes)
        return [*first[: -ndim - 1], second[1] * groups, *sizes]

    def problem(self, ndim: int, first: Any, second: Any, bias: Any, size: Any, **settings: Any) -> ConvProblem:
        return ConvProblem.transposed(ndim, first, second, bias, output_padding=size, **settings)

    # With an output padding of at least the stride, which a dilation permits, the convolution back gives more pixels than the input has.
    # They are dropped in its gradient, and the input is padded with zeros for the filter's.

    def by_first(self, settings: Settings, shape: Sequence[int], second: Any, grad: Any) -> Any:
        dx = call_operator(CONV, settings, grad, second, None, ())
        for axis in range(-settings.ndim, 0):
            if dx.shape[axis] != shape[axis]:
                dx = dx.narrow(axis, 0, shape[axis])
        return dx

    def by_second(self, settings: Settings, first: Any, shape: Sequence[int], grad: Any) -> Any:
        ndim = settings.ndim
        wanted = CONV.shape(_in_numbers(settings, shape[2:]), grad.shape, shape, ())
        missing = [w - n for w, n in zip(wanted[-ndim:], first.shape[-ndim:], strict=True)]
        if any(missing):
            first = torch.nn.functional.pad(first, [n for after in reversed(missing) for n in (0, after)])
        return call_operator(CONV_WEIGHT, settings, grad, first, None, shape)


class _Gradient(Operator):
    """The convolution's gradient by one of its operands. `size` is the shape of that operand."""

    def asked(self, settings: Settings, size: Any) -> tuple[Any, ...]:
        return super().asked(settings, tuple(size))

    def shape(self, settings: Settings, first: Sequence[int], second: Sequence[int], size: Any) -> list[int]:
        return size


class _ConvInput(_Gradient):
    function, name, words = "input", "conv_input", ("grad_output", "weight", "input_size")

    def problem(self, ndim: int, first: Any, second: Any, bias: Any, size: Any, **settings: Any) -> ConvProblem:
        return ConvProblem.gradient(self.function, ndim, size, second, first, **settings)

    def by_first(self, settings: Settings, shape: Sequence[int], second: Any, grad: Any) -> Any:
        return call_operator(CONV, settings.linear, grad, second, None, ())

    def by_second(self, settings: Settings, first: Any, shape: Sequence[int], grad: Any) -> Any:
        return call_operator(CONV_WEIGHT, settings.linear, grad, first, None, shape)


class _ConvWeight(_Gradient):
    function, name, words = "weight", "conv_weight", ("input", "grad_output", "weight_size")

    def problem(self, ndim: int, first: Any, second: Any, bias: Any, size: Any, **settings: Any) -> ConvProblem:
        return ConvProblem.gradient(self.function, ndim, first, size, second, **settings)

    def by_first(self, settings: Settings, shape: Sequence[int], second: Any, grad: Any) -> Any:
        return call_operator(CONV_INPUT, settings, second, grad, None, shape)

    def by_second(self, settings: Settings, first: Any, shape: Sequence[int], grad: Any) -> Any:
        return call_operator(CONV, settings, first, grad, None, ())


CONV, CONV_TRANSPOSE, CONV_INPUT, CONV_WEIGHT = OPERATORS = _Conv(), _ConvTranspose(), _ConvInput(), _ConvWeight()
_BY_FUNCTION = {operator.function: operator for operator in OPERATORS}


# ---- what dispatch.py calls


def convolve(call: Call, operands: Operands, device: str | None, tune: bool) -> Any:
    """A convolution or a gradient in a call that torch knows of; the options are hashable."""
    if call.function == "conv" and operands.input.dim() == operands.weight.dim() == call.ndim:  # arrays of spatial axes alone
        x, w, bias, scale, residual = operands
        with_channels = Operands(x[None], w[None, None], bias, scale, residual if residual is None else residual[None])
        return convolve(call, with_channels, device, tune)[0]
    if call.upsample is not None:
        layout = traced_layout(operands.input, call.ndim)
        return upsampling.convolve(call, operands, layout, lambda plain, given: convolve(plain, given, device, tune))
    settings = _settings(call, device, tune)
    operator = _BY_FUNCTION[call.function]
    size = () if operator is CONV else call.size
    dtypes = [None if one is None else TORCH.dtype_name(one.dtype) for one in operands]
    operands = call.of_one_type(operands, dtypes, lambda tensor, dtype: tensor.to(getattr(torch, dtype)), TORCH.conversion)
    operands = Operands(*_cast(*operands))
    input, weight, bias, scale, residual = operands
    if call.dtype is not None and call.dtype not in INTEGER_BYTES:
        result_type(arithmetic([TORCH.dtype_name(input.dtype)], call.dtype), call.dtype)
        call = call._replace(dtype=None)
    if call.dtype is not None:  # integers have no gradients
        if _traced(*operands):
            return _rounded(convolve(call._replace(dtype=None), operands, device, tune), call.dtype)
        detached = tuple(one if one is None else one.detach() for one in operands)
        return dispatch.convolve(call, detached, None, (device, None, None, tune), True)
    if scale is None and residual is None and call.activation is None:
        return call_operator(operator, settings, input, weight, bias, size)
    if not _differentiated(*operands) and not _traced(*operands):  # but cast
        return dispatch.convolve(call, operands, None, (device, None, None, tune), True)
    # torch has to see what it differentiates: then its own operations compute the epilogue
    _check(operator, settings, *operands, size, call.activation)
    channels = (-1, *(1,) * call.ndim)
    y = call_operator(operator, settings, input, weight, None if scale is not None else bias, size)
    if scale is not None:
        y = y * scale.view(channels)
        y = y if bias is None else y + bias.view(channels)
    y = y if residual is None else y + residual
    return activated(y, call.activation)


def _settings(call: Call, device: str | None, tune: bool) -> Settings:
    return Settings(
        call.ndim, call.stride, call.padding, call.dilation, call.groups, call.precision, device, tune, call.algorithm, call.padding_mode,
        call.padding_value,
    )


def _rounded(y: Any, dtype: str) -> Any:
    """A result in the type that was asked for, by torch's own operations, which compilers see."""
    wanted = getattr(torch, result_type(TORCH.dtype_name(y.dtype), dtype))
    if y.dtype is wanted:
        return y
    least, most = (0, 1) if wanted is torch.bool else (torch.iinfo(wanted).min, torch.iinfo(wanted).max)
    whole = y.detach().round()
    beyond = whole >= float(most)
    inside = torch.where(beyond | ~(whole >= float(least)), float(least), whole).to(torch.int64)  # NaN too
    return torch.where(beyond, most, inside).to(wanted)


def _hardswish(y: Any) -> Any:
    """Hard swish. torch's own kernel for GPUs multiplies float64 by a sixth that is rounded to float32."""
    return y * (_F.relu6(y + 3) / 6) if y.dtype is torch.float64 else _F.hardswish(y)


_ACTIVATIONS: dict[str | None, Callable[..., Any]] = {
    None: lambda y: y, "relu": torch.relu, "relu6": _F.relu6, "leaky_relu": partial(_F.leaky_relu, negative_slope=SLOPE),
    "hardswish": _hardswish, "silu": _F.silu, "gelu": _F.gelu, "gelu_tanh": partial(_F.gelu, approximate="tanh"),
}  # fmt: skip


def activated(y: Any, activation: str | tuple[str, float] | None) -> Any:
    """The activation, computed by torch, which differentiates it."""
    if isinstance(activation, tuple):
        return _F.leaky_relu(y, activation[1])
    return _ACTIVATIONS[activation](y)


def _cast(*tensors: Any) -> Any:
    """Tensors of the dtype of ``torch.autocast``, if it is active, as for torch's own convolutions."""
    where = "cuda" if tensors[0].is_cuda else "cpu"
    if not torch.is_autocast_enabled(where):
        return tensors
    wanted = torch.get_autocast_dtype(where)
    return [t if t is None or t.dtype is wanted or t.dtype is torch.float64 or not t.is_floating_point() else t.to(wanted) for t in tensors]


class without_autocast:
    """``torch.autocast`` switched off for the place of a tensor, in a tenth of the time that torch's own context takes."""

    __slots__ = ("_where",)

    def __init__(self, tensor: Any) -> None:
        self._where = "cuda" if tensor.is_cuda else "cpu"

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self._where, False)

    def __exit__(self, *exc: object) -> None:
        torch.set_autocast_enabled(self._where, True)


def sum_channels(ndim: int, grad_output: Any, device: str | None) -> Any:
    """The gradient of a bias, in a call that torch knows of: torch's own sum."""
    if not _differentiated(grad_output, grad_output, None, None, None) and not _traced(grad_output, grad_output, None):
        return dispatch.sum_channels(ndim, grad_output, device, None, True)
    dispatch.check_summed(ndim, grad_output.shape, TORCH.dtype_name(grad_output.dtype), TORCH.conversion)
    return _summed(ndim, grad_output)


def _summed(ndim: int, grad_output: Any) -> Any:
    if bias_sums.takes(grad_output) and not _is_batched(grad_output):
        return bias_sums.summed(ndim, grad_output)
    channels = grad_output.dim() - ndim - 1
    return grad_output.sum([axis for axis in range(grad_output.dim()) if axis != channels], dtype=grad_output.dtype)


# ---- the two ways


def call_operator(operator: Operator, settings: Settings, first: Any, second: Any, bias: Any, size: Any) -> Any:
    """The operator's result, in a call that torch knows of."""
    if not _traced(first, second, bias) and not (_is_batched(first) or _is_batched(second)):
        return _Function.apply(first, second, bias, operator, settings, size)
    if _is_transformed():
        return _Transformed.apply(first, second, bias, operator, settings, size)
    filter_shape = size if operator is CONV_WEIGHT else second.shape
    settings = _in_numbers(settings, filter_shape[2:])
    size = integers("output_padding", size, settings.ndim) if operator is CONV_TRANSPOSE else size
    return getattr(torch.ops.pycuda_conv, operator.name).default(first, second, bias, size, *_flat(settings))


def followed(function: str, first: Any, second: Any, bias: Any, size: Any, *options: Any) -> Any:
    """A convolution that torch.compile traces; `options` are stride, padding, dilation, groups, precision, padding's mode, the algorithm.

    The operator is called at once. Torch.compile would follow all that a call of :func:`pycuda_conv.conv2d` does, which takes it 0.1 s.
    """
    first, second, bias = _cast(first, second, bias)
    operator = _BY_FUNCTION[function]
    flat = _flat_options(tuple(second.shape[2:]), *options)
    return getattr(torch.ops.pycuda_conv, operator.name).default(first, second, bias, size, *flat)


@torch_internals.constant
def _flat_options(
    sizes: tuple[int, ...], stride: Any, padding: Any, dilation: Any, groups: int, precision: str, padding_mode: Any = "zeros",
    algorithm: str | None = None,
) -> tuple[Any, ...]:
    settings = Settings(len(sizes), stride, padding, dilation, groups, precision, None, False, algorithm, padding_mode)
    return _flat(_in_numbers(settings, sizes))


def _is_transformed() -> bool:
    """Whether the call is in a transform of torch.func that takes a ``torch.autograd.Function``."""
    if torch.compiler.is_compiling() or not torch_internals.transforms_are_active():
        return False
    inner = torch_internals.innermost_transform()
    return inner is not None and not torch_internals.is_functionalized(inner)


class _Function(torch.autograd.Function):
    """All four operators, where torch asks for nothing but gradients."""

    @staticmethod
    def forward(ctx: Any, first: Any, second: Any, bias: Any, operator: Operator, settings: Settings, size: Any) -> Any:
        _save(ctx, operator, settings, first, second)
        result = operator.compute(settings, first, second, bias, size)
        if torch_internals.levels._current_level >= 0:
            _save_for_forward(ctx, first, second, size, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return (None,) * 6 if grad is None else (*_derivatives(ctx, grad), None, None, None)

    @staticmethod
    def jvp(ctx: Any, first: Any, second: Any, bias: Any, *rest: Any) -> Any:
        return _tangent(ctx, first, second, bias)


#: Whether torch.compile traces the call, which it may also do in a backward pass.
_is_followed = torch.compiler.is_dynamo_compiling


def without_gaps(grad: Any, order: tuple[int, ...] | None) -> Any:
    """A gradient that lies in `order`, as the result does: a copy if its elements lie apart, repeat, or lie in another order.

    The gradient of ``torch.cat`` is a slice of another one, and that of a sum repeats one number.
    """
    return grad if TORCH.is_kernel_input(grad, order) else TORCH.copy(grad, order)


def lying_as(grad: Any, order: tuple[int, ...] | None) -> Any:
    """A gradient in a trace, laid out in `order`. A compiler lets the step that computes it write it so, where it can."""
    if torch_internals.transforms_are_active() or _is_batched(grad):
        return grad
    if order is None:
        return grad.contiguous()
    permuted = grad.permute(order)
    return grad if permuted.is_contiguous() else permuted.contiguous().permute([order.index(axis) for axis in range(len(order))])


class _Transformed(_Function):
    """:class:`_Function` for torch.func's transforms, which don't see through an operator with gradients (torch 2.13)."""

    @staticmethod
    def forward(first: Any, second: Any, bias: Any, operator: Operator, settings: Settings, size: Any) -> Any:  # type: ignore[override]
        return operator.compute(settings, first, second, bias, size)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        first, second, _, operator, settings, size = inputs
        _save(ctx, operator, settings, first, second)
        _save_for_forward(ctx, first, second, size, output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, first: Any, second: Any, bias: Any, operator: Operator, settings: Settings, size: Any) -> Any:
        return _vmap(info.batch_size, in_dims, operator, settings, first, second, bias, size)


def _save(ctx: Any, operator: Operator, settings: Settings, first: Any, second: Any) -> None:
    by_first, by_second, *_ = ctx.needs_input_grad
    ctx.save_for_backward(first if by_second else None, second if by_first else None)
    ctx.call = operator, settings, first.shape, second.shape


def _save_for_forward(ctx: Any, first: Any, second: Any, size: Any, result: Any) -> None:
    """Save the arguments of :func:`_tangent`. torch calls it before the call ends and keeps none of them longer."""
    ctx.save_for_forward(first, second)
    ctx.set_materialize_grads(False)  # zeros would be convolved
    ctx.size, ctx.result_shape = size, result.shape


def _tangent(ctx: Any, first: Any, second: Any, bias: Any) -> Any:
    """The derivative of the result in the direction of these operands, each of which may be None: the operator is linear in each."""
    operator, settings, *_ = ctx.call
    of_first, of_second = ctx.saved_tensors
    of_first_alone = settings if operator is CONV_INPUT else settings.linear
    terms = [] if first is None else [call_operator(operator, of_first_alone, first, of_second, None, ctx.size)]
    if second is not None:
        terms.append(call_operator(operator, settings, of_first, second, None, ctx.size))
    if bias is not None:
        terms.append(bias.view(-1, *(1,) * settings.ndim).expand(ctx.result_shape))
    return reduce(torch.add, terms)


def _derivatives(ctx: Any, grad: Any) -> tuple[Any, Any, Any]:
    first, second = ctx.saved_tensors
    operator, settings, first_shape, second_shape = ctx.call
    by_first, by_second, by_bias, *_ = ctx.needs_input_grad
    return (
        operator.by_first(settings, first_shape, second, grad) if by_first else None,
        operator.by_second(settings, first, second_shape, grad) if by_second else None,
        _summed(settings.ndim, grad) if by_bias else None,
    )


def _fake(operator: Operator, settings: Settings, first: Any, second: Any, bias: Any, size: Any) -> Any:
    """A tensor without numbers that has the result's shape and strides."""
    _check(operator, settings, first, second, bias, None, None, size, None)
    like = second if TORCH.dtype_name(first.dtype) in INTEGER_BYTES else first
    return _empty_like(first, operator.shape(settings, first.shape, second.shape, size), settings.ndim, like.dtype)


def lies_in(x: Any, order: Sequence[int]) -> bool:
    """Whether a tensor, whose sizes may be symbols, is known to lie without gaps with its axes in this order.

    Its strides are compared. Torch's own answer, ``is_contiguous``, is sometimes no for symbols although the strides say yes, as for sums
    in torch 2.11.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # torch's compiler, which takes a second to import

    expected: Any = 1
    for axis in reversed(order):
        if not (statically_known_true(x.shape[axis] == 1) or statically_known_true(x.stride(axis) == expected)):
            return False
        expected = expected * x.shape[axis]
    return True


def _is_one(x: Any, axis: int) -> bool:
    """Whether an axis has one element and the stride 1, so that its place in a tensor's order is last."""
    return isinstance(x.shape[axis], int) and isinstance(x.stride(axis), int) and x.shape[axis] == x.stride(axis) == 1


def traced_layout(x: Any, ndim: int) -> str:
    """The layout that a tensor counts as, whose sizes may be symbols."""
    order = channels_last(x.dim(), ndim)
    if order is None or x.layout is not torch.strided or all(isinstance(n, int) for n in (*x.shape, *x.stride())):
        return _layout(x, ndim)
    axis = x.dim() - ndim - 1
    if lies_in(x, range(x.dim())) and not _is_one(x, axis):
        return "NCHW"
    return "NHWC" if lies_in(x, order) else "NCHW"


def _empty_like(first: Any, shape: Sequence[int], ndim: int, dtype: Any = None) -> Any:
    """A tensor of `shape`, whose sizes may be symbols, in the layout that `first` counts as."""
    if traced_layout(first, ndim) == "NCHW":
        return first.new_empty(shape, dtype=dtype)
    order = channels_last(len(shape), ndim)
    assert order is not None
    return first.new_empty([shape[axis] for axis in order], dtype=dtype).permute([order.index(axis) for axis in range(len(order))])


def _check(
    operator: Operator, settings: Settings, first: Any, second: Any, bias: Any, scale: Any, residual: Any, size: Any, activation: Any
) -> None:
    """Refuse operands that don't fit together, as far as their sizes are known."""
    more = {"bias": bias, "scale": scale, "residual": residual}
    given = {name: tensor for name, tensor in more.items() if tensor is not None}
    own = TORCH.dtype_name(first.dtype)
    check_taken(operator.words[0], own, TORCH.conversion)
    for name, tensor in {operator.words[1]: second, **given}.items():
        check_element_type(name, TORCH.dtype_name(tensor.dtype), TORCH.conversion)
    read, computed = (own, second.dtype) if own in INTEGER_BYTES else ("", first.dtype)
    for name, other in {operator.words[1]: second, **given}.items():
        if other.device != first.device or other.dtype != computed:
            raise ConvArgumentError(
                f"{operator.words[0]} and {name} should be the same in device and dtype, but are on {first.device} in {first.dtype} and "
                f"on {other.device} in {other.dtype}"
            )
    if all(isinstance(n, int) for shape in (first.shape, second.shape, *(t.shape for t in given.values())) for n in shape):
        shapes = {f"{name}_shape": tensor.shape for name, tensor in given.items() if name != "bias"}
        operator.problem(
            settings.ndim, first.shape, second.shape, None if bias is None else bias.shape, size, stride=settings.stride,
            padding=settings.padding, dilation=settings.dilation, groups=settings.groups, dtype=TORCH.dtype_name(computed),
            input_dtype=read, precision=settings.precision, algorithm=settings.algorithm, padding_mode=settings.padding_mode,
            padding_value=settings.padding_value, **shapes,
            **({} if activation is None else {"activation": activation}),
        )


def _vmap(
    count: int, in_dims: Any, operator: Operator, settings: Settings, first: Any, second: Any, bias: Any, size: Any
) -> tuple[Any, int]:
    """`count` convolutions as one of more groups, and the axis of the result along which they lie."""
    channels, filters = -settings.ndim - 1, -settings.ndim - 2

    def widened(tensor: Any, dim: int | None, axis: int) -> Any:
        if tensor is None:
            return None
        tensor = tensor.expand(count, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        return tensor.movedim(0, axis - 1).flatten(axis - 1, axis)

    if operator in (CONV_INPUT, CONV_WEIGHT):
        at = channels if operator is CONV_INPUT else filters
        size = [n * count if axis - len(size) == at else n for axis, n in enumerate(size)]
    made = call_operator(
        operator, settings._replace(groups=settings.groups * count), widened(first, in_dims[0], channels),
        widened(second, in_dims[1], channels if operator is CONV_WEIGHT else filters), widened(bias, in_dims[2], -1), size,
    )
    axis = filters if operator is CONV_WEIGHT else channels
    return made.unflatten(axis, (count, made.shape[axis] // count)).movedim(axis - 1, 0), 0
