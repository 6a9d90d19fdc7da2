"""Measured choices: the tables, which of them is followed, what is measured and when, and the command `pycuda-conv tune`."""

import contextlib
import json
import math
import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from reference import fprop, started

import pycuda_conv as pc
from pycuda_conv import ConvProblem, Plan, engines, explain, measure, memo, tune
from pycuda_conv.engines import calibration
from pycuda_conv.engines.direct.direct import Batched, Dgrad, Single
from pycuda_conv.engines.direct.gemm import Gemm
from pycuda_conv.engines.hopper.gemm import ImplicitGemm
from pycuda_conv.plan import cached_plan
from pycuda_conv.runtime import copies, get_device
from pycuda_conv.runtime.base import shown_file
from pycuda_conv.runtime.target import Target
from pycuda_conv.tools import tune as tool
from pycuda_conv.tools.benchmarks import calibrate
from pycuda_conv.tools.suite import MODES, core, in_mode, suite
from pycuda_conv.tools.terminal import FAILED, OK, UNUSABLE
from pycuda_conv.tools.training import gradients
from pycuda_conv.tune import Choice, Table

CASE = fprop((2, 3, 6, 7), (5, 3, 3, 2), padding=1)
PROBLEM = CASE.problem()
GPU = "NVIDIA Imaginary"
#: Legal for PROBLEM, and nobody would choose them.
ODD, ODDER = Batched(THREADS=32, BLOCK_K=3, BLOCK_C=2), Batched(THREADS=96, BLOCK_K=1, BLOCK_C=1)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """The cache folder, the user's and the shipped tables, all empty."""
    monkeypatch.setattr(tune, "user_table", lambda: tune._table(tmp_path / "cache" / "tuned.json"))
    monkeypatch.setattr(tune, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(tune, "_tables", {})
    memo.forget_plans()
    yield tmp_path
    memo.forget_plans()


def fake(**others):
    """As much of a GPU as a table is asked for."""
    known = {"model": GPU, "name": "cuda:0", "backend": "cuda", "capability": (9, 0), "multiprocessors": 132, "capturing": lambda: False}
    return SimpleNamespace(**{**known, **others})


@pytest.fixture
def named(monkeypatch, opencl):
    """PoCL's device under a GPU's name, so that tables tell of it."""
    device = get_device(opencl)
    monkeypatch.setattr(device, "model", GPU)
    return device


def write(path, choices):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tune._text(choices))


# ---- the key


def test_keys_stay_as_they_are():
    """A table's keys outlive the version that wrote them."""
    assert tune.key(PROBLEM) == "conv2d 2x3x6x7 -> 5x6x8 k3x2 s1 p1 float32 bias"
    problem = ConvProblem.transposed(1, (6, 9), (6, 2, 3), stride=2, dilation=3, groups=3, padding=((1, 0),), dtype="float16", output_padding=1)
    assert tune.key(replace(problem, layout="NHWC")) == "conv_transpose1d 1x6x9 -> 6x23 k3 s2 p1+0 d3 g3 float16 channels last unbatched"
    assert tune.key(replace(problem, precision="tf32", dtype="float32")).endswith("g3 float32 tf32 unbatched")


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_every_field_shows_in_the_key(direction):
    problem = replace(ConvProblem.forward(3, (2, 6, 7, 8, 9), (9, 2, 2, 3, 4), groups=3, padding=1, stride=(2, 3, 1)), direction=direction)
    other = {"direction": {"fprop": "dgrad", "dgrad": "fprop"}[direction], "ndim": 2, "batched": False, "dtype": "float16", "precision": "tf32", "layout": "NHWC", "has_bias": True, "algorithm": "fft",
             "border": (("reflect", "reflect"),) * 3, "input_dtype": "uint8", "result_dtype": "int16", "folded": True}
    bases = {"border_value": {"border": (("constant", "constant"),) * 3}, "folded": {"upsample": (1, 2, 2)}}  # where these mean something
    for field in fields(problem):
        value = getattr(problem, field.name)
        if field.name in ("has_scale", "has_residual", "activation", "bare", "float_scale"):  # a choice serves them all
            continue
        changes = [other[field.name]] if field.name in other else [value + 1] if isinstance(value, int | float) else [
            tuple(v + (i == axis) for i, v in enumerate(value)) for axis in range(3)
        ]
        base = replace(problem, **bases.get(field.name, {}))
        for change in changes:
            assert tune.key(replace(base, **{field.name: change})) != tune.key(base), f"{field.name}={change}"


# ---- a table


def test_what_is_added_is_read_again(folder):
    path = folder / "deep" / "down" / "t.json"
    table = Table(path)
    assert table.get(GPU, "p") is None
    chosen = {(GPU, "p"): Choice(ODD, 12.345), (GPU, "é \"q\""): Choice(ImplicitGemm(64, 128, 2, 3), 1e-3), ("other", "p"): Choice(Single(), 7.0)}
    for (gpu, problem), choice in chosen.items():
        table.add(gpu, problem, choice)
    for reader in (table, Table(path)):
        assert {place: reader.get(*place) for place in chosen} == chosen
    assert sorted(p.name for p in path.parent.iterdir()) == ["t.json", "t.json.lock"]


def test_a_table_s_text_is_sorted_json_with_a_line_for_each_problem():
    choices = {(GPU, "b"): Choice(ODD, 2), (GPU, "a"): Choice(Single(64), 1 / 3), ("A", "z"): Choice(ODD, 2)}
    text = tune._text(choices)
    assert text == tune._text(dict(reversed(choices.items())))
    assert json.loads(text) == {"format": tune.FORMAT, "version": tune.VERSION, "choices": {
        "A": {"z": {"config": {"Batched": {"THREADS": 32, "BLOCK_K": 3, "BLOCK_C": 2, "SPLIT": 1}}, "us": 2}},
        GPU: {"a": {"config": {"Single": {"THREADS": 64}}, "us": 0.333}, "b": {"config": {"Batched": {"THREADS": 32, "BLOCK_K": 3, "BLOCK_C": 2, "SPLIT": 1}}, "us": 2}},
    }}
    assert [line.split(":")[0].strip() for line in text.splitlines() if '"us"' in line] == ['"z"', '"a"', '"b"']


def entry(config='{"Single": {"THREADS": 64}}', us="1.5", version=tune.VERSION) -> str:
    return f'{{"format": "{tune.FORMAT}", "version": {version}, "choices": {{"{GPU}": {{"p": {{"config": {config}, "us": {us}}}}}}}}}'


UNUSABLE_TABLES = {
    "empty": "", "cut short": entry()[:-9], "another kind of file": "[1, 2]", "no format": '{"choices": {}}', "another format": '{"format": "x", "version": 1, "choices": {}}',
    "older kernels": entry(version=tune.VERSION - 1), "newer kernels": entry(version=tune.VERSION + 1), "no version": f'{{"format": "{tune.FORMAT}", "choices": {{}}}}',
    "no choices": f'{{"format": "{tune.FORMAT}", "version": {tune.VERSION}}}', "choices that are none": f'{{"format": "{tune.FORMAT}", "version": {tune.VERSION}, "choices": {{"g": 3}}}}',
    "nested without end": "[" * 100_000, "not text": b"\xff\xfe\x00",
    **{f"an entry of {config}": entry(config) for config in (
        "null", "3", "{}", '{"Single": {"THREADS": "64"}}', '{"Single": {"THREADS": 6.4}}',
        '{"Single": {"THREADS": true}}', '{"Single": {"THREADS": 0}}', '{"Single": [64]}', '{"ImplicitGemm": {"schedule": "turns"}}',
        '{"Single": {"THREADS": 64}, "Warp": {}}',
    )},
    **{f"a time of {us}": entry(us=us) for us in ("null", "0", "-1", "NaN", "Infinity", '"1"', "true")},
}  # fmt: skip


@pytest.mark.parametrize("text", UNUSABLE_TABLES.values(), ids=UNUSABLE_TABLES.keys())
def test_a_table_that_cannot_be_used_is_ignored_with_one_warning_and_set_aside(folder, text):
    path = folder / "t.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    table = Table(path)
    with pytest.warns(RuntimeWarning, match=re.escape(str(path))) as heard:
        assert table.get(GPU, "p") is None and table.get(GPU, "q") is None
        table.add(GPU, "q", Choice(ODD, 1))
    assert len(heard) == 1
    assert (folder / "t.json.unusable").read_bytes() == (text if isinstance(text, bytes) else text.encode())
    assert Table(path).get(GPU, "q") == Choice(ODD, 1)


@pytest.mark.parametrize(
    ("config", "now"), [('{"Single": {}}', Single()), ('{"Gemm": {"BLOCK_M": 64, "BLOCK_N": 64, "THREAD_M": 4}}', Gemm(64, 64, THREAD_M=4))],
)  # fmt: skip
def test_what_a_table_lacks_has_defaults(config, now):
    read = tune._parsed(entry(config=config))
    assert read == {(GPU, "p"): Choice(now, 1.5)}
    assert tune._parsed(tune._text(read)) == read


@pytest.mark.parametrize("obstacle", ["the folder is a file", "the table is a folder", "no locks"])
def test_what_cannot_be_written_is_kept_in_memory_with_a_warning(folder, monkeypatch, obstacle):
    cache = folder / "cache"
    if obstacle == "the folder is a file":
        cache.write_text("")
    elif obstacle == "the table is a folder":
        (cache / "tuned.json").mkdir(parents=True)
    else:
        import filelock

        def refuse(*_, **__):
            raise NotImplementedError("FileSystem does not appear to support flock")

        monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    with pytest.warns(RuntimeWarning, match=re.escape(str(cache / "tuned.json"))):
        tune.store(PROBLEM, fake(), Choice(ODD, 3))
    assert tune.lookup(PROBLEM, fake()) == Choice(ODD, 3)
    assert not list(folder.rglob(".tuned-*"))


#: What tables of other versions hold that no kernel of this one runs.
GONE = {"Lines": '{"BLOCK_N": 64}', "Single": '{"THREADS": 64, "X": 1}', "ImplicitGemm": '{"BLOCK_M": 64, "loader": "halo_split"}'}


@pytest.mark.parametrize(("gone", "fields"), GONE.items(), ids=GONE)
def test_entries_of_kernels_that_went_are_passed_over(gone, fields, folder):
    """Without a warning, and the table's other entries count. What is added later does not bring them back."""
    text = tune._text({(GPU, "kept"): Choice(ODD, 1), (GPU, "gone"): Choice(ODD, 2)})
    entry = f'   "gone": {{"config": {{"{gone}": {fields}}}, "us": 2}},'
    lines = [entry if '"gone"' in line else line for line in text.splitlines()]
    path = folder / "t.json"
    path.write_text("\n".join(lines) + "\n")
    assert Table(path).read() == {(GPU, "kept"): Choice(ODD, 1)}
    Table(path).add(GPU, "new", Choice(ODD, 3))
    assert {problem for _, problem in Table(path).read()} == {"kept", "new"}


def test_an_entry_that_hands_work_to_kernels_that_went_is_not_followed(folder):
    """An engine's configuration in the text of another's: the planner chooses."""
    delegate = "Lines(BLOCK_N=64, PIXEL_QUADS=1, WARP_TILE=8, CONSUMERS=2, STAGES=2, W_STAGES=1, CHUNKS=1, FP16_OPERANDS=False)"
    device, problem = Target("sm_90a"), ConvProblem.forward(2, (4, 3, 32, 32), (16, 3, 3, 3), padding=1, precision="tf32")
    column = engines.config_classes()["Columns"](delegate)
    tune.user_table().add(device.model, tune.key(problem), Choice(column, 1.0))
    assert engines.refusal(problem, column, device) and tune.lookup(problem, device) is None


def test_an_interrupted_write_leaves_the_old_table_alone(folder, monkeypatch):
    table = Table(folder / "t.json")
    table.add(GPU, "p", Choice(ODD, 1))
    before = table.path.read_bytes()
    monkeypatch.setattr(tune.os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        table.add(GPU, "q", Choice(ODD, 1))
    assert table.path.read_bytes() == before and not list(folder.glob(".tuned-*"))


def test_processes_that_add_at_the_same_time_keep_each_other_s_choices(python_env, folder):
    code = """
import sys
from pathlib import Path
from pycuda_conv.engines.direct.direct import Single
from pycuda_conv.tune import Choice, Table
table = Table(Path(sys.argv[1]))
for i in range(25):
    table.add("gpu", f"{sys.argv[2]} {i}", Choice(Single(), i + 1))
"""
    path = folder / "t.json"
    with contextlib.ExitStack() as stack:
        for process in [stack.enter_context(started("-c", code, path, name, env=python_env)) for name in "abc"]:
            assert process.communicate(timeout=400)[1] == b"" and process.returncode == 0
    assert {p: c.us for (_, p), c in Table(path).read().items()} == {f"{name} {i}": i + 1 for name in "abc" for i in range(25)}


def test_a_choice_that_another_process_added_is_kept_and_one_that_was_taken_out_stays_out(folder):
    table, other = Table(folder / "t.json"), Table(folder / "t.json")
    table.add(GPU, "mine", Choice(ODD, 1))
    other.add(GPU, "other's", Choice(ODD, 2))
    write(table.path, {(GPU, "edited"): Choice(ODD, 3)})
    table.add(GPU, "next", Choice(ODD, 4))
    assert {p for _, p in Table(table.path).read()} == {"mine", "edited", "next"}
    assert table.get(GPU, "edited") == Choice(ODD, 3) and table.get(GPU, "other's") is None


H200 = fake(model="NVIDIA H200")
SHIPPED_TABLES = sorted((tune.SHIPPED).glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED_TABLES, ids=lambda path: path.name)
def test_a_shipped_table_holds_what_the_kernels_can_run(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = Table(path).read()
    timed = calibration.parsed((calibration.SHIPPED / path.name).read_text()).timings
    known = {tune.key(problem): problem for problem, *_ in calibrate.from_json(timed)}
    assert path.read_text() == tune._text(found)
    assert tune.shipped_table("../NVIDIA GeForce RTX 4090 (D)").path.parent == tune.SHIPPED
    of_benchmark = {tune.key(in_mode(problem, mode)) for mode in MODES for problem in suite()}
    # drawn problems: a table of its own would flatter the benchmark
    assert len(found) > 100 and not of_benchmark & {name for _, name in found}
    for (gpu, name), choice in found.items():
        assert tune.shipped_table(gpu).path.name == path.name
        if gpu == H200.model:
            assert engines.refusal(known[name], choice.config, H200) is None


# ---- which choice is followed


def test_the_user_s_table_comes_before_the_shipped_one_and_both_before_the_model(folder):
    device = fake()
    assert tune.lookup(PROBLEM, device) is None
    write(folder / "shipped" / "nvidia_imaginary.json", {(GPU, tune.key(PROBLEM)): Choice(ODDER, 2)})
    tune._tables.clear()
    assert tune.lookup(PROBLEM, device) == Choice(ODDER, 2)
    tune.store(PROBLEM, device, Choice(ODD, 1))
    assert tune.lookup(PROBLEM, device) == Choice(ODD, 1)
    assert tune.lookup(PROBLEM, fake(model="NVIDIA Other")) is None and tune.lookup(PROBLEM, fake(model="")) is None
    assert tune.lookup(replace(PROBLEM, has_bias=False), device) is None


def test_a_gpu_that_nothing_was_measured_on_follows_one_alike(folder):
    """One of the same compute capability and as many multiprocessors; what was measured on the GPU itself comes before."""
    name, other = tune.key(PROBLEM), fake(model="NVIDIA H100 80GB HBM3")
    write(folder / "shipped" / "nvidia_h200.json", {("NVIDIA H200", name): Choice(ODDER, 2)})
    assert tune.lookup(PROBLEM, fake(model="NVIDIA H200")) == Choice(ODDER, 2)
    assert tune.lookup(PROBLEM, other) == Choice(ODDER, 2, "NVIDIA H200") and tune.lookup(PROBLEM, other, own=True) is None
    assert tune.measured_configs(other) == (ODDER,)
    unlike = fake(multiprocessors=114), fake(capability=(10, 0)), fake(model=""), fake(backend="opencl")
    assert [tune.lookup(PROBLEM, device) for device in unlike] == [None] * 4
    tune.store(PROBLEM, other, Choice(ODD, 1))
    assert tune.lookup(PROBLEM, other) == tune.lookup(PROBLEM, other, own=True) == Choice(ODD, 1)
    assert tune.measured_configs(other) == (ODD, ODDER)


def test_what_was_measured_on_a_gpu_alike_is_measured_again(folder, monkeypatch):
    device = fake()
    write(folder / "shipped" / "nvidia_h200.json", {("NVIDIA H200", tune.key(PROBLEM)): Choice(ODDER, 2)})
    monkeypatch.setattr("pycuda_conv.measure.trials", lambda problem, device: [Choice(ODD, 1), Choice(engines.choose(problem, device), 2)])
    assert tune.tuned(PROBLEM, device) == tune.lookup(PROBLEM, device) == Choice(ODD, 1)


@pytest.mark.parametrize("config", [Dgrad(), Single(), Batched(128, 64, 64), ImplicitGemm(96, 8, 3)], ids=str)
def test_a_choice_that_is_no_longer_legal_is_passed_over(folder, config, recwarn):
    write(folder / "cache" / "tuned.json", {(GPU, tune.key(PROBLEM)): Choice(config, 2)})
    assert tune.lookup(PROBLEM, fake()) is None
    write(folder / "shipped" / "nvidia_imaginary.json", {(GPU, tune.key(PROBLEM)): Choice(ODD, 2)})
    tune._tables.clear()
    assert tune.lookup(PROBLEM, fake()) == Choice(ODD, 2) and not recwarn.list


def test_what_another_thread_plans_while_a_choice_is_stored_is_forgotten(named, monkeypatch):
    monkeypatch.setattr(tune.Table, "add", lambda table, *choice, add=tune.Table.add: (cached_plan(PROBLEM, named), add(table, *choice)))
    tune.store(PROBLEM, named, Choice(ODD, 4.5))
    assert cached_plan(PROBLEM, named).config == ODD


def test_plans_and_calls_follow_the_table_and_a_given_configuration_comes_first(named):
    model = Plan(PROBLEM, named)
    assert model.tuned is None and model.config == engines.choose(PROBLEM, named)
    assert cached_plan(PROBLEM, named).config == model.config
    tune.store(PROBLEM, named, Choice(ODD, 4.5))
    tuned = Plan(PROBLEM, named)
    assert tuned.config == ODD and tuned.tuned == Choice(ODD, 4.5) and not tuned.fixed
    assert cached_plan(PROBLEM, named).config == ODD  # in plans made before the measurement too
    given = Plan(PROBLEM, named, config=ODDER)
    assert (given.config, given.tuned, given.fixed) == (ODDER, None, True)
    arrays = CASE.integers("float32")
    for plan in (model, tuned, given):
        assert np.array_equal(plan(*arrays), CASE.reference(*arrays))
    assert np.array_equal(pc.conv2d(*arrays, padding=1, device="opencl"), CASE.reference(*arrays))


# ---- measuring


@pytest.fixture
def measured(monkeypatch):
    """The problems that were measured; nothing really is."""
    found = []

    def trials(problem, device, compiler=None):
        found.append(problem)
        return [Choice(ODD, 10.0), Choice(engines.choose(problem, device), 15.0)]

    monkeypatch.setattr(measure, "trials", trials)
    monkeypatch.setattr(tool, "trials", trials)
    return found


def test_what_is_faster_by_chance_is_not_taken_for_the_planner_s():
    own = Choice(engines.choose(PROBLEM, fake()), 10.3)
    assert tune.best([Choice(ODD, 10.0), own], own.config) == own == tune.best([own, Choice(ODD, 10.4)], own.config)
    assert tune.best([own, Choice(ODD, 9.9)], own.config) == Choice(ODD, 9.9)


def test_threads_that_ask_at_the_same_time_measure_once_and_the_best_is_kept(measured):
    barrier = threading.Barrier(6, timeout=300)

    def ask(_):
        barrier.wait()
        return tune.tuned(PROBLEM, fake())

    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(ask, range(6))) == {Choice(ODD, 10.0)}
    assert tune.tuned(PROBLEM, fake()) == Table(tune.user_table().path).get(GPU, tune.key(PROBLEM)) == Choice(ODD, 10.0)
    assert measured == [PROBLEM]


def test_a_measurement_is_refused_while_a_stream_is_captured_but_what_is_known_is_used(measured):
    busy = fake(capturing=lambda: True)
    with pytest.raises(pc.ConvArgumentError, match="captured: call it once before"):
        tune.tuned(PROBLEM, busy)
    tune.store(PROBLEM, busy, Choice(ODD, 1))
    assert tune.tuned(PROBLEM, busy) == Choice(ODD, 1) and not measured


def test_a_problem_for_which_there_is_no_room_stays_untuned(monkeypatch):
    def trials(*_):
        raise pc.DeviceMemoryError("cuda:0 is out of memory")

    monkeypatch.setattr(measure, "trials", trials)
    with pytest.warns(RuntimeWarning, match="is not tuned: cuda:0 is out of memory"):
        assert tune.tuned(PROBLEM, fake()) is None


def test_on_opencl_nothing_is_measured(measured, folder, opencl):
    arrays = CASE.integers("float32")
    plan = Plan(PROBLEM, "opencl", tune=True)
    assert plan.tuned is None and plan.config == engines.choose(PROBLEM, plan.device)
    assert np.array_equal(plan(*arrays), CASE.reference(*arrays))
    assert np.array_equal(pc.conv2d(*arrays, padding=1, device="opencl", tune=True), CASE.reference(*arrays))
    assert not measured and not (folder / "cache").exists()


@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"])
def test_every_function_takes_tune(device, name, monkeypatch):
    asked = []
    monkeypatch.setattr("pycuda_conv.plan.tuned", lambda *args: asked.append(args[0].ndim))
    ndim = int(name[-2])
    x, w = np.ones((1, 1, *(3,) * ndim), "f"), np.ones((1, 1, *(2,) * ndim), "f")
    function = getattr(pc, name)
    for _ in range(2):
        assert np.array_equal(function(x, w, tune=True, device=device), function(x, w, device=device))
    assert asked == [ndim]
    with pytest.raises(TypeError, match="tune must be True or False, got 1"):
        function(x, w, tune=1, device=device)


def test_a_given_configuration_is_not_tuned():
    with pytest.raises(ValueError, match="nothing to tune: config=Batched"):
        Plan(PROBLEM, "opencl", config=ODD, tune=True)


@pytest.mark.parametrize("problem", core()[::2], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_candidates_are_legal_begin_with_the_planner_s_own_and_hold_a_direct_one(problem, precision):
    problem = replace(problem, precision=precision)
    for device in (fake(), fake(capability=(7, 5), multiprocessors=40)):
        found = engines.candidates(problem, device)
        assert found[0] == engines.choose(problem, device) and len(set(found)) == len(found) <= 60
        assert all(engines.refusal(problem, config, device) is None for config in found)
        assert any(isinstance(config, Gemm) for config in found)
        predicted = engines.predictions(problem, device)
        assert [us for us, _ in predicted] == sorted(us for us, _ in predicted) and predicted[0][1] in found


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_operands_are_random_and_scaled_by_the_depth(dtype):
    problem = ConvProblem.forward(2, (2, 64, 20, 20), (32, 64, 3, 3), (32,), dtype=dtype)
    x, w, b, scale, residual = measure.operands(problem, 10_000)
    assert scale.size == residual.size == 0
    assert [a.size for a in (x, w, b)] == [10_000, 10_000, 32] and {str(a.dtype) for a in (x, w, b)} == {problem.storage}
    wide = [(a.view(np.uint16).astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else a.astype(float) for a in (x, w, b)]
    assert wide[0].std() == pytest.approx(1, rel=0.05) and wide[1].std() == pytest.approx(1 / 24, rel=0.05) and (wide[0] != 0).mean() > 0.99


@pytest.mark.parametrize("change, differs", [
    (lambda a: a * (1 + 1e-7), False), (lambda a: a + 1e-3 * (np.arange(a.size) == 77), True), (lambda a: a * (1 + 1e-4), True),
    (lambda a: np.where(np.arange(a.size) == 5, np.nan, a), True), (lambda a: np.roll(a, 1), True),
])
def test_results_that_differ_are_told_from_rounding(change, differs):
    expected = np.random.default_rng(0).standard_normal(100_000)
    assert bool(measure.difference(PROBLEM, change(expected), expected)) == differs


# ---- explain


def told(plan, **options) -> dict[str, str]:
    lines = plan.explain(**options).splitlines()
    assert lines[0] == str(plan.problem)
    return {line.split()[0]: " ".join(line.split()[1:]) for line in lines[1:] if line[2:].partition("  ")[0]}


def test_a_plan_tells_what_it_launches_and_why(named):
    found = told(plan := Plan(PROBLEM, named))
    assert str(PROBLEM) in repr(plan)
    assert found["where"] == f"opencl, {GPU}" and found["work"].startswith("1.73e-05 GFLOP, 0.00") and "rule" in found["because"]
    assert found["direct_batched"] == f"cu/direct/batched.cu {plan.schedule.whole[0][0].grid} 128"
    assert "measured" not in found
    assert told(Plan(PROBLEM, named, config=ODD))["because"] == "the caller gave it"
    tune.store(PROBLEM, named, Choice(ODD, 4.5))
    found = told(Plan(PROBLEM, named))
    assert found["chosen"] == str(ODD) and found["because"] == f"tuned: the fastest measured on {GPU}"
    assert found["measured"].startswith("4.5 us: ") and found["measured"].endswith(", when it was tuned")


def test_a_plan_measures_itself_when_it_is_asked_to(device):
    found = told(Plan(PROBLEM, device), measure=True)
    assert re.match(r"[\d.,]+ us: .* TFLOP/s, .* GB/s, now$", found["measured"])


def test_a_plan_for_nothing_launches_nothing(device):
    assert "launch" not in told(Plan(ConvProblem.forward(1, (0, 2, 5), (3, 2, 2)), device), measure=True)


LAYER = ConvProblem.forward(2, (64, 128, 28, 28), (128, 128, 3, 3), padding=1)
KNOWN = {"registers": 168, "local": 0, "shared": 200_000, "occupancy": 0.1875}


def imagined(problem, config=None, tuned=None):
    """A plan for a GPU that is not there."""
    device = fake(describe=lambda step: KNOWN)
    chosen = config or (tuned.config if tuned else engines.choose(problem, device))
    program = engines.schedule(problem, chosen, device)
    return SimpleNamespace(
        problem=problem, device=device, config=chosen, fixed=config is not None, tuned=tuned, empty=False, schedule=program, loaded=program,
        workspace_bytes=program.workspace_bytes + program.filter_bytes, filter_bytes=program.filter_bytes,
    )


def test_on_a_gpu_the_models_are_quoted_and_the_launches_measured():
    plan = imagined(LAYER)
    assert isinstance(plan.config, ImplicitGemm)
    lines = explain.explain(plan, False).splitlines()
    (because,) = (line for line in lines if "because" in line)
    assert re.search(r"its prediction is the shortest, [\d.]+ us against [\d.,]+ us for the best Batched and [\d.,]+ us for the best Gemm$", because)
    assert any(re.search(r"predicted +[\d.]+ us: [\d.]+ TFLOP/s, [\d,.]+ GB/s$", line) for line in lines)
    assert any(line.split()[0] == "workspace" and "the packed filter" in line for line in lines)
    head = next(i for i, line in enumerate(lines) if line.split()[0] == "launch")
    steps = [step for stage in plan.schedule.whole for step in stage]
    assert len(lines) == head + 1 + len(steps)
    for line, step in zip(lines[head + 1 :], steps, strict=True):
        assert line.split() == [step.kernel, shown_file(step.file or step.kernel), f"{step.grid:,}", str(step.block), "168", "0", "200,000", "19%"]


def test_a_tuned_plan_shows_both_times():
    text = explain.explain(imagined(LAYER, tuned=Choice(Gemm(128, 128, 16, 8, 8, 2), 321.0)), False)
    assert "predicted" in text and re.search(r"measured +321 us: 46.1 TFLOP/s, .*, when it was tuned", text)


# ---- the command


@pytest.fixture
def tune_command(command):
    """`pycuda-conv tune`."""
    return partial(command, "tune")


@pytest.fixture
def imaginary(monkeypatch, measured):
    """The command finds an imaginary GPU; gives what it measures."""
    monkeypatch.setattr(tool, "_device", lambda settings: fake())
    monkeypatch.setattr(tool, "Compiler", lambda device: SimpleNamespace(__enter__=None))
    monkeypatch.setattr(tool, "_measure", lambda todo, device, until: (tool._row(problem, device, None) for problem in todo))
    return measured


@pytest.mark.parametrize("arguments, words", [
    (("--match", "conv9d"), "--match 'conv9d' is in no problem's text"), (("--limit", "0"), "--limit"), (("--limit", "soon"), "'soon'"), (("--limit", "nan"), "'nan'"),
    (("--precision", "int4"), "int4"), (("--dtype", "int8"), "int8"), (("--layout", "CHWN"), "CHWN"), (("--device", "tpu"), "'tpu'"), (("--device", "opencl"), "only GPUs"),
    (("--list", "--match", "conv9d"), "conv9d"),
], ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "")
def test_what_cannot_be_done_is_told_in_one_line(tune_command, opencl, arguments, words):
    status, out, err = tune_command(*arguments)
    assert (status, out, err.count("\n")) == (UNUSABLE, "", 1) and words in err and err.startswith("pycuda-conv tune: ")


@pytest.mark.parametrize("output, words", [("/", "can't be written"), ("/no/such/folder/t.json", "can't be written"), (__file__, "is not a table of tuned choices")])
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_measured(tune_command, imaginary, output, words):
    status, out, err = tune_command("--output", output)
    assert (status, out, err.count("\n")) == (UNUSABLE, "", 1) and words in err and output in err and not imaginary


BENCHED = list(dict.fromkeys(core() + gradients()))  # in NCHW float32


def test_the_list_tells_every_problem_in_every_form(tune_command):
    assert tune_command("--list")[1].splitlines() == [str(problem) for problem in BENCHED]
    every = tune_command("--list", "--dtype", "all", "--precision", "both", "--layout", "both")[1].splitlines()
    assert len(every) == len(set(every)) == len(core()) * 2 * 5 + (len(BENCHED) - len(core())) * 2
    assert tune_command("--list", "--precision", "tf32", "--dtype", "float16", "--match", "1x1x5x5")[1] == "conv2d 1x1x5x5 -> 1x3x3 k3x3 s1 p0 float16\n"


def test_the_table_shows_what_was_gained_and_nothing_is_measured_twice(tune_command, imaginary):
    arguments = ("--match", "x5x5 ->")
    status, out, err = tune_command(*arguments)
    assert status == OK and "geometric mean of the gain: 1.500" in out and str(tune.user_table().path) in out
    for problem in imaginary:
        (line,) = (line.strip() for line in out.splitlines() if line.strip().startswith(str(problem)))
        assert line.removeprefix(str(problem)).split() == ["15.00", *str(ODD).split(), "10.00", "1.50"]
        assert tune.user_table().get(GPU, tune.key(problem)) == Choice(ODD, 10.0)
    assert len(imaginary) == 2 and err.count("\n") == 2 and err.startswith("[1/2] conv2d 1x1x5x5")
    status, out, err = tune_command(*arguments)
    assert (status, err, len(imaginary)) == (OK, "", 2) and "2 problems were measured before; --all measures them again" in out
    assert tune_command(*arguments, "--all")[0] == OK and len(imaginary) == 4


def test_an_output_is_written_instead_of_the_user_s_table(tune_command, imaginary, folder):
    path = folder / "out.json"
    write(path, {("other", "p"): Choice(ODD, 3)})
    tune.store(core()[16], fake(), Choice(ODD, 3))  # what the user knows says nothing of the new table
    assert tune_command("--match", "1x1x5x5", "--output", path)[0] == OK and imaginary == [core()[16]]
    assert set(Table(path).read()) == {("other", "p"), (GPU, tune.key(core()[16]))}
    assert sorted(p.name for p in folder.glob("*.json*")) == ["out.json"] and tune.user_table().get(GPU, tune.key(core()[16])).us == 3


def test_wrong_results_and_missing_memory_have_their_lines(tune_command, imaginary, monkeypatch):
    def trials(problem, *_):
        raise measure.WrongResultError("a and b differ") if problem.N == 1 else pc.DeviceMemoryError("no")

    monkeypatch.setattr(tool, "trials", trials)
    status, out, err = tune_command("--match", "x5x5 ->")
    assert status == FAILED and "WRONG: a and b differ" in err and " WRONG " in out and " no memory " in out and "gain: -" in out


def test_the_limit_leaves_what_would_begin_too_late(tune_command, measured, monkeypatch):
    monkeypatch.setattr(tool, "_device", lambda settings: fake())
    monkeypatch.setattr(measure.Compiler, "start", lambda self, problem: None)
    now = iter(range(0, 10_000, 10))
    monkeypatch.setattr(tool, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    status, out, _ = tune_command("--limit", 35)  # begun at 0, asked at 10, 20, 30, 40
    assert status == OK and len(measured) == 3 and f"{len(BENCHED) - 3} problems were left when the time limit was reached" in out


# ---- on a GPU

SMALL = fprop((4, 16, 20, 20), (24, 16, 3, 3), padding=1)


@pytest.mark.gpu
@pytest.mark.parametrize("case, dtype", [
    (SMALL, "float32"), (SMALL, "float16"), (SMALL, "bfloat16"), (SMALL, "float64"), (fprop((2, 8, 30, 30), (8, 1, 3, 3), groups=8), "float32"),
    (fprop((16, 64, 28, 28), (128, 64, 3, 3), padding=1), "float32"),
], ids=str)
def test_the_choice_on_a_gpu_is_one_of_the_candidates_and_is_used(case, dtype):
    device = get_device("cuda")
    problem = case.problem(dtype)
    before = cached_plan(problem, device)
    plan = Plan(problem, device, tune=True)
    assert plan.tuned.config == plan.config and plan.config in engines.candidates(problem, device) and 0 < plan.tuned.us < 1000
    assert cached_plan(problem, device) is not before and cached_plan(problem, device).config == plan.config
    assert Table(tune.user_table().path).get(device.model, tune.key(problem)).config == plan.config
    text = plan.explain()
    assert f"tuned: the fastest measured on {device.model}" in text and "when it was tuned" in text


@pytest.mark.gpu
@pytest.mark.gpu_alone
def test_trials_are_sorted_and_the_fastest_is_nearly_as_fast_again():
    device = get_device("cuda")
    problem = fprop((16, 64, 28, 28), (128, 64, 3, 3), padding=1).problem()
    found = measure.trials(problem, device)
    assert [c.us for c in found] == sorted(c.us for c in found) and {c.config for c in found} == set(engines.candidates(problem, device))
    again = measure.measured(Plan(problem, device, config=found[0].config))
    assert again == pytest.approx(found[0].us, rel=0.3)
    assert math.isclose(measure.measured(Plan(problem, device, config=found[-1].config)), found[-1].us, rel_tol=0.3)


@pytest.mark.gpu
def test_a_wrong_configuration_is_found(monkeypatch):
    device = get_device("cuda")
    problem = SMALL.problem()
    plans = [Plan(problem, device, config=config) for config in (ODD, Batched())]
    right = plans[1].launch

    def wrong(buffers, stream=None, *more):
        right(buffers, stream, *more)
        *_, result, _ = buffers
        copies.fill(result + plans[1].result_bytes - 4, 0, 4, stream)

    monkeypatch.setattr(plans[1], "launch", wrong)
    with pytest.raises(measure.WrongResultError, match=r"Batched.*differ.*1 of 38,400 elements"):
        measure.device_times(plans)


@pytest.mark.gpu
def test_a_captured_stream_is_not_disturbed():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    x, w = (torch.from_numpy(a).cuda() for a in SMALL.integers("float32")[:2])
    pc.conv2d(x, w, padding=1)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        pc.conv2d(x, w, padding=1)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(pc.ConvArgumentError, match="captured"):
            pc.conv2d(x, w, padding=1, tune=True)
        y = pc.conv2d(x, w, padding=1)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, pc.conv2d(x, w, padding=1))


@pytest.mark.gpu
def test_describe_tells_what_the_compiler_said():
    plan = Plan(fprop((16, 64, 28, 28), (128, 64, 3, 3), padding=1).problem(), "cuda")
    for stage in plan.schedule.whole:
        for step in stage:
            found = plan.device.describe(step)
            assert 8 <= found["registers"] <= 255 and found["local"] >= 0
            assert 0 < found["occupancy"] <= 1 and step.shared <= found["shared"] <= 228 * 1024
    text = plan.explain(measure=True)
    assert "occupancy" in text and ", now" in text and plan.device.model in text


@pytest.mark.gpu
def test_the_command_tunes_and_the_calls_follow(tune_command):
    status, out, _ = tune_command("--match", "2x4x5x5")
    assert status == OK and "geometric mean of the gain" in out
    (problem,) = (p for p in core() if "2x4x5x5" in str(p))
    assert Plan(problem, "cuda").tuned is not None
