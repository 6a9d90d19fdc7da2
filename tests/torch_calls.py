"""Calls of every kind with torch, judged by torch: what has to work in each version that setup.cfg admits. It prints one line a call.

    python tests/torch_calls.py            with the torch that is installed
    python tests/torch_calls.py bare       as if torch had none of its private parts that the package uses
"""

import sys
import warnings
from types import SimpleNamespace

warnings.simplefilter("ignore")

import torch  # noqa: E402

if "bare" in sys.argv[1:]:
    whole, torch._C = torch._C, SimpleNamespace()
    import pycuda_conv.arrays.torch_internals

    torch._C = whole
    assert pycuda_conv.arrays.torch_internals.ASKED_BY_LAUNCHER is None and pycuda_conv.arrays.torch_internals.is_batched(None)

import pycuda_conv as pc  # noqa: E402
import pycuda_conv.nn as pn  # noqa: E402

F, nn, close = torch.nn.functional, torch.nn, torch.testing.assert_close
torch.manual_seed(0)
x, w = torch.randn(2, 4, 9, 8), torch.randn(6, 4, 3, 3)


def forward():
    for _ in range(2):
        close(pc.conv2d(x, w, padding=1), F.conv2d(x, w, padding=1), rtol=1e-4, atol=1e-4)
    close(pc.conv2d(x, w, out=torch.empty(2, 6, 7, 6)), F.conv2d(x, w), rtol=1e-4, atol=1e-4)
    close(pc.conv_transpose2d(x, w.transpose(0, 1)), F.conv_transpose2d(x, w.transpose(0, 1)), rtol=1e-4, atol=1e-4)


def gradients():
    for _ in range(2):
        ours, theirs = ([t.clone().requires_grad_() for t in (x, w)] for _ in range(2))
        pc.conv2d(*ours, padding=1).square().sum().backward()
        F.conv2d(*theirs, padding=1).square().sum().backward()
        for a, b in zip(ours, theirs, strict=True):
            close(a.grad, b.grad, rtol=1e-3, atol=1e-3)


def gradients_of_gradients():
    a, b = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((1, 2, 4, 4), (3, 2, 3, 3)))
    assert torch.autograd.gradgradcheck(lambda a, b: pc.conv2d(a, b, padding=1), (a, b))


def several_gradients_at_once():
    leaf = x.clone().requires_grad_()
    y = pc.conv2d(leaf, w)
    (found,) = torch.autograd.grad(y, leaf, torch.ones(3, *y.shape), is_grads_batched=True)
    assert found.shape == (3, *x.shape)


def convert():
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 3, 1))
    expected = model(x)
    converted = pn.convert(model)
    y = converted(x)
    close(y, expected, rtol=1e-3, atol=1e-3)
    y.sum().backward()
    converted.eval()(x)
    assert "Conv2d(4, 8" in str(converted)


def modules():
    pn.Conv2d(4, 6, 3)(x).sum().backward()
    pn.Conv2d(4, 6, 3).load_state_dict(nn.Conv2d(4, 6, 3).state_dict())


def autocast():
    with torch.autocast("cpu", torch.bfloat16):
        assert pc.conv2d(x, w).dtype is torch.bfloat16


def inference_mode():
    with torch.inference_mode():
        pc.conv2d(x, w)


def transforms():
    close(torch.func.vmap(lambda image: pc.conv2d(image, w))(x), F.conv2d(x, w), rtol=1e-4, atol=1e-4)
    torch.func.grad(lambda t: pc.conv2d(t, w).sum())(x)


def compiled():
    close(torch.compile(lambda t: pc.conv2d(t, w).relu(), backend="aot_eager")(x), F.conv2d(x, w).relu(), rtol=1e-4, atol=1e-4)


def traced():
    torch.jit.trace(lambda t: pc.conv2d(t, w), (x,))(x)


CALLS = [forward, gradients, gradients_of_gradients, several_gradients_at_once, convert, modules, autocast, inference_mode]
if "bare" not in sys.argv[1:]:  # these can't be told from plain calls without the private parts
    CALLS += [transforms, compiled, traced]

for call in CALLS:
    call()
    print(call.__name__)
print("all", torch.__version__)
