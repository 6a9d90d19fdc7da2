"""What the tests ask of each engine, as data: a file an engine, with one object, CASES. tests/test_cases.py has a body for each field.

An engine's file is called as its module; where two families have modules of one name, as the family and the module. A run is a case, a
mode (a word of tests/modes.py: type, precision, layout) and a configuration. A case is a convolution (reference.Case) or a gradient by the
filter (filters.Filter).
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pycuda_conv.engines import registry

Run = tuple[Any, str, Any]


@dataclass(frozen=True)
class Broken:
    """Lines of kernels, what stands there instead, and maybe what the machine says of it.

    On `run`, each must be noticed by one of the orders in which threads run.
    """

    run: Run
    lines: Sequence[tuple[str, ...]]
    seeds: Sequence[int] = (1, 2)
    multiprocessors: int = 3
    arrays: Callable[..., Sequence[Any]] = lambda case, dtype: case.integers(dtype)


@dataclass(frozen=True)
class Layers:
    """Random layers: of each family so many, in these directions, types, precisions and layouts. At least so many have candidates.

    What is chosen takes no longer than the fastest candidate times `slack`.
    """

    families: Sequence[str]
    kinds: Sequence[tuple[str, tuple[str, str, str]]]
    each: int = 6
    least: int = 10
    architectures: Sequence[str] = ("sm_90a",)
    slack: float = 1.001


@dataclass(frozen=True, kw_only=True)
class Cases:
    """The data of an engine."""

    #: Its module.
    engine: Any
    #: Runs without a GPU, on the simulated machine: exact for integers, within the bound for random data, filters kept and with their
    #: channels last.
    runs: Sequence[Run] = ()
    #: Runs on every device of the machine, of kernels that are OpenCL's, too; some of them as users run them, optimised; some with offsets
    #: of 64 bits, which arrays of 2^31 elements need.
    portable: Sequence[Run] = ()
    optimised: Sequence[Run] = ()
    wide: Sequence[Run] = ()
    #: Runs on a GPU.
    gpu: Sequence[Run] = ()
    #: Values of the texts' defines, but for STAGES, that no run without a GPU has.
    unseen: Sequence[tuple[str, int]] = ()
    #: Runs of blocks with many tiles and of blocks with one.
    grids: Sequence[Run] = ()
    #: Runs with bias, scale and residual; then with these activations. Those of portable engines run on every device, the others on the
    #: simulated machine and on a GPU.
    finished: Sequence[tuple[Any, str, Any, Sequence[Any]]] = ()
    #: Runs that note moments of their results, for a batch norm.
    noted: Sequence[Run] = ()
    #: Runs, and arguments of their kernel that must be noticed where one is larger by one.
    arguments: Sequence[tuple[Run, str]] = ()
    #: Runs with infinities and NaNs; on a GPU these, or others.
    not_finite: Sequence[Run] = ()
    not_finite_gpu: Sequence[Run] | None = None
    #: Runs with numbers of these ranges (ranges.SCENARIOS); on a GPU with all but those left out.
    ranged: Sequence[tuple[Any, str, Any, Sequence[str]]] = ()
    ranged_gpu: Sequence[tuple[Any, str, Any, Sequence[str]]] | None = None
    #: Runs of float32 gradients whose sums are honest ones of float32, of the smallest normal numbers and the largest too.
    precise: Sequence[Run] = ()
    precise_gpu: Sequence[Run] = ()
    #: Configurations whose results have the same bits where `sum_order` is the same: a case, a mode, and how many orders there are.
    orders: Sequence[tuple[Any, str, Sequence[Any], int]] = ()
    #: Lines that are broken.
    broken: Sequence[Broken] = ()
    #: (case, mode, configuration, reason) or (problem, configuration, reason): why it can't.
    refused: Sequence[tuple] = ()
    #: (capability, backend) of devices that run the first run, and of such that don't.
    devices: dict[tuple[tuple[int, int], str], bool] = field(default_factory=dict)
    #: (case, mode, whether) or (problem, whether): whether the planner chooses the engine on an H200.
    chosen: Sequence[tuple] = ()
    layers: Layers | None = None
    #: The kernel whose arguments are one struct, or one for each phase.
    kernel: str = ""
    #: (problem, configuration) or (problem, configuration, with_moments): whose texts nvcc compiles, for these architectures, and how many
    #: bytes they may spill.
    compiled: Sequence[tuple] = ()
    architectures: Sequence[str | None] = (None,)
    spills: int = 0
    spills_sm80: int | None = None

    @property
    def name(self) -> str:
        return name_of(self.engine)

    def __str__(self) -> str:
        return self.name


def name_of(engine: Any) -> str:
    """How the file of an engine's cases is called."""
    *_, family, stem = engine.__name__.split(".")
    return stem if STEMS[stem] == 1 else f"{family}_{stem}"


STEMS = Counter(engine.__name__.split(".")[-1] for engine in registry.ENGINES)


def every() -> Iterator[Cases]:
    """The cases of every engine of the registry that has some."""
    for engine in registry.ENGINES:
        if found := of(engine):
            yield found


def of(engine: Any) -> Cases | None:
    """An engine's cases; None where it has no file."""
    name = f"cases.{name_of(engine)}"
    try:
        return importlib.import_module(name).CASES
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None
