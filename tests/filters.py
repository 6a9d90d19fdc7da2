"""Gradients of filters by their arguments, and what is asked of one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from reference import DTYPES, EPS, SUM_EPS, TINY, Case, assert_close

from pycuda_conv import ConvProblem
from pycuda_conv.engines.hopper import wgrad_form

TYPES = [dtype for dtype in ("float16", "bfloat16", "float32") if dtype in DTYPES]  # float32: in TF32, where nothing else is said


@dataclass(frozen=True)
class Filter:
    """The gradient of a filter by its arguments."""

    x: tuple
    w: tuple
    stride: tuple = (1,)
    padding: tuple = (0,)  # or pairs
    dilation: tuple = (1,)
    groups: int = 1
    layout: str = "NHWC"

    @classmethod
    def of(cls, case: Case) -> Filter:
        """The gradient by the filter of a forward convolution."""
        options = {name: value if isinstance(value, tuple) else (value,) for name, value in case.options.items() if name != "groups"}
        return cls(case.input_shape, case.weight_shape, groups=case.options.get("groups", 1), layout="NCHW", **options)

    @property
    def ndim(self) -> int:
        return len(self.w) - 2

    @property
    def has_taps(self) -> bool:
        """Whether it matters if the gradient's channels are fastest, or its taps."""
        return math.prod(self.w[2:]) > 1

    def each(self, values: tuple) -> tuple:
        return values * self.ndim if len(values) == 1 else values

    @property
    def pairs(self) -> tuple:
        return tuple(p if isinstance(p, tuple) else (p, p) for p in self.each(self.padding))

    @property
    def dy(self) -> tuple:
        rows = zip(self.x[2:], self.w[2:], self.each(self.stride), self.pairs, self.each(self.dilation), strict=True)
        return (self.x[0], self.w[0], *((n + sum(p) - d * (f - 1) - 1) // s + 1 for n, f, s, p, d in rows))

    def problem(self, dtype: str = "float16", layout: str | None = None, precision: str | None = None) -> ConvProblem:
        options = {"stride": self.each(self.stride), "padding": self.pairs, "dilation": self.each(self.dilation), "groups": self.groups}
        options["precision"] = precision or ("tf32" if dtype == "float32" else "fp32")
        return ConvProblem.gradient("weight", self.ndim, self.x, self.w, self.dy, dtype=dtype, layout=layout or self.layout, **options)

    def legal(self, config: Any, dtype: str = "float16") -> Any:
        """`config`, with a sum in two parts if x is folded: the launch that adds them writes the result."""
        problem = self.problem(dtype).launched
        return replace(config, SPLIT=max(config.SPLIT, 1 if wgrad_form.as_loaded(problem).C == self.x[1] else 2))

    def arrays(self, dtype: str, make) -> tuple[np.ndarray, np.ndarray]:
        return make(self.x).astype(dtype), make(self.dy).astype(dtype)

    def integers(self, dtype: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Small integers: sums are exact in float32 in any order, and rounded once."""
        rng = np.random.default_rng(seed)
        return self.arrays(dtype, lambda shape: rng.integers(-8, 9, shape))

    def normals(self, dtype: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        return self.arrays(dtype, np.random.default_rng(seed).standard_normal)

    def reference(self, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
        """In float64, tap by tap."""
        stride, dilation = self.each(self.stride), self.each(self.dilation)
        padded = np.pad(x.astype(float), ((0, 0), (0, 0), *self.pairs)).reshape(
            x.shape[0], self.groups, x.shape[1] // self.groups, *(n + sum(p) for n, p in zip(x.shape[2:], self.pairs, strict=True))
        )
        grad = dy.astype(float).reshape(dy.shape[0], self.groups, dy.shape[1] // self.groups, *dy.shape[2:])
        out = np.zeros(self.w)
        for tap in np.ndindex(*self.w[2:]):
            seen = padded[
                (..., *(slice(t * d, t * d + (m - 1) * s + 1, s) for t, d, m, s in zip(tap, dilation, dy.shape[2:], stride, strict=True)))
            ]
            with np.errstate(invalid="ignore"):
                found = np.einsum("ngkp,ngcp->gkc", *(one.reshape(*one.shape[:3], math.prod(dy.shape[2:])) for one in (grad, seen)))
            out[(slice(None), slice(None), *tap)] = found.reshape(self.w[:2])
        return out

    def bound(self, x: np.ndarray, dy: np.ndarray, ref: np.ndarray, precision: str = "tf32") -> np.ndarray:
        """How far from `ref` the rounding of an honest sum may lead."""
        dtype = x.dtype.name
        length = self.dy[0] * math.prod(self.dy[2:])
        # to TF32, six times the deviation
        rounded = 6 * 2**-12 * np.sqrt(self.reference(x**2, dy**2)) if dtype == "float32" and precision == "tf32" else 0
        return 4 * SUM_EPS[dtype] * math.sqrt(length) * self.reference(
            np.abs(x), np.abs(dy)
        ) + EPS[dtype] * np.abs(ref) + TINY[dtype] + rounded

    def __str__(self) -> str:
        def show(values):
            return "x".join("+".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in values)

        more = f"-g{self.groups}" * (self.groups > 1) + f"-{self.layout}" * (self.layout != "NHWC")
        return f"{show(self.x)}-by-{show(self.w)}-s{show(self.stride)}-p{show(self.padding)}-d{show(self.dilation)}{more}"


def precise(case: Filter) -> ConvProblem:
    """`case` in float32 by three products."""
    return case.problem("float32", precision="fp32")


def check_precise(run, case: Filter) -> None:
    """Of float32: a sum as an honest one in float32, of random numbers, of the smallest normal ones, and of the largest."""
    x, dy = case.normals("float32")
    for scale_x, scale_dy in ((1, 1), (2.0**-120, 2.0**110), (2.0**-30, 2.0**125)):
        scaled = (x * np.float32(scale_x)).astype("float32"), (dy * np.float32(scale_dy)).astype("float32")
        ref = case.reference(*scaled)
        assert_close(run(case, *scaled), ref, case.bound(*scaled, ref, "fp32"))
    length = case.dy[0] * math.prod(case.dy[2:])
    off = (run(case, x, dy) - (ref := case.reference(x, dy))) / np.sqrt(case.reference(x**2, dy**2) + 1e-30)
    assert np.sqrt((off**2).mean()) < 2e-7 * (1 + length**0.5 / 100), np.abs(ref).max()
    x[(0,) * x.ndim] = np.finfo("float32").max
    assert np.isfinite(run(case, x, (dy / 1024).astype("float32"))).all()
