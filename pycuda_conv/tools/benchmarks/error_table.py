"""Errors by engine and kind of numbers as a table of docs/results.md: ``verify --pages``."""

from __future__ import annotations

from typing import Any

from pycuda_conv.rounding import TIMES_OTHER
from pycuda_conv.tools.distributions import DISTRIBUTIONS
from pycuda_conv.tools.report import kernels_words, markdown_table

ARITHMETICS = ("fp32", "tf32", "float16", "bfloat16", "float64")


def largest(results: list[dict[str, Any]]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """By engine, arithmetic and numbers, the result with the largest error beside the bound."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for one in results:
        key = one["engine"], one["arithmetic"], one["numbers"]
        if one["engine"] and (key not in found or one["of_bound"] > found[key]["of_bound"]):
            found[key] = one
    return found


#: Where torch's error of TF32 is so much smaller than ours, it computed in float32.
FLOAT32_INSTEAD = 10


def times(one: dict[str, Any]) -> float | None:
    """How many times torch's largest error this is; None where that says nothing: in float64, and where torch did not compute in TF32."""
    theirs = one["torch_of_bound"]
    if not theirs or one["arithmetic"] == "float64":
        return None
    ratio: float = one["of_bound"] / theirs
    return None if one["arithmetic"] == "tf32" and ratio > FLOAT32_INSTEAD else ratio


def cell(one: dict[str, Any] | None) -> str:
    """A result's error and torch's, both divided by the bound; bold where ours is clearly the larger one."""
    if one is None:
        return ""
    theirs, ratio = one["torch_of_bound"], times(one)
    text = f"{one['of_bound']:.3f}" + ("" if theirs is None else f" / {theirs:.3f}")
    return f"**{text}**" if ratio is not None and ratio > TIMES_OTHER else text


def page(report: dict[str, Any]) -> str:
    """The part of the page."""
    found, numbers = largest([one for one in report["results"] if " fft " not in one["case"]]), tuple(DISTRIBUTIONS)
    where = f"{report['model'] or report['device']}, torch {report['torch']}"
    if report.get("cudnn"):
        where += f", cuDNN {report['cudnn']}"
    parts = [
        f"Measured by `pycuda-conv verify` on {report['date'][:10]}, {kernels_words(report['kernels'])}: {where}; "
        f"{len(report['results'])} results. An error is an element's largest, divided by what rounding explains (more than 1 is wrong): "
        "ours, and torch's on the same arrays."
    ]
    rows: list[tuple[str, ...]] = []
    for arithmetic in ARITHMETICS:
        ratios = [[times(one) for (_, of, kind), one in found.items() if (of, kind) == (arithmetic, name)] for name in numbers]
        known = [max((ratio for ratio in some if ratio is not None), default=None) for some in ratios]
        if any(ratio is not None for ratio in known):
            rows.append((arithmetic, *("" if ratio is None else f"{ratio:.2f}" for ratio in known)))
    if rows:
        words = "Our largest error divided by torch's, of the engine for which that is most; of TF32 where torch took it, too:"
        parts += [words, markdown_table(("", *numbers), 1, rows)]
    rows = [
        (engine, arithmetic, *(cell(found.get((engine, arithmetic, name))) for name in numbers))
        for arithmetic in ARITHMETICS for engine in dict.fromkeys(engine for engine, of, _ in found if of == arithmetic)
    ]  # fmt: skip
    table = markdown_table(("engine", "arithmetic", *numbers), 2, rows)
    return "\n\n".join([*parts, "<details><summary>Every engine: our error / torch's</summary>", table, "</details>"])
