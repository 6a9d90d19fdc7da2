"""Large filters by a library's transforms: elements are as right as sums, whatever the numbers; and what `algorithm` asks for."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases.library_fft import SHAPES as CASES
from reference import DISTRIBUTIONS, assert_close, assert_exact, fprop, run

import pycuda_conv as pc
from pycuda_conv import ConvArgumentError, ConvProblem, Plan, engines
from pycuda_conv.engines import LibraryFft
from pycuda_conv.engines.fft import library_fft
from pycuda_conv.runtime import get_device, transforms
from pycuda_conv.runtime.opencl import why_not as why_no_opencl
from pycuda_conv.runtime.target import Target
from pycuda_conv.runtime.transforms import gpu as gpu_transforms
from pycuda_conv.runtime.transforms import host as host_transforms
from pycuda_conv.signal import fftconvolve
from pycuda_conv.tools import oracle

CONFIG = LibraryFft()
on_the_host = pytest.mark.skipif(why_no_opencl() is not None, reason="a host's library transforms what is convolved on OpenCL")


@pytest.fixture(autouse=True)
def library(device):
    if not get_device(device).transforms:
        pytest.skip("neither CuPy nor torch transforms on this GPU")


def plan(case, device, dtype="float32", **more):
    return Plan(case.problem(dtype, **more), device, config=CONFIG)


def test_a_filter_of_100001_taps(device):
    rng = np.random.default_rng(2)
    x, w = rng.standard_normal(120000).astype("f"), rng.standard_normal(100001).astype("f")
    got = pc.conv1d(x[None, None], w[None, None], device=device)[0, 0]
    ref = np.correlate(x.astype("d"), w.astype("d"), "valid")
    assert abs(got - ref).max() <= 1e-7 * abs(ref).max()


@on_the_host
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("algorithm", ["fft", None])
@pytest.mark.parametrize(("name", "options"), [("conv2d", {"stride": 3, "dilation": 2, "padding": 12}), ("conv_transpose2d", {"stride": 2, "dilation": 3})])
def test_inf_and_nan_between_taps_meet_nothing(algorithm, name, options, value):
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((1, 1, 60, 63)), rng.standard_normal((1, 1, 15, 15))
    x[0, 0, 30, 40] = value
    want = getattr(torch.nn.functional, name)(torch.from_numpy(x), torch.from_numpy(w), **options).numpy()
    with np.errstate(all="ignore"):
        got = getattr(pc, name)(x.astype("f"), w.astype("f"), algorithm=algorithm, device="opencl", **options)
    np.testing.assert_allclose(got, want, atol=1e-4)


@on_the_host
@pytest.mark.parametrize("mode", ["full", "same", "valid"])
@pytest.mark.parametrize("shapes", [((500,), (450,)), ((40, 50), (39, 30)), ((20, 12, 31), (9, 11, 8))], ids=str)
def test_what_is_met_behind_the_end_are_the_zeros_in_front(mode, shapes):
    """The transforms of a whole image are no longer than its results or what they meet."""
    signal = pytest.importorskip("scipy.signal")
    x, w = (np.random.default_rng(2).standard_normal(shape) for shape in shapes)
    got = fftconvolve(x, w, mode, device="opencl")
    np.testing.assert_allclose(got, signal.fftconvolve(x, w, mode), atol=1e-11)
    size, reach, wanted = 1000, 1000, 1999
    assert library_fft._whole(size, 1, 1 - reach, reach, wanted, 1) == 2000 < 3000


LARGE = fprop((1, 1, 150, 170), (1, 1, 31, 31), padding=15)


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_float64_holds_the_bound_of_sums_for_all_kinds_of_numbers(device, kind):
    """The reference in float64 is off by as much itself."""
    x, w, b = LARGE.drawn(kind, "float64")
    ref = LARGE.reference(x, w, b)
    assert_close(run(plan(LARGE, device, "float64"), x, w, b), ref, 2 * LARGE.bound(x, w, b, ref), kind)


def test_a_sky_with_stars_through_a_gaussian(device):
    """The relative error of an element of transforms in float32 is 1e-4 here."""
    rng = np.random.default_rng(1)
    x = (1e-4 * rng.random((1, 1, 256, 256))).astype("f")
    x[..., ::40, ::40] = 1
    at = np.arange(31) - 15
    w = np.exp(-(at[:, None] ** 2 + at**2) / 8)
    w = (w / w.sum()).astype("f")[None, None]
    case = fprop(x.shape, w.shape, padding=15, bias=False)
    ref = case.reference(x, w)
    for y in (run(plan(case, device), x, w), pc.conv2d(x, w, padding=15, device=device), run(Plan(case.problem(), device), x, w)):
        assert (abs(y - ref) <= 6e-7 * ref).all()


def test_nan_among_many_taps_takes_no_sums(device, monkeypatch):
    """Windows that have one are NaN, the others are as right as without it."""
    if get_device(device).backend == "cuda":
        pytest.skip("on a GPU they are summed")
    monkeypatch.setattr(host_transforms, "MOST_SUMMED", 100)
    case = fprop((1, 1, 300, 300), (1, 1, 101, 101), padding=50, bias=False)
    x, w, _ = case.normals("float32")
    expected = run(plan(case, device), x, w)
    x[0, 0, 120, 170] = np.nan
    got = pc.conv2d(x, w, padding=50, device=device)
    lost = np.zeros(got.shape, bool)
    lost[..., 70:171, 120:221] = True
    assert np.isnan(got[lost]).all() and not np.isnan(got[~lost]).any()
    assert np.allclose(got[~lost], expected[~lost], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("stride", "groups"), [(1, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("by", ["input", "weight"])
def test_gradients(device, by, stride, groups):
    rng = np.random.default_rng(3)
    x, w = (3, 4, 31, 33), (8, 4 // groups, 11, 9)
    forward = ConvProblem.forward(2, x, w, padding=4, stride=stride, groups=groups)
    problem = ConvProblem.gradient(by, 2, x, w, forward.result_shape, padding=4, stride=stride, groups=groups)
    first, second = (rng.standard_normal(shape).astype("f") for shape in (problem.input_shape, problem.weight_shape))
    ref, magnitude = oracle.reference(problem, first, second), oracle.reference(problem, abs(first), abs(second))
    assert_close(run(Plan(problem, device, config=CONFIG), first, second), ref, 2.0**-23 * magnitude)


def test_many_doubtful_results_are_left_to_the_kernel(device, monkeypatch):
    """Python sums a few; both ways give the same bits."""
    if get_device(device).backend == "cuda":
        pytest.skip("Python sums none on a GPU")
    x, w, b = LARGE.drawn("sparse")
    by_python = run(plan(LARGE, device), x, w, b)
    monkeypatch.setattr(host_transforms, "MOST_SUMMED", -1)
    assert np.array_equal(run(plan(LARGE, device), x, w, b), by_python)


def test_numpy_serves_without_scipy(device, monkeypatch):
    if get_device(device).backend == "cuda":
        pytest.skip("of the host's memory")
    monkeypatch.setattr(host_transforms, "_library", lambda: np.fft)
    for case in (CASES[2], CASES[8], CASES[6]):
        arrays = case.integers("float32")
        assert_exact(run(plan(case, device), *arrays), case.reference(*arrays))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_torch_s_functions_make_the_same(dtype):
    """What a GPU computes, by torch on the CPU."""
    for case in (CASES[2], CASES[3], CASES[8], LARGE):
        args = library_fft.transforms(case.problem(dtype).launched)
        x, w, _ = case.normals(dtype)
        sums, limits = np.full(args.sums_shape, np.nan), np.full(args.limits_shape, np.nan)
        ours = torch.full_like(torch.from_numpy(sums), torch.nan), torch.full_like(torch.from_numpy(limits), torch.nan)
        gpu_transforms.fill_by(args, gpu_transforms._Torch("cpu", False), *(torch.from_numpy(a).flatten() for a in (x, w)), *ours)
        expected = case.reference(x.astype("d"), w.astype("d"))
        got = ours[0].numpy().reshape(expected.shape)
        known = ~np.isnan(got)
        assert known.all() or dtype == "float64"
        assert np.allclose(got[known], expected[known], rtol=0, atol=1e-12 * abs(expected).max())
        assert (ours[1] >= 0).all()


# ---- what is asked for, and what is chosen


@pytest.mark.parametrize(("wrong", "error"), [("FFT", ConvArgumentError), ("", ConvArgumentError), (1, TypeError), (["fft"], TypeError)])
def test_words(wrong, error):
    x, w = np.ones((1, 1, 9, 9), "f"), np.ones((1, 1, 3, 3), "f")
    for call in (lambda: pc.conv2d(x, w, algorithm=wrong), lambda: ConvProblem.forward(2, x.shape, w.shape, algorithm=wrong)):
        with pytest.raises(error, match=r"algorithm must be None or one of \('direct', 'fft', 'batch_invariant'\), "):
            call()


@on_the_host
def test_each_word_is_followed():
    on, x, w = get_device("opencl"), (1, 1, 200, 200), (1, 1, 15, 15)

    def chosen(where, algorithm, w=w, **more):
        return type(engines.choose(ConvProblem.forward(2, x, w, algorithm=algorithm, **more), where)).__name__

    assert [chosen(on, algorithm) for algorithm in (None, "direct", "fft")] == ["LibraryFft", "Tile", "LibraryFft"]
    assert [chosen(on, algorithm, (1, 1, 3, 3)) for algorithm in (None, "fft")] == ["Tile", "LibraryFft"]
    h200 = Target("sm_90a")  # without a library
    assert chosen(h200, "fft") == "BlockFft" != chosen(h200, "direct")
    assert chosen(h200, "fft", (1, 1, 1, 15)) == "BlockFft"  # a line
    assert chosen(h200, "fft", (1, 1, 101, 101), stride=2) == chosen(h200, "direct", (1, 1, 101, 101), stride=2)  # there is no transform


def test_gradients_of_torch_go_the_same_way(monkeypatch):
    seen = []
    made = engines.registry._fastest
    monkeypatch.setattr(engines.registry, "_fastest", lambda problem, device: seen.append(problem) or made(problem, device))
    x = torch.randn(1, 2, 41, 43, requires_grad=True)
    w = torch.randn(2, 1, 11, 13, requires_grad=True)
    pc.conv2d(x, w, padding=5, groups=2, algorithm="fft").square().sum().backward()
    assert {(p.direction, p.algorithm) for p in seen if p.input_size == (1, 41, 43)} == {(d, "fft") for d in ("fprop", "dgrad", "wgrad")}
    ours = x.grad.clone(), w.grad.clone()
    x.grad = w.grad = None
    torch.nn.functional.conv2d(x, w, padding=5, groups=2).square().sum().backward()
    assert torch.allclose(ours[0], x.grad, rtol=1e-4, atol=1e-2) and torch.allclose(ours[1], w.grad, rtol=1e-4, atol=1e-1)


def test_dask_passes_it_on():
    da = pytest.importorskip("dask.array")
    rng = np.random.default_rng(6)
    x, w = rng.standard_normal((1, 1, 90, 80)).astype("f"), rng.standard_normal((1, 1, 11, 11)).astype("f")
    lazy = da.from_array(x, chunks=(1, 1, 45, 80))
    for algorithm in (None, "direct", "fft"):
        got = pc.conv2d(lazy, w, padding=5, algorithm=algorithm).compute()
        assert np.allclose(got, pc.conv2d(x, w, padding=5, algorithm="direct"), atol=1e-3)
    with pytest.raises(ConvArgumentError, match="algorithm must be"):
        pc.conv2d(lazy, w, algorithm="dft")


@on_the_host
@pytest.mark.parametrize(
    ("problem", "fft"),
    [
        (ConvProblem.forward(2, (1, 1, 256, 256), (1, 1, 3, 3)), False), (ConvProblem.forward(2, (1, 1, 256, 256), (1, 1, 7, 7)), False),
        (ConvProblem.forward(2, (1, 1, 256, 256), (1, 1, 11, 11)), True), (ConvProblem.forward(2, (1, 1, 300, 200), (1, 1, 1001, 1001), padding=500), True),
        (ConvProblem.forward(2, (8, 16, 64, 64), (16, 16, 3, 3), padding=1), False), (ConvProblem.forward(1, (1, 1, 400000), (1, 1, 100000)), True),
        (ConvProblem.forward(3, (1, 1, 64, 64, 64), (1, 1, 11, 11, 11)), True), (ConvProblem.forward(2, (1, 1, 2048, 2048), (1, 1, 31, 31), stride=16), False),
        (ConvProblem.gradient("weight", 2, (1, 1, 256, 256), (1, 1, 127, 127), (1, 1, 130, 130)), True),
        (ConvProblem.forward(2, (1, 1, 256, 256), (1, 1, 31, 31), dilation=3), True),
        (ConvProblem.forward(2, (1, 1, 256, 256), (1, 1, 11, 11), dtype="float64"), False), (ConvProblem.forward(2, (1, 1, 512, 512), (1, 1, 101, 101), dtype="float64"), True),
    ],
    ids=str,
)  # fmt: skip
def test_it_is_chosen_on_a_host_where_it_takes_less_time(problem, fft):
    assert isinstance(engines.choose(problem, get_device("opencl")), LibraryFft) == fft


def test_lengths_have_small_factors_and_hold_the_filter():
    for n in (1, 2, 17, 100, 1001, 4097, 100003):
        length = transforms.good_length(n)
        rest = length
        for factor in (2, 3, 5):
            while rest % factor == 0:
                rest //= factor
        assert rest == 1 and n <= length <= 1.15 * n + 1
    for case in CASES:
        args = library_fft.transforms(case.problem().launched)
        each = zip(args.used, args.reach, args.length, args.stride, args.first, args.blocks, strict=True)
        for used, reach, length, stride, first, blocks in each:
            around = max(0, -first) if blocks == 1 else 0  # what is met behind the end are the zeros in front
            assert max(used, reach, used + reach - 1 - around) <= length and used % stride == 0


@on_the_host
@pytest.mark.parametrize(("problem", "message"), [
    (ConvProblem.forward(2, (0, 1, 90, 90), (1, 1, 9, 9)), "nothing to compute"),
    (ConvProblem.forward(2, (1, 2048, 512, 512), (2048, 2048, 31, 31)), "at most")
])
def test_refusals(problem, message):
    assert message in engines.refusal(problem, CONFIG, get_device("opencl"))
    assert not isinstance(engines.choose(problem, get_device("opencl")), LibraryFft)


def test_a_gpu_s_library_keeps_float64(monkeypatch):
    """`algorithm="fft"` asks for the error of the norm, which is float32's where results are float32 or shorter."""
    gpu = Target("sm_90a")
    monkeypatch.setattr(type(gpu), "transforms", "cupy", raising=False)
    for dtype, single in (("float64", False), ("float32", True), ("float16", True)):
        for made in (
            ConvProblem.forward(2, (1, 1, 200, 200), (1, 1, 90, 90)),
            ConvProblem.gradient("weight", 2, (1, 1, 99, 99), (1, 1, 9, 9), (1, 1, 91, 91))
        ):
            schedule = engines.schedule(replace(made, dtype=dtype, algorithm="fft"), LibraryFft(), gpu)
            assert schedule.steps[0][0].transforms[0].single is single, (dtype, made)
