"""First calls of networks in other processes, several at a time, before ``bench --models`` measures.

What takes long in a first call is compiling, by this package's compilers and by torch's. Both keep on the disk what they have made. So the
process that measures finds it there, and compilers of several networks work side by side. Each process is
``python -m pycuda_conv.tools.ahead WHAT NETWORK IMAGES MODE PLACE SEED QUICK NAMED``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pycuda_conv.tools.terminal import require, track

if TYPE_CHECKING:
    from pycuda_conv.tools.model_rows import Case

CORES = 4  # for one process
MOST = 8  # processes: each keeps a network and its compiled code on the GPU


def first_calls(cases: Sequence[Case], place: str, seed: int, quick: bool, named: bool, end: float) -> None:
    """Make the first calls of all cases in processes of their own, until the time `end` of ``time.perf_counter``.

    What a process can't do, the case itself tells.
    """
    waiting = [case for case in cases if case.what != "loss curve"]
    running: list[subprocess.Popen[bytes]] = []
    most = max(1, min(MOST, (os.cpu_count() or CORES) // CORES))
    options = place, str(seed), str(int(quick)), str(int(named))
    try:
        for case in track(waiting, str):
            command = [sys.executable, "-m", __name__, case.what, case.network, str(case.images), case.mode, *options]
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            _wait(running, most - 1, end)
            if time.perf_counter() > end:
                break
        _wait(running, 0, end)
    finally:
        for process in running:
            process.kill()
            process.wait()


def _wait(running: list[subprocess.Popen[bytes]], most: int, end: float) -> None:
    """Wait until at most so many run, or until the `end`."""
    while len(running) > most and time.perf_counter() < end:
        time.sleep(0.05)
        running[:] = [process for process in running if process.poll() is None]


def child(what: str, network: str, images: str, mode: str, place: str, seed: str, quick: str, named: str) -> None:
    """The first calls of all sides of a case."""
    from pycuda_conv.runtime import get_device
    from pycuda_conv.tools import models, rivals
    from pycuda_conv.tools.model_rows import Case

    torch = require("torch")
    torch.backends.cudnn.benchmark = True
    case, device = Case(what, network, int(images), mode), get_device(place)
    with rivals.arithmetic(torch, mode), torch.set_grad_enabled(what == "trained"):
        if what == "evaluated":
            step_of, _ = models.evaluation_of(torch, case, place, int(seed))
        else:
            step_of, _, (base, given, _) = models.training_of(torch, case, place, int(seed))
            models.compile_gradients(torch, case, base, given, device)
        rivals.first_calls(torch, models.sides_of(case, quick == "1", named == "1"), step_of, device)


if __name__ == "__main__":
    child(*sys.argv[1:])
