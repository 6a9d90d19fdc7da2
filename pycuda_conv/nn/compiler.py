"""The backend "pycuda_conv" of ``torch.compile``.

Torch's own tracer makes the graph and guards all that it depends on. :mod:`pycuda_conv.nn.graph` puts this package's calls in the place of
convolutions and the steps around them. In light mode the graph then runs as it is: nothing is compiled but kernels. In the other modes it
goes on to inductor, torch's compiler, which takes the rest.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from pycuda_conv.arguments import checked_upsample_filter
from pycuda_conv.errors import ConvArgumentError, brief
from pycuda_conv.invariance import WORD as BATCH_INVARIANT
from pycuda_conv.invariance import checked_invariance
from pycuda_conv.nn.modules import checked_precision

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from pycuda_conv.nn.graph import Found

log = logging.getLogger("pycuda_conv.compile")

MODES = ("default", "light", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
#: The options that are this package's; the others are inductor's.
OPTIONS = ("mode", "precision", "upsample_filter", "batch_invariant")
#: Graphs that are remembered for reports.
MOST_GRAPHS = 256

Model = TypeVar("Model", bound=torch.nn.Module)


@dataclass(frozen=True)
class CompiledGraph:
    """A graph that the backend got, and what became of its convolutions.

    Attributes
    ----------
    mode : str
    gradients : bool
        Whether torch records gradients where the graph runs.
    fused : list of tuples of str
        For each chain that became one call, the modules of its steps.
    alone : list of (str, str)
        Convolutions computed by this package with nothing fused to them, and why.
    left : list of (str, str)
        Convolutions that stayed torch's, and why.
    others : list of tuples of str
        Poolings and linear layers that this package computes.
    """

    mode: str
    gradients: bool
    fused: list[tuple[str, ...]]
    alone: list[tuple[str, str]]
    left: list[tuple[str, str]]
    others: list[tuple[str, ...]]
    _parameters: Any = field(repr=False, compare=False)
    _lines: frozenset[tuple[str, int, str]] = field(repr=False, compare=False)

    def __str__(self) -> str:
        ours = len(self.fused) + len(self.alone)
        count = f"{ours} convolution{'' if ours == 1 else 's'} computed by pycuda_conv, {len(self.fused)} of them fused"
        lines = [f"graph, mode {self.mode!r}, gradients {'recorded' if self.gradients else 'not recorded'}: {count}"]
        lines += [f"  {' + '.join(steps)}" for steps in self.fused]
        lines += [f"  {' + '.join(steps)}" for steps in self.others]
        lines += [f"  {name} alone: {why}" for name, why in self.alone]
        lines += [f"  {name} stays torch's: {why}" for name, why in self.left]
        return "\n".join(lines)


_graphs: deque[CompiledGraph] = deque(maxlen=MOST_GRAPHS)


def checked_options(mode: Any, options: Any) -> tuple[str, str, str | None, bool, dict[str, Any]]:
    """The mode, the precision, what filters behind an upsampling become, whether bits are the same in every batch, and inductor's options.

    Raises
    ------
    TypeError
        `options` is not a dict; `batch_invariant` is not a bool.
    ValueError
        A mode, a precision or an `upsample_filter` that there is not, two modes, or options of inductor's in light mode.
    """
    if options is not None and not isinstance(options, dict):
        raise TypeError(f"options must be a dict, got {brief(options)}")
    rest = dict(options or {})
    own = rest.pop("mode", None)
    if mode is not None and own is not None and mode != own:
        raise ConvArgumentError(f"mode={brief(mode)} and options={brief(options)} ask for two modes")
    mode = mode or own or "default"
    if mode not in MODES:
        raise ConvArgumentError(f"mode must be one of {MODES}, but got mode={brief(mode)}")
    precision, word = checked_precision(rest.pop("precision", "fp32")), checked_upsample_filter(rest.pop("upsample_filter", None))
    invariant = checked_invariance(rest.pop("batch_invariant", False))
    if rest and mode == "light":
        raise ConvArgumentError(
            f"options in light mode are {OPTIONS}, but got options={brief(options)}: there is no inductor that would take others"
        )
    return mode, precision, word, invariant, rest


def backend(gm: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None) -> Any:
    """The backend: ``torch.compile(model, backend="pycuda_conv")``. See :func:`pycuda_conv.nn.compile`."""
    from torch.fx import GraphModule

    chosen, precision, word, invariant, rest = checked_options(mode, options)
    nested = any(isinstance(child, GraphModule) for child in gm.children())
    light = chosen == "light"
    asked: Any = {"upsample_filter": word, "algorithm": BATCH_INVARIANT if invariant else None}
    rewritten(gm, example_inputs, chosen, precision, light and not nested, **asked)
    if light and not nested:
        return gm.forward
    if light:  # torch's own "eager" fails in the backward pass of a checkpointed batch norm; AOTAutograd without a compiler does not
        return torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs)
    return _compiled_by_inductor(gm, example_inputs, chosen, rest)


def _compiled_by_inductor(gm: GraphModule, example_inputs: Sequence[Any], mode: str, options: dict[str, Any]) -> Any:
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, example_inputs, config_patches={**list_mode_options(mode), **options})


def rewritten(
    gm: GraphModule, example_inputs: Sequence[Any], mode: str, precision: str = "fp32", light: bool = False, raises: bool = False,
    upsample_filter: str | None = None, algorithm: str | None = None,
) -> list[Found]:
    """Rewrite a graph in place, and note for reports what was done."""
    from pycuda_conv.nn.graph import rewrite  # these import torch's compiler, which takes a second
    from pycuda_conv.nn.targets import Light, Operators

    started = time.perf_counter()
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    fixed = ["_dynamo_static_input_type" in node.meta.get("tensor_dict", {}) for node in placeholders]
    parameters = [
        weakref.ref(given) for given, is_fixed in zip(example_inputs, fixed, strict=False) if is_fixed and isinstance(given, torch.Tensor)
    ]
    lines = {place for node in gm.graph.nodes for place in _LINE.findall(node.meta.get("stack_trace") or "")}
    found = rewrite(gm, Light if light else Operators, precision, raises, upsample_filter, algorithm)
    parts: list[Any] = [[one for part in found for one in part[i]] for i in range(len(found[0]))]
    fused, alone, left, others = parts
    places = frozenset((file, int(n), name) for file, n, name in lines)
    made = CompiledGraph(mode, torch.is_grad_enabled(), fused, alone, left, others, parameters, places)
    _graphs.append(made)
    if log.isEnabledFor(logging.INFO):
        log.info("%s\n  rewritten in %.0f ms", made, (time.perf_counter() - started) * 1e3)
    return found


_LINE = re.compile(r'File "(.*)", line (\d+), in (\S+)')


def graphs_of(compiled: Any) -> list[CompiledGraph]:
    """The graphs made of a module, or of a function that was compiled, oldest first.

    A graph belongs to the module whose parameters it got. Torch runs one graph for all modules of a class where it can, so a module whose
    parameters none got has the graphs that its forward is in.
    """
    model = getattr(compiled, "_orig_mod", compiled)
    if isinstance(model, torch.nn.Module):
        tensors = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        own = [graph for graph in _graphs if any((t := ref()) is not None and id(t) in tensors for ref in graph._parameters)]
        return own or _graphs_in(_forward_of(model))
    code = getattr(getattr(compiled, "_torchdynamo_orig_callable", compiled), "__code__", None)
    if code is None:
        raise TypeError(f"model must be a torch.nn.Module or a compiled function, got {brief(compiled)}")
    return _graphs_in(code)


def _graphs_in(code: Any) -> list[CompiledGraph]:
    """The graphs that lines of this code are in; none for torch's code and this package's, which all models share."""
    if code is None or _is_torchs(code) or code.co_filename.startswith(os.path.dirname(__file__)):
        return []
    lines = {(code.co_filename, n, code.co_name) for _, _, n in code.co_lines() if n is not None}
    return [graph for graph in _graphs if not lines.isdisjoint(graph._lines)]


def _forward_of(model: torch.nn.Module) -> Any:
    """The code of a module's forward; None where it has none of Python's, as in TorchScript."""
    return getattr(inspect.getattr_static(type(model), "forward", None), "__code__", None)


def _is_torchs(code: Any) -> bool:
    return bool(code.co_filename.startswith(os.path.dirname(torch.__file__)))


def _marks(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, with the sizes of its tensors marked: torch compiles one graph for all of them."""

    def marked(tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor):
            if 3 <= tensor.dim() <= 5:
                for axis in (0, *range(2, tensor.dim())):
                    if tensor.shape[axis] != 1:
                        torch._dynamo.maybe_mark_dynamic(tensor, axis)
        elif isinstance(tensor, (list, tuple)):
            for one in tensor:
                marked(one)
        elif isinstance(tensor, dict):
            for one in tensor.values():
                marked(one)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            for one in args:
                marked(one)
            for one in kwargs.values():
                marked(one)
        return forward(*args, **kwargs)

    return call


def compile(
    model: Model, mode: str | None = None, *, precision: str = "fp32", options: dict[str, Any] | None = None, fullgraph: bool = False,
    sizes: str = "any", batch_invariant: bool = False,
) -> Model:
    """Compile a model with ``torch.compile``, its convolutions by this package, in place.

    It is ``model.compile(backend="pycuda_conv", ...)``, but also takes a bare ``nn.Sequential``, of which torch compiles nothing there. And
    it tells torch which axes of the inputs have sizes that change: one graph serves all numbers of images and all image sizes, and a second
    one serves single images.

    Parameters
    ----------
    model : torch.nn.Module
        Torch's own or converted; its class stays. Convolutions, transposed or not, are computed by this package, in one step with a batch
        normalisation, the sum with a residual and an activation where those follow. In training batch normalisations have this package's
        gradients.
    mode : {"default", "light", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"}, optional
        "light" runs all else as it is: nothing is compiled but kernels. The other modes are inductor's, torch's compiler for all else.
    precision : {"fp32", "tf32"}
        Arithmetic for float32: see :func:`pycuda_conv.conv2d`. Convolutions of a converted model have their own.
    options : dict, optional
        Options of inductor's, and ``"upsample_filter"``: ``"folded"`` lets convolutions behind an upsampling by whole factors in 16 bits
        read the image as it is, ``"exact"`` lets none. By default those whose filters are float32 do: see :func:`pycuda_conv.conv2d`.
    fullgraph : bool
        Whether a break of the graph is an error, as in ``torch.compile``.
    sizes : {"any", "fixed"}
        "fixed" compiles a graph for each size of the input, as ``torch.compile`` begins to do.
    batch_invariant : bool
        Compute each convolution, with what is fused to it, so that an image's result and its gradient by the input have the same bits
        whatever images stand beside it: see :func:`pycuda_conv.batch_invariant`. Batch normalisations in training are not fused then.

    Returns
    -------
    torch.nn.Module
        `model`. :func:`report` says, after the first call, what was fused, and what was not and why.

    Raises
    ------
    TypeError
        `model` is not a module; `options` is not a dict.
    ValueError
        A mode, a precision or `sizes` that there is not; options of inductor's in light mode.

    Examples
    --------
    >>> import torch, pycuda_conv.nn
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()).eval()
    >>> model = pycuda_conv.nn.compile(model, mode="light")
    >>> with torch.no_grad():
    ...     model(torch.zeros(1, 3, 8, 8)).shape
    torch.Size([1, 8, 6, 6])
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {brief(model)}")
    if sizes not in ("any", "fixed"):
        raise ConvArgumentError(f"sizes must be 'any' or 'fixed', but got sizes={brief(sizes)}")
    if options is not None and not isinstance(options, dict):
        raise TypeError(f"options must be a dict, got {brief(options)}")
    more = {"precision": precision, **({"batch_invariant": True} if checked_invariance(batch_invariant) else {})}
    chosen, *_ = checked_options(mode, {**(options or {}), **more})
    given: Any = {"backend": backend, "options": {**(options or {}), "mode": chosen, **more}, "fullgraph": fullgraph}
    compiled = torch.compile(_called(model), **given)
    model._compiled_call_impl = _marks(compiled) if sizes == "any" else compiled
    return model


def _called(model: torch.nn.Module) -> Callable[..., Any]:
    """What to compile: the model's call. Torch compiles no frame of its own files, as nn.Sequential's forward is, so it gets one of ours.

    It counts the graphs of each code object, so each such model gets a copy of the code.
    """
    forward = _forward_of(model)
    if forward is not None and not _is_torchs(forward):
        return model._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=f"call_of_{type(model).__name__}")
    return call
