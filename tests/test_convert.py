"""Converted models: networks built as those of the model collections are, in evaluation and in training, beside their originals."""

import copy
import math
import pickle
import random
import sys

import pytest

torch = pytest.importorskip("torch", reason="the modules are torch's")
from torch.nn.utils import prune  # noqa: E402

import pycuda_conv.nn as pn  # noqa: E402
from pycuda_conv import memo  # noqa: E402
from pycuda_conv.nn import chains, routing, watch  # noqa: E402
from pycuda_conv.nn import fused as fused_layer  # noqa: E402

nn, F = torch.nn, torch.nn.functional


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request):
    """Where tensors lie."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return request.param


@pytest.fixture
def calls(monkeypatch):
    """What this package computes: "plain" or "epilogue" for a module's convolution, "layer" for a fused one in training, "routed"."""
    made = []

    def noted(function, word):
        def call(*args, **options):
            made.append(word if options.get("scale") is None and options.get("activation") is None else "epilogue")
            return function(*args, **options)

        return call

    for name in ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"):
        ours = getattr(pn, name)
        monkeypatch.setattr(ours, "function", staticmethod(noted(ours.function, "plain")))
    for theirs, ours in routing._ROUTES.items():
        monkeypatch.setitem(routing._ROUTES, theirs, noted(ours, "routed"))
    monkeypatch.setattr(chains, "conv_bn_act", noted(chains.conv_bn_act, "layer"))
    monkeypatch.setattr(chains.quick, "call", lambda *call: None)  # so that none is made again without them
    return made


def numbers(*shape, where="cpu", seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(where).requires_grad_(grad)


WITHIN = 1e-10


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=WITHIN, atol=WITHIN)


def allow_for_torch(monkeypatch, where, activation):
    """On a GPU torch multiplies float64's hard swish by float32's nearest number to 1 / 6."""
    if where == "cuda" and activation == "hardswish":
        monkeypatch.setattr(sys.modules[__name__], "WITHIN", 1e-6)


def ready(model, where="cpu"):
    """The model in float64, with statistics and parameters that are not those of a new one."""
    generator = torch.Generator().manual_seed(0)
    for norm in model.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            norm.running_mean.normal_(std=0.3, generator=generator)
            norm.running_var.uniform_(0.5, 2, generator=generator)
            nn.init.uniform_(norm.weight, 0.5, 1.5, generator=generator)
            nn.init.normal_(norm.bias, generator=generator)
    return model.double().to(where).eval()


def same(ours, theirs, *inputs):
    """Results in evaluation, with gradients and without, in training, gradients, and running statistics agree."""
    with torch.no_grad():
        close(ours.eval()(*inputs), theirs.eval()(*inputs))
    for training in (False, True):
        found = []
        for model in (ours.train(training), theirs.train(training)):
            given = [x.detach().requires_grad_() for x in inputs]
            y = model(*given)
            weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
            found.append((y, *torch.autograd.grad((y * weights).sum(), [*given, *model.parameters()])))
        for got, expected in zip(*found, strict=True):
            close(got, expected)
    for got, expected in zip(ours.buffers(), theirs.buffers(), strict=True):
        close(got, expected)
    ours.eval(), theirs.eval()


# ---- networks


class NormAct(nn.BatchNorm2d):
    """A batch normalisation with its activation, which calls the function itself."""

    def __init__(self, channels, act=nn.ReLU, drop=None):
        super().__init__(channels)
        self.drop = nn.Identity() if drop is None else drop
        self.act = nn.Identity() if act is None else act(inplace=True)

    def forward(self, x):
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        of_batch = self.training or (self.running_mean is None and self.running_var is None)
        tracked = not self.training or self.track_running_stats
        x = F.batch_norm(
            x, self.running_mean if tracked else None, self.running_var if tracked else None, self.weight, self.bias, of_batch, momentum,
            self.eps,
        )  # fmt: skip
        return self.act(self.drop(x))


class SuperNormAct(nn.BatchNorm2d):
    """The same by way of the base class."""

    def forward(self, input):
        return F.relu(super().forward(input))


class PlainNorm(nn.BatchNorm2d):
    """A subclass that computes what its base does."""

    def extra_repr(self):
        return "plain"


class PlainReLU(nn.ReLU):
    pass


class OwnReLU(nn.Module):
    def forward(self, x):
        return F.relu(x)


class DropPath(nn.Module):
    """Does something in training, here without random numbers, and nothing in evaluation."""

    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        return x * (1 - self.p) if self.p > 0.0 and self.training else x


class SameConv(nn.Conv2d):
    """Pads by the input's size, as TensorFlow does."""

    def forward(self, x):
        pads = []
        for n, k, s, d in zip(x.shape[:1:-1], self.kernel_size[::-1], self.stride[::-1], self.dilation[::-1], strict=True):
            pad = max((math.ceil(n / s) - 1) * s + (k - 1) * d + 1 - n, 0)
            pads += pad // 2, pad - pad // 2
        return F.conv2d(F.pad(x, pads), self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class StandardConv(nn.Conv2d):
    """Standardises its filter."""

    def forward(self, x):
        weight = F.batch_norm(self.weight.reshape(1, self.out_channels, -1), None, None, training=True, momentum=0.0, eps=1e-6)
        return self._conv_forward(x, weight.reshape_as(self.weight), self.bias)


class VideoConv(nn.Conv3d):
    """A subclass that overrides nothing that computes."""

    def __init__(self, inputs, outputs, midplanes=None, stride=1, padding=1):
        super().__init__(inputs, outputs, (3, 3, 3), stride, padding, bias=False)

    @staticmethod
    def get_downsample_stride(stride):
        return stride, stride, stride


class SqueezeExcite(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.reduce, self.act, self.expand = nn.Conv2d(channels, 2, 1), nn.SiLU(inplace=True), nn.Conv2d(2, channels, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.expand(self.act(self.reduce(x.mean((2, 3), keepdim=True)))))


class InvertedResidual(nn.Module):
    """EfficientNet's block."""

    def __init__(self, channels, expanded, act=nn.SiLU):
        super().__init__()
        self.conv_pw, self.bn1 = nn.Conv2d(channels, expanded, 1, bias=False), NormAct(expanded, act)
        self.conv_dw, self.bn2 = nn.Conv2d(expanded, expanded, 3, padding=1, groups=expanded, bias=False), NormAct(expanded, act)
        self.aa, self.se = nn.Identity(), SqueezeExcite(expanded)
        self.conv_pwl, self.bn3 = nn.Conv2d(expanded, channels, 1, bias=False), NormAct(channels, None)
        self.drop_path = nn.Identity()

    def forward(self, x):
        shortcut = x
        x = self.se(self.aa(self.bn2(self.conv_dw(self.bn1(self.conv_pw(x))))))
        return self.drop_path(self.bn3(self.conv_pwl(x))) + shortcut


class EfficientNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_stem, self.bn1 = SameConv(3, 4, 3, stride=2, bias=False), NormAct(4, nn.SiLU)
        self.blocks = nn.Sequential(InvertedResidual(4, 6), InvertedResidual(4, 6, nn.ReLU))
        self.conv_head, self.bn2 = nn.Conv2d(4, 8, 1, bias=False), SuperNormAct(8)
        self.drop_rate = 0.0

    def forward(self, x):
        x = self.bn2(self.conv_head(self.blocks(self.bn1(self.conv_stem(x)))))
        x = x.mean((2, 3))
        return F.dropout(x, self.drop_rate, self.training) if self.drop_rate > 0 else x


class ConvNormAct(nn.Module):
    def __init__(self, inputs, outputs, size, act=nn.ReLU, **options):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(inputs, outputs, size, bias=False, **options), NormAct(outputs, act)

    def forward(self, x):
        x = self.bn(self.conv(x))
        aa = getattr(self, "aa", None)
        return x if aa is None else aa(x)


class RepVGGBlock(nn.Module):
    """Three branches that become one convolution when the model is made ready for use."""

    def __init__(self, channels):
        super().__init__()
        self.reparam = None
        self.identity = nn.BatchNorm2d(channels)
        self.conv, self.bn = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.pointwise, self.act = ConvNormAct(channels, channels, 1, None), PlainReLU(inplace=True)

    def forward(self, x):
        if self.reparam is not None:
            return self.act(self.reparam(x))
        y = self.bn(self.conv(x))
        y += self.pointwise(x) + self.identity(x)
        return self.act(y)

    @torch.no_grad()
    def reparameterize(self):
        self.reparam = nn.Conv2d(self.conv.in_channels, self.conv.out_channels, 3, padding=1).to(self.conv.weight)
        self.reparam.weight.fill_(0.1), self.reparam.bias.fill_(0.2)
        del self.conv, self.bn, self.pointwise, self.identity


class ResNetBlock(nn.Module):
    """A block with layers that can be switched on, between those that are there."""

    def __init__(self, channels, drop_path=0.0, conv=nn.Conv2d):
        super().__init__()
        self.conv1, self.bn1 = conv(channels, channels, 3, padding=1, bias=False), PlainNorm(channels)
        self.drop_block, self.act1 = nn.Identity(), OwnReLU()
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.drop_path, self.act2 = DropPath(drop_path), nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.act1(self.drop_block(self.bn1(self.conv1(x))))
        y = self.drop_path(self.bn2(self.conv2(y)))
        y += x
        return self.act2(y)


class DLABlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x, shortcut: torch.Tensor | None = None, children: list | None = None):
        if shortcut is None:
            shortcut = x
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += shortcut
        return self.relu(out)


class DLARoot(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)

    def forward(self, x_children: list):
        return self.relu(self.bn(self.conv(torch.cat(x_children, 1))))


class DLATree(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.tree1, self.tree2, self.root = DLABlock(channels), DLABlock(channels), DLARoot(2 * channels, channels)

    def forward(self, x, shortcut: torch.Tensor | None = None, children: list | None = None):
        first = self.tree1(x, 2 * x)
        return self.root([self.tree2(first), first, *(children or [])])


class HRNet(nn.Module):
    """Branches of several resolutions, in lists, and a child whose forward is called past its hooks."""

    def __init__(self):
        super().__init__()

        def step(inputs, outputs, stride=1):
            return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())

        self.conv1, self.bn1, self.act1 = nn.Conv2d(3, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2), nn.ReLU(inplace=True)
        self.transition = nn.ModuleList([step(2, 2), step(2, 4, 2)])
        self.fuse = nn.ModuleList([
            nn.ModuleList([nn.Identity(), nn.Sequential(nn.Conv2d(4, 2, 1, bias=False), nn.BatchNorm2d(2), nn.Upsample(scale_factor=2))]),
            nn.ModuleList([step(2, 4, 2), nn.Identity()]),
        ])  # fmt: skip
        self.incre, self.down = nn.ModuleList([step(2, 2), step(4, 4)]), nn.ModuleList([step(2, 4, 2)])

    def forward(self, x):
        x = self.act1(self.bn1(self.conv1(x)))
        branches = [step(x) for step in self.transition]
        fused = []
        for row in self.fuse:
            y = row[0](branches[0])
            for j in range(1, len(row)):
                y = y + row[j](branches[j])
            fused.append(F.relu(y))
        y = self.incre[0](fused[0])
        for i, down in enumerate(self.down):
            y = self.incre[i + 1](fused[i + 1]) + down.forward(y)
        return y


def video():
    return nn.Sequential(VideoConv(2, 3), nn.BatchNorm3d(3), nn.ReLU(inplace=True), nn.Conv3d(3, 2, (1, 3, 3)), nn.BatchNorm3d(2))


def residual():
    return nn.Sequential(
        SameConv(3, 4, 3, stride=2, bias=False), PlainNorm(4), nn.ReLU(), ResNetBlock(4), ResNetBlock(4, 0.5), ResNetBlock(4, 0.0, StandardConv)
    )  # fmt: skip


class Basic(nn.Module):
    """The block of a ResNet-18, as torchvision has it."""

    def __init__(self, inside, outside, stride=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside)
        self.downsample = None
        if stride > 1 or inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x):
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        out = self.relu(out)
        return out


class Bottleneck(nn.Module):
    """The block of a ResNet-50, likewise."""

    def __init__(self, inside, outside, stride=1):
        super().__init__()
        width = outside // 4
        self.conv1, self.bn1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        out = self.relu(out)
        return out


class SmallResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Basic(8, 8), Basic(8, 16, 2))
        self.layer2 = nn.Sequential(Bottleneck(16, 24, 2), Bottleneck(24, 24))
        self.fc = nn.Linear(24, 5)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))


@pytest.fixture
def summed(monkeypatch):
    """The sums with a residual that the fused layer makes in its own kernels: whether with a ReLU. No call is remembered."""
    made, normalised = [], fused_layer._normalised

    def noted(y, statistics, gamma, beta, residual, activation):
        if residual is not None:
            made.append(activation == "relu")
        return normalised(y, statistics, gamma, beta, residual, activation)

    monkeypatch.setattr(fused_layer, "_normalised", noted)
    monkeypatch.setattr(fused_layer.quick, "possible", lambda: False)
    return made


def test_blocks_of_a_resnet_are_trained_as_one_layer_each_sum_with_it(where, calls, summed):
    theirs = ready(SmallResNet(), where)
    ours = pn.convert(copy.deepcopy(theirs), fuse_training=True)
    assert not pn.report(ours).notes
    x = numbers(4, 3, 21, 20, where=where)
    for model in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert list(model.state_dict()) == list(theirs.state_dict())
        calls.clear(), summed.clear()
        model.train()(x).sum().backward()
        assert calls == ["layer"] * 13 and summed == [True] * 4
        model.load_state_dict(theirs.state_dict())
    ours.zero_grad()
    same(ours, theirs, x)
    for step in range(3):  # running statistics and parameters move alike
        for model in (ours, theirs):
            model.train()
            model.zero_grad()
            model(numbers(4, 3, 21, 20, where=where, seed=step)).square().sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad
    for (name, got), expected in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-7, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_resnet_under_autocast_with_channels_last(where, summed, dtype):
    """No further from float64 than twice torch's own way; parameters and gradients stay in float32."""
    off = [0.0, 0.0]  # of one network, a few results whose sign rounding decides can put either 5 times as far off as the other
    for seed in range(4):
        torch.manual_seed(seed)
        theirs = ready(SmallResNet(), where)
        plain = copy.deepcopy(theirs).float().to(memory_format=torch.channels_last)
        ours = pn.convert(copy.deepcopy(plain), fuse_training=True)
        x = numbers(6, 3, 33, 32, where=where).float().to(memory_format=torch.channels_last)
        expected = theirs.train()(x.double())
        expected.square().sum().backward()
        summed.clear()
        for i, model in enumerate((ours.train(), plain.train())):
            with torch.autocast(where, dtype):
                made = model(x)
            made.float().square().sum().backward()
            pairs = zip(model.parameters(), theirs.parameters(), strict=True)
            off[i] += sum(((got.grad - ref.grad).norm() / ref.grad.norm()).item() ** 2 for got, ref in pairs)
            assert all(p.dtype is torch.float32 is p.grad.dtype for p in model.parameters())
            for got, ref in zip(model.buffers(), theirs.buffers(), strict=True):
                torch.testing.assert_close(got.double(), ref.double(), rtol=0.02, atol=0.02)
        assert summed == [True] * 4
    assert math.sqrt(off[0]) < 2 * math.sqrt(off[1])


@pytest.mark.gpu
def test_a_scaler_meets_gradients_that_overflow():
    """The scaler skips the first step, in which what overflows is not finite, as in torch's own network; the others train alike."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    scaled_training("cuda")


def scaled_training(where):
    theirs = ready(SmallResNet(), where).float().to(memory_format=torch.channels_last)
    models = pn.convert(copy.deepcopy(theirs), fuse_training=True).train(), theirs.train()
    start = copy.deepcopy(theirs.state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9) for model in models]
    scalers = [torch.amp.GradScaler(where, init_scale=2.0**30, backoff_factor=2.0**-20) for _ in models]
    x = numbers(6, 3, 33, 32, where=where).float().to(memory_format=torch.channels_last)
    for step in range(4):
        overflown = []
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            with torch.autocast(where, torch.float16):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            overflown.append([name for name, p in model.named_parameters() if not p.grad.isfinite().all()])
            scaler.step(optimizer)
            scaler.update()
        assert overflown[0] == overflown[1] and bool(overflown[0]) == (step == 0)
        assert [scaler.get_scale() for scaler in scalers] == [2.0**10] * 2
        for name, parameter in models[0].named_parameters():
            assert parameter.isfinite().all() and torch.equal(parameter, start[name]) == (step == 0)
    for got, expected in zip(models[0].parameters(), theirs.parameters(), strict=True):
        assert (got - expected).norm() <= 0.01 * expected.norm()


@pytest.fixture
def met(monkeypatch):
    """The gradients by inputs that two uses have, as far as a layer adds them itself: their shapes. No call is remembered."""
    made, backward = [], fused_layer._backward

    def noted(*args):
        *_, added, _ = args
        if added is not None:
            made.append(tuple(added.shape))
        return backward(*args)

    monkeypatch.setattr(fused_layer, "_backward", noted)
    monkeypatch.setattr(fused_layer.quick, "possible", lambda: False)
    return made


def test_gradients_of_a_block_s_input_meet_in_its_first_layer(where, met):
    theirs = ready(SmallResNet(), where)
    ours = pn.convert(copy.deepcopy(theirs), fuse_training=True)
    x = numbers(4, 3, 21, 20, where=where)
    same(ours, theirs, x)
    assert len(met) == 4


class Uses(nn.Module):
    """A layer whose input something else reads in some way."""

    def __init__(self, way, before=False):
        super().__init__()
        self.conv, self.bn, self.way = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), way
        self.down = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.active = nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def layer(self, x):
        return F.relu(self.bn(self.conv(x)))

    def last(self, x):
        return self.bn2(self.conv2(x))

    def forward(self, x):
        return self.way(self, x + 0)


def _read_before(m, x):
    other = m.down(x)
    return F.relu(m.last(m.layer(x)) + other)


#: Ways to use the input, and how many gradients then meet in a layer.
USES = {
    "residual": (lambda m, x: F.relu(m.last(m.layer(x)) + x), 1), "another layer": (lambda m, x: m.layer(x) * m.last(x), 1),
    "a convolution in a container": (lambda m, x: F.relu(m.last(m.layer(x)) + m.down(x)), 1),
    "read before": (_read_before, 0), "a container of something else": (lambda m, x: F.relu(m.last(m.layer(x)) + m.active(x)), 0),
    "read by torch": (lambda m, x: m.layer(x) * x.sin(), 0),
    "handed out": (lambda m, x: (m.layer(x), x)[1] * 1, 0), "its own residual": (lambda m, x: F.relu(m.bn(m.conv(x)) + x), 0),
    "without gradient": (lambda m, x: m.last(m.layer(x.detach())) + m.down(x.detach()), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", USES)
def test_ways_to_use_the_input_of_a_layer(where, met, name):
    way, expected = USES[name]
    theirs = ready(Uses(way), where)
    ours = pn.convert(copy.deepcopy(theirs), fuse_training=True)
    assert not pn.report(ours).notes
    check_step(ours, theirs, numbers(3, 4, 6, 5, where=where))
    assert len(met) == expected
    if name == "a convolution in a container":  # which is looked at again before each step
        for model in (ours, theirs):
            model.down[0] = nn.ReLU()
        met.clear()
        check_step(ours, theirs, numbers(3, 4, 6, 5, where=where))
        assert not met


def check_step(ours, theirs, x):
    """Results and gradients in training agree, of those parameters that are used."""
    found = []
    for model in (ours.train(), theirs.train()):
        given = x.detach().requires_grad_()
        y = model(given)
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
        grads = torch.autograd.grad((y * weights).sum(), [given, *model.parameters()], allow_unused=True)
        found.append((y, *(grad for grad in grads if grad is not None)))
    for got, expected in zip(*found, strict=True):
        close(got, expected)


#: Modules, and what the fused layer applies; None where the activation is torch's.
ACTIVATIONS = {
    "relu6": (lambda: nn.ReLU6(inplace=True), "relu6"), "leaky": (lambda: nn.LeakyReLU(0.2), ("leaky_relu", 0.2)),
    "hardswish": (lambda: nn.Hardswish(inplace=True), "hardswish"), "silu": (nn.SiLU, "silu"), "gelu": (nn.GELU, "gelu"),
    "tanh": (nn.Tanh, None),
}  # fmt: skip


@pytest.mark.parametrize("remembered", [False, True], ids=["planned", "remembered"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_in_training(where, monkeypatch, name, remembered):
    make, expected = ACTIVATIONS[name]
    allow_for_torch(monkeypatch, where, name)
    memo.forget_launches()  # those of other tests' layers
    theirs = ready(nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), make(), nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4)), where)
    ours = pn.convert(copy.deepcopy(theirs), fuse_training=True)
    applied, normalised = [], fused_layer._normalised
    monkeypatch.setattr(fused_layer, "_normalised", lambda *args: (applied.append(args[-1]), normalised(*args))[1])
    if not remembered:
        monkeypatch.setattr(fused_layer.quick, "possible", lambda: False)
    x = 4 * numbers(4, 3, 9, 8, where=where)
    for step in range(3 if remembered else 1):
        check_step(ours, theirs, x * (1 + step))
    assert set(applied) == {expected, None}
    for got, ref in zip(ours.buffers(), theirs.buffers(), strict=True):
        close(got, ref)


class Sums(nn.Module):
    """A block whose sum is written in some way."""

    def __init__(self, way):
        super().__init__()
        self.conv, self.bn, self.way = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), way

    def forward(self, x):
        return self.way(self.bn(self.conv(x)), x)


#: Ways to write the sum, and what the fused layer makes of it: whether with ReLU, or None.
SUMS = {
    "from the left": (lambda y, x: F.relu(x + y), True), "method": (lambda y, x: y.add_(x).relu_(), True), "torch.add": (lambda y, x: torch.add(y, x), False),
    "another activation": (lambda y, x: F.silu(y + x), False), "scaled": (lambda y, x: F.relu(torch.add(y, x, alpha=2)), None),
    "over the residual": (lambda y, x: F.relu((x + 0).add_(y)), None), "used twice": (lambda y, x: F.relu(y + x) * y, None),
    "with itself": (lambda y, x: F.relu(y + y), None), "a number": (lambda y, x: F.relu(y + 1), None), "a channel's": (lambda y, x: F.relu(y + x[:, :1]), None),
    "what reads the input between": (lambda y, x: F.relu(y + x.mul(2)), True),
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_ways_to_write_a_sum(where, summed, name):
    way, expected = SUMS[name]
    theirs = ready(Sums(way), where)
    ours = pn.convert(copy.deepcopy(theirs), fuse_training=True)
    x = numbers(3, 4, 6, 5, where=where)
    ours.train()(x).sum().backward()
    assert summed == ([] if expected is None else [expected])
    ours.load_state_dict(theirs.state_dict())
    ours.zero_grad()
    same(ours, theirs, x)


class Written(nn.Module):
    """A block that writes over arrays while it goes."""

    def __init__(self, way):
        super().__init__()
        self.conv, self.bn, self.relu, self.way = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), way

    def forward(self, x):
        return self.way(self, x * 1)


def residual_behind_the_sum(block, x):
    r = x * 2
    y = block.bn(block.conv(x)) + r
    r.add_(1)
    return F.relu(y) + r


def view_of_the_input(block, x):
    part = x.view(x.shape)[:, :2]
    y = block.conv(x)
    part.mul_(2)
    return F.relu(block.bn(y) + x)


def input_by_a_module(block, x):
    y = block.conv(x)
    block.relu(x)
    return F.relu(block.bn(y) + x)


def sum_by_another_name(block, x):
    before = x
    x += 1
    y = F.relu(block.bn(block.conv(x)) + before)
    also = y
    y *= 2
    return also


def number_by_another_name(block, x):
    first = after = x.shape[2]
    after -= 2
    return F.relu(block.bn(block.conv(x))[:, :, : first - after])


#: Ways to write over something, and whether torch trains such a block.
WRITTEN = {
    residual_behind_the_sum: True, view_of_the_input: False, input_by_a_module: False, sum_by_another_name: False, number_by_another_name: True,
}  # fmt: skip


@pytest.mark.parametrize("way", WRITTEN)
def test_what_is_written_between_is_noticed(where, way, calls):
    """And its convolution is still fused with what comes before that."""
    theirs = ready(Written(way), where)
    ours = pn.convert(copy.deepcopy(theirs), fuse_training=True)
    x = numbers(2, 4, 5, 6, where=where)
    with torch.no_grad():
        close(ours(x), theirs(x))
    assert calls == ["epilogue"]
    if WRITTEN[way]:
        same(ours.train(), theirs.train(), x)


def test_a_batch_normalisation_that_is_called_twice(where):
    """Its statistics change in the author's order, and torch has kept them for its own gradient."""

    def forward(block, x):
        y = block.conv(block.bn(x))
        z = F.relu(block.bn(block.conv(x)))
        return F.relu(block.bn(y) + z)

    theirs = ready(Written(forward), where).train()
    ours = pn.convert(copy.deepcopy(theirs), fuse_training=True)
    same(ours, theirs, numbers(2, 4, 5, 6, where=where))
    for got, ref in zip(ours.buffers(), theirs.buffers(), strict=True):
        close(got, ref)


#: How many convolutions there are, how many of them are fused in evaluation and in training, how many keep their own forward; input.
NETWORKS = {
    "EfficientNet": (EfficientNet, 12, 9, 7, 1, (2, 3, 9, 8)),
    "RepVGG": (lambda: nn.Sequential(ConvNormAct(3, 4, 3), RepVGGBlock(4), RepVGGBlock(4)), 5, 5, 5, 0, (2, 3, 7, 8)),
    "ResNet": (residual, 7, 5, 5, 2, (2, 3, 9, 8)),
    "DLA": (lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), DLATree(4)), 6, 6, 6, 0, (2, 3, 7, 6)),
    "HRNet": (HRNet, 8, 8, 8, 0, (2, 3, 8, 8)),
    "video": (video, 2, 2, 2, 0, (2, 2, 4, 5, 6)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_converted_and_fused(where, name, calls):
    make, count, evaluated, trained, own, shape = NETWORKS[name]
    theirs = ready(make(), where)
    ours = copy.deepcopy(theirs)
    assert pn.convert(ours, fuse_training=True) is ours
    done = pn.report(ours)
    assert (len(done.converted), sum(bool(one.fused) for one in done.converted)) == (count, evaluated) and not done.notes, str(done)
    assert sum(one.by_its_own_forward for one in done.converted) == own
    x = numbers(*shape, where=where)
    assert list(ours.state_dict()) == list(theirs.state_dict()) and repr(ours).replace(", by pycuda_conv", "") == repr(theirs)
    for model in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        calls.clear()
        with torch.no_grad():
            close(model(x), theirs(x))
        assert calls.count("epilogue") == evaluated and calls.count("routed") == own and len(calls) == count
        calls.clear()
        model.train()(x)
        assert calls.count("layer") == trained and calls.count("routed") == own
        model.load_state_dict(theirs.state_dict())
        model.eval()
    same(ours, theirs, x)


def test_the_report_is_asked_for():
    model = nn.Sequential(SameConv(3, 4, 3, stride=2), nn.Conv2d(4, 4, 1), NormAct(4), nn.Sequential(nn.Identity()))
    with pytest.raises(ValueError, match=r"model, a Sequential, was not converted: call convert\(model\) first"):
        pn.report(model)
    assert pn.convert(model) is model
    assert str(pn.report(model)) == (
        "2 convolutions converted, 1 of them fused with what follows\n  0 (SameConv), by its own forward\n  1 (Conv2d) + 2 + 2.act"
    )
    assert str(pn.report(pn.convert(nn.Conv2d(1, 1, 1)))) == (
        "1 convolution converted, 0 of them fused with what follows\n  the model (Conv2d)"
    )
    for function in (pn.convert, pn.report):
        with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got None"):
            function(None)


# ---- activations

MODULES = {
    "relu": nn.ReLU, "relu6": nn.ReLU6, "silu": nn.SiLU, "hardswish": nn.Hardswish, "gelu": nn.GELU, "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "leaky_relu": nn.LeakyReLU, "slope": lambda: nn.LeakyReLU(0.2, inplace=True),
}  # fmt: skip
CALLS = {
    "relu": F.relu, "relu6": F.relu6, "silu": F.silu, "hardswish": F.hardswish, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "leaky_relu": F.leaky_relu, "slope": lambda x: F.leaky_relu(x, 0.2), "slope by name": lambda x: F.leaky_relu(x, negative_slope=0.3, inplace=True),
    "in place": lambda x: F.leaky_relu_(x, 0.2), "method": lambda x: x.relu_(),
}  # fmt: skip


class ByFunction(nn.Module):
    """Of no class that is known."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Activated(nn.Module):
    """An activation after a convolution, after a batch normalisation, and after the sum with a residual, with one and without."""

    def __init__(self, act, function=None):
        super().__init__()
        self.conv1, self.conv2, self.bn2 = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.conv3, self.bn3, self.conv4, self.up = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 3, 2, 2)
        self.act, self.drop = act(), nn.Identity()
        self.function = function or self.act

    def forward(self, x):
        x = self.function(self.drop(self.conv1(x)))
        x = self.act(self.bn2(self.conv2(x)))
        x = self.function(self.bn3(self.conv3(x)) + x)
        return self.function(self.up(self.act(x + self.conv4(x))))


@pytest.mark.parametrize("act", MODULES)
def test_activations_that_are_modules(where, act, calls, monkeypatch):
    allow_for_torch(monkeypatch, where, act)
    theirs = ready(Activated(MODULES[act]), where)
    ours = pn.convert(copy.deepcopy(theirs), fuse_training=True)
    assert [len(one.fused) for one in pn.report(ours).converted] == [1, 2, 3, 2, 1] and not pn.report(ours).notes
    x = numbers(2, 2, 5, 4, where=where)
    with torch.no_grad():
        for model in (ours, pickle.loads(pickle.dumps(ours))):
            calls.clear()
            close(model(x), theirs(x))
            assert calls == ["epilogue"] * 5
        for own in (ours, theirs):  # as a search over slopes would
            if act == "slope":
                own.act.negative_slope = 0.5
        calls.clear()
        close(ours(x), theirs(x))
        assert calls.count("epilogue") == (0 if act == "slope" else 5)
    same(ours, theirs, x)


@pytest.mark.parametrize("name", CALLS)
def test_activations_that_are_functions(where, name, calls, monkeypatch):
    allow_for_torch(monkeypatch, where, name)
    theirs = ready(nn.Sequential(Activated(lambda: ByFunction(CALLS[name]), CALLS[name])), where)
    ours = pn.convert(copy.deepcopy(theirs))
    x = numbers(2, 2, 5, 4, where=where)
    with torch.no_grad():
        close(ours(x), theirs(x))
    assert calls == ["epilogue"] * 5
    same(ours, theirs, x)


def test_what_only_looks_like_a_known_activation_is_called(calls):
    """A slope that is an array, or no finite number; a sum that no activation follows and no norm precedes; a result that has two uses."""

    class Odd(nn.Module):
        def __init__(self, way):
            super().__init__()
            self.conv, self.slope, self.way = nn.Conv2d(2, 3, 1), nn.Parameter(torch.full((), 0.2)), way

        def forward(self, x):
            y = self.conv(x)
            if self.way == "slope":
                return F.prelu(y, self.slope[None])
            if self.way == "sum":
                return y + x[:, :1]
            return F.silu(y) * y

    for theirs in (*(Odd(way) for way in ("slope", "sum", "twice")), nn.Sequential(nn.Conv2d(2, 3, 1), nn.LeakyReLU(float("inf")))):
        theirs = ready(theirs)
        ours = pn.convert(copy.deepcopy(theirs))
        assert not pn.report(ours).converted[0].fused and not pn.report(ours).notes
        x = numbers(2, 2, 3, 3)
        with torch.no_grad():
            torch.testing.assert_close(ours(x), theirs(x), equal_nan=True)
        assert calls == ["plain"]
        calls.clear()


def test_a_convolution_with_a_hook_is_called():
    theirs = ready(nn.Sequential(nn.Conv2d(2, 3, 1), nn.GELU()))
    ours, seen = pn.convert(copy.deepcopy(theirs)), []
    ours[0].register_forward_hook(lambda *_: seen.append(1))
    x = numbers(1, 2, 3, 3)
    with torch.no_grad():
        close(ours(x), theirs(x))
        close(ours(x[0]), theirs(x[0]))
    assert len(seen) == 2


# ---- what a trace does not hold


class OneLayer(nn.Module):
    """A chain with something more in its forward."""

    def __init__(self, way=None):
        super().__init__()
        self.conv, self.bn, self.relu, self.way = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), way
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, scale=None, *, twice: bool = False, **more):
        if self.way == "no_grad":
            with torch.no_grad():
                total = self.bn(self.conv(x)).sum()
            x = x + total
        elif self.way == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = x + torch.ones(2, 2).to(x.device).mm(torch.ones(2, 2).to(x.device)).sum()
        elif self.way == "random":
            x = x * torch.rand(1).item()
        elif self.way == "loop":
            for _ in range(int(x.sum())):
                x = x + 1
        elif self.way == "count":
            self.count.add_(1)
        y = self.relu(self.bn(self.conv(x)))
        y = y if scale is None else y * scale
        return 2 * y if twice else y


@pytest.mark.parametrize(
    ("way", "reason"), [("no_grad", "gradients or autocast"), ("autocast", "gradients or autocast"), ("random", "random"), ("loop", "argument")]
)
def test_a_forward_that_a_trace_does_not_hold_is_left(way, reason, calls):
    theirs = ready(OneLayer(way))
    ours = pn.convert(copy.deepcopy(theirs), fuse_training=True)
    (one,), notes = pn.report(ours).converted, pn.report(ours).notes
    assert not one.fused and len(notes) == 2 and all(note.startswith("nothing in the model (OneLayer) is fused") for note in notes)
    assert all(reason in note for note in notes) and "in training" in notes[1]
    results = []
    for model in (ours, theirs):
        torch.manual_seed(0)
        x = numbers(1, 2, 2, 2, grad=True)
        results.append((y := model.train()(x.abs()), *torch.autograd.grad(y.square().sum(), (x, *model.parameters()))))
    for got, expected in zip(*results, strict=True):
        close(got, expected)
    assert "layer" not in calls


def test_arguments_with_defaults(calls):
    theirs = ready(OneLayer())
    ours = pn.convert(copy.deepcopy(theirs))
    x, scale = numbers(1, 2, 3, 3), numbers(1, 3, 3, 3)
    with torch.no_grad():
        for args, kwargs, fused in (
            ((x,), {}, True), ((x, scale), {}, True), ((x,), {"scale": scale}, True), ((), {"x": x}, True), ((x, None), {}, True),
            ((x,), {"twice": False}, True), ((x,), {"twice": True}, False), ((x, 2.0), {}, False), ((x,), {"other": 1}, False),
        ):  # fmt: skip
            calls.clear()
            close(ours(*args, **kwargs), theirs(*args, **kwargs))
            assert ("epilogue" in calls) is fused
        for args, kwargs in (((), {}), ((x, None, True), {}), ((x, None), {"scale": None})):
            with pytest.raises(TypeError) as expected:
                theirs(*args, **kwargs)
            with pytest.raises(TypeError) as got:
                ours(*args, **kwargs)
            assert str(got.value) == str(expected.value)


def test_buffers_that_a_forward_changes_are_changed_once_a_call():
    ours = pn.convert(ready(OneLayer("count")))
    with torch.no_grad():
        ours(numbers(1, 2, 3, 3)), ours(numbers(1, 2, 3, 3))
    assert pn.report(ours).converted[0].fused and ours.count == 2


# ---- what changes later


def test_a_model_that_is_changed_after_its_conversion(calls):
    theirs = ready(nn.Sequential(RepVGGBlock(2), ResNetBlock(2, 0.5), ConvNormAct(2, 2, 1)))
    ours = pn.convert(copy.deepcopy(theirs))
    x = numbers(1, 2, 4, 4)

    def changed(change, fused):
        for model in (ours, theirs):
            change(model)
        calls.clear()
        with torch.no_grad():
            close(ours(x), theirs(x))
        assert calls.count("epilogue") == fused

    seen = []
    changed(lambda model: None, 5)
    changed(lambda model: model[1].drop_path.train(), 3)  # as for an estimate of uncertainty: that block runs its own forward
    changed(lambda model: model[1].drop_path.eval(), 5)
    handles = []
    changed(lambda model: handles.append(model[2].bn.act.register_forward_hook(lambda *_: seen.append(1))), 4)
    changed(lambda model: handles.append(model[2].bn.register_forward_hook(lambda *args: args[2] * 2)), 4)
    assert len(seen) == 4
    changed(lambda model: [handle.remove() for handle in handles], 5)
    changed(lambda model: setattr(model[1], "act2", nn.LeakyReLU(0.5)), 3)
    changed(lambda model: setattr(model[2].bn, "act", nn.Sigmoid()), 2)
    changed(lambda model: model[0].reparameterize(), 0)
    twin = copy.copy(ours[1])
    with torch.no_grad():
        close(twin(x), theirs[1](x))
    pn.convert(ours)
    changed(lambda model: None, 4)
    assert type(pn.convert(ours, fuse=False)[1]) is ResNetBlock


class Inverted(nn.Module):
    """As the blocks of MobileNetV2: a sequence of sequences, and the sum outside of it."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(*(self.step(kernel) for kernel in (1, 3)), nn.Conv2d(2, 2, 1, bias=False), nn.BatchNorm2d(2))

    @staticmethod
    def step(kernel):
        return nn.Sequential(nn.Conv2d(2, 2, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(2), nn.ReLU6())

    def forward(self, x):
        return x + self.conv(x)


def test_sequences_are_looked_into(calls):
    """The sum behind them is part of the last chain, until there is something in them that is called apart."""
    theirs = ready(Inverted())
    ours = pn.convert(copy.deepcopy(theirs), fuse_training=True)
    assert [one.fused for one in pn.report(ours).converted] == [("1", "2"), ("1", "2"), ("3", "sum")] and not pn.report(ours).notes
    x, summed, fused = numbers(1, 2, 4, 4), [], chains.fused

    def check(model, residuals, epilogues=3):
        calls.clear(), summed.clear()
        with torch.no_grad():
            close(model(x), theirs(x))
        assert len(summed) == epilogues == calls.count("epilogue") and sum(one is not None for one in summed) == residuals

    def noted(*args):
        summed.append(args[3])
        return fused(*args)

    for function in {variant.function for module in ours.modules() if "_fusion" in module.__dict__ for variant in module._fusion.variants.values()}:
        function.__globals__.update({name: noted for name, value in function.__globals__.items() if value is fused})
    for model in (ours, copy.deepcopy(ours)):
        check(model, 1), check(model, 1)
    seen = []
    for inner, epilogues in ((ours.conv, 3), (ours.conv[1], 2)):
        handle = inner.register_forward_hook(lambda *args: seen.append(1))
        check(ours, 0, epilogues)
        handle.remove()
        check(ours, 1)
    assert len(seen) == 2
    for model in (ours, theirs):
        model.conv[0].append(nn.Tanh())
    check(ours, 0, 1)
    same(ours, theirs, x)


def test_a_sequence_with_a_forward_of_its_own_is_called(calls):
    class Twice(nn.Sequential):
        def forward(self, x):
            return super().forward(super().forward(x))

    theirs = ready(nn.Sequential(Twice(nn.Conv2d(2, 2, 1), nn.ReLU()), nn.BatchNorm2d(2)))
    ours = pn.convert(copy.deepcopy(theirs))
    with torch.no_grad():
        close(ours(numbers(1, 2, 3, 3)), theirs(numbers(1, 2, 3, 3)))
    assert calls == ["epilogue"] * 2


class Permute(nn.Module):
    def __init__(self, *dims):
        super().__init__()
        self.dims = dims

    def forward(self, x):
        return torch.permute(x, self.dims)


class Scaling(nn.Module):
    """As the blocks of ConvNeXt, with torch's modules."""

    def __init__(self):
        super().__init__()
        steps = Permute(0, 2, 3, 1), nn.LayerNorm(4, eps=0.1), nn.Linear(4, 6), nn.GELU(), nn.Dropout(0.5), nn.Linear(6, 4), Permute(0, 3, 1, 2)
        self.block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4), *steps)
        self.scale = nn.Parameter(torch.linspace(-1, 1, 4).view(4, 1, 1))

    def forward(self, x):
        y = self.scale * self.block(x)
        y += x
        return y


def test_modules_that_only_call_functions_are_not_called(monkeypatch):
    """Until there is something in them that asks for it. Their parameters are always those of the module."""
    theirs = ready(Scaling())
    ours = pn.convert(copy.deepcopy(theirs))
    x, made, call = numbers(1, 4, 5, 5), [], nn.Module._call_impl
    monkeypatch.setattr(nn.Module, "_call_impl", lambda self, *args, **kwargs: (made.append(self), call(self, *args, **kwargs))[1])

    def called(change=lambda model: None):
        for model in (ours, theirs):
            change(model)
        with torch.no_grad():
            expected = theirs(x)
            made.clear()
            close(ours(x), expected)
        return len(made)

    seen = []
    assert called() == called() == 1
    assert called(lambda model: setattr(model.block[3], "weight", nn.Parameter(model.block[3].weight * 2))) == 1
    assert called(lambda model: model.block[2].weight.data.add_(1)) == 1
    assert called(lambda model: setattr(model.block[2], "eps", 0.01)) > 1 and pn.convert(ours) and called() == 1
    handles = [model.block[6].register_forward_hook(lambda *args: seen.append(1)) for model in (ours, theirs)]
    assert called() > 1 and len(seen) == 2
    assert called(lambda model: handles.pop().remove()) == 1
    torch.manual_seed(0)
    with torch.no_grad():
        assert not torch.equal(ours.train()(x), theirs.eval()(x))
    assert called(lambda model: model.eval()) == 1
    assert called(lambda model: setattr(model.block, "5", nn.Tanh())) > 1
    same(ours, theirs, x)


@pytest.fixture
def steps(monkeypatch):
    """The names of what a forward computes in one step where torch has several, besides convolutions."""
    made = []
    for module, name in ((chains, "normalised"), (chains.linear, "in_one"), (chains.pooling, "evaluated")):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, of=function, name=name, **options: (made.append(name), of(*args, **options))[1])
    return made


class Dense(nn.Module):
    """As the layers of DenseNet, with max pooling by a module and by a function."""

    def __init__(self):
        super().__init__()
        self.norm, self.act, self.conv = nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 3, 3, padding=1, bias=False)
        self.next, self.pool = nn.BatchNorm2d(7), nn.MaxPool2d(2, ceil_mode=True)

    def forward(self, x):
        y = self.pool(torch.cat([x, self.conv(self.act(self.norm(x)))], 1))
        return F.max_pool2d(F.leaky_relu(self.next(y), 0.2), kernel_size=3, stride=1)


def test_normalisations_in_front_and_poolings_are_single_steps(where, steps):
    theirs = ready(Dense(), where)
    ours, x = pn.convert(copy.deepcopy(theirs)), numbers(2, 4, 9, 8, where=where)
    for changed in (False, True):
        if changed:
            for model in (ours, theirs):
                model.norm.running_mean.add_(1), model.norm.num_batches_tracked.add_(1), setattr(model.next, "eps", 0.5)
        steps.clear()
        with torch.no_grad():
            close(ours(x), theirs(x))
        assert steps == ["normalised", "evaluated", "normalised", "evaluated"]
    same(ours, theirs, x)
    for model in (ours, theirs):
        model.norm.register_forward_hook(lambda *args: args[2] * 2)
    with torch.no_grad():
        close(ours(x), theirs(x))


class Depth(nn.Module):
    def forward(self, x):
        return stochastic_depth(x, 0.5, "row", self.training)


@torch.fx.wrap
def stochastic_depth(input, p, mode, training=True):
    return input * 2 if training else input


stochastic_depth.__module__ = "torchvision.ops.stochastic_depth"


@pytest.mark.parametrize("drop", [nn.Identity, Depth])
def test_linear_layers_take_in_what_follows_them(steps, drop):
    theirs = ready(Scaling())
    theirs.block.append(drop().eval())
    theirs.block[5].p = 0.0
    ours, x = pn.convert(copy.deepcopy(theirs), linear=True), numbers(1, 4, 5, 5)
    with torch.no_grad():
        close(ours(x), theirs(x))
    assert steps == ["in_one", "in_one"]
    (function,) = [variant.function for variant in ours._fusion.variants.values()]
    assert function.__code__.co_names.count("mul") + function.__code__.co_names.count("permute") <= 1  # the one in front of the norm
    same(ours, theirs, x)
    steps.clear()
    with torch.no_grad():
        close(pn.convert(ours)(x), theirs(x))
    assert not steps


# what may change of a convolution and a batch normalisation behind it
CHANGES = {
    "statistics": lambda c, n: (n.running_mean.add_(1), n.num_batches_tracked.add_(1)), "in place": lambda c, n: n.bias.detach().add_(1),
    "data": lambda c, n: setattr(n.weight, "data", n.weight * 2), "another": lambda c, n: setattr(n, "weight", nn.Parameter(n.weight + 1)),
    "eps": lambda c, n: setattr(n, "eps", 0.5), "stride": lambda c, n: setattr(c, "stride", (2, 2)), "training": lambda c, n: n.train(),
    "hook": lambda c, n: n.register_forward_hook(lambda *args: args[2] * 2), "class": lambda c, n: setattr(c, "__class__", nn.Conv2d),
    "hook before": lambda c, n: c.register_forward_pre_hook(lambda module, args: args[0] * 2),
    "bias": lambda c, n: setattr(c, "bias", nn.Parameter(torch.ones_like(n.bias))), "forward": lambda c, n: setattr(n, "forward", lambda x: x * 2),
    "nothing": lambda c, n: (n.to(torch.float64), c.register_full_backward_hook(lambda *args: None)),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_kept_of_two_modules_holds_until_they_change(change):
    """In C and in Python alike."""
    theirs = ready(nn.Sequential(nn.Conv2d(2, 3, 1, bias=False), nn.BatchNorm2d(3))).requires_grad_(False)
    ours = pn.convert(copy.deepcopy(theirs))
    x = numbers(2, 2, 4, 4)
    with torch.no_grad():
        ours(x)
        kept = ours[1]._folded
        before = chains._folded(ours[0], ours[1])
        assert ours[1]._folded is kept and chains._folded(ours[0], ours[1]) is before
        assert watch._holds(kept.conditions) and watch.holds(kept.conditions)
        for model in (ours, theirs):
            CHANGES[change](*model)
        assert watch._holds(kept.conditions) is watch.holds(kept.conditions) is (change == "nothing")
        close(ours(x), theirs(x))
    twin = pickle.loads(pickle.dumps(kept))
    assert twin is None and copy.deepcopy(kept) is None


class UncountedNorm(nn.BatchNorm2d):
    """A batch normalisation with its activation, which does not count batches."""

    def forward(self, x):
        y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps)
        return F.relu(y)


class ThreeChains(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 3, 1, bias=False), nn.BatchNorm2d(3)
        self.conv2, self.norm2 = nn.Conv2d(3, 3, 1), UncountedNorm(3)
        self.conv3, self.act = nn.Conv2d(3, 3, 1), nn.SiLU()

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)) + x)
        return self.act(self.conv3(self.norm2(self.conv2(y))))


def trained_a_step(model):
    """Batch statistics, gradients and an optimizer's step."""
    optimizer = torch.optim.SGD(model.requires_grad_().parameters(), 0.1, momentum=0.9)
    model.train()(numbers(2, 3, 3, 3, seed=5)).square().mean().backward()
    optimizer.step()
    model.zero_grad(), model.eval()


def hooked_everywhere(model):
    """Hooks of all modules together, while one more result is made."""
    doubled = nn.modules.module.register_module_forward_hook(lambda module, args, y: y * 2 if isinstance(module, nn.Conv2d) else y)
    try:
        return model(numbers(2, 3, 3, 3))
    finally:
        doubled.remove()


def called_with_others(model):
    return torch.func.functional_call(model, {name: p * 2 for name, p in model.named_parameters()}, numbers(2, 3, 3, 3))


def loaded(model, **options):
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, strict=False, **options)


# what may happen to a network; what it returns is compared too
EVENTS = {
    "a step": trained_a_step, "statistics alone": lambda m: (m.train()(numbers(2, 3, 3, 3)), m.eval())[0], "hooks": hooked_everywhere,
    "functional call": called_with_others, "state": loaded, "state, assigned": lambda m: loaded(m, assign=True),
    "all in place": lambda m: [p.mul_(0.9) for p in m.parameters()][99:], "another filter": lambda m: setattr(m.conv2, "weight", nn.Parameter(m.conv2.weight * 2)),
    "other numbers": lambda m: setattr(m.norm1.bias, "data", m.norm1.bias + 1), "apply": lambda m: m.apply(lambda one: None) and None,
    "float and back": lambda m: m.float().double() and None, "no bias": lambda m: setattr(m.conv2, "bias", None),
    "a bias": lambda m: setattr(m.conv1, "bias", nn.Parameter(torch.ones(3).double())), "no counter": lambda m: setattr(m.norm1, "num_batches_tracked", None),
    "another mean": lambda m: setattr(m.norm2, "running_mean", m.norm2.running_mean + 1), "reset": lambda m: m.norm2.reset_running_stats(),
    "mean over batches": lambda m: setattr(m.norm1, "momentum", None), "eps": lambda m: setattr(m.norm2, "eps", 0.1), "act": lambda m: setattr(m, "act", nn.Tanh()),
    "norm": lambda m: setattr(m, "norm1", nn.BatchNorm2d(3).double().eval()),
    "a weight norm": lambda m: nn.utils.parametrizations.weight_norm(m.conv1) and None, "an old weight norm": lambda m: nn.utils.weight_norm(m.conv3) and None,
    "pruned": lambda m: prune.l1_unstructured(m.conv3, "weight", 3) and None, "a hook": lambda m: m.norm1.register_forward_hook(lambda *args: args[2] * 2) and None,
    "a hook before": lambda m: m.conv3.register_forward_pre_hook(lambda module, args: args[0] * 2) and None, "frozen": lambda m: m.requires_grad_(False) and None,
    "the first in training": lambda m: m.norm1.train() and None, "evaluated": lambda m: m.eval() and None, "with gradients": lambda m: m(numbers(2, 3, 3, 3)),
    "forward": lambda m: setattr(m.act, "forward", torch.sigmoid), "channels last": lambda m: m.to(memory_format=torch.channels_last) and None,
}  # fmt: skip


@pytest.mark.parametrize("part", range(6))
def test_whatever_happens_to_a_network_happens_to_its_conversion(part):
    """Events in any order, with statistics that move in between, and after each of them the results, parameters and buffers are those of the network that was not converted."""
    theirs = ready(ThreeChains())
    ours = pn.convert(copy.deepcopy(theirs), fuse_training=part % 2 == 1)
    assert [len(one.fused) for one in pn.report(ours).converted] == [3, 2, 1]
    x, order = numbers(2, 3, 3, 3), sorted(EVENTS)
    random.Random(0).shuffle(order)
    for name in ["statistics alone", *order[part::6], "statistics alone"]:
        results = []
        for model in (ours, theirs):
            with torch.set_grad_enabled("step" in name or "gradients" in name):
                made = EVENTS[name](model)
            with torch.no_grad():
                results.append([made, model(x), model(x), *model.state_dict().values()])
        for got, expected in zip(*results, strict=True):
            if isinstance(expected, torch.Tensor):
                close(got, expected)


@pytest.mark.parametrize("part", ["norm1", "norm2"])
@pytest.mark.parametrize("grad", [False, True])
def test_statistics_that_move_while_the_network_is_evaluated(part, grad):
    """Not every batch normalisation counts the batches that move them, and where one is in training the network's own forward runs."""
    theirs = ready(ThreeChains())
    theirs.norm1.num_batches_tracked = None
    ours, x = pn.convert(copy.deepcopy(theirs)), numbers(2, 3, 3, 3)
    for model in (ours, theirs):
        with torch.no_grad():
            model(x)
        getattr(model, part).train()
        with torch.set_grad_enabled(grad):
            model(x)
        model.eval()
    with torch.no_grad():
        close(ours(x), theirs(x))


def test_batch_normalisations_of_other_kinds_are_called():
    class Split(nn.BatchNorm2d):
        def forward(self, x):
            return torch.cat([super(Split, self).forward(half) for half in x.chunk(2)]) if self.training else super().forward(x)

    class Scaled(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x * 2)

    class Shifted(nn.BatchNorm2d):
        def forward(self, x):
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps + 1)

    class Cumulative(NormAct):
        def __init__(self, channels):
            super().__init__(channels, drop=nn.Dropout(0.0))
            self.momentum = None

    for norm, fused in ((Split, True), (Scaled, False), (Shifted, False), (Cumulative, True)):
        theirs = ready(nn.Sequential(nn.Conv2d(2, 3, 1), norm(3), nn.ReLU()))
        ours = pn.convert(copy.deepcopy(theirs), fuse_training=True)
        assert bool(pn.report(ours).converted[0].fused) is fused and not pn.report(ours).notes
        same(ours, theirs, numbers(4, 2, 3, 3))


# ---- convolutions of other classes


def test_subclasses_of_convolutions():
    class Weighted(nn.ConvTranspose2d):
        def forward(self, x, output_size=None):
            return super().forward(x * 2, output_size)

    for theirs, shape in ((VideoConv(2, 3), (1, 2, 3, 4, 4)), (Weighted(2, 3, 2, 2), (1, 2, 3, 3)), (StandardConv(2, 3, 3), (1, 2, 5, 5))):
        theirs = ready(theirs)
        ours = pn.convert(copy.deepcopy(theirs))
        assert isinstance(ours, type(theirs)) and repr(ours).replace(", by pycuda_conv", "") == repr(theirs) and isinstance(ours, pn.Conv3d) is isinstance(ours, VideoConv)
        same(ours, theirs, numbers(*shape))
        if isinstance(ours, VideoConv):
            assert type(ours).get_downsample_stride(2) == (2, 2, 2)
            twin = pickle.loads(pickle.dumps(ours))
            assert type(twin) is type(ours) and twin.precision == "fp32"
    assert pn.convert(ours, precision="tf32").precision == "tf32"
    lazy = nn.Sequential(nn.LazyConv2d(3, 1))
    (note,) = pn.report(pn.convert(lazy)).notes
    assert note.startswith("0 (torch.nn.modules.conv.LazyConv2d) was left as it is: its parameters have no sizes yet")
    lazy(torch.zeros(1, 2, 3, 3))
    assert type(pn.convert(lazy)[0]) is pn.Conv2d


@pytest.mark.parametrize("kind", [nn.Conv2d, StandardConv])
def test_parametrised_convolutions(kind, calls):
    theirs = ready(nn.Sequential(nn.utils.parametrizations.weight_norm(kind(2, 3, 1)), nn.BatchNorm2d(3)))
    ours = pn.convert(copy.deepcopy(theirs))
    same(ours, theirs, numbers(2, 2, 3, 3))
    assert "plain" in calls or "epilogue" in calls or "routed" in calls
    for model in (ours, theirs):
        nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    assert type(ours[0]) is pn.Conv2d or kind is not nn.Conv2d
    same(ours, theirs, numbers(2, 2, 3, 3))


# ---- torch's functions


FUNCTIONS = {
    "conv1d": ((2, 4, 7), (6, 2, 3), 6, {"stride": 2, "padding": 1, "groups": 2}),
    "conv2d": ((2, 3, 6, 5), (4, 3, 3, 2), 4, {"stride": (2, 1), "padding": "valid", "dilation": (1, 2)}),
    "conv3d": ((1, 2, 3, 4, 3), (2, 1, 2, 2, 2), 2, {"padding": 1, "groups": 2}),
    "conv_transpose1d": ((2, 4, 3), (4, 2, 3), 4, {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2}),
    "conv_transpose2d": ((1, 2, 3, 2), (2, 2, 2, 2), 2, {"dilation": (2, 3), "padding": 1}),
    "conv_transpose3d": ((1, 2, 2, 2, 3), (2, 3, 2, 1, 2), 3, {"stride": (1, 2, 1)}),
    "conv_tbc": ((5, 2, 3), (3, 3, 4), 4, {"pad": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("of", [F, torch], ids=["functional", "torch"])
def test_functions_are_routed(name, of, where, calls):
    *shapes, bias, options = FUNCTIONS[name]
    inputs = [numbers(*shape, where=where, grad=True) for shape in (*shapes, (bias,))]
    function = getattr(of, name)

    def results():
        y = function(*inputs, **options)
        return y, *torch.autograd.grad(y.sin().sum(), inputs)

    expected = results()
    assert not calls
    with pn.routed():
        got = results()
    assert calls == ["routed"]
    for ours, theirs in zip(got, expected, strict=True):
        close(ours, theirs)


def test_what_routes(calls):
    layer, x = nn.Conv2d(2, 3, 3, padding_mode="reflect", padding=1).double(), numbers(1, 2, 5, 5)

    @pn.routed(precision="tf32")
    def decorated(depth):
        return decorated(depth - 1) if depth else layer(x)

    expected = layer(x)
    close(decorated(2), expected)
    assert calls == ["routed"] and layer(x) is not None and len(calls) == 1
    with pn.routed(), pytest.raises(RuntimeError, match="channels"):
        layer(x[:, :1])
    rest = layer.weight, layer.bias, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    with pn.routed():
        close(torch.convolution(x, *rest), F.conv2d(x, layer.weight, layer.bias, padding=1))
        calls.clear()
        assert F.conv2d(x.to(torch.complex128), layer.weight.to(torch.complex128)).dtype == torch.complex128 and not calls  # is torch's
        torch.convolution(numbers(1, 3, 5, 5), layer.weight, None, *rest[2:5], True, [0, 0], 1)
        assert calls == ["routed"]
    layer(x)
    assert len(calls) == 1
    with pytest.raises(ValueError, match="precision must be one of"):
        pn.routed("fp8")


def test_models_of_timm(calls):
    """Where timm is installed, with torchvision that fits torch."""
    try:
        import timm
    except Exception as error:  # torchvision, which it imports, raises a RuntimeError for another torch
        pytest.skip(f"timm can't be imported: {error}")
    x = numbers(1, 3, 64, 64)
    for name, fused in (("repvgg_a0", 44), ("tf_efficientnet_b0", 44), ("dla34", 37), ("hrnet_w18_small", 91), ("resnet18", 20)):
        torch.manual_seed(0)
        theirs = timm.create_model(name).double().eval()
        ours = pn.convert(copy.deepcopy(theirs))
        calls.clear()
        with torch.no_grad():
            close(ours(x), theirs(x))
        assert calls.count("epilogue") == fused and not pn.report(ours).notes, name


# ---- TorchScript


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")
def test_what_torchscript_computes_is_left_to_it():
    x = torch.randn(2, 4, 9, 9)
    for script in (torch.jit.script, lambda module: torch.jit.trace(module, x)):
        scripted = script(nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()))
        assert not pn.report(pn.convert(scripted)).converted
        model = nn.Sequential(scripted, nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8), nn.ReLU()).eval()
        expected = model(x)
        done = pn.report(pn.convert(model))
        assert [(one.name, one.fused) for one in done.converted] == [("1", ("2", "3"))]
        assert len(done.notes) == 1 and done.notes[0].startswith("0 (torch.jit.") and "TorchScript computes it" in done.notes[0]
        with torch.no_grad():
            torch.testing.assert_close(model(x), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")
def test_a_traced_model_keeps_no_folded_statistics():
    x = torch.randn(2, 4, 9, 9)
    model = pn.convert(nn.Sequential(nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8), nn.ReLU()).eval())
    with torch.no_grad():
        model(x)
        traced = torch.jit.trace(model, x)
        model[1].running_mean.add_(1)
        torch.testing.assert_close(traced(x), model(x))
