"""Convolutions of upsampled images in calls that torch knows of.

A launch of ours folds a filter on a GPU (:func:`fold_filter`), and another its gradient (:func:`folded_recorded`); or one enlarges the
image (:func:`enlarge`). Where compilers and transforms have to see operations, and for tensors of the CPU, they are torch's, with torch's
gradients: :func:`folded`, :func:`enlarged`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from pycuda_conv import borders, execute
from pycuda_conv.arrays.tensors import TORCH
from pycuda_conv.call import Call, Operands
from pycuda_conv.engines.layout import enlarge as launches
from pycuda_conv.nn import operators
from pycuda_conv.problem import ConvProblem, channels_last


class Folding(NamedTuple):
    """What is left of a convolution when its filter is folded: a transposed convolution, and how its operands are made."""

    times: tuple[int, ...]
    empty: tuple[tuple[int, int], ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    #: the convolution of any image that is so folded
    problem: ConvProblem
    #: along each axis the words of the border that the image gets, and its sizes
    modes: borders.Pairs
    frame: tuple[tuple[int, int], ...]


@lru_cache(maxsize=1024)
def folding_of(call: Call, filter_shape: tuple[int, ...], dtype: str) -> Folding | None:
    """How `call`, whose options are hashable, is folded with such a filter, whatever the image's size; None where it is not."""
    n, taps, times = call.ndim, filter_shape[-call.ndim :], call.upsample[0]
    reach = max(taps) * max(call.dilation if isinstance(call.dilation, tuple) else (call.dilation,))
    plain = call._replace(activation=None, dtype=None)
    shapes = (1, filter_shape[1] * call.groups, *(reach + 1,) * n), filter_shape, None, None, None
    problem = plain.problem(shapes, dtype)
    if not problem.folded:
        return None
    left, frame = problem.transposed_form, problem.framed
    border = problem.border or borders.NONE
    cut, sides = (
        tuple(zip(one.padding_before[-n:], one.padding_after[-n:], strict=True)) for one in (left, frame)
    )
    return Folding(
        times, problem.empty_taps[-n:], left.stride[-n:], cut, left.dilation[-n:], problem.groups, problem, border[-n:], sides,
    )  # fmt: skip


def folded(w: Any, how: Folding) -> Any:
    """The filter of the transposed convolution: sums in float32, or in the filter's own type if that is wider."""
    v = w if w.dtype in (torch.float32, torch.float64) else w.float()
    ndim = len(how.times)
    for axis, (u, (before, after)) in enumerate(zip(how.times, how.empty, strict=True), 2):
        if u > 1:
            v = F.pad(v, _sides(v.dim(), axis, u - 1, u - 1)).unfold(axis, u, 1).sum(-1)
        v = v.flip(axis)
        if before or after:
            v = F.pad(v, _sides(v.dim(), axis, before, after))
    k, c = v.shape[:2]
    rows, taps = k // how.groups, v.shape[-ndim:]
    return v.reshape(how.groups, rows, c, *taps).transpose(1, 2).reshape(how.groups * c, rows, *taps).to(w.dtype)


def _sides(dims: int, axis: int, before: int, after: int) -> list[int]:
    """A padding of one axis, as ``F.pad`` takes it."""
    return [0, 0] * (dims - 1 - axis) + [before, after]


def enlarged(x: Any, times: Sequence[int], layout: str) -> Any:
    """The image, which lies in this layout, with each pixel as often as `times` says."""
    ndim = len(times)
    first = x.dim() - ndim
    order = channels_last(x.dim(), ndim) if layout == "NHWC" else None
    y = x if order is None else x.permute(order)
    first = first if order is None else first - 1
    size = list(y.shape)
    doubled: list[Any] = []
    wide: list[Any] = []
    made: list[Any] = []
    for axis, n in enumerate(size):
        u = times[axis - first] if first <= axis < first + ndim else 1
        doubled += [n] if u == 1 else [n, 1]
        wide += [n] if u == 1 else [n, u]
        made.append(n * u)
    y = y.reshape(doubled).expand(wide).reshape(made)
    return y if order is None else y.permute([order.index(axis) for axis in range(len(order))])


def framed(x: Any, how: Folding, value: float) -> Any:
    """The image with the border that the transposed convolution reads."""
    ndim = len(how.times)
    filled: list[int] = []
    for axis, (words, (before, after)) in enumerate(zip(how.modes, how.frame, strict=True), x.dim() - ndim):
        here = [0, 0]
        if before or after:
            n = x.shape[axis]
            rows = borders.rows(words, n, -before, n + after)
            shown = [row for row in rows if row >= 0]
            here = [rows.index(shown[0]) if rows[0] < 0 else 0, len(rows) - 1 - max(i for i, row in enumerate(rows) if row >= 0)]
            if shown != list(range(n)):
                x = x.index_select(axis, torch.tensor(shown, device=x.device))
        filled = [*here, *filled]
        if any(here):  # axis by axis: in a corner the inner axis counts
            side = [words[i] == "constant" for i in (0, 1)]
            for i in (0, 1):
                if here[i]:
                    x = F.pad(x, _sides(x.dim(), axis, here[0] * (i == 0), here[1] * (i == 1)), value=value if side[i] else 0.0)
    return x


def convolve(call: Call, operands: Operands, layout: str, compute: Callable[[Call, Operands], Any]) -> Any:
    """The convolution of an upsampled image, which lies in this layout; `compute` is for other images. The options are hashable."""
    x, w, *others = operands
    plain = call._replace(upsample=None)
    times = call.upsample[0]
    if max(times) == 1:
        return compute(plain, operands)
    dtype = str(w.dtype).removeprefix("torch.")
    floats = w.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    _check(call, operands)
    how = folding_of(call._replace(activation=None), tuple(w.shape), dtype) if floats and w.dim() > call.ndim else None
    if how is None:
        return compute(plain, Operands(enlarged(x, times, layout), w, *others))
    transposed = plain._replace(
        function="conv_transpose", stride=how.stride, padding=how.padding, dilation=how.dilation, size=0, padding_mode="zeros",
        padding_value=0.0,
    )  # fmt: skip
    x = framed(x, how, call.padding_value) if any(map(any, how.frame)) else x
    return compute(transposed, Operands(x, folded_recorded(w, how, layout == "NHWC"), *others))


def _check(call: Call, operands: Operands) -> None:
    """Refuse what does not fit together, as far as sizes are known: of what is left messages would name other sizes."""
    shapes = [None if one is None else tuple(one.shape) for one in operands]
    if all(isinstance(n, int) for shape in shapes if shape is not None for n in shape):
        dtype = str(operands.weight.dtype).removeprefix("torch.")
        known = dtype if dtype in ("float16", "bfloat16", "float32", "float64") else "float32"
        call._replace(dtype=None).problem(shapes, known)


# ---- launches of ours


@lru_cache(maxsize=1024)
def _folds(how: Folding, dtype: str, given_last: bool, last: bool, of_gradient: bool, device: Any) -> Any:
    """The launcher that folds filters, or the gradients of folded ones: (filter, what is made, workspace)."""
    launch = launches.sum_taps(replace(how.problem, dtype=dtype), given_last, last, 1, of_gradient)
    return device.schedule_launcher([[replace(launch, buffers=(0, 1))]])


def fold_filter(w: Any, how: Folding, last: bool) -> Any:
    """:func:`folded` by one launch; with `last`, its second axis is last in memory."""
    return _summed(w, how, last, False) if w.is_cuda else folded(w, how).contiguous()


def _summed(w: Any, how: Folding, last: bool, of_gradient: bool) -> Any:
    """A filter on a GPU that is folded, or the filter's gradient from that of the folded one, by one launch."""
    signature, order = TORCH.signature(w), channels_last(w.dim(), w.dim() - 2)
    device = TORCH.device(signature, None)
    given_last = order is not None and not w.is_contiguous() and TORCH.is_laid_out_as(w, order)
    problem = how.problem
    shape = problem.weight_shape if of_gradient else problem.transposed_form.weight_shape
    with device:
        source = TORCH.as_kernel_input(w, order if given_last else None)
        made = TORCH.empty(shape, w, device, order if last else None)
    if made.numel():
        launcher = _folds(how, TORCH.dtype_name(w.dtype), given_last, last, of_gradient, device)
        execute.launch(TORCH, device, launcher, (source.detach(),), (made,), 0)
    return made


class _Folded(torch.autograd.Function):
    """:func:`fold_filter`, and its gradient by one launch too."""

    @staticmethod
    def forward(ctx: Any, w: Any, how: Folding, last: bool) -> Any:
        ctx.how, ctx.given_last = how, not w.is_contiguous()
        return fold_filter(w, how, last)

    @staticmethod
    def backward(ctx: Any, dv: Any) -> Any:
        if torch.is_grad_enabled() or TORCH.traced(dv, dv, None):
            with torch.enable_grad():
                w = dv.new_zeros(ctx.how.problem.weight_shape).requires_grad_()
                return torch.autograd.grad(folded(w, ctx.how), w, dv, create_graph=torch.is_grad_enabled())[0], None, None
        return _summed(dv, ctx.how, ctx.given_last, True), None, None


def folded_recorded(w: Any, how: Folding, last: bool) -> Any:
    """:func:`fold_filter` where a gradient is recorded."""
    if not w.is_cuda or TORCH.traced(w, w, None) or torch.compiler.is_dynamo_compiling():
        return folded(w, how)
    return _Folded.apply(w, how, last)


@lru_cache(maxsize=1024)
def _enlarges(problem: ConvProblem, device: Any) -> Any:
    launch = launches.enlarge(problem, 1)
    return device.schedule_launcher([[replace(launch, buffers=(0, 1))]])


@lru_cache(maxsize=1024)
def _enlarging(shape: tuple[int, ...], dtype: str, layout: Any, times: tuple[int, ...]) -> ConvProblem:
    """A problem that reads such an enlarged image."""
    taps = shape[1], shape[1], *(1,) * len(times)
    return ConvProblem.forward(
        len(times), shape, taps, dtype=dtype, layout=layout, upsample=times, upsample_filter="exact", in_chunks=True
    )


def enlarge(x: Any, times: tuple[int, ...]) -> Any:
    """:func:`enlarged` by one launch."""
    ndim = len(times)
    layout = TORCH.layout(x, ndim)
    if not x.is_cuda or not x.numel():
        return enlarged(x, times, layout)
    order = channels_last(x.dim(), ndim) if layout == "NHWC" else None
    device = TORCH.device(TORCH.signature(x), None)
    problem = _enlarging(tuple(x.shape), TORCH.dtype_name(x.dtype), layout, times)
    with device:
        source = TORCH.as_kernel_input(x, order)
        shape = (*x.shape[:2], *(n * u for n, u in zip(x.shape[2:], times, strict=True)))
        made = TORCH.empty(shape, x, device, order)
    execute.launch(TORCH, device, _enlarges(problem, device), (source.detach(),), (made,), 0)
    return made


# ---- the operator


def spec_of(how: Folding, last: bool) -> list[int]:
    """What :func:`fold_filter` has to know, as the operator takes it: axes, groups, whether the result has its second axis last, ..."""
    n, problem = len(how.times), how.problem
    axes = zip(how.times, problem.padding_before[-n:], problem.padding_after[-n:], problem.dilation[-n:], strict=True)
    each = [number for axis in axes for number in axis]
    return [len(how.times), how.groups, int(last), *each]


@lru_cache(maxsize=1024)
def _of_spec(spec: tuple[int, ...], filter_shape: tuple[int, ...], dtype: str) -> Folding:
    ndim, groups, _, *each = spec
    times, before, after, dilation = (tuple(each[i::4]) for i in range(4))
    pairs = tuple(zip(before, after, strict=True))
    call = Call("conv", ndim, 1, pairs, dilation, groups, "fp32", 0, upsample=(times, "folded"))
    how = folding_of(call, filter_shape, dtype)
    assert how is not None
    return how


def _fold(w: Any, spec: Sequence[int]) -> Any:
    return fold_filter(w, _of_spec(tuple(spec), tuple(w.shape), TORCH.dtype_name(w.dtype)), bool(spec[2]))


def _fake_fold(w: Any, spec: Sequence[int]) -> Any:
    how = _of_spec(tuple(spec), tuple(w.shape), TORCH.dtype_name(w.dtype))
    shape, order = how.problem.transposed_form.weight_shape, channels_last(w.dim(), w.dim() - 2)
    if not spec[2] or order is None or not w.is_cuda:
        return w.new_empty(shape)
    return w.new_empty([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(w.dim())])


def _folded(w: Any, spec: Sequence[int]) -> Any:
    return folded(w, _of_spec(tuple(spec), tuple(w.shape), TORCH.dtype_name(w.dtype)))


operators.define_by_others("folded_filter(Tensor weight, int[] spec) -> Tensor", _folded)
operators.define("fold_filter(Tensor weight, int[] spec) -> Tensor", _fold, _fake_fold)
