"""What a fused layer computes, forward and backward: its kernels, put together and launched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pycuda_conv import dispatch, execute
from pycuda_conv.arguments import ACTIVATIONS, activation_and_slope, checked_activation
from pycuda_conv.arrays import Signature, torch_internals
from pycuda_conv.arrays.tensors import TORCH
from pycuda_conv.call import Call
from pycuda_conv.engines.geometry import bits, from_bits
from pycuda_conv.engines.nn import batch_norm
from pycuda_conv.memo import remember_launches
from pycuda_conv.nn import evaluation
from pycuda_conv.nn.autograd import CONV, CONV_INPUT, CONV_WEIGHT, Settings, _layout, _traced
from pycuda_conv.nn.options import asked_for, how_number, how_of
from pycuda_conv.plan import Plan
from pycuda_conv.problem import channels_last
from pycuda_conv.runtime import Device
from pycuda_conv.runtime.base import Launcher


class _LayerSpec(NamedTuple):
    """The options of a layer."""

    #: in the form of :func:`pycuda_conv.arguments.checked_activation`
    activation: batch_norm.Activation
    #: whether the statistics are those of the batch
    of_batch: bool
    #: the options of the convolution, in numbers
    settings: Settings

    def in_integers(self) -> list[int]:
        """The options as a flat list of ints for operators: the dispatcher's cost grows with the number of arguments.

        They are number and slope of the activation, of_batch, number of the algorithm and the precision, groups; then for each axis stride,
        padding before, padding after, dilation. The slope is the bits of a float64.
        """
        _, strides, paddings, dilations, groups, precision, _, _, algorithm, *_ = self.settings
        number, slope = activation_and_slope(self.activation)
        spec = [number, bits(slope, 8), int(self.of_batch), how_number(algorithm, precision), groups]
        for stride, padding, dilation in zip(strides, paddings, dilations, strict=True):
            spec += stride, *padding, dilation
        return spec

    @classmethod
    def of(cls, spec: Sequence[int]) -> _LayerSpec:
        """The options from the list of :meth:`in_integers`."""
        number, slope, of_batch, how, groups, *axes = spec
        algorithm, precision = how_of(how)
        word = ACTIVATIONS[number]
        activation = checked_activation((word, from_bits(slope, 8)) if word == "leaky_relu" else word)
        stride, padding, dilation = tuple(axes[::4]), tuple(zip(axes[1::4], axes[2::4], strict=True)), tuple(axes[3::4])
        settings = Settings(len(stride), stride, padding, dilation, groups, precision, None, False, algorithm)
        return cls(activation, bool(of_batch), settings)


#: The axes of an array as they lie in memory, outermost first; None for C order.
AxisOrder = tuple[int, ...] | None


def _order(x: Tensor) -> AxisOrder:
    """The order of axes that `x` counts as having, as :mod:`pycuda_conv.arrays` says: C order or channels last."""
    ndim = x.dim() - 2
    return None if _layout(x, ndim) == "NCHW" else channels_last(ndim + 2, ndim)


def _sums_dtype(y: Tensor) -> torch.dtype:
    """The dtype of sums, and of all other arrays with one value a channel."""
    return torch.float64 if y.dtype is torch.float64 else torch.float32


def _like_sums(parameter: Tensor | None, y: Tensor) -> Tensor | None:
    dtype = _sums_dtype(y)
    if parameter is None or (parameter.dtype is dtype and parameter.is_contiguous()):
        return parameter
    return parameter.to(dtype).contiguous()


def _pixels(shape: Sequence[int], dtype: str, layout: str) -> batch_norm.Pixels:
    return batch_norm.Pixels(dtype, layout, shape[0], shape[1], math.prod(shape[2:]))


def _pixels_of(y: Tensor) -> batch_norm.Pixels:
    return _pixels(y.shape, TORCH.dtype_name(y.dtype), _layout(y, y.dim() - 2))


@lru_cache(maxsize=1024)
def _compiled(maker: batch_norm.Maker, like: Signature, order: AxisOrder, *options: Any) -> tuple[Device, Launcher, int] | None:
    """The device, launcher and workspace bytes of `maker` for arrays (N, K, *size) of that signature; None for arrays without elements."""
    shape, dtype, _ = like
    if not math.prod(shape):
        return None
    device = TORCH.device(like, None)
    pixels = _pixels(shape, TORCH.dtype_name(dtype), "NHWC" if order else "NCHW")
    return device, *batch_norm.compiled(maker, pixels, device, *options)


def _launch(
    maker: batch_norm.Maker, like: Signature, order: AxisOrder, inputs: Sequence[Tensor | None], outs: Sequence[Tensor | None],
    *options: Any,
) -> None:
    found = _compiled(maker, like, order, *options)
    if found is not None:
        device, launch, workspace = found
        execute.launch(TORCH, device, launch, inputs, outs, workspace)


def _new_statistics(y: Tensor) -> Tensor:
    make = y.new_empty if y.numel() else y.new_zeros
    return make((2, y.shape[1]), dtype=_sums_dtype(y))


class _Forward(NamedTuple):
    """The convolution's plan, and the launcher of convolution and statistics, which is None for arrays without elements."""

    plan: Plan
    launch: Launcher | None
    workspace: int
    #: whether the kernels read a filter whose channels are last in memory
    filter_last: bool

    @property
    def filter_order(self) -> AxisOrder:
        """The order in which the filter has to lie."""
        return self.plan.filter_order if self.filter_last else None


@remember_launches
def _forward_launches(
    x: Signature, weight: Signature, bias: Signature | None, layout: str, filter_last: bool, momentum: float, eps: float, spec: _LayerSpec
) -> _Forward:
    device, tune = spec.settings.device, spec.settings.tune
    call = Call(*CONV.asked(spec.settings, ()))
    pixels = _pixels(CONV.shape(spec.settings, x[0], weight[0], ()), TORCH.dtype_name(x[1]), layout)
    with_moments = spec.of_batch and not (0 not in x[0] and pixels.whole)
    plan = dispatch.plan_for_call(call, TORCH, (x, weight, bias, None, None), device, layout, tune, with_moments)
    plan = plan.better or plan
    if plan.empty:
        return _Forward(plan, None, 0, False)
    filter_last = plan.reads_filter_last and (filter_last or plan.filter_order is None)
    statistics, workspace = None, 0
    if spec.of_batch:
        pixels = _pixels(plan.result_shape, plan.problem.dtype, plan.problem.layout)
        statistics, workspace = batch_norm.compiled(batch_norm.statistics, pixels, plan.device, eps, momentum, plan.schedule.moments)

    def launch(buffers: Sequence[Any], stream: Any) -> None:
        x, w, b, tracked, y, mean, invstd, running_mean, running_var, counted, scratch = buffers
        plan.launch((x, w, b, 0, 0, y, scratch), stream, filter_last=filter_last)
        if statistics is not None:
            statistics((y, tracked, mean, invstd, running_mean, running_var, counted, scratch), stream)

    return _Forward(plan, launch, max(plan.workspace_bytes, workspace), filter_last)


def _forward_of(x: Tensor, weight: Tensor, bias: Tensor | None, momentum: float, eps: float, spec: _LayerSpec) -> _Forward:
    sign, layout = TORCH.signature, _layout(x, spec.settings.ndim)
    how = sign(x), sign(weight), None if bias is None else sign(bias), layout, bool(_order(weight)), momentum, eps, spec
    found = _forward_launches(*how)
    if found.plan.better is not None:
        _forward_launches.forget(*how)
        found = _forward_launches(*how)
    return found


def _statistics(
    x: Tensor, weight: Tensor, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None, tracked: Tensor | None,
    momentum: float, eps: float, spec: _LayerSpec, counted: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The convolution y, and (2, K): mean and 1 / sqrt(variance + eps) of its channels, of the batch or by running statistics.

    The batch's statistics move the running ones, if given: by `momentum`, or to the mean over batches if `tracked`, the number of batches,
    is given. `counted`, the number of batches too, is raised by 1. At most one of the two is given.
    """
    layout = _layout(x, spec.settings.ndim)
    found = _forward_of(x, weight, bias, momentum, eps, spec)
    plan, launch, workspace, _ = found
    y = TORCH.empty(plan.result_shape, x, None, plan.order)
    statistics = _new_statistics(y)
    mean, invstd = statistics.unbind()
    new_mean = new_var = None
    if spec.of_batch:
        new_mean, new_var = _like_sums(running_mean, y), _like_sums(running_var, y)
    else:
        assert running_mean is not None and running_var is not None
        mean.copy_(running_mean)
        torch.rsqrt(running_var.to(statistics.dtype) + eps, out=invstd)
    if launch is not None:
        of_bias = None if bias is None else TORCH.as_kernel_input(bias, None)
        given = TORCH.as_kernel_input(x, plan.order), TORCH.as_kernel_input(weight, found.filter_order), of_bias, tracked
        execute.launch(TORCH, plan.device, launch, given, (y, mean, invstd, new_mean, new_var, counted), workspace)
    elif counted is not None:
        counted.add_(1)
    if running_mean is not None and new_mean is not None and new_mean is not running_mean:
        running_mean.copy_(new_mean)
    if running_var is not None and new_var is not None and new_var is not running_var:
        running_var.copy_(new_var)
    if layout != plan.problem.layout:  # the kernels that convolve it read the other order
        y = TORCH.empty(y.shape, y, None, channels_last(y.dim(), spec.settings.ndim)).copy_(y)
    return y, statistics


def _new_mask(y: Tensor, residual: Tensor | None, activation: batch_norm.Activation) -> Tensor | None:
    """Room for where a layer's result is above 0, which the gradient of a sum with a residual and ReLU needs; else None."""
    if residual is None or activation is None:
        return None
    return y.new_empty(_pixels_of(y).items if y.numel() else 0, dtype=torch.uint8)


def _is_above(mask: Tensor, y: Tensor) -> Tensor:
    """The same as an array of the shape of y, which lies as it did when the mask was made."""
    shape, item = y.shape, _pixels_of(y).item
    above = mask.unsqueeze(-1).bitwise_right_shift(torch.arange(item, dtype=torch.uint8, device=mask.device)).bitwise_and(1) > 0
    return above.view(shape) if _order(y) is None else above.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


def _normalised(
    y: Tensor, statistics: Tensor, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None, activation: batch_norm.Activation,
    mask: Tensor | None = None,
) -> Tensor:
    """The layer's result from y and the `statistics` of :func:`_statistics`. `mask` is that of :func:`_new_mask`, if it is wanted."""
    order = _order(y)
    out: Tensor = TORCH.empty(y.shape, y, None, order)
    added = None if residual is None else TORCH.as_kernel_input(residual.detach(), order)
    given = (y, *statistics.unbind(), _like_sums(gamma, y), _like_sums(beta, y), added)
    _launch(batch_norm.forward, TORCH.signature(y), order, given, (out, mask), activation, residual is not None)
    return out


_TYPES = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))


class _Backward(NamedTuple):
    """The launches of a layer's gradients; the plans for the gradients of the input and of the filter, either of which may be missing."""

    device: Any
    launch: Launcher
    workspace: int
    pixels: batch_norm.Pixels
    by_x: Plan | None
    by_weight: Plan | None
    #: whether the kernels read a filter whose channels are last in memory; and whether they write its gradient so
    filter_last: bool
    writes_last: bool

    @property
    def filter_order(self) -> AxisOrder:
        """The order in which the filter has to lie."""
        return self.by_x.filter_order if self.by_x is not None and self.filter_last else None

    @property
    def gradient_order(self) -> AxisOrder:
        """The order in which the filter's gradient is written."""
        return self.by_weight.filter_order if self.by_weight is not None and self.writes_last else None


@remember_launches
def _backward_launches(
    y: Signature, x: Signature, weight: Signature, layout: str, layout_x: str, filter_last: bool, of_x: bool, of_weight: bool,
    summed: bool, added: bool, spec: _LayerSpec,
) -> _Backward:
    device, tune = spec.settings.device, spec.settings.tune
    own = TORCH.device(y, None)
    pixels = _pixels(y[0], TORCH.dtype_name(y[1]), layout)
    normalised, workspace = batch_norm.compiled(batch_norm.backward, pixels, own, spec.activation, spec.of_batch, summed)
    by_x = by_weight = None
    if of_x:
        call = Call(*CONV_INPUT.asked(spec.settings, x[0]))
        plan = dispatch.plan_for_call(call, TORCH, (y, weight, None, None, x if added else None), device, layout, tune)
        plan = plan.better or plan
        by_x = plan if plan.problem.layout == layout and not plan.empty else None
    if of_weight and layout == layout_x:
        call = Call(*CONV_WEIGHT.asked(spec.settings, weight[0]))
        plan = dispatch.plan_for_call(call, TORCH, (x, y, None, None, None), device, layout, tune)
        plan = plan.better or plan
        by_weight = plan if plan.problem.layout == layout and not plan.empty else None
    writes_last = by_weight is not None and by_weight.writes_filter_last and filter_last
    filter_last = by_x is not None and by_x.reads_filter_last and (filter_last or by_x.filter_order is None)

    def launch(buffers: Sequence[Any], stream: Any) -> None:
        y, dout, mean, invstd, gamma, beta, mask, x, w, more, dy, sums, masked, dx, dw, scratch = buffers
        normalised((y, dout, mean, invstd, gamma, beta, mask, dy, sums, masked, scratch), stream)
        if by_x is not None:
            by_x.launch((dy, w, 0, 0, more, dx, scratch), stream, filter_last=filter_last)
        if by_weight is not None:
            by_weight.launch((x, dy, 0, 0, 0, dw, scratch), stream, filter_last=writes_last)

    most = max(workspace, *(plan.workspace_bytes for plan in (by_x, by_weight) if plan is not None), 0)
    return _Backward(own, launch, most, pixels, by_x, by_weight, filter_last, writes_last)


def _backward_of(
    x: Tensor, weight: Tensor, y: Tensor, of_x: bool, of_weight: bool, summed: bool, added: bool, spec: _LayerSpec
) -> _Backward:
    sign, layouts = TORCH.signature, ("NCHW" if _order(y) is None else "NHWC", _layout(x, spec.settings.ndim))
    how = sign(y), sign(x), sign(weight), *layouts, bool(_order(weight)), of_x, of_weight, summed, added, spec
    found = _backward_launches(*how)
    if any(plan is not None and plan.better is not None for plan in (found.by_x, found.by_weight)):
        _backward_launches.forget(*how)
        found = _backward_launches(*how)
    return found


def _all_gradients(
    dx: Tensor | None, dweight: Tensor | None, dy: Tensor | None, x: Tensor, weight: Tensor, order: AxisOrder, of_x: bool, of_weight: bool,
    spec: _LayerSpec, added: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of input and filter, also those that the layer's own launches have not computed, in the order of their arrays."""
    if of_x:
        if dx is None:
            dx = CONV_INPUT.compute(spec.settings, dy, weight, None, x.shape)
            dx = dx if added is None else dx.add_(added)
        if (wanted := _order(x)) != order:
            dx = TORCH.empty(x.shape, x, None, wanted).copy_(dx)
    if of_weight and dweight is None:
        dweight = CONV_WEIGHT.compute(spec.settings, x, dy, None, weight.shape)
    return dx, dweight


def _inference(
    x: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None,
    running_mean: Tensor, running_var: Tensor, eps: float, spec: _LayerSpec,
) -> Tensor:
    """The layer by the running statistics, without gradients."""
    asked = asked_for(spec.settings, spec.activation, eps)
    return evaluation._evaluate(asked, x, weight, bias, gamma, beta, running_mean, running_var, residual)


def _were_written(running: Sequence[Tensor | None], batches: Tensor | None, counted: bool) -> None:
    """Tell torch of the tensors that kernels wrote to: running statistics, and the number of batches if they `counted`.

    Where batches are counted, that tells of the statistics too, as with torch's own batch normalisation. Torch keeps the statistics for its
    gradient, and a module may be called twice.
    """
    written = running if batches is None else (batches,) * counted
    torch_internals.increment_versions([one for one in written if one is not None])


def _counted_by_kernels(batches: Tensor, x: Tensor) -> bool:
    """Whether the kernels can count the batches: in torch, adding a number takes the host as long as two of their launches."""
    return TORCH.on_gpu(x) and batches.device == x.device and batches.dtype is torch.int64 and not _traced(batches, batches, None)
