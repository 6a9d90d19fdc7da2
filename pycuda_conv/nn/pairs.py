"""Two convolutions whose sum is a layer's result, without gradients, in one launch: a 3x3 and the 1x1 of the shortcut beside it, or the two
parts of one whose input would be concatenated.

The kernel reads both arrays where they lie (:mod:`pycuda_conv.engines.hopper.segments`), sums once, and rounds once. Where it can't, or
where two launches should take less time, the shortcut is computed first and is the residual of the other, or the arrays are concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pycuda_conv import background, engines, execute, invariance, repeat
from pycuda_conv.arrays import Signature
from pycuda_conv.arrays.tensors import TORCH
from pycuda_conv.call import Call
from pycuda_conv.engines.hopper import segments
from pycuda_conv.engines.schedule import BIAS, INPUT, RESIDUAL, RESULT, SCALE, WEIGHT
from pycuda_conv.joined import in_order, joining_time
from pycuda_conv.nn import evaluation, folding, operators
from pycuda_conv.nn.options import asked_of, fake_result
from pycuda_conv.problem import channels_last
from pycuda_conv.repeat import RepeatTable
from pycuda_conv.runtime.base import KernelLaunch

#: Calls by their keys, for the launcher in C.
_again = RepeatTable()
#: The buffers of the launch, in the order in which it gets them.
_ORDER = INPUT, WEIGHT, SCALE, BIAS, RESIDUAL, segments.SECOND, segments.SECOND_WEIGHT, RESULT


class _Way(NamedTuple):
    """The launch in two forms, for any layer and for this one; the device; the result's shape, and its order of axes."""

    general: KernelLaunch
    known: KernelLaunch
    device: Any
    shape: tuple[int, ...]
    order: tuple[int, ...]


def pays(x: Any) -> bool:
    """Whether a graph's layers of such a tensor, whose sizes may be symbols, may be computed in pairs."""
    return bool(x.is_cuda)


def two(
    asked: tuple[Any, ...], of_other: tuple[Any, ...], start: int, x: Tensor, weight: Tensor, residual: Tensor | None, other: Tensor,
    other_weight: Tensor | None, folded: Tensor,
) -> Tensor:
    """A convolution of `x` plus one of `other`, times the factor and plus the summand that lie at `start` in `folded`, and an activation.

    The options are as :func:`pycuda_conv.nn.evaluation._evaluate` takes them. The activation is that of the first. Without a filter of its
    own, which comes without a residual, `other` has the last of the channels over which `weight` sums, and no options.
    """
    operands = x, weight, residual, other, other_weight, folded
    made = repeat.replay(_again, (start, *asked, *of_other), *operands)
    return _computed(asked, of_other, start, operands) if made is None else made[1]


def _computed(asked: tuple[Any, ...], of_other: tuple[Any, ...], start: int, operands: Sequence[Tensor | None]) -> Tensor:
    """The same in a call that is not repeated."""
    x, weight, residual, other, other_weight, folded = (None if one is None else one.detach() for one in operands)
    assert x is not None and weight is not None and other is not None and folded is not None
    way = None if invariance.blocks or not x.is_cuda else _way_of(asked, of_other, x, weight, residual, other, other_weight)
    if way is None and other_weight is None:
        return folding.scaled(asked, start, torch.cat([x, other], 1), weight, folded, residual)
    if way is None:
        beside = evaluation._evaluate(of_other, other, other_weight, None, None, None, None, None, None)
        return folding.scaled(asked, start, x, weight, folded, beside)
    device, channels = way.device, way.shape[1]
    settled = not background.enabled() or device.compiled(way.known)
    if not settled:
        device.compile_in_background([way.known])
    launch = way.known if settled else way.general
    with torch.no_grad():
        y: Tensor = TORCH.empty(way.shape, x, device, way.order)
        vectors = folded[start : start + channels], folded[start + channels : start + 2 * channels]
        launcher = device.schedule_launcher([[launch]])
        execute.launch(TORCH, device, launcher, (x, weight, *vectors, residual, other, other_weight), (y,), 0)
    name = _again.new_key((start, *asked, *of_other), operands, device) if settled else None
    if name is not None and folded.is_contiguous():
        # x, weight, residual, other, its weight, folded | y | workspace | none
        ax, aw, ar, ao, of, af, ay, *_ = ((i, 0) for i in range(9))
        each = folded.element_size()
        places = ax, aw, (af[0], start * each), (af[0], (start + channels) * each), ar, ao, of, ay
        results = [TORCH.maker(way.shape, y.dtype, y.device, way.order)]
        _again.put(name, repeat.launch_sequence(TORCH, device, repeat.rebind_buffers([[launch]], places), y, 6, results, 0))
    return y


def _way_of(
    asked: tuple[Any, ...], of_other: tuple[Any, ...], x: Tensor, weight: Tensor, residual: Tensor | None, other: Tensor,
    other_weight: Tensor | None,
) -> _Way | None:
    """How one launch computes both; None where two do."""
    ndim = weight.dim() - 2
    order = channels_last(weight.dim(), ndim)
    given = [one for one in (x, weight, other, other_weight, residual) if one is not None]
    if order is None or any(one.dim() != weight.dim() for one in given) or len({(one.dtype, one.device) for one in given}) != 1:
        return None
    if not all(TORCH.is_kernel_input(one, order) for one in given):
        return None
    signatures = tuple(None if one is None else TORCH.signature(one) for one in (x, weight, other, other_weight))
    return _way(_call_of(asked, ndim), _call_of(of_other, ndim) if of_other else None, signatures, residual is not None)


def _call_of(asked: tuple[Any, ...], ndim: int) -> Call:
    function, stride, padding, dilation, groups, precision, _, activation, border, algorithm, _ = asked
    with_border = border or ("zeros", 0.0)
    return Call(function, ndim, stride, padding, dilation, groups, precision, 0, activation, algorithm, *with_border).hashable()


@lru_cache(maxsize=1024)
def _way(call: Call, of_other: Call | None, signatures: tuple[Signature | None, ...], with_residual: bool) -> _Way | None:
    of_x, of_weight, of_more, of_more_weight = signatures
    assert of_x is not None and of_weight is not None and of_more is not None
    name, device = TORCH.dtype_name(of_x[1]), TORCH.device(of_x, None)

    def made(call: Call, shape: tuple[int, ...], of_filter: tuple[int, ...]) -> Any:
        return replace(call.problem((shape, of_filter, None, None, None), name), layout="NHWC")

    if of_other is None:  # the channels of both arrays are those of one filter
        if of_x[0][2:] != of_more[0][2:] or of_x[0][0] != of_more[0][0]:
            return None
        whole = made(call, (of_x[0][0], of_x[0][1] + of_more[0][1], *of_x[0][2:]), of_weight[0])
        first, second = replace(whole, C=of_x[0][1]), replace(whole, C=of_more[0][1], activation=None)
    else:
        assert of_more_weight is not None
        first, second = made(call, of_x[0], of_weight[0]), made(of_other, of_more[0], of_more_weight[0])
    if first.result_shape != second.result_shape or 0 in first.result_shape or any(one.algorithm is not None for one in (first, second)):
        return None
    first = replace(first, has_scale=True, has_bias=True, float_scale=first.itemsize == 2, has_residual=with_residual)
    if segments.why_not(first, second, device) is not None:
        return None
    us, tile = segments.choose(first, second, device)
    alone = [replace(first, C=first.C + second.C)] if of_other is None else [replace(first, has_residual=True), second]
    apart = [engines.predicted(one, engines.choose(one, device), device) for one in alone]
    copied = joining_time(alone[0], device) if of_other is None else 0.0
    if any(one is None or us >= sum(filter(None, apart)) + copied for one in apart):
        return None
    launch = segments.launch(first, second, tile, device, of_other is None)
    known = replace(launch, defines={**launch.defines, **launch.layer})
    shape, order = first.result_shape, channels_last(first.ndim + 2, first.ndim)
    assert order is not None
    return _Way(in_order(launch, _ORDER), in_order(known, _ORDER), device, shape, order)


# ---- the operator


def _operator(
    x: Tensor, weight: Tensor, residual: Tensor | None, other: Tensor, other_weight: Tensor | None, folded: Tensor, start: int,
    spec: Sequence[int], of_other: Sequence[int],
) -> Tensor:
    of_second = asked_of(tuple(of_other), 0.0) if of_other else ()
    return two(asked_of(tuple(spec), 0.0), of_second, start, x, weight, residual, other, other_weight, folded)


def _fake(
    x: Tensor, weight: Tensor, residual: Any, other: Any, other_weight: Any, folded: Any, start: int, spec: Any, of_other: Any
) -> Any:
    return fake_result(x, weight, None, None, None, None, None, None, 0.0, spec)


operators.define(
    "two(Tensor x, Tensor weight, Tensor? residual, Tensor other, Tensor? other_weight, Tensor folded, int start, int[] spec, "
    "int[] of_other) -> Tensor",
    _operator, _fake,
)  # fmt: skip
