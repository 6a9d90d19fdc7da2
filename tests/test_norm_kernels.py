"""The kernels of group, instance, layer and RMS norms, run on the CPU: their own text, beside float64."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes  # noqa: F401  # it tells numpy of bfloat16
import numpy as np
import pytest
import simt
import torch

from pycuda_conv.engines.nn import norm as engine
from pycuda_conv.engines.nn.norm import PLANES, ROWS, SLICED_ROWS, SMALL, Norm

pytestmark = pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))

SPECIAL = {None: lambda v: v, "relu": lambda v: np.maximum(v, 0), "silu": lambda v: v / (1 + np.exp(-v)),
           "gelu": lambda v: v * 0.5 * (1 + np.vectorize(__import__("math").erf)(v / np.sqrt(2)))}  # fmt: skip


def exact(norm, x, gamma, beta):
    """In float64: the result, and mean and 1 / sqrt(variance + eps). Arrays are (N, C, P)."""
    of = x.astype(np.float64).reshape(norm.N, norm.groups, -1)
    mean = np.zeros((norm.N, norm.groups, 1)) if norm.rms else of.mean(2, keepdims=True)
    square = ((of - mean) ** 2).mean(2, keepdims=True)
    rstd = 1 / np.sqrt(np.maximum(square, norm.eps) if norm.rms == 2 else square + norm.eps)
    out = ((of - mean) * rstd).reshape(x.shape)
    out = out * (1 if gamma is None else gamma.astype(np.float64)[:, None]) + (0 if beta is None else beta.astype(np.float64)[:, None])
    return SPECIAL[norm.activation](out), np.concatenate([mean, rstd], 2)


def operands(norm, mean=0.0, seed=0):
    rng = np.random.default_rng(seed)
    dtype = np.dtype(norm.dtype)
    x = (rng.standard_normal((norm.N, norm.C, norm.P)) + mean).astype(dtype)
    gamma, beta = (rng.standard_normal(norm.C).astype(np.float32 if wide else dtype) for wide in norm.wide)
    return x, gamma, beta


def computed(norm, x, gamma, beta, form, seed=1, multiprocessors=2, added=None):
    steps, workspace = engine.forward(norm, multiprocessors, form)
    given = np.ascontiguousarray(x if norm.layout == "NCHW" else np.moveaxis(x, 1, 2))
    stats = np.full(norm.N * norm.groups * 8, 0xFF, np.uint8)
    vectors = [None if one is None else np.frombuffer(one.tobytes(), np.uint8) for one in (gamma, beta, added)]
    buffers = [
        np.frombuffer(given.tobytes(), np.uint8), *vectors, np.full(given.nbytes, 0xFF, np.uint8), stats,
        np.full(workspace, 0xFF, np.uint8)
    ]
    memory = SimpleNamespace(buffers=buffers)
    simt.run([[step] for step in steps], memory, seed)
    out = memory.buffers[4].view(given.dtype).reshape(given.shape)
    return (out if norm.layout == "NCHW" else np.moveaxis(out, 2, 1)), memory.buffers[5].view("f").reshape(norm.N, norm.groups, 2)


CASES = [
    (Norm("float16", "NHWC", 2, 32, 70, 4, activation="silu"), SMALL), (Norm("bfloat16", "NHWC", 1, 20, 33, 2, wide=(True, True)), SMALL),
    (Norm("float32", "NHWC", 2, 24, 300, 8, activation="gelu"), SMALL), (Norm("float16", "NHWC", 1, 6, 9, 2, activation="relu"), SMALL),
    (Norm("float32", "NHWC", 1, 64, 1100, 2, wide=(True, True)), SMALL), (Norm("float16", "NHWC", 1, 16, 2600, 1, activation="silu"), SMALL),
    (Norm("float32", "NHWC", 2, 8, 50, 8, rms=True), SMALL),
    (Norm("float16", "NHWC", 2, 32, 700, 4, activation="silu"), PLANES), (Norm("bfloat16", "NHWC", 1, 20, 300, 2, wide=(True, False)), PLANES),
    (Norm("float32", "NHWC", 2, 264, 40, 8, activation="gelu"), PLANES), (Norm("float16", "NHWC", 1, 6, 1000, 2, activation="relu"), PLANES),
    (Norm("float32", "NHWC", 1, 5, 90, 1), PLANES), (Norm("float32", "NHWC", 1, 8, 900, 2, rms=True), PLANES),
    (Norm("float16", "NCHW", 2, 32, 70, 4, activation="silu"), ROWS), (Norm("bfloat16", "NCHW", 1, 20, 49, 2, wide=(True, True)), ROWS),
    (Norm("float32", "NCHW", 3, 96, 1, 1, activation="gelu"), ROWS), (Norm("float16", "NHWC", 37, 40, 1, 1, activation="relu"), ROWS),
    (Norm("bfloat16", "NCHW", 5, 1536, 1, 1, rms=True, wide=(True, False)), ROWS), (Norm("float32", "NCHW", 1, 6, 1000, 2), ROWS),
    (Norm("float32", "NCHW", 1, 3, 7, 3), ROWS), (Norm("bfloat16", "NCHW", 19, 96, 1, 1, eps=1e-26, rms=2, activation="silu"), ROWS),
    (Norm("float32", "NCHW", 7, 40, 1, 1, eps=1.1, rms=2), ROWS),
    # more rows than blocks take at once
    (Norm("bfloat16", "NCHW", 1700, 96, 1, 1, rms=2), ROWS), (Norm("float16", "NCHW", 60, 1536, 1, 1, rms=True), ROWS), (Norm("float32", "NCHW", 70, 640, 1, 1), ROWS),
    (Norm("float16", "NCHW", 2, 32, 1000, 4, activation="silu"), SLICED_ROWS), (Norm("float32", "NCHW", 1, 6, 3001, 3), SLICED_ROWS),
    (Norm("bfloat16", "NCHW", 2, 3000, 1, 1, activation="gelu"), SLICED_ROWS),
]  # fmt: skip
LIMITS = {"float32": 1e-6, "float16": 2**-10, "bfloat16": 2**-7}


@pytest.mark.parametrize("norm, form", CASES, ids=str)
def test_a_norm_is_float64s(norm, form):
    """An image has the same bits alone, whatever threads come first; without gamma and beta, numbers may be added to its channels."""
    x, gamma, beta = operands(norm)
    wanted, stats = exact(norm, x, gamma, beta)
    out, found = computed(norm, x, gamma, beta, form)
    assert np.abs(found - stats).max() < 1e-5
    assert (np.abs(out.astype("d") - wanted) / (np.abs(wanted) + 1)).max() < LIMITS[norm.dtype]
    alone, own = computed(replace(norm, N=1), x[-1:], gamma, beta, form, seed=7)
    assert alone.tobytes() == np.ascontiguousarray(out[-1:]).tobytes() and own.tobytes() == np.ascontiguousarray(found[-1:]).tobytes()
    added = np.random.default_rng(3).standard_normal((norm.N, norm.C)).astype(x.dtype) if form in (SMALL, PLANES) else None
    wanted, stats = exact(norm, x.astype("d") + (0 if added is None else added.astype("d")[:, :, None]), None, None)
    plain, found = computed(norm, x, None, None, form, added=added)
    assert np.abs(found - stats).max() < 1e-5 and np.abs(plain.astype("d") - wanted).max() < 4 * LIMITS[norm.dtype]


@pytest.mark.parametrize("norm, form", [case for case in CASES if case[0].dtype == "float32" and not case[0].rms], ids=str)
@pytest.mark.parametrize("mean", [10.0, -1000.0])
def test_variances_of_a_large_mean(norm, form, mean):
    x, gamma, beta = operands(norm, mean)
    _, stats = exact(norm, x, gamma, beta)
    _, found = computed(norm, x, gamma, beta, form)
    assert np.abs(found[..., 1] / stats[..., 1] - 1).max() < 5e-7  # of 1 / sqrt: half of the variance's


# ---- gradients


def exact_gradients(norm, x, gamma, beta, dout):
    """dx, gamma's and beta's gradient in float64."""
    of = [torch.from_numpy(one.astype(np.float64)).requires_grad_() for one in (x, gamma, beta)]
    rows = of[0].reshape(norm.N, norm.groups, -1)
    mean = torch.zeros(()) if norm.rms else rows.mean(2, keepdim=True)
    xhat = ((rows - mean) / (((rows - mean) ** 2).mean(2, keepdim=True) + norm.eps).sqrt()).reshape(x.shape)
    y = xhat * of[1][:, None] + of[2][:, None]
    F = torch.nn.functional
    z = {None: lambda v: v, "relu": F.relu, "silu": F.silu, "gelu": F.gelu}[norm.activation](y)
    return [one.numpy() for one in torch.autograd.grad(z, of, torch.from_numpy(dout.astype(np.float64)))]


def computed_gradients(norm, x, gamma, beta, dout, stats, form="", seed=1, more=None):
    steps, workspace = engine.backward(norm, 2, form)
    small = engine.small_of(norm)
    narrow = small is not None and small.cluster > engine.NARROW_CLUSTER and small.vector * norm.itemsize < 16
    assert (steps[0].kernel == "norm_small_dx") == (form == "" and small is not None and not narrow)
    given = (x, dout) if more is None else (x, dout, more)
    lying = [np.ascontiguousarray(one if norm.layout == "NCHW" else np.moveaxis(one, 1, 2)) for one in given]
    as_bytes = [np.frombuffer(one.tobytes(), np.uint8) for one in (*lying[:2], stats.astype("f"), gamma, beta, *lying[2:])]
    as_bytes += [None] * (more is None)
    made = [np.full(n, 0xFF, np.uint8) for n in (lying[0].nbytes, gamma.nbytes, beta.nbytes, workspace)]
    memory = SimpleNamespace(buffers=[*as_bytes, *made])
    simt.run([[step] for step in steps], memory, seed)
    dx = memory.buffers[6].view(x.dtype).reshape(lying[0].shape)
    return (dx if norm.layout == "NCHW" else np.moveaxis(dx, 2, 1)), memory.buffers[7].view(gamma.dtype), memory.buffers[8].view(beta.dtype)


GRADIENTS = [case[0] for case in CASES if engine.gradient_fits(case[0])] + [
    Norm("float32", "NCHW", 70, 24, 1, 1, activation="silu"), Norm("float16", "NCHW", 9, 2048, 1, 1, rms=True, wide=(True, True)),
    Norm("float32", "NCHW", 3, 4000, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("norm, form", [(norm, "") for norm in GRADIENTS] + [(norm, PLANES) for norm in GRADIENTS if engine.small_of(norm)], ids=str)
def test_gradients_are_float64s(norm, form):
    x, gamma, beta = operands(norm)
    dout = np.random.default_rng(5).standard_normal(x.shape).astype(x.dtype)
    _, stats = exact(norm, x, gamma, beta)
    wanted = exact_gradients(norm, x, gamma, beta, dout)
    found = computed_gradients(norm, x, gamma, beta, dout, stats, form)
    for one, right in zip(found, wanted, strict=True):
        limit = LIMITS[one.dtype.name] * 4
        assert np.abs(one.astype("d") - right).max() < limit * max(np.abs(right).max(), 1)
    again = computed_gradients(norm, x, gamma, beta, dout, stats, form, seed=4)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(found, again, strict=True))
    if engine.adds_more(norm):
        more = np.random.default_rng(6).standard_normal(x.shape).astype(x.dtype)
        dx, *others = computed_gradients(norm, x, gamma, beta, dout, stats, form, more=more)
        right = wanted[0] + more.astype("d")
        assert np.abs(dx.astype("d") - right).max() < LIMITS[dx.dtype.name] * 4 * max(np.abs(right).max(), 1)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(found[1:], others, strict=True))


@pytest.mark.parametrize("kind", ["float16", "float32"])
@pytest.mark.parametrize("with_more", [False, True])
def test_moments_that_a_convolution_noted(kind, with_more):
    norm = Norm(kind, "NHWC", 2, 24, 192, 4, activation="silu")
    x, gamma, beta = operands(norm, mean=100.0)
    added = np.random.default_rng(3).standard_normal((norm.N, norm.C)).astype(x.dtype) if with_more else None
    of_slices = np.moveaxis(x, 1, 2).astype(np.float64).reshape(norm.N * 3, 64, norm.C)
    parts = np.stack([of_slices.mean(1), of_slices.var(1) * 64], 1).astype("f")
    steps = engine.after_moments(norm, 2, 64, (6, 512))
    given = np.ascontiguousarray(np.moveaxis(x, 1, 2))
    buffers = [
        given, gamma, beta, added, np.full_like(given, np.nan), np.full(norm.N * norm.groups * 2, np.nan, "f"),
        np.concatenate([np.full(128, np.nan, "f"), parts.ravel()])
    ]
    memory = SimpleNamespace(buffers=[None if one is None else np.frombuffer(one.tobytes(), np.uint8) for one in buffers])
    simt.run([[step] for step in steps], memory, 1)
    wanted, _ = exact(norm, x.astype("d") + (0 if added is None else added.astype("d")[:, :, None]), gamma, beta)
    out = np.moveaxis(memory.buffers[4].view(x.dtype).reshape(given.shape), 2, 1).astype("d")
    assert (np.abs(out - wanted) / (np.abs(wanted) + 1)).max() < max(LIMITS[kind], 1e-4)
