"""Caches of what may get out of date: plans, and launches that were put together from plans.

The tuner's measurements change which plan is the best, and a plan that gets better kernels changes its launches. The modules that learn of
it call :func:`forget_plans` or :func:`forget_launches`, and need not know which functions remember what.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

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


def remember_launches(function: Callable[..., T]) -> _lru_cache_wrapper[T]:
    """Remember what `function` returns, which holds launches of plans, by its arguments."""
    remembering = lru_cache(maxsize=MOST)(function)
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
