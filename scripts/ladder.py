"""Time the ladder of kernels on one layer, from one thread a pixel to the tensor cores, and draw it.

    python scripts/ladder.py --plot docs/plots/ladder.svg

Without a GPU it has the steps that PoCL can run, on a smaller layer.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

import pycuda_conv as pc
from pycuda_conv import engines
from pycuda_conv.engines.direct.direct import Batched
from pycuda_conv.engines.direct.gemm import Gemm
from pycuda_conv.engines.hopper.gemm import ImplicitGemm
from pycuda_conv.timing import Effort, gpu_times, wall_times
from pycuda_conv.tools.plots import OURS, TORCH, save
from pycuda_conv.tools.report import median

LAYER = pc.ConvProblem.forward(2, (32, 256, 56, 56), (256, 256, 3, 3), padding=1)
SMALL_LAYER = pc.ConvProblem.forward(2, (1, 64, 28, 28), (64, 64, 3, 3), padding=1)  # for a CPU

#: What a step adds, its configuration, and what of the problem it changes.
STEPS = (
    ("a thread a pixel and channel", Batched(128, 1, 1), {}),
    ("8 channels a thread, 16 at a time", Batched(128, 8, 16), {}),
    ("blocked for registers, 4 x 4 a thread", Gemm(64, 64, 8, 4, 4, 1), {}),
    ("8 x 8 a thread", Gemm(128, 128, 16, 8, 8, 2), {}),
    ("tensor cores, three products of limbs, 64 x 128", ImplicitGemm(64, 128, 2), {}),
    ("two warpgroups on 128 x 128, 2 stages", ImplicitGemm(128, 128, 2), {}),
    ("3 stages", ImplicitGemm(128, 128, 3), {}),
    ("one product (tf32)", ImplicitGemm(128, 256, 4), {"precision": "tf32"}),
    ("float16, channels last", ImplicitGemm(128, 256, 4), {"dtype": "float16", "layout": "NHWC"}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", type=Path, help="write a bar chart there")
    parser.add_argument("--device", choices=("cuda", "opencl"), help="by default a GPU, or OpenCL without one")
    arguments = parser.parse_args()
    device = pc.runtime.get_device(arguments.device)
    on_gpu = device.backend == "cuda"
    layer, place = (LAYER, "cuda") if on_gpu else (SMALL_LAYER, "cpu")
    torch.backends.cudnn.benchmark = True
    x, w = torch.randn(layer.input_shape, device=place), torch.randn(layer.weight_shape, device=place) / 48
    reference = torch.nn.functional.conv2d(x.double(), w.double(), padding=1)
    names, ways, errors = [], [], []

    def add(name, way):
        result = way(0).double()
        names.append(name)
        ways.append(way)
        errors.append(float((result - reference).norm() / reference.norm()))

    for name, config, changes in STEPS:
        problem = replace(layer, **changes)
        if engines.refusal(problem, config, device) is None:
            add(name, _ours(problem, config, x, w, device))
    if on_gpu:
        rivals = ("cuDNN fp32", False, {}), ("cuDNN TF32", True, {}), ("cuDNN float16, channels last", True, STEPS[-1][2])
        for name, allow, changes in rivals:
            add(name, _cudnn(replace(layer, **changes), allow, x, w))
        times, _ = gpu_times(torch, ways, 1, Effort(rounds=5, seconds=0.5))
        where = torch.cuda.get_device_name()
    else:
        add("the planner's choice", _ours(layer, None, x, w, device))
        add(f"torch, {torch.get_num_threads()} threads", lambda _: torch.nn.functional.conv2d(x, w, padding=1))
        times = wall_times(ways, 1, Effort(rounds=5, seconds=0.5))
        where = device.device.name.strip()
    print(f"{layer} on {where}, medians")
    for name, taken, error in zip(names, times, errors, strict=True):
        us = median(taken) * 1e6
        print(f"{name:50s} {us:9.1f} us {layer.flops / us / 1e6:9.3g} TFLOP/s   error {error:.1e}")
    if arguments.plot:
        arguments.plot.parent.mkdir(parents=True, exist_ok=True)
        draw(names, [layer.flops / median(taken) / 1e12 for taken in times], f"{layer} on {where}", arguments.plot)


def _placed(problem, x, w):
    dtype = getattr(torch, problem.dtype)
    layout = torch.channels_last if problem.layout == "NHWC" else torch.contiguous_format
    return x.to(dtype).contiguous(memory_format=layout), w.to(dtype)


def _ours(problem, config, x, w, device):
    x, w = _placed(problem, x, w)
    plan = pc.Plan(problem, device, config=config)
    return lambda _: plan(x, w)


def _cudnn(problem, allow_tf32, x, w):
    x, w = _placed(problem, x, w)
    w = w.contiguous(memory_format=torch.channels_last) if problem.layout == "NHWC" else w

    def way(_):
        torch.backends.cudnn.allow_tf32 = allow_tf32
        return torch.nn.functional.conv2d(x, w, padding=1)

    return way


def draw(names: list[str], rates: list[float], title: str, path: Path) -> None:
    """A bar for each step; `rates` in TFLOP/s."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.9 + 0.34 * len(names)), layout="constrained", facecolor="white")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.barh(range(len(names)), rates, color=[TORCH if name.startswith(("cuDNN", "torch")) else OURS for name in names])
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.invert_yaxis()
    axes.set_xscale("log")
    for y, rate in enumerate(rates):
        axes.annotate(f"{rate:.3g}", (rate, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_xlabel("TFLOP/s (effective, logarithmic)")
    axes.set_title(title, loc="left", fontsize=10)
    save(figure, path)


if __name__ == "__main__":
    main()
