"""torch's own samples and wrong calls (OpInfo, which ships with torch) for the six functions."""

import warnings
from functools import cache

import numpy as np
import pytest
import torch
from reference import EPS, assert_close

import pycuda_conv as pc


@cache
def database() -> dict:
    """By name; importing it takes seconds."""
    try:  # a private module: it may move
        from torch.testing._internal.common_methods_invocations import op_db
    except Exception as error:  # pragma: no cover
        pytest.skip(f"torch's OpInfo database is not importable: {error}")
    # importing it forbids the whole process to set cudnn's flags, which the benchmark's tests do
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    return {op.name.rpartition(".")[2]: op for op in op_db if op.name.startswith("nn.functional.conv")}


NAMES = ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"]
WHERE = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def options(where, device):
    """Host tensors go to the device under test; a GPU's stay on theirs."""
    if where == "cuda":
        if device == "opencl" or not torch.cuda.is_available():
            pytest.skip("tensors on a GPU are convolved there")
        return {}
    return {"device": device}


def tensors(function, sample):
    return [function(a.cpu().double()) if isinstance(a, torch.Tensor) else a for a in (sample.input, *sample.args)]


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", WHERE)
def test_samples_agree_with_torch(device, where, name, dtype):
    keywords = options(where, device)
    function, count = getattr(torch.nn.functional, name), 0
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch's own, about even kernels
        for sample in database()[name].sample_inputs(where, getattr(torch, dtype)):
            got = getattr(pc, name)(sample.input, *sample.args, **sample.kwargs, **keywords)
            assert got.device == sample.input.device and got.dtype == sample.input.dtype
            expected, magnitude = (function(*tensors(f, sample), **sample.kwargs).numpy() for f in (lambda t: t, torch.abs))
            weight = sample.args[0]
            depth = (weight[:, 0] if name.startswith("conv_transpose") else weight[0]).numel()
            bound = 4 * EPS[dtype] * depth**0.5 * magnitude + EPS[dtype] * np.abs(expected)
            assert_close(got.cpu().numpy(), expected, bound, f"{[a.shape for a in tensors(abs, sample) if a is not None]} {sample.kwargs}")
            count += 1
    assert count >= 10


@pytest.mark.parametrize("name", NAMES[:3])  # torch lists no wrong calls for the transposed ones
@pytest.mark.parametrize("where", WHERE)
def test_wrong_calls_are_refused_as_torch_refuses_them(device, where, name):
    keywords = options(where, device)
    count = 0
    for error in database()[name].error_inputs(where):
        sample, words = error.sample_input, error.error_regex
        if sample.args[0].ndim != sample.input.ndim == int(name[-2]) + 2:  # torch speaks of the input there, or of three dimensions
            words = f"Expected {sample.input.ndim}-dimensional weight for {name}, .* but got {sample.args[0].ndim}-dimensional weight"
        kind = error.error_type
        given = [t for t in (sample.input, *sample.args, *sample.kwargs.values()) if isinstance(t, torch.Tensor)]
        if not all(t.is_floating_point() for t in given):  # torch refuses types that differ; integers and complex numbers are taken here
            first, *others = [t.to(torch.complex128 if any(t.is_complex() for t in given) else torch.float64) for t in given]
            got = getattr(pc, name)(sample.input, *sample.args, **sample.kwargs, **keywords)
            torch.testing.assert_close(got, getattr(torch.nn.functional, name)(first, *others), rtol=1e-12, atol=1e-12)
            count += 1
            continue
        with pytest.raises(kind, match=words):
            getattr(pc, name)(sample.input, *sample.args, **sample.kwargs, **keywords)
        count += 1
    assert count >= 10


@pytest.mark.parametrize("name", NAMES)
def test_samples_as_numpy_arrays(device, name):
    """The first samples again, by way of numpy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _, sample in zip(range(4), database()[name].sample_inputs("cpu", torch.float64), strict=False):
            arrays = [a.numpy() if isinstance(a, torch.Tensor) else a for a in (sample.input, *sample.args)]
            got = getattr(pc, name)(*arrays, **sample.kwargs, device=device)
            expected = getattr(torch.nn.functional, name)(sample.input, *sample.args, **sample.kwargs)
            assert isinstance(got, np.ndarray)
            np.testing.assert_allclose(got, expected.numpy(), rtol=1e-7, atol=1e-7)
