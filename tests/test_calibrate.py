"""``pycuda-conv calibrate``: factors from timings, their files, and what they do to the choice. GPU times are made up here."""

import json
import random

import pytest

from pycuda_conv import ConvProblem, engines
from pycuda_conv.cli import main
from pycuda_conv.engines import calibration, registry
from pycuda_conv.memo import forget_plans
from pycuda_conv.plan import as_called
from pycuda_conv.runtime.target import Target
from pycuda_conv.tools import choices
from pycuda_conv.tools.benchmarks import calibrate
from pycuda_conv.tools.families import draw

DEVICE = Target("sm_90a")


def timed(slower, seed=5, each=3, noise=0.05):
    """Timings of a GPU on which these engines take so many times what the models say."""
    r, found = random.Random(seed), []
    with calibration.replaced(None):
        for problem in draw(seed, each):
            problem = as_called(problem, DEVICE)
            for us, config in engines.predictions(problem, DEVICE)[:8]:
                factor = slower.get(registry.name_of(registry.engine_of(config)), 1.0)
                found.append((problem, config, us * factor * 2 ** r.gauss(0, noise)))
    return found


def test_factors_are_found_and_choices_follow():
    slower = {"hopper.gemm": 2.0, "direct.gemm": 0.5, "hopper.dense": 1.6}
    timings = timed(slower, each=16)
    factors = calibrate.fitted(timings, DEVICE)
    assert factors["hopper.gemm"] == pytest.approx(2.0, rel=0.3) and factors["direct.gemm"] == pytest.approx(0.5, rel=0.3)
    assert factors["direct.batched" if "direct.batched" in factors else "direct.direct"] == pytest.approx(1.0, rel=0.1)
    known = calibrate._named(DEVICE, factors)
    unseen = timed(slower, seed=77, each=8)
    before, after = (list(calibrate.choices(unseen, DEVICE, one)) for one in (None, known))
    assert sum(loss <= 1.1 for loss in after) > sum(loss <= 1.1 for loss in before)


def test_few_timings_change_little():
    problem = ConvProblem.forward(2, (8, 64, 56, 56), (64, 64, 3, 3))
    config = engines.choose(problem, DEVICE)
    one = calibrate.fit([("an engine", problem, config, 2.0)])
    many = calibrate.fit([("an engine", ConvProblem.forward(2, (n, 64, 56, 56), (64, 64, 3, 3)), config, 2.0) for n in range(1, 60)])
    kind = calibration.kinds("an engine", problem)[-1]
    assert 1 < one["an engine"] < 1.2 and one[kind] < 2 and 1.8 < many["an engine"] < many[kind] <= 2.0


def test_files(tmp_path, monkeypatch):
    timings = timed({"hopper.gemm": 1.5})
    made = calibrate._named(
        DEVICE, calibrate.fitted(timings, DEVICE), driver="1.2", date="2026-11-29", command="c", timings=calibrate.as_json(timings)
    )
    text = calibrate.text(made)
    again = calibration.parsed(text)
    assert calibrate.text(again) == text and again.factors == made.factors and again.capability == (9, 0)
    back = calibrate.from_json(json.loads(text)["timings"])
    assert back == [(problem, config, round(us, 3)) for problem, config, us in timings]
    problem = json.loads(text)["timings"][0][0]
    gone = [[problem, [["NoSuchKernel", [1], 2.0], ["ImplicitGemm", [64, 64, 6, 1, "no such schedule"], 2.0], ["ImplicitGemm", [64], 2.0]]]]
    assert calibrate.from_json(gone) == []
    for wrong, message in (
        ("[]", "no 'format'"), (text.replace('"version": 1', '"version": 0'), "of version 0"), (text.replace('"multiprocessors": 132', '"multiprocessors": "x"'), "a number"),
        (text.replace('"capability": [9, 0]', '"capability": 9'), "two integers"), (text.replace('"factors": {', '"factors": {"x": 1000,'), "numbers from"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            calibration.parsed(wrong)
    monkeypatch.setattr(calibration, "_instead", [])
    monkeypatch.setattr(calibration, "SHIPPED", tmp_path)
    monkeypatch.setattr(calibration, "own_file", lambda gpu: tmp_path / "own" / calibration.file_name(gpu))
    calibration.forget()
    try:
        assert calibration.of(DEVICE) is None
        (tmp_path / calibration.file_name("A GPU")).write_text(text.replace(DEVICE.model, "A GPU"))
        calibration.forget()
        assert calibration.of(DEVICE).gpu == "A GPU"  # the nearest
        assert calibration.of(Target("sm_80")) is None  # of another generation
        (tmp_path / "own").mkdir()
        calibration.own_file(DEVICE.model).write_text(text.replace('"date": "2026-11-29"', '"date": "later"'))
        calibration.forget()
        assert calibration.of(DEVICE).date == "later"
        calibration.own_file(DEVICE.model).write_text("{")
        calibration.forget()
        assert calibration.of(DEVICE).gpu == "A GPU"  # with a warning in the log
    finally:
        calibration.forget()


def test_predictions_and_choices_have_the_factors():
    problem = ConvProblem.forward(2, (8, 64, 56, 56), (64, 64, 3, 3), padding=1)
    with calibration.replaced(None):
        config, plain = engines.choose(problem, DEVICE), engines.predictions(problem, DEVICE)
    engine = registry.engine_of(config)
    with calibration.replaced(calibrate._named(DEVICE, {registry.name_of(engine): 8.0})):
        registry._found.clear()
        other = engines.choose(problem, DEVICE)
        assert registry.engine_of(other) is not engine
        assert engines.predicted(problem, config, DEVICE) == pytest.approx(8 * {c: us for us, c in plain}[config])
    registry._found.clear()
    forget_plans()


def test_the_command(tmp_path, monkeypatch, capsys):
    """It measures until the time is over, merges files, and says what it makes better."""
    row_of = {}
    for problem, config, us in timed({"hopper.gemm": 2.0}):
        row_of.setdefault(problem, []).append(choices.Candidate(config, None, us))
    rows = [choices.Row("", problem, tuple(found)) for problem, found in row_of.items()]
    monkeypatch.setattr(calibrate, "named_device", lambda name: DEVICE)
    monkeypatch.setattr(calibrate, "rows", lambda device, seed, seconds: iter(rows))
    monkeypatch.setattr(calibrate, "nvidia_smi", lambda *names: {"driver_version": "1.2"})
    file, both = tmp_path / "some.json", tmp_path / "folder" / "both.json"
    assert main(["calibrate", "--seconds", "5", "--output", str(file), "--seed", "3"]) == 0
    assert f"{len(rows)} choices within 10%" in capsys.readouterr().out.replace("\n", " ")
    assert main(["calibrate", "--fit", "--merge", str(file), "--output", str(both)]) == 0
    one, other = (calibration.parsed(path.read_text()) for path in (file, both))
    assert one.factors == other.factors and one.driver == "1.2"
    assert one.command == "pycuda-conv calibrate --seed 3" and len(one.timings) == len(rows)
    assert main(["calibrate", "--fit", "--merge", str(tmp_path / "none.json")]) == 2
    assert "can't be merged" in capsys.readouterr().err


def test_shipped_files():
    """Each names its GPU, when and by what it was measured, and the timings ask for the factors."""
    for path in calibration.SHIPPED.glob("*.json"):
        one = calibration.parsed(path.read_text())
        assert path.name == calibration.file_name(one.gpu) and one.driver and one.date and one.command and len(one.timings) >= 100
        device = Target(f"sm_{one.capability[0]}{one.capability[1]}a")
        device.model, device.multiprocessors = one.gpu, one.multiprocessors
        timings = calibrate.from_json(one.timings)
        before, after = (calibrate.told(timings, device, some) for some in (None, one))
        assert before != after
