"""Gradients of filters of few channels and many pixels, by ``patch_wgrad.cu`` and ``direct/wgrad.cu``: exact, and against float64."""

import math
from dataclasses import replace

import numpy as np
import pytest
from reference import DTYPES, assert_close, assert_exact, run
from test_gradients import bound, gradient

from pycuda_conv import ConvProblem, Plan, engines
from pycuda_conv.engines import registry, split_sum
from pycuda_conv.engines.direct import direct, patch_wgrad
from pycuda_conv.engines.direct.configs import Wgrad
from pycuda_conv.engines.direct.patch_wgrad import RUN, TILES, PatchWgrad
from pycuda_conv.engines.direct.wgrad import WGRAD_RUN
from pycuda_conv.engines.mma.few_channels_wgrad import FewChannelsWgrad
from pycuda_conv.plan import as_called
from pycuda_conv.runtime.target import Target

H200 = Target("sm_90a")
#: Convolutions (input, filter, options) whose filter's gradient is computed: tiles that are full and not, one pixel, every rank.
CASES = [
    ((2, 3, 21, 18), (70, 3, 7, 7), {"stride": 2, "padding": 3}), ((1, 1, 900), (66, 1, 40), {"stride": 3}), ((3, 2, 9, 8), (20, 2, 3, 2), {"padding": (1, 0)}),
    ((2, 3, 16, 16), (40, 3, 8, 8), {"stride": 8}), ((1, 5, 4, 9, 8), (17, 5, 2, 3, 2), {"padding": (1, 0, 1), "stride": (1, 2, 1)}), ((2, 12, 13, 11), (24, 4, 3, 3), {"groups": 3}),
    ((3, 4, 30), (8, 2, 5), {"groups": 2, "dilation": 3}), ((1, 1, 1, 1), (1, 1, 1, 1), {}), ((5, 17, 6, 7), (33, 17, 1, 1), {}), ((2, 3, 5, 5), (6, 3, 3, 3), {"padding": 4}),
]  # fmt: skip
CONFIGS = [PatchWgrad(*tile, slices) for tile, slices in zip(TILES, (1, 3, 40, 2), strict=True)]

SLICED = [Wgrad(128, 9, 7, 4), Wgrad(64, 6, 1, 2), Wgrad(128, 16, 40, 1), Wgrad(32, 3, 150, 4), Wgrad(128, 1, 2, 2)]


def problem(case, layout="NCHW", dtype="float32") -> ConvProblem:
    x, w, options = case
    y = ConvProblem.forward(len(w) - 2, x, w, **options).result_shape
    return ConvProblem.gradient("weight", len(w) - 2, x, w, y, **options, dtype=dtype, layout=layout)


def operands(asked: ConvProblem, make, dtype) -> list[np.ndarray]:
    return [make(shape).astype(dtype) for shape in asked.operand_shapes[:2]]


def reference(case, x, dy) -> np.ndarray:
    return gradient("weight", x, np.zeros(case[1]), dy, **case[2])


#: Each case with every tile, in one of both layouts.
RUNS = [(case, config, ("NCHW", "NHWC")[(i + j) % 2]) for i, case in enumerate(CASES) for j, config in enumerate(CONFIGS)]


@pytest.mark.parametrize(("case", "config", "layout"), RUNS, ids=str)
def test_integers_are_exact(device, case, config, layout):
    asked, rng = problem(case, layout), np.random.default_rng(3)
    x, dy = operands(asked, lambda shape: rng.integers(-8, 9, shape), "float32")
    assert_exact(run(Plan(asked, device, config=config), x, dy), reference(case, x, dy))


def fewer_filters(case):
    """A quarter of them, as each is summed by itself here, and one more."""
    x, (k, *rest), options = case
    return x, (k if "groups" in options else k // 4 + 1, *rest), options


@pytest.mark.parametrize(("case", "config"), [(fewer_filters(case), config) for i, case in enumerate(CASES) for j, config in enumerate(SLICED) if (i + j) % 2 == 0], ids=str)
def test_slices_of_pixels_and_several_filters_are_exact(device, case, config):
    """Slices end within images, and some are empty; filters of a block end with a group."""
    asked, rng = problem(case), np.random.default_rng(4)
    x, dy = operands(asked, lambda shape: rng.integers(-8, 9, shape), "float32")
    assert_exact(run(Plan(asked, device, config=config), x, dy), reference(case, x, dy))


@pytest.mark.parametrize(("tile", "layout", "dtype"), [(tile, ("NCHW", "NHWC")[(i + j) % 2], dtype) for i, tile in enumerate(TILES) for j, dtype in enumerate(DTYPES)], ids=str)
def test_random_data_of_every_type(device, tile, layout, dtype):
    case = CASES[0]
    asked, rng = problem(case, layout, dtype), np.random.default_rng(5)
    x, dy = operands(asked, rng.standard_normal, dtype)
    plan = Plan(asked, device, config=PatchWgrad(*tile, 3))
    got, ref = run(plan, x, dy), reference(case, x, dy)
    assert_close(got, ref, bound("weight", x, np.zeros(case[1]), dy, ref, dtype, **case[2]))
    assert np.array_equal(got, run(plan, x, dy))


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "float32"])
def test_several_filters_of_every_type(device, dtype):
    case = CASES[5]
    asked, rng = problem(case, dtype=dtype), np.random.default_rng(6)
    x, dy = operands(asked, rng.standard_normal, dtype)
    ref = reference(case, x, dy)
    got = run(Plan(asked, device, config=Wgrad(128, 9, 20, 4)), x, dy)
    assert_close(got, ref, bound("weight", x, np.zeros(case[1]), dy, ref, dtype, **case[2]))


@pytest.mark.parametrize("engine", [direct, patch_wgrad])
def test_long_sums_lose_few_digits(device, engine):
    """A sum of 60,000 products, one after the other, would be off by fifty times as much; in 32 rows by 1e-6."""
    case, rng = ((1, 1, 200, 300), (8, 1, 3, 3), {"padding": 1}), np.random.default_rng(7)
    asked = problem(case)
    x, dy = operands(asked, rng.standard_normal, "float32")
    ref = reference(case, x, dy)
    got = run(Plan(asked, device, config=engine.choose(asked.launched, H200)[1]), x, dy)
    assert np.linalg.norm(got - ref) / np.linalg.norm(ref) < 3e-7


@pytest.mark.parametrize(
    ("config", "message"), [(PatchWgrad(48, 64), "(BLOCK_M, BLOCK_N) must be one of"), (PatchWgrad(64, 64, 2**30), "its grid is larger")]
)
def test_refusals(config, message):
    assert message in engines.refusal(problem(CASES[0]), config, H200)
    assert "layouts" in engines.refusal(ConvProblem.forward(2, (2, 3, 9, 9), (8, 3, 3, 3)), PatchWgrad(), H200)


#: Few channels, many pixels: (input, filter, options).
THIN = [
    ((1, 1, 2160, 3840), (1, 1, 3, 3), {}), ((1, 3, 1080, 1920), (3, 1, 15, 15), {"groups": 3}), ((1, 1, 160000), (64, 1, 10), {"stride": 5}),
    ((4, 1, 80000), (512, 1, 400), {"stride": 160}), ((8, 3, 224, 224), (64, 3, 7, 7), {"stride": 2, "padding": 3}), ((2, 16, 256, 256), (2, 16, 5, 5), {}),
    ((1, 3, 512, 512), (32, 3, 3, 3), {"padding": 1}), ((16, 3, 224, 224), (768, 3, 16, 16), {"stride": 16}), ((2, 1, 64, 64, 64), (16, 1, 3, 3, 3), {}),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("case", THIN, ids=str)
def test_no_launch_walks_a_long_sum_in_few_blocks(case, dtype):
    asked = problem(case, dtype=dtype)
    launched, pixels = asked.launched, asked.input_shape[0] * math.prod(asked.output_size)
    for engine in (direct, patch_wgrad):
        us, config = engine.choose(launched, H200)
        product, *others = [launch for step in engines.schedule(asked, config, H200).steps for launch in step]
        assert us > 0 and (product.grid >= H200.multiprocessors or pixels <= 128 * 8)
        assert product.arguments.run <= (RUN + 16 if engine is patch_wgrad else WGRAD_RUN * config.THREADS)
        for launch in others:  # adds the slices
            assert launch.arguments.run <= max(split_sum.LONGEST, math.ceil(config.SLICES / split_sum.MOST_LANES))
    # more slices than there are pixels help nobody
    assert patch_wgrad.choose(launched, H200)[1].SLICES <= pixels / 16 + 1


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_without_images_the_gradient_is_zero(device, layout):
    asked = problem(((0, 3, 9, 9), (8, 3, 3, 3), {}), layout)
    x, dy = operands(asked, np.zeros, "float32")
    for config in (PatchWgrad(), *([Wgrad(FILTERS=2)] if layout == "NCHW" else ())):
        assert not run(Plan(asked, device, config=config), x, dy).any()


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("x", "w"), [((0, 3, 5, 5), (4, 3, 3, 3)), ((2, 0, 5, 5), (4, 0, 3, 3))])
def test_empty_arrays_are_planned_for_a_gpu(x, w, layout):
    asked = problem((x, w, {}), layout)
    engines.schedule(asked, engines.choose(asked, H200), H200)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_channels_last_are_read_as_they_lie_where_that_gains(dtype):
    first = problem(((64, 3, 224, 224), (64, 3, 3, 3), {"padding": 1, "stride": 2}), "NHWC", dtype)
    assert as_called(first, H200) == first and isinstance(engines.choose(first, H200), PatchWgrad if dtype == "float32" else FewChannelsWgrad)
    dense = problem(((64, 256, 28, 28), (256, 256, 3, 3), {"padding": 1}), "NHWC", dtype)
    assert not isinstance(engines.choose(as_called(dense, H200), H200), PatchWgrad)
    assert not isinstance(engines.choose(replace(dense, layout="NCHW"), H200), PatchWgrad)


def test_every_launch_is_on_the_closed_list_of_texts():
    texts = registry.variants(H200)
    for case in (*THIN, *CASES):
        for layout, dtype in (("NCHW", "float32"), ("NHWC", "float32"), ("NCHW", "float16"), ("NCHW", "float64")):
            asked = problem(case, layout, dtype)
            engine_configs = [*patch_wgrad.configs(asked.launched, H200), *(direct.configs(asked.launched, H200) if layout == "NCHW" else ())]
            for config in engine_configs:
                if engines.refusal(asked, config, H200) is None:
                    for launch in (one for step in engines.schedule(asked, config, H200).steps for one in step):
                        assert any(launch in family for family in texts), launch


def test_numbers_of_pixels_that_do_not_fit_have_64_bits():
    """Slices of a whole number of steps reach beyond the last pixel."""
    asked = problem(((700, 1, 3_000_000), (1, 1, 1), {}), dtype="float16")
    for near, far in ((PatchWgrad(64, 64, 2), PatchWgrad(64, 64, 8_000_000)), (Wgrad(128, 1, 2), Wgrad(128, 1, 2_000_000))):
        found = [engines.schedule(asked, config, H200).steps[0][0].defines["INDEX_64"] for config in (near, far)]
        assert found == [0, 1]


@pytest.mark.parametrize("config", [PatchWgrad(16, 64, 2), PatchWgrad(64, 32, 40), Wgrad(64, 6, 3, 4)], ids=str)
@pytest.mark.parametrize("case", [CASES[0], CASES[4], CASES[5]], ids=str)
def test_64_bit_offsets_are_exact(device, case, config, monkeypatch):
    """What arrays of 2^31 elements get, on arrays that fit a laptop."""
    for engine in (direct, patch_wgrad):
        monkeypatch.setattr(engine, "needs_64_bits", lambda *_: True)
    asked, rng = problem(case), np.random.default_rng(8)
    x, dy = operands(asked, lambda shape: rng.integers(-8, 9, shape), "float32")
    plan = Plan(asked, device, config=config)
    assert plan.schedule.steps[0][0].defines["INDEX_64"] == 1
    assert_exact(run(plan, x, dy), reference(case, x, dy))
