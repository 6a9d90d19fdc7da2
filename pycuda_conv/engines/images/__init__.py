"""Launches of the kernels for images in ``cu/images``: separable filters, dense filters of few taps."""
