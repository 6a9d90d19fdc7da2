"""Borders of the image's own pixels: forward and gradients, every kind of array, against numpy.pad and float64."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from reference import DTYPES, reference

import pycuda_conv as pc
import pycuda_conv.nn as pn
from pycuda_conv import ConvArgumentError, ConvProblem, Plan, borders, engines
from pycuda_conv.execute.pieces import pieces
from pycuda_conv.runtime import get_device

NUMPYS = {"zeros": "constant", "constant": "constant", "replicate": "edge", "reflect": "reflect", "circular": "wrap", "symmetric": "symmetric"}


def padded(x: np.ndarray, pads, modes, value: float = 0.0) -> np.ndarray:
    """`x` padded along its last axes, one side after the other, each from the image alone."""
    for axis, (pair, words) in enumerate(zip(pads, modes, strict=True), x.ndim - len(pads)):
        parts = []
        for side, (count, mode) in enumerate(zip(pair, words, strict=True)):
            width = [(0, 0)] * x.ndim
            width[axis] = (0, count) if side else (count, 0)
            filled = {"constant_values": value if mode == "constant" else 0.0} if mode in borders.FILLED else {}
            whole = np.pad(x, width, NUMPYS[mode], **filled)
            parts.append(np.take(whole, range(x.shape[axis], x.shape[axis] + count) if side else range(count), axis))
        x = np.concatenate([parts[0], x, parts[1]], axis)
    return x


def enlarged(x: np.ndarray, times) -> np.ndarray:
    """`x` with each number so many times along its last axes."""
    for axis, n in enumerate(times, x.ndim - len(times)):
        x = x.repeat(n, axis)
    return x


class Border:
    """A convolution with a border on each side of each axis, of an image that may be upsampled before."""

    times = ()

    def __init__(self, pads, modes, value: float = 0.0, **options) -> None:
        self.ndim, self.pads, self.modes, self.value, self.options = len(pads), pads, modes, value, options

    def by_torch(self, x: np.ndarray, w: np.ndarray, dy: np.ndarray | None = None):
        """The result in float64; with its gradient `dy`, those by x and w."""
        x, w, dy = (None if a is None else torch.from_numpy(a.astype(np.float64)) for a in (x, w, dy))
        n = x[0, 0].numel()
        image = enlarged(np.arange(n).reshape(x.shape[2:]) + 1.0, self.times)
        places = torch.from_numpy(padded(image, self.pads, self.modes, -1.0)).long()
        x, w = x.requires_grad_(), w.requires_grad_()
        flat = torch.cat([x.flatten(2), torch.full((*x.shape[:2], 1), self.value, dtype=x.dtype), x.new_zeros(*x.shape[:2], 1)], 2)
        at = torch.where(places > 0, places - 1, torch.where(places == -1, n, n + 1))
        y = getattr(torch.nn.functional, f"conv{self.ndim}d")(flat[:, :, at.flatten()].unflatten(2, at.shape), w, **self.options)
        return y.detach().numpy() if dy is None else [g.numpy() for g in torch.autograd.grad(y, (x, w), dy)]


class Drawn(Border):
    """With any border, some wider than the image."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = np.random.default_rng(seed)
        self.ndim = ndim = int(rng.integers(1, 4))
        while True:
            size, taps = rng.integers(1, (40, 14, 7)[ndim - 1], ndim), rng.integers(1, 4, ndim)
            self.pads = tuple((int(a), int(b)) for a, b in rng.integers(0, 9, (ndim, 2)))
            self.stride, self.dilation = (tuple(map(int, rng.integers(1, 3, ndim))) for _ in range(2))
            if all(n + sum(p) > d * (t - 1) for n, p, d, t in zip(size, self.pads, self.dilation, taps, strict=True)):
                break
        self.modes = tuple((str(a), str(b)) for a, b in rng.choice(borders.MODES, (ndim, 2)))
        self.value = 3.0 if any(mode == "constant" for pair in self.modes for mode in pair) else 0.0
        self.groups = int(rng.integers(1, 3))
        self.x_shape = (int(rng.integers(1, 4)), 2 * self.groups, *map(int, size))
        self.w_shape = (3 * self.groups, 2, *map(int, taps))
        self.options = {"stride": self.stride, "dilation": self.dilation, "groups": self.groups}
        self.border = {"padding": self.pads, "padding_mode": self.modes, "padding_value": self.value}

    def function(self, of: str = ""):
        return getattr(pc, f"conv{self.ndim}d{of}")

    def numbers(self, shape) -> np.ndarray:
        """Whole numbers, whose sums are exact."""
        return self.rng.integers(-4, 5, shape).astype(np.float64)


# ---- the formula


@pytest.mark.parametrize("mode", borders.MODES)
@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_rows_are_numpys(mode, n):
    filled = mode in borders.FILLED
    for before, after in ((0, 0), (1, 2), (n, n), (3 * n + 2, 5 * n + 1)):
        numbers = np.pad(np.arange(n), (before, after), NUMPYS[mode], **({"constant_values": -1} if filled else {}))
        assert borders.rows((mode, mode), n, -before, n + after) == numbers.tolist()


@pytest.mark.parametrize("mode", borders.MODES[2:])
@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_one_formula_maps_any_index(mode, n):
    """The five numbers of axes whose sides are alike, and those of borders that are near."""
    for before, after in ((0, 1), (1, 2), (n, n), (3 * n + 2, 5 * n + 1)):
        bias, period, high, sign = borders.alike(mode, n, before)
        rows = borders.rows((mode, mode), n, -before, n + after)
        mapped = [max(i + bias, 0) % period for i in range(-before, n + after)]
        assert [t if t < n else high + sign * t for t in mapped] == rows
        for last, places in ((False, range(-before, 0)), (True, range(n, n + after))):
            start, step, reach = borders.near(mode, n, last)
            for i in places:
                if (i - n + 1 if last else -i) <= reach:
                    assert start + step * i == rows[i + before]


def test_a_border_in_its_simplest_form():
    def border(**options):
        return ConvProblem.forward(2, (1, 1, 5, 1), (1, 1, 1, 1), **options).border

    assert border(padding=0, padding_mode="reflect") is None
    assert border(padding=2, padding_mode="constant") is None
    assert border(padding=(1, 0), padding_mode="circular") == (("zeros",) * 2, ("circular",) * 2, ("zeros",) * 2)
    assert border(padding=1, padding_mode="reflect") == (("zeros",) * 2, ("reflect",) * 2, ("replicate",) * 2)  # one pixel has no neighbours
    assert border(padding=((1, 2), (0, 3)), padding_mode=("zeros", ("reflect", "constant"))) is None
    same = [ConvProblem.forward(1, (1, 1, 9), (1, 1, 3), padding=1, padding_mode=mode) for mode in ("reflect", ("reflect",), (("reflect", "reflect"),))]
    assert len(set(same)) == 1
    gradient = ConvProblem.gradient("input", 1, (1, 1, 9), (1, 1, 3), (1, 1, 9), padding=1, padding_mode="constant", padding_value=5)
    assert gradient.border is None  # what fills has no gradient
    assert "reflect" in str(same[0]) and "constant 0.1" in str(ConvProblem.forward(1, (1, 1, 9), (1, 1, 3), padding=1, padding_mode="constant", padding_value=0.1))
    half = ConvProblem.forward(1, (1, 1, 9), (1, 1, 3), padding=1, padding_mode="constant", padding_value=0.1, dtype="float16")
    assert half.border_value == float(np.float16(0.1))


# ---- numbers


@pytest.mark.parametrize("seed", range(24))
def test_drawn_borders(device, seed):
    """Forward and both gradients, exact in whole numbers, into poisoned arrays."""
    drawn = Drawn(seed)
    dtype = str(drawn.rng.choice(DTYPES))
    x, w = drawn.numbers(drawn.x_shape), drawn.numbers(drawn.w_shape)
    expected = drawn.by_torch(x, w)
    dy = drawn.rng.integers(-2, 3, expected.shape).astype(np.float64)
    if dtype in ("float16", "bfloat16"):  # sums that are exact in these are short
        dtype = "float32" if max(abs(a).max() for a in (expected, *drawn.by_torch(x, w, dy))) > 256 else dtype
    x, w, dy = (a.astype(dtype) for a in (x, w, dy))
    y = np.full(expected.shape, np.nan, dtype)
    assert drawn.function()(x, w, out=y, device=device, **drawn.options, **drawn.border) is y
    np.testing.assert_array_equal(y.astype(np.float64), expected)
    by_x, by_w = drawn.by_torch(x, w, dy)
    dx = drawn.function("_input")(x.shape, w, dy, out=np.full(x.shape, np.nan, dtype), device=device, **drawn.options, **drawn.border)
    np.testing.assert_array_equal(dx.astype(np.float64), by_x)
    dw = drawn.function("_weight")(x, w.shape, dy, out=np.full(w.shape, np.nan, dtype), device=device, **drawn.options, **drawn.border)
    np.testing.assert_array_equal(dw.astype(np.float64), by_w)


@pytest.mark.parametrize("mode", borders.MODES)
@pytest.mark.parametrize("taps", [3, 31])
def test_random_numbers_and_an_epilogue(device, mode, taps):
    rng = np.random.default_rng(5)
    x, w, b = (rng.standard_normal(shape).astype("f") for shape in ((2, 3, 40, 33), (4, 3, taps, taps), (4,)))
    border = {"padding_mode": mode, "padding_value": 0.75 if mode == "constant" else 0.0}
    y = pc.conv2d(x, w, b, padding="same", activation="relu", device=device, **border)
    pads = ((taps // 2, taps // 2),) * 2
    expected = np.maximum(reference(False, 2, padded(x.astype(np.float64), pads, ((mode, mode),) * 2, border["padding_value"]), w, b), 0)
    magnitude = reference(False, 2, padded(abs(x).astype(np.float64), pads, ((mode, mode),) * 2, border["padding_value"]), abs(w), abs(b))
    assert (abs(y - expected) <= 4 * 2.0**-23 * np.sqrt(w[0].size) * magnitude).all()


def test_an_image_and_a_filter_without_channels(device):
    x, w = np.arange(20, dtype="f").reshape(4, 5), np.array([[0, 1, 0], [1, -4, 1], [0, 1, 0]], "f")
    expected = reference(False, 2, np.pad(x, 1, "symmetric")[None], w[None, None])[0]
    np.testing.assert_array_equal(pc.conv2d(x, w, padding=1, padding_mode="symmetric", device=device), expected)


def test_numbers_that_fill(device):
    x, w = np.ones((1, 1, 3), "f"), np.ones((1, 1, 1), "f")
    for value in (np.nan, np.inf, -np.inf, np.float32(0.1), 7):
        y = pc.conv1d(x, w, padding=((2, 1),), padding_mode="constant", padding_value=value, device=device)
        np.testing.assert_array_equal(y[0, 0], np.array([value, value, 1, 1, 1, value], "f"))
    y = pc.conv1d(x.astype(np.float16), w.astype(np.float16), padding=1, padding_mode="constant", padding_value=1e6, device=device)
    assert y[0, 0, 0] == np.inf


def test_not_a_number_comes_from_where_the_border_shows_it(device):
    x = np.ones((1, 1, 6), "f")
    x[..., 1] = np.nan
    y = pc.conv1d(x, np.ones((1, 1, 1), "f"), padding=3, padding_mode=(("reflect", "circular"),), device=device)
    assert np.isnan(y[0, 0]).nonzero()[0].tolist() == [2, 4, 10]


# ---- plans


def test_plans_of_borders(device):
    rng = np.random.default_rng(3)
    x, w = (rng.integers(-4, 5, shape).astype("f") for shape in ((2, 3, 9, 8), (4, 3, 3, 3)))
    problem = ConvProblem.forward(2, x.shape, w.shape, padding=2, padding_mode="reflect")
    plan = Plan(problem, device)
    expected = reference(False, 2, np.pad(x, ((0, 0), (0, 0), (2, 2), (2, 2)), "reflect"), w)
    again, bound = pickle.loads(pickle.dumps(plan)), plan.bind(w)
    for y in (plan(x, w), again(x, w), bound(x), pickle.loads(pickle.dumps(bound))(x)):
        np.testing.assert_array_equal(y, expected)
    text = plan.explain()
    assert "reflect" in text and (not isinstance(plan.config, engines.Bordered) or "border_" in text)
    assert pickle.loads(pickle.dumps(problem)) == problem


def test_every_configuration_gives_the_same(device):
    rng = np.random.default_rng(4)
    on = get_device(device)
    x, w = rng.integers(-4, 5, (2, 4, 9, 8)).astype("f"), rng.integers(-4, 5, (4, 4, 3, 3)).astype("f")
    problem = ConvProblem.forward(2, x.shape, w.shape, padding=2, padding_mode=("circular", "symmetric"))
    expected = reference(False, 2, padded(x, ((2, 2),) * 2, (("circular",) * 2, ("symmetric",) * 2)), w)
    for config in engines.candidates(problem, on):
        np.testing.assert_array_equal(Plan(problem, on, config=config)(x, w), expected, str(config))


def test_a_configuration_without_borders_is_refused(device):
    problem = ConvProblem.forward(2, (1, 2, 9, 8), (2, 2, 3, 3), padding=1, padding_mode="reflect")
    with pytest.raises(ValueError, match="it takes no borders but zeros, and no integers"):
        Plan(problem, device, config=engines.Gemm())
    plain = ConvProblem.forward(2, (1, 2, 9, 8), (2, 2, 3, 3), padding=1)
    with pytest.raises(ValueError, match="it is for images with borders, and for integers"):
        Plan(plain, device, config=engines.Bordered())


@pytest.mark.parametrize("seed", range(12))
def test_chunks_of_rows(seed):
    """The pieces of one image, whose rows may come from elsewhere, give the whole."""
    drawn = Drawn(100 + seed)
    shape = (1, *drawn.x_shape[1:])
    x, w = drawn.numbers(shape).astype("f"), drawn.numbers(drawn.w_shape).astype("f")
    problem = ConvProblem.forward(drawn.ndim, shape, w.shape, **drawn.options, **drawn.border)
    whole = Plan(problem, "opencl")(x, w)
    cut = pieces(problem, max(4 * x.size // 5, 1))
    made = np.full_like(whole, np.nan)
    for piece in cut:
        made[piece.images, :, piece.rows_out] = Plan(piece.problem, "opencl")(np.ascontiguousarray(x[piece.images, :, piece.rows_in]), w)
    np.testing.assert_array_equal(made, whole)


# ---- other arrays


@pytest.mark.parametrize("seed", range(10))
def test_dask(seed):
    da = pytest.importorskip("dask.array")
    drawn = Drawn(200 + seed)
    rng = drawn.rng
    x, w = drawn.numbers(drawn.x_shape), drawn.numbers(drawn.w_shape)
    lazy = da.from_array(x, chunks=(2, -1, *(int(rng.integers(2, 6)) for _ in range(drawn.ndim))))
    options = drawn.options | drawn.border
    y, chunked = (drawn.function()(one, w, device="opencl", **options) for one in (x, lazy))
    np.testing.assert_array_equal(chunked.compute(scheduler="sync"), y)
    dy = rng.integers(-2, 3, y.shape).astype(np.float64)
    lazy_dy = da.from_array(dy, chunks=chunked.chunks)
    for of, whole, parts in (
        ("_weight", (x, w.shape, dy), (lazy, w.shape, lazy_dy)), ("_input", (x.shape, w, dy), (x.shape, w, lazy_dy)),
    ):
        expected = drawn.function(of)(*whole, device="opencl", **options)
        np.testing.assert_array_equal(drawn.function(of)(*parts, device="opencl", **options).compute(scheduler="sync"), expected)


@pytest.mark.parametrize("mode", borders.MODES)
def test_dask_keeps_its_chunks(mode):
    da = pytest.importorskip("dask.array")
    x = da.zeros((100, 120), chunks=(50, 40))
    assert pc.conv2d(x, np.ones((3, 5)), padding="same", padding_mode=mode).chunks == x.chunks


def test_streams_of_inputs(device):
    x, w = np.arange(12, dtype="f").reshape(3, 1, 1, 4), np.ones((1, 1, 1, 3), "f")
    found = list(pc.conv2d_many(list(x[:, None]), w, padding=(0, 1), padding_mode="circular", device=device))
    np.testing.assert_array_equal(np.concatenate(found)[:, 0, 0, 0], [4, 16, 28])


@pytest.mark.parametrize("seed", range(8))
def test_torch_and_its_gradients(where, seed):
    """First and second derivatives, of tensors of either layout."""
    drawn = Drawn(300 + seed)
    x, w = (torch.from_numpy(drawn.numbers(shape)).to(where) for shape in (drawn.x_shape, drawn.w_shape))
    if drawn.ndim > 1 and seed % 2:
        x = x.to(memory_format=torch.channels_last if drawn.ndim == 2 else torch.channels_last_3d)
    expected = drawn.by_torch(x.cpu().numpy(), w.cpu().numpy())
    dy = torch.from_numpy(drawn.rng.integers(-2, 3, expected.shape).astype(np.float64)).to(where).requires_grad_()
    x.requires_grad_()
    w.requires_grad_()
    y = drawn.function()(x, w, **drawn.options, **drawn.border)
    np.testing.assert_array_equal(y.detach().cpu().numpy(), expected)
    got = torch.autograd.grad(y, (x, w), dy, create_graph=True)
    for one, other in zip(got, drawn.by_torch(x.detach().cpu().numpy(), w.detach().cpu().numpy(), dy.detach().cpu().numpy()), strict=True):
        np.testing.assert_array_equal(one.detach().cpu().numpy(), other)
    # dx and dw are linear in dy: <dx, a> + <dw, b> has the gradient by dy that the tangent of y has
    a, b = torch.randn_like(x), torch.randn_like(w)
    (by_dy,) = torch.autograd.grad((got[0] * a).sum() + (got[1] * b).sum(), dy)
    linear = {**drawn.border, "padding_value": 0.0}
    tangent = drawn.function()(a, w, **drawn.options, **linear) + drawn.function()(x, b, **drawn.options, **drawn.border)
    torch.testing.assert_close(by_dy, tangent)


def test_forward_and_double_derivatives_by_torchs_check():
    x, w = torch.randn(2, 2, 5, 4, dtype=torch.float64, requires_grad=True), torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)

    def convolved(x, w):
        return pc.conv2d(x, w, padding=2, padding_mode=("constant", ("reflect", "circular")), padding_value=1.5)

    assert torch.autograd.gradcheck(convolved, (x, w), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(convolved, (x, w))


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_modules_make_no_padded_copy(where, mode, monkeypatch):
    theirs = torch.nn.Conv2d(3, 4, 3, padding=(2, 1), padding_mode=mode, dtype=torch.float64, device=where)
    ours = pn.Conv2d(3, 4, 3, padding=(2, 1), padding_mode=mode, dtype=torch.float64, device=where)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 7, 6, dtype=torch.float64, device=where)
    expected = theirs(x)
    monkeypatch.setattr(torch.nn.functional, "pad", None)
    torch.testing.assert_close(ours(x), expected)


def test_compiled_code():
    x, w = torch.randn(2, 3, 6, 5, dtype=torch.float64), torch.randn(4, 3, 3, 3, dtype=torch.float64)

    def convolved(x, w):
        return pc.conv2d(x, w, padding=1, padding_mode=("circular", "constant"), padding_value=2.0)

    made = torch.compile(convolved, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(made(x, w), convolved(x, w), rtol=0, atol=0)
    y = torch.vmap(lambda one: convolved(one[None], w)[0])(x)
    torch.testing.assert_close(y, convolved(x, w))


# ---- what is refused


@pytest.mark.parametrize(
    ("error", "text", "options"),
    [
        (ConvArgumentError, "padding_mode must be one of .*'mirror'; here it is called 'reflect'", {"padding_mode": "mirror"}),
        (ConvArgumentError, "padding_mode must be one of .*'reflct'; did you mean 'reflect'", {"padding_mode": "reflct"}),
        (TypeError, "padding_mode must be one of .* got 3", {"padding_mode": 3}),
        (TypeError, "padding_mode must be one of .* got None", {"padding_mode": None}),
        (ConvArgumentError, "expected padding_mode to be a word or a list of 2", {"padding_mode": ("zeros",) * 3}),
        (ConvArgumentError, r"expected pairs \(before, after\) in padding_mode", {"padding_mode": (("zeros",) * 3, "zeros")}),
        (ConvArgumentError, "padding_value is for padding_mode='constant'.*padding_value=2", {"padding_value": 2}),
        (ConvArgumentError, "padding_value is for padding_mode='constant'", {"padding_mode": "reflect", "padding_value": 2}),
        (TypeError, "padding_value must be a number, got 'x'", {"padding_mode": "constant", "padding_value": "x"}),
        (TypeError, "padding_value must be a number, got True", {"padding_mode": "constant", "padding_value": True}),
        (TypeError, "padding_value must be a number", {"padding_mode": "constant", "padding_value": 1j}),
        (TypeError, "padding_value must be a number", {"padding_mode": "constant", "padding_value": np.ones(2)}),
        (ConvArgumentError, "padding_value must be a float", {"padding_mode": "constant", "padding_value": 10**400}),
    ],
)
def test_refused_borders(error, text, options):
    with pytest.raises(error, match=text):
        pc.conv2d(np.ones((1, 1, 5, 5), "f"), np.ones((1, 1, 3, 3), "f"), padding=1, **options)


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_transposed_convolutions_take_zeros_alone(ndim):
    function = getattr(pc, f"conv_transpose{ndim}d")
    x, w = np.ones((1, 1) + (4,) * ndim, "f"), np.ones((1, 1) + (2,) * ndim, "f")
    function(x, w, padding_mode="zeros")
    for mode in borders.MODES[1:]:
        with pytest.raises(ConvArgumentError, match=f"conv_transpose{ndim}d takes padding_mode='zeros' alone.*{mode}"):
            function(x, w, padding_mode=mode)


# ---- kernels that read borders themselves


@pytest.mark.parametrize("seed", range(20))
def test_kernels_that_read_borders(device, seed):
    """Tiles of NCHW and strips of channels last, of filters with and without their own text, on images smaller than a tile too."""
    rng = np.random.default_rng(400 + seed)
    last, stride = bool(seed % 2), int(rng.integers(1, 3))
    r, s = (int(rng.choice([3, 5, 7])),) * 2 if last or rng.random() < 0.5 else map(int, rng.integers(1, 8, 2))
    c, multiplier = int(rng.choice([3, 4, 8])), int(rng.integers(1, 3))
    wide = not last and rng.random() < 0.3  # strips take no border that goes on beyond the image's other end
    size, pads = rng.integers(1, 5, 2) if wide else rng.integers(8, 40, 2), rng.integers(3, 10 if wide or not last else 8, (2, 2)).tolist()
    modes = tuple((str(mode),) * 2 for mode in rng.choice(borders.MODES, 2))
    value = 3.0 if "constant" in (modes[0][0], modes[1][0]) else 0.0
    x, w = rng.integers(-4, 5, (2, c, *map(int, size))).astype("f"), rng.integers(-4, 5, (c * multiplier, 1, r, s)).astype("f")
    border = {"padding": tuple(map(tuple, pads)), "padding_mode": modes, "padding_value": value}
    problem = ConvProblem.forward(2, x.shape, w.shape, stride=stride, groups=c, layout="NHWC" if last else "NCHW", **border)
    expected = reference(False, 2, padded(x, pads, modes, value), w, stride=stride, groups=c)
    if last and any(mode == "reflect" and max(pad) >= n for (mode, _), pad, n in zip(modes, pads, size, strict=True)):
        return
    tiles = (engines.DepthwiseStrips(3), engines.DepthwiseStrips(14)) if last else (engines.Tile(14, 32, 7), engines.Tile(1, 256, 1))
    for config in tiles:
        np.testing.assert_array_equal(Plan(problem, device, config=config)(x, w), expected, str(config))


def test_layers_with_borders_take_their_kernels():
    """What the planner takes for a GPU: kernels that read borders, or the one that zeros have around a copy."""
    from pycuda_conv.runtime.target import Target

    def chosen(shape, weight_shape, mode, **options):
        problem = ConvProblem.forward(2, shape, weight_shape, padding="same", padding_mode=mode, **options)
        return engines.choose(problem, Target("sm_90a"))

    image, depthwise = ((1, 1, 4096, 4096), (1, 1, 3, 3)), ((64, 144, 56, 56), (144, 1, 3, 3))
    for mode in borders.MODES:
        assert isinstance(chosen(*image, mode), engines.Tile)
        assert isinstance(chosen(*depthwise, mode, groups=144, layout="NHWC", dtype="float16"), engines.DepthwiseStrips)
    zeros, circular = (chosen((32, 256, 56, 56), (256, 256, 3, 3), mode) for mode in ("zeros", "circular"))
    assert circular == engines.Bordered(str(zeros))


def bordered(problem, rims, device):
    """The configuration with the choice for the wider image, or for the one among zeros and a launch for the rims; None where none is possible."""
    inner = replace(problem, border=None, border_value=0.0) if rims else problem.padded
    config = (engines.Rims if rims else engines.Bordered)(str(engines.choose(inner, get_device(device))))
    return config if engines.refusal(problem, config, get_device(device)) is None else None


@pytest.mark.parametrize("seed", range(10))
def test_rims_of_a_gradient_by_the_filter(device, seed):
    """Both layouts, groups of few channels, strides, dilations, and blocks with channels that are not there."""
    rng = np.random.default_rng(700 + seed)
    near = [mode for mode in borders.MODES if mode != "constant"]
    while True:
        groups, k = int(rng.integers(1, 6)) * (4 if seed % 4 else 1), int(rng.integers(1, 4))
        c = 1 if seed % 2 else int(rng.integers(1, 4))  # with channels last other engines take one
        taps, size, pads = rng.integers(1, 5, 2), rng.integers(3, 14, 2), tuple((int(a), int(b)) for a, b in rng.integers(0, 4, (2, 2)))
        modes = tuple((str(a), str(b)) for a, b in rng.choice(near, (2, 2)))
        options = {"stride": tuple(map(int, rng.integers(1, 3, 2))), "dilation": tuple(map(int, rng.integers(1, 3, 2))), "groups": groups}
        if any(n + sum(pair) <= d * (t - 1) for n, pair, d, t in zip(size, pads, options["dilation"], taps, strict=True)):
            continue
        dtype, layout = str(rng.choice(["float32", "float64", "float16"])), ("NCHW", "NHWC")[seed % 2]
        x_shape, w_shape = (int(rng.integers(1, 6)), groups * c, *map(int, size)), (groups * k, c, *map(int, taps))
        given = {"padding": pads, "padding_mode": modes, "dtype": dtype, "layout": layout, **options}
        y_shape = ConvProblem.forward(2, x_shape, w_shape, **given).result_shape
        problem = ConvProblem.gradient("weight", 2, x_shape, w_shape, y_shape, **given)
        inner = engines.find(replace(problem, border=None), get_device(device))
        config = engines.Rims(str(inner))
        if problem.border is not None and inner is not None and engines.refusal(problem, config, get_device(device)) is None:
            break
    x, dy = (rng.integers(-2, 3, shape).astype(dtype) for shape in (x_shape, y_shape))
    _, expected = Border(pads, modes, **options).by_torch(x, np.zeros(w_shape), dy)
    np.testing.assert_array_equal(Plan(problem, device, config=config)(x, dy).astype(np.float64), expected)


@pytest.mark.parametrize("seed", range(24))
def test_rims_of_a_convolution_among_zeros(device, seed):
    """Both layouts and directions, any rank, borders that differ from side to side, groups, strides, dilations, and what finishes a sum."""
    rng = np.random.default_rng(900 + seed)
    near = [mode for mode in borders.MODES if mode != "constant"]
    while True:
        ndim, depthwise, forward = (1, 2, 2, 3)[seed % 4], rng.random() < 0.4, bool(seed // 4 % 2)
        c, k = (1, 1) if depthwise else rng.integers(1, 4, 2).tolist()
        groups, dtype = int(rng.integers(1, 4)) * (8 if depthwise else 1), str(rng.choice(["float32", "float64", "float16"]))
        taps, size = rng.integers(1, 5, ndim), rng.integers(2, 13, ndim)
        pads = tuple((int(a), int(b)) for a, b in rng.integers(0, 4, (ndim, 2)))
        modes = tuple((str(a), str(b)) for a, b in rng.choice(near, (ndim, 2)))
        x_shape, w_shape = (int(rng.integers(1, 10)), groups * c, *map(int, size)), (groups * k, c, *map(int, taps))
        options = {"stride": tuple(map(int, rng.integers(1, 3, ndim))), "dilation": tuple(map(int, rng.integers(1, 3, ndim))), "groups": groups}
        given = {"padding": pads, "padding_mode": modes, "dtype": dtype, "layout": "NHWC" if ndim > 1 and rng.random() < 0.5 else "NCHW", **options}
        if any(n + sum(pair) <= d * (t - 1) for n, pair, d, t in zip(size, pads, options["dilation"], taps, strict=True)):
            continue
        y_shape = ConvProblem.forward(ndim, x_shape, w_shape, **given).result_shape
        finish = {"bias_shape": w_shape[:1], "residual_shape": y_shape, "activation": "relu"} if rng.random() < 0.5 else {}
        problem = ConvProblem.forward(ndim, x_shape, w_shape, **given, **finish) if forward else ConvProblem.gradient("input", ndim, x_shape, w_shape, y_shape, **given)
        config = problem.border is not None and bordered(problem, True, device)
        if config:
            break
    x, w, dy, residual = (rng.integers(-2, 3, shape).astype(dtype) for shape in (x_shape, w_shape, y_shape, y_shape))
    bias, border, plan = rng.integers(-3, 4, w_shape[0]).astype(dtype), Border(pads, modes, **options), Plan(problem, device, config=config)
    assert "rims" in plan.explain() and not (plan.redoes and not forward)
    if not forward:
        np.testing.assert_array_equal(plan(dy, w).astype(np.float64), border.by_torch(x, w, dy)[0])
        return
    expected = border.by_torch(x, w)
    if finish:
        expected = np.maximum(expected + bias.reshape(-1, *(1,) * ndim) + residual, 0)
    np.testing.assert_array_equal(plan(x, w, *((bias,) if finish else ()), residual=residual if finish else None).astype(np.float64), expected)


@pytest.mark.parametrize("seed", range(22))
def test_tiles_of_depthwise_gradients_add_what_the_border_shows(device, seed):
    """Images of one tile and of several, whose last is low or narrow, sides that differ, strides, dilations, fixed sizes of filters, a residual; what wraps."""
    rng = np.random.default_rng(1100 + seed)
    ndim, tile = (2, 2, 1)[seed % 3], (engines.Tile(8, 16, 2), engines.Tile(14, 32, 7), engines.Tile(4, 32, 1), engines.Tile(1, 64, 1))[seed % 4]
    while True:
        c, taps = int(rng.integers(1, 4)), [int(n) for n in (rng.integers(1, 8, ndim) if seed % 2 else [rng.choice([3, 5, 7])] * ndim)]
        stride, dilation = (1, 1) if seed % 4 < 2 else (int(rng.choice([1, 2])), int(rng.integers(1, 3)))
        size = [int(n) for n in rng.integers(3, 34, ndim)]
        pads = tuple((int(rng.integers(0, d + 1)), int(rng.integers(0, d // 2 + 1))) for d in (dilation * (n - 1) for n in taps))
        modes = tuple((str(a), str(b)) for a, b in rng.choice(["zeros", "replicate", "reflect", "symmetric"], (ndim, 2)))
        if seed > 15:
            pads = tuple((dilation * (n - 1) - n // 2, n // 2) for n in taps)
            modes = tuple((word, word) for word in map(str, rng.choice(["circular", "zeros"], ndim)))
        if any(n + sum(pair) <= dilation * (t - 1) for n, pair, t in zip(size, pads, taps, strict=True)):
            continue
        x_shape, w_shape, dtype = (2, c, *size), (c, 1, *taps), str(rng.choice(["float32", "float64", "float16"]))
        given = {"padding": pads, "padding_mode": modes, "dtype": dtype, "stride": stride, "dilation": dilation, "groups": c}
        y_shape = ConvProblem.forward(ndim, x_shape, w_shape, **given).result_shape
        problem = ConvProblem.gradient("input", ndim, x_shape, w_shape, y_shape, residual_shape=x_shape if seed % 5 == 0 else None, **given)
        if problem.border is not None and engines.refusal(problem, tile, get_device(device)) is None:
            break
    w, dy, residual = (rng.integers(-2, 3, shape).astype(dtype) for shape in (w_shape, y_shape, x_shape))
    expected, _ = Border(pads, modes, stride=stride, dilation=dilation, groups=c).by_torch(np.zeros(x_shape), w, dy)
    expected = expected + residual if problem.has_residual else expected
    plan = Plan(problem, device, config=tile)
    np.testing.assert_array_equal(plan(dy, w, residual=residual if problem.has_residual else None).astype(np.float64), expected)


@pytest.mark.parametrize("seed", range(10))
def test_gradients_of_depthwise_layers_add_the_border(device, seed):
    """Both layouts, strides, dilations, several filters a channel, more planes than a thread has, paddings that take many summands."""
    rng = np.random.default_rng(500 + seed)
    ndim, last = (1, 2, 2, 3)[seed % 4], bool(seed // 4 % 2)
    c, multiplier, dtype = int(rng.integers(2, 11)), int(rng.integers(1, 3)), str(rng.choice(["float32", "float64", "float16"]))
    taps, size = rng.integers(1, 6, ndim), rng.integers(12, 20, ndim)
    pads = tuple((int(a), int(b)) for a, b in rng.integers(0, 3 if seed % 3 else 5, (ndim, 2)))
    modes = tuple((str(a), str(b)) for a, b in rng.choice(borders.MODES, (ndim, 2)))
    pads, modes = ((1, 2), *pads[1:]), (("replicate", str(rng.choice(borders.MODES[2:]))), *modes[1:])
    options = {"stride": int(rng.integers(1, 3)), "dilation": int(rng.integers(1, 3)), "groups": c}
    x_shape, w_shape = (3, c, *map(int, size)), (c * multiplier, 1, *map(int, taps))
    given = {"padding": pads, "padding_mode": modes, "padding_value": 2.0 if "constant" in str(modes) else 0.0}
    layout = "NHWC" if last and ndim > 1 else "NCHW"
    y_shape = ConvProblem.forward(ndim, x_shape, w_shape, **options, **given).result_shape
    problem = ConvProblem.gradient("input", ndim, x_shape, w_shape, y_shape, dtype=dtype, layout=layout, **options, **given)
    w, dy = rng.integers(-3, 4, w_shape).astype(dtype), rng.integers(-1, 2, y_shape).astype(dtype)
    expected, _ = Border(pads, modes, given["padding_value"], **options).by_torch(np.zeros(x_shape), w, dy)
    for form in (None, "fold", "rims") if problem.border is not None else (None,):
        config = form and bordered(problem, form == "rims", device)
        plan = Plan(problem, device, config=config)
        assert config is None or form in plan.explain()
        np.testing.assert_array_equal(plan(dy, w).astype(np.float64), expected)


@pytest.mark.parametrize("groups", [1, 16])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_gradients_of_16_bits_are_rounded_once(device, layout, groups):
    """What zeros around the image leave of a pixel and what the border adds to it may cancel: either rounded first, their sum is off by many times its own rounding."""
    rng, shape, w_shape = np.random.default_rng(16), (3, 16, 9, 10), (16, 16 // groups, 3, 3)
    given = {"padding": 1, "padding_mode": "reflect", "groups": groups}
    problem = ConvProblem.gradient("input", 2, shape, w_shape, shape, dtype="float16", layout=layout, **given)
    w, dy = (rng.standard_normal(size).astype("float16") for size in (w_shape, shape))
    got = Plan(problem, device, config=bordered(problem, True, device))(dy, w).astype(np.float64)
    exact, _ = Border(((1, 1),) * 2, (("reflect",) * 2,) * 2, groups=groups).by_torch(np.zeros(shape), w, dy)
    assert (abs(got - exact) <= 2.0**-11 * abs(exact) + 2e-6 * abs(exact).max()).all()
