"""No file of ``cu/`` grows unseen: its lines, and its conditionals of the preprocessor, may fall, and rise only with a number in
data/sizes.json.

    python tests/test_sizes.py      # writes the numbers of today
"""

import json
import re
import runpy
from pathlib import Path

import pytest

KERNEL_DIR = Path(__file__).resolve().parent.parent / "cu"
SIZES = Path(__file__).with_name("data") / "sizes.json"
MOST_LINES, MOST_CONDITIONALS = 900, 40
HOPPER_LINES = 400  # of each file of cu/hopper, whose kernels share a skeleton


def size(file: Path) -> list[int]:
    """Lines, and conditionals: each #if, #ifdef, #ifndef and #elif."""
    text = file.read_text()
    return [len(text.splitlines()), len(re.findall(r"^ *# *(?:if|ifdef|ifndef|elif)\b", text, re.M))]


def sizes() -> dict[str, list[int]]:
    return {file.relative_to(KERNEL_DIR).as_posix(): size(file) for file in sorted(KERNEL_DIR.rglob("*.cu*"))}


KNOWN = json.loads(SIZES.read_text()) if SIZES.exists() else {}


@pytest.mark.parametrize("name", sizes())
def test_a_file_does_not_grow(name):
    assert name in KNOWN, f"{name} is new: python tests/test_sizes.py writes its size down"
    found = size(KERNEL_DIR / name)
    assert found[0] <= KNOWN[
        name
    ][0] and found[1] <= KNOWN[name][1], f"{name} had {KNOWN[name]} lines and conditionals and has {found}: say why in the commit"
    most = HOPPER_LINES if name.startswith("hopper/") else MOST_LINES
    assert found[0] <= most and found[1] <= MOST_CONDITIONALS, f"{name} is several ideas by now"


def test_only_files_that_there_are_have_sizes():
    assert set(KNOWN) <= set(sizes())


def test_conditionals_are_counted(tmp_path):
    file = tmp_path / "some.cu"
    file.write_text("#if A\n# ifdef B\n#else\n#endif\n#elif C\n#endif\n  x; // #if\n#include <a>\n#ifndef D\n#endif\n")
    assert size(file) == [10, 4]


def test_the_index_of_the_kernels_is_that_of_today():
    path = KERNEL_DIR.parent / "scripts" / "kernel_index.py"
    if not path.exists():
        pytest.skip("the scripts are not in the installed package")
    text = runpy.run_path(str(path))["index"]()
    assert (KERNEL_DIR / "README.md").read_text() == text, "python scripts/kernel_index.py writes it"
    names = [file.name for file in KERNEL_DIR.rglob("*.cu*")]
    assert all(text.count(f"[`{name}`]") == names.count(name) for name in names)


if __name__ == "__main__":
    SIZES.write_text("{\n" + ",\n".join(f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in sizes().items()) + "\n}\n")
