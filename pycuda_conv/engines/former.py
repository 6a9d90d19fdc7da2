"""The engines' modules by the names that they had before, which older pickles of plans ask for."""

from __future__ import annotations

import sys
from types import ModuleType

from pycuda_conv.engines.base import CLASSES, GONE, Config, Gone

#: Modules of this package that have moved, or whose engines are no more.
MODULES = (
    "columns", "dense_nhwc_sm90", "depthwise_nhwc", "depthwise_planes", "depthwise_toeplitz", "depthwise_wgrad",
    "direct_gemm", "direct_quads", "dmma", "few_channels", "few_channels_wgrad", "few_inputs", "few_pixels_sm90", "gather_nhwc_sm90",
    "gathered_planes_sm90", "grouped_nhwc", "grouped_nhwc_wgrad", "implicit_gemm_sm80", "implicit_gemm_sm90", "library_fft", "lines_sm90",
    "patch_wgrad", "planes_sm90", "pointwise_sm90", "via_nhwc", "wgrad_nhwc_sm90", "direct.quads", "hopper.lines",
)  # fmt: skip


def by_name(name: str) -> type[Config]:
    """The class of configurations that is called so: the ``__getattr__`` of such a module."""
    if name in GONE:
        return Gone
    try:
        return CLASSES[name]
    except KeyError:
        raise AttributeError(f"this module has moved, and no configurations are called {name}") from None


for _name in MODULES:
    _module = sys.modules.setdefault(f"{__package__}.{_name}", ModuleType(f"{__package__}.{_name}"))
    vars(_module)["__getattr__"] = by_name
