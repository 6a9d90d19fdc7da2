"""Whole networks beside torch's: ``pycuda-conv bench --models``. Small networks stand in for torchvision's."""

import copy
import json
import math
import time
from types import SimpleNamespace

import pytest
import torch

from pycuda_conv.cli import main
from pycuda_conv.timing import Effort
from pycuda_conv.tools import ahead, bench, model_rows, models, networks, programs, report, rivals, training_steps
from pycuda_conv.tools.model_rows import Case, Curve, Evaluated, Trained
from pycuda_conv.tools.rivals import COMPILED, EAGER, INDUCTOR, LIGHT, OURS_REDUCED, REDUCED, Side
from pycuda_conv.tools.terminal import FAILED, OK, UNUSABLE

CASE = Case("evaluated", "resnet50", 32, "fp32")
TRAINED = Case("trained", "resnet50", 64, "fp32")


def small(name, **_):
    """What every network has that the benchmark looks at: convolutions, one of them fused, batch norm, dropout, a layer's scale."""
    if name == "broken":
        raise ValueError("there is no network 'broken'")
    n = torch.nn
    layers = n.Sequential(
        n.Conv2d(3, 8, 3, padding=1, bias=False), n.BatchNorm2d(8), n.ReLU(), n.Conv2d(8, 4, 3, stride=2, groups=2), n.BatchNorm2d(4)
    )
    layers.layer_scale = n.Parameter(torch.full((1,), 1e-6))
    return n.Sequential(layers, n.AdaptiveAvgPool2d(1), n.Flatten(), n.Dropout(0.5), n.Linear(4, 1000))


@pytest.fixture
def stand_in(monkeypatch):
    """Small networks of few, small images."""
    monkeypatch.setattr(networks, "torchvision", lambda: SimpleNamespace(get_model=small))
    monkeypatch.setattr(networks, "PHOTOGRAPH", (3, 8, 8))
    for name, value in {"EVALUATED": ("broken", "net"), "BATCHES": (2,), "TRAINED": {"net": (4,)}}.items():
        monkeypatch.setattr(models, name, value)
    for name, value in {"CURVE_SIZE": 8, "CURVE_STEPS": 4, "CURVE_RUNS": 3}.items():
        monkeypatch.setattr(training_steps, name, value)
    models._evaluated.cache_clear()
    yield
    models._evaluated.cache_clear()


@pytest.fixture
def cpu(monkeypatch, stand_in, opencl):
    """A device that counts as a GPU, and is PoCL."""
    device = SimpleNamespace(name="cpu", backend="cuda", all_compiled=lambda: True)
    monkeypatch.setattr(bench, "gpu_for", lambda settings, flag: device)
    monkeypatch.setattr(bench, "describe", lambda *_: {"date": "2026-01-01T", "GPU": "none, such", "torch": "2"})
    monkeypatch.setattr(
        models, "gpu_times",
        lambda torch, ways, sets, effort, captured: (models.wall_times(ways, sets, effort), "graph" if captured == math.inf else "")
    )
    monkeypatch.setattr(ahead, "first_calls", lambda *_: set())
    monkeypatch.setattr(models, "plans", lambda problems, device, with_moments=False: [])
    for name in ("synchronize", "set_device", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 10**9)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 10**9)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**10, 10**11))
    return device


# ---- cases, rows, tables


def test_cases_are_listed(capsys):
    assert main(["bench", "--models", "--training", "--list", "--only", "dense.* 32 .*(fp32|fp16)|256"]) == OK
    assert capsys.readouterr().out.splitlines() == [
        "densenet121, 32 images, fp16-nhwc, evaluated", "densenet121, 32 images, fp32, evaluated", "resnet50, 256 images, bf16-nhwc, trained",
        "densenet121, 32 images, fp32, trained",
    ]
    assert main(["bench", "--models", "--list", "--mode", "tf32", "bf16"]) == OK
    assert capsys.readouterr().out.count("\n") == 10 * 2 * 2
    assert main(["bench", "--models", "vgg11", "resnet50", "--training", "--quick", "--list", "--mode", "bf16"]) == OK
    trained = [line for line in capsys.readouterr().out.splitlines() if line.endswith("trained")]
    assert trained == ["vgg11, 32 images, bf16, trained", "resnet50, 64 images, bf16, trained", "resnet50, 256 images, bf16, trained"]
    texts = [str(case) for case in models.cases((), True, True)]  # what tells most comes first
    assert texts.index(
        "small_unet, 4 images, fp16-nhwc, evaluated"
    ) < texts.index("resnet50, 32 images, fp32, evaluated") < texts.index("resnet50, 1 image, fp16-nhwc, evaluated")


@pytest.mark.parametrize("arguments, words", [
    (["--only", "("], "regular expression"), (["--only", "vgg"], "matches no problem"), (["--csv", "x.csv"], "--csv is not for --models"),
    (["--host-calls"], "--host-calls and --models are two benchmarks"), (["--device", "opencl"], "--models needs a GPU"),
])  # fmt: skip
def test_what_cannot_be_measured_is_told_in_one_line(capsys, arguments, words):
    assert main(["bench", "--models", *arguments]) == UNUSABLE
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err


def test_the_arithmetic_of_rows():
    times = {LIGHT: 2.0, EAGER: 3.0, REDUCED: 1.5, OURS_REDUCED: 1.2}
    evaluated = Evaluated(
        CASE, "ok", times, {LIGHT: 1.0, INDUCTOR: 0.8, EAGER: 4.0, COMPILED: 1.2}, {LIGHT: 1e-7, INDUCTOR: 3e-7, EAGER: 2e-7}, {}, 53
    )
    assert evaluated.cells()[:14] == (
        "resnet50", "32", "fp32", "53", "-", "1.00", "0.80", "4.00", "1.20", "1.20", "1.50", "2.00", "3.00", "1.50"
    )
    assert evaluated.cells()[14:] == ("-", "1.20", "1.50", "1.25", "-", "-", "-", "-", "3.0e-07", "2.0e-07", "-", "ok")
    early = Evaluated(CASE, "ok", times, {INDUCTOR: 2.0, rivals.COMPILED_TF32: 2.2}, early_ms={LIGHT: 2.0, EAGER: 5.0}, share=0.416)
    assert early.cells()[4] == "42%" and early.cells()[14] == "2.50" and early.tf32_ratio == pytest.approx(1.1)
    record = evaluated.record()
    assert record["network"] == "resnet50" and record["graph_ms"][COMPILED] == 1.2 and record["errors"][EAGER] == 2e-7
    assert [record[name] for name in Evaluated.COMPUTED[:4]] == pytest.approx([1.2, 1.5, 1.25, 1.5])
    assert Evaluated(CASE, "ok", times, {LIGHT: 1.0, EAGER: 4.0}).light_ratio == 4.0  # nothing was compiled
    trained = Trained(
        TRAINED, "ok", {LIGHT: 20.0, EAGER: 40.0, COMPILED: 25.0, INDUCTOR: 16.0}, {LIGHT: 1e-3, INDUCTOR: 2e-3}, {}, 3e9, 4e9
    )
    assert trained.cells()[3:] == (
        "3200", "4000", "1600", "2560", "-", "-", "2.00", "1.25", "1.56", "-", "-", "3.00", "4.00", "0.75", "2.0e-03", "-", "-", "ok"
    )
    graphs = Trained(
        TRAINED, "ok", {}, graph_ms={LIGHT: 2.0, EAGER: 3.0, COMPILED: 5.0, INDUCTOR: 4.0},
        errors={LIGHT: 2e-3, INDUCTOR: 3e-3, EAGER: 1e-3}
    )
    assert (graphs.light_graph_ratio, graphs.inductor_graph_ratio) == (1.5, 1.25) and graphs.figures()[-2:] == ("3.0e-03", "1.0e-03")
    curve = Curve(CASE, "WRONG", (1.0, 2.0, 6.0), (3.0,), (), (), 7.0, 0.25)
    assert curve.figures() == ("7.00 to 0.25", "2.0e+00 / 6.0e+00", "3.0e+00 / 3.0e+00", "-", "-")
    for row in (evaluated, trained, curve):
        failed = type(row)(CASE, "failed: why")
        assert len(row.figures()) == len(row.COLUMNS) and failed.figures() == ("-",) * len(row.COLUMNS) and failed.cells()[-1] == "failed"


def test_means_are_of_what_is_right():
    rows = [
        Evaluated(CASE, "ok", {}, {LIGHT: 1.0, COMPILED: 2.0}), Evaluated(CASE, "ok", {LIGHT: 1.0, EAGER: 4.0}, {LIGHT: 1.0, COMPILED: 8.0}), Evaluated(CASE, "failed: why"),
        Trained(TRAINED, "ok", {LIGHT: 1.0, EAGER: 3.0}), Trained(TRAINED, "WRONG", {LIGHT: 1.0, EAGER: 9.0}),
    ]  # fmt: skip
    assert model_rows.mean_lines(rows) == [
        "evaluated, fp32, 32 images: geometric means light 4.00, calls in light mode 4.00", "trained, fp32: geometric means light 3.00"
    ]  # fmt: skip
    text = model_rows.markdown({"command": "c", "date": "2026-01-01T", "GPU": "g, x", "torch": "2", "method": "m"}, rows)
    assert "| resnet50 | 32 | fp32 | - | - | 1.00 | - | - | 2.00 | 2.00 |" in text and "nan" not in text
    front = model_rows.excerpt({"command": "c", "date": "2026-01-01T", "GPU": "g, x", "torch": "2", "method": "m"}, rows)
    assert "resnet50 (32 images, fp32) 8.00 / -. Measured by `c`" in front and front.count("resnet50") == 2 and "nan" not in front


# ---- networks


def test_nothing_of_a_network_is_left_to_chance(stand_in):
    one, same, other = (networks.network(torch, "net", "cpu", seed).train() for seed in (1, 1, 2))
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(one(x), same(x)) and torch.equal(one(x), one(x)) and not torch.equal(one(x), other(x))
    assert one[0].layer_scale.item() == 1 and one[0][1].momentum == 0.1
    given = one[0][0](torch.randn(64, 3, 8, 8))
    assert torch.allclose(one[0][1].eval()(given).var((0, 2, 3)), torch.ones(8), rtol=0.5)  # statistics are those of such images


def test_branches_are_open():
    """Scales of branches become 1, whatever they are called and however they are shaped; other parameters stay as they are."""
    n = torch.nn
    model = n.Module()
    model.scale, model.gamma = n.Parameter(torch.full((4, 1, 1), 1e-6)), n.Parameter(torch.full((4,), 1e-5))
    model.last, model.layer_scale = n.BatchNorm2d(4), n.Identity()  # a module may have such a name too
    n.init.zeros_(model.last.weight)
    model.table = n.Parameter(torch.zeros(3, 4))
    model.kept = n.Parameter(torch.tensor([1e-3, 2e-3]))
    networks.open_branches(torch, model)
    found = {name: parameter.flatten().tolist() for name, parameter in model.named_parameters()}
    assert found["scale"] == found["gamma"] == found["last.weight"] == [1] * 4
    assert found["last.bias"] == [0] * 4 and found["table"] == [0] * 12 and found["kept"] == pytest.approx([1e-3, 2e-3])


def test_what_a_network_computes_in_training():
    n = torch.nn
    model = n.Sequential(
        n.Conv2d(3, 8, 3, stride=2), n.Conv2d(8, 8, 3, padding=1, groups=2, bias=False), n.Conv2d(8, 8, 3, padding=1, groups=2, bias=False)
    ).to("meta")
    images = torch.randn(2, 3, 9, 9, device="meta")
    found = training_steps.convolutions(torch, model, images, "fp32")
    # images have no gradient; the last two are one
    assert [problem.direction for problem in found] == ["fprop", "wgrad", "fprop", "dgrad", "wgrad"]
    assert found[0].has_bias and found[0].stride == (1, 2, 2) and found[3].groups == 2
    assert {(p.dtype, p.layout) for p in training_steps.convolutions(torch, model, images, "bf16-nhwc")} == {("bfloat16", "NHWC")}


def test_arithmetic_is_set_and_put_back():
    before = torch.get_float32_matmul_precision()
    for mode, matmul, conv in (("tf32-nhwc", "high", "tf32"), ("fp32", "highest", "ieee"), ("fp16", "highest", "ieee")):
        with rivals.arithmetic(torch, mode):
            assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.conv.fp32_precision) == (matmul, conv)
        assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize(
    "mode, weights, inside",
    [("bf16-nhwc", torch.float32, torch.bfloat16), ("fp32", torch.float32, torch.float32), ("fp64", torch.float64, torch.float64)]
)
def test_a_step_is_of_its_mode(stand_in, mode, weights, inside):
    case = Case("trained", "net", 2, mode)
    images, labels = training_steps.data(torch, case, "cpu", (3, 8, 8))
    model = training_steps.in_training(torch, networks.network(torch, "net", "cpu", 0), mode, Side(EAGER))
    assert images.is_contiguous(memory_format=torch.channels_last) == (mode == "bf16-nhwc") and model.training
    seen, before = [], copy.deepcopy(model.state_dict())
    model[0][3].register_forward_hook(lambda module, given, result: seen.append(result.dtype))
    step = training_steps.stepper(torch, model, images, labels, mode, 0.1)
    losses = [float(step()) for _ in range(20)]
    assert seen[0] is inside and {p.dtype for p in model.parameters()} == {weights} and losses[-1] < 0.9 * losses[0]
    assert all(not torch.equal(before[name], p) for name, p in model.named_parameters() if name != "0.layer_scale")


# ---- loss curves


@pytest.mark.parametrize("mode", ["fp32", "bf16-nhwc"])
def test_a_loss_curve_like_torch_s_is_right_and_another_is_wrong(cpu, monkeypatch, mode):
    case = Case("loss curve", "net", 4, mode)
    found = training_steps.measure_curve(torch, case, "cpu", 3, runs=3, size=8)
    assert (len(found.exact), len(found.torch_exact), len(found.apart), len(found.torch_apart)) == (3, 3, 3, 2)
    assert max(found.exact) < (1e-5 if mode == "fp32" else 0.05) and found.first_loss > found.last_loss > 0
    right = training_steps.in_training

    def wrong(torch, base, mode, side):
        base = copy.deepcopy(base)
        if side.ours:
            with torch.no_grad():
                base[0][3].weight[0] *= 3
        return right(torch, base, mode, side)

    monkeypatch.setattr(training_steps, "in_training", wrong)
    assert training_steps.measure_curve(torch, case, "cpu", 3, runs=3, size=8).verdict == "WRONG"


# ---- all of it


def test_all_of_it_on_a_device_that_counts_as_a_gpu(cpu, capsys, tmp_path):
    file, page = tmp_path / "models.json", tmp_path / report.RESULTS_PAGE
    page.parent.mkdir()
    front = tmp_path / report.FRONT_PAGE
    for each in (page, front):
        each.write_text("before\n<!-- models:begin -->\nold\n<!-- models:end -->\n")
    assert main([
        "bench", "--models", "--training", "--quick", "--mode", "fp32", "bf16-nhwc", "--seed", "5", "--json", str(file), "--pages",
        str(tmp_path)
    ]) == FAILED
    rows = json.loads(file.read_text())["rows"]
    assert [(row["network"], row["what"], row["mode"]) for row in rows] == [
        *((name, "evaluated", mode) for mode in ("fp32", "bf16-nhwc") for name in ("broken", "net")), ("net", "trained", "fp32"), ("net", "trained", "bf16-nhwc")
    ]  # fmt: skip
    assert [row["verdict"] for row in rows] == ["failed: ValueError: there is no network 'broken'", "ok"] * 2 + ["ok"] * 2
    for row in rows[1:4:2]:
        assert row["call_ratio"] == pytest.approx(row["wall_ms"][EAGER] / row["wall_ms"][LIGHT])
        assert row["graph_ms"][LIGHT] > 0 and row["fused"] == 2
        assert row["errors"][LIGHT] < (1e-6 if row["mode"] == "fp32" else 0.05)
    for row in rows[4:]:
        assert (row["peak"], row["torch_peak"]) == (2e9, 2e9) and row["light_ratio"] > 0 and row["apart"][LIGHT] < 0.01
        assert row["errors"].keys() == {LIGHT, EAGER}
        assert row["errors"][LIGHT] < (1e-5 if row["mode"] == "fp32" else 0.1) and row["graph_ms"][LIGHT] > 0
    out, err = capsys.readouterr()
    assert "Evaluation, ms" in out and "Training, images per second" in out and "Loss curves" not in out
    assert out.count("\nbroken, 2 images, fp32, evaluated: failed: ValueError: there is no network 'broken'\n") == 1
    assert err.count("\n") == len(rows) and "net, 4 images, bf16-nhwc, trained: light " in err
    text = page.read_text()
    assert text.startswith(
        "before\n<!-- models:begin -->\nMeasured by `pycuda-conv bench --models --training --mode fp32 bf16-nhwc --quick`"
    ) and "| net | 4 | fp32 |" in text
    assert front.read_text().startswith("before\n<!-- models:begin -->\nOf networks `torch.compile` was not measured.")


def measured(what, cpu, n: int, mode: str, *options):
    case, measure = Case(what, "net", n, mode), models.measure_evaluation if what == "evaluated" else models.measure_training
    return measure(torch, case, cpu, Effort(rounds=1, seconds=0), 1, models.sides_of(case, *options))


@pytest.mark.parametrize("what", ["evaluated", "trained"])
def test_what_is_wrong_is_told(cpu, monkeypatch, what):
    assert measured(what, cpu, 4, "fp32", True, False).verdict == "ok"
    right = models.made

    def wrong(torch, model, side, mode):
        model = copy.deepcopy(model)
        if side.ours:
            with torch.no_grad():
                model[4].weight.mul_(30)
        return right(torch, model, side, mode)

    for module in (models, training_steps):
        monkeypatch.setattr(module, "made", wrong)
    assert measured(what, cpu, 4, "fp32", True, False).verdict == "WRONG"


@pytest.mark.parametrize("what", ["evaluated", "trained"])
def test_a_rival_that_fails_is_left_out(cpu, monkeypatch, what):
    right = models.made

    def half(torch, model, side, mode):
        if side.compiled not in (None, "light"):
            if side.name == COMPILED:
                raise ValueError("compiler fails")
            return copy.deepcopy(model)
        return right(torch, model, side, mode)

    for module in (models, training_steps):
        monkeypatch.setattr(module, "made", half)
    row = measured(what, cpu, 2, "bf16", False, False)
    assert row.verdict == "ok" and row.failed == {COMPILED: "ValueError: compiler fails"}
    times = row.wall_ms if what == "evaluated" else row.step_ms
    assert COMPILED not in times and set(times) >= {LIGHT, EAGER, INDUCTOR, REDUCED} and math.isnan(row.inductor_ratio)


@pytest.mark.parametrize("name, count, result", [
    ("vae_decoder", 35, (2, 3, 512, 512)), ("small_unet", 20, (4, 4, 64, 64)), ("time_unet", 51, (4, 4, 64, 64)),
    ("causal_decoder", 25, (1, 3, 68, 256, 256)), ("chunked_decoder", 25, (1, 3, 68, 256, 256)), ("vocoder", 78, (4, 1, 65536)),
    ("decoder:5", None, None), ("decoder:6", None, None), ("unet:5", None, None), ("unet:6", None, None),
])
def test_networks_that_are_written_here(name, count, result):
    made, again = programs.program(name), programs.program(name)
    with torch.device("meta"):
        model = made.make(torch)
        y = model(torch.empty(made.images, *made.shape))
        same = again.make(torch)
    assert [p.shape for p in model.parameters()] == [p.shape for p in same.parameters()]
    assert y.shape == result if result else y.shape[0] == made.images and (y.shape[2:] == made.shape[1:]) == name.startswith("unet")
    found = sum(isinstance(module, torch.nn.modules.conv._ConvNd) for module in model.modules())
    assert found == count if count else found > 8
    assert networks.input_shape(name) == made.shape and networks.most_images(name, 32) == made.images


def test_a_decoder_of_videos_gives_the_same_in_chunks():
    """And by this package's backend, whose convolutions take the zeros before the first frame as padding."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        whole = programs.sequences.causal_decoder(torch, widths=(8, 8, 6, 4), latents=4).eval().double()
        x = torch.randn(1, 4, 6, 3, 4, dtype=torch.float64)
    chunks = programs.sequences.causal_decoder(torch, widths=(8, 8, 6, 4), latents=4, chunk=2).eval().double()
    backend = pytest.importorskip("pycuda_conv.nn").backend
    chunks.load_state_dict(whole.state_dict())
    with torch.no_grad():
        right = whole(x)
        assert right.shape == (1, 3, 24, 24, 32) and torch.allclose(chunks(x), right, rtol=1e-10, atol=1e-12)
        light = torch.compile(whole, backend=backend, options={"mode": "light"})
        assert torch.allclose(light(x), right, rtol=1e-10, atol=1e-12)


class Drawn:
    """A stand-in for timm: networks by name, some of which no benchmark takes."""

    made = {"large": (30, 3000), "linear": (1, 4), "sized": (4, 8), "a": (4, 8), "b": (4, 8), "c": (4, 8), "d": (4, 8)}  # noqa: RUF012

    def list_models(self):
        return [*self.made, "broken"]

    def create_model(self, name, pretrained):
        assert not pretrained
        count, width = self.made[name]
        assert [rate.item() for rate in torch.linspace(0, 1, 3)] == [0, 0.5, 1]  # as drop rates are made
        n = torch.nn
        model = n.Sequential(n.Conv2d(3, width, 3, 4), *[n.Conv2d(width, width, 3, padding=1) for _ in range(count - 1)])
        if name == "linear":  # its convolution is the lesser part
            model.extend([n.Flatten(2), n.Linear(56 * 56, 64)])
        if name == "sized":
            model.append(n.Unflatten(2, (100, -1)))
        return model


def test_networks_are_drawn(cpu, monkeypatch, capsys):
    monkeypatch.setattr(networks, "require", lambda name: Drawn())
    orders = [list(networks.candidates(torch, seed)) for seed in range(4)]
    assert all(sorted(order) == ["timm:a", "timm:b", "timm:c", "timm:d"] for order in orders) and len(set(map(tuple, orders))) > 1
    shares = {"timm:a": 0.5, "timm:b": 0.2, "timm:c": math.nan, "timm:d": 0.9}
    asked, results = [], {"timm:d": math.inf}

    def evaluation_of(torch, case, place, seed):
        asked.append(case.network)
        return lambda side: lambda: torch.full((2,), results.get(case.network, 1.0)), {}

    monkeypatch.setattr(models, "evaluation_of", evaluation_of)
    monkeypatch.setattr(models, "convolutions_share", lambda torch, call: shares[asked[-1]])
    assert sorted(models.drawn(torch, "cpu", 1, 3)) == ["timm:a", "timm:c"] and len(models.drawn(torch, "cpu", 1, 1)) == 1
    err = capsys.readouterr().err
    assert "timm:b: convolutions are 20% of torch eager's time" in err and "timm:d: ToolError: its results are not finite in float16" in err


def test_processes_end_with_the_time(monkeypatch):
    """A process that takes too long is killed; what failed is not ready."""
    begun = []

    class Child(ahead.subprocess.Popen):
        def __init__(self, command, **options):
            begun.append(command)
            how = ["/bin/sleep", "1000"] if COMPILED in command else ["/bin/false"] if INDUCTOR in command else ["/bin/true"]
            super().__init__(how, **options)

    monkeypatch.setattr(ahead.subprocess, "Popen", Child)
    started = time.perf_counter()
    sides = [Side(LIGHT, True, "light"), Side(EAGER), Side(INDUCTOR, True, "default"), Side(COMPILED, compiled="default")]
    ready = ahead.first_calls([(CASE, sides)], "cuda:0", 7, started + 2)
    assert time.perf_counter() - started < 500 and ready == {(CASE, LIGHT), (CASE, EAGER)}
    assert begun[0][1:] == ["-m", "pycuda_conv.tools.models", "evaluated", "resnet50", "32", "fp32", "cuda:0", "7", LIGHT, EAGER]


def test_no_case_is_begun_after_the_time(cpu, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(ahead, "first_calls", lambda *_: time.sleep(0.002) or set())  # the time is over then, however fast the rest is
    file = tmp_path / "models.json"
    assert main(["bench", "--models", "net", "--quick", "--mode", "fp32", "bf16", "--seconds", "0.001", "--json", str(file)]) == OK
    assert "2 of 2 cases were not begun within 0.001 s" in capsys.readouterr().out and not file.exists()
    assert main(["bench", "--cold", "--seconds", "3"]) == UNUSABLE
    assert "--seconds is not for --cold" in capsys.readouterr().err
