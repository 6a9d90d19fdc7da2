"""What stands in front of a convolution and becomes a part of its call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pycuda_conv import borders
from pycuda_conv.nn.graph.calls import Options
from pycuda_conv.nn.graph.memory import is_plain
from pycuda_conv.nn.graph.rewriting import Chain, Rewrite
from pycuda_conv.nn.graph.steps import PADS, bound


def padding(rewrite: Rewrite, chain: Chain, options: Options, with_border: bool = False) -> Options:
    """Zeros padded in front of a convolution become its padding. With `with_border` any other border does, if there is no padding."""
    pad = chain.operands[0]
    if pad.op != "call_function" or pad.target not in PADS or len(pad.users) != 1 or options.transposed:
        return options
    given = bound(pad, ("input", "pad", "mode", "value"))
    if given is None or not is_plain(given["input"]):
        return options
    mode, number = given["mode"] or "constant", given["value"] or 0
    zeros = mode == "constant" and isinstance(number, (int, float)) and number == 0
    if zeros == with_border or (with_border and (options.settings.padding_mode != "zeros" or any(map(any, options.settings.padding)))):
        return options
    if mode not in borders.MODES or isinstance(number, bool) or not isinstance(number, (int, float)) or (number and mode != "constant"):
        return options
    sides: list[Any] = list(given["pad"]) if isinstance(given["pad"], (list, tuple)) else [-1]
    ndim, x = options.settings.ndim, given["input"]
    if not all(isinstance(n, int) and n >= 0 for n in sides) or len(sides) > 2 * ndim or len(sides) % 2:
        return options
    trial = Chain(pad, rewrite.order[pad], [x])
    if not rewrite.reaches(trial, chain.convolution):
        return options
    pairs = [*zip(sides[::2], sides[1::2], strict=True)] + [(0, 0)] * (ndim - len(sides) // 2)
    padding = tuple((a + c, b + d) for (a, b), (c, d) in zip(options.settings.padding, pairs[::-1], strict=True))
    chain.operands[0] = x
    chain.reads = [(x, rewrite.order[pad]), *chain.reads[1:]]
    chain.nodes.insert(0, pad)
    settings = options.settings._replace(padding=padding)
    return options._replace(settings=settings._replace(padding_mode=mode, padding_value=float(number)) if with_border else settings)


#: Looks at what stands in front of a chain's convolution: (rewrite, chain, options) -> the options of its call. Where it takes a step into
#: the chain, it sets the chain's operands, what these read, and its nodes.
Front = Callable[[Rewrite, Chain, Options], Options]

#: All of these, in the order in which they look.
FRONTS: tuple[Front, ...] = (padding,)
