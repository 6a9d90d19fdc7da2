"""``scripts/break_kernels.py``: which places of a kernel are broken, and against what they are held."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "break_kernels.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="no scripts/ beside the package")
KERNEL = """// kernel.cu: a kernel
#include "family/header.cuh"
/* a comment
   i < n */
static_assert(N == 1, "one");
__global__ void kernel(int* y, int n) {
  const int i = threadIdx.x;
  int memory[4];
  for (int k = 0; k < n; ++k) {
    y[i] = k + 1;
    wait(y);
  }
  return;
}
"""


@pytest.fixture
def breaking(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("break_kernels", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "break_kernels", module)  # dataclasses ask for it
    spec.loader.exec_module(module)
    (tmp_path / "family").mkdir()
    (tmp_path / "family" / "kernel.cu").write_text(KERNEL)
    (tmp_path / "family" / "header.cuh").write_text("#pragma once\nDEVICE void moved() {\n  arrive(2);\n}\n")
    monkeypatch.setattr(module, "KERNELS", tmp_path)
    return module


def test_a_place_is_a_line_of_code_that_still_compiles(breaking):
    file = breaking.KERNELS / "family" / "kernel.cu"
    found = breaking.places(file)
    lines = KERNEL.splitlines()
    assert all(lines[place.number - 1] == place.was != place.now for place in found)
    assert {place.now.strip() for place in found} >= {";", "y[i] = k - 1;", "y[i] = k + 2;", "for (int k = 0; k <= n; ++k) {"}
    assert not {place.number for place in found} & {1, 2, 3, 4, 5, 8, 13}, "comments, directives, assertions, rooms, returns"
    assert breaking.drawn(file, 3) == breaking.drawn(file, 2) + breaking.drawn(file, 3)[2:], "more places begin with the same ones"
    assert len({place.number for place in breaking.drawn(file, 3)}) == 3


def test_what_was_noticed_is_tried_again_where_its_line_is_now(breaking):
    file = breaking.KERNELS / "family" / "kernel.cu"
    rows = [
        {"was": "    wait(y);", "now": "    ;", "noticed": "a test"}, {"was": "  arrive(2);", "now": "  arrive(3);", "noticed": "a test"},
        {"was": "  gone();", "now": "  ;", "noticed": "a test"}, {"was": "  return;", "now": "  ;", "noticed": None},
    ]  # fmt: skip
    found = breaking.still_there(file, rows)
    assert [(path.name, place.number, place.now) for path, place in found] == [
        ("kernel.cu", 11, "    ;"), ("header.cuh", 3, "  arrive(3);")
    ]


def test_what_tests_run_is_kept(breaking, tmp_path):
    kept, asked = tmp_path / "record.json", []

    def run(files):
        asked.extend(files)
        return [[(f"{file}::test", 1.0, ["C++ family_kernel A=1"])] for file in files]

    for files in (["a.py"], ["a.py", "b.py"]):
        record = breaking.recorded_all(files, run, kept)
        assert [tuple(test) for test in record] == [(f"{file}::test", 1.0, ["C++ family_kernel A=1"]) for file in files]
    assert asked == ["a.py", "b.py"] and set(json.loads(kept.read_text())) == {"a.py", "b.py"}
    assert breaking.held_against(record, {"family_kernel"}, 1.5) == ["a.py::test"] and not breaking.held_against(record, {"other"}, 9)
    assert not breaking.held_against(record, {"family_kernel"}, 1.5, lambda variant: "A=2" in variant)
