"""Tensors in host memory stay torch's own: a call leaves their storages resizable, and one whose storage was freed is refused."""

import gc
import inspect
import weakref

import numpy as np
import pytest
import torch
from reference import by_turns

import pycuda_conv as pc
import pycuda_conv.nn as pn
from pycuda_conv.arrays.tensors import TORCH
from pycuda_conv.runtime import default_backend

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
#: whether results lie in ordinary memory: a GPU's are in page-locked memory but for the smallest
ORDINARY = default_backend() == "opencl"


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def resizable(*tensors):
    return [t.untyped_storage().resizable() for t in tensors]


def calls(dtype=torch.float32):
    """Every public function by its name: a call of (tensors), or of (tensors, out=), and its tensors by name."""
    found = {}
    for ndim in (1, 2, 3):
        x, w, t = (draw(*shape, *(4,) * ndim, dtype=dtype) for shape in ((2, 3), (5, 3), (3, 5)))
        w, t = (a[(..., *[slice(3)] * ndim)].contiguous() for a in (w, t))
        dy, b = draw(2, 5, *(4,) * ndim, dtype=dtype, seed=1), draw(5, dtype=dtype)
        more = {"bias": b, "scale": draw(5, dtype=dtype, seed=2), "residual": dy.clone()}
        c = {"padding": 1}
        found[f"conv{ndim}d"] = {"input": x, "weight": w, **more}, c
        found[f"conv_transpose{ndim}d"] = {"input": x, "weight": t, **more}, c
        found[f"conv{ndim}d_input"] = {"weight": w, "grad_output": dy}, {"input_size": x.shape, **c}
        found[f"conv{ndim}d_weight"] = {"input": x, "grad_output": dy}, {"weight_size": w.shape, **c}
        found[f"conv{ndim}d_bias"] = {"grad_output": dy}, {}
        found[f"conv{ndim}d_many"] = {"inputs": x, "weight": w, "bias": b, "scale": more["scale"]}, c
    return found


FUNCTIONS = [name for name in pc.__all__ if name.startswith("conv")]


def called(name, tensors, options, **more):
    function, tensors = getattr(pc, name), dict(tensors)
    if name.endswith("_many"):
        (made,) = function([tensors.pop("inputs")], **tensors, **options)
        return made
    return function(**tensors, **options, **more)


def test_every_function_of_tensors_is_in_the_list():
    takers = [name for name in pc.__all__ if inspect.isfunction(getattr(pc, name)) and "conv" in name]
    assert set(takers) == set(calls()) == set(FUNCTIONS)


@pytest.mark.parametrize("name, dtype", by_turns(FUNCTIONS, DTYPES), ids=str)
def test_functions_leave_tensors_resizable(name, dtype):
    tensors, options = calls(dtype)[name]
    made = called(name, tensors, options)
    assert resizable(*tensors.values()) == [True] * len(tensors)
    if ORDINARY:
        assert resizable(made) == [True]
        kept = made.clone()
        torch.add(torch.ones(99, dtype=dtype), 1, out=made.resize_(0))
        assert (made == 2).all()
        made = kept
    if "out" in inspect.signature(getattr(pc, name)).parameters:
        out = torch.full_like(made, float("nan"))
        assert called(name, tensors, options, out=out) is out and torch.equal(out, made)
        assert resizable(out) == [True]


LAYERS = {name: getattr(pn, name) for name in pn.__all__ if inspect.isclass(getattr(pn, name)) and name[0] in "CF" and name[-1] == "d"}


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("Conversion", "Converted")])
def test_layers_leave_tensors_resizable(name):
    ndim = int(name[-2])
    layer = LAYERS[name](3, 4, 3, padding=1)
    x = draw(2, 3, *(5,) * ndim).requires_grad_()
    for _ in range(2):
        y = layer(x)
        y.square().mean().backward()
    layer.eval()(x)
    state = [*layer.parameters(), *layer.buffers()]
    gradients = [p.grad for p in layer.parameters()]
    assert len(gradients) >= 2 and resizable(x, *state, *gradients) == [True] * (1 + len(state) + len(gradients))
    if ORDINARY:
        assert resizable(x.grad, y) == [True, True]


LAYOUTS = {
    "plain": lambda t: t,
    "offset": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    "transposed": lambda t: t.transpose(2, 3),
    "every other": lambda t: t.repeat_interleave(2, 3)[..., ::2],
    "expanded": lambda t: t[:1].expand(t.shape),
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "negated": lambda t: torch.complex(t.float(), -t.float()).conj().imag if t.dtype != torch.float64 else torch.complex(t, -t).conj().imag,
    "empty": lambda t: t[:0],
}


@pytest.mark.parametrize("layout, dtype", by_turns(LAYOUTS, DTYPES, rounds=2), ids=str)
def test_a_tensor_is_seen_as_it_lies(dtype, layout):
    tensor = LAYOUTS[layout](draw(2, 3, 4, 4, dtype=dtype))
    if layout == "negated":
        assert tensor.is_neg()
    seen = TORCH.to_numpy(tensor, "input")
    same = tensor.detach().resolve_neg()
    if tensor.dtype == torch.bfloat16:
        same = same.view(torch.int16)
    same = same.numpy()
    assert np.array_equal(seen, same) and seen.dtype == same.dtype and seen.flags.writeable
    if layout != "empty":
        assert seen.strides == same.strides
    if layout not in ("negated", "empty"):
        assert seen.__array_interface__["data"] == same.__array_interface__["data"]


def test_what_is_seen_of_a_tensor_keeps_it_alive():
    tensor = draw(2, 3, 4, 4)
    alive = weakref.ref(tensor)
    part = TORCH.to_numpy(tensor, "input")[:, 1:].transpose(3, 0, 1, 2)
    expected = tensor[:, 1:].permute(3, 0, 1, 2).clone()
    del tensor
    gc.collect()
    assert alive() is not None and np.array_equal(part, expected.numpy())
    del part
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_freed_storage_is_refused_by_name(name):
    tensors, options = calls()[name]
    expected = called(name, tensors, options)
    fields = {"inputs": "input", "grad_output": "input|weight"}  # the operands of a plan have the names of a convolution
    for freed, tensor in tensors.items():
        storage = tensor.untyped_storage()
        nbytes, kept = storage.nbytes(), tensor.clone()
        storage.resize_(0)
        with pytest.raises(pc.ConvArgumentError, match=f"({fields.get(freed, freed)}|input|weight) has no memory: its address is 0"):
            called(name, tensors, options)
        storage.resize_(nbytes)
        tensor.copy_(kept)
    assert torch.equal(called(name, tensors, options), expected)
    if "out" in inspect.signature(getattr(pc, name)).parameters:
        out = torch.empty_like(expected)
        out.untyped_storage().resize_(0)
        with pytest.raises(pc.ConvArgumentError, match="out has no memory"):
            called(name, tensors, options, out=out)
