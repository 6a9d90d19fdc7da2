"""The CUDA text of batch norms behind convolutions, run on the CPU on the simulated machine, beside float64."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes  # noqa: F401  # it tells numpy of bfloat16
import numpy as np
import pytest
import simt
import torch

from pycuda_conv.engines.nn import batch_norm
from pycuda_conv.engines.nn.batch_norm import Pixels

pytestmark = pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
F = torch.nn.functional

MULTIPROCESSORS = 2
WORDS = {
    None: lambda v: v, "relu": torch.relu, "relu6": F.relu6, ("leaky_relu", 0.1): lambda v: F.leaky_relu(v, 0.1), "hardswish": F.hardswish,
    "gelu": F.gelu, "silu": F.silu, "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
}  # fmt: skip
EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "float32": 2.0**-22}


def memory_of(*arrays):
    return SimpleNamespace(
        buffers=[None if one is None else np.frombuffer(np.ascontiguousarray(one).tobytes(), np.uint8).copy() for one in arrays]
    )


def launched(maker, pixels, arrays, results, *options):
    """The results, poisoned before, of launches that get these arrays."""
    steps, workspace = maker(pixels, MULTIPROCESSORS, *options)
    poisoned = [None if one is None else np.full(one.shape, np.nan, one.dtype) for one in results]
    memory = memory_of(*arrays, *poisoned, np.full(workspace // 4, np.nan, "f"))
    simt.run([[step] for step in steps], memory, 1)
    made = memory.buffers[len(arrays) : len(arrays) + len(results)]
    return [None if one is None else found.view(one.dtype).reshape(one.shape) for one, found in zip(results, made, strict=True)]


def in_float64(array, layout):
    """(N, K, plane) as a tensor."""
    exact = torch.from_numpy(np.asarray(array).astype(np.float64))
    return exact if layout == "NCHW" else exact.movedim(2, 1)


@pytest.mark.turns
@pytest.mark.parametrize("dtype, shape", [("bfloat16", (2, 48, 70)), ("float16", (3, 264, 9)), ("bfloat16", (2, 12, 33)), ("float32", (2, 40, 50))])
@pytest.mark.parametrize("activation", WORDS)
def test_passes_behind_a_convolution(activation, dtype, shape):
    """Channels last, with values beyond all bends of the activations."""
    (n, k, plane), rng = shape, np.random.default_rng(len(str(activation)))
    pixels = Pixels(dtype, "NHWC", n, k, plane)
    y, dout = ((rng.standard_normal((n, plane, k)) * s + m).astype(dtype) for s, m in ((1, 1), (1, 0)))
    gamma, beta = (rng.standard_normal(k).astype("f") * s for s in (5, 1))
    mean, invstd, sums = rng.standard_normal(k).astype("f"), rng.uniform(0.5, 1.5, k).astype("f"), np.zeros((2, k), "f")
    out, _ = launched(batch_norm.forward, pixels, (y, mean, invstd, gamma, beta, None), (y, None), activation)
    dy, sums, _ = launched(batch_norm.backward, pixels, (y, dout, mean, invstd, gamma, beta, None), (y, sums, None), activation, True)

    wide = [torch.from_numpy(one.astype(np.float64))[:, None] for one in (mean, invstd, gamma, beta)]
    xhat = (in_float64(y, "NHWC") - wide[0]) * wide[1]
    before = (xhat * wide[2] + wide[3]).requires_grad_()
    after = WORDS[activation](before)
    assert before.min() < -6 and before.max() > 7
    g = torch.autograd.grad(after, before, in_float64(dout, "NHWC"))[0] if activation else in_float64(dout, "NHWC")
    dbeta, dgamma = g.sum((0, 2)), (g * xhat).sum((0, 2))
    wanted = wide[1] * wide[2] * (g - (dbeta[:, None] + xhat * dgamma[:, None]) / (n * plane))

    def near(found, exact, eps):
        scale = float(exact.abs().max())
        assert float((torch.as_tensor(np.asarray(found).astype(np.float64)) - exact).abs().max()) <= eps * scale

    near(in_float64(out, "NHWC"), after.detach(), EPS[dtype])
    near(sums[0], dbeta, 3e-6)
    near(sums[1], dgamma, 3e-6)
    near(in_float64(dy, "NHWC"), wanted, 2 * EPS[dtype])


@pytest.mark.parametrize("activation", ["gelu", "silu", "gelu_tanh", "hardswish", "relu6"])
def test_gradients_of_huge_numbers(activation):
    """At infinities, and at numbers that overflow on the way, derivatives are finite: beta's gradient is their sum."""
    values = np.array([-np.inf, -3e38, -1e20, -200, -90, -1e-30, 0, 1e-30, 90, 200, 1e20, 3e38, np.inf], "f")
    pixels, one, zero = Pixels("bfloat16", "NHWC", 1, 8, len(values)), np.ones(8, "f"), np.zeros(8, "f")
    y = np.repeat(values[None, :, None], 8, 2).astype("bfloat16")
    dout = np.ones_like(y)
    given = y, dout, zero, one, one, zero, None
    dy, sums, _ = launched(batch_norm.backward, pixels, given, (y, np.zeros((2, 8), "f"), None), activation, False)
    exact = torch.from_numpy(y.astype(np.float64)[0, :, 0]).requires_grad_()
    finite = exact.detach().isfinite()
    wanted = torch.autograd.grad(WORDS[activation](exact).nan_to_num(0, 0, 0).sum(), exact)[0]
    wanted[~finite] = torch.tensor([0.0, 0.0 if activation == "relu6" else 1.0], dtype=torch.float64)
    assert np.allclose(sums[0], float(wanted.sum()), atol=1e-5), sums[0]
    assert np.allclose(dy.astype("f")[0, finite.numpy(), 0], wanted[finite].numpy(), atol=4e-3)


@pytest.mark.parametrize("k", [1152, 320, 24])
@pytest.mark.parametrize("maker, options, each", [
    (batch_norm.forward, ("silu",), 6), (batch_norm.backward, ("relu", True), 6), (batch_norm.backward, ("silu", True), 5), (batch_norm.statistics, (1e-5, 0.1), 5),
])  # fmt: skip
def test_all_blocks_run_at_once(maker, options, each, k):
    """A block more than a multiprocessor holds would run when the others have ended."""
    steps, _ = maker(Pixels("bfloat16", "NHWC", 64, k, 784), 132, *options)
    grids = [step.grid for step in steps if step.kernel not in ("add_slices", "batch_norm_statistics")]
    assert grids and all(0.9 * each * 132 < grid <= each * 132 for grid in grids)
