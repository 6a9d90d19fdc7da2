#!/usr/bin/env python3
"""Measure on a GPU what each engine is worth: the problems that it wins, against the best that the other engines have.

    python scripts/ablate.py --seconds 250 --json ablation.json
    python scripts/ablate.py hopper_lines direct_quads --seed 7

Problems are drawn for this alone, with a seed of their own: random ones of all families, and layers of networks that nothing was fitted
to. For each engine some of those that it wins are taken, one of each engine in turn, and the engine's configuration and the second best
are timed in one run, alternating. What removing the engine costs follows: the share of its wins in each family and pass, times how much
longer these take by what was measured. The verdict is CONTRIBUTING's rule. The file is written after every problem.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

from pycuda_conv import measure
from pycuda_conv.engines import registry
from pycuda_conv.errors import BackendError
from pycuda_conv.plan import Plan, as_called
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime import get_device
from pycuda_conv.tools.ablation import PARTS, Cost, Part, Win, belongs, chosen, cost, engine_names, problems, wins
from pycuda_conv.tools.families import KINDS

#: Whose worth is doubtful by the models: they come first.
DOUBTFUL = ("hopper_lines", "direct_quads", "halo_loaders")
NETWORKS = "networks"  # the family of the layers below
AHEAD = 64  # problems whose kernels are compiled meanwhile
NEAR = 1.3  # a part of an engine that is never chosen is measured where it is predicted to take up to so many times as long as the choice

#: (images, C, size, K, taps, stride, groups, dilation); the padding is half the filter. The benchmark's suite has none of these.
LAYERS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "EDSR (Lim et al., 2017)": (
        (16, 64, (48, 48), 64, 3, 1, 1, 1), (16, 64, (48, 48), 256, 3, 1, 1, 1), (1, 64, (256, 256), 64, 3, 1, 1, 1),
    ),
    "DnCNN (Zhang et al., 2017)": (
        (128, 64, (40, 40), 64, 3, 1, 1, 1), (1, 64, (320, 480), 64, 3, 1, 1, 1), (128, 1, (40, 40), 64, 3, 1, 1, 1),
    ),
    "ESRGAN (Wang et al., 2018)": ((16, 64, (32, 32), 32, 3, 1, 1, 1), (16, 192, (32, 32), 64, 3, 1, 1, 1)),
    "HRNet (Sun et al., 2019)": (
        (32, 32, (64, 48), 32, 3, 1, 1, 1), (32, 64, (32, 24), 64, 3, 1, 1, 1), (32, 128, (16, 12), 128, 3, 1, 1, 1),
    ),
    "MobileNetV3 (Howard et al., 2019)": (
        (32, 72, (56, 56), 72, 5, 2, 72, 1), (32, 120, (28, 28), 120, 5, 1, 120, 1), (32, 240, (28, 28), 240, 3, 2, 240, 1),
        (32, 960, (7, 7), 960, 5, 1, 960, 1), (32, 184, (14, 14), 80, 1, 1, 1, 1), (1, 672, (14, 14), 672, 3, 1, 672, 1),
    ),
    "EfficientNetV2 (Tan and Le, 2021)": (
        (16, 24, (150, 150), 96, 3, 2, 1, 1), (16, 48, (75, 75), 192, 3, 1, 1, 1), (16, 256, (38, 38), 256, 3, 2, 256, 1),
    ),
    "Xception (Chollet, 2017)": (
        (16, 728, (19, 19), 728, 3, 1, 728, 1), (16, 128, (74, 74), 128, 3, 1, 128, 1), (16, 728, (19, 19), 728, 1, 1, 1, 1),
    ),
    "ConvMixer (Trockman and Kolter, 2022)": ((16, 3, (224, 224), 768, 7, 7, 1, 1), (16, 768, (32, 32), 768, 9, 1, 768, 1)),
    "VAN (Guo et al., 2023)": ((16, 64, (56, 56), 64, 5, 1, 64, 1), (16, 64, (56, 56), 64, 7, 1, 64, 3)),
    "ShuffleNetV2 (Ma et al., 2018)": ((64, 116, (28, 28), 116, 3, 1, 116, 1), (64, 24, (56, 56), 24, 3, 2, 24, 1)),
    "SqueezeNet (Iandola et al., 2016)": ((64, 16, (55, 55), 64, 3, 1, 1, 1), (64, 128, (27, 27), 32, 1, 1, 1, 1)),
    "GoogLeNet (Szegedy et al., 2015)": ((32, 480, (14, 14), 192, 1, 1, 1, 1), (32, 16, (28, 28), 32, 5, 1, 1, 1)),
    "StyleGAN2 (Karras et al., 2020)": (
        (8, 512, (8, 8), 512, 3, 1, 1, 1), (8, 512, (32, 32), 512, 3, 1, 1, 1), (8, 128, (128, 128), 3, 1, 1, 1, 1),
    ),
    "DDPM (Ho et al., 2020)": (
        (32, 128, (32, 32), 128, 3, 1, 1, 1), (32, 256, (16, 16), 256, 3, 1, 1, 1), (32, 128, (32, 32), 3, 3, 1, 1, 1),
    ),
    "CycleGAN (Zhu et al., 2017)": (
        (1, 256, (64, 64), 256, 3, 1, 1, 1), (1, 64, (256, 256), 3, 7, 1, 1, 1), (1, 3, (256, 256), 64, 7, 1, 1, 1),
    ),
    "YOLOv8 (Jocher et al., 2023)": (
        (8, 16, (320, 320), 32, 3, 2, 1, 1), (8, 64, (80, 80), 64, 3, 1, 1, 1), (1, 128, (40, 40), 64, 1, 1, 1, 1),
    ),
    "RAFT (Teed and Deng, 2020)": ((4, 2, (46, 62), 128, 7, 1, 1, 1), (4, 324, (46, 62), 256, 1, 1, 1, 1)),
    "ERFNet (Romera et al., 2018)": ((4, 64, (128, 256), 64, (3, 1), 1, 1, 1), (4, 128, (64, 128), 128, (1, 3), 1, 1, (1, 8))),
    "AlphaZero (Silver et al., 2018)": ((64, 256, (19, 19), 256, 3, 1, 1, 1), (256, 256, (8, 8), 256, 3, 1, 1, 1)),
    "LeNet (LeCun et al., 1998)": ((256, 1, (32, 32), 6, 5, 1, 1, 1), (256, 6, (14, 14), 16, 5, 1, 1, 1)),
    "Demucs (Defossez et al., 2019)": ((4, 64, (11025,), 128, 8, 4, 1, 1), (4, 2, (44100,), 64, 8, 4, 1, 1)),
    "Conv-TasNet (Luo and Mesgarani, 2019)": (
        (4, 1, (32000,), 512, 16, 8, 1, 1), (4, 512, (3999,), 512, 3, 1, 512, 4), (4, 128, (3999,), 512, 1, 1, 1, 1),
    ),
    "nnU-Net (Isensee et al., 2021)": ((2, 32, (40, 56, 40), 32, 3, 1, 1, 1), (2, 1, (80, 112, 80), 32, 3, 1, 1, 1)),
    "3D ResNet (Hara et al., 2018)": ((4, 64, (8, 28, 28), 64, 3, 1, 1, 1), (4, 128, (4, 14, 14), 128, 3, 1, 1, 1)),
}  # fmt: skip


def networks(seed: int, count: int) -> list[ConvProblem]:
    """Some of the layers above, of all passes and kinds of arrays."""
    found = []
    for layers in LAYERS.values():
        for n, c, size, k, taps, stride, groups, dilation in layers:
            ndim = len(size)
            taps, dilation = ((v if isinstance(v, tuple) else (v,) * ndim) for v in (taps, dilation))
            padding = tuple(d * (tap - 1) // 2 for tap, d in zip(taps, dilation, strict=True))
            for dtype, precision, layout in KINDS:
                options: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
                options |= {"dtype": dtype, "precision": precision, "layout": layout}
                x, w = (n, c, *size), (k, c // groups, *taps)
                forward = ConvProblem.forward(ndim, x, w, **options)
                found += [forward, forward]  # as often as both gradients together, as among the families' problems
                found += [ConvProblem.gradient(of, ndim, x, w, forward.result_shape, **options) for of in ("input", "weight")]
    random.Random(seed).shuffle(found)
    return [found[i % len(found)] for i in range(count)]


def near(drawn: Sequence[tuple[str, ConvProblem]], device: Any, part: str) -> list[Win]:
    """For a part of an engine that is seldom chosen: problems where its best configuration is predicted to be near the choice."""
    found, (engine, of_part) = [], PARTS[part]
    for family, problem in drawn:
        launched = problem.launched
        if launched.layout not in engine.LAYOUTS or not any(map(of_part, engine.configs(launched, device))):
            continue
        known = [(us, one) for us, one in registry.predictions(problem, device) if of_part(one)]
        others = [(us, one) for us, one in registry.predictions(problem, device) if not belongs(one, part)]
        if known and others and known[0][0] <= NEAR * others[0][0]:
            found.append(Win(family, problem, known[0][1], others[0][1], known[0][0], others[0][0]))
    return found


def drawn_by(seed: int, each: int, names: Sequence[str], gpu: dict[str, Any]) -> tuple[Counter[Part], dict[str, list[Win]]]:
    """In a process of its own: how many problems each part has, and what each engine wins of them."""
    device: Any = SimpleNamespace(backend="cuda", name="gpu", **gpu)
    drawn = problems(device, seed, each)
    drawn += [(NETWORKS, as_called(problem, device)) for problem in networks(seed, each)]
    choices = chosen(drawn, device)
    found = {name: near(drawn, device, name) if name in PARTS else wins(choices, device, (name,)) for name in names}
    return Counter((family, problem.direction) for family, problem in drawn), found


@dataclass
class Measured:
    """An engine's wins, and the factors of time that were measured of some of them."""

    won: list[Win]
    todo: list[Win]
    losses: dict[Part, list[float]] = field(default_factory=lambda: defaultdict(list))
    rows: list[dict[str, Any]] = field(default_factory=list)

    def factors(self, chosen: bool) -> dict[Part, list[float]]:
        """For each part as many factors as wins: the mean of those measured there, or of all that were measured.

        A part of an engine that is not chosen now counts where it is faster: as if a better planner chose it there.
        """
        kept = {part: [loss if chosen else max(loss, 1.0) for loss in found] for part, found in self.losses.items()}
        logs = {part: mean(map(math.log, found)) for part, found in kept.items()}
        whole = [math.log(loss) for found in kept.values() for loss in found]
        usual = mean(whole) if whole else 0.0
        counts = Counter(win.part for win in self.won if win.second is not None)
        return {part: [math.exp(logs.get(part, usual))] * count for part, count in counts.items()}


class Compiling:
    """Compiles both configurations of problems before they are measured."""

    def __init__(self, device: Any, jobs: int) -> None:
        self._device, self._pool = device, ThreadPoolExecutor(jobs)
        self._coming: dict[tuple[str, str], Future[Any]] = {}

    def start(self, win: Win) -> list[Future[Any]]:
        """What has to be waited for."""
        found = []
        for step in measure._steps(win.problem, [one for one in (win.first, win.second) if one is not None], self._device):
            key = step.kernel, step.source()
            if key not in self._coming:
                self._coming[key] = self._pool.submit(self._device.launcher, step)
            found.append(self._coming[key])
        return found

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def in_turn(of: dict[str, Measured]) -> Iterator[tuple[str, Win]]:
    """One win of each engine after the other, the doubtful engines' three times as often as the others'."""
    while any(one.todo for one in of.values()):
        for name, one in of.items():
            for _ in range(3 if name in DOUBTFUL else 1):
                if one.todo:
                    yield name, one.todo.pop()


def timed(device: Any, win: Win) -> tuple[float, float]:
    """Microseconds of both configurations."""
    first, second = measure.device_times([Plan(win.problem, device, config=config).final_form() for config in (win.first, win.second)])
    return first, second


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure on a GPU what each engine is worth.")
    known = [*engine_names(), *PARTS]
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help="by default all, the doubtful ones first")
    parser.add_argument("--seconds", type=float, default=600, help="measure for so long (default 600)")
    parser.add_argument("--seed", type=int, default=20261128, help="of the problems")
    parser.add_argument("--each", type=int, default=1600, help="problems of each family to draw (default 1600)")
    parser.add_argument("--most", type=int, default=200, help="the most problems to measure of an engine (default 200)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes and compilers at a time")
    parser.add_argument("--json", type=Path, help="write what was measured, after every problem")
    options = parser.parse_args(arguments)
    for name in options.engines:
        if name not in known:
            parser.error(f"there is no engine {name}; there are {', '.join(known)}")
    began, device = time.monotonic(), get_device("cuda")
    gpu = {"capability": device.capability, "multiprocessors": device.multiprocessors, "model": device.model}
    able = [name for name, engine in engine_names().items() if engine.unsupported(device) is None] + list(PARTS)
    names = options.engines or [*(name for name in DOUBTFUL if name in able), *(name for name in able if name not in DOUBTFUL)]

    processes = max(1, min(options.jobs, 16))
    counts: Counter[Part] = Counter()
    of = {name: Measured([], []) for name in names}
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        parts = [pool.submit(drawn_by, options.seed + i, math.ceil(options.each / processes), names, gpu) for i in range(processes)]
        for part in parts:
            found, won = part.result()
            counts.update(found)
            for name in names:
                of[name].won += won[name]
    for name, one in of.items():
        with_second = [win for win in one.won if win.second is not None]
        one.todo = random.Random(f"{options.seed} {name}").sample(with_second, min(options.most, len(with_second)))
    print(f"{sum(counts.values()):,} problems drawn in {time.monotonic() - began:.0f} s on {device.model}", flush=True)

    compiling, waiting, order = Compiling(device, options.jobs), [], in_turn(of)
    measuring = time.monotonic()
    while time.monotonic() - measuring < options.seconds:
        while len(waiting) < AHEAD and (following := next(order, None)) is not None:
            waiting.append((*following, compiling.start(following[1])))
        if not waiting:
            break
        at = next((i for i, (_, _, coming) in enumerate(waiting) if all(one.done() for one in coming)), None)
        if at is None:
            time.sleep(0.02)
            continue
        name, win, coming = waiting.pop(at)
        row: dict[str, Any] = {"family": win.family, "pass": win.problem.direction, "problem": str(win.problem)}
        row |= {"first": str(win.first), "second": str(win.second), "first_predicted": win.first_us, "second_predicted": win.second_us}
        try:
            for one in coming:
                one.result()
            first, second = timed(device, win)
        except (BackendError, RuntimeError, MemoryError, ValueError) as error:
            row["error"] = str(error)[:300]
        else:
            row |= {"first_us": first, "second_us": second}
            of[name].losses[win.part].append(second / first)
        of[name].rows.append(row)
        if options.json:
            rows = {name: one.rows for name, one in of.items()}
            options.json.write_text(json.dumps({"gpu": device.model, "seed": options.seed, "rows": rows}))
    compiling.close()
    report(of, counts)
    return 0


def report(of: dict[str, Measured], counts: Counter[Part]) -> None:
    """Print a line for each engine."""
    print(f"{'engine':24}{'wins':>7}{'timed':>6}{'errors':>7}{'loss':>7}{'model':>7}{'all':>8}{'worst':>8}  (timed there) verdict")
    for name, one in of.items():
        losses = [loss for found in one.losses.values() for loss in found]
        models = [win.loss for win in one.won if win.loss is not None]
        found: Cost = cost(counts, one.factors(name not in PARTS), sum(win.second is None for win in one.won))
        errors = sum("error" in row for row in one.rows)
        in_words = "no problem was measured" if not losses and not found.only else found.why
        print(
            f"{name:24}{len(one.won) / sum(counts.values()):7.2%}{len(losses):6}{errors:7}{_mean(losses):7.2f}{_mean(models):7.2f}"
            f"{found.mean - 1:8.2%}{found.worst - 1:8.1%}  ({len(one.losses.get(found.part, ()))}) {in_words}"
        )


def _mean(factors: Sequence[float]) -> float:
    return math.exp(mean(map(math.log, factors))) if factors else 1.0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # nobody waits for compilers any more
