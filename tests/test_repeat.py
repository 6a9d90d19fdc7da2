"""Calls that were made before: the launcher in C makes them again, and only those that it may."""

import bisect
import copy
import gc
import os
import random
import struct
import sys
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda
from test_launch import IN_C

import pycuda_conv as pc
import pycuda_conv.nn as pnn
from pycuda_conv import ConvArgumentError, ConvProblem, Plan, background, engines, memo, repeat
from pycuda_conv.arrays.tensors import TORCH, TorchKind
from pycuda_conv.engines.nn import batch_norm
from pycuda_conv.execute import device
from pycuda_conv.nn import mixed
from pycuda_conv.nn.evaluation import evaluate
from pycuda_conv.runtime import get_device

fused_modules, repeated = (sys.modules[f"pycuda_conv.nn.{name}"] for name in ("fused", "repeated"))
pytestmark = IN_C


class Warm:
    """Tensors in host memory, taken for a GPU's whose driver is a stand-in, and what was asked of it."""

    def __init__(self, fake, device):
        self.fake, self.device = fake, device
        self.whole = 0  # calls that went the whole way

    def asked(self):
        return self.fake.asked()

    def again(self, call):
        """Make a call twice. What the driver was asked is the same, and the second time Python has no part in it."""
        self.asked()
        call()
        first, before = self.asked(), self.whole
        call()
        assert self.whole == before, "the call went the whole way again"
        second = self.asked()
        assert first and len(first) == len(second)
        return first, second

    def goes_the_whole_way(self, call):
        """Make a call that Python has to make each time."""
        for _ in range(3):
            before = self.whole
            call()
            assert self.whole > before


@pytest.fixture
def warm(tmp_path, monkeypatch):
    if sys.platform != "linux":
        pytest.skip("the driver's stand-in is built by gcc on Linux")
    fake = FakeCuda(tmp_path, monkeypatch)
    warm = Warm(fake, fake.device("c"))
    kind = TORCH

    def convolve(*args, original=device.convolve):
        warm.whole += 1
        return original(*args)

    monkeypatch.setattr(kind, "_current_stream", lambda ordinal: 0)
    monkeypatch.setattr(kind, "device", lambda signature, device: warm.device)
    monkeypatch.setattr(kind, "on_gpu", lambda array: True)
    monkeypatch.setattr(device, "convolve", convolve)
    monkeypatch.setattr(TorchKind, "signature", lambda self, array: (array.shape, array.dtype, array.get_device() + 1))
    repeat.public_calls.clear()
    repeat.learn(torch, -1)
    fake.library.cuCtxPushCurrent_v2(warm.device.handle)
    yield warm
    fake.library.cuCtxPopCurrent_v2(None)
    repeat.learn(torch)
    memo.forget_plans()
    fused_modules.launches._compiled.cache_clear()
    batch_norm.compiled.cache_clear()


x, w, b = torch.randn(2, 16, 9, 9), torch.randn(24, 16, 3, 3), torch.randn(24)
y, channels_last = torch.randn(2, 24, 9, 9), torch.channels_last
CALLS = {
    "conv2d": lambda **o: pc.conv2d(x, w, padding=1, **o),
    "bias": lambda **o: pc.conv2d(x, w, b, padding=(1, 1), stride=[1, 1], **o),
    "same": lambda **o: pc.conv2d(x, w, b, padding="same", dilation=2, **o),
    "pairs": lambda **o: pc.conv2d(x, w, b, padding=((1, 0), (0, 1)), **o),
    "epilogue": lambda **o: pc.conv2d(x, w, b, padding=1, scale=b, residual=y, activation="relu", **o),
    "slope": lambda **o: pc.conv2d(x, w, b, activation=("leaky_relu", 0.2), **o),
    "channels last": lambda **o: pc.conv2d(x.half().to(memory_format=channels_last), w.half().to(memory_format=channels_last), **o),
    "tf32": lambda **o: pc.conv2d(x, w, precision="tf32", **o),
    "double": lambda **o: pc.conv2d(x.double(), w.double(), **o),
    "unbatched": lambda **o: pc.conv2d(x[1], w, **o),
    "conv1d": lambda **o: pc.conv1d(x[0], w[:, :9, 0].contiguous(), **o),
    "conv3d": lambda **o: pc.conv3d(x[None], w[:, :2, None].contiguous(), **o),
    "transposed": lambda **o: pc.conv_transpose2d(y, w, b[:16], stride=2, output_padding=1, **o),
    "input": lambda **o: pc.conv2d_input(x.shape, w, y, padding=1, **o),
    "weight": lambda **o: pc.conv2d_weight(x, w.shape, y, padding=1, **o),
    "weight channels last": lambda **o: pc.conv2d_weight(*(a.half().to(memory_format=channels_last) if a is not w else w.shape for a in (x, w, y)), padding=1, **o),
}


def where_arrays_lie(lines):
    """The lines without the addresses of results and workspaces, which differ from call to call."""
    return [line.partition(", takes")[0] for line in lines]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_made_again(warm, name):
    """Into a result that it makes, and into one that is given."""
    with torch.no_grad():
        first, second = warm.again(CALLS[name])
        assert where_arrays_lie(first) == where_arrays_lie(second)
        made = [CALLS[name]() for _ in range(2)]
        assert made[0].stride() == made[1].stride() and made[0].shape == made[1].shape and made[0].data_ptr() != made[1].data_ptr()
        repeat.public_calls.clear()
        out, version = made[0], made[0]._version
        warm.again(partial(CALLS[name], out=out))
        assert CALLS[name](out=out) is out and out._version == version + 3


def test_slopes_are_told_apart(warm):
    with torch.no_grad():
        for known, slope in ((0, 0.2), (1, 0.25), (2, 0.2)):
            assert len(repeat.public_calls) == known
            pc.conv2d(x, w, activation=("leaky_relu", slope))


@pytest.mark.parametrize("name", ["conv2d", "epilogue", "channels last", "unbatched", "weight"])
def test_a_torch_that_does_not_describe_its_tensors_is_asked_for_attributes(warm, name):
    repeat.learn(torch, -1, exchange=False)
    with torch.no_grad():
        warm.again(CALLS[name])
        out = torch.empty_like(CALLS[name]())
        warm.again(partial(CALLS[name], out=out))
        for one in ("an address that is not aligned", "a strided filter"):
            COPIED[one]()
            warm.again(COPIED[one])
        for call in UNUSUAL.values():
            warm.goes_the_whole_way(call)


def test_plans_and_bound_plans(warm):
    problem = ConvProblem.forward(2, x.shape, w.shape, (24,), padding=1)
    plan = Plan(problem, warm.device)
    with torch.no_grad():
        warm.again(lambda: plan(x, w, b))
        warm.again(lambda: plan(x, w, b, out=y))
        bound = plan.bind(w, b)
        warm.again(lambda: bound(x))
        warm.again(lambda: bound(x, out=y))


def test_a_filter_that_was_packed_stays_packed(warm):
    images, filters = torch.randn(8, 64, 56, 56), torch.randn(64, 64, 3, 3)
    problem = ConvProblem.forward(2, images.shape, filters.shape, padding=1)
    plans = (Plan(problem, warm.device, config=config) for config in engines.candidates(problem, warm.device))
    plan = next(plan for plan in plans if plan.filter_bytes)
    bound = plan.bind(filters)
    whole = warm.again(lambda: plan(images, filters))[1]
    packed = warm.again(lambda: bound(images))[1]
    assert where_arrays_lie(packed) != where_arrays_lie(whole)  # it has less to do


def test_contexts(warm):
    """One that is current is not pushed; another is, and is popped again."""
    call = partial(pc.conv2d, x, w)
    warm.again(call)
    warm.fake.asked()
    call()
    assert not {"push", "pop"} & set(warm.fake.asked(contexts=True))
    warm.device.pop()
    try:
        warm.asked()
        call()
        lines = warm.fake.asked(contexts=True)
        assert lines[0] == "push" and lines[-1] == "pop" and len(lines) > 2
    finally:
        warm.device.push()


# ---- what the launcher must not make


class Mode(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def strided(tensor):
    return torch.randn(*tensor.shape[:-1], 2 * tensor.shape[-1])[..., ::2].copy_(tensor)


def misaligned(tensor):
    return torch.empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


def last(tensor):
    return tensor.contiguous(memory_format=channels_last)


#: Arrays that kernels can't read as they lie; results that have to lie otherwise than kernels write them.
COPIED = {
    "a strided input": lambda: pc.conv2d(strided(x), w, padding=1),
    "a strided filter": lambda: pc.conv2d(x, strided(w), padding=1),
    "a strided bias": lambda: pc.conv2d(x, w, torch.randn(48)[::2], padding=1),
    "a strided residual": lambda: pc.conv2d(x, w, padding=1, residual=strided(y), scale=b, activation="relu"),
    "an address that is not aligned": lambda: pc.conv2d(misaligned(x), w, padding=1),
    "channels of a channels-last array": lambda: pc.conv2d(last(torch.randn(2, 32, 9, 9).half())[:, 8:24], w.half(), padding=1),
    "C order and a filter in channels last": lambda: pc.conv2d(x, last(w), padding=1),
    "expanded channels": lambda: pc.conv2d(x[:, :1].expand(-1, 16, -1, -1), w, padding=1),
    "turned": lambda: pc.conv2d(x.transpose(2, 3), w, padding=1),
    "input": lambda: pc.conv2d_input(x.shape, w, strided(y), padding=1),
    "weight": lambda: pc.conv2d_weight(strided(x), w.shape, y, padding=1),
}
UNUSUAL = {
    "numbers of numpy's": lambda: pc.conv2d(x, w, padding=np.int64(1)),
    "a stream": lambda: pc.conv2d(x, w, padding=1, stream=0x55),
}


@pytest.mark.parametrize("name", COPIED)
def test_arrays_are_copied_by_the_same_schedule(warm, name):
    """Where Python makes the call, torch copies them."""
    with torch.no_grad():
        warm.asked()
        COPIED[name]()
        by_torch = warm.asked()
        before = warm.whole
        by_c, again = warm.again(COPIED[name])
        assert warm.whole == before and len(by_c) == len(again) > len(by_torch)
        made = [COPIED[name]() for _ in range(2)]
        assert made[0].stride() == made[1].stride() and made[0].data_ptr() != made[1].data_ptr()


def test_a_copied_operand_may_not_overlap_the_result(warm):
    """It reaches further than its elements do."""
    with torch.no_grad():
        memory = torch.randn(2 * 16 * 9 * 18 + 2 * 24 * 9 * 9)
        images = memory[: 2 * 16 * 9 * 18].view(2, 16, 9, 18)[..., ::2]
        for _ in range(3):
            pc.conv2d(images, w, padding=1, out=torch.empty(2, 24, 9, 9))
        apart = memory[2 * 16 * 9 * 18 :].view(2, 24, 9, 9)
        pc.conv2d(images, w, padding=1, out=apart)
        warm.again(lambda: pc.conv2d(images, w, padding=1, out=apart))
        within = memory[2 * 16 * 9 * 17 :][: apart.numel()].view(apart.shape)
        with pytest.raises(ConvArgumentError, match="out overlaps input"):
            pc.conv2d(images, w, padding=1, out=within)


@pytest.mark.parametrize("exchange", [True, False])
def test_negated_views_are_copied(warm, exchange):
    """Also those that look like any other tensor."""
    repeat.learn(torch, -1, exchange)
    strided, dense = torch.randn(2, 16, 9, 9, dtype=torch.cfloat).conj().imag, torch._neg_view(x)
    assert strided.is_neg() and dense.is_neg() and dense.stride() == x.stride()
    with torch.no_grad():
        warm.again(lambda: pc.conv2d(x, w))
        for negated in strided, dense:
            warm.goes_the_whole_way(lambda negated=negated: pc.conv2d(negated, w))
        warm.goes_the_whole_way(lambda: pc.conv2d(x, torch._neg_view(w)))
        warm.again(lambda: pc.conv2d(x, w, out=y[..., :7, :7].clone()))
        with pytest.raises(ConvArgumentError, match="out is read-only"):
            pc.conv2d(x, w, out=torch._neg_view(y[..., :7, :7].clone()))


@pytest.mark.parametrize("exchange", [True, False])
def test_a_tensor_whose_memory_is_gone_is_refused(warm, exchange):
    repeat.learn(torch, -1, exchange)
    gone, zeros = torch.randn(2, 16, 9, 9), torch._efficientzerotensor((2, 16, 9, 9))
    with torch.no_grad():
        warm.again(lambda: pc.conv2d(gone, w))
        gone.untyped_storage().resize_(0)
        warm.asked()
        for _ in range(2):
            with pytest.raises(ConvArgumentError, match="input has no memory"):
                pc.conv2d(gone, w)
            with pytest.raises(ConvArgumentError, match="weight has no memory"):
                pc.conv2d(y, torch._efficientzerotensor((24, 24, 3, 3)))
            with pytest.raises(ConvArgumentError, match="input has no memory"):
                pc.conv2d(zeros, w)
        assert not warm.asked()


@pytest.mark.parametrize("options", [{"stride": True}, {"groups": True}, {"padding": 1.0}, {"dilation": (1, True)}, {"precision": None}])
def test_what_only_looks_like_a_known_option_is_refused(warm, options):
    usual = {"stride": 1, "groups": 1, "padding": 1, "dilation": (1, 1), "precision": "fp32"}
    with torch.no_grad():
        warm.again(lambda: pc.conv2d(x, w, **usual))
        for _ in range(2):
            with pytest.raises((TypeError, ValueError)):
                pc.conv2d(x, w, **{**usual, **options})


def test_modes_and_transforms_see_their_operators(warm):
    from torch.autograd import forward_ad

    with torch.no_grad():
        warm.again(lambda: pc.conv2d(x, w, padding=1))
    table = repeat.public_calls.copy()
    for ready in table:
        repeat.public_calls[ready] = None  # were one taken, it would be none

    def taken(one=None):
        made = repeat.call(table, ("conv", 2, 1, 1, 1, 1, "fp32", 0, None), False, x, w, None, None, None, None)
        seen.append(isinstance(made, torch.Tensor))
        return one

    seen = []
    with Mode(), torch.no_grad():
        taken()
    with torch.no_grad():
        taken()
        with forward_ad.dual_level():
            taken()
        torch.vmap(taken)(x)
    assert seen == [False, True, False, False]


def test_out_that_the_result_cannot_be_written_to(warm):
    memory = torch.zeros(4, 16, 9, 9)
    square = torch.randn(16, 16, 3, 3)
    pc.conv2d(memory[:2], square, padding=1, out=memory[2:])
    warm.again(lambda: pc.conv2d(memory[:2], square, padding=1, out=memory[2:]))
    before = warm.asked()
    with pytest.raises(ConvArgumentError, match="out overlaps input"):
        pc.conv2d(memory[1:3], square, padding=1, out=memory[2:])
    with pytest.raises(ConvArgumentError, match="out requires a gradient"):
        pc.conv2d(memory[:2], square, padding=1, out=torch.zeros(2, 16, 9, 9, requires_grad=True))
    with torch.inference_mode():
        made = torch.zeros(2, 16, 9, 9)
    with pytest.raises(ConvArgumentError, match="out was made in torch"):
        pc.conv2d(memory[:2], square, padding=1, out=made)
    assert warm.asked() == before == []
    pc.conv2d(memory[:2], square, padding=1, residual=memory[2:], out=memory[2:])  # in place
    warm.goes_the_whole_way(lambda: pc.conv2d(memory[:2], square, padding=1, residual=memory[2:], out=memory[2:]))


def test_inference_mode(warm):
    with torch.no_grad():
        pc.conv2d(x, w)
    with torch.inference_mode():
        assert pc.conv2d(x, w).is_inference()
    with torch.no_grad():
        assert not pc.conv2d(x, w).is_inference()
    repeat.public_calls.clear()
    with torch.inference_mode():
        warm.again(lambda: pc.conv2d(x, w))
    with torch.no_grad():
        assert not pc.conv2d(x, w).is_inference()


# ---- gradients

GRADIENTS = {
    "conv2d": lambda x, w, b: pc.conv2d(x, w, b, padding=1),
    "no bias": lambda x, w, b: pc.conv2d(x, w, padding=1, stride=2),
    "groups": lambda x, w, b: pc.conv2d(x, w.view(48, 8, 3, 3), groups=2),
    "transposed": lambda x, w, b: pc.conv_transpose2d(x, w[:16], b[:16], stride=2, output_padding=1),
    "more output padding than stride": lambda x, w, b: pc.conv_transpose2d(x, w[:16], b[:16], dilation=3, stride=1, output_padding=2),
}


@pytest.mark.parametrize(
    "wanted, way", [((True, True), "gradients"), ((True, False), "gradient_by_first"), ((False, True), "gradient_by_second")]
)
@pytest.mark.parametrize("name", [*list(GRADIENTS)[:4], "channels last"])
def test_python_has_no_part_in_gradients_that_are_made_again(warm, monkeypatch, name, wanted, way):
    """One call makes both, by the launches that they take apart, one after the other."""
    operands = [t.clone() for t in (x, w)]
    if name == "channels last":
        name, operands = "no bias", [t.half().contiguous(memory_format=channels_last) for t in operands]
    xs, ws = (t.requires_grad_(flag) for t, flag in zip(operands, wanted, strict=True))
    inputs = [t for t in (xs, ws) if t.requires_grad]
    lines = []
    for again in range(3):
        made = GRADIENTS[name](xs, ws, b)
        warm.asked()
        if again == 2:
            monkeypatch.setattr(repeated.RepeatedGradients, way, None)
        gradients = torch.autograd.grad(made, inputs, torch.ones_like(made))
        lines.append(named_by_turns(warm.asked(), 0))
        assert [(g.shape, g.stride()) for g in gradients] == [(t.shape, t.stride()) for t in inputs]
    assert lines[0] and lines[0] == lines[1] == lines[2]


def test_a_saved_operand_that_was_written_since_is_noticed(warm):
    xs, ws = x.clone().requires_grad_(), w.clone().requires_grad_()
    for _ in range(3):
        torch.autograd.grad(pc.conv2d(xs, ws), (xs, ws), torch.ones(2, 24, 7, 7))
    made = pc.conv2d(xs, ws)
    assert type(made.grad_fn).__name__ == "_RepeatedFunctionBackward"
    with torch.no_grad():
        ws.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(made, (xs, ws), torch.ones_like(made))


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_saved_operands_are_asked_for_once(warm, wanted):
    """torch.utils.checkpoint gives them only once: also where the gradients are not remembered yet, or are never."""
    xs, ws = (t.clone().requires_grad_(flag) for t, flag in zip((x, w), wanted, strict=True))
    inputs = [t for t in (xs, ws) if t.requires_grad]
    for dy in (y, y, y, strided(y)):
        made = torch.utils.checkpoint.checkpoint(lambda: pc.conv2d(xs, ws, padding=1), use_reentrant=False)
        gradients = torch.autograd.grad(made, inputs, dy)
        assert [g.shape for g in gradients] == [t.shape for t in inputs]


@pytest.mark.parametrize("most", [0, 1 << 30])
def test_one_launch_adds_the_parts_of_both_gradients(warm, monkeypatch, most):
    """Where they are few."""
    monkeypatch.setattr(repeat, "MOST_TOGETHER", most)
    images, filters = torch.randn(4, 16, 32, 32, requires_grad=True), torch.randn(24, 16, 3, 3, requires_grad=True)
    asked = []
    for _ in range(4):  # at the second one they are remembered
        made = pc.conv2d(images, filters, padding=1)
        warm.asked()
        torch.autograd.grad(made, (images, filters), torch.ones_like(made))
        asked.append(where_arrays_lie(warm.asked()))
    (dgrad, add, wgrad, add_too), _, *again = asked
    assert again[0] == again[1]
    if not most:
        assert again[0] == asked[0]
    else:
        blocks = [int(line.split(" of ")[1].split()[0]) for line in (add, add_too, again[0][2])]
        assert again[0][:2] == [dgrad, wgrad] and blocks[0] + blocks[1] == blocks[2]


def test_gradients_of_gradients(warm):
    xs, ws = x.clone().requires_grad_(), w.clone().requires_grad_()
    for _ in range(3):
        made = pc.conv2d(xs, ws, padding=1)
        (dx,) = torch.autograd.grad(made, xs, torch.ones_like(made), create_graph=True)
        assert dx.requires_grad
        (dw,) = torch.autograd.grad(dx.sum(), ws)
        assert dw.shape == ws.shape


def test_a_mode_sees_a_backward_pass(warm):
    xs = x.clone().requires_grad_()
    for _ in range(2):
        torch.autograd.grad(pc.conv2d(xs, w, padding=1).sum(), xs)
    made = pc.conv2d(xs, w, padding=1)
    seen = []

    class Seeing(Mode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Seeing():
        torch.autograd.grad(made, xs, torch.ones_like(made))
    assert any("pycuda_conv.convolve" in name for name in seen)


# ---- fused layers

FUSED = {
    "plain": lambda: pnn.FusedConvBnReLU2d(16, 24, 3, padding=1),
    "bias": lambda: pnn.FusedConvBnReLU2d(16, 24, 3, padding=1, bias=True, relu=False),
    "not affine": lambda: pnn.FusedConvBnReLU2d(16, 24, 3, padding="same", affine=False),
    "mean of batches": lambda: pnn.FusedConvBnReLU2d(16, 24, 3, padding=1, stride=2, momentum=None),
    "wide": lambda: pnn.FusedConvBnReLU2d(16, 256, 3, padding=1, dilation=2, precision="tf32"),
    "groups": lambda: pnn.FusedConvBnReLU2d(16, 32, (3, 1), groups=2),
    "channels last": lambda: pnn.FusedConvBnReLU2d(16, 64, 3, padding=1, precision="tf32").to(memory_format=channels_last),
    "half": lambda: half_convolution(pnn.FusedConvBnReLU2d(16, 64, 3, padding=1).to(memory_format=channels_last)),
    "double": lambda: pnn.FusedConvBnReLU2d(16, 24, 3, dtype=torch.float64),
    "residual": lambda: Summed(16, 24, 3, padding=1),
    "residual, no ReLU": lambda: Summed(16, 24, 3, padding=1, relu=False),
    "residual, half": lambda: half_convolution(Summed(16, 64, 3, padding=1).to(memory_format=channels_last)),
    "SiLU": lambda: Acting(16, 24, 3, padding=1), "input passed on": lambda: Passing(16, 16, 3, padding=1),
    "input passed on, half": lambda: half_convolution(Passing(16, 16, 3, padding=1).to(memory_format=channels_last)),
}


class Acting(pnn.FusedConvBnReLU2d):
    """A layer with another activation, as `convert` makes it."""

    def forward(self, input):
        return fused_modules.conv_bn_act(self.conv, self.bn, input, "silu", self.precision, 2)


class Passing(pnn.FusedConvBnReLU2d):
    """A layer whose input another one reads too, as the first one of a block is."""

    def __init__(self, inside, outside, *args, **options):
        super().__init__(inside, outside, *args, **options)
        self.last = pnn.FusedConvBnReLU2d(outside, inside, 1)

    def forward(self, input):
        made, passed = fused_modules.conv_bn_act(self.conv, self.bn, input, "relu", self.precision, 2, None, True)
        return self.last(made, passed)


class Summed(pnn.FusedConvBnReLU2d):
    """A layer with a residual of its own."""

    def __init__(self, inside, outside, *args, **options):
        super().__init__(inside, outside, *args, **options)
        self.residual = torch.nn.Parameter(torch.randn(2, outside, 9, 9))

    def forward(self, input):
        return super().forward(input, self.residual)


def half_convolution(layer):
    layer.conv.half()
    if isinstance(layer, Passing):
        layer.last.conv.half()
    if isinstance(layer, Summed):
        layer.residual.data = layer.residual.data.half()
    return layer


def input_of(name, layer):
    form = channels_last if name == "channels last" or "half" in name else torch.contiguous_format
    return x.to(layer.conv.weight.dtype).contiguous(memory_format=form).clone()


def named_by_turns(lines, told_apart):
    """The lines with each address replaced by a number: that of the address among all of them, in the order in which they appear.

    Only in the first lines, so many, are addresses `told_apart`. Behind those, memory may have been freed and taken again.
    """
    seen, found = {}, []
    for i, line in enumerate(lines):
        head, _, numbers = line.partition(", takes")
        words = [word for (word,) in struct.iter_unpack("<Q", bytes.fromhex(numbers))] if numbers else []
        found.append(
            (head, [-word if word < 1 << 40 else seen.setdefault(word, len(seen)) if i < told_apart else "address" for word in words])
        )
    return found


def steps_of(tensor):
    """Its strides where they matter."""
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("name", FUSED)
def test_a_training_step_is_made_again(warm, monkeypatch, name, wanted):
    """By one row of launches for each pass, the same as the first time but for where the arrays lie; and Python plans nothing."""
    kept, lines, launch, empty = [], [], device.launch, TorchKind.empty
    monkeypatch.setattr(batch_norm, "MOST_WHOLE", 0)
    monkeypatch.setattr(repeat, "MOST_TOGETHER", 0)

    def run(*given):
        launch(*given)
        lines.append(len(warm.fake.asked(keep=True)))

    monkeypatch.setattr(device, "launch", run)
    # no two arrays of a step may lie at the same address
    monkeypatch.setattr(TORCH, "empty", lambda *args: (kept.append(empty(TORCH, *args)), kept[-1])[1])
    layer = FUSED[name]()
    images = input_of(name, layer).requires_grad_(wanted)
    dy = torch.ones_like(layer(images))
    steps = []
    for again in (False, True, True):
        layer.zero_grad()
        images.grad = None
        if not again:
            fused_modules.repeat._again.clear()
        else:
            monkeypatch.setattr(device, "launch", None)
        warm.asked()
        before = [buffer._version for buffer in layer.buffers()]
        made = layer(images)
        forward = warm.asked()
        made.backward(dy)
        versions = [now._version - then for now, then in zip(layer.buffers(), before, strict=True)]
        gradients = [None if p.grad is None else (p.grad.shape, steps_of(p.grad), p.grad.dtype) for p in (images, *layer.parameters())]
        assert struct.pack("<Q", made.data_ptr()).hex() in forward[-1].replace(" ", "")
        # what is written last may have been workspace before
        told_apart = (0, 0) if isinstance(layer, Passing) else (len(forward) - 1, lines[-1])  # of one layer
        both = [named_by_turns(asked, count) for asked, count in zip((forward, warm.asked()), told_apart, strict=True)]
        steps.append((*both, made.shape, made.stride(), made.dtype, gradients, versions))
        kept.append(made)
    assert steps[0][0] and steps[0][1]
    assert steps[0] == steps[1] == steps[2]
    assert int(layer.bn.num_batches_tracked) == (4 if layer.bn.momentum is None else 0)  # kernels count it, which nobody runs here


@pytest.mark.parametrize("name", ["plain", "mean of batches", "not affine", "double", "residual", "SiLU"])
def test_a_small_layer_is_made_again_by_fewer_launches(warm, name):
    """One for the statistics and what follows them; and one adds the parts of both gradients."""
    layer, steps = FUSED[name](), []
    images = input_of(name, layer).requires_grad_()
    for _ in range(3):
        warm.asked()
        made = layer(images)
        forward = where_arrays_lie(warm.asked())
        made.backward(torch.ones_like(made))
        steps.append((forward, where_arrays_lie(warm.asked())))
    (forward, backward), *again = steps
    assert again[0] == again[1]
    assert again[0][0][:-1] == forward[:-2] and again[0][1][0] == backward[0] and len(again[0][1]) in (len(backward), len(backward) - 1)


def test_batches_are_counted_once_where_python_makes_the_launches_after_all(warm, monkeypatch):
    changed(monkeypatch, warm, 0, 7)
    layer = FUSED["mean of batches"]()
    for made in range(1, 4):
        layer(x)
        assert int(layer.bn.num_batches_tracked) == made and len(fused_modules.repeat._again) == 1


def test_a_layer_that_counts_no_batches(warm, monkeypatch):
    monkeypatch.setattr(batch_norm, "MOST_WHOLE", 0)
    layer = FUSED["mean of batches"]()
    layer.bn.num_batches_tracked = None
    warm.again(lambda: layer(x))


@pytest.mark.parametrize("last", [False, True])
def test_operators_of_fused_layers_are_made_again(warm, monkeypatch, last):
    """Compiled code's passes: Python has no part in the second, and results lie as the operator says."""
    from pycuda_conv.nn.autograd import Settings
    from pycuda_conv.nn.fused import operators
    from pycuda_conv.nn.fused.launches import _LayerSpec

    form = torch.channels_last if last else torch.contiguous_format
    x, w, y = (torch.randn(*shape).half().to(memory_format=form) for shape in ((2, 16, 9, 9), (24, 16, 3, 3), (2, 24, 9, 9)))
    vectors, batches = [torch.rand(24) for _ in range(4)], torch.tensor(3)
    spec = _LayerSpec("relu", True, Settings(2, (1, 1), ((1, 1), (1, 1)), (1, 1), 1, "fp32", None, False)).in_integers()
    ours, statistics = torch.ops.pycuda_conv, torch.rand(2, 24)
    forward = lambda residual=None: ours.fused_forward(x, w, None, *vectors, batches, residual, 0.1, 1e-5, spec)  # noqa: E731
    given = y, x, w, *vectors[:2], y, statistics
    backward = lambda of_x=True, of_weight=True: ours.fused_conv_bn_relu_backward(*given, of_x, of_weight, spec)  # noqa: E731
    calls = [forward, partial(forward, y), backward, partial(backward, False), partial(backward, of_weight=False)]
    for call in calls:
        for _ in range(2):
            call()
    monkeypatch.setattr(operators, "_first_forward", None)
    monkeypatch.setattr(operators, "_other_backward", None)
    for call in calls:
        warm.again(call)
        results = call()
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            expected = call()
        assert [(r.shape, r.dtype, r.stride()) for r in results] == [(r.shape, r.dtype, r.stride()) for r in expected]


def test_fused_layers_that_are_unusual_go_the_whole_way(warm, monkeypatch):
    layer, whole, launch = FUSED["plain"](), [], device.launch
    monkeypatch.setattr(device, "launch", lambda *given: (whole.append(1), launch(*given))[1])

    def ways(images, dy=None):
        """Which passes Python made."""
        whole.clear()
        made = layer(images)
        forward = ["forward"] * bool(whole)
        whole.clear()
        made.backward(torch.ones_like(made) if dy is None else dy)
        return forward + ["backward"] * bool(whole)

    both = ["forward", "backward"]
    assert [ways(x) for _ in range(3)] == [both, [], []]
    assert ways(strided(x)) == ways(misaligned(x)) == ways(torch._neg_view(x)) == both
    assert ways(x, torch._neg_view(y)) == ways(x, strided(y)) == ways(x, y.sum().expand(y.shape)) == []  # torch copies them
    assert ways(x[:1]) == both and ways(x) == []
    layer.relu = False
    assert ways(x) == both and ways(x) == []
    layer.bn.momentum = 0.5
    assert ways(x) == ["forward"]
    layer.bn.eps = 0.25
    assert ways(x) == ["forward"] and ways(x) == []
    layer.conv.weight.requires_grad_(False)
    assert ways(x) == ["backward"] and ways(x) == []
    seen = []

    class Seeing(Mode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function.__name__.partition(".")[0])
            return function(*args, **(kwargs or {}))

    with Seeing():
        ways(x)
    assert {"fused_statistics", "fused_normalised", "fused_conv_bn_relu_backward"} <= set(seen)
    assert ways(x) == []
    layer.bn.half()
    assert [ways(x) for _ in range(2)] == [both, both]


@pytest.mark.parametrize("last", [False, True])
def test_autocast_is_no_reason_to_go_the_whole_way(warm, monkeypatch, last):
    """But for casts, a call inside of it is launched as one outside of it is, by tensors of its dtype."""
    whole, launch = [], device.launch
    monkeypatch.setattr(device, "launch", lambda *given: (whole.append(1), launch(*given))[1])
    form = channels_last if last else torch.contiguous_format
    images, filters = (a.contiguous(memory_format=form).clone().requires_grad_() for a in (x, torch.randn(64, 16, 3, 3)))
    layer = pnn.FusedConvBnReLU2d(16, 64, 3, padding=1).to(memory_format=form)
    layer.conv.weight.data.copy_(filters.data)

    def plain(images, filters, bias=None):
        return pc.conv2d(images, filters, bias, padding=1)

    def fused(images, filters):
        return layer(images)

    residual = torch.randn(2, 64, 9, 9, dtype=torch.bfloat16).contiguous(memory_format=form).requires_grad_()

    def summed(images, filters):
        return layer(images, residual)

    both = images, filters
    for call, given in ((plain, both), (plain, (*both, torch.randn(64))), (fused, both), (summed, both)):
        cast = [a.detach().to(torch.bfloat16).requires_grad_() for a in given]
        with torch.autocast("cpu", torch.bfloat16):
            made = call(*given)
            assert torch.is_autocast_enabled("cpu")
        assert made.dtype is torch.bfloat16 and made.is_contiguous(memory_format=form)
        made.backward(torch.ones_like(made))
        asked = []
        for inside in (False, True):
            for again in (False, True):
                before = warm.whole
                warm.asked()
                whole.clear()
                with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                    made = call(*(given if inside or call is not plain else cast))
                    made.backward(torch.ones_like(made))
                if again and (inside or call is plain):
                    assert warm.whole == before and not whole
                    asked.append(where_arrays_lie(warm.asked()))
        if call is not plain:
            assert asked[0] and asked[0] == asked[-1]
            continue
        kernels = [[line.split()[1] for line in lines if line.startswith("launch")] for lines in asked]
        rest = iter(kernels[-1])
        assert len(kernels[0]) > 1 and all(kernel in rest for kernel in kernels[0]), "its own casts are launched beside, in the same row"
        assert len(kernels[-1]) - len(kernels[0]) in (1, 2, 3), "one launch casts all of a pass, and another turns a filter"
    assert images.grad.dtype is filters.grad.dtype is layer.conv.weight.grad.dtype is torch.float32


# ---- threads and memory


def test_other_threads_run_while_a_call_waits_for_the_driver(warm):
    """The driver's queue may be full until one of them has done something. Nor is anybody held up by one that launches nothing more."""
    with torch.no_grad():
        warm.again(lambda: pc.conv2d(x, w))
    whole, together = warm.whole, threading.Barrier(4, timeout=300)

    def work():
        with warm.device, torch.no_grad():
            made = pc.conv2d(x, w)
            together.wait()
            return made

    warm.fake.blocked.value = 1
    with ThreadPoolExecutor(4) as pool:
        coming = [pool.submit(work) for _ in range(4)]
        end = time.monotonic() + 300
        while warm.fake.waiting.value < 4 and time.monotonic() < end:
            time.sleep(0.001)
        seen = warm.fake.waiting.value
        warm.fake.blocked.value = 0
        assert all(one.result(300).shape == (2, 24, 7, 7) for one in coming)
    assert seen == 4 and warm.whole == whole


def test_threads_that_make_call_after_call_take_turns(warm):
    """None of them waits until another one is through."""
    with torch.no_grad():
        warm.again(lambda: pc.conv2d(x, w))
    made, end = [0] * 3, time.monotonic() + 300

    def work(which):
        with warm.device, torch.no_grad():
            while min(made) < 100 and time.monotonic() < end:
                pc.conv2d(x, w)
                made[which] += 1
                if made[which] % 1000 == 0:
                    warm.fake._length.value = 0  # there is room for the notes of some thousand calls

    with ThreadPoolExecutor(3) as pool:
        for one in [pool.submit(work, i) for i in range(3)]:
            one.result(600)
    assert min(made) >= 100, f"one waited for the others: {made}"


MIXED_CALLS = int(os.environ.get("PYCUDA_CONV_SOAK", "300"))
CAPTURED = 0xCA9  # the stream that the stand-in says is being captured


def with_names(lines, arrays):
    """The lines with the names of these arrays in the place of their addresses, and one word for all other memory."""
    places = sorted((one.data_ptr(), one.nbytes, name) for name, one in arrays.items())

    def named(word):
        if not 1 << 40 < word < 1 << 47:
            return word
        start, nbytes, name = places[bisect.bisect_right(places, (word, 1 << 47)) - 1]
        return (name, word - start) if start <= word < start + nbytes else "memory"

    found = []
    for line in lines:
        head, _, numbers = line.partition(", takes")
        words = bytes.fromhex(numbers)
        found.append(
            (head, *(named(word) for (word,) in struct.iter_unpack("<Q", words[: len(words) // 8 * 8])), words[len(words) // 8 * 8 :])
        )
    return found


def mixed_calls(warm, monkeypatch, count, seed):
    """What the driver is asked by calls of all kinds in any order: a list of lines for each call."""
    rng, kept = random.Random(seed), {"x": x, "w": w, "b": b, "y": y}
    stream, lines = [0], []
    monkeypatch.setattr(TORCH, "_current_stream", lambda ordinal: stream[0])
    xs, ws, bs = (t.clone().requires_grad_() for t in (x, w, b))
    kept |= {"xs": xs, "ws": ws, "bs": bs}
    plan = Plan(ConvProblem.forward(2, x.shape, w.shape, b.shape, padding=1), warm.device)
    packed = Plan(ConvProblem.forward(2, (1, 256, 14, 14), (256, 256, 3, 3), padding=1), warm.device)
    image, filter = torch.randn(1, 256, 14, 14), torch.randn(256, 256, 3, 3)
    kept |= {"image": image, "filter": filter}
    bound = plan.bind(w, b), packed.bind(filter)

    def differentiated(name):
        made = GRADIENTS[name](xs, ws, bs)
        return torch.autograd.grad(made, (xs, ws), torch.ones_like(made))

    with torch.no_grad():
        kept |= {name: torch.zeros_like(make()) for name, make in CALLS.items()}

    def in_inference_mode(name):
        with torch.inference_mode():
            CALLS[name]()

    ways = [
        *[partial(way, name) for name in CALLS for way in (lambda name: CALLS[name](out=kept[name]), lambda name: CALLS[name](stream=0x99), in_inference_mode)],
        *CALLS.values(),
        lambda: plan(x, w, b), lambda: packed(image, filter), lambda: bound[0](x), lambda: bound[1](image), lambda: plan(x, w, b, stream=0x99), gc.collect,
    ]  # fmt: skip
    for _ in range(count):
        stream[0] = rng.choice((0, 0x77, CAPTURED))
        warm.fake.asked()
        if rng.random() < 0.2:
            differentiated(rng.choice(list(GRADIENTS)))
        else:
            with torch.no_grad():
                rng.choice(ways)()
        lines.append(with_names(warm.fake.asked(warm.device), kept))
    return lines


def test_mixed_calls_are_the_same_byte_for_byte_however_they_are_made(warm, monkeypatch):
    """Shapes, types, layouts, streams, captures, `out` and gradients, by launches in C and by Python's. PYCUDA_CONV_SOAK=10000 for many."""
    made = []
    for launcher in ("c", "python"):
        memo.forget_plans()
        warm.device = warm.fake.device(launcher)
        with warm.device:
            made.append(mixed_calls(warm, monkeypatch, MIXED_CALLS, 1))
        assert any(repeat.public_calls.values()) is (launcher == "c")
    for i, (in_c, by_python) in enumerate(zip(*made, strict=True)):
        assert in_c == by_python, f"call {i}"
    assert sum(map(len, made[0])) > MIXED_CALLS


def test_threads_that_make_mixed_calls_at_once_make_those_that_each_makes_alone(warm):
    """While another one collects garbage."""
    count = min(MIXED_CALLS // 10, 300)  # the stand-in's log holds no more
    names = [name for name in CALLS if name != "weight channels last"]
    going = [True]

    def work(which):
        rng = random.Random(which)
        with warm.device, torch.no_grad():
            for _ in range(count):
                name = rng.choice(names)
                CALLS[name](out=outs[which][name])

    def collect():
        while going:
            gc.collect()

    with torch.no_grad():
        outs = [{name: torch.zeros_like(CALLS[name]()) for name in names} for _ in range(3)]
    arrays = {"x": x, "w": w, "b": b, "y": y} | {f"{which} {name}": one for which, out in enumerate(outs) for name, one in out.items()}

    def asked():
        return Counter(map(tuple, with_names(warm.fake.asked(), arrays)))

    alone = Counter()
    for which in range(3):
        warm.asked()
        work(which)
        alone += asked()
    with ThreadPoolExecutor(4) as pool:
        warm.asked()
        collecting = pool.submit(collect)
        for one in [pool.submit(work, which) for which in range(3)]:
            one.result(300)
        going.clear()
        collecting.result(300)
    assert asked() == alone


def changed(monkeypatch, warm, which, value):
    """Let calls be remembered with another number of the GPU (0) or other bytes of workspace (4)."""
    ready = type(warm.device).ready

    def otherwise(device, launcher, stream, *decided):
        decided = list(decided)
        decided[which] = value
        return ready(device, launcher, stream, *decided)

    monkeypatch.setattr(type(warm.device), "ready", otherwise)


def test_where_torch_makes_the_result_on_another_gpu_python_makes_the_call(warm, monkeypatch):
    """It makes it on the current one."""
    changed(monkeypatch, warm, 0, 3)
    asked = []
    with torch.no_grad():
        warm.goes_the_whole_way(lambda: asked.append(len((pc.conv2d(x, w), warm.asked())[1])))
    xs = x.clone().requires_grad_()
    warm.goes_the_whole_way(lambda: torch.autograd.grad(pc.conv2d(xs, w), xs, y[..., :7, :7]))
    assert asked[0] and len(set(asked)) == 1


def test_where_torch_lends_no_memory_a_tensor_is_made(warm, monkeypatch):
    changed(monkeypatch, warm, 4, 1 << 60)
    images, filters = torch.randn(8, 256, 14, 14), torch.randn(256, 256, 3, 3)
    assert pc.plan.cached_plan(ConvProblem.forward(2, images.shape, filters.shape, padding=1), warm.device).workspace_bytes
    with torch.no_grad():
        warm.again(lambda: pc.conv2d(images, filters, padding=1))


@pytest.mark.parametrize("exchange", [True, False])
def test_no_call_keeps_an_array(warm, exchange):
    """Nor waits for the garbage collector to free one: calls with and without gradients, the first and later ones."""
    repeat.learn(torch, -1, exchange)
    gc.collect()
    gc.disable()
    try:
        seen = []
        for _ in range(3):
            for size in (7, 14):
                images, filters = torch.randn(1, 256, size, size).requires_grad_(size == 7), torch.randn(256, 256, 3, 3)
                made = pc.conv2d(images, filters, padding=1)
                gradients = torch.autograd.grad(made, images, torch.ones_like(made)) if size == 7 else ()
                seen += map(weakref.ref, (images, filters, made, *gradients))
                del images, filters, made, gradients
        assert not any(one() is not None for one in seen)
    finally:
        gc.enable()


# ---- the table


def test_a_driver_error_says_what_failed(warm):
    warm.again(lambda: pc.conv2d(x, w))
    warm.fake.failing.value = 0
    with pytest.raises(RuntimeError, match=r"launching \w+ failed: CUDA_ERROR_LAUNCH_FAILED \(719\)"):
        pc.conv2d(x, w)
    pc.conv2d(x, w)


def test_tables_are_bounded(warm, monkeypatch):
    monkeypatch.setattr(repeat.public_calls, "most", 4)
    for size in range(3, 13):
        pc.conv2d(torch.zeros(1, 4, size, size), torch.zeros(4, 4, 3, 3))
        assert len(repeat.public_calls) <= 4


class Compiling:
    """A device whose compiler is slow."""

    def __init__(self):
        self.coming, self.asked = Future(), 0

    def compile_in_background(self, kernels):
        self.asked += 1
        return [self.coming]

    def capturing(self, stream):
        return False


@pytest.mark.parametrize("way", ["function", "plan", "evaluation", "trained", "layer", "autocast"])
def test_calls_are_repeated_while_better_kernels_are_compiled(warm, monkeypatch, way):
    """Python makes one call in the beginning, one that asks for the compiler, and one when the kernels are there."""
    memo.forget_plans()
    images, vectors = x.clone(), torch.rand(4, 24).unbind()
    layer = FUSED["plain"]() if way == "layer" else None
    plans = []

    def set_up(plan, *given, original=Plan._set_up):
        original(plan, *given)
        plans.append(plan)
        plan.compiler = Compiling()
        plan._background = background.BackgroundCompile(plan.compiler, [], background.OFTEN, plan._forget_repeated)

    monkeypatch.setattr(Plan, "_set_up", set_up)
    monkeypatch.setattr(Plan, "_load", lambda plan, schedule, original=Plan._load: original(plan, plan.schedule))
    launched, launch = [], Plan.launch
    monkeypatch.setattr(Plan, "launch", lambda plan, *args, **more: (launched.append(plan), launch(plan, *args, **more))[1])
    plan = Plan(ConvProblem.forward(2, x.shape, w.shape, padding=1), warm.device) if way == "plan" else None
    calls = {
        "function": lambda: pc.conv2d(images, w, padding=1), "plan": lambda: plan(images, w),
        "evaluation": lambda: evaluate(images, w, b, *vectors, padding=1, residual=y, activation="relu"),
        "trained": lambda: pc.conv2d(images.requires_grad_(), filters, padding=1).backward(y),
        "layer": lambda: layer(images).backward(y), "autocast": lambda: cast(images.requires_grad_()),
    }
    filters = w.clone().requires_grad_()

    def cast(images):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made = pc.conv2d(images, filters, padding=1)
        made.backward(y.bfloat16())

    def made_by_python(count):
        launched.clear()
        with torch.enable_grad() if way in ("trained", "layer", "autocast") else torch.no_grad():
            for _ in range(count):
                calls[way]()
        return len(launched) / max(len(plans), 1)

    few = 4 if way == "autocast" else 2  # it casts by torch first
    assert made_by_python(background.OFTEN + few) <= few and all(one.compiler.asked == 1 for one in plans) and plans
    assert made_by_python(50) == 0
    for one in plans:
        one.compiler.coming.set_result(None)
    assert 1 <= made_by_python(20) <= 2 and all(one.settles for one in plans)
    assert made_by_python(20) == 0


@pytest.mark.parametrize("how", ["a slice", "expanded", "not aligned"])
@pytest.mark.parametrize("way", ["plain", "autocast", "layer"])
def test_gradients_with_gaps_go_the_short_way(warm, monkeypatch, way, how):
    """The gradient of ``torch.cat`` is a slice, that of a sum is one number. The other gradients lie as their arrays do."""
    images, filters, launched, launch = last(x).bfloat16().requires_grad_(), last(w).bfloat16().requires_grad_(), [], Plan.launch
    if way == "autocast":
        filters = last(w).requires_grad_()
    layer = FUSED["plain"]() if way == "layer" else None
    if layer is not None:
        layer.conv.bfloat16()
    monkeypatch.setattr(Plan, "launch", lambda plan, *args, **more: (launched.append(plan), launch(plan, *args, **more))[1])

    def step(grad):
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            made = pc.conv2d(images, filters, padding=1) if layer is None else layer(images)
        return torch.autograd.grad(made, (images, filters) if layer is None else (images, layer.conv.weight), grad)

    wide = last(torch.randn(2, 48, 9, 9)).bfloat16()
    apart = torch.empty(y.numel() + 1, dtype=torch.bfloat16)[1:].view(2, 9, 9, 24).permute(0, 3, 1, 2)
    grad = {"a slice": wide[:, 8:32], "expanded": wide.sum().expand(y.shape), "not aligned": apart}[how]
    for _ in range(3):
        step(grad)
    launched.clear()
    made = step(grad)
    assert not launched and all(one.is_contiguous(memory_format=channels_last) for one in made[:1])


def test_better_kernels_take_over(warm):
    warm.again(lambda: pc.conv2d(x, w, padding=1))
    assert repeat.public_calls
    plan = pc.plan.cached_plan(ConvProblem.forward(2, x.shape, w.shape, padding=1), warm.device)
    plan._make_better(plan.config)
    assert not repeat.public_calls
    warm.again(lambda: pc.conv2d(x, w, padding=1))
    pc.tune.store(plan.problem, warm.device, pc.tune.Choice(plan.config, 1.0))
    assert not repeat.public_calls


def test_calls_are_not_remembered_while_better_kernels_are_loaded(warm, monkeypatch):
    """Another thread's call would be remembered with the old ones, for ever."""
    monkeypatch.setattr(background, "OFTEN", 1)
    monkeypatch.delenv("PYCUDA_CONV_BACKGROUND", raising=False)
    monkeypatch.setattr(background, "has_constants", lambda schedule: True)
    monkeypatch.setattr(type(warm.device), "compiled", lambda self, launch: False)
    plan = Plan(ConvProblem.forward(2, x.shape, w.shape, padding=1), warm.device)
    plan._background = background.BackgroundCompile(warm.device, [])
    load, seen = plan._load, []
    monkeypatch.setattr(plan, "_load", lambda schedule: (seen.append(plan.settles), plan(x, w), load(schedule)))
    for _ in range(3):
        plan(x, w)
    assert seen == [False] and plan.settles and len(plan.made_before) == 1
    warm.again(lambda: plan(x, w))


def test_a_plan_is_freed(warm):
    plan = Plan(ConvProblem.forward(2, x.shape, w.shape, padding=1), warm.device)
    warm.again(partial(plan, x, w))
    bound = plan.bind(w)
    warm.again(partial(bound, x))
    gone = weakref.ref(plan), weakref.ref(bound)
    del plan, bound
    gc.collect()
    assert [one() for one in gone] == [None, None]


# ---- on a GPU


@pytest.fixture
def on_gpu(monkeypatch):
    """The tensors of this file on a GPU, and a list that grows with each call that goes the whole way."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    module = sys.modules[__name__]
    for name in ("x", "w", "b", "y"):
        monkeypatch.setattr(module, name, getattr(module, name).cuda())
    whole = []
    convolve = device.convolve
    monkeypatch.setattr(device, "convolve", lambda *args: (whole.append(1), convolve(*args))[1])
    repeat.public_calls.clear()
    yield whole
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits_on_a_gpu(on_gpu, name):
    """On the default stream, on another one, with `out`, and in a graph that is replayed."""
    call = CALLS[name]
    with torch.no_grad():
        expected = call()
        count = len(on_gpu)
        results = [call(), call()]
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            results.append(call())
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = call()
        assert len(on_gpu) == count
        captured.fill_(float("nan"))
        graph.replay()
        results.append(captured)
        out = torch.full_like(expected, float("nan"))
        for _ in range(2):
            results.append(call(out=out).clone())
            out.fill_(float("nan"))
        torch.cuda.synchronize()
    assert all(torch.equal(expected, one) and one.stride() == expected.stride() for one in results)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GRADIENTS)
def test_the_same_gradients_on_a_gpu(on_gpu, name):
    inputs = [t.clone().requires_grad_() for t in (x, w, b)]

    def step():
        made = GRADIENTS[name](*inputs)
        return [made, *torch.autograd.grad(made, inputs, torch.ones_like(made), allow_unused=True)]

    expected = step()
    step()
    count = len(on_gpu)
    found = step()
    assert len(on_gpu) == count or "more" in name
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True) if one is not None)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUSED)
def test_the_same_training_step_on_a_gpu(on_gpu, monkeypatch, name):
    """The bits of the way through Python: the result, gradients and running statistics; on the default stream and on another one."""
    torch.manual_seed(5)
    first = FUSED[name]().cuda()
    images = input_of(name, first)
    steps = []
    for i in range(4):
        layer, given = copy.deepcopy(first), images.clone().requires_grad_()
        if i == 0:
            fused_modules.repeat._again.clear()
        side = torch.cuda.Stream() if i == 3 else torch.cuda.current_stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                made = layer(given)
                made.backward(made.detach() * 0.5)
        side.synchronize()
        assert int(layer.bn.num_batches_tracked) == 2
        steps.append([made.detach(), given.grad, *(p.grad for p in layer.parameters() if p.grad is not None), *layer.buffers()])
        monkeypatch.setattr(fused_modules.modules, "_statistics", None)  # it is made again from now on
    for one in steps[1:]:
        assert len(one) == len(steps[0])
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(steps[0], one, strict=True))
        assert all(a.isfinite().all() for a in one)


@pytest.mark.gpu
def test_threads_on_streams_of_their_own(on_gpu):
    layers = [(torch.randn(2, 64, 20, 20, device="cuda"), torch.randn(64, 64, 3, 3, device="cuda")) for _ in range(8)]
    with torch.no_grad():
        expected = [pc.conv2d(*layer, padding=1) for layer in layers]
    torch.cuda.synchronize()

    def work(i):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            wrong = sum(not torch.equal(pc.conv2d(*layers[i], padding=1), expected[i]) for _ in range(100))
            torch.cuda.current_stream().synchronize()
        return wrong

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [0] * 8


MIXED = {  # channels in and out, filter, options; channels last
    "depthwise": (32, 32, 7, {"padding": 3, "groups": 32}, True), "dense": (64, 72, 3, {"padding": 1, "bias": False}, True),
    "1x1": (64, 96, 1, {}, True), "stride": (16, 32, 2, {"stride": 2}, True), "C order": (24, 40, 3, {"padding": 1}, False),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wide", [True, False], ids=["float32 input", "16-bit input"])
@pytest.mark.parametrize("name", MIXED)
def test_autocast_gives_what_casts_give_on_a_gpu(on_gpu, name, wide, dtype):
    """The same bits as the layer of cast tensors, whose gradients are cast back; torch sums that of the bias in another order."""
    inside, outside, taps, options, last = MIXED[name]
    form = channels_last if last else torch.contiguous_format
    torch.manual_seed(0)
    layer = pnn.Conv2d(inside, outside, taps, **options).cuda().to(memory_format=form)
    mixed._table.clear()
    for step in range(24):
        while step in (12, 16) and not get_device("cuda").all_compiled():
            time.sleep(0.01)
        x = torch.randn(3, inside, 10, 12, device="cuda").contiguous(memory_format=form)
        given = (x if wide else x.to(dtype)).requires_grad_()
        with torch.autocast("cuda", dtype):
            got = layer(given)
        dy = torch.randn_like(got)
        leaves = [given, *layer.parameters()]
        found = torch.autograd.grad(got, leaves, dy)
        cast = [a.detach().to(dtype).requires_grad_() for a in leaves]
        expected = pc.conv2d(*cast, stride=layer.stride, padding=layer.padding, groups=layer.groups)
        reference = torch.autograd.grad(expected, cast, dy)
        assert torch.equal(got, expected) and got.stride() == expected.stride() and got.dtype is dtype
        for one, ref, leaf in zip(found[:2], reference, leaves, strict=False):
            assert one.dtype is leaf.dtype and torch.equal(one, ref.to(leaf.dtype))
        if layer.bias is not None:
            exact = dy.double().sum((0, 2, 3))
            assert found[2].dtype is torch.float32 and (found[2] - exact).abs().max() <= 1e-2 * exact.abs().max()
            assert torch.equal(found[2], found[2].to(dtype).float())
    assert len(mixed._table) == 2 and all(row is not None for row in mixed._table.values())
    if dtype is torch.float16:  # what overflows is infinite, as a GradScaler expects
        large = torch.full_like(dy, 3e4)
        with torch.autocast("cuda", dtype):
            found = torch.autograd.grad(layer(given), leaves, large)
        expected = pc.conv2d(*cast, stride=layer.stride, padding=layer.padding, groups=layer.groups)
        for one, ref in zip(found[:2], torch.autograd.grad(expected, cast, large), strict=False):
            assert torch.equal(one.isinf(), ref.isinf())
        assert layer.bias is None or found[2].isinf().all()
