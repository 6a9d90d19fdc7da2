"""Finds convolutions that can be fused with the steps after them, and computes each such chain in one call.

``torch.fx`` traces the forward of one module at a time; its children stay calls. In the graph a *chain* is a convolution and those of
these steps that follow it: a batch normalisation, which training requires, the sum with a residual, and an activation. Each chain
becomes one call of :func:`fused` or :func:`trained`. In evaluation three more kinds of steps become one call: a batch normalisation after
no convolution with its activation, a converted linear layer with the steps after it, and max pooling, without the
places of the maxima that torch writes.

A call of a module takes the host a microsecond or two, as long as a launch. So in evaluation sequences of modules are opened, and modules
that only call a function or two are not called.

A trace holds only while the module stays the same. A :class:`Fusion` therefore remembers what it looked at. If something of that has
changed or got a hook, the module's own forward runs.
"""

from __future__ import annotations

import copy
import inspect
import operator
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.fx
from torch import nn
from torch.fx import _symbolic_trace

from pycuda_conv import quick
from pycuda_conv.errors import ConvArgumentError
from pycuda_conv.nn import linear, modules, overwriting, pooling
from pycuda_conv.nn.autograd import activated
from pycuda_conv.nn.classes import (
    ALL_CONVOLUTIONS,
    NORMS,
    hooked,
    is_container,
    is_convolution,
    is_plain_norm,
    is_sequence,
    norm_base,
    origin,
)
from pycuda_conv.nn.fused import conv_bn_act, normalised_by
from pycuda_conv.nn.watch import HOOKS, Conditions, Kept, Watch, holds
from pycuda_conv.problem import SLOPE, checked_activation

_F = nn.functional
_ACTIVATIONS: dict[Any, str] = {
    **dict.fromkeys((_F.relu, _F.relu_, torch.relu, torch.relu_, "relu", "relu_"), "relu"), _F.relu6: "relu6", _F.silu: "silu",
    _F.hardswish: "hardswish", _F.gelu: "gelu", _F.leaky_relu: "leaky_relu", _F.leaky_relu_: "leaky_relu",
}  # fmt: skip


def _in_place(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """An operator such as ``+=`` as an ordinary call: written as ``+=`` in the graph, it would change all other names of a number."""

    def call(value: Any, other: Any) -> Any:
        return function(value, other)

    call.__name__ = f"{function.__name__}_"
    return call


_OPERATORS_IN_PLACE = {f"__{name}__": _in_place(getattr(operator, name)) for name in overwriting.OPERATORS_IN_PLACE}
_SUMS = {operator.add, _OPERATORS_IN_PLACE["__iadd__"], torch.add, "add", "add_"}
_IN_PLACE = {_OPERATORS_IN_PLACE["__iadd__"], "add_"}
_FORWARD_HOOKS = "_forward_hooks", "_forward_pre_hooks"
_OTHERWISE = (*_FORWARD_HOOKS, "forward")  # attributes that let a module compute something else
_DROPOUTS = {_F.dropout, _F.dropout1d, _F.dropout2d, _F.dropout3d, _F.alpha_dropout, _F.feature_alpha_dropout}
_STOCHASTIC_DEPTH = "torchvision.ops.stochastic_depth", "stochastic_depth"
_PRODUCTS = {operator.mul, torch.mul, "mul"}
_CHANNELS_FIRST = 0, 3, 1, 2  # of an array of four axes whose channels are last


# ---- tracing


class _Value(torch.fx.Proxy):
    """A stand-in for a value. An operation in place is recorded as one: torch's own trace of ``x += y`` makes another array."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("tracer", "node"):
            raise TypeError("its forward sets attributes of an array")
        super().__setattr__(name, value)


for _name, _function in _OPERATORS_IN_PLACE.items():

    def _call(self: Any, other: Any, function: Any = _function) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    setattr(_Value, _name, _call)


class _Ranked(_Value):
    """The input of a batch normalisation, whose number of axes is known."""

    def dim(self) -> int:
        ndim: int = self.tracer.ndim
        return ndim

    @property
    def ndim(self) -> int:
        return self.dim()


class _Tracer(torch.fx.Tracer):
    """Calls a module's forward with a proxy for each argument in `given`; the others have their defaults."""

    proxy_buffer_attributes = True  # changes of buffers are recorded in the graph instead of being made here

    def __init__(self, given: Collection[str], ndim: int | None, opens_sequences: bool) -> None:
        super().__init__()
        self.given, self.ndim, self.opens_sequences = given, ndim, opens_sequences
        self.modes = _modes()
        #: The names of the sequences whose modules are in the graph.
        self.opened: dict[str, bool | None] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if not self.opens_sequences or not is_sequence(m) or hooked(m):
            return True
        self.opened[module_qualified_name] = None
        return False

    def proxy(self, node: torch.fx.Node) -> torch.fx.Proxy:
        return (_Ranked if self.ndim is not None and node.op == "placeholder" else _Value)(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        if _modes() != self.modes:
            raise TypeError("its forward switches gradients or autocast on or off")
        return super().create_node(*args, **kwargs)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        given = {name: self.create_proxy("placeholder", name, (), {}) for name in self.given}
        module = self.root
        return lambda: origin(type(module)).forward(module, **given), []


def _modes() -> tuple[Any, ...]:
    """The modes of torch, which a graph does not record."""
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


def _random_states() -> tuple[Any, ...]:
    numpy: Any = np.random.get_state()
    return random.getstate(), numpy[1].tobytes(), numpy[2], torch.get_rng_state().numpy().tobytes()


def _traced(
    module: nn.Module, training: bool, given: Collection[str], ndim: int | None = None, opened: dict[str, bool | None] | None = None
) -> torch.fx.Graph:
    """The graph of the module's forward in training or evaluation. The module is left as it was.

    Sequences are calls like other children. Where `opened` is given, their modules are calls instead, and it gets the sequences' names.
    """
    modes, attributes, drawn = [(m, m.training) for m in module.modules()], dict(module.__dict__), _random_states()
    try:
        for one, _ in modes:
            one.training = training
        tracer = _Tracer(given, ndim, opened is not None)
        graph = tracer.trace(module)
        if opened is not None:
            opened.update(tracer.opened)
    finally:
        changed = any(module.__dict__.get(key) is not value for key, value in attributes.items() if key != "training")
        changed |= len(module.__dict__) != len(attributes)
        module.__dict__.clear()
        module.__dict__.update(attributes)
        for one, mode in modes:
            one.training = mode
    if changed:
        raise TypeError("its forward sets attributes")
    if drawn != _random_states():
        raise TypeError("its forward draws random numbers")
    return graph


def _only_argument(module: nn.Module) -> tuple[str, ...]:
    """The name of the one argument that a forward must be given; a ValueError if there is not exactly one."""
    _, *parameters = inspect.signature(origin(type(module)).forward).parameters.values()
    (name,) = (p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD)
    return (name,)


# ---- modules that compute no more than one step of a chain


_STEPS: dict[type, Callable[[Any], Any]] = {
    nn.Identity: lambda module: "identity", nn.ReLU: lambda module: "relu", nn.ReLU6: lambda module: "relu6",
    nn.SiLU: lambda module: "silu", nn.Hardswish: lambda module: "hardswish", nn.GELU: lambda module: _gelu(module.approximate),
    nn.LeakyReLU: lambda module: _leaky_relu(module.negative_slope),
    **dict.fromkeys((nn.Hardsigmoid, nn.Sigmoid, nn.MaxPool2d, nn.AvgPool2d), lambda module: None),
}  # fmt: skip


def _gelu(approximate: Any) -> str | None:
    return {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate)


def _leaky_relu(slope: Any) -> Any:
    try:
        return checked_activation(("leaky_relu", slope))
    except (TypeError, ValueError):
        return None


def activation_of(node: torch.fx.Node) -> Any:
    """The operation of a call on one array, as :func:`pycuda_conv.conv2d` names it; None if that is no activation."""
    word = _ACTIVATIONS.get(node.target) if node.op in ("call_function", "call_method") else None
    if len(node.all_input_nodes) != 1:
        return None
    if word == "gelu":
        return _gelu(node.kwargs.get("approximate", "none"))
    if word == "leaky_relu":
        return _leaky_relu(node.args[1] if len(node.args) > 1 else node.kwargs.get("negative_slope", SLOPE))
    return word


def acts_as(module: nn.Module, training: bool) -> Any:
    """The operation of a module without parameters: "identity", an activation as in :func:`activation_of`, or None for anything else."""
    if type(module) in _STEPS:
        return _STEPS[type(module)](module)
    if any(True for _ in module.parameters()) or any(True for _ in module.buffers()) or "forward" in module.__dict__:
        return None
    try:
        graph = _traced(module, training, _only_argument(module))
    except Exception:  # whatever a forward does when it is called with a stand-in for its argument
        return None
    placeholder, *rest, end = graph.nodes
    (result,) = end.args
    if not rest and result is placeholder:
        return "identity"
    if len(rest) == 1 and rest[0] is result and (found := activation_of(result)) and result.args[:1] == (placeholder,):
        return found
    if len(rest) == 1 and rest[0] is result and _is_idle_dropout(result) and result.args[:1] == (placeholder,):
        return "identity"
    return None


def _steps(module: nn.Module, training: bool) -> torch.fx.Graph | None:
    """The graph of a module without parameters and children and with one argument, if it is a few functions; else None."""
    if module._modules or module._parameters or module._buffers or "forward" in module.__dict__:
        return None
    try:
        graph = _traced(module, training, _only_argument(module))
    except Exception:  # as above
        return None
    _, *steps, end = graph.nodes
    known = all(step.op in ("call_function", "call_method") for step in steps) and isinstance(end.args[0], torch.fx.Node)
    return graph if known and len(steps) <= _FEW else None


def _linear(module: Any, input: Any) -> Any:
    parameters = module.__dict__["_parameters"]
    return _F.linear(input, parameters["weight"], parameters["bias"])


def _layer_norm(module: Any, input: Any) -> Any:
    own = module.__dict__
    parameters = own["_parameters"]
    return torch.layer_norm(input, own["normalized_shape"], parameters["weight"], parameters["bias"], own["eps"])


#: The operations of modules of these classes.
_COMPUTED: dict[type, Callable[[Any, Any], Any]] = {nn.Linear: _linear, nn.LayerNorm: _layer_norm}
_FEW = 3  # functions


def _is_idle_dropout(node: torch.fx.Node) -> bool:
    its_name = getattr(node.target, "__module__", None), getattr(node.target, "__name__", None)
    if not _is_one_of(node, _DROPOUTS) and its_name != _STOCHASTIC_DEPTH:
        return False
    given = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    given.apply_defaults()
    return given.arguments["training"] is False


def _norm_and_rest(norm: nn.Module, training: bool) -> torch.fx.Graph | None:
    """The graph of a batch normalisation with a forward of its own, if that is torch's and something after it; else None.

    In the graph the placeholder's value is that of the batch normalisation, so the graph has only the rest.
    """
    base = norm_base(type(norm))
    if base is None or "forward" in norm.__dict__:
        return None
    try:
        graph = _traced(norm, training, _only_argument(norm), NORMS[base] + 2)
        return graph if _begins_with_norm(norm, graph, training) else None
    except Exception:  # as above
        return None


def _begins_with_norm(norm: Any, graph: torch.fx.Graph, training: bool) -> bool:
    """True if the graph uses its input only in torch's batch normalisation by this module; its node is then removed."""
    placeholder, *nodes = graph.nodes
    if len(placeholder.users) != 1 or not _is_one_of(next(iter(placeholder.users)), {_F.batch_norm}):
        return False
    (call,) = placeholder.users
    given = inspect.signature(_F.batch_norm).bind(*call.args, **call.kwargs)
    given.apply_defaults()
    found = {name: value.target if isinstance(value, torch.fx.Node) else value for name, value in given.arguments.items()}
    tracked = norm.running_mean is not None and (norm.track_running_stats or not training)
    expected = {
        "input": placeholder.target, "running_mean": "running_mean" if tracked else None, "running_var": "running_var" if tracked else None,
        "weight": None if norm.weight is None else "weight", "bias": None if norm.bias is None else "bias",
        "training": training or norm.running_mean is None, "eps": norm.eps,
    }
    if any(found[name] != value for name, value in expected.items()) or (tracked and training and found["momentum"] != norm.momentum):
        return False
    counts = [n for n in nodes if n.op == "call_method" and n.target == "add_" and n.args[0].target == "num_batches_tracked"]
    if [n.args[1:] for n in counts] != [(1,)] * (training and norm.num_batches_tracked is not None) or any(n.users for n in counts):
        return False
    call.replace_all_uses_with(placeholder)
    for node in (call, *counts):
        graph.erase_node(node)
    for node in [n for n in nodes if n.op == "get_attr" and not n.users]:
        graph.erase_node(node)
    (result,) = nodes[-1].args
    return isinstance(result, torch.fx.Node) and not any(node.op == "get_attr" for node in graph.nodes)


# ---- modules that a trace depends on, and whether they have changed


class Seen:
    """A module that a trace depends on, with its class, its children and its own attributes.

    A module that is `taken_in` is computed as a part of a chain instead of being called. It must have no hooks and, unless `training` is
    None, be in that mode.
    """

    def __init__(self, module: Any, taken_in: bool = False, training: bool | None = None) -> None:
        self.module, self.cls, self.taken_in, self.training = module, origin(type(module)), taken_in, training
        self.children = tuple(module._modules.values())
        self.names = tuple(name for name in module.__dict__ if name not in _COMMON)
        self.values = tuple(module.__dict__[name] for name in self.names)

    def unchanged(self) -> bool:
        module = self.module
        attributes, cls = module.__dict__, type(module)
        if (cls is not self.cls and origin(cls) is not self.cls) or "forward" in attributes:
            return False
        if self.taken_in and (hooked(module) or (self.training is not None and module.training is not self.training)):
            return False
        now = attributes["_modules"].values()
        if len(now) != len(self.children) or (self.children and not all(map(operator.is_, now, self.children))):
            return False
        return not self.names or all(map(operator.is_, map(attributes.get, self.names), self.values))

    def watched_by(self, watch: Watch) -> None:
        """Add conditions to `watch` that hold while the module stays as it is; it is unchanged now."""
        attributes = watch.module(self.module)
        watch.entries(attributes, "_modules", *self.names)
        watch.entries(attributes["_modules"], *attributes["_modules"])
        watch.size(attributes["_modules"])
        if self.taken_in:
            watch.unhooked(attributes, *HOOKS)
            if self.training is not None:
                watch.entries(attributes, "training")


#: The attributes that a conversion adds to a module.
KEPT = ("_folded", "_fusion", "_conversion")
#: The attributes that all modules have, and those that a conversion adds.
_COMMON = {*nn.Module().__dict__, *KEPT}


class _Recipe(NamedTuple):
    """A fused function, and the names of the modules that it depends on in the module that it is called with."""

    function: Callable[..., Any]
    #: The names of each chain of a convolution.
    chains: list[tuple[str, ...]]
    #: Whether the function differs from the module's own forward.
    fuses: bool
    #: The module itself, whose name is empty, the containers in it, and those whose first module was asked for.
    looked_into: tuple[str, ...]
    #: Modules that are computed as a part of a chain, or opened, each with the mode in which it is; None if both modes are alike.
    taken_in: dict[str, bool | None]
    #: The modules that are called.
    called: tuple[str, ...]


class _Variant:
    """One way to call a module: the fused function, what it depends on, and its chains."""

    def __init__(self, recipe: _Recipe, module: nn.Module) -> None:
        self.function, self.chains, self.called = recipe.function, recipe.chains, recipe.called
        self.seen = [Seen(module.get_submodule(name)) for name in recipe.looked_into]
        self.seen += [Seen(module.get_submodule(name), True, mode) for name, mode in recipe.taken_in.items()]
        #: The function's argument in the module's place, and the conditions for that.
        self.ready: tuple[_Children, Conditions] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Variant:
        twin = memo[id(self)] = object.__new__(_Variant)
        twin.__dict__.update(self.__dict__, seen=copy.deepcopy(self.seen, memo), ready=None)
        return twin

    def children_of(self, module: nn.Module) -> _Children | None:
        """The module's children, as the function's argument; None if anything that it depends on has changed."""
        if self.seen[0].module is not module:  # it is a copy of that module
            return None
        ready = self.ready
        if ready is not None and holds(ready[1]):
            return ready[0]
        if not all(seen.unchanged() for seen in self.seen):
            return None
        watch = Watch()
        watch.globally_unhooked()
        for seen in self.seen:
            seen.watched_by(watch)
        self.ready = _Children(module, self.called), watch.conditions()
        return self.ready[0]


class _Children:
    """A module's children as attributes, and theirs likewise. An attribute of a module itself takes half a microsecond."""

    def __init__(self, module: nn.Module, names: Collection[str]) -> None:
        self._module = module
        below: dict[str, list[str]] = {}
        for name in names:
            first, _, rest = name.partition(".")
            below.setdefault(first, []).append(rest)
        for first, rests in below.items():
            child: Any = module._modules[first]
            self.__dict__[first] = _Children(child, rests) if all(rests) else child

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


class Traces:
    """Remembers results for modules that are alike: a trace takes milliseconds, and networks repeat their modules."""

    def __init__(self) -> None:
        self.found: dict[Any, Any] = {}

    def of(self, find: Callable[..., Any], module: nn.Module, *arguments: Any) -> Any:
        """The result of ``find(module, *arguments)``."""
        try:
            key = find, _likeness(module), arguments
            known = key in self.found
        except TypeError:  # an attribute can't be hashed
            return find(module, *arguments)
        if not known:
            self.found[key] = find(module, *arguments)
        return self.found[key]


def _likeness(module: nn.Module) -> Any:
    """All that a forward may depend on while it is traced. One trace is enough for modules in which it is equal."""
    own = tuple((name, type(value), value) for name, value in module.__dict__.items() if name not in _COMMON)
    tensors = tuple(name for kept in (module._parameters, module._buffers) for name, tensor in kept.items() if tensor is not None)
    return type(module), own, tensors, tuple((name, child and _likeness(child)) for name, child in module._modules.items())


class Fusion:
    """The fused forwards of one module, for evaluation and, if asked for, for training."""

    def __init__(self, module: nn.Module, in_training: bool, traces: Traces) -> None:
        self.in_training = in_training
        self.signature = inspect.signature(origin(type(module)).forward)
        _, *parameters = self.signature.parameters.values()
        if any(p.kind is p.VAR_POSITIONAL for p in parameters):
            raise TypeError("its forward takes any number of arguments")
        named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
        self.defaults = {p.name: p.default for p in named if p.default is not p.empty}
        self.required = tuple(p.name for p in named if p.default is p.empty)
        #: by mode and the names of the arguments given
        self.variants: dict[tuple[bool, tuple[str, ...]], _Variant] = {}
        #: by mode, the reason why the module could not be traced
        self.problems: dict[bool, str] = {}
        #: whether the module, or a part of it, may have been called in training since its last fused evaluation
        self.trained = False
        for training in (False, True) if in_training else (False,):
            self._trace(module, training, [p.name for p in named], traces)

    def _trace(self, module: nn.Module, training: bool, names: list[str], traces: Traces) -> None:
        """Trace the calls to expect: without optional arguments, with one of those whose default is None, and with all of them."""
        optional = [name for name, default in self.defaults.items() if default is None]
        calls = {tuple(n for n in names if n in self.required or n in more) for more in ((), optional, *((n,) for n in optional))}
        problems = []
        for given in sorted(calls, key=len):
            recipe = traces.of(_recipe, module, training, given, traces)
            if isinstance(recipe, str):
                problems.append(recipe)
            elif recipe.fuses:
                self.variants[training, given] = _Variant(recipe, module)
        if len(problems) == len(calls):
            self.problems[training] = problems[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> Fusion:
        twin = memo[id(self)] = object.__new__(Fusion)
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {"in_training": self.in_training}  # for a file: generated functions can't be pickled by name

    def chosen(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
        """The fused function for this call, and all its arguments; None if the module's own forward has to run."""
        training = module.training
        if training:
            self.trained = True
        elif self.trained:
            self.trained = False
            for one in module.modules():  # not every batch normalisation counts the batches that change its statistics
                one.__dict__.pop("_folded", None)
        if not (self.in_training if training else not torch.is_grad_enabled()):
            return None
        if _symbolic_trace._is_fx_tracing_flag or torch.jit.is_tracing():  # the fused step keeps arrays, which would become constants
            return None
        given = self.required
        if kwargs or len(args) != len(given):
            try:
                bound = self.signature.bind(module, *args, **kwargs).arguments
            except TypeError:  # the module's own forward explains the error
                return None
            _, *named = bound.items()
            values = {name: value for name, value in named if name in given or value is not self.defaults.get(name, inspect)}
            given, args = tuple(values), tuple(values.values())
            if not all(isinstance(value, torch.Tensor) for name, value in values.items() if name not in self.required):
                return None
        variant = self.variants.get((training, given))
        children = None if variant is None else variant.children_of(module)
        return None if variant is None or children is None else (variant.function, (children, *args))


def parts(module: nn.Module, in_sequences: bool = False) -> Iterator[nn.Module]:
    """The children that a module's forward calls: those in a ModuleList and the like are called one by one."""
    for child in module.children():
        yield child
        if is_container(child) or (in_sequences and is_sequence(child)):
            yield from parts(child, in_sequences)


def is_worth_tracing(module: nn.Module, in_sequences: bool = True) -> bool:
    """True if the module may have chains: it has a convolution of ours, perhaps in a sequence, and computes something itself."""
    if is_container(module) or isinstance(module, ALL_CONVOLUTIONS):
        return False
    return any(is_convolution(type(part)) for part in parts(module, in_sequences))


def _recipe(module: nn.Module, training: bool, given: tuple[str, ...], traces: Traces) -> _Recipe | str:
    """The module's forward for these arguments, with its chains fused; or the reason why it can't be traced."""
    opened: dict[str, bool | None] = {}
    try:
        graph = _traced(module, training, given, opened=None if training else opened)
        called = [str(node.target) for node in graph.nodes if node.op == "call_module"]
        paths = [name.split(".") for name in called]
        looked_into = dict.fromkeys(["", *(".".join(path[:depth]) for path in paths for depth in range(len(path)))])
        finder = _Finder(module, graph, training, traces)
        chains = [chain for node in list(graph.nodes) if finder.calls(node, finder.is_convolution) and (chain := finder.fuse(node))]
        fuses = bool(chains)
        if training:
            finder.pass_inputs_on()
        else:
            for node in list(graph.nodes):
                fuses |= finder.fuse_norm(node) or finder.fuse_linear(node)
            finder.open_modules()
            fuses |= finder.take_poolings()
        looked_into |= dict.fromkeys(finder.looked_into)
        code = graph.python_code("self")
        exec(code.src, code.globals)
    except Exception as error:  # whatever a forward does when it is called with stand-ins
        return str(error).partition("\n")[0] or type(error).__name__
    taken_in = opened | finder.taken_in
    looked_into_alone = tuple(name for name in looked_into if name not in taken_in)
    return _Recipe(code.globals["forward"], chains, fuses, looked_into_alone, taken_in, tuple(called))


def _is_one_of(node: torch.fx.Node, targets: Collection[Any]) -> bool:
    """True if the node calls one of these functions or methods."""
    return node.op in ("call_function", "call_method") and node.target in targets


class _Finder:
    """Finds the chains in a module's graph, and replaces each by one call."""

    def __init__(self, module: nn.Module, graph: torch.fx.Graph, training: bool, traces: Traces) -> None:
        self.module, self.graph, self.training, self.traces = module, graph, training, traces
        #: See :class:`_Recipe`.
        self.taken_in: dict[str, bool | None] = {}
        self.looked_into: list[str] = []

    def child(self, node: torch.fx.Node) -> nn.Module:
        return self.module.get_submodule(str(node.target))

    def calls(self, node: torch.fx.Node, wanted: Callable[[nn.Module], bool]) -> bool:
        """True if the node calls a submodule of the wanted kind with one array."""
        return node.op == "call_module" and len(node.args) == 1 and not node.kwargs and wanted(self.child(node))

    @staticmethod
    def is_convolution(module: nn.Module) -> bool:
        return is_convolution(type(module)) and "forward" not in module.__dict__

    @staticmethod
    def is_norm(module: nn.Module) -> bool:
        return is_plain_norm(type(module)) and "forward" not in module.__dict__ and {"weight", "bias"} <= set(module._parameters)

    def acts_as(self, module: nn.Module) -> Any:
        return self.traces.of(acts_as, module, self.training)

    def activation(self, node: torch.fx.Node) -> Any:
        """The activation that a node computes, or None."""
        if not self.calls(node, lambda child: True):
            return activation_of(node)
        found = self.acts_as(self.child(node))
        return None if found == "identity" else found

    def follower(self, node: torch.fx.Node, passed: list[torch.fx.Node]) -> torch.fx.Node | None:
        """The only user of a node. Modules in between that compute nothing are added to `passed`."""
        while len(node.users) == 1:
            node = next(iter(node.users))
            if not self.calls(node, lambda child: self.acts_as(child) == "identity"):
                return node
            passed.append(node)
        return None

    def between(self, first: torch.fx.Node, last: torch.fx.Node, chain: Collection[torch.fx.Node]) -> list[torch.fx.Node]:
        """The nodes between `first` and `last` that are not in the chain."""
        nodes = list(self.graph.nodes)
        return [node for node in nodes[nodes.index(first) + 1 : nodes.index(last)] if node not in chain]

    def calls_norm(self, node: torch.fx.Node, norm: nn.Module) -> bool:
        """True if the node calls that batch normalisation, alone or in another module."""
        if node.target is trained:
            return self.module.get_submodule(str(node.args[1].target)) is norm
        return node.op == "call_module" and any(one is norm for one in self.child(node).modules())

    def fuse(self, convolution: torch.fx.Node) -> tuple[str, ...]:
        """Fuse the chain that begins with this node, if there is one; returns the names of its links."""
        passed: list[torch.fx.Node] = []
        norm = self.follower(convolution, passed)
        last, names, residual, activation = convolution, [str(convolution.target)], None, None
        chain = []
        if norm is not None and (self.calls(norm, self.is_norm) or self.unfold(norm)):
            last, chain = norm, [*passed, norm]
            names.append(str(norm.target))
        elif self.training:  # torch keeps what the activation's gradient needs
            return ()
        else:
            norm = None
        passed = []
        following = self.follower(last, passed)
        residual = self.residual(convolution, following, passed[-1] if passed else last, {*chain, *passed})
        if following is not None and residual is not None:
            last = following
            names.append("sum")
            chain += [*passed, last]
            passed = []
            following = self.follower(last, passed)
        if following is not None and residual is not None:  # without a sum the call stays at the convolution
            waits = self.between(last, following, passed)
            following = None if overwriting.may_be_overwritten([convolution.args[0], residual], waits, self.child) else following
        if following is not None and (activation := self.activation(following)) is not None:
            last = following
            names.append(str(last.target) if last.op == "call_module" else _ACTIVATIONS[last.target])
            chain += [*passed, last]
        if norm is None and activation is None:  # the convolution alone is still called without its module
            last, names, residual, chain = convolution, names[:1], None, []
        if self.training and norm is not None:  # the statistics have to change in the author's order
            of_norm = self.child(norm)
            if any(self.calls_norm(node, of_norm) for node in self.between(convolution, last, chain)):
                return ()
        self.take_in(node for node in chain if node is not norm)
        with self.graph.inserting_before(convolution if residual is None else last):
            arrays = (convolution.args[0], residual)
            parts = (self.graph.get_attr(names[0]), None if norm is None else self.graph.get_attr(names[1]))
            one = self.graph.call_function(trained if self.training else fused, (*parts, *arrays, activation))
        last.replace_all_uses_with(one)
        for node in (*reversed(chain), convolution):
            self.graph.erase_node(node)
        return tuple(names)

    def residual(
        self, start: torch.fx.Node, following: torch.fx.Node | None, before: torch.fx.Node, chain: Collection[torch.fx.Node]
    ) -> torch.fx.Node | None:
        """The value that `following` adds to `before`, in the chain from `start`; None if it is no sum that can be in the chain."""
        if following is None or not _is_one_of(following, _SUMS) or len(following.args) != 2 or following.kwargs:
            return None
        first, second = following.args
        other = second if first is before else first
        if first is not before and following.target in _IN_PLACE:  # the sum is written over the other operand
            return None
        if overwriting.may_be_overwritten([start.args[0]], self.between(start, following, chain), self.child):
            return None
        return other if isinstance(other, torch.fx.Node) and other is not before else None

    def take_in(self, nodes: Iterable[torch.fx.Node]) -> None:
        """Note that the operations of these nodes are computed without their modules."""
        for node in nodes:
            if node.op == "call_module":
                child = self.child(node)
                always = self.traces.of(acts_as, child, not self.training) == self.acts_as(child)
                self.taken_in[str(node.target)] = None if always else self.training

    def replace(self, chain: Sequence[torch.fx.Node], function: Callable[..., Any], *arguments: Any) -> bool:
        """Erase a chain, and call `function` with the first node's module in the place of its last node."""
        self.take_in(chain[1:])
        with self.graph.inserting_before(chain[-1]):
            one = self.graph.call_function(function, (self.graph.get_attr(str(chain[0].target)), *arguments))
        chain[-1].replace_all_uses_with(one)
        for node in reversed(chain):
            self.graph.erase_node(node)
        return True

    def fuse_norm(self, norm: torch.fx.Node) -> bool:
        """Compute a batch normalisation and the activation behind it in one pass. False if there is none."""
        passed: list[torch.fx.Node] = []
        if not self.calls(norm, self.is_norm) or (following := self.follower(norm, passed)) is None:
            return False
        activation = self.activation(following)
        if activation is None or overwriting.may_be_overwritten(norm.args, self.between(norm, following, passed), self.child):
            return False
        return self.replace([norm, *passed, following], normalised, norm.args[0], activation)

    def fuse_linear(self, start: torch.fx.Node) -> bool:
        """Compute a converted linear layer and the steps after it in one: an activation; or a permutation to channels first, a factor for
        each channel and a sum, each of which may be missing. False if none follows."""
        if not self.calls(start, linear.is_converted):
            return False
        chain, passed = [start], list[torch.fx.Node]()
        following = self.follower(start, passed)
        activation = None if following is None else self.activation(following)
        moved, scale, residual = False, None, None
        if following is not None and activation is not None:
            chain += [*passed, following]
        else:
            if following is not None and self.is_move(following):
                chain, passed, moved = [*chain, *passed, following], [], True
                following = self.follower(chain[-1], passed)
            if moved and following is not None and (scale := self.factor(following, passed[-1] if passed else chain[-1])) is not None:
                chain, passed = [*chain, *passed, following], []
                following = self.follower(chain[-1], passed)
            residual = self.residual(start, following, passed[-1] if passed else chain[-1], {*chain, *passed})
            if following is not None and residual is not None:
                chain += [*passed, following]
        if activation is None and scale is None and residual is None:
            return False
        if overwriting.may_be_overwritten([start.args[0], scale], self.between(start, chain[-1], chain), self.child):
            return False
        return self.replace(chain, linear.in_one, start.args[0], scale, residual, activation, moved)

    def is_move(self, node: torch.fx.Node) -> bool:
        """True if the node moves the last of four axes to the second place."""
        if self.calls(node, lambda child: not hooked(child)):
            steps = self.traces.of(_steps, self.child(node), self.training)
            inside = [] if steps is None else list(steps.nodes)
            return len(inside) == 3 and self.is_move(inside[1])
        if node.op == "call_function" and node.target is torch.permute and not node.kwargs and len(node.args) == 2:
            return tuple(node.args[1]) == _CHANNELS_FIRST
        return node.op == "call_method" and node.target == "permute" and node.args[1:] in (_CHANNELS_FIRST, (_CHANNELS_FIRST,))

    def factor(self, node: torch.fx.Node, before: torch.fx.Node) -> torch.fx.Node | None:
        """The module's parameter of one number a channel that `before` is multiplied by; None if that is not what the node does."""
        if not _is_one_of(node, _PRODUCTS) or len(node.args) != 2 or node.kwargs:
            return None
        other = node.args[1] if node.args[0] is before else node.args[0]
        if not isinstance(other, torch.fx.Node) or other.op != "get_attr":
            return None
        own = self.module._parameters.get(str(other.target))
        return other if own is not None and own.dim() == 3 and own.shape[1:] == (1, 1) else None

    def take_poolings(self) -> bool:
        """Compute max pooling without the places of the maxima. False if there is none."""
        found = [node for node in self.graph.nodes if node.op == "call_function" and node.target is _F.max_pool2d]
        for node in found:
            node.target = pooling.evaluated
        return bool(found)

    def pass_inputs_on(self) -> None:
        """Let layers in training pass their input on to its later readers, if none of these may write to it.

        Then our launches, and no passes of torch's, add the gradients of all uses.
        """
        nodes = list(self.graph.nodes)
        for node in nodes:
            if node.target is not trained:
                continue
            input = node.args[2]
            later = [user for user in nodes[nodes.index(node) + 1 :] if input in user.all_input_nodes]
            if not later or node.args[3] is input or not all(map(self.reads_only, later)):
                continue
            node.args = (*node.args, True)
            with self.graph.inserting_after(node):
                passed = self.graph.call_function(operator.getitem, (node, 1))
            with self.graph.inserting_after(node):
                result = self.graph.call_function(operator.getitem, (node, 0))
            node.replace_all_uses_with(result, lambda user, made=(result, passed): user not in made)
            for user in later:
                user.replace_input_with(input, passed)

    def open_modules(self) -> None:
        """Replace calls of other modules by the operations in them, where these are known: a call takes a microsecond or two."""
        for node in list(self.graph.nodes):
            if not self.calls(node, lambda child: not hooked(child)):
                continue
            name, child = str(node.target), self.child(node)
            inside = _COMPUTED.get(type(child)) or self.traces.of(_steps, child, self.training)
            if inside is None:
                continue
            with self.graph.inserting_before(node):
                if isinstance(inside, torch.fx.Graph):
                    placeholder, *steps, end = inside.nodes
                    made = {placeholder: node.args[0]}
                    for step in steps:
                        made[step] = self.graph.node_copy(step, made.__getitem__)
                    result = made[end.args[0]]
                else:
                    result = self.graph.call_function(inside, (self.graph.get_attr(name), node.args[0]))
            node.replace_all_uses_with(result)
            self.graph.erase_node(node)
            always = inside is _COMPUTED.get(type(child)) or str(self.traces.of(_steps, child, not self.training)) == str(inside)
            self.taken_in[name] = None if always else self.training

    def reads_only(self, node: torch.fx.Node) -> bool:
        """True if the node is a layer in training, or calls modules of which a convolution is the first."""
        if node.target is trained:
            return True
        if not self.calls(node, lambda child: True):
            return False
        name, first = str(node.target), self.child(node)
        while origin(type(first)) is nn.Sequential and len(first) and "forward" not in first.__dict__:
            self.looked_into.append(name)
            name, first = f"{name}.{next(iter(first._modules))}", first[0]
        return self.is_convolution(first)

    def unfold(self, node: torch.fx.Node) -> bool:
        """Put the steps that a batch normalisation of a class of its own adds behind its node; False if they are not known."""
        if not self.calls(node, lambda child: {"weight", "bias"} <= set(child._parameters)):
            return False
        norm = self.child(node)
        rest = self.traces.of(_norm_and_rest, norm, self.training)
        if rest is None:
            return False
        users = list(node.users)
        placeholder, *steps, end = rest.nodes
        made, at = {placeholder: node}, node.next
        for step in steps:
            with self.graph.inserting_before(at):
                copied = made[step] = self.graph.node_copy(step, made.__getitem__)
            if copied.op == "call_module":
                copied.target = f"{node.target}.{step.target}"
        for user in users:
            user.replace_input_with(node, made[end.args[0]])
        self.taken_in[str(node.target)] = self.training
        return True


# ---- functions that traced forwards call


def fused(convolution: Any, norm: Any, input: Any, residual: Any, activation: Any) -> Any:
    """Convolution, batch normalisation, sum with a residual, activation; each of the last three may be None. For traced forwards."""
    folded = _folded(convolution, norm)
    if folded is None or input.dim() != len(convolution.kernel_size) + 2:
        return _finished(_normalised(norm, convolution(input)), residual, activation)
    weight, scale, shift, asked = folded
    if asked is not None:
        made = quick.call(quick.table, (*asked, activation), False, input, weight, shift, scale, residual, None)
        if made is not None:
            return made
    try:
        return convolution._conv_forward(input, weight, shift, scale=scale, residual=residual, activation=activation)
    except ConvArgumentError:  # torch's sum takes another shape or dtype too; all else it refuses as well
        return _finished(_normalised(norm, convolution(input)), residual, activation)


def normalised(norm: Any, input: Any, activation: Any) -> Any:
    """Batch normalisation and an activation. For traced forwards."""
    statistics = _statistics(norm) if input.is_cuda else None
    made = None if statistics is None else normalised_by(input, *statistics, activation)
    return activated(norm(input), activation) if made is None else made


def trained(convolution: Any, norm: Any, input: Any, residual: Any, activation: Any, passes_on: bool = False) -> Any:
    """The same as :func:`fused`, in training. With `passes_on` the input for other readers is a second result: see :func:`conv_bn_act`."""
    known = isinstance(convolution, modules._Conv) and is_convolution(type(convolution)) and norm_base(type(norm)) is not None
    if not known or hooked(convolution) or hooked(norm):
        made = _finished(_normalised(norm, convolution(input)), residual, activation)
        return (made, input) if passes_on else made
    return conv_bn_act(convolution, norm, input, activation, convolution.precision, len(convolution.kernel_size), residual, passes_on)


def _normalised(norm: Any, y: Any) -> Any:
    """The batch normalisation alone, without the steps of a subclass; `y` if it is None."""
    if norm is None:
        return y
    base = None if is_plain_norm(type(norm)) else norm_base(type(norm))
    return norm(y) if base is None else base.forward(norm, y)


def _finished(result: Any, residual: Any, activation: Any) -> Any:
    """The steps behind a batch normalisation."""
    if residual is not None:
        result = result + residual
        if activation == "relu":
            return torch.relu_(result)  # nothing else has the sum
    return activated(result, activation)


class _Folded(NamedTuple):
    """A convolution's weight; the factor and summand of each channel by a batch normalisation, which may be None, and the convolution's
    bias; and the options of :func:`pycuda_conv.quick.call` without the activation, or None where it must not be called."""

    weight: Any
    scale: Any
    shift: Any
    asked: tuple[Any, ...] | None


def _folded(convolution: Any, norm: Any) -> _Folded | None:
    """The convolution and batch normalisation as one, kept as long as nothing that they are made of changes.

    None if one of the two was replaced by something else, has hooks, or uses the batch's statistics.
    """
    own = (convolution if norm is None else norm).__dict__  # a module's attributes are slow, and every call asks for them
    kept = own.get("_folded")
    if kept is not None and kept.first is convolution and kept.second is norm and holds(kept.conditions):
        folded: _Folded = kept.made
        return folded if folded.weight is not None else folded._replace(weight=convolution.weight)
    made = _fold(convolution, norm)
    if made is None:
        own.pop("_folded", None)
        return None
    folded, conditions = made
    if conditions is not None:
        computed = "weight" not in convolution._parameters
        own["_folded"] = Kept(convolution, norm, conditions, folded._replace(weight=None) if computed else folded)
    return folded


def _looked_at(watch: Watch, norm: Any, *more: Any) -> tuple[Any, Any, Any, Any] | None:
    """The weight, bias, mean and variance of a batch normalisation in evaluation, which are watched with `more` tensors.

    None if it was replaced by something else, has hooks, or uses the batch's statistics.
    """
    own = norm.__dict__
    if norm_base(type(norm)) is None or own["training"] or any(map(own.get, _OTHERWISE)):
        return None
    parameters, buffers = own["_parameters"], own["_buffers"]
    gamma, beta, mean, variance = parameters["weight"], parameters["bias"], buffers["running_mean"], buffers["running_var"]
    if mean is None or variance is None:
        return None
    watch.module(norm)
    watch.unhooked(own, *_FORWARD_HOOKS)
    watch.entries(own, "training", "eps", "_parameters", "_buffers")
    watch.entries(parameters, "weight", "bias")
    watch.entries(buffers, "running_mean", "running_var", "num_batches_tracked")
    counted = buffers["num_batches_tracked"]  # torch counts changes of the statistics in this alone
    try:
        for tensor in (*more, gamma, beta, mean, variance, counted):
            if tensor is not None:
                watch.tensor(tensor)
    except RuntimeError:  # tensors of inference mode have no version
        return None
    return gamma, beta, mean, variance


def _statistics(norm: Any) -> tuple[Any, Any] | None:
    """The mean and factor of a batch normalisation, as :func:`normalised_by` takes them, and its summand, kept as long as nothing that they
    are made of changes. None as for :func:`_looked_at`."""
    own = norm.__dict__
    kept = own.get("_folded")
    if kept is not None and kept.first is None and kept.second is norm and holds(kept.conditions):
        found: tuple[Any, Any] = kept.made
        return found
    watch = Watch()
    sources = _looked_at(watch, norm) if is_plain_norm(type(norm)) else None
    own.pop("_folded", None)
    if sources is None:
        return None
    gamma, beta, mean, variance = sources
    dtype = torch.float64 if mean.dtype is torch.float64 else torch.float32
    factor = torch.rsqrt(variance.detach().double() + norm.eps)
    factor = factor if gamma is None else factor * gamma.detach()
    made = torch.stack((mean.detach().to(dtype), factor.to(dtype))), None if beta is None else beta.detach().to(dtype)
    if not (mean.is_cuda and torch.cuda.is_current_stream_capturing()):  # then there are no numbers yet
        own["_folded"] = Kept(None, norm, watch.conditions(), made)
    return made


def _fold(convolution: Any, norm: Any) -> tuple[_Folded, Conditions | None] | None:
    """The two as one, and the conditions under which that holds; None for the latter if it must not be kept."""
    own = convolution.__dict__
    if not is_convolution(type(convolution)) or any(map(own.get, _OTHERWISE)):
        return None
    weight, bias, asked = convolution.weight, convolution.bias, convolution._asked()
    watch = Watch()
    watch.module(convolution)
    watch.unhooked(own, *_FORWARD_HOOKS)
    watch.entries(own, *modules.OPTIONS, "_parameters")
    watch.entries(own["_parameters"], "weight", "bias")
    lasting = "bias" in own["_parameters"]  # otherwise it is computed, as in torch.nn.utils.parametrize
    if norm is None:
        return _Folded(weight, None, bias, asked), watch.conditions() if lasting else None
    found = _looked_at(watch, norm, convolution._parameters.get("weight"), bias)
    if found is None:
        return None
    gamma, beta, mean, variance = found
    scale = torch.rsqrt(variance.detach().double() + norm.eps)
    scale = scale if gamma is None else scale * gamma.detach()
    shift = -mean.detach() * scale if bias is None else (bias.detach() - mean.detach()) * scale
    shift = shift if beta is None else shift + beta.detach()
    folded = _Folded(weight, scale.to(weight.dtype), shift.to(weight.dtype), asked)
    lasting = lasting and not (weight.is_cuda and torch.cuda.is_current_stream_capturing())  # then there are no numbers yet
    return folded, watch.conditions() if lasting else None
