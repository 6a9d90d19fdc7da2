"""A rewrite of one graph: chains of steps, and how far their parts can be moved."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from pycuda_conv.arrays import torch_internals
from pycuda_conv.nn.autograd import lies_in
from pycuda_conv.nn.graph.calls import Norm, Targets
from pycuda_conv.nn.graph.memory import DTYPES, is_barrier, is_plain, memory, written
from pycuda_conv.nn.graph.steps import SUMS_IN_PLACE, VIEWS, activation_of, is_identity, name_of, nodes_in, value
from pycuda_conv.problem import channels_last


class Found(NamedTuple):
    """What a rewrite did. Names are those of modules."""

    #: the names of a chain's steps
    fused: list[tuple[str, ...]]
    #: convolutions that are computed by this package, and why nothing was fused with them
    alone: list[tuple[str, str]]
    #: convolutions that stay torch's, and why
    left: list[tuple[str, str]]
    #: linear layers, poolings and normalisations
    others: list[tuple[str, ...]]


class Chain:
    """A chain that is being put together."""

    def __init__(self, convolution: Node, at: int, operands: Sequence[Any]) -> None:
        self.convolution = convolution
        self.nodes = [convolution]
        self.operands = list(operands)
        #: (node, where the graph read it), and the same for what is written
        self.reads = [(n, at) for n in operands if n is not None]
        self.writes: list[tuple[Node, int]] = []
        self.norm: Norm | None = None
        self.residual: Any = None
        self.activation: Any = None
        self.counter: Node | None = None
        #: an activation behind steps that change the shape alone: it is computed with the chain, in front of these, which stay
        self.late: Node | None = None
        self.why = ""
        #: whether a gradient of its convolution is recorded, and whether it is trained: known once the chain is complete
        self.gradient = self.training = False
        #: whether a linear layer's channels were moved to the second place
        self.moved = False

    def lies_right(self, node: Node) -> bool:
        """Whether a value lies as a linear layer with more steps is computed: with the channels last."""
        made = value(node)
        return lies(made, channels_last(made.dim(), made.dim() - 2) if self.moved else range(made.dim()))

    @property
    def last(self) -> Node:
        return self.nodes[-1]


class Rewrite:
    """The rewrite of one graph: :meth:`run` does it, and the other methods are for its passes.

    Parameters
    ----------
    gm : torch.fx.GraphModule
        Dynamo's.
    targets : Targets
    precision : str
        Arithmetic for float32 where the call itself does not say it.
    raises : bool
        Whether a fault of the rewrite itself is raised; tests ask for it.
    upsample_filter : str, optional
        What convolutions behind an upsampling do with their filters: see :func:`pycuda_conv.conv2d`.
    algorithm : str, optional
        Of convolutions whose call itself does not say it.
    """

    def __init__(
        self, gm: GraphModule, targets: Targets, precision: str = "fp32", raises: bool = False, upsample_filter: str | None = None,
        algorithm: str | None = None,
    ) -> None:
        self.upsample_filter = upsample_filter
        self.gm, self.graph, self.targets, self.precision, self.raises = gm, gm.graph, targets, precision, raises
        self.algorithm = algorithm
        self.nodes: list[Node | None] = list(self.graph.nodes)
        self.order: dict[Node, int] = {n: i for i, n in enumerate(self.graph.nodes)}
        self.found = Found([], [], [], [])
        inputs = [n for n in self.graph.nodes if n.op == "placeholder" and isinstance(value(n), torch.Tensor) and value(n).dtype in DTYPES]
        fixed = [n for n in inputs if "_dynamo_static_input_type" in n.meta.get("tensor_dict", {})]
        self.of_callers = memory(n for n in inputs if n not in set(fixed))
        self.of_module = memory(fixed) - self.of_callers
        self.grad_at_start = torch.is_grad_enabled()
        self.trained: set[Node] = set()
        #: concatenations, what they put together, and along which axis
        self.cats: list[tuple[Node, list[Node], int]] = []
        #: the names of the steps that a chain's call stands for
        self.steps: dict[Node, tuple[str, ...]] = {}
        self._memory: dict[Node, set[int]] = {}
        self._effects: dict[Node, tuple[bool, set[int], set[int]]] = {}

    def run(self, passes: Sequence[Pass]) -> Found:
        """Rewrite the graph by one pass after the other, and say what was done."""
        for take in passes:
            grad = torch.is_grad_enabled()
            for node in list(self.nodes):
                if node is None or node.op != "call_function" or node not in self.order:
                    continue
                if node.target is torch_internals.set_grad_enabled:
                    grad = bool(node.args[0])
                    continue
                try:
                    take(self, node, grad)
                except Exception as error:  # a fault of this rewrite must not be the caller's
                    if self.raises:
                        raise
                    self.found.left.append((name_of(node), f"{type(error).__name__}: {error}"))
        self._pass_on()
        self.targets.finish()
        self.gm.recompile()
        return self.found

    def _pass_on(self) -> None:
        """Let trained layers pass their inputs on to the readers after them, so that the gradients of all readers meet in one launch."""
        for layer in [n for n in self.nodes if n is not None and n in self.trained]:
            x = layer.args[0]
            later = [n for n in x.users if n is not layer and n in self.order and self.order[n] > self.order[layer]]
            if not later or len(later) < len(x.users) - 1 or any(n.op == "output" for n in later):
                continue
            its = self.memory_of(x)
            following = (n for n in self.nodes[self.order[x] + 1 :] if n is not None)
            if not its or any(is_barrier(n) or its & self.effects_of(n)[1] for n in following) or not self.targets.pass_on(layer):
                continue
            with self.graph.inserting_after(layer):
                passed = self.graph.call_function(operator.getitem, (layer, 1))
                made = self.graph.call_function(operator.getitem, (layer, 0))
            made.meta.update(layer.meta)
            passed.meta["example_value"] = value(x)
            self.order[made] = self.order[passed] = self.order[layer]
            layer.replace_all_uses_with(made, delete_user_cb=lambda n, own=(made, passed): n not in own)
            for node in later:
                node.replace_input_with(x, passed)

    # -- rules 1 to 4

    def reader_of(self, node: Node) -> Node | None:
        """The one reader of a node, which reads it once."""
        users = list(node.users)
        if len(users) != 1 or users[0].op not in ("call_function", "call_method"):
            return None
        return users[0] if sum(n is node for n in nodes_in((users[0].args, users[0].kwargs))) == 1 else None

    def memory_of(self, node: Node) -> set[int]:
        """The storages of a node's value."""
        found = self._memory.get(node)
        if found is None:
            found = self._memory[node] = memory([node])
        return found

    def effects_of(self, node: Node) -> tuple[bool, set[int], set[int]]:
        """Whether a step is a barrier; the memory that it may write, and the memory that it may read or write."""
        found = self._effects.get(node)
        if found is None:
            found = self._effects[node] = is_barrier(node), *self._touched(node, written(node))
        return found

    def forget(self, node: Node) -> None:
        """Ask again for the effects of a step that reads other values now."""
        self._effects.pop(node, None)

    def _touched(self, node: Node, writes: Iterable[Node]) -> tuple[set[int], set[int]]:
        """The memory that a step may write, given the nodes that it writes to; and that which it may read or write."""
        its = memory(writes)
        if its & self.of_callers:
            its |= self.of_callers | self.of_module
        elif its & self.of_module:
            its |= self.of_callers
        return its, its | memory(node.all_input_nodes)

    def reaches(
        self, chain: Chain, to: Node, reads: Sequence[tuple[Node, int]] = (), writes: Sequence[tuple[Node, int]] = (),
        own: Sequence[Node] = (),
    ) -> bool:
        """Whether all of a chain can be computed where `to` stands, with these reads and writes besides; `own` are nodes that go."""
        all_reads = [(self.memory_of(n), at) for n, at in (*chain.reads, *reads)]
        all_writes = [(self.memory_of(n), at) for n, at in (*chain.writes, *writes)]
        for at in range(self.order[chain.nodes[0]] + 1, self.order[to]):
            node = self.nodes[at]
            if node is None or node in chain.nodes or node is chain.counter or node in own:
                continue
            barrier, its_writes, touched = self.effects_of(node)
            if barrier or (its_writes and any(at > since and its_writes & m for m, since in all_reads)):
                return False
            if any(at > since and touched & m for m, since in all_writes):
                return False
        return True

    def after(self, chain: Chain, node: Node) -> Node | None:
        """The step after a chain's value. Dropouts in evaluation join the chain."""
        following = self.reader_of(node)
        while following is not None and is_identity(following) and self.reaches(chain, following):
            chain.nodes.append(following)
            following = self.reader_of(following)
        return following

    def needs_gradient(self, grad: bool, *nodes: Any) -> bool:
        """Whether a gradient of one of these nodes is recorded, given torch's mode there."""
        return grad and any(value(n).requires_grad for n in nodes if n is not None)

    def counter_of(self, norm: Node, after: int) -> tuple[Node, Node] | None:
        """The step that counts a norm's batches, between the step of that number and the norm, and the count."""
        stack = norm.meta.get("nn_module_stack")
        for at in range(self.order[norm] - 1, after, -1):
            node = self.nodes[at]
            if node is None or node.target not in SUMS_IN_PLACE or tuple(node.args[1:]) != (1,) or node.kwargs or node.users:
                continue
            count = node.args[0]
            if not isinstance(count, Node) or count.op not in ("placeholder", "get_attr"):
                continue
            v = value(count)
            if isinstance(v, torch.Tensor) and v.dtype is torch.int64 and v.dim() == 0 and stack and (
                list(node.meta.get("nn_module_stack") or ()) == list(stack)
            ):
                return node, count
        return None

    def take_sum(self, chain: Chain, node: Node, training: bool, grad: bool) -> Node | None:
        """Put the sum with a residual into a chain, if it can be. The result is the step after it, or None at the chain's end."""
        mine = chain.last
        if len(node.args) != 2 or node.kwargs:
            return None
        other = node.args[1] if node.args[0] is mine else node.args[0]
        v, own = value(other), value(mine)
        if not is_plain(other) or v.dtype is not own.dtype or v.device != own.device or not same(v.shape, own.shape):
            return None
        if node.target in SUMS_IN_PLACE and node.args[0] is not mine and not self._is_spent(other, node):
            return None
        if not training and self.needs_gradient(grad, other):
            return None
        read = [(other, self.order[node])]
        if not self.reaches(chain, node, read):
            return None
        chain.nodes.append(node)
        chain.reads += read
        chain.residual = other
        return self.after(chain, node)

    def _is_spent(self, written: Node, at: Node) -> bool:
        """Whether nothing reads a value's memory after the step `at`, which writes to it, but through that step's result."""
        its, end = self.memory_of(written), self.order[at]
        if not its or its & (self.of_callers | self.of_module) or written.op != "call_function":
            return False
        before = [n for n in self.nodes[:end] if n is not None and self.memory_of(n) & its]
        readers = [reader for n in before for reader in n.users]
        return all(n.op not in ("placeholder", "get_attr") for n in before) and all(self.order.get(m, end + 1) <= end for m in readers)

    def is_known_at_start(self, chain: Chain, read: Sequence[Node]) -> bool:
        """Whether what is read are inputs of the graph that no step before the chain's end writes to."""
        if not all(n.op == "placeholder" for n in read):
            return False
        its = set().union(*map(self.memory_of, read))
        before = (n for n in self.nodes[: self.order[chain.last]] if n is not None)
        return not any(its & self.effects_of(n)[1] for n in before)

    def drop(self, node: Node) -> None:
        """Delete a step that nothing reads any more."""
        self.nodes[self.order.pop(node)] = None
        self.graph.erase_node(node)

    def drop_counter(self, chain: Chain) -> None:
        """Delete the step that counts batches, if the chain's own call does that."""
        if chain.counter is not None:
            self.drop(chain.counter)

    def take_late_activation(self, chain: Chain, node: Node | None) -> None:
        """Put an activation into a chain that stands behind `node` and other steps that change the shape alone, if it can be."""
        while node is not None and node.target in VIEWS and nodes_in((node.args, node.kwargs))[:1] == nodes_in(node.args[:1]):
            node = self.reader_of(node)
            if node is not None and (activation := activation_of(node)):
                before, after = value(node.args[0]), value(node)
                kept = value(chain.last).dtype is before.dtype is after.dtype and same(before.stride(), after.stride())
                if kept and self.reaches(chain, node):
                    chain.activation, chain.late = activation, node
                return

    def drop_late(self, chain: Chain) -> None:
        """Delete the step of an activation that the chain's own call computes."""
        if chain.late is not None:
            chain.late.replace_all_uses_with(chain.late.args[0])
            self.drop(chain.late)

    def replace(self, nodes: Sequence[Node], new: Node, writes: Sequence[Node] = ()) -> None:
        """Let `new` take the place of the last of `nodes`, and delete them all. The other nodes keep their numbers in the order."""
        last = nodes[-1]
        new.meta.update(last.meta)
        last.replace_all_uses_with(new)
        at = self.order[last]
        for node in nodes:
            self.nodes[self.order.pop(node)] = None
        self.order[new], self.nodes[at] = at, new
        self._effects[new] = False, *self._touched(new, writes)
        for node in reversed(nodes):
            self.graph.erase_node(node)


#: Looks at one call of a graph, and puts another in its place if it knows it: (rewrite, node, whether torch records gradients there).
Pass = Callable[[Rewrite, Node, bool], None]


def lies(x: Any, order: Sequence[int] | None) -> bool:
    """Whether a tensor lies without gaps with its axes in this order; one without elements lies in any."""
    return order is not None and (statically_known_true(x.numel() == 0) or lies_in(x, order))


def same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes are known to be equal."""
    return len(a) == len(b) and all(statically_known_true(m == n) for m, n in zip(a, b, strict=True))


def is_of_channels(v: Any, own: Any) -> bool:
    """Whether a tensor has one number for each channel of another, in a shape that is broadcast over it."""
    wanted = [1] * own.dim()
    wanted[1] = own.shape[1]
    return own.dim() - 1 <= v.dim() and same([1] * (own.dim() - v.dim()) + list(v.shape), wanted)


def vector_of(rewrite: Rewrite, node: Any, channels: Any) -> Any:
    """A vector of a norm as (K,): where the graph gave a vector another shape, the vector itself."""
    if node is None or value(node).dim() == 1:
        return node
    source, its = node, rewrite.memory_of(node)
    while source.target in VIEWS and isinstance(source.args[0], Node) and sum(n != 1 for n in value(source).shape) <= 1:
        source = source.args[0]
        if value(source).dim() == 1 and same(value(source).shape, [channels]) and is_plain(source) and rewrite.memory_of(source) == its:
            return source
    made = rewrite.graph.call_method("reshape", (node, (-1,)))
    made.meta["example_value"] = value(node).detach().reshape(-1)
    return made
