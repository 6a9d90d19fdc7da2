"""Activations that a graph computes more than once: blocks of U-Nets apply one to the same embedding of a time, each for itself."""

from __future__ import annotations

from torch.fx import Node

from pycuda_conv.nn.graph.memory import is_plain
from pycuda_conv.nn.graph.rewriting import Rewrite
from pycuda_conv.nn.graph.steps import activation_of


def take(rewrite: Rewrite, node: Node, grad: bool) -> None:
    """Let the readers of an activation without gradients read that of the same input before it, where the graph runs as it is."""
    if not rewrite.targets.shares or activation_of(node) is None or rewrite.needs_gradient(grad, node.args[0]):
        return
    x, order = node.args[0], rewrite.order
    if not is_plain(x) or not is_plain(node) or rewrite.effects_of(node)[1]:
        return
    others = [n for n in x.users if n is not node and n in order and (n.target, n.args, n.kwargs) == (node.target, node.args, node.kwargs)]
    before = min((n for n in others if order[n] < order[node]), key=order.__getitem__, default=None)
    if before is None or any(n.op == "output" for n in (*node.users, *before.users)):  # two results are not one tensor
        return
    read, shared = rewrite.memory_of(x), rewrite.memory_of(before) | rewrite.memory_of(node)
    for at in range(order[before] + 1, len(rewrite.nodes)):
        between = rewrite.nodes[at]
        if between is None:
            continue
        barrier, writes, _ = rewrite.effects_of(between)
        if writes & shared or (at < order[node] and (barrier or writes & read)):
            return
    node.replace_all_uses_with(before)
    rewrite.drop(node)
