"""Depthwise layers of NCHW arrays, planes as runs of memory (``depthwise_planes.cu``): exact, against float64, on the CPU (simt) and on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import reference
import simt
from alike import check_refused_on, first_runs, sharing
from reference import ACTIVATIONS, DTYPES, EPS, activated, assert_close, assert_exact, dgrad, fprop
from reference import run as run_plan
from test_few_pixels import H200, NVCC, check_compiled
from test_implicit_gemm import ids_of

from pycuda_conv import ConvProblem, Plan, engines
from pycuda_conv.engines import depthwise_planes as dp
from pycuda_conv.engines.depthwise_planes import DepthwisePlanes
from pycuda_conv.engines.direct import Single, Tile
from pycuda_conv.problem import DTYPE_CODES

on_cpu = pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))

#: Planes of every size against vectors, several of a unit and bands of one, the last unit smaller, strides, uneven padding and such as is wider than the
#: filter, multipliers, rows that nothing meets; gradients, whose filter is turned.
CASES = [
    fprop((2, 9, 7, 7), (9, 1, 3, 3), padding=1, groups=9), fprop((3, 5, 7, 10), (5, 1, 3, 3), padding=1, groups=5), fprop((1, 3, 14, 13), (3, 1, 5, 5), padding=2, groups=3),
    fprop((2, 4, 9, 11), (4, 1, 3, 3), padding=1, stride=2, groups=4), fprop((1, 5, 12, 12), (5, 1, 7, 7), padding=3, groups=5), fprop((1, 4, 15, 9), (4, 1, 7, 7), padding=((3, 2), (0, 5)), stride=2, groups=4),
    fprop((2, 3, 9, 10), (6, 1, 3, 3), padding=1, groups=3), fprop((2, 2, 8, 6), (6, 1, 5, 5), padding=2, stride=2, groups=2), fprop((1, 4, 3, 3), (4, 1, 3, 3), padding=(5, 4), groups=4),
    fprop((1, 1, 200, 37), (1, 1, 3, 3), padding=1, groups=1), fprop((1, 2, 70, 150), (2, 1, 5, 5), padding=(0, 2), groups=2), fprop((1, 2, 130, 101), (2, 1, 3, 3), stride=2, groups=2),
    fprop((1, 1, 40, 233), (2, 1, 7, 7), padding=3, groups=1), fprop((1, 3, 1, 5), (3, 1, 3, 3), padding=1, groups=3), fprop((5, 1, 3, 1), (1, 1, 3, 3), padding=1, groups=1),
    dgrad((2, 8, 9, 11), (8, 1, 3, 3), padding=1, groups=8), dgrad((1, 7, 7, 7), (7, 1, 5, 5), padding=2, groups=7), dgrad((2, 4, 9, 12), (4, 1, 7, 7), padding=((3, 1), (6, 0)), groups=4),
    dgrad((1, 5, 9, 10), (5, 1, 3, 3), padding=(4, 3), groups=5), dgrad((3, 6, 5, 5), (6, 1, 3, 3), groups=6), dgrad((1, 1, 90, 60), (1, 1, 3, 3), padding=1, groups=1),
]  # fmt: skip


def configs(case, dtype):
    return [config for config in map(DepthwisePlanes, dp.UNITS) if dp.refusal(case.problem(dtype), config) is None]


#: Each case in each type, with a unit of its own.
RUNS = [(case, dtype, configs(case, dtype)[(i + j) % len(configs(case, dtype))]) for i, case in enumerate(CASES) for j, dtype in enumerate(DTYPES) if configs(case, dtype)]


def text_of(case, dtype, config):
    ((launch,),) = dp.schedule(case.problem(dtype), config, H200).whole
    return tuple(launch.defines.values())


#: Each case once, with every value of every define; with `--all-texts` each text.
SOME = first_runs(RUNS, text_of) if reference.all_texts else sharing([[run for run in RUNS if run[0] is case] for case in CASES], lambda case, dtype: case.problem(dtype))


def test_the_runs_have_every_value_of_the_texts():
    listed = {tuple(defines.values()) for family in dp.texts(H200) for defines in family}
    types = {DTYPE_CODES[dtype] for dtype in DTYPES}
    met, listed = {text_of(*run) for run in SOME}, {text for text in listed if text[0] in types and not text[1]}  # no offsets of 64 bits
    assert met == listed if reference.all_texts else met <= listed
    assert all(set(some) == set(every) for some, every in zip(zip(*met, strict=True), zip(*listed, strict=True), strict=True))


@on_cpu
@pytest.mark.parametrize(("case", "dtype", "config"), SOME, ids=ids_of(SOME))
def test_integers_are_exact(case, dtype, config):
    arrays = case.integers(dtype)
    assert_exact(simt.computed(case.problem(dtype), config, *arrays, seeds=(1,)), case.reference(*arrays), config)


@on_cpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [1, 10, 17])
def test_random_data(number, dtype):
    case = CASES[number]
    arrays, found = case.normals(dtype, seed=1), set()
    ref = case.reference(*arrays)
    for config in configs(case, dtype):
        got = simt.computed(case.problem(dtype), config, *arrays, seeds=(1, 2))
        assert_close(got, ref, case.bound(*arrays, ref), config)
        found.add(got.tobytes())
    assert len(found) == 1  # whatever the unit


@on_cpu
def test_the_epilogue():
    """Bias, scale, each activation, with a residual and without."""
    case, rng = CASES[1], np.random.default_rng(1)
    k = (case.channels,)
    for i, activation in enumerate(("relu", *ACTIVATIONS)):
        dtype = DTYPES[i % len(DTYPES)]
        problem = replace(case.problem(dtype), has_scale=True, has_residual=i % 2 == 0, activation=activation)
        x, w, b, s, r = (rng.integers(-3, 4, shape).astype(dtype) for shape in (case.input_shape, case.weight_shape, k, k, problem.result_shape))
        also = r if problem.has_residual else None
        before = case.reference(x, w) * s.astype(float)[:, None, None] + b.astype(float)[:, None, None] + (0 if also is None else r.astype(float))
        got, ref = simt.computed(problem, DepthwisePlanes(12), x, w, b, s, also, seeds=(1,)), activated(before, activation)
        assert_close(got, ref, 2.0**-20 * np.abs(before) + EPS[dtype] * np.abs(ref) + 2.0**-22, activation)


@on_cpu
@pytest.mark.parametrize(("old", "new"), [
    ("  local_barrier();\n\n  EPILOGUE_FLAGS", "  EPILOGUE_FLAGS"), ("  local_barrier();\n\n  const index_t to", "  const index_t to"), ("(i >= y_shift && i + VECTOR <= y_shift + y_run)", "(true)"),
    ("(h + j >= 0 && h + j < h_end)", "(h + j >= 0)"), ("left_w + s < w_end ?", "true ?"), ("flipped ? R * S - 1 - tap : tap", "tap"),
])  # fmt: skip
def test_a_broken_kernel_is_noticed(old, new):
    """Barriers, and the ends of runs, rows and columns."""
    case = dgrad((3, 5, 7, 9), (5, 1, 3, 3), padding=(0, 1), groups=5)
    arrays = case.integers("float32")
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        assert_exact(simt.computed(case.problem("float32"), DepthwisePlanes(), *arrays, seeds=range(1, 4), broken=(old, new)), case.reference(*arrays))


# ---- what is legal, and the choice


@pytest.mark.parametrize(
    ("case", "config", "reason"),
    [
        (fprop((1, 4, 9, 9), (4, 2, 3, 3), padding=1, groups=2), DepthwisePlanes(), "one input channel a group"), (fprop((1, 4, 9, 9, 9), (4, 1, 3, 3, 3), groups=4), DepthwisePlanes(), "two spatial axes"),
        (fprop((1, 4, 9, 9), (4, 1, 3, 5), groups=4), DepthwisePlanes(), "3x3, 5x5 and 7x7"), (fprop((1, 4, 9, 9), (4, 1, 3, 3), dilation=2, groups=4), DepthwisePlanes(), "no dilation"),
        (fprop((1, 4, 9, 9), (4, 1, 3, 3), stride=3, groups=4), DepthwisePlanes(), "strides of 1 and 2"), (dgrad((1, 4, 9, 9), (4, 1, 3, 3), stride=2, groups=4), DepthwisePlanes(), "without a stride"),
        (dgrad((1, 8, 9, 9), (8, 1, 3, 3), groups=4), DepthwisePlanes(), "as many channels out as in"), (fprop((0, 4, 9, 9), (4, 1, 3, 3), groups=4), DepthwisePlanes(), "nothing to compute"),
        (fprop((1, 4, 9, 9), (4, 1, 3, 3), groups=4), DepthwisePlanes(7), "UNIT_KIB must be"), (fprop((1, 1, 99, 2000), (1, 1, 3, 3), groups=1), DepthwisePlanes(12), "12 KiB of shared memory"),
    ],
    ids=lambda v: str(v)[:40],
)  # fmt: skip
def test_a_configuration_says_why_it_cannot(case, config, reason):
    check_refused_on(H200, case.problem("float32"), config, reason)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "channels", "size", "taps", "stride"), [(64, 640, 7, 3, 1), (32, 672, 14, 5, 1), (32, 768, 7, 7, 1), (32, 576, 14, 3, 1)])
def test_small_planes_choose_it(n, channels, size, taps, stride, dtype):
    problem = ConvProblem.forward(2, (n, channels, size, size), (channels, 1, taps, taps), padding=taps // 2, stride=stride, groups=channels, dtype=dtype)
    assert isinstance(engines.choose(problem, H200), DepthwisePlanes)


@pytest.mark.parametrize(("n", "channels", "size"), [(64, 144, 56), (1, 96, 14)])
def test_large_planes_and_few_do_not(n, channels, size):
    problem = ConvProblem.forward(2, (n, channels, size, size), (channels, 1, 3, 3), padding=1, groups=channels)
    assert isinstance(engines.choose(problem, H200), Tile | Single)


# ---- the kernel, compiled


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
def test_the_kernels_compile_and_do_not_spill():
    steps = {}
    for number in (0, 2, 3, 4, 5, 7):
        for dtype in DTYPES:
            ((launch,),) = dp.schedule(CASES[number].problem(dtype), DepthwisePlanes(), H200).whole
            steps[launch.source()] = launch, str(launch.defines)
    check_compiled(steps)


# ---- on the GPU


@pytest.mark.gpu
@pytest.mark.parametrize("run", RUNS, ids=ids_of(RUNS))
def test_on_the_gpu(run):
    case, dtype, config = run
    plan = Plan(case.problem(dtype), "cuda", config=config)
    arrays = case.integers(dtype)
    assert_exact(run_plan(plan, *arrays), case.reference(*arrays), plan)
    arrays = case.normals(dtype)
    ref = case.reference(*arrays)
    assert_close(run_plan(plan, *arrays), ref, case.bound(*arrays, ref), plan)
    k = (case.channels,)
    rng = np.random.default_rng(2)
    plan = Plan(replace(case.problem(dtype), has_scale=True, has_residual=True, activation="relu"), "cuda", config=config)
    x, w, b, s, r = (rng.integers(-3, 4, shape).astype(arrays[0].dtype) for shape in (case.input_shape, case.weight_shape, k, k, plan.problem.result_shape))
    ref = case.reference(x, w) * s.astype(float)[:, None, None] + b.astype(float)[:, None, None] + r.astype(float)
    assert_exact(run_plan(plan, x, w, b, s, r), np.maximum(ref, 0), plan)
