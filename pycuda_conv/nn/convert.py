"""Puts this package's convolutions into an existing model.

A converted module changes its class and nothing else: it stays the same object, with its parameters, hooks and names. Five kinds of classes
are made:

- a convolution becomes one of :mod:`pycuda_conv.nn`; a subclass that computes what its base does becomes a subclass of both;
- a subclass of a convolution that computes something of its own gets a forward that runs its own inside :class:`routed`;
- with `fuse`, ``nn.MaxPool2d`` writes its maxima alone in evaluation, and with `fuse_training` it keeps less for its gradient: see
  :mod:`pycuda_conv.nn.pooling`;
- with `linear`, ``nn.Linear`` is a 1x1 convolution: see :mod:`pycuda_conv.nn.linear`;
- a module whose convolutions can be fused with the steps after them gets a forward that does so: see :mod:`pycuda_conv.nn.chains`. It runs
  in evaluation without gradients and, if asked for, in training; not in ``torch.compile``. Otherwise the author's forward runs, so a
  converted model is trained and evaluated as before.
"""

from __future__ import annotations

import copyreg
import functools
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from pycuda_conv.errors import brief
from pycuda_conv.nn import modules
from pycuda_conv.nn.chains import KEPT, Fusion, Traces, is_worth_tracing
from pycuda_conv.nn.classes import is_convolution, origin
from pycuda_conv.nn.fused import _FusedConvBnReLU
from pycuda_conv.nn.linear import linear as linear_of
from pycuda_conv.nn.modules import checked_precision, marked
from pycuda_conv.nn.pooling import evaluated, pooled
from pycuda_conv.nn.routing import routed
from pycuda_conv.typing import Precision

_OURS: dict[type, type] = {
    getattr(torch.nn, name): getattr(modules, name)
    for name in ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
}
Model = TypeVar("Model", bound=torch.nn.Module)


@dataclass(frozen=True)
class Converted:
    """One convolution of the model: its `name` there, its class before, and the names of the steps fused with it.

    `by_its_own_forward` is True for a subclass that computes something of its own, inside :class:`routed`.
    """

    name: str
    was: str
    fused: tuple[str, ...] = ()
    by_its_own_forward: bool = False

    def __str__(self) -> str:
        text = " + ".join((f"{self.name or 'the model'} ({self.was})", *self.fused))
        return f"{text}, by its own forward" if self.by_its_own_forward else text


@dataclass
class Conversion:
    """Report of :func:`convert`: the convolutions, and why something was left as it was. Its ``str()`` is meant to be read."""

    converted: list[Converted] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        count, fused = len(self.converted), sum(bool(one.fused) for one in self.converted)
        lines = [f"{count} convolution{'' if count == 1 else 's'} converted, {fused} of them fused with what follows"]
        return "\n".join(lines + [f"  {one}" for one in self.converted] + [f"  note: {note}" for note in self.notes])


def report(model: torch.nn.Module) -> Conversion:
    """The report of what :func:`convert` did to a model, to be printed.

    Raises
    ------
    TypeError
        `model` is not a module.
    ValueError
        `model` was not converted.

    Examples
    --------
    >>> import torch, pycuda_conv.nn
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
    >>> print(pycuda_conv.nn.report(pycuda_conv.nn.convert(model)))
    1 convolution converted, 1 of them fused with what follows
      0 (Conv2d) + 1 + 2
    """
    _check_module(model)
    done = model.__dict__.get("_conversion")
    if done is None:
        raise ValueError(f"model, a {type(model).__name__}, was not converted: call convert(model) first")
    assert isinstance(done, Conversion)
    return done


def _check_module(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {brief(model)}")


def convert(
    model: Model, precision: Precision = "fp32", fuse: bool = True, fuse_training: bool = False, *, linear: bool = False
) -> Model:
    """Let this package compute a model's convolutions, in place.

    Parameters
    ----------
    model : torch.nn.Module
        Its ``nn.Conv*`` and ``nn.ConvTranspose*`` modules become those of :mod:`pycuda_conv.nn`. So do their subclasses that override
        nothing that computes. Subclasses with a forward of their own keep it, and the convolutions in it are computed by this package:
        see :class:`routed`. Parameters, buffers and state dict are what they were.
    precision : {"fp32", "tf32"}
        Arithmetic for float32: see :func:`pycuda_conv.conv2d`.
    fuse : bool
        Compute convolution and, where they follow, batch normalisation, the sum with a residual and an activation in one step wherever
        the model is evaluated without gradients: after ``model.eval()``, inside ``torch.no_grad()`` or ``torch.inference_mode()``.
        The activations are those of :func:`pycuda_conv.conv2d`, as torch's modules or functions; one of them or a batch normalisation
        is enough. Batch normalisations that apply an activation themselves are fused too. So are a batch normalisation that follows no
        convolution and its activation, as DenseNet has them; and max pooling writes no places of maxima. Chains are found by tracing
        the forward of each module, here and once. A module that cannot be traced is left with a note, and its convolutions are still
        converted one by one. What changes parameters and statistics later is noticed, but for ``tensor.data`` and for replays of a CUDA
        graph: convert again after those. A module whose children or attributes change later runs its own forward until it is converted
        again.
    fuse_training : bool
        Compute convolution, batch normalisation, the sum with a residual and the activation in one step in training too, as
        :class:`FusedConvBnReLU2d` and the like do: in less time and memory, but without second derivatives. After a residual the
        activation is a ReLU; others are torch's there. Modules with hooks are called as before. ``nn.MaxPool2d`` keeps a byte for each
        maximum then.
    linear : bool
        Compute ``nn.Linear`` of float32 arrays as 1x1 convolutions too, with its gradients, where they are large enough. Torch multiplies
        float32 on plain cores, this package on tensor cores with errors as small. Where torch was told to round to TF32
        (``torch.set_float32_matmul_precision``), in autocast and in ``torch.compile``, layers are torch's as before, and so are subclasses.
        With `fuse` a layer and what follows it are one step in evaluation, of 16-bit types and in TF32 too: an activation; or the sum with
        a residual, before it a factor for each channel where channels are moved to the second axis, as in the blocks of ConvNeXt.

    Returns
    -------
    torch.nn.Module
        `model`. :func:`report` tells what was done to it.

    Raises
    ------
    TypeError
        `model` is not a module.
    ValueError
        `fuse_training` without `fuse`; a precision that there is not.

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
    if fuse_training and not fuse:
        raise ValueError(f"fuse_training={fuse_training} needs fuse=True, but got fuse={fuse}")
    found: dict[torch.nn.Module, Converted] = {}
    done = Conversion()
    ours = [module for module in model.modules() if isinstance(module, _FusedConvBnReLU)]  # these compute everything themselves
    for layer in ours:
        layer.precision = precision
    owned = {part for layer in ours for part in layer.modules()}
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and module not in owned:
            done.notes.append(f"{name or 'the model'} ({_full_name(type(module))}) was left as it is: TorchScript computes it")
            owned.update(module.modules())
    rest = [(name, module) for name, module in model.named_modules() if module not in owned]
    for name, module in rest:
        module.__class__ = origin(type(module))
        for kept in KEPT:
            module.__dict__.pop(kept, None)
        if isinstance(module, tuple(_OURS)):
            try:
                found[module] = _convert_convolution(name, module, precision)
            except TypeError as error:
                done.notes.append(f"{name or 'the model'} ({_full_name(type(module))}) was left as it is: {error}")
        elif fuse and type(module) is torch.nn.MaxPool2d:
            _change_class(module, "pooled" if fuse_training else "maxima")
        elif linear and type(module) is torch.nn.Linear:
            _change_class(module, "linear")
    if fuse:
        traces = Traces()
        for name, module in rest:
            if is_worth_tracing(module):
                _fuse(name, module, found, done.notes, fuse_training, traces)
    done.converted.extend(found.values())
    model.__dict__["_conversion"] = done
    return model


def _convert_convolution(name: str, module: torch.nn.Module, precision: str) -> Converted:
    """Let this package compute a convolution; a TypeError if it cannot."""
    if isinstance(module, LazyModuleMixin):
        raise TypeError("its parameters have no sizes yet; call the model once, then convert it")
    was: Any = type(module)
    own = not is_convolution(was) and not is_convolution(_converted_class(was, "ours"))
    _change_class(module, "routed" if own else "ours")
    module.__dict__["precision"] = precision
    return Converted(name, was.__name__, by_its_own_forward=own)


def _fuse(
    name: str, module: torch.nn.Module, found: dict[torch.nn.Module, Converted], notes: list[str], in_training: bool, traces: Traces
) -> None:
    """Give `module` a fused forward if its own has chains to fuse; add a note if the search failed."""
    if not is_worth_tracing(module, in_sequences=False):
        notes = []  # the sequences are looked at by themselves
    who = f"nothing in {name or 'the model'} ({type(module).__name__}) is fused"
    try:
        if "forward" in module.__dict__:
            raise TypeError("its forward was replaced")
        fusion = Fusion(module, in_training, traces)
    except TypeError as error:
        notes.append(f"{who}: {error}")
        return
    for training, problem in fusion.problems.items():
        notes.append(f"{who}{' in training' if training else ''}, because its forward can't be traced: {problem}")
    if not fusion.variants:
        return
    _change_class(module, "fused")
    module.__dict__["_fusion"] = fusion
    for variant in fusion.variants.values():
        for target, *followers in variant.chains:
            convolution, beside = module.get_submodule(target), target.rpartition(".")[0] + "."
            if len(followers) > len(found[convolution].fused):
                found[convolution] = replace(found[convolution], fused=tuple(name.removeprefix(beside) for name in followers))


# ---- classes

_remembered: Any = functools.lru_cache(maxsize=1024)


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
            with routed(self.precision):
                return cls.forward(self, *args, **kwargs)

        return forward


class _Maxima(_Changed):
    """A pooling that writes its maxima alone in evaluation."""

    _trained = False

    @classmethod
    def forward_of(mixin, cls: Any) -> Any:
        @functools.wraps(cls.forward)
        def forward(self: Any, input: Any) -> Any:
            if torch.compiler.is_compiling():
                return cls.forward(self, input)
            if torch.is_grad_enabled():
                made = pooled(self, input) if mixin._trained else None
                return cls.forward(self, input) if made is None else made
            windows = self.kernel_size, self.stride, self.padding, self.dilation
            return evaluated(input, *windows, self.ceil_mode, self.return_indices)

        return forward


class _Pooled(_Maxima):
    """A pooling that keeps less in training too."""

    _trained = True


class _Linear(_Changed):
    """A linear layer computed as a 1x1 convolution."""

    @staticmethod
    def forward_of(cls: Any) -> Any:
        @functools.wraps(cls.forward)
        def forward(self: Any, input: Any) -> Any:
            return linear_of(input, self.weight, self.bias)

        return forward


class _Fused(_Changed):
    """A module whose convolutions are fused with the steps after them."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        fusion = self.__dict__.get("_fusion")
        if fusion is not None and "variants" not in fusion.__dict__:  # it comes from a file
            self.__dict__["_fusion"] = Fusion(self, fusion.in_training, Traces())

    @staticmethod
    def forward_of(cls: Any) -> Any:
        @functools.wraps(cls.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                fusion = self.__dict__.get("_fusion")
                chosen = None if fusion is None else fusion.chosen(self, args, kwargs)
                if chosen is not None:
                    function, arrays = chosen
                    return function(*arrays)
                if fusion is not None:
                    fusion.trained = True  # parts of it may be
            return cls.forward(self, *args, **kwargs)

        return forward


@_remembered
def _converted_class(cls: Any, kind: str) -> Any:
    """The class that modules of class `cls` get: "ours", "routed", "maxima", "pooled", "linear" or "fused"."""
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
        mixin: Any = {"routed": _Routed, "fused": _Fused, "maxima": _Maxima, "pooled": _Pooled, "linear": _Linear}[kind]
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
