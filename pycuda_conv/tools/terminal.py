"""Output of the tools to a terminal: one line for what is missing, tables, progress."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pycuda_conv.runtime import Device, get_device

T = TypeVar("T")

#: Exit statuses.
OK, FAILED, UNUSABLE = 0, 1, 2
#: Verdicts that all is well.
GOOD = ("ok", "pass", "stays")

UNLIMITED = 10_000  # columns where the output is no terminal: a line of a file is a line, however long


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
    """A rich console as wide as the terminal, or as ``COLUMNS`` says; without limit where the output goes to a file."""
    stream = sys.stderr if stderr else sys.stdout
    # NO_COLOR does not stop rich from bold text
    made = require("rich.console").Console(file=stream, highlight=False, color_system=None if os.environ.get("NO_COLOR") else "auto")
    if not (stream.isatty() or "COLUMNS" in os.environ):
        made.width = UNLIMITED
    return made


@dataclass(frozen=True)
class Table:
    """A table of text that fits where it is printed. Every cell stands on one line, unless the line would be longer than the terminal.

    Where all columns don't fit, the spare ones go; where that is not enough, each row becomes a record of several lines.

    Attributes
    ----------
    title : str
    columns : sequence of str
    rows : sequence of sequence of str
    left : sequence of str
        The columns that are aligned left; the others hold numbers.
    styles : sequence of str
        The style of each row, or nothing. Cells of the column "verdict" are green or red by themselves.
    spare : sequence of str
        The columns that say least, the least important first.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[str] = ()
    styles: Sequence[str] = ()
    spare: Sequence[str] = ()

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """What rich prints: the title, the rows, an empty line."""
        text = require("rich.text").Text
        yield text(self.title, style="italic")
        without = [frozenset(self.spare[:count]) for count in range(len(self.spare) + 1)]
        tables = (self._table([i for i, column in enumerate(self.columns) if column not in those]) for those in without)
        room = options.update(max_width=UNLIMITED)
        fitting = next((one for one in tables if console.measure(one, options=room).maximum <= options.max_width), None)
        if fitting is not None:
            yield fitting
        elif len(self.columns) == 2:
            yield from self._pairs(options.max_width)
        else:
            yield from self._records(options.max_width)
        yield ""

    def _style(self, row: int) -> str:
        return self.styles[row] if self.styles else ""

    def _cell(self, column: int, value: str) -> Any:
        verdict = self.columns[column] == "verdict" and value
        return require("rich.text").Text(value, style="" if not verdict else "green" if value.partition(":")[0] in GOOD else "bold red")

    def _table(self, shown: Sequence[int]) -> Any:
        made = require("rich.table").Table(box=require("rich.box").SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for i in shown:
            made.add_column(self.columns[i], justify="left" if self.columns[i] in self.left else "right", no_wrap=True)
        for number, row in enumerate(self.rows):
            made.add_row(*[self._cell(i, row[i]) for i in shown], style=self._style(number))
        return made

    def _pairs(self, width: int) -> Iterator[Any]:
        """Rows of a name and a value. A value that is too long stands below its name."""
        cell_len, text = require("rich.cells").cell_len, require("rich.text").Text
        side = max(cell_len(name) for name, _ in self.rows) + 2
        for number, (name, value) in enumerate(self.rows):
            style = self._style(number)
            if side + cell_len(value) <= width:
                yield text(name + " " * (side - cell_len(name)) + value, style=style)
            else:
                yield text(name, style=style)
                yield from _folded([value], width, style)

    def _records(self, width: int) -> Iterator[Any]:
        """Rows of a line with the first column and the verdict, and of lines with the names and values of the others."""
        text = require("rich.text").Text
        verdict = self.columns.index("verdict") if "verdict" in self.columns else None
        for number, row in enumerate(self.rows):
            style = self._style(number)
            first = text(row[0], style=f"bold {style}".strip())
            if verdict:
                first += text("  ") + self._cell(verdict, row[verdict])
            if first.cell_len <= width:
                yield first
            else:
                yield from _folded([row[0], *([row[verdict]] if verdict else [])], width, style, indent=0)
            others = [f"{self.columns[i]} {value}" for i, value in enumerate(row) if i not in (0, verdict) and value not in ("", "-")]
            yield from _folded(others, width, style)


def _folded(items: Sequence[str], width: int, style: str, indent: int = 2) -> Iterator[Any]:
    """Lines of `items`, as many on each as fit. An item that is longer than a line is cut, at a space where there is one."""
    cell_len, text, room = require("rich.cells").cell_len, require("rich.text").Text, max(width - indent, 1)
    lines: list[str] = []
    for item in items:
        if lines and cell_len(lines[-1]) + 3 + cell_len(item) <= room:
            lines[-1] += " | " + item
        elif cell_len(item) <= room:
            lines.append(item)
        else:
            lines += textwrap.wrap(item, room, break_on_hyphens=False)
    for line in lines:
        yield text(" " * indent + line, style=style, no_wrap=True)


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[str] = (), styles: Sequence[str] = (),
    spare: Sequence[str] = (),
) -> Table:
    """A :class:`Table`, for rich's ``print``."""
    return Table(title, columns, rows, left, styles, spare)


def print_pairs(pairs: Iterable[tuple[str, str]], side: int) -> None:
    """Print lines of a text of about `side` characters and of more about it, which stands below where both don't fit."""
    width = console().width
    for text, more in pairs:
        line = f"{text:{side}} {more}"
        print(line if len(line) <= width else f"{text}\n  {more.strip()}")


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
