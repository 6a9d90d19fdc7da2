"""Linear layers as 1x1 convolutions."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from pycuda_conv.arrays import torch_internals
from pycuda_conv.nn import convert, linear


def operands(rows, features, outputs, bias=True, dtype=torch.float64, device="cpu"):
    torch.manual_seed(0)
    shapes = (*rows, features), (outputs, features), (outputs,)
    made = [torch.randn(*shape, dtype=dtype, device=device).requires_grad_() for shape in shapes]
    return made if bias else [*made[:2], None]


@pytest.mark.parametrize("most_rows", [2, 2**13], ids=["many rows", "few rows"])
@pytest.mark.parametrize("rows, bias", [((3,), False), ((2, 1, 2), True)], ids=str)
def test_products_are_those_of_a_linear_layer(monkeypatch, rows, bias, most_rows):
    monkeypatch.setattr(linear, "MOST_ROWS", most_rows)
    monkeypatch.setattr(linear, "_is_worth_it", lambda *_: True)
    given = operands(rows, 3, 2, bias)
    results = []
    for function in (linear.linear, F.linear):
        y = function(*given)
        asked = [one for one in given if one is not None]
        first = torch.autograd.grad(y.pow(2).sum(), asked, create_graph=True)
        results.append([y, *first, *torch.autograd.grad(sum(one.pow(2).sum() for one in first), asked)])
    for mine, wanted in zip(*results, strict=True):
        assert torch.allclose(mine, wanted)
    with torch.no_grad():
        assert torch.allclose(linear.linear(*given), F.linear(*given))


def test_only_large_layers_of_float32_on_a_gpu_are_taken(monkeypatch):
    def is_taken(rows=(64, 64), features=256, outputs=256, dtype=torch.float32, is_cuda=True, by=linear._is_worth_it, other=None):
        shape = (*rows, features)
        x = SimpleNamespace(
            dtype=dtype, is_cuda=is_cuda, shape=shape, dim=lambda: len(shape), numel=lambda: torch.Size(shape).numel()
        )
        weight = torch.empty(outputs, 256, device="meta", dtype=dtype if by is linear._is_worth_fusing else None)
        more = () if by is linear._is_worth_it else ((None, None if other is None else torch.empty(256, dtype=other, device="meta")),)
        return by(x, weight, *more)

    assert is_taken()
    others = {"rows": (64,), "features": 255, "outputs": 16, "dtype": torch.bfloat16, "is_cuda": False}
    assert not any(is_taken(**{name: value}) for name, value in others.items())
    assert not is_taken(rows=(0, 64)) and not is_taken(rows=())
    fewest = linear.LEAST_FUSED_ROWS
    assert is_taken(by=linear._is_worth_fusing, rows=(fewest,), dtype=torch.float16) and is_taken(by=linear._is_worth_fusing, rows=(7, 7))
    others |= {"rows": (fewest - 1,), "dtype": torch.float64}
    assert not any(is_taken(by=linear._is_worth_fusing, **{name: value}) for name, value in others.items())
    assert not is_taken(by=linear._is_worth_fusing, rows=(fewest,), outputs=2**15) and not is_taken(by=linear._is_worth_fusing, rows=(0, 9))
    assert not is_taken(by=linear._is_worth_fusing, other=torch.float16) and is_taken(by=linear._is_worth_fusing, other=torch.float32)
    for name, value in {"is_autocast_enabled": True, "get_float32_matmul_precision": "high"}.items():
        with monkeypatch.context() as patch:
            patch.setattr(torch, name, lambda *_, value=value: value)
            assert not is_taken()


def test_torch_s_newer_switch_is_read_where_the_older_one_refuses():
    """Torch's function raises an error where the two differ, as after ``torch.backends.cuda.matmul.fp32_precision = "tf32"``."""
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("torch before 2.9")
    before = matmul.fp32_precision
    try:
        for precision, exact in (("tf32", False), ("ieee", True)):
            matmul.fp32_precision = precision
            assert torch_internals.multiplies_in_float32() == exact
    finally:
        matmul.fp32_precision = before


def test_convert_takes_linear_layers_if_asked_and_gives_them_back():
    class Own(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(torch.nn.Linear(4, 3), Own(3, 2))
    x, before = torch.randn(5, 4), list(model.state_dict())
    wanted = model(x)
    assert type(convert(model)[0]) is torch.nn.Linear
    made = convert(model, linear=True)
    assert type(made[0]) is not torch.nn.Linear and isinstance(made[0], torch.nn.Linear) and type(made[1]) is Own
    assert str(made[0]).replace(", by pycuda_conv", "") == str(torch.nn.Linear(4, 3)) and list(made.state_dict()) == before
    assert type(copy.deepcopy(made)[0]) is type(made[0])
    assert torch.equal(made(x), wanted)
    assert type(convert(made)[0]) is torch.nn.Linear


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows, moved", [((2, 3, 5), True), ((2, 3, 5), False), ((2, 7), False), ((9,), False)])
def test_what_follows_a_layer_is_computed_with_it(monkeypatch, rows, moved, bias):
    monkeypatch.setattr(linear, "_is_worth_fusing", lambda *_: True)
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 3, bias).double()
    layer = module.weight, module.bias
    x, scale = torch.randn(*rows, 4, dtype=torch.float64), torch.nn.Parameter(torch.randn(3, 1, 1, dtype=torch.float64))
    y = F.linear(x, module.weight, module.bias)
    y = y.permute(0, 3, 1, 2) if moved else y
    residual = torch.randn_like(y)
    with torch.no_grad():
        assert torch.allclose(linear._in_one(x, *layer, None, None, "gelu", moved), F.gelu(y))
        assert torch.allclose(linear._in_one(x, *layer, None, residual, None, moved), y + residual)
        assert linear._in_one(x, *layer, None, None, None, False) is None  # torch's product is as fast
        for _ in range(3 if moved else 0):
            assert torch.allclose(linear._in_one(x, *layer, scale, residual, None, True), y * scale + residual)
            assert torch.allclose(linear.in_one(x, *layer, scale, None, "relu", True), F.relu(y * scale))
            scale.add_(1)


def test_a_layer_and_what_follows_it_lie_as_a_convolution_s_result():
    x, weight, scale = torch.randn(2, 3, 5, 4), torch.randn(4, 4), torch.randn(4, 1, 1)
    made = linear.in_one(x, weight, None, scale, torch.randn(2, 4, 3, 5), None, True)
    assert made.is_contiguous(memory_format=torch.channels_last) and not made.is_contiguous()


def off(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "rows, features, outputs, bias", [((2, 48, 96), 96, 384, True), ((8, 50), 768, 512, False), ((1100,), 130, 1002, True)]
)
def test_on_a_gpu(rows, features, outputs, bias):
    given = operands(rows, features, outputs, bias, torch.float32, "cuda")
    layer = torch.nn.Linear(features, outputs, bias).cuda()
    layer.weight, layer.bias = (None if one is None else torch.nn.Parameter(one) for one in given[1:])
    ours, dy = convert(copy.deepcopy(layer), linear=True), torch.randn(*rows, outputs, device="cuda")
    assert linear._is_worth_it(given[0], layer.weight)

    def results(layer, x, dy):
        y = layer(x)
        return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy)]

    exact = results(copy.deepcopy(layer).double(), given[0].double(), dy.double())
    found, theirs, again = (results(one, given[0], dy) for one in (ours, layer, ours))
    for mine, other, same, right in zip(found, theirs, again, exact, strict=True):
        assert mine.shape == other.shape and mine.is_contiguous() and torch.equal(mine, same)
        assert off(mine, right) <= max(2 * off(other, right), 1e-6)
    with torch.autocast("cuda", torch.bfloat16):
        assert ours(given[0]).dtype is torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("features, size", [(96, (2, 14, 13)), (768, (1, 7, 7))])
def test_what_follows_a_layer_on_a_gpu(dtype, features, size):
    torch.manual_seed(0)
    first, second = torch.nn.Linear(features, 4 * features).cuda(), torch.nn.Linear(4 * features, features).cuda()
    scale = torch.nn.Parameter(torch.randn(features, 1, 1, device="cuda"))
    x = torch.randn(*size, features, device="cuda")

    def blocks(first, second, scale, x, ours):
        with torch.no_grad():
            if ours:
                y = linear._in_one(x, first.weight, first.bias, None, None, "gelu", False)
                return linear._in_one(y, second.weight, second.bias, scale, x.movedim(-1, 1), None, True)
            return scale * second(F.gelu(first(x))).movedim(-1, 1) + x.movedim(-1, 1)

    exact = blocks(*(copy.deepcopy(one).double() for one in (first, second)), scale.double(), x.double(), False)
    given = [*(copy.deepcopy(one).to(dtype) for one in (first, second)), torch.nn.Parameter(scale.to(dtype)), x.to(dtype)]
    theirs = off(blocks(*given, False), exact)
    found = blocks(*given, True)
    assert found.is_contiguous(memory_format=torch.channels_last) and off(found, exact) <= max(2 * theirs, 1e-6)
