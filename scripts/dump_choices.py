#!/usr/bin/env python3
"""Write down what engines say of random problems, without a GPU: to see what a change of limits, tiles or models of time changes.

    python scripts/dump_choices.py before.txt; (change something); python scripts/dump_choices.py after.txt; diff before.txt after.txt

For each of 12 x 800 random problems: the choice for some devices, with timings of such a GPU and by the models alone; a digest of all
predictions; what engines refuse of random configurations (``--sentences``: why, too). Then the variants of every kernel. Prints the digest
of all that.
"""

from __future__ import annotations

import argparse
import hashlib
import random
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from dump_launches import digest, fake

from pycuda_conv import engines
from pycuda_conv.engines import calibration, registry
from pycuda_conv.engines.base import Config
from pycuda_conv.problem import ConvProblem
from pycuda_conv.tools.families import draw

DEVICES = {"H200": fake("cuda", (9, 0), 132, "NVIDIA H200"), "sm_80": fake("cuda", (8, 0), 108), "OpenCL": fake("opencl")}
#: What fields of random configurations are.
NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 48, 64, 96, 128, 192, 256)


def some(cls: type[Config], r: random.Random) -> Config:
    """A configuration with one or two fields that are random."""
    default = cls()
    asked: dict[str, Any] = {}
    for field in r.sample(fields(cls), min(len(fields(cls)), r.choice((1, 1, 2)))):
        value = getattr(default, field.name)
        if isinstance(value, bool):
            asked[field.name] = not value
        elif isinstance(value, int):
            asked[field.name] = r.choice(NUMBERS)
    return cls(**asked)


def said(problem: ConvProblem, number: int, sentences: bool) -> Iterator[str]:
    """What engines say of a problem."""
    name, device = list(DEVICES.items())[0 if number % 4 else number // 4 % len(DEVICES)]
    yield f"  {name}: {engines.find(problem, device)}"
    predicted = [f"{us!r} {config}" for us, config in engines.predictions(problem, device)]
    yield f"    {len(predicted)} predictions {digest(predicted)}"
    if device.backend == "cuda":
        registry._found.clear()
        with calibration.replaced(None):
            yield f"    by the models alone: {engines.find(problem, device)}"
        registry._found.clear()
    r = random.Random(f"{problem} {number}")
    classes = [cls for _, cls in sorted(engines.config_classes().items())]
    for cls in r.sample(classes, 6):
        config = some(cls, r)
        why = engines.refusal(problem, config, device)
        yield f"    {config}: {why if sentences else 'refused' if why else 'taken'}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write down what engines say of random problems, without a GPU.")
    parser.add_argument("file", type=Path, help="where to write it")
    parser.add_argument("--each", type=int, default=800, help="problems of each family (default 800)")
    parser.add_argument("--seed", type=int, default=48, help="of the problems (default 48)")
    parser.add_argument("--sentences", action="store_true", help="say why configurations are refused")
    options = parser.parse_args()
    whole = hashlib.sha256()
    with options.file.open("w", encoding="utf-8") as file:

        def write(text: str) -> None:
            file.write(text)
            whole.update(text.encode())

        for number, problem in enumerate(draw(options.seed, options.each)):
            write("\n".join([f"{problem} {problem.dtype} {problem.direction}", *said(problem, number, options.sentences), ""]))
        for name, device in DEVICES.items():
            for one in sorted(registry.variants(device), key=lambda one: (one.file, str(one.choices))):
                texts = sorted(str(sorted(defines.items())) for defines in one)
                write(f"{name}: {one.file} {one.arch}: {len(texts)} variants {digest(texts)}\n")
    print(whole.hexdigest())


if __name__ == "__main__":
    main()
