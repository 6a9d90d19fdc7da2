"""Results are not too small: what tensor cores cut from their sums is given back (cu/core/truncation.cuh), in the model and on a GPU."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
import truncation
from truncation import one_product, rounded, shrinkage, three_products, three_tf32_products

import pycuda_conv as pc
from pycuda_conv.engines.hopper.gemm import ImplicitGemm
from pycuda_conv.runtime.base import KERNEL_DIR

SIDE = 64  # a case of the model has so many results squared


#: What truncation.cuh needs of CUDA.
SHIM = """
#include <cmath>
#include <cstring>
#define __device__
#define __forceinline__ inline
static unsigned __float_as_uint(float v) { unsigned bits; memcpy(&bits, &v, sizeof v); return bits; }
static float rsqrtf(float v) { return 1 / sqrtf(v); }
"""


def operands(kind: str, depth: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x, w = (rng.standard_normal((depth, SIDE)).astype(np.float32).astype(np.float64) for _ in range(2))
    if kind == "integers":
        return np.rint(3 * x), np.rint(3 * w)
    return {"signed": (x, w), "relu": (np.maximum(x, 0), w), "positive": (abs(x), abs(w))}[kind]


def test_the_kernels_constants_are_the_models():
    text = (KERNEL_DIR / "core/truncation.cuh").read_text()
    for name in ("CUT", "STEADY"):
        assert float(re.search(rf"{name} = ([\d.e-]+)f", text)[1]) * 16 / 15 == getattr(truncation, name)
    of_three = (KERNEL_DIR / "hopper/tf32_limbs.cuh").read_text()
    assert float(re.search(r"PROMOTED = ([\d.e-]+)f", of_three)[1]) * 16 / 15 == truncation.PROMOTED


#: Products, kinds of numbers, depths, the most that is left of a bias, and the least that there is of it before it is given back.
BIAS = [
    (three_products, ("signed", "relu"), (64, 192, 1152, 2304), 1e-8, -4e-8), (three_tf32_products, ("signed", "relu"), (64, 256), 1e-8, -4e-8),
    (three_products, ("positive",), (192, 2304), 9e-8, -1.9e-7), (one_product, ("signed",), (576, 2304), 6e-8, -4e-7),
]  # fmt: skip


@pytest.mark.parametrize(
    ("products", "kind", "depth", "most", "before"),
    [(of, kind, depth, most, before) for of, kinds, depths, most, before in BIAS for kind in kinds for depth in depths],
)
def test_sums_have_no_bias(products, kind, depth, most, before):
    """Before, 0.8 of the factor itself; three products in TF32 are closer than a chain, which is what plain cores make of it."""
    x, w = operands(kind, depth)

    def of(**options):
        made = products(x, w, **options)
        return made if products is one_product else (made, x.T @ w)

    got, exact = of()
    found, error = shrinkage(got, exact)
    assert abs(found) < most + 4 * error and shrinkage(*of(give_back=False))[0] < before
    if products is three_tf32_products:
        chain = np.zeros((SIDE, SIDE))
        for k in range(depth):
            chain = rounded(chain + np.multiply.outer(x[k], w[k]))
        assert np.linalg.norm(got - exact) < np.linalg.norm(chain - exact)


@pytest.mark.parametrize("depth", [64, 576, 2304])
def test_small_integers_stay_exact(depth):
    x, w = operands("integers", depth)
    for found in three_products(x, w), three_tf32_products(x, w), one_product(x, w)[0]:
        assert (found == x.T @ w).all()


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_what_the_kernels_give_back(tmp_path):
    """The header's own text, by g++: sums that are not finite or that nothing was cut from stay, others are as in the model."""
    text = (KERNEL_DIR / "core/truncation.cuh").read_text().split('#include "core/numbers.cuh"')[1]
    (tmp_path / "lost.cpp").write_text(
        SHIM + text + 'extern "C" float lost(float to, float sum, float part) { return with_lost(to, sum, part); }\n'
    )
    subprocess.run(["g++", "-shared", "-fPIC", "-o", tmp_path / "lost.so", tmp_path / "lost.cpp"], check=True)
    lost = ctypes.CDLL(str(tmp_path / "lost.so")).lost
    lost.restype, lost.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    part = truncation.lost_in(36)
    for v in (np.inf, -np.inf, 0.0, 3.0, -1024.0):
        assert lost(v, v, part) == v and lost(1.0, v, part) == 1.0
    assert np.isnan(lost(np.nan, np.nan, part)) and lost(np.inf, 0.3, part) == np.inf
    sums = np.random.default_rng(1).standard_normal(100).astype(np.float32)
    assert [lost(v, v, part) for v in sums] == truncation.given_back(sums.astype(np.float64), sums, np.float32(part)).tolist()


# ---- on a GPU: a million results

#: (precision, channels, filter size, config): every engine, from 64 products a sum to 18432; the planner's choice where none is given.
LAYERS = [
    ("fp32", 64, 3, None), ("fp32", 64, 3, ImplicitGemm(128, 128, 3)), ("fp32", 256, 3, None), ("fp32", 512, 3, None), ("fp32", 2048, 3, None),
    ("fp32", 64, 1, None), ("fp32", 1024, 1, None), ("fp32", 1024, 1, ImplicitGemm(128, 128, 3)),
    ("tf32", 64, 3, None), ("tf32", 512, 3, None), ("tf32", 512, 3, ImplicitGemm(128, 128, 4)), ("tf32", 1024, 1, None),
]  # fmt: skip


def drawn(torch, kind: str, shape: tuple, seed: int):
    v = torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
    if kind == "sparse":
        return v * (torch.rand(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed + 1)) < 0.1)
    return {"signed": v, "relu": v.relu(), "positive": v.abs()}[kind]


# products that are all positive lose more, by their own cuts
@pytest.mark.gpu
@pytest.mark.parametrize("kind, limit", [("signed", 2e-8), ("relu", 2e-8), ("sparse", 1e-7), ("positive", 1e-7)])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_results_are_not_too_small(layer, kind, limit):
    precision, channels, taps, config = layer
    size = 16 if channels > 1000 and taps > 1 else 32
    x = drawn(torch, kind, (8, channels, size, size), 3)
    w = drawn(torch, "positive" if kind == "positive" else "signed", (256, channels, taps, taps), 5)
    problem = pc.ConvProblem.forward(2, tuple(x.shape), tuple(w.shape), padding=taps // 2, precision=precision)
    plan = pc.Plan(problem, "cuda", config=config)
    if precision == "tf32":  # what both round alike, so that the sum's own error is seen: numbers of 10 bits
        x, w = x.half().float(), w.half().float()
        limit = 6e-8 * channels * taps**2 / 576 + 1e-7 if kind in ("signed", "relu") else None
    y = plan(x, w)
    exact = torch.nn.functional.conv2d(x.double(), w.double(), padding=taps // 2)
    found, error = shrinkage(y.double(), exact)
    factor = float((y.double() * exact).sum() / (exact * exact).sum() - 1)
    print(f"{precision} {channels * taps**2} {kind} {plan.config}: {found:.2e} +- {error:.1e}, factor {factor:.2e}")
    if limit is not None:
        assert abs(found) < limit + 4 * error


# ---- the kernels of few channels and of few pixels: three products, whose sums are given back what they lose


def first_bits(v: np.ndarray) -> np.ndarray:
    return (v.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


def of_few_channels(x: np.ndarray, w: np.ndarray, lost: float) -> np.ndarray:
    """The kernel's sums over channels in fp32, of x, [k, m], and w, [k, n], as the tensor core cuts them."""
    (x_high, x_low), (w_high, w_low) = (
        (truncation.tf32_by_cvt(v), truncation.tf32_by_cvt((v - truncation.tf32_by_cvt(v)) * 4096)) for v in (x, w)
    )
    total = np.zeros((x.shape[1], w.shape[1]))
    for first in range(0, len(x), 16):
        of = slice(first, first + 16)
        cross = truncation.tensor_sum(truncation.tensor_sum(None, x_low[of], w_high[of], 8, -126), x_high[of], w_low[of], 8, -126)
        total = truncation.rounded(total + truncation.rounded(cross / 4096 + truncation.tensor_sum(None, x_high[of], w_high[of], 8, -126)))
    return truncation.given_back(total, total, lost)


def of_few_pixels(x: np.ndarray, w: np.ndarray, lost: float) -> np.ndarray:
    """A warp's sums in fp32, of x, [k, m], and w, [k, n], as the tensor core cuts them."""
    (x_high, x_low), (w_high, w_low) = ((truncation.tf32_by_cvt(v), first_bits((v - truncation.tf32_by_cvt(v)) * 4096)) for v in (x, w))
    total, cross = np.zeros((x.shape[1], w.shape[1])), None
    for first in range(0, len(x), 16):
        of = slice(first, first + 16)
        total = truncation.rounded(total + truncation.tensor_sum(None, x_high[of], w_high[of], 8, -126))
        for step in range(first, first + 16, 8):
            of = slice(step, step + 8)
            cross = truncation.tensor_sum(cross, x_low[of], w_high[of], 8, -126)
            cross = truncation.tensor_sum(cross, x_high[of], w_low[of], 8, -126)
    total = truncation.rounded(total + cross / 4096)
    return truncation.given_back(total, total, lost)


@pytest.mark.parametrize("depth", [144, 1152])
@pytest.mark.parametrize(("products", "file"), [(of_few_channels, "mma/few_channels.cu"), (of_few_pixels, "mma/few_pixels.cu")])
def test_float32_has_no_bias(products, file, depth):
    """A kernel's sums of three products are too small by themselves, and are not with the LOST that its text gives back."""
    lost, rng = float(re.search(r"LOST = ([\d.e-]+)f", (KERNEL_DIR / file).read_text())[1]) * 16 / 15, np.random.default_rng(depth)
    x, w = (rng.standard_normal((depth, 64)).astype(np.float32).astype(np.float64) for _ in range(2))
    found, error = shrinkage(products(x, w, lost), x.T @ w)
    before, _ = shrinkage(products(x, w, 0), x.T @ w)
    assert abs(found) < 1e-8 + 4 * error and before < -3e-8, (found, error, before)
