"""Borders that engines write while they pack or load images, run by the kernels' own text on the simulated machine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import simt
from modes import program_of
from reference import DTYPES, assert_alike, reference
from test_borders import NUMPYS, Border

from pycuda_conv import ConvProblem, borders, engines
from pycuda_conv.engines import registry
from pycuda_conv.runtime.target import Target

pytestmark = pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
COPIES = "border_copy", "border_rows", "border_planes_copy"
NEAR = ("zeros", "replicate", "reflect", "circular", "symmetric")


class Given:
    """A convolution with a border, or a gradient of one, and arrays of whole numbers: sums are exact in every type."""

    def __init__(
        self, rng, direction: str, x_shape, w_shape, pads, modes, *, bias=False, residual=False, most=2, value=0.0, **options
    ) -> None:
        self.direction, ndim, border = direction, len(x_shape) - 2, {"padding": pads, "padding_mode": modes, "padding_value": value}
        self.case = Border(pads, modes, value, **{name: options[name] for name in ("stride", "dilation", "groups") if name in options})
        activation = {"activation": options.pop("activation")} if "activation" in options else {}
        forward = ConvProblem.forward(ndim, x_shape, w_shape, w_shape[:1] if bias else None, **border, **options, **activation)
        more = {"residual_shape": x_shape} if residual else {}
        self.problem = forward if direction == "fprop" else ConvProblem.gradient(
            {"dgrad": "input", "wgrad": "weight"}[direction], ndim, x_shape, w_shape, forward.result_shape, **border, **options, **more
        )
        shapes = x_shape, w_shape, forward.result_shape, w_shape[:1] if bias else None, x_shape if residual else None
        self.x, self.w, self.dy, self.b, self.r = (
            None if one is None else rng.integers(-most, most + 1, one).astype("float32") for one in shapes
        )

    @property
    def operands(self) -> tuple:
        pairs = {"fprop": (self.x, self.w), "dgrad": (self.dy, self.w), "wgrad": (self.x, self.dy)}
        return *pairs[self.direction], self.b, None, self.r

    def want(self, of=lambda array: array) -> np.ndarray:
        """In float64, of what `of` makes of the arrays."""
        y = self.case.by_torch(of(self.x), of(self.w), None if self.direction == "fprop" else of(self.dy))
        y = y if self.direction == "fprop" else y[self.direction == "wgrad"]
        y = y if self.b is None else y + self.b.reshape(-1, *(1,) * self.case.ndim)
        return y if self.r is None else y + self.r

    def computed(self, config, **how) -> np.ndarray:
        return simt.computed(
            self.problem, config, *(None if one is None else one.astype(self.problem.dtype) for one in self.operands), **how
        )

    def kernels(self, config, last: bool = False) -> list[str]:
        program = program_of(self.problem, config, 3)
        return [step.kernel for stage in (program.filter_last if last else program.whole) for step in stage]

    def check(self, config, **how) -> None:
        with np.errstate(all="ignore"):
            want, got = self.want(), self.computed(config, **how)
            want = np.maximum(want, 0) if self.problem.activation == "relu" else want
            np.testing.assert_array_equal(got.astype(np.float64), want.astype(self.problem.dtype).astype(np.float64))


def sides(rng, pads, modes) -> tuple:
    """Pads and modes whose first side shows the image."""
    return ((1, pads[0][1]), *pads[1:]), ((str(rng.choice(NEAR[1:])), modes[0][1]), *modes[1:])


def shown(rng, ndim: int, taps: tuple, sizes: tuple, most: int, strided: bool = True) -> tuple:
    """Taps, dilation, stride, size, pads and modes of a border whose first side shows the image."""
    taps, dilation = [int(n) for n in rng.integers(*taps, ndim)], int(rng.integers(1, 3))
    stride, size = int(rng.integers(1, 3)) if strided else 1, [int(n) for n in rng.integers(*sizes, ndim)]
    pads, modes = sides(rng, pairs_of(rng.integers(0, most, (ndim, 2))), pairs_of(rng.choice(NEAR, (ndim, 2)), str))
    return taps, dilation, stride, [max(n, dilation * (t - 1) + 1) for n, t in zip(size, taps, strict=True)], pads, modes


def pairs_of(drawn, kind=int) -> tuple:
    return tuple((kind(a), kind(b)) for a, b in drawn)


def drawn(seed: int, ndim: int, layout: str, dtype: str, direction: str, channels=(16, 24)) -> Given:
    """With a border that goes on no further than to the image's other end."""
    rng, (c, k) = np.random.default_rng(seed), channels
    size = [int(n) for n in rng.integers(4, (40, 11, 6)[ndim - 1], ndim)]
    taps = [int(n) for n in rng.integers(2, 4, ndim)]
    pads, modes = pairs_of(rng.integers(0, 4, (ndim, 2))), pairs_of(rng.choice(NEAR, (ndim, 2)), str)
    if all(mode == "zeros" or not n for pair, some in zip(modes, pads, strict=True) for mode, n in zip(pair, some, strict=True)):
        pads, modes = ((1, 2), *pads[1:]), (("reflect", "circular"), *modes[1:])
    options = {name: tuple(map(int, rng.integers(1, 3, ndim))) for name in ("stride", "dilation")}
    size = [max(n, 2 * t) for n, t in zip(size, taps, strict=True)]
    images = 2 if direction == "fprop" else 16  # few images would have taps folded
    return Given(rng, direction, (images, c, *size), (k, c, *taps), pads, modes, dtype=dtype, layout=layout, **options)


def drawn_for(inner, seed: int, *args) -> tuple[Given, engines.Bordered]:
    """A problem whose border `inner` reads itself: some of wgrad's have taps folded while they are packed, and need a copy."""
    config = engines.Bordered(str(inner))
    for given in (drawn(seed + 1000 * again, *args) for again in range(10)):
        assert registry.refusal(given.problem, config, Target("sm_90a")) is None
        if not set(COPIES) & set(given.kernels(config)):
            return given, config
        assert given.direction == "wgrad"
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
    given, bordered = drawn_for(config, 100 * number + seed, ndim, layout, dtype, direction, (16, 24) if seed else (20, 21))
    given.check(bordered, seeds=(seed,))


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
    given, bordered = drawn_for(config, 7, 2, layout, "float32", direction)
    rng = np.random.default_rng(7)
    given.x, given.w, given.dy = (rng.standard_normal(one.shape).astype("float32") for one in (given.x, given.w, given.dy))
    STRANGE[kind](given.x, rng)
    with np.errstate(all="ignore"):
        want, size = given.want(), given.want(abs)
    assert_alike(given.computed(bordered), want, 3e-6 * size + 1e-44)
    assert not np.isfinite(want).all() or kind.startswith("2^")


def test_borders_that_packing_leaves_to_a_copy():
    """Numbers that fill, and what goes on beyond the image's other end."""
    for mode, pad in (("constant", 1), ("circular", 9), ("reflect", 8)):
        given = Given(
            np.random.default_rng(0), "fprop", (2, 16, 8, 8), (24, 16, 3, 3), ((pad, pad),) * 2, ((mode, mode),) * 2,
            value=float(mode == "constant")
        )
        assert given.kernels(engines.Bordered(str(engines.ImplicitGemm(64, 64, 2))))[0] in COPIES
    assert set(NUMPYS) == set(borders.MODES)


@pytest.mark.parametrize("seed", range(10))
def test_depthwise_rings_copy_the_border(seed):
    """Channels last; sizes that leave units and columns over; numbers that are not finite are summed once more."""
    rng = np.random.default_rng(seed)
    taps, stride, k = int(rng.choice([3, 5, 7])), int(rng.integers(1, 3)), 16
    dtype = ("float16", "bfloat16", "float32")[seed % 3]
    size, pads = rng.integers(taps + 1, 20, 2), rng.integers(0, taps, (2, 2))
    pads[0, 0] += 1
    modes = pairs_of(rng.choice(NEAR[1:], (2, 2)), str)
    given = Given(
        rng, "wgrad", (3, k, *map(int, size)), (k, 1, taps, taps), pairs_of(pads), modes, stride=stride, groups=k, dtype=dtype,
        layout="NHWC"
    )
    given.x[0, 0, 0, 0] = np.nan if seed % 2 else 1
    config = engines.Bordered(str(engines.DepthwiseRing(int(rng.integers(2, 6)), int(rng.integers(1, 3)))))
    assert given.kernels(config)[0] == "depthwise_nhwc_wgrad_ring"
    given.check(config, seeds=(seed,))


@pytest.mark.parametrize("groups", [1, 8])
def test_copies_for_gradients_of_filters_of_channels_last(groups):
    """A number that fills is copied, in groups too."""
    given = Given(
        np.random.default_rng(groups), "wgrad", (3, 16, 7, 6), (16, 16 // groups, 3, 3), ((1, 1),) * 2, (("constant",) * 2,) * 2, value=2.0,
        groups=groups, layout="NHWC"
    )
    config = engines.Bordered(str(engines.choose(given.problem.padded, Target("sm_90a"))))
    assert given.kernels(config)[0] in COPIES
    given.check(config)


@pytest.mark.parametrize("seed", range(15))
def test_dense_tiles_take_other_pixels_at_the_sides(seed):
    """Rows, columns and corners by taps of their own offsets: paddings, strides, dilations, sides of zeros, no interior, large images' ends, odd channels."""
    rng = np.random.default_rng(1000 + seed)
    ndim, dtype = (2, 2, 1, 2, 3, 2, 2)[seed % 7], ("float16", "bfloat16", "float16")[seed % 3]
    taps, dilation, stride, size, pads, modes = shown(rng, ndim, (1, 4), (5, (300, 12, 6)[ndim - 1]), 3 if ndim < 3 else 2)
    if seed == 3:
        size[0] = 270  # the last rows lie further than a corner of tensor loads can
    c, k = (24, 40) if seed % 2 else (64, 6 if seed == 14 else 64 if seed % 4 else 72)
    given = Given(
        rng, "fprop", (2, c, *size), (k, c, *taps), pads, modes, bias=True, stride=stride, dilation=dilation, dtype=dtype, layout="NHWC"
    )
    config = engines.Bordered(str(engines.DenseNhwc(64, 32, 3) if seed == 14 else engines.DenseNhwc(128, 64, 4)))
    if given.problem.border is not None:
        assert ndim == 3 or set(given.kernels(config)) <= {"hopper_dense", "transpose_filter"}  # a volume has many sides
        given.check(config, seeds=(seed,))


@pytest.mark.parametrize("seed", range(13))
def test_dense_tiles_take_more_taps_where_a_gradient_s_border_shows_a_pixel(seed):
    """dx of channels last, by regions: sides that differ and sides of zeros, places shown twice, more than a launch has, a residual; else by a fold."""
    rng = np.random.default_rng(2000 + seed)
    ndim, dtype = (2, 1, 2, 2)[seed % 4], ("float16", "bfloat16")[seed % 2]
    taps, dilation, _, size, pads, modes = shown(rng, ndim, (1, 4), (5, (300, 12)[ndim - 1]), 2 if ndim > 1 else 4, False)
    if seed == 12:
        taps, dilation, size, pads, modes = [5, 5], 1, [9, 8], ((2, 2),) * 2, (("reflect",) * 2,) * 2
    c, k = (40, 24) if seed % 2 else (64, 64)
    given = Given(
        rng, "dgrad", (2, c, *size), (k, c, *taps), pads, modes, residual=seed % 3 == 0, most=1, dilation=dilation, dtype=dtype,
        layout="NHWC"
    )
    config = engines.Bordered(str(engines.DenseNhwc(128, 64, 4)))
    for last in (False, True):
        assert set(given.kernels(config, last)) <= {"hopper_dense", "transpose_filter"}
        given.check(config, seeds=(seed,), filter_last=last)


@pytest.mark.parametrize("seed", range(15))
def test_gradients_of_filters_sum_region_by_region(seed):
    """dw of channels last: any number of regions of a launch, strides, dilations, groups, both orders of the result, parts that end within a region."""
    rng = np.random.default_rng(4000 + seed)
    ndim, dtype = (2, 2, 1, 2, 3)[seed % 5], ("float16", "bfloat16", "float32")[seed % 3]
    taps, dilation, stride, size, pads, modes = shown(rng, ndim, (2, 4), (5, (200, 11, 6)[ndim - 1]), 3 if ndim < 3 else 2)
    if seed == 14:  # columns that wrap lie further apart than a tap's offset
        ndim, dtype, taps, size, dilation, stride, pads, modes = 2, "float16", [3, 3], [4, 270], 1, 1, ((1, 1),) * 2, (("circular",) * 2,) * 2
    groups = 2 if seed % 4 == 3 else 1
    c, k = (64, 72) if seed % 2 else (136, 40)
    options = {"stride": stride, "dilation": dilation, "groups": groups, "dtype": dtype, "layout": "NHWC"}
    given = Given(rng, "wgrad", (3, groups * c, *size), (groups * k, c, *taps), pads, modes, most=1, **options)
    config = engines.Bordered(str(engines.WgradNhwc(64, 64 if dtype == "float32" else 128, 2, 1 + seed % 3)))
    kernels = given.kernels(config)
    assert ndim == 3 or not set(kernels) & set(COPIES), kernels  # a volume has many sides
    given.check(config, seeds=(seed,), filter_last=bool(seed % 2))


@pytest.mark.parametrize("direction", ["dgrad", "wgrad"])
def test_planes_are_transposed_before_their_border_is_put_in(direction):
    given = Given(np.random.default_rng(5), direction, (2, 64, 7, 6), (64, 64, 3, 3), ((1, 1),) * 2, (("reflect", "circular"),) * 2, most=1, dtype="float16")
    inner = engines.DenseNhwc(64, 64, 2) if direction == "dgrad" else engines.WgradNhwc(64, 64, 2, 2)
    config = engines.ViaNhwc(str(engines.Bordered(str(inner))))
    assert not {*COPIES, "border_planes_fold", "border_fold"} & set(given.kernels(config))
    given.check(config)


@pytest.mark.parametrize("seed", range(12))
def test_toeplitz_tiles_fill_the_columns_beside_their_rows(seed):
    """Planes of even and odd widths, several in a block, strides, dilations, several filters a channel; sums that are no numbers."""
    rng = np.random.default_rng(3000 + seed)
    dtype, stride = ("float16", "bfloat16")[seed % 2], int(rng.integers(1, 3))
    taps, dilation = rng.integers(1, 6, 2), int(rng.integers(1, 3))
    c, multiplier = int(rng.integers(2, 6)), int(rng.integers(1, 3))
    size = [int(n) for n in rng.integers(10, 30, 2)]
    size[1] = size[1] // 8 * 8 if seed % 3 == 0 else size[1]
    pads, modes = sides(rng, pairs_of(rng.integers(0, 5, (2, 2))), pairs_of(rng.choice(NEAR, (2, 2)), str))
    w_shape = (c * multiplier, 1, *map(int, taps))
    given = Given(rng, "fprop", (2, c, *size), w_shape, pads, modes, bias=True, stride=stride, dilation=dilation, groups=c, dtype=dtype)
    if seed % 4 == 1:
        given.x[0, 0, 0, 1] = np.inf
    config = engines.Bordered(str(engines.DepthwiseToeplitz(24)))
    assert given.kernels(config) == ["depthwise_toeplitz"]
    given.check(config, seeds=(seed,))


@pytest.mark.parametrize("seed", range(12))
def test_small_planes_get_their_border_and_give_it_back(seed):
    """All modes on each side, also wider than the image; rows of any length, more planes than a block has, residuals."""
    rng = np.random.default_rng(seed)
    dtype, direction = ("float32", "float16", "float64")[seed % 3], ("fprop", "dgrad")[seed // 3 % 2]
    c, size, taps = int(rng.integers(1, 20)), tuple(int(n) for n in rng.integers(2, 20, 2)), tuple(int(n) for n in rng.integers(1, 4, 2))
    pads = tuple((int(a) + 2, int(b) + 1) for a, b in rng.integers(0, 4 if seed % 5 else 12, (2, 2)))
    modes = tuple((str(a), str(b)) for a, b in rng.choice(borders.MODES, (2, 2)))
    modes = (("reflect" if direction == "dgrad" else "constant", modes[0][1]), modes[1])
    value = 2.0 if "constant" in str(modes) else 0.0
    given = Given(rng, direction, (37, c, *size), (c, 1, *taps), pads, modes, most=4, value=value, dtype=dtype, groups=c)
    inner, kernel = (engines.Batched(), "border_planes_copy") if direction == "fprop" else (engines.Dgrad(), "border_planes_fold")
    config = engines.Bordered(str(inner))
    assert registry.refusal(given.problem, config, Target("sm_90a")) is None and kernel in given.kernels(config)
    given.check(config, seeds=(seed,))


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
    given = Given(
        rng, "fprop", (2, c, *size), (k, c, *taps), pads, tuple(modes), bias=True, stride=stride, dilation=dilation, dtype=dtype,
        layout=layout, precision=precision
    )
    config = engines.Bordered(str(engines.FewInputs(16, 16)))
    assert set(given.kernels(config)) == {"few_inputs"}
    if seed % 3 == 0 and precision == "fp32":
        given.x[(0,) * given.x.ndim] = np.nan
    given.check(config, seeds=(seed,))


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
    modes, pads = pairs_of(rng.choice(NEAR[1:], (2, 2)), str), pairs_of(pads)
    options = {"stride": 1 + seed // 6 % 2, "dilation": tuple(map(int, rng.integers(1, 3, 2))), "groups": groups}
    given = Given(
        rng, "dgrad" if gradient else "fprop", (3, groups * c, *map(int, size)), (groups * k, c, *map(int, taps)), pads, modes,
        bias=not gradient, most=1, dtype=dtype, layout=layout, activation=None if gradient else "relu", **options
    )
    inner = engines.ImplicitGemm80(64, 128, 4) if seed % 4 else engines.choose(replace(given.problem, border=None), Target("sm_90a"))
    given.check(engines.Rims(str(inner)), seeds=(seed,))


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_rims_that_are_not_finite_are_summed_again(direction):
    rng = np.random.default_rng(5)
    given = Given(rng, direction, (2, 16, 6, 7), (16, 16, 3, 3), ((1, 1),) * 2, (("reflect",) * 2,) * 2)
    given.x, given.w = (rng.standard_normal(shape).astype("float32") for shape in ((2, 16, 6, 7), (16, 16, 3, 3)))
    given.x[0, 3, 0, 2], given.x[1, 5, 3, 0], given.x[1, :, 5], given.w[2] = np.inf, np.nan, 1e36, given.w[2] * 1e-20
    given.dy = given.x
    with np.errstate(all="ignore"):
        want, size = given.want(), given.want(abs)
    assert_alike(given.computed(engines.Rims(str(engines.ImplicitGemm80(64, 128, 4)))), want, 1e-6 * size)
    assert np.isinf(want).any() and np.isnan(want).any()
