"""Finds the steps that belong to a convolution in a graph of ``torch.compile``, and puts one call in their place.

Dynamo's graph calls torch's functions, whatever class or function of the caller's made the call. A *chain* in it is a convolution,
transposed or not, and those of these steps that stand around it: a border padded in front, a batch normalisation or a factor and a summand
for each channel, the sum with a residual, and an activation. All of a chain is computed where its last step stands; an activation behind
steps that change the shape alone is computed in front of them. Other steps of the graph stand between, so a chain ends where that would
change a number:

1. Each value inside a chain has one reader, which reads it once.
2. Nothing in between writes to memory that the chain reads, or touches memory that it writes (running statistics).
3. Two values share memory if torch's fake tensors share a storage. Dynamo does not guard on which of a caller's inputs share memory. So a
   write to one of them counts as one to all inputs and parameters, and a write to a parameter as one to all inputs.
4. A step that changes a mode of torch's ends a chain.
5. A sum in place belongs to a chain only if it writes to the chain's own value, or to one that nothing else reads any more.
6. A residual has the shape, dtype and device of the value that it is added to.
7. The tensors are strided ones that kernels read. A tensor of a subclass or of a transform of ``torch.func`` stays torch's.
8. ``torch.autocast`` becomes visible: the dtype of a convolution's result tells in which it computes.
9. The result has the strides that torch's has, because the steps behind it were traced with them.
10. Whether a gradient is recorded is known, and guarded by dynamo. Where it is, only a batch normalisation takes part in a chain.
11. A chain is decided first and written last. If that fails, its steps stay torch's, with a note.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Graph, GraphModule

from pycuda_conv.nn.graph import cats, convolutions, group_norms, joins, others, reorders, repeats, upsamplings
from pycuda_conv.nn.graph.calls import Targets
from pycuda_conv.nn.graph.rewriting import Found, Pass, Rewrite

#: The passes over a graph, in their order: what an earlier one has replaced, a later one does not see any more.
PASSES: tuple[Pass, ...] = (
    repeats.take, reorders.take, group_norms.take, convolutions.take, group_norms.join, joins.take, joins.take_cat, upsamplings.take,
    others.take, cats.take,
)  # fmt: skip


def rewrite(
    gm: GraphModule, targets: Callable[[Graph], Targets], precision: str = "fp32", raises: bool = False,
    upsample_filter: str | None = None, algorithm: str | None = None,
) -> list[Found]:
    """Rewrite dynamo's graph, and the graphs in it, such as those of ``torch.utils.checkpoint`` and ``torch.cond``."""
    found = [Rewrite(gm, targets(gm.graph), precision, raises, upsample_filter, algorithm).run(PASSES)]
    for _, child in gm.named_children():
        if isinstance(child, GraphModule):
            found += rewrite(child, targets, precision, raises, upsample_filter, algorithm)
    return found
