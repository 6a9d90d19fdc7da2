"""How operators of torch's are defined here, ``torch.ops.pycuda_conv.*``.

Code that a compiler of torch's makes calls an operator through torch's dispatcher. Its cost grows with the number of arguments. A Python
layer around the operator, as ``torch.library.custom_op`` and ``register_autograd`` make, costs several times as much again. So there are
two sorts:

- Operators that compute (:func:`define`) have one Python function for tensors anywhere, their options in one list of ints, and no formula
  for gradients. Compiled code calls these.
- Operators that torch differentiates (:func:`define_by_others`) are functions of other operators. Torch takes them apart before it
  compiles, so they may cost more. Graphs of ``torch.compile`` and exported programs name them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("pycuda_conv", "FRAGMENT")
#: Kernels read C order or channels last, as the operator's arguments lie when it is traced; not the strides exactly.
_TAGS = (torch.Tag.needs_fixed_stride_order,)


def define(schema: str, compute: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an operator that computes. `fake` gives tensors without numbers, of the result's shape and strides."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=_TAGS)
    for place in ("CPU", "CUDA"):
        _library.impl(name, compute, place)
    torch.library.register_fake(f"pycuda_conv::{name}", fake, lib=_library)


def define_by_others(schema: str, function: Callable[..., Any]) -> None:
    """Define an operator as a function of other operators, which give it its gradients."""
    _library.define(schema, tags=_TAGS)
    _library.impl(schema.partition("(")[0], function, "CompositeImplicitAutograd")


def define_vmap(name: str, rule: Callable[..., Any]) -> None:
    """Give an operator that computes a rule for ``torch.vmap``: (info, in_dims, argument, ...) -> (result, its axis)."""
    torch.library.register_vmap(f"pycuda_conv::{name}", rule, lib=_library)
