"""Filters of pictures. An invisible neighbour, one that is transparent or has no data, counts as the pixel's own colour."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import pycuda_conv
from pycuda_conv import ndimage
from pycuda_conv.arguments import integers
from pycuda_conv.tools.files import FILTERS, Settings, named_number
from pycuda_conv.tools.pictures.forms import Picture
from pycuda_conv.tools.terminal import ToolError

#: The words of --border: the functions' and scipy's.
BORDERS = {
    "replicate": "nearest", "zeros": "constant", "symmetric": "reflect", "reflect": "mirror", "circular": "wrap",
}  # fmt: skip

#: Of images and the result's type.
Filter = Callable[[np.ndarray, str], np.ndarray]


def filtered(picture: Picture, weight: np.ndarray | None, bias: np.ndarray | None, settings: Settings) -> Picture:
    """`picture` with its colours filtered: each by itself, or all of them by a filter (K, C/groups, R, S)."""
    x = picture.colours
    work = "float64" if x.dtype.itemsize > 4 or (x.dtype.kind in "iu" and x.dtype.itemsize > 2) else "float32"
    if x.dtype.kind in "iu" and x.dtype.itemsize > 4 and x.size and max(int(x.max()), -int(x.min())) > 2**53:
        picture.said.append("its numbers above 2^53 are rounded to those of float64")
    if x.dtype.kind == "b" or x.dtype == np.float16:
        x = x.astype("float32")
    alone = _alone(weight, bias, settings)
    if alone is None:
        assert weight is not None
        return _over_all_colours(picture, x, weight.astype(work), bias, settings, work)
    visible = _visible(picture)
    wanted = np.dtype(settings.dtype or picture.colours.dtype)
    if visible is None:  # numbers of 8 and 16 bits go to the device and come back as they are
        straight = wanted.name if wanted.name in ("uint8", "int8", "uint16", "int16") else work
        y = alone(x, straight)
    else:  # filter what is seen; what is not counts as the pixel's own colour
        a = visible[..., None].astype(work)
        own = np.where(np.isfinite(x), x, 0).astype(work) if x.dtype.kind == "f" else x.astype(work)
        seen, weight_seen, whole = (alone(one, work) for one in (own * a, a, np.ones((1, *x.shape[1:3], 1), work)))
        y = seen + own * (whole - weight_seen)
        if picture.hidden is not None:
            y = np.where(picture.hidden[..., None], x, y)
    return replace(picture, colours=_rounded(y, picture.colours.dtype, settings))


def _visible(picture: Picture) -> np.ndarray | None:
    """How visible pixels are, from 0 to 1; None if all are."""
    if picture.hidden is not None and picture.hidden.any():
        return 1.0 - picture.hidden
    if picture.alpha is not None and not (picture.alpha == picture.alpha.max(initial=0)).all():
        top = np.iinfo(picture.alpha.dtype).max if picture.alpha.dtype.kind in "iu" else 1
        return picture.alpha / top
    return None


def _alone(weight: np.ndarray | None, bias: np.ndarray | None, settings: Settings) -> Filter | None:
    """The filter of each colour by itself, or None if the filter mixes colours."""
    mode, value, device = BORDERS[settings.border or "replicate"], 0.0, settings.device
    number = named_number(settings.filter)
    if number is not None:
        name, size = number

        def blurred(x: np.ndarray, output: str) -> np.ndarray:
            function: Any = ndimage.gaussian_filter if name == "gaussian" else ndimage.uniform_filter
            made: np.ndarray = function(x, size, mode=mode, cval=value, axes=(1, 2), output=output, device=device)
            return made

        return blurred
    assert weight is not None
    if weight.ndim == 4 and weight.shape[:2] == (1, 1) and settings.groups is None:
        weight = weight[0, 0]
    if weight.ndim not in (2, 4) or 0 in weight.shape:
        raise ToolError(f"{settings.filter} must have shape (R, S), (1, 1, R, S) or (K, C, R, S) for a picture, but it is {weight.shape}")
    if weight.ndim == 4:
        return None
    if bias is not None or settings.activation is not None:
        return None
    taps = _spread(weight, settings)
    origin = tuple(-(n % 2 == 0) for n in taps.shape)  # an uneven rest lies as with "same"

    def correlated(x: np.ndarray, output: str) -> np.ndarray:
        made: np.ndarray = ndimage.correlate(x, taps, output, mode, value, origin, axes=(1, 2), device=device)
        return made

    return correlated


def _spread(weight: np.ndarray, settings: Settings) -> np.ndarray:
    """The filter with zeros between its taps, as --dilation asks."""
    steps = integers("dilation", 1 if settings.dilation is None else settings.dilation, 2)
    if min(steps) < 1:
        raise ToolError(f"dilation must be at least 1, got {settings.dilation}")
    wide = np.zeros([d * (n - 1) + 1 for d, n in zip(steps, weight.shape, strict=True)])
    wide[:: steps[0], :: steps[1]] = weight
    return wide


def _over_all_colours(
    picture: Picture, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, settings: Settings, work: str
) -> Picture:
    """Filtered by a convolution with channels, a bias or an activation."""
    single = weight.ndim == 2 or (weight.shape[:2] == (1, 1) and settings.groups is None)
    weight = weight if weight.ndim == 4 else weight[None, None]
    if not single and weight.shape[0] not in (1, 3):
        raise ToolError(f"{settings.filter} gives {weight.shape[0]} channels; a picture has 1 or 3 colours")
    steps = integers("dilation", 1 if settings.dilation is None else settings.dilation, 2)
    reach = [max(d, 0) * (n - 1) for d, n in zip(steps, weight.shape[2:], strict=True)]
    planes = np.ascontiguousarray(np.moveaxis(x, -1, 1), work)
    pages, channels = planes.shape[:2]
    if single:
        planes = planes.reshape(-1, 1, *planes.shape[2:])
    border: Any = settings.border or "replicate"
    y = pycuda_conv.conv2d(
        planes, np.ascontiguousarray(weight, work), None if bias is None else bias.astype(work), dilation=steps,
        groups=1 if settings.groups is None else settings.groups, padding=tuple((n // 2, n - n // 2) for n in reach),
        padding_mode=border, **settings.where,
    )  # fmt: skip
    if single:
        y = y.reshape(pages, channels, *y.shape[2:])
    y = np.moveaxis(y, 1, -1)
    made = replace(picture, colours=_rounded(y, picture.colours.dtype, settings))
    if y.shape[-1] != channels and "icc_profile" in made.info:  # the profile is one of other colours
        made = replace(made, info={name: value for name, value in made.info.items() if name != "icc_profile"})
    return made


def _rounded(y: np.ndarray, dtype: np.dtype, settings: Settings) -> np.ndarray:
    """Values of a type, by default the picture's: integers are rounded and clipped."""
    wanted = np.dtype(settings.dtype or dtype)
    if y.dtype == wanted:
        return y
    if wanted.kind == "b":
        return y >= 0.5
    if wanted.kind not in "iu":
        return y.astype(wanted)
    limits = np.iinfo(wanted)
    with np.errstate(invalid="ignore"):
        most = y.dtype.type(limits.max)
        return np.where(y >= most, wanted.type(limits.max), np.clip(np.rint(y), y.dtype.type(limits.min), most).astype(wanted))


def weights_of(settings: Settings, read: Callable[[str], np.ndarray]) -> np.ndarray | None:
    """The taps of a named filter, or of one in a file; None for one that is named with a number."""
    if named_number(settings.filter) is not None:
        return None
    return FILTERS[settings.filter] if settings.filter in FILTERS else read(settings.filter)
