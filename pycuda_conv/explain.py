"""A plan in words, for :meth:`Plan.explain`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pycuda_conv import engines, tune
from pycuda_conv.runtime.base import KernelLaunch, LibraryCall, shown_file

if TYPE_CHECKING:
    from pycuda_conv.plan import Plan


def explain(plan: Plan, measure: bool) -> str:
    """A text with the work, the configuration and the reasons for it, each launch, and the time."""
    problem, device = plan.problem, plan.device
    predicted = engines.predictions(problem, device) if device.backend == "cuda" and problem.macs else []  # fitted to GPUs
    facts = [
        ("where", device.name + (f", {device.model}" if device.model else "")),
        ("work", f"{_number(problem.flops / 1e9)} GFLOP, {_number(problem.bytes / 1e6)} MB read and written at the least"),
        ("chosen", str(plan.config)), ("because", _why(plan, predicted)),
    ]
    own = next((us for us, config in predicted if config == plan.config), None)
    if own is not None:
        facts.append(("predicted", _speed(plan, own)))
    if measure and not plan.empty:
        facts.append(("measured", _speed(plan, tune.measure.measured(plan)) + ", now"))
    elif plan.tuned is not None:
        elsewhere = f" on {plan.tuned.gpu}" if plan.tuned.gpu else ""
        facts.append(("measured", f"{_speed(plan, plan.tuned.us)}, when it was tuned{elsewhere}"))
    if plan.workspace_bytes:
        packed = f", {plan.filter_bytes:,} of them the packed filter" if plan.filter_bytes else ""
        facts.append(("workspace", f"{plan.workspace_bytes:,} bytes{packed}"))
    lines = [str(problem), *(f"  {name:9}  {text}" for name, text in facts)]
    steps = [] if plan.empty else [step for stage in plan.loaded.whole for step in stage]
    return "\n".join(lines + _table([("launch", "file", "blocks", "threads", *_NAMES), *(_row(plan, step) for step in steps)]))


def _why(plan: Plan, predicted: Sequence[tuple[float, engines.Config]]) -> str:
    if plan.fixed:
        return "the caller gave it"
    if plan.tuned is not None:
        return f"tuned: the fastest measured on {plan.tuned.gpu or plan.device.model}"
    best = {type(config).__name__: us for us, config in reversed(predicted)}  # of each kernel, the fastest
    own = best.pop(type(plan.config).__name__, None)
    others = " and ".join(f"{_microseconds(us)} for the best {name}" for name, us in best.items())
    if own is None or own > min(best.values(), default=own):
        engine = str(getattr(engines.engine_of(plan.config), "__name__", "")).rpartition(".")[2]
        rule = f"a rule of the {engine} engine's, {'without a' if own is None else 'whatever the'} prediction"
        return rule + (f"; the models say {others}" if others else "")
    return f"its prediction is the shortest, {_microseconds(own)}" + (f" against {others}" if others else "")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _microseconds(us: float) -> str:
    return f"{_number(us)} us"


def _speed(plan: Plan, us: float) -> str:
    """A time, with the arithmetic and the memory traffic per second that it means."""
    return f"{_microseconds(us)}: {_number(plan.problem.flops / us / 1e6)} TFLOP/s, {_number(plan.problem.bytes / us / 1e3)} GB/s"


# ---- the launches

_NAMES = ("registers", "local bytes", "shared bytes", "occupancy")


def _row(plan: Plan, step: KernelLaunch) -> tuple[str, ...]:
    if isinstance(step, LibraryCall):
        return (step.kernel, "a library", f"{step.grid:,}", "-")
    known = plan.device.describe(step)
    numbers = [f"{known[name]:,}" for name in ("registers", "local", "shared")] + [f"{known['occupancy']:.0%}"] if known else []
    return (step.kernel, shown_file(step.file or step.kernel), f"{step.grid:,}", str(step.block), *numbers)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as aligned lines: words left, numbers right. Columns that only the first row has are left out."""
    count = max((len(row) for row in rows[1:]), default=0)
    if not count:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(count)]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, strict=False)
        return "  ".join(cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(cells))

    return [f"  {line(row)}" for row in rows]
