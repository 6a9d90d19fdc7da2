"""The engine of Fourier transforms."""

from pycuda_conv.engines.former import by_name as __getattr__  # noqa: F401 a module of this name had configurations
