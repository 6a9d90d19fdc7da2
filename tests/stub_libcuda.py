"""A libcuda for PyCUDA itself on a machine without a GPU: the stand-in of fake_cuda.c, and functions that do nothing for all else that
PyCUDA calls.

    python tests/stub_libcuda.py FOLDER

makes FOLDER/libcuda.so.1. With ``LD_LIBRARY_PATH=FOLDER`` PyCUDA loads it in the place of the driver. It needs gcc and nm.
"""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_cuda.c")


def pycudas_extension() -> Path | None:
    """PyCUDA's extension module, or None where PyCUDA is not installed."""
    found = importlib.util.find_spec("pycuda")
    places = list(found.submodule_search_locations or ()) if found else []
    return next((file for place in places for file in Path(place).glob("_driver*.so")), None)


def build(folder: Path, extension: Path) -> Path:
    """Make the library in `folder`; returns its path."""
    known = set(re.findall(r"^int (cu\w+)\(|NOTHING\((cu\w+)\)", SOURCE.read_text(), re.M))
    known = {name for pair in known for name in pair if name}
    undefined = subprocess.run(["nm", "-D", "--undefined-only", str(extension)], check=True, capture_output=True, text=True).stdout
    wanted = sorted(set(re.findall(r"\b(cu[A-Z]\w+)", undefined)) - known)
    rest = folder / "rest.c"
    rest.write_text("".join(f"int {name}() {{ return 0; }}\n" for name in wanted))
    made = folder / "libcuda.so.1"
    command = "gcc", "-O1", "-w", "-pthread", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(SOURCE), str(rest), "-o", str(made)
    subprocess.run(command, check=True, timeout=900)
    return made


if __name__ == "__main__":
    extension = pycudas_extension()
    if extension is None:
        sys.exit("PyCUDA is not installed")
    build(Path(sys.argv[1]), extension)
