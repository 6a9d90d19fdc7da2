"""Large filters by float64 transforms of blocks that go through memory: every length, what is checked and summed, and when it is chosen."""

import math
from dataclasses import replace

import numpy as np
import pytest
from cases.blocks import SHAPES as CASES
from reference import (
    TINY,
    assert_close,
    assert_exact,
    by_turns,
    fprop,
    reference,
    run,
)
from test_borders import padded

from pycuda_conv import ConvProblem, Plan, engines
from pycuda_conv.engines.fft import blocks
from pycuda_conv.engines.fft.blocks import BlockFft
from pycuda_conv.engines.schedule import shared_limit
from pycuda_conv.runtime import get_device
from pycuda_conv.runtime.target import Target

H200, TURING = Target("sm_90a"), Target("sm_75")
FIRST, SECOND, THIRD, BACK, *_ = CASES
LINE, VOLUME = (next(case for case in CASES if case.ndim == ndim) for ndim in (1, 3))
LARGE = fprop((1, 1, 150, 170), (1, 1, 31, 31), padding=15)


def plan(case, device, dtype="float32", **more):
    return Plan(case.problem(dtype, **more), device, config=BlockFft(*CASES.get(case, (128, 192))))


def test_lengths():
    lengths = [n for n in range(1, blocks.LONGEST + 65) if blocks.factors(n) is not None]
    assert lengths[0] == blocks.SHORTEST and lengths[-1] == blocks.LONGEST and not any(n % 64 for n in lengths)
    assert all(math.prod(blocks.factors(n)) * 64 == n for n in lengths) and {576, 1024, 4608, 6144, 5120} <= set(lengths)
    assert {one for n in lengths for one in blocks.factors(n)} == set(blocks.FACTORS)
    for device in (H200, TURING):
        for n in lengths:
            batch = blocks._batch(BlockFft(n, 128), shared_limit(device))
            assert batch * n * blocks.BYTES + blocks.FIXED_BYTES <= shared_limit(device) or not batch


@pytest.mark.parametrize("batch", [2, 4])
def test_fewer_rows_at_a_time(device, monkeypatch, batch):
    """As long blocks take them."""
    monkeypatch.setattr(blocks, "BATCHES", (batch,))
    case = BACK
    arrays = case.integers("float32")
    assert_exact(run(plan(case, device), *arrays), case.reference(*arrays))


def test_pairs_in_several_rows_of_launches(device, monkeypatch):
    case = SECOND
    arrays = case.normals("float32")
    expected = run(plan(case, device), *arrays)
    monkeypatch.setattr(blocks, "AT_ONCE", 3 * 128 * 192 * blocks.BYTES)
    some = plan(case, device)
    assert sum(one.kernel == "fft_blocks_results" for step in some.schedule.steps for one in step) > 1
    assert np.array_equal(run(some, *arrays), expected)


# ---- every element is right


def listed(case, device, *arrays):
    """Results of a call, and how many of them were put onto the list, on OpenCL, where the workspace is the host's memory."""
    made = plan(case, device)
    args = made.schedule.steps[-1][0].arguments
    nothing, y = np.zeros(1, "f"), np.full(made.problem.result_shape, np.nan, "f")
    workspace = np.full(made.schedule.workspace_bytes // 8, np.nan)
    on = get_device("opencl")
    with on:
        on.update_host_arrays(on.schedule_launcher(made.schedule.whole), arrays, (y, workspace, nothing, nothing, nothing), 0)
    return y, workspace[args.count_at :][:1].view(np.int32)[0]


@pytest.mark.parametrize(("full", "kind"), by_turns([True, False], ["black", "half", "one star", "tails", "faint"]))
def test_zeros_stay_zeros_and_what_may_be_off_is_summed(device, monkeypatch, kind, full):
    """From a list, and by the threads themselves once that is full. Zeros in segments of a block cost no sums."""
    if full:
        monkeypatch.setattr(blocks, "MOST_LISTED", 5)
    case = fprop((2, 2, 90, 100), (2, 1, 21, 17), groups=2, padding=8)
    x, w, b = case.normals("float32")
    b[:] = 0
    if kind == "tails":  # of a Gaussian around one pixel: 1e-30 of its largest value
        at = np.arange(21)[:, None] - 10, np.arange(17) - 8
        w[:] = np.exp(-(at[0] ** 2 + at[1] ** 2) / 2.0)
    x[..., : {"half": 50, "faint": 0}.get(kind, 100)] = 0
    x[:] = 1e-3 * x if kind == "faint" else x
    if kind not in ("black", "half"):
        x[0, 0, 44, 51] = 1e12
    ref, magnitude = case.reference(x, w, b), case.reference(abs(x), abs(w), b)
    got = run(plan(case, device), x, w, b)
    assert (got[magnitude == 0] == 0).all() and not np.signbit(got[magnitude == 0]).any() and ((magnitude == 0).any() or kind == "faint")
    assert_close(got, ref, 2.0**-23 * magnitude + TINY["float32"], kind)
    if device == "opencl":
        y, count = listed(case, device, x, w, b)
        assert np.array_equal(y, got)
        assert (count == 0 if kind == "black" else count < ref.size / 4 if kind != "faint" else count > ref.size / 8)


@pytest.mark.parametrize("case", [LINE, VOLUME], ids=str)
def test_zeros_inf_and_nan_of_lines_and_volumes(device, case):
    x, w, b = case.normals("float32")
    x[..., : x.shape[-1] // 2] = 0
    x[(0, 0, *(n // 3 for n in x.shape[2:]))] = np.inf
    x[(1, 0, *(2 * n // 3 for n in x.shape[2:]))] = np.nan
    inner = ..., *(slice(pad, n - pad) for n, pad in zip(x.shape[2:], np.broadcast_to(case.options["padding"], case.ndim), strict=True))
    got, ref = run(plan(case, device), x, w, b)[inner], case.reference(x, w, b)[inner]
    lost = ~np.isfinite(ref)
    assert lost.any() and not lost.all() and np.array_equal(got[lost], ref[lost].astype("f"), equal_nan=True)
    magnitude = case.reference(np.nan_to_num(abs(x), posinf=0), abs(w), abs(b))[inner]
    with np.errstate(invalid="ignore"):
        assert (abs(got - ref) <= 2.0**-22 * magnitude)[~lost].all()
    empty = case.reference((x != 0).astype("f"), np.ones_like(w), np.zeros_like(b))[inner] == 0
    assert empty.any() and (got - b.reshape(-1, *(1,) * case.ndim) == 0)[empty].all()


def test_an_inf_costs_the_sums_of_its_windows(device):
    if device != "opencl":
        pytest.skip("the list lies in the GPU's memory")
    x, w, b = LARGE.normals("float32")
    x[0, 0, 75, 85] = np.inf
    assert 31 * 31 <= listed(LARGE, device, x, w, b)[1] <= 3 * 31 * 31


def test_float64_zeros_and_inf(device):
    """Transforms of float64 arrays are taken as they are, but for windows of zeros, Inf and NaN."""
    x, w, b = LARGE.normals("float64")
    b[:] = 0
    x[..., :80] = 0
    x[0, 0, 130, 160] = np.nan
    got, ref = run(plan(LARGE, device, "float64", algorithm="fft"), x, w, b), LARGE.reference(x, w, b)
    assert np.array_equal(np.isnan(got), np.isnan(ref)) and np.isnan(got).any()
    empty = LARGE.reference((x != 0).astype("d"), np.ones_like(w), b) == 0
    assert empty.any() and (got[empty] == 0).mean() > 0.8
    assert np.nanmax(abs(got - ref)) < 1e-12


def test_a_worse_transform_is_noticed(device, monkeypatch):
    """The tests above can fail: without the check, a bright pixel spoils its surroundings."""
    case = fprop((1, 1, 90, 100), (1, 1, 21, 17), padding=8, bias=False)
    x, w, _ = case.normals("float32")
    x[:] *= 1e-3
    x[0, 0, 44, 51] = 1e12
    ref, magnitude = case.reference(x, w), case.reference(abs(x), abs(w))
    made = blocks._arguments
    monkeypatch.setattr(blocks, "_arguments", lambda *all: made(*all)._replace(limit=0))
    assert not (abs(run(plan(case, device), x, w) - ref) <= 2.0**-23 * magnitude).all()


# ---- the filter's spectrum, kept


@pytest.mark.parametrize("case", [SECOND, THIRD], ids=str)
def test_a_gpu_s_launches_with_a_packed_filter(case):
    """What a GPU launches, on OpenCL: filters' spectra are made once, in a buffer of their own."""
    on, config, problem = get_device("opencl"), BlockFft(*CASES[case]), case.problem()
    schedule = engines.schedule(problem, config, H200)
    longest = max(CASES[case])

    def with_room(steps):
        return [[
            replace(one, shared=0, defines=one.defines | ({"ROOM": max(blocks.ROOM, 8 * longest)} if one.shared else {})) for one in step
        ] for step in steps]

    x, w, b = case.normals("float32")
    y = np.full(problem.result_shape, np.nan, "f")
    workspace, packed = (np.full(n // 4, np.nan, "f") for n in (schedule.workspace_bytes, schedule.filter_bytes))
    nothing = np.zeros(1, "f")
    with on:
        on.update_host_arrays(
            on.schedule_launcher(with_room(schedule.prepare)), (nothing, w, None), (nothing, nothing, packed, nothing, nothing), 0
        )
        kept = packed.copy()
        on.update_host_arrays(on.schedule_launcher(with_room(schedule.steps)), (x, w, b), (y, workspace, packed, nothing, nothing), 0)
    assert np.array_equal(kept, packed, equal_nan=True)
    assert np.array_equal(y, run(Plan(problem, "opencl", config=config), x, w, b))


def test_filters_are_packed_alike_for_all_sizes_of_images():
    one, other = (ConvProblem.forward(2, (n, 4, size, size), (4, 1, 15, 15), groups=4) for n, size in ((1, 99), (5, 300)))
    assert blocks.filter_key(one, BlockFft()) == blocks.filter_key(other, BlockFft()) != blocks.filter_key(one, BlockFft(128, 128))
    row, line = ConvProblem.forward(2, (1, 1, 9, 900), (1, 1, 1, 99)), ConvProblem.forward(1, (1, 1, 900), (1, 1, 99))
    assert blocks.filter_key(row, BlockFft(128, 128)) != blocks.filter_key(line, BlockFft(128, 128))


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(2048, 1024), (1152, 3072), (6144, 4608), (6912, 6912)], ids=str)
def test_long_blocks_on_a_gpu(lengths):
    """Two and four transforms at a time; the results are those of integers, by another engine's transforms."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(sum(lengths))
    taps = tuple(n // 3 for n in lengths)
    x, w = torch.randint(-4, 5, (1, 1, 1500, 1400), device="cuda").float(), torch.randint(-4, 5, (1, 1, *taps), device="cuda").float()
    problem = ConvProblem.forward(2, x.shape, w.shape, padding=tuple(n // 2 for n in taps))
    got = Plan(problem, "cuda:0", config=BlockFft(*lengths))(x, w)
    size = [n + t for n, t in zip(x.shape[2:], taps, strict=True)]
    spectrum = torch.fft.rfft2(x.double(), size) * torch.fft.rfft2(w.double().flip(2, 3), size)
    full = torch.fft.irfft2(spectrum, size).round()
    cut = tuple(slice(t - 1 - t // 2, t - 1 - t // 2 + n) for t, n in zip(taps, got.shape[2:], strict=True))
    assert torch.equal(got.double(), full[..., cut[0], cut[1]])


# ---- the choice


def test_blocks_that_no_multiprocessor_holds():
    problem = ConvProblem.forward(2, (1, 1, 900, 900), (1, 1, 99, 99))
    with pytest.raises(ValueError, match="two rows need more"):
        engines.schedule(problem, BlockFft(6912, 128), TURING)
    assert isinstance(engines.choose(problem, TURING), BlockFft)


@pytest.mark.parametrize("seed", range(8))
def test_a_border_is_read_where_it_stands(device, seed):
    """No copy of the image with its border is made. Zeros, NaN and Inf let results be summed, which reads the border too."""
    rng = np.random.default_rng(700 + seed)
    ndim = (2, 1, 2, 3)[seed % 4]
    size, taps = (tuple(map(int, rng.integers(low, high[ndim - 1], ndim))) for low, high in ((20, (900, 90, 24)), (2, (60, 12, 5))))
    pads = tuple((int(a), int(b)) for a, b in rng.integers(0, 9, (ndim, 2)))
    modes = tuple((str(a), str(b)) for a, b in rng.choice(("zeros", "replicate", "reflect", "circular", "symmetric"), (ndim, 2)))
    pads, modes = ((5, 3), *pads[1:]), (("reflect", modes[0][1]), *modes[1:])
    x_shape, w_shape = (2, 2, *size), (4, 1, *taps)
    problem = ConvProblem.forward(ndim, x_shape, w_shape, groups=2, padding=pads, padding_mode=modes)
    made = Plan(problem, device, config=engines.Bordered(str(BlockFft(*(64,) * max(ndim, 2)))))
    assert "border_" not in made.explain()
    x, w = rng.integers(-4, 5, x_shape).astype("float32"), rng.integers(-4, 5, w_shape).astype("float32")
    if seed % 2:
        x[rng.random(x_shape) < 0.9] = 0
    if seed % 3 == 0:
        x[0, 0].flat[0], x[1, 1].flat[-1] = np.nan, np.inf
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(made(x, w), reference(False, ndim, padded(x.astype(np.float64), pads, modes), w, groups=2))
