"""Convolutions of channels-last arrays as they lie: their planning in numpy (emulator.py), their kernel compiled, and, on an sm_90 GPU, their numbers."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
from alike import check_numbers_on_gpu, check_refused_on, like_h200, plans_of, random_problems
from reference import DTYPES, Case, assert_close, assert_exact, dgrad, fprop
from test_implicit_gemm import (
    AWKWARD,
    H200,
    NVCC,
    SCENARIOS,
    Arrays,
    asked,
    check_compiled,
    check_moments,
    check_not_finite,
    check_noticed,
    check_scenario,
    check_steps,
    data,
    dtype_of,
    emulated,
    ids_of,
    limbs_bound,
    torch,  # noqa: F401 -- a fixture
)

from pycuda_conv import ConvProblem, Plan, engines
from pycuda_conv.engines.hopper import dense as dn
from pycuda_conv.engines.hopper.dense import DenseNhwc, DensePairs

MODES = tuple(mode for mode, dtype in (("tf32 last", "float32"), ("fp16 last", "float16"), ("bf16 last", "bfloat16")) if dtype in DTYPES)

#: Tails of channels, rows and pixels, strides, padding, dilation, one to three axes, phases of one and several taps, and of none.
CASES = [
    fprop((2, 24, 9, 8), (40, 24, 3, 3), padding=1), fprop((3, 64, 10, 12), (136, 64, 1, 1)), fprop((2, 136, 7, 5), (9, 136, 3, 2), padding=(1, 0)),
    fprop((3, 16, 13, 9), (70, 16, 1, 1), stride=2), fprop((2, 72, 11, 17), (33, 72, 3, 5), stride=(2, 1), padding=(2, 1), dilation=(1, 2)),
    fprop((40, 8, 3, 3), (21, 8, 3, 3), padding=1), fprop((2, 16, 50), (48, 16, 5), padding=2), fprop((2, 16, 4, 6, 5), (40, 16, 3, 3, 1), padding=(1, 0, 0)),
    dgrad((2, 40, 9, 8), (40, 24, 3, 3), padding=1), dgrad((3, 136, 10, 12), (136, 64, 1, 1)), dgrad((2, 24, 5, 6), (24, 72, 3, 3), stride=2, padding=1, output_padding=1),
    dgrad((2, 16, 5, 7), (16, 20, 1, 1), stride=2), dgrad((2, 16, 5, 4), (16, 36, 4, 3), stride=3, padding=1), dgrad((2, 48, 20), (48, 16, 5), stride=2, padding=2),
    dgrad((1, 16, 3, 4, 3), (16, 24, 3, 2, 3), stride=2, padding=(1, 0, 1)),
    # phases that are repeats of others: all of one, and of several
    dgrad((2, 72, 5, 3), (72, 16, 4, 4), stride=4), dgrad((2, 24, 13), (24, 40, 16), stride=8, padding=4), dgrad((1, 16, 2, 3), (16, 24, 8, 4), stride=(4, 2), padding=(2, 1)),
    # groups, whose channels fill rows of 128 bytes
    fprop((2, 128, 5, 6), (192, 64, 3, 3), padding=1, groups=2), fprop((1, 192, 7, 5), (192, 64, 3, 2), stride=2, padding=1, groups=3),
]  # fmt: skip


def tiles(case: Case, mode: str) -> list[DenseNhwc]:
    """One of each kind: the small and the large, of a cluster and alone, whole blocks of 64 channels and not."""
    found = (DenseNhwc(64, 64, 2), DenseNhwc(128, 96, 3), DenseNhwc(64, 32, 4, 8), DenseNhwc(128, 128, 3, 2), DenseNhwc(128, 256, 2), DenseNhwc(64, 32, 3))
    return [config for config in found if dn.refusal(asked(case, mode), config) is None]


PLANNED = [(case, mode) for case in (*CASES, *AWKWARD) for mode in MODES if dn.why_not(asked(case, mode)) is None]
#: Awkward cases in one mode, by turns.
SOME = [(case, mode) for case, mode in PLANNED if case in CASES]
for _case in dict.fromkeys(case for case, _ in PLANNED if case not in CASES):
    _modes = [mode for case, mode in PLANNED if case == _case]
    SOME.append((_case, _modes[len(SOME) % len(_modes)]))


@pytest.mark.parametrize(("case", "mode"), SOME, ids=[f"{mode}-{case}" for case, mode in SOME])
def test_the_plan_computes_the_convolution(case, mode):
    """Every scalar and tensor map, in numpy: exact integers of every second tile, then what TF32 leaves of random numbers."""
    found, arrays = tiles(case, mode), case.integers(dtype_of(mode))
    ref, turn = case.reference(*arrays), PLANNED.index((case, mode)) % 2 if len(found) > 1 else 0
    for config in found[turn::2] if case in CASES else found[turn:][:1]:
        assert_exact(emulated(case, mode, arrays, config), ref, config)
    if "tf32" in mode:
        arrays = case.normals("float32", seed=1)
        ref = case.reference(*arrays)
        assert_close(emulated(case, mode, arrays, found[0], keep=False), ref, limbs_bound(case, mode, *arrays[:2], ref), found[0])


PAIRS = [  # neighbouring tiles whose pixels two blocks load for each other: tails of pixels and channels, taps, both directions
    (case, mode, config) for case, config in (
        (fprop((3, 72, 7, 9), (136, 72, 1, 1)), DensePairs(128, 128, 3)), (fprop((2, 40, 9, 8), (88, 40, 3, 2), padding=1), DensePairs(64, 64, 2)),
        (fprop((2, 136, 13, 9), (200, 136, 1, 1), stride=2), DensePairs(128, 64, 4)), (fprop((3, 64, 21), (70, 64, 3), dilation=2), DensePairs(64, 64, 3)),
        (dgrad((2, 72, 7, 5), (72, 80, 3, 3), padding=1), DensePairs(128, 64, 3)), (dgrad((1, 136, 7, 9), (136, 256, 1, 1)), DensePairs(64, 64, 2)),
    ) for mode in MODES if dn.refusal(asked(case, mode), config) is None
]  # fmt: skip


@pytest.mark.parametrize(("case", "mode", "config"), PAIRS, ids=[f"{mode}-{case}" for case, mode, _ in PAIRS])
def test_pairs_of_tiles(case, mode, config):
    arrays = case.integers(dtype_of(mode))
    for multiprocessors in (2, 3, 132):
        assert_exact(emulated(case, mode, arrays, config, multiprocessors=multiprocessors), case.reference(*arrays), config)


def test_every_kind_of_case_is_among_them():
    assert {mode for _, mode in PLANNED} == set(MODES) and {case.transposed for case, _ in PLANNED} == {True, False}
    met = [dn.schedule(asked(case, mode), config, H200) for case, mode in PLANNED for config in tiles(case, mode)]
    defines = [launch.defines for program in met for step in (*program.whole, *program.filter_last) for launch in step]
    assert {d["W_MN_MAJOR"] for d in defines if "W_MN_MAJOR" in d} == {0, 1} and {d["PHASES"] for d in defines if "PHASES" in d} == {1, 4}


@pytest.mark.parametrize("multiprocessors", [1, 7, 1000])
@pytest.mark.parametrize("cluster", [1, 4])
def test_every_grid(multiprocessors, cluster):
    case = CASES[2]
    arrays = case.integers("float32")
    got = emulated(case, "tf32 last", arrays, DenseNhwc(64, 32, 4, cluster), multiprocessors=multiprocessors)
    assert_exact(got, case.reference(*arrays))


@pytest.mark.parametrize(("case", "mode"), [(case, mode) for case in CASES[:4] for mode in MODES], ids=str)
def test_moments_are_noted(case, mode):
    for arrays in (case.integers(dtype_of(mode)), case.normals(dtype_of(mode), seed=1)):
        for config in (DenseNhwc(64, 64, 2), DenseNhwc(128, 96, 3)):
            check_moments(asked(case, mode), config, arrays)
    for config in (DenseNhwc(64, 64, 2, 2), DenseNhwc(128, 256, 2)):
        assert dn.schedule(asked(case, mode), config, H200, True).moments is None


def test_one_launch_unless_the_filter_is_transposed():
    def launches(case, mode):
        problem = asked(case, mode)
        program = dn.schedule(problem, tiles(case, mode)[0], H200)
        return [[launch.kernel for step in steps for launch in step] for steps in (program.whole, program.filter_last)]

    one, two = ["hopper_dense"], ["transpose_filter", "hopper_dense"]
    forward, point, strided = CASES[0], CASES[1], CASES[10]
    assert launches(forward, "fp16 last") == launches(forward, "tf32 last") == launches(strided, "fp16 last") == [two, one]
    assert launches(point, "fp16 last") == launches(point, "tf32 last") == launches(CASES[9], "fp16 last") == [one, one]
    assert launches(strided, "tf32 last") == [two, one]


def test_a_filter_is_turned_by_the_launch_where_each_block_has_few_stages():
    """By small tiles, where a multiprocessor meets few stages: else a launch turns it once."""
    def kernels(shape, config):
        problem = asked(dgrad((shape[0], shape[1], *shape[2:]), (shape[1], 96, 1, 1)), "tf32 last")
        return [launch.kernel for step in dn.schedule(problem, config, H200).whole for launch in step]

    one, two = ["hopper_dense"], ["transpose_filter", "hopper_dense"]
    few, many = (2, 640, 14, 14), (64, 640, 56, 56)
    assert kernels(few, DenseNhwc(64, 64, 6)) == kernels(few, DenseNhwc(64, 32, 4, 8)) == one
    assert kernels(few, DenseNhwc(128, 64, 4)) == kernels(many, DenseNhwc(64, 64, 6)) == two


# ---- what is legal, and the choice

BASE = CASES[0]
GROUPED = replace(BASE, input_shape=(2, 128, 9, 8), weight_shape=(80, 64, 3, 3), options={"groups": 2, "padding": 1})


@pytest.mark.parametrize(
    ("case", "mode", "config", "reason"),
    [
        (BASE, "fp16", DenseNhwc(), "in the layouts NHWC"), (BASE, "fp32 last", DenseNhwc(), "precision='tf32'"), (replace(BASE, options={"groups": 2, "padding": 1}, weight_shape=(40, 12, 3, 3)), "fp16 last", DenseNhwc(), "multiple of 128 bytes"),
        (fprop((0, 8, 4, 4), (4, 8, 1, 1)), "fp16 last", DenseNhwc(), "nothing to compute"), (fprop((2, 12, 4, 4), (4, 12, 1, 1)), "fp16 last", DenseNhwc(), "multiple of 16 bytes"),
        (fprop((2, 8, 2**15, 2**15), (4, 8, 1, 1)), "fp16 last", DenseNhwc(), "32 bits"), (fprop((1, 16, 6, 300), (8, 16, 2, 2), dilation=(3, 256)), "fp16 last", DenseNhwc(), "padding or dilation"),
        (GROUPED, "fp16 last", DenseNhwc(64, 32), "lies in one group"), (replace(GROUPED, transposed=True, weight_shape=(128, 40, 3, 3)), "fp16 last", DenseNhwc(), "takes groups forward"),
        (BASE, "fp16 last", DenseNhwc(96), "BLOCK_M must be one of 64, 128"), (BASE, "fp16 last", DenseNhwc(64, 160), "up to 128"), (BASE, "fp16 last", DenseNhwc(128, 80), "32, 64, 96"),
        (BASE, "fp16 last", DenseNhwc(64, 64, 4, 3), "CLUSTER must be one of 1, 2, 4, 8"), (BASE, "fp16 last", DenseNhwc(128, 160, 4, 2), "share tiles"), (BASE, "fp16 last", DenseNhwc(128, 128, 2, 2), "no room for the sums"),
        (BASE, "fp16 last", DenseNhwc(128, 256, 6), "bytes of shared memory"), (BASE, "fp16 last", DenseNhwc(64, 64, 1), "bytes of shared memory"),
    ],
    ids=lambda v: str(v)[:40],
)  # fmt: skip
def test_a_configuration_says_why_it_cannot(case, mode, config, reason):
    problem = asked(case, mode)
    check_refused_on(H200, problem, config, reason)


def test_other_gpus_do_not_have_it():
    for capability, backend in (((8, 0), "cuda"), ((10, 0), "cuda"), ((0, 0), "opencl")):
        assert engines.refusal(asked(BASE, "fp16 last"), DenseNhwc(), like_h200(capability, backend)) is not None


def test_the_choice_is_legal_and_its_texts_are_listed():
    """Of random layers of every family: what is chosen, and each candidate's launches."""
    listed, r, met = list(dn.variants(H200)), random.Random(3), 0
    kinds = (("fprop", ("float32", "tf32", "NHWC")), ("dgrad", ("bfloat16", "fp32", "NHWC")), ("dgrad", ("float32", "tf32", "NHWC")))
    for problem in random_problems(r, ("dense 3x3", "dense 1x1", "small batch", "volume", "upsampling", "odd"), 6, kinds):
        if dn.why_not(problem):
            assert dn.choose(problem, H200) is None
            continue
        found = list(dn.configs(problem, H200))
        assert found and dn.choose(problem, H200)[1] in found and all(dn.refusal(problem, config) is None for config in found)
        program = dn.schedule(problem, r.choice(found), H200)
        for launch in (launch for step in (*program.whole, *program.filter_last) for launch in step):
            assert any(launch in one for one in listed), launch.defines
            met += 1
    assert met > 50


def test_few_pixels_of_many_channels_are_shared_by_clusters():
    for mode in ("tf32 last", "fp16 last"):
        problem = asked(fprop((1, 1024, 7, 7), (128, 1024, 3, 3), padding=1), mode)
        assert dn.choose(problem, H200)[1].CLUSTER == 8
        (launch,) = (launch for step in dn.schedule(problem, dn.choose(problem, H200)[1], H200).filter_last for launch in step)
        assert launch.grid <= H200.multiprocessors


def test_what_packed_filters_share():
    deep, other = fprop((4, 64, 8, 8), (64, 64, 3, 3)), fprop((1, 64, 20, 9), (64, 64, 3, 3))
    keys = {engines.filter_key(asked(case, mode), DenseNhwc()) for case in (deep, other) for mode in ("tf32 last", "fp16 last")}
    assert len(keys) == 2
    assert dn.sum_order(asked(deep, "fp16 last"), DenseNhwc(64, 64, 4)) == dn.sum_order(asked(deep, "fp16 last"), DenseNhwc(128, 96, 3))
    assert dn.sum_order(asked(deep, "fp16 last"), DenseNhwc(64, 64, 4)) != dn.sum_order(asked(deep, "fp16 last"), DenseNhwc(64, 64, 4, 2))


# ---- numbers of every range


@pytest.mark.parametrize("case", [CASES[0], CASES[10]], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_finite_reaches_its_own_results_only(case, mode):
    case = replace(case, bias=False)
    check_not_finite(case, mode, lambda *arrays: emulated(case, mode, arrays, DenseNhwc(64, 64, 2), finite=False, keep=False))


THIN = fprop((4, 64, 10, 8), (40, 64, 1, 1), bias=False)
RANGED = [scenario for scenario in SCENARIOS if scenario != "subnormals"]


@pytest.mark.parametrize("scenario", RANGED)
def test_every_range_is_kept(scenario):
    x, w = data(scenario, THIN)
    got = emulated(THIN, "tf32 last", (x, w), DenseNhwc(64, 64, 2), finite=False, keep=False)
    check_scenario(THIN, "tf32 last", x, w, got, scenario)


@pytest.mark.parametrize(
    ("case", "scalars"),
    [
        (CASES[2], "blocks channel_blocks last_steps rows tap_s tap_base tap_step_s dilation_h dilation_w load_plane load_q low_h low_w plane pq q out_size out_h out_w"),
        (CASES[4], "stride_h tap_r tap_step_r"), (CASES[10], "tap_step_s out_base"),
    ],
    ids=str,
)  # fmt: skip
def test_the_emulator_notices_a_wrong_scalar(case, scalars, monkeypatch):
    problem, config, arrays = asked(case, "tf32 last"), DenseNhwc(64, 64, 2), case.integers("float32")
    ref = case.reference(*arrays)
    check_noticed(dn, "hopper_dense", problem, config, arrays, scalars, 1, lambda got: assert_exact(got, ref), monkeypatch)


# ---- the kernel, compiled


def test_steps_fit_their_kernels():
    for case, mode in PLANNED[: 3 * len(MODES)]:
        check_steps(dn.schedule(asked(case, mode), tiles(case, mode)[0], H200), "hopper_dense")


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
def test_the_planner_s_kernels_compile_and_do_not_spill():
    steps = {}
    widest = DenseNhwc(128, 256, 4), DenseNhwc(64, 128, 3), DenseNhwc(128, 128, 6, 8), DenseNhwc(64, 32, 4, 2)
    for case, mode in ((CASES[0], "tf32 last"), (CASES[10], "fp16 last"), (CASES[10], "bf16 last")):
        for config in widest[: 2 if mode == "bf16 last" else None]:
            problem = asked(case, mode)
            if case.transposed:
                config = replace(config, BLOCK_N=min(config.BLOCK_N, max(columns for _, columns in dn.PHASED_TILES)))
            else:
                problem = replace(problem, has_scale=True, has_residual=config.BLOCK_N < 256, activation="relu")
            programs = dn.schedule(problem, config, H200), dn.schedule(asked(case, mode), replace(config, BLOCK_N=min(config.BLOCK_N, 192)), H200, True)
            for launch in (launch for program in programs for step in (*program.whole, *program.filter_last) for launch in step):
                steps[launch.source()] = launch, f"{problem} {config}"
    check_compiled(steps, 32)  # where the widest tile is stored: an activation's call takes registers


# ---- on the GPU

RUNS = [(case, mode, config) for case, mode in PLANNED for config in tiles(case, mode)[: None if case in CASES else 1]]
LARGE = fprop((9, 192, 28, 28), (256, 192, 3, 3), padding=1)
RUNS += [(LARGE, mode, config) for mode in MODES for config in (DenseNhwc(128, 192, 4), DenseNhwc(64, 128, 3), DenseNhwc(128, 128, 6, 4))]
RUNS += [*PAIRS, *((LARGE, mode, DensePairs(*tile)) for mode in MODES for tile in ((128, 128, 6), (128, 64, 8), (64, 64, 6)))]


@cache
def plans() -> dict:
    """The plans of all runs."""
    return plans_of("channels last", RUNS)


@pytest.mark.gpu
@pytest.mark.parametrize("run", RUNS, ids=ids_of(RUNS))
def test_on_the_gpu(torch, run):  # noqa: F811
    case, mode, _ = run
    plan = plans()[str(run)]
    check_numbers_on_gpu(torch, plan, case, mode)
    on_gpu = Arrays(torch, plan, *case.normals(dtype_of(mode), seed=2))
    found = on_gpu.launch().tobytes()
    assert found == on_gpu.launch().tobytes() == on_gpu.launch(kept=True).tobytes() == on_gpu.launch(filter_last=True).tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("scenario", RANGED)
def test_every_range_is_kept_on_the_gpu(torch, scenario):  # noqa: F811
    x, w = data(scenario, THIN)
    got = Arrays(torch, Plan(asked(THIN, "tf32 last"), "cuda", config=DenseNhwc(64, 32, 4)), x, w).launch()
    check_scenario(THIN, "tf32 last", x, w, got, scenario)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", [DenseNhwc(64, 64, 4), DenseNhwc(64, 32, 4, 4)], ids=str)
@pytest.mark.parametrize("case", [CASES[0], CASES[10]], ids=str)
def test_what_is_not_finite_on_the_gpu(torch, case, config, mode):  # noqa: F811
    case = replace(case, bias=False)
    plan = Plan(asked(case, mode), "cuda", config=config)
    check_not_finite(case, mode, lambda *arrays: Arrays(torch, plan, *arrays).launch())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [dtype for dtype in ("float32", "float16", "bfloat16") if dtype in DTYPES])
@pytest.mark.parametrize("config", [DenseNhwc(128, 64, 4), DenseNhwc(64, 64, 4, 4)], ids=str)
@pytest.mark.parametrize("channels", [72, 21])
def test_the_epilogue_on_the_gpu(torch, dtype, config, channels):  # noqa: F811
    """Bias, scale, residual and ReLU, of channels that are written four at once and one at a time."""
    x_shape, w_shape = (3, 32, 9, 11), (channels, 32, 3, 3)
    y_shape = (3, channels, 9, 11)
    problem = ConvProblem.forward(
        2, x_shape, w_shape, padding=1, dtype=dtype, precision="tf32" if dtype == "float32" else "fp32", layout="NHWC", bias_shape=(channels,),
        scale_shape=(channels,), residual_shape=y_shape, activation="relu",
    )  # fmt: skip
    make = torch.Generator().manual_seed(1)
    kind = getattr(torch, dtype)
    x, w, b, s, r = (torch.randint(-3, 4, shape, generator=make).to("cuda", kind) for shape in (x_shape, w_shape, (channels,), (channels,), y_shape))
    x, w, r = (a.to(memory_format=torch.channels_last) for a in (x, w, r))
    out = torch.full_like(r, float("nan"))
    Plan(problem, "cuda", config=config)(x, w, b, scale=s, residual=r, out=out)
    ref = torch.nn.functional.conv2d(x.double(), w.double(), padding=1)
    ref = torch.relu(ref * s.double()[:, None, None] + b.double()[:, None, None] + r.double())
    assert torch.equal(out, ref.to(kind))
