"""Borders other than zeros in graphs of torch.compile: a padding joins the convolution behind it, and what follows is fused as with
zeros."""

import pytest
import torch
from test_compile import FOUND, GRAPHS, HOWS, afresh, alike, compiled, images  # noqa: F401
from torch import nn
from torch.nn import functional as F

import pycuda_conv.nn as pn
from pycuda_conv.nn.evaluation import evaluate, spec_of
from pycuda_conv.nn.options import _Options


def block(ndim=2, mode="reflect", padding=1):
    conv, norm = getattr(nn, f"Conv{ndim}d"), getattr(nn, f"BatchNorm{ndim}d")
    made = nn.Sequential(conv(4, 4, 3, padding=padding, padding_mode=mode, bias=False), norm(4), nn.ReLU())
    nn.init.uniform_(made[1].running_mean)
    nn.init.uniform_(made[1].running_var, 0.5, 2)
    return made


def pads():
    """The steps that pad, in the last graph."""
    return [node for node in GRAPHS[-1].graph.nodes if getattr(node.target, "__name__", "").endswith("pad")]


class Of(nn.Module):
    """A block whose forward calls a function of it."""

    def __init__(self, call, layer):
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x):
        return self.call(self.layer, x)


@pytest.mark.pairs
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", ["torch's", "converted"])
@pytest.mark.parametrize("mode", ["reflect", "circular", "replicate"])
def test_layers_with_a_border_are_fused(mode, kind, how):
    def make():
        model = Of(lambda layer, x: layer(x), block(2, mode, (1, 2)))
        return pn.convert(model) if kind == "converted" else model

    (steps,) = alike(make, how, False, False)
    assert steps[0].startswith("layer.0") and len(steps) == 3 and not pads()
    (steps,) = alike(make, how, True, True)
    assert len(steps) == 3 and len(pads()) == 1  # a layer that is trained has zeros around it


@pytest.mark.parametrize("ndim, how", [(1, "light"), (3, "operators")])
def test_other_numbers_of_axes(ndim, how):
    assert len(alike(lambda: Of(lambda layer, x: layer(x), block(ndim, "circular")), how, False, False, images(2, 4, *(6,) * ndim))) == 1
    assert not pads()


def behind(pad, own=0):
    """A block behind steps that pad, with zeros of its own."""
    return lambda layer, x: layer[2](layer[1](F.conv2d(pad(x), layer[0].weight, padding=own)))


def earth(x):
    """Around it goes on."""
    return F.pad(x, (1, 1, 0, 0), mode="circular")


def written_before_the_end(layer, x):
    x = x + 1
    y = F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), layer[0].weight)
    x.mul_(2)
    return layer[2](layer[1](y)) + x


#: For each: its forward, the chain's length, steps that pad, and in training.
FORWARDS = {
    "filled": (behind(lambda x: F.pad(x, (1, 1, 0, 2), value=1.5)), 4, 0, 1), "mirrored": (behind(lambda x: F.pad(x, (1, 1, 0, 2), mode="reflect")), 4, 0, 1),
    "globe": (behind(lambda x: F.pad(earth(x), (0, 0, 2, 1))), 5, 0, 1), "globe's own zeros": (behind(earth, (1, 0)), 4, 0, 1),
    "twice": (behind(lambda x: F.pad(F.pad(x, (1, 1, 1, 1)), (1, 0, 2, 1))), 5, 0, 0),
    "mirrored and padded": (behind(lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), 1), 3, 1, 1),
    # in the corners the order of the steps counts
    "two numbers": (behind(lambda x: F.pad(F.pad(x, (1, 1, 0, 0), value=2.0), (0, 0, 1, 1), value=3.0)), 4, 1, 2),
    "with residual": (lambda layer, x: F.silu(layer[1](F.conv2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), layer[0].weight)) + x), 5, 0, 1),
    "written before the end": (written_before_the_end, 3, 1, None), "alone": (lambda layer, x: F.conv2d(F.pad(x, (2, 1, 0, 3), mode="reflect"), layer[0].weight), 2, 0, 0),
}  # fmt: skip


@pytest.mark.turns
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", FORWARDS)
def test_what_pads_joins(name, how):
    call, length, evaluated, trained = FORWARDS[name]
    (steps,) = alike(lambda: Of(call, block()), how, False, False)
    assert len(steps) == length and len(pads()) == evaluated
    if trained is not None:
        alike(lambda: Of(call, block()), how, True, True)
        assert len(pads()) == trained


def test_a_mirror_wider_than_the_image_is_not_trained_with_its_norm():
    """Torch's pad refuses it, and the convolution computes it: so it stays alone."""
    model = pn.convert(Of(lambda layer, x: layer(x), nn.Sequential(nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4))))
    assert isinstance(model.layer[0], pn.Conv2d)
    model.layer[0].padding, model.layer[0].padding_mode = (5, 1), "reflect"
    model.layer[0]._reversed_padding_repeated_twice = [1, 1, 5, 5]
    x = images(2, 4, 4, 6)
    eager = model(x)
    assert torch.allclose(compiled(model)(x), eager, atol=1e-4)
    assert [len(found.alone) for graph in FOUND for found in graph] == [1]


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_options_as_a_list(ndim):
    modes = [("reflect", "zeros"), ("circular", "symmetric"), ("constant", "replicate")][:ndim]
    size, padding = (3,) * ndim, tuple((i, i + 1) for i in range(ndim))
    spec = spec_of(ndim, size, padding=padding, padding_mode=modes, padding_value=-0.3, activation=("leaky_relu", 0.25), groups=2)
    options = _Options.of(tuple(spec))
    assert options.settings.padding_mode == tuple(modes) and options.settings.padding_value == -0.3 and options.settings.padding == padding
    assert options.activation == ("leaky_relu", 0.25) and not options.transposed and options.settings.groups == 2
    plain = _Options.of(tuple(spec_of(ndim, size, padding=padding)))
    assert plain.settings.padding_mode == "zeros" and plain.settings.padding_value == 0


@pytest.mark.parametrize("channels", [4, 32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("last", [False, True])
def test_a_layer_in_evaluation(dtype, last, channels, where):
    """Three calls each, the last of which the launcher in C repeats."""
    x = images(2, channels, 9, 7, channels_last=last, dtype=dtype, where=where)
    w = torch.randn(6, channels, 3, 3, dtype=dtype, device=where) / channels**0.5
    gamma, beta, mean, var = (torch.rand(6, device=where) + 0.5 for _ in range(4))
    residual = torch.randn(2, 6, 9, 7, dtype=dtype, device=where)
    for mode, value in (("reflect", 0.0), ("constant", 2.0), ((("circular", "zeros"), "replicate"), 0.0)):
        more = {"padding": 1, "padding_mode": mode, "padding_value": value}
        found = [evaluate(x, w, None, gamma, beta, mean, var, 1e-3, residual, "relu", **more) for _ in range(3)]
        wide = x.double()
        if mode == "constant":
            wide = F.pad(wide, (1, 1, 1, 1), value=value)
        elif mode == "reflect":
            wide = F.pad(wide, (1, 1, 1, 1), mode="reflect")
        else:
            wide = F.pad(F.pad(F.pad(wide, (1, 1, 0, 0), mode="replicate"), (0, 0, 1, 0), mode="circular"), (0, 0, 0, 1))
        expected = F.batch_norm(F.conv2d(wide, w.double()), mean.double(), var.double(), gamma.double(), beta.double(), False, 0.0, 1e-3)
        expected = (expected + residual.double()).relu()
        for one in found:
            assert torch.allclose(
                one.double(), expected, rtol=2e-3 if dtype is torch.float16 else 1e-5, atol=2e-2 if dtype is torch.float16 else 1e-4
            )
