"""Compiles kernels ahead of their use: those of a model's layers, of the benchmark's, or those that random layers need most often."""

from __future__ import annotations

import math
import multiprocessing
import time
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from pycuda_conv import background, engines, interrupt
from pycuda_conv.elements import DTYPE_BYTES
from pycuda_conv.engines.geometry import ceil
from pycuda_conv.engines.images import window as images
from pycuda_conv.engines.nn import batch_norm
from pycuda_conv.plan import as_called
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime import binaries
from pycuda_conv.runtime.base import Device, KernelLaunch, source_of
from pycuda_conv.runtime.cache import trusted_folder
from pycuda_conv.runtime.compiler import CompileError, Compiler, compiler
from pycuda_conv.runtime.target import Target
from pycuda_conv.runtime.workers import cores
from pycuda_conv.tools.families import draw
from pycuda_conv.tools.kernels import besides
from pycuda_conv.tools.plans import Finished, compile_together
from pycuda_conv.tools.suite import core, in_mode, suite
from pycuda_conv.tools.terminal import FAILED, OK, ToolError, console, named_device, require, track
from pycuda_conv.tune import lookup

RANDOM = 150  # problems of each family, from which the most used texts are counted
#: For a wheel: the same number, and the texts that it ships by target. On Hopper they serve three quarters of random problems.
WHEEL_RANDOM, WHEEL, WHEEL_OTHERS = 400, {"sm_90a": 1000}, 400
MANY_CORES = 4  # with at least so many, several processes plan the problems
#: Common networks: numbers of images, the arithmetic, and channels and pixels of their stages.
BATCHES, NETWORK_MODES = (1, 8, 64), ("fp32", "tf32-nhwc", "fp16", "fp16-nhwc", "bf16", "bf16-nhwc")
STAGES = ((64, 56), (128, 28), (256, 14), (512, 7))


@dataclass(frozen=True)
class Settings:
    """The arguments of ``pycuda-conv warm``."""

    model: str | None = None
    size: tuple[int, ...] = (8, 3, 224, 224)
    #: None if none was named
    mode: tuple[str, ...] | None = None
    training: bool = False
    random: int | None = None
    constants: bool = False
    gpu: str | None = None
    device: Any = None

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes that were named, or fp32."""
        return self.mode or ("fp32",)


@dataclass(frozen=True)
class Text:
    """A kernel's text and its target."""

    source: str
    arch: str
    kernel: str


def texts(launches: Iterable[KernelLaunch], target: Target) -> Iterator[Text]:
    """The texts of launches."""
    for launch in launches:
        yield Text(launch.source(), target.arch(launch), launch.file or launch.kernel)


def launches_of(problem: ConvProblem, target: Device, constants: bool = False, with_moments: bool = False) -> list[KernelLaunch]:
    """The launches of a call of `problem`; with `constants` also those of kernels that know the layer's constants."""
    problem = as_called(problem, target)
    found = lookup(problem, target)
    schedule = engines.schedule(problem, found.config if found else engines.choose(problem, target), target, with_moments)
    launches = background.launches(schedule) + (background.launches(background.with_constants(schedule)) if constants else [])
    return [*launches, *_batch_norm(problem, schedule, target)] if with_moments else launches


def _batch_norm(problem: ConvProblem, schedule: engines.Schedule, target: Device) -> Iterator[KernelLaunch]:
    """The launches of a batch norm behind a convolution in training."""
    n, k, *size = problem.result_shape
    pixels = batch_norm.Pixels(problem.dtype, problem.layout, n, k, math.prod(size))
    at = pixels, target.multiprocessors
    for launches, _ in (
        batch_norm.statistics(*at, 1e-5, 0.1, schedule.moments), *(batch_norm.forward(*at, "relu", residual) for residual in (False, True)),
        *(batch_norm.whole_forward(*at, 1e-5, 0.1, "relu", residual) for residual in (False, True) if pixels.whole),
        *(batch_norm.backward(*at, "relu", True, residual) for residual in (False, True)),
    ):  # fmt: skip
        yield from batch_norm.for_device(launches, target)


#: A text in few bytes: its file, its defines, and its target.
Needed = tuple[str, tuple[tuple[str, int], ...], str]


def most_used(target: Target, count: int, each: int, seed: int = 0) -> list[Text]:
    """The `count` texts that are needed most: by the layers of common networks, and by `each` random problems of every family.

    Among texts needed equally often, those of the networks come first.
    """
    wanted = [*networks(), *((problem, False) for problem in draw(seed, each))]
    if cores() < MANY_CORES:
        used = needed(wanted, target)
    else:
        used = Counter()
        at_once = ceil(len(wanted), 4 * cores())  # small parts, so that no process ends much later than the others
        parts = [wanted[first : first + at_once] for first in range(0, len(wanted), at_once)]
        with ProcessPoolExecutor(cores(), multiprocessing.get_context("spawn")) as pool:
            for found in pool.map(needed, parts, [target] * len(parts)):  # in their order
                used.update(found)
    return [Text(source_of(file, dict(defines)), arch, file) for (file, defines, arch), _ in used.most_common(count)]


def needed(wanted: Iterable[tuple[ConvProblem, bool]], target: Target) -> Counter[Needed]:
    """How many of the problems need each text. Each problem comes with whether moments of its result are computed."""
    used: Counter[Needed] = Counter()
    for problem, with_moments in wanted:
        launches = launches_of(problem, target, with_moments=with_moments)
        found = ((one.file or one.kernel, tuple(sorted(one.defines.items())), target.arch(one)) for one in launches)
        used.update(dict.fromkeys(found, 1))  # ordered, as the order decides between equal counts
    return used


def of_wheel(target: Target, count: int | None = None, each: int = WHEEL_RANDOM) -> list[Text]:
    """The texts that a wheel for such a GPU ships."""
    return list(dict.fromkeys([*most_used(target, count or WHEEL.get(target.name, WHEEL_OTHERS), each), *beside(target)]))


def beside(target: Target) -> Iterator[Text]:
    """The texts of launches beside convolutions, without those for arrays of 2^31 elements."""
    for family in besides(target):
        for defines in family:
            if not defines.get("INDEX_64"):
                yield Text(source_of(family.file, defines), family.arch or f"sm_{''.join(map(str, target.capability))}", family.file)


def write_archive(file: Path, made: Mapping[Text, bytes]) -> None:
    """Write the archive in which the package looks for binaries. Equal binaries give equal bytes."""
    named = {binaries.shipped_name(text.source, text.arch): binary for text, binary in made.items()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, binary in sorted(named.items()):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), binary, zipfile.ZIP_DEFLATED)


def compile_all(wanted: Sequence[Text], made_by: Compiler) -> tuple[dict[Text, bytes], list[str]]:
    """The binaries of all texts, one compiled per core at a time, behind a progress bar; and the messages of compilers that failed."""
    made: dict[Text, bytes] = {}
    failed: list[str] = []
    pool = ThreadPoolExecutor(cores())
    try:
        coming: dict[Future[bytes], Text] = {pool.submit(binaries.make, text.source, text.arch, made_by): text for text in wanted}
        for done in track(Finished(coming), lambda done: coming[done].kernel):
            try:
                made[coming[done]] = done.result()
            except CompileError as error:
                failed.append(f"{coming[done].kernel}: {error}")
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, texts that are not begun are left
    return made, failed


# ---- the layers of a model


def networks() -> Iterator[tuple[ConvProblem, bool]]:
    """The layers of residual networks with two and three convolutions a block for images of 224 x 224, and their gradients."""
    layers = [(3, 64, 7, 2, 112)]
    for c, size in STAGES:
        layers += [(c, c, 3, 1, size), (4 * c, c, 1, 1, size), (c, 4 * c, 1, 1, size)]
        if c == STAGES[0][0]:
            layers.append((c, c, 1, 1, size))
        else:
            layers += [(c, c, 3, 2, size), (c // 2, c, 3, 2, size), (2 * c, c, 1, 1, 2 * size)]
            layers += [(c // 2, c, 1, 2, size), (2 * c, 4 * c, 1, 2, size)]
    for n, (c, k, taps, stride, size), mode in product(BATCHES, layers, NETWORK_MODES):
        plain = ConvProblem.forward(2, (n, c, stride * size, stride * size), (k, c, taps, taps), stride=stride, padding=taps // 2)
        yield from _uses(in_mode(plain, mode), True)


def model_problems(name: str, size: tuple[int, ...], modes: Sequence[str], training: bool) -> list[tuple[ConvProblem, bool]]:
    """The problems of a network of torchvision's for images of `size`; each with whether its moments are computed, in training."""
    torch, torchvision = require("torch"), require("torchvision")
    try:
        with torch.device("meta"):
            model = torchvision.models.get_model(name, weights=None).eval()
            image = torch.empty(size)
    except ValueError as error:
        raise ToolError(str(error)) from error
    found: dict[ConvProblem, None] = {}

    def note(module: Any, given: tuple[Any, ...], result: Any) -> None:
        ndim = given[0].ndim - 2
        padding = module.padding if isinstance(module.padding, str) else tuple(module.padding)
        options = {"stride": module.stride, "padding": padding, "dilation": module.dilation, "groups": module.groups}
        shapes = ndim, tuple(given[0].shape), tuple(module.weight.shape)
        if isinstance(module, (torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d)):
            found[ConvProblem.transposed(*shapes, **options, output_padding=module.output_padding)] = None
        else:
            found[ConvProblem.forward(*shapes, **options)] = None

    kinds = tuple(getattr(torch.nn, f"Conv{way}{n}d") for way in ("", "Transpose") for n in (1, 2, 3))
    for module in model.modules():
        if isinstance(module, kinds):
            module.register_forward_hook(note)
    with torch.no_grad():
        model(image)
    return [made for plain in found for mode in modes for made in _uses(in_mode(plain, mode), training)]


def _uses(plain: ConvProblem, training: bool) -> Iterator[tuple[ConvProblem, bool]]:
    """A layer by itself, with the steps that are fused behind it, and its gradients."""
    yield plain, False
    fused = replace(plain, has_bias=True, has_scale=True, activation="relu")
    yield from ((fused, False), (replace(fused, has_residual=True), False))
    if training and plain.direction == "fprop":
        yield plain, True
        dgrad = replace(plain, direction="dgrad")
        # where two layers read an array, one of them adds its two gradients
        yield from ((dgrad, False), (replace(dgrad, has_residual=True), False), (replace(plain, direction="wgrad"), False))


# ---- the command


def problems(settings: Settings) -> list[tuple[ConvProblem, bool]]:
    """The problems whose kernels have to be compiled."""
    if settings.model:
        return model_problems(settings.model, settings.size, settings.modes, settings.training)
    plain = [in_mode(problem, mode) for mode in settings.modes for problem in suite()]
    if settings.training:
        return [made for problem in plain for made in _uses(problem, True)]
    return [(problem, False) for problem in plain]


def run(settings: Settings) -> int:
    """Compile, and print how much there was to do."""
    if settings.gpu:
        target = Target(settings.gpu)
        made_by = compiler()
    else:
        from pycuda_conv.runtime import driver

        device = named_device(settings.device)
        if device.backend == "opencl":
            return _run_on_opencl(settings, device)
        target = Target("sm_{}{}".format(*device.capability))
        target.multiprocessors, target.model = device.multiprocessors, device.model
        made_by = compiler(driver.newest())
    if settings.random:
        wanted = most_used(target, settings.random, RANDOM)
    else:
        wanted = list(dict.fromkeys(
            text for problem, with_moments in problems(settings)
            for text in texts(launches_of(problem, target, settings.constants, with_moments), target)
        ))  # fmt: skip
        wanted += beside(target) if settings.training else ()
    missing = [text for text in wanted if binaries.find(text.source, text.arch, made_by) is None]
    begin = time.monotonic()
    _, failed = compile_all(missing, made_by)
    out = console()
    out.print(
        f"{len(wanted)} kernels for {target.name}: {len(wanted) - len(missing)} were there, {len(missing) - len(failed)} were compiled by "
        f"{made_by.name} {made_by.version} in {time.monotonic() - begin:.1f} s"
    )
    for reason in failed[:5]:
        out.print(f"failed: {reason}")
    return FAILED if failed else OK


# ---- on OpenCL


def every_kind() -> Iterator[tuple[ConvProblem, bool]]:
    """Problems that together need every text that OpenCL's engines have for arrays of fewer than 2^31 elements, or nearly."""
    plain = ("fp32", "fp16", "bf16", "fp64")
    for dtype, c, taps, stride in product(DTYPE_BYTES, (24, 26, 27), ((3, 3), (5, 5), (7, 7), (2, 4), (9, 9)), (1, 2)):
        padding = tuple(n // 2 for n in taps)
        one = ConvProblem.forward(2, (2, c, 20, 22), (c, 1, *taps), stride=stride, padding=padding, groups=c)
        yield from _uses(replace(one, dtype=dtype, layout="NHWC"), True)
    shapes = (
        ((1, 1, 300, 300), (1, 1, 9, 9)), ((1, 1, 300, 300), (1, 1, 7, 7)), ((1, 1, 4, 70000), (1, 1, 1, 31)), ((2, 3, 7, 7), (5, 3, 3, 3)),
        ((8, 1, 28, 28), (4, 1, 7, 7)), ((1, 1, 40000), (1, 1, 5)), ((4, 8, 9, 7), (8, 8, 1, 1)), ((2, 4, 20, 20), (4, 4, 5, 5)),
        ((2, 4, 20, 20), (4, 4, 7, 7)),
    )  # fmt: skip
    for dtype, (x, w) in product(DTYPE_BYTES, shapes):
        one = replace(ConvProblem.forward(len(x) - 2, x, w), dtype=dtype)
        yield from (*_uses(one, True), *_uses(replace(one, layout="NHWC"), True))
    for dtype, layout in product(DTYPE_BYTES, ("NCHW", "NHWC")):
        given: Any = {"padding": 1, "padding_mode": "reflect", "dtype": dtype, "layout": layout}
        sides = (2, 4, 20, 20), (4, 4, 3, 3)
        bordered = ConvProblem.forward(2, *sides, **given)
        gradients = (ConvProblem.gradient(of, 2, *sides, bordered.result_shape, **given) for of in ("input", "weight"))
        yield from ((one, False) for one in (bordered, *gradients))
    for mode, problem in product((*plain, "fp16-nhwc", "bf16-nhwc"), core()[:12]):
        yield from _uses(in_mode(problem, mode), True)
    yield from ((in_mode(problem, mode), False) for mode in plain for problem in suite())
    yield from ((problem, False) for seed in range(2) for problem in draw(seed, 30))


def of_images(device: Device) -> Iterator[KernelLaunch]:
    """Launches of the filters over images and volumes: of each kind and pair of types."""
    for input, output in product(images.CODES, images.CODES):
        if input == output or ("float32" in (input, output) and "float64" not in (input, output)):
            window = images.Window(input, output, ((1, 0, 0),) * 3, (1, 32, 32), (1, 32, 32), (1024, 32), (1024, 32), before=(0, 1, 1))
            yield from (images.separable(window, taps, device) for taps in ((3, 3), (3, 0), (0, 3)))
            yield images.correlate(window, (1, 3, 3), device)
            if device.backend == "cuda":
                yield images.total(window, (2, 3, 3), device)


def _run_on_opencl(settings: Settings, device: Any) -> int:
    """The same on OpenCL: by default all kernels, which are few there. Several processes compile, as PoCL compiles one at a time."""
    if settings.constants:
        raise ToolError("--constants is for GPUs; on OpenCL every kernel serves many layers")
    used: Counter[str] = Counter()
    found: dict[str, KernelLaunch] = {}
    if settings.model or settings.mode or settings.training:
        chosen = problems(settings)
    else:
        chosen = list(every_kind())
        found = {launch.source(): launch for launch in of_images(device)}
        used.update(found.keys())
    for problem, with_moments in chosen:
        launches = {launch.source(): launch for launch in launches_of(problem, device, with_moments=with_moments)}
        used.update(dict.fromkeys(launches, 1))
        found = launches | found
    wanted = [found[source] for source, _ in used.most_common(settings.random)]
    missing = [launch for launch in wanted if not device.kept(launch)]
    begin = time.monotonic()
    if missing and trusted_folder() is None:
        raise ToolError("the cache is off, or its folder can't be used: compiled kernels would not be kept")
    with interrupt.telling(lambda: "the same command compiles the rest"):
        failed = compile_together(missing, device)
    out = console()
    out.print(
        f"{len(wanted)} kernels for OpenCL: {len(wanted) - len(missing)} were there, {len(missing) - len(failed)} were compiled in "
        f"{time.monotonic() - begin:.1f} s by {max(1, min(cores(), len(missing)))} processes"
    )
    for reason in failed[:5]:
        out.print(f"failed: {reason}", markup=False)
    return FAILED if failed else OK
