"""Training with torch: gradients, operators, modules, and models whose convolutions were converted."""

import copy
import inspect
import pickle
import re
import runpy
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings
from reference import Case, channels_last, convolved, is_channels_last
from test_functions import NAMES, cases

import pycuda_conv as pc
import pycuda_conv.nn as pn
from pycuda_conv import dispatch, engines, memo

F = torch.nn.functional
MODULES = ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]
EXAMPLES = Path(__file__).parent.parent / "examples"


def randn(*shape, where="cpu", dtype=torch.float64, seed=0, grad=True):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(where, dtype).requires_grad_(grad)


def pair(name, *args, seed=0, dtype=torch.float64, where="cpu", **kwargs):
    """torch's module of that name and ours, with the same parameters."""
    torch.manual_seed(seed)
    theirs = getattr(torch.nn, name)(*args, **kwargs, dtype=dtype, device=where)
    ours = getattr(pn, name)(*args, **kwargs, dtype=dtype, device=where)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def close(got, expected, dtype=None):
    """Equal but for rounding, relative to the largest element or 1."""
    eps = torch.finfo(dtype or got.dtype).eps
    assert got.shape == expected.shape and got.device == expected.device
    scale = max(1, expected.abs().max().item())
    torch.testing.assert_close(got, expected.to(got.dtype), rtol=0, atol=100 * eps * scale)


def same_gradients(ours, theirs, inputs, dtype=None):
    """The results and all gradients of two modules or functions agree."""
    parameters = [list(f.parameters()) if isinstance(f, torch.nn.Module) else [] for f in (ours, theirs)]
    results = [f(*inputs) for f in (ours, theirs)]
    close(*results, dtype)
    grad = randn(*results[0].shape, where=results[0].device, dtype=results[0].dtype, seed=9, grad=False)
    found = [
        torch.autograd.grad(y, [t for t in (*inputs, *p) if t.requires_grad], grad) for y, p in zip(results, parameters, strict=True)
    ]
    for got, expected in zip(*found, strict=True):
        close(got, expected, dtype)


# ---- gradients

CUT = {"stride": (3,), "padding": ((2, 0),), "output_padding": (2,)}  # all of the convolution is cut away


@settings(max_examples=8)
@given(case=st.tuples(st.booleans(), st.integers(1, 3)).flatmap(lambda kind: cases(*kind)))
@example(case=Case(True, (1, 1, 1), (1, 1, 1), CUT))
def test_gradients_of_random_problems(where, case):
    ours, shapes = getattr(pc, NAMES[case.transposed, case.ndim]), (case.input_shape, case.weight_shape, (case.channels,))
    inputs = [randn(*shape, where=where, seed=seed) for seed, shape in enumerate(shapes)]
    same_gradients(lambda *a: ours(*a, **case.options), lambda *a: convolved(case.transposed, *a, **case.options), inputs)


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_what_is_asked_for_is_kept_and_computed(where, needs, monkeypatch):
    x, w, b = (randn(*s, where=where, grad=g) for s, g in zip(((2, 3, 6, 5), (4, 3, 3, 2), (4,)), needs, strict=True))
    kept, asked = [], []
    memo.forget_launches()  # what was computed before is not asked of dispatch
    convolve = dispatch.convolve
    monkeypatch.setattr(dispatch, "convolve", lambda call, *args: asked.append(call[0]) or convolve(call, *args))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        y = pc.conv2d(x, w, b)
    y.sum().backward()
    assert [t.grad is not None for t in (x, w, b)] == list(needs)
    assert kept == [t.shape for t, other in ((x, needs[1]), (w, needs[0])) if other]
    assert asked == ["conv", *(of for of, need in (("input", needs[0]), ("weight", needs[1])) if need)]


def by_torch(x, w, b, scale, residual):
    """What the epilogue says, by torch."""
    return torch.relu(F.conv2d(x, w) * scale.view(-1, 1, 1) + b.view(-1, 1, 1) + residual)


def test_the_epilogue_is_differentiated_cast_and_compiled(where):
    shapes = (2, 3, 6, 5), (4, 3, 3, 2), (4,), (4,), (2, 4, 4, 4)
    inputs = [randn(*shape, where=where, seed=seed) for seed, shape in enumerate(shapes)]

    def ours(x, w, b, scale, residual):
        return pc.conv2d(x, w, b, scale=scale, residual=residual, activation="relu")

    same_gradients(ours, by_torch, inputs)
    same_gradients(torch.compile(ours, backend="aot_eager", fullgraph=True), by_torch, inputs)
    t = randn(2, 4, 4, 4, where=where)
    same_gradients(lambda t, w: pc.conv_transpose2d(t, w, activation="relu"), lambda t, w: F.conv_transpose2d(t, w).relu(), [t, inputs[1]])
    x, w, b, scale, residual = (t.detach().float() for t in inputs)
    with torch.autocast(where, torch.bfloat16):
        y = ours(x, w, b, scale, residual)  # in one step: nothing needs gradients
        assert y.dtype == torch.bfloat16
        close(y, by_torch(x, w, b, scale, residual).bfloat16())
        assert ours(x, w.requires_grad_(), b, scale, residual).dtype == torch.bfloat16
    for wrong in ({"scale": scale[:1]}, {"residual": residual[:1]}, {"scale": scale.double()}, {"activation": "tanh"}):
        with pytest.raises(pc.ConvArgumentError):
            pc.conv2d(x, w, b, **wrong)


# ---- operators

LISTED = {
    "conv": ([(2, 4, 6, 5), (6, 2, 3, 3), (6,)], []),
    "conv_transpose": ([(2, 6, 3, 3), (6, 2, 3, 3), (4,)], [1, 0]),
    "conv_input": ([(2, 6, 3, 4), (6, 2, 3, 3), None], [2, 4, 6, 5]),
    "conv_weight": ([(2, 4, 6, 5), (2, 6, 3, 4), None], [6, 2, 3, 3]),
}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", LISTED)
def test_operators_are_what_torch_expects(where, name, last):
    shapes, size = LISTED[name]
    tensors = [None if shape is None else randn(*shape, where=where) for shape in shapes]
    if last:
        tensors[0] = channels_last(tensors[0]).detach().requires_grad_()
    rest = ([2, 1], [1, 0, 1, 0] if name != "conv_transpose" else [1, 0, 0, 0], [1, 1], 2, "fp32", None, False)
    torch.library.opcheck(getattr(torch.ops.pycuda_conv, name).default, (*tensors, size, *rest))


def test_tensors_without_numbers_are_checked_as_others():
    layer = pn.Conv2d(3, 4, 3, stride=2, device="meta")
    assert layer(torch.empty(2, 3, 9, 9, device="meta")).shape == (2, 4, 4, 4)
    for wrong in (torch.empty(2, 4, 9, 9, device="meta"), torch.empty(2, 3, 9, 9, device="meta").double()):
        with pytest.raises(pc.ConvArgumentError):
            layer(wrong)
    with pytest.raises((pc.ConvArgumentError, TypeError)):
        layer(torch.empty(2, 3, 9, 9))
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        y = pc.conv_transpose2d(torch.empty(2, 4, 9, 9), torch.empty(4, 2, 3, 3), stride=2, output_padding=1)
    assert y.shape == (2, 2, 20, 20)


def test_transforms_of_torch_func(where):
    x, w, b = (randn(*s, where=where, grad=False) for s in ((3, 2, 4, 5, 5), (6, 2, 3, 3), (6,)))

    def loss(convolution, w, x):
        return convolution(x, w, stride=2, padding=1, groups=2).square().sum()

    many = [torch.func.vmap(torch.func.grad(lambda w, x, f=f: loss(f, w, x)), (None, 0))(w, x) for f in (pc.conv2d, F.conv2d)]
    close(*many)
    ws = torch.stack([w, -w, 2 * w])
    for dims, arrays in (((0, None, None), (x, w, b)), ((None, 0, None), (x[0], ws, b)), ((0, 0, 0), (x, ws, torch.stack([b] * 3)))):
        close(*(torch.func.vmap(lambda *a, f=f: f(*a, groups=2), dims)(*arrays) for f in (pc.conv2d, F.conv2d)))
    dy = pc.conv2d(x[0], w, groups=2)
    close(torch.func.vmap(lambda w: pc.conv2d_input(x.shape[1:], w, dy, groups=2))(ws)[1], -pc.conv2d_input(x.shape[1:], w, dy, groups=2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_it_does_for_torch(where, dtype):
    theirs, ours = pair("Conv2d", 2, 3, 3, dtype=torch.float32, where=where)
    x = randn(2, 2, 5, 5, where=where, dtype=torch.float32)
    with torch.autocast(where, dtype):
        same_gradients(ours, theirs, [x], dtype)
        assert ours(x).dtype == dtype == pc.conv_transpose2d(x, ours.weight.transpose(0, 1)).dtype
        with torch.no_grad():
            assert ours(x).dtype == dtype
            assert pc.conv2d(x, ours.weight, out=torch.empty(2, 3, 3, 3, device=where)).dtype == torch.float32  # as torch
        compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
        assert compiled(x).dtype == dtype
        assert pc.conv2d(x.double(), ours.weight.double()).dtype == torch.float64
    y = ours(x)
    assert y.dtype == torch.float32
    with torch.autocast(where, dtype):  # which is for what runs forward
        y.sum().backward()
    exact = theirs.double()  # a GPU's float32 may be TF32
    close(ours.weight.grad, torch.autograd.grad(exact(x.double()).sum(), exact.weight)[0])


# ---- layouts


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_channels_last_comes_out_and_back(where, ndim):
    x = channels_last(randn(2, 4, *(5, 6, 4)[:ndim], where=where, grad=False)).requires_grad_()
    theirs, ours = pair(f"Conv{ndim}d", 4, 6, 3, padding=1, where=where)
    theirs.weight.data, ours.weight.data = (channels_last(m.weight.detach()) for m in (theirs, ours))
    y = ours(x)
    assert is_channels_last(y) and y.grad_fn is not None
    (dx,) = torch.autograd.grad(y, x, channels_last(torch.ones_like(y)))
    assert is_channels_last(dx)
    same_gradients(ours, theirs, [x])
    with torch.no_grad():
        assert is_channels_last(ours(x))
    strided = x.detach().repeat_interleave(2, -1)[..., ::2].requires_grad_()
    same_gradients(ours, theirs, [strided])
    ours(strided).sum().backward()  # the gradient by the result is expanded from one number


# ---- modules


def test_arguments_are_torch_s():
    own = [("precision", "fp32"), ("algorithm", None), ("batch_invariant", False), ("upsample", 1), ("upsample_filter", None)]
    for name in MODULES:
        theirs, ours = (list(inspect.signature(getattr(of, name)).parameters.values()) for of in (torch.nn, pn))
        first, more = ours[: len(theirs)], ours[len(theirs) :]
        assert [(p.name, p.default, p.kind) for p in first] == [(p.name, p.default, p.kind) for p in theirs]
        assert [(p.name, p.default) for p in more] == own[: 3 if name.startswith("ConvTranspose") else 5]
        assert {p.kind for p in more} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("algorithm", ["direct", "fft"])
def test_modules_take_an_algorithm(name, algorithm, monkeypatch):
    """Forward, in gradients, and in what torch.compile traces."""
    asked = []
    choose = engines.choose
    monkeypatch.setattr(engines, "choose", lambda problem, device: asked.append(problem.algorithm) or choose(problem, device))
    arguments, size = (2, 3, 5), (1, 2, *(11 + (algorithm == "fft"),) * int(name[-2]))  # a size of its own: no plan is kept
    ours, plain = getattr(pn, name)(*arguments, algorithm=algorithm), getattr(torch.nn, name)(*arguments)
    plain.load_state_dict(ours.state_dict())
    assert repr(ours) == repr(plain)[:-1] + f", algorithm={algorithm}, by pycuda_conv)"
    same_gradients(plain, ours, (torch.randn(size, requires_grad=True),))
    assert asked and set(asked) == {algorithm}
    traced = torch.compile(ours, backend="eager", fullgraph=True)(torch.ones(size))
    assert torch.equal(traced, ours(torch.ones(size)))
    assert copy.deepcopy(ours).algorithm == algorithm and "algorithm" not in vars(pn.revert(torch.nn.Sequential(ours))[0])
    with pytest.raises(pc.ConvArgumentError, match=r"algorithm must be None or one of .*dft"):
        getattr(pn, name)(*arguments, algorithm="dft")


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_torch_s_in_all_but_the_arithmetic(name):
    arguments = (4, 6, 3, 2, 1, 1, 2, False) if "Transpose" in name else (4, 6, 3, 2, 1, 2, 2, False, "reflect")
    torch.manual_seed(1)
    theirs = getattr(torch.nn, name)(*arguments)
    torch.manual_seed(1)
    ours = getattr(pn, name)(*arguments, precision="tf32")
    assert isinstance(ours, type(theirs)) and torch.equal(ours.weight, theirs.weight)
    assert repr(ours) == repr(theirs)[:-1] + ", precision=tf32, by pycuda_conv)"
    assert repr(getattr(pn, name)(*arguments)) == repr(theirs)[:-1] + ", by pycuda_conv)"
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert repr(twin) == repr(ours) and torch.equal(twin.weight, ours.weight) and twin.precision == "tf32"
    assert torch.nn.utils.skip_init(getattr(pn, name), *arguments[:3]).weight.shape == ours.weight.shape[:1] + (
        (6,) if "Transpose" in name else (4,)
    ) + ours.weight.shape[2:]


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_paddings_before_and_after_each_axis(where, ndim, mode):
    pairs = ((2, 1), [0, 2], (1, 0))[:ndim]
    torch.manual_seed(0)
    ours = getattr(pn, f"Conv{ndim}d")(2, 3, 2, padding=pairs, padding_mode=mode, dtype=torch.float64, device=where)
    flat = [v for pair in reversed(pairs) for v in pair]

    def theirs(x):
        return getattr(F, f"conv{ndim}d")(F.pad(x, flat, mode="constant" if mode == "zeros" else mode), ours.weight, ours.bias)

    x = randn(3, 2, *(4, 5, 3)[:ndim], where=where)
    close(ours(x), theirs(x))
    norm = getattr(torch.nn, f"BatchNorm{ndim}d")(3, dtype=torch.float64, device=where)
    model = pn.convert(torch.nn.Sequential(ours, norm, torch.nn.ReLU()))
    close(model(x), F.relu(F.batch_norm(theirs(x), None, None, training=True)))
    layer = getattr(pn, f"FusedConvBnReLU{ndim}d")
    close(layer.from_modules(ours, norm)(x), F.relu(F.batch_norm(theirs(x), None, None, training=True)))
    with torch.no_grad():
        close(model.eval()(x), F.relu(F.batch_norm(theirs(x), norm.running_mean, norm.running_var)))
    with pytest.raises(
        pc.ConvArgumentError, match=re.escape(f"padding must be an integer, {ndim} integers, 'same' or 'valid', but got padding=((2, 1)")
    ):
        layer(2, 3, 2, padding=pairs)
    with pytest.raises(pc.ConvArgumentError, match=f"expected padding to be {ndim} pairs"):
        getattr(pn, f"Conv{ndim}d")(2, 3, 2, padding=(*pairs, (1, 1)))


def test_the_output_size_of_a_transposed_convolution(where):
    theirs, ours = pair("ConvTranspose2d", 2, 3, 3, stride=2, padding=1, where=where)
    x = randn(2, 2, 4, 5, where=where)
    for size in ((8, 10), (2, 3, 7, 10)):
        same_gradients(lambda x, size=size: ours(x, size), lambda x, size=size: theirs(x, output_size=size), [x])
    for layer in (theirs, ours):
        with pytest.raises(ValueError, match="requested an output size of"):
            layer(x, (20, 20))


WRONG = [
    ((4, 6, 3), {"groups": 3}, None), ((4, 6, 3), {"groups": 0}, None), ((4, 6, 3), {"padding": "all"}, None), ((4, 6, 3), {"padding_mode": "none"}, None),
    ((4, 6, 3), {"padding": "same", "stride": 2}, None), ((4, 6, 3), {"precision": "fp8"}, None), ((4, 6), {}, None), ((4, 6, 3, 1, 0, 1, 1, True, "zeros", "cpu", torch.float32, 1), {}, None),
    ((4, 6, 3), {}, (2, 3, 8, 8)), ((4, 6, 3), {}, (8, 8)), ((4, 6, 9), {}, (2, 4, 8, 8)), ((4, 6, 3), {"stride": 0}, (2, 4, 8, 8)),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "options", "shape"), WRONG)
def test_wrong_arguments_are_refused_as_torch_refuses_them(arguments, options, shape):
    def error(of):
        with pytest.raises(Exception) as raised:
            layer = of.Conv2d(*arguments, **{k: v for k, v in options.items() if k != "precision" or of is pn})
            if shape is None and "precision" in options and of is torch.nn:
                raise ValueError("precision must be one of ('fp32', 'tf32')")
            layer(torch.zeros(shape))
        return raised.value

    theirs, ours = error(torch.nn), error(pn)
    assert isinstance(ours, type(theirs))
    words = str(theirs).removeprefix("Conv2d.__init__()")
    assert re.split(r"[,.:(\[]", words)[0] in str(ours)


def test_wrong_words_and_dtypes():
    with pytest.raises(pc.ConvArgumentError, match="padding must be integers for a transposed convolution"):
        pn.ConvTranspose2d(2, 3, 3, padding="same")
    with pytest.raises(pc.ConvArgumentError, match="precision must be one of"):
        pn.convert(torch.nn.Conv2d(1, 1, 1), precision="fp8")
    with pytest.raises(TypeError, match=r"a convolution takes arrays of float16, bfloat16, float32, float64, bool and integers"):
        pc.conv2d(*(randn(1, 1, n, n, grad=False).to(torch.float8_e5m2) for n in (3, 1)))
    with pytest.raises(pc.ConvArgumentError, match="should be the same"):
        pn.Conv2d(1, 1, 1)(randn(1, 1, 3, 3))
    x, w = randn(1, 1, 3, 3), randn(1, 1, 1, 1)
    with pytest.raises(pc.ConvArgumentError, match=r"torch.no_grad\(\)"):
        pc.conv2d(x, w, out=torch.empty(1, 1, 3, 3, dtype=torch.float64))


# ---- models


class Own(torch.nn.Conv2d):
    pass


def test_what_is_converted():
    model = torch.nn.ModuleList(
        [Own(1, 1, 1), torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1), torch.nn.BatchNorm2d(1)), torch.nn.Linear(2, 2)]
    )
    done = pn.report(pn.convert(model))
    assert [str(one) for one in done.converted] == ["0 (Own)", "1.0 (Conv2d)"] and not done.notes
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1), torch.nn.BatchNorm2d(1))
    assert pn.convert(model, precision="tf32")[0].precision == "tf32" and type(model) is torch.nn.Sequential
    assert pn.convert(model)[0].precision == "fp32"  # again, otherwise
    layer = pn.FusedConvBnReLU2d(1, 1, 1)
    done = pn.report(pn.convert(torch.nn.Sequential(layer), precision="tf32"))
    assert not done.converted and not done.notes and layer.precision == "tf32" and type(layer.conv) is torch.nn.Conv2d
    layer = torch.nn.Conv2d(1, 1, 1)
    pn.convert(layer)  # a model may be one convolution
    assert type(layer) is pn.Conv2d


def torchvision_model(name):
    """One with random weights and statistics, in evaluation."""
    try:
        from torchvision.models import get_model
    except Exception as error:  # one that was built for another torch raises a RuntimeError
        pytest.skip(f"torchvision can't be imported: {error}")
    torch.manual_seed(0)
    model = get_model(name, weights=None, **({"weights_backbone": None} if "deeplab" in name else {}))
    for norm in model.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(norm.running_mean, std=0.1)
            torch.nn.init.uniform_(norm.running_var, 0.5, 2)
    return model.cuda().eval()


def error(got, expected):
    return ((got - expected).norm() / expected.norm()).item()


@pytest.mark.gpu
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ["resnet18", "resnet50", "mobilenet_v2", "convnext_tiny", "deeplabv3_resnet50"])
def test_models_of_torchvision(name, order):
    model = torchvision_model(name)
    count = sum(isinstance(m, torch.nn.Conv2d) for m in model.modules())
    exact = copy.deepcopy(model).double()
    done = pn.report(pn.convert(model.to(memory_format=order)))
    assert len(done.converted) == count and not done.notes
    x = torch.randn(4, 3, 96, 96, device="cuda", generator=torch.Generator("cuda").manual_seed(0))

    def run(model, x):
        y = model(x)
        return y["out"] if isinstance(y, dict) else y

    with torch.no_grad():
        expected = run(exact, x.double())
        assert error(run(model, x.to(memory_format=order)), expected) < 1e-5
        compiled = pn.compile(model, "light")
        assert error(run(compiled, x.to(memory_format=order)), expected) < 1e-5
        (graph,) = pn.report(compiled).graphs
        assert not graph.left and (len(graph.fused) == count or not name.startswith(("resnet", "mobilenet")))
    assert error(run(pn.revert(pn.convert(model)), x.to(memory_format=order)), expected) < 3e-3  # torch rounds to TF32


@pytest.mark.gpu
def test_gradients_on_another_stream():
    theirs, ours = pair("Conv2d", 16, 32, 3, padding=1, where="cuda")
    ours.float()
    expected = randn(8, 16, 40, 40, where="cuda")
    theirs(expected).square().mean().backward()
    ours(expected.detach().float().requires_grad_()).square().mean().backward()  # so that all is compiled
    ours.zero_grad()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x = (expected.detach() + 0).float().requires_grad_()
        ours(x).square().mean().backward()
        grads = [t.grad.clone() for t in (x, ours.weight, ours.bias)]
    side.synchronize()
    for got, tensor in zip(grads, (expected, theirs.weight, theirs.bias), strict=True):
        assert error(got, tensor.grad) < 1e-5


@pytest.mark.gpu
def test_tf32_is_for_the_gradients_too():
    theirs, ours = pair("Conv2d", 64, 128, 3, padding=1, where="cuda", bias=False)
    rough = pn.Conv2d(64, 128, 3, padding=1, bias=False, device="cuda", precision="tf32")
    rough.load_state_dict(theirs.state_dict())
    x = randn(8, 64, 28, 28, where="cuda")
    expected = torch.autograd.grad(theirs(x).square().sum(), (x, theirs.weight))
    for layer, bound in ((ours.float(), 2e-6), (rough, 2e-3)):
        single = x.detach().float().requires_grad_()
        found = torch.autograd.grad(layer(single).square().sum(), (single, layer.weight))
        assert all(error(*both) < bound for both in zip(found, expected, strict=True))


# ---- examples


#: The example's processes are forked from one that has imported torch, which takes a second or two in each.
FORKED = """
import functools, runpy, sys
import torch._dynamo, torch.multiprocessing
del sys.argv[0]
torch.multiprocessing.spawn = functools.partial(torch.multiprocessing.start_processes, start_method="fork")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_data_parallel_training_is_training(fast_env):
    """examples/ddp.py compares each step's gradients with those of one process on the whole batch."""
    start = [EXAMPLES / "ddp.py"] if torch.cuda.is_available() else ["-c", FORKED, EXAMPLES / "ddp.py"]
    command = [sys.executable, *map(str, start), "--steps", "2", "--check"]
    done = subprocess.run(command, env=fast_env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0 and "the gradients agree" in done.stdout, done.stdout + done.stderr


def test_the_digits_are_learned(optimised, monkeypatch, capsys, tmp_path):
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    monkeypatch.setattr(sys, "argv", ["digits.py", "--epochs", "1", "--batch", "24", "--plot", str(tmp_path / "digits.png")])
    runpy.run_path(str(EXAMPLES / "digits.py"), run_name="__main__")
    accuracy = float(re.findall(r"test accuracy ([\d.]+) %", capsys.readouterr().out)[-1])
    assert accuracy > 90 and (tmp_path / "digits.png").stat().st_size > 10_000


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_biases_on_a_gpu(dtype, last, transposed):
    """They are this package's sums, at first and when they are repeated, and torch's where they are differentiated in their turn."""
    torch.manual_seed(0)
    own = getattr(torch, dtype)
    layer = (pn.ConvTranspose2d if transposed else pn.Conv2d)(24, 40, 3, padding=1, device="cuda", dtype=own)
    x = torch.randn(3, 24, 17, 12, device="cuda", dtype=own)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    for again in range(4):
        y = layer(x)
        dy = torch.randn_like(y)
        (found,) = torch.autograd.grad(y, layer.bias, dy, create_graph=again == 3)
        right = dy.double().sum((0, 2, 3))
        assert float((found.double() - right).abs().max() / right.abs().max()) < {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6}[dtype]
