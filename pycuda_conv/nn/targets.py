"""The calls that :mod:`pycuda_conv.nn.graph` puts in the place of chains, for the two modes of the backend.

In light mode the graph runs as it is. Its calls are functions made here, each of which knows its options: the fewer arguments a call has
and the fewer questions it asks, the less time it takes the host. For inductor the calls are operators, ``torch.ops.pycuda_conv.*``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node

from pycuda_conv import dispatch, invariance
from pycuda_conv.arrays import torch_internals
from pycuda_conv.nn import (
    casting,
    concatenation,
    conv_norms,
    evaluation,
    folding,
    fused,
    linear,
    normalise,
    norms,
    pairs,
    pooling,
    upsampling,
)
from pycuda_conv.nn.autograd import _flat, without_autocast
from pycuda_conv.nn.fused.launches import _LayerSpec
from pycuda_conv.nn.graph.calls import Norm, Options, Targets
from pycuda_conv.nn.graph.steps import value
from pycuda_conv.nn.normalise import Asked
from pycuda_conv.nn.options import asked_for

_ANYWHERE = None, None, None, False


class _Folding(Targets):
    """Norms of chains in evaluation become factors and summands, by one call at the graph's start for all of them, in each call anew."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self._folded: list[tuple[Node, Options, Norm, Any, torch.dtype]] = []
        #: the options of the second of two convolutions that one call sums
        self._others: dict[Node, Options | None] = {}

    def evaluate(
        self, options: Options, operands: Sequence[Any], dtype: torch.dtype, norm: Norm | None, residual: Any, early: bool
    ) -> Node:
        x, weight = (self.cast(n, dtype) for n in operands[:2])
        if norm is not None and early:
            made = self.graph.call_function(_unfinished, (x, weight, residual))
            self._folded.append((made, options, norm, operands[2], dtype))
            self.waiting[made] = options
            return made
        bias = self.cast(operands[2], dtype)
        made = self.evaluate_alone(options, x, weight, bias, norm, residual)
        if norm is None and options.settings.padding_mode == "zeros":
            self.evaluated[made] = options
            if residual is None and options.activation is None:
                self.plain[made] = options, x, weight, bias
        return made

    def convolve_parts(self, node: Node, parts: Sequence[Node]) -> None:
        _, weight, residual = node.args
        node.args = parts[0], weight, residual, parts[1], None
        self._others[node] = None

    def convolve_two(self, options: Options, of_other: Options | None, operands: Sequence[Any], norm: Norm, bias: Any) -> Node:
        made = self.graph.call_function(_unfinished, tuple(operands))
        self._folded.append((made, options, norm, bias, value(operands[1]).dtype))
        self._others[made] = of_other
        return made

    def evaluate_alone(self, options: Options, x: Node, weight: Node, bias: Any, norm: Norm | None, residual: Any) -> Node:
        """A chain whose norm is folded where it stands."""
        raise NotImplementedError

    def fold(self, vectors: list[Any], eps: list[float], wide: bool) -> Node:
        """The call that folds norms."""
        raise NotImplementedError

    def scale(self, node: Node, options: Options, start: int, folded: Node, place: str) -> None:
        """Let a chain's call read its norm, which lies at `start`; `place` is the kind of the tensors' device."""
        raise NotImplementedError

    def finish(self) -> None:
        super().finish()
        groups: dict[Any, list[tuple[Node, Options, Norm, Any, torch.dtype]]] = {}
        for one in self._folded:
            groups.setdefault((value(one[0].args[1]).device, one[4] is torch.float64), []).append(one)
        first = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
        for (device, wide), members in groups.items():
            vectors = [v for _, _, norm, bias, _ in members for v in (*norm.vectors, bias)]
            starts = folding.starts_of([folding.channels_of([value(v) for v in norm.vectors]) for _, _, norm, _, _ in members])
            with self.graph.inserting_before(first):
                folded = self.fold(vectors, [norm.eps for _, _, norm, _, _ in members], wide)
            for (node, options, *_), start in zip(members, starts, strict=False):
                self.scale(node, options, start, folded, device.type)


def _unfinished(*operands: Any) -> Any:
    """Stands in a graph until it is known where the norm lies."""
    raise NotImplementedError


# ---- light mode


class Light(_Folding):
    """Functions for graphs that run as they are."""

    sums_in_training = counts = shares = nests_cats = True
    casts_early = False  # a repeated convolution inside of torch.autocast casts in its own sequence of launches

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        #: the trained layers and norms that can pass their input on, and what makes their calls
        self._passing: dict[Node, Callable[..., Any]] = {}

    def evaluate_alone(self, options: Options, x: Node, weight: Node, bias: Any, norm: Norm | None, residual: Any) -> Node:
        vectors = (None,) * 4 if norm is None else norm.vectors
        call = evaluation_of(options, 0.0 if norm is None else norm.eps, value(x).device.type)
        return self.graph.call_function(call, (x, weight, bias, *vectors, residual))

    def cast_together(self, parameters: list[Node], dtype: torch.dtype) -> Node:
        return self.graph.call_function(casting.cast_all, (dtype, parameters))

    def fold(self, vectors: list[Any], eps: list[float], wide: bool) -> Node:
        return self.graph.call_function(folding.fold_norms, (vectors, eps, wide))

    def scale(self, node: Node, options: Options, start: int, folded: Node, place: str) -> None:
        if node in self._others:
            node.target, node.args = two_of(options, self._others[node], start, place), (*node.args, folded)
            return
        x, weight, residual = node.args
        node.target, node.args = scaled_of(options, start, place), (x, weight, folded, residual)

    def train(
        self, options: Options, operands: Sequence[Any], dtype: torch.dtype, norm: Norm, residual: Any, grad: bool
    ) -> Node:
        call = partial(training_of, options, norm.of_batch, norm.momentum, norm.eps, dtype, value(operands[0]).device.type)
        counted = None if norm.counts is None else norm.counts[1]
        made = self.graph.call_function(call(), (*operands, *norm.vectors, counted, residual))
        if grad and value(operands[0]).dtype is dtype and value(operands[0]).requires_grad:
            self._passing[made] = call
        return made

    def pass_on(self, node: Node) -> bool:
        call = self._passing.get(node)
        if call is None:
            return False
        node.target = call(True)
        return True

    def convolve(self, options: Options, operands: Sequence[Any], dtype: torch.dtype) -> Node:
        return self.graph.call_function(convolution_of(options), tuple(operands))

    def fold_filter(self, weight: Node, how: Any, last: bool, gradient: bool) -> Node:
        return self.graph.call_function(folding_of(how, last, gradient), (weight,))

    def enlarge(self, x: Node, times: tuple[int, ...]) -> Node | None:
        return self.graph.call_function(upsampling.enlarge, (x, times))

    def concatenate(self, a: Node, b: Node) -> Node | None:
        return self.graph.call_function(concatenation.cat, (a, b))

    def max_pool(self, given: dict[str, Any], gradient: bool) -> Node | None:
        windows = tuple(given[name] for name in ("kernel_size", "stride", "padding", "dilation"))
        if not all(_is_constant(one) for one in windows):
            return None
        return self.graph.call_function(pooling_of(windows, bool(given["ceil_mode"])), (given["input"],))

    def mean_pool(self, given: dict[str, Any]) -> Node | None:
        windows = tuple(given[name] for name in MEAN_POOL_OPTIONS)
        return self.graph.call_function(mean_pooling_of(windows), (given["input"],)) if all(map(_is_constant, windows)) else None

    def product(
        self, given: dict[str, Any], scale: Any, residual: Any, activation: Any, moved: bool, gradient: bool
    ) -> Node | None:
        call = product_of(activation, moved) if not gradient else linear.linear
        more = () if gradient else (scale, residual)
        return self.graph.call_function(call, (given["input"], given["weight"], given["bias"], *more))


    def normalise_groups(self, x: Any, gamma: Any, beta: Any, added: Any, asked: Asked, gradient: bool) -> Node | None:
        if not normalise.pays(value(x)):
            return None
        made = self.graph.call_function(normalise.norm_of_graph(asked), (x, gamma, beta, added))
        if gradient and value(x).requires_grad:
            self._passing[made] = partial(normalise.norm_of_graph, asked)
        return made

    def normalise_pixels(self, x: Any, gamma: Any, asked: Asked) -> Node | None:
        return self.graph.call_function(normalise.norm_of_pixels(asked), (x, gamma)) if normalise.pays(value(x)) else None

    def normalise_rows(self, x: Any, gamma: Any, beta: Any, asked: Asked) -> Node | None:
        return self.graph.call_function(normalise.norm_of_graph(asked), (x, gamma, beta)) if normalise.pays(value(x)) else None

    def convolve_and_normalise(self, options: Options, operands: Sequence[Any], asked: Asked) -> Node:
        return self.graph.call_function(normalised_convolution_of(options, asked, value(operands[0]).device.type), tuple(operands))

    def normalise(self, x: Any, norm: Norm, activation: Any) -> Node | None:
        counted = None if norm.counts is None else norm.counts[1]
        call = normalisation_of(norm.momentum, norm.eps, activation)
        return self.graph.call_function(call, (x, *norm.vectors, counted))


def _is_constant(option: Any) -> bool:
    if isinstance(option, (list, tuple)):
        return all(_is_constant(one) for one in option)
    return option is None or isinstance(option, int)


def _asked(options: Options) -> tuple[Any, ...]:
    """The members of a :class:`pycuda_conv.call.Call` without an activation."""
    function, size = ("conv_transpose", options.output_padding) if options.transposed else ("conv", 0)
    ndim, stride, padding, dilation, groups, precision, *_ = options.settings
    return function, ndim, stride, padding, dilation, groups, precision, size


def asked_of_chain(options: Options, eps: float) -> tuple[Any, ...]:
    """A chain's options as ``nn.evaluation._evaluate`` takes them."""
    function, size = ("conv_transpose", options.output_padding) if options.transposed else ("conv", 0)
    return asked_for(options.settings, options.activation, eps, function, size)


def evaluation_of(options: Options, eps: float, place: str) -> Callable[..., Any]:
    """(x, weight, bias, gamma, beta, mean, var, residual) -> a chain without gradients."""
    asked = asked_of_chain(options, eps)
    compute, is_cast = evaluation._evaluate, torch.is_autocast_enabled

    def evaluate(x: Any, weight: Any, bias: Any, gamma: Any, beta: Any, mean: Any, var: Any, residual: Any) -> Any:
        if is_cast(place):
            with without_autocast(x):
                return compute(asked, x, weight, bias, gamma, beta, mean, var, residual)
        return compute(asked, x, weight, bias, gamma, beta, mean, var, residual)

    return evaluate


def normalised_convolution_of(options: Options, asked: Asked, place: str) -> Callable[..., Any]:
    """(x, weight, bias, gamma, beta, added) -> the group norm of a convolution, without gradients."""
    conv, compute, is_cast = asked_of_chain(options, 0.0), conv_norms.conv_norm, torch.is_autocast_enabled

    def normalised(x: Any, weight: Any, bias: Any, gamma: Any, beta: Any, added: Any) -> Any:
        if is_cast(place):
            with without_autocast(x):
                return compute(conv, asked, x, weight, bias, gamma, beta, added)[1]
        return compute(conv, asked, x, weight, bias, gamma, beta, added)[1]

    return normalised


def scaled_of(options: Options, start: int, place: str) -> Callable[..., Any]:
    """(x, weight, folded, residual) -> a chain without gradients, whose norm lies at `start` in `folded`."""
    asked, compute, is_cast = asked_of_chain(options, 0.0), folding.scaled, torch.is_autocast_enabled

    def scaled(x: Any, weight: Any, folded: Any, residual: Any) -> Any:
        if is_cast(place):
            with without_autocast(x):
                return compute(asked, start, x, weight, folded, residual)
        return compute(asked, start, x, weight, folded, residual)

    return scaled


def two_of(options: Options, of_other: Options | None, start: int, place: str) -> Callable[..., Any]:
    """(x, weight, residual, other, its weight, folded) -> the sum of two convolutions: see :func:`pycuda_conv.nn.pairs.two`."""
    asked, compute, is_cast = asked_of_chain(options, 0.0), pairs.two, torch.is_autocast_enabled
    other = () if of_other is None else asked_of_chain(of_other, 0.0)

    def summed(*operands: Any) -> Any:
        if is_cast(place):
            with without_autocast(operands[0]):
                return compute(asked, other, start, *operands)
        return compute(asked, other, start, *operands)

    return summed


def training_of(
    options: Options, of_batch: bool, momentum: float, eps: float, dtype: torch.dtype, place: str, passes_on: bool = False
) -> Callable[..., Any]:
    """(x, weight, bias, gamma, beta, mean, var, count, residual) -> a chain with batch normalisation, with its own backward pass.

    If it `passes_on` the input, that is a second result, for other readers of it.
    """
    layer, is_cast = fused.Layer(options.activation, of_batch, options.settings, momentum, eps), torch.is_autocast_enabled

    def train(x: Any, weight: Any, bias: Any, gamma: Any, beta: Any, mean: Any, var: Any, count: Any, residual: Any) -> Any:
        x = x if x.dtype is dtype else x.to(dtype)
        weight = weight if weight.dtype is dtype else weight.to(dtype)
        bias = bias if bias is None or bias.dtype is dtype else bias.to(dtype)
        if is_cast(place):
            with without_autocast(x):
                return layer(x, weight, bias, gamma, beta, mean, var, count, residual, passes_on)
        return layer(x, weight, bias, gamma, beta, mean, var, count, residual, passes_on)

    return train


def convolution_of(options: Options) -> Callable[..., Any]:
    """(x, weight, bias) -> a convolution with gradients. It casts as ``torch.autocast`` says."""
    asked, convolve_, settings = (*_asked(options), None), dispatch.convolve, options.settings
    if settings.padding_mode != "zeros" or settings.algorithm is not None:
        asked = *asked, settings.algorithm, settings.padding_mode, settings.padding_value, None
    in_block = (*asked[:9], invariance.WORD, settings.padding_mode, settings.padding_value, None)

    def convolve(x: Any, weight: Any, bias: Any) -> Any:
        how = in_block if invariance.blocks and invariance.with_invariance(None, False) else asked
        return convolve_(how, (x, weight, bias, None, None), None, _ANYWHERE)

    return convolve


def normalisation_of(momentum: float, eps: float, activation: Any) -> Callable[..., Any]:
    """(x, gamma, beta, mean, var, count) -> a batch normalisation by the batch's statistics, and an activation."""

    def normalise(x: Any, gamma: Any, beta: Any, mean: Any, var: Any, count: Any) -> Any:
        return norms.norm_act(x, gamma, beta, mean, var, count, momentum, eps, activation)

    return normalise


def folding_of(how: Any, last: bool, gradient: bool) -> Callable[..., Any]:
    """(weight) -> the folded filter of a convolution behind an upsampling."""

    def folded(weight: Any) -> Any:
        return upsampling.folded_recorded(weight, how, last) if gradient else upsampling.fold_filter(weight, how, last)

    return folded


def pooling_of(windows: Any, ceil_mode: bool) -> Callable[..., Any]:
    """(x) -> its maxima."""

    size, stride, padding, dilation = windows

    def max_pool(x: Any) -> Any:
        return pooling.max_pool(x, size, stride, padding, dilation, ceil_mode)

    return max_pool


MEAN_POOL_OPTIONS = "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"


def mean_pooling_of(windows: tuple[Any, ...]) -> Callable[..., Any]:
    """(x) -> its means."""

    def mean_pool(x: Any) -> Any:
        return pooling.mean_pool(x, *windows)

    return mean_pool


def product_of(activation: Any, moved: bool) -> Callable[..., Any]:
    """(x, weight, bias, scale, residual) -> a linear layer and what follows it, without gradients."""

    def product(x: Any, weight: Any, bias: Any, scale: Any, residual: Any) -> Any:
        return linear.in_one(x, weight, bias, scale, residual, activation, moved)

    return product


# ---- inductor


def _spec(options: Options) -> list[int]:
    """The options as ``torch.ops.pycuda_conv.evaluate`` takes them."""
    ndim, stride, padding, dilation, groups, precision, _, _, algorithm, *_ = options.settings
    return evaluation.spec_of(
        ndim, (1,) * ndim, stride=stride, padding=padding, dilation=dilation, groups=groups, precision=precision,
        activation=options.activation, transposed=options.transposed, output_padding=options.output_padding,
        padding_mode=options.settings.padding_mode, padding_value=options.settings.padding_value, algorithm=algorithm,
    )


class Operators(_Folding):
    """Operators for graphs that torch's compilers take apart."""

    sums_in_training = counts = turns_filters = True

    def evaluate_alone(self, options: Options, x: Node, weight: Node, bias: Any, norm: Norm | None, residual: Any) -> Node:
        vectors, eps = ((None,) * 4, 0.0) if norm is None else (norm.vectors, norm.eps)
        call = torch.ops.pycuda_conv.evaluate.default
        return self.graph.call_function(call, (x, weight, bias, *vectors, residual, eps, _spec(options)))

    def cast_together(self, parameters: list[Node], dtype: torch.dtype) -> Node:
        return self.graph.call_function(torch.ops.pycuda_conv.cast_all.default, (parameters, dtype is torch.bfloat16))

    def fold(self, vectors: list[Any], eps: list[float], wide: bool) -> Node:
        return self.graph.call_function(torch.ops.pycuda_conv.fold_norms.default, (vectors, eps, wide))

    def scale(self, node: Node, options: Options, start: int, folded: Node, place: str) -> None:
        if node in self._others:
            other = self._others[node]
            specs = _spec(options), [] if other is None else _spec(other)
            node.target, node.args = torch.ops.pycuda_conv.two.default, (*node.args, folded, start, *specs)
            return
        x, weight, residual = node.args
        node.target, node.args = torch.ops.pycuda_conv.scaled.default, (x, weight, folded, residual, start, _spec(options))

    def train(
        self, options: Options, operands: Sequence[Any], dtype: torch.dtype, norm: Norm, residual: Any, grad: bool
    ) -> Node:
        x, weight, bias = (self.cast(n, dtype) for n in operands)
        ours, call = torch.ops.pycuda_conv, self.graph.call_function
        layer = _LayerSpec(options.activation, norm.of_batch, options.settings)
        if norm.of_batch:
            counted = None if norm.counts is None else norm.counts[1]
            given = (x, weight, bias, *norm.vectors, counted, residual, norm.momentum, norm.eps, layer.in_integers())
            return call(ours.fused_layer.default, given)
        gamma, beta, mean, var = norm.vectors
        flat = (layer if residual is None else layer._replace(activation=None)).in_integers()
        if grad:
            call(torch_internals.set_grad_enabled, (False,))
        both = call(ours.frozen_statistics.default, (x, weight, bias, mean, var, norm.eps, flat))
        if grad:
            call(torch_internals.set_grad_enabled, (True,))
        y, statistics = (call(operator.getitem, (both, i)) for i in (0, 1))
        made = call(ours.fused_conv_bn_relu.default, (x, weight, bias, gamma, beta, y, statistics, flat))
        if residual is not None:
            made = call(operator.add, (made, residual))
            made = made if options.activation is None else call(torch.relu, (made,))
        return made

    def fold_filter(self, weight: Node, how: Any, last: bool, gradient: bool) -> Node:
        call = torch.ops.pycuda_conv.folded_filter if gradient else torch.ops.pycuda_conv.fold_filter
        return self.graph.call_function(call.default, (weight, upsampling.spec_of(how, last)))

    def max_pool(self, given: dict[str, Any], gradient: bool) -> Node | None:
        x, names = value(given["input"]), ("kernel_size", "stride", "padding", "dilation")
        if not gradient or given["ceil_mode"] or not all(_is_constant(given[name]) for name in names):
            return None  # in evaluation inductor joins the maxima with their neighbours
        windows = pooling.pairs_of(*(given[name] for name in names))
        if not pooling.is_pooled(x, windows):
            return None
        flat = [n for pair in windows for n in pair]
        return self.graph.call_function(torch.ops.pycuda_conv.max_pool.default, (given["input"], flat))

    def product(
        self, given: dict[str, Any], scale: Any, residual: Any, activation: Any, moved: bool, gradient: bool
    ) -> Node | None:
        x, weight, bias = (given[name] for name in ("input", "weight", "bias"))
        if gradient or not linear.pays(value(x), value(weight), activation, residual is not None):
            return None
        given_all = x, weight, bias, scale, residual, linear.spec_of(activation, moved)
        return self.graph.call_function(torch.ops.pycuda_conv.product.default, given_all)

    def normalise_groups(self, x: Any, gamma: Any, beta: Any, added: Any, asked: Asked, gradient: bool) -> Node | None:
        if not normalise.pays(value(x)):
            return None
        options = asked.eps, normalise.spec_of(asked)
        if gradient:
            return self.graph.call_function(torch.ops.pycuda_conv.norm_recorded.default, (x, gamma, beta, *options))
        return self.graph.call_function(torch.ops.pycuda_conv.norm.default, (x, gamma, beta, added, *options))

    def normalise_pixels(self, x: Any, gamma: Any, asked: Asked) -> Node | None:
        if not normalise.pays(value(x)):
            return None
        last, permute = value(x).dim() - 1, torch.ops.aten.permute.default
        rows = self.graph.call_function(permute, (x, [0, *range(2, last + 1), 1]))
        made = self.graph.call_function(
            torch.ops.pycuda_conv.norm.default, (rows, gamma, None, None, asked.eps, normalise.spec_of(asked))
        )
        with torch.no_grad():
            rows.meta["example_value"] = value(x).movedim(1, last)
            made.meta["example_value"] = torch.empty_like(value(rows))
        return self.graph.call_function(permute, (made, [0, last, *range(1, last)]))

    def convolve_and_normalise(self, options: Options, operands: Sequence[Any], asked: Asked) -> Node:
        given = *operands, asked.eps, _spec(options), normalise.spec_of(asked)
        both = self.graph.call_function(torch.ops.pycuda_conv.conv_norm.default, given)
        return self.graph.call_function(operator.getitem, (both, 1))

    def convolve(self, options: Options, operands: Sequence[Any], dtype: torch.dtype) -> Node:
        x, weight, bias = (self.cast(n, dtype) for n in operands)
        name = "conv_transpose" if options.transposed else "conv"
        size = list(options.output_padding) if options.transposed else []
        call = getattr(torch.ops.pycuda_conv, name).default
        return self.graph.call_function(call, (x, weight, bias, size, *_flat(options.settings)))


