"""Engines are peers: what holds for each of them, and that another one needs no more than a line in the registry."""

import ast
import dataclasses
import inspect
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import covering
import numpy as np
import pytest
import toy_engine
from reference import assert_exact, fprop
from toy_engine import Toy

import pycuda_conv
from pycuda_conv import ConvProblem, Plan, engines, tune
from pycuda_conv.engines import base, registry
from pycuda_conv.engines.direct.gemm import Gemm
from pycuda_conv.runtime import base as runtime

PACKAGE = Path(pycuda_conv.__file__).parent
H200 = SimpleNamespace(capability=(9, 0), multiprocessors=132, backend="cuda", name="cuda:0", model="NVIDIA H200")
DEVICES = [H200, *(SimpleNamespace(**{**vars(H200), "capability": capability}) for capability in ((8, 0), (7, 5)))]
DEVICES.append(SimpleNamespace(capability=(0, 0), multiprocessors=2, backend="opencl", name="opencl", model=""))


def imported(path: Path) -> set[str]:
    """The names of all modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{name.name}" for name in node.names)}
    return found


base.complete(toy_engine)  # as registering does

# ---- what holds for every engine


@pytest.fixture(params=[*registry.ENGINES, toy_engine], ids=lambda engine: engine.__name__.rpartition(".")[2])
def engine(request):
    return request.param


def test_it_has_what_the_protocol_names(engine):
    for name, wanted in inspect.getmembers(base.Engine, lambda member: callable(member) or isinstance(member, property)):
        if name.startswith("_"):
            continue
        if isinstance(wanted, property):
            assert hasattr(engine, name)
        else:
            _, *parameters = inspect.signature(wanted).parameters
            assert list(inspect.signature(getattr(engine, name)).parameters) == parameters, name


def test_it_imports_none_of_its_peers_and_its_kernels_have_its_name(engine):
    path = Path(engine.__file__)
    assert not imported(path) & {peer.__name__ for peer in registry.ENGINES}
    assert list(runtime.KERNEL_DIR.rglob(f"{path.stem}*.cu")) or (runtime.KERNEL_DIR / path.stem).is_dir() or engine is toy_engine
    assert all(cls.__module__.startswith(f"{engine.__package__}.") or engine is toy_engine for cls in engine.CONFIGS)


def test_its_configurations_are_frozen_and_made_of_defaults(engine):
    for cls in engine.CONFIGS:
        made = cls()
        assert issubclass(cls, base.Config) and cls.from_table({}) == made == cls.from_table(dataclasses.asdict(made)) and hash(made) == hash(cls())
        with pytest.raises(dataclasses.FrozenInstanceError):
            made.THREADS = 1


# ---- what holds between them


def test_configurations_are_attributes_of_the_package():
    assert engines.Gemm is Gemm and all(getattr(engines, name) is cls for name, cls in engines.config_classes().items())
    with pytest.raises(AttributeError, match="has no attribute 'Warp'"):
        engines.Warp  # noqa: B018


def test_launches_can_be_written_down(tmp_path, python_env):
    """scripts/dump_launches.py, for a few problems, twice alike."""
    script = PACKAGE.parent / "scripts" / "dump_launches.py"
    if not script.exists():
        pytest.skip("the scripts are not in the installed package")
    written = []
    for name in "ab":
        subprocess.run([sys.executable, str(script), str(tmp_path / name), "--every", "150"], env=python_env, check=True, timeout=900)
        written.append((tmp_path / name).read_text())
    assert written[0] == written[1] and all(word in written[0] for word in ("on H200", "on OpenCL", "chosen", "candidate", "<<<", "defines"))


def test_the_library_imports_none_of_its_tools():
    for path in PACKAGE.rglob("*.py"):
        if "tools" not in path.relative_to(PACKAGE).parts and path.name not in ("cli.py", "__main__.py"):
            assert not {name for name in imported(path) if name.startswith("pycuda_conv.tools")}, path


def test_nothing_tells_engines_apart_by_their_configurations():
    classes = {cls.__name__ for peer in registry.ENGINES for cls in peer.CONFIGS}
    for path in (*PACKAGE.glob("*.py"), *(PACKAGE / "tools").glob("*.py"), PACKAGE / "engines" / "registry.py"):
        assert not {name.rpartition(".")[2] for name in imported(path)} & classes, path


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"{device.backend}-{device.capability}")
def test_the_choice_is_the_shortest_prediction_of_any_engine(device):
    depthwise = fprop((64, 144, 56, 56), (144, 1, 3, 3), groups=144)
    for case, layout in product((fprop((64, 64, 56, 56), (64, 64, 3, 3), padding=1), fprop((2, 8, 9, 9), (8, 8, 3, 3)), depthwise), ("NCHW", "NHWC")):
        problem = case.problem(layout=layout)
        peers = [peer for peer in registry.ENGINES if peer.unsupported(device) is None and layout in peer.LAYOUTS]
        us, chosen = min((one for peer in peers if (one := peer.choose(problem, device))), key=lambda one: one[0])
        assert engines.choose(problem, device) == chosen
        assert us < base.LAST_RESORT or device.backend == "opencl" or problem.macs < 40e6
        assert engines.refusal(problem, chosen, device) is None


def test_a_configuration_of_no_engine_is_refused():
    with pytest.raises(TypeError, match=r"config must be one of Depthwise, .*, but got Toy\(THREADS=128\) of type Toy"):
        engines.schedule(fprop((2, 8, 9, 9), (8, 8, 1, 1)).problem(), Toy(), H200)


# ---- another engine: two files, and a line in the registry

CASE = fprop((3, 5, 7, 11), (5, 1, 1, 1), groups=5, bias=False)


@pytest.fixture
def registered(tmp_path, monkeypatch):
    """The toy engine before all others, its kernel among theirs."""
    for part in runtime.KERNEL_DIR.iterdir():
        if part.is_dir() or part.suffix == ".cuh":
            (tmp_path / part.name).symlink_to(part)
    (tmp_path / "toy_engine.cu").symlink_to(Path(toy_engine.__file__).with_suffix(".cu"))
    monkeypatch.setattr(runtime, "KERNEL_DIR", tmp_path)
    runtime.headers.cache_clear()
    monkeypatch.setattr(registry, "ENGINES", (toy_engine, *registry.ENGINES))
    yield
    runtime.headers.cache_clear()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_another_engine_runs(registered, device, dtype):
    arrays = CASE.integers(dtype)
    plan = Plan(CASE.problem(dtype), device, config=Toy(64))
    assert_exact(np.asarray(plan(*arrays[:2])), CASE.reference(*arrays), plan)
    assert "toy_engine" in plan.explain()


def test_another_engine_is_chosen_predicted_measured_and_kept_in_tables(registered):
    problem = ConvProblem.forward(2, (64, 512, 56, 56), (512, 1, 1, 1), groups=512)
    assert engines.choose(problem, H200) == Toy(256) and not engines.uses_tensor_cores(Toy()) and engines.filter_key(problem, Toy()) is None
    predicted = [config for _, config in engines.predictions(problem, H200)]
    assert predicted.index(Toy(256)) < predicted.index(Toy(128))
    candidates = engines.candidates(problem, H200)
    assert candidates[0] == Toy(256) and Toy(128) in candidates and any(isinstance(one, Gemm) for one in candidates)
    choices = {("GPU", "p"): tune.Choice(Toy(96), 2.0)}
    assert tune._parsed(tune._text(choices)) == choices
    biased = ConvProblem.forward(2, (3, 5, 7, 11), (5, 1, 1, 1), groups=5, bias_shape=(5,))
    assert "plain sums" in engines.refusal(biased, Toy(), H200) and not isinstance(engines.choose(biased, H200), Toy)


def test_the_sanitizer_s_cases_have_all_features_of_their_pool():
    """Of few problems: tests/covering.py."""
    shown = dict(covering.pool(H200, 10, 1))
    chosen = covering.cases(H200, 10, 1)
    assert len(chosen) < len(shown)
    assert set().union(*(shown[case] for case in chosen)) == set().union(*shown.values())
    assert covering.missing(H200, chosen) == covering.missing(H200, shown)
