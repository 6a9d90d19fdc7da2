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
    whole = {part: {"status": 0, "tree": "a"} for part in release.PARTS}
    assert release.wrong(whole, "a") == []
    assert release.wrong(whole | {"verify": {"status": 1, "tree": "a"}}, "a") == ["verify: ended with status 1"]
    assert release.wrong(whole | {"energy": {"status": 0, "tree": "b"}}, "a") == ["energy: of the tree b, not a"]
    del whole["tests"]
    assert release.wrong(whole, "a") == ["tests: missing"]


MAKES = """
import json, pathlib, sys
report, pages, plots = map(pathlib.Path, sys.argv[1:4])
print("a line")
report.write_text(json.dumps({"rows": 3}))
page = pages / "docs/results.md"
page.write_text(page.read_text().replace("<!-- drawn:begin -->\\n", "<!-- drawn:begin -->\\na figure of kernels `" + sys.argv[4] + "`\\n"))
(plots / "drawn.svg").write_text("a plot")
"""


@pytest.fixture
def measured(release, tmp_path, monkeypatch, capsys):
    """The folder of a run of `drawn`, which makes all that a part may make, of `energy`, which fails, and of `images`, which hangs."""

    def command(part, folder, pages, seconds):
        run = {"drawn": MAKES, "energy": "raise SystemExit(3)", "images": "import time; print('before', flush=True); time.sleep(600)"}[part]
        arguments = str(folder / f"{part}-report.json"), str(pages), str(folder / "plots"), release.digest()
        return [sys.executable, "-IS", "-c", run, *arguments]  # what hangs has a second to start

    monkeypatch.setattr(release, "command", command)
    monkeypatch.setattr(release, "GRACE", 0.0)
    parts = {"drawn": 30.0, "energy": None, "images": 1.0, "host": 50.0}
    assert release.measure(tmp_path / "run", parts, within=40) == 3
    said = capsys.readouterr().out
    assert "energy: status 3" in said and "images: status 137" in said and "host: not begun" in said
    return tmp_path / "run"


def test_a_part_is_measured_and_kept(release, measured):
    """With the command's own report, its sections of the pages, its status and its tree; what hangs is killed, and what it said is kept."""
    kept = json.loads((measured / "drawn.json").read_text())
    assert (kept["status"], kept["report"], kept["output"], kept["tree"]) == (0, {"rows": 3}, ["a line"], release.tree())
    assert kept["pages"] == {"docs/results.md": {"drawn": f"a figure of kernels `{release.digest()}`\n"}, "README.md": {}} and (measured / "plots" / "drawn.svg").exists()
    assert json.loads((measured / "images.json").read_text())["output"] == ["before"]
    assert not (measured / "drawn-report.json").exists() and not (measured / "host.json").exists()


def test_pages_are_made_of_the_parts(release, measured, tmp_path, monkeypatch):
    """Also of a run that is no release; that of a release is kept, and gets its date."""
    root = tmp_path / "checkout"
    (root / "docs" / "plots").mkdir(parents=True)
    for name in ("setup.cfg", "CHANGELOG.md", "README.md", "docs/results.md"):
        (root / name).write_text((release.ROOT / name).read_text())
    known = release.tree()
    monkeypatch.setattr(release, "tree", lambda: known)
    monkeypatch.setattr(release, "ROOT", root)
    monkeypatch.setattr(release.subprocess, "run", lambda *_, **__: type("Done", (), {"stdout": "1234\n"}))
    assert release.join(measured) > 0
    assert f"<!-- drawn:begin -->\na figure of commit `1234`, kernels `{release.digest()}`\n<!-- drawn:end -->" in (root / "docs" / "results.md").read_text()
    assert (root / "docs" / "plots" / "drawn.svg").read_text() == "a plot" and not (root / "docs" / "results").exists()
    part = json.loads((measured / "drawn.json").read_text())
    for name in release.PARTS:
        (measured / f"{name}.json").write_text(json.dumps(part | {"part": name}))
    (root / "CHANGELOG.md").write_text("## 0.1.0, not released yet\n")
    assert release.join(measured) == 0
    (made,) = (root / "docs" / "results").glob("*.json")
    found = json.loads(made.read_text())
    assert list(found["parts"]) == list(release.PARTS) and found["commit"] == "1234" and "pages" not in found["parts"]["drawn"]
    assert (root / "CHANGELOG.md").read_text().startswith(f"## {found['version']}, 2")
    part["tree"] = "another"
    (measured / "drawn.json").write_text(json.dumps(part | {"pages": {"README.md": {"drawn": "of another tree"}}}))
    assert release.join(measured) == 1 and "of another tree" not in (root / "README.md").read_text()


def test_commands_of_parts(release, tmp_path, capsys):
    """Each ends when it is told to, if it can, and writes into the folders that it is given."""
    pages = tmp_path / "pages"
    assert release.command("tests", tmp_path, pages, 60.0)[-2:] == ["--seconds", "60"]
    for part in release.COMMANDS:
        words = release.command(part, tmp_path, pages, 60.0)
        assert ("--seconds" in words) == (part not in release.TIMELESS) and words[-2:] == ["--pages", str(pages)]
        assert "docs/plots" not in words and ("--plots" not in words or str(tmp_path / "plots") in words)
    for words in (["no part"], ["drawn=soon"]):
        with pytest.raises(SystemExit):
            release.main(["measure", str(tmp_path), *words])
    assert "there is no part no part" in capsys.readouterr().err
    given = []
    release.measure = lambda *args: given.append(args) or 0
    assert release.main(["measure", str(tmp_path), "drawn=90", "loop", "--within", "500"]) == 0
    assert given == [(tmp_path, {"drawn": 90.0, "loop": None}, 500.0)]


def test_every_command_takes_what_a_release_gives_it(release, tmp_path, capsys, monkeypatch):
    """It is refused for want of a GPU alone."""
    from pycuda_conv import cli

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    release.empty_pages(tmp_path)
    for part in release.COMMANDS:
        if part not in ("verify", "images"):  # which run without a GPU
            assert cli.main(release.command(part, tmp_path, tmp_path, 60.0)[3:]) == 2
            said = capsys.readouterr().err
            assert "needs a GPU" in said or "no NVIDIA GPU" in said, (part, said)
