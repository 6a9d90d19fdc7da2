"""Concatenations that begin with an earlier one, as those of a DenseNet, whose layers read all layers before: they take its result.

Then each array is read once, and its gradient is a slice. Torch would cut as many slices of gradients as layers read the array, and add
them one by one.
"""

from __future__ import annotations

from torch.fx import Node

from pycuda_conv.nn.graph.memory import is_plain
from pycuda_conv.nn.graph.rewriting import Chain, Rewrite
from pycuda_conv.nn.graph.steps import CATS, bound, value


def take(rewrite: Rewrite, node: Node, grad: bool) -> None:
    """Let a concatenation that is trained begin with the result of the longest earlier one that it repeats."""
    found = _parts(node) if rewrite.targets.nests_cats else None
    if found is None or not rewrite.needs_gradient(grad, *found[0]):
        return
    parts, axis = found
    best: tuple[Node, list[Node]] | None = None
    for earlier, own, its_axis in rewrite.cats:
        if its_axis != axis or not (0 if best is None else len(best[1])) < len(own) < len(parts) or parts[: len(own)] != own:
            continue
        chain = Chain(earlier, rewrite.order[earlier], [*own, earlier])
        if rewrite.needs_gradient(grad, earlier) and rewrite.reaches(chain, node):
            best = earlier, own
    rewrite.cats.append((node, parts, axis))
    if best is not None:
        node.args, node.kwargs = ([best[0], *parts[len(best[1]) :]], axis), {}
        rewrite.forget(node)


def _parts(node: Node) -> tuple[list[Node], int] | None:
    """What a step concatenates, arrays of as many axes, and along which axis."""
    given = bound(node, ("tensors", "dim")) if node.op == "call_function" and node.target in CATS else None
    if given is None or not isinstance(given["tensors"], (list, tuple)) or not given["tensors"] or not is_plain(node):
        return None
    parts, axis, ndim = list(given["tensors"]), given["dim"] or 0, value(node).dim()
    if not isinstance(axis, int):
        return None
    if not all(is_plain(one) and value(one).dim() == ndim and value(one).dtype is value(node).dtype for one in parts):
        return None
    return parts, axis % ndim
