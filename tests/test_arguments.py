"""Every wrong argument is refused before anything is launched, in torch's words where torch has some."""

import contextlib
import decimal
import re

import numpy as np
import pytest
import torch
from reference import by_turns

import pycuda_conv as pc
from pycuda_conv import ConvArgumentError, ConvProblem, Plan
from pycuda_conv.execute import pipeline
from pycuda_conv.runtime import get_device

NAN = float("nan")


def zeros(*shape, dtype="float32"):
    return np.zeros(shape, dtype)


X, W, B = zeros(2, 4, 8, 9), zeros(6, 4, 3, 3), zeros(6)


@pytest.fixture
def refuses(device, monkeypatch):
    """refuses(exception, text, function, *arguments): the call raises just that, and nothing runs on the device."""

    def check(exception, text, function, *arguments, **options):
        def reached(*_, **__):
            pytest.fail("the device was reached")

        with monkeypatch.context() as patch:
            patch.setattr(type(get_device(device)), "run_on_host_arrays", reached)
            for name in ("_Pipeline", "_convolve_small"):
                patch.setattr(pipeline, name, reached)
            patch.setattr(Plan, "launch", reached)
            with pytest.raises(exception, match=text) as raised:
                getattr(pc, function)(*arguments, device=device, **options)
        if exception is ConvArgumentError:
            assert isinstance(raised.value, ValueError) and isinstance(raised.value, RuntimeError)
        return str(raised.value)

    return check


# ---- shapes and values: a ConvArgumentError in torch's words

SIZES = [
    # rank
    ("conv2d", (X[0, 0], W), {}, "Expected 3D (unbatched) or 4D (batched) input to conv2d, but got input of size: [8, 9]"),
    ("conv3d", (X[0, 0, 0], W[None]), {}, "Expected 4D (unbatched) or 5D (batched) input to conv3d, but got input of size: [9]"),
    ("conv_transpose2d", (X[0, 0], W), {}, "Expected 3D (unbatched) or 4D (batched) input to conv_transpose2d, but got input of size: [8, 9]"),
    ("conv2d", (X, W[0, 0]), {}, "weight of size [3, 3] is a filter without channels, which conv2d takes for an input of shape (H, W)"),
    ("conv3d", (X, W), {}, "Expected 5-dimensional weight for conv3d, of shape (K, C/groups, T, R, S), but got 4-dimensional weight of size [6, 4, 3, 3] instead"),
    # channels
    ("conv2d", (X, W[:, :3]), {}, "Given groups=1, weight of size [6, 3, 3, 3], expected input[2, 4, 8, 9] to have 3 channels, but got 4 channels instead"),
    ("conv2d", (X, W), {"groups": 2}, "Given groups=2, weight of size [6, 4, 3, 3], expected input[2, 4, 8, 9] to have 8 channels, but got 4 channels"),
    ("conv_transpose2d", (X, W), {}, "Given transposed=1, weight of size [6, 4, 3, 3], expected input[2, 4, 8, 9] to have 6 channels, but got 4 channels"),
    # groups
    ("conv2d", (X, W[:3, :2]), {"groups": 2}, "Given groups=2, expected weight to be divisible by 2 at dimension 0, but got weight of size [[3, 2, 3, 3]]"),
    ("conv2d", (X, W[:3, :1]), {"groups": 4}, "Given groups=4, expected weight to be at least 4 at dimension 0, but got weight of size [3, 1, 3, 3] instead"),
    ("conv2d", (X, W[:0]), {}, "Given groups=1, expected weight to be at least 1 at dimension 0, but got weight of size [0, 4, 3, 3] instead"),
    ("conv2d", (X, W), {"groups": 0}, "non-positive groups is not supported"),
    ("conv_transpose2d", (X, W[:4]), {"groups": 3}, "Given groups=3, expected weight to be divisible by 3 at dimension 0"),
    # bias
    ("conv2d", (X, W, B[:3]), {}, "Given weight of size [6, 4, 3, 3], expected bias to be 1-dimensional with 6 elements, but got bias of size [3] instead"),
    ("conv2d", (X, W, B[:, None]), {}, "expected bias to be 1-dimensional with 6 elements, but got bias of size [6, 1] instead"),
    ("conv_transpose2d", (X, W[:4, :3], B[:3]), {"groups": 2}, "expected bias to be 1-dimensional with 6 elements, but got bias of size [3] instead"),
    # values
    ("conv2d", (X, W), {"stride": (1, -1)}, "non-positive stride is not supported"),
    ("conv2d", (X, W), {"padding": (0, -2)}, "negative padding is not supported"),
    ("conv2d", (X, W), {"dilation": (1, -1)}, "dilation should be greater than zero, but got [1, -1]"),
    ("conv_transpose2d", (X, W[:4]), {"padding": -1}, "negative padding is not supported"),
    ("conv_transpose2d", (X, W[:4]), {"output_padding": -1}, "negative output_padding is not supported"),
    ("conv_transpose2d", (X, W[:4]), {"output_padding": (0, 3), "stride": 3, "dilation": 2}, "output padding must be smaller than either stride or"),
    # lengths
    ("conv2d", (X, W), {"stride": (1, 1, 1)}, "expected stride to be a single integer value or a list of 2 values to match the convolution dimensions, "
     "but got stride=[1, 1, 1]"),
    ("conv2d", (X, W), {"padding": [0, 0, 0]}, "expected padding to be a single integer value or a list of 2 values to match the convolution dimensions"),
    ("conv1d", (X[0], zeros(2, 8, 3)), {"stride": (1, 1)}, "expected stride to be a single integer value or a list of 1 values"),
    ("conv_transpose2d", (X, W[:4]), {"output_padding": (0, 0, 0)}, "expected output_padding to be a single integer value or a list of 2 values"),
    # sizes
    ("conv2d", (X[:, :, :2, :2], W), {}, "Calculated padded input size per channel: (2 x 2). Kernel size: (3 x 3). Kernel size can't be greater than actual"),
    ("conv2d", (X, W), {"dilation": (4, 1)}, "Calculated padded input size per channel: (8 x 9). Kernel size: (9 x 3). Kernel size can't be greater than"),
    ("conv1d", (X[0, :, :3], zeros(4, 3, 12)), {"padding": 1}, "Calculated padded input size per channel: (11). Kernel size: (12)."),
    ("conv2d", (X, W[:, :, :0]), {}, "kernel size should be greater than zero, but got kernel_height: 0 kernel_width: 3"),
    ("conv2d", (X[:, :, :0], W), {"padding": 2}, "Only zero batch or zero channel inputs are supported, but got input shape: [2, 4, 0, 9]"),
    ("conv_transpose2d", (X[:, :, :1, :1], W[:4]), {"padding": 4}, "Given input size per channel: (1 x 1). Calculated output size per channel: (-5 x -5). "
     "Output size is too small"),
    ("conv_transpose2d", (X[:, :, :1, :1], W[:4, :, :2]), {"padding": 1}, "Output size is too small"),
    # padding words
    ("conv2d", (X, W), {"padding": "same", "stride": 2}, "padding='same' is not supported for strided convolutions"),
    ("conv2d", (X, W), {"padding": "foo"}, "Invalid padding string: 'foo'"),
]  # fmt: skip
#: Where torch's own words change with the kernel it picks, or are about something else, or it lets them pass.
OURS = (
    "Only zero", "(11). Kernel", "Output size is too small", "expected dilation", "expected output_padding", "dilation should",
    "kernel size should", "without channels", "-dimensional weight for"
)  # fmt: skip


@pytest.mark.parametrize(("function", "arrays", "options", "text"), SIZES, ids=[f"{f}-{i}" for i, (f, *_) in enumerate(SIZES)])
def test_sizes_and_values_that_do_not_fit(refuses, function, arrays, options, text):
    """Torch refuses them in the same words."""
    refuses(ConvArgumentError, re.escape(text), function, *arrays, **options)
    if not any(part in text for part in OURS):
        with pytest.raises(RuntimeError) as raised:
            getattr(torch.nn.functional, function)(*(torch.from_numpy(a.copy()) for a in arrays), **options)
        assert text[:60] in " ".join(str(raised.value).split())


PAIRS = [((1, 1), (1, 1), (1, 1)), ((1, 1),), ((1, 1), 1), (1, (1, 1)), ((1, 1), (1,)), ((1, 1), (1, 1, 1)), ((1, 1), ()), ((1, 1), "ab")]


@pytest.mark.parametrize("padding", PAIRS, ids=str)
@pytest.mark.parametrize("function", ["conv2d", "conv_transpose2d"])
def test_pairs_of_the_wrong_form(refuses, function, padding):
    text = refuses((ConvArgumentError, TypeError), "padding", function, X, W[:4, :4], padding=padding)
    assert "pairs" in text or "integer" in text


# ---- types: a TypeError that names argument and value

NOT_INTEGERS = [
    1.0, NAN, True, False, "1", b"1", None, {1: 1}, 1j, decimal.Decimal(1), object(), np.float32(1), np.True_, np.array([1, 1]), range, (1.0, 1),
    (True, 1), [1, None], ("1", "1"), (np.float64(1), 1), (1, [1]), (np.True_, 1),
]  # fmt: skip


@pytest.mark.parametrize(
    "number, name", by_turns(range(len(NOT_INTEGERS)), ["stride", "padding", "dilation", "groups", "output_padding"], rounds=2)
)
def test_what_is_no_integer_is_refused_even_after_its_equal_was_accepted(refuses, device, name, number):
    value = NOT_INTEGERS[number]
    if name == "padding" and isinstance(value, str):
        pytest.skip("a word is a padding; see the padding words")
    function = "conv_transpose2d" if name == "output_padding" else "conv2d"
    arrays = (zeros(1, 2, 4, 4), zeros(2, 2, 1, 1))
    good = 0 if name in ("padding", "output_padding") or value is False else 1
    options = {"stride": 2, "dilation": 2} if name == "output_padding" else {}
    if good or name != "stride":  # fill every cache with the equal integers: True == 1.0 == 1 are one dict key
        for accepted in (1, 0, (1, 1)):
            with contextlib.suppress(ConvArgumentError, TypeError):  # groups=(1, 1), stride=0
                getattr(pc, function)(*arrays, **{**options, name: accepted}, device=device)
    text = refuses((TypeError, ConvArgumentError), name, function, *arrays, **options, **{name: value})
    assert "integer" in text or "single integer value" in text or "pairs" in text


@pytest.mark.parametrize("value", [2, 2**31, 2**40, 2**63, 2**100, -(2**63), 10**30], ids=str)
@pytest.mark.parametrize("name", ["stride", "padding", "dilation", "groups"])
def test_large_integers_are_refused_or_right(device, name, value):
    """The kernels hold these as 32-bit constants: a value must not come out of the compiler as another one."""
    x, w = np.arange(1, 6, dtype="f").reshape(1, 1, 5), np.ones((1, 1, 2), "f")
    try:
        got = pc.conv1d(x, w, **{name: value}, device=device)
    except (ConvArgumentError, OverflowError):
        return
    if name == "stride" and value > 0:
        assert got.tolist() == [[[3.0, 7.0]]] if value == 2 else [[[3.0]]]
    else:
        assert value == 2


@pytest.mark.parametrize("far", [2**31 - 2, 2**31, 2**32, 2**33])
def test_a_tap_far_outside_the_image_reads_zero(device, far):
    """padding and dilation of 2^32 wrap to 0 in 32 bits: tap 0 would read x[0] instead of nothing."""
    x, w = np.full((1, 1, 1), 3, "f"), np.array([[[5, 7]]], "f")
    try:
        got = pc.conv1d(x, w, padding=((far, 0),), dilation=far, device=device)
    except ConvArgumentError:
        return
    assert got.tolist() == [[[21.0]]]


NOT_ARRAYS = [None, 1, 2.5, "x", [[[[1.0]]]], (1.0,), {}, object(), b"1234", memoryview(b"1234"), range(4), np.float32(1)]


@pytest.mark.parametrize("number, name", by_turns(range(len(NOT_ARRAYS)), ["input", "weight", "bias", "out"], rounds=2))
def test_what_is_no_array_is_refused(refuses, name, number):
    value = NOT_ARRAYS[number]
    if value is None and name in ("bias", "out"):
        pytest.skip("None means: without")
    arrays = {"input": X, "weight": W, "bias": B, name: value}
    text = refuses(TypeError, f"{name} must be a numpy.ndarray, a torch.Tensor", "conv2d", **arrays)
    assert type(value).__qualname__ in text


@pytest.mark.parametrize("name", ["input", "weight", "bias"])
def test_masked_arrays_are_refused_with_the_reason(refuses, name):
    arrays = {"input": X, "weight": W, "bias": B}
    arrays[name] = np.ma.masked_array(arrays[name])
    refuses(TypeError, rf"{name} is a masked array.* pass {name}.filled\(value\), or {name}.data", "conv2d", **arrays)


@pytest.mark.parametrize("dtype", ["object", "longdouble", "S4", "U4", "V2", "M8[s]", "f4,f4"])
@pytest.mark.parametrize("function", ["conv2d", "conv_transpose2d"])
def test_dtypes_without_a_kernel(refuses, function, dtype):
    x, w = zeros(1, 2, 4, 4, dtype=dtype), zeros(2, 2, 3, 3, dtype=dtype)
    text = refuses(
        TypeError, r"^input has the type .*, but a convolution takes arrays of float16, .* and integers of 8 to 64 bits: ", function, x, w
    )
    assert x.dtype.name in text
    advice = {"str": "pass numbers", "void16": "ml_dtypes.bfloat16", "void": "one of its fields", "object": "input.astype('float64')"}
    for kind, words in advice.items():
        if x.dtype.name.startswith(kind) and not (kind == "void" and x.dtype.itemsize == 2):
            assert words in text
    for name, arrays in (("input", (x, zeros(*w.shape))), ("weight", (zeros(*x.shape), w))):
        refuses(TypeError, re.escape(f"{name} has the type {x.dtype.name}, but"), function, *arrays)  # before types are compared


def _backwards(array):
    """The same elements, as a view that runs backwards along every axis."""
    return np.flip(np.flip(array).copy())


@pytest.mark.parametrize("name", ["input", "weight", "bias", "scale", "residual"])
def test_views_that_run_backwards_are_taken(device, name):
    rng = np.random.default_rng(0)
    shapes = {"input": X.shape, "weight": W.shape, "bias": (6,), "scale": (6,), "residual": (2, 6, 6, 7)}
    arrays = {other: rng.integers(-4, 5, shape).astype("f") for other, shape in shapes.items()}
    expected = pc.conv2d(**arrays, device=device)
    view = _backwards(arrays[name])
    assert max(view.strides) < 0
    arrays[name] = view
    assert np.array_equal(pc.conv2d(**arrays, device=device), expected)
    problem = ConvProblem.forward(2, X.shape, W.shape, (6,), scale_shape=(6,), residual_shape=(2, 6, 6, 7))
    plan = Plan(problem, device)
    assert np.array_equal(plan(**arrays), expected)
    residual = arrays.pop("residual")
    assert np.array_equal(plan.bind(arrays["weight"], arrays["bias"], arrays["scale"])(arrays["input"], residual=residual), expected)
    dy = rng.integers(-4, 5, residual.shape).astype("f")
    assert np.array_equal(
        pc.conv2d_weight(_backwards(X + 1), W.shape, _backwards(dy), device=device), pc.conv2d_weight(X + 1, W.shape, dy, device=device)
    )
    assert np.array_equal(pc.conv2d_bias(_backwards(dy), device=device), dy.sum((0, 2, 3)))


# ---- out

SHAPE = (2, 6, 6, 7)


def _read_only():
    out = zeros(*SHAPE)
    out.flags.writeable = False
    return out


BAD_OUT = [
    (zeros(2, 6, 6, 6), r"out must have shape \[2, 6, 6, 7\], but got out of shape \[2, 6, 6, 6\]"),
    (zeros(*SHAPE, dtype="float64"), "out must have dtype float32, the input's, but got float64"),
    (zeros(*SHAPE).astype(">f4"), "(?i)byte order|endian|native"),
    (np.asfortranarray(zeros(*SHAPE)), "out must be C-contiguous, but its strides are"),
    (zeros(*SHAPE)[::-1], "out must be C-contiguous, but its strides are"),
    (np.lib.stride_tricks.as_strided(zeros(7), SHAPE, (0, 0, 0, 4)), "out must be C-contiguous, but its strides are"),
    (_read_only(), "out is read-only"),
    (np.broadcast_to(zeros(1), SHAPE), "out is read-only"),
]


@pytest.mark.parametrize(("out", "text"), BAD_OUT, ids=range(len(BAD_OUT)))
def test_out_that_cannot_hold_the_result(refuses, out, text):
    before = out.tobytes()
    refuses(ConvArgumentError, text, "conv2d", X, W, B, out=out)
    assert out.tobytes() == before


@pytest.mark.parametrize("name", ["input", "weight", "bias"])
def test_out_that_overlaps_an_argument(refuses, name):
    """By one element at either end, and wholly."""
    case = {"input": zeros(1, 4, 3, 5), "weight": zeros(6, 4, 1, 1), "bias": zeros(6)}
    size, result = case[name].size, 6 * 15
    for offset in (0, size - 1, 1 - result):
        whole = zeros(size + 2 * result)
        out = whole[result + offset :][:result].reshape(1, 6, 3, 5)
        arrays = {**case, name: whole[result:][:size].reshape(case[name].shape)}
        refuses(ConvArgumentError, f"out overlaps {name} in memory", "conv2d", **arrays, out=out)


# ---- torch tensors on the CPU


@pytest.mark.parametrize("name", ["input", "weight", "bias", "out"])
def test_mixed_kinds(refuses, name):
    arrays = {"input": X, "weight": W, "bias": B, "out": zeros(*SHAPE)}
    arrays[name] = torch.from_numpy(arrays[name])
    text = refuses(TypeError, "pass arrays of one kind", "conv2d", **arrays)
    assert "numpy.ndarray" in text and "torch.Tensor" in text and (name == "input" or name in text)


def test_a_gradient_that_would_be_lost_is_refused(refuses, device):
    x, w, b = (torch.from_numpy(a.copy()) for a in (X, W, B))
    plan = Plan(pc.ConvProblem.forward(2, X.shape, W.shape, B.shape), device)
    out = plan(x, w, b)
    for needing in (x, w, b):
        needing.requires_grad_()
        refuses(ConvArgumentError, r"torch.no_grad\(\)", "conv2d", x, w, b, out=out)
        refuses(ConvArgumentError, r"torch.no_grad\(\)", "conv2d", x, w, b, stream=1)
        with pytest.raises(NotImplementedError, match=r"torch.no_grad\(\)"):
            plan(x, w, b)
        with torch.no_grad():
            assert not pc.conv2d(x, w, b, device=device, out=out).requires_grad
            assert not plan(x, w, b).requires_grad
        needing.requires_grad_(False)
    with pytest.raises(NotImplementedError, match=r"torch.no_grad\(\)"):
        plan.bind(w, b)(x.requires_grad_())
    x.requires_grad_(False)
    assert not pc.conv2d(x, w, b, device=device).requires_grad


def test_an_out_tensor_with_the_negative_bit_is_filled_or_refused(device):
    """numpy sees a copy of such a tensor; writing there would be lost."""
    x, w, b = (torch.from_numpy(a + 1) for a in (X, W, B))
    out = torch.complex(torch.zeros(SHAPE), torch.ones(SHAPE)).conj().imag
    assert out.is_neg()
    try:
        pc.conv2d(x, w, b, out=out, device=device)
    except ConvArgumentError:
        return
    assert torch.equal(out, torch.nn.functional.conv2d(x, w, b))


# ---- the rest


T = torch.zeros(X.shape), torch.zeros(W.shape), torch.zeros(B.shape)
HUGE_STRIDE = 2**29
OTHERS = [
    *((TypeError, f"padding must be integers.*'{word}'", "conv_transpose2d", (X, W[:4]), {"padding": word}) for word in ("same", "foo")),
    *((ConvArgumentError, "negative padding is not supported", function, (X, W[:4, :4]), {"padding": [[0, 0], [-3, 9]]}) for function in ("conv2d", "conv_transpose2d")),
    (ConvArgumentError, r"stride must be below 2\^29, but got \[1, 536870912\]", "conv2d", (X, W), {"stride": (1, HUGE_STRIDE)}),
    (ConvArgumentError, r"stride must be below 2\^29, but got \[536870912\]", "conv1d", (X[0], zeros(2, 8, 3)), {"stride": HUGE_STRIDE}),
    (ConvArgumentError, r"padding must be below 2\^29, but got \[536870912, 0\]", "conv1d", (X[0], zeros(2, 8, 3)), {"padding": ((HUGE_STRIDE, 0),)}),
    (TypeError, r"groups must be an integer, got \[1\] of type list", "conv2d", (X, W), {"groups": [1]}),
    (ConvArgumentError, r"Input type \(.*float32\) and weight type \(.*float64\) should be the same", "conv2d", (X, W.astype("f8"), B), {}),
    (ConvArgumentError, r"Input type \(.*float32\) and bias type \(.*float16\) should be the same", "conv2d", (X, W, B.astype("f2")), {}),
    (ConvArgumentError, r"Input type \(torch.FloatTensor\) and weight type \(torch.DoubleTensor\) should be the same", "conv2d", (T[0], T[1].double()), {}),
    (ConvArgumentError, r"Input type \(torch.FloatTensor\) and bias type \(torch.HalfTensor\) should be the same", "conv2d", (*T[:2], T[2].half()), {}),
    (ConvArgumentError, r"Input type \(torch.BFloat16Tensor\) and weight type \(torch.HalfTensor\) should be", "conv2d", (T[0].bfloat16(), T[1].half()), {}),
    *((ConvArgumentError, "out must have shape", "conv2d", (X[:batch], W), {"out": zeros(3, 3)}) for batch in (1, 0)),
    (ConvArgumentError, "out overlaps residual in memory", "conv2d", (X, W), {"out": (residual := zeros(*SHAPE)), "residual": np.flip(residual)}),
    *(((ConvArgumentError, TypeError), "precision must be one of", "conv2d", (X, W), {"precision": value}) for value in ("", "FP32", None, 32, ["fp32"], NAN)),
    *((TypeError, "stream", "conv2d", (X, W), {"stream": value}) for value in (-1, True, 1.5, "0", [], object())),
]  # fmt: skip


@pytest.mark.parametrize(("exception", "text", "function", "arrays", "options"), OTHERS, ids=range(len(OTHERS)))
def test_what_else_is_refused(refuses, exception, text, function, arrays, options):
    refuses(exception, text, function, *arrays, **options)


@pytest.mark.parametrize("value", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda: 1", "cuda:²", "opencl:0", "CPU", -1], ids=repr)
def test_unknown_device(value):
    with pytest.raises(ValueError, match="device must be None, a GPU's number") as raised:
        pc.conv2d(X, W, device=value)
    assert repr(value) in str(raised.value)
    assert isinstance(raised.value, ConvArgumentError)
    with pytest.raises(ConvArgumentError, match=re.escape(f"devices must be 'all' or a list of GPU numbers, got {value!r} in it")):
        pc.conv2d(X, W, devices=[value])


@pytest.mark.parametrize("value", [1.0, True, NAN, b"cuda", ("cuda", 0), ["cpu"], {}, object()], ids=lambda v: type(v).__name__)
def test_a_device_of_the_wrong_type(value):
    for options, name in (({"device": value}, "device"), ({"devices": [value]}, "devices")):
        with pytest.raises(TypeError, match=f"{name} must be"):
            pc.conv2d(X, W, **options)


def test_a_gpu_that_is_not_there():
    with pytest.raises(pc.BackendError, match=r"cuda:99|PyCUDA|no NVIDIA GPU|driver"):
        pc.conv2d(X, W, device="cuda:99")


def test_a_stream_where_there_is_no_gpu():
    if pc.runtime.default_backend() != "opencl":
        pytest.skip("this machine has a GPU")
    with pytest.raises(TypeError, match="stream is for GPUs"):
        pc.conv2d(X, W, stream=7, device="opencl")


def test_keywords_only_after_groups():
    for extra in (("fp32",), (None, "fp32")):
        with pytest.raises(TypeError, match="positional"):
            pc.conv2d(X, W, B, 1, 0, 1, 1, *extra)
    with pytest.raises(TypeError, match="output_padding"):
        pc.conv2d(X, W, output_padding=1)


# ---- tensors that kernels can't read

UNREADABLE = {
    "sparse": (lambda t: t.to_sparse(), r"shape \[.*\] has the layout torch.sparse_coo, which is not supported; pass its to_dense"),
    "mkldnn": (lambda t: t.to_mkldnn(), "has the layout torch._mkldnn, which is not supported; pass its to_dense"),
    "meta": (lambda t: t.to("meta"), "device 'meta'"),
    "nested": (lambda t: torch.nested.nested_tensor(list(t)), "nested tensors are not supported; pass a dense one"),
    "jagged": (lambda t: torch.nested.nested_tensor([t[0].flatten(1), t[1].flatten(1)[:, 1:]], layout=torch.jagged), "nested tensors are not supported"),
    "quantized": (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), "qint8"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("kind", UNREADABLE)
def test_tensors_that_kernels_cannot_read(kind, gradients, device):
    make, text = UNREADABLE[kind]
    x, w = torch.ones(2, 4, 8, 9), torch.ones(6, 4, 3, 3)
    odd_x, odd_w = make(x), make(w) if kind != "jagged" else make(w[:2])
    residual = make(torch.ones(2, 6, 6, 7))
    calls = [
        lambda: pc.conv2d(x, odd_w, device=device), lambda: pc.conv2d(x, w, residual=residual, device=device),
        lambda: pc.conv2d_weight(x, w.shape, residual, device=device),
        lambda: pc.conv2d(x, w, out=residual, device=device), lambda: Plan(ConvProblem.forward(2, x.shape, w.shape), device)(x, odd_w),
    ]  # fmt: skip
    if kind != "meta":  # all on meta is a question for shapes, and has an answer
        calls += [lambda: pc.conv2d(odd_x, w, device=device), lambda: pc.conv2d_bias(odd_x, device=device)]
    x.requires_grad_(gradients)
    for i, call in enumerate(calls):
        if gradients and i > 2:
            break  # these have none
        with pytest.raises((TypeError, ConvArgumentError)) as raised:
            call()
        told = str(raised.value)
        assert re.search(text, told) or (
            kind == "jagged" and "this plan takes" in told
        ) or "should be the same in device" in told, (i, told)


# ---- messages stay short


def test_a_whole_array_is_never_printed(refuses):
    large = zeros(300, 300)
    for name in ("stride", "padding", "dilation", "groups", "precision", "activation", "tune", "stream"):
        text = refuses(TypeError, f"{name} must be .*got an array of shape", "conv2d", X, W, **{name: large})
        assert "\n" not in text and len(text) < 200
    for name in ("device", "devices"):
        with pytest.raises(TypeError, match=r"must be .*got an array of shape") as raised:
            pc.conv2d(X, W, **{name: large})
        assert len(str(raised.value)) < 200
    for function, arguments in (("conv2d_input", (X, W, zeros(2, 6, 6, 7))), ("conv2d_weight", (X, W, zeros(2, 6, 6, 7)))):
        size = function.removeprefix("conv2d_")
        refuses(TypeError, rf"{size}_size must be the shape of the convolution's {size}, got an array of shape \[", function, *arguments)
    refuses(TypeError, "stride must be an integer or a list of one for each axis, got 'x{1,80}", "conv2d", X, W, stride="x" * 10**6)


def test_a_stream_of_inputs_that_is_none():
    with pytest.raises(TypeError, match="inputs must be an iterable of arrays, got None"):
        pc.conv2d_many(None, W)


HUGE = 2**62
TOO_LARGE = [  # the array that can't be, and what is asked
    ("input", "forward", (1, HUGE, 4, 4), (8, HUGE, 3, 3)), ("weight", "forward", (1, 8, 4, 4), (HUGE, 8, 3, 3)), ("input", "forward", (2**64, 8, 4, 4), (8, 8, 3, 3)),
    ("weight", "forward", (0, 2**31, 4, 4), (2**31, 2**31, 3, 3)), ("the result", "forward", (2**31, 8, 8, 8), (2**31, 8, 1, 1)), ("input", "forward", (HUGE, 0, 4, 4), (8, 0, 3, 3)),
    ("input", "transposed", (1, HUGE, 4, 4), (HUGE, 8, 3, 3)), ("weight", "transposed", (1, 8, 4, 4), (8, HUGE, 3, 3)), ("the result", "transposed", (2**40, 8, 64, 64), (8, 8, 1, 1)),
    ("input", "input", (HUGE, 8, 4, 4), (8, 8, 3, 3)), ("input", "weight", (HUGE, 8, 4, 4), (8, 8, 3, 3)), ("weight", "weight", (1, 8, 4, 4), (HUGE, 8, 3, 3)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "of", "x", "w"), TOO_LARGE)
def test_sizes_that_no_array_has_are_told_with_the_argument(name, of, x, w):
    options = {"stride": 2**10} if name == "the result" and of == "transposed" else {}
    size = {"input": x, "weight": w}.get(name)
    text = f"expected {name} to have fewer than 2^63 bytes, but got {name} of size {list(size) if size else '['}"
    with pytest.raises(ConvArgumentError, match=re.escape(text)):
        if of in ("input", "weight"):
            ConvProblem.gradient(of, 2, x, w, (x[0], w[0], 2, 2), **options)
        else:
            getattr(ConvProblem, of)(2, x, w, in_chunks=True, **options)


def test_sizes_that_an_array_may_have_are_taken():
    shapes = (2**20, 2**20, 2**11, 2**8), (1, 2**20, 1, 1)  # 2^59 elements
    assert ConvProblem.forward(2, *shapes, dtype="float64").input_shape == shapes[0]
    with pytest.raises(ConvArgumentError, match="expected input to have fewer than"):
        ConvProblem.forward(2, (2**21, *shapes[0][1:]), shapes[1], dtype="float64")


# ---- the problem and the plan check for themselves


SQUARE = (4, 4, 3, 3)
PROBLEMS = [
    ((4, (1, 1, 5, 5, 5, 5), (1, 1, 3, 3, 3, 3)), {}, ConvArgumentError, "ndim, the number of spatial axes, must be 1, 2 or 3, but got ndim=4"),
    ((2.0, X.shape, SQUARE), {}, TypeError, "ndim must be an integer, got 2.0"),
    ((2, (1.0, 4, 5.5, 5), SQUARE), {}, TypeError, "each size in input_shape must be an integer, got 1.0"),
    ((2, X.shape, (4, 4, 3, 3.0)), {}, TypeError, "each size in weight_shape must be an integer, got 3.0"),
    ((2, X.shape, SQUARE, (6.0,)), {}, TypeError, "each size in bias_shape must be an integer, got 6.0"),
    ((2, X.shape, SQUARE, 6), {}, TypeError, "bias_shape must be a shape, a tuple of integers, got 6"),
    ((2, 5, SQUARE), {}, TypeError, "input_shape must be a shape"),
    ((2, X, SQUARE), {}, TypeError, "each size in input_shape must be an integer, got an array of shape"),
    ((2, (-1, 4, 5, 5), SQUARE), {}, ConvArgumentError, "input_shape must not hold negative sizes, but got [-1, 4, 5, 5]"),
    ((2, X.shape, (4, 4, -3, 3)), {}, ConvArgumentError, "weight_shape must not hold negative sizes"),
    ((2, X.shape, SQUARE), {"dtype": []}, TypeError, "but got dtype=[]"),
    ((2, X.shape, SQUARE), {"precision": X}, ConvArgumentError, "precision must be one of ('fp32', 'tf32'), but got precision=an array"),
    ((2, X.shape, SQUARE), {"layout": X}, ConvArgumentError, "layout must be one of ('NCHW', 'NHWC'), but got layout=an array"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "options", "exception", "text"), PROBLEMS, ids=range(len(PROBLEMS)))
@pytest.mark.parametrize("make", [ConvProblem.forward, ConvProblem.transposed], ids=["forward", "transposed"])
def test_what_makes_no_problem(make, arguments, options, exception, text):
    with pytest.raises(exception, match=re.escape(text)):
        make(*arguments, **options)


def test_what_makes_no_plan(device):
    problem = ConvProblem.forward(2, X.shape, W.shape)
    for arguments, options, text in (
        ((None,), {}, "problem must be a ConvProblem, as ConvProblem.forward makes it, got None"), ((X,), {}, "problem must be a ConvProblem.* an array of shape"),
        ((problem,), {"config": 3}, "config must be one of the configurations in pycuda_conv.engines, or None, got 3"),
        ((problem,), {"tune": 1}, "tune must be True or False, got 1"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=text):
            Plan(*arguments, device, **options)


def test_more_images_than_a_launch_can_take(device):
    with pytest.raises(
        ConvArgumentError, match="too large for one launch of at most 2,147,483,647 blocks; convolve fewer images at a time"
    ):
        Plan(ConvProblem.forward(2, (2**40, 1, 5, 5), (1, 1, 3, 3)), device)


def test_a_problem_can_be_made_without_arrays_or_devices():
    problem = ConvProblem.forward(2, (8, 16, 32, 30), (24, 8, 3, 5), (24,), stride=2, padding=((1, 0), (2, 2)), groups=2)
    assert problem.result_shape == (8, 24, 16, 15) and problem.bias_shape == (24,)
    assert problem.macs == 8 * 24 * 16 * 15 * 8 * 15 and problem.flops == 2 * problem.macs
    assert problem.bytes == 4 * (8 * 16 * 32 * 30 + 24 * 8 * 15 + 8 * 24 * 16 * 15 + 24)
    assert str(problem) == "conv2d 8x16x32x30 -> 24x16x15 k3x5 s2 p1+0x2 g2 float32"
    assert hash(problem) == hash(
        ConvProblem.forward(2, (8, 16, 32, 30), (24, 8, 3, 5), (24,), stride=(2, 2), padding=((1, 0), (2, 2)), groups=2)
    )
    with pytest.raises(AttributeError):
        problem.N = 3


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_the_transposed_problem_undoes_the_shapes_of_the_forward_one(rank):
    shape = (2, 6, *(11, 12, 13)[-rank:])
    forward = ConvProblem.forward(rank, shape, (9, 2, *(3, 2, 4)[-rank:]), stride=2, padding=1, dilation=2, groups=3)
    size = forward.result_shape[2:]
    for extra in np.ndindex((2,) * rank):
        back = ConvProblem.transposed(
            rank, forward.result_shape, forward.weight_shape, stride=2, padding=1, dilation=2, groups=3, output_padding=extra
        )
        again = ConvProblem.forward(rank, back.result_shape, forward.weight_shape, stride=2, padding=1, dilation=2, groups=3)
        assert again.result_shape[2:] == size and back.macs == forward.macs


def test_more_than_two_to_the_31_pixels_in_a_channel_are_refused():
    for make, shape, weight, options in (
        (ConvProblem.forward, (1, 1, 2**16, 2**15), (1, 1, 1, 1), {}),
        (ConvProblem.forward, (1, 1, 2**15, 2**15), (1, 1, 1, 1), {"padding": 2**14}),
        (ConvProblem.transposed, (1, 1, 2**15, 2**15), (1, 1, 2, 2), {"stride": 2}),
    ):
        with pytest.raises(ConvArgumentError, match=r"has \(.*\) elements; at most 2\^31 - 1 are supported"):
            make(2, shape, weight, **options)


PLAN_CALLS = [
    ((X[:1], W, B), {}, ConvArgumentError, r"this plan takes input of shape \(2, 4, 8, 9\), but got \(1, 4, 8, 9\)"),
    ((X, W), {}, ConvArgumentError, r"this plan takes bias of shape \(6,\), but got None"),
    ((X, W, B[:2]), {}, ConvArgumentError, "this plan takes bias of shape"),
    ((X.astype("f8"), W.astype("f8"), B.astype("f8")), {}, ConvArgumentError, "this plan takes float32 arrays, but input is float64"),
    ((X, W.astype("f8"), B), {}, ConvArgumentError, "should be the same"),
    ((X, W.tolist(), B), {}, TypeError, "weight must be a numpy.ndarray"),
    ((X, W, B), {"out": zeros(2, 6, 6, 6)}, ConvArgumentError, "out must have shape"),
    ((X, W, B), {"stream": "x"}, TypeError, "stream must be"),
]


@pytest.mark.parametrize(("arrays", "options", "exception", "text"), PLAN_CALLS, ids=range(len(PLAN_CALLS)))
def test_a_plan_refuses_arrays_that_are_not_its_own(device, monkeypatch, arrays, options, exception, text):
    plan = Plan(ConvProblem.forward(2, X.shape, W.shape, B.shape), device)
    for owner, name in ((type(plan.device), "run_on_host_arrays"), (pipeline, "_Pipeline"), (pipeline, "_convolve_small")):
        monkeypatch.setattr(owner, name, lambda *_: pytest.fail("the device was reached"))
    with pytest.raises(exception, match=text):
        plan(*arrays, **options)


# ---- closed lists of words


@pytest.mark.parametrize(("call", "meant"), [
    (lambda: pc.conv2d(X, W, activation="leakyrelu"), "leaky_relu"),
    (lambda: pc.conv2d(X, W, activation="ReLU"), "relu"),
    (lambda: pc.conv2d(X, W, activation=("leaky_relo", 0.1)), "leaky_relu"),
    (lambda: pc.conv2d(X, W, padding="smae"), "same"),
    (lambda: pc.conv2d(X, W, padding="VALID"), "valid"),
    (lambda: pc.conv2d(X, W, precision="fp23"), "fp32"),
    (lambda: pc.conv2d(X, W, device="gpu"), "cuda"),
    (lambda: pc.conv2d(X, W, device="GPU:1"), "cuda:1"),
    (lambda: pc.conv2d(X, W, device="opencv"), "opencl"),
    (lambda: pc.conv2d(X, W, devices="ALL"), "all"),
    (lambda: pc.ConvProblem.forward(2, X.shape, W.shape, dtype="float23"), "float32"),
    (lambda: pc.ConvProblem.forward(2, X.shape, W.shape, layout="nwhc"), None),
    (lambda: pc.ConvProblem.forward(2, X.shape, W.shape, layout="NHCW"), None),
    (lambda: pc.ConvProblem.gradient("weights", 2, X.shape, W.shape, (2, 6, 6, 7)), "weight"),
    (lambda: pc.conv2d(X, W, activation="swiglu"), None),
    (lambda: pc.conv2d(X, W, device="tpu"), "cpu"),
])
def test_the_word_that_was_meant_is_named(call, meant):
    with pytest.raises((ValueError, TypeError)) as raised:
        call()
    text = str(raised.value)
    if meant is not None:
        assert text.endswith(f"; did you mean {meant!r}?")


@pytest.mark.parametrize("value", [[[1.0]], np.float32(1), __import__("PIL.Image").Image.new("L", (4, 4))])
def test_what_numpy_makes_an_array_of_is_told_so(value):
    with pytest.raises(TypeError, match=r"numpy.asarray\(input, 'float32'\) makes an array of it"):
        pc.conv2d(value, W)
