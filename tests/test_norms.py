"""Batch normalisation and an activation before a convolution, trained."""

from __future__ import annotations

import pytest
import torch
from test_repeat import IN_C, strided, warm  # noqa: F401  (a fixture)
from torch import nn
from torch.nn import functional as F

from pycuda_conv.execute import device as on_gpu
from pycuda_conv.nn import norms
from pycuda_conv.nn.norms import norm_act

PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
ACTIVATIONS = [None, "relu", "silu", ("leaky_relu", 0.1), "gelu"]
LAST = torch.channels_last


def norm_of(x, place):
    torch.manual_seed(1)
    norm = nn.BatchNorm2d(x.shape[1], momentum=0.3, eps=1e-3).to(place, torch.float64 if x.dtype is torch.float64 else torch.float32)
    with torch.no_grad():
        for one in (norm.weight, norm.bias, norm.running_mean):
            one.normal_()
    return norm


def ours(norm, x, activation):
    return norm_act(
        x, norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked, norm.momentum, norm.eps, activation
    )


def reference(norm, x, activation):
    """In float64, by torch."""
    z = norm.double()(x.double())
    word, slope = activation if isinstance(activation, tuple) else (activation, None)
    if word == "leaky_relu":
        return F.leaky_relu(z, slope)
    return z if word is None else getattr(F, word)(z)


def close(got, ref, dtype, scale=1.0):
    size = {torch.float32: 2e-5, torch.float64: 1e-11, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert ((got.double() - ref.double()).abs() <= scale * size * (1 + ref.double().abs())).all()


@pytest.mark.pairs
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("last", [False, True], ids=["C order", "channels last"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_as_torch_s_norm_and_activation(place, last, activation, dtype):
    torch.manual_seed(0)
    shape = (3, 8, 9, 6) if activation != "silu" else (2, 24, 33, 32)  # a pass in one launch, and in several
    x = torch.randn(shape).add(0.5).to(place, dtype)
    x = x.contiguous(memory_format=LAST) if last else x
    norm, theirs = norm_of(x, place), norm_of(x, place)
    wide = torch.randn(shape[0], 2 * shape[1], *shape[2:]).to(place, dtype)
    for call in range(3):
        grad = (wide if not last else wide.contiguous(memory_format=LAST))[:, : shape[1]]  # as torch.cat gives it
        grad = grad.contiguous(memory_format=LAST if last else torch.contiguous_format) if call else grad
        a, b = (x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for _ in range(2))
        made, ref = ours(norm, a, activation), reference(theirs, b, activation)
        close(made, ref, dtype)
        assert made.dtype is dtype and made.stride() == x.stride()
        norm.zero_grad(set_to_none=True)
        theirs.zero_grad(set_to_none=True)
        made.backward(grad)
        ref.backward(grad.double())
        # a number near the ReLU's bend may be rounded to its other side
        near = ref.detach().abs() < {torch.float16: 1e-3, torch.bfloat16: 1e-2}.get(dtype, 0)
        close(a.grad.masked_fill(near, 0), b.grad.masked_fill(near, 0), dtype, 4)
        assert a.grad.stride() == x.stride()
        for one in ("weight", "bias"):
            close(getattr(norm, one).grad / 50, getattr(theirs, one).grad / 50, dtype, 8)
        close(norm.running_mean, theirs.running_mean, torch.float64 if dtype is torch.float64 else torch.float32)
        close(norm.running_var, theirs.running_var, torch.float32)
        assert norm.num_batches_tracked == theirs.num_batches_tracked == call + 1


@pytest.mark.parametrize("place", PLACES)
def test_what_the_kernels_do_not_take_torch_computes(place):
    x = torch.randn(4, 6, 5, 5, device=place)
    for given, of_norm in (
        (x[..., 0, 0], torch.float32), (x.half(), torch.float16), (x.transpose(2, 3), torch.float32),
        (x[:, ::2].repeat(1, 2, 1, 1), torch.float32)
    ):
        norm = norm_of(x, place).to(of_norm)
        ref = F.relu(F.batch_norm(given, None, None, norm.weight, norm.bias, True, 0.0, norm.eps))
        close(ours(norm, given, "relu"), ref, given.dtype)
    norm = norm_of(x, place)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        ours(norm, x[:1, :, :1, :1], "relu")
    close(norm_act(x, None, None, None, None), F.relu(F.batch_norm(x, None, None, None, None, True)), torch.float32)


@pytest.mark.parametrize("place", PLACES)
def test_second_derivatives(place):
    x = torch.randn(2, 2, 2, 2, device=place, dtype=torch.float64, requires_grad=True)
    norm = norm_of(x, place)
    given = x, norm.weight, norm.bias
    assert torch.autograd.gradcheck(lambda *given: norm_act(*given, None, None, activation="silu"), given)
    assert torch.autograd.gradgradcheck(lambda *given: norm_act(*given, None, None, activation="silu"), given)


@IN_C
@pytest.mark.parametrize("whole", [True, False])
def test_repeated_passes_are_made_by_the_launcher_in_c(warm, monkeypatch, whole):  # noqa: F811
    norms._again.clear()
    launched, launch = [], on_gpu.launch
    monkeypatch.setattr(on_gpu, "launch", lambda *given: (launched.append(1), launch(*given))[1])
    x = torch.randn(2, 16, 9, 9) if whole else torch.randn(8, 16, 64, 64)
    x = x.bfloat16().contiguous(memory_format=LAST).requires_grad_()
    norm, grad = norm_of(x, "cpu"), torch.randn(x.shape).bfloat16().contiguous(memory_format=LAST)

    def step(dout=grad):
        with torch.autocast("cpu", torch.bfloat16):
            made = ours(norm, x, "relu")
        warm.asked()
        made.backward(dout)
        return warm.asked()

    step()
    assert launched
    launched.clear()
    version = norm.num_batches_tracked._version
    assert step() and not launched and norm.num_batches_tracked._version > version
    wide = torch.randn(2 * x.numel()).bfloat16().view(x.shape[0], *x.shape[2:], 2 * x.shape[1]).permute(0, 3, 1, 2)
    assert step(wide[:, :16]) and not launched
    assert step(strided(grad.float()).bfloat16()) and not launched
