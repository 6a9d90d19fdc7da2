"""Schedules of plans: the buffers they work on, the launches in their order, and scratch memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from pycuda_conv.engines.geometry import ceil, filter_strides
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import BufferSlice, Device, KernelLaunch

GRID_LIMIT = 2**31 - 1  # most blocks of a launch
STATIC_SHARED_BYTES = 48 * 1024  # what a block may declare statically on every GPU
#: KiB of shared memory that a block may have, by compute capability. Others have 99 from 8.0 on, and 48 before Volta.
SHARED_KIB = {(7, 0): 96, (7, 2): 96, (7, 5): 64, (8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}


def grid_refusal(blocks: int) -> str | None:
    """Why a launch can't have this many blocks, or None if it can."""
    return f"its grid is larger than {GRID_LIMIT:,} blocks" if blocks > GRID_LIMIT else None


#: Those of :func:`filter_strides`.
Strides4 = tuple[int, int, int, int]


class Buffer(IntEnum):
    """The buffers of a plan, in the order in which launchers get them."""

    INPUT = 0
    WEIGHT = 1
    BIAS = 2
    RESULT = 3
    WORKSPACE = 4
    PACKED = 5  # the packed filter
    SCALE = 6
    RESIDUAL = 7


INPUT, WEIGHT, BIAS, RESULT, WORKSPACE, PACKED, SCALE, RESIDUAL = Buffer
FINISH = BIAS, SCALE, RESIDUAL  # what finish.cuh reads
OPERANDS = INPUT, WEIGHT, *FINISH, RESULT


@dataclass(frozen=True)
class Moments:
    """Moments of a convolution's result, channel by channel, which it notes for a batch norm behind it."""

    sets: int  # each of `span` pixels, cut into slices of `per` pixels; the last slice may be shorter
    span: int
    per: int
    channels: int
    parts: int = 0  # where they lie in the workspace: [slice][mean, sum of squared deviations from it][channel]
    redone: int = 0  # where each block notes whether it computed some results once more: then these are not the final results' moments
    blocks: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the parts."""
        return 8 * self.sets * ceil(self.span, self.per) * self.channels


@dataclass(frozen=True)
class Schedule:
    """The launches of a plan.

    `prepare` packs the filter into a buffer of `filter_bytes`, and `steps` do the rest with `workspace_bytes` of scratch. `whole` does
    both. `filter_last`, if there is one, does the same as `whole` for a filter, or the gradient of one, whose second axis is last in
    memory.
    Steps follow one another; the launches of one step don't depend on each other. With `redoes`, later launches may write parts of
    the result once more, so a residual must not lie in the result's memory. `moments` says what is computed of the result, if that was
    asked for and the kernels can.
    """

    prepare: list[list[KernelLaunch]]
    steps: list[list[KernelLaunch]]
    whole: list[list[KernelLaunch]]
    workspace_bytes: int
    filter_bytes: int
    redoes: bool = False
    moments: Moments | None = None
    filter_last: list[list[KernelLaunch]] | None = None

    @classmethod
    def plain(cls, steps: list[list[KernelLaunch]], workspace_bytes: int = 0) -> Schedule:
        """Launches that read the filter as it is."""
        return cls([], steps, steps, workspace_bytes, 0)

    @classmethod
    def reading(cls, problem: ConvProblem, steps: Callable[[Strides4], list[list[KernelLaunch]]], last: bool = True) -> Schedule:
        """Launches that read the filter as it lies; `steps` makes them from its strides. With `last` also if its second axis is last."""
        made = cls.plain(steps(filter_strides(problem)))
        return replace(made, filter_last=steps(filter_strides(problem, True))) if last else made


def placed(where: BufferSlice) -> tuple[int, int]:
    """A place as its buffer and an offset in bytes."""
    return where if isinstance(where, tuple) else (where, 0)


class Arena:
    """Hands out pieces of a buffer."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer, self.used = buffer, 0

    def take(self, nbytes: int) -> tuple[int, int]:
        """A place of `nbytes` bytes: the buffer and an offset, as launches name it."""
        place = self.buffer, self.used
        self.used += ceil(nbytes, 256) * 256
        return place


def shared_limit(device: Device) -> int:
    """Bytes of shared memory that a block of a GPU may have."""
    return SHARED_KIB.get(device.capability, 99 if device.capability >= (8, 0) else 48) << 10


def check_shared(problem: ConvProblem, config: Any, device: Device, needed: int) -> None:
    """A ``ValueError`` if a block of `config` needs more bytes of shared memory than it may have on a GPU."""
    if device.backend == "cuda" and needed > shared_limit(device):
        raise ValueError(f"{config} can't run {problem}: it needs {needed:,} bytes of shared memory; a block has {shared_limit(device):,}")


def finish_constants(args: Any) -> dict[str, int]:
    """:attr:`KernelLaunch.layer` of a kernel whose arguments, `args`, include those of :func:`finish`."""
    names = "has_scale", "has_bias", "has_residual", "activation"
    return {"LAYER": 1} | {name.upper(): getattr(args, name) for name in names if name in args._fields}


def finishing(
    kernel: str, defines: dict[str, int], grid: int, threads: int, args: Any, buffers: tuple[BufferSlice, ...] = OPERANDS, **more: Any
) -> KernelLaunch:
    """The launch of a kernel that finishes its sums: by default from the operands as they lie to the result.

    `args` is its struct, or a tuple of those of some phases.
    """
    layer = finish_constants(args if hasattr(args, "_fields") else args[0])
    return KernelLaunch(kernel, defines, grid, threads, buffers, (), arguments=args, layer=layer, **more)
