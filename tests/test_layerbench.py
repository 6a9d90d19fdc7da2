"""``bench --suite``: KernelBench's layers and drawn ones, torch's ways, means and pages. Times are a GPU's; the rest is not."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import pycuda_conv as pc
from pycuda_conv import ConvProblem
from pycuda_conv.cli import main
from pycuda_conv.runtime import get_device
from pycuda_conv.tools import plots, report
from pycuda_conv.tools.benchmarks import layerbench as bench
from pycuda_conv.tools.benchmarks import numbersbench, pages

MACHINE = {"command": "a command", "date": "2026-11-29T00:00", "GPU": "a GPU, of some kind", "torch": "2.0", "method": "a clock"}


def test_kernelbenchs_layers():
    layers = bench.kernelbench()
    assert len(layers) == 36 and len({name for name, _ in layers}) == 35  # one problem has two layers
    assert Counter(one.ndim for _, one in layers) == {1: 5, 2: 20, 3: 11}
    assert Counter(one.direction for _, one in layers) == {"fprop": 19, "dgrad": 17}
    first, second = (one for name, one in layers if name.startswith("86_"))
    assert first.result_shape == second.input_shape


def test_drawn_layers_are_of_every_kind_and_others_for_each_seed():
    some, others = ([*bench.drawn(seed, 2, bench.DRAWN_MODES)] for seed in (1, 2))
    assert len(some) == 2 * len(bench.DRAWN_MODES) * (3 * 12 - 2) and not {one for *_, one in some} & {one for *_, one in others}
    kinds = {(a, b) for a in bench.PASSES for b in ("NCHW", "NHWC")}
    assert {(one.direction, one.layout) for *_, one in some[:40]} >= kinds  # a part of them has every kind


def test_every_way_of_torchs_computes_the_layer():
    layers = [
        ConvProblem.forward(2, (2, 8, 9, 9), (6, 8, 1, 1)), ConvProblem.transposed(2, (2, 8, 5, 5), (8, 4, 3, 3), stride=2, output_padding=1),
        ConvProblem.gradient("weight", 2, (2, 4, 9, 9), (6, 4, 3, 3), (2, 6, 9, 9), padding=1, layout="NHWC"),
        ConvProblem.gradient("input", 2, (2, 4, 9, 9), (6, 2, 3, 3), (2, 6, 5, 5), padding=1, stride=2, groups=2),
        *(ConvProblem.gradient("weight", 1, (2, 4, 20), (6, 4, 3), (2, 6, 20), padding=1, layout=layout) for layout in ("NCHW", "NHWC")),
        ConvProblem.gradient("weight", 3, (2, 4, 6, 5, 4), (6, 4, 3, 3, 3), (2, 6, 6, 5, 4), padding=1, layout="NHWC"),
    ]
    before = torch.get_float32_matmul_precision()
    for problem in layers:
        x, w = torch.randn(problem.input_shape), torch.randn(problem.weight_shape)
        errors, ways = bench.reference(torch, problem, x, w, 0), bench.rivals(torch, problem, [x], [w])
        assert (bench.CUBLAS in ways) == (problem is layers[0]) and (bench.LAST in ways) == (problem.ndim > 1)
        for name, way in ways.items():
            found = errors(way(0))
            assert found.correct or (name in ("torch, fp16", "torch, bf16") and found.relative < bench.MOST_ROUNDED), (problem, name)
        out = torch.full(problem.result_shape, torch.nan)
        bench.called(problem)(x, w, out=out)
        assert errors(out).correct and not errors(out * 1.001).correct
        rounded = out * (1 + 4e-4 * torch.sign(torch.randn(out.shape)))  # as TF32 rounds
        assert errors(rounded, replace(problem, precision="tf32")).correct and not errors(rounded).correct
    assert torch.get_float32_matmul_precision() == before


def test_means_and_pages():
    """The two layers of one problem count together; a way that failed counts nowhere."""
    one = bench.Row(
        "a", "first", "fp32", "fprop", {bench.OURS: 2.0, bench.DEFAULT: 3.0, bench.OURS_TF32: 1.0},
        {bench.OURS: 1e-7, bench.DEFAULT: 3e-4, bench.OURS_TF32: 3e-4}
    )
    two = bench.Row("a", "second", "fp32", "fprop", {bench.OURS: 2.0, bench.DEFAULT: 9.0, bench.OURS_TF32: 1.0}, one.errors)
    other = bench.Row("b", "third", "fp32", "fprop", {bench.OURS: 4.0, bench.DEFAULT: 3.0}, one.errors)
    found = bench.means([one, two, other], "kernelbench")
    assert [mean.cells()[1:] for mean in found] == [
        ("2", "1.50", "0.75", "1", "50.0%", "1.0e-07", "3.0e-04"), ("1", "6.00", "6.00", "0", "0.0%", "3.0e-04", "3.0e-04")
    ]
    text = bench.page(MACHINE, [one, two, other], found, "kernelbench")
    assert "| third | 4.00 (1e-07) | 3.00 (3e-04) | - |" in text and "a command" in text
    rows = [bench.Row("", f"layer {i}", "tf32", "fprop" if i else "dgrad", {bench.OURS: 2.0, bench.TORCH: 1.0 + i}) for i in range(3)]
    text = bench.page(MACHINE, rows, bench.means(rows, "drawn"), "drawn")
    assert "| tf32 | 3 | 0.91 | 0.50 | 1 | 33.3% | - | - |" in text and "| tf32 dgrad | layer 0 | 0.50 |" in text


@pytest.mark.parametrize("numbers", numbersbench.NUMBERS)
def test_fp32_with_every_kind_of_numbers(device, numbers):
    """Right with each; the row tells both sides' errors, and on a GPU the times."""
    problem = ConvProblem.forward(2, (9, 16, 9, 11), (24, 16, 3, 3), padding=1)
    row = numbersbench.measure(torch, pc.Plan(problem, get_device(device)), numbers, 3)
    assert not row.wrong and row.errors[bench.OURS] < 2e-6 and row.numbers == numbers
    assert len(row.cells()) == len(numbersbench.COLUMNS) and (row.cells()[2] == "-") == (device == "opencl")


def test_the_chart_of_time_and_error(tmp_path):
    """Over the layers that every way computed; the same figures give the same bytes."""
    pytest.importorskip("matplotlib")
    rows = [bench.Row(
        "", str(i), "fp32", "fprop", {bench.OURS: 2.0 * i, bench.IEEE: 8.0 * i, **({bench.LAST: 1.0} if i == 1 else {})},
        {bench.OURS: 1e-7, bench.IEEE: 4e-7, bench.LAST: 1e-4}
    ) for i in (1, 2)]
    assert bench.points(rows) == {bench.OURS: (pytest.approx(0.25), pytest.approx(1e-7)), bench.IEEE: (1.0, pytest.approx(4e-7))}
    for name in ("one.svg", "two.svg"):
        plots.time_and_error(bench.points(rows), MACHINE, tmp_path / name)
    text = (tmp_path / "one.svg").read_text()
    assert "ours, fp32" in text and bench.IEEE in text and "a GPU, 2026-11-29" in text


@pytest.mark.parametrize("words, message", [
    ("--suite drawn --host", "--suite drawn and --host are two benchmarks"), ("--suite kernelbench --mode fp16", "--mode is not for --suite"),
    ("--suite drawn --only x", "--only is not for --suite"), ("--suite numbers --mode fp16", "--mode is not for --suite"), ("--draw 3 --suite kernelbench", "--draw goes with --models and --suite drawn only"),
])  # fmt: skip
def test_options_that_do_not_go_together(words, message, capsys):
    assert main(["bench", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_all_that_the_pages_show_is_measured_in_twenty_minutes(tmp_path, monkeypatch, capsys):
    """Commands that would take longer get their seconds; one that fails is counted, and the others run all the same."""
    ran = []

    def run(words, cwd, check):
        ran.append(words[3:])
        return SimpleNamespace(returncode=int("--energy" in words))

    monkeypatch.setattr(pages.subprocess, "run", run)
    monkeypatch.chdir(tmp_path)
    assert pages.main(["measure"]) == 1 and "pycuda-conv bench --energy --seconds 170: failed (1)" in capsys.readouterr().out
    assert len(ran) == len(pages.COMMANDS) and all(words[-2:] == ["--pages", "."] for words in ran)
    assert pages.SECONDS.keys() < pages.COMMANDS.keys() and sum(pages.SECONDS.values()) < 1100


def test_pages_say_of_which_kernels_their_figures_are(tmp_path, monkeypatch, capsys):
    """A page whose kernels differ, or that does not say, is listed; comments are no difference, and an empty part has no figures."""
    own = tmp_path / "cu"
    own.mkdir()
    (own / "a.cu").write_text("int a;  // one\n")
    monkeypatch.setattr(pages, "KERNEL_DIR", own)
    pages.digest.cache_clear()
    before = pages.digest()
    (tmp_path / "docs").mkdir()
    said = report.measured_by(MACHINE | {"kernels": before})
    (tmp_path / report.RESULTS_PAGE).write_text(
        f"<!-- results:begin -->\n{said}\n<!-- results:end -->\n<!-- host:begin -->\n{report.measured_by(MACHINE)}\n<!-- host:end -->\n"
    )
    (tmp_path / report.FRONT_PAGE).write_text(
        f"<!-- drawn:begin -->\n{said}\n<!-- drawn:end -->\n<!-- loop:begin -->\n\n<!-- loop:end -->\n"
    )
    monkeypatch.chdir(tmp_path)
    assert pages.main([]) == 1 and "docs/results.md, host: does not say of which kernels\n" in capsys.readouterr().out
    (own / "a.cu").write_text("int a; // another\n\n/* and more */\n")
    pages.digest.cache_clear()
    assert len(list(pages.outdated(tmp_path))) == 1
    (own / "a.cu").write_text("int b;\n")
    pages.digest.cache_clear()
    assert [one.split(":")[0] for one in pages.outdated(tmp_path)] == [
        "docs/results.md, results", "docs/results.md, host", "README.md, drawn"
    ]
    assert {command[0] for command in pages.COMMANDS.values()} == {"bench", "verify"}
    pages.digest.cache_clear()
