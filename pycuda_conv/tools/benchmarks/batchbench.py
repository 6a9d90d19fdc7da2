"""Same bits in every batch: random layers, whole batches beside parts of them, and the time beside the default's.

A layer's batch is computed as a whole, then some of its images alone and others together, in another order. What differs in one bit is a
failure. On a GPU both choices are timed, by kernels of the same form, unless ``--quick`` asks for the bits alone.
"""

from __future__ import annotations

import math
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pycuda_conv.plan import Plan, as_called
from pycuda_conv.problem import ConvProblem, channels_last
from pycuda_conv.runtime import Device
from pycuda_conv.timing import Effort, gpu_times, operand_sets
from pycuda_conv.tools import bench, families
from pycuda_conv.tools.plans import compile_together
from pycuda_conv.tools.report import geometric_mean, header_lines, microseconds, number, write_json
from pycuda_conv.tools.suite import MODES
from pycuda_conv.tools.terminal import FAILED, OK, Table, console, named_device, require, table, track
from pycuda_conv.tools.warm import launches_of

MOST_IMAGES = 64
MANY = 8  # images from which on the time is promised
AT_ONCE = 50  # layers whose kernels are compiled together
MOST_BYTES, LEAST_FLOP, MOST_FLOP = 3e8, 1e5, 1e11
OPENCL_FLOP = 3e7  # PoCL takes long for larger layers
EFFORT = Effort(rounds=3, seconds=0.01, most_rounds=5)
SHOWN = 8  # slowest rows that are printed


@dataclass(frozen=True)
class Row:
    """A layer: its numbers of images, those that differed, and the times of both choices in microseconds."""

    problem: str
    family: str
    images: int
    differs: str = ""
    us: float = math.nan
    default_us: float = math.nan
    config: str = ""
    default_config: str = ""

    @property
    def ratio(self) -> float:
        """The time with the same bits in every batch over the default's."""
        return self.us / self.default_us


def layers(seed: int, count: int, modes: Sequence[str], most_flop: float = MOST_FLOP) -> Iterator[tuple[str, ConvProblem]]:
    """Random layers of all families by turns, forward and by the input, in random modes and with 1 to 64 images."""
    r = random.Random(seed)
    kinds = [{"dtype": "float32", "precision": "fp32", "layout": "NCHW"} | MODES[mode] for mode in modes]
    found = 0
    while found < count:
        family, kind = families.FAMILIES[found % len(families.FAMILIES)], r.choice(kinds)
        one, direction = families.layer(r, family), r.choice(("fprop", "dgrad"))
        one["n"] = r.randint(1, MOST_IMAGES)
        try:
            made = families.problem(one, direction, kind["dtype"], kind["precision"], kind["layout"])
        except ValueError:  # an impossible layer
            continue
        image = replace(made, N=1)
        fitting = min(MOST_BYTES / max(image.bytes, 1), most_flop / max(image.flops, 1))
        if fitting < 1 or made.flops < LEAST_FLOP:
            continue
        found += 1
        yield family, replace(made, N=min(made.N, int(fitting)), batched=True)


def parts(r: random.Random, images: int) -> list[list[int]]:
    """The numbers of the images of a batch that are computed apart: one alone, and some in another order."""
    some = r.sample(range(images), r.randint(1, images))
    return [[r.randrange(images)], some]


class Layer:
    """A layer's arrays on a device, and its plans."""

    def __init__(self, torch: Any, problem: ConvProblem, device: Device, seed: int, count: int = 1) -> None:
        self.problem, self.device = problem, device
        place = device.name if device.backend == "cuda" else "cpu"
        filter_order = channels_last(problem.ndim + 2, problem.ndim) if problem.layout == "NHWC" else None
        self.sets = bench.Operands(torch, problem, place, count, torch.Generator(place).manual_seed(seed), filter_order)
        for x in self.sets.x:
            if problem.N > 1 and x.dtype != torch.float16:
                x[0] *= 1e3  # on another scale
                x[-1] *= 1e-3

    def asked(self, algorithm: Any, images: int | None = None) -> ConvProblem:
        """The problem of so many images as a call plans it."""
        return as_called(replace(self.problem, algorithm=algorithm, N=self.problem.N if images is None else images), self.device)

    def result(self, torch: Any, chosen: Sequence[int] | None = None) -> Any:
        """The bytes of the result for some images, or for all; image by image."""
        x = self.sets.x[0] if chosen is None else self.sets.x[0][torch.tensor(chosen, device=self.sets.x[0].device)]
        problem = self.asked("batch_invariant", len(x))
        y = Plan(problem, self.device)(laid_out(x, problem), self.sets.w[0])
        return y.contiguous().view(torch.uint8).flatten(1)


def laid_out(x: Any, problem: ConvProblem) -> Any:
    """The images as the problem's layout says, in memory of their own."""
    order = problem.order
    if order is None:
        return x.contiguous()
    return x.permute(order).contiguous().permute([order.index(axis) for axis in range(x.ndim)])


def compile_ahead(problems: Sequence[ConvProblem], device: Device, counts: Sequence[Iterable[int]]) -> None:
    """Compile the general kernels of these layers, by default and for the same bits with so many images, side by side."""
    launches = []
    for problem, images in zip(problems, counts, strict=True):
        launches += launches_of(problem, device)
        for n in images:
            launches += launches_of(replace(problem, algorithm="batch_invariant", N=n), device)
    compile_together(launches, device)


def measure(
    torch: Any, family: str, problem: ConvProblem, device: Device, seed: int, apart: Sequence[Sequence[int]], timed: bool
) -> Row:
    """Compare the bits of one layer, and time it."""
    count = operand_sets(problem, torch.cuda.get_device_properties(device.name).L2_cache_size) if timed else 1
    layer = Layer(torch, problem, device, seed, min(count, 32))
    whole, differs = layer.result(torch), ""
    for chosen in apart:
        if not torch.equal(layer.result(torch, chosen), whole[torch.tensor(chosen, device=whole.device)]):
            differs += f" images {chosen}"
    plans = [Plan(layer.asked(algorithm), device) for algorithm in ("batch_invariant", None)]
    row = Row(str(problem), family, problem.N, differs.strip(), config=str(plans[0].config), default_config=str(plans[1].config))
    if not timed:
        return row

    def way(plan: Plan) -> Callable[[int], Any]:
        x, outs = ([laid_out(array, plan.problem) for array in arrays] for arrays in (layer.sets.x, layer.sets.out))
        return lambda i: plan(x[i], layer.sets.w[i], out=outs[i])

    times, _ = gpu_times(torch, [way(plan) for plan in plans], layer.sets.count, EFFORT)
    us, default = (bench.median(taken) * 1e6 for taken in times)
    return replace(row, us=us, default_us=default)


def slow_table(rows: Sequence[Row]) -> Table:
    """The rows that take longest beside the default."""
    cells = [
        (row.problem, microseconds(row.us), microseconds(row.default_us), number(row.ratio, ".2f"), row.config, row.default_config)
        for row in rows
    ]
    columns = ("layer", "us", "default us", "ratio", "configuration", "default")
    return table("The slowest beside the default", columns, cells, left=("layer", "configuration", "default"))


def run(settings: bench.Settings, modes: Sequence[str], count: int) -> int:
    """Compare, print the means, and write the file that was asked for."""
    device: Any = named_device(settings.device)
    torch, out = require("torch"), console()
    on_gpu = device.backend == "cuda"
    seed = secrets.randbelow(2**31) if settings.seed is None else settings.seed
    machine = bench.describe(torch, device, ", ".join(modes), "", seed)
    machine["command"] = f"pycuda-conv bench --batches {count}" + " --quick" * settings.quick
    for line in header_lines(machine):
        out.print(line, markup=False)
    began, rows, r = time.monotonic(), [], random.Random(seed)
    todo = list(layers(seed, count, modes, MOST_FLOP if on_gpu else OPENCL_FLOP))
    with torch.no_grad():
        for first in range(0, count, AT_ONCE):
            if settings.over(began):
                break
            some = todo[first : first + AT_ONCE]
            apart = [parts(r, problem.N) for _, problem in some]
            compile_ahead([p for _, p in some], device, [{p.N, *map(len, a)} for (_, p), a in zip(some, apart, strict=True)])
            for i, (family, problem) in enumerate(track(some, lambda pair: str(pair[1]))):
                if settings.over(began):
                    break
                rows.append(measure(torch, family, problem, device, seed + first + i, apart[i], on_gpu and not settings.quick))
                if rows[-1].differs:
                    out.print(f"DIFFERS: {rows[-1].problem}, {rows[-1].images} images: {rows[-1].differs}", markup=False, style="bold red")
                if on_gpu:
                    torch.cuda.empty_cache()
    wrong = sum(bool(row.differs) for row in rows)
    out.print(f"{len(rows)} layers with 1 to {MOST_IMAGES} images: {len(rows) - wrong} have equal bits in every batch, {wrong} differ")
    for words, own in ((f"{MANY} images and more", [row for row in rows if row.images >= MANY]), ("all", rows)):
        ratios = [row.ratio for row in own if row.us == row.us]
        if ratios:
            out.print(
                f"time over the default's, {words}: {len(ratios)} layers, geometric mean {number(geometric_mean(ratios), '.3f')}, "
                f"worst {max(ratios):.2f}, above 1.1: {sum(ratio > 1.1 for ratio in ratios)}"
            )
    slow = sorted((row for row in rows if row.us == row.us), key=lambda row: -row.ratio)[:SHOWN]
    if slow:
        out.print(slow_table(slow))
    if settings.json is not None:
        write_json(settings.json, {"machine": machine, "rows": [asdict(row) for row in rows]})
    return FAILED if wrong else OK
