"""Operands that have to be copied first, and results that have to be turned, in the schedules of repeated calls."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import simt
import torch
from reference import assert_exact, fprop

import pycuda_conv as pc
from pycuda_conv import Plan, engines, repeat
from pycuda_conv.arrays.tensors import TORCH
from pycuda_conv.engines.schedule import Buffer

H200 = SimpleNamespace(backend="cuda", capability=(9, 0), multiprocessors=132, model="NVIDIA H200", name="fake", constants_pay=False)
CASE = fprop((2, 6, 5, 4), (8, 6, 3, 3), padding=1)


def strided(array: torch.Tensor) -> torch.Tensor:
    return torch.stack((array, torch.full_like(array, 99)), -1)[..., 0]


@pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("which", ["input", "weight", "bias", "residual", "all"])
def test_what_is_launched(which, turned):
    """The launches of a schedule with copies, on the machine that runs kernels."""
    problem = pc.ConvProblem.forward(2, CASE.input_shape, CASE.weight_shape, (8,), padding=1, residual_shape=(2, 8, 5, 4))
    config = next(one for one in engines.candidates(problem, H200) if type(one).__name__ == "Batched")
    schedule = engines.schedule(problem, config, H200)
    plan = SimpleNamespace(
        problem=problem, order=None, weight_order=None, filter_order=None, result_shape=problem.result_shape, operand_bytes=(0,) * 5,
    )  # fmt: skip
    x, w, b = map(torch.from_numpy, CASE.integers("float32"))
    r = torch.randint(-5, 5, problem.result_shape).float()
    given = {"input": x, "weight": w, "bias": b, "scale": None, "residual": r}
    operands = [one if one is None or which not in (name, "all") else strided(one) for name, one in given.items()]
    order = (0, 2, 3, 1) if turned else None
    found = repeat._strided(TORCH, plan, operands, False)
    assert len(found) == (4 if which == "all" else 1)
    steps, nbytes = repeat._after_copies(TORCH, plan, schedule.whole, found, order, schedule.workspace_bytes)
    assert len(steps) == len(schedule.whole) + len(found) + turned
    buffers: list = [None] * len(Buffer)

    def memory_of(one: torch.Tensor) -> np.ndarray:
        return np.frombuffer(one.untyped_storage().tolist() and bytes(one.untyped_storage().tolist()), np.uint8)

    for buffer, one in zip((Buffer.INPUT, Buffer.WEIGHT, Buffer.BIAS, Buffer.SCALE, Buffer.RESIDUAL), operands, strict=True):
        buffers[buffer] = None if one is None else memory_of(one)
    buffers[Buffer.RESULT], buffers[Buffer.WORKSPACE] = (np.full(n, 0xFF, np.uint8) for n in (4 * r.numel(), nbytes))
    memory = SimpleNamespace(buffers=buffers)
    simt.run(steps, memory)
    got = memory.buffers[Buffer.RESULT].view("f")
    got = got.reshape(2, 5, 4, 8).transpose(0, 3, 1, 2) if turned else got.reshape(2, 8, 5, 4)
    assert_exact(got, CASE.reference(x.numpy(), w.numpy(), b.numpy()) + r.numpy(), config)


def cases(dtype):
    torch.manual_seed(0)
    x, w, last = torch.randn(4, 32, 18, 20), torch.randn(24, 16, 3, 3), torch.channels_last
    x, w = x.to("cuda", dtype), w.to("cuda", dtype)
    yield "channels", x.contiguous(memory_format=last)[:, 8:24], w
    yield "a filter in channels last", x[:, :16].contiguous(), w.contiguous(memory_format=last)
    yield "expanded", x[:, :1].expand(-1, 16, -1, -1), w
    yield "columns", x[:, :16, :, ::2], w
    yield "turned", x[:, :16].transpose(2, 3), w
    yield "not aligned", torch.empty(4 * 16 * 18 * 20 + 1, device="cuda", dtype=dtype)[1:].view(4, 16, 18, 20).copy_(x[:, :16]), w
    yield "channels last", x[:, :16].contiguous(memory_format=last), w
    yield "all", x[:, ::2], w.expand(2, *w.shape)[1].transpose(2, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_repeated_calls_give_the_same_bits(dtype):
    """What the launcher in C copies, Python copied before."""
    for what, x, w in cases(dtype):
        residual = pc.conv2d(x, w, padding=1).transpose(2, 3).contiguous().transpose(2, 3)
        for more in ({}, {"residual": residual, "activation": "relu"}):
            ref = torch.nn.functional.conv2d(x.double(), w.double(), padding=1)
            ref = (ref + residual.double()).relu() if more else ref
            made = [pc.conv2d(x, w, padding=1, **more) for _ in range(4)]
            out = torch.full_like(made[0], float("nan"))
            assert pc.conv2d(x, w, padding=1, out=out, **more) is out and pc.conv2d(x, w, padding=1, out=out, **more) is out
            for one in (*made[1:], out):
                assert torch.equal(one, made[0]) and one.stride() == made[0].stride(), what
            size = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-13}[dtype]
            assert (made[-1].double() - ref).abs().max() <= size * ref.abs().max(), what
    plan = Plan(pc.ConvProblem.forward(2, (4, 16, 18, 20), (24, 16, 3, 3), dtype="float16"))
    bound = plan.bind(torch.randn(24, 16, 3, 3, device="cuda").half())
    wide = torch.randn(4, 16, 18, 40, device="cuda").half()[..., ::2]
    assert torch.equal(bound(wide), bound(wide)) and torch.equal(bound(wide), bound(wide.contiguous()))
