"""How well the planner chooses: ``pycuda-conv bench --families``, with times that are made up."""

import json

import pytest

from pycuda_conv import engines, measure
from pycuda_conv.cli import main
from pycuda_conv.errors import DeviceMemoryError
from pycuda_conv.runtime.target import Target
from pycuda_conv.tools import choices
from pycuda_conv.tools.families import FAMILIES, draw


class Compiled:
    """Compiles nothing."""

    def __init__(self, device):
        self._device = device

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def start(self, problem):
        pass

    def configs(self, problem):
        return engines.candidates(problem, self._device)


class Made:
    """A plan that compiles nothing."""

    def __init__(self, problem, device, config):
        self.problem, self.config = problem, config

    def settled(self):
        return self


@pytest.fixture
def gpu(monkeypatch):
    target = Target("sm_90a")
    monkeypatch.setattr(choices, "named_device", lambda _: target)
    monkeypatch.setattr(choices, "Compiler", Compiled)
    monkeypatch.setattr(choices, "Plan", Made)
    # the second candidate is the fastest
    monkeypatch.setattr(choices, "device_times", lambda plans: [30.0, *([20.0] * (len(plans) > 1)), *(45.0 for _ in plans[2:])])
    return target


def test_the_choice_stands_beside_the_fastest_candidate(gpu, tmp_path, capsys):
    file = tmp_path / "choices.json"
    assert main(["bench", "--families", "2", "--seed", "7", "--mode", "tf32", "fp16-nhwc", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    rows = found["rows"]
    assert [row["family"] for row in rows] == [family for family in FAMILIES for _ in range(2)] and found["seed"] == 7
    several = [row for row in rows if len(row["candidates"]) > 1]
    assert several and all(row["loss"] == 1.5 for row in several) and all(row["loss"] == 1 for row in rows if row not in several)
    assert f"{len(rows) - len(several)} of {len(rows)} choices are within 10%" in " ".join(capsys.readouterr().out.split())
    for row in rows:  # the planner's choice comes first
        assert "tf32" in row["problem"] or "float16" in row["problem"]
        assert all(one["us"] > 0 for one in row["candidates"])


def test_a_problem_that_does_not_fit_is_told(gpu, monkeypatch, capsys):
    def times(plans):
        if plans[0].problem.ndim == 3:
            raise DeviceMemoryError("no room")
        return [1.0] * len(plans)

    monkeypatch.setattr(choices, "device_times", times)
    assert main(["bench", "--families", "1", "--seed", "7"]) == 1
    assert "no room" in " ".join(capsys.readouterr().err.split())


def test_problems_are_in_the_modes_that_were_asked_for():
    kinds = (("float16", "fp32", "NHWC"), ("float32", "tf32", "NCHW"))
    found = {(problem.dtype, problem.precision, problem.layout) for problem in draw(1, 4, kinds)}
    assert found == set(kinds)


def test_a_device_that_no_model_knows_is_refused(capsys):
    assert main(["bench", "--families", "1", "--device", "opencl"]) == 2
    assert "GPU" in capsys.readouterr().err


@pytest.mark.parametrize("background", ["1", "0"])
def test_kernels_are_compiled_as_settled_plans_launch_them(background, monkeypatch):
    monkeypatch.setenv("PYCUDA_CONV_BACKGROUND", background)
    target = Target("sm_90a")
    problem = next(draw(7, 1, (("float16", "fp32", "NHWC"),)))
    steps = list(measure._steps(problem, engines.candidates(problem, target), target))
    assert steps and any(step.layer for step in steps) == (background == "0")
