"""What the benchmark says: its rows, their means, tables, JSON, CSV and Markdown. Needs no GPU and no torch."""

from __future__ import annotations

import csv
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pycuda_conv.tools.terminal import ToolError, json_text, table

#: The lines between which the README's results stand.
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


@dataclass(frozen=True)
class Row:
    """One problem, measured.

    Attributes
    ----------
    problem, kernel, config : str
    flops, bytes : int
        Of the problem; bytes are those that must move at the least.
    groups : int
    error, torch_error : float
        norm(out - ref) / norm(ref), ref in float64.
    of_bound : float
        Our largest elementwise error as a part of what rounding explains.
    images : int
        How many images of the batch the errors are taken over.
    ours_us, torch_us : float or None
        Medians. None where there is no time to tell: see `verdict`.
    ours_spread, torch_spread : float or None
        (third quartile - first quartile) / median.
    timing : str
        "graph", "events" (launch by launch) or "wall".
    verdict : str
        "ok", "WRONG", or why the row was not measured.
    """

    problem: str
    kernel: str
    config: str
    flops: int
    bytes: int
    groups: int
    error: float | None = None
    torch_error: float | None = None
    of_bound: float | None = None
    images: int = 0
    ours_us: float | None = None
    torch_us: float | None = None
    ours_spread: float | None = None
    torch_spread: float | None = None
    timing: str = ""
    verdict: str = "ok"

    @property
    def tflops(self) -> float | None:
        """TFLOP/s of ours."""
        return self.flops / self.ours_us / 1e6 if self.ours_us else None

    @property
    def torch_tflops(self) -> float | None:
        """TFLOP/s of torch."""
        return self.flops / self.torch_us / 1e6 if self.torch_us else None

    @property
    def ratio(self) -> float | None:
        """torch's time over ours: above 1, ours is faster."""
        return self.torch_us / self.ours_us if self.ours_us and self.torch_us else None

    def record(self) -> dict[str, Any]:
        """All columns as raw numbers."""
        return asdict(self) | {"tflops": self.tflops, "torch_tflops": self.torch_tflops, "ratio": self.ratio}


def median(values: Iterable[float]) -> float:
    """The middle value."""
    return quantile(values, 0.5)


def quantile(values: Iterable[float], q: float) -> float:
    """The value below which the part `q` of `values` lies, interpolated."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def spread(values: Sequence[float]) -> float:
    """(third quartile - first quartile) / median."""
    return (quantile(values, 0.75) - quantile(values, 0.25)) / median(values)


def geometric_mean(values: Iterable[float]) -> float | None:
    """The geometric mean, or None of nothing."""
    logarithms = [math.log(v) for v in values]
    return math.exp(math.fsum(logarithms) / len(logarithms)) if logarithms else None


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Geometric means of the ratio over groups of rows, and the slowest large dense row."""
    timed = [row for row in rows if row.ratio is not None]
    large = [row for row in timed if row.flops > 5e9]
    dense = [row for row in timed if row.groups == 1 and row.flops > 1e9]
    large_dense = [row for row in large if row.groups == 1]

    def mean(some: Sequence[Row]) -> dict[str, Any]:
        return {"geometric_mean": geometric_mean(row.ratio for row in some if row.ratio is not None), "rows": len(some)}

    slowest = min(large_dense, key=lambda row: row.tflops or 0, default=None)
    return {
        "ratio_above_5_gflop": mean(large), "ratio_dense_above_1_gflop": mean(dense), "ratio_all": mean(timed),
        "lowest_tflops_dense_above_5_gflop": slowest and slowest.tflops, "lowest_tflops_problem": slowest and slowest.problem,
        "faster_rows": sum((row.ratio or 0) > 1 for row in timed), "timed_rows": len(timed), "rows": len(rows),
        "wrong_rows": sum(row.verdict == "WRONG" for row in rows),
    }


# ---- text


def number(value: float | None, form: str) -> str:
    """`value` in a format, or a dash for None."""
    return "-" if value is None else format(value, form)


def microseconds(value: float | None) -> str:
    """A time in us with three digits that mean something."""
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 10000 else f"{value:.0f}"


COLUMNS = ("problem", "kernel", "ours us", "TFLOP/s", "torch us", "TFLOP/s", "ratio", "error", "torch's", "timing", "verdict")
SPARE = (5, 9)  # torch's TFLOP/s and the timing


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table as text."""
    return (
        row.problem, row.kernel, microseconds(row.ours_us), number(row.tflops, ".3g"), microseconds(row.torch_us),
        number(row.torch_tflops, ".3g"), number(row.ratio, ".2f"), number(row.error, ".1e"), number(row.torch_error, ".1e"), row.timing,
        row.verdict,
    )


def style(row: Row) -> str:
    """Red for what is wrong or was not measured, green where ours is faster."""
    return "bold red" if row.verdict != "ok" else "green" if (row.ratio or 0) >= 1 else ""


def row_table(rows: Sequence[Row], rival: str, width: int = 200) -> Any:
    """The suite's table; without two columns that tell little more where the terminal is narrow."""
    title = f"Ours against {rival}; ratio = torch's time / ours, above 1 ours is faster; errors against float64"
    words = ("problem", "kernel", "timing", "verdict")
    shown = [i for i in range(len(COLUMNS)) if width >= 150 or i not in SPARE]
    lines = [[cells(row)[i] for i in shown] for row in rows]
    return table(title, [COLUMNS[i] for i in shown], lines, left=words, styles=[style(row) for row in rows])


def summary_lines(found: dict[str, Any]) -> list[str]:
    """The means as lines of text."""
    lines = []
    for key, words in (
        ("ratio_above_5_gflop", "rows above 5 GFLOP"), ("ratio_dense_above_1_gflop", "dense rows above 1 GFLOP"), ("ratio_all", "all rows"),
    ):
        mean = found[key]
        if mean["geometric_mean"] is not None:
            lines.append(f"geometric mean of the ratio over {words} ({mean['rows']}): {mean['geometric_mean']:.2f}")
    lowest = found["lowest_tflops_dense_above_5_gflop"]
    if lowest is not None:
        lines.append(f"lowest TFLOP/s of dense rows above 5 GFLOP: {lowest:.1f} ({found['lowest_tflops_problem']})")
    lines.append(f"ours is faster in {found['faster_rows']} of {found['timed_rows']} timed rows; {found['wrong_rows']} wrong")
    return lines


def header_lines(machine: dict[str, Any]) -> list[str]:
    """What was measured where, as lines of text."""
    return [f"{name:14} {value}" for name, value in machine.items() if value is not None and not isinstance(value, dict)]


# ---- Markdown


def _markdown_table(columns: Sequence[str], left: int, rows: Sequence[Sequence[str]]) -> str:
    """A table whose first `left` columns are words and whose others are numbers."""
    sides = ["---"] * left + ["---:"] * (len(columns) - left)
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, sides, *rows))


def _time(text: str, verdict: str) -> str:
    """A time, or in its place why there is none."""
    return text if verdict == "ok" else f"**{verdict}**"


def markdown(
    machine: dict[str, Any], rows: Sequence[Row], means: dict[str, Any], loops: Sequence[dict[str, Any]], calls: Sequence[dict[str, Any]]
) -> str:
    """The results for the README. `machine` is the header of the report; what was not measured is left out."""
    where = str(machine.get("GPU") or machine.get("CPU")).split(",")[0] + (f", driver {machine['driver']}" if machine.get("driver") else "")
    parts = [
        f"{where}; torch {machine['torch']}; {machine['precision']}; {machine['date'][:10]}. "
        f"`{machine['command']}` repeats the measurement: {machine['method']}."
    ]
    if rows:
        parts.append("\n".join(f"- {line}" for line in summary_lines(means)))
        parts.append("Times in microseconds; ratio = torch's time / ours, above 1 ours is faster; errors are norm-wise, against float64.")
        columns = ["problem", "kernel", "ours us", "TFLOP/s", "torch us", "ratio", "error", "torch's error"]
        lines = []
        for row in rows:
            problem, kernel, ours, speed, torch, _, ratio, error, torch_error, *_ = cells(row)
            lines.append((problem, kernel, _time(ours, row.verdict), speed, torch, ratio, error, torch_error))
        parts.append(_markdown_table(columns, 2, lines))
    if loops:
        parts.append("A Python loop over images and channels, one single-channel convolution each, against one call:")
        columns = ["problem", "calls", "loop us", "one call us", "ratio"]
        parts.append(_markdown_table(columns, 1, [
            (
                r["problem"], str(r["calls"]), microseconds(r["loop_us"]), _time(microseconds(r["single_us"]), r["verdict"]),
                number(r["ratio"], ".0f"),
            )
            for r in loops
        ]))
    if calls:
        parts.append(f"What one call costs on the host, for {calls[0]['problem']} in torch tensors:")
        parts.append(_markdown_table(("call", "us"), 1, [(f"`{c['call']}`", f"{c['us']:.1f}") for c in calls]))
    return "\n\n".join(parts)


def around_results(path: Path) -> tuple[str, str]:
    """What stands before and after the results in a file, the lines that mark them included.

    Raises
    ------
    ToolError
        The file can't be read, or does not have both lines once and in order.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ToolError(f"{path} can't be read: {error}") from error
    bare = [line.rstrip() for line in lines]
    if bare.count(BEGIN) != 1 or bare.count(END) != 1 or bare.index(BEGIN) > bare.index(END):
        raise ToolError(f"{path} needs the line {BEGIN} once and after it the line {END} once; the results go between them")
    return "".join(lines[: bare.index(BEGIN) + 1]), "".join(lines[bare.index(END) :])


def write_between(path: Path, text: str) -> None:
    """Replace what stands between the lines ``BEGIN`` and ``END``; a reader sees the old file or the new one, whole."""
    before, after = around_results(path)
    real = path.resolve()  # behind a link, the file is replaced and not the link
    handle, temporary = tempfile.mkstemp(dir=real.parent, prefix=".results-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(f"{before}{text.strip()}\n{after}")
        shutil.copymode(real, temporary)
        os.replace(temporary, real)
    except BaseException:
        os.unlink(temporary)
        raise


# ---- files


def write_json(path: Path, report: dict[str, Any]) -> None:
    """The whole report."""
    path.write_text(json_text(report) + "\n")


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """The suite's rows, raw numbers."""
    names = [f.name for f in fields(Row)] + ["tflops", "torch_tflops", "ratio"]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(row.record() for row in rows)
