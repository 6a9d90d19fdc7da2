"""What an engine is: a family of kernels that tells the registry what it can run, how long that should take, and its launches."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

from pycuda_conv.engines.costs import costs
from pycuda_conv.engines.schedule import Schedule
from pycuda_conv.engines.struct import kernel_struct
from pycuda_conv.engines.variants import FLAG, VariantSet, fixed
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import Device, KernelLaunch

#: What every engine needs stands here too.
__all__ = ["FLAG", "Config", "ConvProblem", "Device", "KernelLaunch", "Schedule", "VariantSet", "costs", "fixed", "kernel_struct"]

C = TypeVar("C", bound="Config")


class GoneError(ValueError):
    """A configuration is of kernels that this version lacks. Tables and pickles of other versions may name it."""


#: The classes of configurations by name.
CLASSES: dict[str, type[Config]] = {}


@dataclass(frozen=True)
class Config:
    """A kernel and its tile. Each engine's configurations are subclasses: frozen dataclasses, all of whose fields have defaults."""

    #: Whether images are packed before the product, unless they lie as it needs them.
    packs_images: ClassVar[bool] = False
    #: Devices that run it, if these are fewer than its engine's.
    RUNS_ON: ClassVar[Any] = None

    def __init_subclass__(cls) -> None:
        CLASSES[cls.__name__] = cls

    def __reduce__(self) -> tuple[Any, ...]:
        """By its name, as tables have it: the class may move to another module."""
        return config_again, (type(self).__name__, dict(vars(self)))

    @classmethod
    def from_table(cls: type[C], values: Mapping[str, Any]) -> C:
        """The configuration that a tuned table describes by its fields' names; a field that the table lacks has its default.

        Raises
        ------
        GoneError
            The table has a name that is no field.
        ValueError
            It has a value that a field does not take.
        """
        defaults = {field.name: field.default for field in fields(cls)}
        for name, value in values.items():
            if name not in defaults:
                raise GoneError(f"{cls.__name__} has no {name}")
            if type(value) is not type(defaults[name]) or (type(value) is int and value <= 0):
                raise ValueError(f"{cls.__name__} takes no {name}={value!r}")
        return cls(**values)

    @property
    def tile(self) -> int:
        """The results of a matrix product's tile, for which the text names registers: the more, the longer it takes to compile."""
        return math.prod(getattr(self, name, 1) for name in ("BLOCK_M", "BLOCK_N"))


@dataclass(frozen=True)
class Gone(Config):
    """What a pickled configuration becomes whose kernels this version lacks: a plan with it is planned anew."""

    name: str = ""


def config_again(name: str, values: Mapping[str, Any]) -> Config:
    """A configuration that was pickled, maybe by another version."""
    try:
        return CLASSES[name].from_table(values)
    except (KeyError, ValueError):
        return Gone(name)


#: The prediction of :meth:`Engine.choose` where a measured rule decides, whatever the models say.
BY_RULE = 0.0
#: Its prediction for a configuration without a model, which should run only if no configuration with a model can.
LAST_RESORT = math.inf


def fastest(timed: Iterable[tuple[float, C]]) -> tuple[float, C] | None:
    """The first of the pairs with the shortest time; None if there are none."""
    return min(timed, key=lambda pair: pair[0], default=None)


class Engine(Protocol):
    """A family of kernels. The modules that :data:`pycuda_conv.engines.registry.ENGINES` lists are such objects.

    All problems are as they are launched (:attr:`ConvProblem.launched`): forward convolutions and their transposes. What a module does
    not say itself, :func:`complete` says for it, as :data:`DEFAULTS` has it.
    """

    @property
    def CONFIGS(self) -> tuple[type[Config], ...]:
        """The classes of its configurations."""

    @property
    def LAYOUTS(self) -> tuple[str, ...]:
        """The layouts of problems that it may run, as they are launched; it is asked about no others."""

    @property
    def TENSOR_CORES(self) -> bool:
        """Whether its kernels multiply on tensor cores, and so are fast in either layout."""

    @property
    def PRECEDENCE(self) -> int:
        """Among equal predictions that of an engine of higher precedence counts; then the order of families and of names."""

    @property
    def MOST_VARIANTS(self) -> Mapping[str, int]:
        """By a device's backend, the most texts that :meth:`variants` may give, not counting those for arrays of 2^31 elements."""

    @property
    def IN_PARTS(self) -> bool:
        """Whether it has other engines compute some images at a time, of batches that are too large for them as a whole."""

    @property
    def BY_IMAGE(self) -> bool:
        """Whether its transforms are of one image each where :attr:`ConvProblem.batch_invariant` asks for that."""

    def unsupported(self, device: Device) -> str | None:
        """Why the engine can't run on `device`, or None if it can."""

    def refusal(self, problem: ConvProblem, config: Any) -> str | None:
        """Why `config` can't run `problem`, or None if it can."""

    def configs(self, problem: ConvProblem, device: Device) -> Iterable[Config]:
        """The configurations worth comparing for `problem` on `device`. It is asked about problems alone that its TAKES takes."""

    def time(self, problem: ConvProblem, config: Any, device: Device) -> float | None:
        """Microseconds that `config` should take; None where no model knows."""

    def choose(self, problem: ConvProblem, device: Device) -> tuple[float, Config] | None:
        """The configuration that should be fastest, behind the microseconds it should take; None if another engine's is faster.

        The microseconds may be :data:`BY_RULE` or :data:`LAST_RESORT`.
        """

    def schedule(self, problem: ConvProblem, config: Any, device: Device, with_moments: bool) -> Schedule:
        """The launches of `config`, which can run `problem`; with `with_moments` they compute the moments of the result, if they can.

        One of an engine that :meth:`adds_border` takes the `source` last whose image they read.
        """

    def sum_order(self, problem: ConvProblem, config: Any) -> Hashable:
        """Equal for configurations that add the same numbers in the same order, so that their results have the same bits."""

    def variants(self, device: Device) -> Iterable[VariantSet]:
        """All texts of its own kernels that problems of any kind may ask for on such a device."""

    def filter_key(self, problem: ConvProblem, config: Any) -> Hashable:
        """Equal for problems whose filter is packed alike, whatever their images; None where the filter is read as it is."""

    def adapts(self, problem: ConvProblem) -> bool:
        """Whether it may run a `problem` that is :attr:`ConvProblem.adapted`, by a border or integers."""

    def upsamples(self, problem: ConvProblem) -> bool:
        """The same of one that is :attr:`ConvProblem.upsampled`."""

    def adds_border(self, source: ConvProblem, problem: ConvProblem, config: Any) -> bool:
        """Whether the launches for the wider image of `problem` can read that of `source`, with its border: then `schedule` takes it."""

    def border_time(self, source: ConvProblem, config: Any) -> float:
        """Microseconds that such launches take beside those for the wider image."""

    def worthwhile(self, problem: ConvProblem, device: Device) -> bool:
        """Whether it is worth asking whether it can run on `device`, which may mean to import a library."""


# ---- what an engine need not say


def unsupported_by(declared: Any, device: Device) -> str | None:
    """What the declaration RUNS_ON of an engine or a configuration says; None without one: then it runs on every device."""
    runs_on = getattr(declared, "RUNS_ON", None)
    return None if runs_on is None else runs_on.why_not(device)


def _refusal(engine: Any, problem: ConvProblem, config: Any) -> str | None:
    """What its declaration LEGAL says, which includes TAKES; or that of the configuration's class."""
    legal = engine.LEGAL[type(config)] if isinstance(engine.LEGAL, dict) else engine.LEGAL
    reason: str | None = legal.refusal(problem, config)
    return reason


def _choose(engine: Any, problem: ConvProblem, device: Device) -> tuple[float, Config] | None:
    """The fastest of its configurations by its model."""
    timed = ((engine.time(problem, config, device), config) for config in engine.configs(problem, device))
    return fastest((us, config) for us, config in timed if us is not None)


def _configs(takes: Any, own: Any, problem: ConvProblem, device: Device) -> Iterator[Config]:
    """Those that the engine gives of a problem that it takes, and none of others."""
    if takes.why_not(problem) is None:
        yield from own(problem, device)


def _sum_order(engine: Any, problem: ConvProblem, config: Any) -> Hashable:
    """The fields of a configuration that its ORDER names; all of them without such a name."""
    names = getattr(engine, "ORDER", None)
    return config if names is None else (type(config), *(getattr(config, name) for name in names))


#: What :func:`complete` gives to a module: functions get the module before their arguments.
DEFAULTS: Mapping[str, Any] = {
    "TENSOR_CORES": False, "IN_PARTS": False, "BY_IMAGE": False, "PRECEDENCE": 0, "unsupported": unsupported_by,
    "refusal": _refusal, "choose": _choose, "sum_order": _sum_order, "filter_key": lambda engine, *asked: None,
    "adapts": lambda engine, *asked: False, "upsamples": lambda engine, *asked: False, "adds_border": lambda engine, *asked: False,
    "border_time": lambda engine, *asked: 0.0, "worthwhile": lambda engine, *asked: True, "variants": lambda engine, device: (),
    "MOST_VARIANTS": {},
}  # fmt: skip


def complete(module: Any) -> Engine:
    """A module as an engine: it gets what it does not say itself, docstrings too; one around others has an AROUND that says most of it."""
    around = getattr(module, "AROUND", None)
    for name in ("configs", "time", "choose", "sum_order", "filter_key") if around else ():
        if not hasattr(module, name):
            setattr(module, name, getattr(around, name))
    if hasattr(module, "TAKES"):
        module.configs = partial(_configs, module.TAKES, module.configs)
    for name, default in DEFAULTS.items():
        if not hasattr(module, name):
            setattr(module, name, partial(default, module) if callable(default) else default)
    for name, said in vars(Engine).items():
        function = vars(module).get(name)
        if callable(function) and not function.__doc__:
            function.__doc__ = said.__doc__
    made: Engine = module
    return made
