"""One filter call: types, complex numbers, the place of the result. :mod:`.launches` makes launches of what is left."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pycuda_conv.arrays import LAZY, kind_of
from pycuda_conv.engines.images.window import CODES
from pycuda_conv.ndimage import launches
from pycuda_conv.ndimage.launches import Bench, Dense, Join, Term, sums_of
from pycuda_conv.ndimage.spaces import INTEGERS, PARTS, Space, as_array, space_of
from pycuda_conv.numbers import complex_numbers
from pycuda_conv.runtime import get_device, pycuda_device

#: What float32 sums serve.
NARROW = {"bool", "uint8", "int8", "uint16", "int16", "float16", "bfloat16", "float32"}


class Call(NamedTuple):
    """What a call asks besides its filter.

    Attributes
    ----------
    space, x
        The operations on the input's kind of array, and the input.
    output
        A dtype, an array or None, as scipy takes it.
    value : complex
        Of pixels outside, where the border is constant.
    device, stream
        As the caller gave them.
    rounding : {"nearest", "scipy"}
    """

    space: Space
    x: Any
    output: Any = None
    value: Any = 0.0
    device: Any = None
    stream: Any = None
    rounding: str = "nearest"


def called(input: Any, output: Any, value: Any, device: Any, stream: Any, rounding: str = "nearest") -> Call | None:
    """The call, checked; None for a dask array, which is divided into chunks first."""
    input = as_array("input", input)
    kind = kind_of("input", input)
    if rounding not in ("nearest", "scipy"):
        raise ValueError(f"rounding must be 'nearest' or 'scipy', got {rounding!r}")
    if not np.isscalar(value) and getattr(value, "shape", True):
        raise TypeError(f"cval must be a number, got {value!r}")
    if kind is LAZY:
        return None
    return Call(space_of(kind), input, output, value, device, stream, rounding)


def run(call: Call, terms: Callable[[Any], Sequence[Term]], weights: Sequence[Any] = (None,), norm: bool = False) -> Any:
    """The sum of a filter's terms, or the root of the sum of their squares.

    Parameters
    ----------
    call : Call
    terms : callable
        Makes the terms of one of `weights`.
    weights : sequence
        The real filter, or the real and the imaginary part of a complex one.
    norm : bool
        Whether terms are squared.
    """
    space, x = call.space, call.x
    input = space.dtype(x)
    complex_output = input in PARTS or len(weights) == 2
    want = wanted(call, input, complex_output)
    target = call.output if is_array(call.output) else None
    if target is not None and kind_of("output", target) is not space.kind:
        raise TypeError(f"input is a {space.kind.name} but output is a {kind_of('output', target).name}; pass arrays of one kind")
    on_gpu = space.kind.on_gpu(x)
    asked = get_device(call.device) if call.device is not None else None if on_gpu else pycuda_device()
    device = space.kind.device(space.kind.signature(x), asked)
    bench = Bench(space, device, call.stream)
    work = _Work(bench, call.rounding, norm)
    if not on_gpu and call.stream is not None:
        raise ValueError(f"stream is for arrays on a GPU, but the input lies in host memory; got stream={call.stream!r}")
    if complex_output:
        made = _complex(work, x, terms, weights, call.value, want)
    else:
        if isinstance(call.value, complex):
            raise ValueError(f"cval must be real where the input is, got {call.value!r}")
        straight = target is not None and space.dtype(target) == want and _can_hold(space, target, x)
        made = work.real(space.contiguous(x), terms(weights[0]), float(call.value), want, target if straight else None)
        if straight:
            return target
    if target is None:
        return made
    space.assign(target, made)
    return target


def is_array(output: Any) -> bool:
    """Whether `output` is where the result goes, and no type."""
    return output is not None and not isinstance(output, (str, type, np.dtype)) and hasattr(output, "shape")


def _can_hold(space: Space, target: Any, x: Any) -> bool:
    free = not getattr(x, "requires_grad", False) and not getattr(target, "requires_grad", False)
    if not free or 0 in x.shape or not space.is_contiguous(target) or not space.writeable(target):
        return False
    return not space.overlap(x, target)


def wanted(call: Call, input: str, complex_output: bool) -> str:
    """numpy's name for the result's type, by scipy's rules."""
    output = call.output
    if output is None:
        wanted = np.promote_types(input, np.complex64).name if complex_output else input
    elif is_array(output):
        wanted = call.space.dtype(output)
        if tuple(output.shape) != tuple(call.x.shape):
            raise RuntimeError(f"output shape not correct: it must be that of the input, {tuple(call.x.shape)}, got {tuple(output.shape)}")
    else:
        wanted = str(output).removeprefix("torch.") if type(output).__module__ == "torch" else np.dtype(output).name
        if complex_output and wanted not in PARTS and not isinstance(output, str):
            warnings.warn("promoting specified output dtype to complex", stacklevel=4)
            wanted = np.promote_types(wanted, np.complex64).name
    if complex_output and wanted not in PARTS:
        raise RuntimeError(f"output must have complex dtype, got {wanted}")
    if wanted not in (*NARROW, *INTEGERS, "float64", *PARTS):
        raise RuntimeError(f"output must have numeric dtype, got {wanted}")
    if not complex_output and wanted in PARTS:
        return "float64" if wanted == "complex128" else "float32"
    return wanted


class _Work(NamedTuple):
    """Where and how real filters run."""

    bench: Bench
    rounding: str
    norm: bool

    def real(self, x: Any, terms: Sequence[Term], value: float, want: str, target: Any = None) -> Any:
        """The result of type `want` from real `x` in C order, in `target` if one is given."""
        space, input = self.bench.space, self.bench.space.dtype(x)
        if want in PARTS:
            want = PARTS[want]
        if input not in (*NARROW, *INTEGERS, "float64"):
            raise RuntimeError(f"array type dtype('{input}') not supported")
        sums = "float32" if input in NARROW and want != "float64" else "float64"
        if 0 in x.shape:
            return space.empty(_result_shape(x.shape, terms), want, x)
        if not x.ndim:
            return converted(space, space.cast(x, sums), want, self.rounding)
        x = space.bytes_of(x) if input == "bool" else x
        if sums == "float64" or (input != "bool" and input not in CODES):
            x = space.cast(x, sums)
        straight = want if want == sums or (sums == "float32" and want in CODES and want != "float64") else sums
        if self.rounding == "scipy" and want in INTEGERS:
            straight = sums
        if getattr(x, "requires_grad", False):
            from pycuda_conv.ndimage import gradients

            made = gradients.joined(self.bench, x, terms, value, sums, self.norm)
        else:
            made = self._joined(x, terms, value, straight, target if straight == want else None)
        if target is not None and straight != want:
            space.assign(target, converted(space, made, want, self.rounding))
            return target
        return made if straight == want else converted(space, made, want, self.rounding)

    def _joined(self, x: Any, terms: Sequence[Term], value: float, output: str, target: Any) -> Any:
        if self.bench.backend == "cuda" and not self.bench.space.kind.on_gpu(x):
            from pycuda_conv.ndimage import staged

            def run(on: Bench, there: Any, part: Sequence[Term]) -> Any:
                return self._replace(bench=on)._joined(there, part, value, output, None)

            return staged.joined(self.bench, x, terms, value, output, target, _result_shape(x.shape, terms), run, self.norm)
        made = None
        if len(terms) > 1:
            made = launches.sum_of_terms(self.bench, x, terms, value, output, target, Join(square=self.norm, root=self.norm))
            if made is not None:
                return made
        sums = sums_of(self.bench.space.dtype(x), output)
        for number, term in enumerate(terms):
            last = number == len(terms) - 1
            join = Join(self.norm, made is not None, self.norm and last)
            made = launches.run_term(self.bench, x, term, value, output if last else sums, target if last else None, made, join)
        return made


def _result_shape(shape: Sequence[int], terms: Sequence[Term]) -> tuple[int, ...]:
    """The shape of a filter's result, of which some axes may have another size than the input's."""
    sizes = list(shape)
    for term in terms[:1]:
        resized = zip(term.axes, term.sizes or (), strict=False) if isinstance(term, Dense) else [(one.axis, one.size) for one in term]
        for axis, size in resized:
            sizes[axis] = sizes[axis] if size is None else size
    return tuple(sizes)


def converted(space: Space, made: Any, want: str, rounding: str) -> Any:
    """Sums as numbers of another type; integers are rounded and clipped, or truncated as scipy does."""
    if want == "bool":
        return space.to_bool(made)
    if want not in INTEGERS:
        return space.cast(made, want)
    return space.truncated(made, want) if rounding == "scipy" else space.to_integers(made, want)


def _complex(work: _Work, x: Any, terms: Callable[[Any], Sequence[Term]], weights: Sequence[Any], value: Any, want: str) -> Any:
    """The result of a complex image, a complex filter, or both, from real ones."""
    space, part = work.bench.space, PARTS[want]
    is_complex = space.dtype(x) in PARTS
    if not is_complex and isinstance(value, complex):
        raise ValueError("Cannot provide a complex-valued cval when the input is real.")
    x = space.contiguous(x)
    if is_complex and want == "complex128" and space.dtype(x) != want:
        x = space.cast(x, want)
    own = PARTS[space.dtype(x)] if is_complex else part

    def of(array: Any, filter: Any, value: float) -> Any:
        return work.real(array, terms(filter), float(value), own)

    if len(weights) == 1 and is_complex and not work.norm and x.ndim and (not value or not _is_constant(terms(weights[0]))):
        made = space.joined(of(space.parts(x), weights[0], 0.0))
        return made if space.dtype(made) == want else space.cast(made, want)
    if work.norm:
        alone = work._replace(norm=False)
        each = [_complex(alone, x, partial(_only, term), (None,), value, want) for term in terms(weights[0])]
        return sum(one * one for one in each) ** 0.5

    def of_each(array: Any, filters: Sequence[Any], outside: float) -> list[Any]:
        return [of(array, filter, outside) for filter in filters]

    image: tuple[Any, Any] = (x, None)
    if is_complex:
        pairs = space.parts(x)
        image = space.contiguous(pairs[..., 0]), space.contiguous(pairs[..., 1])
    filter = (weights[0], weights[1] if len(weights) == 2 else None)
    real, imaginary = complex_numbers.product(of_each, image, filter, (np.real(value), np.imag(value)))
    made = space.complex(real, real * 0 if imaginary is None else imaginary)
    return made if space.dtype(made) == want else space.cast(made, want)


def _only(term: Term, _: Any) -> list[Term]:
    return [term]


def _is_constant(terms: Sequence[Term]) -> bool:
    return any("constant" in (term.borders if isinstance(term, Dense) else [one.border for one in term]) for term in terms)
