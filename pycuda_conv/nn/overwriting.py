"""Which values the calls in a traced forward may write over.

A convolution fused with a sum is computed where its chain ends, later than its author wrote it, and so is the sum. The values that they
read must be unchanged there. A call of which nothing is known counts as writing to all of its arguments and returning a part of them.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from pycuda_conv.nn.classes import hooked, is_convolution, is_plain_norm, is_sequence, origin

#: The functions of :mod:`operator` that write to their first argument.
OPERATORS_IN_PLACE = (
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor", "ilshift", "irshift",
)  # fmt: skip
_WRITING = {operator.setitem, *(getattr(operator, name) for name in OPERATORS_IN_PLACE)}
#: Functions and methods whose results have memory of their own.
_ANEW = {
    *(getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "pow", "matmul", "neg")),
    *(getattr(torch, name) for name in ("add", "sub", "mul", "div", "cat", "stack", "sigmoid", "tanh", "clone", "relu", "mean", "sum")),
    *(getattr(nn.functional, name) for name in ("relu", "relu6", "leaky_relu", "hardswish", "hardsigmoid", "silu", "gelu", "linear")),
    "add", "sub", "mul", "div", "clone", "sigmoid", "relu", "mean", "sum",
}  # fmt: skip
#: torch's modules that define layers which only read their arguments, unless they are `inplace`, and whose results have their own memory.
_LAYERS = {f"torch.nn.modules.{name}" for name in ("activation", "batchnorm", "conv", "instancenorm", "linear", "normalization", "pooling")}


def may_be_overwritten(arrays: Iterable[Any], between: Iterable[Node], child: Callable[[Node], nn.Module]) -> bool:
    """Whether a call `between` may write to the memory of one of these `arrays`; `child` gives the module that a node calls."""
    written = [one for node in between for one in _written(node, child)]
    if not written:
        return False
    memory = _memory([a for a in arrays if isinstance(a, Node)], child)
    return not memory.isdisjoint(_memory(written, child))


def _written(node: Node, child: Callable[[Node], nn.Module]) -> list[Node]:
    """The values that a call may write to."""
    if node.op == "call_module":
        return [] if _only_reads(child(node)) else node.all_input_nodes
    if node.op == "call_method":
        name = str(node.target)
        return _first(node) if name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__")) else []
    if node.op != "call_function":
        return []
    if node.target in _WRITING or node.target.__name__.endswith("_") or _is_in_place(node):
        return _first(node)
    if isinstance(out := node.kwargs.get("out"), Node):
        return [out]
    return [] if _library(node) in ("torch", "_operator", "builtins", "math", "pycuda_conv") else node.all_input_nodes


def _library(node: Node) -> str:
    """The package of a function."""
    module = getattr(node.target, "__module__", None) or "torch"  # torch's functions in C have none
    return str(module).partition(".")[0]


def _first(node: Node) -> list[Node]:
    """The value that a call in place writes to, its first argument."""
    return [a for a in node.args[:1] if isinstance(a, Node)] or node.all_input_nodes


def _is_in_place(node: Node) -> bool:
    """Whether a function is called with ``inplace=True``."""
    target: Any = node.target
    if "inplace" in node.kwargs:
        return bool(node.kwargs["inplace"])
    try:
        return bool(inspect.signature(target).bind_partial(*node.args).arguments.get("inplace"))
    except (TypeError, ValueError):  # a function in C, which has no such argument
        return False


def _only_reads(module: nn.Module) -> bool:
    """True if a module's call is known to write to none of its arguments."""
    if hooked(module):
        return False
    if is_sequence(module):
        for one in module.children():
            if not _only_reads(one):
                return False
            if _makes_anew(one):
                break  # the modules behind it get its new memory alone
        return True
    return _makes_anew(module)


def _makes_anew(module: nn.Module) -> bool:
    """True if a module's result is known to have memory of its own."""
    if is_sequence(module):
        return any(map(_makes_anew, module.children()))
    if "forward" in module.__dict__ or hooked(module):
        return False
    if is_convolution(type(module)) or is_plain_norm(type(module)):
        return True
    cls = origin(type(module))
    return cls.__module__ in _LAYERS and cls is not nn.Identity and not module._modules and not getattr(module, "inplace", False)


def _memory(values: Iterable[Node], child: Callable[[Node], nn.Module]) -> set[Any]:
    """The memory of these values, as its origins: two values without a common origin share no memory."""
    found: set[Any] = set()
    left = list(values)
    while left:
        node = left.pop()
        if node in found:
            continue
        found.add(node)
        if node.op == "placeholder":
            found.add("arguments")  # two arguments may be the same
        elif node.op == "call_module":
            left += [] if _makes_anew(child(node)) else node.all_input_nodes
        elif not (node.target in _ANEW or _library(node) == "pycuda_conv") or _written(node, child):
            left += node.all_input_nodes
    return found
