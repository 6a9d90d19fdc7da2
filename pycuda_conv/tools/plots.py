"""Pictures of the benchmark: how much faster than torch, and how close to the machine's ceilings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pycuda_conv.tools.report import Row
from pycuda_conv.tools.terminal import require

OURS, TORCH, INK, FAINT = "#0b6bb0", "#d9822b", "#222222", "#9aa0a6"  # distinct for the colour-blind too
LAUNCH_BOUND = 10e6  # FLOP; a smaller problem measures the launch


def _figure(width: float, height: float) -> tuple[Any, Any]:
    figure = require("matplotlib.figure").Figure(figsize=(width, height), layout="constrained", facecolor="white")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)
    return figure, axes


def _where(machine: dict[str, Any], rows: Sequence[Row]) -> str:
    gpu = str(machine.get("GPU") or machine.get("CPU") or machine.get("device", ""))
    modes = ", ".join(dict.fromkeys(row.mode for row in rows))
    return f"{gpu.split(',')[0]}, torch {str(machine.get('torch', '')).split(',')[0]}, {modes}"


def save(figure: Any, path: Path) -> None:
    """Write a figure. An SVG keeps its words as text, and equal figures have the same bytes."""
    with require("matplotlib").rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
        figure.savefig(path, dpi=150, **({"metadata": {"Date": None}} if path.suffix == ".svg" else {}))


def _plain(value: float, _: Any = None) -> str:
    return f"{value:g}"


def ratio_bars(rows: Sequence[Row], machine: dict[str, Any], path: Path) -> None:
    """A bar for each row: torch's time over ours, on a logarithmic axis that starts at 1; a line up to the ratio with a kept filter."""
    timed = [row for row in rows if row.ratio is not None]
    if not timed:
        return
    ratios = [row.ratio or 1.0 for row in timed]
    kept = [row.kept_ratio or row.ratio or 1.0 for row in timed]
    figure, axes = _figure(10, 1.4 + 0.25 * len(timed))
    positions = range(len(timed))
    colours = [OURS if r >= 1 else TORCH for r in ratios]
    # from 1, not from 0: then twice as fast and half as fast are equally long
    axes.barh(positions, [r - 1 for r in ratios], left=1, color=colours, height=0.7)
    axes.plot(kept, positions, linestyle="", marker="|", markersize=9, markeredgewidth=1.5, color=INK)
    axes.set_xscale("log")
    low, high = min(1.0, *ratios, *kept), max(1.0, *ratios, *kept)
    axes.set_xlim(min(low / 1.5, 0.5), max(high * 1.5, 2))  # room for the numbers
    for y, r, k in zip(positions, ratios, kept, strict=True):
        axes.annotate(
            f"{r:.2f}, {k:.2f}", (max(r, k) if r >= 1 else min(r, k), y), xytext=(4 if r >= 1 else -4, 0), textcoords="offset points",
            va="center", ha="left" if r >= 1 else "right", fontsize=8, color=INK,
        )
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_yticks(positions, [row.problem for row in timed], family="monospace", fontsize=8)
    axes.set_ylim(len(timed) - 0.4, -0.6)
    ticker = require("matplotlib.ticker")
    axes.xaxis.set_major_locator(ticker.LogLocator(base=10, subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(_plain))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_xlabel("torch's time / ours; the line and the second number: filter kept", color=INK)
    axes.set_title(f"Convolution against torch: {_where(machine, timed)}", loc="left", fontsize=11, color=INK)
    save(figure, path)


def time_and_error(points: dict[str, tuple[float, float]], machine: dict[str, Any], path: Path) -> None:
    """Each way to compute float32 layers: its time over that of torch's IEEE arithmetic, and its error against float64."""
    figure, axes = _figure(8, 5)
    for name, (time, error) in points.items():
        ours = name.startswith("ours")
        axes.scatter([time], [error], color=OURS if ours else TORCH, s=46, marker="o" if ours else "s", zorder=3)
        words = f"{name}: three products of fp16 or TF32" if name == "ours, fp32" else name
        axes.annotate(words, (time, error), xytext=(6, 5), textcoords="offset points", fontsize=9, color=INK)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(0.18)
    ticker = require("matplotlib.ticker")
    axes.xaxis.set_major_locator(ticker.LogLocator(base=10, subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(_plain))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.grid(True, which="major", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_xlabel("time over that of torch in IEEE arithmetic", color=INK)
    axes.set_ylabel("relative error against float64", color=INK)
    gpu = str(machine.get("GPU", "")).split(",")[0]
    axes.set_title(f"KernelBench's layers: time and error, {gpu}, {str(machine.get('date', ''))[:10]}", loc="left", fontsize=11, color=INK)
    save(figure, path)


def roofline(rows: Sequence[Row], machine: dict[str, Any], path: Path) -> None:
    """TFLOP/s over FLOP per byte, under the measured copy bandwidth and the measured rate of the fp32 units."""
    timed = [row for row in rows if row.ratio is not None and row.bytes]
    timed = [row for row in timed if row.flops >= LAUNCH_BOUND] or timed
    if not timed:
        return
    figure, axes = _figure(9, 5.8)
    intensity = [row.flops / row.bytes for row in timed]
    for x, row in zip(intensity, timed, strict=True):
        axes.plot([x, x], [row.torch_tflops, row.tflops], color=FAINT, linewidth=0.8, zorder=2)
    axes.scatter(intensity, [row.torch_tflops for row in timed], color=TORCH, s=26, label="torch", zorder=3, marker="s")
    axes.scatter(intensity, [row.tflops for row in timed], color=OURS, s=30, label="ours", zorder=4)
    axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = min(intensity) / 1.5, max(intensity) * 1.5
    speeds = [v for row in timed for v in (row.tflops, row.torch_tflops) if v]
    bottom, top = min(speeds) / 1.5, max(speeds) * 1.5
    bandwidth, peak = machine.get("copy_bytes_per_second"), machine.get("peak_flops")
    if bandwidth and peak:
        bandwidth, peak = bandwidth / 1e12, peak / 1e12
        top = max(top, 1.5 * peak)
        axes.plot([low, high], [low * bandwidth, high * bandwidth], color=INK, linewidth=1.2, label=f"copy {bandwidth:.1f} TB/s, measured")
        axes.plot([low, high], [peak, peak], color=INK, linewidth=1.2, linestyle="--", label=f"fp32 units {peak:.0f} TFLOP/s, measured")
    axes.set_xlim(low, high)
    axes.set_ylim(bottom, top)
    ticker = require("matplotlib.ticker")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticker.LogLocator(base=10, subs=(1, 2, 5)))
        axis.set_major_formatter(ticker.FuncFormatter(_plain))
        axis.set_minor_formatter(ticker.NullFormatter())
    axes.grid(True, which="major", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    left_out = f"; problems under {LAUNCH_BOUND / 1e6:.0f} MFLOP are left out" if len(timed) < len(rows) else ""
    axes.set_xlabel(f"FLOP per byte that must move{left_out}", color=INK)
    axes.set_ylabel("TFLOP/s", color=INK)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    axes.set_title(f"Attained speed: {_where(machine, timed)}", loc="left", fontsize=11, color=INK)
    save(figure, path)
