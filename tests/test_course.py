"""The kernels of the course in docs/course: they are right, a broken line is noticed, and each exercise's line is told from none."""

import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import simt
from fake_cuda import FakeCuda

from pycuda_conv.runtime import binaries

COURSE = Path(__file__).parents[1] / "docs" / "course"
if not COURSE.is_dir() or simt.WHY_NOT:
    pytest.skip(simt.WHY_NOT or "the course is not in the installed package", allow_module_level=True)
spec = importlib.util.spec_from_file_location("course_run", COURSE / "run.py")
run = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # for its dataclasses
spec.loader.exec_module(run)
NAMES = tuple(run.PIECES)


def is_right(name, text, exercise=False, **options):
    return run.is_right(*run.simulated(run.PIECES[name](text, "small", exercise, **options)))


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_is_right(name):
    assert is_right(name, run.text_of(name))


@pytest.mark.parametrize("name", NAMES)
def test_an_exercise_tells_a_right_line_from_none(name):
    text = run.text_of(name)
    (asked,) = re.findall(r"^ *// exercise: .*\n", text, re.M)
    assert not is_right(name, text, exercise=True)
    assert is_right(name, text.replace(asked, f"{asked}{run.SOLUTIONS[name]}\n"), exercise=True)
    assert is_right(name, text.replace(asked, f"{asked}{run.SOLUTIONS[name]}\n")), "the line must not harm what was right"


@pytest.mark.parametrize(
    ("name", "line", "instead"),
    [
        ("7-wgmma", "    fence_for_bulk();", "    //"), ("7-wgmma", "piece ^ r % 8", "piece"), ("7-wgmma", "    __syncthreads();  // all have", "    //"),
        ("8-ring", "    wgmma_fence();\n", ""), ("8-ring", "load_box(stage + A_BYTES,", "load_box(stage,"), ("8-ring", "arrived, STAGE_BYTES", "arrived, STAGE_BYTES / 2"),
        ("9-persistence", "of.column, of.batch);", "of.row, of.batch);"), ("9-persistence", "% (int)of.arg.tiles_n * BLOCK_N", "* BLOCK_N"),
        ("10-im2col", "s, r, 0);", "r, s, 0);"), ("10-im2col", "(int)of.arg.p - (int)of.arg.padding", "(int)of.arg.p"),
        ("11-limbs", "* 2048);", "* 1024);"), ("11-limbs", "+ B_LIMB / 16, true);", ", true);"),
    ],
)  # fmt: skip
def test_a_broken_line_is_noticed(name, line, instead):
    text = run.text_of(name)
    if line not in text:
        pytest.fail(f"{name} has no line {line!r}")
    try:
        assert not is_right(name, text.replace(line, instead))
    except (simt.Wrong, pytest.fail.Exception):
        pass


def test_what_limbs_and_promotion_are_worth():
    def error(**options):
        found, expected = run.simulated(run.limbs(run.text_of("11-limbs"), "small", False, **options))
        return np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))

    assert error() < 3e-7 < 1e-4 < error(products=1) < 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_a_piece_is_short_and_in_the_course(name):
    assert 30 <= len(run.text_of(name).splitlines()) <= 150
    page = (COURSE.parent / "course.md").read_text()
    assert f"(course/{name}.cu)" in page and f"(course/{name}.svg)" in page


@pytest.mark.parametrize("name", NAMES)
def test_it_is_launched_as_other_kernels_are(name, tmp_path, monkeypatch):
    """By the driver's stand-in: each text has a binary, and each launch its arguments."""
    device = FakeCuda(tmp_path, monkeypatch).device("python")
    monkeypatch.setenv("PYCUDA_CONV_CACHE_DIR", str(tmp_path))
    work = run.PIECES[name](run.text_of(name), "large", False)
    for launch in work.launches:
        made_by = SimpleNamespace(identity=("a", "compiler"), compile=lambda source, arch: f"{arch} {source}".encode())
        assert launch.text.encode() in binaries.make(launch.source(), launch.arch, made_by)
        device.launcher(launch)([1 << 20] * len(work.arrays), None)
