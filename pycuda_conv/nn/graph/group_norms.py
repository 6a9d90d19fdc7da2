"""Group and instance norms of a graph, and RMS norms of pixels, with the activation behind them: one call.

In light mode layer norms, and other RMS norms, are calls too.

Torch's group norm gives arrays in C order, whatever it gets. The kernels give what they get, so with the channels last a convolution behind
reads its input as it lies. Where other steps than convolutions read the result, and might depend on its strides, it is copied into C order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from pycuda_conv.nn.graph.memory import is_plain
from pycuda_conv.nn.graph.rewriting import Chain, Rewrite, is_of_channels, lies, same, vector_of
from pycuda_conv.nn.graph.steps import CONVOLUTIONS, PRODUCTS, SUMS, activation_of, aten, bound, is_identity, name_of, value
from pycuda_conv.nn.normalise import Asked
from pycuda_conv.problem import channels_last

_GROUP = "input", "num_groups", "weight", "bias", "eps"
GROUP_NORMS: dict[Any, tuple[str, ...]] = {
    F.group_norm: _GROUP, torch.group_norm: (*_GROUP, "cudnn_enabled"), aten.group_norm.default: (*_GROUP, "cudnn_enabled"),
}  # fmt: skip
_INSTANCE = "input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps"
INSTANCE_NORMS: dict[Any, tuple[str, ...]] = {
    F.instance_norm: _INSTANCE, torch.instance_norm: ("input", "weight", "bias", *_INSTANCE[1:3], *_INSTANCE[5:], "cudnn_enabled"),
}  # fmt: skip
_LAYER = "input", "normalized_shape", "weight", "bias", "eps"
LAYER_NORMS: dict[Any, tuple[str, ...]] = {
    F.layer_norm: _LAYER, torch.layer_norm: (*_LAYER, "cudnn_enable"), aten.layer_norm.default: (*_LAYER, "cudnn_enable"),
}  # fmt: skip
RMS_NORMS: dict[Any, tuple[str, ...]] = {F.rms_norm: (*_LAYER[:3], "eps"), torch.rms_norm: (*_LAYER[:3], "eps")}
#: Whether a convolution is computed together with the norm that alone reads it, so that its tiles may note the norm's statistics. That
#: costs the tiles more than the norm's pass: a decoder took 10.7 ms with it and 10.3 without (docs/lab/norms.md).
JOINS = False
ACTIVATIONS = frozenset(("relu", "silu", "gelu", "gelu_tanh"))
HALVES = torch.float16, torch.bfloat16


def take(rewrite: Rewrite, node: Node, grad: bool) -> None:
    """Put one call in the place of a group or instance norm and the activation behind it."""
    if node.target in LAYER_NORMS or node.target in RMS_NORMS:
        _take_rows(rewrite, node)
    if node.target is F.normalize:
        _take_pixels(rewrite, node, grad)
    found = _asked_of(node)
    if found is None:
        return
    x, gamma, beta, asked = found
    given = [n for n in (x, gamma, beta) if n is not None]
    if not all(is_plain(n) for n in (node, *given)) or not 3 <= value(x).dim() <= 5:
        return
    gradient = rewrite.needs_gradient(grad, *given)
    front = None if gradient else _added(rewrite, x, node)
    chain = Chain(node, rewrite.order[node], given)
    if front is not None:
        x, added = front
        chain.nodes.insert(0, given[0])
        chain.reads = [(x, rewrite.order[given[0]]), (added, rewrite.order[given[0]]), *chain.reads[1:]]
    following = rewrite.after(chain, node)
    if following is not None and (activation := activation_of(following, gradient)) in ACTIVATIONS and rewrite.reaches(chain, following):
        asked = asked._replace(activation=activation)
        chain.nodes.append(following)
    made, of_x = value(chain.last), value(x)
    narrow = made.dtype is not of_x.dtype  # torch.autocast computes norms in float32
    readers = _readers(chain.last)
    if narrow and not (made.dtype is torch.float32 and of_x.dtype in HALVES and readers is not None and all(
        value(n).dtype is of_x.dtype for n in readers
    )):  # fmt: skip
        return
    last = channels_last(of_x.dim(), of_x.dim() - 2)
    as_input = last is not None and lies(of_x, last) and not lies(of_x, range(of_x.dim()))
    if not as_input and not lies(of_x, range(of_x.dim())):
        return
    turns = as_input and not lies(made, last)  # torch's result lies otherwise
    follows = turns and readers is not None and all(lies(value(n), last) for n in readers)
    with rewrite.graph.inserting_before(chain.last):
        new = rewrite.targets.normalise_groups(x, gamma, beta, None if front is None else front[1], asked, gradient)
        if new is None:
            return
        steps = tuple(dict.fromkeys(name_of(n) for n in chain.nodes))
        if not gradient:
            rewrite.targets.normed[new] = asked, steps
        if turns and not follows:
            new.meta["example_value"] = of_x
            new = rewrite.graph.call_method("contiguous", (new,))
    rewrite.replace(chain.nodes, new)
    if gradient:
        rewrite.trained.add(new)
    if follows or narrow:
        _mark(new, torch.empty_like(of_x, requires_grad=made.requires_grad) if follows else made.to(of_x.dtype))
    rewrite.found.others.append(steps)


def _take_rows(rewrite: Rewrite, node: Node) -> None:
    """Put a call in the place of a layer or RMS norm of an array in C order."""
    rms = node.target in RMS_NORMS
    given = bound(node, RMS_NORMS[node.target] if rms else LAYER_NORMS[node.target])
    if given is None or not isinstance(given["normalized_shape"], (list, tuple)) or not is_plain(given["input"]) or not is_plain(node):
        return
    x, gamma, beta = given["input"], given["weight"], given.get("bias")
    v, eps = value(x), given["eps"]
    eps = (torch.finfo(v.dtype).eps if rms else 1e-5) if eps is None else eps
    if value(node).dtype is not v.dtype or not isinstance(eps, (int, float)) or not all(n is None or is_plain(n) for n in (gamma, beta)):
        return
    if not lies(v, range(v.dim())) or not lies(value(node), range(v.dim())):
        return
    with rewrite.graph.inserting_before(node):
        new = rewrite.targets.normalise_rows(x, gamma, beta, Asked(0, len(given["normalized_shape"]), float(eps), rms, None))
    if new is not None:
        steps = (name_of(node),)
        rewrite.replace([node], new)
        rewrite.found.others.append(steps)


def _take_pixels(rewrite: Rewrite, node: Node, grad: bool) -> None:
    """Put one call in the place of an RMS norm over channels that lie last, written as ``F.normalize(x, dim=1) * C**0.5 * gamma + 0``."""
    given = bound(node, ("input", "p", "dim", "eps", "out"))
    if given is None or given["p"] not in (None, 2) or given["dim"] not in (None, 1) or given["out"] is not None:
        return
    x, eps = given["input"], 1e-12 if given["eps"] is None else given["eps"]
    if not is_plain(x) or not is_plain(node) or not isinstance(eps, (int, float)) or not 3 <= value(x).dim() <= 5:
        return
    v = value(x)
    channels, last = v.shape[1], channels_last(v.dim(), v.dim() - 2)
    if not isinstance(channels, int) or not lies(v, last) or value(node).dtype is not v.dtype:
        return
    chain, gamma, factor = Chain(node, rewrite.order[node], [x]), None, 1.0
    following = rewrite.after(chain, node)
    while following is not None and following.target in PRODUCTS | SUMS and len(following.args) == 2 and not following.kwargs:
        other = following.args[1] if following.args[0] is chain.last else following.args[0]
        product, number = following.target in PRODUCTS, isinstance(other, (int, float)) and not isinstance(other, bool)
        of_channels = product and gamma is None and is_plain(other) and is_of_channels(value(other), v)
        if of_channels:
            gamma = other
            chain.reads.append((other, rewrite.order[following]))
        if not (of_channels or (number and (product or other == 0))) or not rewrite.reaches(chain, following):
            break
        factor *= other if number and product else 1.0
        chain.nodes.append(following)
        following = rewrite.after(chain, following)
    made = value(chain.last)
    if rewrite.needs_gradient(grad, x, gamma) or not lies(made, last) or made.dtype is not v.dtype:
        return
    if abs(factor / channels**0.5 - 1) > 1e-6:
        return
    activation = None if following is None else activation_of(following)
    if following is not None and activation in ACTIVATIONS and rewrite.reaches(chain, following):
        chain.nodes.append(following)
    else:
        activation = None
    with rewrite.graph.inserting_before(chain.last):
        vector = None if gamma is None else vector_of(rewrite, gamma, channels)
        new = rewrite.targets.normalise_pixels(x, vector, Asked(0, 1, float(eps) ** 2 / channels, 2, activation))
    if new is None:
        return
    steps = tuple(dict.fromkeys(name_of(n) for n in chain.nodes))
    rewrite.replace(chain.nodes, new)
    rewrite.found.others.append(steps)


def join(rewrite: Rewrite, node: Node, grad: bool) -> None:
    """Let a convolution whose result a group norm alone reads be computed with it: its tiles may note the norm's statistics."""
    normed = rewrite.targets.normed.get(node)
    convolution = node.args[0] if normed is not None else None
    if not JOINS or normed is None or not isinstance(convolution, Node) or convolution not in rewrite.targets.plain:
        return
    (options, *operands), (asked, steps) = rewrite.targets.plain[convolution], normed
    vectors = node.args[1:4]
    chain = Chain(convolution, rewrite.order[convolution], operands)
    read = [(n, rewrite.order[node]) for n in vectors if isinstance(n, Node)]
    if rewrite.reader_of(convolution) is not node or not rewrite.reaches(chain, node, read):
        return
    with rewrite.graph.inserting_before(node):
        new = rewrite.targets.convolve_and_normalise(options, [*operands, *vectors], asked)
    name, found = name_of(convolution), rewrite.found
    found.alone[:] = [one for one in found.alone if one[0] != name]
    found.others.remove(steps)
    found.fused.append((name, *steps))
    rewrite.replace([convolution, node], new)


def _asked_of(node: Node) -> tuple[Any, Any, Any, Asked] | None:
    """Input, gamma, beta and options of a norm that the kernels may compute."""
    names = GROUP_NORMS.get(node.target) or INSTANCE_NORMS.get(node.target)
    given = None if names is None else bound(node, names)
    if given is None:
        return None
    eps = 1e-5 if given["eps"] is None else given["eps"]
    if node.target in GROUP_NORMS:
        groups = given["num_groups"]
    else:
        if given["running_mean"] is not None or given["running_var"] is not None or given["use_input_stats"] is False:
            return None
        groups = value(given["input"]).shape[1] if isinstance(value(given["input"]), torch.Tensor) else None
    if not isinstance(groups, int) or not isinstance(eps, (int, float)):
        return None
    return given["input"], given["weight"], given["bias"], Asked(groups, 0, float(eps), False, None)


def _added(rewrite: Rewrite, total: Any, norm: Node) -> tuple[Node, Node] | None:
    """x and what is added to the channels of its images, where a norm alone reads their sum; else None."""
    if total.target not in SUMS or len(total.args) != 2 or total.kwargs or rewrite.reader_of(total) is not norm:
        return None
    for x, added in (total.args, total.args[::-1]):
        if not (is_plain(x) and is_plain(added)) or value(x).dtype is not value(added).dtype:
            return None
        whole = value(x)
        wanted, last = (*whole.shape[:2], *(1,) * (whole.dim() - 2)), channels_last(whole.dim(), whole.dim() - 2)
        if same(value(added).shape, wanted) and not same(whole.shape, wanted) and lies(whole, last):
            trial = Chain(total, rewrite.order[total], [x, added])
            return (x, added) if rewrite.reaches(trial, norm) else None
    return None


def _readers(node: Node) -> Sequence[Node] | None:
    """The convolutions that read a value, through nothing but activations and dropouts that do nothing; None if others read it."""
    found: list[Node] = []
    for user in node.users:
        if user.op == "call_function" and user.target in CONVOLUTIONS and user.args[:1] == (node,):
            found.append(user)
        elif activation_of(user) is not None or is_identity(user):
            behind = _readers(user)
            if behind is None:
                return None
            found += behind
        else:
            return None
    return found


def _mark(node: Node, made: Any) -> None:
    """Note what a node's value is now, and those of the steps up to the convolutions that read it."""
    node.meta["example_value"] = made
    for user in node.users:
        if user.target not in CONVOLUTIONS:
            _mark(user, torch.empty_like(made, requires_grad=made.requires_grad))
