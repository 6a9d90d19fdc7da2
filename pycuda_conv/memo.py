"""Caches of what may get out of date: plans, and launches that were put together from plans.

The tuner's measurements change which plan is the best, and a plan that gets better kernels changes its launches. The modules that learn of
it call :func:`forget_plans` or :func:`forget_launches`, and need not know which functions remember what.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper

T = TypeVar("T")

#: The most results that a function remembers. A plan holds a few kilobytes; compiled kernels belong to the device, and plans share them.
MOST = 1024

_plans: list[Callable[[], None]] = []
_launches: list[Callable[[], None]] = []


def remember_plans(function: Callable[..., T]) -> _lru_cache_wrapper[T]:
    """Remember the plans that `function` returns, by its arguments."""
    remembering = lru_cache(maxsize=MOST)(function)
    _plans.append(remembering.cache_clear)
    return remembering


class Remembering(Generic[T]):
    """A function that remembers what it returned, by its arguments; single results can be forgotten."""

    def __init__(self, function: Callable[..., T]) -> None:
        self._function, self._made = function, dict[tuple[Any, ...], T]()

    def __call__(self, *args: Any) -> T:
        found = self._made.get(args)
        if found is None:
            found = self._function(*args)
            if len(self._made) >= MOST:
                self._made.clear()
            self._made[args] = found
        return found

    def forget(self, *args: Any) -> None:
        """Forget what was returned for these arguments."""
        self._made.pop(args, None)

    def cache_clear(self) -> None:
        """Forget everything."""
        self._made.clear()


def remember_launches(function: Callable[..., T]) -> Remembering[T]:
    """Remember what `function` returns, which holds launches of plans, by its arguments."""
    remembering = Remembering(function)
    _launches.append(remembering.cache_clear)
    return remembering


def launches_are_in(clear: Callable[[], None]) -> None:
    """Call `clear` when launches are to be forgotten."""
    _launches.append(clear)


def forget_plans() -> None:
    """Forget all plans, and their launches: the best configuration may be another one by now."""
    for clear in _plans:
        clear()
    forget_launches()


def forget_launches() -> None:
    """Forget launches of plans, but not the plans: one of them has better kernels by now."""
    for clear in _launches:
        clear()
