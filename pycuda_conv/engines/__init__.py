"""The engines, one kernel family each, and the choice between them.

The modules of this package know forward convolutions and their transposes only: what they get is a problem as it is launched
(:attr:`ConvProblem.launched`).
"""

from __future__ import annotations

from collections.abc import Hashable

from pycuda_conv.engines import direct, implicit_gemm, implicit_gemm_sm80, lines, pointwise
from pycuda_conv.engines.implicit_gemm import ImplicitGemm
from pycuda_conv.engines.implicit_gemm_sm80 import ImplicitGemm80
from pycuda_conv.engines.lines import Lines
from pycuda_conv.engines.packed import Program, packed_form
from pycuda_conv.engines.pointwise import Pointwise
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import Device

#: A kernel and its tile.
Config = direct.Config | ImplicitGemm | ImplicitGemm80 | Pointwise | Lines

#: The classes of those that run on tensor cores.
TENSOR_CORES = (ImplicitGemm, ImplicitGemm80, Pointwise, Lines)

__all__ = ["TENSOR_CORES", "Config", "Program", "candidates", "choose", "legal", "packing_key", "predictions", "program"]

#: Below so many multiplications, packing costs more than the tensor cores gain: 43 million took 22 us, by direct_gemm.cu 10.
LEAST_MACS = 100e6
NEAR, MOST_NEAR = 1.6, 24  # of the best prediction: what is measured, and how many at the most


def legal(problem: ConvProblem, config: Config, device: Device) -> str | None:
    """Why `config` can't run `problem` on `device`, or None if it can."""
    problem = problem.launched
    if isinstance(config, ImplicitGemm):
        return implicit_gemm.unsupported(device) or implicit_gemm.legal(problem, config)
    if isinstance(config, ImplicitGemm80):
        return implicit_gemm_sm80.unsupported(device) or implicit_gemm_sm80.legal(problem, config)
    if isinstance(config, Pointwise):
        return pointwise.unsupported(device) or pointwise.legal(problem, config)
    if isinstance(config, Lines):
        return lines.unsupported(device) or lines.legal(problem, config)
    return direct.legal(problem, config)


def choose(problem: ConvProblem, device: Device) -> Config:
    """The configuration that should be the fastest for `problem` on `device`."""
    problem = problem.launched
    units = device.multiprocessors
    plain = direct.choose(problem, units, device.backend)
    read_as_is = problem.layout == "NHWC" and problem.itemsize == 2
    if isinstance(plain, direct.Gemm) and (problem.macs >= LEAST_MACS or read_as_is):
        found: list[tuple[float, Config] | None] = []
        if implicit_gemm.unsupported(device) is None:
            found = [implicit_gemm.choose(problem, units), pointwise.choose(problem, units), lines.choose(problem, units)]
        elif implicit_gemm_sm80.unsupported(device) is None:
            found = [implicit_gemm_sm80.choose(problem, units, device.capability)]
        best = min((one for one in found if one), key=lambda one: one[0], default=None)
        if best is not None and best[0] < direct.gemm_time(problem, plain, units):
            return best[1]
    return plain


def predictions(problem: ConvProblem, device: Device) -> list[tuple[float, Config]]:
    """What the models say of every configuration that they know: the microseconds it should take, the fastest first."""
    problem = problem.launched
    units = device.multiprocessors
    found: list[tuple[float, Config]] = [(direct.gemm_time(problem, config, units), config) for config in direct.gemm_configs(problem)]
    if implicit_gemm.unsupported(device) is None:
        if implicit_gemm.why_not(problem) is None:
            found += [(implicit_gemm.time(problem, config, units), config) for config in implicit_gemm.configs(problem)]
        found += [(pointwise.time(problem, config, units), config) for config in pointwise.configs(problem)]
        found += [(lines.time(problem, config, units), config) for config in lines.configs(problem)]
    elif implicit_gemm_sm80.unsupported(device) is None and implicit_gemm_sm80.why_not(problem) is None:
        configs, capability = implicit_gemm_sm80.configs(problem), device.capability
        found += [(implicit_gemm_sm80.time(problem, config, units, capability), config) for config in configs]
    return sorted(((us, config) for us, config in found if legal(problem, config, device) is None), key=lambda pair: pair[0])


def candidates(problem: ConvProblem, device: Device) -> list[Config]:
    """The configurations that are worth measuring for `problem`, the planner's own choice first."""
    problem = problem.launched
    modelled = predictions(problem, device)
    near = [config for us, config in modelled if us <= NEAR * modelled[0][0]][:MOST_NEAR]
    # never without the direct engine's best: the others' results are compared with its
    near += [config for _, config in modelled if isinstance(config, direct.Gemm)][:2]
    return list(dict.fromkeys([choose(problem, device), *near, *direct.unmodelled(problem, device.multiprocessors)]))


def program(problem: ConvProblem, config: Config, device: Device, noted: bool = False) -> Program:
    """The launches of `config` for `problem` on `device`; a ``ValueError`` if it can't run it.

    With `noted` they note the moments of the result, if they can: see :attr:`Program.moments`.
    """
    reason = legal(problem, config, device)
    if reason:
        raise ValueError(f"{config} can't run {problem}: {reason}")
    problem = problem.launched
    if isinstance(config, ImplicitGemm):
        return implicit_gemm.program(problem, config, device.multiprocessors, noted)
    if isinstance(config, ImplicitGemm80):
        return implicit_gemm_sm80.program(problem, config, device.multiprocessors)
    if isinstance(config, Pointwise):
        return pointwise.program(problem, config, device.multiprocessors, noted)
    if isinstance(config, Lines):
        return lines.program(problem, config, device.multiprocessors)
    stages, workspace_bytes = direct.stages(problem, config)
    return Program([], stages, stages, workspace_bytes, 0)


def packing_key(problem: ConvProblem, config: Config) -> Hashable:
    """Equal for plans that pack a filter alike, whatever their images; None where the filter is read as it is."""
    if not isinstance(config, TENSOR_CORES):
        return None
    problem = problem.launched
    if isinstance(config, Pointwise):
        return "split", problem.direction, problem.precision, problem.C, problem.K
    if isinstance(config, Lines):
        return "laid", problem.direction, problem.C, problem.K, problem.filter_size, *lines.packed_as(problem, config)
    packed, _ = packed_form(problem, windows=isinstance(config, ImplicitGemm))
    asked = problem.direction, problem.dtype, problem.precision, problem.C, problem.K, problem.groups, problem.filter_size
    return (*asked, packed.folded, packed.group, packed.load, packed.taps, packed.window and packed.window.shift)
