"""The models' constants are data: each is used, each says what it is, and none stands in the code."""

import ast
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from reference import fprop

import pycuda_conv
from pycuda_conv.engines import costs
from pycuda_conv.engines.hopper import planes

ENGINES = Path(pycuda_conv.__file__).parent / "engines"
TABLE = json.loads((costs.FOLDER / costs.REFERENCE).read_text())
H200 = SimpleNamespace(backend="cuda", capability=(9, 0), multiprocessors=132, model="NVIDIA H200")
#: Numbers that are no constants of a model: halves and doubles, units, and what a function tries.
PLAIN = {0.0, 0.5, 1.0, 2.0, 1e6}
OTHERS = {
    "addressing.py": {1.1, 1.4},  # what a row of a load is worth beside what it wastes
    "direct/direct.py": {400e6},  # multiplications beyond which matrix products win
    "fft/library_fft.py": {1.35, 1.5, 1.75, 2.5, 0.4},  # lengths that are tried; how right transforms are
    "mma/few_channels_wgrad.py": {1.5},  # words that tiles have in common
}


def test_the_file_names_the_gpu():
    assert TABLE["format"] == "pycuda_conv costs" and TABLE["gpu"] == "NVIDIA H200"


@pytest.mark.parametrize("engine", sorted(TABLE["engines"]))
def test_each_constant_is_used_and_says_what_it_is(engine):
    text = "".join(path.read_text() for path in sorted(ENGINES.rglob("*.py")))
    own = (ENGINES / f"{engine.replace('.', '/')}.py").read_text()
    assert f'costs("{engine}")' in own
    for name, entry in TABLE["engines"][engine].items():
        if name == "about":
            assert isinstance(entry, str)
            continue
        value, what = entry
        assert value is not None and what, name
        assert re.search(rf"(COST|\))\.{name}\b", text), name


def test_a_constant_that_is_not_there_is_an_error():
    with pytest.raises(AttributeError, match="there is no cost NONE in"):
        costs.costs("mma.few_inputs").NONE  # noqa: B018
    assert costs.read_as({"64x32": [1, [2.0, 3]], "8": 1, "name": 2}) == {(64, 32): (1, (2.0, 3)), 8: 1, "name": 2}


def test_constants_are_replaced_for_a_while():
    problem = fprop((8, 64, 28, 28), (64, 64, 1, 1)).problem("float16")
    before = planes.time(problem, planes.Planes(), H200)
    with costs.replaced({"hopper.planes": {"BEGIN": planes.COST.BEGIN + 100}}):
        assert planes.time(problem, planes.Planes(), H200) == pytest.approx(before + 100)
    assert planes.time(problem, planes.Planes(), H200) == before
    with pytest.raises(AttributeError, match="no cost START"), costs.replaced({"hopper.planes": {"START": 1.0}}):
        pass


@pytest.mark.parametrize("path", sorted(ENGINES.rglob("*.py")), ids=lambda path: str(path.relative_to(ENGINES)))
def test_no_function_has_a_fitted_number(path):
    allowed = PLAIN | OTHERS.get(str(path.relative_to(ENGINES)), set())
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef):
            numbers = {one.value for one in ast.walk(function) if isinstance(one, ast.Constant) and type(one.value) is float}
            assert numbers <= allowed, (function.name, numbers - allowed)
