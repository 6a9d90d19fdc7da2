"""Images, filters and results of integers: every type, exact where sums fit, rounded half to even and clipped."""

import numpy as np
import pytest
import torch
from reference import by_turns, reference

import pycuda_conv as pc
from pycuda_conv import ConvArgumentError, ConvProblem, Plan, engines
from pycuda_conv.elements import INTEGER_BYTES, SHORT


def limits(dtype: str) -> tuple[int, int]:
    return (0, 1) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)


def drawn(rng, dtype: str, shape, most: int = 255) -> np.ndarray:
    least, largest = limits(dtype)
    return rng.integers(max(least, -most), min(largest, most), shape, endpoint=True).astype(dtype)


def rounded(exact: np.ndarray, dtype: str) -> np.ndarray:
    return np.clip(np.rint(exact), *limits(dtype)).astype(dtype)


@pytest.mark.parametrize("dtype", INTEGER_BYTES)
def test_images_of_integers(device, dtype):
    """With filters of any type; results of floats, of the image's own type and in `out`."""
    rng = np.random.default_rng(7)
    x = drawn(rng, dtype, (2, 3, 12, 11))
    for of_filter in ("float32", "float64", "float16", "int8", "uint8", "bool", "int64"):
        w = drawn(
            rng, of_filter, (4, 3, 3, 3), 5
        ) if of_filter in INTEGER_BYTES else rng.integers(-8, 9, (4, 3, 3, 3)).astype(of_filter) / 8
        w = w.astype(of_filter)
        exact = reference(False, 2, np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), "reflect"), w)
        y = pc.conv2d(x, w, padding=1, padding_mode="reflect", device=device)
        assert y.dtype == ("float32" if dtype in SHORT and of_filter != "float64" else "float64")
        np.testing.assert_array_equal(y, exact)
        made = pc.conv2d(x, w, padding=1, padding_mode="reflect", dtype=dtype, device=device)
        assert made.dtype == dtype
        np.testing.assert_array_equal(made, rounded(exact, dtype))
        out = np.full(made.shape, 1, dtype)
        assert pc.conv2d(x, w, padding=1, padding_mode="reflect", out=out, device=device) is out
        np.testing.assert_array_equal(out, made)


@pytest.mark.parametrize("dtype", INTEGER_BYTES)
@pytest.mark.parametrize("given", ["float32", "float64"])
def test_results_are_rounded_to_even_and_clipped(device, dtype, given):
    least, most = limits(dtype)
    x = np.array([
        0.5, 1.5, 2.5, -0.5, -1.5, 0.49999, least - 1.0, least, least + 0.5, most, most + 0.5, most + 1.0, 1e30, -1e30, np.inf, -np.inf,
        np.nan
    ], given)
    y = pc.conv1d(x[None, None], np.ones((1, 1, 1), given), dtype=dtype, device=device)[0, 0]
    expected = []
    for value in np.rint(x.astype(np.float64)).tolist():
        expected.append(least if not value >= least else most if value >= most else int(value))
    assert y.astype(object).tolist() == [one == 1 if dtype == "bool" else one for one in expected]


@pytest.mark.parametrize("dtype", ["uint8", "int16", "bool"])
def test_gradients_and_transposed_convolutions(device, dtype):
    rng = np.random.default_rng(8)
    x, w, dy = drawn(rng, dtype, (2, 3, 6, 5)), rng.integers(-4, 5, (3, 4, 3, 3)).astype("f"), rng.integers(-4, 5, (2, 4, 4, 3)).astype("f")
    np.testing.assert_array_equal(pc.conv_transpose2d(x, w, device=device), reference(True, 2, x, w))
    by_w = pc.conv2d_weight(x, (4, 3, 3, 3), dy, device=device)
    assert by_w.dtype == "float32"
    np.testing.assert_array_equal(by_w, pc.conv2d_weight(x.astype("f"), (4, 3, 3, 3), dy, device=device))
    by_x = pc.conv2d_input((2, 4, 8, 7), w, x, padding=0, device=device)
    np.testing.assert_array_equal(by_x, pc.conv2d_input((2, 4, 8, 7), w, x.astype("f"), device=device))


def test_filters_of_integers_for_images_of_floats(device):
    x, w = np.arange(20, dtype=np.float16).reshape(4, 5), np.array([[0, 1, 0], [1, -4, 1], [0, 1, 0]])
    y = pc.conv2d(x, w, padding=1, device=device)
    assert y.dtype == np.float16
    np.testing.assert_array_equal(y, reference(False, 2, np.pad(x, 1)[None], w[None, None])[0])


def test_bias_scale_and_residual(device):
    rng = np.random.default_rng(9)
    x, w, b, s = drawn(rng, "uint8", (1, 2, 6, 5)), drawn(rng, "int8", (3, 2, 1, 1), 4), np.array([1, 2, 3], "i2"), np.array([2, 1, 0.5])
    r = drawn(rng, "uint8", (1, 3, 6, 5))
    exact = reference(False, 2, x, w) * s[:, None, None] + b[:, None, None] + r
    np.testing.assert_array_equal(pc.conv2d(x, w, b, scale=s, residual=r, device=device), exact)
    made = pc.conv2d(x, w, b, scale=s, residual=r, dtype="uint8", device=device)
    np.testing.assert_array_equal(made, rounded(exact, "uint8"))


def test_strided_and_swapped_images(device):
    rng = np.random.default_rng(10)
    whole, w = drawn(rng, "uint16", (2, 12, 11, 3)), rng.integers(-4, 5, (4, 3, 3, 3)).astype("f")
    x = whole.transpose(0, 3, 1, 2)[:, :, ::-1, ::2]
    expected = reference(False, 2, x, w)
    np.testing.assert_array_equal(pc.conv2d(x, w, device=device), expected)
    np.testing.assert_array_equal(pc.conv2d(x.astype(">u2"), w, device=device), expected)


def test_plans_of_integers(device):
    rng = np.random.default_rng(11)
    x, w = drawn(rng, "uint8", (2, 3, 6, 5)), rng.integers(-4, 5, (4, 3, 3, 3)).astype("f")
    plan = Plan(ConvProblem.forward(2, x.shape, w.shape, input_dtype="uint8", result_dtype="int16"), device)
    expected = rounded(reference(False, 2, x, w), "int16")
    for y in (plan(x, w), plan.bind(w)(x)):
        assert y.dtype == np.int16
        np.testing.assert_array_equal(y, expected)
    assert "from uint8 to int16" in plan.explain()
    with pytest.raises(ConvArgumentError, match="this plan takes uint8 arrays, but input is float32"):
        plan(x.astype("f"), w)


def test_large_images_go_through_in_chunks(device):
    """Bytes go to the device as they are, and come back as they are."""
    rng = np.random.default_rng(12)
    x, w = drawn(rng, "uint8", (3, 1, 700, 900)), np.full((1, 1, 3, 3), 1 / 8, "f")
    exact = reference(False, 2, np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), "wrap"), w)
    y = pc.conv2d(x, w, padding=1, padding_mode="circular", dtype="uint8", device=device)
    np.testing.assert_array_equal(y, rounded(exact, "uint8"))


def test_dask_of_integers():
    da = pytest.importorskip("dask.array")
    rng = np.random.default_rng(13)
    x, w = drawn(rng, "uint8", (2, 3, 20, 30)), drawn(rng, "int8", (4, 3, 3, 3), 4)
    lazy = da.from_array(x, chunks=(1, 3, 8, 9))
    for dtype in (None, "uint8", "int32"):
        y = pc.conv2d(lazy, w, padding=1, padding_mode="symmetric", dtype=dtype, device="opencl")
        expected = pc.conv2d(x, w, padding=1, padding_mode="symmetric", dtype=dtype, device="opencl")
        assert y.dtype == expected.dtype
        np.testing.assert_array_equal(y.compute(scheduler="sync"), expected)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint16", "bool", "int32", "int64"])
def test_tensors_of_integers(where, dtype):
    rng = np.random.default_rng(14)
    array, taps = drawn(rng, dtype, (2, 3, 6, 5)), rng.integers(-8, 9, (4, 3, 3, 3)) / 8
    x, w = torch.from_numpy(array).to(where), torch.from_numpy(taps.astype("f")).to(where).requires_grad_()
    exact = reference(False, 2, array, taps)
    torch_turns = dtype != "uint16"  # which torch can hardly do anything with
    for one in (x, x.to(memory_format=torch.channels_last), x.flip(-1).contiguous().flip(-1)) if torch_turns else (x,):
        y = pc.conv2d(one, w.detach())
        assert y.dtype is (torch.float32 if dtype in SHORT else torch.float64)
        np.testing.assert_array_equal(y.cpu().numpy(), exact)
        made = pc.conv2d(one, w.detach(), dtype=getattr(torch, dtype))
        assert made.dtype is x.dtype
        np.testing.assert_array_equal(made.cpu().numpy(), rounded(exact, dtype))
    y = pc.conv2d(x, w)
    (by_w,) = torch.autograd.grad(y.sum(), w)
    np.testing.assert_array_equal(by_w.cpu().numpy(), pc.conv2d_weight(array.astype("d"), w.shape, np.ones(y.shape)))
    assert not pc.conv2d(x, w, dtype="int16").requires_grad
    compiled = torch.compile(lambda x, w: (pc.conv2d(x, w), pc.conv2d(x, w, dtype="int16")), backend="aot_eager", fullgraph=True)
    for one, other in zip(compiled(x, w.detach()), (exact, rounded(exact, "int16")), strict=True):
        np.testing.assert_array_equal(one.cpu().numpy(), other)


@pytest.mark.parametrize(
    ("error", "text", "dtype"),
    [
        (ConvArgumentError, "dtype must be float32, in which these arrays are convolved, or a type of integers", "float64"),
        (TypeError, "dtype must be one of .*'complex64'", "complex64"), (TypeError, "dtype must be one of", object), (TypeError, "dtype must be one of .*did you mean 'uint8'", "unit8"),
    ],
)
def test_refused_types_of_results(error, text, dtype):
    with pytest.raises(error, match=text):
        pc.conv2d(np.ones((5, 5), "f"), np.ones((3, 3), "f"), dtype=dtype)


def test_dtypes_are_taken_in_any_form(device):
    x, w = np.ones((5, 5), "u1"), np.ones((3, 3), "f")
    for dtype in ("uint8", np.uint8, np.dtype("uint8")):
        assert pc.conv2d(x, w, dtype=dtype, device=device).dtype == np.uint8
    for dtype in (None, "float32", np.float32):
        assert pc.conv2d(x, w, dtype=dtype, device=device).dtype == np.float32
    assert pc.conv2d(x, w, dtype="float64", device=device).dtype == np.float64


def test_an_out_of_another_type_than_asked_for():
    with pytest.raises(ConvArgumentError, match="out must have dtype uint8, but got int16"):
        pc.conv2d(np.ones((5, 5), "u1"), np.ones((3, 3), "f"), dtype="uint8", out=np.ones((3, 3), "i2"))


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "bool"])
def test_gpuarrays_of_integers(dtype):
    gpuarray = pytest.importorskip("pycuda.gpuarray")
    pytest.importorskip("pycuda.autoprimaryctx")
    rng = np.random.default_rng(15)
    array, taps = drawn(rng, dtype, (2, 3, 16, 12)), rng.integers(-8, 9, (4, 3, 3, 3)) / 8
    x, w = gpuarray.to_gpu(array), gpuarray.to_gpu(taps.astype("f"))
    exact = reference(False, 2, np.pad(array, ((0, 0), (0, 0), (1, 1), (1, 1)), "symmetric"), taps)
    for _ in range(3):  # the launcher in C repeats calls
        y = pc.conv2d(x, w, padding=1, padding_mode="symmetric")
        np.testing.assert_array_equal(y.get(), exact)
        made = pc.conv2d(x, w, padding=1, padding_mode="symmetric", dtype=dtype)
        assert made.dtype == dtype
        np.testing.assert_array_equal(made.get(), rounded(exact, dtype))
    whole = gpuarray.to_gpu(np.repeat(array, 2, 3))
    np.testing.assert_array_equal(pc.conv2d(whole[:, :, :, ::2], w, padding=1, padding_mode="symmetric").get(), exact)
    taps_of_integers = gpuarray.to_gpu(np.arange(27, dtype="i1").reshape(1, 3, 3, 3))
    np.testing.assert_array_equal(pc.conv2d(x, taps_of_integers).get(), reference(False, 2, array, taps_of_integers.get()))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["uint8", "int16"])
def test_cupy_arrays_of_integers(dtype):
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(16)
    array, taps = drawn(rng, dtype, (2, 3, 16, 12)), drawn(rng, "int8", (4, 3, 3, 3), 5)
    exact = reference(False, 2, array, taps)
    np.testing.assert_array_equal(pc.conv2d(cupy.asarray(array), cupy.asarray(taps)).get(), exact)
    np.testing.assert_array_equal(pc.conv2d(cupy.asarray(array), cupy.asarray(taps), dtype=dtype).get(), rounded(exact, dtype))


@pytest.mark.parametrize(
    ("mode", "dtype"), by_turns(["zeros", "reflect", "constant", "circular"], ["uint8", "int8", "uint16", "int16"], rounds=2)
)
def test_the_kernel_of_images_reads_and_writes_integers(device, dtype, mode):
    """Edge tiles, unrolled filters and others, planes of several channels, an epilogue; sums that are clipped and that are no numbers."""
    rng = np.random.default_rng([*dtype.encode(), len(mode)])
    value = 3.0 if mode == "constant" else 0.0
    pad_mode = {"reflect": "reflect", "circular": "wrap"}.get(mode, "constant")
    for taps, channels in ((3, 1), (5, 2), (4, 3)):
        x, w = drawn(rng, dtype, (2, channels, 37, 70), 2**15), rng.integers(-8, 9, (channels, 1, taps, taps)).astype("f") / 4
        b = rng.integers(-40, 40, channels).astype("f")
        pads = ((0, 0), (0, 0), (2, 1), (1, 2))
        wide = np.pad(x, pads, pad_mode, **({"constant_values": value} if pad_mode == "constant" else {}))
        exact = reference(False, 2, wide, w, b, groups=channels)
        options = {"padding": ((2, 1), (1, 2)), "padding_mode": mode, "padding_value": value, "groups": channels}
        for wanted in ("", dtype):
            problem = ConvProblem.forward(2, x.shape, w.shape, b.shape, input_dtype=dtype, result_dtype=wanted, **options)
            for config in (engines.Tile(14, 64, 7), engines.Tile(14, 32, 7)):
                y = Plan(problem, device, config=config)(x, w, b)
                np.testing.assert_array_equal(y, rounded(exact, wanted) if wanted else exact.astype("f"), str(config))
        w[0, 0, 0, 0] = np.nan
        least = np.asarray(Plan(problem, device, config=config)(x, w, b))[:, 0]
        assert (least == limits(dtype)[0]).all() and problem.result_dtype == dtype
    with pytest.raises(ValueError, match="of integers it takes Tile"):
        Plan(problem, device, config=engines.Tile(1, 256, 1))


@pytest.mark.parametrize("dtype", ["uint8", "int16"])
def test_images_of_integers_are_read_as_they_lie(dtype):
    from pycuda_conv.runtime.target import Target

    for mode in ("zeros", "reflect"):
        problem = ConvProblem.forward(
            2, (1, 1, 4096, 4096), (1, 1, 5, 5), padding=2, padding_mode=mode, input_dtype=dtype, result_dtype=dtype
        )
        assert isinstance(engines.choose(problem, Target("sm_90a")), engines.Tile)
