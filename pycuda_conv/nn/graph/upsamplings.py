"""Nearest upsampling by whole factors in a graph: in front of a convolution, whose filter may be folded, or alone.

It is found by what it computes: torch's ``interpolate`` or one of its operators, if each pixel stands a whole number of times, and
``repeat_interleave`` along spatial axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F

from pycuda_conv.call import Call
from pycuda_conv.errors import ConvArgumentError
from pycuda_conv.nn import upsampling
from pycuda_conv.nn.autograd import Settings, traced_layout
from pycuda_conv.nn.graph.calls import Options
from pycuda_conv.nn.graph.memory import is_plain
from pycuda_conv.nn.graph.rewriting import Chain, Rewrite
from pycuda_conv.nn.graph.steps import bound, name_of, value

_INTERPOLATE = "input", "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias"
_PACKETS = [getattr(torch.ops.aten, f"{name}{n}d") for name in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)]
#: torch's operators for it.
_OPERATORS = frozenset(getattr(packet, name) for packet in _PACKETS for name in ("default", "vec") if name in packet.overloads())
_REPEATS = {torch.repeat_interleave, "repeat_interleave", torch.ops.aten.repeat_interleave.self_int}
MOST = 64  # times that a pixel may stand along an axis


def factors(node: Node) -> tuple[Node, tuple[int, ...]] | None:
    """The image of a step that upsamples it, and how many times each pixel stands along each axis; None for another step."""
    if node.op not in ("call_function", "call_method") or not is_plain(node):
        return None
    if node.target in _REPEATS:
        return _repeated(node)
    if node.target is F.interpolate:
        given = bound(node, _INTERPOLATE)
        if given is None or given["mode"] not in (None, "nearest", "nearest-exact") or given["antialias"]:
            return None
        x = given["input"]
    elif node.target in _OPERATORS:
        x = node.args[0] if node.args else node.kwargs.get("self", node.kwargs.get("input"))
    else:
        return None
    if not is_plain(x) or value(x).dim() not in (3, 4, 5):
        return None
    scales = _scales(node)
    found = []
    for axis, (n, wide) in enumerate(zip(value(x).shape[2:], value(node).shape[2:], strict=True)):
        times = _times(n, wide)
        if times is None or not _exactly(n, times, scales[axis] if axis < len(scales) else None):
            return None
        found.append(times)
    return x, tuple(found)


def _scales(node: Node) -> Sequence[Any]:
    """The factors that were given to a step, by which torch finds pixels; without them it divides sizes."""
    given = (bound(node, _INTERPOLATE) or {}).get("scale_factor") if node.target is F.interpolate else None
    if isinstance(given, (int, float)):
        return [given] * (value(node).dim() - 2)
    return given if isinstance(given, (list, tuple)) else []


def _times(n: Any, wide: Any) -> int | None:
    """How many times `n` is `wide`, which may be symbols."""
    if isinstance(n, int) and isinstance(wide, int):
        return wide // n if n and wide % n == 0 and 0 < wide // n <= MOST else None
    return next((times for times in range(1, 9) if statically_known_true(wide == times * n)), None)


def _exactly(n: Any, times: int, scale: Any) -> bool:
    """Whether torch, which finds pixels in float32, takes each of them `times` times."""
    if scale is not None and (not isinstance(scale, (int, float)) or scale != times):
        return False
    if times & (times - 1) == 0:
        return True
    if not isinstance(n, int):
        return False
    places = np.arange(n * times)
    return bool((np.floor(places.astype(np.float32) * np.float32(1 / times)) == places // times).all())


def _repeated(node: Node) -> tuple[Node, tuple[int, ...]] | None:
    """The same for one that repeats along one axis."""
    given = bound(node, ("input", "repeats", "dim", "output_size"))
    if given is None and "self" in node.kwargs:
        return None
    if given is None or not isinstance(given["repeats"], int) or not isinstance(given["dim"], int) or not is_plain(given["input"]):
        return None
    x, dims = given["input"], value(node).dim()
    axis = given["dim"] % dims if dims else 0
    if dims not in (3, 4, 5) or axis < 2 or not 0 < given["repeats"] <= MOST:
        return None
    return x, tuple(given["repeats"] if i == axis else 1 for i in range(2, dims))


def _joined(rewrite: Rewrite, node: Node) -> tuple[list[Node], Node, tuple[int, ...]] | None:
    """A row of steps that upsample one behind the other, the first of them first; the image, and all their factors."""
    found = factors(node)
    if found is None:
        return None
    nodes, (x, times) = [node], found
    while x in rewrite.order and len(x.users) == 1 and (before := factors(x)) is not None:
        nodes.insert(0, x)
        x, times = before[0], tuple(a * b for a, b in zip(times, before[1], strict=True))
    return nodes, x, times


def fold(rewrite: Rewrite, chain: Chain, options: Options) -> Options:
    """Let a convolution behind an upsampling read the image as it is, by a filter that is folded: then it is a transposed one.

    By default that is done where the filter is float32. A layer that is trained with its batch norm keeps its image.
    """
    wide, weight = chain.operands[:2]
    if options.transposed or len(wide.users) != 1 or (chain.training and chain.norm is not None):
        return options
    found = _joined(rewrite, wide)
    if found is None or max(found[2]) == 1:
        return options
    nodes, x, times = found
    settings = options.settings
    how = _folding(settings, times, rewrite.upsample_filter, value(weight))
    trial = Chain(nodes[0], rewrite.order[nodes[0]], [x])
    trial.nodes = list(nodes)
    if how is None or not rewrite.reaches(trial, chain.last, own=chain.nodes):
        return options
    last = traced_layout(value(x), settings.ndim) == "NHWC"
    with rewrite.graph.inserting_before(chain.convolution):
        made = rewrite.targets.fold_filter(weight, how, last, chain.gradient)
    with torch.no_grad():
        shown = upsampling.folded(value(weight), how)
        made.meta["example_value"] = shown.requires_grad_(value(weight).requires_grad) if chain.gradient else shown
    chain.operands[0], chain.operands[1] = x, made
    chain.reads = [(x, rewrite.order[nodes[0]]), *chain.reads[1:]]
    chain.nodes[:0] = nodes
    folded = Settings(settings.ndim, how.stride, how.padding, how.dilation, settings.groups, settings.precision, None, False)
    return options._replace(transposed=True, settings=folded, output_padding=(0,) * settings.ndim)


def turn(rewrite: Rewrite, wide: Node, form: Any) -> bool:
    """Turn an image into a memory format before it is upsampled, not after, where the graph runs as it is. Whether that was done."""
    found = factors(wide) if rewrite.targets.shares and len(wide.users) == 1 and wide in rewrite.order else None
    if found is None or wide.target in _REPEATS or wide.args[:1] != (found[0],):
        return False
    with rewrite.graph.inserting_before(wide), torch.no_grad():
        small = rewrite.graph.call_method("contiguous", (found[0],), {"memory_format": form})
        small.meta["example_value"] = value(found[0]).detach().contiguous(memory_format=form)
        wide.meta["example_value"] = value(wide).detach().contiguous(memory_format=form)
    wide.args = small, *wide.args[1:]
    return True


def _folding(settings: Settings, times: tuple[int, ...], word: str | None, weight: Any) -> upsampling.Folding | None:
    if settings.padding_mode != "zeros" or not all(isinstance(n, int) for n in weight.shape):
        return None
    ndim, stride, padding, dilation, groups, *_ = settings
    call = Call("conv", ndim, stride, padding, dilation, groups, "fp32", 0, upsample=(times, word))
    try:
        return upsampling.folding_of(call, tuple(weight.shape), str(weight.dtype).removeprefix("torch."))
    except ConvArgumentError:  # one that can't be folded, although the option asks for it
        return None


def take(rewrite: Rewrite, node: Node, grad: bool) -> None:
    """Put one launch in the place of an upsampling that stayed, where the graph runs as it is."""
    found = _joined(rewrite, node)
    if found is None or any(factors(n) is not None and len(node.users) == 1 for n in node.users):
        return
    nodes, x, times = found
    trial = Chain(nodes[0], rewrite.order[nodes[0]], [x])
    trial.nodes = list(nodes)
    if rewrite.needs_gradient(grad, x) or max(times) == 1 or not rewrite.reaches(trial, node):
        return
    with rewrite.graph.inserting_before(node):
        new = rewrite.targets.enlarge(x, times)
    if new is not None:
        names = tuple(dict.fromkeys(name_of(n) for n in nodes))
        rewrite.replace(nodes, new)
        rewrite.found.others.append(names)
