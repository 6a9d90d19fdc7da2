"""Times of whole networks beside torch's: evaluated, and trained.

The sides are torch's network as it is, in ``torch.compile``, and in ``torch.compile`` with this package's backend: :func:`sides`. All get
the same weights and images, and are timed in turn. A failure is reported in its row, and the other rows are still measured.
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
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import Any, ClassVar

from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime import Device
from pycuda_conv.timing import Effort, gpu_times, wall_times
from pycuda_conv.tools import bench
from pycuda_conv.tools.networks import FEWER, input_shape, network, output
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
EVALUATED, BATCHES = ("resnet50", "mobilenet_v2", "efficientnet_b0", "convnext_tiny", "densenet121", "vae_decoder", "small_unet"), (1, 32)
EVALUATION_MODES = ("fp32", "tf32", "fp16-nhwc")
TRAINED = {"resnet50": (64, 256), "convnext_tiny": (32,), "mobilenet_v2": (64,)}
TRAINING_MODES = ("bf16-nhwc", "fp32")
IMAGES = (32,)  # numbers of images with which other networks are trained
MOST_IMAGES = {"fp32": 64}  # most images of a training step, by mode
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
class Side:
    """One way to run a network: its name, whether it is ours, the mode of ``torch.compile``, and whether torch may round to TF32."""

    name: str
    ours: bool = False
    compiled: str | None = None
    tf32: bool = False

    @property
    def captures(self) -> bool:
        """Whether it makes CUDA graphs itself, so that none can be captured of its calls."""
        return self.compiled in ("reduce-overhead", "max-autotune")


LIGHT, INDUCTOR, EAGER, COMPILED = "light", "inductor", "torch", "torch.compile"
OURS_REDUCED, REDUCED, AUTOTUNED = "ours, reduce-overhead", "torch.compile, reduce-overhead", "torch.compile, max-autotune"
EAGER_TF32, COMPILED_TF32 = "torch, TF32", "torch.compile, TF32"


def sides(mode: str, quick: bool, named: bool = False) -> list[Side]:
    """The sides of a case: ours in light mode and in inductor's, torch eager, and torch.compile's modes.

    Torch rounds float32 convolutions to TF32 unless it is told otherwise, so in fp32 its default is a rival too. `quick` leaves out what
    inductor compiles. "max-autotune", which takes minutes, is for networks that were `named`.
    """
    found = [Side(LIGHT, True, "light"), Side(EAGER)]
    if not quick:
        found += [Side(INDUCTOR, True, "default"), Side(COMPILED, compiled="default")]
        found += [Side(OURS_REDUCED, True, "reduce-overhead"), Side(REDUCED, compiled="reduce-overhead")]
        found += [Side(AUTOTUNED, compiled="max-autotune")] if named else []
    if mode.startswith("fp32"):
        found += [Side(EAGER_TF32, tf32=True)]
        found += [] if quick else [Side(COMPILED_TF32, compiled="default", tf32=True)]
    return found


def _ratio(times: dict[str, float], theirs: str, ours: str) -> float:
    return times.get(theirs, math.nan) / times.get(ours, math.nan)


@dataclass(frozen=True)
class Evaluated(Row):
    """By the sides' names: milliseconds of a call by the host's clock, and of a replayed CUDA graph by the GPU's; errors to float64."""

    wall_ms: dict[str, float] = field(default_factory=dict)
    graph_ms: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    fused: int = 0

    TITLE = "Evaluation, ms. Graphs by the GPU's clock, calls by the host's. Ratios are torch's time / ours"
    COLUMNS = (
        "fused", "graph: light", "inductor", "torch", "torch.compile", "/ light", "/ inductor", "call: light", "torch", "/ light",
        "ours reduced", "torch.compile", "/ ours", "autotuned", "TF32: torch", "torch.compile", "error", "torch's", "TF32's",
    )
    COMPUTED = ("light_ratio", "inductor_ratio", "reduced_ratio", "call_ratio")

    @property
    def light_ratio(self) -> float:
        """The time of torch.compile divided by ours in light mode, of graphs; torch eager's where nothing was compiled."""
        return _ratio(self.graph_ms, COMPILED if COMPILED in self.graph_ms else EAGER, LIGHT)

    @property
    def inductor_ratio(self) -> float:
        """The time of torch.compile divided by ours with inductor, of graphs."""
        return _ratio(self.graph_ms, COMPILED, INDUCTOR)

    @property
    def reduced_ratio(self) -> float:
        """The same with ``mode="reduce-overhead"`` on both sides, by the host's clock."""
        return _ratio(self.wall_ms, REDUCED, OURS_REDUCED)

    @property
    def call_ratio(self) -> float:
        """Torch eager's time divided by ours in light mode, by the host's clock."""
        return _ratio(self.wall_ms, EAGER, LIGHT)

    def figures(self) -> tuple[str, ...]:
        def time_of(times: dict[str, float], name: str) -> str:
            return _figure(times.get(name, math.nan), ".2f")

        graph, wall = self.graph_ms, self.wall_ms
        ours = max((self.errors.get(name, math.nan) for name in (LIGHT, INDUCTOR) if name in self.errors), default=math.nan)
        return (
            str(self.fused) if self.wall_ms else "-", *(time_of(graph, name) for name in (LIGHT, INDUCTOR, EAGER, COMPILED)),
            _figure(self.light_ratio, ".2f"), _figure(self.inductor_ratio, ".2f"), time_of(wall, LIGHT), time_of(wall, EAGER),
            _figure(self.call_ratio, ".2f"), time_of(wall, OURS_REDUCED), time_of(wall, REDUCED), _figure(self.reduced_ratio, ".2f"),
            time_of(wall, AUTOTUNED), time_of(graph, EAGER_TF32), time_of(graph, COMPILED_TF32), _figure(ours, ".1e"),
            _figure(self.errors.get(EAGER, math.nan), ".1e"), _figure(self.errors.get(EAGER_TF32, math.nan), ".1e"),
        )  # fmt: skip


@dataclass(frozen=True)
class Trained(Row):
    """By the sides' names: milliseconds of a step (forward, loss, backward and SGD) by the host's clock.

    `peak` and `torch_peak` are the bytes that a step in light mode and torch eager's need at most beyond weights and images. `apart` has
    the relative differences of the losses of the first steps from torch eager's.
    """

    step_ms: dict[str, float] = field(default_factory=dict)
    apart: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    peak: float = math.nan
    torch_peak: float = math.nan

    TITLE = "Training, images per second by the host's clock. Ratios are ours / torch's"
    COLUMNS = (
        "light", "inductor", "torch", "torch.compile", "reduced", "autotuned", "light / torch", "light / compiled", "inductor / compiled",
        "peak GB", "torch's", "of it", "loss apart",
    )
    COMPUTED = ("light_ratio", "light_compiled_ratio", "inductor_ratio")

    @property
    def light_ratio(self) -> float:
        """Torch eager's time divided by ours in light mode."""
        return _ratio(self.step_ms, EAGER, LIGHT)

    @property
    def light_compiled_ratio(self) -> float:
        """The time of torch.compile divided by ours in light mode."""
        return _ratio(self.step_ms, COMPILED, LIGHT)

    @property
    def inductor_ratio(self) -> float:
        """The time of torch.compile divided by ours with inductor."""
        return _ratio(self.step_ms, COMPILED, INDUCTOR)

    def rate(self, side: str) -> float:
        """Images per second."""
        return self.case.images / self.step_ms.get(side, math.nan) * 1e3

    def figures(self) -> tuple[str, ...]:
        return (
            *(_figure(self.rate(name), ".0f") for name in (LIGHT, INDUCTOR, EAGER, COMPILED, REDUCED, AUTOTUNED)),
            *(_figure(getattr(self, name), ".2f") for name in self.COMPUTED), _figure(self.peak / 1e9, ".2f"),
            _figure(self.torch_peak / 1e9, ".2f"), _figure(self.peak / self.torch_peak, ".2f"),
            _figure(max(self.apart.values(), default=math.nan), ".1e"),
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
    found = []
    for name in networks or EVALUATED:
        counts = dict.fromkeys(min(n, FEWER.get(name, n)) for n in BATCHES)
        found += [Case("evaluated", name, n, mode) for mode in modes or EVALUATION_MODES for n in counts]
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
def _evaluated(torch: Any, name: str, mode: str, place: str, seed: int) -> tuple[Any, Any]:
    """A network in float32, and in `mode`; made once for all numbers of images."""
    base = network(torch, name, place, seed).eval()
    return base, copy.deepcopy(base).to(getattr(torch, _dtype(mode))).to(memory_format=_format(torch, mode))


def _images(torch: Any, case: Case, place: str, seed: int) -> tuple[Any, Any]:
    """Random images, and the same images in the case's mode."""
    shape = case.images, *input_shape(case.network)
    images = torch.randn(shape, device=place, generator=torch.Generator(place).manual_seed(seed))
    return images, images.to(getattr(torch, _dtype(case.mode))).contiguous(memory_format=_format(torch, case.mode))


def made(torch: Any, model: Any, side: Side, mode: str) -> Any:
    """A copy of the network as the side runs it."""
    model = copy.deepcopy(model)
    if side.ours:
        from pycuda_conv.nn import backend

        return torch.compile(model, backend=backend, options={"mode": side.compiled, "precision": _precision(mode)})
    if side.compiled:
        return torch.compile(model, mode=None if side.compiled == "default" else side.compiled)
    return model


def compile_ahead(torch: Any, chosen: Sequence[Case], place: str, seed: int) -> None:
    """Make the first calls of all networks to evaluate at once. Each waits for compilers of kernels, which so work side by side.

    A case itself reports its failure.
    """
    from pycuda_conv.nn import convert

    def first_call(case: Case) -> None:
        with torch.no_grad():
            convert(copy.deepcopy(_evaluated(torch, case.network, case.mode, place, seed)[1]), _precision(case.mode))(
                _images(torch, case, place, seed)[1]
            )

    evaluated = [case for case in chosen if case.what == "evaluated"]
    for case in evaluated:
        with suppress(Exception):
            _evaluated(torch, case.network, case.mode, place, seed)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for one in track([pool.submit(first_call, case) for case in evaluated], lambda _: "compiling"):
            one.exception()


def _in_tf32(torch: Any, call: Callable[[], Any]) -> Callable[[], Any]:
    def made() -> Any:
        with arithmetic(torch, "tf32"):
            return call()

    return made


def _begun(
    torch: Any, chosen: Sequence[Side], step_of: Callable[[Side], Callable[[], Any]], device: Device
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """The sides' calls, each made often enough to be settled; and why others failed. A rival that fails is left out."""
    calls: dict[str, Callable[[], Any]] = {}
    failed: dict[str, str] = {}
    for side in chosen:
        try:
            call = step_of(side)
            call = _in_tf32(torch, call) if side.tf32 else call
            call()
            if side.ours:
                settle(call, torch.cuda.synchronize, device.all_compiled)  # type: ignore[attr-defined]  # CUDA's
            else:
                for _ in range(FIRST_STEPS):
                    call()
        except Exception as error:  # compilers may raise anything
            if side.name in (LIGHT, EAGER):
                raise
            failed[side.name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            log.warning("%s failed, so it is left out: %s", side.name, error)
            continue
        calls[side.name] = call
    return calls, failed


def measure_evaluation(
    torch: Any, case: Case, device: Device, effort: Effort, seed: int, quick: bool = True, named: bool = False
) -> Evaluated:
    """Compare the outputs with float64's, then time calls and graphs."""
    from pycuda_conv.nn.compiler import graphs_of

    base, model = _evaluated(torch, case.network, case.mode, device.name, seed)
    images, given = _images(torch, case, device.name, seed)
    chosen = sides(case.mode, quick, named)
    torch.compiler.reset()  # torch compiles few graphs of a function, and those of the case before count
    models: dict[str, Any] = {}

    def step_of(side: Side) -> Callable[[], Any]:
        own = models[side.name] = made(torch, model, side, case.mode)
        return lambda: output(own(given))

    with torch.no_grad(), arithmetic(torch, case.mode):
        with bench.cudnn_set(torch, "benchmark", False):  # to try all of cuDNN's float64 kernels would take longer than the reference
            reference = output(copy.deepcopy(base).double()(images.double()))
        ways, failed = _begun(torch, chosen, step_of, device)
        errors = {name: _relative(way(), reference) for name, way in ways.items()}
        wall = dict(zip(ways, _host_times(list(ways.values()), torch.cuda.synchronize, effort), strict=True))
        captured = [side.name for side in chosen if side.name in ways and not side.captures]
        graphs, how = gpu_times(torch, [_once(ways[name]) for name in captured], 1, effort, captured=math.inf)
    graph = {name: median(taken) * 1e3 for name, taken in zip(captured, graphs, strict=True)} if how == "graph" else {}
    ours = [errors[side.name] for side in chosen if side.ours and side.name in errors]
    verdict = "ok" if max(ours) <= WRONG * max(errors[EAGER], LEAST_ERROR) else "WRONG"
    verdict = verdict if how == "graph" else f"{verdict}, not captured"
    fused = max((len(one.fused) for one in graphs_of(models[LIGHT])), default=0)
    return Evaluated(case, verdict, wall, graph, errors, failed, fused)


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
            loss = torch.nn.functional.cross_entropy(output(model(images)), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _in_training(torch: Any, base: Any, mode: str, side: Side) -> Any:
    """A copy of the network to train; its weights are float32 in 16-bit modes too."""
    dtype = getattr(torch, _dtype(mode))
    model = copy.deepcopy(base).to(torch.float32 if dtype.itemsize == 2 else dtype).to(memory_format=_format(torch, mode)).train()
    return made(torch, model, side, mode)


def _data(torch: Any, case: Case, place: str, shape: Sequence[int]) -> tuple[Any, Any]:
    """Random images and labels."""
    images = torch.randn(case.images, *shape, device=place).contiguous(memory_format=_format(torch, case.mode))
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


def measure_training(
    torch: Any, case: Case, device: Device, effort: Effort, seed: int, quick: bool = True, named: bool = False
) -> Trained:
    """Compare the first losses, then memory and times of a step."""
    place, wait = device.name, torch.cuda.synchronize
    base = network(torch, case.network, place, seed)
    images, labels = _data(torch, case, place, input_shape(case.network))
    chosen = [side for side in sides(case.mode, quick, named) if not side.tf32 and side.name != OURS_REDUCED]
    torch.compiler.reset()
    losses: dict[str, float] = {}

    def step_of(side: Side) -> Callable[[], Any]:
        models[side.name] = model = _in_training(torch, base, case.mode, side)
        step = stepper(torch, model, images, labels, case.mode)
        losses[side.name] = [float(step()) for _ in range(FIRST_STEPS)][-1]
        return step

    models: dict[str, Any] = {}
    with arithmetic(torch, case.mode):
        asked = convolutions(torch, copy.deepcopy(base).to("meta"), images.to("meta"), case.mode)  # compiled several at a time
        plans(asked, device)
        plans([problem for problem in asked if problem.direction == "fprop" and not problem.has_bias], device, with_moments=True)
        steps, failed = _begun(torch, chosen, step_of, device)
        apart = {name: abs(losses[name] / losses[EAGER] - 1) for name in steps if name in (LIGHT, INDUCTOR)}
        peaks = [_peak(torch, models[name], steps[name]) for name in (LIGHT, EAGER)]
        times = dict(zip(steps, _host_times(list(steps.values()), wait, effort), strict=True))
    verdict = "ok" if all(one <= LOSS_LIMITS[_dtype(case.mode)] for one in apart.values()) else "WRONG"  # NaN is wrong
    return Trained(case, verdict, times, apart, failed, *peaks)


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
    images, labels = _data(torch, case, place, (3, size, size))
    coarse = _precision(case.mode) == "tf32" or getattr(torch, _dtype(case.mode)).itemsize == 2
    unit = TF32_UNIT if _precision(case.mode) == "tf32" else torch.finfo(getattr(torch, _dtype(case.mode))).eps / 2

    def curve(ours: bool, mode: str, run: int) -> list[float]:
        given = perturbed(torch, images, unit, run)
        torch.compiler.reset()
        side = Side(LIGHT, True, "light") if ours else Side(EAGER)
        step = stepper(torch, _in_training(torch, base, mode, side), given.double() if mode == "fp64" else given, labels, mode, CURVE_RATE)
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


def _measured(torch: Any, case: Case, device: Device, settings: bench.Settings, seed: int, named: bool) -> Row:
    """The case's row; a failure is the row's verdict."""
    effort = Effort(rounds=3, seconds=0.3) if settings.quick else Effort(rounds=7, seconds=1.5)
    try:
        if case.what == "evaluated":
            return measure_evaluation(torch, case, device, effort, seed, settings.quick, named)
        if case.what == "trained":
            return measure_training(torch, case, device, effort, seed, settings.quick, named)
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
            rows.append(_measured(torch, case, device, settings, seed, bool(networks)))
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


_WORDS = {
    "light_ratio": "light", "inductor_ratio": "inductor", "reduced_ratio": "reduce-overhead", "call_ratio": "calls in light mode",
    "light_compiled_ratio": "light over torch.compile",
}  # fmt: skip


def _means(rows: Sequence[Row], ratios: Sequence[str]) -> str:
    words = []
    for name in ratios:
        known = [value for value in (getattr(row, name) for row in rows) if not math.isnan(value)]
        words += [f"{_WORDS[name]} {number(geometric_mean(known), '.2f')}"] if known else []
    return ", ".join(words)


def mean_lines(rows: Sequence[Row]) -> list[str]:
    """The geometric means of the ratios of all correct rows, by mode and number of images."""
    lines = []
    evaluated = [row for row in rows if isinstance(row, Evaluated) and row.verdict == "ok"]
    for mode, images in dict.fromkeys((row.case.mode, row.case.images) for row in evaluated):
        own = [row for row in evaluated if (row.case.mode, row.case.images) == (mode, images)]
        lines.append(f"evaluated, {mode}, {images} images: geometric means {_means(own, Evaluated.COMPUTED)}")
    trained = [row for row in rows if isinstance(row, Trained) and row.verdict == "ok"]
    for mode in dict.fromkeys(row.case.mode for row in trained):
        own_ones = [row for row in trained if row.case.mode == mode]
        lines.append(f"trained, {mode}: geometric means {_means(own_ones, Trained.COMPUTED)}")
    return lines


def markdown(machine: dict[str, Any], rows: Sequence[Row]) -> str:
    """The results for the page. `machine` is the header of the report."""
    parts = [measured_by(machine)]
    for kind in ROWS.values():
        own = [row for row in rows if isinstance(row, kind)]
        if own:
            parts += [f"{kind.TITLE}.", markdown_table(kind.all_columns(), 1, [row.cells() for row in own])]
    return "\n\n".join([*parts, *(f"- {line}" for line in mean_lines(rows))])
