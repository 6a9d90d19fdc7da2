"""Times of whole networks beside torch's: evaluated, and trained.

The sides are torch's network as it is, in ``torch.compile``, and in ``torch.compile`` with this package's backend: see
:func:`pycuda_conv.tools.rivals.sides`. All get the same weights and images, and are timed in turn. A failure is reported in its row, and
the other rows are still measured.
"""

from __future__ import annotations

import copy
import gc
import logging
import math
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from pycuda_conv.runtime import Device, get_device
from pycuda_conv.timing import Effort, gpu_times, wall_times
from pycuda_conv.tools import ahead, bench
from pycuda_conv.tools.model_rows import ROWS, Case, Evaluated, Row, Trained, excerpt, markdown, mean_lines, row_table
from pycuda_conv.tools.networks import candidates, input_shape, most_images, network, output
from pycuda_conv.tools.oracle import cudnn_set
from pycuda_conv.tools.plans import plans
from pycuda_conv.tools.report import FRONT_PAGE, RESULTS_PAGE, header_lines, median, write_between, write_json
from pycuda_conv.tools.rivals import (
    EAGER,
    INDUCTOR,
    LIGHT,
    Side,
    arithmetic,
    begin,
    convolutions_share,
    dtype_of,
    first_calls,
    format_of,
    laid_out,
    made,
    sides,
)
from pycuda_conv.tools.terminal import FAILED, OK, ToolError, console, require, track
from pycuda_conv.tools.training_steps import (
    CURVE_IMAGES,
    convolutions,
    data,
    exact_gradients,
    gradient_error,
    gradients,
    in_training,
    measure_curve,
    peak,
    stepper,
)

log = logging.getLogger("pycuda_conv")

#: Without names after --models: networks to evaluate, each with these numbers of images, and networks to train, name -> images.
EVALUATED = (
    "resnet50", "efficientnet_b0", "mobilenet_v2", "convnext_tiny", "segformer_b0", "densenet121", "regnet_y_1_6gf", "vae_decoder",
    "small_unet", "time_unet",
)  # fmt: skip
BATCHES = (32, 1)
EVALUATION_MODES = ("fp16-nhwc", "fp32", "tf32")
TRAINED = {
    "resnet50": (64, 256), "efficientnet_b0": (64,), "mobilenet_v2": (64,), "convnext_tiny": (32,), "regnet_y_1_6gf": (64,),
    "densenet121": (32,),
}  # fmt: skip
TRAINING_MODES = ("bf16-nhwc", "fp32")
IMAGES = (32,)  # numbers of images with which other networks are trained
MOST_IMAGES = {"fp32": 64}  # most images of a training step, by mode
MOST_EXACT = 64  # most images whose gradients are computed in float64 too
LEAST_SHARE = 0.3  # of torch eager's time that convolutions take, of networks that are drawn
AHEAD = 0.6  # the part of --seconds that first calls in other processes may take

WRONG = 10  # an error above so many times torch's is not rounding
LEAST_ERROR = 1e-6  # relative error that float32 leaves after so many layers in any case
LOSS_LIMITS = {"float32": 1e-2, "float64": 1e-2, "float16": 5e-2, "bfloat16": 5e-2}  # relative
ROUND = 0.05  # seconds that one side's calls should take in a round, by the host's clock
MOST_CALLS = 50  # most calls in such a round


def cases(modes: Sequence[str], training: bool, quick: bool, networks: Sequence[str] = ()) -> list[Case]:
    """The cases to measure. By default each kind is measured in the modes that it is used in, on some of torchvision's networks.

    Those that tell most come first, in case the time does not suffice for all.
    """
    found = []
    for i in range(len(BATCHES)):
        for mode in modes or EVALUATION_MODES:
            for name in networks or EVALUATED:
                counts = list(dict.fromkeys(most_images(name, n) for n in BATCHES))
                found += [Case("evaluated", name, n, mode) for n in counts[i : i + 1]]
    trained = {name: TRAINED.get(name, tuple(most_images(name, n) for n in IMAGES)) for name in networks or TRAINED}
    if training:
        for mode in modes or TRAINING_MODES:
            for name, batches in trained.items():
                found += [Case("trained", name, n, mode) for n in batches if n <= MOST_IMAGES.get(mode, n)]
        if not quick:
            found += [Case("loss curve", name, CURVE_IMAGES, mode) for name in trained for mode in modes or TRAINING_MODES]
    return found


def list_cases(settings: bench.Settings, modes: Sequence[str], training: bool, networks: Sequence[str]) -> int:
    """Print the cases' texts."""
    for case in bench.matching(settings.only, cases(modes, training, settings.quick, networks), str):
        print(case)
    return OK


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
    return base, laid_out(torch, copy.deepcopy(base).to(getattr(torch, dtype_of(mode))), mode)


def _images(torch: Any, case: Case, place: str, seed: int) -> tuple[Any, Any]:
    """Random images, and the same images in the case's mode."""
    shape = case.images, *input_shape(case.network)
    images = torch.randn(shape, device=place, generator=torch.Generator(place).manual_seed(seed))
    return images, images.to(getattr(torch, dtype_of(case.mode))).contiguous(memory_format=format_of(torch, case.mode, images.dim()))


def sides_of(case: Case, quick: bool, named: bool) -> list[Side]:
    """The sides of a case. One image is for calls by the host's clock, which inductor's code is not made for."""
    if case.what == "evaluated":
        return sides(case.mode, quick or case.images == 1, named)
    return [side for side in sides(case.mode, quick, named) if not side.tf32]


def evaluation_of(torch: Any, case: Case, place: str, seed: int) -> tuple[Callable[[Side], Callable[[], Any]], dict[str, Any]]:
    """side -> a call of the network as that side runs it; and the networks made so, by the sides' names."""
    _, model = _evaluated(torch, case.network, case.mode, place, seed)
    _, given = _images(torch, case, place, seed)
    models: dict[str, Any] = {}

    def step_of(side: Side) -> Callable[[], Any]:
        own = models[side.name] = made(torch, model, side, case.mode)
        return lambda: output(own(given))

    return step_of, models


def measure_evaluation(torch: Any, case: Case, device: Device, effort: Effort, seed: int, chosen: Sequence[Side]) -> Evaluated:
    """Compare the outputs with float64's, then time calls and graphs."""
    from pycuda_conv.nn.compiler import graphs_of

    base, _ = _evaluated(torch, case.network, case.mode, device.name, seed)
    images, _ = _images(torch, case, device.name, seed)
    torch.compiler.reset()  # torch compiles few graphs of a function, and those of the case before count
    step_of, models = evaluation_of(torch, case, device.name, seed)
    with torch.no_grad(), arithmetic(torch, case.mode):
        with cudnn_set(torch, "benchmark", False):  # to try all of cuDNN's float64 kernels would take longer than the reference
            reference = output(copy.deepcopy(base).double()(images.double()))
        begun = begin(torch, chosen, step_of, device)
        ways = begun.calls
        errors = {name: _relative(way(), reference) for name, way in ways.items()}
        wall = dict(zip(ways, _host_times(list(ways.values()), torch.cuda.synchronize, effort), strict=True))
        captured = [side.name for side in chosen if side.name in ways and not side.captures]
        graphs, how = gpu_times(torch, [_once(ways[name]) for name in captured], 1, effort, captured=math.inf)
        share = convolutions_share(torch, ways[EAGER])
    graph = {name: median(taken) * 1e3 for name, taken in zip(captured, graphs, strict=True)} if how == "graph" else {}
    ours = [errors[side.name] for side in chosen if side.ours and side.name in errors]
    verdict = "ok" if max(ours) <= WRONG * max(errors[EAGER], LEAST_ERROR) else "WRONG"
    verdict = verdict if how == "graph" else f"{verdict}, not captured"
    fused = max((len(one.fused) for one in graphs_of(models[LIGHT])), default=0)
    return Evaluated(case, verdict, wall, graph, errors, begun.failed, fused, begun.first_s, begun.early_ms, share)


def drawn(torch: Any, place: str, seed: int, count: int) -> list[str]:
    """Names of `count` of timm's networks, drawn by a seed, that torch eager evaluates and whose convolutions take enough of that time."""
    found: list[str] = []
    for name in candidates(torch, seed):
        case = Case("evaluated", name, BATCHES[0], "fp16-nhwc")
        try:
            with torch.no_grad():
                call = evaluation_of(torch, case, place, seed)[0](Side(EAGER))
                if not bool(torch.isfinite(call()).all()):
                    raise ToolError("its results are not finite in float16")
                share = convolutions_share(torch, call)
        except Exception as error:  # a network may need what is not here, or refuse such images
            print(f"{name}: {' '.join(f'{type(error).__name__}: {error}'.split())[:200]}", file=sys.stderr)
            continue
        if share < LEAST_SHARE:  # NaN is not
            print(f"{name}: convolutions are {share:.0%} of torch eager's time", file=sys.stderr)
            continue
        found.append(name)
        if len(found) == count:
            break
    return found


# ---- training


def training_of(torch: Any, case: Case, place: str, seed: int) -> tuple[Callable[[Side], Callable[[], Any]], dict[str, Any], Any]:
    """side -> a training step of the network as that side runs it; the networks made so; and weights, images and labels."""
    base = network(torch, case.network, place, seed)
    images, labels = data(torch, case, place, input_shape(case.network))
    models: dict[str, Any] = {}

    def step_of(side: Side) -> Callable[[], Any]:
        models[side.name] = model = in_training(torch, base, case.mode, side)
        return stepper(torch, model, images, labels, case.mode)

    return step_of, models, (base, images, labels)


def compile_gradients(torch: Any, case: Case, base: Any, images: Any, device: Device) -> None:
    """Compile the kernels of a training step, several at a time."""
    asked = convolutions(torch, copy.deepcopy(base).to("meta"), images.to("meta"), case.mode)
    plans(asked, device)
    plans([problem for problem in asked if problem.direction == "fprop" and not problem.has_bias], device, with_moments=True)


def measure_training(torch: Any, case: Case, device: Device, effort: Effort, seed: int, chosen: Sequence[Side]) -> Trained:
    """Compare the first losses and gradients, then memory and times of a step."""
    torch.compiler.reset()
    step_of, models, (base, images, labels) = training_of(torch, case, device.name, seed)
    losses: dict[str, float] = {}
    errors: dict[str, float] = {}
    with arithmetic(torch, case.mode):
        exact = None
        if case.images <= MOST_EXACT:
            with cudnn_set(torch, "benchmark", False):
                exact = exact_gradients(torch, base, images, labels)

        def note(side: str, number: int, loss: Any) -> None:
            losses[side] = float(loss)
            if number == 0 and exact is not None:
                errors[side] = gradient_error(gradients(models[side]), exact)

        compile_gradients(torch, case, base, images, device)
        begun = begin(torch, chosen, step_of, device, note)
        exact, steps = None, begun.calls
        apart = {name: abs(losses[name] / losses[EAGER] - 1) for name in steps if name in (LIGHT, INDUCTOR)}
        peaks = [peak(torch, models[name], steps[name]) for name in (LIGHT, EAGER)]
        times = dict(zip(steps, _host_times(list(steps.values()), torch.cuda.synchronize, effort), strict=True))
        own = {side.name: steps[side.name] for side in chosen if side.name in steps and not side.captures}
        graphs = _graphs(torch, own, effort, max(peaks))
    right = all(one <= LOSS_LIMITS[dtype_of(case.mode)] for one in apart.values())  # NaN is wrong
    limit = WRONG * max(errors.get(EAGER, math.inf), LEAST_ERROR)
    right = right and all(errors.get(name, 0.0) <= limit for name in (LIGHT, INDUCTOR))
    return Trained(case, "ok" if right else "WRONG", times, apart, begun.failed, peaks[0], peaks[1], graphs, errors)


def _graphs(torch: Any, steps: dict[str, Callable[[], Any]], effort: Effort, needs: float) -> dict[str, float]:
    """Milliseconds of each step as a replayed CUDA graph, by turns; one after the other if the GPU has no room for what all of them need.

    A graph keeps all memory of its step, about so many bytes as the step `needs` at most.
    """
    gc.collect()
    torch.cuda.empty_cache()
    together = 2 * needs * len(steps) < torch.cuda.mem_get_info()[0]
    found = {}
    for names in [list(steps)] if together else [[name] for name in steps]:
        taken, how = gpu_times(torch, [_once(steps[name]) for name in names], 1, effort, captured=math.inf)
        found.update({name: median(one) * 1e3 for name, one in zip(names, taken, strict=True) if how == "graph"})
        gc.collect()
        torch.cuda.empty_cache()
    return found


# ---- the command


def _measured(torch: Any, case: Case, device: Device, settings: bench.Settings, seed: int, chosen: Sequence[Side]) -> Row:
    """The case's row, with the sides that were chosen; a failure is the row's verdict."""
    short = settings.quick or settings.seconds is not None
    effort = Effort(rounds=3, seconds=0.3) if short else Effort(rounds=7, seconds=1.5)
    try:
        if case.what == "evaluated":
            return measure_evaluation(torch, case, device, effort, seed, chosen)
        if case.what == "trained":
            return measure_training(torch, case, device, effort, seed, chosen)
        return measure_curve(torch, case, device.name, seed)
    except Exception as error:  # the other cases are still measured
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return ROWS[case.what](case, f"failed: {text[:300]}")


def run(settings: bench.Settings, modes: Sequence[str], training: bool, networks: Sequence[str], draw: int = 0) -> int:
    """Measure :func:`cases`, print, and write the files that were asked for.

    If there are networks of timm's to `draw`, these are measured besides those that are named.
    """
    began = time.perf_counter()
    bench.refuse_suite_options(replace(settings, modes=("fp32",)), "--models", "networks")
    if not draw:
        bench.matching(settings.only, cases(modes, training, settings.quick, networks), str)
    device = bench.gpu_for(settings, "--models")
    bench.check_paths(settings, "models")
    torch = require("torch")
    seed = secrets.randbelow(2**31) if settings.seed is None else settings.seed
    torch.cuda.set_device(device.name)
    out = console()
    rows: list[Row] = []
    names = [*networks, *(drawn(torch, device.name, seed, draw) if draw else ())]
    chosen = bench.matching(settings.only, cases(modes, training, settings.quick, names), str)
    used = tuple(dict.fromkeys(case.mode for case in chosen))
    with cudnn_set(torch, "benchmark", True):
        machine = bench.describe(torch, device, ", ".join(used), bench.arithmetic(used), seed)
        words = [*networks, *(["--draw", str(draw)] if draw else []), *["--training"] * training, *(["--mode", *modes] if modes else [])]
        words += ["--only", settings.only] if settings.only else []
        words += [] if settings.seconds is None else ["--seconds", f"{settings.seconds:g}"]
        machine["command"] = " ".join(["pycuda-conv bench --models", *words, *["--quick"] * settings.quick])
        machine["method"] = (
            "medians of rounds by turns; calls and training steps by the host's clock, with all they set off; graphs by the GPU's"
        )
        for line in header_lines(machine):
            out.print(line, markup=False)
        end = math.inf if settings.seconds is None else began + settings.seconds
        by_case = {case: sides_of(case, settings.quick, bool(networks)) for case in chosen if case.what != "loss curve"}
        ready = ahead.first_calls(list(by_case.items()), device.name, seed, began + AHEAD * (end - began))
        if settings.seconds is not None:  # there is no time for what inductor has not compiled yet
            for case, asked in by_case.items():
                missed = [one for one in asked if one.by_inductor and (case, one.name) not in ready]
                by_case[case] = [one for one in asked if one not in missed]
                for one in missed:
                    log.warning("%s: %s is left out: it was not compiled in time", case, one.name)
        out.print(f"{time.perf_counter() - began:.0f} s until first calls were made")
        for case in track(chosen, str):
            started = time.perf_counter()
            if started > end:
                out.print(f"{len(chosen) - len(rows)} of {len(chosen)} cases were not begun within {settings.seconds:g} s", markup=False)
                break
            if case.what != "evaluated":
                _evaluated.cache_clear()
            rows.append(_measured(torch, case, device, settings, seed, by_case.get(case, ())))
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
        write_between(settings.pages / FRONT_PAGE, excerpt(machine, rows), "models")
    out.print(f"{time.perf_counter() - began:.0f} s in all")
    return OK if all(row.verdict == "ok" for row in rows) else FAILED


def _write_report(settings: bench.Settings, machine: dict[str, Any], rows: Sequence[Row]) -> None:
    assert settings.json is not None
    try:
        write_json(settings.json, {"machine": machine, "rows": [row.record() for row in rows]})
    except OSError as error:
        raise ToolError(f"can't write the report: {error}") from error


def _say(row: Row, seconds: float) -> None:
    """Print the row to stderr if there is no progress bar, in case the run is cut short."""
    if not sys.stderr.isatty():
        figures = ", ".join(f"{name} {text}" for name, text in zip(row.COLUMNS, row.figures(), strict=True) if text != "-")
        print(f"{row.case}: {figures or '-'}; {row.verdict}; {seconds:.0f} s", file=sys.stderr, flush=True)


# ---- in a process of its own


def child(what: str, name: str, images: str, mode: str, place: str, seed: str, *names: str) -> None:
    """Make the first calls of a case's sides of these names: see :mod:`pycuda_conv.tools.ahead`."""
    torch = require("torch")
    torch.backends.cudnn.benchmark = True
    case, device = Case(what, name, int(images), mode), get_device(place)
    chosen = [side for side in sides_of(case, False, True) if side.name in names]
    with arithmetic(torch, mode), torch.set_grad_enabled(what == "trained"):
        if what == "evaluated":
            step_of, _ = evaluation_of(torch, case, place, int(seed))
        else:
            step_of, _, (base, given, _) = training_of(torch, case, place, int(seed))
            if any(side.ours for side in chosen):
                compile_gradients(torch, case, base, given, device)
        first_calls(torch, chosen, step_of, device)


if __name__ == "__main__":
    child(*sys.argv[1:])
