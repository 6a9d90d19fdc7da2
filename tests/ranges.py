"""Numbers of every range, and such as are not finite: the data of a case, and what is asked of a result of them."""

from __future__ import annotations

import numpy as np
from filters import Filter
from modes import bound, dtype_of
from reference import TINY, Case, assert_close


def even(shape, exponent: int, rng) -> np.ndarray:
    """Numbers of magnitude 2^exponent to 2^(exponent + 1)."""
    return (rng.choice([-1.0, 1.0], shape) * rng.uniform(1, 2, shape) * 2.0**exponent).astype("f")


def halves(x: np.ndarray, exponent: int, rng) -> np.ndarray:
    """`x` with far smaller numbers in its right half: results far enough right depend on those alone."""
    x = x.copy()
    right = x[..., x.shape[-1] // 2 :]
    right[:] = even(right.shape, exponent, rng)
    return x


def spread(shape, low: float, high: float, rng) -> np.ndarray:
    return (rng.choice([-1.0, 1.0], shape) * 10.0 ** rng.uniform(low, high, shape)).astype("f")


def scaled(a: np.ndarray, axis: int, exponents) -> np.ndarray:
    shape = [1] * a.ndim
    shape[axis] = -1
    return (a.astype(float) * np.resize(np.asarray(exponents, float), a.shape[axis]).reshape(shape)).astype("f")


def with_value(a: np.ndarray, at, value) -> np.ndarray:
    a = a.copy()
    a[at] = value
    return a


def few_channels(x: np.ndarray, w: np.ndarray, exponent: int, axis: int, rng) -> tuple:
    """Half of the channels carry small weights, the other half weights of 1 that meet zeros: sums of small products alone."""
    half = x.shape[1] // 2
    x, w, cut = x.copy(), w.copy(), [slice(None)] * w.ndim
    x[:, :half] = 0
    cut[axis] = slice(half, None)
    w[tuple(cut)] = even(w[tuple(cut)].shape, exponent, rng)
    return x, w


def data(name: str, case: Case) -> tuple:
    """Input and filter of a scenario; `case` has four images."""
    x, w, _ = case.normals("float32", seed=3)
    rng = np.random.default_rng(4)
    word, _, number = name.partition(" 2^")
    exponent = int(number or 0)
    return {
        "ordinary": lambda: (x, w),
        "1e-38 to 1e38": lambda: (spread(x.shape, -38, 38, rng), w),
        "1e-38 to 1e38 in one image": lambda: (with_value(x, 2, spread(x.shape[1:], -38, 38, rng)), w),
        "images of their own ranges": lambda: (scaled(x, 0, [1e-38, 1e-9, 1e12, 1e30]), w),
        "an outlier of 1e30": lambda: (with_value(x, (1, 0, 3, 4), 1e30), w),
        "an outlier of 3e4": lambda: (with_value(x, (1, 0, 3, 4), 3e4), w),
        "an outlier among small values": lambda: (with_value(scaled(x, 0, [1, 1e-5, 1, 1]), (1, 0, 3, 4), 1e4), w),
        "subnormals": lambda: ((rng.integers(-1000, 1001, x.shape) * 2.0**-149).astype("f"), w),
        "near the least normal": lambda: (scaled(x, 0, [2.0**-126] * 4), w),
        "zeros": lambda: (x * 0, w),
        "an image of zeros": lambda: (with_value(x, 1, 0), w),
        "a filter of zeros": lambda: (x, w * 0),
        "channels of wide range": lambda: (
            x,
            with_value(w, (slice(None), 3), spread(w[:, 3].shape, -20, 18, rng))
            if case.transposed
            else with_value(w, 3, spread(w[3].shape, -20, 18, rng)),
        ),
        "channels of their own ranges": lambda: (x, scaled(w, int(case.transposed), 10.0 ** np.linspace(-17, 17, 7))),
        "both of their own ranges": lambda: (
            scaled(x, 0, [1e-17, 1e-9, 1e12, 1e17]),
            scaled(w, int(case.transposed), 10.0 ** np.linspace(-17, 17, 7)),
        ),
        "small": lambda: (even(x.shape, exponent, rng), w),
        "small normals": lambda: (x * np.float32(2.0**exponent), w),
        "halves": lambda: (halves(x, exponent, rng), w),
        "small channels": lambda: few_channels(x, w, exponent, 1 - int(case.transposed), rng),
        "halves and small channels": lambda: few_channels(halves(x, exponent, rng), w, exponent, 1 - int(case.transposed), rng),
    }[word]()


SCENARIOS = [
    "ordinary", "1e-38 to 1e38", "1e-38 to 1e38 in one image", "images of their own ranges", "an outlier of 1e30", "an outlier of 3e4", "an outlier among small values",
    "subnormals", "near the least normal", "zeros", "an image of zeros", "a filter of zeros", "channels of wide range", "channels of their own ranges", "both of their own ranges",
    *(f"small 2^{e}" for e in (-70, -61, -60, -45, -32, -29, -28, -27, -26, -25, -24, -23, -20, -12, 4, 5, 6, 20, 45, 60, 61, 90)),
    *(f"small normals 2^{e}" for e in (-70, -60, -45, -30, -20, -10, 3, 20, 60, 90)),
    *(f"halves 2^{e}" for e in (-10, -20, -24, -26, -28, -30, -31, -32, -34, -40)), *(f"small channels 2^{e}" for e in (-20, -26, -28, -30, -32, -40)),
    *(f"halves and small channels 2^{e}" for e in (-12, -20, -24, -28, -30, -31, -32)),
]  # fmt: skip


NORMED = {name for name in SCENARIOS if name.startswith("small ") and "channels" not in name}


def check_range(case: Case, mode: str, x: np.ndarray, w: np.ndarray, got: np.ndarray, what: str) -> None:
    """Element by element within the bound wherever no order of summation overflows; not finite wherever every one does."""
    ref, magnitude = case.reference(x, w), case.reference(np.abs(x), np.abs(w))
    allowed = bound(case, mode, x, w, None, ref) + case.depth * TINY["float32"]  # products round too where they are subnormal
    safe = magnitude < 3e38
    assert safe.any()
    got = got.astype(float)
    assert_close(np.where(safe, got, 0), np.where(safe, ref, 0), np.where(safe, allowed, 0), f"{case} {mode} {what}")
    assert not np.isfinite(got[np.abs(ref) > 3.5e38]).any()


def check_norm(case: Case, mode: str, x: np.ndarray, w: np.ndarray, got: np.ndarray, what: str) -> None:
    """Where all numbers are of one size the error is that of fp32 in the mean too, whatever the size."""
    ref = case.reference(x, w)
    error = np.linalg.norm(got.astype(float) - ref) / np.linalg.norm(ref)
    assert error <= (1e-3 if "tf32" in mode else 6e-7), f"{case} {mode} {what}: relative error {error:.2g}"


def check_scenario(case: Case, mode: str, x: np.ndarray, w: np.ndarray, got: np.ndarray, scenario: str) -> None:
    """What is asked of the result of a scenario's data."""
    check_range(case, mode, x, w, got, scenario)
    if scenario in NORMED:
        check_norm(case, mode, x, w, got, scenario)


#: All bits are set: the next larger integer is a negative number.
NAN_OF_A_GPU = np.array(0x7FFFFFFF, np.uint32).view("f")[()]


def check_not_finite(case: Case | Filter, mode: str, run, each: bool = True) -> None:
    """`run` of arrays with one value that is not finite, in the input or in the filter, against IEEE's arithmetic in float64.

    `each`: each value at several places, else at one.
    """
    if isinstance(case, Filter):
        return check_met_only(case, mode, run)
    x, w, b = case.integers(dtype_of(mode), seed=5)
    w[w == 0] = 1  # a tap of 0 would make "depends on" a matter of taste
    clean = run(x, w, b)
    first = x.shape[1] - x.shape[1] // case.options.get("groups", 1)  # of the last group
    middle = tuple(n // 2 for n in w.shape[2:])
    places = (
        (0, (1, min(2, x.shape[1] - 1), 3, 2)),
        (0, (1, first, 1, 1)),
        (1, (min(2, len(w) - 1), min(1, w.shape[1] - 1), *middle)),
        (1, (0,) * w.ndim),
    )
    for value, some in ((np.nan, places[::2]), (NAN_OF_A_GPU, places[::-1]), (np.inf, places[::2][::-1]), (-np.inf, places[1::2])):
        for which, at in some if each else some[:1]:
            given = [x.copy(), w.copy()]
            given[which][at] = value
            with np.errstate(invalid="ignore"):
                got, ref = run(*given, b), case.reference(*given, b)
            what = f"{case} {mode}: {value} at {at} of the {('input', 'filter')[which]}"
            if case.transposed and which == 1:  # a phase's taps meet zeros beyond the operand's edges, as those of a forward convolution do
                ref = np.where(np.isnan(got) & ~np.isfinite(ref).all(axis=tuple(range(2, ref.ndim)), keepdims=True), np.nan, ref)
            assert np.array_equal(np.isnan(got), np.isnan(ref)), f"{what}: {np.isnan(got).sum()} NaNs, expected {np.isnan(ref).sum()}"
            assert np.array_equal(got[np.isinf(ref)], ref[np.isinf(ref)].astype(got.dtype)), what
            assert not np.isinf(got[np.isfinite(ref)]).any(), what
            same = np.isfinite(ref)  # integers: whichever kernel computed them
            assert np.array_equal(got[same], clean[same]), what


def check_met_only(case: Filter, mode: str, run) -> None:
    """Numbers of either array that are not finite reach the results of a gradient by the filter that they are part of, and no others."""
    dtype = dtype_of(mode)
    x, dy = case.arrays(dtype, np.ones)
    ones = case.reference(x, dy)
    for value in (np.inf, -np.inf, np.nan):
        for of_x in (True, False):
            bad, marked = (x.copy(), dy.copy()), (x.copy(), dy.copy())
            marked[not of_x][:] = 0
            at = (
                1,
                min(2, marked[not of_x].shape[1] - 1),
                0,
                marked[not of_x].shape[3] - 1,
            )  # in the last column of the first row: some taps never meet it
            bad[not of_x][at], marked[not of_x][at] = value, 1
            got, met = run(*bad), case.reference(*marked) != 0
            lost, taps = ~np.isfinite(got), tuple(range(2, met.ndim))
            every = met if of_x else np.broadcast_to(met.any(taps, keepdims=True), met.shape)  # of dy they meet the zeros around x, too
            assert (np.array_equal(lost, met) or np.array_equal(lost, every)) and met.any() and not every.all(), f"{case} {mode}: {value}"
            assert np.array_equal(got[~lost], ones[~lost].astype(dtype)), f"{case} {mode}: beside {value}"
