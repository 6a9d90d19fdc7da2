"""What a type checker tells a user, whose script lies outside the checkout: with the package from a wheel, and installed in place."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import pycuda_conv as pc

ROOT = Path(pc.__file__).resolve().parent.parent
PARTS = ("pycuda_conv", "cu", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")

pytest.importorskip("mypy", reason="it is what checks the types")
pytest.importorskip("setuptools", reason="it builds the wheel")
pytestmark = pytest.mark.skipif(not (ROOT / "setup.cfg").exists(), reason="no setup.cfg beside the package")

NUMPY = """
import numpy as np
import pycuda_conv as pc
from pycuda_conv.typing import Array, Precision

x, w, b = np.ones((2, 3, 8, 8), np.float32), np.ones((4, 3, 3, 3), np.float32), np.ones(4, np.float32)
y = pc.conv2d(x, w, padding=1)
plan = pc.Plan(pc.ConvProblem.forward(2, x.shape, w.shape, padding="same"))

def own(image: Array, filter: Array, precision: Precision = "fp32") -> Array:
    return pc.conv2d(image, filter, precision=precision)

reveal_type(y)  # ndarray float
reveal_type(pc.conv2d(x, w, b, (1, 1), ((1, 1), (0, 0)), scale=b, residual=y, out=y))  # ndarray float
reveal_type(pc.conv_transpose2d(x, w, stride=np.int64(2)))  # ndarray float
reveal_type(pc.conv2d_input(x.shape, w, y))  # ndarray float
reveal_type(pc.conv2d_weight(x, w.shape, y))  # ndarray float
reveal_type(pc.conv2d_bias(y))  # ndarray[tuple[int], float
reveal_type(next(iter(pc.conv2d_many([x, x], w))))  # ndarray float
reveal_type(plan(x, w))  # ndarray float
reveal_type(plan.bind(w)(x))  # ndarray float
reveal_type(own(x, w))  # ndarray float
text: str = y  # error: assignment
pc.conv2d(x, w, precision="fp8")  # error: arg-type
pc.conv2d(x, w, activation="gelu")
pc.conv2d(x, w, activation=("leaky_relu", 0.2))
pc.conv2d(x, w, activation="tanh")  # error: arg-type
pc.conv2d(x, w, activation=("relu", 0.2))  # error: arg-type
pc.conv2d(x, w, stride=1.5)  # error: arg-type
pc.conv2d(x, w, 3)  # error: arg-type
pc.conv2d([[1.0]], w)  # error: type-var
pc.Plan(None)  # error: arg-type
"""

TORCH = """
import torch
import pycuda_conv as pc

t, layer = torch.ones(2, 3, 8, 8), torch.nn.Conv2d(3, 4, 3)
y = pc.conv2d(t, layer.weight, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups, precision="tf32", activation="relu")
reveal_type(y)  # Tensor
reveal_type(pc.conv2d_bias(y))  # Tensor
reveal_type(pc.conv3d_weight(t, torch.Size((1, 2)), t))  # Tensor
"""


#: Of what the package imports, mypy reads what arrays and layers are. The rest would take it 20 seconds where nothing is kept.
CONFIG = """
[mypy]
[mypy-torch.*,torchvision.*,dask.*,distributed.*,zarr.*,tifffile.*,fsspec.*,scipy.*,matplotlib.*,PIL.*,rich.*,cupy.*,pycuda.*,pyopencl.*]
follow_imports = skip
[mypy-torch,torch._C,torch._tensor,torch.types,torch.nn,torch.nn.modules,torch.nn.modules.*]
follow_imports = normal
"""


def pip(*arguments, python=sys.executable):
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", *map(str, arguments)],
        capture_output=True, text=True, timeout=900, check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module", params=["wheel", "editable"])
def python(request, tmp_path_factory):
    """The interpreter of a virtual environment that has the package in this way, and all else from the one that runs the tests."""
    folder = tmp_path_factory.mktemp(request.param)
    for part in PARTS:
        (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, folder / part)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True, timeout=900)
    made = folder / "venv" / "bin" / "python"
    show = [made, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(show, check=True, capture_output=True, text=True, timeout=900).stdout.strip())
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    if request.param == "wheel":
        pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder)
        pip("install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", *folder.glob("*.whl"), python=made)
    else:
        pip(
            "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed", "--editable", folder, python=made
        )
    return made


def check(python, script, folder, cache):
    """Run mypy on a script in a folder of its own, and compare what it says with the comments there."""
    (folder / "script.py").write_text(script)
    (folder / "mypy.ini").write_text(CONFIG)
    command = [
        sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--python-executable", str(python), "--cache-dir", str(cache),
        "script.py"
    ]
    env = {"PATH": "/usr/bin:/bin"}  # without PYTHONPATH
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=900, check=False)
    told = {}
    for line in done.stdout.splitlines():
        file, number, rest = line.split(":", 2)
        assert file == "script.py", done.stdout
        told.setdefault(int(number), rest)
    for number, line in enumerate(script.splitlines(), 1):
        _, _, wanted = line.partition("# ")
        said = told.pop(number, "")
        if wanted.startswith("error: "):
            assert f"[{wanted.removeprefix('error: ')}]" in said, (line, said)
        else:
            assert all(word in said for word in wanted.split()) and (wanted or not said), (line, said)
    assert not told and not done.stderr, (told, done.stderr)


def test_numpy_arrays_give_numpy_arrays(python, tmp_path, request):
    check(python, NUMPY, tmp_path, request.config.cache.mkdir("mypy"))


def test_tensors_give_tensors(python, tmp_path, request):
    check(python, TORCH, tmp_path, request.config.cache.mkdir("mypy"))


def test_every_public_function_has_types():
    """No argument of a public function that holds numbers is Any."""
    for name in pc.__all__:
        if name.startswith("conv"):
            untyped = {
                p for p, kind in getattr(pc, name).__annotations__.items() if kind == "Any"
            } - {"device", "devices", "stream", "args", "options"} - ({"grad_output", "return"} if name.endswith("_bias") else set())
            assert not untyped, (name, untyped)
