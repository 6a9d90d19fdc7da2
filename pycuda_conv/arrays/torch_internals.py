"""The undocumented parts of torch that this package uses, each with a substitute for versions of torch that lack it.

Results are right with the substitutes too, but calls take longer if nothing says that the short way is safe. If a transform of torch.func
can't be detected, torch raises an error inside of it. Other modules use no such part when they are imported.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version


def _part(path: str, substitute: Any) -> Any:
    """The part of ``torch._C`` of that name, or the substitute."""
    found: Any = torch._C
    for name in path.split("."):
        found = getattr(found, name, None)
        if found is None:
            return substitute
    return found


#: What torch's libraries call where a function of theirs is used, to count that.
logs_usage = _part("_log_api_usage_once", None)


def modes() -> list[Any]:
    """The modes that see the call."""
    try:
        from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    except ImportError:
        return []
    return list(_get_current_dispatch_mode_stack())


# ---- what is unusual about a call

#: whether the call is inside a transform of torch.func
transforms_are_active: Callable[[], bool] = _part("_are_functorch_transforms_active", lambda: False)
#: the transform that the call is inside of, or None
innermost_transform: Callable[[], Any] = _part("_functorch.peek_interpreter_stack", lambda: None)
#: how many modes see the call
count_of_modes: Callable[[], int] = _part("_len_torch_dispatch_stack", lambda: len(modes()))
#: what ``torch.jit.trace`` is making, or None
tracing_state: Callable[[], Any] = _part("_get_tracing_state", lambda: torch.jit.is_tracing() or None)
#: whether a gradient stands for several, as in ``torch.autograd.grad(is_grads_batched=True)``
is_batched: Callable[[Any], bool] = _part("_functorch.is_legacy_batchedtensor", lambda tensor: True)
#: whether the running backward pass may run again, so that saved tensors have to stay
keeps_graph: Callable[[], bool] = _part("_autograd._get_current_graph_task_keep_graph", lambda: True)
#: the hooks that get saved tensors; anything true means that there may be some
packing_hooks: Callable[[bool], Any] = _part("_autograd._top_saved_tensors_default_hooks", lambda _: True)


def _copy_one_by_one(to: list[Any], given: list[Any]) -> None:
    for one, other in zip(to, given, strict=True):
        one.copy_(other)


#: (to, given) -> copies tensors into others, of another type too, by few launches
copy_all: Callable[[list[Any], list[Any]], Any] = getattr(torch, "_foreach_copy_", _copy_one_by_one)


def is_functionalized(transform: Any) -> bool:
    """Whether a transform of :func:`innermost_transform` is torch.func.functionalize, which takes no ``torch.autograd.Function``."""
    kinds = _part("_functorch.TransformType", None)
    return kinds is not None and bool(transform.key() == kinds.Functionalize)


#: its ``_current_level`` is the level of forward differentiation, and below 0 outside of that
levels: Any = forward_ad if hasattr(forward_ad, "_current_level") else SimpleNamespace(_current_level=-1)

# ---- shorter ways to do what torch does


def _one_by_one(tensors: Any) -> None:
    for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
        increment_version(tensor)


#: ``increment_version`` of several tensors
increment_versions: Callable[[Any], None] = _part("_increment_version", _one_by_one)
#: the handle of the current stream of a GPU; torch.cuda.current_stream() takes 7 us, this 0.2
current_stream: Callable[[int], int] = _part("_cuda_getCurrentRawStream", lambda ordinal: torch.cuda.current_stream(ordinal).cuda_stream)


def empty_strided(kind: str) -> Any:
    """The function of code that torch compiles that allocates on a device of that kind: (shape, strides, dtype); None if there is none."""
    return _part(f"_dynamo.guards._empty_strided_{kind}", None)


#: what :func:`pycuda_conv.repeat.learn` needs; None if a part is missing
ASKED_BY_LAUNCHER: tuple[Callable[[], Any], ...] | None = (transforms_are_active, count_of_modes, tracing_state)
if not all(hasattr(torch._C, name) for name in ("_are_functorch_transforms_active", "_len_torch_dispatch_stack", "_get_tracing_state")):
    ASKED_BY_LAUNCHER = None


# ---- graphs of torch.compile

#: ``torch.nn.functional.pad`` as graphs name it
pad: Any = _part("_nn.pad", torch.nn.functional.pad)
#: the function that switches gradients on or off in a graph
set_grad_enabled: Any = _part("_set_grad_enabled", None)
#: whether a tensor stands for one inside a transform of torch.func; and the tensor that it stands for
is_wrapped: Callable[[Any], bool] = _part("_functorch.is_functorch_wrapped_tensor", lambda tensor: False)
unwrapped: Callable[[Any], Any] = _part("_functorch.get_unwrapped", lambda tensor: tensor)


def multiplies_in_float32() -> bool:
    """Whether torch multiplies matrices of float32 as exactly as that is."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # a newer switch of torch's was set, and says something else
        return torch.backends.cuda.matmul.fp32_precision not in ("tf32", "bf16")


def leaves(tree: Any) -> list[Any]:
    """All that lists, tuples and dicts in one another hold in the end."""
    from torch.utils import _pytree

    found: list[Any] = _pytree.tree_leaves(tree)
    return found


def parts(tensor: Any) -> list[Any] | None:
    """The tensors that a tensor of a subclass is made of, as DTensor; None for others."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if not is_traceable_wrapper_subclass(tensor):
        return None
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


def constant(function: Any) -> Any:
    """`function`, which torch.compile calls while it traces instead of following it. torch's decorator would import its compiler."""
    function._dynamo_marked_constant = True
    return function
