"""The closed list of texts: random problems of all families never leave it, and no size is in it."""

import inspect
from pathlib import Path

import pytest

from pycuda_conv import background, engines, tune
from pycuda_conv.cli import main
from pycuda_conv.engines import calibration, packing, registry, split_sum
from pycuda_conv.engines.images import window
from pycuda_conv.engines.layout import cast as casting
from pycuda_conv.engines.nn import batch_norm, join, max_pool, norm
from pycuda_conv.engines.nn import fold_norms as folding
from pycuda_conv.engines.variants import VariantSet
from pycuda_conv.plan import as_called
from pycuda_conv.runtime.base import KernelLaunch
from pycuda_conv.tools.benchmarks import calibrate
from pycuda_conv.tools.families import draw
from pycuda_conv.tools.kernels import ARCHITECTURES, device_of, families
from pycuda_conv.tools.suite import MODES, in_mode, suite
from pycuda_conv.tools.warm import _batch_norm


def check_listed(problems, architecture, choose=engines.choose):
    """That all launches of `choose`'s choices are on the list; it may choose None. How many launches there are."""
    device, known = device_of(architecture), {}
    for family in families(architecture):
        known.setdefault((family.file, family.arch), []).append(family)
    count = 0
    for problem in problems:
        problem = as_called(problem, device)
        config = choose(problem, device)
        if config is None:
            continue
        plain = problem.direction == "fprop" and not problem.has_residual and not problem.activation
        for with_moments in (False, True)[: 1 + plain]:
            schedule = engines.schedule(problem, config, device, with_moments)
            launches = [*background.launches(schedule), *(_batch_norm(problem, schedule, device) if plain else ())]
            for launch in launches:
                file = launch.file or launch.kernel
                count += 1
                assert any(launch in family for family in known.get((file, launch.arch), ())), f"{file}, {launch.defines}: {problem}"
    return count


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "sm_75", "sm_86"])
def test_random_problems_never_leave_the_list(architecture):
    assert check_listed(draw(11, 15), architecture) > 150


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_benchmark_s_problems_never_leave_the_list(architecture):
    problems = list(suite())  # each in every third mode
    assert check_listed((in_mode(problem, mode) for i, mode in enumerate(MODES) for problem in problems[i % 3 :: 3]), architecture) > 150


def test_measured_choices_never_leave_the_list(monkeypatch):
    monkeypatch.setattr(tune, "SHIPPED", Path(tune.__file__).with_name("tuned"))  # which the tests hide

    def measured(problem, device):
        found = tune.shipped_table(device.model).get(device.model, tune.key(problem))
        return found and found.config

    timings = calibration.parsed((calibration.SHIPPED / "nvidia_h200.json").read_text()).timings  # the table's problems are among these
    assert check_listed(dict.fromkeys(problem for problem, *_ in calibrate.from_json(timings)), "sm_90a", measured) > 100


def count(families):
    """How many texts there are but for arrays of 2^31 elements."""
    return sum(not defines.get("INDEX_64") for family in families for defines in family)


def texts_of(module, device):
    """The texts of an engine, or of what engines share."""
    return module.variants(*[device] * len(inspect.signature(module.variants).parameters))


SHARED = [split_sum, packing, batch_norm, casting, folding, join, max_pool, norm, window]
EVERYWHERE = [*ARCHITECTURES, "sm_75", "sm_86", "sm_100a"]


@pytest.mark.parametrize("module", [*registry.ENGINES, *SHARED], ids=lambda module: module.__name__.rpartition(".")[2])
def test_an_engine_has_no_more_texts_than_it_says(module):
    most = {}
    for device in map(device_of, EVERYWHERE):
        if module.unsupported(device) is None if module not in SHARED else device.backend in module.MOST_VARIANTS:
            most[device.backend] = max(most.get(device.backend, 0), count(texts_of(module, device)))
    for backend, found in most.items():
        stated = module.MOST_VARIANTS.get(backend, 0)
        assert found <= stated, f"{module.__name__} has {found} texts: if they are worth their time, raise its MOST_VARIANTS for {backend}"
        assert found >= stated * 0.9, f"{module.__name__} has {found} texts: lower its MOST_VARIANTS for {backend}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_text_is_that_of_a_module_with_a_limit(architecture):
    """The list has no more than what engines and what they share say, and the kernel that copies."""
    device = device_of(architecture)
    own = [engine for engine in registry.ENGINES if engine.unsupported(device) is None]
    own += [module for module in SHARED if device.backend in module.MOST_VARIANTS]
    known = sum(count(texts_of(module, device)) for module in own)
    assert 0 <= count(families(architecture)) - known <= 4


def test_a_family_knows_its_own():
    family = VariantSet("some", {"A": (1, 2), "B": (0, 1)}, lambda d: d["A"] > d["B"])
    assert list(family) == [{"A": 1, "B": 0}, {"A": 2, "B": 0}, {"A": 2, "B": 1}]

    def launch(file="some", **defines):
        return KernelLaunch(file, defines, 1, 1, (), ())

    assert launch(A=2, B=1) in family and launch(B=0, A=1) in family
    for other in (launch(A=1, B=1), launch(A=3, B=0), launch(A=1), launch(A=1, B=0, C=0), launch("other", A=1, B=0), None):
        assert other not in family


def test_the_command_counts_and_lists(capsys):
    assert main(["kernels", "opencl"]) == 0
    out = capsys.readouterr().out
    assert "direct/tile.cu" in out and "layout/pack.cu" not in out
    assert main(["kernels", "opencl", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(set(lines)) == sum(len(list(family)) for family in families("opencl"))
    assert main(["kernels", "sm_5"]) == 2 and "architecture" in capsys.readouterr().err


@pytest.mark.parametrize("channels", [64, 68, 65])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_follows_a_convolution_is_listed(dtype, channels):
    pixels = batch_norm.Pixels(dtype, "NHWC", 2, channels, 49)
    of_bn = [family for family in families("sm_90a") if family.file == "batch_norm"]
    made = [batch_norm.statistics(pixels, 132, 1e-5, 0.1), batch_norm.channel_sums(pixels, 132)]
    made += batch_norm.forward(pixels, 132, "silu"), batch_norm.backward(pixels, 132, "silu", True)
    for residual in (False, True):
        made += batch_norm.forward(pixels, 132, "relu", residual), batch_norm.backward(pixels, 132, "relu", True, residual)
    for launches, _ in made:
        assert all(any(launch in family for family in of_bn) for launch in launches)


@pytest.mark.parametrize(("residual", "activation"), [(False, None), (True, "relu"), (False, "silu")])
def test_opencl_has_one_text_for_all_that_follows_a_batch_norm(residual, activation):
    opencl, pixels = device_of("opencl"), batch_norm.Pixels("float32", "NHWC", 2, 64, 49)
    (launch,), _ = batch_norm.forward(pixels, 2, activation, residual)
    plain, _ = batch_norm.channel_sums(pixels, 2)
    assert [one.source() for one in batch_norm.for_device([launch], opencl)] == [
        one.source() for one in batch_norm.for_device(plain[:1], opencl)
    ]
    assert any(one in family for family in families("opencl") for one in batch_norm.for_device([launch], opencl))


def test_casts_are_listed():
    found = [family for family in families("sm_90a") if family.file == "cast"]
    for dtype in ("float16", "bfloat16"):
        made = casting.narrow(dtype, (9, 0, 1)), casting.widen(dtype, (9, 0, 1)), casting.widen_filter(dtype, (3, 4, 3), 0, 1)
        assert all(any(launch in family for family in found) for launch in made)
