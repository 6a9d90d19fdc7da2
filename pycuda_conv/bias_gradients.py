"""The public functions that sum a gradient over all but its channels. They need no plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from pycuda_conv.dispatch import sum_channels
from pycuda_conv.typing import Array, DType

if TYPE_CHECKING:
    import numpy as np


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
    return sum_channels(2, grad_output, device, stream)


@overload
def conv1d_bias(grad_output: np.ndarray[Any, DType], *, device: Any = None, stream: Any = None) -> np.ndarray[tuple[int], DType]: ...
@overload
def conv1d_bias(grad_output: Array, *, device: Any = None, stream: Any = None) -> Array: ...
def conv1d_bias(grad_output: Any, *, device: Any = None, stream: Any = None) -> Any:
    """The gradient of a bias of :func:`conv1d`, from an array of shape (N, K, Q) or (K, Q): see :func:`conv2d_bias`."""
    return sum_channels(1, grad_output, device, stream)


@overload
def conv3d_bias(grad_output: np.ndarray[Any, DType], *, device: Any = None, stream: Any = None) -> np.ndarray[tuple[int], DType]: ...
@overload
def conv3d_bias(grad_output: Array, *, device: Any = None, stream: Any = None) -> Array: ...
def conv3d_bias(grad_output: Any, *, device: Any = None, stream: Any = None) -> Any:
    """The gradient of a bias of :func:`conv3d`, from an array of shape (N, K, O, P, Q) or (K, O, P, Q): see :func:`conv2d_bias`."""
    return sum_channels(3, grad_output, device, stream)
