"""The networks that ``bench --models`` measures, with random weights, by name.

A name is one of torchvision's; ``timm:NAME`` is one of timm's, ``segformer_b0`` is transformers' with its default configuration, and
``vae_decoder`` and ``small_unet`` are written here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from pycuda_conv.tools.terminal import ToolError, require

CALIBRATION_IMAGES = 4  # batch normalisations get the statistics of so many images
#: Sizes of one input, where they are not those of a photograph.
INPUTS = {"segformer_b0": (3, 512, 512), "vae_decoder": (4, 64, 64), "small_unet": (4, 64, 64)}
PHOTOGRAPH = 3, 224, 224
#: Numbers of images, where 32 would be too many.
FEWER = {"segformer_b0": 8, "vae_decoder": 2, "small_unet": 4}
SMALL = 1e-2  # a scale of at most this leaves little of its branch
#: Networks of timm's that may be drawn: most parameters, and the least part of the products that convolutions compute.
MOST_PARAMETERS, LEAST_PRODUCTS = 60_000_000, 0.5


def _with_numbers(torch: Any) -> Any:
    """Lets ``torch.linspace`` have numbers where tensors have none: networks make floats of it while they are made."""

    class WithNumbers(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **({**(kwargs or {}), "device": "cpu"} if func is torch.linspace else kwargs or {}))

    return WithNumbers()


def candidates(torch: Any, seed: int) -> Iterator[str]:
    """Names of timm's networks in an order drawn by a seed: those of a size that a benchmark bears, and that convolutions compute."""
    timm = require("timm")
    names = sorted(timm.list_models())
    random.Random(seed).shuffle(names)
    for name in names:
        try:
            with torch.device("meta"), _with_numbers(torch):
                model = timm.create_model(name, pretrained=False).eval()
            few = sum(parameter.numel() for parameter in model.parameters()) <= MOST_PARAMETERS
            fits = few and products_share(torch, model, (1, *PHOTOGRAPH)) >= LEAST_PRODUCTS
        except Exception:  # it may need a package that is not here, other images, or numbers while it is made
            continue
        if fits:
            yield f"timm:{name}"


def products_share(torch: Any, model: Any, shape: tuple[int, ...]) -> float:
    """The part of the products of a forward pass that convolutions compute; the model is on the device "meta"."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.empty(shape, device="meta"))
    counts = counter.get_flop_counts()["Global"]
    whole = sum(counts.values())
    return sum(count for operator, count in counts.items() if "convolution" in str(operator)) / whole if whole else 0.0


def input_shape(name: str) -> tuple[int, ...]:
    """The shape of one input."""
    return INPUTS.get(name, PHOTOGRAPH)


def torchvision() -> Any:
    """torchvision's networks; a ToolError if they can't be imported."""
    try:
        return require("torchvision.models")
    except RuntimeError as error:  # one that was built for another torch
        raise ToolError(f"--models needs a torchvision that fits torch, but this one can't be imported: {error}") from error


#: Arguments of networks whose names begin with one of these; without them weights would be loaded, or take seconds to draw.
_MORE: dict[tuple[str, ...], dict[str, Any]] = {
    ("deeplab", "fcn", "lraspp"): {"weights_backbone": None}, ("googlenet", "inception"): {"init_weights": False},
}  # fmt: skip


def _made(torch: Any, name: str) -> Any:
    if name in ("vae_decoder", "small_unet"):
        return vae_decoder(torch) if name == "vae_decoder" else small_unet(torch)
    if name == "segformer_b0":
        transformers = require("transformers")
        return transformers.SegformerForImageClassification(transformers.SegformerConfig())
    if name.startswith("timm:"):
        return require("timm").create_model(name.removeprefix("timm:"), pretrained=False)
    more = next((more for names, more in _MORE.items() if name.startswith(names)), {})
    return torchvision().get_model(name, weights=None, **more)


def network(torch: Any, name: str, place: str, seed: int) -> Any:
    """A network with random weights, without dropout, so that nothing is random in training.

    Its statistics are those of random images. With other statistics the results of many layers get ever smaller, until float16 underflows.
    """
    torch.manual_seed(seed)
    with torch.device(place):
        model = _made(torch, name)
        images = torch.randn(CALIBRATION_IMAGES, *input_shape(name))
    for module in model.modules():
        if isinstance(getattr(module, "p", None), float):  # Dropout and StochasticDepth
            module.p = 0.0
        if isinstance(getattr(module, "drop_prob", None), float):
            module.drop_prob = 0.0
    open_branches(torch, model)
    norms = [(module, module.momentum) for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    for norm, _ in norms:
        norm.momentum = 1.0  # the statistics become the batch's
    if norms:
        with torch.no_grad():
            model.train()(images)
    for norm, momentum in norms:
        norm.momentum = momentum
    return model


def open_branches(torch: Any, model: Any) -> None:
    """Set the scales of branches to 1 that begin so small that a branch has no effect: a layer's scale, the last norm of a block.

    These are vectors all of whose numbers are one number of at most SMALL, other than biases that are zero.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or not parameter.numel() or sum(size > 1 for size in parameter.shape) > 1:
            continue
        least, largest = (float(one) for one in parameter.detach().aminmax())
        if least == largest and abs(least) <= SMALL and (least or not name.rpartition(".")[2].endswith("bias")):
            torch.nn.init.ones_(parameter)


def output(found: Any) -> Any:
    """The output of a network: some return a dictionary, or an object with scores."""
    if isinstance(found, dict) and "out" in found:
        return found["out"]
    return getattr(found, "logits", found)


# ---- networks that are written here


def _residual(torch: Any) -> type:
    nn, F = torch.nn, torch.nn.functional

    class Residual(nn.Module):  # type: ignore[name-defined]
        """Norm, SiLU, 3x3, norm, SiLU, 3x3, and the input added, by a 1x1 where channels change."""

        def __init__(self, channels: int, out: int, groups: int = 32, eps: float = 1e-6) -> None:
            super().__init__()
            self.norm1, self.conv1 = nn.GroupNorm(groups, channels, eps=eps), nn.Conv2d(channels, out, 3, padding=1)
            self.norm2, self.conv2 = nn.GroupNorm(groups, out, eps=eps), nn.Conv2d(out, out, 3, padding=1)
            self.shortcut = nn.Conv2d(channels, out, 1) if channels != out else None

        def forward(self, x: Any) -> Any:
            y = self.conv1(F.silu(self.norm1(x)))
            y = self.conv2(F.silu(self.norm2(y)))
            return y + (x if self.shortcut is None else self.shortcut(x))

    return Residual


def vae_decoder(torch: Any, widths: tuple[int, ...] = (512, 512, 256, 128), latents: int = 4) -> Any:
    """A decoder as Stable Diffusion's, without attention: (N, 4, 64, 64) to (N, 3, 512, 512)."""
    nn, residual = torch.nn, _residual(torch)

    class Upsample(nn.Module):  # type: ignore[name-defined]
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.conv = nn.Conv2d(channels, channels, 3, padding=1)

        def forward(self, x: Any) -> Any:
            return self.conv(nn.functional.interpolate(x, scale_factor=2.0, mode="nearest"))

    before = widths[0]
    layers = [nn.Conv2d(latents, before, 3, padding=1), residual(before, before), residual(before, before)]
    for level, width in enumerate(widths):
        layers += [residual(before, width), residual(width, width), residual(width, width)]
        if level < len(widths) - 1:
            layers.append(Upsample(width))
        before = width
    return nn.Sequential(*layers, nn.GroupNorm(32, before, eps=1e-6), nn.SiLU(), nn.Conv2d(before, 3, 3, padding=1))


def small_unet(torch: Any) -> Any:
    """A U-Net of group norms, SiLU and 3x3 convolutions: (N, 4, 64, 64) to the same."""
    nn, residual = torch.nn, _residual(torch)

    def block(channels: int, out: int) -> Any:
        return residual(channels, out, 8, 1e-5)

    class SmallUNet(nn.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(4, 128, 3, padding=1)
            self.down = nn.ModuleList([block(128, 128), block(128, 256), block(256, 512)])
            self.shrink = nn.ModuleList([nn.Conv2d(128, 128, 3, 2, 1), nn.Conv2d(256, 256, 3, 2, 1)])
            self.up = nn.ModuleList([nn.ConvTranspose2d(512, 256, 4, 2, 1), nn.ConvTranspose2d(256, 128, 4, 2, 1)])
            self.back = nn.ModuleList([block(512, 256), block(256, 128)])
            self.last = nn.Conv2d(128, 4, 3, padding=1)

        def forward(self, x: Any) -> Any:
            a = self.down[0](self.first(x))
            b = self.down[1](self.shrink[0](a))
            c = self.down[2](self.shrink[1](b))
            y = self.back[0](torch.cat([self.up[0](c), b], 1))
            return self.last(self.back[1](torch.cat([self.up[1](y), a], 1)))

    return SmallUNet()
