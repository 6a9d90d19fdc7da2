"""Steps that reorder a value in front of an upsampling, as a decoder of videos makes two frames of one's channels.

Torch makes a copy for each step that can't be a view, in C order, and the upsampled convolution behind copies once more into its own order.
Where the graph runs as it is, one copy does all, in the order that the convolution reads. Its runs are the channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from pycuda_conv.nn.graph import upsamplings
from pycuda_conv.nn.graph.memory import is_plain
from pycuda_conv.nn.graph.rewriting import Chain, Rewrite, lies
from pycuda_conv.nn.graph.steps import CONVOLUTIONS, VIEWS, name_of, value
from pycuda_conv.problem import channels_last

LEAST_RUN = 32  # bytes of neighbours that a copy moves together
#: Steps after which elements stand in another order; other views keep it.
_MOVES = frozenset(("permute", "transpose", "movedim", "swapaxes"))
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


def take(rewrite: Rewrite, wide: Node, grad: bool) -> None:
    """Put one copy in the place of a row of such steps in front of an upsampling."""
    found = upsamplings.factors(wide) if rewrite.targets.shares and _is_convolved(wide) else None
    if found is None or found[0].target not in VIEWS or len(found[0].users) > 1 or rewrite.needs_gradient(grad, found[0]):
        return
    node, nodes = found[0], [found[0]]
    while (before := nodes[0].args[0]) in rewrite.order and before.target in VIEWS and rewrite.reader_of(before) is nodes[0]:
        nodes.insert(0, before)
    while nodes and not _lies_last(nodes[0].args[0]):
        del nodes[0]
    if not nodes or not all(is_plain(n) and value(n).dtype is value(nodes[0].args[0]).dtype for n in nodes):
        return
    x, made = nodes[0].args[0], value(node)
    if rewrite.memory_of(x) == rewrite.memory_of(node) or made.dim() not in (4, 5):  # all of them are views
        return
    parts = _followed(nodes, value(x).shape)
    if parts is None:
        return
    sizes, order = parts
    behind = [i for i, own in enumerate(order) if i != 1 for i in own] + order[1]
    trial = Chain(nodes[0], rewrite.order[nodes[0]], [x])
    trial.nodes = list(nodes)
    if not order[1] or _stride(value(x), sizes, order[1][-1]) != 1 or sizes[order[1][-1]] * made.itemsize < LEAST_RUN:
        return
    if not rewrite.reaches(trial, node):
        return
    last = channels_last(made.dim(), made.dim() - 2)
    assert last is not None
    back = [0, made.dim() - 1, *range(1, made.dim() - 1)]
    moved = ("view", sizes), ("permute", behind), ("contiguous", ()), ("view", [made.shape[i] for i in last]), ("permute", back)
    with rewrite.graph.inserting_before(node):
        new: Any = x
        for method, given in moved:
            new, shown = rewrite.graph.call_method(method, (new, *given)), value(new)
            with torch.no_grad():
                new.meta["example_value"] = getattr(shown.detach(), method)(*given)
    steps, shown = tuple(dict.fromkeys(name_of(n) for n in nodes)), value(new)
    rewrite.replace(nodes, new)
    new.meta["example_value"] = shown
    form = torch.channels_last if made.dim() == 4 else torch.channels_last_3d
    wide.meta["example_value"] = value(wide).detach().contiguous(memory_format=form)
    rewrite.found.others.append(steps)


def _is_convolved(node: Node) -> bool:
    """Whether a convolution is all that reads a value."""
    users = list(node.users)
    return len(users) == 1 and users[0].op == "call_function" and users[0].target in CONVOLUTIONS and users[0].args[:1] == (node,)


def _lies_last(node: Any) -> bool:
    """Whether a value lies with its channels last."""
    return is_plain(node) and value(node).dim() > 2 and lies(value(node), channels_last(value(node).dim(), value(node).dim() - 2))


def _stride(x: Any, sizes: Sequence[int], part: int) -> int:
    """The stride of one of the parts into which a tensor's axes are split."""
    return int(x.detach().view(sizes).stride(part))


def _followed(nodes: Sequence[Node], shape: Sequence[Any]) -> tuple[list[int], list[list[int]]] | None:
    """Sizes of the parts of a tensor's axes that steps move, and of which of them, in order, each axis of the result consists.

    None where a step is another one, or sizes are not constants.
    """
    parts: list[list[Any]] = [[n] for n in range(len(shape))]  # names of parts: an axis, or (part, 0) and (part, 1)
    sizes: dict[Any, int] = dict(enumerate(shape))
    split: dict[Any, tuple[Any, Any]] = {}
    for node in nodes:
        wanted, word = value(node).shape, str(getattr(node.target, "__name__", node.target)).partition(".")[0]
        if not all(isinstance(n, int) for n in (*shape, *wanted)):
            return None
        if word in _MOVES:
            shown = torch.empty(_PRIMES[: len(parts)], device="meta")
            args = tuple(shown if one is node.args[0] else one for one in node.args)
            moved = getattr(shown, word)(*args[1:], **node.kwargs)
            parts = [parts[_PRIMES.index(n)] for n in moved.shape]
            continue
        queue = [part for own in parts for part in own if sizes[part] != 1]
        parts = []
        for size in wanted:
            own, left = [], size
            while left > 1:
                part = queue.pop(0)
                if sizes[part] > left:
                    if sizes[part] % left:
                        return None
                    split[part] = (part, 0), (part, 1)
                    sizes[part, 0], sizes[part, 1] = left, sizes[part] // left
                    queue.insert(0, (part, 1))
                    part = part, 0
                if left % sizes[part]:
                    return None
                own.append(part)
                left //= sizes[part]
            parts.append(own)

    def whole(part: Any) -> list[Any]:
        return [one for half in split[part] for one in whole(half)] if part in split else [part]

    every = [one for axis in range(len(shape)) for one in whole(axis)]
    places = {part: i for i, part in enumerate(every)}
    order = [[places[one] for part in own for one in whole(part)] for own in parts]
    seen = {i for own in order for i in own}
    if math.prod(shape) == 0 or any(i not in seen and sizes[every[i]] != 1 for i in places.values()):
        return None
    order[0][:0] = [i for i in places.values() if i not in seen]  # parts of one element, anywhere
    return [sizes[part] for part in every], order
