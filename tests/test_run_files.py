"""`pycuda-conv run` on files, patterns and folders, as cp takes them; and its streams: closed, full, broken, unable to encode a name."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import why_no_opencl

from pycuda_conv.tools import files
from pycuda_conv.tools.terminal import FAILED, OK, UNUSABLE

Image = pytest.importorskip("PIL.Image", reason="pictures are read by Pillow")
pytestmark = pytest.mark.skipif(bool(why_no_opencl()), reason=str(why_no_opencl()))


@pytest.fixture
def blur(command, monkeypatch, tmp_path):
    """`run --filter blur`, in a folder with pictures."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.png", "b.png", "in/c.png", "in/deep/d.png"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(len(name)).integers(0, 256, (9, 11), np.uint8)).save(name)
    Path("in/notes.txt").write_text("no picture")
    Path("in/.hidden.png").write_text("no picture")
    return partial(command, "run", "--filter", "blur", "--device", "opencl")


def pictures(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*.png"))


@pytest.mark.parametrize("arguments, expected", [
    (("a.png", "made/"), ["a.png"]), (("a.png", "there"), ["a.png"]), (("a.png", "made/below/"), ["below/a.png"]), (("a.png", "b.png", "made"), ["a.png", "b.png"]),
    (("*.png", "made"), ["a.png", "b.png"]), (("[b-z].png", "made/"), ["b.png"]), (("in", "made"), ["c.png", "deep/d.png"]), (("in/", "there"), ["c.png", "deep/d.png"]),
    (("a.png", "in", "there"), ["a.png", "c.png", "deep/d.png"]), (("**/*.png", "made"), ["a.png", "b.png", "c.png", "d.png"]),
])  # fmt: skip
def test_files_patterns_and_folders(blur, arguments, expected):
    Path("there").mkdir()
    status, out, err = blur(*arguments)
    folder = arguments[-1].partition("/")[0]
    assert (status, err) == (OK, "") and pictures(folder) == expected and out.count("\n") == len(expected)
    blurred = np.asarray(Image.open(next(Path(folder).rglob(Path(expected[-1]).name))))
    source = next(
        path for path in (Path("."), Path("in"), Path("in/deep")) if (path / Path(expected[-1]).name).exists()
    ) / Path(expected[-1]).name
    assert blur(source, "one.png")[0] == OK
    assert np.array_equal(np.asarray(Image.open("one.png")), blurred)


def test_a_folder_may_hold_its_results(blur):
    assert blur("in", "in/out")[0] == OK and blur("in", "in/out", "--force")[0] == OK
    assert pictures("in/out") == ["c.png", "deep/d.png"]


def test_a_run_goes_on_after_files_that_fail(blur):
    Path("in/damaged.png").write_bytes(Path("a.png").read_bytes()[:40])
    Path("made").mkdir()
    Path("made/c.png").write_text("old")
    status, out, err = blur("in", "made")
    lines = err.splitlines()
    assert status == FAILED and out.count("\n") == 1 and Path("made/c.png").read_text() == "old" and Path("made/deep/d.png").exists()
    assert lines[0] == "pycuda-conv run: 2 of 3 files failed:" and len(lines) == 3
    assert "made/c.png exists already; --force replaces it" in lines[1] and "in/damaged.png can't be read" in lines[2]
    assert not list(Path("made").glob(".*"))
    status, out, err = blur("in", "made", "--force")
    assert (status, err.count("\n")) == (FAILED, 2) and "1 of 3 files failed" in err


@pytest.mark.parametrize("arguments, words", [
    (("a.png", "b.png", "c.png"), "c.png must be a folder, for there are 2 inputs"), (("in", "a.png"), "a.png must be a folder"), (("empty", "made"), "empty is a folder without"),
    (("a.png", "in/../a.png", "made"), "made can't hold the results of 2 files called a.png"), (("none*.png", "made"), "none*.png matches no file"),
    (("a.png", "b.png", "made", "--filter", "none.npy"), "none.npy can't be read"), (("a.png", "a.png/"), "a.png can't be made"), (("a.png", "b.png", "a.png/deep"), "2 of 2"),
])  # fmt: skip
def test_what_is_refused(blur, arguments, words):
    Path("empty").mkdir()
    status, out, err = blur(*arguments)
    assert (status, out) == (FAILED if words == "2 of 2" else UNUSABLE, "") and words in err and not Path("made").exists()


def test_ctrl_c_tells_what_is_done(blur, monkeypatch):
    from pycuda_conv.tools.pictures import filtering

    filtered, calls = filtering.filtered, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return filtered(*arguments)

    monkeypatch.setattr(filtering, "filtered", interrupted)
    status, _, err = blur("a.png", "b.png", "in/c.png", "made")
    assert (status, err) == (130, "interrupted; 1 of 3 files are done; the same command with --resume does the others\n")
    assert pictures("made") == ["a.png"]
    status, out, err = blur("a.png", "b.png", "in/c.png", "made", "--resume")
    assert (status, err, out.count("is there already")) == (OK, "", 1) and pictures("made") == ["a.png", "b.png", "c.png"]


def test_a_bar_by_files(blur, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    status, out, err = blur("in", "made")
    assert status == OK and "of 2 files" in err and "in/deep/d.png" in err and files._by_files is None and "\x1b" not in out


# ---- streams, in processes of their own


def run(env, folder, redirection, *arguments, **options):
    """The command behind a shell's redirection."""
    words = [sys.executable, "-m", "pycuda_conv", "run", "--filter", "blur", "--device", "opencl", *arguments]
    return subprocess.run(
        ["bash", "-c", f'"$@" {redirection}', "bash", *words], env=env, cwd=folder, capture_output=True, timeout=900, check=False, **options
    )


@pytest.mark.parametrize("redirection", [">&-", "<&- >&- 2>&-", "> /dev/full", "2> /dev/full", "> >(exec true)"])
def test_streams_that_take_nothing(blur, fast_env, redirection):
    done = run(fast_env, ".", redirection, "a.png", "b.png", "in/c.png", "made")
    assert done.returncode == OK and pictures("made") == ["a.png", "b.png", "c.png"]
    assert all(np.asarray(Image.open(f"made/{name}")).shape == (9, 11) for name in pictures("made"))
    assert done.stderr in (b"", b"pycuda-conv run: No space left on device\n") and b"Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("redirection", ["2>&-", "2> /dev/full", "> >(exec true)"])
def test_the_status_is_the_work_s(blur, fast_env, redirection):
    Path("damaged.png").write_bytes(Path("a.png").read_bytes()[:40])
    done = run(fast_env, ".", redirection, "a.png", "damaged.png", "made")
    assert done.returncode == FAILED and pictures("made") == ["a.png"] and b"Traceback" not in done.stdout + done.stderr
    assert run(fast_env, ".", redirection, "damaged.png", "y.png").returncode == UNUSABLE


@pytest.mark.parametrize("name, locale", [
    (b"caf\xc3\xa9.png", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}), (b"caf\xc3\xa9.png", {"PYTHONIOENCODING": "ascii:strict"}),
    (b"\xff\xfe.png", {"PYTHONIOENCODING": "utf-8:strict"}), (b"\xff\xfe.png", {}),
])
def test_names_that_stdout_can_t_encode(blur, fast_env, name, locale):
    try:
        os.rename(b"a.png", name)
    except OSError:
        pytest.skip("the file system takes no such name")
    done = run({**fast_env, **locale}, ".", "", name, "b.png", "made")
    assert (done.returncode, done.stderr) == (OK, b"")
    assert sorted(os.listdir(b"made")) == sorted([name, b"b.png"]) and done.stdout.count(b"\n") == 2
    Path(os.fsdecode(name)).write_bytes(b"damaged")
    done = run({**fast_env, **locale}, ".", "", name, "b.png", "again")
    assert done.returncode == FAILED and done.stderr.count(b"\n") == 2 and b"Traceback" not in done.stderr


@pytest.mark.parametrize("arguments, redirection", [
    ("info", ">&-"), ("verify --list", "> >(exec true)"), ("kernels opencl", ">&-"), ("--help", "> >(exec true)"), ("run --help", ">&-"), ("--version", "> >(exec true)"),
])
def test_other_commands_end_quietly_too(fast_env, tmp_path, arguments, redirection):
    words = [sys.executable, "-m", "pycuda_conv", *arguments.split()]
    done = subprocess.run(
        ["bash", "-c", f'"$@" {redirection}', "bash", *words], env=fast_env, cwd=tmp_path, capture_output=True, timeout=900, check=False
    )
    assert (done.returncode, done.stderr) == (OK, b"")
