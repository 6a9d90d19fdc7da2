"""docs/howto/hopper-kernel.md: its kernel, its engine and its cases, put where the page says, pass the tests that the page has."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import simt

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "howto" / "hopper-kernel.md"
FILES = {"cu/hopper/boxes.cu": 120, "pycuda_conv/engines/hopper/boxes.py": 120, "tests/cases/boxes.py": 60}  # and the most lines of each
pytestmark = [
    pytest.mark.skipif(not PAGE.exists(), reason="the pages are not in the installed package"),
    pytest.mark.skipif(simt.WHY_NOT is not None, reason=str(simt.WHY_NOT)),
]


def texts():
    return re.findall(r"```(?:cuda|py)\n(.*?)```", PAGE.read_text(), re.S)


def test_the_files_are_short():
    assert len(texts()) == len(FILES)
    for (name, most), text in zip(FILES.items(), texts(), strict=True):
        assert len(text.splitlines()) <= most and name in PAGE.read_text()


def test_the_page_s_engine_passes_the_page_s_tests(tmp_path):
    for folder in ("cu", "pycuda_conv", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "data"))
    for name in ("setup.cfg", "pyproject.toml"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tmp_path)
    for name, text in zip(FILES, texts(), strict=True):
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", "tests/test_cases.py", "-k", "boxes or every_engine"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0 and "29 passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
