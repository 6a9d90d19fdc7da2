"""Training steps and loss curves of ``bench --models --training``."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pycuda_conv.problem import ConvProblem
from pycuda_conv.tools.model_rows import Case, Curve
from pycuda_conv.tools.networks import input_shape, network, output
from pycuda_conv.tools.programs import program
from pycuda_conv.tools.rivals import EAGER, LIGHT, Side, arithmetic, dtype_of, format_of, laid_out, made, precision_of
from pycuda_conv.tools.suite import in_mode

#: Loss curves: images, their width and height, steps, and runs of each side, all but the first from perturbed inputs.
CURVE_IMAGES, CURVE_SIZE, CURVE_STEPS, CURVE_RUNS = 16, 96, 50, 5
CLASSES = 1000
LEARNING_RATE, MOMENTUM = 1e-3, 0.9
CURVE_RATE = 1e-2
TF32_UNIT = 2.0**-11


def convolutions(torch: Any, model: Any, images: Any, mode: str) -> list[ConvProblem]:
    """The problems of `model`'s convolutions in a step of training."""
    found: dict[ConvProblem, None] = {}

    def note(module: Any, given: tuple[Any, ...], result: Any) -> None:
        (x,), w = given, module.weight
        asked = {name: getattr(module, name) for name in ("stride", "padding", "dilation", "groups")}
        forward = ConvProblem.forward(2, x.shape, w.shape, None if module.bias is None else module.bias.shape, **asked)
        found[in_mode(forward, mode)] = None
        for of in ("input", "weight")[x is images :]:
            found[in_mode(ConvProblem.gradient(of, 2, x.shape, w.shape, result.shape, **asked), mode)] = None

    hooks = [module.register_forward_hook(note) for module in model.modules() if isinstance(module, torch.nn.Conv2d)]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    return list(found)


def stepper(torch: Any, model: Any, images: Any, labels: Any, mode: str, rate: float = LEARNING_RATE) -> Callable[[], Any]:
    """A function that makes a step of SGD with momentum and returns the loss; 16-bit modes are torch's autocast."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)
    dtype = getattr(torch, dtype_of(mode))

    def step() -> Any:
        optimizer.zero_grad()
        with torch.autocast(images.device.type, dtype, enabled=dtype.itemsize == 2):
            loss = loss_of(torch, output(model(images)), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def in_training(torch: Any, base: Any, mode: str, side: Side) -> Any:
    """A copy of the network to train; its weights are float32 in 16-bit modes too."""
    dtype = getattr(torch, dtype_of(mode))
    model = laid_out(torch, copy.deepcopy(base).to(torch.float32 if dtype.itemsize == 2 else dtype), mode).train()
    return made(torch, model, side, mode)


def data(torch: Any, case: Case, place: str, shape: Sequence[int]) -> tuple[Any, Any]:
    """Random images, and labels; or, for a network that is written here and gives such images, random images to come near to."""
    images = torch.randn(case.images, *shape, device=place).contiguous(memory_format=format_of(torch, case.mode, len(shape) + 1))
    images = images.double() if dtype_of(case.mode) == "float64" else images
    if program(case.network) is not None:
        return images, torch.randn_like(images)
    return images, torch.randint(0, CLASSES, (case.images,), device=place)


def loss_of(torch: Any, found: Any, wanted: Any) -> Any:
    """The loss beside labels, or beside images."""
    functions = torch.nn.functional
    return functions.mse_loss(found, wanted) if wanted.is_floating_point() else functions.cross_entropy(found, wanted)


def peak(torch: Any, model: Any, step: Callable[[], Any]) -> float:
    """Bytes that a step needs at most, beyond those in use before it."""
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before)


def gradients(model: Any) -> list[Any]:
    """The gradients of all parameters that have one; those of others are None."""
    return [parameter.grad for parameter in model.parameters()]


def exact_gradients(torch: Any, base: Any, images: Any, labels: Any) -> list[Any]:
    """The gradients of the first step in float64."""
    model = in_training(torch, base, "fp64", Side(EAGER))
    loss_of(torch, output(model(images.double())), labels.double() if labels.is_floating_point() else labels).backward()
    return gradients(model)


def gradient_error(found: Sequence[Any], exact: Sequence[Any]) -> float:
    """The relative error of all gradients together, as one vector."""
    pairs = [(a, b) for a, b in zip(found, exact, strict=True) if a is not None and b is not None]
    return math.sqrt(sum(float((a.double() - b).square().sum()) for a, b in pairs) / sum(float(b.square().sum()) for _, b in pairs))


def perturbed(torch: Any, images: Any, unit: float, seed: int) -> Any:
    """`images` with a unit of rounding added to, or taken from, two of three pixels; as they are for seed 0."""
    if not seed:
        return images
    generator = torch.Generator(images.device).manual_seed(seed)
    signs = torch.randint(-1, 2, images.shape, generator=generator, device=images.device)
    return images * (1 + unit * signs)


def distance(curve: Sequence[float], other: Sequence[float]) -> float:
    """The root mean square of the differences."""
    return math.sqrt(math.fsum((a - b) ** 2 for a, b in zip(curve, other, strict=True)) / len(curve))


def measure_curve(torch: Any, case: Case, place: str, seed: int, runs: int = CURVE_RUNS, size: int = CURVE_SIZE) -> Curve:
    """Train ours, torch's and a float64 network on the same data, and compare the losses of all steps.

    Small differences grow from step to step, so one run says little, and each side makes several. In fp32, ours is wrong if all its curves
    are further from float64's than any of torch's. In coarser modes rounding moves both sides' curves alike. There, ours is wrong if all
    its curves are further from torch's first than any of torch's others.
    """
    base = network(torch, case.network, place, seed)
    images, labels = data(torch, case, place, (3, size, size) if program(case.network) is None else input_shape(case.network))
    coarse = precision_of(case.mode) == "tf32" or getattr(torch, dtype_of(case.mode)).itemsize == 2
    unit = TF32_UNIT if precision_of(case.mode) == "tf32" else torch.finfo(getattr(torch, dtype_of(case.mode))).eps / 2

    def curve(ours: bool, mode: str, run: int) -> list[float]:
        given = perturbed(torch, images, unit, run)
        torch.compiler.reset()
        side = Side(LIGHT, True, "light") if ours else Side(EAGER)
        step = stepper(torch, in_training(torch, base, mode, side), given.double() if mode == "fp64" else given, labels, mode, CURVE_RATE)
        return [float(loss) for loss in [step() for _ in range(CURVE_STEPS)]]

    exact = curve(False, "fp64", 0)
    with arithmetic(torch, case.mode):
        mine, theirs = ([curve(ours, case.mode, run) for run in range(runs)] for ours in (True, False))
    first = theirs[0]
    found = Curve(
        case, "ok", tuple(distance(one, exact) for one in mine), tuple(distance(one, exact) for one in theirs),
        tuple(distance(one, first) for one in mine), tuple(distance(one, first) for one in theirs[1:]), exact[0], exact[-1],
    )  # fmt: skip
    own, other = (found.apart, found.torch_apart) if coarse else (found.exact, found.torch_exact)
    right = all(map(math.isfinite, own)) and min(own) <= max(other)
    return found if right else replace(found, verdict="WRONG")


