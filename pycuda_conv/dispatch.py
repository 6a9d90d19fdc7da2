"""The way of a call from its arguments to a plan, and to the arrays' memory.

A call that was made before is repeated by :mod:`pycuda_conv.repeat`. Any other call is decided step by step: the kind of its arrays, who
has to know of it, the problem, the layout and the plan. Then :mod:`pycuda_conv.execute` runs the plan.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from pycuda_conv import execute, invariance, repeat
from pycuda_conv.arrays import LAZY, STAND_IN, ArrayKind, HostKind, Signature, check_same_type, is_torchs, same_kind
from pycuda_conv.call import GRADIENT_OPERANDS, Call, Operands, Place
from pycuda_conv.elements import INTEGER_BYTES, arithmetic, check_element_type, dtype_name, result_type
from pycuda_conv.engines.nn import batch_norm
from pycuda_conv.errors import ConvArgumentError, brief, did_you_mean
from pycuda_conv.invariance import with_invariance
from pycuda_conv.memo import remember_plans
from pycuda_conv.numbers import complex_numbers
from pycuda_conv.plan import Plan, as_called, cached_plan
from pycuda_conv.problem import ConvProblem, channels_last
from pycuda_conv.runtime import contexts, cuda_device, device_count, get_device, pycuda_device

#: Modules that take calls over: "torch" records them, "autocast" casts their tensors, "dask" divides them into chunks. They import
#: this module, so :mod:`pycuda_conv.handlers` puts here how each is imported when a call needs it.
handlers: dict[str, Callable[[], Any]] = {}


#: The default of `padding_mode`, the very object: strings of a program are interned.
_ZEROS = "zeros"


def rest_of_call(
    algorithm: Any, invariant: Any, mode: Any, value: Any, dtype: Any, upsample: Any = 1, upsample_filter: Any = None
) -> tuple[Any, ...]:
    """The last members of a :class:`Call`, from its algorithm on; none where all have their defaults.

    `invariant` is the option `batch_invariant`, or None where a function has none.
    """
    algorithm = algorithm if invariant is None else with_invariance(algorithm, invariant)
    if upsample.__class__ is not int or upsample != 1 or upsample_filter is not None:
        return algorithm, mode, value, dtype_name(dtype), (tuple(upsample) if isinstance(upsample, list) else upsample, upsample_filter)
    of_border = mode.__class__ is not str or mode != _ZEROS or value.__class__ is not float or value
    return (algorithm, mode, value, dtype_name(dtype)) if of_border or algorithm is not None or dtype is not None else ()


def convolve(
    asked: tuple[Any, ...], operands: tuple[Any, ...], out: Any, place: tuple[Any, ...], recorded: bool = False,
    more: tuple[Any, ...] | None = None,
) -> Any:
    """A convolution, transposed or not, or a gradient of one.

    Parameters
    ----------
    asked : tuple
        The members of a :class:`Call`. A plain tuple is made in less time.
    operands : tuple
        The members of :class:`Operands`.
    out : array, optional
    place : tuple
        The members of :class:`Place`.
    recorded : bool
        Whether the arrays' library knows of the call.
    more : tuple
        The members of :func:`rest_of_call`, which becomes the last members of the :class:`Call` where `asked` lacks them.
    """
    upsample = None
    if more is not None:
        algorithm, invariant, mode, value, dtype, *enlarged = more
        usual = algorithm is None and (invariant is False or invariant is None) and mode is _ZEROS and dtype is None
        if enlarged and (enlarged[0] != 1 or enlarged[0].__class__ is not int or enlarged[1] is not None):
            usual, upsample = False, enlarged[0]
        if not usual or value.__class__ is not float or value or invariance.blocks:
            asked = *asked, *rest_of_call(*more)
    device, devices, stream, tune = place
    first, second, bias, scale, residual = operands
    if (first.__class__ is tuple or first.__class__ is list) and any(hasattr(one, "shape") for one in first):
        return _convolve_joined(asked, operands, out, place)
    repeatable = device is None and devices is None and stream is None and tune is False and repeat.may_repeat(first)
    if repeatable:
        made = repeat.call(repeat.public_calls, asked, recorded, first, second, bias, scale, residual, out)
        if made is not None:
            return made
        if out is None and upsample is None and is_torchs(first) and repeat.autocasts(first):
            return handlers["autocast"]().convolve_cast(asked, operands, place, recorded)
    call, arrays = Call(*asked), Operands(*operands)
    kind = same_kind(arrays, out, call.operand_names)
    if kind is STAND_IN:
        return _hand_over(call, arrays, out, Place(*place))
    if not isinstance(tune, bool):
        raise TypeError(f"tune must be True or False, got {brief(tune)}")
    call = call.hashable()
    if complex_numbers.involved(arrays):

        def of_reals(input: Any, weight: Any, value: float) -> Any:
            return convolve(tuple(call._replace(padding_value=value)), (input, weight, None, None, None), None, place)

        return complex_numbers.convolve(call, arrays, out, stream, of_reals)
    if kind is LAZY:
        return handlers["dask"]().convolve(call, arrays, out, stream, chunks_place(device, devices, tune))
    gpus: tuple[Any, ...] = ()
    if devices is not None:
        gpus = gpus_of(devices, device)
        device = gpus[0]
    elif device is not None:
        device = get_device(device)
    if not recorded and kind.must_be_recorded(arrays, out is None and devices is None and stream is None):
        return handlers["torch"]().convolve(call, arrays, None if device is None else device.name, tune)
    if kind.imports:
        arrays = kind.imported(arrays, call.operand_names)
    if device is None and not kind.on_gpu(arrays.input):  # not only after the plan was looked up: PyCUDA's current context may change
        device = pycuda_device()
    layout = _layout(call, kind, arrays)
    call, arrays, signatures = _typed(call, kind, arrays, out)
    plan = plan_for_call(call, kind, signatures, device, layout, tune)
    plan = plan.better or plan
    if gpus:
        if not isinstance(kind, HostKind) or kind.signature(arrays.input)[2] not in (None, -1):
            raise ConvArgumentError("devices is for arrays in host memory; the input lies on a GPU and is convolved there")
        if stream is not None:
            raise ConvArgumentError(f"stream and devices exclude each other, but got stream={brief(stream)} and devices={brief(devices)}")
    if call.function == "weight":
        layout = ""  # the gradient of a filter lies as the kernels write it
    result = execute.run(kind, plan, arrays, out, stream, layout=layout, devices=gpus)
    if repeatable and kind.remembered:
        plain = call.function not in GRADIENT_OPERANDS and call.activation is arrays.scale is arrays.residual is None
        plain = plain and not (plan.problem.bare or call.upsample)  # torch gives their gradients by way of views with channels
        repeat.remember(repeat.public_calls, asked, kind, plan, arrays, out, layout=layout, recorded=_recorded(call) if plain else None)
    return kind.exported(result, arrays, stream) if kind.imports else result


def _convolve_joined(asked: tuple[Any, ...], operands: tuple[Any, ...], out: Any, place: tuple[Any, ...]) -> Any:
    """A convolution of several arrays as if their channels were joined."""
    joined, call = handlers["joined"](), Call(*asked)
    joined.check(call, operands[0])
    if len(operands[0]) == 2 and len(asked) == 9 and out is None and tuple(place) == (None, None, None, False):
        made = joined.in_place(call.hashable(), Operands(tuple(operands[0]), *operands[1:]))
        if made is not None:
            return made
    return convolve(asked, (joined.joined(call, operands[0]), *operands[1:]), out, place)


def _typed(call: Call, kind: ArrayKind, arrays: Operands, out: Any) -> tuple[Call, Operands, tuple[Signature | None, ...]]:
    """The call with the type of its result, the arrays with all but the first in the arithmetic's type, and their signatures."""
    names = *call.operand_names, *Operands._fields[2:]
    signatures = kind.signatures(arrays, names)
    dtypes = [None if one is None else kind.dtype_name(one[1]) for one in signatures]
    try:
        written = None if out is None else kind.dtype_name(kind.signature(out)[1])
    except contexts.NotCurrent as error:
        raise contexts.NotCurrent(error.template, "out") from None
    if call.dtype is None and written in INTEGER_BYTES:
        call = call._replace(dtype=written)
    typed = call.of_one_type(arrays, dtypes, kind.converted, kind.conversion)
    return call, typed, signatures if typed is arrays else kind.signatures(typed, names)


def _layout(call: Call, kind: ArrayKind, arrays: Operands) -> str:
    """The layout of the call's input. For the gradient of a filter by a single channel, which lies in either, the other array decides."""
    if call.function != "weight":
        return kind.layout(arrays.input, call.ndim)
    shape = kind.signature(arrays.input)[0]
    single = len(shape) > call.ndim and shape[-call.ndim - 1] == 1
    return kind.layout(arrays.weight if single else arrays.input, call.ndim)


def _recorded(call: Call) -> list[Callable[..., Any]]:
    """A function that tells torch of a convolution repeated by the launcher in C, as torch has to give gradients; in a list."""

    def first(input: Any, weight: Any, bias: Any, made: Any) -> Any:
        tell[0] = handlers["repeated"]().recorder(call, input.shape, weight.shape, made[0])
        return tell[0](input, weight, bias, made)

    tell: list[Callable[..., Any]] = [first]
    return tell


def _hand_over(call: Call, operands: Operands, out: Any, place: Place) -> Any:
    """Pass a call on to torch, as the public function's, if its operands are stand-ins for arrays."""
    first, second, bias, scale, residual = operands
    given: tuple[Any, ...] = first, second
    times, word = call.upsample or (1, None)
    options = {**call._asdict(), **place._asdict(), "bias": bias, "scale": scale, "residual": residual, "out": out}
    options |= {"upsample": times, "upsample_filter": word}
    if call.function in GRADIENT_OPERANDS:
        given = (call.size, second, first) if call.function == "input" else (first, call.size, second)
    else:
        options["output_padding"] = call.size
    return hand_over(call.name, given, options)


def hand_over(name: str, operands: Sequence[Any], options: dict[str, Any]) -> Any:
    """Pass a call of the public function `name` on to torch. Options with their default values are left out."""
    function = getattr(sys.modules["pycuda_conv"], name)
    parameters = inspect.signature(function).parameters
    given = {key: options[key] for key in parameters if key in options and options[key] is not parameters[key].default}
    tools = sys.modules["torch"].overrides
    return tools.handle_torch_function(function, [a for a in (*operands, *given.values()) if tools.is_tensor_like(a)], *operands, **given)


def chunks_place(device: Any, devices: Any, tune: bool) -> Any:
    """Where the chunks of dask arrays are to be computed."""
    if isinstance(devices, Iterable) and not isinstance(devices, str):
        devices = tuple(devices)
    return handlers["dask"]().ChunkPlace(getattr(device, "name", device), devices, tune)


def gpus_of(devices: Any, device: Any = None) -> tuple[Any, ...]:
    """The GPUs that `devices` names, each once; `device` is what was asked for besides."""
    if device is not None:
        raise ConvArgumentError(f"device and devices exclude each other, but got device={brief(device)} and devices={brief(devices)}")
    if isinstance(devices, str) and devices == "all":
        devices = range(device_count())
    elif isinstance(devices, str) or not isinstance(devices, Iterable):
        raise TypeError(f"devices must be 'all' or a list of GPU numbers, got {brief(devices)}{did_you_mean(devices, ('all',))}")
    gpus = []
    for one in devices:
        try:
            found: Any = get_device(one)
            gpus.append(found if found.backend != "cuda" else cuda_device(found.ordinal))  # whatever context is current
        except (TypeError, ConvArgumentError) as error:  # it speaks of `device`
            raise type(error)(f"devices must be 'all' or a list of GPU numbers, got {brief(one)} in it") from None
    if not gpus or len(set(gpus)) < len(gpus) or any(gpu.backend != "cuda" for gpu in gpus):
        raise ConvArgumentError(f"devices must name one or more GPUs, each once, but got devices={brief(devices)}")
    return tuple(gpus)


# ---- plans


@remember_plans
def plan_for_call(
    call: Call, kind: ArrayKind, signatures: tuple[Signature | None, ...], device: Any, layout: str, tune: bool,
    with_moments: bool = False,
) -> Plan:
    """The plan for a call with hashable options. It may be one for NCHW although the result's `layout` is not.

    `signatures` are those of the :class:`Operands`, and `with_moments` is as for :class:`Plan`.
    """
    input, *others = signatures
    assert input is not None
    check_same_type(kind, input, *others, names=(*call.operand_names, *Operands._fields[2:]))
    return plan_for(problem_of(call, kind, signatures), kind, input, device, layout, tune, with_moments)


def problem_of(call: Call, kind: ArrayKind, signatures: Sequence[Signature | None], **more: Any) -> ConvProblem:
    """The problem of a call of arrays whose types go together."""
    dtypes = [None if one is None else kind.dtype_name(one[1]) for one in signatures]
    own = arithmetic(dtypes, call.dtype)
    shapes = [None if one is None else one[0] for one in signatures]
    written = "" if call.dtype is None else result_type(own, call.dtype)
    read = dtypes[0] if dtypes[0] in INTEGER_BYTES else ""
    return call.problem(shapes, own, input_dtype=read, result_dtype=written, **more)


def plan_for(
    problem: ConvProblem, kind: ArrayKind, input: Signature, device: Any, layout: str, tune: bool, with_moments: bool = False
) -> Plan:
    """The plan for a problem that was checked; `input` is its first array."""
    own = kind.device(input, device)
    if layout == "NHWC" and input[2] not in (None, -1):  # arrays in host memory are put in order on their way
        problem = as_called(replace(problem, layout="NHWC"), own, tune)
    return cached_plan(problem, own, tune, with_moments) if tune or with_moments else cached_plan(problem, own)


# ---- the gradient of a bias


def sum_channels(ndim: int, grad_output: Any, device: Any, stream: Any, recorded: bool = False) -> Any:
    """The gradient of a bias; `recorded` as for :func:`convolve`."""
    operands = Operands(grad_output, grad_output)
    kind = same_kind(operands, names=("grad_output", "grad_output"))
    if kind is STAND_IN:
        return hand_over(f"conv{ndim}d_bias", (grad_output,), {"device": device, "stream": stream})
    if kind is LAZY:
        return handlers["dask"]().sum_channels(ndim, grad_output, stream, chunks_place(device, None, False))
    if device is not None:
        device = get_device(device)
    if not recorded and kind.must_be_recorded(operands, stream is None):
        return handlers["torch"]().sum_channels(ndim, grad_output, None if device is None else device.name)
    if kind.imports:
        operands = kind.imported(operands, ("grad_output", "grad_output"))
        grad_output = operands.input
    kind.check_dense(grad_output)
    signature: Any = kind.signatures(operands, ("grad_output", "grad_output"))[0]
    shape, dtype = tuple(signature[0]), kind.dtype_name(signature[1])
    check_summed(ndim, shape, dtype, kind.conversion)
    own, layout = kind.device(signature, device), kind.layout(grad_output, ndim)
    order = channels_last(len(shape), ndim) if layout == "NHWC" else None
    images = shape[0] if len(shape) == ndim + 2 else 1
    pixels = batch_norm.Pixels(dtype, layout, images, shape[-ndim - 1], math.prod(shape[-ndim:]))
    launch, workspace = batch_norm.compiled(batch_norm.channel_sums, pixels, own)
    with own:
        sums, summed = kind.empty((pixels.K,), grad_output, own), kind.as_kernel_input(grad_output, order)
    execute.launch(kind, own, launch, (summed,), (sums,), workspace, stream)
    return kind.exported(sums, operands, stream)


def check_summed(ndim: int, shape: Sequence[int], dtype: str, conversion: str = ArrayKind.conversion) -> None:
    """Refuse a gradient whose channels can't be summed."""
    name = f"conv{ndim}d_bias"
    check_element_type("grad_output", dtype, conversion)
    if len(shape) not in (ndim + 1, ndim + 2):
        raise ConvArgumentError(f"Expected {ndim + 1}D (unbatched) or {ndim + 2}D (batched) grad_output to {name}, but got {list(shape)}")
    if any(isinstance(n, int) and n == 0 for n in shape):
        raise ConvArgumentError(f"grad_output must have elements, but got shape {list(shape)}")
