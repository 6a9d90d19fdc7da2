"""What torch has to know of our calls: versions of tensors that are written, derivatives, and its tools that trace and count."""


import copy
import io
import logging
import pickle
import subprocess
import sys

import pytest
import torch
from reference import channels_last
from test_nn import close, randn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import pycuda_conv as pc
import pycuda_conv.nn as pn
from pycuda_conv import dispatch

F = torch.nn.functional
MODIFIED = "modified by an inplace operation"


# ---- out


def plain(*shape, where):
    return randn(*shape, where=where, dtype=torch.float32, grad=False)


def writers(where):
    """Every way to write to `out`: the call, and the shape that it writes."""
    x, w, dy = (plain(*shape, where=where) for shape in ((1, 2, 4, 4), (3, 2, 3, 3), (1, 3, 4, 4)))
    plan = pc.Plan(pc.ConvProblem.forward(2, x.shape, w.shape, padding=1), None if where == "cpu" else "cuda:0")
    bound, last = plan.bind(w), channels_last(x)
    return {
        "conv2d": (lambda out: pc.conv2d(x, w, padding=1, out=out), dy),
        "conv2d, channels last": (lambda out: pc.conv2d(last, w, padding=1, out=out), channels_last(dy)),
        "conv_transpose2d": (lambda out: pc.conv_transpose2d(dy, w, padding=1, out=out), x),
        "conv2d_input": (lambda out: pc.conv2d_input(x.shape, w, dy, padding=1, out=out), x),
        "conv2d_weight": (lambda out: pc.conv2d_weight(x, w.shape, dy, padding=1, out=out), w),
        "plan": (lambda out: plan(x, w, out=out), dy),
        "bound plan": (lambda out: bound(x, out=out), dy),
    }


WRITERS = ["conv2d", "conv2d, channels last", "conv_transpose2d", "conv2d_input", "conv2d_weight", "plan", "bound plan"]


@pytest.mark.parametrize("name", WRITERS)
def test_a_backward_pass_notices_that_out_was_written_again(where, name):
    write, like = writers(where)[name]
    out, factor = torch.empty_like(like), torch.empty_like(like).requires_grad_()
    write(out)
    (out * factor).sum().backward()
    kept = (out * factor).sum()
    write(out)
    with pytest.raises(RuntimeError, match=MODIFIED):
        kept.backward()
    kept, version = (out * factor).sum(), out._version
    with pytest.raises(ValueError, match="out"):
        write(out[..., 1:])
    kept.backward()  # what was refused was not written
    assert out._version == version


@pytest.mark.parametrize("name", WRITERS)
def test_out_is_refused_where_torch_refuses_it(where, name):
    write, like = writers(where)[name]
    expected = write(torch.empty_like(like))
    leaf = torch.zeros_like(like).requires_grad_()
    for out in (leaf, leaf * 1):
        with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
            torch.add(like, like, out=out)
        with pytest.raises(pc.ConvArgumentError, match="out requires a gradient"):
            write(out)
        assert not out.detach().any()
        version = out._version
        with torch.no_grad():
            assert write(out) is out and out.requires_grad and torch.equal(out, expected) and out._version > version
    with torch.inference_mode():
        inference = torch.zeros_like(like)
        assert torch.equal(write(inference), expected)
    for write_it in (lambda out: torch.add(like, like, out=out), write):
        with pytest.raises(RuntimeError, match=r"(inference_|Inference)[mM]ode"):
            write_it(inference)
    kept = torch.zeros_like(like)
    product = (kept * leaf).sum()
    with torch.inference_mode():
        write(kept)
    with pytest.raises(RuntimeError, match=MODIFIED):
        product.backward()


# ---- every public function, for torch's tools


def functions(where):
    """Each public function of tensors with the tensors that it takes, and torch's own function of the same."""
    x, w, b, dy = (
        randn(*s, where=where, grad=False, seed=i) for i, s in enumerate(((2, 4, 6, 5), (6, 2, 3, 3), (6,), (2, 6, 3, 5)))
    )
    how = {"stride": (2, 1), "padding": 1, "groups": 2}
    back = how | {"output_padding": (1, 0)}
    beyond = {"dilation": (2, 3), "output_padding": (1, 2), "padding": 1, "groups": 2}  # the stride is no larger than the output padding
    c = randn(4, where=where, grad=False)
    return {
        "conv1d": (lambda x, w, b: pc.conv1d(x, w, b, stride=2), lambda x, w, b: F.conv1d(x, w, b, stride=2), (x[..., 0], w[..., 0].repeat(1, 2, 1), b)),
        "conv2d": (lambda x, w, b: pc.conv2d(x, w, b, **how), lambda x, w, b: F.conv2d(x, w, b, **how), (x, w, b)),
        "conv3d": (lambda x, w: pc.conv3d(x, w, padding="same"), lambda x, w: F.conv3d(x, w, padding="same"), (x[None], w[None, :2])),
        "conv_transpose2d": (lambda dy, w, c: pc.conv_transpose2d(dy, w, c, **back), lambda dy, w, c: F.conv_transpose2d(dy, w, c, **back), (dy, w, c)),
        "beyond": (lambda dy, w, c: pc.conv_transpose2d(dy, w, c, **beyond), lambda dy, w, c: F.conv_transpose2d(dy, w, c, **beyond), (dy, w, c)),
        "conv2d_input": (
            lambda dy, w: pc.conv2d_input((2, 4, 6, 5), w, dy, **how),
            lambda dy, w: torch.nn.grad.conv2d_input((2, 4, 6, 5), w, dy, **how), (dy, w),
        ),
        "conv2d_weight": (
            lambda x, dy: pc.conv2d_weight(x, (6, 2, 3, 3), dy, **how),
            lambda x, dy: torch.nn.grad.conv2d_weight(x, (6, 2, 3, 3), dy, **how), (x, dy),
        ),
        "conv2d_bias": (lambda dy: pc.conv2d_bias(dy), lambda dy: dy.sum((0, 2, 3)), (dy,)),
        "epilogue": (
            lambda x, w, b, r: pc.conv2d(x, w, b, scale=b, residual=r, activation="relu", **how),
            lambda x, w, b, r: torch.relu(F.conv2d(x, w, **how) * b.view(-1, 1, 1) + b.view(-1, 1, 1) + r), (x, w, b, dy),
        ),
    }


FUNCTIONS = ["conv1d", "conv2d", "conv3d", "conv_transpose2d", "conv2d_input", "conv2d_weight", "conv2d_bias", "epilogue"]


def leaves(tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


@pytest.mark.parametrize("name", [*FUNCTIONS, "beyond"])
def test_derivatives_are_carried_forward(where, name):
    ours, theirs, tensors = functions(where)[name]
    directions = tuple(t.flip(0) for t in tensors)
    close(torch.func.jvp(ours, tensors, directions)[1], torch.func.jvp(theirs, tensors, directions)[1])
    for i, t in enumerate(tensors):  # of one operand alone

        def alone(f, i=i):
            return lambda one: f(*tensors[:i], one, *tensors[i + 1 :])

        close(*(torch.func.jvp(alone(f), (t,), (directions[i],))[1] for f in (ours, theirs)))
        close(*(torch.func.jacfwd(alone(f))(t) for f in (ours, theirs)))
    if name != "epilogue":  # whose relu has no second derivative
        assert torch.autograd.gradcheck(ours, leaves(tensors), check_forward_ad=True, fast_mode=True)
        assert torch.autograd.gradgradcheck(ours, leaves(tensors), check_fwd_over_rev=True, fast_mode=True)


def test_second_derivatives_by_every_order_of_transforms(where):
    x, w = (randn(*shape, where=where, grad=False) for shape in ((1, 2, 4, 4), (2, 2, 3, 3)))
    t = torch.func
    for outer in (t.jacfwd, t.jacrev):
        for inner in (t.jacfwd, t.jacrev):
            for argument in (0, 1):
                found = [
                    outer(inner(lambda x, w, f=f: (f(x, w, padding=1) ** 3).sum(), argument), argument)(x, w) for f in (pc.conv2d, F.conv2d)
                ]
                close(*found)
    close(*(t.hessian(lambda w, f=f: f(x, w).square().sum())(w) for f in (pc.conv2d, F.conv2d)))
    close(*(t.vmap(lambda dx, f=f: t.jvp(lambda x: f(x, w), (x,), (dx,))[1])(torch.stack([x, -x])) for f in (pc.conv2d, F.conv2d)))


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_several_gradients_are_asked_for_at_once(where, strategy):
    """Batches of gradients, which are no transform of torch.func's."""
    x, w = (randn(*shape, where=where, grad=False) for shape in ((1, 2, 3, 3), (2, 2, 2, 2)))
    jacobian = torch.autograd.functional.jacobian
    found = [jacobian(lambda x, w, f=f: f(x, w), (x, w), vectorize=True, strategy=strategy) for f in (pc.conv2d, F.conv2d)]
    for ours, theirs in zip(*found, strict=True):
        close(ours, theirs)


def test_functions_are_functionalized(where):
    x, w = (randn(*shape, where=where, grad=False) for shape in ((1, 2, 4, 4), (2, 2, 3, 3)))
    functional = torch.func.functionalize(lambda x: torch.vmap(lambda one: pc.conv2d(one, w).relu_())(x))
    close(functional(x), F.conv2d(x, w).relu())
    assert torch.ops.pycuda_conv.convolve.default in {node.target for node in make_fx(functional)(x).graph.nodes}


def test_forward_derivatives_convolve_no_zeros(where, monkeypatch):
    """The direction of one operand takes one convolution more, and what is kept is let go."""
    x, w = randn(1, 2, 4, 4, where=where), randn(2, 2, 3, 3, where=where, grad=False)
    calls, convolve = [], dispatch.convolve
    for module in (dispatch, pc.ops):
        monkeypatch.setattr(module, "convolve", lambda asked, *args, **more: calls.append(asked) or convolve(asked, *args, **more))
    torch.func.jvp(lambda x: pc.conv2d(x, w), (x.detach(),), (x.detach(),))
    recorded = 2  # the public call and the one that computes
    assert len(calls) == recorded + 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_traced_by_fx(where, name):
    ours, _, tensors = functions(where)[name]
    traced = torch.fx.symbolic_trace(ours)
    assert [n.target for n in traced.graph.nodes if n.op == "call_function"] == [getattr(pc, "conv2d" if name == "epilogue" else name)]
    assert torch.equal(traced(*tensors), ours(*tensors))
    again = torch.fx.symbolic_trace(pickle.loads(pickle.dumps(traced)))
    assert torch.equal(again(*tensors), ours(*tensors))
    close(make_fx(ours)(*tensors)(*tensors), ours(*tensors))


def test_fx_gives_what_else_is_an_argument(where):
    """Sizes, groups and tensors that the function finds for itself."""
    w = randn(4, 1, 3, 3, where=where, grad=False)

    def depthwise(x):
        y = pc.conv2d(x, w, groups=x.shape[1])
        return pc.conv2d_input(x.shape, w, y, groups=x.shape[1])

    x = randn(2, 4, 5, 5, where=where, grad=False)
    assert torch.equal(torch.fx.symbolic_trace(depthwise)(x), depthwise(x))
    plan = pc.Plan(pc.ConvProblem.forward(2, x.shape, w.shape, groups=4, dtype="float64"), None if where == "cpu" else "cuda:0")
    bound = plan.bind(w)
    for call in (lambda x: plan(x, w), lambda x: bound(x)):
        with pytest.raises(TypeError, match="stand-in"):
            torch.fx.symbolic_trace(call)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operations_are_counted(where, name):
    """In a backward pass each gradient takes as many as the convolution."""
    ours, _, tensors = functions(where)[name]
    given = leaves(tensors)
    expected = {"conv1d": 2 * 24 * 12, "conv3d": 2 * 120 * 36, "conv2d_bias": 0}.get(name, 2 * 180 * 18)
    with FlopCounterMode(display=False) as counter:
        ours(*tensors)
        assert counter.get_total_flops() == expected
        y = ours(*given).sum()
        assert counter.get_total_flops() == 2 * expected
        y.backward()
        assert counter.get_total_flops() == 4 * expected


def test_operations_of_fused_layers_are_counted(where):
    ours = pn.FusedConvBnReLU2d(4, 6, 3, device=where)
    theirs = torch.nn.Sequential(*copy.deepcopy(ours).to_modules(), torch.nn.ReLU())
    x, counted = randn(2, 4, 5, 5, where=where, dtype=torch.float32), []
    for layer in (ours, theirs):
        with FlopCounterMode(display=False) as counter:
            layer(x).sum().backward()
            counted.append(counter.get_total_flops())
            with torch.no_grad():
                layer.eval()(x)
        counted.append(counter.get_total_flops())
    assert counted[:2] == counted[2:]


CALLS = {
    "conv2d": "x, w, padding='same'", "conv_transpose2d": "dy, w", "conv2d_input": "x.shape, w, dy", "conv2d_weight": "x, w.shape, dy", "conv2d_bias": "dy",
}  # fmt: skip
#: Processes that have called nothing, one for each first call, made from one that has imported what takes long.
FIRST_CALLS = """
import os, sys, traceback
import pycuda_conv as pc, torch, torch._dynamo
from torch.utils.flop_counter import FlopCounterMode
if where == "cpu":  # with a GPU torch would make a CUDA context, which no process that is forked later can use
    # torch imports the rest of its compiler
    torch.compile(lambda x: x + 1, backend="aot_eager", fullgraph=True)(torch.ones(1, requires_grad=True))
def tensors():
    x, dy = torch.randn(1, 2, 5, 5, device=where), torch.randn(1, 3, 3, 3, device=where)
    return x, torch.nn.Parameter(torch.randn(3, 2, 3, 3, device=where)), dy
def compiled(call):
    given = tensors()
    y = torch.compile(call, backend="aot_eager", fullgraph=True)(*given)
    torch.testing.assert_close(y, call(*given))
def differentiated():
    x, w, dy = tensors()
    pc.conv2d(x, w).sum().backward()
    assert w.grad.shape == w.shape
def counted():
    x, w, dy = tensors()
    with FlopCounterMode(display=False) as counter:
        pc.conv2d(x, w)
    assert counter.get_total_flops() == 2 * 3 * 2 * 9 * 9
first = {name: lambda call=call: compiled(call) for name, call in calls.items()} | {"differentiated": differentiated, "counted": counted}
for name, call in first.items():
    child = os.fork()
    if not child:
        try:
            call()
            os.write(1, f"{name} ".encode())
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_the_first_call_needs_no_import(fast_env):
    """Nothing has made known to the package what a tensor or a parameter is: each function compiled whole, a gradient, and what is counted.

    On the CPU: forked processes can't use a GPU that torch's compiler has looked at before.
    """
    calls = ", ".join(f'"{name}": lambda x, w, dy: pc.{name}({arguments}).relu()' for name, arguments in CALLS.items())
    code = f"where, calls = 'cpu', {{{calls}}}\n{FIRST_CALLS}"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**fast_env, "PYTHONWARNINGS": "ignore"}, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.stdout.split() == [*CALLS, "differentiated", "counted"], done.stdout + done.stderr


class Block(torch.nn.Module):
    """A residual block with a layer of each kind that is converted or is ours."""

    def __init__(self, where):
        super().__init__()
        self.conv, self.bn = torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.BatchNorm2d(4)
        self.up = torch.nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.fused = pn.FusedConvBnReLU2d(4, 2, 3)
        self.to(where)

    def forward(self, x):
        return self.fused(self.up(torch.relu(self.bn(self.conv(x)) + x)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("no_grad", [False, True])
def test_a_converted_model_is_exported(where, strict, no_grad):
    torch.manual_seed(0)
    model = Block(where).eval()
    pn.convert(model)
    x = randn(3, 4, 6, 6, where=where, dtype=torch.float32, grad=False)
    sizes = {"x": {0: torch.export.Dim("images", min=2, max=64)}}
    with torch.set_grad_enabled(not no_grad):
        expected = model(x)
        exported = torch.export.export(model, (x,), dynamic_shapes=sizes, strict=strict)
        kept = io.BytesIO()
        torch.export.save(exported, kept)
        kept.seek(0)
        again = torch.export.load(kept).module()
        close(again(x), expected)
        close(again(x[:2]), model(x[:2]))
    assert "pycuda_conv.conv." in str(exported.graph) and "aten.conv" not in str(exported.graph)
    assert "pycuda_conv.conv_transpose." in str(exported.graph)


def test_torch_compile_copies_no_list_of_modules(caplog, monkeypatch):
    """It copies all of sys.modules if what it follows looks into it, while other threads may import."""
    monkeypatch.setattr(logging.getLogger("torch"), "propagate", True)
    x, w = plain(1, 2, 4, 4, where="cpu"), plain(3, 2, 3, 3, where="cpu")
    torch._logging.set_logs(guards=True)
    try:
        torch.compile(lambda x, w: pc.conv2d(x, w, padding=1), backend="eager", fullgraph=True)(x, w)
    finally:
        torch._logging.set_logs()
    assert "pycuda_conv" in caplog.text and ".modules" not in caplog.text


def test_the_gradient_of_a_bias_has_gradients(where):
    dy = randn(2, 3, 4, 5, where=where)
    weights = randn(3, where=where, grad=False)
    (grad,) = torch.autograd.grad((pc.conv2d_bias(dy) * weights).sum(), dy)
    assert torch.equal(grad, weights.view(1, 3, 1, 1).expand_as(dy))
    with torch.autocast(where, torch.bfloat16):
        assert pc.conv2d_bias(dy.float()).dtype == torch.float32 and pc.conv2d_bias(dy.detach().half()).dtype == torch.float16
    for wrong in (dy[0, 0], dy[:0], dy.long()):
        for grad_output in (wrong, wrong.to("meta")):
            with pytest.raises((ValueError, TypeError)):
                pc.conv2d_bias(grad_output)
    with pytest.raises(pc.ConvArgumentError, match="stream"):
        pc.conv2d_bias(dy, stream=0)
