"""The variants of kernels, a closed list of texts: the values of every define, and which of them go together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from pycuda_conv.problem import DTYPE_CODES
from pycuda_conv.runtime.base import KernelLaunch, source_of

FLAG = (0, 1)
Defines = Mapping[str, int]


def fixed(tile: Any, *but: str) -> dict[str, tuple[int, ...]]:
    """The defines of a tile, a dataclass or a mapping, as choices of one value each, `but` for some names."""
    values = tile if isinstance(tile, Mapping) else vars(tile)
    return {name: (value,) for name, value in values.items() if name not in but}


def portable(dtype: str, big: bool, threads: int) -> dict[str, int]:
    """The defines of every kernel in the portable dialect. With `big` it counts in 64 bits."""
    return {"DTYPE": DTYPE_CODES[dtype], "INDEX_64": int(big), "THREADS": threads}


def portable_choices(*threads: int) -> dict[str, tuple[int, ...]]:
    """All of their values."""
    return {"DTYPE": tuple(DTYPE_CODES.values()), "INDEX_64": FLAG, "THREADS": threads}


@dataclass(frozen=True)
class VariantSet:
    """Variants of one kernel file: its text with some values of its defines."""

    file: str  # in ``cu/``, without ``.cu``
    choices: Mapping[str, tuple[int, ...]]  # the values of every define
    goes: Callable[[Defines], bool] = lambda defines: True  # whether a choice of values is ever launched
    arch: str = ""  # the target, if it is not the GPU's plain one

    def __iter__(self) -> Iterator[dict[str, int]]:
        for values in product(*self.choices.values()):
            defines = dict(zip(self.choices, values, strict=True))
            if self.goes(defines):
                yield defines

    def __contains__(self, launch: object) -> bool:
        if not isinstance(launch, KernelLaunch) or (launch.file or launch.kernel, launch.arch) != (self.file, self.arch):
            return False
        defines = launch.defines
        known = defines.keys() == self.choices.keys() and all(value in self.choices[name] for name, value in defines.items())
        return known and self.goes(defines)

    def sources(self) -> Iterator[str]:
        """The texts themselves."""
        return (source_of(self.file, defines) for defines in self)
