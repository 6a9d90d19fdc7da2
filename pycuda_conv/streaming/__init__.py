"""Convolutions of signals that come in pieces: the state is what the next piece needs of the inputs before it.

A piece gives the results that its inputs complete, as a causal convolution does: none waits for inputs to come. The state is a few inputs
of the last pieces. They stand in front of the next piece along the first spatial axis, the frames of a video or the samples of a sound.

=================  =======================================================  =====================
                   inputs that the state holds                              results of n inputs
=================  =======================================================  =====================
a convolution      ``dilation * (taps - 1) + 1 - stride``                   ``n / stride``
transposed         ``dilation * (taps - 1) // stride``                      ``n * stride``
=================  =======================================================  =====================

Inputs that do not fill a stride wait in the state. Results have the same bits however the signal is cut: the order of their sums follows
from the layer alone (:mod:`pycuda_conv.engines.streams`).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from pycuda_conv import borders, dispatch
from pycuda_conv.arguments import integers, padding_pairs
from pycuda_conv.arrays import LAZY, STAND_IN, check_same_type, same_kind
from pycuda_conv.call import Call, Operands
from pycuda_conv.engines import streams
from pycuda_conv.errors import ConvArgumentError, brief, did_you_mean
from pycuda_conv.memo import MOST, remember_plans
from pycuda_conv.plan import Plan
from pycuda_conv.problem import channels_last
from pycuda_conv.runtime import get_device, pycuda_device

#: What may stand in front of a signal's first piece.
STARTS = ("zeros", "replicate")


class Layer(NamedTuple):
    """What a stream has to know of its convolution along the first spatial axis."""

    transposed: bool
    stride: int
    #: inputs that a result reads; of a transposed convolution results that an input reaches
    reach: int
    #: inputs that the state holds, besides those that do not fill a stride
    held: int
    #: results that are taken off a signal's start
    cut: int

    def count(self, inputs: int) -> int:
        """How many results so many inputs complete, those of the state included."""
        new = inputs - self.held
        return new * self.stride if self.transposed else new // self.stride


@lru_cache(maxsize=1024)
def layer_of(call: Call, filter_shape: tuple[int, ...]) -> Layer:
    """The layer of a call whose options are hashable; what a stream can't do is refused."""
    ndim, name = call.ndim, call.name
    if ndim not in streams.LENGTHS:
        raise ConvArgumentError(f"state is for signals and volumes, conv1d, conv3d and those transposed, but got {name}")
    if call.upsample is not None or call.algorithm == "fft":
        what = "upsample" if call.upsample is not None else "algorithm='fft'"
        raise ConvArgumentError(f"state and {what} exclude each other")
    stride, dilation = integers("stride", call.stride, ndim)[0], integers("dilation", call.dilation, ndim)[0]
    if call.padding == "same":
        raise ConvArgumentError(f"state takes the place of the padding along the first spatial axis, but got padding={brief(call.padding)}")
    before, after = _pairs(call)[0]
    reach = dilation * (filter_shape[-ndim] - 1) + 1
    if call.function == "conv_transpose":
        if integers("output_padding", call.size, ndim)[0] or after:
            raise ConvArgumentError(
                f"with state a transposed convolution takes no padding behind and no output_padding along the first spatial axis, but got "
                f"padding={brief(call.padding)} and output_padding={brief(call.size)}"
            )
        return Layer(True, stride, reach, (reach - 1) // stride, int(before))
    if before or after:
        raise ConvArgumentError(
            f"state takes the place of the padding along the first spatial axis, which must be 0, but got padding={brief(call.padding)}"
        )
    if stride > reach:
        raise ConvArgumentError(f"state takes a stride of at most the filter's reach, {reach}, but got stride={stride}")
    return Layer(False, stride, reach, reach - stride, 0)


# ---- arrays of all kinds


def _library(array: Any) -> Any:
    """The module whose functions cut and join such arrays."""
    name = type(array).__module__.partition(".")[0]
    for cls in type(array).__mro__:
        root = cls.__module__.partition(".")[0]
        if root in ("numpy", "torch", "cupy", "pycuda"):
            return sys.modules["pycuda.gpuarray" if root == "pycuda" else root]
    raise TypeError(f"state is for arrays of numpy, torch, CuPy and PyCUDA, but input is one of {name}")


def _part(array: Any, axis: int, first: int, last: int) -> Any:
    return array[(slice(None),) * axis + (slice(first, last),)]


def _joined(first: Any, second: Any, axis: int) -> Any:
    """Two arrays one behind the other."""
    library = _library(second)
    return library.cat((first, second), axis) if hasattr(library, "cat") else library.concatenate((first, second), axis)


def _kept(array: Any) -> Any:
    """A copy that does not keep a larger array alive."""
    return array.clone() if hasattr(array, "clone") else array.copy()


# ---- a piece


def convolve(call: Call, operands: Operands, state: Any, out: Any, device: Any, stream: Any) -> tuple[Any, Any]:
    """The results that a piece of a signal completes, and the state for the next piece."""
    kind = same_kind(operands, out, call.operand_names)
    if kind is LAZY or kind is STAND_IN or kind.imports:
        raise TypeError(f"state is for arrays of numpy, torch, CuPy and PyCUDA, but input is a {kind.name}")
    call = call.hashable()
    name = _name(kind, call, operands, state) if out is device is stream is None else None
    made = None if name is None else _made.get(name)
    if made is not None:
        return made.repeated(operands, state)
    x, layer = operands.input, layer_of(call, tuple(operands.weight.shape))
    axis = len(x.shape) - call.ndim
    if axis not in (1, 2):
        raise ConvArgumentError(f"with state {call.name} takes an input with channels, but got one of size {list(x.shape)}")
    _check_state(kind, state, x, axis, layer)
    begun, n = not isinstance(state, str), x.shape[axis]
    waiting = state.shape[axis] if begun else layer.held
    count = layer.count(waiting + n)
    in_place = begun and _reads_in_place(kind, layer, operands, state, out, stream)
    whole = _joined(state, x, axis) if begun and waiting and not in_place else x
    call = _of_transposed(call, layer, begun, n) if layer.transposed else _of_forward(call, layer, None if begun else state)
    keeps = layer.held if layer.transposed else waiting + n - count * layer.stride
    following = _last(keeps, state, x, whole, axis)
    if layer.transposed and not begun:
        count -= layer.cut
    if in_place:
        return _in_two(kind, call, operands, state, layer, device), following
    if count <= 0:
        return _nothing(kind, call, operands, axis, out, layer), following
    if not layer.transposed:
        used = (count - 1) * layer.stride + layer.reach - (0 if begun else layer.held)
        whole = whole if used == whole.shape[axis] else _part(whole, axis, 0, used)
    given = operands._replace(input=whole)
    if kind.must_be_recorded(given, out is None and stream is None):
        return dispatch.handlers["torch"]().convolve(call, given, None if device is None else get_device(device).name, False), following
    plan, given = _plan(call, kind, given, device, kind.layout(x, call.ndim))
    if name is not None and given.input is whole and given.weight is operands.weight and keeps <= n:
        if len(_made) >= MOST:
            _made.clear()
        _made[name] = _Made(plan, axis, waiting > 0, whole.shape[axis], n - keeps)
    return plan(given.input, given.weight, given.bias, scale=given.scale, residual=given.residual, out=out, stream=stream), following


class _Made(NamedTuple):
    """A piece that was convolved before: plan and axis, whether the state is joined, how many inputs are read, where the rest begins."""

    plan: Plan
    axis: int
    joins: bool
    used: int
    kept_from: int

    def repeated(self, operands: Operands, state: Any) -> tuple[Any, Any]:
        """The results of another such piece, and the state for the next."""
        x, w, bias, scale, residual = operands
        whole = _joined(state, x, self.axis) if self.joins else x
        if whole.shape[self.axis] != self.used:
            whole = _part(whole, self.axis, 0, self.used)
        following = _kept(_part(x, self.axis, self.kept_from, x.shape[self.axis]))
        return self.plan(whole, w, bias, scale=scale, residual=residual), following


#: Pieces of torch's tensors that were convolved before, by what :func:`_name` says of them.
_made: dict[Any, _Made] = {}


def _name(kind: Any, call: Call, operands: Operands, state: Any) -> Any:
    """What decides how a piece of torch's tensors on a GPU is convolved; None for others, and where torch has to know of the call."""
    if kind.name != "torch.Tensor" or isinstance(state, str) or not hasattr(state, "stride") or not kind.on_gpu(operands.input):
        return None
    if state.requires_grad or kind.must_be_recorded(operands, True):
        return None
    arrays = (*operands, state)
    return call, tuple(None if one is None else (type(one), one.shape, one.stride(), one.dtype, one.device) for one in arrays)


def _reads_in_place(kind: Any, layer: Layer, operands: Operands, state: Any, out: Any, stream: Any) -> bool:
    """Whether most of a piece can be convolved where it lies: frames of a volume that follow one another in memory.

    Then the state is joined with a few frames alone.
    """
    x = operands.input
    if layer.transposed or layer.stride > 1 or len(x.shape) != 5 or x.shape[0] != 1 or x.shape[2] < 2 * layer.held or not layer.held:
        return False
    plain = out is None and stream is None and operands.residual is None and kind.on_gpu(x) and kind.layout(x, 3) == "NHWC"
    return plain and not kind.must_be_recorded(operands, True)


def _in_two(kind: Any, call: Call, operands: Operands, state: Any, layer: Layer, device: Any) -> Any:
    """The results of such a piece: those that reach into the state, and the others."""
    x, held = operands.input, layer.held
    parts = []
    for one in (_joined(state, _part(x, 2, 0, held), 2), x):
        plan, given = _plan(call, kind, operands._replace(input=one), device, "NHWC")
        parts.append((plan, given))
    plan = parts[1][0]
    n, k, _, *size = plan.result_shape
    with plan.device:
        result = kind.empty((n, k, x.shape[2], *size), x, plan.device, channels_last(5, 3), plan.new_dtype)
    for (plan, given), to in zip(parts, (_part(result, 2, 0, held), _part(result, 2, held, x.shape[2])), strict=True):
        plan(given.input, given.weight, given.bias, scale=given.scale, out=to)
    return result


def _check_state(kind: Any, state: Any, x: Any, axis: int, layer: Layer) -> None:
    """Refuse what is no state for the next piece, which is `x`."""
    if isinstance(state, str):
        if state not in STARTS:
            raise ConvArgumentError(f"state must be one of {STARTS} or an array, but got state={brief(state)}{did_you_mean(state, STARTS)}")
        if state == "replicate" and layer.transposed:
            raise ConvArgumentError("a transposed convolution begins with state='zeros' or an array, but got state='replicate'")
        return
    if not hasattr(state, "shape") or not hasattr(state, "dtype"):
        raise TypeError(f"state must be one of {STARTS} or an array, got {brief(state)} of type {type(state).__name__}")
    same_kind(Operands(x, state), names=("input", "state"))
    (shape, dtype, where), (own, wanted, here) = kind.signature(state), kind.signature(x)
    most = layer.held if layer.transposed else layer.held + layer.stride - 1
    lengths = str(layer.held) if most == layer.held else f"{layer.held} to {most}"
    expected = [*own[:axis], lengths, *own[axis + 1 :]]
    fits = len(shape) == len(own) and all(m == n for i, (m, n) in enumerate(zip(shape, own, strict=True)) if i != axis)
    if not fits or not layer.held <= shape[axis] <= most:
        raise ConvArgumentError(f"expected state of size [{', '.join(map(str, expected))}] for this input, but got {list(shape)}")
    if dtype != wanted:
        raise TypeError(f"state must have the input's dtype, {kind.dtype_name(wanted)}, but got {kind.dtype_name(dtype)}")
    if where != here:
        raise ConvArgumentError("state must lie where the input does, but lies on another device")


@lru_cache(maxsize=1024)
def _of_forward(call: Call, layer: Layer, state: str | None) -> Call:
    """The call for what is behind the state; at a signal's start, of which `state` is the word, the padding stands for one."""
    pairs = _pairs(call)
    if state is None or not layer.held:
        return call._replace(padding=pairs)
    modes = borders.mode_pairs(call.padding_mode, call.ndim)
    start = ("replicate" if state == "replicate" else "zeros", "zeros")
    words = (start, *modes[1:])
    return call._replace(padding=((layer.held, 0), *pairs[1:]), padding_mode="zeros" if _plain(words) else words)


def _plain(words: Any) -> bool:
    return all(word == "zeros" for pair in words for word in pair)


@lru_cache(maxsize=1024)
def _of_transposed(call: Call, layer: Layer, begun: bool, n: int) -> Call:
    """The transposed call that gives the results which `n` inputs complete, behind a state where the signal has `begun`."""
    inputs = n + (layer.held if begun else 0)
    first = layer.held * layer.stride if begun else layer.cut
    behind = (inputs - 1) * layer.stride + layer.reach - inputs * layer.stride  # results that the next inputs complete
    size = integers("output_padding", call.size, call.ndim)
    return call._replace(padding=((first, max(behind, 0)), *_pairs(call)[1:]), size=(max(-behind, 0), *size[1:]))


def _pairs(call: Call) -> tuple[tuple[int, int], ...]:
    pairs = padding_pairs(call.padding, call.ndim)
    return ((0, 0),) * call.ndim if isinstance(pairs, str) else pairs


def _last(count: int, state: Any, x: Any, whole: Any, axis: int) -> Any:
    """A copy of the last `count` inputs, of `x` and of what is in front of it."""
    n = x.shape[axis]
    if count <= n:
        return _kept(_part(x, axis, n - count, n))
    if isinstance(state, str):
        if state == "replicate" and not n:  # there is no first input yet
            return state
        first = _zeros(x, axis) if state == "zeros" else _part(x, axis, 0, 1)
        for _ in range(count - n):
            x = _joined(first, x, axis)
        return _kept(x)
    return _kept(_part(whole, axis, whole.shape[axis] - count, whole.shape[axis]))


def _zeros(x: Any, axis: int) -> Any:
    """One input of zeros."""
    if hasattr(x, "new_zeros"):
        one = _part(x, axis, 0, 1) if x.shape[axis] else x.new_empty(_once(x, axis))
        return _library(x).zeros_like(one)
    return _library(x).zeros(_once(x, axis), x.dtype)


def _once(x: Any, axis: int) -> tuple[int, ...]:
    return tuple(1 if i == axis else n for i, n in enumerate(x.shape))


def _nothing(kind: Any, call: Call, operands: Operands, axis: int, out: Any, layer: Layer) -> Any:
    """The result of a piece that completes none."""
    if out is not None:
        raise ConvArgumentError("this piece completes no result: out must be None")
    x, weight = operands.input, operands.weight
    one = [1 if i == axis else n for i, n in enumerate(x.shape)]
    one[axis] = layer.reach
    plain = call._replace(padding=((0, 0), *_pairs(call)[1:]), padding_mode="zeros", activation=None, dtype=None)
    shape = list(plain.problem((one, tuple(weight.shape), None, None, None), kind.dtype_name(kind.signature(weight)[1])).result_shape)
    shape[axis] = 0
    if hasattr(x, "new_empty"):
        return x.new_empty(shape)
    return _library(x).empty(tuple(shape), x.dtype)


def _plan(call: Call, kind: Any, given: Operands, device: Any, layout: str) -> tuple[Plan, Operands]:
    """The plan for a piece, whose own `layout` counts, and its operands in the types and the layout that it takes."""
    names = *call.operand_names, *Operands._fields[2:]
    signatures = kind.signatures(given, names)
    dtypes = [None if one is None else kind.dtype_name(one[1]) for one in signatures]
    typed = call.of_one_type(given, dtypes, kind.converted, kind.conversion)
    if typed is not given:
        given, signatures = typed, kind.signatures(typed, names)
    own = kind.device(signatures[0], device if device is not None or kind.on_gpu(given.input) else pycuda_device())
    last = layout == "NHWC" and kind.on_gpu(given.input)
    plan = _planned(call, kind, signatures, own, last)
    if last:
        with own:  # the state may lie in another order
            given = given._replace(input=kind.as_kernel_input(given.input, plan.order))
    return plan, given


@remember_plans
def _planned(call: Call, kind: Any, signatures: tuple[Any, ...], device: Any, last: bool) -> Plan:
    check_same_type(kind, *signatures, names=(*call.operand_names, *Operands._fields[2:]))
    problem = dispatch.problem_of(call, kind, signatures)
    problem = replace(problem, layout="NHWC") if last else problem
    return Plan(problem, device, config=streams.choose(problem, device))
