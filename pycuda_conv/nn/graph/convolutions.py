"""Convolutions of a graph, each with the steps around it that it takes."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from pycuda_conv.arguments import integers
from pycuda_conv.engines.nn import batch_norm
from pycuda_conv.invariance import WORD as BATCH_INVARIANT
from pycuda_conv.nn.autograd import Settings, _in_numbers, traced_layout
from pycuda_conv.nn.graph import fronts, upsamplings
from pycuda_conv.nn.graph.calls import Norm, Options
from pycuda_conv.nn.graph.memory import is_plain
from pycuda_conv.nn.graph.rewriting import Chain, Rewrite, is_of_channels, lies, same, vector_of
from pycuda_conv.nn.graph.steps import (
    CONVOLUTIONS,
    EITHER,
    NORMS,
    OURS,
    PRODUCTS,
    PRODUCTS_IN_PLACE,
    SUMS,
    SUMS_IN_PLACE,
    TRANSPOSED,
    activation_of,
    bound,
    name_of,
    value,
)
from pycuda_conv.problem import channels_last


def take(rewrite: Rewrite, node: Node, grad: bool) -> None:
    """Put one call in the place of a convolution and the steps around it."""
    if node.target not in CONVOLUTIONS:
        return
    why = _rewrite_convolution(rewrite, node, grad)
    if why:
        rewrite.found.left.append((name_of(node), why))


def _options(rewrite: Rewrite, node: Node) -> tuple[dict[str, Any], Options] | str:
    """The operands and options of a convolution, or why it stays torch's."""
    ndim, names = CONVOLUTIONS[node.target]
    given = bound(node, names)
    if given is None:
        return "it is called with other arguments"
    x, weight, bias = given["input"], given["weight"], given["bias"]
    if not (is_plain(x) and is_plain(weight) and is_plain(node) and (bias is None or is_plain(bias))):
        return "its tensors are of a kind that kernels do not read"
    ndim = value(weight).dim() - 2 if ndim is None else ndim
    if ndim not in (1, 2, 3) or value(x).dim() != ndim + 2:
        return "its input has no batch axis"
    sizes = value(weight).shape[2:]
    if not all(isinstance(n, int) for n in sizes):
        return "the size of its filter is not a constant"
    transposed, more, precision, algorithm = names is TRANSPOSED, given.get("output_padding"), rewrite.precision, rewrite.algorithm
    padding: Any = 0 if given["padding"] is None else given["padding"]
    border: tuple[Any, float] = "zeros", 0.0
    if names is OURS:
        transposed = node.target is torch.ops.pycuda_conv.conv_transpose.default
        more, precision, own = given["size"] if transposed else None, given["precision"], given.get("algorithm")
        padding = tuple(zip(padding[::2], padding[1::2], strict=True))
        if given["device"] is not None or given["tune"] or own not in (None, BATCH_INVARIANT):
            return "it asks for a device, for an algorithm or to be tuned"
        algorithm = own or algorithm
        if given["padding_mode"]:
            words = given["padding_mode"].split()
            border = tuple(zip(words[::2], words[1::2], strict=True)), float(given["padding_value"] or 0)
    elif names is EITHER:
        transposed = bool(given["transposed"])
    try:
        settings = Settings(
            ndim, given["stride"] or 1, padding, given["dilation"] or 1, given["groups"] or 1, precision, None, False, algorithm, *border
        )
        settings = _in_numbers(settings, sizes)
        extra = integers("output_padding", more or 0, ndim) if transposed else (0,) * ndim
    except TypeError:
        return "its options are not constants"
    return given, Options(transposed, settings, extra)


def _rewrite_convolution(rewrite: Rewrite, convolution: Node, grad: bool) -> str | None:
    """Put one call in the place of a convolution's chain; else say why it stays torch's."""
    found = _options(rewrite, convolution)
    if isinstance(found, str):
        return found
    given, options = found
    chain = Chain(convolution, rewrite.order[convolution], (given["input"], given["weight"], given["bias"]))
    node = rewrite.after(chain, chain.last)
    if node is not None and node.target in NORMS and node.op == "call_function":
        node = _take_norm(rewrite, chain, node, options, grad)
    else:
        node = _take_affine(rewrite, chain, node, grad)
    operands = chain.operands if chain.norm is None else (*chain.operands, *chain.norm.vectors[:2])
    gradient = rewrite.needs_gradient(grad, *operands)
    training = chain.norm is not None and (chain.norm.of_batch or gradient)
    if node is not None and (chain.norm is not None or not gradient):
        if node.target in SUMS | SUMS_IN_PLACE and (not training or rewrite.targets.sums_in_training):
            node = rewrite.take_sum(chain, node, training, grad)
        if node is not None and (activation := activation_of(node, training)):
            takes = not training or batch_norm.takes(activation, chain.residual is not None)
            if takes and rewrite.reaches(chain, node):
                chain.activation = activation
                chain.nodes.append(node)
        elif not training and not gradient:
            rewrite.take_late_activation(chain, node)
    chain.gradient, chain.training = gradient, training
    options = options._replace(activation=chain.activation)
    for front in fronts.FRONTS:
        options = front(rewrite, chain, options)
    turned = _turned(rewrite, chain.operands[0], value(chain.last), options.settings.ndim)
    if turned is None:
        return "torch's result is neither in C order nor channels last"
    why = chain.why or _why_alone(rewrite, convolution, gradient)
    new = _write(rewrite, chain, options, turned, grad)
    late = () if chain.late is None else (chain.late,)
    steps = rewrite.steps[new] = tuple(dict.fromkeys(name_of(n) for n in (*chain.nodes, *late)))
    rewrite.drop_late(chain)
    if len(chain.nodes) > 1 or late:
        rewrite.found.fused.append(steps)
    else:
        rewrite.found.alone.append((steps[0], why))
    return None


def _why_alone(rewrite: Rewrite, convolution: Node, gradient: bool) -> str:
    """Why nothing was fused with a convolution, for a report."""
    users = list(convolution.users)
    if len(users) != 1 or rewrite.reader_of(convolution) is None:
        return "its result is read more than once, or returned"
    return "its gradient is recorded, and no batch normalisation follows" if gradient else "nothing that can be fused follows"


def _take_norm(rewrite: Rewrite, chain: Chain, node: Node, options: Options, grad: bool) -> Node | None:
    """Put a batch normalisation into a chain, if it can be. The result is the step after it, or None at the chain's end."""
    given = bound(node, NORMS[node.target])
    if given is None or given["input"] is not chain.last:
        return None
    vectors = tuple(given[name] for name in ("weight", "bias", "running_mean", "running_var"))
    if not all(v is None or is_plain(v) for v in vectors) or not isinstance(given["training"], bool):
        chain.why = "its batch norm is of another kind"
        return None
    of_batch = given["training"]
    gradient = rewrite.needs_gradient(grad, *chain.operands, *vectors[:2])
    if options.transposed and (gradient or of_batch):
        chain.why = "a transposed convolution and its batch norm are not trained in one step"
        return None
    settings = options.settings
    if (gradient or of_batch) and settings.padding_mode != "zeros" and fronts.pad_of(settings, chain.operands[0]) is None:
        chain.why = "a convolution with such a border and its batch norm are not trained in one step"
        return None
    if options.settings.algorithm is not None and (gradient or of_batch):
        chain.why = "it has the same bits in every batch, which a batch norm in training has not"
        return None
    if (vectors[2] is None or vectors[3] is None) and not of_batch:
        return None
    momentum = given["momentum"] if given["momentum"] is not None else 0.1
    eps = given["eps"] if given["eps"] is not None else 1e-5
    if of_batch and not isinstance(momentum, (int, float)):
        chain.why = "its batch norm's momentum is not a constant"
        return None
    if not isinstance(eps, (int, float)):
        chain.why = "its batch norm's eps is not a constant"
        return None
    at = rewrite.order[node]
    reads = [(v, at) for v in vectors if v is not None]
    writes = [(v, at) for v in vectors[2:] if v is not None] if of_batch else []
    counted = rewrite.counter_of(node, rewrite.order[chain.nodes[0]]) if of_batch and rewrite.targets.counts else None
    if not rewrite.reaches(chain, node, reads, writes):
        chain.why = "before its batch norm a mode changes, or an array that it reads is written"
        return None
    counts = None
    if counted is not None and rewrite.reaches(chain, node, reads, [*writes, (counted[1], rewrite.order[counted[0]])], [counted[0]]):
        chain.counter, counts = counted[0], counted
        writes.append((counted[1], rewrite.order[counted[0]]))
    chain.norm = Norm(vectors, of_batch, momentum, float(eps), counts)
    chain.nodes.append(node)
    chain.reads += reads
    chain.writes += writes
    return rewrite.after(chain, node)


def _take_affine(rewrite: Rewrite, chain: Chain, node: Node | None, grad: bool) -> Node | None:
    """Put a factor and a summand for each channel into a chain, as frozen norms and scales of layers are. The result is the step after."""
    found: list[Any] = [None, None]
    for i, targets in enumerate((PRODUCTS | PRODUCTS_IN_PLACE, SUMS | SUMS_IN_PLACE)):
        if node is None or node.target not in targets or len(node.args) != 2 or node.kwargs:
            continue
        mine = chain.last
        other = node.args[1] if node.args[0] is mine else node.args[0]
        own, v = value(mine), value(other)
        if not is_plain(other) or v.dtype is not own.dtype or v.device != own.device or not same(value(node).shape, own.shape):
            continue
        if (node.target in PRODUCTS_IN_PLACE | SUMS_IN_PLACE and node.args[0] is not mine) or not is_of_channels(v, own):
            continue
        read = [(other, rewrite.order[node])]
        if rewrite.needs_gradient(grad, *chain.operands, other) or not rewrite.reaches(chain, node, read):
            break
        found[i] = other
        chain.nodes.append(node)
        chain.reads += read
        chain.norm = Norm((*found, None, None), False, 0.0, 1.0)
        node = rewrite.after(chain, node)
    return node


def _turned(rewrite: Rewrite, x: Node, wanted: Any, ndim: int) -> Any:
    """How an input has to be turned so that the result lies as torch's: "" for not at all; None if it can't."""
    last = {2: torch.channels_last, 3: torch.channels_last_3d}.get(ndim)
    orders = {torch.contiguous_format: range(ndim + 2), last: channels_last(ndim + 2, ndim)}
    fits = [order for order, axes in orders.items() if order is not None and lies(wanted, axes)]
    ours = torch.contiguous_format if traced_layout(value(x), ndim) == "NCHW" else last
    return "" if ours is not None and ours in fits else fits[0] if fits else None


def _turned_filter(rewrite: Rewrite, x: Node, weight: Node, ndim: int) -> Node:
    """A filter that the graph computes with its channels last in memory if the input's are, and one that the caller gave as it is."""
    last = {2: torch.channels_last, 3: torch.channels_last_3d}.get(ndim)
    if last is None or weight.op in ("placeholder", "get_attr") or traced_layout(value(x), ndim) != "NHWC":
        return weight
    if lies(value(weight), channels_last(ndim + 2, ndim)):
        return weight
    made = rewrite.graph.call_method("contiguous", (weight,), {"memory_format": last})
    made.meta["example_value"] = value(weight).detach().contiguous(memory_format=last)
    return made


def _write(rewrite: Rewrite, chain: Chain, options: Options, turned: Any, grad: bool) -> Node:
    training, gradient, settings = chain.training, chain.gradient, options.settings
    dtype = value(chain.convolution).dtype
    before = set(rewrite.graph.nodes)
    try:
        with rewrite.graph.inserting_before(chain.last):
            operands = list(chain.operands)
            if training and settings.padding_mode != "zeros":
                pad = fronts.pad_of(settings, operands[0])
                assert pad is not None
                operands[0] = fronts.write_pad(rewrite, operands[0], pad)
                settings = settings._replace(padding=((0, 0),) * settings.ndim, padding_mode="zeros", padding_value=0.0)
                options = options._replace(settings=settings)
                turned = _turned(rewrite, operands[0], value(chain.last), settings.ndim)
            if turned and not upsamplings.turn(rewrite, operands[0], turned):
                operands[0] = rewrite.graph.call_method("contiguous", (operands[0],), {"memory_format": turned})
                operands[0].meta["example_value"] = value(operands[0].args[0])
            if training or not gradient or rewrite.targets.casts_early:
                folded = chain.norm is not None and not training  # with the bias as it is
                at_start = slice(1, 2 if folded else 3)
                operands[at_start] = [_cast_early(rewrite, chain, n, dtype, grad) for n in operands[at_start]]
            if rewrite.targets.turns_filters:
                operands[1] = _turned_filter(rewrite, operands[0], operands[1], settings.ndim)
            if training:
                assert chain.norm is not None
                new = rewrite.targets.train(options, operands, dtype, chain.norm, chain.residual, grad)
            elif gradient:
                new = rewrite.targets.convolve(options, operands, dtype)
            else:
                norm, early = chain.norm, False
                if norm is not None:
                    norm = norm._replace(vectors=tuple(vector_of(rewrite, n, value(chain.last).shape[1]) for n in norm.vectors))
                    early = rewrite.is_known_at_start(chain, [n for n in (*norm.vectors, chain.operands[2]) if n is not None])
                new = rewrite.targets.evaluate(options, operands, dtype, norm, chain.residual, early)
    except Exception:
        for node in reversed(list(rewrite.graph.nodes)):
            if node not in before:
                if node.users:  # an image that is turned before it is upsampled
                    node.replace_all_uses_with(node.args[0])
                rewrite.graph.erase_node(node)
        rewrite.targets.early = {key: node for key, node in rewrite.targets.early.items() if node in before}
        raise
    rewrite.replace(chain.nodes, new, [n for n, _ in chain.writes])
    if training:
        rewrite.trained.add(new)
    rewrite.drop_counter(chain)
    return new


def _cast_early(rewrite: Rewrite, chain: Chain, parameter: Any, dtype: torch.dtype, grad: bool) -> Any:
    """An operand in 16 bits, if it is a parameter of float32 that can be cast at the graph's start; else the operand itself."""
    if parameter is None or value(parameter).dtype is not torch.float32 or dtype not in (torch.float16, torch.bfloat16):
        return parameter
    if not rewrite.is_known_at_start(chain, [parameter]) or (rewrite.needs_gradient(grad, parameter) and not rewrite.grad_at_start):
        return parameter
    return rewrite.targets.cast_early(parameter, dtype)
