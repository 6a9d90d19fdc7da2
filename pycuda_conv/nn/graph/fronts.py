"""What stands in front of a convolution and becomes a part of its call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from pycuda_conv import borders
from pycuda_conv.nn.autograd import Settings
from pycuda_conv.nn.graph import upsamplings
from pycuda_conv.nn.graph.calls import Options
from pycuda_conv.nn.graph.memory import is_plain
from pycuda_conv.nn.graph.rewriting import Chain, Rewrite
from pycuda_conv.nn.graph.steps import PADS, bound, value

#: Looks at what stands in front of a chain's convolution: (rewrite, chain, options) -> the options of its call. Where it takes a step into
#: the chain, it sets the chain's operands, what these read, and its nodes. The chain is complete but for its fronts.
Front = Callable[[Rewrite, Chain, Options], Options]


def padding(rewrite: Rewrite, chain: Chain, options: Options) -> Options:
    """What is padded in front of a convolution becomes its padding. A layer that is trained has zeros around it alone."""
    if options.transposed:
        return options
    while (merged := _merged(chain.operands[0], options.settings, chain.training)) is not None:
        pad, x = chain.operands[0], merged[1]
        trial = Chain(pad, rewrite.order[pad], [x])
        if not rewrite.reaches(trial, chain.last, own=chain.nodes):
            break
        chain.operands[0] = x
        chain.reads = [(x, rewrite.order[pad]), *chain.reads[1:]]
        chain.nodes.insert(0, pad)
        options = options._replace(settings=merged[0])
    return options


#: All of these, in the order in which they look.
FRONTS: tuple[Front, ...] = (padding, upsamplings.fold)


def _merged(pad: Node, settings: Settings, zeros_alone: bool) -> tuple[Settings, Node] | None:
    """The settings of a convolution with its own padding and that of a step in front, and the step's input; None if they are not one."""
    if pad.op != "call_function" or pad.target not in PADS or len(pad.users) != 1:
        return None
    given = bound(pad, ("input", "pad", "mode", "value"))
    if given is None or not is_plain(given["input"]) or not is_plain(pad):
        return None
    mode, number, sides = given["mode"] or "constant", given["value"] or 0, given["pad"]
    if mode not in borders.MODES or isinstance(number, bool) or not isinstance(number, (int, float)):
        return None
    ndim = settings.ndim
    if not isinstance(sides, (list, tuple)) or len(sides) > 2 * ndim or len(sides) % 2:
        return None
    if not all(isinstance(n, int) and n >= 0 for n in sides):
        return None
    number = float(number) if mode == "constant" else 0.0
    mode = "zeros" if mode == "constant" and not number else mode
    added = [(0, 0)] * (ndim - len(sides) // 2) + [*zip(sides[::2], sides[1::2], strict=True)][::-1]
    own, modes = settings.padding, borders.mode_pairs(settings.padding_mode, ndim)
    fills = number or settings.padding_value
    if (zeros_alone and mode != "zeros") or (fills and any(map(any, own)) and any(map(any, added))):
        return None  # in corners between two numbers the order of the steps counts
    pairs, words = [], []
    for old, new, of_axis in zip(own, added, modes, strict=True):
        if any(m and n and not mode == word == "zeros" for m, n, word in zip(old, new, of_axis, strict=True)):
            return None
        pairs.append((old[0] + new[0], old[1] + new[1]))
        words.append(tuple(mode if n else word if m else "zeros" for m, n, word in zip(old, new, of_axis, strict=True)))
    plain = all(word == "zeros" for pair in words for word in pair)
    found = settings._replace(padding=tuple(pairs), padding_mode="zeros" if plain else tuple(words), padding_value=fills)
    return found, given["input"]


# ---- the other way: a border of a convolution as a step in front of it

_TORCHS = {"zeros": "constant", "constant": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


def pad_of(settings: Settings, x: Node) -> tuple[list[int], str, float] | None:
    """The arguments of torch's ``pad`` that does what a convolution's padding does; None if none does.

    Torch refuses a mirror that is wider than the image. Where a size is a symbol, asking makes dynamo guard on the answer.
    """
    words = {
        word for pair, own in zip(settings.padding, borders.mode_pairs(settings.padding_mode, settings.ndim), strict=True)
        for n, word in zip(pair, own, strict=True) if n
    }  # fmt: skip
    if len(words) != 1 or not words < _TORCHS.keys():
        return None
    word = words.pop()
    for (before, after), size in zip(settings.padding, value(x).shape[2:], strict=True):
        most = {"reflect": size - 1, "circular": size}.get(word)
        if min(before, after) < 0 or (most is not None and not bool(max(before, after) <= most)):
            return None
    return [n for pair in settings.padding[::-1] for n in pair], _TORCHS[word], settings.padding_value


def write_pad(rewrite: Rewrite, x: Node, given: Sequence[Any]) -> Node:
    """The step that pads."""
    made = rewrite.graph.call_function(F.pad, (x, *given))
    with torch.no_grad():
        made.meta["example_value"] = F.pad(value(x), *given)
    return made
