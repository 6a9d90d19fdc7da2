"""What of the backend's modes and options reaches inductor, with inductor's door watched: nothing is compiled."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pycuda_conv.nn as pn


@pytest.fixture
def patches(monkeypatch):
    """The settings with which inductor was asked to compile, a dict for each graph."""
    from torch._inductor import compile_fx

    found = []

    def watched(gm, example_inputs, *, config_patches):
        found.append(config_patches)
        return torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs)

    monkeypatch.setattr(compile_fx, "compile_fx", watched)
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


class Block(nn.Module):  # torch compiles nothing of a bare nn.Sequential
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


@pytest.mark.pairs
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("way", ["pn.compile", "module.compile", "torch.compile"])
@pytest.mark.parametrize(
    "mode, wanted",
    [
        ("default", {}), ("reduce-overhead", {"triton.cudagraphs": True}), ("max-autotune-no-cudagraphs", {"max_autotune": True}),
        ("max-autotune", {"max_autotune": True, "triton.cudagraphs": True}),
    ],
)  # fmt: skip
def test_modes_reach_inductor(patches, mode, wanted, way, train):
    theirs, x = Block().train(train), torch.randn(2, 3, 8, 8)
    ours = copy.deepcopy(theirs)
    if way == "pn.compile":
        f = pn.compile(ours, mode)
    elif way == "module.compile":
        ours.compile(backend=pn.backend, mode=mode)
        f = ours
    else:
        f = torch.compile(ours, backend=pn.backend, options={"mode": mode})
    with torch.set_grad_enabled(train):
        torch.testing.assert_close(f(x), theirs(x), atol=1e-4, rtol=1e-4)
    (found,) = patches
    assert (found.items() >= wanted.items() if wanted else not found) and [len(graph.fused) for graph in pn.report(ours).graphs] == [1]


def test_options_reach_inductor_and_ours_do_not(patches):
    model, x = Block().eval(), torch.randn(2, 3, 8, 8)
    options = {"triton.cudagraphs": False, "max_fusion_size": 3, "upsample_filter": "exact"}
    pn.compile(model, "reduce-overhead", precision="tf32", options=options)
    with torch.no_grad():
        model(x)
    assert patches == [{"triton.cudagraphs": False, "max_fusion_size": 3}]


def test_light_mode_asks_no_compiler(patches):
    model = pn.compile(Block().eval(), "light")
    with torch.no_grad():
        model(torch.randn(2, 3, 8, 8))
    assert not patches
