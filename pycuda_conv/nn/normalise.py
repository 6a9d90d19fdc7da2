"""Group, instance, layer and RMS norms with an activation behind them, at the speed of memory.

The statistics take one pass over the array, the result one that reads once and writes once; small planes and rows take a single launch.
Torch's group norm writes another memory format than it gets, and takes a pass more for the activation. The result here lies as the input.
Statistics are float32 by deviations from numbers of the group, so a large mean costs no digits, and those of an image have the same bits in
every batch. What the kernels do not take, such as float64 and tensors of the CPU, torch computes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pycuda_conv import execute, repeat
from pycuda_conv.arguments import ACTIVATIONS, checked_activation
from pycuda_conv.arrays import Signature
from pycuda_conv.arrays.tensors import TORCH
from pycuda_conv.engines.nn import norm as engine
from pycuda_conv.errors import ConvArgumentError, brief
from pycuda_conv.nn import operators
from pycuda_conv.nn.autograd import _is_batched, _traced, activated, without_autocast, without_gaps
from pycuda_conv.problem import channels_last
from pycuda_conv.repeat import RepeatTable
from pycuda_conv.runtime import Device

__all__ = ["group_norm", "instance_norm", "layer_norm", "rms_norm"]

#: Norms by their keys, for the launcher in C.
_again = RepeatTable()
_TYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))


class Asked(NamedTuple):
    """The options of a norm: groups of channels, or the number of last axes that are normalised together.

    With an `rms` of 2, `eps` is the least mean square, and not added to it: what ``F.normalize`` computes, but for a factor.
    """

    groups: int
    axes: int
    eps: float
    rms: int
    activation: Any


# ---- functions


def group_norm(
    x: Any, groups: int, gamma: Any = None, beta: Any = None, eps: float = 1e-5, activation: Any = None, added: Any = None
) -> Any:
    """Group normalisation, and an activation, with gradients.

    Parameters
    ----------
    x : tensor of shape (N, C, ...)
        float16, bfloat16 or float32 on a GPU, in C order or channels last; the result lies as it does. Others go to torch.
    groups : int
        It divides C.
    gamma, beta : (C,) tensors, optional
        Of x's type or float32.
    eps : float
    activation : {"relu", "silu", "gelu", "gelu_tanh"}, optional
        What stands behind the norm; torch computes other words of :func:`pycuda_conv.conv2d`.
    added : (N, C) tensor, optional
        A number for each channel of an image, such as an embedding of a time, that is added to x first. With the channels last and without
        gradients that takes no pass of its own.

    Raises
    ------
    ValueError
        Groups that do not divide C, or parameters of another shape.
    TypeError
        What is no tensor, or no integer.

    Examples
    --------
    >>> import torch, pycuda_conv.nn
    >>> pycuda_conv.nn.group_norm(torch.zeros(1, 6, 4, 4), 3, activation="silu").shape
    torch.Size([1, 6, 4, 4])
    """
    made = _repeated(x, gamma, beta, ("groups", groups, eps, activation), added)
    if made is not None:
        return made
    _check_tensor(x, 2)
    channels = x.shape[1]
    if isinstance(groups, bool) or not isinstance(groups, int):
        raise TypeError(f"groups must be an int, got {brief(groups)}")
    if groups < 1 or channels % groups:
        raise ConvArgumentError(f"groups must divide the {channels} channels of x, but got groups={groups}")
    _check_parameters(x, (channels,), gamma=gamma, beta=beta)
    _check_parameters(x, (x.shape[0], channels), added=added)
    asked = Asked(groups, 0, _checked_eps(eps), False, checked_activation(activation))
    return _norm(asked, x, gamma, beta, ("groups", groups, eps, activation), added)


def instance_norm(x: Any, gamma: Any = None, beta: Any = None, eps: float = 1e-5, activation: Any = None) -> Any:
    """Instance normalisation by each image's own statistics: :func:`group_norm` with one channel a group."""
    _check_tensor(x, 3)
    return group_norm(x, max(int(x.shape[1]), 1), gamma, beta, eps, activation)


def layer_norm(x: Any, shape: Any, gamma: Any = None, beta: Any = None, eps: float = 1e-5, activation: Any = None) -> Any:
    """Layer normalisation over the last axes, and an activation, with gradients.

    Parameters
    ----------
    x : tensor
    shape : int or sequence of int
        Sizes of the last axes, which are normalised together.
    gamma, beta : tensors of that shape, optional
    eps, activation
        As for :func:`group_norm`.

    Raises
    ------
    ValueError
        Another shape than that of x's last axes, or parameters of another shape.
    """
    return _of_rows(x, shape, gamma, beta, eps, activation, False)


def rms_norm(x: Any, shape: Any, gamma: Any = None, eps: float | None = None, activation: Any = None) -> Any:
    """As :func:`layer_norm`, by the root of the mean square, without mean and summand. `eps` is by default the type's resolution."""
    return _of_rows(x, shape, gamma, None, eps, activation, True)


def _of_rows(x: Any, shape: Any, gamma: Any, beta: Any, eps: float | None, activation: Any, rms: bool) -> Any:
    try:
        options: tuple[Any, ...] = "rms" if rms else "layer", shape if isinstance(shape, int) else tuple(shape), eps, activation
    except TypeError:
        raise TypeError(f"shape must be an int or a sequence of ints, got {brief(shape)}") from None
    made = _repeated(x, gamma, beta, options)
    if made is not None:
        return made
    _check_tensor(x, 1)
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if not sizes or len(sizes) > x.dim() or tuple(x.shape[x.dim() - len(sizes) :]) != sizes:
        raise ConvArgumentError(f"shape must be that of the last axes of x, {tuple(x.shape)}, but got shape={brief(shape)}")
    _check_parameters(x, sizes, gamma=gamma, beta=beta)
    if eps is None:
        eps = torch.finfo(x.dtype).eps
    return _norm(Asked(0, len(sizes), _checked_eps(eps), rms, checked_activation(activation)), x, gamma, beta, options)


def _check_tensor(x: Any, least: int) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {brief(x)}")
    if not x.dtype.is_floating_point:
        raise TypeError(f"x must be of floating-point numbers, but is of {x.dtype}")
    if x.dim() < least:
        raise ConvArgumentError(f"x must have at least {least} axes, but has shape {tuple(x.shape)}")


def _check_parameters(x: Any, shape: tuple[int, ...], **given: Any) -> None:
    for name, one in given.items():
        if one is None:
            continue
        if not isinstance(one, Tensor):
            raise TypeError(f"{name} must be a tensor, got {brief(one)}")
        if tuple(one.shape) != shape:
            raise ConvArgumentError(f"{name} must have shape {shape}, but has {tuple(one.shape)}")
        if one.device != x.device:
            raise ConvArgumentError(f"{name} must be on {x.device}, as x is, but is on {one.device}")


def _checked_eps(eps: Any) -> float:
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"eps must be a number, got {brief(eps)}")
    if not (eps >= 0 and math.isfinite(eps)):
        raise ConvArgumentError(f"eps must be at least 0 and finite, but got eps={eps}")
    return float(eps)


# ---- what the kernels compute


def _order(x: Any, asked: Asked) -> tuple[int, ...] | None:
    """The order of axes in which kernels read x: None for C order."""
    if asked.axes or x.dim() not in (3, 4, 5):
        return None
    return None if TORCH.layout(x, x.dim() - 2) == "NCHW" else channels_last(x.dim(), x.dim() - 2)


def norm_of(asked: Asked, shape: Sequence[int], dtype: torch.dtype, last: bool, wide: tuple[bool, bool]) -> engine.Norm:
    """The norm of an array of this shape."""
    if asked.axes:
        numbers = math.prod(shape[len(shape) - asked.axes :])
        n, c, p, groups = math.prod(shape) // max(numbers, 1), numbers, 1, 1
    else:
        n, c, p, groups = shape[0], shape[1], math.prod(shape[2:]), asked.groups
    return engine.Norm(TORCH.dtype_name(dtype), "NHWC" if last else "NCHW", n, c, p, groups, asked.eps, asked.rms, asked.activation, wide)


@lru_cache(maxsize=1024)
def _device_of(asked: Asked, like: Signature, last: bool, wide: tuple[bool, bool]) -> tuple[engine.Norm, Device] | None:
    norm = norm_of(asked, like[0], like[1], last, wide)
    return (norm, TORCH.device(like, None)) if norm.fits else None


def _is_wide(x: Any, parameter: Any) -> bool:
    return parameter is not None and parameter.dtype is not x.dtype


def is_taken(asked: Asked, x: Any, gamma: Any, beta: Any) -> bool:
    """Whether the kernels compute it; torch computes other norms."""
    if not x.is_cuda or x.dtype not in _TYPES or _traced(x, gamma if gamma is not None else x, beta):
        return False
    given = [one for one in (gamma, beta) if one is not None]
    readable = all(one.dtype in (x.dtype, torch.float32) and one.is_contiguous() for one in given)
    if not readable or not all(isinstance(n, int) for n in x.shape):
        return False
    return norm_of(asked, x.shape, x.dtype, _order(x, asked) is not None, (False, False)).fits


def _theirs(asked: Asked, x: Any, gamma: Any, beta: Any) -> Any:
    """The same by torch."""
    if asked.axes:
        shape = x.shape[x.dim() - asked.axes :]
        if asked.rms == 2:
            numbers = math.prod(shape)
            y = F.normalize(x.flatten(-asked.axes), dim=-1, eps=math.sqrt(asked.eps * numbers)).view_as(x) * math.sqrt(numbers)
            y = y if gamma is None else y * gamma
        else:
            y = F.rms_norm(x, shape, gamma, asked.eps) if asked.rms else F.layer_norm(x, shape, gamma, beta, asked.eps)
    else:
        y = F.group_norm(x, asked.groups, gamma, beta, asked.eps)
    return activated(y, asked.activation)


def _repeated(x: Any, gamma: Any, beta: Any, options: tuple[Any, ...], added: Any = None, passes_on: bool = False) -> Any:
    """The result of a call that was made before, and x if a gradient is recorded and it `passes_on` that; or None."""
    if not repeat.possible() or type(x) is not Tensor:
        return None
    recorded = torch.is_grad_enabled() and any(getattr(one, "requires_grad", False) for one in (x, gamma, beta, added))
    made = repeat.replay(_again, (*options, recorded), x, gamma, beta, added)
    if made is None:
        return None
    if not recorded:
        return made[-1]
    asked, stats, out = made[0][1], made[1], made[2]
    return _apply(x, gamma, beta, asked, stats, out, passes_on)


def _norm(
    asked: Asked, x: Any, gamma: Any, beta: Any, options: tuple[Any, ...], added: Any = None, passes_on: bool = False
) -> Any:
    """A norm whose arguments have been checked, and x if a gradient is recorded and it `passes_on` that."""
    recorded = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (x, gamma, beta, added))
    if added is not None and (recorded or _order(x, asked) is None or added.dtype is not x.dtype):
        x, added, options = _with(x, added), None, (*options, "added")
    casts = torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")
    if torch.compiler.is_dynamo_compiling() or casts or not is_taken(asked, x, gamma, beta):
        return _theirs(asked, x if added is None else _with(x, added), gamma, beta)
    with torch.no_grad():
        out, stats = forward(asked, x.detach(), gamma, beta, recorded, added)
    _remember((*options, recorded), asked, x, gamma, beta, out, recorded, added)
    return _apply(x, gamma, beta, asked, stats, out, passes_on) if recorded else out


def _with(x: Any, added: Any) -> Any:
    """x plus a number for each channel of an image."""
    return x + added.reshape(*added.shape[:2], *(1,) * (x.dim() - 2))


def pays(x: Any) -> bool:
    """Whether a graph's norm of such a tensor, whose sizes may be symbols, is computed here."""
    return bool(x.is_cuda) and x.dtype in _TYPES


def norm_of_graph(asked: Asked, passes_on: bool = False) -> Any:
    """(x, gamma, beta, added) -> the norm, of x's type and lying as x does, for graphs that run as they are.

    If it `passes_on` x, that is a second result, for what else reads x: then the launch that computes the norm's gradient adds the other.
    """
    options, is_cast = ("graph", asked), torch.is_autocast_enabled

    def compute(x: Any, gamma: Any, beta: Any, added: Any) -> Any:
        made = _repeated(x, gamma, beta, options, added, passes_on)
        made = _as_it_lies(asked, x, gamma, beta, options, added, passes_on) if made is None else made
        return (made, x) if passes_on and not isinstance(made, tuple) else made

    def norm(x: Any, gamma: Any, beta: Any, added: Any = None) -> Any:
        if is_cast("cuda" if x.is_cuda else "cpu"):
            with without_autocast(x):
                return compute(x, gamma, beta, added)
        return compute(x, gamma, beta, added)

    return norm


def norm_of_pixels(asked: Asked) -> Any:
    """(x, gamma) -> the norm of each pixel over its channels, which are last in memory, for graphs that run as they are."""
    norm = norm_of_graph(asked)

    def of_pixels(x: Any, gamma: Any) -> Any:
        return norm(x.movedim(1, -1), gamma, None).movedim(-1, 1)

    return of_pixels


def _as_it_lies(asked: Asked, x: Any, gamma: Any, beta: Any, options: tuple[Any, ...], added: Any, passes_on: bool) -> Any:
    made = _norm(asked, x, gamma, beta, options, added, passes_on)
    if isinstance(made, tuple):  # the kernels' result lies as x does
        return made
    made, order = made.to(x.dtype), _order(x, asked)
    return made if TORCH.is_laid_out_as(made, order) else torch.empty_like(x).copy_(made)


def forward(asked: Asked, x: Any, gamma: Any, beta: Any, with_stats: bool, added: Any = None) -> tuple[Any, Any]:
    """The result, and (N, groups, 2): mean and 1 / sqrt(variance + eps). That is None where the kernels do without and nobody asks."""
    order = _order(x, asked)
    given = TORCH.as_kernel_input(x, order)
    found = _device_of(asked, TORCH.signature(given), order is not None, (_is_wide(x, gamma), _is_wide(x, beta)))
    assert found is not None
    norm, device = found
    out = TORCH.empty(x.shape, x, device, order)
    launcher, workspace = engine.compiled(norm, device)
    stats = x.new_empty((norm.N, norm.groups, 2), dtype=torch.float32) if with_stats or not engine.is_whole(norm, device) else None
    added = None if added is None else added.detach().contiguous()
    execute.launch(TORCH, device, launcher, (given, gamma, beta, added), (out, stats), workspace)
    return out, stats


def _remember(
    options: tuple[Any, ...], asked: Asked, x: Any, gamma: Any, beta: Any, out: Any, recorded: bool, added: Any = None
) -> None:
    """Put a forward pass into the table."""
    order = _order(x, asked)
    found = _device_of(asked, TORCH.signature(x), order is not None, (_is_wide(x, gamma), _is_wide(x, beta)))
    assert found is not None
    norm, device = found
    name = _again.new_key(options, (x, gamma, beta, added), device)
    if name is None or not TORCH.is_kernel_input(x, order) or (added is not None and not added.is_contiguous()):
        return
    steps, nbytes = engine.steps_for(norm, device)
    kept = recorded or not engine.is_whole(norm, device)
    # x, gamma, beta, added | stats, out | workspace | none
    results = [TORCH.maker((norm.N, norm.groups, 2), torch.float32, x.device, None)] * kept
    results.append(TORCH.maker(tuple(x.shape), x.dtype, x.device, order))
    ax, ag, at, ad, *more = ((i, 0) for i in range(4 + len(results) + 2))
    *stats, ao, scratch, none = more
    made = repeat.rebind_buffers([[one] for one in steps], (ax, ag, at, ad, ao, stats[0] if stats else none, scratch))
    ready = repeat.launch_sequence(TORCH, device, made, out, 4, results, nbytes)
    _again.put(name, None if ready is None else (ready, asked))


# ---- gradients


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, gamma: Any, beta: Any, asked: Asked, stats: Tensor, out: Tensor, passes_on: bool) -> Any:
        ctx.asked = asked
        ctx.save_for_backward(x, gamma, beta, stats)
        if not passes_on:
            return out
        ctx.set_materialize_grads(False)  # if nothing else read x, there is nothing to add
        return out, x

    @staticmethod
    def backward(ctx: Any, dout: Any, more: Any = None) -> Any:
        x, gamma, beta, stats = ctx.saved_tensors
        wanted, others = ctx.needs_input_grad[:3], (None,) * 4
        if dout is None:
            return more, None, None, *others
        if torch.is_grad_enabled() or _traced(x, gamma if gamma is not None else x, beta, dout) or _is_batched(dout):
            dx, *rest = _differentiable(ctx.asked, x, gamma, beta, dout, wanted)
            return dx if dx is None or more is None else dx + more, *rest, *others
        made = backward(ctx.asked, dout, x, gamma, beta, stats, more if wanted[0] else None)
        return *(one if needed else None for one, needed in zip(made, wanted, strict=True)), *others


#: ``_Function.apply`` without checks that were made.
_apply = super(torch.autograd.Function, _Function).apply


def _differentiable(asked: Asked, x: Any, gamma: Any, beta: Any, dout: Any, wanted: Sequence[bool]) -> tuple[Any, ...]:
    """The gradients as functions that torch differentiates in their turn."""
    with torch.enable_grad():
        z = _theirs(asked, x, gamma, beta)
    given = [one for one, needed in zip((x, gamma, beta), wanted, strict=True) if needed]
    found = iter(torch.autograd.grad(z, given, dout.to(z.dtype), create_graph=torch.is_grad_enabled()))
    return tuple(next(found) if needed else None for needed in wanted)


def backward(asked: Asked, dout: Any, x: Any, gamma: Any, beta: Any, stats: Any, more: Any = None) -> tuple[Any, Any, Any]:
    """The gradients of x, to which `more` is added, gamma and beta; None for what is not there."""
    options = "gradient", asked
    operands = dout, x, stats, gamma, beta, more
    made = repeat.replay(_again, options, *operands) if repeat.possible() else None
    order = _order(x, asked)
    if made is None:
        dense = without_gaps(dout, order)
        made = repeat.replay(_again, options, dense, *operands[1:]) if dense is not dout and repeat.possible() else None
        if made is None:
            return _first_backward(asked, options, dense, x, gamma, beta, stats, more)
    return _named(made[1:], gamma, beta)


def _named(made: Sequence[Any], gamma: Any, beta: Any) -> tuple[Any, Any, Any]:
    """x's gradient and those of parameters that are there, by their names."""
    dx, *others = made
    return dx, others[0] if gamma is not None else None, others[-1] if beta is not None else None


def _first_backward(
    asked: Asked, options: tuple[Any, ...], dout: Any, x: Any, gamma: Any, beta: Any, stats: Any, more: Any
) -> tuple[Any, Any, Any]:
    """The gradients in a call that is not repeated."""
    order = _order(x, asked)
    given, dense = TORCH.as_kernel_input(x, order), TORCH.as_kernel_input(dout, order)
    found = _device_of(asked, TORCH.signature(given), order is not None, (_is_wide(x, gamma), _is_wide(x, beta)))
    assert found is not None
    norm, device = found
    fits = engine.gradient_fits(norm)
    if not fits or (more is not None and not engine.adds_more(norm)):
        dx, *rest = backward(asked, dout, x, gamma, beta, stats) if fits else _by_torch(asked, dout, x, gamma, beta)
        return dx if more is None else dx + more, rest[0], rest[1]
    besides = None if more is None else TORCH.as_kernel_input(more, order)
    dx = TORCH.empty(x.shape, x, device, order)
    launcher, workspace = engine.compiled(norm, device, "", True)
    by_gamma, by_beta = (None if one is None else torch.empty_like(one) for one in (gamma, beta))
    execute.launch(TORCH, device, launcher, (given, dense, stats, gamma, beta, besides), (dx, by_gamma, by_beta), workspace)
    name = _again.new_key(options, (dout, x, stats, gamma, beta, more), device)
    if name is not None and given is x and dense is dout and besides is more:
        steps, nbytes = engine.steps_for(norm, device, gradient=True)
        results = [TORCH.maker(tuple(x.shape), x.dtype, x.device, order)]
        results += [TORCH.maker(tuple(one.shape), one.dtype, one.device, None) for one in (gamma, beta) if one is not None]
        # dout, x, stats, gamma, beta, more | dx, and the gradients of gamma and beta that are there | workspace | none
        ad, ax, stat, ag, at, am, adx, *others = ((i, 0) for i in range(6 + len(results) + 2))
        *made, scratch, none = others
        of_gamma = made.pop(0) if gamma is not None else none
        of_beta = made.pop(0) if beta is not None else none
        rebound = repeat.rebind_buffers([[one] for one in steps], (ax, ad, stat, ag, at, am, adx, of_gamma, of_beta, scratch))
        ready = repeat.launch_sequence(TORCH, device, rebound, dx, 6, results, nbytes)
        _again.put(name, ready)
    return dx, by_gamma, by_beta


def _by_torch(asked: Asked, dout: Any, x: Any, gamma: Any, beta: Any) -> tuple[Any, Any, Any]:
    """The same by torch."""
    leaves = [None if one is None else one.detach().requires_grad_() for one in (x, gamma, beta)]
    dx, by_gamma, by_beta = _differentiable(asked, leaves[0], leaves[1], leaves[2], dout, [one is not None for one in leaves])
    return torch.empty_like(x).copy_(dx), by_gamma, by_beta


# ---- the operators, for graphs that torch's compilers take apart


def spec_of(asked: Asked) -> list[int]:
    """The options but eps in integers."""
    return [asked.groups, asked.axes, int(asked.rms), ACTIVATIONS.index(asked.activation)]


def _asked_of(eps: float, spec: Sequence[int]) -> Asked:
    groups, axes, rms, activation = spec
    return Asked(groups, axes, eps, rms, ACTIVATIONS[activation])


def _norm_alone(x: Any, gamma: Any, beta: Any, added: Any, eps: float, spec: Sequence[int]) -> Any:
    options = "operator", eps, *spec, False
    made = repeat.replay(_again, options, x, gamma, beta, added) if repeat.possible() else None
    if made is not None:
        return made[-1]
    asked = _asked_of(eps, spec)
    if not is_taken(asked, x, gamma, beta):
        return torch.empty_like(x).copy_(_theirs(asked, x if added is None else _with(x, added), gamma, beta))
    if added is not None and _order(x, asked) is None:
        return forward(asked, _with(x, added), gamma, beta, False)[0]
    out, _ = forward(asked, x, gamma, beta, False, added)
    _remember(options, asked, x, gamma, beta, out, False, added)
    return out


def _norm_with_stats(x: Any, gamma: Any, beta: Any, eps: float, spec: Sequence[int]) -> tuple[Any, Any]:
    options = "operator", eps, *spec, True
    made = repeat.replay(_again, options, x, gamma, beta, None) if repeat.possible() else None
    if made is not None:
        return made[-1], made[1]
    asked = _asked_of(eps, spec)
    if not is_taken(asked, x, gamma, beta):
        return torch.empty_like(x).copy_(_theirs(asked, x, gamma, beta)), _fake_stats(x, asked).zero_()
    out, stats = forward(asked, x, gamma, beta, True)
    _remember(options, asked, x, gamma, beta, out, True)
    return out, stats


def _fake_stats(x: Any, asked: Asked) -> Any:
    sets = (math.prod(x.shape[: x.dim() - asked.axes]), 1) if asked.axes else (x.shape[0], asked.groups)
    return x.new_empty((*sets, 2), dtype=torch.float32)


def _norm_backward(dout: Any, x: Any, gamma: Any, beta: Any, stats: Any, eps: float, spec: Sequence[int]) -> tuple[Any, Any, Any]:
    asked = _asked_of(eps, spec)
    compute = backward if is_taken(asked, x, gamma, beta) else None
    dx, *others = _by_torch(asked, dout, x, gamma, beta) if compute is None else compute(asked, dout, x, gamma, beta, stats)
    by_gamma, by_beta = (x.new_empty(0) if one is None else one for one in others)
    return dx, by_gamma, by_beta


class _OfOperators(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, gamma: Any, beta: Any, eps: float, spec: Sequence[int]) -> Any:
        out, stats = torch.ops.pycuda_conv.norm_stats.default(x, gamma, beta, eps, spec)
        ctx.save_for_backward(x, gamma, beta, stats)
        ctx.how = eps, spec
        return out

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        x, gamma, beta, stats = ctx.saved_tensors
        made = torch.ops.pycuda_conv.norm_backward.default(dout, x, gamma, beta, stats, *ctx.how)
        return made[0], made[1] if gamma is not None else None, made[2] if beta is not None else None, None, None


def _norm_recorded(x: Any, gamma: Any, beta: Any, eps: float, spec: Sequence[int]) -> Any:
    return _OfOperators.apply(x, gamma, beta, eps, spec)


operators.define(
    "norm(Tensor x, Tensor? gamma, Tensor? beta, Tensor? added, float eps, int[] spec) -> Tensor", _norm_alone,
    lambda x, *rest: torch.empty_like(x),
)
operators.define(
    "norm_stats(Tensor x, Tensor? gamma, Tensor? beta, float eps, int[] spec) -> (Tensor, Tensor)", _norm_with_stats,
    lambda x, gamma, beta, eps, spec: (torch.empty_like(x), _fake_stats(x, _asked_of(eps, spec))),
)
operators.define(
    "norm_backward(Tensor dout, Tensor x, Tensor? gamma, Tensor? beta, Tensor stats, float eps, int[] spec) -> (Tensor, Tensor, Tensor)",
    _norm_backward,
    lambda dout, x, gamma, beta, *rest: (
        torch.empty_like(x), *(x.new_empty(0) if one is None else torch.empty_like(one) for one in (gamma, beta)),
    ),
)
operators.define_by_others("norm_recorded(Tensor x, Tensor? gamma, Tensor? beta, float eps, int[] spec) -> Tensor", _norm_recorded)
