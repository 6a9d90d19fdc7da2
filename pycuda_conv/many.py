"""The public functions of streams of inputs, as a data loader gives them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pycuda_conv.arguments import integer
from pycuda_conv.arrays import NumpyKind, kind_of
from pycuda_conv.errors import ConvArgumentError, brief
from pycuda_conv.ops import conv1d, conv2d, conv3d
from pycuda_conv.runtime import bound_to_thread
from pycuda_conv.typing import Array


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

            def begun(one: Any) -> Future[Any]:
                if isinstance(kind_of("an input", one), NumpyKind) and not bound_to_thread():
                    return pool.submit(function, one, *args, **options)
                # launches don't wait, and streams, torch's modes and PyCUDA's contexts are those of the caller's thread
                made: Future[Any] = Future()
                made.set_result(function(one, *args, **options))
                return made

            def calls() -> Iterator[Future[Any]]:
                try:
                    for one in inputs:
                        yield begun(one)
                except Exception as error:  # it is raised behind the results of the inputs before it
                    failed: Future[Any] = Future()
                    failed.set_exception(error)
                    yield failed

            try:
                for call in calls():
                    coming.append(call)
                    if len(coming) > ahead:
                        yield coming.popleft().result()
                while coming:
                    yield coming.popleft().result()
            finally:
                for future in coming:
                    future.cancel()

    return results()


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
        The results, in the order of the inputs. An exception in the iterable or in a call ends the stream, behind the results of the
        inputs before it.

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
