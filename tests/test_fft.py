"""Large filters by Fourier transforms of tiles: rounded integers, float64 references, the bound on errors, and what is computed without transforms."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import test_epilogue as epilogue
from cases.fft import SHAPES as CASES
from reference import DTYPES, TINY, _pairs, assert_close, check, fprop, reference, run

from pycuda_conv import ConvProblem, Plan, engines
from pycuda_conv.engines.fft import fft
from pycuda_conv.engines.fft.blocks import BlockFft
from pycuda_conv.engines.fft.fft import RANGE, TILES, Fft
from pycuda_conv.runtime import get_device
from pycuda_conv.runtime.target import Target

H200 = Target("sm_90a")
TILE_OF = dict(zip(CASES, [tile for _ in CASES for tile in TILES], strict=False))
PLAIN = CASES[0]


def config_of(case, dtype="float32") -> Fft:
    """Another tile for each case; the largest does not hold float64."""
    tile = TILE_OF[case]
    return Fft(*((64, 128) if tile == (128, 128) and dtype == "float64" else tile))


def window_sums(case, x) -> np.ndarray:
    """Of all channels of a group: one axis after the other, which takes a sum of few numbers each."""
    groups, pairs = case.options.get("groups", 1), _pairs(case.options.get("padding", 0), case.weight_shape[2:], (1,) * case.ndim)
    for axis, (size, pair) in enumerate(zip(case.weight_shape[2:], pairs, strict=True)):
        along = tuple(size if i == axis else 1 for i in range(case.ndim))
        padding = tuple(pair if i == axis else (0, 0) for i in range(case.ndim))
        x = reference(case.transposed, case.ndim, x, np.ones((x.shape[1], 1, *along)), padding=padding, groups=x.shape[1])
    return np.repeat(x.reshape(len(x), groups, -1, *x.shape[2:]).sum(2), case.channels // groups, 1)


def norms(case, x, w) -> np.ndarray:
    """Of the filter times the window of each result; a window that reaches over an edge counts as the nearest one that does not."""
    squares = window_sums(case, np.square(x, dtype=float))
    inner = window_sums(case, np.ones(x.shape))
    for axis in range(2, x.ndim):  # the nearest result whose window lies in the image
        full = np.flatnonzero(inner.max(axis=tuple(i for i in range(x.ndim) if i != axis)) == inner.max())
        squares = np.take(squares, np.clip(np.arange(squares.shape[axis]), full[0], full[-1]), axis)
    groups, (k, c) = case.options.get("groups", 1), w.shape[:2]
    of_filter = np.square(w, dtype=float).reshape(groups, k // groups, c, -1).sum(-1).sum(1 if case.transposed else 2).ravel()
    return np.sqrt(squares) * np.sqrt(of_filter).reshape(-1, *(1,) * case.ndim)


def bound(case, x, w, b, ref, config) -> np.ndarray:
    """What the documentation says: of a transform, and of a sum of products, whichever computed a result."""
    log = math.log2(config.TILE_H * config.TILE_W)
    u = 2.0**-53 if x.dtype == np.float64 else 2.0**-24
    return log * u * RANGE * norms(case, x, w) + case.bound(x, w, b, ref)


def checked(case, x, config) -> tuple:
    """What ``fft/range.cu`` writes on OpenCL: flags of tiles, and their maps, which are 255 where there is none."""
    pytest.importorskip("pyopencl")
    problem, on = case.problem(x.dtype.name, algorithm="fft"), get_device("opencl")
    schedule = engines.schedule(problem, config, on)
    launch = [one for step in schedule.steps for one in step if one.kernel == "fft_range"][-1]
    args, numbers = launch.arguments, np.dtype("float64" if x.dtype == np.float64 else "float32")
    workspace = np.full(schedule.workspace_bytes, 255, np.uint8).view(numbers)
    with on:
        on.update_host_arrays(on.launcher(launch), (x, x, None), (np.zeros(1, numbers), workspace), 0)
    tiles = problem.groups * args.all_tiles
    found, maps = workspace[args.flags_at : args.flags_at + tiles], workspace[args.maps_at :].view(np.uint8)[: tiles * fft.PARTS]
    assert set(found) <= {0, 1}
    return problem, args, found.reshape(problem.groups, problem.N, -1), maps.reshape(problem.groups, problem.N, -1, fft.PARTS)


def flags(case, x, config) -> np.ndarray:
    """Of each tile of a group, whether some of its results are not taken from a transform."""
    return checked(case, x, config)[2]


def share(case, x, config, verdict) -> float:
    """Of all results, those of which the maps say `verdict`."""
    problem, args, found, maps = checked(case, x, config)
    (used_h, used_w), (part_h, part_w), (_, p, q) = (tiles := fft._Tiles.of(problem, config)).used, tiles.part, problem.result_size
    count = 0
    for at in np.argwhere(found):
        row, column = divmod(int(at[2]), args.tiles_w)
        h, w = np.arange(min(used_h, p - row * used_h)) // part_h, np.arange(min(used_w, q - column * used_w)) // part_w
        count += (maps[tuple(at)].reshape(-1, args.parts_w)[np.ix_(h, w)] & verdict != 0).sum()
    return count / (problem.groups * problem.N * p * q)


@cache
def normals(case):
    return case.normals("float32")


#: Every case in float32; of groups of one channel and of several, one in each other type.
TYPED = [
    (case, dtype) for i, case in enumerate(CASES) for dtype in DTYPES if dtype == "float32" or i in (0, 1) or (i, dtype) == (7, "float64")
]


@pytest.mark.parametrize(("case", "dtype"), TYPED, ids=str)
def test_random_data_of_every_type(device, case, dtype):
    """Normal numbers meet the bound on sums of products, too; each run gives the same bits."""
    config, arrays = config_of(case, dtype), case.normals(dtype)
    plan = Plan(case.problem(dtype, algorithm="fft"), device, config=config)
    got = run(plan, *arrays)
    check(case, got, *arrays, config)
    assert np.array_equal(got, run(plan, *arrays))
    ref = case.reference(*arrays)
    if dtype == "float32":  # of float64 the reference is no better
        assert np.linalg.norm(got - ref) / np.linalg.norm(ref) < 2.0**-22


@pytest.mark.parametrize("case", CASES, ids=str)
def test_normal_numbers_are_transformed(case):
    """Otherwise all tests of transforms would be tests of plain sums."""
    x, _, _ = normals(case)
    assert not flags(case, x, config_of(case)).any()


@pytest.mark.parametrize(
    ("case", "parts"), [*((CASES[0], parts) for parts in epilogue.PARTS), (CASES[1], "all"), (CASES[1], "residual")], ids=str
)
def test_epilogue(device, case, parts):
    """In results of transforms, and in those of plain sums."""
    config = config_of(case)
    plan = Plan(epilogue.finishing(case.problem(algorithm="fft"), parts), device, config=config)
    given = epilogue.arrays(case, "float32", parts, integers=False)
    given[0][0, :, :30] *= 1e-6  # some tiles are flagged
    assert 0 < flags(case, given[0], config).mean() < 1
    ref = epilogue.expected(case, parts, *given)
    slack = 0 if given[3] is None else np.abs(given[3]).reshape(-1, 1, 1)
    more = bound(case, *given[:3], case.reference(*given[:3]), config) * (1 + slack) * 4
    assert_close(run(plan, *given), ref, epilogue.allowed(case, *given, ref, "") + more, plan)


def test_a_residual_may_be_the_result_s_memory(device):
    case, config = PLAIN, Fft()
    problem = replace(case.problem(algorithm="fft"), has_residual=True)
    x, w, b = case.normals("float32")
    x[0, 0, :30] = 0
    residual = np.random.default_rng(1).standard_normal(problem.result_shape).astype("f")
    plan = Plan(problem, device, config=config)
    expected = run(plan, x, w, b, residual=residual)
    out = residual.copy()
    assert np.array_equal(plan(x, w, b, residual=out, out=out), expected) and not plan.redoes


# ---- numbers that a transform would spoil

#: What becomes of normal numbers; tiles of 64x64 of a plane of 130x150.
SPOILT = {
    "a bright pixel": lambda x: x.__setitem__((0, 0, 77, 80), 1e9),
    "a dark half": lambda x: x.__setitem__((..., slice(75)), x[..., :75] * 1e-9),
    "zeros": lambda x: x.__setitem__((..., slice(75)), 0),
    "steps": lambda x: x.__imul__((2.0 ** np.random.default_rng(5).integers(-30, 30, (130, 1))).astype("f")),
    "a wide range": lambda x: x.__imul__((2.0 ** np.random.default_rng(6).uniform(-40, 40, x.shape)).astype("f")),
    "tiny": lambda x: x.__imul__(np.float32(1e-30)),
    "huge": lambda x: x.__imul__(np.float32(1e25)),
    "images apart": lambda x: x.__imul__(np.array([1e-12, 1e12, 1], "f").reshape(3, 1, 1, 1)),
}
LARGE = fprop((3, 2, 130, 150), (2, 1, 15, 15), groups=2, padding=7)
ALONE = fprop((3, 1, 130, 150), (1, 1, 15, 15), padding=7)  # whose channels would do the same
LARGE_LINE = fprop((3, 2, 14000), (2, 1, 301), groups=2, padding=150)


#: Each kind with one tile, by turns; a bright pixel and a dark half with all.
HELD = [(kind, tile) for i, kind in enumerate(SPOILT) for j, tile in enumerate(TILES) if i < 2 or j == i % len(TILES)]


@pytest.mark.parametrize(("kind", "tile"), HELD, ids=str)
def test_the_documented_bound_is_held(device, kind, tile):
    x, w, b = ALONE.normals("float32")
    SPOILT[kind](x)
    b[:] = 0
    config = Fft(*tile)
    if kind not in ("a wide range", "images apart"):  # whose windows all have something large; which share no pair, mostly
        assert flags(ALONE, x, config).any()
    ref = ALONE.reference(x, w, b)
    assert_close(run(Plan(ALONE.problem(algorithm="fft"), device, config=config), x, w, b), ref, bound(ALONE, x, w, b, ref, config), kind)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_the_documented_bound_is_held_on_a_line(device, tile):
    x, w, b = LARGE_LINE.normals("float32")
    b[:] = 0
    x[0, 0, 3000:6000] *= 1e-8
    x[1, 1, 7000:] = 0
    config = Fft(*tile)
    found = flags(LARGE_LINE, x, config)
    assert found[0, 0].any() and found[1, 1].any() and not found[0, 1].any() and not found[1, 0].any()
    ref = LARGE_LINE.reference(x, w, b)
    assert_close(
        run(Plan(LARGE_LINE.problem(algorithm="fft"), device, config=config), x, w, b), ref, bound(LARGE_LINE, x, w, b, ref, config)
    )


def test_a_transform_alone_would_not_hold_it(device, monkeypatch):
    """The test above can fail: without the flags, what a bright pixel leaves far away is too much."""
    x, w, b = ALONE.normals("float32")
    SPOILT["a bright pixel"](x)
    b[:] = 0
    config, good = Fft(128, 128), Plan(ALONE.problem(algorithm="fft"), device, config=Fft(128, 128))
    made = fft._arguments
    monkeypatch.setattr(fft, "_arguments", lambda *all: made(*all)._replace(box_h=0))
    bad = Plan(ALONE.problem(algorithm="fft"), device, config=config)
    ref = ALONE.reference(x, w, b)
    allowed = bound(ALONE, x, w, b, ref, config)
    assert (np.abs(run(good, x, w, b) - ref) <= allowed).all() and not (np.abs(run(bad, x, w, b) - ref) <= allowed).all()


@pytest.mark.parametrize(
    ("case", "value"), [(LARGE, np.inf), (CASES[1], -np.inf), (CASES[4], np.nan), (CASES[4], np.inf), (LARGE_LINE, np.nan)], ids=str
)
def test_inf_and_nan_spoil_what_they_reach_and_nothing_else(device, case, value):
    config = Fft(64, 64)
    x, w, b = (None if a is None else a.copy() for a in normals(case))
    clean = case.reference(x, w, b)
    x[(0, 0, *(n // 2 for n in x.shape[2:]))] = value
    got, ref = run(Plan(case.problem(algorithm="fft"), device, config=config), x, w, b), case.reference(x, w, b)
    lost = ~np.isfinite(ref)
    assert lost.any() and not lost.all()
    assert np.array_equal(got[lost], ref[lost].astype("f"), equal_nan=True)
    x[~np.isfinite(x)] = 0
    assert (np.abs(got - clean)[~lost] <= bound(case, x, w, b, clean, config)[~lost]).all()


@pytest.mark.parametrize(
    ("case", "value"), [(PLAIN, np.nan), (PLAIN, 1e30), *((CASES[1], value) for value in (np.inf, np.nan, 1e30, 1e-30))], ids=str
)
def test_a_filter_that_does_not_fit_spoils_no_other(device, case, value):
    x, w, b = (None if a is None else a.copy() for a in normals(case))
    config = Fft(64, 64)
    clean = case.reference(x, w, b)
    w[1] = w[1] * value
    got, ref = run(Plan(case.problem(algorithm="fft"), device, config=config), x, w, b), case.reference(x, w, b)
    with np.errstate(invalid="ignore"):
        assert np.array_equal(got[:, 1], ref[:, 1].astype("f"), equal_nan=True) if not np.isfinite(value) else (
            np.abs(got - ref) <= case.bound(x, w, b, ref) + TINY["float32"]
        )[:, 1].all()
    others = [k for k in range(len(w)) if k != 1]
    assert_close(got[:, others], clean[:, others], case.bound(*normals(case), clean)[:, others])


def test_a_plane_of_zeros_is_zero_and_costs_nothing(device):
    x, w, b = LARGE.normals("float32")
    x[:, 1] = 0
    assert not flags(LARGE, x, Fft(128, 128)).any()
    got = run(Plan(LARGE.problem(algorithm="fft"), device, config=Fft(128, 128)), x, w, b)
    assert (got[:, 1] == b[1]).all()


BY_SUM, ZERO = 1, 2  # fft.cuh
#: What becomes of images: how many results are sums at most, and whether windows are all zeros.
DARK = {
    "half zeros": (lambda x: x.__setitem__((..., slice(x.shape[-1] // 2)), 0), 0.1, True),
    "other half zeros": (lambda x: x.__setitem__((..., slice(x.shape[-2] // 2, None), slice(None)), 0), 0.1, True),
    "one pixel": (lambda x: x.__imul__(np.arange(x[0, 0].size).reshape(x.shape[2:]) == 70 * x.shape[-1] + 80 if x.ndim == 4 else np.arange(x.shape[-1]) == 9999), 0.1, True),
    "a dark stripe": (lambda x: x.__setitem__((..., slice(60, 62)), 0), 0, False),
    "a wide stripe": (lambda x: x.__setitem__((..., slice(60, 110)), 0), 0.15, True),
    "zeros and Inf": (lambda x: (x.__setitem__((..., slice(x.shape[-1] // 2)), 0), x.__setitem__((0, 0, *(5 for _ in x.shape[2:])), np.inf)), 0.12, True),
}  # fmt: skip
WIDE = fprop((1, 2, 130, 300), (2, 1, 15, 15), groups=2, padding=7)


#: Planes with a tile by turns; a line has half of them.
DARKENED = [
    *((WIDE, ((64, 64), (128, 128))[i % 2], kind) for i, kind in enumerate(DARK)), (WIDE, (128, 128), "half zeros"),
    *((LARGE_LINE, (64, 128), kind) for kind in ("half zeros", "one pixel", "zeros and Inf")),
]  # fmt: skip


@pytest.mark.parametrize(("case", "tile", "kind"), DARKENED, ids=str)
def test_zeros_cost_few_sums_and_give_exact_zeros(device, case, tile, kind):
    spoil, most_sums, has_zeros = DARK[kind]
    x, w, b = case.normals("float32")
    spoil(x)
    if device == "opencl":  # where buffers are the host's
        assert share(case, x, Fft(*tile), BY_SUM) <= most_sums
        assert share(case, x, Fft(*tile), ZERO) > 0 or not has_zeros  # transforms give those of pairs of nothing but zeros
    got, ref = run(Plan(case.problem(algorithm="fft"), device, config=Fft(*tile)), x, w, b), case.reference(x, w, b)
    empty = (case.reference((x != 0).astype("f"), np.ones_like(w), np.zeros_like(b)) == 0) & np.isfinite(ref)
    parts = fft._Tiles.of(case.problem(algorithm="fft"), Fft(*tile)).part
    deep = empty.copy()  # the windows around it are empty too, so that parts are
    for axis, size in zip(range(2, x.ndim), parts[-case.ndim :], strict=True):
        for by in range(-2 * size, 2 * size + 1):
            deep &= np.roll(empty, by, axis)
    assert deep.any() or not has_zeros
    assert np.array_equal(got[deep], np.broadcast_to(b.reshape(-1, *(1,) * case.ndim), got.shape)[deep])
    lost = ~np.isfinite(ref)
    assert np.array_equal(got[lost], ref[lost].astype("f"), equal_nan=True)
    x[~np.isfinite(x)] = 0
    ref[lost] = got[lost] = 0
    assert_close(got, ref, bound(case, x, w, b, ref, Fft(*tile)), kind)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_zeros_times_a_filter_s_inf_are_nan(device, value):
    x, w, b = WIDE.normals("float32")
    x[..., :150] = 0
    w[1, 0, 7, 7] = value
    got = run(Plan(WIDE.problem(algorithm="fft"), device, config=Fft()), x, w, b)
    assert np.isnan(got[:, 1, :, :140]).all() and (got[:, 0, :, :130] == b[0]).all()


# ---- the filter's spectrum, kept


# ---- transforms in float64 of other arrays, which are checked


# ---- what runs, and what is chosen


def test_refusals():
    assert "shared memory" in engines.refusal(PLAIN.problem("float64", algorithm="fft"), Fft(128, 128), H200)
    gradient = ConvProblem.gradient("weight", 2, (1, 1, 90, 90), (1, 1, 15, 15), (1, 1, 76, 76))
    assert "layouts" in engines.refusal(gradient, Fft(), H200)
    with pytest.raises(ValueError, match="shared memory"):  # of a smaller GPU
        engines.schedule(PLAIN.problem(algorithm="fft"), Fft(128, 128), Target("sm_86"))
    assert Fft(128, 128) not in fft.configs(PLAIN.problem(algorithm="fft"), Target("sm_86"))
    assert Fft(64, 128) in fft.configs(PLAIN.problem(algorithm="fft"), Target("sm_70"))
    for arch in ("sm_61", "sm_75"):  # 48 and 64 KiB
        with pytest.raises(ValueError, match="shared memory"):
            engines.schedule(PLAIN.problem(algorithm="fft"), Fft(64, 128), Target(arch))
        assert Fft(64, 128) not in fft.configs(PLAIN.problem(algorithm="fft"), Target(arch))


LAYERS = [((8, 64, 256, 256), 31, 64), ((1, 1, 4096, 4096), 31, 1), ((8, 16, 256, 256), 31, 1), ((2, 3, 1080, 1920), 63, 3)]


@pytest.mark.parametrize(("x", "taps", "groups"), LAYERS)
@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_the_planner_takes_it_for_large_filters_if_it_is_asked_for(x, taps, groups, direction):
    make = ConvProblem.forward if direction == "fprop" else ConvProblem.transposed
    problem = make(2, x, (x[1], x[1] // groups, taps, taps), padding=taps // 2, groups=groups, algorithm="fft")
    assert isinstance(engines.choose(problem, H200), (Fft, BlockFft))
    assert not isinstance(engines.choose(problem, get_device("opencl")), (Fft, BlockFft))
    assert sum(isinstance(config, Fft) for config in engines.candidates(problem, H200)) > 1
    assert not any(isinstance(config, Fft) for config in engines.candidates(replace(problem, algorithm="direct"), H200))
    default = replace(problem, algorithm=None)  # in float64, whose tiles are smaller
    assert Fft(128, 128) not in engines.candidates(default, H200)
    assert not any(isinstance(config, Fft) for config in engines.candidates(replace(default, dtype="float64"), H200))


def test_parts_of_a_tile_lie_in_every_window():
    """Whatever pixel a window begins at, so many whole parts follow."""
    for tile in TILES:
        for size in range(7, 65):
            problem = ConvProblem.forward(2, (1, 1, 200, 200), (1, 1, size, size))
            if engines.refusal(problem, Fft(*tile), H200) is None:
                tiles = fft._Tiles.of(problem, Fft(*tile))
                for part, box in zip(tiles.part, tiles.box, strict=True):
                    whole = [(first + size) // part - -(-first // part) for first in range(part)]
                    assert min(whole) == box >= 1
