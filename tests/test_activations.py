"""Every activation behind every kernel, in all functions, plans and gradients, against float64."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import simt
import test_epilogue as epilogue
import torch
from awkward import DEPTHWISE
from modes import H200
from reference import (
    ACTIVATIONS,
    DTYPES,
    EPS,
    NVCC,
    SUM_EPS,
    TINY,
    activated,
    activation_of,
    assert_close,
    needs_nvcc,
)  # fmt: skip
from test_epilogue import arrays, small

import pycuda_conv as pc
from pycuda_conv import ConvProblem, Plan
from pycuda_conv.arguments import ACTIVATIONS as WORDS
from pycuda_conv.engines.direct.direct import Single
from pycuda_conv.engines.hopper.dense import DenseNhwc
from pycuda_conv.runtime.base import KERNEL_DIR

STEEPEST = 1.5  # the largest derivative of all activations here: hard swish's, at 3
NAMES = [str(one) for one in ACTIVATIONS]


def finishing(problem: ConvProblem, activation, everything: bool = True) -> ConvProblem:
    return replace(problem, has_scale=everything, has_residual=everything, activation=activation)


# ---- numbers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=NAMES)
def test_numbers(device, activation, dtype):
    """Of all sizes; and what is no number, as torch has it."""
    most = 3e38 if dtype in ("float32", "bfloat16") else 6e4 if dtype == "float16" else 1e300
    sizes = [0.0, -0.0, 1e-30, -1e-30, most, -most, -87.0, -88.5, -104.0, 3.0, -3.0, 6.0]
    x = np.array([*np.linspace(-15, 15, 3001), *sizes], dtype)
    one = np.ones((1, 1, 1), dtype)
    got = pc.conv1d(x[None, None], one, activation=activation, device=device)[0, 0]
    ref = activated(x, activation)
    assert_close(got, ref, 4 * SUM_EPS[dtype] * np.abs(x.astype(float)) + EPS[dtype] * np.abs(ref) + TINY[dtype], activation)
    word = activation[0] if isinstance(activation, tuple) else activation
    low = {"relu": 0, "relu6": 0, "leaky_relu": -np.inf}.get(word, np.nan)  # -inf * 0 is no number, in torch either
    specials = np.array([[[np.nan, np.inf, -np.inf]]], dtype)
    for residual in (None, specials):
        found = pc.conv1d(specials, one, residual=residual, activation=activation, device=device)[0, 0].astype(float)
        assert np.isnan(found[0]) and found[1] == (6 if word == "relu6" else np.inf) and np.array_equal(found[2], low, equal_nan=True)


def test_kernels_and_plans_number_activations_alike():
    words = re.search(r"enum {([^}]*)}", (KERNEL_DIR / "core/activation.cuh").read_text())[1]
    assert [word.strip().lower() for word in words.split(",")][1:] == list(WORDS[1:])


# ---- kernels; tests/cases have each with some of them


def test_a_layer_s_constants_hold_the_activation_but_not_the_slope():
    from pycuda_conv import background, engines

    def texts(activation):
        schedule = engines.schedule(finishing(DEPTHWISE.problem("float32"), activation), Single(), H200)
        return [launch.source() for launch in background.launches(background.with_constants(schedule))]

    assert texts("leaky_relu") == texts(("leaky_relu", 0.2)) != texts("silu")


@pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=NAMES)
def test_numbers_of_tensor_cores(activation, dtype):
    """Of all sizes, by texts that know the activation and by others: the same bits."""
    k = 8 if dtype == "float16" else 4
    problem = ConvProblem.forward(2, (1, k, 16, 64), (k, k, 1, 1), dtype=dtype, precision="tf32", layout="NHWC", activation=activation)
    x = np.concatenate([np.linspace(-15, 15, k * 1024 - 6), [0.0, -0.0, -87.0, 88.5, 3.0, -3.0]]).astype(dtype).reshape(1, k, 16, 64)
    x = x if dtype == "float16" else np.round(x * 64) / np.float32(64)  # as TF32 has them
    w = np.eye(k, dtype=dtype).reshape(k, k, 1, 1)
    found = [simt.computed(problem, DenseNhwc(64, 32, 3), x, w, constants=constants) for constants in (False, True)]
    assert np.array_equal(*found)
    ref = activated(x, activation)
    assert_close(found[0], ref, 4 * SUM_EPS[dtype] * np.abs(x.astype(float)) + EPS[dtype] * np.abs(ref) + TINY[dtype], activation)


@needs_nvcc
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=NAMES)
def test_a_layer_s_activation_is_computed_in_its_place(activation):
    """A text that knows it calls no function for it: calls, one for four numbers, took several times as long as all else of a 1x1 layer."""
    from pycuda_conv import background, engines

    problems = [ConvProblem.forward(2, (2, 32, 9, 9), shape, (32,), groups=groups, dtype="float16", layout="NHWC", activation=activation)
                for shape, groups in (((32, 1, 3, 3), 32), ((32, 32, 1, 1), 1))]
    texts = set()
    for problem in problems:
        schedule = engines.schedule(problem, engines.choose(problem, H200), H200)
        texts |= {(launch.source(), launch.arch or "sm_90") for launch in background.launches(background.with_constants(schedule))}
    for text, arch in texts:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "kernel.cu").write_text(text)
            command = [NVCC, "-ptx", "-std=c++17", f"-arch={arch}", "-I", KERNEL_DIR, "-o", "kernel.ptx", "kernel.cu"]
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
            made = Path(folder, "kernel.ptx").read_text()
        assert "call" not in made and made.count(".entry") == 1


# ---- functions, plans, dask


@pytest.mark.turns
@pytest.mark.parametrize("kind", ["numpy", "torch", "dask"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=NAMES)
def test_functions(device, activation, kind):
    for case in (small(False, 2, padding=1), small(True, 1)):
        x, w, b, s, r = arrays(case, "float64", "all", integers=False)
        ref = activated(epilogue.expected(case, "before", x, w, b, s, r), activation)
        if kind == "torch":
            x, w, b, s, r = map(torch.from_numpy, (x, w, b, s, r))
        if kind == "dask":
            x = pytest.importorskip("dask.array").from_array(x, chunks=(1, -1, *(3,) * case.ndim))
        y = epilogue.function(case)(x, w, b, scale=s, residual=r, activation=activation, **case.options, device=device)
        np.testing.assert_allclose(np.asarray(y), ref, rtol=1e-12, atol=1e-12)
        if kind == "numpy":
            plan = Plan(finishing(case.problem("float64"), activation), device)
            assert np.array_equal(plan.bind(w, b, s)(x, residual=r), y) and np.array_equal(plan(x, w, b, scale=s, residual=r), y)


def test_one_form_of_each():
    def asked(activation):
        return ConvProblem.forward(2, (1, 1, 3, 3), (1, 1, 1, 1), activation=activation)

    assert asked(("leaky_relu", 0.01)) == asked("leaky_relu") and asked(["leaky_relu", np.float32(0.5)]) == asked(("leaky_relu", 0.5))
    assert len({asked(activation) for activation in (None, *ACTIVATIONS)}) == len(ACTIVATIONS) + 1
    assert str(asked(("leaky_relu", 0.25))).endswith("float32 leaky_relu 0.25") and asked("silu").plain == asked(None)


# ---- torch


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=NAMES)
def test_gradients(device, activation):
    torch.manual_seed(0)
    where = "cpu" if device == "opencl" else "cuda"
    shapes = (1, 2, 2, 3), (2, 2, 1, 2), (2,), (2,), (1, 2, 2, 2)  # few, as each number's derivative may be found by itself
    given = [torch.randn(s, dtype=torch.float64).to(where).requires_grad_() for s in shapes]

    def ours(x, w, b, scale, residual):
        return pc.conv2d(x, w, b, scale=scale, residual=residual, activation=activation)

    def theirs(x, w, b, scale, residual):
        y = torch.nn.functional.conv2d(x, w) * scale.view(-1, 1, 1) + b.view(-1, 1, 1) + residual
        return activation_of(activation)(y)

    def results(function):
        y = function(*given)
        first = torch.autograd.grad(y.cos().sum(), given, create_graph=True)
        return y, *first, *torch.autograd.grad(sum(g.sin().sum() for g in first), given)

    for one, other in zip(results(ours), results(theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    close = [t.detach() for t in given]
    compiled = [torch.compile(ours, backend="aot_eager", fullgraph=True)] if activation in ("silu", ("leaky_relu", 0.2)) else []
    for function in (ours, *compiled):
        torch.testing.assert_close(function(*close), theirs(*close), rtol=1e-10, atol=1e-10)  # in one step, where it is not compiled
    fast = activation != "silu"  # a random direction of all numbers instead of each number by itself
    assert torch.autograd.gradcheck(ours, given, fast_mode=fast) and torch.autograd.gradgradcheck(ours, given, fast_mode=fast)


@pytest.mark.parametrize("activation", ACTIVATIONS[1::3], ids=NAMES[1::3])
def test_autocast(device, activation):
    where = "cpu" if device == "opencl" else "cuda"
    x, w = (torch.randn(s).to(where) for s in ((2, 3, 9, 9), (5, 3, 3, 3)))
    with torch.autocast(where, torch.bfloat16):
        once = pc.conv2d(x, w, activation=activation)
        traced = pc.conv2d(x, w.requires_grad_(), activation=activation)
    sums = torch.nn.functional.conv2d(x.bfloat16().double(), w.detach().bfloat16().double())
    ref = activation_of(activation)(sums)
    assert once.dtype == traced.dtype == torch.bfloat16
    assert ((once.double() - ref).abs() <= 2.0**-8 * ref.abs() + 1e-4).all()  # rounded once
    assert ((traced.double() - ref).abs() <= 2.0**-8 * (ref.abs() + STEEPEST * sums.abs()) + 1e-4).all()  # twice, as by torch
