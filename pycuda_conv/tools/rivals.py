"""The ways to run a network that ``bench --models`` compares: this package's, and torch's."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pycuda_conv.runtime import Device
from pycuda_conv.tools.oracle import torch_precision
from pycuda_conv.tools.plans import settle
from pycuda_conv.tools.report import median
from pycuda_conv.tools.suite import MODES

log = logging.getLogger("pycuda_conv")

FIRST_STEPS = 2  # the last of these losses is compared: it depends on all gradients, and rounding has not yet grown
EARLY = 10  # calls that are timed one by one before a side is settled


@dataclass(frozen=True)
class Side:
    """One way to run a network: its name, whether it is ours, the mode of ``torch.compile``, and whether torch may round to TF32."""

    name: str
    ours: bool = False
    compiled: str | None = None
    tf32: bool = False

    @property
    def by_inductor(self) -> bool:
        """Whether torch's compiler compiles it, which takes long."""
        return self.compiled not in (None, "light")

    @property
    def captures(self) -> bool:
        """Whether it makes CUDA graphs itself, so that none can be captured of its calls."""
        return self.compiled in ("reduce-overhead", "max-autotune")


LIGHT, INDUCTOR, EAGER, COMPILED = "light", "inductor", "torch", "torch.compile"
OURS_REDUCED, REDUCED, AUTOTUNED = "ours, reduce-overhead", "torch.compile, reduce-overhead", "torch.compile, max-autotune"
EAGER_TF32, COMPILED_TF32 = "torch, TF32", "torch.compile, TF32"


def sides(mode: str, quick: bool, named: bool = False) -> list[Side]:
    """The sides of a network in a mode: ours in light mode and in inductor's, torch eager, and torch.compile's modes.

    Torch rounds float32 convolutions to TF32 unless it is told otherwise, so in fp32 its default is a rival too. `quick` leaves out what
    inductor compiles. "max-autotune", which takes minutes, is for networks that were `named`.
    """
    found = [Side(LIGHT, True, "light"), Side(EAGER)]
    if not quick:
        found += [Side(INDUCTOR, True, "default"), Side(COMPILED, compiled="default")]
        found += [Side(OURS_REDUCED, True, "reduce-overhead"), Side(REDUCED, compiled="reduce-overhead")]
        found += [Side(AUTOTUNED, compiled="max-autotune")] if named else []
    if mode.startswith("fp32"):
        found += [Side(EAGER_TF32, tf32=True)]
        found += [] if quick else [Side(COMPILED_TF32, compiled="default", tf32=True)]
    return found


def dtype_of(mode: str) -> str:
    """The dtype of a mode's arrays."""
    return str(MODES[mode].get("dtype", "float32"))


def precision_of(mode: str) -> Any:
    """The arithmetic of a mode for float32."""
    return MODES[mode].get("precision", "fp32")


def format_of(torch: Any, mode: str, axes: int = 4) -> Any:
    """The memory format of a mode's arrays of so many axes; torch has none but C order for signals."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(axes)
    return torch.contiguous_format if last is None or MODES[mode].get("layout") != "NHWC" else last


def laid_out(torch: Any, model: Any, mode: str) -> Any:
    """The network with its filters in a mode's memory format."""
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous(memory_format=format_of(torch, mode, parameter.dim()))
    return model


@contextmanager
def arithmetic(torch: Any, mode: str) -> Iterator[None]:
    """Let torch compute float32 convolutions and matrix products as `mode` says; our networks use torch's matrix products too."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision_of(mode) == "tf32" else "highest")
    try:
        with torch_precision(precision_of(mode)):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def made(torch: Any, model: Any, side: Side, mode: str) -> Any:
    """A copy of the network as the side runs it."""
    model = copy.deepcopy(model)
    if side.ours:
        from pycuda_conv.nn import backend

        return torch.compile(model, backend=backend, options={"mode": side.compiled, "precision": precision_of(mode)})
    if side.compiled:
        return torch.compile(model, mode=None if side.compiled == "default" else side.compiled)
    return model


def _in_tf32(torch: Any, call: Callable[[], Any]) -> Callable[[], Any]:
    def made() -> Any:
        with arithmetic(torch, "tf32"):
            return call()

    return made


@dataclass
class Begun:
    """The sides of a case after their first calls, by name.

    Attributes
    ----------
    calls : dict of str to callable
        The sides that run, settled.
    failed : dict of str to str
        Why the others do not.
    first_s, early_ms : dict of str to float
        Seconds of the first call, and the median of calls 2 to 10 in milliseconds, each waited for.
    """

    calls: dict[str, Callable[[], Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    first_s: dict[str, float] = field(default_factory=dict)
    early_ms: dict[str, float] = field(default_factory=dict)


def begin(
    torch: Any, chosen: Sequence[Side], step_of: Callable[[Side], Callable[[], Any]], device: Device,
    note: Callable[[str, int, Any], None] = lambda side, number, result: None,
) -> Begun:
    """Make each side's calls until it is settled; `note` gets the results of the first two. A rival that fails is left out."""
    found, wait = Begun(), torch.cuda.synchronize
    for side in chosen:
        try:
            call = step_of(side)
            call = _in_tf32(torch, call) if side.tf32 else call
            taken = []
            for number in range(EARLY):
                started = time.perf_counter()
                result = call()
                wait()
                taken.append(time.perf_counter() - started)
                if number < FIRST_STEPS:
                    note(side.name, number, result)
                del result
            if side.ours:
                settle(call, wait, device.all_compiled)  # type: ignore[attr-defined]  # CUDA's
        except Exception as error:  # compilers may raise anything
            if side.name in (LIGHT, EAGER):
                raise
            found.failed[side.name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            log.warning("%s failed, so it is left out: %s", side.name, error)
            continue
        found.calls[side.name], found.first_s[side.name], found.early_ms[side.name] = call, taken[0], median(taken[1:]) * 1e3
    return found


def first_calls(torch: Any, chosen: Sequence[Side], step_of: Callable[[Side], Callable[[], Any]], device: Device) -> None:
    """Make each side's first calls, for the sake of what compilers leave on the disk."""
    for side in chosen:
        call = step_of(side)
        call = _in_tf32(torch, call) if side.tf32 else call
        call()
        if side.name == LIGHT:  # the other sides of ours have the same kernels
            settle(call, torch.cuda.synchronize, device.all_compiled)  # type: ignore[attr-defined]  # CUDA's


def convolutions_share(torch: Any, call: Callable[[], Any]) -> float:
    """The part of a call's GPU time that torch's convolutions take; NaN if torch's profiler does not say it."""
    from torch.profiler import ProfilerActivity, profile

    call()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    events = seen.key_averages()
    kernels = [event for event in events if event.device_type != torch.autograd.DeviceType.CPU]  # operators have their times too
    whole = sum(event.self_device_time_total for event in kernels)
    own = sum(event.device_time_total for event in events if event.key == "aten::convolution")
    return own / whole if whole else math.nan
