"""What torch has to know of our calls: versions of tensors that are written, derivatives, and its tools that trace and count."""


import pytest
from reference import channels_last
from test_nn import randn

import pycuda_conv as pc

torch = pytest.importorskip("torch", reason="torch is what is told")

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
