"""What every device offers, and the words in which work is handed to it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

#: Launches one prepared kernel: (buffers, stream) -> None.
Launcher = Callable[[Sequence[Any], Any], None]

_HERE = Path(__file__).resolve().parent.parent
#: Where the kernels lie: inside an installed package, or beside it in a checkout.
KERNEL_DIR = _HERE / "cu" if (_HERE / "cu").is_dir() else _HERE.parent / "cu"


@dataclass(frozen=True)
class Step:
    """One kernel launch, but for the addresses of the arrays.

    Attributes
    ----------
    kernel : str
        The kernel's name and, with ``.cu``, its file in ``cu/``.
    defines : mapping of str to int
        What the kernel is specialised by. ``DTYPE`` and ``INDEX_64`` among them.
    grid, block : int
        Blocks, and threads a block.
    buffers : tuple of int
        Which of the plan's buffers the kernel takes, in order: an index into (input, weight, bias, result, workspace).
    scalars : tuple of int
        64-bit integers passed after the buffers.
    """

    kernel: str
    defines: Mapping[str, int]
    grid: int
    block: int
    buffers: tuple[int, ...]
    scalars: tuple[int, ...]

    def source(self) -> str:
        """The kernel's text behind a prelude of its defines; compilers still report the file's own lines."""
        first = ("DTYPE", "INDEX_64")  # these shape the dialect's header; the others would collide with system headers
        lines = [f"#define {name} {self.defines[name]}" for name in first]
        lines.append('#include "portable.cuh"')
        lines += [f"#define {name} {value}" for name, value in self.defines.items() if name not in first]
        lines.append(f'#line 1 "cu/{self.kernel}.cu"')
        return "\n".join(lines) + "\n" + _text(self.kernel)


@cache
def _text(kernel: str) -> str:
    return (KERNEL_DIR / f"{kernel}.cu").read_text()


class Device(AbstractContextManager["Device"]):
    """A device that runs steps. Used as a context manager, it is current inside the block."""

    #: "cuda" or "opencl"
    backend: str
    #: As `device=` names it.
    name: str
    multiprocessors: int

    @abstractmethod
    def launcher(self, step: Step) -> Launcher:
        """Compile `step`'s kernel, or find it compiled, and bind all but the buffers and the stream."""

    def stage_launcher(self, steps: Sequence[Step]) -> Launcher:
        """One launcher for steps that don't depend on each other."""
        launchers = [self.launcher(step) for step in steps]
        if len(launchers) == 1:
            return launchers[0]

        def launch(buffers: Sequence[Any], stream: Any) -> None:
            for one in launchers:
                one(buffers, stream)

        return launch

    def run_on_host_arrays(
        self, launch: Launcher, inputs: Sequence[np.ndarray | None], out: np.ndarray, workspace: int, stream: Any
    ) -> None:
        """Call `launch` with buffers (inputs, result, workspace), the inputs being C-contiguous; fill `out`.

        For devices that share the host's memory; for others :mod:`pycuda_conv.host` moves the arrays.
        """
        raise NotImplementedError
