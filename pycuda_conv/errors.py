"""The exceptions that users may want to catch, and how their messages show a value."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import Any


class ConvArgumentError(ValueError, RuntimeError):
    """A refused argument. Both a ``ValueError``, as numpy users expect, and a ``RuntimeError``, as torch raises."""


class VariableError(ConvArgumentError):
    """A variable of the environment has a value that it can't have."""


class BackendError(RuntimeError):
    """A device or its software is missing; the text says what and how to get it."""


class DeviceMemoryError(MemoryError):
    """The device has too little memory; the text says how much was asked and how much is free."""


def no_memory(name: str) -> str:
    """The message about an array that has elements but no memory."""
    return f"{name} has no memory: its address is 0; was its storage freed or resized?"


class _Brief(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxother = self.maxstring = self.maxlong = 80

    def repr_instance(self, x: Any, level: int) -> str:
        shape = getattr(x, "shape", None)
        if isinstance(shape, tuple) and shape:
            return f"an array of shape {list(shape)}"
        return " ".join(super().repr_instance(x, level).split())


#: A value as a message shows it: on one line, long ones cut short, an array by its shape.
brief = _Brief().repr


def did_you_mean(word: Any, known: Iterable[Any]) -> str:
    """The end of a message that refuses `word`: the most similar of the `known` words, or nothing if none is similar."""
    from difflib import get_close_matches  # takes 3 ms to import

    words = [one for one in known if isinstance(one, str)]
    near = get_close_matches(word.lower(), words, 1) if isinstance(word, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""
