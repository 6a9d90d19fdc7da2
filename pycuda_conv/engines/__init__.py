"""The engines, one kernel family each, and the choice between them.

These modules know only forward convolutions and their transposes: they take a problem as it is launched
(:attr:`ConvProblem.launched`). :mod:`~pycuda_conv.engines.base` says what an engine is, :mod:`~pycuda_conv.engines.peers`
lists them, and :mod:`~pycuda_conv.engines.registry` chooses. Their configurations are attributes of this package: ``engines.Gemm``.
"""

from __future__ import annotations

from typing import Any

from pycuda_conv.engines import peers, registry  # noqa: F401 peers fills the registry
from pycuda_conv.engines.base import Config, Gone, GoneError, config_again
from pycuda_conv.engines.compose.bordered import alike, copies
from pycuda_conv.engines.registry import *  # noqa: F403 what its __all__ names
from pycuda_conv.engines.schedule import Schedule

__all__ = ["Config", "Gone", "GoneError", "Schedule", "alike", "config_again", "copies", *registry.__all__]


def __getattr__(name: str) -> Any:
    """The class of configurations named `name`."""
    try:
        return registry.config_classes()[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
