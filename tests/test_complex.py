"""Complex numbers: against torch's convolutions in complex128, with gradients by torch."""

import numpy as np
import pytest
import torch

import pycuda_conv as pc
from pycuda_conv import ConvArgumentError

F = torch.nn.functional


def drawn(rng, shape, dtype):
    values = rng.integers(-4, 5, shape) + 1j * rng.integers(-4, 5, shape)
    return values.real.astype(dtype) if np.dtype(dtype).kind != "c" else values.astype(dtype)


@pytest.mark.pairs
@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("of_x", "of_w"),
    [("complex64", "complex64"), ("complex64", "float32"), ("float32", "complex64"), ("complex128", "complex128"), ("complex64", "int8")]
)
def test_whole_numbers_are_exact(device, ndim, groups, of_x, of_w):
    rng = np.random.default_rng(ndim)
    x, w = drawn(rng, (2, 2 * groups, *(8, 7, 6)[:ndim]), of_x), drawn(rng, (3 * groups, 2, *(3, 2, 3)[:ndim]), of_w)
    wide = [torch.from_numpy(a.astype(complex)) for a in (x, w)]
    y = getattr(pc, f"conv{ndim}d")(x, w, padding=1, stride=2, groups=groups, device=device)
    assert y.dtype == np.result_type(np.complex64, of_x)
    np.testing.assert_array_equal(y, getattr(F, f"conv{ndim}d")(*wide, padding=1, stride=2, groups=groups))
    w = drawn(rng, (2 * groups, 3, *(3, 2, 3)[:ndim]), of_w)
    expected = getattr(F, f"conv_transpose{ndim}d")(wide[0], torch.from_numpy(w.astype(complex)), padding=1, stride=2, groups=groups)
    np.testing.assert_array_equal(getattr(pc, f"conv_transpose{ndim}d")(x, w, padding=1, stride=2, groups=groups, device=device), expected)


def test_an_image_a_border_and_what_follows(device):
    rng = np.random.default_rng(4)
    x, w, b, s = (drawn(rng, shape, "complex64") for shape in ((9, 8), (3, 3), (1,), (1,)))
    r = drawn(rng, (9, 8), "complex64")
    wide = np.pad(x, 1, constant_values=2.0)
    exact = F.conv2d(
        torch.from_numpy(wide[None, None].astype(complex)), torch.from_numpy(w[None, None].astype(complex))
    )[0, 0].numpy() * s + b + r
    out = np.empty_like(r)
    made = pc.conv2d(x, w, b, scale=s, residual=r, padding=1, padding_mode="constant", padding_value=2.0, out=out, device=device)
    assert made is out
    np.testing.assert_array_equal(out, exact)


def test_an_imaginary_part_that_is_small(device):
    rng = np.random.default_rng(5)
    x, w = (rng.standard_normal(shape) + 1e-4j * rng.standard_normal(shape) for shape in ((1, 4, 20, 20), (4, 4, 5, 5)))
    y = pc.conv2d(x.astype("complex64"), w.astype("complex64"), device=device)
    exact = F.conv2d(*(torch.from_numpy(a.astype("complex64").astype(complex)) for a in (x, w))).numpy()
    assert abs(y.imag - exact.imag).max() < 1e-6 * abs(exact.imag).max() and abs(y.real - exact.real).max() < 1e-6 * abs(exact.real).max()


def test_torch_and_its_gradients(where):
    rng = np.random.default_rng(6)
    x, w = (torch.from_numpy(drawn(rng, shape, "complex128")).to(where).requires_grad_() for shape in ((2, 4, 6, 5), (6, 2, 3, 3)))
    y, expected = pc.conv2d(x, w, groups=2, padding=1), F.conv2d(x, w, groups=2, padding=1)
    torch.testing.assert_close(y, expected)
    dy = torch.from_numpy(drawn(rng, tuple(y.shape), "complex128")).to(where)
    for one, other in zip(torch.autograd.grad(y, (x, w), dy), torch.autograd.grad(expected, (x, w), dy), strict=True):
        torch.testing.assert_close(one, other)


def test_dask():
    da = pytest.importorskip("dask.array")
    rng = np.random.default_rng(7)
    x, w = drawn(rng, (2, 2, 9, 8), "complex64"), drawn(rng, (3, 2, 3, 3), "complex64")
    y = pc.conv2d(da.from_array(x, chunks=(1, 2, 4, 5)), w, padding=1, padding_mode="circular", device="opencl")
    assert y.dtype == np.complex64
    np.testing.assert_array_equal(y.compute(scheduler="sync"), pc.conv2d(x, w, padding=1, padding_mode="circular", device="opencl"))


def test_what_is_refused():
    x, w = np.ones((1, 1, 5, 5), "complex64"), np.ones((1, 1, 3, 3), "complex64")
    for options in ({"activation": "relu"}, {"dtype": "uint8"}):
        with pytest.raises(ConvArgumentError, match="is for real numbers, but the arrays are of complex ones"):
            pc.conv2d(x, w, **options)
    with pytest.raises(TypeError, match="grad_output has the type complex64, but conv2d_input takes complex numbers of numpy"):
        pc.conv2d_input(x.shape, w, np.ones((1, 1, 3, 3), "complex64"))
    with pytest.raises(ConvArgumentError, match="out must have dtype complex64"):
        pc.conv2d(x, w, out=np.ones((1, 1, 3, 3), "complex128"))
    with pytest.raises(ConvArgumentError, match=r"out must have shape \[1, 1, 3, 3\]"):
        pc.conv2d(x, w, out=np.ones((1, 1, 3, 4), "complex64"))
    with pytest.raises(ConvArgumentError, match="should be the same"):
        pc.conv2d(x, w.astype("complex128"))
