"""The benchmark's results as rows, means, tables, JSON, CSV and Markdown. Needs no GPU and no torch."""

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

from pycuda_conv.tools.suite import mode_words
from pycuda_conv.tools.terminal import Table, ToolError, json_text, table

#: The pages of a checkout with results: one with all of them, one with a few rows.
RESULTS_PAGE, FRONT_PAGE = "docs/results.md", "README.md"
#: The parts of the results that the front page has too, in short.
FRONT_PARTS = "drawn", "kernelbench", "models", "images"

#: Columns of a record that are computed from the others.
COMPUTED = ("tflops", "kept_tflops", "torch_tflops", "ratio", "kept_ratio", "of_floor", "kept_of_floor")
LARGE = 1e9  # FLOP of a large row
CORE = "core"  # the kind of the layers whose dense means are reported
ERROR_MARGIN = 1.01  # errors closer to each other than this factor count as equal


@dataclass(frozen=True)
class Row:
    """The measurement of one problem in one mode.

    Attributes
    ----------
    problem, kernel, config, mode : str
    flops, bytes : int
        Of the problem; bytes are the fewest that must move.
    groups : int
    floor_pack_us, floor_compute_us, floor_traffic_us, floor_us : float or None
        The least times on this GPU: see :class:`pycuda_conv.tools.floors.Floor`.
    error, torch_error : float
        norm(out - ref) / norm(ref), ref in float64.
    of_bound : float
        Our largest elementwise error divided by the error that rounding explains.
    channels : int
        The number of channels of the result over which the errors are taken.
    ours_us, kept_us, torch_us : float or None
        Medians of three ways: ours with the filter packed in the call, ours with the filter kept, and torch. None where there is no time:
        see `verdict`.
    ours_spread, kept_spread, torch_spread : float or None
        (third quartile - first quartile) / median.
    timing : str
        "graph", "events" (launch by launch) or "wall".
    verdict : str
        "ok", "WRONG", or the reason why the row was not measured.
    kind : str
        The layer's kind: one of :data:`pycuda_conv.tools.suite.KINDS`.
    """

    problem: str
    kernel: str
    config: str
    flops: int
    bytes: int
    groups: int
    mode: str = "fp32"
    floor_pack_us: float | None = None
    floor_compute_us: float | None = None
    floor_traffic_us: float | None = None
    floor_us: float | None = None
    error: float | None = None
    torch_error: float | None = None
    of_bound: float | None = None
    channels: int = 0
    ours_us: float | None = None
    kept_us: float | None = None
    torch_us: float | None = None
    ours_spread: float | None = None
    kept_spread: float | None = None
    torch_spread: float | None = None
    timing: str = ""
    verdict: str = "ok"
    kind: str = CORE

    def _tflops(self, us: float | None) -> float | None:
        return self.flops / us / 1e6 if us else None

    @property
    def tflops(self) -> float | None:
        """TFLOP/s of ours."""
        return self._tflops(self.ours_us)

    @property
    def kept_tflops(self) -> float | None:
        """TFLOP/s of ours with the filter kept."""
        return self._tflops(self.kept_us)

    @property
    def torch_tflops(self) -> float | None:
        """TFLOP/s of torch."""
        return self._tflops(self.torch_us)

    @property
    def ratio(self) -> float | None:
        """torch's time divided by ours: above 1, ours is faster."""
        return self.torch_us / self.ours_us if self.ours_us and self.torch_us else None

    @property
    def kept_ratio(self) -> float | None:
        """torch's time divided by ours with the filter kept."""
        return self.torch_us / self.kept_us if self.kept_us and self.torch_us else None

    @property
    def of_floor(self) -> float | None:
        """The floor divided by our time: 1 is as fast as possible."""
        return self.floor_us / self.ours_us if self.ours_us and self.floor_us else None

    @property
    def kept_of_floor(self) -> float | None:
        """The floor divided by our time with the filter kept."""
        return self.floor_us / self.kept_us if self.kept_us and self.floor_us else None

    @property
    def less_exact(self) -> bool:
        """Whether our error is above torch's, by more than ERROR_MARGIN."""
        return self.error is not None and self.torch_error is not None and self.error > ERROR_MARGIN * self.torch_error

    def record(self) -> dict[str, Any]:
        """All columns as raw numbers."""
        return asdict(self) | {name: getattr(self, name) for name in COMPUTED}


def median(values: Iterable[float]) -> float:
    """The middle value."""
    return quantile(values, 0.5)


def quantile(values: Iterable[float], q: float) -> float:
    """The value below which a share `q` of `values` lies, interpolated."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def spread(values: Sequence[float]) -> float:
    """(third quartile - first quartile) / median."""
    return (quantile(values, 0.75) - quantile(values, 0.25)) / median(values)


def geometric_mean(values: Iterable[float]) -> float | None:
    """The geometric mean; None if there are no values."""
    logarithms = [math.log(v) for v in values]
    return math.exp(math.fsum(logarithms) / len(logarithms)) if logarithms else None


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """For each mode, the means of the large dense rows of the core, of the rows of each kind, and of all rows."""
    found: dict[str, Any] = {}
    for mode in dict.fromkeys(row.mode for row in rows):
        own = [row for row in rows if row.mode == mode]
        dense = [row for row in own if row.kind == CORE and row.groups == 1 and row.flops > LARGE]
        kinds = {kind: _together([row for row in own if row.kind == kind]) for kind in dict.fromkeys(row.kind for row in own)}
        counts = {"rows": len(own), "wrong_rows": sum(row.verdict == "WRONG" for row in own)}
        found[mode] = {"dense": _together(dense), "kinds": kinds, "all": _together(own)} | counts
    return found


def _together(rows: Sequence[Row]) -> dict[str, Any]:
    timed = [row for row in rows if row.ratio is not None]
    return {
        "rows": len(timed), "packed": _ratios([(row.ratio, row.of_floor, row.problem) for row in timed]),
        "kept": _ratios([(row.kept_ratio, row.kept_of_floor, row.problem) for row in timed]),
        "less_exact": [row.problem for row in timed if row.less_exact],
    }


def _ratios(found: Sequence[tuple[float | None, float | None, str]]) -> dict[str, Any]:
    known = [(ratio, problem) for ratio, _, problem in found if ratio is not None]
    lowest, problem = min(known, default=(None, None))
    return {
        "geometric_mean": geometric_mean(ratio for ratio, _ in known), "lowest": lowest, "lowest_problem": problem,
        "below_one": [problem for ratio, problem in known if ratio < 1],
        "of_floor": geometric_mean(part for _, part, _ in found if part is not None),
    }


# ---- text


def number(value: float | None, form: str) -> str:
    """`value` in a format, or a dash for None."""
    return "-" if value is None else format(value, form)


def microseconds(value: float | None) -> str:
    """A time in us with three significant digits."""
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 10000 else f"{value:.0f}"


COLUMNS = (
    "problem", "kernel", "ours us", "kept us", "torch us", "ratio", "kept", "TFLOP/s", "bound us", "of it", "error", "torch's", "timing",
    "verdict",
)
SPARE = ("timing", "bound us")

#: Explanations of the columns.
NOTES = (
    "ours: the call packs the filter; kept: the filter was packed before, as plan.bind does; ratio: torch's time divided by ours; "
    "TFLOP/s are of the call that packs",
    "lower bound: the least time of the call that packs on this GPU, packing of the images included: bytes to pack / memory's rate + the "
    "longer of FLOP / arithmetic's rate and bytes / memory's rate, by rates that were measured on it",
    "error: norm(result - float64) / norm(float64), over all pixels; above 20 GFLOP, over 64 channels of the result chosen at random",
)


def notes(rows: Sequence[Row]) -> list[str]:
    """The explanations of the columns that `rows` have values for."""
    return [note for note in NOTES if note != NOTES[1] or any(row.floor_us is not None for row in rows)]


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table as text."""
    return (
        row.problem, row.kernel, microseconds(row.ours_us), microseconds(row.kept_us), microseconds(row.torch_us), number(row.ratio, ".2f"),
        number(row.kept_ratio, ".2f"), number(row.tflops, ".3g"), microseconds(row.floor_us), number(row.of_floor, ".0%"),
        number(row.error, ".1e"), number(row.torch_error, ".1e"), row.timing, row.verdict,
    )


def style(row: Row) -> str:
    """Red for a row that is wrong or was not measured, green where ours is faster."""
    return "bold red" if row.verdict != "ok" else "green" if (row.ratio or 0) >= 1 else ""


def row_table(rows: Sequence[Row], title: str) -> Table:
    """The suite's table. Columns that no row has a value for are left out."""
    lines = [cells(row) for row in rows]
    shown = [i for i in range(len(COLUMNS)) if any(line[i] not in ("", "-") for line in lines)]
    columns, lines = [COLUMNS[i] for i in shown], [tuple(line[i] for i in shown) for line in lines]
    left, styles = ("problem", "kernel", "timing", "verdict"), [style(row) for row in rows]
    return table(title, columns, lines, left=left, styles=styles, spare=SPARE)


def summary_lines(found: dict[str, Any]) -> list[str]:
    """The summary as lines of text; a line that belongs to the one before is indented."""
    lines = []
    for mode, means in found.items():
        dense, every = means["dense"], means["all"]
        if dense["rows"]:
            lines += _part_lines(f"{mode}, {dense['rows']} dense rows above 1 GFLOP", dense, _together([]))
        if every["rows"]:
            lines += _part_lines(f"{mode}, {every['rows']} rows in all", every, dense)
        if len(means["kinds"]) > 1:
            lines.append("  by kind: " + ", ".join(
                f"{kind} {number(part['packed']['geometric_mean'], '.2f')} (lowest {number(part['packed']['lowest'], '.2f')})"
                for kind, part in means["kinds"].items() if part["rows"]
            ))  # fmt: skip
        lines.append(f"{mode}: {every['rows']} of {means['rows']} rows timed; {means['wrong_rows']} wrong")
    return lines


def _part_lines(words: str, part: dict[str, Any], known: dict[str, Any]) -> list[str]:
    """The lines of `part`; problems that `known` has named are not named again."""
    ours, kept = part["packed"], part["kept"]

    def named(problems: Sequence[str], before: Sequence[str]) -> str:
        new = "; ".join(problem for problem in problems if problem not in before)
        return f"{len(problems)}" + (f" ({'besides: ' if before else ''}{new})" if new else "")

    def lowest(way: dict[str, Any]) -> str:
        return f"{number(way['lowest'], '.2f')} ({way['lowest_problem']})"

    floor = "" if ours["of_floor"] is None else (
        f"; the lower bound is {number(ours['of_floor'], '.0%')} of our time, with the filter kept {number(kept['of_floor'], '.0%')}"
    )
    return [
        f"{words}: geometric mean of the ratio {number(ours['geometric_mean'], '.2f')}, "
        f"with the filter kept {number(kept['geometric_mean'], '.2f')}{floor}",
        f"  lowest: {lowest(ours)}, kept {lowest(kept)}",
        f"  below 1: {named(ours['below_one'], known['packed']['below_one'])}, kept {named(kept['below_one'], known['kept']['below_one'])}",
        f"  error above torch's: {named(part['less_exact'], known['less_exact'])}",
    ]


def header_lines(machine: dict[str, Any]) -> list[str]:
    """The conditions of the measurement as lines of text."""
    return [f"{name:14} {value}" for name, value in machine.items() if value is not None and not isinstance(value, dict)]


# ---- Markdown


def markdown_table(columns: Sequence[str], left: int, rows: Sequence[Sequence[str]]) -> str:
    """A table whose first `left` columns are words; the others are numbers."""
    sides = ["---"] * left + ["---:"] * (len(columns) - left)
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, sides, *rows))


def _time(text: str, verdict: str) -> str:
    """A time, or the reason why there is none."""
    return text if verdict == "ok" else f"**{verdict}**"


def marks(part: str) -> tuple[str, str]:
    """The lines of a page that mark the begin and end of one benchmark's results: the suite's, or "host", "models" or "training"."""
    return f"<!-- {part}:begin -->", f"<!-- {part}:end -->"


def measured_by(machine: dict[str, Any]) -> str:
    """The command, the day, the kernels, the machine and the method."""
    kernels = f", {kernels_words(machine['kernels'])}" if machine.get("kernels") else ""
    return f"Measured by `{machine['command']}` on {machine['date'][:10]}{kernels}: {_where(machine)}. The method: {machine['method']}."


def kernels_words(digest: str) -> str:
    """How a page says of which kernels its figures are."""
    return f"kernels `{digest}`"


def _where(machine: dict[str, Any]) -> str:
    """The machine and torch, in one line."""
    name = str(machine.get("GPU") or machine.get("CPU")).split(",")[0]
    return name + (f", driver {machine['driver']}" if machine.get("driver") else "") + f"; torch {machine['torch']}"


def markdown(
    machine: dict[str, Any], rows: Sequence[Row], means: dict[str, Any], loops: Sequence[dict[str, Any]], calls: Sequence[dict[str, Any]]
) -> str:
    """The page of results. `machine` is the header of the report; parts that were not measured are left out."""
    parts = [measured_by(machine)]
    if rows:
        parts.append(_markdown_summary(means))
        rates = f" The rates: {machine['rates']}." if machine.get("rates") else ""
        parts.append("Times in microseconds. " + " ".join(f"{note[0].upper()}{note[1:]}." for note in notes(rows)) + rates)
    for mode in means:
        lines = _markdown_rows([row for row in rows if row.mode == mode])
        # one table is shown; of several, which have many rows, only the names
        parts += [lines] if len(means) == 1 else [f"<details><summary>{mode}: {mode_words(mode)}</summary>", lines, "</details>"]
    if loops:
        parts.append("A Python loop over images and channels, with one single-channel convolution each, against one call:")
        columns = ["problem", "calls", "loop us", "one call us", "ratio"]
        parts.append(markdown_table(columns, 1, [
            (
                r["problem"], str(r["calls"]), microseconds(r["loop_us"]), _time(microseconds(r["single_us"]), r["verdict"]),
                number(r["ratio"], ".0f"),
            )
            for r in loops
        ]))
    if calls:
        parts.append(f"What one call costs on the host, for {calls[0]['problem']} in torch tensors:")
        parts.append(markdown_table(("call", "us"), 1, [(f"`{c['call']}`", f"{c['us']:.1f}") for c in calls]))
    return "\n\n".join(parts)


def _markdown_summary(means: dict[str, Any]) -> str:
    """For each mode, the means of the large dense rows of the core, of the rows of each kind, and of all rows."""
    columns = (
        "mode", "layers", "ratio", "filter kept", "lowest ratio", "slower than torch", "less exact", "lower bound / ours", "filter kept",
    )
    lines = []
    for mode, sums in means.items():
        kinds = [("{} " + kind, part) for kind, part in sums["kinds"].items()] if len(sums["kinds"]) > 1 else []
        for words, part in (("{} dense, above 1 GFLOP", sums["dense"]), *kinds, ("all {}", sums["all"])):
            ours, kept = part["packed"], part["kept"]
            if part["rows"]:
                lines.append((
                    mode, words.format(part["rows"]), number(ours["geometric_mean"], ".2f"), number(kept["geometric_mean"], ".2f"),
                    number(ours["lowest"], ".2f"), str(len(ours["below_one"])), str(len(part["less_exact"])),
                    number(ours["of_floor"], ".0%"), number(kept["of_floor"], ".0%"),
                ))
    timed = (f"{mode}: {sums['all']['rows']} of {sums['rows']} layers timed, {sums['wrong_rows']} wrong." for mode, sums in means.items())
    return "\n\n".join(([markdown_table(columns, 2, lines)] if lines else []) + ["Ratios are geometric means. " + " ".join(timed)])


def _markdown_rows(rows: Sequence[Row]) -> str:
    """The rows of one mode as a table."""
    columns = [
        "problem", "kernel", "ours us", "kept us", "torch us", "ratio", "kept", "TFLOP/s", "lower bound / ours", "error", "torch's error",
    ]
    lines = []
    for row in rows:
        problem, kernel, ours, kept, torch, ratio, kept_ratio, speed, _, part, error, torch_error, *_ = cells(row)
        lines.append((problem, kernel, _time(ours, row.verdict), kept, torch, ratio, kept_ratio, speed, part, error, torch_error))
    return markdown_table(columns, 2, lines)


def around_results(path: Path, part: str = "results") -> tuple[str, str]:
    """The text before and after a part of the results in a file, with the lines that mark it.

    Raises
    ------
    ToolError
        The file can't be read, or does not have both lines once and in order.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ToolError(f"{path} can't be read: {error}") from error
    bare, (begin, end) = [line.rstrip() for line in lines], marks(part)
    if bare.count(begin) != 1 or bare.count(end) != 1 or bare.index(begin) > bare.index(end):
        raise ToolError(f"{path} needs the line {begin} once and after it the line {end} once; the results go between them")
    return "".join(lines[: bare.index(begin) + 1]), "".join(lines[bare.index(end) :])


def write_between(path: Path, text: str, part: str = "results") -> None:
    """Replace the text between the lines that mark a part. A reader sees the old file or the new one, complete."""
    before, after = around_results(path, part)
    real = path.resolve()  # behind a link, not the link but the file is replaced
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
    """Write the whole report."""
    path.write_text(json_text(report) + "\n")


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write the suite's rows as raw numbers."""
    names = [*(f.name for f in fields(Row)), *COMPUTED]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(row.record() for row in rows)
