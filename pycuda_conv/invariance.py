"""Results that do not depend on the batch: the option of calls, and the block in which all calls have it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from pycuda_conv.errors import ConvArgumentError, brief

#: The word for it among the algorithms of a problem.
WORD = "batch_invariant"

#: Whether calls of this thread or task are made inside a block of :func:`batch_invariant`.
_inside: ContextVar[bool] = ContextVar("batch_invariant", default=False)
#: How many such blocks there are, of all threads. Without one nobody looks at the ContextVar, which torch.compile can't trace.
blocks = 0
_lock = threading.Lock()


@contextmanager
def batch_invariant(enabled: bool = True) -> Iterator[None]:
    """Inside the block an image's result has the same bits whatever images stand beside it, however many, and at whichever place.

    All calls of the package's functions that a thread or task makes in the block are computed so: convolutions, transposed ones and
    gradients by the input, on arrays of every kind. Gradients that torch computes later of calls in the block are, too. The option
    ``batch_invariant=True`` of a function asks the same of one call, and ``ConvProblem(..., algorithm="batch_invariant")`` of a plan.

    The kernel, its tile and the order of its sums follow from the layer and the image's size alone then, not from the number of images. On
    one kind of GPU the bits do not depend on what is compiled already, or on the memory that is free, either.

    Parameters
    ----------
    enabled : bool
        False makes calls in the block ordinary ones again.

    Notes
    -----
    It costs what the fastest kernel for the batch gains over the one that serves all batches. Large filters of several channels are not
    transformed. Other GPUs, and OpenCL, have bits of their own. Gradients by the filter and by the bias sum over the images, so they
    depend on all of them; so do statistics of a batch, and with them fused layers and batch normalisations in training. Fused layers in
    evaluation, and compiled models' convolutions with what is fused to them, are covered: ``options={"batch_invariant": True}`` asks the
    backend of ``torch.compile`` for it. torch's ``use_deterministic_algorithms`` promises less: the same bits for the same batch.

    Examples
    --------
    >>> import numpy as np, pycuda_conv as pc
    >>> x, w = np.random.rand(5, 8, 20, 20).astype("f"), np.random.rand(16, 8, 3, 3).astype("f")
    >>> with pc.batch_invariant():
    ...     together, alone = pc.conv2d(x, w), pc.conv2d(x[3:4], w)
    >>> bool((together[3:4] == alone).all())
    True
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled must be True or False, got {brief(enabled)}")
    global blocks
    with _lock:
        blocks += 1
    token = _inside.set(enabled)
    try:
        yield
    finally:
        _inside.reset(token)
        with _lock:
            blocks -= 1


def checked_invariance(batch_invariant: Any) -> bool:
    """The option `batch_invariant`, which must be a bool."""
    if not isinstance(batch_invariant, bool):
        raise TypeError(f"batch_invariant must be True or False, got {brief(batch_invariant)}")
    return batch_invariant


def with_invariance(algorithm: Any, asked: Any) -> Any:
    """The algorithm of a call that gives it, and the option `batch_invariant`.

    Raises
    ------
    TypeError, ConvArgumentError
        An option that is no bool, or transforms, whose blocks are chosen by the number of images.
    """
    if asked is False and not (blocks and _inside.get()):
        return algorithm
    checked_invariance(asked)
    if algorithm is None or algorithm == "direct":
        return WORD
    if asked and algorithm == "fft":
        raise ConvArgumentError("algorithm='fft' and batch_invariant=True exclude each other: a batch decides how images are transformed")
    return algorithm
