"""The norms of a network in evaluation, each as a factor and a summand of its convolution, which one launch computes for all of them.

A graph calls :func:`fold_norms` at its start, in each call. Nothing is kept between calls, so whoever writes to the norms' vectors, and
how, is noticed. The convolutions read their part of the result: :func:`scaled`. Kernels could read the four vectors themselves where they
finish a sum, but their threads would do that for each tile anew: with it ResNet-50's layers took 1.35 times as long in float16 on an H200.

Factors and summands are float32, also for 16-bit arrays, so none of them is too large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pycuda_conv import dispatch, execute, invariance, repeat
from pycuda_conv.arrays import Signature, check_same_type
from pycuda_conv.arrays.tensors import TORCH
from pycuda_conv.call import Call
from pycuda_conv.engines.nn import fold_norms as folding
from pycuda_conv.engines.nn.fold_norms import VECTORS, starts_of
from pycuda_conv.errors import ConvArgumentError
from pycuda_conv.memo import remember_launches
from pycuda_conv.nn import operators
from pycuda_conv.nn.options import asked_of, fake_result, invariant
from pycuda_conv.plan import Plan
from pycuda_conv.problem import channels_last
from pycuda_conv.repeat import RepeatTable
from pycuda_conv.runtime.base import Launcher

__all__ = ["fold_norms", "scaled", "starts_of"]

_NAMES = "gamma", "beta", "mean", "var", "bias"
_HALVES = torch.float16, torch.bfloat16
#: What the launcher in C knows of foldings of so many vectors with these eps: launches, and what the vectors must be.
_prepared = RepeatTable()
MOST_PREPARED = 4  # of the same number and eps


def fold_norms(vectors: Sequence[Tensor | None], eps: Sequence[float], wide: bool = False) -> Tensor:
    """Factors and summands of norms by given statistics, as their convolutions take them.

    Parameters
    ----------
    vectors : gamma, beta, mean and variance of each norm, and the bias of its convolution, one after the other
        (K,) tensors on one device, or None: gamma and variance are then 1, the others 0. One of gamma, beta and mean must be there, and
        no mean without a variance, nor a variance without a mean. They are float16, bfloat16 or of the result's type.
    eps : a float for each norm
        1 for one without mean and variance.
    wide : bool
        For convolutions of float64; the result is float64 then, else float32.

    Returns
    -------
    tensor
        gamma / sqrt(var + eps) and (bias - mean) * factor + beta of the norms, where :func:`starts_of` says.
    """
    name = (*eps, wide, len(vectors))
    for ready, expected in _prepared.get(name, ()):
        made: Tensor | None = repeat.fold(ready, expected, *vectors)
        if made is not None:
            return made
    return _folded(vectors, eps, wide, name)


def _folded(vectors: Sequence[Tensor | None], eps: Sequence[float], wide: bool, name: tuple[Any, ...]) -> Tensor:
    """The same in a call that is not repeated."""
    if len(vectors) != VECTORS * len(eps) or not eps:
        raise ConvArgumentError(f"vectors must be {VECTORS} for each of one or more eps, but got {len(vectors)} and {len(eps)}")
    dtype = torch.float64 if wide else torch.float32
    given = [None if one is None else one.detach() for one in vectors]
    like = next((one for one in given if one is not None), None)
    half = next((one.dtype for one in given if one is not None and one.dtype in _HALVES), dtype)
    read: list[Tensor | None] = []
    channels = []
    for i in range(len(eps)):
        some = given[VECTORS * i : VECTORS * (i + 1)]
        if like is None or (some[2] is None) != (some[3] is None) or all(one is None for one in some[:3]):
            raise ConvArgumentError(f"mean and var of norm {i} must both be given, or gamma or beta alone")
        if some[3] is None and eps[i] != 1:
            raise ConvArgumentError(f"eps of norm {i} must be 1 without mean and var, but got {eps[i]}")
        channels.append(channels_of(some))
        for word, one in zip(_NAMES, some, strict=True):
            if one is not None and (tuple(one.shape) != (channels[i],) or one.device != like.device):
                found = f"{list(one.shape)} on {one.device}"
                raise ConvArgumentError(f"{word} of norm {i} must have shape {[channels[i]]} on {like.device}, but got {found}")
            read.append(one if one is None or one.dtype in (half, dtype) else one.to(dtype))
    assert like is not None
    read = [one if one is None or one.is_contiguous() else one.contiguous() for one in read]
    device: Any = TORCH.device(TORCH.signature(like), None)
    starts, norms = starts_of(channels), []
    for i, small in enumerate(eps):
        own = range(VECTORS * i, VECTORS * (i + 1))
        of_arrays = tuple(half is not dtype and (one := read[j]) is not None and one.dtype is half for j in own)
        norms.append(folding.Norm(channels[i], starts[i], float(small), of_arrays, tuple(own)))
    at_once = folding.MOST if device.backend == "cuda" else 1
    steps = folding.fold(TORCH.dtype_name(half), norms, len(vectors), at_once)
    with torch.no_grad():
        folded = like.new_empty(starts[-1], dtype=dtype)
        _launch(device, device.schedule_launcher(steps), read, folded)
    same = all(a is b for a, b in zip(given, read, strict=True))
    if repeat.possible() and same and TORCH.on_gpu(like) and not device.capturing():
        results = [TORCH.maker((starts[-1],), dtype, like.device, None)]
        ready = repeat.launch_sequence(TORCH, device, steps, like, len(vectors), results, 0)
        prepared = _prepared.get(name, ())
        if ready is not None and len(prepared) < MOST_PREPARED:
            _prepared.put(name, [*prepared, (ready, _expected(read))])
    return folded


def channels_of(vectors: Sequence[Any]) -> Any:
    """The number of a norm's channels, from its vectors."""
    mean = vectors[2]
    return (mean if mean is not None else next(one for one in vectors if one is not None)).shape[0]


def _launch(device: Any, launcher: Launcher, vectors: Sequence[Tensor | None], folded: Tensor) -> None:
    """Launch on vectors of which the first ones may be None."""
    first = next(i for i, one in enumerate(vectors) if one is not None)

    def launch(buffers: Sequence[Any], stream: Any) -> None:
        launcher((*(0,) * first, *buffers[:-1]), stream)

    execute.launch(TORCH, device, launch, vectors[first:], (folded,), 0)


def _expected(vectors: Sequence[Tensor | None]) -> bytes:
    """What the launcher in C compares: for each vector its elements, and its type as DLPack numbers it; 0 for one that is missing."""
    codes = {torch.float32: (2, 32), torch.float64: (2, 64), torch.float16: (2, 16), torch.bfloat16: (4, 16)}
    numbers = []
    for one in vectors:
        code, width = (0, 0) if one is None else codes[one.dtype]
        numbers.append(0 if one is None else one.shape[0] << 16 | code << 8 | width)
    return Struct(f"{len(numbers)}q").pack(*numbers)


# ---- the convolution

#: Calls by their keys, as the launcher in C repeats them.
_again = RepeatTable()


def scaled(asked: tuple[Any, ...], start: int, x: Tensor, weight: Tensor, folded: Tensor, residual: Tensor | None) -> Tensor:
    """A convolution with the norm that lies at `start` in `folded`, the sum with a residual and an activation, without gradients.

    `asked` is as :func:`pycuda_conv.nn.evaluation._evaluate` takes it; its last member is not read.
    """
    if invariance.blocks:
        asked = invariant(asked)
    made = repeat.replay(_again, (start, *asked), x, weight, folded, residual)
    return computed(asked, start, x, weight, folded, residual) if made is None else made[1]


class Ways(NamedTuple):
    """A plan, the launcher of its kernels, and whether they read a filter whose channels are last in memory."""

    plan: Plan
    launch: Launcher
    filter_last: bool

    @property
    def orders(self) -> tuple[Any, Any]:
        """The orders of axes of the input, and of a residual; and of the filter."""
        plan = self.plan
        return plan.order, plan.filter_order if self.filter_last else plan.weight_order


@remember_launches
def _ways(call: Call, signatures: tuple[Signature | None, ...], layout: str, filter_last: bool, normed: bool) -> Ways:
    """How a layer of operands of these `signatures` is computed: input, filter, residual, bias, which is None if the layer is `normed`."""
    input, *others = signatures
    assert input is not None
    check_same_type(TORCH, input, *others, names=("x", "weight", "residual", "bias"))
    shapes = [None if one is None else one[0] for one in signatures]
    problem = call.problem((shapes[0], shapes[1], shapes[3], None, shapes[2]), TORCH.dtype_name(input[1]))
    if normed:
        problem = replace(problem, has_scale=True, has_bias=True, float_scale=problem.itemsize == 2)
    plan = dispatch.plan_for(problem, TORCH, input, None, layout, False)
    plan = plan.better or plan
    filter_last = not plan.empty and plan.reads_filter_last and (filter_last or plan.filter_order is None)

    def launch(buffers: Sequence[Any], stream: Any) -> None:
        x, w, scale, bias, residual, y, scratch = buffers
        plan.launch((x, w, bias, scale, residual, y, scratch), stream, filter_last=filter_last)

    return Ways(plan, launch, filter_last)


def ways_of(asked: tuple[Any, ...], x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, normed: bool) -> Ways:
    """How a layer of these operands is computed."""
    function, stride, padding, dilation, groups, precision, size, activation, border, algorithm, _ = asked
    ndim, sign = weight.dim() - 2, TORCH.signature
    size = size if function == "conv_transpose" else 0
    call = Call(function, ndim, stride, padding, dilation, groups, precision, size, activation, algorithm, *(border or ("zeros", 0.0)))
    signatures = tuple(None if one is None else sign(one) for one in (x, weight, residual, bias))
    how = call.hashable(), signatures, TORCH.layout(x, ndim), TORCH.layout(weight, ndim) == "NHWC", normed
    ways = _ways(*how)
    if ways.plan.better is not None:
        _ways.forget(*how)
        ways = _ways(*how)
    return ways


def result(ways: Ways, x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """The layer's result, by a call of Python's."""
    plan, (order, filter_order) = ways.plan, ways.orders
    with torch.no_grad():
        y: Tensor = TORCH.empty(plan.result_shape, x, None, plan.result_order)
        if not plan.empty:
            more = None if residual is None else TORCH.as_kernel_input(residual, order)
            given = TORCH.as_kernel_input(x, order), TORCH.as_kernel_input(weight, filter_order), scale, bias, more
            execute.launch(TORCH, plan.device, ways.launch, given, (y,), plan.workspace_bytes)
        if TORCH.layout(x, plan.problem.ndim) != plan.problem.layout:  # the kernels that convolve it read the other order
            y = TORCH.empty(y.shape, y, None, channels_last(y.dim(), plan.problem.ndim)).copy_(y)
    return y


def computed(asked: tuple[Any, ...], start: int, x: Tensor, weight: Tensor, folded: Tensor, residual: Tensor | None) -> Tensor:
    """:func:`scaled` in a call that is not repeated."""
    operands = x, weight, folded, residual
    x, weight, folded, residual = (None if one is None else one.detach() for one in operands)
    ways = ways_of(asked, x, weight, None, residual, True)
    channels = ways.plan.problem.result_channels
    y = result(ways, x, weight, folded[start : start + channels], folded[start + channels : start + 2 * channels], residual)
    plan, (order, filter_order) = ways.plan, ways.orders
    name = _again.new_key((start, *asked), operands, plan.device, plan)
    if name is None or TORCH.layout(x, plan.problem.ndim) != plan.problem.layout:
        return y
    ready = None
    given = (x, order), (weight, filter_order), (residual, order)
    if folded.is_contiguous() and all(one is None or TORCH.is_kernel_input(one, lies) for one, lies in given):
        each = folded.element_size()
        # x, w, folded, residual | y | workspace | none
        ax, aw, af, ar, ay, scratch, none = ((i, 0) for i in range(7))
        scale, bias = (af[0], start * each), (af[0], (start + channels) * each)
        steps = repeat.steps_of(plan, ways.filter_last, (ax, aw, bias, ay, scratch, none), ar, scale)
        results = [TORCH.maker(plan.result_shape, y.dtype, y.device, plan.result_order)]
        ready = repeat.launch_sequence(TORCH, plan.device, steps, y, len(operands), results, plan.workspace_bytes)
    _again.put(name, ready, plan)
    return y


# ---- the operators


def _fake_folded(vectors: Sequence[Tensor | None], eps: Sequence[float], wide: bool) -> Tensor:
    norms = [vectors[i : i + VECTORS] for i in range(0, len(vectors), VECTORS)]
    like = next(one for one in vectors if one is not None)
    return like.new_empty(starts_of([channels_of(own) for own in norms])[-1], dtype=torch.float64 if wide else torch.float32)


def _scaled(x: Tensor, weight: Tensor, folded: Tensor, residual: Tensor | None, start: int, spec: Sequence[int]) -> Tensor:
    return scaled(asked_of(tuple(spec), 0.0), start, x, weight, folded, residual)


def _fake_scaled(x: Tensor, weight: Tensor, folded: Tensor, residual: Any, start: int, spec: Sequence[int]) -> Any:
    return fake_result(x, weight, None, None, None, None, None, residual, 0.0, spec)


operators.define("fold_norms(Tensor?[] vectors, float[] eps, bool wide) -> Tensor", fold_norms, _fake_folded)
operators.define("scaled(Tensor x, Tensor weight, Tensor folded, Tensor? residual, int start, int[] spec) -> Tensor", _scaled, _fake_scaled)
