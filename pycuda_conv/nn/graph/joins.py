"""A convolution whose residual is another convolution, such as the 1x1 of a shortcut: one call computes both, and sums once.

The biases of both are one summand, which the call at the graph's start that folds norms computes.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from pycuda_conv.nn import pairs
from pycuda_conv.nn.autograd import traced_layout
from pycuda_conv.nn.graph.calls import Norm, Options
from pycuda_conv.nn.graph.rewriting import Chain, Rewrite
from pycuda_conv.nn.graph.steps import name_of, value

HALVES = torch.float16, torch.bfloat16


def take(rewrite: Rewrite, node: Node, grad: bool) -> None:
    """Put one call in the place of a convolution without gradients and of the one that is its residual."""
    options = rewrite.targets.summed.get(node)
    if options is None or node.args[7] not in rewrite.targets.plain:
        return
    x, weight, bias, *_, residual = node.args[:8]
    of_other, (other, other_weight, other_bias) = rewrite.targets.plain[residual][0], residual.args[:3]
    biases = [one for one in (bias, other_bias) if one is not None]
    if not biases or rewrite.reader_of(residual) is not node or not _fit(options, of_other, value(x), value(other)):
        return
    chain = Chain(residual, rewrite.order[residual], (other, other_weight, other_bias))
    chain.nodes.append(node)
    if not rewrite.reaches(chain, node) or not rewrite.is_known_at_start(chain, biases):
        return
    norm, more = Norm((None, biases[-1], None, None), False, 0.0, 1.0), biases[0] if len(biases) > 1 else None
    with rewrite.graph.inserting_before(node):
        new = rewrite.targets.convolve_two(options, of_other, (x, weight, other, other_weight), norm, more)
    name, found, steps = name_of(residual), rewrite.found, rewrite.steps[node]
    rewrite.replace([residual, node], new)
    found.alone[:] = [one for one in found.alone if one[0] != name]
    found.fused[found.fused.index(steps)] = (*steps, name)


def _fit(a: Options, b: Options, x: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether one launch might compute convolutions with these options of these tensors."""
    first, second = a.settings, b.settings
    if a.transposed or b.transposed or first.groups != 1 or second.groups != 1 or x.dtype is not other.dtype or not pairs.pays(x):
        return False
    if first.precision != second.precision or first.algorithm is not None or second.algorithm is not None:
        return False
    if x.dtype not in HALVES and not (x.dtype is torch.float32 and first.precision == "tf32"):
        return False
    return all(traced_layout(one, first.ndim) == "NHWC" for one in (x, other))
