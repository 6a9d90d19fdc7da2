"""Two convolutions whose sum is a layer's result, such as a 3x3 and the 1x1 of the shortcut beside it, without gradients, in one launch.

The kernel reads both arrays where they lie (:mod:`pycuda_conv.engines.hopper.segments`), sums once, and rounds once. Where it can't, or
where two launches should take less time, the shortcut is computed first and is the residual of the other.
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
from pycuda_conv.joined import in_order
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
    asked: tuple[Any, ...], of_other: tuple[Any, ...], start: int, x: Tensor, weight: Tensor, other: Tensor, other_weight: Tensor,
    folded: Tensor,
) -> Tensor:
    """A convolution of `x` plus one of `other`, times the factor and plus the summand that lie at `start` in `folded`, and an activation.

    The options are as :func:`pycuda_conv.nn.evaluation._evaluate` takes them. The activation is that of the first.
    """
    made = repeat.replay(_again, (start, *asked, *of_other), x, weight, other, other_weight, folded)
    return _computed(asked, of_other, start, x, weight, other, other_weight, folded) if made is None else made[1]


def _computed(
    asked: tuple[Any, ...], of_other: tuple[Any, ...], start: int, x: Tensor, weight: Tensor, other: Tensor, other_weight: Tensor,
    folded: Tensor,
) -> Tensor:
    """The same in a call that is not repeated."""
    x, weight, other, other_weight, folded = (one.detach() for one in (x, weight, other, other_weight, folded))
    way = None if invariance.blocks or not x.is_cuda else _way_of(asked, of_other, x, weight, other, other_weight)
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
        execute.launch(TORCH, device, launcher, (x, weight, *vectors, None, other, other_weight), (y,), 0)
    name = repeat.key((start, *asked, *of_other), x, weight, other, other_weight, folded) if settled and repeat.possible() else None
    if name is not None and name not in _again and folded.is_contiguous() and not device.capturing():
        # x, weight, other, its weight, folded | y | workspace | none
        ax, aw, ao, of, af, ay, _, none = ((i, 0) for i in range(8))
        each = folded.element_size()
        places = ax, aw, (af[0], start * each), (af[0], (start + channels) * each), none, ao, of, ay
        results = [TORCH.maker(way.shape, y.dtype, y.device, way.order)]
        _again.put(name, repeat.launch_sequence(TORCH, device, repeat.rebind_buffers([[launch]], places), y, 5, results, 0))
    return y


def _way_of(
    asked: tuple[Any, ...], of_other: tuple[Any, ...], x: Tensor, weight: Tensor, other: Tensor, other_weight: Tensor
) -> _Way | None:
    """How one launch computes both; None where two do."""
    ndim = weight.dim() - 2
    order = channels_last(weight.dim(), ndim)
    if x.dim() != weight.dim() or other_weight.dim() != weight.dim() or order is None:
        return None
    given = x, weight, other, other_weight
    if len({(one.dtype, one.device) for one in given}) != 1 or not all(TORCH.is_kernel_input(one, order) for one in given):
        return None
    return _way(_call_of(asked, ndim), _call_of(of_other, ndim), tuple(TORCH.signature(one) for one in given))


def _call_of(asked: tuple[Any, ...], ndim: int) -> Call:
    function, stride, padding, dilation, groups, precision, _, activation, border, algorithm, _ = asked
    with_border = border or ("zeros", 0.0)
    return Call(function, ndim, stride, padding, dilation, groups, precision, 0, activation, algorithm, *with_border).hashable()


@lru_cache(maxsize=1024)
def _way(call: Call, of_other: Call, signatures: tuple[Signature, ...]) -> _Way | None:
    shapes, name = [one[0] for one in signatures], TORCH.dtype_name(signatures[0][1])
    first, second = (
        replace(one.problem((*shapes[2 * i : 2 * i + 2], None, None, None), name), layout="NHWC") for i, one in enumerate((call, of_other))
    )
    if first.result_shape != second.result_shape or 0 in first.result_shape or any(one.algorithm is not None for one in (first, second)):
        return None
    first, device = replace(first, has_scale=True, has_bias=True, float_scale=first.itemsize == 2), TORCH.device(signatures[0], None)
    if segments.why_not(first, second, device) is not None:
        return None
    us, tile = segments.choose(first, second, device)
    apart = [engines.predicted(one, engines.choose(one, device), device) for one in (replace(first, has_residual=True), second)]
    if any(one is None or us >= sum(filter(None, apart)) for one in apart):
        return None
    launch = segments.launch(first, second, tile, device)
    known = replace(launch, defines={**launch.defines, **launch.layer})
    shape, order = first.result_shape, channels_last(first.ndim + 2, first.ndim)
    assert order is not None
    return _Way(in_order(launch, _ORDER), in_order(known, _ORDER), device, shape, order)


# ---- the operator


def _operator(
    x: Tensor, weight: Tensor, other: Tensor, other_weight: Tensor, folded: Tensor, start: int, spec: Sequence[int], of_other: Sequence[int]
) -> Tensor:
    return two(asked_of(tuple(spec), 0.0), asked_of(tuple(of_other), 0.0), start, x, weight, other, other_weight, folded)


def _fake(x: Tensor, weight: Tensor, other: Any, other_weight: Any, folded: Any, start: int, spec: Any, of_other: Any) -> Any:
    return fake_result(x, weight, None, None, None, None, None, None, 0.0, spec)


operators.define(
    "two(Tensor x, Tensor weight, Tensor other, Tensor other_weight, Tensor folded, int start, int[] spec, int[] of_other) -> Tensor",
    _operator, _fake,
)
