"""Gradients of depthwise filters whose rows come to shared memory before they are needed: from planes, and from pixels with their channels last."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import simt
from reference import assert_exact
from test_depthwise_nhwc import GPU, gradient_problem, wgrad_reference

from pycuda_conv import Plan, engines
from pycuda_conv.engines import depthwise_nhwc, depthwise_wgrad
from pycuda_conv.engines.depthwise_nhwc import DepthwiseRing
from pycuda_conv.engines.depthwise_wgrad import DepthwisePlanesWgrad

# input, filter, stride, padding: columns that fill no thread's, images that fill no warp, several tiles of columns, padding that is wider than the
# filter, several channels of the output from one of the input
PLANES = [
    ((2, 8, 9, 11), (8, 1, 3, 3), (1, 1), (1, 1)), ((5, 3, 7, 7), (6, 1, 5, 5), (1, 1), (2, 2)), ((2, 3, 12, 13), (3, 1, 7, 7), (1, 1), (3, 3)),
    ((2, 2, 12, 13), (2, 1, 7, 7), (2, 2), (3, 3)), ((3, 2, 13, 9), (2, 1, 5, 5), (2, 2), (2, 3)), ((1, 2, 4, 4), (2, 1, 3, 3), (1, 1), (4, 5)),
    ((17, 2, 7, 7), (2, 1, 7, 7), (1, 1), (3, 3)), ((1, 1, 5, 150), (1, 1, 3, 3), (1, 1), (0, 1)), ((1, 1, 5, 290), (1, 1, 3, 3), (2, 2), (1, 1)),
]  # fmt: skip
# channels that fill no warp and no block
PIXELS = [
    ((2, 8, 9, 11), (8, 1, 3, 3), (1, 1), (1, 1)), ((1, 72, 7, 7), (72, 1, 5, 5), (1, 1), (2, 2)), ((2, 16, 12, 13), (16, 1, 7, 7), (1, 1), (3, 3)),
    ((2, 8, 12, 13), (8, 1, 7, 7), (2, 2), (3, 3)), ((3, 24, 13, 9), (24, 1, 5, 5), (2, 2), (2, 3)), ((1, 8, 4, 4), (8, 1, 3, 3), (1, 1), (4, 5)),
]  # fmt: skip
TYPES = ("bfloat16", "float32", "float16")
FORCED = ((14, 1), (3, 2), (100, 3))  # rows and parts
RUNS = [("NCHW", shape, "float32", DepthwisePlanesWgrad(*FORCED[i % 3])) for i, shape in enumerate(PLANES)]
RUNS += [("NCHW", shape, TYPES[::2][i % 2], DepthwisePlanesWgrad(*FORCED[(i + i // 3) % 3])) for i, shape in enumerate(PLANES)]
RUNS += [("NHWC", shape, TYPES[i % 3], DepthwiseRing(*FORCED[(i + i // 3) % 3])) for i, shape in enumerate(PIXELS)]


def asked(layout, shape, dtype="float32"):
    return replace(gradient_problem(*shape, (1, 1), dtype), layout=layout)


def integers(problem):
    rng = np.random.default_rng(1)
    return [rng.integers(-4, 5, shape).astype(problem.dtype) for shape in (problem.input_shape, problem.weight_shape)]


def reference(shape, x, dy):
    x_shape, w_shape, stride, padding = shape
    return wgrad_reference(x.astype(float), dy.astype(float), w_shape[2:], stride, padding, (1, 1), x_shape[1])


@pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
@pytest.mark.parametrize(("layout", "shape", "dtype", "config"), RUNS, ids=str)
def test(layout, shape, dtype, config):
    problem = asked(layout, shape, dtype)
    x, dy = integers(problem)
    got = simt.computed(problem, config, x, dy, seeds=(1, 2))
    assert_exact(np.asarray(got, float), reference(shape, x, dy).astype(dtype).astype(float), config)


@pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
@pytest.mark.parametrize(("layout", "x", "config"), [("NCHW", (12, 1, 32, 32), DepthwisePlanesWgrad(32, 1)), ("NHWC", (4, 4, 32, 16), DepthwiseRing(16, 1))], ids=str)
def test_sums_of_a_row_are_made_by_themselves(layout, x, config):
    """A thread's products in one chain would be off by 1.8e-7 and 2.1e-7."""
    shape = x, (x[1], 1, 3, 3), (1, 1), (1, 1)
    problem = asked(layout, shape)
    x, dy = (np.random.default_rng(seed).standard_normal(of).astype("f") for seed, of in ((1, problem.input_shape), (2, problem.weight_shape)))
    ref = reference(shape, x, dy)
    assert np.linalg.norm(simt.computed(problem, config, x, dy) - ref) < 1.6e-7 * np.linalg.norm(ref)


@pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
@pytest.mark.parametrize(
    ("layout", "config", "dtype"),
    [("NCHW", DepthwisePlanesWgrad(5, 2), "float32"), ("NCHW", DepthwisePlanesWgrad(5, 2), "float16"), ("NHWC", DepthwiseRing(5, 2), "float32")],
    ids=str,
)
@pytest.mark.parametrize("stride", [1, 2])
def test_an_infinity_stays_with_the_taps_that_meet_it(layout, config, dtype, stride):
    """Zeros that stand for rows above and below a strip, and for columns that a thread lacks, must not meet an Inf of x."""
    shape = (1, 4, 11, 10), (4, 1, 5, 5), (stride, stride), (1, 1)
    problem = asked(layout, shape, dtype)
    for row, column in ((0, 9), (3, 5), (10, 0)):
        x, dy, marked = np.ones(problem.input_shape, dtype), np.ones(problem.weight_shape, dtype), np.zeros(problem.input_shape)
        x[0, :, row, column], marked[0, :, row, column] = np.inf, 1
        got = simt.computed(problem, config, x, dy)
        assert np.array_equal(np.isinf(got), reference(shape, marked, dy) > 0) and not np.isnan(got).any()


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "shape", "dtype", "config"), RUNS, ids=str)
def test_on_a_gpu(layout, shape, dtype, config):
    problem = asked(layout, shape, dtype)
    ref = reference(shape, *integers(problem)).astype(dtype).astype(float)
    plan = Plan(problem, "cuda", config=config)
    assert_exact(np.asarray(plan(*integers(problem)), float), ref, config)


def test_the_choice_is_legal_and_its_texts_are_listed():
    r, listed = random.Random(0), [*depthwise_wgrad.texts(GPU), *depthwise_nhwc.texts(GPU)]
    for _ in range(60):
        size, stride, layout = r.choice((3, 5, 7)), r.choice((1, 2)), r.choice(("NCHW", "NHWC"))
        n, c, h, w = r.randint(1, 64), r.choice((1, 8, 30, 96, 144)), r.randint(7, 200), r.randint(7, 600)
        problem = asked(layout, ((n, c, h, w), (c, 1, size, size), (stride, stride), (size // 2,) * 2), r.choice(TYPES)).launched
        engine = depthwise_nhwc if layout == "NHWC" else depthwise_wgrad
        for config in engine.configs(problem, GPU):
            assert engine.refusal(problem, config) is None
            launch = engine.schedule(problem, config, GPU).steps[0][0]
            assert any(launch in family for family in listed), launch
        if layout == "NCHW" and problem.filter_size[2] >= depthwise_wgrad.NARROW:
            chosen, many = depthwise_wgrad.choose(problem, GPU), problem.dtype == "float32" or problem.bytes >= depthwise_wgrad.MANY
            assert (chosen and chosen[1]) == (next(depthwise_wgrad.configs(problem, GPU)) if many else None)


def test_what_is_refused():
    shape = PLANES[0]
    for problem, reason in (
        (asked("NCHW", shape, "float64"), "float32"), (asked("NCHW", ((2, 8, 9, 9), (8, 1, 4, 4), (1, 1), (1, 1))), "3x3, 5x5"),
        (asked("NCHW", ((2, 8, 9, 9), (8, 1, 3, 3), (3, 3), (1, 1))), "3x3, 5x5"), (asked("NCHW", ((0, 8, 9, 9), (8, 1, 3, 3), (1, 1), (1, 1))), "nothing"),
    ):  # fmt: skip
        assert reason in depthwise_wgrad.refusal(problem.launched, DepthwisePlanesWgrad()) and not [*depthwise_wgrad.configs(problem.launched, GPU)]
    assert "at least 1" in engines.refusal(asked("NCHW", shape), DepthwisePlanesWgrad(0), GPU)
    assert "grid" in engines.refusal(asked("NCHW", shape), DepthwisePlanesWgrad(1, 2**30), GPU)
    old = SimpleNamespace(**{**vars(GPU), "capability": (7, 5)})
    assert "8.0" in depthwise_wgrad.unsupported(old)
    for problem in (asked("NHWC", ((1, 12, 9, 9), (12, 1, 3, 3), (1, 1), (1, 1)), "float16"), asked("NHWC", PIXELS[0], "float64")):
        assert "16 bits and float32" in engines.refusal(problem, DepthwiseRing(3), GPU)
