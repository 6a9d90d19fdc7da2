"""Group and instance norms in graphs of torch.compile: which become this package's, and that nothing else changes."""

from __future__ import annotations

import copy

import pytest
import simt  # noqa: F401  # before torch
import torch
from test_compile import FOUND, GRAPHS, afresh, alike, compiled, images  # noqa: F401
from torch import nn
from torch.nn import functional as F

from pycuda_conv.nn import conv_norms, normalise
from pycuda_conv.nn.autograd import Settings
from pycuda_conv.nn.graph import group_norms
from pycuda_conv.nn.options import asked_for


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    """On the CPU too, where torch computes what the kernels would."""
    monkeypatch.setattr(normalise, "pays", lambda x: x.dtype in normalise._TYPES)


def norms():
    """The norms that became this package's, in all graphs since the last reset."""
    return [steps for graph in FOUND for found in graph for steps in found.others]


def all_norms():
    """Those with a convolution too."""
    return norms() + [steps for graph in FOUND for found in graph for steps in found.fused]


def nodes(kind):
    return [n for gm in GRAPHS for n in gm.graph.nodes if n.op == kind]


class Block(nn.Module):
    """A residual block of a decoder."""

    def __init__(self, norm=lambda c: nn.GroupNorm(2, c), act=F.silu):
        super().__init__()
        self.norm, self.conv, self.act = norm(8), nn.Conv2d(8, 8, 3, padding=1), act

    def forward(self, x):
        return x + self.conv(self.act(self.norm(x)))


class ByHand(nn.Module):
    """A norm whose activation others read, and one without an activation."""

    def forward(self, x):
        y = F.group_norm(x, 4)
        return F.silu(y) + y, F.instance_norm(x).flatten(2)


HOWS = pytest.mark.parametrize("how", ["light", "operators"])


@pytest.mark.pairs
@HOWS
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", ["group", "instance"])
@pytest.mark.parametrize("act", [F.silu, F.gelu, torch.relu, nn.Identity(), F.hardswish])
def test_norm_and_activation_are_one_call(where, how, last, kind, act):
    torch.manual_seed(0)
    make = lambda c: nn.GroupNorm(2, c) if kind == "group" else nn.InstanceNorm2d(c, affine=True)  # noqa: E731
    block = Block(make, act)
    block = block.to(memory_format=torch.channels_last) if last else block
    alike(lambda: block, how, False, None, images(2, 8, 6, 5, channels_last=last, where=where))
    taken = act not in (F.hardswish,) and not isinstance(act, nn.Identity)
    assert len(norms()) == 1 and FOUND[0][0].others[0][0] == "norm"
    left = [n for n in nodes("call_function") if n.target in (F.silu, F.gelu, torch.relu)]
    assert not left if taken else True
    assert not [n for n in nodes("call_method") if n.target == "contiguous"]


@HOWS
def test_results_that_others_read_lie_as_torchs(where, how):
    torch.manual_seed(0)
    x = images(2, 8, 6, 5, channels_last=True, where=where)
    model = compiled(ByHand(), how)
    with torch.no_grad():
        found, wanted = model(x), ByHand()(x)
    assert len(norms()) == 2
    for a, b in zip(found, wanted, strict=True):
        assert a.stride() == b.stride() and torch.allclose(a, b, atol=1e-5)


@HOWS
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_what_is_added_to_the_channels_of_an_image(where, how, last, turned):
    class Timed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.time, self.norm, self.last = nn.Conv2d(4, 8, 3), nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 3)
            self.register_buffer("embedding", torch.randn(2, 6))

        def forward(self, x):
            y, more = self.first(x), self.time(self.embedding)[:, :, None, None]
            y = more + y if turned else y + more
            return self.last(F.silu(self.norm(y)))

    torch.manual_seed(0)
    timed = Timed()
    timed = timed.to(memory_format=torch.channels_last) if last else timed
    alike(lambda: copy.deepcopy(timed), how, False, None, images(2, 4, 9, 8, channels_last=last, where=where))
    sums = [n for n in nodes("call_function") if n.target in (torch.add, __import__("operator").add)]
    assert any("norm" in steps for steps in all_norms()) and not (last and sums)


class OfPixels(nn.Module):
    """RMS norms over channels, as decoders of videos write them; `kind` says what is different."""

    def __init__(self, kind="", axes=2):
        super().__init__()
        self.kind, self.conv = kind, getattr(nn, f"Conv{axes}d")(8, 8, 3, padding=1)
        self.gamma = nn.Parameter(torch.rand(8, *[1] * axes) + 0.5)

    def forward(self, x):
        y = F.normalize(x, dim=2 if self.kind == "axis" else 1)
        y = y * (8 if self.kind == "factor" else 8**0.5)
        y = (self.gamma * y + 0.0) if self.kind == "turned" else y * self.gamma
        return self.conv(y + y.mean() if self.kind == "read" else F.silu(y))


@HOWS
@pytest.mark.turns
@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("kind, last, taken", [
    ("", True, True), ("turned", True, True), ("read", True, True), ("", False, False), ("axis", True, False), ("factor", True, False),
])  # fmt: skip
def test_rms_norms_of_pixels(where, how, axes, kind, last, taken):
    """Those whose channels lie last; pixels of zeros stay zeros."""
    torch.manual_seed(0)
    x = torch.randn(2, 8, *(5, 4, 6)[:axes], device=where)
    x[0, :, 1] = 0
    form = {2: torch.channels_last, 3: torch.channels_last_3d}[axes]
    x = x.contiguous(memory_format=form) if last else x
    model = OfPixels(kind, axes)
    model.conv.to(memory_format=form if last else torch.contiguous_format)
    alike(lambda: copy.deepcopy(model), how, False, None, x)
    assert len(norms()) == taken
    alike(lambda: copy.deepcopy(model), how, True, "parameters", x)
    assert not norms()


class Times(nn.Module):
    """Blocks that apply an activation to one embedding, each for itself; `kind` says what is different."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.layers = kind, nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)])

    def forward(self, x):
        e, seen = x.mean((2, 3)), []
        for i, layer in enumerate(self.layers):
            a = F.gelu(e) if self.kind == "others" and i else F.silu(e)
            if self.kind == "written" and i == 1:
                a.mul_(2)
            if self.kind == "input" and i == 1:
                e.add_(1)
            seen.append(a)
            x = layer(x) + a[:, :, None, None]
        return (x, *seen) if self.kind == "returned" else x


@pytest.mark.parametrize("kind, left", [("", 1), ("others", 2), ("written", 2), ("input", 2), ("returned", 3)])
def test_an_activation_that_is_computed_twice_becomes_one(where, kind, left):
    torch.manual_seed(0)
    model, x = Times(kind).to(where), images(2, 8, 6, 5, where=where)
    ours = compiled(copy.deepcopy(model), "light")
    with torch.no_grad():
        found, wanted = ours(x), model(x)
    for a, b in zip(found if kind == "returned" else [found], wanted if kind == "returned" else [wanted], strict=True):
        assert torch.allclose(a, b, atol=1e-4)
    assert len([n for n in nodes("call_function") if n.target in (F.silu, F.gelu)]) == left
    if kind == "returned":
        assert len({one.data_ptr() for one in found}) == 4


@pytest.mark.parametrize("gradients", ["parameters", "input"])
def test_what_else_reads_a_trained_norms_input_gets_it_from_the_norm(where, gradients):
    """So the launch of the norm's gradient adds the other."""
    torch.manual_seed(0)
    alike(Block, "light", True, gradients, images(2, 8, 6, 5, where=where))
    passed = [n for n in nodes("call_function") if n.target is __import__("operator").getitem and n.args[1] == 1]
    assert len(passed) == (gradients == "input")  # else its input is known to need no gradient


class Two(nn.Module):
    """A convolution, a norm and another; `kind` says what is normalised besides, in groups of `n`."""

    def __init__(self, kind, n):
        super().__init__()
        self.kind, self.first, self.norm, self.last = kind, nn.Conv2d(4, 8, 3), nn.GroupNorm(n, 8), nn.Conv2d(8, 4, 3)

    def forward(self, x):
        y = self.first(x)
        z = self.last(F.silu(self.norm(y)))
        return z, F.relu(F.group_norm(z, 2)) if self.kind == "last" else F.silu(F.group_norm(y, 2))


@HOWS
def test_a_convolution_and_its_norm_are_one_call(where, how, monkeypatch):
    """The last one's result is read twice."""
    monkeypatch.setattr(group_norms, "JOINS", True)
    torch.manual_seed(0)
    two = Two("last", 2).to(memory_format=torch.channels_last)
    two, x = two.to(where).eval(), images(2, 4, 9, 8, channels_last=True, where=where)
    with torch.no_grad():
        for a, b in zip(compiled(two, how)(x), two(x), strict=True):
            assert a.stride() == b.stride() and torch.allclose(a, b, atol=1e-4)
    assert [steps for graph in FOUND for found in graph for steps in found.fused] == [("first", "norm", "silu")] and len(norms()) == 1
    assert [name for graph in FOUND for found in graph for name, _ in found.alone] == ["last"]


def plain_convolution(**more):
    settings = Settings(2, (1, 1), ((1, 1), (1, 1)), (1, 1), 1, "fp32", None, False)._replace(**more)
    return asked_for(settings, None, 0.0, size=(0, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("channels, size, noted", [(64, 256, True), (256, 256, None), (64, 64, False), (64, 257, False)])
@pytest.mark.parametrize("with_more", [False, True])
def test_statistics_noted_by_the_convolution(channels, size, noted, with_more):
    torch.manual_seed(0)
    x = torch.randn(2, 64, size, size, device="cuda").half().to(memory_format=torch.channels_last)
    w = torch.randn(channels, 64, 3, 3, device="cuda").half() / 24
    bias, gamma, beta = (torch.randn(channels, device="cuda").half() for _ in range(3))
    more = torch.randn(2, channels, device="cuda").half() if with_more else None
    w = w.to(memory_format=torch.channels_last)
    conv, asked = plain_convolution(), normalise.Asked(8, 0, 1e-5, False, "silu")
    found = conv_norms._found(conv, asked, x, w, bias, gamma, beta, more)
    assert noted is None or found.noted == noted
    for _ in range(3):
        y, out = conv_norms.conv_norm(conv, asked, x, w, bias, gamma, beta, more)
        assert torch.equal(y, F.conv2d(x, w, bias, padding=1)) or torch.allclose(y, F.conv2d(x, w, bias, padding=1), atol=1e-2, rtol=1e-2)
        exact = y.double() if more is None else y.double() + more.double()[:, :, None, None]
        wanted = F.silu(F.group_norm(exact, 8, gamma.double(), beta.double()))
        assert out.stride() == y.stride() and float((out.double() - wanted).norm() / wanted.norm()) < 3e-4


@HOWS
def test_autocast_narrows_where_only_convolutions_read(where, how):
    torch.manual_seed(0)

    model, x = Two("first", 4).to(where), images(2, 4, 9, 8, where=where)
    with torch.no_grad(), torch.autocast(where, torch.bfloat16):
        wanted, found = model(x), compiled(model, how)(x)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype is b.dtype and torch.allclose(a.float(), b.float(), atol=0.05)
    assert ("norm", "silu") in norms()  # the other one's float32 is returned
    assert len(norms()) == (1 if where == "cuda" else 2)  # on the CPU torch's autocast lets norms be


@HOWS
def test_training_under_autocast(where, how):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(4, 8, 3), Block(), Block(act=F.gelu)).to(where, memory_format=torch.channels_last)
    again, x = copy.deepcopy(block), images(2, 4, 9, 8, channels_last=True, where=where)
    for model in (block, compiled(again, how)):
        with torch.autocast(where, torch.bfloat16):
            y = model(x)
        y.float().square().mean().backward()
    for a, b in zip(block.parameters(), again.parameters(), strict=True):
        assert b.grad is not None and (a.grad - b.grad).norm() < 0.03 * a.grad.norm() + 1e-4
    assert len(norms()) == 2


@pytest.mark.parametrize("gradients", [None, "input"])
@HOWS
def test_layer_norms_in_light_mode(where, how, gradients):
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.layer, self.rms, self.plain = nn.Conv2d(4, 8, 3), nn.LayerNorm(8), nn.RMSNorm(8, eps=1e-6), nn.LayerNorm((5, 8))

        def forward(self, x):
            y = self.layer(self.conv(x).permute(0, 2, 3, 1).contiguous())
            y = self.rms(y)[:, :, :5]
            return self.plain(y[:, :, :5]).permute(0, 3, 1, 2)

    torch.manual_seed(0)
    model = Rows().to(memory_format=torch.channels_last)
    alike(lambda: copy.deepcopy(model), how, False, gradients, images(2, 4, 9, 9, channels_last=True, where=where))
    taken = {name for steps in norms() for name in steps}
    assert taken == ({"layer", "rms"} if how == "light" else set())  # the last one reads a slice


@HOWS
def test_what_stays_torchs(where, how):
    class Others(nn.Module):
        def __init__(self):
            super().__init__()
            self.running = nn.InstanceNorm2d(8, track_running_stats=True)

        def forward(self, x):
            return self.running(x), F.group_norm(x.double(), 2), F.group_norm(x.flatten(1), 2)

    with torch.no_grad():
        compiled(Others().to(where).eval(), how)(images(2, 8, 6, 5, where=where))
    assert not norms()
