"""Scripts that measure: they run without a GPU, on small layers here."""

import importlib.util
import sys
from pathlib import Path

import pytest
from conftest import why_no_opencl

import pycuda_conv as pc
from pycuda_conv.timing import Effort

SCRIPTS = Path(pc.__file__).resolve().parent.parent / "scripts"
pytestmark = [
    pytest.mark.skipif(bool(why_no_opencl()), reason=str(why_no_opencl())), pytest.mark.skipif(not SCRIPTS.is_dir(), reason="no scripts/ beside the package"),
]  # fmt: skip


def load(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_ladder_has_the_steps_that_pocl_can_run(monkeypatch, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    ladder = load("ladder")
    monkeypatch.setattr(ladder, "SMALL_LAYER", pc.ConvProblem.forward(2, (1, 8, 9, 9), (8, 8, 3, 3), padding=1))
    monkeypatch.setattr(ladder, "Effort", lambda **_: Effort(rounds=1, seconds=0.01, most_rounds=1))
    monkeypatch.setattr(sys, "argv", ["ladder.py", "--device", "opencl", "--plot", str(tmp_path / "ladder.svg")])
    ladder.main()
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("conv2d 1x8x9x9 -> 8x9x9 k3x3 s1 p1 float32 on ") and len(lines) >= 5
    assert lines[0].startswith("a thread a pixel") and any(line.startswith("torch, ") for line in lines)
    assert all(float(line.rpartition(" ")[2]) < 1e-6 for line in lines) and (tmp_path / "ladder.svg").stat().st_size > 1000


def test_the_cpu_is_compared_with_scipy_and_torch(monkeypatch, capsys):
    pytest.importorskip("scipy")
    cpu = load("cpu")
    for name, value in {"ROUNDS": 1, "SECONDS": 0, "IMAGES": (((20, 30), 3),), "LAYERS": (((1, 4, 6, 6), (4, 4, 3, 3), 1),)}.items():
        monkeypatch.setattr(cpu, name, value)
    cpu.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and "ours / scipy" in lines[1] and "ours / torch" in lines[2]
