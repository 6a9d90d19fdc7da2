#!/usr/bin/env python3
"""Write down every launch of the benchmark's problems, without a GPU: to see what a change of the planner or an engine changes.

    python scripts/dump_launches.py before.txt; (change something); python scripts/dump_launches.py after.txt; diff before.txt after.txt

Each problem of the suite, its gradients among them, is planned in every mode for some GPUs and OpenCL: the planner's choice, the
measured one where the package has one, and a sample of the other candidates. Prints the digest of all that.
"""

from __future__ import annotations

import argparse
import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pycuda_conv import engines, tune
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import KernelLaunch, TensorMap
from pycuda_conv.tools.suite import MODES, core, in_mode


def fake(backend: str = "cuda", capability: tuple[int, int] = (0, 0), multiprocessors: int = 2, model: str = "") -> Any:
    """A device that plans are made for and that nothing runs on."""
    return SimpleNamespace(backend=backend, capability=capability, multiprocessors=multiprocessors, model=model, name="fake")


DEVICES = {
    "H200": fake("cuda", (9, 0), 132, "NVIDIA H200"), "H100": fake("cuda", (9, 0), 114), "sm_80": fake("cuda", (8, 0), 108),
    "sm_75": fake("cuda", (7, 5), 40), "OpenCL": fake("opencl"),
}  # fmt: skip


def problems() -> Iterator[ConvProblem]:
    """The core of the suite and its gradients in all modes, some of them with everything that may follow a sum."""
    for number, problem in enumerate(core()):
        for mode in MODES:
            asked = in_mode(problem, mode)
            yield asked
            if asked.direction == "fprop":
                yield replace(asked, direction="dgrad")
                yield replace(asked, direction="wgrad", layout="NCHW")
            if number % 3 == 0:
                yield replace(asked, has_bias=True, has_scale=True, has_residual=True, activation="relu")


@dataclass(frozen=True)
class Dump:
    """How much is written: `sample` candidates of each problem beside those that are chosen."""

    sample: int
    short: bool

    def lines(self, problem: ConvProblem, device: Any) -> Iterator[str]:
        """What is planned for a problem."""
        chosen = engines.choose(problem, device)
        predicted = [f"{us!r} {config}" for us, config in engines.predictions(problem, device)] if device.backend == "cuda" else []
        candidates = engines.candidates(problem, device)
        yield f"  {len(predicted)} predictions {digest(predicted)}, {len(candidates)} candidates {digest(map(str, candidates))}"
        tuned = tune.lookup(problem, device)
        others = [config for config in candidates if config != chosen]
        sampled = random.Random(f"{problem} {device.capability}").sample(others, min(self.sample, len(others)))
        for how, config in [("chosen", chosen), *([("tuned", tuned.config)] if tuned else []), *(("candidate", c) for c in sampled)]:
            yield f"  {how} {config}"
            yield f"    filter packed as {engines.filter_key(problem, config)}"
            for with_moments in (False, True)[: 1 + (how == "chosen")]:
                schedule = list(self._schedule(engines.schedule(problem, config, device, with_moments)))
                yield from [f"    {digest(schedule)}"] if self.short else schedule

    def _schedule(self, schedule: Any) -> Iterator[str]:
        sizes = schedule.workspace_bytes, schedule.filter_bytes
        yield f"    workspace {sizes[0]}, packed filter {sizes[1]}, redoes {schedule.redoes}, moments {schedule.moments}"
        for name in ("prepare", "steps", "whole", "filter_last"):
            for number, step in enumerate(getattr(schedule, name) or ()):
                for launch in step:
                    yield f"    {name} {number}: {_launch(launch)}"


def _launch(step: KernelLaunch) -> str:
    defines = " ".join(f"{name}={value}" for name, value in sorted(step.defines.items()))
    where = f"{step.file or step.kernel}.cu {step.arch}".strip()
    return (
        f"{step.kernel} of {where} <<<{step.grid}, {step.block}, {step.shared}>>> {[_place(p) for p in step.buffers]} "
        f"numbers {step.numbers} maps {list(map(_map, step.maps))} layer {dict(step.layer)} defines {defines}"
    )


def _place(place: Any) -> tuple[int, int]:
    buffer, offset = place if isinstance(place, tuple) else (place, 0)
    return int(buffer), offset


def _map(described: TensorMap) -> str:
    place = int(described.buffer), described.offset
    return f"{place} {described.dtype} {described.sizes} by {described.strides} in {described.box} over {described.span}"


def digest(lines: Any) -> str:
    """Short words for many lines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write down every launch of the benchmark's problems, without a GPU.")
    parser.add_argument("file", type=Path, help="where to write it")
    parser.add_argument("--sample", type=int, default=3, help="candidates of each problem beside the chosen one (default 3)")
    parser.add_argument("--every", type=int, default=1, help="plan only every n-th problem (default 1)")
    parser.add_argument("--short", action="store_true", help="digests instead of launches")
    options = parser.parse_args()
    dump, whole = Dump(options.sample, options.short), hashlib.sha256()
    with options.file.open("w", encoding="utf-8") as file:
        for problem in list(problems())[:: options.every]:
            for name, device in DEVICES.items():
                text = "\n".join([f"{problem}{' bias' * problem.has_bias} on {name}", *dump.lines(problem, device), ""])
                file.write(text)
                whole.update(text.encode())
    print(whole.hexdigest())


if __name__ == "__main__":
    main()
