"""Kernels that are there before they are needed: shipped in the wheel, or compiled by ``pycuda-conv warm``."""

import logging
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from conftest import why_no_opencl

import pycuda_conv
from pycuda_conv import ConvProblem, background, engines
from pycuda_conv.cli import main
from pycuda_conv.errors import BackendError
from pycuda_conv.plan import cached_plan
from pycuda_conv.runtime import binaries, get_device
from pycuda_conv.runtime import opencl as opencl_module
from pycuda_conv.runtime.base import source_of
from pycuda_conv.runtime.compiler import CompileError, Compiler, nvcc, nvrtc
from pycuda_conv.runtime.pocl_process import compile_elsewhere
from pycuda_conv.runtime.target import Target
from pycuda_conv.tools import kernels, warm
from pycuda_conv.tools.families import FAMILIES, draw

SCRIPT = Path(pycuda_conv.__file__).resolve().parent.parent / "scripts" / "ship_kernels.py"
TEXT = '#define ROWS 1\n#line 1 "cu/some.cu"\nand so on\n'


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """An archive with the binary of one text."""
    file = tmp_path / "kernels.zip"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(binaries.shipped_name(TEXT, "sm_80"), b"binary" * 100)
        archive.writestr(binaries.shipped_name(TEXT, "sm_90a"), b"hopper's" * 100)
    monkeypatch.setattr(binaries, "SHIPPED", file)
    binaries._archive.cache_clear()
    yield file
    monkeypatch.undo()
    binaries._archive.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def planned_once():
    """The layers of common networks are the same in every test."""
    launches_of, known = warm.launches_of, {}

    def once(problem, target, constants=False, with_moments=False):
        key = problem, target.name, constants, with_moments
        if key not in known:
            known[key] = launches_of(problem, target, constants, with_moments)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm, "launches_of", once)
        yield


# ---- shipped kernels


def test_shipped_kernels_serve_their_gpus(shipped):
    for arch in ("sm_80", "sm_86", "sm_89"):  # which run what is compiled for older ones of the same major version
        assert binaries.shipped(TEXT, arch) == binaries.find(TEXT, arch, None) == b"binary" * 100 and binaries.serves(arch)
    assert binaries.shipped(TEXT, "sm_90a") == b"hopper's" * 100
    for arch in ("sm_75", "sm_90", "sm_100"):
        assert binaries.shipped(TEXT, arch) is None and not binaries.serves(arch)
    assert binaries.shipped(TEXT + " ", "sm_80") is None


def test_kernels_of_other_headers_are_not_taken(shipped, monkeypatch):
    monkeypatch.setattr(binaries, "headers", lambda: "another")
    assert binaries.shipped(TEXT, "sm_80") is None


def flipped(data, where):
    """One bit is another, in the binary that a GPU would take."""
    at = data.index(b"binary") + int(600 * where)
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(("damage", "told"), [
    (lambda data: flipped(data, 0.05), "is damaged"), (lambda data: flipped(data, 0.5), "is damaged"),
    (lambda data: data[: len(data) // 2], "can't be read"), (lambda data: b"", "can't be read"),
])  # fmt: skip
def test_a_damaged_kernel_or_archive_is_none(shipped, caplog, damage, told):
    shipped.write_bytes(damage(shipped.read_bytes()))
    with caplog.at_level(logging.WARNING, "pycuda_conv"):
        assert binaries.shipped(TEXT, "sm_80") is None
    assert told in caplog.text


@pytest.mark.skipif(not (nvcc() or nvrtc()), reason="no compiler of CUDA C is installed")
def test_the_script_compiles_the_most_used_kernels_into_the_package(tmp_path, python_env):
    """In a copy of the package. Every fiftieth layer of the networks is planned."""
    import shutil

    root = Path(pycuda_conv.__file__).resolve().parent.parent
    for part in ("pycuda_conv", "cu"):
        shutil.copytree(root / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__", "shipped"))
    env = {**python_env, "PYTHONPATH": str(tmp_path), "PYCUDA_CONV_CACHE_DIR": str(tmp_path / "cache")}
    code = f"""
import itertools, runpy, sys
from pycuda_conv.tools import warm
networks = warm.networks
warm.networks = lambda: itertools.islice(networks(), 0, None, 50)
warm.beside = lambda target: iter(())
sys.argv = ["ship_kernels.py", "sm_80", "--count", "2", "--each", "1"]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0 and "sm_80: 2 kernels" in done.stdout, done.stderr
    with zipfile.ZipFile(tmp_path / "pycuda_conv" / "shipped" / "kernels.zip") as archive:
        assert [name.partition("/")[0] for name in archive.namelist()] == ["sm_80"] * 2
        assert all(archive.read(name).startswith(b"\x7fELF") for name in archive.namelist())


# ---- random problems


def test_random_problems_are_of_all_families_and_the_same_again():
    first, again, others = (list(draw(seed, 2)) for seed in (0, 0, 1))
    assert first == again != others and len(first) == 2 * len(FAMILIES)
    assert {p.direction for p in draw(0, 4)} == {"fprop", "dgrad", "wgrad"}


# ---- a GPU that is not here


@pytest.mark.parametrize("name", ["H100", "sm_9", "sm_20", "90a", "sm_90b"])
def test_what_is_no_architecture_is_refused(name):
    with pytest.raises(BackendError, match="a GPU's architecture is"):
        Target(name)


def test_an_archive_is_found_again_and_has_the_same_bytes_every_time(tmp_path, monkeypatch):
    texts = [warm.Text(f"#define N {i}", "sm_80", "some") for i in range(3)]
    made = {text: text.source.encode() * 9 for text in texts}
    files = tmp_path / "one.zip", tmp_path / "other.zip"
    warm.write_archive(files[0], made)
    warm.write_archive(files[1], dict(reversed(made.items())))
    assert files[0].read_bytes() == files[1].read_bytes()
    monkeypatch.setattr(binaries, "SHIPPED", files[0])
    binaries._archive.cache_clear()
    assert [binaries.shipped(text.source, text.arch) for text in texts] == list(made.values())
    monkeypatch.undo()
    binaries._archive.cache_clear()


# ---- the command


class Fake(Compiler):
    name, version, options = "fake", "1.0", ()

    def __init__(self):
        super().__init__(sys.executable)
        self.compiled, self.refused = [], ""

    def compile(self, source, arch):
        if self.refused and self.refused in source:
            raise CompileError("fake failed (1): no room")
        self.compiled.append((source, arch))
        return b"cubin"


@pytest.fixture
def fake(monkeypatch, tmp_path):
    made = Fake()
    monkeypatch.setattr(warm, "compiler", lambda *_: made)
    monkeypatch.setenv("PYCUDA_CONV_CACHE_DIR", str(tmp_path))
    return made


def counts(text):
    return tuple(map(int, re.search(r"(\d+) kernels for \S+: (\d+) were there, (\d+) were compiled by fake 1.0", text).groups()))


def test_what_was_compiled_is_there_the_next_time(fake, capsys):
    assert main(["warm", "--gpu", "sm_80"]) == 0
    all_, there, new = counts(capsys.readouterr().out)
    assert there == 0 < new == all_ == len(fake.compiled)
    assert main(["warm", "--gpu", "sm_80"]) == 0
    assert counts(capsys.readouterr().out) == (all_, all_, 0)
    assert main(["warm", "--gpu", "sm_80", "--training", "--mode", "fp16-nhwc"]) == 0
    assert counts(capsys.readouterr().out)[2] > 0


def test_the_most_used_of_random_problems(fake, capsys, monkeypatch):
    monkeypatch.setattr(warm, "RANDOM", 2)
    some = list(warm.networks())[::50]
    monkeypatch.setattr(warm, "networks", lambda: iter(some))
    assert main(["warm", "--gpu", "sm_90a", "--random", "7"]) == 0
    assert counts(capsys.readouterr().out) == (7, 0, 7)


def test_what_a_compiler_refuses_is_told_and_the_rest_is_compiled(fake, capsys):
    fake.refused = "direct/gemm.cu"
    assert main(["warm", "--gpu", "sm_80"]) == 1
    out = capsys.readouterr().out
    assert "failed: direct_gemm: fake failed (1): no room" in out and counts(out)[2] == len(fake.compiled) > 0


def test_a_model_s_layers(fake, capsys):
    pytest.importorskip("torchvision")
    assert main(["warm", "--gpu", "sm_90a", "--model", "resnet18", "--size", "2,3,64,64", "--training"]) == 0
    assert counts(capsys.readouterr().out)[2] > 5
    assert main(["warm", "--gpu", "sm_90a", "--model", "resnet19"]) == 2
    assert "resnet19" in capsys.readouterr().err


# ---- on OpenCL

SMALL = ConvProblem.forward(2, (1, 3, 12, 13), (5, 3, 3, 3))


@pytest.fixture
def opencl(monkeypatch, tmp_path, fast_env):
    """The device, with an empty cache, which other processes have too."""
    if why_no_opencl():
        pytest.skip(why_no_opencl())
    for name in ("PYTHONPATH", "POCL_EXTRA_BUILD_FLAGS"):
        if name in fast_env:
            monkeypatch.setenv(name, fast_env[name])
    monkeypatch.setenv("PYCUDA_CONV_CACHE_DIR", str(tmp_path))
    # as the others have them
    monkeypatch.setattr(opencl_module, "OPTIONS", [option for option in opencl_module.OPTIONS if option != "-cl-opt-disable"])
    device = get_device("opencl")
    for name in ("_kept", "_compiled", "_coming", "_kernels", "_programs"):
        monkeypatch.setattr(device, name, type(getattr(device, name))())
    return device


OF_FEW = "upsampled", "sum_taps", "rims", "rims_filter"


def test_on_opencl_the_problems_need_nearly_every_text(opencl):
    """All but those of borders, of integers as they lie and of upsampling, which `warm` compiles for nobody beforehand."""
    usual = [(family.file, defines) for family in kernels.families("opencl") if family.file not in OF_FEW for defines in family]
    seldom = "INDEX_64", "BORDERED", "SHOWN", "IN_BYTES"
    texts = {source_of(file, defines) for file, defines in usual if not any(defines.get(name) for name in seldom)}
    found = {
        launch.source() for problem, with_moments in warm.every_kind()
        for launch in warm.launches_of(problem, opencl, with_moments=with_moments)
    }
    found |= {launch.source() for launch in warm.of_images(opencl)}
    assert len(found & texts) >= 0.95 * len(texts)


def test_on_opencl_what_was_compiled_is_there_the_next_time(opencl, monkeypatch, capsys):
    monkeypatch.setattr(warm, "every_kind", lambda: [(SMALL, False)])
    monkeypatch.setattr(warm, "of_images", lambda device: [])
    launches = warm.launches_of(SMALL, opencl)
    assert not any(map(opencl.compiled, launches))
    assert main(["warm", "--device", "opencl"]) == 0
    assert f"{len(launches)} kernels for OpenCL: 0 were there, {len(launches)} were compiled" in capsys.readouterr().out
    assert all(map(opencl.compiled, launches))
    assert main(["warm", "--device", "opencl"]) == 0
    assert f"{len(launches)} were there, 0 were compiled" in capsys.readouterr().out
    before = set(opencl._workshop.programs())
    x, w = np.ones(SMALL.input_shape, "f"), np.ones(SMALL.weight_shape, "f")
    assert np.array_equal(pycuda_conv.conv2d(x, w, device="opencl"), np.full(SMALL.result_shape, 27, "f"))
    assert before <= set(opencl._workshop.programs())


@pytest.mark.parametrize(
    "arguments, words", [(("--constants",), "--constants is for GPUs"), (("--model", "no such network"), "nknown model")]
)
def test_on_opencl_what_is_refused(opencl, capsys, arguments, words):
    if "--model" in arguments:
        pytest.importorskip("torchvision")
    assert main(["warm", "--device", "opencl", *arguments]) == 2 and words in capsys.readouterr().err


def test_on_opencl_a_compiled_kernel_stands_in_while_another_process_compiles(opencl, monkeypatch):
    """The first call waits for no compiler, a later one has the planner's choice, and the bits are the same."""
    monkeypatch.delenv("PYCUDA_CONV_BACKGROUND", raising=False)
    monkeypatch.setattr(background, "configs_used", {})
    cached_plan.cache_clear()
    x, w = (np.random.default_rng(0).standard_normal(shape).astype("f") for shape in ((2, 6, 37, 45), (6, 1, 3, 3)))
    problem = ConvProblem.forward(2, x.shape, w.shape, groups=6)
    best = engines.choose(problem, opencl)
    other = engines.alternatives(problem, best, opencl)[0]
    for launch in background.launches(engines.schedule(problem, other, opencl)):
        opencl.compile(launch)
    compiled, waited = type(opencl)._compile, []
    monkeypatch.setattr(type(opencl), "_compile", lambda self, step, *rest: (waited.append(step.source()), compiled(self, step, *rest))[1])
    first = pycuda_conv.conv2d(x, w, groups=6, device="opencl")
    plan = cached_plan(problem, opencl)
    assert plan.config == other != best and not waited and plan._background is not None
    for future in opencl._coming.values():
        future.result(timeout=300)
    assert opencl._coming and all(map(opencl.compiled, background.launches(engines.schedule(problem, best, opencl))))
    for _ in range(3):
        assert pycuda_conv.conv2d(x, w, groups=6, device="opencl").tobytes() == first.tobytes()
    assert cached_plan(problem, opencl).better.config == best
    cached_plan.cache_clear()


def test_on_opencl_a_process_that_fails_is_told(opencl, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nothing/there")
    with pytest.raises(CompileError, match="can't be started"):
        compile_elsewhere(warm.launches_of(SMALL, opencl)[0])
