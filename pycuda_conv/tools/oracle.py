"""Judges results by a float64 reference, beside torch's convolution. :mod:`pycuda_conv.rounding` has the bounds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pycuda_conv import borders
from pycuda_conv.problem import ConvProblem
from pycuda_conv.rounding import bound, overflows, relative_limit
from pycuda_conv.tools.terminal import require


@dataclass(frozen=True)
class Errors:
    """Errors of a result against the reference.

    Attributes
    ----------
    largest, mean : float
        Of |out - ref|.
    relative : float
        norm(out - ref) / norm(ref).
    of_bound : float
        The largest |out - ref| / bound; a value above 1 is not rounding. NaN if the result has one.
    correct : bool
        Whether every element is within the bound, which ``algorithm="fft"`` does not promise, and the relative error below its limit.
    """

    largest: float
    mean: float
    relative: float
    of_bound: float
    correct: bool


class ErrorSums:
    """Errors of a result that is compared piece by piece, in arrays of numpy or of torch."""

    def __init__(self, problem: ConvProblem) -> None:
        self.problem = problem
        self._count = 0
        self._sum = self._squares = self._reference_squares = 0.0
        self._largest = self._of_bound = 0.0
        self._within = True

    def add(self, out: Any, reference: Any, magnitude: Any, rest: Any = 0.0) -> None:
        """Compare one piece; all are float64 arrays of one shape. `rest` is the part that a float64 reference lacks, if it is known.

        Elements that are infinite because the dtype has no such large numbers are right, and left out.
        """
        error, limit = abs((out - reference) - rest), bound(self.problem, reference, magnitude)
        if not bool((error < math.inf).all()):
            kept = ~overflows(self.problem, out, reference, limit)
            if not bool(kept.any()):
                return
            error, limit, reference = error[kept], limit[kept], reference[kept]
        self._within = self._within and bool((error <= limit).all())  # <=: NaN fails
        self._count += math.prod(error.shape)
        self._sum += float(error.sum())
        self._squares += float((error * error).sum())
        self._reference_squares += float((reference * reference).sum())
        # max(a, b) would drop a NaN, np.maximum keeps it
        self._largest = float(np.maximum(self._largest, float(error.max())))
        self._of_bound = float(np.maximum(self._of_bound, float((error / limit).max())))

    def errors(self) -> Errors:
        """The verdict on all pieces."""
        scale = math.sqrt(self._reference_squares)
        relative = math.sqrt(self._squares) / scale if scale else math.sqrt(self._squares)
        within = self._within or self.problem.algorithm == "fft"  # transforms that were asked for are right by the norm
        correct = within and relative <= relative_limit(self.problem)
        return Errors(self._largest, self._sum / max(self._count, 1), relative, self._of_bound, correct)


def compare(problem: ConvProblem, out: Any, reference: Any, magnitude: Any) -> Errors:
    """Errors of a whole result."""
    sums = ErrorSums(problem)
    sums.add(out, reference, magnitude)
    return sums.errors()


# ---- the reference


def reference(problem: ConvProblem, first: np.ndarray, second: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """The result of `problem` in float64, one filter tap after the other.

    Parameters
    ----------
    first, second, bias : arrays of the problem's ``input_shape``, ``weight_shape`` and ``bias_shape``
    """
    images, groups, direction = problem.N, problem.groups, problem.direction
    padded = [sum(sizes) for sizes in zip(problem.padding_before, problem.input_size, problem.padding_after, strict=True)]
    x = np.zeros((images, groups, problem.C // groups, *padded))
    place: tuple[Any, ...] = ..., *(slice(b, b + n) for b, n in zip(problem.padding_before, problem.input_size, strict=True))
    inside = x[place]
    y = np.zeros((images, groups, problem.K // groups, math.prod(problem.output_size)))
    w = np.zeros((groups, problem.K // groups, problem.C // groups, *problem.filter_size))
    operands = {"fprop": (inside, w), "dgrad": (y, w), "wgrad": (inside, y)}[direction]
    for operand, given in zip(operands, (first, second), strict=True):
        operand[...] = given.reshape(operand.shape)
    if direction != "dgrad":
        x[...] = _with_border(problem, inside)
    for tap in np.ndindex(problem.filter_size):
        axes = zip(tap, problem.dilation, problem.output_size, problem.stride, strict=True)
        place = ..., *(slice(t * d, t * d + (n - 1) * s + 1, s) for t, d, n, s in axes)
        met = x[place]  # the elements that this tap meets
        place = ..., *tap
        at_tap = w[place]
        if direction == "fprop":
            y += at_tap @ met.reshape(*met.shape[:3], -1)
        elif direction == "dgrad":
            met += (at_tap.swapaxes(1, 2) @ y).reshape(met.shape)
        else:
            at_tap += (y @ met.reshape(*met.shape[:3], -1).swapaxes(2, 3)).sum(0)
    if direction == "dgrad":
        inside = _folded(problem, x)
    result: np.ndarray = {"fprop": y, "dgrad": inside, "wgrad": w}[direction].reshape(problem.result_shape)
    return result if bias is None else result + bias.reshape(-1, *(1,) * problem.ndim)


def _shown(problem: ConvProblem) -> list[np.ndarray]:
    """Along each axis the pixel that stands at each place of the image with its padding; -1 where it is filled."""
    axes = zip(problem.border or borders.NONE, problem.input_size, problem.padding_before, problem.padding_after, strict=True)
    return [np.array(borders.rows(words, n, -before, n + after), int) for words, n, before, after in axes]


def _with_border(problem: ConvProblem, inside: np.ndarray) -> np.ndarray:
    """The images with what their border shows. Where two axes fill, the inner one counts."""
    shown = _shown(problem)
    met: tuple[Any, ...] = ..., *np.ix_(*(np.maximum(pixels, 0) for pixels in shown))
    x = inside[met]
    for axis, (pixels, before) in enumerate(zip(shown, problem.padding_before, strict=True), x.ndim - 3):
        words = (problem.border or borders.NONE)[axis - x.ndim + 3]
        for place in np.flatnonzero(pixels < 0):
            mode = words[0] if place < before else words[1]
            x[(slice(None),) * axis + (place,)] = problem.border_value if mode == "constant" else 0.0
    return x


def _folded(problem: ConvProblem, wide: np.ndarray) -> np.ndarray:
    """The gradient by the images of that by the images with their border."""
    for axis, (pixels, n) in enumerate(zip(_shown(problem), problem.input_size, strict=True), wide.ndim - 3):
        places = np.flatnonzero(pixels >= 0)
        sums = np.zeros((n, *np.delete(wide.shape, axis)))
        np.add.at(sums, pixels[places], np.moveaxis(wide, axis, 0)[places])
        wide = np.moveaxis(sums, 0, axis)
    return wide


# ---- torch as the rival


def options(problem: ConvProblem) -> dict[str, Any]:
    """The keyword arguments of torch's functions for `problem`."""
    n = problem.ndim
    pairs = tuple(zip(problem.padding_before, problem.padding_after, strict=True))[-n:]
    even = all(before == after for before, after in pairs)
    padding = tuple(before for before, _ in pairs) if even else pairs
    found: dict[str, Any] = {
        "stride": problem.stride[-n:], "padding": padding, "dilation": problem.dilation[-n:], "groups": problem.groups,
    }
    if problem.direction == "dgrad":
        if not even:
            raise ValueError(f"torch has no transposed convolution with uneven padding: {problem}")
        plain = [
            (n - 1) * s - 2 * b + d * (f - 1) + 1
            for n, s, b, d, f in zip(
                problem.output_size, problem.stride, problem.padding_before, problem.dilation, problem.filter_size, strict=True
            )
        ]
        found["output_padding"] = tuple(size - p for size, p in zip(problem.input_size, plain, strict=True))[-n:]
    return found


def torch_function(name: str, padding: Any = 0, **others: Any) -> Callable[..., Any]:
    """The function of ``torch.nn.functional`` of that name with its options bound: (input, weight, bias=None) -> output.

    Unlike torch, it also takes `padding` as pairs (before, after): zeros are then added in a pass of their own.
    """
    functional = require("torch.nn.functional")
    function = getattr(functional, name)
    if isinstance(padding, (str, int)) or not any(isinstance(v, tuple) for v in padding):
        return lambda x, w, b=None: function(x, w, b, padding=padding, **others)
    around = [v for pair in reversed(padding) for v in pair]
    return lambda x, w, b=None: function(functional.pad(x, around), w, b, padding=0, **others)


def torch_for(problem: ConvProblem) -> Callable[..., Any]:
    """torch's own convolution for `problem`: (input, weight, bias=None) -> output."""
    name = f"conv{problem.ndim}d" if problem.direction == "fprop" else f"conv_transpose{problem.ndim}d"
    return torch_function(name, **options(problem))


def torch_gradient(problem: ConvProblem) -> Callable[..., Any]:
    """torch's result for `problem`, which may be a gradient by the filter: (first, second) -> output."""
    if problem.direction != "wgrad":
        return torch_for(problem)
    arguments = options(replace(problem, direction="fprop"))
    size = problem.result_shape

    def gradient(x: Any, dy: Any) -> Any:
        if isinstance(arguments["padding"][0], tuple):
            x, arguments["padding"] = require("torch.nn.functional").pad(x, [v for pair in reversed(arguments["padding"]) for v in pair]), 0
        return getattr(require("torch").nn.grad, f"conv{problem.ndim}d_weight")(x, size, dy, **arguments)

    return gradient


@contextmanager
def _attribute_set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute, and set it back at the end."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def torch_precision(precision: str) -> Iterator[str]:
    """Set the arithmetic of cuDNN's float32 convolutions inside the block; gives words for what was set.

    It sets one switch only, as torch refuses to run with its old and its new one mixed.
    """
    cudnn = require("torch").backends.cudnn
    conv = getattr(cudnn, "conv", None)
    owner: Any
    value: Any
    if hasattr(conv, "fp32_precision"):
        owner, name, value = conv, "fp32_precision", "tf32" if precision == "tf32" else "ieee"
    else:
        owner, name, value = cudnn, "allow_tf32", precision == "tf32"
    with _attribute_set(owner, name, value):
        yield f"torch.backends.cudnn.{'conv.' if owner is conv else ''}{name} = {value!r}"


@contextmanager
def precision_set(torch: Any, part: str, precision: str) -> Iterator[None]:
    """Set the arithmetic of float32 in cuDNN's convolutions ("cudnn") or in cuBLAS's products ("cuda")."""
    owner: Any = getattr(torch.backends.cudnn, "conv", None) if part == "cudnn" else torch.backends.cuda.matmul
    value: Any = precision
    name = "fp32_precision"
    if not hasattr(owner, name):  # before torch 2.9
        owner, name, value = torch.backends.cudnn if part == "cudnn" else owner, "allow_tf32", precision == "tf32"
    with _attribute_set(owner, name, value):
        yield


def cudnn_set(torch: Any, name: str, value: bool) -> AbstractContextManager[None]:
    """Set one of cuDNN's switches in torch, and set it back at the end."""
    return _attribute_set(torch.backends.cudnn, name, value)


# ---- the reference of a layer on a GPU

LARGE_FLOPS = 20e9  # of a larger problem, only some channels of the result are compared with the reference
CHECKED_CHANNELS = 64  # how many
SLICE_BYTES = 2**31  # bytes of float64 arrays that are compared at a time


def checked_channels(problem: ConvProblem, seed: int) -> list[int]:
    """The channels of each group of the result that are compared with the reference: for a large problem some, spread at random."""
    own = problem.result_channels // problem.groups
    count = min(own, max(1, CHECKED_CHANNELS // problem.groups)) if problem.flops > LARGE_FLOPS else own
    generator = random.Random(seed)
    return [generator.randrange(i * own // count, (i + 1) * own // count) for i in range(count)]


class Truth:
    """The convolution of one input and filter, in :func:`checked_channels`, and the error that rounding explains.

    It is computed in float64, and in twice that precision for float64 arrays.
    """

    def __init__(self, torch: Any, problem: ConvProblem, x: Any, w: Any, seed: int = 0) -> None:
        self.problem, self._chosen = problem, checked_channels(problem, seed)
        #: the number of channels of the result that are compared
        self.channels = problem.groups * len(self._chosen)
        function = torch_for(problem)
        weights = (w if problem.direction == "dgrad" else w.unflatten(0, (problem.groups, -1)))[:, self._chosen]
        w64 = (weights if problem.direction == "dgrad" else weights.flatten(0, 1)).double()
        magnitudes = w64.abs()
        pixels = problem.operand_channels * math.prod(problem.operand_size) + 5 * self.channels * math.prod(problem.result_size)
        at_once = max(1, SLICE_BYTES // (8 * pixels))
        self._pieces = []
        with cudnn_set(torch, "benchmark", False):  # to try all of cuDNN's float64 kernels would take longer than the reference
            for first in range(0, problem.N, at_once):
                images = slice(first, first + at_once)
                x64 = x[images].double().contiguous()
                found = doubled(torch, function, x64, w64) if problem.dtype == "float64" else (function(x64, w64), 0.0)
                self._pieces.append((images, *found, function(x64.abs(), magnitudes)))

    def errors(self, result: Any, computed: ConvProblem | None = None) -> Errors:
        """The errors of `result`, judged as the arithmetic of the problem `computed`, else of the own problem, rounds."""
        sums = ErrorSums(computed or self.problem)
        for images, reference, rest, magnitude in self._pieces:
            part = result[images]
            if self.channels < self.problem.result_channels:
                part = part.unflatten(1, (self.problem.groups, -1))[:, :, self._chosen].flatten(1, 2)
            sums.add(part.double(), reference, magnitude, rest)
        return sums.errors()


PART_BITS, PARTS = 18, 4  # bits of a part, of a float64's 53 and of the zeros before them in small numbers; and parts


def doubled(torch: Any, function: Callable[[Any, Any], Any], x: Any, w: Any) -> tuple[Any, Any]:
    """The result of `function` for float64 arrays in twice their precision: a float64 array, and the rest that has to be added to it.

    The arrays are cut into parts of 18 bits. Products of two parts have 36 bits, and sums of some thousands of them are exact. cuDNN is
    not used, as its transforms round.
    """

    def parts(array: Any) -> list[Any]:
        found, step = [], 2.0 ** (math.ceil(math.log2(float(array.abs().max()) or 1.0)) - PART_BITS)
        for _ in range(PARTS):
            found.append((array / step).round() * step)
            array, step = array - found[-1], step / 2**PART_BITS
        return found

    total, rest = 0.0, 0.0
    of_x, of_w = parts(x), parts(w)
    with cudnn_set(torch, "enabled", False):
        for i in range(PARTS):
            for j in range(PARTS - i):
                term = function(of_x[i], of_w[j])
                added = total + term
                shown = added - total
                rest, total = rest + ((total - (added - shown)) + (term - shown)), added
    return total, rest
