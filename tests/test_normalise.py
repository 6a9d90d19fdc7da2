"""Group, instance, layer and RMS norms as functions and modules of pycuda_conv.nn."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pycuda_conv.nn as pn
from pycuda_conv.nn import norm_modules, normalise

AFTER = {None: lambda v: v, "relu": F.relu, "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda v: F.gelu(v, approximate="tanh")}
LIMITS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def numbers(*shape, where="cpu", dtype=torch.float32, last=False, mean=0.0):
    x = (torch.randn(shape, device=where) + mean).to(dtype)
    return x.to(memory_format=torch.channels_last) if last else x


def far(found, wanted):
    """The relative error of the norm, and the largest one of an element."""
    off = found.double() - wanted
    return float(off.norm() / wanted.norm()), float((off.abs() / (wanted.abs() + 1)).max())


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape, groups", [
    ((2, 32, 9, 7), 4), ((1, 20, 16, 16), 2), ((3, 6, 5, 5), 6), ((2, 64, 40, 33), 8), ((1, 128, 130, 100), 32), ((2, 5, 64, 64), 1),
    ((4, 128, 64, 64), 8), ((1, 512, 128, 128), 32), ((1, 48, 300, 301), 3),
])
def test_group_norm(where, dtype, last, shape, groups):
    torch.manual_seed(sum(shape))
    activation = list(AFTER)[sum(shape) % len(AFTER)]
    x = numbers(*shape, where=where, dtype=dtype, last=last)
    gamma, beta = numbers(shape[1], where=where, dtype=dtype), numbers(shape[1], where=where)
    beta = beta if where == "cuda" else beta.to(dtype)
    for _ in range(2):  # the second call is a repeated one
        found = pn.group_norm(x, groups, gamma, beta, activation=activation)
    wanted = AFTER[activation](F.group_norm(x.double(), groups, gamma.double(), beta.double()))
    theirs = far(AFTER[activation](F.group_norm(x.float(), groups, gamma.float(), beta.float())).to(dtype), wanted)
    assert found.dtype is dtype and found.stride() == x.stride()
    norm, largest = far(found, wanted)
    assert largest < LIMITS[dtype] * (1 if where == "cuda" else 20)  # torch's own on the CPU
    if where == "cuda":
        assert norm <= 1.1 * theirs[0] + 2e-8  # a unit of float32 is 6e-8
        one = pn.group_norm(x[-1:], groups, gamma, beta, activation=activation)
        assert torch.equal(one, found[-1:])  # whatever else is in the batch


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape, groups", [((2, 32, 9, 7), 4), ((2, 128, 130, 100), 32), ((3, 5, 16, 16), 1)])
def test_what_is_added_to_the_channels_of_an_image(where, dtype, last, shape, groups):
    torch.manual_seed(sum(shape))
    x, added = numbers(*shape, where=where, dtype=dtype, last=last), numbers(*shape[:2], where=where, dtype=dtype)
    wanted = F.silu(F.group_norm(x.double() + added.double()[:, :, None, None], groups))
    for _ in range(2):
        found = pn.group_norm(x, groups, activation="silu", added=added)
        assert found.stride() == x.stride() and far(found, wanted)[1] < 2 * LIMITS[dtype] * (1 if where == "cuda" else 20)
    x.requires_grad_(), added.requires_grad_()
    pn.group_norm(x, groups, added=added).square().sum().backward()
    assert x.grad.shape == x.shape and added.grad.shape == added.shape


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape, axes", [((300, 96), 1), ((7, 1024), 1), ((2, 9, 5000), 1), ((4, 6, 40, 30), 3), ((64, 37), 1), ((3, 5, 8), 2)]
)
@pytest.mark.parametrize("rms", [False, True])
def test_rows(where, dtype, shape, axes, rms):
    torch.manual_seed(sum(shape))
    x, sizes = numbers(*shape, where=where, dtype=dtype), shape[len(shape) - axes :]
    gamma, beta = numbers(*sizes, where=where, dtype=dtype), numbers(*sizes, where=where, dtype=dtype)
    if rms:
        found, wanted = pn.rms_norm(x, sizes, gamma, 1e-6, "silu"), F.silu(F.rms_norm(x.double(), sizes, gamma.double(), 1e-6))
    else:
        found, wanted = pn.layer_norm(x, sizes, gamma, beta, 1e-6), F.layer_norm(x.double(), sizes, gamma.double(), beta.double(), 1e-6)
    assert found.stride() == x.stride() and far(found, wanted)[1] < LIMITS[dtype]


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape, groups, activation", [
    ((2, 32, 9, 7), 4, "silu"), ((1, 20, 16, 16), 2, "gelu"), ((3, 6, 5, 5), 6, "relu"), ((2, 64, 40, 33), 8, None), ((5, 128, 33, 20), 32, "gelu_tanh"),
])
def test_gradients(where, dtype, last, shape, groups, activation):
    torch.manual_seed(sum(shape))
    x = numbers(*shape, where=where, dtype=dtype, last=last)
    gamma = numbers(shape[1], where=where, dtype=dtype)
    beta, dout = numbers(shape[1], where=where, dtype=dtype), numbers(*shape, where=where, dtype=dtype)
    given, exact = ([one.detach().to(kind).requires_grad_() for one in (x, gamma, beta)] for kind in (dtype, torch.float64))
    wanted = torch.autograd.grad(AFTER[activation](F.group_norm(exact[0], groups, *exact[1:])), exact, dout.double())
    results = [torch.autograd.grad(pn.group_norm(given[0], groups, *given[1:], activation=activation), given, dout) for _ in range(3)]
    for one, right in zip(results[0], wanted, strict=True):
        assert float((one.double() - right).abs().max() / right.abs().max()) < 2 * LIMITS[dtype]
    assert all(torch.equal(a, b) for later in results[1:] for a, b in zip(results[0], later, strict=True))
    if where == "cuda":
        assert results[0][0].stride() == x.stride()


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape, groups", [((2, 32, 9, 7), 4), ((2, 64, 130, 100), 32), ((3, 6, 16, 16), 1)])
def test_what_else_reads_x_gets_it_from_the_norm(where, dtype, last, shape, groups):
    """Its gradient is added by the launch of the norm's, at first and when that is repeated; and alone, where nobody reads the norm."""
    if where == "cpu" and last:
        pytest.skip("torch's own gradient crashes on some CPUs")
    norm = normalise.norm_of_graph(normalise.Asked(groups, 0, 1e-5, False, "silu"), True)
    x, gamma, beta = numbers(*shape, where=where, dtype=dtype, last=last), numbers(shape[1], where=where), numbers(shape[1], where=where)
    wide = x.double().requires_grad_()
    wanted = F.silu(F.group_norm(wide, groups, gamma.double(), beta.double())) + wide.square()
    given = torch.randn_like(x)
    (right,) = torch.autograd.grad(wanted, wide, given.double())
    for _ in range(3):
        leaf = x.detach().requires_grad_()
        out, passed = norm(leaf, gamma, beta)
        (dx,) = torch.autograd.grad(out + passed.square(), leaf, given, retain_graph=True)
        assert far(dx, right)[0] < {torch.float32: 2e-6, torch.float16: 2e-3}[dtype]
        (alone,) = torch.autograd.grad(passed, leaf, given)
        assert torch.equal(alone, given)


@pytest.mark.parametrize("rms", [False, True])
def test_gradients_of_rows(where, rms):
    torch.manual_seed(0)
    x, gamma = numbers(333, 200, where=where), numbers(200, where=where)
    beta, dout = numbers(200, where=where), numbers(333, 200, where=where)
    def results(f, kind):
        given = [one.detach().to(kind).requires_grad_() for one in ((x, gamma) if rms else (x, gamma, beta))]
        return torch.autograd.grad(F.silu(f(*given)) if kind is torch.float64 else f(*given), given, dout.to(kind))
    if rms:
        ours, theirs = (lambda x, g: pn.rms_norm(x, 200, g, 1e-6, "silu")), lambda x, g: F.rms_norm(x, (200,), g, 1e-6)
    else:
        ours, theirs = (lambda x, g, b: pn.layer_norm(x, 200, g, b, activation="silu")), lambda x, g, b: F.layer_norm(x, (200,), g, b)
    for one, right in zip(results(ours, torch.float32), results(theirs, torch.float64), strict=True):
        assert float((one.double() - right).abs().max() / right.abs().max()) < 5e-6


def test_some_operands_without_gradients(where):
    x, gamma = numbers(2, 8, 6, 6, where=where).requires_grad_(), numbers(8, where=where).requires_grad_()
    pn.group_norm(x, 2).square().sum().backward()
    assert x.grad is not None
    pn.group_norm(x.detach(), 2, gamma).square().sum().backward()
    assert gamma.grad is not None
    (first,) = torch.autograd.grad(pn.group_norm(x, 2, gamma, activation="silu").square().sum(), x, create_graph=True)
    again = first.square().sum()
    (second,) = torch.autograd.grad(again, x)
    exact = x.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(F.silu(F.group_norm(exact, 2, gamma.detach().double())).square().sum(), exact, create_graph=True)
    (right,) = torch.autograd.grad(wanted.square().sum(), exact)
    assert torch.allclose(second.double(), right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mean", [10.0, 1000.0])
@pytest.mark.gpu
def test_a_large_mean_costs_no_digits(mean, last):
    x = numbers(2, 64, 200, 200, where="cuda", last=last, mean=mean)
    asked = normalise.Asked(8, 0, 0.0, False, None)
    _, stats = normalise.forward(asked, x, None, None, True)
    exact = x.double().reshape(2, 8, -1).var(2, unbiased=False)
    assert float((stats[..., 1].double() ** -2 / exact - 1).abs().max()) < 1e-6


def test_modules(where):
    torch.manual_seed(0)
    x = numbers(2, 8, 6, 5, where=where)
    pairs = [
        (pn.GroupNorm(4, 8), nn.GroupNorm(4, 8)), (pn.LayerNorm((6, 5)), nn.LayerNorm((6, 5))), (pn.RMSNorm(5), nn.RMSNorm(5)),
        (pn.InstanceNorm2d(8, affine=True), nn.InstanceNorm2d(8, affine=True)), (pn.InstanceNorm2d(8, track_running_stats=True), nn.InstanceNorm2d(8, track_running_stats=True)),
    ]  # fmt: skip
    for ours, theirs in pairs:
        ours, theirs = ours.to(where), theirs.to(where)
        theirs.load_state_dict(ours.state_dict())
        assert torch.allclose(ours(x), theirs(x), atol=1e-5) and "by pycuda_conv" in repr(ours)
        ours.activation = "silu"
        assert torch.allclose(ours(x), F.silu(theirs(x)), atol=1e-5)
    assert torch.allclose(pn.InstanceNorm2d(8)(x[0]), nn.InstanceNorm2d(8)(x[0]), atol=1e-5)
    assert copy.deepcopy(pn.GroupNorm(2, 4, activation="gelu")).activation == "gelu"


def test_norms_of_a_converted_model(where, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.LayerNorm(6), nn.InstanceNorm2d(8), nn.RMSNorm(6)).to(where)
    x, calls = numbers(2, 3, 8, 8, where=where), []
    wanted = model(x)
    for name in ("group_norm", "layer_norm", "rms_norm"):
        genuine = getattr(norm_modules, name)
        monkeypatch.setattr(norm_modules, name, lambda *given, name=name, genuine=genuine: (calls.append(name), genuine(*given))[1])
    assert torch.allclose(pn.convert(model)(x), wanted, atol=1e-4) and not calls
    ours = pn.convert(model, norms=True)
    assert torch.allclose(ours(x), wanted, atol=1e-4) and calls == ["group_norm", "layer_norm", "rms_norm"]
    assert isinstance(ours[1], nn.GroupNorm) and copy.deepcopy(ours)(x).shape == wanted.shape
    assert type(pn.revert(ours)[1]) is nn.GroupNorm and torch.allclose(ours(x), wanted, atol=1e-4)


@pytest.mark.parametrize("call, error, words", [
    (lambda x: pn.group_norm(x, 3), ValueError, "groups must divide the 8 channels of x, but got groups=3"),
    (lambda x: pn.group_norm(x, 0), ValueError, "groups must divide"), (lambda x: pn.group_norm(x, 2.0), TypeError, "groups must be an int"),
    (lambda x: pn.group_norm(x, True), TypeError, "groups must be an int"), (lambda x: pn.group_norm([1.0], 2), TypeError, "x must be a tensor"),
    (lambda x: pn.group_norm(x.int(), 2), TypeError, "floating-point"), (lambda x: pn.group_norm(x[0, 0, 0], 1), ValueError, "at least 2 axes"),
    (lambda x: pn.group_norm(x, 2, torch.ones(7)), ValueError, r"gamma must have shape \(8,\)"),
    (lambda x: pn.group_norm(x, 2, added=torch.ones(8)), ValueError, r"added must have shape \(2, 8\)"),
    (lambda x: pn.group_norm(x, 2, beta=[0.0]), TypeError, "beta must be a tensor"), (lambda x: pn.group_norm(x, 2, eps="a"), TypeError, "eps must be a number"),
    (lambda x: pn.group_norm(x, 2, eps=-1.0), ValueError, "eps must be at least 0"), (lambda x: pn.group_norm(x, 2, activation="sil"), ValueError, "activation must be"),
    (lambda x: pn.layer_norm(x, (5, 5)), ValueError, "shape must be that of the last axes of x"), (lambda x: pn.layer_norm(x, ()), ValueError, "shape must be"),
    (lambda x: pn.layer_norm(x, None), TypeError, "shape must be an int or a sequence"), (lambda x: pn.rms_norm(x, 5, torch.ones(4)), ValueError, "gamma must have"),
    (lambda x: pn.instance_norm(x[0, 0]), ValueError, "at least 3 axes"),
])
def test_bad_arguments_are_named(call, error, words):
    with pytest.raises(error, match=words):
        call(torch.zeros(2, 8, 6, 5))


def test_float64_and_empty_arrays_are_torchs(where):
    x = numbers(2, 8, 6, 5, where=where).double()
    assert torch.equal(pn.group_norm(x, 2), F.group_norm(x, 2))
    assert pn.group_norm(x[:0].float(), 2).shape == (0, 8, 6, 5)
    y = numbers(2, 8, 6, 10, where=where)[..., ::2]
    assert torch.allclose(pn.group_norm(y, 2), F.group_norm(y, 2), atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("last", [False, True])
def test_operators(last):
    x = numbers(2, 8, 6, 5, where="cuda", last=last).requires_grad_()
    gamma, beta = (numbers(8, where="cuda").requires_grad_() for _ in range(2))
    given = x, gamma, beta, 1e-5, normalise.spec_of(normalise.Asked(2, 0, 1e-5, False, "silu"))
    plain = [one.detach() if isinstance(one, torch.Tensor) else one for one in given]
    torch.library.opcheck(torch.ops.pycuda_conv.norm.default, (*plain[:3], None, *plain[3:]))
    torch.library.opcheck(torch.ops.pycuda_conv.norm_stats.default, plain)
    wanted = torch.autograd.grad(F.silu(F.group_norm(x, 2, gamma, beta)).square().sum(), (x, gamma, beta))
    found = torch.autograd.grad(torch.ops.pycuda_conv.norm_recorded.default(*given).square().sum(), (x, gamma, beta))
    assert all(torch.allclose(a, b, atol=1e-4, rtol=1e-4) for a, b in zip(found, wanted, strict=True))


@pytest.mark.gpu
def test_special_numbers():
    x = numbers(2, 8, 20, 20, where="cuda", last=True)
    x[0, 0, 3, 3], x[1, 7, 2, 2] = float("nan"), float("inf")
    x[0, 4:6] = 3.0  # a group without variance
    found, wanted = pn.group_norm(x, 4, activation="silu"), F.silu(F.group_norm(x, 4))
    assert torch.equal(found.isnan(), wanted.isnan()) and torch.allclose(found, wanted, atol=1e-5, equal_nan=True)
