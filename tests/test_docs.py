"""The README and docs/: their links, their code, their pictures, the notebooks, and the site as a whole."""

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from conftest import why_no_cuda, why_no_opencl

import pycuda_conv as pc
from pycuda_conv import cli

ROOT = Path(pc.__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")] + sorted(DOCS.rglob("*.md"))
pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="no docs/ beside the package")


def name(path):
    return path.relative_to(ROOT).as_posix()


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)


#: Files that a page tells its reader to make.
MADE = {
    "docs/howto/hopper-kernel.md": {"cu/hopper/boxes.cu", "pycuda_conv/engines/hopper/boxes.py", "tests/cases/boxes.py"},
    "docs/howto/engine.md": {"cu/direct/scale.cu", "pycuda_conv/engines/direct/scale.py", "tests/cases/scale.py"},
}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_path_that_a_page_names_exists(page):
    text = page.read_text()
    prose = re.sub(r"```.*?```", "", text, flags=re.S)  # a lambda of C++ looks like a link
    links = [t for t in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose) if not t.startswith(("http:", "https:", "mailto:"))]
    folders = r"(?:cu|tests|scripts|examples|pycuda_conv|docs|\.ci)"
    paths = re.findall(rf"(?<![\w./-])({folders}/[\w./-]*\w)", text)
    missing = {t for t in links if not (page.parent / t).exists()} | {t for t in paths if not (ROOT / t).exists()}
    assert missing == MADE.get(name(page), set())


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert all(len(block.splitlines()) <= 10 for block in re.findall(r"```python\n(.*?)```", text, re.S))


def runs_here(code):
    """Whether a block can run here. What needs more than the package and torch says so in its first line."""
    needs = re.match(r"# needs (.*)", code)
    if needs and "CuPy" in needs[1] and find_spec("cupy") is None:
        return False
    return not needs or why_no_cuda() is None


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_the_code_of_a_page_runs(page, device, monkeypatch, tmp_path):
    """From top to bottom, as one program; blocks that need a GPU are left out where there is none."""
    if any("torch" in code for code in blocks(page, "python")) and torch.cuda.is_available() != (device != "opencl"):
        pytest.skip("torch's tensors lie elsewhere")
    if any("dask" in code for code in blocks(page, "python")):
        pytest.importorskip("dask.array")
    if any('device="opencl"' in code for code in blocks(page, "python")) and why_no_opencl():
        pytest.skip(why_no_opencl())
    monkeypatch.setenv("PYCUDA_CONV_BACKEND", device.partition(":")[0])
    monkeypatch.chdir(tmp_path)
    if any("pycuda.autoinit" in code for code in blocks(page, "python")):  # the context that it makes would stay current here
        if device == "opencl":
            pytest.skip("the page is for GPUs")
        code = "\n".join(blocks(page, "python"))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stderr
        return
    names = {"__name__": "__main__"}
    for code in blocks(page, "python"):
        ready = compile(code, name(page), "exec")
        if runs_here(code):
            exec(ready, names)


COMMANDS = [
    (page, line.split("#")[0].strip()) for page in PAGES if page.exists()
    for line in re.findall(r"^(?:    )?((?:\.venv/bin/)?pycuda-conv \w+.*|python \w+/\w+\.py.*)$", page.read_text(), re.M)
]  # fmt: skip


@pytest.mark.parametrize("page, line", COMMANDS, ids=lambda v: v if isinstance(v, str) else name(v))
def test_the_commands_of_a_page_are_understood(page, line):
    program, *arguments = shlex.split(line)
    if program == "python":
        assert (ROOT / arguments[0]).exists()
    else:
        cli.parser().parse_args(arguments)  # which exits where it does not understand


def test_the_first_picture_s_command_works(fast_env, device, tmp_path):
    pytest.importorskip("PIL", reason="pictures are read by Pillow")
    (line,) = [line for page, line in COMMANDS if page.name == "README.md" and " run " in line]
    arguments = shlex.split(line)[1:]
    command = [sys.executable, "-m", "pycuda_conv", *arguments[:-1], str(tmp_path / arguments[-1]), "--device", device]
    done = subprocess.run(command, cwd=ROOT, env=fast_env, check=False, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / arguments[-1]).stat().st_size > 1000


def test_the_course_s_pictures_are_what_the_script_draws(tmp_path):
    subprocess.run([sys.executable, ROOT / "scripts" / "course.py", tmp_path], check=True, timeout=900)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_text() for path in (DOCS / "course").glob("*.svg")}
    assert all(f"course/{picture}" in (DOCS / "course.md").read_text() for picture in drawn)


def test_pictures_are_small():
    for picture in [*DOCS.rglob("*.svg"), *DOCS.rglob("*.png")]:
        assert picture.stat().st_size < 80_000, name(picture)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("first", ("the loop, 64 calls", "cu/direct/batched.cu", "cu/direct/tile.cu")),
        ("ladder", ("a loop in Python", "blocked for registers", "three products", "Question")),
    ],
)
def test_the_notebook_runs(fast_env, device, tmp_path, file, words):
    nbformat = pytest.importorskip("nbformat", reason="notebooks are read by nbformat")
    client = pytest.importorskip("nbclient", reason="notebooks are run by nbclient")
    pytest.importorskip("ipykernel", reason="notebooks are run in ipykernel")
    text = (DOCS / "notebooks" / f"{file}.ipynb").read_text()
    if file == "ladder":  # of a layer a tenth as large
        layer = "(1, 64, 28, 28), (64, 64, 3, 3)"
        assert layer in text
        text = text.replace(layer, "(1, 16, 28, 28), (32, 16, 3, 3)")
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in (fast_env | {"PYCUDA_CONV_BACKEND": device.partition(":")[0]}).items():
            patch.setenv(variable, value)
        client.NotebookClient(
            notebook, timeout=900, startup_timeout=300, iopub_timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
        ).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert all(word in printed for word in words)


def test_the_site_is_built_without_a_warning(python_env, tmp_path):
    for module in ("sphinx", "numpydoc", "myst_nb", "furo", "torch"):
        pytest.importorskip(module, reason=f"the site needs {module}")
    plain = "-D", "html_theme=basic"  # furo lists all pages beside each of them, which takes a quarter of the time
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", *plain, "-d", tmp_path / "trees", DOCS, tmp_path / "site"]
    done = subprocess.run(command, env={**python_env, "PYTHONWARNINGS": ""}, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "site" / "reference" / "functions.html").read_text()
    assert all(f'id="pycuda_conv.{function}"' in reference for function in pc.__all__ if function.startswith("conv"))
    public = "".join(page.read_text() for page in (tmp_path / "site" / "reference").glob("*.html"))
    assert all(f'id="pycuda_conv.{each}"' in public for each in pc.__all__)
    assert len(os.listdir(tmp_path / "site" / "_images")) >= 15
    kernel = (tmp_path / "site" / "source" / "cu" / "hopper" / "planes.cu.html").read_text()  # shown, and its includes are links
    assert "skeleton.cuh.html" in kernel and 'href="source/cu/direct/single.cu.html"' in (tmp_path / "site" / "course.html").read_text()
