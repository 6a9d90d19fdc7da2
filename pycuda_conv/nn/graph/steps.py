"""What the steps of dynamo's graph are called, and the names of their arguments."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from pycuda_conv.arguments import SLOPE, checked_activation
from pycuda_conv.arrays import torch_internals
from pycuda_conv.arrays.torch_internals import leaves

aten = torch.ops.aten

CONV = "input", "weight", "bias", "stride", "padding", "dilation", "groups"
TRANSPOSED = "input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation"
EITHER = "input", "weight", "bias", "stride", "padding", "dilation", "transposed", "output_padding", "groups"
OURS = (
    "input", "weight", "bias", "size", "stride", "padding", "dilation", "groups", "precision", "device", "tune", "algorithm",
    "padding_mode", "padding_value",
)  # fmt: skip
#: The number of spatial axes, where the name tells it, and the names of the arguments.
CONVOLUTIONS: dict[Any, tuple[int | None, tuple[str, ...]]] = {
    torch.convolution: (None, EITHER), aten.convolution.default: (None, EITHER),
    torch.ops.pycuda_conv.conv.default: (None, OURS), torch.ops.pycuda_conv.conv_transpose.default: (None, OURS),
}  # fmt: skip
for _ndim in (1, 2, 3):
    _packet = getattr(aten, f"conv{_ndim}d")
    for _function in (getattr(torch, f"conv{_ndim}d"), _packet.default, _packet.padding):
        CONVOLUTIONS[_function] = _ndim, CONV
    _packet = getattr(aten, f"conv_transpose{_ndim}d")
    for _function in (getattr(torch, f"conv_transpose{_ndim}d"), next(getattr(_packet, name) for name in _packet.overloads())):
        CONVOLUTIONS[_function] = _ndim, TRANSPOSED
_NORM = "input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"
_ATEN_NORM = "input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled"
NORMS: dict[Any, tuple[str, ...]] = {F.batch_norm: _NORM, torch.batch_norm: _ATEN_NORM, aten.batch_norm.default: _ATEN_NORM}
_MAX_POOL = "input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"
MAX_POOLS: dict[Any, tuple[str, ...]] = {
    F.max_pool2d: _MAX_POOL, torch.max_pool2d: _MAX_POOL[:-1], aten.max_pool2d.default: _MAX_POOL[:-1],
}  # fmt: skip
MAX_POOL_DEFAULTS = {"padding": 0, "dilation": 1, "ceil_mode": False}
_MEAN_POOL = "input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"
MEAN_POOLS: dict[Any, tuple[str, ...]] = {F.avg_pool2d: _MEAN_POOL, aten.avg_pool2d.default: _MEAN_POOL}
MEAN_POOL_DEFAULTS = {"padding": 0, "ceil_mode": False, "count_include_pad": True}
CATS = {torch.cat, torch.concat, torch.concatenate, aten.cat.default}
_LINEAR = ("input", "weight", "bias")
LINEARS: dict[Any, tuple[str, ...]] = {F.linear: _LINEAR, aten.linear.default: _LINEAR}
SUMS = {operator.add, torch.add, "add", aten.add.Tensor}
SUMS_IN_PLACE = {operator.iadd, "add_", "__iadd__", aten.add_.Tensor}
PRODUCTS = {operator.mul, torch.mul, "mul", aten.mul.Tensor}
PRODUCTS_IN_PLACE = {operator.imul, "mul_", "__imul__", aten.mul_.Tensor}
PERMUTES = {torch.permute, "permute", aten.permute.default}
#: Steps that change the shape or the order of a value's elements, and no element.
VIEWS = {
    *(getattr(torch, name) for name in ("flatten", "transpose", "permute", "reshape", "squeeze", "unsqueeze", "movedim", "swapaxes")),
    "flatten", "transpose", "permute", "reshape", "view", "squeeze", "unsqueeze", "unflatten", "contiguous", "movedim", "swapaxes",
    aten.flatten.using_ints, aten.transpose.int, aten.permute.default, aten.reshape.default, aten.view.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.contiguous.default,
}  # fmt: skip
PADS = {F.pad, torch_internals.pad, aten.pad.default}
_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
_RELUS = {F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_", aten.relu.default, aten.relu_.default}
_PLAIN_ACTIVATIONS: dict[Any, str] = {
    **dict.fromkeys(_RELUS, "relu"), F.relu6: "relu6", aten.relu6.default: "relu6", F.silu: "silu", aten.silu.default: "silu",
    aten.silu_.default: "silu", F.hardswish: "hardswish", aten.hardswish.default: "hardswish", aten.hardswish_.default: "hardswish",
}  # fmt: skip
_CLIPS = {F.hardtanh, F.hardtanh_, aten.hardtanh.default, aten.hardtanh_.default}
_CLAMPS = {torch.clamp, torch.clamp_, "clamp", "clamp_", aten.clamp.default, aten.clamp_.default}
_LEAKY = {F.leaky_relu, F.leaky_relu_, aten.leaky_relu.default, aten.leaky_relu_.default}
_GELUS = {F.gelu, aten.gelu.default}
IN_PLACE = {getattr(operator, name) for name in dir(operator) if name.startswith("i") and name[1:] in dir(operator)}
#: Modules whose functions say by name and signature what they write to.
LIBRARIES = frozenset(("torch", "_operator", "operator", "math", "builtins"))


def value(node: Any) -> Any:
    """The fake tensor, or the number, that dynamo traced a node with."""
    return node.meta.get("example_value") if isinstance(node, Node) else None


def bound(node: Node, names: Sequence[str]) -> dict[str, Any] | None:
    """The arguments of a call by their names; None if there are others."""
    if any(key not in names for key in node.kwargs) or len(node.args) > len(names):
        return None
    return {**dict.fromkeys(names), **dict(zip(names, node.args, strict=False)), **node.kwargs}


def activation_of(node: Node, gradient: bool = False) -> str | tuple[str, float] | None:
    """The activation that a node computes, as :func:`pycuda_conv.conv2d` names it; or None. With `gradient`, its derivative is the same."""
    if node.op not in ("call_function", "call_method") or len(node.all_input_nodes) != 1 or not node.args:
        return None
    target, (_, *args), kwargs = node.target, node.args, node.kwargs
    if target in _PLAIN_ACTIVATIONS:
        return _PLAIN_ACTIVATIONS[target]
    if target in _CLIPS or (target in _CLAMPS and not gradient):  # a clamp's derivative at its limits is 1
        names = ("min", "max") if target in _CLAMPS else ("min_val", "max_val")
        limits = [*args[:2], *(kwargs.get(name) for name in names[len(args) :])]
        return "relu6" if limits == [0, 6] else "relu" if limits == [0, None] and target in _CLAMPS else None
    if target in _GELUS:
        how = args[0] if args else kwargs.get("approximate", "none")
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(how)
    if target in _LEAKY:
        slope = args[0] if args else kwargs.get("negative_slope", SLOPE)
        return checked_activation(("leaky_relu", float(slope))) if isinstance(slope, (int, float)) else None
    return None


def is_identity(node: Node) -> bool:
    """True for a dropout in evaluation, which passes its input on."""
    if node.target not in _DROPOUTS or node.op != "call_function":
        return False
    given = bound(node, ("input", "p", "training", "inplace"))
    return given is not None and given["training"] is False


def name_of(node: Node) -> str:
    """The name of the module that made the call; without one, the node's own."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    if not paths:
        return node.name
    path = re.sub(r"\._modules\['([^']*)'\]", r".\1", re.sub(r"^L\['\w+'\]", "", paths[-1]))
    return path.removeprefix("._orig_mod").strip(".") or node.name


def nodes_in(given: Any) -> list[Node]:
    return [n for n in leaves(given) if isinstance(n, Node)]
