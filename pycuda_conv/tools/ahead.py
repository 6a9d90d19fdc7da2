"""First calls of networks in other processes, several at a time, before ``bench --models`` measures.

What takes long in a first call is compiling, by this package's compilers and by torch's. Both keep on the disk what they have made. So the
process that measures finds it there, and compilers of several networks and sides work at once. Each process is
``python -m pycuda_conv.tools.models WHAT NETWORK IMAGES MODE PLACE SEED SIDE ...``.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pycuda_conv.runtime.workers import cores
from pycuda_conv.tools.terminal import track

if TYPE_CHECKING:
    from pycuda_conv.tools.model_rows import Case
    from pycuda_conv.tools.rivals import Side

CHILD = "pycuda_conv.tools.models"
CORES = 3  # for one process
MOST = 10  # processes: each keeps a network and its compiled code on the GPU


@dataclass(frozen=True)
class Part:
    """The sides of a case whose first calls one process makes."""

    case: Case
    sides: tuple[Side, ...]

    def __str__(self) -> str:
        return f"{self.case}: {', '.join(side.name for side in self.sides)}"


def parts(cases: Sequence[tuple[Case, Sequence[Side]]]) -> list[Part]:
    """What to do in processes of their own: a side that inductor compiles, or all the others. What all rows need comes first."""
    quick, slow = [], []
    for case, sides in cases:
        quick.append(Part(case, tuple(side for side in sides if not side.by_inductor)))
        slow += [(i, Part(case, (side,))) for i, side in enumerate(side for side in sides if side.by_inductor)]
    return quick + [part for _, part in sorted(slow, key=lambda one: one[0])]


def first_calls(cases: Sequence[tuple[Case, Sequence[Side]]], place: str, seed: int, end: float) -> set[tuple[Case, str]]:
    """Make the first calls of these sides in processes of their own, until the time `end` of ``time.perf_counter``.

    Returns
    -------
    set of (Case, str)
        The sides, by their names, whose first calls were made. Why others failed, the case itself tells.
    """
    ready: set[tuple[Case, str]] = set()
    running: list[tuple[Part, subprocess.Popen[bytes]]] = []
    most = max(1, min(MOST, cores() // CORES))

    def wait(count: int) -> None:
        while len(running) > count and time.perf_counter() < end:
            time.sleep(0.05)
            done = [(part, process) for part, process in running if process.poll() is not None]
            running[:] = [one for one in running if one not in done]
            ready.update((part.case, side.name) for part, process in done if process.returncode == 0 for side in part.sides)

    try:
        for part in track(parts(cases), str):
            case = part.case
            command = [sys.executable, "-m", CHILD, case.what, case.network, str(case.images), case.mode, place, str(seed)]
            process = subprocess.Popen(
                [*command, *(side.name for side in part.sides)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            running.append((part, process))
            wait(most - 1)
            if time.perf_counter() > end:
                break
        wait(0)
    finally:
        for _, process in running:
            process.kill()
            process.wait()
    return ready
