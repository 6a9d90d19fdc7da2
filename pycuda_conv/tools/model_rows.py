"""The rows of ``bench --models``: what was measured of a network, as text and as numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from pycuda_conv.tools.report import geometric_mean, markdown_table, measured_by, median, number
from pycuda_conv.tools.rivals import (
    AUTOTUNED,
    COMPILED,
    COMPILED_TF32,
    EAGER,
    EAGER_TF32,
    INDUCTOR,
    LIGHT,
    OURS_REDUCED,
    REDUCED,
)
from pycuda_conv.tools.terminal import Table, table


@dataclass(frozen=True)
class Case:
    """A network with a number of images in a mode, and its use: "evaluated", "trained" or "loss curve"."""

    what: str
    network: str
    images: int
    mode: str

    def __str__(self) -> str:
        return f"{self.network}, {self.images} image{'s' * (self.images > 1)}, {self.mode}, {self.what}"


@dataclass(frozen=True)
class Row:
    """The result of a case. `verdict` is "ok", "WRONG", or the reason of a failure."""

    case: Case
    verdict: str = "ok"

    TITLE: ClassVar[str]
    COLUMNS: ClassVar[tuple[str, ...]]
    COMPUTED: ClassVar[tuple[str, ...]] = ()

    def figures(self) -> tuple[str, ...]:
        """The row's numbers as text; there are as many as :attr:`COLUMNS`."""
        raise NotImplementedError

    @classmethod
    def all_columns(cls) -> tuple[str, ...]:
        """The names of the columns of :meth:`cells`."""
        return "network", "images", "mode", *cls.COLUMNS, "verdict"

    def cells(self) -> tuple[str, ...]:
        """The row as text; the reason of a failure is too long for a table."""
        case = self.case
        return case.network, str(case.images), case.mode, *self.figures(), self.verdict.partition(":")[0]

    def record(self) -> dict[str, Any]:
        """Everything known, as raw numbers."""
        case, *others = asdict(self).items()
        return case[1] | dict(others) | {name: getattr(self, name) for name in self.COMPUTED}


def _figure(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


def _ratio(times: dict[str, float], theirs: str, ours: str) -> float:
    return times.get(theirs, math.nan) / times.get(ours, math.nan)


@dataclass(frozen=True)
class Evaluated(Row):
    """By the sides' names: milliseconds of a call by the host's clock, and of a replayed CUDA graph by the GPU's; errors to float64.

    `first_s` and `early_ms` are seconds of the first call and milliseconds of calls 2 to 10, kernels and compiled code being on the disk.
    `share` is the convolutions' part of torch eager's time.
    """

    wall_ms: dict[str, float] = field(default_factory=dict)
    graph_ms: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    fused: int = 0
    first_s: dict[str, float] = field(default_factory=dict)
    early_ms: dict[str, float] = field(default_factory=dict)
    share: float = math.nan

    TITLE = "Evaluation, ms. Graphs by the GPU's clock, calls by the host's. Ratios are torch's time / ours"
    COLUMNS = (
        "fused", "convs", "graph: light", "inductor", "torch", "torch.compile", "/ light", "/ inductor", "call: light", "torch",
        "/ light", "2 to 10", "ours reduced", "torch.compile", "/ ours", "autotuned", "TF32: torch", "torch.compile", "/ inductor",
        "error", "torch's", "TF32's",
    )
    COMPUTED = ("light_ratio", "inductor_ratio", "reduced_ratio", "call_ratio", "early_ratio", "tf32_ratio")

    @property
    def light_ratio(self) -> float:
        """The time of torch.compile divided by ours in light mode, of graphs; torch eager's where nothing was compiled."""
        return _ratio(self.graph_ms, COMPILED if COMPILED in self.graph_ms else EAGER, LIGHT)

    @property
    def inductor_ratio(self) -> float:
        """The time of torch.compile divided by ours with inductor, of graphs."""
        return _ratio(self.graph_ms, COMPILED, INDUCTOR)

    @property
    def reduced_ratio(self) -> float:
        """The same with ``mode="reduce-overhead"`` on both sides, by the host's clock."""
        return _ratio(self.wall_ms, REDUCED, OURS_REDUCED)

    @property
    def call_ratio(self) -> float:
        """Torch eager's time divided by ours in light mode, by the host's clock."""
        return _ratio(self.wall_ms, EAGER, LIGHT)

    @property
    def early_ratio(self) -> float:
        """The same for calls 2 to 10, before better kernels are compiled."""
        return _ratio(self.early_ms, EAGER, LIGHT)

    @property
    def tf32_ratio(self) -> float:
        """The time of torch.compile in TF32, torch's default for float32, divided by ours with inductor, of graphs."""
        return _ratio(self.graph_ms, COMPILED_TF32, INDUCTOR)

    def figures(self) -> tuple[str, ...]:
        def time_of(times: dict[str, float], name: str) -> str:
            return _figure(times.get(name, math.nan), ".2f")

        graph, wall = self.graph_ms, self.wall_ms
        ours = max((self.errors.get(name, math.nan) for name in (LIGHT, INDUCTOR) if name in self.errors), default=math.nan)
        return (
            str(self.fused) if self.wall_ms else "-", _figure(self.share, ".0%"),
            *(time_of(graph, name) for name in (LIGHT, INDUCTOR, EAGER, COMPILED)), _figure(self.light_ratio, ".2f"),
            _figure(self.inductor_ratio, ".2f"), time_of(wall, LIGHT), time_of(wall, EAGER), _figure(self.call_ratio, ".2f"),
            _figure(self.early_ratio, ".2f"), time_of(wall, OURS_REDUCED), time_of(wall, REDUCED), _figure(self.reduced_ratio, ".2f"),
            time_of(wall, AUTOTUNED), time_of(graph, EAGER_TF32), time_of(graph, COMPILED_TF32), _figure(self.tf32_ratio, ".2f"),
            _figure(ours, ".1e"), _figure(self.errors.get(EAGER, math.nan), ".1e"), _figure(self.errors.get(EAGER_TF32, math.nan), ".1e"),
        )  # fmt: skip


@dataclass(frozen=True)
class Trained(Row):
    """By the sides' names: milliseconds of a step (forward, loss, backward and SGD) by the host's clock, and as a replayed CUDA graph.

    `peak` and `torch_peak` are the bytes that a step in light mode and torch eager's need at most beyond weights and images. `apart` has
    the relative differences of the losses of the first steps from torch eager's, and `errors` those of the first step's gradients from
    float64's, for up to :data:`pycuda_conv.tools.models.MOST_EXACT` images.
    """

    step_ms: dict[str, float] = field(default_factory=dict)
    apart: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    peak: float = math.nan
    torch_peak: float = math.nan
    graph_ms: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    TITLE = "Training, images per second by the host's clock. Ratios are ours / torch's"
    COLUMNS = (
        "light", "inductor", "torch", "torch.compile", "reduced", "autotuned", "light / torch", "light / compiled", "inductor / compiled",
        "graphs: light / torch", "inductor / compiled", "peak GB", "torch's", "of it", "loss apart", "error", "torch's",
    )
    COMPUTED = ("light_ratio", "light_compiled_ratio", "inductor_ratio", "light_graph_ratio", "inductor_graph_ratio")

    @property
    def light_ratio(self) -> float:
        """Torch eager's time divided by ours in light mode."""
        return _ratio(self.step_ms, EAGER, LIGHT)

    @property
    def light_compiled_ratio(self) -> float:
        """The time of torch.compile divided by ours in light mode."""
        return _ratio(self.step_ms, COMPILED, LIGHT)

    @property
    def inductor_ratio(self) -> float:
        """The time of torch.compile divided by ours with inductor."""
        return _ratio(self.step_ms, COMPILED, INDUCTOR)

    @property
    def light_graph_ratio(self) -> float:
        """Torch eager's time divided by ours in light mode, of graphs: what the GPU takes."""
        return _ratio(self.graph_ms, EAGER, LIGHT)

    @property
    def inductor_graph_ratio(self) -> float:
        """The time of torch.compile divided by ours with inductor, of graphs."""
        return _ratio(self.graph_ms, COMPILED, INDUCTOR)

    def rate(self, side: str) -> float:
        """Images per second."""
        return self.case.images / self.step_ms.get(side, math.nan) * 1e3

    def figures(self) -> tuple[str, ...]:
        return (
            *(_figure(self.rate(name), ".0f") for name in (LIGHT, INDUCTOR, EAGER, COMPILED, REDUCED, AUTOTUNED)),
            *(_figure(getattr(self, name), ".2f") for name in self.COMPUTED), _figure(self.peak / 1e9, ".2f"),
            _figure(self.torch_peak / 1e9, ".2f"), _figure(self.peak / self.torch_peak, ".2f"),
            _figure(max(self.apart.values(), default=math.nan), ".1e"),
            _figure(max((self.errors.get(name, 0.0) for name in (LIGHT, INDUCTOR) if name in self.errors), default=math.nan), ".1e"),
            _figure(self.errors.get(EAGER, math.nan), ".1e"),
        )  # fmt: skip


@dataclass(frozen=True)
class Curve(Row):
    """Distances of loss curves: the root mean square of their differences over the steps.

    `exact` is ours from float64's, and `torch_exact` torch's from float64's. `apart` is ours from torch's first curve, and `torch_apart`
    torch's other curves from it. Each is a list over runs. All runs but the first have inputs perturbed by one unit of rounding.
    """

    exact: tuple[float, ...] = ()
    torch_exact: tuple[float, ...] = ()
    apart: tuple[float, ...] = ()
    torch_apart: tuple[float, ...] = ()
    first_loss: float = math.nan
    last_loss: float = math.nan

    TITLE = "Loss curves: root mean square of their distances, median / largest over runs from perturbed inputs"
    COLUMNS = ("loss", "ours, float64", "torch, float64", "ours, torch", "torch, torch")

    def figures(self) -> tuple[str, ...]:
        def text(values: Sequence[float]) -> str:
            return f"{median(values):.1e} / {max(values):.1e}" if values else "-"

        losses = "-" if math.isnan(self.last_loss) else f"{self.first_loss:.2f} to {self.last_loss:.2g}"
        return losses, *map(text, (self.exact, self.torch_exact, self.apart, self.torch_apart))


ROWS: dict[str, type[Row]] = {"evaluated": Evaluated, "trained": Trained, "loss curve": Curve}


def row_table(rows: Sequence[Row]) -> Table:
    """Rows of one kind as a table."""
    kind, styles = type(rows[0]), ["bold red" if row.verdict != "ok" else "" for row in rows]
    return table(kind.TITLE, kind.all_columns(), [row.cells() for row in rows], left=("network", "mode", "verdict"), styles=styles)


_WORDS = {
    "light_ratio": "light", "inductor_ratio": "inductor", "reduced_ratio": "reduce-overhead", "call_ratio": "calls in light mode",
    "light_compiled_ratio": "light over torch.compile", "early_ratio": "calls 2 to 10 in light mode",
    "tf32_ratio": "inductor over torch.compile in TF32", "light_graph_ratio": "graphs in light mode",
    "inductor_graph_ratio": "graphs with inductor",
}  # fmt: skip


def _means(rows: Sequence[Row], ratios: Sequence[str]) -> str:
    words = []
    for name in ratios:
        known = [value for value in (getattr(row, name) for row in rows) if not math.isnan(value)]
        words += [f"{_WORDS[name]} {number(geometric_mean(known), '.2f')}"] if known else []
    return ", ".join(words)


def mean_lines(rows: Sequence[Row]) -> list[str]:
    """The geometric means of the ratios of all correct rows, by mode and number of images."""
    lines = []
    evaluated = [row for row in rows if isinstance(row, Evaluated) and row.verdict == "ok"]
    for mode, images in dict.fromkeys((row.case.mode, row.case.images) for row in evaluated):
        own = [row for row in evaluated if (row.case.mode, row.case.images) == (mode, images)]
        lines.append(f"evaluated, {mode}, {images} images: geometric means {_means(own, Evaluated.COMPUTED)}")
    trained = [row for row in rows if isinstance(row, Trained) and row.verdict == "ok"]
    for mode in dict.fromkeys(row.case.mode for row in trained):
        own_ones = [row for row in trained if row.case.mode == mode]
        lines.append(f"trained, {mode}: geometric means {_means(own_ones, Trained.COMPUTED)}")
    return lines


def markdown(machine: dict[str, Any], rows: Sequence[Row]) -> str:
    """The results for the page. `machine` is the header of the report."""
    parts = [measured_by(machine)]
    for kind in ROWS.values():
        own = [row for row in rows if isinstance(row, kind)]
        if own:
            parts += [f"{kind.TITLE}.", markdown_table(kind.all_columns(), 1, [row.cells() for row in own])]
    return "\n\n".join([*parts, *(f"- {line}" for line in mean_lines(rows))])


def excerpt(machine: dict[str, Any], rows: Sequence[Row]) -> str:
    """The paragraph of the front page: evaluated networks over torch.compile, as CUDA graphs."""
    found = []
    for row in rows:
        if isinstance(row, Evaluated) and row.verdict == "ok" and COMPILED in row.graph_ms:
            ratios = " / ".join(_figure(ratio, ".2f") for ratio in (row.light_ratio, row.inductor_ratio))
            found.append(f"{row.case.network} ({row.case.images} images, {row.case.mode}) {ratios}")
    words = f"{FRONT_WORDS} {', '.join(found)}." if found else "Of networks `torch.compile` was not measured."
    return f"{words} {measured_by(machine)}"


FRONT_WORDS = "Networks as CUDA graphs, `torch.compile`'s time over ours in its two modes, light / inductor:"
