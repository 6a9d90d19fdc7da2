"""The fused layer as a function of tensors, as a function of modules, and as modules."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pycuda_conv import repeat
from pycuda_conv.arguments import check_precision
from pycuda_conv.engines.nn import batch_norm
from pycuda_conv.errors import ConvArgumentError, brief
from pycuda_conv.invariance import WORD as BATCH_INVARIANT
from pycuda_conv.nn.autograd import CONV, Settings, _cast, _differentiated, _in_numbers, _traced, activated, without_autocast
from pycuda_conv.nn.fused.autograd import _forward_again, _Function
from pycuda_conv.nn.fused.launches import _counted_by_kernels, _inference, _LayerSpec, _new_mask, _normalised, _statistics, _were_written
from pycuda_conv.nn.fused.operators import _asked_of
from pycuda_conv.nn.fused.repeat import _asked_forward, _remember_forward
from pycuda_conv.nn.modules import in_pairs
from pycuda_conv.typing import Precision

# ---- a layer as a function of tensors


class Layer:
    """A layer with given options as a function of tensors, which ``torch.compile`` calls in light mode.

    Parameters
    ----------
    activation
        In the form of :func:`pycuda_conv.arguments.checked_activation`.
    of_batch : bool
        Whether the statistics are the batch's; otherwise they are the running ones.
    settings : Settings
        The convolution's, in numbers.
    momentum, eps : float
    """

    __name__ = "layer"

    def __init__(self, activation: batch_norm.Activation, of_batch: bool, settings: Settings, momentum: float, eps: float) -> None:
        self._spec = _LayerSpec(activation, of_batch, settings)
        self._momentum, self._eps = momentum, eps
        self._asked = _asked_of(self._spec, momentum, eps)

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, running_mean: Tensor | None,
        running_var: Tensor | None, batches: Tensor | None, residual: Tensor | None, passes_on: bool = False,
    ) -> Any:
        """The layer's result. The batch's statistics move the running ones, and `batches` is raised by 1, where they are given.

        If it `passes_on` the input, that is a second result, for other readers of the input: then the launch that convolves the layer's own
        gradient adds theirs.
        """
        spec, momentum, eps = self._spec, self._momentum, self._eps
        remembers, running = spec.of_batch and repeat.possible(), (running_mean, running_var)
        tensors = weight, bias, gamma, beta, running_mean, running_var, batches
        if remembers:
            made = _forward_again(self._asked, x, residual, tensors, passes_on)
            if made is not None:
                return made
        named = x, weight, bias, gamma, beta
        if _traced(*named):
            made = self._by_operators(named, running, batches, residual)
            return (made, x) if passes_on else made
        counted = None
        if batches is not None:
            if _counted_by_kernels(batches, x):
                counted = batches
            else:
                batches.add_(1)
        made, out = _computed(named, residual, running, batches, None, counted, momentum, eps, spec, passes_on)
        if remembers and counted is batches:
            _remember_forward(self._asked, (x, residual, *tensors), momentum, eps, spec, True, out)
        return made

    def _by_operators(self, named: Any, running: Any, batches: Tensor | None, residual: Tensor | None) -> Tensor:
        """The same where torch has to see operators."""
        ours, spec = torch.ops.pycuda_conv, self._spec
        options = self._momentum, self._eps
        if spec.of_batch:
            return cast(Tensor, ours.fused_layer(*named, *running, batches, residual, *options, spec.in_integers()))
        if batches is not None:
            batches.add_(1)
        flat = (spec if residual is None else spec._replace(activation=None)).in_integers()
        with torch.no_grad():
            made = ours.frozen_statistics(*named[:3], *running, self._eps, flat)
        out: Tensor = ours.fused_conv_bn_relu(*named, *made, flat)
        return out if residual is None else cast(Tensor, activated(out + residual, spec.activation))


def _computed(
    named: tuple[Any, ...], residual: Tensor | None, running: tuple[Tensor | None, Tensor | None], batches: Tensor | None,
    tracked: Tensor | None, counted: Tensor | None, momentum: float, eps: float, spec: _LayerSpec, passes_on: bool,
) -> tuple[Any, Tensor]:
    """What autograd's function returns for the layer of `named`, x, weight, bias, gamma and beta; and the layer's result itself.

    With `tracked`, the number of batches, running statistics become the mean over these. `counted` is `batches` if kernels raise it.
    """
    x, weight, bias, gamma, beta = named
    with torch.no_grad():
        y, statistics = _statistics(x, weight, bias, *running, tracked, momentum, eps, spec, counted)
        mask = _new_mask(y, residual, spec.activation)
        out = _normalised(y, statistics, gamma, beta, residual, spec.activation, mask)
    if spec.of_batch:
        _were_written(running, batches, counted is not None)
    return _Function.apply(*named, residual, spec, (y, statistics, out, *(() if mask is None else (mask,))), passes_on), out


# ---- the modules


class _FusedConvBnReLU(nn.Module):
    """The common part of all ranks. `conv` and `bn` are torch's modules, which hold the parameters and buffers."""

    _conv: ClassVar[type[nn.Module]]
    _bn: ClassVar[type[nn.Module]]
    _ndim: ClassVar[int]

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
        groups: int = 1, bias: bool = False, padding_mode: str = "zeros", eps: float = 1e-5, momentum: float | None = 0.1,
        affine: bool = True, track_running_stats: bool = True, relu: bool = True, precision: Precision = "fp32", device: Any = None,
        dtype: Any = None,
    ) -> None:
        if in_pairs(padding):
            raise ConvArgumentError(
                f"padding must be an integer, {self._ndim} integers, 'same' or 'valid', but got padding={brief(padding)}; pairs are for "
                f"pycuda_conv.nn.Conv{self._ndim}d, which from_modules takes"
            )
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        conv = self._conv(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, **made)
        self._adopt(conv, self._bn(out_channels, eps, momentum, affine, track_running_stats, **made), relu, precision)

    def _adopt(self, conv: nn.Module, bn: nn.Module, relu: bool, precision: str) -> None:
        check_precision(precision)
        super().__init__()
        self.conv: Any = conv
        self.bn: Any = bn
        self.relu = relu
        self.precision = precision
        self.training = bn.training

    @classmethod
    def from_modules(cls, conv: nn.Module, bn: nn.Module, *, relu: bool = True, precision: Precision = "fp32") -> Any:
        """A layer that computes the same as `conv`, `bn` and, unless `relu` is False, a ReLU one after the other.

        Its `conv` and `bn` are these modules, not copies: parameters and buffers are shared with them, and the layer trains or evaluates
        as `bn` does. :meth:`to_modules` gives the modules back.

        Raises
        ------
        TypeError
            Modules that are not torch's convolution and batch norm of this rank; a ``SyncBatchNorm``, whose statistics go over
            several processes.
        ValueError
            A batch norm of another number of channels than the convolution's; a convolution that asks for an algorithm.
        """
        _refuse_sync(bn)
        for name, module, kind in (("conv", conv, cls._conv), ("bn", bn, cls._bn)):
            if not isinstance(module, kind):
                raise TypeError(f"{name} must be a torch.nn.{kind.__name__}, but got {type(module).__name__}")
        channels, features = cast(Any, conv).out_channels, cast(Any, bn).num_features
        if channels != features:
            raise ValueError(f"bn has {features} features, but conv has {channels} output channels")
        algorithm = getattr(conv, "algorithm", None)
        if algorithm not in (None, BATCH_INVARIANT):
            expected = f"None or {BATCH_INVARIANT!r}"
            raise ValueError(f"conv asks for algorithm={algorithm!r}, which a fused layer does not take; expected {expected}")
        fused = cls.__new__(cls)
        fused._adopt(conv, bn, relu, precision)
        return fused

    def to_modules(self) -> tuple[Any, Any]:
        """The convolution and the batch norm with the layer's parameters and buffers; the ReLU comes after them."""
        return self.conv, self.bn

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """The same as torch's. It refuses SyncBatchNorm, which SyncBatchNorm.convert_sync_batchnorm would set in this way."""
        _refuse_sync(module)
        super().add_module(name, module)

    def extra_repr(self) -> str:
        return f"relu={self.relu}, precision={self.precision!r}"

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """The layer's result, (N, K, *size), in the layout of `input`, (N, C, *size); a `residual` is added before the ReLU."""
        own = self.__dict__  # a module's attributes are slow
        children, activation = own["_modules"], "relu" if own["relu"] else None
        return conv_bn_act(children["conv"], children["bn"], input, activation, own["precision"], self._ndim, residual)


def conv_bn_act(
    conv: Any, bn: Any, input: Tensor, activation: batch_norm.Activation, precision: str, ndim: int, residual: Tensor | None = None,
    passes_on: bool = False,
) -> Any:
    """The result of `conv`, `bn`, the sum with a `residual` and the activation for `input`, which has `ndim` spatial axes.

    Neither module is called. If it `passes_on` the input, that is a second result, for other readers of the input: then the launch that
    convolves the layer's own gradient adds theirs.
    """
    if not batch_norm.takes(activation, residual is not None):
        made = conv_bn_act(conv, bn, input, None, precision, ndim, residual, passes_on)
        return (activated(made[0], activation), made[1]) if passes_on else activated(made, activation)
    _refuse_sync(bn)
    tensors = _tensors(conv, bn)
    if not torch.is_autocast_enabled("cuda" if input.is_cuda else "cpu"):
        made = _conv_bn_act(conv, bn, activation, precision, ndim, input, residual, tensors, passes_on)
    else:
        weight, bias, *rest = tensors
        x, *cast = _cast(input, weight, bias)  # torch's sum does not cast the residual either
        with without_autocast(input) if repeat.possible() else nullcontext():  # the call is then like those outside of autocast
            made = _conv_bn_act(conv, bn, activation, precision, ndim, x, residual, (*cast, *rest), passes_on and x is input)
    return (made, input) if passes_on and isinstance(made, Tensor) else made


def _conv_bn_act(
    conv: Any, bn: Any, activation: batch_norm.Activation, precision: str, ndim: int, input: Tensor, residual: Tensor | None,
    tensors: tuple[Any, ...], passes_on: bool,
) -> Any:
    """The same, given the parameters and buffers of both, cast. It gives one result where the input can't be passed on."""
    asked = _asked_forward(conv, bn, activation, precision)
    if asked is not None:
        made = _forward_again(asked, input, residual, tensors, passes_on)
        if made is not None:
            return made
    weight, bias, gamma, beta, running_mean, running_var, batches = tensors
    if input.dim() != ndim + 2:
        raise ValueError(f"expected {ndim + 2}D input (got {input.dim()}D input)")
    momentum, eps = bn.momentum, bn.eps
    of_batch = bn.training or (running_mean is None and running_var is None)
    trains = not _traced(input, weight, bias) and (of_batch or _differentiated(input, weight, bias, gamma, beta))
    x, padding, mode = _padded(conv, input, not trains)
    settings = Settings(ndim, conv.stride, padding, conv.dilation, conv.groups, precision, None, False, None, mode)
    settings = _in_numbers(settings, weight.shape[2:])
    spec, named = _LayerSpec(activation, of_batch, settings), (x, weight, bias, gamma, beta)
    traced, differentiated = _traced(*named), _differentiated(*named)
    if residual is not None:
        size = torch.Size(CONV.shape(settings, x.shape, weight.shape, ()))
        if traced or not _is_added_as_it_is(residual, x, size):
            summed = _conv_bn_act(conv, bn, None, precision, ndim, input, None, tensors, False) + residual
            return summed if activation is None else torch.relu_(summed)
        differentiated = differentiated or (torch.is_grad_enabled() and residual.requires_grad)
    if not of_batch and not differentiated:
        spec = spec._replace(settings=settings._replace(algorithm=getattr(conv, "algorithm", None)))
        if not traced:
            return _inference(*named, residual, running_mean, running_var, eps, spec)
        return torch.ops.pycuda_conv.fused_inference(*named, running_mean, running_var, eps, spec.in_integers())
    counted = tracked = None
    if of_batch:
        if x.shape[0] == 1:
            shape = torch.Size(CONV.shape(settings, x.shape, weight.shape, ()))
            if math.prod(shape[2:]) == 1:
                raise ValueError(f"Expected more than 1 value per channel when training, got input size {shape}")
        if not bn.track_running_stats:
            running_mean = running_var = None
        elif batches is not None and bn.training:
            if not traced and momentum is not None and _counted_by_kernels(batches, x):
                counted = batches
            else:
                batches.add_(1)
                tracked = batches if momentum is None else None
    momentum = momentum or 0.0
    if not traced:
        running = running_mean, running_var
        made, out = _computed(named, residual, running, batches, tracked, counted, momentum, eps, spec, passes_on and x is input)
        if asked is not None and (tracked if counted is None else counted) is batches:
            _remember_forward(asked, (input, residual, *tensors), momentum, eps, spec, counted is not None, out)
        return made
    flat = spec.in_integers()
    with torch.no_grad():
        y, statistics = torch.ops.pycuda_conv.fused_statistics(x, weight, bias, running_mean, running_var, tracked, momentum, eps, flat)
    return torch.ops.pycuda_conv.fused_conv_bn_relu(*named, y, statistics, flat)


def _is_added_as_it_is(residual: Any, x: Tensor, shape: torch.Size) -> bool:
    """True if kernels can add `residual` to a result of `shape` and the type of `x`. Torch's sum takes others too, and scalars."""
    return (
        isinstance(residual, Tensor) and residual.shape == shape and residual.dtype is x.dtype and residual.device == x.device
        and not _traced(residual, residual, None)
    )


def _tensors(conv: Any, bn: Any) -> tuple[Any, ...]:
    """The parameters and buffers of both modules. A module's attributes are slow: it looks for them elsewhere first."""
    own, of_norm = conv.__dict__, bn.__dict__
    try:
        of_conv, of_bn, buffers = own["_parameters"], of_norm["_parameters"], of_norm["_buffers"]
        running = buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"]
        return of_conv["weight"], of_conv["bias"], of_bn["weight"], of_bn["bias"], *running
    except KeyError:  # some are computed, as in torch.nn.utils.parametrize
        return conv.weight, conv.bias, bn.weight, bn.bias, bn.running_mean, bn.running_var, bn.num_batches_tracked


def _padded(conv: Any, x: Tensor, copied: bool) -> tuple[Tensor, Any, str]:
    """`x`, and the padding and its mode that are still to be added. With `copied`, a border other than zeros is added by torch."""
    if conv.padding_mode == "zeros":
        return x, conv.padding, "zeros"
    sides = conv._reversed_padding_repeated_twice
    if copied:
        return F.pad(x, sides, mode=conv.padding_mode), 0, "zeros"
    return x, tuple((sides[i], sides[i + 1]) for i in range(len(sides) - 2, -1, -2)), conv.padding_mode


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

    It takes less memory than the three modules. For the backward pass it keeps the convolution's result, but not its normalised form or
    the ReLU's mask, which are computed again. A call ``layer(x, residual)`` adds the residual before the ReLU, as the blocks of a ResNet
    do, and keeps its own result for the mask. Evaluated without gradients, the layer is one convolution, whose kernel reads the norm's
    four vectors.

    Second derivatives are torch's. There are no statistics over several processes: a ``SyncBatchNorm`` is refused.

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
