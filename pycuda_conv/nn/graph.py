"""Finds the steps that belong to a convolution in a graph of ``torch.compile``, and puts one call in their place.

Dynamo's graph calls torch's functions, whatever class or function of the caller's made the call. A *chain* in it is a convolution,
transposed or not, and those of these steps that stand around it: zeros padded in front, a batch normalisation, the sum with a residual, and
an activation. All of a chain is computed where its last step stands. Other steps of the graph stand between, so a chain ends where that
would change a number:

1. Each value inside a chain has one reader, which reads it once.
2. Nothing in between writes to memory that the chain reads, or touches memory that it writes (running statistics).
3. Two values share memory if torch's fake tensors share a storage. Dynamo does not guard on which of a caller's inputs share memory. So a
   write to one of them counts as one to all inputs and parameters, and a write to a parameter as one to all inputs.
4. A step that changes a mode of torch's ends a chain.
5. A sum in place belongs to a chain only if it writes to the chain's own value.
6. A residual has the shape, dtype and device of the value that it is added to.
7. The tensors are strided ones that kernels read. A tensor of a subclass or of a transform of ``torch.func`` stays torch's.
8. ``torch.autocast`` becomes visible: the dtype of a convolution's result tells in which it computes.
9. The result has the strides that torch's has, because the steps behind it were traced with them.
10. Whether a gradient is recorded is known, and guarded by dynamo. Where it is, only a batch normalisation takes part in a chain.
11. A chain is decided first and written last. If that fails, its steps stay torch's, with a note.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F

from pycuda_conv import borders
from pycuda_conv.arguments import SLOPE, checked_activation, integers
from pycuda_conv.arrays import torch_internals
from pycuda_conv.arrays.torch_internals import leaves
from pycuda_conv.engines.nn import batch_norm
from pycuda_conv.invariance import WORD as BATCH_INVARIANT
from pycuda_conv.nn.autograd import Settings, _in_numbers, lies_in, traced_layout
from pycuda_conv.problem import channels_last

aten = torch.ops.aten
DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))

# ---- what the steps of a graph are called, and the names of their arguments

_CONV = "input", "weight", "bias", "stride", "padding", "dilation", "groups"
_TRANSPOSED = "input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation"
_EITHER = "input", "weight", "bias", "stride", "padding", "dilation", "transposed", "output_padding", "groups"
_OURS = (
    "input", "weight", "bias", "size", "stride", "padding", "dilation", "groups", "precision", "device", "tune", "algorithm",
    "padding_mode", "padding_value",
)  # fmt: skip
#: The number of spatial axes, where the name tells it, and the names of the arguments.
CONVOLUTIONS: dict[Any, tuple[int | None, tuple[str, ...]]] = {
    torch.convolution: (None, _EITHER), aten.convolution.default: (None, _EITHER),
    torch.ops.pycuda_conv.conv.default: (None, _OURS), torch.ops.pycuda_conv.conv_transpose.default: (None, _OURS),
}  # fmt: skip
for _ndim in (1, 2, 3):
    _packet = getattr(aten, f"conv{_ndim}d")
    for _function in (getattr(torch, f"conv{_ndim}d"), _packet.default, _packet.padding):
        CONVOLUTIONS[_function] = _ndim, _CONV
    _packet = getattr(aten, f"conv_transpose{_ndim}d")
    for _function in (getattr(torch, f"conv_transpose{_ndim}d"), next(getattr(_packet, name) for name in _packet.overloads())):
        CONVOLUTIONS[_function] = _ndim, _TRANSPOSED
_NORM = "input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"
_ATEN_NORM = "input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled"
NORMS: dict[Any, tuple[str, ...]] = {F.batch_norm: _NORM, torch.batch_norm: _ATEN_NORM, aten.batch_norm.default: _ATEN_NORM}
_MAX_POOL = "input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"
MAX_POOLS: dict[Any, tuple[str, ...]] = {
    F.max_pool2d: _MAX_POOL, torch.max_pool2d: _MAX_POOL[:-1], aten.max_pool2d.default: _MAX_POOL[:-1],
}  # fmt: skip
_MAX_POOL_DEFAULTS = {"padding": 0, "dilation": 1, "ceil_mode": False}
_LINEAR = ("input", "weight", "bias")
LINEARS: dict[Any, tuple[str, ...]] = {F.linear: _LINEAR, aten.linear.default: _LINEAR}
_SUMS = {operator.add, torch.add, "add", aten.add.Tensor}
_SUMS_IN_PLACE = {operator.iadd, "add_", "__iadd__", aten.add_.Tensor}
_PRODUCTS = {operator.mul, torch.mul, "mul", aten.mul.Tensor}
_PERMUTES = {torch.permute, "permute", aten.permute.default}
_PADS = {F.pad, torch_internals.pad, aten.pad.default}
_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
_RELUS = {F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_", aten.relu.default, aten.relu_.default}
_PLAIN_ACTIVATIONS: dict[Any, str] = {
    **dict.fromkeys(_RELUS, "relu"), F.relu6: "relu6", aten.relu6.default: "relu6", F.silu: "silu", aten.silu.default: "silu",
    aten.silu_.default: "silu", F.hardswish: "hardswish", aten.hardswish.default: "hardswish", aten.hardswish_.default: "hardswish",
}  # fmt: skip
_CLIPS = {F.hardtanh, F.hardtanh_, aten.hardtanh.default, aten.hardtanh_.default}
_CLAMPS = {torch.clamp, torch.clamp_, "clamp", "clamp_", aten.clamp.default, aten.clamp_.default}
_LEAKY = {F.leaky_relu, F.leaky_relu_, aten.leaky_relu.default, aten.leaky_relu_.default}
_GELUS = {F.gelu, aten.gelu.default}
_IN_PLACE = {getattr(operator, name) for name in dir(operator) if name.startswith("i") and name[1:] in dir(operator)}
#: Modules whose functions say by name and signature what they write to.
_LIBRARIES = frozenset(("torch", "_operator", "operator", "math", "builtins"))


def value(node: Any) -> Any:
    """The fake tensor, or the number, that dynamo traced a node with."""
    return node.meta.get("example_value") if isinstance(node, Node) else None


def bound(node: Node, names: Sequence[str]) -> dict[str, Any] | None:
    """The arguments of a call by their names; None if there are others."""
    if any(key not in names for key in node.kwargs) or len(node.args) > len(names):
        return None
    return {**dict.fromkeys(names), **dict(zip(names, node.args, strict=False)), **node.kwargs}


def activation_of(node: Node, gradient: bool = False) -> str | tuple[str, float] | None:
    """The activation that a node computes, as :func:`pycuda_conv.conv2d` names it; or None. With `gradient`, its derivative is the same."""
    if node.op not in ("call_function", "call_method") or len(node.all_input_nodes) != 1 or not node.args:
        return None
    target, (_, *args), kwargs = node.target, node.args, node.kwargs
    if target in _PLAIN_ACTIVATIONS:
        return _PLAIN_ACTIVATIONS[target]
    if target in _CLIPS or (target in _CLAMPS and not gradient):  # a clamp's derivative at its limits is 1
        names = ("min", "max") if target in _CLAMPS else ("min_val", "max_val")
        limits = [*args[:2], *(kwargs.get(name) for name in names[len(args) :])]
        return "relu6" if limits == [0, 6] else "relu" if limits == [0, None] and target in _CLAMPS else None
    if target in _GELUS:
        how = args[0] if args else kwargs.get("approximate", "none")
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(how)
    if target in _LEAKY:
        slope = args[0] if args else kwargs.get("negative_slope", SLOPE)
        return checked_activation(("leaky_relu", float(slope))) if isinstance(slope, (int, float)) else None
    return None


def _is_identity(node: Node) -> bool:
    """True for a dropout in evaluation, which passes its input on."""
    if node.target not in _DROPOUTS or node.op != "call_function":
        return False
    given = bound(node, ("input", "p", "training", "inplace"))
    return given is not None and given["training"] is False


def name_of(node: Node) -> str:
    """The name of the module that made the call; without one, the node's own."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    if not paths:
        return node.name
    path = re.sub(r"\._modules\['([^']*)'\]", r".\1", re.sub(r"^L\['\w+'\]", "", paths[-1]))
    return path.removeprefix("._orig_mod").strip(".") or node.name


# ---- memory

def is_plain(node: Any) -> bool:
    """True for the node of a tensor that kernels can read."""
    v = value(node)
    return (
        isinstance(v, torch.Tensor) and torch_internals.parts(v) is None and not torch_internals.is_wrapped(v)
        and v.layout is torch.strided and v.dtype in DTYPES and not v.is_neg()
    )  # fmt: skip


def _parts(v: Any) -> Iterator[torch.Tensor]:
    while torch_internals.is_wrapped(v):
        v = torch_internals.unwrapped(v)
    inner = torch_internals.parts(v)
    if inner is not None:
        for one in inner:
            yield from _parts(one)
    elif v.layout is torch.strided:
        yield v


def memory(nodes: Iterable[Any]) -> set[int]:
    """The storages of nodes' values."""
    found: set[int] = set()
    for node in nodes:
        for v in leaves(value(node)):
            if isinstance(v, torch.Tensor):
                found.update(part.untyped_storage()._cdata for part in _parts(v))
    return found


_RESULTS = (torch.Tensor, int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


def is_barrier(node: Node) -> bool:
    """True for a step that changes a mode of torch's, so that nothing may be moved past it."""
    if node.op == "call_method":
        return node.target in ("set_", "resize_", "resize_as_")
    if node.op != "call_function" or node.target is operator.setitem or node.target is torch_internals.logs_usage:
        return False
    if "_functorch" in str(getattr(node.target, "__module__", "")):
        return True
    found = leaves(value(node))
    return not found or not all(isinstance(v, _RESULTS) for v in found)


def _nodes(given: Any) -> list[Node]:
    return [n for n in leaves(given) if isinstance(n, Node)]


def written(node: Node) -> list[Node]:
    """The nodes whose memory a call may write to. What torch does not know counts as writing to all that it gets."""
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    target: Any = node.target
    first = _nodes(node.args[:1]) or list(node.all_input_nodes)
    if node.op == "call_method":
        dunder = target.endswith("__")
        return first if target == "__setitem__" or target.startswith("__i") or (target.endswith("_") and not dunder) else []
    if node.op == "call_module" or isinstance(target, torch._ops.HigherOrderOperator):
        return list(node.all_input_nodes)
    if isinstance(target, torch._ops.OpOverload):
        arguments = target._schema.arguments
        given = {**dict(zip((a.name for a in arguments), node.args, strict=False)), **node.kwargs}
        return _nodes([given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write])
    if str(getattr(target, "__module__", None) or "torch").partition(".")[0] not in _LIBRARIES:
        return list(node.all_input_nodes)
    if target in NORMS:
        found = bound(node, NORMS[target])
        if found is None:
            return list(node.all_input_nodes)
        return [] if found["training"] is False else _nodes([found["running_mean"], found["running_var"]])
    if target is F.instance_norm:
        return list(node.all_input_nodes)
    if out := _nodes(node.kwargs.get("out")):
        return out
    name = getattr(target, "__name__", "")
    if target is operator.setitem or target in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
        return first
    if node.kwargs.get("inplace"):
        return first
    try:
        return first if inspect.signature(target).bind_partial(*node.args).arguments.get("inplace") else []
    except (TypeError, ValueError):  # a function in C, which has no such argument
        return []


# ---- what is put into the graph


class Options(NamedTuple):
    """The options of a chain in numbers."""

    transposed: bool
    settings: Settings
    output_padding: tuple[int, ...]
    activation: str | tuple[str, float] | None = None


class Norm(NamedTuple):
    """A batch normalisation of a chain: gamma, beta, mean, variance, each a node or None, and its options."""

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

    #: whether convolutions with gradients take parameters that were cast at the graph's start
    casts_early = True

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        #: the parameters that are cast at the graph's start, with their types, and the nodes that stand for the results
        self.early: dict[tuple[Node, torch.dtype], Node] = {}

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

    def product(
        self, given: dict[str, Any], scale: Any, residual: Any, activation: Any, moved: bool, gradient: bool
    ) -> Node | None:
        """A linear layer with the steps after it, or None where it stays torch's."""
        return None

    def normalise(self, x: Any, norm: Norm, activation: Any) -> Node | None:
        """A batch normalisation without a convolution in front, and an activation, or None where it stays torch's."""
        return None


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


class _Chain:
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
        self.why = ""
        #: whether a linear layer's channels were moved to the second place
        self.moved = False

    def lies_right(self, node: Node) -> bool:
        """Whether a value lies as a linear layer with more steps is computed: with the channels last."""
        made = value(node)
        return _lies(made, channels_last(made.dim(), made.dim() - 2) if self.moved else range(made.dim()))

    @property
    def last(self) -> Node:
        return self.nodes[-1]


class Rewrite:
    """The rewrite of one graph: :meth:`run` does it.

    Parameters
    ----------
    gm : torch.fx.GraphModule
        Dynamo's.
    targets : Targets
    precision : str
        Arithmetic for float32 where the call itself does not say it.
    raises : bool
        Whether a fault of the rewrite itself is raised; tests ask for it.
    """

    def __init__(
        self, gm: GraphModule, targets: Targets, precision: str = "fp32", raises: bool = False, algorithm: str | None = None
    ) -> None:
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
        self._memory: dict[Node, set[int]] = {}
        self._effects: dict[Node, tuple[bool, set[int], set[int]]] = {}

    def run(self) -> Found:
        """Rewrite the graph, and say what was done."""
        for way in (self._take_convolution, self._take_other):
            grad = torch.is_grad_enabled()
            for node in list(self.nodes):
                if node is None or node.op != "call_function" or node not in self.order:
                    continue
                if node.target is torch_internals.set_grad_enabled:
                    grad = bool(node.args[0])
                    continue
                try:
                    way(node, grad)
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
            its = self._memory_of(x)
            following = (n for n in self.nodes[self.order[x] + 1 :] if n is not None)
            if not its or any(is_barrier(n) or its & self._effects_of(n)[1] for n in following) or not self.targets.pass_on(layer):
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

    def _next(self, node: Node) -> Node | None:
        """The one reader of a node, which reads it once."""
        users = list(node.users)
        if len(users) != 1 or users[0].op not in ("call_function", "call_method"):
            return None
        return users[0] if sum(n is node for n in _nodes((users[0].args, users[0].kwargs))) == 1 else None

    def _memory_of(self, node: Node) -> set[int]:
        found = self._memory.get(node)
        if found is None:
            found = self._memory[node] = memory([node])
        return found

    def _effects_of(self, node: Node) -> tuple[bool, set[int], set[int]]:
        """Whether a step is a barrier; the memory that it may write, and the memory that it may read or write."""
        found = self._effects.get(node)
        if found is None:
            found = self._effects[node] = is_barrier(node), *self._touched(node, written(node))
        return found

    def _touched(self, node: Node, writes: Iterable[Node]) -> tuple[set[int], set[int]]:
        """The memory that a step may write, given the nodes that it writes to; and that which it may read or write."""
        its = memory(writes)
        if its & self.of_callers:
            its |= self.of_callers | self.of_module
        elif its & self.of_module:
            its |= self.of_callers
        return its, its | memory(node.all_input_nodes)

    def _reaches(
        self, chain: _Chain, to: Node, reads: Sequence[tuple[Node, int]] = (), writes: Sequence[tuple[Node, int]] = (),
        own: Sequence[Node] = (),
    ) -> bool:
        """Whether all of a chain can be computed where `to` stands, with these reads and writes besides; `own` are nodes that go."""
        all_reads = [(self._memory_of(n), at) for n, at in (*chain.reads, *reads)]
        all_writes = [(self._memory_of(n), at) for n, at in (*chain.writes, *writes)]
        for at in range(self.order[chain.nodes[0]] + 1, self.order[to]):
            node = self.nodes[at]
            if node is None or node in chain.nodes or node is chain.counter or node in own:
                continue
            barrier, its_writes, touched = self._effects_of(node)
            if barrier or (its_writes and any(at > since and its_writes & m for m, since in all_reads)):
                return False
            if any(at > since and touched & m for m, since in all_writes):
                return False
        return True

    # -- convolutions

    def _take_convolution(self, node: Node, grad: bool) -> None:
        if node.target not in CONVOLUTIONS:
            return
        why = self._rewrite_convolution(node, grad)
        if why:
            self.found.left.append((name_of(node), why))

    def _options(self, node: Node) -> tuple[dict[str, Any], Options] | str:
        """The operands and options of a convolution, or why it stays torch's."""
        ndim, names = CONVOLUTIONS[node.target]
        given = bound(node, names)
        if given is None:
            return "it is called with other arguments"
        x, weight, bias = given["input"], given["weight"], given["bias"]
        if not (is_plain(x) and is_plain(weight) and is_plain(node) and (bias is None or is_plain(bias))):
            return "its tensors are of a kind that kernels do not read"
        ndim = value(weight).dim() - 2 if ndim is None else ndim
        if ndim not in (1, 2, 3) or value(x).dim() != ndim + 2:
            return "its input has no batch axis"
        sizes = value(weight).shape[2:]
        if not all(isinstance(n, int) for n in sizes):
            return "the size of its filter is not a constant"
        transposed, more, precision, algorithm = names is _TRANSPOSED, given.get("output_padding"), self.precision, self.algorithm
        padding: Any = 0 if given["padding"] is None else given["padding"]
        if names is _OURS:
            transposed = node.target is torch.ops.pycuda_conv.conv_transpose.default
            more, precision, own = given["size"] if transposed else None, given["precision"], given.get("algorithm")
            padding = tuple(zip(padding[::2], padding[1::2], strict=True))
            if given["device"] is not None or given["tune"] or own not in (None, BATCH_INVARIANT):
                return "it asks for a device, for an algorithm or to be tuned"
            algorithm = own or algorithm
            if given["padding_mode"]:
                return "it reads a border of the image's own pixels itself"
        elif names is _EITHER:
            transposed = bool(given["transposed"])
        try:
            settings = Settings(
                ndim, given["stride"] or 1, padding, given["dilation"] or 1, given["groups"] or 1, precision, None, False, algorithm
            )
            settings = _in_numbers(settings, sizes)
            extra = integers("output_padding", more or 0, ndim) if transposed else (0,) * ndim
        except TypeError:
            return "its options are not constants"
        return given, Options(transposed, settings, extra)

    def _absorb_padding(self, chain: _Chain, options: Options, with_border: bool = False) -> Options:
        """Zeros padded in front of a convolution become its padding. With `with_border` any other border does, if there is no padding."""
        pad = chain.operands[0]
        if pad.op != "call_function" or pad.target not in _PADS or len(pad.users) != 1 or options.transposed:
            return options
        given = bound(pad, ("input", "pad", "mode", "value"))
        if given is None or not is_plain(given["input"]):
            return options
        mode, number = given["mode"] or "constant", given["value"] or 0
        zeros = mode == "constant" and isinstance(number, (int, float)) and number == 0
        if zeros == with_border or (with_border and (options.settings.padding_mode != "zeros" or any(map(any, options.settings.padding)))):
            return options
        if mode not in borders.MODES or isinstance(number, bool) or not isinstance(number, (int, float)) or (number and mode != "constant"):
            return options
        sides: list[Any] = list(given["pad"]) if isinstance(given["pad"], (list, tuple)) else [-1]
        ndim, x = options.settings.ndim, given["input"]
        if not all(isinstance(n, int) and n >= 0 for n in sides) or len(sides) > 2 * ndim or len(sides) % 2:
            return options
        trial = _Chain(pad, self.order[pad], [x])
        if not self._reaches(trial, chain.convolution):
            return options
        pairs = [*zip(sides[::2], sides[1::2], strict=True)] + [(0, 0)] * (ndim - len(sides) // 2)
        padding = tuple((a + c, b + d) for (a, b), (c, d) in zip(options.settings.padding, pairs[::-1], strict=True))
        chain.operands[0] = x
        chain.reads = [(x, self.order[pad]), *chain.reads[1:]]
        chain.nodes.insert(0, pad)
        settings = options.settings._replace(padding=padding)
        return options._replace(settings=settings._replace(padding_mode=mode, padding_value=float(number)) if with_border else settings)

    def _rewrite_convolution(self, convolution: Node, grad: bool) -> str | None:
        """Put one call in the place of a convolution's chain; else say why it stays torch's."""
        found = self._options(convolution)
        if isinstance(found, str):
            return found
        given, options = found
        chain = _Chain(convolution, self.order[convolution], (given["input"], given["weight"], given["bias"]))
        options = self._absorb_padding(chain, options)
        node = self._after(chain, chain.last)
        if node is not None and node.target in NORMS and node.op == "call_function":
            node = self._take_norm(chain, node, options, grad)
        operands = chain.operands if chain.norm is None else (*chain.operands, *chain.norm.vectors[:2])
        gradient = self._needs_gradient(grad, *operands)
        training = chain.norm is not None and (chain.norm.of_batch or gradient)
        if node is not None and (chain.norm is not None or not gradient):
            if node.target in _SUMS | _SUMS_IN_PLACE and (not training or self.targets.sums_in_training):
                node = self._take_sum(chain, node, training, grad)
            if node is not None and (activation := activation_of(node, training)):
                takes = not training or batch_norm.takes(activation, chain.residual is not None)
                if takes and self._reaches(chain, node):
                    chain.activation = activation
                    chain.nodes.append(node)
        options = options._replace(activation=chain.activation)
        if chain.norm is None and chain.residual is None and chain.activation is None:  # what is fused has zeros around it
            options = self._absorb_padding(chain, options, with_border=True)
        turned = self._turned(chain.operands[0], value(chain.last), options.settings.ndim)
        if turned is None:
            return "torch's result is neither in C order nor channels last"
        why = chain.why or self._why_alone(convolution, gradient)
        self._write(chain, options, turned, training, gradient, grad)
        steps = tuple(dict.fromkeys(name_of(n) for n in chain.nodes))
        if len(chain.nodes) > 1:
            self.found.fused.append(steps)
        else:
            self.found.alone.append((steps[0], why))
        return None

    def _why_alone(self, convolution: Node, gradient: bool) -> str:
        """Why nothing was fused with a convolution, for a report."""
        users = list(convolution.users)
        if len(users) != 1 or self._next(convolution) is None:
            return "its result is read more than once, or returned"
        return "its gradient is recorded, and no batch normalisation follows" if gradient else "nothing that can be fused follows"

    def _after(self, chain: _Chain, node: Node) -> Node | None:
        """The step after a chain's value. Dropouts in evaluation join the chain."""
        following = self._next(node)
        while following is not None and _is_identity(following) and self._reaches(chain, following):
            chain.nodes.append(following)
            following = self._next(following)
        return following

    def _needs_gradient(self, grad: bool, *nodes: Any) -> bool:
        return grad and any(value(n).requires_grad for n in nodes if n is not None)

    def _take_norm(self, chain: _Chain, node: Node, options: Options, grad: bool) -> Node | None:
        """Put a batch normalisation into a chain, if it can be. The result is the step after it, or None at the chain's end."""
        given = bound(node, NORMS[node.target])
        if given is None or given["input"] is not chain.last:
            return None
        vectors = tuple(given[name] for name in ("weight", "bias", "running_mean", "running_var"))
        if not all(v is None or is_plain(v) for v in vectors) or not isinstance(given["training"], bool):
            chain.why = "its batch norm is of another kind"
            return None
        of_batch = given["training"]
        gradient = self._needs_gradient(grad, *chain.operands, *vectors[:2])
        if options.transposed and (gradient or of_batch):
            chain.why = "a transposed convolution and its batch norm are not trained in one step"
            return None
        if options.settings.algorithm is not None and (gradient or of_batch):
            chain.why = "it has the same bits in every batch, which a batch norm in training has not"
            return None
        if (vectors[2] is None or vectors[3] is None) and not of_batch:
            return None
        momentum = given["momentum"] if given["momentum"] is not None else 0.1
        eps = given["eps"] if given["eps"] is not None else 1e-5
        if of_batch and not isinstance(momentum, (int, float)):
            chain.why = "its batch norm's momentum is not a constant"
            return None
        if not isinstance(eps, (int, float)):
            chain.why = "its batch norm's eps is not a constant"
            return None
        at = self.order[node]
        reads = [(v, at) for v in vectors if v is not None]
        writes = [(v, at) for v in vectors[2:] if v is not None] if of_batch else []
        counted = self._counter(node, self.order[chain.nodes[0]]) if of_batch and self.targets.counts else None
        if not self._reaches(chain, node, reads, writes):
            chain.why = "before its batch norm a mode changes, or an array that it reads is written"
            return None
        counts = None
        if counted is not None and self._reaches(chain, node, reads, [*writes, (counted[1], self.order[counted[0]])], [counted[0]]):
            chain.counter, counts = counted[0], counted
            writes.append((counted[1], self.order[counted[0]]))
        chain.norm = Norm(vectors, of_batch, momentum, float(eps), counts)
        chain.nodes.append(node)
        chain.reads += reads
        chain.writes += writes
        return self._after(chain, node)

    def _counter(self, norm: Node, after: int) -> tuple[Node, Node] | None:
        """The step that counts a norm's batches, between the step of that number and the norm, and the count."""
        stack = norm.meta.get("nn_module_stack")
        for at in range(self.order[norm] - 1, after, -1):
            node = self.nodes[at]
            if node is None or node.target not in _SUMS_IN_PLACE or tuple(node.args[1:]) != (1,) or node.kwargs or node.users:
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

    def _take_sum(self, chain: _Chain, node: Node, training: bool, grad: bool) -> Node | None:
        """Put the sum with a residual into a chain, if it can be. The result is the step after it, or None at the chain's end."""
        mine = chain.last
        if len(node.args) != 2 or node.kwargs:
            return None
        other = node.args[1] if node.args[0] is mine else node.args[0]
        v, own = value(other), value(mine)
        if not is_plain(other) or v.dtype is not own.dtype or v.device != own.device or not _same(v.shape, own.shape):
            return None
        if node.target in _SUMS_IN_PLACE and node.args[0] is not mine:
            return None
        if not training and self._needs_gradient(grad, other):
            return None
        read = [(other, self.order[node])]
        if not self._reaches(chain, node, read):
            return None
        chain.nodes.append(node)
        chain.reads += read
        chain.residual = other
        return self._after(chain, node)

    # -- rule 9

    def _turned(self, x: Node, wanted: Any, ndim: int) -> Any:
        """How an input has to be turned so that the result lies as torch's: "" for not at all; None if it can't."""
        last = {2: torch.channels_last, 3: torch.channels_last_3d}.get(ndim)
        orders = {torch.contiguous_format: range(ndim + 2), last: channels_last(ndim + 2, ndim)}
        fits = [order for order, axes in orders.items() if order is not None and _lies(wanted, axes)]
        ours = torch.contiguous_format if traced_layout(value(x), ndim) == "NCHW" else last
        return "" if ours is not None and ours in fits else fits[0] if fits else None

    # -- new nodes

    def _write(self, chain: _Chain, options: Options, turned: Any, training: bool, gradient: bool, grad: bool) -> None:
        dtype = value(chain.convolution).dtype
        before = set(self.graph.nodes)
        try:
            with self.graph.inserting_before(chain.last):
                operands = list(chain.operands)
                if turned:
                    operands[0] = self.graph.call_method("contiguous", (operands[0],), {"memory_format": turned})
                    operands[0].meta["example_value"] = value(chain.operands[0])
                if training or not gradient or self.targets.casts_early:
                    folded = chain.norm is not None and not training  # with the bias as it is
                    at_start = slice(1, 2 if folded else 3)
                    operands[at_start] = [self._cast_early(chain, n, dtype, grad) for n in operands[at_start]]
                if training:
                    assert chain.norm is not None
                    new = self.targets.train(options, operands, dtype, chain.norm, chain.residual, grad)
                elif gradient or options.settings.padding_mode != "zeros":
                    new = self.targets.convolve(options, operands, dtype)
                else:
                    vectors = () if chain.norm is None else (*chain.norm.vectors, chain.operands[2])
                    early = chain.norm is not None and self._is_known_at_start(chain, [n for n in vectors if n is not None])
                    new = self.targets.evaluate(options, operands, dtype, chain.norm, chain.residual, early)
        except Exception:
            for node in reversed(list(self.graph.nodes)):
                if node not in before:
                    self.graph.erase_node(node)
            self.targets.early = {key: node for key, node in self.targets.early.items() if node in before}
            raise
        self._replace(chain.nodes, new, [n for n, _ in chain.writes])
        if training:
            self.trained.add(new)
        self._drop_counter(chain)

    def _drop_counter(self, chain: _Chain) -> None:
        if chain.counter is not None:
            self.nodes[self.order.pop(chain.counter)] = None
            self.graph.erase_node(chain.counter)

    def _cast_early(self, chain: _Chain, parameter: Any, dtype: torch.dtype, grad: bool) -> Any:
        """An operand in 16 bits, if it is a parameter of float32 that can be cast at the graph's start; else the operand itself."""
        if parameter is None or value(parameter).dtype is not torch.float32 or dtype not in (torch.float16, torch.bfloat16):
            return parameter
        if not self._is_known_at_start(chain, [parameter]) or (self._needs_gradient(grad, parameter) and not self.grad_at_start):
            return parameter
        return self.targets.cast_early(parameter, dtype)

    def _is_known_at_start(self, chain: _Chain, read: Sequence[Node]) -> bool:
        """Whether what is read are inputs of the graph that no step before the chain's end writes to."""
        if not all(n.op == "placeholder" for n in read):
            return False
        its = set().union(*map(self._memory_of, read))
        before = (n for n in self.nodes[: self.order[chain.last]] if n is not None)
        return not any(its & self._effects_of(n)[1] for n in before)

    def _replace(self, nodes: Sequence[Node], new: Node, writes: Sequence[Node] = ()) -> None:
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

    # -- linear layers, poolings and normalisations

    def _take_other(self, node: Node, grad: bool) -> None:
        if node.target in MAX_POOLS:
            self._take_pool(node, grad)
        elif node.target in LINEARS:
            self._take_linear(node, grad)
        elif node.target in NORMS:
            self._take_lone_norm(node, grad)

    def _take_pool(self, node: Node, grad: bool) -> None:
        given = bound(node, MAX_POOLS[node.target])
        if given is not None:
            given = {name: _MAX_POOL_DEFAULTS.get(name) if v is None else v for name, v in given.items()}
        if given is None or not is_plain(given["input"]) or given.get("return_indices") or value(given["input"]).dim() != 4:
            return
        with self.graph.inserting_before(node):
            new = self.targets.max_pool(given, self._needs_gradient(grad, given["input"]))
        if new is not None:
            self._replace([node], new)
            self.found.others.append((name_of(new),))

    def _take_linear(self, node: Node, grad: bool) -> None:
        """A linear layer; without gradients, also the steps after it that fit into one convolution.

        These are the channels moved to the second place, a factor for each channel, the sum with a residual, and an activation.
        """
        given = bound(node, LINEARS[node.target])
        if given is None or not all(is_plain(n) for n in (node, *given.values()) if n is not None) or given["weight"] is None:
            return
        operands = given["input"], given["weight"], given["bias"]
        dtypes = {value(n).dtype for n in operands if n is not None}
        if len(dtypes) > 1 or value(given["weight"]).dim() != 2 or value(node).dtype not in dtypes:
            return
        gradient = self._needs_gradient(grad, *operands)
        chain, scale = _Chain(node, self.order[node], operands), None
        following = None if gradient else self._after(chain, node)
        if following is not None and following.target in _PERMUTES and value(node).dim() == 4:
            order = following.args[1] if len(following.args) == 2 and isinstance(following.args[1], (list, tuple)) else following.args[1:]
            if tuple(order) == (0, 3, 1, 2) and not following.kwargs and self._reaches(chain, following):
                chain.moved = True
                chain.nodes.append(following)
                following = self._after(chain, following)
        if following is not None and following.target in _PRODUCTS and len(following.args) == 2 and not following.kwargs:
            other = following.args[1] if following.args[0] is chain.last else following.args[0]
            factor = value(other)
            wanted = (value(given["weight"]).shape[0], *((1, 1) if chain.moved else ()))
            fits = is_plain(other) and factor.dtype in dtypes and _same(factor.shape, wanted) and not self._needs_gradient(grad, other)
            read = [(other, self.order[following])]
            if fits and self._reaches(chain, following, read) and chain.lies_right(following):
                scale = other
                chain.nodes.append(following)
                chain.reads += read
                following = self._after(chain, following)
        if following is not None and following.target in _SUMS | _SUMS_IN_PLACE and chain.lies_right(following):
            following = self._take_sum(chain, following, False, grad)
        fits = following is not None and self._reaches(chain, following) and chain.lies_right(following)
        if fits and (activation := activation_of(following)):
            chain.activation = activation
            chain.nodes.append(following)
        with self.graph.inserting_before(chain.last):
            new = self.targets.product(given, scale, chain.residual, chain.activation, chain.moved, gradient)
        if new is not None:
            steps = tuple(dict.fromkeys(name_of(n) for n in chain.nodes))
            self._replace(chain.nodes, new)
            self.found.others.append(steps)

    def _take_lone_norm(self, node: Node, grad: bool) -> None:
        """A batch normalisation by the batch's statistics that stands in front of a convolution, and its activation."""
        given = bound(node, NORMS[node.target])
        if given is None or given["training"] is not True:
            return
        momentum, eps = (given[name] if given[name] is not None else default for name, default in (("momentum", 0.1), ("eps", 1e-5)))
        x, vectors = given["input"], tuple(given[name] for name in ("weight", "bias", "running_mean", "running_var"))
        if not (is_plain(x) and isinstance(momentum, (int, float)) and isinstance(eps, (int, float))) or value(x).dim() < 3:
            return
        if not all(v is None or is_plain(v) for v in vectors):
            return
        chain, at = _Chain(node, self.order[node], [x, *vectors]), self.order[node]
        chain.writes = [(v, at) for v in vectors[2:] if v is not None]
        following = self._after(chain, node)
        if following is None or not (activation := activation_of(following, True)) or not self._reaches(chain, following):
            return
        chain.activation = activation
        chain.nodes.append(following)
        counts, start = self._counter(node, max(0, at - 8)), at
        if counts is not None:
            start = self.order[counts[0]]
            trial = _Chain(counts[0], start, [])
            chain.counter = counts[0] if self._reaches(trial, following, writes=[(counts[1], start)], own=chain.nodes) else None
        norm = Norm(vectors, True, momentum, float(eps), counts if chain.counter is not None else None)
        with self.graph.inserting_before(chain.last):
            new = self.targets.normalise(x, norm, chain.activation)
        if new is not None:
            steps = tuple(dict.fromkeys(name_of(n) for n in chain.nodes))
            self._replace(chain.nodes, new, [n for n, _ in chain.writes] + ([counts[1]] if chain.counter is not None and counts else []))
            self._drop_counter(chain)
            self.found.others.append(steps)


def _lies(x: Any, order: Sequence[int] | None) -> bool:
    """Whether a tensor lies without gaps with its axes in this order; one without elements lies in any."""
    return order is not None and (statically_known_true(x.numel() == 0) or lies_in(x, order))


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes are known to be equal."""
    return len(a) == len(b) and all(statically_known_true(m == n) for m, n in zip(a, b, strict=True))


def rewrite(
    gm: GraphModule, targets: Callable[[Graph], Targets], precision: str = "fp32", raises: bool = False, algorithm: str | None = None
) -> list[Found]:
    """Rewrite dynamo's graph, and the graphs in it, such as those of ``torch.utils.checkpoint`` and ``torch.cond``."""
    found = [Rewrite(gm, targets(gm.graph), precision, raises, algorithm).run()]
    for _, child in gm.named_children():
        if isinstance(child, GraphModule):
            found += rewrite(child, targets, precision, raises, algorithm)
    return found
