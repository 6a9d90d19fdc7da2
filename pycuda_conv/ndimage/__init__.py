"""Filters with the signatures of :mod:`scipy.ndimage`, for arrays of numpy, CuPy, torch, PyCUDA and dask.

They differ from scipy's in this: sums are float32 for images of float32 and of 8 and 16 bits; integers are rounded to the nearest and
clipped, once, where scipy truncates after each pass and lets them wrap; float16 is taken. :doc:`/howto/scipy` has the whole list.
"""

from pycuda_conv import signal
from pycuda_conv.ndimage.filters import (
    convolve,
    convolve1d,
    correlate,
    correlate1d,
    gaussian_filter,
    gaussian_filter1d,
    gaussian_gradient_magnitude,
    gaussian_laplace,
    laplace,
    prewitt,
    sobel,
    uniform_filter,
    uniform_filter1d,
)

__all__ = [
    "convolve", "convolve1d", "correlate", "correlate1d", "gaussian_filter", "gaussian_filter1d", "gaussian_gradient_magnitude",
    "gaussian_laplace", "laplace", "prewitt", "signal", "sobel", "uniform_filter", "uniform_filter1d",
]  # fmt: skip
