"""The networks that ``bench --models`` measures, with random weights, by name.

A name is one of torchvision's; ``timm:NAME`` is one of timm's, ``segformer_b0`` is transformers' with its default configuration, and those
of :mod:`pycuda_conv.tools.programs` are written here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from pycuda_conv.tools.programs import program
from pycuda_conv.tools.terminal import ToolError, require

CALIBRATION_IMAGES = 4  # batch normalisations get the statistics of so many images
#: Sizes of one input, where they are not those of a photograph.
INPUTS = {"segformer_b0": (3, 512, 512)}
PHOTOGRAPH = 3, 224, 224
#: Numbers of images, where 32 would be too many.
FEWER = {"segformer_b0": 8}
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
    own = program(name)
    return INPUTS.get(name, PHOTOGRAPH) if own is None else own.shape


def most_images(name: str, images: int) -> int:
    """`images`, or fewer where so many would be too many."""
    own = program(name)
    return min(images, FEWER.get(name, images) if own is None else own.images)


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
    own = program(name)
    if own is not None:
        return own.make(torch)
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

