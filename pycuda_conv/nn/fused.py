"""Convolution, batch normalisation, the sum with a residual and an activation in one layer, trained and evaluated.

A forward pass in training is the convolution and one pass over its result y. On Hopper's tensor cores the convolution notes the statistics
of its tiles while it has them; elsewhere they take a pass of their own. The input, the filter and y are kept for the backward pass. The
normalised y, the ReLU's mask and the derivatives of other activations are not kept but computed again. The mask of a sum with a residual is
read off the layer's result, which the layers after it keep anyway.

The backward pass reads its arrays twice. One pass computes the sums and the residual's gradient. The other computes the gradient of y, from
which the gradients of input and filter are convolved. It takes y's own place, unless the graph is kept for another pass or hooks got the
saved tensors. Where something else reads the layer's input too, the launch that convolves adds that gradient.

Evaluated without gradients, the layer is a convolution whose kernel reads the norm's vectors: see :mod:`pycuda_conv.nn.evaluation`.

A repeated pass of a training step is one call of the launcher in C, which makes all its launches: see :mod:`pycuda_conv.quick`. Layers are
called in one of two ways, as the convolutions are (see :mod:`pycuda_conv.nn.autograd`). One is a ``torch.autograd.Function``. The other,
where torch has to see operators, is ``torch.ops.pycuda_conv.fused_*``; to dispatch these takes the host longer than all the rest. A forward
pass with gradients then takes two operators. The first computes the statistics, moves the running ones and has no gradient of its own. The
second is the layer as a function of input, filter and parameters, with the whole gradient. Torch adds a residual after them.

S. Ioffe and C. Szegedy, 'Batch normalization: accelerating deep network training by reducing internal covariate shift' (2015).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pycuda_conv import dispatch, execute, quick
from pycuda_conv.arrays import Signature, torch_internals
from pycuda_conv.arrays.tensors import TORCH
from pycuda_conv.call import Call
from pycuda_conv.engines.geometry import bits, from_bits
from pycuda_conv.engines.nn import batch_norm
from pycuda_conv.errors import ConvArgumentError, brief
from pycuda_conv.memo import launches_are_in, remember_launches
from pycuda_conv.nn import evaluation, operators
from pycuda_conv.nn.autograd import (
    CONV,
    CONV_INPUT,
    CONV_WEIGHT,
    Settings,
    _cast,
    _differentiated,
    _empty_like,
    _in_numbers,
    _is_batched,
    _layout,
    _traced,
    activated,
    call_operator,
    count_flops,
    flops,
    without_autocast,
    without_gaps,
)
from pycuda_conv.nn.modules import in_pairs
from pycuda_conv.plan import Plan
from pycuda_conv.problem import ACTIVATIONS, PRECISIONS, activation_and_slope, channels_last, check_precision, checked_activation
from pycuda_conv.runtime import Device
from pycuda_conv.runtime.base import Launcher
from pycuda_conv.typing import Precision

__all__ = ["FusedConvBnReLU1d", "FusedConvBnReLU2d", "FusedConvBnReLU3d"]


class _LayerSpec(NamedTuple):
    """The options of a layer."""

    #: in the form of :func:`pycuda_conv.problem.checked_activation`
    activation: batch_norm.Activation
    #: whether the statistics are those of the batch
    of_batch: bool
    #: the options of the convolution, in numbers
    settings: Settings

    def in_integers(self) -> list[int]:
        """The options as a flat list of ints for operators: the dispatcher's cost grows with the number of arguments.

        They are number and slope of the activation, of_batch, number of the precision, groups; then for each axis stride, padding before,
        padding after, dilation. The slope is the bits of a float64.
        """
        _, strides, paddings, dilations, groups, precision, *_ = self.settings
        number, slope = activation_and_slope(self.activation)
        spec = [number, bits(slope, 8), int(self.of_batch), PRECISIONS.index(precision), groups]
        for stride, padding, dilation in zip(strides, paddings, dilations, strict=True):
            spec += stride, *padding, dilation
        return spec

    @classmethod
    def of(cls, spec: Sequence[int]) -> _LayerSpec:
        """The options from the list of :meth:`in_integers`."""
        number, slope, of_batch, precision, groups, *axes = spec
        word = ACTIVATIONS[number]
        activation = checked_activation((word, from_bits(slope, 8)) if word == "leaky_relu" else word)
        stride, padding, dilation = tuple(axes[::4]), tuple(zip(axes[1::4], axes[2::4], strict=True)), tuple(axes[3::4])
        settings = Settings(len(stride), stride, padding, dilation, groups, PRECISIONS[precision], None, False)
        return cls(activation, bool(of_batch), settings)


# ---- what is computed

#: The axes of an array as they lie in memory, outermost first; None for C order.
_Order = tuple[int, ...] | None


def _order(x: Tensor) -> _Order:
    """The order in which `x` counts as lying, as :mod:`pycuda_conv.arrays` says: C order or channels last."""
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


@lru_cache(maxsize=1024)
def _compiled(maker: batch_norm.Maker, like: Signature, order: _Order, *options: Any) -> tuple[Device, Launcher, int] | None:
    """The device, launcher and workspace bytes of `maker` for arrays (N, K, *size) of that signature; None for arrays without elements."""
    shape, dtype, _ = like
    if not math.prod(shape):
        return None
    device = TORCH.device(like, None)
    pixels = _pixels(shape, TORCH.dtype_name(dtype), "NHWC" if order else "NCHW")
    return device, *batch_norm.compiled(maker, pixels, device, *options)


def _launch(
    maker: batch_norm.Maker, like: Signature, order: _Order, inputs: Sequence[Tensor | None], outs: Sequence[Tensor | None], *options: Any
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
    def filter_order(self) -> _Order:
        """The order in which the filter has to lie."""
        return self.plan.filter_order if self.filter_last else None


@remember_launches
def _forward_launches(
    x: Signature, weight: Signature, bias: Signature | None, layout: str, filter_last: bool, momentum: float, eps: float, spec: _LayerSpec
) -> _Forward:
    device, tune = spec.settings.device, spec.settings.tune
    call = Call(*CONV.asked(spec.settings, ()))
    pixels = _pixels(CONV.shape(spec.settings, x[0], weight[0], ()), TORCH.dtype_name(x[1]), layout)
    noted = spec.of_batch and not (0 not in x[0] and pixels.whole)
    plan = dispatch.plan_for_call(call, TORCH, (x, weight, bias, None, None), device, layout, tune, noted)
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


def _normalised(
    y: Tensor, statistics: Tensor, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None, activation: batch_norm.Activation
) -> Tensor:
    """The layer's result from y and the `statistics` of :func:`_statistics`."""
    order = _order(y)
    out: Tensor = TORCH.empty(y.shape, y, None, order)
    added = None if residual is None else TORCH.as_kernel_input(residual.detach(), order)
    given = (y, *statistics.unbind(), _like_sums(gamma, y), _like_sums(beta, y), added)
    _launch(batch_norm.forward, TORCH.signature(y), order, given, (out,), activation, residual is not None)
    return out


def normalised_by(x: Tensor, statistics: Tensor, beta: Tensor | None, activation: batch_norm.Activation) -> Tensor | None:
    """Batch normalisation by given `statistics`, the mean and a factor, and an activation; None where torch has to compute it.

    `statistics` and `beta` are float64 for float64 arrays, and float32 for all others.
    """
    if x.dim() < 3 or x.dtype not in _TYPES or statistics.dtype is not _sums_dtype(x) or x.shape[1] != statistics.shape[1]:
        return None
    if _traced(x, x, None):
        return None
    return _normalised(TORCH.as_kernel_input(x, _order(x)), statistics, None, beta, None, activation)


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
    def filter_order(self) -> _Order:
        """The order in which the filter has to lie."""
        return self.by_x.filter_order if self.by_x is not None and self.filter_last else None

    @property
    def gradient_order(self) -> _Order:
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
        y, dout, mean, invstd, gamma, beta, out, x, w, more, dy, sums, masked, dx, dw, scratch = buffers
        normalised((y, dout, mean, invstd, gamma, beta, out, dy, sums, masked, scratch), stream)
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


def _backward(
    dout: Tensor, x: Tensor, weight: Tensor, gamma: Tensor | None, beta: Tensor | None, y: Tensor, out: Tensor | None, statistics: Tensor,
    of_x: bool, of_weight: bool, spec: _LayerSpec, added: Tensor | None = None, spent: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """The gradients of input and filter, where asked for, of beta and gamma as one array (2, K), and of a residual.

    The residual's is computed if `out` is given, the layer's result after sum and ReLU; in a sum without ReLU it is dout. `added` is added
    to the gradient of the input. If y is `spent`, nobody reads it again, and its gradient takes its place.
    """
    operands = dout, x, weight, gamma, beta, y, out, statistics, added if of_x else None
    order = _order(y)
    dx = dweight = None
    y = TORCH.as_kernel_input(y, order)  # saved tensors may come back in another order than they were saved in
    dy, sums = y if spent else TORCH.empty(y.shape, y, None, order), _new_statistics(y)
    masked = None if out is None else TORCH.empty(y.shape, y, None, order)
    if y.numel():
        found = _backward_of(x, weight, y, of_x, of_weight, out is not None, added is not None, spec)
        by_x, by_weight = found.by_x is not None, found.by_weight is not None
        dx = TORCH.empty(x.shape, x, None, order) if by_x else None
        dweight = TORCH.empty(weight.shape, weight, None, found.gradient_order) if by_weight else None
        given = (
            y, TORCH.as_kernel_input(dout, order), *statistics.unbind(), _like_sums(gamma, y), _like_sums(beta, y),
            None if out is None else TORCH.as_kernel_input(out, order), TORCH.as_kernel_input(x, order) if by_weight else None,
            TORCH.as_kernel_input(weight, found.filter_order) if by_x else None,
            None if added is None or not by_x else TORCH.as_kernel_input(added, order),
        )
        execute.launch(TORCH, found.device, found.launch, given, (dy, sums, masked, dx, dweight), found.workspace)
        del given  # a copy of dout must be gone before the convolutions take its memory
        if quick.possible():
            _remember_backward(operands, of_x, of_weight, spec, spent, found)
    return *_all_gradients(dx, dweight, dy, x, weight, order, of_x, of_weight, spec, added), sums, masked


def _all_gradients(
    dx: Tensor | None, dweight: Tensor | None, dy: Tensor | None, x: Tensor, weight: Tensor, order: _Order, of_x: bool, of_weight: bool,
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
    _, stride, padding, dilation, groups, precision, *_ = spec.settings
    asked = "conv", stride, padding, dilation, groups, precision, 0, spec.activation, eps
    return evaluation._evaluate(asked, x, weight, bias, gamma, beta, running_mean, running_var, residual)


# ---- repeated steps

#: Forward and backward passes by their keys, for the launcher in C: all launches of a pass as one row, and the layer's options.
_again: quick.Table = {}
launches_are_in(_again.clear)


def _readable(array: Tensor | None, order: _Order) -> bool:
    """Whether kernels can read the array as it is; True for None."""
    return array is None or TORCH.is_kernel_input(array, order)


def _count_as_sums(y: Tensor, *of_channels: Tensor | None) -> bool:
    """Whether kernels can read these arrays as they are; each has one value a channel of y."""
    return all(_like_sums(one, y) is one for one in of_channels)


def _remember_forward(
    asked: tuple[Any, ...], operands: Sequence[Tensor | None], momentum: float, eps: float, spec: _LayerSpec, counts: bool, made: Tensor
) -> None:
    """Put a forward pass that was just `made` into the table. `operands` are those of its key. It `counts` batches if it should."""
    x, residual, weight, bias, gamma, beta, running_mean, running_var, _ = operands
    assert x is not None and weight is not None
    found = _forward_of(x, weight, bias, momentum, eps, spec)
    plan, name = found.plan, quick.key(asked, *operands) if found.plan.may_be_repeated else None
    if name is None or name in _again or plan.device.capturing():
        return
    ready = None
    layouts = {_layout(x, spec.settings.ndim), _layout(made, spec.settings.ndim), plan.problem.layout}
    fit = _readable(x, plan.order) and _readable(weight, found.filter_order) and _readable(bias, None) and _readable(residual, plan.order)
    if fit and _count_as_sums(made, gamma, beta, running_mean, running_var) and len(layouts) == 1:
        count = len(operands)
        # x, residual, w, bias, gamma, beta, running mean and variance, batches | y, mean and invstd, out | workspace | none
        ax, ar, aw, ab, ag, at, am, av, an, ay, mean, ao, scratch, none = ((i, 0) for i in range(count + 5))
        pixels, processors = _pixels(plan.result_shape, plan.problem.dtype, plan.problem.layout), plan.device.multiprocessors
        invstd = mean[0], pixels.K * pixels.sum_bytes
        statistics, nbytes = batch_norm.statistics(pixels, processors, eps, momentum, plan.schedule.moments)
        nbytes = max(nbytes, plan.workspace_bytes)
        if nbytes <= made.nbytes:  # out is written last and has room for the workspace
            scratch, nbytes = ao, 0
        tracked, counted = (none, an) if counts else (an, none)
        steps, asked_for = quick.steps_of(plan, found.filter_last, (ax, aw, ab, ay, scratch, none)), (spec.activation, residual is not None)
        if plan.schedule.moments is None and pixels.whole:
            both, _ = batch_norm.whole_forward(pixels, processors, eps, momentum, *asked_for)
            steps += quick.moved([[one] for one in both], (ay, tracked, ag, at, ar, mean, invstd, am, av, counted, ao))
        else:
            normalised, _ = batch_norm.forward(pixels, processors, *asked_for)
            steps += quick.moved([[one] for one in statistics], (ay, tracked, mean, invstd, am, av, counted, scratch))
            steps += quick.moved([[one] for one in normalised], (ay, mean, invstd, ag, at, ar, ao))
        y = TORCH.maker(plan.result_shape, x.dtype, x.device, plan.order)
        results = y, TORCH.maker((2, pixels.K), _sums_dtype(x), x.device, None), y
        ready = quick.row(TORCH, plan.device, steps, x, count, results, nbytes)
    quick.put(_again, name, None if ready is None else (ready, spec), plan)


def _asked_forward(conv: Any, bn: Any, activation: batch_norm.Activation, precision: str) -> tuple[Any, ...] | None:
    """The options in a forward pass's key; None for one that is not remembered."""
    if not quick.possible():
        return None
    own, of_norm = conv.__dict__, bn.__dict__  # a module's attributes are slow
    try:
        if not of_norm["training"] or not of_norm["track_running_stats"] or own["padding_mode"] != "zeros":
            return None
        options = own["stride"], own["padding"], own["dilation"], own["groups"], precision
        return activation, of_norm["momentum"], of_norm["eps"], *options
    except KeyError:  # a class of the caller's computes some of them
        return None


def _forward_again(asked: tuple[Any, ...], input: Tensor, residual: Any, tensors: tuple[Any, ...], passes_on: bool) -> Any:
    """The layer by a repeated forward pass, in a call that torch is told of; else None. `tensors` are those of :func:`_tensors`."""
    weight, bias, gamma, beta, running_mean, running_var, batches = tensors
    counts = asked[1] is not None
    if not counts and batches is not None:  # the kernels take the mean over batches, this one included
        if quick.key(asked, input, residual, *tensors) not in _again:
            return None
        batches.add_(1)
    made = quick.again(_again, asked, input, residual, *tensors)
    if made is None:
        if not counts and batches is not None:
            batches.sub_(1)
        return None
    _were_written((running_mean, running_var), batches, counts)
    (_, spec), *results = made
    return _apply(input, weight, bias, gamma, beta, residual, spec, results, passes_on)


def _were_written(running: Sequence[Tensor | None], batches: Tensor | None, counted: bool) -> None:
    """Tell torch of the tensors that kernels wrote to: running statistics, and the number of batches if they `counted`.

    Where batches are counted, that tells of the statistics too, as with torch's own batch normalisation. Torch keeps the statistics for its
    gradient, and a module may be called twice.
    """
    written = running if batches is None else (batches,) * counted
    torch_internals.increment_versions([one for one in written if one is not None])


class _BackwardAgain(NamedTuple):
    """A repeated backward pass. Gradients that its row of launches does not compute are computed from dy."""

    row: Any
    makes_dy: bool
    makes_dx: bool
    makes_dweight: bool
    #: whether it computes all gradients, in the order in which they have to lie
    complete: bool


def _asked_backward(of_x: bool, of_weight: bool, spec: _LayerSpec, spent: bool) -> tuple[Any, ...]:
    activation, of_batch, (_, stride, padding, dilation, groups, precision, *_) = spec
    return activation, int(of_batch), stride, padding, dilation, groups, precision, int(of_x), int(of_weight), int(spent)


def _backward_again(
    dout: Tensor, x: Tensor, weight: Tensor, gamma: Tensor | None, beta: Tensor | None, y: Tensor, out: Tensor | None, statistics: Tensor,
    of_x: bool, of_weight: bool, spec: _LayerSpec, added: Tensor | None = None, spent: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None] | None:
    """The same as :func:`_backward`, by a repeated pass; else None."""
    if not quick.possible():
        return None
    operands = dout, x, weight, gamma, beta, y, out, statistics, added if of_x else None
    made = quick.again(_again, _asked_backward(of_x, of_weight, spec, spent), *operands)
    if made is None:
        return None
    again, sums, *results = made
    masked = None if out is None else results.pop(0)
    dy = results.pop(0) if again.makes_dy else y
    dx = results.pop(0) if again.makes_dx else None
    dweight = results.pop(0) if again.makes_dweight else None
    if not again.complete:
        dx, dweight = _all_gradients(dx, dweight, dy, x, weight, _order(y), of_x, of_weight, spec, added)
    return dx, dweight, sums, masked


def _remember_backward(
    operands: Sequence[Any], of_x: bool, of_weight: bool, spec: _LayerSpec, spent: bool, found: _Backward
) -> None:
    """Put a backward pass into the table. `operands` are those of :func:`_backward`."""
    plans = [plan for plan in (found.by_x, found.by_weight) if plan is not None]
    name = quick.key(_asked_backward(of_x, of_weight, spec, spent), *operands) if all(plan.may_be_repeated for plan in plans) else None
    if name is None or name in _again or found.device.capturing():
        return
    dout, x, weight, gamma, beta, y, out, statistics, added = operands
    order, pixels, ready = _order(y), found.pixels, None
    makes_dx, makes_dweight = found.by_x is not None, found.by_weight is not None
    needs_dy = of_x > makes_dx or of_weight > makes_dweight
    makes_dy = needs_dy and not spent
    fit = all(_readable(one, order) for one in (y, dout, out)) and _count_as_sums(y, gamma, beta) and TORCH.contiguous(statistics)
    fit = fit and (not makes_dx or (_readable(weight, found.filter_order) and _readable(added, order)))
    if fit and (not makes_dweight or _readable(x, order)):
        count = len(operands)
        # dout, x, w, gamma, beta, y, out, mean and invstd, what is added to dx | sums, and masked dout, dy, dx, dw if they are computed |
        # workspace | none
        ad, ax, aw, ag, at, ay, ao, mean, ap, sums, *more = ((i, 0) for i in range(count + 7))
        masked = None if out is None else more.pop(0)
        dy = more.pop(0) if makes_dy else None
        dx, dw = (more.pop(0) if made else None for made in (makes_dx, makes_dweight))
        scratch, none, *_ = more
        nbytes, by_x, by_weight = found.workspace, found.by_x, found.by_weight
        if by_x is not None and by_weight is not None:
            nbytes = max(nbytes, quick.bytes_of_row(by_x, found.filter_last, by_weight, found.writes_last))
        if spent:
            dy = ay
        elif dy is None:  # then dy is workspace
            start = -(-nbytes // 512) * 512
            dy, nbytes = (scratch[0], start), start + y.nbytes
        invstd = mean[0], pixels.K * pixels.sum_bytes
        normalised, _ = batch_norm.backward(pixels, found.device.multiprocessors, spec.activation, spec.of_batch, out is not None)
        steps = quick.moved([[one] for one in normalised], (ay, ad, mean, invstd, ag, at, ao, dy, sums, masked or none, scratch))
        results = [TORCH.maker((2, pixels.K), _sums_dtype(y), y.device, None)]
        if masked is not None:
            results.append(TORCH.maker(tuple(y.shape), y.dtype, y.device, order))
        if makes_dy:
            results.append(TORCH.maker(tuple(y.shape), y.dtype, y.device, order))
        for_dx, for_dw = (dy, aw, none, dx or none, scratch, none), (ax, dy, none, dw or none, scratch, none)
        residual = None if added is None else ap
        if by_x is not None and by_weight is not None:
            steps += quick.in_a_row(by_x, found.filter_last, for_dx, by_weight, found.writes_last, for_dw, residual)
        elif by_x is not None:
            steps += quick.steps_of(by_x, found.filter_last, for_dx, residual)
        elif by_weight is not None:
            steps += quick.steps_of(by_weight, found.writes_last, for_dw)
        if by_x is not None:
            results.append(TORCH.maker(tuple(x.shape), x.dtype, x.device, order))
        if by_weight is not None:
            results.append(TORCH.maker(tuple(weight.shape), weight.dtype, weight.device, found.gradient_order))
        ready = quick.row(TORCH, found.device, steps, y, count, results, nbytes)
    complete = not needs_dy and (not of_x or _order(x) == order)
    again = None if ready is None else _BackwardAgain(ready, makes_dy, makes_dx, makes_dweight, complete)
    quick.put(_again, name, again, *plans)


# ---- the two ways


def _save(
    ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, y: Tensor, out: Tensor | None,
    statistics: Tensor, spec: _LayerSpec,
) -> None:
    ctx.layer = spec, None if bias is None else bias.dtype, TORCH.on_gpu(y) and torch_internals.packing_hooks(True) is None
    ctx.save_for_backward(x, weight, gamma, beta, y, out, statistics, None if spec.of_batch else bias)


def _gradients(ctx: Any, dout: Tensor, added: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """The gradients by x, weight, bias, gamma, beta and a residual, whether there is one or not. `added` is added to the first."""
    x, weight, gamma, beta, y, out, statistics, bias = ctx.saved_tensors
    of_x, of_weight, of_bias, of_gamma, of_beta, *_ = ctx.needs_input_grad
    (spec, bias_dtype, own_y), given = ctx.layer, (dout, x, weight, gamma, beta, y, out, statistics, of_x, of_weight)
    twice = torch.is_grad_enabled()
    if twice and not (_traced(x, weight, gamma, beta, dout) or _is_batched(dout)):
        return _differentiable_gradients(ctx, dout, added, bias)
    spent = own_y and not twice and not torch_internals.keeps_graph()
    made = None if twice else _backward_again(*given, spec, added, spent)
    if made is None and not (twice or _traced(x, weight, gamma, beta, dout) or _is_batched(dout)):
        dense = without_gaps(dout, _order(y))
        if dense is not dout:
            dout, given = dense, (dense, *given[1:])
            made = _backward_again(*given, spec, added, spent)
    if made is None and (twice or _traced(x, weight, gamma, beta, dout) or _is_batched(dout)):
        if out is not None:
            dout, spec = dout.masked_fill(out <= 0, 0), spec._replace(activation=None)
        dx, dweight, sums = _FirstDerivatives.apply(
            dout, x, weight, gamma, beta, y, statistics, of_x, of_weight, spec.in_integers()
        )
        made = dx if added is None or not of_x else dx + added, dweight, sums, None
    dx, dweight, sums, masked = _backward(*given, spec, added, spent) if made is None else made
    dbias = None
    if of_bias:
        if spec.of_batch:  # the batch's mean removes a bias
            dbias = torch.zeros_like(sums[0], dtype=bias_dtype)
        else:
            dbias = (sums[0] * (statistics[1] if gamma is None else statistics[1] * gamma)).to(bias_dtype)
    dgamma = dbeta = None
    if of_gamma or of_beta:
        by_beta, by_gamma = sums.unbind()
        dgamma = _cast_to(gamma, by_gamma) if of_gamma else None
        dbeta = _cast_to(beta, by_beta) if of_beta else None
    return dx if of_x else None, dweight if of_weight else None, dbias, dgamma, dbeta, dout if masked is None else masked


def _differentiable_gradients(ctx: Any, dout: Tensor, added: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    """The same as :func:`_gradients`, in operations that torch differentiates in their turn."""
    x, weight, gamma, beta, _, out, (mean, invstd), _ = ctx.saved_tensors
    (spec, bias_dtype, _), needed = ctx.layer, ctx.needs_input_grad
    shape, activation = (-1, *(1,) * spec.settings.ndim), spec.activation
    if out is not None:  # a sum with a residual, and a ReLU
        dout, activation = dout.masked_fill(out <= 0, 0), None
    y = call_operator(CONV, spec.settings, x, weight, bias, ()).to(mean.dtype)
    if spec.of_batch:  # the numbers are those of the forward pass, and the derivatives those of mean and variance
        axes = [axis for axis in range(y.dim()) if axis != 1]
        y = y - y.mean(axes, keepdim=True)
        variance = y.square().mean(axes)
        invstd = (invstd**-2 + (variance - variance.detach())) ** -0.5
    else:
        y = y - mean.view(shape)
    factor = invstd if gamma is None else invstd * gamma.to(mean.dtype)
    z = y * factor.view(shape)
    z = z if beta is None else z + beta.to(mean.dtype).view(shape)
    z = activated(z.to(dout.dtype), activation)
    of_bias = needed[2] and not spec.of_batch
    asked = needed[0], needed[1], of_bias, needed[3], needed[4]
    wanted = [one for one, is_asked in zip((x, weight, bias, gamma, beta), asked, strict=True) if is_asked]
    found = iter(torch.autograd.grad(z, wanted, dout, create_graph=True) if wanted else ())
    dx, dweight, dbias, dgamma, dbeta = (next(found) if is_asked else None for is_asked in asked)
    if needed[2] and spec.of_batch:  # the batch's mean removes a bias
        dbias = torch.zeros_like(mean, dtype=bias_dtype)
    if dx is not None and added is not None:
        dx = dx + added
    return dx, dweight, dbias, dgamma, dbeta, dout


def _cast_to(parameter: Tensor, gradient: Tensor) -> Tensor:
    return gradient if gradient.dtype is parameter.dtype else gradient.to(parameter.dtype)


class _Function(torch.autograd.Function):
    """A layer's forward pass, of which it tells torch where torch need not see operators.

    The pass is `made` already: y, the statistics and the result. Where it `passes_on` the input for other readers, the input is a second
    result. Then the gradients of both uses meet here, and the launch that convolves one adds the other.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: Any, gamma: Any, beta: Any, residual: Any, spec: _LayerSpec, made: Sequence[Tensor],
        passes_on: bool,
    ) -> Any:
        y, statistics, out = made
        _save(ctx, x, weight, bias, gamma, beta, y, out if spec.activation and residual is not None else None, statistics, spec)
        if not passes_on:
            return out
        ctx.set_materialize_grads(False)  # if nothing else read the input, there is nothing to add
        return out, x

    @staticmethod
    def backward(ctx: Any, dout: Any, added: Any = None) -> Any:
        if dout is None:
            return added, *(None,) * 8
        dx, dweight, dbias, dgamma, dbeta, by_residual = _gradients(ctx, dout, added)
        return dx, dweight, dbias, dgamma, dbeta, by_residual if ctx.needs_input_grad[5] else None, None, None, None


#: ``_Function.apply`` without checks that the launcher in C has already made. They take 3 us.
_apply = super(torch.autograd.Function, _Function).apply


# ---- the operators. Traces of torch.jit call them with gradients switched on.


@torch.no_grad()
def _fused_statistics(
    x: Tensor, weight: Tensor, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None, tracked: Tensor | None,
    momentum: float, eps: float, spec: Sequence[int],
) -> tuple[Tensor, Tensor]:
    return _statistics(x, weight, bias, running_mean, running_var, tracked, momentum, eps, _LayerSpec.of(spec))


def _fake_statistics(
    x: Tensor, weight: Tensor, bias: Any, running_mean: Any, running_var: Any, tracked: Any, momentum: float, eps: float,
    spec: Sequence[int],
) -> tuple[Tensor, Tensor]:
    settings = _LayerSpec.of(spec).settings
    y = _empty_like(x, CONV.shape(settings, x.shape, weight.shape, ()), settings.ndim)
    return y, _new_statistics(y)


@lru_cache(maxsize=4096)
def _known(spec: tuple[int, ...]) -> _LayerSpec:
    return _LayerSpec.of(spec)


def _asked_of(spec: _LayerSpec, momentum: float, eps: float) -> tuple[Any, ...]:
    """The options in a forward pass's key, as :func:`_asked_forward` gives them."""
    _, stride, padding, dilation, groups, precision, *_ = spec.settings
    return spec.activation, momentum, eps, stride, padding, dilation, groups, precision


@torch.no_grad()
def _fused_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, residual: Tensor | None, momentum: float, eps: float, spec: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """The layer by the batch's statistics, its convolution y, and the statistics; the running ones move."""
    options = _known(tuple(spec))
    asked, operands = _asked_of(options, momentum, eps), (x, residual, weight, bias, gamma, beta, running_mean, running_var, None)
    made = quick.again(_again, asked, *operands) if quick.possible() else None
    if made is not None:
        _, y, statistics, out = made
        return out, y, statistics
    y, statistics = _statistics(x, weight, bias, running_mean, running_var, None, momentum, eps, options)
    out = _normalised(y, statistics, gamma, beta, residual, options.activation)
    if quick.possible():
        _remember_forward(asked, operands, momentum, eps, options, True, out)
    return out, y, statistics


def _fake_forward(
    x: Tensor, weight: Tensor, bias: Any, gamma: Any, beta: Any, running_mean: Any, running_var: Any, residual: Any, momentum: float,
    eps: float, spec: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    y, statistics = _fake_statistics(x, weight, bias, running_mean, running_var, None, momentum, eps, spec)
    return torch.empty_like(y), y, statistics


class _OfOneOperator(torch.autograd.Function):
    """A layer's forward pass that ``fused_forward`` has made: y, the statistics and the result."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: Any, gamma: Any, beta: Any, residual: Any, spec: _LayerSpec, made: Sequence[Tensor]
    ) -> Any:
        out, y, statistics = made
        _save(ctx, x, weight, bias, gamma, beta, y, out if spec.activation and residual is not None else None, statistics, spec)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        *gradients, by_residual = _gradients(ctx, dout)
        return *gradients, by_residual if ctx.needs_input_grad[5] else None, None, None


def _fused_layer(
    x: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, residual: Tensor | None, momentum: float, eps: float, spec: Sequence[int],
) -> Any:
    with torch.no_grad():
        made = torch.ops.pycuda_conv.fused_forward.default(
            x, weight, bias, gamma, beta, running_mean, running_var, residual, momentum, eps, spec
        )
    return _OfOneOperator.apply(x, weight, bias, gamma, beta, residual, _known(tuple(spec)), made)


@torch.no_grad()
def _frozen_statistics(
    x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float, spec: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """What :func:`_fused_statistics` gives by given statistics. That operator is said to write to them, so a checkpoint would fail."""
    return _statistics(x, weight, bias, mean, var, None, 0.0, eps, _LayerSpec.of(spec))


def _fake_frozen(x: Tensor, weight: Tensor, bias: Any, mean: Tensor, var: Tensor, eps: float, spec: Sequence[int]) -> tuple[Tensor, Tensor]:
    return _fake_statistics(x, weight, bias, None, None, None, 0.0, eps, spec)


@torch.no_grad()
def _fused_normalised(y: Tensor, statistics: Tensor, gamma: Tensor | None, beta: Tensor | None, spec: Sequence[int]) -> Tensor:
    y = TORCH.as_kernel_input(y, _order(y))  # a compiler of torch's may have laid it out in another order
    return _normalised(y, statistics, gamma, beta, None, _LayerSpec.of(spec).activation)


def _fake_normalised(y: Tensor, statistics: Any, gamma: Any, beta: Any, spec: Any) -> Tensor:
    return cast(Tensor, _empty_like(y, y.shape, y.dim() - 2))


@torch.no_grad()
def _fused_backward(
    dout: Tensor, x: Tensor, weight: Tensor, gamma: Tensor | None, beta: Tensor | None, y: Tensor, statistics: Tensor, of_x: bool,
    of_weight: bool, spec: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as :func:`_backward`; gradients that are not asked for have no elements."""
    given = dout, x, weight, gamma, beta, y, None, statistics, of_x, of_weight, _LayerSpec.of(spec)
    dx, dweight, sums, _ = _backward_again(*given) or _backward(*given)
    dweight = weight.new_empty(0) if dweight is None else TORCH.as_kernel_input(dweight, _order(weight))
    return x.new_empty(0) if dx is None else dx, dweight, sums


def _fake_backward(
    dout: Tensor, x: Tensor, weight: Tensor, gamma: Any, beta: Any, y: Tensor, statistics: Any, of_x: bool, of_weight: bool, spec: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dx = _empty_like(x, x.shape, x.dim() - 2) if of_x else x.new_empty(0)
    dweight = _empty_like(weight, weight.shape, weight.dim() - 2) if of_weight else weight.new_empty(0)
    return dx, dweight, _new_statistics(y)


class _OfOperators(torch.autograd.Function):
    """The layer, given the results of ``fused_statistics`` for the same `x`, `weight` and `bias`; its gradients are those of both."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, gamma: Any, beta: Any, y: Any, statistics: Any, spec: Sequence[int]) -> Any:
        _save(ctx, x, weight, bias, gamma, beta, y, None, statistics, _LayerSpec.of(spec))
        return torch.ops.pycuda_conv.fused_normalised.default(y, statistics, gamma, beta, spec)

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        *gradients, _ = _gradients(ctx, dout)
        return *gradients, None, None, None


class _FirstDerivatives(torch.autograd.Function):
    """The gradients by operators, which have no derivatives themselves."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        return torch.ops.pycuda_conv.fused_conv_bn_relu_backward.default(*given)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(
            "the fused layer's operators have no second derivatives; outside of torch.compile and torch.func it has them"
        )


def _fused_conv_bn_relu(*given: Any) -> Any:
    return _OfOperators.apply(*given)


def _fused_inference(
    x: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, running_mean: Tensor, running_var: Tensor,
    eps: float, spec: Sequence[int],
) -> Any:
    """The name by which programs that were exported before know a layer in evaluation."""
    activation, _, settings = _LayerSpec.of(spec)
    _, stride, padding, dilation, groups, precision, *_ = settings
    options = evaluation.spec_of(
        len(stride), weight.shape[2:], stride=stride, padding=padding, dilation=dilation, groups=groups, precision=precision,
        activation=activation,
    )  # fmt: skip
    vectors = gamma, beta, running_mean, running_var
    return torch.ops.pycuda_conv.evaluate.default(x, weight, bias, *vectors, None, eps, options)


_LAYER = "Tensor x, Tensor weight, Tensor? bias, Tensor? gamma, Tensor? beta"
operators.define(
    "fused_statistics(Tensor x, Tensor weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor? tracked, "
    "float momentum, float eps, int[] spec) -> (Tensor, Tensor)",
    _fused_statistics, _fake_statistics,
)  # fmt: skip
_TRAINED = (
    f"{_LAYER}, Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor? residual, float momentum, float eps, int[] spec"
)
operators.define(f"fused_forward({_TRAINED}) -> (Tensor, Tensor, Tensor)", _fused_forward, _fake_forward)
operators.define_by_others(f"fused_layer({_TRAINED}) -> Tensor", _fused_layer)
operators.define(
    "frozen_statistics(Tensor x, Tensor weight, Tensor? bias, Tensor mean, Tensor var, float eps, int[] spec) -> (Tensor, Tensor)",
    _frozen_statistics, _fake_frozen,
)  # fmt: skip
operators.define(
    "fused_normalised(Tensor y, Tensor statistics, Tensor? gamma, Tensor? beta, int[] spec) -> Tensor", _fused_normalised, _fake_normalised
)
operators.define(
    "fused_conv_bn_relu_backward(Tensor dout, Tensor x, Tensor weight, Tensor? gamma, Tensor? beta, Tensor y, Tensor statistics, "
    "bool of_x, bool of_weight, int[] spec) -> (Tensor, Tensor, Tensor)",
    _fused_backward, _fake_backward,
)  # fmt: skip
operators.define_by_others(f"fused_conv_bn_relu({_LAYER}, Tensor y, Tensor statistics, int[] spec) -> Tensor", _fused_conv_bn_relu)
operators.define_by_others(
    f"fused_inference({_LAYER}, Tensor running_mean, Tensor running_var, float eps, int[] spec) -> Tensor", _fused_inference
)


def _forward_flops(x: Any, weight: Any, *rest: Any, out_shape: Any) -> int:
    return flops(out_shape, weight)


def _statistics_flops(x: Any, weight: Any, *rest: Any, out_shape: Any) -> int:
    return flops(out_shape[0], weight)


def _backward_flops(
    dout: Any, x: Any, weight: Any, gamma: Any, beta: Any, y: Any, statistics: Any, of_x: bool, of_weight: bool, spec: Any, *,
    out_shape: Any,
) -> int:
    return (of_x + of_weight) * flops(y, weight)


count_flops(torch.ops.pycuda_conv.fused_statistics, _statistics_flops)
count_flops(torch.ops.pycuda_conv.frozen_statistics, _statistics_flops)
count_flops(torch.ops.pycuda_conv.fused_forward, _statistics_flops)
count_flops(torch.ops.pycuda_conv.fused_inference, _forward_flops)
count_flops(torch.ops.pycuda_conv.fused_conv_bn_relu_backward, _backward_flops)


# ---- a layer as a function of tensors


class Layer:
    """A layer with given options as a function of tensors, which ``torch.compile`` calls in light mode.

    Parameters
    ----------
    activation
        In the form of :func:`pycuda_conv.problem.checked_activation`.
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
        remembers, running = spec.of_batch and quick.possible(), (running_mean, running_var)
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
        with torch.no_grad():
            y, statistics = _statistics(x, weight, bias, *running, None, momentum, eps, spec, counted)
            out = _normalised(y, statistics, gamma, beta, residual, spec.activation)
        if spec.of_batch:
            _were_written(running, batches, counted is not None)
        made = _Function.apply(*named, residual, spec, (y, statistics, out), passes_on)
        if remembers and counted is batches:
            _remember_forward(self._asked, (x, residual, *tensors), momentum, eps, spec, True, out)
        return made

    def _by_operators(self, named: Any, running: Any, batches: Tensor | None, residual: Tensor | None) -> Tensor:
        """The same where torch has to see operators."""
        if batches is not None:
            batches.add_(1)
        ours, spec = torch.ops.pycuda_conv, self._spec
        options = self._momentum, self._eps
        if spec.of_batch:
            return cast(Tensor, ours.fused_layer(*named, *running, residual, *options, spec.in_integers()))
        flat = (spec if residual is None else spec._replace(activation=None)).in_integers()
        with torch.no_grad():
            made = ours.frozen_statistics(*named[:3], *running, self._eps, flat)
        out: Tensor = ours.fused_conv_bn_relu(*named, *made, flat)
        return out if residual is None else cast(Tensor, activated(out + residual, spec.activation))


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
        with without_autocast(input) if quick.possible() else nullcontext():  # the call is then like those outside of autocast
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
    x, padding = _padded(conv, input, ndim)
    of_batch = bn.training or (running_mean is None and running_var is None)
    settings = _in_numbers(Settings(ndim, conv.stride, padding, conv.dilation, conv.groups, precision, None, False), weight.shape[2:])
    spec, named = _LayerSpec(activation, of_batch, settings), (x, weight, bias, gamma, beta)
    traced, differentiated = _traced(*named), _differentiated(*named)
    if residual is not None:
        size = torch.Size(CONV.shape(settings, x.shape, weight.shape, ()))
        if traced or not _is_added_as_it_is(residual, x, size):
            summed = _conv_bn_act(conv, bn, None, precision, ndim, input, None, tensors, False) + residual
            return summed if activation is None else torch.relu_(summed)
        differentiated = differentiated or (torch.is_grad_enabled() and residual.requires_grad)
    if not of_batch and not differentiated:
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
        with torch.no_grad():
            y, statistics = _statistics(x, weight, bias, *running, tracked, momentum, eps, spec, counted)
            out = _normalised(y, statistics, gamma, beta, residual, spec.activation)
        if of_batch:
            _were_written(running, batches, counted is not None)
        passes_on = passes_on and x is input
        made = _Function.apply(*named, residual, spec, (y, statistics, out), passes_on)
        if asked is not None and (tracked if counted is None else counted) is batches:
            _remember_forward(asked, (input, residual, *tensors), momentum, eps, spec, counted is not None, out)
        return made
    flat = spec.in_integers()
    with torch.no_grad():
        y, statistics = torch.ops.pycuda_conv.fused_statistics(x, weight, bias, running_mean, running_var, tracked, momentum, eps, flat)
    return torch.ops.pycuda_conv.fused_conv_bn_relu(*named, y, statistics, flat)


def _counted_by_kernels(batches: Tensor, x: Tensor) -> bool:
    """Whether the kernels can count the batches: in torch, adding a number takes the host as long as two of their launches."""
    return TORCH.on_gpu(x) and batches.device == x.device and batches.dtype is torch.int64 and not _traced(batches, batches, None)


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


def _padded(conv: Any, x: Tensor, ndim: int) -> tuple[Tensor, Any]:
    """`x` with the border that the convolution's mode makes, and the padding with zeros that is still to be added."""
    if conv.padding_mode != "zeros":
        return F.pad(x, conv._reversed_padding_repeated_twice, mode=conv.padding_mode), 0
    return x, conv.padding


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
