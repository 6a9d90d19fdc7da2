#!/usr/bin/env python3
"""Write down the machine code of the covering set of kernels, without a GPU: to see what a change of kernels changes.

    python scripts/dump_code.py before.json
    (change something)
    python scripts/dump_code.py after.json --before before.json

The covering set (``tests/covering.py``) has every kernel and every value of every define. Each of its texts gets a line in the file: a
hash of the machine code, registers, spilled bytes and shared memory, as nvcc and ptxas make them. A text is known by a hash of what the
preprocessor leaves of it, so with `--before` only texts that changed are compiled. Then the differences are printed, and the exit status
is 1 if there are any. It takes nvcc some 10 seconds a text and core.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import covering

from pycuda_conv import engines
from pycuda_conv.engines import registry
from pycuda_conv.engines.nn import batch_norm
from pycuda_conv.runtime.base import KERNEL_DIR, source_of
from pycuda_conv.runtime.compiler import Nvcc, nvcc
from pycuda_conv.tools.kernels import besides, device_of

OTHERS = 6  # texts of each kernel that belongs to no engine


@dataclass(frozen=True)
class Code:
    """What the compiler makes of a text; sizes in bytes. The hash leaves the functions' names out."""

    machine_code: str
    code_bytes: int
    registers: int
    spilled: int
    shared: int


@dataclass(frozen=True)
class Variant:
    """A text to compile, and its name: the kernel's file, the target and the defines."""

    name: str
    arch: str
    source: str


def variants(architecture: str, whole: str = "") -> list[Variant]:
    """The texts that the covering set launches, and some of the kernels that belong to no engine. With `whole`: all texts of such files."""
    device, found = device_of(architecture), {}
    if whole:
        for family in registry.variants(device):
            if re.search(whole, family.file):
                found |= {_named(family.file, family.arch or architecture, one, source_of(family.file, one)): None for one in family}
        return list(found)
    for problem, config, with_moments in covering.cases(device):
        for launch in covering.launches(engines.schedule(problem, config, device, with_moments)):
            file = launch.file or launch.kernel
            found[_named(file, launch.arch or architecture, launch.defines, launch.source())] = None
    known = {variant.name for variant in found}
    others = {family.file: family for family in [*batch_norm.variants(device), *besides(device)]}
    for family in sorted(others.values(), key=lambda one: one.file):
        each = list(family)
        for defines in random.Random(family.file).sample(each, min(OTHERS, len(each))):
            variant = _named(family.file, family.arch or architecture, defines, source_of(family.file, defines))
            if variant.name not in known:
                found[variant] = None
    return list(found)


def _named(file: str, arch: str, defines: Any, source: str) -> Variant:
    return Variant(" ".join([file, arch, *(f"{name}={value}" for name, value in sorted(defines.items()))]), arch, source)


def preprocessed(variant: Variant) -> str:
    """The text that the compiler proper gets: without comments, and with one space between words."""
    number = re.sub(r"\D", "", variant.arch)
    flags = [f"-D__CUDA_ARCH__={number}0", "-D__CUDACC__", "-D__NVCC__"] + ["-D__CUDA_ARCH_FEAT_SM90_ALL"] * variant.arch.endswith("a")
    command = ["g++", "-std=c++17", "-E", "-P", "-x", "c++", "-w", *flags, "-I", str(KERNEL_DIR), "-"]
    done = subprocess.run(command, input=variant.source, capture_output=True, text=True, check=True)
    return " ".join(done.stdout.split())


def compiled(variant: Variant) -> Code:
    """The machine code of a text."""
    with tempfile.TemporaryDirectory() as folder:
        text, cubin = Path(folder, "kernel.cu"), Path(folder, "kernel.cubin")
        text.write_text(variant.source)
        command = [str(nvcc()), *Nvcc.options, "-Xptxas=-v", f"-arch={variant.arch}", f"-I{KERNEL_DIR}", "-o", str(cubin), str(text)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{variant.name} does not compile:\n{done.stderr}")
        code = sorted(functions(cubin.read_bytes()))
    said = done.stdout + done.stderr
    digest = hashlib.sha256(b"".join(hashlib.sha256(one).digest() for one in code)).hexdigest()[:16]
    numbers = {name: [int(found) for found in re.findall(pattern, said)] for name, pattern in SAID.items()}
    return Code(digest, sum(map(len, code)), max(numbers["registers"]), sum(numbers["spilled"]), max(numbers["shared"], default=0))


#: What ptxas says.
SAID = {"registers": r"Used (\d+) registers", "spilled": r"(\d+) bytes spill stores", "shared": r"(\d+) bytes smem"}


def functions(cubin: bytes) -> Iterator[bytes]:
    """The contents of a cubin's sections with machine code and with constants of the code."""
    (table,), (each, count, names) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * each) for i in range(count)]  # name, type, flags, address, offset, size
    strings = headers[names][4]
    for name, _, _, _, offset, size in headers:
        start = strings + name
        called = cubin[start : cubin.index(b"\0", start)].decode()
        if called.startswith(".text.") or re.match(r"\.nv\.constant[1-9]", called):
            yield cubin[offset : offset + size]


def main() -> int:
    parser = argparse.ArgumentParser(description="Write down the machine code of the covering set of kernels, without a GPU.")
    parser.add_argument("file", type=Path, help="where to write it")
    parser.add_argument("--arch", nargs="+", default=["sm_90a"], metavar="ARCH", help="targets; by default sm_90a")
    parser.add_argument("--before", type=Path, help="a file of before: its texts are not compiled again; prints what differs")
    parser.add_argument("--whole", default="", metavar="REGEX", help="all listed texts of such files, instead of the covering set")
    parser.add_argument("--only", default="", metavar="REGEX", help="only variants in whose name it is found")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th of those (default 1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time; by default as many as cores")
    options = parser.parse_args()
    wanted = [one for arch in options.arch for one in variants(arch, options.whole) if re.search(options.only, one.name)][:: options.every]
    before = json.loads(options.before.read_text()) if options.before else {}
    known = {row["text"]: row for row in before.values() if row["machine_code"]}
    rows: dict[str, dict[str, Any]] = {}
    count = 0

    def row(variant: Variant) -> dict[str, Any]:
        nonlocal count
        text = preprocessed(variant)
        key = hashlib.sha256(f"{variant.arch} {text}".encode()).hexdigest()[:16]
        same = known.get(key)
        if same is None:
            count += 1
        code = {name: same[name] for name in Code.__dataclass_fields__} if same else asdict(compiled(variant))
        return {"text": key, "text_bytes": len(text), **code}

    with ThreadPoolExecutor(options.jobs) as pool:
        for variant, found in zip(wanted, pool.map(row, wanted), strict=True):
            rows[variant.name] = found
            options.file.write_text(_json(rows))  # an interrupted run leaves what it has
    print(f"{len(rows)} variants, {count} of them compiled now")
    return _compare(before, rows) if before else 0


def _json(rows: dict[str, dict[str, Any]]) -> str:
    """A line for each variant."""
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(rows.items())) + "\n}\n"


def _compare(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> int:
    """Print what differs; returns 1 if anything does. A variant of a new name must have the machine code of some variant that has gone."""

    def code(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[field] for field in Code.__dataclass_fields__)

    gone = {code(row) for name, row in before.items() if name not in after}
    changed = [name for name, row in after.items() if (code(row) != code(before[name]) if name in before else code(row) not in gone)]
    for name in changed:
        print("DIFFERS", name, "was", code(before[name]) if name in before else "no variant", "is", code(after[name]))
    longer = [name for name, row in after.items() if name in before and int(row["text_bytes"]) > int(before[name]["text_bytes"])]
    print(f"{len(after) - len(changed)} variants have the machine code of before, {len(changed)} other; {len(longer)} texts are longer")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
