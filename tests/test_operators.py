"""Operators of torch's: what torch itself checks of them, what a call costs, exported programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pycuda_conv.nn as pnn
from pycuda_conv.nn import autograd, conv_operators, evaluation
from pycuda_conv.nn.autograd import CONV, CONV_INPUT, CONV_TRANSPOSE, CONV_WEIGHT, Settings

OURS = torch.ops.pycuda_conv
NAMES = [
    "convolve", "conv", "conv_transpose", "conv_input", "conv_weight", "evaluate", "fused_statistics", "fused_normalised",
    "fused_conv_bn_relu", "fused_conv_bn_relu_backward", "fused_inference"
]
LAST = torch.channels_last


def forms(*tensors, last: bool):
    return [one.contiguous(memory_format=LAST) if last else one for one in tensors]


@pytest.mark.parametrize("last", [False, True], ids=["C order", "channels last"])
@pytest.mark.parametrize("operator", autograd.OPERATORS, ids=lambda one: one.name)
def test_the_operator_that_computes_all_convolutions(operator, last):
    settings = Settings(2, (2, 1), ((1, 0), (1, 1)), (1, 1), 2, "fp32", None, False)
    x, w, y = forms(torch.randn(2, 4, 9, 8), torch.randn(6, 2, 3, 3), torch.randn(2, 6, 4, 8), last=last)
    given = {
        CONV: (x, w, torch.randn(6), ()), CONV_TRANSPOSE: (y, w, torch.randn(4), (1, 0)), CONV_INPUT: (y, w, None, x.shape),
        CONV_WEIGHT: (x, y, None, w.shape)
    }
    first, second, bias, size = given[operator]
    spec = conv_operators._spec(operator, settings)
    assert conv_operators._from_spec(tuple(spec)) == (operator, settings)
    torch.library.opcheck(OURS.convolve.default, (first, second, bias, size, spec))
    named = getattr(OURS, operator.name).default(first, second, bias, size, *autograd._flat(settings))
    assert torch.equal(OURS.convolve.default(first, second, bias, size, spec), named)


@pytest.mark.parametrize("device", [None, "opencl", "cuda:0", "cuda:3"])
def test_a_spec_tells_where_and_how(device):
    settings = Settings(1, (3,), ((2, 0),), (2,), 4, "tf32", device, True)
    assert conv_operators._from_spec(tuple(conv_operators._spec(CONV_WEIGHT, settings))) == (CONV_WEIGHT, settings)


def test_all_operators_have_the_tag_and_no_python_layers():
    """``custom_op`` and ``register_autograd`` cost a call several times what the rest does."""
    assert set(NAMES) <= {
        name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("pycuda_conv::")
    }
    for name in NAMES:
        operator = getattr(OURS, name).default
        assert torch.Tag.needs_fixed_stride_order in operator.tags and operator not in torch._library.custom_ops.OPDEFS
        composite, has = operator.has_kernel_for_dispatch_key("CompositeImplicitAutograd"), operator.has_kernel_for_dispatch_key
        assert composite or (has("CPU") and has("CUDA") and not has("AutogradCPU") and not has("AutogradCUDA"))


class Model(torch.nn.Module):
    """A layer by the name that programs which were exported before have, one of this package's modules, and a layer in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = pnn.Conv2d(3, 8, 3, padding=1), pnn.FusedConvBnReLU2d(8, 8, 3, padding=1)
        self.weight, self.bn = torch.nn.Parameter(torch.randn(8, 8, 3, 3)), torch.nn.BatchNorm2d(8)

    def forward(self, x):
        y = self.second(self.first(x))
        y = OURS.conv.default(y, self.weight, None, [], [1, 1], [1, 1, 1, 1], [1, 1], 1, "fp32", None, False)
        norm, spec = self.bn, evaluation.spec_of(2, (3, 3), stride=2, activation="silu")
        y = OURS.evaluate(y, self.weight, None, norm.weight, norm.bias, norm.running_mean, norm.running_var, None, norm.eps, spec)
        fused = self.second.bn
        return OURS.fused_inference(
            y, self.weight, None, fused.weight, fused.bias, fused.running_mean, fused.running_var, fused.eps,
            [1, 0, 0, 0, 1, *(1, 0, 0, 1) * 2]
        )


def exported():
    model, x = Model().eval().requires_grad_(False), torch.randn(2, 3, 12, 11)
    for norm in (model.bn, model.second.bn):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    return model, x, torch.export.export(model, (x,), dynamic_shapes={"x": {0: torch.export.Dim("n")}})


def test_exported_saved_loaded(tmp_path):
    model, x, program = exported()
    assert OURS.conv.default in {node.target for node in program.graph.nodes}
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    taken_apart = loaded.run_decompositions()
    targets = {node.target for node in taken_apart.graph.nodes}
    assert OURS.convolve.default in targets and OURS.conv.default not in targets
    for images in (x, torch.randn(5, 3, 12, 11)):
        for one in (loaded, taken_apart):
            assert torch.equal(one.module()(images), model(images))


AHEAD = """
import sys, torch
sys.path[:0] = [{tests!r}]
from test_operators import exported
model, x, _ = exported()
model, x = model.to("cuda"), x.to("cuda")
program = torch.export.export(model, (x,))
file = torch._inductor.aoti_compile_and_package(program, package_path={file!r})
torch.testing.assert_close(torch._inductor.aoti_load_package(file)(x), model(x))
"""


@pytest.mark.gpu
def test_compiled_ahead_of_time(tmp_path):
    """AOTInductor's operators are Python's: who loads the library needs this package. In its own process: a loader may crash."""
    if torch.__version__.startswith("2.11."):
        pytest.xfail("torch 2.11's loader crashes, after more than a minute in its compiler")
    text = AHEAD.format(tests=str(Path(__file__).parent), file=str(tmp_path / "model.pt2"))
    try:
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("the compiler took too long")
    if done.returncode < 0:
        pytest.xfail(f"torch {torch.__version__} crashed ({done.returncode})")
    assert done.returncode == 0, done.stderr[-3000:]


def test_torch_takes_the_named_ones_apart():
    """What is compiled is the operator that costs little, forward and backward."""
    seen = []

    def backend(graph, inputs):
        seen.append({node.target for node in graph.graph.nodes if node.op == "call_function"})
        return graph

    from torch._dynamo.backends.common import aot_autograd

    x, w = torch.randn(2, 4, 7, 7, requires_grad=True), torch.randn(6, 4, 3, 3, requires_grad=True)
    import pycuda_conv

    compiled = torch.compile(
        lambda x, w: pycuda_conv.conv2d(x, w, padding=1).relu(), backend=aot_autograd(fw_compiler=backend, bw_compiler=backend)
    )
    got = torch.autograd.grad(compiled(x, w).square().sum(), (x, w))
    ref = torch.autograd.grad(torch.nn.functional.conv2d(x, w, padding=1).relu().square().sum(), (x, w))
    for a, b in zip(got, ref, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert len(seen) == 2 and all(
        OURS.convolve.default in targets and not targets & {getattr(OURS, n.name).default for n in autograd.OPERATORS} for targets in seen
    )
