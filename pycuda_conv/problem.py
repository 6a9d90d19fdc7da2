"""One convolution as a value, and every check of how its arguments fit together.

A :class:`ConvProblem` holds the field's letters (N C H W K R S P Q and so on) for one convolution. It is frozen and
hashable: the key under which plans are cached. It is the only place where output sizes are computed and the only one
where arguments are refused; it knows nothing of devices or of the kinds of arrays.

Every rank is treated as three-dimensional: a 2-d convolution has D = T = O = 1, a 1-d one H = R = P = 1 as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, SupportsIndex

from pycuda_conv import borders
from pycuda_conv.arguments import (
    activation_and_slope,
    check_channels,
    check_groups,
    check_pairs,
    check_precision,
    check_ranks,
    checked_activation,
    checked_algorithm,
    checked_rank,
    checked_shape,
    checked_upsample,
    checked_upsample_filter,
    integer,
    integers,
    padding_in_numbers,
    padding_pairs,
    product_text,
    shape_text,
    without_channels,
)
from pycuda_conv.borders import Border
from pycuda_conv.elements import DTYPE_BYTES, INTEGER_BYTES, as_dtype
from pycuda_conv.errors import ConvArgumentError, brief, did_you_mean
from pycuda_conv.typing import Activation, Algorithm, Crop, Padding, PaddingMode, Precision, Sizes, UpsampleFilter

#: Three extents, in the order depth, height, width.
Size3 = tuple[int, int, int]

#: DTYPE in ``cu/core/portable.cuh``.
DTYPE_CODES = {"float16": 16, "bfloat16": 17, "float32": 32, "float64": 64}
LAYOUTS = ("NCHW", "NHWC")  # the layouts of callers' arrays; kernels also see those of :attr:`ConvProblem.launched`


@lru_cache
def channels_last(axes: int, ndim: int) -> tuple[int, ...] | None:
    """The axes of an array of `axes` axes, `ndim` of them spatial, with its channels last; None if it has no axis for channels."""
    channels = axes - ndim - 1
    return (*range(channels), *range(channels + 1, axes), channels) if channels in (0, 1) else None


def _pad3(values: Sequence[int], fill: int) -> Size3:
    d, h, w = (fill,) * (3 - len(values)) + tuple(values)
    return d, h, w


#: What is not upsampled, and has no stride.
_ONCE: Size3 = (1, 1, 1)


def _times(one: Size3, other: Size3) -> Size3:
    d, h, w = (a * b for a, b in zip(one, other, strict=True))
    return d, h, w


def _over(one: Size3, other: Size3) -> Size3:
    """Quotients, rounded up."""
    d, h, w = (-(-a // b) for a, b in zip(one, other, strict=True))
    return d, h, w


def _plus(one: Size3, other: Size3, sign: int = 1) -> Size3:
    d, h, w = (a + sign * b for a, b in zip(one, other, strict=True))
    return d, h, w


@dataclass(frozen=True)
class ConvProblem:
    """A convolution, a transposed convolution, or a gradient of a convolution, of arrays of known shapes.

    :meth:`forward`, :meth:`transposed` and :meth:`gradient` make one. They take torch's arguments and check them.

    Attributes
    ----------
    direction : {"fprop", "dgrad", "wgrad"}
        ``"fprop"`` reads (N, C, D, H, W) and gives (N, K, O, P, Q); ``"dgrad"``, the gradient of the input and the transposed
        convolution, reads (N, K, O, P, Q) and gives (N, C, D, H, W). Filters are (K, C/groups, T, R, S) in both. ``"wgrad"``,
        the gradient of the filter, reads (N, C, D, H, W) and, as its second array, (N, K, O, P, Q).
    ndim : int
        1, 2 or 3: how many of the spatial axes the arrays have.
    batched : bool
        False for arrays without the axis N.
    dtype : str
        ``"float16"``, ``"bfloat16"``, ``"float32"`` or ``"float64"``. Sums of float16 and bfloat16 are kept in float32
        and rounded once, when they are stored.
    N, C, K, groups : int
        Images, channels of the convolution's input, channels of its output, groups.
    input_size, filter_size, output_size : (int, int, int)
        (D, H, W), (T, R, S) and (O, P, Q).
    stride, dilation, padding_before, padding_after : (int, int, int)
    has_bias : bool
    precision : {"fp32", "tf32"}
        The arithmetic asked for float32 arrays.
    layout : {"NCHW", "NHWC", "CNHW", "CHWN"}
        How the arrays of images lie in memory: ``"NHWC"`` is channels last. Shapes are the same. A filter and its gradient lie in
        C order, unless a plan can take another. ``"CNHW"`` and ``"CHWN"`` are for :attr:`launched` alone.
    has_scale, has_residual : bool
    float_scale : bool
        True where scale and bias, which there must be, are float32 although the arrays are float16 or bfloat16.
    activation : str, ("leaky_relu", float) or None
        What is done with the sums: see :func:`pycuda_conv.conv2d`. The residual lies in memory as the result does.
    bare : bool
        True for one image of one channel and one filter, whose arrays have spatial axes alone.
    algorithm : {"direct", "fft", "batch_invariant"} or None
        Whether sums of products, Fourier transforms, or sums in an order that follows from the layer alone are asked for: see
        :func:`pycuda_conv.conv2d`. A gradient by the filter, which sums over the images, takes ``"batch_invariant"`` as ``"direct"``.
    border : ((str, str), (str, str), (str, str)) or None
        Along each axis the words for the padding before and behind it: see :mod:`pycuda_conv.borders`. None where all are zeros.
    border_value : float
        What ``"constant"`` sides are filled with.
    input_dtype, result_dtype : str
        The types of the array that is read first, and of the result, where they are integers; ``""`` for `dtype`. The sums are those of
        `dtype`; a result of integers is rounded to the nearest, ties to even, and clipped.
    upsample : (int, int, int)
        Of a convolution: how many times each pixel stands along each axis of the image that is convolved. :attr:`input_size` is that of
        this enlarged image, :attr:`operand_size` that of the array.
    folded : bool
        Whether the taps that meet the same pixel of the array are summed before the convolution: see :attr:`transposed_form`.
    of_bytes : bool
        Whether the numbers of the image are integers of 8 bits, in :attr:`padded` where they have been converted: float16 holds them.
    """

    direction: Literal["fprop", "dgrad", "wgrad"]
    ndim: int
    batched: bool
    dtype: str
    N: int
    C: int
    K: int
    groups: int
    input_size: Size3
    filter_size: Size3
    output_size: Size3
    stride: Size3
    dilation: Size3
    padding_before: Size3
    padding_after: Size3
    has_bias: bool
    precision: str = "fp32"
    layout: Literal["NCHW", "NHWC", "CNHW", "CHWN"] = "NCHW"
    has_scale: bool = False
    has_residual: bool = False
    activation: str | tuple[str, float] | None = None
    bare: bool = False
    float_scale: bool = False
    algorithm: str | None = None
    border: Border | None = None
    border_value: float = 0.0
    input_dtype: str = ""
    result_dtype: str = ""
    upsample: Size3 = (1, 1, 1)
    folded: bool = False
    of_bytes: bool = False

    def __hash__(self) -> int:
        """Computed once: the planner looks problems up hundreds of times."""
        found: int | None = self.__dict__.get("_hash")
        if found is None:
            found = hash(tuple(self.__dict__.values()))
            object.__setattr__(self, "_hash", found)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}  # another process has other hashes of strings

    # ---- making one

    @classmethod
    def forward(
        cls, ndim: int, input_shape: Sequence[int], weight_shape: Sequence[int], bias_shape: Sequence[int] | None = None, *,
        stride: Sizes = 1, padding: Padding = 0, dilation: Sizes = 1, groups: SupportsIndex = 1, dtype: str = "float32",
        precision: Precision = "fp32", layout: Literal["NCHW", "NHWC"] = "NCHW", scale_shape: Sequence[int] | None = None,
        residual_shape: Sequence[int] | None = None, activation: Activation | None = None, in_chunks: bool = False,
        algorithm: Algorithm | None = None, padding_mode: PaddingMode = "zeros", padding_value: float = 0.0, input_dtype: str = "",
        result_dtype: str = "", upsample: Sizes = 1, upsample_filter: UpsampleFilter | None = None,
    ) -> ConvProblem:
        """A convolution of rank `ndim` (1, 2 or 3) in the terms of ``torch.nn.functional.conv1d/2d/3d``.

        Parameters
        ----------
        input_shape : (N, C, ...) or (C, ...)
            Or the spatial axes alone, where `weight_shape` has no others either: one image of one channel.
        weight_shape : (K, C/groups, ...)
        bias_shape : (K,) or None
        stride, padding, dilation, groups, activation, algorithm, padding_mode, padding_value, upsample, upsample_filter
            As for :func:`pycuda_conv.conv2d`.
        layout : {"NCHW", "NHWC"}
            How input and result lie in memory; the shapes are the same.
        scale_shape : (K,) or None
        residual_shape : the result's, or None
        in_chunks : bool
            Whether chunks of the problem will be computed, not the whole: then a channel may have more than 2^31 - 1 elements.
        input_dtype, result_dtype : str
            See the attributes.

        Raises
        ------
        ConvArgumentError
            Sizes or values that do not fit together.
        TypeError
            Values that are not integers, or a dtype that is not supported.
        """
        ndim = checked_rank(ndim)
        name = f"conv{ndim}d"
        input_shape, weight_shape = checked_shape("input_shape", input_shape), checked_shape("weight_shape", weight_shape)
        common = _common(name, ndim, input_shape, weight_shape, stride, dilation, groups, dtype, precision, layout, algorithm, bare=True)
        pairs = padding_pairs(padding, ndim)
        k, channels_per_group = (1, 1) if common.bare else weight_shape[:2]
        filter_size = weight_shape[-ndim:]
        groups = common.groups
        if common.bare and groups != 1:
            raise ConvArgumentError(f"an image and a filter without channels are one group, but got groups={groups}")
        if not common.bare:
            check_groups(groups, weight_shape)
        check_pairs(pairs)
        channels = 1 if common.bare else input_shape[-ndim - 1]
        if channels != channels_per_group * groups:
            raise ConvArgumentError(
                f"Given groups={groups}, weight of size {shape_text(weight_shape)}, expected input{shape_text(input_shape)} to have "
                f"{channels_per_group * groups} channels, but got {channels} channels instead"
            )
        check_channels("bias", bias_shape, k, weight_shape)
        pairs = padding_in_numbers(pairs, common.stride[-ndim:], common.dilation[-ndim:], filter_size)
        before, after = _pad3([p[0] for p in pairs], 0), _pad3([p[1] for p in pairs], 0)
        factors, filter_word = _pad3(checked_upsample(upsample, ndim), 1), checked_upsample_filter(upsample_filter)
        size = common.input_size if factors == _ONCE else _times(common.input_size, factors)
        common = replace(common, padding_before=before, padding_after=after, upsample=factors, input_size=size)
        output_size = common.output_size_of(size)
        if min(output_size) < 1:
            padded = [n + b + a for n, b, a in zip(common.input_size, before, after, strict=True)]
            reach = [d * (f - 1) + 1 for d, f in zip(common.dilation, common.filter_size, strict=True)]
            raise ConvArgumentError(
                f"Calculated padded input size per channel: {product_text(padded[-ndim:])}. Kernel size: {product_text(reach[-ndim:])}. "
                "Kernel size can't be greater than actual input size"
            )
        made = replace(common, C=channels, K=k, output_size=output_size, has_bias=bias_shape is not None)
        made = made._with_types(input_dtype, result_dtype)._checked_sizes(in_chunks)
        made = made._with_epilogue(scale_shape, residual_shape, activation, weight_shape)
        if padding_mode != "zeros" or padding_value != 0:
            made = made._with_border(padding_mode, padding_value, in_chunks)
        return made if factors == _ONCE else made._with_filter(filter_word)

    def _with_filter(self, word: str | None) -> ConvProblem:
        """The problem of an upsampled image with the taps summed, or not: as asked, by default where sums are of float32."""
        reason = self.why_not_folded
        if word == "folded" and reason is not None:
            raise ConvArgumentError(f"upsample_filter='folded' is not for this convolution: {reason}")
        if word is None:  # sums of 16 bits would be rounded once more
            wanted = reason is None and self.itemsize > 2 and self.algorithm != "fft" and not any(map(any, self.empty_taps))
        else:
            wanted = word == "folded"
        return replace(self, folded=wanted)

    @property
    def why_not_folded(self) -> str | None:
        """Why taps that meet the same pixel of an upsampled image can't be summed, or None if they can."""
        n = self.ndim
        if self.stride != _ONCE:
            return f"it takes a stride of 1, but got stride={shape_text(self.stride[-n:])}"
        if any(u > 1 and d > 1 and taps > 1 for u, d, taps in zip(self.upsample, self.dilation, self.filter_size, strict=True)):
            return f"it takes a dilation of 1 along an axis that is upsampled, but got dilation={shape_text(self.dilation[-n:])}"
        if any(u > 1 and "reflect" in words for u, words in zip(self.upsample, self.border or borders.NONE, strict=True)):
            return "a border that is reflected about the edge's pixel shows that pixel once, not as often as it is repeated"
        return None

    @property
    def framed(self) -> ConvProblem:
        """A convolution that reads the array with as much of its border as reaches over the edge of the enlarged image."""
        first, last = self.border_sizes
        before, after = (_over(sides, self.upsample) for sides in (first, last))
        return replace(
            self, upsample=_ONCE, folded=False, input_size=self.operand_size, filter_size=_ONCE, stride=_ONCE, dilation=_ONCE,
            padding_before=before, padding_after=after, output_size=_plus(_plus(self.operand_size, before), after),
        )

    @property
    def transposed_form(self) -> ConvProblem:
        """The transposed convolution of the array, with its border as :attr:`framed` makes it, that a :attr:`folded` convolution is.

        Pixel i of the result meets a pixel h of the array by all taps r with ``(i - padding + r) // upsample == h``. They are neighbours,
        and which they are depends on ``i - h * upsample`` alone. So their sum is a tap of a transposed convolution whose stride is
        `upsample`. Along an axis it has `upsample` - 1 taps more; and as many before and behind as the padding is wider than the filter
        reaches, whose sums are of nothing.
        """
        frame = self.framed
        taps: list[int] = []
        before, after, dilation = list(taps), list(taps), list(taps)
        empty = self.empty_taps
        for axis, (u, r, d) in enumerate(zip(self.upsample, self.filter_size, self.dilation, strict=True)):
            d = d if u == 1 else 1
            first, last = empty[axis]
            found = first + r + u - 1 + last
            cut = d * (r - 1 + first) - (self.padding_before[axis] - u * frame.padding_before[axis])
            full = (frame.output_size[axis] - 1) * u + d * (found - 1) + 1
            for values, own in ((taps, found), (dilation, d), (before, cut), (after, full - cut - self.output_size[axis])):
                values.append(own)
        bordered = self.border is not None
        return replace(
            self, direction="dgrad", C=self.K, K=self.C, input_size=self.output_size, output_size=frame.output_size,
            filter_size=_pad3(taps, 1), stride=self.upsample, dilation=_pad3(dilation, 1), padding_before=_pad3(before, 0),
            padding_after=_pad3(after, 0), upsample=_ONCE, folded=False, border=None, border_value=0.0,
            input_dtype="" if bordered else self.input_dtype,
        )

    @property
    def empty_taps(self) -> tuple[tuple[int, int], ...]:
        """Along each axis, the taps of :attr:`transposed_form` before and behind the others whose sums are of nothing."""
        frame, found = self.framed, []
        for axis, (u, r, d) in enumerate(zip(self.upsample, self.filter_size, self.dilation, strict=True)):
            d = d if u == 1 else 1
            around = self.padding_before[axis] - u * frame.padding_before[axis], self.padding_after[axis] - u * frame.padding_after[axis]
            found.append((max(0, -(-around[0] // d) - (r - 1)), max(0, -(-around[1] // d) - (r - 1))))
        return tuple(found)

    def _with_border(self, padding_mode: Any, padding_value: Any, in_chunks: bool) -> ConvProblem:
        """The problem with other padding than zeros."""
        pairs = borders.mode_pairs(padding_mode, self.ndim)
        value = as_dtype(borders.fill_value(padding_value, pairs), self.dtype)
        d, h, w = (("zeros", "zeros"),) * (3 - self.ndim) + pairs
        made = replace(self, border=(d, h, w), border_value=value).with_settled_border()
        if made.border is not None:
            made.padded._checked_sizes(in_chunks)
        return made

    def with_settled_border(self) -> ConvProblem:
        """The same problem with its :attr:`border` in the simplest form: one of zeros where there is no padding."""
        if self.border is None:
            return self
        around = self.padding_before, self.padding_after
        border, value = borders.settled(self.border, self.border_value, self.input_size, *around, self.direction == "dgrad")
        return replace(self, border=border, border_value=value)

    def _with_types(self, input_dtype: str, result_dtype: str) -> ConvProblem:
        """The problem for an array of another type than its arithmetic's, or with such a result."""
        for name, dtype in (("input_dtype", input_dtype), ("result_dtype", result_dtype)):
            known = ("", self.dtype, *INTEGER_BYTES)
            if dtype not in known:
                raise TypeError(f"{name} must be one of {known}, but got {name}={brief(dtype)}")
        names = ("" if dtype == self.dtype else dtype for dtype in (input_dtype, result_dtype))
        own, written = names
        return self if not own and not written else replace(self, input_dtype=own, result_dtype=written)

    def output_size_of(self, input_size: Size3) -> Size3:
        """The size of the forward convolution's output for such an input; below 1 along an axis where the filter does not fit."""
        o, p, q = (
            (n + before + after - dilation * (taps - 1) - 1) // stride + 1
            for n, before, after, dilation, taps, stride in zip(
                input_size, self.padding_before, self.padding_after, self.dilation, self.filter_size, self.stride, strict=True
            )
        )
        return o, p, q

    @classmethod
    def transposed(
        cls, ndim: int, input_shape: Sequence[int], weight_shape: Sequence[int], bias_shape: Sequence[int] | None = None, *,
        stride: Sizes = 1, padding: Crop = 0, output_padding: Sizes = 0, groups: SupportsIndex = 1, dilation: Sizes = 1,
        dtype: str = "float32", precision: Precision = "fp32", layout: Literal["NCHW", "NHWC"] = "NCHW",
        scale_shape: Sequence[int] | None = None, residual_shape: Sequence[int] | None = None, activation: Activation | None = None,
        in_chunks: bool = False, algorithm: Algorithm | None = None, padding_mode: str = "zeros", padding_value: float = 0.0,
        input_dtype: str = "", result_dtype: str = "",
    ) -> ConvProblem:
        """A transposed convolution of rank `ndim` in the terms of ``torch.nn.functional.conv_transpose1d/2d/3d``.

        Parameters
        ----------
        input_shape : (N, K, ...) or (K, ...)
            The letters are those of the convolution whose gradient this is.
        weight_shape : (K, C/groups, ...)
        bias_shape : (C,) or None
        stride, padding, output_padding, groups, dilation, activation, algorithm
            As for :func:`pycuda_conv.conv_transpose2d`.
        layout, in_chunks, input_dtype, result_dtype
            As for :meth:`forward`.
        padding_mode : "zeros"
            There is no other for a transposed convolution.
        scale_shape : (C,) or None
        residual_shape : the result's, or None

        Raises
        ------
        ConvArgumentError, TypeError
            As for :meth:`forward`.
        """
        ndim = checked_rank(ndim)
        name = f"conv_transpose{ndim}d"
        input_shape, weight_shape = checked_shape("input_shape", input_shape), checked_shape("weight_shape", weight_shape)
        common = _common(name, ndim, input_shape, weight_shape, stride, dilation, groups, dtype, precision, layout, algorithm)
        if padding_mode != "zeros" or padding_value != 0:
            borders.mode_pairs(padding_mode, ndim)
            raise ConvArgumentError(
                f"{name} takes padding_mode='zeros' alone, since its padding is what is taken off the result, but got "
                f"padding_mode={brief(padding_mode)}" + (f" and padding_value={brief(padding_value)}" if padding_value != 0 else "")
            )
        if isinstance(padding, str):
            raise TypeError(f"{name}(): padding must be integers or pairs of integers, not the string '{padding}'")
        pairs = padding_pairs(padding, ndim)
        assert not isinstance(pairs, str)
        extra = _pad3(integers("output_padding", output_padding, ndim), 0)
        check_pairs(pairs)
        if any(v < 0 for v in extra):
            raise ConvArgumentError(f"negative output_padding is not supported, but got {shape_text(extra[-ndim:])}")
        k, channels_per_group, *_ = weight_shape
        groups = common.groups
        check_groups(groups, weight_shape)
        if input_shape[-ndim - 1] != k:
            raise ConvArgumentError(
                f"Given transposed=1, weight of size {shape_text(weight_shape)}, expected input{shape_text(input_shape)} to have {k} "
                f"channels, but got {input_shape[-ndim - 1]} channels instead"
            )
        channels = channels_per_group * groups
        check_channels("bias", bias_shape, channels, weight_shape)
        before, after = _pad3([p[0] for p in pairs], 0), _pad3([p[1] for p in pairs], 0)
        for e, s, d in zip(extra, common.stride, common.dilation, strict=True):
            if e >= s and e >= d:
                raise ConvArgumentError(
                    f"output padding must be smaller than either stride or dilation, but got output_padding={shape_text(extra[-ndim:])}, "
                    f"stride={shape_text(common.stride[-ndim:])}, dilation={shape_text(common.dilation[-ndim:])}"
                )
        size = [
            (n - 1) * s - b - a + d * (f - 1) + e + 1
            for n, s, b, a, d, f, e in zip(
                common.input_size, common.stride, before, after, common.dilation, common.filter_size, extra, strict=True
            )
        ]
        if any(n < 1 for n in size):
            raise ConvArgumentError(
                f"Given input size per channel: {product_text(common.input_size[-ndim:])}. Calculated output size per channel: "
                f"{product_text(size[-ndim:])}. Output size is too small"
            )
        d, h, w = size
        made = replace(
            common, direction="dgrad", C=channels, K=k, input_size=(d, h, w), output_size=common.input_size, padding_before=before,
            padding_after=after, has_bias=bias_shape is not None,
        )._with_types(input_dtype, result_dtype)._checked_sizes(in_chunks)
        return made._with_epilogue(scale_shape, residual_shape, activation, weight_shape)

    @classmethod
    def gradient(
        cls, of: str, ndim: int, input_shape: Sequence[int], weight_shape: Sequence[int], grad_output_shape: Sequence[int], *,
        stride: Sizes = 1, padding: Padding = 0, dilation: Sizes = 1, groups: SupportsIndex = 1, dtype: str = "float32",
        precision: Precision = "fp32", layout: Literal["NCHW", "NHWC"] = "NCHW", residual_shape: Sequence[int] | None = None,
        in_chunks: bool = False, algorithm: Algorithm | None = None, padding_mode: PaddingMode = "zeros", padding_value: float = 0.0,
        input_dtype: str = "", result_dtype: str = "",
    ) -> ConvProblem:
        """The gradient of a convolution of rank `ndim` by its input or its filter, given that by its result.

        Parameters
        ----------
        of : {"input", "weight"}
        input_shape, weight_shape, stride, padding, dilation, groups, layout, in_chunks, algorithm, padding_mode, padding_value
            Of the convolution, as for :meth:`forward`.
        input_dtype, result_dtype : str
            See the attributes.
        grad_output_shape : (N, K, ...) or (K, ...)
        residual_shape : sequence of int, optional
            The shape of the input: another array is added to the gradient by it.

        Raises
        ------
        ConvArgumentError, TypeError
            As for :meth:`forward`.
        """
        if of not in ("input", "weight"):
            hint = did_you_mean(of, ("input", "weight"))
            raise ConvArgumentError(f"a gradient is of the 'input' or of the 'weight', but got of={brief(of)}{hint}")
        weight_shape = checked_shape("weight_shape", weight_shape)
        if len(weight_shape) == checked_rank(ndim):
            raise ConvArgumentError(without_channels(f"conv{ndim}d_{of}", ndim, weight_shape))
        forward = cls.forward(
            ndim, input_shape, weight_shape, stride=stride, padding=padding, dilation=dilation, groups=groups, dtype=dtype,
            precision=precision, layout=layout, in_chunks=in_chunks, algorithm=algorithm, padding_mode=padding_mode,
            padding_value=padding_value, input_dtype=input_dtype, result_dtype=result_dtype,
        )
        if checked_shape("grad_output_shape", grad_output_shape) != forward.result_shape:
            raise ConvArgumentError(
                f"grad_output must have the shape of the convolution's result, {shape_text(forward.result_shape)} for input of size "
                f"{shape_text(input_shape)} and weight of size {shape_text(weight_shape)}, but got {shape_text(grad_output_shape)}"
            )
        if of == "input":
            made = replace(forward, direction="dgrad").with_settled_border()
            return made._with_epilogue(None, residual_shape, None, tuple(weight_shape))
        return replace(forward, direction="wgrad", algorithm="direct" if forward.batch_invariant else forward.algorithm)

    def _checked_sizes(self, in_chunks: bool = False) -> ConvProblem:
        wide = [("upsampled input", self.input_size)] if self.upsampled else []
        for what, size in (("input", self.operand_size), ("output", self.result_size), *wide):
            if math.prod(size) >= 2**31 and not in_chunks:
                shown = product_text(size[-self.ndim :])
                raise ConvArgumentError(f"one channel of the {what} has {shown} elements; at most 2^31 - 1 are supported")
        # kernels compute coordinates inside a plane in 32 bits, before they look whether these lie in the image
        reach = tuple(d * (f - 1) for d, f in zip(self.dilation, self.filter_size, strict=True))
        named = {"stride": self.stride, "dilation": self.dilation, "padding": self.padding_before + self.padding_after}
        for what, values in {**named, "dilation * (kernel size - 1)": reach}.items():
            if max(values) >= 2**29:
                own = [v for i, v in enumerate(values) if i % 3 >= 3 - self.ndim]  # of the axes that the caller knows
                raise ConvArgumentError(f"{what} must be below 2^29, but got {shape_text(own)}")
        for what, shape in (("input", self.input_shape), ("weight", self.weight_shape), ("the result", self.result_shape)):
            # numpy and torch have no such shapes even where another size is 0
            if math.prod([size or 1 for size in shape]) * self.itemsize >= 2**63:
                raise ConvArgumentError(
                    f"expected {what} to have fewer than 2^63 bytes, but got {what} of size {shape_text(shape)} in {self.dtype}"
                )
        return self

    def _with_epilogue(
        self, scale_shape: Sequence[int] | None, residual_shape: Sequence[int] | None, activation: Any, weight_shape: tuple[int, ...]
    ) -> ConvProblem:
        if activation is None and scale_shape is None and residual_shape is None:
            return self
        activation = checked_activation(activation)
        check_channels("scale", scale_shape, self.result_channels, weight_shape)
        if residual_shape is not None and checked_shape("residual_shape", residual_shape) != self.result_shape:
            raise ConvArgumentError(
                f"residual must have the result's shape {shape_text(self.result_shape)}, but got residual of size "
                f"{shape_text(residual_shape)}"
            )
        return replace(self, has_scale=scale_shape is not None, has_residual=residual_shape is not None, activation=activation)

    # ---- what follows from it

    @property
    def activation_and_slope(self) -> tuple[int, float]:
        """The activation as kernels take it: see :func:`activation_and_slope`."""
        return activation_and_slope(self.activation)

    @property
    def plain(self) -> ConvProblem:
        """The problem without scale, residual and activation, which change neither the choice of a kernel nor its time by much.

        Its arrays have all their axes: without those of length 1 they lie in memory just so.
        """
        return replace(self, has_scale=False, has_residual=False, activation=None, float_scale=False, bare=False)

    @property
    def operand_size(self) -> Size3:
        """Spatial size of the array that is read first: (D, H, W), for dgrad (O, P, Q)."""
        if self.upsample != _ONCE:
            d, h, w = (n // u for n, u in zip(self.input_size, self.upsample, strict=True))
            return d, h, w
        return self.output_size if self.direction == "dgrad" else self.input_size

    @property
    def result_size(self) -> Size3:
        """Spatial size of the array that is written."""
        return {"fprop": self.output_size, "dgrad": self.input_size, "wgrad": self.filter_size}[self.direction]

    @property
    def operand_channels(self) -> int:
        """Channels of the array that is read first."""
        return self.K if self.direction == "dgrad" else self.C

    @property
    def result_channels(self) -> int:
        """Channels of the array that is written; the filter's K."""
        return self.C if self.direction == "dgrad" else self.K

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of the array that is read first, as the caller gives it."""
        return self._shape(self.operand_channels, self.operand_size)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the array that is read second: (K, C/groups, ...), for wgrad the gradient of the result."""
        return self._shape(self.K, self.output_size) if self.direction == "wgrad" else self._filter_shape

    @property
    def _filter_shape(self) -> tuple[int, ...]:
        return self.filter_size[-self.ndim :] if self.bare else (self.K, self.C // self.groups, *self.filter_size[-self.ndim :])

    @property
    def bias_shape(self) -> tuple[int] | None:
        """(channels of the result,), or None without a bias."""
        return (self.result_channels,) if self.has_bias else None

    @property
    def scale_shape(self) -> tuple[int] | None:
        """(channels of the result,), or None without a scale."""
        return (self.result_channels,) if self.has_scale else None

    @property
    def residual_shape(self) -> tuple[int, ...] | None:
        """The shape of the residual, which is the result's, or None without a residual."""
        return self.result_shape if self.has_residual else None

    @property
    def operand_shapes(self) -> tuple[tuple[int, ...] | None, ...]:
        """Shapes of input, weight, bias, scale and residual; None for each that is missing."""
        return self.input_shape, self.weight_shape, self.bias_shape, self.scale_shape, self.residual_shape

    @property
    def operand_dtypes(self) -> tuple[str, ...]:
        """Their element types."""
        of_channel = "float32" if self.float_scale else self.dtype
        return self.input_dtype or self.dtype, self.dtype, of_channel, of_channel, self.dtype

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Shape of the array that is written, as the caller gets it."""
        return self._filter_shape if self.direction == "wgrad" else self._shape(self.result_channels, self.result_size)

    @property
    def batch_invariant(self) -> bool:
        """Whether an image's result has to have the same bits whatever other images the batch has."""
        return self.algorithm == "batch_invariant"

    @property
    def adapted(self) -> bool:
        """Whether the array that is read or written differs from what :attr:`padded` does: by its size, by a border, or by its type."""
        return self.border is not None or bool(self.input_dtype) or bool(self.result_dtype) or self.upsampled

    @property
    def upsampled(self) -> bool:
        """Whether the image that is convolved is larger than the array."""
        return self.upsample != _ONCE

    @property
    def padded(self) -> ConvProblem:
        """The problem on the image with its border, which is then a part of it, and in the arithmetic's type. Sides of zeros stay padding.

        The gradient by the input is that of the wider image, which has still to be folded.
        """
        size, before, after = self.input_size, self.padding_before, self.padding_after
        if self.border is not None:
            first, last = self.border_sizes
            size = _plus(_plus(size, first), last)
            before, after = _plus(before, first, -1), _plus(after, last, -1)
        folded = self.border is not None and self.direction == "dgrad"
        return replace(
            self, input_size=size, padding_before=before, padding_after=after, border=None, border_value=0.0, input_dtype="",
            result_dtype="", has_residual=self.has_residual and not folded, upsample=_ONCE, folded=False,
            of_bytes=self.direction == "fprop" and self.input_dtype in ("bool", "uint8", "int8"),
        )

    @property
    def border_sizes(self) -> tuple[Size3, Size3]:
        """The pixels before and behind each axis that are a part of :attr:`padded`: those that are not zeros, or all beside a constant."""
        border = self.border or borders.NONE
        zeros = any(mode == "constant" for pair in border for mode in pair)  # corners tell one from the other
        before = [n if zeros or mode != "zeros" else 0 for (mode, _), n in zip(border, self.padding_before, strict=True)]
        after = [n if zeros or mode != "zeros" else 0 for (_, mode), n in zip(border, self.padding_after, strict=True)]
        return _pad3(before, 0), _pad3(after, 0)

    @property
    def launched(self) -> ConvProblem:
        """The problem that the kernels compute: this one, or one on the same memory. For some volumes it is a convolution of images.

        For wgrad it is a forward convolution:

        ``dw[k,c,r,s] = sum over n,p,q of dy[n,k,p,q] * x[n, c, p*stride - padding + r*dilation, q*stride - padding + s*dilation]``
        is a convolution of C images, which have N channels, with the K filters dy. Their taps (p,q) lie `stride` apart, and the result's
        pixels (r,s) lie `dilation` apart. In all three arrays the channels of that convolution come before its images in memory,
        outermost, hence the layout ``"CNHW"``. If x and dy are channels last, its images are last in memory: ``"CHWN"``.
        """
        own = replace(self, bare=False) if self.bare else self
        own = own._of_images() if self.ndim == 3 and not self.upsampled else own
        if own.layout == "NHWC" and own.C == own.K == 1:  # a single channel lies in either order
            own = replace(own, layout="NCHW")
        if own.direction != "wgrad":
            return own
        return replace(
            own, direction="fprop", batched=True, N=own.C // own.groups, C=own.N * own.groups, filter_size=own.output_size,
            output_size=own.filter_size, stride=own.dilation, dilation=own.stride,
            layout="CHWN" if own.layout == "NHWC" else "CNHW",
        )

    def _of_images(self) -> ConvProblem:
        """A convolution of images on the same memory as one of volumes, if there is one.

        If the filter has no depth and arrays are channels last, slices are images of a larger batch. If the filter has nothing but depth,
        slices are rows of an image.
        """
        each = zip(self.filter_size, self.stride, self.padding_before, self.padding_after, self.input_size, self.output_size, strict=True)
        free_d, *free = (how == [1, 1, 0, 0] and read == written for *how, read, written in each)
        (d, h, w), (o, p, q) = self.input_size, self.output_size
        if free_d and not all(free) and (self.layout == "NHWC" or d == 1):
            dilation = (1, *self.dilation[1:])
            return replace(self, ndim=2, batched=True, N=self.N * d, input_size=(1, h, w), output_size=(1, p, q), dilation=dilation)
        if free_d or not all(free):
            return self
        return replace(
            self, border=self.border and (self.border[1], self.border[0], self.border[2]),
            ndim=2, input_size=(1, d, h * w), filter_size=(1, self.filter_size[0], 1), output_size=(1, o, p * q),
            stride=(1, self.stride[0], 1), dilation=(1, self.dilation[0], 1), padding_before=(0, self.padding_before[0], 0),
            padding_after=(0, self.padding_after[0], 0),
        )  # fmt: skip

    def _shape(self, channels: int, size: Size3) -> tuple[int, ...]:
        return ((self.N,) if self.batched else ()) + (() if self.bare else (channels,)) + size[-self.ndim :]

    @property
    def order(self) -> tuple[int, ...] | None:
        """The axes of an array of images as they lie in memory, outermost first; None for C order."""
        return channels_last(self.ndim + 1 + self.batched, self.ndim) if self.layout == "NHWC" else None

    @property
    def weight_order(self) -> tuple[int, ...] | None:
        """The axes of the second array in that form; for wgrad it is an array of images."""
        return self.order if self.direction == "wgrad" else None

    @property
    def result_order(self) -> tuple[int, ...] | None:
        """The axes of the result in that form; for wgrad it is a filter."""
        return None if self.direction == "wgrad" else self.order

    @property
    def itemsize(self) -> int:
        """Bytes of one element of `dtype`."""
        return DTYPE_BYTES[self.dtype]

    @property
    def input_itemsize(self) -> int:
        """Bytes of one element of the array that is read first."""
        return INTEGER_BYTES[self.input_dtype] if self.input_dtype else DTYPE_BYTES[self.dtype]

    @property
    def result_itemsize(self) -> int:
        """Bytes of one element of the result."""
        return INTEGER_BYTES[self.result_dtype] if self.result_dtype else DTYPE_BYTES[self.dtype]

    @property
    def storage(self) -> str:
        """The numpy dtype of host memory that holds the elements: ``"int16"`` for bfloat16, which numpy does not know."""
        return "int16" if self.dtype == "bfloat16" else self.dtype

    @property
    def input_storage(self) -> str:
        """The same for the array that is read first."""
        return self.input_dtype or self.storage

    @property
    def result_storage(self) -> str:
        """The same for the result."""
        return self.result_dtype or self.storage

    @property
    def macs(self) -> int:
        """Multiplications and additions, counting padding as data, as the field does."""
        return self.N * math.prod(self.output_size) * self.K * (self.C // self.groups) * math.prod(self.filter_size)

    @property
    def flops(self) -> int:
        """Floating-point operations: two for each multiplication and addition."""
        return 2 * self.macs

    @property
    def bytes(self) -> int:
        """Bytes that must move at the least: every array read or written once."""
        read, written = math.prod(self.input_shape), math.prod(self.result_shape)
        others = math.prod(self.weight_shape) + written * self.has_residual + self.result_channels * (self.has_bias + self.has_scale)
        return read * self.input_itemsize + others * self.itemsize + written * self.result_itemsize

    @property
    def largest_array(self) -> int:
        """Elements of the largest array: what decides between 32-bit and 64-bit offsets."""
        return max(math.prod(self.input_shape), math.prod(self.weight_shape), math.prod(self.result_shape))

    @property
    def is_empty(self) -> bool:
        """Whether one of the arrays has no elements, so that there is nothing to multiply."""
        return 0 in (self.N, self.C, self.K)

    @property
    def has_depth(self) -> bool:
        """Whether there is more to a third spatial axis than one slice of each array."""
        return (self.input_size[0], self.filter_size[0], self.output_size[0]) != (1, 1, 1) or self.padding_before[0] != 0

    def __str__(self) -> str:
        n = self.ndim

        def sizes(values: Size3) -> str:
            return "x".join(str(v) for v in values[-n:])

        def common(values: Sequence[Any]) -> str:
            return str(values[0]) if len(set(values)) == 1 else "x".join(str(v) for v in values)

        name = {"fprop": f"conv{n}d", "dgrad": f"conv_transpose{n}d", "wgrad": f"conv{n}d_weight"}[self.direction]
        pairs = list(zip(self.padding_before[-n:], self.padding_after[-n:], strict=True))
        pads = [str(a) if a == b else f"{a}+{b}" for a, b in pairs]
        of, to = (self.K, self.output_size) if self.direction == "wgrad" else (self.result_channels, self.result_size)
        text = f"{name} {self.N}x{self.operand_channels}x{sizes(self.operand_size)} -> {of}x{sizes(to)}"
        text += f" k{sizes(self.filter_size)} s{common(self.stride[-n:])} p{common(pads)}"
        if set(self.dilation) != {1}:
            text += f" d{common(self.dilation[-n:])}"
        if self.groups != 1:
            text += f" g{self.groups}"
        if self.border is not None:
            text += " " + common([before if before == behind else f"{before}+{behind}" for before, behind in self.border[-n:]])
            text += f" {self.border_value:g}" if self.border_value else ""
        text += f" {self.dtype}" + (" tf32" if self.precision == "tf32" else "")
        text += f" upsampled {common(self.upsample[-n:])}{', folded' if self.folded else ''}" if self.upsampled else ""
        text += f" from {self.input_dtype}" if self.input_dtype else ""
        text += f" to {self.result_dtype}" if self.result_dtype else ""
        text += " of bytes" if self.of_bytes else ""
        text += " channels last" if self.layout == "NHWC" else ""
        text += f" {self.algorithm}" if self.algorithm else ""
        activation = self.activation if isinstance(self.activation, tuple) else (self.activation or "",)
        scaled = "scale of float32" if self.float_scale else "scale" * self.has_scale
        epilogue = (scaled, "residual" * self.has_residual, *map(str, activation))
        return " ".join([text, *filter(None, epilogue)])


def _common(
    name: str, ndim: int, input_shape: tuple[int, ...], weight_shape: tuple[int, ...], stride: Any, dilation: Any, groups: Any,
    dtype: str, precision: str, layout: str, algorithm: Any, bare: bool = False,
) -> ConvProblem:
    """The checks that both directions share, and the fields that they settle. With `bare`, arrays of spatial axes alone are taken."""
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        known = tuple(DTYPE_BYTES)
        raise TypeError(f"dtype must be one of {known} for {name}, but got dtype={brief(dtype)}{did_you_mean(dtype, known)}")
    check_precision(precision)
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ConvArgumentError(f"layout must be one of {LAYOUTS}, but got layout={brief(layout)}{did_you_mean(layout, LAYOUTS)}")
    strides, dilations = integers("stride", stride, ndim), integers("dilation", dilation, ndim)
    groups = integer("groups", groups)
    bare = bare and len(input_shape) == len(weight_shape) == ndim
    if not bare:
        check_ranks(name, ndim, input_shape, weight_shape)
    if any(v <= 0 for v in strides):
        raise ConvArgumentError(f"non-positive stride is not supported, but got stride={shape_text(strides)}")
    if any(v <= 0 for v in dilations):
        raise ConvArgumentError(f"dilation should be greater than zero, but got {shape_text(dilations)}")
    if groups <= 0:
        raise ConvArgumentError(f"non-positive groups is not supported, but got groups={groups}")
    batched = len(input_shape) == ndim + 2
    size, filter_size = input_shape[-ndim:], weight_shape[-ndim:]
    if any(v == 0 for v in filter_size):
        axes = ("depth", "height", "width")[-ndim:]
        shown = " ".join(f"kernel_{axis}: {v}" for axis, v in zip(axes, filter_size, strict=True))
        raise ConvArgumentError(f"kernel size should be greater than zero, but got {shown}")
    if any(v == 0 for v in size):
        raise ConvArgumentError(
            f"Only zero batch or zero channel inputs are supported, but got input shape: {shape_text(input_shape)}"
        )
    one = (1, 1, 1)
    return ConvProblem(
        direction="fprop", ndim=ndim, batched=batched, dtype=dtype, N=input_shape[0] if batched else 1, C=0,
        K=1 if bare else weight_shape[0],
        groups=groups, input_size=_pad3(size, 1), filter_size=_pad3(filter_size, 1), output_size=one, stride=_pad3(strides, 1),
        dilation=_pad3(dilations, 1), padding_before=(0, 0, 0), padding_after=(0, 0, 0), has_bias=False, precision=precision,
        layout="NHWC" if layout == "NHWC" and not bare else "NCHW", bare=bare, algorithm=checked_algorithm(algorithm),
    )
