"""Engines on plain cores, whose kernels run on OpenCL too."""

from pycuda_conv.engines.former import by_name as __getattr__  # noqa: F401 a module of this name had configurations
