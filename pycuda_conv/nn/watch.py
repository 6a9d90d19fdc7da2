"""Conditions that a decision about modules depends on, and whether they still hold.

A decision looks at classes, attributes, hooks and tensors of several modules, and every call asks for it again. Each thing that it looked
at becomes a condition in a row; :data:`holds` tests all rows, in C where the launcher is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from pycuda_conv import quick

#: Rows of (objects, their classes and attributes), (entries of dicts), (keys that dicts lack), (sizes of dicts), and (tensors, their
#: addresses and versions).
Conditions = tuple[tuple[Any, ...], ...]

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(name for name in vars(nn.modules.module) if name.startswith(("_global_forward_", "_global_backward_")))


class Watch:
    """Conditions, each of which holds when it is added."""

    def __init__(self) -> None:
        self._rows: tuple[list[Any], ...] = [], [], [], [], []

    def conditions(self) -> Conditions:
        """All conditions."""
        return tuple(map(tuple, self._rows))

    def module(self, module: nn.Module) -> dict[str, Any]:
        """The module keeps its class, its attributes stay the dict that is returned, and its forward stays that of its class."""
        attributes = module.__dict__
        self._rows[0].extend((module, type(module), attributes))
        self._rows[2].extend((attributes, "forward"))
        return attributes

    def entries(self, of: dict[str, Any], *names: str) -> None:
        """These keys keep their values; missing ones stay missing."""
        for name in names:
            if name in of:
                self._rows[1].extend((of, name, of[name]))
            else:
                self._rows[2].extend((of, name))

    def size(self, of: dict[Any, Any]) -> None:
        """The dict keeps its number of keys."""
        self._rows[3].extend((of, len(of)))

    def unhooked(self, attributes: dict[str, Any], *names: str) -> None:
        """A module gets no hooks of these kinds; it has none now."""
        for name in names:
            self.entries(attributes, name)
            self.size(attributes[name])

    def globally_unhooked(self) -> None:
        """No hooks of all modules together are set."""
        self.unhooked(vars(nn.modules.module), *_GLOBAL_HOOKS)

    def tensor(self, tensor: Any) -> None:
        """The tensor keeps its memory and, as far as torch counts changes, its numbers."""
        self._rows[4].extend((tensor, tensor.data_ptr(), tensor._version))


def _holds(conditions: Conditions) -> bool:
    objects, entries, absent, sizes, tensors = conditions
    return (
        all(type(o) is cls and o.__dict__ is own for o, cls, own in zip(*[iter(objects)] * 3, strict=True))
        and all(of.get(name) is value for of, name, value in zip(*[iter(entries)] * 3, strict=True))
        and all(name not in of for of, name in zip(*[iter(absent)] * 2, strict=True))
        and all(len(of) == n for of, n in zip(*[iter(sizes)] * 2, strict=True))
        and all(t.data_ptr() == at and t._version == version for t, at, version in zip(*[iter(tensors)] * 3, strict=True))
    )


#: Whether all conditions hold.
holds: Callable[[Conditions], bool] = _holds if quick.holds is None else quick.holds


class Kept:
    """A result made of two objects, and the conditions for it. It belongs to these two objects: copies of them don't get it."""

    def __init__(self, first: Any, second: Any, conditions: Conditions, made: Any) -> None:
        self.first, self.second, self.conditions, self.made = first, second, conditions, made

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> None:
    return None
