"""Borders that engines write while they pack or load images, run by the kernels' own text on the simulated machine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import simt
from modes import program_of
from reference import DTYPES, assert_alike, reference
from test_borders import NUMPYS, padded
from test_borders import Drawn as Case

from pycuda_conv import ConvProblem, borders, engines
from pycuda_conv.engines import registry
from pycuda_conv.runtime.target import Target

pytestmark = pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
COPIES = "border_copy", "border_rows", "border_planes_copy"
NEAR = ("zeros", "replicate", "reflect", "circular", "symmetric")


class Drawn:
    """A convolution with a border that goes on no further than to the image's other end."""

    def __init__(self, seed: int, ndim: int, layout: str, dtype: str, direction: str, channels=(16, 24)) -> None:
        rng = self.rng = np.random.default_rng(seed)
        c, k = channels
        size = [int(n) for n in rng.integers(4, (40, 11, 6)[ndim - 1], ndim)]
        taps = [int(n) for n in rng.integers(2, 4, ndim)]
        self.pads = tuple((int(a), int(b)) for a, b in rng.integers(0, 4, (ndim, 2)))
        self.modes = tuple((str(a), str(b)) for a, b in rng.choice(NEAR, (ndim, 2)))
        if all(
            mode == "zeros" or not n for pair, pads in zip(self.modes, self.pads, strict=True) for mode, n in zip(pair, pads, strict=True)
        ):
            self.pads, self.modes = ((1, 2), *self.pads[1:]), (("reflect", "circular"), *self.modes[1:])
        self.options = {"stride": tuple(map(int, rng.integers(1, 3, ndim))), "dilation": tuple(map(int, rng.integers(1, 3, ndim)))}
        size = [max(n, 2 * t) for n, t in zip(size, taps, strict=True)]
        x_shape, w_shape = (2 if direction == "fprop" else 16, c, *size), (k, c, *taps)  # few images would have taps folded
        given = {"padding": self.pads, "padding_mode": self.modes, "dtype": dtype, "layout": layout, **self.options}
        forward = ConvProblem.forward(ndim, x_shape, w_shape, **given)
        self.y_shape, self.ndim = forward.result_shape, ndim
        self.problem = forward if direction == "fprop" else ConvProblem.gradient("weight", ndim, x_shape, w_shape, self.y_shape, **given)
        self.x, self.w = rng.integers(-4, 5, x_shape).astype(dtype), rng.integers(-4, 5, w_shape).astype(dtype)
        self.dy = rng.integers(-2, 3, self.y_shape).astype(dtype)

    @property
    def arrays(self):
        return self.x, self.w if self.problem.direction == "fprop" else self.dy

    def expected(self, x, w, dy):
        wide = padded(x.astype(np.float64), self.pads, self.modes)
        if self.problem.direction == "fprop":
            return reference(False, self.ndim, wide, w, **self.options)
        torch = pytest.importorskip("torch")
        name = f"conv{self.ndim}d_weight"
        return getattr(torch.nn.grad, name)(
            torch.from_numpy(wide), w.shape, torch.from_numpy(dy.astype(np.float64)), **self.options
        ).numpy()


def drawn_for(inner, seed: int, *args) -> tuple[Drawn, engines.Bordered]:
    """A problem whose border `inner` reads itself: some of wgrad's have taps folded while they are packed, and need a copy."""
    config = engines.Bordered(str(inner))
    for drawn in (Drawn(seed + 1000 * again, *args) for again in range(10)):
        assert registry.refusal(drawn.problem, config, Target("sm_90a")) is None
        if not set(COPIES) & {step.kernel for stage in program_of(drawn.problem, config, 3).whole for step in stage}:
            return drawn, config
        assert drawn.problem.direction == "wgrad"
    raise AssertionError("each was copied")


PACKED = [
    (1, "NCHW", "float16", "fprop", engines.ImplicitGemm(64, 64, 3)), (2, "NCHW", "float16", "fprop", engines.ImplicitGemm(128, 64, 3)),
    (2, "NCHW", "float32", "fprop", engines.ImplicitGemm(64, 64, 2)), (2, "NHWC", "float32", "fprop", engines.ImplicitGemm(64, 64, 2)),
    (2, "NCHW", "float32", "fprop", engines.ImplicitGemm(64, 64, 2, 3)), (3, "NCHW", "float32", "fprop", engines.ImplicitGemm(64, 64, 2)),
    (2, "NCHW", "float32", "wgrad", engines.ImplicitGemm(64, 64, 2)), (2, "NCHW", "float32", "wgrad", engines.ImplicitGemm(64, 64, 2, 2)),
    (2, "NCHW", "float32", "wgrad", engines.Wgrad(128, 9, 2)), (3, "NCHW", "float16", "wgrad", engines.Wgrad(128, 16, 3)),
    (2, "NCHW", "bfloat16", "fprop", engines.ImplicitGemm80(64, 128, 4)), (2, "NHWC", "float32", "fprop", engines.ImplicitGemm80(128, 64, 3)),
]  # fmt: skip


@pytest.mark.parametrize(("number", "seed"), [(number, number % 3) for number in range(len(PACKED))])
def test_packing_writes_the_border(number, seed):
    ndim, layout, dtype, direction, config = PACKED[number]
    drawn, bordered = drawn_for(config, 100 * number + seed, ndim, layout, dtype, direction, (16, 24) if seed else (20, 21))
    got = simt.computed(drawn.problem, bordered, *drawn.arrays, seeds=(seed,))
    np.testing.assert_array_equal(got.astype(np.float64), drawn.expected(drawn.x, drawn.w, drawn.dy))


#: Numbers that limbs do not hold: what depends on them is computed again, from the image with its border.
STRANGE = {
    "2^-40 to 2^40": lambda x, rng: x.__imul__(np.float32(2) ** rng.integers(-40, 40, x.shape)),
    "Inf at the edge": lambda x, rng: x.__setitem__((0, 0, 0, 1), np.inf),
    "NaN behind": lambda x, rng: x.__setitem__((-1,) * x.ndim, np.nan),
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize(("layout", "direction", "config"), [
    ("NCHW", "fprop", engines.ImplicitGemm(64, 64, 2)), ("NHWC", "fprop", engines.ImplicitGemm(64, 64, 2)), ("NCHW", "wgrad", engines.ImplicitGemm(64, 64, 2)),
    ("NCHW", "fprop", engines.ImplicitGemm80(64, 128, 4)),
])  # fmt: skip
def test_what_is_computed_again_reads_the_border(layout, direction, config, kind):
    drawn, bordered = drawn_for(config, 7, 2, layout, "float32", direction)
    x, w, dy = (drawn.rng.standard_normal(one.shape).astype("float32") for one in (drawn.x, drawn.w, drawn.dy))
    STRANGE[kind](x, drawn.rng)
    with np.errstate(all="ignore"):
        want, size = drawn.expected(x, w, dy), drawn.expected(abs(x), abs(w), abs(dy))
    got = simt.computed(drawn.problem, bordered, x, w if direction == "fprop" else dy)
    assert_alike(got, want, 3e-6 * size + 1e-44)
    assert np.isnan(want).any() or np.isinf(want).any() or kind.startswith("2^")


def test_borders_that_packing_leaves_to_a_copy():
    """Numbers that fill, and what goes on beyond the image's other end."""
    for mode, pad in (("constant", 1), ("circular", 9), ("reflect", 8)):
        problem = ConvProblem.forward(
            2, (2, 16, 8, 8), (24, 16, 3, 3), padding=pad, padding_mode=mode, padding_value=float(mode == "constant")
        )
        kernels = [
            step.kernel for stage in program_of(problem, engines.Bordered(str(engines.ImplicitGemm(64, 64, 2))), 3).whole for step in stage
        ]
        assert kernels[0] in COPIES
    assert set(NUMPYS) == set(borders.MODES)


@pytest.mark.parametrize("seed", range(10))
def test_depthwise_rings_copy_the_border(seed):
    """Channels last; sizes that leave units and columns over; numbers that are not finite are summed once more."""
    rng = np.random.default_rng(seed)
    taps, stride, k = int(rng.choice([3, 5, 7])), int(rng.integers(1, 3)), 16
    dtype = ("float16", "bfloat16", "float32")[seed % 3]
    size, pads = rng.integers(taps + 1, 20, 2), rng.integers(0, taps, (2, 2))
    pads[0, 0] += 1
    modes = tuple((str(a), str(b)) for a, b in rng.choice(NEAR[1:], (2, 2)))
    x_shape, w_shape = (3, k, *map(int, size)), (k, 1, taps, taps)
    options = {"stride": stride, "groups": k}
    given = {**options, "padding": tuple(map(tuple, pads.tolist())), "padding_mode": modes, "dtype": dtype, "layout": "NHWC"}
    y_shape = ConvProblem.forward(2, x_shape, w_shape, **given).result_shape
    problem = ConvProblem.gradient("weight", 2, x_shape, w_shape, y_shape, **given)
    x, dy = rng.integers(-3, 4, x_shape).astype(dtype), rng.integers(-1, 2, y_shape).astype(dtype)
    x[0, 0, 0, 0] = np.nan if seed % 2 else 1
    torch = pytest.importorskip("torch")
    wide = torch.from_numpy(padded(x.astype(np.float64), pads.tolist(), modes))
    want = torch.nn.grad.conv2d_weight(wide, w_shape, torch.from_numpy(dy.astype(np.float64)), **options).numpy()
    config = engines.Bordered(str(engines.DepthwiseRing(int(rng.integers(2, 6)), int(rng.integers(1, 3)))))
    assert program_of(problem, config, 3).whole[0][0].kernel == "depthwise_nhwc_wgrad_ring"
    np.testing.assert_array_equal(simt.computed(problem, config, x, dy, seeds=(seed,)).astype(np.float64), want)


@pytest.mark.parametrize("groups", [1, 8])
def test_copies_for_gradients_of_filters_of_channels_last(groups):
    """A number that fills is copied, in groups too."""
    rng = np.random.default_rng(groups)
    x_shape, w_shape, y_shape = (3, 16, 7, 6), (16, 16 // groups, 3, 3), (3, 16, 7, 6)
    given = {"padding": 1, "padding_mode": "constant", "padding_value": 2.0, "groups": groups, "layout": "NHWC"}
    problem = ConvProblem.gradient("weight", 2, x_shape, w_shape, y_shape, **given)
    x, dy = rng.integers(-3, 4, x_shape).astype("f"), rng.integers(-1, 2, y_shape).astype("f")
    torch = pytest.importorskip("torch")
    wide = torch.from_numpy(np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=2))
    want = torch.nn.grad.conv2d_weight(wide, w_shape, torch.from_numpy(dy.astype(np.float64)), groups=groups).numpy()
    config = engines.Bordered(str(engines.choose(problem.padded, Target("sm_90a"))))
    assert program_of(problem, config, 3).whole[0][0].kernel in COPIES
    np.testing.assert_array_equal(simt.computed(problem, config, x, dy).astype(np.float64), want)


@pytest.mark.parametrize("seed", range(14))
def test_dense_tiles_take_other_pixels_at_the_sides(seed):
    """Rows, columns and corners by taps of their own offsets: paddings, strides, dilations, sides of zeros, no interior, large images' ends."""
    rng = np.random.default_rng(1000 + seed)
    ndim, dtype = (2, 2, 1, 2, 3, 2, 2)[seed % 7], ("float16", "bfloat16", "float16")[seed % 3]
    taps = [int(n) for n in rng.integers(1, 4, ndim)]
    dilation, stride = (int(rng.integers(1, 3)) for _ in range(2))
    size = [int(n) for n in rng.integers(5, (300, 12, 6)[ndim - 1], ndim)]
    if seed == 3:
        size[0] = 270  # the last rows lie further than a corner of tensor loads can
    most = 3 if ndim < 3 else 2
    pads = tuple((int(a), int(b)) for a, b in rng.integers(0, most, (ndim, 2)))
    modes = tuple((str(a), str(b)) for a, b in rng.choice(NEAR, (ndim, 2)))
    pads, modes = ((1, pads[0][1]), *pads[1:]), ((str(rng.choice(NEAR[1:])), modes[0][1]), *modes[1:])
    c, k = (24, 40) if seed % 2 else (64, 64 if seed % 4 else 72)
    size = [max(n, dilation * (t - 1) + 1) for n, t in zip(size, taps, strict=True)]
    x_shape, w_shape = (2, c, *size), (k, c, *taps)
    options = {"stride": stride, "dilation": dilation}
    problem = ConvProblem.forward(ndim, x_shape, w_shape, (k,), padding=pads, padding_mode=modes, dtype=dtype, layout="NHWC", **options)
    x, w, b = (rng.integers(-2, 3, shape).astype(dtype) for shape in (x_shape, w_shape, (k,)))
    want = reference(False, ndim, padded(x.astype(np.float64), pads, modes), w, b, **options)
    config = engines.Bordered(str(engines.DenseNhwc(128, 64, 4)))
    kernels = [step.kernel for stage in program_of(problem, config, 3).whole for step in stage]
    if problem.border is None:
        return
    assert ndim == 3 or set(kernels) <= {"hopper_dense", "transpose_filter"}, kernels  # a volume has many sides
    got = simt.computed(problem, config, x, w, b, seeds=(seed,))
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(dtype).astype(np.float64))


@pytest.mark.parametrize("seed", range(12))
def test_dense_tiles_take_more_taps_where_a_gradient_s_border_shows_a_pixel(seed):
    """dx of channels last, by regions: sides that differ and sides of zeros, places shown twice, a residual; else by a fold."""
    rng = np.random.default_rng(2000 + seed)
    ndim, dtype = (2, 1, 2, 2)[seed % 4], ("float16", "bfloat16")[seed % 2]
    taps = [int(n) for n in rng.integers(1, 4, ndim)]
    dilation = int(rng.integers(1, 3))
    size = [int(n) for n in rng.integers(5, (300, 12)[ndim - 1], ndim)]
    pads = tuple((int(a), int(b)) for a, b in rng.integers(0, 2 if ndim > 1 else 4, (ndim, 2)))
    modes = tuple((str(a), str(b)) for a, b in rng.choice(NEAR, (ndim, 2)))
    pads, modes = ((1, pads[0][1]), *pads[1:]), ((str(rng.choice(NEAR[1:])), modes[0][1]), *modes[1:])
    c, k = (40, 24) if seed % 2 else (64, 64)
    size = [max(n, dilation * (t - 1) + 1) for n, t in zip(size, taps, strict=True)]
    x_shape, w_shape = (2, c, *size), (k, c, *taps)
    given = {"padding": pads, "padding_mode": modes, "dilation": dilation, "dtype": dtype, "layout": "NHWC"}
    y_shape = ConvProblem.forward(ndim, x_shape, w_shape, **given).result_shape
    residual = rng.integers(-2, 3, x_shape).astype(dtype) if seed % 3 == 0 else None
    problem = ConvProblem.gradient("input", ndim, x_shape, w_shape, y_shape, residual_shape=None if residual is None else x_shape, **given)
    w, dy = rng.integers(-1, 2, w_shape).astype(dtype), rng.integers(-1, 2, y_shape).astype(dtype)
    drawn = Case(0)
    drawn.ndim, drawn.pads, drawn.modes, drawn.value, drawn.options = ndim, pads, modes, 0.0, {"dilation": dilation}
    want, _ = drawn.by_torch(np.zeros(x_shape), w.astype(np.float64), dy.astype(np.float64))
    want = want if residual is None else want + residual
    config = engines.Bordered(str(engines.DenseNhwc(128, 64, 4)))
    for last in (False, True):
        program = program_of(problem, config, 3)
        kernels = [step.kernel for stage in (program.filter_last if last else program.whole) for step in stage]
        assert set(kernels) <= {"hopper_dense", "transpose_filter"}, kernels
        got = simt.computed(problem, config, dy, w, None, None, residual, seeds=(seed,), filter_last=last)
        np.testing.assert_array_equal(got.astype(np.float64), want.astype(dtype).astype(np.float64))


@pytest.mark.parametrize("seed", range(12))
def test_toeplitz_tiles_fill_the_columns_beside_their_rows(seed):
    """Planes of even and odd widths, several in a block, strides, dilations, several filters a channel; sums that are no numbers."""
    rng = np.random.default_rng(3000 + seed)
    dtype, stride = ("float16", "bfloat16")[seed % 2], int(rng.integers(1, 3))
    taps, dilation = rng.integers(1, 6, 2), int(rng.integers(1, 3))
    c, multiplier = int(rng.integers(2, 6)), int(rng.integers(1, 3))
    size = [int(n) for n in rng.integers(10, 30, 2)]
    size[1] = size[1] // 8 * 8 if seed % 3 == 0 else size[1]
    pads = tuple((int(a), int(b)) for a, b in rng.integers(0, 5, (2, 2)))
    modes = tuple((str(a), str(b)) for a, b in rng.choice(NEAR, (2, 2)))
    pads, modes = ((1, pads[0][1]), *pads[1:]), ((str(rng.choice(NEAR[1:])), modes[0][1]), *modes[1:])
    x_shape, w_shape = (2, c, *size), (c * multiplier, 1, *map(int, taps))
    options = {"stride": stride, "dilation": dilation, "groups": c}
    problem = ConvProblem.forward(2, x_shape, w_shape, (w_shape[0],), padding=pads, padding_mode=modes, dtype=dtype, **options)
    x, w, b = (rng.integers(-2, 3, shape).astype(dtype) for shape in (x_shape, w_shape, (w_shape[0],)))
    if seed % 4 == 1:
        x[0, 0, 0, 1] = np.inf
    with np.errstate(invalid="ignore"):
        want = reference(False, 2, padded(x.astype(np.float64), pads, modes), w, b, **options)
    config = engines.Bordered(str(engines.DepthwiseToeplitz(24)))
    assert [step.kernel for stage in program_of(problem, config, 3).whole for step in stage] == ["depthwise_toeplitz"]
    np.testing.assert_array_equal(simt.computed(problem, config, x, w, b, seeds=(seed,)).astype(np.float64), want)


@pytest.mark.parametrize("seed", range(12))
def test_small_planes_get_their_border_and_give_it_back(seed):
    """All modes on each side, also wider than the image; rows of any length, more planes than a block has, residuals."""
    rng = np.random.default_rng(seed)
    dtype, direction = ("float32", "float16", "float64")[seed % 3], ("fprop", "dgrad")[seed // 3 % 2]
    c, size, taps = int(rng.integers(1, 20)), tuple(int(n) for n in rng.integers(2, 20, 2)), tuple(int(n) for n in rng.integers(1, 4, 2))
    pads = tuple((int(a) + 2, int(b) + 1) for a, b in rng.integers(0, 4 if seed % 5 else 12, (2, 2)))
    modes = tuple((str(a), str(b)) for a, b in rng.choice(borders.MODES, (2, 2)))
    modes = (("reflect" if direction == "dgrad" else "constant", modes[0][1]), modes[1])
    given = {"padding": pads, "padding_mode": modes, "padding_value": 2.0 if "constant" in str(modes) else 0.0, "dtype": dtype, "groups": c}
    x_shape, w_shape = (37, c, *size), (c, 1, *taps)
    problem = ConvProblem.forward(2, x_shape, w_shape, **given)
    x, w, dy = (rng.integers(-4, 5, shape).astype("float32") for shape in (x_shape, w_shape, problem.result_shape))
    drawn = Case(0)
    drawn.ndim, drawn.pads, drawn.modes, drawn.value, drawn.options = 2, pads, modes, given["padding_value"], {"groups": c}
    if direction == "fprop":
        wide = padded(x, pads, modes, given["padding_value"]).astype(np.float64)
        want, operands, kernel = reference(False, 2, wide, w, groups=c), (x, w), "border_planes_copy"
    else:
        problem = ConvProblem.gradient("input", 2, x_shape, w_shape, problem.result_shape, **given)
        want, operands, kernel = drawn.by_torch(
            np.zeros(x_shape), w.astype(np.float64), dy.astype(np.float64)
        )[0], (dy, w), "border_planes_fold"
    inner = engines.Batched() if direction == "fprop" else engines.Dgrad()
    config = engines.Bordered(str(inner))
    assert registry.refusal(problem, config, Target("sm_90a")) is None
    assert kernel in {step.kernel for stage in program_of(problem, config, 3).whole for step in stage}
    got = simt.computed(problem, config, *(one.astype(dtype) for one in operands), seeds=(seed,))
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(dtype).astype(np.float64))


@pytest.mark.parametrize(("dtype", "layout", "config"), [
    ("uint8", "NCHW", engines.ImplicitGemm(64, 64, 2)), ("int8", "NHWC", engines.ImplicitGemm(64, 64, 2)), ("int8", "NCHW", engines.ImplicitGemm(128, 64, 3)), ("uint8", "NCHW", engines.ImplicitGemm(64, 64, 2, 2)),
])  # fmt: skip
def test_an_image_of_bytes_takes_two_products(dtype, layout, config):
    """Its second limb is 0. Whole numbers are exact, others as near as with three products."""
    rng = np.random.default_rng(len(dtype) + len(layout))
    x_shape, w_shape = (2, 40, 9, 11), (70, 40, 3, 3)
    problem = ConvProblem.forward(2, x_shape, w_shape, padding=1, padding_mode="reflect", layout=layout, input_dtype=dtype)
    bordered = engines.Bordered(str(config))
    made = [step for stage in program_of(problem, bordered, 3).whole for step in stage]
    assert [step.defines["PRODUCTS"] for step in made if step.kernel == "hopper_gemm"] == [2]
    limits = np.iinfo(dtype)
    x = rng.integers(limits.min, limits.max, x_shape, dtype, endpoint=True)
    wide = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)), "reflect")
    for w in (rng.integers(-9, 10, w_shape).astype(np.float32), rng.standard_normal(w_shape).astype(np.float32)):
        got, want = simt.computed(problem, bordered, x, w), reference(False, 2, wide, w)
        whole = (w == np.rint(w)).all()
        np.testing.assert_allclose(got, want, rtol=0, atol=0 if whole else 4e-7 * reference(False, 2, abs(wide), abs(w)).max())


@pytest.mark.parametrize("seed", range(16))
def test_patches_of_few_inputs_show_their_columns(seed):
    """Rows and slices come from where they stand, columns from the patch: both layouts, one and three products, strides, dilations, several tiles across."""
    rng = np.random.default_rng(2000 + seed)
    ndim, layout = (2, 2, 1, 3)[seed % 4], ("NHWC", "NCHW")[seed // 4 % 2]
    dtype, precision = (("float16", "fp32"), ("float32", "fp32"), ("bfloat16", "fp32"), ("float32", "tf32"))[seed // 2 % 4]
    taps = [int(n) for n in rng.integers(3, (8, 6, 4)[ndim - 1], ndim)]
    pads = tuple((int(rng.integers(0, (t - 1) // 2 + 1)), int(rng.integers(0, (t - 1) // 2 + 1))) for t in taps)
    pads = (*pads[:-1], (1, pads[-1][1]))
    modes = [tuple(map(str, rng.choice(NEAR, 2))) for _ in range(ndim)]
    modes[-1] = ("reflect", str(rng.choice(("zeros", "replicate", "reflect", "symmetric"))))
    size = [int(n) for n in rng.integers(9, (200, 40, 12)[ndim - 1], ndim)]
    stride, dilation = int(rng.integers(1, 3)), 1 + int(seed % 5 == 4 and dtype == "float32")
    size = [max(n, 2 * dilation * t) for n, t in zip(size, taps, strict=True)]
    c, k = (3, 1, 4, 2)[seed % 4], (24, 16, 40)[seed % 3]
    x_shape, w_shape = (2, c, *size), (k, c, *taps)
    options = {"stride": stride, "dilation": dilation}
    given = {"padding": pads, "padding_mode": tuple(modes), "dtype": dtype, "layout": layout, "precision": precision, **options}
    problem = ConvProblem.forward(ndim, x_shape, w_shape, (k,), **given)
    config = engines.Bordered(str(engines.FewInputs(16, 16)))
    assert {step.kernel for stage in program_of(problem, config, 3).whole for step in stage} == {"few_inputs"}
    x, w, b = (rng.integers(-2, 3, shape).astype(dtype) for shape in (x_shape, w_shape, (k,)))
    if seed % 3 == 0 and precision == "fp32":
        x[(0,) * x.ndim] = np.nan
    with np.errstate(all="ignore"):
        want = reference(False, ndim, padded(x.astype(np.float64), pads, tuple(modes)), w, b, **options)
        got = simt.computed(problem, config, x, w, b, seeds=(seed,))
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(dtype).astype(np.float64))


@pytest.mark.turns
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("gradient", [False, True])
def test_rims_on_tensor_cores(seed, gradient):
    """Channels that leave some of a tile and of a step over, groups, and several images whose rims share a block."""
    rng = np.random.default_rng(2000 + seed)
    if seed % 3 == 2 and "bfloat16" not in DTYPES:
        pytest.skip("numpy has no bfloat16 here")
    dtype, layout, groups = ("float16", "float32", "bfloat16")[seed % 3], ("NCHW", "NHWC")[seed // 3 % 2], 1 + seed % 2
    c, k = (16 + 8 * int(rng.integers(0, 3)) for _ in range(2))
    if seed > 8:
        c, k = c + 65, k + 3
    taps, size, pads = rng.integers(2, 4, 2), rng.integers(5, 9, 2), rng.integers(0, 3, (2, 2))
    pads[0, 0] += 1
    modes, pads = tuple((str(a), str(b)) for a, b in rng.choice(NEAR[1:], (2, 2))), tuple((int(a), int(b)) for a, b in pads)
    x_shape, w_shape = (3, groups * c, *map(int, size)), (groups * k, c, *map(int, taps))
    options = {"stride": 1 + seed // 6 % 2, "dilation": tuple(map(int, rng.integers(1, 3, 2))), "groups": groups}
    given = {"padding": pads, "padding_mode": modes, "dtype": dtype, "layout": layout, **options}
    problem = ConvProblem.forward(2, x_shape, w_shape, w_shape[:1], activation="relu", **given)
    y_shape = problem.result_shape
    if gradient:
        problem = ConvProblem.gradient("input", 2, x_shape, w_shape, y_shape, **given)
    inner = engines.ImplicitGemm80(64, 128, 4) if seed % 4 else engines.choose(replace(problem, border=None), Target("sm_90a"))
    config = engines.Rims(str(inner))
    x, w, dy = (rng.integers(-1, 2, shape).astype("float32") for shape in (x_shape, w_shape, y_shape))
    b, drawn = rng.integers(-3, 4, w_shape[0]).astype("float32"), Case(0)
    drawn.ndim, drawn.pads, drawn.modes, drawn.value, drawn.options = 2, pads, modes, 0.0, options
    got = simt.computed(problem, config, *(one.astype(dtype) for one in ((dy, w) if gradient else (x, w, b))), seeds=(seed,))
    x, w, dy = (one.astype(np.float64) for one in (x, w, dy))
    want = drawn.by_torch(x, w, dy)[0] if gradient else np.maximum(drawn.by_torch(x, w) + b.reshape(-1, 1, 1), 0)
    np.testing.assert_array_equal(got.astype(np.float64), want)


def test_rims_that_are_not_finite_are_summed_again():
    for gradient in (False, True):
        given = {"padding": 1, "padding_mode": "reflect"}
        problem = ConvProblem.forward(2, (2, 16, 6, 7), (16, 16, 3, 3), **given)
        problem = ConvProblem.gradient("input", 2, (2, 16, 6, 7), (16, 16, 3, 3), problem.result_shape, **given) if gradient else problem
        rng, drawn = np.random.default_rng(5), Case(0)
        x, w = (rng.standard_normal(shape).astype("float32") for shape in ((2, 16, 6, 7), (16, 16, 3, 3)))
        x[0, 3, 0, 2], x[1, 5, 3, 0], x[1, :, 5], w[2] = np.inf, np.nan, 1e36, w[2] * 1e-20
        drawn.ndim, drawn.pads, drawn.modes, drawn.value, drawn.options = 2, ((1, 1),) * 2, (("reflect",) * 2,) * 2, 0.0, {}
        with np.errstate(all="ignore"):
            want, size = (drawn.by_torch(
                one(x).astype(float), one(w).astype(float), one(x).astype(float) if gradient else None
            ) for one in (np.asarray, abs))
            want, size = (want[0], size[0]) if gradient else (want, size)
            got = simt.computed(problem, engines.Rims(str(engines.ImplicitGemm80(64, 128, 4))), x, w)
        assert_alike(got, want, 1e-6 * size)
        assert np.isinf(want).any() and np.isnan(want).any()
