"""Activations behind steps that change the shape alone: they are computed with the convolution in front of these steps."""

import pytest

torch = pytest.importorskip("torch")
from test_compile import FOUND, GRAPHS, HOWS, afresh, alike, images  # noqa: E402, F401
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402


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


def in_place(s, x):
    return F.relu_((s.norm(s.conv(x)) + x).permute(0, 2, 3, 1))


def reshaped(s, x):
    return F.silu(torch.reshape(s.conv(x).unsqueeze(1), (x.shape[0], -1)))


def read_twice(s, x):
    y = s.conv(x).flatten(2)
    return F.gelu(y) + y


def cut(s, x):
    return F.gelu(s.conv(x)[:, :, 1:])


def of_other_bits(s, x):
    return F.gelu(s.conv(x.bfloat16().float()).view(torch.int32).view(torch.float32))


def without_gradients(s, x):
    with torch.no_grad():
        return F.gelu(s.conv(x).flatten(2))


#: For each: its forward, the shape of its input, and the chain's steps.
FORWARDS = {
    "tokens": (tokens, (2, 100, 4), 2), "in place": (in_place, (2, 4, 10, 10), 4), "reshaped": (reshaped, (2, 4, 10, 10), 2),
    "read twice": (read_twice, (2, 4, 10, 10), 0), "cut": (cut, (2, 4, 10, 10), 0), "other bits": (of_other_bits, (2, 4, 10, 10), 2),
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
