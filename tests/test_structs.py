"""The structs that kernels take: what is packed is what the kernel reads, and both sides have the same members."""

import importlib
import pickle
import pkgutil
import re
from typing import NamedTuple

import numpy as np
import pytest

import pycuda_conv.arrays
import pycuda_conv.engines
from pycuda_conv.engines.struct import kernel_struct
from pycuda_conv.runtime import base, get_device
from pycuda_conv.runtime.base import KernelLaunch

TEXT = """
struct Toy {
  long_t first, second;  // two numbers: long_t third;
  long_t third;
};
KERNEL void @(GLOBAL_MEM long_t* y, const struct Toy toy, const long_t last) {
  if (LID_0) return;
  y[0] = toy.first;
  y[1] = toy.second;
  y[2] = toy.third;
  y[3] = last;
}
"""


class Toy(NamedTuple):
    first: int
    second: int
    third: int


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """Makes a kernel's file of a text, where @ is the kernel's name, which is returned."""
    for part in base.KERNEL_DIR.iterdir():
        if part.is_dir() or part.suffix == ".cuh":
            (tmp_path / part.name).symlink_to(part)
    monkeypatch.setattr(base, "KERNEL_DIR", tmp_path)
    base.headers.cache_clear()
    names = []

    def make(text: str) -> str:
        names.append(f"toy_{tmp_path.name}_{len(names)}")
        (tmp_path / f"{names[-1]}.cu").write_text(text.replace("@", names[-1]))
        return names[-1]

    yield make
    base.headers.cache_clear()


def step(kernel: str, arguments) -> KernelLaunch:
    return KernelLaunch(kernel, {"DTYPE": 32, "INDEX_64": 0}, 1, 32, (0,), (-7,), arguments=arguments)


def test_a_kernel_reads_what_the_struct_holds(kernel, device):
    y = np.zeros(4, np.int64)
    on = get_device(device)
    with on:
        on.update_host_arrays(on.launcher(step(kernel(TEXT), Toy(2**40, -3, 5))), (), (y,), 0)
    assert y.tolist() == [2**40, -3, 5, -7]


def test_an_array_of_structs(kernel, device):
    text = TEXT.replace(
        "};", "};\nstruct Toys { struct Toy of[2]; };"
    ).replace("struct Toy toy", "struct Toys toys").replace("toy.", "toys.of[1].")
    y = np.zeros(4, np.int64)
    on = get_device(device)
    with on:
        on.update_host_arrays(on.launcher(step(kernel(text), (Toy(0, 1, 2), Toy(3, 4, 2**33)))), (), (y,), 0)
    assert y.tolist() == [3, 4, 2**33, -7]


def test_numbers_are_in_the_kernels_order():
    assert step("any", Toy(1, 2, 3)).numbers == (1, 2, 3, -7)
    assert step("any", (Toy(1, 2, 3), Toy(4, 5, 6))).numbers == (1, 2, 3, 4, 5, 6, -7)
    assert step("any", ()).numbers == (-7,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("second;", "other;"), "number 1 is other in the kernel, second in Python"),
        (("first, second", "second, first"), "number 0 is second in the kernel, first in Python"),
        (("  long_t third;\n", ""), "has 2 members, its Python class 3 fields; number 2 is nothing in the kernel, third in Python"),
        (("  long_t third;\n", "  long_t third, more;\n"), "number 3 is more in the kernel, nothing in Python"),
        (("  long_t third;", "  int third;"), "must have members of type long_t alone"),
        (("  long_t third;", "#if A\n  long_t third;\n#endif"), "must have members of type long_t alone"),
        (("struct Toy {", "struct Toys {"), "there is no struct Toy in"),
    ],
)
def test_a_struct_that_differs_is_refused(change, message, kernel):
    assert "struct Toy" in step(kernel(TEXT), Toy(1, 2, 3)).source()
    with pytest.raises(TypeError, match=message):
        step(kernel(TEXT.replace(*change)), Toy(1, 2, 3)).source()


def test_a_struct_may_lie_in_a_header(kernel, tmp_path):
    text = TEXT[TEXT.index("KERNEL") :]
    (tmp_path / "toy.cuh").write_text(TEXT[: TEXT.index("KERNEL")])
    assert step(kernel(text), Toy(1, 2, 3)).source()


def test_plain_tuples_are_refused(kernel):
    with pytest.raises(TypeError, match="must be a NamedTuple"):
        step(kernel(TEXT), (1, 2, 3)).source()


def test_a_struct_of_the_text(kernel):
    name = kernel(TEXT)
    made = kernel_struct(name, "Toy")
    assert made._fields == ("first", "second", "third") and made.__name__ == "Toy"
    assert step(name, made(1, 2, 3)).source() and step(name, made(first=1, second=2, third=3)).numbers == (1, 2, 3, -7)
    with pytest.raises(TypeError, match=rf"there is no struct Toys in {name}.cu nor in the headers"):
        kernel_struct(name, "Toys")


def test_a_struct_of_a_header(kernel, tmp_path):
    (tmp_path / "toy.cuh").write_text(TEXT[: TEXT.index("KERNEL")])
    assert kernel_struct("toy.cuh", "Toy")._fields == kernel_struct(kernel(TEXT), "Toy")._fields


def test_a_struct_s_values_can_be_pickled():
    from pycuda_conv.engines.split_sum import ReduceArguments

    values = ReduceArguments(*range(len(ReduceArguments._fields)))
    assert pickle.loads(pickle.dumps(values)) == values


def test_no_struct_is_typed_twice():
    """Every class of a kernel's struct has its members from the kernel's text."""
    declared = set(re.findall(r"\bstruct (\w+) {", "".join(path.read_text() for path in base.KERNEL_DIR.rglob("*.cu*"))))
    modules = [
        importlib.import_module(found.name)
        for package in (pycuda_conv.engines, pycuda_conv.arrays)
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]  # fmt: skip
    own = ((module, value) for module in modules for name, value in vars(module).items() if name in declared and hasattr(value, "_fields"))
    classes = {value for module, value in own if value.__module__ == module.__name__}
    assert len(classes) >= 40
    assert [value for value in classes if not value.__doc__.startswith(f"struct {value.__name__} of ")] == []


def test_a_kernel_is_found_by_its_stem_or_behind_its_folder(kernel, tmp_path):
    (tmp_path / "family").mkdir()
    (tmp_path / "family" / "toy.cu").write_text("text")
    (tmp_path / "family" / "deep.cuh").write_text("header")
    assert base.kernel_file("toy") == base.kernel_file("family_toy") == tmp_path / "family" / "toy.cu"
    assert base.shown_file("family_toy") == "cu/family/toy.cu" and base.kernel_file("deep.cuh").read_text() == "header"
    flat = kernel(TEXT)
    assert base.shown_file(flat) == f"cu/{flat}.cu"
    with pytest.raises(FileNotFoundError, match="there is no kernel family_tor in"):
        base.kernel_file("family_tor")
