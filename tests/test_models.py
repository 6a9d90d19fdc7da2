"""Whole networks beside torch's: ``pycuda-conv bench --models``. Small networks stand in for torchvision's."""

import copy
import itertools
import json
import math
import sys
import time
from types import SimpleNamespace

import pytest
from conftest import why_no_opencl

from pycuda_conv.cli import main
from pycuda_conv.timing import Effort
from pycuda_conv.tools import bench, models, report
from pycuda_conv.tools.models import Case, Curve, Evaluated, Trained
from pycuda_conv.tools.terminal import FAILED, OK, UNUSABLE, ToolError

torch = pytest.importorskip("torch")
pytest.importorskip("rich")

CASE = Case("evaluated", "resnet50", 32, "fp32")
TRAINED = Case("trained", "resnet50", 64, "fp32")


def small(name, **_):
    """What every network has that the benchmark looks at: convolutions, one of them fused, batch norm, dropout, a layer's scale."""
    if name == "broken":
        raise ValueError("there is no network 'broken'")
    n = torch.nn
    layers = n.Sequential(n.Conv2d(3, 8, 3, padding=1, bias=False), n.BatchNorm2d(8), n.ReLU(), n.Conv2d(8, 4, 3, stride=2, groups=2), n.BatchNorm2d(4))
    layers.layer_scale = n.Parameter(torch.full((1,), 1e-6))
    return n.Sequential(layers, n.AdaptiveAvgPool2d(1), n.Flatten(), n.Dropout(0.5), n.Linear(4, 1000))


@pytest.fixture
def stand_in(monkeypatch):
    """Small networks of few, small images."""
    monkeypatch.setattr(models, "_torchvision", lambda: SimpleNamespace(get_model=small))
    for name, value in {
        "EVALUATED": ("broken", "net"), "BATCHES": (2,), "TRAINED": {"net": (4,)}, "IMAGE": 8, "CURVE_IMAGES": 4, "CURVE_SIZE": 8, "CURVE_STEPS": 4, "CURVE_RUNS": 3,
    }.items():  # fmt: skip
        monkeypatch.setattr(models, name, value)
    models._evaluated.cache_clear()
    yield
    models._evaluated.cache_clear()


@pytest.fixture
def cpu(monkeypatch, stand_in):
    """A device that counts as a GPU, and is PoCL."""
    if why_no_opencl():
        pytest.skip(why_no_opencl())
    device = SimpleNamespace(name="cpu", backend="cuda", all_compiled=lambda: True)
    monkeypatch.setattr(bench, "gpu_for", lambda settings, flag: device)
    monkeypatch.setattr(bench, "describe", lambda *_: {"date": "2026-01-01T", "GPU": "none, such", "torch": "2"})
    monkeypatch.setattr(models, "gpu_times", lambda torch, ways, sets, effort, captured: (models.wall_times(ways, sets, effort), "graph" if captured == math.inf else ""))
    monkeypatch.setattr(models, "plans", lambda problems, device, noted=False: [])
    for name in ("synchronize", "set_device", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 10**9)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 10**9)
    return device


# ---- cases, rows, tables


def test_what_is_measured():
    texts = [str(case) for case in models.cases((), True, False)]
    assert len(texts) == len(set(texts)) == 4 * 3 * 2 + 7 + 6
    assert {"resnet50, 1 image, fp32, evaluated", "resnet50, 256 images, bf16-nhwc, trained", "mobilenet_v2, 16 images, fp32, loss curve"} < set(texts)
    assert "resnet50, 256 images, fp32, trained" not in texts
    assert {case.what for case in models.cases((), True, True)} == {"evaluated", "trained"}
    assert {case.what for case in models.cases((), False, False)} == {"evaluated"}
    assert {case.mode for case in models.cases(("bf16", "fp64"), True, False)} == {"bf16", "fp64"}


def test_cases_are_listed(capsys):
    assert main(["bench", "--models", "--training", "--list", "--only", "deeplab.* 32 .*(fp32|16)|256"]) == OK
    assert capsys.readouterr().out.splitlines() == [
        "deeplabv3_resnet50, 32 images, fp32, evaluated", "deeplabv3_resnet50, 32 images, fp16-nhwc, evaluated", "resnet50, 256 images, bf16-nhwc, trained",
    ]  # fmt: skip
    assert main(["bench", "--models", "--list", "--mode", "tf32", "bf16"]) == OK
    assert capsys.readouterr().out.count("\n") == 4 * 2 * 2
    assert main(["bench", "--models", "vgg11", "resnet50", "--training", "--quick", "--list", "--mode", "bf16"]) == OK
    trained = [line for line in capsys.readouterr().out.splitlines() if line.endswith("trained")]
    assert trained == ["vgg11, 32 images, bf16, trained", "resnet50, 64 images, bf16, trained", "resnet50, 256 images, bf16, trained"]


@pytest.mark.parametrize("arguments, words", [
    (["--only", "("], "regular expression"), (["--only", "vgg"], "matches no problem"), (["--csv", "x.csv"], "--csv is not for --models"),
    (["--host-calls"], "--host-calls and --models are two benchmarks"), (["--device", "opencl"], "--models needs a GPU"),
])  # fmt: skip
def test_what_cannot_be_measured_is_told_in_one_line(capsys, arguments, words):
    assert main(["bench", "--models", *arguments]) == UNUSABLE
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err


def test_torchvision_that_is_missing_or_does_not_fit(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(ToolError, match=r"torchvision is needed.*pip install torchvision"):
        models._torchvision()
    monkeypatch.setattr(models, "require", lambda name: (_ for _ in ()).throw(RuntimeError("operator torchvision::nms does not exist")))
    with pytest.raises(ToolError, match=r"a torchvision that fits torch.*nms does not exist"):
        models._torchvision()


def test_the_arithmetic_of_rows():
    evaluated = Evaluated(CASE, "ok", 2.0, 3.0, 1.0, 4.0, 1e-7, 2e-7)
    assert evaluated.cells() == ("resnet50", "32", "fp32", "2.00", "3.00", "1.50", "1.00", "4.00", "4.00", "1.0e-07", "2.0e-07", "ok")
    assert evaluated.record() == {
        "what": "evaluated", "network": "resnet50", "images": 32, "mode": "fp32", "verdict": "ok", "eager_ms": 2.0, "torch_eager_ms": 3.0, "graph_ms": 1.0, "torch_graph_ms": 4.0,
        "error": 1e-7, "torch_error": 2e-7, "eager_ratio": 1.5, "graph_ratio": 4.0,
    }  # fmt: skip
    trained = Trained(TRAINED, "ok", 20.0, 40.0, 25.0, 3e9, 4e9, 1e-3)
    assert trained.cells()[3:] == ("3200", "1600", "2.00", "2560", "1.25", "3.00", "4.00", "0.75", "1.0e-03", "ok")
    curve = Curve(CASE, "WRONG", (1.0, 2.0, 6.0), (3.0,), (), (), 7.0, 0.25)
    assert curve.figures() == ("7.00 to 0.25", "2.0e+00 / 6.0e+00", "3.0e+00 / 3.0e+00", "-", "-")
    for row in (evaluated, trained, curve):
        failed = type(row)(CASE, "failed: why")
        assert len(row.figures()) == len(row.COLUMNS) and failed.figures() == ("-",) * len(row.COLUMNS) and failed.cells()[-1] == "failed"


def test_means_are_of_what_is_right():
    rows = [Evaluated(CASE, "ok", 1.0, 2.0, 1.0, 4.0), Evaluated(CASE, "ok", 1.0, 8.0, 1.0, 4.0), Evaluated(CASE, "failed: why"), Trained(TRAINED, "ok", 1.0, 3.0), Trained(TRAINED, "WRONG", 1.0, 9.0)]
    assert models.mean_lines(rows) == ["evaluated, fp32, 32 images: geometric means eager 4.00, graph 4.00", "trained, fp32: geometric mean 3.00"]
    text = models.markdown({"command": "c", "date": "2026-01-01T", "GPU": "g, x", "torch": "2", "method": "m"}, rows)
    assert "| resnet50 | 32 | fp32 | 1.00 | 2.00 | 2.00 | 1.00 | 4.00 | 4.00 | - | - | ok |" in text.splitlines() and "nan" not in text


def test_rounds_by_turns(monkeypatch):
    """A clock that stands still but for what calls take."""
    now, order = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def call(name, *seconds):
        rounds = itertools.cycle(seconds)

        def made():
            order.append(name)
            now[0] += next(rounds)

        return made

    ours, theirs = models._host_times([call("ours", models.ROUND / 1.5), call("torch", 2 * models.ROUND, 4 * models.ROUND)], lambda: None, Effort(rounds=4, seconds=0))
    assert ours == pytest.approx(models.ROUND / 1.5 * 1e3) and theirs == pytest.approx(3 * models.ROUND * 1e3)
    assert order[-12:] == ["ours", "ours", "torch"] * 4


# ---- networks


def test_nothing_of_a_network_is_left_to_chance(stand_in):
    one, same, other = (models.network(torch, "net", "cpu", seed).train() for seed in (1, 1, 2))
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(one(x), same(x)) and torch.equal(one(x), one(x)) and not torch.equal(one(x), other(x))
    assert one[0].layer_scale.item() == 1 and one[0][1].momentum == 0.1
    given = one[0][0](torch.randn(64, 3, 8, 8))
    assert torch.allclose(one[0][1].eval()(given).var((0, 2, 3)), torch.ones(8), rtol=0.5)  # statistics are those of such images


def test_what_a_network_computes_in_training():
    n = torch.nn
    model = n.Sequential(n.Conv2d(3, 8, 3, stride=2), n.Conv2d(8, 8, 3, padding=1, groups=2, bias=False), n.Conv2d(8, 8, 3, padding=1, groups=2, bias=False)).to("meta")
    images = torch.randn(2, 3, 9, 9, device="meta")
    found = models.convolutions(torch, model, images, "fp32")
    assert [problem.direction for problem in found] == ["fprop", "wgrad", "fprop", "dgrad", "wgrad"]  # images have no gradient; the last two are one
    assert found[0].has_bias and found[0].stride == (1, 2, 2) and found[3].groups == 2
    assert {(p.dtype, p.layout) for p in models.convolutions(torch, model, images, "bf16-nhwc")} == {("bfloat16", "NHWC")}


def test_arithmetic_is_set_and_put_back():
    before = torch.get_float32_matmul_precision()
    for mode, matmul, conv in (("tf32-nhwc", "high", "tf32"), ("fp32", "highest", "ieee"), ("fp16", "highest", "ieee")):
        with models.arithmetic(torch, mode):
            assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.conv.fp32_precision) == (matmul, conv)
        assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("mode, weights, inside", [("bf16-nhwc", torch.float32, torch.bfloat16), ("fp32", torch.float32, torch.float32), ("fp64", torch.float64, torch.float64)])
def test_a_step_is_of_its_mode(stand_in, mode, weights, inside):
    case = Case("trained", "net", 2, mode)
    images, labels = models._data(torch, case, "cpu", 8)
    model = models._in_training(torch, models.network(torch, "net", "cpu", 0), mode, False)
    assert images.is_contiguous(memory_format=torch.channels_last) == (mode == "bf16-nhwc") and model.training
    seen, before = [], copy.deepcopy(model.state_dict())
    model[0][3].register_forward_hook(lambda module, given, result: seen.append(result.dtype))
    step = models.stepper(torch, model, images, labels, mode, 0.1)
    losses = [float(step()) for _ in range(20)]
    assert seen[0] is inside and {p.dtype for p in model.parameters()} == {weights} and losses[-1] < 0.9 * losses[0]
    assert all(not torch.equal(before[name], p) for name, p in model.named_parameters() if name != "0.layer_scale")


# ---- loss curves


def test_the_distance_of_curves():
    assert models.distance([1.0, 2.0], [1.0, 2.0]) == 0 and models.distance([1.0, 5.0], [1.0, 2.0]) == pytest.approx(math.sqrt(4.5))


def test_inputs_are_perturbed_by_a_unit_of_rounding():
    x = torch.randint(1, 9, (2, 3, 8, 8)).float().contiguous(memory_format=torch.channels_last)
    assert models.perturbed(torch, x, 0.5, 0) is x
    one, same, other = (models.perturbed(torch, x, 0.5, seed) for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other) and one.is_contiguous(memory_format=torch.channels_last)
    assert set((one / x).unique().tolist()) == {0.5, 1.0, 1.5}


@pytest.mark.parametrize("mode", ["fp32", "bf16-nhwc"])
def test_a_loss_curve_like_torch_s_is_right_and_another_is_wrong(cpu, monkeypatch, mode):
    case = Case("loss curve", "net", 4, mode)
    found = models.measure_curve(torch, case, "cpu", 3, runs=3, size=8)
    assert (len(found.exact), len(found.torch_exact), len(found.apart), len(found.torch_apart)) == (3, 3, 3, 2)
    assert max(found.exact) < (1e-5 if mode == "fp32" else 0.05) and found.first_loss > found.last_loss > 0
    right = models._in_training

    def wrong(torch, base, mode, ours):
        made = right(torch, base, mode, ours)
        if ours:
            with torch.no_grad():
                made[0][3].weight[0] *= 3
        return made

    monkeypatch.setattr(models, "_in_training", wrong)
    assert models.measure_curve(torch, case, "cpu", 3, runs=3, size=8).verdict == "WRONG"


# ---- all of it


def test_all_of_it_on_a_device_that_counts_as_a_gpu(cpu, capsys, tmp_path):
    file, page = tmp_path / "models.json", tmp_path / report.RESULTS_PAGE
    page.parent.mkdir()
    page.write_text("before\n<!-- models:begin -->\nold\n<!-- models:end -->\n")
    assert main(["bench", "--models", "--training", "--quick", "--mode", "fp32", "bf16-nhwc", "--seed", "5", "--json", str(file), "--pages", str(tmp_path)]) == FAILED
    rows = json.loads(file.read_text())["rows"]
    assert [(row["network"], row["what"], row["mode"]) for row in rows] == [
        *itertools.product(("broken", "net"), ("evaluated",), ("fp32", "bf16-nhwc")), ("net", "trained", "fp32"), ("net", "trained", "bf16-nhwc")
    ]  # fmt: skip
    assert [row["verdict"] for row in rows] == ["failed: ValueError: there is no network 'broken'"] * 2 + ["ok"] * 4
    for row in rows[2:4]:
        assert row["eager_ratio"] == pytest.approx(row["torch_eager_ms"] / row["eager_ms"]) and row["graph_ms"] > 0
        assert row["error"] < (1e-6 if row["mode"] == "fp32" else 0.05)
    for row in rows[4:]:
        assert (row["peak"], row["torch_peak"], row["compiled_step_ms"]) == (2e9, 2e9, None) and row["rate"] > 0 and row["loss_apart"] < 0.01
    out, err = capsys.readouterr()
    assert "Evaluation: ratio" in out and "Training, images per second" in out and "Loss curves" not in out
    assert out.count("\nbroken, 2 images, fp32, evaluated: failed: ValueError: there is no network 'broken'\n") == 1
    assert err.count("\n") == len(rows) and "net, 4 images, bf16-nhwc, trained: ours " in err
    text = page.read_text()
    assert text.startswith("before\n<!-- models:begin -->\nMeasured by `pycuda-conv bench --models --training --mode fp32 bf16-nhwc --quick`") and "| net | 4 | fp32 |" in text


@pytest.mark.parametrize("what", ["evaluated", "trained"])
def test_what_is_wrong_is_told(cpu, monkeypatch, what):
    case, effort = Case(what, "net", 4, "fp32"), Effort(rounds=1, seconds=0)

    def measure():
        if what == "evaluated":
            return models.measure_evaluation(torch, case, cpu, effort, 1)
        return models.measure_training(torch, case, cpu, effort, 1, compile_too=False)

    assert measure().verdict == "ok"
    models._evaluated.cache_clear()
    from pycuda_conv import nn

    right = nn.convert

    def wrong(model, **options):
        with torch.no_grad():
            model[4].weight.mul_(30)
        return right(model, **options)

    monkeypatch.setattr(nn, "convert", wrong)
    assert measure().verdict == "WRONG"


def test_what_is_not_captured_has_no_time_of_a_graph(cpu, monkeypatch):
    monkeypatch.setattr(models, "gpu_times", lambda *_, **__: ([[1.0], [1.0]], "events"))
    row = models.measure_evaluation(torch, Case("evaluated", "net", 1, "fp32"), cpu, Effort(rounds=1, seconds=0), 1)
    assert row.verdict == "ok, not captured" and math.isnan(row.graph_ms) and row.eager_ms > 0


def test_torch_compile_is_for_comparison_only(cpu, monkeypatch):
    case, effort = Case("trained", "net", 2, "fp32"), Effort(rounds=1, seconds=0)
    monkeypatch.setattr(torch, "compile", lambda model: model)
    assert models.measure_training(torch, case, cpu, effort, 1, compile_too=True).compiled_step_ms > 0
    monkeypatch.setattr(torch, "compile", lambda model: model.register_forward_pre_hook(lambda *_: 1 / 0) and model)
    row = models.measure_training(torch, case, cpu, effort, 1, compile_too=True)
    assert row.verdict == "ok" and math.isnan(row.compiled_step_ms) and row.step_ms > 0


@pytest.mark.gpu
def test_on_a_gpu(stand_in, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "EVALUATED", ("net",))
    file = tmp_path / "models.json"
    assert main(["bench", "--models", "--training", "--json", str(file), "--seed", "1"]) == OK, capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert [row["what"] for row in rows] == ["evaluated"] * 3 + ["trained"] * 2 + ["loss curve"] * 2
    for row in rows:
        assert {None} != {row.get(name, 1) for name in ("eager_ms", "graph_ms", "step_ms")} and row["verdict"] == "ok"
