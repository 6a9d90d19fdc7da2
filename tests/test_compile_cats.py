"""Concatenations that begin with an earlier one: in light mode those that are trained take its result."""

import copy

import pytest
import torch
from test_compile import GRAPHS, HOWS, afresh, alike, close, compiled, images, moved  # noqa: F401
from torch import nn
from torch.nn import functional as F

from pycuda_conv.nn.graph.steps import CATS


class Dense(nn.Module):
    """A block of a DenseNet; `way` is done to what its layers have made."""

    def __init__(self, way=lambda features, cat: None, axis=1):
        super().__init__()
        self.norms, self.convs = (
            nn.ModuleList(make(n) for n in range(4, 10, 2)) for make in (nn.BatchNorm2d, lambda n: nn.Conv2d(n, 2, 3, padding=1))
        )
        self.last, self.way, self.axis = nn.Conv2d(10, 3, 1), way, axis

    def forward(self, x):
        features = [torch.tanh(x)]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            y = torch.cat(features, self.axis)
            self.way(features, y)
            features.append(conv(F.relu(norm(y))))
        return self.last(torch.cat(features, 1))


def widths():
    """How many arrays each concatenation of the graphs takes."""
    return [[len(node.args[0]) for node in gm.graph.nodes if node.op == "call_function" and node.target in CATS] for gm in GRAPHS]


@pytest.mark.pairs
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("train, gradients", [(True, True), (True, "input"), (False, False)])
@pytest.mark.parametrize("axis", [1, -3])
def test_a_block_of_a_densenet(axis, train, gradients, how, where):
    x = images(where=where)
    alike(lambda: moved(Dense(axis=axis)), how, train, gradients, x)
    nested = train and how == "light"
    assert all(one == ([1, 2, 2, 2] if nested else [1, 2, 3, 4]) for one in widths()), widths()


WAYS = {"written": lambda features, cat: features[0].add_(0.1), "swapped": lambda features, cat: features.reverse()}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_the_earlier_one(way):
    """What is written, or lies in another order, is concatenated anew."""
    theirs = moved(Dense(WAYS[way]))
    ours, x = copy.deepcopy(theirs), images()
    found, wanted = compiled(ours)(x), theirs(x)
    assert close(found, wanted) and widths() == [[1, 2, 3, 4]]
    found.square().sum().backward(), wanted.square().sum().backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert close(p.grad, q.grad)


def written(a, b):
    return torch.cat([a, b], 1).mul_(2), torch.cat([a, b, a], 1)


def without_gradients(a, b):
    with torch.no_grad():
        first = torch.cat([a, b], 1)
    return first, torch.cat([a, b, b], 1)


def of_two_types(a, b):
    return torch.cat([a, b], 1), torch.cat([a, b, a.double()], 1).float()


@pytest.mark.parametrize("call", [written, without_gradients, of_two_types])
def test_what_is_no_beginning(call):
    def both(x, w):
        first, second = call(torch.tanh(x), torch.sin(x))
        return torch.cat([F.conv2d(first, w), second[:, 8:]], 1)

    x, w = images().requires_grad_(), torch.randn(3, 8, 1, 1, requires_grad=True)
    found, wanted = compiled(both)(x, w), both(x, w)
    assert close(found, wanted) and widths() == [[2, 3, 2]]
    assert all(close(*two) for two in zip(*(torch.autograd.grad(one.square().sum(), (x, w)) for one in (found, wanted)), strict=True))
