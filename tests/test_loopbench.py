"""The founding loop against one launch: ``pycuda-conv bench --loop``."""

import json

import numpy as np
import pytest
from reference import fprop

from pycuda_conv.cli import main
from pycuda_conv.tools.benchmarks import loopbench


def one_channel(y, x, w, H, W, add, grid, block, stream):
    """What the kernel does, in numpy, by the threads that the launch has."""
    assert block[0] * grid[0] >= W and grid[1] == H and y.shape == x.shape == (H, W)
    padded = np.pad(x, 1)
    y[...] = (y if add else 0) + sum(w[r, s] * padded[r : r + H, s : s + W] for r in range(3) for s in range(3))


class Module:
    launches = 0

    def get_function(self, name):
        assert name in loopbench.ONE_CHANNEL

        def launch(*arguments, **options):
            self.launches += 1
            one_channel(*arguments, **options)

        return launch


@pytest.mark.parametrize("problem", loopbench.problems()[:2], ids=str)
def test_the_loop_convolves(problem):
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in (problem.input_shape, problem.weight_shape))
    y, module = np.full(problem.result_shape, np.nan, np.float32), Module()
    loopbench.Loop(module, x, w, y)()
    assert module.launches == problem.N * problem.K * problem.C
    np.testing.assert_allclose(y, fprop(x.shape, w.shape, bias=False, padding=1).reference(x, w, None), rtol=1e-4, atol=1e-4)


def test_times_are_those_of_one_call():
    waits, calls = [], []
    assert loopbench.seconds(lambda: calls.append(1), lambda: waits.append(1), 5, 3) >= 0
    assert len(calls) == 4 * 5 and len(waits) == 4 * 2  # the first round warms up


def test_the_ratio_is_the_loop_s_time_by_the_launch_s():
    row = loopbench.Row("a problem", 64, 640.0, 80.0, 8.0, 16.0, 12.0, True)
    assert row.ratio == 80 and row.cells() == ("a problem", "64", "640.0", "80.00", "8.00", "16.00", "12.00", "80", "10.0", "ok")
    assert len(row.cells()) == len(loopbench.COLUMNS)


@pytest.mark.parametrize("more", [["--list"], ["--mode", "tf32"], ["--csv", "a.csv"], ["--cold"], ["--host"]])
def test_options_of_others_are_refused(more, capsys):
    assert main(["bench", "--loop", *more]) == 2
    assert "--loop" in capsys.readouterr().err


@pytest.mark.gpu
def test_the_loop_and_its_graph_and_one_launch(tmp_path):
    file = tmp_path / "loop.json"
    assert main(["bench", "--loop", "--quick", "--only", "4x5x5", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    (row,) = report["rows"]
    assert row["launches"] == 64 and row["correct"] and row["loop_us"] > row["one_us"] > 0 and row["ratio"] > 1 and row["hand_us"] > 0
    # what is kept on disk is read again in a part of the time, with PyCUDA's compiler and with ours
    assert report["compilers"] and all(again < first for first, again in report["compilers"].values())
    if {"SourceModule", "SourceModule, flat text"} <= set(report["compilers"]):
        assert report["compilers"]["SourceModule, flat text"][1] < report["compilers"]["SourceModule"][1]  # no preprocessor
