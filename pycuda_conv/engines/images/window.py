"""Filters over images and volumes of one channel: launches of ``cu/images``. These are no engines: no convolution chooses them.

A :class:`Window` says how the arrays lie, which pixels a filter meets and what stands for those outside. :func:`separable` and
:func:`correlate` make a launch of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import lcm, prod
from typing import Any

import numpy as np

from pycuda_conv import borders
from pycuda_conv.engines.geometry import arguments, bits, ceil, divider
from pycuda_conv.engines.schedule import GRID_LIMIT, shared_limit
from pycuda_conv.engines.struct import kernel_struct
from pycuda_conv.engines.variants import VariantSet
from pycuda_conv.runtime.base import Device, KernelLaunch, Launcher

#: Threads of a block on a GPU. On OpenCL a block is one work-item.
THREADS = 128
MOST_VARIANTS = {"cuda": 69, "opencl": 28}  # texts, as an engine says it
#: Results of a step of such a block, or of a tile, in float32: a thread has 32 of a pass. In float64 it is half as many.
STEP_RESULTS = 4096
#: Sums of a block's shared memory on OpenCL, where the text fixes them.
OPENCL_ROOM = 32768
#: Sums behind the last row that four vectors may read, on OpenCL.
SLACK = 64
#: Shared memory of a block that leaves room for three others on a multiprocessor, for two, and for one.
SHARED_STEPS = (55 << 10, 74 << 10, 112 << 10)
#: Blocks of a multiprocessor, which the kernels' registers allow.
MOST_BLOCKS = 4
#: The most colours that lie behind one another in a row.
MOST_COLOURS = 8
#: The types of pixels, as the kernels know them.
CODES = {"float64": 64, "float32": 32, "uint8": 8, "int8": 9, "uint16": 10, "int16": 11}
BORDERS = ("nearest", "reflect", "mirror", "wrap", "constant")

WindowArguments = kernel_struct("window.cuh", "WindowArguments")


@dataclass(frozen=True)
class Window:
    """Where the pixels of an array lie, and those of a filter's result. Axes are slices (d), rows (h) and columns (w)."""

    input: str  # type of the pixels, of :data:`CODES`. Sums are float64 where this or the result is, else float32
    output: str  # and of the result's
    images: tuple[tuple[int, int, int], ...]  # groups of them, outermost first: how many, and elements from one to the next in x and in y
    size: tuple[int, int, int]  # slices, rows and columns
    result: tuple[int, int, int]
    x_strides: tuple[int, int]  # elements from slice to slice, and from row to row
    y_strides: tuple[int, int]
    colours: int = 1  # numbers of a column, which are neighbours: at most :data:`MOST_COLOURS`
    before: tuple[int, int, int] = (0, 0, 0)  # how far the filter reaches in front of each axis
    borders: tuple[str, str, str] = ("constant",) * 3  # what lies outside: of :data:`BORDERS`
    value: float = 0.0  # what a constant border has
    square: bool = False  # what is done with a sum: see ``cu/images/window.cuh``
    add: bool = False
    root: bool = False
    boxes: tuple[bool, bool] = (False, False)  # whether all taps along rows' axis, and along columns', are equal

    @property
    def sums(self) -> str:
        """The type of the sums."""
        return "float64" if "float64" in (self.input, self.output) else "float32"

    @property
    def sum_bytes(self) -> int:
        return 8 if self.sums == "float64" else 4


def border_numbers(border: str, n: int, before: int) -> dict[str, int]:
    """The five numbers that map indices of an axis of `n` into it, and whether indices outside stand for a value."""
    mode = {"reflect": "symmetric", "mirror": "reflect", "wrap": "circular"}.get(border, "replicate")
    return {**borders.alike(mode, n, before)._asdict(), "outside": int(border == "constant")}


@dataclass(frozen=True)
class Tile:
    """What a block has, in numbers, and its shared memory in sums. A block of a GPU's separable filter has `step` rows at a time."""

    p: int
    q: int
    halo_p: int
    halo_q: int
    pitch: int
    wide: int
    room: int
    step: int = 0

    @property
    def work(self) -> float:
        """Numbers that are loaded for each result."""
        return self.halo_p * self.halo_q / (self.p * self.q)


def _tile_of_cpu(p: int, q: int, colours: int, taps: tuple[int, int, int], dense: bool, box: bool) -> Tile:
    t, r, s = taps
    halo_p, halo_q = p + max(r - 1, 0), q + max(s - 1, 0) * colours
    pitch = ceil(halo_q, 8) * 8
    wide = ceil(q, 32) * 32 if s else pitch
    room = t * halo_p * pitch + t * r * s if dense else halo_p * (pitch + (wide if s else 0)) + r + s
    return Tile(p, q, halo_p, halo_q, pitch, wide, room + SLACK + box * p * wide)


def _strip(step: int, q: int, colours: int, taps: tuple[int, int, int], lanes: int) -> Tile:
    """A strip of a separable filter on a GPU. How long it is, the number of blocks decides."""
    terms, r, s = taps
    more, halo_q = max(r - 1, 0), q + max(s - 1, 0) * colours
    pitch, wide = (halo_q + 7) | 1, q + lanes
    room = terms * (ceil(r, 8) * 8 + ceil(s, 8) * 8 + (more + step) * wide) + (step * pitch if s else 0)
    return Tile(step, q, step + more, halo_q, pitch, wide, room, step)


def _tile_of_dense(p: int, q: int, colours: int, taps: tuple[int, int, int], lanes: int) -> Tile:
    """A tile of a filter that is not separable, on a GPU."""
    t, r, s = taps
    groups, columns = ceil(s, lanes), q // colours
    halo_p, pitch = p + r - 1, ceil(columns + groups * lanes + lanes, lanes) * lanes
    return Tile(p, q, halo_p, q + (s - 1) * colours, pitch, 0, t * (groups * r * lanes + colours * halo_p * pitch))


@lru_cache(maxsize=1024)
def tile_for(
    p: int, q: int, colours: int, taps: tuple[int, int, int], dense: bool, limits: tuple[int, ...], host: bool,
    box: bool = False, lanes: int = 4,
) -> Tile | None:
    """The tile for results of `p` rows of `q` numbers that loads the fewest numbers, or None if none fits.

    A smaller one of `limits`, the most sums of a block, counts before that.
    """
    unit = lcm(32, colours) if host else 8 * colours
    widths = {max(1, about // unit) * unit for about in (*([1024, 512] if box and taps[2] > 24 else []), 256, 128, 64, 32)} | {unit}
    widths = {min(width, ceil(q, unit) * unit) for width in widths}
    if host:
        heights = {min(height, p) for height in (64, 32, 16, 8, 4, 2, 1)}
        tiles = [_tile_of_cpu(height, width, colours, taps, dense, box) for height, width in product(heights, widths)]
    else:
        results = STEP_RESULTS * lanes // 4 // (2 if dense else 1)
        rows = 4 if dense else 8 * lanes if taps[2] else 8
        widest = max((width for width in widths if width <= max(128, unit)), default=unit)
        sizes = {(max(rows, results // width // rows * rows), width) for width in widths if width <= widest}
        if dense:
            sizes |= {(max(rows, height // 2 // rows * rows), width) for height, width in sizes}
        sizes = {(min(height, ceil(p, rows) * rows), width) for height, width in sizes}
        function = _tile_of_dense if dense else _strip
        tiles = [function(height, width, colours, taps, lanes) for height, width in sizes]
    for limit in limits:
        fitting = [tile for tile in tiles if tile.room <= limit]
        if fitting:
            return min(fitting, key=lambda tile: (tile.work, -tile.q, -tile.p))
    return None


def _limits(window: Window, device: Device) -> tuple[int, ...]:
    if device.backend != "cuda":
        return (OPENCL_ROOM,)
    return *(step // window.sum_bytes for step in SHARED_STEPS), shared_limit(device) // window.sum_bytes


def fits(window: Window, taps: tuple[int, int, int], dense: bool, device: Device) -> Tile | None:
    """The tile of a launch, or None where a block has too little memory."""
    (_, p, q), colours, lanes = window.result, window.colours, 16 // window.sum_bytes
    return tile_for(p, q * colours, colours, taps, dense, _limits(window, device), device.backend != "cuda", any(window.boxes), lanes)


def _strip_length(tile: Tile, p: int, others: int, taps: int, shared: int, device: Device) -> int:
    """Rows of a strip, of which there are `others` beside one another: long ones filter few rows twice, many of them fill the GPU."""
    resident = device.multiprocessors * max(1, min(MOST_BLOCKS, shared_limit(device) // (shared + 1024)))
    best = None
    for steps in range(1, ceil(p, tile.step) + 1):
        blocks = others * ceil(p, steps * tile.step)
        rows = min(steps * tile.step, p) + max(taps - 1, 0) / 2 + tile.step / 4
        cost = ceil(blocks, resident) * rows
        if best is None or cost < best[0]:
            best = cost, steps
    assert best is not None
    return best[1] * tile.step


def separable(window: Window, taps: tuple[int, int], device: Device) -> KernelLaunch:
    """A filter of `taps` along rows' axis (h) and columns' axis (w); 0 is no filter. Buffers: x, both filters, previous results | y.

    On a GPU, one of three kernels does it: see :func:`_kernel_for`.
    """
    return _launch("separable", window, (1, *taps), device)


def total(window: Window, taps: tuple[int, int, int], device: Device) -> KernelLaunch:
    """Several filters, as many as `taps` says first, of so many taps along rows' axis and columns', on a GPU: their sum, with `square` that
    of the squares, with `root` its root. Buffers: x, the filters, nothing | y.
    """
    return _launch("sum", window, taps, device)


def correlate(window: Window, taps: tuple[int, int, int], device: Device, skip: bool = False) -> KernelLaunch:
    """A filter of `taps` along all axes. Buffers: x, the filter as :func:`packed` lays it, previous results | y.

    With `skip`, NaN and infinities under taps of 0 do not spread. On the CPU they never do.
    """
    return _launch("correlate", window, taps, device, skip)


def packed(filters: np.ndarray, window: Window, device: Device) -> np.ndarray:
    """A dense filter [t, r, s] as the kernels read it, of the sums' type: on the CPU [t][s][r], on a GPU by groups of taps of a row."""
    t, r, s = filters.shape
    if device.backend != "cuda":
        return np.ascontiguousarray(filters.transpose(0, 2, 1), window.sums).ravel()
    lanes = 16 // window.sum_bytes
    groups = ceil(s, lanes)
    wide = np.zeros((t, r, groups * lanes), window.sums)
    wide[..., :s] = filters
    return np.ascontiguousarray(wide.reshape(t, r, groups, lanes).transpose(0, 2, 1, 3)).ravel()


#: How far a filter of walk.cu reaches to each side, and one of both axes at once; columns of a warp there; its warps on a multiprocessor.
REACHES, DENSE_REACHES = (1, 4), (1,)
WARP_COLUMNS, WARPS = 128, 16


def _reach_of_walk(window: Window, taps: tuple[int, int, int], dense: bool = False) -> int | None:
    """How far walk.cu has to reach for a filter along rows and columns, or None if the filter or the image is not for it."""
    t, r, s = taps
    before, w = window.before[2], window.size[2]
    if t > 1:
        return None
    if not r or not s or window.sums != "float32" or window.colours != 1 or window.result[2] != w or w % 4 or not _x_in_fours(window):
        return None
    reaches = DENSE_REACHES if dense else REACHES
    return next((reach for reach in reaches if max(r - reach - 1, before, s - 1 - before) <= reach and before >= 0), None)


def _x_in_fours(window: Window) -> bool:
    """Whether all rows of x begin at a multiple of four elements."""
    return _in_fours((*(step for _, step, _ in window.images), *window.x_strides), 4)


def _kernel_for(kernel: str, window: Window, taps: tuple[int, int, int], device: Device) -> str:
    """The kernel of a filter: a short one has another than others of its kind, and so has one along rows' axis alone."""
    if device.backend == "cuda" and kernel in ("separable", "correlate"):
        if _reach_of_walk(window, taps, kernel == "correlate") is not None:
            return "walk"
        if kernel == "separable" and taps[1] and not taps[2] and window.colours == 1 and not window.size[2] % 4 and _x_in_fours(window):
            return "columns"
    return kernel


def _warp_rows(p: int, others: int, halo: int, device: Device) -> int:
    """Rows of a warp's strip, of which there are `others` beside one another."""
    resident = device.multiprocessors * WARPS
    sizes = {ceil(p, count) for count in range(1, ceil(p, 16) + 1)} | {p}
    return min(sizes, key=lambda rows: (ceil(others * ceil(p, rows), resident) * (rows + halo + 8), rows))


def _tile_for(kernel: str, window: Window, taps: tuple[int, int, int], device: Device) -> Tile | None:
    if kernel == "walk":
        return Tile(0, WARP_COLUMNS, 0, 0, 0, 0, 0)
    if kernel == "columns":
        return Tile(8 * THREADS // 32, 32 * (16 // window.sum_bytes), 0, 0, 0, 0, ceil(taps[1], 8) * 8)
    return fits(window, taps, kernel == "correlate", device)


def _launch(kernel: str, window: Window, taps: tuple[int, int, int], device: Device, skip: bool = False) -> KernelLaunch:
    host, (d, h, w), (o, p, q), colours = device.backend != "cuda", window.size, window.result, window.colours
    dense, kernel = kernel == "correlate", _kernel_for(kernel, window, taps, device)
    tile = _tile_for(kernel, window, taps, device)
    if tile is None:
        raise ValueError(f"a filter of {taps} taps does not fit a block's memory")
    lanes, shared = 16 // window.sum_bytes, 0 if host else tile.room * window.sum_bytes
    counts, x_steps, y_steps = zip(*window.images, strict=True)
    across, reach = ceil(q * colours, tile.q), 0
    tile_p = tile.p
    if kernel == "walk":
        reach = _reach_of_walk(window, taps, dense) or 0
        tile_p = _warp_rows(p, prod(counts) * o * across, 2 * reach, device)
    elif not host and kernel in ("separable", "sum"):
        tile_p = _strip_length(tile, p, prod(counts) * o * across, taps[1], shared, device)
    args: dict[str, int] = {
        "tiles_p": ceil(p, tile_p), "tiles_q": across, "o": o, "middle": counts[1], "inner": counts[2],
        "d": d, "h": h, "w": w * colours, "p": p, "q": q * colours, "colours": colours, "t": taps[0], "r": taps[1], "s": taps[2],
        "tile_p": tile_p, "tile_q": tile.q, "halo_p": tile.halo_p, "halo_q": tile.halo_q, "pitch": tile.pitch, "wide": tile.wide,
        "step": tile.step, "by_eighth_q": divider(max(tile.q // 8, 1)), "by_quarter_q": divider(max(tile.q // lanes, 1)),
        "value": bits(window.value, window.sum_bytes), "square": window.square, "add": window.add, "root": window.root,
        "box_h": window.boxes[0], "box_w": window.boxes[1],
        "x_fours": _x_in_fours(window), "y_fours": _in_fours((*y_steps, *window.y_strides), lanes), "skip": skip,
        "x_d": window.x_strides[0], "x_h": window.x_strides[1], "y_d": window.y_strides[0], "y_h": window.y_strides[1],
    }  # fmt: skip
    for name, x_step, y_step in zip(("outer", "middle", "inner"), x_steps, y_steps, strict=True):
        args |= {f"x_{name}": x_step, f"y_{name}": y_step}
    for axis, n, before, border in zip("dhw", window.size, window.before, window.borders, strict=True):
        args[f"pad_{axis}"] = before
        args |= {f"{name}_{axis}": number for name, number in border_numbers(border, n, before).items()}
    blocks = prod(counts) * o * args["tiles_p"] * args["tiles_q"]
    args |= {"strips": blocks, "reach": reach, "dense": dense}
    if kernel == "walk":
        blocks = ceil(blocks, THREADS // 32)
    if blocks > GRID_LIMIT:
        raise ValueError(f"the images take {blocks:,} blocks, and a launch has at most {GRID_LIMIT:,}")
    extent = max(_extent(window, x_steps, window.x_strides, window.size), _extent(window, y_steps, window.y_strides, window.result))
    defines = _defines(window.input, window.output, int(extent >= 2**31), host)
    return KernelLaunch(
        f"images_{kernel}" + "_cpu" * host, defines, blocks, defines["THREADS"], (0, 1, 2, 3), (), f"images_{kernel}" + "_cpu" * host,
        shared=shared, arguments=arguments(WindowArguments, **args),
    )  # fmt: skip


def _in_fours(steps: Sequence[int], count: int) -> bool:
    """Whether all steps are multiples of so many elements."""
    return not any(step % count for step in steps)


def _extent(window: Window, steps: Sequence[int], strides: Sequence[int], size: Sequence[int]) -> int:
    """Elements from an array's first to its last."""
    outer = sum((count - 1) * step for (count, *_), step in zip(window.images, steps, strict=True))
    return outer + (size[0] - 1) * strides[0] + (size[1] - 1) * strides[1] + size[2] * window.colours


def _defines(input: str, output: str, wide: int, host: bool) -> dict[str, int]:
    defines = {
        "DTYPE": 64 if "float64" in (input, output) else 32, "INDEX_64": wide, "IN": CODES[input], "OUT": CODES[output],
        "THREADS": 1 if host else THREADS,
    }  # fmt: skip
    return defines | ({"ROOM": OPENCL_ROOM} if host else {})


@lru_cache(maxsize=1024)
def compiled(kernel: str, window: Window, taps: tuple[int, int, int], device: Any, skip: bool = False) -> Launcher:
    """The launch, compiled for `device`."""
    return device.schedule_launcher([[_launch(kernel, window, taps, device, skip)]])


def variants(device: Device) -> Iterator[VariantSet]:
    """One text for each pair of types."""
    host = device.backend != "cuda"
    narrow = tuple(CODES[name] for name in ("float32", "uint8", "int8", "uint16", "int16"))
    more = {"THREADS": (1 if host else THREADS,)} | ({"ROOM": (OPENCL_ROOM,)} if host else {})
    kernels = ("separable_cpu", "correlate_cpu") if host else ("separable", "walk", "columns", "correlate", "sum")
    for kernel in (f"images_{name}" for name in kernels):
        choices = {"DTYPE": (32,), "INDEX_64": (0, 1), "IN": narrow, "OUT": narrow, **more}
        yield VariantSet(kernel, choices, lambda defines: defines["IN"] == defines["OUT"] or 32 in (defines["IN"], defines["OUT"]))
        if kernel != "images_walk":
            yield VariantSet(kernel, {**choices, "DTYPE": (64,), "IN": (64,), "OUT": (64,)})
