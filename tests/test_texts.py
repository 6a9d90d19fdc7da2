"""The texts of the tensor cores' kernels: none depends on how large images are or how many there are, and what may be in one is a list."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pycuda_conv import ConvProblem, engines
from pycuda_conv.engines import registry
from pycuda_conv.plan import as_called

DEVICES = {
    "H200": SimpleNamespace(capability=(9, 0), multiprocessors=132, backend="cuda", name="", model=""),
    "H100": SimpleNamespace(capability=(9, 0), multiprocessors=114, backend="cuda", name="", model=""),
    "sm_80": SimpleNamespace(capability=(8, 0), multiprocessors=108, backend="cuda", name="", model=""),
}
MOST = 32  # texts of one layer, all its kernels together, that sizes and batches may ask for: tiles, and how rows can be read and written


def layers(count: int, seed: int):
    """Random layers: a function of the number of images and their size that makes a problem, or raises ValueError."""
    r = random.Random(seed)
    for _ in range(count):
        groups = r.choice((1, 1, 1, 1, 2, 4))
        c, k = (groups * r.choice((3, 16, 20, 32, 64, 96, 128, 200, 256, 512)) for _ in range(2))
        ndim, direction = r.choice((1, 2, 2, 2, 3)), r.choice(("fprop", "fprop", "dgrad", "wgrad"))
        taps, stride, dilation = r.choice((1, 1, 3, 3, 3, 5, 7)), r.choice((1, 1, 1, 2, 3)), r.choice((1, 1, 1, 2))
        dtype, precision = r.choice((("float32", "fp32"), ("float32", "tf32"), ("float16", "fp32"), ("bfloat16", "fp32")))
        options = {"stride": stride, "padding": taps // 2, "dilation": dilation, "groups": groups}
        kind = {"dtype": dtype, "precision": precision, "layout": r.choice(("NCHW", "NHWC"))}
        fused = {"bias_shape": (k,), "activation": r.choice((None, "relu"))} if direction == "fprop" else {}

        def layer(
            n: int, size: int, c=c, k=k, groups=groups, ndim=ndim, direction=direction, taps=taps, options=options, kind=kind, fused=fused
        ):
            x, w = (n, c, *(size,) * ndim), (k, c // groups, *(taps,) * ndim)
            forward = ConvProblem.forward(ndim, x, w, **options, **kind, **fused)
            if direction == "fprop":
                return forward
            return ConvProblem.gradient(
                {"dgrad": "input", "wgrad": "weight"}[direction], ndim, x, w, forward.result_shape, **options, **kind
            )

        yield layer, (1500 if ndim == 1 else 90 if ndim == 2 else 20)


def launches(problem: ConvProblem, device):
    """What the planner's choice launches, but for the plain cores' kernels."""
    problem = as_called(problem, device)
    schedule = engines.schedule(problem, engines.choose(problem, device), device)
    steps = (*schedule.prepare, *schedule.steps, *schedule.whole, *(schedule.filter_last or ()))
    return [launch for step in steps for launch in step if not launch.kernel.startswith("direct")]


@pytest.mark.parametrize("name", DEVICES)
def test_sizes_and_batches_of_a_layer_ask_for_few_texts(name):
    device, r, met = DEVICES[name], random.Random(5), set()
    families = registry.variants(device)
    for layer, largest in layers(40, 5):
        texts = set()
        for _ in range(10):
            try:
                problem = layer(r.choice((1, 2, 3, 5, 8, 16, 31, 64)), r.randint(7, largest))
            except ValueError:  # a filter that is larger than the image
                continue
            for launch in launches(problem, device):
                file = launch.file or launch.kernel
                text = file, tuple(sorted(launch.defines.items()))
                assert text in texts or any(launch in family for family in families), f"{text}: {problem}"
                texts.add(text)
                met.add(file)
        assert len(texts) <= MOST, f"{len(texts)} texts: {problem}"
    assert met >= ({"pack", "mma_gemm"} if name == "sm_80" else {"pack", "hopper_gemm", "hopper_pointwise", "hopper_dense", "hopper_wgrad"})


@pytest.mark.parametrize("name", DEVICES)
def test_with_a_tile_no_text_depends_on_the_number_of_images(name):
    """But for the gradient of a filter, whose channels they are, and its sums, which are split by how many there are.

    And but for filters that blocks of hopper_dense turn themselves where they have few stages.
    """
    device = DEVICES[name]
    for layer, _ in layers(40, 6):
        one = as_called(layer(4, 24), device)
        config = engines.choose(one, device)
        if one.precision == "tf32" and "DenseNhwc" in str(config):
            continue
        for n in (5, 12, 40):
            other = replace(layer(n, 24), layout=one.layout)
            if one.direction == "wgrad" or engines.refusal(other, config, device):
                continue
            found = [{(launch.kernel, launch.source()) for launch in launches_of(problem, config, device)} for problem in (one, other)]
            assert found[0] == found[1], f"{other} {config}"


def launches_of(problem: ConvProblem, config, device):
    """What `config` launches, but for the direct engine's kernels."""
    steps = engines.schedule(problem, config, device).whole
    return [launch for step in steps for launch in step if not launch.kernel.startswith("direct")]
