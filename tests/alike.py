"""What the tests of several engines do alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import emulator
import numpy as np
import simt
from reference import ACTIVATIONS, EPS, Case, activated, assert_close, assert_exact
from test_implicit_gemm import Arrays, asked, check_on_gpu, dtype_of

from pycuda_conv import ConvProblem
from pycuda_conv.tools import families


def first_runs(runs: Iterable[tuple], text_of: Callable[..., tuple]) -> list:
    """The first run of each text and of each case."""
    found, met = [], set()
    for run in runs:
        new = {text_of(*run), str(run[0])} - met
        met |= new
        found += [run] if new else []
    return found


def sharing(options: Iterable[Sequence[tuple]], problem_of: Callable[..., ConvProblem] = asked) -> list[tuple]:
    """Of each case one of its runs (case, mode, configuration): that with the most modes, configurations and values of defines that are new, else one whose texts others have, too."""
    met, compiled, found = set(), set(), []
    for runs in options:
        best = None
        for run in runs:
            launches = [launch for step in emulator.program_of(problem_of(*run[:2]), run[2], 3).whole for launch in step]
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


def check_epilogue(case: Case, mode: str, config: Any, activations: Sequence = ACTIVATIONS) -> None:
    """Bias, scale, residual and ReLU; then each activation, with a residual and without: on the simulated machine."""
    problem = replace(asked(case, mode), has_scale=True, has_residual=True, activation="relu")
    rng, dtype, k = np.random.default_rng(1), dtype_of(mode), (case.channels,)
    x, w, b, s, r = (rng.integers(-3, 4, shape).astype(dtype) for shape in (case.input_shape, case.weight_shape, k, k, problem.result_shape))
    ref = case.reference(x, w) * s.astype(float)[:, None, None] + b.astype(float)[:, None, None] + r.astype(float)
    assert_exact(simt.computed(problem, config, x, w, b, s, r, seeds=(1,)), np.maximum(ref, 0))
    w = w / w.dtype.type(32)
    for i, activation in enumerate(activations):
        problem = replace(asked(case, mode), has_residual=i % 2 == 0, activation=activation)
        also = r if problem.has_residual else None
        before = case.reference(x, w, b) + (0 if also is None else also.astype(float))
        got, ref = simt.computed(problem, config, x, w, b, None, also, seeds=(1,)), activated(before, activation)
        assert_close(got, ref, 2.0**-20 * np.abs(before) + EPS[dtype] * np.abs(ref) + 2.0**-22, activation)


def random_problems(
    r: random.Random, of: Sequence[str], each: int, kinds: Sequence[tuple[str, tuple[str, str, str]]]
) -> Iterator[ConvProblem]:
    """So many layers of each family in these directions, types, precisions and layouts, as they are launched; but for those that have no such direction."""
    for family in of:
        for _ in range(each):
            layer = families.layer(r, family)
            for direction, kind in kinds:
                try:
                    problem = families.problem(layer, direction, *kind).launched
                except ValueError:
                    continue
                yield problem


def check_numbers_on_gpu(torch: Any, plan: Any, case: Case, mode: str) -> None:
    """Integers are exact, random data within the bound."""
    if dtype_of(mode) == "float32":
        check_on_gpu(torch, plan, case, mode)
        return
    arrays = case.integers(dtype_of(mode))
    assert_exact(Arrays(torch, plan, *arrays).launch(), case.reference(*arrays), plan)
    arrays = case.normals(dtype_of(mode))
    ref = case.reference(*arrays)
    assert_close(Arrays(torch, plan, *arrays).launch(), ref, case.bound(*arrays, ref), plan)
