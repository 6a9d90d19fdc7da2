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

F = torch.nn.functional
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


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_leave_channels_last_tensors_resizable(name):
    tensors, options = calls()[name]
    if "conv1d" in name or "transpose1d" in name:
        return
    form = torch.channels_last_3d if "3d" in name else torch.channels_last
    last = {key: t.contiguous(memory_format=form) if t.dim() > 1 else t for key, t in tensors.items()}
    made = called(name, last, options)
    torch.testing.assert_close(made, called(name, tensors, options), rtol=1e-5, atol=1e-5)
    assert resizable(*last.values()) == [True] * len(last)
    if ORDINARY:
        assert resizable(made) == [True]


def test_plans_leave_tensors_resizable():
    x, w, b = draw(2, 3, 5, 5), draw(4, 3, 3, 3), draw(4)
    for layout in ("NCHW", "NHWC"):
        problem = pc.ConvProblem.forward(2, x.shape, w.shape, b.shape, layout=layout)
        plan = pc.Plan(problem)
        bound = plan.bind(w, b)
        out = torch.empty_like(plan(x, w, b))
        made = [plan(x, w, b), bound(x), plan(x, w, b, out=out), bound(x, out=out)]
        torch.testing.assert_close(made[0], F.conv2d(x, w, b), rtol=1e-5, atol=1e-5)
        assert all(torch.equal(made[0], one) for one in made)
        assert resizable(x, w, b, out) == [True] * 4
        if ORDINARY:
            assert resizable(*made) == [True] * 4


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


def test_models_that_were_converted_leave_tensors_resizable():
    class Net(torch.nn.Sequential):
        pass

    net = Net(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten(), torch.nn.Linear(72, 5))
    ours, x = pn.convert(net), draw(2, 3, 8, 8)
    for training in (True, False):
        ours.train(training)
        y = ours(x)
        y.square().mean().backward()
        assert all(resizable(x, *ours.parameters(), *ours.buffers(), *[p.grad for p in ours.parameters()]))


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


def test_layers_are_sharded_by_fsdp(tmp_path):
    """torch frees the storages of gathered parameters and fills them again."""
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def net(library):
        return torch.nn.Sequential(
            library.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), library.Conv2d(8, 4, 3, stride=2), library.ConvTranspose2d(4, 3, 2)
        )

    theirs, ours = net(torch.nn), net(pn)
    ours.load_state_dict(theirs.state_dict())
    distributed.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    try:
        mesh = init_device_mesh("cpu", (1,))
        losses = []
        for model in (theirs, ours):
            for module in (*model, model):
                if list(module.parameters()):
                    fully_shard(module, mesh=mesh, reshard_after_forward=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            losses.append([])
            for step in range(3):
                optimizer.zero_grad()
                loss = model(draw(2, 3, 9, 9, seed=step)).square().mean()
                loss.backward()
                optimizer.step()
                losses[-1].append(loss.item())
    finally:
        distributed.destroy_process_group()
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert losses[0][0] != losses[0][1]
