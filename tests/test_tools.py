"""The tools: their arithmetic, the files they write, and the command `pycuda-conv` with its exit statuses."""

import contextlib
import csv
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import why_no_cuda, why_no_opencl

import pycuda_conv as pc
from pycuda_conv import cli
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime import get_device
from pycuda_conv.runtime.opencl import OpenCLDevice
from pycuda_conv.tools import bench, report, suite, timing, verify
from pycuda_conv.tools.oracle import compare
from pycuda_conv.tools.report import BEGIN, END, Row, geometric_mean, quantile
from pycuda_conv.tools.terminal import FAILED, INTERRUPTED, OK, UNUSABLE, ToolError
from pycuda_conv.tools.timing import Effort

ROOT = Path(pc.__file__).resolve().parent.parent
SMALLEST = ("conv2d 1x1x5x5 -> 1x3x3 k3x3 s1 p0", "conv2d 2x4x5x5 -> 8x5x5 k3x3 s1 p1")
ONLY_SMALLEST = "x5x5 -> "
PNG = b"\x89PNG\r\n\x1a\n"


# ---- arithmetic


@pytest.mark.parametrize("values, mean", [((), None), ((3,), 3), ((0.5, 2), 1), ((1, 10, 100), 10), ((1e-200,) * 3, 1e-200)])
def test_geometric_mean(values, mean):
    assert geometric_mean(iter(values)) == (mean if mean is None else pytest.approx(mean, rel=1e-12))


@pytest.mark.parametrize("count", [1, 2, 5, 8])
@pytest.mark.parametrize("q", [0, 0.25, 0.5, 0.75, 1])
def test_quantile_is_numpy_s(count, q):
    values = np.random.default_rng(count).random(count).tolist()
    assert quantile(values, q) == pytest.approx(np.quantile(values, q))


def row(flops=10**9, ours=10.0, torch=20.0, **others) -> Row:
    return Row(**{"problem": "p", "kernel": "Gemm", "config": "Gemm()", "flops": flops, "bytes": 10**6, "groups": 1, "ours_us": ours, "torch_us": torch, **others})


def wrong(**others) -> Row:
    return row(ours=None, torch=None, verdict="WRONG", error=0.5, torch_error=1e-7, **others)


def test_a_row_s_speed_and_ratio():
    assert row().tflops == pytest.approx(100) and row().torch_tflops == pytest.approx(50) and row().ratio == 2
    assert (wrong().tflops, wrong().torch_tflops, wrong().ratio) == (None, None, None)


def test_the_summary_counts_each_row_where_it_belongs():
    rows = [
        row(6 * 10**9, 10, 40), row(2 * 10**9, 10, 10, problem="slow"), row(8 * 10**9, 40, 10, problem="slowest"),
        row(9 * 10**9, 900, 900, groups=4), row(10**6, 10, 90), wrong(),
    ]
    found = report.summary(rows)
    assert found["ratio_above_5_gflop"] == {"geometric_mean": pytest.approx(1), "rows": 3}
    assert found["ratio_dense_above_1_gflop"] == {"geometric_mean": pytest.approx(1), "rows": 3}
    assert found["ratio_all"] == {"geometric_mean": pytest.approx(9 ** (1 / 5)), "rows": 5}
    assert found["lowest_tflops_problem"] == "slowest" and found["lowest_tflops_dense_above_5_gflop"] == pytest.approx(200)
    assert (found["faster_rows"], found["timed_rows"], found["rows"], found["wrong_rows"]) == (2, 5, 6, 1)
    assert report.summary_lines(found)[-1] == "ours is faster in 2 of 5 timed rows; 1 wrong"


def test_the_summary_of_nothing():
    assert report.summary_lines(report.summary([])) == ["ours is faster in 0 of 0 timed rows; 0 wrong"]


def test_cells_show_a_dash_where_there_is_no_number():
    shown = dict(enumerate(report.cells(row(error=1.24e-7, timing="graph"))))
    assert len(shown) == len(report.COLUMNS)
    assert list(shown.values()) == ["p", "Gemm", "10.00", "100", "20.00", "50", "2.00", "1.2e-07", "-", "graph", "ok"]
    assert report.cells(wrong())[2:7] == ("-",) * 5 and report.cells(wrong())[-1] == "WRONG"


@pytest.mark.parametrize("us, text", [(None, "-"), (1.234, "1.23"), (123.45, "123.5"), (12345.6, "12346")])
def test_microseconds(us, text):
    assert report.microseconds(us) == text


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 3e-6, 1e-4, 1e-3, 0.1])
@pytest.mark.parametrize("sets", [1, 3, 7, 256])
def test_launches_use_every_set_equally_and_fill_a_round(seconds, sets):
    count = timing.launches(seconds, sets)
    assert count % sets == 0 and sets <= count < timing.MOST_LAUNCHES + sets
    assert count >= timing.MOST_LAUNCHES or count * seconds >= timing.ROUND


@pytest.mark.parametrize("round_seconds, rounds", [(0.0, 50), (0.01, 30), (0.1, 7), (10, 7)])
def test_effort_lies_between_its_bounds(round_seconds, rounds):
    assert Effort(rounds=7, seconds=0.3, most_rounds=50).count(round_seconds) == rounds


@pytest.mark.parametrize("problem", suite.suite(), ids=bench.label)
def test_operand_sets_and_checked_images(problem):
    for cache in (0, 2**20, 50 * 2**20):
        sets = timing.operand_sets(problem, cache)
        assert 1 <= sets <= timing.MOST_SETS
        assert sets == timing.MOST_SETS or sets * problem.bytes >= 2 * cache
        assert sets == 1 or (sets - 1) * problem.bytes < 2 * cache
    images = bench.checked_images(problem)
    assert images[0] == 0 and images[-1] == problem.N - 1 and images == sorted(set(images))
    assert len(images) >= min(problem.N, bench.REFERENCE_IMAGES)
    steps = [b - a for a, b in pairwise(images)] or [0]
    assert max(steps) - min(steps) <= 1
    assert len(images) <= bench.REFERENCE_IMAGES or 2 * problem.flops * len(images) / problem.N <= bench.REFERENCE_FLOPS


def test_the_suite_s_labels_are_unique():
    labels = [bench.label(p) for p in suite.suite()]
    assert len(set(labels)) == len(labels) and set(SMALLEST) <= set(labels)


@pytest.mark.parametrize("settings, command", [
    ({}, "make bench"), ({"readme": Path("README.md"), "seed": 3}, "make bench"), ({"precision": "tf32", "quick": True}, "pycuda-conv bench --precision tf32 --quick"),
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


def test_the_copy_s_bandwidth_is_that_of_the_best_round(monkeypatch):
    gpu, copies = FakeCuda(), []
    buffer = SimpleNamespace(numel=lambda: 10**6, element_size=lambda: 4)

    def copy(*_, **__):  # at its best for a few rounds only, which the median does not see
        copies.append(1)
        gpu.way(1e-3 if 100 <= len(copies) < 120 else 2e-3, [])(0)

    buffer.copy_ = gpu.neg = copy
    gpu.randn = lambda *shape, device: buffer
    assert bench.copy_bandwidth(gpu, "cuda:0") == pytest.approx(8e6 / (1e-3 + gpu.LAUNCH))
    assert len(copies) > bench.COPY_WARM_UP + 2 * bench.COPY_ROUNDS


# ---- Markdown

MACHINE = {
    "date": "2026-01-02T03:04:05+00:00", "GPU": "NVIDIA H200, compute capability 9.0, 132 multiprocessors", "driver": "580.65, CUDA 13.0, nvcc 13.0.48",
    "torch": "2.9.0, CUDA 12.8, cuDNN 91002, cudnn.benchmark = True, torch.backends.cudnn.conv.fp32_precision = 'ieee'", "precision": "fp32",
    "method": "median", "command": "make bench",
}
LOOPS = [{"problem": "l", "calls": 64, "loop_us": 640.0, "single_us": 6.4, "ratio": 100.0, "verdict": v} for v in ("ok", "WRONG")]
CALLS = [{"problem": "h", "call": "pc.conv2d(x, w)", "us": 12.34}]


def test_markdown_tells_the_machine_the_command_and_every_row():
    rows = [row(error=1e-7, torch_error=2e-7), wrong(problem="w")]
    text = report.markdown(MACHINE, rows, report.summary(rows), LOOPS, CALLS)
    first = text.splitlines()[0]
    for part in ("NVIDIA H200", "driver 580.65", "CUDA 13.0", "torch 2.9.0", "cuDNN 91002", "fp32_precision = 'ieee'", "2026-01-02", "`make bench`"):
        assert part in first
    for line in (
        "- ours is faster in 1 of 1 timed rows; 1 wrong", "| problem | kernel | ours us | TFLOP/s | torch us | ratio | error | torch's error |",
        "| p | Gemm | 10.00 | 100 | 20.00 | 2.00 | 1.0e-07 | 2.0e-07 |", "| w | Gemm | **WRONG** | - | - | - | 5.0e-01 | 1.0e-07 |",
        "| l | 64 | 640.0 | 6.40 | 100 |", "| l | 64 | 640.0 | **WRONG** | 100 |", "| `pc.conv2d(x, w)` | 12.3 |",
    ):
        assert line in text.splitlines()
    for table in re.findall(r"(?:^\|.*\n?)+", text, re.M):
        assert len({line.count("|") for line in table.splitlines()}) == 1 and set(table.splitlines()[1]) <= set("|-: ")


def test_markdown_leaves_out_what_was_not_measured():
    text = report.markdown({**MACHINE, "GPU": None, "CPU": "EPYC", "driver": None}, [], report.summary([]), [], [])
    assert "|" not in text and text.startswith("EPYC; torch") and "driver" not in text


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


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}\n{BEGIN}\n", f"{BEGIN}\n{BEGIN}\n{END}\n", f"x {BEGIN}\n{END}\n", None, b"\xff"], ids=repr)
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


def test_the_readme_can_take_the_results():
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("no README.md beside the package")
    before, after = report.around_results(readme)
    assert before.endswith(f"## Results\n\n{BEGIN}\n") and after.startswith(END)


# ---- the command


@pytest.fixture
def command(capsys, monkeypatch):
    """Run the command in this process: (exit status, stdout, stderr)."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments):
        capsys.readouterr()
        try:
            status = cli.main([str(a) for a in arguments])
        except SystemExit as exit:  # argparse leaves by itself
            status = exit.code
        return (status, *capsys.readouterr())

    return run


@pytest.fixture
def opencl():
    if why_no_opencl():
        pytest.skip(why_no_opencl())
    return "opencl"


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="the results are judged by torch")


@pytest.fixture
def rich():
    return pytest.importorskip("rich", reason="the tables are drawn by rich")


@pytest.fixture(params=[(lambda out, i: out.flat[i] + 1e-3), (lambda out, i: np.nan)], ids=["one element off by 1e-3", "one element unwritten"])
def wrong_kernel(opencl, request, monkeypatch):
    """Every result on OpenCL is wrong in its last element. All outputs are NaN before: such is what is never written."""
    right = OpenCLDevice.run_on_host_arrays

    def run(self, launch, inputs, out, workspace, stream):
        right(self, launch, inputs, out, workspace, stream)
        out.flat[-1] = request.param(out, -1)

    monkeypatch.setattr(OpenCLDevice, "run_on_host_arrays", run)
    return request.param_index


def test_info_tells_its_sections_as_text(command, rich):
    status, out, err = command("info")
    assert (status, err) == (OK, "")
    for words in ("Versions", "numpy", "What the package uses", "default device", "cache folder", str(ROOT)):
        assert words in out
    assert ("No GPU is seen." in out) or ("compute capability" in out)


def test_info_tells_its_sections_as_json(command):
    status, out, err = command("info", "--json")
    facts = json.loads(out)
    assert (status, err) == (OK, "")
    assert sorted(facts) == ["cuda_missing", "gpu_count", "gpus", "opencl", "uses", "versions"]
    assert facts["versions"]["numpy"] == np.__version__ and len(facts["gpus"]) == facts["gpu_count"]
    assert {"backend", "device", "why", "environment", "cache", "kernels"} == set(facts["uses"]) and Path(facts["uses"]["kernels"]).is_dir()


def test_verify_passes_and_says_so(command, device, torch, rich):
    status, out, err = command("verify", "--cases", "notebook-single, k1s1p0", "--device", device, "--seed", 7)
    assert (status, err) == (OK, "") and "FAIL" not in out
    assert out.count(" pass ") >= 4 and "passed in" in out and "--seed 7 repeats this" in out


def test_verify_compares_every_dtype(command, device, torch):
    status, out, err = command("verify", "--cases", "float16,bfloat16,float64", "--device", device, "--seed", "5", "--json")
    assert (status, err) == (OK, "")
    arrays = {(r["case"], r["array"]) for r in json.loads(out)["results"]}
    assert ("bfloat16", "torch cpu") in arrays and (("bfloat16", "numpy") in arrays) == (importlib.util.find_spec("ml_dtypes") is not None)


def test_verify_s_json_tells_every_comparison_and_a_seed_repeats_it(command, device, torch):
    def found():
        status, out, err = command("verify", "--cases", "k1s1p0,notebook-single", "--device", device, "--seed", "5", "--json")
        assert (status, err) == (OK, "")
        return json.loads(out)

    facts = found()
    assert (facts["device"], facts["seed"], facts["passed"]) == (device, 5, True)
    assert [r["case"] for r in facts["results"] if r["array"] == "numpy"] == ["k1s1p0", "notebook-single"]
    assert all(r["passed"] and 0 < r["relative_error"] <= r["relative_limit"] and r["of_bound"] <= 1 for r in facts["results"])
    assert [r["max_error"] for r in found()["results"]] == [r["max_error"] for r in facts["results"]]


@pytest.mark.parametrize("case", verify.CASES.values(), ids=str)
def test_a_case_s_data_fit_its_problem_and_do_not_depend_on_the_others(case):
    x, w, b = case.data(3)
    assert (x.shape, w.shape) == (case.problem.input_shape[-x.ndim :], case.problem.weight_shape) and (b is not None) == case.bias
    assert all(np.array_equal(a, again) for a, again in zip((x, w), case.data(3), strict=False)) and not np.array_equal(x, case.data(4)[0])


def test_verify_fails_when_a_kernel_is_wrong(command, wrong_kernel, torch, rich):
    arguments = ("verify", "--cases", "k1s1p0,notebook-single", "--device", "opencl")
    status, out, _ = command(*arguments)
    assert status == FAILED and out.count(" FAIL ") == 4 and "0 of 4 passed" in out
    assert "worst at [3, 31, 31, 31]" in out and "worst at [0, 0, 2, 2]" in out  # the element, by its index
    assert ("1 of 131072 elements are NaN" in out) == bool(wrong_kernel)
    status, out, _ = command(*arguments, "--json")
    assert status == FAILED and json.loads(out)["passed"] is False and not any(r["passed"] for r in json.loads(out)["results"])


def test_bench_refuses_to_time_a_wrong_kernel(command, wrong_kernel, torch, rich, tmp_path):
    readme, facts = tmp_path / "r.md", tmp_path / "b.json"
    readme.write_text(f"{BEGIN}\n{END}\n")
    status, out, _ = command("bench", "--device", "opencl", "--quick", "--only", ONLY_SMALLEST, "--json", facts, "--readme", readme)
    assert status == FAILED and all(f"WRONG: {problem}" in out for problem in SMALLEST)
    rows = json.loads(facts.read_text())["rows"]
    assert [(r["verdict"], r["ours_us"], r["torch_us"], r["ratio"]) for r in rows] == [("WRONG", None, None, None)] * 2
    assert readme.read_text().count("| **WRONG** | - | - | - |") == 2


def test_bench_refuses_a_kernel_that_goes_wrong_while_it_is_timed(command, opencl, torch, rich, monkeypatch):
    right, calls = OpenCLDevice.run_on_host_arrays, []

    def run(self, launch, inputs, out, workspace, stream):
        calls.append(1)
        if len(calls) == 1:  # after that nothing is written
            right(self, launch, inputs, out, workspace, stream)

    monkeypatch.setattr(OpenCLDevice, "run_on_host_arrays", run)
    status, out, _ = command("bench", "--device", "opencl", "--quick", "--only", SMALLEST[0])
    assert status == FAILED and "WRONG" in out and len(calls) > 1


def test_bench_writes_everything_it_was_asked_for(command, device, torch, rich, tmp_path):
    pytest.importorskip("matplotlib", reason="the plots are drawn by matplotlib")
    if device != "opencl" and not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    readme = tmp_path / "README.md"
    readme.write_text((ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else f"{BEGIN}\n{END}\n")
    before, after = report.around_results(readme)
    files = ("--json", tmp_path / "b.json", "--csv", tmp_path / "b.csv", "--plots", tmp_path / "new" / "plots", "--readme", readme)
    status, out, _ = command("bench", "--device", device, "--quick", "--only", ONLY_SMALLEST, "--seed", 1, *files)
    assert status == OK and "of 2 timed rows; 0 wrong" in out

    facts = json.loads((tmp_path / "b.json").read_text())
    assert sorted(facts) == ["host_calls", "loop", "machine", "rows", "summary"] and facts["machine"]["seed"] == 1
    assert tuple(r["problem"] for r in facts["rows"]) == SMALLEST
    for r in facts["rows"]:
        assert r["verdict"] == "ok" and r["ratio"] == pytest.approx(r["torch_us"] / r["ours_us"]) and 0 <= r["error"] < 1e-6 and r["of_bound"] <= 1
    with (tmp_path / "b.csv").open(newline="") as file:
        assert [(r["problem"], float(r["ours_us"])) for r in csv.DictReader(file)] == [(r["problem"], r["ours_us"]) for r in facts["rows"]]
    for name in ("ratios.png", "roofline.png"):
        image = (tmp_path / "new" / "plots" / name).read_bytes()
        assert image.startswith(PNG) and b"IEND" in image[-12:]
    text = readme.read_text()
    assert text.startswith(before) and text.endswith(after)
    assert all(f"\n| {problem} | " in text for problem in SMALLEST) and f"--only '{ONLY_SMALLEST}' --device {device} --quick`" in text


def test_the_python_loop_agrees_with_the_single_call(device, torch, monkeypatch):
    if device != "opencl" and not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    monkeypatch.setattr(bench, "LOOP_PROBLEMS", (ConvProblem.forward(2, (1, 2, 5, 5), (3, 2, 3, 3), padding=1),))
    with torch.no_grad():
        (found,) = bench.measure_loops(torch, get_device(device), bench.Settings(quick=True), 0)
    assert found["verdict"] == "ok" and found["calls"] == 6 and found["ratio"] == pytest.approx(found["loop_us"] / found["single_us"])


def test_bench_without_a_gpu_says_what_to_do(command):
    if why_no_cuda() is None:
        pytest.skip("there is a GPU")
    status, out, err = command("bench")
    assert (status, out, err.count("\n")) == (UNUSABLE, "", 1) and "no GPU to measure" in err and "--device opencl" in err


@pytest.mark.parametrize("arguments, words", [
    ((), "required"), (("dance",), "invalid choice"), (("info", "--xml"), "unrecognized"),
    (("verify", "--cases", "depthwize"), "did you mean depthwise?"), (("verify", "--cases", " , "), "names no case"), (("verify", "--device", "tpu"), "'tpu'"),
    (("verify", "--device", "cuda:99", "--cases", "k1s1p0"), ""), (("verify", "--seed", "-1"), "--seed"), (("verify", "--seed", "x"), "'x'"),
    (("bench", "--device", "opencl", "--only", "("), "regular expression"), (("bench", "--device", "opencl", "--only", "conv9d"), "matches no problem"),
    (("bench", "--device", "opencl", "--host-calls"), "--host-calls"), (("bench", "--list", "--only", "("), "regular expression"), (("bench", "--precision", "int4"), "int4"),
    (("bench", "--device", "opencl", "--json", "/no/such/folder/b.json"), "no folder"), (("bench", "--device", "opencl", "--csv", "/"), "can't be written"),
    (("bench", "--device", "opencl", "--plots", __file__), "must be a folder"), (("bench", "--device", "opencl", "--readme", "/no/README.md"), "can't be read"),
    (("bench", "--device", "opencl", "--readme", ROOT / "setup.cfg"), "results:begin"),
], ids=lambda value: " ".join(map(str, value))[-50:] if isinstance(value, tuple) else "")
def test_what_cannot_be_done_is_told_in_one_line(command, opencl, torch, arguments, words):
    status, out, err = command(*arguments)
    assert (status, out) == (UNUSABLE, "")
    assert err.count("\n") == 1 and err.endswith("\n") and words in err and err.startswith("pycuda-conv")


@pytest.mark.parametrize("missing, arguments", [("torch", ["verify", "--device", "opencl"]), ("rich.console", ["info"]), ("matplotlib", ["bench", "--device", "opencl", "--plots", "."])])
def test_a_missing_package_is_told_in_one_line(command, opencl, torch, monkeypatch, missing, arguments):
    monkeypatch.setitem(sys.modules, missing, None)
    status, out, err = command(*arguments)
    assert (status, out, err.count("\n")) == (UNUSABLE, "", 1) and missing.partition(".")[0] in err and "pip install" in err


def test_lists_name_every_case_and_problem(command):
    status, out, err = command("verify", "--list")
    assert (status, err) == (OK, "") and [line.split()[0] for line in out.splitlines()] == list(verify.CASES)
    status, out, err = command("bench", "--list")
    assert (status, err) == (OK, "") and [line[:60].rstrip() for line in out.splitlines()] == [bench.label(p) for p in suite.suite()]
    assert command("bench", "--list", "--only", "5x5 -> 8")[1].splitlines()[0].startswith(SMALLEST[1])


COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3|4|9|10)[0-7]m")


def test_colours_unless_no_color_is_set(command, wrong_kernel, torch, rich, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    arguments = ("verify", "--cases", "notebook-single", "--device", "opencl")
    assert "\x1b" not in command(*arguments)[1]  # not a terminal
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert COLOUR.search(command(*arguments)[1])
    monkeypatch.setenv("NO_COLOR", "1")
    assert not COLOUR.search(command(*arguments)[1])
    monkeypatch.delenv("FORCE_COLOR")
    assert "\x1b" not in command(*arguments)[1]


def test_ctrl_c_ends_with_130(command, opencl, torch, rich, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "verify", interrupted)
    assert command("verify", "--device", "opencl") == (INTERRUPTED, "", "interrupted\n")


# ---- as processes of their own


def process(arguments, tmp_path, env):
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("start, expected", [
    (("-m", "pycuda_conv", "verify", "--list"), "notebook-single"), (("verify.py", "--cases", "notebook-single", "--device", "opencl"), "2 of 2 passed"),
    (("benchmark.py", "--list"), SMALLEST[0]), (("device_info.py", "--json"), '"gpu_count"'),
], ids=["-m pycuda_conv", "verify.py", "benchmark.py", "device_info.py"])
def test_it_starts_from_any_folder(start, expected, opencl, torch, rich, python_env, tmp_path):
    env = dict(python_env)
    if start[0].endswith(".py"):
        if not (ROOT / "scripts").is_dir():
            pytest.skip("no scripts/ beside the package")
        start = (ROOT / "scripts" / start[0], *start[1:])
        env.pop("PYTHONPATH")  # they find the checkout themselves
    done = process(start, tmp_path, env)
    assert (done.returncode, done.stderr) == (OK, "") and expected in done.stdout


def test_the_process_s_exit_status_is_the_command_s(python_env, tmp_path):
    done = process(("-m", "pycuda_conv", "verify", "--cases", "none such"), tmp_path, python_env)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (UNUSABLE, "", 1)


def test_a_reader_that_has_had_enough_is_no_error(python_env, tmp_path):
    done = subprocess.Popen([sys.executable, "-m", "pycuda_conv", "bench", "--list"], env=python_env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    done.stdout.close()
    assert done.stderr.read() == b"" and done.wait(60) == OK
    done.stderr.close()
