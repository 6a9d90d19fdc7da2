"""Convolution, batch normalisation and ReLU as one torch module, trained and evaluated.

In training each forward pass is the convolution, its statistics and one pass over its result; kept for the backward pass are the
input, the filter and the convolution's result y, but neither the normalised y nor the ReLU's mask, which are computed again.
Evaluated without gradients it is a convolution whose result is scaled and shifted.

Under the modules are operators of torch's, ``torch.ops.pycuda_conv.fused_*``, so that autograd, ``torch.compile`` and graph
captures see what they need. A forward pass with gradients takes two: the statistics, which change the running ones and have no
gradient of their own, and the layer as a function of input, filter and parameters, which has all of it.

S. Ioffe and C. Szegedy, 'Batch normalization: accelerating deep network training by reducing internal covariate shift' (2015).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pycuda_conv import ops
from pycuda_conv.arrays import kind_of
from pycuda_conv.engines import batch_norm
from pycuda_conv.problem import PRECISIONS, channels_last

__all__ = ["FusedConvBnReLU1d", "FusedConvBnReLU2d", "FusedConvBnReLU3d"]

# ---- what the operators do


class _How(NamedTuple):
    """What a layer is besides its arrays. Operators take it as integers: their arguments cost the host time, the more the more."""

    relu: bool
    #: whether the statistics are the batch's
    of_batch: bool
    precision: str
    groups: int
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]

    @classmethod
    def of(cls, how: Sequence[int]) -> _How:
        """From relu, of_batch, number of the precision, groups, then axis by axis stride, padding before and after, dilation."""
        relu, of_batch, precision, groups, *axes = how
        padding = tuple(zip(axes[1::4], axes[2::4], strict=True))
        return cls(bool(relu), bool(of_batch), PRECISIONS[precision], groups, tuple(axes[::4]), padding, tuple(axes[3::4]))

    def convolution(self, of: str = "") -> Any:
        """The convolution as a function of arrays; its gradients `of` ``"_input"`` and ``"_weight"``."""
        options = {
            "stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups, "precision": self.precision,
        }
        return partial(getattr(ops, f"conv{len(self.stride)}d{of}"), **options)


def _result_shape(x: Tensor, weight: Tensor, how: Sequence[int]) -> tuple[int, ...]:
    _, _, _, _, stride, padding, dilation = _How.of(how)
    size = (
        (n + before + after - d * (f - 1) - 1) // s + 1
        for n, f, s, (before, after), d in zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    )
    return (x.shape[0], weight.shape[0], *size)


def _is_last(x: Tensor) -> bool:
    """Whether `x` counts as channels last, as :mod:`pycuda_conv.arrays` says."""
    return not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def _empty(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Of the type and in the layout of `x`."""
    if not _is_last(x):
        return x.new_empty(shape)
    return x.new_empty((shape[0], *shape[2:], shape[1])).movedim(-1, 1)


def _sums_dtype(y: Tensor) -> torch.dtype:
    """Of sums, and of all that there is one of a channel."""
    return torch.float64 if y.dtype is torch.float64 else torch.float32


def _like_sums(parameter: Tensor | None, y: Tensor) -> Tensor | None:
    return None if parameter is None else parameter.to(_sums_dtype(y)).contiguous()


def _launch(
    maker: batch_norm.Maker, like: Tensor, shape: Sequence[int], inputs: Sequence[Tensor | None], outs: Sequence[Tensor | None],
    *options: Any,
) -> None:
    """Run what `maker` makes for arrays (N, K, *size) of that shape, of the dtype and layout of `like`."""
    if not math.prod(shape):
        return
    kind = kind_of("an array", like)
    device = kind.device(kind.signature(like), None)
    layout = "NHWC" if _is_last(like) else "NCHW"
    pixels = batch_norm.Pixels(kind.dtype_name(like.dtype), layout, shape[0], shape[1], math.prod(shape[2:]))
    launch, workspace = batch_norm.compiled(maker, pixels, device, *options)
    kind.run(device, launch, inputs, outs, workspace)


def _as(y: Tensor, array: Tensor) -> Tensor:
    """`array`, of the shape of `y`, as kernels can read it, in the layout that `y` counts as."""
    order = channels_last(y.dim(), y.dim() - 2) if _is_last(y) else None
    return cast(Tensor, kind_of("array", array).ready(array, order))


def _normalise(y: Tensor, statistics: Sequence[Tensor], gamma: Tensor | None, beta: Tensor | None, relu: bool) -> Tensor:
    y = _as(y, y)
    out = _empty(y, y.shape)
    _launch(batch_norm.forward, y, y.shape, (y, *statistics, _like_sums(gamma, y), _like_sums(beta, y)), (out,), relu)
    return out


def _new_statistics(y: Tensor) -> Tensor:
    make = torch.empty if y.numel() else torch.zeros
    return make((2, y.shape[1]), dtype=_sums_dtype(y), device=y.device)


@torch.library.custom_op(
    "pycuda_conv::fused_statistics",
    mutates_args=("running_mean", "running_var"),
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor? tracked, float momentum, "
    "float eps, int[] how) -> (Tensor, Tensor)",
)
def _fused_statistics(
    x: Tensor, weight: Tensor, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None, tracked: Tensor | None,
    momentum: float, eps: float, how: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """The convolution y, and (2, K): mean and 1 / sqrt(variance + eps) of its channels, those of the batch or the running ones.

    Those of the batch move the running ones that are given: by `momentum`, or where `tracked`, the number of batches, is given to
    the mean over batches.
    """
    asked = _How.of(how)
    y = asked.convolution()(x, weight, bias)
    statistics = _new_statistics(y)
    if not asked.of_batch:
        assert running_mean is not None and running_var is not None
        statistics[0] = running_mean
        torch.rsqrt(running_var.to(statistics.dtype) + eps, out=statistics[1])
        return y, statistics
    running = running_mean, running_var
    moved = [_like_sums(one, y) for one in running]
    _launch(batch_norm.statistics, y, y.shape, (y, tracked), (*statistics, *moved), eps, momentum)
    for one, new in zip(running, moved, strict=True):
        if one is not None and new is not one:
            one.copy_(new)
    return y, statistics


@_fused_statistics.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Any, running_mean: Any, running_var: Any, tracked: Any, momentum: float, eps: float, how: Sequence[int]
) -> tuple[Tensor, Tensor]:
    y = _empty(x, _result_shape(x, weight, how))
    return y, _new_statistics(y)


@torch.library.custom_op(
    "pycuda_conv::fused_conv_bn_relu",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor? gamma, Tensor? beta, Tensor y, Tensor statistics, int[] how) -> Tensor",
)
def _fused_conv_bn_relu(
    x: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, y: Tensor, statistics: Tensor,
    how: Sequence[int],
) -> Tensor:
    """The layer, given what :func:`_fused_statistics` found for the same `x`, `weight` and `bias`: gradients are theirs."""
    return _normalise(y, statistics.unbind(), gamma, beta, _How.of(how).relu)


@_fused_conv_bn_relu.register_fake
def _(x: Tensor, weight: Tensor, bias: Any, gamma: Any, beta: Any, y: Tensor, statistics: Any, how: Any) -> Tensor:
    return _empty(y, y.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, gamma, beta, y, statistics, ctx.how = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight, gamma, beta, y, statistics)


def _backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    x, weight, gamma, beta, y, statistics = ctx.saved_tensors
    of_x, of_weight, of_bias, of_gamma, of_beta, *_ = ctx.needs_input_grad
    dx, dweight, sums = torch.ops.pycuda_conv.fused_conv_bn_relu_backward(
        dout, x, weight, gamma, beta, y, statistics, of_x, of_weight, ctx.how
    )
    dbias = None
    if of_bias:
        if _How.of(ctx.how).of_batch:  # whose mean takes a bias away again
            dbias = torch.zeros_like(sums[0], dtype=ctx.bias_dtype)
        else:
            dbias = (sums[0] * (statistics[1] if gamma is None else statistics[1] * gamma)).to(ctx.bias_dtype)
    dgamma = sums[1].to(gamma.dtype) if of_gamma else None
    dbeta = sums[0].to(beta.dtype) if of_beta else None
    return dx if of_x else None, dweight if of_weight else None, dbias, dgamma, dbeta, None, None, None


_fused_conv_bn_relu.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op(
    "pycuda_conv::fused_conv_bn_relu_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor x, Tensor weight, Tensor? gamma, Tensor? beta, Tensor y, Tensor statistics, bool of_x, bool of_weight, "
    "int[] how) -> (Tensor, Tensor, Tensor)",
)
def _fused_conv_bn_relu_backward(
    dout: Tensor, x: Tensor, weight: Tensor, gamma: Tensor | None, beta: Tensor | None, y: Tensor, statistics: Tensor, of_x: bool,
    of_weight: bool, how: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of input and filter, without elements where not asked for, and of beta and gamma as one array (2, K)."""
    asked, parameters = _How.of(how), (_like_sums(gamma, y), _like_sums(beta, y))
    y = _as(y, y)
    dy, sums = _empty(y, y.shape), _new_statistics(y)
    # a copy of dout must be gone when the convolution's gradients take their memory
    _launch(batch_norm.backward, y, y.shape, (y, _as(y, dout), *statistics, *parameters), (dy, sums), asked.relu, asked.of_batch)
    dx, dweight = x.new_empty(0), weight.new_empty(0)
    if of_x:
        dx = asked.convolution("_input")(x.shape, weight, dy)
        dx = dx.movedim(1, -1).contiguous().movedim(-1, 1) if _is_last(x) else dx.contiguous()
    if of_weight:
        dweight = asked.convolution("_weight")(x, weight.shape, dy)
    return dx, dweight, sums


@_fused_conv_bn_relu_backward.register_fake
def _(
    dout: Tensor, x: Tensor, weight: Tensor, gamma: Any, beta: Any, y: Tensor, statistics: Any, of_x: bool, of_weight: bool, how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dx = _empty(x, x.shape) if of_x else x.new_empty(0)
    return dx, weight.new_empty(weight.shape if of_weight else 0), _new_statistics(y)


def _no_second_derivatives(ctx: Any, *gradients: Tensor) -> None:
    raise NotImplementedError(
        "the fused layer has no second derivatives; where they are needed use its parts: nn.Sequential(*fused.to_modules(), nn.ReLU())"
    )


_fused_conv_bn_relu_backward.register_autograd(_no_second_derivatives)


@torch.library.custom_op(
    "pycuda_conv::fused_inference",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor? gamma, Tensor? beta, Tensor running_mean, Tensor running_var, float eps, "
    "int[] how) -> Tensor",
)
def _fused_inference(
    x: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, running_mean: Tensor, running_var: Tensor,
    eps: float, how: Sequence[int],
) -> Tensor:
    """The layer with the running statistics, without gradients."""
    channels = weight.shape[0]
    given = (_like_sums(one, x) for one in (running_mean, running_var, gamma, beta))
    scale, shift = (x.new_empty(channels) for _ in range(2))
    _launch(batch_norm.fold, x, (1, channels), (*given, bias), (scale, shift), eps)
    asked = _How.of(how)
    return asked.convolution()(x, weight, shift, scale=scale, activation="relu" if asked.relu else None)


@_fused_inference.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Any, gamma: Any, beta: Any, running_mean: Any, running_var: Any, eps: float, how: Sequence[int]
) -> Tensor:
    return _empty(x, _result_shape(x, weight, how))


# ---- the modules


class _FusedConvBnReLU(nn.Module):
    """What the ranks share. `conv` and `bn` are torch's modules, which hold the parameters and buffers."""

    _conv: ClassVar[type[nn.Module]]
    _bn: ClassVar[type[nn.Module]]
    _ndim: ClassVar[int]

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
        groups: int = 1, bias: bool = False, padding_mode: str = "zeros", eps: float = 1e-5, momentum: float | None = 0.1,
        affine: bool = True, track_running_stats: bool = True, relu: bool = True, precision: str = "fp32", device: Any = None,
        dtype: Any = None,
    ) -> None:
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        conv = self._conv(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, **made)
        self._adopt(conv, self._bn(out_channels, eps, momentum, affine, track_running_stats, **made), relu, precision)

    def _adopt(self, conv: nn.Module, bn: nn.Module, relu: bool, precision: str) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {PRECISIONS}, but got {precision!r}")
        super().__init__()
        self.conv: Any = conv
        self.bn: Any = bn
        self.relu = relu
        self.precision = precision
        self.training = bn.training

    @classmethod
    def from_modules(cls, conv: nn.Module, bn: nn.Module, *, relu: bool = True, precision: str = "fp32") -> Any:
        """The layer that computes what `conv`, `bn` and, unless `relu` is False, a ReLU compute one after the other.

        Its `conv` and `bn` are these modules, not copies: parameters and buffers are shared with them, and it trains or
        evaluates as `bn` does. :meth:`to_modules` is the way back.

        Raises
        ------
        TypeError
            Modules that are not torch's convolution and batch norm of this rank; a ``SyncBatchNorm``, whose statistics go over
            several processes.
        ValueError
            A batch norm of another number of channels than the convolution's.
        """
        _refuse_sync(bn)
        for name, module, kind in (("conv", conv, cls._conv), ("bn", bn, cls._bn)):
            if not isinstance(module, kind):
                raise TypeError(f"{name} must be a torch.nn.{kind.__name__}, but got {type(module).__name__}")
        channels, features = cast(Any, conv).out_channels, cast(Any, bn).num_features
        if channels != features:
            raise ValueError(f"bn has {features} features, but conv has {channels} output channels")
        fused = cls.__new__(cls)
        fused._adopt(conv, bn, relu, precision)
        return fused

    def to_modules(self) -> tuple[Any, Any]:
        """The convolution and the batch norm, whose parameters and buffers these are; the ReLU comes after them."""
        return self.conv, self.bn

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """As torch's, but for SyncBatchNorm.convert_sync_batchnorm, which sets its modules so and is refused."""
        _refuse_sync(module)
        super().add_module(name, module)

    def extra_repr(self) -> str:
        return f"relu={self.relu}, precision={self.precision!r}"

    def forward(self, input: Tensor) -> Tensor:
        """The layer's result, (N, K, *size), in the layout of `input`, (N, C, *size)."""
        conv, bn = self.conv, self.bn
        _refuse_sync(bn)
        if input.dim() != self._ndim + 2:
            raise ValueError(f"expected {self._ndim + 2}D input (got {input.dim()}D input)")
        x, weight, bias = self._in_autocast(input, conv.weight, conv.bias)
        x, padding = self._padded(x)
        of_batch = bn.training or (bn.running_mean is None and bn.running_var is None)
        how = [int(self.relu), int(of_batch), PRECISIONS.index(self.precision), conv.groups]
        for stride, pair, dilation in zip(conv.stride, padding, conv.dilation, strict=True):
            how += stride, *pair, dilation
        named = (x, weight, bias, bn.weight, bn.bias)
        if not of_batch and not (torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in named)):
            return torch.ops.pycuda_conv.fused_inference(*named, bn.running_mean, bn.running_var, bn.eps, how)
        running_mean, running_var, tracked = bn.running_mean, bn.running_var, None
        if of_batch:
            shape = _result_shape(x, weight, how)
            if shape[0] * math.prod(shape[2:]) == 1:
                raise ValueError(f"Expected more than 1 value per channel when training, got input size {torch.Size(shape)}")
            if not bn.track_running_stats:
                running_mean = running_var = None
            elif bn.num_batches_tracked is not None:
                bn.num_batches_tracked.add_(1)
                tracked = bn.num_batches_tracked if bn.momentum is None else None
        with torch.no_grad():
            y, statistics = torch.ops.pycuda_conv.fused_statistics(
                x, weight, bias, running_mean, running_var, tracked, bn.momentum or 0.0, bn.eps, how
            )
        return torch.ops.pycuda_conv.fused_conv_bn_relu(*named, y, statistics, how)

    @staticmethod
    def _in_autocast(*arrays: Tensor | None) -> list[Any]:
        """What autocast makes of the arrays of a convolution; the batch norm's parameters it leaves as they are."""
        place = cast(Tensor, arrays[0]).device.type
        if not torch.is_autocast_enabled(place):
            return list(arrays)
        dtype = torch.get_autocast_dtype(place)
        return [a.to(dtype) if a is not None and a.dtype is not torch.float64 else a for a in arrays]

    def _padded(self, x: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
        """`x`, with what the convolution's mode puts around it, and the zeros still to be added, before and after, axis by axis."""
        conv = self.conv
        last_axis_first = conv._reversed_padding_repeated_twice
        if conv.padding_mode != "zeros":
            return F.pad(x, last_axis_first, mode=conv.padding_mode), [(0, 0)] * self._ndim
        return x, list(zip(last_axis_first[::2], last_axis_first[1::2], strict=True))[::-1]


def _refuse_sync(bn: nn.Module | None) -> None:
    if isinstance(bn, nn.SyncBatchNorm):
        raise TypeError(
            "SyncBatchNorm takes its statistics over all processes, which the fused layer does not: convert the model before its layers "
            "are fused and leave these apart, or keep each process's own statistics with BatchNorm"
        )


class FusedConvBnReLU2d(_FusedConvBnReLU):
    """Convolution, batch norm and ReLU: ``nn.Conv2d``, ``nn.BatchNorm2d`` and ``nn.ReLU`` in one module.

    Values, gradients and running statistics are theirs; ``conv`` and ``bn`` are modules of those types, so that a
    ``state_dict`` has ``conv.weight``, ``bn.running_mean`` and so on. They hold parameters and buffers and are not called: hooks
    on them don't run. The statistics are the batch's where ``bn.training`` is set, as in ``nn.BatchNorm2d``.

    Less memory is taken than by the three modules: for the backward pass the convolution's result is kept, and neither its
    normalised form nor the ReLU's mask, which are computed again. Evaluated without gradients, the running statistics become a
    factor and a summand of the convolution, of the input's dtype: in float16, below 65504.

    There are no second derivatives, and no statistics over several processes: a ``SyncBatchNorm`` is refused.

    Parameters
    ----------
    in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode
        As for ``nn.Conv2d``; without a bias by default, which the batch norm would take away again.
    eps, momentum, affine, track_running_stats
        As for ``nn.BatchNorm2d``; ``momentum=None`` makes the running statistics the mean over all batches.
    relu : bool
        False leaves the ReLU out.
    precision : {"fp32", "tf32"}
        As for :func:`pycuda_conv.conv2d`, in the backward pass too. The statistics of float16 and bfloat16 are summed in float32.
    device, dtype
        Of parameters and buffers; float16, bfloat16, float32 or float64.

    Raises
    ------
    ValueError
        On a call: arrays that are not (N, C, H, W); in training, one value a channel.

    Examples
    --------
    >>> import torch, pycuda_conv.nn
    >>> layer = pycuda_conv.nn.FusedConvBnReLU2d(3, 8, 3, padding=1)
    >>> layer(torch.randn(2, 3, 16, 16)).shape
    torch.Size([2, 8, 16, 16])
    """

    _conv, _bn, _ndim = nn.Conv2d, nn.BatchNorm2d, 2


class FusedConvBnReLU1d(_FusedConvBnReLU):
    """:class:`FusedConvBnReLU2d` of ``nn.Conv1d`` and ``nn.BatchNorm1d``, on arrays (N, C, W)."""

    _conv, _bn, _ndim = nn.Conv1d, nn.BatchNorm1d, 1


class FusedConvBnReLU3d(_FusedConvBnReLU):
    """:class:`FusedConvBnReLU2d` of ``nn.Conv3d`` and ``nn.BatchNorm3d``, on arrays (N, C, D, H, W)."""

    _conv, _bn, _ndim = nn.Conv3d, nn.BatchNorm3d, 3
