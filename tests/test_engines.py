"""Engines are peers: what holds for each of them, and between them. tests/test_engine_pages.py adds others."""

import ast
import dataclasses
import inspect
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from reference import fprop

import pycuda_conv
from pycuda_conv import engines
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


# ---- what holds for every engine


@pytest.fixture(params=registry.ENGINES, ids=lambda engine: engine.__name__.rpartition(".")[2])
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
            if isinstance(getattr(engine, name), partial) and name != "configs":  # the default
                continue
            parameters += ["source"] if name == "schedule" and not isinstance(engine.adds_border, partial) else []
            assert list(inspect.signature(getattr(engine, name)).parameters) == parameters, name


def test_it_imports_none_of_its_peers_and_its_kernels_have_its_name(engine):
    path = Path(engine.__file__)
    assert not imported(path) & {peer.__name__ for peer in registry.ENGINES}
    own = any(engine.MOST_VARIANTS.values())  # one that gives others parts of its problem has no kernels
    assert not own or list(runtime.KERNEL_DIR.rglob(f"{path.stem}*.cu")) or (runtime.KERNEL_DIR / path.stem).is_dir()
    assert all(cls.__module__.startswith(f"{engine.__package__}.") for cls in engine.CONFIGS)


def test_its_configurations_are_frozen_and_made_of_defaults(engine):
    for cls in engine.CONFIGS:
        made = cls()
        assert issubclass(cls, base.Config)
        assert cls.from_table({}) == made == cls.from_table(dataclasses.asdict(made)) and hash(made) == hash(cls())
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
    assert written[0] == written[1]
    assert all(word in written[0] for word in ("on H200", "on OpenCL", "chosen", "candidate", "<<<", "defines"))


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
    for case, layout in product(
        (fprop((64, 64, 56, 56), (64, 64, 3, 3), padding=1), fprop((2, 8, 9, 9), (8, 8, 3, 3)), depthwise), ("NCHW", "NHWC")
    ):
        problem = case.problem(layout=layout)
        peers = [peer for peer in registry.ENGINES if peer.unsupported(device) is None and layout in peer.LAYOUTS]
        us, chosen = min((one for peer in peers if (one := peer.choose(problem, device))), key=lambda one: one[0])
        assert engines.choose(problem, device) == chosen
        assert us < base.LAST_RESORT or device.backend == "opencl" or problem.macs < 40e6
        assert engines.refusal(problem, chosen, device) is None


def test_a_configuration_of_no_engine_is_refused():
    with pytest.raises(TypeError, match=r"config must be one of Depthwise, .*, but got Gone\(name=''\) of type Gone"):
        engines.schedule(fprop((2, 8, 9, 9), (8, 8, 1, 1)).problem(), base.Gone(), H200)
