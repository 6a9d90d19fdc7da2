"""The calls that replace steps of a graph: what the two modes of the backend have in common."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from pycuda_conv.nn.autograd import Settings
from pycuda_conv.nn.graph.steps import value
from pycuda_conv.nn.normalise import Asked
from pycuda_conv.nn.upsampling import Folding


class Options(NamedTuple):
    """The options of a chain in numbers."""

    transposed: bool
    settings: Settings
    output_padding: tuple[int, ...]
    activation: str | tuple[str, float] | None = None


class Norm(NamedTuple):
    """A batch normalisation of a chain: gamma, beta, mean, variance, each a node or None, and its options.

    Without mean and variance, and with an eps of 1, it is a factor and a summand for each channel.
    """

    vectors: tuple[Any, ...]
    of_batch: bool
    momentum: Any
    eps: Any
    #: the step that counts batches, and the count
    counts: tuple[Node, Node] | None = None


class Targets:
    """The calls that replace steps; :mod:`pycuda_conv.nn.targets` has one class for each mode. They write nodes into `graph`."""

    #: whether a layer that is trained takes the sum with a residual, and whether it counts the batches
    sums_in_training = counts = False

    #: whether an activation that is computed twice becomes one, as inductor makes it
    shares = False

    #: whether convolutions with gradients take parameters that were cast at the graph's start
    casts_early = True

    #: whether concatenations with gradients begin with the result of an earlier one
    nests_cats = False

    #: whether filters that the graph computes are asked for in the order of the input's axes, since what computes them can write that order
    turns_filters = False

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        #: the parameters that are cast at the graph's start, with their types, and the nodes that stand for the results
        self.early: dict[tuple[Node, torch.dtype], Node] = {}
        #: the nodes of convolutions without anything behind them, with their options and operands; the options of all whose borders
        #: are zeros, and of those whose norm is read at the graph's start; and the nodes of group norms, with the names of their steps.
        #: Calls have operands as ``evaluation._evaluate`` has
        self.plain: dict[Node, tuple[Options, Any, Any, Any]] = {}
        self.evaluated: dict[Node, Options] = {}
        self.waiting: dict[Node, Options] = {}
        self.normed: dict[Node, tuple[Asked, tuple[str, ...]]] = {}

    def cast(self, node: Any, dtype: torch.dtype) -> Any:
        """The node, or None, in the dtype that a convolution computes in: what ``torch.autocast`` does unseen."""
        if node is None or value(node).dtype is dtype:
            return node
        made = self.graph.call_method("to", (node, dtype))
        made.meta["example_value"] = value(node)
        return made

    def cast_early(self, parameter: Node, dtype: torch.dtype) -> Node:
        """A parameter in another dtype: one call at the graph's start casts all of these."""
        key = parameter, dtype
        if key not in self.early:
            made = self.early[key] = self.graph.call_method("to", key)
            with torch.no_grad():
                made.meta["example_value"] = value(parameter).detach().to(dtype)
        return self.early[key]

    def cast_together(self, parameters: list[Node], dtype: torch.dtype) -> Node:
        """The call that casts parameters."""
        raise NotImplementedError

    def evaluate(
        self, options: Options, operands: Sequence[Any], dtype: torch.dtype, norm: Norm | None, residual: Any, early: bool
    ) -> Node:
        """A chain without gradients; `operands` are input, filter and bias, to be cast to `dtype`.

        If it is `early`, the norm's vectors and the bias can be read at the graph's start.
        """
        raise NotImplementedError

    def convolve_two(self, options: Options, of_other: Options | None, operands: Sequence[Any], norm: Norm, bias: Any) -> Node:
        """The sum of two convolutions without gradients and an activation: see :func:`pycuda_conv.nn.pairs.two`.

        `operands` are input, filter, residual, and the other's input and filter. The summands of the norm and the bias, which are added,
        can be read at the graph's start.
        """
        raise NotImplementedError

    def concatenate(self, a: Node, b: Node) -> Node | None:
        """Two tensors whose channels are last in memory, concatenated along them, or None where that stays torch's."""
        return None

    def convolve_parts(self, node: Node, parts: Sequence[Node]) -> None:
        """Let a call that waits for its norm read two arrays in place of their concatenation."""
        raise NotImplementedError

    def finish(self) -> None:
        """Write the nodes that serve several chains."""
        waiting = set(self.early.values())
        first = next((n for n in self.graph.nodes if n.op != "placeholder" and n not in waiting), None)
        groups: dict[Any, list[tuple[Node, Node]]] = {}
        for (parameter, dtype), node in self.early.items():
            groups.setdefault((dtype, value(parameter).device), []).append((parameter, node))
        for (dtype, _), members in groups.items():
            with self.graph.inserting_before(first):
                cast = self.cast_together([parameter for parameter, _ in members], dtype)
                for i, (_, node) in enumerate(members):
                    made = self.graph.call_function(operator.getitem, (cast, i))
                    made.meta.update(node.meta)
                    node.replace_all_uses_with(made)
                    self.graph.erase_node(node)

    def train(
        self, options: Options, operands: Sequence[Any], dtype: torch.dtype, norm: Norm, residual: Any, grad: bool
    ) -> Node:
        """A chain with a batch normalisation, with gradients or by the batch's statistics; `grad` is torch's mode there."""
        raise NotImplementedError

    def convolve(self, options: Options, operands: Sequence[Any], dtype: torch.dtype) -> Node:
        """A convolution with gradients."""
        raise NotImplementedError

    def pass_on(self, node: Node) -> bool:
        """Let a trained layer have its input as a second result, if it can."""
        return False

    def max_pool(self, given: dict[str, Any], gradient: bool) -> Node | None:
        """Max pooling, or None where it stays torch's."""
        return None

    def mean_pool(self, given: dict[str, Any]) -> Node | None:
        """Mean pooling, or None where it stays torch's."""
        return None

    def product(
        self, given: dict[str, Any], scale: Any, residual: Any, activation: Any, moved: bool, gradient: bool
    ) -> Node | None:
        """A linear layer with the steps after it, or None where it stays torch's."""
        return None

    def fold_filter(self, weight: Node, how: Folding, last: bool, gradient: bool) -> Node:
        """The folded filter of a convolution behind an upsampling; with `last`, its second axis should be last in memory."""
        raise NotImplementedError

    def enlarge(self, x: Node, times: tuple[int, ...]) -> Node | None:
        """An upsampled image without gradients, or None where that stays torch's."""
        return None

    def normalise(self, x: Any, norm: Norm, activation: Any) -> Node | None:
        """A batch normalisation without a convolution in front, and an activation, or None where it stays torch's."""
        return None

    def normalise_groups(self, x: Any, gamma: Any, beta: Any, added: Any, asked: Asked, gradient: bool) -> Node | None:
        """A group norm and an activation, or None where they stay torch's."""
        return None

    def convolve_and_normalise(self, options: Options, operands: Sequence[Any], asked: Asked) -> Node:
        """The group norm of a convolution without gradients; `operands` are input, filter, bias, gamma, beta and what is added."""
        raise NotImplementedError

    def normalise_pixels(self, x: Any, gamma: Any, asked: Asked) -> Node | None:
        """A norm of each pixel over its channels, which are last in memory, or None where it stays torch's."""
        return None

    def normalise_rows(self, x: Any, gamma: Any, beta: Any, asked: Asked) -> Node | None:
        """A layer or RMS norm, or None where it stays torch's: inductor joins it with its neighbours."""
        return None
