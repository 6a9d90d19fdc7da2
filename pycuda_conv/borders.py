"""Borders: what a filter meets where it reaches over the edge of an image.

A mode is a word of torch's, or ``"symmetric"``. It says how an image goes on before and behind an axis; numpy, scipy and OpenCL's samplers
have other words for the same:

==============  ===================  ==================  ==========
here, torch     the image a b c d    scipy.ndimage       numpy.pad
==============  ===================  ==================  ==========
``zeros``       0 0 | abcd | 0 0     ``constant``        ``constant``
``constant``    v v | abcd | v v     ``constant``        ``constant``
``replicate``   a a | abcd | d d     ``nearest``         ``edge``
``reflect``     c b | abcd | c b     ``mirror``          ``reflect``
``symmetric``   b a | abcd | d c     ``reflect``         ``symmetric``
``circular``    c d | abcd | a b     ``wrap``            ``wrap``
==============  ===================  ==================  ==========

An axis may go on differently on its two sides, and each mode goes on for as long as the padding does. A mirror in one pixel repeats it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

from pycuda_conv.errors import ConvArgumentError, brief, did_you_mean

MODES = ("zeros", "constant", "replicate", "reflect", "circular", "symmetric")
#: The modes that fill with one number. The others read the image.
FILLED = ("zeros", "constant")

#: Words of numpy and of scipy for the same.
_ELSEWHERE = {
    "nearest": "replicate", "edge": "replicate", "mirror": "reflect", "wrap": "circular", "grid-wrap": "circular",
    "grid-mirror": "symmetric", "grid-constant": "constant",
}  # fmt: skip

#: The modes before and behind each of some axes.
Pairs = tuple[tuple[str, str], ...]
#: Those of depth, height and width.
Border = tuple[tuple[str, str], tuple[str, str], tuple[str, str]]
NONE: Border = (("zeros", "zeros"),) * 3


def _mode(value: Any, whole: Any) -> str:
    if isinstance(value, str) and value in MODES:
        return value
    shown = brief(whole)
    if isinstance(value, str):
        known = _ELSEWHERE.get(value)
        hint = did_you_mean(value, MODES) if known is None else f"; here it is called {known!r}"
        raise ConvArgumentError(f"padding_mode must be one of {MODES}, but got padding_mode={shown}{hint}")
    raise TypeError(f"padding_mode must be one of {MODES}, or a list of one, or of a pair (before, after), for each axis, got {shown}")


def mode_pairs(value: Any, ndim: int) -> Pairs:
    """The `padding_mode` argument in one form: `ndim` pairs (before, after).

    Raises
    ------
    ConvArgumentError, TypeError
        It is no word, and no list of a word or of a pair for each axis.
    """
    if not isinstance(value, (list, tuple)):
        word = _mode(value, value)
        return ((word, word),) * ndim
    if len(value) not in (1, ndim):
        raise ConvArgumentError(f"expected padding_mode to be a word or a list of {ndim}, one an axis, but got padding_mode={brief(value)}")
    found = []
    for one in value if len(value) == ndim else list(value) * ndim:
        if isinstance(one, (list, tuple)):
            if len(one) != 2:
                raise ConvArgumentError(f"expected pairs (before, after) in padding_mode, but got padding_mode={brief(value)}")
            found.append((_mode(one[0], value), _mode(one[1], value)))
        else:
            found.append((_mode(one, value),) * 2)
    return tuple(found)


def hashable(value: Any) -> Any:
    """The same argument as a word or a tuple of words and pairs."""
    return tuple(map(hashable, value)) if isinstance(value, (list, tuple)) else value


def fill_value(value: Any, pairs: Pairs | None = None) -> float:
    """The `padding_value` argument as a float. With `pairs`, it is refused where no mode fills with it."""
    item = getattr(value, "item", None)
    number = item() if callable(item) and getattr(value, "shape", None) == () else value
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(f"padding_value must be a number, got {brief(value)} of type {type(value).__name__}")
    try:
        number = float(number)
    except OverflowError:
        raise ConvArgumentError(f"padding_value must be a float, but got {brief(value)}, which is beyond all floats") from None
    if pairs is not None and number != 0 and not any(mode == "constant" for pair in pairs for mode in pair):
        raise ConvArgumentError(
            f"padding_value is for padding_mode='constant', but got padding_value={brief(value)} with padding_mode={shown(pairs)}"
        )
    return math.nan if math.isnan(number) else number


def shown(pairs: Pairs) -> str:
    """Modes as messages show them: one word if all are alike."""
    words = {mode for pair in pairs for mode in pair}
    return repr(words.pop() if len(words) == 1 else pairs)


def settled(
    border: Border, value: float, size: Sequence[int], before: Sequence[int], after: Sequence[int], gradient: bool = False
) -> tuple[Border | None, float]:
    """Modes in their simplest form, and the value that fills; None where zeros are all there is.

    A side without padding, or one that is cut off, is one of zeros. In a corner between a side of zeros and one of another number the inner
    axis counts. For the `gradient` by the input, what fills is of no interest.
    """

    def simplest(mode: str, padding: int, n: int) -> str:
        if padding <= 0 or (mode == "constant" and (value == 0 or gradient)):
            return "zeros"
        return "replicate" if mode in ("reflect", "symmetric", "circular") and n == 1 else mode

    d, h, w = (
        (simplest(first, b, n), simplest(last, a, n)) for (first, last), n, b, a in zip(border, size, before, after, strict=True)
    )
    found = d, h, w
    if found == NONE:
        return None, 0.0
    return found, value if any(mode == "constant" for pair in found for mode in pair) else 0.0


class Side(NamedTuple):
    """How an axis of n pixels goes on at one side, in numbers.

    The pixel at a distance of a + 1 from the edge, outside, is the one at a distance of v from it, inside:
    ``t = (a + shift) % period; v = t if t < low else high - t``. A side that is filled counts as one that repeats its pixel; `fills` is 1
    for one that is filled with the value, 2 for one of zeros, and else 0.
    """

    shift: int
    period: int
    low: int
    high: int
    fills: int


def side(mode: str, n: int) -> Side:
    """The numbers of a mode."""
    if mode == "circular":
        return Side(0, n, 0, n - 1, 0)
    if mode == "symmetric":
        return Side(0, 2 * n, n, 2 * n - 1, 0)
    if mode == "reflect" and n > 1:
        return Side(1, 2 * n - 2, n, 2 * n - 2, 0)
    return Side(0, 1, 1, 0, {"constant": 1, "zeros": 2}.get(mode, 0))


class Alike(NamedTuple):
    """How an axis of n pixels goes on alike at both sides, in numbers that map any index i >= -bias into it.

    ``t = max(i + bias, 0) % period; pixel = t if t < n else high + sign * t``.
    """

    bias: int
    period: int
    high: int
    sign: int


_NEVER = 2**30  # a period that no index reaches


def alike(mode: str, n: int, before: int) -> Alike:
    """The numbers of a mode, for indices from -`before` on. A side that is filled repeats its pixel."""
    period, high, sign = {
        "circular": (n, 0, 0), "symmetric": (2 * n, 2 * n - 1, -1), "reflect": (2 * n - 2, 2 * n - 2, -1),
    }.get(mode if n > 1 or mode != "reflect" else "", (_NEVER, n - 1, 0))  # fmt: skip
    return Alike(0 if period == _NEVER else -(-max(before, 0) // period) * period, period, high, sign)


def near(mode: str, n: int, last: bool) -> tuple[int, int, int]:
    """A start and a step with which place i outside shows pixel ``start + step * i``, and for how many places that holds."""
    if mode == "circular":
        return -n if last else n, 1, n
    if mode == "symmetric":
        return 2 * n - 1 if last else -1, -1, n
    if mode == "reflect" and n > 1:
        return 2 * n - 2 if last else 0, -1, n - 1
    return n - 1 if last else 0, 0, 2**31


def source(mode: str, n: int, a: int) -> int:
    """The distance from the edge, inside, of the pixel that stands at a distance of `a` + 1 outside."""
    numbers = side(mode, n)
    t = (a + numbers.shift) % numbers.period
    return t if t < numbers.low else numbers.high - t


def rows(pair: tuple[str, str], n: int, first: int, last: int) -> list[int]:
    """For each row from `first` to `last`, which may lie outside of an axis of `n`, the row that it shows; -1 where it is filled."""
    before, after = pair
    found = []
    for i in range(first, last):
        if i < 0:
            found.append(-1 if before in FILLED else source(before, n, -1 - i))
        elif i >= n:
            found.append(-1 if after in FILLED else n - 1 - source(after, n, i - n))
        else:
            found.append(i)
    return found
