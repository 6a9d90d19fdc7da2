"""The public functions. Each reads: check, find the plan, run it."""

from __future__ import annotations

import inspect
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from pycuda_conv import quick
from pycuda_conv.arrays import LAZY, STAND_IN, ArrayKind, HostKind, NumpyKind, Signature, TorchKind, check_same_type, kind_of, same_kind
from pycuda_conv.engines import batch_norm
from pycuda_conv.errors import ConvArgumentError, brief
from pycuda_conv.memo import remember_plans
from pycuda_conv.plan import Plan, as_called, cached_plan
from pycuda_conv.problem import ACTIVATIONS, DTYPE_BYTES, PRECISIONS, ConvProblem, channels_last, integer
from pycuda_conv.runtime import device_count, get_device
from pycuda_conv.typing import Activation, Array, Crop, DType, Padding, Precision, Sizes

if TYPE_CHECKING:
    import numpy as np


@remember_plans
def _plan(
    transposed: bool, ndim: int, kind: ArrayKind, input: Signature, weight: Signature, bias: Signature | None, stride: Any, padding: Any,
    output_padding: Any, dilation: Any, groups: Any, precision: Any, device: Any, layout: str, tune: bool, scale: Signature | None = None,
    residual: Signature | None = None, activation: Any = None, noted: bool = False,
) -> Plan:
    """The plan for a call, from the hashable part of its arguments. It may be NCHW although `layout`, the result's, is not."""
    common = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "dtype": kind.dtype_name(input[1])}
    common |= {"scale_shape": scale and scale[0], "residual_shape": residual and residual[0], "activation": activation}
    check_same_type(kind, input, weight, bias, scale, residual)
    shapes = (ndim, input[0], weight[0], None if bias is None else bias[0])
    if transposed:
        problem = ConvProblem.transposed(*shapes, **common, output_padding=output_padding, precision=precision)
    else:
        problem = ConvProblem.forward(*shapes, **common, precision=precision)
    return _plan_for(problem, kind, input, device, layout, tune, noted)


def _plan_for(
    problem: ConvProblem, kind: ArrayKind, input: Signature, device: Any, layout: str, tune: bool, noted: bool = False
) -> Plan:
    """The plan for a problem that was checked, whose first array is `input`."""
    own = kind.device(input, device)
    if layout == "NHWC" and input[2] not in (None, -1):  # arrays in host memory are put in order on their way
        problem = as_called(replace(problem, layout="NHWC"), own, tune)
    return cached_plan(problem, own, tune, noted) if tune or noted else cached_plan(problem, own)


#: The arrays that a gradient is computed from.
_OPERANDS = {"input": ("grad_output", "weight"), "weight": ("input", "grad_output")}


@remember_plans
def _gradient_plan(
    of: str, ndim: int, kind: ArrayKind, first: Signature, second: Signature, size: tuple[int, ...], stride: Any, padding: Any,
    dilation: Any, groups: Any, precision: Any, device: Any, layout: str, tune: bool,
) -> Plan:
    """The plan for the gradient by the convolution's input or weight, which has that `size`."""
    check_same_type(kind, first, second, names=_OPERANDS[of])
    shapes = (size, second[0], first[0]) if of == "input" else (first[0], size, second[0])
    problem = ConvProblem.gradient(
        of, ndim, *shapes, stride=stride, padding=padding, dilation=dilation, groups=groups, dtype=kind.dtype_name(first[1]),
        precision=precision,
    )
    return _plan_for(problem, kind, first, device, layout, tune)


def _key(name: str, value: Any) -> Any:
    """An argument made of integers in the one hashable form of its value: an int, a word, or a tuple of those."""
    if isinstance(value, (list, tuple)):
        for v in value:  # mostly ints, which take no time in such a loop
            if v.__class__ is not int:
                return tuple([_key(name, v) for v in value])
        return tuple(value)
    return value if isinstance(value, str) else integer(name, value)


def _settings(stride: Any, padding: Any, dilation: Any, groups: Any) -> tuple[Any, Any, Any, Any]:
    """These arguments, each as :func:`_key` has it."""
    if stride.__class__ is not int:
        stride = _key("stride", stride)
    if padding.__class__ is not int:
        padding = _key("padding", padding)
    if dilation.__class__ is not int:
        dilation = _key("dilation", dilation)
    if groups.__class__ is not int:
        groups = _key("groups", groups)
    return stride, padding, dilation, groups


#: The words for the two in the keys of calls.
_NAMES = {False: "conv", True: "conv_transpose"}


class _Recorded:
    """Makes a convolution that was made before, of which torch is told, since it has to give gradients."""

    def __init__(self, transposed: bool, output_padding: Any, asked: tuple[Any, ...]) -> None:
        self._call = transposed, output_padding, asked
        self._made: Any = None

    def __call__(self, input: Any, weight: Any, bias: Any, ready: Any) -> Any:
        if self._made is None:
            from pycuda_conv.nn import autograd

            self._made = autograd.Again(*self._call, input.shape, weight.shape)
        return self._made(input, weight, bias, ready)


def _convolve(
    transposed: bool, ndim: int, input: Any, weight: Any, bias: Any, stride: Any, padding: Any, output_padding: Any, dilation: Any,
    groups: Any, out: Any, precision: Any, device: Any, devices: Any, stream: Any, tune: Any, scale: Any, residual: Any, activation: Any,
    recorded: bool = False,
) -> Any:
    """The (transposed) convolution; `recorded` where the arrays' library knows of it."""
    asked = None
    if device is None and devices is None and stream is None and tune is False and quick.possible():
        asked = _NAMES[transposed], ndim, stride, padding, output_padding, dilation, groups, precision, activation
        made = quick.call(quick.table, asked, recorded, input, weight, bias, scale, residual, out)
        if made is not None:
            return made
    kind = same_kind(input, weight, bias, out, scale, residual)
    if kind is STAND_IN:
        return _hand_over(
            f"conv{'_transpose' if transposed else ''}{ndim}d", input, weight, bias=bias, stride=stride, padding=padding,
            output_padding=output_padding, dilation=dilation, groups=groups, scale=scale, residual=residual, activation=activation, out=out,
            precision=precision, device=device, devices=devices, stream=stream, tune=tune,
        )
    stride, padding, dilation, groups = _settings(stride, padding, dilation, groups)
    if output_padding.__class__ is not int:
        output_padding = _key("output_padding", output_padding)
    _check_options(precision, tune)
    if not (activation is None or isinstance(activation, str)):
        raise TypeError(f"activation must be one of {ACTIVATIONS}, got {brief(activation)}")
    if kind is LAZY:
        chunked, place = _in_chunks(device, devices, tune)
        more = {"output_padding": output_padding} if transposed else {}
        return chunked.convolve(
            transposed, ndim, input, weight, bias, scale, residual, out=out, stream=stream, place=place, stride=stride, padding=padding,
            dilation=dilation, groups=groups, precision=precision, activation=activation, **more,
        )
    gpus: tuple[Any, ...] = ()
    if devices is not None:
        gpus = _gpus(devices, device)
        device = gpus[0]
    elif device is not None:
        device = get_device(device)
    if not recorded:
        recorder = kind.recorder(input, weight, bias, scale, residual, out is None and devices is None and stream is None)
        if recorder is not None:
            rest = (stride, padding, dilation, groups, precision, None if device is None else device.name, tune)
            return recorder.convolve(transposed, ndim, input, weight, bias, output_padding, *rest, scale, residual, activation)
    sign, layout = kind.signature, kind.layout(input, ndim)
    plan = _plan(
        transposed, ndim, kind, sign(input), sign(weight), None if bias is None else sign(bias), stride, padding, output_padding, dilation,
        groups, precision, device, layout, tune, None if scale is None else sign(scale), None if residual is None else sign(residual),
        activation,
    )
    plan = plan.better or plan
    options: dict[str, Any] = {} if layout == plan.problem.layout else {"layout": layout}
    if scale is not None or residual is not None:
        options |= {"scale": scale, "residual": residual}
    if gpus:
        if not isinstance(kind, HostKind) or kind.signature(input)[2] not in (None, -1):
            raise ConvArgumentError("devices is for arrays in host memory; the input lies on a GPU and is convolved there")
        if stream is not None:
            raise ConvArgumentError(f"stream and devices exclude each other, but got stream={brief(stream)} and devices={brief(devices)}")
        return kind.convolve(plan, input, weight, bias, out, stream, devices=gpus, **options)
    result = kind.convolve(plan, input, weight, bias, out, stream, **options)
    if asked is not None and isinstance(kind, TorchKind):
        again = None
        if scale is None and residual is None and activation is None:
            again = _Recorded(transposed, output_padding, (ndim, stride, padding, dilation, groups, precision))
        quick.remember(quick.table, asked, kind, plan, (input, weight, bias, scale, residual), out, layout=layout, recorded=again)
    return result


def _gradient(
    of: str, ndim: int, first: Any, second: Any, size: Any, stride: Any, padding: Any, dilation: Any, groups: Any, out: Any, precision: Any,
    device: Any, stream: Any, tune: Any, recorded: bool = False,
) -> Any:
    """The gradient by the convolution's input or weight; `recorded` as for :func:`_convolve`."""
    asked = None
    if device is None and stream is None and tune is False and quick.possible():
        asked = of, ndim, size, stride, padding, dilation, groups, precision
        made = quick.call(quick.table, asked, recorded, first, second, None, None, None, out)
        if made is not None:
            return made
    kind = same_kind(first, second, None, out, names=_OPERANDS[of])
    if kind is STAND_IN:
        operands = (size, second, first) if of == "input" else (first, size, second)
        return _hand_over(
            f"conv{ndim}d_{of}", *operands, stride=stride, padding=padding, dilation=dilation, groups=groups, out=out, precision=precision,
            device=device, stream=stream, tune=tune,
        )
    if not isinstance(size, (list, tuple)):
        raise TypeError(f"{of}_size must be the shape of the convolution's {of}, got {brief(size)}")
    _check_options(precision, tune)
    if kind is LAZY:
        chunked, place = _in_chunks(device, None, tune)
        return chunked.gradient(
            of, ndim, first, second, size, out=out, stream=stream, place=place, stride=stride, padding=padding, dilation=dilation,
            groups=groups, precision=precision,
        )
    if device is not None:
        device = get_device(device)
    size = _key(f"{of}_size", size)
    rest = *_settings(stride, padding, dilation, groups), precision
    if not recorded:
        recorder = kind.recorder(first, second, None, None, None, out is None and stream is None)
        if recorder is not None:
            return recorder.gradient(of, ndim, first, second, size, *rest, None if device is None else device.name, tune)
    layout = kind.layout(first, ndim)
    plan = _gradient_plan(of, ndim, kind, kind.signature(first), kind.signature(second), size, *rest, device, layout, tune)
    plan = plan.better or plan
    options: dict[str, Any] = {} if of == "weight" or layout == plan.problem.layout else {"layout": layout}
    result = kind.convolve(plan, first, second, None, out, stream, **options)
    if asked is not None and isinstance(kind, TorchKind):
        quick.remember(quick.table, asked, kind, plan, (first, second, None, None, None), out, **options)
    return result


def _hand_over(name: str, *operands: Any, **options: Any) -> Any:
    """What stands in for arrays takes a call of the public function `name`; options with their default values are left out."""
    function = globals()[name]
    parameters = inspect.signature(function).parameters
    given = {key: value for key, value in options.items() if key in parameters and value is not parameters[key].default}
    tools = sys.modules["torch"].overrides
    return tools.handle_torch_function(function, [a for a in (*operands, *given.values()) if tools.is_tensor_like(a)], *operands, **given)


def _in_chunks(device: Any, devices: Any, tune: bool) -> tuple[Any, Any]:
    """The module for dask arrays, which is imported when there are any, and where their chunks are to be computed."""
    from pycuda_conv import dask

    if isinstance(devices, Iterable) and not isinstance(devices, str):
        devices = tuple(devices)
    return dask, dask.Place(getattr(device, "name", device), devices, tune)


def _check_options(precision: Any, tune: Any) -> None:
    if not isinstance(precision, str):  # torch.compile follows this, and not always a comparison of classes
        raise TypeError(f"precision must be one of {PRECISIONS}, got {brief(precision)}")
    if not isinstance(tune, bool):
        raise TypeError(f"tune must be True or False, got {brief(tune)}")


def _gpus(devices: Any, device: Any) -> tuple[Any, ...]:
    """The GPUs that `devices` names, each once."""
    if device is not None:
        raise ConvArgumentError(f"device and devices exclude each other, but got device={brief(device)} and devices={brief(devices)}")
    if isinstance(devices, str) and devices == "all":
        devices = range(device_count())
    elif isinstance(devices, str) or not isinstance(devices, Iterable):
        raise TypeError(f"devices must be 'all' or a list of GPU numbers, got {brief(devices)}")
    gpus = tuple(get_device(one) for one in devices)
    if not gpus or len(set(gpus)) < len(gpus) or any(gpu.backend != "cuda" for gpu in gpus):
        raise ConvArgumentError(f"devices must name one or more GPUs, each once, but got devices={brief(devices)}")
    return gpus


def _many(function: Callable[..., Any], inputs: Iterable[Any], ahead: Any, *args: Any, **options: Any) -> Iterator[Any]:
    """`function` of each of `inputs`, in order, with up to `ahead` calls under way while the caller uses a result."""
    for name in ("out", "stream", "residual"):
        if name in options:
            raise TypeError(f"{name} is for one call; here several are under way at once")
    if not isinstance(inputs, Iterable):
        raise TypeError(f"inputs must be an iterable of arrays, got {brief(inputs)}")
    ahead = integer("ahead", ahead)
    if ahead < 1:
        raise ConvArgumentError(f"ahead must be at least 1, but got ahead={ahead}")

    def results() -> Iterator[Any]:
        coming: deque[Future[Any]] = deque()
        with ThreadPoolExecutor(ahead) as pool:
            try:
                for one in inputs:
                    if isinstance(kind_of("an input", one), NumpyKind):
                        coming.append(pool.submit(function, one, *args, **options))
                    else:  # launches don't wait, and streams and torch's modes are those of the caller's thread
                        coming.append(Future())
                        coming[-1].set_result(function(one, *args, **options))
                    if len(coming) > ahead:
                        yield coming.popleft().result()
                while coming:
                    yield coming.popleft().result()
            finally:
                for future in coming:
                    future.cancel()

    return results()


def _sum_channels(ndim: int, grad_output: Any, device: Any, stream: Any, recorded: bool = False) -> Any:
    """The gradient of a bias; `recorded` as for :func:`_convolve`."""
    kind = same_kind(grad_output, grad_output, None, None, names=("grad_output", "grad_output"))
    if kind is STAND_IN:
        return _hand_over(f"conv{ndim}d_bias", grad_output, device=device, stream=stream)
    if kind is LAZY:
        chunked, place = _in_chunks(device, None, False)
        return chunked.sum_channels(ndim, grad_output, stream=stream, place=place)
    if device is not None:
        device = get_device(device)
    if not recorded:
        recorder = kind.recorder(grad_output, grad_output, None, None, None, stream is None)
        if recorder is not None:
            return recorder.sum_channels(ndim, grad_output, None if device is None else device.name)
    kind.check_dense(grad_output)
    signature = kind.signature(grad_output)
    shape, dtype = tuple(signature[0]), kind.dtype_name(signature[1])
    _check_summed(ndim, shape, dtype)
    own, layout = kind.device(signature, device), kind.layout(grad_output, ndim)
    order = channels_last(len(shape), ndim) if layout == "NHWC" else None
    images = shape[0] if len(shape) == ndim + 2 else 1
    pixels = batch_norm.Pixels(dtype, layout, images, shape[-ndim - 1], math.prod(shape[-ndim:]))
    launch, workspace = batch_norm.compiled(batch_norm.channel_sums, pixels, own)
    with own:
        sums = kind.empty((pixels.K,), grad_output, own)
        kind.run(own, launch, (kind.ready(grad_output, order),), (sums,), workspace, stream)
    return sums


def _check_summed(ndim: int, shape: Sequence[int], dtype: str) -> None:
    """Refuse a gradient whose channels can't be summed."""
    name = f"conv{ndim}d_bias"
    if len(shape) not in (ndim + 1, ndim + 2):
        raise ConvArgumentError(f"Expected {ndim + 1}D (unbatched) or {ndim + 2}D (batched) grad_output to {name}, but got {list(shape)}")
    if dtype not in DTYPE_BYTES:
        raise TypeError(f"{name}() takes float16, bfloat16, float32 or float64 arrays, but got {dtype}")
    if any(isinstance(n, int) and n == 0 for n in shape):
        raise ConvArgumentError(f"grad_output must have elements, but got shape {list(shape)}")


def conv2d(
    input: Array, weight: Array, bias: Array | None = None, stride: Sizes = 1, padding: Padding = 0, dilation: Sizes = 1,
    groups: SupportsIndex = 1, *, scale: Array | None = None, residual: Array | None = None, activation: Activation | None = None,
    out: Array | None = None, precision: Precision = "fp32", device: Any = None, devices: Any = None, stream: Any = None,
    tune: bool = False,
) -> Array:
    """Convolve with two spatial axes. It is a cross-correlation, as in torch: the filter is not flipped.

    ``y[n,k,p,q] = bias[k] + sum over c,r,s of x[n, c, p*stride - padding + r*dilation, q*stride - padding + s*dilation] * w[k,c,r,s]``

    With `scale`, `residual` and `activation` it is ``y = activation(sum * scale[k] + bias[k] + residual)``. All of it is computed
    in the type of the sums and rounded once.

    Parameters
    ----------
    input : array of shape (N, C, H, W) or (C, H, W)
        A numpy, torch or CuPy array, a PyCUDA ``GPUArray``, or any object with ``__cuda_array_interface__``. Its dtype is float16,
        bfloat16 (in numpy that of ml_dtypes), float32 or float64. Its strides may be any. A torch tensor that is channels last
        (NHWC in memory) gives a result that is. A dask array of numpy or CuPy chunks gives one that is computed later.
    weight : array of shape (K, C/groups, R, S)
        The filters.
    bias : array of shape (K,), optional
        What is added to each output channel.
    stride : int or (int, int)
        The step from one output pixel to the next. The stride, the padding and ``dilation * (R - 1)`` are below 2^29.
    padding : int, (int, int), ((top, bottom), (left, right)), "same" or "valid"
        Zeros around the input. No padded copy is made. ``"same"`` needs stride 1; where it is uneven, the extra zero is at the
        bottom and right, as in torch.
    dilation : int or (int, int)
        The distance between neighbouring filter taps.
    groups : int
        Channels are convolved group by group; the number divides C and K. ``groups=C`` is a depthwise convolution.
    scale : array of shape (K,), optional
        Factors of the output channels. A batch norm that is not trained is a scale and a bias.
    residual : array, optional
        What is added to the result, of the result's shape and dtype. It is copied if it does not lie in memory as the result does. It
        may be `out` itself, which is then added to; for float32 on tensor cores that takes a copy.
    activation : {None, "relu"}
        ``"relu"`` turns negative numbers into 0; NaN stays NaN.
    out : array, optional
        Where to write the result. It has the result's shape and dtype, is C-contiguous or, like the input, channels last, and
        overlaps no other array but the residual. torch's rules of ``out=`` hold for tensors: a tensor that requires a gradient is
        refused, except inside ``torch.no_grad()``, and a backward pass that needs the numbers that were there raises.
    precision : {"fp32", "tf32"}
        The arithmetic for float32 arrays. ``"fp32"`` is as accurate as fp32 units are, for all numbers; on tensor cores it takes three
        products. ``"tf32"`` permits products of 10-bit mantissas, as TF32 does: one product on tensor cores, and fp32
        elsewhere. Sums of float16 and bfloat16 arrays are always kept in float32.
    device : None, int or str
        Where host arrays are convolved: a GPU (0, ``"cuda:1"``) or ``"opencl"`` (also ``"cpu"``). The default is the first GPU, and
        OpenCL where there is none. Arrays on a GPU are convolved where they lie.
    devices : "all" or list of int, optional
        GPUs that share the work on host arrays, instead of `device`. The numbers are those of one GPU, bit for bit.
    stream : optional
        A stream of PyCUDA, torch or CuPy, or its handle as an int. The default is the array library's current stream.
    tune : bool
        Measure which kernel and tile are the fastest, if the problem has not been measured on such a GPU. This takes seconds. The
        choice is kept for all later calls, of other processes too. It is refused while a stream is being captured. On OpenCL nothing is
        measured. Host arrays that go through a GPU in chunks do not gain.

    Returns
    -------
    array of shape (N, K, P, Q) or (K, P, Q)
        The result, of the input's kind and dtype, or `out` if it was given. It is channels last where the input is a tensor that is,
        else C-contiguous.
        ``P = (H + top + bottom - dilation*(R - 1) - 1) // stride + 1``, Q likewise.

    Raises
    ------
    ConvArgumentError
        Shapes, dtypes, devices or values do not fit. It is a ``ValueError`` and a ``RuntimeError``. Nothing was launched.
    TypeError
        An argument is no array, or no integer, or the arrays are of different kinds.
    DeviceMemoryError
        The device has too little memory. The message says how many bytes were asked for and how many are free.

    Examples
    --------
    >>> import numpy as np, pycuda_conv as pc
    >>> image = np.random.rand(1, 1, 512, 512).astype(np.float32)
    >>> sharpen = np.array([[[[0, -1, 0], [-1, 5, -1], [0, -1, 0]]]], np.float32)
    >>> pc.conv2d(image, sharpen, padding=1).shape
    (1, 1, 512, 512)
    """
    return _convolve(
        False, 2, input, weight, bias, stride, padding, 0, dilation, groups, out, precision, device, devices, stream, tune,
        scale, residual, activation,
    )


def conv1d(
    input: Array, weight: Array, bias: Array | None = None, stride: Sizes = 1, padding: Padding = 0, dilation: Sizes = 1,
    groups: SupportsIndex = 1, *, scale: Array | None = None, residual: Array | None = None, activation: Activation | None = None,
    out: Array | None = None, precision: Precision = "fp32", device: Any = None, devices: Any = None, stream: Any = None,
    tune: bool = False,
) -> Array:
    """Convolve with one spatial axis: see :func:`conv2d`.

    Parameters
    ----------
    input : array of shape (N, C, W) or (C, W)
    weight : array of shape (K, C/groups, S)
    padding : int, (int,), ((left, right),), "same" or "valid"
    bias, stride, dilation, groups, scale, residual, activation, out, precision, device, devices, stream, tune
        As for :func:`conv2d`.

    Returns
    -------
    array of shape (N, K, Q) or (K, Q)

    Raises
    ------
    ConvArgumentError, TypeError, DeviceMemoryError
        As for :func:`conv2d`.
    """
    return _convolve(
        False, 1, input, weight, bias, stride, padding, 0, dilation, groups, out, precision, device, devices, stream, tune,
        scale, residual, activation,
    )


def conv3d(
    input: Array, weight: Array, bias: Array | None = None, stride: Sizes = 1, padding: Padding = 0, dilation: Sizes = 1,
    groups: SupportsIndex = 1, *, scale: Array | None = None, residual: Array | None = None, activation: Activation | None = None,
    out: Array | None = None, precision: Precision = "fp32", device: Any = None, devices: Any = None, stream: Any = None,
    tune: bool = False,
) -> Array:
    """Convolve with three spatial axes: see :func:`conv2d`.

    Parameters
    ----------
    input : array of shape (N, C, D, H, W) or (C, D, H, W)
    weight : array of shape (K, C/groups, T, R, S)
    padding : int, three ints, ((front, back), (top, bottom), (left, right)), "same" or "valid"
    bias, stride, dilation, groups, scale, residual, activation, out, precision, device, devices, stream, tune
        As for :func:`conv2d`.

    Returns
    -------
    array of shape (N, K, O, P, Q) or (K, O, P, Q)

    Raises
    ------
    ConvArgumentError, TypeError, DeviceMemoryError
        As for :func:`conv2d`.
    """
    return _convolve(
        False, 3, input, weight, bias, stride, padding, 0, dilation, groups, out, precision, device, devices, stream, tune,
        scale, residual, activation,
    )


def conv_transpose2d(
    input: Array, weight: Array, bias: Array | None = None, stride: Sizes = 1, padding: Crop = 0, output_padding: Sizes = 0,
    groups: SupportsIndex = 1, dilation: Sizes = 1, *, scale: Array | None = None, residual: Array | None = None,
    activation: Activation | None = None, out: Array | None = None, precision: Precision = "fp32", device: Any = None, devices: Any = None,
    stream: Any = None, tune: bool = False,
) -> Array:
    """The transposed convolution with two spatial axes. It is the gradient of :func:`conv2d` by its input.

    ``y[n,c,h,w] = bias[c] + sum over k,r,s of x[n,k,p,q] * w[k,c,r,s]`` over all p, q with
    ``h = p*stride - padding + r*dilation`` and ``w = q*stride - padding + s*dilation``.

    `groups` comes before `dilation`, as in torch.

    Parameters
    ----------
    input : array of shape (N, K, P, Q) or (K, P, Q)
    weight : array of shape (K, C/groups, R, S)
    bias, scale : array of shape (C,), optional
    padding : int, (int, int) or ((top, bottom), (left, right))
        Rows and columns that are taken off the result.
    output_padding : int or (int, int)
        Rows and columns that are added at the result's bottom and right. They are fewer than the stride or the dilation.
    stride, dilation, groups, residual, activation, out, precision, device, devices, stream, tune
        As for :func:`conv2d`.

    Returns
    -------
    array of shape (N, C, H, W) or (C, H, W)
        ``H = (P - 1)*stride - top - bottom + dilation*(R - 1) + output_padding + 1``, W likewise.

    Raises
    ------
    ConvArgumentError, TypeError, DeviceMemoryError
        As for :func:`conv2d`.
    """
    return _convolve(
        True, 2, input, weight, bias, stride, padding, output_padding, dilation, groups, out, precision, device, devices, stream, tune,
        scale, residual, activation,
    )


def conv_transpose1d(
    input: Array, weight: Array, bias: Array | None = None, stride: Sizes = 1, padding: Crop = 0, output_padding: Sizes = 0,
    groups: SupportsIndex = 1, dilation: Sizes = 1, *, scale: Array | None = None, residual: Array | None = None,
    activation: Activation | None = None, out: Array | None = None, precision: Precision = "fp32", device: Any = None, devices: Any = None,
    stream: Any = None, tune: bool = False,
) -> Array:
    """The transposed convolution with one spatial axis: see :func:`conv_transpose2d`.

    Parameters
    ----------
    input : array of shape (N, K, Q) or (K, Q)
    weight : array of shape (K, C/groups, S)
    padding : int, (int,) or ((left, right),)
    bias, stride, output_padding, groups, dilation, scale, residual, activation, out, precision, device, devices, stream, tune
        As for :func:`conv_transpose2d`.

    Returns
    -------
    array of shape (N, C, W) or (C, W)

    Raises
    ------
    ConvArgumentError, TypeError, DeviceMemoryError
        As for :func:`conv2d`.
    """
    return _convolve(
        True, 1, input, weight, bias, stride, padding, output_padding, dilation, groups, out, precision, device, devices, stream, tune,
        scale, residual, activation,
    )


def conv_transpose3d(
    input: Array, weight: Array, bias: Array | None = None, stride: Sizes = 1, padding: Crop = 0, output_padding: Sizes = 0,
    groups: SupportsIndex = 1, dilation: Sizes = 1, *, scale: Array | None = None, residual: Array | None = None,
    activation: Activation | None = None, out: Array | None = None, precision: Precision = "fp32", device: Any = None, devices: Any = None,
    stream: Any = None, tune: bool = False,
) -> Array:
    """The transposed convolution with three spatial axes: see :func:`conv_transpose2d`.

    Parameters
    ----------
    input : array of shape (N, K, O, P, Q) or (K, O, P, Q)
    weight : array of shape (K, C/groups, T, R, S)
    padding : int, three ints or ((front, back), (top, bottom), (left, right))
    bias, stride, output_padding, groups, dilation, scale, residual, activation, out, precision, device, devices, stream, tune
        As for :func:`conv_transpose2d`.

    Returns
    -------
    array of shape (N, C, D, H, W) or (C, D, H, W)

    Raises
    ------
    ConvArgumentError, TypeError, DeviceMemoryError
        As for :func:`conv2d`.
    """
    return _convolve(
        True, 3, input, weight, bias, stride, padding, output_padding, dilation, groups, out, precision, device, devices, stream, tune,
        scale, residual, activation,
    )


def conv2d_input(
    input_size: Sequence[SupportsIndex], weight: Array, grad_output: Array, stride: Sizes = 1, padding: Padding = 0, dilation: Sizes = 1,
    groups: SupportsIndex = 1, *, out: Array | None = None, precision: Precision = "fp32", device: Any = None, stream: Any = None,
    tune: bool = False,
) -> Array:
    """The gradient of :func:`conv2d` by its input, as in ``torch.nn.grad``.

    ``dx[n,c,h,w] = sum over k,r,s and the p,q that read h,w through tap r,s of dy[n,k,p,q] * w[k,c,r,s]``

    Parameters
    ----------
    input_size : (N, C, H, W) or (C, H, W)
        The input's shape.
    weight : array of shape (K, C/groups, R, S)
    grad_output : array of shape (N, K, P, Q) or (K, P, Q)
        The gradient by the convolution's result. The gradient that is computed has the same layout.
    stride, padding, dilation, groups
        Those of the convolution.
    out, precision, device, stream, tune
        As for :func:`conv2d`.

    Returns
    -------
    array of shape (N, C, H, W) or (C, H, W)
        The gradient, of the kind and dtype of `grad_output`. It has the same bits on every run.

    Raises
    ------
    ConvArgumentError, TypeError, DeviceMemoryError
        As for :func:`conv2d`.
    """
    return _gradient("input", 2, grad_output, weight, input_size, stride, padding, dilation, groups, out, precision, device, stream, tune)


def conv1d_input(
    input_size: Sequence[SupportsIndex], weight: Array, grad_output: Array, stride: Sizes = 1, padding: Padding = 0, dilation: Sizes = 1,
    groups: SupportsIndex = 1, *, out: Array | None = None, precision: Precision = "fp32", device: Any = None, stream: Any = None,
    tune: bool = False,
) -> Array:
    """The gradient of :func:`conv1d` by its input: see :func:`conv2d_input`.

    Parameters
    ----------
    input_size : (N, C, W) or (C, W)
    weight : array of shape (K, C/groups, S)
    grad_output : array of shape (N, K, Q) or (K, Q)
    stride, padding, dilation, groups, out, precision, device, stream, tune
        As for :func:`conv2d_input`.

    Returns
    -------
    array of shape (N, C, W) or (C, W)

    Raises
    ------
    ConvArgumentError, TypeError, DeviceMemoryError
        As for :func:`conv2d`.
    """
    return _gradient("input", 1, grad_output, weight, input_size, stride, padding, dilation, groups, out, precision, device, stream, tune)


def conv3d_input(
    input_size: Sequence[SupportsIndex], weight: Array, grad_output: Array, stride: Sizes = 1, padding: Padding = 0, dilation: Sizes = 1,
    groups: SupportsIndex = 1, *, out: Array | None = None, precision: Precision = "fp32", device: Any = None, stream: Any = None,
    tune: bool = False,
) -> Array:
    """The gradient of :func:`conv3d` by its input: see :func:`conv2d_input`.

    Parameters
    ----------
    input_size : (N, C, D, H, W) or (C, D, H, W)
    weight : array of shape (K, C/groups, T, R, S)
    grad_output : array of shape (N, K, O, P, Q) or (K, O, P, Q)
    stride, padding, dilation, groups, out, precision, device, stream, tune
        As for :func:`conv2d_input`.

    Returns
    -------
    array of shape (N, C, D, H, W) or (C, D, H, W)

    Raises
    ------
    ConvArgumentError, TypeError, DeviceMemoryError
        As for :func:`conv2d`.
    """
    return _gradient("input", 3, grad_output, weight, input_size, stride, padding, dilation, groups, out, precision, device, stream, tune)


def conv2d_weight(
    input: Array, weight_size: Sequence[SupportsIndex], grad_output: Array, stride: Sizes = 1, padding: Padding = 0, dilation: Sizes = 1,
    groups: SupportsIndex = 1, *, out: Array | None = None, precision: Precision = "fp32", device: Any = None, stream: Any = None,
    tune: bool = False,
) -> Array:
    """The gradient of :func:`conv2d` by its filter, as in ``torch.nn.grad``.

    ``dw[k,c,r,s] = sum over n,p,q of dy[n,k,p,q] * x[n, c, p*stride - padding + r*dilation, q*stride - padding + s*dilation]``

    Parameters
    ----------
    input : array of shape (N, C, H, W) or (C, H, W)
    weight_size : (K, C/groups, R, S)
        The filter's shape.
    grad_output : array of shape (N, K, P, Q) or (K, P, Q)
        The gradient by the convolution's result.
    stride, padding, dilation, groups
        Those of the convolution.
    out, precision, device, stream, tune
        As for :func:`conv2d`. `out` is C-contiguous. Both host arrays must fit the device's memory at the same time.

    Returns
    -------
    array of shape (K, C/groups, R, S)
        The gradient, of the kind and dtype of `input`, C-contiguous. It has the same bits on every run, because the parts of a sum are
        added in order.

    Raises
    ------
    ConvArgumentError, TypeError, DeviceMemoryError
        As for :func:`conv2d`.
    """
    return _gradient("weight", 2, input, grad_output, weight_size, stride, padding, dilation, groups, out, precision, device, stream, tune)


def conv1d_weight(
    input: Array, weight_size: Sequence[SupportsIndex], grad_output: Array, stride: Sizes = 1, padding: Padding = 0, dilation: Sizes = 1,
    groups: SupportsIndex = 1, *, out: Array | None = None, precision: Precision = "fp32", device: Any = None, stream: Any = None,
    tune: bool = False,
) -> Array:
    """The gradient of :func:`conv1d` by its filter: see :func:`conv2d_weight`.

    Parameters
    ----------
    input : array of shape (N, C, W) or (C, W)
    weight_size : (K, C/groups, S)
    grad_output : array of shape (N, K, Q) or (K, Q)
    stride, padding, dilation, groups, out, precision, device, stream, tune
        As for :func:`conv2d_weight`.

    Returns
    -------
    array of shape (K, C/groups, S)

    Raises
    ------
    ConvArgumentError, TypeError, DeviceMemoryError
        As for :func:`conv2d`.
    """
    return _gradient("weight", 1, input, grad_output, weight_size, stride, padding, dilation, groups, out, precision, device, stream, tune)


def conv3d_weight(
    input: Array, weight_size: Sequence[SupportsIndex], grad_output: Array, stride: Sizes = 1, padding: Padding = 0, dilation: Sizes = 1,
    groups: SupportsIndex = 1, *, out: Array | None = None, precision: Precision = "fp32", device: Any = None, stream: Any = None,
    tune: bool = False,
) -> Array:
    """The gradient of :func:`conv3d` by its filter: see :func:`conv2d_weight`.

    Parameters
    ----------
    input : array of shape (N, C, D, H, W) or (C, D, H, W)
    weight_size : (K, C/groups, T, R, S)
    grad_output : array of shape (N, K, O, P, Q) or (K, O, P, Q)
    stride, padding, dilation, groups, out, precision, device, stream, tune
        As for :func:`conv2d_weight`.

    Returns
    -------
    array of shape (K, C/groups, T, R, S)

    Raises
    ------
    ConvArgumentError, TypeError, DeviceMemoryError
        As for :func:`conv2d`.
    """
    return _gradient("weight", 3, input, grad_output, weight_size, stride, padding, dilation, groups, out, precision, device, stream, tune)


def conv1d_many(
    inputs: Iterable[Array], weight: Array, bias: Array | None = None, *args: Any, ahead: int = 2, **options: Any,
) -> Iterator[Array]:
    """Convolve a stream of inputs by :func:`conv1d`: see :func:`conv2d_many`."""
    return _many(conv1d, inputs, ahead, weight, bias, *args, **options)


def conv2d_many(
    inputs: Iterable[Array], weight: Array, bias: Array | None = None, *args: Any, ahead: int = 2, **options: Any,
) -> Iterator[Array]:
    """Convolve a stream of inputs, as a data loader gives them: see :func:`conv2d`. A generator goes in, a generator comes out.

    While the caller uses one result, the next inputs are being convolved. Each numpy array has a thread of its own; arrays on a GPU
    are convolved by launches that do not wait. At most `ahead` + 1 inputs are taken before the first of their results is.

    Parameters
    ----------
    inputs : iterable of arrays
        Batches; they may differ in shape.
    weight, bias, scale, activation, stride, padding, dilation, groups, precision, device, devices, tune
        As for :func:`conv2d`.
    ahead : int
        How many calls may be under way, at least 1.

    Yields
    ------
    array
        The results, in the order of the inputs. An exception in the iterable or in a call ends the stream.

    Examples
    --------
    >>> import numpy as np, pycuda_conv as pc
    >>> w = np.ones((1, 1, 3, 3), "f")
    >>> [y.shape for y in pc.conv2d_many((np.ones((n, 1, 8, 8), "f") for n in (1, 2)), w)]
    [(1, 1, 6, 6), (2, 1, 6, 6)]
    """
    return _many(conv2d, inputs, ahead, weight, bias, *args, **options)


def conv3d_many(
    inputs: Iterable[Array], weight: Array, bias: Array | None = None, *args: Any, ahead: int = 2, **options: Any,
) -> Iterator[Array]:
    """Convolve a stream of inputs by :func:`conv3d`: see :func:`conv2d_many`."""
    return _many(conv3d, inputs, ahead, weight, bias, *args, **options)


@overload
def conv2d_bias(grad_output: np.ndarray[Any, DType], *, device: Any = None, stream: Any = None) -> np.ndarray[tuple[int], DType]: ...
@overload
def conv2d_bias(grad_output: Array, *, device: Any = None, stream: Any = None) -> Array: ...
def conv2d_bias(grad_output: Any, *, device: Any = None, stream: Any = None) -> Any:
    """The gradient of a bias: the sums of `grad_output` over all axes but the channels, always in the same order.

    Parameters
    ----------
    grad_output : array of shape (N, K, P, Q) or (K, P, Q)
        The gradient of the convolution's result, of any kind and dtype that :func:`conv2d` takes.
    device, stream
        As for :func:`conv2d`; `stream` for arrays on a GPU only.

    Returns
    -------
    array of shape (K,)
        The sums, of the kind and dtype of `grad_output`. Sums of float16 and bfloat16 are kept in float32 and rounded once.

    Raises
    ------
    ConvArgumentError, TypeError, DeviceMemoryError
        As for :func:`conv2d`; also for an array without elements.

    Examples
    --------
    >>> import numpy as np, pycuda_conv as pc
    >>> pc.conv2d_bias(np.ones((8, 3, 4, 5), np.float32))
    array([160., 160., 160.], dtype=float32)
    """
    return _sum_channels(2, grad_output, device, stream)


@overload
def conv1d_bias(grad_output: np.ndarray[Any, DType], *, device: Any = None, stream: Any = None) -> np.ndarray[tuple[int], DType]: ...
@overload
def conv1d_bias(grad_output: Array, *, device: Any = None, stream: Any = None) -> Array: ...
def conv1d_bias(grad_output: Any, *, device: Any = None, stream: Any = None) -> Any:
    """The gradient of a bias of :func:`conv1d`, from an array of shape (N, K, Q) or (K, Q): see :func:`conv2d_bias`."""
    return _sum_channels(1, grad_output, device, stream)


@overload
def conv3d_bias(grad_output: np.ndarray[Any, DType], *, device: Any = None, stream: Any = None) -> np.ndarray[tuple[int], DType]: ...
@overload
def conv3d_bias(grad_output: Array, *, device: Any = None, stream: Any = None) -> Array: ...
def conv3d_bias(grad_output: Any, *, device: Any = None, stream: Any = None) -> Any:
    """The gradient of a bias of :func:`conv3d`, from an array of shape (N, K, O, P, Q) or (K, O, P, Q): see :func:`conv2d_bias`."""
    return _sum_channels(3, grad_output, device, stream)
