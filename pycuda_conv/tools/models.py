"""Times of whole networks of torchvision's, converted, beside torch's own: evaluated, and trained.

Both sides get the same weights and images, and are timed in turn. A failure is reported in its row, and the other rows are still measured.
"""

from __future__ import annotations

import copy
import gc
import logging
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar

from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime import Device
from pycuda_conv.timing import Effort, gpu_times, wall_times
from pycuda_conv.tools import bench
from pycuda_conv.tools.oracle import torch_precision
from pycuda_conv.tools.plans import plans, settle
from pycuda_conv.tools.report import (
    RESULTS_PAGE,
    geometric_mean,
    header_lines,
    markdown_table,
    measured_by,
    median,
    number,
    write_between,
    write_json,
)
from pycuda_conv.tools.suite import MODES, in_mode
from pycuda_conv.tools.terminal import FAILED, OK, Table, ToolError, console, require, table, track

log = logging.getLogger("pycuda_conv")

#: Without names after --models: networks to evaluate, each with these numbers of images, and networks to train, name -> images.
EVALUATED, BATCHES = ("resnet50", "mobilenet_v2", "convnext_tiny", "deeplabv3_resnet50"), (1, 32)
EVALUATION_MODES = ("fp32", "tf32", "fp16-nhwc")
TRAINED = {"resnet50": (64, 256), "convnext_tiny": (32,), "mobilenet_v2": (64,)}
TRAINING_MODES = ("bf16-nhwc", "fp32")
IMAGES = (32,)  # numbers of images with which other networks are trained
MOST_IMAGES = {"fp32": 64}  # most images of a training step, by mode
IMAGE = 224  # pixels wide and high
CALIBRATION_IMAGES = 4  # batch normalisations get the statistics of so many images
#: Loss curves: images, their width and height, steps, and runs of each side, all but the first from perturbed inputs.
CURVE_IMAGES, CURVE_SIZE, CURVE_STEPS, CURVE_RUNS = 16, 96, 50, 5

CLASSES = 1000
LEARNING_RATE, MOMENTUM = 1e-3, 0.9
CURVE_RATE = 1e-2
TF32_UNIT = 2.0**-11
WRONG = 10  # an error above so many times torch's is not rounding
LEAST_ERROR = 1e-6  # relative error that float32 leaves after so many layers in any case
FIRST_STEPS = 2  # the last of these losses is compared: it depends on all gradients, and rounding has not yet grown
LOSS_LIMITS = {"float32": 1e-2, "float64": 1e-2, "float16": 5e-2, "bfloat16": 5e-2}  # relative
ROUND = 0.05  # seconds that one side's calls should take in a round, by the host's clock
MOST_CALLS = 50  # most calls in such a round


@dataclass(frozen=True)
class Case:
    """A network with a number of images in a mode, and its use: "evaluated", "trained" or "loss curve"."""

    what: str
    network: str
    images: int
    mode: str

    def __str__(self) -> str:
        return f"{self.network}, {self.images} image{'s' * (self.images > 1)}, {self.mode}, {self.what}"


@dataclass(frozen=True)
class Row:
    """The result of a case. `verdict` is "ok", "WRONG", or the reason of a failure."""

    case: Case
    verdict: str = "ok"

    TITLE: ClassVar[str]
    COLUMNS: ClassVar[tuple[str, ...]]
    COMPUTED: ClassVar[tuple[str, ...]] = ()

    def figures(self) -> tuple[str, ...]:
        """The row's numbers as text; there are as many as :attr:`COLUMNS`."""
        raise NotImplementedError

    @classmethod
    def all_columns(cls) -> tuple[str, ...]:
        """The names of the columns of :meth:`cells`."""
        return "network", "images", "mode", *cls.COLUMNS, "verdict"

    def cells(self) -> tuple[str, ...]:
        """The row as text; the reason of a failure is too long for a table."""
        case = self.case
        return case.network, str(case.images), case.mode, *self.figures(), self.verdict.partition(":")[0]

    def record(self) -> dict[str, Any]:
        """Everything known, as raw numbers."""
        case, *others = asdict(self).items()
        return case[1] | dict(others) | {name: getattr(self, name) for name in self.COMPUTED}


def _figure(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


@dataclass(frozen=True)
class Evaluated(Row):
    """Milliseconds of a call: eager by the host's clock, and replayed from a CUDA graph by the GPU's. Errors are against float64."""

    eager_ms: float = math.nan
    torch_eager_ms: float = math.nan
    graph_ms: float = math.nan
    torch_graph_ms: float = math.nan
    error: float = math.nan
    torch_error: float = math.nan

    TITLE = "Evaluation: ratio = torch's time / ours, above 1 ours is faster"
    COLUMNS = ("eager ms", "torch", "ratio", "graph ms", "torch", "ratio", "error", "torch's")
    COMPUTED = ("eager_ratio", "graph_ratio")

    @property
    def eager_ratio(self) -> float:
        """torch's time divided by ours, by the host's clock."""
        return self.torch_eager_ms / self.eager_ms

    @property
    def graph_ratio(self) -> float:
        """torch's time divided by ours, of graphs."""
        return self.torch_graph_ms / self.graph_ms

    def figures(self) -> tuple[str, ...]:
        times = (self.eager_ms, self.torch_eager_ms, self.eager_ratio, self.graph_ms, self.torch_graph_ms, self.graph_ratio)
        return *(_figure(value, ".2f") for value in times), _figure(self.error, ".1e"), _figure(self.torch_error, ".1e")


@dataclass(frozen=True)
class Trained(Row):
    """Times of a step (forward, loss, backward and SGD) by the host's clock, beside those of torch in ``torch.compile``.

    `peak` and `torch_peak` are the bytes that a step needs at most beyond weights and images. `loss_apart` is the relative difference of
    the losses of the first steps.
    """

    step_ms: float = math.nan
    torch_step_ms: float = math.nan
    compiled_step_ms: float = math.nan
    peak: float = math.nan
    torch_peak: float = math.nan
    loss_apart: float = math.nan

    TITLE = "Training, images per second: ratio = ours / torch's"
    COLUMNS = ("ours", "torch", "ratio", "compiled", "ours / it", "peak GB", "torch's", "of it", "loss apart")
    COMPUTED = ("rate", "torch_rate", "compiled_rate", "ratio")

    @property
    def rate(self) -> float:
        """Images per second, ours."""
        return self.case.images / self.step_ms * 1e3

    @property
    def torch_rate(self) -> float:
        """Images per second, torch's."""
        return self.case.images / self.torch_step_ms * 1e3

    @property
    def compiled_rate(self) -> float:
        """Images per second, torch's compiled."""
        return self.case.images / self.compiled_step_ms * 1e3

    @property
    def ratio(self) -> float:
        """torch's time divided by ours."""
        return self.torch_step_ms / self.step_ms

    def figures(self) -> tuple[str, ...]:
        return (
            _figure(self.rate, ".0f"), _figure(self.torch_rate, ".0f"), _figure(self.ratio, ".2f"), _figure(self.compiled_rate, ".0f"),
            _figure(self.compiled_step_ms / self.step_ms, ".2f"), _figure(self.peak / 1e9, ".2f"), _figure(self.torch_peak / 1e9, ".2f"),
            _figure(self.peak / self.torch_peak, ".2f"), _figure(self.loss_apart, ".1e"),
        )  # fmt: skip


@dataclass(frozen=True)
class Curve(Row):
    """Distances of loss curves: the root mean square of their differences over the steps.

    `exact` is ours from float64's, and `torch_exact` torch's from float64's. `apart` is ours from torch's first curve, and `torch_apart`
    torch's other curves from it. Each is a list over runs. All runs but the first have inputs perturbed by one unit of rounding.
    """

    exact: tuple[float, ...] = ()
    torch_exact: tuple[float, ...] = ()
    apart: tuple[float, ...] = ()
    torch_apart: tuple[float, ...] = ()
    first_loss: float = math.nan
    last_loss: float = math.nan

    TITLE = "Loss curves: root mean square of their distances, median / largest over runs from perturbed inputs"
    COLUMNS = ("loss", "ours, float64", "torch, float64", "ours, torch", "torch, torch")

    def figures(self) -> tuple[str, ...]:
        def text(values: Sequence[float]) -> str:
            return f"{median(values):.1e} / {max(values):.1e}" if values else "-"

        losses = "-" if math.isnan(self.last_loss) else f"{self.first_loss:.2f} to {self.last_loss:.2g}"
        return losses, *map(text, (self.exact, self.torch_exact, self.apart, self.torch_apart))


ROWS: dict[str, type[Row]] = {"evaluated": Evaluated, "trained": Trained, "loss curve": Curve}


def cases(modes: Sequence[str], training: bool, quick: bool, networks: Sequence[str] = ()) -> list[Case]:
    """The cases to measure. By default each kind is measured in the modes that it is used in, on some of torchvision's networks."""
    found = [Case("evaluated", name, n, mode) for name in networks or EVALUATED for mode in modes or EVALUATION_MODES for n in BATCHES]
    trained = {name: TRAINED.get(name, IMAGES) for name in networks or TRAINED}
    if training:
        for name, batches in trained.items():
            for mode in modes or TRAINING_MODES:
                found += [Case("trained", name, n, mode) for n in batches if n <= MOST_IMAGES.get(mode, n)]
        if not quick:
            found += [Case("loss curve", name, CURVE_IMAGES, mode) for name in trained for mode in modes or TRAINING_MODES]
    return found


def list_cases(settings: bench.Settings, modes: Sequence[str], training: bool, networks: Sequence[str]) -> int:
    """Print the cases' texts."""
    for case in bench.matching(settings.only, cases(modes, training, settings.quick, networks), str):
        print(case)
    return OK


# ---- a network and its mode


def _torchvision() -> Any:
    try:
        return require("torchvision.models")
    except RuntimeError as error:  # one that was built for another torch
        raise ToolError(f"--models needs a torchvision that fits torch, but this one can't be imported: {error}") from error


#: Arguments of networks whose names begin with one of these; without them weights would be loaded, or take seconds to draw.
_MORE: dict[tuple[str, ...], dict[str, Any]] = {
    ("deeplab", "fcn", "lraspp"): {"weights_backbone": None}, ("googlenet", "inception"): {"init_weights": False},
}  # fmt: skip


def network(torch: Any, name: str, place: str, seed: int) -> Any:
    """A network of torchvision's with random weights, without dropout, so that nothing is random in training.

    Its statistics are those of random images. With other statistics the results of many layers get ever smaller, until float16 underflows.
    """
    torch.manual_seed(seed)
    with torch.device(place):
        model = _torchvision().get_model(name, weights=None, **next((more for names, more in _MORE.items() if name.startswith(names)), {}))
        images = torch.randn(CALIBRATION_IMAGES, 3, IMAGE, IMAGE)
    for module in model.modules():
        if isinstance(getattr(module, "p", None), float):  # Dropout and StochasticDepth
            module.p = 0.0
        if hasattr(module, "layer_scale"):  # it begins at 1e-6, at which the block would have no effect
            torch.nn.init.ones_(module.layer_scale)
    norms = [(module, module.momentum) for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    for norm, _ in norms:
        norm.momentum = 1.0  # the statistics become the batch's
    with torch.no_grad():
        model.train()(images)
    for norm, momentum in norms:
        norm.momentum = momentum
    return model


def _dtype(mode: str) -> str:
    return str(MODES[mode].get("dtype", "float32"))


def _precision(mode: str) -> Any:
    return MODES[mode].get("precision", "fp32")


def _format(torch: Any, mode: str) -> Any:
    return torch.channels_last if MODES[mode].get("layout") == "NHWC" else torch.contiguous_format


@contextmanager
def arithmetic(torch: Any, mode: str) -> Iterator[None]:
    """Let torch compute float32 convolutions and matrix products as `mode` says; our networks use torch's matrix products too."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if _precision(mode) == "tf32" else "highest")
    try:
        with torch_precision(_precision(mode)):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def _output(found: Any) -> Any:
    """The output of a network; networks for segmentation return a dictionary."""
    return found["out"] if isinstance(found, dict) else found


def _relative(found: Any, reference: Any) -> float:
    return float((found.double() - reference).norm() / reference.norm())


def _host_times(calls: Sequence[Callable[[], Any]], wait: Callable[[], Any], effort: Effort) -> list[float]:
    """Milliseconds of each call with all of its work: medians of rounds in turn, each of several calls in a row."""
    single = [taken[0] for taken in wall_times([_once(call) for call in calls], 1, Effort(rounds=1, seconds=0), wait)]
    counts = [max(1, min(MOST_CALLS, math.ceil(ROUND / max(seconds, 1e-9)))) for seconds in single]

    def in_a_row(call: Callable[[], Any], count: int, _: int) -> None:
        for _ in range(count):
            call()

    ways = [partial(in_a_row, call, count) for call, count in zip(calls, counts, strict=True)]
    return [median(taken) / count * 1e3 for taken, count in zip(wall_times(ways, 1, effort, wait), counts, strict=True)]


def _once(call: Callable[[], Any]) -> Callable[[int], Any]:
    return lambda _: call()


# ---- evaluation


@cache
def _evaluated(torch: Any, name: str, mode: str, place: str, seed: int) -> tuple[Any, Any, Any]:
    """A network in float32, and ours and torch's in `mode`; made once for all numbers of images."""
    from pycuda_conv.nn import convert

    base = network(torch, name, place, seed).eval()
    theirs = copy.deepcopy(base).to(getattr(torch, _dtype(mode))).to(memory_format=_format(torch, mode))
    return base, convert(copy.deepcopy(theirs), precision=_precision(mode), linear=True), theirs


def _images(torch: Any, case: Case, place: str, seed: int) -> tuple[Any, Any]:
    """Random images, and the same images in the case's mode."""
    images = torch.randn(case.images, 3, IMAGE, IMAGE, device=place, generator=torch.Generator(place).manual_seed(seed))
    return images, images.to(getattr(torch, _dtype(case.mode))).contiguous(memory_format=_format(torch, case.mode))


def compile_ahead(torch: Any, chosen: Sequence[Case], place: str, seed: int) -> None:
    """Make the first calls of all networks to evaluate at once. Each waits for compilers, which so work side by side.

    A case itself reports its failure.
    """

    def first_call(case: Case) -> None:
        _, ours, _ = _evaluated(torch, case.network, case.mode, place, seed)
        with torch.no_grad():
            ours(_images(torch, case, place, seed)[1])

    evaluated = [case for case in chosen if case.what == "evaluated"]
    for case in evaluated:  # one after the other: convert traces, which threads can't do side by side
        with suppress(Exception):
            _evaluated(torch, case.network, case.mode, place, seed)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for one in track([pool.submit(first_call, case) for case in evaluated], lambda _: "compiling"):
            one.exception()


def measure_evaluation(torch: Any, case: Case, device: Device, effort: Effort, seed: int) -> Evaluated:
    """Compare the outputs with float64's, then time calls and graphs."""
    base, ours, theirs = _evaluated(torch, case.network, case.mode, device.name, seed)
    images, given = _images(torch, case, device.name, seed)
    ways = [lambda: _output(ours(given)), lambda: _output(theirs(given))]
    with torch.no_grad(), arithmetic(torch, case.mode):
        with bench.cudnn_set(torch, "benchmark", False):  # to try all of cuDNN's float64 kernels would take longer than the reference
            reference = _output(copy.deepcopy(base).double()(images.double()))
        settle(ways[0], torch.cuda.synchronize, device.all_compiled)  # type: ignore[attr-defined]  # CUDA's
        error, torch_error = (_relative(way(), reference) for way in ways)
        eager = _host_times(ways, torch.cuda.synchronize, effort)
        graphs, how = gpu_times(torch, [_once(way) for way in ways], 1, effort, captured=math.inf)
    graph = [median(taken) * 1e3 for taken in graphs] if how == "graph" else [math.nan] * 2
    verdict = "ok" if error <= WRONG * max(torch_error, LEAST_ERROR) else "WRONG"
    verdict = verdict if how == "graph" else f"{verdict}, not captured"
    return Evaluated(case, verdict, eager[0], eager[1], graph[0], graph[1], error, torch_error)


# ---- training


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
    dtype = getattr(torch, _dtype(mode))

    def step() -> Any:
        optimizer.zero_grad()
        with torch.autocast(images.device.type, dtype, enabled=dtype.itemsize == 2):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _in_training(torch: Any, base: Any, mode: str, ours: bool) -> Any:
    """A copy of the network to train; its weights are float32 in 16-bit modes too."""
    from pycuda_conv.nn import convert

    dtype = getattr(torch, _dtype(mode))
    model = copy.deepcopy(base).to(torch.float32 if dtype.itemsize == 2 else dtype).to(memory_format=_format(torch, mode)).train()
    return convert(model, precision=_precision(mode), fuse_training=True, linear=True) if ours else model


def _data(torch: Any, case: Case, place: str, size: int) -> tuple[Any, Any]:
    """Random images and labels."""
    images = torch.randn(case.images, 3, size, size, device=place).contiguous(memory_format=_format(torch, case.mode))
    return images.double() if _dtype(case.mode) == "float64" else images, torch.randint(0, CLASSES, (case.images,), device=place)


def _peak(torch: Any, model: Any, step: Callable[[], Any]) -> float:
    """Bytes that a step needs at most, beyond those in use before it."""
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before)


def _compiled_step(torch: Any, base: Any, images: Any, labels: Any, mode: str) -> list[Callable[[], Any]]:
    """The step of torch's network in ``torch.compile``, or nothing if that fails: it is only a comparison."""
    torch.compiler.reset()
    step = stepper(torch, torch.compile(_in_training(torch, base, mode, False)), images, labels, mode)
    try:
        for _ in range(FIRST_STEPS):
            step()
    except Exception as error:  # its compilers may raise anything
        log.warning("torch.compile failed, so it is left out: %s", error)
        return []
    return [step]


def measure_training(torch: Any, case: Case, device: Device, effort: Effort, seed: int, compile_too: bool) -> Trained:
    """Compare the first losses, then memory and times of a step."""
    place, wait = device.name, torch.cuda.synchronize
    base = network(torch, case.network, place, seed)
    images, labels = _data(torch, case, place, IMAGE)
    models = [_in_training(torch, base, case.mode, ours) for ours in (True, False)]
    with arithmetic(torch, case.mode):
        asked = convolutions(torch, copy.deepcopy(base).to("meta"), images.to("meta"), case.mode)  # compiled several at a time
        plans(asked, device)
        plans([problem for problem in asked if problem.direction == "fprop" and not problem.has_bias], device, noted=True)
        steps = [stepper(torch, model, images, labels, case.mode) for model in models]
        losses = [[float(step()) for _ in range(FIRST_STEPS)] for step in steps]
        apart = abs(losses[0][-1] / losses[1][-1] - 1)
        settle(steps[0], wait, device.all_compiled)  # type: ignore[attr-defined]  # CUDA's
        peaks = [_peak(torch, model, step) for model, step in zip(models, steps, strict=True)]
        if compile_too:
            steps += _compiled_step(torch, base, images, labels, case.mode)
        times = _host_times(steps, wait, effort)
    verdict = "ok" if apart <= LOSS_LIMITS[_dtype(case.mode)] else "WRONG"  # NaN is wrong
    return Trained(case, verdict, times[0], times[1], times[2] if len(times) > 2 else math.nan, peaks[0], peaks[1], apart)


# ---- loss curves


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
    images, labels = _data(torch, case, place, size)
    coarse = _precision(case.mode) == "tf32" or getattr(torch, _dtype(case.mode)).itemsize == 2
    unit = TF32_UNIT if _precision(case.mode) == "tf32" else torch.finfo(getattr(torch, _dtype(case.mode))).eps / 2

    def curve(ours: bool, mode: str, run: int) -> list[float]:
        given = perturbed(torch, images, unit, run)
        step = stepper(torch, _in_training(torch, base, mode, ours), given.double() if mode == "fp64" else given, labels, mode, CURVE_RATE)
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


# ---- the command


def _measured(torch: Any, case: Case, device: Device, settings: bench.Settings, seed: int) -> Row:
    """The case's row; a failure is the row's verdict."""
    effort = Effort(rounds=3, seconds=0.3) if settings.quick else Effort(rounds=7, seconds=1.5)
    try:
        if case.what == "evaluated":
            return measure_evaluation(torch, case, device, effort, seed)
        if case.what == "trained":
            return measure_training(torch, case, device, effort, seed, compile_too=not settings.quick)
        return measure_curve(torch, case, device.name, seed)
    except Exception as error:  # the other cases are still measured
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return ROWS[case.what](case, f"failed: {text[:300]}")


def run(settings: bench.Settings, modes: Sequence[str], training: bool, networks: Sequence[str]) -> int:
    """Measure :func:`cases`, print, and write the files that were asked for."""
    began = time.perf_counter()
    bench.refuse_suite_options(replace(settings, modes=("fp32",)), "--models", "networks")
    chosen = bench.matching(settings.only, cases(modes, training, settings.quick, networks), str)
    device = bench.gpu_for(settings, "--models")
    bench.check_paths(settings, "models")
    torch = require("torch")
    _torchvision()
    seed = secrets.randbelow(2**31) if settings.seed is None else settings.seed
    torch.cuda.set_device(device.name)
    out = console()
    rows: list[Row] = []
    used = tuple(dict.fromkeys(case.mode for case in chosen))
    with bench.cudnn_set(torch, "benchmark", True):
        machine = bench.describe(torch, device, ", ".join(used), bench.arithmetic(used), seed)
        words = [*networks, *["--training"] * training, *(["--mode", *modes] if modes else [])]
        words += ["--only", settings.only] if settings.only else []
        machine["command"] = " ".join(["pycuda-conv bench --models", *words, *["--quick"] * settings.quick])
        machine["method"] = (
            "medians of rounds by turns; eager calls and training steps by the host's clock, with all they set off; graphs by the GPU's"
        )
        for line in header_lines(machine):
            out.print(line, markup=False)
        compile_ahead(torch, chosen, device.name, seed)
        out.print(f"{time.perf_counter() - began:.0f} s until first calls were made")
        for case in track(chosen, str):
            started = time.perf_counter()
            if case.what != "evaluated":
                _evaluated.cache_clear()
            rows.append(_measured(torch, case, device, settings, seed))
            _say(rows[-1], time.perf_counter() - started)
            gc.collect()
            torch.cuda.empty_cache()
            if settings.json is not None:  # after every case, so that an interrupted run keeps what it has measured
                _write_report(settings, machine | {"seconds": time.perf_counter() - began}, rows)
    for kind in ROWS.values():
        own = [row for row in rows if isinstance(row, kind)]
        if own:
            out.print()
            out.print(row_table(own))
    for line in mean_lines(rows):
        out.print(line, markup=False)
    for row in rows:
        if row.verdict != "ok":
            out.print(f"{row.case}: {row.verdict}", markup=False, style="bold red", soft_wrap=True)
    if settings.pages is not None:
        write_between(settings.pages / RESULTS_PAGE, markdown(machine, rows), "models")
    out.print(f"{time.perf_counter() - began:.0f} s in all")
    return OK if all(row.verdict == "ok" for row in rows) else FAILED


def row_table(rows: Sequence[Row]) -> Table:
    """Rows of one kind as a table."""
    kind, styles = type(rows[0]), ["bold red" if row.verdict != "ok" else "" for row in rows]
    return table(kind.TITLE, kind.all_columns(), [row.cells() for row in rows], left=("network", "mode", "verdict"), styles=styles)


def _write_report(settings: bench.Settings, machine: dict[str, Any], rows: Sequence[Row]) -> None:
    assert settings.json is not None
    try:
        write_json(settings.json, {"machine": machine, "rows": [row.record() for row in rows]})
    except OSError as error:
        raise ToolError(f"can't write the report: {error}") from error


def _say(row: Row, seconds: float) -> None:
    """Print the row to stderr if there is no progress bar, in case the run is cut short."""
    if not sys.stderr.isatty():
        told = ", ".join(f"{name} {text}" for name, text in zip(row.COLUMNS, row.figures(), strict=True) if text != "-")
        print(f"{row.case}: {told or '-'}; {row.verdict}; {seconds:.0f} s", file=sys.stderr, flush=True)


def mean_lines(rows: Sequence[Row]) -> list[str]:
    """The geometric means of the ratios of all correct rows, by mode and number of images."""
    lines = []
    evaluated = [row for row in rows if isinstance(row, Evaluated) and row.verdict == "ok"]
    for mode, images in dict.fromkeys((row.case.mode, row.case.images) for row in evaluated):
        own = [row for row in evaluated if (row.case.mode, row.case.images) == (mode, images)]
        eager, graph = (geometric_mean(getattr(row, name) for row in own) for name in Evaluated.COMPUTED)
        lines.append(f"evaluated, {mode}, {images} images: geometric means eager {number(eager, '.2f')}, graph {number(graph, '.2f')}")
    trained = [row for row in rows if isinstance(row, Trained) and row.verdict == "ok"]
    for mode in dict.fromkeys(row.case.mode for row in trained):
        mean = geometric_mean(row.ratio for row in trained if row.case.mode == mode)
        lines.append(f"trained, {mode}: geometric mean {number(mean, '.2f')}")
    return lines


def markdown(machine: dict[str, Any], rows: Sequence[Row]) -> str:
    """The results for the page. `machine` is the header of the report."""
    parts = [measured_by(machine)]
    for kind in ROWS.values():
        own = [row for row in rows if isinstance(row, kind)]
        if own:
            parts += [f"{kind.TITLE}.", markdown_table(kind.all_columns(), 1, [row.cells() for row in own])]
    return "\n\n".join([*parts, *(f"- {line}" for line in mean_lines(rows))])
