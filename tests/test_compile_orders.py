"""Activations behind steps that change the shape alone, which move in front of them, and the order of filters that a graph computes."""

import pytest
import torch
from test_compile import FOUND, GRAPHS, HOWS, afresh, alike, images  # noqa: F401
from torch import nn
from torch.nn import functional as F


class Of(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.conv, self.norm, self.call = nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.BatchNorm2d(4), call

    def forward(self, x):
        return self.call(self, x)


def tokens(s, x):
    """As SegFormer's feed-forward part has its depthwise convolution."""
    n, length, channels = x.shape
    y = s.conv(x.transpose(1, 2).view(n, channels, 10, length // 10))
    return F.gelu(y.flatten(2).transpose(1, 2))


def read_twice(s, x):
    y = s.conv(x).flatten(2)
    return F.gelu(y) + y


def without_gradients(s, x):
    with torch.no_grad():
        return F.gelu(s.conv(x).flatten(2))


#: For each: its forward, the shape of its input, and the chain's steps.
FORWARDS = {
    "tokens": (tokens, (2, 100, 4), 2), "in place": (lambda s, x: F.relu_((s.norm(s.conv(x)) + x).permute(0, 2, 3, 1)), (2, 4, 10, 10), 4),
    "reshaped": (lambda s, x: F.silu(torch.reshape(s.conv(x).unsqueeze(1), (x.shape[0], -1))), (2, 4, 10, 10), 2),
    "read twice": (read_twice, (2, 4, 10, 10), 0), "cut": (lambda s, x: F.gelu(s.conv(x)[:, :, 1:]), (2, 4, 10, 10), 0),
    "other bits": (lambda s, x: F.gelu(s.conv(x.bfloat16().float()).view(torch.int32).view(torch.float32)), (2, 4, 10, 10), 2),
    "without gradients": (without_gradients, (2, 4, 10, 10), 2),
}  # fmt: skip


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", FORWARDS)
def test_activations_behind_views(name, how):
    call, shape, count = FORWARDS[name]
    found = alike(lambda: Of(call), how, False, False, images(*shape))
    assert [len(steps) for steps in found] == [count] * bool(count)
    assert sum(len(one.fused) + len(one.alone) for graph in FOUND for one in graph) == 1
    if count:
        assert not any(getattr(node.target, "__name__", "") in ("gelu", "silu", "relu_") for node in GRAPHS[-1].graph.nodes)
    alike(lambda: Of(call), how, True, True, images(*shape))
    alike(lambda: Of(call), how, False, "input", images(*shape))


class Standardised(nn.Module):
    """Layers whose filters are computed in each call, as those of networks without norms are."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, 4, 1), nn.Conv2d(4, 4, 3, groups=4)])

    def forward(self, x):
        for conv in self.convs:
            weight = F.batch_norm(conv.weight.reshape(1, conv.out_channels, -1), None, None, training=True).reshape_as(conv.weight)
            x = F.relu(F.conv2d(x, weight, conv.bias, padding=conv.padding, groups=conv.groups))
        return x


@pytest.mark.pairs
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_filters_that_are_computed(last, train, how):
    """A compiler writes them in the order of the input's axes; the others lie alike in both orders."""
    alike(Standardised, how, train, train, images(2, 4, 9, 9, channels_last=last))
    turned = [node for node in GRAPHS[-1].graph.nodes if node.target == "contiguous"]
    assert len(turned) == (last and how == "operators")
    assert sum(len(one.fused) + len(one.alone) for one in FOUND[-1]) == 3
