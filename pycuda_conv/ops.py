"""The public functions: what they take, and what they say of it. The way of a call begins in :mod:`pycuda_conv.dispatch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, SupportsIndex

from pycuda_conv.call import Call, Operands
from pycuda_conv.dispatch import convolve, rest_of_call
from pycuda_conv.errors import ConvArgumentError
from pycuda_conv.numbers.missing import convolve as convolve_known
from pycuda_conv.typing import Activation, Algorithm, Array, Crop, Padding, PaddingMode, Precision, Sizes, State, UpsampleFilter


def _streamed(
    asked: tuple[Any, ...], operands: tuple[Any, ...], out: Any, place: tuple[Any, ...], more: tuple[Any, ...], state: Any
) -> Any:
    """A piece of a signal: its result, and the state for the next piece."""
    from pycuda_conv import streaming

    device, devices, stream, tune = place
    if devices is not None or tune is not False:
        raise ConvArgumentError("state goes with neither devices nor tune: pieces are computed one after the other, and alike")
    return streaming.convolve(Call(*asked, *rest_of_call(*more)), Operands(*operands), state, out, device, stream)


def conv2d(
    input: Array, weight: Array, bias: Array | None = None, stride: Sizes = 1, padding: Padding = 0, dilation: Sizes = 1,
    groups: SupportsIndex = 1, *, scale: Array | None = None, residual: Array | None = None, activation: Activation | None = None,
    out: Array | None = None, precision: Precision = "fp32", device: Any = None, devices: Any = None, stream: Any = None,
    tune: bool = False, algorithm: Algorithm | None = None, batch_invariant: bool = False,
    padding_mode: PaddingMode = "zeros", padding_value: float = 0.0, dtype: object = None, upsample: Sizes = 1,
    upsample_filter: UpsampleFilter | None = None, nan: Literal["interpolate"] | None = None,
    mask: Array | None = None, fill: float | None = None,
) -> Array:
    """Convolve with two spatial axes. It is a cross-correlation, as in torch: the filter is not flipped.

    ``y[n,k,p,q] = bias[k] + sum over c,r,s of x[n, c, p*stride - padding + r*dilation, q*stride - padding + s*dilation] * w[k,c,r,s]``

    With `scale`, `residual` and `activation` it is ``y = activation(sum * scale[k] + bias[k] + residual)``. All of it is computed
    in the type of the sums and rounded once.

    Parameters
    ----------
    input : array of shape (N, C, H, W), (C, H, W) or (H, W)
        A numpy, torch or CuPy array, a PyCUDA ``GPUArray``, or any object with ``__cuda_array_interface__``. Its dtype is float16,
        bfloat16 (in numpy that of ml_dtypes), float32 or float64, or bool or integers, which go to the device as they are. Integers of
        up to 16 bits are convolved in float32, and exactly so with a filter of integers while ``sum(|w|) * max|x|`` is below 2^24. Wider
        ones are convolved in float64. Its strides may be any. A torch tensor that is channels last
        (NHWC in memory) gives a result that is. A dask array of numpy or CuPy chunks gives one that is computed later. A tuple of
        arrays is convolved as if their channels were joined.
    weight : array of shape (K, C/groups, R, S), or (R, S) for an input of shape (H, W)
        The filters. One image and one filter may both come without their other axes; the result is an image of shape (P, Q). Filters
        have the input's dtype, or integers. For an input of integers they may be of any type: float64 makes the arithmetic float64.
    bias : array of shape (K,), optional
        What is added to each output channel.
    stride : int or (int, int)
        The step from one output pixel to the next. The stride, the padding and ``dilation * (R - 1)`` are below 2^29.
    padding : int, (int, int), ((top, bottom), (left, right)), "same" or "valid"
        Zeros around the input, or what `padding_mode` says. ``"same"`` needs stride 1; where it is uneven, the extra zero is at the
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
    activation : str, ("leaky_relu", slope) or None
        ``"relu"``, ``"relu6"``, ``"leaky_relu"``, ``"hardswish"``, ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``: what torch's functions of
        these names compute, the last one with ``approximate="tanh"``. ``"leaky_relu"`` has a slope of 0.01, as in torch;
        ``("leaky_relu", 0.2)`` has that one. NaN stays NaN.
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
    algorithm : {"direct", "fft", "batch_invariant"} or None
        By default, whatever takes the least time with elements as right as sums of products: large filters may be computed by Fourier
        transforms in float64, which are checked. ``"direct"`` is for sums of products alone. ``"fft"`` is for Fourier transforms
        wherever there are some for the problem. On a GPU a library's may be float32's, whose errors are relative to the norms of
        the filter and of the pixels that it meets, not to each element. ``"batch_invariant"`` is what `batch_invariant` asks for.
    batch_invariant : bool
        Compute each image so that its result, and its gradient by the input, have the same bits whatever images stand beside it, however
        many, and at whichever place: see :func:`pycuda_conv.batch_invariant`.
    padding_mode : str, a list of one for each axis, or of a pair (before, after) for each axis
        What the padding is: ``"zeros"``, ``"constant"`` (`padding_value`), ``"replicate"`` (the edge's pixel), ``"reflect"``
        (``d c b | a b c d``), ``"symmetric"`` (``c b a | a b c d``) or ``"circular"`` (the other end's pixels): torch's words and
        numpy's ``"symmetric"``. scipy calls them ``constant``, ``nearest``, ``mirror``, ``reflect`` and ``wrap``. The padding may be wider
        than the image, which is then repeated or mirrored again.
    padding_value : float
        What ``"constant"`` padding is filled with, rounded to the arrays' dtype.
    dtype : optional
        The result's type: the one in which the arrays are convolved, which is the default, or a type of integers. Then results are rounded
        to the nearest, ties to even, once, and those out of range are clipped; NaN becomes the least. An `out` of integers means the same.
    upsample : int or (int, int)
        How many times each pixel stands along each axis of the image that is convolved: nearest upsampling by whole factors, before the
        padding. In the formulas H and W are then those of the enlarged image.
    upsample_filter : {"exact", "folded"} or None
        ``"folded"`` sums the taps that meet the same pixel, and convolves the input as it is: a 3x3 filter behind an upsampling by 2 takes
        16 products a pixel of the input instead of 36. In 16 bits that rounds the filter once more, unless it is one of float32 under
        ``torch.autocast``. ``"exact"`` has the numbers of upsampling first. The default is "folded" for filters of float32 and float64, as
        far as stride, dilation and border permit it, and "exact" for others.
    nan : {"interpolate"}, optional
        NaN counts as a missing number: the weights of the others make up for its own, as in astropy. Where there are no others, the
        result is NaN. That takes two convolutions, filters without negative taps, and no bias, scale, residual, activation or `dtype`.
    mask : array of bool, optional
        True where a number is missing; of the input's shape or that of its last axes.
    fill : float, optional
        What missing numbers count as instead: one convolution, with any filter and any other argument.

    Returns
    -------
    array of shape (N, K, P, Q), (K, P, Q) or (P, Q)
        The result, of the input's kind and dtype, for integers of float32 or float64, or `out` if it was given. It is channels last
        where the input is a tensor that is, else C-contiguous.
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
    >>> images = np.random.rand(8, 3, 64, 64).astype(np.float32)
    >>> filters = np.random.rand(16, 3, 3, 3).astype(np.float32)
    >>> pc.conv2d(images, filters, padding=1).shape
    (8, 16, 64, 64)
    >>> sharpen = np.array([[0, -1, 0], [-1, 5, -1], [0, -1, 0]], np.float32)
    >>> pc.conv2d(images[0, 0], sharpen, padding=1).shape  # one image, one filter
    (64, 64)
    """
    if nan is not None or mask is not None or fill is not None:
        return convolve_known(conv2d, 2, locals())
    asked = "conv", 2, stride, padding, dilation, groups, precision, 0, activation
    more = algorithm, batch_invariant, padding_mode, padding_value, dtype, upsample, upsample_filter
    return convolve(asked, (input, weight, bias, scale, residual), out, (device, devices, stream, tune), False, more)


def conv1d(
    input: Array, weight: Array, bias: Array | None = None, stride: Sizes = 1, padding: Padding = 0, dilation: Sizes = 1,
    groups: SupportsIndex = 1, *, scale: Array | None = None, residual: Array | None = None, activation: Activation | None = None,
    out: Array | None = None, precision: Precision = "fp32", device: Any = None, devices: Any = None, stream: Any = None,
    tune: bool = False, algorithm: Algorithm | None = None, batch_invariant: bool = False,
    padding_mode: PaddingMode = "zeros", padding_value: float = 0.0, dtype: object = None, upsample: Sizes = 1,
    upsample_filter: UpsampleFilter | None = None, nan: Literal["interpolate"] | None = None,
    mask: Array | None = None, fill: float | None = None, state: State | None = None,
) -> Array:
    """Convolve with one spatial axis: see :func:`conv2d`.

    Parameters
    ----------
    input : array of shape (N, C, W), (C, W) or (W,)
    weight : array of shape (K, C/groups, S), or (S,) for an input of shape (W,)
    padding : int, (int,), ((left, right),), "same" or "valid"
    bias, stride, dilation, groups, scale, residual, activation, out, precision, device, devices, stream, tune, algorithm, batch_invariant,
    padding_mode, padding_value, dtype, upsample, upsample_filter, nan, mask, fill
        As for :func:`conv2d`.
    state : {"zeros", "replicate"} or array, optional
        What is in front of a piece of a signal: then the result is a pair, of what the piece completes and of the state for the next
        piece. See the page on sound and video in pieces.

    Returns
    -------
    array of shape (N, K, Q), (K, Q) or (Q,)

    Raises
    ------
    ConvArgumentError, TypeError, DeviceMemoryError
        As for :func:`conv2d`.
    """
    if nan is not None or mask is not None or fill is not None:
        return convolve_known(conv1d, 1, locals())
    asked = "conv", 1, stride, padding, dilation, groups, precision, 0, activation
    more = algorithm, batch_invariant, padding_mode, padding_value, dtype, upsample, upsample_filter
    if state is not None:
        return _streamed(asked, (input, weight, bias, scale, residual), out, (device, devices, stream, tune), more, state)
    return convolve(asked, (input, weight, bias, scale, residual), out, (device, devices, stream, tune), False, more)


def conv3d(
    input: Array, weight: Array, bias: Array | None = None, stride: Sizes = 1, padding: Padding = 0, dilation: Sizes = 1,
    groups: SupportsIndex = 1, *, scale: Array | None = None, residual: Array | None = None, activation: Activation | None = None,
    out: Array | None = None, precision: Precision = "fp32", device: Any = None, devices: Any = None, stream: Any = None,
    tune: bool = False, algorithm: Algorithm | None = None, batch_invariant: bool = False,
    padding_mode: PaddingMode = "zeros", padding_value: float = 0.0, dtype: object = None, upsample: Sizes = 1,
    upsample_filter: UpsampleFilter | None = None, nan: Literal["interpolate"] | None = None,
    mask: Array | None = None, fill: float | None = None, state: State | None = None,
) -> Array:
    """Convolve with three spatial axes: see :func:`conv2d`.

    Parameters
    ----------
    input : array of shape (N, C, D, H, W), (C, D, H, W) or (D, H, W)
    weight : array of shape (K, C/groups, T, R, S), or (T, R, S) for an input of shape (D, H, W)
    padding : int, three ints, ((front, back), (top, bottom), (left, right)), "same" or "valid"
    bias, stride, dilation, groups, scale, residual, activation, out, precision, device, devices, stream, tune, algorithm, batch_invariant,
    padding_mode, padding_value, dtype, upsample, upsample_filter, nan, mask, fill
        As for :func:`conv2d`.

    Returns
    -------
    array of shape (N, K, O, P, Q), (K, O, P, Q) or (O, P, Q)

    Raises
    ------
    ConvArgumentError, TypeError, DeviceMemoryError
        As for :func:`conv2d`.
    """
    if nan is not None or mask is not None or fill is not None:
        return convolve_known(conv3d, 3, locals())
    asked = "conv", 3, stride, padding, dilation, groups, precision, 0, activation
    more = algorithm, batch_invariant, padding_mode, padding_value, dtype, upsample, upsample_filter
    if state is not None:
        return _streamed(asked, (input, weight, bias, scale, residual), out, (device, devices, stream, tune), more, state)
    return convolve(asked, (input, weight, bias, scale, residual), out, (device, devices, stream, tune), False, more)


def conv_transpose2d(
    input: Array, weight: Array, bias: Array | None = None, stride: Sizes = 1, padding: Crop = 0, output_padding: Sizes = 0,
    groups: SupportsIndex = 1, dilation: Sizes = 1, *, scale: Array | None = None, residual: Array | None = None,
    activation: Activation | None = None, out: Array | None = None, precision: Precision = "fp32", device: Any = None, devices: Any = None,
    stream: Any = None, tune: bool = False, algorithm: Algorithm | None = None, batch_invariant: bool = False,
    padding_mode: PaddingMode = "zeros", padding_value: float = 0.0, dtype: object = None,
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
    stride, dilation, groups, residual, activation, out, precision, device, devices, stream, tune, algorithm, batch_invariant,
    padding_mode, padding_value, dtype
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
    asked = "conv_transpose", 2, stride, padding, dilation, groups, precision, output_padding, activation
    more = algorithm, batch_invariant, padding_mode, padding_value, dtype
    return convolve(asked, (input, weight, bias, scale, residual), out, (device, devices, stream, tune), False, more)


def conv_transpose1d(
    input: Array, weight: Array, bias: Array | None = None, stride: Sizes = 1, padding: Crop = 0, output_padding: Sizes = 0,
    groups: SupportsIndex = 1, dilation: Sizes = 1, *, scale: Array | None = None, residual: Array | None = None,
    activation: Activation | None = None, out: Array | None = None, precision: Precision = "fp32", device: Any = None, devices: Any = None,
    stream: Any = None, tune: bool = False, algorithm: Algorithm | None = None, batch_invariant: bool = False,
    padding_mode: PaddingMode = "zeros", padding_value: float = 0.0, dtype: object = None, state: State | None = None,
) -> Array:
    """The transposed convolution with one spatial axis: see :func:`conv_transpose2d`.

    Parameters
    ----------
    input : array of shape (N, K, Q) or (K, Q)
    weight : array of shape (K, C/groups, S)
    padding : int, (int,) or ((left, right),)
    bias, stride, output_padding, groups, dilation, scale, residual, activation, out, precision, device, devices, stream, tune, algorithm,
    batch_invariant, padding_mode, padding_value, dtype
        As for :func:`conv_transpose2d`.

    Returns
    -------
    array of shape (N, C, W) or (C, W)

    Raises
    ------
    ConvArgumentError, TypeError, DeviceMemoryError
        As for :func:`conv2d`.
    """
    asked = "conv_transpose", 1, stride, padding, dilation, groups, precision, output_padding, activation
    more = algorithm, batch_invariant, padding_mode, padding_value, dtype
    if state is not None:
        return _streamed(asked, (input, weight, bias, scale, residual), out, (device, devices, stream, tune), more, state)
    return convolve(asked, (input, weight, bias, scale, residual), out, (device, devices, stream, tune), False, more)


def conv_transpose3d(
    input: Array, weight: Array, bias: Array | None = None, stride: Sizes = 1, padding: Crop = 0, output_padding: Sizes = 0,
    groups: SupportsIndex = 1, dilation: Sizes = 1, *, scale: Array | None = None, residual: Array | None = None,
    activation: Activation | None = None, out: Array | None = None, precision: Precision = "fp32", device: Any = None, devices: Any = None,
    stream: Any = None, tune: bool = False, algorithm: Algorithm | None = None, batch_invariant: bool = False,
    padding_mode: PaddingMode = "zeros", padding_value: float = 0.0, dtype: object = None, state: State | None = None,
) -> Array:
    """The transposed convolution with three spatial axes: see :func:`conv_transpose2d`.

    Parameters
    ----------
    input : array of shape (N, K, O, P, Q) or (K, O, P, Q)
    weight : array of shape (K, C/groups, T, R, S)
    padding : int, three ints or ((front, back), (top, bottom), (left, right))
    bias, stride, output_padding, groups, dilation, scale, residual, activation, out, precision, device, devices, stream, tune, algorithm,
    batch_invariant, padding_mode, padding_value, dtype
        As for :func:`conv_transpose2d`.

    Returns
    -------
    array of shape (N, C, D, H, W) or (C, D, H, W)

    Raises
    ------
    ConvArgumentError, TypeError, DeviceMemoryError
        As for :func:`conv2d`.
    """
    asked = "conv_transpose", 3, stride, padding, dilation, groups, precision, output_padding, activation
    more = algorithm, batch_invariant, padding_mode, padding_value, dtype
    if state is not None:
        return _streamed(asked, (input, weight, bias, scale, residual), out, (device, devices, stream, tune), more, state)
    return convolve(asked, (input, weight, bias, scale, residual), out, (device, devices, stream, tune), False, more)


def conv2d_input(
    input_size: Sequence[SupportsIndex], weight: Array, grad_output: Array, stride: Sizes = 1, padding: Padding = 0, dilation: Sizes = 1,
    groups: SupportsIndex = 1, *, out: Array | None = None, precision: Precision = "fp32", device: Any = None, stream: Any = None,
    tune: bool = False, algorithm: Algorithm | None = None, batch_invariant: bool = False,
    padding_mode: PaddingMode = "zeros", padding_value: float = 0.0, dtype: object = None,
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
    out, precision, device, stream, tune, algorithm, batch_invariant, padding_mode, padding_value, dtype
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
    asked = "input", 2, stride, padding, dilation, groups, precision, input_size, None
    more = algorithm, batch_invariant, padding_mode, padding_value, dtype
    return convolve(asked, (grad_output, weight, None, None, None), out, (device, None, stream, tune), False, more)


def conv1d_input(
    input_size: Sequence[SupportsIndex], weight: Array, grad_output: Array, stride: Sizes = 1, padding: Padding = 0, dilation: Sizes = 1,
    groups: SupportsIndex = 1, *, out: Array | None = None, precision: Precision = "fp32", device: Any = None, stream: Any = None,
    tune: bool = False, algorithm: Algorithm | None = None, batch_invariant: bool = False,
    padding_mode: PaddingMode = "zeros", padding_value: float = 0.0, dtype: object = None,
) -> Array:
    """The gradient of :func:`conv1d` by its input: see :func:`conv2d_input`.

    Parameters
    ----------
    input_size : (N, C, W) or (C, W)
    weight : array of shape (K, C/groups, S)
    grad_output : array of shape (N, K, Q) or (K, Q)
    stride, padding, dilation, groups, out, precision, device, stream, tune, algorithm, batch_invariant, padding_mode, padding_value, dtype
        As for :func:`conv2d_input`.

    Returns
    -------
    array of shape (N, C, W) or (C, W)

    Raises
    ------
    ConvArgumentError, TypeError, DeviceMemoryError
        As for :func:`conv2d`.
    """
    asked = "input", 1, stride, padding, dilation, groups, precision, input_size, None
    more = algorithm, batch_invariant, padding_mode, padding_value, dtype
    return convolve(asked, (grad_output, weight, None, None, None), out, (device, None, stream, tune), False, more)


def conv3d_input(
    input_size: Sequence[SupportsIndex], weight: Array, grad_output: Array, stride: Sizes = 1, padding: Padding = 0, dilation: Sizes = 1,
    groups: SupportsIndex = 1, *, out: Array | None = None, precision: Precision = "fp32", device: Any = None, stream: Any = None,
    tune: bool = False, algorithm: Algorithm | None = None, batch_invariant: bool = False,
    padding_mode: PaddingMode = "zeros", padding_value: float = 0.0, dtype: object = None,
) -> Array:
    """The gradient of :func:`conv3d` by its input: see :func:`conv2d_input`.

    Parameters
    ----------
    input_size : (N, C, D, H, W) or (C, D, H, W)
    weight : array of shape (K, C/groups, T, R, S)
    grad_output : array of shape (N, K, O, P, Q) or (K, O, P, Q)
    stride, padding, dilation, groups, out, precision, device, stream, tune, algorithm, batch_invariant, padding_mode, padding_value, dtype
        As for :func:`conv2d_input`.

    Returns
    -------
    array of shape (N, C, D, H, W) or (C, D, H, W)

    Raises
    ------
    ConvArgumentError, TypeError, DeviceMemoryError
        As for :func:`conv2d`.
    """
    asked = "input", 3, stride, padding, dilation, groups, precision, input_size, None
    more = algorithm, batch_invariant, padding_mode, padding_value, dtype
    return convolve(asked, (grad_output, weight, None, None, None), out, (device, None, stream, tune), False, more)


def conv2d_weight(
    input: Array, weight_size: Sequence[SupportsIndex], grad_output: Array, stride: Sizes = 1, padding: Padding = 0, dilation: Sizes = 1,
    groups: SupportsIndex = 1, *, out: Array | None = None, precision: Precision = "fp32", device: Any = None, stream: Any = None,
    tune: bool = False, algorithm: Algorithm | None = None, padding_mode: PaddingMode = "zeros", padding_value: float = 0.0,
    dtype: object = None,
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
    out, precision, device, stream, tune, algorithm, padding_mode, padding_value, dtype
        As for :func:`conv2d`. `out` is C-contiguous, or lies as the result would. Both host arrays must fit the device's memory at the
        same time.

    Returns
    -------
    array of shape (K, C/groups, R, S)
        The gradient, of the kind and dtype of `input`. It is C-contiguous, or channels last where `input` is a tensor that is and the
        kernels can write it so. It has the same bits on every run, because the parts of a sum are added in order.

    Raises
    ------
    ConvArgumentError, TypeError, DeviceMemoryError
        As for :func:`conv2d`.
    """
    asked = "weight", 2, stride, padding, dilation, groups, precision, weight_size, None
    more = algorithm, None, padding_mode, padding_value, dtype
    return convolve(asked, (input, grad_output, None, None, None), out, (device, None, stream, tune), False, more)


def conv1d_weight(
    input: Array, weight_size: Sequence[SupportsIndex], grad_output: Array, stride: Sizes = 1, padding: Padding = 0, dilation: Sizes = 1,
    groups: SupportsIndex = 1, *, out: Array | None = None, precision: Precision = "fp32", device: Any = None, stream: Any = None,
    tune: bool = False, algorithm: Algorithm | None = None, padding_mode: PaddingMode = "zeros", padding_value: float = 0.0,
    dtype: object = None,
) -> Array:
    """The gradient of :func:`conv1d` by its filter: see :func:`conv2d_weight`.

    Parameters
    ----------
    input : array of shape (N, C, W) or (C, W)
    weight_size : (K, C/groups, S)
    grad_output : array of shape (N, K, Q) or (K, Q)
    stride, padding, dilation, groups, out, precision, device, stream, tune, algorithm, padding_mode, padding_value, dtype
        As for :func:`conv2d_weight`.

    Returns
    -------
    array of shape (K, C/groups, S)

    Raises
    ------
    ConvArgumentError, TypeError, DeviceMemoryError
        As for :func:`conv2d`.
    """
    asked = "weight", 1, stride, padding, dilation, groups, precision, weight_size, None
    more = algorithm, None, padding_mode, padding_value, dtype
    return convolve(asked, (input, grad_output, None, None, None), out, (device, None, stream, tune), False, more)


def conv3d_weight(
    input: Array, weight_size: Sequence[SupportsIndex], grad_output: Array, stride: Sizes = 1, padding: Padding = 0, dilation: Sizes = 1,
    groups: SupportsIndex = 1, *, out: Array | None = None, precision: Precision = "fp32", device: Any = None, stream: Any = None,
    tune: bool = False, algorithm: Algorithm | None = None, padding_mode: PaddingMode = "zeros", padding_value: float = 0.0,
    dtype: object = None,
) -> Array:
    """The gradient of :func:`conv3d` by its filter: see :func:`conv2d_weight`.

    Parameters
    ----------
    input : array of shape (N, C, D, H, W) or (C, D, H, W)
    weight_size : (K, C/groups, T, R, S)
    grad_output : array of shape (N, K, O, P, Q) or (K, O, P, Q)
    stride, padding, dilation, groups, out, precision, device, stream, tune, algorithm, padding_mode, padding_value, dtype
        As for :func:`conv2d_weight`.

    Returns
    -------
    array of shape (K, C/groups, T, R, S)

    Raises
    ------
    ConvArgumentError, TypeError, DeviceMemoryError
        As for :func:`conv2d`.
    """
    asked = "weight", 3, stride, padding, dilation, groups, precision, weight_size, None
    more = algorithm, None, padding_mode, padding_value, dtype
    return convolve(asked, (input, grad_output, None, None, None), out, (device, None, stream, tune), False, more)
