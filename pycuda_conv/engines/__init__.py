"""The engines, one kernel family each, and the choice between them."""

from __future__ import annotations

from pycuda_conv.engines import direct, implicit_gemm
from pycuda_conv.engines.implicit_gemm import ImplicitGemm, Program
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import Device

#: A kernel and its tile.
Config = direct.Config | ImplicitGemm

__all__ = ["Config", "Program", "choose", "legal", "program"]


def legal(problem: ConvProblem, config: Config, device: Device) -> str | None:
    """Why `config` can't run `problem` on `device`, or None if it can."""
    if isinstance(config, ImplicitGemm):
        return implicit_gemm.unsupported(device) or implicit_gemm.legal(problem, config)
    return direct.legal(problem, config)


def choose(problem: ConvProblem, device: Device) -> Config:
    """The configuration that should be the fastest for `problem` on `device`."""
    plain = direct.choose(problem, device.multiprocessors, device.backend)
    if isinstance(plain, direct.Gemm) and implicit_gemm.unsupported(device) is None:
        found = implicit_gemm.choose(problem, device.multiprocessors)
        if found is not None and found[0] < direct.gemm_time(problem, plain, device.multiprocessors):
            return found[1]
    return plain


def program(problem: ConvProblem, config: Config, device: Device) -> Program:
    """The launches of `config` for `problem` on `device`; a ``ValueError`` if it can't run it."""
    reason = legal(problem, config, device)
    if reason:
        raise ValueError(f"{config} can't run {problem}: {reason}")
    if isinstance(config, ImplicitGemm):
        return implicit_gemm.program(problem, config, device.multiprocessors)
    stages, workspace_bytes = direct.stages(problem, config)
    return Program([], stages, workspace_bytes, 0)
