"""The tools: their arithmetic, the files they write, and the command `pycuda-conv` with its exit statuses."""

import configparser
import contextlib
import csv
import importlib.util
import json
import math
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import why_no_opencl

import pycuda_conv as pc
from pycuda_conv import background, cli, timing
from pycuda_conv.engines.direct.direct import Batched
from pycuda_conv.engines.hopper.gemm import ImplicitGemm
from pycuda_conv.engines.hopper.pointwise import Pointwise
from pycuda_conv.problem import ConvProblem
from pycuda_conv.rounding import bound
from pycuda_conv.runtime import cache as kernel_cache
from pycuda_conv.runtime import get_device, launcher, pinned
from pycuda_conv.runtime.opencl import OpenCLDevice
from pycuda_conv.timing import Effort
from pycuda_conv.tools import bench, oracle, report, suite, terminal, training, verify
from pycuda_conv.tools.benchmarks import hostbench
from pycuda_conv.tools.floors import _places, floor, for_plain_units, plain_floor, tensor_floor
from pycuda_conv.tools.oracle import compare, reference, torch_for
from pycuda_conv.tools.report import Row, geometric_mean
from pycuda_conv.tools.terminal import FAILED, OK, UNUSABLE, ToolError

ROOT = Path(pc.__file__).resolve().parent.parent
BEGIN, END = report.marks("results")
SMALLEST = ("conv2d 1x1x5x5 -> 1x3x3 k3x3 s1 p0", "conv2d 2x4x5x5 -> 8x5x5 k3x3 s1 p1")
ONLY_SMALLEST = "[14]x5x5 -> "


# ---- arithmetic


@pytest.mark.parametrize("values, mean", [((), None), ((3,), 3), ((0.5, 2), 1), ((1, 10, 100), 10), ((1e-200,) * 3, 1e-200)])
def test_geometric_mean(values, mean):
    assert geometric_mean(iter(values)) == (mean if mean is None else pytest.approx(mean, rel=1e-12))


def row(flops=10**9, ours=10.0, torch=20.0, **others) -> Row:
    known = {
        "problem": "p", "kernel": "Gemm", "config": "Gemm()", "flops": flops, "bytes": 10**6, "groups": 1, "ours_us": ours,
        "torch_us": torch
    }
    return Row(**{**known, "kept_us": ours and ours / 2, "floor_us": ours and ours / 4, **others})


def wrong(**others) -> Row:
    return row(ours=None, torch=None, verdict="WRONG", error=0.5, torch_error=1e-7, **others)


def test_the_summary_counts_each_row_where_it_belongs():
    rows = [
        row(6 * 10**9, 10, 40, problem="fast"), row(2 * 10**9, 10, 10, problem="even"), row(8 * 10**9, 40, 10, problem="slow"),
        row(9 * 10**9, 900, 900, groups=4, problem="grouped", error=2.0, torch_error=1.0), row(10**6, 10, 90, problem="small"), wrong(problem="wrong"),
        row(2 * 10**9, 30, 10, mode="bf16", problem="other"),
    ]
    found = report.summary(rows)
    assert list(found) == ["fp32", "bf16"]
    dense, every = found["fp32"]["dense"], found["fp32"]["all"]
    assert (dense["rows"], every["rows"], found["fp32"]["rows"], found["fp32"]["wrong_rows"]) == (3, 5, 6, 1)
    assert dense["packed"] == {
        "geometric_mean": pytest.approx(1), "lowest": 0.25, "lowest_problem": "slow", "below_one": ["slow"], "of_floor": pytest.approx(0.25)
    }
    assert dense["kept"]["geometric_mean"] == pytest.approx(2)
    assert dense["kept"]["below_one"] == ["slow"] and dense["kept"]["of_floor"] == pytest.approx(0.5)
    assert every["packed"]["geometric_mean"] == pytest.approx(9 ** (1 / 5))
    assert (dense["less_exact"], every["less_exact"]) == ([], ["grouped"])
    assert found["bf16"]["all"] == found["bf16"]["dense"] and found["bf16"]["all"]["packed"]["below_one"] == ["other"]
    lines = report.summary_lines(found)
    assert {"  lowest: 0.25 (slow), kept 0.50 (slow)", "  below 1: 1 (slow), kept 1 (slow)", "  error above torch's: 1 (grouped)"} < set(lines)
    assert "fp32: 5 of 6 rows timed; 1 wrong" in lines and lines[-1] == "bf16: 1 of 1 rows timed; 0 wrong"


def test_every_kind_of_layer_is_in_the_suite():
    problems = suite.suite()
    assert {
        kind: [suite.kind_of(p) for p in problems].count(kind) for kind in suite.KINDS
    } == {kind: len(list(make())) for kind, make in suite.KINDS.items()}
    assert 140 < len(problems) < 160 and problems[:43] == suite.core()
    assert min([suite.kind_of(p) for p in problems].count(kind) for kind in suite.KINDS) >= 4
    assert {p.ndim for p in problems} == {1, 2, 3} and {p.direction for p in problems} == {"fprop", "dgrad"}
    for mode in suite.MODES:
        assert all(suite.kind_of(suite.in_mode(p, mode)) == suite.kind_of(p) for p in problems)
    assert not suite.kind_of(replace(problems[0], N=3))


@pytest.mark.parametrize("mode, words", [
    ("fp32", "float32 with fp32 arithmetic, NCHW"), ("tf32", "float32 with tf32 arithmetic, NCHW"), ("tf32-nhwc", "float32 with tf32 arithmetic, channels last"), ("fp16", "float16, NCHW"),
    ("fp16-nhwc", "float16, channels last"), ("bf16", "bfloat16, NCHW"), ("bf16-nhwc", "bfloat16, channels last"), ("fp64", "float64, NCHW"),
])
def test_a_mode_s_problems_are_what_its_words_say(mode, words):
    assert suite.mode_words(mode) == words and len(suite.MODES) == 8
    for problem in (suite.in_mode(p, mode) for p in suite.suite()):
        assert problem.dtype == words.split()[0].rstrip(",") and (problem.precision == "tf32") == ("tf32" in words)
        assert problem.layout == ("NHWC" if "last" in words and problem.operand_channels > 1 else "NCHW")


# ---- floors


THIN, POINTWISE = "conv2d 64x256x28x28 -> 256x28x28 k3x3 s1 p1 g32", "conv2d 64x1024x14x14 -> 256x14x14 k1x1"


def _layer(words: str, mode: str) -> ConvProblem:
    problem = next(p for p in suite.suite() if bench.label(p).startswith(words))
    return suite.in_mode(problem, mode)


# the table of the design notes, in microseconds of an H200: pack, compute and traffic for three products and for one, traffic of 16 bits,
# then the
# floors in fp32, in tf32, and of 16 bits channels last and not
FLOORS = {
    "conv1d 128x512x448 -> 1024x448 k3 s1 p1": ((55, 41), (685, 228), (83, 69, 42), (740, 269, 228, 256)),
    "conv2d 32x512x7x7 -> 512x7x7 k3x3": ((1.5, 1.1), (28.1, 9.4), (3.7, 2.2, 1.8), (30, 10.5, 9.4, 10)),
    "conv2d 64x64x56x56 -> 64x56x56 k3x3": ((24, 18), (56, 18.7), (24, 18, 12), (80, 37, 18.7, 31)),
    "conv2d 64x256x14x14 -> 256x14x14 k3x3": ((6, 4.5), (56, 18.7), (6.5, 4.8, 3.3), (62, 23, 18.7, 22)),
    POINTWISE: ((24, 18), (25, 8.3), (15, 9, 7.6), (49, 27, 8.3, 20)),
    "conv2d 32x256x56x56 -> 256x56x56 k3x3": ((48, 36), (450, 150), (48, 36, 24), (497, 186, 150, 174)),
    "conv2d 4x2048x33x33 -> 256x33x33 k3x3 s1 p12 d12": ((17, 12), (156, 52), (14, 7, 7), (173, 65, 52, 60)),
}


@pytest.mark.parametrize("words", FLOORS)
def test_floors_are_those_of_the_design_notes(words):
    def near(*values):
        return pytest.approx(values, rel=0.03, abs=0.6)

    pack, compute, traffic, floors = FLOORS[words]
    three, one, half, packed_half = (floor(_layer(words, mode), tensor_cores=True) for mode in ("fp32", "tf32", "fp16-nhwc", "fp16"))
    assert (three.pack, one.pack, half.pack) == near(*pack, 0) and (three.compute, one.compute, half.compute) == near(*compute, compute[1])
    assert (three.traffic, one.traffic, half.traffic) == near(*traffic)
    assert (three.us, one.us, half.us, packed_half.us) == near(*floors)
    assert floor(_layer(words, "tf32-nhwc"), tensor_cores=True) == one and floor(_layer(words, "bf16"), tensor_cores=True) == packed_half
    # the tensor cores could do it: what another engine makes of it is held against that
    assert floor(_layer(words, "fp32"), tensor_cores=False) == three


def test_places_are_counted_as_one_by_one():
    generator = random.Random(1)
    for _ in range(300):
        size, first, *numbers = (generator.randint(*ends) for ends in ((1, 30), (-12, 2), (1, 9), (1, 5), (1, 9), (1, 5)))
        few, many = numbers[:2], numbers[2:]
        every = {first + i * few[1] + j * many[1] for i in range(few[0]) for j in range(many[0])}
        assert _places(size, first, few, many) == _places(size, first, many, few) == len(every & set(range(size)))


def test_what_is_for_the_plain_units():
    labels = {bench.label(p) for p in suite.core() if for_plain_units(p)}
    assert {text.split()[1] for text in labels} == {
        "1x1x5x5", "2x4x5x5", "32x16x7x7", "4x16x32x32", "1x1x512x512", "64x144x56x56", "64x192x28x28", "64x256x28x28"
    }
    assert for_plain_units(replace(_layer("conv2d 64x64x56x56 -> 64x56x56 k3x3", "fp32"), dtype="float64"))
    grouped = _layer(THIN, "fp16-nhwc")
    # where the tensor cores run it all the same, the lower floor counts: none is beaten
    assert floor(grouped, tensor_cores=False) == plain_floor(grouped) and floor(grouped, tensor_cores=True) == tensor_floor(grouped)
    assert tensor_floor(grouped).us < plain_floor(grouped).us


@pytest.mark.parametrize("words, config, expected", [
    (THIN, ImplicitGemm(), tensor_floor), (THIN, Batched(), plain_floor),
    (POINTWISE, Pointwise(), lambda problem: tensor_floor(problem, packed=False)), (POINTWISE, ImplicitGemm(), tensor_floor),
], ids=["thin groups on tensor cores", "thin groups", "read as they lie", "packed"])
def test_a_row_carries_the_floor_of_what_ran(words, config, expected):
    mode = "fp16-nhwc" if words is THIN else "fp32" if isinstance(config, Pointwise) else "fp16"
    problem = _layer(words, mode)
    found, on_cpu = (
        bench._blank(SimpleNamespace(problem=problem, config=config, device=SimpleNamespace(backend=backend)), mode)
        for backend in ("cuda", "opencl")
    )
    least = expected(problem)
    assert on_cpu.floor_us is None  # the bounds are of GPUs
    assert (
        found.floor_pack_us, found.floor_compute_us, found.floor_traffic_us, found.floor_us
    ) == (least.pack, least.compute, least.traffic, least.us)
    assert (found.mode, found.kernel) == (mode, type(config).__name__)


@pytest.mark.parametrize("settings, command", [
    ({}, "make bench"), ({"pages": Path("."), "seed": 3}, "make bench"), ({"modes": ("tf32", "fp16"), "quick": True}, "pycuda-conv bench --mode tf32 fp16 --quick"), ({"modes": tuple(suite.MODES)}, "pycuda-conv bench --mode all"),
    ({"kind": "core"}, "pycuda-conv bench --kind core"), ({"kind": "wide", "modes": ("tf32",)}, "pycuda-conv bench --kind wide --mode tf32"),
    ({"only": "k3 | $x'", "device": 1, "host_calls": True}, """pycuda-conv bench --only 'k3 | $x'"'"'' --device 1 --host-calls"""),
])
def test_the_command_repeats_what_was_measured(settings, command):
    assert bench.Settings(**settings).command == command


@pytest.mark.parametrize("change, correct", [(0, True), (1e-8, True), (1e-3, False), (math.nan, False), (math.inf, False)])
def test_the_oracle_tells_rounding_from_a_wrong_element(change, correct):
    problem = ConvProblem.forward(2, (1, 3, 8, 8), (4, 3, 3, 3))
    reference, out = np.ones(problem.result_shape), np.ones(problem.result_shape)
    out[0, 3, 5, 5] += change
    errors = compare(problem, out, reference, reference)
    assert errors.correct == correct and (errors.of_bound <= 1) == correct


@pytest.mark.parametrize("changes, part", [
    ({}, 4 * 2.0**-23 * 6), ({"precision": "tf32"}, 2.0**-9), ({"dtype": "float16"}, 4 * 2.0**-23 * 6), ({"dtype": "bfloat16", "precision": "tf32"}, 4 * 2.0**-23 * 6),
    ({"dtype": "float64", "precision": "tf32"}, 4 * 2.0**-52 * 6),
])
def test_the_bound_is_that_of_the_arithmetic(changes, part):
    problem = replace(ConvProblem.forward(2, (1, 4, 8, 8), (4, 4, 3, 3)), **changes)
    assert bound(problem, np.zeros(1), np.full(1, 2e6)) == pytest.approx(2e6 * part, rel=1e-6)
    eps = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}[problem.dtype]
    assert bound(problem, np.full(1, -3e6), np.zeros(1)) == pytest.approx(3e6 * eps, rel=1e-6)


# ---- timing, on a GPU whose clock is ours


class FakeCuda:
    """As much of torch.cuda as timing asks for. Work takes `LAUNCH` more when it is launched than in a graph."""

    LAUNCH = 2e-6

    def __init__(self, captures: bool = True) -> None:
        self.now, self.captures, self.graphed = 0.0, captures, None
        self.cuda = self

    def way(self, seconds: float, seen: list):
        def launch(i: int) -> None:
            seen.append(i)
            if self.graphed is None:
                self.now += seconds + self.LAUNCH
            else:
                self.graphed.seconds += seconds

        return launch

    def Event(self, enable_timing):
        def record():
            event.at = self.now

        event = SimpleNamespace(at=0.0, record=record, elapsed_time=lambda end: (end.at - event.at) * 1e3)
        return event

    def CUDAGraph(self):
        graph = SimpleNamespace(seconds=0.0)
        graph.replay = lambda: setattr(self, "now", self.now + graph.seconds)
        return graph

    @contextlib.contextmanager
    def graph(self, graph):
        if not self.captures:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.graphed = graph
        yield
        self.graphed = None

    def Stream(self):
        return SimpleNamespace(wait_stream=lambda other: None)

    current_stream = Stream

    def stream(self, stream):
        return contextlib.nullcontext()

    def synchronize(self):
        pass


@pytest.mark.parametrize("captures, ours, theirs, how, overhead", [
    (True, 5e-6, 50e-6, "graph", 0), (True, 1e-7, 0.2, "graph", 0), (True, 2e-3, 3e-3, "events", FakeCuda.LAUNCH), (False, 5e-6, 50e-6, "events", FakeCuda.LAUNCH),
])
def test_gpu_times_are_those_of_one_launch(captures, ours, theirs, how, overhead):
    gpu, seen = FakeCuda(captures), ([], [])
    times, found = timing.gpu_times(gpu, [gpu.way(s, into) for s, into in zip((ours, theirs), seen, strict=True)], 3, Effort(rounds=5))
    assert found == how
    for taken, seconds in zip(times, (ours, theirs), strict=True):
        assert 5 <= len(taken) <= 50 and taken == pytest.approx([seconds + overhead] * len(taken))
    assert all(set(into) == {0, 1, 2} for into in seen)


# ---- Markdown

MACHINE = {
    "date": "2026-01-02T03:04:05+00:00", "GPU": "NVIDIA H200, compute capability 9.0, 132 multiprocessors", "driver": "580.65, CUDA 13.0, nvcc 13.0.48",
    "torch": "2.9.0, CUDA 12.8, cuDNN 91002, cudnn.benchmark = True, torch.backends.cudnn.conv.fp32_precision = 'ieee'", "mode": "fp32",
    "method": "median", "command": "make bench",
}
LOOPS = [{"problem": "l", "calls": 64, "loop_us": 640.0, "single_us": 6.4, "ratio": 100.0, "verdict": v} for v in ("ok", "WRONG")]
CALLS = [{"problem": "h", "call": "pc.conv2d(x, w)", "us": 12.34}]


def of_suite():
    rows = [row(error=1e-7, torch_error=2e-7), wrong(problem="w")]
    return report.markdown(MACHINE, rows, report.summary(rows), LOOPS, CALLS)


def of_training():
    known = {"torch_us": 30.0, "error": 1e-7, "torch_error": 2e-7}
    rows = [training.Row("gradient by input", "p", mode, ours_us=us, **known) for mode, us in (("fp32", 10.0), ("tf32", 20.0))]
    rows += [training.Row("gradient by weight", "q", "fp32", verdict="WRONG"), training.Row("trained", "r", "fp32", 1.0, 2.0, 3.0, config="note")]
    return training.markdown(MACHINE, rows)


def of_host():
    rows = [hostbench.HostRow("p", 8, 8, 0.0, 4.0, 2.0, 1.0, 0.25, 0.5, by_hand_ms=3.0), hostbench.HostRow("q", 8, 8, 1.0, verdict="WRONG")]
    two = {"ours_ms": 100.0, "speedup": 1.5, "copies_ms": 90.0, "pinned_ms": 80.0, "pinned_speedup": 1.75, "pinned_copies_ms": 70.0}
    scaling = [hostbench.ScalingRow(2, 0.0, 8 * 10**9, **two), hostbench.ScalingRow(4, 1.0, 8, verdict="WRONG")]
    return hostbench.markdown(MACHINE | {"bus": "50 GB/s"}, rows, scaling, hostbench.CASES[0])


@pytest.mark.parametrize(("text", "lines"), [
    (of_suite, [
        "| fp32 | all 1 | 2.00 | 4.00 | 2.00 | 0 | 0 | 25% | 50% |", "Ratios are geometric means. fp32: 1 of 2 layers timed, 1 wrong.",
        "| p | Gemm | 10.00 | 5.00 | 20.00 | 2.00 | 4.00 | 100 | 25% | 1.0e-07 | 2.0e-07 |", "| w | Gemm | **WRONG** | - | - | - | - | - | - | 5.0e-01 | 1.0e-07 |",
        "| l | 64 | 640.0 | 6.40 | 100 |", "| l | 64 | 640.0 | **WRONG** | 100 |", "| `pc.conv2d(x, w)` | 12.3 |",
    ]),
    (of_training, [
        "| p | 10.00 | 30.00 | 3.00 | 1.50 |", "| q | **WRONG** | - | - | - |", "| trained | r | fp32 | 1.00 | 2.00 | 3.00 | note |",
        "Geometric means of the ratios: fp32, gradients: 3.00; fp32, gradients by input: 3.00; tf32, gradients: 1.50; tf32, gradients by input: 1.50. "
        "Errors in fp32: ours 1.0e-07 to 1.0e-07, torch's 2.0e-07 to 2.0e-07.",
    ]),
    (of_host, [
        "The bus carries 50 GB/s.", "| p | 4.000 | 2.000 | 2.00 | 25% | 1.000 | 50% | 3.000 | 1.50 | 0.0e+00 |", "| q | **WRONG** | - | - | - | - | - | - | - | 1.0e+00 |",
        "| 2 | 100.0 | 80.0 | 1.50 | 90.0 | 80.0 | 100.0 | 1.75 | 70.0 |", "| 4 | **WRONG** | - | - | - | - | - | - | - |",
    ]),
])  # fmt: skip
def test_markdown_tells_the_machine_the_command_and_every_row(text, lines):
    text = text()
    for part in ("NVIDIA H200", "driver 580.65", "CUDA 13.0", "torch 2.9.0", "cuDNN 91002", "fp32_precision = 'ieee'", "2026-01-02", "`make bench`"):
        assert part in text.splitlines()[0]
    assert not set(lines) - set(text.splitlines()) and "nan" not in text
    for table in re.findall(r"(?:^\|.*\n?)+", text, re.M):
        assert len({line.count("|") for line in table.splitlines()}) == 1 and set(table.splitlines()[1]) <= set("|-: ")


def test_write_between_replaces_only_the_results_and_twice_is_once(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"# é\n\n{BEGIN}\nold\n\nolder\n{END}\nafter, {BEGIN} in a line is text\n", encoding="utf-8")
    path.chmod(0o640)
    link = tmp_path / "link.md"
    link.symlink_to(path)
    for target in (path, path, link):
        report.write_between(target, "\nnew\n\n| a |\n")
        assert path.read_text(encoding="utf-8") == f"# é\n\n{BEGIN}\nnew\n\n| a |\n{END}\nafter, {BEGIN} in a line is text\n"
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o640
    assert sorted(p.name for p in tmp_path.iterdir()) == ["README.md", "link.md"]


@pytest.mark.parametrize(
    "text", ["", BEGIN, f"{END}\n{BEGIN}\n", f"{BEGIN}\n{BEGIN}\n{END}\n", f"x {BEGIN}\n{END}\n", None, b"\xff"], ids=repr
)
def test_write_between_refuses_a_file_without_its_lines_and_leaves_it(tmp_path, text):
    path = tmp_path / "README.md"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ToolError, match=r"README\.md"):
        report.write_between(path, "new")
    assert not path.exists() or path.read_bytes() == (text if isinstance(text, bytes) else text.encode())


def test_an_interrupted_write_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "README.md"
    path.write_text(f"{BEGIN}\nold\n{END}\n")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        report.write_between(path, "new")
    assert [p.read_text() for p in tmp_path.iterdir()] == [f"{BEGIN}\nold\n{END}\n"]


PLACES = [
    *((report.FRONT_PAGE, part) for part in report.FRONT_PARTS),
    *((report.RESULTS_PAGE, part) for part in ("results", "drawn", "kernelbench", "energy", "training", "models", "host")),
]  # fmt: skip


@pytest.mark.parametrize("page, part", PLACES)
def test_the_pages_can_take_the_results(page, part):
    if not (ROOT / page).exists():
        pytest.skip(f"no {page} beside the package")
    before, after = report.around_results(ROOT / page, part)
    assert before.endswith(f"<!-- {part}:begin -->\n") and after.startswith(f"<!-- {part}:end -->\n")


# ---- the command


@pytest.fixture(
    params=[(lambda out, i: out.flat[i] + 1e-3), (lambda out, i: np.nan)], ids=["one element off by 1e-3", "one element unwritten"]
)
def wrong_kernel(opencl, request, monkeypatch):
    """Every result on OpenCL is wrong in its last element. All outputs are NaN before: such is what is never written."""
    right = OpenCLDevice.run_on_host_arrays

    def run(self, launch, inputs, out, workspace, stream):
        right(self, launch, inputs, out, workspace, stream)
        out.flat[-1] = request.param(out, -1)

    monkeypatch.setattr(OpenCLDevice, "run_on_host_arrays", run)
    return request.param_index


@pytest.mark.parametrize(
    ("chosen", "said"), [("python", "in Python"), ("rust", "PYCUDA_CONV_LAUNCHER must be 'c' or 'python', got 'rust'")]
)
def test_info_tells_which_launcher_is_used(command, monkeypatch, chosen, said):
    monkeypatch.setenv("PYCUDA_CONV_LAUNCHER", chosen)
    status, out, err = command("info", "--json")
    assert (status, err) == (OK, "") and json.loads(out)["uses"]["launcher"] == said


def test_info_tells_its_sections_as_json(command):
    status, out, err = command("info", "--json")
    facts = json.loads(out)
    assert (status, err) == (OK, "")
    assert sorted(facts) == ["contexts", "cuda_missing", "gpu_count", "gpus", "opencl", "uses", "versions"]
    assert sorted(facts["contexts"]) == ["pools", "primary_active", "pycuda_current"]
    assert facts["versions"]["numpy"] == np.__version__ and len(facts["gpus"]) == facts["gpu_count"]
    assert {"backend", "device", "why", "environment", "cache", "kernels", "launcher", "copies"} == set(facts["uses"])
    assert Path(facts["uses"]["kernels"]).is_dir()


def test_verify_passes_and_says_so(command, device):
    status, out, err = command("verify", "--cases", "notebook-single, k1s1p0", "--device", device, "--seed", 7)
    assert (status, err) == (OK, "") and "FAIL" not in out and "torch's" in out
    assert len(re.findall(r" pass *$", out, re.M)) >= 4 and "passed in" in out and "--seed 7 repeats this" in out
    assert ("GPUArray, own context" in out) == device.startswith("cuda")


def test_verify_s_json_tells_every_comparison_and_a_seed_repeats_it(command, device):
    def found():
        status, out, err = command("verify", "--cases", "k1s1p0,bfloat16", "--device", device, "--seed", "5", "--json")
        assert (status, err) == (OK, "")
        return json.loads(out)

    facts = found()
    assert (facts["device"], facts["seed"], facts["passed"]) == (device, 5, True)
    arrays = {(r["case"], r["array"]) for r in facts["results"]}
    assert {("k1s1p0", "numpy"), ("bfloat16", "torch cpu")} <= arrays
    assert (("bfloat16", "numpy") in arrays) == (importlib.util.find_spec("ml_dtypes") is not None)
    assert all(r["passed"] and 0 < r["relative_error"] <= r["relative_limit"] and r["of_bound"] <= 1 for r in facts["results"])
    assert [r["max_error"] for r in found()["results"]] == [r["max_error"] for r in facts["results"]]


def test_a_case_s_data_fit_its_problem_and_do_not_depend_on_the_others():
    for case in verify.CASES.values():
        x, w, b = case.data(3)
        assert (x.shape, w.shape) == (case.problem.input_shape[-x.ndim :], case.problem.weight_shape) and (b is not None) == case.bias
        assert all(np.array_equal(a, again) for a, again in zip((x, w), case.data(3), strict=False))
        assert not np.array_equal(x, case.data(4)[0])


@pytest.mark.parametrize("case", [case for case in verify.CASES.values() if case.problem.border is None], ids=lambda case: case.name)
def test_the_reference_is_torch_s_float64_convolution(case):
    x, w, b = (None if a is None else a.astype("f8") for a in case.data(1))
    named = replace(case, dtype="float64")
    theirs = verify._by_torch(named, (x, w, b), get_device("opencl")) if not why_no_opencl() else pytest.skip(why_no_opencl())
    ours = reference(case.problem, x, w, b)
    assert ours.dtype == np.float64 and ours.shape == theirs.shape
    assert np.allclose(ours, theirs, rtol=1e-12, atol=1e-11)


def test_verify_fails_when_a_kernel_is_wrong(command, wrong_kernel):
    arguments = ("verify", "--cases", "k1s1p0,notebook-single", "--device", "opencl")
    status, out, _ = command(*arguments)
    assert status == FAILED and len(re.findall(r" FAIL *$", out, re.M)) == 4 and "0 of 4 passed" in out
    assert "worst at [3, 31, 31, 31]" in out and "worst at [0, 0, 2, 2]" in out  # the element, by its index
    assert ("1 of 131072 elements are NaN" in out) == bool(wrong_kernel)
    status, out, _ = command(*arguments, "--json")
    assert status == FAILED and json.loads(out)["passed"] is False and not any(r["passed"] for r in json.loads(out)["results"])


def empty_pages(folder):
    """Both pages without results."""
    (folder / "docs").mkdir()
    pages = folder / report.FRONT_PAGE, folder / report.RESULTS_PAGE
    for page in pages:
        page.write_text(f"above\n{BEGIN}\n{END}\nbelow\n")
    return pages


def test_bench_refuses_to_time_a_wrong_kernel(command, wrong_kernel, tmp_path):
    facts, (_, results) = tmp_path / "b.json", empty_pages(tmp_path)
    status, out, _ = command("bench", "--device", "opencl", "--quick", "--only", ONLY_SMALLEST, "--json", facts, "--pages", tmp_path)
    assert status == FAILED and all(f"WRONG: {problem}" in out for problem in SMALLEST)
    rows = json.loads(facts.read_text())["rows"]
    assert [(r["verdict"], r["ours_us"], r["torch_us"], r["ratio"]) for r in rows] == [("WRONG", None, None, None)] * 2
    assert results.read_text().count("| **WRONG** | - | - | - | - | - |") == 2


def test_bench_measures_each_mode_on_its_arrays_and_writes_everything_it_was_asked_for(command, device, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="the plots are drawn by matplotlib")
    if device != "opencl" and not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    seen, plain, (_, results) = [], bench.rival, empty_pages(tmp_path)
    monkeypatch.setattr(
        bench, "rival", lambda torch, problem, x, w: seen.append((problem, x[0].dtype, x[0].stride())) or plain(torch, problem, x, w)
    )
    files = ("--json", tmp_path / "b.json", "--csv", tmp_path / "b.csv", "--plots", tmp_path / "new" / "plots", "--pages", tmp_path)
    status, out, err = command("bench", "--device", device, "--quick", "--only", "2x4x5x5", "--seed", 1, "--mode", "all", *files)
    assert status == OK and all(f"{mode}: 1 of 1 rows timed; 0 wrong" in out and f"[{mode} 1/1]" in err for mode in suite.MODES)
    assert ("H200" in out) == (device != "opencl")
    facts = json.loads((tmp_path / "b.json").read_text())
    assert sorted(facts) == ["host_calls", "loop", "machine", "rows", "summary"] and facts["machine"]["seed"] == 1
    assert list(facts["summary"]) == list(suite.MODES) and set(suite.MODES) < set(facts["machine"]["seconds_of"])
    limits = {"fp32": 1e-6, "tf32": 2e-3, "fp16": 1e-3, "bf16": 8e-3, "fp64": 1e-15}
    for mode, r, (problem, dtype, strides) in zip(suite.MODES, facts["rows"], seen, strict=True):
        assert problem == _layer("conv2d 2x4x5x5", mode) and dtype is getattr(torch, problem.dtype)
        assert strides == ((100, 1, 20, 4) if "nhwc" in mode else (100, 25, 5, 1))
        assert (r["mode"], r["verdict"], r["problem"]) == (mode, "ok", SMALLEST[1]) and r["of_bound"] <= 1
        assert max(r["error"], r["torch_error"]) < limits[mode.partition("-")[0]]
        assert r["ratio"] == pytest.approx(r["torch_us"] / r["ours_us"]) and r["kept_ratio"] == pytest.approx(r["torch_us"] / r["kept_us"])
        if device == "opencl":
            assert {r[name] for name in ("floor_us", "floor_pack_us", "floor_compute_us", "floor_traffic_us", "of_floor")} == {None}
        else:
            assert r["of_floor"] == pytest.approx(r["floor_us"] / r["ours_us"])
            assert r["floor_us"] == r["floor_pack_us"] + max(r["floor_compute_us"], r["floor_traffic_us"])
        for name in ("ratios", "roofline"):
            image = (tmp_path / "new" / "plots" / f"{name}-{mode}.svg").read_text()
            assert "</svg>" in image[-12:] and "torch" in image and len(image) < 100_000  # words are text, not outlines
    with (tmp_path / "b.csv").open(newline="") as file:
        found = [(r["mode"], r["problem"], float(r["ours_us"]), float(r["kept_us"])) for r in csv.DictReader(file)]
    assert found == [(r["mode"], r["problem"], r["ours_us"], r["kept_us"]) for r in facts["rows"]]
    text = results.read_text()
    assert text.startswith(f"above\n{BEGIN}\n") and text.endswith(f"{END}\nbelow\n") and f"\n| {SMALLEST[1]} | " in text
    assert f"--only 2x4x5x5 --device {device} --mode all --quick`" in text


def test_bench_refuses_to_time_a_kernel_that_is_wrong_where_the_filter_is_kept(command, opencl, monkeypatch):
    right = pc.plan.BoundPlan.__call__

    def call(self, input, *, out, stream=None):
        right(self, input, out=out, stream=stream)
        out.view(-1)[-1] += 1e-3

    monkeypatch.setattr(pc.plan.BoundPlan, "__call__", call)
    status, out, _ = command("bench", "--device", "opencl", "--quick", "--only", SMALLEST[0])
    assert status == FAILED and f"WRONG: {SMALLEST[0]}, fp32" in out


CHECKED = (
    ConvProblem.forward(1, (3, 6, 9), (8, 6, 3), padding=1), ConvProblem.forward(2, (3, 6, 5, 5), (9, 2, 3, 3), groups=3),
    ConvProblem.transposed(2, (3, 8, 5, 5), (8, 6, 3, 3), stride=2), ConvProblem.transposed(2, (3, 8, 5, 5), (8, 3, 3, 3), groups=2),
    ConvProblem.forward(3, (3, 4, 4, 4, 4), (8, 4, 3, 3, 3)),
)


@pytest.mark.parametrize("problem", CHECKED, ids=str)
@pytest.mark.parametrize("changes", [{}, {"layout": "NHWC"}, {"dtype": "float16", "layout": "NHWC"}], ids=str)
def test_the_truth_of_some_channels_is_that_of_the_whole(monkeypatch, problem, changes):
    problem = replace(problem, **changes)
    sets = bench.Operands(torch, problem, "cpu", 1, torch.Generator().manual_seed(1))
    x, w = sets.x[0], sets.w[0]
    assert tuple(x.shape) == problem.input_shape and tuple(sets.out[0].shape) == problem.result_shape and not sets.written()
    if problem.layout == "NHWC":
        assert x.permute(problem.order).is_contiguous() and sets.out[0].permute(problem.order).is_contiguous() and not x.is_contiguous()
    result = torch_for(problem)(x.double(), w.double()).to(x.dtype)
    # torch's float16 on the CPU is no better
    torch.testing.assert_close(bench.rival(torch, problem, [x], [w])(0), result, rtol=0, atol=0.05)
    monkeypatch.setattr(oracle, "SLICE_BYTES", 1)  # image by image
    whole = oracle.Truth(torch, problem, x, w)
    assert whole.channels == problem.result_channels and whole.errors(result).correct
    monkeypatch.setattr(oracle, "LARGE_FLOPS", 0)
    monkeypatch.setattr(oracle, "CHECKED_CHANNELS", 2 * problem.groups)
    some = oracle.Truth(torch, problem, x, w, seed=3)
    own = problem.result_channels // problem.groups
    checked = [group * own + c for group in range(problem.groups) for c in oracle.checked_channels(problem, 3)]
    assert some.channels == len(checked) == 2 * problem.groups and some.errors(result).correct
    for channel in range(problem.result_channels):
        broken = result.clone()
        broken[-1, channel].view(-1)[-1] += 1
        assert not whole.errors(broken).correct and some.errors(broken).correct == (channel not in checked)


def test_the_truth_of_float64_has_twice_its_precision():
    """Against fractions; a result with the errors of float64 sums is then told from one that is rounded once."""
    generator = torch.Generator().manual_seed(2)
    x, w = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((1, 7, 6, 5), (3, 7, 3, 3)))
    high, low = oracle.doubled(torch, torch.nn.functional.conv2d, x, w)
    for k, p, q in ((0, 0, 0), (2, 3, 1)):
        taps = [(c, r, s) for c in range(7) for r in range(3) for s in range(3)]
        right = sum(Fraction(float(x[0, c, p + r, q + s])) * Fraction(float(w[k, c, r, s])) for c, r, s in taps)
        assert abs(Fraction(float(high[0, k, p, q])) + Fraction(float(low[0, k, p, q])) - right) < Fraction(1, 2**66)
    problem = ConvProblem.forward(2, tuple(x.shape), tuple(w.shape), dtype="float64")
    truth = oracle.Truth(torch, problem, x, w)
    assert 0 < truth.errors(high).relative < 1.2e-16 < truth.errors(high * (1 + 2**-51)).relative


def test_the_python_loop_agrees_with_the_single_call(device, monkeypatch):
    if device != "opencl" and not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    monkeypatch.setattr(bench, "LOOP_PROBLEMS", (ConvProblem.forward(2, (1, 2, 5, 5), (3, 2, 3, 3), padding=1),))
    with torch.no_grad():
        (found,) = bench.measure_loops(torch, get_device(device), bench.Settings(quick=True), 0)
    assert found["verdict"] == "ok" and found["calls"] == 6 and found["ratio"] == pytest.approx(found["loop_us"] / found["single_us"])


@pytest.mark.parametrize("arguments, words", [
    ((), "required"), (("dance",), "invalid choice"), (("info", "--xml"), "unrecognized"),
    (("verify", "--cases", "depthwize"), "did you mean depthwise?"), (("verify", "--cases", " , "), "names no case"), (("verify", "--device", "tpu"), "'tpu'"),
    (("verify", "--device", "cuda:99", "--cases", "k1s1p0"), ""), (("verify", "--seed", "-1"), "--seed"), (("verify", "--seed", "x"), "'x'"),
    (("bench", "--device", "opencl", "--only", "("), "regular expression"), (("bench", "--device", "opencl", "--only", "conv9d"), "matches no problem"),
    (("bench", "--device", "opencl", "--host-calls"), "--host-calls"), (("bench", "--list", "--only", "("), "regular expression"), (("bench", "--mode", "fp32", "int4"), "int4"), (("bench", "--mode"), "--mode"),
    (("bench", "--device", "opencl", "--json", "/no/such/folder/b.json"), "not a folder"), (("bench", "--device", "opencl", "--csv", "/"), "can't be written"),
    (("bench", "--host", "--training"), "--host and --training are two benchmarks"), (("bench", "--cold", "--models"), "--cold and --models are two benchmarks"),
    (("bench", "--cold", "--list"), "--list is not for --cold"), (("bench", "--families", "2", "--only", "k3"), "--only is not for --families"),
    (("bench", "--cold", "--device", "opencl"), "--cold needs a GPU"),
    (("bench", "--device", "opencl", "--plots", __file__), "must be a folder"), (("bench", "--device", "opencl", "--pages", "/no"), "can't be read"),
    (("bench", "--host", "--mode", "tf32"), "--mode"), (("bench", "--host", "--only", "("), "regular expression"), (("bench", "--host", "--only", "conv9d"), "matches no problem"),
    (("bench", "--devices", "0"), "--devices goes with --host"), (("bench", "--host", "--devices", "x"), "--devices"), (("bench", "--training", "--device", "opencl"), "GPU"),
    (("bench", "--training", "--mode", "tf32"), "--mode is not for"), (("bench", "--training", "--kind", "core"), "--kind is not for"),
    (("bench", "--training", "--list", "--only", "("), "regular expression"), (("bench", "--training", "--list", "--only", "conv9d"), "matches no problem"),
    (("bench", "--host-cost", "--mode", "tf32"), "--mode"), (("bench", "--host-cost", "--csv", "x.csv"), "--csv"), (("bench", "--host-cost", "--pages", "."), "--pages"),
], ids=lambda value: " ".join(map(str, value))[-50:] if isinstance(value, tuple) else "")
def test_what_cannot_be_done_is_told_in_one_line(command, opencl, arguments, words):
    status, out, err = command(*arguments)
    assert (status, out) == (UNUSABLE, "")
    assert err.count("\n") == 1 and err.endswith("\n") and words in err and err.startswith("pycuda-conv")


@pytest.mark.parametrize("variable, value, call", [
    ("PYCUDA_CONV_CACHE_LIMIT", "1 GB", kernel_cache.limit), ("PYCUDA_CONV_BACKGROUND", "no", background.enabled), ("PYCUDA_CONV_PINNED_LIMIT", "much", pinned.default_limit),
    ("PYCUDA_CONV_LAUNCHER", "rust", launcher.launcher_in_c),
])  # fmt: skip
def test_a_variable_of_the_environment_is_told_in_one_line(command, monkeypatch, variable, value, call):
    def run(arguments):
        call()

    monkeypatch.setattr(cli, "_run", run)
    monkeypatch.setenv(variable, value)
    status, out, err = command("info")
    assert (status, out, err.count("\n")) == (UNUSABLE, "", 1) and err.startswith(f"pycuda-conv info: {variable} must be") and value in err

    def fault(arguments):
        raise pc.ConvArgumentError("stride must be below 2^29")

    monkeypatch.setattr(cli, "_run", fault)
    with pytest.raises(pc.ConvArgumentError):  # a fault of the program
        command("info")


@pytest.mark.parametrize("missing, arguments", [
    ("torch", ["bench", "--device", "opencl"]), ("rich.console", ["info"]), ("matplotlib", ["bench", "--device", "opencl", "--plots", "."])
])
def test_a_missing_package_is_told_in_one_line(command, opencl, monkeypatch, missing, arguments):
    monkeypatch.setitem(sys.modules, missing, None)
    status, out, err = command(*arguments)
    assert (status, out, err.count("\n")) == (UNUSABLE, "", 1) and missing.partition(".")[0] in err and "pip install" in err


def test_lists_name_every_case_and_problem(command):
    status, out, err = command("bench", "--training", "--list")
    assert (status, err, out.count("\n")) == (OK, "", 18) and out.count("conv2d_weight") == 6 and out.count("gradient by input") == 7
    assert command(
        "bench", "--training", "--list", "--only", "4x16.*bf16"
    )[1] == "conv + batch norm + ReLU 4x16x32x32 -> 32 k3x3 p1 bf16-nhwc\n"
    status, out, err = command("bench", "--host", "--list")
    assert (status, err) == (OK, "") and [line[:60].rstrip() for line in out.splitlines()] == [str(case) for case in hostbench.CASES]
    assert "4x16x32x32 -> 32 3x3, float32\n" in command("bench", "--host-cost", "--list")[1]
    status, out, err = command("verify", "--list")
    assert (status, err) == (OK, "") and [line.split()[0] for line in out.splitlines()] == list(verify.CASES)
    status, out, err = command("bench", "--list")
    assert (status, err) == (OK, "") and [line[:60].rstrip() for line in out.splitlines()] == [bench.label(p) for p in suite.suite()]
    assert command("bench", "--list", "--only", "5x5 -> 8")[1].splitlines()[0].startswith(SMALLEST[1])
    assert command("bench", "--list", "--device", "opencl")[1].count("\n") == 6
    assert command("bench", "--list", "--device", "cpu", "--only", ".")[1] == out
    found = command("bench", "--list", "--kind", "large filters")[1].splitlines()
    assert [line[:60].rstrip() for line in found] == [bench.label(p) for p in suite.KINDS["large filters"]()]


# ---- as processes of their own


def process(arguments, tmp_path, env):
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900, check=False
    )


@pytest.mark.parametrize("start, expected", [
    (("-m", "pycuda_conv", "verify", "--list"), "notebook-single"), (("verify.py", "--cases", "notebook-single", "--device", "opencl"), "2 of 2 passed"),
    (("benchmark.py", "--list"), SMALLEST[0]), (("device_info.py", "--json"), '"gpu_count"'),
], ids=["-m pycuda_conv", "verify.py", "benchmark.py", "device_info.py"])
def test_it_starts_from_any_folder(start, expected, opencl, fast_env, tmp_path):
    env = dict(fast_env)
    if start[0].endswith(".py"):
        if not (ROOT / "scripts").is_dir():
            pytest.skip("no scripts/ beside the package")
        start = (ROOT / "scripts" / start[0], *start[1:])
        env.pop("PYTHONPATH")  # they find the checkout themselves
    done = process(start, tmp_path, env)
    assert (done.returncode, done.stderr) == (OK, "") and expected in done.stdout


WITHOUT = """
import contextlib, io, json, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ImportError(f"{{name}} is not there")
sys.meta_path.insert(0, Block())
from pycuda_conv.runtime import driver
driver.has_gpu = lambda: {gpu}
from pycuda_conv.cli import main
def called(arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            status = main(arguments)
        except SystemExit as exit:
            status = exit.code
    return status, out.getvalue(), err.getvalue()
print(json.dumps([called(arguments) for arguments in {commands}]))
"""


def without(names, commands, tmp_path, env, gpu=False):
    """Commands in one process that can't import these: for each its exit status, stdout, stderr."""
    done = process(("-c", WITHOUT.format(names=names, commands=[list(one) for one in commands], gpu=gpu)), tmp_path, env)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_verify_needs_no_torch(opencl, fast_env, tmp_path):
    arguments = ("verify", "--device", "opencl", "--cases", "notebook-single,bfloat16,gradient-by-input", "--seed", "3")
    (status, out, err), (_, facts, _) = without(("torch", "ml_dtypes"), (arguments, (*arguments, "--json")), tmp_path, fast_env)
    assert (status, err) == (OK, "") and "2 of 2 passed" in out and "torch is not installed" in out
    assert "left out: bfloat16; numpy has no bfloat16 without the package ml_dtypes" in out
    found = json.loads(facts)
    assert {r["torch_relative"] for r in found["results"]} == {None} and {r["array"] for r in found["results"]} == {"numpy"}


def test_without_a_gpu_nobody_is_told_to_install_pycuda(python_env, tmp_path):
    commands = [
        ("info",), ("bench",), *(("bench", f"--{way}") for way in ("cold", "host", "training", "models")), ("tune",),
        ("warm", "--device", "cuda"), ("verify", "--device", "0")
    ]
    for arguments, (status, out, err) in zip(commands, without(("pycuda",), commands, tmp_path, python_env), strict=True):
        assert "no NVIDIA GPU was found" in out + err and "[cuda]" not in out + err and "PyCUDA is not" not in out + err, arguments
        assert status == (OK if arguments == ("info",) else UNUSABLE) and err.count("\n") <= 1


def test_what_the_tools_import_comes_with_the_package():
    setup = configparser.ConfigParser()
    if not setup.read(ROOT / "setup.cfg"):
        pytest.skip("no setup.cfg beside the package")
    assert {"rich", "pillow"} <= set(setup["options"]["install_requires"].split())
    known = " ".join(setup["options.extras_require"].values()) + setup["options"]["install_requires"]
    for package in ("torch", "matplotlib", "dask", "distributed", "zarr", "tifffile", "fsspec"):
        assert re.search(rf"\b{terminal.INSTALLED_BY.get(package, package)}".replace("[", r"\[").replace("'", ""), known)
