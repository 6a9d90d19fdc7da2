"""What the tests of several engines do alike."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import emulator
import numpy as np
import simt
import truncation
from reference import ACTIVATIONS, EPS, Case, activated, assert_close, assert_exact
from test_implicit_gemm import H200, Arrays, asked, bound, check_on_gpu, dtype_of, side_by_side
from test_kernels import check_refused

from pycuda_conv import ConvProblem, Plan, engines
from pycuda_conv.runtime.base import KERNEL_DIR
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


def check_integers(case: Case, mode: str, config: Any, seeds: Sequence[int] = (1, 2), **options: Any) -> None:
    """Small integers are exact, on the simulated machine."""
    arrays = case.integers(dtype_of(mode))
    assert_exact(simt.computed(asked(case, mode), config, *arrays, seeds=seeds, **options), case.reference(*arrays), config)


def check_normals(case: Case, mode: str, config: Any) -> None:
    """Random data stay within the bound, on the simulated machine."""
    arrays = case.normals(dtype_of(mode), seed=1)
    ref = case.reference(*arrays)
    assert_close(simt.computed(asked(case, mode), config, *arrays, seeds=(1,)), ref, bound(case, mode, *arrays, ref), config)


def bits_by_order(engine: Any, case: Case, mode: str, configs: Iterable[Any]) -> dict[Any, set[bytes]]:
    """The results of some configurations on the simulated machine, by their orders of sums."""
    arrays, found = case.normals(dtype_of(mode), seed=3), {}
    for config in configs:
        order = engine.sum_order(asked(case, mode), config)
        found.setdefault(order, set()).add(simt.computed(asked(case, mode), config, *arrays, seeds=(1,)).tobytes())
    return found


def check_no_bias(three_products: Callable[[np.ndarray, np.ndarray, float], np.ndarray], file: str, depth: int) -> None:
    """A kernel's sums of three products are too small by themselves, and are not with the LOST that its text gives back."""
    lost, rng = float(re.search(r"LOST = ([\d.e-]+)f", (KERNEL_DIR / file).read_text())[1]) * 16 / 15, np.random.default_rng(depth)
    x, w = (rng.standard_normal((depth, 64)).astype(np.float32).astype(np.float64) for _ in range(2))
    found, error = truncation.shrinkage(three_products(x, w, lost), x.T @ w)
    before, _ = truncation.shrinkage(three_products(x, w, 0), x.T @ w)
    assert abs(found) < 1e-8 + 4 * error and before < -3e-8, (found, error, before)


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


def like_h200(capability: tuple[int, int], backend: str) -> Any:
    """A device with an H200's figures, of another capability or backend."""
    return type(H200)(**{**vars(H200), "capability": capability, "backend": backend})


def check_needs_ampere(problem: ConvProblem, config: Any) -> None:
    """A configuration runs on Ampere and Blackwell too, but on no older GPU."""
    for capability, backend, runs in (((8, 0), "cuda", True), ((10, 0), "cuda", True), ((7, 5), "cuda", False), ((0, 0), "opencl", False)):
        assert (engines.refusal(problem, config, like_h200(capability, backend)) is None) == runs, (capability, backend)


def check_refused_on(device: Any, problem: ConvProblem, config: Any, reason: str) -> None:
    """`engines` says why a configuration cannot run a problem there, and raises with it."""
    check_refused(lambda *given: engines.refusal(*given, device), lambda *given: engines.schedule(*given, device), problem, config, reason)


def check_choices_of_planes(engine: Any, problems: Iterable[ConvProblem]) -> None:
    """Of 1x1 layers: what is chosen is legal, each candidate is one launch, and its text is listed."""
    listed, met = list(engine.variants(H200)), 0
    for problem in problems:
        if engine.why_not(problem):
            assert engine.choose(problem, H200) is None, problem
            continue
        met += 1
        found = list(engine.configs(problem, H200))
        assert engine.choose(problem, H200)[1] in found and all(engine.refusal(problem, config) is None for config in found), problem
        for config in found:
            ((launch,),) = engine.schedule(problem, config, H200).whole
            assert any(launch in one for one in listed), launch.defines
    assert met > 10, met


def plans_of(name: str, runs: Iterable[tuple]) -> dict:
    """The plans of all runs (case, mode, configuration) on a GPU, by the runs' words."""
    return side_by_side(name, lambda run: Plan(asked(*run[:2]), "cuda", config=run[2]), runs)


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
