"""How well the planner chooses, with times that are made up: ``pycuda-conv bench --families``; what an engine is worth: ``choices``."""

import importlib.util
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from pycuda_conv import ConvProblem, engines, measure
from pycuda_conv.cli import main
from pycuda_conv.engines import registry
from pycuda_conv.errors import DeviceMemoryError
from pycuda_conv.runtime.target import Target
from pycuda_conv.tools import ablation, choices, plans
from pycuda_conv.tools.families import FAMILIES


class Compiled(nullcontext):
    """Compiles nothing."""

    def __enter__(self):
        return self

    def start(self, problem):
        pass

    def configs(self, problem):
        return engines.candidates(problem, self.enter_result)


def made(problem, device, config):
    """A plan that compiles nothing."""
    plan = SimpleNamespace(problem=problem, config=config, final_form=lambda: plan)
    return plan


@pytest.fixture
def gpu(monkeypatch):
    target = Target("sm_90a")
    monkeypatch.setattr(choices, "named_device", lambda _: target)
    monkeypatch.setattr(choices, "Compiler", Compiled)
    monkeypatch.setattr(choices, "Plan", made)
    # the second candidate is the fastest
    monkeypatch.setattr(choices, "device_times", lambda plans: [30.0, *([20.0] * (len(plans) > 1)), *(45.0 for _ in plans[2:])])
    return target


def test_plans_are_compiled_ahead(monkeypatch):
    """Each problem's kernels are compiled before its plan is made, those of the next problems meanwhile, and none that is there."""
    target, compiled, made = Target("sm_90a"), [], []
    there = threading.Event()

    def cubin(source, arch):
        there.wait(300)
        compiled.append(source)
        return SimpleNamespace(result=lambda: None)

    monkeypatch.setattr(target, "queue", SimpleNamespace(cubin=cubin), raising=False)
    monkeypatch.setattr(target, "compiled", lambda launch: launch.source() in compiled, raising=False)
    monkeypatch.setattr(
        plans, "cached_plan", lambda problem, device: made.append((problem, len(compiled))) or SimpleNamespace(final_form=lambda: problem)
    )
    monkeypatch.setattr(plans, "MOST_AHEAD", 2)
    wanted = [ConvProblem.forward(2, (8, 64, n, n), (64, 64, 3, 3), padding=1) for n in (14, 28, 56)]
    with plans.Ahead([wanted[0], wanted[0], *wanted[1:]], target) as ahead:
        there.set()
        assert [ahead.plan(problem) for problem in (wanted[0], wanted[0], *wanted[1:])] == [wanted[0], wanted[0], *wanted[1:]]
    assert len(set(compiled)) == len(compiled) > 3 and made[0][1] > 0
    assert [problem for problem, _ in made] == [wanted[0], wanted[0], *wanted[1:]]


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


def test_a_device_that_no_model_knows_is_refused(capsys):
    assert main(["bench", "--families", "1", "--device", "opencl"]) == 2
    assert "GPU" in capsys.readouterr().err


# ---- what an engine is worth


def test_without_an_engine_others_are_chosen():
    target = Target("sm_90a")
    known = ablation.engine_names()
    assert list(known.values()) == list(registry.ENGINES) and "hopper_planes" in known
    for family, problem, config in ablation.chosen(ablation.problems(target, 3, 3), target):
        name = next(name for name, engine in known.items() if type(config) in engine.CONFIGS)
        with ablation.without([name]):
            other = registry.find(problem, target)
            assert known[name] not in registry.ENGINES
        assert list(known.values()) == list(registry.ENGINES), "the engines are back"
        assert other is None or type(other) not in known[name].CONFIGS, (family, problem)
        (win,) = ablation.wins([(family, problem, config)], target, [name])
        assert (win.first, win.second) == (config, other)
        if win.loss is not None:
            assert win.loss == registry.predicted(problem, other, target) / registry.predicted(problem, config, target)
            assert win.loss > 1 / 1.2  # a choice may be of a usual order of sums, which others have compiled


@pytest.mark.parametrize(
    ("won", "only", "stays", "mean", "worst"),
    [
        ({("a", "fprop"): [2.0] * 10}, 0, True, 2 ** (10 / 200), 2 ** (10 / 100)),  # 3.5% of all
        ({("a", "fprop"): [1.5]}, 0, False, 1.5 ** (1 / 200), 1.5 ** (1 / 100)),
        ({("b", "wgrad"): [1.5] * 2, ("a", "fprop"): [0.5]}, 0, True, (1.5**2 * 0.5) ** (1 / 200), 1.5 ** (2 / 4)),  # much of a part
        ({}, 1, True, 1.0, 1.0), ({}, 0, False, 1.0, 1.0),
    ],
)  # fmt: skip
def test_the_rule(won, only, stays, mean, worst):
    counts = {("a", "fprop"): 100, ("b", "fprop"): 96, ("b", "wgrad"): 4}
    found = ablation.cost(counts, won, only)
    assert (found.mean, found.worst, found.stays) == (pytest.approx(mean), pytest.approx(worst), stays)
    assert found.why.startswith("stays" if stays else "goes")


def test_the_command_says_what_engines_are_worth(tmp_path, capsys):
    file = tmp_path / "worth.json"
    assert main(["choices", "--each", "2", "--seed", "5", "--without", "direct", "hopper_gemm", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "direct hopper_gemm" in out and "24 problems, seed 5" in out
    rows = json.loads(file.read_text())["rows"]
    assert [row["without"] for row in rows] == [["direct"], ["hopper_gemm"], ["direct", "hopper_gemm"]]
    alone, both = rows[:2], rows[2]
    assert len(both["wins"]) == sum(len(row["wins"]) for row in alone) > 0
    assert both["mean"] >= max(row["mean"] for row in alone) > 1


def test_the_command_refuses_what_it_does_not_know(capsys):
    assert main(["choices", "--each", "1", "--without", "nothing"]) == 2
    assert "there is no engine 'nothing'; there are depthwise_nhwc, " in " ".join(capsys.readouterr().err.split())
    assert main(["choices", "--each", "1", "--gpu", "sm_1"]) == 2
    assert "sm_1" in capsys.readouterr().err


# ---- scripts/ablate.py, which measures that on a GPU


@pytest.fixture
def ablate(monkeypatch):
    path = Path(__file__).parents[1] / "scripts" / "ablate.py"
    spec = importlib.util.spec_from_file_location("ablate", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ablate", module)
    spec.loader.exec_module(module)
    return module


def row(family, direction, loss):
    return {
        "family": family, "pass": direction, "first_us": 10.0, "second_us": 10.0 * loss, "first_predicted": None, "second_predicted": None
    }


def test_engines_are_measured_in_turn(ablate, monkeypatch, tmp_path, capsys):
    target = Target("sm_90a")
    monkeypatch.setattr(target, "launcher", lambda step: step, raising=False)
    monkeypatch.setattr(ablate, "get_device", lambda _: target)
    monkeypatch.setattr(ablate, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))

    def timed(device, win):
        if "1d" in str(win.problem):
            raise MemoryError("too large")
        return win.first_us or 10.0, 3 * (win.first_us or 10.0)

    monkeypatch.setattr(ablate, "timed", timed)
    files = [tmp_path / "first.json", tmp_path / "second.json"]
    names = ["direct", "hopper_gemm", "direct+hopper_gemm"]
    for seed, file in enumerate(files):
        arguments = ["--each", "8", "--jobs", "1", "--most", "6", "--seconds", "500", "--seed", str(seed), "--json", str(file)]
        assert ablate.main([*names, *arguments]) == 0
        of = json.loads(file.read_text())["engines"]
        assert [len(of[name]["rows"]) for name in names] == [6, 6, 6]
        won = [sum(count for *_, count in of[name]["won"]) + of[name]["only"] for name in names]
        assert won[0] + won[1] == won[2]
        both = [one["second"] for one in of["direct+hopper_gemm"]["rows"]]
        assert both
        assert not any("ImplicitGemm(" in one or one.startswith(("Tile(", "Single(", "Batched(", "Dgrad(", "Wgrad(")) for one in both)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("direct ", "hopper_gemm ", "direct+"))]
    assert len(lines) == 6 and all("3.00" in line and "stays: " in line for line in lines)
    assert ablate.main(["--report", *map(str, files)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines[1:]] == names and all(int(line[2]) + int(line[3]) == 12 for line in lines[1:]), "of both files"


def test_the_planners_choice_is_measured_as_often_as_the_fastest(monkeypatch):
    """The first plan is measured again however slow it seemed; others if they were nearly as fast as the fastest."""
    asked = []

    def medians(clock, ways, sets, effort):
        asked.append([way() for way in ways])
        return [{"a": 20.0, "b": 10.0, "c": 12.0, "d": 10.5}[name] / len(asked) for name in asked[-1]]

    on = SimpleNamespace(current=nullcontext, pool=SimpleNamespace(free_held=lambda: None))
    plans = [SimpleNamespace(name=name, device=on) for name in "abcd"]
    operands = SimpleNamespace(compare=lambda plans: None, buffers=[], count=1)
    monkeypatch.setattr(measure, "_Clock", lambda device: SimpleNamespace(own=None))
    monkeypatch.setattr(measure, "_Operands", lambda *_: operands)
    monkeypatch.setattr(measure, "_medians", medians)
    monkeypatch.setattr(measure, "_way", lambda plan, *_: lambda: plan.name)
    assert measure.device_times(plans) == [10.0, 5.0, 12.0, 5.25] and asked == [["a", "b", "c", "d"], ["a", "b", "d"]]
