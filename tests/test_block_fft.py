"""Large filters by float64 transforms of blocks that go through memory: every length, what is checked and summed, and when it is chosen."""

import math

import numpy as np
import pytest
from cases.blocks import SHAPES as CASES
from reference import (
    assert_exact,
    fprop,
    reference,
    run,
)
from test_borders import padded

from pycuda_conv import ConvProblem, Plan, engines
from pycuda_conv.engines.fft import blocks
from pycuda_conv.engines.fft.blocks import BlockFft
from pycuda_conv.engines.schedule import shared_limit
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


# ---- the filter's spectrum, kept


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
