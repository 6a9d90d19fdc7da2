"""Filters of torch's tensors that torch differentiates. A filter is linear: its gradient is its adjoint, whose gradient is the filter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pycuda_conv.arrays import kind_of
from pycuda_conv.ndimage import launches
from pycuda_conv.ndimage.launches import Bench, Dense, Pass, mapped
from pycuda_conv.ndimage.spaces import space_of
from pycuda_conv.runtime import get_device


def joined(bench: Bench, x: Any, terms: Sequence[Any], value: float, sums: str, norm: bool) -> Any:
    """The sum of a filter's terms, or the root of the sum of their squares, which torch can differentiate."""
    x = bench.space.cast(x, sums)
    made: Sequence[Any] = [_Filtered.apply(x, bench, term, value) for term in terms]
    if norm:
        made = [one * one for one in made]
    total = made[0]
    for one in made[1:]:
        total = total + one
    return total.sqrt() if norm else total


class _Filtered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, bench: Bench, term: Any, value: float) -> Any:
        ctx.bench, ctx.term, ctx.shape = bench, term, tuple(x.shape)
        return launches.run_term(bench, x, term, value, bench.space.dtype(x))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return _Adjoint.apply(gradient.contiguous(), ctx.bench, ctx.term, ctx.shape), None, None, None


class _Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Any, bench: Bench, term: Any, shape: tuple[int, ...]) -> Any:
        ctx.bench, ctx.term = bench, term
        return adjoint(bench, gradient, term, shape)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return _Filtered.apply(gradient.contiguous(), ctx.bench, ctx.term, 0.0), None, None, None


def adjoint(bench: Bench, gradient: Any, term: Any, shape: Sequence[int]) -> Any:
    """The gradient of a term's input, of `shape`, from that of its result."""
    dtype = bench.space.dtype(gradient)
    if isinstance(term, Dense):
        sizes = term.sizes or tuple(shape[axis] for axis in term.axes)
        wide = tuple(size + n - 1 for size, n in zip(sizes, term.weights.shape, strict=True))
        flipped = np.ascontiguousarray(term.weights[(slice(None, None, -1),) * term.weights.ndim])
        back = Dense(term.axes, flipped, tuple(n - 1 for n in flipped.shape), ("constant",) * flipped.ndim, wide)
        made = launches.dense(bench, gradient, back, 0.0, dtype)
        each = zip(term.axes, term.before, term.borders, strict=True)
    else:
        passes = []
        for one in term:
            more = len(one.taps) - 1
            passes.append(Pass(one.axis, np.ascontiguousarray(one.taps[::-1]), more, "constant", gradient.shape[one.axis] + more))
        made = launches.passes(bench, gradient, passes, 0.0, dtype)
        each = ((one.axis, one.before, one.border) for one in term)  # type: ignore[assignment]
    for axis, before, border in each:
        made = folded(made, axis, before, border, shape[axis])
    return made.contiguous()


def folded(wide: Any, axis: int, before: int, border: str, n: int) -> Any:
    """The sums of the places along an axis that a border fills from each of `n` pixels, in the places' order."""
    places = np.arange(wide.shape[axis]) - before
    sources = mapped(border, n, places)
    if border == "constant":
        sources = np.where((places >= 0) & (places < n), sources, n)  # what nobody gets
    order = np.argsort(sources, kind="stable")
    order = order[sources[order] < n]
    pixels, first, counts = np.unique(sources[order], return_index=True, return_counts=True)

    def on(index: np.ndarray) -> Any:
        return torch.from_numpy(np.ascontiguousarray(index)).to(wide.device)

    made = wide.new_zeros([n if i == axis else size for i, size in enumerate(wide.shape)])
    for number in range(int(counts.max(initial=0))):
        some = counts > number  # each pixel at most once, so the order of sums is fixed
        made.index_add_(axis, on(pixels[some]), wide.index_select(axis, on(order[first[some] + number])))
    return made


class _Gathered(torch.autograd.Function):
    """The pixels at `places` along an axis; its gradient is folded in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Any, axis: int, before: int, after: int, border: str, value: float, bench: Bench) -> Any:
        ctx.args = axis, before, after, border, bench, x.shape[axis]
        return launches.padded(bench, x.contiguous(), axis, before, after, border, value)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return (_Folded.apply(gradient, *ctx.args), *(None,) * 6)


class _Folded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wide: Any, axis: int, before: int, after: int, border: str, bench: Bench, n: int) -> Any:
        ctx.args = axis, before, after, border, 0.0, bench
        return folded(wide, axis, before, border, n)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return (_Gathered.apply(gradient, *ctx.args), *(None,) * 6)


def by_weights(
    bench: Bench, x: Any, weights: Any, axes: Sequence[int], before: Sequence[int], border: str, value: float,
    sizes: Sequence[int] | None = None,
) -> Any:
    """A correlation along up to three axes, which torch can differentiate by the filter too; it skips no tap of 0."""
    import pycuda_conv

    rank = weights.ndim
    if rank > 3:
        raise RuntimeError(f"weights that require a gradient may have up to three axes, got {rank}")
    dtype = torch.promote_types(x.dtype, torch.float32) if x.dtype.is_floating_point else torch.float64
    x, weights = x.to(dtype), weights.to(dtype)
    sizes = sizes or [x.shape[axis] for axis in axes]
    for axis, size, n, front in zip(axes, sizes, weights.shape, before, strict=True):
        x = _Gathered.apply(x, axis, front, size + n - 1 - front - x.shape[axis], border, value, bench)
    behind = tuple(range(x.ndim - rank, x.ndim))
    arranged = x.movedim(tuple(axes), behind)
    planes = arranged.reshape(-1, 1, *arranged.shape[-rank:])
    where: dict[str, Any] = {"stream": bench.stream} if x.is_cuda else {"device": bench.device.name}
    made = getattr(pycuda_conv, f"conv{rank}d")(planes, weights[None, None], **{k: v for k, v in where.items() if v is not None})
    return made.reshape(*arranged.shape[:-rank], *made.shape[-rank:]).movedim(behind, tuple(axes))


def by_filter(
    input: Any, weights: Any, flip: bool, axes: tuple[int, ...], front: tuple[int, ...], edge: str, output: Any, cval: Any,
    device: Any, stream: Any,
) -> Any:
    """A correlation whose filter requires a gradient."""
    kind = kind_of("input", input)
    if kind is not kind_of("weights", weights) or output is not None or input.is_complex() or weights.is_complex():
        raise TypeError("weights that require a gradient go with a real torch.Tensor as input, and with no output")
    taps = weights.flip(tuple(range(weights.ndim))) if flip else weights
    asked = None if device is None else get_device(device)
    bench = Bench(space_of(kind), kind.device(kind.signature(input), asked), stream)
    made = by_weights(bench, input, taps, axes, front, edge, float(cval))
    return made.to(input.dtype) if input.dtype.is_floating_point else made
