"""Puts this package's convolutions into an existing model, and torch's back.

A converted module changes its class and nothing else: it stays the same object, with its parameters, hooks and names. Four kinds of
classes are made:

- a convolution becomes one of :mod:`pycuda_conv.nn`; a subclass that computes what its base does becomes a subclass of both;
- a convolution that computes something of its own gets a forward that runs its own inside :class:`routed`;
- with `linear`, ``nn.Linear`` is a 1x1 convolution: see :mod:`pycuda_conv.nn.linear`;
- with `norms`, group, layer and RMS norms are those of :mod:`pycuda_conv.nn.normalise`.

Steps are fused by ``torch.compile``: see :mod:`pycuda_conv.nn.compiler`.
"""

from __future__ import annotations

import copyreg
import functools
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from pycuda_conv.errors import ConvArgumentError, brief
from pycuda_conv.invariance import WORD as BATCH_INVARIANT
from pycuda_conv.invariance import batch_invariant as invariant_block
from pycuda_conv.invariance import checked_invariance
from pycuda_conv.nn import modules, norm_modules
from pycuda_conv.nn.compiler import CompiledGraph, graphs_of
from pycuda_conv.nn.fused.modules import _FusedConvBnReLU
from pycuda_conv.nn.linear import linear as linear_of
from pycuda_conv.nn.modules import checked_precision, in_pairs, marked
from pycuda_conv.nn.routing import routed
from pycuda_conv.typing import Precision

_OURS: dict[type, type] = {
    getattr(torch.nn, name): getattr(modules, name)
    for name in ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
}
_TORCHS = {ours: torchs for torchs, ours in _OURS.items()}
#: The methods that decide what a convolution computes.
_METHODS = "forward", "__call__", "_conv_forward", "_output_padding"
Model = TypeVar("Model", bound=torch.nn.Module)


@dataclass(frozen=True)
class Converted:
    """One convolution of the model: its `name` there, and its class before.

    `by_its_own_forward` is True for one that computes something of its own, inside :class:`routed`.
    """

    name: str
    was: str
    by_its_own_forward: bool = False

    def __str__(self) -> str:
        text = f"{self.name or 'the model'} ({self.was})"
        return f"{text}, by its own forward" if self.by_its_own_forward else text


@dataclass
class Conversion:
    """What :func:`convert` and ``torch.compile`` did to a model; see :func:`report`. Its ``str()`` is meant to be read.

    Attributes
    ----------
    converted : list of Converted
    notes : list of str
        Why modules were left as they were.
    graphs : list of CompiledGraph
        The graphs that ``torch.compile`` made of the model, if its backend was this package's.
    """

    converted: list[Converted] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    graphs: list[CompiledGraph] = field(default_factory=list)

    def __str__(self) -> str:
        lines = []
        if self.converted or self.notes or not self.graphs:
            count = len(self.converted)
            lines = [f"{count} convolution{'' if count == 1 else 's'} converted", *(f"  {one}" for one in self.converted)]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes] + [str(graph) for graph in self.graphs])


def report(model: Any) -> Conversion:
    """What :func:`convert` did to a model, and what was fused in graphs that ``torch.compile`` made of it; to be printed.

    Parameters
    ----------
    model : torch.nn.Module or compiled function
        Converted, or compiled with the backend "pycuda_conv" and called once at least.

    Raises
    ------
    TypeError
        `model` is neither.
    ValueError
        `model` was not converted, and no graph was made of it.

    Examples
    --------
    >>> import torch, pycuda_conv.nn
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()).eval()
    >>> print(pycuda_conv.nn.report(pycuda_conv.nn.convert(model)))
    1 convolution converted
      0 (Conv2d)
    """
    graphs = graphs_of(model)
    done = getattr(model, "_orig_mod", model).__dict__.get("_conversion")
    if done is None and not graphs:
        raise ValueError(
            f"model, a {type(model).__name__}, was not converted, and no graph was made of it: call convert(model), or compile the model "
            'with backend="pycuda_conv" and call it first'
        )
    done = Conversion() if done is None else done
    return Conversion(done.converted, done.notes, graphs)


def _check_module(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {brief(model)}")


def convert(
    model: Model, precision: Precision = "fp32", fuse: bool | None = None, fuse_training: bool | None = None, *, linear: bool = False,
    batch_invariant: bool = False, norms: bool = False,
) -> Model:
    """Let this package compute a model's convolutions, in place.

    Only classes change, so the model is trained, copied, saved, hooked and parametrized as before. :func:`revert` undoes it.

    Parameters
    ----------
    model : torch.nn.Module
        Its ``nn.Conv*`` and ``nn.ConvTranspose*`` modules become those of :mod:`pycuda_conv.nn`. So do their subclasses that override
        nothing that computes. Subclasses with a forward of their own keep it, and the convolutions in it are computed by this package:
        see :class:`routed`. Parameters, buffers and state dict are what they were.
    precision : {"fp32", "tf32"}
        Arithmetic for float32: see :func:`pycuda_conv.conv2d`.
    fuse, fuse_training : bool, optional
        They do nothing any more and will go. What they did, ``torch.compile`` does: see :func:`pycuda_conv.nn.compile`.
    linear : bool
        Compute ``nn.Linear`` of float32 arrays as 1x1 convolutions too, with its gradients, where they are large enough. Torch multiplies
        float32 on plain cores, this package on tensor cores with errors as small. Where torch was told to round to TF32
        (``torch.set_float32_matmul_precision``), in autocast and in ``torch.compile``, layers are torch's as before, and so are subclasses.
    batch_invariant : bool
        Compute each convolution so that an image's result, and its gradient by the input, have the same bits whatever images stand beside
        it: see :func:`pycuda_conv.batch_invariant`. Fused layers do so in evaluation. The model's other layers are torch's, and promise
        what torch's do.
    norms : bool
        Compute ``nn.GroupNorm``, ``nn.LayerNorm`` and ``nn.RMSNorm`` too. A group norm's result lies as its input then: torch's is in C
        order, whatever it gets. In ``torch.compile`` they are torch's, for its compiler or this package's backend to take; so are
        subclasses.

    Returns
    -------
    torch.nn.Module
        `model`. :func:`report` tells what was done to it.

    Raises
    ------
    TypeError
        `model` is not a module.
    ValueError
        A precision that there is not; or `batch_invariant` with `linear`, whose bits depend on the batch.

    Warns
    -----
    DeprecationWarning
        `fuse` or `fuse_training` was given.

    Examples
    --------
    >>> import torch, pycuda_conv.nn
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
    >>> model = pycuda_conv.nn.convert(model)
    >>> with torch.no_grad():
    ...     model.eval()(torch.zeros(1, 3, 8, 8)).shape
    torch.Size([1, 8, 6, 6])
    """
    _check_module(model)
    checked_precision(precision)
    for name, given in (("fuse", fuse), ("fuse_training", fuse_training)):
        if given is not None:
            warnings.warn(
                f'convert: {name}= does nothing any more and will go; torch.compile fuses: model.compile(backend="pycuda_conv"), or '
                'with mode="light" without a compiler',
                DeprecationWarning,
                stacklevel=2,
            )
    if checked_invariance(batch_invariant) and linear:
        raise ConvArgumentError("batch_invariant=True is for convolutions alone, but got linear=True, whose bits depend on the batch")
    done = Conversion()
    ours = [module for module in model.modules() if isinstance(module, _FusedConvBnReLU)]  # these compute everything themselves
    for layer in ours:
        layer.precision = precision
        _set_invariance(layer.conv, batch_invariant)
    owned = {part for layer in ours for part in layer.modules()}
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and module not in owned:
            done.notes.append(f"{name or 'the model'} ({_full_name(type(module))}) was left as it is: TorchScript computes it")
            owned.update(module.modules())
    for name, module in model.named_modules():
        if module in owned:
            continue
        _give_back(module)
        if isinstance(module, tuple(_OURS)):
            try:
                done.converted.append(_convert_convolution(name, module, precision, batch_invariant))
            except TypeError as error:
                done.notes.append(f"{name or 'the model'} ({_full_name(type(module))}) was left as it is: {error}")
        elif linear and type(module) is torch.nn.Linear:
            _change_class(module, "linear")
        elif norms and type(module) in _NORMS:
            _change_class(module, "normed")
    model.__dict__["_conversion"] = done
    return model


def revert(model: Model) -> Model:
    """Give a converted model torch's classes back, in place, and its call back to torch.

    Export to ONNX, TorchScript, eager quantization and files of whole models want torch's own classes. The modules of
    :mod:`pycuda_conv.nn` become torch's too; ``FusedConvBnReLU2d`` and the like stay, as torch has no such layers. A model that was
    compiled in place is called without ``torch.compile`` afterwards.

    Parameters
    ----------
    model : torch.nn.Module

    Returns
    -------
    torch.nn.Module
        `model`.

    Raises
    ------
    TypeError
        `model` is not a module.
    ValueError
        A convolution pads by pairs or upsamples, which torch's can't. Nothing is changed then.

    Examples
    --------
    >>> import torch, pycuda_conv.nn
    >>> model = pycuda_conv.nn.convert(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3)))
    >>> type(pycuda_conv.nn.revert(model)[0]) is torch.nn.Conv2d
    True
    """
    _check_module(model)
    for name, module in model.named_modules():
        padding: Any = getattr(module, "padding", 0)
        if isinstance(module, tuple(_TORCHS)) and in_pairs(padding):
            raise ConvArgumentError(
                f"{name or 'the model'} has padding={brief(padding)}, and torch's convolutions pad both sides alike"
            )
        times: Any = getattr(module, "upsample", ())
        if isinstance(module, tuple(_TORCHS)) and any(n != 1 for n in times):
            raise ConvArgumentError(f"{name or 'the model'} has upsample={times}, and torch's convolutions upsample nothing")
    for module in model.modules():
        _give_back(module)
        if type(module) in _TORCHS:
            module.__class__ = _TORCHS[type(module)]
            _forget_options(module)
        module.__dict__.pop("_compiled_call_impl", None)
    model.__dict__.pop("_conversion", None)
    return model


def _give_back(module: torch.nn.Module) -> None:
    """Give a module the class that it had before it was converted."""
    cls: Any = type(module)
    if "_origin" in cls.__dict__:
        module.__class__ = cls.__dict__["_origin"]
        _forget_options(module)


def _forget_options(module: torch.nn.Module) -> None:
    for name in ("precision", "algorithm", "upsample", "upsample_filter"):
        module.__dict__.pop(name, None)


def _convert_convolution(name: str, module: torch.nn.Module, precision: str, batch_invariant: bool) -> Converted:
    """Let this package compute a convolution; a TypeError if it cannot."""
    if isinstance(module, LazyModuleMixin):
        raise TypeError("its parameters have no sizes yet; call the model once, then convert it")
    was: Any = type(module)
    replaced = "_conv_forward" in module.__dict__ and "forward" not in module.__dict__
    own = replaced or (not _is_ours(was) and not _is_ours(_converted_class(was, "ours")))
    if own or was not in _TORCHS:
        _change_class(module, "routed" if own else "ours")
    module.__dict__["precision"] = precision
    _set_invariance(module, batch_invariant)
    return Converted(name, was.__name__, by_its_own_forward=own)


def _set_invariance(module: torch.nn.Module, batch_invariant: bool) -> None:
    if batch_invariant:
        module.__dict__["algorithm"] = BATCH_INVARIANT
    elif module.__dict__.get("algorithm") == BATCH_INVARIANT:
        module.__dict__.pop("algorithm")


# ---- classes

_remembered: Any = functools.lru_cache(maxsize=1024)


@_remembered
def _is_ours(cls: type) -> bool:
    """True if modules of this class are convolutions computed by this package: none of their methods is somebody else's."""
    return any(
        issubclass(cls, base) and all(getattr(cls, name, None) is getattr(base, name, None) for name in _METHODS) for base in _TORCHS
    )


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


class _Changed:
    """The base of all classes made here: their modules are pickled as ones of the class they were made from."""

    _kind: str
    _origin: type

    def extra_repr(self) -> str:
        return marked(super().extra_repr())  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        parts: Any = super().__reduce_ex__(max(int(protocol), 2))
        function, arguments, *rest = parts
        if function is copyreg.__newobj__ and arguments[0] is type(self):  # type: ignore[attr-defined]
            return _new, (self._kind, self._origin, *arguments[1:]), *rest
        return function, arguments, *rest


def _new(kind: str, cls: type, *arguments: Any) -> Any:
    made = _converted_class(cls, kind)
    return made.__new__(made, *arguments)


class _Routed(_Changed):
    """A convolution with a forward of its own."""

    precision: Precision

    @staticmethod
    def forward_of(cls: Any) -> Any:
        @functools.wraps(cls.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            block = invariant_block() if self.__dict__.get("algorithm") == BATCH_INVARIANT else nullcontext()
            with routed(self.precision), block:
                return cls.forward(self, *args, **kwargs)

        return forward


_LINEAR = torch.nn.Linear.forward


class _Linear(_Changed):
    """A linear layer computed as a 1x1 convolution."""

    @staticmethod
    def forward_of(cls: Any) -> Any:
        @functools.wraps(cls.forward)
        def forward(self: Any, input: Any) -> Any:
            if torch.compiler.is_compiling() or cls.forward is not _LINEAR:  # or somebody replaced it
                return cls.forward(self, input)
            return linear_of(input, self.weight, self.bias)

        return forward


_NORMS: dict[type, Any] = {getattr(torch.nn, name): getattr(norm_modules, name) for name in ("GroupNorm", "LayerNorm", "RMSNorm")}
_GENUINE: dict[Any, Any] = {cls: vars(cls)["forward"] for cls in _NORMS}


class _Normed(_Changed):
    """A norm that this package computes."""

    activation = None

    @staticmethod
    def forward_of(cls: Any) -> Any:
        ours, genuine = _NORMS[cls].forward, _GENUINE[cls]

        @functools.wraps(cls.forward)
        def forward(self: Any, input: Any) -> Any:
            if torch.compiler.is_compiling() or cls.forward is not genuine:  # or somebody replaced it
                return cls.forward(self, input)
            return ours(self, input)

        return forward


@_remembered
def _converted_class(cls: Any, kind: str) -> Any:
    """The class that modules of class `cls` get: "ours", "routed", "linear" or "normed"."""
    bases: tuple[type, ...]
    members: dict[str, Any]
    if kind == "ours":
        ours = next(ours for base, ours in _OURS.items() if issubclass(cls, base))
        if issubclass(cls, ours):
            return cls
        if cls in _OURS:
            return ours
        bases, members = (_Changed, cls, ours), {}
    else:
        mixin: Any = {"routed": _Routed, "linear": _Linear, "normed": _Normed}[kind]
        bases, members = (mixin, cls), {"forward": mixin.forward_of(cls)}
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, bases, {**members, **names, "_kind": kind, "_origin": cls})


def _change_class(module: torch.nn.Module, kind: str) -> None:
    """Give a module the class of that kind."""
    cls: Any = type(module)
    metaclass: Any = type(cls)
    if parametrize.is_parametrized(module):  # torch made the class for this module alone, and removes it by its first base
        members = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
        module.__class__ = metaclass(cls.__name__, (_converted_class(cls.__bases__[0], kind),), {**members, "_origin": cls})
    else:
        module.__class__ = _converted_class(cls, kind)
