"""Compiling in the background: which configurations substitute for one another, when the better one takes over, what never shows."""

import itertools
import logging
import os
import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from reference import dgrad, fprop, python, run

from pycuda_conv import Plan, background, engines
from pycuda_conv.engines import registry
from pycuda_conv.engines.depthwise.toeplitz import DepthwiseToeplitz
from pycuda_conv.engines.direct import direct
from pycuda_conv.engines.direct import gemm as direct_gemm
from pycuda_conv.engines.hopper.gemm import ImplicitGemm
from pycuda_conv.errors import ConvArgumentError
from pycuda_conv.plan import cached_plan
from pycuda_conv.runtime import get_device, workers
from pycuda_conv.runtime.compile_queue import CompileQueue
from pycuda_conv.runtime.compiler import CompileError
from pycuda_conv.runtime.target import Target
from pycuda_conv.runtime.workers import Workers
from pycuda_conv.tools.families import draw

# ---- the order of sums


def _all_configs(problem, device):
    launched = problem.launched
    for engine in registry.ENGINES:
        if engine.unsupported(device) is None and launched.layout in engine.LAYOUTS:
            yield from ((engine, one) for one in engine.configs(launched, device) if engine.refusal(launched, one) is None)


def check_same_bits(case, dtype, place, most, **options):
    """That configurations whose sums are in the same order give the same bits; at most so many of each order. How many were compared."""
    device = get_device(place)
    problem = case.problem(dtype, **options)
    arrays = case.normals(dtype, seed=3)
    orders = {}
    for engine, config in _all_configs(problem, device):
        orders.setdefault((engine, engine.sum_order(problem.launched, config)), []).append(config)
    # from the last, whose tiles are small
    chosen = {order: configs[:: -(len(configs) // most or 1)][:most] for order, configs in orders.items()}
    chosen = {order: configs for order, configs in chosen.items() if len(configs) > 1}
    schedules = [engines.schedule(problem, config, device) for configs in chosen.values() for config in configs]
    device.compile_all([launch for schedule in schedules for launch in background.launches(schedule)])
    compared = 0
    for (_, order), (first, *rest) in chosen.items():
        expected = run(Plan(problem, device, config=first), *arrays)
        for config in rest:
            compared += 1
            assert run(Plan(problem, device, config=config), *arrays).tobytes() == expected.tobytes(), f"{order}: {first} and {config}"
    return compared


CASES = [
    fprop((2, 6, 37, 45), (6, 1, 3, 3), padding=1, groups=6),  # tiles
    fprop((1, 3, 33, 70), (6, 1, 5, 5), padding=2, stride=2, groups=3),
    fprop((2, 22, 9, 10), (40, 22, 3, 2), padding=(1, 0), stride=(1, 2)),  # one pixel a thread, matrix products
    dgrad((2, 20, 5, 6), (20, 18, 3, 2), padding=(1, 0), stride=(1, 2)),
]


#: Once in 16 bits; once optimised, which must not choose by tile what becomes one instruction.
IN_ORDER = [(CASES[0], "float16", False), *((case, "float32", case is CASES[1]) for case in CASES)]


@pytest.mark.parametrize(("case", "dtype", "optimised"), IN_ORDER, ids=str)
def test_the_same_order_of_sums_gives_the_same_bits(case, dtype, optimised, request, opencl):
    if optimised:
        request.getfixturevalue("optimised")
    assert check_same_bits(case, dtype, opencl, 2) >= 1


def test_a_split_sum_is_another_order():
    problem = fprop((1, 64, 8, 8), (64, 64, 3, 3), padding=1).problem()
    one, two = direct_gemm.Gemm(64, 64, 16, 8, 8, 6), direct_gemm.Gemm(64, 64, 16, 8, 8, 6, SPLIT_K=2)
    assert direct_gemm.sum_order(problem, one) != direct_gemm.sum_order(problem, two)
    gpu = SimpleNamespace(backend="cuda", capability=(9, 0), multiprocessors=132, model="")
    others = engines.alternatives(problem, two, gpu)
    assert others and all(config.SPLIT_K == 2 for config in others) and two not in others
    times = [direct_gemm.time(problem, config, gpu) for config in others]
    assert times == sorted(times)


GPU_CASES = [
    (fprop((4, 64, 28, 28), (128, 64, 3, 3), padding=1), "float32", "fp32"),
    (fprop((4, 64, 28, 32), (64, 64, 3, 3), padding=1), "float32", "fp32"),
    (fprop((4, 64, 28, 28), (128, 64, 3, 3), padding=1), "float32", "tf32"),
    (fprop((8, 256, 14, 14), (256, 256, 1, 1)), "float32", "tf32"),
    (fprop((8, 256, 14, 14), (256, 256, 1, 1)), "float16", "fp32"),
    (fprop((4, 128, 28, 28), (192, 128, 3, 3), padding=1, stride=2), "bfloat16", "fp32"),
    (dgrad((4, 64, 14, 14), (64, 96, 3, 3), padding=1, stride=2), "float32", "fp32"),
    (fprop((2, 160, 20, 24), (96, 160, 3, 3), padding=1), "float64", "fp32"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype", "precision"), GPU_CASES, ids=lambda v: str(v))
def test_the_same_order_of_sums_gives_the_same_bits_on_a_gpu(case, dtype, precision):
    assert check_same_bits(case, dtype, "cuda", 6, precision=precision) >= 4


# ---- standing in


def texts_of(problem, config, device, form=lambda schedule: schedule):
    return {launch.source() for launch in background.launches(form(engines.schedule(problem, config, device)))}


class Slow:
    """A device that compiles only when it is told to, and until then knows the kernels of `known` configurations."""

    def __init__(self, device, monkeypatch):
        self.device, self.ready, self.asked, self.captured, self.error = device, set(), [], False, None
        self.futures, self.under_way, self.waiting, self.begun = [], set(), set(), []
        kind = type(device)
        monkeypatch.setattr(kind, "compiled", lambda _, launch: launch.source() in self.ready)
        monkeypatch.setattr(kind, "compile_in_background", lambda _, launches: self._compile_in_background(launches))
        monkeypatch.setattr(kind, "coming", lambda _, launch: launch.source() in self.under_way)
        monkeypatch.setattr(kind, "queued", lambda _, launch: launch.source() in self.waiting)
        monkeypatch.setattr(kind, "begin", lambda _, launches: self.begun.extend(launch.source() for launch in launches))
        monkeypatch.setattr(kind, "capturing", lambda *_: self.captured)
        monkeypatch.setattr(kind, "constants_pay", True)

    def know(self, problem, config, form=lambda schedule: schedule):
        self.ready |= texts_of(problem, config, self.device, form)

    def know_another(self, problem):
        """The planner's configuration, and another one of the same bits, whose kernels are known from now on."""
        best = direct.choose(problem, self.device)[1]
        other = engines.alternatives(problem, best, self.device)[0]
        self.know(problem, other)
        return best, other

    def _compile_in_background(self, launches):
        self.asked += [launch.source() for launch in launches]
        self.futures = [Future() for _ in launches]
        return self.futures

    def finish(self):
        self.ready |= set(self.asked)
        for future in self.futures:
            future.set_exception(self.error) if self.error else future.set_result(None)


@pytest.fixture
def slow(monkeypatch, opencl):
    monkeypatch.setattr(background, "_said", set())
    monkeypatch.setattr(background, "configs_used", {})
    monkeypatch.delenv("PYCUDA_CONV_BACKGROUND", raising=False)
    cached_plan.cache_clear()
    yield Slow(get_device("opencl"), monkeypatch)
    cached_plan.cache_clear()


CASE = fprop((2, 6, 37, 45), (6, 1, 3, 3), padding=1, groups=6)


def test_a_compiled_configuration_stands_in_until_the_better_one_is_ready(slow):
    problem, arrays = CASE.problem(), CASE.normals("float32")
    best, other = slow.know_another(problem)
    plan = cached_plan(problem, slow.device)
    assert plan.config == other != best and not plan.fixed and slow.asked
    first = run(plan, *arrays)
    assert plan.better is None
    slow.finish()
    slow.captured = True
    run(plan, *arrays)
    assert plan.better is None  # a capture never sees a swap
    slow.captured = False
    run(plan, *arrays)
    assert plan.better.config == best and not plan.better.fixed
    assert run(plan.better, *arrays).tobytes() == first.tobytes()


def test_what_calls_will_take_in_the_end_and_plans_that_callers_make_at_once(slow):
    problem = CASE.problem()
    best, _ = slow.know_another(problem)
    plan = cached_plan(problem, slow.device)
    assert plan.config != best and plan.final_form().config == best and plan.better is plan.final_form()
    assert Plan(problem, slow.device).config == best


def test_nothing_stands_in_that_adds_up_in_another_order(slow):
    problem = CASE.problem()
    slow.know(problem, direct.Single())
    assert cached_plan(problem, slow.device).config == direct.choose(problem, slow.device)[1] and not slow.asked


def test_a_compiler_that_fails_behind_is_said_once_and_what_serves_goes_on(slow, caplog):
    cases = [CASE, fprop((1, 6, 37, 45), (6, 1, 5, 5), padding=2, groups=6)]
    plans = []
    for case in cases:
        problem = case.problem()
        slow.know_another(problem)
        slow.error = CompileError("nvcc failed (-9): killed")
        plans.append(cached_plan(problem, slow.device))
        slow.finish()
    with caplog.at_level(logging.WARNING, "pycuda_conv"):
        for case, plan in zip(cases, plans, strict=True):
            arrays = case.integers("float32")
            for _ in range(3):
                assert np.array_equal(run(plan, *arrays), case.reference(*arrays))
            assert plan.better is None and plan._background is None
    (record,) = caplog.records
    assert "nvcc failed (-9): killed" in record.getMessage()


def test_without_a_compiler_any_compiled_configuration_serves(slow, monkeypatch, caplog):
    problem, arrays = CASE.problem(), CASE.integers("float32")
    slow.know(problem, direct.Single())
    compile_all = type(slow.device).compile_all

    def no_compiler(self, launches):
        if any(launch.source() not in slow.ready for launch in launches):
            raise CompileError("a compiler of CUDA C was not found")
        compile_all(self, launches)

    monkeypatch.setattr(type(slow.device), "compile_all", no_compiler)
    plan = cached_plan(problem, slow.device)
    assert plan.config == direct.Single()
    assert np.array_equal(run(plan, *arrays), CASE.reference(*arrays)) and "was not found" in caplog.text
    slow.ready.clear()
    cached_plan.cache_clear()
    with pytest.raises(CompileError, match="was not found"):
        cached_plan(problem, slow.device)


def test_the_switch_turns_it_off(slow, monkeypatch):
    problem = CASE.problem()
    best, _ = slow.know_another(problem)
    monkeypatch.setenv("PYCUDA_CONV_BACKGROUND", "0")
    assert cached_plan(problem, slow.device).config == best and not slow.asked
    cached_plan.cache_clear()
    monkeypatch.setenv("PYCUDA_CONV_BACKGROUND", "off")
    with pytest.raises(ConvArgumentError, match="PYCUDA_CONV_BACKGROUND must be 0 or 1, got 'off'"):
        cached_plan(problem, slow.device)


# ---- constants of a layer


def give_constants(monkeypatch, often):
    """All launches have a layer's constant; the text with it is another text with the same meaning. It serves so many calls later."""

    def with_layer(steps):
        return [[replace(one, layer={"OF_THE_LAYER": 7}) for one in step] for step in steps]

    def schedule(*arguments, **options):
        made = real(*arguments, **options)
        return replace(made, prepare=with_layer(made.prepare), steps=with_layer(made.steps), whole=with_layer(made.whole))

    real = engines.schedule
    monkeypatch.setattr(engines, "schedule", schedule)
    monkeypatch.setattr(background, "OFTEN", often)


@pytest.fixture
def constants(monkeypatch):
    give_constants(monkeypatch, 3)


def _known(plan, monkeypatch):
    """The defines that a plan loads from now on."""
    seen = []
    kind = type(plan.device)
    launcher = kind.schedule_launcher
    monkeypatch.setattr(
        kind, "schedule_launcher",
        lambda self, steps: (seen.extend(one.defines for step in steps for one in step), launcher(self, steps))[1]
    )
    return seen


def test_a_layer_that_is_used_often_gets_its_constants(slow, constants, monkeypatch):
    problem, arrays = CASE.problem(), CASE.normals("float32")
    slow.know(problem, direct.choose(problem, slow.device)[1])
    for plan in (cached_plan(problem, slow.device), Plan(problem, slow.device)):
        slow.asked.clear()
        seen = _known(plan, monkeypatch)
        first = run(plan, *arrays)
        run(plan, *arrays)
        assert not slow.asked
        run(plan, *arrays)
        assert slow.asked and all("OF_THE_LAYER 7" in text for text in slow.asked) and not seen
        slow.finish()
        run(plan, *arrays)
        assert seen and all(defines["OF_THE_LAYER"] == 7 for defines in seen) and plan._background is None
        assert run(plan, *arrays).tobytes() == first.tobytes()


def test_a_general_kernel_that_is_on_its_way_is_not_compiled_anew_with_constants(slow, constants):
    problem = CASE.problem()
    best = direct.choose(problem, slow.device)[1]
    general, known = texts_of(problem, best, slow.device), texts_of(problem, best, slow.device, background.with_constants)

    def served():
        return sources(problem, slow.device)

    assert served() == known
    slow.waiting = general
    assert served() == general
    slow.under_way = known
    assert served() == known
    slow.ready = general
    assert served() == general


def _with_constants(plan):
    return all(launch.defines.get("OF_THE_LAYER") == 7 for launch in background.launches(plan.loaded))


@pytest.mark.parametrize("general", [True, False])
def test_kernels_that_know_a_layer_serve_at_once_if_they_are_compiled(slow, constants, general):
    """Also at sizes of images that are new to them."""
    for size in ((37, 45), (30, 41)):
        problem = fprop((2, 6, *size), (6, 1, 3, 3), padding=1, groups=6).problem()
        best = direct.choose(problem, slow.device)[1]
        if general:
            slow.know(problem, best)
        slow.know(problem, best, background.with_constants)
        for plan in (cached_plan(problem, slow.device), Plan(problem, slow.device)):
            assert plan.config == best and _with_constants(plan) and plan._background is None and not slow.asked


def test_a_compiler_that_has_to_run_makes_kernels_that_know_their_layer(slow, constants, monkeypatch):
    problem, texts = CASE.problem(), []
    kind = type(slow.device)
    compile_all = kind.compile_all
    monkeypatch.setattr(
        kind, "compile_all", lambda self, launches: (texts.extend(one.source() for one in launches), compile_all(self, launches))[1]
    )
    plan = cached_plan(problem, slow.device)
    assert _with_constants(plan) and texts and all("OF_THE_LAYER 7" in text for text in texts)
    monkeypatch.setenv("PYCUDA_CONV_BACKGROUND", "0")
    assert not _with_constants(Plan(problem, slow.device))


def test_general_kernels_serve_where_constants_do_not_pay(slow, constants, monkeypatch):
    monkeypatch.setattr(type(slow.device), "constants_pay", False)
    plan = Plan(CASE.problem(), slow.device)
    assert not _with_constants(plan) and plan._background is None


def test_constants_at_once(slow, constants, monkeypatch):
    problem, arrays = CASE.problem(), CASE.normals("float32")
    slow.know(problem, direct.choose(problem, slow.device)[1])
    plan = Plan(problem, slow.device)
    assert not _with_constants(plan)
    seen = _known(plan, monkeypatch)
    first = run(plan, *arrays)
    plan.specialise()
    assert seen and run(plan, *arrays).tobytes() == first.tobytes()
    seen.clear()
    Plan(problem, slow.device, tune=True)
    assert any("OF_THE_LAYER" in defines for defines in seen)
    seen.clear()
    monkeypatch.setenv("PYCUDA_CONV_BACKGROUND", "0")
    Plan(problem, slow.device, tune=True).specialise()
    assert seen and not any("OF_THE_LAYER" in defines for defines in seen)


# ---- the threads


def test_half_of_the_cores_are_left_to_what_is_waited_for(monkeypatch):
    """Others wait for their turn, and can be taken back until then."""
    for cores, expected in ((1, 1), (6, 3)):
        monkeypatch.setattr(workers, "cores", lambda cores=cores: cores)
        pool, go, order = Workers(), threading.Event(), itertools.count()
        futures = [pool.submit(go.wait) for _ in range(8)]
        deadline = time.monotonic() + 300
        while sum(one.running() for one in futures) < expected and time.monotonic() < deadline:
            time.sleep(0.001)
        assert sum(one.running() for one in futures) == expected and pool._started == expected
        second, third = (pool.submit(lambda order=order: next(order)) for _ in range(2))
        assert second.cancel() and not futures[0].cancel()
        go.set()
        assert third.result(300) == 0


def test_workers_do_the_work_and_pass_errors_on():
    pool = Workers()
    futures = [pool.submit(lambda i=i: 10 // i) for i in range(20)]
    assert [f.result(300) for f in futures[1:]] == [10 // i for i in range(1, 20)]
    assert isinstance(futures[0].exception(300), ZeroDivisionError)
    threads = [t for t in threading.enumerate() if t.name.startswith("pycuda_conv-")]
    assert threads and all(t.daemon for t in threads)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="such a system has no affinities")
def test_cores_that_a_process_may_not_use_do_not_count(python_env):
    code = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
    code += "from pycuda_conv.runtime.workers import cores; print(cores())"
    assert python(code, python_env) == "1\n"


def test_what_a_caller_is_about_to_wait_for_is_begun_at_once():
    """In threads of its own, also if it waits for its turn among what is compiled behind."""
    device, threads = CompileQueue("sm_90"), []
    device._loaded.add(("loaded", "sm_90"))
    go = threading.Event()

    def compile(source, arch):
        threads.append((source, threading.current_thread().name))
        go.wait(300)
        return b"machine code"

    device.compile = compile
    steps = [SimpleNamespace(source=lambda text=text: text, arch="sm_90") for text in ("one", "two", "loaded")]
    waiting = device._cubins["two", "sm_90"] = Future()  # for its turn
    assert device.queued(steps[1]) and not device.coming(steps[1]) and not device.queued(steps[0])
    device.begin(steps)
    assert all(map(device.coming, steps[:2])) and not any(map(device.queued, steps)) and waiting.cancelled()
    go.set()
    assert [device.cubin(text, "sm_90").result(300) for text in ("one", "two")] == [b"machine code"] * 2
    assert sorted(text for text, _ in threads) == ["one", "two"] and not any(name.startswith("pycuda_conv-") for _, name in threads)
    assert not any(map(device.coming, steps))


def test_a_process_that_ends_does_not_wait_for_its_workers(python_env):
    begin = time.monotonic()
    python(
        "import time\nfrom pycuda_conv.runtime.workers import workers\nfor _ in range(9): workers.submit(lambda: time.sleep(1000))",
        python_env
    )
    assert time.monotonic() - begin < 800


def test_a_child_has_workers_of_its_own(python_env):
    code = """
import os, time
from pycuda_conv.runtime.workers import workers
assert workers.submit(lambda: 1).result(300) == 1
blocked = [workers.submit(lambda: time.sleep(100)) for _ in range(99)]
if os.fork() == 0:
    os._exit(workers.submit(lambda: 5).result(300))
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    assert python(code, python_env, PYTHONWARNINGS="ignore") == "5\n"


def test_threads_that_need_the_same_kernel_compile_it_once():
    """The first one compiles; the others wait for it, and take nothing back that is under way."""
    device, begun = CompileQueue("sm_90"), []

    def compile(source, arch):
        begun.append(source)
        time.sleep(0.2)
        return b"machine code"

    device.compile = compile
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: device.cubin("text", "sm_90").result(300), range(8)))
    assert found == [b"machine code"] * 8 and begun == ["text"]


# ---- before it is asked for


class Empty(Target):
    """A GPU for which nothing is compiled."""

    constants_pay = True
    known: frozenset[str] = frozenset()

    def compiled(self, step):
        return step.source() in self.known


@pytest.fixture
def empty(monkeypatch):
    monkeypatch.setattr(background, "_foreseen", {})
    monkeypatch.delenv("PYCUDA_CONV_BACKGROUND", raising=False)
    monkeypatch.setattr(background, "configs_used", {})
    device = Empty("sm_90a")
    device.model = ""
    return device


def initial(problem, device):
    """The planner's configuration, in the form that a first call takes."""
    return background.initial_form(engines.schedule(problem, engines.choose(problem, device), device), device)


def sources(problem, device):
    return {launch.source() for launch in background.launches(initial(problem, device))}


def likely(problem, device):
    """The texts of what is foreseen beside a problem's own."""
    return {launch.source() for launch in background.likely(problem, background.launches(initial(problem, device)), device)}


def waits(problem, device):
    """Whether a call would wait for the compiler."""
    missing = background.missing(initial(problem, device), device)
    return bool(missing) and background.same_bits_substitute(problem, engines.choose(problem, device), device) is None


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_other_batches_and_the_layers_of_a_common_network_are_likely(empty, monkeypatch, dtype, layout):
    """Nothing waits then, though fewer kernels are foreseen than there are such problems: they stand in for one another."""
    problem = replace(fprop((8, 64, 56, 56), (64, 64, 3, 3), padding=1).problem(dtype), layout=layout)
    deeper = replace(problem, C=256, K=256, input_size=(1, 14, 14), output_size=(1, 14, 14))
    related = [replace(one, N=n) for one in (problem, deeper) for n in (8, 9, 1, 32)] + [replace(problem, N=n) for n in (2, 4, 16)]
    related += [replace(problem, input_size=(1, n, n), output_size=(1, n, n)) for n in (28, 55, 57, 112)]
    found, own = likely(problem, empty), sources(problem, empty)
    again = likely(replace(problem, C=48), empty)
    assert 0 < len(found) < 32 and len(again) < max(len(found), 3)  # the network once
    assert not own & found
    assert any(waits(one, empty) for one in related)
    monkeypatch.setattr(Empty, "known", found | own)
    for one in related:
        assert not waits(one, empty), one
    assert len(likely(problem, empty)) <= 1  # the network's kernels, which are not looked at again, may stand in for one more


def test_another_size_or_batch_of_a_layer_hardly_ever_waits(empty, monkeypatch):
    """Random layers of all families, with their own kernels and what is foreseen beside them. Without that one in five waits."""
    r, made, waiting = random.Random(3), 0, 0
    for problem in draw(3, 2):
        n, part = max(1, round(problem.N * r.choice((0.25, 0.5, 1, 1.2, 2, 4)))), r.choice((0.5, 0.75, 1, 1.15, 1.5, 2))
        try:
            other = background._resized(replace(problem, N=n), tuple(max(1, round(part * size)) for size in problem.input_size))
        except ConvArgumentError:
            continue
        if other is None or other == problem or not other.macs:
            continue
        with monkeypatch.context() as patch:
            patch.setattr(background, "_foreseen", {})
            patch.setattr(Empty, "known", likely(problem, empty) | sources(problem, empty))
            made, waiting = made + 1, waiting + waits(other, empty)
    assert made > 15 and waiting <= made // 12


# ---- other orders of sums


def test_rivals_are_other_orders_of_sums_that_take_hardly_longer(empty):
    problem = fprop((8, 512, 7, 7), (512, 512, 3, 3), padding=1).problem()  # its sum takes about as long in one part as in several
    chosen, found = engines.choose(problem, empty), background.other_orders(problem, empty)
    orders = [engines.order(problem, config) for config in (chosen, *found)]
    assert len(set(orders)) == len(orders) > 1
    for config in found:
        same = engines.alternatives(problem, config, empty)
        best = min(engines.predicted(problem, one, empty) for one in (config, *same))
        assert engines.predicted(problem, config, empty) <= background.NEARLY_AS_FAST * best
        assert best <= background.NEARLY_AS_FAST * engines.predicted(problem, chosen, empty)
        assert all(one.tile >= config.tile or engines.predicted(problem, one, empty) > background.NEARLY_AS_FAST * best for one in same)


# ---- what compiles fastest


def test_a_call_waits_for_the_text_that_compiles_fastest(empty, monkeypatch):
    problem = fprop((64, 256, 28, 28), (256, 256, 3, 3), padding=1).problem()
    chosen = engines.choose(problem, empty)
    for cores, dtype in ((2, "float32"), (2, "float16"), (16, "float16")):
        monkeypatch.setattr(background, "cores", lambda cores=cores: cores)
        one = replace(problem, dtype=dtype)
        config = engines.choose(one, empty)
        assert background.fastest_to_compile(one, config, empty) == config
    large = max(engines.alternatives(problem, chosen, empty), key=lambda one: one.tile)
    quick = background.fastest_to_compile(problem, large, empty)
    assert engines.order(problem, quick) == engines.order(problem, large) and 2 * quick.tile <= large.tile
    small = ImplicitGemm(64, 64, 6)
    assert background.fastest_to_compile(problem, small, empty) == small


def test_the_better_one_follows_where_a_smaller_text_was_waited_for(slow, monkeypatch):
    problem, arrays = CASE.problem(), CASE.normals("float32")
    best = direct.choose(problem, slow.device)[1]
    other = engines.alternatives(problem, best, slow.device)[0]
    monkeypatch.setattr(background, "fastest_to_compile", lambda *_: other)
    plan = cached_plan(problem, slow.device)
    assert plan.config == other and plan.better is None and slow.asked
    first = run(plan, *arrays)
    slow.finish()
    run(plan, *arrays)
    assert plan.better.config == best and run(plan.better, *arrays).tobytes() == first.tobytes()


@pytest.mark.parametrize("case", [
    fprop((8, 64, 56, 56), (64, 64, 3, 3), padding=1), dgrad((8, 64, 28, 28), (64, 64, 3, 3), padding=1, stride=2),
    fprop((8, 64, 56, 56), (64, 1, 3, 3), padding=1, groups=64), fprop((2, 16, 900), (32, 16, 3)),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_is_likely_is_on_the_closed_list(case, dtype, empty):
    from pycuda_conv.tools.kernels import families

    known = families("sm_90a")
    # those are a layer's own
    found = [launch for launch in background.likely(case.problem(dtype), (), empty) if "LAYER" not in launch.defines]
    assert all(any(launch in family for family in known) for launch in found)


def test_what_is_likely_is_compiled_beside_what_is_waited_for(slow, monkeypatch):
    """And no more once nothing is waited for."""
    problem = CASE.problem()
    own = sources(problem, slow.device)
    monkeypatch.setattr(background, "foresees", lambda _: True)
    other = engines.schedule(problem, direct.Single(), slow.device).whole[0]
    monkeypatch.setattr(background, "likely", lambda *_: iter(other * 9))
    cached_plan(problem, slow.device)
    assert len(slow.asked) == 1
    slow.asked.clear()
    cached_plan.cache_clear()
    begin = type(slow.device).begin
    monkeypatch.setattr(type(slow.device), "begin", lambda _, launches: (begin(_, launches), slow.under_way.update(slow.begun))[0])
    cached_plan(problem, slow.device)
    assert set(slow.begun) == own and len(slow.asked) == 9 and not own & set(slow.asked)
    slow.asked.clear()
    slow.ready |= own
    cached_plan.cache_clear()
    cached_plan(problem, slow.device)
    assert not slow.asked  # nothing is waited for


def test_what_would_be_foreseen_is_not_if_it_is_on_its_way(empty, monkeypatch):
    problem = fprop((8, 64, 56, 56), (64, 64, 3, 3), padding=1).problem()
    found = likely(problem, empty)
    assert found
    for name in "coming", "queued":
        with monkeypatch.context() as patch:
            patch.setattr(background, "_foreseen", {})
            patch.setattr(Empty, name, lambda _, launch: launch.source() in found)
            assert not likely(problem, empty) & found


def test_machines_with_few_cores_compile_what_is_waited_for_alone(monkeypatch):
    for cores, backend, expected in ((2, "cuda", False), (16, "cuda", True), (16, "opencl", False)):
        monkeypatch.setattr(background, "cores", lambda cores=cores: cores)
        assert background.foresees(SimpleNamespace(backend=backend)) == expected


def test_what_was_looked_for_in_vain_is_not_looked_for_again(monkeypatch):
    device, looked = CompileQueue("sm_90"), []
    monkeypatch.setattr(CompileQueue, "kept", lambda _, source, arch: looked.append(source) or (b"kept" if source == "there" else None))
    for text, there in ("absent", False), ("there", True):
        step = SimpleNamespace(source=lambda text=text: text, arch="sm_90")
        assert [device.compiled(step) for _ in range(3)] == [there] * 3
    assert looked == ["absent", "there"]


def test_what_is_being_compiled_stands_in_sooner_than_what_is_not_begun(empty, monkeypatch):
    problem = fprop((4, 64, 28, 28), (128, 64, 3, 3), padding=1).problem("float16")
    best = engines.choose(problem, empty)
    other, third = (one for one in engines.alternatives(problem, best, empty)[1:3])
    one, two, three = (texts_of(problem, config, empty) for config in (best, other, third))
    assert (two - three) and (three - two)

    def substitute(**known):
        with monkeypatch.context() as patch:
            for name in "compiled", "coming", "queued":
                patch.setattr(Empty, name, lambda _, launch, name=name: launch.source() in known.get(name, ()))
            return background.same_bits_substitute(problem, best, empty)

    assert substitute() is substitute(queued=two) is None
    assert substitute(coming=three, queued=two) == third
    assert substitute(coming=two | three) == other
    assert substitute(coming=one | two) == best  # which is waited for then
    assert substitute(compiled=three, coming=one | two) == third


def test_what_the_process_has_used_stands_in_first(empty, monkeypatch):
    problem = fprop((4, 64, 28, 28), (128, 64, 3, 3), padding=1).problem("float16")
    best = engines.choose(problem, empty)
    other, third = (one for one in engines.alternatives(problem, best, empty)[1:3])
    monkeypatch.setattr(Empty, "known", texts_of(problem, other, empty) | texts_of(problem, third, empty))
    assert background.same_bits_substitute(problem, best, empty) == other
    background.configs_used[third] = None
    assert background.same_bits_substitute(problem, best, empty) == third
    tile = ImplicitGemm(128, 224, 4)  # not one that the planner chooses from here: another size used it, or it was measured
    monkeypatch.setattr(Empty, "known", texts_of(problem, tile, empty))
    assert background.same_bits_substitute(problem, best, empty) is None
    with monkeypatch.context() as patch:
        patch.setattr(background, "measured_configs", lambda _: (direct_gemm.Gemm(32, 128, 16, 4, 8, 4), tile, best))
        assert background.same_bits_substitute(problem, best, empty) == tile
    background.configs_used[tile] = None
    assert tile not in engines.alternatives(problem, best, empty) and background.same_bits_substitute(problem, best, empty) == tile


def test_what_another_gpu_has_used_does_not_stand_in_where_it_does_not_fit(empty, monkeypatch):
    """Its blocks have less shared memory."""
    problem, large = fprop((32, 96, 32, 32), (96, 1, 9, 9), padding=4, groups=96).problem("float16", layout="NHWC"), DepthwiseToeplitz(110)
    best = engines.choose(problem, Target("sm_86"))
    assert isinstance(best, DepthwiseToeplitz) and best != large and engines.order(problem, best) == engines.order(problem, large)
    background.configs_used[large] = None
    monkeypatch.setattr(empty, "capability", (8, 6))
    assert background.same_bits_substitute(problem, best, empty) is None


def test_what_is_much_slower_does_not_substitute(monkeypatch, empty):
    """A graph that is captured by its first call would keep it."""
    problem = fprop((1, 256, 56, 56), (256, 1, 7, 7), padding=3, groups=256).problem()
    chosen = engines.choose(problem, empty)
    others = [chosen, *engines.alternatives(problem, chosen, empty)]
    times = [engines.predicted(problem, config, empty) for config in others]
    assert type(chosen) is direct.Tile and times[-1] > background.SLOWEST * times[0] > times[1]
    for config, us in list(zip(others, times, strict=True))[1:]:
        monkeypatch.setattr(Empty, "known", texts_of(problem, config, empty))
        assert background.same_bits_substitute(problem, chosen, empty) == (config if us <= background.SLOWEST * times[0] else None)
