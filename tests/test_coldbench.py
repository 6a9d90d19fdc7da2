"""``pycuda-conv bench --cold``: what it shows of its children's figures. These need a GPU; the rest is tested without."""

import json
import subprocess
from pathlib import Path

import pytest

from pycuda_conv.cli import main
from pycuda_conv.tools import bench
from pycuda_conv.tools.benchmarks import coldbench
from pycuda_conv.tools.terminal import ToolError


@pytest.fixture
def children(monkeypatch):
    """Children that are not started: (case, ours) of each, with figures by what they are called."""
    from types import SimpleNamespace

    asked = []

    def measure(case, ours, archive):
        asked.append((case.kind, case.name, case.wheel, ours, archive and archive.exists()))
        return dict.fromkeys(case.shown, 0.25 if ours else 0.002)

    monkeypatch.setattr(coldbench, "measure", measure)
    monkeypatch.setattr(bench, "gpu_for", lambda settings, flag: SimpleNamespace(capability=(9, 0), model="H200"))
    monkeypatch.setattr(coldbench, "make_archive", lambda file, architecture: file.write_bytes(b""))
    return asked


def test_every_figure_is_shown_beside_torch_s(children, capsys, tmp_path):
    assert main(["bench", "--cold", "--json", str(tmp_path / "cold.json")]) == 0
    out = capsys.readouterr().out
    rows = json.loads((tmp_path / "cold.json").read_text())["rows"]
    assert len(rows) == sum(len(case.shown) for case in coldbench.CASES)
    assert all(row == {"what": row["what"], "ours_s": 0.25, "torch_s": 0.002} for row in rows)
    assert out.count("250.0") == out.count(" 2.0") == len(rows)
    assert [(wheel, there) for _, _, wheel, ours, there in children if ours and wheel] == [(True, True)] * 2
    by_torch = [(kind, name) for kind, name, _, ours, _ in children if not ours]
    assert len(by_torch) == len(set(by_torch)) < len(coldbench.CASES)


@pytest.mark.parametrize("wheel", [False, True])
def test_only_a_wheel_s_case_finds_shipped_kernels(wheel, monkeypatch, tmp_path):
    asked = []

    def run(command, **options):
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, "{}", "")

    monkeypatch.setattr(coldbench.subprocess, "run", run)
    case = next(case for case in coldbench.CASES if case.wheel == wheel)
    assert coldbench.measure(case, True, tmp_path) == coldbench.measure(case, False, tmp_path) == {}
    ours, torchs = asked
    assert ours[-4:-1] == [case.kind, case.name, "ours"] and torchs[-3:] == [case.kind, case.name, "torch"]
    assert (ours[-1] == str(tmp_path)) == wheel and Path(ours[-1]).exists() == wheel


def test_a_child_that_fails_costs_its_rows_only(children, capsys, monkeypatch):
    def measure(case, ours, archive):
        if case.kind == "training":
            raise ToolError("training resnet50 failed: out of memory")
        return dict.fromkeys(case.shown, 1.0)

    monkeypatch.setattr(coldbench, "measure", measure)
    assert main(["bench", "--cold"]) == 1
    said = capsys.readouterr()
    assert "out of memory" in said.err and "resnet18" in said.out and "resnet50" not in said.out
