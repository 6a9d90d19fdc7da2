"""Tables fit where they are printed: in 80, 100 and 200 columns, and in a file. Those of commands that other tests run are left out."""

import io
import re
import sys

import pytest
from conftest import why_no_opencl
from rich.cells import cell_len

from pycuda_conv.engines.direct.direct import Batched
from pycuda_conv.engines.hopper.gemm import ImplicitGemm
from pycuda_conv.problem import ConvProblem
from pycuda_conv.tools import bench, info, kernels, report, suite, terminal, training, verify
from pycuda_conv.tools.benchmarks import batchbench, energybench, hostbench, hostcost, layerbench, loopbench, numbersbench
from pycuda_conv.tools.pictures import bench as picture_bench

LONG = ConvProblem.forward(3, (16, 128, 16, 112, 112), (1152, 128, 3, 5, 7), padding=(1, 2, 3), stride=(1, 2, 2))
SHORT = ConvProblem.forward(1, (1, 1, 9), (1, 1, 3))
CONFIG = ImplicitGemm(128, 256, 4)


def suite_rows():
    for verdict in ("ok", "WRONG", "no memory"):
        numbers = {} if verdict == "no memory" else {
            "error": 1.2e-7, "torch_error": 1.3e-7, "ours_us": 123456.7, "kept_us": 12.3, "torch_us": 654321.0, "floor_us": 9.9
        }
        yield report.Row(
            bench.label(LONG), "ImplicitGemm", str(CONFIG), LONG.flops, LONG.bytes, 1, timing="graph", verdict=verdict, **numbers
        )
        yield report.Row(bench.label(SHORT), "Batched", str(Batched(128, 1, 1)), 10, 10, 1, timing="wall", ours_us=1.0, torch_us=2.0)


def of_info():
    info.run()


def of_info_with_gpus():
    gpu = {"device": "cuda:0", "name": "NVIDIA H200", "compute_capability": "9.0", "memory_total": 1 << 37, "memory_free": None}
    gpu["attributes"] = {f"MAXIMUM_SURFACE2D_LAYERED_LAYERS_AND_MORE_{i}": i**9 for i in range(5)}
    facts = info.collect() | {"gpus": [gpu], "cuda_missing": "PyCUDA is not importable " * 9}
    collect, info.collect = info.collect, lambda: facts
    try:
        info.run()
    finally:
        info.collect = collect


def of_verify():
    if why_no_opencl():
        pytest.skip(why_no_opencl())
    verify.run(",".join(list(verify.CASES)[:1]), "opencl", 1)


def of_bench():
    out = terminal.console()
    out.print(report.row_table(list(suite_rows()), "fp32: ours against F.conv in torch on the same arrays, " + suite.mode_words("fp32")))
    for line in (*report.NOTES, *report.summary_lines(report.summary(list(suite_rows())))):
        out.print(line, markup=False)
    out.print(
        bench._loop_table([{"problem": bench.label(LONG), "calls": 12345, "loop_us": 1e7, "single_us": 1.0, "ratio": 1e7, "verdict": "ok"}])
    )
    out.print(terminal.table("Host time of one call", ("call", "us"), [("pycuda_conv.conv2d(x, w, padding=1)", "12.3")], left=("call",)))


def of_others():
    out = terminal.console()
    for one in hostcost.tables(
        [hostcost.Row(str(LONG), "conv2d(x, w)", 123.4, 12.3)], [{"threads": 8, "torch": 1e6, "ours": 2e6, "ratio": 2.0}]
    ):
        out.print(one)
    rows = (
        loopbench.Row(bench.label(LONG), 123456, 1e6, 1e5, 1e3, 1e3, 1e3, True),
        loopbench.Row(bench.label(SHORT), 1, 1.0, 1.0, 1.0, 1.0, 1.0, False),
    )
    out.print(loopbench.row_table(rows))
    out.print(loopbench.compiler_table({"SourceModule, flat text": (1.5, 0.0002), "ours, by nvrtc": (0.6, 0.0002)}))
    jobs = picture_bench.Row("gaussian_filter, sigma 3, 2160 x 3840 of uint8", 123456.7, 1e6, 12.3, 1e7, 1.2e-7), picture_bench.Row("sobel")
    out.print(
        terminal.table("ratio = theirs / ours, above 1 ours is faster", picture_bench.COLUMNS, [job.cells() for job in jobs], left=("job",))
    )
    training._print(out, [
        training.Row("gradient by weight", str(LONG), "fp32", 12345.6, 23456.7, 1.0, 1e-7, 1e-7, str(CONFIG)),
        training.Row("conv + bn", "x", "tf32", verdict="WRONG")
    ])


def of_layers():
    out = terminal.console()
    out.print(
        layerbench.mean_table([layerbench.Mean(words, ((0.51, str(LONG)), (12345.6, str(SHORT)))) for words, *_ in layerbench.COMPARED], 35)
    )
    out.print(
        energybench.row_table([energybench.Row("a training step of resnet50, 64 images, bf16-nhwc", layerbench.LAST, 12345.6, 123456.7)])
    )
    out.print(terminal.table(
        "fp32 by kind of numbers", numbersbench.COLUMNS, [numbersbench.Row(str(LONG), "subnormal").cells()], left=("layer", "numbers")
    ))
    out.print(batchbench.slow_table([batchbench.Row(str(LONG), "volume", 64, "", 123456.7, 12345.6, str(CONFIG), str(CONFIG))]))


def of_kernels():
    kernels.run(("opencl",), False)


def of_lists():
    settings = bench.Settings()
    bench.list_problems(settings)
    hostbench.list_problems(settings)
    training.list_problems(settings)
    verify.list_cases()


PRINTERS = {
    f.__name__.removeprefix("of_"): f
    for f in (of_info, of_info_with_gpus, of_verify, of_bench, of_others, of_layers, of_kernels, of_lists)
}
def printed(printer, width, monkeypatch, colours=False, **wanted):
    """What a command prints on a terminal of that width, or into a file; and the tables in it."""
    stream, tables, original = io.StringIO(), [], terminal.Table.__rich_console__

    def noted(self, console, options):
        tables.append(self)
        return original(self, console, options)

    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", **wanted}.items():
        monkeypatch.setenv(name, value)
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
        stream.isatty = lambda: colours
    monkeypatch.setattr(terminal.Table, "__rich_console__", noted)
    monkeypatch.setattr(sys, "stdout", stream)
    printer()
    monkeypatch.undo()
    return stream.getvalue(), tables


@pytest.mark.parametrize("width", [40, 80, 100, 200, None])
@pytest.mark.parametrize("printer", PRINTERS.values(), ids=PRINTERS)
def test_no_row_is_broken(monkeypatch, printer, width):
    text, tables = printed(printer, width, monkeypatch)
    lines = text.splitlines()
    room = width or terminal.UNLIMITED
    # a problem's text is one word
    words = [bench.label(problem) for problem in suite.suite()] + [
        str(case.problem) for case in verify.CASES.values()
    ] if printer is of_lists else []
    assert all(cell_len(line.rstrip()) <= max([room, *(len(word) + 26 for word in words)]) for line in lines)
    assert not re.search(r"\n\s*\n\s*\n\s*\n", text)  # no empty rows
    for one in tables:
        blocks = text.split(f"{one.title}\n") if len(one.title) < room else [text]
        assert (one.rows and len(blocks) >= 2) or len(one.title) >= room
        for row in one.rows:
            for cell in filter(None, row):
                shown = any(cell in line for line in lines)
                assert shown or cell == "-" or len(cell) > room - 2 - max(map(len, one.columns)) - 1, (cell, width)
        if width is None:  # a row is a line
            assert all(any(all(cell in line for cell in row) for line in lines) for row in one.rows)


def test_rows_are_lines_where_they_fit_and_records_elsewhere(monkeypatch):
    rows = [("first", "1.5", "a text", "ok"), ("second one", "22.5", "x" * 50, "WRONG")]
    table = terminal.table("Title", ("name", "number", "more", "verdict"), rows, left=("name",), spare=("more",))
    show = lambda: terminal.console().print(table)  # noqa: E731
    wide = printed(show, 90, monkeypatch)[0].splitlines()
    assert wide[0] == "Title" and wide[1].split() == ["name", "number", "more", "verdict"]
    assert wide[4].split() == ["second", "one", "22.5", "x" * 50, "WRONG"]
    assert printed(show, 50, monkeypatch)[0].splitlines()[1].split() == ["name", "number", "verdict"]
    assert printed(show, 24, monkeypatch)[0].splitlines() == [
        "Title", "first  ok", "  number 1.5", "  more a text", "second one  WRONG", "  number 22.5", "  more " + "x" * 17, "  " + "x" * 22, "  " + "x" * 11, "",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [40, 200])
def test_verdicts_are_green_and_red_where_colours_are_wanted(monkeypatch, width):
    rows = [("one", "pass"), ("two", "FAIL"), ("three", "ok"), ("four", "no memory")]
    show = lambda: terminal.console().print(terminal.table("T", ("case", "verdict", "m"), [(*row, "x" * 60) for row in rows]))  # noqa: E731
    assert "\x1b" not in printed(show, width, monkeypatch)[0]
    for text in (
        printed(show, width, monkeypatch, colours=True)[0], printed(show, width, monkeypatch, FORCE_COLOR="1")[0]
    ):
        for word, colour in (("pass", 32), ("FAIL", 31), ("ok", 32), ("no memory", 31)):
            assert re.search(rf"\x1b\[(1;)?{colour}m *{word}\x1b\[0m", text), (word, text)
    for colours in (False, True):
        assert not re.search(r"\x1b\[\d*;?3\d", printed(show, width, monkeypatch, colours, NO_COLOR="1", FORCE_COLOR="1")[0])


def test_filters_of_images_are_wrong_beyond_rounding():
    """Of whole numbers one unit is rounding, where the exact value lies close to a half; of others it is far off."""
    device = "gaussian_filter(4096x4096 {}, sigma=1), device"
    assert not picture_bench.Row(device.format("uint8"), error=1.0).wrong and picture_bench.Row(device.format("uint8"), error=2.0).wrong
    assert picture_bench.Row(device.format("float32"), error=1e-5).wrong
    assert not picture_bench.Row(device.format("float32"), error=2e-7).wrong
    assert picture_bench.Row("sobel(4096x4096 uint8, output=float32), device", error=1.0).wrong
    assert not picture_bench.Row(device.format("float32")).wrong
