"""What a call costs the host: ``pycuda-conv bench --host-cost``."""

import contextlib
import itertools
import json
import time

import pytest
import torch

from pycuda_conv.cli import main
from pycuda_conv.tools.benchmarks import hostcost


def test_medians_of_rounds_by_turns(monkeypatch):
    """A clock that stands still but for what calls take."""
    now, order = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def call(name, *us):
        rounds = itertools.cycle(us)

        def made():
            order.append(name)
            now[0] += next(rounds) * 1e-6

        return made

    @contextlib.contextmanager
    def around():
        now[0] += 1  # it is not counted
        order.append("in")
        yield
        order.append("out")

    ours = {"first": call("first", 10), "second": call("second", 4, 6)}
    case = hostcost.Case("a layer", call("torch", 20), ours, calls=2, around=around)
    rows = hostcost.measure(case, lambda: None, 3)
    assert [(row.call, round(row.torch_us, 6), round(row.ours_us, 6), round(row.ratio, 6)) for row in rows] == [
        ("first", 20, 10, 0.5), ("second", 20, 5, 0.25),
    ]  # fmt: skip
    turn = ["torch"] * 2 + ["in", *["first"] * 2, "out"] + ["in", *["second"] * 2, "out"]
    assert order[-30:] == turn * 3


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, capsys):
    file = tmp_path / "cost.json"
    assert main(["bench", "--host-cost", "--quick", "--only", "numpy|nn.Conv2d|GPUArray.*4x16", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["call"] for row in rows] == [
        "nn.Conv2d", "nn.Conv2d", "conv2d", *["conv2d", "conv2d, out=", "plan, out=", "bound", "bound, out="] * 2
    ]
    assert all(row["ours_us"] > 0 and row["ratio"] == pytest.approx(row["ours_us"] / row["torch_us"]) for row in rows)
    assert "ours / torch" in capsys.readouterr().out
    rates = hostcost.measure_threads(torch, "cuda:0", 1, 0.02)
    assert [rate["threads"] for rate in rates] == [1, 2, 4, 8] and all(rate["ours"] > 0 for rate in rates)
