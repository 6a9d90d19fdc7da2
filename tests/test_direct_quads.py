"""Convolutions of few channels on plain cores, quads of pixels a thread (``direct/quads.cu``): exact, against float64, on the CPU (simt) and on a GPU."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import simt
from alike import check_epilogue, check_numbers_on_gpu, check_refused_on, plans_of, random_problems
from reference import ACTIVATIONS, DTYPES, Case, assert_close, assert_exact, dgrad, fprop
from test_implicit_gemm import H200, NVCC, asked, bound, check_compiled, check_not_finite, ids_of, torch  # noqa: F401 -- a fixture

from pycuda_conv import ConvProblem, Plan, engines
from pycuda_conv.engines.direct import quads as dq
from pycuda_conv.engines.direct.quads import Quads

pytestmark = pytest.mark.skipif("float32" not in DTYPES, reason="the engine takes float32 arrays")
on_cpu = pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))

#: Tails of channels, rows, columns and quads; strides that are smaller and larger than the filter, uneven padding, dilation along h, groups, one to three axes, planes of
#: several buffers; rows of y that begin at multiples of four, and not; gradients, which take the taps in reverse.
CASES = [
    fprop((2, 3, 19, 40), (20, 3, 3, 3), stride=2, padding=1), fprop((1, 3, 15, 37), (24, 3, 3, 3), padding=1), fprop((1, 1, 20, 32), (16, 1, 7, 7), stride=2, padding=3),
    fprop((2, 4, 9, 12), (70, 4, 4, 4), stride=4), fprop((1, 3, 9, 50), (33, 3, 5, 5), padding=2), fprop((2, 1, 1300), (32, 1, 10), stride=5), fprop((1, 2, 600), (13, 2, 3), padding=1),
    fprop((1, 3, 5, 12, 14), (40, 3, 3, 3, 3), padding=1), fprop((1, 4, 14, 16), (12, 4, 3, 3), dilation=(2, 1), padding=(2, 1)), fprop((1, 40, 10, 11), (9, 40, 5, 5), padding=2),
    fprop((1, 2, 11, 12), (48, 2, 3, 2), padding=((0, 2), (3, 1))), fprop((1, 12, 9, 20), (20, 3, 3, 3), padding=1, groups=4), fprop((2, 5, 6, 8), (6, 5, 1, 1), stride=(2, 1)),
    fprop((1, 2, 4, 6, 12), (3, 2, 3, 1, 1), stride=(2, 1, 1), padding=(1, 0, 0)), fprop((1, 1, 40, 70), (5, 1, 16, 16), stride=8, padding=4),
    dgrad((2, 3, 9, 8), (3, 40, 3, 3), padding=1), dgrad((1, 1, 12, 20), (1, 16, 5, 5), padding=2), dgrad((1, 4, 7, 9), (4, 20, 3, 2), dilation=(2, 1), padding=1), dgrad((1, 9, 9, 12), (9, 2, 3, 3), padding=1, groups=3),
]  # fmt: skip


def tiles(case: Case) -> list[Quads]:
    """All that run it."""
    every = (Quads(quads, warps) for quads in (1, 2) for warps in (1, 2, 4))
    return [config for config in every if dq.refusal(asked(case, "fp32"), config) is None]


#: Each case with a tile of its own.
RUNS = [(case, "fp32", tiles(case)[5 * i % len(tiles(case))]) for i, case in enumerate(CASES)]


def check(case: Case, config, seeds=(1, 2), **options) -> None:
    arrays = case.integers("float32")
    assert_exact(simt.computed(asked(case, "fp32"), config, *arrays, seeds=seeds, **options), case.reference(*arrays), config)


@on_cpu
@pytest.mark.parametrize(("case", "mode", "config"), RUNS, ids=ids_of(RUNS))
def test_integers_are_exact(case, mode, config):
    check(case, config, (1,))


@on_cpu
def test_all_tiles_give_the_same_bits():
    for case in (CASES[1], CASES[9]):
        arrays = case.normals("float32", seed=3)
        found = {simt.computed(asked(case, "fp32"), config, *arrays, seeds=(1,)).tobytes() for config in tiles(case)}
        assert len(found) == 1
        ref = case.reference(*arrays)
        assert_close(np.frombuffer(found.pop(), np.float32).reshape(ref.shape), ref, bound(case, "fp32", *arrays, ref), case)


@on_cpu
@pytest.mark.parametrize("width", [8, 9])
def test_the_epilogue(width):
    """Bias, scale, residual and ReLU; then each activation, with a residual and without; of quads that are written at once, and not."""
    check_epilogue(fprop((2, 3, 7, width), (19, 3, 3, 3), padding=1), "fp32", Quads(1, 2), ACTIVATIONS if width == 8 else ACTIVATIONS[:2])


@on_cpu
@pytest.mark.parametrize(("old", "new"), [
    ("    copies_wait<0>();\n", ""), ("__syncthreads();  // all copies", "//"), ("(unsigned)column < (unsigned)arg.width", "column >= 0"), ("(unsigned)h < (unsigned)arg.height", "h >= 0"),
    ("(parity ^ 1) * (int)arg.buffer", "parity * (int)arg.buffer"), ("if (places[i][e] >= 0) y[", "y["), ("tile.k + channel < (int)arg.kg", "true"),
])  # fmt: skip
def test_a_broken_kernel_is_noticed(old, new):
    """Copies that are not waited for, edges of x, y and the filter, buffers."""
    case = fprop((1, 40, 10, 11), (9, 40, 5, 5), padding=2)
    arrays = case.normals("float32", seed=2)
    problem, config = asked(case, "fp32"), Quads(1, 2)
    right = simt.computed(problem, config, *arrays, seeds=(1,))
    with np.errstate(all="ignore"), pytest.raises((AssertionError, pytest.fail.Exception)):
        wrong = simt.computed(problem, config, *arrays, seeds=range(1, 6), broken=(old, new))
        same = wrong.tobytes() == right.tobytes()
        assert same


FINITE = [replace(fprop((2, 3, 9, 10), (24, 3, 3, 3), padding=1), bias=False), replace(dgrad((2, 3, 6, 5), (3, 24, 3, 3), padding=1), bias=False)]


@on_cpu
@pytest.mark.parametrize("case", FINITE, ids=str)
def test_what_is_not_finite_reaches_its_own_results_only(case):
    check_not_finite(case, "fp32", lambda x, w, b: simt.computed(asked(case, "fp32"), Quads(1, 2), x, w, b, seeds=(1,)))


# ---- what is legal, and the choice

BASE = CASES[0]


@pytest.mark.parametrize(
    ("case", "mode", "config", "reason"),
    [
        (BASE, "fp32 last", Quads(), "takes arrays in the layouts"), (BASE, "fp16", Quads(), "float32 arrays in NCHW"), (fprop((0, 3, 4, 4), (4, 3, 1, 1)), "fp32", Quads(), "nothing to compute"),
        (dgrad((2, 3, 4, 4), (3, 8, 3, 3), stride=2), "fp32", Quads(), "without stride"), (fprop((1, 3, 9, 9), (4, 3, 3, 3), dilation=2), "fp32", Quads(), "without dilation"),
        (fprop((1, 3, 9, 40), (4, 3, 3, 13)), "fp32", Quads(), "that have a text"), (fprop((1, 3, 9, 40), (4, 3, 3, 3), stride=3), "fp32", Quads(), "that have a text"),
        (fprop((1, 4, 2**15, 2**14), (4, 4, 3, 3)), "fp32", Quads(), "in 32 bits"), (BASE, "fp32", Quads(3), "one or two quads"), (BASE, "fp32", Quads(1, 3), "1, 2 or 4 warps"),
        (fprop((1, 4, 150, 40), (64, 4, 100, 16)), "fp32", Quads(), "bytes of shared memory"),
    ],
    ids=lambda v: str(v)[:40],
)  # fmt: skip
def test_a_configuration_says_why_it_cannot(case, mode, config, reason):
    check_refused_on(H200, asked(case, mode), config, reason)


def test_the_choice_is_legal_and_its_texts_are_listed():
    """Of random layers of the families that it is for, and others: what is chosen, and each candidate's launch."""
    listed, r, met = list(dq.texts(H200)), random.Random(4), 0
    kinds = (("fprop", ("float32", "fp32", "NCHW")), ("dgrad", ("float32", "tf32", "NCHW")))
    for problem in random_problems(r, ("last", "first", "dense 3x3", "grouped", "audio", "volume"), 12, kinds):
        found = list(dq.configs(problem, H200))
        if not found:
            assert dq.choose(problem, H200) is None
            continue
        assert dq.choose(problem, H200)[1] in found
        ((launch,),) = dq.schedule(problem, r.choice(found), H200).whole
        assert any(launch in one for one in listed), launch.defines
        assert 0 < launch.grid and launch.shared <= dq.SHARED_BYTES
        met += 1
    assert met > 30


def test_first_layers_choose_it():
    problem = ConvProblem.forward(2, (32, 3, 224, 224), (32, 3, 3, 3), stride=2, padding=1)
    assert isinstance(engines.choose(problem, H200), Quads)


# ---- the kernel, compiled


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
def test_the_kernels_compile_and_do_not_spill():
    steps = {}
    for quads, (taps, stride) in itertools.product((1, 2), ((3, 1), (16, 1), (10, 5))):
        problem = asked(fprop((1, 3, 40, 40), (8, 3, taps, taps), stride=stride), "fp32")
        ((launch,),) = dq.schedule(problem, Quads(quads), H200).whole
        steps[launch.source()] = launch, f"{problem}"
    check_compiled(steps)


# ---- on the GPU


@cache
def plans() -> dict:
    """The plans of all runs."""
    return plans_of("quads", RUNS)


@pytest.mark.gpu
@pytest.mark.parametrize("run", RUNS, ids=ids_of(RUNS))
def test_on_the_gpu(torch, run):  # noqa: F811
    check_numbers_on_gpu(torch, plans()[str(run)], run[0], "fp32")


@pytest.mark.gpu
@pytest.mark.parametrize("case", FINITE, ids=str)
def test_what_is_not_finite_on_the_gpu(torch, case):  # noqa: F811
    from test_implicit_gemm import Arrays

    plan = Plan(asked(case, "fp32"), "cuda", config=Quads(1, 2))
    check_not_finite(case, "fp32", lambda *arrays: Arrays(torch, plan, *arrays).launch())
