"""What memory the values of a graph lie in, and what its steps write to: rules 2 to 4 and 7 of :mod:`pycuda_conv.nn.graph`."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from pycuda_conv.arrays import torch_internals
from pycuda_conv.arrays.torch_internals import leaves
from pycuda_conv.nn.graph.steps import IN_PLACE, LIBRARIES, NORMS, bound, nodes_in, value

DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))


def is_plain(node: Any) -> bool:
    """True for the node of a tensor that kernels can read."""
    v = value(node)
    return (
        isinstance(v, torch.Tensor) and torch_internals.parts(v) is None and not torch_internals.is_wrapped(v)
        and v.layout is torch.strided and v.dtype in DTYPES and not v.is_neg()
    )  # fmt: skip


def _parts(v: Any) -> Iterator[torch.Tensor]:
    while torch_internals.is_wrapped(v):
        v = torch_internals.unwrapped(v)
    inner = torch_internals.parts(v)
    if inner is not None:
        for one in inner:
            yield from _parts(one)
    elif v.layout is torch.strided:
        yield v


def memory(nodes: Iterable[Any]) -> set[int]:
    """The storages of nodes' values."""
    found: set[int] = set()
    for node in nodes:
        for v in leaves(value(node)):
            if isinstance(v, torch.Tensor):
                found.update(part.untyped_storage()._cdata for part in _parts(v))
    return found


_RESULTS = (torch.Tensor, int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


def is_barrier(node: Node) -> bool:
    """True for a step that changes a mode of torch's, so that nothing may be moved past it."""
    if node.op == "call_method":
        return node.target in ("set_", "resize_", "resize_as_")
    if node.op != "call_function" or node.target is operator.setitem or node.target is torch_internals.logs_usage:
        return False
    if "_functorch" in str(getattr(node.target, "__module__", "")):
        return True
    found = leaves(value(node))
    return not found or not all(isinstance(v, _RESULTS) for v in found)


def written(node: Node) -> list[Node]:
    """The nodes whose memory a call may write to. What torch does not know counts as writing to all that it gets."""
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    target: Any = node.target
    first = nodes_in(node.args[:1]) or list(node.all_input_nodes)
    if node.op == "call_method":
        dunder = target.endswith("__")
        return first if target == "__setitem__" or target.startswith("__i") or (target.endswith("_") and not dunder) else []
    if node.op == "call_module" or isinstance(target, torch._ops.HigherOrderOperator):
        return list(node.all_input_nodes)
    if isinstance(target, torch._ops.OpOverload):
        arguments = target._schema.arguments
        given = {**dict(zip((a.name for a in arguments), node.args, strict=False)), **node.kwargs}
        return nodes_in([given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write])
    if str(getattr(target, "__module__", None) or "torch").partition(".")[0] not in LIBRARIES:
        return list(node.all_input_nodes)
    if target in NORMS:
        found = bound(node, NORMS[target])
        if found is None:
            return list(node.all_input_nodes)
        return [] if found["training"] is False else nodes_in([found["running_mean"], found["running_var"]])
    if target is F.instance_norm:
        return list(node.all_input_nodes)
    if out := nodes_in(node.kwargs.get("out")):
        return out
    name = getattr(target, "__name__", "")
    if target is operator.setitem or target in IN_PLACE or (name.endswith("_") and not name.endswith("__")):
        return first
    if node.kwargs.get("inplace"):
        return first
    try:
        return first if inspect.signature(target).bind_partial(*node.args).arguments.get("inplace") else []
    except (TypeError, ValueError):  # a function in C, which has no such argument
        return []
