"""`verify` on every engine: cases from the registry, both verdicts, and results that are worse than claimed."""

import json
import secrets
from dataclasses import asdict, replace

import numpy as np
import pytest
from reference import DISTRIBUTIONS

from pycuda_conv import ConvProblem, Plan, background, engines
from pycuda_conv.cli import main
from pycuda_conv.engines import registry
from pycuda_conv.rounding import RELATIVE_LIMIT, beside_limit
from pycuda_conv.runtime import get_device
from pycuda_conv.runtime.target import Target
from pycuda_conv.tools import plans, verify
from pycuda_conv.tools.benchmarks import error_table
from pycuda_conv.tools.engine_cases import engine_cases
from pycuda_conv.tools.oracle import compare


def device_of(name):
    if name == "opencl":
        pytest.importorskip("pyopencl")
        return get_device("opencl")
    return Target(name)


@pytest.mark.parametrize("name", ["sm_90a", "sm_80", "sm_75", "opencl"])
def test_every_engine_of_the_device_has_cases(name):
    """All that has something worth comparing for some problem; every arithmetic and layout; every kind of numbers."""
    device = device_of(name)
    cases = engine_cases(device)
    tried = {case.engine for case in cases}
    for engine in registry.ENGINES:
        if engine.unsupported(device) is None and engine.__name__.rpartition(".")[2] not in tried:  # then nothing of it is worth comparing
            others = {case.problem.launched for case in cases if case.problem.launched.layout in engine.LAYOUTS}
            assert not any([*engine.configs(problem, device)] or engine.choose(problem, device) for problem in others), engine
    for case in cases:
        assert registry.refusal(case.problem, case.config, device) is None
    kinds = {(case.problem.dtype, case.problem.precision) for case in cases}
    assert kinds >= {("float32", "fp32"), ("float16", "fp32"), ("bfloat16", "fp32"), ("float64", "fp32")}
    assert name == "opencl" or ("float32", "tf32") in kinds
    assert {case.problem.layout for case in cases} == {"NCHW", "NHWC"}
    assert {case.problem.direction for case in cases} == {"fprop", "dgrad", "wgrad"}
    assert sum(case.chosen for case in cases) > len(cases) / 3
    for engine in tried:
        assert {case.distribution for case in cases if case.engine == engine} == set(DISTRIBUTIONS)
    classes = {type(case.config) for case in cases}
    assert name != "opencl" or {engines.Single, engines.Tile, engines.Batched, engines.Dgrad, engines.Wgrad, engines.Gemm} <= classes


PROBLEM = ConvProblem.forward(2, (2, 8, 24, 24), (8, 8, 3, 3), padding=1)


def judged(factor: float, dtype: str = "float32", theirs: float = 1.0, problem=PROBLEM):
    """The verdict on a result that has `factor` times the error in norm that is claimed, and torch's `theirs` times as much."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal(problem.input_shape), rng.standard_normal(problem.weight_shape)
    ref, magnitude = verify.reference(problem, x, w), verify.reference(problem, abs(x), abs(w))
    claimed = {"float32": 1.1e-7, "float64": 2.8e-16}[dtype]
    noise = claimed * ref.std() * rng.standard_normal(ref.shape)
    truth = verify.Expected(ref, magnitude, None if theirs is None else ref + theirs * noise)
    return verify.judged("case", "numpy", problem, "Kernel", ref + factor * noise, truth, 0.0)


def test_a_kernel_ten_times_less_exact_than_claimed_fails():
    """It is far inside of the bound on elements, and fails by its norm, with torch or without."""
    good, bad = judged(1.0), judged(10.0, theirs=None)
    assert good.passed and not bad.passed
    assert bad.of_bound < 1 and bad.relative_error > bad.relative_limit == RELATIVE_LIMIT["float32"]
    assert not judged(10.0, theirs=10.0).passed


def test_twice_torch_s_error_fails():
    fine, twice = judged(1.4, theirs=1.0), judged(2.0, theirs=1.0)
    assert fine.passed and fine.beside
    assert not twice.passed and not twice.beside and twice.of_bound < 1 and "torch's" in twice.detail
    assert judged(2.0, theirs=None).passed
    # half of a rounding is no error, however exact torch is
    assert beside_limit(PROBLEM, 0.0) == pytest.approx(1 / (8 * 72**0.5))
    # and of few elements the largest error is chance
    assert beside_limit(ConvProblem.forward(2, (1, 1, 5, 5), (1, 1, 3, 3)), 0.0) == np.inf


def test_a_worsened_engine_is_found(monkeypatch, capsys):
    """The whole command, with one engine's results a little off: of the norm, and of a single element."""
    opencl = device_of("opencl")
    cases = [case for case in engine_cases(opencl) if case.engine == "direct" and case.arithmetic == "fp32" and case.problem.groups > 1][:1]
    monkeypatch.setattr(verify, "engine_cases", lambda device: cases)
    monkeypatch.setattr(verify, "_cases", list)
    monkeypatch.setattr(verify, "CASES", {})
    assert main(["verify", "--device", "opencl", "--seed", "3", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [r["case"].startswith("direct fp32") for r in facts["results"]] == [True]
    assert facts["results"][0]["torch_of_bound"] is None or facts["results"][0]["of_bound"] <= 1.5 * facts["results"][0]["torch_of_bound"]
    call = Plan.__call__
    rng = np.random.default_rng(1)
    for worsen in (
        lambda y: y * (1 + 1e-6 * rng.standard_normal(y.shape)), lambda y: y + np.where(np.arange(y.size) == 7, 4e-6, 0).reshape(y.shape)
    ):

        def worse(self, *arrays, **options):
            y = call(self, *arrays, **options)
            return worsen(y).astype(y.dtype)  # noqa: B023

        monkeypatch.setattr(Plan, "__call__", worse)
        assert main(["verify", "--device", "opencl", "--seed", "3", "--json"]) == 1
        assert not json.loads(capsys.readouterr().out)["passed"]


def test_the_largest_error_is_drawn_again_before_it_is_above_torch_s(monkeypatch):
    case = next(case for case in engine_cases(device_of("opencl")) if case.engine == "direct")
    for factors, passed in (([1.4], True), ([2.0, 2.0, 1.4], True), ([2.0, 2.0, 2.0], False)):
        left = iter(factors)
        monkeypatch.setattr(verify, "_of_draw", lambda *_: judged(next(left)))  # noqa: B023
        result = verify._of_engine(case, None, 0)
        assert result.passed == passed and next(left, None) is None and (result.engine, result.numbers) == ("direct", case.distribution)


def test_numbers_that_the_type_has_not_are_infinite():
    """Only where rounding may lead there, with the right sign, and the other elements are judged as ever."""
    problem = ConvProblem.forward(1, (1, 1, 4), (1, 1, 1), dtype="float16")
    ref = np.array([70000.0, -1e9, 65504.0, 1.0]).reshape(1, 1, 4)

    def correct(*values):
        return compare(problem, np.array(values).reshape(1, 1, 4), ref, abs(ref)).correct

    inf = np.inf
    assert correct(inf, -inf, 65504, 1) and correct(inf, -inf, inf, 1)  # which is half a step from the largest number
    assert not correct(-inf, -inf, 65504, 1) and not correct(65504, -inf, 65504, 1) and not correct(inf, -inf, 65504, inf)
    assert not correct(inf, -inf, 65504, 1.1) and not correct(np.nan, -inf, 65504, 1)
    assert compare(problem, np.full((1, 1, 4), inf), np.full((1, 1, 4), 1e6), np.full((1, 1, 4), 1e6)).correct


def test_transforms_that_were_asked_for_are_judged_by_the_norm():
    """Elements may be far off; the norm and a NaN still fail."""
    problem = replace(PROBLEM, algorithm="fft")
    ref = np.random.default_rng(0).standard_normal(problem.result_shape)
    ref.flat[0] = 1e-9
    off = ref.copy()
    off.flat[0] *= 2
    assert compare(problem, off, ref, abs(ref)).correct and not compare(PROBLEM, off, ref, abs(ref)).correct
    assert not compare(problem, ref * (1 + 1e-5), ref, abs(ref)).correct
    off.flat[0] = np.nan
    assert not compare(problem, off, ref, abs(ref)).correct


def test_all_kernels_are_compiled_before_the_first_case(monkeypatch):
    """Together, so that every core has work; and on OpenCL they are few: a minute has room for 35 on two cores."""
    device, asked = device_of("opencl"), []
    monkeypatch.setattr(type(device), "compiled", lambda self, step: False)
    monkeypatch.setattr(plans, "_on_opencl", lambda missing: asked.extend(missing) or [])
    cases = engine_cases(device)
    verify.compile_cases(verify.select(None), cases, device)
    sources = [launch.source() for launch in asked]
    made = [
        *(Plan(case.problem, device) for case in verify.select(None)), *(Plan(case.problem, device, config=case.config) for case in cases)
    ]
    assert {launch.source() for plan in made for launch in background.launches(plan.loaded)} == set(sources)
    assert len(sources) == len(set(sources)) <= 35


def test_the_table_of_errors_is_made_of_the_report():
    """A row an engine and arithmetic; the largest error of several problems; clearly larger ones are bold; no transforms."""
    results = [
        asdict(replace(judged(factor), case=f"e fp32{asked} fprop, {numbers}", engine=engine, arithmetic="fp32", numbers=numbers))
        for engine, numbers, factor, asked in (
            ("gemm", "normal", 1.0, ""), ("gemm", "normal", 1.2, ""), ("gemm", "sparse", 2.0, ""), ("direct", "normal", 0.5, ""), ("tiles", "normal", 9.0, " fft"),
        )
    ]  # fmt: skip
    facts = {
        "date": "2026-11-29T01:00:00", "device": "cuda:0", "model": "NVIDIA X", "torch": "2.11", "cudnn": 91900, "kernels": "12345678",
        "results": results
    }
    text = error_table.page(facts)
    rows = {
        line.split(" | ")[0].removeprefix("| "): [part.strip(" |") for part in line.split(" | ")[1:]]
        for line in text.splitlines() if line.startswith("| ")
    }
    assert "2026-11-29, kernels `12345678`: NVIDIA X, torch 2.11, cuDNN 91900; 5 results" in text
    assert rows["fp32"][0] == "1.20" and rows["fp32"][2] == "2.00" and "tiles" not in rows
    assert rows["gemm"][0] == "fp32" and rows["gemm"][3].startswith("**") and not rows["gemm"][1].startswith("**")
    ours, theirs = map(float, rows["direct"][1].split(" / "))
    assert ours == pytest.approx(theirs / 2, abs=6e-4)


@pytest.mark.gpu
def test_every_engine_of_a_gpu_passes_on_all_kinds_of_numbers():
    """One problem of each arithmetic; the command has more. All kernels are compiled first, a compiler on each core."""
    device = get_device("cuda:0")
    cases = engine_cases(device)
    first = {case.problem for case in cases if case.distribution not in ("normal", "positive")}
    some = [case for case in cases if case.problem in first]
    verify.compile_cases([], some, device)
    wanted = {(case.problem, case.config) for case in some}
    launches = [one for pair in wanted for one in background.launches(background.initial_form(engines.schedule(*pair, device), device))]
    assert all(map(device.compiled, launches))
    results = verify.verify_engines(some, device, secrets.randbelow(2**32))
    assert len(results) > 200 and not [(r.case, r.detail) for r in results if not r.passed]
