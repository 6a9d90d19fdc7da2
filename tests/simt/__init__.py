"""The kernels for Hopper, run on the CPU: their own text, compiled by g++ for the machine that machine.cpp is.

``computed`` runs a plan; ``run`` runs launches on any buffers. A kernel's ``asm`` statements become calls (ptx.py), everything else is
compiled as it is, behind device.h. So what runs are the barriers, rings, descriptors, addresses and splits of the text that a GPU gets.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from modes import program_of
from reference import kept_file

from pycuda_conv import background
from pycuda_conv.runtime.base import KERNEL_DIR, Im2col, KernelLaunch, TensorMap
from simt.memory import RESULT as RESULT
from simt.memory import WORKSPACE as WORKSPACE
from simt.memory import Memory, check_divisors, check_map, result_type, type_of
from simt.ptx import translated

HERE = Path(__file__).resolve().parent
CXX = shutil.which("g++")
WHY_NOT = "there is no g++" if CXX is None else None if sys.platform == "linux" else "the machine that runs kernels on the CPU is for Linux"
FLAGS = (
    "-std=c++17", "-w", "-Wno-psabi", "-fPIC", "-fno-exceptions", "-fno-strict-aliasing", "-fwrapv", "-ffp-contract=off",
    "-U_FORTIFY_SOURCE"
)
#: g++ calls a function of the machine's before each load and store. What is gained in the kernels by -O1 is less than what it costs g++.
TOLD = ("-Og", "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0")


class Wrong(AssertionError):
    """What a kernel must not do."""


# ---- compiled


@cache
def headers() -> str:
    return "\0".join(path.read_text() for path in sorted(HERE.glob("*.h")))


def built(name: str, text: str, flags: Sequence[str], libraries: Sequence[str]) -> Path:
    """A shared library of `text`, compiled before or now."""
    key = hashlib.sha256("\0".join((text, *FLAGS, *flags, *libraries, headers())).encode()).hexdigest()[:32]

    def compile_and_link(made: Path) -> None:
        source, machine_code = made.with_suffix(".cpp"), made.with_suffix(".o")
        source.write_text(text)
        for command in ((*FLAGS, *flags, "-I", HERE, "-c", source, "-o", machine_code), ("-shared", machine_code, "-o", made, *libraries)):
            done = subprocess.run([str(CXX), *map(str, command)], capture_output=True, text=True, timeout=900, check=False)
            assert done.returncode == 0, f"{name} does not compile:\n{done.stderr[:4000]}"

    return kept_file(f"simt_{name}_{key}.so", compile_and_link)


@cache
def machine() -> ctypes.CDLL:
    library = ctypes.CDLL(str(built("machine", (HERE / "machine.cpp").read_text(), ["-O2"], ["-lm"])), ctypes.RTLD_GLOBAL)
    library.simt_allocate.restype = ctypes.c_void_p
    library.simt_allocate.argtypes = [ctypes.c_size_t]
    library.simt_launch.restype = ctypes.c_char_p
    library.simt_launch.argtypes = [
        ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint64
    ]
    return library


ENTRY = """
static const simt::Kernel described_{kernel} = {{[](const char* parameters) {{ simt::call({kernel}, parameters); }}, simt::bytes_of({kernel}), {cluster}, {align}, {in_order},
                                              __start_simt_shared, __stop_simt_shared}};
extern "C" __attribute__((visibility("default"))) const simt::Kernel* simt_{kernel}() {{ return &described_{kernel}; }}
"""
DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:__align__\((\d+)\)\s*|alignas\((\d+)\)\s*)?([\w:]+)\s+(\w+)\[\];")


def text_of(kernels: Sequence[str], source: str) -> str:
    """A text with some of its kernels in C++, in a namespace without a name: what is in no other text needs no section of its own, where shared variables must not be."""
    command = [str(CXX), "-std=c++17", "-E", "-x", "c++", "-w", "-D__CUDA_ARCH__=900", "-I", str(KERNEL_DIR), "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{kernels} are not preprocessed:\n{done.stderr[:4000]}"
    align = max((int(found[1] or found[2] or 16) for found in DYNAMIC.finditer(done.stdout)), default=16)
    text = DYNAMIC.sub(r"static \3* const& \4 = (\3* const&)simt::dynamic;", done.stdout)
    text = re.sub(r"__shared__\s+(alignas\(\w+\))", r"\1 __shared__", text)
    cluster = re.search(r"__cluster_dims__\(([^,]*),", text)
    text = re.sub(r"__cluster_dims__\([^)]*\)", "", text)
    told = {"cluster": cluster[1] if cluster else 1, "align": align, "in_order": int("ld.acquire.gpu" in text)}
    entries = "".join(ENTRY.format(kernel=kernel, **told) for kernel in kernels)
    return f'#include "device.h"\nnamespace {{\n{translated(text)}\n}}\n{entries}'


@cache
def compiled(kernels: tuple[str, ...], source: str) -> dict[str, int]:
    """The addresses of what describes the kernels."""
    machine()
    library = ctypes.CDLL(
        str(built(kernels[0], text_of(kernels, source), TOLD, ["-nostdlib", "-lgcc"]))
    )  # the machine's libraries are there already
    found = {kernel: library[f"simt_{kernel}"] for kernel in kernels}
    for entry in found.values():
        entry.restype = ctypes.c_void_p
    return {kernel: entry() for kernel, entry in found.items()}


# ---- launched


class Map(ctypes.Structure):
    """machine.cpp's, of a tensor map."""

    _fields_ = (
        ("magic", ctypes.c_uint64), ("base", ctypes.c_void_p), ("sizes", ctypes.c_int64 * 5), ("strides", ctypes.c_int64 * 5), ("box", ctypes.c_int32 * 5),
        *((name, ctypes.c_int32 * 3) for name in ("lower", "upper", "step")),
        *((name, ctypes.c_int32) for name in ("rank", "size", "span", "im2col", "channels", "pixels", "rounds"))
    )  # fmt: skip


MAGIC = 0x7E4507A9C0FFEE11


def map_of(described: TensorMap, address: int) -> Map:
    size, box = type_of(described).itemsize, described.box
    made = Map(
        magic=MAGIC, base=address + described.offset, rank=len(described.sizes), size=size, span=described.span,
        rounds=described.dtype == "tfloat32"
    )
    made.sizes[:] = (*described.sizes, 0, 0, 0, 0)[:5]
    made.strides[:] = (size, *described.strides, 0, 0, 0, 0)[:5]
    if isinstance(box, Im2col):
        made.im2col, made.channels, made.pixels = 1, box.channels, box.pixels
        made.lower[:], made.upper[:], made.step[:] = ((*corner, 0, 0, 0)[:3] for corner in (box.lower, box.upper, box.stride))
    else:
        made.box[:] = (*box, 0, 0, 0, 0)[:5]
    return made


def text_with(step: KernelLaunch, part: str) -> str:
    """A kernel's text, with those of our own headers that have `part` in place of their names, so that it can be broken there too."""
    placed = set()

    def header(found: re.Match) -> str:
        file = KERNEL_DIR / found[1]
        if part not in whole_text(file):
            return found[0]
        if file in placed:  # each once, as its #pragma says
            return ""
        placed.add(file)
        return INCLUDE.sub(header, file.read_text())

    return INCLUDE.sub(header, step.source())


@cache
def whole_text(file: Path) -> str:
    """A header's text with those of the headers that it includes."""
    return INCLUDE.sub(lambda found: whole_text(KERNEL_DIR / found[1]), file.read_text()) if file.exists() else ""


INCLUDE = re.compile(r'^#include "([\w/]+\.cuh)"$', re.M)


def launch(step: KernelLaunch, kernel: int, memory: Any, addresses: Sequence[int], seed: int) -> None:
    check_divisors(step)
    for described in step.maps:
        check_map(described, memory)
    maps = [map_of(one, addresses[one.buffer]) for one in step.maps]
    opaque = [np.array([ctypes.addressof(one), MAGIC, *[0] * 14], np.uint64) for one in maps]
    places = [place if isinstance(place, tuple) else (place, 0) for place in step.buffers]
    pointers = np.array([addresses[i] + offset for i, offset in places], np.uint64)
    parameters = b"".join(part.tobytes() for part in (*opaque, pointers, np.array(step.numbers, np.int64)))
    wrong = machine().simt_launch(kernel, parameters, len(parameters), step.grid, step.block, step.shared, seed)
    if wrong:
        raise Wrong(f"{step.kernel}: {wrong.decode()}")


def run(stages: Sequence[Sequence[KernelLaunch]], memory: Any, seed: int = 0, *, broken: tuple[str, str] | None = None) -> None:
    """Run launches.

    Parameters
    ----------
    stages : sequence of sequences of KernelLaunch
        As a schedule has them. They may be other objects that have the members of a launch which are used here.
    memory : Memory, or anything else that has `buffers`
        A list of arrays of bytes, in the order in which launches count them. Others take their places, with what the kernels leave.
        Of an empty one kernels get the address of nothing, and must not read there; instead of None they get no address.
    seed : int
        Decides the order in which threads run and loads arrive.
    broken : (str, str), optional
        What the kernels' texts have, and what stands there instead.

    Raises
    ------
    Wrong
        A kernel did what it must not, or hangs.
    LookupError
        No kernel's text has what was to be broken.
    """
    steps = [step for stage in stages for step in stage]
    sources = [text_with(step, broken[0]).replace(*broken) if broken else step.source() for step in steps]
    kernels: dict[str, dict[str, None]] = {}  # of each text, which are compiled together
    for step, source in zip(steps, sources, strict=True):
        kernels.setdefault(source, {})[step.kernel] = None
    if broken is not None and not any(broken[0] in text_with(step, broken[0]) for step in steps):
        raise LookupError(f"no kernel's text has {broken[0]!r}")  # which is no error of the kernel
    addresses = [0 if array is None else machine().simt_allocate(array.nbytes) for array in memory.buffers]
    given = [(i, array, at) for i, (array, at) in enumerate(zip(memory.buffers, addresses, strict=True)) if array is not None]
    try:
        for _, array, at in given:
            ctypes.memmove(at, array.tobytes(), array.nbytes)
        for step, source in zip(steps, sources, strict=True):
            launch(step, compiled(tuple(sorted(kernels[source])), source)[step.kernel], memory, addresses, seed)
        for i, array, at in given:
            memory.buffers[i] = np.frombuffer(ctypes.string_at(at, array.nbytes), np.uint8)
    finally:
        machine().simt_free()


def computed(
    problem, config, x, w, b=None, scale=None, residual=None, *, multiprocessors: int = 3, seeds: Sequence[int] = (0,), kept: bool = False, filter_last: bool = False,
    broken: tuple[str, str] | None = None, constants: bool = False
) -> np.ndarray:  # fmt: skip
    """What `config` computes, of arrays that are NCHW whatever the problem's layout: the same bits for every seed.

    `kept`: with a filter that was packed before. `filter_last`: with a filter whose second axis is last in memory. `constants`: by
    kernels that know the layer's constants.  `seeds`, `broken`: see :func:`run`.
    """
    program = program_of(problem, config, multiprocessors)
    program = background.with_constants(program) if constants else program
    stages = program.filter_last if filter_last else (*program.prepare, *program.steps) if kept else program.whole
    results = []
    for seed in seeds:
        memory = Memory(problem, program, x, w, b, scale, residual, filter_last)
        run(stages, memory, seed, broken=broken)
        results.append(memory.result(problem, result_type(problem, x).name))
    assert len({result.tobytes() for result in results}) == 1, "the order in which threads run changes the result"
    return results[0]
