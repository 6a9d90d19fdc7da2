"""A convolution, the group norm behind it and the activation behind that, without gradients, as one sequence of launches.

Where the convolution's tiles can note the moments of what they store, no pass is made for the statistics. Else the norm's own launches
follow. What the convolution itself gives is a result too, as others may read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pycuda_conv import dispatch, execute, invariance, repeat
from pycuda_conv.arrays import Signature, check_same_type
from pycuda_conv.arrays.tensors import TORCH
from pycuda_conv.call import Call
from pycuda_conv.engines.nn import norm as engine
from pycuda_conv.memo import remember_launches
from pycuda_conv.nn import evaluation, normalise, operators
from pycuda_conv.nn.normalise import Asked
from pycuda_conv.nn.options import asked_of, fake_result, invariant
from pycuda_conv.plan import Plan
from pycuda_conv.repeat import RepeatTable
from pycuda_conv.runtime.base import KernelLaunch

#: Calls by their keys, for the launcher in C.
_again = RepeatTable()


class _Joined(NamedTuple):
    """The convolution's plan, whether it reads a filter whose second axis is last, and the norm's launches and workspace.

    The launches have the buffers of :func:`pycuda_conv.engines.nn.norm.forward`. With `noted` their workspace is the plan's.
    """

    plan: Plan
    filter_last: bool
    norm: engine.Norm
    steps: list[KernelLaunch]
    nbytes: int
    noted: bool


@remember_launches
def _joined(
    call: Call, signatures: tuple[Signature | None, ...], layout: str, filter_last: bool, asked: Asked, wide: tuple[bool, bool]
) -> _Joined | None:
    """How a layer of operands of these `signatures` is computed: input, filter and bias; None if it is not computed here."""
    input, weight, bias = signatures
    assert input is not None and weight is not None
    check_same_type(TORCH, input, weight, bias, names=("x", "weight", "bias"))
    shapes = input[0], weight[0], None if bias is None else bias[0], None, None
    problem = call.problem(shapes, TORCH.dtype_name(input[1]))
    norm = normalise.norm_of(asked, problem.result_shape, input[1], layout == "NHWC", wide)
    if not norm.fits or norm.in_rows:
        return None
    # kernels of float32 may compute some results once more, and small planes take one launch for all of a norm
    notes = norm.itemsize == 2 and norm.P % 64 == 0 and not engine.is_whole(norm, TORCH.device(input, None))
    plan = dispatch.plan_for(problem, TORCH, input, None, layout, False, notes)
    plan = plan.better or plan
    if plan.empty or plan.problem.layout != layout:
        return None
    moments, device = plan.schedule.moments, plan.device
    if moments is not None and (moments.blocks or moments.sets != 1 or norm.P % moments.per):
        moments = None  # some results may be computed once more, or a part may be of two images
    steps, nbytes = engine.steps_for(norm, device)
    if moments is not None:
        steps, nbytes = engine.after_moments(norm, device.multiprocessors, moments.per, (6, moments.parts)), 0
    filter_last = plan.reads_filter_last and (filter_last or plan.filter_order is None)
    return _Joined(plan, filter_last, norm, steps, nbytes, moments is not None)


def conv_norm(
    conv: tuple[Any, ...], asked: Asked, x: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None,
    added: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The convolution, and the norm of it, or of its sum with `added`. `conv` is as ``evaluation._evaluate`` takes it."""
    operands = x, weight, bias, gamma, beta, added
    if invariance.blocks:
        conv = invariant(conv)
    made = repeat.replay(_again, (conv, asked), *operands) if repeat.possible() else None
    if made is not None:
        return made[1], made[-1]
    return _computed(conv, asked, operands)


def _computed(conv: tuple[Any, ...], asked: Asked, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor]:
    x, weight, bias, gamma, beta, added = (None if one is None else one.detach() for one in operands)
    assert x is not None and weight is not None
    found = _found(conv, asked, x, weight, bias, gamma, beta, added)
    with torch.no_grad():
        if found is None:
            y = evaluation._evaluate(conv, x, weight, bias, None, None, None, None, None)
            return y, normalise.norm_of_graph(asked)(y, gamma, beta, added)
        plan = found.plan
        order, filter_order = plan.order, plan.filter_order if found.filter_last else plan.weight_order
        y = TORCH.empty(plan.result_shape, x, None, plan.result_order)
        out = torch.empty_like(y)
        stats = _stats(found, y)
        given = TORCH.as_kernel_input(x, order), TORCH.as_kernel_input(weight, filter_order), None if bias is None else bias.contiguous()
        start = -(-plan.workspace_bytes // 512) * 512
        stages = _stages(found, start)
        launcher = plan.device.schedule_launcher(stages)

        def launch(buffers: Sequence[Any], stream: Any) -> None:
            launcher((*buffers, 0), stream)

        vectors = [None if one is None else one.contiguous() for one in (gamma, beta, added)]
        execute.launch(TORCH, plan.device, launch, (*given, *vectors), (y, stats, out), start + found.nbytes)
    name = _again.new_key((conv, asked), operands, plan.device, plan)
    if name is not None:
        ready = None
        same = given[0] is x and given[1] is weight and all(a is b for a, b in zip(vectors, (gamma, beta, added), strict=True))
        if same and (bias is None or bias.is_contiguous()):
            like = TORCH.maker(plan.result_shape, y.dtype, y.device, plan.result_order)
            results = [like, TORCH.maker(tuple(stats.shape), stats.dtype, stats.device, None), like]
            ready = repeat.launch_sequence(TORCH, plan.device, stages, y, len(operands), results, start + found.nbytes)
        _again.put(name, ready, plan)
    return y, out


def _found(
    conv: tuple[Any, ...], asked: Asked, x: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None,
    added: Tensor | None,
) -> _Joined | None:
    given = [one for one in (gamma, beta) if one is not None]
    if not x.is_cuda or x.dtype not in normalise._TYPES or any(one.dtype not in (x.dtype, torch.float32) for one in given):
        return None
    if added is not None and added.dtype is not x.dtype:
        return None
    ndim, sign = weight.dim() - 2, TORCH.signature
    call = _call_of(conv, ndim)
    if call is None:
        return None
    signatures = sign(x), sign(weight), None if bias is None else sign(bias)
    wide = normalise._is_wide(x, gamma), normalise._is_wide(x, beta)
    how = call.hashable(), signatures, TORCH.layout(x, ndim), TORCH.layout(weight, ndim) == "NHWC", asked, wide
    found = _joined(*how)
    if found is not None and found.plan.better is not None:
        _joined.forget(*how)
        found = _joined(*how)
    return found


def _call_of(conv: tuple[Any, ...], ndim: int) -> Call | None:
    """The call of a convolution with nothing behind it and zeros around it; None for another one."""
    function, stride, padding, dilation, groups, precision, size, activation, border, algorithm, _ = conv
    if border is not None or activation is not None:
        return None
    size = size if function == "conv_transpose" else 0
    return Call(function, ndim, stride, padding, dilation, groups, precision, size, None, algorithm)


def _stats(found: _Joined, y: Tensor) -> Tensor:
    return y.new_empty((found.norm.N, found.norm.groups, 2), dtype=torch.float32)


def _stages(found: _Joined, start: int) -> list[list[KernelLaunch]]:
    """The launches for x, weight, bias, gamma, beta, added | y, stats, out | workspace | none. The norm's workspace begins at `start`."""
    x, weight, bias, gamma, beta, added, y, stats, out, scratch, none = ((i, 0) for i in range(11))
    stages = repeat.steps_of(found.plan, found.filter_last, (x, weight, bias, y, scratch, none))
    own = scratch if found.noted else (scratch[0], start)
    return stages + repeat.rebind_buffers([[one] for one in found.steps], (y, gamma, beta, added, out, stats, own))


# ---- the operator


def _operator(
    x: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, added: Tensor | None, eps: float,
    conv: Sequence[int], norm: Sequence[int],
) -> tuple[Tensor, Tensor]:
    return conv_norm(asked_of(tuple(conv), 0.0), normalise._asked_of(eps, norm), x, weight, bias, gamma, beta, added)


def _fake(
    x: Tensor, weight: Tensor, bias: Any, gamma: Any, beta: Any, added: Any, eps: float, conv: Sequence[int], norm: Sequence[int]
) -> tuple[Any, Any]:
    y = fake_result(x, weight, bias, None, None, None, None, None, 0.0, conv)
    return y, torch.empty_like(y)


operators.define(
    "conv_norm(Tensor x, Tensor weight, Tensor? bias, Tensor? gamma, Tensor? beta, Tensor? added, float eps, int[] conv, int[] norm) -> "
    "(Tensor, Tensor)",
    _operator, _fake,
)  # fmt: skip
