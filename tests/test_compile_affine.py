"""Factors and summands for each channel behind convolutions: frozen norms, scales of layers, biases of the user's own."""

import pytest
import torch
from test_compile import FOUND, GRAPHS, HOWS, afresh, alike, images  # noqa: F401
from torch import nn
from torch.nn import functional as F

from pycuda_conv.nn.evaluation import evaluate


class FrozenNorm(nn.Module):
    """As detectors have it."""

    def __init__(self, channels):
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(channels) + 0.5)

    def forward(self, x):
        w, b, rv, rm = (getattr(self, name).reshape(1, -1, 1, 1) for name in ("weight", "bias", "running_var", "running_mean"))
        scale = w * (rv + 1e-5).rsqrt()
        return x * scale + (b - rm * scale)


class Of(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.conv, self.wide, self.norm, self.call = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1, bias=False), FrozenNorm(4), call
        self.gamma, self.scale = nn.Parameter(torch.rand(4) + 0.5), nn.Parameter(torch.rand(4, 1, 1) + 0.5)
        self.shift = nn.Parameter(torch.rand(1, 4, 1, 1))
        self.row, self.square = nn.Parameter(torch.rand(10)), nn.Parameter(torch.rand(2, 2) + 0.5)

    def forward(self, x):
        return self.call(self, x)


def in_place(s, x):
    y = s.conv(x)
    y *= s.scale
    y += s.shift
    return F.relu_(y)


def written(s, x):
    """The input may share the parameter's memory, for all that dynamo guards."""
    with torch.no_grad():
        y = s.conv(x)
        s.gamma.mul_(2)
        return y * s.gamma.view(-1, 1, 1)


#: For each: its forward, the chain's steps, and whether its vectors are read at the graph's start.
FORWARDS = {
    "frozen": (lambda s, x: F.relu(s.norm(s.conv(x)) + x), 4, False),
    "layer scale": (lambda s, x: x + s.conv(x) * s.gamma.reshape(1, -1, 1, 1), 3, True),
    "shaped parameters": (lambda s, x: F.silu(s.wide(x) * s.scale + s.shift), 4, False),
    "in place": (in_place, 4, False), "own bias": (lambda s, x: F.gelu(s.shift + s.wide(x)), 3, False),
    "summand first": (lambda s, x: (s.conv(x) + s.shift) * s.scale, 2, False),  # another formula, of which the chain takes the summand
    "turned": (lambda s, x: s.conv(x) * s.square.t().reshape(1, 4, 1, 1), 2, False),  # the numbers do not lie as in the parameter
    "gate": (lambda s, x: s.conv(x) * torch.sigmoid(x.mean((2, 3), keepdim=True)), 0, None),
    "of columns": (lambda s, x: s.conv(x) * s.row, 0, None), "scalar": (lambda s, x: F.relu(s.conv(x) * 2.0), 0, None),
    "written": (written, 0, None),
}  # fmt: skip


@pytest.mark.turns
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", FORWARDS)
def test_factors_and_summands(name, how, where):
    call, count, early = FORWARDS[name]
    found = alike(lambda: Of(call), how, False, False, images(2, 4, 10, 10, where=where))
    assert [len(steps) for steps in found] == [count] * bool(count), found
    if early is not None:
        names = [getattr(node.target, "__name__", "") for node in GRAPHS[-1].graph.nodes]
        assert any("scaled" in one for one in names) == early
    if name != "written":
        alike(lambda: Of(call), how, True, True, images(2, 4, 10, 10, where=where))
        assert sum(len(one.alone) for graph in FOUND for one in graph) == 1


@pytest.mark.parametrize("dtype, limit", [(torch.float16, 2e-2), (torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("given", [(True, False), (False, True), (True, True)])
def test_a_factor_or_a_summand_alone(where, given, dtype, limit):
    x = images(2, 4, 9, 7, channels_last=True, dtype=dtype, where=where)
    w, b = torch.randn(6, 4, 3, 3, dtype=dtype, device=where) / 6, torch.randn(6, dtype=dtype, device=where)
    wide = torch.float32 if dtype is torch.float16 else dtype
    gamma, beta = (torch.randn(6, dtype=wide, device=where) if one else None for one in given)
    for bias in (None, b):
        y = F.conv2d(x.double(), w.double(), None if bias is None else bias.double())
        y = y if gamma is None else y * gamma.double().view(-1, 1, 1)
        y = y if beta is None else y + beta.double().view(-1, 1, 1)
        for _ in range(3):  # the third call is repeated
            assert (evaluate(x, w, bias, gamma, beta) - y).abs().max() < limit
