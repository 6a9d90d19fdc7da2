"""Engines on plain cores, whose kernels run on OpenCL too."""
