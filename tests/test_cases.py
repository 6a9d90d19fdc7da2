"""The engines' cases (tests/cases), each held to what every engine is held to: on the simulated machine, and on an sm_90 GPU."""

from __future__ import annotations

import os
import random
import sys
from dataclasses import replace
from functools import cache

import cases
import numpy as np
import pytest
import reference
import simt
from alike import check_compiled, check_epilogue, check_moments, check_refused_on, check_steps, like_h200, paired, random_problems
from filters import check_precise
from modes import H200, allowed, asked, dtype_of
from on_gpu import Arrays, check_on_gpu, plans_of
from ranges import check_not_finite, check_scenario, data
from reference import NVCC, assert_close, assert_exact

from pycuda_conv import ConvProblem, Plan, engines
from pycuda_conv.engines import registry
from pycuda_conv.engines.geometry import divider
from pycuda_conv.runtime import get_device
from pycuda_conv.runtime.base import KernelLaunch
from pycuda_conv.runtime.target import Target

simulated = pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))
EVERY = list(cases.every())


def each(field: str, *, also: str = "") -> list:
    """A parameter for each entry of a field of every engine's cases: the cases, and the entry."""
    found = []
    for of in EVERY:
        entries = getattr(of, also) if also and getattr(of, also) is not None else getattr(of, field)
        found += [pytest.param(of, entry, id=f"{of}-{word_of(entry)}") for entry in entries]
    return found


def word_of(entry) -> str:
    """A run as its mode, its configuration's numbers, and its case."""
    case, mode, config, *_ = entry
    numbers = "" if isinstance(config, list | tuple) else "_".join(map(str, vars(config).values())) + "-"
    return f"{mode}-{numbers}{case}"


def named(name: str) -> cases.Cases:
    """The cases of that name."""
    return next(of for of in EVERY if of.name == name)


def with_(field: str) -> list:
    """The cases of the engines that have a field."""
    return [pytest.param(of, id=of.name) for of in EVERY if getattr(of, field)]


def problem_of(what, *mode: str) -> ConvProblem:
    """A problem, or that of a case in a mode."""
    return asked(what, *mode) if mode else what


def test_every_engine_has_cases():
    assert not [engine.__name__ for engine in registry.ENGINES if cases.of(engine) is None and cases.name_of(engine) not in ELSEWHERE]
    assert not [name for name in ELSEWHERE if name in {of.name for of in EVERY}], "has cases by now"


#: Engines whose tests are no data: a case has no border, and no image that is sampled more densely.
ELSEWHERE = {"bordered": "test_borders.py", "rims": "test_borders.py", "upsampled": "test_upsampling.py"}


# ---- on the simulated machine


def launches_of(of: cases.Cases, run: cases.Run, with_moments: bool = False) -> list[KernelLaunch]:
    """All that a run may launch."""
    program = of.engine.schedule(asked(*run[:2]).launched, run[2], H200, with_moments)
    return [launch for steps in (program.whole, program.filter_last or ()) for step in steps for launch in step]


@pytest.mark.parametrize("of", with_("runs"))
def test_the_runs_have_every_value_of_every_define(of):
    """Of a size that has more than three values, the smallest and the largest; of stages in shared memory any."""
    launches = [launch for run in of.runs for launch in launches_of(of, run)] + [
        launch for run in of.noted for launch in launches_of(of, run, True)
    ]
    met = {(launch.file or launch.kernel, *define) for launch in launches for define in launch.defines.items()}
    own = {file for file, *_ in met}
    choices = [
        (family.file, name, values)
        for family in of.engine.variants(H200)
        if family.file in own
        for name, values in family.choices.items()
        if name != "STAGES"
    ]
    wanted = {
        (file, name, value)
        for file, name, values in choices
        for value in (values if len(values) <= 3 or name.endswith("TYPE") else (min(values), max(values)))
    }
    assert {(name, value) for _, name, value in wanted - met} == set(of.unseen)


@simulated
@pytest.mark.parametrize(("of", "run"), each("runs"))
def test_the_text_computes_the_convolution(of, run):
    """Integers exactly: by turns with a filter as it comes, a kept one, and one whose channels are last.

    Random data in each second run, of 16 bits in each third.
    """
    case, mode, config = run
    problem, number, arrays = asked(case, mode), of.runs.index(run), case.integers(dtype_of(mode))
    program = of.engine.schedule(problem.launched, config, H200)
    ways = [{}, *[{"kept": True}] * bool(program.filter_bytes), *[{"filter_last": True}] * bool(program.filter_last)]
    assert_exact(simt.computed(problem, config, *arrays, seeds=(1,), **ways[number % len(ways)]), case.reference(*arrays), config)
    if number % (2 if dtype_of(mode) == "float32" else 3) == 0:
        arrays = case.normals(dtype_of(mode), seed=1)
        ref = case.reference(*arrays)
        assert_close(simt.computed(problem, config, *arrays, seeds=(3,)), ref, allowed(case, mode, arrays, ref), config)


@simulated
@pytest.mark.parametrize("multiprocessors", [1, 7, 1000])
@pytest.mark.parametrize(("of", "run"), each("grids"))
def test_blocks_of_many_tiles_and_of_one(of, run, multiprocessors):
    case, mode, config = run
    arrays = case.integers(dtype_of(mode))
    assert_exact(
        simt.computed(asked(case, mode), config, *arrays, seeds=(1,), multiprocessors=multiprocessors), case.reference(*arrays), config
    )


@simulated
@pytest.mark.parametrize(("of", "entry"), each("orders"))
def test_one_order_of_sums_gives_the_same_bits(of, entry):
    case, mode, configs, orders = entry
    arrays, found = case.normals(dtype_of(mode), seed=3), {}
    for i, config in enumerate(configs):
        order = of.engine.sum_order(asked(case, mode).launched, config)
        found.setdefault(order, set()).add(simt.computed(asked(case, mode), config, *arrays, seeds=(i,)).tobytes())
    assert len(found) == orders and all(len(bits) == 1 for bits in found.values()) and len(configs) > orders


FINISHED = [one for one in each("finished") if not one.values[0].portable]


@simulated
@pytest.mark.parametrize(("of", "entry"), FINISHED)
def test_what_finishes_a_sum(of, entry):
    """Bias, scale, residual and ReLU; then each activation, with a residual and without."""
    check_epilogue(*entry)


@simulated
@pytest.mark.parametrize(("of", "run"), each("noted"))
def test_moments_are_noted(of, run):
    case, mode, config = run
    for arrays in (case.integers(dtype_of(mode)), case.normals(dtype_of(mode), seed=1)):
        check_moments(asked(case, mode), config, *arrays)


@simulated
@pytest.mark.parametrize(
    ("of", "run", "name"),
    [
        pytest.param(of, run, name, id=f"{of}-{i}-{name}")
        for of in EVERY
        for i, (run, names) in enumerate(of.arguments)
        for name in names.split()[:: 1 if reference.all_texts else 2]
    ],
)
def test_a_wrong_argument_is_noticed(of, run, name, monkeypatch):
    """Smaller by one, or larger by one: the results are others, or the machine says what a kernel must not do."""
    case, mode, config = run
    arrays, schedule = case.integers(dtype_of(mode)), of.engine.schedule
    ref = case.reference(*arrays)

    def computed(by: int) -> np.ndarray:
        def changed(step):
            if step.kernel != of.kernel:
                return step
            first, *others = step.structs
            value = getattr(first, name) + by
            values = {name: value, **({f"by_{name}": divider(value)} if f"by_{name}" in first._fields and value > 0 else {})}
            return replace(step, arguments=(first._replace(**values), *others))

        def wrong(*given):
            program = schedule(*given)
            return replace(program, whole=[[changed(step) for step in steps] for steps in program.whole])

        monkeypatch.setattr(of.engine, "schedule", wrong)
        return simt.computed(asked(case, mode), config, *arrays, seeds=(1,))

    with pytest.raises((AssertionError, pytest.fail.Exception)):
        for by in (-1, 1):
            assert_exact(computed(by), ref)


@simulated
@pytest.mark.parametrize(("of", "run"), each("not_finite"))
def test_what_is_not_finite_reaches_its_own_results_only(of, run):
    case, mode, config = run
    check_not_finite(case, mode, lambda *arrays: simt.computed(asked(case, mode), config, *arrays, seeds=(1,)), each=False)


@simulated
@pytest.mark.parametrize(("of", "entry"), each("ranged"))
def test_every_range_is_kept(of, entry):
    case, mode, config, scenarios = entry
    for scenario in scenarios:
        x, w = data(scenario, case)
        check_scenario(case, mode, x, w, simt.computed(asked(case, mode), config, x, w, seeds=(1,)), scenario)


@simulated
@pytest.mark.parametrize(("of", "run"), each("precise"))
def test_float32_is_honest(of, run):
    case, mode, config = run
    check_precise(lambda case, *arrays: simt.computed(asked(case, mode), config, *arrays), case)


@cache
def whole(name: str, number: int) -> np.ndarray:
    """What a kernel that will be broken computes while nothing is."""
    broken = named(name).broken[number]
    case, mode, config = broken.run
    arrays = broken.arrays(case, dtype_of(mode))
    return simt.computed(asked(case, mode), config, *arrays, seeds=(0,), multiprocessors=broken.multiprocessors)


BROKEN = [
    pytest.param(of, i, line, id=f"{of}-{line[0].strip()[:50]}") for of in EVERY for i, one in enumerate(of.broken) for line in one.lines
]


@simulated
@pytest.mark.parametrize(("of", "number", "line"), BROKEN)
def test_a_broken_kernel_is_noticed(of, number, line):
    """The results are others, or the machine says what a kernel must not do."""
    broken, (text, instead, *said) = of.broken[number], line
    case, mode, config = broken.run
    arrays = broken.arrays(case, dtype_of(mode))
    with np.errstate(all="ignore"):
        right = whole(of.name, number)
        with pytest.raises(AssertionError, match=said[0] if said else None):
            for seed in broken.seeds:
                options = {"seeds": (seed,), "broken": (text, instead), "multiprocessors": broken.multiprocessors}
                wrong = simt.computed(asked(case, mode), config, *arrays, **options)
                same = wrong.tobytes() == right.tobytes()
                assert same


# ---- on every device of the machine


def check_portable(device: str, run: cases.Run) -> Plan:
    """Integers exactly; random data within the bound, and the same bits again."""
    case, mode, config = run
    if (why := engines.refusal(asked(case, mode), config, get_device(device))) and "no library" in why:
        pytest.skip(why)
    plan, arrays = Plan(asked(case, mode), device, config=config), case.integers(dtype_of(mode))
    assert_exact(reference.run(plan, *arrays), case.reference(*arrays), plan)
    arrays = case.normals(dtype_of(mode))
    got, ref = reference.run(plan, *arrays), case.reference(*arrays)
    assert_close(got, ref, allowed(case, mode, arrays, ref), plan)
    assert got.tobytes() == reference.run(plan, *arrays).tobytes()
    return plan


def computed_on(device: str):
    """What plans of a problem compute there."""
    return lambda problem, config, *arrays, seeds=(): reference.run(Plan(problem, device, config=config), *arrays)


@pytest.mark.parametrize(("of", "run"), each("portable"))
def test_on_every_device(device, of, run):
    check_portable(device, run)


@pytest.mark.parametrize(("of", "run"), each("optimised"))
def test_as_users_run_it(device, optimised, of, run):
    check_portable(device, run)


@pytest.mark.parametrize(("of", "run"), each("wide"))
def test_64_bit_offsets(device, of, run, monkeypatch):
    """What arrays of 2^31 elements get, on arrays that fit a laptop."""
    for name, module in list(sys.modules.items()):
        if name.startswith("pycuda_conv.engines.") and hasattr(module, "needs_64_bits"):
            monkeypatch.setattr(module, "needs_64_bits", lambda *_: True)
    assert check_portable(device, run).schedule.steps[0][0].defines["INDEX_64"] == 1
    if isinstance(run[0], reference.Case):
        check_epilogue(*run, (), computed=computed_on(device))


@pytest.mark.parametrize(("of", "entry"), [one for one in each("finished") if one.values[0].portable])
def test_what_finishes_a_sum_on_every_device(device, of, entry):
    check_epilogue(*entry, computed=computed_on(device))


# ---- what is legal, and the choice


REFUSED = [
    pytest.param(problem_of(*what), config, reason, id=f"{of}-{reason}-{i}")
    for of in EVERY
    for i, (*what, config, reason) in enumerate(of.refused)
]


@pytest.mark.parametrize(("problem", "config", "reason"), REFUSED)
def test_a_configuration_says_why_it_cannot(problem, config, reason):
    check_refused_on(H200, problem, config, reason)


@pytest.mark.parametrize("of", with_("devices"))
def test_devices_that_have_it_and_others(of):
    case, mode, config = of.runs[0]
    for (capability, backend), runs in of.devices.items():
        assert (engines.refusal(asked(case, mode), config, like_h200(capability, backend)) is None) == runs, (capability, backend)


@pytest.mark.parametrize(
    ("of", "architecture"), [pytest.param(of, one, id=f"{of}-{one}") for of in EVERY if of.layers for one in of.layers.architectures]
)
def test_choices_are_legal_and_their_texts_listed(of, architecture):
    """Of random layers: what is chosen is a candidate; candidates differ, are legal, have a time, and one's launches are listed."""
    device, r, met = Target(architecture), random.Random(4), 0
    engine, listed = of.engine, list(of.engine.variants(device))
    files = {family.file for family in listed}
    for problem in random_problems(r, of.layers.families, of.layers.each, of.layers.kinds):
        found, chosen = list(engine.configs(problem, device)), engine.choose(problem, device)
        assert (chosen is None) == (not found) and (chosen is None or chosen[1] in found), problem
        assert len(found) == len(set(found)), problem
        if not found:
            continue
        met += 1
        assert all(engines.refusal(problem, config, device) is None for config in found), problem
        times = {config: engine.time(problem, config, device) for config in found}
        assert all(
            0 < us < 1e6 for us in times.values()
        ) and chosen[0] == times[chosen[1]] <= of.layers.slack * min(times.values()), problem
        for config in {chosen[1], *r.sample(found, min(3, len(found)))}:
            program = engine.schedule(problem, config, device)
            launches = [launch for steps in (program.whole, program.filter_last or ()) for step in steps for launch in step]
            assert all(0 < launch.grid < 2**31 and launch.shared <= 227 * 1024 for launch in launches)
            assert all(any(launch in one for one in listed) for launch in launches if (launch.file or launch.kernel) in files), config
    assert met >= of.layers.least


CHOSEN = [pytest.param(of, problem_of(*what), chosen, id=f"{of}-{i}") for of in EVERY for i, (*what, chosen) in enumerate(of.chosen)]


@pytest.mark.parametrize(("of", "problem", "chosen"), CHOSEN)
def test_the_planner_chooses_it_for_what_it_is_for(of, problem, chosen):
    assert isinstance(engines.choose(problem, H200), tuple(of.engine.CONFIGS)) == chosen


@pytest.mark.parametrize("of", with_("kernel"))
def test_arguments_fit_their_kernels(of):
    for case, mode, config in of.runs[::3]:
        check_steps(of.engine.schedule(asked(case, mode).launched, config, H200), of.kernel)


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
@pytest.mark.parametrize("of", with_("compiled"))
def test_texts_compile_and_spill_no_more_than_is_known(of):
    steps, files = {}, {family.file for family in of.engine.variants(H200)}
    for problem, config, *moments in of.compiled:
        program = of.engine.schedule(problem.launched, config, H200, *moments)
        for launch in (launch for part in (program.whole, program.filter_last or ()) for step in part for launch in step):
            for arch in of.architectures if (launch.file or launch.kernel) in files else ():
                steps[launch.source(), arch] = replace(launch, arch=arch or launch.arch), f"{problem} {config}"
    check_compiled(steps, of.spills, of.spills_sm80)


# ---- on a GPU


def on_gpu(of: cases.Cases) -> list[cases.Run]:
    """An engine's runs there: with --all-texts all."""
    return list(of.gpu) if reference.all_texts else paired(of.gpu)


@cache
def plans(name: str) -> dict:
    """Their plans."""
    return plans_of(on_gpu(named(name)))


@pytest.mark.gpu
@pytest.mark.parametrize(("of", "run"), [pytest.param(of, run, id=f"{of}-{word_of(run)}") for of in EVERY for run in on_gpu(of)])
def test_on_the_gpu(torch, of, run):
    """Workers of one run compile side by side anyway."""
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    check_on_gpu(torch, plans(of.name)[str(run)] if alone else Plan(asked(*run[:2]), "cuda", config=run[2]), *run[:2])


@pytest.mark.gpu
@pytest.mark.parametrize(("of", "entry"), FINISHED)
def test_what_finishes_a_sum_on_the_gpu(torch, of, entry):
    def computed(problem, config, *arrays, seeds=()):
        return Arrays(torch, Plan(problem, "cuda", config=config), *arrays).launch()

    check_epilogue(*entry, computed=computed)


@pytest.mark.gpu
@pytest.mark.parametrize(("of", "run"), each("not_finite", also="not_finite_gpu"))
def test_what_is_not_finite_on_the_gpu(torch, of, run):
    case, mode, config = run
    plan = Plan(asked(case, mode), "cuda", config=config)
    check_not_finite(case, mode, lambda *arrays: Arrays(torch, plan, *arrays).launch())


@pytest.mark.gpu
@pytest.mark.parametrize(("of", "entry"), each("ranged", also="ranged_gpu"))
def test_every_range_is_kept_on_the_gpu(torch, of, entry):
    case, mode, config, scenarios = entry
    plan = Plan(asked(case, mode), "cuda", config=config)
    for scenario in scenarios:
        x, w = data(scenario, case)
        check_scenario(case, mode, x, w, Arrays(torch, plan, x, w).launch(), scenario)


@pytest.mark.gpu
@pytest.mark.parametrize(("of", "run"), each("precise_gpu"))
def test_float32_is_honest_on_the_gpu(torch, of, run):
    case, mode, config = run
    plan = Plan(asked(case, mode), "cuda", config=config)
    check_precise(lambda case, *arrays: Arrays(torch, plan, *arrays).launch(), case)
