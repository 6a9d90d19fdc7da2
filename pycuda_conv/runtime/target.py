"""A GPU that is not in this machine: plans are made and kernels compiled for it, but nothing runs on it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from pycuda_conv.errors import BackendError
from pycuda_conv.runtime.base import Device, KernelLaunch, Launcher

#: Multiprocessors of the most common GPU of each compute capability.
MULTIPROCESSORS = {(7, 5): 40, (8, 0): 108, (8, 6): 84, (8, 9): 128, (9, 0): 132, (10, 0): 148, (12, 0): 170}
MODELS = {(9, 0): "NVIDIA H200"}


class Target(Device):
    """A GPU by its architecture.

    Parameters
    ----------
    architecture : str
        The name that compilers use: ``"sm_90a"``, ``"sm_80"``.
    """

    backend = "cuda"

    def __init__(self, architecture: str) -> None:
        found = re.fullmatch(r"sm_(\d+)(\d)a?", architecture)
        if not found or (int(found[1]), int(found[2])) < (5, 0):
            raise BackendError(f"a GPU's architecture is sm_ and its compute capability, as in sm_90a, got {architecture!r}")
        self.name = architecture
        self.capability = int(found[1]), int(found[2])
        self.multiprocessors = MULTIPROCESSORS.get(self.capability, 100)
        self.model = MODELS.get(self.capability, "")

    def arch(self, launch: KernelLaunch) -> str:
        """The target that a launch's kernel is compiled for."""
        return launch.arch or "sm_{}{}".format(*self.capability)

    def launcher(self, step: KernelLaunch) -> Launcher:
        raise NotImplementedError(f"{self.name} is not here")

    def update_host_arrays(
        self, launch: Launcher, inputs: Sequence[np.ndarray | None], outs: Sequence[np.ndarray | None], workspace: int
    ) -> None:
        raise NotImplementedError(f"{self.name} is not here")

    def __exit__(self, *exc: Any) -> None:
        pass
