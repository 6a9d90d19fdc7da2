"""What is handed out: sources with all that tests need, wheels of the same bytes, links that lead somewhere; a checkout's set-up."""

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import pycuda_conv

ROOT = Path(pycuda_conv.__file__).resolve().parent.parent
BUILD = "from setuptools import build_meta as b; b.build_sdist({0!r}); b.build_wheel({0!r})"
HOME = "https://example.org/somebody/pycuda_conv"

needs_sources = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="the package is installed without its sources")


def tracked():
    """The files of the commit, or of the archive that these tests lie in."""
    if (ROOT / ".git").exists() and shutil.which("git"):
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        return sorted(name for name in listed if (ROOT / name).is_file())
    skip = {"__pycache__", "build", "dist", ".pytest_cache", ".hypothesis"}
    paths = (p.relative_to(ROOT) for p in ROOT.rglob("*") if p.is_file())
    return sorted(str(p) for p in paths if skip.isdisjoint(p.parts) and p.suffix not in (".so", ".pyc") and "egg-info" not in str(p))


def built(folder, mask, **env):
    """Copy the sources into `folder` as somebody with that umask would, and build both archives."""
    source, out = folder / "source", folder / "out"
    for name in tracked():
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
        target.chmod((0o777 if os.access(ROOT / name, os.X_OK) else 0o666) & ~mask)
    out.mkdir()
    env = {**os.environ, "CFLAGS": "-O0", **env}  # which takes a tenth of the time
    for name in ("SOURCE_DATE_EPOCH", "PYTHONPATH"):
        env.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", BUILD.format(str(out))], cwd=source, env=env, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return source, next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    if not (ROOT / "setup.py").exists():
        pytest.skip("the package is installed without its sources")
    pytest.importorskip("setuptools.command.bdist_wheel", reason="setuptools builds wheels from version 70.1 on")
    return built(tmp_path_factory.mktemp("one"), 0o022)[1:]


@pytest.fixture(scope="module")
def unpacked(archives, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (top,) = folder.iterdir()
    return top


def test_two_builds_are_the_same_bytes(archives, tmp_path):
    again = built(tmp_path / "another", 0o007)[1:]
    for one, two in zip(archives, again, strict=True):
        assert one.name == two.name and one.read_bytes() == two.read_bytes()


def test_the_archives_have_every_file(archives, unpacked):
    source = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert not set(tracked()) - source - {".gitignore"}
    with zipfile.ZipFile(archives[1]) as wheel:
        names = set(wheel.namelist())
    assert {name for name in tracked() if name.startswith("pycuda_conv/") and name.endswith((".py", ".json", "py.typed"))} <= names
    assert {f"pycuda_conv/{name}" for name in tracked() if re.fullmatch(r"cu/[\w/]+\.cuh?", name)} <= names
    assert not {name for name in names if name.startswith(("tests", "docs", "scripts"))}


def test_tests_run_from_an_unpacked_archive(unpacked, python_env):
    """Some that read files of all kinds: kernels, pages, examples, scripts, the set-up."""
    chosen = [
        "tests/test_package.py::test_public_names_and_version", "tests/test_package.py::test_kernels_include_nothing_but_files_of_ours",
        "tests/test_docs.py::test_every_path_that_a_page_names_exists", "tests/test_docs.py::test_the_readme_is_short", "tests/test_texts.py",
        "tests/test_distribution.py::test_make_verify_sets_up_less_than_make_test",
    ]
    env = {**python_env, "PYTHONPATH": str(unpacked)}
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *chosen]
    done = subprocess.run(run, cwd=unpacked, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0 and re.search(r"\d+ passed", done.stdout), done.stdout + done.stderr


def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def links(text):
    return [place for place in re.findall(r"\]\(([^)\s]+)\)", text) if not place.startswith("#")]


def test_the_metadata_says_what_a_page_of_the_package_needs(archives):
    told = metadata(archives[1])
    assert told["Requires-Python"] == ">=3.10"
    assert {f"Programming Language :: Python :: 3.{n}" for n in (10, 11, 12, 13)} <= set(told.get_all("Classifier"))
    text = told.get_payload()
    assert "# pycuda_conv" in text and told["Description-Content-Type"] == "text/markdown"
    assert all("://" in place for place in links(text)), "links to files lead nowhere on a page of the package"


@needs_sources
def test_with_an_address_links_and_urls_lead_there():
    code = (
        "import setuptools; setuptools.setup = lambda **all: print(all['project_urls'], all['long_description'])\n"
        "exec(compile(open('setup.py').read(), 'setup.py', 'exec'), {'__file__': 'setup.py'})"
    )
    env = {**os.environ, "PYCUDA_CONV_URL": HOME + "/"}
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
    assert f"'Issues': '{HOME}/issues'" in told
    found = [place for place in links(told) if place.startswith(HOME)]
    assert len(found) > 10 and any(place.startswith(f"{HOME}/raw/main/docs/pictures/") for place in found)
    assert all("://" in place for place in links(told))
    for place in found:
        assert (ROOT / re.sub(r".*/(raw|blob)/main/", "", place)).exists(), place


# ---- the set-up of a checkout


@needs_sources
def test_make_verify_sets_up_less_than_make_test(tmp_path):
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not there")
    wanted = {"verify": "verify", "test": "test", "setup": "test"}
    for target, what in wanted.items():
        told = subprocess.run([make, "-n", target, f"VENV={tmp_path}/venv"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert re.findall(r"setup_env.sh \"[^\"]*\" (\w+)", told) == [what]
    (tmp_path / "venv").mkdir()
    for name in (".ready", ".ready-to-verify"):
        (tmp_path / "venv" / name).touch()
    for target in wanted:
        told = subprocess.run([make, "-n", target, f"VENV={tmp_path}/venv"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert "setup_env.sh" not in told


@needs_sources
@pytest.mark.parametrize(
    ("variable", "installs"), [({}, False), ({"SYSTEM_PACKAGES": "install"}, True), ({"SYSTEM_PACKAGES": "yes"}, False)]
)
def test_system_packages_are_not_installed_without_consent(tmp_path, variable, installs):
    """A Python that can't make environments, and a machine on which sudo asks for nothing."""
    fakes = {
        "python3": 'case "$*" in *ensurepip*) exit 1 ;; "-m venv"*) exit 1 ;; esac\nexit 0', "apt-get": f'echo "$@" >> {tmp_path}/called',
        "sudo": f'echo "sudo $@" >> {tmp_path}/called', "id": "echo 1000",
    }
    (tmp_path / "bin").mkdir()
    for name, body in fakes.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    env = {
        name: value for name, value in os.environ.items() if name != "SYSTEM_PACKAGES"
    } | {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "PYTHON": "python3", **variable}
    run = ["bash", str(ROOT / "scripts" / "setup_env.sh"), str(tmp_path / "venv")]
    done = subprocess.run(run, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode != 0
    called = (tmp_path / "called").read_text() if (tmp_path / "called").exists() else ""
    assert bool(called) == installs, called
    assert ("python3-venv" in called) if installs else re.search(
        r"sudo apt-get install python3-venv|SYSTEM_PACKAGES must be", done.stderr
    ), done.stderr


# ---- what `info` finds


def test_versions_are_found_without_lists_of_modules(tmp_path, monkeypatch):
    """Wheels need not say which modules they hold, and Python 3.10 reads only one of the files that may say it."""
    from pycuda_conv.tools import info

    for module, name in (("pyopencl", "pyopencl"), ("cupy", "cupy_cuda13x"), ("PIL", "Pillow")):
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").touch()
        folder = tmp_path / f"{name}-99.5.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 99.5\n")
    (tmp_path / "tifffile.py").touch()  # a module without metadata
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    found = info.versions()
    assert found["PyOpenCL"] == found["CuPy"] == found["Pillow"] == "99.5"
    assert found["tifffile"] is not None and {"scipy", "dask", "zarr", "distributed", "fsspec"} <= set(found)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "zarr", raising=False)  # another test may have imported it
    assert info.versions()["tifffile"] == "of unknown version" and info.versions()["zarr"] is None


@needs_sources
def test_the_citation_names_this_version_and_licence():
    told = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {pycuda_conv.__version__}\n" in told and "\nlicense: MIT\n" in told and told.startswith("cff-version: 1.2.0\n")


@needs_sources
def test_no_page_and_no_message_installs_from_an_index_that_lacks_the_package():
    files = [ROOT / name for name in tracked() if name.endswith((".md", ".py", ".ipynb", ".sh")) and not name.startswith("tests/")]
    assert not [str(path) for path in files if re.search(r"pip install [^\n`]*'?pycuda_conv\b", path.read_text())]
