"""torch's convolution modules, computed by this package.

Each class is torch's own with another forward: it has the same arguments, parameters, initialisation and state_dict. What it prints ends
with ``by pycuda_conv``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

import pycuda_conv as pc
from pycuda_conv.arguments import (
    check_precision,
    checked_algorithm,
    checked_upsample,
    checked_upsample_filter,
    integers,
    padding_pairs,
)
from pycuda_conv.arrays import torch_internals
from pycuda_conv.call import Call
from pycuda_conv.errors import ConvArgumentError, brief
from pycuda_conv.invariance import checked_invariance, with_invariance
from pycuda_conv.nn import upsampling
from pycuda_conv.nn.autograd import _is_followed, followed, traced_layout
from pycuda_conv.typing import Algorithm, Precision, Sizes, UpsampleFilter


def checked_precision(precision: str) -> str:
    check_precision(precision)
    return precision


def layer_algorithm(algorithm: Any, batch_invariant: Any) -> Any:
    """The algorithm of a layer that was made with these options. A block around the layer's making has no say."""
    algorithm = checked_algorithm(algorithm)
    return with_invariance(algorithm, True) if checked_invariance(batch_invariant) else algorithm


def in_pairs(padding: Any) -> bool:
    """True for a padding before and after each axis, which torch's modules do not know."""
    return isinstance(padding, (tuple, list)) and any(isinstance(v, (tuple, list)) for v in padding)


def _torchs(cls: type, name: str) -> Any:
    """A method of a class of torch's; if somebody has replaced it already, a function that is no method."""
    method = vars(cls).get(name)
    return method if getattr(getattr(method, "__code__", None), "co_filename", None) == _FILE else _nobodys


def _nobodys() -> None:
    pass


def marked(text: str) -> str:
    """The `extra_repr` of a module that this package computes, by which a printed model shows what was converted."""
    mark = "by pycuda_conv"
    return text if mark in text else f"{text}, {mark}" if text else mark


_FILE = torch.nn.Conv2d.__init__.__code__.co_filename


class _Ours:
    """The base of all the modules, which adds a precision and an algorithm to what torch's have."""

    precision = "fp32"
    algorithm: str | None = None

    def extra_repr(self) -> str:
        text: str = super().extra_repr()  # type: ignore[misc]
        text += self._upsampling()
        text += "" if self.precision == "fp32" else f", precision={self.precision}"
        return marked(text if self.algorithm is None else f"{text}, algorithm={self.algorithm}")

    def _upsampling(self) -> str:
        return ""

    @property
    def qconfig(self) -> Any:
        """The configuration that ``torch.ao.quantization`` gives a module."""
        try:
            return self.__dict__["qconfig"]
        except KeyError:
            raise AttributeError("qconfig") from None

    @qconfig.setter
    def qconfig(self, value: Any) -> None:
        self.__dict__["qconfig"] = value
        if value is not None:
            warnings.warn(
                f"torch's eager quantization looks for its own classes, and this is a {type(self).__module__}.{type(self).__name__}: it "
                "will not be quantized. Call pycuda_conv.nn.revert(model) first",
                stacklevel=4,
            )

    @qconfig.deleter
    def qconfig(self) -> None:
        if self.__dict__.pop("qconfig", self) is self:
            raise AttributeError("qconfig")


def _followed_upsampled(
    x: Any, w: Any, bias: Any, times: Any, word: str | None, stride: Any, padding: Any, dilation: Any, groups: int, precision: str,
    padding_mode: Any, algorithm: str | None,
) -> Any:
    """A convolution of an upsampled image that torch.compile traces; the arguments from `stride` on are those of :func:`followed`."""
    how = _folding(tuple(w.shape), str(w.dtype), times, word, stride, padding, dilation, groups, padding_mode, algorithm)
    if how is None:
        x = upsampling.enlarged(x, times, traced_layout(x, len(times)))
        return followed("conv", x, w, bias, (), stride, padding, dilation, groups, precision, padding_mode, algorithm)
    x = upsampling.framed(x, how, 0.0) if any(map(any, how.frame)) else x
    options = how.stride, how.padding, how.dilation, groups, precision, "zeros", algorithm
    return followed("conv_transpose", x, upsampling.folded(w, how), bias, (0,) * len(times), *options)


@torch_internals.constant
def _folding(filter_shape: tuple[int, ...], dtype: str, times: Any, word: Any, *options: Any) -> Any:
    stride, padding, dilation, groups, mode, algorithm = options
    ndim = len(filter_shape) - 2
    call = Call("conv", ndim, stride, padding, dilation, groups, "fp32", 0, None, algorithm, mode, upsample=(times, word))
    return upsampling.folding_of(call.hashable(), filter_shape, dtype.removeprefix("torch."))


class _Conv(_Ours):
    """It overrides the methods that convolve; one of torch's that somebody replaced still runs."""

    function: Callable[..., Any]
    kernel_size: tuple[int, ...]
    #: how many times each pixel stands along each axis of what is convolved; empty where once
    upsample: tuple[int, ...] = ()
    upsample_filter: str | None = None
    _base: Any
    #: torch's methods, or :func:`_nobodys`
    _genuine: Any
    _genuine_forward: Any

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
        bias: bool = True, padding_mode: str = "zeros", device: Any = None, dtype: Any = None, *, precision: Precision = "fp32",
        algorithm: Algorithm | None = None, batch_invariant: bool = False, upsample: Sizes = 1,
        upsample_filter: UpsampleFilter | None = None,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        self.precision, self.algorithm = checked_precision(precision), layer_algorithm(algorithm, batch_invariant)
        self.upsample = checked_upsample(upsample, len(self.kernel_size))
        self.upsample_filter = checked_upsample_filter(upsample_filter)
        if in_pairs(padding):  # torch would repeat each pair
            pairs = padding_pairs(padding, len(self.kernel_size))
            self._reversed_padding_repeated_twice = tuple(v for pair in reversed(pairs) for v in pair)

    def _upsampling(self) -> str:
        if not any(n != 1 for n in self.upsample):
            return ""
        word = "" if self.upsample_filter is None else f", upsample_filter={self.upsample_filter}"
        return f", upsample={self.upsample}{word}"

    def forward(self: Any, input: Any) -> Any:
        if self._base.forward is not self._genuine_forward or _is_followed():
            return self._base.forward(self, input)
        own = self.__dict__["_parameters"]  # attributes of a module take longer than a launch, as it looks for them elsewhere first
        try:
            weight, bias = own["weight"], own["bias"]
        except KeyError:  # one is computed, as torch.nn.utils.parametrize does, or it is a replica's
            weight, bias = self.weight, self.bias
        return self._conv_forward(input, weight, bias)

    def _conv_forward(self: Any, input: Any, weight: Any, bias: Any) -> Any:
        if self._base._conv_forward is not self._genuine:  # somebody replaced it for all convolutions
            return self._base._conv_forward(self, input, weight, bias)
        padding, mode = self.padding, self.padding_mode
        if mode != "zeros":  # in numbers, from the last axis to the first
            sides = self._reversed_padding_repeated_twice
            padding = tuple((sides[i], sides[i + 1]) for i in range(len(sides) - 2, -1, -2))
        asked = self.stride, padding, self.dilation, self.groups, self.precision, mode, self.algorithm
        upsampled = any(n != 1 for n in self.upsample)
        if _is_followed():
            if upsampled:
                return _followed_upsampled(input, weight, bias, self.upsample, self.upsample_filter, *asked)
            return followed("conv", input, weight, bias, (), *asked)
        more = {"upsample": self.upsample, "upsample_filter": self.upsample_filter} if upsampled else {}
        return self.function(
            input, weight, bias, self.stride, padding, self.dilation, self.groups, precision=self.precision, algorithm=self.algorithm,
            padding_mode=mode, **more,
        )


class _ConvTranspose(_Ours):
    function: Callable[..., Any]
    _base: Any
    #: torch's method, or :func:`_nobodys`
    _genuine: Any

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
        groups: int = 1, bias: bool = True, dilation: Any = 1, padding_mode: str = "zeros", device: Any = None, dtype: Any = None, *,
        precision: Precision = "fp32", algorithm: Algorithm | None = None, batch_invariant: bool = False,
    ) -> None:
        if isinstance(padding, str):  # torch makes a tuple of its letters
            raise ConvArgumentError(f"padding must be integers for a transposed convolution, but got padding={brief(padding)}")
        super().__init__(  # type: ignore[call-arg]
            in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation, padding_mode, device, dtype
        )
        self.precision, self.algorithm = checked_precision(precision), layer_algorithm(algorithm, batch_invariant)

    def forward(self: Any, input: Any, output_size: Any = None) -> Any:
        """The same as torch's. `output_size` is the size of the result, where a stride leaves it open."""
        if self._base.forward is not self._genuine:  # somebody replaced it for all convolutions
            return self._base.forward(self, input, output_size)
        ndim = len(self.kernel_size)
        output_padding = self._output_padding(input, output_size, self.stride, self.padding, self.kernel_size, ndim, self.dilation)
        if _is_followed():
            more = integers("output_padding", output_padding, ndim)
            settings = self.stride, self.padding, self.dilation, self.groups, self.precision, "zeros", self.algorithm
            return followed("conv_transpose", input, self.weight, self.bias, more, *settings)
        options = self.stride, self.padding, output_padding, self.groups, self.dilation
        return self.function(input, self.weight, self.bias, *options, precision=self.precision, algorithm=self.algorithm)


class Conv1d(_Conv, torch.nn.Conv1d):
    """``torch.nn.Conv1d`` computed by :func:`pycuda_conv.conv1d`: see :class:`Conv2d`."""

    function = staticmethod(pc.conv1d)
    _base, _genuine = torch.nn.Conv1d, staticmethod(_torchs(torch.nn.Conv1d, "_conv_forward"))
    _genuine_forward = staticmethod(_torchs(torch.nn.Conv1d, "forward"))


class Conv2d(_Conv, torch.nn.Conv2d):
    """``torch.nn.Conv2d`` computed by :func:`pycuda_conv.conv2d`, with its gradients.

    Parameters
    ----------
    in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        As for ``torch.nn.Conv2d``, in its order. State dicts fit both ways. The padding may be ((top, bottom), (left, right)) too.
    precision : {"fp32", "tf32"}
        Arithmetic for float32, forward and backward: see :func:`pycuda_conv.conv2d`.
    algorithm : {"direct", "fft", "batch_invariant"} or None
        Sums of products alone, or Fourier transforms, forward and backward: see :func:`pycuda_conv.conv2d`.
    batch_invariant : bool
        Compute each image with the same bits whatever images stand beside it: see :func:`pycuda_conv.batch_invariant`.
    upsample, upsample_filter
        Nearest upsampling before the padding: see :func:`pycuda_conv.conv2d`.

    Examples
    --------
    >>> import torch, pycuda_conv.nn
    >>> layer = pycuda_conv.nn.Conv2d(16, 33, 3, stride=2, padding="valid")
    >>> layer(torch.randn(20, 16, 50, 100)).shape
    torch.Size([20, 33, 24, 49])
    """

    function = staticmethod(pc.conv2d)
    _base, _genuine = torch.nn.Conv2d, staticmethod(_torchs(torch.nn.Conv2d, "_conv_forward"))
    _genuine_forward = staticmethod(_torchs(torch.nn.Conv2d, "forward"))


class Conv3d(_Conv, torch.nn.Conv3d):
    """``torch.nn.Conv3d`` computed by :func:`pycuda_conv.conv3d`: see :class:`Conv2d`."""

    function = staticmethod(pc.conv3d)
    _base, _genuine = torch.nn.Conv3d, staticmethod(_torchs(torch.nn.Conv3d, "_conv_forward"))
    _genuine_forward = staticmethod(_torchs(torch.nn.Conv3d, "forward"))


class ConvTranspose1d(_ConvTranspose, torch.nn.ConvTranspose1d):
    """``torch.nn.ConvTranspose1d`` computed by :func:`pycuda_conv.conv_transpose1d`: see :class:`ConvTranspose2d`."""

    function = staticmethod(pc.conv_transpose1d)
    _base, _genuine = torch.nn.ConvTranspose1d, staticmethod(_torchs(torch.nn.ConvTranspose1d, "forward"))


class ConvTranspose2d(_ConvTranspose, torch.nn.ConvTranspose2d):
    """``torch.nn.ConvTranspose2d`` computed by :func:`pycuda_conv.conv_transpose2d`, with its gradients.

    Parameters
    ----------
    in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation, padding_mode, device, dtype
        As for ``torch.nn.ConvTranspose2d``, in its order. State dicts fit both ways.
    precision : {"fp32", "tf32"}
        Arithmetic for float32, forward and backward: see :func:`pycuda_conv.conv2d`.
    algorithm : {"direct", "fft", "batch_invariant"} or None
        Sums of products alone, or Fourier transforms, forward and backward: see :func:`pycuda_conv.conv2d`.

    Examples
    --------
    >>> import torch, pycuda_conv.nn
    >>> layer = pycuda_conv.nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1)
    >>> layer(torch.randn(1, 8, 6, 6), output_size=(12, 12)).shape
    torch.Size([1, 4, 12, 12])
    """

    function = staticmethod(pc.conv_transpose2d)
    _base, _genuine = torch.nn.ConvTranspose2d, staticmethod(_torchs(torch.nn.ConvTranspose2d, "forward"))


class ConvTranspose3d(_ConvTranspose, torch.nn.ConvTranspose3d):
    """``torch.nn.ConvTranspose3d`` computed by :func:`pycuda_conv.conv_transpose3d`: see :class:`ConvTranspose2d`."""

    function = staticmethod(pc.conv_transpose3d)
    _base, _genuine = torch.nn.ConvTranspose3d, staticmethod(_torchs(torch.nn.ConvTranspose3d, "forward"))
