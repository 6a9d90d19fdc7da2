"""Signals in pieces: the numbers of the padded signal, the bits of the whole signal at once, and what is refused."""

import numpy as np
import pytest
import torch

import pycuda_conv as pc
from pycuda_conv import ConvArgumentError, streaming


class Drawn:
    """A layer, a signal, and where it is cut."""

    def __init__(self, seed: int, transposed: bool, ndim: int, depthwise: bool = False) -> None:
        rng = self.rng = np.random.default_rng(seed)
        self.ndim, self.transposed = ndim, transposed
        groups = int(rng.integers(2, 5)) if depthwise else int(rng.integers(1, 3))
        c, k = (groups, groups) if depthwise else (groups * int(rng.integers(1, 4)), groups * int(rng.integers(1, 4)))
        taps, dilation = int(rng.integers(1, 8)), int(rng.integers(1, 4))
        self.reach = dilation * (taps - 1) + 1
        self.stride = int(rng.integers(1, 5)) if transposed else int(rng.integers(1, min(self.reach, 4) + 1))
        if transposed and self.stride > self.reach:
            self.stride = self.reach
        self.n = int(rng.integers(5, 40))
        shape = (self.n, *map(int, rng.integers(3, 6, ndim - 1)))
        filter_shape = (taps, *(3,) * (ndim - 1))
        self.x = rng.standard_normal((int(rng.integers(1, 3)), c, *shape)).astype(np.float32)
        self.w = rng.standard_normal((c, k // groups, *filter_shape) if transposed else (k, c // groups, *filter_shape)).astype(np.float32)
        self.b = rng.standard_normal(k).astype(np.float32)
        ones = (1,) * (ndim - 1)
        self.options = {"stride": (self.stride, *ones), "dilation": (dilation, *ones), "groups": groups, "padding": (0, *ones)}
        self.function = getattr(pc, f"conv{'_transpose' * transposed}{ndim}d")

    def cuts(self):
        """Pieces of drawn lengths, some of them without an input."""
        at = 0
        while at < self.n:
            m = min(int(self.rng.integers(0, 7)), self.n - at)
            yield at, at + m
            at += m

    def in_pieces(self, x, w, b, start: str):
        state, parts = start, []
        for first, last in self.cuts():
            y, state = self.function(x[:, :, first:last], w, b, state=state, **self.options)
            parts.append(y)
        return parts, state

    def expected(self, start: str):
        """The whole signal with its padding, by the same function without a state."""
        others = [(1, 1)] * (self.ndim - 1)
        if self.transposed:
            return self.function(self.x, self.w, self.b, **self.options | {"padding": ((0, self.reach - self.stride), *others)})
        modes = [(start, "zeros"), *["zeros"] * (self.ndim - 1)]
        return self.function(
            self.x, self.w, self.b, **self.options | {"padding": ((self.reach - self.stride, 0), *others), "padding_mode": modes}
        )


@pytest.mark.pairs
@pytest.mark.parametrize("depthwise", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("ndim", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_any_cuts_give_the_bits_of_the_whole(seed, ndim, transposed, depthwise):
    drawn = Drawn(1000 * ndim + 100 * transposed + 10 * depthwise + seed, transposed, ndim, depthwise)
    for start in ("zeros",) if transposed else ("zeros", "replicate"):
        whole, last = drawn.function(drawn.x, drawn.w, drawn.b, state=start, **drawn.options)
        expected = drawn.expected(start)
        np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-5)
        parts, state = drawn.in_pieces(drawn.x, drawn.w, drawn.b, start)
        np.testing.assert_array_equal(np.concatenate(parts, 2), whole)
        np.testing.assert_array_equal(state, last)


@pytest.mark.parametrize("transposed", [False, True])
def test_tensors_and_their_gradients(transposed):
    """The gradients of all pieces together are those of the whole signal."""
    drawn = Drawn(7 + transposed, transposed, 1)
    x, w, b = (torch.from_numpy(a) for a in (drawn.x, drawn.w, drawn.b))
    with torch.no_grad():
        parts, _ = drawn.in_pieces(x, w, b, "zeros")
        whole, _ = drawn.function(x, w, b, state="zeros", **drawn.options)
    assert torch.equal(torch.cat(parts, 2), whole)
    found = []
    for way in (lambda *a: torch.cat(drawn.in_pieces(*a, "zeros")[0], 2), lambda *a: drawn.function(*a, state="zeros", **drawn.options)[0]):
        leaves = [a.double().requires_grad_() for a in (x, w, b)]
        y = way(*leaves)
        found.append(torch.autograd.grad(y.square().sum(), leaves))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "transposed, depthwise, ndim, stride", [(False, False, 1, 1), (False, False, 1, 3), (True, False, 1, 2), (False, True, 3, 1)]
)
def test_pieces_alike_are_found_again(place, transposed, depthwise, ndim, stride, monkeypatch):
    """After the first two, what decides about a piece is known; the bits are those of the whole signal."""
    if place == "cpu":  # where every piece is decided anew
        monkeypatch.setattr(streaming, "_name", lambda kind, call, operands, state: None if isinstance(state, str) else (
            call, tuple(operands.input.shape), operands.input.stride(), tuple(operands.weight.shape), tuple(state.shape),
            operands.bias is None))
    streaming._made.clear()
    torch.manual_seed(0)
    function = getattr(pc, f"conv{'_transpose' * transposed}{ndim}d")
    options = {"groups": 4 if depthwise else 1, "stride": (stride,) + (1,) * (ndim - 1)}
    x = torch.randn(1, 4, 24, *(6, 5)[: ndim - 1], device=place)
    w, b = torch.randn(4, 1 if depthwise else 4, *(4,) * ndim, device=place), torch.randn(4, device=place)
    with torch.no_grad():
        whole, _ = function(x, w, b, state="zeros", **options)
        state, parts, decided = "zeros", [], []
        layer_of = streaming.layer_of
        monkeypatch.setattr(streaming, "layer_of", lambda *given: decided.append(len(parts)) or layer_of(*given))
        for first in range(0, 24, 6):
            y, state = function(x[:, :, first : first + 6], w, b, state=state, **options)
            parts.append(y)
    assert torch.equal(torch.cat(parts, 2), whole) and decided[:2] == [0, 1] and len(decided) < 4


def test_frames_of_channels_last_volumes():
    """Layout and numbers as those of the whole volume; the state lies as the input does."""
    torch.manual_seed(0)
    x, w = torch.randn(1, 4, 9, 6, 5).contiguous(memory_format=torch.channels_last_3d), torch.randn(6, 4, 3, 3, 3)
    with torch.no_grad():
        whole, _ = pc.conv3d(x, w, padding=(0, 1, 1), state="replicate")
        state, parts = "replicate", []
        for first, last in ((0, 1), (1, 5), (5, 6), (6, 9)):
            y, state = pc.conv3d(x[:, :, first:last], w, padding=(0, 1, 1), state=state)
            parts.append(y)
    assert torch.equal(torch.cat(parts, 2), whole) and state.shape == (1, 4, 2, 6, 5)
    front = torch.cat([x[:, :, :1]] * 2 + [x], 2)
    assert torch.allclose(whole, torch.nn.functional.conv3d(front, w, padding=(0, 1, 1)), atol=1e-4)


def test_epilogue_integers_and_signals_without_an_axis_for_images():
    rng = np.random.default_rng(3)
    x, w, s = rng.standard_normal((3, 12)).astype("f"), rng.standard_normal((4, 3, 3)).astype("f"), rng.standard_normal(4).astype("f")
    whole = pc.conv1d(x, w, s, padding=((2, 0),), scale=s, activation="relu")
    state, parts = "zeros", []
    for first in range(0, 12, 4):
        y, state = pc.conv1d(x[:, first : first + 4], w, s, state=state, scale=s, activation="relu")
        parts.append(y)
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=1e-5, atol=1e-6)
    samples = rng.integers(-100, 100, (1, 3, 12)).astype(np.int16)
    (first, state), expected = pc.conv1d(samples[..., :5], w, state="zeros"), pc.conv1d(samples.astype("f"), w, padding=((2, 0),))
    second, _ = pc.conv1d(samples[..., 5:], w, state=state)
    assert state.dtype == np.int16
    np.testing.assert_allclose(np.concatenate([first, second], 2), expected, rtol=1e-4, atol=1e-3)


def test_latency_of_a_transposed_layer():
    """Its padding is taken off the signal's start alone."""
    rng = np.random.default_rng(4)
    x, w = rng.standard_normal((1, 3, 10)).astype("f"), rng.standard_normal((3, 2, 4)).astype("f")
    whole = pc.conv_transpose1d(x, w, stride=2, padding=((1, 2),))
    first, state = pc.conv_transpose1d(x[..., :4], w, stride=2, padding=((1, 0),), state="zeros")
    second, _ = pc.conv_transpose1d(x[..., 4:], w, stride=2, padding=((1, 0),), state=state)
    assert first.shape[2] == 7 and second.shape[2] == 12
    np.testing.assert_allclose(np.concatenate([first, second], 2), whole, rtol=1e-5, atol=1e-6)


X, W = np.zeros((2, 3, 8), "f"), np.zeros((4, 3, 3), "f")
STATE = np.zeros((2, 3, 2), "f")


@pytest.mark.parametrize(
    "function, options, error, text",
    [
        ("conv1d", {"state": "zero"}, ConvArgumentError, "did you mean 'zeros'"),
        ("conv1d", {"state": 3}, TypeError, "state must be one of"),
        ("conv1d", {"state": STATE[..., :1]}, ConvArgumentError, r"expected state of size \[2, 3, 2\] for this input, but got \[2, 3, 1\]"),
        ("conv1d", {"state": STATE[:1]}, ConvArgumentError, r"expected state of size \[2, 3, 2\]"),
        ("conv1d", {"state": np.zeros((2, 3, 7), "f"), "stride": 2}, ConvArgumentError, r"expected state of size \[2, 3, 1 to 2\]"),
        ("conv1d", {"state": STATE.astype("d")}, TypeError, "state must have the input's dtype, float32, but got float64"),
        ("conv1d", {"state": STATE, "padding": 1}, ConvArgumentError, "state takes the place of the padding"),
        ("conv1d", {"state": STATE, "padding": "same"}, ConvArgumentError, "state takes the place of the padding"),
        ("conv1d", {"state": STATE, "stride": 4}, ConvArgumentError, "a stride of at most the filter's reach, 3"),
        ("conv1d", {"state": STATE, "upsample": 2}, ConvArgumentError, "state and upsample exclude each other"),
        ("conv1d", {"state": STATE, "algorithm": "fft"}, ConvArgumentError, "state and algorithm='fft' exclude each other"),
        ("conv1d", {"state": STATE, "tune": True}, ConvArgumentError, "state goes with neither devices nor tune"),
        ("conv1d", {"state": STATE, "devices": "all"}, ConvArgumentError, "state goes with neither devices nor tune"),
        ("conv_transpose1d", {"state": "replicate"}, ConvArgumentError, "begins with state='zeros' or an array"),
        ("conv_transpose1d", {"state": "zeros", "padding": 1}, ConvArgumentError, "takes no padding behind"),
        ("conv_transpose1d", {"state": "zeros", "stride": 2, "output_padding": 1}, ConvArgumentError, "no output_padding"),
    ],
)  # fmt: skip
def test_what_is_refused(function, options, error, text):
    w = np.zeros((3, 4, 3), "f") if "transpose" in function else W
    with pytest.raises(error, match=text):
        getattr(pc, function)(X, w, **options)


def test_other_arrays_are_refused():
    da = pytest.importorskip("dask.array")
    with pytest.raises(TypeError, match="state is for arrays of numpy, torch, CuPy and PyCUDA"):
        pc.conv1d(da.from_array(X, chunks=4), W, state="zeros")
    with pytest.raises(ConvArgumentError, match="takes an input with channels"):
        pc.conv1d(np.zeros(8, "f"), np.zeros(3, "f"), state="zeros")
    with pytest.raises(TypeError):
        pc.conv1d(X, W, state=torch.zeros(2, 3, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_bits_on_a_gpu(dtype):
    """Layers of audio and video decoders: dense, depthwise and transposed signals, volumes in both layouts."""
    own = getattr(torch, dtype)
    torch.manual_seed(2)
    layers = [
        ("conv1d", (2, 128, 700), (96, 128, 7), {}), ("conv1d", (2, 64, 700), (64, 64, 3), {"dilation": 9}),
        ("conv1d", (1, 96, 901), (96, 1, 5), {"groups": 96}), ("conv1d", (2, 64, 600), (128, 64, 8), {"stride": 4}),
        ("conv_transpose1d", (1, 128, 200), (128, 64, 16), {"stride": 8}), ("conv1d", (1, 1, 4000), (32, 1, 7), {}),
        ("conv3d", (1, 64, 9, 20, 24), (96, 64, 3, 3, 3), {"padding": (0, 1, 1)}),
        ("conv3d", (1, 16, 6, 12, 12), (64, 16, 3, 1, 1), {"padding": 0}), ("conv1d", (2, 128, 900), (1, 128, 7), {}),
        ("conv3d", (1, 96, 9, 20, 24), (3, 96, 3, 3, 3), {"padding": (0, 1, 1)}),
    ]  # fmt: skip
    for name, shape, filter_shape, options in layers:
        for last in (False, True) if "3d" in name else (False,):
            x, w = torch.randn(shape, device="cuda").to(own), (torch.randn(filter_shape, device="cuda") / 20).to(own)
            order = torch.channels_last_3d if last else torch.contiguous_format
            x, function = x.contiguous(memory_format=order), getattr(pc, name)
            whole, _ = function(x, w, state="zeros", **options)
            state, parts, at = "zeros", [], 0
            for m in (1, 2, 5, 17, 4, 1000, 10**9):
                piece = x[:, :, at : at + m]
                if not piece.shape[2]:
                    continue
                y, state = function(piece, w, state=state, **options)
                parts.append(y)
                at += m
            assert torch.equal(torch.cat(parts, 2), whole), (name, shape, filter_shape, options, last)
