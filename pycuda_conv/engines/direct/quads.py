"""Convolutions of few channels in NCHW, float32, on plain cores: ``cu/direct/quads.cu``.

A thread keeps quads, four neighbouring pixels, of eight channels in registers.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from pycuda_conv.engines.base import Config, fastest
from pycuda_conv.engines.geometry import arguments, by_axis, ceil, filter_strides
from pycuda_conv.engines.mma.common import SHARED_BYTES, unsupported
from pycuda_conv.engines.schedule import BIAS, GRID_LIMIT, INPUT, RESIDUAL, RESULT, SCALE, WEIGHT, Schedule, finish, finish_constants
from pycuda_conv.engines.struct import kernel_struct
from pycuda_conv.engines.texts import TextFamily
from pycuda_conv.problem import ConvProblem
from pycuda_conv.runtime.base import Device, KernelLaunch

__all__ = [
    "CONFIGS", "LAYOUTS", "MOST_TEXTS", "TENSOR_CORES", "Quads", "choose", "configs", "filter_key", "refusal", "schedule", "sum_order",
    "texts", "time", "unsupported",
]  # fmt: skip

WARPS, LANES = 4, 32  # warps of a block, lanes of a warp
CHANNELS, PAD = 8, 4  # channels of a thread; numbers behind a tap's channels in shared memory
#: The strides along w that have a text, by the taps along w; and those worth choosing: no other was best for any of 28,000 random problems.
STRIDES = {
    1: (1,), 2: (1, 2), 3: (1, 2), 4: (1, 2, 4), 5: (1, 2), 7: (1, 2, 4), 8: (1, 2, 4, 8), 10: (1, 5), 11: (1, 2, 4), 14: (2,),
    16: (1, 2, 4, 8),
}  # fmt: skip
CHOSEN = {1: (1,), 3: (1, 2), 4: (1, 2), 5: (1, 2), 7: (1, 2), 8: (1, 2), 10: (5,), 11: (1, 2), 14: (2,), 16: (2, 8)}
MOST_BUFFER = 24 * 1024  # bytes, if a buffer has more than one plane
MOST_CHANNELS = 64  # more input channels are left to other engines


@dataclass(frozen=True)
class Quads(Config):
    """QUADS of pixels of a thread of ``direct/quads.cu``, and CHANNEL_WARPS of a block: warps with channels of their own."""

    QUADS: int = 2
    CHANNEL_WARPS: int = 4


CONFIGS = (Quads,)
LAYOUTS = ("NCHW",)
TENSOR_CORES = False
MOST_TEXTS = {"cuda": 20}


DirectQuadsArguments = kernel_struct("direct_quads", "DirectQuadsArguments")


# ---- what runs


def why_not(problem: ConvProblem) -> str | None:
    """Why the engine can't run `problem` whatever the tile, or None if it can."""
    if problem.layout != "NCHW" or problem.direction not in ("fprop", "dgrad") or problem.dtype != "float32":
        return "it takes float32 arrays in NCHW"
    if problem.is_empty:
        return "there is nothing to compute"
    if problem.direction == "dgrad" and problem.stride != (1, 1, 1):
        return "it computes gradients of convolutions without stride"
    if problem.stride[2] not in STRIDES.get(problem.filter_size[2], ()) or problem.dilation[2] != 1:
        return "it takes the taps and strides along w that have a text, without dilation"
    if problem.largest_array >= 2**31:
        return "it counts elements in 32 bits"
    return None


def refusal(problem: ConvProblem, config: Quads) -> str | None:
    """Why `config` can't run `problem`, or None if it can."""
    reason = why_not(problem)
    if reason:
        return reason
    if config.QUADS not in (1, 2) or config.CHANNEL_WARPS not in (1, 2, 4):
        return "a thread has one or two quads, and 1, 2 or 4 warps of a block have channels of their own"
    tile = _tile(problem, config)
    if tile.shared > SHARED_BYTES:
        return f"the filter and a patch of the input take {tile.shared:,} bytes of shared memory; a block has {SHARED_BYTES:,}"
    if tile.blocks > GRID_LIMIT:
        return f"it has more than {GRID_LIMIT:,} blocks"
    return None


class _Tile(NamedTuple):
    """The tile of a configuration."""

    rows: int
    quads: int
    tiles_w: int
    tiles_h: int
    group_tiles: int
    blocks: int
    at_once: int  # planes of a buffer
    planes: int
    patch_rows: int
    patch_columns: int
    phase: int  # numbers of shared memory of a phase, a row, the filter's planes, a buffer
    pitch: int
    filter: int
    buffer: int
    shared: int  # bytes


@lru_cache(maxsize=1024)  # the planner asks for it several times
def _tile(problem: ConvProblem, config: Quads) -> _Tile:
    """The tile that leaves the fewest of a block's quads idle, and among equals loads the least."""
    (t, r, s), (o, p, q), groups = problem.filter_size, problem.result_size, problem.groups
    stride_h, stride_w, dilation_h = problem.stride[1], problem.stride[2], problem.dilation[1]
    most = config.QUADS * WARPS * LANES // config.CHANNEL_WARPS
    across, channels = ceil(q, 4), CHANNELS * config.CHANNEL_WARPS
    group_tiles, planes = ceil(problem.result_channels // groups, channels), problem.operand_channels // groups * t

    def shape(tiles_w: int) -> tuple[int, int, int, int, int, int, int]:
        """The cost, number and size of tiles if `tiles_w` of them lie side by side."""
        quads = ceil(across, tiles_w)
        tiles_h = ceil(p, min(most // quads, p))
        rows = ceil(p, tiles_h)
        patch_rows, patch_columns = (rows - 1) * stride_h + (r - 1) * dilation_h + 1, (4 * quads - 1) * stride_w + s
        cost = tiles_w * tiles_h * (most * 4 * r * s * CHANNELS + LOADED * patch_rows * patch_columns)
        return cost, tiles_w, tiles_h, rows, quads, patch_rows, patch_columns

    fewest = ceil(across, most)
    _, tiles_w, tiles_h, rows, quads, patch_rows, patch_columns = min(map(shape, range(fewest, min(across, fewest + MORE) + 1)))
    phase = 4 * (quads + ceil(ceil(s, stride_w) - 1, 4))  # a quad's last vector may lie past the row's end
    pitch = min(s, stride_w) * phase
    of_plane = r * s * (channels + PAD), patch_rows * pitch
    at_once = max(1, min(planes, MOST_BUFFER // (4 * sum(of_plane))))
    buffers = 1 if at_once == planes else 2
    buffer = at_once * sum(of_plane)
    blocks = problem.N * o * tiles_h * tiles_w * group_tiles * groups
    turned = 0 if q % 4 == 0 else WARPS * config.QUADS * LANES * 4
    return _Tile(
        rows, quads, tiles_w, tiles_h, group_tiles, blocks, at_once, planes, patch_rows, patch_columns, phase, pitch,
        at_once * of_plane[0], buffer, 4 * max(buffers * buffer, turned),
    )  # fmt: skip


#: The cost of a number of the patch, in multiplications of a thread: the cheapest tile of a block is taken. And how many more tiles along w
#: than necessary are tried.
LOADED, MORE = 6, 15


# ---- launches


def schedule(problem: ConvProblem, config: Quads, device: Device, with_moments: bool = False) -> Schedule:
    """The launch of `config`, which can run `problem`; it notes no moments."""
    tile, forward = _tile(problem, config), problem.direction == "fprop"
    (t, r, s), (depth, height, width), (o, p, q) = problem.filter_size, problem.operand_size, problem.result_size
    reach = [(n - 1) * d for n, d in zip(problem.filter_size, problem.dilation, strict=True)]
    # dgrad is a convolution with the taps in reverse
    low = [-pad if forward else pad - far for pad, far in zip(problem.padding_before, reach, strict=True)]
    w_group, w_k, w_c = filter_strides(problem)
    taps = t * r * s
    told = arguments(
        DirectQuadsArguments, k_tiles=tile.group_tiles * problem.groups, tiles_w=tile.tiles_w, tiles_h=tile.tiles_h, out_d=o,
        groups=problem.groups, group_tiles=tile.group_tiles, cg=problem.operand_channels // problem.groups,
        kg=problem.result_channels // problem.groups, rows=tile.rows, quads=tile.quads, channel_shift=config.CHANNEL_WARPS.bit_length() - 1,
        planes=tile.planes, at_once=tile.at_once, slices=t, taps_r=r, taps=r * s, w_group=w_group, w_k=w_k, w_c=w_c,
        tap_first=0 if forward else taps - 1, tap_step=1 if forward else -1, patch=tile.patch_rows * tile.patch_columns,
        patch_columns=tile.patch_columns, phase=tile.phase, pitch=tile.pitch, room=tile.patch_rows * tile.pitch, filter=tile.filter,
        buffer=tile.buffer, depth=depth, height=height, width=width, p=p, q=q, stride_d=problem.stride[0], stride_h=problem.stride[1],
        **by_axis("low_", low), dilation_d=problem.dilation[0], dilation_h=problem.dilation[1], wide=int(q % 4 == 0), **finish(problem),
    )  # fmt: skip
    defines = {"S": s, "STRIDE": problem.stride[2], "QUADS": config.QUADS}
    buffers = INPUT, WEIGHT, BIAS, SCALE, RESIDUAL, RESULT
    launch = KernelLaunch(
        "direct_quads", defines, tile.blocks, WARPS * LANES, buffers, (), shared=tile.shared, arguments=told, layer=finish_constants(told)
    )
    return Schedule.plain([[launch]])


def filter_key(problem: ConvProblem, config: Quads) -> None:
    """None: the kernel reads the filter as it is."""


def sum_order(problem: ConvProblem, config: Quads) -> Hashable:
    """The same for all tiles: they sum planes, rows of taps, phases and taps in one order."""
    return Quads


def texts(device: Device) -> Iterator[TextFamily]:
    """A text for each number of taps and stride along w, and each number of quads."""
    for taps, strides in CHOSEN.items():
        yield TextFamily("direct_quads", {"S": (taps,), "STRIDE": strides, "QUADS": _quads(taps)})


# ---- the choice


def _quads(taps: int) -> tuple[int, ...]:
    """QUADS to choose from: two for more than three taps, which share loads."""
    return (1, 2) if taps <= 3 else (2,)


# Fitted to 223 times on an H200: root mean square of the error 13%.
CLOCK = 1700.0  # cycles a microsecond
BEGIN = 2.14  # microseconds of a launch with its first loads
MEMORY, WRITTEN = 3.8e6, 2.17e6  # bytes a microsecond; those of the result
WAIT = 1.39  # microseconds that a block waits for a buffer
LOAD_CYCLES = 69.1  # cycles of a multiprocessor for 128 numbers of a patch, and for each plane's copies of them
COPY_CYCLES = 30.0
STORE_CYCLES = 14.5  # cycles of a multiprocessor for a block's quads of a channel
RESIDUAL_CYCLES = 336.0  # the same, to add a residual
SINGLE_CYCLES = 116.0  # the same, if numbers are stored one by one, by neighbouring lanes
FILLED = 0.174  # n blocks of a multiprocessor take n to this power times as long as one alone, which does not fill it
BUSY = 1.14  # relative time of the multiplications beside a multiprocessor's peak


def configs(problem: ConvProblem, device: Device) -> Iterator[Quads]:
    """The configurations worth comparing for `problem`; none if it has many channels."""
    if problem.operand_channels // problem.groups > MOST_CHANNELS or why_not(problem):
        return
    if problem.stride[2] not in CHOSEN.get(problem.filter_size[2], ()):
        return
    written = problem.result_channels // problem.groups
    for warps in (1, 2, 4):
        if warps == 1 or CHANNELS * (warps // 2) < written:
            for quads in _quads(problem.filter_size[2]):
                config = Quads(quads, warps)
                if refusal(problem, config) is None:
                    yield config


def time(problem: ConvProblem, config: Quads, device: Device) -> float:
    """Microseconds that `config` should take: the multiplications of the fullest multiprocessor, or its blocks' waits, or memory."""
    tile, (_, r, s), stride = _tile(problem, config), problem.filter_size, problem.stride[2]
    vectors = sum(1 + (ceil(s - phase, stride) + 2) // 4 for phase in range(min(s, stride)))
    multiplying = config.QUADS * 4 * CHANNELS * s  # cycles of a row of taps: of the plain cores, and below of shared memory
    reading = 4 * WARPS * (config.QUADS * vectors + CHANNELS // 4 * s)
    products = tile.planes * r * max(multiplying, reading) * BUSY
    patch, taps = ceil(tile.patch_rows * tile.patch_columns, 128), ceil(r * s * CHANNELS * config.CHANNEL_WARPS, 128)
    buffers = ceil(tile.planes, tile.at_once)
    loading = buffers * patch * LOAD_CYCLES + tile.planes * (patch + 2 * taps) * COPY_CYCLES
    channels = min(CHANNELS, problem.result_channels // problem.groups)
    storing = CHANNELS * STORE_CYCLES + (channels * RESIDUAL_CYCLES if problem.has_residual else 0)
    if problem.result_size[2] % 4 and not problem.has_residual:  # numbers are stored one by one
        filled = tile.rows * tile.quads * config.CHANNEL_WARPS / (config.QUADS * WARPS * LANES)
        storing += channels * filled * SINGLE_CYCLES
    each = products + loading + config.QUADS * storing
    resident = min(5 if config.QUADS == 1 else 4, 224 * 1024 // (tile.shared + 1024))
    together = ceil(tile.blocks, device.multiprocessors)
    alone = each * min(together, resident) ** FILLED / CLOCK + (buffers + problem.has_residual) * WAIT
    us = max(together * each / CLOCK, ceil(together, resident) * alone)
    read, written = math.prod(problem.operand_size) * problem.operand_channels, math.prod(problem.result_size) * problem.result_channels
    moved = 4 * problem.N * ((read + written * problem.has_residual) / MEMORY + written / WRITTEN)
    return BEGIN + max(us, moved)


def choose(problem: ConvProblem, device: Device) -> tuple[float, Quads] | None:
    """The configuration that should be the fastest, behind the microseconds it should take; None where none runs."""
    return fastest((time(problem, config, device), config) for config in configs(problem, device))
