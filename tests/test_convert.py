"""Converted models, in evaluation and in training, beside their originals."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from test_compile import SameConv, moved

import pycuda_conv.nn as pn
from pycuda_conv.nn import modules, routing

nn, F = torch.nn, torch.nn.functional


@pytest.fixture
def calls(monkeypatch):
    """What this package computes: "plain" for a module's convolution, "routed" for one in a forward of its own."""
    made = []

    def noted(function, word):
        def call(*args, **options):
            made.append(word)
            return function(*args, **options)

        return call

    for name in ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"):
        ours = getattr(pn, name)
        monkeypatch.setattr(ours, "function", staticmethod(noted(ours.function, "plain")))
    for theirs, ours in routing._ROUTES.items():
        monkeypatch.setitem(routing._ROUTES, theirs, noted(ours, "routed"))
    return made


def numbers(*shape, where="cpu", seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(where).requires_grad_(grad)


WITHIN = 1e-10


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=WITHIN, atol=WITHIN)


def ready(model, where="cpu"):
    """The model in float64, with statistics and parameters that are not those of a new one."""
    return moved(model).double().to(where).eval()


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


class PlainNorm(nn.BatchNorm2d):
    """A subclass that computes what its base does."""

    def extra_repr(self):
        return "plain"


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


def video():
    return nn.Sequential(VideoConv(2, 3), nn.BatchNorm3d(3), nn.ReLU(inplace=True), nn.Conv3d(3, 2, (1, 3, 3)), nn.BatchNorm3d(2))


def residual():
    return nn.Sequential(
        SameConv(3, 4, 3, stride=2, bias=False), PlainNorm(4), nn.ReLU(), ResNetBlock(4), ResNetBlock(4, 0.5),
        ResNetBlock(4, 0.0, StandardConv)
    )  # fmt: skip


def decoder():
    """A transposed convolution, a border, a norm without parameters, layers that are no convolutions."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU6()), nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        nn.BatchNorm2d(4, affine=False), nn.ReLU(), nn.ConvTranspose2d(4, 2, 2, stride=2), nn.BatchNorm2d(2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8, 3)
    )  # fmt: skip


#: Numbers of convolutions, of a compiled graph's chains in evaluation and in training, of layers that keep their own forward; input.
NETWORKS = {
    "ResNet": (residual, 7, 7, 7, 2, (2, 3, 9, 8)),
    "video": (video, 2, 2, 2, 0, (2, 2, 4, 5, 6)), "decoder": (decoder, 3, 3, 2, 0, (2, 3, 6, 6)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_converted(where, name, calls):
    make, count, evaluated, trained, own, shape = NETWORKS[name]
    theirs = ready(make(), where)
    ours = copy.deepcopy(theirs)
    parameters = [id(p) for p in ours.parameters()]
    assert pn.convert(ours) is ours and [id(p) for p in ours.parameters()] == parameters
    done = pn.report(ours)
    assert len(done.converted) == count and not done.notes and not done.graphs, str(done)
    assert sum(one.by_its_own_forward for one in done.converted) == own
    x = numbers(*shape, where=where)
    assert list(ours.state_dict()) == list(theirs.state_dict()) and repr(ours).replace(", by pycuda_conv", "") == repr(theirs)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for model in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(file, weights_only=False)):
        calls.clear()
        with torch.inference_mode():
            close(model(x), theirs(x))
        assert calls.count("routed") == own and len(calls) == count
    same(ours, theirs, x)
    torch._dynamo.reset()
    same(pn.compile(ours, "light"), theirs, x)
    graphs = pn.report(ours).graphs
    assert [len(graph.fused) for graph in graphs if graph.gradients][-1] == trained, pn.report(ours)
    assert [len(graph.fused) for graph in graphs if not graph.gradients] == [evaluated], pn.report(ours)
    close(pn.revert(ours)(x), theirs(x))
    assert [type(m) for m in ours.modules()] == [type(m) for m in theirs.modules()] and vars(ours).keys() == vars(theirs).keys()


def test_the_report_is_asked_for():
    model = nn.Sequential(SameConv(3, 4, 3, stride=2), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Sequential(nn.Identity()))
    with pytest.raises(
        ValueError, match=r"model, a Sequential, was not converted, and no graph was made of it: call convert\(model\), or compile"
    ):
        pn.report(model)
    assert pn.convert(model) is model
    assert str(pn.report(model)) == "2 convolutions converted\n  0 (SameConv), by its own forward\n  1 (Conv2d)"
    assert str(pn.report(pn.convert(nn.Conv2d(1, 1, 1)))) == "1 convolution converted\n  the model (Conv2d)"
    for function in (pn.convert, pn.revert, pn.compile):
        with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got None"):
            function(None)


def test_what_fused_before_tells_what_fuses_now():
    model = nn.Sequential(nn.Conv2d(1, 1, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pn.convert(model)
    for options in ({"fuse": True}, {"fuse": False}, {"fuse_training": True}, {"fuse_training": False}):
        (name,) = options
        with pytest.warns(
            DeprecationWarning,
            match=rf'{name}= does nothing any more and will go; torch.compile fuses: model.compile\(backend="pycuda_conv"\)'
        ) as told:
            assert type(pn.convert(model, **options)[0]) is pn.Conv2d
        assert len(told) == 1 and told[0].filename == __file__
    with pytest.warns(DeprecationWarning):
        pn.convert(model, "tf32", True)
    assert model[0].precision == "tf32"


# ---- what torch's own layers bear


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_methods_of_one_layer_are_replaced(kind, calls):
    x = torch.randn(1, 2, 5, 5)
    methods = {"forward": lambda self, x: kind.forward(self, x) * 2}
    if kind is nn.Conv2d:
        methods["_conv_forward"] = lambda self, x, weight, bias: F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), weight, bias)
    for name, method in methods.items():
        for when in ("before", "after"):
            theirs = nn.Sequential(kind(2, 3, 3))
            ours = copy.deepcopy(theirs)
            if when == "after":
                pn.convert(ours)
            for model in (theirs, ours):
                setattr(model[0], name, method.__get__(model[0]))
            if when == "before":
                pn.convert(ours)
            calls.clear()
            torch.testing.assert_close(ours(x), theirs(x))
            assert bool(calls) is (
                (when == "before" and name == "_conv_forward") or (name == "forward" and kind is nn.Conv2d)
            ), (name, when)
            assert type(pn.revert(ours)[0]) is kind
            torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize(
    "kind, name", [(nn.Conv2d, "_conv_forward"), (nn.Conv2d, "forward"), (nn.ConvTranspose2d, "forward"), (nn.Linear, "forward")]
)
def test_methods_of_a_class_are_replaced(kind, name, monkeypatch):
    x = torch.randn(2, 3, 6, 6) if kind is not nn.Linear else torch.randn(2, 3)
    theirs, genuine = nn.Sequential(kind(3, 4, *((3,) if kind is not nn.Linear else ()))), getattr(kind, name)
    ours = pn.convert(copy.deepcopy(theirs), linear=True)
    expected = theirs(x)
    monkeypatch.setattr(kind, name, lambda self, *args: genuine(self, *args) + 1)
    for model in (ours, pn.convert(copy.deepcopy(theirs), linear=True)):
        torch.testing.assert_close(model(x), expected + 1)
    monkeypatch.undo()
    torch.testing.assert_close(ours(x), expected)


def test_a_method_that_was_replaced_before_is_never_taken_for_torch_s():
    assert modules._torchs(nn.Conv2d, "_conv_forward") is nn.Conv2d._conv_forward

    class Patched(nn.Conv2d):
        def _conv_forward(self, *args):
            return super()._conv_forward(*args)

    assert modules._torchs(Patched, "_conv_forward") is modules._torchs(Patched, "forward") is modules._nobodys


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantizers_are_told_which_classes_they_look_for():
    quantization = pytest.importorskip("torch.ao.quantization")
    model = pn.convert(nn.Sequential(quantization.QuantStub(), nn.Conv2d(3, 8, 3), nn.ReLU(), quantization.DeQuantStub()).eval())
    model.qconfig = quantization.get_default_qconfig("fbgemm")
    with pytest.warns(
        UserWarning,
        match=r"this is a pycuda_conv\.nn\.modules\.Conv2d: it will not be quantized\. Call pycuda_conv\.nn\.revert\(model\) first"
    ):
        quantization.prepare(model)
    layer = pn.Conv2d(1, 1, 1)
    layer.qconfig = None
    del layer.qconfig
    with pytest.raises(AttributeError):
        del layer.qconfig
    assert not hasattr(layer, "qconfig") and not hasattr(pn.Conv2d(1, 1, 1), "qconfig")
    del model.qconfig
    pn.revert(model)
    model.qconfig = quantization.get_default_qconfig("fbgemm")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*will not be quantized")
        prepared = quantization.prepare(model)
    prepared(torch.randn(1, 3, 8, 8))
    assert type(quantization.convert(prepared)[1]).__module__.endswith("quantized.modules.conv")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_reverted_model_is_torch_s_again():
    theirs = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), SameConv(3, 3, 3), VideoFrames(), nn.ConvTranspose2d(3, 2, 2)
    ).eval()
    ours, x = pn.compile(pn.convert(copy.deepcopy(theirs), "tf32", linear=True), "light"), torch.randn(1, 2, 8, 8)
    with torch.no_grad():
        ours(x)
        assert pn.revert(ours) is ours
        assert [type(m) for m in ours.modules()] == [type(m) for m in theirs.modules()]
        assert all("precision" not in vars(m) for m in ours.modules())
        torch.testing.assert_close(ours(x), theirs(x))
        torch.testing.assert_close(torch.jit.trace(ours, x)(x), theirs(x))
        torch.testing.assert_close(torch.jit.script(ours[:3])(x), theirs[:3](x))
    assert pickle.dumps(ours).count(b"pycuda_conv") == 0
    own = nn.Sequential(pn.Conv2d(2, 2, 3, padding=((1, 0), (0, 1))), pn.Conv2d(2, 2, 3))
    with pytest.raises(ValueError, match=r"0 has padding=.*torch's convolutions pad both sides alike"):
        pn.revert(own)
    assert type(own[1]) is pn.Conv2d and type(pn.revert(nn.Sequential(own[1]))[0]) is nn.Conv2d


class VideoFrames(nn.Module):
    """One that calls a convolution of another rank."""

    def __init__(self):
        super().__init__()
        self.conv = VideoConv(3, 3)

    def forward(self, x):
        return self.conv(x[:, :, None])[:, :, 0]


# ---- convolutions of other classes


def test_subclasses_of_convolutions():
    class Weighted(nn.ConvTranspose2d):
        def forward(self, x, output_size=None):
            return super().forward(x * 2, output_size)

    for theirs, shape in ((VideoConv(2, 3), (1, 2, 3, 4, 4)), (Weighted(2, 3, 2, 2), (1, 2, 3, 3)), (StandardConv(2, 3, 3), (1, 2, 5, 5))):
        theirs = ready(theirs)
        ours = pn.convert(copy.deepcopy(theirs))
        assert isinstance(ours, type(theirs)) and repr(ours).replace(", by pycuda_conv", "") == repr(theirs)
        assert isinstance(ours, pn.Conv3d) is isinstance(ours, VideoConv)
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
    assert "plain" in calls or "routed" in calls
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
    for name, fused in (("repvgg_a0", 44), ("tf_efficientnet_b0", 64), ("dla34", 37), ("hrnet_w18_small", 91), ("resnet18", 20)):
        torch.manual_seed(0)
        theirs = timm.create_model(name).double().eval()
        ours = pn.compile(copy.deepcopy(theirs), "light")
        with torch.no_grad():
            close(ours(x), theirs(x))
        (graph,) = pn.report(ours).graphs
        assert len(graph.fused) >= fused and not graph.left, (name, str(graph))


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
        assert [one.name for one in done.converted] == ["1"]
        assert len(done.notes) == 1 and done.notes[0].startswith("0 (torch.jit.") and "TorchScript computes it" in done.notes[0]
        with torch.no_grad():
            torch.testing.assert_close(model(x), expected)
