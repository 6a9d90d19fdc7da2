"""The pages that write an engine: their kernel, module and cases, put where the page says into a copy of the tree, pass what is asked of
every engine.

No other file of the copy changes.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import simt

ROOT = Path(__file__).parents[1]
#: The files of each page and the most lines of each; the tests, the words that choose them, and how many pass at least.
PAGES = {
    "hopper-kernel.md": ({"cu/hopper/boxes.cu": 120, "pycuda_conv/engines/hopper/boxes.py": 120, "tests/cases/boxes.py": 60}, ["test_cases.py"], "boxes", 20),
    "engine.md": (
        {"cu/direct/scale.cu": 30, "pycuda_conv/engines/direct/scale.py": 75, "tests/cases/scale.py": 40},
        ["test_cases.py", "test_engines.py", "test_kernel_texts.py"], "scale", 30,
    ),
}  # fmt: skip
#: The engine of engine.md on the CPU, by OpenCL: what a user calls.
PORTABLE = """
import numpy as np
from pycuda_conv import ConvProblem, Plan
from pycuda_conv.engines.direct.scale import Scale
for dtype in ("float32", "float64", "float16"):
    problem = ConvProblem.forward(2, (3, 5, 7, 11), (5, 1, 1, 1), groups=5, dtype=dtype)
    x = np.random.default_rng(0).integers(-8, 8, (3, 5, 7, 11)).astype(dtype)
    w = np.arange(5).reshape(5, 1, 1, 1).astype(dtype)
    plan = Plan(problem, "opencl", config=Scale(128))
    assert np.array_equal(np.asarray(plan(x, w)), x * w[None, :, 0, 0, 0, None, None]) and "scale" in plan.explain()
"""
pytestmark = pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT))


def text_of(page: str) -> str:
    """A page's text."""
    path = ROOT / "docs" / "howto" / page
    if not path.exists():
        pytest.skip("the pages are not in the installed package")
    return path.read_text()


def files_of(page: str) -> dict[str, str]:
    """Its files."""
    return dict(zip(PAGES[page][0], re.findall(r"```(?:cuda|py)\n(.*?)```", text_of(page), re.S), strict=True))


@pytest.mark.parametrize("page", PAGES)
def test_the_files_are_short(page):
    for name, text in files_of(page).items():
        assert len(text.splitlines()) <= PAGES[page][0][name] and name in text_of(page)


def tree(page: str, folder: Path) -> dict[str, str]:
    """A copy of the tree with the page's files; the environment in which it runs."""
    for part in ("cu", "pycuda_conv", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("data"))  # with what Python has compiled
    for other in set((folder / "tests" / "cases").glob("*.py")) - {folder / "tests" / "cases" / "__init__.py"}:  # whose tests are not run
        other.unlink()
    for name in ("setup.cfg", "pyproject.toml"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder)
    for name, text in files_of(page).items():
        assert not (folder / name).exists()
        (folder / name).write_text(text)
    return {**os.environ, "PYTHONPATH": str(folder)}


@pytest.mark.parametrize("page", PAGES)
def test_its_engine_passes_what_is_asked_of_every_engine(page, tmp_path):
    _, tests, words, count = PAGES[page]
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", *(f"tests/{name}" for name in tests), "-k", words
    ]
    done = subprocess.run(command, cwd=tmp_path, env=tree(page, tmp_path), capture_output=True, text=True, timeout=900, check=False)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0 and passed and int(passed[1]) >= count, done.stdout[-3000:] + done.stderr[-1000:]


def test_it_runs_on_the_cpu(tmp_path):
    pytest.importorskip("pyopencl")
    done = subprocess.run(
        [sys.executable, "-c", PORTABLE], cwd=tmp_path, env=tree("engine.md", tmp_path), capture_output=True, text=True, timeout=900,
        check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
