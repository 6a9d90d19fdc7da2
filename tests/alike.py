"""What the tests of several engines do alike."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import simt
from modes import H200, asked, dtype_of, program_of
from reference import ACTIVATIONS, EPS, Case, activated, assert_close, assert_exact, covering, nvcc_of, spills

from pycuda_conv import ConvProblem, engines
from pycuda_conv.runtime.base import kernel_file
from pycuda_conv.tools import families


def paired(runs: Iterable[tuple]) -> list[tuple]:
    """As many runs as have each case in each of its modes, and each configuration in each of them."""
    found, met = [], set()
    for case, mode, config in runs:
        new = {(case, mode), (mode, config)} - met
        met |= new
        found += [(case, mode, config)] if new else []
    return found


def sharing(options: Iterable[Sequence[tuple]], problem_of: Callable[..., ConvProblem] = asked) -> list[tuple]:
    """Of each case one of its runs (case, mode, configuration).

    It is that with the most modes, configurations and values of defines that are new, else one whose texts others have, too.
    """
    met, compiled, found = set(), set(), []
    for runs in options:
        best = None
        for run in runs:
            launches = [launch for step in program_of(problem_of(*run[:2]), run[2]).whole for launch in step]
            texts = {(launch.kernel, *launch.defines.items()) for launch in launches}
            values = {run[1], str(run[2]), *((launch.kernel, *define) for launch in launches for define in launch.defines.items())}
            better = len(values - met), -len(texts - compiled)
            if best is None or better > best[0]:
                best = better, run, values, texts
        if best is not None:
            _, run, values, texts = best
            found.append(run)
            met |= values
            compiled |= texts
    return found


def check_epilogue(
    case: Case, mode: str, config: Any, activations: Sequence = ACTIVATIONS, computed: Callable[..., np.ndarray] = simt.computed
) -> None:
    """Bias, scale, residual and ReLU; then each activation with some of them: simulated, or as `computed` does."""
    case = replace(case, bias=True)
    problem = replace(asked(case, mode), has_scale=True, has_residual=True, activation="relu")
    rng, dtype, k = np.random.default_rng(1), dtype_of(mode), (case.channels,)
    x, w, b, s, r = (
        rng.integers(-3, 4, shape).astype(dtype) for shape in (case.input_shape, case.weight_shape, k, k, problem.result_shape)
    )

    def before(b, s, r):
        of_channel = [None if one is None else one.astype(float).reshape(-1, *(1,) * case.ndim) for one in (s, b)]
        y = case.reference(x, w) * (1 if s is None else of_channel[0])
        return y + sum(one.astype(float) for one in (of_channel[1], r) if one is not None)

    assert_exact(computed(problem, config, x, w, b, s, r, seeds=(1,)), np.maximum(before(b, s, r), 0))
    w = w / w.dtype.type(32)
    for i, activation in enumerate(activations, case.channels):  # other parts for other cases
        some = [one if there else None for one, there in ((b, i % 4 < 3), (s, i % 3 == 1), (r, i % 2 == 0))]
        problem = replace(asked(case, mode), has_bias=i % 4 < 3, has_scale=i % 3 == 1, has_residual=i % 2 == 0, activation=activation)
        ref = activated(exact := before(*some), activation)
        got = computed(problem, config, x, w, *some, seeds=(1,))
        assert_close(got, ref, 2.0**-20 * np.abs(exact) + EPS[dtype] * np.abs(ref) + 2.0**-22, activation)


def random_problems(
    r: random.Random, of: Sequence[str], each: int, kinds: Sequence[tuple[str, tuple[str, str, str]]]
) -> Iterator[ConvProblem]:
    """So many layers of each family in these directions, types, precisions and layouts, where they have them, as they are launched."""
    for family in of:
        for _ in range(each):
            layer = families.layer(r, family)
            for direction, kind in kinds:
                try:
                    problem = families.problem(layer, direction, *kind).launched
                except ValueError:
                    continue
                yield problem


def like_h200(capability: tuple[int, int], backend: str) -> Any:
    """A device with an H200's figures, of another capability or backend."""
    return type(H200)(**{**vars(H200), "capability": capability, "backend": backend})


def check_refused(legal, build, problem, config, reason: str) -> None:
    """`legal` gives the reason, and `build` raises with it."""
    assert reason in legal(problem, config)
    with pytest.raises(ValueError, match="can't run") as raised:
        build(problem, config)
    assert reason in str(raised.value) and str(problem) in str(raised.value)


def check_refused_on(device: Any, problem: ConvProblem, config: Any, reason: str) -> None:
    """`engines` says why a configuration cannot run a problem there, and raises with it."""
    check_refused(lambda *given: engines.refusal(*given, device), lambda *given: engines.schedule(*given, device), problem, config, reason)


#: Defines whose defaults stand elsewhere.
OTHERWISE = {"DTYPE", "INDEX_64", "TWIN"}


def check_steps(program, kernel: str) -> None:
    """The arguments are those of the kernel's struct, and every define is one that the kernel's file gives a default."""
    for step in (step for stage in (*program.prepare, *program.steps, *program.whole, *(program.filter_last or ())) for step in stage):
        text = kernel_file(step.file or step.kernel).read_text()
        defaults = set(re.findall(r"^#define (\w+) -?\d+", re.split(r"^#endif", text, maxsplit=1, flags=re.M)[0], re.M))
        assert set(step.defines) - OTHERWISE <= defaults or step.kernel == "direct_gemm"
        if step.kernel == kernel:
            phases = step.defines.get("PHASES", 1)
            mends = kernel == "hopper_gemm" and step.defines["OUT"] == 32 and not step.defines["BF16"]
            d = step.defines
            joins = kernel == "hopper_gemm" and d["OUT"] == 32 and not (d["BF16"] or d["PINGPONG"])  # its text may add parts
            repeats = phases > 1 and kernel in ("hopper_gemm", "hopper_dense")
            structs = phases + repeats + d.get("FLIPPED", 0)  # how phases are repeated, or tiles stored
            assert (
                len(step.structs) == structs + (phases + 1 if mends else 0) + joins
                and set(step.defines) - OTHERWISE == defaults
                and step.source()
            )
        assert all(isinstance(v, int) and -(2**63) <= v < 2**63 for v in step.numbers)


def check_compiled(steps: dict, most: int = 0, most_sm80: int | None = None) -> None:
    """`steps`: steps, and what each is for; some are compiled for all. A kernel may spill `most` bytes, on sm_80 `most_sm80` if given."""
    what_for = {id(step): what for step, what in steps.values()}
    chosen = covering([step for step, _ in steps.values()])
    done = nvcc_of([(step.source(), step.arch or "sm_90") for step in chosen])
    wrong = []
    for step, result in zip(chosen, done, strict=True):
        said, found = result.stderr, spills(result.stderr)
        allowed = most_sm80 if step.arch == "sm_80" and most_sm80 is not None else most
        if result.returncode or not found or max(found) > allowed or re.search(r"warning|C75(08|10|15|17)|setmaxnreg", said, re.I):
            wrong.append(f"{what_for[id(step)]}: {step.arch} {dict(step.defines)}\n{said[-800:]}")
    assert not wrong, "\n".join(wrong)


def moments(problem: ConvProblem, config, *arrays) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
    """The result of launches that note moments, each channel's mean and variance by them, and whether results were computed again since."""
    program = program_of(problem, config, 5, True)
    noted, memory = program.moments, simt.Memory(problem, program, *arrays)
    simt.run(program.whole, memory, 1)
    slices = noted.sets * -(-noted.span // noted.per)
    parts = memory.view((simt.WORKSPACE, noted.parts), "float32")[: slices * 2 * noted.channels].reshape(slices, 2, -1).astype(float)
    count = np.minimum(noted.per, noted.span - np.arange(slices) % (slices // noted.sets) * noted.per)[:, None]
    mean = (count * parts[:, 0]).sum(0) / count.sum()
    variance = (parts[:, 1] + count * (parts[:, 0] - mean) ** 2).sum(0) / count.sum()
    redone = memory.view((simt.WORKSPACE, noted.redone), "int32")[: noted.blocks]
    return memory.result(problem, arrays[0].dtype.name), mean, variance, bool(redone.any())


def check_moments(problem: ConvProblem, config, *arrays) -> None:
    """For a batch norm: they are the result's own."""
    y, mean, variance, redone = moments(problem, config, *arrays)
    y = y.astype(float).swapaxes(0, 1).reshape(len(mean), -1)
    scale = np.sqrt((y**2).mean(1))
    assert (np.abs(mean - y.mean(1)) <= 1e-6 * scale).all() and (np.abs(variance - y.var(1)) <= 1e-6 * scale**2).all()
    assert not redone
