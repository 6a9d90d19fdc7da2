"""Convolutions of two arrays in one call: one whose residual is another convolution, such as the 1x1 of a shortcut, and one whose input is
two arrays concatenated along their channels.

Biases are summands that the call at the graph's start that folds norms computes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from pycuda_conv.nn import pairs
from pycuda_conv.nn.autograd import traced_layout
from pycuda_conv.nn.graph.calls import Norm, Options
from pycuda_conv.nn.graph.memory import is_plain
from pycuda_conv.nn.graph.rewriting import Chain, Rewrite, lies
from pycuda_conv.nn.graph.steps import CATS, bound, name_of, value
from pycuda_conv.problem import channels_last

HALVES = torch.float16, torch.bfloat16


def take(rewrite: Rewrite, node: Node, grad: bool) -> None:
    """Put one call in the place of a convolution without gradients and of the one that is its residual, or of what it concatenates."""
    options = rewrite.targets.evaluated.get(node)
    if options is not None and node.args[7] in rewrite.targets.plain and _take_residual(rewrite, node, options):
        return
    parts = _parts(rewrite, node.args[0], node) if node.args and isinstance(node.args[0], Node) else None
    if parts is None:
        return
    cat = node.args[0]
    chain = Chain(cat, rewrite.order[cat], parts)
    chain.nodes.append(node)
    if not rewrite.reaches(chain, node):
        return
    waiting = rewrite.targets.waiting.get(node)
    if waiting is not None and fits(waiting, *map(value, parts)):
        rewrite.targets.convolve_parts(node, parts)
        rewrite.drop(cat)
    if options is None:
        return
    _, weight, bias, *_, residual = node.args[:8]
    if bias is None or not fits(options, *map(value, parts)) or not rewrite.is_known_at_start(chain, [bias]):
        return
    with rewrite.graph.inserting_before(node):
        operands = parts[0], weight, residual, parts[1], None
        new = rewrite.targets.convolve_two(options, None, operands, Norm((None, bias, None, None), False, 0.0, 1.0), None)
    rewrite.replace([cat, node], new)


def take_cat(rewrite: Rewrite, node: Node, grad: bool) -> None:
    """Put one launch in the place of a concatenation along channels that stayed, where the graph runs as it is."""
    parts = _concatenated(node)
    if parts is None or rewrite.needs_gradient(grad, *parts) or node not in rewrite.order:
        return
    ndim = value(node).dim() - 2
    last = channels_last(ndim + 2, ndim)
    if last is None or not all(lies(value(one), last) for one in (node, *parts)) or len({value(one).dtype for one in (node, *parts)}) > 1:
        return
    with rewrite.graph.inserting_before(node):
        new = rewrite.targets.concatenate(*parts)
    if new is not None:
        rewrite.replace([node], new)


def _take_residual(rewrite: Rewrite, node: Node, options: Options) -> bool:
    """Whether the convolution that is the residual of another is computed with it now."""
    x, weight, bias, *_, residual = node.args[:8]
    of_other, (other, other_weight, other_bias) = rewrite.targets.plain[residual][0], residual.args[:3]
    biases = [one for one in (bias, other_bias) if one is not None]
    if not biases or rewrite.reader_of(residual) is not node or not fits(options, value(x), value(other), of_other):
        return False
    chain = Chain(residual, rewrite.order[residual], (other, other_weight, other_bias))
    chain.nodes.append(node)
    if not rewrite.reaches(chain, node) or not rewrite.is_known_at_start(chain, biases):
        return False
    norm, more = Norm((None, biases[-1], None, None), False, 0.0, 1.0), biases[0] if len(biases) > 1 else None
    with rewrite.graph.inserting_before(node):
        new = rewrite.targets.convolve_two(options, of_other, (x, weight, None, other, other_weight), norm, more)
    name, found, steps = name_of(residual), rewrite.found, rewrite.steps[node]
    rewrite.replace([residual, node], new)
    found.alone[:] = [one for one in found.alone if one[0] != name]
    found.fused[found.fused.index(steps)] = (*steps, name)
    return True


def _parts(rewrite: Rewrite, cat: Node, reader: Node) -> tuple[Node, Node] | None:
    """The two tensors that a step concatenates along their channels, if one convolution alone reads the result."""
    return _concatenated(cat) if cat in rewrite.order and rewrite.reader_of(cat) is reader else None


def _concatenated(cat: Node) -> tuple[Node, Node] | None:
    """The two tensors that a step concatenates along their channels."""
    if cat.op != "call_function" or cat.target not in CATS or not is_plain(cat):
        return None
    given = bound(cat, ("tensors", "dim"))
    if given is None or given["dim"] not in (1, 1 - value(cat).dim()) or not isinstance(given["tensors"], (list, tuple)):
        return None
    parts = tuple(given["tensors"])
    return parts if len(parts) == 2 and all(is_plain(one) for one in parts) else None


def fits(options: Options, x: Any, other: Any, of_other: Options | None = None) -> bool:
    """Whether one launch might compute a convolution with these options of both tensors, or two with these of a tensor each."""
    if not pairs.pays(x) or x.dtype is not other.dtype or x.dim() != other.dim():
        return False
    for one in (options, of_other or options):
        settings = one.settings
        if one.transposed or settings.groups != 1 or settings.algorithm is not None or settings.precision != options.settings.precision:
            return False
        if settings.padding_mode != "zeros" or settings.ndim != options.settings.ndim:
            return False
    if x.dtype not in HALVES and not (x.dtype is torch.float32 and options.settings.precision == "tf32"):
        return False
    return all(traced_layout(one, options.settings.ndim) == "NHWC" for one in (x, other))
