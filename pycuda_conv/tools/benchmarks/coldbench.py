"""The time of first calls, each in a fresh process with an empty cache, beside torch's own first call.

Each is measured in a child process: ``python -m pycuda_conv.tools.benchmarks.coldbench KIND NAME OURS [ARCHIVE]`` prints seconds as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pycuda_conv.runtime import binaries
from pycuda_conv.tools.terminal import FAILED, OK, ToolError, console, json_text, require, table, track

if TYPE_CHECKING:
    from pycuda_conv.tools.bench import Settings

PATIENCE = 300  # seconds that a child may take

Seconds = dict[str, float]


# ---- in the child


def _timed(torch: Any, work: Callable[..., Any], *arguments: Any, **options: Any) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work(*arguments, **options)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def _convolver(torch: Any, ours: bool) -> Callable[..., Any]:
    """A convolution, after everything that a process pays once: contexts, libraries."""
    torch.zeros(1, device="cuda").add_(1)
    if not ours:
        torch.nn.functional.conv2d(torch.ones(1, 1, 4, 4, device="cuda"), torch.ones(1, 1, 1, 1, device="cuda"))
        conv2d: Callable[..., Any] = torch.nn.functional.conv2d
        return conv2d
    import pycuda_conv as pc
    from pycuda_conv.runtime import get_device

    get_device("cuda")
    return pc.conv2d


#: By name: channels, filter, groups, image, dtype, channels last.
LAYERS: dict[str, tuple[int, int, int, int, str, bool]] = {
    "3x3 float32": (64, 3, 1, 56, "float32", False), "1x1 float32": (256, 1, 1, 28, "float32", False),
    "3x3 float16 channels last": (64, 3, 1, 56, "float16", True), "depthwise float32": (64, 3, 64, 56, "float32", False),
    "3x3 float64": (64, 3, 1, 28, "float64", False),
}  # fmt: skip


def _problem(torch: Any, name: str) -> tuple[Callable[[int, int], Any], Any, dict[str, int]]:
    c, taps, groups, _, dtype, last = LAYERS[name]
    form = {"memory_format": torch.channels_last} if last else {}
    kind = {"device": "cuda", "dtype": getattr(torch, dtype)}

    def images(n: int, size: int) -> Any:
        return torch.randn(n, c, size, size, **kind).contiguous(**form)

    return images, torch.randn(c, c // groups, taps, taps, **kind).contiguous(**form), {"padding": taps // 2, "groups": groups}


def first_results(name: str, ours: bool) -> Seconds:
    """Seconds of the first call, and of others of the same layer: another image size, another batch, both."""
    import torch

    call = _convolver(torch, ours)
    images, weight, options = _problem(torch, name)
    size = LAYERS[name][3]
    inputs = {"first": (8, size), "other size": (8, size + 8), "other batch": (5, size), "both": (3, size - 6)}
    return {what: _timed(torch, call, images(*shape), weight, **options) for what, shape in inputs.items()}


def sixteen_sizes(name: str, ours: bool) -> Seconds:
    """Seconds of one layer for sixteen image sizes in turn."""
    import torch

    call = _convolver(torch, ours)
    images, weight, options = _problem(torch, name)
    first, *others = [_timed(torch, call, images(8, size), weight, **options) for size in range(40, 72, 2)]
    return {"first": first, "fifteen others": sum(others)}


def inference(name: str, ours: bool) -> Seconds:
    """Seconds of a converted network of torchvision's: its first images, another batch, another image size."""
    import torch

    models = require("torchvision.models")
    _convolver(torch, ours)
    model = models.get_model(name).cuda().eval()
    if ours:
        import pycuda_conv.nn as pn

        pn.convert(model)
    shapes = {"first": (8, 3, 224, 224), "one more image": (9, 3, 224, 224), "other size": (8, 3, 256, 256)}
    with torch.no_grad():
        return {what: _timed(torch, model, torch.randn(*shape, device="cuda")) for what, shape in shapes.items()}


def training(name: str, ours: bool) -> Seconds:
    """Seconds of a network's first two training steps: 64 images in bfloat16 by autocast, channels last."""
    import torch

    models = require("torchvision.models")
    _convolver(torch, ours)
    model = models.get_model(name).cuda().to(memory_format=torch.channels_last).train()
    if ours:
        import pycuda_conv.nn as pn

        pn.convert(model)
    x = torch.randn(64, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (64,), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()

    return {"first": _timed(torch, step), "second": _timed(torch, step)}


KINDS: dict[str, Callable[[str, bool], Seconds]] = {
    "problem": first_results, "sizes": sixteen_sizes, "inference": inference, "training": training
}  # fmt: skip


def _child(kind: str, name: str, ours: str, archive: str = "") -> None:
    if archive:  # instead of the kernels shipped with this package
        binaries.SHIPPED = Path(archive)
    print(json.dumps(KINDS[kind](name, ours == "ours")))


# ---- in the parent


@dataclass(frozen=True)
class Case:
    """A measurement by one child, and the figures to show.

    Attributes
    ----------
    shown : mapping of str to str
        For each of the child's figures to show, its name in the table.
    wheel : bool
        Whether the package has the kernels of a wheel.
    """

    kind: str
    name: str
    shown: dict[str, str]
    wheel: bool = False


CASES = (
    *(Case("problem", name, {
        "first": f"{name}: first result", "other size": "the same, other image size", "other batch": "the same, other batch",
        "both": "the same, both",
    }) for name in LAYERS),
    Case("sizes", "3x3 float32", {"first": "3x3 float32: first of sixteen sizes", "fifteen others": "the fifteen others"}),
    Case("inference", "resnet18", {
        "first": "converted resnet18, 8 images: first call", "one more image": "one more image", "other size": "another image size",
    }),
    Case("inference", "resnet18", {"first": "converted resnet18: first call, with the wheel's kernels"}, wheel=True),
    Case("training", "resnet50", {
        "first": "resnet50, 64 images, bfloat16 by autocast, channels last: first training step", "second": "the second",
    }),
    Case("training", "resnet50", {"first": "resnet50: first training step, with the wheel's kernels"}, wheel=True),
)  # fmt: skip


def measure(case: Case, ours: bool, archive: Path | None) -> Seconds:
    """A case in a fresh process with an empty cache; `archive` has the kernels for cases with those of a wheel."""
    with tempfile.TemporaryDirectory(prefix="pycuda_conv-") as folder:
        cache = Path(folder, "cache")
        env = {**os.environ, "PYCUDA_CONV_CACHE_DIR": str(cache), "CUDA_CACHE_DISABLE": "1"}
        command = [sys.executable, "-m", __name__, case.kind, case.name, "ours" if ours else "torch"]
        if ours:
            command.append(str(archive if case.wheel else Path(folder, "no kernels")))
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False)
        except subprocess.TimeoutExpired as error:
            raise ToolError(f"{case.kind} {case.name} took longer than {PATIENCE} s") from error
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise ToolError(f"{case.kind} {case.name} failed: {said[0]}")
    found: Seconds = json.loads(done.stdout.splitlines()[-1])
    return found


def make_archive(file: Path, architecture: str) -> None:
    """The kernels that a wheel for such a GPU ships, in a file as ``make wheel GPU=...`` makes it."""
    from pycuda_conv.runtime import driver
    from pycuda_conv.runtime.compiler import compiler
    from pycuda_conv.runtime.target import Target
    from pycuda_conv.tools.warm import compile_all, of_wheel, write_archive

    begin = time.monotonic()
    wanted = of_wheel(Target(architecture))
    counted = time.monotonic()
    made, failed = compile_all(wanted, compiler(driver.newest()))
    if failed:
        raise ToolError(failed[0])
    write_archive(file, made)
    console(stderr=True).print(
        f"the wheel's {len(made)} kernels: chosen in {counted - begin:.0f} s, compiled in {time.monotonic() - counted:.0f} s"
    )


COLUMNS = ("what", "ms", "torch's ms")


def run(settings: Settings) -> int:
    """Measure, and print the table."""
    from pycuda_conv.tools import bench  # children need nothing of it

    gpu: Any = bench.gpu_for(settings, "--cold")
    json_file, only = settings.json, settings.only
    cases = [case for case in CASES if only is None or any(only in shown for shown in (*case.shown.values(), case.kind))]
    rows, measured, status = [], [], OK
    by_torch: dict[tuple[str, str], Seconds] = {}
    plain = "sm_{}{}".format(*gpu.capability)
    with tempfile.TemporaryDirectory(prefix="pycuda_conv-") as folder:
        archive = binaries.SHIPPED if binaries.serves(plain) else Path(folder, "kernels.zip")
        for case in track(cases, lambda case: case.name):
            try:
                if case.wheel and not archive.exists():
                    make_archive(archive, "sm_90a" if gpu.capability == (9, 0) else plain)
                ours, what = measure(case, True, archive), (case.kind, case.name)
                if what not in by_torch:
                    by_torch[what] = measure(case, False, None)
                torchs = by_torch[what]
            except ToolError as error:
                console(stderr=True).print(str(error))
                status = FAILED
                continue
            for key, shown in case.shown.items():
                rows.append((shown, f"{ours[key] * 1e3:,.1f}", f"{torchs[key] * 1e3:,.1f}"))
                measured.append({"what": shown, "ours_s": ours[key], "torch_s": torchs[key]})
            if json_file:  # after every case, so that an interrupted run keeps what it has measured
                json_file.write_text(json_text({"gpu": gpu.model, "rows": measured}) + "\n")
    title = f"First calls on {gpu.model}, each in a fresh process with an empty cache"
    console().print(table(title, COLUMNS, rows, left=("what",)))
    return status


if __name__ == "__main__":
    _child(*sys.argv[1:])
