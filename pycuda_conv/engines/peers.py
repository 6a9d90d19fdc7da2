"""All engines: the modules in the folders of families that have configurations."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from pycuda_conv.engines import registry
from pycuda_conv.engines.base import Engine, complete

#: The folders, in the order in which engines are asked.
FAMILIES = "depthwise", "fft", "direct", "mma", "hopper", "compose"


def found() -> Iterator[Engine]:
    """The modules that have ``CONFIGS``, by family and name."""
    for family in FAMILIES:
        package = import_module(f"pycuda_conv.engines.{family}")
        for name in sorted(module.name for module in iter_modules(package.__path__)):
            module = import_module(f"{package.__name__}.{name}")
            if hasattr(module, "LAYOUTS"):
                yield complete(module)


#: Among equal predictions that of the first engine wins. One that has a rule stands before those whose rules it beats.
registry.ENGINES = tuple(sorted(found(), key=lambda engine: -engine.PRECEDENCE))
registry.TRANSFORMS = tuple(engine for engine in registry.ENGINES if registry.name_of(engine).startswith("fft."))
