"""``scripts/release.py``: the parts of one run of everything, and what keeps them from being a release."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "release.py"


@pytest.fixture
def release():
    spec = importlib.util.spec_from_file_location("release", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_keeps_parts_from_being_a_release(release):
    whole = {part: {"status": 0, "tree": "a"} for part in (*release.CHECKS, *release.COMMANDS)}
    assert release.wrong(whole, "a") == []
    assert release.wrong(whole | {"verify": {"status": 1, "tree": "a"}}, "a") == ["verify: ended with status 1"]
    assert release.wrong(whole | {"energy": {"status": 0, "tree": "b"}}, "a") == ["energy: of the tree b, not a"]
    del whole["tests"]
    assert release.wrong(whole, "a") == ["tests: missing"]


def test_a_part_is_measured_and_kept(release, tmp_path, monkeypatch, capsys):
    """With the command's own report, its status and its tree; a part that failed is told."""
    made = 'import json, sys; print("a line"); open(sys.argv[1], "w").write(json.dumps({"rows": 3}))'
    ends = {"drawn": [sys.executable, "-c", made, str(tmp_path / "drawn-report.json")], "energy": [sys.executable, "-c", "raise SystemExit(3)"]}
    monkeypatch.setattr(release, "command", lambda part, folder, seconds: ends[part])
    assert release.measure(tmp_path, ["drawn", "energy"], None) == 1
    kept = json.loads((tmp_path / "drawn.json").read_text())
    assert (kept["status"], kept["report"], kept["output"], kept["tree"]) == (0, {"rows": 3}, ["a line"], release.tree())
    assert "energy: status 3" in capsys.readouterr().out and not (tmp_path / "drawn-report.json").exists()
    assert release.join(tmp_path) > 0  # parts are missing


def test_commands_of_parts(release, tmp_path):
    assert release.command("tests", tmp_path, 60.0)[-2:] == ["--seconds", "60"]
    assert "--seconds" in release.command("drawn", tmp_path, 60.0) and "--seconds" not in release.command("energy", tmp_path, 60.0)
    with pytest.raises(SystemExit):
        release.main(["measure", str(tmp_path), "no part"])
