#!/usr/bin/env python3
"""Measure on a GPU what each engine is worth: the problems that it wins, against the best that the other engines have.

    python scripts/ablate.py --seconds 250 --json ablation.json
    python scripts/ablate.py hopper_gather+mma_few_pixels --seed 7       # what both are worth together
    python scripts/ablate.py DepthwiseRing ImplicitGemm.schedule=pingpong       # parts of engines: a class, a field
    python scripts/ablate.py --report first.json second.json             # all that was measured, in one table

Problems are drawn for this alone, with a seed of their own: random ones of all families, and layers of networks that nothing was fitted
to. For each engine some of those that it wins are taken, one of each engine in turn, and the engine's configuration and the second best
are timed in one run, alternating. What removing the engine costs follows: the share of its wins in each family and pass, times how much
longer these take by what was measured. Engines that are named together are left out together: the second best is of none of them. The
verdict is CONTRIBUTING's rule. The file is written after every problem.
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
from pycuda_conv.errors import BackendError
from pycuda_conv.plan import Plan, as_called
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime import get_device
from pycuda_conv.tools.ablation import Cost, Part, Win, chosen, cost, engine_names, pattern, problems, wins
from pycuda_conv.tools.families import KINDS

NETWORKS = "networks"  # the family of the layers below
AHEAD = 64  # problems whose kernels are compiled meanwhile

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


def drawn_by(seed: int, each: int, names: Sequence[str], gpu: dict[str, Any]) -> tuple[Counter[Part], dict[str, list[Win]]]:
    """In a process of its own: how many problems each part has, and what each engine wins of them."""
    device: Any = SimpleNamespace(backend="cuda", name="gpu", **gpu)
    drawn = problems(device, seed, each)
    drawn += [(NETWORKS, as_called(problem, device)) for problem in networks(seed, each)]
    choices = chosen(drawn, device)
    found = {name: wins(choices, device, name.split("+")) for name in names}
    return Counter((family, problem.direction) for family, problem in drawn), found


@dataclass
class Measured:
    """How many problems of each part an engine wins, those to measure, and what was measured."""

    won: Counter[Part] = field(default_factory=Counter)
    only: int = 0  # more problems, that no other engine runs
    todo: list[Win] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def losses(self) -> dict[Part, list[float]]:
        """The factors of time that were measured."""
        found: dict[Part, list[float]] = defaultdict(list)
        for row in self.rows:
            if "error" not in row:
                found[row["family"], row["pass"]].append(row["second_us"] / row["first_us"])
        return found

    @property
    def factors(self) -> dict[Part, list[float]]:
        """For each part as many factors as wins: the mean of those measured there, or of all that were measured."""
        logs = {part: mean(map(math.log, found)) for part, found in self.losses.items()}
        whole = [math.log(loss) for found in self.losses.values() for loss in found]
        usual = mean(whole) if whole else 0.0
        return {part: [math.exp(logs.get(part, usual))] * count for part, count in self.won.items()}

    def plain(self) -> dict[str, Any]:
        return {"won": counted(self.won), "only": self.only, "rows": self.rows}

    def add(self, plain: dict[str, Any]) -> None:
        """Count what :meth:`plain` says of other problems too."""
        self.won += from_counted(plain["won"])
        self.only += plain["only"]
        self.rows += plain["rows"]


def counted(parts: Counter[Part]) -> list[tuple[str, str, int]]:
    """A counter as JSON has it."""
    return [(family, direction, count) for (family, direction), count in sorted(parts.items())]


def from_counted(plain: Sequence[Sequence[Any]]) -> Counter[Part]:
    return Counter({(family, direction): count for family, direction, count in plain})


def read(files: Sequence[Path]) -> tuple[dict[str, Measured], dict[str, Counter[Part]]]:
    """What several runs measured, of problems by other seeds. An engine counts for the problems that were drawn when it was asked for."""
    of: dict[str, Measured] = defaultdict(Measured)
    counts: dict[str, Counter[Part]] = defaultdict(Counter)
    for file in files:
        run = json.loads(file.read_text())
        for name, plain in run["engines"].items():
            of[name].add(plain)
            counts[name] += from_counted(run["counts"])
    return of, counts


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
    """One win of each engine after the other, those left out together three times as often."""
    while any(one.todo for one in of.values()):
        for name, one in of.items():
            for _ in range(3 if "+" in name else 1):
                if one.todo:
                    yield name, one.todo.pop()


def timed(device: Any, win: Win) -> tuple[float, float]:
    """Microseconds of both configurations."""
    first, second = measure.device_times([Plan(win.problem, device, config=config).final_form() for config in (win.first, win.second)])
    return first, second


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure on a GPU what each engine is worth.")
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help="or several, as A+B; by default each")
    parser.add_argument("--seconds", type=float, default=600, help="measure for so long (default 600)")
    parser.add_argument("--seed", type=int, default=20261128, help="of the problems")
    parser.add_argument("--each", type=int, default=1600, help="problems of each family to draw (default 1600)")
    parser.add_argument("--most", type=int, default=200, help="the most problems to measure of an engine (default 200)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes and compilers at a time")
    parser.add_argument("--json", type=Path, help="write what was measured, after every problem")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="measure nothing: print what these files have together")
    options = parser.parse_args(arguments)
    if options.report:
        report(*read(options.report))
        return 0
    for name in options.engines:
        for one in name.split("+"):
            pattern(one)  # a wrong name is refused
    began, device = time.monotonic(), get_device("cuda")
    gpu = {"capability": device.capability, "multiprocessors": device.multiprocessors, "model": device.model}
    names = options.engines or [name for name, engine in engine_names().items() if engine.unsupported(device) is None]
    counts, of = drawn_in_parts(names, gpu, options)
    print(f"{sum(counts.values()):,} problems drawn in {time.monotonic() - began:.0f} s on {device.model}", flush=True)
    for name, win, coming in compiled_in_turn(of, device, options):
        row: dict[str, Any] = {"family": win.family, "pass": win.problem.direction, "problem": str(win.problem)}
        row |= {"first": str(win.first), "second": str(win.second), "first_predicted": win.first_us, "second_predicted": win.second_us}
        try:
            for one in coming:
                one.result()
            row["first_us"], row["second_us"] = timed(device, win)
        except (BackendError, RuntimeError, MemoryError, ValueError) as error:
            row["error"] = str(error)[:300]
        of[name].rows.append(row)
        if options.json:
            plain = {"gpu": device.model, "seed": options.seed, "counts": counted(counts)}
            options.json.write_text(json.dumps(plain | {"engines": {name: one.plain() for name, one in of.items()}}))
    report(of, dict.fromkeys(names, counts))
    return 0


def drawn_in_parts(names: Sequence[str], gpu: dict[str, Any], options: argparse.Namespace) -> tuple[Counter[Part], dict[str, Measured]]:
    """Problems drawn by processes side by side: how many each part has, and of each engine some of its wins to measure."""
    processes = max(1, min(options.jobs, 16))
    counts: Counter[Part] = Counter()
    won: dict[str, list[Win]] = {name: [] for name in names}
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        parts = [pool.submit(drawn_by, options.seed + i, math.ceil(options.each / processes), names, gpu) for i in range(processes)]
        for part in parts:
            found, wins_of = part.result()
            counts.update(found)
            for name in names:
                won[name] += wins_of[name]
    of = {}
    for name, found_wins in won.items():
        second = [win for win in found_wins if win.second is not None]
        todo = random.Random(f"{options.seed} {name}").sample(second, min(options.most, len(second)))
        of[name] = Measured(Counter(win.part for win in second), len(found_wins) - len(second), todo)
    return counts, of


def compiled_in_turn(of: dict[str, Measured], device: Any, options: argparse.Namespace) -> Iterator[tuple[str, Win, list[Future[Any]]]]:
    """Problems of the engines in turn, each as soon as its kernels are compiled, until the time is over."""
    compiling, waiting, order = Compiling(device, options.jobs), [], in_turn(of)
    began = time.monotonic()
    while time.monotonic() - began < options.seconds:
        while len(waiting) < AHEAD and (following := next(order, None)) is not None:
            waiting.append((*following, compiling.start(following[1])))
        if not waiting:
            break
        at = next((i for i, (_, _, coming) in enumerate(waiting) if all(one.done() for one in coming)), None)
        if at is None:
            time.sleep(0.02)
        else:
            yield waiting.pop(at)
    compiling.close()


def report(of: dict[str, Measured], counts: dict[str, Counter[Part]]) -> None:
    """Print a line for each engine; `counts` are the problems that each was asked about."""
    wide = max(24, *map(len, of)) + 1
    print(f"{'engine':{wide}}{'wins':>7}{'timed':>6}{'errors':>7}{'loss':>7}{'model':>7}{'all':>8}{'worst':>8}  (timed there) verdict")
    for name, one in of.items():
        all_losses = one.losses
        losses = [loss for found in all_losses.values() for loss in found]
        predicted = [(row["first_predicted"], row["second_predicted"]) for row in one.rows]
        models = [second / first for first, second in predicted if first and second]
        found: Cost = cost(counts[name], one.factors, one.only)
        errors = sum("error" in row for row in one.rows)
        in_words = "no problem was measured" if not losses and not found.only else found.why
        wins_share = (sum(one.won.values()) + one.only) / sum(counts[name].values())
        print(
            f"{name:{wide}}{wins_share:7.2%}{len(losses):6}{errors:7}{_mean(losses):7.2f}{_mean(models):7.2f}"
            f"{found.mean - 1:8.2%}{found.worst - 1:8.1%}  ({len(all_losses.get(found.part, ()))}) {in_words}"
        )


def _mean(factors: Sequence[float]) -> float:
    return math.exp(mean(map(math.log, factors))) if factors else 1.0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # nobody waits for compilers any more
