"""Putting this package's convolutions into a model that is there.

Convolutions change their class and nothing else: they stay the objects they were, with their parameters, hooks and names.

Batch normalisations and ReLUs that follow them are found with ``torch.fx`` in the forward of each module by itself, whose children
stay calls, so that what is hooked, replaced or called alone later is not bypassed. Such a module gets a `forward` of its own, a
:class:`FusedForward`, which takes the convolution and what follows it in one step where that may be: evaluating, without gradients,
and, if asked for, training; not in ``torch.compile``. Else it does what the model's author wrote, so a converted model is trained and
evaluated as before.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx

from pycuda_conv.errors import ConvArgumentError, brief
from pycuda_conv.nn import modules
from pycuda_conv.nn.fused import _FusedConvBnReLU, conv_bn_relu
from pycuda_conv.nn.modules import checked_precision

_OURS: dict[type, type] = {
    getattr(torch.nn, name): getattr(modules, name)
    for name in ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
}
_CONVOLUTIONS = set(_OURS.values())
_NORMS = {torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d}
#: What is fused in training: a convolution, its batch norm, and their spatial axes.
_LAYERS = {
    (modules.Conv1d, torch.nn.BatchNorm1d): 1, (modules.Conv2d, torch.nn.BatchNorm2d): 2, (modules.Conv3d, torch.nn.BatchNorm3d): 3,
}
_RELUS = {torch.nn.functional.relu, torch.nn.functional.relu_, torch.relu, torch.relu_, "relu", "relu_"}
_SUMS = {operator.add, operator.iadd, torch.add, "add", "add_"}
_IN_PLACE = {operator.iadd, "add_"}


@dataclass(frozen=True)
class Converted:
    """One convolution of the model: its `name` there, its class before, and the names of what is fused with it."""

    name: str
    was: str
    fused: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " + ".join((f"{self.name} ({self.was})", *self.fused))


@dataclass
class Conversion:
    """What :func:`convert` did: the convolutions, and why something was left as it was. Its ``str()`` is meant to be read."""

    converted: list[Converted] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        fused = sum(bool(one.fused) for one in self.converted)
        lines = [f"{len(self.converted)} convolutions converted, {fused} of them fused with what follows"]
        return "\n".join(lines + [f"  {one}" for one in self.converted] + [f"  note: {note}" for note in self.notes])


def convert(model: torch.nn.Module, precision: str = "fp32", fuse: bool = True, fuse_training: bool = False) -> Conversion:
    """Let this package compute a model's convolutions, in place.

    Parameters
    ----------
    model : torch.nn.Module
        Its ``nn.Conv*`` and ``nn.ConvTranspose*`` modules become those of :mod:`pycuda_conv.nn`; parameters, buffers and
        state dict are what they were. Subclasses of those are left, with a note.
    precision : {"fp32", "tf32"}
        Arithmetic for float32: see :func:`pycuda_conv.conv2d`.
    fuse : bool
        Compute convolution, batch normalisation and, where they follow, the sum with a residual and ReLU in one step wherever the
        model is evaluated without gradients: after ``model.eval()``, inside ``torch.no_grad()`` or ``torch.inference_mode()``.
        Found by tracing the forward of each module; one that can't be traced is left, with a note. What changes parameters and
        statistics is noticed, but for ``tensor.data`` and for replays of a CUDA graph: convert again after those.
    fuse_training : bool
        Compute convolution, batch normalisation and ReLU in one step in training too, as :class:`FusedConvBnReLU2d` and the like
        do: in less time and memory, but without second derivatives. Modules with hooks are called as before.

    Returns
    -------
    Conversion
        What was done. ``print`` it.

    Raises
    ------
    TypeError
        A `model` that is no ``torch.nn.Module``.
    ValueError
        `fuse_training` without `fuse`; a precision that there is not.

    Examples
    --------
    >>> import torch, pycuda_conv.nn
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
    >>> print(pycuda_conv.nn.convert(model))
    1 convolutions converted, 1 of them fused with what follows
      0 (Conv2d) + 1 + 2
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {brief(model)}")
    checked_precision(precision)
    if fuse_training and not fuse:
        raise ValueError(f"fuse_training={fuse_training} needs fuse=True, but got fuse={fuse}")
    found: dict[torch.nn.Module, Converted] = {}
    done = Conversion()
    ours = [module for module in model.modules() if isinstance(module, _FusedConvBnReLU)]  # which compute all by themselves
    for layer in ours:
        layer.precision = precision
    owned = {part for layer in ours for part in layer.modules()}
    rest = [(name, module) for name, module in model.named_modules() if module not in owned]
    for name, module in rest:
        module.__dict__.pop("_scale_and_shift", None)  # see there
        was = type(module)
        if was in _OURS or was in _OURS.values():
            module.__class__ = _OURS.get(was, was)
            module.precision = precision
            found[module] = Converted(name, was.__name__)
        elif isinstance(module, tuple(_OURS)):
            done.notes.append(f"{name} is a {was.__module__}.{was.__qualname__}, a subclass, and was left as it is")
    if fuse:
        for name, module in rest:
            _fuse(name, module, found, done.notes, fuse_training)
    done.converted.extend(found.values())
    return done


def _fuse(name: str, module: torch.nn.Module, found: dict[torch.nn.Module, Converted], notes: list[str], in_training: bool) -> None:
    """Give `module` a fused forward if its own has chains to fuse; add a note if they can't be looked for."""
    kinds = {type(child) for child in module.children()}
    if not (kinds & _CONVOLUTIONS and kinds & _NORMS) or isinstance(module, torch.nn.ModuleList):
        return
    who = f"{name or 'the model'} ({type(module).__name__}) can't be traced"
    try:
        forward = module.__dict__.get("forward")
        if not (forward is None or isinstance(forward, FusedForward)):
            raise TypeError("its forward was replaced")
        _, chains = _traced(module, False)
    except Exception as error:  # whatever a forward does when it is called with a stand-in for its argument
        reason = str(error).partition("\n")[0]
        notes.append(f"{who}, so nothing in it is fused: {reason}")
        return
    if chains and in_training:
        try:
            _traced(module, True)
        except Exception as error:
            in_training, reason = False, str(error).partition("\n")[0]
            notes.append(f"{who} in training, so nothing in it is fused there: {reason}")
    if chains:
        module.forward = FusedForward(module, in_training)
    for target, *followers in chains:
        convolution = module.get_submodule(target)
        found[convolution] = replace(found[convolution], fused=tuple(followers))


class FusedForward:
    """The forward of a module with its convolutions fused with what follows them where they may be; else the module's own."""

    def __init__(self, module: torch.nn.Module, in_training: bool) -> None:
        self.module, self.in_training = module, in_training
        #: for evaluation and for training
        self._functions: dict[bool, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        training = module.training
        if torch.compiler.is_compiling() or not (self.in_training if training else not torch.is_grad_enabled()):
            return type(module).forward(module, *args, **kwargs)
        if training not in self._functions:
            self._functions[training], _ = _traced(module, training)
        return self._functions[training](module, *args, **kwargs)

    # torch.export asks a forward, as if it were a method, for its text and its arguments: those of the module's own

    @property
    def __code__(self) -> Any:
        return type(self.module).forward.__code__

    @property
    def __wrapped__(self) -> Any:
        return type(self.module).forward.__get__(self.module)

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "in_training": self.in_training, "_functions": {}}  # these have no names to pickle them by


class _Tracer(torch.fx.Tracer):
    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return True


def _traced(module: torch.nn.Module, training: bool) -> tuple[Callable[..., Any], list[tuple[str, ...]]]:
    """The module's forward with its chains fused, a function of the module and its arguments; and each chain's names."""
    _, *parameters = inspect.signature(type(module).forward).parameters.values()
    if any(p.kind is not p.POSITIONAL_OR_KEYWORD or p.default is not p.empty for p in parameters):
        raise TypeError("its forward has optional arguments")
    modes, attributes = [(m, m.training) for m in module.modules()], dict(module.__dict__)
    try:
        module.train(training)
        graph = _Tracer().trace(module)
    finally:
        changed = any(module.__dict__.get(key) is not value for key, value in attributes.items() if key != "training")
        changed |= len(module.__dict__) != len(attributes)
        module.__dict__.clear()
        module.__dict__.update(attributes)
        for one, mode in modes:
            one.training = mode
    if changed:
        raise TypeError("its forward sets attributes")
    function = trained if training else fused
    chains = [_fuse_chain(module, graph, node, function) for node in list(graph.nodes) if _calls(module, node, _CONVOLUTIONS)]
    code = graph.python_code("self")
    exec(code.src, code.globals)
    return code.globals["forward"], [chain for chain in chains if chain]


def _calls(module: torch.nn.Module, node: torch.fx.Node, classes: Collection[type]) -> bool:
    """Whether the node calls a submodule of one of these classes with one array."""
    return (
        node.op == "call_module" and type(module.get_submodule(str(node.target))) in classes and len(node.args) == 1 and not node.kwargs
    )


def _is_one_of(node: torch.fx.Node, targets: Collection[Any]) -> bool:
    """Whether the node calls one of these functions or methods."""
    return node.op in ("call_function", "call_method") and node.target in targets


def _may_wait(module: torch.nn.Module, graph: torch.fx.Graph, convolution: torch.fx.Node, until: torch.fx.Node) -> bool:
    """Whether nothing before that node may write over the convolution's input."""
    nodes = list(graph.nodes)
    between = nodes[nodes.index(convolution) + 1 : nodes.index(until)]
    return all(
        convolution.args[0] not in node.all_input_nodes or _calls(module, node, _CONVOLUTIONS | _NORMS) for node in between
    )


def _fuse_chain(
    module: torch.nn.Module, graph: torch.fx.Graph, convolution: torch.fx.Node, function: Callable[..., Any]
) -> tuple[str, ...]:
    """Make one call of `function` of a convolution and what follows it, if that can be fused; the names of all."""

    def follower(node: torch.fx.Node) -> torch.fx.Node | None:
        return next(iter(node.users)) if len(node.users) == 1 else None

    norm = follower(convolution)
    if norm is None or not _calls(module, norm, _NORMS):
        return ()
    last, names, residual, relu = norm, [str(convolution.target), str(norm.target)], None, False
    following = follower(last)
    if following is not None and _is_one_of(following, _SUMS) and len(following.args) == 2 and not following.kwargs:
        first, second = following.args
        other = second if first is last else first
        kept = first is last or following.target not in _IN_PLACE  # the sum is not written over the other operand
        if isinstance(other, torch.fx.Node) and other is not last and kept and _may_wait(module, graph, convolution, following):
            last, residual = following, other
            names.append("sum")
            following = follower(last)
    if following is not None and (_calls(module, following, {torch.nn.ReLU}) or _is_one_of(following, _RELUS)):
        last, relu = following, True
        names.append(str(last.target) if last.op == "call_module" else "relu")
    with graph.inserting_before(convolution if residual is None else last):
        arrays = (convolution.args[0], residual)
        one = graph.call_function(function, (graph.get_attr(names[0]), graph.get_attr(names[1]), *arrays, relu))
    last.replace_all_uses_with(one)
    node: Any = last
    while node is not convolution:
        before = next(n for n in node.all_input_nodes if n is not residual)
        graph.erase_node(node)
        node = before
    graph.erase_node(convolution)
    return tuple(names)


def trained(convolution: Any, norm: Any, input: Any, residual: Any, relu: bool) -> Any:
    """As :func:`fused`, in training."""
    ndim, alone = _LAYERS.get((type(convolution), type(norm))), residual is None
    if ndim is None or _hooked(convolution) or _hooked(norm):
        return _finished(norm(convolution(input)), residual, relu)
    result = conv_bn_relu(convolution, norm, input, relu and alone, convolution.precision, ndim)
    return _finished(result, residual, relu and not alone)


def _finished(result: Any, residual: Any, relu: bool) -> Any:
    """What follows a batch normalisation, after it."""
    if residual is None:
        return torch.relu(result) if relu else result
    result = result + residual
    return torch.relu_(result) if relu else result  # the sum is nobody else's


def _hooked(module: Any) -> bool:
    """Whether something else than the module's forward runs when it is called, or when gradients go through it."""
    own = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(own) or torch.nn.modules.module._has_any_global_hook()


def fused(convolution: Any, norm: Any, input: Any, residual: Any, relu: bool) -> Any:
    """Convolution, batch normalisation, sum with a residual (or None), ReLU (or not): what a traced forward calls."""
    found = _scale_and_shift(convolution, norm)
    if found is not None:
        scale, shift = found
        try:
            activation = "relu" if relu else None
            return convolution._conv_forward(input, convolution.weight, shift, scale=scale, residual=residual, activation=activation)
        except ConvArgumentError:  # torch's sum takes another shape or dtype too; all else it refuses as well
            pass
    return _finished(norm(convolution(input)), residual, relu)


def _scale_and_shift(convolution: Any, norm: Any) -> tuple[Any, Any] | None:
    """What `norm` does to each channel, with the convolution's bias; kept as long as nothing that it is made of changes.

    None for what was put in the place of the two, and where they have hooks or use the batch's statistics.
    """
    if (
        type(convolution) not in _CONVOLUTIONS or type(norm) not in _NORMS or norm.training or norm.running_mean is None
        or convolution._forward_hooks or convolution._forward_pre_hooks or norm._forward_hooks or norm._forward_pre_hooks
    ):
        return None
    weight, bias = convolution.weight, convolution.bias
    parameters, buffers = norm._parameters, norm._buffers  # a module's attributes are slow
    statistics = buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"]  # torch counts changes in the last only
    sources = bias, parameters["weight"], parameters["bias"], *statistics
    try:
        state = [weight.dtype, *(None if t is None else (id(t), t.data_ptr(), t._version) for t in sources)]
    except RuntimeError:  # tensors of inference mode have no version
        return None
    kept = norm.__dict__.get("_scale_and_shift")
    if kept is not None and kept[0] == state:
        return kept[2]
    bias, gamma, beta, mean, variance, _ = (None if t is None else t.detach() for t in sources)
    assert mean is not None and variance is not None
    scale = torch.rsqrt(variance.double() + norm.eps)
    scale = scale if gamma is None else scale * gamma
    shift = -mean * scale if bias is None else (bias - mean) * scale
    shift = shift if beta is None else shift + beta
    made = scale.to(weight.dtype), shift.to(weight.dtype)
    if not (weight.is_cuda and torch.cuda.is_current_stream_capturing()):  # then there are no numbers yet
        norm.__dict__["_scale_and_shift"] = state, sources, made  # the tensors, so that their ids stay theirs
    return made
