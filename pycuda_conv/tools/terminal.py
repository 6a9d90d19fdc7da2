"""Output of the tools to a terminal: one line for what is missing, tables, progress."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from pycuda_conv.runtime import Device, get_device

LONG_TEXT = 14  # longer texts fold where the terminal is narrow

T = TypeVar("T")

#: Exit statuses.
OK, FAILED, UNUSABLE = 0, 1, 2

LEAST_WIDTH = 126
PIPED_WIDTH = 170  # columns where the output is no terminal


class ToolError(Exception):
    """A wrong argument, or something missing; the message is the one line that the user sees."""


#: What pip installs for a module, where that has another name.
INSTALLED_BY = {"PIL": "pillow", "dask": "'dask[array]'"}


def require(module: str) -> Any:
    """Import a module that only some commands need, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        how = f"pip install {INSTALLED_BY.get(name, name)}"
        raise ToolError(f"{name} is needed for this and can't be imported ({error}); install it with: {how}") from error


def json_text(value: Any) -> str:
    """`value` as JSON. Numbers that are not finite, which JSON lacks, become null."""

    def clean(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: clean(inner) for key, inner in part.items()}
        if isinstance(part, (list, tuple)):
            return [clean(inner) for inner in part]
        return None if isinstance(part, float) and not math.isfinite(part) else part

    return json.dumps(clean(value), indent=2)


def named_device(device: Any) -> Device:
    """The device named on the command line."""
    try:
        return get_device(device)
    except (ValueError, TypeError) as error:
        raise ToolError(str(error)) from error


def console(stderr: bool = False) -> Any:
    """A rich console. It is wide when its output goes to a file, and never so narrow that a table loses columns."""
    stream = sys.stderr if stderr else sys.stdout
    # NO_COLOR does not stop rich from bold text
    made = require("rich.console").Console(file=stream, highlight=False, color_system=None if os.environ.get("NO_COLOR") else "auto")
    if not stderr:
        known = stream.isatty() or "COLUMNS" in os.environ
        made.width = max(made.width, LEAST_WIDTH) if known else PIPED_WIDTH
    return made


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[str] = (), styles: Sequence[str] = ()
) -> Any:
    """A rich table of text. Columns named in `left` are aligned left; `styles` gives each row's style."""
    made = require("rich.table").Table(title=title, title_justify="left", box=require("rich.box").SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        longest = max((len(row[i]) for row in rows), default=0)
        folds = column in left and longest > LONG_TEXT  # numbers never fold
        side = "left" if column in left else "right"
        made.add_column(column, justify=side, overflow="fold", no_wrap=not folds, min_width=LONG_TEXT if folds else None)
    escape = require("rich.markup").escape
    for i, row in enumerate(rows):
        made.add_row(*[escape(cell) for cell in row], style=styles[i] if styles else "")
    return made


def track(items: Sequence[T], describe: Callable[[T], str]) -> Iterator[T]:
    """Yield `items` behind a progress bar on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    progress = require("rich.progress")
    columns = (progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeElapsedColumn(), progress.TextColumn("{task.description}"))
    with progress.Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=len(items))
        for item in items:
            bar.update(task, description=require("rich.markup").escape(describe(item)))
            yield item
            bar.advance(task)
