"""What the planner remembers, or leaves out because it can't matter: the choices are those of the long way."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
import weakref
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest

from pycuda_conv import ConvProblem, background, engines
from pycuda_conv import plan as plan_module
from pycuda_conv.elements import DTYPE_BYTES
from pycuda_conv.engines import geometry, registry
from pycuda_conv.engines.geometry import Phase
from pycuda_conv.engines.hopper import gemm as hopper_gemm
from pycuda_conv.engines.schedule import shared_limit
from pycuda_conv.plan import Plan
from pycuda_conv.repeat import RepeatTable
from pycuda_conv.runtime.target import Target
from pycuda_conv.tools.families import draw

PROBLEMS = list(draw(7, 8))


@pytest.fixture
def hopper():
    return Target("sm_90a")


def test_a_problem_that_was_looked_up_is_found_in_another_process():
    """Hashes of strings differ there, so that one which came along would be another's."""
    problem = ConvProblem.forward(2, (8, 64, 56, 56), (64, 64, 3, 3), padding=1)
    hash(problem)
    text = f"import pickle; from pycuda_conv import ConvProblem; one = pickle.loads({pickle.dumps(problem)!r})\n"
    text += "print(one in {ConvProblem.forward(2, (8, 64, 56, 56), (64, 64, 3, 3), padding=1)})"
    assert subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=900).stdout == "True\n"


def test_a_choice_is_remembered_for_such_a_device_alone(hopper):
    small, old = Target("sm_90a"), Target("sm_80")
    small.multiprocessors = 16
    found = [{problem: engines.find(problem, device) for problem in PROBLEMS} for device in (hopper, small, old)]
    for device, choices in zip((hopper, small, old), found, strict=True):
        assert choices == {problem: registry._fastest(problem, device) for problem in PROBLEMS}
    assert found[0] != found[1] != found[2]


@pytest.mark.parametrize("multiprocessors", [1, 3])
def test_a_share_of_a_gpu_may_be_smaller_than_a_cluster(multiprocessors, hopper):
    """CUDA's MPS lends a process as few multiprocessors as it likes, and says that there are no more."""
    hopper.multiprocessors = multiprocessors
    assert all(registry.candidates(problem, hopper) for problem in PROBLEMS)


@pytest.mark.pairs
@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("n", "c"), [(0, 16), (2, 0)])
def test_problems_without_images_or_channels_are_planned(n, c, layout, architecture):
    device = Target(architecture)
    for dtype, size in product(DTYPE_BYTES, ((20, 24), (200,))):
        options, ndim, x, w = {"layout": layout, "dtype": dtype, "padding": 1}, len(size), (n, c, *size), (24, c, *(3,) * len(size))
        forward = ConvProblem.forward(ndim, x, w, **options)
        gradients = [ConvProblem.gradient(of, ndim, x, w, forward.result_shape, **options) for of in ("input", "weight")]
        for problem in (forward, *gradients, ConvProblem.transposed(ndim, (n, 24, *size), w, **options)):
            engines.schedule(problem, engines.choose(problem, device), device)


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_86"])
def test_blocks_fit_in_a_gpu_s_shared_memory(architecture):
    """Those of all configurations that are compared."""
    device = Target(architecture)
    for problem in PROBLEMS:
        for engine in registry._engines(device, problem):
            for config in engine.configs(problem.launched, device):
                if engine.refusal(problem.launched, config) is None:
                    launches = background.launches(engine.schedule(problem.launched, config, device, False))
                    assert max(launch.shared for launch in launches) <= shared_limit(device), f"{config} {problem}"


def phases_made(monkeypatch) -> list:
    """A list in which each phase that is made from now on is put."""
    made, init = [], Phase.__init__
    monkeypatch.setattr(Phase, "__init__", lambda self, *fields, **named: made.append(self) or init(self, *fields, **named))
    return made


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90a", None])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_phases_without_taps_are_neither_planned_nor_launched_one_by_one(layout, architecture, monkeypatch):
    """However long a stride is, a plan has hardly more launches than the filter has taps."""
    made = phases_made(monkeypatch)
    geometry.phases.cache_clear()
    device = Target(architecture) if architecture else SimpleNamespace(
        backend="opencl", capability=(0, 0), multiprocessors=2, name="", model=""
    )
    for (size, stride), dtype, bias, groups in product(
        (((2,), 2**28), ((3, 2), 5000), ((2, 2, 3), 300)), DTYPE_BYTES, (None, (16,)), (1, 8)
    ):
        for precision in ("fp32", "tf32") if dtype == "float32" else ("fp32",):
            ndim, taps, options = len(size), 3 ** len(size), {"dtype": dtype, "precision": precision, "layout": layout, "groups": groups}
            problem = ConvProblem.transposed(ndim, (1, 16, *size), (16, 16 // groups, *(3,) * ndim), bias, stride=stride, **options)
            made.clear()
            schedule = engines.schedule(problem, engines.choose(problem, device), device)
            assert sum(map(len, schedule.whole)) <= taps + 3 and len(made) <= 2 * (taps + 1), problem
            for config in engines.candidates(problem, device):
                assert sum(map(len, engines.schedule(problem, config, device).whole)) <= taps + 3, (problem, config)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_phases_that_repeat_one_are_planned_as_one(dtype, hopper, monkeypatch):
    """Patches of any size are one product."""
    made = phases_made(monkeypatch)
    problem = ConvProblem.transposed(2, (1, 64, 3, 3), (64, 3, 700, 701), (3,), stride=(700, 701), dtype=dtype, layout="NHWC")
    schedule = engines.schedule(problem, engines.choose(problem, hopper), hopper)
    assert sum(map(len, schedule.whole)) <= 3 and len(made) < 10


def test_what_an_engine_chooses_is_among_what_it_compares(hopper):
    """So candidates that are measured, and the predictions that are printed, hold every engine's best."""
    for problem in (one.launched for one in PROBLEMS[::2]):
        for engine in registry._engines(hopper, problem):
            chosen = engine.choose(problem, hopper)
            assert chosen is None or chosen[1] in engine.configs(problem, hopper), problem


def test_rings_are_as_deep_as_shared_memory_allows(hopper):
    checked = 0
    for problem in PROBLEMS:
        for config in hopper_gemm.configs(problem.launched, hopper):
            depths = config.depths
            assert hopper_gemm.refusal(problem.launched, config) is None
            for stages in (n for n in depths if n > config.STAGES):
                assert hopper_gemm.refusal(problem.launched, replace(config, STAGES=stages)) is not None, (problem, config)
                checked += 1
    assert checked > 100


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_80"])
def test_arrays_with_channels_last_are_converted_as_the_predictions_say(architecture):
    """The planner asks what arrays in the other order would be computed by only where the time of a conversion does not settle it."""
    device, answers = Target(architecture), set()
    for problem in (one for one in PROBLEMS if one.layout == "NHWC"):
        config = engines.find(problem, device)
        if config is None or not engines.reads_c_order(config) or not engines.uses_tensor_cores(config):
            continue
        times = (us for us, one in engines.predictions(problem, device) if engines.uses_tensor_cores(one))
        other = engines.choose(replace(problem, layout="NCHW"), device)
        expected = engines.uses_tensor_cores(other) or next(times) <= plan_module._converted_time(problem, device)
        assert plan_module._pays(problem, device, None) == expected, problem
        answers.add((expected, engines.uses_tensor_cores(other)))
    assert len(answers) > 1


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_80"])
def test_a_text_has_all_its_defines(architecture):
    """Texts of kernels outside the portable dialect once left LAYER out, without which they ask their arguments for a layer's constants."""
    device, layered = Target(architecture), set()
    for problem in map(plan_module.as_called, PROBLEMS, [device] * len(PROBLEMS)):
        for launch in background.launches(background.with_constants(engines.schedule(problem, engines.choose(problem, device), device))):
            lines = launch.source().partition("#line")[0].splitlines()
            assert {f"#define {name} {value}" for name, value in launch.defines.items()} == set(lines) - {'#include "core/portable.cuh"'}
            if "LAYER" in launch.defines and "DTYPE" not in launch.defines:
                layered.add(launch.file or launch.kernel)
    assert {"sm_90a": "hopper_gemm", "sm_80": "mma_gemm"}[architecture] in layered


def test_a_result_whose_moments_are_wanted_is_planned_with_what_they_cost():
    """The fastest tile for the result alone may leave its moments to a pass over it, which can cost more than a tile that computes both."""
    device, decisions = Target("sm_90a"), set()
    shared = ConvProblem.forward(2, (1, 256, 14, 14), (256, 256, 3, 3), padding=1, dtype="float16", layout="NHWC")  # tiles of clusters
    for problem in (*PROBLEMS, shared):
        if problem.direction == "wgrad" or (fastest := engines.find(problem, device)) is None:
            continue
        chosen = engines.with_moments(problem, fastest, device)
        computed = [engines.schedule(problem, config, device, True).moments is not None for config in (fastest, chosen)]
        assert chosen == fastest if computed[0] else computed[1] or chosen == fastest
        if (us := engines.predicted(problem, fastest, device)) is None:
            continue
        pass_us = registry.COST.PASS_LAUNCH + problem.itemsize * math.prod(problem.result_shape) / registry.MEMORY
        assert engines.predicted(problem, chosen, device) <= us + pass_us
        if not any(computed):
            near = [one for time, one in engines.predictions(problem, device) if time < us + pass_us and engines.uses_tensor_cores(one)]
            assert all(engines.schedule(problem, one, device, True).moments is None for one in near)
        decisions.add((*computed,))
    assert decisions == {(False, False), (False, True), (True, True)}


def test_a_plan_keeps_no_table_of_repeated_calls_alive(device):
    """A bound filter's table holds its launches, and these hold the filter: the plan, which outlives them, once held the table."""
    plan, table, other = Plan(ConvProblem.forward(1, (1, 1, 9), (1, 1, 3)), device), RepeatTable(of_plan=True), RepeatTable(of_plan=True)
    for one, name in ((table, "a"), (table, "b"), (other, "a")):
        assert plan.repeat_in(one, name) == -1
        one[name] = None
    died = weakref.ref(other)
    del one, other
    assert died() is None and len(plan._repeated) == 1
    plan._forget_repeated()
    assert not table and not plan._repeated


def test_former_names_warn(device):
    problem = ConvProblem.forward(2, (2, 3, 9, 9), (4, 3, 3, 3))
    with pytest.warns(DeprecationWarning, match="final_form"):
        settled = Plan(problem, device).settled()
    assert settled.config == Plan(problem, device).final_form().config
    with pytest.warns(DeprecationWarning, match="with_moments"):
        assert Plan(problem, device, noted=True).with_moments
