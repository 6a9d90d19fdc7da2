"""Same bits in every batch: an image's result and its gradient by the input, whatever stands beside it."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import simt
import torch
from modes import H200

import pycuda_conv as pc
import pycuda_conv.nn as pn
from pycuda_conv import ConvArgumentError, ConvProblem, Plan, background, engines
from pycuda_conv.engines import registry
from pycuda_conv.engines.compose.delegate import parsed
from pycuda_conv.engines.fft import blocks
from pycuda_conv.memo import forget_plans
from pycuda_conv.plan import as_called
from pycuda_conv.runtime.target import Target
from pycuda_conv.tools.families import draw
from pycuda_conv.tools.suite import MODES as MODE_FIELDS
from pycuda_conv.tools.suite import in_mode

MODES = ("fp32", "tf32", "fp16", "bf16", "fp64", "tf32-nhwc", "fp16-nhwc")


def drawn(seed, each, most=2e7):
    """Problems of all families, forward and by the input, without large ones."""
    found = {replace(problem, N=1) for problem in draw(seed, each) if problem.direction != "wgrad"}
    return [problem for problem in sorted(found, key=str) if problem.macs < most]


@pytest.mark.parametrize("name", ["sm_90a", "sm_80", "sm_75", "sm_120"])
def test_the_order_of_sums_follows_from_the_layer(name):
    """Without the option it does not: then the test would tell nothing."""
    device, differ = Target(name), 0
    problems = drawn(1, 4)
    for number, plain in enumerate(problems):
        orders = {}
        for asked in (None, "batch_invariant"):
            layer = replace(in_mode(plain, MODES[number % len(MODES)]), algorithm=asked)
            some = [replace(layer, N=n, batched=True) for n in (1, 3, 8, 40, 300)]
            some = [replace(as_called(one, device), algorithm=asked) for one in some]
            assert asked is None or len({one.layout for one in some}) == 1
            orders[asked] = {engines.order(one, engines.choose(one, device)) for one in some}
        assert len(orders["batch_invariant"]) == 1, layer
        differ += len(orders[None]) > 1
    assert differ > len(problems) / 20


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("taps", [7, 8])
def test_rows_of_a_window_follow_from_the_layer(taps, layout):
    """Windows of few channels have as many rows as the batch is worth, which is another order of sums."""
    device, orders = Target("sm_90a"), {}
    for asked in (None, "batch_invariant"):
        layer = ConvProblem.forward(
            2, (1, 3, 96, 96), (256, 3, taps, taps), stride=2, padding=3, dtype="bfloat16", layout=layout, algorithm=asked
        )
        some = [replace(layer, N=n, batched=True) for n in (1, 2, 43)]
        orders[asked] = {engines.order(one, engines.ImplicitGemm(64, 128, 4)) for one in some}
        packs = [
            step for one in some
            for step in background.launches(engines.schedule(one, engines.ImplicitGemm(64, 128, 4), device)) if step.kernel == "pack"
        ]
        assert len({step.arguments.fold_r for step in packs}) == len(orders[asked])
    assert len(orders["batch_invariant"]) == 1 < len(orders[None])


def test_nothing_else_chooses_by_the_batch():
    """Stand-ins while a kernel is compiled, candidates to measure, kernels that note moments, transforms."""
    device = Target("sm_90a")
    for plain in drawn(2, 2):
        problem = replace(plain, N=5, batched=True, algorithm="batch_invariant")
        config = engines.choose(problem, device)
        order = engines.order(problem, config)
        others = [
            *engines.candidates(problem, device), *engines.alternatives(problem, config, device),
            engines.with_moments(problem, config, device)
        ]
        assert {engines.order(problem, one) for one in others} == {order}
    large = ConvProblem.forward(2, (1, 1, 900, 900), (1, 1, 300, 300), algorithm="batch_invariant")
    assert registry.engine_of(engines.choose(large, device)) is blocks
    several = ConvProblem.forward(2, (1, 8, 200, 200), (8, 8, 60, 60), algorithm="batch_invariant")
    assert registry.engine_of(engines.choose(several, device)) not in registry.TRANSFORMS


def test_a_transform_is_of_blocks_of_one_image(device):
    """A pair of blocks of two images would round each image by the other's size: here three blocks of an image are of ordinary size, and others are huge."""
    config, rng = engines.BlockFft(64, 64), np.random.default_rng(5)
    x, w = rng.standard_normal((4, 1, 100, 50)), rng.standard_normal((1, 1, 21, 15))
    x[1:] *= 1e7
    for algorithm, same in (("batch_invariant", True), ("fft", False)):
        layer = ConvProblem.forward(2, x.shape, w.shape, padding=(10, 7), dtype="float64", algorithm=algorithm)
        together = Plan(layer, device, config=config)(x, w)
        alone = [Plan(replace(layer, N=1), device, config=config)(x[i : i + 1], w) for i in range(4)]
        assert np.array_equal(together, np.concatenate(alone)) == same
        wanted = torch.nn.functional.conv2d(torch.tensor(x), torch.tensor(w), padding=(10, 7)).numpy()
        assert np.abs(together - wanted).max() < 1e-12 * np.abs(wanted).max()


@pytest.mark.parametrize("images", [16, 33])
def test_a_batch_too_large_for_the_layer_s_kernels_is_computed_in_parts(images):
    """It was refused, as if no launch could have so many blocks."""
    device, layer = Target("sm_90a"), ConvProblem.forward(2, (15, 64, 1024, 1024), (128, 64, 1, 1), algorithm="batch_invariant")
    some, many = (engines.choose(one, device) for one in (layer, replace(layer, N=images)))
    assert engines.order(replace(layer, N=many.IMAGES), parsed(many.DELEGATE)) == engines.order(layer, some)


def test_numbers_too_small_for_limbs_are_mended_image_by_image():
    """A tile with pixels of several images is computed again, or not, by what all of them hold. So flags of 2 stand for flags of 1."""
    plain, device = ConvProblem.forward(2, (3, 64, 14, 14), (64, 64, 3, 3), padding=1), Target("sm_80")
    config = next(one for one in engines.candidates(plain, device) if engines.filter_key(plain, one) is not None)
    for algorithm, flag in ((None, 1), ("batch_invariant", 2)):
        schedule = engines.schedule(replace(plain, algorithm=algorithm), config, device)
        flags = {step.arguments.too_small for step in background.launches(schedule) if hasattr(step.arguments, "too_small")}
        assert flags == {flag}
    assert engines.filter_key(plain, config) != engines.filter_key(replace(plain, algorithm="batch_invariant"), config)


def images_of(rng, shape, dtype):
    return rng.standard_normal(shape).astype(dtype)


CALLS = [
    ("conv2d", (8, 12, 12), (16, 8, 3, 3), {"padding": 1}), ("conv2d", (16, 9, 11), (16, 1, 3, 3), {"groups": 16}),
    ("conv2d", (64, 7, 7), (32, 64, 1, 1), {}), ("conv2d", (1, 40, 50), (1, 1, 7, 7), {"stride": 2}), ("conv1d", (6, 300), (8, 6, 9), {"padding": 4}),
    ("conv3d", (4, 6, 7, 8), (8, 4, 3, 3, 3), {}), ("conv_transpose2d", (16, 7, 9), (16, 8, 3, 3), {"stride": 2}),
    ("conv2d", (24, 10, 10), (24, 6, 3, 3), {"groups": 4, "activation": "relu"}), ("conv2d", (300, 5, 5), (4, 300, 3, 3), {}),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("function, image, weight, options", CALLS)
def test_an_image_has_the_same_bits_in_every_batch(device, function, image, weight, options, dtype):
    rng = np.random.default_rng(len(image) + weight[0])
    w, call = images_of(rng, weight, dtype), getattr(pc, function)
    one, others = images_of(rng, (1, *image), dtype), images_of(rng, (9, *image), dtype)
    others[0] *= 1e3  # on another scale
    alone = call(one, w, device=device, batch_invariant=True, **options)
    for count, place in ((2, 0), (3, 2), (10, 4)):
        batch = np.concatenate([others[:place], one, others[place : count - 1]])
        assert np.array_equal(call(batch, w, device=device, batch_invariant=True, **options)[place], alone[0]), (count, place)
    with pc.batch_invariant():
        assert np.array_equal(call(batch, w, device=device, **options)[place], alone[0])
        with pc.batch_invariant(False):
            call(batch, w, device=device, **options)
    if function == "conv2d" and "activation" not in options:
        shape = pc.ConvProblem.forward(2, batch.shape, weight, **options).result_shape
        dy = images_of(rng, shape, dtype)
        whole = pc.conv2d_input(batch.shape, w, dy, device=device, batch_invariant=True, **options)
        part = pc.conv2d_input((1, *image), w, dy[place : place + 1], device=device, batch_invariant=True, **options)
        assert np.array_equal(whole[place], part[0])


def test_plans_keep_it(device):
    problem = ConvProblem.forward(2, (4, 8, 12, 12), (16, 8, 3, 3), algorithm="batch_invariant")
    plan = pickle.loads(pickle.dumps(Plan(problem, device)))
    assert plan.problem == problem and plan.problem.batch_invariant
    assert "batch_invariant" in plan.explain() and "batch_invariant" in str(problem)
    rng = np.random.default_rng(0)
    x, w = images_of(rng, problem.input_shape, "f"), images_of(rng, problem.weight_shape, "f")
    alone = Plan(replace(problem, N=1), device).bind(w)
    assert np.array_equal(plan(x, w)[2:3], alone(x[2:3]))
    # a gradient by the filter sums over the images
    shapes = (4, 8, 12, 12), (16, 8, 3, 3), (4, 16, 10, 10)
    assert not ConvProblem.gradient("weight", 2, *shapes, algorithm="batch_invariant").batch_invariant
    assert ConvProblem.gradient("input", 2, *shapes, algorithm="batch_invariant").batch_invariant


def test_calls_inside_and_outside_of_a_block_are_not_mixed_up(asked, device):
    """Repeated calls too: a call's key has the option."""
    x, w = np.ones((2, 3, 8, 8), "f"), np.ones((4, 3, 3, 3), "f")
    for _ in range(2):
        pc.conv2d(x, w, device=device)
        with pc.batch_invariant():
            pc.conv2d(x, w, device=device)
    assert set(asked) == {None, "batch_invariant"}


def test_tensors_of_torch_and_their_gradients():
    x, w = torch.randn(5, 6, 9, 9), torch.randn(8, 6, 3, 3, requires_grad=True)
    both = []
    for images in (x, x[2:3]):
        images = images.clone().requires_grad_()
        with pc.batch_invariant():
            y = pc.conv2d(images, w, padding=1)
        (dx,) = torch.autograd.grad(y.square().sum(), images)
        both.append((y.detach(), dx))
    assert all(torch.equal(whole[2:3], part) for whole, part in zip(*both, strict=True))


def model_of(torch):
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 6, 3, stride=2),
        nn.Conv2d(6, 8, 3, padding=1, padding_mode="circular")
    )


@pytest.fixture
def asked(monkeypatch):
    """The algorithms of all problems that are made."""
    found = []
    for name in ("forward", "transposed"):
        made = getattr(ConvProblem, name).__func__
        monkeypatch.setattr(
            ConvProblem, name, classmethod(lambda cls, *a, made=made, **k: (found.append(k["algorithm"]), made(cls, *a, **k))[1])
        )
    forget_plans()
    return found


@pytest.mark.parametrize("way", ["called", "compiled", "by our backend"])
def test_converted_models(way, asked):
    """An image of a batch as alone; each convolution is planned so, in torch.compile too."""
    model = pn.convert(model_of(torch), batch_invariant=True).eval()
    assert "batch_invariant" in repr(model[0]) and model[0].algorithm == "batch_invariant"
    run = {
        "called": model, "compiled": torch.compile(model, backend="eager"),
        "by our backend": torch.compile(model, backend=pn.backend, mode="light")
    }[way]
    x = torch.randn(5, 3, 14, 13)
    with torch.no_grad():
        whole = run(x)
        assert torch.equal(run(x[3:4]), whole[3:4]) and torch.equal(run(x.flip(0)).flip(0), whole)
    assert set(asked) == {"batch_invariant"}
    pn.convert(model)
    assert model[0].algorithm is None and "batch_invariant" not in repr(model)
    pn.revert(pn.convert(model, batch_invariant=True))
    assert type(model[0]) is torch.nn.Conv2d and "algorithm" not in vars(model[0])


@pytest.mark.parametrize("how", ["an option", "inductor's operators", "a block", "a parameter"])
def test_compiled_models(how, asked, monkeypatch):
    """What is fused too. Without it, the same graph's problems ask for nothing."""
    model, x = model_of(torch).eval(), torch.randn(5, 3, 14, 13)
    if how == "inductor's operators":
        monkeypatch.setattr(pn.compiler, "_compiled_by_inductor", lambda gm, *_: gm.forward)
    options = {"mode": "default" if how == "inductor's operators" else "light"} | ({"batch_invariant": True} if how != "a block" else {})
    run = pn.compile(model, mode="light", batch_invariant=True) if how == "a parameter" else torch.compile(
        model, backend=pn.backend, options=options
    )
    with torch.no_grad(), pc.batch_invariant(how == "a block"):
        whole = run(x)
        assert torch.equal(run(x[3:4]), whole[3:4]) and torch.equal(run(x.flip(0)).flip(0), whole)
    assert set(asked) == {"batch_invariant"}
    (graph,) = {str(one) for one in pn.compiler.graphs_of(run)[-1:]}
    assert "2 of them fused" in graph
    asked.clear()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=pn.backend, options={"mode": "light"})(x), whole, rtol=1e-4, atol=1e-4)
    assert set(asked) == {None}


def test_batch_norms_in_training_are_not_fused(asked):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
    run = pn.compile(model, mode="light", batch_invariant=True)
    x = torch.randn(4, 3, 9, 9)
    run(x).sum().backward()
    assert set(asked) == {"batch_invariant"} and "which a batch norm in training has not" in str(pn.compiler.graphs_of(run)[-1])


@pytest.mark.parametrize("how", ["converted", "from modules", "a block", "compiled"])
def test_fused_layers_in_evaluation(how, asked):
    x = torch.randn(6, 4, 12, 11)
    if how == "from modules":
        layer = pn.FusedConvBnReLU2d.from_modules(pn.Conv2d(4, 8, 3, batch_invariant=True), torch.nn.BatchNorm2d(8)).eval()
    else:
        layer = pn.FusedConvBnReLU2d(4, 8, 3).eval()
    if how in ("converted", "compiled"):
        pn.convert(layer, batch_invariant=True)
    run = torch.compile(layer, backend="eager") if how == "compiled" else layer
    with torch.no_grad(), pc.batch_invariant(how == "a block"):
        whole = run(x)
        assert torch.equal(run(x[2:3]), whole[2:3])
    assert set(asked) == {"batch_invariant"}
    pn.convert(layer)
    asked.clear()
    with torch.no_grad():
        layer(x)
    assert set(asked) <= {None}


def test_modules_take_it():
    for layer in (pn.Conv1d(4, 6, 3, batch_invariant=True), pn.ConvTranspose1d(4, 6, 3, batch_invariant=True)):
        x = torch.randn(5, 4, 30)
        assert torch.equal(layer(x)[2:3], layer(x[2:3])) and layer.algorithm == "batch_invariant"
    with pytest.raises(TypeError, match="batch_invariant must be True or False, got 'no'"):
        pn.Conv2d(3, 4, 3, batch_invariant="no")
    with pytest.raises(ConvArgumentError, match="but got linear=True"):
        pn.convert(model_of(torch), linear=True, batch_invariant=True)
    with pytest.raises(ValueError, match="algorithm='direct', which a fused layer does not take; expected None or 'batch_invariant'"):
        pn.FusedConvBnReLU2d.from_modules(pn.Conv2d(3, 4, 3, algorithm="direct"), torch.nn.BatchNorm2d(4))
    with pytest.raises(TypeError, match="batch_invariant must be True or False, got 1"):
        pn.compile(model_of(torch), mode="light", options={"batch_invariant": 1})


def test_wrong_options_are_refused():
    x, w = np.ones((2, 3, 8, 8), "f"), np.ones((4, 3, 3, 3), "f")
    with pytest.raises(TypeError, match="batch_invariant must be True or False, got 1"):
        pc.conv2d(x, w, batch_invariant=1)
    with pytest.raises(ConvArgumentError, match="algorithm='fft' and batch_invariant=True exclude each other"):
        pc.conv2d(x, w, algorithm="fft", batch_invariant=True)
    with pytest.raises(TypeError, match="enabled must be True or False, got 'yes'"), pc.batch_invariant("yes"):
        pass


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_random_layers_on_a_gpu(seed):
    """All modes, both layouts and passes; images with numbers of a wide range beside others, which are mended."""
    rng = np.random.default_rng(seed)
    for layer in rng.permutation(np.array(drawn(100 + seed, 1, 4e6), object))[:6]:
        dtype, last = getattr(torch, layer.dtype), layer.layout == "NHWC"
        layer = replace(
            layer, has_bias=False, has_scale=False, has_residual=False, float_scale=False, activation=None, algorithm="batch_invariant",
            batched=True
        )
        images = torch.from_numpy(rng.standard_normal(replace(layer, N=12).input_shape)).to("cuda", dtype)
        images[3] *= torch.from_numpy(10 ** rng.uniform(-6, 0, images[3].shape)).to("cuda", dtype)
        images[7] *= 100
        images[9].view(-1)[5] = torch.nan
        w = torch.from_numpy(rng.standard_normal(layer.weight_shape)).to("cuda", dtype)

        def made(some, layer=layer, w=w, last=last):
            some = some.contiguous()
            if last and layer.order is not None:
                some = some.permute(layer.order).contiguous().permute([layer.order.index(axis) for axis in range(some.ndim)])
            return Plan(replace(layer, N=len(some)), "cuda:0")(some, w).contiguous().view(torch.uint8)

        whole = made(images)
        for part in (slice(0, 1), slice(3, 4), slice(2, 5), slice(6, 12), slice(9, 10)):
            assert torch.equal(made(images[part]), whole[part]), (str(layer), part)
        order = torch.from_numpy(rng.permutation(12)).to("cuda")
        assert torch.equal(made(images[order]), whole[order]), str(layer)


@pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
@pytest.mark.parametrize("image, weight, options, mode", [
    ((128, 4, 4), (64, 128, 3, 3), {"padding": 1}, "fp32"), ((16, 9, 9), (24, 16, 3, 3), {"padding": 1}, "fp16-nhwc"), ((64, 7, 7), (32, 64, 1, 1), {}, "fp32"),
    ((64, 7, 7), (32, 64, 1, 1), {}, "tf32"), ((3, 17, 17), (16, 3, 5, 5), {"stride": 2, "padding": 2}, "fp32"), ((32, 6, 6), (32, 8, 3, 3), {"groups": 4}, "tf32-nhwc"),
    ((16, 10, 10), (3, 16, 3, 3), {}, "fp32-nhwc"),
])  # fmt: skip
@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_kernels_of_gpus_on_the_simulated_machine(image, weight, options, mode, direction):
    """One image's numbers are far apart: its results, some of which are mended, share tiles with others' results."""
    modes = MODE_FIELDS | {"fp32-nhwc": {"layout": "NHWC"}}
    layer = ConvProblem.forward(2, (1, *image), weight, algorithm="batch_invariant", **options)
    layer = as_called(replace(layer, direction=direction, **modes[mode]), H200)
    rng = np.random.default_rng(1)
    x, w = (rng.standard_normal(shape).astype(layer.dtype) for shape in (replace(layer, N=4).input_shape, layer.weight_shape))
    if layer.dtype == "float32":
        x[1:3] *= (10 ** rng.uniform(-12, 0, x[1:3].shape)).astype("f")

    def made(images):
        problem = replace(layer, N=len(images))
        return np.ascontiguousarray(simt.computed(problem, engines.choose(problem, H200), images, w)).view(np.uint8)

    whole = made(x)
    assert all(np.array_equal(made(x[i : i + 1]), whole[i : i + 1]) for i in range(4)) and np.array_equal(made(x[[2, 0]]), whole[[2, 0]])


@pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
@pytest.mark.parametrize("split", [1, 2])
def test_mending_looks_at_one_image(split):
    """An image with a few tiny numbers beside one that has to be mended: without the option a tile of both is, too."""
    rng, config = np.random.default_rng(0), engines.ImplicitGemm(BLOCK_M=64, BLOCK_N=64, STAGES=6, SPLIT=split)
    layer = ConvProblem.forward(2, (1, 64, 4, 4), (64, 64, 3, 3), padding=1)
    x, w = (rng.standard_normal(shape).astype("f") for shape in ((4, 64, 4, 4), layer.weight_shape))
    x[0, ::7, 1, 1] = 1e-12
    x[1] *= (10 ** rng.uniform(-9, -8, x[1].shape)).astype("f")
    x[1, 0, 0, 0] = 30
    same = {}
    for algorithm in (None, "batch_invariant"):
        together, alone = (simt.computed(replace(layer, N=len(some), algorithm=algorithm), config, some, w) for some in (x, x[:1]))
        same[algorithm] = np.array_equal(together[:1], alone)
    assert same == {None: False, "batch_invariant": True}
