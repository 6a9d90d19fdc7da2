"""Poolings, linear layers and normalisations of a graph that stand alone."""

from __future__ import annotations

from torch.fx import Node

from pycuda_conv.nn.graph.calls import Norm
from pycuda_conv.nn.graph.memory import is_plain
from pycuda_conv.nn.graph.rewriting import Chain, Rewrite, same
from pycuda_conv.nn.graph.steps import (
    LINEARS,
    MAX_POOL_DEFAULTS,
    MAX_POOLS,
    MEAN_POOL_DEFAULTS,
    MEAN_POOLS,
    NORMS,
    PERMUTES,
    PRODUCTS,
    SUMS,
    SUMS_IN_PLACE,
    activation_of,
    bound,
    name_of,
    value,
)


def take(rewrite: Rewrite, node: Node, grad: bool) -> None:
    """Put one call in the place of a pooling, of a linear layer with what follows, or of a normalisation in front of a convolution."""
    if node.target in MAX_POOLS:
        _take_pool(rewrite, node, grad)
    elif node.target in MEAN_POOLS:
        _take_means(rewrite, node)
    elif node.target in LINEARS:
        _take_linear(rewrite, node, grad)
    elif node.target in NORMS:
        _take_lone_norm(rewrite, node, grad)


def _take_pool(rewrite: Rewrite, node: Node, grad: bool) -> None:
    given = bound(node, MAX_POOLS[node.target])
    if given is not None:
        given = {name: MAX_POOL_DEFAULTS.get(name) if v is None else v for name, v in given.items()}
    if given is None or not is_plain(given["input"]) or given.get("return_indices") or value(given["input"]).dim() != 4:
        return
    with rewrite.graph.inserting_before(node):
        new = rewrite.targets.max_pool(given, rewrite.needs_gradient(grad, given["input"]))
    if new is not None:
        rewrite.replace([node], new)
        rewrite.found.others.append((name_of(new),))


def _take_means(rewrite: Rewrite, node: Node) -> None:
    given = bound(node, MEAN_POOLS[node.target])
    if given is None or not is_plain(given["input"]) or value(given["input"]).dim() != 4:
        return
    given = {name: MEAN_POOL_DEFAULTS.get(name) if v is None else v for name, v in given.items()}
    with rewrite.graph.inserting_before(node):
        new = rewrite.targets.mean_pool(given)
    if new is not None:
        rewrite.replace([node], new)
        rewrite.found.others.append((name_of(new),))


def _take_linear(rewrite: Rewrite, node: Node, grad: bool) -> None:
    """A linear layer; without gradients, also the steps after it that fit into one convolution.

    These are the channels moved to the second place, a factor for each channel, the sum with a residual, and an activation.
    """
    given = bound(node, LINEARS[node.target])
    if given is None or not all(is_plain(n) for n in (node, *given.values()) if n is not None) or given["weight"] is None:
        return
    operands = given["input"], given["weight"], given["bias"]
    dtypes = {value(n).dtype for n in operands if n is not None}
    if len(dtypes) > 1 or value(given["weight"]).dim() != 2 or value(node).dtype not in dtypes:
        return
    gradient = rewrite.needs_gradient(grad, *operands)
    chain, scale = Chain(node, rewrite.order[node], operands), None
    following = None if gradient else rewrite.after(chain, node)
    if following is not None and following.target in PERMUTES and value(node).dim() == 4:
        order = following.args[1] if len(following.args) == 2 and isinstance(following.args[1], (list, tuple)) else following.args[1:]
        if tuple(order) == (0, 3, 1, 2) and not following.kwargs and rewrite.reaches(chain, following):
            chain.moved = True
            chain.nodes.append(following)
            following = rewrite.after(chain, following)
    if following is not None and following.target in PRODUCTS and len(following.args) == 2 and not following.kwargs:
        other = following.args[1] if following.args[0] is chain.last else following.args[0]
        factor = value(other)
        wanted = (value(given["weight"]).shape[0], *((1, 1) if chain.moved else ()))
        fits = is_plain(other) and factor.dtype in dtypes and same(factor.shape, wanted) and not rewrite.needs_gradient(grad, other)
        read = [(other, rewrite.order[following])]
        if fits and rewrite.reaches(chain, following, read) and chain.lies_right(following):
            scale = other
            chain.nodes.append(following)
            chain.reads += read
            following = rewrite.after(chain, following)
    if following is not None and following.target in SUMS | SUMS_IN_PLACE and chain.lies_right(following):
        following = rewrite.take_sum(chain, following, False, grad)
    fits = following is not None and rewrite.reaches(chain, following) and chain.lies_right(following)
    if fits and (activation := activation_of(following)):
        chain.activation = activation
        chain.nodes.append(following)
    with rewrite.graph.inserting_before(chain.last):
        new = rewrite.targets.product(given, scale, chain.residual, chain.activation, chain.moved, gradient)
    if new is not None:
        steps = tuple(dict.fromkeys(name_of(n) for n in chain.nodes))
        rewrite.replace(chain.nodes, new)
        rewrite.found.others.append(steps)


def _take_lone_norm(rewrite: Rewrite, node: Node, grad: bool) -> None:
    """A batch normalisation by the batch's statistics that stands in front of a convolution, and its activation."""
    given = bound(node, NORMS[node.target])
    if given is None or given["training"] is not True:
        return
    momentum, eps = (given[name] if given[name] is not None else default for name, default in (("momentum", 0.1), ("eps", 1e-5)))
    x, vectors = given["input"], tuple(given[name] for name in ("weight", "bias", "running_mean", "running_var"))
    if not (is_plain(x) and isinstance(momentum, (int, float)) and isinstance(eps, (int, float))) or value(x).dim() < 3:
        return
    if not all(v is None or is_plain(v) for v in vectors):
        return
    chain, at = Chain(node, rewrite.order[node], [x, *vectors]), rewrite.order[node]
    chain.writes = [(v, at) for v in vectors[2:] if v is not None]
    following = rewrite.after(chain, node)
    if following is None or not (activation := activation_of(following, True)) or not rewrite.reaches(chain, following):
        return
    chain.activation = activation
    chain.nodes.append(following)
    counts, start = rewrite.counter_of(node, max(0, at - 8)), at
    if counts is not None:
        start = rewrite.order[counts[0]]
        trial = Chain(counts[0], start, [])
        chain.counter = counts[0] if rewrite.reaches(trial, following, writes=[(counts[1], start)], own=chain.nodes) else None
    norm = Norm(vectors, True, momentum, float(eps), counts if chain.counter is not None else None)
    with rewrite.graph.inserting_before(chain.last):
        new = rewrite.targets.normalise(x, norm, chain.activation)
    if new is not None:
        steps = tuple(dict.fromkeys(name_of(n) for n in chain.nodes))
        rewrite.replace(chain.nodes, new, [n for n, _ in chain.writes] + ([counts[1]] if chain.counter is not None and counts else []))
        rewrite.drop_counter(chain)
        rewrite.found.others.append(steps)
