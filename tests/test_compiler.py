"""nvcc and NVRTC: that they compile, what they say when they can't, which one is taken."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from reference import fprop, python

import pycuda_conv
from pycuda_conv.engines.direct import direct
from pycuda_conv.errors import BackendError
from pycuda_conv.runtime import compiler, driver
from pycuda_conv.runtime.compiler import CompileError, Nvcc, Nvrtc, PyCuda

FOUND = {"nvcc": (compiler.nvcc(), Nvcc), "nvrtc": (compiler.nvrtc(), Nvrtc)}


@pytest.fixture(params=FOUND)
def one(request):
    path, make = FOUND[request.param]
    if path is None:
        pytest.skip(f"{request.param} is not installed")
    return make(path)


def forget():
    for find in (compiler.compiler, compiler.nvcc, compiler.nvrtc):
        find.cache_clear()


@pytest.fixture
def fresh(monkeypatch):
    """What was found before is forgotten, during the test and after it."""
    forget()
    yield monkeypatch
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_text_becomes_machine_code(one, dtype):
    problem = fprop((2, 3, 9, 9), (6, 1, 3, 3), groups=3).problem(dtype)
    ((launch,),) = direct.schedule(problem, direct.Single(), SimpleNamespace(backend="cuda")).steps
    assert one.compile(launch.source(), "sm_90").startswith(b"\x7fELF")


def test_what_a_compiler_says_is_passed_on(one):
    with pytest.raises(CompileError, match=r'failed \(\d+\)(.|\n)*identifier "nonsense" is undefined'):
        one.compile("__global__ void f() { nonsense; }", "sm_90")


def _script(path, text):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_compiler_that_is_gone_or_killed_says_so(tmp_path):
    with pytest.raises(CompileError, match="nvcc could not be run"):
        Nvcc(str(tmp_path / "nvcc")).compile("", "sm_90")
    with pytest.raises(CompileError, match=r"nvrtc failed(.|\n)*libnvrtc.so.13: cannot open shared object file"):
        Nvrtc(str(tmp_path / "libnvrtc.so.13")).compile("", "sm_90")
    _script(tmp_path / "nvcc", "#!/bin/sh\nkill -9 $$\n")
    with pytest.raises(CompileError, match=r"nvcc failed \(-9\)"):
        Nvcc(str(tmp_path / "nvcc")).compile("", "sm_90")


def test_a_newer_compiler_behind_the_same_script_is_another(tmp_path, fresh):
    _script(tmp_path / "nvcc", "#!/bin/sh\ncat version\n")
    fresh.chdir(tmp_path)
    identities = []
    for version in ("13.0", "13.1"):
        (tmp_path / "version").write_text(version)
        compiler._version_behind.cache_clear()
        identities.append(Nvcc(str(tmp_path / "nvcc")).identity)
    assert identities[0] != identities[1]


def test_which_compiler_is_taken(tmp_path, fresh):
    _script(tmp_path / "nvcc", "#!/bin/sh\n")
    fresh.setenv("PATH", str(tmp_path))
    fresh.setattr(compiler, "_nvrtc_folders", lambda: [tmp_path])
    fresh.delenv("PYCUDA_CONV_COMPILER", raising=False)
    assert compiler.compiler().path == str(tmp_path / "nvcc")
    for version in (12, 13, 14):
        (tmp_path / f"libnvrtc.so.{version}").touch()
    forget()
    assert compiler.compiler().path == str(tmp_path / "libnvrtc.so.14")
    assert compiler.compiler(13).path == str(tmp_path / "libnvrtc.so.13")  # a driver of CUDA 13 loads nothing of CUDA 14
    assert compiler.compiler(11).path == str(tmp_path / "nvcc")
    forget()
    fresh.setenv("PYCUDA_CONV_COMPILER", "nvcc")
    assert compiler.compiler(13).path == str(tmp_path / "nvcc")
    forget()
    fresh.setenv("PYCUDA_CONV_COMPILER", "gcc")
    with pytest.raises(BackendError, match="must be 'nvrtc', 'nvcc' or 'pycuda', got 'gcc'"):
        compiler.compiler()


def test_where_there_is_none_the_text_says_what_to_install_and_what_was_asked_for(tmp_path, fresh):
    fresh.setenv("PATH", str(tmp_path))
    fresh.setattr(compiler, "_roots", lambda: [])
    fresh.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    fresh.delenv("PYCUDA_CONV_COMPILER", raising=False)
    with pytest.raises(CompileError, match="pip install nvidia-cuda-nvrtc"):
        compiler.compiler()
    for asked, missing in ("nvrtc", "nvrtc"), ("pycuda", "nvcc"):
        fresh.setenv("PYCUDA_CONV_COMPILER", asked)
        with pytest.raises(CompileError, match=f"{missing}, which PYCUDA_CONV_COMPILER asks for, was not found"):
            compiler.compiler()
    forget()
    _script(tmp_path / "nvcc", "#!/bin/sh\n")
    fresh.setitem(sys.modules, "pycuda.compiler", None)
    with pytest.raises(CompileError, match="PyCUDA, which PYCUDA_CONV_COMPILER asks for, is not importable"):
        compiler.compiler()


def test_nvrtc_of_a_package_comes_before_a_toolkit_s(tmp_path, fresh):
    for folder in ("toolkit/lib64", "package/lib"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "libnvrtc.so.13").touch()
    fresh.setattr(compiler, "_roots", lambda: [os.fspath(tmp_path / "toolkit")])

    class Spec:
        submodule_search_locations = (os.fspath(tmp_path / "package"),)

    fresh.setattr(compiler.importlib.util, "find_spec", lambda name: Spec() if name == "nvidia.cu13" else None)
    assert compiler.nvrtc() == os.fspath(tmp_path / "package/lib/libnvrtc.so.13")


SLOW = "#!/bin/sh\necho $$ > pid\nexec sleep 10000\n"


def test_a_process_that_ends_takes_its_compilers_along(tmp_path, python_env):
    """And does not wait for them."""
    _script(tmp_path / "nvcc", SLOW)
    code = f"""
import os, threading, time
os.chdir({str(tmp_path)!r})
from pycuda_conv.runtime.compiler import Nvcc
threading.Thread(target=Nvcc("./nvcc").compile, args=("", "sm_90"), daemon=True).start()
while not os.path.exists("pid") or not os.stat("pid").st_size:
    time.sleep(0.01)
"""
    begin = time.monotonic()
    python(code, python_env, TMPDIR=str(tmp_path), PYTHONWARNINGS="ignore")
    assert time.monotonic() - begin < 900
    pid = int((tmp_path / "pid").read_text())
    while any(
        "sleep" in line
        for line in subprocess.run(["ps", "-p", str(pid), "-o", "args="], capture_output=True, text=True, check=False).stdout.splitlines()
    ):
        assert time.monotonic() - begin < 1800
        time.sleep(0.01)


def test_an_old_pycuda_is_refused_by_name():
    for version in ((2026, 1), (2026, 1, 1), (2027, 0)):
        driver.check_version(version)
    for version, text in (((2025, 1, 2), r"2025\.1\.2"), ((2024, 1), r"2024\.1"), ((2026, 0), r"2026\.0")):
        with pytest.raises(BackendError, match=rf"PyCUDA {text} is too old, and 2026\.1 or a newer one is needed: pip install"):
            driver.check_version(version)


def test_the_oldest_pycuda_is_the_one_that_is_installed():
    setup = (Path(pycuda_conv.__file__).resolve().parent.parent / "setup.cfg").read_text()
    assert f"pycuda>={'.'.join(map(str, driver.OLDEST))}\n" in setup


class OfPyCuda:
    """PyCUDA's modules as far as the compiler asks them."""

    class CompileError(Exception):
        pass

    def __init__(self, patch, version="2026.1", flags=()):
        self.calls, self.error = [], None
        patch.setitem(sys.modules, "pycuda", SimpleNamespace(VERSION_TEXT=version))
        patch.setitem(sys.modules, "pycuda.driver", self)
        patch.setitem(sys.modules, "pycuda.compiler", SimpleNamespace(compile=self.compile, DEFAULT_NVCC_FLAGS=list(flags)))

    def compile(self, source, nvcc, options, **more):
        self.calls.append((source, nvcc, options, more))
        if self.error:
            raise self.error
        return b"machine code"


def test_pycuda_compiles_if_it_is_chosen(tmp_path, fresh):
    _script(tmp_path / "nvcc", "#!/bin/sh\n")
    fresh.setenv("PATH", str(tmp_path))
    fresh.setenv("PYCUDA_CONV_COMPILER", "pycuda")
    its = OfPyCuda(fresh, flags=["-lineinfo"])
    chosen = compiler.compiler()
    assert type(chosen) is PyCuda and chosen.name == "pycuda" and chosen.path == str(tmp_path / "nvcc")
    for _ in range(2):
        assert chosen.compile("a text", "sm_90a") == b"machine code"
    assert its.calls[0] == its.calls[1]  # what PyCUDA adds to the options is not added to ours
    source, nvcc, options, more = its.calls[0]
    assert source == 'extern "C++" {\na text\n}\n' and nvcc == chosen.path and options[-1] == "-lineinfo"
    assert more == {"arch": "sm_90a", "cache_dir": False, "include_dirs": pycuda_conv.include_dirs()}
    its.error = its.CompileError("nvcc compilation of kernel.cu failed")
    with pytest.raises(CompileError, match=r"PyCUDA could not compile: nvcc compilation of kernel\.cu failed"):
        chosen.compile("a text", "sm_90")


def test_what_pycuda_compiled_is_kept_apart(tmp_path, fresh):
    _script(tmp_path / "nvcc", "#!/bin/sh\n")
    identities = {Nvcc(str(tmp_path / "nvcc")).identity}
    for version, flags in (("2026.1", ()), ("2026.2", ()), ("2026.1", ("--use_fast_math",))):
        OfPyCuda(fresh, version, flags)
        identities.add(PyCuda(str(tmp_path / "nvcc")).identity)
    assert len(identities) == 4
