"""Other versions of torch than the installed one: the oldest that setup.cfg admits, the newest there is, and one without private parts."""

import ast
import configparser
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "pycuda_conv"


def called(env, *arguments, **more):
    done = subprocess.run(
        [sys.executable, str(HERE / "torch_calls.py"), *arguments], env={**env, **more}, capture_output=True, text=True, timeout=900,
        check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def test_without_private_parts_calls_are_right_and_only_slower(fast_env):
    assert called(fast_env, "bare", PYCUDA_CONV_BACKEND="opencl") == f"all {torch.__version__}"


def _at_import(node):
    """The nodes of a module that run when it is imported."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from _at_import(child)


def test_no_other_module_needs_a_private_part_of_torch_to_be_imported():
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "torch_internals.py" or "tools" in path.parts:
            continue
        for node in _at_import(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                used = [*node.module.split("."), *(name.name for name in node.names)]
            elif isinstance(node, ast.Import):
                used = [part for name in node.names if name.name.startswith("torch.") for part in name.name.split(".")]
            elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
                used = ast.unparse(node).split(".")
            else:
                continue
            private = [name for name in used if name.startswith("_") and not name.startswith("__")]
            assert not private, f"{path.name}, line {node.lineno}: {ast.unparse(node)} belongs in torch_internals.py, with a stand-in"


# ---- other versions, where .ci/run asks for them: each is a download of half a gigabyte and more


def oldest():
    """The oldest version that setup.cfg admits: every extra says the same."""
    config = configparser.ConfigParser()
    config.read(HERE.parent / "setup.cfg")
    found = {
        line.strip() for lines in config["options.extras_require"].values() for line in lines.splitlines() if re.match(r"\s*torch\b", line)
    }
    assert len(found) == 1, found
    return re.fullmatch(r"torch>=([\d.]+)", found.pop())[1]


def test_every_extra_admits_the_same_versions():
    assert tuple(map(int, oldest().split("."))) <= tuple(int(part) for part in torch.__version__.split("+")[0].split("."))


def stand_ins_for_cuda(folder, into):
    """Libraries in the names of those of CUDA that a torch built for it wants. Their functions fail, as where there is no GPU."""
    libraries = [str(path) for path in (folder / "torch" / "lib").glob("*.so*")]

    def listed(*command):
        return subprocess.run([*command, *libraries], capture_output=True, text=True, check=False).stdout

    into.mkdir()
    wanted = set(re.findall(r"NEEDED.*\[(lib(?:cu|nccl|nv)[\w.+-]*)\]", listed("readelf", "-d")))
    names = set(re.findall(r" U ((?:cu|nccl|nv|__cuda)\w*)", listed("nm", "-D", "--undefined-only")))
    (into / "all.c").write_text("".join(f"int {name}(void) {{ return 999; }}\n" for name in sorted(names)))
    (into / "none.c").write_text("")
    build = ["gcc", "-shared", "-fPIC", "-w"]
    subprocess.run([*build, "all.c", "-Wl,-soname,libstand_ins.so", "-o", "libstand_ins.so"], cwd=into, check=True)
    for name in wanted - {Path(one).name for one in libraries}:
        subprocess.run(
            [*build, "none.c", "-Wl,--no-as-needed", "-L.", "-lstand_ins", f"-Wl,-soname,{name}", "-o", name], cwd=into, check=True
        )


@pytest.fixture(params=["oldest", "newest"])
def version(request, tmp_path):
    """Another torch in a folder of its own, which comes before the installed one, without its libraries of CUDA: which, and the paths."""
    if not request.config.getoption("--torch-versions"):
        pytest.skip("--torch-versions downloads them")
    folder, wanted = tmp_path / "torch", f"torch=={oldest()}" if request.param == "oldest" else "torch"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps", "--no-compile", "--no-cache-dir"]
    try:
        done = subprocess.run(
            [*pip, "--upgrade", "--target", str(folder), wanted], capture_output=True, text=True, timeout=300, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{wanted} was not there after five minutes")
    if done.returncode:
        pytest.skip(f"{wanted} can't be had for this Python: {' '.join(done.stderr.split())[-200:]}")
    try:
        stand_ins_for_cuda(folder, tmp_path / "cuda")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no compiler: {error}")
    return request.param, {
        "PYTHONPATH": os.pathsep.join([str(folder), str(PACKAGE.parent), str(HERE)]), "LD_LIBRARY_PATH": str(tmp_path / "cuda")
    }


def test_other_versions(fast_env, version):
    """All calls of torch_calls.py."""
    which, paths = version
    told = called(fast_env, PYCUDA_CONV_BACKEND="opencl", **paths)
    assert told.startswith("all ") and (which == "newest" or told.startswith(f"all {oldest()}"))
    print(told)
